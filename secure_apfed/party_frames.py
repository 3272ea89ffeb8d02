"""Frames of all parties, of any library that narwhals reads, checked and written as their files.

Run by: who has all parties' frames in one process. What is wrong is told by party and column,
never by a person's ID; the files are what a run with `dataset: tables` reads.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import narwhals.stable.v2 as nw
import numpy as np
import pandas as pd
from pyarrow import ArrowException

from apfed_protocols.id_kinds import id_texts, require_comparable
from apfed_protocols.ids import IdNormalisation
from secure_apfed.data.cells import cell_text
from secure_apfed.errors import DataError
from secure_apfed.files import make_private
from secure_apfed.names import column_name

__all__ = ["as_pandas", "checked_frames", "labels_by_text", "names_of_files", "write_frames"]


def as_pandas(frame: Any, *, party: str) -> pd.DataFrame:
    """The same rows as a pandas frame with columns named by text; the caller's is left alone.

    Raises:
        DataError: no frame of a library that narwhals reads, or two columns of one name.
    """
    try:
        rows: pd.DataFrame = nw.from_native(frame, eager_only=True).to_pandas()
    except TypeError as error:
        lazy = "; collect a lazy frame first" if hasattr(frame, "collect") else ""
        raise DataError(
            f"{party}: expected a frame of pandas, polars or pyarrow, got "
            f"{type(frame).__name__}{lazy}"
        ) from error
    except ValueError as error:  # narwhals' DuplicateError is one
        raise DataError(
            f"{party}: its frame has several columns of one name; give each a name of its own"
        ) from error
    named: pd.DataFrame = rows.set_axis(list(map(column_name, rows.columns)), axis=1)
    if not named.columns.is_unique:  # 1 and "1", or one name in two forms of Unicode
        raise DataError(
            f"{party}: its frame has several columns of one name; give each a name of its own"
        )
    if isinstance(frame, pd.DataFrame) and frame.index.name is not None:
        named = named.reset_index() if str(frame.index.name) not in named.columns else named
    return named


def checked_frames(
    active: Any, passives: Mapping[str, Any], *, name: str, id_column: str, label: str,
    rules: IdNormalisation | None = None,
) -> dict[str, pd.DataFrame]:  # fmt: skip
    """By party, the active's first, a pandas frame whose labels can be used, and IDs as texts.

    Args:
        active: the frame with the labels.
        passives: by name, frames without labels.
        name: of the active.
        id_column: in all of them, a column or the index's name.
        label: the active's column of labels.
        rules: how IDs are compared; None: the defaults.

    Raises:
        DataError: names the party, the column, what was expected, and what to do.
    """
    if name in passives:
        raise DataError(f"{name}: the active is called so, and a passive, too; rename the passive")
    frames = {one: as_pandas(frame, party=one) for one, frame in {name: active, **passives}.items()}
    given = {name: active, **passives}
    ids = {one: _ids(frame, given[one], id_column, party=one) for one, frame in frames.items()}
    normal = (rules or IdNormalisation()).text
    require_comparable({one: map(normal, texts) for one, texts in ids.items()})
    frames = {one: frame.assign(**{id_column: ids[one]}) for one, frame in frames.items()}
    for one in passives:
        if label in frames[one].columns:
            raise DataError(
                f"{one}: its column {label!r} is called like the labels of {name}, which a "
                "passive must not train on; drop it or rename it"
            )
    _check_labels(frames[name], label, party=name)
    return frames


def labels_by_text(frame: pd.DataFrame, label: str) -> dict[str, Any]:
    """The labels as the frame has them, by the texts that name classes in a run."""
    found = frame[label].dropna().unique().tolist()
    # Of texts that differ in surrounding blanks, the one without stands for all.
    return {cell_text(one): one for one in sorted(found, key=lambda one: cell_text(one) == one)}


def names_of_files(frames: Mapping[str, pd.DataFrame]) -> dict[str, str]:
    """By party, what `write_frames` calls its file."""
    return {party: f"party-{place}.parquet" for place, party in enumerate(frames)}


def write_frames(frames: Mapping[str, pd.DataFrame], folder: Path) -> None:
    """Write each as a Parquet file in a folder that its owner alone may enter.

    Raises:
        DataError: a column whose cells are of several kinds, such as texts and numbers; nothing
            is written.
    """
    for party, frame in frames.items():
        for column in frame.columns:
            kind = pd.api.types.infer_dtype(frame[column], skipna=True)
            if kind.startswith("mixed"):
                raise DataError(
                    f"{party}: column {column!r} holds cells of several kinds ({kind}); make them "
                    "all numbers or all text, as with .astype(str), or drop the column"
                )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    make_private(folder)
    for party, name in names_of_files(frames).items():
        try:
            frames[party].to_parquet(folder / name, index=False)
        except (ArrowException, ValueError) as error:
            raise DataError(
                f"{party}: its frame cannot be written as Parquet ({error}); drop or convert the "
                "column"
            ) from error


def _ids(frame: pd.DataFrame, given: Any, column: str, *, party: str) -> list[str]:
    """The texts of its IDs, complete and distinct ones."""
    if not len(frame):
        raise DataError(f"{party}: its frame has no rows")
    if column not in frame.columns:
        raise DataError(
            f"{party}: it has no column {column!r} of IDs; its columns are "
            f"{', '.join(frame.columns[:10])}: name another as id, or add it"
        )
    own = nw.from_native(given, eager_only=True)  # pandas makes moments of days
    cells = own[column].to_native() if column in own.columns else frame[column]
    texts = id_texts(cells, party=party, what=f"column {column!r}", strip=True, key="id")
    repeated = pd.Series(texts)
    again = repeated.duplicated(keep=False)
    if again.any():
        first = np.flatnonzero(repeated == repeated[again].iloc[0])
        raise DataError(
            f"{party}: {repeated[again].nunique()} IDs of column {column!r} occur more than once, "
            f"the first in rows {', '.join(map(str, first[:5]))} (from 0); keep one row of each"
        )
    return texts


def _check_labels(frame: pd.DataFrame, label: str, *, party: str) -> None:
    if label not in frame.columns:
        raise DataError(
            f"{party}: it has no column {label!r} of labels; its columns are "
            f"{', '.join(frame.columns[:10])}: name another as label"
        )
    found = frame[label].dropna().unique()
    if len(found) < 2:
        what = f"of one class, {found[0]!r}" if len(found) else "empty"
        raise DataError(
            f"{party}: all labels of column {label!r} are {what}; two classes are needed"
        )

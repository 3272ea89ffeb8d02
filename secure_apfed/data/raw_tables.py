"""One party's own file as it was read: IDs, feature columns and labels, nothing encoded yet.

Run by: that party. IDs are compared as text, "007" and "7" differ.
"""

import difflib
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from apfed_protocols.ids import EMPTY, JOINT, id_texts
from secure_apfed.data.catalogue import labels_are_numbers
from secure_apfed.data.cells import (
    BLANK,
    are_padded_codes,
    has_measures,
    is_empty,
    place_of,
    refuse_look_alikes,
)
from secure_apfed.data.frames import is_csv, only_columns, read_frame, to_texts
from secure_apfed.data.labels import warn_of_empty_words
from secure_apfed.data.records import check_distinct
from secure_apfed.data.tables import warn_of_ids, warn_of_labels
from secure_apfed.errors import DataError, SuspectColumnWarning
from secure_apfed.settings.data import DataSettings, PartySettings

__all__ = ["RawTable", "party_path", "read_raw"]

_NAMELESS = "Unnamed: "  # as pandas calls columns without a name, and numbers them from 0


@dataclass(frozen=True, eq=False)
class RawTable:
    """A party's rows as read: IDs, feature columns, and labels as text where it holds any.

    A label is None where its cell is empty.
    """

    ids: tuple[str, ...]
    features: pd.DataFrame
    categorical: tuple[str, ...]
    labels: tuple[str | None, ...] = ()

    def at(self, rows: NDArray[np.int64]) -> "RawTable":
        """Return the same with these rows only, in this order."""
        return RawTable(
            tuple(self.ids[row] for row in rows),
            self.features.iloc[rows],
            self.categorical,
            tuple(self.labels[row] for row in rows),
        )


def read_raw(settings: DataSettings, name: str) -> RawTable:
    """Read the file of this party, with labels where the settings say that it holds some.

    Raises:
        DataError: missing, damaged, empty, without the columns that are named, or with the labels
            of others.
    """
    party = (settings.parties or {})[name]
    label_column = settings.label_column if settings.holds_labels(name) else None
    given = party.id_column or settings.id_column
    id_columns = (given,) if isinstance(given, str) else given
    labels = () if label_column is None else (label_column,)
    texts = (*id_columns, *labels, *(party.categorical or ()))
    words = (*labels, *(party.categorical or ()))
    frame = read_frame(party_path(settings, party.file), texts=texts, words=words, source=name)
    if not len(frame):
        raise DataError(f"{name}: {party.file} has no rows")
    named = (*texts, *(party.numeric or ()), *party.ignore)
    absent = [column for column in dict.fromkeys(named) if column not in frame.columns]
    if absent:
        raise DataError(
            f"{name}: {party.file} lacks the columns {', '.join(absent)}; it has "
            f"{', '.join(map(str, frame.columns))}{_guess(absent[0], frame)}"
        )
    numeric, categorical = _choose(frame, party, taken=(*id_columns, *labels))
    if label_column is None and settings.label_column in (*numeric, *categorical):
        raise DataError(
            f"{name}: its column {settings.label_column!r} is called like the active's labels, "
            "which a passive must not train on; put it under ignore or rename it"
        )
    for column in categorical:
        if is_csv(frame) and party.encoding is None:
            frame[column] = _without_words(frame[column], source=name)
    if party.missing == "drop":
        empty = [is_empty(frame[column]) for column in numeric]
        empty += [is_empty(frame[column], BLANK) for column in categorical]
        frame = frame[~np.any(empty, axis=0)]
    if not len(frame):
        raise DataError(
            f"{name}: data.parties.{name}.missing: drop leaves no row of {party.file}; say mean"
        )
    label_texts = _labels(frame, label_column, settings, party=name)
    ids = tuple(_ids(frame, id_columns, file=party.file, party=name))
    check_distinct(ids, party=name, place=lambda row: place_of(frame, row))
    for column in {*frame.columns} - {*numeric, *categorical}:
        del frame[column]  # in place: of a long table there is no second copy
    features = only_columns(frame, (*numeric, *categorical))
    warn_of_ids(features, categorical, source=name)
    if label_column is not None:
        warn_of_labels(
            features, label_texts, source=name, label=label_column,
            numbers=labels_are_numbers(settings),
        )  # fmt: skip
    return RawTable(ids, features, categorical, label_texts)


def _labels(
    frame: pd.DataFrame, column: str | None, settings: DataSettings, *, party: str
) -> tuple[str | None, ...]:
    """Labels as texts, None where there is none; of "NA" and the like only where it is a class."""
    if column is None:
        return (None,) * len(frame)
    texts = to_texts(frame[column])
    if labels_are_numbers(settings):
        empty = EMPTY if is_csv(frame) else frozenset[str]()
    else:
        empty = warn_of_empty_words(
            texts, party=party, column=column, listed=settings.named_classes,
            count=is_csv(frame),
        )  # fmt: skip
    return tuple(None if text == "" or text in empty else text for text in texts)


def _guess(absent: str, frame: pd.DataFrame) -> str:
    """A column of almost that name."""
    names = {str(one).casefold(): str(one) for one in frame.columns}
    near = difflib.get_close_matches(absent.casefold(), names, n=1)
    return f"; is {absent!r} called {names[near[0]]!r}?" if near else ""


def party_path(settings: DataSettings, file: Path) -> Path:
    """Where a file that the settings name lies."""
    return (settings.folder or Path()).expanduser() / file.expanduser()


def _choose(
    frame: pd.DataFrame, party: PartySettings, *, taken: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the numeric columns, dates among them, and the categorical ones: as named, else by
    their types.
    """
    if party.numeric is not None or party.categorical is not None:
        return party.numeric or (), party.categorical or ()
    left = [name for name in frame.columns if name not in (*taken, *party.ignore)]
    nameless = [name for name in left if name.startswith(_NAMELESS)]
    if nameless:
        place = int(nameless[0].removeprefix(_NAMELESS)) + 1
        raise DataError(
            f"{party.file} has no name for its column {place} (from 1); name it in the first line, "
            f"leave the column out, or put {nameless[0]!r} under ignore"
        )
    numeric = tuple(name for name in left if has_measures(frame[name]))
    categorical = tuple(name for name in left if name not in numeric)
    for column in categorical:
        if are_padded_codes(frame[column]):
            _warn(
                f"{party.file}: column {column!r} holds digits, some with leading zeros, and is "
                "taken as a category; list it under numeric if its cells are numbers, or under "
                "categorical"
            )
        else:
            # What a stray text among numbers must not silently do is to make each a category.
            refuse_look_alikes(frame[column], source=str(party.file))
    return numeric, categorical


def _without_words(column: "pd.Series", *, source: str) -> "pd.Series":
    """A column of a CSV file, where words such as NA count as empty, even among texts."""
    empty = is_empty(column)
    texts = (cell.strip() for cell in column[empty].tolist() if isinstance(cell, str))
    said = Counter(text for text in texts if text)
    if said:
        counts = ", ".join(f"{word!r} ({count})" for word, count in sorted(said.items()))
        _warn(
            f"{source}: cells {counts} of column {column.name!r} count as empty; if they are a "
            "category, write another word, or save the table as Parquet, where they are texts"
        )
    return column.mask(empty) if empty.any() else column


def _warn(what: str) -> None:
    warnings.warn(what, SuspectColumnWarning, stacklevel=2)


def _ids(frame: pd.DataFrame, columns: tuple[str, ...], *, file: Path, party: str) -> list[str]:
    """One text a row made of these columns, by the rules of `apfed_protocols.ids`."""
    parts = [
        id_texts(
            frame[name], party=party, what=f"column {name!r} of {file}",
            place=lambda row: place_of(frame, row), strip=True, part=len(columns) > 1,
            key=f"data.parties.{party}.id_column",
        )
        for name in columns
    ]  # fmt: skip
    return list(map(JOINT.join, zip(*parts, strict=True)))

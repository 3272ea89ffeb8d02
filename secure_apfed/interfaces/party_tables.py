"""A party's rows and IDs, as handed to `train`: checked, and encoded as features.

Letters: N rows.
"""

from collections.abc import Sequence, Sized
from collections.abc import Set as AbstractSet
from dataclasses import replace
from datetime import date, time, timedelta
from itertools import combinations
from numbers import Number
from pathlib import Path, PurePath
from typing import Any, get_args

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from apfed_protocols.ids import EMPTY_CELL_TEXTS, id_texts
from secure_apfed.base.faults import Advice
from secure_apfed.data.encoding import (
    ArrayEncoding,
    FeatureEncoding,
    fit_columns,
    refuse_empty_cells,
)
from secure_apfed.data.frames import BLANK, is_empty
from secure_apfed.data.labels import UNLABELLED
from secure_apfed.data.records import PartyTable
from secure_apfed.data.row_sources import load_array, make_features
from secure_apfed.data.tables import warn_of_labels
from secure_apfed.errors import ConfigError, DataError
from secure_apfed.interfaces.parties import Active, Passive
from secure_apfed.settings.data import Missing


def find_kept_rows(party: Active | Passive) -> NDArray[np.int64]:
    """Return the positions of the rows that a party keeps.

    With missing="drop" these are the rows without an empty cell, else all rows.

    Raises ConfigError: `missing` has an unknown value, or the party's rows are no frame, so that
        there are no empty cells to treat.
    """
    known_values = get_args(Missing)
    if party.missing not in known_values:
        raise ConfigError(
            f"{party.name}: missing={party.missing!r}: expected one of {', '.join(known_values)}"
        )
    rows = party.rows
    if not isinstance(rows, pd.DataFrame):
        if party.missing != "error":
            raise ConfigError(
                f"{party.name}: missing={party.missing!r} is of a frame's columns, and its rows "
                f"are a {type(rows).__name__}, taken as they are; fill them first, as "
                "numpy.nan_to_num(rows), or leave these rows and their IDs out"
            )
        return np.arange(len(party.ids))
    if party.missing != "drop":
        return np.arange(len(rows))
    text_columns = _list_text_columns(rows)
    is_kept_N = np.ones(len(rows), dtype=bool)
    for name in rows.columns:
        # In a column of texts, words such as "NA" are categories.
        is_kept_N &= ~is_empty(rows[name], BLANK if name in text_columns else EMPTY_CELL_TEXTS)
    return np.flatnonzero(is_kept_N)


def _list_text_columns(rows: pd.DataFrame) -> list[Any]:
    """Return the names of a frame's columns whose type is not a type of numbers."""
    return [name for name in rows.columns if not pd.api.types.is_numeric_dtype(rows[name])]


def read_ids(party: Active | Passive) -> tuple[str, ...]:
    """Return a party's IDs as texts. Raises DataError: they are not one ID a row, in order."""
    own_ids: object = party.ids
    if isinstance(own_ids, AbstractSet):
        raise DataError(
            f"{party.name}: its IDs are a {type(party.ids).__name__}, which has no order; give the "
            "list or column whose k-th ID belongs to the k-th row"
        )
    if isinstance(own_ids, str):
        raise DataError(
            f"{party.name}: its IDs are the text {own_ids!r:.40}; expected one ID a row, as "
            f"frame[{own_ids!r:.40}]"
        )
    if isinstance(own_ids, pd.DataFrame):
        raise DataError(
            f"{party.name}: its IDs are a DataFrame; expected one ID a row: give its column, as "
            f"frame[{str(next(iter(own_ids.columns), 'id'))!r}]"
        )
    return tuple(
        id_texts(
            party.ids, party=party.name, subject="its IDs", should_strip=True, settings_key="ids"
        )
    )


def make_table(
    party: Active | Passive,
    ids: tuple[str, ...],
    kept_rows: NDArray[np.int64],
    *,
    class_indices_N: Tensor | None,
    fitted_rows: NDArray[np.int64] | None = None,
) -> PartyTable:
    """Return a party's table: its rows, encoded as features, with IDs and labels.

    Warn of columns of a frame that alone predict all labels.

    Args:
        party: the party, as the user passed it.
        ids: IDs of all rows that were passed, as texts.
        kept_rows: positions of the N rows that go into the table.
        class_indices_N: class numbers of these rows, (N,); None: a passive.
        fitted_rows: positions, among these rows, of the rows to which columns are fitted; None:
            all.

    Raises DataError: IDs, rows and labels do not fit each other, or rows cannot be encoded.
    """
    _require_one_order(party)
    _require_order_of_ids(party, ids)
    if isinstance(party.rows, pd.DataFrame):
        _require_rows(party, len(ids), party.rows)
        _refuse_ids_among_columns(party, ids, party.rows)
        kept_frame = party.rows.iloc[kept_rows]
        ids = tuple(ids[row] for row in kept_rows)
        party = replace(party, rows=kept_frame)
        if class_indices_N is not None:
            _warn_of_label_columns(kept_frame, class_indices_N, source=party.name)
    features, encoding = _read_rows(party, fitted_rows)
    _require_rows(party, len(ids), features)
    return PartyTable(party.name, ids, features, class_indices_N, encoding)


def _warn_of_label_columns(frame: pd.DataFrame, class_indices_N: Tensor, *, source: str) -> None:
    """Warn of columns that alone predict all labels of the party `source`."""
    label_texts = [
        None if number == UNLABELLED else str(number) for number in class_indices_N.tolist()
    ]
    warn_of_labels(frame, label_texts, source=source, label_column="labels")


def _require_order_of_ids(party: Active | Passive, ids: Sequence[str]) -> None:
    """Raise DataError if rows or labels have an index that holds the IDs in another order.

    Rows are joined to IDs by position, so that they would get the IDs of other people. An index of
    numbers may also be plain row numbers. It is taken for IDs only if it has exactly the IDs.

    `ids`: the party's IDs, as texts.
    """
    labels = getattr(party, "labels", None)
    for column_name, column in (("rows", party.rows), ("labels", labels)):
        if not isinstance(column, pd.Series | pd.DataFrame) or len(column) != len(ids):
            continue
        index = column.index
        if isinstance(index, pd.RangeIndex | pd.MultiIndex) or _has_same_index(party.ids, index):
            continue
        index_texts = [str(name).strip() for name in index]
        shared_ids = set(index_texts).intersection(ids)
        if pd.api.types.is_numeric_dtype(index):
            is_index_of_ids = len(shared_ids) == len(set(ids))
        else:
            is_index_of_ids = bool(shared_ids)
        if is_index_of_ids and index_texts != list(ids):
            raise DataError(
                f"{party.name}: the index of its {column_name} holds {len(shared_ids)} of its IDs, "
                "in another "
                f"order than ids, and row k is joined to ID k; give ids={column_name}.index, or "
                f"{column_name}.loc[ids], or {column_name}.reset_index(drop=True) if the index is "
                "no ID"
            )


def _has_same_index(ids: Any, index: "pd.Index[Any]") -> bool:
    """Return whether the IDs are a pandas column with this index.

    Then IDs and rows come from one frame, and are in the same order.
    """
    return isinstance(ids, pd.Series) and ids.index.equals(index)


def _require_one_order(party: Active | Passive) -> None:
    """Raise DataError if two of IDs, rows and labels have the same pandas index in other orders.

    They are joined by position, so that people would be mixed up. Indices with other entries say
    nothing about the order, and are ignored.
    """
    column_by_name = {
        "IDs": party.ids,
        "rows": party.rows,
        "labels": getattr(party, "labels", None),
    }
    index_by_name = {
        name: column.index
        for name, column in column_by_name.items()
        if isinstance(column, pd.Series | pd.DataFrame) and column.index.is_unique
    }
    for (first_name, first_index), (second_name, second_index) in combinations(
        index_by_name.items(), 2
    ):
        if len(first_index) == len(second_index) and not first_index.equals(second_index):
            if not first_index.difference(second_index).empty:
                continue  # other entries
            raise DataError(
                f"{party.name}: its {first_name} and its {second_name} have the same index in "
                "different "
                f"orders, and rows belong together by their places; give the {second_name} as "
                f"{second_name.lower()}.loc[{first_name.lower()}.index]"
            )


def _refuse_ids_among_columns(
    party: Active | Passive, ids: Sequence[str], rows: pd.DataFrame
) -> None:
    """Raise DataError if a column of a frame holds the IDs, which would be learnt as a feature.

    `ids`: the party's IDs, as texts, in the order of `rows`.
    """
    for position, name in enumerate(rows.columns):
        cells_and_ids = zip(rows.iloc[:, position], ids, strict=True)
        if len(ids) > 1 and all(str(cell).strip() == own_id for cell, own_id in cells_and_ids):
            raise DataError(
                f"{party.name}: column {name} of its frame holds its IDs, from which nothing can "
                f"be learnt; leave it out, as rows.drop(columns={name!r})"
            )


def _require_rows(party: Active | Passive, id_count: int, rows: Sized) -> None:
    """Raise DataError unless there are as many rows as IDs; `id_count`: number of IDs."""
    if len(rows) != id_count:
        raise DataError(
            f"{party.name}: {id_count} IDs, but {len(rows)} rows; give one ID a row, in their order"
        )


def _read_rows(
    party: Active | Passive, fitted_rows: NDArray[np.int64] | None
) -> tuple[Any, FeatureEncoding]:
    """Return a party's rows as features (N, *shape), and their encoding.

    Columns of a frame are encoded. Other rows (an array, a file of an array, a data set) are taken
    as they are.

    `fitted_rows`: positions of the rows to which a frame's encoding is fitted; None: all.

    Raises DataError: the rows cannot be read or encoded.
    """
    rows = party.rows
    if isinstance(party, Passive) and rows is None:
        # A passive with a black-box gradient passes no rows; nothing reads this placeholder.
        return torch.zeros((len(party.ids), 1)), ArrayEncoding(row_shape=(1,))
    if isinstance(rows, pd.DataFrame):
        _require_columns(party, rows)
        text_columns = _list_text_columns(rows)
        if party.missing == "error":  # checked in all rows, not only in the rows of the fit
            refuse_empty_cells(rows, categorical=text_columns, advice=Advice(party.name))
        encoding = fit_columns(
            rows if fitted_rows is None else rows.iloc[fitted_rows],
            categorical=text_columns,
            missing=party.missing,
            source=party.name,
        )
        return encoding.encode(rows, source=party.name), encoding
    if isinstance(rows, str | PurePath):
        rows = load_array(Path(rows), party=party.name)
    features = make_features(rows, party=party.name, workers=party.workers)
    return features, ArrayEncoding(row_shape=tuple(features.shape[1:]))


def _require_columns(party: Active | Passive, rows: pd.DataFrame) -> None:
    """Raise DataError if two columns of a frame have one name, or a cell is no plain value.

    Plain values are numbers, texts, truth values, dates, times, durations and empty cells.
    """
    if not rows.columns.is_unique:
        repeated_names = rows.columns[rows.columns.duplicated()].unique().tolist()
        raise DataError(
            f"{party.name}: its frame has several columns called "
            f"{', '.join(map(str, repeated_names))}; give each a name of its own"
        )
    plain_types = (str, bytes, Number, np.generic, date, time, timedelta, type(None), type(pd.NA))
    for name in [name for name in rows.columns if pd.api.types.is_object_dtype(rows[name])]:
        for cell in rows[name]:
            if not isinstance(cell, plain_types):
                raise DataError(
                    f"{party.name}: column {name} of its frame holds a {type(cell).__name__}; "
                    "expected numbers or texts: of cells that hold rows of numbers give "
                    f"np.stack(frame[{name!r}]) as rows"
                )

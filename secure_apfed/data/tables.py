"""Loading the parties' own tables, from one or several files or a database query.

Run by: each party for itself; `load_tables` loads all of them for a simulation. A party's
statistics come from its own rows alone: the active's training rows, or all rows of a passive. A
party may instead name an encoding that was fitted elsewhere. IDs are compared as text: "007" and
"7" differ. A party is warned of columns that should perhaps not train a model: an ID as a feature,
or the label in disguise. Both are guesses.
"""

import difflib
import hashlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeGuard, cast

import numpy as np
import pandas as pd
import pyarrow
import torch
from numpy.typing import NDArray
from pyarrow import default_memory_pool

from apfed_protocols.ids import COLUMN_SEPARATOR, EMPTY_CELL_TEXTS, IdReader, id_texts
from secure_apfed.base.faults import (
    Advice,
    Fault,
    FaultList,
    Remedy,
    SettingLine,
    TableError,
    describe_remedies,
)
from secure_apfed.base.files import load_json
from secure_apfed.data.catalogue import labels_are_numbers, party_names
from secure_apfed.data.databases import query_table
from secure_apfed.data.encoding import (
    NO_FEATURES,
    ArrayEncoding,
    CellCounts,
    ColumnEncoding,
    View,
    find_view_ranges,
    fit_columns,
    fit_views,
    parse_encoding,
    refuse_empty_cells,
)
from secure_apfed.data.frames import (
    BLANK,
    are_padded_codes,
    convert_to_texts,
    describe_row,
    find_look_alike,
    has_measures,
    is_csv,
    is_empty,
    is_numeric,
    list_files,
    load_frame,
    propose_categories,
    read_numbers,
    select_columns,
)
from secure_apfed.data.labels import (
    UNLABELLED,
    TargetScale,
    choose_positive,
    encode_class_labels,
    move_positive_last,
    parse_numbers,
    warn_of_empty_words,
)
from secure_apfed.data.lazy_rows import LazyRows, select_rows
from secure_apfed.data.mapped_tables import (
    ColumnFiles,
    MappedIds,
    find_column_files,
    is_mapped,
)
from secure_apfed.data.partition import (
    choose_labelled_rows,
    hide_passive_labels,
    make_generator,
    split_rows,
)
from secure_apfed.data.records import OwnData, PartyTable, VerticalData, check_distinct
from secure_apfed.data.row_sources import (
    Features,
    MakeRows,
    OwnRows,
    load_array_rows,
    load_images,
    make_code_rows,
)
from secure_apfed.errors import CheckpointError, ConfigError, DataError, SuspectColumnWarning
from secure_apfed.settings.data import OWN_TABLES, ROWS_BY_OWN_CODE, DataSettings, ViewColumns
from secure_apfed.settings.plugins import import_callable, require_trusted_code

# Fewer rows are not searched for suspect columns: small tables match by chance.
_MIN_SEARCHED_ROWS = 20
# Share of distinct values from which on a categorical column looks like an ID.
_ID_DISTINCT_SHARE = 0.5
# Rows that are examined first, since most columns are cleared by them.
_SAMPLE_ROWS = 1000
_IDS_PER_BLOCK = 2**16
_NAMELESS_PREFIX = "Unnamed: "  # as pandas calls columns without a name, and numbers them from 0
# The one view of parties that all hold the same columns.
_COMMON_VIEW_NAME = "all"


def _warn_of_id_columns(
    features: pd.DataFrame, categorical: Sequence[str], *, advice: Advice
) -> None:
    """Warn of columns that look like IDs.

    These are text columns with a different text in more than half of the rows, and columns of whole
    numbers without a gap.

    Args:
        features: the party's feature columns.
        categorical: names of the columns that are encoded one-hot.
        advice: proposes the setting that ignores such a column.
    """
    if len(features) < _MIN_SEARCHED_ROWS:
        # In few rows all values may differ by chance.
        return
    for name, column in features.items():
        reason = ""
        if name in categorical:
            distinct_texts = column.nunique()
            if distinct_texts > _ID_DISTINCT_SHARE * len(column):
                reason = f"{distinct_texts} different texts"
        elif is_numeric(column) and _is_row_counter(column):
            reason = "whole numbers without a gap"
        if reason:
            _warn_of_column(
                f"{advice.party}: column {name!r} looks like an ID: its {len(column)} rows hold "
                f"{reason}; a model learns such rows by heart and nothing else from it. Unless it "
                f"is a feature, say {advice.add_to_list('ignore', str(name))}"
            )


def _is_row_counter(column: "pd.Series") -> bool:
    """Return whether a column has whole numbers that are all different and without a gap."""
    values = column.dropna().to_numpy()
    if len(values) < len(column) or not np.issubdtype(values.dtype, np.integer):
        return False
    return len(np.unique(values)) == len(values) == int(values.max()) - int(values.min()) + 1


def _warn_of_column(message: str) -> None:
    """Issue a SuspectColumnWarning that points at the line which called this function's caller."""
    warnings.warn(message, SuspectColumnWarning, stacklevel=3)


def warn_of_labels(
    features: pd.DataFrame,
    labels: Sequence[str | None],
    *,
    source: str,
    label_column: str,
    are_labels_numbers: bool = False,
    advice: Advice | None = None,
) -> None:
    """Warn of each column that alone predicts every known label, by its values or by thresholds.

    Such a column may be the label in disguise. A column of mostly different values predicts labels
    by chance, so only its order is examined. Each column is tested twice: with an empty cell as a
    value, and without rows of empty cells.

    Args:
        features: the party's feature columns, one row for each label.
        labels: one for each row; None: unknown.
        source: the party's name, for the warning.
        label_column: the name of the label column, for the warning.
        are_labels_numbers: whether labels are numbers to predict; a column then predicts them if
            they rise or fall with it.
        advice: proposes the setting that ignores the column; None: a setting that ignores only this
            column is proposed.
    """
    labelled_rows = np.array(
        [row for row, text in enumerate(labels) if text is not None], dtype=np.int64
    )
    if len(labelled_rows) < _MIN_SEARCHED_ROWS:
        return
    known_labels = pd.Series([labels[row] for row in labelled_rows])
    label_numbers = pd.Series(pd.factorize(known_labels)[0])  # the number of each label's class
    can_predict_all: Callable[[pd.Series, pd.Series], bool] = _can_separate_classes
    if are_labels_numbers:
        label_numbers = pd.to_numeric(known_labels, errors="coerce")
        can_predict_all = _can_order_labels
    for name in features.columns:
        column = features[name].iloc[labelled_rows].reset_index(drop=True)
        is_suspect = can_predict_all(column, label_numbers)
        is_filled = column.notna()
        if not is_suspect and _MIN_SEARCHED_ROWS <= is_filled.sum() < len(column):
            is_suspect = can_predict_all(column[is_filled], label_numbers[is_filled])
        if is_suspect:
            _warn_of_column(
                f"{source}: column {name!r} alone tells {label_column!r} of all "
                f"{len(labelled_rows)} rows that "
                "have one; it may be the label in disguise, or known only after it. Unless it is "
                "there when the model predicts, say "
                f"{(advice or Advice(source)).add_to_list('ignore', str(name))}"
            )


def _can_separate_classes(column: "pd.Series", class_numbers: "pd.Series") -> bool:
    """Return whether the column's values, or thresholds between them, separate the classes.

    If values repeat, each value must occur in one class only. If numbers are mostly different, the
    rows are sorted by them, empty cells last; the rows of each class must then lie together.

    Args:
        column: N cells of one feature.
        class_numbers: the N labels as class numbers.
    """
    class_count = class_numbers.nunique()
    if not 1 < class_count <= len(class_numbers) / 2:
        return False
    if column.nunique(dropna=False) <= len(column) / 2:
        return bool((class_numbers.groupby(column, dropna=False).nunique() == 1).all())
    if not is_numeric(column):
        return False
    numbers = column.to_numpy(np.float64, na_value=np.nan)
    class_numbers_N = class_numbers.to_numpy()
    # Most columns fail already in the first rows, which are sorted faster than all.
    for rows in (slice(_SAMPLE_ROWS), slice(None)):
        sorted_class_numbers = class_numbers_N[rows][np.argsort(numbers[rows], kind="stable")]
        class_change_count = np.count_nonzero(sorted_class_numbers[1:] != sorted_class_numbers[:-1])
        if class_change_count >= class_count:  # K classes that lie together change K - 1 times
            return False
    return True


def _can_order_labels(column: "pd.Series", label_numbers: "pd.Series") -> bool:
    """Return whether labels that are numbers rise or fall monotonically with the column.

    The answer is no if the column or the labels have an empty cell. It is also no if either has at
    most half as many different values as rows, since few values are monotonic by chance.

    Args:
        column: N cells of one feature.
        label_numbers: the N labels as numbers.
    """
    if not is_numeric(column):
        return False
    numbers = column.to_numpy(np.float64, na_value=np.nan)
    labels_N = label_numbers.to_numpy(np.float64)
    # Most columns fail already in the first rows, which are sorted faster than all.
    for rows in (slice(_SAMPLE_ROWS), slice(None)):
        values = numbers[rows]
        labels = labels_N[rows]
        if np.isnan(values).any() or np.isnan(labels).any():
            return False
        if min(len(np.unique(values)), len(np.unique(labels))) <= len(values) / 2:
            return False
        if not (_is_rising_with(values, labels) or _is_rising_with(values, -labels)):
            return False
    return True


def _is_rising_with(values_N: NDArray[np.float64], labels_N: NDArray[np.float64]) -> bool:
    """Return whether labels never fall when the rows are sorted by their values.

    Rows of equal values are sorted by their labels.
    """
    sorted_labels_N = labels_N[np.lexsort((labels_N, values_N))]
    return bool((np.diff(sorted_labels_N) >= 0).all())


@dataclass(frozen=True, eq=False)
class RawTable:
    """A party's rows as read, before encoding.

    Attributes:
        ids: one text for each row.
        features: columns to encode, or rows that are taken as they are.
        categorical: names of the columns that are encoded one-hot.
        labels: one text for each row, None for an empty cell or at a party without labels.
        faulty_columns: columns with a fault, to which no encoding can be fitted.
    """

    ids: Sequence[str]
    features: pd.DataFrame | Features
    categorical: tuple[str, ...]
    labels: tuple[str | None, ...] = ()
    faulty_columns: frozenset[str] = frozenset()

    def select_rows(self, rows: NDArray[np.int64]) -> "RawTable":
        """Return the table of these rows, (M,) ascending positions."""
        features: pd.DataFrame | Features
        if _has_columns(self.features):
            features = self.features.iloc[rows]
        else:
            features = select_rows(self.features, torch.from_numpy(rows))
        ids: Sequence[str]
        if isinstance(self.ids, MappedIds):
            ids = self.ids.select_rows(rows)
        else:
            ids = tuple(self.ids[row] for row in rows)
        labels = tuple(self.labels[row] for row in rows)
        return RawTable(ids, features, self.categorical, labels, self.faulty_columns)


def _has_columns(features: pd.DataFrame | Features) -> TypeGuard[pd.DataFrame]:
    """Return whether features are columns of a table to encode, not rows taken as they are.

    A table on disk (`ColumnFiles`) counts as a frame: it has the methods of a frame used here.
    """
    return isinstance(features, pd.DataFrame | ColumnFiles)


@dataclass(frozen=True)
class _ColumnChoice:
    """The columns of a table that are features.

    Attributes:
        numeric: columns of numbers or dates.
        categorical: columns that are encoded one-hot.
        faulty_columns: columns among these in which a fault was found.
    """

    numeric: tuple[str, ...]
    categorical: tuple[str, ...]
    faulty_columns: frozenset[str]

    @property
    def feature_columns(self) -> tuple[str, ...]:
        """All feature columns, in the order in which they are encoded."""
        return (*self.numeric, *self.categorical)


def load_raw_table(settings: DataSettings, name: str) -> RawTable:
    """Read the table of the party `name`, with labels if the settings say that it has labels.

    Raises TableError: all faults of the table at once.
    """
    faults = FaultList()
    raw = _load_raw_table(settings, name, faults)
    faults.raise_faults()
    return raw


def _load_raw_table(
    settings: DataSettings, party: str, faults: FaultList, make_rows: MakeRows | None = None
) -> RawTable:
    """Read one party's table, and add its faults to a list.

    Args:
        settings: the data settings of the run, of all parties.
        party: the party's name.
        faults: receives the faults; if it receives any, the returned table must not be used.
        make_rows: the party's own function that makes its rows, named in the party's own file;
            None: there is none.

    Raises DataError: a fault after which the table cannot be examined further.
    """
    party_settings = (settings.parties or {})[party]
    if party_settings.rows is not None:
        return _load_rows(settings, party, faults, make_rows)
    label_column = settings.label_column if settings.has_labels(party) else None
    frame = _open_frame(settings, party)
    advice = _make_advice(settings, party)
    id_and_label_columns = settings.find_id_columns(party)
    if label_column is not None:
        id_and_label_columns = (*id_and_label_columns, label_column)
    column_choice = _choose_columns(
        frame, settings, party, id_and_label_columns=id_and_label_columns, faults=faults
    )
    for column in column_choice.categorical:
        is_listed = column in (party_settings.categorical or ())
        if is_csv(frame) and party_settings.encoding is None and not is_listed:
            frame[column] = _mask_empty_words(frame[column], advice=advice)
    if settings.find_missing_rule(party) == "drop":
        frame = _drop_incomplete_rows(
            frame, column_choice, advice=advice, table_name=party_settings.table_name
        )
    ids_and_labels = _extract_ids_and_labels(frame, settings, party, faults)
    for column in {*frame.columns} - {*column_choice.feature_columns}:
        del frame[column]  # in place, since a second copy of a long table would need its memory
    features = select_columns(frame, column_choice.feature_columns)
    faultless_columns = [
        column for column in features.columns if column not in column_choice.faulty_columns
    ]
    _warn_of_id_columns(
        select_columns(features, faultless_columns), column_choice.categorical, advice=advice
    )
    if label_column is not None:
        warn_of_labels(
            features,
            ids_and_labels.labels,
            source=party,
            label_column=label_column,
            are_labels_numbers=labels_are_numbers(settings),
            advice=advice,
        )
    return RawTable(
        ids_and_labels.ids,
        features,
        column_choice.categorical,
        ids_and_labels.labels,
        column_choice.faulty_columns,
    )


def _open_frame(settings: DataSettings, party: str) -> pd.DataFrame:
    """Read the table of the party `party` as a frame, in memory or mapped from disk.

    Raises DataError: the table has no rows, or lacks a column that the settings name.
    """
    party_settings = (settings.parties or {})[party]
    label_columns = (settings.label_column,) if settings.has_labels(party) else ()
    # Cells such as "NA" may be categories or labels here, but count as empty among IDs.
    columns_with_words = (*label_columns, *(party_settings.categorical or ()))
    text_columns = (*settings.find_id_columns(party), *columns_with_words)
    table = open_table(settings, party)
    if not is_mapped(settings, party):
        frame = load_frame(
            table,
            texts=text_columns,
            words=columns_with_words,
            source=party,
            table_name=party_settings.table_name,
        )
    else:
        open_columns = ColumnFiles.from_files if isinstance(table, Path) else ColumnFiles.from_query
        columns = open_columns(table, texts=text_columns, words=columns_with_words, source=party)
        frame = cast(pd.DataFrame, columns)  # it has the methods of a frame that are used here
    if not len(frame):
        raise DataError(f"{party}: {party_settings.table_name} has no rows")
    _require_columns(frame, settings, party)
    return frame


def _load_rows(
    settings: DataSettings, party: str, faults: FaultList, make_rows: MakeRows | None
) -> RawTable:
    """Read a party's rows that are not columns of a table, such as arrays or images.

    IDs and labels come from the party's table if it has one, else from the source of the rows.

    Args:
        settings: the data settings of the run.
        party: the party's name.
        faults: receives the faults of IDs and labels.
        make_rows: the party's own function that makes its rows; used only if the setting `own_rows`
            names no file and no folder.

    Raises DataError: labels are missing, or IDs, rows and labels differ in number.
    """
    party_settings = (settings.parties or {})[party]
    has_labels = settings.has_labels(party)
    table_name = party_settings.table_name if party_settings.has_table else str(party_settings.rows)
    ids_and_labels: _IdsAndLabels | None = None
    frame: pd.DataFrame | None = None
    if party_settings.has_table:
        frame = _open_frame(settings, party)
        ids_and_labels = _identify_rows(frame, settings, party, faults)
    own_rows = _open_rows(settings, party, make_rows, frame=frame, ids_and_labels=ids_and_labels)
    if ids_and_labels is None:
        ids_and_labels = _read_source_ids(own_rows, party=party, table_name=table_name)
        with faults.gather_faults():
            check_distinct(ids_and_labels.ids, party=party)
    if has_labels and not ids_and_labels.labels:
        raise DataError(f"{party}: {table_name} has no labels, and it holds those of its people")
    count_by_part = {"IDs": len(ids_and_labels.ids), "rows": len(own_rows.features)}
    if has_labels:
        count_by_part["labels"] = len(ids_and_labels.labels)
    if len(set(count_by_part.values())) > 1:
        counts_text = ", ".join(f"{count} {part}" for part, count in count_by_part.items())
        raise DataError(
            f"{party}: {table_name} and its rows have {counts_text}; give one ID a row, in order"
        )
    return RawTable(
        ids_and_labels.ids,
        own_rows.features,
        (),
        ids_and_labels.labels or (None,) * len(ids_and_labels.ids),
    )


@dataclass(frozen=True)
class _IdsAndLabels:
    """The IDs and labels of a party's rows.

    Attributes:
        ids: one text for each row.
        labels: one text for each row, None for an unknown label; empty at a party without labels
            that has no table.
    """

    ids: Sequence[str]
    labels: tuple[str | None, ...] = ()


def _read_source_ids(own_rows: OwnRows, *, party: str, table_name: str) -> _IdsAndLabels:
    """Return the IDs and labels that the source of a party's rows gives with them, as texts.

    `party`, `table_name`: name of the party and of its rows, for errors.
    """
    assert own_rows.ids is not None
    ids = id_texts(
        own_rows.ids,
        party=party,
        subject=f"the IDs of {table_name}",
        should_strip=True,
        settings_key="ids",
    )
    labels = tuple(
        None if pd.isna(label) else str(label).strip() or None for label in own_rows.labels or ()
    )
    return _IdsAndLabels(tuple(ids), labels)


def _identify_rows(
    frame: pd.DataFrame, settings: DataSettings, name: str, faults: FaultList
) -> _IdsAndLabels:
    """Return IDs and labels from the table of the party `name`, whose features lie elsewhere.

    Further columns are a fault, except beside images: there one of them names the image files.
    Faults are added to `faults`.
    """
    party_settings = (settings.parties or {})[name]
    further_columns = _list_further_columns(frame, settings, name)
    if further_columns and not _are_images(settings, name):
        remedy: Remedy = (_make_advice(settings, name).add_to_list("ignore", *further_columns),)
        message = (
            f"{name}: its rows are {party_settings.rows}, so columns of "
            f"{party_settings.table_name} are no features: {', '.join(further_columns)}; say "
            f"{describe_remedies([remedy])}"
        )
        faults.add_error(TableError([Fault(message, (remedy,))]))
    return _extract_ids_and_labels(frame, settings, name, faults)


def _extract_ids_and_labels(
    frame: pd.DataFrame, settings: DataSettings, name: str, faults: FaultList
) -> _IdsAndLabels:
    """Return IDs and labels from the columns of the party `name` that hold them.

    Faults are added to `faults`. In place of faulty labels there is None for each row, and in place
    of faulty IDs the row's number, so that the other columns can still be examined.
    """
    party_settings = (settings.parties or {})[name]
    label_column = settings.label_column if settings.has_labels(name) else None
    id_columns = settings.find_id_columns(name)
    labels: tuple[str | None, ...] = (None,) * len(frame)
    with faults.gather_faults():
        labels = _extract_labels(frame, label_column, settings, party=name)
    ids: Sequence[str] = tuple(map(str, range(len(frame))))
    with faults.gather_faults():
        ids = _extract_ids(frame, id_columns, table_name=party_settings.table_name, party=name)
        check_distinct(ids, party=name, describe_row=lambda row: describe_row(frame, row))
    return _IdsAndLabels(ids, labels)


def _list_further_columns(frame: pd.DataFrame, settings: DataSettings, name: str) -> list[str]:
    """Return the names of the columns that are not IDs, labels or ignored by the party `name`."""
    named_columns = {*settings.find_id_columns(name), *(settings.parties or {})[name].ignore}
    if settings.has_labels(name):
        named_columns.add(settings.label_column)
    return [str(column) for column in frame.columns if column not in named_columns]


def _are_images(settings: DataSettings, name: str) -> bool:
    """Return whether the rows of the party `name` are the images of a folder."""
    party_settings = (settings.parties or {})[name]
    return (
        party_settings.rows_import_path is None
        and resolve_party_path(settings, Path(party_settings.rows or "")).is_dir()
    )


def _open_rows(
    settings: DataSettings,
    name: str,
    make_rows: MakeRows | None,
    *,
    frame: pd.DataFrame | None,
    ids_and_labels: _IdsAndLabels | None,
) -> OwnRows:
    """Return the rows of the party `name`: images, arrays of a file, or its own function's result.

    Large arrays and images are not read yet.

    Args:
        settings: the data settings of the run.
        name: the party's name.
        make_rows: the function that makes the rows, from the party's own file; None: it is imported
            from the path in the setting `rows`.
        frame: the party's table, whose one further column names the images; None: it has no table.
        ids_and_labels: the IDs and labels of that table; None: they come with the rows.

    Raises:
        ConfigError: the function cannot be found.
        DataError: the rows cannot be read, or do not fit the table.
    """
    party_settings = (settings.parties or {})[name]
    rows_setting = party_settings.rows
    has_labels = settings.has_labels(name)
    assert rows_setting is not None
    if _are_images(settings, name):
        return OwnRows(features=_open_images(settings, name, Path(rows_setting), frame))
    setting = f"data.parties.{name}.rows"
    if party_settings.rows_import_path is None:
        path = resolve_party_path(settings, Path(rows_setting))
        return load_array_rows(
            path, party=name, has_table=ids_and_labels is not None, has_labels=has_labels
        )
    if make_rows is None:
        if rows_setting == ROWS_BY_OWN_CODE:
            raise ConfigError(
                f"{setting}: it is own, and no code is named here; {name} names it in its own "
                "file, as "
                'code: {rows: "my_data:make_rows"}'
            )
        require_trusted_code(rows_setting, setting=setting, only_earlier_settings=True)
        make_rows = import_callable(rows_setting, setting=setting)
    ids = None if ids_and_labels is None else ids_and_labels.ids
    return make_code_rows(make_rows, party=name, ids=ids, has_labels=has_labels)


def _open_images(
    settings: DataSettings, name: str, folder: Path, frame: pd.DataFrame | None
) -> LazyRows:
    """Return the images of a folder, in the order of the table of the party `name`.

    `frame`: the party's table, whose one further column names each row's file; None: it has none.

    Raises DataError: the party has no table, or the table has not exactly one further column.
    """
    columns = [] if frame is None else _list_further_columns(frame, settings, name)
    if frame is None or len(columns) != 1:
        raise DataError(
            f"{name}: its rows are images of the folder {folder}, and one further column of "
            f"its table names the file of each; got {', '.join(columns) or 'none'}: name the "
            f"table as data.parties.{name}.file, and other columns under ignore"
        )
    (column,) = columns
    file_names = frame[column].tolist()
    path = resolve_party_path(settings, folder)
    return load_images(path, file_names, column=column, party=name)


def _make_advice(settings: DataSettings, name: str) -> Advice:
    """Return an object that words changes to the settings of the party `name`, for errors."""
    party_settings = (settings.parties or {})[name]
    columns_by_setting = {
        "numeric": party_settings.numeric or (),
        "categorical": party_settings.categorical or (),
        "ignore": party_settings.ignore,
        "date_formats": settings.find_date_formats(name),
    }
    return Advice(name, columns_by_setting)


def _require_columns(frame: pd.DataFrame, settings: DataSettings, name: str) -> None:
    """Raise DataError if the table of the party `name` lacks a column that the settings name.

    If the table has a column with a similar name, the error is a TableError, which proposes the
    settings with that name.
    """
    party_settings = (settings.parties or {})[name]
    columns_by_setting = {
        "id_column": settings.find_id_columns(name),
        "label_column": (settings.label_column,) if settings.has_labels(name) else (),
        "categorical": party_settings.categorical or (),
        "numeric": party_settings.numeric or (),
        "ignore": party_settings.ignore,
    }
    required_columns = dict.fromkeys(
        column for columns in columns_by_setting.values() for column in columns
    )
    absent_columns = [column for column in required_columns if column not in frame.columns]
    if not absent_columns:
        return
    nearest_by_column = {column: _find_nearest_name(column, frame) for column in absent_columns}
    replacement_by_column = {column: other for column, other in nearest_by_column.items() if other}
    message = (
        f"{name}: {party_settings.table_name} lacks the columns {', '.join(absent_columns)}; it "
        f"has {', '.join(map(str, frame.columns))}"
    )
    if not replacement_by_column:
        raise DataError(message)
    column, replacement = next(iter(replacement_by_column.items()))
    remedies = (_correct_columns(columns_by_setting, replacement_by_column, party=name),)
    message += f"; if {column!r} is called {replacement!r}, say {describe_remedies(remedies)}"
    raise TableError([Fault(message, remedies)])


def _correct_columns(
    columns_by_setting: Mapping[str, tuple[str, ...]],
    replacement_by_column: Mapping[str, str],
    *,
    party: str,
) -> Remedy:
    """Return the settings that change if columns are replaced by those with the right names.

    `columns_by_setting`: the columns that each setting names, by the setting's key.
    """
    changed_lines = list[SettingLine]()
    advice = Advice(party)
    for key, columns in columns_by_setting.items():
        corrected_columns = tuple(
            dict.fromkeys(replacement_by_column.get(column, column) for column in columns)
        )
        if corrected_columns == columns:
            continue
        is_single_name = len(columns) == 1 and key.endswith("_column")
        value: Any = corrected_columns[0] if is_single_name else corrected_columns
        if key == "label_column":  # a setting of all parties, not of one
            changed_lines.append(SettingLine(("data", key), value))
        else:
            changed_lines.append(advice.set_value(key, value))
    return tuple(changed_lines)


def _find_nearest_name(absent_column: str, frame: pd.DataFrame) -> str:
    """Return the name of the table's column most similar to this one, ignoring case; "" if none is.

    `absent_column`: the name that the table lacks.
    """
    name_by_folded_name = {str(column).casefold(): str(column) for column in frame.columns}
    matches = difflib.get_close_matches(absent_column.casefold(), name_by_folded_name, n=1)
    return name_by_folded_name[matches[0]] if matches else ""


def _drop_incomplete_rows(
    frame: pd.DataFrame, column_choice: _ColumnChoice, *, advice: Advice, table_name: str
) -> pd.DataFrame:
    """Return the rows without an empty feature cell. Raises TableError: no row is left.

    Args:
        frame: the party's table.
        column_choice: choice of the feature columns.
        advice: proposes settings for the error.
        table_name: the table's name, for the error.
    """
    is_empty_by_column = {column: is_empty(frame[column]) for column in column_choice.numeric}
    for column in column_choice.categorical:
        is_empty_by_column[column] = is_empty(frame[column], BLANK)
    is_complete = np.ones(len(frame), dtype=bool)
    for empty_cells in is_empty_by_column.values():
        is_complete &= ~empty_cells
    if is_complete.any():
        return frame[is_complete]
    empty_columns = [column for column, cells in is_empty_by_column.items() if cells.all()]
    other_columns_cells = [
        cells for column, cells in is_empty_by_column.items() if column not in empty_columns
    ]
    remedy: Remedy = (advice.add_to_list("ignore", *empty_columns),) if empty_columns else ()
    # Without the empty columns there may still be no complete row.
    if not other_columns_cells or np.any(other_columns_cells, axis=0).all():
        remedy = (*remedy, advice.set_value("missing", "mean"))
    raise TableError(
        [
            Fault(
                f"{advice.party}: missing: drop leaves no row of {table_name}; say "
                f"{describe_remedies([remedy])}",
                (remedy,),
            )
        ]
    )


def _extract_labels(
    frame: pd.DataFrame, column: str | None, settings: DataSettings, *, party: str
) -> tuple[str | None, ...]:
    """Return each row's label as text; None for an empty cell.

    In a CSV file, words such as "NA" count as empty unless the settings list them as classes.

    `column`: the label column; None: the party has no labels, and each row gets None.
    """
    if column is None:
        return (None,) * len(frame)
    texts = convert_to_texts(frame[column])
    if labels_are_numbers(settings):
        empty_words = EMPTY_CELL_TEXTS if is_csv(frame) else frozenset[str]()
    else:
        empty_words = warn_of_empty_words(
            texts,
            party=party,
            column=column,
            listed_classes=settings.explicit_classes,
            are_empty=is_csv(frame),
        )
    return tuple(None if text == "" or text in empty_words else text for text in texts)


def open_table(settings: DataSettings, name: str) -> Path | pyarrow.Table:
    """Return the path of the table of the party `name`, or the current rows of its database query.

    Raises ConfigError: the settings name neither a file nor a database of this party.
    """
    party_settings = (settings.parties or {})[name]
    if party_settings.database is None:
        if party_settings.file is None:
            key = f"data.parties.{name}.file"
            raise ConfigError(
                f"{key} is not set here, so only {name} can read its table: add --set {key}=FILE, "
                f"set it in the run's file, or run this command at {name}; a forecast without "
                "others' tables is secure-apfed plan --config PARTY.yaml"
            )
        return resolve_party_path(settings, party_settings.file)
    return query_table(party_settings.database, partial(resolve_party_path, settings), party=name)


def resolve_party_path(settings: DataSettings, file: Path) -> Path:
    """Return the path of a party's file.

    A relative path starts at the setting `data.folder`, or else at the working directory.
    """
    return (settings.folder or Path()).expanduser() / file.expanduser()


def _choose_columns(
    frame: pd.DataFrame,
    settings: DataSettings,
    party: str,
    *,
    id_and_label_columns: tuple[str, ...],
    faults: FaultList,
) -> _ColumnChoice:
    """Return the columns of a party's table that are features.

    Columns that the party's settings list as numeric or categorical are taken so. All others are
    numeric if their cells are numbers or dates, and else categorical.

    Args:
        frame: the table.
        settings: the data settings of the run.
        party: the party that owns the table.
        id_and_label_columns: columns of IDs and labels.
        faults: receives the faults of columns.
    """
    party_settings = (settings.parties or {})[party]
    advice = _make_advice(settings, party)
    formats = settings.find_date_formats(party)
    columns_by_setting = {
        "numeric": party_settings.numeric or (),
        "categorical": party_settings.categorical or (),
    }
    listed_columns = {*columns_by_setting["numeric"], *columns_by_setting["categorical"]} - {
        *party_settings.ignore
    }
    ignored_though_listed = [
        column
        for names in columns_by_setting.values()
        for column in names
        if column in party_settings.ignore
    ]
    if ignored_though_listed:
        _warn_of_column(
            f"{party}: {', '.join(ignored_though_listed)} is left out, since "
            f"data.parties.{party}.ignore names it beside another list"
        )
    faulty_columns = set[str]()
    if settings.has_labels(party) and settings.label_column in listed_columns:
        listed_columns.remove(settings.label_column)
        faulty_columns.add(settings.label_column)
        faults.add_error(
            _make_label_as_feature_error(settings.label_column, columns_by_setting, advice=advice)
        )
    decided_columns = (*id_and_label_columns, *party_settings.ignore, *listed_columns)
    candidates = [column for column in frame.columns if column not in decided_columns]
    if nameless_columns := [column for column in candidates if column.startswith(_NAMELESS_PREFIX)]:
        faulty_columns.update(nameless_columns)
        faults.add_error(
            _make_nameless_error(
                nameless_columns, table_name=party_settings.table_name, advice=advice
            )
        )
    measure_columns = [column for column in candidates if has_measures(frame[column], formats)]
    numeric = [
        *(column for column in columns_by_setting["numeric"] if column in listed_columns),
        *measure_columns,
    ]
    categorical = [
        column for column in columns_by_setting["categorical"] if column in listed_columns
    ]
    max_categories = party_settings.rare_categories.most
    if party_settings.encoding is None:
        listed_as_numeric = [
            column for column in columns_by_setting["numeric"] if column in listed_columns
        ]
        if columns_with_texts := _list_non_numeric(frame, listed_as_numeric, formats, party=party):
            faulty_columns.update(columns_with_texts)
            error = _make_numeric_texts_error(
                frame, columns_with_texts, advice=advice, max_categories=max_categories
            )
            faults.add_error(error)
    text_columns = [column for column in candidates if column not in measure_columns]
    categorical += text_columns
    if party_settings.encoding is None:
        columns_to_check = [column for column in text_columns if column not in faulty_columns]
        faulty_columns |= _check_categories(
            frame, columns_to_check, advice=advice, max_categories=max_categories, faults=faults
        )
    if not settings.has_labels(party) and settings.label_column in (*numeric, *categorical):
        faulty_columns.add(settings.label_column)
        faults.add_error(_make_label_at_passive_error(settings.label_column, advice=advice))
    return _ColumnChoice(tuple(numeric), tuple(categorical), frozenset(faulty_columns))


def _check_categories(
    frame: pd.DataFrame,
    columns: Sequence[str],
    *,
    advice: Advice,
    max_categories: int | None,
    faults: FaultList,
) -> set[str]:
    """Return the text columns that look like numbers or dates, and add their faults to `faults`.

    Also warn of columns of codes with leading zeros, which may be categories or numbers.

    Args:
        frame: the table.
        columns: the text columns, which would be encoded one-hot.
        advice: proposes settings for errors.
        max_categories: the party's limit of categories in one column; None: none is set.
        faults: receives the faults.
    """
    faulty_columns = set[str]()
    for column in columns:
        if are_padded_codes(frame[column]):
            _warn_of_column(
                f"{advice.party}: column {column!r} holds digits, some with leading zeros, and is "
                f"taken as a category; say {advice.add_to_list('categorical', column)} if it is "
                f"one, or {advice.add_to_list('numeric', column)} if its cells are numbers"
            )
        # A stray text among numbers must not silently make each number a category.
        elif fault := find_look_alike(frame[column], advice=advice, max_categories=max_categories):
            faulty_columns.add(column)
            faults.add_error(TableError([fault]))
    return faulty_columns


def _make_label_as_feature_error(
    column: str, columns_by_setting: Mapping[str, Sequence[str]], *, advice: Advice
) -> TableError:
    """Return the error for a label column that is listed as a feature.

    `columns_by_setting`: columns by the setting that lists them. `advice`: words the settings that
    the error proposes.
    """
    remedy: Remedy = tuple(
        advice.drop_from_list(key, column)
        for key, names in columns_by_setting.items()
        if column in names
    )
    return TableError(
        [
            Fault(
                f"{advice.party}: its column {column!r} holds the labels, and is listed as a "
                f"feature; say {describe_remedies([remedy])}",
                (remedy,),
            )
        ]
    )


def _make_label_at_passive_error(column: str, *, advice: Advice) -> TableError:
    """Return the error for a passive's column with the name of the active's labels.

    `advice`: words the settings that the error proposes.
    """
    remedy: Remedy = (advice.add_to_list("ignore", column),)
    return TableError(
        [
            Fault(
                f"{advice.party}: its column {column!r} is called like the active's labels, which "
                f"a passive must not train on; rename it, or say {describe_remedies([remedy])}",
                (remedy,),
            )
        ]
    )


def _make_nameless_error(columns: Sequence[str], *, table_name: str, advice: Advice) -> TableError:
    """Return the error for columns without a name; it gives their positions.

    Args:
        columns: the names "Unnamed: 0", "Unnamed: 1" and so on, which pandas gives such columns.
        table_name: the table's name, for the error.
        advice: words the settings that the error proposes.
    """
    column_numbers = ", ".join(
        str(int(column.removeprefix(_NAMELESS_PREFIX)) + 1) for column in columns
    )
    remedy: Remedy = (advice.add_to_list("ignore", *columns),)
    return TableError(
        [
            Fault(
                f"{advice.party}: {table_name} has no name for its column {column_numbers} (from "
                "1); name it "
                f"in the first line, leave the column out, or say {describe_remedies([remedy])}",
                (remedy,),
            )
        ]
    )


def _list_non_numeric(
    frame: pd.DataFrame, columns: Sequence[str], formats: Sequence[str], *, party: str
) -> list[str]:
    """Return the columns, among `columns`, with cells that are neither numbers nor dates.

    `formats`: date formats besides ISO 8601. `party`: the party's name.
    """
    columns_with_texts = []
    for column in columns:
        if has_measures(frame[column], formats):
            continue
        try:
            # Called for its DataError: some cell is not a number.
            read_numbers(frame[column], source=party)
        except DataError:
            columns_with_texts.append(column)
    return columns_with_texts


def _make_numeric_texts_error(
    frame: pd.DataFrame, columns: Sequence[str], *, advice: Advice, max_categories: int | None
) -> TableError:
    """Return the error for columns that are listed as numeric and contain texts.

    Args:
        frame: the table.
        columns: the columns that contain texts, at least one.
        advice: proposes settings for the error.
        max_categories: the party's limit of categories in one column; None: none is set.
    """
    category_limit_lines = list[SettingLine]()
    for column in columns:
        remedies_of_column = propose_categories(
            frame[column], advice=advice, max_categories=max_categories
        )
        # The first remedy declares the column categorical; its further lines limit categories.
        declaring_remedy = remedies_of_column[0]
        category_limit_lines += declaring_remedy[1:]
    declare_categorical: Remedy = (
        advice.drop_from_list("numeric", *columns),
        advice.add_to_list("categorical", *columns),
        *category_limit_lines[:1],  # the setting is of the party, not of a column: once is enough
    )
    ignore: Remedy = (advice.add_to_list("ignore", *columns),)
    remedies = (declare_categorical, ignore)
    reason = ""
    try:
        # Called for its DataError, which names the first cell that is not a number.
        read_numbers(frame[columns[0]], source=advice.party)
    except DataError as error:
        reason = str(error)
    return TableError(
        [
            Fault(
                f"{reason}{_mention_columns(columns[1:])}, or say {describe_remedies(remedies)}",
                remedies,
            )
        ]
    )


def _mention_columns(columns: Sequence[str]) -> str:
    """Return the words of an error that name further faulty columns; "" without further columns."""
    return f" (so are cells of {', '.join(columns)})" if columns else ""


def _mask_empty_words(column: "pd.Series", *, advice: Advice) -> "pd.Series":
    """Return a text column of a CSV file in which words such as "NA" became empty cells.

    Warn of these words. `advice`: words the setting that keeps them as categories.
    """
    is_empty_N = is_empty(column)
    texts = (cell.strip() for cell in column[is_empty_N].tolist() if isinstance(cell, str))
    if count_by_word := Counter(text for text in texts if text):
        counts_text = ", ".join(
            f"{word!r} ({count})" for word, count in sorted(count_by_word.items())
        )
        _warn_of_column(
            f"{advice.party}: cells {counts_text} of column {column.name!r} count as empty; if "
            f"they are a category, say {advice.add_to_list('categorical', str(column.name))}"
        )
    return column.mask(is_empty_N) if is_empty_N.any() else column


def _extract_ids(
    frame: pd.DataFrame, columns: tuple[str, ...], *, table_name: str, party: str
) -> Sequence[str]:
    """Return one ID for each row, as text; several ID columns are joined to one ID.

    The IDs of a table on disk are on disk, too.

    `table_name`: the table's name, for errors. `party`: the party's name.

    Raises DataError: a cell is no ID.
    """
    reader_by_column = {
        name: IdReader(
            f"{party}: column {name!r} of {table_name}",
            describe_place=lambda row: describe_row(frame, row),
            should_strip=True,
            is_one_of_several=len(columns) > 1,
            settings_key=f"data.parties.{party}.id_column",
        )
        for name in columns
    }
    id_blocks = _iterate_ids(frame, reader_by_column)
    if find_column_files(frame) is not None:
        return MappedIds(id_blocks, party=party)
    return tuple(chain.from_iterable(id_blocks))


def _iterate_ids(
    frame: pd.DataFrame, reader_by_column: Mapping[str, IdReader]
) -> Iterator[list[str]]:
    """Yield the IDs in blocks; if there are several ID columns, their texts are joined.

    Once a cell is no ID, no block is yielded any more, but all cells are still checked.

    `reader_by_column`: for each ID column the object that converts and checks its cells.

    Raises DataError: cells are no IDs. The error lists all such cells of one column.
    """
    columns = {name: frame[name] for name in reader_by_column}
    for start in range(0, len(frame), _IDS_PER_BLOCK):
        texts_by_column = [
            reader.convert_column(columns[name].iloc[start : start + _IDS_PER_BLOCK])
            for name, reader in reader_by_column.items()
        ]
        if not all(reader.has_no_refusals for reader in reader_by_column.values()):
            continue
        if len(texts_by_column) == 1:
            yield texts_by_column[0]
        else:
            yield [COLUMN_SEPARATOR.join(texts) for texts in zip(*texts_by_column, strict=True)]
    for reader in reader_by_column.values():
        reader.require_no_refusals()


def load_tables(settings: DataSettings, *, seed: int) -> VerticalData:
    """Return all parties' tables, the active first, each in its file's order.

    The active's rows are split into training and test rows with the seed. The passives may lack
    people in the test rows.

    Raises:
        TableError: all faults of all tables.
        ConfigError: the settings name no table of a party, and the other tables have no fault.
    """
    faults = FaultList()
    missing_table_errors = list[ConfigError]()  # raised only if no table has a fault
    passives = list[PartyTable]()
    active_data: OwnData | None = None
    for name in party_names(settings):
        try:
            with faults.gather_faults():
                if name == settings.active:
                    active_data = _load_active(settings, seed=seed)
                else:
                    table, _ = _load_passive(settings, name, seed=seed)
                    passives.append(table)
        except ConfigError as error:
            missing_table_errors.append(error)
    faults.raise_faults()
    if missing_table_errors:
        raise missing_table_errors[0]
    assert active_data is not None
    return VerticalData(
        **vars(active_data),
        passives=tuple(passives),
        labels_at=settings.labels_at,
        is_horizontal=settings.is_horizontal,
    )


def find_table_faults(settings: DataSettings, name: str, *, seed: int) -> tuple[Fault, ...]:
    """Return all faults of the table of the party `name`, each with remedies.

    `seed`: seed of the run, which decides the rows to which columns are fitted.
    """
    faults = FaultList()
    with faults.gather_faults():
        # The data are not needed, only the faults that reading them reports.
        load_own_tables(settings, name, seed=seed)
    return tuple(faults.faults)


def has_table_here(settings: DataSettings, name: str) -> bool:
    """Return whether the settings name a file of the party `name` that is on this machine."""
    party_settings = (settings.parties or {}).get(name)
    if (
        settings.dataset != OWN_TABLES
        or party_settings is None
        or not party_settings.is_read_from_file
    ):
        return False
    path = resolve_party_path(settings, party_settings.file or Path(str(party_settings.rows)))
    if path.exists():
        return True
    is_pattern = not set(path.name).isdisjoint("*?[")
    return is_pattern and any(path.parent.glob(path.name))


def compute_files_digest(settings: DataSettings, *, parties: Sequence[str] | None = None) -> str:
    """Return the SHA-256 (hex) of parties' own files, and of the current rows of their queries.

    Stored results are reused only if this digest is unchanged. It is "" for a built-in data set,
    which never changes.

    Args:
        settings: the data settings of the run.
        parties: names of the parties whose files are read; None: all parties.
    """
    if settings.parties is None:
        return ""
    digest = hashlib.sha256()
    for name, party_settings in sorted(settings.parties.items()):
        if parties is not None and name not in parties:
            continue
        table: Path | pyarrow.Table | None = None
        if party_settings.has_table or party_settings.rows is None:
            table = open_table(settings, name)
        encoding: Path | None = None
        if party_settings.encoding is not None:
            encoding = resolve_party_path(settings, party_settings.encoding)
        for source in (table, encoding):
            digest.update(repr((name, _compute_digests(source, name))).encode())
        if party_settings.rows is not None:
            digest.update(repr((name, _describe_rows(settings, name))).encode())
    return digest.hexdigest()


def _describe_rows(settings: DataSettings, name: str) -> list[str]:
    """Return texts that change when the rows of the party `name` change.

    These rows are not columns of a table. For an array file the text is its SHA-256, for code its
    import path. For images there is one text for each file, with its name, size and time of change:
    reading all images takes too long.
    """
    party_settings = (settings.parties or {})[name]
    path = resolve_party_path(settings, Path(party_settings.rows or ""))
    if _are_images(settings, name):
        files = sorted(file for file in path.rglob("*") if file.is_file())
        status_by_file = [(file.relative_to(path), file.stat()) for file in files]
        return [f"{file} {status.st_size} {status.st_mtime_ns}" for file, status in status_by_file]
    if party_settings.rows_import_path is not None:
        return [party_settings.rows_import_path]
    return _compute_digests(path, name) or []


def _compute_digests(source: Path | pyarrow.Table | None, party: str) -> list[str] | None:
    """Return texts that change when a source of rows changes.

    For a path they are the SHA-256 (hex) of each of its files. For the rows of a query they are the
    column names and the SHA-256 of the rows. None: there is no source.

    `source`: a path, which may be a folder or a pattern; the rows of a query; or None.
    """
    if source is None:
        return None
    if not isinstance(source, Path):
        rows = pd.util.hash_pandas_object(source.to_pandas(), index=False).to_numpy().tobytes()
        return [*source.column_names, hashlib.sha256(rows).hexdigest()]
    digests = []
    for path in list_files(source, source=party):
        try:
            with path.open("rb") as file:
                digests.append(hashlib.file_digest(file, "sha256").hexdigest())
        except OSError as error:
            raise DataError(f"{party}: {path} cannot be read ({error}); check the path") from error
    return digests


def _load_active(
    settings: DataSettings, *, seed: int, make_rows: MakeRows | None = None
) -> OwnData:
    """Read the active's table, and return it with its classes, split and labelled training rows.

    Rows with an empty label are training rows without a label, never test rows.

    Args:
        settings: the data settings of the run.
        seed: seed of the split and of the choice of labelled rows.
        make_rows: the active's own function that makes its rows; None: there is none.

    Raises TableError: all faults of the table.
    """
    name = settings.active
    faults = FaultList()
    raw = _load_raw_table(settings, name, faults, make_rows)
    with faults.gather_faults():
        labels, sampling_groups, classes = _prepare_labels(settings, raw, party=name)
    if faults:
        _gather_column_faults(settings, name, raw, faults)
        faults.raise_faults()
    is_train, used_rows = _split_active_rows(settings, sampling_groups, seed=seed)
    if len(used_rows) < len(labels):
        raw = raw.select_rows(used_rows)
        labels = labels[used_rows]
        sampling_groups = sampling_groups[used_rows]
    train_rows = np.flatnonzero(is_train)
    features, encoding, views = _encode_table(settings, name, raw, fitted_rows=train_rows)
    chosen_positions = choose_labelled_rows(
        sampling_groups[train_rows], settings.labelled, seed=seed, choice=settings.split
    )
    labelled_rows = train_rows if chosen_positions is None else train_rows[chosen_positions]
    target_scale: TargetScale | None = None
    if labels_are_numbers(settings):
        # It is fitted to the labels that are learnt, and so to none of a test row.
        target_scale = TargetScale.from_targets(labels[labelled_rows], party=name)
        encoded_labels = target_scale.encode(labels, party=name)
    else:
        encoded_labels = torch.from_numpy(labels)
    return OwnData(
        table=PartyTable(name, raw.ids, features, encoded_labels, encoding, views),
        train_rows=torch.from_numpy(train_rows),
        test_rows=torch.from_numpy(np.flatnonzero(~is_train)),
        classes=classes,
        labelled=None if chosen_positions is None else torch.from_numpy(labelled_rows),
        targets=target_scale,
    )


def _split_active_rows(
    settings: DataSettings, groups_N: NDArray[np.int64], *, seed: int
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return whether each used row is a training row, and the used rows' positions, ascending.

    Rows without a label are training rows. If `limit` is set, only so many training rows are used.

    `groups_N`: the group by which each of N rows is sampled, `UNLABELLED` without a label.
    """
    labelled_rows = np.flatnonzero(groups_N != UNLABELLED)
    train_positions, test_positions = split_rows(
        groups_N[labelled_rows], settings.test_fraction, seed=seed, split=settings.split
    )
    unlabelled_rows = np.flatnonzero(groups_N == UNLABELLED)
    train_rows = np.sort(np.concatenate([labelled_rows[train_positions], unlabelled_rows]))
    if settings.limit is not None:
        train_rows = make_generator(seed, "limit").permutation(train_rows)[: settings.limit]
    used_rows = np.sort(np.concatenate([train_rows, labelled_rows[test_positions]]))
    return np.isin(used_rows, train_rows), used_rows


def _prepare_labels(
    settings: DataSettings, raw: RawTable, *, party: str
) -> tuple[NDArray[Any], NDArray[np.int64], tuple[str, ...]]:
    """Return the labels to learn (N,), the sampling group of each row (N,), and the class names.

    Test rows and labelled rows are drawn from each group. A row's group is its class, or
    `UNLABELLED` without a label. If labels are numbers to predict, all rows with a label are one
    group, and there are no class names.

    `raw`: the table as it was read. `party`: the party's name.

    Raises DataError: no row has a label, or all have the same.
    """
    column = settings.label_column
    if labels_are_numbers(settings):
        numbers = parse_numbers(raw.labels, party=party, column=column)
        return numbers, np.where(np.isnan(numbers), UNLABELLED, 0), ()
    known_labels = [label for label in raw.labels if label is not None]
    if not known_labels:
        raise DataError(
            f"{party}: its label column is empty in all {len(raw.labels)} rows; name the column "
            "that holds labels as label_column"
        )
    if len(set(known_labels)) < 2:
        raise DataError(
            f"{party}: all {len(known_labels)} labels are {known_labels[0]:.40}; two classes are "
            "needed, so add rows of another one"
        )
    listed_classes = settings.explicit_classes or None
    labels, classes = encode_class_labels(raw.labels, listed_classes, party=party, column=column)
    positive = settings.positive
    if (
        positive is None
        and listed_classes is None
        and len(classes) == 2
        and settings.split == "by_class"
    ):
        positive = choose_positive(labels, classes)
    # Rows are sampled by the classes before they are renumbered: which class is positive must not
    # change which rows are test rows.
    sampling_groups = labels
    labels, classes = move_positive_last(labels, classes, positive, where=f"{party}: positive")
    return labels, sampling_groups, classes


def load_own_tables(
    settings: DataSettings, name: str, *, seed: int, make_rows: MakeRows | None = None
) -> OwnData:
    """Return the data of the party `name`, read from its own file alone.

    Args:
        settings: the data settings of the run.
        name: the party.
        seed: seed of the split and of the choice of labelled rows.
        make_rows: the party's own function that makes its rows; None: its setting `rows` names the
            source, or its table has all columns.

    Raises:
        ConfigError: the settings name no file of the party.
        DataError: the table has faults.
    """
    if name not in (settings.parties or {}):
        raise ConfigError(
            f"data.parties: there is no file of {name!r}; name its own file there (dataset: "
            "tables), or let the party's file say which prepared table is its own"
        )
    if name == settings.active:
        data = _load_active(settings, seed=seed, make_rows=make_rows)
    else:
        table, classes = _load_passive(settings, name, seed=seed, make_rows=make_rows)
        data = OwnData.for_passive(table, classes)
    default_memory_pool().release_unused()  # memory of the columns as they were read
    return data


def _load_passive(
    settings: DataSettings, name: str, *, seed: int, make_rows: MakeRows | None = None
) -> tuple[PartyTable, tuple[str, ...]]:
    """Read the table of the passive `name`; return it with the class names if it has labels.

    Its labels may include people in the active's test rows, which the passive does not know.

    Args:
        settings: the data settings of the run.
        name: the passive.
        seed: seed of the choice of labelled rows.
        make_rows: the passive's own function that makes its rows; None: there is none.

    Raises TableError: all faults of the table.
    """
    faults = FaultList()
    raw = _load_raw_table(settings, name, faults, make_rows)
    labels = None
    classes = settings.explicit_classes
    with faults.gather_faults():
        if settings.has_labels(name):
            encoded_labels, classes = encode_class_labels(
                raw.labels, classes, party=name, column=settings.label_column
            )
            encoded_labels, classes = move_positive_last(
                encoded_labels, classes, settings.positive, where=f"{name}: positive"
            )
            used_labels = hide_passive_labels(
                encoded_labels, settings.labelled, seed=seed, choice=settings.split, party=name
            )
            labels = torch.from_numpy(used_labels)
    if faults:
        _gather_column_faults(settings, name, raw, faults)
        faults.raise_faults()
    features, encoding, views = _encode_table(
        settings, name, raw, fitted_rows=np.arange(len(raw.ids))
    )
    return PartyTable(name, raw.ids, features, labels, encoding, views), classes


def _gather_column_faults(
    settings: DataSettings, name: str, raw: RawTable, faults: FaultList
) -> None:
    """Add the faults that fitting an encoding to the columns would find to `faults`.

    It is called for a table that has other faults already, and so is not encoded: the user then
    sees all faults at once.

    `name`: the party. `raw`: its table as it was read.
    """
    party_settings = (settings.parties or {})[name]
    advice = _make_advice(settings, name)
    if not _has_columns(raw.features):
        return
    if party_settings.encoding is not None or not raw.features.shape[1]:
        return
    if settings.find_missing_rule(name) == "error":
        with faults.gather_faults():
            refuse_empty_cells(raw.features, categorical=raw.categorical, advice=advice)
    columns = [column for column in raw.features.columns if column not in raw.faulty_columns]
    if columns:
        with faults.gather_faults():
            fit_columns(
                select_columns(raw.features, columns),
                categorical=raw.categorical,
                missing="mean",  # empty cells are reported already
                max_categories=party_settings.rare_categories.most,
                source=name,
                formats=settings.find_date_formats(name),
                advice=advice,
            )


def _encode_table(
    settings: DataSettings, name: str, raw: RawTable, *, fitted_rows: NDArray[np.int64]
) -> tuple[Any, ColumnEncoding | ArrayEncoding, dict[str, View]]:
    """Return the features of all rows (N, ...), their encoding, and the party's views by name.

    If the party's settings name an encoding, it is used unchanged, and the party is warned of
    categories and columns that it does not know. Otherwise an encoding is fitted. Rows that are not
    columns of a table are returned as they are.

    Args:
        settings: the data settings of the run.
        name: the party that owns the table.
        raw: its table, as read.
        fitted_rows: positions of the rows to which an encoding is fitted.

    Raises TableError: all faults that fitting or encoding finds.
    """
    if not _has_columns(raw.features):
        shape = tuple(int(size) for size in raw.features.shape[1:])
        return raw.features, ArrayEncoding(row_shape=shape), {}
    party_settings = (settings.parties or {})[name]
    advice = _make_advice(settings, name)
    columns_by_view = _find_columns_by_view(settings, name, raw.features)
    cell_counts = CellCounts()
    if party_settings.encoding is None:
        encoding = _fit_encoding(settings, name, raw, columns_by_view, fitted_rows=fitted_rows)
    else:
        encoding = _load_encoding(
            resolve_party_path(settings, party_settings.encoding), party_settings.encoding, name
        )
        columns = tuple(column.name for column in encoding.columns)
        if settings.view_columns is None:  # the only view has the columns that the encoding reads
            columns_by_view = {view: ViewColumns(columns=columns) for view in columns_by_view}
    view_by_name = find_view_ranges(encoding, columns_by_view, source=name)
    features: Any
    if (columns_on_disk := find_column_files(raw.features)) is not None:
        features = columns_on_disk.encode_rows(encoding, source=name, cell_counts=cell_counts)
    else:
        features = encoding.encode(raw.features, source=name, counts=cell_counts)
    if party_settings.encoding is not None:
        cell_counts.warn_of_unseen_cells(source=name)
        known_columns = {column.name for column in encoding.columns}
        if unknown_columns := [
            column for column in raw.features.columns if column not in known_columns
        ]:
            _warn_of_column(
                f"{name}: {party_settings.encoding} does not know the columns "
                f"{', '.join(unknown_columns)}, which are left out; if that is right, say "
                f"{advice.add_to_list('ignore', *unknown_columns)}"
            )
    return features, encoding, view_by_name


def _fit_encoding(
    settings: DataSettings,
    name: str,
    raw: RawTable,
    columns_by_view: Mapping[str, ViewColumns],
    *,
    fitted_rows: NDArray[np.int64],
) -> ColumnEncoding:
    """Return an encoding that is fitted to these rows of the table of the party `name`.

    Args:
        settings: the data settings of the run.
        name: the party that owns the table.
        raw: its table, as read; its features are columns.
        columns_by_view: the columns of each view.
        fitted_rows: positions of the rows to which the encoding is fitted.

    Raises TableError: all faults, of empty cells and of columns.
    """
    assert _has_columns(raw.features)
    has_all_rows = len(fitted_rows) == len(raw.ids)
    fitted_frame = raw.features if has_all_rows else raw.features.iloc[fitted_rows]
    advice = _make_advice(settings, name)
    missing_rule = settings.find_missing_rule(name)
    faults = FaultList()
    if missing_rule == "error":  # checked in all rows, not only in the rows of the fit
        with faults.gather_faults():
            refuse_empty_cells(raw.features, categorical=raw.categorical, advice=advice)
    with faults.gather_faults():
        encoding = fit_views(
            fitted_frame,
            columns_by_view,
            categorical=raw.categorical,
            # Empty cells are reported already, and must not hide other faults.
            missing="mean" if faults else missing_rule,
            max_categories=(settings.parties or {})[name].rare_categories.most,
            source=name,
            formats=settings.find_date_formats(name),
            advice=advice,
        )
    faults.raise_faults()
    return encoding


def _load_encoding(path: Path, shown_path: Path, party: str) -> ColumnEncoding:
    """Return the encoding of columns that a JSON file contains.

    The file is an encoding itself, or a mapping with the key "encoding", such as a model card.

    `path`: the file. `shown_path`: the path as the settings write it, for errors.

    Raises DataError: the file holds no encoding, or an encoding of images.
    """
    try:
        content = load_json(path, dict[str, Any])
        encoding = parse_encoding(content.get("encoding", content))
    except (CheckpointError, DataError) as error:
        raise DataError(f"{party}: {shown_path} holds no encoding in JSON: {error}") from error
    if not isinstance(encoding, ColumnEncoding):
        raise DataError(f"{party}: {shown_path} is an encoding of images, its file is a table")
    return encoding


def _find_columns_by_view(
    settings: DataSettings, name: str, features: pd.DataFrame
) -> dict[str, ViewColumns]:
    """Return the columns of each view of the party `name`, by the view's name.

    If the settings list no views, all columns of the party are one view.

    `features`: the party's feature columns.

    Raises DataError: a feature column is in no view, or in several, or a view lacks a column.
    """
    columns = tuple(map(str, features.columns))
    if not columns:
        raise DataError(NO_FEATURES.format(source=name))
    if settings.view_columns is None:
        return {_COMMON_VIEW_NAME if settings.is_horizontal else name: ViewColumns(columns=columns)}
    own_columns_by_view = {
        view_name: view
        for view_name, view in settings.view_columns.items()
        if not set(columns).isdisjoint(view.columns)
    }
    viewed_columns = [column for view in own_columns_by_view.values() for column in view.columns]
    misplaced_columns = [
        column
        for column in dict.fromkeys((*viewed_columns, *columns))
        if viewed_columns.count(column) != 1 or column not in columns
    ]
    if misplaced_columns:
        message = (
            f"{name}: view_columns must name each of its feature columns once, and all of a view "
            f"or none; look at {', '.join(misplaced_columns[:5])}: put them into one view"
        )
        if any(column in viewed_columns for column in misplaced_columns):
            raise DataError(message)
        remedy: Remedy = (_make_advice(settings, name).add_to_list("ignore", *misplaced_columns),)
        raise TableError([Fault(f"{message}, or say {describe_remedies([remedy])}", (remedy,))])
    return own_columns_by_view

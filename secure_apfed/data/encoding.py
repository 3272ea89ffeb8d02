"""The encoding of one party's raw data as features: standardised numbers, one-hot texts, image
strips.

Run by: that party alone, with statistics of its own rows (the active: its training rows only). The
fitted encoding is plain data, so that the same columns can be encoded again when the model
predicts. The kind of a column is fitted, too, and decides how its cells are read: independently of
the file or frame, and of the number of rows.

A party's features may be several views, some of which are sequences. A row is flat: a view that is
a sequence begins with the number of steps in use. Its steps follow one after another, each with its
channels; steps that are not in use are zeros. Encoding keeps the number of steps and the zeros:
the number of steps stays as it is, and each channel is divided by the root of its mean square over
the steps in use, but not shifted.

Letters: N rows, B rows of a block, F features, T steps, C channels; for images H height and W width
in pixels, S pixel rows of the strip that a party holds.
"""

import math
import unicodedata
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeAlias

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter, ValidationError, model_validator

from apfed_protocols.ids import EMPTY_CELL_TEXTS
from secure_apfed.base.faults import (
    Advice,
    Fault,
    FaultList,
    Remedy,
    TableError,
    describe_remedies,
)
from secure_apfed.base.names import column_name
from secure_apfed.data.frames import (
    BLANK,
    FEW_CATEGORIES,
    TRUTH_BY_WORD,
    are_padded_codes,
    is_csv,
    is_date,
    is_duration,
    is_empty,
    normalise_spelling,
    read_days,
    read_durations,
    read_numbers,
    read_texts,
    select_columns,
)
from secure_apfed.data.lazy_rows import read_column
from secure_apfed.errors import DataError, UnseenCellsWarning
from secure_apfed.settings import Settings
from secure_apfed.settings.data import MAX_CATEGORIES, Missing, ViewColumns

MAX_IMAGE_NUMBERS = 2**22
"""Largest number of values of one image or row of an array, over all channels, such as an image of
1,182 x 1,182 pixels in three colours."""
NO_FEATURES = (
    "{source}: no feature columns are left beside IDs, labels and what is under ignore; take a "
    "column out of ignore, or name a table with features"
)
# Settings of `missing` that accept empty cells.
_RULES_THAT_ACCEPT_EMPTY: tuple[Missing, ...] = ("mean", "drop")
_CONSTANT_SPREAD = (
    8 * np.finfo(np.float64).eps
)  # relative spread of a column that counts as constant
# Relative distance from a constant column's value that counts as equal, such as in float32.
_EQUAL_TOLERANCE = 1e-6
RawFeatures: TypeAlias = pd.DataFrame | NDArray[np.generic]
# By kind of column, the function that reads its numbers; dates also need the accepted formats.
_READER_BY_KIND = MappingProxyType({"numeric": read_numbers, "duration": read_durations})


class _EncodedCells(NamedTuple):
    """One column's encoded cells.

    Attributes:
        features: the column's features, (N, F).
        is_empty: whether each cell is empty, (N,).
        is_ignored: whether each cell is ignored, since no training row had such a value, (N,).
    """

    features: NDArray[np.float64]
    is_empty: NDArray[np.bool_]
    is_ignored: NDArray[np.bool_]


@dataclass
class CellCounts:
    """The number of encoded rows, and by column the numbers of empty and of ignored cells.

    A cell is ignored if its category is unknown, or if the column was constant in training and the
    cell has another value.
    """

    row_count: int = 0
    empty_by_column: Counter[str] = field(default_factory=Counter)
    ignored_by_column: Counter[str] = field(default_factory=Counter)

    def warn_of_unseen_cells(self, *, source: str) -> None:
        """Warn of each column with ignored cells.

        `source`: name of the table, for the warnings.
        """
        for name, count in self.ignored_by_column.items():
            warnings.warn(
                f"{source}: {count} of {self.row_count} cells of column {name!r} hold what no "
                "training row held, and count for nothing",
                UnseenCellsWarning,
                stacklevel=3,
            )


class NumericColumn(Settings):
    """A numeric column, encoded as (value - mean) / scale, where scale is the standard deviation.

    Attributes:
        name: name of the column.
        mean, scale: of the fitted rows; dates are numbers of days since 1970-01-01, and durations
            are numbers of days.
        kind: how cells are read; a number is never taken as a date or duration.
        constant: whether all fitted rows had the same value; the scale is then undefined, and the
            feature is 0 for any cell.
        date_formats: the accepted formats of dates, in addition to 2026-01-31.
    """

    name: str
    mean: float = 0.0
    scale: float = Field(1.0, gt=0)
    constant: bool = False
    kind: Literal["numeric", "date", "duration"] = "numeric"
    date_formats: tuple[str, ...] = ()

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the column's features: a single one."""
        return (self.name,)

    def encode(self, column: "pd.Series", *, source: str) -> _EncodedCells:
        """Return the column's single feature, (N, 1); an empty cell becomes 0, which is the mean.

        `source`: the party's name, for errors.
        """
        numbers_N = _parse_numbers(column, self.kind, source=source, formats=self.date_formats)
        is_empty_N = np.isnan(numbers_N)
        is_ignored_N = np.zeros(len(numbers_N), dtype=bool)
        standard_N = np.where(is_empty_N, 0.0, (numbers_N - self.mean) / self.scale)
        if self.constant:
            is_ignored_N = ~is_empty_N & (
                np.abs(numbers_N - self.mean) > _EQUAL_TOLERANCE * abs(self.mean)
            )
            standard_N = np.zeros(len(numbers_N))
        return _EncodedCells(standard_N[:, None], is_empty_N, is_ignored_N)


def _parse_numbers(
    column: "pd.Series", kind: str, *, source: str, formats: Sequence[str] = ()
) -> NDArray[np.float64]:
    """Return a column as finite numbers (N,), not standardised; NaN for an empty cell.

    Args:
        column: cells of the column.
        kind: "numeric", "date" or "duration"; the latter two become days.
        source: the party's name, for errors.
        formats: date formats besides ISO 8601.

    Raises DataError: a cell is of another kind, or infinite.
    """
    if kind == "date":
        numbers = read_days(column, source=source, formats=formats)
    else:
        numbers = _READER_BY_KIND[kind](column, source=source)
    if infinite_count := int(np.count_nonzero(np.isinf(numbers))):
        raise DataError(
            f"{source}: column {column.name!r} has {infinite_count} infinite numbers; mend them"
        )
    return numbers


class CategoricalColumn(Settings):
    """A column in one-hot encoding; an unknown or empty cell becomes zeros in all its features.

    Attributes:
        name: name of the column.
        categories: the texts that have a feature each, in order.
        words: texts such as "NA" that usually mark an empty cell, but were filled cells of this
            column.
        constant: whether all fitted rows had one category; the feature is then 1 for any cell.
    """

    kind: Literal["categorical"] = "categorical"
    name: str
    categories: tuple[str, ...] = Field(min_length=1)
    words: tuple[str, ...] = ()
    constant: bool = False

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the column's features, one for each category."""
        return tuple(f"{self.name}={category}" for category in self.categories)

    @property
    def category_by_spelling(self) -> dict[str, str]:
        """The categories by the texts that other programs may write for them.

        An export, which compares texts only, uses this table in place of `match_categories`.
        """
        return self.match_categories(
            text for category in self.categories for text in self._list_spellings(category)
        )

    def match_categories(self, texts: Iterable[str]) -> dict[str, str]:
        """Return the category of each of these texts, by text.

        A text belongs to the category that is the same text. Otherwise it belongs to the category
        with the same meaning: the same number, the same moment or, if all categories are truth
        values, the same truth value. A text with the meaning of no category, or of several, is left
        out.
        """
        category_by_nfc_text = {column_name(category): category for category in self.categories}
        categories_by_meaning = defaultdict[str, set[str]](set)
        for nfc_text, category in category_by_nfc_text.items():
            categories_by_meaning[self._normalise_text(nfc_text)].add(category)
        category_by_text = {}
        for text in texts:
            nfc_text = column_name(text)  # the text in Unicode NFC
            if nfc_text in category_by_nfc_text:
                category_by_text[text] = category_by_nfc_text[nfc_text]
                continue
            matching_categories = categories_by_meaning[self._normalise_text(text)]
            if len(matching_categories) == 1:
                (category_by_text[text],) = matching_categories
        return category_by_text

    def _normalise_text(self, text: str) -> str:
        """Return one text for all spellings of a number, a moment or a truth value."""
        truth_value = _parse_truth(text) if self._has_only_truth_values else None
        return normalise_spelling(column_name(text)) if truth_value is None else str(truth_value)

    @property
    def _has_only_truth_values(self) -> bool:
        """Whether all categories are truth values, such as "True" and "0"."""
        return None not in map(_parse_truth, self.categories)

    def _list_spellings(self, category: str) -> Iterator[str]:
        """Yield texts that mean this category: Unicode forms, truth words, and other forms of a
        number.
        """
        yield from (unicodedata.normalize(form, category) for form in ("NFC", "NFD"))
        number_text = normalise_spelling(category)
        if self._has_only_truth_values:
            truth_value = _parse_truth(category)
            yield from (text for text, value in TRUTH_BY_WORD.items() if value == truth_value)
            number_text = str(int(bool(truth_value)))
        yield from (number_text, f"{number_text}.0")

    @property
    def words_that_are_categories(self) -> frozenset[str]:
        """The words, such as "NA", that do not count as an empty cell in this column."""
        return frozenset({*self.words, *self.categories}) & EMPTY_CELL_TEXTS - {""}

    def encode(self, column: "pd.Series", *, source: str) -> _EncodedCells:
        """Return one-hot features, (N, number of categories); zeros for empty and unknown cells.

        All features are 1 if the column was constant. `source` is unused: any text is accepted.
        """
        index_by_category = {category: index for index, category in enumerate(self.categories)}
        texts = read_texts(column, words=self.words_that_are_categories)
        distinct_texts = {text for text in texts if text is not None}
        category_by_text = self.match_categories(distinct_texts)
        is_empty_N = np.array([text is None for text in texts], dtype=bool)
        one_hot_NF = np.zeros((len(column), len(self.categories)))
        for row, text in enumerate(texts):
            if text in category_by_text:
                category = category_by_text[text]
                one_hot_NF[row, index_by_category[category]] = 1.0
        is_ignored_N = ~is_empty_N & ~one_hot_NF.any(axis=1)
        features_NF = np.ones_like(one_hot_NF) if self.constant else one_hot_NF
        return _EncodedCells(features_NF, is_empty_N, is_ignored_N)


def _parse_truth(text: str) -> bool | None:
    """Return the truth value of a text such as "true", "FALSE" or "1.0"; None: it has none."""
    truth_by_number = {"0": False, "1": True}.get(normalise_spelling(text))
    return TRUTH_BY_WORD.get(text, truth_by_number)


Column = Annotated[NumericColumn | CategoricalColumn, Field(discriminator="kind")]


class ColumnEncoding(Settings):
    """A party's columns, in the order of its features.

    Attributes:
        columns: the encoding of each column.
        missing: "mean": an empty number becomes the mean, and an empty category zeros; "error" and
            "drop": empty cells are refused, since each row of input must give a row of output.
    """

    kind: Literal["columns"] = "columns"
    columns: tuple[Column, ...] = Field(min_length=1)
    missing: Missing = "error"

    @classmethod
    def for_numeric_columns(cls, names: Sequence[str]) -> "ColumnEncoding":
        """Return an encoding of numeric columns that leaves numbers as they are."""
        return cls(columns=tuple(NumericColumn(name=name) for name in names))

    @property
    def feature_ranges(self) -> list[slice]:
        """The range of features of each column, in the order of the columns."""
        ends = accumulate((len(column.features) for column in self.columns), initial=0)
        return [slice(first, end) for first, end in pairwise(ends)]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape (F,) of one row's features."""
        return (self.feature_ranges[-1].stop,)

    @property
    def layout(self) -> list[dict[str, Any]]:
        """The kind, name and categories of each column, in plain values."""
        public_fields = {"kind", "name", "categories"}
        return [column.model_dump(mode="json", include=public_fields) for column in self.columns]

    def feature_name(self, index: int) -> str:
        """Return the name of the feature at this position, for errors."""
        return [name for column in self.columns for name in column.features][index]

    def encode(
        self, raw: RawFeatures, *, source: str = "the input", counts: CellCounts | None = None
    ) -> torch.Tensor:
        """Return float32 features (N, F) of a frame or array.

        Args:
            raw: a frame that has these columns, whose others are ignored; or an array (N, number of
                columns) with the columns in order.
            source: name of the table, for errors.
            counts: rows, empty cells and ignored cells are added to it; None: not counted.

        Raises DataError: a column is missing, a cell does not fit its column, or a cell is empty
            and `missing` does not accept that.
        """
        frame = self._select_columns(raw, source)
        (features_NF,) = self.encode_blocks([frame], source=source, counts=counts or CellCounts())
        return features_NF

    def encode_blocks(
        self, blocks: Iterable[pd.DataFrame], *, source: str, counts: CellCounts
    ) -> Iterator[torch.Tensor]:
        """Yield the features of a table block by block, (B, F).

        Empty cells of all blocks are refused after the last block, unless `missing` is "mean".

        Args:
            blocks: frames with these columns; others are ignored.
            source: the party's name, for errors.
            counts: rows, empty and ignored cells are added to it.
        """
        empty_cells = Counter[str]()
        is_of_texts = False
        for block in blocks:
            frame = self._select_columns(block, source)
            is_of_texts = is_csv(frame)
            block_counts = CellCounts()
            yield self._encode_frame(frame, source, block_counts)
            empty_cells += block_counts.empty_by_column
            counts.row_count += len(frame)
            counts.empty_by_column += block_counts.empty_by_column
            counts.ignored_by_column += block_counts.ignored_by_column
        if self.missing != "mean":
            cause = "" if is_of_texts else self._describe_lost_words(empty_cells)
            _refuse_empty(empty_cells, source=source, cause=cause)

    def _encode_frame(self, frame: pd.DataFrame, source: str, counts: CellCounts) -> torch.Tensor:
        """Return the features (N, F) of a frame with exactly these columns, in this order.

        `source`: name of the table, for errors. `counts`: empty and ignored cells are written to
        it.

        Raises DataError: a cell does not fit its column, or is too large for float32.
        """
        features_NF = np.empty((len(frame), *self.shape), np.float32)
        # Column by column, since all columns in float64 at once would need twice the memory.
        for column, place in zip(self.columns, self.feature_ranges, strict=True):
            encoded = column.encode(frame[column.name], source=source)
            counts.empty_by_column[column.name] = int(encoded.is_empty.sum())
            counts.ignored_by_column[column.name] = int(encoded.is_ignored.sum())
            numbers = encoded.features
            if numbers.size and np.abs(numbers).max() > np.finfo(np.float32).max:
                raise DataError(
                    f"{source}: column {column.name!r} is too far from its mean for float32; "
                    "rescale it"
                )
            features_NF[:, place] = numbers
        return torch.from_numpy(features_NF)

    def _describe_lost_words(self, empty_cells: Mapping[str, int]) -> str:
        """Return in words which categories pandas may have read as empty cells; "" for none.

        Words such as "NA" may be categories of a column. A frame that pandas read has them as empty
        cells, so an error about empty cells mentions them.

        `empty_cells`: number of empty cells by column.
        """
        words = set[str]()
        for column in self.columns:
            if isinstance(column, CategoricalColumn) and empty_cells[column.name]:
                words |= column.words_that_are_categories
        if not words:
            return ""
        quoted = ", ".join(map(repr, sorted(words)))
        return f" ({quoted}, a category here, is empty to pandas: read_csv(keep_default_na=False))"

    def _select_columns(self, raw: RawFeatures, source: str) -> pd.DataFrame:
        """Return the encoding's columns of a frame or array, in the encoding's order.

        `source`: name of the table, for errors.

        Raises DataError: columns are missing or repeated, or the array has another width.
        """
        names = [column.name for column in self.columns]
        if not isinstance(raw, pd.DataFrame):
            if raw.ndim != 2 or raw.shape[1] != len(names):
                raise DataError(
                    f"{source}: expected {len(names)} columns ({', '.join(names)}), got an array "
                    f"of shape {raw.shape}"
                )
            return pd.DataFrame(raw, columns=names)
        own_names = list(map(column_name, raw.columns))
        counts = Counter(own_names)
        if repeated := [name for name in names if counts[column_name(name)] > 1]:
            raise DataError(
                f"{source}: several columns are named {', '.join(repeated)}; give each a name of "
                "its own"
            )
        name_in_frame = dict(zip(own_names, raw.columns, strict=True))
        if absent := [name for name in names if column_name(name) not in name_in_frame]:
            raise DataError(
                f"{source}: {len(absent)} of {len(names)} columns are missing: "
                f"{', '.join(absent)}; the model was trained with them, so add them"
            )
        selected = select_columns(raw, [name_in_frame[column_name(name)] for name in names])
        return selected if list(selected.columns) == names else selected.set_axis(names, axis=1)


def _refuse_empty(
    counts: Counter[str], *, source: str, advice: Advice | None = None, cause: str = ""
) -> None:
    """Raise TableError if columns have empty cells; it proposes settings that accept them.

    Args:
        counts: number of empty cells by column.
        source: name of the party or table.
        advice: proposes the settings; None: the party's name is unknown, and the settings are
            written for a party called X.
        cause: further words of the error on the columns.
    """
    columns = ", ".join(f"{name} ({count})" for name, count in counts.items() if count > 0)
    if not columns:
        return
    advice = advice or Advice("X")
    remedies: tuple[Remedy, ...] = tuple(
        (advice.set_value("missing", value),) for value in _RULES_THAT_ACCEPT_EMPTY
    )
    raise TableError(
        [
            Fault(
                f"{source}: empty cells in {columns}{cause}; fill them, or train with "
                f"{describe_remedies(remedies)} in the run's file",
                remedies,
            )
        ]
    )


def refuse_empty_cells(frame: pd.DataFrame, *, categorical: Sequence[str], advice: Advice) -> None:
    """Raise TableError if cells are empty.

    Columns that are wholly empty are left out: fitting them raises an error of its own.

    `categorical`: names of columns that are encoded one-hot, in which words such as "NA" are
    categories. `advice`: proposes settings for the error.
    """
    counts = Counter[str]()
    for name in frame.columns:
        empty_N = is_empty(frame[name], BLANK if name in categorical else EMPTY_CELL_TEXTS)
        if not empty_N.all():
            counts[str(name)] = int(empty_N.sum())
    _refuse_empty(counts, source=advice.party, advice=advice)


def fit_columns(
    frame: pd.DataFrame,
    *,
    categorical: Sequence[str] = (),
    missing: Missing = "error",
    max_categories: int | None = None,
    source: str,
    formats: Sequence[str] = (),
    advice: Advice | None = None,
) -> ColumnEncoding:
    """Return the encoding of all columns of `frame`, with statistics of all its rows.

    The standard deviation is a population's (the sum of squares is divided by N).

    Args:
        frame: the columns, (N, number of columns).
        categorical: names of the columns that are encoded one-hot; the others are numbers, dates or
            durations.
        missing: treatment of empty cells; "error" and "drop" refuse them here.
        max_categories: a column's most frequent categories that are kept, by number; equally
            frequent ones in the order of their texts. None: all are kept, and more than
            `MAX_CATEGORIES` are refused.
        source: the party's name, for errors.
        formats: date formats besides ISO 8601.
        advice: proposes settings for errors; None: settings are proposed without regard to lists
            that the user's settings already have.

    Raises TableError: the faults of every column, with the settings that solve them.
    """
    advice = advice or Advice(source)
    if not frame.shape[1]:
        raise DataError(NO_FEATURES.format(source=source))
    faults = FaultList()
    if missing != "mean":
        with faults.gather_faults():
            refuse_empty_cells(frame, categorical=categorical, advice=advice)
    columns = list[Column]()
    for name in frame.columns:
        with faults.gather_faults():
            if name in categorical:
                columns.append(_fit_categories(frame[name], max_categories, advice=advice))
            else:
                columns.append(_fit_numbers(frame[name], formats, advice=advice))
    faults.raise_faults()
    return ColumnEncoding(columns=tuple(columns), missing=missing)


def _fit_numbers(
    column: "pd.Series", formats: Sequence[str] = (), *, advice: Advice
) -> NumericColumn:
    """Return the encoding of a column of numbers, dates or durations.

    `formats`: date formats besides ISO 8601. `advice`: proposes settings for errors.

    Raises DataError, TableError: cells are of another kind, too large, or all empty.
    """
    kind: Literal["numeric", "date", "duration"] = "numeric"
    source = advice.party
    needed_formats = tuple[str, ...]()
    if is_date(column):
        kind = "date"
    elif is_date(column, formats):
        kind = "date"
        needed_formats = tuple(formats)
    elif is_duration(column):
        kind = "duration"
    numbers = _parse_numbers(column, kind, source=source, formats=needed_formats)
    name = str(column.name)
    known = numbers[~np.isnan(numbers)]
    _require_value(len(known), column, advice)
    with np.errstate(over="ignore", invalid="ignore"):
        mean = float(known.mean())
        deviation = float(known.std())
    if not (np.isfinite(mean) and np.isfinite(deviation)):
        raise DataError(
            f"{source}: the values of column {name!r} are too large to standardise; rescale it"
        )
    # Differences of the size of rounding errors would be blown up to a deviation of 1.
    is_constant = deviation == 0 or bool(np.ptp(known) <= _CONSTANT_SPREAD * np.abs(known).max())
    if is_constant:
        mean = float(known[0])
        deviation = 1.0
    return NumericColumn(
        name=name,
        mean=mean,
        scale=deviation,
        constant=is_constant,
        kind=kind,
        date_formats=needed_formats,
    )


def _fit_categories(
    column: "pd.Series", max_categories: int | None, *, advice: Advice
) -> CategoricalColumn:
    """Return the one-hot encoding of a column of texts.

    `max_categories`: number of the most frequent categories that are kept; None: the settings give
    no limit, and all are kept. `advice`: proposes settings for errors.

    Raises TableError: the column is empty; or it has more than `MAX_CATEGORIES` categories, and the
    settings give no limit.
    """
    texts = read_texts(column, words=EMPTY_CELL_TEXTS)
    counts = Counter(text for text in texts if text is not None)
    _require_value(len(counts), column, advice)
    if len(counts) > MAX_CATEGORIES and max_categories is None:
        raise _make_categories_error(column, len(counts), advice)
    # The most frequent first; equally frequent ones in the order of their texts.
    by_frequency = sorted(counts, key=lambda text: (-counts[text], text))
    categories = by_frequency[: max_categories or MAX_CATEGORIES]
    return CategoricalColumn(
        name=str(column.name),
        categories=tuple(sorted(categories)),
        words=tuple(sorted(EMPTY_CELL_TEXTS & counts.keys())),
        constant=len(counts) == 1 and None not in texts,
    )


def _make_categories_error(column: "pd.Series", category_count: int, advice: Advice) -> TableError:
    """Return the error for a column with too many categories; `advice` proposes settings."""
    name = str(column.name)
    group_rare: Remedy = (advice.set_value("rare_categories", {"most": FEW_CATEGORIES}),)
    ignore: Remedy = (advice.add_to_list("ignore", name),)
    remedies = [group_rare, ignore]
    is_listed = name in advice.lists.get("categorical", ())
    if are_padded_codes(column) and not is_listed:
        remedies.append((advice.add_to_list("numeric", name),))
    return TableError(
        [
            Fault(
                f"{advice.party}: column {name!r} has {category_count} categories, at most "
                f"{MAX_CATEGORIES} are one-hot encoded; group the rare ones, or say "
                f"{describe_remedies(remedies)} in the run's file",
                tuple(remedies),
            )
        ]
    )


def _require_value(count: int, column: "pd.Series", advice: Advice) -> None:
    """Raise TableError if all cells of a column are empty.

    `count`: number of its filled cells. `advice`: words the settings that the error proposes.
    """
    if count == 0:
        name = str(column.name)
        remedies: tuple[Remedy, ...] = ((advice.add_to_list("ignore", name),),)
        message = f"{advice.party}: column {name!r} is empty; say {describe_remedies(remedies)}"
        raise TableError([Fault(message, remedies)])


@dataclass(frozen=True)
class View:
    """A view: a range of a party's features that belong together.

    Attributes:
        first: position of its first feature.
        end: position after its last feature.
        sequence: (T, C), the numbers of steps and channels of a view that is a sequence; None: the
            view is no sequence.
    """

    first: int
    end: int
    sequence: tuple[int, int] | None = None

    @property
    def columns(self) -> slice:
        """The positions of the view's features, as a slice."""
        return slice(self.first, self.end)


def fit_views(
    frame: pd.DataFrame,
    columns_by_view: Mapping[str, ViewColumns],
    *,
    categorical: Sequence[str] = (),
    missing: Missing = "error",
    max_categories: int | None = None,
    source: str,
    formats: Sequence[str] = (),
    advice: Advice | None = None,
) -> ColumnEncoding:
    """Return the encoding of the columns of all views, one view after another.

    Channels of a view that is a sequence are divided by their root mean square. All other columns
    are encoded by `fit_columns`.

    Args:
        frame: a table with the columns of all views.
        columns_by_view: the columns of each view, by its name.
        categorical, missing, max_categories, source, formats, advice: see `fit_columns`.
    """
    columns: list[Column] = []
    for view in columns_by_view.values():
        view_frame = select_columns(frame, view.columns)
        if view.sequence is None:
            fitted = fit_columns(
                view_frame,
                categorical=categorical,
                missing=missing,
                max_categories=max_categories,
                source=source,
                formats=formats,
                advice=advice,
            )
            columns += fitted.columns
        else:
            steps, channels = view.sequence
            columns += _fit_sequence(view_frame, steps, channels, source=source)
    return ColumnEncoding(columns=tuple(columns), missing=missing)


def _fit_sequence(frame: pd.DataFrame, steps: int, channels: int, *, source: str) -> list[Column]:
    """Return the encodings of the columns of a view that is a sequence.

    The first column is the number of steps in use, and stays as it is. The others are T steps with
    C channels each. Every channel is divided by its root mean square over the steps in use of all
    rows.

    `frame`: the view's columns. `steps`, `channels`: T and C. `source`: name of the table, for
    errors.
    """
    numbers_NF = np.stack([read_numbers(frame[name], source=source) for name in frame], axis=1)
    steps_in_use_N = numbers_NF[:, 0]
    steps_NTC = numbers_NF[:, 1:].reshape(-1, steps, channels)
    is_in_use_NT = np.arange(steps) < steps_in_use_N[:, None]
    squares_C = np.nan_to_num(np.square(steps_NTC[is_in_use_NT])).sum(0)
    mean_square_C = squares_C / max(1, is_in_use_NT.sum())
    has_scale_C = np.isfinite(mean_square_C) & (mean_square_C > 0)
    scale_C = np.where(has_scale_C, np.sqrt(mean_square_C), 1.0)
    count_name, *step_names = map(str, frame.columns)
    scales = np.tile(scale_C, steps).tolist()
    are_constant = np.tile(mean_square_C == 0, steps).tolist()
    columns: list[Column] = [NumericColumn(name=count_name)]
    for name, scale, is_constant in zip(step_names, scales, are_constant, strict=True):
        columns.append(NumericColumn(name=name, scale=scale, constant=is_constant))
    return columns


def find_view_ranges(
    encoding: ColumnEncoding, columns_by_view: Mapping[str, ViewColumns], *, source: str
) -> dict[str, View]:
    """Return the range of each view among the features that the encoding produces, by name.

    `columns_by_view`: the columns of each view, by its name. `source`: the party's name, for the
    error.

    Raises DataError: the views do not have the encoding's columns, or not in its order.
    """
    view_columns = [name for view in columns_by_view.values() for name in view.columns]
    if [column.name for column in encoding.columns] != view_columns:
        raise DataError(
            f"{source}: its encoding is of other columns than its views "
            f"{', '.join(columns_by_view)}, or of "
            "the same in another order; fit it to a table with these views"
        )
    feature_ranges = encoding.feature_ranges
    view_by_name = {}
    first_column = 0  # position of the view's first column
    for name, view in columns_by_view.items():
        end_column = first_column + len(view.columns)
        view_by_name[name] = View(
            feature_ranges[first_column].start, feature_ranges[end_column - 1].stop, view.sequence
        )
        first_column = end_column
    return view_by_name


def check_views(features: Any, view_by_name: Mapping[str, View], *, party: str) -> None:
    """Raise DataError unless views fit a party's features.

    The views must follow one another over all features. A view that is a sequence must have the
    right number of columns, and valid numbers of steps in use.

    `features`: (N, F), perhaps read lazily. `view_by_name`: name -> view, in the order of the
    features; without views nothing is checked. `party`: name for the error.
    """
    if not view_by_name:
        return
    ends = [0, *(view.end for view in view_by_name.values())]
    # Each view begins where the one before ends.
    are_adjacent = all(
        view.first == end for view, end in zip(view_by_name.values(), ends, strict=False)
    )
    if features.dim() != 2 or not are_adjacent or ends[-1] != features.shape[1]:
        raise DataError(
            f"{party}: views {', '.join(view_by_name)} must follow one another over all its "
            f"features {tuple(features.shape[1:])}"
        )
    for name, view in view_by_name.items():
        if view.sequence is None:
            continue
        max_steps, channels = view.sequence
        width = view.end - view.first
        expected_width = 1 + max_steps * channels
        steps_in_use_N = read_column(features, view.first)
        is_valid_count_N = (
            (steps_in_use_N >= 0)
            & (steps_in_use_N <= max_steps)
            & (steps_in_use_N == steps_in_use_N.round())
        )
        problem = ""
        if width != expected_width:
            problem = f"{width} columns, expected {expected_width} for {view.sequence}"
        elif not bool(is_valid_count_N.all()):
            problem = f"steps in use that are not whole numbers of 0 to {max_steps}"
        if problem:
            raise DataError(f"{party}: view {name!r} has {problem}")


class ImageEncoding(Settings):
    """A horizontal strip of images: pixel rows `first_row` to `end_row` (exclusive), scaled.

    Pixels are divided by `maximum`. `encode` takes whole images of C channels and H x W pixels, or
    images that are already cut to the strip. Their shape is (N, C, H, W), (N, H, W) for one
    channel, or flat (N, C * H * W). A row of a frame is read as one flat image.
    """

    kind: Literal["image"] = "image"
    channels: int = Field(ge=1)
    height: int = Field(ge=1)
    width: int = Field(ge=1)
    maximum: int = Field(255, ge=1)
    first_row: int = Field(0, ge=0)
    end_row: int = Field(ge=1)

    @model_validator(mode="after")
    def _check_strip(self) -> Self:
        """Raise ValueError for too large images, or a strip of pixel rows outside the image.

        The encoding may come from a peer's model card, so sizes are checked before memory is
        allocated.
        """
        # To find the output shape of a network, an image of these sizes is made and passed through.
        if (numbers := self.channels * self.height * self.width) > MAX_IMAGE_NUMBERS:
            raise ValueError(
                f"channels * height * width are {numbers:,} numbers of an image, expected "
                f"{MAX_IMAGE_NUMBERS:,} at most"
            )
        if not self.first_row < self.end_row <= self.height:
            raise ValueError(
                f"the strip of rows {self.first_row} to {self.end_row} is not inside 0 to "
                f"{self.height}"
            )
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape (C, S, W) of one row's features."""
        return (self.channels, self.end_row - self.first_row, self.width)

    @property
    def layout(self) -> tuple[int, ...]:
        """The shape of the strip of pixel rows, in which each feature has its position."""
        return self.shape

    def feature_name(self, index: int) -> str:
        """Return in words the position of a pixel in the whole image, for errors.

        `index`: position of the pixel among the flattened features.
        """
        channel, row, column = np.unravel_index(index, self.shape)
        return f"channel {channel}, row {row + self.first_row}, column {column}"

    def encode(
        self, raw: RawFeatures, *, source: str = "the input", counts: CellCounts | None = None
    ) -> torch.Tensor:
        """Return float32 features (N, C, S, W) of raw images with values 0 to `maximum`.

        `source`: name of the input, for errors. `counts` is unused: it counts cells of columns.

        Raises DataError: another shape, or pixels out of range.
        """
        strip_NCSW = self._cut_strip(self._parse_pixels(raw, source), source)
        self._check_range(strip_NCSW, source)
        scaled_NCSW = strip_NCSW.astype(np.float32)
        scaled_NCSW /= self.maximum
        return torch.from_numpy(scaled_NCSW)

    def _parse_pixels(self, raw: RawFeatures, source: str) -> NDArray[np.generic]:
        """Return raw pixels as an array of numbers; a row of a frame becomes one flat image.

        Raises DataError: cells are no numbers.
        """
        if isinstance(raw, pd.DataFrame):
            columns = [read_numbers(raw[name], source=source) for name in raw.columns]
            return np.stack(columns, axis=1) if columns else np.empty((len(raw), 0))
        if not (np.issubdtype(raw.dtype, np.integer) or np.issubdtype(raw.dtype, np.floating)):
            raise DataError(f"{source}: images hold whole numbers or floats, got {raw.dtype}")
        return raw

    def _cut_strip(self, values: NDArray[np.generic], source: str) -> NDArray[np.generic]:
        """Return this party's strips, (N, C, S, W), from whole images or from strips.

        A strip is the pixel rows `first_row` to `end_row` of an image.

        `values`: N images or strips; a strip has S in place of H rows. Each is (C, H, W), (H, W)
        for one channel, or flat.

        Raises DataError: another shape.
        """
        full_shape = (self.channels, self.height, self.width)
        strip_shape = self.shape
        for shape in (strip_shape, full_shape):
            is_flat = values.ndim == 2 and values.shape[1] == math.prod(shape)
            is_grey = values.ndim == 3 and self.channels == 1 and values.shape[1:] == shape[1:]
            if is_flat or is_grey or values.shape[1:] == shape:
                images_NCHW = values.reshape(len(values), *shape)
                if shape == strip_shape:
                    return images_NCHW
                return images_NCHW[:, :, self.first_row : self.end_row]
        raise DataError(
            f"{source}: expected images of {_format_shape(full_shape)} (channels x height x "
            f"width), or strips of {_format_shape(strip_shape)}, as arrays or flat "
            f"({math.prod(full_shape)} "
            f"or {math.prod(strip_shape)} columns); got "
            f"{_format_shape(values.shape[1:]) or 'single numbers'}"
        )

    def _check_range(self, pixels: NDArray[np.generic], source: str) -> None:
        """Raise DataError if pixels are not finite, out of range, or seem scaled to [0, 1]."""
        if not pixels.size:
            return
        numbers = pixels if pixels.dtype == np.uint8 else pixels.astype(np.float64)
        if non_finite_count := int(np.count_nonzero(~np.isfinite(numbers))):
            raise DataError(
                f"{source}: {non_finite_count} pixels are NaN or infinite; mend them first"
            )
        lowest = float(numbers.min())
        highest = float(numbers.max())
        if lowest < 0 or highest > self.maximum:
            raise DataError(
                f"{source}: pixels run from {lowest:g} to {highest:g}, expected 0 to {self.maximum}"
            )
        if self.maximum > 1 and highest <= 1 and bool((numbers != np.rint(numbers)).any()):
            raise DataError(
                f"{source}: pixels run from {lowest:g} to {highest:g} and look scaled to [0, 1] "
                f"already; give the raw values 0 to {self.maximum}"
            )


class ArrayEncoding(Settings):
    """The encoding of rows that are taken as they are: numbers of any shape, not normalised.

    Attributes:
        row_shape: the shape of one row.
    """

    kind: Literal["array"] = "array"
    row_shape: tuple[Annotated[int, Field(ge=1)], ...] = Field(min_length=1, max_length=8)

    @model_validator(mode="after")
    def _check_row_size(self) -> Self:
        """Refuse a row shape with more numbers than an image may have."""
        if (numbers := math.prod(self.row_shape)) > MAX_IMAGE_NUMBERS:
            raise ValueError(
                f"row_shape are {numbers:,} numbers of a row, expected {MAX_IMAGE_NUMBERS:,} at "
                "most"
            )
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one row's features."""
        return self.row_shape

    @property
    def layout(self) -> tuple[int, ...]:
        """The shape of a row, in which each feature has its position."""
        return self.row_shape

    def feature_name(self, index: int) -> str:
        """Return in words the position of a feature in a row, for errors."""
        positions = (str(int(position)) for position in np.unravel_index(index, self.row_shape))
        return f"feature [{', '.join(positions)}]"

    def encode(
        self, raw: RawFeatures, *, source: str = "the input", counts: CellCounts | None = None
    ) -> torch.Tensor:
        """Return the rows, (N, *row_shape), as float32.

        `source`: name of the input, for errors. `counts` is unused: it counts cells of columns.

        Raises DataError: rows of another shape.
        """
        if isinstance(raw, pd.DataFrame):
            raw = raw.to_numpy()
        if tuple(raw.shape[1:]) != self.row_shape:
            raise DataError(
                f"{source}: expected rows of shape {self.row_shape}, got {tuple(raw.shape[1:])}"
            )
        return torch.from_numpy(np.asarray(raw, dtype=np.float32))


def _format_shape(sizes: tuple[int, ...]) -> str:
    """Return sizes in words, such as 3x32x32."""
    return "x".join(map(str, sizes))


# In a settings class, a field of this type is parsed as the encoding that its key `kind` names.
FeatureEncoding: TypeAlias = Annotated[
    ImageEncoding | ColumnEncoding | ArrayEncoding, Field(discriminator="kind")
]
_ENCODING_ADAPTER: TypeAdapter[ImageEncoding | ColumnEncoding | ArrayEncoding] = TypeAdapter(
    FeatureEncoding
)


def parse_encoding(value: dict[str, Any]) -> ImageEncoding | ColumnEncoding | ArrayEncoding:
    """Return the encoding whose `model_dump(mode="json")` is `value`.

    Raises DataError: `value` is no encoding.
    """
    try:
        return _ENCODING_ADAPTER.validate_python(value)
    except ValidationError as error:
        raise DataError(f"not a feature encoding: {error}") from error

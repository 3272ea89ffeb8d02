"""The encoding of one party's raw data as features: standardised numbers, one-hot texts, image
strips.

Run by: that party alone, with statistics of its own rows (the active: its training rows only). The
fitted encoding is plain data, so that the same columns can be encoded again when the model
predicts: the fitted kind of a column decides how its cells are read, independently of the file or
frame and the number of rows.

A party's features may be several views, some of sequences. A row is flat: a view of sequences
begins with the number of steps in use, and its steps follow one after another, each with its
channels, zeros behind the last. So that both survive an encoding, the number of steps stays as it
is, and each channel is divided by the root of its mean square over the steps in use, not shifted.

Letters: N rows, F features, T steps, C channels; of images H height and W width in pixels, S rows
of the strip.
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

from apfed_protocols.ids import EMPTY
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
    TRUTHS,
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
_ACCEPTING: tuple[Missing, ...] = ("mean", "drop")
_ROUNDING = 8 * np.finfo(np.float64).eps  # relative spread of a column that counts as constant
# Relative distance from a constant column's value that counts as equal, such as in float32.
_SAME = 1e-6
RawFeatures: TypeAlias = pd.DataFrame | NDArray[np.generic]
# By kind of column, the function that reads its numbers; dates are read by `_parse_numbers`.
_READ = MappingProxyType({"numeric": read_numbers, "duration": read_durations})


class _Encoded(NamedTuple):
    """One column's encoded cells.

    Attributes:
        features: (N, F).
        empty: (N,), which cells are empty.
        ignored: (N,), which cells are ignored, since no training row had such a value.
    """

    features: NDArray[np.float64]
    empty: NDArray[np.bool_]
    ignored: NDArray[np.bool_]


@dataclass
class CellCounts:
    """The counts of encoded cells by column: empty cells, and ignored ones.

    A cell is ignored if it has an unknown category, or another value in a constant column.
    """

    rows: int = 0
    empty: Counter[str] = field(default_factory=Counter)
    ignored: Counter[str] = field(default_factory=Counter)

    def warn_of_unseen_cells(self, *, source: str) -> None:
        """Warn of each column with cells unlike any in training, which are ignored.

        `source`: what the warnings call the table.
        """
        for name, count in self.ignored.items():
            warnings.warn(
                f"{source}: {count} of {self.rows} cells of column {name!r} hold what no training "
                "row held, and count for nothing",
                UnseenCellsWarning,
                stacklevel=3,
            )


class NumericColumn(Settings):
    """A numeric column, encoded as (value - mean) / scale, where scale is the standard deviation.

    Dates are days since 1970-01-01, durations days; numbers are neither, whatever their unit.

    Attributes:
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
        return (self.name,)

    def encode(self, column: "pd.Series", *, source: str) -> _Encoded:
        """Return (N, 1); an empty cell becomes 0, the mean."""
        numbers_N = _parse_numbers(column, self.kind, source=source, formats=self.date_formats)
        empty_N = np.isnan(numbers_N)
        ignored_N = np.zeros(len(numbers_N), dtype=bool)
        standard_N = np.where(empty_N, 0.0, (numbers_N - self.mean) / self.scale)
        if self.constant:
            ignored_N = ~empty_N & (np.abs(numbers_N - self.mean) > _SAME * abs(self.mean))
            standard_N = np.zeros(len(numbers_N))
        return _Encoded(standard_N[:, None], empty_N, ignored_N)


def _parse_numbers(
    column: "pd.Series", kind: str, *, source: str, formats: Sequence[str] = ()
) -> NDArray[np.float64]:
    """Return a column as finite numbers (N,), not standardised; NaN where a cell is empty.

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
        numbers = _READ[kind](column, source=source)
    if infinite := int(np.count_nonzero(np.isinf(numbers))):
        raise DataError(
            f"{source}: column {column.name!r} has {infinite} infinite numbers; mend them"
        )
    return numbers


class CategoricalColumn(Settings):
    """A column in one-hot encoding over `categories`; an unknown or empty cell is a row of zeros.

    Attributes:
        words: the texts that are categories here although they usually mark an empty cell (such as
            NA).
        constant: whether all fitted rows had one category; the feature is then 1 for any cell.
    """

    kind: Literal["categorical"] = "categorical"
    name: str
    categories: tuple[str, ...] = Field(min_length=1)
    words: tuple[str, ...] = ()
    constant: bool = False

    @property
    def features(self) -> tuple[str, ...]:
        return tuple(f"{self.name}={category}" for category in self.categories)

    @property
    def spellings(self) -> dict[str, str]:
        """The category of each text that other programs may write for it."""
        return self.match_categories(
            text for own in self.categories for text in self._list_spellings(own)
        )

    def match_categories(self, texts: Iterable[str]) -> dict[str, str]:
        """Return the category that each of these texts denotes, by text.

        This is the text itself, or the category of the same meaning, as a number, a moment or, if
        all categories are truth values, a truth value. A text that denotes no category, or could
        stand for two, is left out.
        """
        category_by_text = {column_name(category): category for category in self.categories}
        categories_by_meaning = defaultdict[str, set[str]](set)
        for text, category in category_by_text.items():
            categories_by_meaning[self._normalise_text(text)].add(category)
        category_of = {}
        for text in texts:
            name = column_name(text)
            if name in category_by_text:
                category_of[text] = category_by_text[name]
                continue
            matches = categories_by_meaning[self._normalise_text(text)]
            if len(matches) == 1:
                (category_of[text],) = matches
        return category_of

    def _normalise_text(self, text: str) -> str:
        """Return the canonical text of a cell: equal for spellings of one number or truth value."""
        truth = _parse_truth(text) if self._are_truths else None
        return normalise_spelling(column_name(text)) if truth is None else str(truth)

    @property
    def _are_truths(self) -> bool:
        """True if all categories are truth values."""
        return None not in map(_parse_truth, self.categories)

    def _list_spellings(self, category: str) -> Iterator[str]:
        """Yield texts that mean this category: Unicode forms, truth words, and other forms of a
        number.
        """
        yield from (unicodedata.normalize(form, category) for form in ("NFC", "NFD"))
        number = normalise_spelling(category)
        if self._are_truths:
            truth = _parse_truth(category)
            yield from (text for text, value in TRUTHS.items() if value == truth)
            number = str(int(bool(truth)))
        yield from (number, f"{number}.0")

    @property
    def texts(self) -> frozenset[str]:
        """The words for an empty cell that are ordinary categories in this column."""
        return frozenset({*self.words, *self.categories}) & EMPTY - {""}

    def encode(self, column: "pd.Series", *, source: str) -> _Encoded:
        """Return one-hot features, (N, number of categories); zeros for empty and unknown cells."""
        index_of_category = {category: index for index, category in enumerate(self.categories)}
        texts = read_texts(column, words=self.texts)
        distinct = {text for text in texts if text is not None}
        category_of = self.match_categories(distinct)
        empty_N = np.array([text is None for text in texts], dtype=bool)
        hot_NF = np.zeros((len(column), len(self.categories)))
        for row, text in enumerate(texts):
            if text in category_of:
                hot_NF[row, index_of_category[category_of[text]]] = 1.0
        ignored_N = ~empty_N & ~hot_NF.any(axis=1)
        return _Encoded(np.ones_like(hot_NF) if self.constant else hot_NF, empty_N, ignored_N)


def _parse_truth(text: str) -> bool | None:
    """Return the truth value that a text denotes; None: it denotes none."""
    return TRUTHS.get(text, {"0": False, "1": True}.get(normalise_spelling(text)))


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
    def places(self) -> list[slice]:
        """The range of features of each column."""
        ends = [0, *accumulate(len(column.features) for column in self.columns)]
        return [slice(*own) for own in pairwise(ends)]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape (F,) of one row's features."""
        return (self.places[-1].stop,)

    @property
    def layout(self) -> list[dict[str, Any]]:
        """The kind, name and categories of each column, in plain values."""
        public_fields = {"kind", "name", "categories"}
        return [column.model_dump(mode="json", include=public_fields) for column in self.columns]

    def feature_name(self, index: int) -> str:
        return [name for column in self.columns for name in column.features][index]

    def encode(
        self, raw: RawFeatures, *, source: str = "the input", counts: CellCounts | None = None
    ) -> torch.Tensor:
        """Return float32 features (N, F) of a frame or array.

        `raw`: a frame with these columns, others are ignored; or an array (N, number of columns) in
        their order. `source`: what errors call it. `counts`: empty and ignored cells are added to
        it.
        """
        frame = self._select_columns(raw, source)
        (features_NF,) = self.encode_blocks([frame], source=source, counts=counts or CellCounts())
        return features_NF

    def encode_blocks(
        self, blocks: Iterable[pd.DataFrame], *, source: str, counts: CellCounts
    ) -> Iterator[torch.Tensor]:
        """Yield the features of a table block by block, (B, F).

        After the last block, empty cells of all blocks are refused if `missing` says so.

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
            empty_cells += block_counts.empty
            counts.rows += len(frame)
            counts.empty += block_counts.empty
            counts.ignored += block_counts.ignored
        if self.missing != "mean":
            cause = "" if is_of_texts else self._describe_lost_words(empty_cells)
            _refuse_empty(empty_cells, source=source, cause=cause)

    def _encode_frame(self, frame: pd.DataFrame, source: str, counts: CellCounts) -> torch.Tensor:
        """Return the features (N, F) of a frame with just these columns, in this order.

        `source`: what errors call it. `counts`: empty and ignored cells are added to it.
        """
        features_NF = np.empty((len(frame), *self.shape), np.float32)
        # Column by column, since all of them in float64 would need twice the memory.
        for column, own in zip(self.columns, self.places, strict=True):
            part, empty_N, ignored_N = column.encode(frame[column.name], source=source)
            counts.empty[column.name] = int(empty_N.sum())
            counts.ignored[column.name] = int(ignored_N.sum())
            if part.size and np.abs(part).max() > np.finfo(np.float32).max:
                raise DataError(
                    f"{source}: column {column.name!r} is too far from its mean for float32; "
                    "rescale it"
                )
            features_NF[:, own] = part
        return torch.from_numpy(features_NF)

    def _describe_lost_words(self, empty_cells: Mapping[str, int]) -> str:
        """Return in words which categories pandas reads as empty cells; "" if none are affected.

        `empty_cells`: number of empty cells by column.
        """
        words = set[str]()
        for column in self.columns:
            if isinstance(column, CategoricalColumn) and empty_cells[column.name]:
                words |= column.texts
        if not words:
            return ""
        quoted = ", ".join(map(repr, sorted(words)))
        return f" ({quoted}, a category here, is empty to pandas: read_csv(keep_default_na=False))"

    def _select_columns(self, raw: RawFeatures, source: str) -> pd.DataFrame:
        """Return the encoding's columns of a frame or array, in the encoding's order.

        `raw`: the frame or array. `source`: what errors call it.

        Raises DataError: columns are missing or repeated, or the array is of another width.
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
        source: the party's name.
        advice: proposes the settings; None: for a party called X, whose name is unknown here.
        cause: further words on the columns.
    """
    columns = ", ".join(f"{name} ({count})" for name, count in (+counts).items())
    if not columns:
        return
    advice = advice or Advice("X")
    remedies: tuple[Remedy, ...] = tuple(
        (advice.set_value("missing", value),) for value in _ACCEPTING
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
    """Raise TableError for empty cells; a column without any value has a fault of its own.

    `categorical`: names of columns that are encoded one-hot, in which words such as NA are values.
    `advice`: proposes settings for the error.
    """
    counts = Counter[str]()
    for name in frame.columns:
        empty_N = is_empty(frame[name], BLANK if name in categorical else EMPTY)
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

    The standard deviation is the population's; of equally frequent categories the first are kept.

    Raises TableError: names the faults of every column, and the settings that solve them.

    Args:
        frame: the columns, (N, number of columns).
        categorical: names of those that are encoded one-hot; the others are numbers or dates.
        missing: how empty cells are treated; "error" and "drop" refuse them here.
        max_categories: how many of the most frequent categories a column keeps; None: all, of
            which there may be `MAX_CATEGORIES`.
        source: the party's name, for errors.
        formats: date formats besides ISO 8601.
        advice: proposes settings for errors; None: an Advice without known lists.
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
    written = tuple[str, ...]()
    if is_date(column):
        kind = "date"
    elif is_date(column, formats):
        kind = "date"
        written = tuple(formats)
    elif is_duration(column):
        kind = "duration"
    numbers = _parse_numbers(column, kind, source=source, formats=written)
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
    if deviation == 0 or np.ptp(known) <= _ROUNDING * np.abs(known).max():
        return NumericColumn(
            name=name, mean=float(known[0]), constant=True, kind=kind, date_formats=written
        )
    return NumericColumn(name=name, mean=mean, scale=deviation, kind=kind, date_formats=written)


def _fit_categories(
    column: "pd.Series", max_categories: int | None, *, advice: Advice
) -> CategoricalColumn:
    """Return the encoding of a column of texts, with its `max_categories` most frequent categories.

    `max_categories`: None: the settings give no limit. `advice`: proposes settings for errors.

    Raises TableError: the column has too many categories, and the settings give no limit.
    """
    texts = read_texts(column, words=EMPTY)
    counts = Counter(text for text in texts if text is not None)
    _require_value(len(counts), column, advice)
    if len(counts) > MAX_CATEGORIES and max_categories is None:
        name = str(column.name)
        remedies: list[Remedy] = [
            (advice.set_value("rare_categories", {"most": FEW_CATEGORIES}),),
            (advice.add_to_list("ignore", name),),
        ]
        is_listed = name in advice.lists.get("categorical", ())
        if are_padded_codes(column) and not is_listed:
            remedies.append((advice.add_to_list("numeric", name),))
        raise TableError(
            [
                Fault(
                    f"{advice.party}: column {name!r} has {len(counts)} categories, at most "
                    f"{MAX_CATEGORIES} are one-hot encoded; group the rare ones, or say "
                    f"{describe_remedies(remedies)} in the run's file",
                    tuple(remedies),
                )
            ]
        )
    # The most frequent first; equally frequent ones in the order of their texts.
    categories = sorted(counts, key=lambda text: (-counts[text], text))[
        : max_categories or MAX_CATEGORIES
    ]
    return CategoricalColumn(
        name=str(column.name),
        categories=tuple(sorted(categories)),
        words=tuple(sorted(EMPTY & counts.keys())),
        constant=len(counts) == 1 and None not in texts,
    )


def _require_value(count: int, column: "pd.Series", advice: Advice) -> None:
    """Raise TableError if a column has no value.

    `count`: how many it has. `advice`: words the settings that the error proposes.
    """
    if not count:
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
        sequence: (T, C), steps and channels of a view of sequences; None: plain features.
    """

    first: int
    end: int
    sequence: tuple[int, int] | None = None

    @property
    def columns(self) -> slice:
        return slice(self.first, self.end)


def fit_views(
    frame: pd.DataFrame,
    views: Mapping[str, ViewColumns],
    *,
    categorical: Sequence[str] = (),
    missing: Missing = "error",
    max_categories: int | None = None,
    source: str,
    formats: Sequence[str] = (),
    advice: Advice | None = None,
) -> ColumnEncoding:
    """Return the encoding of all columns of the views, concatenated; see `fit_columns`.

    `views`: the columns of each view by its name; those of a sequence are divided by each channel's
    root mean square, the others are encoded by `fit_columns` with the other arguments.
    """
    columns: list[Column] = []
    for view in views.values():
        part = select_columns(frame, view.columns)
        if view.sequence is None:
            fitted = fit_columns(
                part,
                categorical=categorical,
                missing=missing,
                max_categories=max_categories,
                source=source,
                formats=formats,
                advice=advice,
            )
            columns += fitted.columns
        else:
            columns += _fit_sequence(part, *view.sequence, source=source)
    return ColumnEncoding(columns=tuple(columns), missing=missing)


def _fit_sequence(frame: pd.DataFrame, steps: int, channels: int, *, source: str) -> list[Column]:
    """Return the encodings of the columns of a view of sequences.

    Each channel is divided by its root mean square over the steps in use; the first column, the
    number of steps, stays as it is.

    `frame`: the view's columns. `steps`, `channels`: T and C. `source`: what errors call the table.
    """
    numbers_NF = np.stack([read_numbers(frame[name], source=source) for name in frame], axis=1)
    used_N = numbers_NF[:, 0]
    steps_NTC = numbers_NF[:, 1:].reshape(-1, steps, channels)
    used_NT = np.arange(steps) < used_N[:, None]
    squares_C = np.nan_to_num(np.square(steps_NTC[used_NT])).sum(0)
    mean_square_C = squares_C / max(1, used_NT.sum())
    has_scale_C = np.isfinite(mean_square_C) & (mean_square_C > 0)
    scale_C = np.where(has_scale_C, np.sqrt(mean_square_C), 1.0)
    first, *others = map(str, frame.columns)
    scales = np.tile(scale_C, steps).tolist()
    constants = np.tile(mean_square_C == 0, steps).tolist()
    columns: list[Column] = [NumericColumn(name=first)]
    for name, scale, constant in zip(others, scales, constants, strict=True):
        columns.append(NumericColumn(name=name, scale=scale, constant=constant))
    return columns


def locate_views(
    encoding: ColumnEncoding, views: Mapping[str, ViewColumns], *, source: str
) -> dict[str, View]:
    """Return by name the range of each view among the features that the encoding produces.

    `views`: the columns of each view, by its name. `source`: the party's name, for the error.

    Raises DataError: the views do not have the encoding's columns in its order.
    """
    expected = [name for view in views.values() for name in view.columns]
    if [column.name for column in encoding.columns] != expected:
        raise DataError(
            f"{source}: its encoding is of other columns than its views {', '.join(views)}, or of "
            "the same in another order; fit it to a table with these views"
        )
    places = iter(encoding.places)
    located = {}
    for name, view in views.items():
        own = [next(places) for _ in view.columns]
        located[name] = View(own[0].start, own[-1].stop, view.sequence)
    return located


def check_views(features: Any, views: Mapping[str, View], *, party: str) -> None:
    """Raise DataError unless the views cover all features without gaps, and views of sequences have
    the right width and valid counts of steps in use.

    `features`: (N, F), perhaps read lazily. `views`: name -> view, in the order of the features.
    """
    if not views:
        return
    ends = [0, *(view.end for view in views.values())]
    are_adjacent = all(view.first == end for view, end in zip(views.values(), ends, strict=False))
    if features.dim() != 2 or not are_adjacent or ends[-1] != features.shape[1]:
        raise DataError(
            f"{party}: views {', '.join(views)} must follow one another over all its features "
            f"{tuple(features.shape[1:])}"
        )
    for name, view in views.items():
        if view.sequence is None:
            continue
        max_steps, channels = view.sequence
        width = view.end - view.first
        expected = 1 + max_steps * channels
        steps_N = read_column(features, view.first)
        is_count_N = (steps_N >= 0) & (steps_N <= max_steps) & (steps_N == steps_N.round())
        fault = ""
        if width != expected:
            fault = f"{width} columns, expected {expected} for {view.sequence}"
        elif not bool(is_count_N.all()):
            fault = f"steps in use that are not whole numbers of 0 to {max_steps}"
        if fault:
            raise DataError(f"{party}: view {name!r} has {fault}")


class ImageEncoding(Settings):
    """The rows `first_row` to `end_row` (exclusive) of images of C x H x W, divided by `maximum`.

    `encode` takes whole images or images that are cut already, as (N, C, H, W), as (N, H, W) for
    one channel, or flat as (N, C * H * W); a frame is read as one flat image a row.
    """

    kind: Literal["image"] = "image"
    channels: int = Field(ge=1)
    height: int = Field(ge=1)
    width: int = Field(ge=1)
    maximum: int = Field(255, ge=1)
    first_row: int = Field(0, ge=0)
    end_row: int = Field(ge=1)

    @model_validator(mode="after")
    def _strip_is_inside(self) -> Self:
        """Refuse too large images, and a strip outside the image.

        The encoding may come from a peer's model card, so sizes are checked before memory is
        allocated.
        """
        # Limit for received cards: the output shape of a network is computed for such an image.
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
        """The shape of the image strip, in which each feature has its position."""
        return self.shape

    def feature_name(self, index: int) -> str:
        channel, row, column = np.unravel_index(index, self.shape)
        return f"channel {channel}, row {row + self.first_row}, column {column}"

    def encode(
        self, raw: RawFeatures, *, source: str = "the input", counts: CellCounts | None = None
    ) -> torch.Tensor:
        """Return float32 features (N, C, S, W) of raw images with values 0 to `maximum`.

        `counts` is unused; it counts cells of columns.
        """
        strip_NCSW = self._cut_strip(self._parse_pixels(raw, source), source)
        self._check_range(strip_NCSW, source)
        scaled_NCSW = strip_NCSW.astype(np.float32)
        scaled_NCSW /= self.maximum
        return torch.from_numpy(scaled_NCSW)

    def _parse_pixels(self, raw: RawFeatures, source: str) -> NDArray[np.generic]:
        """Return raw pixels as an array of numbers; a frame becomes one flat image a row."""
        if isinstance(raw, pd.DataFrame):
            columns = [read_numbers(raw[name], source=source) for name in raw.columns]
            return np.stack(columns, axis=1) if columns else np.empty((len(raw), 0))
        if not (np.issubdtype(raw.dtype, np.integer) or np.issubdtype(raw.dtype, np.floating)):
            raise DataError(f"{source}: images hold whole numbers or floats, got {raw.dtype}")
        return raw

    def _cut_strip(self, values: NDArray[np.generic], source: str) -> NDArray[np.generic]:
        """Return the strips (N, C, S, W) of whole images or of strips.

        `values`: images of shape (C, H, W), (H, W) for one channel, or flat; or strips in these
        shapes.

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
        if bad := int(np.count_nonzero(~np.isfinite(numbers))):
            raise DataError(f"{source}: {bad} pixels are NaN or infinite; mend them first")
        low = float(numbers.min())
        high = float(numbers.max())
        if low < 0 or high > self.maximum:
            raise DataError(
                f"{source}: pixels run from {low:g} to {high:g}, expected 0 to {self.maximum}"
            )
        if self.maximum > 1 and high <= 1 and bool((numbers != np.rint(numbers)).any()):
            raise DataError(
                f"{source}: pixels run from {low:g} to {high:g} and look scaled to [0, 1] already; "
                f"give the raw values 0 to {self.maximum}"
            )


class ArrayEncoding(Settings):
    """Rows of numbers as their party has them, of any shape: nothing is encoded or normalised."""

    kind: Literal["array"] = "array"
    row_shape: tuple[Annotated[int, Field(ge=1)], ...] = Field(min_length=1, max_length=8)

    @model_validator(mode="after")
    def _is_bounded(self) -> Self:
        """Refuse a row shape with more numbers than an image may have."""
        if (numbers := math.prod(self.row_shape)) > MAX_IMAGE_NUMBERS:
            raise ValueError(
                f"row_shape are {numbers:,} numbers of a row, expected {MAX_IMAGE_NUMBERS:,} at "
                "most"
            )
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        return self.row_shape

    @property
    def layout(self) -> tuple[int, ...]:
        return self.row_shape

    def feature_name(self, index: int) -> str:
        places = (str(int(place)) for place in np.unravel_index(index, self.row_shape))
        return f"feature [{', '.join(places)}]"

    def encode(
        self, raw: RawFeatures, *, source: str = "the input", counts: CellCounts | None = None
    ) -> torch.Tensor:
        """Return the rows, (N, *row_shape), as float32.

        `counts`: empty and ignored cells are added to it; None: not counted.
        """
        if isinstance(raw, pd.DataFrame):
            raw = raw.to_numpy()
        if tuple(raw.shape[1:]) != self.row_shape:
            raise DataError(
                f"{source}: expected rows of shape {self.row_shape}, got {tuple(raw.shape[1:])}"
            )
        return torch.from_numpy(np.asarray(raw, dtype=np.float32))


def _format_shape(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes))


# As a field of a settings class it reads and writes itself; elsewhere it is the union.
FeatureEncoding: TypeAlias = Annotated[
    ImageEncoding | ColumnEncoding | ArrayEncoding, Field(discriminator="kind")
]
_ADAPTER: TypeAdapter[ImageEncoding | ColumnEncoding | ArrayEncoding] = TypeAdapter(FeatureEncoding)


def parse_encoding(value: dict[str, Any]) -> ImageEncoding | ColumnEncoding | ArrayEncoding:
    """Return the encoding whose `model_dump(mode="json")` is `value`."""
    try:
        return _ADAPTER.validate_python(value)
    except ValidationError as error:
        raise DataError(f"not a feature encoding: {error}") from error

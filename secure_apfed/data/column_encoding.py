"""How one party turns raw columns into features: standardised numbers, one-hot categories.

Run by: that party alone, with statistics of its own rows (the active: its training rows
only). The fitted encoding is plain data, so that the same columns can be encoded again
when the model predicts. Letters: N rows, F features.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from pydantic import Field

from secure_apfed.data.cells import days_of, is_date
from secure_apfed.data.frames import is_numeric, only_columns, to_numbers, to_texts
from secure_apfed.errors import DataError
from secure_apfed.settings import Settings

__all__ = [
    "CategoricalColumn",
    "Column",
    "ColumnEncoding",
    "DateColumn",
    "Missing",
    "NumericColumn",
    "RareCategories",
    "fit_columns",
]

Missing = Literal["error", "mean", "drop"]
_CATEGORY_LIMIT = 256


class _StandardisedColumn(Settings):
    """(value - mean) / scale; `scale` is the standard deviation, or 1 for a constant."""

    name: str
    mean: float = 0.0
    scale: float = Field(1.0, gt=0)

    @property
    def features(self) -> tuple[str, ...]:
        """One name for each feature that the column becomes."""
        return (self.name,)

    def encode(self, column: "pd.Series", *, source: str) -> NDArray[np.float64]:
        """Return (N, 1); an empty cell becomes 0, the mean."""
        standard_N = (self.numbers(column, source=source) - self.mean) / self.scale
        return np.nan_to_num(standard_N, nan=0.0)[:, None]

    @staticmethod
    def numbers(column: "pd.Series", *, source: str) -> NDArray[np.float64]:
        """The finite numbers (N,) that are standardised; NaN where a cell is empty."""
        return _finite(column, source=source)


class NumericColumn(_StandardisedColumn):
    """A number, standardised."""

    kind: Literal["numeric"] = "numeric"


class DateColumn(_StandardisedColumn):
    """A date, as days since 1970-01-01, standardised."""

    kind: Literal["date"] = "date"

    @staticmethod
    def numbers(column: "pd.Series", *, source: str) -> NDArray[np.float64]:
        """Days; a column that holds numbers is taken to hold days."""
        if is_numeric(column):
            return _finite(column, source=source)
        return days_of(column, source=source)


class RareCategories(Settings):
    """What becomes of a column with many categories.

    Attributes:
        most: so many of the most frequent have a feature of their own. Null: 256, and a column with
            more is refused unless there are buckets.
        buckets: features that the other texts share, those that were never seen among them; with
            none they are rows of zeros.
    """

    most: int | None = Field(None, ge=1, le=_CATEGORY_LIMIT)
    buckets: int = Field(0, ge=0, le=4096)


class CategoricalColumn(Settings):
    """One-hot over `categories`; then over `buckets`, which other texts share by their hash.

    Where there are no buckets an unknown cell is a row of zeros, as an empty one always is. The
    hash is MurmurHash3 of the UTF-8 text, modulo the buckets.
    """

    kind: Literal["categorical"] = "categorical"
    name: str
    categories: tuple[str, ...] = Field(min_length=1)
    buckets: int = Field(0, ge=0)

    @property
    def features(self) -> tuple[str, ...]:
        """One name for each feature that the column becomes."""
        own = (f"{self.name}={category}" for category in self.categories)
        shared = (f"{self.name}#{bucket}" for bucket in range(self.buckets))
        return (*own, *shared)

    @property
    def spellings(self) -> dict[str, str]:
        """Every text that stands for a category, itself first: of true and false also those of
        other programs, since a CSV file is read as truths here and as texts there.
        """
        found = {category: category for category in self.categories}
        if {one.lower() for one in self.categories} <= {"true", "false"}:
            for category in self.categories:
                for text in (category.lower(), category.title(), category.upper()):
                    found.setdefault(text, category)
        return found

    def encode(self, column: "pd.Series", *, source: str) -> NDArray[np.float64]:
        """Return (N, categories and buckets)."""
        own = {category: at for at, category in enumerate(self.categories)}
        places = {text: own[category] for text, category in self.spellings.items()}
        texts = to_texts(column)
        if self.buckets:
            from sklearn.utils import murmurhash3_32

            for other in {text for text in texts if text} - places.keys():
                bucket = murmurhash3_32(other, positive=True) % self.buckets
                places[other] = len(self.categories) + bucket
        hot_NF = np.zeros((len(column), len(self.features)))
        for row, text in enumerate(texts):
            if text in places:
                hot_NF[row, places[text]] = 1.0
        return hot_NF


Column = Annotated[NumericColumn | DateColumn | CategoricalColumn, Field(discriminator="kind")]


class ColumnEncoding(Settings):
    """A party's columns, in the order of its features.

    `missing` is what `encode` does about empty cells: "mean" fills a number with the mean
    and a category with zeros; "error" and "drop" both refuse, because each row of the
    input owes a row of output ("drop" leaves rows out before the encoding is fitted).
    """

    kind: Literal["columns"] = "columns"
    columns: tuple[Column, ...] = Field(min_length=1)
    missing: Missing = "error"

    @classmethod
    def plain(cls, names: Sequence[str]) -> "ColumnEncoding":
        """Return an encoding of numeric columns that leaves numbers as they are."""
        return cls(columns=tuple(NumericColumn(name=name) for name in names))

    @property
    def shape(self) -> tuple[int, ...]:
        """(F,) of one row's features."""
        return (sum(len(column.features) for column in self.columns),)

    def feature_name(self, index: int) -> str:
        """Return the name of a position in the features."""
        return [name for column in self.columns for name in column.features][index]

    def encode(
        self, raw: pd.DataFrame | NDArray[np.generic], *, source: str = "the input"
    ) -> torch.Tensor:
        """Return float32 features (N, F) of raw columns; further columns are ignored.

        Args:
            raw: a frame with these columns by name, or an array (N, number of columns) in
                this encoding's order.
            source: who or which file, for errors.

        Raises:
            DataError: a column is missing, empty cells that `missing` does not allow, text
                in a numeric column, or an infinite number.
        """
        frame = self._frame(raw, source)
        if self.missing != "mean":
            _check_complete(frame, source=source)
        features_NF = np.empty((len(frame), *self.shape), np.float32)
        limit, first = np.finfo(np.float32).max, 0
        for column in self.columns:  # one at a time: all of them in float64 would be twice as much
            part = column.encode(frame[column.name], source=source)
            if part.size and np.abs(part).max() > limit:
                raise DataError(
                    f"{source}: column {column.name!r} is too far from its mean for float32; "
                    "rescale it"
                )
            features_NF[:, first : first + part.shape[1]] = part
            first += part.shape[1]
        return torch.from_numpy(features_NF)

    def _frame(self, raw: pd.DataFrame | NDArray[np.generic], source: str) -> pd.DataFrame:
        names = [column.name for column in self.columns]
        if not isinstance(raw, pd.DataFrame):
            if raw.ndim != 2 or raw.shape[1] != len(names):
                raise DataError(
                    f"{source}: expected {len(names)} columns ({', '.join(names)}), got an array "
                    f"of shape {raw.shape}"
                )
            return pd.DataFrame(raw, columns=names)
        absent = [name for name in names if name not in raw.columns]
        if absent:
            raise DataError(
                f"{source}: {len(absent)} of {len(names)} columns are missing: "
                f"{', '.join(absent)}; the "
                "model was trained with them, so add them"
            )
        return only_columns(raw, names)


def _check_complete(frame: pd.DataFrame, *, source: str, party: str = "") -> None:
    """Refuse empty cells; `party`: whose encoding is fitted to them.

    Raises:
        DataError: names the columns and how many cells each lacks.
    """
    counts = frame.isna().sum()
    lacking = [f"{name} ({count})" for name, count in counts.items() if count]
    if lacking:
        raise DataError(
            f"{source}: empty cells in {', '.join(lacking)}; fill them, or train with "
            f"data.parties.{party or 'PARTY'}.missing: mean, or drop, in the run's file"
        )


def fit_columns(
    frame: pd.DataFrame, *, categorical: Sequence[str] = (), missing: Missing = "error",
    rare: RareCategories | None = None, source: str,
) -> ColumnEncoding:  # fmt: skip
    """Return the encoding of all columns of `frame`, with statistics of all its rows.

    Numbers, and dates as days, get their mean and population standard deviation; categories are
    sorted, and of equally frequent ones the first are kept.

    Raises:
        DataError: empty cells under "error", a column without any value, text or infinity
            in a numeric column, more categories than `rare` allows, or no columns.
    """
    if not frame.shape[1]:
        raise DataError(
            f"{source}: no feature columns are left; name some as numeric or categorical"
        )
    if missing != "mean":
        _check_complete(frame, source=source, party=source)
    columns = [
        _fit_categories(frame[name], rare or RareCategories(), source=source)
        if name in categorical
        else _fit_numbers(frame[name], source=source)
        for name in frame.columns
    ]
    return ColumnEncoding(columns=tuple(columns), missing=missing)


def _fit_numbers(column: "pd.Series", *, source: str) -> NumericColumn | DateColumn:
    kind = DateColumn if is_date(column) else NumericColumn
    numbers = kind.numbers(column, source=source)
    known = numbers[~np.isnan(numbers)]
    _check_any(len(known), column, source)
    with np.errstate(over="ignore", invalid="ignore"):
        mean, deviation = float(known.mean()), float(known.std())
    if not (np.isfinite(mean) and np.isfinite(deviation)):
        raise DataError(
            f"{source}: the values of column {str(column.name)!r} are too large to standardise; "
            "rescale it"
        )
    if known.min() == known.max() or deviation == 0:  # where std and mean are but rounding
        return kind(name=str(column.name), mean=float(known[0]))
    return kind(name=str(column.name), mean=mean, scale=deviation)


def _fit_categories(column: "pd.Series", rare: RareCategories, *, source: str) -> CategoricalColumn:
    counts = Counter(text for text in to_texts(column) if text is not None)
    _check_any(len(counts), column, source)
    if len(counts) > _CATEGORY_LIMIT and rare == RareCategories():
        raise DataError(
            f"{source}: column {column.name!r} has {len(counts)} categories, at most "
            f"{_CATEGORY_LIMIT} are one-hot encoded; drop it, group the rare ones, or in the run's "
            f"file name it under data.parties.{source}.numeric or .ignore, or say "
            f"data.parties.{source}.rare_categories: {{most: 64, buckets: 16}}"
        )
    most = sorted(counts, key=lambda text: (-counts[text], text))[: rare.most or _CATEGORY_LIMIT]
    return CategoricalColumn(
        name=str(column.name), categories=tuple(sorted(most)), buckets=rare.buckets
    )


def _check_any(count: int, column: "pd.Series", source: str) -> None:
    if not count:
        raise DataError(f"{source}: column {column.name!r} is empty; put it under ignore")


def _finite(column: "pd.Series", *, source: str) -> NDArray[np.float64]:
    numbers = to_numbers(column, source=source)
    infinite = int(np.count_nonzero(np.isinf(numbers)))
    if infinite:
        raise DataError(
            f"{source}: column {column.name!r} has {infinite} infinite numbers; mend them"
        )
    return numbers

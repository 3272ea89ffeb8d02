"""How the columns of new rows differ from those that an encoding was fitted to.

Run by: the active, when it predicts. The encoding holds mean and deviation of each number, and the
known categories; beside it the model card keeps between what numbers the training rows lay. A
column with a unit or a code of its own is found so; what leaves all these as they were is not.
Cells are counted of any number of rows; a mean and a spread say something of 30 or more alone.

Letters: N rows, F features.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import Tensor

from secure_apfed.data.encoding import CategoricalColumn, CellCounts, Column, ColumnEncoding

__all__ = ["FEWEST_ROWS", "ColumnDrift", "DriftMeter", "Extremes", "extremes_of"]

Extremes: TypeAlias = tuple[float, float]
"""The lowest and the highest number of a column, in its unit."""

FEWEST_ROWS = 30
_SHIFT, _WIDER, _FAR, _EMPTY, _OUTSIDE = 0.5, 2.0, 8.0, 0.05, 0.05
_ROUNDING = 1e-5  # of features in float32, in deviations
_SIX_DIGITS = 5e-6  # half of the last of six, at most


@dataclass(frozen=True, kw_only=True)
class ColumnDrift:
    """One column of new rows.

    Attributes:
        name: of the column.
        rows: that were read.
        empty: those with an empty cell, which counts as the mean or as no category.
        ignored: those with a cell that counts for nothing, since no training row held the like.
        shift: of its mean, in deviations of the fitted rows; NaN of categories and constants.
        spread: its deviation over theirs; likewise.
        farthest: how many deviations the farthest row lies from their mean; likewise.
        extremes: of the training rows, where they were kept; outside: how many rows lie beyond.
    """

    name: str
    rows: int
    empty: int = 0
    ignored: int = 0
    shift: float = math.nan
    spread: float = math.nan
    farthest: float = math.nan
    extremes: Extremes | None = None
    outside: int = 0

    @property
    def notable(self) -> str:
        """What is unusual of it, for people; empty where nothing is."""
        told, many = [], self.rows >= FEWEST_ROWS
        if self.ignored:
            told.append(
                f"{self._of_rows(self.ignored)} hold what no training row held, which counts for "
                "nothing"
            )
        if self.empty > _EMPTY * self.rows:
            told.append(f"{self._of_rows(self.empty)} have an empty cell")
        if many and abs(self.shift) > _SHIFT:
            told.append(f"its mean lies {self.shift:+.1f} deviations from that of training rows")
        if many and (self.spread > _WIDER or self.spread < 1 / _WIDER):
            told.append(f"it is spread {self.spread:.2g} times as wide")
        if self.farthest > _FAR:
            told.append(f"a row lies {self.farthest:.3g} deviations away")
        if self.extremes is not None and self.outside > _OUTSIDE * self.rows:
            low, high = self.extremes
            told.append(f"{self._of_rows(self.outside)} lie outside of {low:g} to {high:g}")
        return "; ".join(told)

    def _of_rows(self, count: int) -> str:
        return f"{count:,} of {self.rows:,} rows"


def extremes_of(encoding: ColumnEncoding, features_NF: Tensor) -> dict[str, Extremes]:
    """Between what numbers these rows lie, by column, to six digits; none of no rows."""
    if not len(features_NF):
        return {}
    found = {}
    for column, own in _parts(encoding):
        if not isinstance(column, CategoricalColumn):
            # of a constant both are 0, and so the mean
            ends = torch.stack(torch.aminmax(features_NF[:, own])).double()
            low, high = (ends * column.scale + column.mean).tolist()
            found[column.name] = (float(f"{low:.6g}"), float(f"{high:.6g}"))
    return found


class DriftMeter:
    """Reads new rows, any number at a time, and tells every column's drift.

    Args:
        encoding: of the columns.
        extremes: of the training rows, see `extremes_of`.

    Attributes:
        counts: of the rows that are added, as the encoding counted their cells.
    """

    def __init__(
        self, encoding: ColumnEncoding, extremes: Mapping[str, Extremes] = MappingProxyType({})
    ) -> None:
        self._parts, self.counts = tuple(_parts(encoding)), CellCounts()
        self._extremes = extremes
        (width,) = encoding.shape
        self._sum_F, self._squares_F, self._largest_F = torch.zeros(3, width, dtype=torch.float64)
        self._outside_F = torch.zeros(width, dtype=torch.float64)
        self._low_F, self._high_F = self._ends(width)

    def _ends(self, width: int) -> tuple[Tensor, Tensor]:
        """The extremes as features; infinite where none were kept."""
        low_F = torch.full((width,), -math.inf, dtype=torch.float64)
        high_F = -low_F
        for column, own in self._parts:
            if not isinstance(column, CategoricalColumn) and column.name in self._extremes:
                low, high = (
                    (one + side * _SIX_DIGITS * abs(one) - column.mean) / column.scale
                    for side, one in zip((-1, 1), self._extremes[column.name], strict=True)
                )
                low_F[own] = low - _ROUNDING * max(1.0, abs(low))
                high_F[own] = high + _ROUNDING * max(1.0, abs(high))
        return low_F, high_F

    def add(self, features_NF: Tensor) -> None:
        """Read the features of so many rows, whose cells are counted."""
        values_NF = features_NF.double()
        self._sum_F += values_NF.sum(0)
        self._squares_F += values_NF.square().sum(0)
        self._largest_F = torch.maximum(self._largest_F, values_NF.abs().amax(0))
        self._outside_F += ((values_NF < self._low_F) | (values_NF > self._high_F)).sum(0)

    def result(self) -> tuple[ColumnDrift, ...]:
        """Every column's, in the encoding's order; none of no rows."""
        return tuple(self._one(*part) for part in self._parts) if self.counts.rows else ()

    def _one(self, column: Column, own: slice) -> ColumnDrift:
        rows, name = self.counts.rows, column.name
        plain = ColumnDrift(
            name=name, rows=rows, empty=self.counts.empty[name], ignored=self.counts.ignored[name]
        )
        if isinstance(column, CategoricalColumn) or column.constant:
            return plain
        mean = float(self._sum_F[own]) / rows
        variance = float(self._squares_F[own]) / rows - mean**2
        return replace(
            plain,
            shift=mean,
            spread=math.sqrt(max(variance, 0.0)),
            farthest=float(self._largest_F[own]),
            extremes=self._extremes.get(name),
            outside=int(self._outside_F[own]),
        )


def _parts(encoding: ColumnEncoding) -> Iterator[tuple[Column, slice]]:
    """Each column, and where its features are."""
    first = 0
    for column in encoding.columns:
        end = first + len(column.features)
        yield column, slice(first, end)
        first = end

"""How the columns of new rows differ from those that an encoding was fitted to.

Run by: the active, when it predicts. The encoding holds mean and deviation of each number, and the
known categories; beside it the model card keeps between what numbers the training rows lay. A
column with a unit or a code of its own is found so; what leaves all these as they were is not.

Letters: N rows, F features.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import Tensor

from secure_apfed.data.column_encoding import CategoricalColumn, Column, ColumnEncoding

__all__ = ["FEWEST_ROWS", "ColumnDrift", "DriftMeter", "Extremes", "extremes_of"]

Extremes: TypeAlias = tuple[float, float]
"""The lowest and the highest number of a column, in its unit."""

FEWEST_ROWS = 30
_SHIFT, _WIDER, _FAR, _UNKNOWN, _OUTSIDE = 0.5, 2.0, 8.0, 0.05, 0.05
_ROUNDING = 1e-5  # of features in float32, in deviations
_SIX_DIGITS = 5e-6  # half of the last of six, at most


@dataclass(frozen=True, kw_only=True)
class ColumnDrift:
    """One column of new rows.

    Attributes:
        name: of the column.
        shift: of its mean, in deviations of the fitted rows; NaN of categories.
        spread: its deviation over theirs; NaN of categories.
        farthest: how many deviations the farthest row lies from their mean; NaN of categories.
        unknown: share of rows with an empty cell or an unknown category; 0 of numbers.
        extremes: of the training rows, where they were kept; outside: share of rows beyond them.
    """

    name: str
    shift: float = math.nan
    spread: float = math.nan
    farthest: float = math.nan
    unknown: float = 0.0
    extremes: Extremes | None = None
    outside: float = 0.0

    @property
    def notable(self) -> str:
        """What is unusual of it, for people; empty where nothing is."""
        told = []
        if abs(self.shift) > _SHIFT:
            told.append(f"its mean lies {self.shift:+.1f} deviations from that of training rows")
        if self.spread > _WIDER or self.spread < 1 / _WIDER:
            told.append(f"it is spread {self.spread:.2g} times as wide")
        if self.farthest > _FAR:
            told.append(f"a row lies {self.farthest:.3g} deviations away")
        if self.unknown > _UNKNOWN:
            told.append(f"{self.unknown:.0%} of rows have an empty cell or an unknown category")
        if self.extremes is not None and self.outside > _OUTSIDE:
            low, high = self.extremes
            told.append(f"{self.outside:.0%} of rows lie outside of {low:g} to {high:g}")
        return "; ".join(told)


def extremes_of(encoding: ColumnEncoding, features_NF: Tensor) -> dict[str, Extremes]:
    """Between what numbers these rows lie, by column, to six digits; none of no rows."""
    if not len(features_NF):
        return {}
    found = {}
    for column, own in _parts(encoding):
        if not isinstance(column, CategoricalColumn):
            ends = torch.stack(torch.aminmax(features_NF[:, own])).double()
            low, high = (ends * column.scale + column.mean).tolist()
            found[column.name] = (float(f"{low:.6g}"), float(f"{high:.6g}"))
    return found


class DriftMeter:
    """Reads new rows, any number at a time, and tells every column's drift.

    Args:
        encoding: of the columns.
        extremes: of the training rows, see `extremes_of`.
    """

    def __init__(
        self, encoding: ColumnEncoding, extremes: Mapping[str, Extremes] = MappingProxyType({})
    ) -> None:
        self._parts, self._rows = tuple(_parts(encoding)), 0
        self._extremes = extremes
        (width,) = encoding.shape
        self._sum_F, self._squares_F, self._largest_F = torch.zeros(3, width, dtype=torch.float64)
        self._known = torch.zeros(len(self._parts), dtype=torch.float64)
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
        """Read the features of so many rows."""
        values_NF = features_NF.double()
        self._rows += len(values_NF)
        self._sum_F += values_NF.sum(0)
        self._squares_F += values_NF.square().sum(0)
        self._largest_F = torch.maximum(self._largest_F, values_NF.abs().amax(0))
        self._outside_F += ((values_NF < self._low_F) | (values_NF > self._high_F)).sum(0)
        for at, (_, own) in enumerate(self._parts):
            self._known[at] += values_NF[:, own].any(dim=1).sum()

    def result(self) -> tuple[ColumnDrift, ...]:
        """Every column's, in the encoding's order; none of fewer than 30 rows.

        A column that was constant where the encoding was fitted has no deviation: what is told of
        it is in its own unit.
        """
        if self._rows < FEWEST_ROWS:
            return ()
        return tuple(self._one(at, column, own) for at, (column, own) in enumerate(self._parts))

    def _one(self, at: int, column: Column, own: slice) -> ColumnDrift:
        if isinstance(column, CategoricalColumn):
            return ColumnDrift(name=column.name, unknown=1 - float(self._known[at]) / self._rows)
        mean = float(self._sum_F[own]) / self._rows
        variance = float(self._squares_F[own]) / self._rows - mean**2
        return ColumnDrift(
            name=column.name,
            shift=mean,
            spread=math.sqrt(max(variance, 0.0)),
            farthest=float(self._largest_F[own]),
            extremes=self._extremes.get(column.name),
            outside=float(self._outside_F[own]) / self._rows,
        )


def _parts(encoding: ColumnEncoding) -> Iterator[tuple[Column, slice]]:
    """Each column, and where its features are."""
    first = 0
    for column in encoding.columns:
        end = first + len(column.features)
        yield column, slice(first, end)
        first = end

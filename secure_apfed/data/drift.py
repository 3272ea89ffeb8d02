"""How the columns of new rows differ from those that an encoding was fitted to.

Run by: the active, when it predicts. Nothing but the encoding is needed: it holds mean and
deviation of each number, and the known categories. A column with a unit or a code of its own is
found so; what leaves means, deviations and categories as they were is not.

Letters: N rows, F features.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from secure_apfed.data.column_encoding import CategoricalColumn, Column, ColumnEncoding

__all__ = ["FEWEST_ROWS", "ColumnDrift", "DriftMeter"]

FEWEST_ROWS = 30
_SHIFT, _WIDER, _FAR, _UNKNOWN = 0.5, 2.0, 8.0, 0.05


@dataclass(frozen=True, kw_only=True)
class ColumnDrift:
    """One column of new rows.

    Attributes:
        name: of the column.
        shift: of its mean, in deviations of the fitted rows; NaN of categories.
        spread: its deviation over theirs; NaN of categories.
        farthest: how many deviations the farthest row lies from their mean; NaN of categories.
        unknown: share of rows with an empty cell or an unknown category; 0 of numbers.
    """

    name: str
    shift: float = math.nan
    spread: float = math.nan
    farthest: float = math.nan
    unknown: float = 0.0

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
        return "; ".join(told)


class DriftMeter:
    """Reads new rows, any number at a time, and tells every column's drift."""

    def __init__(self, encoding: ColumnEncoding) -> None:
        self._columns, self._rows = encoding.columns, 0
        width = sum(len(column.features) for column in self._columns)
        self._sum_F, self._squares_F, self._largest_F = torch.zeros(3, width, dtype=torch.float64)
        self._known = torch.zeros(len(self._columns), dtype=torch.float64)

    def add(self, features_NF: Tensor) -> None:
        """Read the features of so many rows."""
        values_NF = features_NF.double()
        self._rows += len(values_NF)
        self._sum_F += values_NF.sum(0)
        self._squares_F += values_NF.square().sum(0)
        self._largest_F = torch.maximum(self._largest_F, values_NF.abs().amax(0))
        for at, (_, own) in enumerate(self._parts()):
            self._known[at] += values_NF[:, own].any(dim=1).sum()

    def result(self) -> tuple[ColumnDrift, ...]:
        """Every column's, in the encoding's order; none of fewer than 30 rows.

        A column that was constant where the encoding was fitted has no deviation: what is told of
        it is in its own unit.
        """
        if self._rows < FEWEST_ROWS:
            return ()
        return tuple(self._one(at, column, own) for at, (column, own) in enumerate(self._parts()))

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
        )

    def _parts(self) -> Iterator[tuple[Column, slice]]:
        """Each column, and where its features are."""
        first = 0
        for column in self._columns:
            end = first + len(column.features)
            yield column, slice(first, end)
            first = end

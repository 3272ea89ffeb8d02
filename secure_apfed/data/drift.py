"""How the columns of new rows differ from those that an encoding was fitted to.

Run by: the active, when it predicts. Nothing but the encoding is needed: it holds mean and
deviation of each number, and the known categories. A column with a unit or a code of its own is
found so; what leaves means, deviations and categories as they were is not.

Letters: N rows, F features.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from secure_apfed.data.column_encoding import CategoricalColumn, ColumnEncoding

__all__ = ["FEWEST_ROWS", "ColumnDrift", "column_drift"]

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


def column_drift(encoding: ColumnEncoding, features_NF: Tensor) -> tuple[ColumnDrift, ...]:
    """Return every column's, in the encoding's order; none of fewer than 30 rows.

    A column that was constant where the encoding was fitted has no deviation: what is told of it is
    in its own unit.
    """
    if len(features_NF) < FEWEST_ROWS:
        return ()
    return tuple(_columns(encoding, features_NF))


def _columns(encoding: ColumnEncoding, features_NF: Tensor) -> Iterator[ColumnDrift]:
    first = 0
    for column in encoding.columns:
        end = first + len(column.features)
        own_NC = features_NF[:, first:end].double()
        first = end
        if isinstance(column, CategoricalColumn):
            known_N = own_NC.any(dim=1)
            yield ColumnDrift(name=column.name, unknown=1 - float(known_N.double().mean()))
            continue
        yield ColumnDrift(
            name=column.name,
            shift=float(own_NC.mean()),
            spread=float(own_NC.std(correction=0)),
            farthest=float(own_NC.abs().max()),
        )

"""Targets of a regression as classes that can be voted for: ranges of about as many labelled rows.

Run by: the active. Passives are shown the range of a labelled row's target, and never the target;
they vote for ranges as for classes, so that sums, noise and epsilons are those of any vote. What
the active learns of a row is the mean target that the ranges stand for, weighed by how likely they
are (L. Torgo and J. Gama, "Regression using classification algorithms", Intelligent Data Analysis
1, 1997).

Letters: n labelled rows, U rows, K ranges.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

__all__ = ["RANGES", "Bins"]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

RANGES = 8
"""K. More tell a target finer, and each of them from fewer labelled rows."""


@dataclass(frozen=True, eq=False)
class Bins:
    """Attributes:
    edges: (K - 1,), rising, between ranges.
    centres: (K,), what each stands for.
    """

    edges: Floats
    centres: Floats

    @classmethod
    def of(cls, targets_n: Floats, *, ranges: int = RANGES) -> Self:
        """Cut at quantiles of the labelled targets; a range stands for the mean of its own.

        Where many targets are alike, ranges may be empty, and stand for their lower edge.
        """
        edges = np.quantile(targets_n, np.linspace(0, 1, ranges + 1)[1:-1])
        place_n = np.searchsorted(edges, targets_n, side="left")
        centres = np.concatenate([edges[:1], edges])
        for one in np.unique(place_n):
            centres[one] = targets_n[place_n == one].mean()
        return cls(edges, centres)

    def classes_of(self, targets_n: Floats) -> Integers:
        """The range (n,) of each target."""
        return np.searchsorted(self.edges, targets_n, side="left").astype(np.int64)

    def expected(self, likely_UK: Floats) -> Floats:
        """The mean target (U, 1) of each row; 0, the mean of all, of a row that says nothing."""
        total_U1 = likely_UK.sum(axis=1, keepdims=True)
        mean_U1 = (likely_UK @ self.centres)[:, None]
        expected_U1: Floats = np.zeros_like(mean_U1)
        np.divide(mean_U1, total_U1, out=expected_U1, where=total_U1 > 0)
        return expected_U1

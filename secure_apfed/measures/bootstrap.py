"""How far a measure may lie from its value on all people: intervals by resampling of the test rows.

They hold what another draw of test rows would change, and neither the spread over seeds nor what
another draw of training rows would change.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from secure_apfed.measures.scored import Scored
from secure_apfed.measures.table import measure_all

__all__ = ["RESAMPLES", "Estimate", "estimates"]

RESAMPLES = 60
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A measure of test rows, and its 95 % interval over them; NaN ends where there is none."""

    value: float
    low: float = math.nan
    high: float = math.nan


def estimates(scored: Scored, *, resamples: int = RESAMPLES, seed: int = 0) -> dict[str, Estimate]:
    """All measures that the rows define, with percentile intervals.

    Rows are drawn class by class, so that a rare class is in every resample: intervals are
    for this share of each class. Measures of one resample are of the same rows.

    Args:
        scored: the test rows.
        resamples: how many; each takes as long as the measures do once.
        seed: of the resamples; the same rows and seed give the same intervals.
    """
    rng, groups = np.random.default_rng(seed), _groups(scored)
    drawn = []
    for _ in range(resamples if len(scored.truth) > 1 else 0):
        places = np.concatenate([rng.choice(group, len(group)) for group in groups])
        drawn.append(measure_all(scored.rows(places)))
    return {
        name: _estimate(value, [one[name] for one in drawn if name in one])
        for name, value in measure_all(scored).items()
    }


def _groups(scored: Scored) -> list[NDArray[np.int64]]:
    if np.issubdtype(scored.truth.dtype, np.floating):
        return [np.arange(len(scored.truth))]
    return [np.flatnonzero(scored.truth == one) for one in np.unique(scored.truth)]


def _estimate(value: float, drawn: list[float]) -> Estimate:
    if not drawn:
        return Estimate(value)
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return Estimate(value, float(low), float(high))

"""How far a measure may lie from its value on all people: intervals by resampling of the test rows.

They hold what another draw of test rows would change, and neither the spread over seeds nor what
another draw of training rows would change.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from secure_apfed.measures.redrawn import REDRAWN, Redrawn
from secure_apfed.measures.scored import FloatArray, Scored
from secure_apfed.measures.table import measure_all

__all__ = ["RESAMPLES", "Estimate", "estimates"]

RESAMPLES = 500
# of one block of resamples: what is worked on stays in the cache
_CELLS, _LEAST = 50_000, 8
_CONFIDENCE = 0.95
# A largest difference grows by what is drawn: in the rows over all people, in resamples over the
# rows. Mirrored at the value, the interval loses what they grew by.
_MIRRORED = ("ks",)


@dataclass(frozen=True)
class Estimate:
    """A measure of test rows, and its 95 % interval over them; NaN ends where there is none."""

    value: float
    low: float = math.nan
    high: float = math.nan


def estimates(scored: Scored, *, resamples: int = RESAMPLES, seed: int = 0) -> dict[str, Estimate]:
    """All measures that the rows define, with percentile intervals; of KS with the basic one.

    Rows are drawn class by class, so that a rare class is in every resample: intervals are
    for this share of each class. Measures of one resample are of the same rows.

    Args:
        scored: the test rows.
        resamples: how many.
        seed: of the resamples; the same rows and seed give the same intervals.
    """
    values = measure_all(scored)
    drawn: dict[str, list[FloatArray]] = {name: [] for name in values}
    for counts_RB in _draws(scored, resamples if len(scored.truth) > 1 else 0, seed):
        redrawn = Redrawn(scored, counts_RB)
        for name, found in drawn.items():
            found.append(REDRAWN[name](redrawn))
    return {
        name: _estimate(value, drawn[name], mirrored=name in _MIRRORED)
        for name, value in values.items()
    }


def _draws(scored: Scored, resamples: int, seed: int) -> Iterator[FloatArray]:
    """How often each row is drawn, (R, B), some resamples at a time."""
    groups, rows = _groups(scored), len(scored.truth)
    rngs = np.random.default_rng(seed).spawn(len(groups))  # so that blocks change nothing
    block = max(_LEAST, _CELLS // max(rows, 1))
    for first in range(0, resamples, block):
        some = min(block, resamples - first)
        counts_RB = np.empty((some, rows))
        for rng, group in zip(rngs, groups, strict=True):
            drawn = rng.multinomial(len(group), np.full(len(group), 1 / len(group)), size=some)
            counts_RB[:, group] = drawn
        yield counts_RB


def _groups(scored: Scored) -> list[NDArray[np.int64]]:
    if np.issubdtype(scored.truth.dtype, np.floating):
        return [np.arange(len(scored.truth))]
    return [np.flatnonzero(scored.truth == one) for one in np.unique(scored.truth)]


def _estimate(value: float, drawn: list[FloatArray], *, mirrored: bool) -> Estimate:
    if not drawn:
        return Estimate(value)
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(np.concatenate(drawn), [tail, 1 - tail])
    if mirrored:
        low, high = max(0.0, min(value, 2 * value - high)), min(1.0, max(value, 2 * value - low))
    return Estimate(value, float(low), float(high))

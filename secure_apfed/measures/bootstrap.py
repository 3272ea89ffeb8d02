"""How far a measure may lie from its value on all people: intervals by resampling of the test rows.

They hold what another draw of test rows would change, and neither the spread over seeds nor what
another draw of training rows would change.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from secure_apfed.measures.redrawn import REDRAWN, Redrawn
from secure_apfed.measures.scored import FloatArray, Scored
from secure_apfed.measures.table import measure_all

__all__ = ["FEWEST_ROWS", "RESAMPLES", "Estimate", "estimates"]

RESAMPLES = 500
FEWEST_ROWS = 20
"""Rows of each class, below which resamples alone are too much alike."""

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
    for this share of each class. Measures of one resample are of the same rows. Where a class has
    fewer than `FEWEST_ROWS`, intervals also hold what one more row of the rarest would change,
    told as the worst and as the best of all rows are.

    Args:
        scored: the test rows.
        resamples: how many.
        seed: of the resamples; the same rows and seed give the same intervals.
    """
    values = measure_all(scored)
    spans = [_spans(one, values, resamples, seed) for one in (scored, *_with_one_more(scored))]
    return {
        name: Estimate(
            value, min(span[name][0] for span in spans), max(span[name][1] for span in spans)
        )
        for name, value in values.items()
    }


def _with_one_more(scored: Scored) -> Iterator[Scored]:
    """The same rows where a class has few, with one more of the rarest: told worst, or best.

    So an interval of few rows that are all told holds what another such row would change; without
    it it would be of no width at all.
    """
    if np.issubdtype(scored.truth.dtype, np.floating):
        return
    classes, counts = np.unique(scored.truth, return_counts=True)
    if not len(counts) or counts.min() >= FEWEST_ROWS or not scored.finite:
        return
    rarest = classes[counts.argmin()]
    told_B = scored.scores[:, rarest] if scored.classes else (2 * rarest - 1) * scored.scores
    for place in (told_B.argmin(), told_B.argmax()):
        more = scored.rows(np.append(np.arange(len(scored.truth)), place))
        more.truth[-1] = rarest
        yield more


def _spans(
    scored: Scored, values: Mapping[str, float], resamples: int, seed: int
) -> dict[str, tuple[float, float]]:
    """By measure, the interval by resamples of these rows; NaN ends of a single row."""
    drawn: dict[str, list[FloatArray]] = {name: [] for name in values}
    for counts_RB in _draws(scored, resamples if len(scored.truth) > 1 else 0, seed):
        redrawn = Redrawn(scored, counts_RB)
        for name, found in drawn.items():
            found.append(REDRAWN[name](redrawn))
    return {
        name: _span(value, drawn[name], mirrored=name in _MIRRORED)
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


def _span(value: float, drawn: list[FloatArray], *, mirrored: bool) -> tuple[float, float]:
    if not drawn:
        return math.nan, math.nan
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(np.concatenate(drawn), [tail, 1 - tail])
    if mirrored:
        low, high = max(0.0, min(value, 2 * value - high)), min(1.0, max(value, 2 * value - low))
    return float(low), float(high)

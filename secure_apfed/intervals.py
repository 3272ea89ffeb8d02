"""How far a measure may lie from its value on all people: intervals by resampling of the test rows.

They hold what another draw of test rows would change, and neither the spread over seeds nor what
another draw of training rows would change. Measures of many resamples are computed at once, of how
often each row was drawn, in place of drawn rows: intervals need hundreds of them, and scikit-learn
measures one at a time. Tests hold each equal to its measure in the table.

Letters: B rows, R resamples, K classes, T places between which scores differ.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray

from secure_apfed.measures import FloatArray, Measure, Scored, measure_all

RESAMPLES = 500
FEWEST_ROWS = 20
"""Rows of each class, below which resamples alone are too much alike."""
FEWEST_POSITIVES = 30
"""Rows of a rare class, below which figures of it are told with a warning."""
# of one block of resamples: what is worked on stays in the cache
_CELLS = 50_000
_LEAST = 8
# of all resamples, in 16 bits each
_KEPT_CELLS = 2**24
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


def estimate_measures(
    scored: Scored, *, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Estimate]:
    """Return all measures that the rows define, with percentile intervals; KS has the basic one.

    Rows are drawn class by class, so that a rare class is in every resample: intervals are for this
    share of each class. Measures of one resample are of the same rows. Where a class has fewer than
    `FEWEST_ROWS`, intervals also hold the measure with one more row of the rarest class, predicted
    as the worst and as the best of all rows are.
    """
    values = measure_all(scored)
    spans = [
        _compute_intervals(sample, values, resamples, seed)
        for sample in (scored, *_add_rare_row(scored))
    ]
    return {
        name: Estimate(
            value, min(span[name][0] for span in spans), max(span[name][1] for span in spans)
        )
        for name, value in values.items()
    }


def compute_influence(scored: Scored, measure: Measure) -> FloatArray:
    """Return how much each row (B,) moves the measure: jackknife values, whose mean is about 0.

    A value is (B - 1) times the fall of the measure if the row is left out. For accuracy this is
    whether the row is predicted correctly, less the accuracy. NaN if the other rows do not define
    the measure.
    """
    rows = len(scored.truth)
    redrawn = REDRAWN[measure.name]
    block = max(_LEAST, _CELLS // max(rows, 1))
    whole = redrawn(Resamples(scored, np.ones((1, rows))))
    found = []
    with np.errstate(divide="ignore", invalid="ignore"):
        for first in range(0, rows, block):
            counts_RB = np.ones((min(block, rows - first), rows))
            counts_RB[np.arange(len(counts_RB)), first + np.arange(len(counts_RB))] = 0
            found.append((rows - 1) * (whole - redrawn(Resamples(scored, counts_RB))))
    return np.concatenate([np.empty(0), *found])


def proportion_interval(of_it: int, rows: int) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson 1927), valid even for few or no rows."""
    found = scipy.stats.binomtest(of_it, rows).proportion_ci(_CONFIDENCE, method="wilson")
    return float(found.low), float(found.high)


def gain_between(
    one: Scored, other: Scored, measure: Measure, *, resamples: int = RESAMPLES, seed: int = 0
) -> Estimate | None:
    """Return how much better one model is than another on the same rows, with a 95 % interval.

    The interval is over rows and paired: both models are measured on each draw of the rows, so that
    rows hard for both cancel. None if they were tested on other rows, or the measure is not defined
    there.
    """
    if not np.array_equal(one.truth, other.truth):
        return None
    values = [measure_all(scored).get(measure.name, math.nan) for scored in (one, other)]
    if any(map(math.isnan, values)):
        return None
    redrawn = REDRAWN[measure.name]
    sign = 1 if measure.higher_is_better else -1
    drawn_R = [
        sign * (redrawn(Resamples(one, counts_RB)) - redrawn(Resamples(other, counts_RB)))
        for counts_RB in _iter_draws(one, resamples if len(one.truth) > 1 else 0, seed)
    ]
    return Estimate(measure.compute_gain(*values), *_compute_interval(0.0, drawn_R, mirrored=False))


def _add_rare_row(scored: Scored) -> Iterator[Scored]:
    """Yield the same rows with one more of a rare class: predicted worst, then best.

    This applies only where a class has few rows. Otherwise, the interval of few rows that are all
    predicted correctly would have no width.
    """
    if np.issubdtype(scored.truth.dtype, np.floating):
        return
    classes, counts = np.unique(scored.truth, return_counts=True)
    if not len(counts) or counts.min() >= FEWEST_ROWS or not scored.is_finite:
        return
    rarest = classes[counts.argmin()]
    told_B = scored.scores[:, rarest]
    for place in (told_B.argmin(), told_B.argmax()):
        more = scored.select_rows(np.append(np.arange(len(scored.truth)), place))
        more.truth[-1] = rarest
        yield more


def _compute_intervals(
    scored: Scored, values: Mapping[str, float], resamples: int, seed: int
) -> dict[str, tuple[float, float]]:
    """Return, by measure, the interval by resamples of these rows; a single row has NaN ends."""
    drawn: dict[str, list[FloatArray]] = {name: [] for name in values}
    for counts_RB in _iter_draws(scored, resamples if len(scored.truth) > 1 else 0, seed):
        redrawn = Resamples(scored, counts_RB)
        for name, found in drawn.items():
            found.append(REDRAWN[name](redrawn))
    return {
        name: _compute_interval(value, drawn[name], mirrored=name in _MIRRORED)
        for name, value in values.items()
    }


def _iter_draws(scored: Scored, resamples: int, seed: int) -> Iterator[FloatArray]:
    """Yield how often each row is drawn, (R, B), some resamples at a time."""
    truth_B = scored.truth
    if resamples * len(truth_B) > _KEPT_CELLS:
        return _draw_counts(truth_B, resamples, seed)
    kept = _cache_draws(truth_B.tobytes(), truth_B.dtype.str, resamples, seed)
    return (counts_RB.astype(np.float64) for counts_RB in kept)


@lru_cache(maxsize=1)
def _cache_draws(truth: bytes, kind: str, resamples: int, seed: int) -> list[NDArray[np.uint16]]:
    """Report and summary of a run measure several things on the same draws of the same rows."""
    drawn = _draw_counts(np.frombuffer(truth, kind), resamples, seed)
    return [counts_RB.astype(np.uint16) for counts_RB in drawn]


def _draw_counts(truth_B: NDArray[Any], resamples: int, seed: int) -> Iterator[FloatArray]:
    groups = _group_rows(truth_B)
    rows = len(truth_B)
    rngs = np.random.default_rng(seed).spawn(len(groups))  # so that blocks change nothing
    block = max(_LEAST, _CELLS // max(rows, 1))
    for first in range(0, resamples, block):
        some = min(block, resamples - first)
        counts_RB = np.empty((some, rows))
        for rng, group in zip(rngs, groups, strict=True):
            drawn = rng.multinomial(len(group), np.full(len(group), 1 / len(group)), size=some)
            counts_RB[:, group] = drawn
        yield counts_RB


def _group_rows(truth_B: NDArray[Any]) -> list[NDArray[np.int64]]:
    if np.issubdtype(truth_B.dtype, np.floating):
        return [np.arange(len(truth_B))]
    return [np.flatnonzero(truth_B == label) for label in np.unique(truth_B)]


def _compute_interval(
    value: float, drawn: list[FloatArray], *, mirrored: bool
) -> tuple[float, float]:
    if not drawn:
        return math.nan, math.nan
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(np.concatenate(drawn), [tail, 1 - tail])
    if mirrored:
        low, high = max(0.0, min(value, 2 * value - high)), min(1.0, max(value, 2 * value - low))
    return float(low), float(high)


@dataclass(frozen=True, eq=False)
class _Curve:
    """The true and false alarms (T, R) by threshold, from the strictest on.

    Resamples come last: sums over thresholds then add whole rows.
    """

    true: FloatArray
    false: FloatArray

    @cached_property
    def shares(self) -> tuple[FloatArray, FloatArray]:
        """The shares of all rows of the class, and of all others; from none on, (T + 1, R)."""
        return _compute_shares(self.true), _compute_shares(self.false)


def _compute_shares(alarms_TR: FloatArray) -> FloatArray:
    share_TR = np.zeros((1 + len(alarms_TR), alarms_TR.shape[1]))
    np.divide(alarms_TR, alarms_TR[-1], out=share_TR[1:])
    return share_TR


@dataclass(frozen=True, eq=False)
class Resamples:
    """A set of resamples of scored rows, each with as many rows of every class as there are.

    Attributes:
        counts: (R, B), how often each row is in each.
    """

    scored: Scored
    counts: FloatArray

    def compute_means(self, values_B: FloatArray) -> FloatArray:
        found: FloatArray = self.counts @ values_B / self.counts.sum(axis=1)
        return found

    @cached_property
    def decisions(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """The counts by class, (R, K): rows of it, rows given to it, and those that are both."""
        eye = np.eye(self.scored.classes)
        true_BK = eye[self.scored.truth]
        given_BK = eye[self.scored.class_predictions]
        return self.counts @ true_BK, self.counts @ given_BK, self.counts @ (true_BK * given_BK)

    @cached_property
    def curves(self) -> tuple[_Curve, ...]:
        """The curves of each class in question; a class that has no row, or all, has none."""
        return tuple(self._iter_curves())

    def _iter_curves(self) -> Iterator[_Curve]:
        scores = self.scored.scores
        truth_B = self.scored.truth
        counts_BR = np.ascontiguousarray(self.counts.T)
        ranked = {1: scores} if scores.ndim == 1 else dict(enumerate(scores.T))
        for label in ranked if len(ranked) > 2 else (1,):
            if 0 < (truth_B == label).sum() < len(truth_B):
                order_B = np.argsort(-ranked[label], kind="stable")
                ends_T = np.flatnonzero(np.diff(ranked[label][order_B], append=-np.inf))
                of_it_B = (truth_B == label)[order_B]
                drawn_BR = counts_BR[order_B]
                all_TR = drawn_BR.cumsum(axis=0)[ends_T]
                true_TR = (drawn_BR * of_it_B[:, None]).cumsum(axis=0)[ends_T]
                yield _Curve(true_TR, all_TR - true_TR)

    @cached_property
    def auc(self) -> FloatArray:
        areas = [np.trapezoid(*curve.shares, axis=0) for curve in self.curves]
        return np.asarray(np.mean(areas, axis=0))


def _compute_ks(drawn: Resamples) -> FloatArray:
    gaps = []
    for curve in drawn.curves:
        true_TR, false_TR = curve.shares
        gaps.append((true_TR - false_TR).max(axis=0))
    return np.asarray(np.mean(gaps, axis=0))


def _compute_average_precision(drawn: Resamples) -> FloatArray:
    found = []
    for curve in drawn.curves:
        alarms_TR = curve.true + curve.false
        precision_TR = curve.true / np.maximum(alarms_TR, 1)
        found.append((np.diff(curve.shares[0], axis=0) * precision_TR).sum(axis=0))
    return np.asarray(np.mean(found, axis=0))


def _compute_accuracy(drawn: Resamples) -> FloatArray:
    return drawn.compute_means(
        (drawn.scored.class_predictions == drawn.scored.truth).astype(np.float64)
    )


def _compute_balanced_accuracy(drawn: Resamples) -> FloatArray:
    true_RK, _, both_RK = drawn.decisions
    present_K = true_RK[0] > 0
    recalls: FloatArray = (both_RK[:, present_K] / true_RK[:, present_K]).mean(axis=1)
    return recalls


def _compute_f1(drawn: Resamples) -> FloatArray:
    true_RK, given_RK, both_RK = drawn.decisions
    total_RK = true_RK + given_RK
    f1_RK = 2 * both_RK / np.maximum(total_RK, 1)
    if drawn.scored.classes == 2:
        return f1_RK[:, 1]
    return np.average(f1_RK, axis=1, weights=total_RK > 0)


def _compute_brier(drawn: Resamples) -> FloatArray:
    scored = drawn.scored
    errors_B = ((scored.scores - np.eye(scored.classes)[scored.truth]) ** 2).sum(axis=1)
    return drawn.compute_means(errors_B / 2 if scored.classes == 2 else errors_B)


def _compute_log_loss(drawn: Resamples) -> FloatArray:
    scored = drawn.scored
    least = np.finfo(np.float64).eps
    said_B = scored.scores[np.arange(len(scored.truth)), scored.truth]
    return drawn.compute_means(-np.log(np.clip(said_B, least, 1 - least)))


def _compute_r2(drawn: Resamples) -> FloatArray:
    truth_B = drawn.scored.truth - drawn.scored.truth.mean()  # large means lose no digits
    left_R = drawn.compute_means((drawn.scored.truth - drawn.scored.scores) ** 2)
    all_R = drawn.compute_means(truth_B**2) - drawn.compute_means(truth_B) ** 2
    # Their variance may be but rounding where they are all alike.
    least_R = np.where(drawn.counts > 0, drawn.scored.truth, math.inf).min(axis=1)
    differ_R = least_R < np.where(drawn.counts > 0, drawn.scored.truth, -math.inf).max(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        # of rows that are all alike it is 1 where all are told, else 0, as scikit-learn says
        return np.where(differ_R, 1 - left_R / all_R, (left_R == 0).astype(np.float64))


REDRAWN: Mapping[str, Callable[[Resamples], FloatArray]] = MappingProxyType(
    {
        "accuracy": _compute_accuracy,
        "auc": lambda drawn: drawn.auc,
        "average_precision": _compute_average_precision,
        "ks": _compute_ks,
        "gini": lambda drawn: 2 * drawn.auc - 1,
        "balanced_accuracy": _compute_balanced_accuracy,
        "f1": _compute_f1,
        "brier": _compute_brier,
        "log_loss": _compute_log_loss,
        "r2": _compute_r2,
        "mae": lambda drawn: drawn.compute_means(np.abs(drawn.scored.truth - drawn.scored.scores)),
        "rmse": lambda drawn: np.sqrt(
            drawn.compute_means((drawn.scored.truth - drawn.scored.scores) ** 2)
        ),
    }
)
"""By the name of the measure, its value (R,) in each resample."""

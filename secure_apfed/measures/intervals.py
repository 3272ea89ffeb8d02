"""Confidence intervals of measures, by resampling of the test rows.

They cover the variation over draws of test rows; not the spread over seeds, and not the variation
over draws of training rows. Measures of many resamples are computed at once, from how often each
row was drawn: intervals need hundreds of resamples, and scikit-learn measures one at a time. Tests
check that each equals its measure in the table.

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

from secure_apfed.measures.table import FloatArray, Measure, Scored, measure_all

RESAMPLES = 500
MIN_ROWS = 20
"""Rows of each class, below which resamples alone vary too little."""
MIN_POSITIVES = 30
"""Rows of a rare class, below which its figures carry a warning."""
# Cells of one block of resamples, so that a block stays in the cache.
_CELLS = 50_000
_LEAST = 8
# Cells of all cached resamples, in 16 bits each.
_KEPT_CELLS = 2**24
_CONFIDENCE = 0.95
# A largest difference is biased upwards by sampling: rows against all people, and resamples against
# the rows. Mirroring the interval at the value removes that bias.
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
    share of each class. Measures of one resample are of the same rows. If a class has fewer rows
    than `MIN_ROWS`, intervals also contain the measure with one more row of the rarest class,
    predicted like the worst and like the best of all rows.
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
    on_all_rows = redrawn(Resamples(scored, np.ones((1, rows))))
    influences = []
    with np.errstate(divide="ignore", invalid="ignore"):
        for first in range(0, rows, block):
            counts_RB = np.ones((min(block, rows - first), rows))
            counts_RB[np.arange(len(counts_RB)), first + np.arange(len(counts_RB))] = 0
            influences.append((rows - 1) * (on_all_rows - redrawn(Resamples(scored, counts_RB))))
    return np.concatenate([np.empty(0), *influences])


def proportion_interval(of_it: int, rows: int) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson 1927), valid even for few or no rows.

    `of_it`: the number of rows that count, of `rows` in all.
    """
    interval = scipy.stats.binomtest(of_it, rows).proportion_ci(_CONFIDENCE, method="wilson")
    return float(interval.low), float(interval.high)


def gain_between(
    model: Scored, reference: Scored, measure: Measure, *, resamples: int = RESAMPLES, seed: int = 0
) -> Estimate | None:
    """Return how much better one model is than another on the same rows, with a 95 % interval.

    The interval is over rows and paired: both models are measured on each draw of the rows, so that
    rows hard for both cancel. None if they were tested on other rows, or the measure is not defined
    there.

    `resamples`: R, how many bootstrap samples.
    """
    if not np.array_equal(model.truth, reference.truth):
        return None
    values = [measure_all(scored).get(measure.name, math.nan) for scored in (model, reference)]
    if any(map(math.isnan, values)):
        return None
    redrawn = REDRAWN[measure.name]
    sign = 1 if measure.higher_is_better else -1
    gains_R = [
        sign * (redrawn(Resamples(model, counts_RB)) - redrawn(Resamples(reference, counts_RB)))
        for counts_RB in _iter_draws(model, resamples if len(model.truth) > 1 else 0, seed)
    ]
    return Estimate(measure.compute_gain(*values), *_compute_interval(0.0, gains_R, mirrored=False))


def _add_rare_row(scored: Scored) -> Iterator[Scored]:
    """Yield the same rows with one more of a rare class: predicted worst, then predicted best.

    Only where a class has few rows: the interval of few rows that are all predicted correctly would
    otherwise have no width.
    """
    if np.issubdtype(scored.truth.dtype, np.floating):
        return
    classes, counts = np.unique(scored.truth, return_counts=True)
    if not len(counts) or counts.min() >= MIN_ROWS or not scored.is_finite:
        return
    rarest = classes[counts.argmin()]
    class_scores_B = scored.scores[:, rarest]
    for place in (class_scores_B.argmin(), class_scores_B.argmax()):
        extended = scored.select_rows(np.append(np.arange(len(scored.truth)), place))
        extended.truth[-1] = rarest
        yield extended


def _compute_intervals(
    scored: Scored, values: Mapping[str, float], resamples: int, seed: int
) -> dict[str, tuple[float, float]]:
    """Return, by measure, its interval over resamples of these rows; NaN ends for a single row."""
    resampled: dict[str, list[FloatArray]] = {name: [] for name in values}
    for counts_RB in _iter_draws(scored, resamples if len(scored.truth) > 1 else 0, seed):
        redrawn = Resamples(scored, counts_RB)
        for name, arrays in resampled.items():
            arrays.append(REDRAWN[name](redrawn))
    return {
        name: _compute_interval(value, resampled[name], mirrored=name in _MIRRORED)
        for name, value in values.items()
    }


def _iter_draws(scored: Scored, resamples: int, seed: int) -> Iterator[FloatArray]:
    """Yield how often each row is drawn, (R, B), in blocks of resamples."""
    truth_B = scored.truth
    if resamples * len(truth_B) > _KEPT_CELLS:
        return _draw_counts(truth_B, resamples, seed)
    draws = _cache_draws(truth_B.tobytes(), truth_B.dtype.str, resamples, seed)
    return (counts_RB.astype(np.float64) for counts_RB in draws)


@lru_cache(maxsize=1)
def _cache_draws(truth: bytes, kind: str, resamples: int, seed: int) -> list[NDArray[np.uint16]]:
    """Return the draws for these rows, cached: a run's report and summary use the same ones."""
    draws = _draw_counts(np.frombuffer(truth, kind), resamples, seed)
    return [counts_RB.astype(np.uint16) for counts_RB in draws]


def _draw_counts(truth_B: NDArray[Any], resamples: int, seed: int) -> Iterator[FloatArray]:
    """Yield multinomial counts (R, B) by class, so that every class keeps its number of rows.

    `truth_B`: class of each row. `resamples`: R, how many bootstrap samples.
    """
    groups = _group_rows(truth_B)
    rows = len(truth_B)
    rngs = np.random.default_rng(seed).spawn(len(groups))  # so that blocks change nothing
    block = max(_LEAST, _CELLS // max(rows, 1))
    for first in range(0, resamples, block):
        count = min(block, resamples - first)
        counts_RB = np.empty((count, rows))
        for rng, group in zip(rngs, groups, strict=True):
            drawn_counts = rng.multinomial(
                len(group), np.full(len(group), 1 / len(group)), size=count
            )
            counts_RB[:, group] = drawn_counts
        yield counts_RB


def _group_rows(truth_B: NDArray[Any]) -> list[NDArray[np.int64]]:
    """Return the rows of each class; for numeric labels all rows as one group."""
    if np.issubdtype(truth_B.dtype, np.floating):
        return [np.arange(len(truth_B))]
    return [np.flatnonzero(truth_B == label) for label in np.unique(truth_B)]


def _compute_interval(
    value: float, resampled: list[FloatArray], *, mirrored: bool
) -> tuple[float, float]:
    """Return the interval from resampled values: by percentiles, or mirrored at the value."""
    if not resampled:
        return math.nan, math.nan
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(np.concatenate(resampled), [tail, 1 - tail])
    if not mirrored:
        return float(low), float(high)
    mirrored_low = max(0.0, min(value, 2 * value - high))
    mirrored_high = min(1.0, max(value, 2 * value - low))
    return float(mirrored_low), float(mirrored_high)


@dataclass(frozen=True, eq=False)
class _Curve:
    """The true and false alarms (T, R) by threshold, from the strictest on.

    Resamples come last: sums over thresholds then add whole rows.
    """

    true: FloatArray
    false: FloatArray

    @cached_property
    def shares(self) -> tuple[FloatArray, FloatArray]:
        """The true and false positive rates by threshold, from none on, (T + 1, R) each."""
        return _compute_shares(self.true), _compute_shares(self.false)


def _compute_shares(alarms_TR: FloatArray) -> FloatArray:
    """Return cumulated counts (T, R) as shares of the total, with a first row of zeros."""
    share_TR = np.zeros((1 + len(alarms_TR), alarms_TR.shape[1]))
    np.divide(alarms_TR, alarms_TR[-1], out=share_TR[1:])
    return share_TR


@dataclass(frozen=True, eq=False)
class Resamples:
    """A set of resamples of scored rows, each with as many rows of every class as there are.

    Attributes:
        counts: (R, B), how often each resample has each row.
    """

    scored: Scored
    counts: FloatArray

    def compute_means(self, values_B: FloatArray) -> FloatArray:
        means: FloatArray = self.counts @ values_B / self.counts.sum(axis=1)
        return means

    @cached_property
    def decisions(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """The counts by class, (R, K): rows of it, rows predicted as it, and rows that are both."""
        eye = np.eye(self.scored.classes)
        true_BK = eye[self.scored.truth]
        predicted_BK = eye[self.scored.class_predictions]
        return (
            self.counts @ true_BK,
            self.counts @ predicted_BK,
            self.counts @ (true_BK * predicted_BK),
        )

    @cached_property
    def curves(self) -> tuple[_Curve, ...]:
        """The ROC counts of each class in question; a class with no row, or all rows, has none."""
        return tuple(self._iter_curves())

    def _iter_curves(self) -> Iterator[_Curve]:
        """Yield each class's true and false alarms by threshold; equal scores share a threshold."""
        scores = self.scored.scores
        truth_B = self.scored.truth
        counts_BR = np.ascontiguousarray(self.counts.T)
        ranked = {1: scores} if scores.ndim == 1 else dict(enumerate(scores.T))
        for label in ranked if len(ranked) > 2 else (1,):
            if 0 < (truth_B == label).sum() < len(truth_B):
                order_B = np.argsort(-ranked[label], kind="stable")
                ends_T = np.flatnonzero(np.diff(ranked[label][order_B], append=-np.inf))
                is_label_B = (truth_B == label)[order_B]
                ranked_counts_BR = counts_BR[order_B]
                all_TR = ranked_counts_BR.cumsum(axis=0)[ends_T]
                true_TR = (ranked_counts_BR * is_label_B[:, None]).cumsum(axis=0)[ends_T]
                yield _Curve(true_TR, all_TR - true_TR)

    @cached_property
    def auc(self) -> FloatArray:
        areas = [np.trapezoid(*curve.shares, axis=0) for curve in self.curves]
        return np.asarray(np.mean(areas, axis=0))


def _compute_ks(resamples: Resamples) -> FloatArray:
    """Return the Kolmogorov-Smirnov distance of each resample, (R,), mean over classes."""
    gaps = []
    for curve in resamples.curves:
        true_TR, false_TR = curve.shares
        gaps.append((true_TR - false_TR).max(axis=0))
    return np.asarray(np.mean(gaps, axis=0))


def _compute_average_precision(resamples: Resamples) -> FloatArray:
    """Return the average precision of each resample, (R,), mean over classes."""
    precisions = []
    for curve in resamples.curves:
        alarms_TR = curve.true + curve.false
        precision_TR = curve.true / np.maximum(alarms_TR, 1)
        precisions.append((np.diff(curve.shares[0], axis=0) * precision_TR).sum(axis=0))
    return np.asarray(np.mean(precisions, axis=0))


def _compute_accuracy(resamples: Resamples) -> FloatArray:
    """Return the accuracy of each resample, (R,)."""
    return resamples.compute_means(
        (resamples.scored.class_predictions == resamples.scored.truth).astype(np.float64)
    )


def _compute_balanced_accuracy(resamples: Resamples) -> FloatArray:
    """Return the mean recall over classes of each resample, (R,)."""
    true_RK, _, both_RK = resamples.decisions
    present_K = true_RK[0] > 0
    recalls: FloatArray = (both_RK[:, present_K] / true_RK[:, present_K]).mean(axis=1)
    return recalls


def _compute_f1(resamples: Resamples) -> FloatArray:
    """Return F1 of each resample, (R,): of class 1 of two classes, else the mean over classes."""
    true_RK, predicted_RK, both_RK = resamples.decisions
    total_RK = true_RK + predicted_RK
    f1_RK = 2 * both_RK / np.maximum(total_RK, 1)
    if resamples.scored.classes == 2:
        return f1_RK[:, 1]
    return np.average(f1_RK, axis=1, weights=total_RK > 0)


def _compute_brier(resamples: Resamples) -> FloatArray:
    """Return the Brier score of each resample, (R,); halved for two classes, as is usual."""
    scored = resamples.scored
    errors_B = ((scored.scores - np.eye(scored.classes)[scored.truth]) ** 2).sum(axis=1)
    return resamples.compute_means(errors_B / 2 if scored.classes == 2 else errors_B)


def _compute_log_loss(resamples: Resamples) -> FloatArray:
    """Return the mean negative log probability of the true class of each resample, (R,)."""
    scored = resamples.scored
    smallest_share = np.finfo(np.float64).eps
    shares_B = scored.scores[np.arange(len(scored.truth)), scored.truth]
    return resamples.compute_means(-np.log(np.clip(shares_B, smallest_share, 1 - smallest_share)))


def _compute_r2(resamples: Resamples) -> FloatArray:
    """Return R2 of each resample, (R,); where all its targets are equal, 1 if exact, else 0."""
    truth_B = resamples.scored.truth - resamples.scored.truth.mean()  # large means lose no digits
    error_R = resamples.compute_means((resamples.scored.truth - resamples.scored.scores) ** 2)
    all_R = resamples.compute_means(truth_B**2) - resamples.compute_means(truth_B) ** 2
    # If all are equal, their variance may still be a rounding error.
    least_R = np.where(resamples.counts > 0, resamples.scored.truth, math.inf).min(axis=1)
    differ_R = least_R < np.where(resamples.counts > 0, resamples.scored.truth, -math.inf).max(
        axis=1
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        # If all rows are equal, it is 1 for exact predictions, else 0, as in scikit-learn.
        return np.where(differ_R, 1 - error_R / all_R, (error_R == 0).astype(np.float64))


def _compute_poisson_deviance(resamples: Resamples) -> FloatArray:
    """Return the mean Poisson deviance of each resample, (R,); NaN where a prediction is not
    positive.
    """
    truth_B = resamples.scored.truth
    scores_B = resamples.scored.scores
    with np.errstate(divide="ignore", invalid="ignore"):
        logs_B = np.where(truth_B > 0, truth_B * np.log(truth_B / scores_B), 0.0)
        deviance_B = np.where(scores_B > 0, 2 * (logs_B - truth_B + scores_B), math.nan)
        return resamples.compute_means(deviance_B)


REDRAWN: Mapping[str, Callable[[Resamples], FloatArray]] = MappingProxyType(
    {
        "accuracy": _compute_accuracy,
        "auc": lambda resamples: resamples.auc,
        "average_precision": _compute_average_precision,
        "ks": _compute_ks,
        "gini": lambda resamples: 2 * resamples.auc - 1,
        "balanced_accuracy": _compute_balanced_accuracy,
        "f1": _compute_f1,
        "brier": _compute_brier,
        "log_loss": _compute_log_loss,
        "r2": _compute_r2,
        "mae": lambda resamples: resamples.compute_means(
            np.abs(resamples.scored.truth - resamples.scored.scores)
        ),
        "rmse": lambda resamples: np.sqrt(
            resamples.compute_means((resamples.scored.truth - resamples.scored.scores) ** 2)
        ),
        "poisson_deviance": _compute_poisson_deviance,
    }
)
"""Functions that compute a measure's value in each resample, (R,), by the measure's name."""

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

from secure_apfed.measures.table import MEASURES, FloatArray, Measure, Scored, measure_all

RESAMPLES = 500
MIN_ROWS = 20
"""Rows of each class, below which resamples alone vary too little."""
MIN_POSITIVES = 30
"""Number of rows of a rare class below which its measures carry a warning."""
# Counts in one block of resamples, so that a block stays in the processor's cache; resamples of a
# block at least.
_BLOCK_CELLS = 50_000
_MIN_BLOCK = 8
# Counts in one block at most, whatever its minimum: of millions of rows it is a single resample.
_MAX_BLOCK_CELLS = 4_000_000
# From so many rows on measures are normal to all digits shown, so a few resamples are enough: they
# give the standard error (7 % off, itself), and the interval is 1.96 of it to either side.
_MANY_ROWS = 200_000
_FEW_RESAMPLES = 100
# Counts of resamples that are cached at most, in 16 bits each.
_CACHED_CELLS = 2**24
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
    Of `_MANY_ROWS` and more rows the intervals are normal ones, by fewer resamples.

    Rows are drawn class by class, so that a rare class is in every resample: intervals are for this
    share of each class. All measures of one resample use the same rows. If a class has fewer rows
    than `MIN_ROWS`, intervals are widened to those with one more row of the rarest class, predicted
    like the worst and like the best of all rows.
    """
    values = measure_all(scored)
    intervals = [
        _compute_intervals(sample, values, resamples, seed)
        for sample in (scored, *_add_rare_row(scored))
    ]
    estimates = {}
    for name, value in values.items():
        low = min(interval[name][0] for interval in intervals)
        high = max(interval[name][1] for interval in intervals)
        estimates[name] = Estimate(value, low, high)
    return estimates


def compute_influence(scored: Scored, measure: Measure) -> FloatArray:
    """Return how much each row (B,) moves the measure: jackknife values, whose mean is about 0.

    A value is (B - 1) times the fall of the measure if the row is left out. For accuracy this is
    whether the row is predicted correctly, less the accuracy. NaN if the other rows do not define
    the measure.
    """
    rows = len(scored.truth)
    measure_resamples = REDRAWN[measure.name]
    block = _choose_block(rows)
    value = measure_resamples(Resamples(scored, np.ones((1, rows))))
    influences = []
    with np.errstate(divide="ignore", invalid="ignore"):
        for start in range(0, rows, block):
            # Resample r of the block has every row once but row start + r.
            counts_RB = np.ones((min(block, rows - start), rows))
            in_block = np.arange(len(counts_RB))
            counts_RB[in_block, start + in_block] = 0
            value_without_R = measure_resamples(Resamples(scored, counts_RB))
            influences.append((rows - 1) * (value - value_without_R))
    return np.concatenate([np.empty(0), *influences])


def proportion_interval(successes: int, rows: int) -> tuple[float, float]:
    """Return the 95 % interval of the share successes / rows (Wilson 1927), valid even for few or
    no rows.
    """
    interval = scipy.stats.binomtest(successes, rows).proportion_ci(_CONFIDENCE, method="wilson")
    return float(interval.low), float(interval.high)


def gain_between(
    model: Scored, reference: Scored, measure: Measure, *, resamples: int = RESAMPLES, seed: int = 0
) -> Estimate | None:
    """Return how much better one model is than another on the same rows, with a 95 % interval.

    The interval is over rows and paired: both models are measured on the same bootstrap resamples,
    so that rows which are hard for both cancel. None if they were tested on different rows, or the
    measure is undefined there.

    `model`, `reference`: predictions of the two models for the same rows. `resamples`: R, number of
    resamples.
    """
    if not np.array_equal(model.truth, reference.truth):
        return None
    values = [measure_all(scored).get(measure.name, math.nan) for scored in (model, reference)]
    if any(map(math.isnan, values)):
        return None
    measure_resamples = REDRAWN[measure.name]
    sign = 1 if measure.higher_is_better else -1
    gains: list[FloatArray] = []  # (R,) of each block
    rows = len(model.truth)
    for counts_RB in _iter_draws(model, _choose_resamples(rows, resamples), seed):
        model_R = measure_resamples(Resamples(model, counts_RB))
        reference_R = measure_resamples(Resamples(reference, counts_RB))
        gains.append(sign * (model_R - reference_R))
    gain = measure.compute_gain(*values)
    low, high = _compute_interval(gain, gains, rows=rows, mirrored=False)
    return Estimate(gain, low, high)


def _add_rare_row(scored: Scored) -> Iterator[Scored]:
    """Yield the same rows with one more of the rarest class: predicted worst, then predicted best.

    Nothing is yielded unless a class has fewer than `MIN_ROWS` rows: the interval of few rows that
    are all predicted correctly would otherwise have no width.
    """
    if np.issubdtype(scored.truth.dtype, np.floating):
        return
    classes, counts = np.unique(scored.truth, return_counts=True)
    if not len(counts) or counts.min() >= MIN_ROWS or not scored.is_finite:
        return
    rarest = classes[counts.argmin()]
    class_scores_B = scored.scores[:, rarest]
    for row in (class_scores_B.argmin(), class_scores_B.argmax()):
        extended = scored.select_rows(np.append(np.arange(len(scored.truth)), row))
        extended.truth[-1] = rarest
        yield extended


def _compute_intervals(
    scored: Scored, values: Mapping[str, float], resamples: int, seed: int
) -> dict[str, tuple[float, float]]:
    """Return, for each measure's name, the interval of its value over resamples of these rows; NaN
    ends for a single row.

    `values`: mapping from measure name to its value on the rows themselves. `resamples`: number of
    resamples.
    """
    resampled: dict[str, list[FloatArray]] = {name: [] for name in values}
    rows = len(scored.truth)
    for counts_RB in _iter_draws(scored, _choose_resamples(rows, resamples), seed):
        block = Resamples(scored, counts_RB)
        for name, arrays in resampled.items():
            arrays.append(REDRAWN[name](block))
    intervals = {}
    for name, value in values.items():
        ends = _compute_interval(value, resampled[name], rows=rows, mirrored=name in _MIRRORED)
        measure = MEASURES[name]
        intervals[name] = (max(ends[0], measure.least), min(ends[1], measure.most))
    return intervals


def _iter_draws(scored: Scored, resamples: int, seed: int) -> Iterator[FloatArray]:
    """Yield how often each resample has each row, (R, B), in blocks of resamples."""
    truth_B = scored.truth
    if resamples * len(truth_B) > _CACHED_CELLS:
        return _draw_counts(truth_B, resamples, seed)
    draws = _cache_draws(truth_B.tobytes(), truth_B.dtype.str, resamples, seed)
    return (counts_RB.astype(np.float64) for counts_RB in draws)


@lru_cache(maxsize=1)
def _cache_draws(truth: bytes, dtype: str, resamples: int, seed: int) -> list[NDArray[np.uint16]]:
    """Return the blocks of `_draw_counts`, cached: a run's report and summary use the same ones.

    `truth`, `dtype`: the rows' truth as bytes, which can be a cache's key.
    """
    draws = _draw_counts(np.frombuffer(truth, dtype), resamples, seed)
    return [counts_RB.astype(np.uint16) for counts_RB in draws]


def _draw_counts(truth_B: NDArray[Any], resamples: int, seed: int) -> Iterator[FloatArray]:
    """Yield how often each resample has each row, (R, B), in blocks of resamples.

    Rows are drawn with replacement within each class, so that a class keeps its number of rows.

    `truth_B`: class of each row, or numeric targets. `resamples`: number of resamples.
    """
    groups = _group_rows(truth_B)
    rows = len(truth_B)
    # A generator for each class, so that draws do not depend on the size of blocks.
    generators = np.random.default_rng(seed).spawn(len(groups))
    block = _choose_block(rows)
    for start in range(0, resamples, block):
        count = min(block, resamples - start)
        counts_RB = np.empty((count, rows))
        for generator, group in zip(generators, groups, strict=True):
            probabilities = np.full(len(group), 1 / len(group))
            counts_RB[:, group] = generator.multinomial(len(group), probabilities, size=count)
        yield counts_RB


def _choose_resamples(rows: int, resamples: int) -> int:
    """Return how many resamples of this number of rows to draw: none of a single row, a few of very
    many.

    `resamples`: the number that was asked for.
    """
    if rows < 2:
        return 0
    return resamples if rows < _MANY_ROWS else min(resamples, _FEW_RESAMPLES)


def _choose_block(rows: int) -> int:
    """Return how many resamples of this number of rows are measured at once."""
    rows = max(rows, 1)
    at_most = max(1, _MAX_BLOCK_CELLS // rows)
    return min(at_most, max(_MIN_BLOCK, _BLOCK_CELLS // rows))


def _group_rows(truth_B: NDArray[Any]) -> list[NDArray[np.int64]]:
    """Return the rows of each class; for numeric labels all rows as one group."""
    if np.issubdtype(truth_B.dtype, np.floating):
        return [np.arange(len(truth_B))]
    return [np.flatnonzero(truth_B == label) for label in np.unique(truth_B)]


def _compute_interval(
    value: float, resampled: list[FloatArray], *, rows: int, mirrored: bool
) -> tuple[float, float]:
    """Return the 95 % interval from resampled values (blocks of (R,)): by percentiles or, if
    `mirrored`, these reflected at the value within 0 to 1; NaN ends without values.

    Of many rows it is the normal one: the value, and 1.96 standard deviations to either side.

    `value`: the measure's value on the rows themselves. `rows`: number of rows.
    """
    if not resampled:
        return math.nan, math.nan
    tail = (1 - _CONFIDENCE) / 2
    if rows >= _MANY_ROWS:
        width = scipy.stats.norm.ppf(1 - tail) * np.std(np.concatenate(resampled), ddof=1)
        return float(value - width), float(value + width)
    low, high = np.quantile(np.concatenate(resampled), [tail, 1 - tail])
    if not mirrored:
        return float(low), float(high)
    mirrored_low = max(0.0, min(value, 2 * value - high))
    mirrored_high = min(1.0, max(value, 2 * value - low))
    return float(mirrored_low), float(mirrored_high)


@dataclass(frozen=True, eq=False)
class _Curve:
    """The numbers of true and false positives (T, R) by threshold, from the strictest on.

    Resamples are the last axis: sums over thresholds then add contiguous rows.
    """

    true: FloatArray
    false: FloatArray

    @cached_property
    def shares(self) -> tuple[FloatArray, FloatArray]:
        """The true and false positive rates by threshold, from none on, (T + 1, R) each."""
        return _compute_shares(self.true), _compute_shares(self.false)


def _compute_shares(cumulated_TR: FloatArray) -> FloatArray:
    """Return cumulated counts (T, R) as shares of the last one, after a row of zeros,
    (T + 1, R).
    """
    share_TR = np.zeros((1 + len(cumulated_TR), cumulated_TR.shape[1]))
    np.divide(cumulated_TR, cumulated_TR[-1], out=share_TR[1:])
    return share_TR


@dataclass(frozen=True, eq=False)
class Resamples:
    """A set of R resamples of scored rows.

    Attributes:
        scored: the rows.
        counts: (R, B), how often each resample has each row.
    """

    scored: Scored
    counts: FloatArray

    def compute_means(self, values_B: FloatArray) -> FloatArray:
        """Return the mean of the rows' values in each resample, (R,)."""
        means_R: FloatArray = self.counts @ values_B / self.counts.sum(axis=1)
        return means_R

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
        """The ROC curves of the second of two classes, or of each of more classes; a class with no
        row, or all rows, has none.
        """
        return tuple(self._iter_curves())

    def _iter_curves(self) -> Iterator[_Curve]:
        """Yield the ROC curves; rows with equal scores share a threshold."""
        scores = self.scored.scores
        truth_B = self.scored.truth
        counts_BR = np.ascontiguousarray(self.counts.T)
        scores_by_class = {1: scores} if scores.ndim == 1 else dict(enumerate(scores.T))
        for label in scores_by_class if len(scores_by_class) > 2 else (1,):
            if 0 < (truth_B == label).sum() < len(truth_B):
                class_scores_B = scores_by_class[label]
                order_B = np.argsort(-class_scores_B, kind="stable")
                # The last row of each run of equal scores.
                ends_T = np.flatnonzero(np.diff(class_scores_B[order_B], append=-np.inf))
                is_label_B = (truth_B == label)[order_B]
                ranked_counts_BR = counts_BR[order_B]
                all_TR = ranked_counts_BR.cumsum(axis=0)[ends_T]
                true_TR = (ranked_counts_BR * is_label_B[:, None]).cumsum(axis=0)[ends_T]
                yield _Curve(true_TR, all_TR - true_TR)

    @cached_property
    def auc(self) -> FloatArray:
        """The area under the ROC curve of each resample, (R,), mean over classes."""
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
        predicted_TR = curve.true + curve.false
        precision_TR = curve.true / np.maximum(predicted_TR, 1)
        true_share_TR, _ = curve.shares
        precisions.append((np.diff(true_share_TR, axis=0) * precision_TR).sum(axis=0))
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

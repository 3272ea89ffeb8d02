"""Confidence intervals of measures, by resampling of the test rows.

They cover the variation over draws of test rows. They cover neither the variation over seeds, nor
over draws of training rows. Measures of many resamples are computed at once, from how often each
row was drawn: intervals need hundreds of resamples, and scikit-learn measures one at a time. Tests
check that each function here equals its measure in the table.

Letters: B rows, R resamples, K classes, T distinct scores, each of which is a threshold.
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
# A block is some resamples that are measured together. Its counts (one for each resample and row)
# should stay in the processor's cache.
_BLOCK_CELLS = 50_000  # counts of a block
_MIN_BLOCK = 8  # resamples of a block, even if it has more counts
_MAX_BLOCK_CELLS = 4_000_000  # counts of a block, even if it has fewer resamples then
# From this number of rows on, measures are normally distributed to all digits shown. So a few
# resamples are enough to estimate the standard error (to about 7 %), and the interval is 1.96
# standard errors to either side.
_MANY_ROWS = 200_000
_FEW_RESAMPLES = 100
_CACHED_CELLS = 2**24  # largest number of counts that are cached, in 16 bits each
_CONFIDENCE = 0.95
# KS is a largest difference, and so is biased upwards by sampling: in the rows against all people,
# and in the resamples against the rows. Mirroring the interval at the value removes that bias.
_MIRRORED = ("ks",)


@dataclass(frozen=True)
class Estimate:
    """A measure of test rows with its 95 % interval over these rows.

    Attributes:
        value: the measure.
        low, high: ends of the interval; NaN: undefined.
    """

    value: float
    low: float = math.nan
    high: float = math.nan


def estimate_measures(
    scored: Scored, *, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Estimate]:
    """Return all measures that these rows define, with bootstrap intervals, by name.

    Intervals are percentiles of resamples; the interval of KS is mirrored at its value. For
    `_MANY_ROWS` and more rows the intervals are normal ones, from fewer resamples.

    Rows are drawn class by class, so that a rare class is in every resample: intervals hold for
    these shares of classes. All measures of one resample use the same rows. If a class has fewer
    rows than `MIN_ROWS`, intervals are widened: they also cover the intervals with one more row of
    the rarest class, predicted as badly or as well as any row.

    Args:
        scored: predictions for test rows.
        resamples: number of resamples, R.
        seed: seed of the resamples.
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
    """Return each row's influence on a measure, (B,): jackknife values, whose mean is about 0.

    A row's value is (B - 1) times the fall of the measure if the row is left out. It is NaN if the
    other rows do not define the measure. An example is accuracy: the value is 1 or 0, as the row is
    predicted correctly or not, minus the accuracy.
    """
    rows = len(scored.truth)
    measure_resamples = RESAMPLED_MEASURES[measure.name]
    block_size = _choose_block(rows)
    # The measure of the rows themselves: of one resample that has each row once.
    value = measure_resamples(Resamples(scored, np.ones((1, rows))))
    influences = []
    with np.errstate(divide="ignore", invalid="ignore"):
        for start in range(0, rows, block_size):
            # Resample r of the block has every row once, except row start + r.
            counts_RB = np.ones((min(block_size, rows - start), rows))
            in_block = np.arange(len(counts_RB))
            counts_RB[in_block, start + in_block] = 0
            value_without_R = measure_resamples(Resamples(scored, counts_RB))
            influences.append((rows - 1) * (value - value_without_R))
    return np.concatenate([np.empty(0), *influences])


def estimate_share(success_count: int, row_count: int) -> tuple[float, float]:
    """Return the 95 % interval of the share successes / rows (Wilson 1927).

    It is valid even for few or no rows.
    """
    interval = scipy.stats.binomtest(success_count, row_count).proportion_ci(
        _CONFIDENCE, method="wilson"
    )
    return float(interval.low), float(interval.high)


def estimate_gain(
    model: Scored, reference: Scored, measure: Measure, *, resamples: int = RESAMPLES, seed: int = 0
) -> Estimate | None:
    """Return how much better one model is than another on the same rows, with a 95 % interval.

    The interval is over rows and paired: both models are measured on the same bootstrap resamples,
    so that rows which are hard for both cancel. None means that the models were tested on different
    rows, or that the measure is undefined on these rows.

    Args:
        model, reference: predictions of the two models for the same rows.
        measure: the measure whose gain is computed.
        resamples: number of resamples, R.
        seed: seed of the resamples.
    """
    if not np.array_equal(model.truth, reference.truth):
        return None
    values = [measure_all(scored).get(measure.name, math.nan) for scored in (model, reference)]
    if any(map(math.isnan, values)):
        return None
    measure_resamples = RESAMPLED_MEASURES[measure.name]
    sign = 1 if measure.higher_is_better else -1
    resampled_gains: list[FloatArray] = []  # for each block, the gain in each resample
    row_count = len(model.truth)
    for counts_RB in _iter_draws(model, _choose_resamples(row_count, resamples), seed):
        model_values_R = measure_resamples(Resamples(model, counts_RB))
        reference_values_R = measure_resamples(Resamples(reference, counts_RB))
        resampled_gains.append(sign * (model_values_R - reference_values_R))
    gain = measure.compute_gain(*values)
    low, high = _compute_interval(gain, resampled_gains, row_count=row_count, is_mirrored=False)
    return Estimate(gain, low, high)


def _add_rare_row(scored: Scored) -> Iterator[Scored]:
    """Yield the same rows with one more of the rarest class: predicted worst, then predicted best.

    They serve to widen intervals: few rows that are all predicted correctly would otherwise have an
    interval without width. Nothing is yielded if each class has `MIN_ROWS` rows or more, or for
    labels that are numbers.
    """
    if np.issubdtype(scored.truth.dtype, np.floating):
        return
    classes, class_counts = np.unique(scored.truth, return_counts=True)
    if not len(class_counts) or class_counts.min() >= MIN_ROWS or not scored.is_finite:
        return
    rarest = classes[class_counts.argmin()]
    class_scores_B = scored.scores[:, rarest]
    for row in (class_scores_B.argmin(), class_scores_B.argmax()):
        extended = scored.select_rows(np.append(np.arange(len(scored.truth)), row))
        extended.truth[-1] = rarest
        yield extended


def _compute_intervals(
    scored: Scored, values: Mapping[str, float], resamples: int, seed: int
) -> dict[str, tuple[float, float]]:
    """Return the interval of each measure over resamples of these rows, by the measure's name.

    The ends are within the measure's range; they are NaN for a single row.

    Args:
        scored: predictions for the rows.
        values: name of a measure -> its value on the rows themselves.
        resamples: number of resamples.
        seed: seed of the resamples.
    """
    resampled_by_name: dict[str, list[FloatArray]] = {name: [] for name in values}
    row_count = len(scored.truth)
    for counts_RB in _iter_draws(scored, _choose_resamples(row_count, resamples), seed):
        resampled_block = Resamples(scored, counts_RB)
        for name, blocks in resampled_by_name.items():
            blocks.append(RESAMPLED_MEASURES[name](resampled_block))
    intervals = {}
    for name, value in values.items():
        low, high = _compute_interval(
            value, resampled_by_name[name], row_count=row_count, is_mirrored=name in _MIRRORED
        )
        measure = MEASURES[name]
        intervals[name] = (max(low, measure.min_value), min(high, measure.max_value))
    return intervals


def _iter_draws(scored: Scored, resamples: int, seed: int) -> Iterator[FloatArray]:
    """Yield how often each resample has each row, (R, B), in blocks of resamples.

    The counts are cached unless there are too many.
    """
    truth_B = scored.truth
    if resamples * len(truth_B) > _CACHED_CELLS:
        return _draw_counts(truth_B, resamples, seed)
    draws = _cache_draws(truth_B.tobytes(), truth_B.dtype.str, resamples, seed)
    return (counts_RB.astype(np.float64) for counts_RB in draws)


@lru_cache(maxsize=1)
def _cache_draws(truth: bytes, dtype: str, resamples: int, seed: int) -> list[NDArray[np.uint16]]:
    """Return the blocks of `_draw_counts`, cached: a run's report and summary use the same counts.

    `truth`, `dtype`: the rows' true values as bytes, since a cache's key must be hashable, and
    their type.
    """
    draws = _draw_counts(np.frombuffer(truth, dtype), resamples, seed)
    return [counts_RB.astype(np.uint16) for counts_RB in draws]


def _draw_counts(truth_B: NDArray[Any], resamples: int, seed: int) -> Iterator[FloatArray]:
    """Yield how often each resample has each row, (R, B), in blocks of resamples.

    Rows are drawn with replacement within each class, so that a class keeps its number of rows.

    `truth_B`: class of each row, or targets that are numbers. `resamples`: number of resamples.
    """
    class_groups = _group_rows(truth_B)
    row_count = len(truth_B)
    # A generator for each class, so that draws do not depend on the size of blocks.
    generators = np.random.default_rng(seed).spawn(len(class_groups))
    block_size = _choose_block(row_count)
    for start in range(0, resamples, block_size):
        resample_count = min(block_size, resamples - start)
        counts_RB = np.empty((resample_count, row_count))
        for generator, group_rows in zip(generators, class_groups, strict=True):
            probabilities = np.full(len(group_rows), 1 / len(group_rows))
            counts_RB[:, group_rows] = generator.multinomial(
                len(group_rows), probabilities, size=resample_count
            )
        yield counts_RB


def _choose_resamples(row_count: int, wanted_resamples: int) -> int:
    """Return the number of resamples to draw: 0 for a single row, few for very many rows.

    `row_count`: number of rows. `wanted_resamples`: the number that the caller asked for.
    """
    if row_count < 2:
        return 0
    return wanted_resamples if row_count < _MANY_ROWS else min(wanted_resamples, _FEW_RESAMPLES)


def _choose_block(row_count: int) -> int:
    """Return how many resamples are measured together; `row_count`: number of rows of each."""
    row_count = max(row_count, 1)
    max_resamples = max(1, _MAX_BLOCK_CELLS // row_count)
    return min(max_resamples, max(_MIN_BLOCK, _BLOCK_CELLS // row_count))


def _group_rows(truth_B: NDArray[Any]) -> list[NDArray[np.int64]]:
    """Return the positions of each class's rows; if labels are numbers, all rows are one group."""
    if np.issubdtype(truth_B.dtype, np.floating):
        return [np.arange(len(truth_B))]
    return [np.flatnonzero(truth_B == label) for label in np.unique(truth_B)]


def _compute_interval(
    value: float, resampled: list[FloatArray], *, row_count: int, is_mirrored: bool
) -> tuple[float, float]:
    """Return the 95 % interval of a measure from its values in resamples.

    The ends are percentiles; for many rows they are 1.96 standard deviations from the value.
    Without resamples they are NaN.

    Args:
        value: the measure's value on the rows themselves.
        resampled: the measure in each resample, in arrays (R,).
        row_count: number of rows.
        is_mirrored: whether to reflect the percentiles at the value, within 0 to 1.
    """
    if not resampled:
        return math.nan, math.nan
    tail_share = (1 - _CONFIDENCE) / 2
    if row_count >= _MANY_ROWS:
        half_width = scipy.stats.norm.ppf(1 - tail_share) * np.std(
            np.concatenate(resampled), ddof=1
        )
        return float(value - half_width), float(value + half_width)
    low, high = np.quantile(np.concatenate(resampled), [tail_share, 1 - tail_share])
    if not is_mirrored:
        return float(low), float(high)
    mirrored_low = max(0.0, min(value, 2 * value - high))
    mirrored_high = min(1.0, max(value, 2 * value - low))
    return float(mirrored_low), float(mirrored_high)


@dataclass(frozen=True, eq=False)
class _Curve:
    """The ROC curve of one class in each resample.

    Resamples are the last axis, which makes sums over thresholds faster.

    Attributes:
        true, false: numbers of true and of false positives by threshold, from the strictest
            threshold on, (T, R).
    """

    true: FloatArray
    false: FloatArray

    @cached_property
    def shares(self) -> tuple[FloatArray, FloatArray]:
        """The true and the false positive rates by threshold, (T + 1, R) each.

        The first threshold is one above all scores.
        """
        return _compute_shares(self.true), _compute_shares(self.false)


def _compute_shares(cumulated_TR: FloatArray) -> FloatArray:
    """Return cumulated counts (T, R) as shares of the last count, after a row of zeros, (T + 1, R).

    `cumulated_TR`: counts that rise with the threshold's number.
    """
    share_TR = np.zeros((1 + len(cumulated_TR), cumulated_TR.shape[1]))
    np.divide(cumulated_TR, cumulated_TR[-1], out=share_TR[1:])
    return share_TR


@dataclass(frozen=True, eq=False)
class Resamples:
    """A set of R resamples of scored rows.

    Attributes:
        scored: the rows.
        counts: number of times that each resample has each row, (R, B).
    """

    scored: Scored
    counts: FloatArray

    def compute_means(self, values_B: FloatArray) -> FloatArray:
        """Return the mean of the rows' values in each resample, (R,)."""
        means_R: FloatArray = self.counts @ values_B / self.counts.sum(axis=1)
        return means_R

    @cached_property
    def decisions(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """The numbers of rows by class, in three arrays (R, K).

        These are rows of the class, rows predicted as the class, and rows that are both (correct).
        """
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
        """The ROC curves: of the second of two classes, or of each of more classes.

        A class with no row, or all rows, has no curve.
        """
        return tuple(self._iter_curves())

    def _iter_curves(self) -> Iterator[_Curve]:
        """Yield the ROC curves in the order of the classes."""
        scores = self.scored.scores
        counts_BR = np.ascontiguousarray(self.counts.T)
        scores_by_class = {1: scores} if scores.ndim == 1 else dict(enumerate(scores.T))
        classes = scores_by_class if len(scores_by_class) > 2 else (1,)
        for label in classes:
            is_class_B = self.scored.truth == label
            if 0 < is_class_B.sum() < len(is_class_B):
                yield self._build_curve(scores_by_class[label], is_class_B, counts_BR)

    @staticmethod
    def _build_curve(
        class_scores_B: FloatArray, is_class_B: NDArray[np.bool_], counts_BR: FloatArray
    ) -> _Curve:
        """Return the ROC curve of one class; rows with equal scores share a threshold.

        Args:
            class_scores_B: each row's score for the class.
            is_class_B: whether each row is of the class.
            counts_BR: number of times that each resample has each row.
        """
        descending_B = np.argsort(-class_scores_B, kind="stable")
        # Positions, in this order, of the last row of each threshold.
        last_positions_T = np.flatnonzero(np.diff(class_scores_B[descending_B], append=-np.inf))
        ranked_counts_BR = counts_BR[descending_B]
        ranked_is_class_B = is_class_B[descending_B]
        positives_TR = ranked_counts_BR.cumsum(axis=0)[last_positions_T]
        true_positives_TR = (ranked_counts_BR * ranked_is_class_B[:, None]).cumsum(axis=0)[
            last_positions_T
        ]
        return _Curve(true_positives_TR, positives_TR - true_positives_TR)

    @cached_property
    def auc(self) -> FloatArray:
        """The area under the ROC curve of each resample, (R,), mean over classes."""
        areas = []
        for curve in self.curves:
            true_TR, false_TR = curve.shares
            areas.append(np.trapezoid(true_TR, false_TR, axis=0))
        return np.asarray(np.mean(areas, axis=0))


def _compute_ks(resamples: Resamples) -> FloatArray:
    """Return the Kolmogorov-Smirnov distance of each resample, (R,), mean over classes."""
    gaps = []
    for curve in resamples.curves:
        true_TR, false_TR = curve.shares
        gaps.append((true_TR - false_TR).max(axis=0))
    return np.asarray(np.mean(gaps, axis=0))


def _compute_average_precision(resamples: Resamples) -> FloatArray:
    """Return the average precision of each resample, (R,), mean over classes.

    It is the sum of the precisions at all thresholds, weighted by the increase of recall.
    """
    precisions = []
    for curve in resamples.curves:
        predicted_TR = curve.true + curve.false
        precision_TR = curve.true / np.maximum(predicted_TR, 1)
        recall_TR, _ = curve.shares
        precisions.append((np.diff(recall_TR, axis=0) * precision_TR).sum(axis=0))
    return np.asarray(np.mean(precisions, axis=0))


def _compute_accuracy(resamples: Resamples) -> FloatArray:
    """Return the accuracy of each resample, (R,)."""
    return resamples.compute_means(
        (resamples.scored.class_predictions == resamples.scored.truth).astype(np.float64)
    )


def _compute_balanced_accuracy(resamples: Resamples) -> FloatArray:
    """Return the mean recall over classes of each resample, (R,).

    A class's recall is its correctly predicted rows, divided by its rows.
    """
    true_RK, _, correct_RK = resamples.decisions
    # Rows are drawn class by class, so all resamples have rows of the same classes.
    is_present_K = true_RK[0] > 0
    recalls_RK = correct_RK[:, is_present_K] / true_RK[:, is_present_K]
    mean_recalls_R: FloatArray = recalls_RK.mean(axis=1)
    return mean_recalls_R


def _compute_f1(resamples: Resamples) -> FloatArray:
    """Return F1 of each resample, (R,): of the second of two classes, else the mean over classes.

    Classes without true and predicted rows take no part in the mean.
    """
    true_RK, predicted_RK, correct_RK = resamples.decisions
    total_RK = true_RK + predicted_RK
    f1_RK = 2 * correct_RK / np.maximum(total_RK, 1)
    if resamples.scored.classes == 2:
        return f1_RK[:, 1]
    return np.average(f1_RK, axis=1, weights=total_RK > 0)


def _compute_brier(resamples: Resamples) -> FloatArray:
    """Return the Brier score of each resample, (R,); for two classes it is halved, as is usual."""
    scored = resamples.scored
    errors_B = ((scored.scores - np.eye(scored.classes)[scored.truth]) ** 2).sum(axis=1)
    return resamples.compute_means(errors_B / 2 if scored.classes == 2 else errors_B)


def _compute_log_loss(resamples: Resamples) -> FloatArray:
    """Return the mean negative log probability of the true class of each resample, (R,)."""
    scored = resamples.scored
    min_probability = np.finfo(
        np.float64
    ).eps  # scikit-learn's limit, which keeps the logarithm finite
    probabilities_B = scored.scores[np.arange(len(scored.truth)), scored.truth]
    return resamples.compute_means(
        -np.log(np.clip(probabilities_B, min_probability, 1 - min_probability))
    )


def _compute_r2(resamples: Resamples) -> FloatArray:
    """Return R2 of each resample, (R,).

    If all targets of a resample are equal, R2 is 1 for exact predictions and else 0, as in
    scikit-learn.
    """
    truth_B = resamples.scored.truth
    centred_B = truth_B - truth_B.mean()  # without a large mean, squares lose no digits
    error_R = resamples.compute_means((truth_B - resamples.scored.scores) ** 2)
    variance_R = resamples.compute_means(centred_B**2) - resamples.compute_means(centred_B) ** 2
    # The variance of equal targets may be a rounding error, so the targets themselves are compared.
    is_drawn_RB = resamples.counts > 0
    lowest_target_R = np.where(is_drawn_RB, truth_B, math.inf).min(axis=1)
    highest_target_R = np.where(is_drawn_RB, truth_B, -math.inf).max(axis=1)
    is_exact_R = (error_R == 0).astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(lowest_target_R < highest_target_R, 1 - error_R / variance_R, is_exact_R)


def _compute_poisson_deviance(resamples: Resamples) -> FloatArray:
    """Return the mean Poisson deviance of each resample, (R,).

    It is NaN if a prediction is not positive.
    """
    truth_B = resamples.scored.truth
    scores_B = resamples.scored.scores
    with np.errstate(divide="ignore", invalid="ignore"):
        # y log(y / mu), which is 0 for y = 0.
        logs_B = np.where(truth_B > 0, truth_B * np.log(truth_B / scores_B), 0.0)
        deviance_B = np.where(scores_B > 0, 2 * (logs_B - truth_B + scores_B), math.nan)
        return resamples.compute_means(deviance_B)


RESAMPLED_MEASURES: Mapping[str, Callable[[Resamples], FloatArray]] = MappingProxyType(
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

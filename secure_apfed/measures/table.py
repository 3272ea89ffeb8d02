"""Table of the measures of predictions on rows whose true labels are known.

Run by: the active on its own rows, in training, in a report and in `predict`, and by studies; no
value is sent. A new measure is one line in the table. Most are computed by scikit-learn. With more
than two classes, a measure of a ranking is the mean over the classes, each against the others
(macro one-vs-rest). A class that has no row, or all rows, takes no part in the mean. A measure is
NaN if the rows do not define it: without rows, for a ranking of rows of one class, for R2 of one
row, and for scores that are not finite. `secure_apfed.measures.intervals` computes intervals over
the test rows. See docs/tasks-and-measures.md.

Letters: B rows, K classes, T thresholds.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any, Literal, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from secure_apfed.errors import DataError
from secure_apfed.settings import describe_unknown_name

FloatArray: TypeAlias = NDArray[np.float64]
_EVALUATION_ROWS = 4096  # rows in one forward pass
Task: TypeAlias = Literal["classification", "regression", "poisson"]
_MAX_CANDIDATES = 200  # largest number of thresholds that are tried
_RANGES = 10  # number of ranges of scores in calibration curves and lift tables


@dataclass(frozen=True, eq=False, kw_only=True)
class Scored:
    """A model's predictions for some rows, with the rows' true labels.

    Attributes:
        truth: true labels (B,): classes 0 to K - 1, or floating-point numbers in a regression.
        scores: probabilities of each class, (B, K), or predicted numbers (B,) in a regression.
        threshold: probability from which the second of two classes is predicted; None: the
            likeliest class is predicted.
        are_counts: whether the numbers of a regression are counts, to which the Poisson deviance
            applies.
    """

    truth: NDArray[np.int64] | FloatArray = field(repr=False)
    scores: FloatArray = field(repr=False)
    threshold: float | None = None
    are_counts: bool = False

    def __post_init__(self) -> None:
        """Check shapes, and that a threshold comes with two classes. Raises DataError."""
        if self.truth.ndim != 1 or self.scores.ndim not in (1, 2):
            raise DataError(
                "measures: truth is a list and scores one number a row, or one a row and class; "
                f"got shapes {self.truth.shape} and {self.scores.shape}"
            )
        if len(self.truth) != len(self.scores):
            raise DataError(
                f"measures: {len(self.truth)} rows of truth and {len(self.scores)} of scores; give "
                "each row one of both"
            )
        if self.threshold is not None and self.classes != 2:
            raise DataError(
                f"measures: a threshold decides between two classes, and there are {self.classes}; "
                "leave it out"
            )

    @classmethod
    def from_probabilities(cls, truth: ArrayLike, probabilities: ArrayLike) -> Self:
        """Return scored rows from labels (B,) and probabilities (B, K).

        For two classes the probabilities may be only the second class's, (B,).

        Raises DataError: these are no probabilities, or labels do not fit them.
        """
        labels_B = np.asarray(truth, dtype=np.int64)
        scores = np.asarray(probabilities, dtype=np.float64)
        scores_BK = np.column_stack([1 - scores, scores]) if scores.ndim == 1 else scores
        if scores_BK.ndim != 2 or scores_BK.shape[1] < 2:
            raise DataError(f"measures: probabilities are (B, K) or (B,), got {scores.shape}")
        if not ((scores_BK >= 0).all() and np.allclose(scores_BK.sum(axis=1), 1, atol=1e-4)):
            raise DataError(
                "measures: the probabilities of a row are at least 0 and add up to 1; take the "
                "softmax of a network's scores first"
            )
        if len(labels_B) and not 0 <= labels_B.min() <= labels_B.max() < scores_BK.shape[1]:
            raise DataError(
                f"measures: labels lie in 0 to {scores_BK.shape[1] - 1}, got {labels_B.min()} to "
                f"{labels_B.max()}"
            )
        return cls(truth=labels_B, scores=scores_BK)

    @classmethod
    def from_network_outputs(cls, truth: ArrayLike, scores_BK: ArrayLike) -> Self:
        """Return scored rows from labels (B,) and a network's outputs (B, K).

        The probabilities are the outputs' softmax. After a diverged training they are not finite,
        and measures of them are NaN.
        """
        probabilities_BK = torch.as_tensor(scores_BK, dtype=torch.float64).softmax(1).numpy()
        return cls(truth=np.asarray(truth, dtype=np.int64), scores=probabilities_BK)

    @property
    def classes(self) -> int:
        """The number of classes, K; 0 for a regression."""
        return self.scores.shape[1] if self.scores.ndim == 2 else 0

    @cached_property
    def is_finite(self) -> bool:
        """Whether all scores are finite numbers; after a diverged training they may not be."""
        return bool(np.isfinite(self.scores).all())

    @cached_property
    def class_predictions(self) -> NDArray[np.int64]:
        """The predicted class of each row, (B,)."""
        if self.threshold is None:
            return np.asarray(self.scores.argmax(axis=1), dtype=np.int64)
        return np.asarray(self.scores[:, 1] >= self.threshold, dtype=np.int64)

    def replace_threshold(self, threshold: float | None) -> Self:
        """Return the same predictions, with the second of two classes predicted from `threshold`.

        None: the likeliest class is predicted.
        """
        return replace(self, threshold=threshold)

    def select_rows(self, rows: NDArray[np.int64]) -> Self:
        """Return the rows at these indices, which may repeat."""
        return replace(self, truth=self.truth[rows], scores=self.scores[rows])


@torch.no_grad()
def compute_outputs(predict: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Return a model's outputs for some rows of a table, as float64 on the CPU.

    They are computed in blocks of rows, to save memory.

    `predict`: function from positions of rows (B,) to outputs. `rows`: positions in the table.
    """
    blocks = [predict(rows_B).double().cpu() for rows_B in rows.split(_EVALUATION_ROWS)]
    return torch.cat(blocks)


def score_model(predict: Callable[[Tensor], Tensor], rows: Tensor, labels_N: Tensor) -> Scored:
    """Return a classifier's predictions for some rows of a table, with their labels.

    `predict`: function from positions of rows (B,) to a network's outputs (B, K). `rows`: positions
    in the table. `labels_N`: labels of all N rows of the table.
    """
    rows_on_device = rows.to(labels_N.device)
    return Scored.from_network_outputs(
        labels_N[rows_on_device].cpu(), compute_outputs(predict, rows_on_device)
    )


def normalise_scores(scores_BK: FloatArray) -> FloatArray:
    """Return probabilities (B, K) from scores that may lie outside 0 to 1.

    Models that learn classes by a regression have such scores. Scores below 0 count as 0, and each
    row is divided by its sum. A row without a positive score becomes uniform.
    """
    positive_BK = scores_BK.clip(min=0.0)
    total_B1 = positive_BK.sum(axis=1, keepdims=True)
    uniform_BK = np.full_like(positive_BK, 1 / positive_BK.shape[1])
    return np.asarray(np.divide(positive_BK, total_B1, out=uniform_BK, where=total_B1 > 0))


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A measure of predictions on rows whose true labels are known.

    Attributes:
        name: the measure's key in the table.
        title: the measure's name in reports.
        function: computes the measure from scored rows that define it.
        higher_is_better: whether a higher value is better.
        is_share: whether the measure is a share of rows, displayed in per cent.
        is_decision_measure: whether the measure uses the predicted classes only, and no scores.
        is_ranking_measure: whether the measure is about the ranking of rows, and so needs rows of
            two classes.
        min_value, max_value: the smallest and the largest possible value; infinite without a bound.
        tasks: the tasks to which the measure applies.
    """

    name: str
    title: str
    function: Callable[[Scored], float]
    higher_is_better: bool = True
    is_share: bool = False
    is_decision_measure: bool = False
    is_ranking_measure: bool = False
    min_value: float = 0.0
    max_value: float = 1.0
    tasks: tuple[Task, ...] = ("classification",)

    def compute_value(self, scored: Scored) -> float:
        """Return the measure's value on these rows; NaN if they do not define it.

        Raises DataError: the measure does not apply to the task of these predictions.
        """
        task = find_task(scored)
        if task not in self.tasks:
            raise DataError(
                f"measures: {self.name} is of {' and '.join(self.tasks)}, and these scores are "
                f"of {task}; take one of {', '.join(list_measure_names(task))}"
            )
        if self.explain_nan(scored):
            return math.nan
        from sklearn import config_context

        # scikit-learn's checks take longer than most measures.
        with config_context(skip_parameter_validation=True):
            return float(self.function(scored))

    def explain_nan(self, scored: Scored) -> str:
        """Return in words why these rows do not define the measure; "" if they do."""
        rows = len(scored.truth)
        if not rows:
            return "no row was tested"
        if not self.is_decision_measure and not scored.is_finite:
            return "the model's scores are not finite numbers"
        if self.is_ranking_measure and (scored.truth == scored.truth[0]).all():
            return f"the {rows} tested rows are all of one class"
        if self is MEASURES["r2"] and rows < 2:
            return "one row was tested"
        if self is MEASURES["poisson_deviance"] and (scored.scores <= 0).any():
            return "a prediction is 0 or less, and a deviance is of positive ones"
        return ""

    def compute_gain(self, value: float, reference_value: float) -> float:
        """Return by how much `value` is better than `reference_value`; negative if worse."""
        return value - reference_value if self.higher_is_better else reference_value - value

    def rank_value(self, value: float | None) -> float:
        """Return a sort key that is highest for the best value; None and NaN have the lowest."""
        if value is None or math.isnan(value):
            return -math.inf
        return value if self.higher_is_better else -value

    def format_value(self, value: float) -> str:
        """Return a value as text: "95.2 %" for a share, "0.952" for others, "undefined" for NaN."""
        if math.isnan(value):
            return "undefined"
        return f"{100 * value:.1f} %" if self.is_share else f"{value:.3f}"

    def format_gain(self, value: float, reference_value: float) -> str:
        """Return the gain of `value` over `reference_value` as text: "+1.2 points" or "+0.012".

        Points are per cent of a share. If the gain is undefined (NaN), the text says so.
        """
        gain = self.compute_gain(value, reference_value)
        return "no gain can be told" if math.isnan(gain) else self.format_points(gain)

    def format_points(self, gain: float) -> str:
        """Return a difference of two values as text: "+1.2 points" for a share, else "+0.012"."""
        return f"{100 * gain:+.1f} points" if self.is_share else f"{gain:+.3f}"


def _import_metrics() -> Any:
    """Return scikit-learn's module of metrics, which is imported here at first use.

    Settings import this table for the measures' names, and should not load scikit-learn.
    """
    from sklearn import metrics

    return metrics


@lru_cache(maxsize=1)  # three measures read the same curves
def _compute_rocs(scored: Scored) -> tuple[tuple[FloatArray, FloatArray], ...]:
    """Return each class's ROC curve: its false and its true positive rates (T,) by threshold.

    The classes are those of `_iter_class_scores`.
    """
    return tuple(
        _import_metrics().roc_curve(is_class_B, class_scores_B)[:2]
        for is_class_B, class_scores_B in _iter_class_scores(scored)
    )


def _iter_class_scores(scored: Scored) -> Iterator[tuple[NDArray[np.bool_], FloatArray]]:
    """Yield for each class whether each row is of the class, (B,), and the scores for it, (B,).

    For two classes only the second one is yielded. A class with no row, or all rows, is left out.
    """
    # Of two classes, the scores of the first follow from the scores of the second.
    labels = range(scored.classes) if scored.classes > 2 else (1,)
    for label in labels:
        is_class_B = scored.truth == label
        if 0 < is_class_B.sum() < len(is_class_B):
            yield is_class_B, scored.scores[:, label]


def _compute_mean(values: list[float]) -> float:
    """Return the mean of these values; NaN without a value."""
    return float(np.mean(values)) if values else math.nan


def _compute_auc(scored: Scored) -> float:
    """Return the area under the ROC curve, mean over classes."""
    return _compute_mean(
        [_import_metrics().auc(false_T, true_T) for false_T, true_T in _compute_rocs(scored)]
    )


def _compute_ks(scored: Scored) -> float:
    """Return the largest gap of true and false positive rates, mean over classes."""
    return _compute_mean([(true_T - false_T).max() for false_T, true_T in _compute_rocs(scored)])


def _compute_average_precision(scored: Scored) -> float:
    """Return the average precision, mean over classes."""
    compute_precision = _import_metrics().average_precision_score
    return _compute_mean(
        [
            compute_precision(is_class_B, class_scores_B)
            for is_class_B, class_scores_B in _iter_class_scores(scored)
        ]
    )


def _compute_f1(scored: Scored) -> float:
    """Return F1: of the second of two classes, else the mean over classes."""
    averaging = "binary" if scored.classes == 2 else "macro"
    f1 = _import_metrics().f1_score(
        scored.truth, scored.class_predictions, average=averaging, zero_division=0
    )
    return float(f1)


def _compute_balanced_accuracy(scored: Scored) -> float:
    """Return the mean recall of the classes that have rows.

    scikit-learn's `balanced_accuracy_score` gives the same, but warns of classes without rows.
    """
    present_classes = np.unique(scored.truth)
    mean_recall = _import_metrics().recall_score(
        scored.truth,
        scored.class_predictions,
        labels=present_classes,
        average="macro",
        zero_division=0,
    )
    return float(mean_recall)


def _compute_accuracy(scored: Scored) -> float:
    """Return the share of rows whose class is predicted correctly.

    scikit-learn's `accuracy_score` gives the same, but takes a hundred times as long for checks.
    """
    return float((scored.truth == scored.class_predictions).mean())


def _compute_brier(scored: Scored) -> float:
    """Return the mean over rows of Brier's sum over classes; half of it for two classes."""
    total = ((scored.scores - np.eye(scored.classes)[scored.truth]) ** 2).sum(axis=1).mean()
    return float(total / 2 if scored.classes == 2 else total)


def _compute_log_loss(scored: Scored) -> float:
    """Return the mean negative log probability of the true class."""
    return float(
        _import_metrics().log_loss(scored.truth, scored.scores, labels=range(scored.classes))
    )


_NUMBERS: tuple[Task, ...] = ("regression", "poisson")  # tasks whose labels are numbers

_ALL = (
    Measure(
        name="accuracy",
        title="accuracy",
        is_share=True,
        is_decision_measure=True,
        function=_compute_accuracy,
    ),
    Measure(name="auc", is_ranking_measure=True, title="AUC", function=_compute_auc),
    Measure(
        name="average_precision",
        is_ranking_measure=True,
        title="average precision",
        function=_compute_average_precision,
    ),
    Measure(name="ks", is_ranking_measure=True, title="KS", function=_compute_ks),
    Measure(
        name="gini",
        is_ranking_measure=True,
        title="Gini",
        min_value=-1.0,
        function=lambda scored: 2 * _compute_auc(scored) - 1,
    ),
    Measure(
        name="balanced_accuracy",
        title="balanced accuracy",
        is_share=True,
        is_decision_measure=True,
        function=_compute_balanced_accuracy,
    ),
    Measure(name="f1", title="F1", is_decision_measure=True, function=_compute_f1),
    Measure(
        name="brier",
        title="Brier score",
        higher_is_better=False,
        max_value=2.0,
        function=_compute_brier,
    ),
    Measure(
        name="log_loss",
        title="log loss",
        higher_is_better=False,
        max_value=math.inf,
        function=_compute_log_loss,
    ),
    Measure(
        name="r2",
        title="R2",
        tasks=_NUMBERS,
        min_value=-math.inf,
        function=lambda scored: _import_metrics().r2_score(scored.truth, scored.scores),
    ),
    Measure(
        name="mae",
        title="MAE",
        tasks=_NUMBERS,
        higher_is_better=False,
        max_value=math.inf,
        function=lambda scored: _import_metrics().mean_absolute_error(scored.truth, scored.scores),
    ),
    Measure(
        name="rmse",
        title="RMSE",
        tasks=_NUMBERS,
        higher_is_better=False,
        max_value=math.inf,
        function=lambda scored: math.sqrt(
            _import_metrics().mean_squared_error(scored.truth, scored.scores)
        ),
    ),
    Measure(
        name="poisson_deviance",
        title="Poisson deviance",
        tasks=("poisson",),
        higher_is_better=False,
        max_value=math.inf,
        function=lambda scored: _import_metrics().mean_poisson_deviance(
            scored.truth, scored.scores
        ),
    ),
)

MEASURES: Mapping[str, Measure] = MappingProxyType({measure.name: measure for measure in _ALL})
"""Measures by name, in display order."""

ACCURACY = MEASURES["accuracy"]
"""The main measure of runs, unless their settings name another."""


def find_task(scored: Scored) -> Task:
    """Return the task whose measures apply to these scores."""
    if scored.classes:
        return "classification"
    return "poisson" if scored.are_counts else "regression"


def list_measure_names(task: str) -> tuple[str, ...]:
    """Return the names of the measures of a task."""
    return tuple(name for name, measure in MEASURES.items() if task in measure.tasks)


def find_measure(name: str) -> Measure:
    """Return the measure of this name.

    Raises ValueError: there is no such measure; the error names the most similar one.
    """
    if name not in MEASURES:
        raise ValueError(describe_unknown_name(name, MEASURES))
    return MEASURES[name]


def measure_all(scored: Scored) -> dict[str, float]:
    """Return the value of every measure that these rows define, by name."""
    values = {
        name: MEASURES[name].compute_value(scored) for name in list_measure_names(find_task(scored))
    }
    return {name: value for name, value in values.items() if not math.isnan(value)}


def explain_undefined_measures(scored: Scored) -> dict[str, str]:
    """Return the measures that these rows do not define, with the reason, by name.

    Only measures of the rows' task are considered.
    """
    reasons = {
        name: MEASURES[name].explain_nan(scored) for name in list_measure_names(find_task(scored))
    }
    return {name: reason for name, reason in reasons.items() if reason}


THRESHOLDS: Mapping[str, str] = MappingProxyType(
    {name: measure.title for name, measure in MEASURES.items() if measure.is_decision_measure}
)
"""Name -> title of the measures by which a threshold can be chosen: they read decisions only."""


def compute_balanced_weights(labels_N: Tensor, classes: int) -> Tensor:
    """Return a weight for each class, (K,), with which all classes have the same total weight.

    It is rows / (classes with rows * rows of the class), as scikit-learn's "balanced", so that its
    mean over the labelled rows is 1. A class without a row gets 0.

    `labels_N`: classes of N rows; negative: no label. `classes`: K.

    Raises DataError: no row has a label.
    """
    counts_K = torch.bincount(labels_N[labels_N >= 0].cpu(), minlength=classes).double()
    if not counts_K.sum():
        raise DataError("class weights: no row has a label; label some, or leave weights out")
    weights_K = counts_K.sum() / ((counts_K > 0).sum() * counts_K)
    return torch.where(counts_K > 0, weights_K, 0.0)


def best_threshold(scored: Scored, measure: str) -> float:
    """Return the threshold of the second of two classes that maximises a measure.

    Candidates are 0.5 and the midpoints between neighbouring scores, or 200 quantiles of them if
    there are more. Of equally good candidates the nearest to 0.5 is returned. Call this on training
    or validation rows, never on test rows.

    `measure`: name of a measure that reads decisions only.

    Raises DataError: another measure, or not rows of two classes.
    """
    if measure not in THRESHOLDS:
        raise DataError(
            f"threshold: chosen by one of {', '.join(THRESHOLDS)}, which read decisions; "
            f"got {measure!r}"
        )
    return _maximise_threshold(scored, MEASURES[measure].compute_value)


def cheapest_threshold(scored: Scored, miss_cost: float) -> float:
    """Return the threshold of the second of two classes with the least total cost.

    A missed row of the second class (a false negative) costs `miss_cost`, and a false positive
    costs 1. Candidates and ties are those of `best_threshold`.

    Raises DataError: there are not rows of two classes.
    """

    def compute_negative_cost(decided_rows: Scored) -> float:
        """Return minus the total cost of these decisions, which is to be maximised."""
        false_negatives = (decided_rows.truth == 1) & (decided_rows.class_predictions == 0)
        false_positives = (decided_rows.truth == 0) & (decided_rows.class_predictions == 1)
        return -float(miss_cost * false_negatives.sum() + false_positives.sum())

    return _maximise_threshold(scored, compute_negative_cost)


def _maximise_threshold(scored: Scored, objective: Callable[[Scored], float]) -> float:
    """Return the candidate threshold with the highest objective.

    Of equally good candidates the nearest to 0.5 is returned.

    `scored`: predictions for rows of two classes. `objective`: function of the same predictions
    with a threshold.

    Raises DataError: there are not rows of two classes.
    """
    if scored.classes != 2 or len(np.unique(scored.truth)) < 2:
        raise DataError(
            f"threshold: chosen between two classes with labelled rows of both; there are "
            f"{scored.classes} classes, and labels of {len(np.unique(scored.truth))}"
        )
    distinct_scores = np.unique(scored.scores[:, 1])
    midpoints = (distinct_scores[1:] + distinct_scores[:-1]) / 2
    if len(midpoints) > _MAX_CANDIDATES:
        midpoints = np.quantile(midpoints, np.linspace(0, 1, _MAX_CANDIDATES))
    candidates: list[float] = sorted(
        {0.5, *midpoints.tolist()}, key=lambda threshold: abs(threshold - 0.5)
    )
    values = {candidate: objective(scored.replace_threshold(candidate)) for candidate in candidates}
    return max(candidates, key=lambda candidate: values[candidate])  # the first of equal ones


class CalibrationPoint(BaseModel):
    """A point of a calibration curve: the rows of one range of scores.

    Attributes:
        predicted: mean predicted probability of the rows.
        observed: share of these rows whose predicted class is the true one.
        rows: number of rows.
    """

    model_config = ConfigDict(frozen=True)

    predicted: float
    observed: float
    rows: int


def calibration_curve(
    scored: Scored, *, range_count: int = _RANGES
) -> tuple[CalibrationPoint, ...]:
    """Return the mean predicted probability and the observed share in ranges of scores.

    The ranges have about equally many rows. For two classes, both are of the second class. For
    more, the probability is the likeliest class's, and the share is how often that is the true
    class. The result is empty without rows, or if scores are not finite.

    `range_count`: number of ranges.

    Raises DataError: the scores are no probabilities.
    """
    from sklearn.calibration import calibration_curve as curve

    if not scored.classes:
        raise DataError("measures: a calibration curve is of probabilities, got one number a row")
    if not len(scored.truth) or not scored.is_finite:
        return ()
    if scored.classes == 2:
        top_scores_B = scored.scores[:, 1]
        true_B = scored.truth == 1
    else:
        top_scores_B = scored.scores.max(axis=1)
        true_B = scored.scores.argmax(axis=1) == scored.truth
    observed, predicted = curve(
        true_B, top_scores_B, n_bins=range_count, strategy="quantile", pos_label=True
    )
    # scikit-learn returns no counts, so rows are counted over its ranges here.
    edges = np.quantile(top_scores_B, np.linspace(0, 1, range_count + 1))
    rows_by_range = np.bincount(np.searchsorted(edges[1:-1], top_scores_B), minlength=range_count)
    return tuple(
        CalibrationPoint(
            predicted=float(mean_probability), observed=float(true_share), rows=int(range_rows)
        )
        for mean_probability, true_share, range_rows in zip(
            predicted, observed, rows_by_range[rows_by_range > 0], strict=True
        )
    )


class LiftRow(BaseModel):
    """A row of a lift table, as in scorecards: one tenth of the rows by their scores.

    Positives are rows of the second class, negatives rows of the first.

    Attributes:
        rows, positives: number of rows in this tenth, and of positives among them.
        rate: positives / rows.
        captured: share of all positives that are in this tenth or in tenths with higher scores.
        lift: share of positives in these tenths together, divided by their share in all rows.
        ks: `captured` minus the share of all negatives in these tenths.
    """

    model_config = ConfigDict(frozen=True)

    rows: int
    positives: int
    rate: float
    captured: float
    lift: float
    ks: float


def lift_table(scored: Scored, *, part_count: int = _RANGES) -> tuple[LiftRow, ...]:
    """Return the lift table: tenths of the rows, by falling probability of the second class.

    Equal scores are kept together, so few different scores make fewer tenths. The result is empty
    if a class has no row, or if scores are not finite.

    `scored`: predictions for two classes. `part_count`: number of parts, 10 for tenths.

    Raises DataError: there are not two classes.
    """
    if scored.classes != 2:
        raise DataError(f"measures: a lift table is of two classes, got {scored.classes}")
    scores_B = scored.scores[:, 1]
    is_positive_B = scored.truth == 1
    if not scored.is_finite or is_positive_B.all() or not is_positive_B.any():
        return ()
    edges = np.unique(np.quantile(scores_B, np.linspace(0, 1, part_count + 1)[1:-1]))
    # Each row's tenth, from 0 for the highest scores on.
    tenth_B = len(edges) - np.searchsorted(edges, scores_B, side="right")
    rows_by_tenth = np.bincount(tenth_B, minlength=len(edges) + 1)
    positives_by_tenth = np.bincount(tenth_B, is_positive_B, len(edges) + 1)
    lift_rows = list[LiftRow]()
    rows_so_far = 0
    positives_so_far = 0
    for rows, positives in zip(rows_by_tenth.tolist(), map(int, positives_by_tenth), strict=True):
        if not rows:
            continue
        rows_so_far += rows
        positives_so_far += positives
        captured = positives_so_far / is_positive_B.sum()
        captured_negatives = (rows_so_far - positives_so_far) / (~is_positive_B).sum()
        lift_rows.append(
            LiftRow(
                rows=rows,
                positives=positives,
                rate=positives / rows,
                captured=captured,
                lift=captured * len(is_positive_B) / rows_so_far,
                ks=captured - captured_negatives,
            )
        )
    return tuple(lift_rows)

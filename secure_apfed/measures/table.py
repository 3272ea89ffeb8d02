"""The measures of a model on rows whose truth is known. A new one is one line in the table.

Run by: the active on its own test rows, and by studies. scikit-learn computes them. With several
classes a measure of a ranking is the mean over the classes, each against the others (macro
one-vs-rest), and a class that has no row, or all, takes no part in it.

A measure of rows that do not define it is NaN: of no row, a ranking of rows of one class, R2 of one
row, and all that reads scores which are not finite.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from secure_apfed.errors import DataError
from secure_apfed.measures.scored import FloatArray, Scored
from secure_apfed.settings import unknown_name

__all__ = [
    "ACCURACY", "MEASURES", "Measure", "Task", "find_measure", "measure_all", "names_of", "task_of",
    "undefined_in",
]  # fmt: skip

Task: TypeAlias = Literal["classification", "regression", "anomaly"]


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One measure.

    Attributes:
        name: its key in the table; title: for people.
        task: of which models.
        higher_is_better: whether the highest value is the best one.
        share: whether it is a share of rows, which is told in per cent.
        decides: whether it reads what is decided, and no score.
        ranks: whether it needs rows of two classes.
        function: of scored rows.
    """

    name: str
    title: str
    function: Callable[[Scored], float]
    higher_is_better: bool = True
    share: bool = False
    decides: bool = False
    ranks: bool = False
    tasks: tuple[Task, ...] = ("classification",)

    def of(self, scored: Scored) -> float:
        """Its value; NaN where the rows do not define it.

        Raises:
            DataError: rows of another task.
        """
        task = task_of(scored)
        if task not in self.tasks:
            raise DataError(
                f"measures: {self.name} is of {' and '.join(self.tasks)}, and these scores are "
                f"of {task}; take one of {', '.join(names_of(task))}"
            )
        if self.why_not(scored):
            return math.nan
        from sklearn import config_context

        with config_context(skip_parameter_validation=True):
            return float(self.function(scored))

    def why_not(self, scored: Scored) -> str:
        """Why these rows do not define it; empty where they do."""
        rows = len(scored.truth)
        if not rows:
            return "no row was tested"
        if not self.decides and not scored.finite:
            return "the model's scores are not finite numbers"
        if self.ranks and (scored.truth == scored.truth[0]).all():
            return f"the {rows} tested rows are all of one class"
        if self is MEASURES["r2"] and rows < 2:
            return "one row was tested"
        return ""

    def gain(self, reached: float, reference: float) -> float:
        """How much better `reached` is than `reference`; below 0 where it is worse."""
        return reached - reference if self.higher_is_better else reference - reached

    def rank(self, value: float | None) -> float:
        """A number that is highest for the best value; None and NaN come last."""
        if value is None or math.isnan(value):
            return -math.inf
        return value if self.higher_is_better else -value

    def text(self, value: float) -> str:
        """Such as "95.2 %" of a share, "0.952" of what is none, and "undefined" of NaN."""
        if math.isnan(value):
            return "undefined"
        return f"{100 * value:.1f} %" if self.share else f"{value:.3f}"

    def gain_text(self, reached: float, reference: float) -> str:
        """Such as "+1.2 points" of a share, and "+0.012" of what is none."""
        gain = self.gain(reached, reference)
        if math.isnan(gain):
            return "no gain can be told"
        return f"{100 * gain:+.1f} points" if self.share else f"{gain:+.3f}"


def _metrics() -> Any:
    """Imported where it is needed: settings know the names of measures, and start fast."""
    from sklearn import metrics

    return metrics


@lru_cache(maxsize=1)  # three measures read the same curves
def _rocs(scored: Scored) -> tuple[tuple[FloatArray, FloatArray], ...]:
    """The shares of false and of true alarms by threshold, for each class in question."""
    return tuple(_metrics().roc_curve(alarm_B, said_B)[:2] for alarm_B, said_B in _ranked(scored))


def _ranked(scored: Scored) -> Iterator[tuple[NDArray[np.bool_], FloatArray]]:
    """Whether rows are of a class, and the scores that say so: of anomalies, of the second of two
    classes, and of each of several. A class that has no row, or all, has no rank.
    """
    said_BK = scored.scores if scored.classes else np.column_stack([scored.scores] * 2)
    for one in range(scored.classes) if scored.classes > 2 else (1,):
        alarm_B = scored.truth == one
        if 0 < alarm_B.sum() < len(alarm_B):
            yield alarm_B, said_BK[:, one]


def _mean(found: list[float]) -> float:
    return float(np.mean(found)) if found else math.nan


def _auc(scored: Scored) -> float:
    return _mean([_metrics().auc(false_T, true_T) for false_T, true_T in _rocs(scored)])


def _ks(scored: Scored) -> float:
    return _mean([(true_T - false_T).max() for false_T, true_T in _rocs(scored)])


def _average_precision(scored: Scored) -> float:
    rank = _metrics().average_precision_score
    return _mean([rank(alarm_B, said_B) for alarm_B, said_B in _ranked(scored)])


def _f1(scored: Scored) -> float:
    if scored.classes == 2:
        return float(_metrics().f1_score(scored.truth, scored.decided, zero_division=0))
    found = _metrics().f1_score(scored.truth, scored.decided, average="macro", zero_division=0)
    return float(found)


def _balanced(scored: Scored) -> float:
    """The mean recall of the classes that have rows; scikit-learn's own warns of the others."""
    present = np.unique(scored.truth)
    recalls = _metrics().recall_score(
        scored.truth, scored.decided, labels=present, average="macro", zero_division=0
    )
    return float(recalls)


def _brier(scored: Scored) -> float:
    """Brier's sum over the classes; of two classes half of it, as is usual."""
    total = ((scored.scores - np.eye(scored.classes)[scored.truth]) ** 2).sum(axis=1).mean()
    return float(total / 2 if scored.classes == 2 else total)


def _log_loss(scored: Scored) -> float:
    return float(_metrics().log_loss(scored.truth, scored.scores, labels=range(scored.classes)))


def _r2(scored: Scored) -> float:
    return float(_metrics().r2_score(scored.truth, scored.scores))


_RANKED: tuple[Task, ...] = ("classification", "anomaly")
_NUMBERS: tuple[Task, ...] = ("regression",)

# fmt: off
_ALL = (
    Measure(name="accuracy", title="accuracy", share=True, decides=True,
            function=lambda scored: _metrics().accuracy_score(scored.truth, scored.decided)),
    Measure(name="auc", ranks=True, title="AUC", tasks=_RANKED, function=_auc),
    Measure(name="average_precision", ranks=True, title="average precision", tasks=_RANKED,
            function=_average_precision),
    Measure(name="ks", ranks=True, title="KS", tasks=_RANKED, function=_ks),
    Measure(name="gini", ranks=True, title="Gini", tasks=_RANKED,
            function=lambda scored: 2 * _auc(scored) - 1),
    Measure(name="balanced_accuracy", title="balanced accuracy", share=True, decides=True,
            function=_balanced),
    Measure(name="f1", title="F1", decides=True, function=_f1),
    Measure(name="brier", title="Brier score", higher_is_better=False, function=_brier),
    Measure(name="log_loss", title="log loss", higher_is_better=False, function=_log_loss),
    Measure(name="r2", title="R2", tasks=_NUMBERS, function=_r2),
    Measure(name="mae", title="MAE", tasks=_NUMBERS, higher_is_better=False,
            function=lambda scored: _metrics().mean_absolute_error(scored.truth, scored.scores)),
    Measure(name="rmse", title="RMSE", tasks=_NUMBERS, higher_is_better=False,
            function=lambda scored: math.sqrt(
                _metrics().mean_squared_error(scored.truth, scored.scores))),
)
# fmt: on

MEASURES: Mapping[str, Measure] = MappingProxyType({one.name: one for one in _ALL})
"""By name, in the order in which they are shown."""

ACCURACY = MEASURES["accuracy"]
"""What runs are judged by unless their settings say another."""


def task_of(scored: Scored) -> Task:
    """What these scores are of."""
    if scored.classes:
        return "classification"
    return "regression" if np.issubdtype(scored.truth.dtype, np.floating) else "anomaly"


def names_of(task: str) -> tuple[str, ...]:
    """The measures of one task."""
    return tuple(name for name, one in MEASURES.items() if task in one.tasks)


def find_measure(name: str) -> Measure:
    """The measure of this name.

    Raises:
        ValueError: there is none; it names the nearest.
    """
    if name not in MEASURES:
        raise ValueError(unknown_name(name, MEASURES))
    return MEASURES[name]


def measure_all(scored: Scored) -> dict[str, float]:
    """All measures of the task that these rows define, by name."""
    found = {name: MEASURES[name].of(scored) for name in names_of(task_of(scored))}
    return {name: value for name, value in found.items() if not math.isnan(value)}


def undefined_in(scored: Scored) -> dict[str, str]:
    """Why, by name, of the measures that these rows do not define."""
    reasons = {name: MEASURES[name].why_not(scored) for name in names_of(task_of(scored))}
    return {name: why for name, why in reasons.items() if why}

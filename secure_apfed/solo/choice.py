"""The best that the active does alone, chosen as it would have to choose: by its own labels.

Run by: whoever measures what help was worth. Test rows only measure; they choose nothing. From few
labels the choice is often not the one that the test rows would have made, so a study that claims a
gain should also name the baseline with the best mean over its seeds, and gain over that one.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from secure_apfed.errors import DataError
from secure_apfed.measures import ACCURACY, Measure, Scored, probabilities_of
from secure_apfed.solo import BASELINES
from secure_apfed.solo.folds import held_out
from secure_apfed.solo.interface import (
    Baseline,
    FloatArray,
    IntArray,
    Predictor,
    SoloTask,
    Together,
    checked_rows,
)
from secure_apfed.solo.kept import fits_kept_meanwhile

__all__ = ["FOLDS", "BaselineResult", "best", "compare"]

FOLDS = 3


@dataclass(frozen=True, kw_only=True)
class BaselineResult:
    """How one baseline did.

    Attributes:
        name, title: of the baseline.
        validation: the measure on held-out labels; None where none could be held out, since every
            class has one, or where they do not define it.
        test: the measure on the test rows; accuracy unless another was asked for.
    """

    name: str
    title: str
    validation: float | None
    test: float


def compare(
    task: SoloTask,
    test_features: ArrayLike,
    test_labels: ArrayLike,
    *,
    baselines: Mapping[str, Baseline] = BASELINES,
    folds: int = FOLDS,
    measure: Measure = ACCURACY,
) -> list[BaselineResult]:
    """Fit every baseline on all labels for the test rows, and on parts of them for the choice.

    All baselines are judged on the same held-out labels, whose rows stay among the unlabelled ones.

    Args:
        task: what the active has.
        test_features: (B, *shape) or flattened.
        test_labels: (B,).
        baselines: by name, in the order in which equals are preferred.
        folds: parts of cross-validation, at least 2; fewer where a class has fewer labels, and from
            400 labels on one of them is used.
        measure: that they are judged by; of a baseline whose scores are no probabilities, those
            that they stand for (`secure_apfed.measures.probabilities_of`).

    Raises:
        DataError: test rows that do not fit the task.
        ModelError: the run's own network diverged or cannot take such rows.
    """
    if folds < 2:
        raise DataError(f"solo: labels are held out in at least 2 parts, got {folds}")
    x_BF, y_B = _test_rows(task, test_features, test_labels)
    parts = held_out(task.labels, folds, task.seed)
    tasks = [*(task.without(part) for part in parts), task]
    found = []
    with fits_kept_meanwhile():
        for name, one in baselines.items():
            *others, whole = _fitted(one, tasks)
            found.append(
                BaselineResult(
                    name=name,
                    title=one.title,
                    validation=_validation(others, task, parts, measure),
                    test=measure.of(_scored(whole, x_BF, y_B)),
                )
            )
    return found


def best(results: Iterable[BaselineResult], *, measure: Measure = ACCURACY) -> BaselineResult:
    """Return the result with the best validation, by its measure; the first among equals.

    Raises:
        DataError: there is none.
    """
    ranked: Sequence[BaselineResult] = tuple(results)
    if not ranked:
        raise DataError("solo: there is no baseline to choose from")
    return max(ranked, key=lambda one: measure.rank(one.validation))


def _fitted(one: Baseline, tasks: Sequence[SoloTask]) -> Sequence[Predictor]:
    if isinstance(one, Together):
        return one.fit_together(tasks)
    return [one.fit(task) for task in tasks]


def _validation(
    fitted: Sequence[Predictor], task: SoloTask, parts: list[IntArray], measure: Measure
) -> float | None:
    """The measure on the parts, of each by what was fitted without it."""
    if not parts:
        return None
    said = [
        _scored(one, task.labelled_rows[part], task.labels[part])
        for one, part in zip(fitted, parts, strict=True)
    ]
    value = measure.of(
        Scored(
            truth=np.concatenate([scored.truth for scored in said]),
            scores=np.concatenate([scored.scores for scored in said]),
        )
    )
    return None if math.isnan(value) else value


def _scored(predictor: Predictor, x_BF: FloatArray, y_B: IntArray) -> Scored:
    return Scored(truth=y_B, scores=probabilities_of(predictor.scores(x_BF)))


def _test_rows(
    task: SoloTask, features: ArrayLike, labels: ArrayLike
) -> tuple[FloatArray, IntArray]:
    x_BF, y_B = np.asarray(features, dtype=np.float64), np.asarray(labels, dtype=np.int64)
    if x_BF.ndim > 2 and x_BF.shape[1:] == task.shape:
        x_BF = x_BF.reshape(len(x_BF), -1)
    checked_rows(x_BF, task.shape)
    if y_B.shape != (len(x_BF),):
        raise DataError(f"solo: {len(x_BF)} test rows need as many labels, got shape {y_B.shape}")
    return x_BF, y_B

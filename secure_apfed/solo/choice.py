"""The best that the active does alone, chosen as it would have to choose: by its own labels.

Run by: the active, whose votes have what it chooses as their prior, and whoever measures what help
was worth. Test rows only measure; they choose nothing. From few
labels the choice is often not the one that the test rows would have made, so a study that claims a
gain should also name the baseline with the best mean over its seeds, and gain over that one.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from secure_apfed.errors import DataError, ModelError
from secure_apfed.measures import ACCURACY, Measure, Scored, probabilities_of
from secure_apfed.solo import BASELINES
from secure_apfed.solo.folds import held_out
from secure_apfed.solo.interface import (
    Baseline,
    FloatArray,
    IntArray,
    SoloTask,
    Together,
    checked_rows,
)
from secure_apfed.solo.kept import fits_kept_meanwhile, scored_once

__all__ = ["FOLDS", "BaselineResult", "best", "chosen", "compare"]

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
    found = []
    with fits_kept_meanwhile():
        for name, one in baselines.items():
            found.append(
                BaselineResult(
                    name=name,
                    title=one.title,
                    validation=_validation(one, task, folds, measure),
                    test=measure.of(_scored(one.fit(task).scores(x_BF), y_B)),
                )
            )
    return found


def chosen(task: SoloTask, *, measure: Measure = ACCURACY) -> Baseline:
    """Return the baseline with the best validation, as `compare` and `best` find it.

    One that cannot be fitted with the settings of the run is passed over.
    """
    found = {}
    with fits_kept_meanwhile():
        for name, one in BASELINES.items():
            with suppress(ModelError):
                found[name] = measure.rank(_validation(one, task, FOLDS, measure))
    return BASELINES[max(found, key=found.__getitem__)]


def best(results: Iterable[BaselineResult], *, measure: Measure = ACCURACY) -> BaselineResult:
    """Return the result with the best validation, by its measure; the first among equals.

    Raises:
        DataError: there is none.
    """
    ranked: Sequence[BaselineResult] = tuple(results)
    if not ranked:
        raise DataError("solo: there is no baseline to choose from")
    return max(ranked, key=lambda one: measure.rank(one.validation))


def _validation(one: Baseline, task: SoloTask, folds: int, measure: Measure) -> float | None:
    """The measure on the labels held out, of each part by what was fitted without it."""
    parts = held_out(task.labels, folds, task.seed)
    if not parts:
        return None
    scores_nK = scored_once(
        f"without-{len(parts)}-of-{folds}-{one.name}", task, lambda: _out_of_fold(one, task, parts)
    )
    value = measure.of(_scored(scores_nK, task.labels[np.concatenate(parts)]))
    return None if math.isnan(value) else value


def _out_of_fold(one: Baseline, task: SoloTask, parts: list[IntArray]) -> FloatArray:
    """Scores of the labelled rows of the parts, one part after the other."""
    tasks = [task.without(part) for part in parts]
    # With the whole task, too: it takes hardly longer, and is asked for next.
    fitted = (
        one.fit_together([*tasks, task])
        if isinstance(one, Together)
        else [one.fit(without) for without in tasks]
    )
    return np.concatenate([
        predictor.scores(task.labelled_rows[part])
        for predictor, part in zip(fitted, parts, strict=False)
    ])  # fmt: skip


def _scored(scores_BK: FloatArray, y_B: IntArray) -> Scored:
    return Scored(truth=y_B, scores=probabilities_of(scores_BK))


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

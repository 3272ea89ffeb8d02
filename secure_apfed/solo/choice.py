"""The best that the active does alone, chosen as it would have to choose: by its own labels.

Run by: whoever measures what help was worth. Test rows only measure; they choose nothing. From few
labels the choice is often not the one that the test rows would have made, so a study that claims a
gain should also name the baseline with the best mean over its seeds, and gain over that one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from secure_apfed.errors import DataError
from secure_apfed.solo import BASELINES
from secure_apfed.solo.folds import held_out
from secure_apfed.solo.interface import (
    Baseline,
    FloatArray,
    IntArray,
    Predictor,
    SoloTask,
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
        validation: accuracy on held-out labels, 0 to 1; None where none could be held out, since
            every class has one.
        test: accuracy on the test rows, 0 to 1.
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

    Raises:
        DataError: test rows that do not fit the task.
        ModelError: the run's own network diverged or cannot take such rows.
    """
    if folds < 2:
        raise DataError(f"solo: labels are held out in at least 2 parts, got {folds}")
    x_BF, y_B = _test_rows(task, test_features, test_labels)
    parts = held_out(task.labels, folds, task.seed)
    with fits_kept_meanwhile():
        return [
            BaselineResult(
                name=name,
                title=one.title,
                validation=_validation(one, task, parts),
                test=float(_hits(one.fit(task), x_BF, y_B).mean()),
            )
            for name, one in baselines.items()
        ]


def best(results: Iterable[BaselineResult]) -> BaselineResult:
    """Return the result with the highest validation accuracy; the first among equals.

    Raises:
        DataError: there is none.
    """
    ranked: Sequence[BaselineResult] = tuple(results)
    if not ranked:
        raise DataError("solo: there is no baseline to choose from")
    return max(ranked, key=lambda one: -1.0 if one.validation is None else one.validation)


def _validation(one: Baseline, task: SoloTask, parts: list[IntArray]) -> float | None:
    if not parts:
        return None
    hits = [
        _hits(one.fit(task.without(part)), task.labelled_rows[part], task.labels[part])
        for part in parts
    ]
    return float(np.concatenate(hits).mean())


def _hits(predictor: Predictor, x_BF: FloatArray, y_B: IntArray) -> FloatArray:
    return np.asarray(predictor.scores(x_BF).argmax(axis=1) == y_B, dtype=np.float64)


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

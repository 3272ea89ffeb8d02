"""Ridge regression to the labels' indicators, on x and random cosine features of it.

Source: A. Rahimi, B. Recht, NeurIPS 2007 (the features); lambda by the leave-one-out error.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from secure_apfed.solo.interface import FloatArray, IntArray, SoloTask
from secure_apfed.solo.scikit import scale_of

__all__ = ["Ridge", "RidgeStudent", "ridge_student"]

_COSINES = 300
_LAMBDAS = tuple(10.0**power for power in range(-3, 4))


@dataclass(frozen=True)
class RidgeStudent:
    """A fitted scaler, random features and regression."""

    scale: Any
    cosines: Any
    ridge: Any

    def scores(self, features_BF: FloatArray) -> FloatArray:
        columns_BC = _columns(self.scale.transform(features_BF), self.cosines)
        return np.asarray(self.ridge.predict(columns_BC), dtype=np.float64)


def ridge_student(task: SoloTask, rows: IntArray, targets_RK: FloatArray) -> RidgeStudent:
    """Return the regression from the features of the task's `rows` to `targets_RK`."""
    from sklearn.kernel_approximation import RBFSampler
    from sklearn.linear_model import RidgeCV

    scale = scale_of(task)
    scaled_RF = scale.transform(task.features[rows])
    width = 1 / scaled_RF.shape[1]
    cosines = RBFSampler(gamma=width / 2, n_components=_COSINES, random_state=task.state("cosines"))
    cosines.fit(scaled_RF)
    ridge = RidgeCV(alphas=_LAMBDAS).fit(_columns(scaled_RF, cosines), targets_RK)
    return RidgeStudent(scale, cosines, ridge)


def _columns(scaled_BF: FloatArray, cosines: Any) -> FloatArray:
    return np.hstack([scaled_BF / np.sqrt(scaled_BF.shape[1]), cosines.transform(scaled_BF)])


class Ridge:
    """On the labelled rows only."""

    name, title = "ridge", "Ridge on random features"

    def fit(self, task: SoloTask) -> RidgeStudent:
        return ridge_student(task, task.labelled, task.indicators)

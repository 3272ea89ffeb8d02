"""Label spreading over a graph of the nearest of all training rows.

Source: D. Zhou et al., NeurIPS 2004, as in scikit-learn. It labels the rows of its graph; rows to
predict are not among them, so their labels come from neighbours or from a student.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from secure_apfed.solo.interface import FloatArray, SoloTask
from secure_apfed.solo.ridge import RidgeStudent, ridge_student

__all__ = ["Neighbours", "Spreading", "SpreadingStudent"]

_NEIGHBOURS = 10
_ALPHA = 0.2
_ROUNDS = 1_000


@dataclass(frozen=True)
class Neighbours:
    """The mean label of the nearest training rows that the labels reached."""

    nearest: Any
    labels: FloatArray = field(repr=False)

    def scores(self, features_BF: FloatArray) -> FloatArray:
        found = self.nearest.kneighbors(features_BF, return_distance=False)
        return np.asarray(self.labels[found].mean(axis=1), dtype=np.float64)


class Spreading:
    """Rows to predict take the mean label of their nearest training rows."""

    name, title = "label_spreading", "Label spreading"

    def fit(self, task: SoloTask) -> Neighbours:
        from sklearn.neighbors import NearestNeighbors

        labels_NK = _spread(task)
        reached_RK = labels_NK[labels_NK.any(axis=1)]
        nearest = NearestNeighbors(n_neighbors=min(_NEIGHBOURS, len(reached_RK)))
        nearest.fit(task.features[labels_NK.any(axis=1)])
        return Neighbours(nearest, reached_RK)


class SpreadingStudent:
    """A ridge regression learns the labels that were spread."""

    name, title = "label_spreading_ridge", "Label spreading, ridge student"

    def fit(self, task: SoloTask) -> RidgeStudent:
        labels_NK = _spread(task)
        reached = np.flatnonzero(labels_NK.any(axis=1))
        return ridge_student(task, reached, labels_NK[reached])


def _spread(task: SoloTask) -> FloatArray:
    """Return labels (N, K) of all training rows; 0 in rows that no label reached."""
    from sklearn.semi_supervised import LabelSpreading

    labels_N = np.full(len(task.features), -1)
    labels_N[task.labelled] = task.labels
    model = LabelSpreading(
        kernel="knn",
        n_neighbors=min(_NEIGHBOURS, len(labels_N) - 1),
        alpha=_ALPHA,
        max_iter=_ROUNDS,
    ).fit(task.features, labels_N)
    labels_NK = np.zeros((len(labels_N), task.classes))
    labels_NK[:, model.classes_] = model.label_distributions_
    return labels_NK

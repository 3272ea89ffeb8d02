"""Classifiers of scikit-learn on the active's standardised features.

All training rows set the scale, unlabelled ones too. A classifier knows the classes that it saw;
the others get the score 0.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from secure_apfed.solo.folds import held_out
from secure_apfed.solo.interface import FloatArray, IntArray, SoloTask

__all__ = ["Classifier", "best_strength", "logistic", "scale_of", "table_of"]

_STRENGTHS = (0.01, 0.1, 1.0, 10.0, 100.0)
_FOLDS = 3
_STEPS = 5_000


@dataclass(frozen=True)
class Classifier:
    """A fitted scaler, a fitted classifier with probabilities, and how many classes there are."""

    scale: Any
    model: Any
    classes: int

    def scores(self, features_BF: FloatArray) -> FloatArray:
        return table_of(self.model, self.scale.transform(features_BF), self.classes)


def table_of(model: Any, scaled_BF: FloatArray, classes: int) -> FloatArray:
    """Return probabilities (B, K), 0 for classes that the model never saw."""
    table_BK = np.zeros((len(scaled_BF), classes))
    table_BK[:, model.classes_] = model.predict_proba(scaled_BF)
    return table_BK


def scale_of(task: SoloTask) -> Any:
    """Return the scaler to mean 0 and variance 1 over all training rows."""
    from sklearn.preprocessing import StandardScaler

    return StandardScaler().fit(task.features)


def logistic(strength: float) -> Any:
    """Return an unfitted logistic regression; the larger `strength` (C), the less it is held."""
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(C=strength, max_iter=_STEPS)


def best_strength(scaled_nF: FloatArray, labels_n: IntArray, seed: int) -> float:
    """Return the C with the largest likelihood of held-out labels; 1 where none can be held out."""
    rows, labels = np.asarray(scaled_nF, np.float64), np.asarray(labels_n, np.int64)
    return _best_strength(rows.tobytes(), labels.tobytes(), seed)


@lru_cache(maxsize=4)
def _best_strength(rows: bytes, labels: bytes, seed: int) -> float:
    """Several baselines ask for the same, one after the other."""
    labels_n = np.frombuffer(labels, dtype=np.int64)
    scaled_nF = np.frombuffer(rows, dtype=np.float64).reshape(len(labels_n), -1)
    parts = held_out(labels_n, _FOLDS, seed)
    if not parts:
        return 1.0
    return max(_STRENGTHS, key=lambda C: _likelihood(C, scaled_nF, labels_n, parts))


def _likelihood(
    strength: float, scaled_nF: FloatArray, labels_n: IntArray, parts: list[IntArray]
) -> float:
    total = 0.0
    for part in parts:
        kept = np.setdiff1d(np.arange(len(labels_n)), part)
        model = logistic(strength).fit(scaled_nF[kept], labels_n[kept])
        table_BK = table_of(model, scaled_nF[part], int(labels_n.max()) + 1)
        total += float(np.log(table_BK[np.arange(len(part)), labels_n[part]] + 1e-12).sum())
    return total

"""Baselines of scikit-learn on the active's own features.

All training rows set the scale, unlabelled ones too. A classifier knows the classes that it saw;
the others get the score 0.

Letters: N training rows, n of them with labels, R of them that teach, B rows to predict, F features
of a row, C of its expansion, K classes.
"""

from functools import lru_cache
from typing import Any

import numpy as np

from secure_apfed.solo.interface import (
    Baseline,
    FloatArray,
    IntArray,
    Predictor,
    SoloTask,
    held_out,
)

_STRENGTHS = (0.01, 0.1, 1.0, 10.0, 100.0)
_FOLDS = 3
_STEPS = 5_000
_SURE = 0.9
_MOST_STRENGTH = 1.0
"""Of the regression: a looser one is sure of everything at once."""
_TEACHING_ROUNDS = 10
_MOST_IN_A_LEAF = 20
_BOOSTING_ROUNDS = 60
_LEAVES = 8
_COSINES = 300
_LAMBDAS = tuple(10.0**power for power in range(-3, 4))
_NEIGHBOURS = 10
_ALPHA = 0.2
_SPREADING_ROUNDS = 1_000


def classifier(scale: Any, model: Any, classes: int) -> Predictor:
    return Predictor(lambda x_BF: table_of(model, scale.transform(x_BF), classes))


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

    def likelihood(strength: float) -> float:
        total = 0.0
        for part in parts:
            kept = np.setdiff1d(np.arange(len(labels_n)), part)
            model = logistic(strength).fit(scaled_nF[kept], labels_n[kept])
            table_BK = table_of(model, scaled_nF[part], int(labels_n.max()) + 1)
            total += float(np.log(table_BK[np.arange(len(part)), labels_n[part]] + 1e-12).sum())
        return total

    return max(_STRENGTHS, key=likelihood)


class Logistic(Baseline):
    """On the labelled rows, its strength chosen by cross-validation of them."""

    name, title = "logistic", "Logistic regression"

    def fit(self, task: SoloTask) -> Predictor:
        scale = scale_of(task)
        scaled_nF = scale.transform(task.labelled_rows)
        strength = best_strength(scaled_nF, task.labels, task.seed)
        return classifier(scale, logistic(strength).fit(scaled_nF, task.labels), task.classes)


class SelfTraining(Baseline):
    """Logistic regression labels the rows that it is sure of, and learns from them.

    Source: D. Yarowsky, ACL 1995, as in scikit-learn.
    """

    name, title = "self_training", "Self-training"

    def fit(self, task: SoloTask) -> Predictor:
        from sklearn.semi_supervised import SelfTrainingClassifier

        scale = scale_of(task)
        scaled_NF = scale.transform(task.features)
        strength = best_strength(scaled_NF[task.labelled], task.labels, task.seed)
        model = logistic(min(strength, _MOST_STRENGTH))
        if len(task.labelled) == len(scaled_NF):
            model.fit(scaled_NF[task.labelled], task.labels)
            return classifier(scale, model, task.classes)
        labels_N = np.full(len(scaled_NF), -1)
        labels_N[task.labelled] = task.labels
        taught = SelfTrainingClassifier(model, threshold=_SURE, max_iter=_TEACHING_ROUNDS)
        return classifier(scale, taught.fit(scaled_NF, labels_N), task.classes)


class GradientBoosting(Baseline):
    """Trees whose leaves hold n / (4 K) rows or more, up to 20: few would never be cut else."""

    name, title = "gradient_boosting", "Gradient boosting"

    def fit(self, task: SoloTask) -> Predictor:
        from sklearn.ensemble import HistGradientBoostingClassifier

        scale = scale_of(task)
        least = min(max(len(task.labels) // (4 * task.classes), 1), _MOST_IN_A_LEAF)
        model = HistGradientBoostingClassifier(
            max_iter=_BOOSTING_ROUNDS,
            max_leaf_nodes=_LEAVES,
            min_samples_leaf=least,
            early_stopping=False,
            random_state=task.state(self.name),
        )
        return classifier(
            scale, model.fit(scale.transform(task.labelled_rows), task.labels), task.classes
        )


def _ridge(task: SoloTask, rows: IntArray, targets_RK: FloatArray) -> Predictor:
    """Return the regression from the features of the task's `rows` to `targets_RK`."""
    from sklearn.kernel_approximation import RBFSampler
    from sklearn.linear_model import RidgeCV

    scale = scale_of(task)
    scaled_RF = scale.transform(task.features[rows])
    width = 1 / scaled_RF.shape[1]
    cosines = RBFSampler(gamma=width / 2, n_components=_COSINES, random_state=task.state("cosines"))
    cosines.fit(scaled_RF)
    ridge = RidgeCV(alphas=_LAMBDAS).fit(_columns(scaled_RF, cosines), targets_RK)

    def scores(features_BF: FloatArray) -> FloatArray:
        columns_BC = _columns(scale.transform(features_BF), cosines)
        return np.asarray(ridge.predict(columns_BC), dtype=np.float64)

    return Predictor(scores)


def _columns(scaled_BF: FloatArray, cosines: Any) -> FloatArray:
    return np.hstack([scaled_BF / np.sqrt(scaled_BF.shape[1]), cosines.transform(scaled_BF)])


class Ridge(Baseline):
    """To the labels' indicators, on x and random cosine features of the labelled rows.

    Source: A. Rahimi, B. Recht, NeurIPS 2007 (the features); lambda by the leave-one-out error.
    """

    name, title = "ridge", "Ridge on random features"

    def fit(self, task: SoloTask) -> Predictor:
        return _ridge(task, task.labelled, task.indicators)


class Spreading(Baseline):
    """Label spreading over a graph of the nearest of all training rows.

    Source: D. Zhou et al., NeurIPS 2004, as in scikit-learn. It labels the rows of its graph; rows
    to predict, which are not among them, take the mean label of their nearest training rows.
    """

    name, title = "label_spreading", "Label spreading"

    def fit(self, task: SoloTask) -> Predictor:
        from sklearn.neighbors import NearestNeighbors

        labels_NK = _spread(task)
        reached_RK = labels_NK[labels_NK.any(axis=1)]
        nearest = NearestNeighbors(n_neighbors=min(_NEIGHBOURS, len(reached_RK)))
        nearest.fit(task.features[labels_NK.any(axis=1)])

        def scores(features_BF: FloatArray) -> FloatArray:
            found = nearest.kneighbors(features_BF, return_distance=False)
            return np.asarray(reached_RK[found].mean(axis=1), dtype=np.float64)

        return Predictor(scores)


class SpreadingStudent(Baseline):
    """A ridge regression learns the labels that were spread."""

    name, title = "label_spreading_ridge", "Label spreading, ridge student"

    def fit(self, task: SoloTask) -> Predictor:
        labels_NK = _spread(task)
        reached = np.flatnonzero(labels_NK.any(axis=1))
        return _ridge(task, reached, labels_NK[reached])


def _spread(task: SoloTask) -> FloatArray:
    """Return labels (N, K) of all training rows; 0 in rows that no label reached."""
    from sklearn.semi_supervised import LabelSpreading

    labels_N = np.full(len(task.features), -1)
    labels_N[task.labelled] = task.labels
    model = LabelSpreading(
        kernel="knn",
        n_neighbors=min(_NEIGHBOURS, len(labels_N) - 1),
        alpha=_ALPHA,
        max_iter=_SPREADING_ROUNDS,
    ).fit(task.features, labels_N)
    labels_NK = np.zeros((len(labels_N), task.classes))
    labels_NK[:, model.classes_] = model.label_distributions_
    return labels_NK

"""Baselines of scikit-learn on the active's own features.

All training rows set the scale, unlabelled ones too. A classifier knows the classes that it saw;
the others get the score 0.

Letters: N training rows, n of them with labels, R of them that teach, B rows to predict, F features
of a row, C of its expansion, K classes.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from secure_apfed.labellers import Spreading as LabelSpreading
from secure_apfed.labellers.kinds import (
    graph_of,
    nearest_of,
    rows_of_norm_one,
    scatter_columns,
    spread_without_own,
)
from secure_apfed.solo.fitted import (
    LEAST,
    UNSEEN,
    Cosines,
    FittedModel,
    ModelKind,
    Nearest,
    assemble_trees,
    build_regression_layers,
    convert_forest,
    unscale_layer,
)
from secure_apfed.solo.interface import (
    ENOUGH_LABELS,
    Baseline,
    FloatArray,
    IntArray,
    Predictor,
    SoloTask,
    score_once,
    split_folds,
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
_NEAR = (5, 10, 20)
_ALPHAS = (0.2, 0.5, 0.8)
_BLIND = 0.1
"""How far a row's labels may be wrong at random, so that one that is sure does not decide."""
_TREES = 200
_BOOSTING_PARTS = 2


def build_classifier(
    scale: Any, model: Any, classes: int, kind: Callable[[], ModelKind]
) -> Predictor:
    return Predictor(
        lambda x_BF: table_of(model, scale.transform(x_BF), classes), lambda: FittedModel(kind())
    )


def build_regression(scale: Any, model: Any, classes: int) -> Predictor:
    """Return the predictor of a fitted logistic regression on standardised rows."""

    def build_layers() -> ModelKind:
        return build_regression_layers(
            scale, model.coef_, model.intercept_, model.classes_, classes
        )

    return build_classifier(scale, model, classes, build_layers)


def table_of(model: Any, scaled_BF: FloatArray, classes: int) -> FloatArray:
    """Return probabilities (B, K), 0 for classes that the model never saw."""
    table_BK = np.zeros((len(scaled_BF), classes))
    table_BK[:, model.classes_] = model.predict_proba(scaled_BF)
    return table_BK


def scale_of(task: SoloTask) -> Any:
    """Return the scaler to mean 0 and variance 1 over all training rows."""
    from sklearn.preprocessing import StandardScaler

    return StandardScaler().fit(task.features)


def make_logistic_regression(strength: float) -> Any:
    """Return an unfitted logistic regression; the larger `strength` (C), the less it is held."""
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(C=strength, max_iter=_STEPS)


def best_strength(scaled_nF: FloatArray, labels_n: IntArray, seed: int) -> float:
    """Return the C with the largest likelihood of held-out labels; 1 where none can be held out."""
    rows = np.asarray(scaled_nF, np.float64)
    labels = np.asarray(labels_n, np.int64)
    return _best_strength(rows.tobytes(), labels.tobytes(), seed)


@lru_cache(maxsize=4)
def _best_strength(rows: bytes, labels: bytes, seed: int) -> float:
    """Choose the strength of a regression; cached, since several baselines ask for the same."""
    labels_n = np.frombuffer(labels, dtype=np.int64)
    scaled_nF = np.frombuffer(rows, dtype=np.float64).reshape(len(labels_n), -1)
    parts = split_folds(labels_n, _FOLDS, seed)
    if not parts:
        return 1.0

    def compute_likelihood(strength: float) -> float:
        total = 0.0
        for part in parts:
            fitted = np.setdiff1d(np.arange(len(labels_n)), part)
            model = make_logistic_regression(strength).fit(scaled_nF[fitted], labels_n[fitted])
            table_BK = table_of(model, scaled_nF[part], int(labels_n.max()) + 1)
            total += float(np.log(table_BK[np.arange(len(part)), labels_n[part]] + 1e-12).sum())
        return total

    return max(_STRENGTHS, key=compute_likelihood)


class Logistic(Baseline):
    """A logistic regression on the labelled rows, its strength chosen by cross-validation of
    them.
    """

    name = "logistic"
    title = "Logistic regression"

    def fit(self, task: SoloTask) -> Predictor:
        scale = scale_of(task)
        scaled_nF = scale.transform(task.labelled_rows)
        strength = best_strength(scaled_nF, task.labels, task.seed)
        return build_regression(
            scale, make_logistic_regression(strength).fit(scaled_nF, task.labels), task.classes
        )


class SelfTraining(Baseline):
    """A logistic regression that labels the rows that it is sure of, and learns from them.

    Source: D. Yarowsky, ACL 1995, as in scikit-learn.
    """

    name = "self_training"
    title = "Self-training"

    def fit(self, task: SoloTask) -> Predictor:
        from sklearn.semi_supervised import SelfTrainingClassifier

        scale = scale_of(task)
        scaled_NF = scale.transform(task.features)
        strength = best_strength(scaled_NF[task.labelled], task.labels, task.seed)
        model = make_logistic_regression(min(strength, _MOST_STRENGTH))
        if len(task.labelled) == len(scaled_NF):
            return build_regression(
                scale, model.fit(scaled_NF[task.labelled], task.labels), task.classes
            )
        labels_N = np.full(len(scaled_NF), -1)
        labels_N[task.labelled] = task.labels
        classifier = SelfTrainingClassifier(model, threshold=_SURE, max_iter=_TEACHING_ROUNDS)
        return build_regression(scale, classifier.fit(scaled_NF, labels_N).estimator_, task.classes)


class ExtraTrees(Baseline):
    """A forest of trees that are cut at random.

    Source: P. Geurts, D. Ernst, L. Wehenkel, Machine Learning 63, 2006, as in scikit-learn.
    """

    name = "extra_trees"
    title = "Extra trees"

    def fit(self, task: SoloTask) -> Predictor:
        from sklearn.ensemble import ExtraTreesClassifier

        scale = scale_of(task)
        forest = ExtraTreesClassifier(_TREES, random_state=task.derive_random_state(self.name))
        forest.fit(scale.transform(task.labelled_rows), task.labels)

        def build_trees() -> ModelKind:
            values = [
                np.zeros((tree.tree_.node_count, task.classes)) for tree in forest.estimators_
            ]
            for values_VK, tree in zip(values, forest.estimators_, strict=True):
                values_VK[:, forest.classes_] = tree.tree_.value[:, 0]
            return convert_forest(forest, values, task.classes, scale)

        return build_classifier(scale, forest, task.classes, build_trees)


class GradientBoosting(Baseline):
    """A boosting of trees whose leaves hold n / (4 K) rows or more, up to 20: few would never be
    cut else.

    It stops after the number of rounds with the best held-out log-likelihood.
    """

    name = "gradient_boosting"
    title = "Gradient boosting"

    def fit(self, task: SoloTask) -> Predictor:
        scale = scale_of(task)
        scaled_nF = scale.transform(task.labelled_rows)
        labels_n = task.labels
        loss_R = np.zeros(_BOOSTING_ROUNDS)
        for part in split_folds(labels_n, _BOOSTING_PARTS, task.seed):
            fitted = np.setdiff1d(np.arange(len(labels_n)), part)
            model = self._fit_booster(task, scaled_nF[fitted], labels_n[fitted], _BOOSTING_ROUNDS)
            place = np.searchsorted(model.classes_, labels_n[part])
            stages = model.staged_predict_proba(scaled_nF[part])
            loss_R -= [
                np.log(shares_BK[np.arange(len(part)), place] + LEAST).sum() for shares_BK in stages
            ]
        rounds = int(loss_R.argmin()) + 1 if loss_R.any() else _BOOSTING_ROUNDS
        model = self._fit_booster(task, scaled_nF, labels_n, rounds)
        return build_classifier(
            scale, model, task.classes, lambda: self._build_trees(model, scale, task)
        )

    def _fit_booster(
        self, task: SoloTask, scaled_nF: FloatArray, labels_n: IntArray, rounds: int
    ) -> Any:
        from sklearn.ensemble import HistGradientBoostingClassifier

        least = min(max(len(task.labels) // (4 * task.classes), 1), _MOST_IN_A_LEAF)
        model = HistGradientBoostingClassifier(
            max_iter=rounds,
            max_leaf_nodes=_LEAVES,
            min_samples_leaf=least,
            early_stopping=False,
            random_state=task.derive_random_state(self.name),
        )
        return model.fit(scaled_nF, labels_n)

    @staticmethod
    def _build_trees(model: Any, scale: Any, task: SoloTask) -> ModelKind:
        """Return the trees of a fitted model; two classes have one tree a round, of the second."""
        seen = model.classes_
        trees = []
        bias = np.full(task.classes, UNSEEN)
        bias[seen] = (
            np.append(0.0, model._baseline_prediction)
            if len(seen) == 2
            else (model._baseline_prediction.ravel())
        )
        for round_trees in model._predictors:
            for index, tree in enumerate(round_trees):
                nodes = tree.nodes
                values_VK = np.zeros((len(tree.nodes), task.classes))
                values_VK[:, seen[1] if len(round_trees) == 1 else seen[index]] = nodes["value"]
                leaf = nodes["is_leaf"].astype(bool)
                left, right = (nodes[side].astype(np.int64) for side in ("left", "right"))
                trees.append(
                    {
                        "feature": nodes["feature_idx"],
                        "threshold": nodes["num_threshold"],
                        "left": np.where(leaf, -1, left),
                        "right": np.where(leaf, -1, right),
                        "values": values_VK,
                    }
                )
        return assemble_trees(
            trees, bias=bias, raw=True, single=False, features=len(scale.mean_), scale=scale
        )


def fit_ridge(task: SoloTask, rows: IntArray, targets_RK: FloatArray) -> Predictor:
    """Return the regression from the features of the task's `rows`, (R,), to `targets_RK`."""
    return fit_ridges(task, rows, [targets_RK])[0]


def fit_ridges(task: SoloTask, rows: IntArray, targets: Sequence[FloatArray]) -> list[Predictor]:
    """Return a regression from the features of the task's `rows`, (R,), to each of the targets.

    They share their strength, which leave-one-out errors of all choose together.

    Args:
        targets: each (R, K).
    """
    from sklearn.kernel_approximation import RBFSampler
    from sklearn.linear_model import RidgeCV

    scale = scale_of(task)
    scaled_RF = scale.transform(task.features[rows])
    width = 1 / scaled_RF.shape[1]
    cosines = RBFSampler(
        gamma=width / 2, n_components=_COSINES, random_state=task.derive_random_state("cosines")
    )
    cosines.fit(scaled_RF)
    ridge = RidgeCV(alphas=_LAMBDAS).fit(_stack_columns(scaled_RF, cosines), np.hstack(targets))
    weights = np.split(np.atleast_2d(ridge.coef_), len(targets))
    biases = np.split(np.atleast_1d(ridge.intercept_), len(targets))
    return [
        _regression_on_cosines(scale, cosines, weights_KC, bias_K)
        for weights_KC, bias_K in zip(weights, biases, strict=True)
    ]


def _regression_on_cosines(
    scale: Any, cosines: Any, weights_KC: FloatArray, bias_K: FloatArray
) -> Predictor:
    def score_rows(features_BF: FloatArray) -> FloatArray:
        columns_BC = _stack_columns(scale.transform(features_BF), cosines)
        return np.asarray(columns_BC @ weights_KC.T + bias_K, dtype=np.float64)

    def build_network() -> FittedModel:
        features = len(scale.mean_)
        directions_CF, phases_C = unscale_layer(
            scale, cosines.random_weights_.T, cosines.random_offset_
        )
        linear_KF, shifted_K = unscale_layer(
            scale, weights_KC[:, :features] / np.sqrt(features), bias_K
        )
        waves_CK = np.sqrt(2 / _COSINES) * weights_KC[:, features:].T
        return FittedModel(
            Cosines(
                {
                    "directions": directions_CF.T,
                    "phases": phases_C,
                    "linear": linear_KF.T,
                    "waves": waves_CK,
                    "bias": shifted_K,
                }
            )
        )

    return Predictor(score_rows, build_network)


def _stack_columns(scaled_BF: FloatArray, cosines: Any) -> FloatArray:
    return np.hstack([scaled_BF / np.sqrt(scaled_BF.shape[1]), cosines.transform(scaled_BF)])


class Ridge(Baseline):
    """A ridge regression to the labels' indicators, on x and random cosine features of the labelled
    rows.

    Source: A. Rahimi, B. Recht, NeurIPS 2007 (the features); lambda by the leave-one-out error.
    """

    name = "ridge"
    title = "Ridge on random features"

    def fit(self, task: SoloTask) -> Predictor:
        return fit_ridge(task, task.labelled, task.indicators)


class Spreading(Baseline):
    """A baseline that spreads labels over a graph of the nearest of all training rows.

    Source: D. Zhou et al., NeurIPS 2004. It labels the rows of its graph; rows to predict, which
    are not among them, take the mean label of their nearest training rows. Alpha and how many rows
    are near are chosen by leave-one-out prediction of the labels.
    """

    name = "label_spreading"
    title = "Label spreading"

    def fit(self, task: SoloTask) -> Predictor:
        from sklearn.neighbors import NearestNeighbors

        labels_NK = score_once("spread", task, lambda: _spread_labels(task))
        reached_RK = labels_NK[labels_NK.any(axis=1)]
        rows_RF = task.features[labels_NK.any(axis=1)]
        nearest = NearestNeighbors(n_neighbors=min(_NEIGHBOURS, len(reached_RK)))
        nearest.fit(rows_RF)

        def score_rows(features_BF: FloatArray) -> FloatArray:
            neighbours = nearest.kneighbors(features_BF, return_distance=False)
            return np.asarray(reached_RK[neighbours].mean(axis=1), dtype=np.float64)

        def build_network() -> FittedModel:
            neighbour_count = [nearest.n_neighbors]
            return FittedModel(
                Nearest({"rows": rows_RF, "shares": reached_RK, "neighbours": neighbour_count})
            )

        return Predictor(score_rows, build_network)


class SpreadingStudent(Baseline):
    """A ridge regression learns the labels that were spread."""

    name = "label_spreading_ridge"
    title = "Label spreading, ridge student"

    def fit(self, task: SoloTask) -> Predictor:
        labels_NK = score_once("spread", task, lambda: _spread_labels(task))
        reached = np.flatnonzero(labels_NK.any(axis=1))
        return fit_ridge(task, reached, labels_NK[reached])


def _spread_labels(task: SoloTask) -> FloatArray:
    """Return labels (N, K) of all training rows; 0 in rows that no label reached."""
    features_NF = task.features
    known_nK = task.indicators
    nearest_NN = score_once(
        "nearest",
        task,
        lambda: nearest_of(features_NF, max(_NEAR)).astype(np.float64),
        labels=False,
    ).astype(np.int64)
    graphs = {count: graph_of(nearest_NN[:, :count]) for count in _NEAR}
    count = _NEIGHBOURS
    alpha = _ALPHA
    if len(task.labels) < ENOUGH_LABELS:

        def rate_predictions(scores_nK: FloatArray) -> tuple[int, float]:
            """Return how many labels the others predict, and how likely: a large alpha makes shares
            flat.
            """
            right = int((scores_nK.argmax(axis=1) == task.labels)[scores_nK.any(axis=1)].sum())
            scores_nK = (1 - _BLIND) * scores_nK + _BLIND / task.classes
            return right, float(np.log(scores_nK[known_nK > 0]).sum())

        worth = {
            (count, alpha): rate_predictions(scores_nK)
            for count, graph_NN in graphs.items()
            for alpha, scores_nK in zip(
                _ALPHAS, spread_without_own(graph_NN, task.labelled, known_nK, _ALPHAS), strict=True
            )
        }
        count, alpha = max([(count, alpha), *worth], key=worth.__getitem__)
    placed_NK = scatter_columns(len(features_NF), task.labelled, known_nK)
    return rows_of_norm_one(LabelSpreading(alpha=alpha).propagate_columns(graphs[count], placed_NK))

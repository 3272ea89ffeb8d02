"""Baselines of scikit-learn on the active's own features.

All training rows set the scale, unlabelled ones too. A classifier knows the classes that it saw;
the others get the score 0.

Letters: N training rows, n of them with labels, R of them that teach, B rows to predict, F features
of a row, C of its expansion, K classes, T targets of a regression.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from secure_apfed.baselines.fitted import (
    MIN_PROBABILITY,
    UNSEEN_CLASS_SCORE,
    Cosines,
    FittedModel,
    ModelKind,
    Nearest,
    assemble_trees,
    build_regression_layers,
    convert_forest,
    unscale_layer,
)
from secure_apfed.baselines.forests import grow_classifying_trees
from secure_apfed.baselines.interface import (
    ENOUGH_LABELS,
    Baseline,
    BaselineTask,
    FloatArray,
    IntArray,
    Predictor,
    score_once,
    split_folds,
)
from secure_apfed.labellers import Spreading as LabelSpreading
from secure_apfed.labellers.kinds import (
    build_graph,
    divide_by_norm,
    find_nearest_rows,
    find_reach,
    scatter_columns,
)

_INVERSE_PENALTIES = (0.01, 0.1, 1.0, 10.0, 100.0)
"""Values tried of C, the inverse strength of the L2 penalty of a logistic regression."""
_FOLDS = 3
"""Folds by which the strength of a logistic regression is chosen."""
_MAX_ITERATIONS = 5_000
"""Iterations of the optimiser of a logistic regression at most."""
_CONFIDENT_PROBABILITY = 0.9
"""Class probability from which self-training takes a prediction for a label."""
_MAX_INVERSE_PENALTY = 1.0
"""Largest C of the regression in self-training, since a larger one is sure of all rows at once."""
_TEACHING_ROUNDS = 10
"""Largest number of rounds of self-training."""
_MAX_LEAF_ROWS = 20
"""The largest value of a boosted tree's smallest leaf, which has a quarter of a class's rows."""
_BOOSTING_ROUNDS = 60
_MIN_BINS = 2
_MAX_BINS = 255
"""scikit-learn takes no fewer and no more bins of a column."""
_MAX_LEAVES = 8
"""Largest number of leaves of a boosted tree."""
_COSINE_COUNT = 300
"""Number of random cosine features."""
_RIDGE_PENALTIES = tuple(10.0**power for power in range(-3, 4))
"""Penalties of ridge regression, of which one is chosen."""
_MAX_DECOMPOSED = 8
"""Decompositions that a process caches: of whole rows and of three folds, for two tables."""
_MAX_DECOMPOSED_BYTES = 2**23
"""Larger tables are not cached, since they are copied as the cache's key."""
# Label spreading: neighbours and alpha by default, then the values of each that are tried.
_NEIGHBOUR_COUNT = 10
_ALPHA = 0.2
_NEIGHBOUR_CHOICES = (5, 10, 20)
_ALPHA_CHOICES = (0.2, 0.5, 0.8)
_UNIFORM_SHARE = 0.1
"""Share of uniform probabilities mixed into predictions, so that no single error decides."""
_TREE_COUNT = 200
_BOOSTING_FOLDS = 2


def build_classifier(
    scaler: Any, model: Any, classes: int, make_stored_model: Callable[[], ModelKind]
) -> Predictor:
    """Return the predictor of a fitted scikit-learn classifier.

    Args:
        scaler: the fitted scaler of its rows.
        model: the fitted classifier.
        classes: number of classes, also of those that the classifier never saw.
        make_stored_model: makes the same model as tensors, for storage.
    """
    return Predictor(
        lambda x_BF: predict_all_classes(model, scaler.transform(x_BF), classes),
        lambda: FittedModel(make_stored_model()),
    )


def build_regression(scaler: Any, model: Any, classes: int) -> Predictor:
    """Return the predictor of a fitted logistic regression on standardised rows.

    `scaler`: the fitted scaler of its rows. `model`: scikit-learn's fitted regression. `classes`:
    number of classes, also of those that it never saw.
    """

    def build_layers() -> ModelKind:
        """Return the regression as linear layers on unscaled rows."""
        return build_regression_layers(
            scaler, model.coef_, model.intercept_, model.classes_, classes
        )

    return build_classifier(scaler, model, classes, build_layers)


def predict_all_classes(model: Any, scaled_BF: FloatArray, classes: int) -> FloatArray:
    """Return a scikit-learn classifier's probabilities of all K classes for B rows, (B, K).

    Classes that it never saw get 0. `scaled_BF`: the rows, standardised as it reads them.
    """
    probabilities_BK = np.zeros((len(scaled_BF), classes))
    probabilities_BK[:, model.classes_] = model.predict_proba(scaled_BF)
    return probabilities_BK


def fit_scaler(task: BaselineTask) -> Any:
    """Return a scaler to mean 0 and variance 1, fitted to all training rows of the task."""
    from sklearn.preprocessing import StandardScaler

    return StandardScaler().fit(task.features)


def make_logistic_regression(inverse_penalty: float) -> Any:
    """Return an unfitted logistic regression; a larger `inverse_penalty` (C) regularises less."""
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(C=inverse_penalty, max_iter=_MAX_ITERATIONS)


def choose_strength(scaled_nF: FloatArray, labels_n: IntArray, seed: int) -> float:
    """Return the strength C of a logistic regression that validates best.

    It gives held-out labels the largest likelihood. It is 1 if no label can be held out. `seed`:
    random seed of the folds.
    """
    rows = np.asarray(scaled_nF, np.float64)
    labels = np.asarray(labels_n, np.int64)
    return _choose_strength(rows.tobytes(), labels.tobytes(), seed)


@lru_cache(maxsize=4)
def _choose_strength(rows: bytes, labels: bytes, seed: int) -> float:
    """Choose the strength for `choose_strength`; cached, since several baselines need the same.

    `rows`, `labels`: its arrays as bytes, which can be a cache's key.
    """
    labels_n = np.frombuffer(labels, dtype=np.int64)
    scaled_nF = np.frombuffer(rows, dtype=np.float64).reshape(len(labels_n), -1)
    folds = split_folds(labels_n, _FOLDS, seed)
    if not folds:
        return 1.0  # scikit-learn's default

    def compute_likelihood(inverse_penalty: float) -> float:
        """Return the summed log-likelihood of held-out labels at this strength."""
        log_likelihood = 0.0
        for fold in folds:
            training_rows = np.setdiff1d(np.arange(len(labels_n)), fold)
            model = make_logistic_regression(inverse_penalty).fit(
                scaled_nF[training_rows], labels_n[training_rows]
            )
            probabilities_BK = predict_all_classes(model, scaled_nF[fold], int(labels_n.max()) + 1)
            true_probability_B = probabilities_BK[np.arange(len(fold)), labels_n[fold]]
            # A class that the fold's model lacks has probability 0, which has no logarithm.
            log_likelihood += float(np.log(true_probability_B + 1e-12).sum())
        return log_likelihood

    return max(_INVERSE_PENALTIES, key=compute_likelihood)


class Logistic(Baseline):
    """A logistic regression on the labelled rows, whose strength cross-validation chooses."""

    name = "logistic"
    title = "Logistic regression"

    def fit(self, task: BaselineTask) -> Predictor:
        """Fit a logistic regression to the labelled rows."""
        scaler = fit_scaler(task)
        scaled_nF = scaler.transform(task.labelled_features)
        inverse_penalty = choose_strength(scaled_nF, task.labels, task.seed)
        return build_regression(
            scaler,
            make_logistic_regression(inverse_penalty).fit(scaled_nF, task.labels),
            task.classes,
        )


class SelfTraining(Baseline):
    """A logistic regression that labels the rows that it is sure of, and learns from them.

    Source: D. Yarowsky, ACL 1995, as in scikit-learn.
    """

    name = "self_training"
    title = "Self-training"

    def fit(self, task: BaselineTask) -> Predictor:
        """Fit a logistic regression by rounds, each of which adds its own confident labels."""
        from sklearn.semi_supervised import SelfTrainingClassifier

        scaler = fit_scaler(task)
        scaled_NF = scaler.transform(task.features)
        inverse_penalty = choose_strength(scaled_NF[task.labelled_indices], task.labels, task.seed)
        model = make_logistic_regression(min(inverse_penalty, _MAX_INVERSE_PENALTY))
        if len(task.labelled_indices) == len(scaled_NF):  # no row is left to label
            return build_regression(
                scaler, model.fit(scaled_NF[task.labelled_indices], task.labels), task.classes
            )
        labels_N = np.full(len(scaled_NF), -1)  # scikit-learn's mark of an unlabelled row
        labels_N[task.labelled_indices] = task.labels
        classifier = SelfTrainingClassifier(
            model, threshold=_CONFIDENT_PROBABILITY, max_iter=_TEACHING_ROUNDS
        )
        return build_regression(
            scaler, classifier.fit(scaled_NF, labels_N).estimator_, task.classes
        )


class ExtraTrees(Baseline):
    """A forest of extremely randomised trees, whose nodes are split at random thresholds.

    Source: P. Geurts, D. Ernst, L. Wehenkel, Machine Learning 63, 2006, as in scikit-learn.
    """

    name = "extra_trees"
    title = "Extra trees"

    def fit(self, task: BaselineTask) -> Predictor:
        """Fit extremely randomised trees to the labelled rows."""
        scaler = fit_scaler(task)
        trees, seen_classes = grow_classifying_trees(
            scaler.transform(task.labelled_features),
            task.labels,
            tree_count=_TREE_COUNT,
            seed=task.derive_random_state(self.name),
        )

        def build_trees() -> ModelKind:
            """Return the forest as tensors of nodes; a tree with V nodes has values (V, K)."""
            shares_by_tree = [np.zeros((tree.node_count, task.classes)) for tree in trees]
            for shares_VK, tree in zip(shares_by_tree, trees, strict=True):
                shares_VK[:, seen_classes] = tree.value[:, 0]
            return convert_forest(trees, shares_by_tree, task.classes, scaler)

        def score_rows(features_BF: FloatArray) -> FloatArray:
            """Return the mean of the trees' class probabilities, (B, K).

            scikit-learn's forest computes the same, but checks the rows for each tree. S classes
            occur among the labels; all other ones of the K classes get 0.
            """
            rows_BF = scaler.transform(features_BF).astype(np.float32)
            share_sum_BS = np.zeros((len(rows_BF), len(seen_classes)))
            for tree in trees:
                share_sum_BS += tree.predict(rows_BF)
            probabilities_BK = np.zeros((len(rows_BF), task.classes))
            probabilities_BK[:, seen_classes] = share_sum_BS / len(trees)
            return probabilities_BK

        return Predictor(score_rows, lambda: FittedModel(build_trees()))


class GradientBoosting(Baseline):
    """A gradient boosting of trees; held-out log-likelihood chooses the number of rounds.

    With n labels and K classes, leaves have at least n / (4 K) rows, but at most 20 are required.
    With few labels, trees of larger leaves would never be split.
    """

    name = "gradient_boosting"
    title = "Gradient boosting"

    def fit(self, task: BaselineTask) -> Predictor:
        """Choose the number of rounds by held-out log-likelihood, then fit all labelled rows."""
        scaler = fit_scaler(task)
        scaled_nF = scaler.transform(task.labelled_features)
        labels_n = task.labels
        # The held-out loss after each of R rounds, added over all folds.
        loss_R = np.zeros(_BOOSTING_ROUNDS)
        for fold in split_folds(labels_n, _BOOSTING_FOLDS, task.seed):
            training_rows = np.setdiff1d(np.arange(len(labels_n)), fold)
            model = self._fit_booster(
                task, scaled_nF[training_rows], labels_n[training_rows], _BOOSTING_ROUNDS
            )
            true_index = np.searchsorted(model.classes_, labels_n[fold])
            row_range = np.arange(len(fold))
            # `MIN_PROBABILITY` keeps the logarithm of a probability of 0 finite.
            loss_R -= [
                np.log(probabilities_BK[row_range, true_index] + MIN_PROBABILITY).sum()
                for probabilities_BK in model.staged_predict_proba(scaled_nF[fold])
            ]
        # Too few labels give no fold, and so no loss.
        was_validated = loss_R.any()
        best_rounds = int(loss_R.argmin()) + 1 if was_validated else _BOOSTING_ROUNDS
        model = self._fit_booster(task, scaled_nF, labels_n, best_rounds)
        return build_classifier(
            scaler, model, task.classes, lambda: self._build_trees(model, scaler, task)
        )

    def _fit_booster(
        self, task: BaselineTask, scaled_nF: FloatArray, labels_n: IntArray, rounds: int
    ) -> Any:
        """Return trees boosted on these rows for a number of rounds.

        `task`: its number of labels determines the size of leaves. `scaled_nF`: the standardised
        rows. `labels_n`: their labels.
        """
        from sklearn.ensemble import HistGradientBoostingClassifier

        min_leaf_rows = min(max(len(task.labels) // (4 * task.classes), 1), _MAX_LEAF_ROWS)
        # A column has no more values than rows: more bins would be empty, and only cost time.
        max_bins = min(max(len(scaled_nF), _MIN_BINS), _MAX_BINS)
        model = HistGradientBoostingClassifier(
            max_iter=rounds,
            max_bins=max_bins,
            max_leaf_nodes=_MAX_LEAVES,
            min_samples_leaf=min_leaf_rows,
            early_stopping=False,
            random_state=task.derive_random_state(self.name),
        )
        return model.fit(scaled_nF, labels_n)

    @staticmethod
    def _build_trees(model: Any, scaler: Any, task: BaselineTask) -> ModelKind:
        """Return a fitted model's trees as tensors; a tree with V nodes has values (V, K).

        With two classes scikit-learn grows one tree a round, for the second class. `model`: the
        fitted boosting. `scaler`: the fitted scaler of its rows.
        """
        seen_classes = model.classes_
        trees = list[dict[str, Any]]()
        bias = np.full(task.classes, UNSEEN_CLASS_SCORE)
        if len(seen_classes) == 2:
            bias[seen_classes] = np.append(0.0, model._baseline_prediction)
        else:
            bias[seen_classes] = model._baseline_prediction.ravel()
        for round_trees in model._predictors:
            tree_classes = seen_classes[1:] if len(round_trees) == 1 else seen_classes
            trees += [
                _convert_tree(tree.nodes, int(tree_class), class_count=task.classes)
                for tree, tree_class in zip(round_trees, tree_classes, strict=True)
            ]
        return assemble_trees(
            trees,
            bias=bias,
            needs_softmax=True,
            is_float32=False,
            feature_count=len(scaler.mean_),
            scaler=scaler,
        )


def fit_ridge(task: BaselineTask, rows_R: IntArray, targets_RK: FloatArray) -> Predictor:
    """Return a ridge regression from the features of R of the task's rows to K targets each.

    `rows_R`: indices of these rows. `targets_RK`: their targets.
    """
    return fit_ridges(task, rows_R, [targets_RK])[0]


def fit_ridges(
    task: BaselineTask, rows_R: IntArray, targets_by_output: Sequence[FloatArray]
) -> list[Predictor]:
    """Return one ridge regression for each array of targets, from features of the same rows.

    They share one penalty, chosen by the sum of their leave-one-out errors. Their inputs are the
    features and random cosines of them, C columns together. Side by side, all targets are T
    columns.

    `rows_R`: indices of the R rows of the task to fit to. `targets_by_output`: arrays (R, K).
    """
    from sklearn.kernel_approximation import RBFSampler

    scaler = fit_scaler(task)
    scaled_RF = scaler.transform(task.features[rows_R])
    # Squared distances of standardised rows grow with the number of features.
    inverse_width = 1 / scaled_RF.shape[1]
    cosine_sampler = RBFSampler(
        gamma=inverse_width / 2,
        n_components=_COSINE_COUNT,
        random_state=task.derive_random_state("cosines"),
    )
    cosine_sampler.fit(scaled_RF)
    all_weights_TC, all_biases_T = fit_best_ridge(
        _stack_columns(scaled_RF, cosine_sampler), np.hstack(targets_by_output), _RIDGE_PENALTIES
    )
    weights = np.split(all_weights_TC, len(targets_by_output))
    biases = np.split(all_biases_T, len(targets_by_output))
    return [
        _make_cosine_regression(scaler, cosine_sampler, weights_KC, bias_K)
        for weights_KC, bias_K in zip(weights, biases, strict=True)
    ]


def _convert_tree(nodes: Any, tree_class: int, *, class_count: int) -> dict[str, Any]:
    """Return one tree of scikit-learn's boosting as the arrays that `assemble_trees` reads.

    `nodes`: its V nodes, an array with named columns. `tree_class`: the class whose score it adds
    to.
    """
    values_VK = np.zeros((len(nodes), class_count))
    values_VK[:, tree_class] = nodes["value"]
    is_leaf = nodes["is_leaf"].astype(bool)
    return {
        "feature": nodes["feature_idx"],
        "threshold": nodes["num_threshold"],
        "left": np.where(is_leaf, -1, nodes["left"].astype(np.int64)),
        "right": np.where(is_leaf, -1, nodes["right"].astype(np.int64)),
        "values": values_VK,
    }


def fit_best_ridge(
    columns_RC: FloatArray, targets_RT: FloatArray, penalties: Sequence[float]
) -> tuple[FloatArray, FloatArray]:
    """Return weights (T, C) and biases (T,) of ridge regression; its penalty is chosen here.

    The penalty has the least leave-one-out error over all targets. With more rows than columns this
    error follows from the eigenvectors of X^T X, on which rows are projected once (G. Golub, M.
    Heath, G. Wahba, Technometrics 21, 1979, section 2). scikit-learn multiplies all rows by a
    matrix for each penalty, and takes several times as long.

    `columns_RC`: the inputs X, C columns of R rows. `targets_RT`: T numbers to predict for each
    row. `penalties`: the penalties that are tried.
    """
    from sklearn.linear_model import RidgeCV

    row_count, column_count = columns_RC.shape
    if row_count <= column_count:
        # Here scikit-learn is fast: it decomposes X X^T, which is the smaller matrix.
        ridge = RidgeCV(alphas=penalties).fit(columns_RC, targets_RT)
        return np.atleast_2d(ridge.coef_), np.atleast_1d(ridge.intercept_)
    mean_T = targets_RT.mean(axis=0)
    centred_RT = targets_RT - mean_T
    if columns_RC.nbytes > _MAX_DECOMPOSED_BYTES:
        decomposition = _decompose_columns(columns_RC)
    else:
        decomposition = _decompose_cached(columns_RC.tobytes(), columns_RC.shape[1])
    mean_C, eigenvalues_C, eigenvectors_CC, projected_RC = decomposition
    projected_CT = projected_RC.T @ centred_RT
    squared_RC = np.square(projected_RC)

    def compute_error(penalty: float) -> float:
        """Return the mean squared leave-one-out error with this penalty.

        There are R rows, C eigenvectors and T targets. A leave-one-out residual is the residual
        divided by 1 minus the row's leverage.
        """
        inverse_C = 1 / (eigenvalues_C + penalty)
        residual_RT = centred_RT - projected_RC @ (inverse_C[:, None] * projected_CT)
        one_minus_leverage_R = 1 - 1 / row_count - squared_RC @ inverse_C
        return float(np.square(residual_RT / one_minus_leverage_R[:, None]).mean())

    best_penalty = min(penalties, key=compute_error)
    weights_TC = (eigenvectors_CC @ (projected_CT / (eigenvalues_C + best_penalty)[:, None])).T
    return weights_TC, mean_T - weights_TC @ mean_C


@lru_cache(maxsize=_MAX_DECOMPOSED)
def _decompose_cached(columns_as_bytes: bytes, column_count: int) -> tuple[FloatArray, ...]:
    """Return what `_decompose_columns` returns, from a cache.

    Runs of a study that differ only in their messages fit the same own columns to other targets.
    `columns_as_bytes`: the array as bytes, which can be a cache's key. `column_count`: number of
    its columns.
    """
    return _decompose_columns(
        np.frombuffer(columns_as_bytes, dtype=np.float64).reshape(-1, column_count)
    )


def _decompose_columns(columns_RC: FloatArray) -> tuple[FloatArray, ...]:
    """Return the columns' mean, and the eigenvalues and eigenvectors of X^T X, X being centred.

    `columns_RC`: C columns of R rows. The last result is X projected on the eigenvectors, (R, C).
    """
    mean_C = columns_RC.mean(axis=0)
    centred_RC = columns_RC - mean_C
    eigenvalues_C, eigenvectors_CC = np.linalg.eigh(centred_RC.T @ centred_RC)
    return mean_C, eigenvalues_C, eigenvectors_CC, centred_RC @ eigenvectors_CC


def _make_cosine_regression(
    scaler: Any, cosine_sampler: Any, weights_KC: FloatArray, bias_K: FloatArray
) -> Predictor:
    """Return the predictor of a regression on standardised rows and their random cosines.

    `scaler`, `cosine_sampler`: scikit-learn's fitted scaler and sampler of cosines. `weights_KC`,
    `bias_K`: the regression for K classes on the C columns that `_stack_columns` makes.
    """

    def score_rows(features_BF: FloatArray) -> FloatArray:
        """Return scores of K classes for B rows, (B, K)."""
        columns_BC = _stack_columns(scaler.transform(features_BF), cosine_sampler)
        return np.asarray(columns_BC @ weights_KC.T + bias_K, dtype=np.float64)

    return Predictor(
        score_rows, lambda: _build_cosine_network(scaler, cosine_sampler, weights_KC, bias_K)
    )


def _build_cosine_network(
    scaler: Any, cosine_sampler: Any, weights_KC: FloatArray, bias_K: FloatArray
) -> FittedModel:
    """Return the regression of `_make_cosine_regression` as a network that reads unscaled rows.

    The weights C are those of F features, then of W cosines.
    """
    feature_count = len(scaler.mean_)
    # The factors are those of `_stack_columns` and of scikit-learn's cosines.
    feature_weights_KF = weights_KC[:, :feature_count] / np.sqrt(feature_count)
    cosine_weights_KW = weights_KC[:, feature_count:] * np.sqrt(2 / _COSINE_COUNT)
    directions_WF, phases_W = unscale_layer(
        scaler, cosine_sampler.random_weights_.T, cosine_sampler.random_offset_
    )
    unscaled_KF, unscaled_bias_K = unscale_layer(scaler, feature_weights_KF, bias_K)
    return FittedModel(
        Cosines(
            {
                "directions": directions_WF.T,
                "phases": phases_W,
                "linear": unscaled_KF.T,
                "waves": cosine_weights_KW.T,
                "bias": unscaled_bias_K,
            }
        )
    )


def _stack_columns(scaled_BF: FloatArray, cosine_sampler: Any) -> FloatArray:
    """Return the regression's inputs: scaled features beside their random cosines.

    The features are divided by the root of their number, so that a row's norm is about 1.
    """
    return np.hstack([scaled_BF / np.sqrt(scaled_BF.shape[1]), cosine_sampler.transform(scaled_BF)])


class Ridge(Baseline):
    """A ridge regression to one-hot labels, on features and random cosines of the labelled rows.

    Source: A. Rahimi, B. Recht, NeurIPS 2007 (the cosines). The leave-one-out error chooses the
    penalty.
    """

    name = "ridge"
    title = "Ridge on random features"

    def fit(self, task: BaselineTask) -> Predictor:
        """Fit a ridge regression to the one-hot labels."""
        return fit_ridge(task, task.labelled_indices, task.one_hot_labels)


class _SpreadLabels(Baseline):
    """The base of baselines that learn from spread labels."""

    def fit(self, task: BaselineTask) -> Predictor:
        """Fit this task alone."""
        return next(iter(self.fit_together([task])))

    def fit_together(self, tasks: Sequence[BaselineTask]) -> Iterable[Predictor]:
        """Yield each task's predictor, fitted when it is read.

        `tasks`: tasks of the same rows, with different labels. How much labelled rows influence
        each other is computed once for all tasks.
        """
        largest_task = max(tasks, key=lambda task: len(task.labels))
        return (
            self._fit_to_spread(task, _cache_spread_labels(task, largest_task)) for task in tasks
        )

    @abstractmethod
    def _fit_to_spread(self, task: BaselineTask, labels_NK: FloatArray) -> Predictor:
        """Return a predictor fitted to spread labels.

        `labels_NK`: scores of K classes for all N training rows; 0 in rows that no label reached.
        """


class Spreading(_SpreadLabels):
    """A baseline that spreads labels over the nearest-neighbour graph of all training rows.

    Source: D. Zhou et al., NeurIPS 2004. A row to predict is not in the graph; it takes the mean
    label of its nearest training rows. Alpha (the weight of the neighbours) and the number of
    neighbours are chosen by leave-one-out prediction of the labels.
    """

    name = "label_spreading"
    title = "Label spreading"

    def _fit_to_spread(self, task: BaselineTask, labels_NK: FloatArray) -> Predictor:
        """Return a predictor of the mean spread label of a row's nearest training rows.

        `labels_NK`: labels of all N training rows after spreading; 0 in rows that no label reached.
        """
        from sklearn.neighbors import NearestNeighbors

        is_reached_N = labels_NK.any(axis=1)
        reached_labels_RK = labels_NK[is_reached_N]
        rows_RF = task.features[is_reached_N]
        neighbour_index = NearestNeighbors(
            n_neighbors=min(_NEIGHBOUR_COUNT, len(reached_labels_RK))
        )
        neighbour_index.fit(rows_RF)

        def score_rows(features_BF: FloatArray) -> FloatArray:
            """Return the mean label of each row's nearest training rows, (B, K)."""
            nearest_rows = neighbour_index.kneighbors(features_BF, return_distance=False)
            return np.asarray(reached_labels_RK[nearest_rows].mean(axis=1), dtype=np.float64)

        def build_network() -> FittedModel:
            """Return the same model as a network, which contains the training rows."""
            neighbour_count = [neighbour_index.n_neighbors]
            return FittedModel(
                Nearest(
                    {"rows": rows_RF, "shares": reached_labels_RK, "neighbours": neighbour_count}
                )
            )

        return Predictor(score_rows, build_network)


class SpreadingStudent(_SpreadLabels):
    """A ridge regression on the labels that label spreading assigns."""

    name = "label_spreading_ridge"
    title = "Label spreading, ridge student"

    def _fit_to_spread(self, task: BaselineTask, labels_NK: FloatArray) -> Predictor:
        """Fit ridge regression to the spread labels of the rows that a label reached.

        `labels_NK`: labels of all N training rows after spreading; 0 in rows that no label reached.
        """
        reached_rows_R = np.flatnonzero(labels_NK.any(axis=1))
        return fit_ridge(task, reached_rows_R, labels_NK[reached_rows_R])


def _cache_spread_labels(task: BaselineTask, largest_task: BaselineTask) -> FloatArray:
    """Return the spread labels (N, K) of a task's N rows; they are loaded if they are stored.

    `largest_task`: a task of the same rows with at least as many labels.
    """
    return score_once("spread", task, lambda: _spread_labels(task, largest_task))


def _spread_labels(task: BaselineTask, largest_task: BaselineTask) -> FloatArray:
    """Return labels of all N training rows, spread from the n known ones, (N, K).

    Rows that no label reached are 0. With few labels, the number of neighbours and alpha (the
    weight of the neighbours) are chosen by leave-one-out prediction of the labels.

    `largest_task`: a task of the same rows with at least as many labels, whose computation folds of
    the labels share.
    """
    features_NF = task.features
    one_hot_labels_nK = task.one_hot_labels
    nearest_NC = score_once(
        "nearest",
        task,
        lambda: find_nearest_rows(features_NF, max(_NEIGHBOUR_CHOICES)).astype(np.float64),
        needs_labels=False,
    ).astype(np.int64)
    neighbour_count = _NEIGHBOUR_COUNT
    alpha = _ALPHA
    if len(task.labels) < ENOUGH_LABELS:
        neighbour_count, alpha = _choose_spreading(task, largest_task, nearest_NC)
    known_labels_NK = scatter_columns(len(features_NF), task.labelled_indices, one_hot_labels_nK)
    graph_NN = build_graph(nearest_NC[:, :neighbour_count])
    return divide_by_norm(LabelSpreading(alpha=alpha).propagate_columns(graph_NN, known_labels_NK))


def _choose_spreading(
    task: BaselineTask, largest_task: BaselineTask, nearest_NC: IntArray
) -> tuple[int, float]:
    """Return the number of neighbours and the alpha that best predict each label from the others.

    `largest_task`: see `_spread_labels`. `nearest_NC`: the nearest rows of each of N rows.
    """
    one_hot_labels_nK = task.one_hot_labels

    def rate_predictions(scores_nK: FloatArray) -> tuple[int, float]:
        """Return how many labels are predicted correctly, and the log-likelihood of all labels.

        Each of the n labels is predicted from the other ones: K class scores, or 0 if no other
        label reaches its row. The likelihood decides ties; it prefers a small alpha, since a large
        one makes scores uniform.
        """
        is_reached_n = scores_nK.any(axis=1)
        correct_count = int((scores_nK.argmax(axis=1) == task.labels)[is_reached_n].sum())
        # A uniform share keeps the logarithm finite.
        mixed_nK = (1 - _UNIFORM_SHARE) * scores_nK + _UNIFORM_SHARE / task.classes
        return correct_count, float(np.log(mixed_nK[one_hot_labels_nK > 0]).sum())

    # For each number of neighbours (C) and each alpha (A): how much a labelled row's label
    # contributes to another labelled row.
    reach_CAnn = _take_reach(task, largest_task, nearest_NC)
    rating_by_choice = {}
    for neighbour_count, reach_Ann in zip(_NEIGHBOUR_CHOICES, reach_CAnn, strict=True):
        for alpha, reach_nn in zip(_ALPHA_CHOICES, reach_Ann, strict=True):
            scores_nK = divide_by_norm(reach_nn.T @ one_hot_labels_nK)
            rating_by_choice[neighbour_count, alpha] = rate_predictions(scores_nK)
    # The default comes first, so that it wins ties.
    return max([(_NEIGHBOUR_COUNT, _ALPHA), *rating_by_choice], key=rating_by_choice.__getitem__)


def _take_reach(task: BaselineTask, largest_task: BaselineTask, nearest_NC: IntArray) -> FloatArray:
    """Return how much each labelled row's label contributes to each other labelled row.

    The result is (C, A, n, n) for C numbers of neighbours, A values of alpha and n labelled rows.
    It is a part of the same array for `largest_task`, if this task has all labels of `task`, so
    that several tasks share one computation.

    `nearest_NC`: the nearest rows of each of the N rows, nearest first.
    """
    sort_order = np.argsort(largest_task.labelled_indices)
    position_n = np.searchsorted(
        largest_task.labelled_indices, task.labelled_indices, sorter=sort_order
    )
    position_n = sort_order[position_n.clip(max=len(sort_order) - 1)]
    if not np.array_equal(largest_task.labelled_indices[position_n], task.labelled_indices):
        # The other task lacks some of these labels, so this task is computed by itself.
        largest_task = task
        position_n = np.arange(len(task.labelled_indices))
    reach_CAnn = _find_reach(
        nearest_NC.tobytes(), largest_task.labelled_indices.tobytes(), nearest_NC.shape[1]
    )
    return reach_CAnn[:, :, position_n][:, :, :, position_n]


@lru_cache(maxsize=1)
def _find_reach(
    nearest_as_bytes: bytes, labelled_as_bytes: bytes, neighbours_per_row: int
) -> FloatArray:
    """Compute how much each labelled row's label contributes to each other, (C, A, n, n).

    It is cached, since folds of the same labels share it. `nearest_as_bytes`, `labelled_as_bytes`:
    arrays as bytes, which can be a cache's key. `neighbours_per_row`: number of neighbours of each
    row in `nearest_as_bytes`.
    """
    nearest_NC = np.frombuffer(nearest_as_bytes, dtype=np.int64).reshape(-1, neighbours_per_row)
    labelled_n = np.frombuffer(labelled_as_bytes, dtype=np.int64)
    graphs = (
        build_graph(nearest_NC[:, :neighbour_count]) for neighbour_count in _NEIGHBOUR_CHOICES
    )
    return np.stack([find_reach(graph_NN, labelled_n, _ALPHA_CHOICES) for graph_NN in graphs])

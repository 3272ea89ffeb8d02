"""Extremely randomised trees, grown by scikit-learn's builder without its checks of each tree.

Source: P. Geurts, D. Ernst, L. Wehenkel, Machine Learning 63, 2006, as in scikit-learn. Its forests
copy, validate and configure an estimator for every tree. For few labelled rows this takes four
times as long as growing them. The builder below those estimators is not public: where a version
has another one, `grow_trees` takes the forest's own trees. Both grow the same trees, by a test.

Letters: N rows, F features of a row, T targets, K classes.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Tree: TypeAlias = Any
"""scikit-learn's low-level tree: `predict`, `value`, `feature`, `threshold`, `children_left`."""
_ANY_DEPTH = np.iinfo(np.int32).max


def grow_classifying_trees(
    rows_NF: NDArray[Any], labels_N: NDArray[np.int64], *, tree_count: int, seed: int
) -> tuple[list[Tree], NDArray[np.int64]]:
    """Return `tree_count` extremely randomised trees fitted to these labels, and the classes that
    occur.

    The classes are ascending; a tree has one output for each of them, in this order.
    """
    from sklearn.ensemble import ExtraTreesClassifier

    classes, class_index_N = np.unique(labels_N, return_inverse=True)
    forest = ExtraTreesClassifier(tree_count, random_state=seed)
    features_per_split = max(1, int(np.sqrt(rows_NF.shape[1])))
    trees = _grow_trees(
        forest,
        rows_NF,
        class_index_N.reshape(-1, 1),
        class_counts=[len(classes)],
        features_per_split=features_per_split,
    )
    return trees, classes


def grow_regressing_trees(
    rows_NF: NDArray[Any],
    targets_NT: NDArray[Any],
    *,
    tree_count: int,
    min_leaf_rows: int,
    seed: int,
) -> list[Tree]:
    """Return `tree_count` extremely randomised trees fitted to T numeric targets of each row.

    `min_leaf_rows`: smallest number of rows in a leaf.
    """
    from sklearn.ensemble import ExtraTreesRegressor

    forest = ExtraTreesRegressor(tree_count, min_samples_leaf=min_leaf_rows, random_state=seed)
    return _grow_trees(
        forest, rows_NF, targets_NT, class_counts=None, features_per_split=rows_NF.shape[1]
    )


def _grow_trees(
    forest: Any,
    rows_NF: NDArray[Any],
    targets_NT: NDArray[Any],
    *,
    class_counts: Sequence[int] | None,
    features_per_split: int,
) -> list[Tree]:
    """Return the trees that this forest would grow, without its slow checks of the rows.

    scikit-learn's builder is not public. If its version has another builder, the forest itself
    grows the trees.

    Args:
        forest: scikit-learn's forest, not fitted.
        rows_NF: F features of N rows.
        targets_NT: T targets of each row.
        class_counts: number of classes of each target; None: targets are numbers.
        features_per_split: number of features among which a split is chosen.
    """
    try:
        return _build_trees(
            forest,
            rows_NF,
            targets_NT,
            class_counts=class_counts,
            features_per_split=features_per_split,
        )
    except (ImportError, AttributeError, TypeError):  # another version's builder
        forest.fit(rows_NF, targets_NT[:, 0] if class_counts is not None else targets_NT)
        return [estimator.tree_ for estimator in forest.estimators_]


def _build_trees(
    forest: Any,
    rows_NF: NDArray[Any],
    targets_NT: NDArray[Any],
    *,
    class_counts: Sequence[int] | None,
    features_per_split: int,
) -> list[Tree]:
    """Build each tree as the forest does, from the same random numbers.

    Args:
        forest: scikit-learn's forest, not fitted.
        rows_NF: F features of N rows.
        targets_NT: T targets of each row.
        class_counts: number of classes of each target; None: targets are numbers.
        features_per_split: number of features among which a split is chosen.
    """
    from sklearn.tree._criterion import MSE, Gini
    from sklearn.tree._splitter import RandomSplitter
    from sklearn.tree._tree import DepthFirstTreeBuilder
    from sklearn.tree._tree import Tree as TreeOfNodes

    float32_NF = np.ascontiguousarray(rows_NF, dtype=np.float32)
    float64_NT = np.ascontiguousarray(targets_NT, dtype=np.float64)
    row_count, feature_count = float32_NF.shape
    target_count = float64_NT.shape[1]
    min_leaf_rows = forest.min_samples_leaf
    class_counts_T = np.array(
        [1] * target_count if class_counts is None else class_counts, dtype=np.intp
    )
    forest_state = np.random.RandomState(forest.random_state)
    trees: list[Tree] = []
    for _ in range(forest.n_estimators):
        tree_state = np.random.RandomState(forest_state.randint(np.iinfo(np.int32).max))
        criterion = (
            MSE(target_count, row_count)
            if class_counts is None
            else Gini(target_count, class_counts_T)
        )
        # No bound on the weight in a leaf (0.0), no monotonic constraints (None).
        splitter = RandomSplitter(
            criterion, features_per_split, min_leaf_rows, 0.0, tree_state, None
        )
        # A split needs two rows, enough for two leaves; no bound on weights, depth or impurity.
        builder = DepthFirstTreeBuilder(
            splitter, max(2, 2 * min_leaf_rows), min_leaf_rows, 0.0, _ANY_DEPTH, 0.0
        )
        tree = TreeOfNodes(feature_count, class_counts_T, target_count)
        builder.build(tree, float32_NF, float64_NT, None, None)
        trees.append(tree)
    return trees

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
    rows_NF: NDArray[Any], labels_N: NDArray[np.int64], *, count: int, seed: int
) -> tuple[list[Tree], NDArray[np.int64]]:
    """Return `count` extremely randomised trees fitted to these labels, and the classes that occur.

    The classes are ascending; a tree has one output for each of them, in this order.
    """
    from sklearn.ensemble import ExtraTreesClassifier

    classes, class_index_N = np.unique(labels_N, return_inverse=True)
    forest = ExtraTreesClassifier(count, random_state=seed)
    per_split = max(1, int(np.sqrt(rows_NF.shape[1])))
    trees = _grow_trees(
        forest, rows_NF, class_index_N.reshape(-1, 1), classes=[len(classes)], per_split=per_split
    )
    return trees, classes


def grow_regressing_trees(
    rows_NF: NDArray[Any], targets_NT: NDArray[Any], *, count: int, leaf: int, seed: int
) -> list[Tree]:
    """Return `count` extremely randomised trees fitted to T numeric targets of each row.

    `leaf`: smallest number of rows in a leaf.
    """
    from sklearn.ensemble import ExtraTreesRegressor

    forest = ExtraTreesRegressor(count, min_samples_leaf=leaf, random_state=seed)
    return _grow_trees(forest, rows_NF, targets_NT, classes=None, per_split=rows_NF.shape[1])


def _grow_trees(
    forest: Any,
    rows_NF: NDArray[Any],
    targets_NT: NDArray[Any],
    *,
    classes: Sequence[int] | None,
    per_split: int,
) -> list[Tree]:
    """Return the trees that this forest would grow, without its slow checks of the rows.

    scikit-learn's builder is not public. If its version has another builder, the forest itself
    grows the trees.

    Args:
        forest: scikit-learn's forest, not fitted.
        rows_NF: F features of N rows.
        targets_NT: T targets of each row.
        classes: number of classes of each target; None: targets are numbers.
        per_split: number of features among which a split is chosen.
    """
    try:
        return _build_trees(forest, rows_NF, targets_NT, classes=classes, per_split=per_split)
    except (ImportError, AttributeError, TypeError):  # another version's builder
        forest.fit(rows_NF, targets_NT[:, 0] if classes is not None else targets_NT)
        return [estimator.tree_ for estimator in forest.estimators_]


def _build_trees(
    forest: Any,
    rows_NF: NDArray[Any],
    targets_NT: NDArray[Any],
    *,
    classes: Sequence[int] | None,
    per_split: int,
) -> list[Tree]:
    """Build each tree as the forest does, from the same random numbers.

    Args:
        forest: scikit-learn's forest, not fitted.
        rows_NF: F features of N rows.
        targets_NT: T targets of each row.
        classes: number of classes of each target; None: targets are numbers.
        per_split: number of features among which a split is chosen.
    """
    from sklearn.tree._criterion import MSE, Gini
    from sklearn.tree._splitter import RandomSplitter
    from sklearn.tree._tree import DepthFirstTreeBuilder
    from sklearn.tree._tree import Tree as TreeOfNodes

    single_NF = np.ascontiguousarray(rows_NF, dtype=np.float32)
    double_NT = np.ascontiguousarray(targets_NT, dtype=np.float64)
    rows, features = single_NF.shape
    targets = double_NT.shape[1]
    leaf = forest.min_samples_leaf
    classes_T = np.array([1] * targets if classes is None else classes, dtype=np.intp)
    draw = np.random.RandomState(forest.random_state)
    trees: list[Tree] = []
    for _ in range(forest.n_estimators):
        state = np.random.RandomState(draw.randint(np.iinfo(np.int32).max))
        criterion = MSE(targets, rows) if classes is None else Gini(targets, classes_T)
        # No bound on the weight in a leaf (0.0), no monotonic constraints (None).
        splitter = RandomSplitter(criterion, per_split, leaf, 0.0, state, None)
        # A split needs two rows, enough for two leaves; no bound on weights, depth or impurity.
        builder = DepthFirstTreeBuilder(splitter, max(2, 2 * leaf), leaf, 0.0, _ANY_DEPTH, 0.0)
        tree = TreeOfNodes(features, classes_T, targets)
        builder.build(tree, single_NF, double_NT, None, None)
        trees.append(tree)
    return trees

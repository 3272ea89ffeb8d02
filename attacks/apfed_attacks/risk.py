"""How unevenly an attack hurts: by class or group, and the tenth of the people it hurts most.

Run by: the scorer. An average hides people: an attack that is useless on most rows and sure
about a few harms those few.

Letters: N scored rows, K classes, F features.
"""

import math
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax
from sklearn.metrics import recall_score, roc_auc_score

__all__ = ["risk_of_features", "risk_of_labels", "risk_of_membership"]

Array: TypeAlias = NDArray[Any]


def risk_of_labels(scores_NK: Array, labels_N: Array) -> dict[str, float]:
    """Recall of each class that occurs, and precision on the rows the attack is surest of.

    "surest decile" is what the adversary can choose for itself: the tenth of the rows (at least
    one) whose best score is furthest above its second, after a softmax.
    """
    guessed_N = scores_NK.argmax(axis=1)
    present = np.unique(labels_N)
    recalls = recall_score(labels_N, guessed_N, labels=present, average=None, zero_division=0)
    ordered_NK = np.sort(softmax(np.nan_to_num(scores_NK), axis=1), axis=1)
    surest = np.argsort(ordered_NK[:, -2] - ordered_NK[:, -1], kind="stable")[: _decile(labels_N)]
    by_class = {
        f"recall of class {label}": float(r) for label, r in zip(present, recalls, strict=True)
    }
    return {
        **by_class,
        "precision on the surest decile": float((guessed_N == labels_N)[surest].mean()),
    }


def risk_of_features(guess_NF: Array, truth_NF: Array) -> dict[str, float]:
    """Share of the variance that the attack recovers on the tenth of the rows it recovers best.

    Needs the truth to find these rows: it says what some people risk, not whom the adversary
    would pick.
    """
    error_N = np.square(guess_NF - truth_NF).sum(axis=1)
    spread_N = np.square(truth_NF - truth_NF.mean(axis=0)).sum(axis=1)
    best = np.argsort(error_N - spread_N, kind="stable")[: _decile(truth_NF)]
    spread = float(spread_N[best].sum())
    return {"r2 on the best decile": 1 - float(error_N[best].sum()) / spread} if spread else {}


def risk_of_membership(scores_N: Array, members_N: Array) -> dict[str, float]:
    """AUC of aligned and of unaligned members, each against all rows that did not train.

    Args:
        scores_N: of membership, (n,).
        members_N: whether a row trained, and whether it was aligned, (n, 2).
    """
    trained_N, aligned_N = members_N[:, 0], members_N[:, 1]
    groups = {"aligned": trained_N & aligned_N, "unaligned": trained_N & ~aligned_N}
    return {
        f"auc of {name} members": float(
            roc_auc_score(group_N[group_N | ~trained_N], scores_N[group_N | ~trained_N])
        )
        for name, group_N in groups.items()
        if group_N.any()
    }


def _decile(rows_N: Array) -> int:
    return math.ceil(len(rows_N) / 10)

"""Released columns used together with an adversary's own ones, so that neither spoils the other.

Run by: whoever holds features x of its own and receives releases h. Under a guard h may be nearly
all noise. Beside x, columns of unit variance would then drown x, and an attack would fall below
its baseline while h still tells something. The guard's sigma is public, so an adversary
weights h down; how far is best differs, so each weight is a variant of the attack. Where it knows
labels, cross-validation on these says how far to believe h, and whether at all.

Letters: N rows, n of them with known labels, U the others, F columns, K classes.
"""

import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax, softmax
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import StratifiedKFold, cross_val_predict

__all__ = ["beside", "stacked"]

_Array = NDArray[np.float64]

# Of released columns beside own ones of unit variance.
_WEIGHTS = (1.0, 0.3, 0.1)
# How far stacking believes the probe on releases; 0 ignores it.
_TRUST = (0.0, 0.1, 0.3, 1.0)
_FOLDS = 3
_SMALLEST = 1e-12


def beside(name: str, released_NF: _Array, own_NF: _Array) -> dict[str, _Array]:
    """Return released columns and own ones side by side, once for each weight of the former.

    Args:
        name: of the released columns, for the names of the results.
        released_NF: standardised, as are own_NF; row i of both is the same person's.
        own_NF: what the adversary has anyway.
    """
    return {
        f"{'' if weight == 1 else f'{weight:g} '}{name} and x": np.hstack(
            [weight * released_NF, own_NF]
        )
        for weight in _WEIGHTS
    }


def stacked(
    probe: Any,
    released_NF: _Array,
    own_NF: _Array,
    labels_N: NDArray[np.int64],
    *,
    classes: int,
    seed: int,
) -> _Array | None:
    """Return class probabilities (U, K): those by own columns, corrected by those by releases.

    log p(y | x) + t log p(y | h), normalised; t is what makes the known labels likeliest when
    each is predicted from the others (stacked generalisation; Wolpert, 1992, Stacked
    Generalization). None where cross-validation is impossible: a class has one known label.

    Args:
        probe: an unfitted scikit-learn classifier that gives probabilities.
        released_NF: standardised, as are own_NF; row i of both is the same person's.
        own_NF: what the adversary has anyway.
        labels_N: -1 where unknown.
        classes: K.
        seed: of the folds.
    """
    known_N = labels_N >= 0
    present, index_n, counts = np.unique(labels_N[known_N], return_inverse=True, return_counts=True)
    if len(present) < 2 or counts.min() < 2:
        return None
    folds = StratifiedKFold(min(_FOLDS, int(counts.min())), shuffle=True, random_state=seed % 2**32)
    held_out, others = [], []
    for columns_NF in (own_NF, released_NF):
        with warnings.catch_warnings():
            # The budget may end the optimiser; that is part of the adversary's description.
            warnings.simplefilter("ignore", ConvergenceWarning)
            known_nF = columns_NF[known_N]
            out_nK = cross_val_predict(probe, known_nF, index_n, cv=folds, method="predict_proba")
            fitted = clone(probe).fit(known_nF, index_n)
        held_out.append(np.log(np.maximum(out_nK, _SMALLEST)))
        others.append(np.log(np.maximum(fitted.predict_proba(columns_NF[~known_N]), _SMALLEST)))
    rows_n = np.arange(len(index_n))
    likelihood = [
        log_softmax(held_out[0] + trust * held_out[1], axis=1)[rows_n, index_n].mean()
        for trust in _TRUST
    ]
    trust = _TRUST[int(np.argmax(likelihood))]
    scores_UK = np.zeros((len(others[0]), classes))
    scores_UK[:, present] = softmax(others[0] + trust * others[1], axis=1)
    return scores_UK

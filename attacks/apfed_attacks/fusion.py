"""Released columns used together with an adversary's own ones, so that neither spoils the other.

Run by: whoever holds features x of its own and receives releases h. Under a guard h may be nearly
all noise. Beside x, columns of unit variance would then drown x, and an attack would fall below
its baseline while h still tells something. The guard's sigma is public, so an adversary
believes h less; how much less is best differs, so each degree is a variant of the attack.

Letters: N rows, n of them with known labels, F columns, K classes.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax

__all__ = ["TRUST", "beside", "corrected"]

_Array = NDArray[np.float64]

TRUST = (0.03, 0.1, 0.3, 1.0)
"""How far `corrected` believes releases, one variant for each."""

# Of released columns beside own ones of unit variance.
_WEIGHTS = (1.0, 0.3, 0.1)
_ROUNDS = 5
_UNLABELLED = 0.3  # weight of a row whose label is not known
_LEAST_VARIANCE = 1e-3
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


def corrected(
    prior_NK: _Array, released_NF: _Array, labels_N: NDArray[np.int64], trust: float
) -> _Array:
    """Return class probabilities (N, K): what own features tell, corrected by released ones.

    Each class is a Gaussian around a mean of its released columns, one variance for all classes.
    Few labels tell little of the means, so all rows do, each as far as it seems to be of a class,
    rows without a label with a smaller weight; what own features tell of a row stands in for the
    shares of the classes (semi-supervised expectation maximisation; Nigam et al., 2000, Text
    Classification from Labeled and Unlabeled Documents using EM, Section 5, EM-lambda).

    Args:
        prior_NK: class probabilities by own columns.
        released_NF: standardised.
        labels_N: -1 where unknown.
        trust: how far releases are believed, 0 to 1: the power of their likelihood. Below 1 since
            neither the columns nor the two sources are independent.
    """
    known_N = labels_N >= 0
    given_nK = np.eye(prior_NK.shape[1])[labels_N[known_N]]
    log_prior_NK = np.log(np.maximum(prior_NK, _SMALLEST))
    weight_N1 = np.where(known_N, 1.0, _UNLABELLED)[:, None]
    posterior_NK = prior_NK.copy()
    for _ in range(_ROUNDS):
        posterior_NK[known_N] = given_nK
        share_NK = weight_N1 * posterior_NK
        size_K1 = np.maximum(share_NK.sum(axis=0), _SMALLEST)[:, None]
        mean_KF = share_NK.T @ released_NF / size_K1
        between_F = (size_K1 * mean_KF**2).sum(axis=0) / size_K1.sum()
        within_F = np.maximum((released_NF**2).mean(axis=0) - between_F, _LEAST_VARIANCE)
        distance_NK = (released_NF / within_F) @ mean_KF.T - 0.5 * (mean_KF**2 / within_F).sum(1)
        posterior_NK = softmax(log_prior_NK + trust * distance_NK, axis=1)
    return posterior_NK

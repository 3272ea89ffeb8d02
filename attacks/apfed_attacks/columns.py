"""Columns: what an adversary has of each row, its own and released ones, to be learnt from.

Shared by the curious attacks. Under a guard h may be nearly all noise; columns of unit variance
would then drown own features x beside them, and an attack would fall below its baseline while h
still tells something. The guard's sigma is public, so an adversary believes h less; how much less
is best differs, so each degree is a variant of the attack (`join_own_columns`, `correct_priors`).

Letters: N rows, n of them with known labels, F columns, K classes.
"""

import hashlib
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from apfed_attacks.interface import Attack, FloatArray, Prediction
from apfed_attacks.view import AdversaryView, AttackError
from secure_apfed.base.seeds import derive_seed, shuffle_rows
from secure_apfed.labellers import Spreading

_SUBSPACE_ROUNDS = 4
_EXTRA_DIRECTIONS = 10
TRUST = (0.03, 0.1, 0.3, 1.0)
"""Powers of the releases' likelihood in `correct_priors`, one variant of an attack for each."""
_EM_ROUNDS = 5
_UNLABELLED_WEIGHT = 0.3  # weight of a row whose label is not known
_MIN_VARIANCE = 1e-3
_MIN_SHARE = 1e-12  # of a row and of a class, so that logarithms and means are finite
# Predictions of one process by the hash of what they were made of, and how many stay.
_KEPT_PREDICTIONS: OrderedDict[str, Prediction] = OrderedDict()
_MAX_KEPT = 128


class ColumnAttack(Attack):
    """Base of the curious attacks that learn from columns: what an adversary has of each row.

    Attributes:
        max_rows: number of observed rows above which a random part of them is used.
        components: largest number of columns; wider sets are reduced to so many principal
            components.
    """

    max_rows: int = Field(5_000, ge=2)
    components: int = Field(256, ge=2)

    def scale_columns(self, columns_NF: Tensor, seed: int) -> FloatArray:
        """Return columns (N, F) standardised, and reduced to principal components if they are too
        many.
        """
        return standardise_columns(columns_NF, components=self.components, seed=seed)

    def scale_own_columns(self, view: AdversaryView, positions: Tensor, seed: int) -> FloatArray:
        """Return the coalition's own columns x of the rows at `positions`, scaled."""
        return self.scale_columns(select_own_columns(view, positions), seed)

    def choose_rows(self, view: AdversaryView, candidates: Tensor, seed: int) -> Tensor:
        """Return the alignment positions to learn from, ascending: known rows, and others up to
        `max_rows`.

        `candidates`: positions of the observed rows, (N,). People of whom the victim has no row are
        left out, since nothing of them can be guessed.
        """
        candidates = candidates[view.has_rows(view.knowledge.victim, candidates)]
        known = torch.isin(
            candidates,
            torch.cat([view.knowledge.labels.positions, view.knowledge.shadow.positions]),
        )
        others = shuffle_rows(candidates[~known], seed, "attacks", "rows")
        room = max(self.max_rows - int(known.sum()), 1)
        return torch.cat([candidates[known], others[:room]]).sort().values


def explain_missing_releases(view: AdversaryView) -> str | None:
    """Return why this view gives an attack on released representations nothing to read; None: it
    does.
    """
    if view.description.released_by is None:
        return f"{view.description}: no party releases a representation"
    if not view.epochs:
        return (
            "the transcript kept no representations; set transcript.keep to first_and_last or all"
        )
    return None


def select_own_columns(view: AdversaryView, positions: Tensor) -> Tensor:
    """Return the coalition's own features of `positions`, parties side by side, (N, F).

    A member that has no row of some people has one more column: 1 for these people, else 0. Their
    features are the mean of those that it has. Without own features the result is one column of
    zeros, which carries no information.

    Raises AttackError: a member has fewer rows than `positions` refer to.
    """
    if not view.features:
        return torch.zeros(len(positions), 1, device=view.device)
    columns = []
    for name, own_A in view.features.items():
        if len(positions) and int(positions.max()) >= len(own_A):
            raise AttackError(f"{name} has {len(own_A)} rows, and sees position {positions.max()}")
        own_NF = own_A[positions].flatten(1)
        if name in view.presence:
            known_F = own_A[view.presence[name]].flatten(1)
            mean_F = known_F.mean(dim=0) if len(known_F) else own_NF.new_zeros(own_NF.shape[1])
            unknown_N1 = ~view.has_rows(name, positions)[:, None].to(own_NF.device)
            filled_NF = torch.where(unknown_N1, mean_F, own_NF)
            own_NF = torch.hstack([filled_NF, unknown_N1.to(own_NF.dtype)])
        columns.append(own_NF)
    return torch.cat(columns, dim=1)


def standardise_columns(columns_NF: Tensor, *, components: int, seed: int) -> FloatArray:
    """Return columns with mean 0 and variance 1; wider sets as their first principal components.

    Constant columns become 0. The adversary has all rows, so all of them set the scale.

    `components`: largest number of columns of the result. `seed`: seed of the random first
    directions of the components.
    """
    is_wide = min(columns_NF.shape) > components
    # Convolution maps have thousands of columns: those stay in single precision until reduced.
    values_NF = columns_NF.float() if is_wide else columns_NF.double()
    deviation_F, mean_F = torch.std_mean(values_NF, dim=0, correction=0)
    scaled_NF = (values_NF - mean_F) / torch.where(deviation_F > 0, deviation_F, 1)
    if is_wide:
        scaled_NF = _compute_principal_components(scaled_NF, components, seed)
    return scaled_NF.double().numpy(force=True)


def _compute_principal_components(values_NF: Tensor, count: int, seed: int) -> Tensor:
    """Return the first principal components of columns with mean 0, (N, C), on their device.

    They are approximated by four rounds of subspace iteration with ten directions more than asked
    for (Halko et al., 2011, Algorithms 4.4, 5.1). Each component has the sign with which its
    largest weight is positive.

    `values_NF`: the columns. `count`: number of components, C. `seed`: seed of the random first
    directions. Q is the number of directions in the iteration.
    """
    draw = torch.Generator().manual_seed(derive_seed(seed, "attacks", "components"))
    start_FQ = torch.randn(values_NF.shape[1], count + _EXTRA_DIRECTIONS, generator=draw)
    range_NQ = torch.linalg.qr(values_NF @ start_FQ.to(values_NF)).Q
    for _ in range(_SUBSPACE_ROUNDS):
        range_FQ = torch.linalg.qr(values_NF.T @ range_NQ).Q
        range_NQ = torch.linalg.qr(values_NF @ range_FQ).Q
    left_QQ, sizes_Q, right_QF = torch.linalg.svd(range_NQ.T @ values_NF, full_matrices=False)
    largest_Q1 = right_QF.abs().argmax(dim=1, keepdim=True)
    signed_Q = sizes_Q * right_QF.gather(1, largest_Q1)[:, 0].sign()
    components_NC: Tensor = range_NQ @ (left_QQ * signed_Q)[:, :count]
    return components_NC


def join_own_columns(
    name: str, released_NF: FloatArray, own_NF: FloatArray
) -> dict[str, FloatArray]:
    """Return standardised released and own columns side by side, for several weights of the
    released ones.

    `name`: name of the released columns. The keys are such as "0.3 h and x"; a weight of 1 is left
    out.
    """
    # Where a guard makes releases noisy, a smaller weight is better: penalised models then use them
    # less. Which weight is best is not known before.
    weights = {"": 1.0, "0.3 ": 0.3, "0.1 ": 0.1}
    return {
        f"{prefix}{name} and x": np.hstack([weight * released_NF, own_NF])
        for prefix, weight in weights.items()
    }


def correct_priors(
    prior_NK: FloatArray, released_NF: FloatArray, labels_N: NDArray[np.int64], trust: float
) -> FloatArray:
    """Return class probabilities (N, K): those by own features, corrected by released columns.

    Each class is a Gaussian around a mean of its released columns, one variance for all classes.
    A few labels say little of the means, so all rows count: each by its probability of the class,
    and those without a label by a smaller weight. The class probabilities by own features take the
    place of the shares of the classes (semi-supervised expectation maximisation; Nigam et al.,
    2000, Text Classification from Labeled and Unlabeled Documents using EM, Section 5, EM-lambda).

    Args:
        prior_NK: class probabilities by own columns.
        released_NF: standardised released columns.
        labels_N: classes, -1 where unknown.
        trust: 0 to 1, power of the releases' likelihood; below 1 since neither the columns nor the
            two sources are independent.
    """
    known_N = labels_N >= 0
    one_hot_nK = np.eye(prior_NK.shape[1])[labels_N[known_N]]
    log_prior_NK = np.log(np.maximum(prior_NK, _MIN_SHARE))
    weight_N1 = np.where(known_N, 1.0, _UNLABELLED_WEIGHT)[:, None]
    posterior_NK = prior_NK.copy()
    for _ in range(_EM_ROUNDS):
        posterior_NK[known_N] = one_hot_nK
        share_NK = weight_N1 * posterior_NK
        size_K1 = np.maximum(share_NK.sum(axis=0), _MIN_SHARE)[:, None]
        mean_KF = share_NK.T @ released_NF / size_K1
        between_F = (size_K1 * mean_KF**2).sum(axis=0) / size_K1.sum()
        within_F = np.maximum((released_NF**2).mean(axis=0) - between_F, _MIN_VARIANCE)
        # Gaussian log-likelihoods up to a term that is the same for all classes.
        likelihood_NK = (released_NF / within_F) @ mean_KF.T - 0.5 * (mean_KF**2 / within_F).sum(1)
        posterior_NK = scipy.special.softmax(log_prior_NK + trust * likelihood_NK, axis=1)
    return posterior_NK


def fit_model(model: Any, rows_nF: FloatArray, targets: NDArray[Any] | None) -> Any:
    """Fit a model of scikit-learn and return it.

    `targets`: targets of the rows; None: the model needs none, as for clustering.
    """
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        # An adversary has a limited number of iterations, so its fit may end early.
        warnings.simplefilter("ignore", ConvergenceWarning)
        return model.fit(rows_nF, targets)


def hash_inputs(*inputs: NDArray[Any] | str | int) -> str:
    """Return the SHA-256 (hex) of arrays, with their types and shapes, and of plain values."""
    digest = hashlib.sha256()
    for value in inputs:
        if isinstance(value, np.ndarray):
            digest.update(f"{value.dtype} {value.shape};".encode())
            digest.update(np.ascontiguousarray(value).data)
        else:
            digest.update(f"{value!r};".encode())
    return digest.hexdigest()


def guess_once(guess: Callable[[], Prediction], *inputs: NDArray[Any] | str | int) -> Prediction:
    """Return what `guess` returns, or what it returned earlier for the same `inputs`; read-only.

    Baselines are the same for every run on the same data and seed, so they are computed once.

    `guess`: function that fits and predicts. `inputs`: all that its prediction depends on.
    """
    key = hash_inputs(*inputs)
    if key not in _KEPT_PREDICTIONS:
        _KEPT_PREDICTIONS[key] = guess()
        _KEPT_PREDICTIONS[key].values.setflags(write=False)
        if len(_KEPT_PREDICTIONS) > _MAX_KEPT:
            _KEPT_PREDICTIONS.popitem(last=False)
    _KEPT_PREDICTIONS.move_to_end(key)
    return _KEPT_PREDICTIONS[key]


def compute_own_votes(
    features_UF: FloatArray, labelled_n: Tensor, labels_n: Tensor, classes: int
) -> FloatArray:
    """Return the votes that a party's own features give by label spreading: class scores (U, K).

    `features_UF`: features of U rows. `labelled_n`: indices of its n labelled rows, ascending;
    `labels_n`: the classes of these. `classes`: K.

    Raises AttackError: no row is labelled.
    """
    if not len(labelled_n):
        raise AttackError("no row is labelled, so nobody can vote")
    return Spreading().label_rows(features_UF, labelled_n.numpy(), labels_n.numpy(), classes)

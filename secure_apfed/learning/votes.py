"""Labels that the active's model learns from votes: the weight of the votes, and whether they are
used. A vote is one row of class scores, (K,).

Run by: the active, on the decoded votes of the passives, its own model's predictions for the rows,
and its labels. A vote on a labelled row is made without the row's own label
(`Labeller.label_without_own`). The active's own model predicts this row without the label, too. So
labelled rows estimate how good both are on rows without a label.

Letters: U rows, n labelled rows, J of them for validation, K classes, D features.
"""

from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from typing import Self

import numpy as np
import scipy
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from secure_apfed.base.seeds import derive_seed
from secure_apfed.base.transfers import StepLoss, defer_reading
from secure_apfed.learning.descent import ActiveNetworks, Trainer
from secure_apfed.settings.training import TrainSettings

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Numbers = NDArray[np.float32] | Floats

_STRENGTHS = (0.01, 0.1, 1.0, 10.0)
"""Penalties of ridge regression, of which one is chosen."""
BLOCK = 2**16
"""Rows whose features are copied to float64 at a time."""
_FOLDS = 5
"""Folds of the validation rows; with fewer rows than folds, nothing is measured."""
_DEVIATION_A = 0.5
_DEVIATION_B = 1.0
"""Standard deviations of the normal priors of a, about 1, and of b, about 0."""
_MAX_WEIGHTS = (2.0, 20.0)
"""Largest values of a and b."""
_START = (1.0, 0.3)
"""The values of a and b at which their search starts."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ValidationRows:
    """The labelled rows that validate votes.

    Attributes:
        places: indices of the J validation rows among all U rows. A vote on such a row was made
            without the row's own label.
        labels: the class of each validation row, (J,).
        own_JK: probabilities of K classes by the active's own model, trained without the row.
    """

    places: Integers
    labels: Integers
    own_JK: Floats  # noqa: N815


@dataclass(frozen=True)
class Help:
    """The measured gain from the passives' votes ("help"), and whether votes are used.

    It is measured on labelled rows, each predicted without its own label.

    Attributes:
        rows: validation rows, J.
        gain: how much votes raise the mean log-likelihood of a label, in nats, measured on rows
            that were held out when the weight of the votes was fitted; 0 with too few rows.
        deviation: standard error of the gain; 0 with too few rows.
        right: share of the validation rows for which the class with most votes is the true one.
        alone: share of the validation rows for which the active's own model predicts the true
            class.
        learnt: accuracy of a model trained on weighted votes minus that of the active's own model,
            on rows that neither was trained on; 0: not measured.
        always: whether votes are used whatever these measurements are.
        averaged: whether the model trained with votes is averaged with the best three local models.
    """

    rows: int
    gain: float
    deviation: float
    right: float
    alone: float
    learnt: float = 0.0
    always: bool = False
    averaged: bool = False

    def to_tensor(self) -> Tensor:
        """Return all fields in their order, float64, for a checkpoint."""
        return torch.tensor(astuple(self), dtype=torch.float64)

    @classmethod
    def from_tensor(cls, numbers: Tensor) -> Self:
        """Return what `to_tensor` gave."""
        rows, gain, deviation, right, alone, learnt, always, averaged = numbers.tolist()
        return cls(int(rows), gain, deviation, right, alone, learnt, bool(always), bool(averaged))

    @property
    def is_sure(self) -> bool:
        """True if the gain exceeds its standard error, and a model of own columns can learn it."""
        return self.gain > self.deviation and self.learnt >= 0

    @property
    def is_in_use(self) -> bool:
        """True if the finished model was trained on votes."""
        return self.always or self.averaged or self.is_sure

    def __str__(self) -> str:
        """Return in words whether help is used, and the figures that decided it."""
        usage = "always used" if self.always else "used" if self.is_in_use else "not used"
        if self.averaged:
            usage = "averaged with the best three local models"
        if not self.rows:
            return f"help is {usage}: no labelled row can judge it, or every row has a label"
        text = (
            f"help is {usage}: of {self.rows} labelled rows, each judged without its own label, "
            f"the others are right on {self.right:.2f} and the active's own model on "
            f"{self.alone:.2f}; together they add {self.gain:+.3f} nats a row (deviation "
            f"{self.deviation:.3f})"
        )
        if self.learnt < 0:
            text += f", but own columns learn it less well than they do alone ({self.learnt:+.3f})"
        return text


def pool_opinions(
    vote_sums_UK: Floats,
    own_UK: Floats,
    validation_rows: ValidationRows,
    frequencies: Floats,
    *,
    seed: int,
    always: bool = False,
) -> tuple[Floats, Help]:
    """Return the pooled probability of each class for each row, (U, K), and the votes' gain.

    A logarithmic opinion pool (Genest and Zidek 1986, Combining Probability Distributions) of the
    active's own model p and the votes v, relative to the class frequencies f:

        q(c) proportional to f(c) (p(c) / f(c))^a exp(b v(c)),    0 <= a <= 2, 0 <= b.

    q is the pooled probability of class c. v are the votes, noise included, centred over all rows
    and within the row, with mean square 1. a and b maximise the likelihood of the validation rows'
    labels under normal priors with means 1 and 0; at these means votes are not used. Votes on
    validation rows are as noisy as all others, so noisy votes get less weight.

    Args:
        vote_sums_UK: unbiased estimate of the sum of the passives' votes: U rows, K classes.
        own_UK: class probabilities of all rows by the active's own model.
        validation_rows: the labelled rows that decide the weight and use of votes.
        frequencies: f, (K,), above 0, adding up to 1.
        seed: random seed of the folds that measure the gain.
        always: whether votes are used even if their gain is small or negative.
    """
    # Centre over rows and within each row, then scale to mean square 1.
    votes_UK = vote_sums_UK - vote_sums_UK.mean(axis=0)
    votes_UK -= votes_UK.mean(axis=1, keepdims=True)
    root_mean_square = float(np.sqrt((votes_UK**2).mean()))
    votes_UK /= root_mean_square if root_mean_square > 0 else 1.0
    log_f_K = np.log(frequencies)
    validation_count = len(validation_rows.labels)

    def compute_evidence(own_BK: Floats) -> Floats:
        """Return log p / f, (B, K); p is `own_BK` shrunk towards f with the weight of one row.

        The shrinkage keeps a model from being more certain than its labelled rows allow.
        """
        weight = max(validation_count, 1)
        floored_BK = (weight * own_BK + frequencies) / (weight + 1)
        return np.asarray(np.log(floored_BK) - log_f_K)

    own_JK = compute_evidence(validation_rows.own_JK)
    votes_JK = votes_UK[validation_rows.places]
    pool = _Pool(log_f_K, own_JK, votes_JK, validation_rows.labels)
    most_voted_J = vote_sums_UK[validation_rows.places].argmax(1)
    help_ = replace(pool.measure_help(seed, most_voted_J=most_voted_J), always=always)
    # Without validation rows nothing can be fitted, so the start values serve.
    weights = pool.fit_weights(pool.every) if validation_count else _START
    # a = 1 and b = 0 give the own model's prediction.
    a, b = weights if help_.is_in_use else (1.0, 0.0)
    return np.exp(pool.log_q(compute_evidence(own_UK), votes_UK, a, b)), help_


@dataclass(frozen=True, eq=False)
class _Pool:
    """A logarithmic opinion pool on the J validation rows; `pool_opinions` has its formula.

    Attributes:
        log_f_K: log f, f being the frequency of each of the K classes.
        own_JK: log p / f, p being the class probabilities by the active's own model.
        votes_JK: v, the standardised votes.
        labels_J: the rows' labels.
    """

    log_f_K: Floats  # noqa: N815
    own_JK: Floats  # noqa: N815
    votes_JK: Floats  # noqa: N815
    labels_J: Integers  # noqa: N815

    @property
    def every(self) -> Integers:
        """The indices of all J validation rows, for `fit_weights`."""
        return np.arange(len(self.labels_J))

    def log_q(self, own_BK: Floats, votes_BK: Floats, a: float, b: float) -> Floats:
        """Return the pooled log-probabilities: log f + a * own + b * votes, normalised, (B, K).

        `own_BK`: log p / f, from the own model's probabilities p and the class frequencies f.
        `votes_BK`: standardised votes. `a`, `b`: the weights of the two.
        """
        scores_BK = self.log_f_K + a * own_BK + b * votes_BK
        return np.asarray(scipy.special.log_softmax(scores_BK, axis=1))

    def compute_log_likelihood(self, rows_B: Integers, a: float, b: float) -> Floats:
        """Return the pooled log-probability of the true label of these validation rows, (B,).

        `a`: the weight of the active's own model. `b`: the weight of the votes.
        """
        log_q_BK = self.log_q(self.own_JK[rows_B], self.votes_JK[rows_B], a, b)
        return np.asarray(log_q_BK[np.arange(len(rows_B)), self.labels_J[rows_B]])

    def fit_weights(self, rows_B: Integers, *, without_votes: bool = False) -> tuple[float, float]:
        """Return the weights a of the active's own model and b of the votes, fitted to labels.

        They have the maximum posterior probability given the labels of these validation rows.
        `without_votes`: whether b is fixed to 0.
        """

        def compute_loss(ab: Floats) -> float:
            """Return the negative log posterior of (a, b)."""
            a, b = map(float, ab)
            prior = ((a - 1) / _DEVIATION_A) ** 2 + (b / _DEVIATION_B) ** 2
            return prior / 2 - float(self.compute_log_likelihood(rows_B, a, b).sum())

        max_a, max_b = _MAX_WEIGHTS
        start = _START
        if without_votes:
            # An upper bound of 0 fixes b at 0.
            start = (1.0, 0.0)
            max_b = 0.0
        bounds = [(0.0, max_a), (0.0, max_b)]
        result = scipy.optimize.minimize(compute_loss, start, method="L-BFGS-B", bounds=bounds)
        a, b = map(float, result.x)
        return a, b

    def measure_help(self, seed: int, *, most_voted_J: Integers) -> Help:
        """Measure by cross-validation how much votes raise the likelihood of held-out labels.

        `seed`: random seed of the folds. `most_voted_J`: the class with the most votes, for each of
        the J validation rows.
        """
        rows = len(self.labels_J)
        order = np.random.default_rng(derive_seed(seed, "weighing votes")).permutation(rows)
        has_enough_rows = rows >= _FOLDS
        gain_J = np.zeros(rows)
        for fold in range(_FOLDS if has_enough_rows else 0):
            held_out = order[fold::_FOLDS]
            fitted = np.setdiff1d(order, held_out)
            with_votes = self.fit_weights(fitted)
            without_votes = self.fit_weights(fitted, without_votes=True)
            gain_J[held_out] = self.compute_log_likelihood(
                held_out, *with_votes
            ) - self.compute_log_likelihood(held_out, *without_votes)
        # log f + log p / f = log p, so this is the own model's class.
        own_class_J = (self.log_f_K + self.own_JK).argmax(1)
        return Help(
            rows=rows,
            gain=float(gain_J.mean()) if has_enough_rows else 0.0,
            deviation=float(gain_J.std(ddof=1) / rows**0.5) if has_enough_rows else 0.0,
            right=float((most_voted_J == self.labels_J).mean()) if rows else 0.0,
            alone=float((own_class_J == self.labels_J).mean()) if rows else 0.0,
        )


def find_last_layer(networks: ActiveNetworks) -> torch.nn.Linear:
    """Return the last linear layer of the networks' head."""
    linear = list(networks.head.modules())[-1]
    assert isinstance(linear, torch.nn.Linear)
    return linear


def fit_linear(
    linear: torch.nn.Linear,
    phi_UD: Numbers,
    targets_UK: Floats,
    *,
    taught_V: Integers,
    labelled_n: Integers,
) -> None:
    """Fit a linear layer without a bias in place, by ridge regression in float64.

    One of a few penalties is chosen: its fit to the unlabelled rows predicts the labelled rows with
    the least squared error.

    Args:
        linear: the layer, D numbers -> K scores, changed in place.
        phi_UD: the layer's inputs for U rows, with norms of about 1 to 3.
        targets_UK: the class probabilities (or numbers) to learn.
        taught_V: indices of the rows to fit to, labelled ones included.
        labelled_n: indices of the labelled rows.
    """
    # Labelled rows choose the penalty of a fit to the others; without either, the default serves.
    unlabelled_V = np.setdiff1d(taught_V, labelled_n)
    strength = _STRENGTHS[1]
    if len(unlabelled_V) and len(labelled_n):
        truth_nK = targets_UK[labelled_n]
        solve_weights = _fit_ridge(phi_UD, targets_UK, unlabelled_V)
        phi_nD = phi_UD[labelled_n].astype(np.float64)

        def compute_error(strength: float) -> float:
            """Return the mean squared error on the labelled rows with this penalty."""
            return float(((phi_nD @ solve_weights(strength) - truth_nK) ** 2).mean())

        strength = min(_STRENGTHS, key=compute_error)
    weights_DK = _fit_ridge(phi_UD, targets_UK, taught_V)(strength)
    with torch.no_grad():
        linear.weight.copy_(torch.from_numpy(weights_DK.T))


def _fit_ridge(phi_UD: Numbers, targets_UK: Floats, rows_V: Integers) -> Callable[[float], Floats]:
    """Return a function from a penalty to the weights (D, K) of ridge regression on these rows.

    The sums over rows are computed once here, so that several penalties can be tried cheaply. Rows
    are copied a block at a time, to save memory.

    `phi_UD`: D features of U rows. `targets_UK`: class probabilities or numbers to learn.
    `rows_V`: indices of the rows to fit to.
    """
    size = phi_UD.shape[1]
    gram_DD = np.zeros((size, size))
    moment_DK = np.zeros((size, targets_UK.shape[1]))
    for start in range(0, len(rows_V), BLOCK):
        part_V = rows_V[start : start + BLOCK]
        phi_VD = phi_UD[part_V].astype(np.float64)
        gram_DD += phi_VD.T @ phi_VD
        moment_DK += phi_VD.T @ targets_UK[part_V]
    eye_DD = np.eye(size)
    return lambda strength: np.asarray(np.linalg.solve(gram_DD + strength * eye_DD, moment_DK))


class SoftTrainer(Trainer):
    """A trainer of a network on class probabilities, or numbers, as targets."""

    def __init__(
        self,
        owner: str,
        networks: ActiveNetworks,
        *,
        features_N: Tensor,
        train: TrainSettings,
        seed: int,
        loss: Callable[..., Tensor] = F.cross_entropy,
    ) -> None:
        """Take networks and loss, and move the features to the device.

        Args:
            owner: name of the party, for errors.
            networks: the network, an encoder and a head.
            features_N: the features of N rows, (N, *shape).
            train: training settings.
            seed: random seed of dropout.
            loss: a function of the network's output (B, K) and of targets (B, K).
        """
        super().__init__(owner, dict(networks.named_children()), train=train, seed=seed)
        self.networks = networks
        self.features_N = self.compute.move_tensor(features_N)
        self._loss = loss

    def train_batch(self, step: int, rows_B: Tensor, targets_BK: Tensor) -> StepLoss:
        """Take one step on rows of the table towards these targets (B, K); return the loss."""
        self.zero_grad()
        with self.forward_pass(step):
            scores_BK, _ = self.networks(self.compute.take_rows(self.features_N, rows_B), None)
        loss = self._loss(scores_BK.to(self.compute.dtype), self.compute.move_batch(targets_BK))
        loss.backward()
        self.step()
        return defer_reading(loss)

    def predict(self, rows_B: Tensor) -> Tensor:
        """Return the network's outputs for these table rows, in its current mode, (B, K)."""
        with self.forward_pass("predict"):
            scores_BK: Tensor = self.networks(self.features_N[rows_B], None)[0]
        return scores_BK

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
from typing import NamedTuple, Self

import numpy as np
import scipy
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from secure_apfed.base.seeds import derive_seed
from secure_apfed.base.transfers import StepLoss, defer_reading
from secure_apfed.learning.descent import ActiveNetworks, Trainer
from secure_apfed.settings import TrainSettings

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Numbers = NDArray[np.float32] | Floats

_RIDGE_PENALTIES = (0.01, 0.1, 1.0, 10.0)
"""Penalties of ridge regression, of which one is chosen."""
_DEFAULT_RIDGE_PENALTY = 0.1
"""The penalty where there are no labelled rows, or no others, by which to choose one."""
ROWS_PER_BLOCK = 2**16
"""Rows whose features are copied to float64 at a time."""
_FOLDS = 5
"""Folds of the validation rows; with fewer rows than folds, nothing is measured."""
_LOCAL_WEIGHT_DEVIATION = 0.5
_VOTE_WEIGHT_DEVIATION = 1.0
"""Standard deviations of the normal priors of the weights: a of the active's own model, about 1,
and b of the votes, about 0."""


class _PoolWeights(NamedTuple):
    """The weights in an opinion pool: a of the active's own model, and b of the votes."""

    local: float
    votes: float


_MAX_WEIGHTS = _PoolWeights(2.0, 20.0)
_START_WEIGHTS = _PoolWeights(1.0, 0.3)
"""The weights at which their search starts."""
_LOCAL_MODEL_ALONE = _PoolWeights(1.0, 0.0)
"""The weights at which the pool predicts as the active's own model does."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ValidationRows:
    """The labelled rows that validate votes.

    Attributes:
        row_positions: indices of the J validation rows among all U rows. A vote on such a row was
            made without the row's own label.
        labels_J: the class of each validation row.
        local_probabilities_JK: probabilities of K classes by the active's own model, trained
            without the row.
    """

    row_positions: Integers
    labels_J: Integers  # noqa: N815
    local_probabilities_JK: Floats  # noqa: N815


@dataclass(frozen=True)
class MeasuredHelp:
    """The measured gain from the passives' votes ("help"), and whether votes are used.

    It is measured on labelled rows, each predicted without its own label.

    Attributes:
        row_count: number of validation rows, J.
        gain: how much votes raise the mean log-likelihood of a label, in nats, measured on rows
            that were held out when the weight of the votes was fitted; 0 with too few rows.
        standard_error: of the gain, in nats; 0 with too few rows.
        vote_accuracy: share of the validation rows for which the class with most votes is the true
            one.
        local_accuracy: share of the validation rows for which the active's own model predicts the
            true class.
        learnt_gain: accuracy of a model trained on weighted votes minus that of the active's own
            model, on rows that neither was trained on; 0: not measured.
        is_always_used: whether votes are used whatever these measurements are.
        is_averaged: whether the model trained with votes is averaged with the best three local
            models.
    """

    row_count: int
    gain: float
    standard_error: float
    vote_accuracy: float
    local_accuracy: float
    learnt_gain: float = 0.0
    is_always_used: bool = False
    is_averaged: bool = False

    def to_tensor(self) -> Tensor:
        """Return all fields in their order, float64, for a checkpoint."""
        return torch.tensor(astuple(self), dtype=torch.float64)

    @classmethod
    def from_tensor(cls, stored_fields: Tensor) -> Self:
        """Return what `to_tensor` gave."""
        (
            row_count,
            gain,
            standard_error,
            vote_accuracy,
            local_accuracy,
            learnt_gain,
            is_always_used,
            is_averaged,
        ) = stored_fields.tolist()
        return cls(
            int(row_count),
            gain,
            standard_error,
            vote_accuracy,
            local_accuracy,
            learnt_gain,
            bool(is_always_used),
            bool(is_averaged),
        )

    @property
    def is_validated(self) -> bool:
        """True if the gain exceeds its standard error, and a model of own columns can learn it."""
        return self.gain > self.standard_error and self.learnt_gain >= 0

    @property
    def is_in_use(self) -> bool:
        """True if the finished model was trained on votes."""
        return self.is_always_used or self.is_averaged or self.is_validated

    def __str__(self) -> str:
        """Return in words whether help is used, and the figures that decided it."""
        usage = "always used" if self.is_always_used else "used" if self.is_in_use else "not used"
        if self.is_averaged:
            usage = "averaged with the best three local models"
        if not self.row_count:
            return f"help is {usage}: no labelled row can judge it, or every row has a label"
        text = (
            f"help is {usage}: of {self.row_count} labelled rows, each judged without its own "
            f"label, the others are right on {self.vote_accuracy:.2f} and the active's own model "
            f"on {self.local_accuracy:.2f}; together they add {self.gain:+.3f} nats a row "
            f"(deviation {self.standard_error:.3f})"
        )
        if self.learnt_gain < 0:
            text += (
                f", but own columns learn it less well than they do alone ({self.learnt_gain:+.3f})"
            )
        return text


def pool_opinions(
    vote_sums_UK: Floats,
    local_probabilities_UK: Floats,
    validation_rows: ValidationRows,
    class_frequencies_K: Floats,
    *,
    seed: int,
    is_always_used: bool = False,
) -> tuple[Floats, MeasuredHelp]:
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
        local_probabilities_UK: class probabilities of all rows by the active's own model.
        validation_rows: the labelled rows that decide the weight and use of votes.
        class_frequencies_K: f, above 0, adding up to 1.
        seed: random seed of the folds that measure the gain.
        is_always_used: whether votes are used even if their gain is small or negative.
    """
    votes_UK = _standardise_votes(vote_sums_UK)
    validation_count = len(validation_rows.labels_J)
    log_ratios_JK = _compute_log_ratios(
        validation_rows.local_probabilities_JK,
        class_frequencies_K,
        validation_count=validation_count,
    )
    pool = _OpinionPool(
        np.log(class_frequencies_K),
        log_ratios_JK,
        votes_UK[validation_rows.row_positions],
        validation_rows.labels_J,
    )
    most_voted_J = vote_sums_UK[validation_rows.row_positions].argmax(1)
    measured_help = replace(
        pool.measure_help(seed, most_voted_J=most_voted_J), is_always_used=is_always_used
    )
    # Without validation rows nothing can be fitted, so the start values serve.
    weights = pool.fit_weights(pool.all_rows) if validation_count else _START_WEIGHTS
    if not measured_help.is_in_use:
        weights = _LOCAL_MODEL_ALONE
    log_ratios_UK = _compute_log_ratios(
        local_probabilities_UK, class_frequencies_K, validation_count=validation_count
    )
    pooled_UK = np.exp(pool.pool_log_probabilities(log_ratios_UK, votes_UK, weights))
    return pooled_UK, measured_help


def _standardise_votes(vote_sums_UK: Floats) -> Floats:
    """Return votes centred over all rows and within each row, with mean square 1, (U, K)."""
    votes_UK = vote_sums_UK - vote_sums_UK.mean(axis=0)
    votes_UK -= votes_UK.mean(axis=1, keepdims=True)
    root_mean_square = float(np.sqrt((votes_UK**2).mean()))
    if root_mean_square > 0:
        votes_UK /= root_mean_square
    return np.asarray(votes_UK)


def _compute_log_ratios(
    probabilities_BK: Floats, class_frequencies_K: Floats, *, validation_count: int
) -> Floats:
    """Return log p / f, (B, K); p is `probabilities_BK` shrunk towards f by one row's weight.

    The shrinkage keeps a model from being more certain than its labelled rows allow.

    `class_frequencies_K`: f. `validation_count`: number of labelled rows that test the model.
    """
    row_weight = max(validation_count, 1)
    shrunk_BK = (row_weight * probabilities_BK + class_frequencies_K) / (row_weight + 1)
    return np.asarray(np.log(shrunk_BK) - np.log(class_frequencies_K))


@dataclass(frozen=True, eq=False)
class _OpinionPool:
    """A logarithmic opinion pool on the J validation rows; `pool_opinions` has its formula.

    Attributes:
        log_frequencies_K: log f, f being the frequency of each of the K classes.
        log_ratios_JK: log p / f, p being the class probabilities by the active's own model.
        votes_JK: v, the standardised votes.
        labels_J: the rows' labels.
    """

    log_frequencies_K: Floats  # noqa: N815
    log_ratios_JK: Floats  # noqa: N815
    votes_JK: Floats  # noqa: N815
    labels_J: Integers  # noqa: N815

    @property
    def all_rows(self) -> Integers:
        """The indices of all J validation rows, for `fit_weights`."""
        return np.arange(len(self.labels_J))

    def pool_log_probabilities(
        self, log_ratios_BK: Floats, votes_BK: Floats, weights: _PoolWeights
    ) -> Floats:
        """Return log q, the pooled log-probabilities: log f + a * log p / f + b * v, normalised.

        `log_ratios_BK`: log p / f, from the own model's probabilities p and the class frequencies
        f. `votes_BK`: v, standardised votes. `weights`: a and b.
        """
        scores_BK = (
            self.log_frequencies_K + weights.local * log_ratios_BK + weights.votes * votes_BK
        )
        return np.asarray(scipy.special.log_softmax(scores_BK, axis=1))

    def compute_log_likelihood(self, rows_B: Integers, weights: _PoolWeights) -> Floats:
        """Return the pooled log-probability of the true label of these validation rows, (B,)."""
        log_probabilities_BK = self.pool_log_probabilities(
            self.log_ratios_JK[rows_B], self.votes_JK[rows_B], weights
        )
        return np.asarray(log_probabilities_BK[np.arange(len(rows_B)), self.labels_J[rows_B]])

    def fit_weights(self, rows_B: Integers, *, without_votes: bool = False) -> _PoolWeights:
        """Return the weights with the maximum posterior probability given these rows' labels.

        `rows_B`: indices of validation rows. `without_votes`: whether the votes' weight is fixed
        to 0.
        """

        def compute_loss(candidate: Floats) -> float:
            """Return the negative log posterior of the two weights, up to a constant."""
            weights = _PoolWeights(*map(float, candidate))
            local_deviations = (weights.local - 1) / _LOCAL_WEIGHT_DEVIATION
            vote_deviations = weights.votes / _VOTE_WEIGHT_DEVIATION
            negative_log_prior = (local_deviations**2 + vote_deviations**2) / 2
            return negative_log_prior - float(self.compute_log_likelihood(rows_B, weights).sum())

        start = _LOCAL_MODEL_ALONE if without_votes else _START_WEIGHTS
        # An upper bound of 0 fixes the votes' weight at 0.
        max_vote_weight = 0.0 if without_votes else _MAX_WEIGHTS.votes
        bounds = [(0.0, _MAX_WEIGHTS.local), (0.0, max_vote_weight)]
        result = scipy.optimize.minimize(compute_loss, start, method="L-BFGS-B", bounds=bounds)
        return _PoolWeights(*map(float, result.x))

    def measure_help(self, seed: int, *, most_voted_J: Integers) -> MeasuredHelp:
        """Measure by cross-validation how much votes raise the likelihood of held-out labels.

        `seed`: random seed of the folds. `most_voted_J`: the class with the most votes, for each of
        the J validation rows.
        """
        row_count = len(self.labels_J)
        gain = 0.0
        standard_error = 0.0
        if row_count >= _FOLDS:
            gain_J = self._measure_held_out_gains(seed)
            gain = float(gain_J.mean())
            standard_error = float(gain_J.std(ddof=1) / row_count**0.5)
        # log f + log (p / f) = log p: the class that is most probable to the active's own model.
        local_class_J = (self.log_frequencies_K + self.log_ratios_JK).argmax(1)
        return MeasuredHelp(
            row_count=row_count,
            gain=gain,
            standard_error=standard_error,
            vote_accuracy=float((most_voted_J == self.labels_J).mean()) if row_count else 0.0,
            local_accuracy=float((local_class_J == self.labels_J).mean()) if row_count else 0.0,
        )

    def _measure_held_out_gains(self, seed: int) -> Floats:
        """Return by how much votes raise the log-likelihood of each validation row's label, (J,).

        The row takes no part in the fit of the weights. `seed`: random seed of the folds.
        """
        generator = np.random.default_rng(derive_seed(seed, "weighing votes"))
        shuffled_rows = generator.permutation(len(self.labels_J))
        gain_J = np.zeros(len(self.labels_J))
        for fold in range(_FOLDS):
            held_out_rows = shuffled_rows[fold::_FOLDS]
            fitted_rows = np.setdiff1d(shuffled_rows, held_out_rows)
            weights_with_votes = self.fit_weights(fitted_rows)
            weights_without_votes = self.fit_weights(fitted_rows, without_votes=True)
            gain_J[held_out_rows] = self.compute_log_likelihood(
                held_out_rows, weights_with_votes
            ) - self.compute_log_likelihood(held_out_rows, weights_without_votes)
        return gain_J


def find_last_layer(networks: ActiveNetworks) -> torch.nn.Linear:
    """Return the last linear layer of the networks' head."""
    linear = list(networks.head.modules())[-1]
    assert isinstance(linear, torch.nn.Linear)
    return linear


def fit_linear(
    layer: torch.nn.Linear,
    inputs_UD: Numbers,
    targets_UK: Floats,
    *,
    rows_with_target_V: Integers,
    labelled_rows_n: Integers,
) -> None:
    """Fit a linear layer without a bias in place, by ridge regression in float64.

    One of a few penalties is chosen: its fit to the unlabelled rows predicts the labelled rows with
    the least squared error.

    Args:
        layer: the layer, D numbers -> K scores, changed in place.
        inputs_UD: the layer's inputs for U rows, with norms of about 1 to 3.
        targets_UK: the class probabilities (or numbers) to learn.
        rows_with_target_V: indices of the rows to fit to, labelled ones included.
        labelled_rows_n: indices of the labelled rows, whose targets are true labels.
    """
    unlabelled_rows_V = np.setdiff1d(rows_with_target_V, labelled_rows_n)
    penalty = _DEFAULT_RIDGE_PENALTY
    if len(unlabelled_rows_V) and len(labelled_rows_n):
        labelled_targets_nK = targets_UK[labelled_rows_n]
        solve_unlabelled_fit = _make_ridge_solver(inputs_UD, targets_UK, unlabelled_rows_V)
        labelled_inputs_nD = inputs_UD[labelled_rows_n].astype(np.float64)

        def compute_error(penalty: float) -> float:
            """Return the mean squared error on the labelled rows of the unlabelled rows' fit."""
            predictions_nK = labelled_inputs_nD @ solve_unlabelled_fit(penalty)
            return float(((predictions_nK - labelled_targets_nK) ** 2).mean())

        penalty = min(_RIDGE_PENALTIES, key=compute_error)
    solve_fit = _make_ridge_solver(inputs_UD, targets_UK, rows_with_target_V)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(solve_fit(penalty).T))


def _make_ridge_solver(
    inputs_UD: Numbers, targets_UK: Floats, rows_V: Integers
) -> Callable[[float], Floats]:
    """Return a function from a penalty to the weights (D, K) of ridge regression on these rows.

    The sums over rows are computed once here, so that several penalties can be tried cheaply. Rows
    are copied a block at a time, to save memory.

    `inputs_UD`: D features of U rows. `targets_UK`: class probabilities or numbers to learn.
    `rows_V`: indices of the rows to fit to.
    """
    width = inputs_UD.shape[1]
    gram_DD = np.zeros((width, width))
    moment_DK = np.zeros((width, targets_UK.shape[1]))
    for start in range(0, len(rows_V), ROWS_PER_BLOCK):
        block_V = rows_V[start : start + ROWS_PER_BLOCK]
        block_inputs_VD = inputs_UD[block_V].astype(np.float64)
        gram_DD += block_inputs_VD.T @ block_inputs_VD
        moment_DK += block_inputs_VD.T @ targets_UK[block_V]
    identity_DD = np.eye(width)
    return lambda strength: np.asarray(np.linalg.solve(gram_DD + strength * identity_DD, moment_DK))


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
        with self.forward_context(step):
            scores_BK, _ = self.networks(self.compute.take_rows(self.features_N, rows_B), None)
        loss = self._loss(scores_BK.to(self.compute.dtype), self.compute.move_batch(targets_BK))
        loss.backward()
        self.step()
        return defer_reading(loss)

    def predict(self, rows_B: Tensor) -> Tensor:
        """Return the network's outputs for these table rows, in its current mode, (B, K)."""
        with self.forward_context("predict"):
            scores_BK: Tensor = self.networks(self.features_N[rows_B], None)[0]
        return scores_BK

"""The trainers of each role, on tensors alone, without messages, contracts or other parties.

APFed: the active descends on its labels, and on what the passives' sum adds to their loss
(`ActiveTrainer`); a passive on its own objective, whose gradient by z it returns
(`PassiveTrainer`). Joint training: the active's head reads all representations and gives a gradient
for each (`HeadTrainer`), from which a passive's encoder learns (`EncoderTrainer`).

Letters: N rows of a table, B batch, A of its rows that are sent, U rows to label, D numbers of a
representation, K classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from secure_apfed.base.seeds import draws_nothing
from secure_apfed.base.transfers import StepLoss, defer_reading, read_losses
from secure_apfed.data import UNLABELLED
from secure_apfed.data.lazy_rows import score_in_parts
from secure_apfed.errors import ModelError
from secure_apfed.labellers import Spreading
from secure_apfed.learning.black_box import BlackBox
from secure_apfed.learning.descent import (
    BY_SETTINGS,
    EVERY,
    ActiveNetworks,
    OwnSteps,
    Trainer,
    explain_failure,
)
from secure_apfed.learning.votes import find_last_layer, fit_linear
from secure_apfed.measures.table import Scored, compute_balanced_weights
from secure_apfed.measures.tasks import Classification, Task, score_rows
from secure_apfed.privacy.dp_sgd import PrivateGradient, PrivateUpdates
from secure_apfed.privacy.measured import check_loss, check_objective, check_row_wise
from secure_apfed.settings.training import TrainSettings

_EVALUATION_ROWS = 1000


def make_joint_loss(task: Tensor | float, z_A: Tensor, gradient_A: Tensor) -> Tensor:
    """Return a scalar whose gradient is Eq. (9)'s: the task's, plus `gradient_A` propagated through
    z.

    `task` 0.0 leaves the passives' part only.
    """
    return task + (gradient_A * z_A).sum()


@dataclass(frozen=True)
class Batch:
    """A batch that waits for its update, in the autograd graph.

    Attributes:
        rows: positions in the own table, (B,).
        loss: mean task loss; None: labels come after the exchange (`train.labels`).
        h: of the rows that passives may help with, before the guard, (A, *shape); None: the batch
            trains the active alone.
    """

    step: int
    rows: Tensor
    loss: Tensor | None
    h: Tensor | None


class LabelTrainer(Trainer):
    """A trainer on a table with labels.

    Args:
        modules: by name what it trains.
        features_N, labels_N: the table, which moves to the device.
    """

    def __init__(
        self,
        owner: str,
        modules: Mapping[str, nn.Module],
        *,
        features_N: Tensor,
        labels_N: Tensor,
        train: TrainSettings,
        seed: int,
        own_steps: OwnSteps,
    ) -> None:
        """Move networks, features and labels to the device.

        `owner`: the party, for errors. `modules`: networks by what they are: encoder, head, ....
        """
        super().__init__(owner, modules, train=train, seed=seed, own_steps=own_steps)
        self.features_N, self.labels_N = map(self.compute.move_tensor, (features_N, labels_N))
        self._weighs_classes = train.class_weights == "balanced"
        self._weights_K: Tensor | None = None

    def weigh_classes(self, rows: Tensor, classes: int) -> None:
        """Weight all classes equally in the loss, by the label counts of these
        rows, if configured.
        """
        if self._weighs_classes:
            labels_n = self.labels_N[rows.to(self.labels_N.device)]
            weights_K = compute_balanced_weights(labels_n, classes)
            self._weights_K = self.compute.move_tensor(weights_K)


class ActiveTrainer(LabelTrainer):
    """The active's networks and optimiser: runs its batches forward and applies the updates.

    Args:
        task: what it learns; None: classes.
        rests_on_rows: whether a privacy bound assumes that no row changes another row's output; the
            first batch is then tested for it.
    """

    def __init__(
        self,
        owner: str,
        networks: ActiveNetworks,
        *,
        features_N: Tensor,
        labels_N: Tensor,
        train: TrainSettings,
        seed: int,
        private: PrivateUpdates | None = None,
        task: Task | None = None,
        own_steps: OwnSteps = BY_SETTINGS,
        rests_on_rows: bool = False,
    ) -> None:
        """Move table and networks to the device; under DP-SGD, hook per-example gradients.

        `owner`: the party, for errors. `features_N`: the table's rows (N, *shape). `private`:
        DP-SGD of the updates; None: none. `rests_on_rows`: whether a promise needs that no row
        changes another row's result.
        """
        self.networks = networks
        self.task = task or Classification()
        self.knows_loss = private is None and not train.meets_labels_after
        modules = dict(networks.named_children())
        super().__init__(
            owner,
            modules,
            features_N=features_N,
            labels_N=labels_N,
            train=train,
            seed=seed,
            own_steps=own_steps,
        )
        self.private = private
        self._private = PrivateGradient(owner, modules, private) if private else None
        self._reads_labels = not train.meets_labels_after
        self._check_due = rests_on_rows
        self._is_first = private is None  # an error may tell nothing of private records

    def forward(self, step: int, rows_B: Tensor, aligned: Tensor | None) -> Batch:
        """Run the forward pass of one batch.

        `aligned`: indices within the batch of the rows to send; None: nothing is sent. Raises
        ModelError: parameters that are not finite, under private training.
        """
        if self._check_due and len(rows_B) > 1:
            with explain_failure(self._owner, f"network on a batch of {len(rows_B)} rows"):
                self.check_rows(rows_B)
            self._check_due = False
        self.zero_grad()
        self.note_rows(step, rows_B)
        if self._private:
            self._private.forget_batch()
        compute = self.compute
        dtype = compute.dtype
        picked: Tensor | slice | None = None
        if aligned is not None:
            picked = EVERY if len(aligned) == len(rows_B) else compute.move_batch(aligned)
        features_B = compute.take_rows(self.features_N, rows_B)
        with self._run_networks(features_B), self.forward_pass(step):
            scores_BK, h_A = self.networks(features_B, picked)
        if self._is_first:
            _require_finite(self._owner, "networks", scores_BK, h_A)
            self._is_first = False
        loss = None
        if self._reads_labels:
            labels_B = self.labels_N[compute.move_batch(rows_B)]
            loss = self.task.compute_loss(scores_BK.to(dtype), labels_B, self._weights_K)
        if h_A is not None:
            h_A = h_A.to(dtype)
            if self._private:
                h_A = self._private.finite_rows(h_A.flatten(1)).reshape(h_A.shape)
        return Batch(step, rows_B, loss, h_A)

    def train_on_batch(self, batch: Batch, joint: Tensor | None = None) -> StepLoss:
        """Take one step on the task loss, or on a joint loss that includes it; return the task
        loss.

        That is 0.0 where labels come after the exchange: then a batch without joint loss changes
        nothing. Raises BudgetExhaustedError: the update would exceed the budget of private
        training; ModelError: the gradient is not finite, where its norm is bounded.
        """
        loss = batch.loss if joint is None else joint
        if loss is None:
            return 0.0
        if self._private:
            self._private.backward(loss, step=batch.step, rows=batch.rows)
        else:
            self.require_own_weights(loss)
            loss.backward()
        if batch.loss is not None:
            self.note_loss(batch.loss)
        self.step()
        return 0.0 if batch.loss is None else defer_reading(batch.loss)

    def replace_labels(self, labels_N: Tensor) -> None:
        self.labels_N = self.compute.move_tensor(labels_N)

    def check_rows(self, rows_B: Tensor) -> None:
        """Refuse networks, and in private training a loss, in which one row changes another's
        result.

        The guard's bound for a row, and DP-SGD's for a record, assume that. Raises PromiseError:
        names the part that mixes rows, and the change.
        """
        features_B = self.compute.take_rows(self.features_N, rows_B)
        labels_B = self.labels_N[self.compute.move_batch(rows_B)]
        check_row_wise(
            RowOutputs(self.networks, is_whole=self.private is not None),
            features_B,
            owner=self._owner,
        )
        if self.private is None:
            return
        labelled_B = labels_B != UNLABELLED
        if int(labelled_B.sum()) > 1:
            with torch.no_grad(), self.forward_pass("check"):
                scores_BK, _ = self.networks(features_B[labelled_B], None)
            scores_BK = scores_BK.to(self.compute.dtype)
            check_loss(self.task, scores_BK, labels_B[labelled_B], owner=self._owner)

    def score_rows(self, rows: Tensor) -> Scored:
        """Return the local model's scores of `rows` of the active's own table (Eq. 11)."""
        with self.evaluation_mode():
            return score_rows(self.task, self._predict_rows, rows, self.labels_N)

    def spread_labels(self, rows_U: Tensor) -> None:
        """Spread labels over similar representations h to these rows, and fit the head's last
        layer.

        Labelled rows keep their labels, and rows that no label reaches are left out.
        """
        networks = self.networks
        here_U = rows_U.to(self.compute.device)
        linear = find_last_layer(networks)
        with self.evaluation_mode(), torch.no_grad(), self.forward_pass("spread"):
            h_UD = networks.encoder(self.features_N[here_U])
            read_UD = _capture_input(networks.head, linear, h_UD)
        labels_U = self.labels_N[here_U].cpu().numpy()
        labelled_n = np.flatnonzero(labels_U != UNLABELLED)
        labels_n = labels_U[labelled_n]
        classes = linear.out_features
        targets_UK = Spreading().label_rows(h_UD.flatten(1).double(), labelled_n, labels_n, classes)
        targets_UK[labelled_n] = np.eye(classes)[labels_n]
        said_V = np.flatnonzero(targets_UK.any(axis=1))
        # Ridge knows rows that are about 1 long, and a bias is a column of 1.
        read_UD = read_UD.double().cpu()
        size = float(read_UD.square().sum(1).mean().sqrt()) or 1.0
        constant_U1 = torch.full_like(read_UD[:, :1], linear.bias is not None)
        phi_UD = torch.cat([read_UD / size, constant_U1], dim=1)
        fitted = nn.Linear(phi_UD.shape[1], classes, bias=False, dtype=torch.float64)
        fit_linear(fitted, phi_UD.numpy(), targets_UK, taught_V=said_V, labelled_n=labelled_n)
        with torch.no_grad():
            linear.weight.copy_(fitted.weight[:, :-1] / size)
            if linear.bias is not None:
                linear.bias.copy_(fitted.weight[:, -1])

    @torch.no_grad()
    def loss_on(self, rows: Tensor) -> float:
        """Return the mean task loss of `rows` of its own table."""
        with self.evaluation_mode():
            parts = [
                self._compute_loss(rows_B) * len(rows_B)
                for rows_B in rows.to(self.labels_N.device).split(_EVALUATION_ROWS)
            ]
        return sum(read_losses(parts)) / len(rows)

    def _compute_loss(self, rows_B: Tensor) -> Tensor:
        """Return the mean task loss of these rows, with class weights if they are set."""
        weights_K = None if self._weights_K is None else self._weights_K.float()
        return self.task.compute_loss(
            self._predict_rows(rows_B).float(), self.labels_N[rows_B], weights_K
        )

    def _predict_rows(self, rows_B: Tensor) -> Tensor:
        with self.forward_pass("predict"):
            return score_in_parts(self._score_features, self.features_N, rows_B)

    def _score_features(self, features_B: Tensor) -> Tensor:
        scores_BK: Tensor = self.networks(features_B, None)[0]
        return scores_BK


@draws_nothing
class RowOutputs(nn.Module):
    """The outputs of the active's networks for each row.

    These are the representation that is sent and, if `is_whole` (one bound for all), also the
    scores.
    """

    __name__ = "its network"  # as messages call it

    def __init__(self, networks: ActiveNetworks, *, is_whole: bool) -> None:
        """Take the active's networks as one module, to measure whether rows move each other."""
        super().__init__()
        self.networks = networks
        self.is_whole = is_whole

    def forward(self, features_B: Tensor) -> Tensor:
        """Return the representation of each row, with the scores appended if `is_whole`."""
        scores_BK, h_B = self.networks(features_B)
        assert h_B is not None
        return torch.cat([h_B.flatten(1), scores_BK], dim=1) if self.is_whole else h_B


class PassiveTrainer(Trainer):
    """A passive's objective and optimiser: computes the gradient of its loss for each row of z, and
    updates its own networks.

    Args:
        objective: (z, own features) -> loss, with its networks.
        rests_on_rows: see `ActiveTrainer`; here for the gradient with respect to each row of z.
    """

    def __init__(
        self,
        owner: str,
        objective: nn.Module,
        *,
        features_N: Tensor,
        train: TrainSettings,
        seed: int,
        own_steps: OwnSteps = BY_SETTINGS,
        rests_on_rows: bool = False,
    ) -> None:
        """Move the objective's networks and the features to the device.

        `owner`: the party, for errors. `rests_on_rows`: whether a promise needs that no row changes
        another row's result.
        """
        modules = {"objective": objective}
        super().__init__(
            owner, modules, train=train, seed=seed, own_steps=own_steps, may_be_fixed=True
        )
        self.objective = objective
        self.features_N = self.compute.move_tensor(features_N)
        self._checks_gradients = bool(getattr(objective, "is_own", False))
        self._check_due = rests_on_rows

    def check_rows(self, rows_B: Tensor, sent_B: Tensor) -> None:
        """Measure on this batch that an objective which declares `row_wise` mixes no rows.

        Noise for one row a person is enough only then.

        Args:
            rows_B: own rows, positions (B,).
            sent_B: the representations received for them, z (B, *shape).

        Raises PromiseError: a row's gradient moves with another row; see `check_objective`.
        """
        features_B = self.compute.take_rows(self.features_N, rows_B)
        check_objective(
            self.objective, self.compute.move_tensor(sent_B), features_B, owner=self._owner
        )

    def train_on_rows(self, step: int, rows_B: Tensor, sent_B: Tensor, *, weight: float) -> Tensor:
        """Take one step on the own loss (Eq. 10); return lambda_p B dL_p/dz (Eqs. 7 and 9), (B,
        *shape).

        That is lambda_p times the gradient of each row's own loss, so that a bound on a row does
        not depend on the batch size; the active divides the sum by the number of rows. Raises
        ModelError: no gradient reaches z.

        `sent_B`: z, the representations that the passive answers. `weight`: lambda_p.
        """
        if self._check_due and len(rows_B) > 1:
            self.check_rows(rows_B, sent_B)
            self._check_due = False
        z_B = self.compute.move_batch(sent_B).requires_grad_()
        self.zero_grad()
        self.note_rows(step, rows_B)
        features_B = self.compute.take_rows(self.features_N, rows_B)
        with self.forward_pass(step):
            loss = self.objective(z_B, features_B)
        self.require_own_weights(loss, z_B)
        loss.backward()
        if z_B.grad is None:
            raise ModelError(
                f"{self._owner}: no gradient of its loss reaches z, so that it contributes "
                "nothing; compute the loss from z"
            )
        # Of a loss of ours the sum checks it, so that a GPU is not asked here.
        if self._checks_gradients and not bool(z_B.grad.isfinite().all()):
            raise ModelError(
                f"{self._owner}: the gradient of its loss by z is NaN or infinite; lower "
                "train.learning_rate, or mend the loss, as a square root or a norm at 0"
            )
        self.note_loss(loss)
        self.step()
        return z_B.grad * (weight * len(z_B))


PassiveDescent: TypeAlias = PassiveTrainer | BlackBox
"""Trainer with which a passive of APFed answers: of its networks, or of black-box code."""


class HeadTrainer(LabelTrainer):
    """The active's encoder, and the head over all parties' representations, concatenated.

    Args:
        owner, encoder, head, features_N, labels_N: the active's name, networks and data.
        passives: whose representations follow its own, in the order of the head.
        task: what it learns; None: classes.
    """

    def __init__(
        self,
        owner: str,
        encoder: nn.Module,
        head: nn.Module,
        *,
        features_N: Tensor,
        labels_N: Tensor,
        passives: Sequence[str],
        train: TrainSettings,
        seed: int,
        task: Task | None = None,
        own_steps: OwnSteps = BY_SETTINGS,
    ) -> None:
        """Move networks, features and labels to the device.

        `owner`: the party, for errors.
        """
        self.encoder = encoder
        self.head = head
        self._passives = tuple(passives)
        self.task = task or Classification()
        super().__init__(
            owner,
            {"encoder": encoder, "head": head},
            features_N=features_N,
            labels_N=labels_N,
            train=train,
            seed=seed,
            own_steps=own_steps,
        )

    def train_on_parts(
        self, step: int, own_B: Tensor, parts: Mapping[str, Tensor]
    ) -> tuple[StepLoss, dict[str, Tensor]]:
        """Take one step; return the task loss, and its gradient on each passive's
        part, by passive.

        `own_B`: the active's rows. `parts`: each passive's representations.
        """
        parts = {name: h_B.requires_grad_() for name, h_B in parts.items()}
        self.zero_grad()
        self.note_rows(step, own_B)
        features_B = self.compute.take_rows(self.features_N, own_B)
        with self._run_networks(features_B), self.forward_pass(step):
            scores_BK = self.compute_scores(self.encoder(features_B), parts)
        labels_B = self.labels_N[self.compute.move_batch(own_B)]
        scores_BK = scores_BK.to(self.compute.dtype)
        loss = self.task.compute_loss(scores_BK, labels_B, self._weights_K)
        self.require_own_weights(loss, *parts.values())
        loss.backward()
        self.note_loss(loss)
        self.step()
        return defer_reading(loss), {
            name: h_B.grad for name, h_B in parts.items() if h_B.grad is not None
        }

    def compute_scores(self, own_B: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the head's scores (B, K) for own representations and the passives' parts."""
        read = [h_B.flatten(1) for h_B in self.merge_parts(own_B, parts)]
        scores_BK: Tensor = self.head(torch.cat(read, dim=1))
        return scores_BK

    def merge_parts(self, own_B: Tensor, parts: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the inputs of the head, side by side."""
        return (own_B, *(parts[name] for name in self._passives))


class SumTrainer(HeadTrainer):
    """The head reads the sum of all parties' representations: its one part is that of the others.

    With linear encoders and no clip that is one network on the concatenated table.
    """

    def merge_parts(self, own_B: Tensor, parts: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the head's inputs: own representation plus the sum of the passives'."""
        (others_BD,) = (parts[name] for name in self._passives)
        return (own_B.flatten(1) + others_BD,)


class EncoderTrainer(Trainer):
    """A passive's encoder, which learns from the gradient on what it sent."""

    knows_loss = False

    def __init__(
        self,
        owner: str,
        encoder: nn.Module,
        *,
        features_N: Tensor,
        train: TrainSettings,
        seed: int,
        own_steps: OwnSteps = BY_SETTINGS,
    ) -> None:
        """Move encoder and features to the device.

        `owner`: the party, for errors.
        """
        self.encoder = encoder
        modules = {"encoder": encoder}
        # A frozen encoder sends, and learns nothing.
        has_weights = next(encoder.parameters(), None) is not None
        super().__init__(
            owner, modules, train=train, seed=seed, own_steps=own_steps, may_be_fixed=has_weights
        )
        self.features_N = self.compute.move_tensor(features_N)

    def check_rows(self, rows_B: Tensor, *, is_training: bool) -> None:
        """Refuse an encoder in which one of these rows moves another; see `check_row_wise`."""
        features_B = self.compute.take_rows(self.features_N, rows_B)
        check_row_wise(self.encoder, features_B, training=is_training, owner=self._owner)

    def encode_rows(self, step: int, rows_B: Tensor, *, is_training: bool) -> Tensor:
        """Return representations of these rows for the guard.

        `is_training`: with dropout, and in the autograd graph.
        """
        self.set_training(is_training)
        if is_training:
            self.note_rows(step, rows_B)
        features_B = self.compute.take_rows(self.features_N, rows_B)
        with (
            self._run_networks(features_B, training=is_training),
            torch.set_grad_enabled(is_training),
            self.forward_pass(step),
        ):
            h_B: Tensor = self.encoder(features_B)
        return h_B.to(self.compute.dtype)

    def apply_gradient(self, z_B: Tensor, gradient_B: Tensor) -> None:
        """Take one step from the gradient on z, the representations computed last; frozen networks
        stay.
        """
        self.zero_grad()
        loss = make_joint_loss(0.0, z_B, self.compute.move_batch(gradient_B))
        if loss.requires_grad:
            self.require_own_weights(loss)
            loss.backward()
        self.step()


def _require_finite(owner: str, subject: str, *results: Tensor | None) -> None:
    """Refuse networks that give NaN from the start.

    `owner`: the party, for errors. `subject`: what errors call the outputs.

    Raises:
        ModelError: a result is NaN or infinite.
    """
    for result in results:
        if result is not None and not bool(result.isfinite().all()):
            raise ModelError(
                f"{owner}: its {subject} give NaN or infinite numbers on the first batch, before "
                "any step; look for a division by 0 or a logarithm in them, or at the weights that "
                "they begin with"
            )


def _capture_input(head: nn.Module, linear: nn.Linear, h_UD: Tensor) -> Tensor:
    """Return the input of the head's last layer."""
    read: list[Tensor] = []
    hook = linear.register_forward_pre_hook(lambda _, arguments: read.append(arguments[0]))
    try:
        head(h_UD)
    finally:
        hook.remove()
    return read[0]

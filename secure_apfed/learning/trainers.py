"""The trainers of each role, on tensors alone, without messages, contracts or other parties.

APFed: the active descends on its labels, and on what the passives' sum adds to their loss
(`ActiveTrainer`); a passive on its own objective, whose gradient by z it returns
(`PassiveTrainer`). Joint training: the active's head reads all representations and gives a gradient
for each (`HeadTrainer`), from which a passive's encoder learns (`EncoderTrainer`).

Letters: N rows of a table, B batch, A of its rows that are sent, U rows to label, D numbers of a
representation, K classes.
"""

from collections.abc import Callable, Mapping, Sequence
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
from secure_apfed.measures.table import Scored, compute_balanced_weights, score_model
from secure_apfed.measures.tasks import Classification, Task, score_rows
from secure_apfed.privacy.dp_sgd import PrivateGradient, PrivateUpdates
from secure_apfed.privacy.measured import check_loss, check_objective, check_row_wise
from secure_apfed.settings.training import TrainSettings

_EVALUATION_ROWS = 1000
"""Rows that are evaluated at a time, to save memory."""


def make_joint_loss(task: Tensor | float, z_A: Tensor, gradient_A: Tensor) -> Tensor:
    """Return a scalar whose gradient is the active's update in APFed (Eq. 9).

    The gradient is that of the task loss, plus the passives' gradient propagated through z.

    Args:
        task: the task loss; 0.0: only the passives' gradient counts.
        z_A: representations of the A rows that were sent, in the autograd graph.
        gradient_A: the passives' gradient by z, of the same shape.
    """
    # The derivative of this sum by z is the passives' gradient.
    return task + (gradient_A * z_A).sum()


@dataclass(frozen=True)
class Batch:
    """The forward pass of a batch, in the autograd graph, before its update.

    Attributes:
        step: number of the run's step.
        rows: positions in the active's table, (B,).
        loss: mean task loss; None: labels come after the exchange (`train.labels`).
        h: representations of the rows to send, (A, *shape), before the guard adds noise; None:
            nothing is sent.
    """

    step: int
    rows: Tensor
    loss: Tensor | None
    h: Tensor | None


class LabelTrainer(Trainer):
    """A trainer on a table with labels."""

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

        Args:
            owner: name of the party, for errors.
            modules: its networks by role: encoder, head, and so on.
            features_N: the table's N rows, (N, *shape).
            labels_N: their labels, (N,), `UNLABELLED` for unknown ones.
            train: training settings.
            seed: random seed of dropout.
            own_steps: the party's own optimizer and scheduler.
        """
        super().__init__(owner, modules, train=train, seed=seed, own_steps=own_steps)
        self.features_N = self.compute.move_tensor(features_N)
        self.labels_N = self.compute.move_tensor(labels_N)
        self._weighs_classes = train.class_weights == "balanced"
        self._weights_K: Tensor | None = None  # weight of each class in the loss; None: equal

    def weigh_classes(self, rows: Tensor, classes: int) -> None:
        """If configured, weight classes in the loss by the inverse of their frequency.

        `rows`: the labelled rows whose labels are counted, (n,). `classes`: number of classes.
        """
        if self._weighs_classes:
            labels_n = self.labels_N[rows.to(self.labels_N.device)]
            weights_K = compute_balanced_weights(labels_n, classes)
            self._weights_K = self.compute.move_tensor(weights_K)


class ActiveTrainer(LabelTrainer):
    """The active's networks and optimiser: runs its batches forward and applies the updates."""

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

        Args:
            owner: name of the active, for errors.
            networks: the active's networks.
            features_N, labels_N: the table's N rows and their labels, `UNLABELLED` for unknown
                ones.
            train: training settings.
            seed: random seed of dropout.
            private: DP-SGD of the updates; None: they are not private.
            task: the learning task; None: classification.
            own_steps: the party's own optimizer and scheduler.
            rests_on_rows: whether a privacy bound assumes that no row changes another row's output;
                the first batch is then tested for it.
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
        # The outputs of the first batch are checked. Under DP-SGD they are not, since an error
        # would reveal something about the batch's records.
        self._checks_outputs = private is None

    def forward(self, step: int, rows_B: Tensor, aligned: Tensor | None) -> Batch:
        """Run the forward pass of one batch.

        Args:
            step: number of the run's step.
            rows_B: positions in the active's table, (B,).
            aligned: indices within the batch of the A rows to send; None: nothing is sent.

        Raises ModelError: outputs of the first batch, or under DP-SGD parameters, are not finite;
        PromiseError: a row changes another row's output, which a privacy bound excludes.
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
        sent: Tensor | slice | None = None
        if aligned is not None:
            # A slice for all rows needs no transfer of indices.
            sent = EVERY if len(aligned) == len(rows_B) else compute.move_batch(aligned)
        features_B = compute.take_rows(self.features_N, rows_B)
        with self._run_networks(features_B), self.forward_pass(step):
            scores_BK, h_A = self.networks(features_B, sent)
        if self._checks_outputs:
            _require_finite(self._owner, "networks", scores_BK, h_A)
            self._checks_outputs = False
        loss = None
        if self._reads_labels:
            labels_B = self.labels_N[compute.move_batch(rows_B)]
            loss = self.task.compute_loss(scores_BK.to(dtype), labels_B, self._weights_K)
        if h_A is not None:
            h_A = h_A.to(dtype)
            if self._private:
                h_A = self._private.zero_nonfinite_rows(h_A.flatten(1)).reshape(h_A.shape)
        return Batch(step, rows_B, loss, h_A)

    def train_on_batch(self, batch: Batch, joint: Tensor | None = None) -> StepLoss:
        """Take one step on a batch's loss; return its task loss.

        If labels come after the exchange (`train.labels: after`), the task loss is 0.0, and without
        `joint` nothing is trained.

        Args:
            batch: the forward pass, as `forward` returned it.
            joint: a loss that includes the task loss, as `make_joint_loss` returns; None: the task
                loss alone.

        Raises:
            BudgetExhaustedError: the update would exceed the budget of private training.
            ModelError: the gradient is not finite, and its norm is bounded.
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

    def train_on_gradient(self, batch: Batch, z_A: Tensor, gradient_A: Tensor) -> StepLoss:
        """Take one step on task loss and passives' gradient together (Eq. 9); return the task loss.

        `batch`: the forward pass of the batch. `z_A`: the representations of the A rows that were
        sent, still in the autograd graph. `gradient_A`: the passives' gradient by `z_A`.
        Raises the errors of `train_on_batch`.
        """
        task_loss = 0.0 if batch.loss is None else batch.loss
        return self.train_on_batch(batch, make_joint_loss(task_loss, z_A, gradient_A))

    def replace_labels(self, labels_N: Tensor) -> None:
        """Train on these labels of the table's N rows from now on."""
        self.labels_N = self.compute.move_tensor(labels_N)

    def check_rows(self, rows_B: Tensor) -> None:
        """Raise PromiseError if one row of this batch changes another row's output.

        The privacy bound of noisy representations assumes that no row does. Under DP-SGD, whose
        bound is for a record, the loss of each row is tested, too.
        """
        features_B = self.compute.take_rows(self.features_N, rows_B)
        labels_B = self.labels_N[self.compute.move_batch(rows_B)]
        outputs = RowOutputs(self.networks, with_scores=self.private is not None)
        check_row_wise(outputs, features_B, owner=self._owner)
        if self.private is None:
            return
        labelled_B = labels_B != UNLABELLED
        if int(labelled_B.sum()) > 1:
            with torch.no_grad(), self.forward_pass("check"):
                scores_BK, _ = self.networks(features_B[labelled_B], None)
            scores_BK = scores_BK.to(self.compute.dtype)
            check_loss(self.task, scores_BK, labels_B[labelled_B], owner=self._owner)

    def score_rows(self, rows: Tensor) -> Scored:
        """Return the active's own scores of these rows of its table, with labels (APFed, Eq. 11).

        No other party is needed.
        """
        with self.evaluation_mode():
            return score_rows(self.task, self._predict_rows, rows, self.labels_N)

    def spread_labels(self, rows_U: Tensor) -> None:
        """Spread labels over representations h, and fit the head's last layer to the result.

        The layer is fitted by ridge regression. Labelled rows keep their labels; rows that no label
        reaches are left out.

        `rows_U`: U rows of the active's table, labelled or not.
        """
        networks = self.networks
        positions_U = rows_U.to(self.compute.device)
        linear = find_last_layer(networks)
        with self.evaluation_mode(), torch.no_grad(), self.forward_pass("spread"):
            h_UD = networks.encoder(self.features_N[positions_U])
            input_UD = _capture_input(networks.head, linear, h_UD)
        labels_U = self.labels_N[positions_U].cpu().numpy()
        labelled_n = np.flatnonzero(labels_U != UNLABELLED)
        labels_n = labels_U[labelled_n]
        classes = linear.out_features
        targets_UK = Spreading().label_rows(h_UD.flatten(1).double(), labelled_n, labels_n, classes)
        targets_UK[labelled_n] = np.eye(classes)[labels_n]
        taught_V = np.flatnonzero(targets_UK.any(axis=1))  # the rows that a label reached
        # `fit_linear` expects rows of a norm of about 1, and a bias as a column of ones.
        input_UD = input_UD.double().cpu()
        root_mean_square = float(input_UD.square().sum(1).mean().sqrt()) or 1.0
        constant_U1 = torch.full_like(input_UD[:, :1], linear.bias is not None)
        phi_UD = torch.cat([input_UD / root_mean_square, constant_U1], dim=1)
        fitted = nn.Linear(phi_UD.shape[1], classes, bias=False, dtype=torch.float64)
        fit_linear(fitted, phi_UD.numpy(), targets_UK, taught_V=taught_V, labelled_n=labelled_n)
        with torch.no_grad():
            linear.weight.copy_(fitted.weight[:, :-1] / root_mean_square)
            if linear.bias is not None:
                linear.bias.copy_(fitted.weight[:, -1])

    @torch.no_grad()
    def compute_mean_loss(self, rows: Tensor) -> float:
        """Return the mean task loss of these rows of the active's table, without dropout.

        They are evaluated in blocks, to save memory.
        """
        with self.evaluation_mode():
            sums = [
                self._compute_loss(rows_B) * len(rows_B)
                for rows_B in rows.to(self.labels_N.device).split(_EVALUATION_ROWS)
            ]
        return sum(read_losses(sums)) / len(rows)

    def _compute_loss(self, rows_B: Tensor) -> Tensor:
        """Return the mean task loss of these rows, with class weights if they are set."""
        weights_K = None if self._weights_K is None else self._weights_K.float()
        return self.task.compute_loss(
            self._predict_rows(rows_B).float(), self.labels_N[rows_B], weights_K
        )

    def _predict_rows(self, rows_B: Tensor) -> Tensor:
        """Return class scores (B, K) of these rows of the table; rows may be read lazily."""
        with self.forward_pass("predict"):
            return score_in_parts(self._score_features, self.features_N, rows_B)

    def _score_features(self, features_B: Tensor) -> Tensor:
        """Return class scores (B, K) of these features."""
        scores_BK: Tensor = self.networks(features_B, None)[0]
        return scores_BK


@draws_nothing
class RowOutputs(nn.Module):
    """A module whose outputs are all outputs of the active's networks that a privacy bound covers.

    `check_row_wise` measures on it whether a row changes another row's outputs.
    """

    __name__ = "its network"  # in error messages

    def __init__(self, networks: ActiveNetworks, *, with_scores: bool) -> None:
        """Take the networks; `with_scores`: whether outputs are scores besides representations."""
        super().__init__()
        self.networks = networks
        self.with_scores = with_scores

    def forward(self, features_B: Tensor) -> Tensor:
        """Return the representation of each row, with its scores appended if `with_scores`."""
        scores_BK, h_B = self.networks(features_B)
        assert h_B is not None
        return torch.cat([h_B.flatten(1), scores_BK], dim=1) if self.with_scores else h_B


class PassiveTrainer(Trainer):
    """A passive's objective and optimiser in APFed.

    It computes the gradient of the passive's loss by each row of z, the active's representations,
    and updates the passive's own networks.
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

        Args:
            owner: name of the passive, for errors.
            objective: a module from z and own features to the loss, with its networks.
            features_N: the passive's N rows, (N, *shape).
            train: training settings.
            seed: random seed of dropout.
            own_steps: the party's own optimizer and scheduler.
            rests_on_rows: whether a privacy bound assumes that a row's gradient by z depends on no
                other row; the first batch is then tested for it.
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
        """Raise PromiseError if the gradient of a row in this batch depends on another row.

        The noise on contributions covers one row per person only if it does not; see
        `check_objective`.

        Args:
            rows_B: B rows of the passive's table.
            sent_B: z, the representations received for them, (B, *shape).
        """
        features_B = self.compute.take_rows(self.features_N, rows_B)
        check_objective(
            self.objective, self.compute.move_tensor(sent_B), features_B, owner=self._owner
        )

    def train_on_rows(self, step: int, rows_B: Tensor, sent_B: Tensor, *, weight: float) -> Tensor:
        """Take one step on the passive's loss, and return its weighted gradient by z, (B, *shape).

        The step is APFed's Eq. (10). The result is lambda_p B dL_p/dz (Eqs. 7 and 9), where the
        loss L_p is a mean over the B rows. So it is lambda_p times the gradient of each row's own
        loss, and a bound on a row does not depend on the batch size. The active divides the sum by
        the number of rows.

        Args:
            step: number of the run's step.
            rows_B: B rows of the passive's table.
            sent_B: z, the representations received for them, (B, *shape).
            weight: lambda_p, the weight of this passive p in the joint loss.

        Raises ModelError: no gradient, or one that is not finite, reaches z.
        """
        if self._check_due and len(rows_B) > 1:
            self.check_rows(rows_B, sent_B)
            self._check_due = False
        z_B = self.compute.move_batch(sent_B).detach().requires_grad_()
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
        # The gradient of a built-in loss is checked later, where it is summed; a check here would
        # wait for a GPU.
        if self._checks_gradients and not bool(z_B.grad.isfinite().all()):
            raise ModelError(
                f"{self._owner}: the gradient of its loss by z is NaN or infinite; lower "
                "train.learning_rate, or mend the loss, as a square root or a norm at 0"
            )
        self.note_loss(loss)
        self.step()
        return z_B.grad * (weight * len(z_B))


PassiveDescent: TypeAlias = PassiveTrainer | BlackBox
"""The trainer of a passive in APFed: with networks of its own, or with black-box code."""


class HeadTrainer(LabelTrainer):
    """The active's encoder, and a head that reads all parties' representations side by side."""

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

        Args:
            owner: name of the active, for errors.
            encoder, head: the active's networks.
            features_N, labels_N: the table's N rows and their labels, `UNLABELLED` for unknown
                ones.
            passives: names of the passives whose representations follow the active's own in the
                head's input, in this order.
            train: training settings.
            seed: random seed of dropout.
            task: the learning task; None: classification.
            own_steps: the party's own optimizer and scheduler.
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

    def score_predictions(self, predict: Callable[[Tensor], Tensor], rows: Tensor) -> Scored:
        """Return the scores that `predict` gives these rows of the table, with their labels.

        `predict`: function from positions of rows (B,) to scores (B, K).
        """
        return score_model(predict, rows, self.labels_N)

    def check_head(self, read_BD: Tensor) -> None:
        """Refuse a head in which a row of the input changes another row's output.

        `read_BD`: B rows of the head's input, D numbers each. The head is tested in evaluation
        mode. Raises PromiseError: names the head, and the change.
        """
        check_row_wise(self.head, read_BD, training=False, owner=self._owner)

    def train_on_parts(
        self, step: int, rows_B: Tensor, parts: Mapping[str, Tensor]
    ) -> tuple[StepLoss, dict[str, Tensor]]:
        """Take one step with the passives' representations of a batch.

        Args:
            step: number of the run's step.
            rows_B: B rows of the active's table.
            parts: mapping from passive name to its representations of these rows, (B, *shape).

        Returns the task loss, and for each passive the gradient by the representations that it
        sent.
        """
        # Leaves of the graph, so that `backward` yields each passive's gradient.
        parts = {name: h_B.requires_grad_() for name, h_B in parts.items()}
        self.zero_grad()
        self.note_rows(step, rows_B)
        features_B = self.compute.take_rows(self.features_N, rows_B)
        with self._run_networks(features_B), self.forward_pass(step):
            scores_BK = self.compute_scores(self.encoder(features_B), parts)
        labels_B = self.labels_N[self.compute.move_batch(rows_B)]
        scores_BK = scores_BK.to(self.compute.dtype)
        loss = self.task.compute_loss(scores_BK, labels_B, self._weights_K)
        self.require_own_weights(loss, *parts.values())
        loss.backward()
        self.note_loss(loss)
        self.step()
        gradients = {name: h_B.grad for name, h_B in parts.items() if h_B.grad is not None}
        return defer_reading(loss), gradients

    def compute_scores(self, own_h_B: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the head's scores of K classes for B rows, (B, K).

        `own_h_B`: the active's representations. `parts`: mapping from passive name to its
        representations.
        """
        inputs = [h_B.flatten(1) for h_B in self.merge_parts(own_h_B, parts)]
        scores_BK: Tensor = self.head(torch.cat(inputs, dim=1))
        return scores_BK

    def merge_parts(self, own_h_B: Tensor, parts: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the head's inputs in order: the active's representations, then each passive's.

        They are concatenated afterwards. `parts`: mapping from passive name to its representations.
        """
        return (own_h_B, *(parts[name] for name in self._passives))


class SumTrainer(HeadTrainer):
    """A trainer whose head reads the sum of all parties' representations.

    Its argument `passives` is a single name, under which the mappings `parts` have the sum of all
    passives' representations. With linear encoders and no clipping this is one network on the
    concatenated table.
    """

    def merge_parts(self, own_h_B: Tensor, parts: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the head's only input: the sum of all parties' representations, (B, D).

        `parts`: has the passives' sum under its single name.
        """
        (passives_sum_BD,) = (parts[name] for name in self._passives)
        return (own_h_B.flatten(1) + passives_sum_BD,)


class EncoderTrainer(Trainer):
    """A passive's encoder, which learns from the active's gradient by what the passive sent."""

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

        Args:
            owner: name of the passive, for errors.
            encoder: the passive's network.
            features_N: its N rows, (N, *shape).
            train: training settings.
            seed: random seed of dropout.
            own_steps: the party's own optimizer and scheduler.
        """
        self.encoder = encoder
        modules = {"encoder": encoder}
        # An encoder whose weights are all frozen is allowed: it sends, and learns nothing.
        has_weights = next(encoder.parameters(), None) is not None
        super().__init__(
            owner, modules, train=train, seed=seed, own_steps=own_steps, may_be_fixed=has_weights
        )
        self.features_N = self.compute.move_tensor(features_N)

    def check_rows(self, rows_B: Tensor, *, is_training: bool) -> None:
        """Raise PromiseError if one of these rows changes another row's representation.

        A privacy bound for one row assumes that it does not. `is_training`: whether the encoder is
        in training mode.
        """
        features_B = self.compute.take_rows(self.features_N, rows_B)
        check_row_wise(self.encoder, features_B, training=is_training, owner=self._owner)

    def encode_rows(self, step: int, rows_B: Tensor, *, is_training: bool) -> Tensor:
        """Return the representations of these rows (B, *shape), before the guard adds noise.

        `is_training`: whether they are computed with dropout, and in the autograd graph.
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
        """Take one step from the active's gradient by the representations that were sent.

        `z_B`: these representations, in the autograd graph; if the encoder is frozen, they are not
        in it, and nothing is learnt. `gradient_B`: the gradient, of the same shape.
        """
        self.zero_grad()
        loss = make_joint_loss(0.0, z_B, self.compute.move_batch(gradient_B))
        # With a frozen encoder no gradient is taken.
        if loss.requires_grad:
            self.require_own_weights(loss)
            loss.backward()
        self.step()


def _require_finite(owner: str, subject: str, *results: Tensor | None) -> None:
    """Raise ModelError if an output of the first batch is NaN or infinite.

    `owner`: name of the party. `subject`: the source of the outputs, in words for the error.
    `results`: the outputs; None ones are skipped.
    """
    for result in results:
        if result is not None and not bool(result.isfinite().all()):
            raise ModelError(
                f"{owner}: its {subject} give NaN or infinite numbers on the first batch, before "
                "any step; look for a division by 0 or a logarithm in them, or at the weights that "
                "they begin with"
            )


def _capture_input(head: nn.Module, linear: nn.Linear, h_UD: Tensor) -> Tensor:
    """Return the input of the head's last layer when the head runs on these representations.

    `linear`: this layer. `h_UD`: U representations.
    """
    inputs: list[Tensor] = []
    hook = linear.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    try:
        head(h_UD)
    finally:
        hook.remove()
    return inputs[0]

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
    ALL_ROWS,
    CONFIGURED_OPTIMIZATION,
    ActiveNetworks,
    OwnOptimization,
    Trainer,
    explain_failure,
)
from secure_apfed.learning.votes import find_last_layer, fit_linear
from secure_apfed.measures.table import Scored, compute_balanced_weights, score_model
from secure_apfed.measures.tasks import Classification, Task, score_rows
from secure_apfed.privacy.dp_sgd import PrivateGradient, PrivateUpdates
from secure_apfed.privacy.measured import check_loss, check_objective, check_row_wise
from secure_apfed.settings import TrainSettings

_EVALUATION_ROWS = 1000
"""Rows that are evaluated at a time, to save memory."""


def make_joint_loss(task_loss: Tensor | float, z_A: Tensor, gradient_A: Tensor) -> Tensor:
    """Return a scalar whose gradient is the active's update in APFed (Eq. 9).

    The gradient is that of the task loss, plus the passives' gradient propagated through z.

    Args:
        task_loss: the mean over the batch; 0.0: only the passives' gradient counts.
        z_A: representations of the A rows that were sent, in the autograd graph.
        gradient_A: the passives' gradient by z, of the same shape.
    """
    # The derivative of this sum by z is the passives' gradient.
    return task_loss + (gradient_A * z_A).sum()


@dataclass(frozen=True)
class ForwardPass:
    """The forward pass of a batch, in the autograd graph, before its update.

    Attributes:
        step: number of the run's step.
        rows_B: positions in the active's table.
        task_loss: mean task loss; None: labels come after the exchange (`train.labels`).
        h_A: representations of the rows to send, (A, *shape), before the guard adds noise; None:
            nothing is sent.
    """

    step: int
    rows_B: Tensor  # noqa: N815
    task_loss: Tensor | None
    h_A: Tensor | None  # noqa: N815


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
        own_optimization: OwnOptimization,
    ) -> None:
        """Move networks, features and labels to the device.

        Args:
            owner: name of the party, for errors.
            modules: its networks by role: encoder, head, and so on.
            features_N: the table's N rows, (N, *shape).
            labels_N: their labels, (N,), `UNLABELLED` for unknown ones.
            train: training settings.
            seed: random seed of dropout.
            own_optimization: the party's own optimizer and scheduler.
        """
        super().__init__(owner, modules, train=train, seed=seed, own_optimization=own_optimization)
        self.features_N = self.compute.move_tensor(features_N)
        self.labels_N = self.compute.move_tensor(labels_N)
        self._has_class_weights = train.class_weights == "balanced"
        self._weights_K: Tensor | None = None  # weight of each class in the loss; None: equal

    def weigh_classes(self, labelled_rows_n: Tensor, classes: int) -> None:
        """If configured, weight classes in the loss by the inverse of their frequency.

        `labelled_rows_n`: the labelled rows whose labels are counted, (n,). `classes`: number of
        classes.
        """
        if self._has_class_weights:
            labels_n = self.labels_N[labelled_rows_n.to(self.labels_N.device)]
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
        private_updates: PrivateUpdates | None = None,
        task: Task | None = None,
        own_optimization: OwnOptimization = CONFIGURED_OPTIMIZATION,
        needs_independent_rows: bool = False,
    ) -> None:
        """Move table and networks to the device; under DP-SGD, hook per-example gradients.

        Args:
            owner: name of the active, for errors.
            networks: the active's networks.
            features_N, labels_N: the table's N rows and their labels, `UNLABELLED` for unknown
                ones.
            train: training settings.
            seed: random seed of dropout.
            private_updates: DP-SGD of the updates; None: they are not private.
            task: the learning task; None: classification.
            own_optimization: the party's own optimizer and scheduler.
            needs_independent_rows: whether a privacy bound assumes that no row changes another
                row's output; the first batch is then tested for it.
        """
        self.networks = networks
        self.task = task or Classification()
        self.has_own_loss = private_updates is None and not train.is_exchange_label_free
        modules = dict(networks.named_children())
        super().__init__(
            owner,
            modules,
            features_N=features_N,
            labels_N=labels_N,
            train=train,
            seed=seed,
            own_optimization=own_optimization,
        )
        self.private_updates = private_updates
        self._private_gradient = (
            PrivateGradient(owner, modules, private_updates) if private_updates else None
        )
        self._has_task_loss = not train.is_exchange_label_free
        self._is_row_check_due = needs_independent_rows
        # The outputs of the first batch are checked. Under DP-SGD they are not, since an error
        # would reveal something about the batch's records.
        self._is_output_check_due = private_updates is None

    def forward(self, step: int, rows_B: Tensor, sent_rows_A: Tensor | None) -> ForwardPass:
        """Run the forward pass of one batch.

        Args:
            step: number of the run's step.
            rows_B: positions in the active's table, (B,).
            sent_rows_A: indices within the batch of the A rows to send; None: nothing is sent.

        Raises ModelError: outputs of the first batch, or under DP-SGD parameters, are not finite;
        PromiseError: a row changes another row's output, which a privacy bound excludes.
        """
        if self._is_row_check_due and len(rows_B) > 1:
            with explain_failure(self._owner, f"network on a batch of {len(rows_B)} rows"):
                self.check_rows(rows_B)
            self._is_row_check_due = False
        self.zero_grad()
        self.record_rows(step, rows_B)
        if self._private_gradient:
            self._private_gradient.forget_batch()
        sent_rows = self._locate_sent_rows(sent_rows_A, batch_size=len(rows_B))
        features_B = self.compute.take_rows(self.features_N, rows_B)
        with self._explain_network_errors(features_B), self.forward_context(step):
            scores_BK, h_A = self.networks(features_B, sent_rows)
        if self._is_output_check_due:
            _require_finite(self._owner, "networks", scores_BK, h_A)
            self._is_output_check_due = False
        loss = None
        if self._has_task_loss:
            labels_B = self.labels_N[self.compute.move_batch(rows_B)]
            scores_BK = scores_BK.to(self.compute.dtype)
            loss = self.task.compute_loss(scores_BK, labels_B, self._weights_K)
        if h_A is not None:
            h_A = h_A.to(self.compute.dtype)
            if self._private_gradient:
                h_A = self._private_gradient.zero_nonfinite_rows(h_A.flatten(1)).reshape(h_A.shape)
        return ForwardPass(step, rows_B, loss, h_A)

    def _locate_sent_rows(
        self, sent_rows_A: Tensor | None, *, batch_size: int
    ) -> Tensor | slice | None:
        """Return the rows of a batch to send as the networks take them; None: nothing is sent.

        `sent_rows_A`: their indices within the batch; None: nothing is sent.
        """
        if sent_rows_A is None:
            return None
        if len(sent_rows_A) == batch_size:
            return ALL_ROWS  # a slice for all rows needs no transfer of indices to the GPU
        return self.compute.move_batch(sent_rows_A)

    def train_on_batch(
        self, forward_pass: ForwardPass, joint_loss: Tensor | None = None
    ) -> StepLoss:
        """Take one step on a batch's loss; return its task loss.

        If labels come after the exchange (`train.labels: after`), the task loss is 0.0, and without
        `joint_loss` nothing is trained.

        Args:
            forward_pass: what `forward` returned for the batch.
            joint_loss: a loss that includes the task loss, as `make_joint_loss` returns; None: the
                task loss alone.

        Raises:
            BudgetExhaustedError: the update would exceed the budget of private training.
            ModelError: the gradient is not finite, and its norm is bounded.
        """
        loss = forward_pass.task_loss if joint_loss is None else joint_loss
        if loss is None:
            return 0.0
        if self._private_gradient:
            self._private_gradient.backward(loss, step=forward_pass.step, rows=forward_pass.rows_B)
        else:
            self.refuse_untrained_weights(loss)
            loss.backward()
        if forward_pass.task_loss is not None:
            self.record_loss(forward_pass.task_loss)
        self.step()
        return 0.0 if forward_pass.task_loss is None else defer_reading(forward_pass.task_loss)

    def train_on_gradient(
        self, forward_pass: ForwardPass, z_A: Tensor, gradient_A: Tensor
    ) -> StepLoss:
        """Take one step on task loss and passives' gradient together (Eq. 9); return the task loss.

        `forward_pass`: what `forward` returned for the batch. `z_A`: the representations of the A
        rows that were sent, still in the autograd graph. `gradient_A`: the passives' gradient by
        `z_A`. Raises the errors of `train_on_batch`.
        """
        task_loss = 0.0 if forward_pass.task_loss is None else forward_pass.task_loss
        return self.train_on_batch(forward_pass, make_joint_loss(task_loss, z_A, gradient_A))

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
        outputs = CoveredOutputs(self.networks, has_scores=self.private_updates is not None)
        check_row_wise(outputs, features_B, owner=self._owner)
        if self.private_updates is None:
            return
        labelled_B = labels_B != UNLABELLED
        if int(labelled_B.sum()) > 1:
            with torch.no_grad(), self.forward_context("check"):
                scores_BK, _ = self.networks(features_B[labelled_B], None)
            scores_BK = scores_BK.to(self.compute.dtype)
            check_loss(self.task, scores_BK, labels_B[labelled_B], owner=self._owner)

    def score_rows(self, rows: Tensor) -> Scored:
        """Return the active's own scores of these rows of its table, with labels (APFed, Eq. 11).

        No other party is needed.
        """
        with self.evaluation_mode():
            return score_rows(self.task, self._predict_rows, rows, self.labels_N)

    def fit_head_by_label_spreading(self, rows_U: Tensor) -> None:
        """Spread labels over representations h, and fit the head's last layer to the result.

        The layer is fitted by ridge regression. Labelled rows keep their labels; rows that no label
        reaches are left out.

        `rows_U`: U rows of the active's table, labelled or not.
        """
        networks = self.networks
        device_rows_U = rows_U.to(self.compute.device)
        last_layer = find_last_layer(networks)
        with self.evaluation_mode(), torch.no_grad(), self.forward_context("spread"):
            h_UD = networks.encoder(self.features_N[device_rows_U])
            layer_inputs_UD = _capture_layer_inputs(networks.head, last_layer, h_UD)
        labels_U = self.labels_N[device_rows_U].cpu().numpy()
        labelled_rows_n = np.flatnonzero(labels_U != UNLABELLED)
        labels_n = labels_U[labelled_rows_n]
        classes = last_layer.out_features
        targets_UK = Spreading().label_rows(
            h_UD.flatten(1).double(), labelled_rows_n, labels_n, classes
        )
        targets_UK[labelled_rows_n] = np.eye(classes)[labels_n]
        rows_with_target_V = np.flatnonzero(targets_UK.any(axis=1))  # the rows that a label reached
        # `fit_linear` expects rows of a norm of about 1, and a bias as a column of ones.
        layer_inputs_UD = layer_inputs_UD.double().cpu()
        root_mean_square = float(layer_inputs_UD.square().sum(1).mean().sqrt()) or 1.0
        bias_inputs_U1 = torch.full_like(layer_inputs_UD[:, :1], last_layer.bias is not None)
        scaled_inputs_UD = torch.cat([layer_inputs_UD / root_mean_square, bias_inputs_U1], dim=1)
        fitted_layer = nn.Linear(
            scaled_inputs_UD.shape[1], classes, bias=False, dtype=torch.float64
        )
        fit_linear(
            fitted_layer,
            scaled_inputs_UD.numpy(),
            targets_UK,
            rows_with_target_V=rows_with_target_V,
            labelled_rows_n=labelled_rows_n,
        )
        with torch.no_grad():
            last_layer.weight.copy_(fitted_layer.weight[:, :-1] / root_mean_square)
            if last_layer.bias is not None:
                last_layer.bias.copy_(fitted_layer.weight[:, -1])

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
        with self.forward_context("predict"):
            return score_in_parts(self._score_features, self.features_N, rows_B)

    def _score_features(self, features_B: Tensor) -> Tensor:
        """Return class scores (B, K) of these features."""
        scores_BK: Tensor = self.networks(features_B, None)[0]
        return scores_BK


@draws_nothing
class CoveredOutputs(nn.Module):
    """A module whose outputs are all outputs of the active's networks that a privacy bound covers.

    `check_row_wise` measures on it whether a row changes another row's outputs.
    """

    __name__ = "its network"  # in error messages

    def __init__(self, networks: ActiveNetworks, *, has_scores: bool) -> None:
        """Take the networks; `has_scores`: whether outputs are scores besides representations."""
        super().__init__()
        self.networks = networks
        self.has_scores = has_scores

    def forward(self, features_B: Tensor) -> Tensor:
        """Return the representation of each row, with its scores appended if `has_scores`."""
        scores_BK, h_B = self.networks(features_B)
        assert h_B is not None
        return torch.cat([h_B.flatten(1), scores_BK], dim=1) if self.has_scores else h_B


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
        own_optimization: OwnOptimization = CONFIGURED_OPTIMIZATION,
        needs_independent_rows: bool = False,
    ) -> None:
        """Move the objective's networks and the features to the device.

        Args:
            owner: name of the passive, for errors.
            objective: a module from z and own features to the loss, with its networks.
            features_N: the passive's N rows, (N, *shape).
            train: training settings.
            seed: random seed of dropout.
            own_optimization: the party's own optimizer and scheduler.
            needs_independent_rows: whether a privacy bound assumes that a row's gradient by z
                depends on no other row; the first batch is then tested for it.
        """
        modules = {"objective": objective}
        super().__init__(
            owner,
            modules,
            train=train,
            seed=seed,
            own_optimization=own_optimization,
            may_have_no_weights=True,
        )
        self.objective = objective
        self.features_N = self.compute.move_tensor(features_N)
        self._needs_gradient_check = bool(getattr(objective, "is_own", False))
        self._is_row_check_due = needs_independent_rows

    def check_rows(self, rows_B: Tensor, received_z_B: Tensor) -> None:
        """Raise PromiseError if the gradient of a row in this batch depends on another row.

        The noise on contributions covers one row per person only if it does not; see
        `check_objective`.

        Args:
            rows_B: B rows of the passive's table.
            received_z_B: the representations received for them, (B, *shape).
        """
        features_B = self.compute.take_rows(self.features_N, rows_B)
        check_objective(
            self.objective, self.compute.move_tensor(received_z_B), features_B, owner=self._owner
        )

    def train_on_rows(
        self, step: int, rows_B: Tensor, received_z_B: Tensor, *, weight: float
    ) -> Tensor:
        """Take one step on the passive's loss, and return its weighted gradient by z, (B, *shape).

        The step is APFed's Eq. (10). The result is lambda_p B dL_p/dz (Eqs. 7 and 9), where the
        loss L_p is a mean over the B rows. So it is lambda_p times the gradient of each row's own
        loss, and a bound on a row does not depend on the batch size. The active divides the sum by
        the number of rows.

        Args:
            step: number of the run's step.
            rows_B: B rows of the passive's table.
            received_z_B: the representations received for them, (B, *shape).
            weight: lambda_p, the weight of this passive p in the joint loss.

        Raises ModelError: no gradient, or one that is not finite, reaches z.
        """
        if self._is_row_check_due and len(rows_B) > 1:
            self.check_rows(rows_B, received_z_B)
            self._is_row_check_due = False
        z_B = self.compute.move_batch(received_z_B).detach().requires_grad_()
        self.zero_grad()
        self.record_rows(step, rows_B)
        features_B = self.compute.take_rows(self.features_N, rows_B)
        with self.forward_context(step):
            loss = self.objective(z_B, features_B)
        self.refuse_untrained_weights(loss, z_B)
        loss.backward()
        if z_B.grad is None:
            raise ModelError(
                f"{self._owner}: no gradient of its loss reaches z, so that it contributes "
                "nothing; compute the loss from z"
            )
        # The gradient of a built-in loss is checked later, where it is summed; a check here would
        # wait for a GPU.
        if self._needs_gradient_check and not bool(z_B.grad.isfinite().all()):
            raise ModelError(
                f"{self._owner}: the gradient of its loss by z is NaN or infinite; lower "
                "train.learning_rate, or mend the loss, as a square root or a norm at 0"
            )
        self.record_loss(loss)
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
        own_optimization: OwnOptimization = CONFIGURED_OPTIMIZATION,
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
            own_optimization: the party's own optimizer and scheduler.
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
            own_optimization=own_optimization,
        )

    def score_predictions(self, predict: Callable[[Tensor], Tensor], rows: Tensor) -> Scored:
        """Return the scores that `predict` gives these rows of the table, with their labels.

        `predict`: function from positions of rows (B,) to scores (B, K).
        """
        return score_model(predict, rows, self.labels_N)

    def check_head(self, inputs_BD: Tensor) -> None:
        """Refuse a head in which a row of the input changes another row's output.

        `inputs_BD`: B rows of the head's input, D numbers each. The head is tested in evaluation
        mode. Raises PromiseError: names the head, and the change.
        """
        check_row_wise(self.head, inputs_BD, training=False, owner=self._owner)

    def train_on_representations(
        self, step: int, rows_B: Tensor, h_by_passive: Mapping[str, Tensor]
    ) -> tuple[StepLoss, dict[str, Tensor]]:
        """Take one step with the passives' representations of a batch.

        Args:
            step: number of the run's step.
            rows_B: B rows of the active's table.
            h_by_passive: mapping from passive name to its representations of these rows, (B,
                *shape).

        Returns the task loss, and for each passive the gradient by the representations that it
        sent.
        """
        # Leaves of the graph, so that `backward` yields each passive's gradient.
        h_by_passive = {name: h_B.requires_grad_() for name, h_B in h_by_passive.items()}
        self.zero_grad()
        self.record_rows(step, rows_B)
        features_B = self.compute.take_rows(self.features_N, rows_B)
        with self._explain_network_errors(features_B), self.forward_context(step):
            scores_BK = self.compute_scores(self.encoder(features_B), h_by_passive)
        labels_B = self.labels_N[self.compute.move_batch(rows_B)]
        scores_BK = scores_BK.to(self.compute.dtype)
        loss = self.task.compute_loss(scores_BK, labels_B, self._weights_K)
        self.refuse_untrained_weights(loss, *h_by_passive.values())
        loss.backward()
        self.record_loss(loss)
        self.step()
        gradients = {name: h_B.grad for name, h_B in h_by_passive.items() if h_B.grad is not None}
        return defer_reading(loss), gradients

    def compute_scores(self, own_h_B: Tensor, h_by_passive: Mapping[str, Tensor]) -> Tensor:
        """Return the head's scores of K classes for B rows, (B, K).

        `own_h_B`: the active's representations. `h_by_passive`: mapping from passive name to its
        representations.
        """
        inputs = [h_B.flatten(1) for h_B in self.merge_representations(own_h_B, h_by_passive)]
        scores_BK: Tensor = self.head(torch.cat(inputs, dim=1))
        return scores_BK

    def merge_representations(
        self, own_h_B: Tensor, h_by_passive: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        """Return the head's inputs in order: the active's representations, then each passive's.

        They are concatenated afterwards. `h_by_passive`: mapping from passive name to its
        representations.
        """
        return (own_h_B, *(h_by_passive[name] for name in self._passives))


class SumTrainer(HeadTrainer):
    """A trainer whose head reads the sum of all parties' representations.

    Its argument `passives` is a single name, under which the mappings `h_by_passive` have the sum
    of all passives' representations. With linear encoders and no clipping this is one network on
    the concatenated table.
    """

    def merge_representations(
        self, own_h_B: Tensor, h_by_passive: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        """Return the head's only input: the sum of all parties' representations, (B, D).

        `h_by_passive`: has the passives' sum under its single name.
        """
        (passives_sum_BD,) = (h_by_passive[name] for name in self._passives)
        return (own_h_B.flatten(1) + passives_sum_BD,)


class EncoderTrainer(Trainer):
    """A passive's encoder, which learns from the active's gradient by what the passive sent."""

    has_own_loss = False

    def __init__(
        self,
        owner: str,
        encoder: nn.Module,
        *,
        features_N: Tensor,
        train: TrainSettings,
        seed: int,
        own_optimization: OwnOptimization = CONFIGURED_OPTIMIZATION,
    ) -> None:
        """Move encoder and features to the device.

        Args:
            owner: name of the passive, for errors.
            encoder: the passive's network.
            features_N: its N rows, (N, *shape).
            train: training settings.
            seed: random seed of dropout.
            own_optimization: the party's own optimizer and scheduler.
        """
        self.encoder = encoder
        modules = {"encoder": encoder}
        # An encoder whose weights are all frozen is allowed: it sends, and learns nothing.
        has_weights = next(encoder.parameters(), None) is not None
        super().__init__(
            owner,
            modules,
            train=train,
            seed=seed,
            own_optimization=own_optimization,
            may_have_no_weights=has_weights,
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
            self.record_rows(step, rows_B)
        features_B = self.compute.take_rows(self.features_N, rows_B)
        with (
            self._explain_network_errors(features_B, is_training=is_training),
            torch.set_grad_enabled(is_training),
            self.forward_context(step),
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
            self.refuse_untrained_weights(loss)
            loss.backward()
        self.step()


def _require_finite(owner: str, subject: str, *outputs: Tensor | None) -> None:
    """Raise ModelError if an output of the first batch is NaN or infinite.

    `owner`: name of the party. `subject`: the source of the outputs, in words for the error.
    `outputs`: the results; None ones are skipped.
    """
    for output in outputs:
        if output is not None and not bool(output.isfinite().all()):
            raise ModelError(
                f"{owner}: its {subject} give NaN or infinite numbers on the first batch, before "
                "any step; look for a division by 0 or a logarithm in them, or at the weights that "
                "they begin with"
            )


def _capture_layer_inputs(head: nn.Module, layer: nn.Linear, h_UD: Tensor) -> Tensor:
    """Return the input of the head's last layer when the head runs on these representations.

    `layer`: this layer. `h_UD`: U representations.
    """
    inputs: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    try:
        head(h_UD)
    finally:
        hook.remove()
    return inputs[0]

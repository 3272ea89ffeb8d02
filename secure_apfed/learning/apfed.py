"""APFed's arithmetic in one step (Section 3): the active's batch and update, a passive's answer.

Run by: the active (`ActiveTrainer`) and each passive (`PassiveTrainer`), one model each; and by
simulations that train many models at once, which take gradients of the same losses under
`torch.func.vmap` (`example_gradients`, `passive_gradients`). A test holds the two equal.

Letters: N rows of a table, B batch, A of its rows that are sent, D numbers of a representation,
K classes, F features.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from secure_apfed.defences import RepresentationChain
from secure_apfed.learning.compute import Compute
from secure_apfed.learning.descent import Trainer
from secure_apfed.learning.private_gradient import PrivateGradient, PrivateUpdates
from secure_apfed.measures import Scored, balanced_weights
from secure_apfed.privacy.noise import onto_ball
from secure_apfed.settings.training import TrainSettings
from secure_apfed.tasks import Classification, Task, scored_rows

__all__ = [
    "ActiveNetworks",
    "ActiveTrainer",
    "Batch",
    "PassiveTrainer",
    "Weights",
    "example_gradients",
    "joint_loss",
    "passive_gradients",
    "predictor_of",
]

Weights = Mapping[str, Tensor]
"""Parameters of a module by name, as `torch.func.functional_call` takes them."""

_EVALUATION_ROWS = 1000
_EVERY = slice(None)


class ActiveNetworks(nn.Module):
    """f (encoder), g (head), and the projection that is sent (None: the encoder's output)."""

    def __init__(
        self, encoder: nn.Module, head: nn.Module, projection: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.encoder, self.head, self.projection = encoder, head, projection

    def forward(
        self, features_B: Tensor, sent: Tensor | slice | None = _EVERY
    ) -> tuple[Tensor, Tensor | None]:
        """Return scores (B, K), and the representations of the rows `sent`; None: of none.

        A representation may be a large map, so rows are picked after the projection.
        """
        h_B = self.encoder(features_B)
        scores_BK = self.head(h_B)
        if sent is None:
            return scores_BK, None
        projected_B = h_B if self.projection is None else self.projection(h_B)
        return scores_BK, projected_B[sent]


def predictor_of(networks: ActiveNetworks | None) -> nn.Module | None:
    """A copy on the CPU of what predicts, features -> class scores; None where nothing does."""
    if networks is None:
        return None
    return copy.deepcopy(nn.Sequential(networks.encoder, networks.head)).cpu().eval()


def joint_loss(task: Tensor, z_A: Tensor, gradient_A: Tensor) -> Tensor:
    """A scalar whose gradient is Eq. (9)'s: that of the task, and `gradient_A` through z."""
    return task + (gradient_A * z_A).sum()


@dataclass(frozen=True)
class Batch:
    """A batch that waits for its update, in the autograd graph.

    Attributes:
        rows: positions in the own table, (B,).
        loss: mean task loss, with the penalties of the defences.
        sent: what goes to the guard, (A, *shape); None: the batch trains the active alone.
    """

    step: int
    rows: Tensor
    loss: Tensor
    sent: Tensor | None


class ActiveTrainer(Trainer):
    """The active's batches and updates; representations go through `defences` before the guard.

    `task` says what it learns; None: classes.
    """

    def __init__(
        self,
        owner: str,
        networks: ActiveNetworks,
        *,
        features_N: Tensor,
        labels_N: Tensor,
        train: TrainSettings,
        compute: Compute,
        seed: int,
        defences: RepresentationChain | None = None,
        private: PrivateUpdates | None = None,
        task: Task | None = None,
    ) -> None:
        self.networks, self._defences = networks, defences or RepresentationChain()
        self.task = task or Classification()
        modules = {**dict(networks.named_children()), "defences": self._defences}
        super().__init__(owner, modules, train=train, compute=compute, seed=seed)
        self.features_N, self.labels_N = compute.place(features_N), compute.place(labels_N)
        self._private = PrivateGradient(owner, modules, private) if private else None
        self._weighs = train.class_weights == "balanced"
        self._weights_K: Tensor | None = None

    def weigh_classes(self, rows: Tensor, classes: int) -> None:
        """Count all classes alike, by the labels of these rows of its table, if it is set to."""
        if self._weighs:
            weights_K = balanced_weights(self.labels_N[rows.to(self.labels_N.device)], classes)
            self._weights_K = self.compute.place(weights_K)

    def forward(self, step: int, rows_B: Tensor, aligned: Tensor | None) -> Batch:
        """Compute one batch.

        Args:
            step: of the run.
            rows_B: positions in the own table.
            aligned: places within the batch of the rows to send; None: nothing is sent.

        Raises:
            ModelError: parameters that are not finite, under private training.
        """
        self.begin()
        if self._private:
            self._private.forget()
        here_B, dtype = rows_B.to(self.compute.device), self.compute.dtype
        picked: Tensor | slice | None = None
        if aligned is not None:
            picked = _EVERY if len(aligned) == len(rows_B) else aligned.to(here_B.device)
        with self.forward_pass(step):
            scores_BK, h_A = self.networks(self.features_N[here_B], picked)
        loss = self.task.loss(
            scores_BK.to(dtype), self.labels_N[here_B], self.features_N[here_B], self._weights_K
        )
        if h_A is not None:
            h_A, penalty = self._defences(h_A.to(dtype), self.features_N[here_B[picked]], step)
            loss = loss if penalty is None else loss + penalty
            if self._private:
                h_A = self._private.finite_rows(h_A.flatten(1)).reshape(h_A.shape)
        return Batch(step, rows_B, loss, h_A)

    def update(
        self, batch: Batch, z_A: Tensor | None = None, sum_AD: Tensor | None = None
    ) -> float:
        """Descend on the task loss and the passives' sum together (Eq. 9); return the task loss.

        Args:
            batch: from `forward`.
            z_A: what was released of it, in its graph; None: nothing.
            sum_AD: of all lambda_p A dL_p/dz, flat; None: nothing was released.

        Raises:
            BudgetExhaustedError: the update would exceed the budget of private training.
            ModelError: the gradient is not finite, where it has a bound.
        """
        loss = batch.loss
        if z_A is not None and sum_AD is not None:
            gradient_A = self.compute.place(sum_AD / len(sum_AD)).reshape(z_A.shape)
            loss = joint_loss(loss, z_A, gradient_A)
        if self._private:
            self._private.backward(loss, step=batch.step, rows=batch.rows)
        else:
            loss.backward()
        self.step()
        return batch.loss.item()

    def relabel(self, labels_N: Tensor) -> None:
        """Train on these labels of its table from now on."""
        self.labels_N = self.compute.place(labels_N)

    def scored(self, rows: Tensor) -> Scored:
        """What the model says of `rows` of its own table, alone (Eq. 11)."""
        self.set_training(False)
        try:
            return scored_rows(
                self.task, self._predict, rows, labels_N=self.labels_N, features_N=self.features_N
            )
        finally:
            self.set_training(True)

    @torch.no_grad()
    def loss_on(self, rows: Tensor) -> float:
        """Mean task loss of `rows` of its own table, without the penalties of defences."""
        self.set_training(False)
        try:
            total = sum(
                float(self._loss(rows_B) * len(rows_B))
                for rows_B in rows.to(self.labels_N.device).split(_EVALUATION_ROWS)
            )
        finally:
            self.set_training(True)
        return total / len(rows)

    def _loss(self, rows_B: Tensor) -> Tensor:
        weights_K = None if self._weights_K is None else self._weights_K.float()
        return self.task.loss(
            self._predict(rows_B).float(), self.labels_N[rows_B], self.features_N[rows_B], weights_K
        )

    def _predict(self, rows_B: Tensor) -> Tensor:
        with self.forward_pass("predict"):
            scores_BK: Tensor = self.networks(self.features_N[rows_B], None)[0]
        return scores_BK


class PassiveTrainer(Trainer):
    """A passive's answers; `objective` is (z, own features) -> loss, with its networks."""

    def __init__(
        self,
        owner: str,
        objective: nn.Module,
        *,
        features_N: Tensor,
        train: TrainSettings,
        compute: Compute,
        seed: int,
    ) -> None:
        super().__init__(owner, {"objective": objective}, train=train, compute=compute, seed=seed)
        self.objective, self.features_N = objective, compute.place(features_N)

    def answer(self, step: int, rows_B: Tensor, sent_B: Tensor, *, weight: float) -> Tensor:
        """Descend once on its own loss (Eq. 10); return lambda_p B dL_p/dz (Eqs. 7 and 9).

        That is lambda_p times the gradient of each row's own loss, so that a bound on a row does
        not depend on the batch size; the active divides the sum by B.

        Args:
            step: of the run.
            rows_B: alignment positions.
            sent_B: the active's representations of them, (B, *shape).
            weight: lambda_p.
        """
        z_B = self.compute.place(sent_B).requires_grad_()
        self.begin()
        with self.forward_pass(step):
            loss = self.objective(z_B, self.features_N[rows_B.to(self.compute.device)])
        loss.backward()
        self.step()
        assert z_B.grad is not None
        return z_B.grad * (weight * len(z_B))


def example_gradients(
    networks: ActiveNetworks, weights: Weights, features_BF: Tensor, labels_B: Tensor,
    row_BD: Tensor, *, clip: float,
) -> Weights:  # fmt: skip
    """Return each example's gradient of its task loss + <row, z>, (B, *shape) a parameter.

    What DP-SGD clips (`private_gradient.py`), where all rows of the batch are sent.

    Args:
        networks: without dropout.
        weights: of the networks.
        features_BF: of the batch.
        labels_B: of the batch.
        row_BD: of the passives' sum.
        clip: L2 bound of a row of z.
    """

    def loss(weights: Weights, x_F: Tensor, y: Tensor, row_D: Tensor) -> Tensor:
        scores_1K, sent_1D = functional_call(networks, dict(weights), (x_F[None],))
        return joint_loss(F.cross_entropy(scores_1K, y[None]), onto_ball(sent_1D, clip), row_D)

    each = vmap(grad(loss), in_dims=(None, 0, 0, 0))
    gradients: Weights = each(weights, features_BF, labels_B, row_BD)
    return gradients


def passive_gradients(
    objective: nn.Module, weights: Weights, z_BD: Tensor, features_BF: Tensor
) -> tuple[Weights, Tensor]:
    """Return the gradients of L_p by the passive's weights, and of each row's own loss by z."""

    def loss(weights: Weights, z_BD: Tensor) -> Tensor:
        value: Tensor = functional_call(objective, dict(weights), (z_BD, features_BF))
        return value

    own, row_BD = grad(loss, argnums=(0, 1))(weights, z_BD)
    return own, row_BD * len(z_BD)

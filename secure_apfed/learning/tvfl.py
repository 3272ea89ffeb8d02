"""The arithmetic of typical VFL (Section 2 of APFed): everybody encodes, the active concatenates.

Run by: the active (`HeadTrainer`) and each passive (`EncoderTrainer`). Letters: N rows of a table,
B batch, K classes.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secure_apfed.defences import LabelCode, RepresentationChain, TrueLabels
from secure_apfed.learning.compute import Compute
from secure_apfed.learning.descent import Trainer
from secure_apfed.learning.networks import joint_loss
from secure_apfed.settings.training import TrainSettings

__all__ = ["EncoderTrainer", "HeadTrainer", "SumTrainer"]


class HeadTrainer(Trainer):
    """The active's encoder, and the head over all parties' representations, concatenated.

    Args:
        owner, encoder, head, features_N, labels_N: the active and what it has.
        passives: whose representations follow its own, in the order of the head.
        code: what it learns instead of its labels.
        train, compute, seed: as of every `Trainer`.
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
        code: LabelCode | None,
        train: TrainSettings,
        compute: Compute,
        seed: int,
    ) -> None:
        self.encoder, self.head = encoder, head
        modules = {"encoder": encoder, "head": head}
        super().__init__(owner, modules, train=train, compute=compute, seed=seed)
        self._passives, self._code = tuple(passives), code or TrueLabels()
        self.features_N, self.labels_N = compute.place(features_N), compute.place(labels_N)
        self._targets_N = compute.place(self._code.targets(self.labels_N))

    def learn(
        self, step: int, own_B: Tensor, parts: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Descend once; return the task loss and its gradient by each passive's part.

        Args:
            step: of the run.
            own_B: positions in its own table.
            parts: what each passive sent of these rows.
        """
        parts = {name: h_B.requires_grad_() for name, h_B in parts.items()}
        self.begin()
        with self.forward_pass(step):
            scores_BK = self.scores(self.encoder(self.features_N[own_B]), parts)
        loss = F.cross_entropy(scores_BK.to(self.compute.dtype), self._targets_N[own_B])
        loss.backward()
        self.step()
        return loss, {name: h_B.grad for name, h_B in parts.items() if h_B.grad is not None}

    def scores(self, own_B: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        every = [own_B, *(parts[name] for name in self._passives)]
        scores_BK: Tensor = self.head(torch.cat([h_B.flatten(1) for h_B in every], dim=1))
        return scores_BK

    def predict(self, own_B: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        """Scores of the true classes."""
        return self._code.decode(self.scores(own_B, parts))


class SumTrainer(HeadTrainer):
    """The head reads the sum of all parties' representations: its one part is that of the others.

    With linear encoders and no clip that is one network on the concatenated table.
    """

    def scores(self, own_B: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        (others_BD,) = (parts[name] for name in self._passives)
        scores_BK: Tensor = self.head(own_B.flatten(1) + others_BD)
        return scores_BK


class EncoderTrainer(Trainer):
    """A passive's encoder, which learns from the gradient on what it sent."""

    def __init__(
        self,
        owner: str,
        encoder: nn.Module,
        *,
        features_N: Tensor,
        train: TrainSettings,
        compute: Compute,
        seed: int,
        defences: RepresentationChain | None = None,
    ) -> None:
        self.encoder, self._defences = encoder, defences or RepresentationChain()
        modules = {"encoder": encoder, "defences": self._defences}
        super().__init__(owner, modules, train=train, compute=compute, seed=seed)
        self.features_N = compute.place(features_N)
        self._penalty: Tensor | None = None

    def represent(self, step: int, rows_B: Tensor, *, learn: bool) -> Tensor:
        """Return what goes to the guard; with `learn` in the autograd graph, with dropout."""
        self.set_training(learn)
        with torch.set_grad_enabled(learn), self.forward_pass(step):
            seen_B = self.features_N[rows_B.to(self.compute.device)]
            h_B: Tensor = self.encoder(seen_B).to(self.compute.dtype)
            h_B, self._penalty = self._defences(h_B, seen_B, step)
        return h_B.to(self.compute.dtype)

    def update(self, z_B: Tensor, gradient_B: Tensor) -> None:
        """Descend once from the gradient on z, which was represented last."""
        self.begin()
        penalty = z_B.new_zeros(()) if self._penalty is None else self._penalty
        joint_loss(penalty, z_B, self.compute.place(gradient_B)).backward()
        self.step()

"""One step of a run as one loss: its gradient by each party's weights is what that party descends.

APFed (Eqs. 7 to 10): the active descends on its task loss and on lambda_p L_p through what it
sends, passive p on L_p alone. So each L_p enters the sum once, and on its way to the active its
gradient is multiplied by lambda_p. TVFL (Section 2): all parties descend on one loss.

Letters: B batch, K classes.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secure_apfed.data import UNLABELLED
from secure_apfed.learning.apfed import ActiveNetworks

__all__ = ["ApfedProgram", "Program", "TvflProgram"]


class Program(Protocol):
    """What a step computes; a module whose children are the parties' networks, the active's first.

    Called with the batch's features by party, its labels (B,), and lambda by passive.
    """

    def __call__(
        self, features: Mapping[str, Tensor], labels_B: Tensor, weights: Mapping[str, Tensor]
    ) -> Tensor: ...


class _Weighted(torch.autograd.Function):
    """The same value, whose gradient is multiplied on its way back."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, weight: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (weight,) = ctx.saved_tensors
        return gradients[0] * weight, None


class ApfedProgram(nn.Module):
    """The active's networks and each passive's objective; without passives, SingleVL."""

    def __init__(
        self, active: str, networks: ActiveNetworks, objectives: Mapping[str, nn.Module]
    ) -> None:
        super().__init__()
        self._active, self._passives = active, tuple(objectives)
        # Names of parties may hold dots, those of modules may not.
        self.parties = nn.ModuleList([networks, *objectives.values()])

    def forward(
        self, features: Mapping[str, Tensor], labels_B: Tensor, weights: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the task loss of labelled rows, and the passives' losses."""
        networks, *objectives = self.parties
        sent = slice(None) if objectives else None
        scores_BK, z_B = networks(features[self._active], sent)
        loss = _labelled_loss(_wide(scores_BK), labels_B)
        for name, objective in zip(self._passives, objectives, strict=True):
            z_p = _weighted(z_B.to(features[name].dtype), weights[name])
            loss = loss + objective(z_p, features[name])
        return loss


class TvflProgram(nn.Module):
    """Every party's encoder, and the active's head over all representations, concatenated."""

    def __init__(
        self, active: str, encoder: nn.Module, head: nn.Module, passives: Mapping[str, nn.Module]
    ) -> None:
        super().__init__()
        self._names = (active, *passives)
        own = nn.ModuleDict({"encoder": encoder, "head": head})
        self.parties = nn.ModuleList([own, *passives.values()])

    def forward(
        self, features: Mapping[str, Tensor], labels_B: Tensor, weights: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the task loss."""
        own, *others = self.parties
        assert isinstance(own, nn.ModuleDict)
        encoders = [own["encoder"], *others]
        parts = [
            encoder(features[name]).flatten(1)
            for name, encoder in zip(self._names, encoders, strict=True)
        ]
        scores_BK = own["head"](torch.cat(parts, dim=1))
        return F.cross_entropy(_wide(scores_BK), labels_B)


def _weighted(value: Tensor, weight: Tensor) -> Tensor:
    weighted: Tensor = _Weighted.apply(value, weight)  # type: ignore[no-untyped-call]
    return weighted


def _wide(scores_BK: Tensor) -> Tensor:
    """Losses are never computed in bfloat16."""
    return scores_BK.to(torch.promote_types(scores_BK.dtype, torch.float32))


def _labelled_loss(scores_BK: Tensor, labels_B: Tensor) -> Tensor:
    """`task_loss` without a question to the values, which many runs at once have no answer to."""
    total = F.cross_entropy(scores_BK, labels_B, ignore_index=UNLABELLED, reduction="sum")
    return total / (labels_B != UNLABELLED).sum().clamp(min=1)

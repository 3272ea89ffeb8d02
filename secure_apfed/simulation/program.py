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
    """What a step computes; a module whose children are the parties' networks, by party.

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
        self._active = active
        self.parties = nn.ModuleDict({active: networks, **objectives})

    def forward(
        self, features: Mapping[str, Tensor], labels_B: Tensor, weights: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the task loss of labelled rows, and the passives' losses."""
        passives = [name for name in self.parties if name != self._active]
        sent = slice(None) if passives else None
        scores_BK, z_B = self.parties[self._active](features[self._active], sent)
        loss = _labelled_loss(_wide(scores_BK), labels_B)
        for name in passives:
            z_p = _weighted(z_B.to(features[name].dtype), weights[name])
            loss = loss + self.parties[name](z_p, features[name])
        return loss


class TvflProgram(nn.Module):
    """Every party's encoder, and the active's head over all representations, concatenated."""

    def __init__(
        self, active: str, encoder: nn.Module, head: nn.Module, passives: Mapping[str, nn.Module]
    ) -> None:
        super().__init__()
        self._active = active
        own = nn.ModuleDict({"encoder": encoder, "head": head})
        self.parties = nn.ModuleDict({active: own, **passives})

    def forward(
        self, features: Mapping[str, Tensor], labels_B: Tensor, weights: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the task loss."""
        own = self.parties[self._active]
        assert isinstance(own, nn.ModuleDict)
        parts = [
            (own["encoder"] if name == self._active else network)(features[name]).flatten(1)
            for name, network in self.parties.items()
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

"""A coalition's own networks, as an attack trains copies of them further below a head.

Run by: passives of TVFL, whose networks the task's gradients trained.

Letters: N observed rows, F columns, D numbers of h, B batch.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from apfed_attacks.columns import own_columns
from apfed_attacks.view import AdversaryView, AttackError
from secure_apfed.seeds import seeded

__all__ = ["OwnNetwork", "fresh_columns", "in_parts"]

_ROWS_AT_ONCE = 1_000


@dataclass(frozen=True)
class OwnNetwork:
    """How the coalition's own networks get below a head.

    Attributes:
        networks: of the members, in the order of their columns; never trained themselves.
        shapes: of one row of each member's features.
        fresh: draw all weights anew, which leaves the architecture alone.
    """

    networks: tuple[nn.Module, ...]
    shapes: tuple[tuple[int, ...], ...]
    fresh: bool

    @classmethod
    def of(cls, view: AdversaryView, *, fresh: bool = False) -> "OwnNetwork":
        """The networks of all members, in the order of `own_columns`."""
        networks = tuple(view.networks[name] for name in view.features)
        return cls(networks, tuple(tuple(own.shape[1:]) for own in view.features.values()), fresh)

    def bottom(self, rows_NF: Tensor) -> "_Bottom":
        """A copy to train, whose output on these rows has mean 0 and variance 1."""
        networks = [copy.deepcopy(network).float() for network in self.networks]
        for module in (part for network in networks for part in network.modules()):
            if self.fresh and next(module.parameters(recurse=False), None) is not None:
                _draw_anew(module)
        bottom = _Bottom(networks, self.shapes).to(rows_NF.device)
        bottom.scale_to(in_parts(bottom, rows_NF))
        return bottom


def _draw_anew(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None)
    if reset is None:
        raise AttackError(
            f"the weights of a {type(module).__name__} cannot be drawn anew for the baseline; "
            "give it a reset_parameters method"
        )
    reset()


class _Bottom(nn.Module):
    """Flattened own features (B, F) -> h of all members side by side, standardised, (B, D)."""

    mean: Tensor
    spread: Tensor

    def __init__(self, networks: Sequence[nn.Module], shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self._networks, self._shapes = nn.ModuleList(networks), shapes
        self.register_buffer("mean", torch.zeros(1))
        self.register_buffer("spread", torch.ones(1))

    def scale_to(self, h_ND: Tensor) -> None:
        """Fix the scale of what the head reads by the output before training."""
        self.mean, spread = h_ND.mean(dim=0), h_ND.std(dim=0)
        self.spread = torch.where(spread > 0, spread, 1)

    def forward(self, rows_BF: Tensor) -> Tensor:
        blocks = rows_BF.split([math.prod(shape) for shape in self._shapes], dim=1)
        h_BD = torch.cat(
            [
                network(block.reshape(-1, *shape)).flatten(1)
                for network, block, shape in zip(self._networks, blocks, self._shapes, strict=True)
            ],
            dim=1,
        )
        return (h_BD - self.mean) / self.spread


def fresh_columns(view: AdversaryView, positions: Tensor, seed: int) -> Tensor | None:
    """What the coalition's networks make of its features before training, (N, D).

    In joint training it released a function of its own features: a random one of these says
    nothing new and may still serve a probe. None where the view has no networks of all members.
    """
    if any(name not in view.networks for name in view.features):
        return None
    own_NF = own_columns(view, positions).float()
    with seeded(seed, "attacks", "fresh network"):
        bottom = OwnNetwork.of(view, fresh=True).bottom(own_NF)
    return in_parts(bottom, own_NF)


@torch.no_grad()
def in_parts(network: nn.Module, rows_NF: Tensor) -> Tensor:
    """The output for many rows, whose convolution maps at once would fill the memory."""
    return torch.cat([network(part) for part in rows_NF.split(_ROWS_AT_ONCE)])

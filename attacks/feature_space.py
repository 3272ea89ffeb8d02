"""Networks of the adversaries that build a feature space of their own, shared by these attacks.

Run by: an adversary with rows of the victim's kind of features. A simulator stands for the
victim's encoder, a decoder inverts it, and a discriminator tells its outputs from the victim's.
Either the victim is made to look like the simulator, or the simulator like the victim.

Letters: B batch, D numbers of a representation.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

__all__ = ["energy_distance", "layers", "slope_penalty"]


def layers(*widths: int) -> nn.Sequential:
    """Fully connected layers with a leaky ReLU between them."""
    parts: list[nn.Module] = []
    for wide, narrow in pairwise(widths):
        parts += [nn.Linear(wide, narrow), nn.LeakyReLU(0.2)]
    return nn.Sequential(*parts[:-1])


def slope_penalty(judge: Callable[[Tensor], Tensor], one_BD: Tensor, other_BD: Tensor) -> Tensor:
    """How far the judge's slope between the two is from 1 (Gulrajani et al., 2017, Eq. (3))."""
    share = torch.rand(len(one_BD), *[1] * (one_BD.dim() - 1), device=one_BD.device)
    mixed_BD = torch.lerp(one_BD.detach(), other_BD.detach(), share).requires_grad_()
    (slope_BD,) = torch.autograd.grad(judge(mixed_BD).sum(), mixed_BD, create_graph=True)
    penalty: Tensor = (slope_BD.flatten(1).norm(dim=1) - 1).square().mean()
    return penalty


def energy_distance(one_ND: Tensor, other_MD: Tensor) -> float:
    """How unlike two samples are; 0 for the same distribution (Szekely and Rizzo, 2013)."""
    between = 2 * torch.cdist(one_ND, other_MD).mean()
    within = torch.cdist(one_ND, one_ND).mean() + torch.cdist(other_MD, other_MD).mean()
    return float(between - within)

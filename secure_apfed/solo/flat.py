"""The parameters of small networks side by side in one, which an optimiser moves in one step.

Of a network with a few small layers most of a step's time is spent between the parameters, not on
them. Numbers move as they would apart: each by its own gradient.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

__all__ = ["flattened", "parted"]


def flattened(networks: Iterable[nn.Module]) -> tuple[nn.Parameter, Tensor]:
    """Return one parameter (P,), and its gradient, of which those of the networks are views.

    Before each step the gradient is set to 0 in place: dropped, the views would lose it.
    """
    apart = [one for network in networks for one in network.parameters()]
    flat_P = nn.Parameter(torch.cat([one.detach().flatten() for one in apart]))
    gradient_P = torch.zeros_like(flat_P)
    flat_P.grad = gradient_P
    sizes = [one.numel() for one in apart]
    for one, values, gradient in zip(
        apart, flat_P.data.split(sizes), gradient_P.split(sizes), strict=True
    ):
        one.data, one.grad = values.view_as(one), gradient.view_as(one)
    return flat_P, gradient_P


def parted(network: nn.Module) -> nn.Module:
    """Give each parameter its own memory again, without a gradient; return the network."""
    for one in network.parameters():
        one.data, one.grad = one.data.clone(), None
    return network

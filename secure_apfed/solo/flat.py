"""The parameters of small networks side by side in one, which an optimiser moves in one step.

Of a network with a few small layers most of a step's time is spent between the parameters, not on
them. Numbers move as they would apart: each by its own gradient.
"""

from collections.abc import Iterable

import torch
from torch import nn

__all__ = ["flattened", "parted"]


def flattened(networks: Iterable[nn.Module]) -> nn.Parameter:
    """Return one parameter (P,) of which all parameters of the networks, and gradients, are views.

    Its gradient is set to 0 in place (`zero_grad(set_to_none=False)`), or the views lose it.
    """
    apart = [one for network in networks for one in network.parameters()]
    flat_P = nn.Parameter(torch.cat([one.detach().flatten() for one in apart]))
    flat_P.grad = torch.zeros_like(flat_P)
    sizes = [one.numel() for one in apart]
    for one, values, gradient in zip(
        apart, flat_P.data.split(sizes), flat_P.grad.split(sizes), strict=True
    ):
        one.data, one.grad = values.view_as(one), gradient.view_as(one)
    return flat_P


def parted(network: nn.Module) -> nn.Module:
    """Give each parameter its own memory again, without a gradient; return the network."""
    for one in network.parameters():
        one.data, one.grad = one.data.clone(), None
    return network

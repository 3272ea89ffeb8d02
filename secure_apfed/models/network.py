"""What a family of networks offers, and building blocks that the families share.

A family makes three modules that fit together: an encoder (features -> representation),
a head (representation -> class scores) and a decoder (representation -> another party's
features). Source: APFed, Tables 3 and 4, and the authors' release where the paper is
silent. Letters: B batch, D numbers of a representation, K classes.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from secure_apfed.errors import ModelError
from secure_apfed.settings.model import ModelSettings

__all__ = [
    "NetworkFamily",
    "Reshape",
    "Shape",
    "output_shape",
    "projection_to",
    "two_layer_head",
]

Shape = tuple[int, ...]


class NetworkFamily(Protocol):
    """Makes networks that fit together; shapes are those of one row, without the batch."""

    def encoder(self, features: Shape, settings: ModelSettings) -> nn.Module:
        """Makes features -> representation."""
        ...

    def head(self, size: int, classes: int, settings: ModelSettings) -> nn.Module:
        """Makes flattened representation of `size` numbers -> class scores (B, K)."""
        ...

    def decoder(self, representation: Shape, features: Shape, settings: ModelSettings) -> nn.Module:
        """Makes representation -> features of another party; mirrors `encoder`."""
        ...


def output_shape(module: nn.Module, features: Shape) -> Shape:
    """The shape of one row of the module's output for rows of shape `features`.

    Raises:
        ModelError: the module cannot take such rows.
    """
    training = module.training
    module.eval()
    reference = next(module.parameters(), torch.empty(0))
    try:
        with torch.no_grad():
            result = module(reference.new_zeros((1, *features)))
    except RuntimeError as error:
        raise ModelError(
            f"a network for other rows was given rows of shape {features}; choose another "
            f"model.network or another partition ({error})"
        ) from error
    finally:
        module.train(training)
    shape: Shape = tuple(result.shape[1:])
    return shape


def projection_to(size: int, representation: Shape) -> nn.Module:
    """The linear projection head that an active or passive puts behind its encoder."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(representation), size))


def two_layer_head(size: int, width: int, classes: int, dropout: float) -> nn.Module:
    """Tables 3 and 4: fc(size, width), ReLU, dropout, fc(width, classes)."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(size, width),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(width, classes),
    )


class Reshape(nn.Module):
    """Gives every row the shape `shape`."""

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.shape = tuple(shape)

    def forward(self, values_BD: Tensor) -> Tensor:
        return values_BD.reshape(len(values_BD), *self.shape)

"""Overcomplete autoencoders with SELU, and a linear classifier on their code.

Run by: every party of APC-VFL. Source: APC-VFL, Table 3 (layers [a, 64, 128] and so on, SELU;
symmetric autoencoders) and section 5 (logistic regression).
"""

import math
from itertools import pairwise

from torch import nn

from secure_apfed.models.network import Reshape, Shape
from secure_apfed.settings.model import ModelSettings

__all__ = ["Selu"]


class Selu:
    """Fully connected layers with a SELU behind each but a decoder's last."""

    def encoder(self, features: Shape, settings: ModelSettings) -> nn.Module:
        """features, flattened -> `settings.representation` numbers."""
        widths = (math.prod(features), *settings.hidden, settings.representation)
        return nn.Sequential(nn.Flatten(), *_layers(widths))

    def head(self, size: int, classes: int, settings: ModelSettings) -> nn.Module:
        """fc(size, K), with the cross-entropy a logistic regression; behind `settings.head`."""
        return nn.Sequential(nn.Flatten(), *_layers((size, *settings.head, classes))[:-1])

    def decoder(self, representation: Shape, features: Shape, settings: ModelSettings) -> nn.Module:
        """The encoder's widths backwards; linear at the end, since features may be negative."""
        widths = (math.prod(representation), *reversed(settings.hidden), math.prod(features))
        return nn.Sequential(nn.Flatten(), *_layers(widths)[:-1], Reshape(features))


def _layers(widths: tuple[int, ...]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for one, other in pairwise(widths):
        layers += [nn.Linear(one, other), nn.SELU()]
    return layers

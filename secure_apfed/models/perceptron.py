"""Multilayer perceptrons, for tables and for images too small to convolve.

Run by: the active and the passives. The papers test images only; these are ours, in the
same scheme: encoder, head of two layers, decoder that mirrors the encoder.
"""

import math
from itertools import pairwise

from torch import nn

from secure_apfed.models.network import Reshape, Shape, two_layer_head
from secure_apfed.settings.model import ModelSettings

__all__ = ["Perceptron"]


class Perceptron:
    """Fully connected layers with a ReLU between them."""

    def encoder(self, features: Shape, settings: ModelSettings) -> nn.Module:
        """features, flattened -> `settings.representation` numbers after a ReLU."""
        widths = (math.prod(features), *settings.hidden, settings.representation)
        return nn.Sequential(nn.Flatten(), *_layers(widths), nn.ReLU())

    def head(self, size: int, classes: int, settings: ModelSettings) -> nn.Module:
        """fc(size, first hidden width), ReLU, dropout, fc(that width, K)."""
        width = settings.hidden[0] if settings.hidden else settings.representation
        return two_layer_head(size, width, classes, settings.dropout)

    def decoder(self, representation: Shape, features: Shape, settings: ModelSettings) -> nn.Module:
        """The encoder's widths backwards; linear at the end, since features may be negative."""
        widths = (math.prod(representation), *reversed(settings.hidden), math.prod(features))
        return nn.Sequential(nn.Flatten(), *_layers(widths), Reshape(features))


def _layers(widths: tuple[int, ...]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for wide, narrow in pairwise(widths):
        layers += [nn.Linear(wide, narrow), nn.ReLU()]
    return layers[:-1]

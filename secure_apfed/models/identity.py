"""No encoder: the features as they are, under one linear layer without a bias.

Run by: the active, where a method finds the layer's weights by an equation of its own.
"""

from torch import nn

from secure_apfed.models.network import Shape
from secure_apfed.models.perceptron import Perceptron
from secure_apfed.settings.model import ModelSettings

__all__ = ["Identity"]


class Identity:
    """The features, flattened, and one layer."""

    def encoder(self, features: Shape, settings: ModelSettings) -> nn.Module:
        """Features -> the same, flattened."""
        return nn.Flatten()

    def head(self, size: int, classes: int, settings: ModelSettings) -> nn.Module:
        """One linear layer."""
        return nn.Linear(size, classes, bias=False)

    def decoder(self, representation: Shape, features: Shape, settings: ModelSettings) -> nn.Module:
        """That of the perceptron."""
        return Perceptron().decoder(representation, features, settings)

"""Linear networks: one layer to the representation, one layer from there to the classes.

Run by: whoever has few labels, for which deeper networks have too many weights. Together the
parties' layers are a regularised softmax regression on all features.
"""

import math

from torch import nn

from secure_apfed.models.network import Shape
from secure_apfed.models.perceptron import Perceptron
from secure_apfed.settings.model import ModelSettings

__all__ = ["Linear"]


class Linear:
    """No activation and no dropout anywhere."""

    def encoder(self, features: Shape, settings: ModelSettings) -> nn.Module:
        """features, flattened -> `settings.representation` numbers."""
        return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(features), settings.representation))

    def head(self, size: int, classes: int, settings: ModelSettings) -> nn.Module:
        """fc(size, K)."""
        return nn.Sequential(nn.Flatten(), nn.Linear(size, classes))

    def decoder(self, representation: Shape, features: Shape, settings: ModelSettings) -> nn.Module:
        """That of the perceptron."""
        return Perceptron().decoder(representation, features, settings)

"""Random features: a fixed encoder under a linear head, whose best weights are one equation.

Run by: the active, as the student of votes. Source: Rahimi and Recht 2007 (Random Features for
Large-Scale Kernel Machines), Section 3, of a Gaussian kernel; a constant and the features
themselves stand beside them. Letters: B batch, N rows, F features, D random features.
"""

import math

import torch
from torch import Tensor, nn

from secure_apfed.models.network import Shape
from secure_apfed.models.perceptron import Perceptron
from secure_apfed.settings.model import ModelSettings

__all__ = ["RandomFeatureFamily", "RandomFeatures"]

_SAMPLE = 300
_LEAST_SCALE = 1e-6


class RandomFeatures(nn.Module):
    """x -> (1, z / sqrt F, sqrt(2 / D) cos(z W / width + b)), with z the standardised x.

    Nothing of it is trained. `fit` takes centre, scale and width from a party's own rows; without
    it z is x, and the width the expected distance of two rows of standard normal numbers.

    Args:
        features: F, flattened; size: D. W and b come from torch's generator.
    """

    centre: Tensor
    scale: Tensor
    width: Tensor
    directions: Tensor
    phases: Tensor

    def __init__(self, features: int, size: int) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(features))
        self.register_buffer("scale", torch.ones(features))
        self.register_buffer("width", torch.tensor(math.sqrt(2 * features)))
        self.register_buffer("directions", torch.randn(features, size))
        self.register_buffer("phases", 2 * math.pi * torch.rand(size))

    def fit(self, features_NF: Tensor) -> None:
        """Standardise by these rows; the width is the median distance of some of them."""
        rows_NF = features_NF.flatten(1).to(self.centre)
        self.centre = rows_NF.mean(0)
        scale = rows_NF.std(0, correction=0)
        # What never differed says nothing of a row, and z stays 0 where it does one day.
        self.scale = torch.where(scale < _LEAST_SCALE, math.inf, scale)
        step = max(1, len(rows_NF) // _SAMPLE)
        sample_NF = (rows_NF[::step] - self.centre) / self.scale
        distances = torch.pdist(sample_NF)
        distances = distances[distances > 0]
        if len(distances):
            self.width = distances.median()

    def forward(self, features_B: Tensor) -> Tensor:
        z_BF = (features_B.flatten(1) - self.centre) / self.scale
        size = len(self.phases)
        waves_BD = torch.cos(z_BF @ self.directions / self.width + self.phases)
        return torch.cat(
            [
                torch.ones_like(z_BF[:, :1]),
                z_BF / math.sqrt(z_BF.shape[1]),
                math.sqrt(2 / size) * waves_BD,
            ],
            dim=1,
        )


class RandomFeatureFamily:
    """Random features of the rows, and one linear layer without a bias: the constant is one."""

    def encoder(self, features: Shape, settings: ModelSettings) -> nn.Module:
        """`settings.random_features` of them, beside the row itself and a constant."""
        return RandomFeatures(math.prod(features), settings.random_features)

    def head(self, size: int, classes: int, settings: ModelSettings) -> nn.Module:
        """One linear layer."""
        return nn.Sequential(nn.Flatten(), nn.Linear(size, classes, bias=False))

    def decoder(self, representation: Shape, features: Shape, settings: ModelSettings) -> nn.Module:
        """That of the perceptron: nothing inverts random features."""
        return Perceptron().decoder(representation, features, settings)

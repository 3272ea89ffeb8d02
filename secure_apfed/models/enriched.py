"""A row beside a code of it, and a linear classifier on both.

Run by: the active of VFedTrans, whose code was drawn to singular vectors of all parties' tables.
Source: Huang et al. 2023, whose task party classifies its own features beside what it distilled.
Hidden layers are those of APC-VFL's networks (SELU), not the release's sigmoids; the code is
linear, since singular vectors have both signs.
"""

import torch
from torch import Tensor, nn

from secure_apfed.models.network import Shape
from secure_apfed.models.selu import Selu
from secure_apfed.settings.model import ModelSettings

__all__ = ["Enriched", "EnrichedFamily"]


class Enriched(nn.Module):
    """x -> (x, code of x), flattened."""

    def __init__(self, code: nn.Module) -> None:
        super().__init__()
        self.code = code

    def forward(self, features_B: Tensor) -> Tensor:
        return torch.cat([features_B.flatten(1), self.code(features_B)], dim=1)


class EnrichedFamily:
    """SELU between fully connected layers, none behind the last; the row beside its code."""

    def encoder(self, features: Shape, settings: ModelSettings) -> nn.Module:
        """Makes features -> features, flattened, and `settings.representation` numbers."""
        layers = list(Selu().encoder(features, settings).children())
        return Enriched(nn.Sequential(*layers[:-1]))

    def head(self, size: int, classes: int, settings: ModelSettings) -> nn.Module:
        """That of SELU networks."""
        return Selu().head(size, classes, settings)

    def decoder(self, representation: Shape, features: Shape, settings: ModelSettings) -> nn.Module:
        """That of SELU networks: the code's, where `representation` is that of the code."""
        return Selu().decoder(representation, features, settings)

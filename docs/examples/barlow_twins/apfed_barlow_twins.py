"""Barlow Twins as an objective: what the active sends and the passive's own code, number by number.

J. Zbontar, L. Jing, I. Misra, Y. LeCun, S. Deny, "Barlow Twins: Self-Supervised Learning via
Redundancy Reduction", ICML 2021, Eqs. (1) and (2). The paper's two views are distortions of one
image; here they are the active's representation of a person and the passive's.

Letters: B rows of a batch, D numbers of a representation.
"""

import math
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from secure_apfed.networks.models import family_for, output_shape
from secure_apfed.networks.objectives import Objective
from secure_apfed.settings import Settings


class BarlowTwinsSettings(Settings):
    """Keys of `objective: {name: barlow_twins}`; `off_diagonal` is the paper's lambda."""

    off_diagonal: float = Field(0.005, gt=0)


class BarlowTwins(Objective):
    """The loss of Eq. (1). It reads means of the batch, so `row_wise` stays False."""

    settings: ClassVar[type[Settings]] = BarlowTwinsSettings

    def __init__(self, settings, *, representation, features, model, family=None) -> None:
        super().__init__()
        self.off_diagonal = settings.off_diagonal
        family = family or family_for(model, features)
        self.encoder = family.make_encoder(features, model)
        numbers = math.prod(output_shape(self.encoder, features))
        self.projection = nn.Linear(numbers, math.prod(representation))

    def forward(self, z_BD: Tensor, features_B: Tensor) -> Tensor:
        own_BD = self.projection(self.encoder(features_B).flatten(1))
        correlation_DD = _standardise(z_BD.flatten(1)).T @ _standardise(own_BD) / len(z_BD)
        invariance = (1 - correlation_DD.diagonal()).square().sum()
        off_DD = correlation_DD - torch.diag(correlation_DD.diagonal())
        return invariance + self.off_diagonal * off_DD.square().sum()


def _standardise(values_BD: Tensor) -> Tensor:
    """Return columns of mean 0 and deviation 1 over the batch, as Eq. (2) divides by norms."""
    centred_BD = values_BD - values_BD.mean(0)
    return centred_BD / (centred_BD.square().mean(0) + 1e-6).sqrt()

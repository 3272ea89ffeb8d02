"""The parties: they hold secrets and data, read messages and write payloads."""

from secure_apfed.learning.compute import Compute
from secure_apfed.learning.networks import ActiveNetworks
from secure_apfed.learning.private_gradient import PrivateGradient, PrivateUpdates
from secure_apfed.learning.release import ContributionNoise
from secure_apfed.parties.decomposed import DecomposedPassive, RowsAsked
from secure_apfed.parties.rules import RefusedSums

__all__ = [
    "ActiveNetworks",
    "Compute",
    "ContributionNoise",
    "DecomposedPassive",
    "PrivateGradient",
    "PrivateUpdates",
    "RefusedSums",
    "RowsAsked",
]

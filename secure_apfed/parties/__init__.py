"""The parties: they hold secrets and data, read messages and write payloads."""

from secure_apfed.parties.active import ActiveNetworks, ActiveParty, accuracy_of
from secure_apfed.parties.contribution_noise import ContributionNoise
from secure_apfed.parties.party import Compute
from secure_apfed.parties.passive import PassiveParty
from secure_apfed.parties.private_gradient import PrivateGradient, PrivateUpdates
from secure_apfed.parties.refused_sums import RefusedSums
from secure_apfed.parties.tvfl import TvflActive, TvflPassive

__all__ = [
    "ActiveNetworks",
    "ActiveParty",
    "Compute",
    "ContributionNoise",
    "PassiveParty",
    "PrivateGradient",
    "PrivateUpdates",
    "RefusedSums",
    "TvflActive",
    "TvflPassive",
    "accuracy_of",
]

"""The parties: they hold secrets and data, read messages and write payloads."""

from secure_apfed.learning.compute import Compute
from secure_apfed.learning.networks import ActiveNetworks
from secure_apfed.learning.private_gradient import PrivateGradient, PrivateUpdates
from secure_apfed.learning.release import ContributionNoise
from secure_apfed.parties.decomposed import DecomposedPassive, RowsAsked
from secure_apfed.parties.rules import OpenAudits, RefusedSums
from secure_apfed.parties.tvfl import SummedPassive, TvflActive, TvflPassive
from secure_apfed.parties.votes import Ballot, VotesActive, VotingParty

__all__ = [
    "ActiveNetworks",
    "Ballot",
    "Compute",
    "ContributionNoise",
    "DecomposedPassive",
    "OpenAudits",
    "PrivateGradient",
    "PrivateUpdates",
    "RefusedSums",
    "RowsAsked",
    "SummedPassive",
    "TvflActive",
    "TvflPassive",
    "VotesActive",
    "VotingParty",
]

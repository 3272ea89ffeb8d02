"""The noisy moment of a sum of votes: the active's signs times the passives' votes, and no more.

A dealer without data makes it impossible for the active to weigh one person more than another.
"""

from apfed_protocols.moments.agreement import MomentAgreement
from apfed_protocols.moments.frames import MomentFrames
from apfed_protocols.moments.leaks import MOMENT_LEAKS, MomentLeaks
from apfed_protocols.moments.roles import (
    MomentCombiner,
    MomentContributor,
    MomentDealer,
    MomentReceiver,
)

__all__ = [
    "MOMENT_LEAKS",
    "MomentAgreement",
    "MomentCombiner",
    "MomentContributor",
    "MomentDealer",
    "MomentFrames",
    "MomentLeaks",
    "MomentReceiver",
]

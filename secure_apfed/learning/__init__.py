"""What parties compute, on tensors: no message, contract or socket is known here.

Descent, the arithmetic of each method, releases behind a guard, and checks of what comes in. The
parties call it between reading and writing envelopes; the audit and the benchmarks call the same.
"""

from secure_apfed.learning.apfed import (
    ActiveLearner,
    ActiveNetworks,
    PassiveLearner,
    accuracy_of,
    example_gradients,
    joint_loss,
    passive_gradients,
)
from secure_apfed.learning.compute import Compute, find_device
from secure_apfed.learning.descent import Descent, prefixed, without_prefix
from secure_apfed.learning.private_gradient import PrivateGradient, PrivateUpdates
from secure_apfed.learning.release import ContributionNoise, Released, Releases
from secure_apfed.learning.tvfl import EncoderLearner, HeadLearner

__all__ = [
    "ActiveLearner",
    "ActiveNetworks",
    "Compute",
    "ContributionNoise",
    "Descent",
    "EncoderLearner",
    "HeadLearner",
    "PassiveLearner",
    "PrivateGradient",
    "PrivateUpdates",
    "Released",
    "Releases",
    "accuracy_of",
    "example_gradients",
    "find_device",
    "joint_loss",
    "passive_gradients",
    "prefixed",
    "without_prefix",
]

"""From settings to what the defences of one party are built for."""

import math

from protocols.randomness import derive_key
from secure_apfed.defences import NoiseSource, Surroundings
from secure_apfed.methods.method import Own
from secure_apfed.models import Shape

__all__ = ["surroundings_of"]


def surroundings_of(own: Own, shape: Shape) -> Surroundings:
    """What the defences of one party are built for; `shape` is of one row that they protect."""
    key = derive_key(own.noise_key, b"secure-apfed defences v1")
    return Surroundings(
        party=own.name,
        seed=own.seed,
        noise=NoiseSource(key, secret=own.config.guard.noise == "secret"),
        classes=len(own.classes),
        size=math.prod(shape),
    )

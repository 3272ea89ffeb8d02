"""From settings to what the defences of one party are built for."""

import math

from protocols.randomness import derive_key
from secure_apfed.defences import NoiseSource, Surroundings
from secure_apfed.methods.method import Start
from secure_apfed.models import Shape

__all__ = ["surroundings_of"]


def surroundings_of(start: Start, party: str, shape: Shape) -> Surroundings:
    """What the defences of one party are built for; `shape` is of one row that they protect."""
    config = start.config
    key = derive_key(start.noise_keys[party], b"secure-apfed defences v1")
    return Surroundings(
        party=party,
        seed=config.seed,
        noise=NoiseSource(key, secret=config.guard.noise == "secret"),
        classes=len(start.data.classes),
        size=math.prod(shape),
    )

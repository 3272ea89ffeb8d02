"""Reproducible randomness for everything that is not a key, a mask or noise.

Run by: every party. A generator's state is a function of (run seed, purpose), the step
included, so a resumed run needs no saved generator to repeat itself bit for bit, and
parties give the same result in one process as in many.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["derive_seed", "seeded", "shuffled"]


def derive_seed(seed: int, *purpose: str | int) -> int:
    """Return a 63-bit seed for one purpose of the run with this seed."""
    text = "\x1f".join(map(str, (seed, *purpose)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@contextmanager
def seeded(seed: int, *purpose: str | int) -> Iterator[None]:
    """Run a block with torch's generators at `derive_seed(seed, *purpose)`; restore them after."""
    derived = derive_seed(seed, *purpose)
    if torch.cuda.is_available():
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(derived)
            yield
        return
    # Without a GPU torch.manual_seed queues the seed, with a stack trace, for devices that never
    # come: a quarter of a small step, and memory that grows with each.
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(derived)
    try:
        yield
    finally:
        torch.set_rng_state(state)


def shuffled(rows: torch.Tensor, seed: int, *purpose: str | int) -> torch.Tensor:
    """Return `rows` (N,) in an order that depends on the seed and purpose only."""
    generator = torch.Generator().manual_seed(derive_seed(seed, *purpose))
    return rows[torch.randperm(len(rows), generator=generator)]

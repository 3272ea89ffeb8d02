"""Many runs: as one program where that is faster, else one after the other in some processes.

Measured (docs/performance.md): on a CPU one process a core, each with one thread, is fastest for
every network; on a GPU runs of one shape are stacked.
"""

from collections.abc import Sequence

import torch
from joblib import Parallel, delayed

from secure_apfed.config import Config
from secure_apfed.learning.compute import find_device
from secure_apfed.simulation.stacked import (
    UnstackableError,
    shape_of,
    simulate_stacked,
    unstackable,
)
from secure_apfed.simulation.together import Simulated, simulate

__all__ = ["simulate_many"]


def simulate_many(
    configs: Sequence[Config], *, jobs: int = 1, most: int = 25, stack: bool | None = None
) -> list[Simulated]:
    """Train runs, in any order, and return what each reaches, in theirs.

    Args:
        configs: of the runs.
        jobs: processes, one thread each; those of runs on a GPU wait for each other there.
        most: runs that are stacked at most, for its memory.
        stack: whether runs of one shape train as one program; None: on a GPU.

    Raises:
        ConfigError: a run cannot be simulated.
    """
    groups: dict[str, list[int]] = {}
    alone: list[int] = []
    for place, config in enumerate(configs):
        wanted = find_device(config.train.device).type == "cuda" if stack is None else stack
        if wanted and not unstackable(config):
            groups.setdefault(shape_of(config), []).append(place)
        else:
            alone.append(place)
    found: dict[int, Simulated] = {}
    for places in groups.values():
        for first in range(0, len(places), most):
            chosen = places[first : first + most]
            try:
                results = simulate_stacked([configs[place] for place in chosen])
            except UnstackableError:  # their data says so, which settings do not
                alone += chosen
                continue
            found |= dict(zip(chosen, results, strict=True))
    results = Parallel(n_jobs=jobs)(delayed(_alone)(configs[place]) for place in alone)
    found |= dict(zip(alone, results, strict=True))
    return [found[place] for place in range(len(configs))]


def _alone(config: Config) -> Simulated:
    torch.set_num_threads(1)
    return simulate(config)

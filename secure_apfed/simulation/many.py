"""Many runs, in some processes: one a core, each with one thread, is fastest."""

from collections.abc import Sequence

import torch
from joblib import Parallel, delayed

from secure_apfed.config import Config
from secure_apfed.simulation import Simulated, simulate

__all__ = ["simulate_many"]


def simulate_many(configs: Sequence[Config], *, jobs: int = 1) -> list[Simulated]:
    """Train runs, in any order, and return what each reaches, in theirs.

    Args:
        configs: of the runs.
        jobs: processes, one thread each; those of runs on a GPU wait for each other there.

    Raises:
        ConfigError: a run cannot be simulated.
    """
    return list(Parallel(n_jobs=jobs)(delayed(_alone)(config) for config in configs))


def _alone(config: Config) -> Simulated:
    torch.set_num_threads(1)
    return simulate(config)

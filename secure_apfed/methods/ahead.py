"""What passives do while they wait for the next batch: encrypt zeros ahead, if the run says so.

Run by: each passive of a homomorphic sum with `secure_sum.zero_pool`. A run without one starts
no process and pays for nothing. The simulated passives of one run share a worker.
"""

from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial

from apfed_protocols.sums import SumContributor
from apfed_protocols.sums.homomorphic import Encrypter
from secure_apfed.settings.training import SumSettings
from secure_apfed.workers import open_worker, pays

__all__ = ["waiting_of", "worker_for"]


def worker_for(settings: SumSettings) -> Executor | None:
    """The worker process where it pays, which starts with its first task."""
    return open_worker() if settings.zero_pool and pays() else None


def waiting_of(
    settings: SumSettings,
    contributor: SumContributor,
    shape: tuple[int, int],
    worker: Executor | None,
) -> Callable[[], None]:
    """What one passive does while it waits.

    Args:
        settings: of the sum.
        contributor: the passive's end of it.
        shape: (rows, numbers) of a full batch's contribution.
        worker: who encrypts, if not this process.
    """
    if not settings.zero_pool or not isinstance(contributor, Encrypter):
        return lambda: None
    return partial(contributor.prepare, shape, settings.zero_pool, worker=worker)

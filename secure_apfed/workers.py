"""A process beside a party's own that encrypts while the party trains.

Run by: passives of a homomorphic sum that ask for it (`secure_sum.worker`). SEAL holds Python's
lock while it encrypts, so a thread would stop the training. The process gets public numbers
only, starts when it is first needed, and ends with `close_workers`, with its party, or when its
party is killed.
"""

import os
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context, parent_process

__all__ = ["close_workers", "open_worker", "pays"]

_open: set[ProcessPoolExecutor] = set()


def pays() -> bool:
    """Whether there is a second processor core for a worker."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (cores or 1) > 1


def open_worker() -> ProcessPoolExecutor:
    """A worker of one process, which starts with the first task."""
    worker = ProcessPoolExecutor(
        1, mp_context=get_context("spawn"), initializer=_end_with_the_parent
    )
    _open.add(worker)
    return worker


def close_workers() -> None:
    """End every worker that this process opened, and wait until they are gone."""
    while _open:
        _open.pop().shutdown(wait=True, cancel_futures=True)


def _end_with_the_parent() -> None:
    """In the worker: a killed parent leaves nobody behind who could end it."""
    threading.Thread(target=_watch, daemon=True).start()


def _watch() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)

"""A process beside a party's own that encrypts while the party trains.

Run by: passives of a homomorphic sum that ask for it (`secure_sum.worker`). SEAL holds Python's
lock while it encrypts, so a thread would stop the training. The process gets public numbers
only, starts when it is first needed, and ends with `close_workers`, with its party, or when its
party is killed.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context, parent_process
from typing import Any

__all__ = ["close_workers", "open_worker", "pays"]

_open: set[ProcessPoolExecutor] = set()


class _Worker(ProcessPoolExecutor):
    """A pool of one process that is found broken even when killed in the middle of a result.

    Python keeps the process's end of the pipe of results open here too, so half a result would be
    waited for without end, at the latest when the pool is shut down.
    """

    def submit(self, task: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        future = super().submit(task, *args, **options)
        queue = vars(self).get("_result_queue")
        writer = getattr(queue, "_writer", None)
        if writer is not None and not writer.closed:  # its one process has its own by now
            writer.close()
        return future


def pays() -> bool:
    """Whether there is a second processor core for a worker."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (cores or 1) > 1


def open_worker() -> ProcessPoolExecutor:
    """The worker of this process, which starts with the first task; its parties share it."""
    if _open:
        return next(iter(_open))
    worker = _Worker(1, mp_context=get_context("spawn"), initializer=_end_with_the_parent)
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

"""Processes beside a party's own that blind IDs.

Run by: parties that intersect more IDs than one bucket holds. The processes get digests, points and
scalars of their own party, start when they are first needed, inherit nothing, and are gone when the
intersection is over; they end with their party, also when that is killed.
"""

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import current_process, get_context, parent_process
from typing import Any


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


class _Turns(Executor):
    """Workers that take turns, each broken by itself; a pool of several would wait for the lock
    that one of them held when it was killed.
    """

    def __init__(self, workers: Sequence[_Worker]) -> None:
        self._next = itertools.cycle(workers)

    def submit(self, task: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        return next(self._next).submit(task, *args, **options)


def usable_cores() -> int:
    """How many processor cores this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return cores or 1


@contextmanager
def worker_pool(count: int | None) -> Iterator[Executor | None]:
    """So many workers, or one for each usable core, which are gone when this is left.

    None where that is one, which is this process itself, or where this may start none, being a
    daemon of `multiprocessing`.
    """
    wanted = 1 if current_process().daemon else count or usable_cores()
    workers = [_new_worker() for _ in range(wanted)] if wanted > 1 else []
    try:
        yield _Turns(workers) if workers else None
    finally:
        for worker in workers:
            worker.shutdown(wait=True, cancel_futures=True)


def _new_worker() -> _Worker:
    return _Worker(1, mp_context=get_context("spawn"), initializer=_end_with_the_parent)


def _end_with_the_parent() -> None:
    """In the worker: a killed parent leaves nobody behind who could end it.

    Ctrl-C reaches all processes of a terminal; the parent's own end is this one's, too.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_watch, daemon=True).start()


def _watch() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)

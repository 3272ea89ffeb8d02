"""The processes of studies, forked from a server that has imported what they need.

Run by: the commands of `secure-apfed study`, before they import anything large, so that the server
and they import at the same time, each on a core of its own, and workers find what they need.
Elsewhere, and on other systems than Linux, whose libraries may not survive a fork, joblib starts
its processes as it always does; what they compute is the same.
"""

import gc
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import forkserver, parent_process, set_forkserver_preload
from threading import Thread

_PRELOADED_MODULE = "apfed_experiments.preloaded"
_POLL_S = 0.05
_WORKER_ENVIRONMENT = {
    # Libraries read these when they are loaded; every worker computes on one thread.
    **dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
    ),
    # glibc's: what one step frees the next takes again, in place of fresh pages from the kernel.
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    "MALLOC_MMAP_THRESHOLD_": str(64 << 20),
}


def start_forkserver() -> None:
    """Start the server from which worker processes are forked, each with one thread.

    Does nothing on other systems than Linux.
    """
    if sys.platform != "linux":
        return
    from joblib.externals.loky.backend.context import set_start_method

    set_forkserver_preload([_PRELOADED_MODULE])
    with _set_environment(_WORKER_ENVIRONMENT):
        forkserver.ensure_running()
    set_start_method("forkserver", force=True)


@contextmanager
def start_workers() -> Iterator[None]:
    """Start the server from which workers are forked, and switch garbage collection off in the
    block.

    The block imports modules, at the same time as the server.
    """
    start_forkserver()
    with pause_collection():
        yield


def end_with_parent() -> None:
    """Make every process that is forked from now on end when its parent ends.

    A worker that waits for work would not notice the end by itself: it holds both ends of the queue
    that it reads, so the queue never closes.
    """
    os.register_at_fork(after_in_child=lambda: Thread(target=_wait_for_parent, daemon=True).start())


def _wait_for_parent() -> None:
    """Wait until the parent process ends, then end this one."""
    while (parent := parent_process()) is None:
        time.sleep(_POLL_S)  # multiprocessing sets the parent a moment after the fork
    parent.join()
    os._exit(1)


@contextmanager
def pause_collection() -> Iterator[None]:
    """Switch garbage collection off in the block, and exempt all objects that exist at its end for
    good.

    For blocks that import modules, whose objects never become garbage: searching them only takes
    time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


@contextmanager
def _set_environment(value_by_variable: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables in the block, except those that the user has set."""
    added_variables = {
        name: value for name, value in value_by_variable.items() if name not in os.environ
    }
    os.environ.update(added_variables)
    try:
        yield
    finally:
        for name in added_variables:
            del os.environ[name]

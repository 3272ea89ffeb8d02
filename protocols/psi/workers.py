"""Helper interpreters for `protocols.psi.ladder`, kept from a protocol's first work to its last.

Run by: both roles of `protocols.psi.ecdh`, each with its own. Secrets pass to a helper through
a pipe, never as an argument or a file.

Not threads: the multiplications hold Python's lock. Not `multiprocessing`: its fresh
interpreters import the caller's main script again, which breaks every script without a
`__main__` guard, and its forks inherit locked threads.
"""

import math
import os
import queue
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from protocols.errors import LocalProtocolError
from protocols.psi import ladder

__all__ = ["PARALLEL_THRESHOLD", "Workers"]

PARALLEL_THRESHOLD = 20_000
# Small enough that all helpers end at about the same time, and that a job fits into a pipe.
_POINTS_OF_A_JOB = 1_000

_Helper = subprocess.Popen[bytes]


class Workers:
    """Whoever multiplies this party's points: this process, or helpers for long lists.

    Args:
        processes: how many helpers, 1 for none but this process; None means one for each
            processor where there are at least `PARALLEL_THRESHOLD` points, else none.
    """

    def __init__(self, processes: int | None = 1) -> None:
        if processes is not None and processes < 1:
            raise LocalProtocolError(f"processes is at least 1, got {processes}")
        self._processes = processes
        self._idle: queue.SimpleQueue[_Helper] = queue.SimpleQueue()
        self._helpers: list[_Helper] = []
        # Also ends the helpers of a protocol that failed, when nobody holds it any longer.
        self._end = weakref.finalize(self, _end, self._helpers)

    def work(
        self, kind: bytes, scalar: bytes, blocks: bytes, report: Callable[[int], None] | None = None
    ) -> bytes:
        """Return the points that `ladder.work` makes of the blocks.

        Args:
            kind: `ladder.DIGESTS` or `ladder.POINTS`.
            scalar: 32 secret bytes.
            blocks: of 32 bytes each, one after the other.
            report: called with the number of points done, as it grows.

        Raises:
            LocalProtocolError: a helper ended.
        """
        count = len(blocks) // ladder.POINT_BYTES
        jobs = max(1, math.ceil(count / _POINTS_OF_A_JOB))
        bounds = [ladder.POINT_BYTES * (count * k // jobs) for k in range(jobs + 1)]
        orders = (kind + scalar + blocks[bounds[k] : bounds[k + 1]] for k in range(jobs))
        helpers = self._helpers_for(count)
        if helpers == 1:
            return b"".join(_counted(map(ladder.work, orders), report))
        self._start(helpers)
        with ThreadPoolExecutor(helpers) as threads:
            try:
                return b"".join(_counted(threads.map(self._ask, orders), report))
            finally:
                # where this ends early, jobs that no helper has begun are not done any more
                threads.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """End the helpers; the next work starts others."""
        _end(self._helpers)
        self._idle = queue.SimpleQueue()

    def _helpers_for(self, count: int) -> int:
        if self._processes is None:
            return (os.cpu_count() or 1) if count >= PARALLEL_THRESHOLD else 1
        return self._processes if count >= self._processes else 1

    def _start(self, helpers: int) -> None:
        command = (sys.executable, "-P", ladder.__file__)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        while len(self._helpers) < helpers:
            # the command is this interpreter and our script, so there is nothing to inject
            helper = subprocess.Popen(  # noqa: S603
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
            )
            self._helpers.append(helper)
            self._idle.put(helper)

    def _ask(self, job: bytes) -> bytes:
        """Let an idle helper do one job; there are as many threads as helpers."""
        helper = self._idle.get()
        try:
            return _answer(helper, job)
        finally:
            self._idle.put(helper)


def _answer(helper: _Helper, job: bytes) -> bytes:
    assert helper.stdin is not None
    assert helper.stdout is not None
    expected, points = len(job) - 1 - ladder.POINT_BYTES, b""
    try:
        helper.stdin.write(ladder.LENGTH.pack(len(job)) + job)
        helper.stdin.flush()
        points = helper.stdout.read(expected)
    except BrokenPipeError:
        pass  # said below, with the status
    if len(points) != expected:
        raise LocalProtocolError(
            f"a helper process for blinding IDs ended with status {helper.wait()}; "
            "use processes=1 to work in this process"
        )
    return points


def _end(helpers: list[_Helper]) -> None:
    while helpers:
        helper = helpers.pop()
        helper.kill()
        helper.communicate()


def _counted(results: Iterable[bytes], report: Callable[[int], None] | None) -> Iterator[bytes]:
    done = 0
    for result in results:
        yield result
        done += len(result) // ladder.POINT_BYTES
        if report is not None:
            report(done)

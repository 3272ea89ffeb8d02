"""Long lists of points in several threads or processes, each doing one piece after the other.

Run by: both roles of `apfed_protocols.psi.ecdh`. Threads suffice for a few processors, because the
multiplications leave Python's lock to others; hashing to the curve does not, nor do the pieces
between them, so that for long lists a pool of processes can be given.
"""

import math
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, Executor, ThreadPoolExecutor

from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.psi.ladder import POINT_BYTES

__all__ = ["in_threads"]

# Takes some 30 ms: that soon a thread ends whose work is called off.
_POINTS_OF_A_PIECE = 1_000


def in_threads(
    work: Callable[[bytes], bytes],
    blocks: bytes,
    *,
    threads: int | None = None,
    pool: Executor | None = None,
    report: Callable[[int], None] | None = None,
) -> bytes:
    """Return what `work` makes of the blocks: of each piece of them, in order.

    Args:
        work: makes as many blocks of 32 bytes of any number of them.
        blocks: of 32 bytes each, one after the other.
        threads: how many at most; None for one for each processor.
        pool: works in place of threads; it stays open.
        report: called with the number of blocks done, as it grows.

    Raises:
        LocalProtocolError: no thread to work in, or a process of the pool died.
    """
    if threads is not None and threads < 1:
        raise LocalProtocolError(f"threads is at least 1, got {threads}")
    count = len(blocks) // POINT_BYTES
    pieces = max(1, math.ceil(count / _POINTS_OF_A_PIECE))
    bounds = [POINT_BYTES * (count * k // pieces) for k in range(pieces + 1)]
    given = (blocks[bounds[k] : bounds[k + 1]] for k in range(pieces))
    if pool is not None:
        return _in_pool(pool, work, given, report)
    several = min(pieces, threads or os.cpu_count() or 1)
    if several == 1:
        return b"".join(_counted(map(work, given), report))
    with ThreadPoolExecutor(several) as pool:
        try:
            return b"".join(_counted(pool.map(work, given), report))
        finally:
            # where this ends early, pieces that no thread has begun are not done any more
            pool.shutdown(wait=False, cancel_futures=True)


def _in_pool(
    pool: Executor,
    work: Callable[[bytes], bytes],
    given: Iterable[bytes],
    report: Callable[[int], None] | None,
) -> bytes:
    try:
        # map calls off what no process has begun, where this ends early
        return b"".join(_counted(pool.map(work, given), report))
    except BrokenExecutor as error:
        raise LocalProtocolError(
            "a process that blinds IDs ended before its work was done, perhaps for lack of memory; "
            "start the party again, with fewer threads if that was why. A script that starts "
            'processes keeps what it runs under `if __name__ == "__main__"`'
        ) from error


def _counted(results: Iterable[bytes], report: Callable[[int], None] | None) -> Iterator[bytes]:
    done = 0
    for result in results:
        yield result
        done += len(result) // POINT_BYTES
        if report is not None:
            report(done)

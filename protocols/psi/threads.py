"""Long lists of points in several threads, of which each does one piece after the other.

Run by: both roles of `protocols.psi.ecdh`. Threads suffice, because the multiplications leave
Python's lock to others.
"""

import math
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from protocols.errors import LocalProtocolError
from protocols.psi.ladder import POINT_BYTES

__all__ = ["in_threads"]

# Takes some 30 ms: that soon a thread ends whose work is called off.
_POINTS_OF_A_PIECE = 1_000


def in_threads(
    work: Callable[[bytes], bytes],
    blocks: bytes,
    *,
    threads: int | None = None,
    report: Callable[[int], None] | None = None,
) -> bytes:
    """Return what `work` makes of the blocks: of each piece of them, in order.

    Args:
        work: makes as many blocks of 32 bytes of any number of them.
        blocks: of 32 bytes each, one after the other.
        threads: how many at most; None for one for each processor.
        report: called with the number of blocks done, as it grows.

    Raises:
        LocalProtocolError: no thread to work in.
    """
    if threads is not None and threads < 1:
        raise LocalProtocolError(f"threads is at least 1, got {threads}")
    count = len(blocks) // POINT_BYTES
    pieces = max(1, math.ceil(count / _POINTS_OF_A_PIECE))
    bounds = [POINT_BYTES * (count * k // pieces) for k in range(pieces + 1)]
    given = (blocks[bounds[k] : bounds[k + 1]] for k in range(pieces))
    several = min(pieces, threads or os.cpu_count() or 1)
    if several == 1:
        return b"".join(_counted(map(work, given), report))
    with ThreadPoolExecutor(several) as pool:
        try:
            return b"".join(_counted(pool.map(work, given), report))
        finally:
            # where this ends early, pieces that no thread has begun are not done any more
            pool.shutdown(wait=False, cancel_futures=True)


def _counted(results: Iterable[bytes], report: Callable[[int], None] | None) -> Iterator[bytes]:
    done = 0
    for result in results:
        yield result
        done += len(result) // POINT_BYTES
        if report is not None:
            report(done)

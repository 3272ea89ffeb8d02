"""The own IDs as digests to blind, and the points of a peer before they are used.

Run by: both roles of `apfed_protocols.psi.ecdh`. Points are 32-byte u-coordinates on Curve25519,
held one after the other in one `bytes`; what is done with them is in `apfed_protocols.psi.ladder`.
"""

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial

import numpy as np

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.psi import ladder
from apfed_protocols.psi.digests import digest_each
from apfed_protocols.psi.ladder import POINT_BYTES, split_points
from apfed_protocols.psi.threads import in_threads

__all__ = ["blind_digests", "check_points", "digest_ids", "multiply_points"]

_PRIME = 2**255 - 19
# Every u of a point of order 1, 2, 4 or 8, on the curve or on its twist. The two of order 8
# are inverse numbers: the roots of u^4 - 4 u^3 - (2 + 4 * 486662) u^2 - 4 u + 1.
_ORDER_EIGHT = 325606250916557431795983626356110631294008115727848805560023387167927233504
_LOW_ORDER = frozenset(
    u.to_bytes(POINT_BYTES, "little")
    for u in (0, 1, _PRIME - 1, _ORDER_EIGHT, pow(_ORDER_EIGHT, -1, _PRIME))
)


def digest_ids(ids: Sequence[bytes], *, session: bytes) -> bytes:
    """Return a 32-byte digest of each ID: BLAKE2b keyed with the 32 bytes `session`.

    The digests are as secret as the IDs: who sees one can try out guessed IDs.
    """
    hasher = hashlib.blake2b(key=session, digest_size=POINT_BYTES, person=b"apfed psi ecdh")
    return digest_each(ids, hasher).tobytes()


def blind_digests(
    scalar: bytes,
    digests: bytes,
    *,
    threads: int | None = None,
    pool: Executor | None = None,
    report: Callable[[int], None] | None = None,
) -> bytes:
    """Map each 32-byte digest to the curve and multiply the point by `scalar`.

    Args:
        scalar: 32 secret bytes.
        digests: one after the other.
        threads: how many work at most; None for one for each processor.
        pool: of processes that work in place of threads.
        report: called with the number of digests done, as it grows.
    """
    work = partial(ladder.blind, scalar)
    return in_threads(work, digests, threads=threads, pool=pool, report=report)


def multiply_points(
    scalar: bytes,
    points: bytes,
    *,
    threads: int | None = None,
    pool: Executor | None = None,
    report: Callable[[int], None] | None = None,
) -> bytes:
    """Multiply each point, checked before by `check_points`, by `scalar`; as `blind_digests`."""
    work = partial(ladder.multiply, scalar)
    return in_threads(work, points, threads=threads, pool=pool, report=report)


def check_points(sender: str, points: bytes) -> None:
    """Refuse anything but distinct, canonical points outside the small subgroups.

    Raises:
        RemoteProtocolError: names `sender` and what is wrong.
    """
    if len(points) % POINT_BYTES:
        raise RemoteProtocolError(
            f"{sender} sent {len(points)} bytes of points, not a multiple of {POINT_BYTES}"
        )
    rows = np.frombuffer(points, np.uint8).reshape(-1, POINT_BYTES)
    top, lowest = rows[:, -1], rows[:, 0]
    not_reduced = (top == 0x7F) & (rows[:, 1:-1] == 0xFF).all(axis=1) & (lowest >= 0xED)
    if bool(((top > 0x7F) | not_reduced).any()):
        raise RemoteProtocolError(f"{sender} sent a point that is not a number below 2^255 - 19")
    distinct = set(split_points(points))
    if len(distinct) != len(rows):
        raise RemoteProtocolError(
            f"{sender} sent {len(rows) - len(distinct)} blinded ID(s) twice; "
            "its set has duplicates, or it does not follow the protocol"
        )
    if not _LOW_ORDER.isdisjoint(distinct):
        raise RemoteProtocolError(f"{sender} sent a point of low order, which would open a secret")

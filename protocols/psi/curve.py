"""Blinding of IDs on Curve25519: hash to the curve, then multiply by a secret scalar.

Run by: both roles of `protocols.psi.ecdh`. Points are 32-byte u-coordinates, held one
after the other in one `bytes`.

X25519 (RFC 7748, section 5) computes the u-coordinate of a scalar multiple from a
u-coordinate, so it commutes: X25519(a, X25519(b, u)) = X25519(b, X25519(a, u)). A clamped
scalar is 8 times a number below the order of the large subgroup: blinding is one-to-one
on that subgroup and wipes the low-order part of a hashed point. That blinded points look
random is the decisional Diffie-Hellman assumption, with the hash as a random oracle.

X25519 also accepts any 32 bytes, half of which lie on the curve's twist, and it keeps a
point on its side. Hashing IDs straight to 32 bytes would therefore publish one bit of
each ID's hash, and the count of these bits differs from set to set. So a candidate is
hashed again until u^3 + 486662 u^2 + u is a square, i.e. until it lies on the curve
("try and increment"; two tries on average). The number of tries depends on the ID, and
is seen only by who holds the ID.
"""

import hashlib
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

# gmpy2 ships no types; only `jacobi(int, int) -> int` is used
from gmpy2 import jacobi  # type: ignore[import-untyped]

from protocols.errors import LocalProtocolError, RemoteProtocolError

__all__ = [
    "PARALLEL_THRESHOLD",
    "POINT_BYTES",
    "blind_digests",
    "check_points",
    "digest_ids",
    "multiply_points",
    "split_points",
]

POINT_BYTES = 32
PARALLEL_THRESHOLD = 20_000
# Points of one job, in this process and in another one, which takes a moment to start.
_HERE, _ELSEWHERE = 2_000, 50_000
_DIGESTS, _POINTS = b"D", b"P"
_PRIME = 2**255 - 19
_CURVE_A = 486662
_BELOW_2_255 = 2**255 - 1
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

    def digest(identity: bytes) -> bytes:
        one = hasher.copy()
        one.update(identity)
        return one.digest()

    return b"".join(map(digest, ids))


def blind_digests(
    scalar: bytes,
    digests: bytes,
    *,
    processes: int | None = None,
    report: Callable[[int], None] | None = None,
) -> bytes:
    """Map each 32-byte digest to the curve and multiply the point by `scalar`.

    Args:
        scalar: 32 secret bytes.
        digests: one after the other.
        processes: how many to work in; see `PARALLEL_THRESHOLD`.
        report: called with the number of digests done, as it grows.
    """
    return _spread(_DIGESTS, scalar, digests, processes, report)


def multiply_points(
    scalar: bytes,
    points: bytes,
    *,
    processes: int | None = None,
    report: Callable[[int], None] | None = None,
) -> bytes:
    """Multiply each point, checked before by `check_points`, by `scalar`; as `blind_digests`."""
    return _spread(_POINTS, scalar, points, processes, report)


def split_points(points: bytes) -> list[bytes]:
    """Cut 32-byte points apart."""
    return [points[k : k + POINT_BYTES] for k in range(0, len(points), POINT_BYTES)]


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


def _on_curve(candidate: bytes) -> bytes:
    while True:
        u = int.from_bytes(candidate, "little") & _BELOW_2_255
        if jacobi(u * (u * (u + _CURVE_A) + 1), _PRIME) == 1:
            return candidate
        candidate = hashlib.blake2b(
            candidate, digest_size=POINT_BYTES, person=b"apfed psi next"
        ).digest()


def _work(job: bytes) -> bytes:
    """Do one job: a letter for what the blocks are, the scalar, the blocks."""
    kind, scalar, blocks = job[:1], job[1 : 1 + POINT_BYTES], job[1 + POINT_BYTES :]
    key = X25519PrivateKey.from_private_bytes(scalar)
    points: Iterable[bytes] = split_points(blocks)
    if kind == _DIGESTS:
        points = map(_on_curve, points)
    return b"".join(key.exchange(X25519PublicKey.from_public_bytes(point)) for point in points)


def _serve_one_job() -> None:
    sys.stdout.buffer.write(_work(sys.stdin.buffer.read()))


def _work_elsewhere(job: bytes) -> bytes:
    """Do one job in an interpreter of its own; secrets pass through pipes, not arguments.

    Not `multiprocessing`: its fresh interpreters import the caller's main script again, which
    breaks every script without a `__main__` guard, and its forks inherit locked threads.
    """
    command = (sys.executable, "-c", f"from {__name__} import _serve_one_job as s; s()")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    # the command is this interpreter and a constant, so there is nothing to inject
    done = subprocess.run(  # noqa: S603
        command, input=job, stdout=subprocess.PIPE, env=environment, check=False
    )
    if done.returncode:
        raise LocalProtocolError(
            f"a helper process for blinding IDs ended with status {done.returncode}; "
            "use processes=1 to work in this process"
        )
    return done.stdout


def _spread(
    kind: bytes,
    scalar: bytes,
    blocks: bytes,
    processes: int | None,
    report: Callable[[int], None] | None,
) -> bytes:
    count = len(blocks) // POINT_BYTES
    if processes is None:
        processes = (os.cpu_count() or 1) if count >= PARALLEL_THRESHOLD else 1
    if processes < 1:
        raise LocalProtocolError(f"processes is at least 1, got {processes}")
    alone = processes == 1 or count < processes
    jobs = max(1 if alone else processes, math.ceil(count / (_HERE if alone else _ELSEWHERE)))
    bounds = [POINT_BYTES * (count * k // jobs) for k in range(jobs + 1)]
    orders = (kind + scalar + blocks[bounds[k] : bounds[k + 1]] for k in range(jobs))
    if alone:
        return b"".join(_counted(map(_work, orders), report))
    with ThreadPoolExecutor(processes) as pool:
        return b"".join(_counted(pool.map(_work_elsewhere, orders), report))


def _counted(results: Iterable[bytes], report: Callable[[int], None] | None) -> Iterator[bytes]:
    done = 0
    for result in results:
        yield result
        done += len(result) // POINT_BYTES
        if report is not None:
            report(done)

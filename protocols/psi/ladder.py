"""Hashing IDs to Curve25519 and multiplying points by a secret scalar, one after the other.

Run by: both roles of `protocols.psi.ecdh`, in their own process and, as a script that
`protocols.psi.workers` starts, in helper interpreters. It imports nothing of this project, so
that these start quickly. Points are 32-byte u-coordinates, held one after the other in one
`bytes`.

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
is seen only by who holds the ID. The multiplication itself takes the same time for all.
"""

import hashlib
import os
import signal
import struct
import sys
from collections.abc import Iterable
from typing import BinaryIO

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

# gmpy2 ships no types; only `mpz(int)` and `jacobi(mpz, mpz) -> int` are used
from gmpy2 import jacobi, mpz  # type: ignore[import-untyped]

__all__ = ["DIGESTS", "LENGTH", "POINTS", "POINT_BYTES", "on_curve", "split_points", "work"]

POINT_BYTES = 32
# The first byte of a job: what its blocks are.
DIGESTS, POINTS = b"D", b"P"
# Before each job that is piped to a helper: how many bytes it has.
LENGTH = struct.Struct(">I")
_PRIME = mpz(2**255 - 19)
_CURVE_A = mpz(486662)
_BELOW_2_255 = 2**255 - 1
_NEXT = hashlib.blake2b(digest_size=POINT_BYTES, person=b"apfed psi next")


def split_points(points: bytes) -> list[bytes]:
    """Cut 32-byte points apart."""
    return [points[k : k + POINT_BYTES] for k in range(0, len(points), POINT_BYTES)]


def on_curve(candidate: bytes) -> bytes:
    """Return 32 bytes that lie on the curve: `candidate` or a hash of it."""
    while True:
        u = mpz(int.from_bytes(candidate, "little") & _BELOW_2_255)
        if jacobi(u * (u * (u + _CURVE_A) + 1), _PRIME) == 1:
            return candidate
        following = _NEXT.copy()
        following.update(candidate)
        candidate = following.digest()


def work(job: bytes) -> bytes:
    """Do one job: a letter for what the blocks are, the scalar, the blocks of 32 bytes.

    Returns as many points: the blocks, hashed to the curve if they are digests, times the
    scalar.
    """
    kind, scalar, blocks = job[:1], job[1 : 1 + POINT_BYTES], job[1 + POINT_BYTES :]
    key = X25519PrivateKey.from_private_bytes(scalar)
    points: Iterable[bytes] = split_points(blocks)
    if kind == DIGESTS:
        points = map(on_curve, points)
    return b"".join(key.exchange(X25519PublicKey.from_public_bytes(point)) for point in points)


def _serve(jobs: BinaryIO, results: BinaryIO) -> None:
    """Do one job after the other until the pipe of jobs is closed, or nobody reads results."""
    while len(head := jobs.read(LENGTH.size)) == LENGTH.size:
        (length,) = LENGTH.unpack(head)
        job = jobs.read(length)
        if len(job) < length:
            return
        results.write(work(job))
        results.flush()


if __name__ == "__main__":
    # Who presses Ctrl-C means the party; when it ends, the pipes close.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _serve(sys.stdin.buffer, sys.stdout.buffer)
    except BrokenPipeError:
        # The party was killed. What is left in the buffer would be written once more at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

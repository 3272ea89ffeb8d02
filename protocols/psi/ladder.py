"""Hashing IDs to Curve25519 and multiplying points by a secret scalar.

Run by: both roles of `protocols.psi.ecdh`, in several threads at once. Points are 32-byte
u-coordinates, held one after the other in one `bytes`.

X25519 (RFC 7748, section 5) computes the u-coordinate of a scalar multiple from a
u-coordinate, so it commutes: X25519(a, X25519(b, u)) = X25519(b, X25519(a, u)). A clamped
scalar is 8 times a number below the order of the large subgroup: blinding is one-to-one
on that subgroup and wipes the low-order part of a hashed point. That blinded points look
random is the decisional Diffie-Hellman assumption, with the hash as a random oracle.

X25519 also accepts any 32 bytes, half of which lie on the curve's twist, and it keeps a
point on its side. Hashing IDs straight to 32 bytes would therefore publish one bit of
each ID's hash, and the count of these bits differs from set to set. So a candidate is
hashed again until u^3 + 486662 u^2 + u is a square, i.e. until it lies on the curve
("try and increment"; two tries on average). The number of tries depends on the ID, and so
does the time that they take, a few microseconds; among the multiplications a peer sees the
sum for the whole set at most. The multiplication itself takes the same time for all.

It is libsodium's, through PyNaCl, which leaves Python's lock to other threads meanwhile;
`cryptography`, as fast in one thread, keeps it.
"""

import hashlib
from collections.abc import Iterable

# gmpy2 ships no types; only `mpz(int)` and `jacobi(mpz, mpz) -> int` are used
from gmpy2 import jacobi, mpz  # type: ignore[import-untyped]
from nacl.bindings import crypto_scalarmult

__all__ = ["POINT_BYTES", "blind", "multiply", "on_curve", "split_points"]

POINT_BYTES = 32
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


def blind(scalar: bytes, digests: bytes) -> bytes:
    """Hash each 32-byte digest to the curve and multiply the point by `scalar`, 32 bytes."""
    return _times(scalar, map(on_curve, split_points(digests)))


def multiply(scalar: bytes, points: bytes) -> bytes:
    """Multiply each point by `scalar`; none may be of low order."""
    return _times(scalar, split_points(points))


def _times(scalar: bytes, points: Iterable[bytes]) -> bytes:
    return b"".join([crypto_scalarmult(scalar, point) for point in points])

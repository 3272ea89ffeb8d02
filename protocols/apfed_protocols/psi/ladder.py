"""Hashing IDs to Curve25519 and multiplying points by a secret scalar.

Run by: both roles of `apfed_protocols.psi.ecdh`, in several threads at once. Points are 32-byte
u-coordinates, held one after the other in one `bytes`.

X25519 (RFC 7748, section 5) computes the u-coordinate of a scalar multiple from a
u-coordinate, so it commutes: X25519(a, X25519(b, u)) = X25519(b, X25519(a, u)). A clamped
scalar is 8 times a number below the order of the large subgroup: blinding is one-to-one
on that subgroup and wipes the low-order part of a hashed point. That blinded points look
random is the decisional Diffie-Hellman assumption, with the hash as a random oracle.

X25519 also accepts any 32 bytes, half of which lie on the curve's twist, and it keeps a
point on its side. Hashing IDs straight to 32 bytes would therefore publish one bit of
each ID's hash, and the count of these bits differs from set to set. So a digest, as a number
r, goes through Elligator 2 (RFC 9380, section 6.7.1): of -A / (1 + 2 r^2) and -A minus that,
exactly one lies on the curve y^2 = u^3 + A u^2 + u with A = 486662, and it is the point.

Half of the curve's u are reached, those with a square -2 u (u + A), each from four numbers: r, -r,
1 / 2r and -1 / 2r. So hashed points are not uniform, but the assumption for uniform points
covers them. For whoever could tell blinded hashes from random points could do so for
uniform points: add to each a random point of low order, which the scalar wipes; throw away
the half that is not reached, which anyone can tell; say that the hash gave one of the four r of
each of the others. Two of n IDs meet in one point with probability below n^2 2^-251.

A multiplication is libsodium's, through PyNaCl: it takes the same time for all points, and
leaves Python's lock to other threads, which `cryptography`, as fast in one thread, keeps. The
arithmetic of Elligator 2 is GMP's, whose time can depend on the numbers; among the
multiplications a peer sees the sum for a whole set at most.
"""

from collections.abc import Iterable
from typing import cast

import numpy as np

# gmpy2 ships no types; used are `mpz(int)`, `invert(mpz, mpz) -> mpz`, `jacobi(mpz, mpz) -> int`
from gmpy2 import invert, jacobi, mpz  # type: ignore[import-untyped]
from nacl.bindings import crypto_scalarmult

__all__ = ["POINT_BYTES", "blind", "multiply", "split_points", "to_curve"]

POINT_BYTES = 32
_PRIME = mpz(2**255 - 19)
_CURVE_A = mpz(486662)
_BELOW_2_255 = mpz(2**255 - 1)


def split_points(points: bytes, size: int = POINT_BYTES) -> list[bytes]:
    """Cut points apart, or items of another size; the last one is whole."""
    return cast(list[bytes], np.frombuffer(points, f"V{size}").tolist())


def to_curve(digests: bytes) -> list[bytes]:
    """Map 32-byte digests, read as numbers below 2^255, to points on the curve.

    Six of them give a point of low order, which libsodium refuses to multiply: 0 and the prime
    give 0, and the four roots of r^2 = -(A + 1) / 2 and of r^2 = -1 / (2 A + 2) give 1.
    """
    fractions = []
    product = mpz(1)
    for digest in split_points(digests):
        r = mpz(int.from_bytes(digest, "little")) & _BELOW_2_255
        below = (2 * r * r + 1) % _PRIME  # never 0: -1/2 is no square
        fractions.append((product, below))
        product = product * below % _PRIME
    # one inversion for all (Montgomery's trick): `left` inverts the product of those to come
    left, points = invert(product, _PRIME), []
    for product, below in reversed(fractions):
        u = -_CURVE_A * (left * product % _PRIME) % _PRIME
        left = left * below % _PRIME
        if jacobi(u * (u * (u + _CURVE_A) + 1), _PRIME) != 1:
            u = (-_CURVE_A - u) % _PRIME
        points.append(int(u).to_bytes(POINT_BYTES, "little"))
    points.reverse()
    return points


def blind(scalar: bytes, digests: bytes) -> bytes:
    """Hash each 32-byte digest to the curve and multiply the point by `scalar`, 32 bytes."""
    return _times(scalar, to_curve(digests))


def multiply(scalar: bytes, points: bytes) -> bytes:
    """Multiply each point by `scalar`; none may be of low order."""
    return _times(scalar, split_points(points))


def _times(scalar: bytes, points: Iterable[bytes]) -> bytes:
    return b"".join([crypto_scalarmult(scalar, point) for point in points])

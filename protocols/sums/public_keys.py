"""Whether a public key looks like one: its polynomials hold about uniform residues.

Run by: a passive, before anything is encrypted under the key that the active sent. Protects from
broken keys, under which a contribution would travel with its noise alone over it: zeros,
constants, repeated residues, residues within a small range, and b = a or b = -a; looked for in the
transformed form that SEAL keeps and in the coefficients, so that sparse and small polynomials are
found, too. From nothing else: a key holder that makes a bad key on purpose can hide it (b = X a
passes, say), or give its secret key away.

Letters: P polynomials, N coefficients of each, modulo a prime q with q = 1 (mod 2N).
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from protocols.errors import RemoteProtocolError

__all__ = ["coefficients", "require_spread"]

Residues = NDArray[np.uint64]

# Of N uniform residues modulo q about N^2 / 2q repeat another one. More than a 16th do with
# probability below 2^-100, for primes of 20 bits or more at any N.
_MOST_REPEATED = 1 / 16
# About a 16th of N uniform residues lies in each 16th of their range. More than an 8th does with
# probability below exp(-N / 39) (Chernoff's bound), 2^-70 from N = 2048 on.
_RANGES, _MOST_IN_ONE = 16, 1 / 8
_HALF_WORD = np.uint64(32)
_LOW_HALF = np.uint64(2**32 - 1)


def require_spread(numbers_2PN: Residues, moduli: Sequence[int], *, sender: str) -> None:
    """Refuse a public key (b, a) whose residues do not spread as uniform ones do.

    Args:
        numbers_2PN: b and a modulo each of P primes.
        moduli: the primes, of at most 60 bits.
        sender: of the key.

    Raises:
        RemoteProtocolError: names what does not spread, or numbers that are no residues.
    """
    for place, modulus in enumerate(moduli):
        transformed_2N = numbers_2PN[:, place]
        if int(transformed_2N.max()) >= modulus:
            raise RemoteProtocolError(
                f"the public key from {sender} holds numbers beyond the modulus"
            )
        for b_N, a_N in (transformed_2N, coefficients(transformed_2N, modulus)):
            for tested_N in (b_N, a_N, b_N + a_N, b_N + (np.uint64(modulus) - a_N)):
                _require_uniform(tested_N % np.uint64(modulus), modulus, sender)


def _require_uniform(residues_N: Residues, modulus: int, sender: str) -> None:
    degree = len(residues_N)
    repeated = degree - len(np.unique(residues_N))
    crowded = int(np.bincount(residues_N // np.uint64(modulus // _RANGES + 1)).max())
    if repeated > degree * _MOST_REPEATED or crowded > degree * _MOST_IN_ONE:
        raise RemoteProtocolError(
            f"the public key from {sender} is no RLWE key: of {degree} residues of a polynomial, "
            f"of the sum or difference of both, {repeated} repeat others, expected next to none; "
            f"{crowded} lie in one {_RANGES}th of the range, expected about "
            f"{degree // _RANGES}; nothing is encrypted under it. {sender} sets up again with a "
            "key of its own library"
        )


def coefficients(transformed_PN: Residues, modulus: int) -> Residues:
    """The coefficients of polynomials that SEAL keeps as values at the odd powers of a root.

    The inverse transform of Longa and Naehrig 2016, algorithm 2. SEAL takes the smallest root of
    order 2N, this any: that changes the places and signs of coefficients, and not their sizes.
    """
    count, degree = transformed_PN.shape
    factors_N, quotients_N = _twiddles(degree, modulus)
    values, blocks, prime = transformed_PN, degree, np.uint64(modulus)
    while blocks > 1:
        blocks //= 2
        pairs = values.reshape(count, blocks, 2, -1)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        factor, quotient = (part[blocks : 2 * blocks, None] for part in (factors_N, quotients_N))
        difference = _times((first + (prime - second)) % prime, factor, quotient, prime)
        values = np.stack([(first + second) % prime, difference], axis=2)
    inverse = pow(degree, -1, modulus)
    scaled = _times(values, *_with_quotients([inverse], modulus), prime)
    return scaled.reshape(count, degree)


def _times(values: Residues, factor: Residues, quotient: Residues, prime: np.uint64) -> Residues:
    """Product modulo a prime of at most 60 bits, in words of 64 (after Shoup).

    `quotient` is floor(2^64 factor / prime). The upper half of its product with a value is taken
    without two carries, which leaves less than four primes to reduce.
    """
    high, low = values >> _HALF_WORD, values & _LOW_HALF
    above, below = quotient >> _HALF_WORD, quotient & _LOW_HALF
    multiple = high * above + (high * below >> _HALF_WORD) + (low * above >> _HALF_WORD)
    product: Residues = (values * factor - multiple * prime) % prime
    return product


@cache
def _twiddles(degree: int, modulus: int) -> tuple[Residues, Residues]:
    """Powers of the inverse of a root of order 2N, in bit-reversed order, with their quotients."""
    bits = degree.bit_length() - 1
    candidates = (pow(base, (modulus - 1) // (2 * degree), modulus) for base in range(2, modulus))
    root = next(found for found in candidates if pow(found, degree, modulus) == modulus - 1)
    inverse = pow(root, -1, modulus)
    places = (int(f"{place:0{bits}b}"[::-1], 2) for place in range(degree))
    return _with_quotients([pow(inverse, place, modulus) for place in places], modulus)


def _with_quotients(factors: Sequence[int], modulus: int) -> tuple[Residues, Residues]:
    quotients = [(factor << 64) // modulus for factor in factors]
    return np.array(factors, dtype=np.uint64), np.array(quotients, dtype=np.uint64)

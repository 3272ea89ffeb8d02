"""What schemes in rings of polynomials share: secure parameters, noise, and a packing that fits.

Run by: every role, from public numbers only, so that all parties find the same answer.
Protects from: parameters below 128-bit security, and sums that wrap around the modulus. What
does not fit is refused with what would.
"""

import math
from collections.abc import Callable
from typing import TypeVar

from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.sums.fixed_point import FixedPoint

__all__ = [
    "MODULUS_MARGIN",
    "SECURE_MODULUS_BITS",
    "densest",
    "fresh_noise",
    "peak",
    "require_secure",
]

SECURE_MODULUS_BITS = {1024: 27, 2048: 54, 4096: 109, 8192: 218, 16384: 438, 32768: 881}
"""Ring degree to the largest modulus at 128-bit classical security, ternary secret.

HomomorphicEncryption.org standard (Albrecht et al. 2018), table 1; SEAL enforces the same.
"""

MODULUS_MARGIN = 1 + 2**-10
"""How far below 2^bits a prime of so many bits may lie."""

_MOST_PRIME_BITS = 60  # of SEAL

Found = TypeVar("Found")


def require_secure(poly_degree: int, primes: tuple[int, ...]) -> None:
    """Raise LocalProtocolError below 128-bit security; it says which degrees would do."""
    least = (2 * poly_degree).bit_length()  # a prime is 1 modulo 2N
    if len(primes) not in (1, 2) or not all(least <= p <= _MOST_PRIME_BITS for p in primes):
        raise LocalProtocolError(
            f"one prime for the data and at most one more, of {least} to {_MOST_PRIME_BITS} bits "
            f"for ring degree {poly_degree}; got {list(primes)}"
        )
    limit = SECURE_MODULUS_BITS.get(poly_degree)
    if limit is None or sum(primes) > limit:
        fits = [str(n) for n, bits in SECURE_MODULUS_BITS.items() if bits >= sum(primes)]
        raise LocalProtocolError(
            f"ring degree {poly_degree} with a modulus of {sum(primes)} bits has less than 128-bit "
            f"security; degrees that fit that modulus: {', '.join(fits) or 'none'}"
        )


def fresh_noise(poly_degree: int, contributors: int) -> float:
    """Standard deviation of one coefficient of the noise in a sum of fresh ciphertexts.

    Each keeps its whole error u e + e0 + e1 * s: u and s ternary, each e of variance 21/2
    (SEAL's centred binomial), so 10.5 (1 + 4N/3) a coefficient. (Cheon et al. 2017, section 3.4.)
    """
    return math.sqrt(contributors * 10.5 * (1 + 4 * poly_degree / 3))


def peak(fixed_point: FixedPoint, fields: int) -> int:
    """The largest magnitude of a sum of packed integers."""
    return fixed_point.limit * (1 + (2**fixed_point.field_bits if fields == 2 else 0))


def densest(
    fixed_point: FixedPoint, fit: Callable[[FixedPoint, int], Found | None], *, prime_bits: int
) -> Found:
    """What `fit` finds for two fields a slot, or else for one.

    Args:
        fixed_point: what is added.
        fit: parameters for integers and fields; None: they do not fit.
        prime_bits: of the largest data prime, for the error.

    Raises:
        LocalProtocolError: nothing fits; says how many bits would.
    """
    for fields in (2, 1):
        found = fit(fixed_point, fields)
        if found is not None:
            return found
    fewer = range(fixed_point.bits - 1, 1, -1)
    would = next((b for b in fewer if fit(fixed_point.with_bits(b), 1) is not None), None)
    raise LocalProtocolError(
        f"sums of {fixed_point.contributors} values of {fixed_point.bits} bits do not fit a data "
        f"prime of {prime_bits} bits; "
        + (f"{would} bits would" if would else "use a larger data prime")
    )

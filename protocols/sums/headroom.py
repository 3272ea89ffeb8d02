"""How much room a slot has: finds parameters and a packing that can never overflow.

Run by: every role, from public numbers only, so that all parties find the same answer.
Protects from: parameters below 128-bit security, sums that wrap around the modulus, and
rounding that could pick the wrong integer. What does not fit is refused with what would.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from protocols.errors import LocalProtocolError
from protocols.sums.fixed_point import FixedPoint, Packing

__all__ = [
    "ROUNDING_TOLERANCE",
    "SECURE_MODULUS_BITS",
    "CkksHeadroom",
    "CoefficientHeadroom",
    "fresh_noise",
    "slot_noise",
    "solve_ckks",
    "solve_coefficients",
]

SECURE_MODULUS_BITS = {1024: 27, 2048: 54, 4096: 109, 8192: 218, 16384: 438, 32768: 881}
"""Ring degree to the largest modulus at 128-bit classical security, ternary secret.

HomomorphicEncryption.org standard (Albrecht et al. 2018), table 1; SEAL enforces the same.
"""

ROUNDING_TOLERANCE = 0.25
"""How far a decrypted slot may lie from an integer: half of what rounding could repair."""

# In standard deviations, each exceeded with probability below 2^-40. A slot of a product of two
# random polynomials is Laplace: exp(-sqrt(2) t). With two such products of equal variance it
# is (1 + t) exp(-2 t). A coefficient is close to Gaussian; there the margin is for free.
_TAIL = 20.0
_FRESH_TAIL = 15.5
_GAUSSIAN_TAIL = 10.0
_MODULUS_MARGIN = 1 + 2**-10
_MAX_SCALE_BITS = 40
_MOST_PRIME_BITS = 60  # of SEAL


@dataclass(frozen=True, kw_only=True)
class CkksHeadroom:
    """Parameters that fit.

    Attributes:
        poly_degree: N, the ring degree; a ciphertext has N / 2 complex slots.
        primes: those used: bits of the data prime, and of the key-switching prime if any.
        scale_bits: log2 of the encoding scale.
        packing: how integers share the slots.
        deviation: bound of a decrypted slot's distance from its integer; less than
            `ROUNDING_TOLERANCE`, exceeded with probability below 2^-40 in one slot.
    """

    poly_degree: int
    primes: tuple[int, ...]
    scale_bits: int
    packing: Packing
    deviation: float


def slot_noise(poly_degree: int, contributors: int) -> float:
    """Standard deviation of a decrypted slot at scale 1.

    A fresh public-key ciphertext is divided by the key-switching prime, which leaves the
    rounding error e0 + e1 * s with e uniform in [-1/2, 1/2] and s ternary: variance
    (1 + 2N/3) / 12 a coefficient. A slot's real part adds N / 2 of them. (Cheon et al.
    2017, section 3.4, with SEAL's encryption; measured 6.8e2 at N = 4096, M = 1.)
    """
    return math.sqrt(contributors * poly_degree / 2 * (1 + 2 * poly_degree / 3) / 12)


def fresh_noise(poly_degree: int, contributors: int) -> float:
    """Standard deviation of a decrypted slot at scale 1 without a key-switching prime.

    The ciphertext keeps its whole error u e + e0 + e1 * s: u and s ternary, each e of
    variance 21/2 (SEAL's centred binomial), so 10.5 (1 + 4N/3) a coefficient. (Cheon et al.
    2017, section 3.4; measured 1.07e4 at N = 4096, M = 1.)
    """
    return math.sqrt(contributors * poly_degree / 2 * 10.5 * (1 + 4 * poly_degree / 3))


def solve_ckks(
    fixed_point: FixedPoint,
    *,
    poly_degree: int = 4096,
    primes: tuple[int, ...] = (60, 49),
) -> CkksHeadroom:
    """Find the densest packing, and for it the fewest primes and the largest scale, that fit.

    Addition needs no key-switching prime. It makes encryption slower and less noisy, so it is
    left out where the noise fits without.

    Args:
        fixed_point: what is added.
        poly_degree: N.
        primes: bits of the data prime and, if there is one to use, the key-switching prime.

    Raises:
        LocalProtocolError: less than 128-bit security, or no packing fits; says what would.
    """
    _require_secure(poly_degree, primes)

    def fit(wanted: FixedPoint, fields: int) -> CkksHeadroom | None:
        chains = dict.fromkeys((primes[:1], primes))
        found = (_fit_ckks(wanted, fields, poly_degree, chain) for chain in chains)
        return next((one for one in found if one is not None), None)

    for fields in (2, 1):
        found = fit(fixed_point, fields)
        if found is not None:
            return found
    raise _does_not_fit(fixed_point, primes, lambda fewer: fit(fewer, 1))


def _require_secure(poly_degree: int, primes: tuple[int, ...]) -> None:
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


def _does_not_fit(
    fixed_point: FixedPoint, primes: tuple[int, ...], fit: Callable[[FixedPoint], object | None]
) -> LocalProtocolError:
    would = [
        bits
        for bits in range(fixed_point.bits - 1, 1, -1)
        if fit(fixed_point.with_bits(bits)) is not None
    ]
    return LocalProtocolError(
        f"sums of {fixed_point.contributors} values of {fixed_point.bits} bits do not fit a data "
        f"prime of {primes[0]} bits; "
        + (f"{would[0]} bits would" if would else "use a larger data prime")
    )


def _peak(fixed_point: FixedPoint, fields: int) -> int:
    """The largest magnitude of a sum of packed integers."""
    return fixed_point.limit * (1 + (2**fixed_point.field_bits if fields == 2 else 0))


def _fit_ckks(
    fixed_point: FixedPoint, fields: int, poly_degree: int, primes: tuple[int, ...]
) -> CkksHeadroom | None:
    width, peak = fixed_point.field_bits, _peak(fixed_point, fields)
    # No coefficient exceeds the largest slot.
    room = 2 ** (primes[0] - 1) / _MODULUS_MARGIN
    scale_bits = min(_MAX_SCALE_BITS, math.floor(math.log2(room / peak)))
    noise = (
        _FRESH_TAIL * fresh_noise(poly_degree, fixed_point.contributors)
        if len(primes) == 1
        else _TAIL * slot_noise(poly_degree, fixed_point.contributors)
    )
    deviation = noise * 2.0**-scale_bits
    if fields * width > 53 or deviation >= ROUNDING_TOLERANCE:
        return None
    return CkksHeadroom(
        poly_degree=poly_degree,
        primes=primes,
        scale_bits=scale_bits,
        packing=Packing(fields=fields, field_bits=width, slots=poly_degree // 2),
        deviation=deviation,
    )


@dataclass(frozen=True, kw_only=True)
class CoefficientHeadroom:
    """Parameters that fit.

    Attributes:
        poly_degree: N, the ring degree and the integers of a ciphertext.
        prime_bits: of the one prime.
        plain_bits: log2 of the plain modulus t: the most that the noise allows, so that most
            numbers modulo t stand for no sum, and a damaged sum shows.
        packing: how integers share the coefficients.
    """

    poly_degree: int
    prime_bits: int
    plain_bits: int
    packing: Packing


def solve_coefficients(
    fixed_point: FixedPoint, *, poly_degree: int, primes: tuple[int, ...]
) -> CoefficientHeadroom:
    """Find the densest packing, and for it the first prime, that fit.

    Args:
        fixed_point: what is added.
        poly_degree: N.
        primes: bits of the one prime, in order of preference.

    Raises:
        LocalProtocolError: less than 128-bit security, or no packing fits; says what would.
    """
    for bits in primes:
        _require_secure(poly_degree, (bits,))

    def fit(wanted: FixedPoint, fields: int) -> CoefficientHeadroom | None:
        found = (_fit_coefficients(wanted, fields, poly_degree, bits) for bits in primes)
        return next((one for one in found if one is not None), None)

    for fields in (2, 1):
        found = fit(fixed_point, fields)
        if found is not None:
            return found
    raise _does_not_fit(fixed_point, primes[-1:], lambda fewer: fit(fewer, 1))


def _fit_coefficients(
    fixed_point: FixedPoint, fields: int, poly_degree: int, bits: int
) -> CoefficientHeadroom | None:
    # Decryption is exact while the noise of a coefficient, rounding of q m / t included
    # (1 or less for each addend), stays below q / 2t. (Fan and Vercauteren 2012, lemma 1.)
    deviation = fresh_noise(poly_degree, fixed_point.contributors) / math.sqrt(poly_degree / 2)
    noise = _GAUSSIAN_TAIL * deviation + fixed_point.contributors
    plain_bits = math.floor(math.log2(2 ** (bits - 1) / _MODULUS_MARGIN / noise))
    width = fixed_point.field_bits
    if 2 * _peak(fixed_point, fields) >= 2**plain_bits or fields * width > 53:
        return None
    return CoefficientHeadroom(
        poly_degree=poly_degree,
        prime_bits=bits,
        plain_bits=plain_bits,
        packing=Packing(fields=fields, field_bits=width, slots=poly_degree),
    )

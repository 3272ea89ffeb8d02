"""CKKS sum: passives encrypt under the active's public key, the aggregator adds ciphertexts.

Run by: the active (holds the only secret key, decrypts only the sum), the passives
(public key), the aggregator (no key at all). Protects from: a curious aggregator, which
sees ciphertexts; a curious active, which sees the sum of all passives and no single
contribution; an active that sends different representations to different passives,
as the aggregator adds only what answers one message. Does not protect from: the active
and the aggregator together, who could decrypt one contribution; M - 1 passives and the
active together; an aggregator that alters the sum, or leaves contributions out of it.

Values are fixed-point integers, two to a slot where they fit, so the decoded sum is the
exact integer sum: rounding removes CKKS's noise, and with it what decryptions of
approximate schemes reveal about the key (Li and Micciancio 2021). Scheme: Cheon, Kim,
Kim and Song 2017, N / 2 real slots, through SEAL's interface in TenSEAL.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import tenseal.sealapi as seal
from numpy.typing import NDArray

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.integers import take_numpy_integers
from apfed_protocols.sums.agreement import SumAgreement
from apfed_protocols.sums.fixed_point import EXACT_FLOAT_BITS, FixedPoint, Packing
from apfed_protocols.sums.headroom import MODULUS_MARGIN, densest, fresh_noise, peak, require_secure
from apfed_protocols.sums.homomorphic import LEAKS_WITHOUT_MASKS, RESTS_ON_THE_KEY, HomomorphicSum
from apfed_protocols.sums.interface import SumLeaks
from apfed_protocols.sums.seal_cipher import ScratchFile, SealCipher

__all__ = [
    "ROUNDING_TOLERANCE",
    "CkksCipher",
    "CkksHeadroom",
    "CkksSum",
    "fresh_slot_noise",
    "nearest_integers",
    "slot_noise",
    "solve_ckks",
]

ROUNDING_TOLERANCE = 0.25
"""How far a decrypted slot may lie from an integer: half of what rounding could repair."""

# In standard deviations, each exceeded with probability below 2^-40. A slot of a product of two
# random polynomials is Laplace: exp(-sqrt(2) t). With two such products of equal variance it
# is (1 + t) exp(-2 t).
_TAIL = 20.0
_FRESH_TAIL = 15.5
_MAX_SCALE_BITS = 40


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


def fresh_slot_noise(poly_degree: int, contributors: int) -> float:
    """The same without a key-switching prime (measured 1.07e4 at N = 4096, M = 1)."""
    return fresh_noise(poly_degree, contributors) * math.sqrt(poly_degree / 2)


def solve_ckks(
    fixed_point: FixedPoint, *, poly_degree: int = 4096, primes: tuple[int, ...] = (60, 49)
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
    require_secure(poly_degree, primes)

    def fit(wanted: FixedPoint, fields: int) -> CkksHeadroom | None:
        chains = dict.fromkeys((primes[:1], primes))
        found = (_fit(wanted, fields, poly_degree, chain) for chain in chains)
        return next((each for each in found if each is not None), None)

    return densest(fixed_point, fit, prime_bits=primes[0])


def _fit(
    fixed_point: FixedPoint, fields: int, poly_degree: int, primes: tuple[int, ...]
) -> CkksHeadroom | None:
    # No coefficient exceeds the largest slot.
    room = 2 ** (primes[0] - 1) / MODULUS_MARGIN
    scale_bits = min(_MAX_SCALE_BITS, math.floor(math.log2(room / peak(fixed_point, fields))))
    noise = (
        _FRESH_TAIL * fresh_slot_noise(poly_degree, fixed_point.contributors)
        if len(primes) == 1
        else _TAIL * slot_noise(poly_degree, fixed_point.contributors)
    )
    deviation, width = noise * 2.0**-scale_bits, fixed_point.field_bits
    if fields * width > EXACT_FLOAT_BITS or deviation >= ROUNDING_TOLERANCE:
        return None
    return CkksHeadroom(
        poly_degree=poly_degree,
        primes=primes,
        scale_bits=scale_bits,
        packing=Packing(fields=fields, field_bits=width, slots=poly_degree // 2),
        deviation=deviation,
    )


class CkksCipher(SealCipher):
    """Real slots at a scale of 2^bits; for the other arguments see `SealCipher`."""

    seal_type = seal.SCHEME_TYPE.CKKS

    def __init__(self, poly_degree: int, primes: tuple[int, ...], bits: int) -> None:
        super().__init__(poly_degree, primes, bits)
        self.slots = poly_degree // 2
        self._encoder = seal.CKKSEncoder(self._seal)

    def _set_more(self, parameters: Any) -> None:
        """The scale belongs to the encoding."""

    def encode(self, numbers_S: NDArray[np.int64], plain: Any, scratch: ScratchFile) -> None:
        self._encoder.encode(numbers_S.astype(np.float64).tolist(), 2.0**self._bits, plain)

    def decode(self, plain: Any, scratch: ScratchFile) -> NDArray[np.float64]:
        return np.array(self._encoder.decode_double(plain), dtype=np.float64)


def nearest_integers(slots: NDArray[np.float64], *, sender: str) -> NDArray[np.int64]:
    """Round away the noise, if it is no larger than honest noise can be.

    Raises:
        RemoteProtocolError: it is larger; the sum came from `sender`.
    """
    nearest = np.rint(slots)
    distance = np.abs(slots - nearest).max()
    if distance >= ROUNDING_TOLERANCE or np.abs(nearest).max() > 2.0**EXACT_FLOAT_BITS:
        raise RemoteProtocolError(
            f"the sum from {sender} does not decrypt to integers; it was altered, or encrypted "
            "under another key or scale"
        )
    return nearest.astype(np.int64)


@dataclass(frozen=True)
class CkksSum(HomomorphicSum):
    """Sum under CKKS with two fixed-point fields a slot.

    Args:
        agreement: what the parties fixed.
        poly_degree: N, the ring degree.
        primes: bits of the data prime and of the key-switching prime, which is left out
            where the noise fits without; their sum is limited by 128-bit security.

    Raises:
        LocalProtocolError: parameters that are insecure or could overflow.
    """

    agreement: SumAgreement
    poly_degree: int = 4096
    primes: tuple[int, int] = (60, 49)
    scheme: ClassVar[str] = "ckks"
    name: ClassVar[str] = "ckks"
    rests_on: ClassVar[str] = RESTS_ON_THE_KEY
    leaks: ClassVar[SumLeaks] = LEAKS_WITHOUT_MASKS

    def __post_init__(self) -> None:
        take_numpy_integers(self)
        _ = self.headroom  # what does not fit is refused here

    @cached_property
    def headroom(self) -> CkksHeadroom:
        """The primes, the scale and the packing that fit."""
        return solve_ckks(self.fixed_point, poly_degree=self.poly_degree, primes=self.primes)

    @cached_property
    def cipher(self) -> CkksCipher:
        found = self.headroom
        return CkksCipher(found.poly_degree, found.primes, found.scale_bits)

    def parameters(self) -> Mapping[str, object]:
        return {**super().parameters(), "scale_bits": self.headroom.scale_bits}

    def integers(self, slots: NDArray[Any]) -> NDArray[np.int64]:
        return nearest_integers(slots, sender=self.agreement.combiner)

"""The CKKS sum in its fast form: one prime and complex slots; the same roles and guarantees.

Run by: the active (holds the only secret key, decrypts only the sum), the passives (public
key), the aggregator (no key at all). Protects from and does not protect from the same as
`ckks`: see there. Against it: half the bytes and a third of the time; the noise is
larger, so 16-bit values fit two to a number for 2 to 8 passives, one beyond.

Scheme: Cheon, Kim, Kim and Song 2017, through SEAL's interface in TenSEAL. The decoded sum is
the exact integer sum.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from protocols.sums.ckks import nearest_integers
from protocols.sums.fixed_point import FixedPoint, Packing
from protocols.sums.headroom import CkksHeadroom, solve_ckks
from protocols.sums.homomorphic import Encrypter, HomomorphicSum
from protocols.sums.interface import SumAgreement
from protocols.sums.seal_scheme import ComplexCkks, SealScheme

__all__ = ["CkksFastSum"]


@dataclass(frozen=True)
class CkksFastSum(HomomorphicSum):
    """Sum under CKKS with one prime and up to four fixed-point fields a complex slot.

    Args:
        agreement: what the parties fixed.
        poly_degree: N, the ring degree.
        prime_bits: of the one prime; limited by 128-bit security and by SEAL's 60.

    Attributes:
        headroom: the scale and the packing that fit these parameters.

    Raises:
        LocalProtocolError: parameters that are insecure or could overflow.
    """

    agreement: SumAgreement
    poly_degree: int = 4096
    prime_bits: int = 60
    headroom: CkksHeadroom = field(init=False, repr=False)
    name: ClassVar[str] = "ckks_fast"

    def __post_init__(self) -> None:
        solved = solve_ckks(
            FixedPoint.of(self.agreement),
            poly_degree=self.poly_degree,
            primes=(self.prime_bits,),
            complex_slots=True,
        )
        object.__setattr__(self, "headroom", solved)

    @property
    def packing(self) -> Packing:
        return self.headroom.packing

    @cached_property
    def scheme(self) -> SealScheme:
        return SealScheme(
            ComplexCkks(self.poly_degree, (self.prime_bits,), self.headroom.scale_bits)
        )

    def contributor(self, me: str) -> Encrypter:
        return Encrypter(self, me)

    def parameters(self) -> Mapping[str, object]:
        return {
            "backend": self.name,
            "poly_degree": self.poly_degree,
            "primes": [self.prime_bits],
            "scale_bits": self.headroom.scale_bits,
            "fields": self.packing.fields,
            "field_bits": self.packing.field_bits,
        }

    def integers(self, slots: NDArray[np.float64]) -> NDArray[np.int64]:
        """Round away the noise, if it is no larger than honest noise can be."""
        return nearest_integers(slots, sender=self.agreement.combiner)

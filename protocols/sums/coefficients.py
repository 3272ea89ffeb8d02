"""What the sums with integers in the coefficients of a ciphertext share: `ckks_fast` and `bfv`.

Run by: every role of both. For sums, in which nothing is multiplied, slots buy nothing: the
integers are the coefficients of the message polynomial, with one prime and a plain modulus
t = 2^k. That is the encryption of CKKS (Cheon et al. 2017, section 3.4) with the message above
the noise and no canonical embedding, and the one of BFV (Fan and Vercauteren 2012), which is the
name under which SEAL offers it. Decryption rounds the noise away exactly.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from protocols.sums.agreement import SumAgreement
from protocols.sums.fixed_point import FixedPoint
from protocols.sums.flavours import Coefficients
from protocols.sums.headroom import CoefficientHeadroom, solve_coefficients
from protocols.sums.homomorphic import HomomorphicSum
from protocols.sums.seal_scheme import SealScheme

__all__ = ["CoefficientSum"]


@dataclass(frozen=True)
class CoefficientSum(HomomorphicSum):
    """Sum with one prime and up to two fixed-point fields a coefficient.

    Args:
        agreement: what the parties fixed.
        poly_degree: N, the ring degree.

    Attributes:
        headroom: the plain modulus, the prime and the packing that fit them.

    Raises:
        LocalProtocolError: parameters that are insecure or could overflow.
    """

    agreement: SumAgreement
    poly_degree: int = 4096
    headroom: CoefficientHeadroom = field(init=False, repr=False)
    primes: ClassVar[tuple[int, ...]]
    """Bits of the one prime, in order of preference."""
    scheme_type: ClassVar[type[SealScheme]] = SealScheme
    """What encrypts."""

    def __post_init__(self) -> None:
        solved = solve_coefficients(
            FixedPoint.of(self.agreement), poly_degree=self.poly_degree, primes=self.primes
        )
        object.__setattr__(self, "headroom", solved)

    @cached_property
    def scheme(self) -> SealScheme:
        found = self.headroom
        flavour = Coefficients(self.poly_degree, (found.prime_bits,), found.plain_bits)
        return self.scheme_type(flavour)

    def parameters(self) -> Mapping[str, object]:
        return {
            "backend": self.name,
            "encoding": "coefficients",
            "poly_degree": self.poly_degree,
            "primes": [self.headroom.prime_bits],
            "plain_bits": self.headroom.plain_bits,
            "fields": self.packing.fields,
            "field_bits": self.packing.field_bits,
        }

    def integers(self, slots: NDArray[Any]) -> NDArray[np.int64]:
        """Decryption is exact: they are integers already."""
        return slots.astype(np.int64, copy=False)

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
Kim and Song 2017, through SEAL's interface in TenSEAL.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from protocols.errors import RemoteProtocolError
from protocols.sums.agreement import SumAgreement
from protocols.sums.fixed_point import FixedPoint
from protocols.sums.flavours import Ckks
from protocols.sums.headroom import ROUNDING_TOLERANCE, CkksHeadroom, solve_ckks
from protocols.sums.homomorphic import HomomorphicSum
from protocols.sums.seal_scheme import SealScheme

__all__ = ["CkksSum", "nearest_integers"]


@dataclass(frozen=True)
class CkksSum(HomomorphicSum):
    """Sum under CKKS with two fixed-point fields a slot.

    Args:
        agreement: what the parties fixed.
        poly_degree: N, the ring degree.
        primes: bits of the data prime and of the key-switching prime, which is left out
            where the noise fits without; their sum is limited by 128-bit security.

    Attributes:
        headroom: the primes, the scale and the packing that fit.

    Raises:
        LocalProtocolError: parameters that are insecure or could overflow.
    """

    agreement: SumAgreement
    poly_degree: int = 4096
    primes: tuple[int, int] = (60, 49)
    headroom: CkksHeadroom = field(init=False, repr=False)
    name: ClassVar[str] = "ckks"

    def __post_init__(self) -> None:
        solved = solve_ckks(
            FixedPoint.of(self.agreement), poly_degree=self.poly_degree, primes=self.primes
        )
        object.__setattr__(self, "headroom", solved)

    @cached_property
    def scheme(self) -> SealScheme:
        return SealScheme(Ckks(self.poly_degree, self.headroom.primes, self.headroom.scale_bits))

    def parameters(self) -> Mapping[str, object]:
        return {
            "backend": self.name,
            "poly_degree": self.poly_degree,
            "primes": list(self.headroom.primes),
            "scale_bits": self.headroom.scale_bits,
            "fields": self.packing.fields,
            "field_bits": self.packing.field_bits,
        }

    def integers(self, slots: NDArray[np.float64]) -> NDArray[np.int64]:
        return nearest_integers(slots, sender=self.agreement.combiner)


def nearest_integers(slots: NDArray[np.float64], *, sender: str) -> NDArray[np.int64]:
    """Round away the noise, if it is no larger than honest noise can be.

    Raises:
        RemoteProtocolError: it is larger; the sum came from `sender`.
    """
    nearest = np.rint(slots)
    distance = np.abs(slots - nearest).max()
    if distance >= ROUNDING_TOLERANCE or np.abs(nearest).max() > 2.0**53:
        raise RemoteProtocolError(
            f"the sum from {sender} does not decrypt to integers; it was altered, or encrypted "
            "under another key or scale"
        )
    return nearest.astype(np.int64)

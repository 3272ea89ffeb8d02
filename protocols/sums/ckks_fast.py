"""The fast form of the `ckks` sum: integers in coefficients instead of slots; the same roles.

Run by: the active (holds the only secret key, decrypts only the sum), the passives (public
key), the aggregator (no key at all). Protects from and does not protect from the same as
`ckks`: see there. Against it: half the bytes and a third of the time. What is encrypted, and why
SEAL calls it BFV, says `coefficients`; how, `bulk_scheme`. Without masks: see `bfv` for them.
The decoded sum is the exact integer sum.
"""

from dataclasses import dataclass
from typing import ClassVar

from protocols.sums.bulk_scheme import BulkScheme
from protocols.sums.coefficients import CoefficientSum
from protocols.sums.seal_scheme import SealScheme

__all__ = ["CkksFastSum"]


@dataclass(frozen=True)
class CkksFastSum(CoefficientSum):
    """Sum under one prime of 60 bits, whose residues nothing can compress: they are quickest."""

    name: ClassVar[str] = "ckks_fast"
    primes: ClassVar[tuple[int, ...]] = (60,)
    scheme_type: ClassVar[type[SealScheme]] = BulkScheme

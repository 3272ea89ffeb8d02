"""BFV sum: exact, and under the encryption masked pairwise, so that no single key opens it.

Run by: the active (holds the only secret key, decrypts only the sum), the passives (public
key, one seed with each other passive), the aggregator (no key at all). Protects from: a
curious aggregator; a curious active; both together, as long as two passives are honest
(a decrypted contribution is uniform modulo t); an active that sends different
representations to different passives, which gets uniform noise. Does not protect from:
M - 1 passives and the active together; a passive that falls silent (the step then has no
sum); an aggregator that adds a constant to the sum.

Schemes: Brakerski 2012, Fan and Vercauteren 2012, through SEAL's
interface in TenSEAL, with one prime; masks as in `pairwise`,
modulo the plain modulus t. The decoded sum is the integer sum.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from protocols.conversation import Outgoing
from protocols.sums.fixed_point import FixedPoint, Packing
from protocols.sums.headroom import BfvHeadroom, solve_bfv
from protocols.sums.homomorphic import Encrypter, HomomorphicSum
from protocols.sums.interface import StepBinding, SumAgreement
from protocols.sums.pairwise import MASK_STREAM_BYTES, PairwiseSeeds, add_masks
from protocols.sums.seal_scheme import Bfv, SealScheme

__all__ = ["BfvContributor", "BfvSum"]


@dataclass(frozen=True)
class BfvSum(HomomorphicSum):
    """Sum under BFV with two fixed-point fields a slot and masks modulo t.

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
    headroom: BfvHeadroom = field(init=False, repr=False)
    name: ClassVar[str] = "bfv"

    def __post_init__(self) -> None:
        solved = solve_bfv(FixedPoint.of(self.agreement), poly_degree=self.poly_degree)
        object.__setattr__(self, "headroom", solved)

    @property
    def packing(self) -> Packing:
        return self.headroom.packing

    @cached_property
    def scheme(self) -> SealScheme:
        found = self.headroom
        return SealScheme(Bfv(self.poly_degree, (found.prime_bits,), found.plain_modulus))

    def contributor(self, me: str) -> "BfvContributor":
        return BfvContributor(self, me)

    def parameters(self) -> Mapping[str, object]:
        return {
            "backend": self.name,
            "poly_degree": self.poly_degree,
            "primes": [self.headroom.prime_bits],
            "plain_modulus": self.headroom.plain_modulus,
            "fields": self.packing.fields,
            "field_bits": self.packing.field_bits,
        }

    def integers(self, slots: NDArray[np.float64]) -> NDArray[np.int64]:
        """Decryption is exact; slots below 2^42 are integers in float64."""
        return slots.astype(np.int64)


class BfvContributor(Encrypter):
    """A passive's end: masks the slots, then encrypts them."""

    def __init__(self, bfv: BfvSum, me: str) -> None:
        super().__init__(bfv, me)
        self._modulus = bfv.headroom.plain_modulus
        self._contributors = bfv.agreement.contributors
        others = [name for name in self._contributors if name != me]
        self._seeds = PairwiseSeeds(me, others, bfv.frames(b""))

    def start(self) -> Sequence[Outgoing]:
        """Send this party's mask key to every other passive."""
        return self._seeds.start()

    def receive(self, sender: str, body: bytes) -> Sequence[Outgoing]:
        """Take the active's public key, or another passive's mask key."""
        if sender == self._sum.agreement.receiver:
            return super().receive(sender, body)
        return self._seeds.receive(sender, body)

    @property
    def finished(self) -> bool:
        return super().finished and self._seeds.finished

    def _masked(self, slots_VS: NDArray[np.int64], binding: StepBinding) -> NDArray[np.int64]:
        """Add the pairwise masks modulo t; the result lies in [-t/2, t/2)."""
        self._seeds.require_finished()
        mine = self._contributors.index(self.me)
        shape, length = slots_VS.shape, MASK_STREAM_BYTES * slots_VS.size
        # The earlier of two passives adds what the later one subtracts.
        streams = (
            (1 if mine < position else -1, self._seeds.stream(peer, binding, shape, length))
            for position, peer in enumerate(self._contributors)
            if position != mine
        )
        return add_masks(slots_VS, self._modulus, streams)

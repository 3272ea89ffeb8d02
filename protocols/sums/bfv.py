"""BFV sum: exact, and under the encryption masked pairwise, so that no single key opens it.

Run by: the active (holds the only secret key, decrypts only the sum), the passives (public
key, one seed with each other passive), the aggregator (no key at all). Protects from: a
curious aggregator; a curious active; both together, as long as two passives are honest
(a decrypted contribution is uniform modulo t); an active that sends different
representations to different passives, which gets uniform noise. Does not protect from:
M - 1 passives and the active together; a passive that falls silent (the step then has no
sum); an aggregator that adds a constant to the sum.

Schemes: Brakerski 2012, Fan and Vercauteren 2012, through SEAL's interface in TenSEAL, with one
prime (see `coefficients`); masks as in `pairwise`, modulo the plain modulus t = 2^k. The
decoded sum is the integer sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from protocols.conversation import Outgoing
from protocols.sums.agreed_frames import AgreedFrames
from protocols.sums.agreement import StepBinding
from protocols.sums.coefficients import CoefficientSum
from protocols.sums.homomorphic import Encrypter
from protocols.sums.pairwise import PairwiseSeeds
from protocols.sums.seal_scheme import SealContext
from protocols.sums.zeros import ZeroPool

__all__ = ["BfvContributor", "BfvSum"]


@dataclass(frozen=True)
class BfvSum(CoefficientSum):
    """Sum under the smallest prime that leaves room for the masks to show what is wrong."""

    name: ClassVar[str] = "bfv"
    primes: ClassVar[tuple[int, ...]] = (56, 57, 58, 59, 60)

    def contributor(self, me: str) -> "BfvContributor":
        return BfvContributor(self, me)


class BfvContributor(Encrypter):
    """A passive's end: masks the coefficients, then encrypts them."""

    def __init__(self, bfv: BfvSum, me: str) -> None:
        super().__init__(bfv, me)
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

    def _ready(self) -> tuple[SealContext, AgreedFrames, ZeroPool]:
        ready = super()._ready()
        self._seeds.require_finished()
        return ready

    def _masked(self, slots_VS: NDArray[np.int64], binding: StepBinding) -> NDArray[np.int64]:
        """Add the pairwise masks; only the lowest k bits of the result count."""
        mine = self._contributors.index(self.me)
        words_VS = slots_VS.view(np.uint64)
        for position, peer in enumerate(self._contributors):
            if position != mine:
                # The earlier of two passives adds what the later one subtracts.
                self._seeds.add_stream(peer, binding, words_VS, sign=1 if mine < position else -1)
        return slots_VS

"""Plain integers under pairwise masks: a sum in Z_2^32 without any encryption.

Run by: all three roles. Protects from: a curious aggregator and a curious active, also
together (they learn the sum of the honest passives, no single contribution), as long as
two passives are honest; a curious aggregator alone does not learn the sum either, for
each passive adds one more mask that it shares with the active. An active that sends
different representations to different passives gets uniform noise. Does not protect
from: M - 1 passives and the active together; a passive that falls silent (the step then
has no sum); an aggregator that adds a constant to the sum.

After Bonawitz et al. 2017, section 4.1, without the recovery of dropped parties; the mask
shared with the active is ours. Nothing here is approximate: the decoded sum is the
integer sum.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.integers import take_numpy_integers
from apfed_protocols.sums.agreement import StepBinding, SumAgreement
from apfed_protocols.sums.frames import Frame, frame_bytes
from apfed_protocols.sums.interface import (
    ALTERED_SUM,
    FloatArray,
    IntArray,
    Reading,
    SumCombiner,
    SumContributor,
    SumLeaks,
    spelled,
)
from apfed_protocols.sums.masks import Elements, PairwiseSeeds
from apfed_protocols.sums.roles import (
    DescribedSum,
    OneRefusalReceiver,
    OneRoundCombiner,
    OneRoundContributor,
)

__all__ = ["MaskedContributor", "MaskedReceiver", "MaskedSum"]

Word = np.dtype[np.unsignedinteger[Any]]
_RINGS: Mapping[int, Word] = {32: np.dtype("<u4"), 64: np.dtype("<u8")}


@dataclass(frozen=True)
class MaskedSum(DescribedSum):
    """Sum of masked integers modulo 2^ring_bits.

    Args:
        agreement: what the parties fixed.
        ring_bits: 32 or 64.

    Raises:
        LocalProtocolError: a ring that the sum could leave.
    """

    agreement: SumAgreement
    ring_bits: int = 32
    scheme: ClassVar[str] = "plain"
    masks: ClassVar[str] = "pairwise"
    name: ClassVar[str] = spelled(scheme, masks)
    rests_on: ClassVar[str] = (
        "X25519 and AES-256 being hard to break, and two passives who tell their seeds to nobody"
    )
    leaks: ClassVar[SumLeaks] = SumLeaks(
        contribution=Reading(
            reads="One masked vector of each passive and step, as good as random: its size and "
            "time.",
            protects="Masks that the passives share in pairs, and one more that each shares with "
            "the active. They cancel only if all answer the same message.",
            remains="Who takes part, and when. It can alter the sum without being noticed.",
        ),
        active_and_aggregator="The sum only: the masks among the passives remain.",
        altered=ALTERED_SUM,
    )

    def __post_init__(self) -> None:
        take_numpy_integers(self)
        if self.ring_bits not in _RINGS:
            raise LocalProtocolError(f"ring_bits is 32 or 64, got {self.ring_bits}")
        if self.fixed_point.field_bits > self.ring_bits:
            raise LocalProtocolError(
                f"sums of {len(self.agreement.contributors)} values of {self.agreement.bits} bits "
                f"need {self.fixed_point.field_bits} bits, the ring has {self.ring_bits}; use "
                "ring_bits 64 or fewer bits"
            )

    @property
    def word(self) -> Word:
        """The type of a ring element on the wire."""
        return _RINGS[self.ring_bits]

    def receiver(self) -> "MaskedReceiver":
        return MaskedReceiver(self)

    def contributor(self, me: str) -> SumContributor:
        return MaskedContributor(self, me)

    def combiner(self) -> SumCombiner:
        return OneRoundCombiner(self.frames(), self.add)

    def contribution_bytes(self, shape: tuple[int, int]) -> int:
        return frame_bytes((shape[0] * shape[1] * self.word.itemsize,))

    def parameters(self) -> Mapping[str, object]:
        return {**super().parameters(), "ring_bits": self.ring_bits}

    def numbers(self, values_BD: FloatArray, noise_BD: IntArray | None) -> Elements:
        # Of 32 bits, since adding them may wrap around: the ring is at least as wide.
        narrow_BD = self.fixed_point.quantise(values_BD, noise_BD, np.int32)
        fits = narrow_BD.dtype.itemsize == self.word.itemsize
        return narrow_BD.view(self.word) if fits else narrow_BD.astype(self.word)

    def add(self, frames: Sequence[Frame]) -> Sequence[bytes]:
        for frame in frames:
            frame.require_blobs(self.agreement.contributors[frame.party], 1)
        return (self.added(frames).tobytes(),)

    def added(self, frames: Sequence[Frame]) -> Elements:
        """The sum in the ring of what contributions carry in their first blobs."""
        names = self.agreement.contributors
        first, *others = (self.elements(frame, names[frame.party]) for frame in frames)
        total = first.copy()
        for addend in others:
            total += addend
        return total

    def elements(self, frame: Frame, sender: str) -> Elements:
        """The ring elements in the first blob of a frame, which stays as it is.

        Raises:
            RemoteProtocolError: there are none, or not as many as the frame's shape says.
        """
        expected = frame.rows * frame.columns * self.word.itemsize
        if not expected or not frame.blobs or len(frame.blobs[0]) != expected:
            raise RemoteProtocolError(
                f"{sender} announced {frame.rows}x{frame.columns} values and sent other bytes"
            )
        return np.frombuffer(frame.blobs[0], dtype=self.word).reshape(frame.shape)


class MaskedContributor(OneRoundContributor):
    """A passive's end; shares a seed with every other passive and with the active."""

    def __init__(self, masked: MaskedSum, me: str) -> None:
        agreement, frames = masked.agreement, masked.frames()
        others = [name for name in agreement.contributors if name != me]
        self._seeds = PairwiseSeeds(me, (*others, agreement.receiver), frames)
        super().__init__(masked, me, frames, self._seeds)

    def _require_setup(self) -> None:
        self._seeds.require_finished()

    def _protect(self, numbers_BD: NDArray[Any], binding: StepBinding) -> Sequence[bytes]:
        self._seeds.add_cancelling(binding, numbers_BD)
        self._seeds.add_stream(self._sum.agreement.receiver, binding, numbers_BD, sign=1)
        return (numbers_BD.tobytes(),)


class MaskedReceiver(OneRefusalReceiver):
    """The active's end: takes off the masks that it shares with each passive."""

    _sum: MaskedSum

    def __init__(self, masked: MaskedSum) -> None:
        agreement, frames = masked.agreement, masked.frames()
        self._seeds = PairwiseSeeds(agreement.receiver, agreement.contributors, frames)
        super().__init__(masked, frames, self._seeds)

    def _open(self, frame: Frame, binding: StepBinding) -> FloatArray:
        self._seeds.require_finished()
        total_BD = self._sum.elements(frame, self._sum.agreement.combiner).copy()
        for peer in self._counted(frame):
            self._seeds.add_stream(peer, binding, total_BD, sign=-1)
        return self._dequantised(total_BD.view(np.dtype(f"<i{self._sum.word.itemsize}")), binding)

    def _counted(self, frame: Frame) -> Sequence[str]:
        """Whose contributions a sum holds."""
        frame.require_blobs(self._sum.agreement.combiner, 1)
        return self._sum.agreement.contributors

    def _forget(self) -> None:
        self._seeds.forget()

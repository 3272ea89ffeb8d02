"""Masked sum: fixed-point integers in Z_2^32 under pairwise masks that cancel in the sum.

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
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from protocols.conversation import Outgoing
from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.sums.agreed_frames import AgreedFrames, fingerprint
from protocols.sums.agreement import StepBinding, SumAgreement
from protocols.sums.fixed_point import FixedPoint
from protocols.sums.frame import Frame, frame_bytes
from protocols.sums.interface import FloatArray, IntArray
from protocols.sums.pairwise import PairwiseSeeds
from protocols.sums.roles import (
    NoSetup,
    OneRefusalReceiver,
    OneRoundCombiner,
    OneRoundContributor,
)

__all__ = [
    "Elements",
    "MaskedCombiner",
    "MaskedContributor",
    "MaskedReceiver",
    "MaskedSum",
    "elements",
    "require_blobs",
]

Word = np.dtype[np.unsignedinteger[Any]]
Elements = NDArray[np.unsignedinteger[Any]]
_RINGS: Mapping[int, Word] = {32: np.dtype("<u4"), 64: np.dtype("<u8")}


@dataclass(frozen=True)
class MaskedSum:
    """Sum of masked integers modulo 2^ring_bits.

    Args:
        agreement: what the parties fixed.
        ring_bits: 32 or 64.

    Raises:
        LocalProtocolError: a ring that the sum could leave.
    """

    agreement: SumAgreement
    ring_bits: int = 32
    name: ClassVar[str] = "masked"
    unsafe: ClassVar[bool] = False
    rounds: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.ring_bits not in _RINGS:
            raise LocalProtocolError(f"ring_bits is 32 or 64, got {self.ring_bits}")
        if self.fixed_point.field_bits > self.ring_bits:
            raise LocalProtocolError(
                f"sums of {len(self.agreement.contributors)} values of {self.agreement.bits} bits "
                f"need {self.fixed_point.field_bits} bits, the ring has {self.ring_bits}; use "
                "ring_bits 64 or fewer bits"
            )

    @cached_property
    def fixed_point(self) -> FixedPoint:
        """The shared quantiser."""
        return FixedPoint.of(self.agreement)

    @property
    def word(self) -> Word:
        """The type of a ring element on the wire."""
        return _RINGS[self.ring_bits]

    def added(self, frames: Sequence[Frame]) -> Elements:
        """The sum in the ring of what contributions carry, flat.

        Raises:
            RemoteProtocolError: one does not carry as many elements as its shape says.
        """
        names = self.agreement.contributors
        addends = [elements(frame, names[frame.party], self.word) for frame in frames]
        total = addends[0] + addends[1] if len(addends) > 1 else addends[0].copy()
        for addend in addends[2:]:
            total += addend
        return total

    def receiver(self) -> "MaskedReceiver":
        return MaskedReceiver(self)

    def contributor(self, me: str) -> "MaskedContributor":
        return MaskedContributor(self, me)

    def combiner(self) -> "MaskedCombiner":
        return MaskedCombiner(self)

    def contribution_bytes(self, shape: tuple[int, int]) -> int:
        return frame_bytes((shape[0] * shape[1] * self.word.itemsize,))

    def rounding(self) -> float:
        return self.fixed_point.rounding

    def parameters(self) -> Mapping[str, object]:
        return {"backend": self.name, "ring_bits": self.ring_bits}

    def frames(self) -> AgreedFrames:
        """One role's writer and checker of frames."""
        mark = fingerprint(self.agreement, self.parameters())
        return AgreedFrames(self.agreement, self.name, mark)


class MaskedContributor(PairwiseSeeds, OneRoundContributor):
    """A passive's end; shares a seed with every other passive and with the active."""

    def __init__(self, masked: MaskedSum, me: str) -> None:
        agreement = masked.agreement
        self._masked = masked
        self._position = agreement.position(me)
        others = [name for name in agreement.contributors if name != me]
        super().__init__(me, (*others, agreement.receiver), masked.frames())

    def contribute(
        self, values_BD: FloatArray, binding: StepBinding, noise_BD: IntArray | None = None
    ) -> bytes:
        """See `SumContributor`."""
        agreement, word = self._masked.agreement, self._masked.word
        narrow_BD = self._masked.fixed_point.quantise_narrow(values_BD, noise_BD)
        fits = narrow_BD.dtype.itemsize == word.itemsize
        total_BD = narrow_BD.view(word) if fits else narrow_BD.astype(word)
        rows, columns = values_BD.shape
        self.require_finished()
        self._frames.begin_step(binding)
        for position, peer in enumerate(agreement.contributors):
            if position != self._position:
                # The earlier of two passives adds what the later one subtracts.
                self.add_stream(
                    peer, binding, total_BD, sign=1 if self._position < position else -1
                )
        self.add_stream(agreement.receiver, binding, total_BD, sign=1)
        return self._frames.contribution(self.me, binding, (rows, columns), (total_BD.tobytes(),))


class MaskedCombiner(NoSetup, OneRoundCombiner):
    """The aggregator's end: adds uniform numbers."""

    def __init__(self, masked: MaskedSum) -> None:
        self._masked = masked
        self._frames = masked.frames()

    def combine(self, bodies: Mapping[str, bytes], binding_digest: bytes | None = None) -> bytes:
        """See `SumCombiner`."""
        frames = self._frames.open_contributions(bodies, binding_digest)
        for frame in frames:
            require_blobs(frame, self._masked.agreement.contributors[frame.party], 1)
        total = self._masked.added(frames)
        return self._frames.sum_of(frames, (total.tobytes(),))


class MaskedReceiver(PairwiseSeeds, OneRefusalReceiver):
    """The active's end: takes off the masks that it shares with each passive."""

    def __init__(self, masked: MaskedSum) -> None:
        OneRefusalReceiver.__init__(self)
        agreement = masked.agreement
        self._masked = masked
        super().__init__(agreement.receiver, agreement.contributors, masked.frames())

    def start(self) -> Sequence[Outgoing]:
        self._require_no_refusal()
        return super().start()

    def _open(self, frame: Frame, binding: StepBinding) -> NDArray[np.float64]:
        masked, sender = self._masked, self._masked.agreement.combiner
        shape = frame.rows, frame.columns
        self.require_finished()
        total = elements(frame, sender, masked.word).reshape(shape).copy()
        for peer in self._counted(frame):
            self.add_stream(peer, binding, total, sign=-1)
        signed = total.view(np.dtype(f"<i{masked.word.itemsize}"))
        limit = masked.fixed_point.limit
        if not -limit <= signed.min() <= signed.max() <= limit:
            raise RemoteProtocolError(
                f"the sum of step {binding.step} from {sender} lies beyond the range of its "
                "contributions; it was altered, or the passives answered different messages"
            )
        return masked.fixed_point.dequantise(signed)

    def _counted(self, frame: Frame) -> Sequence[str]:
        """Whose contributions a sum holds."""
        require_blobs(frame, self._masked.agreement.combiner, 1)
        return self._masked.agreement.contributors


def require_blobs(frame: Frame, sender: str, count: int) -> None:
    """Raise RemoteProtocolError unless the frame has `count` blobs."""
    if len(frame.blobs) != count:
        raise RemoteProtocolError(
            f"{sender} sent {len(frame.blobs)} parts in {frame.kind.told}, expected {count}"
        )


def elements(frame: Frame, sender: str, word: Word) -> Elements:
    """The ring elements in the first blob of a frame.

    Raises:
        RemoteProtocolError: there are none, or not as many as the frame's shape says.
    """
    expected = frame.rows * frame.columns * word.itemsize
    if not expected or not frame.blobs or len(frame.blobs[0]) != expected:
        raise RemoteProtocolError(
            f"{sender} announced {frame.rows}x{frame.columns} values and sent other bytes"
        )
    return np.frombuffer(frame.blobs[0], dtype=word)

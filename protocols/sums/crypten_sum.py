"""Sum of additive shares in Z_2^64, added by CrypTen's ArithmeticSharedTensor.

Run by: all three roles, in two rounds. Protects from: a curious aggregator and a curious
active, also together (they learn the sum of the honest passives, no single contribution), as
long as two passives are honest; the aggregator alone learns nothing, not even the sum. An
active that sends different representations to different passives gets no sum: a share
answers one message only. Does not protect from: M - 1 passives and the active together;
a passive that falls silent (the step then has no sum); a passive that adds another number than
its own.

1. Each passive splits its fixed-point integers into M shares, of which M - 1 are streams under
   fresh keys, and sends every other passive its share's key, sealed (`step_seals`).
2. The aggregator relays. Each passive adds its M shares with CrypTen and sends its share of the
   sum, sealed for the active.
3. The aggregator puts these M together without opening them; the active opens and adds them.

CrypTen's encoder cuts off and overflows without a word, and its `reveal(dst=)` leaves plaintext
at other parties, so neither is used: integers go in, and shares are gathered. Nothing is
approximate: the decoded sum is the integer sum.

Additive sharing: Knott et al., CrypTen, NeurIPS 2021, section 3.1 (Z_2^64); keys in place of
long uniform shares: Cramer, Damgard and Ishai, TCC 2005.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from protocols.conversation import Outgoing
from protocols.crypten.ring import Shares, add_shares, complete, draw_share, total
from protocols.crypten.shim import load_crypten
from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.randomness import KEY_BYTES, derive_key, fresh_key
from protocols.sums.agreed_frames import fingerprint
from protocols.sums.agreement import StepBinding, SumAgreement
from protocols.sums.fixed_point import FixedPoint
from protocols.sums.frame import Frame, frame_bytes
from protocols.sums.interface import FloatArray, IntArray
from protocols.sums.roles import NoSetup, OneRefusalReceiver
from protocols.sums.rounds import TwoRoundFrames
from protocols.sums.step_seals import SEAL_OVERHEAD_BYTES, StepSeals

__all__ = ["CryptenCombiner", "CryptenContributor", "CryptenReceiver", "CryptenSum"]

_WORD = np.dtype("<u8")


@dataclass(frozen=True)
class CryptenSum:
    """Sum of additive shares.

    Args:
        agreement: what the parties fixed.

    Raises:
        LocalProtocolError: CrypTen, an optional extra, is not installed.
    """

    agreement: SumAgreement
    name: ClassVar[str] = "crypten"
    unsafe: ClassVar[bool] = False
    rounds: ClassVar[int] = 2

    def __post_init__(self) -> None:
        load_crypten()

    @cached_property
    def fixed_point(self) -> FixedPoint:
        """The shared quantiser; what an agreement allows at most is far below 2^63."""
        return FixedPoint.of(self.agreement)

    def receiver(self) -> "CryptenReceiver":
        return CryptenReceiver(self)

    def contributor(self, me: str) -> "CryptenContributor":
        return CryptenContributor(self, me)

    def combiner(self) -> "CryptenCombiner":
        return CryptenCombiner(self)

    def contribution_bytes(self, shape: tuple[int, int]) -> int:
        """Forecast the bytes of the first round; those of the second are `answer_bytes`."""
        del shape
        sealed = KEY_BYTES + SEAL_OVERHEAD_BYTES
        return frame_bytes((sealed,) * (len(self.agreement.contributors) - 1))

    def answer_bytes(self, shape: tuple[int, int]) -> int:
        """Forecast the bytes of one answer, which carries a share of every value."""
        return frame_bytes((shape[0] * shape[1] * _WORD.itemsize + SEAL_OVERHEAD_BYTES,))

    def rounding(self) -> float:
        return self.fixed_point.rounding

    def parameters(self) -> Mapping[str, object]:
        return {"backend": self.name, "ring_bits": 64}

    def frames(self) -> TwoRoundFrames:
        """One role's writer and checker of frames."""
        mark = fingerprint(self.agreement, self.parameters())
        return TwoRoundFrames(self.agreement, self.name, mark)


class CryptenContributor(StepSeals):
    """A passive's end."""

    def __init__(self, described: CryptenSum, me: str) -> None:
        agreement = described.agreement
        agreement.position(me)
        self._sum, self._two_rounds = described, described.frames()
        self._others = tuple(name for name in agreement.contributors if name != me)
        self._secret = fresh_key()
        self._own: tuple[StepBinding, Shares] | None = None
        super().__init__(me, (*self._others, agreement.receiver), self._two_rounds)

    def contribute(
        self, values_BD: FloatArray, binding: StepBinding, noise_BD: IntArray | None = None
    ) -> bytes:
        """See `SumContributor`: the keys of the others' shares, each sealed for its holder."""
        integers_BD = self._sum.fixed_point.quantise(values_BD, noise_BD)
        rows, columns = values_BD.shape
        self.require_finished()
        self._frames.begin_step(binding)
        keys = {
            peer: derive_key(self._secret, b"share of", binding.digest, peer.encode())
            for peer in self._others
        }
        drawn = [draw_share(key, (rows, columns)) for key in keys.values()]
        self._own = binding, complete(integers_BD, drawn)
        sealed = [self.seal(peer, binding, (rows, columns), key) for peer, key in keys.items()]
        return self._frames.contribution(self.me, binding, (rows, columns), sealed)

    def answer(self, request: bytes) -> bytes:
        """See `SumContributor`: this party's share of the sum, sealed for the active."""
        frame = self._two_rounds.open_request(request, self.me)
        agreement, shape = self._sum.agreement, (frame.rows, frame.columns)
        if len(frame.blobs) != len(self._others):
            raise RemoteProtocolError(
                f"{agreement.combiner} relays {len(frame.blobs)} shares to {self.me}, who expects "
                f"one of each of {', '.join(self._others) or 'nobody'}"
            )
        if self._own is None:
            raise LocalProtocolError(f"{self.me} has no share of step {frame.step}")
        binding, own = self._own
        received = [
            self._received(peer, self.open(peer, binding, shape, sealed), shape)
            for peer, sealed in zip(self._others, frame.blobs, strict=True)
        ]
        self._own = None
        summed = add_shares([own, *received]).tobytes()
        sealed = self.seal(agreement.receiver, binding, shape, summed)
        return self._two_rounds.answer(self.me, (sealed,))

    @staticmethod
    def _received(peer: str, key: bytes, shape: tuple[int, int]) -> Shares:
        if len(key) != KEY_BYTES:
            raise RemoteProtocolError(f"{peer} sealed {len(key)} bytes, expected a key")
        return draw_share(key, shape)


class CryptenCombiner(NoSetup):
    """The aggregator's end: relays what it cannot open."""

    def __init__(self, described: CryptenSum) -> None:
        self._sum = described
        self._frames = described.frames()

    def ask(
        self, contributions: Mapping[str, bytes], binding_digest: bytes | None = None
    ) -> Mapping[str, bytes]:
        """See `SumCombiner`: gives each passive what the others sealed for it."""
        frames = self._frames.open_contributions(contributions, binding_digest)
        names = self._sum.agreement.contributors
        for name, frame in zip(names, frames, strict=True):
            if len(frame.blobs) != len(names) - 1:
                raise RemoteProtocolError(
                    f"{name} sealed {len(frame.blobs)} shares, expected one for each of the "
                    f"{len(names) - 1} others"
                )
        return {
            name: self._frames.request(
                name,
                # the sender left itself out, so those after it are one place further to the front
                [
                    frame.blobs[place - (sender < place)]
                    for sender, frame in enumerate(frames)
                    if sender != place
                ],
            )
            for place, name in enumerate(names)
        }

    def combine(self, bodies: Mapping[str, bytes], binding_digest: bytes | None = None) -> bytes:
        """See `SumCombiner`: gathers the sealed shares of the sum."""
        names = self._sum.agreement.contributors
        frames = self._frames.open_answers(bodies, names, binding_digest)
        for name, frame in zip(names, frames, strict=True):
            if len(frame.blobs) != 1:
                raise RemoteProtocolError(
                    f"{name} answered with {len(frame.blobs)} shares of the sum, expected 1"
                )
        return self._frames.sum_of(frames, [frame.blobs[0] for frame in frames])


class CryptenReceiver(StepSeals, OneRefusalReceiver):
    """The active's end: opens the shares of the sum and adds them."""

    def __init__(self, described: CryptenSum) -> None:
        OneRefusalReceiver.__init__(self)
        agreement = described.agreement
        self._sum = described
        super().__init__(agreement.receiver, agreement.contributors, described.frames())

    def start(self) -> Sequence[Outgoing]:
        self._require_no_refusal()
        return super().start()

    def _open(self, frame: Frame, binding: StepBinding) -> NDArray[np.float64]:
        agreement, fixed_point = self._sum.agreement, self._sum.fixed_point
        shape = frame.rows, frame.columns
        self.require_finished()
        if len(frame.blobs) != len(agreement.contributors):
            raise RemoteProtocolError(
                f"{agreement.combiner} gathered {len(frame.blobs)} shares of the sum, expected "
                f"{len(agreement.contributors)}"
            )
        shares = [
            self._share(name, self.open(name, binding, shape, sealed), shape)
            for name, sealed in zip(agreement.contributors, frame.blobs, strict=True)
        ]
        sum_BD = total(shares)
        if not -fixed_point.limit <= sum_BD.min() <= sum_BD.max() <= fixed_point.limit:
            raise RemoteProtocolError(
                f"the sum of step {binding.step} lies beyond the range of its contributions; a "
                "passive added other numbers than it agreed to"
            )
        return fixed_point.dequantise(sum_BD)

    def _share(self, name: str, body: bytes, shape: tuple[int, int]) -> Shares:
        if len(body) != shape[0] * shape[1] * _WORD.itemsize:
            raise RemoteProtocolError(f"{name} sealed {len(body)} bytes of a share of {shape}")
        return np.frombuffer(body, _WORD).reshape(shape)

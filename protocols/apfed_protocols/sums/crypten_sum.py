"""Sum of additive shares in Z_2^64, added by CrypTen's ArithmeticSharedTensor.

Run by: all three roles, in two rounds. Protects from: a curious aggregator and a curious
active, also together (they learn the sum of the honest passives, no single contribution), as
long as two passives are honest; the aggregator alone learns nothing, not even the sum. An
active that sends different representations to different passives gets no sum: a share
answers one message only. Does not protect from: M - 1 passives and the active together;
a passive that falls silent (the step then has no sum); a passive that adds another number than
its own.

1. Each passive splits its fixed-point integers into M shares, of which M - 1 are streams under
   fresh keys, and sends every other passive its share's key, sealed (`masked.StepSeals`).
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
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.crypten import (
    Shares,
    add_shares,
    compute_last_share,
    draw_share,
    load_crypten,
    reconstruct_sum,
)
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.randomness import KEY_BYTES, derive_key, fresh_key
from apfed_protocols.sums.frames import Frame
from apfed_protocols.sums.interface import ALTERED_SUM, FloatArray, Reading, StepBinding, SumLeaks
from apfed_protocols.sums.masked import StepSeals
from apfed_protocols.sums.roles import NoSetup, SecureSum, SumCombiner, SumContributor, SumReceiver

_WORD = np.dtype("<u8")
_WHO = "Who takes part, and when."


@dataclass(frozen=True)
class CryptenSum(SecureSum):
    """A sum of additive shares; what an agreement allows at most is far below 2^63.

    Raises LocalProtocolError: CrypTen, an optional extra, is not installed.
    """

    scheme: ClassVar[str] = "crypten"
    unsafe: ClassVar[bool] = False
    name: ClassVar[str] = "crypten"
    rounds: ClassVar[int] = 2
    opened_with_receiver: ClassVar[bool] = True
    opened_with_others: ClassVar[bool] = True
    rests_on: ClassVar[str] = (
        "X25519 and AES-256 being hard to break, and two passives who keep their shares"
    )
    leaks: ClassVar[SumLeaks] = SumLeaks(
        contribution=Reading(
            reads="From each passive for each other one a sealed key, which stands for a share of "
            "its contribution: its size and time.",
            protects="Seals between the passives, which open only where both answer the same "
            "message.",
            remains=_WHO,
        ),
        request=Reading(
            reads="One share of every other passive's contribution, as good as random.",
            protects="Additive sharing: without all of its shares a contribution is uniform.",
            remains=_WHO,
        ),
        answer=Reading(
            reads="One share of the sum of each passive, sealed for the active: its size and time.",
            protects="The seal between that passive and the active.",
            remains="It can withhold a sum, not alter it.",
        ),
        active_and_aggregator="The sum only: every passive keeps a share of each contribution "
        "from them.",
        altered="The aggregator cannot alter a sum; a passive that adds other numbers can. "
        + ALTERED_SUM,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        load_crypten()

    def make_receiver(self) -> "CryptenReceiver":
        return CryptenReceiver(self)

    def make_contributor(self, me: str) -> SumContributor:
        return CryptenContributor(self, me)

    def make_combiner(self) -> SumCombiner:
        return CryptenCombiner(self)

    def list_parameters(self) -> Mapping[str, object]:
        return {**super().list_parameters(), "ring_bits": 64}


class CryptenContributor(SumContributor):
    def __init__(self, secure_sum: CryptenSum, me: str) -> None:
        """Make the role of `me`, with a seal for each other contributor and for the receiver."""
        agreement = secure_sum.agreement
        frames = secure_sum.make_frames()
        self._others = tuple(name for name in agreement.contributors if name != me)
        self._seals = StepSeals(me, (*self._others, agreement.receiver), frames)
        super().__init__(secure_sum, me, frames, self._seals)
        self._secret = fresh_key()
        self._last_share: tuple[StepBinding, Shares] | None = None

    def _protect_numbers(self, numbers_BD: NDArray[Any], binding: StepBinding) -> Sequence[bytes]:
        """Seal the keys of the others' shares for their holders; keep the rest as the own share.

        `numbers_BD`: fixed-point numbers to add.
        """
        keys = {
            peer: derive_key(self._secret, b"share of", binding.digest, peer.encode())
            for peer in self._others
        }
        rows, columns = numbers_BD.shape
        other_shares = [draw_share(key, (rows, columns)) for key in keys.values()]
        self._last_share = binding, compute_last_share(numbers_BD, other_shares)
        return [self._seals.seal(peer, binding, (rows, columns), key) for peer, key in keys.items()]

    def answer(self, request: bytes) -> bytes:
        """Return this party's share of the sum, sealed for the active; see `SumContributor`.

        `request`: what the aggregator passed on.
        """
        frame = self._frames.open_request(request, self.me)
        agreement = self._sum.agreement
        if len(frame.blobs) != len(self._others):
            raise RemoteProtocolError(
                f"{agreement.combiner} relays {len(frame.blobs)} shares to {self.me}, who expects "
                f"one of each of {', '.join(self._others) or 'nobody'}"
            )
        if self._last_share is None:
            raise LocalProtocolError(f"{self.me} has no share of step {frame.step}")
        binding, last_share = self._last_share
        received = [
            self._open_share(peer, sealed, frame, binding)
            for peer, sealed in zip(self._others, frame.blobs, strict=True)
        ]
        self._last_share = None
        summed = add_shares([last_share, *received]).tobytes()
        sealed = self._seals.seal(agreement.receiver, binding, frame.shape, summed)
        return self._frames.pack_answer(self.me, (sealed,))

    def _open_share(self, peer: str, sealed: bytes, frame: Frame, binding: StepBinding) -> Shares:
        """Open the key that `peer` sealed for this step and expand it to its share, (B, D) modulo
        2^64.
        """
        key = self._seals.open(peer, binding, frame.shape, sealed)
        if len(key) != KEY_BYTES:
            raise RemoteProtocolError(f"{peer} sealed {len(key)} bytes, expected a key")
        return draw_share(key, frame.shape)


class CryptenCombiner(SumCombiner):
    def __init__(self, secure_sum: CryptenSum) -> None:
        self._names = secure_sum.agreement.contributors
        super().__init__(secure_sum.make_frames(), NoSetup())

    def ask(
        self, contributions: Mapping[str, bytes], binding_digest: bytes | None = None
    ) -> Mapping[str, bytes]:
        """Pass the sealed keys on: each contributor gets those that the others sealed for it.

        `binding_digest`: what all must answer; None: compared with each other alone.
        """
        frames = self._frames.open_contributions(contributions, binding_digest)
        for name, frame in zip(self._names, frames, strict=True):
            if len(frame.blobs) != len(self._names) - 1:
                raise RemoteProtocolError(
                    f"{name} sealed {len(frame.blobs)} shares, expected one for each of the "
                    f"{len(self._names) - 1} others"
                )
        return {
            name: self._frames.pack_request(
                name,
                # the sender left itself out, so those after it are one place further to the front
                [
                    frame.blobs[place - (sender < place)]
                    for sender, frame in enumerate(frames)
                    if sender != place
                ],
            )
            for place, name in enumerate(self._names)
        }

    def combine(self, bodies: Mapping[str, bytes], binding_digest: bytes | None = None) -> bytes:
        """Gather the contributors' shares of the sum, each sealed for the receiver, without adding
        them.

        `bodies`: each sender's message. `binding_digest`: what all must answer; None: compared with
        each other alone.
        """
        frames = self._frames.open_answers(bodies, self._names, binding_digest)
        for name, frame in zip(self._names, frames, strict=True):
            if len(frame.blobs) != 1:
                raise RemoteProtocolError(
                    f"{name} answered with {len(frame.blobs)} shares of the sum, expected 1"
                )
        return self._frames.sum_of(frames, [frame.blobs[0] for frame in frames])


class CryptenReceiver(SumReceiver):
    def __init__(self, secure_sum: CryptenSum) -> None:
        """Make the receiver's role, with a seal for each contributor."""
        agreement = secure_sum.agreement
        frames = secure_sum.make_frames()
        self._seals = StepSeals(agreement.receiver, agreement.contributors, frames)
        super().__init__(secure_sum, frames, self._seals)

    def _open(self, frame: Frame, binding: StepBinding) -> FloatArray:
        """Open all shares of the sum, add them modulo 2^64 and return real numbers."""
        agreement = self._sum.agreement
        self._seals.require_completion()
        if len(frame.blobs) != len(agreement.contributors):
            raise RemoteProtocolError(
                f"{agreement.combiner} gathered {len(frame.blobs)} shares of the sum, expected "
                f"{len(agreement.contributors)}"
            )
        shares = [
            self._parse_share(
                name, self._seals.open(name, binding, frame.shape, sealed), frame.shape
            )
            for name, sealed in zip(agreement.contributors, frame.blobs, strict=True)
        ]
        return self._dequantise_sum(reconstruct_sum(shares), binding)

    @staticmethod
    def _parse_share(name: str, body: bytes, shape: tuple[int, int]) -> Shares:
        """Read a share of (rows, columns) words of 64 bits. Raises RemoteProtocolError: another
        size.
        """
        if len(body) != shape[0] * shape[1] * _WORD.itemsize:
            raise RemoteProtocolError(f"{name} sealed {len(body)} bytes of a share of {shape}")
        return np.frombuffer(body, _WORD).reshape(shape)

    def _forget_secrets(self) -> None:
        self._seals.forget_secrets()

"""Sum of additive shares in Z_2^64, added by CrypTen's ArithmeticSharedTensor.

Run by: all three roles, in two rounds. Protects from: a curious aggregator and a curious
active, also together (they learn the sum of the honest passives, no single contribution), as
long as two passives are honest; the aggregator alone learns nothing, not even the sum. An
active that sends different representations to different passives gets no sum: a share
answers one message only. Does not protect from: M - 1 passives and the active together;
a passive that falls silent (the step then has no sum); a passive that adds another number than
its own.

1. Each passive splits its fixed-point integers into M shares, of which M - 1 are streams under
   fresh keys, and sends every other passive its share's key, sealed (`masked.StepCiphers`).
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
from apfed_protocols.sums.masked import StepCiphers
from apfed_protocols.sums.roles import (
    NoSetup,
    SecureSum,
    SumAggregator,
    SumContributor,
    SumReceiver,
)

_WORD = np.dtype("<u8")
_WHO_AND_WHEN = "Who takes part, and when."


@dataclass(frozen=True)
class CryptenSum(SecureSum):
    """A sum of additive shares modulo 2^64; every sum that an agreement allows is far below 2^63.

    Raises LocalProtocolError: CrypTen, an optional extra, is not installed.
    """

    scheme: ClassVar[str] = "crypten"
    unsafe: ClassVar[bool] = False
    name: ClassVar[str] = "crypten"
    rounds: ClassVar[int] = 2
    needs_receiver_key: ClassVar[bool] = True
    needs_other_contributors: ClassVar[bool] = True
    rests_on: ClassVar[str] = (
        "X25519 and AES-256 being hard to break, and two passives who keep their shares"
    )
    leaks: ClassVar[SumLeaks] = SumLeaks(
        contribution=Reading(
            reads="From each passive for each other one a sealed key, which stands for a share of "
            "its contribution: its size and time.",
            protects="Seals between the passives, which open only where both answer the same "
            "message.",
            remains=_WHO_AND_WHEN,
        ),
        request=Reading(
            reads="One share of every other passive's contribution, as good as random.",
            protects="Additive sharing: without all of its shares a contribution is uniform.",
            remains=_WHO_AND_WHEN,
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
        """Load CrypTen. Raises LocalProtocolError: CrypTen is not installed, or one computer could
        read a single contribution and `allow_single_reader` is not set.
        """
        super().__post_init__()
        load_crypten()

    def make_receiver(self) -> "CryptenReceiver":
        return CryptenReceiver(self)

    def make_contributor(self, me: str) -> SumContributor:
        return CryptenContributor(self, me)

    def make_aggregator(self) -> SumAggregator:
        return CryptenAggregator(self)

    def list_parameters(self) -> Mapping[str, object]:
        return {**super().list_parameters(), "ring_bits": 64}


class CryptenContributor(SumContributor):
    """A passive's role: it splits its values into additive shares, one for each passive, and adds
    the shares that it gets.
    """

    def __init__(self, secure_sum: CryptenSum, me: str) -> None:
        """Make the role of `me`, whose set-up agrees encryption keys with each other contributor
        and with the receiver.
        """
        agreement = secure_sum.agreement
        frames = secure_sum.make_frames()
        self._other_contributors = tuple(name for name in agreement.contributors if name != me)
        self._step_ciphers = StepCiphers(
            me, (*self._other_contributors, agreement.receiver), frames
        )
        super().__init__(secure_sum, me, frames, self._step_ciphers)
        self._share_secret = fresh_key()
        self._unanswered_share: tuple[StepBinding, Shares] | None = None

    def _protect_numbers(self, numbers_BD: NDArray[Any], binding: StepBinding) -> Sequence[bytes]:
        """Split a contribution into additive shares modulo 2^64, one for each passive. The share of
        this passive is stored; the shares of the others are pseudorandom, each expanded from a key.
        Return these keys, each encrypted for the passive whose share it gives, in the agreement's
        order.

        `numbers_BD`: B rows of D clipped fixed-point integers. `binding`: the step and the active's
        message, from which keys are derived and for which alone they decrypt.
        """
        key_by_peer = {
            peer: derive_key(self._share_secret, b"share of", binding.digest, peer.encode())
            for peer in self._other_contributors
        }
        rows, columns = numbers_BD.shape
        other_shares = [draw_share(key, (rows, columns)) for key in key_by_peer.values()]
        self._unanswered_share = binding, compute_last_share(numbers_BD, other_shares)
        return [
            self._step_ciphers.seal(peer, binding, (rows, columns), key)
            for peer, key in key_by_peer.items()
        ]

    def answer(self, request: bytes) -> bytes:
        """Return this passive's share of the sum, encrypted for the active: it adds its shares of
        all contributions.

        `request`: the aggregator's message with one encrypted key from each other passive.

        Raises:
            LocalProtocolError: no contribution of this passive waits for a request.
            RemoteProtocolError: the request is malformed or about another step.
        """
        frame = self._frames.parse_request(request, self.me)
        agreement = self._sum.agreement
        if len(frame.blobs) != len(self._other_contributors):
            raise RemoteProtocolError(
                f"{agreement.aggregator} relays {len(frame.blobs)} shares to {self.me}, who "
                f"expects one of each of {', '.join(self._other_contributors) or 'nobody'}"
            )
        if self._unanswered_share is None:
            raise LocalProtocolError(f"{self.me} has no share of step {frame.step}")
        binding, last_share = self._unanswered_share
        received_shares = [
            self._expand_share(peer, sealed_key, frame, binding)
            for peer, sealed_key in zip(self._other_contributors, frame.blobs, strict=True)
        ]
        self._unanswered_share = None
        share_of_sum = add_shares([last_share, *received_shares]).tobytes()
        sealed_share = self._step_ciphers.seal(
            agreement.receiver, binding, frame.shape, share_of_sum
        )
        return self._frames.pack_answer(self.me, (sealed_share,))

    def _expand_share(
        self, peer: str, sealed_key: bytes, frame: Frame, binding: StepBinding
    ) -> Shares:
        """Decrypt the key that `peer` encrypted for this passive, and return the share of the
        peer's contribution to which the key expands, (rows, columns) modulo 2^64.

        Args:
            peer: the passive whose contribution it is.
            sealed_key: the encrypted key.
            frame: the aggregator's request, which has the shape of the values.
            binding: the step and the active's message.

        Raises RemoteProtocolError: the key does not authenticate, or has another size.
        """
        key = self._step_ciphers.open(peer, binding, frame.shape, sealed_key)
        if len(key) != KEY_BYTES:
            raise RemoteProtocolError(f"{peer} sealed {len(key)} bytes, expected a key")
        return draw_share(key, frame.shape)


class CryptenAggregator(SumAggregator):
    """The aggregator's role: it forwards encrypted keys and encrypted shares of the sum."""

    def __init__(self, secure_sum: CryptenSum) -> None:
        """Make the role, which has no set-up."""
        self._names = secure_sum.agreement.contributors
        super().__init__(secure_sum.make_frames(), NoSetup())

    def ask(
        self, contributions: Mapping[str, bytes], binding_digest: bytes | None = None
    ) -> Mapping[str, bytes]:
        """Return, for each contributor, a second-round request with the keys that the other
        contributors encrypted for it, in the agreement's order.

        `contributions`: messages by sender, each with one encrypted key for every other
        contributor. `binding_digest`: SHA-256 digest (`StepBinding.digest`) of the step and of the
        active's message that all contributions must answer; None: the contributions are only
        compared with each other.

        Raises RemoteProtocolError: a contribution is missing or malformed, or they answer different
        messages.
        """
        frames = self._frames.parse_contributions(contributions, binding_digest)
        for name, frame in zip(self._names, frames, strict=True):
            if len(frame.blobs) != len(self._names) - 1:
                raise RemoteProtocolError(
                    f"{name} sealed {len(frame.blobs)} shares, expected one for each of the "
                    f"{len(self._names) - 1} others"
                )
        requests = {}
        for receiver_position, name in enumerate(self._names):
            keys = []
            for sender_position, frame in enumerate(frames):
                if sender_position != receiver_position:
                    # A sender has no key for itself, so the keys for those after it move up by one.
                    index = (
                        receiver_position
                        if receiver_position < sender_position
                        else receiver_position - 1
                    )
                    keys.append(frame.blobs[index])
            requests[name] = self._frames.pack_request(name, keys)
        return requests

    def combine(self, bodies: Mapping[str, bytes], binding_digest: bytes | None = None) -> bytes:
        """Return the message to the receiver: the contributors' shares of the sum, each encrypted
        for the receiver. They are not added here, since the aggregator cannot decrypt them.

        `bodies`: each contributor's second-round message with its share of the sum, by name.
        `binding_digest`: SHA-256 digest of the step and of the active's message that all must
        answer; None: it is not known here, and not compared.

        Raises RemoteProtocolError: a message is missing or malformed, or about another step.
        """
        frames = self._frames.parse_answers(bodies, self._names, binding_digest)
        for name, frame in zip(self._names, frames, strict=True):
            if len(frame.blobs) != 1:
                raise RemoteProtocolError(
                    f"{name} answered with {len(frame.blobs)} shares of the sum, expected 1"
                )
        return self._frames.pack_sum(frames, [frame.blobs[0] for frame in frames])


class CryptenReceiver(SumReceiver):
    """The active's role: it decrypts the passives' shares of the sum and adds them."""

    def __init__(self, secure_sum: CryptenSum) -> None:
        """Make the role, whose set-up agrees encryption keys with each contributor."""
        agreement = secure_sum.agreement
        frames = secure_sum.make_frames()
        self._step_ciphers = StepCiphers(agreement.receiver, agreement.contributors, frames)
        super().__init__(secure_sum, frames, self._step_ciphers)

    def _decrypt_sum(self, frame: Frame, binding: StepBinding) -> FloatArray:
        """Decrypt all shares of the sum in a frame (message), and add them modulo 2^64; return the
        sum in real numbers, (rows, columns).

        `binding`: the step and the active's message, for which alone the shares decrypt.

        Raises RemoteProtocolError: a share is missing, does not authenticate or has another size,
        or the sum lies outside the range of contributions.
        """
        agreement = self._sum.agreement
        self._step_ciphers.require_completion()
        if len(frame.blobs) != len(agreement.contributors):
            raise RemoteProtocolError(
                f"{agreement.aggregator} gathered {len(frame.blobs)} shares of the sum, expected "
                f"{len(agreement.contributors)}"
            )
        shares = []
        for name, sealed_share in zip(agreement.contributors, frame.blobs, strict=True):
            body = self._step_ciphers.open(name, binding, frame.shape, sealed_share)
            shares.append(self._parse_share(name, body, frame.shape))
        return self._dequantise_sum(reconstruct_sum(shares), binding)

    @staticmethod
    def _parse_share(name: str, body: bytes, shape: tuple[int, int]) -> Shares:
        """Decode a contributor's share of the sum, an array of `shape` of 64-bit words. Raises
        RemoteProtocolError, which names the contributor `name`: the share has another size.
        """
        if len(body) != shape[0] * shape[1] * _WORD.itemsize:
            raise RemoteProtocolError(f"{name} sealed {len(body)} bytes of a share of {shape}")
        return np.frombuffer(body, _WORD).reshape(shape)

    def _forget_secrets(self) -> None:
        self._step_ciphers.forget_secrets()

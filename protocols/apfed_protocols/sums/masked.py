"""Plain integers under pairwise masks: a sum in Z_2^32 or Z_2^64 without any encryption.

Run by: all three roles. Protects from: a curious aggregator and a curious active, also
together (they learn the sum of the honest passives, no single contribution), as long as
two passives are honest; a curious aggregator alone does not learn the sum either, for
each passive adds one more mask that it shares with the active. An active that sends
different representations to different passives gets uniform noise. Does not protect
from: M - 1 passives and the active together; a passive that falls silent (the step then
has no sum); an aggregator that adds a constant to the sum.

After Bonawitz et al. 2017, section 4.1, without the recovery of dropped parties; the mask
shared with the active is ours. Masks add no error: what is decoded is the sum of the clipped and
quantised rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from numpy.typing import NDArray

from apfed_protocols.conversation import Outgoing
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.randomness import ForkCheck, derive_key, keystream_chunks
from apfed_protocols.seal import RunKey, fresh_run_key
from apfed_protocols.sums.fixed_point import Clipping
from apfed_protocols.sums.frames import AgreedFrames, Frame
from apfed_protocols.sums.interface import (
    ALTERED_SUM,
    FloatArray,
    IntArray,
    Reading,
    StepBinding,
    SumAgreement,
    SumLeaks,
    format_sum_name,
)
from apfed_protocols.sums.roles import (
    KeepsSecrets,
    OneRoundCombiner,
    SecureSum,
    SumCombiner,
    SumContributor,
    SumReceiver,
)

Elements = NDArray[np.unsignedinteger[Any]]
"""Numbers modulo 2^32 or 2^64, the words of their type."""
_KEY_BYTES = 32
_NONCE_BYTES = 12
Word = np.dtype[np.unsignedinteger[Any]]
_RINGS: Mapping[int, Word] = {32: np.dtype("<u4"), 64: np.dtype("<u8")}


class PairwiseSeeds(KeepsSecrets):
    """A party's conversation that agrees one seed with each peer, and the masks derived from them.

    A mask is a PRF of (pair seed, session, step, rows, digest of what the active sent, shape), so
    that answers to different messages do not cancel and their sum is uniform noise. Pair seed:
    X25519 (RFC 7748) between keys made for this sum, HKDF-SHA256 (RFC 5869) salted with the
    agreement; mask: AES-256-CTR under a BLAKE2b sub-key (`apfed_protocols.randomness`). The keys
    must arrive over authenticated links (`apfed_protocols.seal`). A forked copy holds the same key,
    so that it would agree the same seeds: all is done in the process that made it.
    """

    def __init__(self, me: str, peers: Sequence[str], frames: AgreedFrames) -> None:
        """Make a fresh key for this sum; `start` and `receive` then agree one seed with each of
        `peers`.
        """
        self.me = me
        self._peers = tuple(peers)
        self._frames = frames
        self._key: RunKey | None = fresh_run_key()
        self._fork_check = ForkCheck(f"{me}: this role of {frames.name}")
        self._seeds: dict[str, bytes] = {}

    def start(self) -> Sequence[Outgoing]:
        """Return this party's public key, to be sent to each peer."""
        message = self._frames.pack_setup(self._require_own_key().public)
        return tuple(Outgoing(peer, message) for peer in self._peers)

    def receive(self, sender: str, body: bytes) -> Sequence[Outgoing]:
        """Derive the seed shared with `sender` from its public key. Raises RemoteProtocolError: a
        stranger, a second key, or bytes that are no key.

        `body`: the bytes of the message.
        """
        self._fork_check.require_own_process()
        if sender not in self._peers or sender in self._seeds:
            raise RemoteProtocolError(
                f"{sender} sent a mask key to {self.me}, who expects one from each of "
                f"{', '.join(self._peers) or 'nobody'}"
            )
        frame = self._frames.open_own_setup(body, sender, self.me)
        if len(frame.blobs) != 1 or len(frame.blobs[0]) != _KEY_BYTES:
            raise RemoteProtocolError(f"{sender} sent no mask key of {_KEY_BYTES} bytes")
        names = (self.me, sender)
        use = b"secure-apfed mask v1"
        agreement = self._frames.agreement
        key = self._require_own_key()
        self._seeds[sender] = pair_seed(key, frame.blobs[0], agreement, names, use=use)
        return ()

    @property
    def is_finished(self) -> bool:
        return len(self._seeds) == len(self._peers)

    def require_completion(self) -> None:
        """Raise LocalProtocolError, which names the peers, while a peer's key is missing."""
        if self._key is None:
            self._require_own_key()  # which says why there is none
        if len(self._seeds) < len(self._peers):
            missing = [name for name in self._peers if name not in self._seeds]
            raise LocalProtocolError(
                f"{self.me} has no mask key of {', '.join(missing)} yet; run the setup first"
            )

    def export_secrets(self) -> dict[str, str]:
        """Return the secrets by peer, and the own one under no name, in hexadecimal; forget all."""
        secrets = {"": self._require_own_key().secret_bytes(), **self._seeds}
        self.forget_secrets()
        return {name: secret.hex() for name, secret in secrets.items()}

    def import_secrets(self, secrets: Mapping[str, str]) -> None:
        seeds = {name: bytes.fromhex(secret) for name, secret in secrets.items()}
        self._key = RunKey.from_secret_bytes(seeds.pop(""))
        self._seeds = seeds

    def forget_secrets(self) -> None:
        self._peers = ()
        self._seeds = {}
        self._key = None

    def add_cancelling(self, binding: StepBinding, total: Elements) -> None:
        """Add the masks of one step that cancel in the sum over all contributors, in place."""
        own_position = self._frames.agreement.find_position(self.me)
        for position, peer in enumerate(self._frames.agreement.contributors):
            if position != own_position:
                # The earlier of two passives adds what the later one subtracts.
                self.add_stream(peer, binding, total, sign=1 if own_position < position else -1)

    def add_stream(
        self, peer: str, binding: StepBinding, total: Elements, *, sign: Literal[1, -1]
    ) -> None:
        """Add the mask that this party and `peer` share for one step, or subtract it, in place."""
        self._fork_check.require_own_process()
        add_keystream(total, self._seeds[peer], binding.digest, sign=sign)

    def _require_own_key(self) -> RunKey:
        """Return this party's key. Raises LocalProtocolError: a forked process, or the key was
        destroyed.
        """
        self._fork_check.require_own_process()
        if self._key is None:
            raise LocalProtocolError(f"{self.me} threw its mask key away; set up a new session")
        return self._key


class StepSeals(PairwiseSeeds):
    """A party's seals, which the aggregator forwards unread; for the arguments see `PairwiseSeeds`.

    AES-256-GCM under a key for its direction, with the step as the nonce: each end sends the other
    one sealed message a step, and steps only go up. A seal opens for the step, message and shape
    that it was made for.
    """

    def __init__(self, me: str, peers: Sequence[str], frames: AgreedFrames) -> None:
        super().__init__(me, peers, frames)
        self._last = dict.fromkeys(peers, -1)

    def seal(self, peer: str, binding: StepBinding, shape: tuple[int, int], text: bytes) -> bytes:
        """Encrypt `text` for `peer`, bound to step, message and shape. Raises LocalProtocolError: a
        step that is not above the last one, since the step is the nonce.
        """
        if binding.step <= self._last[peer]:
            raise LocalProtocolError(
                f"{self.me}: step {binding.step} comes after step {self._last[peer]} of what was "
                f"sealed for {peer}; a nonce is never used twice"
            )
        self._last[peer] = binding.step
        associated = self._make_associated_data(self.me, peer, binding, shape)
        return self._make_cipher(self.me, peer).encrypt(_make_nonce(binding), text, associated)

    def open(self, peer: str, binding: StepBinding, shape: tuple[int, int], sealed: bytes) -> bytes:
        """Decrypt what `peer` sealed for this step, message and shape. Raises RemoteProtocolError:
        it does not authenticate.
        """
        associated = self._make_associated_data(peer, self.me, binding, shape)
        try:
            return self._make_cipher(peer, self.me).decrypt(
                _make_nonce(binding), sealed, associated
            )
        except InvalidTag as error:
            raise RemoteProtocolError(
                f"what {peer} sealed for {self.me} in step {binding.step} does not authenticate: "
                f"it was altered on the way, or {self._frames.agreement.receiver} sent the two "
                "different representations"
            ) from error

    def _make_cipher(self, sender: str, recipient: str) -> AESGCM:
        """Return AES-256-GCM under the key of one direction, derived from the pair's seed."""
        peer = recipient if sender == self.me else sender
        names = (sender.encode(), recipient.encode())
        self._fork_check.require_own_process()
        return AESGCM(derive_key(self._seeds[peer], b"step seal", *names))

    def _make_associated_data(
        self, sender: str, recipient: str, binding: StepBinding, shape: tuple[int, int]
    ) -> bytes:
        """Return the bytes that a seal authenticates beside its text: fingerprint, binding, shape
        and both names, each preceded by its length.

        `recipient`: the party that opens the seal.
        """
        sizes = (size.to_bytes(8, "big") for size in shape)
        names = (sender, recipient)
        parts = self._frames.fingerprint, binding.digest, *sizes, *map(str.encode, names)
        return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def _make_nonce(binding: StepBinding) -> bytes:
    """Return the step as a nonce of 12 bytes."""
    return binding.step.to_bytes(_NONCE_BYTES, "big")


def pair_seed(
    key: RunKey, peer_public: bytes, agreement: SumAgreement, names: tuple[str, str], *, use: bytes
) -> bytes:
    """Derive the seed that the holders of two keys share for one use, whatever their order."""
    ordered = b"".join(len(n.encode()).to_bytes(2, "big") + n.encode() for n in sorted(names))
    return key.derive_shared_key(peer_public, salt=agreement.digest, info=use + ordered)


def add_keystream(
    total: Elements, seed: bytes, binding_digest: bytes, *, sign: Literal[1, -1]
) -> None:
    """Add the stream of one seed and step, as words of `total`'s type, to it in place.

    `total` lies row after row in memory, or a mask would fall on a copy of it; its shape is
    part of what the stream is made of.

    `binding_digest`: of the step, which the stream depends on.
    """
    if not total.flags.c_contiguous:
        raise LocalProtocolError(
            f"a mask is added in place to rows that follow each other in memory; got shape "
            f"{total.shape} with strides {total.strides}"
        )
    shape = np.array(total.shape, ">u8").tobytes()
    step = np.add if sign > 0 else np.subtract
    flat = total.reshape(-1)
    start = 0
    for chunk in keystream_chunks(seed, b"mask", binding_digest, shape, length=total.nbytes):
        words = np.frombuffer(chunk, dtype=total.dtype)
        part = flat[start : start + len(words)]
        step(part, words, out=part)
        start += len(words)


@dataclass(frozen=True)
class MaskedSum(SecureSum):
    """A sum of masked integers modulo 2^ring_bits.

    Raises LocalProtocolError: a sum that could leave the ring.
    """

    ring_bits: ClassVar[int] = 32
    scheme: ClassVar[str] = "plain"
    unsafe: ClassVar[bool] = False
    masks: ClassVar[str] = "pairwise"
    name: ClassVar[str] = format_sum_name(scheme, masks)
    opened_with_receiver: ClassVar[bool] = True
    opened_with_others: ClassVar[bool] = True
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
        """Raise LocalProtocolError if a sum of all contributions needs more bits than
        the ring has.
        """
        super().__post_init__()
        if self.fixed_point.field_bits > self.ring_bits:
            raise LocalProtocolError(
                f"sums of {len(self.agreement.contributors)} values of {self.agreement.bits} bits "
                f"need {self.fixed_point.field_bits} bits, the ring has {self.ring_bits}; use "
                "fewer bits"
            )

    @cached_property
    def word(self) -> Word:
        return _RINGS[self.ring_bits]

    @property
    def value_bytes(self) -> float:
        return self.word.itemsize

    def make_receiver(self) -> "MaskedReceiver":
        return MaskedReceiver(self)

    def make_contributor(self, me: str) -> SumContributor:
        return _MaskedContributor(self, me)

    def make_combiner(self) -> SumCombiner:
        return OneRoundCombiner(self.make_frames(), self.add_frames)

    def list_parameters(self) -> Mapping[str, object]:
        return {**super().list_parameters(), "ring_bits": self.ring_bits}

    def encode_contribution(
        self,
        values_BD: FloatArray,
        noise_BD: IntArray | None,
        clipping: Clipping | None = None,
    ) -> Elements:
        """Return clipped and quantised rows plus noise as elements of the ring."""
        # Of 32 bits, since adding them may wrap around: the ring is at least as wide.
        narrow_BD = self.fixed_point.quantise_rows(values_BD, noise_BD, np.int32, clipping)
        fits = narrow_BD.dtype.itemsize == self.word.itemsize
        return narrow_BD.view(self.word) if fits else narrow_BD.astype(self.word)

    def add_frames(self, frames: Sequence[Frame]) -> Sequence[bytes]:
        """Return the sum of all contributions as one blob, still under the masks shared with the
        receiver.
        """
        for frame in frames:
            frame.require_blobs(self.agreement.contributors[frame.party], 1)
        return (self.add_elements(frames).tobytes(),)

    def add_elements(self, frames: Sequence[Frame]) -> Elements:
        """Add, in the ring, what contributions carry in their first blobs."""
        names = self.agreement.contributors
        total = self.parse_elements(frames[0], names[frames[0].party]).copy()
        for frame in frames[1:]:
            total += self.parse_elements(frame, names[frame.party])
        return total

    def parse_elements(self, frame: Frame, sender: str) -> Elements:
        """Return the ring elements in the first blob of a frame, without changing the frame.

        Raises RemoteProtocolError: there are none, or not as many as the frame's shape says.
        """
        expected = frame.rows * frame.columns * self.word.itemsize
        if not expected or not frame.blobs or len(frame.blobs[0]) != expected:
            raise RemoteProtocolError(
                f"{sender} announced {frame.rows}x{frame.columns} values and sent other bytes"
            )
        return np.frombuffer(frame.blobs[0], dtype=self.word).reshape(frame.shape)


class _MaskedContributor(SumContributor):
    def __init__(self, masked: MaskedSum, me: str) -> None:
        """Agree one seed with each other contributor and one with the receiver."""
        agreement = masked.agreement
        frames = masked.make_frames()
        others = [name for name in agreement.contributors if name != me]
        self._seeds = PairwiseSeeds(me, (*others, agreement.receiver), frames)
        super().__init__(masked, me, frames, self._seeds)

    def _protect_numbers(self, numbers_BD: NDArray[Any], binding: StepBinding) -> Sequence[bytes]:
        self._seeds.add_cancelling(binding, numbers_BD)
        self._seeds.add_stream(self._sum.agreement.receiver, binding, numbers_BD, sign=1)
        return (numbers_BD.tobytes(),)

    def _export_secrets(self) -> dict[str, Any]:
        return {"seeds": self._seeds.export_secrets()}

    def _import_secrets(self, state: Mapping[str, Any]) -> None:
        self._seeds.import_secrets(state["seeds"])


class MaskedReceiver(SumReceiver):
    """The active's end: takes off the masks that it shares with each passive."""

    _sum: MaskedSum

    def __init__(self, masked: MaskedSum) -> None:
        """Agree one seed with each contributor."""
        agreement = masked.agreement
        frames = masked.make_frames()
        self._seeds = PairwiseSeeds(agreement.receiver, agreement.contributors, frames)
        super().__init__(masked, frames, self._seeds)

    def _open(self, frame: Frame, binding: StepBinding) -> FloatArray:
        """Subtract the mask shared with each contributor in the frame; return the sum in real
        numbers.
        """
        self._seeds.require_completion()
        total_BD = self._sum.parse_elements(frame, self._sum.agreement.combiner).copy()
        for peer in self._list_contributors(frame):
            self._seeds.add_stream(peer, binding, total_BD, sign=-1)
        return self._dequantise_sum(
            total_BD.view(np.dtype(f"<i{self._sum.word.itemsize}")), binding
        )

    def _list_contributors(self, frame: Frame) -> Sequence[str]:
        """Return whose contributions are in the sum: all of them; a sum that may lack some
        overrides this.
        """
        frame.require_blobs(self._sum.agreement.combiner, 1)
        return self._sum.agreement.contributors

    def _forget_secrets(self) -> None:
        self._seeds.forget_secrets()

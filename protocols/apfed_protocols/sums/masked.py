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
    OneRoundAggregator,
    SecureSum,
    SumAggregator,
    SumContributor,
    SumReceiver,
)

RingElements = NDArray[np.unsignedinteger[Any]]
"""Numbers modulo 2^32 or 2^64, the words of their type."""
_KEY_BYTES = 32
_NONCE_BYTES = 12
Word = np.dtype[np.unsignedinteger[Any]]
_WORD_BY_RING_BITS: Mapping[int, Word] = {32: np.dtype("<u4"), 64: np.dtype("<u8")}


class PairwiseSeeds(KeepsSecrets):
    """A party's key agreement with each of its peers: one seed for each pair, and the masks derived
    from the seeds.

    A mask is a PRF of (pair seed, session, step, rows, digest of what the active sent, shape), so
    that answers to different messages do not cancel and their sum is uniform noise. Pair seed:
    X25519 (RFC 7748) between keys made for this sum, HKDF-SHA256 (RFC 5869) salted with the
    agreement; mask: AES-256-CTR under a BLAKE2b sub-key (`apfed_protocols.randomness`). The keys
    must arrive over authenticated links (`apfed_protocols.seal`). A forked copy holds the same key,
    so that it would agree the same seeds: all is done in the process that made it.
    """

    def __init__(self, me: str, peers: Sequence[str], frames: AgreedFrames) -> None:
        """Make a fresh key pair for this sum; `start` and `receive` then agree one seed with each
        of `peers`. `frames` writes and checks the messages.
        """
        self.me = me
        self._peers = tuple(peers)
        self._frames = frames
        self._own_key: RunKey | None = fresh_run_key()
        self._fork_check = ForkCheck(f"{me}: this role of {frames.name}")
        self._seed_by_peer: dict[str, bytes] = {}

    def start(self) -> Sequence[Outgoing]:
        """Return this party's public key, to be sent to each peer."""
        message = self._frames.pack_setup(self._require_own_key().public)
        return tuple(Outgoing(peer, message) for peer in self._peers)

    def receive(self, sender: str, body: bytes) -> Sequence[Outgoing]:
        """Take a peer's set-up message, `body`, with its public key, and derive the seed shared
        with that peer; return no messages, since none follow.

        Raises RemoteProtocolError: `sender` is no peer, sent a key before, or sent no key.
        """
        self._fork_check.require_own_process()
        if sender not in self._peers or sender in self._seed_by_peer:
            raise RemoteProtocolError(
                f"{sender} sent a mask key to {self.me}, who expects one from each of "
                f"{', '.join(self._peers) or 'nobody'}"
            )
        frame = self._frames.parse_own_setup(body, sender, self.me)
        if len(frame.blobs) != 1 or len(frame.blobs[0]) != _KEY_BYTES:
            raise RemoteProtocolError(f"{sender} sent no mask key of {_KEY_BYTES} bytes")
        names = (self.me, sender)
        agreement = self._frames.agreement
        key = self._require_own_key()
        self._seed_by_peer[sender] = derive_pair_seed(
            key, frame.blobs[0], agreement, names, purpose=b"secure-apfed mask v1"
        )
        return ()

    @property
    def is_finished(self) -> bool:
        return len(self._seed_by_peer) == len(self._peers)

    def require_completion(self) -> None:
        """Raise LocalProtocolError while a peer's key is missing, with the peers' names, or if this
        party's secrets were destroyed.
        """
        if self._own_key is None:
            self._require_own_key()  # raises an error that says why the key is missing
        if len(self._seed_by_peer) < len(self._peers):
            missing = [name for name in self._peers if name not in self._seed_by_peer]
            raise LocalProtocolError(
                f"{self.me} has no mask key of {', '.join(missing)} yet; run the setup first"
            )

    def export_secrets(self) -> dict[str, str]:
        """Return all secrets in hexadecimal, by name, and destroy them here: the seed shared with
        each peer under the peer's name, and this party's own private key under "".
        """
        secrets = {"": self._require_own_key().secret_bytes(), **self._seed_by_peer}
        self.forget_secrets()
        return {name: secret.hex() for name, secret in secrets.items()}

    def import_secrets(self, secrets: Mapping[str, str]) -> None:
        """Restore the secrets that `export_secrets` returned."""
        seeds = {name: bytes.fromhex(secret) for name, secret in secrets.items()}
        self._own_key = RunKey.from_secret_bytes(seeds.pop(""))
        self._seed_by_peer = seeds

    def forget_secrets(self) -> None:
        """Destroy this party's key and all seeds."""
        self._peers = ()
        self._seed_by_peer = {}
        self._own_key = None

    def add_cancelling_masks(self, binding: StepBinding, total: RingElements) -> None:
        """Add this contributor's pairwise masks for one step to `total`, in place. Each other
        contributor adds the same mask with the opposite sign, so that the masks cancel in the sum.

        `binding`: the step and the active's message, from which the masks are derived.
        """
        own_position = self._frames.agreement.find_position(self.me)
        for position, peer in enumerate(self._frames.agreement.contributors):
            if position != own_position:
                # The earlier of two passives adds what the later one subtracts.
                is_earlier = own_position < position
                self.add_shared_mask(peer, binding, total, sign=1 if is_earlier else -1)

    def add_shared_mask(
        self, peer: str, binding: StepBinding, total: RingElements, *, sign: Literal[1, -1]
    ) -> None:
        """Add the mask that this party and `peer` share for one step to `total` in place, or with
        `sign` -1 subtract it.

        `binding`: the step and the active's message, from which the mask is derived.
        """
        self._fork_check.require_own_process()
        add_keystream(total, self._seed_by_peer[peer], binding.digest, sign=sign)

    def _require_own_key(self) -> RunKey:
        """Return this party's private key. Raises LocalProtocolError: this is a forked process, or
        the key was destroyed.
        """
        self._fork_check.require_own_process()
        if self._own_key is None:
            raise LocalProtocolError(f"{self.me} threw its mask key away; set up a new session")
        return self._own_key


class StepCiphers(PairwiseSeeds):
    """A party's encryption of messages to its peers, which the aggregator forwards unread, under
    keys that the party `me` agrees with each of `peers`.

    AES-256-GCM under one key for each direction, with the step as the nonce: each party encrypts
    at most one message to each peer in a step, and steps only go up. What was encrypted decrypts
    only for the same step, message of the active and shape.
    """

    def __init__(self, me: str, peers: Sequence[str], frames: AgreedFrames) -> None:
        """Agree one seed with each peer as `PairwiseSeeds` does; no step was used yet."""
        super().__init__(me, peers, frames)
        self._last_step_by_peer = dict.fromkeys(peers, -1)

    def seal(
        self, peer: str, binding: StepBinding, shape: tuple[int, int], plaintext: bytes
    ) -> bytes:
        """Encrypt `plaintext` for `peer` and return the ciphertext, which decrypts only for the
        same step and message of the active (`binding`) and the same `shape` (rows, columns) of the
        values.

        Raises LocalProtocolError: the step, which is the nonce, is not above the last step in which
        something was encrypted for this peer.
        """
        if binding.step <= self._last_step_by_peer[peer]:
            raise LocalProtocolError(
                f"{self.me}: step {binding.step} comes after step {self._last_step_by_peer[peer]} "
                f"of what was sealed for {peer}; a nonce is never used twice"
            )
        self._last_step_by_peer[peer] = binding.step
        associated_data = self._make_associated_data(self.me, peer, binding, shape)
        return self._make_cipher(self.me, peer).encrypt(
            _make_nonce(binding), plaintext, associated_data
        )

    def open(
        self, peer: str, binding: StepBinding, shape: tuple[int, int], ciphertext: bytes
    ) -> bytes:
        """Decrypt `ciphertext`, which `peer` encrypted by `seal`.

        `binding`: the step and the active's message. `shape`: (rows, columns) of the values. Both
        must be those of the encryption.

        Raises RemoteProtocolError: the bytes do not authenticate.
        """
        associated_data = self._make_associated_data(peer, self.me, binding, shape)
        try:
            return self._make_cipher(peer, self.me).decrypt(
                _make_nonce(binding), ciphertext, associated_data
            )
        except InvalidTag as error:
            raise RemoteProtocolError(
                f"what {peer} sealed for {self.me} in step {binding.step} does not authenticate: "
                f"it was altered on the way, or {self._frames.agreement.receiver} sent the two "
                "different representations"
            ) from error

    def _make_cipher(self, sender: str, recipient: str) -> AESGCM:
        """Return AES-256-GCM under the key for messages from `sender` to `recipient`, derived from
        the pair's seed; one of the two is this party.
        """
        peer = recipient if sender == self.me else sender
        names = (sender.encode(), recipient.encode())
        self._fork_check.require_own_process()
        return AESGCM(derive_key(self._seed_by_peer[peer], b"step seal", *names))

    def _make_associated_data(
        self, sender: str, recipient: str, binding: StepBinding, shape: tuple[int, int]
    ) -> bytes:
        """Return the associated data that AES-GCM authenticates with the text: the sum's
        fingerprint (digest of its terms), the digest of step and message, the shape (rows,
        columns) and both names, each preceded by its length.
        """
        sizes = [size.to_bytes(8, "big") for size in shape]
        names = [sender.encode(), recipient.encode()]
        fields = [self._frames.fingerprint, binding.digest, *sizes, *names]
        return b"".join(len(content).to_bytes(4, "big") + content for content in fields)


def _make_nonce(binding: StepBinding) -> bytes:
    """Return the number of the step as a nonce of 12 bytes."""
    return binding.step.to_bytes(_NONCE_BYTES, "big")


def derive_pair_seed(
    key: RunKey,
    peer_public: bytes,
    agreement: SumAgreement,
    names: tuple[str, str],
    *,
    purpose: bytes,
) -> bytes:
    """Return the 32-byte seed that two parties share for one use; both derive the same seed, by
    X25519 and HKDF.

    Args:
        key: this party's key pair.
        peer_public: the other party's public key.
        agreement: terms of the sum, whose digest salts the derivation.
        names: names of the two parties, in any order.
        purpose: a label that separates seeds for different uses.
    """
    encoded_names = [name.encode() for name in sorted(names)]
    info = purpose + b"".join(len(name).to_bytes(2, "big") + name for name in encoded_names)
    return key.derive_shared_key(peer_public, salt=agreement.digest, info=info)


def add_keystream(
    total: RingElements, seed: bytes, binding_digest: bytes, *, sign: Literal[1, -1]
) -> None:
    """Add the mask of one seed and step to `total` in place, or with `sign` -1 subtract it.

    The mask is the keystream of the seed, the binding digest and the shape, read as words of
    `total`'s type; addition is modulo 2^32 or 2^64.

    Args:
        total: the numbers to mask, of any shape.
        seed: 32 secret bytes, shared by the two parties that add and subtract this mask.
        binding_digest: digest of the step and of the active's message.
        sign: 1 to add the mask, -1 to subtract it.

    Raises LocalProtocolError: `total` is not C-contiguous, so that the mask would be added to a
    copy.
    """
    if not total.flags.c_contiguous:
        raise LocalProtocolError(
            f"a mask is added in place to rows that follow each other in memory; got shape "
            f"{total.shape} with strides {total.strides}"
        )
    shape = np.array(total.shape, ">u8").tobytes()
    add_or_subtract = np.add if sign > 0 else np.subtract
    flat = total.reshape(-1)
    start = 0
    for chunk in keystream_chunks(seed, b"mask", binding_digest, shape, length=total.nbytes):
        mask = np.frombuffer(chunk, dtype=total.dtype)
        masked_chunk = flat[start : start + len(mask)]  # a view of `total`
        add_or_subtract(masked_chunk, mask, out=masked_chunk)
        start += len(mask)


@dataclass(frozen=True)
class MaskedSum(SecureSum):
    """A sum of integers under pairwise masks, modulo 2^ring_bits.

    Raises LocalProtocolError: a sum of all contributions could exceed the ring.
    """

    ring_bits: ClassVar[int] = 32
    scheme: ClassVar[str] = "plain"
    unsafe: ClassVar[bool] = False
    masks: ClassVar[str] = "pairwise"
    name: ClassVar[str] = format_sum_name(scheme, masks)
    needs_receiver_key: ClassVar[bool] = True
    needs_other_contributors: ClassVar[bool] = True
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
        """Check the settings. Raises LocalProtocolError: a sum of all contributions could need more
        bits than the ring (integers modulo 2^32 or 2^64) has, or one computer could read a single
        contribution and nobody allowed it.
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
        """Return the dtype of one ring element, little-endian unsigned of `ring_bits` bits."""
        return _WORD_BY_RING_BITS[self.ring_bits]

    @property
    def value_bytes(self) -> float:
        return self.word.itemsize

    def make_receiver(self) -> "MaskedReceiver":
        return MaskedReceiver(self)

    def make_contributor(self, me: str) -> SumContributor:
        return _MaskedContributor(self, me)

    def make_aggregator(self) -> SumAggregator:
        return OneRoundAggregator(self.make_frames(), self.add_frames)

    def list_parameters(self) -> Mapping[str, object]:
        return {**super().list_parameters(), "ring_bits": self.ring_bits}

    def encode_contribution(
        self,
        values_BD: FloatArray,
        noise_BD: IntArray | None,
        clipping: Clipping | None = None,
    ) -> RingElements:
        """Return what one contributor adds to the sum, as elements of the ring of integers modulo
        2^32 or 2^64, (B, D): its rows, clipped and in fixed point, plus the noise.

        Args:
            values_BD: B rows of D real numbers to contribute.
            noise_BD: integer noise to add, in steps of fixed point; None: no noise.
            clipping: counts the rows that are clipped and the values that are rounded to 0; None:
                nothing is counted.
        """
        # One contribution always fits 32 bits; only sums need the width of the ring.
        integers_BD = self.fixed_point.quantise_rows(values_BD, noise_BD, np.int32, clipping)
        has_ring_width = integers_BD.dtype.itemsize == self.word.itemsize
        return integers_BD.view(self.word) if has_ring_width else integers_BD.astype(self.word)

    def add_frames(self, frames: Sequence[Frame]) -> Sequence[bytes]:
        """Add all contributions modulo the ring, at the aggregator; return the sum as one blob. The
        pairwise masks of the contributors cancel in it; those shared with the receiver remain.

        Raises RemoteProtocolError: a contribution does not have exactly one blob of the right size.
        """
        for frame in frames:
            frame.require_blobs(self.agreement.contributors[frame.contributor_position], 1)
        return (self.add_elements(frames).tobytes(),)

    def add_elements(self, frames: Sequence[Frame]) -> RingElements:
        """Return the sum of the ring elements in the first blobs of contributions,
        (rows, columns).
        """
        names = self.agreement.contributors
        total = self.parse_elements(frames[0], names[frames[0].contributor_position]).copy()
        for frame in frames[1:]:
            total += self.parse_elements(frame, names[frame.contributor_position])
        return total

    def parse_elements(self, frame: Frame, sender: str) -> RingElements:
        """Return the ring elements in the first blob of a frame, as a read-only view (rows,
        columns).

        Raises RemoteProtocolError, which names `sender`: there are no elements, or not as many as
        the frame's shape says.
        """
        expected = frame.rows * frame.columns * self.word.itemsize
        if not expected or not frame.blobs or len(frame.blobs[0]) != expected:
            raise RemoteProtocolError(
                f"{sender} announced {frame.rows}x{frame.columns} values and sent other bytes"
            )
        return np.frombuffer(frame.blobs[0], dtype=self.word).reshape(frame.shape)


class _MaskedContributor(SumContributor):
    """A passive's role, which masks its numbers and needs no encryption."""

    def __init__(self, secure_sum: MaskedSum, me: str) -> None:
        """Make the role, whose set-up agrees one seed with each other contributor and one with the
        receiver.
        """
        agreement = secure_sum.agreement
        frames = secure_sum.make_frames()
        others = [name for name in agreement.contributors if name != me]
        self._seeds = PairwiseSeeds(me, (*others, agreement.receiver), frames)
        super().__init__(secure_sum, me, frames, self._seeds)

    def _protect_numbers(self, numbers_BD: NDArray[Any], binding: StepBinding) -> Sequence[bytes]:
        """Add all masks of this contributor for one step: one shared with each other contributor,
        and one shared with the receiver. Return the masked numbers as bytes, one blob.

        `numbers_BD`: B rows of D fixed-point integers modulo 2^32 or 2^64, masked in place.
        `binding`: the step and the active's message, from which the masks are derived.
        """
        self._seeds.add_cancelling_masks(binding, numbers_BD)
        self._seeds.add_shared_mask(self._sum.agreement.receiver, binding, numbers_BD, sign=1)
        return (numbers_BD.tobytes(),)

    def _export_secrets(self) -> dict[str, Any]:
        return {"seeds": self._seeds.export_secrets()}

    def _import_secrets(self, state: Mapping[str, Any]) -> None:
        self._seeds.import_secrets(state["seeds"])


class MaskedReceiver(SumReceiver):
    """The active's role, which subtracts the masks that it shares with each passive."""

    _sum: MaskedSum

    def __init__(self, secure_sum: MaskedSum) -> None:
        """Make the role, whose set-up agrees one seed with each contributor."""
        agreement = secure_sum.agreement
        frames = secure_sum.make_frames()
        self._seeds = PairwiseSeeds(agreement.receiver, agreement.contributors, frames)
        super().__init__(secure_sum, frames, self._seeds)

    def _decrypt_sum(self, frame: Frame, binding: StepBinding) -> FloatArray:
        """Subtract from the sum in a frame (message) the masks that this party shares with the
        contributors in the sum; return the sum in real numbers, (rows, columns).

        `binding`: the step and the active's message, from which the masks are derived.
        """
        self._seeds.require_completion()
        total_BD = self._sum.parse_elements(frame, self._sum.agreement.aggregator).copy()
        for peer in self._list_contributors(frame):
            self._seeds.add_shared_mask(peer, binding, total_BD, sign=-1)
        # Elements of the upper half of the ring are negative numbers.
        signed_word = np.dtype(f"<i{self._sum.word.itemsize}")
        return self._dequantise_sum(total_BD.view(signed_word), binding)

    def _list_contributors(self, frame: Frame) -> Sequence[str]:
        """Return the contributors whose values are in the sum: all of them. A sum that may lack
        some overrides this.
        """
        frame.require_blobs(self._sum.agreement.aggregator, 1)
        return self._sum.agreement.contributors

    def _forget_secrets(self) -> None:
        self._seeds.forget_secrets()

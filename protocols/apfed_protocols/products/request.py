"""What the roles of a sum of products share: parameters, blocks of people, and the messages.

Run by: every role, from the agreement only. Protects from: malformed bytes; a request, whatever it
is, parses to polynomials modulo q or raises `RemoteProtocolError`, and so does an answer to words.

Letters: n labels, K classes, B people of a block, N coefficients, L digits, U people of a
ciphertext, H = U / 2.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.checks import is_whole
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.products.ring import (
    Digits,
    ProductAgreement,
    ProductHeadroom,
    Ring,
    Words,
    inverse,
    solve_products,
    transform,
)
from apfed_protocols.randomness import derive_key
from apfed_protocols.sums.frames import Frame, FrameKind, frame_bytes
from apfed_protocols.sums.homomorphic import centred_binomial, ternary
from apfed_protocols.sums.interface import IntArray, Reading, StepBinding, SumAgreement, SumLeaks
from apfed_protocols.sums.roles import DescribedSum, KeepsSecrets
from apfed_protocols.sums.seal_cipher import require_spread

__all__ = [
    "DescribedProducts",
    "LabelValues",
    "encrypt_labels",
    "expand_key",
    "expand_label",
    "open_request",
    "request_frame",
    "secret_of",
]

_SEED_BYTES = 32
_WORD = np.dtype("<u8")


@dataclass(frozen=True)
class DescribedProducts(DescribedSum):
    """What the roles share: parameters, blocks of people, and how their words travel.

    Raises LocalProtocolError: no secure parameters fit.
    """

    products: ProductAgreement
    scheme: ClassVar[str] = "products"
    masks: ClassVar[str] = "pairwise"
    name: ClassVar[str] = "sum of products"
    rests_on: ClassVar[str] = (
        "ring learning with errors at 128-bit security, X25519 and AES-256; an active that makes "
        "its key and its labels as agreed"
    )
    leaks: ClassVar[SumLeaks] = SumLeaks(
        contribution=Reading(
            reads="Words that are uniform to it: their number, their time, and a digest of the "
            "encrypted labels that they answer.",
            protects="Masks that the passives share in pairs, over encryption under the active's "
            "key. Answers to different labels are not added.",
            remains="Who takes part, how many people, labels and classes there are. It can alter "
            "the sum of products without being noticed.",
        ),
        request=Reading(
            reads="Encrypted labels, and how many there are.",
            protects="Encryption, whose only secret key is at the active.",
            remains="That people are asked about, and when.",
        ),
        active_and_aggregator="The sum of products only: the masks among the passives remain.",
        altered="The active throws its key away with the first sum that it refuses; one session "
        "tells whoever altered it which block that was.",
    )

    def __post_init__(self) -> None:
        _ = self.headroom  # what does not fit is refused here

    @property
    def agreement(self) -> SumAgreement:  # type: ignore[override]  # a field there
        return self.products.blocks_sum

    @cached_property
    def headroom(self) -> ProductHeadroom:
        return solve_products(self.products)

    @cached_property
    def ring(self) -> Ring:
        return self.headroom.ring

    @property
    def block_rows(self) -> int:
        """People of a full block."""
        return self.headroom.ciphertexts * self.headroom.rows

    @property
    def blocks(self) -> int:
        """How many answers each passive sends; their indices go up from 0."""
        return -(-self.products.people // self.block_rows)

    def people_of(self, block: int) -> range:
        """The rows of one block, in the order of all people. Raises LocalProtocolError: there is no
        such block.
        """
        if not is_whole(block) or not 0 <= block < self.blocks:
            raise LocalProtocolError(
                f"blocks of {self.products.people} people go from 0 to {self.blocks - 1}, got "
                f"{block!r}"
            )
        first = int(block) * self.block_rows
        return range(first, min(first + self.block_rows, self.products.people))

    def parameters(self) -> Mapping[str, object]:
        """Public parameters: what the frames' fingerprint covers, and the report says."""
        found, agreed = self.headroom, self.products
        return {
            **super().parameters(),
            "people": agreed.people,
            "columns": agreed.columns,
            "labelled": agreed.labelled,
            "security": agreed.security,
            "candidates": agreed.candidates or 0,
            "poly_degree": found.degree,
            "modulus_bits": found.modulus_bits,
            "answer_bits": found.kept_bits,
            "plain_bits": found.plain_bits,
            "smudging_bits": found.smudging_bits,
            "block_people": self.block_rows,
        }

    def rounding(self) -> float:
        """Largest error of one opened product against the real one with bits, noise apart."""
        return self.fixed_point.rounding * self.products.labelled

    @property
    def request_bytes(self) -> int:
        """Bytes of the encrypted labels, the same to every passive."""
        agreed = self.products
        sizes = (_SEED_BYTES,) + (self.ring.size,) * (1 + agreed.labelled)
        if agreed.candidates is not None:
            sizes = (_SEED_BYTES * (agreed.candidates - 1), 2 * agreed.labelled, *sizes)
        return frame_bytes(sizes)

    def answer_bytes(self, block: int) -> int:
        """Bytes of one passive's answer for a block."""
        return frame_bytes([count * self.word_bytes for count in self.words(block)])

    @property
    def readable_bits(self) -> float:
        """What an active with labels of its choice and a proper key reads of one person, in bits.

        K numbers modulo q = 2^k, each under smudging noise that is uniform on 2^h integers, and
        under the noise of all passives, which lies on whole steps of q / t: what an active encrypts
        between the steps, that noise does not touch. The capacity of such a channel is at most k
        less the entropy of what is added, h + log2(deviation * sqrt(2 pi e M)) bits (Cover and
        Thomas 2006, sections 7.2 and 8.1). M counts the passives that keep their noise to
        themselves: all of them here.
        """
        deviation, passives = self.products.noise or 0, len(self.products.contributors)
        variance = 2 * math.pi * math.e * passives * deviation**2
        added = self.headroom.smudging_bits + (math.log2(variance) / 2 if deviation else 0)
        bits = self.headroom.modulus_bits - added
        return self.products.columns * max(0.0, bits)

    @property
    def answered_bits(self) -> int:
        """Bits of the combined answer about one person: no active reads more, whatever it sends."""
        found = self.headroom
        return (self.products.columns + found.stride) * found.kept_bits

    @property
    def malicious(self) -> str:
        """What an active reads that breaks the protocol; a sentence for reports."""
        one = (
            "Labels of one person alone give that person's column, summed over the passives, and "
            "no single passive's. "
        )
        if self.products.candidates is not None:
            return one + (
                f"An active whose key or labels are not as agreed is found out before anybody "
                f"answers, but for one time in {self.products.candidates} of the sessions that it "
                "begins."
            )
        return one + (
            "The active is trusted to encrypt bits under a proper key; no passive can tell. "
            "Multiples of labels give several columns in the digits of one number, fractions of a "
            "step give some that noise on votes does not hide: together "
            f"{self.readable_bits:.0f} bits of one person at most, and a key that is none "
            f"{self.answered_bits} bits, all words of the combined answer."
        )

    @property
    def word_bytes(self) -> int:
        return self.headroom.kept_bits // 8

    def words(self, block: int) -> Sequence[int]:
        """Words of each ciphertext of a block: K for each of its people, and N."""
        people, rows = len(self.people_of(block)), self.headroom.rows
        counts = (min(rows, people - first) for first in range(0, people, rows))
        return [count * self.products.columns + self.ring.degree for count in counts]

    def binding(self, block: int, request_digest: bytes) -> StepBinding:
        """What the answers for a block are about: these people, and these encrypted labels."""
        people = self.people_of(block)
        rows = f"people {people.start} to {people.stop}".encode()
        return StepBinding(
            session=self.products.session,
            step=block,
            rows=hashlib.sha256(rows).digest(),
            message=request_digest,
        )

    def pack(self, words: Words, block: int) -> list[bytes]:
        """The words of a block on the wire, a blob for each ciphertext."""
        octets = words.astype(_WORD, copy=False).view(np.uint8).reshape(-1, _WORD.itemsize)
        stops = np.cumsum(self.words(block))
        parts = np.split(octets[:, : self.word_bytes], stops[:-1])
        return [part.tobytes() for part in parts]

    def parse(self, frame: Frame, block: int, *, sender: str) -> Words:
        """The words in a frame for a block, which may each have any value. Raises
        RemoteProtocolError: too few or too many, or of another block.
        """
        people, counts = len(self.people_of(block)), self.words(block)
        if (frame.step, frame.shape) != (block, (people, self.products.columns)):
            raise RemoteProtocolError(
                f"{sender} sent block {frame.step} of shape {frame.shape}, expected block {block} "
                f"of shape {(people, self.products.columns)}"
            )
        frame.require_blobs(sender, len(counts))
        if any(
            len(blob) != count * self.word_bytes
            for blob, count in zip(frame.blobs, counts, strict=True)
        ):
            raise RemoteProtocolError(
                f"{sender} sent ciphertexts of other sizes than block {block} has; all parties "
                "must hold the same agreement"
            )
        octets = np.zeros((sum(counts), _WORD.itemsize), dtype=np.uint8)
        received = np.frombuffer(b"".join(frame.blobs), np.uint8)
        octets[:, : self.word_bytes] = received.reshape(-1, self.word_bytes)
        return octets.view(_WORD).reshape(-1)


def request_frame(
    described: DescribedProducts, fingerprint: bytes, blobs: Sequence[bytes]
) -> bytes:
    """A message of the active to every passive."""
    agreed = described.products
    return Frame(
        kind=FrameKind.REQUEST,
        name=described.name,
        party=len(agreed.contributors),
        step=0,
        rows=agreed.labelled,
        columns=agreed.columns,
        binding=described.agreement.digest,
        fingerprint=fingerprint,
        blobs=tuple(blobs),
    ).pack()


def open_request(
    described: DescribedProducts, fingerprint: bytes, request: bytes, count: int
) -> tuple[bytes, ...]:
    """The parts of such a message; RemoteProtocolError unless it is one, of `count` parts."""
    agreed, sender = described.products, described.agreement.receiver
    frame = Frame.parse(request, sender=sender)
    about = frame.kind, frame.name, frame.party, frame.step, frame.shape
    if about != (
        FrameKind.REQUEST,
        described.name,
        len(agreed.contributors),
        0,
        (agreed.labelled, agreed.columns),
    ):
        raise RemoteProtocolError(
            f"{sender} sent {frame.kind.noun} of {frame.name} of shape {frame.shape}, expected "
            f"the request of {agreed.labelled}x{agreed.columns} labels"
        )
    if (frame.binding, frame.fingerprint) != (described.agreement.digest, fingerprint):
        raise RemoteProtocolError(
            f"{sender} encrypts labels under another agreement; compare the two configurations"
        )
    frame.require_blobs(sender, count)
    return frame.blobs


# The encrypted labels: everything in a request follows from 32 secret bytes and the labels, so that
# whoever is told both makes the same bytes.


def expand_key(ring: Ring, seed: bytes) -> Digits:
    """The uniform half of the key."""
    return ring.expand(seed, b"products key")


def expand_label(ring: Ring, seed: bytes, place: int) -> Digits:
    """The uniform half of the label at this place."""
    return ring.expand(seed, b"products label", place.to_bytes(4, "big"))


def secret_of(described: DescribedProducts, root: bytes) -> IntArray:
    """The secret key that follows from the 32 secret bytes of a request."""
    return ternary(described.ring.degree, derive_key(root, b"products secret"))


def encrypt_labels(described: DescribedProducts, root: bytes, bits_nK: IntArray) -> list[bytes]:
    """Parts of a request (public seed, b of the key and of every label); a root is used once."""
    ring, seed = described.ring, derive_key(root, b"products seed")
    secret_H = transform(secret_of(described, root))
    step = ring.bits - described.headroom.plain_bits

    def zero(uniform_LN: Digits, place: int) -> Digits:
        """-a s + e for this a."""
        product_LN = inverse(transform(ring.centred(uniform_LN)) * secret_H)
        zero_LN = -np.rint(product_LN).astype(np.int64)
        key = derive_key(root, b"products error", place.to_bytes(4, "big"))
        zero_LN[0] += centred_binomial(ring.degree, key)
        return zero_LN

    blobs = [seed, ring.pack(zero(expand_key(ring, seed), 0))]
    for place, bits_K in enumerate(bits_nK):
        label_LN = zero(expand_label(ring, seed, place), place + 1)
        ring.add_at(label_LN[:, : len(bits_K)], step, bits_K)
        blobs.append(ring.pack(label_LN))
    return blobs


@dataclass(frozen=True)
class LabelValues(KeepsSecrets):
    """What a passive makes of the encrypted labels once.

    Attributes:
        digest: of the request.
        key: values of the digits of the key (b, a) at the roots of the ring, (2, L, N / 2).
        labels: values of the digits of all labels at the roots of the polynomials in Y, (H, n, F):
            F is L times the powers of X, all of a and then those of b that are asked for.
    """

    digest: bytes
    key: NDArray[np.complex128]
    labels: NDArray[np.complex128]

    @classmethod
    def of(
        cls,
        described: DescribedProducts,
        request: bytes,
        blobs: Sequence[bytes],
        shifts: Sequence[int] | None = None,
    ) -> "LabelValues":
        """Read the parts of a request.

        Args:
            described: what all parties agreed on.
            request: all of it, for the digest.
            blobs: what `encrypt_labels` made.
            shifts: powers of X by which the labels are multiplied; None: by none.

        Raises:
            RemoteProtocolError: they are no polynomials, or the key is broken to the eye.
        """
        ring, found = described.ring, described.headroom
        sender, seed = described.agreement.receiver, blobs[0]
        if len(seed) != _SEED_BYTES:
            raise RemoteProtocolError(
                f"{sender} sent a seed of {len(seed)} bytes, expected {_SEED_BYTES}"
            )
        key = ring.parse(blobs[1], sender=sender), expand_key(ring, seed)
        spread_2N = np.stack([ring.rounded(half_LN, found.kept_bits) for half_LN in key])
        require_spread(spread_2N, 1 << found.kept_bits, sender=sender)
        asked = found.folds * described.products.columns
        count = len(ring.widths) * (found.stride + asked)
        values_HnF = np.empty((found.rows // 2, len(blobs) - 2, count), dtype=np.complex128)
        for place, blob in enumerate(blobs[2:]):
            halves = expand_label(ring, seed, place), ring.parse(blob, sender=sender)
            a, b = (
                _shifted(ring.centred(half_LN), shifts[place] if shifts else 0).reshape(
                    -1, found.rows, found.stride
                )
                for half_LN in halves
            )
            digits_LFU = np.concatenate((a, b[:, :, :asked]), axis=2).swapaxes(1, 2)
            values_HnF[:, place] = transform(digits_LFU).reshape(count, -1).T
        return cls(
            digest=hashlib.sha256(request).digest(),
            key=transform(np.stack([ring.centred(half_LN) for half_LN in key])),
            labels=values_HnF,
        )


def _shifted(numbers_LN: Digits, power: int) -> Digits:
    """Times X^power: X^N is -1."""
    shifted_LN = np.roll(numbers_LN, power, axis=1)
    shifted_LN[:, :power] *= -1
    return shifted_LN

"""Secure sum of products: the active learns sum_p A_p Y and nothing else of any A_p.

Run by: the active (`ProductReceiver`: the bits Y, n people by K classes, and the only secret key),
the passives (`ProductContributor`: real matrices A_p, U people by n; one seed with each other
passive), the aggregator (`ProductCombiner`: no key at all). One round trip, in which no passive
learns Y and the aggregator nothing. Protects from curious parties, from a curious active and a
curious aggregator together while two passives are honest, and from an active that sends different
labels to different passives: their masks do not cancel then, and the aggregator refuses. Not from:
M - 1 passives and the active together; an aggregator that adds constants; or an active that breaks
the protocol, which reads other products than those with bits: see `SumOfProducts.malicious`, and
`audit`, which finds it out.

The scheme is BFV (Brakerski 2012, Fan and Vercauteren 2012) modulo q = 2^k in R = Z[X]/(X^N + 1).
R is a module over S = Z[Y]/(Y^U + 1), Y = X^stride, with the basis 1, X, ..., X^(stride - 1). So

    label j:        c_j  encrypts  m_j = sum_k Y_jk X^k          class k at the power k
    people of p:    A_j  =  sum_u A_uj Y^u                       one person a coefficient, in S
    answer:         sum_j A_j c_j  encrypts  sum_uk (A Y)_uk X^(u stride + k)

The plaintexts stay as small as the numbers in them, and a product in R by S is `stride` products in
S, U coefficients each. A passive adds a fresh encryption of zero, smudging noise (`headroom`) and,
after the rounding, masks that cancel in the sum over all passives, uniform modulo 2^kept over all
of the answer. The uniform halves of the key and of the labels are expanded from one seed.

Letters: U people of a ciphertext, K classes, S stride, n labels, N = U S coefficients, L digits, B
people of a block, C ciphertexts of a block, H = U / 2 roots.
"""

import hashlib
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.checks import is_whole
from apfed_protocols.conversation import Conversation, Outgoing
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.products.ring import (
    Digits,
    ProductAgreement,
    ProductHeadroom,
    Ring,
    Words,
    invert_transform,
    row_limit,
    solve_products,
    transform_polynomials,
)
from apfed_protocols.randomness import derive_key, fresh_key, keystream
from apfed_protocols.sums.fixed_point import check_matrix
from apfed_protocols.sums.frames import AgreedFrames, Frame, FrameKind
from apfed_protocols.sums.homomorphic import centred_binomial, ternary
from apfed_protocols.sums.interface import (
    FloatArray,
    IntArray,
    Reading,
    StepBinding,
    SumAgreement,
    SumLeaks,
)
from apfed_protocols.sums.masked import PairwiseSeeds
from apfed_protocols.sums.roles import DescribedSum, KeepsSecrets, NoSetup, Role, SumReceiver
from apfed_protocols.sums.seal_cipher import require_spread

__all__ = [
    "Candidates",
    "LabelValues",
    "ProductAgreement",
    "ProductCombiner",
    "ProductContributor",
    "ProductReceiver",
    "PublicCoin",
    "SumOfProducts",
    "encrypt_labels",
    "expand_label",
]

_BYTES = 32
_COMPLEX_BYTES = 16
_WORD = np.dtype("<u8")
_SHIFT = np.dtype(">u2")


@dataclass(frozen=True)
class SumOfProducts(DescribedSum):
    """A sum of products: parameters, blocks of people, wire encoding of words, and each role's end.

    Raises LocalProtocolError: no secure parameters fit.
    """

    products: ProductAgreement
    scheme: ClassVar[str] = "products"
    unsafe: ClassVar[bool] = False
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
    def label_bytes(self) -> int:
        """Return the memory of one encrypted label at a passive, as values at roots
        (`LabelValues`).
        """
        headroom = self.headroom
        powers = headroom.stride + headroom.folds * self.products.columns
        return headroom.rows // 2 * len(headroom.widths) * powers * _COMPLEX_BYTES

    def make_receiver(self, labels_nK: NDArray[Any]) -> "ProductReceiver":
        return ProductReceiver(self, labels_nK)

    def make_contributor(self, me: str) -> "ProductContributor":
        return ProductContributor(self, me)

    def make_combiner(self) -> "ProductCombiner":
        return ProductCombiner(self)

    @property
    def agreement(self) -> SumAgreement:  # type: ignore[override]  # a field there
        return self.products.blocks_sum

    @cached_property
    def headroom(self) -> ProductHeadroom:
        """Return the secure parameters that fit the agreement."""
        return solve_products(self.products)

    @cached_property
    def ring(self) -> Ring:
        return self.headroom.ring

    @property
    def block_rows(self) -> int:
        """Return the people of a full block."""
        return self.headroom.ciphertexts * self.headroom.rows

    @property
    def blocks(self) -> int:
        """Return the number of blocks that all people take."""
        return -(-self.products.people // self.block_rows)

    def people_of(self, block: int) -> range:
        """Return the people of one block, as a range of rows. Raises LocalProtocolError: no such
        block.
        """
        if not is_whole(block) or not 0 <= block < self.blocks:
            raise LocalProtocolError(
                f"blocks of {self.products.people} people go from 0 to {self.blocks - 1}, got "
                f"{block!r}"
            )
        first = int(block) * self.block_rows
        return range(first, min(first + self.block_rows, self.products.people))

    def list_parameters(self) -> Mapping[str, object]:
        """Return the public parameters, for the contract and the report."""
        headroom = self.headroom
        agreed = self.products
        return {
            **super().list_parameters(),
            "people": agreed.people,
            "columns": agreed.columns,
            "labelled": agreed.labelled,
            "security": agreed.security,
            "candidates": agreed.candidates or 0,
            "poly_degree": headroom.degree,
            "modulus_bits": headroom.modulus_bits,
            "answer_bits": headroom.kept_bits,
            "plain_bits": headroom.plain_bits,
            "smudging_bits": headroom.smudging_bits,
            "block_people": self.block_rows,
        }

    def compute_rounding_error(self) -> float:
        """Return the largest rounding error of one product: one step's for each label."""
        return self.fixed_point.rounding * self.products.labelled

    @property
    def readable_bits(self) -> float:
        """Return the bits of one person that an active with chosen labels and a proper key reads,
        at most.

        K numbers modulo q = 2^k, each under smudging noise that is uniform on 2^h integers, and
        under the noise of all passives, which lies on whole steps of q / t: what an active encrypts
        between the steps, that noise does not touch. The capacity of such a channel is at most k
        less the entropy of what is added, h + log2(deviation * sqrt(2 pi e M)) bits (Cover and
        Thomas 2006, sections 7.2 and 8.1). M counts the passives that keep their noise to
        themselves: all of them here.
        """
        deviation = self.products.noise or 0
        passives = len(self.products.contributors)
        variance = 2 * math.pi * math.e * passives * deviation**2
        added = self.headroom.smudging_bits + (math.log2(variance) / 2 if deviation else 0)
        bits = self.headroom.modulus_bits - added
        return self.products.columns * max(0.0, bits)

    @property
    def answer_bits(self) -> int:
        """Return the bits of the combined answer about one person: no active reads more by any
        message.
        """
        headroom = self.headroom
        return (self.products.columns + headroom.stride) * headroom.kept_bits

    @property
    def malicious(self) -> str:
        """Return a sentence for reports: what an active that breaks the protocol reads."""
        one_person = (
            "Labels of one person alone give that person's column, summed over the passives, and "
            "no single passive's. "
        )
        if self.products.candidates is not None:
            return one_person + (
                f"An active whose key or labels are not as agreed is found out before anybody "
                f"answers, but for one time in {self.products.candidates} of the sessions that it "
                "begins."
            )
        return one_person + (
            "The active is trusted to encrypt bits under a proper key; no passive can tell. "
            "Multiples of labels give several columns in the digits of one number, fractions of a "
            "step give some that noise on votes does not hide: together "
            f"{self.readable_bits:.0f} bits of one person at most, and a key that is none "
            f"{self.answer_bits} bits, all words of the combined answer."
        )

    @property
    def word_bytes(self) -> int:
        """Return the bytes of one number of an answer."""
        return self.headroom.kept_bits // 8

    def count_words(self, block: int) -> Sequence[int]:
        """Return the words of each ciphertext of a block: K for each of its people, and N."""
        people = len(self.people_of(block))
        rows = self.headroom.rows
        counts = (min(rows, people - first) for first in range(0, people, rows))
        return [count * self.products.columns + self.ring.degree for count in counts]

    def make_binding(self, block: int, request_digest: bytes) -> StepBinding:
        """Return the binding of a block's answers to its people and to the encrypted labels.

        `request_digest`: SHA-256 of the encrypted labels.
        """
        people = self.people_of(block)
        rows = f"people {people.start} to {people.stop}".encode()
        return StepBinding(
            session=self.products.session,
            step=block,
            rows=hashlib.sha256(rows).digest(),
            message=request_digest,
        )

    def pack_words(self, words: Words, block: int) -> list[bytes]:
        """Split a block's numbers into one blob for each c0 and c1, `word_bytes` a number."""
        octets = words.astype(_WORD, copy=False).view(np.uint8).reshape(-1, _WORD.itemsize)
        stops = np.cumsum(self.count_words(block))
        parts = np.split(octets[:, : self.word_bytes], stops[:-1])
        return [part.tobytes() for part in parts]

    def parse_words(self, frame: Frame, block: int, *, sender: str) -> Words:
        """Return the numbers of a block from the blobs of a frame. Raises RemoteProtocolError:
        another block, shape or size.
        """
        people = len(self.people_of(block))
        counts = self.count_words(block)
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

    @cached_property
    def _empty_request(self) -> Frame:
        """Return the frame of a request without its blobs."""
        shape = self.products.labelled, self.products.columns
        return self.make_frames().make_frame(FrameKind.REQUEST, shape)

    def pack_request(self, blobs: Sequence[bytes]) -> bytes:
        """Frame the parts of a request."""
        return replace(self._empty_request, blobs=tuple(blobs)).pack()

    def open_request(self, request: bytes, count: int) -> tuple[bytes, ...]:
        """Return the `count` parts of a request. Raises RemoteProtocolError: another shape or
        agreement.
        """
        expected = self._empty_request
        sender = self.agreement.receiver
        frame = Frame.parse(request, sender=sender)
        about = replace(frame, blobs=(), binding=expected.binding, fingerprint=expected.fingerprint)
        if about != expected:
            raise RemoteProtocolError(
                f"{sender} sent {frame.kind.noun} of {frame.name} of shape {frame.shape}, expected "
                f"the request of {expected.rows}x{expected.columns} labels"
            )
        if (frame.binding, frame.fingerprint) != (expected.binding, expected.fingerprint):
            raise RemoteProtocolError(
                f"{sender} encrypts labels under another agreement; compare the two configurations"
            )
        frame.require_blobs(sender, count)
        return frame.blobs


# The encrypted labels: everything in a request follows from 32 secret bytes and the labels, so that
# whoever is told both makes the same bytes.


def _expand_key(ring: Ring, seed: bytes) -> Digits:
    """Return a, the uniform half of the public key."""
    return ring.expand_seed(seed, b"products key")


def expand_label(ring: Ring, seed: bytes, position: int) -> Digits:
    """Return the uniform half of the label at this place."""
    return ring.expand_seed(seed, b"products label", position.to_bytes(4, "big"))


def _derive_secret_key(secure_sum: SumOfProducts, root: bytes) -> IntArray:
    """Return the ternary secret key that follows from a root."""
    return ternary(secure_sum.ring.degree, derive_key(root, b"products secret"))


def encrypt_labels(secure_sum: SumOfProducts, root: bytes, bits_nK: IntArray) -> list[bytes]:
    """Return the parts of a request: public seed, b of the key and of every label.

    A root is used once.
    """
    ring = secure_sum.ring
    seed = derive_key(root, b"products seed")
    secret_H = transform_polynomials(_derive_secret_key(secure_sum, root))
    step = ring.bits - secure_sum.headroom.plain_bits

    def encrypt_zero(uniform_LN: Digits, position: int) -> Digits:
        """Return -a s + e for this a, with e the error of this place."""
        product_LN = invert_transform(
            transform_polynomials(ring.centre_digits(uniform_LN)) * secret_H
        )
        zero_LN = -np.rint(product_LN).astype(np.int64)
        key = derive_key(root, b"products error", position.to_bytes(4, "big"))
        zero_LN[0] += centred_binomial(ring.degree, key)
        return zero_LN

    blobs = [seed, ring.pack_digits(encrypt_zero(_expand_key(ring, seed), 0))]
    for place, bits_K in enumerate(bits_nK):
        label_LN = encrypt_zero(expand_label(ring, seed, place), place + 1)
        ring.add_at(label_LN[:, : len(bits_K)], step, bits_K)
        blobs.append(ring.pack_digits(label_LN))
    return blobs


@dataclass(frozen=True)
class LabelValues(KeepsSecrets):
    """The values that a passive computes of the encrypted labels once.

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
    def from_request(
        cls,
        secure_sum: SumOfProducts,
        request: bytes,
        blobs: Sequence[bytes],
        shifts: Sequence[int] | None = None,
    ) -> "LabelValues":
        """Read the parts of a request; `shifts`: powers of X by which the labels are multiplied."""
        ring = secure_sum.ring
        headroom = secure_sum.headroom
        sender = secure_sum.agreement.receiver
        seed = blobs[0]
        if len(seed) != _BYTES:
            raise RemoteProtocolError(
                f"{sender} sent a seed of {len(seed)} bytes, expected {_BYTES}"
            )
        key = ring.parse_digits(blobs[1], sender=sender), _expand_key(ring, seed)
        spread_2N = np.stack([ring.round_digits(half_LN, headroom.kept_bits) for half_LN in key])
        require_spread(spread_2N, 1 << headroom.kept_bits, sender=sender)
        columns = headroom.folds * secure_sum.products.columns
        count = len(ring.widths) * (headroom.stride + columns)
        values_HnF = np.empty((headroom.rows // 2, len(blobs) - 2, count), dtype=np.complex128)
        for place, blob in enumerate(blobs[2:]):
            halves = expand_label(ring, seed, place), ring.parse_digits(blob, sender=sender)
            a, b = (
                _multiply_by_power(
                    ring.centre_digits(half_LN), shifts[place] if shifts else 0
                ).reshape(-1, headroom.rows, headroom.stride)
                for half_LN in halves
            )
            digits_LFU = np.concatenate((a, b[:, :, :columns]), axis=2).swapaxes(1, 2)
            values_HnF[:, place] = transform_polynomials(digits_LFU).reshape(count, -1).T
        return cls(
            digest=hashlib.sha256(request).digest(),
            key=transform_polynomials(np.stack([ring.centre_digits(half_LN) for half_LN in key])),
            labels=values_HnF,
        )


def _multiply_by_power(numbers_LN: Digits, power: int) -> Digits:
    """Multiply the polynomials by X^power, where X^N is -1."""
    shifted_LN = np.roll(numbers_LN, power, axis=1)
    shifted_LN[:, :power] *= -1
    return shifted_LN


# Whether the active encrypts labels as agreed: of many requests, all but one are opened. It is
# found out before any passive answers, but for one time in `candidates` (covert security: Aumann
# and Lindell 2007); a kept request that is as it should be holds one-hot labels under a proper key.
# An active that falls silent after the coin and tries again must count as found out, as each
# session is a new chance. Which one-hot labels it asks about is its choice.
#
# 1. The active makes `candidates` requests, each from 32 secret bytes, for labels that are
#    uniform and have nothing to do with its own, and sends the hash of each.
# 2. The passives toss a coin: each sends a hash of 32 random bytes to each other one, then the
#    bytes. While one of them is honest, nobody knows the outcome before step 1 is over.
# 3. Told the same outcome by all, the active sends the secret bytes of all requests but that
#    one, the request that is kept, and for each label how far it is from the true class, modulo K.
# 4. The passives make every opened request again and compare hashes. They multiply kept label j
#    by X^shift: its class is then k or k + K, and an answer adds the two, unread before.


class Candidates(KeepsSecrets):
    """The active's requests of which all but one are opened (steps 1 and 3 above)."""

    def __init__(
        self, secure_sum: SumOfProducts, frames: AgreedFrames, classes_n: IntArray
    ) -> None:
        """Draw the secret bytes of each candidate and commit to the hashes of all their
        requests.
        """
        self._sum_of_products = secure_sum
        self._frames = frames
        self._classes_n = classes_n
        self._opening = threading.Lock()
        self._roots = [fresh_key() for _ in range(secure_sum.products.candidates or 0)]
        hashes = [_hash_candidate(secure_sum, root) for root in self._roots]
        self._hashes = b"".join(hashes)
        self.commitment = secure_sum.pack_request((self._hashes,))

    def open_candidates(self, challenges: Mapping[str, bytes]) -> tuple[bytes, IntArray]:
        """Return the message of step 3 and the secret key of the request that is used; once.

        `challenges`: each passive's challenge, by its name.
        """
        self._frames.require_own_process()  # before the lock, which a fork may have copied shut
        described = self._sum_of_products
        chosen = _parse_challenges(described, self._frames, challenges, self._hashes)
        with self._opening:
            if not self._roots:
                raise LocalProtocolError("the candidates of this request were opened already")
            roots = self._roots
            self._roots = []
        root = roots.pop(chosen)
        columns = described.products.columns
        classes_n = _draw_classes(described, root)
        shifts_n = ((self._classes_n - classes_n) % columns).astype(_SHIFT)
        blobs = encrypt_labels(described, root, np.eye(columns, dtype=np.int64)[classes_n])
        parts = (b"".join(roots), shifts_n.tobytes(), *blobs)
        return described.pack_request(parts), _derive_secret_key(described, root)


class PublicCoin(KeepsSecrets):
    """A passive's end of the coin toss that names the request to keep (step 2 above)."""

    def __init__(
        self, me: str, secure_sum: SumOfProducts, frames: AgreedFrames, commitment: bytes
    ) -> None:
        """Read the active's hashes and draw this party's part of the coin.

        `commitment`: the active's message with the hashes of its candidates.
        """
        agreed = secure_sum.products
        (self.hashes,) = secure_sum.open_request(commitment, 1)
        if len(self.hashes) != _BYTES * (agreed.candidates or 0):
            raise RemoteProtocolError(
                f"{agreed.receiver} commits to {len(self.hashes)} bytes of requests, expected "
                f"{_BYTES * (agreed.candidates or 0)}"
            )
        self.me = me
        self._names = agreed.contributors
        self._frames = frames
        self._candidates = agreed.candidates or 1
        self._coins = {me: fresh_key()}
        self._commitments: dict[str, bytes] = {}

    def start(self) -> Sequence[Outgoing]:
        """Send every other passive the hash of this party's part."""
        return self._address_to_all(self._hash_promise(self.me, self._coins[self.me]))

    def receive(self, sender: str, body: bytes) -> Sequence[Outgoing]:
        """Take a hash or, from a party that promised already, its part of the coin. Raises
        RemoteProtocolError: a message out of turn, or a part that does not match its hash.
        """
        if sender not in self._names or sender == self.me or sender in self._coins:
            raise RemoteProtocolError(f"{sender} sent {self.me} a message of a coin out of turn")
        frame = self._frames.open_own_setup(body, sender, self.me)
        if len(frame.blobs) != 1 or len(frame.blobs[0]) != _BYTES:
            raise RemoteProtocolError(f"{sender} sent no {_BYTES} bytes of a coin")
        coin = frame.blobs[0]
        if sender in self._commitments:
            if self._hash_promise(sender, coin) != self._commitments[sender]:
                raise RemoteProtocolError(
                    f"{sender} sent other bytes for the coin than it promised, or got other hashes "
                    f"of {self._frames.agreement.receiver}"
                )
            self._coins[sender] = coin
            return ()
        self._commitments[sender] = coin
        # This party's own bytes stay secret until all the others are bound to theirs.
        bound = len(self._commitments) == len(self._names) - 1
        return self._address_to_all(self._coins[self.me]) if bound else ()

    @property
    def is_finished(self) -> bool:
        return len(self._coins) == len(self._names)

    @property
    def chosen_candidate(self) -> int:
        """Return the number of the request to keep. Raises LocalProtocolError: the toss is not
        finished.
        """
        if not self.is_finished:
            raise LocalProtocolError(f"{self.me} tosses a coin still; finish that conversation")
        coins = b"".join(self._coins[name] for name in self._names)
        number = hashlib.sha256(b"products coin" + self.hashes + coins).digest()
        return int.from_bytes(number, "big") % self._candidates

    def pack_challenge(self) -> bytes:
        """Frame the outcome of the toss for the active."""
        return self._frames.pack_setup(_encode_challenge(self.chosen_candidate, self.hashes))

    def _hash_promise(self, name: str, coin: bytes) -> bytes:
        """Return the hash that binds a party to its part, and to the active's hashes."""
        parts = (b"products promise", name.encode(), self.hashes, coin)
        framed = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return hashlib.sha256(framed).digest()

    def _address_to_all(self, coin: bytes) -> Sequence[Outgoing]:
        """Return one message for each other passive."""
        message = self._frames.pack_setup(coin)
        return tuple(Outgoing(name, message) for name in self._names if name != self.me)


def _audit_request(secure_sum: SumOfProducts, coin: PublicCoin, request: bytes) -> LabelValues:
    """Recompute every revealed request and compare hashes (step 4); return the values of the
    request that is used. Raises RemoteProtocolError: the active cheated, or sent other sizes.
    """
    agreed = secure_sum.products
    chosen = coin.chosen_candidate
    parts = secure_sum.open_request(request, 4 + agreed.labelled)
    roots = parts[0]
    shifts = np.frombuffer(parts[1][: len(parts[1]) & ~1], _SHIFT)
    sizes = len(coin.hashes) - _BYTES, _SHIFT.itemsize * agreed.labelled
    if (len(roots), len(parts[1])) != sizes or shifts.max(initial=0) >= agreed.columns:
        raise RemoteProtocolError(
            f"{agreed.receiver} opened requests in {len(roots)} bytes and shifts labels in "
            f"{len(parts[1])}, expected {sizes[0]} and {sizes[1]}, shifts below {agreed.columns}"
        )
    hashes = [
        _hash_candidate(secure_sum, roots[start : start + _BYTES])
        for start in range(0, len(roots), _BYTES)
    ]
    blobs = parts[2:]
    hashes.insert(chosen, _hash_request(secure_sum.pack_request(blobs)))
    if b"".join(hashes) != coin.hashes:
        raise RemoteProtocolError(
            f"{agreed.receiver} cheated: the requests that it opened, or the one that is kept, are "
            "not those that it committed to; nothing is answered"
        )
    return LabelValues.from_request(secure_sum, request, blobs, [int(shift) for shift in shifts])


def _draw_classes(secure_sum: SumOfProducts, root: bytes) -> IntArray:
    """Draw the labels of a request from its secret bytes, uniform to within 2^-50."""
    agreed = secure_sum.products
    key = derive_key(root, b"products classes")
    words = np.frombuffer(keystream(key, length=8 * agreed.labelled), "<u8")
    return (words % np.uint64(agreed.columns)).astype(np.int64)


def _hash_candidate(secure_sum: SumOfProducts, root: bytes) -> bytes:
    """Return the hash of the request that follows from a candidate's secret bytes."""
    bits_nK = np.eye(secure_sum.products.columns, dtype=np.int64)[_draw_classes(secure_sum, root)]
    blobs = encrypt_labels(secure_sum, root, bits_nK)
    return _hash_request(secure_sum.pack_request(blobs))


def _hash_request(request: bytes) -> bytes:
    """Return the hash by which the active commits to a request."""
    return hashlib.sha256(b"products candidate" + request).digest()


def _encode_challenge(chosen: int, hashes: bytes) -> bytes:
    """Return the bytes that name the chosen candidate, and the hashes that it was chosen among."""
    return chosen.to_bytes(2, "big") + hashlib.sha256(hashes).digest()


def _parse_challenges(
    secure_sum: SumOfProducts, frames: AgreedFrames, challenges: Mapping[str, bytes], hashes: bytes
) -> int:
    """Return the candidate that all passives name. Raises RemoteProtocolError: one is missing, or
    they name different ones.

    `challenges`: each passive's challenge, by its name. `hashes`: of the candidates, as the active
    sent them.
    """
    agreed = secure_sum.products
    if set(challenges) != set(agreed.contributors):
        raise RemoteProtocolError(
            f"{agreed.receiver} waits for a challenge of each of {', '.join(agreed.contributors)}, "
            f"got {', '.join(sorted(challenges)) or 'none'}"
        )
    bodies = {
        b"".join(frames.open_own_setup(body, name, agreed.receiver).blobs)
        for name, body in challenges.items()
    }
    possible = {
        _encode_challenge(candidate, hashes): candidate
        for candidate in range(agreed.candidates or 0)
    }
    if len(bodies) != 1 or not bodies <= set(possible):
        raise RemoteProtocolError(
            "the passives do not name one of the requests that were committed to, all the same; "
            "nothing is opened"
        )
    return possible[bodies.pop()]


class ProductReceiver(SumReceiver):
    """The active's end; the secret key is gone once it refused a sum. Labels are bits."""

    _sum: SumOfProducts

    def __init__(self, secure_sum: SumOfProducts, labels_nK: NDArray[Any]) -> None:
        """Encrypt the labels, or with candidates commit to requests. Raises LocalProtocolError:
        labels that are no bits, or of another shape.
        """
        frames = secure_sum.make_frames()
        super().__init__(secure_sum, frames, NoSetup())
        self._secret: NDArray[np.complex128] | None = None
        self._request = self._digest = b""
        self._candidates: Candidates | None = None
        bits_nK = _check_bits(labels_nK, secure_sum.products)
        if secure_sum.products.candidates is not None:
            self._candidates = Candidates(secure_sum, frames, bits_nK.argmax(axis=1))
            return
        root = fresh_key()
        blobs = encrypt_labels(secure_sum, root, bits_nK)
        self._store_request(secure_sum.pack_request(blobs), _derive_secret_key(secure_sum, root))

    def get_commitment(self) -> bytes:
        """Return the hashes of all candidates, the same bytes for every passive."""
        return self._require_candidates().commitment

    def make_request(self, challenges: Mapping[str, bytes] | None = None) -> bytes:
        """Return the encrypted labels, the same bytes for every passive.

        Args:
            challenges: of each passive, by its authenticated name; given the first time, and
                exactly where the agreement asks for candidates.
        """
        self._require_no_refusal()
        if challenges is not None:
            self._store_request(*self._require_candidates().open_candidates(challenges))
        if not self._request:
            raise LocalProtocolError("the labels are sent once the passives' challenges came")
        return self._request

    def _require_candidates(self) -> Candidates:
        """Return the candidates. Raises LocalProtocolError: the agreement has none."""
        if self._candidates is None:
            raise LocalProtocolError("this agreement has no candidates: request the labels")
        return self._candidates

    def _store_request(self, request: bytes, secret_N: IntArray) -> None:
        """Keep the request and the transformed secret key."""
        self._request = request
        self._secret = transform_polynomials(secret_N)
        self._digest = hashlib.sha256(request).digest()

    def open_block(self, block: int, combined: bytes) -> FloatArray:
        """Decrypt the sum of products of one block's people, (people, K) in float64."""
        described = self._sum
        self.make_request()  # where it is due still, there is nothing to open
        shape = len(described.people_of(block)), described.products.columns
        return self.decode(combined, shape, described.make_binding(block, self._digest))

    def _open(self, frame: Frame, binding: StepBinding) -> FloatArray:
        """Decrypt one block: c0 + c1 s, rounded to steps of q / t; return real numbers, (people,
        K).
        """
        described = self._sum
        headroom = self._sum.headroom
        columns = described.products.columns
        words = described.parse_words(frame, binding.step, sender=described.agreement.combiner)
        integers_BK = np.empty(frame.shape, dtype=np.int64)
        start = 0
        for place, count in enumerate(described.count_words(binding.step)):
            people = (count - described.ring.degree) // columns
            c0, c1_N = np.split(words[start : start + count], [people * columns])
            phase_US = self._multiply_by_secret(c1_N).reshape(headroom.rows, headroom.stride)
            phase_UK = c0.reshape(people, columns) + self._fold_classes(phase_US[:people])
            first = place * headroom.rows
            start = start + count
            integers_BK[first : first + people] = self._round_to_steps(phase_UK, binding)
        self._require_range(integers_BK, binding)
        return described.fixed_point.dequantise_sum(integers_BK)

    def _fold_classes(self, phase_US: Words) -> Words:
        """Add, for each class, the numbers at its one or two powers of X."""
        folds = self._sum.headroom.folds
        columns = self._sum.products.columns
        parts = phase_US[:, : folds * columns].reshape(-1, folds, columns)
        folded: Words = parts.sum(axis=1, dtype=np.uint64)
        return folded

    def _multiply_by_secret(self, c1_N: Words) -> Words:
        """Multiply c1 by s modulo 2^64, exactly: 16 bits of c1 at a time."""
        assert self._secret is not None
        total_N = np.zeros_like(c1_N)
        for shift in range(0, self._sum.headroom.kept_bits, 16):
            part_N = (c1_N >> np.uint64(shift)) & np.uint64(2**16 - 1)
            product_N = np.rint(
                invert_transform(transform_polynomials(part_N) * self._secret)
            ).astype(np.int64)
            total_N += product_N.view(np.uint64) << np.uint64(shift)
        return total_N

    def _round_to_steps(self, phase: Words, binding: StepBinding) -> IntArray:
        """Round these words to integers modulo t; raise if noise is beyond the honest bound."""
        headroom = self._sum.headroom
        unused = np.uint64(64 - headroom.kept_bits)
        signed = (phase << unused).view(np.int64) >> np.int64(unused)
        step_bits = headroom.kept_bits - headroom.plain_bits
        integers = (signed + (1 << (step_bits - 1))) >> step_bits
        noise = signed - (integers << step_bits)
        if not -headroom.noise_bound <= noise.min() <= noise.max() <= headroom.noise_bound:
            raise self._make_range_error(binding)
        half = 1 << (headroom.plain_bits - 1)
        return np.where(integers == half, -half, integers)

    def _require_range(self, integers_BK: IntArray, binding: StepBinding) -> None:
        """Raise RemoteProtocolError if a sum lies beyond what honest passives can add up to."""
        described = self._sum
        noise = described.fixed_point.largest - described.fixed_point.levels
        limit = len(described.agreement.contributors) * (row_limit(described.products) + noise)
        if not -limit <= integers_BK.min() <= integers_BK.max() <= limit:
            raise self._make_range_error(binding)

    def _forget_secrets(self) -> None:
        self._secret = None


class ProductContributor(Role):
    def __init__(self, secure_sum: SumOfProducts, me: str) -> None:
        """Make a passive's role, which agrees one mask seed with each other passive."""
        frames = secure_sum.make_frames()
        others = [name for name in secure_sum.agreement.contributors if name != me]
        secure_sum.agreement.find_position(me)
        self.me = me
        self._products = secure_sum
        self._seeds = PairwiseSeeds(me, others, frames)
        self._coin: PublicCoin | None = None
        self._labels: LabelValues | None = None
        super().__init__(frames, self._seeds)

    def toss_coin(self, commitment: bytes) -> Conversation:
        """Start the conversation among the passives that draws which candidate is used.

        `commitment`: the active's message with the hashes of its candidates.
        """
        described = self._products
        if described.products.candidates is None:
            raise LocalProtocolError("this agreement has no candidates: accept the request")
        if self._coin is not None:
            raise RemoteProtocolError(
                f"{described.agreement.receiver} sent a second commitment to {self.me}"
            )
        self._coin = PublicCoin(self.me, described, self._frames, commitment)
        return self._coin

    def pack_challenge(self) -> bytes:
        """Return the challenge that names the candidate to use."""
        return self._require_coin().pack_challenge()

    def _require_coin(self) -> PublicCoin:
        """Return the coin. Raises LocalProtocolError: none was tossed yet."""
        if self._coin is None:
            raise LocalProtocolError(f"{self.me} has tossed no coin yet")
        return self._coin

    def accept_request(self, request: bytes) -> None:
        """Take the encrypted labels, once; with candidates, check those that were revealed.

        `request`: what the active sent.
        """
        described = self._products
        if self._labels is not None:
            raise RemoteProtocolError(
                f"{described.agreement.receiver} sent a second request to {self.me}"
            )
        if described.products.candidates is not None:
            self._labels = _audit_request(described, self._require_coin(), request)
            return
        blobs = described.open_request(request, 2 + described.products.labelled)
        self._labels = LabelValues.from_request(described, request, blobs)

    def answer_block(
        self, block: int, rows_Bn: FloatArray, noise_BK: IntArray | None = None
    ) -> bytes:
        """Return the protected products of one block's people; blocks rise, each is answered once.

        Args:
            block: its index.
            rows_Bn: float32 or float64, the rows of A of `people_of(block)`.
            noise_BK: steps of fixed point, from `apfed_protocols.noise` under a key of this party;
                given exactly where the agreement says noise.
        """
        described = self._products
        shape = len(described.people_of(block)), described.products.columns
        integers_Bn = self._quantise_rows(rows_Bn, shape[0])
        agreed = noise_BK is not None or described.agreement.noise is not None
        noise_BK = described.fixed_point.check_noise(noise_BK, shape) if agreed else None
        if self._labels is None:
            raise LocalProtocolError(f"{self.me} has no labels yet; accept the request first")
        self._seeds.require_completion()
        binding = described.make_binding(block, self._labels.digest)
        self._frames.begin_step(binding)
        words = self._round_to_words(
            *self._compute_ciphertexts(integers_Bn, self._labels), noise_BK, shape
        )
        self._seeds.add_cancelling(binding, words)
        return self._frames.pack_contribution(
            self.me, binding, shape, described.pack_words(words, block)
        )

    def answer_blocks(
        self, rows_Un: FloatArray, noise_UK: IntArray | None = None
    ) -> Iterator[bytes]:
        """Yield the answer to each block, from the rows and the noise of all people."""
        for block in range(self._products.blocks):
            people = self._products.people_of(block)
            rows = slice(people.start, people.stop)
            yield self.answer_block(
                block, rows_Un[rows], None if noise_UK is None else noise_UK[rows]
            )

    def _quantise_rows(self, rows_Bn: FloatArray, people: int) -> IntArray:
        """Return a block's rows in fixed point, (people, n). Raises LocalProtocolError: another
        shape, or a row beyond `row_bound`.
        """
        agreed = self._products.products
        levels = self._products.fixed_point.levels
        if check_matrix(rows_Bn).shape != (people, agreed.labelled):
            raise LocalProtocolError(
                f"the block has rows of shape {(people, agreed.labelled)}, got {rows_Bn.shape}"
            )
        with np.errstate(over="ignore"):  # infinite is beyond the bound, too
            scaled_Bn = np.rint(rows_Bn * np.float64(levels / agreed.row_bound))
        if np.abs(scaled_Bn).sum(axis=1).max() > row_limit(agreed):
            raise LocalProtocolError(
                f"a row of {self.me} adds up to more than row_bound = {agreed.row_bound:g} in "
                "magnitude; scale the rows, or agree on a larger bound"
            )
        return scaled_Bn.astype(np.int64)

    def _compute_ciphertexts(
        self, integers_Bn: IntArray, labels: LabelValues
    ) -> tuple[Digits, Digits]:
        """Return the digits of smudged c0, where a number is asked for, and of c1.

        Their shapes are (L, C, U, K) and (L, C, N).
        """
        headroom = self._products.headroom
        ring = self._products.ring
        count = -(-len(integers_Bn) // headroom.rows)
        columns = self._products.products.columns
        padded = np.zeros((count * headroom.rows, integers_Bn.shape[1]))
        padded[: len(integers_Bn)] = integers_Bn
        values_CnH = transform_polynomials(padded.reshape(count, headroom.rows, -1).swapaxes(1, 2))
        products_HCF = np.ascontiguousarray(values_CnH.transpose(2, 0, 1)) @ labels.labels
        products_CFU = invert_transform(np.ascontiguousarray(products_HCF.transpose(1, 2, 0)))
        zeros_2LCN = self._encrypt_zeros(labels, count)
        places = (len(ring.widths), count, headroom.rows, -1)
        sums_LCUF = products_CFU.reshape(count, len(ring.widths), -1, headroom.rows).transpose(
            1, 0, 3, 2
        )
        c1_LCUS = np.rint(sums_LCUF[..., : headroom.stride] + zeros_2LCN[1].reshape(places))
        b_LCUF = zeros_2LCN[0].reshape(places)[..., : headroom.folds * columns]
        c0_LCUF = np.rint(sums_LCUF[..., headroom.stride :] + b_LCUF).astype(np.int64)
        c0_LCUK = c0_LCUF.reshape(*c0_LCUF.shape[:3], headroom.folds, columns).sum(axis=3)
        c1_LCN = c1_LCUS.astype(np.int64).reshape(len(ring.widths), count, ring.degree)
        c1_LCN[0] += centred_binomial(count * ring.degree).reshape(count, -1)
        self._smudge(c0_LCUK)
        return c0_LCUK, c1_LCN

    def _encrypt_zeros(self, labels: LabelValues, count: int) -> NDArray[np.float64]:
        """Return fresh (b u, a u) for so many ciphertexts; the errors come later, in digits."""
        u_CN = ternary(count * self._products.ring.degree).reshape(count, -1)
        return invert_transform(labels.key[:, :, None] * transform_polynomials(u_CN))

    def _smudge(self, c0_LCUK: Digits) -> None:
        """Add the uniform noise that hides A and this party's own errors (smudging)."""
        self._products.ring.add_uniform(c0_LCUK, self._products.headroom.smudging_bits)

    def _round_to_words(
        self, c0_LCUK: Digits, c1_LCN: Digits, noise_BK: IntArray | None, shape: tuple[int, int]
    ) -> Words:
        """Round a block's ciphertexts to `kept_bits`, add the noise for privacy, and join c0 and c1
        of each.
        """
        headroom = self._products.headroom
        ring = self._products.ring
        c0_BK = ring.round_digits(c0_LCUK, headroom.kept_bits).reshape(-1, shape[1])[: shape[0]]
        if noise_BK is not None:
            step = np.uint64(headroom.kept_bits - headroom.plain_bits)
            c0_BK = c0_BK + (noise_BK.view(np.uint64) << step)
        c1_CN = ring.round_digits(c1_LCN, headroom.kept_bits)
        parts: list[Words] = []
        for place, c1_N in enumerate(c1_CN):
            first = place * headroom.rows
            parts += [c0_BK[first : first + headroom.rows].reshape(-1), c1_N]
        return np.concatenate(parts)


class ProductCombiner(Role):
    def __init__(self, secure_sum: SumOfProducts) -> None:
        self._products = secure_sum
        super().__init__(secure_sum.make_frames(), NoSetup())

    def combine_block(self, block: int, answers: Mapping[str, bytes]) -> bytes:
        """Add one answer of each passive for one block; blocks go up."""
        described = self._products
        described.people_of(block)
        frames = self._frames.open_contributions(answers, None)
        total: Words | int = 0
        for name, frame in zip(described.agreement.contributors, frames, strict=True):
            total = total + described.parse_words(frame, block, sender=name)
        assert not isinstance(total, int)
        return self._frames.sum_of(frames, described.pack_words(total, block))


def _check_bits(labels_nK: object, agreement: ProductAgreement) -> IntArray:
    """Return the labels as integers, (n, K). Raises LocalProtocolError: another shape, numbers
    other than 0 and 1, or with candidates rows that are not one-hot.
    """
    shape = agreement.labelled, agreement.columns
    if type(labels_nK) is not np.ndarray or labels_nK.shape != shape:
        raise LocalProtocolError(
            f"the labels are an array of shape {shape}, got {type(labels_nK).__name__} of shape "
            f"{np.shape(labels_nK)}"  # type: ignore[call-overload]  # whatever it is
        )
    if agreement.candidates is not None and (labels_nK != 0).sum(axis=1).tolist() != [1] * shape[0]:
        raise LocalProtocolError("with candidates every row of the labels has one class")
    if labels_nK.dtype.kind not in "biuf" or not np.isin(labels_nK, (0, 1)).all():
        raise LocalProtocolError("the labels are bits, 0 or 1; got other numbers")
    return labels_nK.astype(np.int64)

"""Secure sum of products: the active learns sum_p A_p Y and nothing else of any A_p.

Run by: the active (`ProductReceiver`: the bits Y, n people by K classes, and the only secret key),
the passives (`ProductContributor`: real matrices A_p, U people by n; one seed with each other
passive), the aggregator (`ProductAggregator`: no key at all). One round trip, in which no passive
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
S, U coefficients each. A passive adds a fresh encryption of zero, smudging noise (`parameters`)
and, after the rounding, masks that cancel in the sum over all passives, uniform modulo 2^kept over
all of the answer. The uniform halves of the key and of the labels are expanded from one seed.

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
    ProductParameters,
    Ring,
    Spectrum,
    Words,
    compute_row_limit,
    invert_transform,
    solve_products,
    transform_polynomials,
)
from apfed_protocols.randomness import derive_key, fresh_key, keystream
from apfed_protocols.sums.fixed_point import check_matrix
from apfed_protocols.sums.frames import AgreedFrames, Frame, FrameKind
from apfed_protocols.sums.homomorphic import draw_centred_binomial, draw_ternary
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
from apfed_protocols.sums.seal_cipher import require_uniform_key

__all__ = [
    "Candidates",
    "CoinToss",
    "LabelValues",
    "ProductAggregator",
    "ProductAgreement",
    "ProductContributor",
    "ProductReceiver",
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
    """A sum of products under one agreement: its parameters, its blocks of people, the wire format
    of its numbers, and its roles.

    Raises LocalProtocolError: no secure parameters fit.
    """

    product_agreement: ProductAgreement
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
        """Raise LocalProtocolError if no secure parameters fit the agreement."""
        _ = self.parameters  # computed now, since it raises if nothing fits

    @property
    def label_bytes(self) -> int:
        """Return the bytes of memory that one encrypted label takes at a passive, transformed
        (`LabelValues`).
        """
        parameters = self.parameters
        powers = parameters.powers_per_person + parameters.folds * self.product_agreement.columns
        return (
            parameters.people_per_ciphertext
            // 2
            * len(parameters.digit_widths)
            * powers
            * _COMPLEX_BYTES
        )

    def make_receiver(self, labels_nK: NDArray[Any]) -> "ProductReceiver":
        """Return the active's role with its n labels, bits of shape (labels, classes)."""
        return ProductReceiver(self, labels_nK)

    def make_contributor(self, me: str) -> "ProductContributor":
        return ProductContributor(self, me)

    def make_aggregator(self) -> "ProductAggregator":
        return ProductAggregator(self)

    @property
    def agreement(self) -> SumAgreement:  # type: ignore[override]  # a field there
        """Return the agreement of the sum that the aggregator computes for each block."""
        return self.product_agreement.blocks_sum

    @cached_property
    def parameters(self) -> ProductParameters:
        """Return the secure parameters that fit the agreement."""
        return solve_products(self.product_agreement)

    @cached_property
    def ring(self) -> Ring:
        return self.parameters.ring

    @property
    def people_per_block(self) -> int:
        """Return the number of people in a full block."""
        return self.parameters.ciphertext_count * self.parameters.people_per_ciphertext

    @property
    def block_count(self) -> int:
        """Return the number of blocks into which all people are divided."""
        return -(-self.product_agreement.people // self.people_per_block)

    def get_block_people(self, block: int) -> range:
        """Return the people of one block, as a range of rows of the matrices. Raises
        LocalProtocolError: no block has that number.
        """
        if not is_whole(block) or not 0 <= block < self.block_count:
            raise LocalProtocolError(
                f"blocks of {self.product_agreement.people} people go from 0 to "
                f"{self.block_count - 1}, got {block!r}"
            )
        first = int(block) * self.people_per_block
        return range(first, min(first + self.people_per_block, self.product_agreement.people))

    def list_parameters(self) -> Mapping[str, object]:
        """Return the public parameters, for the contract and the report."""
        parameters = self.parameters
        agreed = self.product_agreement
        return {
            **super().list_parameters(),
            "people": agreed.people,
            "columns": agreed.columns,
            "labelled": agreed.labelled,
            "security": agreed.security,
            "candidates": agreed.candidates or 0,
            "poly_degree": parameters.degree,
            "modulus_bits": parameters.modulus_bits,
            "answer_bits": parameters.answer_modulus_bits,
            "plain_bits": parameters.plain_bits,
            "smudging_bits": parameters.smudging_bits,
            "block_people": self.people_per_block,
        }

    def compute_rounding_error(self) -> float:
        """Return the largest rounding error of one product, in real numbers: for each label half a
        step of fixed point of each contributor.
        """
        return self.fixed_point.max_rounding_error * self.product_agreement.labelled

    @property
    def readable_bits(self) -> float:
        """Return the most bits about one person that a malicious active with a proper key can read
        by encrypting other numbers than bits as labels.

        The answer has K numbers about a person, one for each class, modulo q = 2^k. To each number
        two noises are added: smudging noise, uniform on 2^h integers; and the differential-privacy
        noise of all M passives, which lies on whole steps of q / t, so that it does not hide what
        an active encrypts between the steps. The capacity of such a channel is at most k less the
        entropy of the noise, h + log2(deviation * sqrt(2 pi e M)) bits (Cover and Thomas 2006,
        sections 7.2 and 8.1).
        """
        deviation = self.product_agreement.noise or 0
        passives = len(self.product_agreement.contributors)
        privacy_entropy = 0.0
        if deviation:
            # Of the sum of M Gaussians: log2(deviation * sqrt(2 pi e M)).
            privacy_entropy = math.log2(2 * math.pi * math.e * passives * deviation**2) / 2
        noise_entropy = self.parameters.smudging_bits + privacy_entropy
        capacity = self.parameters.modulus_bits - noise_entropy
        return self.product_agreement.columns * max(0.0, capacity)

    @property
    def answer_bits(self) -> int:
        """Return the bits of the combined answer about one person, which bound what an active can
        read about the person by whatever messages it sends.
        """
        parameters = self.parameters
        return (
            self.product_agreement.columns + parameters.powers_per_person
        ) * parameters.answer_modulus_bits

    @property
    def malicious(self) -> str:
        """Return sentences for reports: what an active that breaks the protocol can read."""
        one_person = (
            "Labels of one person alone give that person's column, summed over the passives, and "
            "no single passive's. "
        )
        if self.product_agreement.candidates is not None:
            return one_person + (
                f"An active whose key or labels are not as agreed is found out before anybody "
                f"answers, but for one time in {self.product_agreement.candidates} of the "
                "sessions that it begins."
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
        return self.parameters.answer_modulus_bits // 8

    def count_words(self, block: int) -> Sequence[int]:
        """Return how many words (numbers modulo 2^answer_modulus_bits) are sent for each ciphertext
        (c0, c1)
        of a block: of c0 one for each person and class, of c1 all N, the ring degree.
        """
        block_people = len(self.get_block_people(block))
        people_per_ciphertext = self.parameters.people_per_ciphertext  # in one ciphertext
        counts = []
        for first in range(0, block_people, people_per_ciphertext):
            people_count = min(people_per_ciphertext, block_people - first)
            counts.append(people_count * self.product_agreement.columns + self.ring.degree)
        return counts

    def make_binding(self, block: int, request_digest: bytes) -> StepBinding:
        """Return the binding of all answers about a block of people: the block's number as the
        step, its people, and the encrypted labels. Answers with different bindings are not added.

        `request_digest`: SHA-256 of the request with the encrypted labels.
        """
        people = self.get_block_people(block)
        rows = f"people {people.start} to {people.stop}".encode()
        return StepBinding(
            session=self.product_agreement.session,
            step=block,
            rows=hashlib.sha256(rows).digest(),
            message=request_digest,
        )

    def pack_words(self, words: Words, block: int) -> list[bytes]:
        """Encode the words of a block's answer as one blob for each ciphertext: the words of c0,
        then those of c1, in `word_bytes` bytes each.
        """
        all_bytes = words.astype(_WORD, copy=False).view(np.uint8).reshape(-1, _WORD.itemsize)
        ends = np.cumsum(self.count_words(block))
        bytes_by_ciphertext = np.split(all_bytes[:, : self.word_bytes], ends[:-1])
        return [word_bytes.tobytes() for word_bytes in bytes_by_ciphertext]

    def parse_words(self, frame: Frame, block: int, *, sender: str) -> Words:
        """Decode the words of a block's answer from a frame (message), whose blobs `pack_words`
        made; return them joined, (words of all ciphertexts,).

        Raises RemoteProtocolError, which names `sender`: the frame has another block, shape or
        size.
        """
        people = len(self.get_block_people(block))
        counts = self.count_words(block)
        if (frame.step, frame.shape) != (block, (people, self.product_agreement.columns)):
            raise RemoteProtocolError(
                f"{sender} sent block {frame.step} of shape {frame.shape}, expected block {block} "
                f"of shape {(people, self.product_agreement.columns)}"
            )
        frame.require_blobs(sender, len(counts))
        expected_sizes = [count * self.word_bytes for count in counts]
        if [len(blob) for blob in frame.blobs] != expected_sizes:
            raise RemoteProtocolError(
                f"{sender} sent ciphertexts of other sizes than block {block} has; all parties "
                "must hold the same agreement"
            )
        all_bytes = np.zeros((sum(counts), _WORD.itemsize), dtype=np.uint8)
        received = np.frombuffer(b"".join(frame.blobs), np.uint8)
        all_bytes[:, : self.word_bytes] = received.reshape(-1, self.word_bytes)
        return all_bytes.view(_WORD).reshape(-1)

    @cached_property
    def _empty_request(self) -> Frame:
        """Return the header of a request: a frame of shape (labels, classes), that of the labels,
        without blobs.
        """
        shape = self.product_agreement.labelled, self.product_agreement.columns
        return self.make_frames().make_frame(FrameKind.REQUEST, shape)

    def pack_request(self, blobs: Sequence[bytes]) -> bytes:
        """Encode a request of the active, or its commitment to requests, with these blobs."""
        return replace(self._empty_request, blobs=tuple(blobs)).pack()

    def parse_request(self, request: bytes, count: int) -> tuple[bytes, ...]:
        """Decode a request of the active, encoded by `pack_request`; return its blobs. Raises
        RemoteProtocolError: the request is malformed, has another shape or agreement, or does not
        have `count` blobs.
        """
        expected = self._empty_request
        sender = self.agreement.receiver
        frame = Frame.parse(request, sender=sender)
        # Without the digests of the agreement, which are compared below with an error of their own.
        header = replace(
            frame, blobs=(), binding=expected.binding, fingerprint=expected.fingerprint
        )
        if header != expected:
            raise RemoteProtocolError(
                f"{sender} sent {frame.kind.noun_with_article} of {frame.name} of shape "
                f"{frame.shape}, expected "
                f"the request of {expected.rows}x{expected.columns} labels"
            )
        if (frame.binding, frame.fingerprint) != (expected.binding, expected.fingerprint):
            raise RemoteProtocolError(
                f"{sender} encrypts labels under another agreement; compare the two configurations"
            )
        frame.require_blobs(sender, count)
        return frame.blobs


# The encrypted labels: everything in a request is computed from the labels and 32 secret bytes, its
# root, so that whoever knows both computes the same bytes. A ciphertext of a label, and the public
# key, is a pair (b, a) of polynomials; a is uniform and expanded from a public seed, so b alone is
# sent.


def _expand_key(ring: Ring, seed: bytes) -> Digits:
    """Return the uniform half a of the public key (b, a), a polynomial with coefficients split into
    digits, (digits, coefficients), expanded from a request's public seed.
    """
    return ring.expand_seed(seed, b"products key")


def expand_label(ring: Ring, seed: bytes, position: int) -> Digits:
    """Return the uniform half a of the ciphertext (b, a) of the label at `position`, from 0: a
    polynomial with coefficients split into digits, (digits, coefficients), expanded from the
    request's public seed.
    """
    return ring.expand_seed(seed, b"products label", position.to_bytes(4, "big"))


def _derive_secret_key(secure_sum: SumOfProducts, root: bytes) -> IntArray:
    """Return the ternary secret key, (N,), derived from a root (32 secret bytes)."""
    return draw_ternary(secure_sum.ring.degree, derive_key(root, b"products secret"))


def encrypt_labels(secure_sum: SumOfProducts, root: bytes, bits_nK: IntArray) -> list[bytes]:
    """Encrypt the active's labels by BFV; return the blobs of a request: a public seed, b of the
    public key, and b of every label.

    The public key and every ciphertext are pairs (b, a) with b = -a s + e + q m / t modulo q. Here
    m is the label (0 for the key), t the plain modulus, s the secret key, and e a small error; a is
    expanded from the seed, so it is not sent. Letters: n labels, K classes, L digits of a
    coefficient, N coefficients, H = N / 2 values of a transform.

    Args:
        secure_sum: the sum of products.
        root: 32 secret bytes from which the seed, the secret key s and the errors e are derived;
            used for one request only.
        bits_nK: the labels, 0 or 1, (labels, classes); m of label j is the polynomial sum_k bits[j,
            k] X^k.
    """
    ring = secure_sum.ring
    seed = derive_key(root, b"products seed")
    secret_H = transform_polynomials(_derive_secret_key(secure_sum, root))
    # A step is q / t = 2^step_bits, modulus over plain modulus, by which labels are scaled.
    step_bits = ring.bits - secure_sum.parameters.plain_bits
    public_key_LN = _encrypt_zero(
        ring, secret_H, _expand_key(ring, seed), error_key=_derive_error_key(root, 0)
    )
    blobs = [seed, ring.pack_digits(public_key_LN)]
    for position, bits_K in enumerate(bits_nK):
        label_LN = _encrypt_zero(
            ring,
            secret_H,
            expand_label(ring, seed, position),
            error_key=_derive_error_key(root, position + 1),
        )
        ring.add_shifted(label_LN[:, : len(bits_K)], step_bits, bits_K)
        blobs.append(ring.pack_digits(label_LN))
    return blobs


def _derive_error_key(root: bytes, index: int) -> bytes:
    """Return the key of the small error e of a ciphertext: index 0 for the public key, j + 1 for
    label j.
    """
    return derive_key(root, b"products error", index.to_bytes(4, "big"))


def _encrypt_zero(
    ring: Ring, secret_H: Spectrum, uniform_LN: Digits, *, error_key: bytes
) -> Digits:
    """Return -a s + e, an encryption of zero, L digits of N coefficients, (L, N).

    Args:
        ring: the ring of the polynomials.
        secret_H: the Fourier transform of the secret key s.
        uniform_LN: the digits of the uniform polynomial a.
        error_key: the key from which the small error e is drawn.
    """
    a_LH = transform_polynomials(ring.centre_digits(uniform_LN))
    product_LN = invert_transform(a_LH * secret_H)
    zero_LN = -np.rint(product_LN).astype(np.int64)
    zero_LN[0] += draw_centred_binomial(ring.degree, error_key)
    return zero_LN


@dataclass(frozen=True)
class LabelValues(KeepsSecrets):
    """The Fourier transforms of the public key and the encrypted labels, which a passive computes
    once, since products of polynomials are products of their transforms.

    Letters: n labels, N coefficients of a polynomial, L digits of a coefficient, S powers of X for
    one person, K classes, U people of a ciphertext, H = U / 2 roots.

    Attributes:
        request_digest: SHA-256 of the request.
        key_values: values of the digits of the public key (b, a) at the roots of X^N + 1, (2, L, N
            / 2).
        label_values: values of the digits of all encrypted labels (b, a) at the roots of Y^U + 1,
            (H, n, F). F is L times the number of powers of X: all S of a, and of b the folds * K
            that answers use (`ProductParameters.folds`).
    """

    request_digest: bytes
    key_values: NDArray[np.complex128]
    label_values: NDArray[np.complex128]

    @classmethod
    def from_request(
        cls,
        secure_sum: SumOfProducts,
        request: bytes,
        blobs: Sequence[bytes],
        shifts: Sequence[int] | None = None,
    ) -> "LabelValues":
        """Check the public key and the encrypted labels (b, a) of a request, and return their
        Fourier transforms.

        Letters: n labels, L digits of each of N = U S coefficients (U people of a ciphertext, S
        powers of X for one person), F = L times the powers of X that are used, H = U / 2 roots.

        Args:
            secure_sum: the sum of products.
            request: the message of the active, whose digest is stored.
            blobs: the blobs that `encrypt_labels` returned: seed, key, labels.
            shifts: power of X to multiply each label by, which moves the label to another class; a
                request that was checked among candidates needs it. None: 0 for all.

        Raises RemoteProtocolError: a blob has another size, a number is out of range, or the public
        key hides nothing.
        """
        ring = secure_sum.ring
        parameters = secure_sum.parameters
        sender = secure_sum.agreement.receiver
        seed = blobs[0]
        if len(seed) != _BYTES:
            raise RemoteProtocolError(
                f"{sender} sent a seed of {len(seed)} bytes, expected {_BYTES}"
            )
        public_key = ring.parse_digits(blobs[1], sender=sender), _expand_key(ring, seed)
        words_2N = np.stack(
            [ring.round_digits(half, parameters.answer_modulus_bits) for half in public_key]
        )
        # Called for its exception only: a key that hides nothing.
        require_uniform_key(words_2N, 1 << parameters.answer_modulus_bits, sender=sender)
        powers_of_b = parameters.folds * secure_sum.product_agreement.columns
        powers = len(ring.widths) * (parameters.powers_per_person + powers_of_b)
        # The first two blobs are seed and key; one b of each label follows.
        label_blobs = blobs[2:]
        values_HnF = np.empty(
            (parameters.people_per_ciphertext // 2, len(label_blobs), powers), dtype=np.complex128
        )
        shape_LUS = (-1, parameters.people_per_ciphertext, parameters.powers_per_person)
        for position, blob in enumerate(label_blobs):
            shift = shifts[position] if shifts else 0
            a_LN = ring.centre_digits(expand_label(ring, seed, position))
            b_LN = ring.centre_digits(ring.parse_digits(blob, sender=sender))
            a_LUS = _multiply_by_power(a_LN, shift).reshape(shape_LUS)
            b_LUS = _multiply_by_power(b_LN, shift).reshape(shape_LUS)
            used_b_LUS = b_LUS[:, :, :powers_of_b]
            digits_LFU = np.concatenate((a_LUS, used_b_LUS), axis=2).swapaxes(1, 2)
            values_HnF[:, position] = transform_polynomials(digits_LFU).reshape(powers, -1).T
        centred_2LN = np.stack([ring.centre_digits(half_LN) for half_LN in public_key])
        return cls(
            request_digest=hashlib.sha256(request).digest(),
            key_values=transform_polynomials(centred_2LN),
            label_values=values_HnF,
        )


def _multiply_by_power(numbers_LN: Digits, power: int) -> Digits:
    """Return a polynomial multiplied by X^power modulo X^N + 1, with 0 <= power < N. Its N
    coefficients are split into L digits, (L, N).
    """
    # X^N = -1, so coefficients that leave at the top come back below with another sign.
    shifted_LN = np.roll(numbers_LN, power, axis=1)
    shifted_LN[:, :power] *= -1
    return shifted_LN


# How passives check that the active encrypts labels as agreed: of many requests, the candidates,
# all but one are opened, which means that the secret bytes behind them are revealed. It is
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
    """The active's part in the check that it encrypts labels as agreed (cut and choose): it makes
    several requests, the candidates, and reveals the secret bytes of all but one (steps 1 and 3
    above).

    Attributes:
        commitment: the message with the hashes of all candidates, for every passive.
    """

    def __init__(
        self, secure_sum: SumOfProducts, frames: AgreedFrames, classes_n: IntArray
    ) -> None:
        """Draw 32 secret bytes for each candidate request, compute the request from them, and
        commit to all candidates by their hashes.

        Args:
            secure_sum: the sum of products.
            frames: checks the passives' messages.
            classes_n: the class of each of the active's n labels, from 0, (n,).
        """
        self._sum_of_products = secure_sum
        self._frames = frames
        self._classes_n = classes_n
        self._open_lock = threading.Lock()
        self._root_secrets = [
            fresh_key() for _ in range(secure_sum.product_agreement.candidates or 0)
        ]
        hashes = [_hash_candidate(secure_sum, root) for root in self._root_secrets]
        self._hashes = b"".join(hashes)
        self.commitment = secure_sum.pack_request((self._hashes,))

    def open_candidates(self, challenges: Mapping[str, bytes]) -> tuple[bytes, IntArray]:
        """Open the candidate requests of the cut-and-choose: reveal the secret bytes behind all of
        them but the one that the passives chose. Called once.

        `challenges`: each passive's message with the chosen candidate, by the passive's name.

        Returns:
            The message to the passives, with these secret bytes, with how far each label of the
            chosen candidate is from its true class, and with the encrypted labels; and the secret
            key of the chosen candidate, (N,) ternary coefficients.

        Raises:
            RemoteProtocolError: the passives do not all choose the same candidate.
            LocalProtocolError: the candidates were opened before.
        """
        self._frames.require_own_process()  # before the lock, which a forked copy may hold forever
        sum_of_products = self._sum_of_products
        chosen_candidate = _parse_challenges(
            sum_of_products, self._frames, challenges, self._hashes
        )
        with self._open_lock:
            if not self._root_secrets:
                raise LocalProtocolError("the candidates of this request were opened already")
            roots = self._root_secrets
            self._root_secrets = []
        chosen_root = roots.pop(chosen_candidate)  # the remaining roots are revealed
        columns = sum_of_products.product_agreement.columns
        random_classes_n = _draw_classes(sum_of_products, chosen_root)
        # By so many classes each of the candidate's random labels is moved to the true class.
        shifts_n = ((self._classes_n - random_classes_n) % columns).astype(_SHIFT)
        one_hot_nK = np.eye(columns, dtype=np.int64)[random_classes_n]
        label_blobs = encrypt_labels(sum_of_products, chosen_root, one_hot_nK)
        blobs = (b"".join(roots), shifts_n.tobytes(), *label_blobs)
        return sum_of_products.pack_request(blobs), _derive_secret_key(sum_of_products, chosen_root)


class CoinToss(KeepsSecrets):
    """A passive's part in the coin toss among all passives that chooses the candidate to use (step
    2 above).
    """

    def __init__(
        self, me: str, secure_sum: SumOfProducts, frames: AgreedFrames, commitment: bytes
    ) -> None:
        """Take the hashes of the active's candidate requests, and draw this party's 32 random bytes
        for the coin toss.

        Args:
            me: this passive's name.
            secure_sum: the sum of products.
            frames: writes and checks the messages.
            commitment: the active's message with the hashes of its candidates.

        Raises RemoteProtocolError: the commitment is malformed.
        """
        agreed = secure_sum.product_agreement
        (self.candidate_hashes,) = secure_sum.parse_request(commitment, 1)
        if len(self.candidate_hashes) != _BYTES * (agreed.candidates or 0):
            raise RemoteProtocolError(
                f"{agreed.receiver} commits to {len(self.candidate_hashes)} bytes of requests, "
                f"expected {_BYTES * (agreed.candidates or 0)}"
            )
        self.me = me
        self._names = agreed.contributors
        self._frames = frames
        self._candidate_count = agreed.candidates or 1
        # By passive: its random bytes, once they are revealed, and the hash that commits to them.
        self._random_bytes_by_passive = {me: fresh_key()}
        self._commitment_by_passive: dict[str, bytes] = {}

    def start(self) -> Sequence[Outgoing]:
        """Return the messages with the hash of this party's random bytes to every other passive."""
        return self._address_to_all(
            self._compute_commitment(self.me, self._random_bytes_by_passive[self.me])
        )

    def receive(self, sender: str, body: bytes) -> Sequence[Outgoing]:
        """Take another passive's message of the coin toss: first the hash that commits to its
        random bytes, then the bytes. Once all hashes have arrived, return the messages that reveal
        this party's bytes; otherwise return no messages.

        Raises RemoteProtocolError: the message is out of turn, or the bytes do not match the hash.
        """
        if (
            sender not in self._names
            or sender == self.me
            or sender in self._random_bytes_by_passive
        ):
            raise RemoteProtocolError(f"{sender} sent {self.me} a message of a coin out of turn")
        frame = self._frames.parse_own_setup(body, sender, self.me)
        if len(frame.blobs) != 1 or len(frame.blobs[0]) != _BYTES:
            raise RemoteProtocolError(f"{sender} sent no {_BYTES} bytes of a coin")
        content = frame.blobs[0]
        if sender in self._commitment_by_passive:
            if self._compute_commitment(sender, content) != self._commitment_by_passive[sender]:
                raise RemoteProtocolError(
                    f"{sender} sent other bytes for the coin than it promised, or got other hashes "
                    f"of {self._frames.agreement.receiver}"
                )
            self._random_bytes_by_passive[sender] = content
            return ()
        self._commitment_by_passive[sender] = content
        # This party's own bytes stay secret until all the others are bound to theirs.
        all_are_bound = len(self._commitment_by_passive) == len(self._names) - 1
        return self._address_to_all(self._random_bytes_by_passive[self.me]) if all_are_bound else ()

    @property
    def is_finished(self) -> bool:
        return len(self._random_bytes_by_passive) == len(self._names)

    @property
    def chosen_candidate(self) -> int:
        """Return the index of the candidate request that the coin toss chose, the same at all
        passives: a hash of all their random bytes. Raises LocalProtocolError: the toss is not
        finished.
        """
        if not self.is_finished:
            raise LocalProtocolError(f"{self.me} tosses a coin still; finish that conversation")
        coins = b"".join(self._random_bytes_by_passive[name] for name in self._names)
        digest = hashlib.sha256(b"products coin" + self.candidate_hashes + coins).digest()
        return int.from_bytes(digest, "big") % self._candidate_count

    def pack_challenge(self) -> bytes:
        """Encode this passive's message to the active with the outcome of the toss."""
        return self._frames.pack_setup(
            _encode_challenge(self.chosen_candidate, self.candidate_hashes)
        )

    def _compute_commitment(self, name: str, coin: bytes) -> bytes:
        """Return the hash by which the passive `name` commits to its random bytes `coin`. It covers
        the candidates' hashes, too, so that passives with other hashes notice.
        """
        fields = (b"products promise", name.encode(), self.candidate_hashes, coin)
        framed = b"".join(len(content).to_bytes(4, "big") + content for content in fields)
        return hashlib.sha256(framed).digest()

    def _address_to_all(self, content: bytes) -> Sequence[Outgoing]:
        """Return a message with these bytes for each other passive."""
        message = self._frames.pack_setup(content)
        return tuple(Outgoing(name, message) for name in self._names if name != self.me)


def _audit_request(secure_sum: SumOfProducts, coin_toss: CoinToss, request: bytes) -> LabelValues:
    """Check at a passive that the active encrypted its labels as agreed (cut and choose): recompute
    every candidate request whose secret bytes the active revealed, and compare its hash with the
    active's commitment. Return the transforms of the encrypted labels of the chosen candidate.

    Args:
        secure_sum: the sum of products.
        coin_toss: the finished coin toss of this passive, which has the commitment and the choice.
        request: the active's message with the secret bytes of all other candidates, the shift of
            each label, and the blobs of the request that is used.

    Raises RemoteProtocolError: the active cheated, or the message is malformed.
    """
    agreed = secure_sum.product_agreement
    chosen_candidate = coin_toss.chosen_candidate
    # Secret bytes, shifts, seed and key, then one encrypted label each.
    blobs = secure_sum.parse_request(request, 4 + agreed.labelled)
    roots, shift_bytes, *chosen_blobs = blobs
    # Whole shifts only, so that NumPy does not raise; the size itself is checked below.
    even_size = len(shift_bytes) - len(shift_bytes) % _SHIFT.itemsize
    shifts = np.frombuffer(shift_bytes[:even_size], _SHIFT)
    # A root, of as many bytes as a hash, for every candidate but the chosen one.
    root_byte_count = len(coin_toss.candidate_hashes) - _BYTES
    shift_byte_count = _SHIFT.itemsize * agreed.labelled
    have_agreed_sizes = len(roots) == root_byte_count and len(shift_bytes) == shift_byte_count
    if not have_agreed_sizes or shifts.max(initial=0) >= agreed.columns:
        raise RemoteProtocolError(
            f"{agreed.receiver} opened requests in {len(roots)} bytes and shifts labels in "
            f"{len(shift_bytes)}, expected {root_byte_count} and {shift_byte_count}, shifts below "
            f"{agreed.columns}"
        )
    hashes = [
        _hash_candidate(secure_sum, roots[start : start + _BYTES])
        for start in range(0, len(roots), _BYTES)
    ]
    hashes.insert(chosen_candidate, _hash_request(secure_sum.pack_request(chosen_blobs)))
    if b"".join(hashes) != coin_toss.candidate_hashes:
        raise RemoteProtocolError(
            f"{agreed.receiver} cheated: the requests that it opened, or the one that is kept, are "
            "not those that it committed to; nothing is answered"
        )
    return LabelValues.from_request(
        secure_sum, request, chosen_blobs, [int(shift) for shift in shifts]
    )


def _draw_classes(secure_sum: SumOfProducts, root: bytes) -> IntArray:
    """Return the random classes of the n labels of a candidate request, (n,), derived from its
    secret bytes `root`; they are uniform to within 2^-50.
    """
    agreed = secure_sum.product_agreement
    key = derive_key(root, b"products classes")
    words = np.frombuffer(keystream(key, length=8 * agreed.labelled), "<u8")
    return (words % np.uint64(agreed.columns)).astype(np.int64)


def _hash_candidate(secure_sum: SumOfProducts, root: bytes) -> bytes:
    """Compute a candidate request, for n random labels of K classes, from its 32 secret bytes
    `root`, and return the hash by which the active commits to it.
    """
    classes_n = _draw_classes(secure_sum, root)
    one_hot_nK = np.eye(secure_sum.product_agreement.columns, dtype=np.int64)[classes_n]
    blobs = encrypt_labels(secure_sum, root, one_hot_nK)
    return _hash_request(secure_sum.pack_request(blobs))


def _hash_request(request: bytes) -> bytes:
    """Return the hash by which the active commits to a request."""
    return hashlib.sha256(b"products candidate" + request).digest()


def _encode_challenge(chosen: int, hashes: bytes) -> bytes:
    """Encode a challenge: the number of the chosen candidate, and a digest of the candidates'
    hashes, which must be the same at all passives.
    """
    return chosen.to_bytes(2, "big") + hashlib.sha256(hashes).digest()


def _parse_challenges(
    secure_sum: SumOfProducts, frames: AgreedFrames, challenges: Mapping[str, bytes], hashes: bytes
) -> int:
    """Return the index of the candidate request that all passives chose by their coin toss.

    Args:
        secure_sum: the sum of products.
        frames: checks the messages.
        challenges: each passive's message with the chosen candidate, by the passive's name.
        hashes: hash of each candidate request, 32 bytes, joined, as the active sent them.

    Raises RemoteProtocolError: a passive's challenge is missing, or the challenges differ or name
    no candidate.
    """
    agreed = secure_sum.product_agreement
    if set(challenges) != set(agreed.contributors):
        raise RemoteProtocolError(
            f"{agreed.receiver} waits for a challenge of each of {', '.join(agreed.contributors)}, "
            f"got {', '.join(sorted(challenges)) or 'none'}"
        )
    different_challenges = {
        b"".join(frames.parse_own_setup(body, name, agreed.receiver).blobs)
        for name, body in challenges.items()
    }
    candidate_by_challenge = {
        _encode_challenge(candidate, hashes): candidate
        for candidate in range(agreed.candidates or 0)
    }
    if len(different_challenges) != 1 or not different_challenges <= set(candidate_by_challenge):
        raise RemoteProtocolError(
            "the passives do not name one of the requests that were committed to, all the same; "
            "nothing is opened"
        )
    return candidate_by_challenge[different_challenges.pop()]


class ProductReceiver(SumReceiver):
    """The active's role: it encrypts its labels, which are bits, and decrypts the sums of products;
    the secret key is destroyed when it refuses one.
    """

    _sum: SumOfProducts

    def __init__(self, secure_sum: SumOfProducts, labels_nK: NDArray[Any]) -> None:
        """Encrypt the n labels, bits of shape (n, K) for K classes. If the agreement has candidates
        (requests of which the passives check all but one), commit to candidates instead.

        Raises LocalProtocolError: the labels are no bits, or have another shape.
        """
        frames = secure_sum.make_frames()
        super().__init__(secure_sum, frames, NoSetup())
        # The transform of the secret key, and the request with its digest, once they are made.
        self._secret: NDArray[np.complex128] | None = None
        self._request = b""
        self._request_digest = b""
        self._candidates: Candidates | None = None
        bits_nK = _check_bits(labels_nK, secure_sum.product_agreement)
        if secure_sum.product_agreement.candidates is not None:
            self._candidates = Candidates(secure_sum, frames, bits_nK.argmax(axis=1))
            return
        root = fresh_key()
        blobs = encrypt_labels(secure_sum, root, bits_nK)
        self._store_request(secure_sum.pack_request(blobs), _derive_secret_key(secure_sum, root))

    def get_commitment(self) -> bytes:
        """Return the message with the hashes of all candidates, the same for every passive. Raises
        LocalProtocolError: the agreement has no candidates.
        """
        return self._require_candidates().commitment

    def make_request(self, challenges: Mapping[str, bytes] | None = None) -> bytes:
        """Return the message with the encrypted labels, the same for every passive.

        `challenges`: each passive's message with the chosen candidate, by its authenticated name.
        They are required in the first call if the agreement has candidates, else None.

        Raises:
            LocalProtocolError: challenges are missing or given twice, or a sum was refused.
            RemoteProtocolError: the passives do not all choose the same candidate.
        """
        self._require_no_refusal()
        if challenges is not None:
            self._store_request(*self._require_candidates().open_candidates(challenges))
        if not self._request:
            raise LocalProtocolError("the labels are sent once the passives' challenges came")
        return self._request

    def _require_candidates(self) -> Candidates:
        """Return the candidate requests. Raises LocalProtocolError: the agreement has none."""
        if self._candidates is None:
            raise LocalProtocolError("this agreement has no candidates: request the labels")
        return self._candidates

    def _store_request(self, request: bytes, secret_N: IntArray) -> None:
        """Store the request, its SHA-256 digest, and the Fourier transform of its secret key,
        `secret_N`, N ternary coefficients.
        """
        self._request = request
        self._secret = transform_polynomials(secret_N)
        self._request_digest = hashlib.sha256(request).digest()

    def open_block(self, block: int, combined: bytes) -> FloatArray:
        """Decrypt the sum of products of one block of people; return it as float64, (people,
        classes).

        `combined`: the aggregator's message.

        Raises RemoteProtocolError: the message is malformed or about another block, or its sum is
        out of range; the secret key is destroyed then.
        """
        sum_of_products = self._sum
        self.make_request()  # raises if no labels were sent yet
        shape = (
            len(sum_of_products.get_block_people(block)),
            sum_of_products.product_agreement.columns,
        )
        return self.decode(
            combined, shape, sum_of_products.make_binding(block, self._request_digest)
        )

    def _decrypt_sum(self, frame: Frame, binding: StepBinding) -> FloatArray:
        """Decrypt the sum of products of one block; return real numbers, (people, classes).

        A ciphertext (c0, c1) decrypts to c0 + c1 s for the secret key s, rounded to multiples of
        q / t. Letters: B people of the block, U of a ciphertext, K classes, S powers of X for one
        person, N = U S coefficients.

        `binding`: the block (as the step) and the request that the sum answers.

        Raises RemoteProtocolError: the message is malformed, or noise or sum are out of range.
        """
        sum_of_products = self._sum
        parameters = self._sum.parameters
        columns = sum_of_products.product_agreement.columns
        words = sum_of_products.parse_words(
            frame, binding.step, sender=sum_of_products.agreement.aggregator
        )
        integers_BK = np.empty(frame.shape, dtype=np.int64)
        start = 0
        # One ciphertext after the other: K numbers of c0 for each person, then all N of c1.
        for ciphertext_index, word_count in enumerate(sum_of_products.count_words(binding.step)):
            people_count = (word_count - sum_of_products.ring.degree) // columns
            c0, c1_N = np.split(words[start : start + word_count], [people_count * columns])
            product_US = self._multiply_by_secret(c1_N).reshape(
                parameters.people_per_ciphertext, parameters.powers_per_person
            )
            phase_UK = c0.reshape(people_count, columns) + self._fold_classes(
                product_US[:people_count]
            )
            first = ciphertext_index * parameters.people_per_ciphertext
            integers_BK[first : first + people_count] = self._round_to_steps(phase_UK, binding)
            start += word_count
        self._require_range(integers_BK, binding)
        return sum_of_products.fixed_point.dequantise_sum(integers_BK)

    def _fold_classes(self, product_US: Words) -> Words:
        """Return one number for each person and class, (U, K), from the S coefficients for each of
        U people, (U, S).

        For class k it is the coefficient of X^k. If the agreement has candidates it is the sum of
        the coefficients of X^k and X^(k + K), since a label that was shifted to class k is at one
        of the two.
        """
        folds = self._sum.parameters.folds
        columns = self._sum.product_agreement.columns
        used = product_US[:, : folds * columns].reshape(-1, folds, columns)
        folded: Words = used.sum(axis=1, dtype=np.uint64)
        return folded

    def _multiply_by_secret(self, c1_N: Words) -> Words:
        """Return the product of the polynomial c1, N coefficients, and the secret key, modulo 2^64.

        It is computed from 16 bits of c1 at a time, so that the products in float64 are close
        enough to integers to be rounded exactly.
        """
        assert self._secret is not None
        total_N = np.zeros_like(c1_N)
        for shift in range(0, self._sum.parameters.answer_modulus_bits, 16):
            digit_N = (c1_N >> np.uint64(shift)) & np.uint64(2**16 - 1)
            product_N = invert_transform(transform_polynomials(digit_N) * self._secret)
            integers_N = np.rint(product_N).astype(np.int64)
            total_N += integers_N.view(np.uint64) << np.uint64(shift)
        return total_N

    def _round_to_steps(self, phase: Words, binding: StepBinding) -> IntArray:
        """Round the phase c0 + c1 s (a decrypted ciphertext with its noise), modulo
        2^answer_modulus_bits, to multiples of q / t; return the multiples, integers in [-t/2, t/2).

        Raises RemoteProtocolError, about the step of `binding`: the noise that rounding removes is
        beyond the bound of honest answers.
        """
        parameters = self._sum.parameters
        # Moved to the top of the word and back, which extends the sign.
        unused_bits = np.uint64(64 - parameters.answer_modulus_bits)
        signed = (phase << unused_bits).view(np.int64) >> np.int64(unused_bits)
        step_bits = parameters.answer_modulus_bits - parameters.plain_bits
        integers = (signed + (1 << (step_bits - 1))) >> step_bits
        noise = signed - (integers << step_bits)
        if (
            not -parameters.max_answer_noise
            <= noise.min()
            <= noise.max()
            <= parameters.max_answer_noise
        ):
            raise self._make_range_error(binding)
        half = 1 << (parameters.plain_bits - 1)
        return np.where(integers == half, -half, integers)

    def _require_range(self, integers_BK: IntArray, binding: StepBinding) -> None:
        """Raise RemoteProtocolError, about the step of `binding`, if one of the sums `integers_BK`,
        (people, classes) in steps of fixed point, is larger than honest passives can add up to.
        """
        sum_of_products = self._sum
        largest_noise = (
            sum_of_products.fixed_point.max_contribution - sum_of_products.fixed_point.max_level
        )
        largest_product = compute_row_limit(sum_of_products.product_agreement)
        passives = len(sum_of_products.agreement.contributors)
        limit = passives * (largest_product + largest_noise)
        if not -limit <= integers_BK.min() <= integers_BK.max() <= limit:
            raise self._make_range_error(binding)

    def _forget_secrets(self) -> None:
        self._secret = None


class ProductContributor(Role):
    """A passive's role: it multiplies its rows with the encrypted labels."""

    def __init__(self, secure_sum: SumOfProducts, me: str) -> None:
        """Make the role of `me`, whose set-up agrees one mask seed with each other passive."""
        frames = secure_sum.make_frames()
        others = [name for name in secure_sum.agreement.contributors if name != me]
        secure_sum.agreement.find_position(me)  # raises if `me` is no contributor
        self.me = me
        self._sum_of_products = secure_sum
        self._seeds = PairwiseSeeds(me, others, frames)
        self._coin_toss: CoinToss | None = None
        self._label_values: LabelValues | None = None
        super().__init__(frames, self._seeds)

    def toss_coin(self, commitment: bytes) -> Conversation:
        """Return this passive's part in the coin toss among all passives, which chooses the
        candidate request to use; the caller runs it.

        `commitment`: the active's message with the hashes of its candidates.

        Raises:
            LocalProtocolError: the agreement has no candidates.
            RemoteProtocolError: the commitment is malformed, or the active sent one before.
        """
        described = self._sum_of_products
        if described.product_agreement.candidates is None:
            raise LocalProtocolError("this agreement has no candidates: accept the request")
        if self._coin_toss is not None:
            raise RemoteProtocolError(
                f"{described.agreement.receiver} sent a second commitment to {self.me}"
            )
        self._coin_toss = CoinToss(self.me, described, self._frames, commitment)
        return self._coin_toss

    def pack_challenge(self) -> bytes:
        """Return the message to the active that names the chosen candidate. Raises
        LocalProtocolError: the coin toss is not finished.
        """
        return self._require_coin().pack_challenge()

    def _require_coin(self) -> CoinToss:
        """Return this passive's coin toss. Raises LocalProtocolError: no toss began yet."""
        if self._coin_toss is None:
            raise LocalProtocolError(f"{self.me} has tossed no coin yet")
        return self._coin_toss

    def accept_request(self, request: bytes) -> None:
        """Take the active's message with the encrypted labels, once, and store their transforms. If
        the agreement has candidates, check the candidates that the active revealed.

        Raises RemoteProtocolError: the message is malformed, the active sent one before, or it
        cheated.
        """
        described = self._sum_of_products
        if self._label_values is not None:
            raise RemoteProtocolError(
                f"{described.agreement.receiver} sent a second request to {self.me}"
            )
        if described.product_agreement.candidates is not None:
            self._label_values = _audit_request(described, self._require_coin(), request)
            return
        blobs = described.parse_request(request, 2 + described.product_agreement.labelled)
        self._label_values = LabelValues.from_request(described, request, blobs)

    def answer_block(
        self, block: int, rows_Bn: FloatArray, noise_BK: IntArray | None = None
    ) -> bytes:
        """Return this passive's message to the aggregator about one block of people: the products
        of their rows with the labels, encrypted and masked.

        Args:
            block: index of the block, from 0; indices must rise, and each is used once.
            rows_Bn: rows of this passive's matrix for the people `get_block_people(block)`, float32
                or float64, (people, labels): B by n.
            noise_BK: integer noise in steps of fixed point, (people, classes), from
                `apfed_protocols.noise` under a key of this party; required if the agreement has
                noise, else None.

        Raises LocalProtocolError: rows or noise do not fit, the block was answered before, or the
        labels or the set-up are missing.
        """
        described = self._sum_of_products
        shape = len(described.get_block_people(block)), described.product_agreement.columns
        integers_Bn = self._quantise_rows(rows_Bn, shape[0])
        if noise_BK is not None or described.agreement.noise is not None:
            noise_BK = described.fixed_point.check_noise(noise_BK, shape)
        if self._label_values is None:
            raise LocalProtocolError(f"{self.me} has no labels yet; accept the request first")
        self._seeds.require_completion()
        binding = described.make_binding(block, self._label_values.request_digest)
        self._frames.begin_step(binding)
        # L digits of a number, C ciphertexts of U people each, K classes, N coefficients.
        c0_LCUK, c1_LCN = self._compute_ciphertexts(integers_Bn, self._label_values)
        words = self._round_to_words(c0_LCUK, c1_LCN, noise_BK, shape)
        self._seeds.add_cancelling_masks(binding, words)
        blobs = described.pack_words(words, block)
        return self._frames.pack_contribution(self.me, binding, shape, blobs)

    def answer_blocks(
        self, rows_Un: FloatArray, noise_UK: IntArray | None = None
    ) -> Iterator[bytes]:
        """Yield this passive's message about each block of people, one after another
        (`answer_block`).

        `rows_Un`: rows of this passive's matrix for all people, (people, labels). `noise_UK`:
        integer noise for all people, in steps of fixed point, (people, classes); None: no noise.
        """
        for block in range(self._sum_of_products.block_count):
            people = self._sum_of_products.get_block_people(block)
            rows = slice(people.start, people.stop)
            noise_BK = None if noise_UK is None else noise_UK[rows]
            yield self.answer_block(block, rows_Un[rows], noise_BK)

    def _quantise_rows(self, rows_Bn: FloatArray, people: int) -> IntArray:
        """Return a block's rows in steps of fixed point, (people, labels): B by n.

        `people`: the number of rows that the block must have.

        Raises LocalProtocolError: the rows have another shape, or the magnitudes of a row add up to
        more than the agreement's `row_bound`.
        """
        agreed = self._sum_of_products.product_agreement
        levels = self._sum_of_products.fixed_point.max_level
        if check_matrix(rows_Bn).shape != (people, agreed.labelled):
            raise LocalProtocolError(
                f"the block has rows of shape {(people, agreed.labelled)}, got {rows_Bn.shape}"
            )
        with np.errstate(over="ignore"):  # infinite numbers exceed the bound, too
            scaled_Bn = np.rint(rows_Bn * np.float64(levels / agreed.row_bound))
        if np.abs(scaled_Bn).sum(axis=1).max() > compute_row_limit(agreed):
            raise LocalProtocolError(
                f"a row of {self.me} adds up to more than row_bound = {agreed.row_bound:g} in "
                "magnitude; scale the rows, or agree on a larger bound"
            )
        return scaled_Bn.astype(np.int64)

    def _compute_ciphertexts(
        self, integers_Bn: IntArray, labels: LabelValues
    ) -> tuple[Digits, Digits]:
        """Return the C ciphertexts (c0, c1) of the products of a block's rows with the encrypted
        labels, plus a fresh encryption of zero and smudging noise, as L digits of a number.

        Letters of axes: L digits, C ciphertexts, U people of one, K classes, N coefficients; S
        powers of X for one person, F the powers of X that are computed (S of c1, then folds * K of
        c0), n labels, H = U / 2 roots.

        Args:
            integers_Bn: the rows in steps of fixed point, (people, labels).
            labels: the transforms of the encrypted labels.

        Returns:
            Of c0 one number for each person and class, (L, C, U, K); and all of c1, (L, C, N).
        """
        parameters = self._sum_of_products.parameters
        ring = self._sum_of_products.ring
        columns = self._sum_of_products.product_agreement.columns
        digits = len(ring.widths)
        products_LCUF = self._multiply_labels(integers_Bn, labels)
        count = products_LCUF.shape[1]
        zeros_2LCN = self._encrypt_zeros(labels, count)
        shape_LCUS = (digits, count, parameters.people_per_ciphertext, -1)
        zeros_c0_LCUS = zeros_2LCN[0].reshape(shape_LCUS)
        zeros_c1_LCUS = zeros_2LCN[1].reshape(shape_LCUS)
        c1_LCUS = np.rint(products_LCUF[..., : parameters.powers_per_person] + zeros_c1_LCUS)
        c0_LCUF = products_LCUF[..., parameters.powers_per_person :]
        c0_LCUF = c0_LCUF + zeros_c0_LCUS[..., : parameters.folds * columns]
        c0_LCUF = np.rint(c0_LCUF).astype(np.int64)
        # With candidates a class stands at two powers of X, which are added here (folds).
        c0_LCUK = c0_LCUF.reshape(*c0_LCUF.shape[:3], parameters.folds, columns).sum(axis=3)
        c1_LCN = c1_LCUS.astype(np.int64).reshape(digits, count, ring.degree)
        # The error of c1; the smudging noise covers the error of c0.
        c1_LCN[0] += draw_centred_binomial(count * ring.degree).reshape(count, -1)
        self._smudge(c0_LCUK)
        return c0_LCUK, c1_LCN

    def _multiply_labels(self, integers_Bn: IntArray, labels: LabelValues) -> NDArray[np.float64]:
        """Return the products of a block's rows with the encrypted labels, summed over the labels,
        as L digits, (L, C, U, F): C ciphertexts, U people of one, F powers of X (of c1, then c0).

        `integers_Bn`: the rows in steps of fixed point, (people, labels). `labels`: the transforms
        of the encrypted labels at H = U / 2 roots.
        """
        rows = self._sum_of_products.parameters.people_per_ciphertext
        digits = len(self._sum_of_products.ring.widths)
        count = math.ceil(len(integers_Bn) / rows)
        padded = np.zeros((count * rows, integers_Bn.shape[1]))
        padded[: len(integers_Bn)] = integers_Bn
        values_CnH = transform_polynomials(padded.reshape(count, rows, -1).swapaxes(1, 2))
        # At each root, products of values are values of products of polynomials; summed over n.
        products_HCF = np.ascontiguousarray(values_CnH.transpose(2, 0, 1)) @ labels.label_values
        products_CFU = invert_transform(np.ascontiguousarray(products_HCF.transpose(1, 2, 0)))
        products_CLFU = products_CFU.reshape(count, digits, -1, rows)
        return products_CLFU.transpose(1, 0, 3, 2)

    def _encrypt_zeros(self, labels: LabelValues, count: int) -> NDArray[np.float64]:
        """Return C = `count` fresh encryptions of zero without their errors, which the caller adds:
        (b u, a u) for the public key (b, a) and random ternary polynomials u. The N coefficients
        are split into L digits, (2, L, C, N).

        `labels`: has the transform of the public key.
        """
        u_CN = draw_ternary(count * self._sum_of_products.ring.degree).reshape(count, -1)
        return invert_transform(labels.key_values[:, :, None] * transform_polynomials(u_CN))

    def _smudge(self, c0_LCUK: Digits) -> None:
        """Add to c0, in place, the uniform noise that hides this passive's rows and errors in the
        noise of its ciphertexts (smudging). Axes of `c0_LCUK`: L digits, C ciphertexts, U people of
        one, K classes.
        """
        self._sum_of_products.ring.add_uniform(
            c0_LCUK, self._sum_of_products.parameters.smudging_bits
        )

    def _round_to_words(
        self, c0_LCUK: Digits, c1_LCN: Digits, noise_BK: IntArray | None, shape: tuple[int, int]
    ) -> Words:
        """Return the words (numbers modulo 2^answer_modulus_bits) of a block's message: the numbers
        of c0 and c1 of each ciphertext in turn, divided and rounded to `answer_modulus_bits`. The
        noise for differential privacy is added to c0.

        Args:
            c0_LCUK, c1_LCN: halves of the C ciphertexts in L digits: U people and K classes of c0,
                all N coefficients of c1.
            noise_BK: integer noise in steps of fixed point, (people, classes); None: no noise.
            shape: (people of the block, classes).
        """
        parameters = self._sum_of_products.parameters
        ring = self._sum_of_products.ring
        people, columns = shape
        c0_BK = ring.round_digits(c0_LCUK, parameters.answer_modulus_bits).reshape(-1, columns)[
            :people
        ]
        if noise_BK is not None:
            step_bits = np.uint64(parameters.answer_modulus_bits - parameters.plain_bits)
            c0_BK = c0_BK + (noise_BK.view(np.uint64) << step_bits)
        c1_CN = ring.round_digits(c1_LCN, parameters.answer_modulus_bits)
        words: list[Words] = []
        for index, c1_N in enumerate(c1_CN):
            first = index * parameters.people_per_ciphertext
            c0 = c0_BK[first : first + parameters.people_per_ciphertext].reshape(-1)
            words += [c0, c1_N]
        return np.concatenate(words)


class ProductAggregator(Role):
    """The aggregator's role: it adds the passives' answers and holds no key."""

    def __init__(self, secure_sum: SumOfProducts) -> None:
        """Make the role, which has no set-up."""
        self._sum_of_products = secure_sum
        super().__init__(secure_sum.make_frames(), NoSetup())

    def combine_block(self, block: int, answers: Mapping[str, bytes]) -> bytes:
        """Add the passives' answers about one block of people; return the message to the active.

        `block`: index of the block, from 0; indices must rise. `answers`: each passive's message,
        by its name.

        Raises RemoteProtocolError: an answer is missing or malformed, or the answers are to
        different labels.
        """
        described = self._sum_of_products
        described.get_block_people(block)  # raises if there is no such block
        frames = self._frames.parse_contributions(answers, binding_digest=None)
        names = described.agreement.contributors
        total = described.parse_words(frames[0], block, sender=names[0])
        for name, frame in zip(names[1:], frames[1:], strict=True):
            # Modulo 2^64; what exceeds answer_modulus_bits is dropped when the words are packed.
            total = total + described.parse_words(frame, block, sender=name)
        return self._frames.pack_sum(frames, described.pack_words(total, block))


def _check_bits(labels_nK: object, agreement: ProductAgreement) -> IntArray:
    """Return the active's labels as integers, (labels, classes). Raises LocalProtocolError: the
    array has another shape or numbers other than 0 and 1; or the agreement has candidates, and a
    row is not one-hot.
    """
    shape = agreement.labelled, agreement.columns
    if type(labels_nK) is not np.ndarray or labels_nK.shape != shape:
        raise LocalProtocolError(
            f"the labels are an array of shape {shape}, got {type(labels_nK).__name__} of shape "
            f"{np.shape(labels_nK)}"  # type: ignore[call-overload]  # whatever it is
        )
    if agreement.candidates is not None:
        counts_per_row = (labels_nK != 0).sum(axis=1).tolist()
        if set(counts_per_row) != {1}:
            raise LocalProtocolError("with candidates every row of the labels has one class")
    if labels_nK.dtype.kind not in "biuf" or not np.isin(labels_nK, (0, 1)).all():
        raise LocalProtocolError("the labels are bits, 0 or 1; got other numbers")
    return labels_nK.astype(np.int64)

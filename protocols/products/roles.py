"""Secure sum of products: the active learns sum_p A_p Y and nothing else of any A_p.

Run by: the active (`ProductReceiver`: the bits Y, n people by K classes, and the only secret key),
the passives (`ProductContributor`: real matrices A_p, U people by n; one seed with each other
passive), the aggregator (`ProductCombiner`: no key at all). One round trip, in which no passive
learns Y and the aggregator nothing. Protects from curious parties, from a curious active and a
curious aggregator together while two passives are honest, and from an active that sends different
labels to different passives: their masks do not cancel then, and the aggregator refuses. Not from:
M - 1 passives and the active together; an aggregator that adds constants; or an active that breaks
the protocol, which reads other products than those with bits: see `SumOfProducts.leaks`.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.products.agreement import ProductAgreement
from protocols.products.described import (
    DescribedProducts,
    expand_key,
    expand_label,
    open_request,
    request_frame,
)
from protocols.products.headroom import row_limit
from protocols.products.ring import Digits, Words, inverse, transform
from protocols.randomness import fresh_key
from protocols.sums.agreement import StepBinding
from protocols.sums.bfv import centred_binomial, ternary
from protocols.sums.fixed_point import checked_matrix
from protocols.sums.frames import Frame
from protocols.sums.interface import FloatArray, IntArray
from protocols.sums.masks import PairwiseSeeds
from protocols.sums.public_keys import require_spread
from protocols.sums.roles import KeepsSecrets, NoSetup, OneRefusalReceiver, Role

__all__ = ["ProductCombiner", "ProductContributor", "ProductReceiver", "SumOfProducts"]

Rows = FloatArray | Callable[[range], FloatArray]
Noise = IntArray | Callable[[range], IntArray] | None


@dataclass(frozen=True)
class SumOfProducts(DescribedProducts):
    """One sum of products, from which each role's end is made.

    Args:
        products: what the parties fixed.

    Raises:
        LocalProtocolError: no secure parameters fit.
    """

    def receiver(self, labels_nK: NDArray[Any]) -> "ProductReceiver":
        return ProductReceiver(self, labels_nK)

    def contributor(self, me: str) -> "ProductContributor":
        return ProductContributor(self, me)

    def combiner(self) -> "ProductCombiner":
        return ProductCombiner(self)


class ProductReceiver(OneRefusalReceiver):
    """The active's end; the secret key is gone once it refused a sum.

    Args:
        described: what all parties agreed on.
        labels_nK: bits of any type, n rows by K columns.

    Raises:
        LocalProtocolError: other numbers, or another shape.
    """

    _sum: DescribedProducts

    def __init__(self, described: DescribedProducts, labels_nK: NDArray[Any]) -> None:
        super().__init__(described, described.frames(), NoSetup())
        self._products = described
        secret_N = ternary(described.ring.degree)
        self._request = self._encrypt(_checked_bits(labels_nK, described.products), secret_N)
        self._secret: NDArray[np.complex128] | None = transform(secret_N)
        self._digest = hashlib.sha256(self._request).digest()

    def request(self) -> bytes:
        """The encrypted labels, the same bytes for every passive."""
        self._require_no_refusal()
        return self._request

    def open(self, block: int, combined: bytes) -> FloatArray:
        """The sum of products of one block's people, (people, K) in float64.

        Raises:
            LocalProtocolError: no such block, one at or below the last that was opened, or a sum
                was refused before.
            RemoteProtocolError: a frame of another block or shape, or one that was altered.
        """
        described = self._products
        shape = len(described.people_of(block)), described.products.columns
        return self.decode(combined, shape, described.binding(block, self._digest))

    def _encrypt(self, bits_nK: IntArray, secret_N: IntArray) -> bytes:
        described, ring, seed = self._products, self._products.ring, fresh_key()
        secret_H, step = transform(secret_N), ring.bits - described.headroom.plain_bits

        def zero(uniform_LN: Digits) -> Digits:
            """-a s + e for this a."""
            product_LN = inverse(transform(ring.centred(uniform_LN)) * secret_H)
            zero_LN = -np.rint(product_LN).astype(np.int64)
            zero_LN[0] += centred_binomial(ring.degree)
            return zero_LN

        blobs = [seed, ring.pack(zero(expand_key(ring, seed)))]
        for place, bits_K in enumerate(bits_nK):
            label_LN = zero(expand_label(ring, seed, place))
            ring.add_at(label_LN[:, : len(bits_K)], step, bits_K)
            blobs.append(ring.pack(label_LN))
        return request_frame(described, self._frames.fingerprint, blobs)

    def _open(self, frame: Frame, binding: StepBinding) -> FloatArray:
        described, found = self._products, self._products.headroom
        columns = described.products.columns
        words = described.parse(frame, binding.step, sender=described.agreement.combiner)
        integers_BK, start = np.empty(frame.shape, dtype=np.int64), 0
        for place, count in enumerate(described.words(binding.step)):
            people = (count - described.ring.degree) // columns
            c0, c1_N = np.split(words[start : start + count], [people * columns])
            phase_US = self._times_secret(c1_N).reshape(found.rows, found.stride)
            phase_UK = c0.reshape(people, columns) + phase_US[:people, :columns]
            first, start = place * found.rows, start + count
            integers_BK[first : first + people] = self._step_of(phase_UK, binding)
        self._require_range(integers_BK, binding)
        return described.fixed_point.dequantise(integers_BK)

    def _times_secret(self, c1_N: Words) -> Words:
        """c1 s modulo 2^64, exactly: 16 bits of c1 at a time."""
        assert self._secret is not None
        total_N = np.zeros_like(c1_N)
        for shift in range(0, self._products.headroom.kept_bits, 16):
            part_N = (c1_N >> np.uint64(shift)) & np.uint64(2**16 - 1)
            product_N = np.rint(inverse(transform(part_N) * self._secret)).astype(np.int64)
            total_N += product_N.view(np.uint64) << np.uint64(shift)
        return total_N

    def _step_of(self, phase: Words, binding: StepBinding) -> IntArray:
        """The integers modulo t nearest to these words, all within the bound of honest noise."""
        found = self._products.headroom
        unused = np.uint64(64 - found.kept_bits)
        signed = (phase << unused).view(np.int64) >> np.int64(unused)
        step_bits = found.kept_bits - found.plain_bits
        integers = (signed + (1 << (step_bits - 1))) >> step_bits
        noise = signed - (integers << step_bits)
        if not -found.noise_bound <= noise.min() <= noise.max() <= found.noise_bound:
            raise self._beyond_range(binding)
        half = 1 << (found.plain_bits - 1)
        return np.where(integers == half, -half, integers)

    def _require_range(self, integers_BK: IntArray, binding: StepBinding) -> None:
        described = self._products
        noise = described.fixed_point.largest - described.fixed_point.levels
        limit = len(described.agreement.contributors) * (row_limit(described.products) + noise)
        if not -limit <= integers_BK.min() <= integers_BK.max() <= limit:
            raise self._beyond_range(binding)

    def _forget(self) -> None:
        self._secret = None


@dataclass(frozen=True)
class _Labels(KeepsSecrets):
    """What a passive makes of the encrypted labels once.

    Attributes:
        digest: of the request.
        key: values of the digits of the key (b, a) at the roots of R, (2, L, N / 2).
        labels: values of the digits of all labels at the roots of S, (H, n, F): F is L times the
            basis elements, the S of a and then those K of b that are asked for.
    """

    digest: bytes
    key: NDArray[np.complex128]
    labels: NDArray[np.complex128]


class ProductContributor(Role):
    """A passive's end: knows the encrypted labels once the request came."""

    def __init__(self, described: DescribedProducts, me: str) -> None:
        frames = described.frames()
        others = [name for name in described.agreement.contributors if name != me]
        described.agreement.position(me)
        self.me = me
        self._products = described
        self._seeds = PairwiseSeeds(me, others, frames)
        self._labels: _Labels | None = None
        super().__init__(frames, self._seeds)

    def accept(self, request: bytes) -> None:
        """Take the encrypted labels, once.

        Raises:
            RemoteProtocolError: malformed, under other parameters, or a second one.
        """
        described, ring = self._products, self._products.ring
        sender = described.agreement.receiver
        if self._labels is not None:
            raise RemoteProtocolError(f"{sender} sent a second request to {self.me}")
        seed, *blobs = open_request(described, self._frames.fingerprint, request)
        key = ring.parse(blobs[0], sender=sender), expand_key(ring, seed)
        kept = described.headroom.kept_bits
        spread_2N = np.stack([ring.rounded(half_LN, kept) for half_LN in key])
        require_spread(spread_2N, 1 << kept, sender=sender)
        self._labels = _Labels(
            digest=hashlib.sha256(request).digest(),
            key=transform(np.stack([ring.centred(half_LN) for half_LN in key])),
            labels=self._label_values(seed, blobs[1:]),
        )

    def _label_values(self, seed: bytes, blobs: Sequence[bytes]) -> NDArray[np.complex128]:
        """See `_Labels`; RemoteProtocolError if a label is no polynomial."""
        ring, found = self._products.ring, self._products.headroom
        columns, sender = self._products.products.columns, self._products.agreement.receiver
        count = len(ring.widths) * (found.stride + columns)
        values_HnF = np.empty((found.rows // 2, len(blobs), count), dtype=np.complex128)
        for place, blob in enumerate(blobs):
            halves = expand_label(ring, seed, place), ring.parse(blob, sender=sender)
            a, b = (ring.centred(half).reshape(-1, found.rows, found.stride) for half in halves)
            digits_LFU = np.concatenate((a, b[:, :, :columns]), axis=2).swapaxes(1, 2)
            values_HnF[:, place] = transform(digits_LFU).reshape(count, -1).T
        return values_HnF

    def answer(self, block: int, rows_Bn: FloatArray, noise_BK: IntArray | None = None) -> bytes:
        """The protected products of one block's people; blocks go up, each is answered once.

        Args:
            block: its index.
            rows_Bn: float32 or float64, the rows of A of `people_of(block)`.
            noise_BK: steps of fixed point, from `protocols.discrete_gaussian` under a key of this
                party; given exactly where the agreement says noise.

        Raises:
            LocalProtocolError: rows of another shape, not finite or beyond the bound; noise that
                is not as agreed; a block at or below the last one; or the setup or the request
                is missing.
        """
        described = self._products
        shape = len(described.people_of(block)), described.products.columns
        integers_Bn = self._quantised(rows_Bn, shape[0])
        agreed = noise_BK is not None or described.agreement.noise is not None
        noise_BK = described.fixed_point.checked_noise(noise_BK, shape) if agreed else None
        if self._labels is None:
            raise LocalProtocolError(f"{self.me} has no labels yet; accept the request first")
        self._seeds.require_finished()
        binding = described.binding(block, self._labels.digest)
        self._frames.begin_step(binding)
        words = self._flattened(*self._ciphertexts(integers_Bn, self._labels), noise_BK, shape)
        self._seeds.add_cancelling(binding, words)
        return self._frames.contribution(self.me, binding, shape, described.pack(words, block))

    def answers(self, rows: Rows, noise: Noise = None) -> Iterator[bytes]:
        """The answers for all blocks in order, one in memory at a time.

        Args:
            rows: A, (people, n); or a function from a range of people to their rows.
            noise: the same of shape (people, K), where it was agreed.
        """
        for block in range(self._products.blocks):
            people = self._products.people_of(block)
            taken = slice(people.start, people.stop)
            rows_Bn = rows(people) if callable(rows) else rows[taken]
            noise_BK = noise(people) if callable(noise) else None if noise is None else noise[taken]
            yield self.answer(block, rows_Bn, noise_BK)

    def _quantised(self, rows_Bn: FloatArray, people: int) -> IntArray:
        agreed, levels = self._products.products, self._products.fixed_point.levels
        if checked_matrix(rows_Bn).shape != (people, agreed.labelled):
            raise LocalProtocolError(
                f"the block has rows of shape {(people, agreed.labelled)}, got {rows_Bn.shape}"
            )
        scaled_Bn = np.rint(rows_Bn * np.float64(levels / agreed.row_bound))
        if np.abs(scaled_Bn).sum(axis=1).max() > row_limit(agreed):
            raise LocalProtocolError(
                f"a row of {self.me} adds up to more than row_bound = {agreed.row_bound:g} in "
                "magnitude; scale the rows, or agree on a larger bound"
            )
        return scaled_Bn.astype(np.int64)

    def _ciphertexts(self, integers_Bn: IntArray, labels: _Labels) -> tuple[Digits, Digits]:
        """Digits of (c0, c1), smudged: (L, C, U, K), where numbers are asked for, and (L, C, N)."""
        found, ring = self._products.headroom, self._products.ring
        count, columns = -(-len(integers_Bn) // found.rows), self._products.products.columns
        padded = np.zeros((count * found.rows, integers_Bn.shape[1]))
        padded[: len(integers_Bn)] = integers_Bn
        values_CnH = transform(padded.reshape(count, found.rows, -1).swapaxes(1, 2))
        products_HCF = np.ascontiguousarray(values_CnH.transpose(2, 0, 1)) @ labels.labels
        products_CFU = inverse(np.ascontiguousarray(products_HCF.transpose(1, 2, 0)))
        zeros_2LCN = self._zeros(labels, count)
        places = (len(ring.widths), count, found.rows, -1)
        sums_LCUF = products_CFU.reshape(count, len(ring.widths), -1, found.rows).transpose(
            1, 0, 3, 2
        )
        c1_LCUS = np.rint(sums_LCUF[..., : found.stride] + zeros_2LCN[1].reshape(places))
        b_LCUK = zeros_2LCN[0].reshape(places)[..., :columns]
        c0_LCUK = np.rint(sums_LCUF[..., found.stride :] + b_LCUK).astype(np.int64)
        c1_LCN = c1_LCUS.astype(np.int64).reshape(len(ring.widths), count, ring.degree)
        c1_LCN[0] += centred_binomial(count * ring.degree).reshape(count, -1)
        self._smudge(c0_LCUK)
        return c0_LCUK, c1_LCN

    def _zeros(self, labels: _Labels, count: int) -> NDArray[np.float64]:
        """Fresh (b u, a u) for so many ciphertexts; the errors come later, in digits."""
        u_CN = ternary(count * self._products.ring.degree).reshape(count, -1)
        return inverse(labels.key[:, :, None] * transform(u_CN))

    def _smudge(self, c0_LCUK: Digits) -> None:
        """Add the noise that drowns what is left of A and of this party's own errors."""
        self._products.ring.add_uniform(c0_LCUK, self._products.headroom.smudging_bits)

    def _flattened(
        self, c0_LCUK: Digits, c1_LCN: Digits, noise_BK: IntArray | None, shape: tuple[int, int]
    ) -> Words:
        """The words of an answer, ciphertext by ciphertext, before the masks."""
        found, ring = self._products.headroom, self._products.ring
        c0_BK = ring.rounded(c0_LCUK, found.kept_bits).reshape(-1, shape[1])[: shape[0]]
        if noise_BK is not None:
            step = np.uint64(found.kept_bits - found.plain_bits)
            c0_BK = c0_BK + (noise_BK.view(np.uint64) << step)
        c1_CN = ring.rounded(c1_LCN, found.kept_bits)
        parts: list[Words] = []
        for place, c1_N in enumerate(c1_CN):
            first = place * found.rows
            parts += [c0_BK[first : first + found.rows].reshape(-1), c1_N]
        return np.concatenate(parts)


class ProductCombiner(Role):
    """The aggregator's end: adds words that are uniform to it."""

    def __init__(self, described: DescribedProducts) -> None:
        self._products = described
        super().__init__(described.frames(), NoSetup())

    def combine(self, block: int, answers: Mapping[str, bytes]) -> bytes:
        """Add one answer of each passive for one block; blocks go up.

        Args:
            block: its index.
            answers: frames by the authenticated names of their senders.

        Raises:
            LocalProtocolError: there is no such block.
            RemoteProtocolError: a passive is missing or unknown, a frame is malformed, replayed or
                of another block, or the frames answer different labels.
        """
        described = self._products
        described.people_of(block)
        frames = self._frames.open_contributions(answers, None)
        total: Words | int = 0
        for name, frame in zip(described.agreement.contributors, frames, strict=True):
            total = total + described.parse(frame, block, sender=name)
        assert not isinstance(total, int)
        return self._frames.sum_of(frames, described.pack(total, block))


def _checked_bits(labels_nK: object, agreement: ProductAgreement) -> IntArray:
    shape = agreement.labelled, agreement.columns
    if type(labels_nK) is not np.ndarray or labels_nK.shape != shape:
        raise LocalProtocolError(
            f"the labels are an array of shape {shape}, got {type(labels_nK).__name__} of shape "
            f"{np.shape(labels_nK)}"  # type: ignore[call-overload]  # whatever it is
        )
    if labels_nK.dtype.kind not in "biuf" or not np.isin(labels_nK, (0, 1)).all():
        raise LocalProtocolError("the labels are bits, 0 or 1; got other numbers")
    return labels_nK.astype(np.int64)

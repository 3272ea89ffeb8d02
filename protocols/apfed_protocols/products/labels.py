"""The encrypted labels: the active makes them of one secret seed, the passives read them.

Run by: the active (`encrypt_labels`) and the passives (`LabelValues`). Everything in a request
follows from 32 secret bytes and the labels, so that whoever is told both makes the same bytes.

Letters: n labels, N coefficients, L digits, U people of a ciphertext, H = U / 2.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.products.described import DescribedProducts
from apfed_protocols.products.ring import Digits, Ring, inverse, transform
from apfed_protocols.randomness import derive_key
from apfed_protocols.sums.bfv import centred_binomial, ternary
from apfed_protocols.sums.interface import IntArray
from apfed_protocols.sums.public_keys import require_spread
from apfed_protocols.sums.roles import KeepsSecrets

__all__ = ["LabelValues", "encrypt_labels", "expand_key", "expand_label", "secret_of"]

_SEED_BYTES = 32


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
    """The parts of a request: the public seed, b of the key, and b of every label.

    Args:
        described: what all parties agreed on.
        root: 32 secret bytes, used once.
        bits_nK: the labels.
    """
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

"""What the dealer hands out: alpha_ij B_ik in additive shares, and the arithmetic on it.

Run by: the dealer (deal), the active (hide its signs, add up its shares) and the aggregator (add
up its shares). Protects: nothing by itself; see `apfed_protocols.moments.roles` for who may hold
what.

The dealer draws signs alpha_ij and ring elements B_ik, and shares c + c' = alpha_ij B_ik, c' at
the combiner from a seed and c at the receiver in blocks of people. For signs e_ij known to both,
sum_i e_ij c_ijk + sum_i e_ij c'_ijk = sum_i (e_ij alpha_ij) B_ik: additions and sign changes only,
so that whatever bits are sent for e, what multiplies B_i is a vector of d signs.

A sign is a bit in a message, 1 for -1; the product of signs is the exclusive or of their bits.
Letters: U people of which N in a block, d features, K columns; arrays modulo 2^32 or 2^64.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.moments.agreement import MomentAgreement
from apfed_protocols.randomness import keystream
from apfed_protocols.sums.masks import Elements

__all__ = [
    "added_shares",
    "block_signs",
    "combiner_shares",
    "dealt_shares",
    "hiding_bits",
    "mask_of_votes",
    "packed_signs",
    "received_bits",
    "received_shares",
    "signed_sum",
]

PackedSigns = NDArray[np.uint8]


def packed_signs(agreement: MomentAgreement, signs_Ud: NDArray[np.int8]) -> PackedSigns:
    """The signs of all people as bits, with zeros after the last.

    Raises:
        LocalProtocolError: no int8 array of U x d signs -1 and +1.
    """
    shape = (agreement.people, agreement.features)
    if type(signs_Ud) is not np.ndarray or signs_Ud.dtype != np.int8 or signs_Ud.shape != shape:
        kind = f"{getattr(signs_Ud, 'dtype', type(signs_Ud).__name__)} {np.shape(signs_Ud)}"
        raise LocalProtocolError(f"signs are an int8 array of shape {shape}, got {kind}")
    if not ((signs_Ud == 1) | (signs_Ud == -1)).all():
        raise LocalProtocolError("signs are -1 and +1, got something else")
    return np.packbits(signs_Ud.reshape(-1) < 0)


def received_bits(agreement: MomentAgreement, body: memoryview, sender: str) -> PackedSigns:
    """Packed signs that came in a message; RemoteProtocolError if bits follow the last."""
    bits = np.frombuffer(body, dtype=np.uint8)
    if int(bits[-1]) & ~_last_byte(agreement):
        raise RemoteProtocolError(f"{sender} sent bits after the last of its signs")
    return bits


def hiding_bits(agreement: MomentAgreement, seed: bytes) -> PackedSigns:
    """The signs alpha of all people, packed."""
    stream = keystream(seed, b"moment hiding signs v1", length=agreement.sign_bytes)
    bits = np.frombuffer(stream, dtype=np.uint8).copy()
    bits[-1] &= _last_byte(agreement)
    return bits


def _last_byte(agreement: MomentAgreement) -> int:
    """The bits of the last byte of packed signs that are signs."""
    unused = 8 * agreement.sign_bytes - agreement.people * agreement.features
    return 0xFF << unused & 0xFF


def block_signs(agreement: MomentAgreement, packed: PackedSigns, people: slice) -> Elements:
    """The signs of a block of people in the ring, N x d; the block begins at a multiple of 8."""
    features = agreement.features
    count = (people.stop - people.start) * features
    start = people.start * features // 8
    bits_Nd = np.unpackbits(packed[start : start + -(-count // 8)], count=count)
    ring: Elements = np.array([1, -1], dtype=np.int64).astype(agreement.word)
    return ring[bits_Nd.reshape(-1, features)]


def mask_of_votes(agreement: MomentAgreement, seed: bytes) -> Elements:
    """B: what hides the sum of votes from the receiver, U x K."""
    count = agreement.people * agreement.columns
    stream = keystream(seed, b"moment votes v1", length=count * agreement.word.itemsize)
    return _elements(agreement, stream, (agreement.people, agreement.columns))


def combiner_shares(agreement: MomentAgreement, seed: bytes, block: int) -> Elements:
    """The combiner's c' of one block, K x N x d."""
    people = agreement.block(block)
    shape = (agreement.columns, people.stop - people.start, agreement.features)
    length = int(np.prod(shape)) * agreement.word.itemsize
    stream = keystream(seed, b"moment shares v1", block.to_bytes(8, "big"), length=length)
    return _elements(agreement, stream, shape)


def dealt_shares(
    agreement: MomentAgreement, hiding: PackedSigns, B_UK: Elements, share_seed: bytes
) -> Iterator[Elements]:
    """Each block of c, K x N x d: alpha B less what the combiner expands."""
    for block, people in enumerate(agreement.each_block()):
        alpha_Nd = block_signs(agreement, hiding, people)
        c_KNd: Elements = B_UK[people].T[:, :, None] * alpha_Nd
        c_KNd -= combiner_shares(agreement, share_seed, block)
        yield c_KNd


def received_shares(agreement: MomentAgreement, body: memoryview, block: int) -> Elements:
    """The receiver's c of one block as it came, K x N x d."""
    people = agreement.block(block)
    return _elements(
        agreement, body, (agreement.columns, people.stop - people.start, agreement.features)
    )


def added_shares(e_Nd: Elements, c_KNd: Elements) -> Elements:
    """sum_i e_ij c_ijk over the people of a block, d x K."""
    total_dK: Elements = (c_KNd * e_Nd).sum(axis=1, dtype=c_KNd.dtype).T
    return total_dK


def signed_sum(agreement: MomentAgreement, packed: PackedSigns, values_UK: Elements) -> Elements:
    """sum_i s_ij values_ik over all people, d x K."""
    total_dK: Elements = np.zeros((agreement.features, agreement.columns), agreement.word)
    for people in agreement.each_block():
        total_dK += block_signs(agreement, packed, people).T @ values_UK[people]
    return total_dK


def _elements(agreement: MomentAgreement, data: Any, shape: tuple[int, ...]) -> Elements:
    elements: Elements = np.frombuffer(data, dtype=agreement.word).reshape(shape)
    return elements

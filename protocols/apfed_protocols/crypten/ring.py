"""Additive sharing in Z_2^64: shares from our own generator, added by CrypTen.

Run by: every party that holds a share. A number is the sum of its shares modulo 2^64, all of
them but one drawn from AES-256-CTR under a fresh key (`apfed_protocols.randomness`): who lacks one
share sees uniform numbers. CrypTen's own sharing draws from `torch.Generator` under seeds that
pairs of neighbours share, and its fixed-point encoder cuts off and overflows silently; neither
is used. Integers only.

Shapes: W parties; arrays of any one shape, signed numbers as int64, shares as uint64.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.crypten.shim import load_crypten
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.randomness import fresh_key, keystream

__all__ = ["Integers", "Shares", "add_shares", "complete", "draw_share", "sum_at_first", "total"]

Integers = NDArray[np.int64]
Shares = NDArray[np.uint64]
_WORD = np.dtype("<u8")


def draw_share(key: bytes, shape: tuple[int, ...]) -> Shares:
    """Return the uniform share that `key` stands for; a key is used once."""
    size = int(np.prod(shape))
    stream = keystream(key, b"additive share", length=_WORD.itemsize * size)
    return np.frombuffer(stream, _WORD).reshape(shape)


def complete(values: Integers, drawn: Sequence[Shares]) -> Shares:
    """Return the share that makes `values` of the drawn ones."""
    last = values.astype(np.int64).view(_WORD).copy()
    for share in drawn:
        last -= share
    return last


def total(shares: Sequence[Shares]) -> Integers:
    """Return the numbers that all shares together stand for."""
    summed = shares[0].copy()
    for share in shares[1:]:
        summed += share
    return summed.view(np.int64)


def add_shares(shares: Sequence[Shares]) -> Shares:
    """Add one party's shares of several numbers with CrypTen; the result is its share of the sum.

    Raises:
        LocalProtocolError: CrypTen is not installed.
    """
    load_crypten()
    first, *others = (_shared(share) for share in shares)
    for other in others:
        first = first + other
    return _words(first.share)


def sum_at_first(communicator: Any, values: Integers) -> Integers | None:
    """Add each party's numbers in a CrypTen world; the party of rank 0 learns the sum alone.

    Every party calls this with an array of the same shape. Shares are gathered, and put
    together at rank 0: CrypTen's `reveal(dst=0)` would leave plaintext at other parties.

    Args:
        communicator: this party's, such as `apfed_protocols.crypten.communicator` describes. Who
            reads what it carries reads all numbers.
        values: this party's, int64; sums must stay below 2^63 in magnitude.

    Returns:
        The sum at rank 0, None elsewhere.

    Raises:
        LocalProtocolError: not int64 numbers.
        RemoteProtocolError: a party fell silent, or has an array of another shape.
    """
    if values.dtype != np.int64:
        raise LocalProtocolError(
            f"additive sharing takes int64 numbers, got {values.dtype}; quantise them first"
        )
    load_crypten()
    _agree_on_shape(communicator, values.shape)
    rank, parties = communicator.get_rank(), communicator.get_world_size()
    drawn = [draw_share(fresh_key(), values.shape) for _ in range(parties - 1)]
    own = [*drawn[:rank], complete(values, drawn), *drawn[rank:]]
    sent = [_shared(share).share for share in own]
    size = sent[rank].size()
    received = [
        communicator.scatter(sent if source == rank else None, source, size)
        for source in range(parties)
    ]
    summed = _shared_tensor(received[0])
    for share in received[1:]:
        summed = summed + _shared_tensor(share)
    gathered = communicator.gather(summed.share, 0)
    return total([_words(share) for share in gathered]) if rank == 0 else None


def _agree_on_shape(communicator: Any, shape: tuple[int, ...]) -> None:
    """Compare digests first: gloo ends the process at a message longer than expected."""
    import torch

    digest = hashlib.sha256(b"shape" + repr(shape).encode()).digest()
    mark = int.from_bytes(digest[:8], "big", signed=True)
    marks = communicator.all_gather(torch.tensor([mark]))
    others = [rank for rank, theirs in enumerate(marks) if int(theirs) != mark]
    if others:
        raise RemoteProtocolError(
            f"party {communicator.get_rank()} adds numbers of shape {shape}, parties "
            f"{', '.join(map(str, others))} others; give all of them arrays of one shape"
        )


def _shared(share: Shares) -> Any:
    import torch

    # torch takes no memory that it must not write to.
    return _shared_tensor(torch.from_numpy(share.view(np.int64).copy()))


def _shared_tensor(share: Any) -> Any:
    from crypten.mpc.primitives import ArithmeticSharedTensor

    return ArithmeticSharedTensor.from_shares(share, precision=0)


def _words(tensor: Any) -> Shares:
    words: Shares = tensor.numpy().view(_WORD)
    return words

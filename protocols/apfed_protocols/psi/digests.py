"""Digests of IDs, each under the same key, and places that follow from them.

Run by: every party of every backend, on its own IDs.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["PLACES", "digest_each", "three_different"]

PLACES = 3

_CHUNK = 2**12


def digest_each(ids: Sequence[bytes], keyed: "hashlib.blake2b") -> NDArray[np.uint8]:
    """What a hash that was given its key makes of each ID, shape (n, bytes of a digest).

    They are as secret as the IDs: who has the key can try out guessed IDs.
    """
    digests, copy = np.empty((len(ids), keyed.digest_size), np.uint8), keyed.copy
    for start in range(0, len(ids), _CHUNK):  # millions of small objects would crowd the memory
        found = []
        for identity in ids[start : start + _CHUNK]:
            one = copy()
            one.update(identity)
            found.append(one.digest())
        rows = np.frombuffer(b"".join(found), np.uint8)
        digests[start : start + _CHUNK] = rows.reshape(-1, keyed.digest_size)
    return digests


def three_different(words_n3: NDArray[np.uint64], size: int) -> NDArray[np.int64]:
    """Uniform triples of different places below `size`, up to a bias of size / 2^63; (n, 3)."""
    first, second, third = (
        ((words_n3[:, k] >> np.uint64(1)) % np.uint64(size - k)).astype(np.int64)
        for k in range(PLACES)
    )
    second += second >= first
    low, high = np.minimum(first, second), np.maximum(first, second)
    third += third >= low
    third += third >= high
    return np.stack([first, second, third], axis=1)

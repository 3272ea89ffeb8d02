"""Digests of IDs, each under the same key.

Run by: every party of every backend, on its own IDs.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["digest_each"]

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

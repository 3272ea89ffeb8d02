"""Public keys with other residues, in setup messages whose fingerprint is right."""

import numpy as np
import zstandard
from numpy.typing import NDArray

from protocols.sums.homomorphic import HomomorphicSum
from protocols.sums.seal_blobs import SEAL_HEADER, unpacked

__all__ = ["genuine_key", "residues_of", "setup_with", "with_residues"]

_WORD = 8


def genuine_key(described: HomomorphicSum) -> bytes:
    scheme = described.scheme
    return scheme.public_key(scheme.key_pair())


def residues_of(key: bytes, degree: int) -> NDArray[np.uint64]:
    """One row for each polynomial modulo each prime, in the transformed form that SEAL keeps."""
    content = unpacked(key)
    numbers = np.frombuffer(content, dtype="<u8", offset=len(content) % (_WORD * degree))
    return numbers.reshape(-1, degree).copy()


def with_residues(key: bytes, residues: NDArray[np.uint64]) -> bytes:
    """The same key with these residues, as SEAL would write it."""
    content = unpacked(key)[: -residues.nbytes] + residues.tobytes()
    frame = zstandard.ZstdCompressor().compress(content)
    size = (SEAL_HEADER + len(frame)).to_bytes(_WORD, "little")
    return key[: SEAL_HEADER - _WORD] + size + frame


def setup_with(described: HomomorphicSum, key: bytes) -> bytes:
    """What a key holder sends whose public key is this one."""
    return described.frames(key).setup(key)

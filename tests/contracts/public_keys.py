"""Public keys with other residues, in setup messages whose fingerprint is right."""

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.sums.homomorphic import HomomorphicSum
from apfed_protocols.sums.seal_cipher import DEGREE


def genuine_key(described: HomomorphicSum) -> bytes:
    cipher = described.cipher
    return cipher.public_key(cipher.key_pair())


def residues_of(key: bytes) -> NDArray[np.uint64]:
    """One row for each polynomial modulo each prime, in the transformed form that SEAL keeps."""
    return np.frombuffer(key, dtype="<u8").reshape(-1, DEGREE).copy()


def setup_with(described: HomomorphicSum, key: bytes) -> bytes:
    """What a key holder sends whose public key is this one."""
    return described.frames(key).setup(key)

"""The peer of other federated learning systems: Paillier, with many fields in one number.

After Zhang et al. 2020 (BatchCrypt), section 4: signed fixed-point values are shifted to be
non-negative and packed side by side with room for M of them. Library: `phe`, which is no
dependency of this project.
"""

import importlib.util
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["PackedPaillier", "why_not"]

_KEY_BITS = 2048
_BITS = 16


def why_not() -> str | None:
    """Why Paillier cannot be measured here, or None."""
    if importlib.util.find_spec("phe") is None:
        return "phe is not installed; pip install phe"
    return None


class PackedPaillier:
    """Sums of `passives` vectors under one 2048-bit key.

    Args:
        passives: M, how many vectors are added.
    """

    def __init__(self, *, passives: int) -> None:
        # phe ships no types and is imported only where it is installed
        from phe import paillier  # type: ignore[import-not-found, import-untyped, unused-ignore]

        self._public, self._private = paillier.generate_paillier_keypair(n_length=_KEY_BITS)
        self._encrypted_number = paillier.EncryptedNumber
        self._width = _BITS + math.ceil(math.log2(passives))
        self._fields = (_KEY_BITS - 2) // self._width

    def contribution_bytes(self, values: int) -> int:
        """Bytes of the ciphertexts of one vector; each is a number modulo n^2."""
        return -(-values // self._fields) * 2 * _KEY_BITS // 8

    def add(self, values: list[NDArray[np.float32]]) -> NDArray[np.float64]:
        """Encrypt, serialise, add and decrypt, as one path; values lie in [-1, 1]."""
        sent = [self._encrypt(one) for one in values]
        totals = sent[0]
        for blobs in sent[1:]:
            totals = [
                self._bytes(self._number(a) + self._number(b))
                for a, b in zip(totals, blobs, strict=True)
            ]
        return self._decrypt(totals, len(values), values[0].size)

    def _encrypt(self, values: NDArray[np.float32]) -> list[bytes]:
        levels = 2 ** (_BITS - 1) - 1
        shifted = (np.rint(values.reshape(-1) * levels).astype(np.int64) + levels).tolist()
        packed = (
            self._join(shifted[start : start + self._fields])
            for start in range(0, len(shifted), self._fields)
        )
        return [self._bytes(self._public.encrypt(number)) for number in packed]

    def _decrypt(self, blobs: list[bytes], addends: int, count: int) -> NDArray[np.float64]:
        levels = 2 ** (_BITS - 1) - 1
        mask = 2**self._width - 1
        fields = [
            number >> (self._width * place) & mask
            for number in (self._private.decrypt(self._number(blob)) for blob in blobs)
            for place in range(self._fields)
        ]
        sums: NDArray[np.float64] = np.array(fields[:count], dtype=np.float64)
        real: NDArray[np.float64] = (sums - addends * levels) / levels
        return real

    def _join(self, fields: list[int]) -> int:
        return sum(value << (self._width * place) for place, value in enumerate(fields))

    def _bytes(self, number: Any) -> bytes:
        raw: int = number.ciphertext()
        return raw.to_bytes(2 * _KEY_BITS // 8, "big")

    def _number(self, blob: bytes) -> Any:
        return self._encrypted_number(self._public, int.from_bytes(blob, "big"))

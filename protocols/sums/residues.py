"""Ciphertexts as the numbers that they are: adding them needs no cryptographic library.

Run by: the aggregator of a homomorphic sum, which adds here what it cannot read, and by whoever
loads a ciphertext. Protects from: hostile bytes; the aggregator hands nothing to SEAL, and a
ciphertext of other parameters, scale, level or size ends in `RemoteProtocolError`.

Under one data prime q a ciphertext is 2N numbers modulo q, and the ciphertext of a sum is the
sum of those numbers (Cheon et al. 2017, section 3.4, Add; the same in BFV). SEAL 4.1 writes a
prefix that names the parameters, then 8 bytes a number, little endian. What passives send is
compressed by SEAL; a sum travels as it is, which is quicker and as long.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import zstandard
from numpy.typing import NDArray

from protocols.errors import RemoteProtocolError
from protocols.sums.seal_blobs import SEAL_HEADER, BlobShape, unpacked

__all__ = ["Residues"]

Numbers = NDArray[np.uint64]
_WORD = 8


@dataclass(frozen=True)
class Residues:
    """How SEAL writes ciphertexts of one scheme, level and scale.

    Attributes:
        shape: of a compressed one.
        prefix: what precedes the numbers.
        modulus: q.
    """

    shape: BlobShape
    prefix: bytes
    modulus: int

    @classmethod
    def of(cls, own: bytes, *, numbers: int, modulus: int) -> "Residues":
        """Read the form off a ciphertext of `numbers` numbers that SEAL serialised here."""
        return cls(BlobShape.of(own), unpacked(own)[: -_WORD * numbers], modulus)

    def check(self, blob: bytes, *, sender: str) -> None:
        """Pass a blob, compressed or not, that SEAL may load.

        Raises:
            RemoteProtocolError: another kind, size or version, or a damaged one.
        """
        if not self._is_plain(blob):
            self.shape.check(blob, sender=sender)
        elif len(blob) != SEAL_HEADER + self.shape.content or not _states(blob, len(blob)):
            raise _refused(sender, "states a wrong length")

    def add(self, contributions: Mapping[str, Sequence[bytes]], vectors: int) -> list[bytes]:
        """Add the ciphertexts of all contributors, `vectors` of each.

        Raises:
            RemoteProtocolError: a blob is malformed or of other parameters.
        """
        for name, blobs in contributions.items():
            if len(blobs) != vectors or not vectors:
                raise RemoteProtocolError(
                    f"{name} sent {len(blobs)} ciphertexts, expected {vectors} for its shape"
                )
        return [
            self._sum({name: blobs[vector] for name, blobs in contributions.items()})
            for vector in range(vectors)
        ]

    def _sum(self, blobs: Mapping[str, bytes]) -> bytes:
        modulus, total, over = np.uint64(self.modulus), None, None
        for name, blob in blobs.items():
            numbers = self.numbers(blob, sender=name)
            if total is None or over is None:
                total, over = numbers.copy(), np.empty_like(numbers)
                continue
            total += numbers
            # Below q the difference wraps around to a large number, so the least is the residue.
            np.subtract(total, modulus, out=over)
            np.minimum(total, over, out=total)
        assert total is not None
        return self.blob(total)

    def blob(self, numbers: Numbers) -> bytes:
        """An uncompressed ciphertext of these numbers, as SEAL loads it."""
        length = SEAL_HEADER + len(self.prefix) + numbers.nbytes
        size = length.to_bytes(_WORD, "little")
        return b"".join((self.shape.uncompressed, size, self.prefix, numbers.data))

    def own_numbers(self, blob: bytes) -> Numbers:
        """The numbers of a ciphertext that this party's SEAL serialised just now; read-only."""
        return np.frombuffer(unpacked(blob), dtype="<u8", offset=len(self.prefix))

    def numbers(self, blob: bytes, *, sender: str) -> Numbers:
        """The numbers of a ciphertext, all below q; read-only.

        Raises:
            RemoteProtocolError: the blob is malformed or of other parameters.
        """
        self.check(blob, sender=sender)
        start = SEAL_HEADER
        if not self._is_plain(blob):
            try:
                blob, start = unpacked(blob), 0
            except zstandard.ZstdError as error:
                raise _refused(sender, "holds a damaged Zstandard frame") from error
        if len(blob) - start != self.shape.content or not blob.startswith(self.prefix, start):
            raise _refused(sender, "is of another scale, level or size")
        numbers: Numbers = np.frombuffer(blob, dtype="<u8", offset=start + len(self.prefix))
        if int(numbers.max()) >= self.modulus:
            raise _refused(sender, "holds numbers beyond the modulus")
        return numbers

    def _is_plain(self, blob: bytes) -> bool:
        return blob[: len(self.shape.seal)] == self.shape.uncompressed


def _states(blob: bytes, length: int) -> bool:
    return int.from_bytes(blob[SEAL_HEADER - _WORD : SEAL_HEADER], "little") == length


def _refused(sender: str, why: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"a ciphertext from {sender} {why}; it is refused")

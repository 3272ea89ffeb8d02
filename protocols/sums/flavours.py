"""What is encrypted, and where in a ciphertext the numbers stand: slots or coefficients.

Run by: `SealScheme`, with one flavour. Letters: V ciphertexts, S numbers in each.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import tenseal.sealapi as seal
from numpy.typing import NDArray

from protocols.sums.scratch import ScratchFile, scratch_file
from protocols.sums.seal_blobs import SEAL_HEADER, BlobShape, unpacked

__all__ = ["Ckks", "Coefficients", "Encoder", "Flavour"]


class Encoder(Protocol):
    """Between numbers and SEAL's plaintexts, which only live in this process."""

    def encode(self, numbers_S: NDArray[np.int64], plain: Any, scratch: ScratchFile) -> None: ...

    def decode(self, plain: Any, scratch: ScratchFile) -> NDArray[Any]: ...


class Flavour(Protocol):
    """What differs between the schemes: their parameters and encoding."""

    def __hash__(self) -> int: ...

    @property
    def poly_degree(self) -> int: ...

    @property
    def primes(self) -> tuple[int, ...]:
        """Bits of the data prime and, if there are two, of the key-switching prime."""
        ...

    @property
    def slots(self) -> int:
        """Numbers in one ciphertext."""
        ...

    def parameters(self) -> Any:
        """SEAL's parameters, without degree and primes."""
        ...

    def encoder(self, context: Any) -> Encoder: ...


@dataclass(frozen=True)
class Ckks:
    """Cheon, Kim, Kim, Song 2017: approximate, N / 2 real slots."""

    poly_degree: int
    primes: tuple[int, ...]
    scale_bits: int

    @property
    def slots(self) -> int:
        return self.poly_degree // 2

    def parameters(self) -> Any:
        return seal.EncryptionParameters(seal.SCHEME_TYPE.CKKS)

    def encoder(self, context: Any) -> Encoder:
        return _Slots(seal.CKKSEncoder(context), 2.0**self.scale_bits)


@dataclass(frozen=True)
class Coefficients:
    """Brakerski 2012, Fan and Vercauteren 2012: exact, N integers modulo 2^plain_bits.

    They are the coefficients of the plaintext themselves: sums need no product of slots, and so
    neither end pays for a transform.
    """

    poly_degree: int
    primes: tuple[int, ...]
    plain_bits: int

    @property
    def slots(self) -> int:
        return self.poly_degree

    def parameters(self) -> Any:
        parameters = seal.EncryptionParameters(seal.SCHEME_TYPE.BFV)
        parameters.set_plain_modulus(1 << self.plain_bits)
        return parameters

    def encoder(self, context: Any) -> Encoder:
        return _Polynomials(context, self.poly_degree, self.plain_bits)


class _Slots:
    """CKKS's encoder."""

    def __init__(self, encoder: Any, scale: float) -> None:
        self._encoder, self._scale = encoder, scale

    def encode(self, numbers_S: NDArray[np.int64], plain: Any, scratch: ScratchFile) -> None:
        self._encoder.encode(numbers_S.astype(np.float64).tolist(), self._scale, plain)

    def decode(self, plain: Any, scratch: ScratchFile) -> NDArray[np.float64]:
        return np.array(self._encoder.decode_double(plain), dtype=np.float64)


class _Polynomials:
    """Plaintexts from and to the words that SEAL would save: no list of Python numbers."""

    def __init__(self, context: Any, degree: int, bits: int) -> None:
        self._context, self._degree = context, degree
        self._mask, self._half = (1 << bits) - 1, 1 << (bits - 1)
        with scratch_file() as scratch:
            sample = scratch.save(seal.Plaintext(f"1x^{degree - 1}"))
        prefix = unpacked(sample)[: -8 * degree]
        size = SEAL_HEADER + len(prefix) + 8 * degree
        self._start = BlobShape.of(sample).uncompressed + size.to_bytes(8, "little") + prefix

    def encode(self, numbers_S: NDArray[np.int64], plain: Any, scratch: ScratchFile) -> None:
        """Any integers; they count modulo 2^plain_bits."""
        words_S = (numbers_S & self._mask).astype("<i8", copy=False)
        scratch.load(plain, self._context, self._start + words_S.tobytes())

    def decode(self, plain: Any, scratch: ScratchFile) -> NDArray[np.int64]:
        """Integers in [-t/2, t/2); SEAL leaves out leading zeros."""
        count = plain.coeff_count()
        words = np.frombuffer(unpacked(scratch.save(plain))[-8 * count :], dtype="<i8")
        numbers = np.zeros(self._degree, dtype=np.int64)
        numbers[:count] = words
        return ((numbers + self._half) & self._mask) - self._half

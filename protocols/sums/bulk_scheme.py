"""Encryption whose errors come in bulk: what makes the fast form fast.

Run by: every role of `ckks_fast`. SEAL draws each coefficient of u, e0 and e1 on its own behind
a lock, which is over half of the time of an encryption. Here they come from AES-256 in counter
mode, fresh keys of the operating system for each contribution, with SEAL's distributions: u
uniform on {-1, 0, 1}; e centred binomial of 21 pairs of bits, variance 21/2. The rest is SEAL's:
parameters, keys, the products with the public key, decryption, all checks of what peers send.

(c0, c1) = (b u + e0 + q m / t, a u + e1) under the public key (b, a): Fan and Vercauteren 2012,
section 3 (after Lyubashevsky, Peikert, Regev 2010). Letters: N coefficients, V ciphertexts.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tenseal.sealapi as seal
from numpy.typing import NDArray

from protocols.randomness import fresh_key, keystream
from protocols.sums.flavours import Coefficients
from protocols.sums.scratch import scratch_file
from protocols.sums.seal_blobs import SEAL_HEADER
from protocols.sums.seal_scheme import SealContext, SealScheme

__all__ = ["BulkScheme", "centred_binomial", "ternary"]

Numbers = NDArray[np.uint64]
_PAIRS = np.uint64(2**21 - 1)
# Bytes 0 to 254 give each remainder 85 times; 255 is drawn again.
_ACCEPTED = 255
_REMAINDERS = (np.arange(256) % 3 - 1).astype(np.int64)


def ternary(count: int) -> NDArray[np.int64]:
    """`count` secret numbers, uniform on {-1, 0, 1}."""
    drawn = np.zeros(0, dtype=np.uint8)
    while len(drawn) < count:
        # A 255th is rejected on average; a 32nd more than that makes a second draw very rare.
        stream = keystream(fresh_key(), b"ternary", length=count + count // 28 + 32)
        more = np.frombuffer(stream, dtype=np.uint8)
        drawn = np.concatenate((drawn, more[more < _ACCEPTED]))
    numbers: NDArray[np.int64] = _REMAINDERS[drawn[:count]]
    return numbers


def centred_binomial(count: int) -> NDArray[np.int64]:
    """`count` secret numbers, each the difference of two sums of 21 fair bits: -21 to 21."""
    words = np.frombuffer(keystream(fresh_key(), b"binomial", length=8 * count), dtype="<u8")
    plus = np.bitwise_count(words & _PAIRS)
    minus = np.bitwise_count((words >> np.uint64(32)) & _PAIRS)
    numbers: NDArray[np.int64] = plus.view(np.int8).astype(np.int64) - minus
    return numbers


class BulkScheme(SealScheme):
    """SEAL under coefficients and one prime, with errors drawn here; a zero is 2N residues."""

    def __init__(self, flavour: Coefficients) -> None:
        super().__init__(flavour)
        modulus, plain = self.ciphertext.modulus, 2**flavour.plain_bits
        self._degree, self._modulus, self._plain_bits = flavour.poly_degree, modulus, plain - 1
        self._whole, self._rest = modulus // plain, (modulus % plain) / plain
        self._level = self._seal.first_parms_id()
        self.ciphertext_bytes = SEAL_HEADER + self.ciphertext.shape.content

    def zero(self, context: SealContext) -> Numbers:
        """A fresh encryption of zeros, for one later ciphertext of `encrypt`."""
        zero: Numbers = self._zeros(context, 1)[0]
        return zero

    def encrypt(
        self, context: SealContext, slots_VS: NDArray[np.int64], zeros: Sequence[Any] = ()
    ) -> list[bytes]:
        """One raw ciphertext for each row of numbers; the first rows use up `zeros`."""
        missing = len(slots_VS) - len(zeros)
        fresh = self._zeros(context, missing) if missing else ()
        blobs = []
        for numbers, slots_S in zip((*zeros, *fresh), slots_VS, strict=True):
            c0_N = numbers[: self._degree]
            c0_N[:] = self._reduced(c0_N.view(np.int64) + self._scaled(slots_S))
            blobs.append(self.ciphertext.blob(numbers))
        return blobs

    def _zeros(self, context: SealContext, count: int) -> NDArray[np.uint64]:
        """Residues of `count` encryptions of zeros, one a row."""
        u_VN = ternary(count * self._degree).reshape(count, -1)
        numbers_VR = centred_binomial(2 * count * self._degree).reshape(count, -1)
        u, product = seal.Plaintext(), seal.Ciphertext(self._seal)
        with scratch_file() as scratch:
            for u_N, numbers_R in zip(u_VN, numbers_VR, strict=True):
                self._encoder.encode(u_N, u, scratch)
                self._evaluator.transform_to_ntt_inplace(u, self._level)
                self._evaluator.multiply_plain(context.public_key.data(), u, product)
                self._evaluator.transform_from_ntt_inplace(product)
                numbers_R += self.ciphertext.own_numbers(scratch.save(product)).view(np.int64)
        return self._reduced(numbers_VR)

    def zeros_in(self, blobs: Sequence[bytes]) -> list[Numbers]:
        """Zeros that this party's worker encrypted."""
        return [self.ciphertext.numbers(blob, sender="the worker").copy() for blob in blobs]

    def _scaled(self, integers_N: NDArray[np.int64]) -> NDArray[np.int64]:
        """What stands for these integers m, modulo t: q m / t to within one, below q."""
        m_N = integers_N & self._plain_bits
        scaled_N: NDArray[np.int64] = m_N * self._whole + (m_N * self._rest).astype(np.int64)
        return scaled_N

    def _reduced(self, numbers: NDArray[np.int64]) -> Numbers:
        """Modulo q, for numbers in [-q, 2q)."""
        numbers -= self._modulus
        for _ in range(2):
            numbers += (numbers >> 63) & self._modulus
        return numbers.view(np.uint64)

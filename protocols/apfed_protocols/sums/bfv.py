"""BFV sum: integers in the coefficients of a ciphertext, exact; alone, or over pairwise masks.

Run by: the active (holds the only secret key, decrypts only the sum), the passives (public key;
under masks one seed with each other passive), the aggregator (no key at all). Alone it protects
from and does not protect from the same as `ckks`: see there. Under masks also from a curious active
and a curious aggregator together, as long as two passives are honest (a decrypted contribution is
uniform modulo t), and an active that sends different representations to different passives gets
uniform noise. Not from: M - 1 passives and the active together; a passive that falls silent (the
step then has no sum); an aggregator that adds a constant to the sum.

For sums, in which nothing is multiplied, slots buy nothing: the integers are the coefficients of
the message polynomial, with one prime q and a plain modulus t = 2^k. That is BFV (Brakerski 2012,
Fan and Vercauteren 2012), and CKKS (Cheon et al. 2017, section 3.4) with the message above the
noise and no canonical embedding. Decryption rounds the noise away exactly.

SEAL draws each coefficient of u, e0 and e1 on its own behind a lock, which is over half of the time
of an encryption. Here they come in bulk from AES-256 in counter mode, fresh keys of the operating
system for each contribution, with SEAL's distributions: u uniform on {-1, 0, 1}; e centred binomial
of 21 pairs of bits, variance 21/2. The rest is SEAL's: parameters, keys, the products with the
public key, decryption. A ciphertext is

    (c0, c1) = (b u + e0 + q m / t, a u + e1)  under the public key (b, a):

Fan and Vercauteren 2012, section 3 (after Lyubashevsky, Peikert, Regev 2010). Letters: N
coefficients, V ciphertexts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import tenseal.sealapi as seal
from numpy.typing import NDArray

from apfed_protocols.integers import take_numpy_integers
from apfed_protocols.randomness import derive_key, fresh_key, keystream
from apfed_protocols.sums.agreement import SumAgreement
from apfed_protocols.sums.fixed_point import EXACT_FLOAT_BITS, FixedPoint, Packing
from apfed_protocols.sums.headroom import MODULUS_MARGIN, densest, fresh_noise, peak, require_secure
from apfed_protocols.sums.homomorphic import LEAKS_WITHOUT_MASKS, RESTS_ON_THE_KEY, HomomorphicSum
from apfed_protocols.sums.interface import Reading, SumLeaks, spelled
from apfed_protocols.sums.seal_cipher import (
    ScratchFile,
    SealCipher,
    SealContext,
    SealForm,
    scratch_file,
)

__all__ = [
    "BfvCipher",
    "BfvHeadroom",
    "BfvSum",
    "MaskedBfvSum",
    "centred_binomial",
    "solve_bfv",
    "ternary",
]

Numbers = NDArray[np.uint64]
_WORD = np.dtype("<i8")

_PRIMES = (56, 60)
"""Bits of the one prime, in order of preference: residues of 56 bits travel in 7 bytes, not 8."""

# In standard deviations, exceeded with probability below 2^-40: a coefficient is close to
# Gaussian, and the margin is for free.
_TAIL = 10.0

_PAIRS = np.uint64(2**21 - 1)
# Bytes 0 to 254 give each remainder 85 times; 255 is drawn again.
_ACCEPTED = 255
_REMAINDERS = (np.arange(256) % 3 - 1).astype(np.int64)


def ternary(count: int, key: bytes | None = None) -> NDArray[np.int64]:
    """`count` secret numbers, uniform on {-1, 0, 1}; a function of the key where one is given."""
    drawn = np.zeros(0, dtype=np.uint8)
    while len(drawn) < count:
        # A 255th is rejected on average; a 32nd more than that makes a second draw very rare.
        used = fresh_key() if key is None else derive_key(key, len(drawn).to_bytes(8, "big"))
        stream = keystream(used, b"ternary", length=count + count // 28 + 32)
        more = np.frombuffer(stream, dtype=np.uint8)
        drawn = np.concatenate((drawn, more[more < _ACCEPTED]))
    numbers: NDArray[np.int64] = _REMAINDERS[drawn[:count]]
    return numbers


def centred_binomial(count: int, key: bytes | None = None) -> NDArray[np.int64]:
    """`count` secret numbers, each the difference of two sums of 21 fair bits: -21 to 21.

    They are a function of the key where one is given.
    """
    used = fresh_key() if key is None else key
    words = np.frombuffer(keystream(used, b"binomial", length=8 * count), dtype="<u8")
    plus = np.bitwise_count(words & _PAIRS)
    minus = np.bitwise_count((words >> np.uint64(32)) & _PAIRS)
    numbers: NDArray[np.int64] = plus.view(np.int8).astype(np.int64) - minus
    return numbers


class BfvCipher(SealCipher):
    """Coefficients modulo t = 2^bits, with errors drawn here; a zero is 2N residues.

    For the other arguments see `SealCipher`.
    """

    seal_type = seal.SCHEME_TYPE.BFV

    def __init__(self, poly_degree: int, primes: tuple[int, ...], bits: int) -> None:
        super().__init__(poly_degree, primes, bits)
        self.slots = poly_degree
        self._mask, self._half = (1 << bits) - 1, 1 << (bits - 1)
        self._plaintext_form = SealForm.of(seal.Plaintext(f"1x^{poly_degree - 1}"), poly_degree)
        self._modulus, plain = self.residues.modulus, 1 << bits
        self._whole, self._rest = self._modulus // plain, (self._modulus % plain) / plain
        self._level = self._seal.first_parms_id()

    def _set_more(self, parameters: Any) -> None:
        parameters.set_plain_modulus(1 << self._bits)

    def encode(self, numbers_S: NDArray[np.int64], plain: Any, scratch: ScratchFile) -> None:
        """Any integers; they count modulo t."""
        words_S = (numbers_S & self._mask).astype(_WORD, copy=False)
        self._plaintext_form.load(plain, self._seal, words_S.tobytes(), scratch)

    def decode(self, plain: Any, scratch: ScratchFile) -> NDArray[np.int64]:
        """Integers in [-t/2, t/2); SEAL leaves out leading zeros."""
        count = plain.coeff_count()
        words = np.frombuffer(SealForm.content(scratch.save(plain))[-8 * count :], dtype=_WORD)
        numbers = np.zeros(self.slots, dtype=np.int64)
        numbers[:count] = words
        return ((numbers + self._half) & self._mask) - self._half

    def zero(self, context: SealContext) -> Numbers:
        """A fresh encryption of zeros, for one later ciphertext of `encrypt`."""
        zero: Numbers = self._zeros(context, 1)[0]
        return zero

    def zeros_in(self, blobs: Sequence[bytes]) -> list[Numbers]:
        return [self.residues.parse(blob, sender="the worker") for blob in blobs]

    def encrypt(
        self, context: SealContext, slots_VS: NDArray[np.int64], zeros: Sequence[Any] = ()
    ) -> list[bytes]:
        missing = len(slots_VS) - len(zeros)
        fresh = self._zeros(context, missing) if missing else ()
        blobs = []
        for numbers, slots_S in zip((*zeros, *fresh), slots_VS, strict=True):
            c0_N = numbers[: self.slots]
            c0_N[:] = self._reduced(c0_N.view(np.int64) + self._scaled(slots_S))
            blobs.append(self.residues.pack(numbers))
        return blobs

    def _zeros(self, context: SealContext, count: int) -> Numbers:
        """Residues of `count` encryptions of zeros, one a row."""
        u_VN = ternary(count * self.slots).reshape(count, -1)
        numbers_VR = centred_binomial(2 * count * self.slots).reshape(count, -1)
        u, product = seal.Plaintext(), seal.Ciphertext(self._seal)
        with scratch_file() as scratch:
            for u_N, numbers_R in zip(u_VN, numbers_VR, strict=True):
                self.encode(u_N, u, scratch)
                self._evaluator.transform_to_ntt_inplace(u, self._level)
                self._evaluator.multiply_plain(context.public_key.data(), u, product)
                self._evaluator.transform_from_ntt_inplace(product)
                numbers_R += self.ciphertext_form.numbers(product, scratch).view(np.int64)
        return self._reduced(numbers_VR)

    def _scaled(self, integers_N: NDArray[np.int64]) -> NDArray[np.int64]:
        """What stands for these integers m, modulo t: q m / t to within one, below q."""
        m_N = integers_N & self._mask
        scaled_N: NDArray[np.int64] = m_N * self._whole + (m_N * self._rest).astype(np.int64)
        return scaled_N

    def _reduced(self, numbers: NDArray[np.int64]) -> Numbers:
        """Modulo q, for numbers in [-q, 2q)."""
        numbers -= self._modulus
        for _ in range(2):
            numbers += (numbers >> 63) & self._modulus
        return numbers.view(np.uint64)


@dataclass(frozen=True, kw_only=True)
class BfvHeadroom:
    """Parameters that fit.

    Attributes:
        poly_degree: N, the ring degree and the integers of a ciphertext.
        primes: bits of the one prime.
        plain_bits: log2 of the plain modulus t: the most that the noise allows, so that most
            numbers modulo t stand for no sum, and a damaged sum shows.
        packing: how integers share the coefficients.
    """

    poly_degree: int
    primes: tuple[int, ...]
    plain_bits: int
    packing: Packing


def solve_bfv(
    fixed_point: FixedPoint, *, poly_degree: int = 4096, primes: tuple[int, ...] = _PRIMES
) -> BfvHeadroom:
    """Find the densest packing, and for it the first prime, that fit.

    Args:
        fixed_point: what is added.
        poly_degree: N.
        primes: bits of the one prime, in order of preference.

    Raises:
        LocalProtocolError: less than 128-bit security, or no packing fits; says what would.
    """
    for bits in primes:
        require_secure(poly_degree, (bits,))

    def fit(wanted: FixedPoint, fields: int) -> BfvHeadroom | None:
        found = (_fit(wanted, fields, poly_degree, bits) for bits in primes)
        return next((each for each in found if each is not None), None)

    return densest(fixed_point, fit, prime_bits=primes[-1])


def _fit(fixed_point: FixedPoint, fields: int, poly_degree: int, bits: int) -> BfvHeadroom | None:
    # Decryption is exact while the noise of a coefficient, rounding of q m / t included
    # (1 or less for each addend), stays below q / 2t. (Fan and Vercauteren 2012, lemma 1.)
    noise = _TAIL * fresh_noise(poly_degree, fixed_point.contributors) + fixed_point.contributors
    plain_bits = math.floor(math.log2(2 ** (bits - 1) / MODULUS_MARGIN / noise))
    width = fixed_point.field_bits
    if 2 * peak(fixed_point, fields) >= 2**plain_bits or fields * width > EXACT_FLOAT_BITS:
        return None
    return BfvHeadroom(
        poly_degree=poly_degree,
        primes=(bits,),
        plain_bits=plain_bits,
        packing=Packing(fields=fields, field_bits=width, slots=poly_degree),
    )


@dataclass(frozen=True)
class BfvSum(HomomorphicSum):
    """Sum with one prime and up to two fixed-point fields a coefficient.

    Args:
        agreement: what the parties fixed.
        poly_degree: N, the ring degree.

    Raises:
        LocalProtocolError: parameters that are insecure or could overflow.
    """

    agreement: SumAgreement
    poly_degree: int = 4096
    scheme: ClassVar[str] = "bfv"
    name: ClassVar[str] = "bfv"
    rests_on: ClassVar[str] = RESTS_ON_THE_KEY
    leaks: ClassVar[SumLeaks] = LEAKS_WITHOUT_MASKS

    def __post_init__(self) -> None:
        take_numpy_integers(self)
        _ = self.headroom  # what does not fit is refused here

    @cached_property
    def headroom(self) -> BfvHeadroom:
        """The plain modulus, the prime and the packing that fit."""
        return solve_bfv(self.fixed_point, poly_degree=self.poly_degree)

    @cached_property
    def cipher(self) -> BfvCipher:
        found = self.headroom
        return BfvCipher(found.poly_degree, found.primes, found.plain_bits)

    def parameters(self) -> Mapping[str, object]:
        return {**super().parameters(), "plain_bits": self.headroom.plain_bits}


@dataclass(frozen=True)
class MaskedBfvSum(BfvSum):
    """The same over masks that cancel in the sum, modulo t: no single key opens a contribution."""

    masks: ClassVar[str] = "pairwise"
    name: ClassVar[str] = spelled(BfvSum.scheme, masks)
    rests_on: ClassVar[str] = (
        "ring learning with errors at 128-bit security or, should active and aggregator work "
        "together, X25519 and AES-256 and two passives who tell their seeds to nobody"
    )
    leaks: ClassVar[SumLeaks] = SumLeaks(
        contribution=Reading(
            reads="One ciphertext of each passive and step: its size and time.",
            protects="BFV encryption, whose only secret key is at the active, over masks that the "
            "passives share in pairs. The masks cancel only if all answer the same "
            "message.",
            remains="Who takes part, and when. It can alter the sum without being noticed.",
        ),
        active_and_aggregator="The sum only: the masks among the passives remain.",
        altered="Each reaction to an altered sum tells of a sum, and all of them may be about one "
        "number, since a ciphertext names no step: two or three sessions tell it.",
    )

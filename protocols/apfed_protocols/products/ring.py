"""Agreement of a sum of products, and exact arithmetic of polynomials that fit it.

Polynomials modulo X^N + 1 and a power of two, by Fourier transforms of their digits.

Run by: the active and the passives of a sum of products. A coefficient modulo 2^k is a row of
digits; a product of polynomials is one of digits with small integers, in float64, rounded. The
digits are as narrow as `product_error` asks for, so that what is rounded lies within a quarter of
the integer, whatever the numbers are: no secret and no number of a peer decides whether it does.

Fan and Vercauteren 2012, section 4, take powers of two for q and t, too: scaling is a shift then.
That ring learning with errors is hard for any modulus: Peikert, Regev and Stephens-Davidowitz 2017.

Letters: N coefficients, L digits, lowest first; C coefficients of any polynomials.
"""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.checks import take_numpy_integers
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.noise import largest_noise
from apfed_protocols.randomness import fresh_key, keystream
from apfed_protocols.sums.fixed_point import SECURE_MODULUS_BITS
from apfed_protocols.sums.interface import SumAgreement

Digits = NDArray[np.int64]
Words = NDArray[np.uint64]
Spectrum = NDArray[np.complex128]
_WORD = np.dtype("<u8")
_ROUND_OFF = 2.0**-53
LARGEST_ERROR = 21
"""Largest magnitude of a coefficient of an error: centred binomial of 21 pairs of bits, standard
deviation 3.24."""
_DEGREES = (4096, 8192, 16384)
_KEPT = (32, 40, 48)
_TAIL_BITS = 64
_WIDEST = 20  # bits of a digit
_ERROR = 1 / 4  # of a float from its integer
_MARGIN = 3  # bits, where there is room: then most altered answers do not open
_MIN_ROWS = 4  # people of a ciphertext
_WORDS = 2**17  # coefficients of the ciphertexts of a block, about
_MOST = {"people": 2**28, "columns": 512, "labelled": 4096}
_SECURITY = (20, 64)
_CANDIDATES = (2, 1024)


def split_widths(bits: int, widest: int) -> tuple[int, ...]:
    """Return the fewest widths, nearly equal and none above `widest`, that sum to `bits`."""
    count = -(-bits // widest)
    return tuple(bits * (k + 1) // count - bits * k // count for k in range(count))


@dataclass(frozen=True)
class Ring:
    """The ring Z[X] / (X^N + 1) modulo 2^k: N a power of two, k the sum of the digits' widths."""

    degree: int
    widths: tuple[int, ...]

    @cached_property
    def bits(self) -> int:
        """Return k, the bits of the modulus."""
        return sum(self.widths)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Return the place of each digit's lowest bit."""
        return tuple(sum(self.widths[:place]) for place in range(len(self.widths)))

    @property
    def size(self) -> int:
        """Return the bytes of one polynomial."""
        return self.degree * self._octets

    @property
    def _octets(self) -> int:
        """Return the bytes of one coefficient."""
        return -(-self.bits // 8)

    def expand_seed(self, seed: bytes, *context: bytes) -> Digits:
        """Expand a public seed into its uniform polynomial, by AES-256 in counter mode."""
        octets = np.frombuffer(keystream(seed, *context, length=self.size), np.uint8)
        octets_CO = octets.reshape(self.degree, -1).copy()
        octets_CO[:, -1] >>= 8 * self._octets - self.bits
        return self._split_digits(octets_CO)

    def parse_digits(self, blob: bytes, *, sender: str) -> Digits:
        """Read a polynomial as digits, (L, N). Raises RemoteProtocolError: another size, or
        coefficients beyond the modulus.

        `blob`: bytes of one polynomial.
        """
        if len(blob) != self.size:
            raise RemoteProtocolError(
                f"a polynomial from {sender} has {len(blob)} bytes, expected {self.size}"
            )
        octets_CO = np.frombuffer(blob, np.uint8).reshape(self.degree, -1)
        if (octets_CO[:, -1].astype(np.int64) >> (self.bits - 8 * (self._octets - 1))).any():
            raise RemoteProtocolError(
                f"a polynomial from {sender} holds coefficients beyond 2^{self.bits}"
            )
        return self._split_digits(octets_CO)

    def pack_digits(self, numbers_LC: Digits) -> bytes:
        """Write one polynomial, its coefficients reduced modulo 2^k."""
        words_CW = np.zeros((self.degree, -(-self.bits // 64) + 1), dtype=_WORD)
        for digit_C, offset in zip(self.carry_digits(numbers_LC), self.offsets, strict=True):
            word, shift = divmod(offset, 64)
            words_CW[:, word] |= digit_C.astype(np.uint64) << np.uint64(shift)
            if shift:
                words_CW[:, word + 1] |= digit_C.astype(np.uint64) >> np.uint64(64 - shift)
        return words_CW.view(np.uint8)[:, : self._octets].tobytes()

    def _split_digits(self, octets_CO: NDArray[np.uint8]) -> Digits:
        """Return the digits, (L, N), of coefficients stored as bytes, (N, octets)."""
        padded = np.zeros((len(octets_CO), 8 * (-(-self.bits // 64) + 1)), dtype=np.uint8)
        padded[:, : self._octets] = octets_CO
        words_CW = padded.view(_WORD)
        digits_LC = np.empty((len(self.widths), len(octets_CO)), dtype=np.int64)
        for digit_C, offset, width in zip(digits_LC, self.offsets, self.widths, strict=True):
            word, shift = divmod(offset, 64)
            part_C = words_CW[:, word] >> np.uint64(shift)
            if shift:
                part_C |= words_CW[:, word + 1] << np.uint64(64 - shift)
            digit_C[:] = part_C & np.uint64((1 << width) - 1)
        return digits_LC

    def carry_digits(self, numbers_L: Digits) -> Digits:
        """Return the same numbers with each digit in [0, 2^width)."""
        carried_L = numbers_L.copy()
        carry = np.int64(0)
        for digit, width in zip(carried_L, self.widths, strict=True):
            digit += carry
            carry = digit >> width
            digit &= (1 << width) - 1
        return carried_L

    def centre_digits(self, numbers_L: Digits) -> Digits:
        """Return them with digits in [-2^(width - 1), 2^(width - 1)], small in products."""
        centred_L = self.carry_digits(numbers_L)
        carry = np.int64(0)
        for digit, width in zip(centred_L, self.widths, strict=True):
            digit += carry
            carry = (digit >= 1 << (width - 1)).astype(np.int64)
            digit -= carry << width
        return centred_L

    def add_at(self, numbers_L: Digits, position: int, integers: Digits | int) -> None:
        """Add `integers` times 2^place, in place; they have few bits, as digits are words."""
        digit = max(k for k, offset in enumerate(self.offsets) if offset <= position)
        numbers_L[digit] += integers << (position - self.offsets[digit])

    def add_uniform(self, numbers_L: Digits, bits: int) -> None:
        """Add secret integers, each uniform on [-2^(bits - 1), 2^(bits - 1)), in place."""
        count = math.prod(numbers_L.shape[1:])
        for digit, offset, width in zip(numbers_L, self.offsets, self.widths, strict=True):
            if offset < bits:
                stream = keystream(fresh_key(), b"uniform", length=4 * count)
                words = np.frombuffer(stream, "<u4").reshape(digit.shape).astype(np.int64)
                digit += words & ((1 << min(width, bits - offset)) - 1)
        self.add_at(numbers_L, bits - 1, -1)

    def round_digits(self, numbers_L: Digits, kept_bits: int) -> Words:
        """Divide by 2^(k - kept_bits) and round, modulo 2^kept_bits; that place must be the start
        of a digit.
        """
        first = self.offsets.index(self.bits - kept_bits)
        carry: Any = np.int64(0)
        for place in range(first):
            half = 1 << (self.widths[place] - 1) if place == first - 1 else 0
            carry = (numbers_L[place] + (carry + half)) >> self.widths[place]
        words: Words = (numbers_L[first] + carry).view(np.uint64)
        for digit, offset in zip(numbers_L[first + 1 :], self.offsets[first + 1 :], strict=True):
            words += digit.view(np.uint64) << np.uint64(offset - self.offsets[first])
        words &= np.uint64((1 << kept_bits) - 1)
        return words


@lru_cache(maxsize=8)
def _compute_twist(size: int) -> Spectrum:
    """Return the first half of the powers of exp(i pi / size): their power size / 2 is i."""
    turns: Spectrum = np.exp(1j * np.pi * np.arange(size // 2) / size)
    turns.setflags(write=False)
    return turns


def transform_polynomials(polynomial_U: NDArray[Any]) -> Spectrum:
    """Evaluate real polynomials modulo Y^U + 1, along the last axis, at half of the roots.

    Y^U + 1 = (Y^(U/2) - i) (Y^(U/2) + i), and what a real one is modulo the second factor follows
    from what it is modulo the first. Products are products of values.
    """
    size = polynomial_U.shape[-1]
    folded: Spectrum = np.empty((*polynomial_U.shape[:-1], size // 2), dtype=np.complex128)
    folded.real = polynomial_U[..., : size // 2]
    folded.imag = polynomial_U[..., size // 2 :]
    folded *= _compute_twist(size)
    return np.fft.fft(folded)


def invert_transform(values_H: Spectrum) -> NDArray[np.float64]:
    """Return the polynomials that have these values along the last axis."""
    folded = np.fft.ifft(values_H)
    folded *= _compute_twist(2 * values_H.shape[-1]).conj()
    return np.concatenate((folded.real, folded.imag), axis=-1)


def product_error(size: int, terms: int) -> float:
    """Return a bound of the error of a coefficient of a sum of `terms` products of polynomials.

    Their size is `size`; the bound is over the sum of norm times norm.

    Three transforms of k = log2(size) levels, the twist counted as one, each level off by at
    most (1 + sqrt(5) + 1) round-offs for sum, product and root (Brent, Percival and Zimmermann
    2007, theorem 5.1), and `terms` products and sums of complex values; doubled for higher
    orders.
    """
    levels = math.log2(size)
    rounds = 3 * levels * (2 + math.sqrt(5)) + math.sqrt(5) + math.sqrt(2) * (terms + 2)
    return 2 * _ROUND_OFF * rounds


@dataclass(frozen=True, kw_only=True)
class ProductAgreement:
    """The terms that all parties fix; public.

    Raises LocalProtocolError on construction when a field is of another type or out of its range.

    Attributes:
        session, receiver, combiner, contributors, bits, allow_single: as in `SumAgreement`.
        people: U, rows of every passive's matrix, aligned; 1 to 2^28.
        columns: K, columns of the labels; 1 to 512.
        labelled: n, rows of the labels and columns of every matrix; 1 to 4096.
        row_bound: largest sum over j of |A[u, j]| of a person u, so that a product with bits lies
            in [-row_bound, row_bound]. A step of fixed point is row_bound / (2^(bits - 1) - 1).
        noise: deviation of the discrete Gaussian noise that each passive adds to each product, in
            steps; None: none.
        security: lambda; all that the active can tell from the noise of all ciphertexts of all
            passives is at most 2^-lambda in statistical distance; 20 to 64.
        candidates: requests that the active makes, of which the passives see through all but one;
            an active that cheats is found out but for one time in so many (see `audit`). Labels
            are then one-hot. 2 to 1024; None: the active is trusted.
    """

    session: str
    receiver: str
    combiner: str
    contributors: tuple[str, ...]
    people: int
    columns: int
    labelled: int
    bits: int = 16
    row_bound: float = 1.0
    noise: int | None = None
    security: int = 40
    candidates: int | None = None
    allow_single: bool = False

    def __post_init__(self) -> None:
        """Raise LocalProtocolError for fields of another type or out of range."""
        take_numpy_integers(self)
        for name, largest in _MOST.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= largest:
                raise LocalProtocolError(
                    f"{name} of a sum of products lies in 1..{largest}, got {value!r}"
                )
        smallest, largest = _SECURITY
        if type(self.security) is not int or not smallest <= self.security <= largest:
            raise LocalProtocolError(
                f"security lies in {smallest}..{largest}, got {self.security!r}"
            )
        if self.candidates is not None:
            smallest, largest = _CANDIDATES
            if type(self.candidates) is not int or not smallest <= self.candidates <= largest:
                raise LocalProtocolError(
                    f"candidates lies in {smallest}..{largest}, got {self.candidates!r}"
                )
        _ = self.blocks_sum  # which checks the rest

    @cached_property
    def blocks_sum(self) -> SumAgreement:
        """Return the products as the aggregator sees them: one sum of (people, columns) for each
        block.
        """
        return SumAgreement(
            session=self.session,
            receiver=self.receiver,
            combiner=self.combiner,
            contributors=self.contributors,
            clip_norm=self.row_bound,
            bits=self.bits,
            noise=self.noise,
            allow_single=self.allow_single,
        )


# Parameters under which the products are exact, secure, and say nothing through their noise: an
# active could read a passive's matrix out of the noise of its ciphertexts. The bounds, in the order
# of `_fit_degree`; all of them are worst cases but for the rounding of the answer:
#
# 1. A row of integers has sum_j |A_uj| <= R = 2^(bits - 1) - 1 + n / 2 + 1. Sums of M passives
#    with noise of at most g lie within M (R + g), and t = 2^plain is the least that holds them.
# 2. What a ciphertext of one passive decrypts to is the product times q / t, plus
#
#        sum_j e_j A_j + e u + e1 s,   at most B = 21 (U R + 2 N)
#
#    as |e_j|, |e|, |e1| <= 21, u and s are ternary, and A_j has U coefficients.
# 3. Each of them gets a uniform integer of [-2^(h-1), 2^(h-1)) on top (smudging). Shifted by at
#    most B, that is within B / 2^h of itself in statistical distance. There are M * people * K of
#    them, so with 2^h >= B M people K 2^lambda all of them together are within 2^-lambda of noise
#    that was drawn without the matrices.
# 4. Then a ciphertext is divided by 2^(k - kept) and rounded: a function of what was made safe
#    in 3, so it tells nothing more. It adds r0 + r s with 1 + |s|_1 <= 1 + N roundings uniform on
#    an interval of length 1 (c1 is pseudo-random), whose sum over M passives stays below sqrt(M (N
#    + 1) ln(2 * values * 2^64) / 2) everywhere but with probability 2^-64 (Hoeffding 1963).
# 5. 3 and 4 together stay below half a step, 2^(kept - plain - 1): every sum opens exactly.


@dataclass(frozen=True, kw_only=True)
class ProductHeadroom:
    """The parameters that fit an agreement on products.

    Attributes:
        degree: N, the ring degree.
        modulus_bits: k; q = 2^k.
        kept_bits: log2 of the modulus of an answer.
        plain_bits: log2 of the plain modulus t.
        smudging_bits: h; smudging noise is uniform on 2^h integers.
        noise_bound: of an answer's noise, in units of its modulus; beyond it was altered.
        folds: numbers of a ciphertext that are added to one of the answer: 2 with candidates, whose
            classes are shifted by up to K; B doubles, and so do the roundings of r s.
        stride: powers of X for one person, the power of two at or above folds * K.
        ciphertexts: of a full block.
        widths: of the digits that products are made of.
    """

    degree: int
    modulus_bits: int
    kept_bits: int
    plain_bits: int
    smudging_bits: int
    noise_bound: int
    folds: int
    stride: int
    ciphertexts: int
    widths: tuple[int, ...]

    @property
    def ring(self) -> Ring:
        return Ring(self.degree, self.widths)

    @property
    def rows(self) -> int:
        """Return U, the people of one ciphertext."""
        return self.degree // self.stride


def row_limit(agreement: ProductAgreement) -> int:
    """Return R, the most that the magnitudes of a row of integers add up to."""
    return int(2 ** (agreement.bits - 1) - 1) + agreement.labelled // 2 + 1


def solve_products(agreement: ProductAgreement) -> ProductHeadroom:
    """Return the parameters of the smallest ring degree that fits. Raises LocalProtocolError: none
    does.
    """
    for degree in _DEGREES:
        headroom = _fit_degree(agreement, degree)
        if headroom is not None:
            return headroom
    raise LocalProtocolError(
        f"a sum of products of {agreement.bits} bits with {agreement.labelled} labels and noise of "
        f"{agreement.noise or 0} steps under security {agreement.security} fits no ring degree up "
        f"to {_DEGREES[-1]}; take fewer bits, or split the labels"
    )


def _fit_degree(agreement: ProductAgreement, degree: int) -> ProductHeadroom | None:
    """Return the parameters for one ring degree by bounds 1 to 5 above; None if they
    leave no room.
    """
    folds = 2 if agreement.candidates else 1
    stride = 1 << (folds * agreement.columns - 1).bit_length()
    rows = degree // stride
    if rows < _MIN_ROWS:
        return None
    passives = len(agreement.contributors)
    largest = row_limit(agreement)
    values = agreement.people * agreement.columns
    plain = (2 * passives * (largest + largest_noise(agreement.noise or 0))).bit_length()
    own_error = folds * LARGEST_ERROR * (rows * largest + 2 * degree)
    smudging = (own_error * passives * values - 1).bit_length() + agreement.security
    tail = math.sqrt(
        passives * (folds * degree + 1) * math.log(2) * (values.bit_length() + 1 + _TAIL_BITS) / 2
    )
    kept_bits = next((bits for bits in _KEPT if 2 ** (bits - plain - 1) > 2 * tail), None)
    if kept_bits is None:
        return None
    room = 2 ** (kept_bits - plain - 1)
    flood = passives * (own_error + 2 ** (smudging - 1))
    min_bits = kept_bits + math.ceil(math.log2(flood / (room - tail - 1)))
    modulus = min(min_bits + _MARGIN, SECURE_MODULUS_BITS[degree])
    widest = _find_widest_digit(agreement.labelled, rows, degree, largest)
    if modulus < min_bits or widest is None:
        return None
    return ProductHeadroom(
        degree=degree,
        modulus_bits=modulus,
        kept_bits=kept_bits,
        plain_bits=plain,
        smudging_bits=smudging,
        noise_bound=math.ceil(flood / 2 ** (modulus - kept_bits) + tail),
        folds=folds,
        stride=stride,
        ciphertexts=max(1, _WORDS // degree),
        widths=split_widths(modulus - kept_bits, widest) + split_widths(kept_bits, widest),
    )


def _find_widest_digit(labelled: int, rows: int, degree: int, maximum: int) -> int | None:
    """Return the bits of the widest digit whose products in float64 are exact; None: too few.

    `labelled`: n, rows with a label. `degree`: N, the ring degree. `maximum`: bits of a digit at
    most.
    """
    # sum_j |A_j| |c_j| over the labels j, norms of U coefficients, by Cauchy and Schwarz: all of
    # A has at most U rows of norm R. The zero that is added is a product of N and N coefficients.
    norms = math.sqrt(labelled * rows) * maximum * math.sqrt(rows)
    error = product_error(rows, labelled) * norms + product_error(degree, 1) * degree
    widest = min(_WIDEST, math.floor(math.log2(_ERROR / error)) + 1)
    return widest if widest >= 2 else None

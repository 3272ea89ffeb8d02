"""Agreement of a sum of products, and exact arithmetic of polynomials that fit it.

Polynomials modulo X^N + 1 and a power of two, by Fourier transforms of their digits.

Run by: the active and the passives of a sum of products. A coefficient modulo 2^k is a row of
digits; a product of polynomials is one of digits with small integers, in float64, rounded. The
digits are as narrow as `bound_fft_error` asks for, so that what is rounded lies within a
quarter of the integer, whatever the numbers are: no secret and no number of a peer decides whether
it does.

Fan and Vercauteren 2012, section 4, take powers of two for q and t, too: scaling is a shift then.
That ring learning with errors is hard for any modulus: Peikert, Regev and Stephens-Davidowitz 2017.

Letters: N coefficients, L digits, lowest first; C coefficients of any polynomials.
"""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
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
_KEPT_BITS = (32, 40, 48)  # allowed values of log2 of the modulus of an answer
_TAIL_BITS = 64  # roundings exceed their bound with probability 2^-64
_MAX_DIGIT_BITS = 20
_MAX_FLOAT_ERROR = 1 / 4  # largest distance of a float product from its integer
_MARGIN_BITS = 3  # of the modulus, if there is room: most altered answers are then refused
_MIN_ROWS = 4  # people of a ciphertext
_BLOCK_COEFFICIENTS = 2**17  # of all ciphertexts of a block, about
_MAX_BY_FIELD = {"people": 2**28, "columns": 512, "labelled": 4096}
_SECURITY_RANGE = (20, 64)
_CANDIDATES_RANGE = (2, 1024)


def split_widths(bits: int, widest: int) -> tuple[int, ...]:
    """Return the bits of each digit when a number of `bits` bits is split into as few digits as
    possible, of nearly equal width and at most `widest` bits each.
    """
    count = -(-bits // widest)
    offsets = [bits * k // count for k in range(count + 1)]
    return tuple(end - start for start, end in pairwise(offsets))


@dataclass(frozen=True)
class Ring:
    """The ring Z[X] / (X^N + 1) modulo 2^k, with coefficients as rows of digits.

    Attributes:
        degree: N, a power of two.
        widths: bits of each digit, lowest first; their sum is k.
    """

    degree: int
    widths: tuple[int, ...]

    @cached_property
    def bits(self) -> int:
        """Return k, the bits of the modulus."""
        return sum(self.widths)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Return the position, from 0, of each digit's lowest bit in a coefficient."""
        return tuple(sum(self.widths[:index]) for index in range(len(self.widths)))

    @property
    def size(self) -> int:
        """Return the bytes of one encoded polynomial."""
        return self.degree * self._coefficient_bytes

    @property
    def _coefficient_bytes(self) -> int:
        """Return the bytes of one encoded coefficient."""
        return -(-self.bits // 8)

    def expand_seed(self, seed: bytes, *context: bytes) -> Digits:
        """Return a uniform polynomial, its N coefficients split into L digits, (L, N), expanded
        from a public seed and the context (labels of its use) by AES-256 in counter mode.
        """
        stream = np.frombuffer(keystream(seed, *context, length=self.size), np.uint8)
        # C coefficients of O bytes each; surplus bits of the last byte are dropped.
        bytes_CO = stream.reshape(self.degree, -1).copy()
        bytes_CO[:, -1] >>= 8 * self._coefficient_bytes - self.bits
        return self._split_digits(bytes_CO)

    def parse_digits(self, blob: bytes, *, sender: str) -> Digits:
        """Decode a polynomial, N coefficients modulo 2^k, and return its coefficients split into L
        digits, (L, N). Raises RemoteProtocolError, which names `sender`: the blob has another size,
        or a coefficient is not below the modulus.
        """
        if len(blob) != self.size:
            raise RemoteProtocolError(
                f"a polynomial from {sender} has {len(blob)} bytes, expected {self.size}"
            )
        # C coefficients of O bytes each.
        bytes_CO = np.frombuffer(blob, np.uint8).reshape(self.degree, -1)
        bits_of_last_byte = self.bits - 8 * (self._coefficient_bytes - 1)
        if (bytes_CO[:, -1].astype(np.int64) >> bits_of_last_byte).any():
            raise RemoteProtocolError(
                f"a polynomial from {sender} holds coefficients beyond 2^{self.bits}"
            )
        return self._split_digits(bytes_CO)

    def pack_digits(self, numbers_LC: Digits) -> bytes:
        """Encode one polynomial, its C coefficients split into L digits of any magnitude, (L, C),
        with coefficients reduced modulo 2^k.
        """
        # W words of 64 bits for a coefficient; a digit may reach into the next word, so one more.
        words = math.ceil(self.bits / 64) + 1
        words_CW = np.zeros((self.degree, words), dtype=_WORD)
        for digit_C, offset in zip(self.carry_digits(numbers_LC), self.offsets, strict=True):
            word, shift = divmod(offset, 64)
            words_CW[:, word] |= digit_C.astype(np.uint64) << np.uint64(shift)
            if shift:
                words_CW[:, word + 1] |= digit_C.astype(np.uint64) >> np.uint64(64 - shift)
        return words_CW.view(np.uint8)[:, : self._coefficient_bytes].tobytes()

    def _split_digits(self, bytes_CO: NDArray[np.uint8]) -> Digits:
        """Split C coefficients, of O little-endian bytes each, (C, O), into L digits, (L, C)."""
        # W words of 64 bits for a coefficient; a digit may reach into the next word, so one more.
        words = math.ceil(self.bits / 64) + 1
        padded = np.zeros((len(bytes_CO), 8 * words), dtype=np.uint8)
        padded[:, : self._coefficient_bytes] = bytes_CO
        words_CW = padded.view(_WORD)
        digits_LC = np.empty((len(self.widths), len(bytes_CO)), dtype=np.int64)
        for digit_C, offset, width in zip(digits_LC, self.offsets, self.widths, strict=True):
            word, shift = divmod(offset, 64)
            shifted_C = words_CW[:, word] >> np.uint64(shift)
            if shift:
                shifted_C |= words_CW[:, word + 1] << np.uint64(64 - shift)
            digit_C[:] = shifted_C & np.uint64((1 << width) - 1)
        return digits_LC

    def carry_digits(self, numbers_L: Digits) -> Digits:
        """Return the same numbers modulo 2^k with each digit in [0, 2^width): what exceeds a digit
        is carried to the next digit.

        `numbers_L`: numbers as L digits of any magnitude, lowest first along the first axis.
        """
        carried_L = numbers_L.copy()
        carry = np.int64(0)
        for digit, width in zip(carried_L, self.widths, strict=True):
            digit += carry
            carry = digit >> width
            digit &= (1 << width) - 1
        return carried_L

    def centre_digits(self, numbers_L: Digits) -> Digits:
        """Return the same numbers modulo 2^k with each digit in [-2^(width - 1), 2^(width - 1)],
        which keeps products of digits small.

        `numbers_L`: numbers as L digits of any magnitude, lowest first along the first axis.
        """
        centred_L = self.carry_digits(numbers_L)
        carry = np.int64(0)
        for digit, width in zip(centred_L, self.widths, strict=True):
            digit += carry
            # A digit in the upper half becomes negative, and the next digit one larger.
            carry = (digit >= 1 << (width - 1)).astype(np.int64)
            digit -= carry << width
        return centred_L

    def add_shifted(self, numbers_L: Digits, position: int, integers: Digits | int) -> None:
        """Add `integers` times 2^position to numbers that are split into L digits, in place.

        The integers are added to the digit that has the bit `position`, without carrying, so they
        must be small enough for 64 bits.

        `numbers_L`: the numbers, digits along the first axis, lowest first. `position`: a bit of
        the numbers, from 0.
        """
        index = max(k for k, offset in enumerate(self.offsets) if offset <= position)
        numbers_L[index] += integers << (position - self.offsets[index])

    def add_uniform(self, numbers_L: Digits, bits: int) -> None:
        """Add fresh secret integers, each uniform on [-2^(bits - 1), 2^(bits - 1)), to numbers that
        are split into digits, in place.

        `numbers_L`: the numbers, L digits along the first axis, lowest first.
        """
        count = math.prod(numbers_L.shape[1:])
        for digit, offset, width in zip(numbers_L, self.offsets, self.widths, strict=True):
            if offset < bits:
                stream = keystream(fresh_key(), b"uniform", length=4 * count)
                words = np.frombuffer(stream, "<u4").reshape(digit.shape).astype(np.int64)
                digit += words & ((1 << min(width, bits - offset)) - 1)
        # The digits were drawn from 0 to 2^bits - 1; subtracting 2^(bits - 1) centres them.
        self.add_shifted(numbers_L, bits - 1, -1)

    def round_digits(self, numbers_L: Digits, kept_bits: int) -> Words:
        """Divide numbers modulo 2^k by 2^(k - kept_bits) and round them; return them modulo
        2^kept_bits.

        `numbers_L`: the numbers, L digits along the first axis, lowest first. `kept_bits`: the bits
        that remain; k - kept_bits must be the offset of a digit.
        """
        first = self.offsets.index(self.bits - kept_bits)
        carry: Any = np.int64(0)
        for index in range(first):
            # Half of the divisor is added in the highest digit that is dropped.
            half = 1 << (self.widths[index] - 1) if index == first - 1 else 0
            carry = (numbers_L[index] + (carry + half)) >> self.widths[index]
        words: Words = (numbers_L[first] + carry).view(np.uint64)
        for digit, offset in zip(numbers_L[first + 1 :], self.offsets[first + 1 :], strict=True):
            words += digit.view(np.uint64) << np.uint64(offset - self.offsets[first])
        words &= np.uint64((1 << kept_bits) - 1)
        return words


@lru_cache(maxsize=8)
def _compute_twist(size: int) -> Spectrum:
    """Return the `size` / 2 factors by which coefficients are multiplied before a Fourier
    transform, so that it gives values at the roots of Y^(size / 2) - i, not of Y^(size / 2) - 1.
    They are the powers of exp(i pi / size), whose power size / 2 is i.
    """
    powers: Spectrum = np.exp(1j * np.pi * np.arange(size // 2) / size)
    powers.setflags(write=False)
    return powers


def transform_polynomials(polynomial_U: NDArray[Any]) -> Spectrum:
    """Return the values of real polynomials modulo Y^U + 1 at U / 2 complex points, by a Fourier
    transform: the values of a product of polynomials are the products of their values.

    The points are the roots of Y^(U/2) - i. As Y^U + 1 = (Y^(U/2) - i) (Y^(U/2) + i), they are half
    of the roots of Y^U + 1; at the other half a real polynomial has the conjugate values.

    `polynomial_U`: U coefficients along the last axis.
    """
    size = polynomial_U.shape[-1]
    folded: Spectrum = np.empty((*polynomial_U.shape[:-1], size // 2), dtype=np.complex128)
    folded.real = polynomial_U[..., : size // 2]
    folded.imag = polynomial_U[..., size // 2 :]
    folded *= _compute_twist(size)
    return np.fft.fft(folded)


def invert_transform(values_H: Spectrum) -> NDArray[np.float64]:
    """Return real polynomials, U coefficients along the last axis, from the H = U / 2 values that
    `transform_polynomials` returns for them.
    """
    folded = np.fft.ifft(values_H)
    folded *= _compute_twist(2 * values_H.shape[-1]).conj()
    return np.concatenate((folded.real, folded.imag), axis=-1)


def bound_fft_error(size: int, terms: int) -> float:
    """Return a bound of the floating-point error of one coefficient of a sum of products of
    polynomials that is computed by Fourier transforms, where `terms` products of two polynomials of
    `size` coefficients are added.

    The bound is relative: it is to be multiplied by the sum, over the products, of |A| |B|, the L2
    norms of the two polynomials.

    It counts three transforms of log2(size) levels (the multiplication before a transform counts
    as one level). Each level is off by at most 1 + sqrt(5) + 1 round-offs, for sum, product and
    root (Brent, Percival and Zimmermann 2007, theorem 5.1). To this come `terms` products and sums
    of complex values. The total is doubled for higher orders.
    """
    level_round_offs = 2 + math.sqrt(5)
    transform_round_offs = 3 * math.log2(size) * level_round_offs
    round_offs = transform_round_offs + math.sqrt(5) + math.sqrt(2) * (terms + 2)
    return 2 * _ROUND_OFF * round_offs


@dataclass(frozen=True, kw_only=True)
class ProductAgreement:
    """The public terms that all parties of a sum of products agree on.

    Raises LocalProtocolError on construction when a field is of another type or out of its range.

    Attributes:
        session, receiver, aggregator, contributors, bits, allow_single: name of the run, active,
            aggregator, passives, width of a value in fixed point, and whether one passive is enough
            (`SumAgreement`).
        people: rows of every passive's matrix, aligned; 1 to 2^28.
        columns: K, columns of the labels; 1 to 512.
        labelled: n, rows of the labels and columns of every matrix; 1 to 4096.
        row_bound: largest sum over j of |A[u, j]| of a person u, so that a product with bits lies
            in [-row_bound, row_bound]. A step of fixed point is row_bound / (2^(bits - 1) - 1).
        noise: standard deviation of the discrete Gaussian noise that each passive adds to each
            product, in steps; None: no noise.
        security: lambda; the noise of all ciphertexts of all passives is within a statistical
            distance of 2^-lambda of noise that does not depend on their matrices; 20 to 64.
        candidates: requests that the active makes, of which all but one are opened to the
            passives; an active that cheats escapes with probability 1 / candidates. Labels must
            then be one-hot. 2 to 1024; None: the active is trusted.
    """

    session: str
    receiver: str
    aggregator: str
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
        """Turn NumPy integers into int, and validate all fields.

        Raises LocalProtocolError: a field is of another type or out of its range.
        """
        take_numpy_integers(self)
        for name, largest in _MAX_BY_FIELD.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= largest:
                raise LocalProtocolError(
                    f"{name} of a sum of products lies in 1..{largest}, got {value!r}"
                )
        smallest, largest = _SECURITY_RANGE
        if type(self.security) is not int or not smallest <= self.security <= largest:
            raise LocalProtocolError(
                f"security lies in {smallest}..{largest}, got {self.security!r}"
            )
        if self.candidates is not None:
            smallest, largest = _CANDIDATES_RANGE
            if type(self.candidates) is not int or not smallest <= self.candidates <= largest:
                raise LocalProtocolError(
                    f"candidates lies in {smallest}..{largest}, got {self.candidates!r}"
                )
        _ = self.blocks_sum  # making it checks the remaining fields

    @cached_property
    def blocks_sum(self) -> SumAgreement:
        """Return the agreement of the sum that the aggregator computes: one step for each block, of
        shape (people of the block, columns).
        """
        return SumAgreement(
            session=self.session,
            receiver=self.receiver,
            aggregator=self.aggregator,
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
class ProductParameters:
    """The parameters that fit an agreement on products.

    Attributes:
        degree: N, the ring degree.
        modulus_bits: k; q = 2^k.
        answer_modulus_bits: log2 of the modulus of an answer.
        plain_bits: log2 of the plain modulus t.
        smudging_bits: h; smudging noise is uniform on 2^h integers.
        max_answer_noise: largest noise of an honest combined answer, modulo
            2^answer_modulus_bits; an answer with
            more noise was altered.
        folds: numbers of a ciphertext that are added to one number of the answer: 2 with
            candidates, whose classes are shifted by up to K, else 1. With 2, B doubles, and so do
            the roundings of r s.
        powers_per_person: S, powers of X for one person, the least power of two that is folds * K
            or more.
        ciphertext_count: C, the ciphertexts of a full block.
        digit_widths: bits of the digits of a coefficient, lowest first.
    """

    degree: int
    modulus_bits: int
    answer_modulus_bits: int
    plain_bits: int
    smudging_bits: int
    max_answer_noise: int
    folds: int
    powers_per_person: int
    ciphertext_count: int
    digit_widths: tuple[int, ...]

    @property
    def ring(self) -> Ring:
        return Ring(self.degree, self.digit_widths)

    @property
    def people_per_ciphertext(self) -> int:
        """Return U, the people of one ciphertext."""
        return self.degree // self.powers_per_person


def compute_row_limit(agreement: ProductAgreement) -> int:
    """Return R, the largest sum of the magnitudes of a passive's row, in steps of fixed point: the
    steps in `row_bound`, and half a step of rounding for each label.
    """
    max_level = int(2 ** (agreement.bits - 1) - 1)
    return max_level + agreement.labelled // 2 + 1


def solve_products(agreement: ProductAgreement) -> ProductParameters:
    """Choose the parameters of the homomorphic encryption for an agreement: those of the smallest
    ring degree with which the products are exact and secure. Raises LocalProtocolError: no ring
    degree fits.
    """
    for degree in _DEGREES:
        parameters = _fit_degree(agreement, degree)
        if parameters is not None:
            return parameters
    raise LocalProtocolError(
        f"a sum of products of {agreement.bits} bits with {agreement.labelled} labels and noise of "
        f"{agreement.noise or 0} steps under security {agreement.security} fits no ring degree up "
        f"to {_DEGREES[-1]}; take fewer bits, or split the labels"
    )


def _fit_degree(agreement: ProductAgreement, degree: int) -> ProductParameters | None:
    """Return the parameters for the ring degree N = `degree`: the products must be exact, and their
    noise must hide the passives' matrices. The bounds 1 to 5 are derived in the comment above
    `ProductParameters`. Return None if no parameters meet them.
    """
    # With candidates, labels may be shifted, so that a class takes two powers of X.
    folds = 2 if agreement.candidates else 1
    # The powers of X for one person: the least power of two that is folds * K or more.
    powers_per_person = 1 << (folds * agreement.columns - 1).bit_length()
    people_per_ciphertext = degree // powers_per_person
    if people_per_ciphertext < _MIN_ROWS:
        return None
    passive_count = len(agreement.contributors)
    row_sum = compute_row_limit(agreement)
    product_count = agreement.people * agreement.columns
    # Bound 1: t holds sums of all passives, of either sign.
    largest_sum = passive_count * (row_sum + largest_noise(agreement.noise or 0))
    plain_bits = (2 * largest_sum).bit_length()
    # Bounds 2 and 3: B, the largest error of a passive's ciphertext, and the bits h of the
    # smudging noise that hides it.
    max_own_error = folds * LARGEST_ERROR * (people_per_ciphertext * row_sum + 2 * degree)
    smudging_bits = (
        max_own_error * passive_count * product_count - 1
    ).bit_length() + agreement.security
    # Bound 4: the sum of all roundings; the answer has so many bits that it is below a quarter of
    # a step of q / t.
    tail_nats = math.log(2) * (product_count.bit_length() + 1 + _TAIL_BITS)
    max_rounding_error = math.sqrt(passive_count * (folds * degree + 1) * tail_nats / 2)
    answer_modulus_bits = _find_answer_modulus_bits(plain_bits, max_rounding_error)
    if answer_modulus_bits is None:
        return None
    # Bound 5: after the division by 2^(k - kept), all noise stays below half a step of q / t.
    half_step = 2 ** (answer_modulus_bits - plain_bits - 1)
    max_scaled_noise = half_step - max_rounding_error - 1
    smudged_error = passive_count * (max_own_error + 2 ** (smudging_bits - 1))
    min_dropped_bits = math.ceil(math.log2(smudged_error / max_scaled_noise))
    min_bits = answer_modulus_bits + min_dropped_bits
    modulus_bits = min(min_bits + _MARGIN_BITS, SECURE_MODULUS_BITS[degree])
    max_digit_bits = _find_widest_digit(agreement.labelled, people_per_ciphertext, degree, row_sum)
    if modulus_bits < min_bits or max_digit_bits is None:
        return None
    dropped_bits = modulus_bits - answer_modulus_bits
    return ProductParameters(
        degree=degree,
        modulus_bits=modulus_bits,
        answer_modulus_bits=answer_modulus_bits,
        plain_bits=plain_bits,
        smudging_bits=smudging_bits,
        max_answer_noise=math.ceil(smudged_error / 2**dropped_bits + max_rounding_error),
        folds=folds,
        powers_per_person=powers_per_person,
        ciphertext_count=max(1, _BLOCK_COEFFICIENTS // degree),
        digit_widths=split_widths(dropped_bits, max_digit_bits)
        + split_widths(answer_modulus_bits, max_digit_bits),
    )


def _find_answer_modulus_bits(plain_bits: int, max_rounding_error: float) -> int | None:
    """Return the bits of the modulus to which the answer is rounded: the least of `_KEPT_BITS` with
    which the error of the rounding is below a quarter of a step; None if there is none.

    `plain_bits`: log2 of t, so that a step is 2^(bits - plain_bits).
    """
    for bits in _KEPT_BITS:
        half_step = 2 ** (bits - plain_bits - 1)
        if 2 * max_rounding_error < half_step:
            return bits
    return None


def _find_widest_digit(
    label_count: int, people_per_ciphertext: int, degree: int, row_sum: int
) -> int | None:
    """Return the bits of the widest digits into which coefficients can be split, so that products
    of digits computed in float64 round to the exact integers; None if that is fewer than 2 bits.

    Args:
        label_count: n.
        people_per_ciphertext: U.
        degree: N, the ring degree.
        row_sum: R, the largest sum of the magnitudes of a row in steps of fixed point.
    """
    # For digits of magnitude 1: a bound of sum_j |A_j| |c_j| over the labels j, L2 norms of U
    # coefficients, by Cauchy and Schwarz: all of A has at most U rows of norm R.
    max_digits_norm = math.sqrt(label_count * people_per_ciphertext)
    sum_of_norms = max_digits_norm * row_sum * math.sqrt(people_per_ciphertext)
    product_error = bound_fft_error(people_per_ciphertext, label_count) * sum_of_norms
    # The encryption of zero that is added is one product of N and N coefficients.
    encryption_error = bound_fft_error(degree, 1) * degree
    # The error grows in proportion to the largest digit, 2^(bits - 1).
    largest_digit = _MAX_FLOAT_ERROR / (product_error + encryption_error)
    max_digit_bits = min(_MAX_DIGIT_BITS, math.floor(math.log2(largest_digit)) + 1)
    return max_digit_bits if max_digit_bits >= 2 else None

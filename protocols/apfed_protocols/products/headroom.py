"""Parameters under which the products are exact, secure, and say nothing through their noise.

Run by: every role, from the agreement only, so that all find the same. Protects from: parameters
below 128-bit security; sums that wrap around; and an active that reads a passive's matrix out of
the noise of its ciphertexts. The bounds, in the order of `_fit`; all of them are worst cases but
for the rounding of the answer:

1. A row of integers has sum_j |A_uj| <= R = 2^(bits - 1) - 1 + n / 2 + 1. Sums of M passives with
   noise of at most g lie within M (R + g), and t = 2^plain is the least that holds them.
2. What a ciphertext of one passive decrypts to is the product times q / t, plus

       sum_j e_j A_j + e u + e1 s,   at most B = 21 (U R + 2 N)

   as |e_j|, |e|, |e1| <= 21, u and s are ternary, and A_j has U coefficients.
3. Each of them gets a uniform integer of [-2^(h-1), 2^(h-1)) on top (smudging). Shifted by at most
   B, that is within B / 2^h of itself in statistical distance. There are M * people * K of them, so
   with 2^h >= B M people K 2^lambda all of them together are within 2^-lambda of noise that was
   drawn without the matrices.
4. Then a ciphertext is divided by 2^(k - kept) and rounded: a function of what was made safe in 3,
   so it tells nothing more. It adds r0 + r s with 1 + |s|_1 <= 1 + N roundings uniform on an
   interval of length 1 (c1 is pseudo-random), whose sum over M passives stays below
   sqrt(M (N + 1) ln(2 * values * 2^64) / 2) everywhere but with probability 2^-64 (Hoeffding 1963).
5. 3 and 4 together stay below half a step, 2^(kept - plain - 1): every sum opens exactly.
"""

import math
from dataclasses import dataclass

from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.noise import largest_noise
from apfed_protocols.products.agreement import ProductAgreement
from apfed_protocols.products.ring import Ring, product_error, split
from apfed_protocols.sums.headroom import SECURE_MODULUS_BITS

__all__ = ["LARGEST_ERROR", "ProductHeadroom", "row_limit", "solve_products"]

LARGEST_ERROR = 21
"""Of one coefficient of an error: centred binomial of 21 pairs of bits, deviation 3.24."""

_DEGREES = (4096, 8192, 16384)
_KEPT = (32, 40, 48)
_TAIL_BITS = 64
_WIDEST = 20  # bits of a digit
_ERROR = 1 / 4  # of a float from its integer
_MARGIN = 3  # bits, where there is room: then most altered answers do not open
_LEAST_ROWS = 4  # people of a ciphertext
_WORDS = 2**17  # coefficients of the ciphertexts of a block, about


@dataclass(frozen=True, kw_only=True)
class ProductHeadroom:
    """Parameters that fit.

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
        """The ring of the ciphertexts."""
        return Ring(self.degree, self.widths)

    @property
    def rows(self) -> int:
        """U, the people of one ciphertext."""
        return self.degree // self.stride


def row_limit(agreement: ProductAgreement) -> int:
    """R: the most that the magnitudes of a row of integers add up to."""
    return int(2 ** (agreement.bits - 1) - 1) + agreement.labelled // 2 + 1


def solve_products(agreement: ProductAgreement) -> ProductHeadroom:
    """The smallest ring degree that fits, and in it the smallest answer.

    Raises:
        LocalProtocolError: none fits; says what to lower.
    """
    for degree in _DEGREES:
        found = _fit(agreement, degree)
        if found is not None:
            return found
    raise LocalProtocolError(
        f"a sum of products of {agreement.bits} bits with {agreement.labelled} labels and noise of "
        f"{agreement.noise or 0} steps under security {agreement.security} fits no ring degree up "
        f"to {_DEGREES[-1]}; take fewer bits, or split the labels"
    )


def _fit(agreement: ProductAgreement, degree: int) -> ProductHeadroom | None:
    folds = 2 if agreement.candidates else 1
    stride = 1 << (folds * agreement.columns - 1).bit_length()
    rows = degree // stride
    if rows < _LEAST_ROWS:
        return None
    passives, most = len(agreement.contributors), row_limit(agreement)
    values = agreement.people * agreement.columns
    plain = (2 * passives * (most + largest_noise(agreement.noise or 0))).bit_length()
    own = folds * LARGEST_ERROR * (rows * most + 2 * degree)
    smudging = (own * passives * values - 1).bit_length() + agreement.security
    tail = math.sqrt(
        passives * (folds * degree + 1) * math.log(2) * (values.bit_length() + 1 + _TAIL_BITS) / 2
    )
    kept = next((bits for bits in _KEPT if 2 ** (bits - plain - 1) > 2 * tail), None)
    if kept is None:
        return None
    room, flood = 2 ** (kept - plain - 1), passives * (own + 2 ** (smudging - 1))
    least = kept + math.ceil(math.log2(flood / (room - tail - 1)))
    modulus = min(least + _MARGIN, SECURE_MODULUS_BITS[degree])
    widest = _widest_digit(agreement.labelled, rows, degree, most)
    if modulus < least or widest is None:
        return None
    return ProductHeadroom(
        degree=degree,
        modulus_bits=modulus,
        kept_bits=kept,
        plain_bits=plain,
        smudging_bits=smudging,
        noise_bound=math.ceil(flood / 2 ** (modulus - kept) + tail),
        folds=folds,
        stride=stride,
        ciphertexts=max(1, _WORDS // degree),
        widths=split(modulus - kept, widest) + split(kept, widest),
    )


def _widest_digit(labelled: int, rows: int, degree: int, most: int) -> int | None:
    """Bits of the widest digit with which products in float64 are exact; None: too few."""
    # sum_j |A_j| |c_j| over the labels j, norms of U coefficients, by Cauchy and Schwarz: all of
    # A has at most U rows of norm R. The zero that is added is a product of N and N coefficients.
    norms = math.sqrt(labelled * rows) * most * math.sqrt(rows)
    error = product_error(rows, labelled) * norms + product_error(degree, 1) * degree
    widest = min(_WIDEST, math.floor(math.log2(_ERROR / error)) + 1)
    return widest if widest >= 2 else None

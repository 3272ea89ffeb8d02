"""A linear code by which two different words differ in at least 128 places: extended BCH [512, 85].

Run by: hub and member of `apfed_protocols.psi.ot`, on public arithmetic. The code has the words of
511 bits that, as polynomials over GF(2), have the roots x, x^2, ..., x^126 in GF(2^9), and one bit
more that makes the number of ones even. 126 powers in a row as roots give a distance of at least
127 (BCH bound), the last bit makes it even: 128. These powers and their squares are 426 numbers,
which leave 511 - 426 = 85 bits free. The free bits stand first, as they are, so that sums of words
need the sums of 85 columns alone to be known.

Bit q of word w of a row is place 64 w + q.
Source: Bose and Ray-Chaudhuri, Hocquenghem (1959-60); Orru, Orsini and Scholl, CT-RSA 2017 (such
codes in OT extension).
"""

from functools import cache

import numpy as np

from apfed_protocols.psi.store import Elements, from_bytes, gather_sums, subset_sums

__all__ = [
    "DIMENSION",
    "DISTANCE",
    "LENGTH",
    "WORDS",
    "encode_words",
    "keep_message_bits",
    "make_generator",
]

LENGTH = 512
DIMENSION = 85
DISTANCE = 128
WORDS = LENGTH // 64
_DEGREE = 9
_FIELD = 0b1000010001  # x^9 + x^4 + 1, of which x is a primitive root
_CYCLE = 2**_DEGREE - 1
_ROOTS = DISTANCE - 2
_MESSAGE = np.array([2**64 - 1, (1 << (DIMENSION - 64)) - 1], np.uint64)


def keep_message_bits(values: Elements) -> Elements:
    """Return the first 85 bits of each element, shape (n, 2)."""
    return values & _MESSAGE


def encode_words(messages: Elements) -> Elements:
    """Return the code word of each message of 85 bits, (n, 2), as 512 bits, (n, 8)."""
    return gather_sums(_make_tables(), messages)


@cache
def _make_tables() -> Elements:
    """Return the sums of each eight rows of the generator matrix, (11, 256, 8)."""
    spare = -DIMENSION % 8
    content = b"".join(row.to_bytes(LENGTH // 8, "little") for row in make_generator())
    rows = from_bytes(content + bytes(spare * LENGTH // 8)).reshape(-1, WORDS)
    return subset_sums(rows)


@cache
def make_generator() -> tuple[int, ...]:
    """Return the 85 rows of the generator matrix as numbers of 512 bits, lowest place first."""
    polynomial = _multiply_minimal_polynomials()
    degree = polynomial.bit_length() - 1
    assert _CYCLE - degree == DIMENSION
    rows = []
    for place in range(DIMENSION):
        remainder = _reduce(1 << (degree + place), polynomial)
        row = 1 << place | remainder << DIMENSION
        rows.append(row | (row.bit_count() & 1) << _CYCLE)
    return tuple(rows)


def _multiply_minimal_polynomials() -> int:
    """Return the product of the minimal polynomials of x, x^2, ..., x^126, over GF(2)."""
    powers = _list_powers()
    product = 1
    seen = set[int]()
    for exponent in range(1, _ROOTS + 1):
        if exponent in seen:
            continue
        conjugates = {(exponent << square) % _CYCLE for square in range(_DEGREE)}
        seen |= conjugates
        coefficients = [1]  # of a polynomial over GF(2^9), the lowest first
        for conjugate in conjugates:
            coefficients = _multiply_by_root(coefficients, conjugate, powers)
        minimal = sum(coefficient << place for place, coefficient in enumerate(coefficients))
        product = _multiply(product, minimal)
    return product


def _list_powers() -> list[int]:
    """Return the powers of x in GF(2^9) from 0 to 510, as bits."""
    powers = [1]
    for _ in range(_CYCLE - 1):
        following = powers[-1] << 1
        powers.append(following ^ _FIELD if following >> _DEGREE else following)
    return powers


def _multiply_by_root(coefficients: list[int], exponent: int, powers: list[int]) -> list[int]:
    """Multiply a polynomial over GF(2^9) by z minus this power of x.

    `exponent`: of the root x^exponent.
    """
    log = {power: place for place, power in enumerate(powers)}
    scaled = [
        powers[(log[coefficient] + exponent) % _CYCLE] if coefficient else 0
        for coefficient in coefficients
    ]
    return [low ^ high for low, high in zip([*scaled, 0], [0, *coefficients], strict=True)]


def _multiply(left: int, right: int) -> int:
    """Multiply two polynomials over GF(2)."""
    product = 0
    while right:
        low = right & -right
        product ^= left * low
        right ^= low
    return product


def _reduce(value: int, modulus: int) -> int:
    """Return a polynomial over GF(2) modulo another one."""
    length = modulus.bit_length()
    while value.bit_length() >= length:
        value ^= modulus << (value.bit_length() - length)
    return value

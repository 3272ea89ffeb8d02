"""A linear code whose words differ in at least 128 bits from each other: extended BCH [512, 85].

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

from apfed_protocols.psi.store import Elements, compute_subset_sums, from_bytes, gather_sums

__all__ = [
    "DIMENSION",
    "DISTANCE",
    "LENGTH",
    "WORDS",
    "encode_words",
    "make_generator",
    "mask_message_bits",
]

LENGTH = 512
DIMENSION = 85
DISTANCE = 128
WORDS = LENGTH // 64
_FIELD_DEGREE = 9
_FIELD_POLYNOMIAL = 0b1000010001  # x^9 + x^4 + 1, of which x is a primitive root
_ORDER_OF_X = 2**_FIELD_DEGREE - 1  # in GF(2^9)
_UNEXTENDED_LENGTH = LENGTH - 1  # without the bit that makes the number of ones even
_ROOT_COUNT = DISTANCE - 2
_MESSAGE_MASK = np.array([2**64 - 1, (1 << (DIMENSION - 64)) - 1], np.uint64)


def mask_message_bits(values: Elements) -> Elements:
    """Return 128-bit elements, (n, 2), with all but their first 85 bits set to 0: messages of the
    code.
    """
    return values & _MESSAGE_MASK


def encode_words(messages: Elements) -> Elements:
    """Return the code words, (n, 8), 512 bits each, of n messages, (n, 2), of 85 bits each. Both
    are stored as 64-bit words.
    """
    return gather_sums(_make_tables(), messages)


@cache
def _make_tables() -> Elements:
    """Return tables of all sums of rows of the generator matrix, eight rows a table, (11, 256, 8):
    by them eight bits of a message are encoded by one look-up.
    """
    missing_rows = -DIMENSION % 8  # rows of zeros that fill the last table
    encoded_rows = b"".join(row.to_bytes(LENGTH // 8, "little") for row in make_generator())
    rows = from_bytes(encoded_rows + bytes(missing_rows * LENGTH // 8)).reshape(-1, WORDS)
    return compute_subset_sums(rows)


@cache
def make_generator() -> tuple[int, ...]:
    """Return the 85 rows of the code's generator matrix as integers of 512 bits: bit q of an
    integer is column q. The first 85 columns are the identity matrix (systematic form); columns 85
    to 510 are check bits, and column 511 makes the number of ones even.
    """
    polynomial = _multiply_minimal_polynomials()
    degree = polynomial.bit_length() - 1
    assert _UNEXTENDED_LENGTH - degree == DIMENSION
    rows = []
    for position in range(DIMENSION):
        check_bits = _reduce_polynomial(1 << (degree + position), polynomial)
        word = (1 << position) | (check_bits << DIMENSION)
        parity = word.bit_count() & 1
        rows.append(word | (parity << _UNEXTENDED_LENGTH))
    return tuple(rows)


def _multiply_minimal_polynomials() -> int:
    """Return the generator polynomial of the BCH code: the product over GF(2) of the minimal
    polynomials of x, x^2, ..., x^126 in GF(2^9), each taken once. Bit k of the returned integer is
    the coefficient of degree k.
    """
    powers = _list_powers()
    product = 1
    covered_exponents = set[int]()
    for exponent in range(1, _ROOT_COUNT + 1):
        if exponent in covered_exponents:
            continue
        # A minimal polynomial has x^e and its repeated squares, x^2e, x^4e, ..., as its roots.
        conjugates = {(exponent << squarings) % _ORDER_OF_X for squarings in range(_FIELD_DEGREE)}
        covered_exponents |= conjugates
        coefficients = [1]  # of a polynomial over GF(2^9), the lowest first
        for conjugate in conjugates:
            coefficients = _multiply_by_linear_factor(coefficients, conjugate, powers)
        # All coefficients of a minimal polynomial are 0 or 1.
        minimal_polynomial = sum(
            coefficient << degree for degree, coefficient in enumerate(coefficients)
        )
        product = _multiply_polynomials(product, minimal_polynomial)
    return product


def _list_powers() -> list[int]:
    """Return x^0 to x^510 in GF(2^9), as integers of 9 bits (x is a primitive element)."""
    powers = [1]
    for _ in range(_ORDER_OF_X - 1):
        next_power = powers[-1] << 1
        has_overflow = next_power >> _FIELD_DEGREE
        powers.append(next_power ^ _FIELD_POLYNOMIAL if has_overflow else next_power)
    return powers


def _multiply_by_linear_factor(
    coefficients: list[int], root_exponent: int, powers: list[int]
) -> list[int]:
    """Return a polynomial in z over GF(2^9) multiplied by (z - x^exponent).

    Args:
        coefficients: the polynomial, an element of GF(2^9) as an integer of 9 bits for each degree,
            the lowest first.
        root_exponent: k of the new root x^k, 0 to 510.
        powers: x^0 to x^510 (`_list_powers`).
    """
    exponent_by_power = {power: k for k, power in enumerate(powers)}
    times_root = [
        powers[(exponent_by_power[coefficient] + root_exponent) % _ORDER_OF_X] if coefficient else 0
        for coefficient in coefficients
    ]
    times_root.append(0)  # as many degrees as the other product
    times_z = [0, *coefficients]
    # Addition and subtraction in GF(2^9) are XOR.
    return [root_term ^ z_term for root_term, z_term in zip(times_root, times_z, strict=True)]


def _multiply_polynomials(factor: int, other_factor: int) -> int:
    """Return the product of two polynomials over GF(2); bit k is the coefficient of degree k."""
    product = 0
    while other_factor:
        lowest_term = other_factor & -other_factor
        product ^= factor * lowest_term
        other_factor ^= lowest_term
    return product


def _reduce_polynomial(polynomial: int, modulus: int) -> int:
    """Return a polynomial over GF(2) modulo another one; bit k is the coefficient of degree k."""
    length = modulus.bit_length()
    while polynomial.bit_length() >= length:
        polynomial ^= modulus << (polynomial.bit_length() - length)
    return polynomial

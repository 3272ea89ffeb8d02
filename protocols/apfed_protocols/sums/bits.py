"""The default number of fixed-point bits of a sum: the most at no more bytes on the wire, of many
values and of one.

Run by: every party that makes an agreement. Every party derives the same number from the sum, its
contributors and its noise, which are public.
"""

import warnings
from collections.abc import Callable

from apfed_protocols.errors import LocalProtocolError, UnsafeChoiceWarning
from apfed_protocols.sums.interface import MAX_BITS, USUAL_BITS
from apfed_protocols.sums.roles import SecureSum

__all__ = ["choose_bits"]


def choose_bits(make: Callable[[int], SecureSum]) -> int:
    """Return the default number of fixed-point bits of a value in a sum: the largest number with
    which the sum sends no more bytes than with 16 bits (`USUAL_BITS`), both per value of a long
    contribution and for a contribution of one value.

    If 16 bits do not fit the sum, return the largest number that fits.

    Args:
        make: returns the sum for a number of bits; raises LocalProtocolError if they do not fit.

    Raises:
        LocalProtocolError: no number of bits fits; the error is the one that `make` raises for 16
            bits.
    """
    usual_sizes = _count_bytes(make, USUAL_BITS)
    for bits in range(MAX_BITS, 1, -1):
        sizes = _count_bytes(make, bits)
        if sizes is None:
            continue
        if usual_sizes is None or (sizes[0] <= usual_sizes[0] and sizes[1] <= usual_sizes[1]):
            return bits
    make(USUAL_BITS)  # raises the error that says why these bits do not fit
    raise LocalProtocolError(f"no number of bits from 2 to {MAX_BITS} fits this sum")


def _count_bytes(make: Callable[[int], SecureSum], bits: int) -> tuple[float, float] | None:
    """Return the bytes that the sum sends with this number of bits: per value of a long
    contribution, and for one value alone; None if the bits do not fit.

    `make`: returns the sum for a number of bits, or raises LocalProtocolError.
    """
    with warnings.catch_warnings():
        # The sum that is used in the end warns again.
        warnings.simplefilter("ignore", UnsafeChoiceWarning)
        try:
            described = make(bits)
        except LocalProtocolError:
            return None
    return described.value_bytes, described.min_bytes

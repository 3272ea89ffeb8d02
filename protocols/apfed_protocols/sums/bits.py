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
    """Return the most bits for which values take no more bytes than with `USUAL_BITS`: each of
    many, and one alone.

    A sum that does not carry those takes the most that it carries at all.

    Args:
        make: the sum for a number of bits; it raises LocalProtocolError where they do not fit.

    Raises:
        LocalProtocolError: no number of bits fits; that of `USUAL_BITS` says why.
    """
    usual = _count_bytes(make, USUAL_BITS)
    for bits in range(MAX_BITS, 1, -1):
        sizes = _count_bytes(make, bits)
        if sizes is None:
            continue
        if usual is None or (sizes[0] <= usual[0] and sizes[1] <= usual[1]):
            return bits
    make(USUAL_BITS)
    raise LocalProtocolError(f"no number of bits from 2 to {MAX_BITS} fits this sum")


def _count_bytes(make: Callable[[int], SecureSum], bits: int) -> tuple[float, float] | None:
    """Return the bytes on the wire at this number of bits: a value of a long contribution, and one
    value alone; None if the sum does not carry them.

    `make`: returns the sum for a number of bits.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnsafeChoiceWarning)  # said once, of the sum that is made
        try:
            described = make(bits)
        except LocalProtocolError:
            return None
    return described.value_bytes, described.min_bytes

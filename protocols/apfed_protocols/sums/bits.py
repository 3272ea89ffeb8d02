"""The default number of fixed-point bits of a sum: the most at no more bytes on the wire.

Run by: every party that makes an agreement. Every party derives the same number from the sum, its
contributors and its noise, which are public.
"""

import warnings
from collections.abc import Callable

from apfed_protocols.errors import LocalProtocolError, UnsafeChoiceWarning
from apfed_protocols.sums.interface import MOST_BITS, USUAL_BITS
from apfed_protocols.sums.roles import SecureSum

__all__ = ["choose_bits"]


def choose_bits(make: Callable[[int], SecureSum]) -> int:
    """Return the most bits for which a value takes no more bytes than with `USUAL_BITS`.

    A sum that does not carry those takes the most that it carries at all.

    Args:
        make: the sum for a number of bits; it raises LocalProtocolError where they do not fit.

    Raises:
        LocalProtocolError: no number of bits fits; that of `USUAL_BITS` says why.
    """
    usual = _count_value_bytes(make, USUAL_BITS)
    for bits in range(MOST_BITS, 1, -1):
        size = _count_value_bytes(make, bits)
        if size is not None and (usual is None or size <= usual):
            return bits
    make(USUAL_BITS)
    raise LocalProtocolError(f"no number of bits from 2 to {MOST_BITS} fits this sum")


def _count_value_bytes(make: Callable[[int], SecureSum], bits: int) -> float | None:
    """Return the bytes on the wire of one value at so many bits; None if the sum does not carry
    them.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnsafeChoiceWarning)  # said once, of the sum that is made
        try:
            return make(bits).value_bytes
        except LocalProtocolError:
            return None

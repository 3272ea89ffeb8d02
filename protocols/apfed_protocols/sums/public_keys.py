"""Whether a public key looks like one: its polynomials hold about uniform residues.

Run by: a passive, before anything is encrypted under the key that the active sent. Protects from
broken keys, under which a contribution would travel with its noise alone over it: zeros,
constants, repeated residues, residues within a small range, and b = a or b = -a; looked for in the
transformed form that SEAL keeps and in the coefficients, so that sparse and small polynomials are
found, too. From nothing else: a key holder that makes a bad key on purpose can hide it (b = X a
passes, say), or give its secret key away.
"""

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.errors import RemoteProtocolError

__all__ = ["require_spread"]

# Of N uniform residues modulo q about N^2 / 2q repeat another one. More than a 16th do with
# probability below 2^-100, for primes of 20 bits or more at any N.
_MOST_REPEATED = 1 / 16
# About a 16th of N uniform residues lies in each 16th of their range. More than an 8th does with
# probability below exp(-N / 39) (Chernoff's bound), 2^-70 from N = 2048 on.
_RANGES, _MOST_IN_ONE = 16, 1 / 8


def require_spread(key_2N: NDArray[np.uint64], modulus: int, *, sender: str) -> None:
    """Refuse a public key (b, a) whose residues do not spread as uniform ones do.

    Args:
        key_2N: b and a, transformed or not.
        modulus: a prime of at most 60 bits.
        sender: of the key.

    Raises:
        RemoteProtocolError: names what does not spread.
    """
    b_N, a_N = key_2N
    degree = len(b_N)
    for tested_N in (b_N, a_N, b_N + a_N, b_N + (np.uint64(modulus) - a_N)):
        residues_N = tested_N % np.uint64(modulus)
        repeated = degree - len(np.unique(residues_N))
        crowded = int(np.bincount(residues_N // np.uint64(modulus // _RANGES + 1)).max())
        if repeated > degree * _MOST_REPEATED or crowded > degree * _MOST_IN_ONE:
            raise RemoteProtocolError(
                f"the public key from {sender} is no RLWE key: of {degree} residues of a "
                f"polynomial, of the sum or difference of both, {repeated} repeat others, expected "
                f"next to none; {crowded} lie in one {_RANGES}th of the range, expected about "
                f"{degree // _RANGES}; nothing is encrypted under it. {sender} sets up again with "
                "a key of its own library"
            )

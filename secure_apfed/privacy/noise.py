"""Gaussian noise from a keystream: AES-256 in counter mode, then the inverse normal CDF.

Run by: the active, in a guard. Against: anybody without the key, to whom the noise is
computationally indistinguishable from 64 independent bits a number.

What is not exact. A bound of Gaussian DP is about real numbers. Here each normal comes
from 64 bits (a sign, and a tail probability of 63 bits rounded to float64), so its
values are a finite set and end at 9.1 standard deviations, where the true tail holds
2e-19. Adding floats leaves traces in the low bits (Mironov 2012, On Significance of the
Least Significant Bits); guards add in float64 and round the sum once to the
representation's type, which for float32 drops the 29 bits in which those traces lie,
but that is a mitigation and not a proof.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from protocols.randomness import keystream

__all__ = ["standard_normals"]

_PURPOSE = b"secure-apfed gaussian noise v1"


def standard_normals(key: bytes, *context: bytes, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return independent standard normals, a function of (key, context, shape) alone.

    Args:
        key: 32 secret bytes.
        context: names this use; another context gives independent noise.
        shape: of the result.
    """
    sizes = np.array(shape, dtype="<u8").tobytes()
    count = int(np.prod(shape))
    words = np.frombuffer(keystream(key, _PURPOSE, sizes, *context, length=8 * count), dtype="<u8")
    # (k + 1) / 2^64 with k of 63 bits lies in (0, 1/2]: the lower tail's probability.
    tails = ((words >> np.uint64(1)).astype(np.float64) + 1) * 2.0**-64
    signs = 1 - 2 * (words & np.uint64(1)).astype(np.float64)
    return np.asarray(signs * ndtri(tails), dtype=np.float64).reshape(shape)

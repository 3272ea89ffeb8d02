"""Gaussian noise from a keystream: AES-256 in counter mode, then the inverse normal CDF.

Run by: the active, in a guard. Against: anybody without the key, to whom the noise is
computationally indistinguishable from 64 independent bits a number.

Floating point. A bound of Gaussian DP is about real numbers, and the low bits of a sum of floats
tell what was added (Mironov 2012, On Significance of the Least Significant Bits). So guards
round the noisy numbers to a grid of width g, about sigma / 10, far above those bits: `on_grid`.

Were the noise exact, that would be post-processing of an exact Gaussian release. What is
computed differs from it only where its error crosses one of the borders between two points of
the grid. In units of sigma the error is at most

    e = 1e-15 |n| + 2e-16 (1 + C / sigma) + 2^-63 / phi(n):

the inverse CDF (below 7.2e-16 relative, as Cephes states), its argument, the product by sigma
and the sum; and the 64 bits from which n is drawn, a sign and a tail probability of 63 bits.
With borders at least sigma / 16 apart, the chance of a crossing is at most the integral of
32 e phi(n), below 4e-14 (1 + C / sigma) a number; beyond 9.1 sigma, where the drawn noise ends,
the true one has 2e-19. N numbers that concern one record are so within N 4e-14 (1 + C / sigma)
of the stated law in total variation, which costs (1 + e^epsilon) times that in delta: for 64
numbers released 50 times with sigma >= C, 1e-9 at epsilon 1 and 8e-7 at epsilon 8. It is not
added to the delta that is reported.

The grid adds at most 0.14 % to the variance and nothing that could be measured to the mean.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from protocols.randomness import keystream

__all__ = ["on_grid", "standard_normals"]

_PURPOSE = b"secure-apfed gaussian noise v1"
_EXACT = 2.0**53


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


def on_grid(noisy: NDArray[np.float64], sigma: float) -> NDArray[np.float64]:
    """Return noisy numbers rounded to multiples of the power of two in (sigma / 16, sigma / 8].

    Numbers of 2^53 multiples or more, whose last bit is worth more than that, stay as they are.

    Args:
        noisy: values with noise of deviation sigma.
        sigma: positive.
    """
    grid = float(np.ldexp(1.0, int(np.floor(np.log2(sigma))) - 3))
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        steps = noisy / grid
        return np.asarray(np.where(np.abs(steps) < _EXACT, np.rint(steps) * grid, noisy))

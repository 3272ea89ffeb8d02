"""Votes and noise as integers: rounding that keeps the bound of a row, and checks of both.

Run by: every passive, before anything leaves it. Protects: the sensitivity, which holds for the
integers that are sent; and the ring, which no honest contribution leaves.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.moments.agreement import MomentAgreement
from apfed_protocols.sums.interface import FloatArray, IntArray
from apfed_protocols.sums.masks import Elements

__all__ = ["noise_steps", "vote_steps"]

_TOLERANCE = 2.0**-20


def vote_steps(agreement: MomentAgreement, votes_UK: FloatArray) -> Elements:
    """Votes in steps of 2^-bits, rounded toward zero, in new memory.

    Toward zero, so that the magnitudes of a row add up to 2^bits at most: rounding to the nearest
    may add half a step a column. The error of a vote is below one step; 0 and 1 are exact.

    Raises:
        LocalProtocolError: no float matrix U x K, values that are not finite, a row of L1 norm
            above 1 (2^-20 is forgiven), or negative votes that were not agreed.
    """
    shape = (agreement.people, agreement.columns)
    plain = type(votes_UK) is np.ndarray and votes_UK.dtype in (np.float32, np.float64)
    if not plain or votes_UK.shape != shape:
        kind = f"{getattr(votes_UK, 'dtype', type(votes_UK).__name__)} {np.shape(votes_UK)}"
        raise LocalProtocolError(f"votes are a float32 or float64 array {shape}, got {kind}")
    wide_UK = votes_UK.astype(np.float64, order="C")
    with np.errstate(over="ignore"):
        norm_U = np.abs(wide_UK).sum(axis=1)
    if not (norm_U <= 1 + _TOLERANCE).all():  # also where a value is not finite
        far = int(np.count_nonzero(~(norm_U <= 1 + _TOLERANCE)))
        raise LocalProtocolError(
            f"{far} of {len(norm_U)} rows of votes have an L1 norm above 1, or are not finite; "
            "scale them down"
        )
    if not agreement.signed and wide_UK.min() < 0:
        raise LocalProtocolError("some votes are negative; agree on signed=True, or shift them")
    steps_UK = np.trunc(wide_UK * agreement.vote_steps).astype(np.int64)
    return _ring(agreement, steps_UK)


def noise_steps(agreement: MomentAgreement, noise_dK: IntArray | None) -> Elements | None:
    """The noise as ring elements, in new memory; None where none was agreed.

    Raises:
        LocalProtocolError: it is missing, not agreed, of another form, or beyond its bound.
    """
    if (noise_dK is None) != (agreement.noise is None):
        raise LocalProtocolError(
            f"the agreement says {'no noise' if agreement.noise is None else 'noise'}, and "
            f"{'none' if noise_dK is None else 'some'} was given"
        )
    if noise_dK is None:
        return None
    shape, most = (agreement.features, agreement.columns), agreement.largest_noise
    plain = type(noise_dK) is np.ndarray and noise_dK.dtype == np.int64
    if not plain or noise_dK.shape != shape:
        kind = f"{getattr(noise_dK, 'dtype', type(noise_dK).__name__)} {np.shape(noise_dK)}"
        raise LocalProtocolError(f"noise is an int64 array of shape {shape}, got {kind}")
    if not -most <= noise_dK.min() <= noise_dK.max() <= most:
        raise LocalProtocolError(
            f"noise of {agreement.noise} steps ends at {most}; what was given lies beyond"
        )
    return _ring(agreement, noise_dK)


def _ring(agreement: MomentAgreement, steps: NDArray[Any]) -> Elements:
    ring: Elements = np.array(steps, order="C").astype(agreement.word)
    return ring

"""Discrete Gaussian noise on integers, sampled exactly: no floating point anywhere.

Run by: every passive that adds noise under a secure sum. Against: whoever reads the sum, who
gets no low-order bit that would tell noise from values (Mironov 2012). What remains: the
sampler's running time depends on the noise, so somebody who can time it learns a little of
it; and the noise is pseudo-random, so the guarantee is against bounded computation.

N_Z(0, s^2) has the probability exp(-x^2 / 2 s^2) at each integer x, up to a constant (Canonne,
Kamath and Steinke 2020, The Discrete Gaussian for Differential Privacy, Definition 1). Here s
is an integer and the noise ends at `largest_noise(s)`, with what lies beyond left out: less
than `TAIL` of the probability, which every account of it must add.

Letters: n values under way. All arithmetic is in 64-bit integers.
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.checks import is_whole
from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.randomness import derive_key, keystream

__all__ = ["MAX_DEVIATION", "TAIL", "discrete_gaussian", "largest_noise"]

MAX_DEVIATION = 2**24
"""Largest s: squares of what is proposed then stay below 2^62."""

TAIL = 2.0**-128
"""Bound of the probability that lies beyond `largest_noise`, for one value."""

# 2 exp(-t^2 / 2) = 2^-128 at t = 13.37: N_Z is as concentrated as the continuous Gaussian
# (Canonne, Kamath and Steinke 2020, Corollary 17 and the Chernoff bound after it).
_TAIL_DEVIATIONS = 13.375
_PURPOSE = b"secure-apfed discrete gaussian v1"
_WORD = np.dtype("<u8")

Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]


def largest_noise(deviation: int) -> int:
    return math.ceil(_TAIL_DEVIATIONS * deviation)


def discrete_gaussian(
    key: bytes, *context: bytes, deviation: int, shape: tuple[int, ...]
) -> Integers:
    """Return independent values of N_Z(0, deviation^2), each at most `largest_noise` in magnitude.

    They are a function of the arguments alone; another context gives independent values.
    Algorithm 3 of Canonne, Kamath and Steinke 2020 with the proposal's scale t = s: propose y
    from the discrete Laplace distribution, P(y) ~ exp(-|y| / s), and keep it with probability
    exp(-(|y| - s)^2 / 2 s^2).

    Args:
        key: 32 secret bytes.
        context: names this use.
        deviation: s, 1 to `MAX_DEVIATION`.
        shape: of the result.

    Raises:
        LocalProtocolError: a deviation out of range, or a key of the wrong length.
    """
    if not is_whole(deviation) or not 1 <= deviation <= MAX_DEVIATION:
        raise LocalProtocolError(
            f"the deviation of discrete noise is an integer from 1 to {MAX_DEVIATION}, "
            f"got {deviation!r}"
        )
    deviation = int(deviation)
    count = math.prod(shape)
    bits = _Bits(derive_key(key, _PURPOSE, *context))
    accepted_parts: list[Integers] = []
    missing = count
    largest = largest_noise(deviation)
    while missing > 0:
        # About half of the proposals are kept.
        y_n = _draw_laplace(bits, deviation, 2 * missing + 16)
        y_n = y_n[np.abs(y_n) <= largest]
        distance_n = np.abs(y_n) - deviation
        accepted_n = _exp_minus(bits, distance_n * distance_n, 2 * deviation * deviation)
        accepted_parts.append(y_n[accepted_n][:missing])
        missing -= len(accepted_parts[-1])
    return (
        np.concatenate(accepted_parts).reshape(shape)
        if accepted_parts
        else np.zeros(shape, dtype=np.int64)
    )


class _Bits:
    def __init__(self, key: bytes) -> None:
        self._key = key
        self._block = 0

    def draw_words(self, count: int) -> NDArray[np.uint64]:
        block = self._block
        self._block = self._block + 1
        stream = keystream(self._key, block.to_bytes(8, "big"), length=8 * count)
        words: NDArray[np.uint64] = np.frombuffer(stream, dtype=_WORD)
        return words

    def draw_below(self, bound: int, count: int) -> Integers:
        """Draw uniform integers in 0..bound - 1 by rejection; bound is at most 2^62."""
        width = (bound - 1).bit_length()
        if width == 0:
            return np.zeros(count, dtype=np.int64)

        def draw_bits(number: int) -> Integers:
            shifted: Integers = (self.draw_words(number) >> np.uint64(64 - width)).astype(np.int64)
            return shifted

        values = draw_bits(count)
        while len(again := np.flatnonzero(values >= bound)):
            values[again] = draw_bits(len(again))
        return values


def _draw_laplace(bits: _Bits, scale: int, proposals: int) -> Integers:
    """Draw at most `proposals` values of the discrete Laplace distribution (Algorithm 2)."""
    u_n = bits.draw_below(scale, proposals)
    u_n = u_n[_exp_minus(bits, u_n, scale)]
    v_n = _count_while(lambda number: _exp_minus_one(bits, number), len(u_n))
    magnitude_n = u_n + scale * v_n
    negative_n = bits.draw_below(2, len(u_n)).astype(bool)
    # Zero would come twice, as +0 and -0.
    once_n = ~(negative_n & (magnitude_n == 0))
    proposed_n: Integers = np.where(negative_n, -magnitude_n, magnitude_n)[once_n]
    return proposed_n


def _exp_minus(bits: _Bits, numerator_n: Integers, denominator: int) -> Flags:
    """Toss coins that fall heads with probability exp(-numerator / denominator) (Algorithm 1)."""
    whole_n = numerator_n // denominator
    rest_n = numerator_n % denominator
    heads_n = _exp_minus_fraction(bits, rest_n, denominator)
    # exp(-whole): as many coins of exp(-1), of which the first that fails decides.
    active = np.flatnonzero(heads_n & (whole_n > 0))
    while len(active):
        heads_n[active] = _exp_minus_one(bits, len(active))
        whole_n[active] -= 1
        active = active[heads_n[active] & (whole_n[active] > 0)]
    return heads_n


def _exp_minus_one(bits: _Bits, count: int) -> Flags:
    return _exp_minus_fraction(bits, np.ones(count, dtype=np.int64), 1)


def _exp_minus_fraction(bits: _Bits, numerator_n: Integers, denominator: int) -> Flags:
    """Toss coins as `_exp_minus` does, for numerator <= denominator.

    Toss coins of probability (numerator / denominator) / k for k = 1, 2, ... until one falls
    tails: the number of that toss is odd with probability exp(-numerator / denominator). A coin
    of that probability is one of numerator / denominator and one of 1 / k, both heads.
    """
    is_odd_n = np.zeros(len(numerator_n), dtype=bool)
    active = np.arange(len(numerator_n))
    k = 1
    while len(active):
        heads = bits.draw_below(denominator, len(active)) < numerator_n[active]
        heads &= bits.draw_below(k, len(active)) == 0
        is_odd_n[active[~heads]] = k % 2 == 1
        active = active[heads]
        k = k + 1
    return is_odd_n


def _count_while(heads: Callable[[int], Flags], count: int) -> Integers:
    """Count how often each coin falls heads before its first tails."""
    times_n = np.zeros(count, dtype=np.int64)
    active = np.arange(count)
    while len(active):
        active = active[heads(len(active))]
        times_n[active] += 1
    return times_n

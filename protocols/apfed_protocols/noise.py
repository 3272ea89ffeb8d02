"""Discrete Gaussian noise on integers, sampled exactly: no floating point anywhere.

Run by: every passive that adds noise under a secure sum. Against: whoever reads the sum, who
gets no low-order bit that would tell noise from values (Mironov 2012). What remains: the
sampler's running time depends on the noise, so somebody who can time it learns a little of
it; and the noise is pseudo-random, so the guarantee is against bounded computation.

N_Z(0, s^2) has the probability exp(-x^2 / 2 s^2) at each integer x, up to a constant (Canonne,
Kamath and Steinke 2020, The Discrete Gaussian for Differential Privacy, Definition 1). Here s
is an integer and the noise ends at `largest_noise(s)`, with what lies beyond left out: less
than `TAIL_PROBABILITY` of the probability, which every account of it must add.

Two ways lead to that law. From `MIN_BINNED_DEVIATION` on a table proposes a bin of magnitudes,
random bits the place in it, and one coin corrects (`_draw_in_bins`): about 60 ns a value. Smaller
deviations take Algorithm 3 of that paper (`_draw_by_laplace`).

Letters: n values under way, J bins. Arithmetic is in 64-bit integers, of tables in Python's, which
have no limit.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.checks import is_whole
from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.randomness import derive_key, keystream

__all__ = [
    "MAX_DEVIATION",
    "MIN_BINNED_DEVIATION",
    "TAIL_PROBABILITY",
    "discrete_gaussian",
    "largest_noise",
]

MAX_DEVIATION = 2**24
"""Largest s: squares of what is proposed then stay below 2^62."""

TAIL_PROBABILITY = 2.0**-128
"""Bound of the probability that lies beyond `largest_noise`, for one value."""

# 2 exp(-t^2 / 2) = 2^-128 at t = 13.37: N_Z is as concentrated as the continuous Gaussian
# (Canonne, Kamath and Steinke 2020, Corollary 17 and the Chernoff bound after it).
_TAIL_DEVIATIONS = 13.375
MIN_BINNED_DEVIATION = 16
"""Smallest s that is drawn in bins: from here on a sixteenth of s is a whole number."""

_WORD_BITS = 64
_CELL_BITS = 12
_KEY_PURPOSE = b"secure-apfed discrete gaussian v1"
_WORD = np.dtype("<u8")

Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]


def largest_noise(deviation: int) -> int:
    """Return the largest magnitude of discrete Gaussian noise with this standard deviation s;
    larger values are left out (see `TAIL_PROBABILITY`).
    """
    return math.ceil(_TAIL_DEVIATIONS * deviation)


def discrete_gaussian(
    key: bytes, *context: bytes, deviation: int, shape: tuple[int, ...]
) -> Integers:
    """Return independent values of the discrete Gaussian N_Z(0, deviation^2), each at most
    `largest_noise` in magnitude.

    The values depend on the arguments alone; another context gives independent values.

    Args:
        key: 32 secret bytes.
        context: labels of this use, e.g. session and step.
        deviation: s, the standard deviation, an integer from 1 to `MAX_DEVIATION`.
        shape: shape of the result.

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
    random_bits = _RandomBits(derive_key(key, _KEY_PURPOSE, *context))
    draw_values = _draw_in_bins if deviation >= MIN_BINNED_DEVIATION else _draw_by_laplace
    batches = [np.zeros(0, dtype=np.int64)]
    missing_count = count
    while missing_count > 0:
        # By rejection, so that a batch may have too few values, or some too many.
        batch = draw_values(random_bits, deviation, missing_count)[:missing_count]
        batches.append(batch)
        missing_count -= len(batch)
    return np.concatenate(batches).reshape(shape)


class _RandomBits:
    """The source of randomness of all draws below: pseudo-random numbers under one secret key."""

    def __init__(self, key: bytes) -> None:
        """Start the source; the same 32-byte key gives the same numbers again."""
        self._key = key
        self._next_block = 0

    def draw_words(self, count: int) -> NDArray[np.uint64]:
        """Return `count` fresh random words of 64 bits; no two calls share any."""
        block = self._next_block
        self._next_block += 1
        stream = keystream(self._key, block.to_bytes(8, "big"), length=8 * count)
        words: NDArray[np.uint64] = np.frombuffer(stream, dtype=_WORD)
        return words

    def draw_below(self, bound: int, count: int) -> Integers:
        """Return `count` uniform integers in 0..bound - 1, by rejection; bound is at most 2^62."""
        bit_count = (bound - 1).bit_length()
        if bit_count == 0:
            return np.zeros(count, dtype=np.int64)

        def draw_candidates(candidate_count: int) -> Integers:
            """Return `candidate_count` uniform integers of `bit_count` bits."""
            words = self.draw_words(candidate_count)
            integers: Integers = (words >> np.uint64(64 - bit_count)).view(np.int64)
            return integers

        values = draw_candidates(count)
        rejected = np.flatnonzero(values >= bound)
        while len(rejected):
            values[rejected] = draw_candidates(len(rejected))
            rejected = np.flatnonzero(values >= bound)
        return values


@dataclass(frozen=True, kw_only=True, eq=False)
class _Bins:
    """A table of the bins 0..J-1 of magnitudes, bin j from j w to j w + w - 1, for one deviation.

    A real number U, uniform in [0, 1), is in bin j where C_j <= U < C_j+1. Its first 64 bits, a
    word, decide that unless they equal those of a C, which one word in 2^55 does: then further
    bits do (`_find_bin`). The first 12 bits of a word name its cell, of which most lie in one bin.

    Attributes:
        width_bits: the binary logarithm of w.
        thresholds: floor(2^64 C_j) for j from 1 to J - 1.
        bin_by_cell: the bin in which a cell begins, for each of 2^12 cells.
        is_split: whether a threshold lies in a cell, so that its words are in several bins, by
            cell.
    """

    width_bits: int
    thresholds: NDArray[np.uint64]
    bin_by_cell: Integers
    is_split: Flags

    def find_bins(self, words_n: NDArray[np.uint64]) -> tuple[Integers, Integers]:
        """Find the bin of magnitudes in which each of n uniform numbers lies, from its first 64
        bits, a word.

        Returns:
            The bin of each number, (n,); and the indices of the words that do not decide their bin,
            since they equal a threshold.
        """
        cell_n = (words_n >> np.uint64(_WORD_BITS - _CELL_BITS)).view(np.int64)
        bin_n = self.bin_by_cell[cell_n]
        # Most cells lie in one bin; only for words in the others the thresholds are searched.
        in_split_cell = np.flatnonzero(self.is_split[cell_n])
        lowest = np.searchsorted(self.thresholds, words_n[in_split_cell], side="left")
        highest = np.searchsorted(self.thresholds, words_n[in_split_cell], side="right")
        bin_n[in_split_cell] = lowest
        return bin_n, in_split_cell[lowest != highest]


@lru_cache(maxsize=64)
def _make_bins(deviation: int) -> _Bins:
    """Return the table by which random words of 64 bits select bins of magnitudes, in proportion to
    the discrete Gaussian with the standard deviation s = `deviation`. A cell of the table is all
    words that begin with the same 12 bits.
    """
    thresholds = np.array(_compute_thresholds(deviation, _WORD_BITS), dtype=np.uint64)
    first_words = np.arange(2**_CELL_BITS, dtype=np.uint64) << np.uint64(_WORD_BITS - _CELL_BITS)
    last_words = first_words | np.uint64(2 ** (_WORD_BITS - _CELL_BITS) - 1)
    first_bins = np.searchsorted(thresholds, first_words, side="left")
    last_bins = np.searchsorted(thresholds, last_words, side="right")
    return _Bins(
        width_bits=_choose_width_bits(deviation),
        thresholds=thresholds,
        bin_by_cell=first_bins.astype(np.int64),
        is_split=first_bins != last_bins,
    )


def _choose_width_bits(deviation: int) -> int:
    """Return the binary logarithm of w, the width of a bin: the largest power of two w <= s / 16.

    That gives 214 to 428 bins, keeps more than 97 of 100 proposals, and bounds the exponent of the
    coin: (w - 1) (2 j w + w - 1) / 2 s^2 < (1/16) (13.375 + 2/16) < 1.
    """
    return (deviation // MIN_BINNED_DEVIATION).bit_length() - 1


@lru_cache(maxsize=64)
def _compute_thresholds(deviation: int, precision: int) -> tuple[int, ...]:
    """Return the thresholds between J bins of magnitudes of width w, exactly: floor(2^precision
    C_j) for j from 1 to J - 1.

    Bin j has the weight exp(-(j w)^2 / 2 s^2), and C_j is the sum of the first j weights divided by
    the sum of all J weights: a uniform number in [C_j, C_j+1) selects bin j. Each sum is enclosed
    between two integers. If these do not determine all floors, everything is computed again with
    twice the spare digits.

    Args:
        deviation: s, the standard deviation, 1 to `MAX_DEVIATION`.
        precision: the binary digits of a threshold.
    """
    spare_digits = 64
    while True:
        lower_sums, upper_sums = _enclose_sums(deviation, precision + spare_digits)
        lowest = [(partial_sum << precision) // upper_sums[-1] for partial_sum in lower_sums[:-1]]
        highest = [(partial_sum << precision) // lower_sums[-1] for partial_sum in upper_sums[:-1]]
        if lowest == highest:
            return tuple(lowest)
        spare_digits *= 2


def _enclose_sums(deviation: int, digits: int) -> tuple[list[int], list[int]]:
    """Return lower and upper bounds, as integers, of 2^digits times the sum of the first 1, 2, ...,
    J weights of bins. Bin j has the weight exp(-c j^2), where c = w^2 / 2 s^2 and w is the width of
    a bin.

    Each weight is the one before times a factor: exp(-c (j + 1)^2) = exp(-c j^2) exp(-c (2 j + 1)).
    The factor shrinks by exp(-2 c) from bin to bin.

    Args:
        deviation: s, the standard deviation, 1 to `MAX_DEVIATION`.
        digits: binary digits of the computation.
    """
    width = 1 << _choose_width_bits(deviation)
    bin_count = largest_noise(deviation) // width + 1
    exponent = Fraction(width**2, 2 * deviation**2)
    lower_factor, upper_factor = _enclose_exp(exponent, digits)
    lower_shrink, upper_shrink = _enclose_exp(2 * exponent, digits)
    lower_weights = [1 << digits]
    upper_weights = [1 << digits]
    for _ in range(bin_count - 1):
        # Shifts round down, so upper bounds get 1 more.
        lower_weights.append(lower_weights[-1] * lower_factor >> digits)
        lower_factor = lower_factor * lower_shrink >> digits
        upper_weights.append((upper_weights[-1] * upper_factor >> digits) + 1)
        upper_factor = (upper_factor * upper_shrink >> digits) + 1
    return list(accumulate(lower_weights)), list(accumulate(upper_weights))


def _enclose_exp(exponent: Fraction, digits: int) -> tuple[int, int]:
    """Return lower and upper bounds, as integers, of 2^digits exp(-exponent), for an exponent in
    [0, 1], by the exponential series. Its terms alternate and shrink, so the rest that is left out
    is smaller than the last term that was added.
    """
    total = Fraction(1)
    term = Fraction(1)
    k = 1
    while term * 2**digits > 1:
        term = term * exponent / k
        total = total - term if k % 2 else total + term
        k += 1
    nearest = math.floor(total * 2**digits)
    # The series is off by less than 2^-digits, so by less than 1 here, and the floor by up to 1.
    return nearest - 1, nearest + 2


def _find_bin(random_bits: _RandomBits, deviation: int, word: int) -> int:
    """Return the bin of magnitudes in which a uniform number lies whose first 64 bits are `word`.
    Further bits of the number are drawn until they decide.

    Args:
        random_bits: the source of further bits.
        deviation: s, the standard deviation, 1 to `MAX_DEVIATION`.
        word: the first 64 bits, which equal those of a threshold, so that they do not decide alone.
    """
    number_bits = word
    precision = _WORD_BITS
    while True:
        thresholds = _compute_thresholds(deviation, precision)
        lowest = bisect_left(thresholds, number_bits)
        equals_threshold = lowest < len(thresholds) and thresholds[lowest] == number_bits
        if not equals_threshold:
            return lowest
        number_bits = (number_bits << _WORD_BITS) | int(random_bits.draw_words(1)[0])
        precision += _WORD_BITS


def _draw_in_bins(random_bits: _RandomBits, deviation: int, count: int) -> Integers:
    """Return about `count` values of the discrete Gaussian N_Z(0, s^2), each at most
    `largest_noise` in magnitude, for a standard deviation s of `MIN_BINNED_DEVIATION` or more.

    It is rejection sampling over bins of magnitudes of width w. The density falls, so in a bin it
    is largest at the lower end. Propose bin j in proportion to exp(-(j w)^2 / 2 s^2), and a place r
    below w and a sign from random bits. Keep j w + r with probability

        exp(-(j w + r)^2 / 2 s^2) / exp(-(j w)^2 / 2 s^2) = exp(-r (2 j w + r) / 2 s^2).

    So x and -x are kept in proportion to exp(-x^2 / 2 s^2). The coin for this probability is exact.
    More than 97 of 100 proposals are kept.
    """
    bins = _make_bins(deviation)
    # A 32nd more, and 16 for small counts, mostly make up for the rejected ones.
    proposal_count = count + count // 32 + 16
    words_n = random_bits.draw_words(proposal_count)
    bin_n, undecided_proposals = bins.find_bins(words_n)
    for proposal in undecided_proposals:
        bin_n[proposal] = _find_bin(random_bits, deviation, int(words_n[proposal]))
    low_n = bin_n << bins.width_bits
    offset_words_n = random_bits.draw_words(proposal_count)
    offset_n = (offset_words_n & np.uint64((1 << bins.width_bits) - 1)).view(np.int64)
    is_negative_n = offset_words_n >= np.uint64(1 << (_WORD_BITS - 1))
    magnitude_n = low_n + offset_n
    is_accepted_n = _toss_exp_fraction(
        random_bits, offset_n * (low_n + magnitude_n), 2 * deviation**2
    )
    is_accepted_n &= magnitude_n <= largest_noise(deviation)
    # Zero would be drawn twice as often as it should, as +0 and -0.
    is_accepted_n &= ~(is_negative_n & (magnitude_n == 0))
    value_n = np.where(is_negative_n, -magnitude_n, magnitude_n)
    accepted_values: Integers = value_n[is_accepted_n]
    return accepted_values


def _draw_by_laplace(random_bits: _RandomBits, deviation: int, count: int) -> Integers:
    """Return about `count` values of the discrete Gaussian N_Z(0, s^2), each at most
    `largest_noise` in magnitude, by Algorithm 3 of Canonne, Kamath and Steinke 2020 with the scale
    t = s, for any standard deviation s.

    Propose y from the discrete Laplace distribution, P(y) ~ exp(-|y| / s), and keep it with
    probability exp(-(|y| - s)^2 / 2 s^2).
    """
    # About half of the proposals are kept, so draw twice as many, and 16 more for small counts.
    y_n = _draw_laplace(random_bits, deviation, 2 * count + 16)
    y_n = y_n[np.abs(y_n) <= largest_noise(deviation)]
    distance_n = np.abs(y_n) - deviation
    accepted_values: Integers = y_n[
        _toss_exp(random_bits, distance_n * distance_n, 2 * deviation * deviation)
    ]
    return accepted_values


def _draw_laplace(random_bits: _RandomBits, scale: int, proposal_count: int) -> Integers:
    """Return values of the discrete Laplace distribution, P(y) ~ exp(-|y| / t), by rejection from
    this number of proposals (Canonne, Kamath and Steinke 2020, Algorithm 2).

    `scale`: t, an integer.
    """
    u_n = random_bits.draw_below(scale, proposal_count)
    u_n = u_n[_toss_exp(random_bits, u_n, scale)]
    v_n = _count_heads(lambda coins: _toss_exp_one(random_bits, coins), len(u_n))
    magnitude_n = u_n + scale * v_n
    is_negative_n = random_bits.draw_below(2, len(u_n)).astype(bool)  # a fair bit: the sign
    # Zero would be drawn twice as often as it should, as +0 and -0.
    is_counted_n = ~(is_negative_n & (magnitude_n == 0))
    proposed_n: Integers = np.where(is_negative_n, -magnitude_n, magnitude_n)[is_counted_n]
    return proposed_n


def _toss_exp(random_bits: _RandomBits, numerator_n: Integers, denominator: int) -> Flags:
    """Toss one coin for each of n numerators; return True for heads, (n,). A coin falls heads with
    probability exp(-numerator / denominator), exactly (Canonne, Kamath and Steinke 2020,
    Algorithm 1).
    """
    whole_n = numerator_n // denominator
    rest_n = numerator_n % denominator
    heads_n = _toss_exp_fraction(random_bits, rest_n, denominator)
    # For the factor exp(-whole) toss as many coins of probability exp(-1): all must fall heads.
    remaining = np.flatnonzero(heads_n & (whole_n > 0))
    while len(remaining):
        heads_n[remaining] = _toss_exp_one(random_bits, len(remaining))
        whole_n[remaining] -= 1
        remaining = remaining[heads_n[remaining] & (whole_n[remaining] > 0)]
    return heads_n


def _toss_exp_one(random_bits: _RandomBits, count: int) -> Flags:
    """Toss `count` coins that fall heads with probability exp(-1); return True for heads."""
    return _toss_exp_fraction(random_bits, np.ones(count, dtype=np.int64), 1)


def _toss_exp_fraction(random_bits: _RandomBits, numerator_n: Integers, denominator: int) -> Flags:
    """Toss one coin for each of n numerators, 0 to the denominator; return True for heads, (n,). A
    coin falls heads with probability exp(-numerator / denominator), exactly.

    For each, toss coins with probability (numerator / denominator) / k for k = 1, 2, ... until one
    falls tails: the number of that toss is odd with probability exp(-numerator / denominator). Such
    a coin falls heads if a coin of probability numerator / denominator and one of 1 / k both do.
    """
    # Whether the toss that fell tails has an odd number; at first all fell tails at toss 1.
    is_odd_n = np.ones(len(numerator_n), dtype=bool)
    remaining = np.flatnonzero(random_bits.draw_below(denominator, len(numerator_n)) < numerator_n)
    k = 2
    while len(remaining):
        is_odd_n[remaining] = k % 2 == 1
        heads = random_bits.draw_below(denominator, len(remaining)) < numerator_n[remaining]
        heads &= random_bits.draw_below(k, len(remaining)) == 0
        remaining = remaining[heads]
        k += 1
    return is_odd_n


def _count_heads(toss: Callable[[int], Flags], coin_count: int) -> Integers:
    """Return how often each of n = `coin_count` coins falls heads before its first tails, (n,).

    `toss`: tosses the given number of coins; returns True for heads.
    """
    heads_n = np.zeros(coin_count, dtype=np.int64)
    remaining = np.arange(coin_count)
    while len(remaining):
        remaining = remaining[toss(len(remaining))]
        heads_n[remaining] += 1
    return heads_n

"""The exact sampler: right scale accepted, wrong ones rejected, and its pieces one by one."""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from decimal import Decimal, localcontext
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from apfed_protocols import noise as module
from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.noise import (
    MAX_DEVIATION,
    MIN_BINNED_DEVIATION,
    TAIL_PROBABILITY,
    discrete_gaussian,
    largest_noise,
)

pytest.importorskip("scipy")
from scipy.stats import chi2, chisquare

KEY = bytes(range(32))
RARE = 1e-5
TABLES = (module._make_bins, module._compute_thresholds)
BINNED = (MIN_BINNED_DEVIATION, 1000, 997_615, 1_995_230, MAX_DEVIATION)


@pytest.fixture
def fresh_tables() -> Iterator[None]:
    """Tables are made anew, and what a test planted in them is forgotten."""
    clear_tables()
    yield
    clear_tables()


def clear_tables() -> None:
    for table in TABLES:
        table.cache_clear()


def fits(sample: NDArray[np.int64], deviation: float) -> bool:
    """Test the values by chi-square, those expected fewer than ten times taken together."""
    most = math.ceil(14 * deviation)
    weight = np.exp(-(np.arange(-most, most + 1) ** 2) / (2 * deviation**2))
    expected = weight / weight.sum() * sample.size
    seen = np.bincount(sample.ravel() + most, minlength=2 * most + 1)
    common = expected >= 10
    observed = np.append(seen[common], seen[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    return bool(chisquare(observed, wanted).pvalue > RARE)


def scale_fits(sample: NDArray[np.int64], deviation: float) -> bool:
    """Test whether the sum of squares lies where chi-square says (for deviations far above 1)."""
    low, high = chi2.ppf([RARE, 1 - RARE], df=sample.size)
    return bool(low < float((sample.astype(np.float64) ** 2).sum()) / deviation**2 < high)


@pytest.mark.parametrize("deviation", [1, 2, 3, 7, 15, 16, 33])
def test_small_deviations_follow_the_law_and_no_other_scale(deviation: int) -> None:
    sample = discrete_gaussian(KEY, b"small", deviation=deviation, shape=(100_000,))
    found = [fits(sample, deviation * factor) for factor in (1, 2 / 3, 1.5, 1.03)]
    assert found == [True, False, False, False]


@pytest.mark.parametrize("deviation", [100, 32767, 10**6, MAX_DEVIATION])
def test_large_deviations_have_the_right_scale_and_no_other(deviation: int) -> None:
    sample = discrete_gaussian(KEY, b"large", deviation=deviation, shape=(20_000,))
    found = [scale_fits(sample, deviation * factor) for factor in (1, 2 / 3, 1.5)]
    assert found == [True, False, False]
    mean = sample.mean() / deviation
    fourth = ((sample / deviation) ** 4).mean()
    assert abs(mean) < 5 / math.sqrt(sample.size)
    assert abs(fourth - 3) < 5 * math.sqrt(96 / sample.size)


def test_low_bits_are_uniform() -> None:
    """Floating-point noise gives them away: with wide noise every residue is as likely."""
    sample = discrete_gaussian(KEY, b"bits", deviation=10**6, shape=(64_000,))
    assert chisquare(np.bincount(sample % 64, minlength=64)).pvalue > RARE


@pytest.mark.parametrize("deviation", [1, MIN_BINNED_DEVIATION])
def test_neighbouring_values_do_not_depend_on_each_other(deviation: int) -> None:
    sample = discrete_gaussian(KEY, b"pairs", deviation=deviation, shape=(100_000,))
    sample = (sample // deviation).clip(-2, 2)
    pairs = Counter(zip(sample[::2].tolist(), sample[1::2].tolist(), strict=True))
    share = np.bincount(sample + 2, minlength=5) / sample.size
    expected = [share[a + 2] * share[b + 2] * 50_000 for a in range(-2, 3) for b in range(-2, 3)]
    observed = [pairs[(a, b)] for a in range(-2, 3) for b in range(-2, 3)]
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    assert chi2.sf(statistic, df=16) > RARE


@pytest.mark.parametrize(("numerator", "denominator"), [(0, 1), (1, 3), (1, 1), (7, 3), (9, 1)])
def test_coins_of_exponentials_have_their_probability(numerator: int, denominator: int) -> None:
    bits = module._RandomBits(KEY)
    coins = module._toss_exp(bits, np.full(200_000, numerator, dtype=np.int64), denominator)
    chance = math.exp(-numerator / denominator)
    error = math.sqrt(chance * (1 - chance) / 200_000)
    assert abs(coins.mean() - chance) <= 5 * error


@pytest.mark.parametrize("bound", [1, 2, 3, 1000, 2**49 + 1])
def test_uniform_integers_reach_exactly_their_range(bound: int) -> None:
    drawn = module._RandomBits(KEY).draw_below(bound, 20_000)
    assert 0 <= drawn.min() <= drawn.max() < bound
    if bound <= 1000:
        assert chisquare(np.bincount(drawn, minlength=bound)).pvalue > RARE or bound == 1
    assert abs(drawn.mean() / bound - (bound - 1) / bound / 2) < 5 / math.sqrt(12 * 20_000)


def test_noise_is_a_function_of_key_and_context_alone() -> None:
    one = discrete_gaussian(KEY, b"a", b"b", deviation=50, shape=(40, 3))
    assert np.array_equal(one, discrete_gaussian(KEY, b"a", b"b", deviation=50, shape=(40, 3)))


@pytest.mark.parametrize(
    ("key", "context"),
    [
        pytest.param(KEY, (b"ab",), id="joined context"),
        pytest.param(KEY, (b"a", b"c"), id="another context"),
        pytest.param(bytes(32), (b"a", b"b"), id="another key"),
    ],
)
def test_noise_differs_under_another_key_or_context(key: bytes, context: tuple[bytes, ...]) -> None:
    one = discrete_gaussian(KEY, b"a", b"b", deviation=50, shape=(40, 3))
    other = discrete_gaussian(key, *context, deviation=50, shape=(40, 3))
    assert (other != one).mean() > 0.9


@pytest.mark.parametrize("deviation", [1, 2, 5, 50])
def test_the_tail_bound_is_one(deviation: int) -> None:
    """Values beyond have less than the stated probability, computed exactly at small scales."""
    most = largest_noise(deviation)
    x = np.arange(0, 60 * deviation)
    weight = np.exp(-(x.astype(np.float64) ** 2) / (2 * deviation**2))
    beyond = 2 * weight[most + 1 :].sum() / (2 * weight.sum() - 1)
    assert 0 < beyond < TAIL_PROBABILITY


def test_no_deviation_is_no_noise() -> None:
    assert largest_noise(0) == 0


@pytest.mark.usefixtures("fresh_tables")
@pytest.mark.parametrize("deviation", [4, 41])
def test_values_beyond_the_tail_are_never_returned(
    deviation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TAIL_DEVIATIONS", 1.5)
    drawn = discrete_gaussian(KEY, b"cut", deviation=deviation, shape=(20_000,))
    assert np.abs(drawn).max() == largest_noise(deviation) == math.ceil(1.5 * deviation)


@pytest.mark.parametrize("deviation", [0, -1, MAX_DEVIATION + 1, 1.0, True, None, math.nan])
def test_other_deviations_are_refused(deviation: Any) -> None:
    with pytest.raises(LocalProtocolError, match="an integer from 1 to"):
        discrete_gaussian(KEY, deviation=deviation, shape=(2,))


@pytest.mark.parametrize(
    ("deviation", "expected"),
    [
        pytest.param(2, [1, 0, -3, -3, 1, 0, -3, 4, 1, 2, -2, 1], id="Algorithm 3"),
        pytest.param(1000, [-1926, -26, -1119, -1972, -1621, -962], id="bins"),
        pytest.param(
            1_995_230,
            [-3_808_774, -27_322, -2_204_831, -3_922_292, -3_272_725, -1_946_370],
            id="bins, at the deviation of a run",
        ),
    ],
)
def test_recorded_noise_is_drawn_again(deviation: int, expected: list[int]) -> None:
    """Vectors: another implementation of the sampler must find the same.

    Those of deviations from `MIN_BINNED_DEVIATION` on changed when bins came (they were drawn by
    Algorithm 3 before); the smaller ones did not.
    """
    drawn = discrete_gaussian(KEY, b"vector", deviation=deviation, shape=(len(expected),))
    assert drawn.tolist() == expected


def sum_weights(deviation: int, digits: int) -> list[Decimal]:
    """Return the sums of the bins' weights by decimal exponentials, which round correctly."""
    width = 1 << module._choose_width_bits(deviation)
    with localcontext(prec=digits):
        spread = Decimal(2 * deviation**2)
        starts = range(0, largest_noise(deviation) + 1, width)
        return list(accumulate((-Decimal(start**2) / spread).exp() for start in starts))


@lru_cache
def floor_thresholds(deviation: int, precision: int) -> list[int]:
    digits = 40 + precision
    sums = sum_weights(deviation, digits)
    with localcontext(prec=digits):
        return [int(part / sums[-1] * 2**precision) for part in sums[:-1]]


@pytest.mark.parametrize("precision", [64, 128])
@pytest.mark.parametrize("deviation", BINNED)
def test_every_threshold_is_the_floor_of_its_number(deviation: int, precision: int) -> None:
    computed = module._compute_thresholds(deviation, precision)
    assert list(computed) == floor_thresholds(deviation, precision)


def list_edge_words(bins: Any) -> NDArray[np.uint64]:
    """Return each threshold's word and cell's first and last, and their neighbours."""
    cells = np.arange(1, 2**module._CELL_BITS, dtype=np.uint64) << np.uint64(
        module._WORD_BITS - module._CELL_BITS
    )
    edges = np.concatenate([bins.thresholds, cells])
    words = np.concatenate([edges - np.uint64(1), edges, edges + np.uint64(1)])
    return np.concatenate([words, np.array([0, 2**64 - 1], dtype=np.uint64)])


def is_every_bin_found(bins: Any) -> bool:
    """Return whether each edge word gets the bin of its thresholds, or is left undecided."""
    words = list_edge_words(bins)
    found, undecided = bins.find_bins(words)
    is_tie = np.isin(words, bins.thresholds)
    thresholds = bins.thresholds.tolist()
    expected = np.array([bisect_right(thresholds, word) for word in words.tolist()])
    ties_match = np.array_equal(undecided, np.flatnonzero(is_tie))
    return ties_match and np.array_equal(found[~is_tie], expected[~is_tie])


@pytest.mark.parametrize("deviation", BINNED)
def test_cells_find_the_bin_of_every_word_at_an_edge(deviation: int) -> None:
    assert is_every_bin_found(module._make_bins(deviation))


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda bins: {"is_split": np.zeros_like(bins.is_split)}, id="none split"),
        pytest.param(lambda bins: {"is_split": np.roll(bins.is_split, 1)}, id="split next to it"),
        pytest.param(lambda bins: {"bin_by_cell": np.roll(bins.bin_by_cell, 1)}, id="next cell"),
    ],
)
def test_a_wrong_table_of_cells_is_noticed(spoil: Callable[[Any], dict[str, Any]]) -> None:
    bins = module._make_bins(1000)
    assert not is_every_bin_found(replace(bins, **spoil(bins)))


class GivenWords(module._RandomBits):
    """Bits that are these words, one after the other."""

    def __init__(self, *words: int) -> None:
        self.words = list(words)

    def draw_words(self, count: int) -> NDArray[np.uint64]:
        drawn = [self.words.pop(0) for _ in range(count)]
        return np.array(drawn, dtype=np.uint64)


@pytest.mark.parametrize("equal", [1, 2])
@pytest.mark.parametrize("difference", [-1, 1])
@pytest.mark.parametrize("position", [0, 1, 100, 300, -1])
def test_bits_after_an_undecided_word_decide(position: int, difference: int, equal: int) -> None:
    """Words that equal a threshold's ask for another; near the end of a table several agree."""
    deviation = 1_995_230
    threshold = floor_thresholds(deviation, 320)[position]
    words = [threshold >> shift & 2**64 - 1 for shift in (256, 192, 128, 64, 0)]
    words[equal] = (words[equal] + difference) % 2**64
    number = sum(word << shift for word, shift in zip(words, (256, 192, 128, 64, 0), strict=True))
    found = module._find_bin(GivenWords(*words[1:]), deviation, words[0])
    assert found == bisect_right(floor_thresholds(deviation, 320), number)


def repeat_word(word: int) -> Callable[[Any, int], NDArray[np.uint64]]:
    return lambda bits, count: np.full(count, word, dtype=np.uint64)


def test_undecided_words_of_a_draw_are_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    """With words by hand, for chance finds one in 2^55."""
    threshold = module._compute_thresholds(1000, 64)[5]
    monkeypatch.setattr(module._RandomBits, "draw_words", repeat_word(threshold))
    monkeypatch.setattr(module, "_find_bin", lambda bits, deviation, word: 7)
    monkeypatch.setattr(module, "_toss_exp_fraction", lambda _, above, below: above >= 0)
    drawn = discrete_gaussian(KEY, deviation=1000, shape=(20,))
    width = 1 << module._choose_width_bits(1000)
    assert set(np.abs(drawn) // width) == {7}


@pytest.mark.parametrize("deviation", BINNED)
def test_the_coin_of_a_place_is_the_ratio_of_the_densities(
    deviation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """exp(-x^2 / 2 s^2) over its value at the bin's lower end; its exponent never reaches 1."""
    tossed: list[NDArray[np.int64]] = []

    def accept(bits: Any, numerator_n: NDArray[np.int64], denominator: int) -> NDArray[np.bool_]:
        assert denominator == 2 * deviation**2
        assert numerator_n.max() < denominator
        tossed.append(numerator_n)
        return np.ones(len(numerator_n), dtype=bool)

    monkeypatch.setattr(module, "_toss_exp_fraction", accept)
    magnitudes = np.abs(module._draw_in_bins(module._RandomBits(KEY), deviation, 5000))
    width = 1 << module._choose_width_bits(deviation)
    lower = magnitudes // width * width
    squares = magnitudes**2 - lower**2
    assert Counter(squares.tolist()) <= Counter(tossed[0].tolist())
    last_bin = largest_noise(deviation) // width * width
    assert (width - 1) * (2 * last_bin + width - 1) < 2 * deviation**2


PLANTED = 2**20
"""A deviation whose bins are as wide as any beside it: a sixteenth."""


def make_table(*, factor: float = 1.0, shift: float = 0.0) -> Callable[[int, int], tuple[int, ...]]:
    """Return a table of `factor` times the deviation, each bin weighed `shift` widths above it."""

    def compute_thresholds(deviation: int, precision: int) -> tuple[int, ...]:
        width = 1 << module._choose_width_bits(deviation)
        starts = np.arange(0, largest_noise(deviation) + 1, width) + shift * width
        sums = np.cumsum(np.exp(-(starts**2) / (2 * (factor * deviation) ** 2)))
        parts = sums[:-1] / sums[-1] * (1 - 2.0**-52)
        return tuple(int(part * 2.0**precision) for part in parts)

    return compute_thresholds


def skip_bin(deviation: int, precision: int) -> tuple[int, ...]:
    """Return a table in which bin 3 weighs nothing, and the one after it twice as much."""
    thresholds = list(TABLES[1](deviation, precision))
    thresholds[3] = thresholds[2]
    return tuple(thresholds)


def bins_fit(sample: NDArray[np.int64]) -> bool:
    """Test by chi-square how many magnitudes lie in each bin, the last beyond four deviations."""
    width = PLANTED // 16
    observed = np.bincount((np.abs(sample) // width).clip(max=64), minlength=65)
    edges = [math.erf((k * width - 0.5) / PLANTED / math.sqrt(2)) for k in range(1, 65)]
    share = np.diff([0.0, *edges, 1.0])
    return bool(chisquare(observed, share * sample.size).pvalue > RARE)


@pytest.mark.usefixtures("fresh_tables")
@pytest.mark.parametrize(
    ("table", "is_right"),
    [
        pytest.param(make_table(), True, id="the right one"),
        pytest.param(make_table(factor=1.01), False, id="of a slightly larger scale"),
        pytest.param(make_table(factor=2 / 3), False, id="of two thirds of the scale"),
        pytest.param(make_table(factor=3 / 2), False, id="of three halves of the scale"),
        pytest.param(make_table(shift=0.5), False, id="of the middles of bins"),
        pytest.param(make_table(shift=1), False, id="of the upper ends of bins"),
        pytest.param(skip_bin, False, id="without a bin"),
    ],
)
def test_noise_of_a_wrong_table_is_noticed(
    table: Callable[[int, int], tuple[int, ...]], is_right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_compute_thresholds", table)
    sample = discrete_gaussian(KEY, b"planted", deviation=PLANTED, shape=(1_000_000,))
    assert bins_fit(sample) == is_right

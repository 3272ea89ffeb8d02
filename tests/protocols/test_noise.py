"""The exact sampler: right scale accepted, wrong ones rejected, and its pieces one by one."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from apfed_protocols import noise as module
from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.noise import MAX_DEVIATION, TAIL, discrete_gaussian, largest_noise

pytest.importorskip("scipy")
from scipy.stats import chi2, chisquare

KEY = bytes(range(32))
RARE = 1e-5


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


@pytest.mark.parametrize("deviation", [1, 2, 3, 7])
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


def test_neighbouring_values_do_not_depend_on_each_other() -> None:
    sample = discrete_gaussian(KEY, b"pairs", deviation=1, shape=(100_000,)).clip(-2, 2)
    pairs = Counter(zip(sample[::2].tolist(), sample[1::2].tolist(), strict=True))
    share = np.bincount(sample + 2, minlength=5) / sample.size
    expected = [share[a + 2] * share[b + 2] * 50_000 for a in range(-2, 3) for b in range(-2, 3)]
    observed = [pairs[(a, b)] for a in range(-2, 3) for b in range(-2, 3)]
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    assert chi2.sf(statistic, df=16) > RARE


@pytest.mark.parametrize(("numerator", "denominator"), [(0, 1), (1, 3), (1, 1), (7, 3), (9, 1)])
def test_coins_of_exponentials_have_their_probability(numerator: int, denominator: int) -> None:
    bits = module._Bits(KEY)
    coins = module._exp_minus(bits, np.full(200_000, numerator, dtype=np.int64), denominator)
    chance = math.exp(-numerator / denominator)
    error = math.sqrt(chance * (1 - chance) / 200_000)
    assert abs(coins.mean() - chance) <= 5 * error


@pytest.mark.parametrize("bound", [1, 2, 3, 1000, 2**49 + 1])
def test_uniform_integers_reach_exactly_their_range(bound: int) -> None:
    drawn = module._Bits(KEY).draw_below(bound, 20_000)
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
    assert 0 < beyond < TAIL


def test_no_deviation_is_no_noise() -> None:
    assert largest_noise(0) == 0


def test_values_beyond_the_tail_are_never_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TAIL_DEVIATIONS", 1.5)
    assert np.abs(discrete_gaussian(KEY, b"cut", deviation=4, shape=(20_000,))).max() == 6


@pytest.mark.parametrize("deviation", [0, -1, MAX_DEVIATION + 1, 1.0, True, None, math.nan])
def test_other_deviations_are_refused(deviation: Any) -> None:
    with pytest.raises(LocalProtocolError, match="an integer from 1 to"):
        discrete_gaussian(KEY, deviation=deviation, shape=(2,))


def test_recorded_noise_is_drawn_again() -> None:
    """Vectors: another implementation of the sampler must find the same."""
    wide = discrete_gaussian(KEY, b"vector", deviation=1000, shape=(2, 4))
    narrow = discrete_gaussian(KEY, b"vector", deviation=2, shape=(12,))
    assert wide.tolist() == [[-968, 5, -417, 1832], [-379, -1170, -28, 1407]]
    assert narrow.tolist() == [1, 0, -3, -3, 1, 0, -3, 4, 1, 2, -2, 1]

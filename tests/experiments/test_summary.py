"""Means over seeds, their intervals and p-values, and what they share."""

import math

import pytest
from scipy.stats import ttest_1samp

from apfed_experiments.columns import P_HOLM
from apfed_experiments.summary import Interval, Summary, holm, shared_share
from secure_apfed.methods import METHODS
from secure_apfed.settings.data import DataSettings


def test_intervals_of_one_of_equal_and_of_several_values() -> None:
    assert math.isnan(Interval.of([0.5]).low)
    assert Interval.of([0.5, 0.5]) == Interval(0.5, 0.5, 0.5)
    # 4.303 is the .975 quantile for two degrees of freedom; the standard error is 1 / sqrt 3, and
    # where a quarter of the rows tests (Nadeau and Bengio 2003) sqrt(1 / 3 + 1 / 3).
    several = Interval.of([1.0, 2.0, 3.0])
    assert several.mean == 2.0
    assert several.high - 2.0 == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)
    split = Interval.of([1.0, 2.0, 3.0], shared=0.25)
    assert split.high - 2.0 == pytest.approx(4.3027 * math.sqrt(2 / 3), rel=1e-4)


def test_seeds_share_the_rows_that_are_split_again() -> None:
    for dataset, labelled, shared in (
        ("digits", 75, 0.25),  # Nadeau and Bengio's test / (test + train)
        ("tables", 75, 0.25),
        ("digits", 3, 0.01),
        ("mnist", 75, 0.0),  # its own test rows
    ):
        settings = DataSettings.model_construct(dataset=dataset)
        found = shared_share(settings, train=75, labelled=labelled, test=25)
        assert found == pytest.approx(shared)


def test_p_values_are_students_and_holms() -> None:
    values = [0.3, 0.1, -0.2, 0.4, 0.5]
    expected = ttest_1samp(values, 0.0).pvalue
    assert Interval.of(values).p_value(5) == pytest.approx(expected)
    assert Interval.of([0.1, 0.1]).p_value(2) == 0.0
    assert Interval.of([0.0, 0.0]).p_value(2) == 1.0
    gains = [Interval.of([value + shift for value in values]) for shift in (0.0, 0.3, 0.6, 0.25)]
    one, three, four, two = (gain.p_value(5) for gain in gains)
    assert holm([*gains, None, Interval.of([1.0])], 5) == pytest.approx(
        [max(one, 2 * two), 3 * three, 4 * four, max(2 * two, 3 * three), math.nan, math.nan],
        nan_ok=True,
    )
    assert tuple(map(P_HOLM.form, (math.nan, 0.0004, 0.034))) == ("", "< 0.001", "0.034")


def test_the_epsilon_of_a_line_is_that_of_what_its_method_sends() -> None:
    sent = dict.fromkeys(("apfed_r", "split_nn", "single_view"), 8.0)
    summed = dict.fromkeys(("votes", "split_nn_sum", "mmvfl", "h_fedmv", "vfedtrans"), 2.0)
    line = Summary(
        seeds=1, accuracies={"accuracy": Interval.of([0.5])}, epsilon_x=8.0, epsilon_y=math.inf,
        releases=1, wire_bytes=1.0, leakage={}, epsilon_passives=2.0,
    )  # fmt: skip
    for method, epsilon in {**sent, **summed}.items():
        assert line.epsilon_of(METHODS[method].declared) == epsilon

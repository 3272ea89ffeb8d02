import math

import pytest

from experiments.summary import Interval


def test_intervals_of_one_of_equal_and_of_several_values() -> None:
    assert math.isnan(Interval.of([0.5]).low)
    assert Interval.of([0.5, 0.5]) == Interval(0.5, 0.5, 0.5)
    several = Interval.of([0.1, 0.2, 0.3, 0.4])
    assert 0.1 <= several.low < several.mean < several.high <= 0.4
    assert several == Interval.of([0.1, 0.2, 0.3, 0.4])


def test_arms_reach_the_ends_and_one_seed_has_none() -> None:
    assert Interval(0.5, 0.4, 0.7).arms(100) == [[pytest.approx(10)], [pytest.approx(20)]]
    assert Interval(0.5, math.nan, math.nan).arms() == [[0.0], [0.0]]
    assert Interval(0.5, 0.5 + 1e-17, 0.5 - 1e-17).arms() == [[0.0], [0.0]]


def test_one_seed_has_a_mean_only() -> None:
    assert Interval.of([0.5]).text(scale=100) == "50.0"
    assert Interval(0.5, 0.4, 0.6).text(scale=100) == "50.0 [40.0, 60.0]"

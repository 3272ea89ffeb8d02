import math

import pytest

from experiments.summary import Interval, Summary
from secure_apfed.methods import METHODS


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


@pytest.mark.parametrize(
    ("method", "epsilon"),
    [("apfed_r", 8.0), ("split_nn", 8.0), ("single_view", 8.0), ("votes", 2.0),
     ("split_nn_sum", 2.0), ("mmvfl", 2.0), ("h_fedmv", 2.0), ("vfedtrans", 2.0)],
)  # fmt: skip
def test_the_epsilon_of_a_line_is_that_of_what_its_method_sends(
    method: str, epsilon: float
) -> None:
    line = Summary(
        seeds=1, accuracies={"accuracy": Interval.of([0.5])}, epsilon_x=8.0, epsilon_y=math.inf,
        releases=1, wire_bytes=1.0, leakage={}, epsilon_passives=2.0,
    )  # fmt: skip
    assert line.epsilon_of(METHODS[method].facts) == epsilon

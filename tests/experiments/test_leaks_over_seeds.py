import math

from experiments.intervals import Interval
from experiments.leaks.over_seeds import over_seeds
from experiments.leaks.sessions import Row


def test_numbers_become_means_and_what_was_run_stays() -> None:
    rows = [{"data": "d", "M": 2, "r2": 0.5, "n": 3}, {"data": "d", "M": 2, "r2": 0.7, "n": 3}]
    merged = over_seeds(rows, same=("data", "M"))
    assert (merged["data"], merged["M"]) == ("d", 2)
    assert math.isclose(merged["r2"].mean, 0.6)
    assert (merged["r2"].low, merged["r2"].high) == (0.5, 0.7)
    assert merged["n"] == Interval(3.0, 3.0, 3.0)


def test_texts_are_listed_once_and_what_a_seed_lacks_takes_no_part() -> None:
    rows: list[Row] = [{"best": "ridge", "r2": None}, {"best": "mlp", "r2": 0.5}, {"best": "ridge"}]
    merged = over_seeds(rows, same=())
    assert merged["best"] == "ridge / mlp"
    assert merged["r2"].mean == 0.5
    assert math.isnan(merged["r2"].low)


def test_a_number_that_no_seed_has_is_left_out() -> None:
    assert over_seeds([{"epsilon": None}, {"epsilon": None}], same=()) == {}


def test_one_seed_is_returned_as_it_is() -> None:
    assert over_seeds([{"a": 1.5, "b": "x"}], same=("b",)) == {"a": 1.5, "b": "x"}

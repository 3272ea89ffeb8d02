"""What tables show: no interval beyond what a figure can be, and no epsilon by a bare sign."""

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from apfed_experiments import gains, main_job
from apfed_experiments.columns import Column, make_percent_formatter, make_plain_table
from apfed_experiments.several import _format_interval
from apfed_experiments.summary import Interval, Leakage, clip_difference
from apfed_experiments.tables.table import PaperTable, _clip_limits
from apfed_experiments.tradeoff import _EPSILON_X_COLUMN
from secure_apfed.measures.table import MEASURES, Measure, Scored, list_measure_names

ENDS = re.compile(r"\[([^,]*), ([^\]]*)\]|(\S+) to (\S+)")
WIDE = Interval(0.98, -9.0, 9.0)


def ends_of(text: str) -> tuple[float, float]:
    found = ENDS.search(text)
    assert found is not None, text
    low, high = (float(end) for end in found.groups() if end is not None)
    return low, high


def leak_of(metric: str) -> Leakage:
    return Leakage(
        target="t",
        attack="a",
        metric=metric,
        advantage=WIDE,
        score=1.0,
        baseline=0.0,
        seeds_note="",
    )


def paper_table(unit: str) -> PaperTable:
    return PaperTable(
        name="t",
        source="",
        title="",
        unit=unit,
        reading_guide="",
        omission="",
        hours=0.0,
        make_extent=lambda full: pytest.fail("no line is asked for"),
    )


def write_limits(*, is_difference: bool) -> str:
    table = paper_table("test accuracy, per cent")
    low, high = _clip_limits((-130.0, 130.0), table, is_difference=is_difference)
    return f"{low} to {high}"


def column_of(name: str) -> Column:
    return next(column for column in main_job.COLUMNS if column.name == name)


def write_seeds(measure: Measure) -> str:
    return _format_interval(measure, WIDE)


def scale_of(measure: Measure) -> int:
    return 100 if measure.is_share else 1


# By table, how it writes an interval that is too wide, and the ends that it may show.
SHOWN: dict[str, tuple[Callable[[], str], float, float]] = {
    "accuracies of studies": (partial(make_percent_formatter(), WIDE), 0.0, 100.0),
    "accuracies of the main job": (partial(column_of("accuracy").format_value, WIDE), 0.0, 100.0),
    "gains of the main job": (partial(column_of("gain").format_value, WIDE), -100.0, 100.0),
    "labels read in the main job": (partial(column_of("labels").format_value, WIDE), -1.0, 1.0),
    "advantages in balanced accuracy": (
        leak_of("balanced_accuracy").clipped_advantage.format_text,
        -1.0,
        1.0,
    ),
    "advantages in AUC": (leak_of("auc").clipped_advantage.format_text, -1.0, 1.0),
    "gains in Gini": (clip_difference(WIDE, "gini").format_text, -2.0, 2.0),
    "papers' tables in per cent": (partial(write_limits, is_difference=False), 0.0, 100.0),
    "differences in papers' tables": (partial(write_limits, is_difference=True), -100.0, 100.0),
    **{
        f"several seeds, {measure.name}": (
            partial(write_seeds, measure),
            scale_of(measure) * measure.min_value,
            scale_of(measure) * measure.max_value,
        )
        for measure in MEASURES.values()
    },
}


@pytest.mark.parametrize("table", SHOWN)
def test_no_interval_passes_what_the_figure_can_be(table: str) -> None:
    write, least, most = SHOWN[table]
    low, high = ends_of(write())
    assert least <= low <= high <= most


def test_what_has_no_bounds_keeps_its_interval() -> None:
    assert leak_of("r2").clipped_advantage == WIDE
    assert clip_difference(WIDE, "a metric of somebody's") == WIDE
    assert Interval(0.5, math.nan, math.nan).clip_ends(0.0, 1.0).format_text() == "0.5"
    ends = (-3.0, 130.0)
    table = paper_table("points of accuracy")
    assert _clip_limits(ends, table, is_difference=False) == ends
    assert _clip_limits(ends, table, is_difference=True) == ends


def test_an_interval_within_its_bounds_stays_as_it_is() -> None:
    assert make_percent_formatter()(Interval(0.478, 0.399, 0.556)) == "47.8 [39.9, 55.6]"


def draw_scored_rows(task: str, draw: np.random.Generator) -> Scored:
    """Return rows that a model says something extreme, or anything, of."""
    if task == "regression":
        return Scored(truth=draw.normal(size=9), scores=100 * draw.normal(size=9))
    if task == "poisson":
        counts = draw.poisson(3.0, 9).astype(np.float64)
        return Scored(truth=counts, scores=100 * draw.exponential(size=9), are_counts=True)
    sure_BK = np.eye(2)[draw.integers(0, 2, 9)]
    truth = np.array([0, 1, *draw.integers(0, 2, 7)])
    return Scored.from_probabilities(truth, sure_BK)


@pytest.mark.parametrize("measure", MEASURES.values(), ids=lambda measure: measure.name)
def test_the_bounds_of_a_measure_hold(measure: Measure) -> None:
    draw = np.random.default_rng(3)
    for task in measure.tasks:
        assert measure.name in list_measure_names(task)
        values = [measure.compute_value(draw_scored_rows(task, draw)) for _ in range(20)]
        assert all(measure.min_value <= value <= measure.max_value for value in values)


EPSILON_COLUMNS: dict[str, Column] = {
    "main job": next(one for one in main_job.COLUMNS if one.name == "epsilon"),
    "gains": next(one for one in gains.COLUMNS if one.name == "epsilon"),
    "trade-off": _EPSILON_X_COLUMN,
}
WORDS = [(0.0, "nothing is sent"), (math.inf, "no guarantee"), (4.0, "4")]


@pytest.mark.parametrize("table", EPSILON_COLUMNS)
@pytest.mark.parametrize(("epsilon", "expected"), WORDS)
def test_an_epsilon_that_is_no_figure_is_said_in_words(
    table: str, epsilon: float, expected: str
) -> None:
    column = EPSILON_COLUMNS[table]
    assert column.format_cell({column.name: epsilon}) == expected


@pytest.mark.parametrize(
    ("value", "expected"), [*WORDS, (Interval(math.inf, math.inf, math.inf), "no guarantee")]
)
def test_tables_of_all_that_occurs_say_it_too(value: Any, expected: str) -> None:
    assert make_plain_table([{"epsilon": value}]).cells == [(expected,)]

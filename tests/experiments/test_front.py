"""The front of gain against features read."""

from dataclasses import replace
from pathlib import Path

import pytest

from apfed_experiments.front import (
    FrontRow,
    describe_dominated,
    describe_front,
    draw_front,
    find_dominating,
    find_front,
)
from apfed_experiments.summary import Interval


def line(name: str, gain: float, read: float) -> FrontRow:
    return FrontRow(
        name=name,
        gain=Interval(gain, gain - 0.01, gain + 0.01),
        leakage=Interval(read, read - 0.02, read + 0.02),
    )


LINES = [
    line("much, read much", 0.10, 0.30),
    line("some, read little", 0.05, 0.10),
    line("less, read more", 0.04, 0.20),
    line("nothing, read nothing", 0.0, 0.0),
    line("as much, read more", 0.05, 0.15),
]
BEATEN_BY = {
    "much, read much": None,
    "some, read little": None,
    "less, read more": "some, read little",
    "nothing, read nothing": None,
    "as much, read more": "some, read little",
}


@pytest.mark.parametrize("name", BEATEN_BY)
def test_a_line_is_dominated_by_more_gain_and_less_read(name: str) -> None:
    chosen = next(line for line in LINES if line.name == name)
    other = find_dominating(chosen, LINES)
    assert (other.name if other else None) == BEATEN_BY[name]


def test_equal_lines_do_not_dominate_each_other() -> None:
    equal = [line("one", 0.05, 0.1), line("another", 0.05, 0.1)]
    assert [find_dominating(each, equal) for each in equal] == [None, None]


@pytest.mark.parametrize("shows", [False, True])
def test_a_line_that_shows_labels_does_not_dominate_one_that_shows_none(shows: bool) -> None:
    better = replace(line("better", 0.06, 0.1), has_shown_labels=True)
    worse = replace(line("worse", 0.05, 0.2), has_shown_labels=shows)
    assert find_dominating(worse, [better, worse]) == (better if shows else None)


def test_of_two_equal_lines_the_one_that_shows_labels_is_dominated() -> None:
    silent = line("silent", 0.05, 0.1)
    shown = replace(silent, name="shown", has_shown_labels=True)
    assert [find_dominating(each, [silent, shown]) for each in (silent, shown)] == [None, silent]


def test_the_front_is_the_lines_that_nobody_dominates_least_read_first() -> None:
    front = find_front(
        LINES, get_leakage=lambda line: line.leakage.mean, get_gain=lambda line: line.gain.mean
    )
    assert [line.name for line in front] == [
        "nothing, read nothing",
        "some, read little",
        "much, read much",
    ]


def test_the_front_is_named_and_each_dominated_line_with_who_beats_it() -> None:
    told = describe_front(LINES)
    assert told.startswith(
        "On the front of gain against features read: nothing, read nothing (+0.0 points, R2 0.00); "
        "some, read little (+5.0 points, R2 0.10); much, read much (+10.0 points, R2 0.30)."
    )
    assert "less, read more is dominated by some, read little: +5.0 for +4.0 points" in told
    assert describe_front([]).startswith("No line has both")


def test_the_front_is_drawn(tmp_path: Path) -> None:
    picture = draw_front(tmp_path / "front.png", LINES, title="numerals")
    assert picture.path.read_bytes().startswith(b"\x89PNG")
    assert "dominated" in picture.caption


BETTER = line("better", 0.06, 0.1)
WORSE = line("worse", 0.05, 0.2)
OTHERS: dict[str, tuple[dict[str, list[FrontRow]], str]] = {
    "on all data sets": ({"a": [BETTER, WORSE], "b": [BETTER, WORSE]}, "worse (2 data sets)."),
    "on one of two": ({"a": [BETTER, WORSE], "b": [line("better", 0.0, 0.3), WORSE]}, "No line."),
    "measured on one alone": ({"a": [BETTER, WORSE], "b": [BETTER]}, "No line."),
    "no figures": ({"a": [], "b": []}, "No line."),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_line_is_named_where_it_is_dominated_on_every_data_set(name: str) -> None:
    fronts, sentence = OTHERS[name]
    assert describe_dominated(fronts) == sentence

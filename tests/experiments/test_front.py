"""The front of gain against features read."""

from pathlib import Path

import pytest

from apfed_experiments.front import (
    FrontLine,
    describe_front,
    draw_front,
    find_dominating,
    find_front,
)
from apfed_experiments.summary import Interval


def line(name: str, gain: float, read: float) -> FrontLine:
    return FrontLine(
        name=name,
        gain=Interval(gain, gain - 0.01, gain + 0.01),
        read=Interval(read, read - 0.02, read + 0.02),
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


def test_the_front_is_the_lines_that_nobody_dominates_least_read_first() -> None:
    front = find_front(LINES, read=lambda line: line.read.mean, worth=lambda line: line.gain.mean)
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

"""What pictures draw: no figure where there is none, and a name for everything in them."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from apfed_attacks.interface import AttackResult
from apfed_experiments.drawing import STYLE, Picture, draw_epsilons, draw_intervals, open_figure
from apfed_experiments.report import load_run, pictures
from apfed_experiments.report.page import _make_environment
from apfed_experiments.summary import Interval
from apfed_experiments.tradeoff import describe_protection
from secure_apfed.runs.outcome import Calibration
from tests.experiments.run_folder import config_of, make_attack_result, write_run


@pytest.fixture
def axes() -> Axes:
    found = Figure().subplots()
    assert isinstance(found, Axes)
    return found


def ticks_of(axes: Axes) -> dict[str, float]:
    labels = [label.get_text() for label in axes.get_xticklabels()]
    return dict(zip(labels, axes.get_xticks(), strict=True))


def test_infinity_has_a_tick_of_its_own_beyond_a_break(axes: Axes) -> None:
    places = draw_epsilons(
        axes, [8.0, math.inf, 0.0, 0.25], is_filled_by_row=[True, False, True, True], colour="red"
    )
    ticks = ticks_of(axes)
    assert places == [
        math.log10(8),
        ticks["\u221e, no\nguarantee"],
        ticks["nothing\nis sent"],
        math.log10(0.25),
    ]
    numbers = [place for label, place in ticks.items() if label[0].isdigit()]
    assert ticks["nothing\nis sent"] < min(numbers) < max(numbers) < places[1]
    assert [label for label in ticks if label[0].isdigit()] == ["0.1", "1", "10"]
    breaks = [text for text in axes.texts if text.get_text() == "//"]
    assert len(breaks) == 2
    low, high = axes.get_xlim()
    assert low < min(places) < max(places) < high


# Epsilons, and the ticks that they need; a scale stands only where a value lies on it.
SCALES: dict[str, tuple[list[float], int, int]] = {
    "none": ([], 0, 0),
    "endless": ([math.inf, math.inf], 0, 1),
    "nothing sent": ([0.0], 0, 1),
    "one power": ([1.0], 2, 0),
    "huge": ([1e6, math.inf], 2, 1),
}


@pytest.mark.parametrize("case", SCALES)
def test_ticks_are_of_what_there_is(case: str, axes: Axes) -> None:
    epsilons, numbers, words = SCALES[case]
    draw_epsilons(axes, epsilons, is_filled_by_row=[True] * len(epsilons), colour="red")
    ticks = ticks_of(axes)
    assert sum(label[0].isdigit() for label in ticks) == numbers
    assert len(ticks) == numbers + words
    assert len(axes.texts) == words


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        (Interval(0.98, 0.94, 1.02), [[4.0], [2.0]]),
        (Interval(0.02, -0.02, 0.06), [[2.0], [4.0]]),
        (Interval(0.5, 0.4, 0.6), [[10.0], [10.0]]),
        (Interval(1.0, 1.0, 1.0), [[0.0], [0.0]]),
        (Interval(0.9, math.nan, math.nan), [[0.0], [0.0]]),
    ],
)
def test_error_bars_of_a_share_end_where_shares_do(
    interval: Interval, expected: list[list[float]]
) -> None:
    below, above = interval.compute_error_bars(100, minimum=0.0, maximum=1.0)
    assert [below, above] == [pytest.approx(expected[0]), pytest.approx(expected[1])]


@pytest.mark.parametrize(("count", "style"), [(1, "None"), (2, "-")])
def test_a_single_point_is_no_line(count: int, style: str, axes: Axes) -> None:
    intervals = [Interval(0.9, 0.8, 1.1)] * count
    draw_intervals(
        axes,
        [1.0, 2.0][:count],
        intervals,
        scale=100,
        maximum=1.0,
        marker_and_line="o-",
        color="red",
    )
    line = axes.lines[0]
    assert line.get_linestyle() == style
    assert line.get_marker() == "o"
    assert axes.collections[0].get_datalim(axes.transData).y1 <= 100 + 1e-9


def run_of(folder: Path, accuracy: dict[str, float], epochs: dict[str, int]) -> Any:
    """Return a run each of whose variants was measured in the last so many epochs."""
    path = write_run(folder / "run", config_of("tvfl"), accuracy=accuracy)
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for at, row in enumerate(rows):
        kept = {name for name, count in epochs.items() if at >= len(rows) - count}
        row["accuracy"] = {name: row["accuracy"][name] for name in kept} or None
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_run(path)


def test_a_value_that_was_measured_once_is_no_curve(tmp_path: Path) -> None:
    run = run_of(tmp_path, {"tvfl": 0.9, "tvfl_0": 0.3}, {"tvfl": 1, "tvfl_0": 6})
    drawn = pictures._draw_learning(run)
    assert drawn is not None
    figure, caption = drawn
    assert [len(axes.lines) for axes in figure.axes] == [1, 1]
    assert all(np.size(line.get_xdata()) > 1 for axes in figure.axes for line in axes.lines)
    assert "Measured once, and so no curve: TVFL, all views." in caption


def test_without_any_curve_the_loss_stands_alone(tmp_path: Path) -> None:
    run = run_of(tmp_path, {"tvfl": 0.9}, {"tvfl": 1})
    drawn = pictures._draw_learning(run)
    assert drawn is not None
    assert len(drawn[0].axes) == 1


SHOW_PICTURE = '{% from "parts.html.jinja" import figure %}{{ figure(picture) }}'


# What ends a training, and what the caption says of the last point.
FINISHES: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, ""),
    "calibrated": (
        {"calibration": Calibration(rate=0.1, slope=2.0, offset=0.5)},
        "The last point is of the finished model, whose probabilities are calibrated.",
    ),
    "threshold": (
        {"threshold": 0.25},
        "The last point is of the finished model, which decides at 0.25.",
    ),
}


@pytest.mark.parametrize("case", FINISHES)
def test_a_caption_says_why_the_last_point_of_a_curve_leaps(case: str, tmp_path: Path) -> None:
    fields, expected = FINISHES[case]
    run = run_of(tmp_path, {"tvfl": 0.9}, {"tvfl": 6})
    outcome = run.outcome.model_copy(update=fields)
    drawn = pictures._draw_learning(replace(run, outcome=outcome))
    assert drawn is not None
    assert ("The last point" in drawn[1]) == bool(expected)
    assert expected in drawn[1]


def test_curves_stand_below_each_other_and_fit_a_phone(tmp_path: Path) -> None:
    run = run_of(tmp_path, {"tvfl": 0.9}, {"tvfl": 6})
    made = {one.title: one for one in pictures.write_pictures(run, tmp_path / "run" / "pictures")}
    drawn = pictures._draw_learning(run)
    assert drawn is not None
    boxes = [axes.get_position() for axes in drawn[0].axes]
    assert [round(box.x0, 6) for box in boxes] == [round(boxes[0].x0, 6)] * 2
    assert boxes[0].y0 > boxes[1].y1
    assert not made["Learning"].is_too_wide_for_phone


@pytest.mark.parametrize(("inches", "width", "is_broad"), [(4.6, 442, False), (12.0, 1152, True)])
def test_a_page_shows_a_picture_as_wide_as_its_letters_need(
    inches: float, width: int, is_broad: bool, tmp_path: Path
) -> None:
    path = tmp_path / "picture.png"
    with open_figure(path, (inches, 1.0)) as figure:
        figure.subplots()
    picture = Picture(path=path, title="A title", caption="What it shows.")
    assert (picture.width, picture.is_too_wide_for_phone) == (width, is_broad)
    page = _make_environment().from_string(SHOW_PICTURE).render(picture=picture)
    assert ('class="broad"' in page) == is_broad
    assert f'width="{width}"' in page


def test_attacks_are_drawn_with_their_variant() -> None:
    long = make_attack_result(
        0.1, adversary="passive-2", variant="a variant of a very long name " * 3
    )
    drawn = pictures._draw_attacks([make_attack_result(0.2, variant="h and x"), long])
    assert drawn is not None
    labels = list_measure_names(drawn[0].axes[0])
    assert labels[0].endswith("by passive-1, h and x")
    assert "by passive-2, a variant of a very" in labels[1]
    assert labels[1].endswith("...")


def list_measure_names(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts if "\n" in text.get_text()]


# Attacks whose picture must fit a phone, whatever they are called and however many they are.
ATTACKS: dict[str, list[AttackResult]] = {
    "one": [make_attack_result(0.2)],
    "many": [make_attack_result(advantage / 10) for advantage in range(12)],
    "of several measures": [
        make_attack_result(0.2),
        make_attack_result(
            0.1,
            metric="auc",
            score={"auc": 0.6},
            baselines={"guess": {"auc": 0.5}},
            baseline="guess",
        ),
    ],
    "a long variant": [make_attack_result(0.1, variant="a variant of a very long name " * 3)],
    "a long adversary": [make_attack_result(0.1, adversary="-".join(["organisation"] * 5))],
    "many adversaries": [make_attack_result(0.1, adversary=" and ".join(["organisation"] * 9))],
}


@pytest.mark.parametrize("case", ATTACKS)
def test_a_picture_of_attacks_fits_a_phone_with_all_names_in_it(case: str, tmp_path: Path) -> None:
    path = tmp_path / "attacks.png"
    with mpl.rc_context(STYLE):
        drawn = pictures._draw_attacks(ATTACKS[case])
        assert drawn is not None
        figure = drawn[0]
        figure.savefig(path)
        figure.draw_without_rendering()
    picture = Picture(path=path, title="Attacks", caption="What it shows.")
    assert not picture.is_too_wide_for_phone
    whole = figure.bbox
    names = [text for axes in figure.axes for text in axes.texts]
    boxes = [text.get_window_extent() for text in names]
    assert [box for box in boxes if not whole.x0 <= box.x0 < box.x1 <= whole.x1] == []
    pairs = itertools.combinations(boxes, 2)
    assert [(one, other) for one, other in pairs if one.overlaps(other)] == []


def test_the_curve_of_membership_names_attack_adversary_and_variant() -> None:
    result = make_attack_result(
        0.1,
        target="membership",
        attack="membership",
        adversary="outsider",
        variant="above models",
        score={"auc": 0.6},
        roc=((0.0, 0.0), (1.0, 1.0)),
    )
    assert pictures._name_curve(result) == "membership by outsider, above models, AUC 0.600"
    assert isinstance(result, AttackResult)


class _Point:
    config = config_of()


# Epsilons of a point, and what its line of the legend says.
LEGENDS = {
    "bounded": (8.0, 2.0, 6, "epsilon_x 8, 6 releases of a row; epsilon_y 2"),
    "endless": (math.inf, math.inf, 0, "epsilon_x no guarantee; epsilon_y no guarantee"),
    "nothing": (0.0, math.inf, 0, "epsilon_x nothing is sent; epsilon_y no guarantee"),
}


@pytest.mark.parametrize("case", LEGENDS)
def test_a_legend_names_each_of_its_figures(case: str) -> None:
    of_rows, of_labels, releases, expected = LEGENDS[case]
    row = {"epsilon": of_rows, "epsilon_y": of_labels, "releases": releases, "point": _Point()}
    assert describe_protection(row) == expected

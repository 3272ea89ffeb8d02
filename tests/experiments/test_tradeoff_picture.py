from itertools import combinations
from types import SimpleNamespace
from typing import cast

import pytest
from matplotlib.figure import Figure

from apfed_experiments.summary import Interval, Leakage, Row, Summary
from apfed_experiments.tradeoff import Board, DefencePoint, draw, row_of
from tests.secure_apfed.small_runs import small_config


def _entry(name: str, accuracy: float, advantage: float) -> Row:
    point = SimpleNamespace(
        defence=name,
        strength="strength 0.25",
        label=f"{name}, strength 0.25",
        reference=False,
        undefended=False,
        config=small_config(),
    )
    leak = Leakage(
        target="labels", attack="any", metric="auc", score=0.6, baseline=0.5, missing="",
        advantage=Interval(advantage, advantage - 0.02, advantage + 0.02),
    )  # fmt: skip
    summary = Summary(
        seeds=2, accuracies={"apfed_c": Interval(accuracy, accuracy - 0.03, accuracy + 0.03)},
        epsilon_x=8.0, epsilon_y=float("inf"), releases=20, wire_bytes=0.0,
        leakage={"labels": leak},
    )  # fmt: skip
    return row_of(cast(DefencePoint, point), summary, summary.accuracy)


@pytest.mark.parametrize("spread", [0.0, 0.001, 0.03], ids=["one spot", "a crowd", "apart"])
def test_numbers_of_points_do_not_overlap(spread: float) -> None:
    entries = [
        _entry(f"defence {k}", 0.6 + spread * (k % 3), 0.1 + spread * (k % 4)) for k in range(12)
    ]
    far = _entry("no utility", 0.2, 0.05)

    figure = Figure(layout="constrained")
    numbers = draw(figure, Board((*entries, far)), "labels")

    figure.draw_without_rendering()
    boxes = [one.get_window_extent() for one in numbers]
    assert [one.get_text() for one in numbers] == [str(k) for k in range(1, 14)]
    assert not [pair for pair in combinations(range(13), 2)
                if boxes[pair[0]].overlaps(boxes[pair[1]])]  # fmt: skip
    inside = figure.axes[0].get_window_extent()
    assert all(inside.contains(*box.min) and inside.contains(*box.max) for box in boxes)


def test_the_legend_says_which_point_each_number_is_and_its_epsilons() -> None:
    figure = Figure(layout="constrained")
    draw(figure, Board((_entry("noise", 0.6, 0.1), _entry("none", 0.7, 0.2))), "labels")

    told = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "1  noise, strength 0.25 (8, ∞, 20)" in told
    assert "2  none, strength 0.25 (8, ∞, 20)" in told
    width = figure.get_window_extent().width
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= width

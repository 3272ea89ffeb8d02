from itertools import combinations
from types import SimpleNamespace
from typing import cast

from matplotlib.figure import Figure

from apfed_experiments.summary import Interval, Leakage, Row, Summary
from apfed_experiments.tradeoff import Board, DefencePoint, draw, row_of
from tests.secure_apfed.small_runs import small_config


def _entry(name: str, accuracy: float, advantage: float) -> Row:
    point = SimpleNamespace(
        defence=name, strength="0.25", label=f"{name}, 0.25", reference=False, undefended=False,
        config=small_config(),
    )  # fmt: skip
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


def test_numbers_of_points_do_not_overlap_and_the_legend_says_which_each_is() -> None:
    """Some in one spot, some in a crowd, some apart, and one far away."""
    entries = [
        _entry(f"defence {k}", 0.6 + spread * (k % 3), 0.1 + spread * (k % 4))
        for spread in (0.0, 0.001, 0.03) for k in range(4)
    ]  # fmt: skip
    figure = Figure(layout="constrained")
    numbers = draw(figure, Board((*entries, _entry("no utility", 0.2, 0.05))), "labels")
    figure.draw_without_rendering()
    boxes = [number.get_window_extent() for number in numbers]
    assert [number.get_text() for number in numbers] == [str(k) for k in range(1, 14)]
    assert not [pair for pair in combinations(boxes, 2) if pair[0].overlaps(pair[1])]
    inside = figure.axes[0].get_window_extent()
    assert all(inside.contains(*box.min) and inside.contains(*box.max) for box in boxes)
    told = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "13  no utility, 0.25 (8, ∞, 20)" in told
    box = figure.legends[0].get_window_extent()
    assert 0 <= box.x0 <= box.x1 <= figure.get_window_extent().width

"""The picture of a trade-off of one's own loop: what it draws, what it refuses, what it leaves."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from apfed_attacks.foreign import Evaluation, Finding
from apfed_attacks.interface import AttackResult
from apfed_experiments import tradeoff_figure
from secure_apfed.errors import DataError
from tests.docs.pages import program_of

OPEN: dict[str, Any] = {"label": "open", "accuracy": 0.9, "attack": 0.3}
NOISY: dict[str, Any] = {"label": "noisy", "accuracy": [0.8, 0.7], "epsilon": 8, "attack": [0.1, 0]}


@pytest.fixture(autouse=True)
def _numbers_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the search for room for the numbers, which takes most of the time."""
    monkeypatch.setattr("apfed_experiments.tradeoff.adjust_text", lambda *_, **__: None)


def make_finding(advantage: float, *, attack: str = "norm", target: str = "labels") -> Finding:
    result: Any = SimpleNamespace(
        attack=attack,
        target=target,
        setting=attack,
        metric="r2",
        score={"r2": 1.0},
        advantage=advantage,
        variant="x",
        role="passive",
        counts={"known": 0, "scored": 9},
        baselines={"none": {"r2": 0.0}},
    )
    results: tuple[AttackResult, ...] = (result, result)
    return Finding(results)


def legend_of(figure: Figure) -> list[str]:
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def advantages_in(figure: Figure) -> list[float]:
    (axes,) = figure.axes
    return [float(text.get_position()[0]) for text in axes.texts]


@pytest.mark.parametrize("epsilon", [math.inf, None, np.float64("inf")])
def test_a_point_without_a_bound_says_no_guarantee(epsilon: Any) -> None:
    figure = tradeoff_figure([{**OPEN, "epsilon": epsilon}, OPEN | {"label": "b"}, NOISY])
    said = legend_of(figure)
    expected = ("1  open (no guarantee)", "2  b (no guarantee)", "3  noisy (epsilon 8)")
    assert [words for words in expected if words not in said] == []
    assert advantages_in(figure) == [0.3, 0.3, 0.05]


def test_nothing_of_the_process_changes() -> None:
    import matplotlib.pyplot as plt

    before = dict(mpl.rcParams)
    figures = plt.get_fignums()
    drawn = torch.get_rng_state()
    figure = tradeoff_figure([OPEN, NOISY], title="My loop")
    assert isinstance(figure, Figure)
    assert figure.axes[0].get_title("left") == "My loop"
    assert (dict(mpl.rcParams), plt.get_fignums()) == (before, figures)
    assert torch.equal(torch.get_rng_state(), drawn)


def test_of_evaluations_the_attack_of_the_highest_mean_is_drawn() -> None:
    seeds = [
        Evaluation((make_finding(0.5, attack="a"), make_finding(0.3, attack="b")), {}),
        Evaluation((make_finding(0.0, attack="a"), make_finding(0.4, attack="b")), {}),
    ]
    figure = tradeoff_figure([{**OPEN, "attack": seeds}])
    assert advantages_in(figure) == pytest.approx([0.35])
    assert figure.axes[0].get_title("left") == "Accuracy against leakage: labels"


def test_a_target_is_asked_for_where_evaluations_have_two() -> None:
    both = Evaluation((make_finding(0.5), make_finding(0.2, target="features")), {})
    point = {**OPEN, "attack": both}
    with pytest.raises(DataError, match="attacked features, labels; say which one is drawn"):
        tradeoff_figure([point])
    assert advantages_in(tradeoff_figure([point], target="features")) == pytest.approx([0.2])
    nothing = Evaluation((), {"norm": "needs h"})
    with pytest.raises(DataError, match=r"'open': no attack on labels was mounted \(norm: needs h"):
        tradeoff_figure([{**OPEN, "attack": nothing}], target="labels")


@pytest.mark.parametrize(
    ("points", "says"),
    [
        ([], "points: expected a list of mappings"),
        (OPEN, "points: expected a list of mappings"),
        (["open"], "point 1: expected a mapping such as"),
        ([OPEN, {"label": "x"}], "point 2: lacks accuracy, attack"),
        ([{**OPEN, "epsilons": 1}], "point 1: keys are .* got epsilons"),
        ([{**OPEN, "accuracy": 90}], "'open': accuracy: expected a number from 0 to 1, got 90"),
        ([{**OPEN, "accuracy": []}], "'open': accuracy: expected a number"),
        ([{**OPEN, "accuracy": True}], "'open': accuracy: expected a number"),
        ([{**OPEN, "accuracy": math.nan}], "'open': accuracy: expected a number"),
        ([{**OPEN, "epsilon": -1}], "'open': epsilon: expected a number from 0 to inf"),
        ([{**OPEN, "epsilon": "8"}], "'open': epsilon: expected a number"),
        ([{**OPEN, "attack": math.nan}], "'open': attack: expected a number"),
        ([{**OPEN, "attack": None}], "'open': attack: expected a number"),
        ([{**OPEN, "attack": [0.1, "x"]}], "'open': attack: expected a number, got 'x'"),
    ],
)
def test_points_that_cannot_be_drawn_are_named(points: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        tradeoff_figure(points)


def test_the_printed_example_draws_its_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    example = program_of("docs/add-an-attack.md", tmp_path, at=2)
    assert "1  no defence (no guarantee)" in legend_of(example.figure)
    assert (tmp_path / "tradeoff.png").stat().st_size > 1000

"""Who helped: the arithmetic against brute force, what may be asked, and small studies."""

import json
import math
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from apfed_experiments import study
from apfed_experiments.who_helped import (
    Coalition,
    CoalitionRun,
    Game,
    held_back,
    measure,
    measure_passives,
    players_of,
    with_noise,
)
from secure_apfed.cli import execute
from secure_apfed.config import Config
from secure_apfed.data import load_data
from secure_apfed.errors import ConfigError
from secure_apfed.settings.privacy import LabelSettings
from tests.experiments.run_folder import APFED, on_few_labels, own_tables

NAMES = ("a", "b", "c", "d")


def drawn_worth(names: tuple[str, ...] = NAMES) -> dict[Coalition, float]:
    draw = np.random.default_rng(3)
    sizes = range(len(names) + 1)
    return {frozenset(one): draw.normal() for size in sizes for one in combinations(names, size)}


def config_of(**changes: Any) -> Config:
    sums = {"scheme": "plain", "masks": "pairwise", "allow_single_passive": True}
    return on_few_labels(**{"secure_sum": sums, **changes})


def coalition(folder: Path, *names: str, **settings: Any) -> CoalitionRun:
    config = config_of(**settings)
    of = frozenset(names)
    return CoalitionRun(config=config, folder=folder, coalition=of, seed=0, share=0.4, data="")


def test_shapley_values_are_those_of_the_formula() -> None:
    worth, game = drawn_worth(), Game.of(NAMES, minimum=1, seed=0)
    values = game.shapley(worth).mean(0)
    for name, value in zip(NAMES, values, strict=True):
        rest = [one for one in NAMES if one != name]
        expected = sum(
            (worth[frozenset(one) | {name}] - worth[frozenset(one)])
            / (len(NAMES) * math.comb(len(rest), len(one)))
            for size in range(len(NAMES)) for one in combinations(rest, size)
        )  # fmt: skip
        assert value == pytest.approx(expected)
    assert set(game.coalitions) == set(worth)
    assert game.never_asked == ()


@pytest.mark.parametrize(("minimum", "drawn"), [(1, None), (2, None), (3, None), (1, 5), (2, 5)])
def test_values_add_up_to_the_gain_and_ask_nothing_that_is_forbidden(
    minimum: int, drawn: int | None
) -> None:
    game = Game.of(NAMES, minimum=minimum, seed=1, drawn=drawn)
    worth = {one: value for one, value in drawn_worth().items() if one in game.coalitions}
    assert all(not one or len(one) >= minimum for one in worth)
    assert not set(worth) & set(game.never_asked)
    for added in game.shapley(worth):
        assert added.sum() == pytest.approx(game.gain(worth))
    assert game.exact is (drawn is None)


def test_who_enters_together_shares_equally() -> None:
    game = Game.of(("a", "b", "c"), minimum=2, seed=0)
    worth = {frozenset(): 0.0, frozenset("ab"): 6.0, frozenset("ac"): 2.0, frozenset("bc"): 4.0,
             frozenset("abc"): 9.0}  # fmt: skip
    by_hand = [(3 + 1 + 5) / 3, (3 + 2 + 7) / 3, (1 + 2 + 3) / 3]
    assert game.shapley(worth).mean(0) == pytest.approx(by_hand)
    assert game.leave_one_out(worth) == {"a": 5.0, "b": 7.0, "c": 3.0}
    assert {frozenset("a"), frozenset("b"), frozenset("c")} == set(game.never_asked)
    names = tuple("abcdefgh")
    game = Game.of(names, minimum=8, seed=0)
    worth = {frozenset[str](): 0.0, frozenset(names): 8.0}
    assert set(game.coalitions) == set(worth)
    assert set(game.leave_one_out(worth).values()) == {None}


def test_drawn_orders_come_near_all_orders() -> None:
    worth = drawn_worth()
    exact = Game.of(NAMES, minimum=1, seed=0).shapley(worth).mean(0)
    drawn = Game.of(NAMES, minimum=1, seed=0, drawn=3000).shapley(worth)
    error = drawn.std(0) / math.sqrt(len(drawn))
    assert (abs(drawn.mean(0) - exact) < 4 * error).all()


def test_what_a_contract_allows() -> None:
    noisy = {
        "method": {"name": "votes", "epsilon": 4.0},
        "secure_sum": {"scheme": "plain", "masks": "pairwise"},
    }
    recoverable = {**noisy, "secure_sum": {"scheme": "plain", "masks": "recoverable"}}
    randomised = {**noisy, "method": {"name": "votes_randomised", "epsilon": 4.0}}
    for changes, count, least in (
        ({}, 3, 1), (noisy, 3, 2), ({**noisy, "colluders": 2}, 4, 3), (randomised, 3, 1),
        (recoverable, 6, 5), (APFED, 3, 2),
    ):  # fmt: skip
        names = [f"passive-{at}" for at in range(1, count + 1)]
        assert players_of(config_of(**changes), "active", names) == (tuple(names), least)
    config = config_of(**{**APFED, "passives": {"passive-2": {"weight": 0.0}}})
    names = [f"passive-{at}" for at in range(1, 5)]
    assert players_of(config, "active", names)[0] == ("passive-1", "passive-3", "passive-4")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"secure_sum": {"scheme": "plain", "masks": "pairwise"}}, "open its votes"),
        ({**APFED, "data": {"dataset": "digits", "views": 3}}, "nobody can be told apart"),
        ({"method": "single_view"}, "method single_view: contributions are of"),
        ({"data": {"dataset": "digits", "views": 4, "labelled": 12}}, "12 labelled rows of 10"),
    ],
)  # fmt: skip
def test_what_cannot_be_told_apart_is_refused(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=says):
        measure_passives(config_of(**changes), tmp_path, seeds=[0])


def test_rows_held_back_are_learnt_nothing_from_and_noise_replaces_one_passive_alone() -> None:
    data = load_data(config_of().data, seed=0)
    split = held_back(data, 0.5, seed=0)
    assert len(split.test_rows) == len(split.labelled_rows) == 30
    held = set(split.test_rows.tolist())
    assert not held & set(split.train_rows.tolist())
    assert held | set(split.labelled_rows.tolist()) == set(data.labelled_rows.tolist())
    assert torch.equal(split.test_rows, held_back(data, 0.5, seed=0).test_rows)
    noisy = with_noise(data, ("passive-2",), seed=0)
    same = [
        torch.equal(before.features, after.features)
        for before, after in zip(data.passives, noisy.passives, strict=True)
    ]
    assert same == [True, False, True]
    with pytest.raises(ConfigError, match="no passive is called nobody"):
        with_noise(data, ("nobody",), seed=0)


def test_a_passive_with_noise_comes_last_and_values_add_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command; two seeds, of ten in docs/studies.md."""
    config = Path(study.__file__).parent / "configs/contributions-digits.yaml"
    arguments = ["contributions", str(config), "--output", str(tmp_path), "--json", "--seeds", "2",
                 "--jobs", "1", "--held-back", "0.6667", "--noise", "passive-2", "--set",
                 "method.prior=labeller"]  # fmt: skip
    assert execute(arguments) == 0
    told = json.loads(capsys.readouterr().out)
    assert {of["name"] for of in told["passives"]} == {f"passive-{at}" for at in (1, 2, 3)}
    last = told["passives"][-1]
    assert (last["name"], last["least"], told["runs"]) == ("passive-2", 2, 8)
    assert told["worst_gap"] < 1e-12
    total = sum(of["shapley"]["loss"]["mean"] for of in told["passives"])
    assert 0 < total == pytest.approx(told["gain"]["loss"]["mean"])
    assert told["wire_bytes"] > 0
    assert {of["epsilon"] for of in told["passives"]} == {"inf"}
    stored = json.loads((tmp_path / "contributions.json").read_text())
    assert stored.items() <= told.items()
    assert {"index.html", "contributions.md"} < {path.name for path in tmp_path.iterdir()}
    assert execute([*arguments, "--set", "secure_sum.allow_single_passive=false"]) == 2
    assert "open its votes" in capsys.readouterr().out


def test_charges_of_all_coalitions_are_added_up(tmp_path: Path) -> None:
    config = config_of(
        method={"name": "votes", "prior": "labeller", "epsilon": 4.0},
        secure_sum={"scheme": "plain", "masks": "pairwise"},
    )
    board = measure_passives(config, tmp_path, seeds=[0])
    assert board.found["runs"] == 5  # nobody, three pairs, all
    # Each passive is in two pairs and in all three.
    for row in board.table.rows[:-1]:
        assert 3 * 3.9 < row["epsilon"] <= 3 * 4.0
    assert any("Not asked, since sums need 2 passives: passive-1; " in one for one in board.notes)
    assert len(list((tmp_path / "coalitions").glob("*.json"))) == 5
    assert measure_passives(config, tmp_path, seeds=[0]).as_json() == board.as_json()
    assert all(math.isnan(row["shapley"]["loss"].low) for row in board.table.rows)
    private = {"labels": LabelSettings(mechanism="randomised_response", epsilon=1.0)}
    notes = replace(board, config=config.model_copy(update=private)).notes
    (told,) = (note for note in notes if note not in board.notes)
    assert told.startswith("Worth compares with true labels that the active holds back")
    drawn = measure_passives(config, tmp_path, seeds=[0], drawn=4)
    values = [row["shapley"]["loss"] for row in drawn.table.rows[:-1]]
    assert all(value.low <= value.mean for value in values)


RECOVERABLE = {"scheme": "plain", "masks": "recoverable", "clip": 1.0, "threshold": 3}


@pytest.mark.parametrize("changes", [
    {"train": {"patience": 1, "keep_best": True}},
    {"secure_sum": {"clip": 1.0, "noise": {"epsilon": 4.0}}},
    # A threshold of all is one of each coalition.
    {"train": {"patience": 1, "keep_best": True}, "secure_sum": RECOVERABLE},
])  # fmt: skip
def test_the_active_alone_is_worth_something_whatever_protects_sums(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    settings = {**APFED, **{key: {**APFED[key], **of} for key, of in changes.items()}}
    nobody = coalition(tmp_path, **settings)
    alone = measure(nobody)
    assert (alone.wire_bytes, alone.epsilon_x) == (0, 0)
    assert 0 < alone.loss < 3
    assert measure(replace(nobody, coalition=frozenset({"passive-1", "passive-2"}))).wire_bytes


def test_figures_of_files_that_were_edited_are_measured_again(tmp_path: Path) -> None:
    sums = {"scheme": "plain", "clip": None, "allow_single_passive": True}
    config = config_of(**{**APFED, "data": own_tables(tmp_path), "secure_sum": sums})
    before = measure_passives(config, tmp_path / "study", seeds=[0], share=0.5)
    kept = set((tmp_path / "study/coalitions").iterdir())
    trial = study.Point(config=config, folder=tmp_path).trial(0)
    settings = trial.settings
    own = pd.read_csv(tmp_path / "shop.csv")
    own.assign(c=-own["c"].sample(frac=1, random_state=0).to_numpy()).to_csv(
        tmp_path / "shop.csv", index=False
    )
    again = measure_passives(config, tmp_path / "study", seeds=[0], share=0.5)
    assert before.found["gain"] != again.found["gain"]
    assert len(set((tmp_path / "study/coalitions").iterdir())) == 2 * len(kept)
    assert trial.settings != settings


def test_a_training_that_diverged_is_refused(tmp_path: Path) -> None:
    diverging = {**APFED, "train": {**APFED["train"], "learning_rate": 1e30}}
    with pytest.raises(ConfigError, match="with nobody under seed 0 diverged"):
        measure(coalition(tmp_path, **diverging))

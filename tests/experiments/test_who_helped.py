"""Who helped: the arithmetic against brute force, what may be asked, and small studies."""

import json
import math
from dataclasses import replace
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from apfed_experiments import study
from apfed_experiments.solo import keep_solo
from apfed_experiments.study import base_config
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
from secure_apfed.errors import ApfedError, CheckpointError, ConfigError
from secure_apfed.settings.privacy import LabelSettings
from tests.experiments.own_tables import own_tables

NAMES = ("a", "b", "c", "d")


def drawn_worth(names: tuple[str, ...] = NAMES) -> dict[Coalition, float]:
    draw = np.random.default_rng(3)
    sizes = range(len(names) + 1)
    return {frozenset(one): draw.normal() for size in sizes for one in combinations(names, size)}


def config_of(**changes: Any) -> Config:
    settings = {
        "name": "who-helped",
        "method": {"name": "votes", "prior": "labeller"},
        "data": {"dataset": "digits", "views": 4, "labelled": 60, "limit": 300},
        "model": {"network": "random_features"},
        "train": {"epochs": 1},
        "guard": {"mechanism": "none", "noise": "reproducible_insecure"},
        "secure_sum": {"scheme": "plain", "masks": "pairwise", "allow_single_passive": True},
        "transcript": {"keep": "none"},
    }
    return Config.model_validate({**settings, **changes})


APFED = {
    "method": "apfed_c",
    "model": {"hidden": [16], "representation": 8, "projection": 8, "dropout": 0.0},
    "train": {"epochs": 2, "batch_size": 64, "learning_rate": 0.05},
    "secure_sum": {"scheme": "plain", "clip": None},
}


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


def test_leaving_one_of_too_few_out_is_not_asked() -> None:
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
    assert len(set(map(tuple, drawn))) <= len(list(permutations(NAMES)))


def test_what_a_contract_allows() -> None:
    def minimum(changes: dict[str, Any], *, count: int = 3) -> int:
        names = [f"passive-{at}" for at in range(1, count + 1)]
        return players_of(config_of(**changes), "active", names)[1]

    noisy = {
        "method": {"name": "votes", "epsilon": 4.0},
        "secure_sum": {"scheme": "plain", "masks": "pairwise"},
    }
    colluding = {**noisy, "colluders": 2}
    recoverable = {**noisy, "secure_sum": {"scheme": "plain", "masks": "recoverable"}}
    assert minimum({}) == 1
    assert minimum(noisy) == 2
    assert minimum(colluding, count=4) == 3
    assert minimum({**noisy, "method": {"name": "votes_randomised", "epsilon": 4.0}}) == 1
    assert minimum(recoverable, count=6) == 5
    assert minimum(APFED) == 2


def test_passives_without_weight_do_not_play() -> None:
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


def test_rows_held_back_have_a_label_and_are_learnt_nothing_from() -> None:
    data = load_data(config_of().data, seed=0)
    split = held_back(data, 0.5, seed=0)
    assert len(split.test_rows) == len(split.labelled_rows) == 30
    assert not set(split.test_rows.tolist()) & set(split.train_rows.tolist())
    assert not set(split.test_rows.tolist()) & set(data.test_rows.tolist())
    together = torch.cat([split.test_rows, split.labelled_rows]).sort().values
    assert torch.equal(together, data.labelled_rows.sort().values)
    assert torch.equal(split.test_rows, held_back(data, 0.5, seed=0).test_rows)


def test_noise_replaces_one_passive_alone() -> None:
    data = load_data(config_of().data, seed=0)
    noisy = with_noise(data, ("passive-2",), seed=0)
    first, second, third = zip(data.passives, noisy.passives, strict=True)
    assert torch.equal(first[0].features, first[1].features)
    assert torch.equal(third[0].features, third[1].features)
    assert not torch.equal(second[0].features, second[1].features)
    with pytest.raises(ConfigError, match="no passive is called nobody"):
        with_noise(data, ("nobody",), seed=0)


def test_a_passive_with_noise_comes_last_and_values_add_up(tmp_path: Path) -> None:
    """Two seeds; ten are in docs/studies.md."""
    config = base_config("contributions-digits")
    config = config.model_copy(update={"method": config_of().method})
    board = measure_passives(config, tmp_path, seeds=[0, 1], share=2 / 3, noise=["passive-2"])
    *rows, _total = board.table.rows
    assert rows[-1]["name"] == "passive-2"
    assert rows[-1]["least"] == 2
    assert board.worst_gap < 1e-12
    total = sum(row["shapley"]["loss"].mean for row in rows)
    assert total == pytest.approx(board.gain["loss"].mean)
    assert board.gain["loss"].mean > 0
    assert board.runs == 8
    assert board.wire_bytes is not None
    assert board.wire_bytes > 0
    assert all(math.isinf(row["epsilon"]) for row in rows)
    stored = json.loads((tmp_path / "contributions.json").read_text())
    assert [one["name"] for one in stored["passives"]] == [row["name"] for row in rows]
    for name in ("index.html", "contributions.md", "contributions.png"):
        assert (tmp_path / name).stat().st_size > 100
    private = {"labels": LabelSettings(mechanism="randomised_response", epsilon=1.0)}
    notes = replace(board, config=config.model_copy(update=private)).notes
    (told,) = (note for note in notes if note not in board.notes)
    assert told.startswith("Worth compares with true labels that the active holds back")


def test_charges_of_all_coalitions_are_added_up(tmp_path: Path) -> None:
    config = config_of(
        method={"name": "votes", "prior": "labeller", "epsilon": 4.0},
        secure_sum={"scheme": "plain", "masks": "pairwise"},
    )
    board = measure_passives(config, tmp_path, seeds=[0])
    assert board.runs == 5  # nobody, three pairs, all
    # Each passive is in two pairs and in all three.
    for row in board.table.rows[:-1]:
        assert 3 * 3.9 < row["epsilon"] <= 3 * 4.0
    assert any("Not asked, since sums need 2 passives: passive-1; " in one for one in board.notes)
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "coalitions").glob("*.json")}
    assert len(files) == 5
    again = measure_passives(config, tmp_path, seeds=[0])
    assert again.as_json() == board.as_json()
    assert files == {path: path.stat().st_mtime_ns for path in files}


def test_a_simulated_coalition_is_worth_what_its_parties_reach(tmp_path: Path) -> None:
    coalition = frozenset({"passive-1", "passive-3"})
    one = CoalitionRun(config=config_of(**APFED), folder=tmp_path, coalition=coalition, seed=0,
                       share=0.5, data="")  # fmt: skip
    simulated, played = measure(one), measure(replace(one, simulated=False))
    assert simulated.wire_bytes is None
    assert played.wire_bytes
    assert (simulated.loss, simulated.accuracy) == (played.loss, played.accuracy)
    assert dict(simulated.passives) == dict.fromkeys(sorted(coalition), math.inf)


@pytest.mark.parametrize("changes", [
    {"train": {"patience": 1, "keep_best": True}},
    {"secure_sum": {"clip": 1.0, "noise": {"epsilon": 4.0}}},
])  # fmt: skip
def test_the_active_alone_is_worth_something_whatever_protects_sums(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    usual: dict[str, Any] = APFED
    settings = {**usual, **{key: {**usual[key], **one} for key, one in changes.items()}}
    nobody = CoalitionRun(config=config_of(**settings), folder=tmp_path, coalition=frozenset(),
                          seed=0, share=0.3, data="")  # fmt: skip
    alone = measure(nobody)
    assert (alone.wire_bytes, alone.epsilon_x) == (0, 0)
    assert 0 < alone.loss < 3
    pair = frozenset({"passive-1", "passive-2"})
    played = measure(replace(nobody, coalition=pair))
    assert played.wire_bytes


def test_of_all_orders_one_seed_has_no_interval(tmp_path: Path) -> None:
    exact = measure_passives(config_of(), tmp_path, seeds=[0], share=2 / 3)
    assert all(math.isnan(row["shapley"]["loss"].low) for row in exact.table.rows)
    drawn = measure_passives(config_of(), tmp_path, seeds=[0], share=2 / 3, drawn=4)
    values = [row["shapley"]["loss"] for row in drawn.table.rows[:-1]]
    assert all(value.low <= value.mean for value in values)


def test_figures_of_files_that_were_edited_are_measured_again(tmp_path: Path) -> None:
    sums = {"scheme": "plain", "clip": None, "allow_single_passive": True}
    config = config_of(**{**APFED, "data": own_tables(tmp_path), "secure_sum": sums})
    before = measure_passives(config, tmp_path / "study", seeds=[0], share=0.5)
    kept = set((tmp_path / "study/coalitions").iterdir())
    point = study.Point(config=config, folder=tmp_path)
    settings = point.trial(0).settings
    own = pd.read_csv(tmp_path / "shop.csv")
    own.assign(c=-own["c"].sample(frac=1, random_state=0).to_numpy()).to_csv(
        tmp_path / "shop.csv", index=False
    )
    again = measure_passives(config, tmp_path / "study", seeds=[0], share=0.5)
    assert before.gain["loss"].mean != again.gain["loss"].mean
    assert len(set((tmp_path / "study/coalitions").iterdir())) == 2 * len(kept)
    assert point.trial(0).settings != settings


def test_baselines_are_of_the_actives_own_table(tmp_path: Path) -> None:
    config = config_of(**{**APFED, "data": own_tables(tmp_path)})
    kept = keep_solo(config, tmp_path / "solo.json")
    (tmp_path / "shop.csv").write_text("id,c\np1,1\n")
    assert keep_solo(config, tmp_path / "solo.json") == kept
    own = pd.read_csv(tmp_path / "active.csv")
    own.assign(a=own["a"] + 1).to_csv(tmp_path / "active.csv", index=False)
    with pytest.raises(CheckpointError, match="a table that was edited since"):
        keep_solo(config, tmp_path / "solo.json")


def test_a_threshold_of_all_is_one_of_each_coalition(tmp_path: Path) -> None:
    sums = {"scheme": "plain", "masks": "recoverable", "clip": 1.0, "threshold": 4}
    data = {"dataset": "digits", "views": 5, "labelled": 60, "limit": 200}
    config = config_of(**{**APFED, "secure_sum": sums, "data": data})
    pair = CoalitionRun(
        config=config, folder=tmp_path, coalition=frozenset({"passive-1", "passive-2"}), seed=0,
        share=0.3, data="", simulated=False,
    )  # fmt: skip
    assert measure(pair).wire_bytes


def test_a_training_that_diverged_tells_nobody_apart(tmp_path: Path) -> None:
    usual: dict[str, Any] = APFED
    config = config_of(**{**usual, "train": {**usual["train"], "learning_rate": 1e30}})
    one = CoalitionRun(config=config, folder=tmp_path, coalition=frozenset(), seed=0, share=0.3,
                       data="")  # fmt: skip
    with pytest.raises(ConfigError, match="with nobody under seed 0 diverged"):
        measure(one)


def test_figures_of_another_run_are_refused(tmp_path: Path) -> None:
    one = CoalitionRun(config=config_of(**APFED), folder=tmp_path, coalition=frozenset(), seed=0,
                       share=0.5, data="")  # fmt: skip
    measure(one)
    text = one.path.read_text().replace(one.settings, "0" * 64)
    one.path.write_text(text)
    with pytest.raises(CheckpointError, match="is of another run"):
        measure(one)
    assert issubclass(CheckpointError, ApfedError)


def test_the_command_says_who_helped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(study.__file__).parent / "configs/contributions-digits.yaml").read_text()
    (tmp_path / "run.yaml").write_text(text)
    folder = tmp_path / "out"
    arguments = ["contributions", str(tmp_path / "run.yaml"), "--output", str(folder), "--json",
                 "--seeds", "1", "--jobs", "1", "--held-back", "0.6667",
                 "--set", "method.prior=labeller", "--set", "data.limit=300"]  # fmt: skip
    assert execute(arguments) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["runs"] == 8
    assert {one["name"] for one in told["passives"]} == {f"passive-{at}" for at in (1, 2, 3)}
    refused = [*arguments, "--set", "secure_sum.allow_single_passive=false"]
    assert execute(refused) == 2
    assert "open its votes" in capsys.readouterr().out

"""A search: what it may vary, what its trials cost together, and that a stopped one goes on."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from pydantic import ValidationError

from apfed_experiments import search as package
from apfed_experiments.search import Charge, SearchSpace, bound_of, search
from secure_apfed.cli import execute
from secure_apfed.config import Config
from secure_apfed.config.file import load_config
from secure_apfed.errors import CheckpointError, ConfigError
from secure_apfed.files import to_json
from secure_apfed.privacy.accountants import gdp_epsilon
from secure_apfed.runs.outcome import RunResult
from secure_apfed.runs.run import run
from tests.experiments.run_folder import APFED as PLAIN_APFED
from tests.experiments.run_folder import on_few_labels, own_tables

CONFIGS = Path(package.__file__).parent / "configs"
SPACE = {"model.random_features": {"low": 50, "high": 200}}


def config_of(**changes: Any) -> Config:
    noisy = {"name": "votes", "prior": "labeller", "epsilon": 4}
    return on_few_labels(**{"method": noisy, **changes})


def space_of(space: dict[str, Any] = SPACE, **more: Any) -> SearchSpace:
    return SearchSpace.model_validate({"space": space, **more})


PASSIVES = [f"passive-{at}" for at in (1, 2, 3)]
APFED = {
    **PLAIN_APFED,
    "secure_sum": {"scheme": "plain", "masks": "pairwise", "clip": 1.0},
    "guard": {"mechanism": "gaussian", "epsilon": 3, "noise": "reproducible_insecure"},
}


def test_gaussian_releases_compose_by_their_mu_and_all_else_adds() -> None:
    one = Charge(delta=1e-5, mu=0.3, label=1.0, record=2.0, passives={"a": 4.0}, added_delta=1e-6)
    other = Charge(delta=1e-5, mu=0.4, label=0.5, passives={"a": 1.0, "b": 3.0}, added_delta=1e-6)
    both = one.and_then(other)
    assert both.mu == pytest.approx(0.5)
    assert both.epsilons == {
        "a row's representations": gdp_epsilon(both.mu, 1e-5), "a label": 1.5,
        "a record in the model": 2.0, "a person at a": 5.0, "a person at b": 3.0,
    }  # fmt: skip
    assert both.added_delta == pytest.approx(2e-6)
    enough = one.at_least(other)
    assert (enough.mu, enough.label, enough.passives) == (0.4, 1.0, {"a": 4.0, "b": 3.0})
    assert Charge(**asdict(one)) == one


def test_the_bound_holds_what_the_ledger_of_the_run_tells() -> None:
    config = config_of(**APFED)
    bound = bound_of(config, PASSIVES)
    spent = run(config, None).privacy
    assert 0 < spent.mu <= bound.mu
    assert bound.epsilons["a row's representations"] == pytest.approx(3, rel=0.01)
    silent = config.model_copy(update={"guard": config_of().guard})
    assert bound_of(silent, PASSIVES).promised() == ()


def test_trials_and_final_runs_are_charged_together(tmp_path: Path) -> None:
    config, space = config_of(seed=4), space_of({"model.random_features": {"low": 10, "high": 400}})
    first = search(config, space, tmp_path, trials=1, budget=12)
    # Whole votes take discrete draws, whose ledger is a little below what is asked.
    assert first.spent.passives == pytest.approx(dict.fromkeys(PASSIVES, 4.0), rel=1e-4)
    assert first.total.passives == pytest.approx(dict.fromkeys(PASSIVES, 8.0), rel=1e-4)
    assert first.final is not None
    assert search(config, space, tmp_path, trials=1, budget=12).as_json() == first.as_json()
    refused = search(config, space, tmp_path, trials=2, budget=12)
    assert [of["state"] for of in refused.trials] == ["finished", "refused"]
    more = search(config, space, tmp_path, trials=4)
    assert more.finals == 1 + (more.best != 0)
    assert (tmp_path / "final-2").exists() is (more.best != 0)
    in_all = pytest.approx(4.0 * (3 + more.finals), rel=1e-3)
    assert max(more.total.passives.values()) == in_all
    best = more.trials[more.best]
    assert best["value"] == max(of["value"] or 0.0 for of in more.trials)
    assert more.config.model.random_features == int(best["settings"]["model.random_features"])
    assert load_config(tmp_path / "best.yaml") == more.config
    assert json.loads((tmp_path / "search.json").read_text()) == json.loads(to_json(more.as_json()))


def test_one_that_was_stopped_goes_on_and_stays_charged(tmp_path: Path) -> None:
    config, parts = config_of(data=own_tables(tmp_path)), tmp_path / "parts"
    whole = search(config, space_of(), tmp_path / "whole", trials=3, final=False)
    search(config, space_of(), parts, trials=1, final=False)
    killed = package._Search(config, space_of(), parts, share=0.3, budget=None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(package, "run", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            killed.go_on(2, lambda done, total: None)
    found = search(config, space_of(), parts, trials=3, final=False)
    assert [of["state"] for of in found.trials] == ["finished", "stopped", "finished"]
    assert len(found.spent.passives) == 2
    assert all(of == pytest.approx(12.0, rel=1e-4) for of in found.spent.passives.values())
    assert found.trials[0]["settings"] == whole.trials[0]["settings"]
    with pytest.raises(CheckpointError, match="other settings"):
        search(config.model_copy(update={"seed": 1}), space_of(), parts, trials=3)
    text = (tmp_path / "shop.csv").read_text()
    (tmp_path / "shop.csv").write_text(f"{text.rsplit(',', 1)[0]},0.125\n")
    with pytest.raises(CheckpointError, match="other settings or data"):
        search(config, space_of(), parts, trials=3, final=False)


@pytest.mark.parametrize(("left", "budget"), [(None, 13.0), (1.0, 9.5)])
def test_what_would_exceed_the_budget_with_a_final_run_is_refused_before_it_begins(
    left: float | None, budget: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where trials stop early, and leave enough for the final run of their settings."""
    if left is not None:
        monkeypatch.setattr(package, "charge_of", lambda result, bound: replace(
            bound, passives=dict.fromkeys(bound.passives, left)
        ))  # fmt: skip
    found = search(config_of(), space_of(), tmp_path, trials=4, budget=budget, final=False)
    assert [one["state"] for one in found.trials] == ["finished", "finished", "refused", "refused"]
    assert f"the budget is {budget:g}" in found.trials[2]["why"]
    assert max(found.total.passives.values()) <= budget
    with pytest.raises(ConfigError, match="the final run is not begun"):
        search(config_of(), space_of(), tmp_path, trials=4, budget=5.0)
    assert not (tmp_path / "final").exists()


def test_a_budget_needs_a_promise(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="promises no epsilon"):
        search(config_of(method="votes"), space_of(), tmp_path, trials=1, budget=1.0)


def test_a_final_run_that_nobody_noted_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(config: Config, folder: Path | None, **options: Any) -> RunResult:
        result = run(config, folder, **options)
        if folder is not None:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(package, "run", killed)
    with pytest.raises(KeyboardInterrupt):
        search(config_of(), space_of(), tmp_path, trials=1)
    monkeypatch.setattr(package, "run", run)
    found = search(config_of(), space_of(), tmp_path, trials=1)
    assert found.final
    assert max(found.total.passives.values()) == pytest.approx(8.0, rel=1e-3)


def test_a_budget_holds_what_the_space_promises(tmp_path: Path) -> None:
    answers = [{"mechanism": "randomised_response", "epsilon": one} for one in (3.0, 4.0)]
    space = space_of({"labels": {"choices": answers}})
    found = search(config_of(**APFED), space, tmp_path, trials=4, budget=10)
    assert found.total.epsilons["a label"] <= 10
    assert "refused" in [one["state"] for one in found.trials]


def test_trials_on_public_data_cost_the_parties_nothing(tmp_path: Path) -> None:
    public = {"dataset": "breast_cancer", "labelled": 60, "limit": 300}
    config = config_of(data={"dataset": "digits", "views": 6, "labelled": 60, "limit": 300})
    found = search(config, space_of(public=public), tmp_path, trials=2, budget=4.0, final=False)
    assert found.public == "breast_cancer"
    assert {one["charge"] for one in found.trials} == {None}
    assert found.spent.passives == {}
    assert set(found.total.passives.values()) == {4.0}
    assert found.config.data == config.data
    assert "no row of the parties' was used" in found.notes[0]


def test_a_trial_that_fails_is_told_and_keeps_its_charge(tmp_path: Path) -> None:
    space = space_of({"train.learning_rate": {"choices": [0.05, 1e30]}})
    found = search(config_of(**APFED), space, tmp_path, trials=6, final=False)
    failed = [one for one in found.trials if one["state"] == "failed"]
    assert failed
    assert all(one["why"] and one["charge"] is not None for one in failed)
    assert found.config.train.learning_rate == 0.05
    hopeless = space_of({"train.learning_rate": {"choices": [-1.0, -2.0]}})
    with pytest.raises(ConfigError, match=r"no trial of 1 could be judged: .*learning_rate"):
        search(config_of(**APFED), hopeless, tmp_path / "never", trials=1)


@pytest.mark.parametrize(("space", "said"), [
    ({}, "at least 1 item"),
    ({"seed": {"low": 0, "high": 3}}, "cannot be compared"),
    ({"train.epochs": {"low": 3, "high": 3}}, "low is below high"),
    ({"train.epochs": {"low": 0, "high": 3, "log": True}}, "low is above 0"),
    ({"train.epochs": {"low": 1, "high": math.inf}}, "finite"),
    ({"train.epochs": {"choices": [3]}}, "at least 2 items"),
])  # fmt: skip
def test_what_may_not_vary_is_refused(space: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        space_of(space)


def test_the_command_says_what_all_of_it_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["search", str(CONFIGS / "search-digits.yaml"), "--space",
                 str(CONFIGS / "search-digits-space.yaml"), "--trials", "1", "--json", "--no-final",
                 "--set", "data.limit=300", "--output", str(tmp_path / "out")]  # fmt: skip
    assert execute(arguments) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["trials"][0]["charge"]["a person at passive-1"] == pytest.approx(4, rel=1e-4)
    assert told["epsilon_in_all"]["a person at passive-1"] == pytest.approx(8, rel=1e-4)

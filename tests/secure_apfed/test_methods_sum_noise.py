"""Runs with noise under the sum: calibrated, charged, resumed, stopped; and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from apfed_experiments.report.contents import accounting_of, privacy_document
from apfed_experiments.report.run import read_run
from secure_apfed.config import Config
from secure_apfed.config.file import dump_settings, load_config_text
from secure_apfed.data import load_data
from secure_apfed.errors import ConfigError
from secure_apfed.methods import Start, fresh_secrets, open_session
from secure_apfed.methods import accounts as sum_noise
from secure_apfed.privacy.contributions import SummedRelease, sensitivity_in_steps
from secure_apfed.privacy.ledger import BudgetExhaustedError
from secure_apfed.runs.run import run
from tests.secure_apfed.single_steps import own_of
from tests.secure_apfed.small_runs import small_config

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")

NOISE = {"sigma": 3.0}


def config_of(
    method: str = "apfed_r", noise: dict[str, Any] | None = None, **changes: Any
) -> Config:
    usual: dict[str, Any] = {
        "train": {
            "epochs": 3, "batch_size": 64, "learning_rate": 0.01, "max_gradient_norm": 1.0,
            "device": "cpu",
        },
        "secure_sum": {"scheme": "plain", "masks": "pairwise", "noise": noise or NOISE},
        "guard": {"mechanism": "gaussian", "sigma": 1.0, "noise": "reproducible_insecure"},
    }  # fmt: skip
    return small_config(method, **{**usual, **changes})


def result_of(config: Config, folder: Path) -> dict[str, Any]:
    run(config, folder)
    return dict(json.loads((folder / "result.json").read_bytes()))


@pytest.mark.parametrize(("method", "rows"), [("apfed_r", 1), ("apfed_c", 64)])
def test_every_passive_accounts_apart_from_the_active(
    method: str, rows: int, tmp_path: Path
) -> None:
    result = result_of(config_of(method), tmp_path / "run")
    steps = result["sum"]["noise"]["steps"]
    assert steps == 3 * 32767
    release = SummedRelease(
        deviation=steps,
        honest=2,
        sensitivity=sensitivity_in_steps(levels=32767, columns=4, rows=rows),
        numbers=64 * 4,
    )
    for account in result["contributions"].values():
        assert account["releases"] == 3
        expected = release.epsilon_of(3, 1e-5)
        assert account["epsilon"] == (expected if np.isfinite(expected) else "inf")
    assert result["privacy"]["accountants"].keys() >= {"gdp"}
    assert "contribution guarantee" in result["guarantee"]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    assert last["epsilon_passives"] == result["contributions"]["passive-1"]["epsilon"]
    assert last["epsilon"] != last["epsilon_passives"]
    assert (last["delta_passives"], last["releases_passives"]) == (1e-5, 3)


def test_calibration_keeps_the_budget_to_the_last_epoch(tmp_path: Path) -> None:
    result = result_of(config_of(noise={"epsilon": 8.0}), tmp_path / "run")
    for account in result["contributions"].values():
        assert 7.9 < account["epsilon"] <= 8.0


def agreed_noise(config: Config) -> Any:
    """What the contract says about the noise under the sum."""
    return open_session(config, load_data(config.data, seed=config.seed)).secure_sum["noise"]


def test_colluders_cost_noise() -> None:
    alone, both = (agreed_noise(config_of(noise={"epsilon": 8.0}, colluders=k)) for k in (1, 0))
    assert (alone["honest"], both["honest"]) == (1, 2)
    assert alone["steps"] == pytest.approx(both["steps"] * 2**0.5, rel=1e-3)


def test_a_defence_that_mixes_rows_costs_as_much_as_a_loss_that_does() -> None:
    steps = [
        agreed_noise(config_of(noise={"epsilon": 8.0}, defences=defences))["steps"]
        for defences in ([], [{"kind": "compression"}])
    ]
    assert steps[1] == pytest.approx(8 * steps[0], rel=1e-3)


@pytest.mark.parametrize("noise", ["reproducible_insecure", "secret"])
def test_a_stopped_run_resumes_and_pays_for_what_it_plays_again(noise: str, tmp_path: Path) -> None:
    def stop(progress: Any) -> None:
        if progress.step == 8:
            raise KeyboardInterrupt

    config = config_of(guard={"mechanism": "gaussian", "sigma": 1.0, "noise": noise})
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "run", on_progress=stop)
    run(config, tmp_path / "run", resume=True)
    result = json.loads((tmp_path / "run" / "result.json").read_bytes())
    assert {one["releases"] for one in result["contributions"].values()} == {4}
    if noise == "reproducible_insecure":
        # The same noise twice hides no difference between two sums.
        assert {one["epsilon"] for one in result["contributions"].values()} == {"inf"}
        whole = result_of(config, tmp_path / "whole")
        assert result["accuracy"] == whole["accuracy"]


def test_a_later_session_stops_where_the_budget_ends(tmp_path: Path) -> None:
    """The write-ahead log remembers what was sent, whatever checkpoint is loaded."""
    config = config_of(noise={"epsilon": 4.0})
    result = result_of(config, tmp_path)
    agreed, folder = result["sum"]["noise"], tmp_path / "parties" / "passive-1"
    start = Start(
        config=config,
        data=load_data(config.data, seed=config.seed),
        secrets={"passive-1": fresh_secrets(config, "passive-1", logs=folder)},
    )
    noise = sum_noise.contribution_noise(
        own_of(start, "passive-1"),
        (4,),
        plan=sum_noise.NoisePlan(steps=agreed["steps"], honest=agreed["honest"]),
        aligned=result["aligned_rows"],
    )
    assert noise is not None
    assert noise.ledger.account() == result["contributions"]["passive-1"]
    everybody = torch.arange(result["aligned_rows"])
    with pytest.raises(BudgetExhaustedError):
        noise.draw((len(everybody), 4), step=100, known_B=everybody, digest=b"other")


@pytest.mark.parametrize(
    ("noise", "said"),
    [
        ("{}", "exactly one of sigma and epsilon"),
        ("{sigma: 1.0, epsilon: 2.0}", "exactly one of sigma and epsilon"),
        ("{sigma: 0.0}", "number > 0"),
        ("{sigm: 1.0}", "did you mean 'sigma'"),
        ("{sigma: 1.0, delta: 0.1}", "delta: is an unknown key"),
    ],
)
def test_wrong_settings_are_refused(noise: str, said: str) -> None:
    lines = dump_settings(config_of()).splitlines()
    start = lines.index("  noise:")
    end = next(k for k in range(start + 1, len(lines)) if not lines[k].startswith("    "))
    text = "\n".join([*lines[:start], f"  noise: {noise}", *lines[end:]])
    with pytest.raises(ConfigError, match=said):
        load_config_text(text)


def test_what_does_not_fit_is_refused_before_training() -> None:
    for noise, colluders, said in (
        ({"sigma": 1.0}, 2, "leave no honest one"),
        ({"sigma": 1e6}, 0, "more than 16777216"),
        ({"epsilon": 1e-3}, 0, "needs noise of more than"),
    ):
        with pytest.raises(ConfigError, match=said):
            run(config_of(noise=noise, colluders=colluders), None)
    without_clip = {"scheme": "plain", "clip": None, "noise": NOISE}
    with pytest.raises(ConfigError, match="needs a bound on rows"):
        run(config_of(secure_sum=without_clip), None)


def test_the_report_tells_every_passives_epsilon(tmp_path: Path) -> None:
    run(config_of(noise={"epsilon": 8.0}), tmp_path / "run")
    read = read_run(tmp_path / "run")
    assert read.facts.noisy
    told = dict(accounting_of(read))
    assert told["epsilon_c of passive-1, one person in sums, networks held fixed, T 3"].startswith(
        "8"
    )
    assert privacy_document(read)["accounting"]["contributions"]["passive-2"]["releases"] == 3

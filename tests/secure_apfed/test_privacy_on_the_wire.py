"""What others receive in whole runs: the noise that is charged, as often as it counts; refusals."""

import json
import math
from collections import Counter
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from apfed_experiments.report.contents import build_privacy_document, list_privacy_rows
from apfed_experiments.report.run import load_run
from secure_apfed.config import Config
from secure_apfed.data import load_data
from secure_apfed.errors import ConfigError
from secure_apfed.exchange import Kind, TensorSpec, unpack_tensors
from secure_apfed.methods import SimulationInputs, fresh_secrets, open_session
from secure_apfed.methods import noise_plans as sum_noise
from secure_apfed.privacy.contributions import SummedRelease, sensitivity_in_steps
from secure_apfed.privacy.ledger import BudgetExhaustedError
from secure_apfed.runs.outcome import RunResult
from secure_apfed.runs.run import run
from tests.secure_apfed.seats import own_of
from tests.secure_apfed.small_runs import interrupt_run, small_config
from tests.secure_apfed.test_privacy_guards import scale_fits

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
EPOCHS = 3
D = 4
CLIP = 1e-3
SIGMA = 1.0
each_run = pytest.mark.parametrize(
    ("method", "mechanism"), list(product(("apfed_c", "tvfl"), ("gaussian", "frozen_gaussian")))
)
NOISE = {"sigma": 3.0}


def config_of(method: str, mechanism: str) -> Config:
    return small_config(
        method,
        data={"dataset": "breast_cancer", "overlap": 0.8, "limit": 200},
        model={"hidden": [8], "representation": D, "projection": D},
        train={
            "epochs": EPOCHS,
            "batch_size": 64,
            "learning_rate": 1e-4,
            "max_gradient_norm": 1.0,
            "device": "cpu",
        },
        secure_sum={"scheme": "plain"},
        transcript={"keep": "all"},
        party_seeds="secret",
        guard={"mechanism": mechanism, "clip": CLIP, "sigma": SIGMA},
    )


@cache
def run_noisy(method: str, mechanism: str, run_number: int = 0) -> RunResult:
    """Run with a clip so small beside the noise that noise is all that can be seen."""
    del run_number  # names one of several runs that are alike
    return run(config_of(method, mechanism), None)


def list_messages(result: RunResult) -> dict[tuple[str, str], list[tuple[int, Tensor, Tensor]]]:
    """List step, rows and representations of every message, by sender and receiver."""
    expected = {
        "rows": TensorSpec(torch.int64, (None,)),
        "z": TensorSpec(torch.float32, (None, D)),
    }
    found: dict[tuple[str, str], list[tuple[int, Tensor, Tensor]]] = {}
    for envelopes in result.recording.transcript.envelopes_by_epoch.values():
        for one in envelopes:
            if one.kind is Kind.REPRESENTATIONS:
                tensors, _ = unpack_tensors(one.payload, expected, sender=one.sender)
                message = (one.step, tensors["rows"], tensors["z"])
                found.setdefault((one.sender, one.receiver), []).append(message)
    return found


@pytest.mark.sampled(every=4)
@each_run
def test_every_message_carries_the_noise_that_is_charged(method: str, mechanism: str) -> None:
    result = run_noisy(method, mechanism)
    links = list_messages(result)
    assert len(links) == 2
    for messages in links.values():
        first: dict[int, Tensor] = {}
        for _, rows_B, z_BD in messages:
            for row, z_D in zip(rows_B.tolist(), z_BD, strict=True):
                first.setdefault(row, z_D)
        noises = [torch.stack([*first.values()])]
        if mechanism == "gaussian":
            noises += [z_BD for _, _, z_BD in messages]
        drawn = SIGMA
        if mechanism == "frozen_gaussian":
            drawn /= math.sqrt(1 + D * (SIGMA / CLIP) ** 2)
        assert all(scale_fits(noise_BD.double().numpy(), drawn) for noise_BD in noises)
        every = torch.cat(noises).double().numpy()
        assert not any(scale_fits(every, drawn * factor) for factor in (2 / 3, 1.5))


@each_run
def test_the_account_counts_what_was_received(method: str, mechanism: str) -> None:
    """T is read off the messages: the different releases of the row that was sent most often."""
    result = run_noisy(method, mechanism)
    for messages in list_messages(result).values():
        different: dict[int, set[bytes]] = {}
        sent: Counter[int] = Counter()
        for _, rows_B, z_BD in messages:
            for row, z_D in zip(rows_B.tolist(), z_BD, strict=True):
                different.setdefault(row, set()).add(z_D.numpy().tobytes())
                sent[row] += 1
        most = max(len(releases) for releases in different.values())
        assert result.privacy.releases == most == (EPOCHS if mechanism == "gaussian" else 1)
        assert max(sent.values()) == EPOCHS
        # Joint inference on test rows is a release, too.
        tested = method == "tvfl"
        assert (min(sent.values()) == 1) is tested


@pytest.mark.parametrize("clip", [1e-6, 1e-5])
def test_a_bound_that_leaves_nothing_of_a_row_is_refused(clip: float) -> None:
    config = small_config(guard={"mechanism": "gaussian", "epsilon": 8.0, "clip": clip})
    with pytest.raises(ConfigError, match=r"guard\.clip: .* raise guard\.clip"):
        run(config, None)


@pytest.mark.slow
def test_two_runs_alike_share_no_noise() -> None:
    first, second = (
        torch.cat([z_BD for _, _, z_BD in next(iter(list_messages(result).values()))])
        for result in (run_noisy("apfed_c", "gaussian"), run_noisy("apfed_c", "gaussian", 1))
    )
    together = torch.stack([first.flatten(), second.flatten()])
    assert abs(float(torch.corrcoef(together)[0, 1])) < 5 / math.sqrt(together.shape[1])


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("at_step", [2, 6])  # in the first epoch, whose rows are not kept yet
def test_a_resumed_run_goes_on_with_its_frozen_rows(at_step: int, tmp_path: Path) -> None:
    """Rows that were noised anew would be second releases, and the budget is one."""
    config = config_of("apfed_c", "frozen_gaussian")
    guard = {"mechanism": "frozen_gaussian", "epsilon": 2.0}
    config = Config.model_validate(config.model_dump() | {"guard": guard})

    interrupt_run(config, tmp_path / "run", at_step=at_step)
    result = run(config, tmp_path / "run", resume=True)
    assert result.privacy.releases == 1
    (messages, _) = list_messages(result).values()
    frozen: dict[int, bytes] = {}
    for _, rows_B, z_BD in messages:
        for row, z_D in zip(rows_B.tolist(), z_BD, strict=True):
            assert frozen.setdefault(row, z_D.numpy().tobytes()) == z_D.numpy().tobytes()


def make_summed_config(
    method: str = "apfed_r", noise: dict[str, Any] | None = None, **changes: Any
) -> Config:
    usual: dict[str, Any] = {
        "train": {
            "epochs": 3,
            "batch_size": 64,
            "learning_rate": 0.01,
            "max_gradient_norm": 1.0,
            "device": "cpu",
        },
        "secure_sum": {"scheme": "plain", "masks": "pairwise", "noise": noise or NOISE},
        "guard": {"mechanism": "gaussian", "sigma": 1.0, "noise": "reproducible_insecure"},
    }
    return small_config(method, **{**usual, **changes})


def result_of(config: Config, folder: Path) -> dict[str, Any]:
    run(config, folder)
    return dict(json.loads((folder / "result.json").read_bytes()))


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("method", "rows"), [("apfed_r", 1), ("apfed_c", 64)])
def test_every_passive_accounts_apart_from_actives(method: str, rows: int, tmp_path: Path) -> None:
    result = result_of(make_summed_config(method), tmp_path / "run")
    steps = result["sum"]["noise"]["steps"]
    assert steps == 3 * 32767
    sensitivity = sensitivity_in_steps(steps_in_clip=32767, columns=4, rows_per_person=rows)
    release = SummedRelease(deviation=steps, honest=2, sensitivity=sensitivity, numbers=64 * 4)
    epsilon = release.epsilon_of(3, 1e-5)
    expected = {"releases": 3, "epsilon": epsilon if np.isfinite(epsilon) else "inf"}
    accounts = result["contributions"]
    assert {
        name: {key: account[key] for key in expected} for name, account in accounts.items()
    } == dict.fromkeys(accounts, expected)
    assert result["privacy"]["accountants"].keys() >= {"gdp"}
    assert "contribution guarantee" in result["guarantee"]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    assert last["epsilon_passives"] == result["contributions"]["passive-1"]["epsilon"]
    assert last["epsilon"] != last["epsilon_passives"]
    assert (last["delta_passives"], last["releases_passives"]) == (1e-5, 3)


@pytest.mark.slow
def test_calibration_keeps_its_budget_to_the_end_and_the_report_says_so(tmp_path: Path) -> None:
    result = result_of(make_summed_config(noise={"epsilon": 8.0}), tmp_path / "run")
    assert all(7.9 < account["epsilon"] <= 8.0 for account in result["contributions"].values())
    read = load_run(tmp_path / "run")
    assert read.facts.has_passive_noise
    title = "epsilon_c of passive-1, one person in sums, networks held fixed"
    assert dict(list_privacy_rows(read))[title].startswith("8")
    assert build_privacy_document(read)["accounting"]["contributions"]["passive-2"]["releases"] == 3


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("changes", "times", "honest"),
    [({"colluders": 1}, 2**0.5, 1), ({"defences": [{"kind": "compression"}]}, 8, 2)],
)
def test_colluders_and_a_defence_that_mixes_rows_cost_noise(
    changes: dict[str, Any], times: float, honest: int
) -> None:
    configs = [make_summed_config(noise={"epsilon": 8.0}, **one) for one in ({}, changes)]
    data = load_data(configs[0].data, seed=0)
    noises: list[Any] = [open_session(config, data).secure_sum["noise"] for config in configs]
    usual, more = noises
    assert (usual["honest"], more["honest"]) == (2, honest)
    assert more["steps"] == pytest.approx(times * usual["steps"], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["reproducible_insecure", "secret"])
def test_a_stopped_run_resumes_and_pays_for_what_it_plays_again(noise: str, tmp_path: Path) -> None:
    config = make_summed_config(guard={"mechanism": "gaussian", "sigma": 1.0, "noise": noise})
    interrupt_run(config, tmp_path / "run", at_step=8)
    run(config, tmp_path / "run", resume=True)
    result = json.loads((tmp_path / "run" / "result.json").read_bytes())
    assert {one["releases"] for one in result["contributions"].values()} == {4}
    if noise == "reproducible_insecure":
        # The same noise twice hides no difference between two sums.
        assert {one["epsilon"] for one in result["contributions"].values()} == {"inf"}
        whole = result_of(config, tmp_path / "whole")
        assert result["accuracy"] == whole["accuracy"]


@pytest.mark.slow
def test_a_later_session_stops_where_the_budget_ends(tmp_path: Path) -> None:
    """The write-ahead log remembers what was sent, whatever checkpoint is loaded."""
    config = make_summed_config(noise={"epsilon": 4.0})
    result = result_of(config, tmp_path)
    agreed = result["sum"]["noise"]
    folder = tmp_path / "parties" / "passive-1"
    data = load_data(config.data, seed=config.seed)
    secrets = {"passive-1": fresh_secrets(config, "passive-1", log_folder=folder)}
    own = own_of(SimulationInputs(config=config, data=data, secrets=secrets), "passive-1")
    plan = sum_noise.NoisePlan(steps=agreed["steps"], honest=agreed["honest"])
    noise = own.open_contribution_noise((4,), plan, result["aligned_rows"])
    assert noise is not None
    assert noise.ledger.summarise_cost() == result["contributions"]["passive-1"]
    everybody = torch.arange(result["aligned_rows"])
    with pytest.raises(BudgetExhaustedError):
        noise.charge_and_draw(
            (len(everybody), 4), step=100, charged_rows_B=everybody, digest=b"other"
        )


def test_what_does_not_fit_is_refused_before_training() -> None:
    without_clip = {"scheme": "plain", "clip": None, "noise": NOISE}
    with pytest.raises(ConfigError, match="needs a bound on rows"):
        run(make_summed_config(secure_sum=without_clip), None)


@pytest.mark.parametrize(
    ("noise", "colluders", "said"),
    [
        ({"sigma": 1.0}, 2, "leave no honest one"),
        ({"sigma": 1e6}, 0, "more than 16777216"),
        ({"epsilon": 1e-3}, 0, "needs noise of more than"),
    ],
)
def test_noise_that_does_not_fit_is_refused_before_training(
    noise: dict[str, Any], colluders: int, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        run(make_summed_config(noise=noise, colluders=colluders), None)

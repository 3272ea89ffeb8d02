"""`secure-apfed plan`: calibration with and without a config, and what is forecast."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from apfed_experiments import baselines
from secure_apfed.cli import execute
from secure_apfed.config import Config
from secure_apfed.data import OwnData, VerticalData
from secure_apfed.planning import forecast
from tests.secure_apfed.small_runs import run_as_json

Capture = pytest.CaptureFixture[str]
CONFIG = """
name: planned
method: apfed_c
data: {dataset: breast_cancer, overlap: 0.8}
model: {hidden: [8], representation: 4, projection: 8}
train: {epochs: 3, batch_size: 64, device: cpu}
secure_sum: {scheme: plain}
guard: {mechanism: none}
"""


@pytest.fixture(name="config")
def _config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    return path


def test_without_a_config_both_guards_are_calibrated(capsys: Capture) -> None:
    answer = run_as_json(capsys, "plan", "--epsilon", 2, "--epochs", 50)
    fresh, frozen = answer["calibration"]
    assert (fresh["mechanism"], frozen["mechanism"]) == ("gaussian", "frozen_gaussian")
    assert (fresh["releases"], frozen["releases"]) == (50, 1)
    # The published sigma / (2C) at delta 1e-5.
    assert f"{fresh['noise_multiplier']:.3g}" == "14.1"
    assert f"{frozen['noise_multiplier']:.3g}" == "1.99"
    assert fresh["sigma"] == pytest.approx(math.sqrt(50) * frozen["sigma"])
    assert (fresh["clip"], fresh["delta"]) == (1.0, 1e-5)
    assert "rows" not in answer
    assert execute(["plan", "--epsilon", "4", "--epochs", "50"]) == 0
    shown = capsys.readouterr().out
    assert "Noise for epsilon_x 4 at delta 1e-05, 50 epochs" in shown
    assert "encoder held fixed; no label" in shown


@pytest.mark.slow
def test_with_a_config_its_numbers_are_taken_and_options_win(config: Path, capsys: Capture) -> None:
    answer = run_as_json(capsys, "plan", config, "--epsilon", 4, "--set", "guard.clip=2.0")
    aligned = {one["protocol"]: one for one in answer["intersections"]}
    assert [name for name, one in aligned.items() if one["chosen"]] == ["ot"]
    assert aligned["vole"]["wire_bytes"] < aligned["opprf"]["wire_bytes"]
    assert aligned["opprf"]["wire_bytes"] < aligned["circuit"]["wire_bytes"] / 5
    (noise,) = answer["calibration"]
    assert (noise["mechanism"], noise["epochs"], noise["clip"]) == ("gaussian", 3, 2.0)
    assert answer["epsilon_x"] == pytest.approx(4.0)
    assert answer["epsilon_y"] == answer["epsilon_model"] == "inf"
    frozen = ["--set", "guard={mechanism: frozen_gaussian, sigma: 3.0}"]
    answer = run_as_json(
        capsys, "plan", config, "--epsilon", 1, "--epochs", 7, "--delta", 1e-6, *frozen
    )
    (noise,) = answer["calibration"]
    assert (noise["mechanism"], noise["epochs"], noise["releases"]) == ("frozen_gaussian", 7, 1)
    assert (noise["delta"], answer["delta"]) == (1e-6, 1e-6)


@pytest.mark.slow
def test_labels_and_private_training_are_forecast(config: Path, capsys: Capture) -> None:
    labels = ["--set", "labels={mechanism: lp_mst, epsilon: 4.0}"]
    answer = run_as_json(capsys, "plan", config, *labels)
    assert answer["epsilon_y"] == 4.0
    assert answer["steps"] == 3 + 6 + 6  # of 355 rows, half of them in the first epoch
    private = ["--set", "guard={mechanism: gaussian, epsilon: 2.0}", "--set", "dp_sgd={epsilon: 6}"]
    answer = run_as_json(capsys, "plan", config, *private)
    assert answer["epsilon_x"] == pytest.approx(2.0)
    assert answer["epsilon_model"] == pytest.approx(6.0)
    assert 0 < answer["epsilon_y"] < 6.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "give CONFIG, or --epsilon"),
        ("--epochs 5", "give CONFIG, or --epsilon"),
        ("--epsilon 4 --set train.epochs=3", "give CONFIG, or --epsilon"),
        ("--epsilon -1", "positive and finite, got -1"),
        ("--epsilon nan", "positive and finite, got nan"),
        ("--epsilon inf", "positive and finite, got inf"),
        ("--epsilon 4 --delta 0", "delta lies between 0 and 1"),
        ("--epsilon 4 --delta 1", "delta lies between 0 and 1"),
        ("--epsilon 4 --epochs 0", "epochs"),
        ("--baselines --epsilon 4", "--baselines takes CONFIG"),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments: str, message: str, capsys: Capture) -> None:
    assert execute(["plan", *arguments.split(), "--json"]) == 2
    assert message in capsys.readouterr().out


SUM = "secure_sum={scheme: plain, masks: pairwise, noise: {sigma: 4.0}}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "changes", "row"),
    [
        ("apfed_c", [SUM, "train.epochs=3"], "epsilon_c of passive-1, one person in sums 3"),
        (
            "votes",
            ["secure_sum.masks=pairwise", "method.epsilon=3"],
            "epsilon_v of passive-1, one person's votes 1",
        ),
        ("votes_randomised", ["method.epsilon=3"], "epsilon_v of passive-1, one person's votes 1"),
    ],
)
def test_passives_forecast_what_their_noise_costs_and_the_run_agrees(
    method: str,
    changes: list[str],
    row: str,
    config: Path,
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    changed = [f"--set={one}" for one in (f"method={method}", *changes)]
    planned = run_as_json(capsys, "plan", config, *changed)["epsilon_passives"]
    folder = tmp_path / "run"
    arguments = ["run", str(config), *changed, "--output", str(folder), "--no-baselines"]
    assert execute(arguments) == 0
    result = json.loads((folder / "result.json").read_text())["contributions"]
    assert planned == {name: account["epsilon"] for name, account in result.items()}
    assert len(planned) == 2
    name, _, releases = row.rpartition(" ")
    assert re.search(rf"{name} +\S+ at delta 1e-05, T {releases}", capsys.readouterr().out)
    assert execute(["plan", str(config), *changed]) == 0
    assert re.search(rf"{name} +\S+ at delta 1e-05, T {releases}", capsys.readouterr().out)


@pytest.mark.slow
def test_it_warns_of_unsafe_and_costly_choices(config: Path, capsys: Capture) -> None:
    wide = "model={hidden: [8], representation: 2000, projection: none}"
    warned = " ".join(run_as_json(capsys, "plan", config, "--set", wide)["warnings"])
    assert "this sends 2,000 numbers a row; with model.projection: 64 it would be 31" in warned
    assert "epsilon is infinite" in warned
    assert "the aggregator reads every gradient" in warned


@pytest.mark.parametrize(
    ("method", "private"),
    [
        ("single_view", "dp_sgd={noise_multiplier: 4}"),
        ("apfed_c", "labels={mechanism: lp_mst, epsilon: 1}"),
    ],
)
@pytest.mark.slow
def test_it_warns_of_noise_whose_seed_somebody_knows(
    method: str, private: str, config: Path, capsys: Capture
) -> None:
    for noise, told_of in (("reproducible_insecure", True), ("secret", False)):
        changes = (f"method={method}", private, f"guard.noise={noise}")
        answer = run_as_json(capsys, "plan", config, *(f"--set={change}" for change in changes))
        assert any("knows the seed" in one for one in answer["warnings"]) is told_of


@pytest.mark.parametrize(("keep", "told_of"), [("all", True), ("none", False), ("auto", False)])
@pytest.mark.slow
def test_what_the_disk_cannot_hold_is_told(
    keep: str, told_of: bool, config: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1e5))
    warned = run_as_json(capsys, "plan", config, "--set", f"transcript.keep={keep}")["warnings"]
    assert any("this folder has 0 MB free" in one for one in warned) is told_of


def test_of_the_active_alone_nothing_is_sent(config: Path, capsys: Capture) -> None:
    answer = run_as_json(capsys, "plan", config, "--set=method=single_view")
    assert (answer["wire_bytes"], answer["links"]) == (0, [])
    assert (answer["epsilon_x"], answer["releases"]) == (0.0, 0)
    # Nobody receives anything, but the model is fitted to the labels.
    assert answer["epsilon_y"] == answer["epsilon_model"] == "inf"
    private = ["--set=method=single_view", "--set=dp_sgd={epsilon: 4}"]
    assert execute(["plan", str(config), *private]) == 0
    assert re.search(r"epsilon_y, one training label +4 at delta 1e-05", capsys.readouterr().out)


@pytest.mark.slow
def test_what_an_answer_takes_whatever_the_rows_is_forecast_once(
    config: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two seconds, and a hundredth for each batch: the first rehearsal alone would say more."""
    rehearse, played = forecast._rehearse, list[int]()

    def time_rehearsal(config: Config, template: VerticalData, steps: int, **more: Any) -> Any:
        played.append(steps)
        seconds = 2.0 + 0.01 * steps
        found = rehearse(config, template, steps, **more)
        return replace(found, step_seconds=seconds / forecast.STEPS, evaluation_seconds=0.0)

    monkeypatch.setattr(forecast, "_rehearse", time_rehearsal)
    votes = ["--set", "method={name: votes, labeller: logistic}", "--set", "train.batch_size=4"]
    answer = run_as_json(
        capsys,
        "plan",
        config,
        *votes,
        "--set",
        "data.labelled=20",
        "--set",
        "secure_sum.masks=pairwise",
        "--set",
        "train.epochs=1",
    )
    first, longer = played
    assert answer["steps"] > longer > first == forecast.STEPS
    assert answer["seconds"]["train"] == pytest.approx(2.0 + 0.01 * answer["steps"])


@pytest.mark.slow
def test_baselines_are_forecast_by_those_of_two_samples(
    config: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second, and a hundredth for each row; of all classes some have a label."""
    now, taught = 0.0, list[OwnData]()

    def compare_baselines(config: Config, data: OwnData, said: object) -> None:
        nonlocal now
        taught.append(data)
        now += 1.0 + 0.01 * len(data.train_rows)

    monkeypatch.setattr(baselines, "_compare_baselines", compare_baselines)
    monkeypatch.setattr(baselines, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(baselines, "_TIMING_SAMPLE_SIZES", (20, 40))
    few = ["--set", "data.labelled=30"]
    answer: dict[str, Any] = {}
    for more, count in ((), [20, 40]), (few, [20, 30]):
        answer = run_as_json(capsys, "plan", config, "--baselines", *more)
        assert answer["seconds"]["baselines"] == pytest.approx(1.0 + 0.01 * answer["train_rows"])
        first, second = taught[-2:]
        assert [len(own.labelled_rows) for own in (first, second)] == pytest.approx(count, abs=1)
        assert [len(own.train_rows) for own in (first, second)] == pytest.approx([20, 40], abs=1)
        for own in (first, second):
            assert own.table.labels is not None
            assert set(own.table.labels[own.labelled_rows].tolist()) == {0, 1}
            assert torch.equal(own.train_rows, own.train_rows.unique())
    monkeypatch.setattr(baselines, "_TIMING_SAMPLE_SIZES", (2000, 40000))
    assert "baselines" in run_as_json(capsys, "plan", config, "--baselines")["seconds"]
    assert len(taught[-1].train_rows) == len(taught[-1].labelled_rows) == answer["train_rows"]
    assert execute(["plan", str(config), "--baselines"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "(run --no-baselines spares them)" in shown
    assert "start, attacks, report" in shown
    private = ["--set", "dp_sgd={noise_multiplier: 2, clip: 1}"]
    assert run_as_json(capsys, "plan", config, "--baselines", *private)["seconds"]["baselines"] == 0


@pytest.mark.slow
def test_links_are_summed_by_kind_unless_they_are_asked_for(config: Path, capsys: Capture) -> None:
    answer = run_as_json(capsys, "plan", config)
    assert answer["epsilon_passives"] == {}
    links = answer["links"]
    kinds = {link["kind"] for link in links}
    assert len(kinds) < len(links)
    for option, rows in (((), len(kinds)), (("--links",), len(links))):
        assert execute(["plan", str(config), *option]) == 0
        shown = capsys.readouterr().out
        unbounded = re.findall(r"^(epsilon_[xvc])\S* .* no guarantee: ", shown, re.MULTILINE)
        assert unbounded == ["epsilon_x", "epsilon_c"]
        table = shown.partition("\nBy ")[2].splitlines()[2 : 2 + rows]
        messages = sum(int(line.split()[-3].replace(",", "")) for line in table)
        assert messages == sum(link["messages"] for link in links)

"""docs/add-a-method.md as printed: nothing else asks which method it is."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from apfed_attacks.run import mount
from apfed_experiments.report import write_report
from secure_apfed.config import AttackChoice, Config
from secure_apfed.methods import METHODS
from secure_apfed.planning.forecast import forecast
from secure_apfed.runs.recording import load_recording
from secure_apfed.runs.run import run
from tests.docs.pages import program_of
from tests.secure_apfed import test_methods_declared
from tests.secure_apfed.test_guides import printed_config

GUIDE, NAME = "docs/add-a-method.md", "one_exchange"


@pytest.fixture(autouse=True)
def _from_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, NAME, program_of(GUIDE, tmp_path).OneExchange())


@pytest.fixture
def config() -> Config:
    return printed_config(GUIDE)


def test_it_runs_and_resumes(config: Config, tmp_path: Path) -> None:
    descends = {"model": {"hidden": [16], "representation": 8}, "train": {"epochs": 3}}
    config = Config.model_validate(config.model_dump(exclude_unset=True) | descends)
    whole = run(config, tmp_path / "whole")

    def stop(progress: Any) -> None:
        if progress.epoch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "broken", on_progress=stop)
    resumed = run(config, tmp_path / "broken", resume=True)
    assert resumed.accuracy == whole.accuracy
    assert whole.recording.model is not None
    assert resumed.recording.model is not None
    for mine, other in zip(
        whole.recording.model.parameters(), resumed.recording.model.parameters(), strict=True
    ):
        assert torch.equal(mine, other)
    for name in ("whole", "broken"):
        sent = json.loads((tmp_path / name / "transcript.json").read_text())
        assert {
            (flow["sender"], flow["messages"]) for flow in sent if flow["kind"] == "representations"
        } == {("passive-1", 1), ("passive-2", 1), ("passive-3", 1)}


def test_what_it_declares_is_true() -> None:
    test_methods_declared.test_what_is_declared_is_true_of_what_a_run_sends_and_keeps(NAME)
    test_methods_declared.test_what_is_declared_does_not_contradict_itself(NAME)


def test_it_is_planned_reported_and_attacked_as_what_it_is(config: Config, tmp_path: Path) -> None:
    result = run(config, tmp_path / "run")
    assert result.accuracy[NAME] > 0.5
    planned = forecast(config)
    assert any(link.kind == "representations" for link in planned.links)
    page = write_report(tmp_path / "run").read_text()
    assert "one exchange" in page
    assert "TVFL" not in page
    results = mount(
        load_recording(tmp_path / "run"), [AttackChoice(name="inverse_network")], seed=0
    )
    assert any(result.applicable and result.role == "active" for result in results)

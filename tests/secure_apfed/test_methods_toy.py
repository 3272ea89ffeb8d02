"""docs/add-a-method.md as printed: a method of two stages that does what every method has to do."""

import json
from pathlib import Path
from typing import cast

import onnx
import pytest
import torch

from apfed_attacks.run import run_attacks
from apfed_experiments.report import write_report
from secure_apfed.config import AttackChoice, Config
from secure_apfed.config.file import load_config_text
from secure_apfed.methods import METHODS, Method
from secure_apfed.planning.forecast import forecast
from secure_apfed.runs.active_model import load_model
from secure_apfed.runs.onnx_file import write_onnx
from secure_apfed.runs.outcome import load_recording
from secure_apfed.runs.run import run
from secure_apfed.runs.simulation import simulate_run
from tests.docs.pages import blocks, program_of
from tests.secure_apfed.small_runs import interrupt_run

GUIDE = "docs/add-a-method.md"


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Config:
    method = program_of(GUIDE, tmp_path).OneExchange()
    monkeypatch.setitem(cast("dict[str, Method]", METHODS), "one_exchange", method)
    (text,) = blocks(GUIDE, "yaml")
    text = text.replace("epsilon: 8.0}", "epsilon: 8.0, noise: reproducible_insecure}")
    more = "party_seeds: shared_for_comparison\ntranscript: {keep: first_and_last}\n"
    return load_config_text(text + more, source=GUIDE)


@pytest.mark.slow
def test_it_runs_resumes_and_is_planned_reported_and_attacked_as_what_it_is(
    config: Config, tmp_path: Path
) -> None:
    whole = run(config, tmp_path / "whole")
    interrupt_run(config, tmp_path / "broken", at_step=7)
    resumed = run(config, tmp_path / "broken", resume=True)
    assert resumed.accuracy == whole.accuracy
    models = [one.recording.model for one in (resumed, whole) if one.recording.model is not None]
    pairs = zip(*(model.parameters() for model in models), strict=True)
    assert all(torch.equal(mine, other) for mine, other in pairs)
    sent = json.loads((tmp_path / "whole" / "transcript.json").read_text())
    assert {flow["sender"] for flow in sent if flow["kind"] == "representations"} == {
        "passive-1",
        "passive-2",
        "passive-3",
    }
    assert any(link.kind == "representations" for link in forecast(config).links)
    page = write_report(tmp_path / "whole").read_text()
    assert "one exchange" in page
    assert "TVFL" not in page
    recording = load_recording(tmp_path / "whole")
    results = run_attacks(recording, [AttackChoice(name="inverse_network")], seed=0)
    assert any(result.applicable and result.role == "active" for result in results)


@pytest.mark.slow
def test_it_is_simulated_and_exported(config: Config, tmp_path: Path) -> None:
    plain = config.model_dump(exclude_unset=True) | {"guard": {"mechanism": "none"}}
    bare = Config.model_validate(plain)
    accuracy = run(bare, tmp_path / "run").accuracy
    assert simulate_run(bare) == accuracy
    write_onnx(load_model(tmp_path / "run"), tmp_path / "model.onnx")
    assert onnx.load(tmp_path / "model.onnx").graph.node

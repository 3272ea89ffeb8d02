"""The launcher's result of parties that ran apart: every field that the active wrote arrives."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from secure_apfed.learning.votes import MeasuredHelp
from secure_apfed.organisations.local import _gather_results
from secure_apfed.runs.folder import RunFolder
from secure_apfed.runs.outcome import (
    Calibration,
    MeasureInterval,
    Outcome,
    PartyCoefficients,
    Ranking,
    ReportedCosts,
    RunResult,
    load_outcome,
    write_outcome,
)
from secure_apfed.runs.run import run_in_memory
from tests.secure_apfed.small_runs import small_config

ELSEWHERE = {"folder", "trained", "recorded", "test_scores", "own_networks"}
"""Fields of what the process holds that played the active."""
CHANGED = {"wire_bytes", "privacy", "promises"}
"""Fields that count what every party sent and spent."""
ACCOUNTS = {"contributions", "stated"}
"""Fields that are plain values in a result."""
NONE_OF_THIS_RUN: dict[str, Any] = {
    "sessions": 3,
    "local_models": {"used": ("ridge of x",), "left_out": ()},
    "threshold": 0.25,
    "measure": "auc",
    "undefined": {"apfed_c": {"ks": "one class"}},
    "calibration": Calibration(rate=0.2, slope=1.5, offset=-0.5),
    "ranking": Ranking(
        class_name="benign",
        rows=9,
        positives=4,
        rate=MeasureInterval(value=0.4),
        predicted=0.3,
        intervals={"auc": MeasureInterval(value=0.9)},
    ),
    "never_predicted": {"benign": 0.1},
    "coefficients": (PartyCoefficients(party="active", link="log-odds", coefficients=()),),
    "help": MeasuredHelp(
        row_count=9, gain=0.1, standard_error=0.05, vote_accuracy=0.9, local_accuracy=0.8
    ),
    "stated": {"passive-1": ReportedCosts(step=3)},
    "contributions": {"passive-1": {"epsilon": 2.0, "delta": 1e-5, "releases": 3}},
}
"""Values of fields that a small run leaves as they are by default."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, RunResult]:
    """Write a result as the active does; return it with what the launcher gathers."""
    path: Path = tmp_path_factory.mktemp("run")
    config = small_config("apfed_c", train={"epochs": 1, "batch_size": 64, "device": "cpu"})
    active = RunFolder(path / "parties" / "active")
    run_in_memory(config, active.path)
    content = load_outcome(active).model_dump(mode="python") | NONE_OF_THIS_RUN
    outcome = Outcome.model_validate(content)
    write_outcome(active, outcome)
    return outcome, _gather_results(config, RunFolder(path), active)


@pytest.mark.parametrize("field", [field.name for field in fields(RunResult)])
def test_every_field_of_a_result_is_gathered_or_is_elsewhere(
    field: str, written: tuple[Outcome, RunResult]
) -> None:
    outcome, result = written
    if field in ELSEWHERE:
        assert field not in Outcome.model_fields
        return
    recorded = getattr(outcome, field)
    default = Outcome.model_fields[field].get_default(call_default_factory=True)
    assert recorded != default, f"this test needs another value of {field}"
    gathered = getattr(result, field)
    assert gathered != default
    if field in CHANGED:
        return
    if field in ACCOUNTS:
        recorded = {name: account.model_dump() for name, account in recorded.items()}
    assert gathered == recorded

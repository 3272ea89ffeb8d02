"""APC-VFL: one exchange, nothing else leaves, and a model of the active's alone."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from secure_apfed.config import Config
from secure_apfed.data import load_data
from secure_apfed.exchange import Kind
from secure_apfed.methods import METHODS, open_session
from secure_apfed.runs.folder import RunFolder
from secure_apfed.runs.outcome import read_outcome
from secure_apfed.runs.run import run
from secure_apfed.runs.solo import load_model
from tests.secure_apfed.small_runs import small_config

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")

SMALL = {"network": "selu", "hidden": [16], "representation": 12}
SAID = {
    "name": "apc_vfl", "own": {**SMALL, "representation": 6},
    "passive": {**SMALL, "representation": 8}, "joint": [16], "epochs": 8, "batch_size": 32,
}  # fmt: skip


def config_of(**changes: Any) -> Config:
    usual: dict[str, Any] = {
        "data": {"dataset": "breast_cancer", "overlap": 0.6},
        "model": SMALL, "train": {"epochs": 1, "device": "cpu"},
        "guard": {"mechanism": "none", "noise": "reproducible_insecure"},
    }  # fmt: skip
    return small_config(SAID, **{**usual, **changes})


def test_rows_are_released_and_nothing_returns() -> None:
    result = run(config_of(), None)
    told = {flow.kind for flow in result.recording.transcript.flows}
    assert {Kind.REQUEST, Kind.REPRESENTATIONS} <= told
    assert not {Kind.GRADIENTS, Kind.LABELS, Kind.CONTRIBUTION, Kind.SUM} & told
    assert set(result.accuracy) == {"apc_vfl", "apc_vfl_together"}


def test_the_student_predicts_alone_and_is_kept(tmp_path: Path) -> None:
    result = run(config_of(), tmp_path / "run")
    assert load_model(tmp_path / "run") is not None
    assert result.accuracy["apc_vfl"] > 0.85
    outcome = read_outcome(RunFolder(tmp_path / "run"))
    assert outcome.accuracy == result.accuracy


def test_a_guard_spends_one_release_a_row() -> None:
    guard = {"mechanism": "frozen_gaussian", "epsilon": 8.0, "noise": "reproducible_insecure"}
    config = config_of(guard=guard)
    session = open_session(config, load_data(config.data, seed=0))
    assert METHODS["apc_vfl"].declared.asks_once
    spent = {ledger.spent().releases for ledger in session.ledgers.values()}
    assert spent == {0}


def test_a_head_of_several_layers_is_refused() -> None:
    with pytest.raises(ValidationError, match="fits one linear layer on the student's code"):
        config_of(model={**SMALL, "head": [8]})

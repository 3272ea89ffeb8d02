"""Runs on the same tables that align once: same people, same bytes, and what they do not share."""

from pathlib import Path

import pytest
import torch

from secure_apfed.data import load_data
from secure_apfed.exchange import Kind
from secure_apfed.runs.outcome import RunResult
from secure_apfed.runs.run import PastAlignment, aligned_once, run
from tests.secure_apfed.small_runs import interrupted, small_config

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")

SHORT = {"train": {"epochs": 1, "batch_size": 64, "device": "cpu"}}


def rows_of(result: RunResult) -> torch.Tensor:
    return result.recording.alignment["active"]


def alignment_bytes(result: RunResult) -> int:
    flows = result.recording.transcript.flows
    return sum(flow.wire_bytes for flow in flows if flow.kind is Kind.ALIGNMENT)


def test_runs_on_the_same_tables_stand_in_one_order_count_its_bytes_and_find_the_same() -> None:
    config, votes = small_config("apfed_c", **SHORT), small_config("votes", **SHORT)
    past: dict[str, PastAlignment] = {}
    with aligned_once(past):
        first, second = run(config, None), run(config, None)
        other_method = run(votes, None)
        assert run(small_config("single_view", **SHORT), None).wire_bytes == 0
        assert len(past) == 1
        other_tables = run(votes.model_copy(update={"seed": 1}), None)
    apart = run(config, None)
    for later in (second, other_method):
        assert torch.equal(rows_of(first), rows_of(later))
        assert alignment_bytes(first) == alignment_bytes(later) > 0
    for other in (other_tables, apart):
        assert not torch.equal(rows_of(first), rows_of(other))
    assert apart.accuracy == first.accuracy == second.accuracy
    # Numbers of messages are shorter where an alignment did not use any.
    assert second.wire_bytes == pytest.approx(first.wire_bytes, rel=1e-3)


def test_tables_that_are_brought_are_shared_where_they_are_the_very_same() -> None:
    config = small_config("votes", **SHORT)
    tables, again = (load_data(config.data, seed=config.seed) for _ in range(2))
    with aligned_once({}):
        first, second = (run(config, None, data=tables) for _ in range(2))
        others = [run(config, None, data=again), run(config, None)]
    assert torch.equal(rows_of(first), rows_of(second))
    for other in others:
        assert not torch.equal(rows_of(first), rows_of(other))


def test_a_resumed_run_goes_on_in_its_own_order(tmp_path: Path) -> None:
    config = small_config("apfed_c")
    interrupted(config, tmp_path / "run", at_step=9)
    with aligned_once({}):
        shared = run(small_config("votes", **SHORT), None)
        resumed = run(config, tmp_path / "run", resume=True)
    assert not torch.equal(rows_of(shared), rows_of(resumed))

"""Runs on the same tables align once; resumed with others they are refused, or charged again."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from secure_apfed.config import Config
from secure_apfed.data import PartyTable, VerticalData, load_data
from secure_apfed.errors import CheckpointError
from secure_apfed.exchange import Kind
from secure_apfed.methods import Own, accounts
from secure_apfed.privacy.accountants import GaussianRelease
from secure_apfed.privacy.ledger import BudgetExhaustedError, PrivacyLedger
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


def changed(config: Config, party: str, change: Callable[[PartyTable], PartyTable]) -> VerticalData:
    """The run's tables, one of them changed."""
    data = load_data(config.data, seed=config.seed)
    tables = [change(one) if one.name == party else one for one in data.tables]
    return replace(data, table=tables[0], passives=tuple(tables[1:]))


def turned(table: PartyTable) -> PartyTable:
    labels = None if table.labels is None else table.labels.flip(0)
    return replace(table, ids=table.ids[::-1], features=table.features.flip(0), labels=labels)


def negated(table: PartyTable) -> PartyTable:
    return replace(table, features=-table.features)


OTHERS: list[tuple[str, Callable[[PartyTable], PartyTable]]] = [
    ("active", turned),
    ("passive-1", turned),
    ("passive-2", lambda table: replace(
        table, ids=(*table.ids, "else"), features=torch.cat([table.features, table.features[:1]])
    )),
    ("passive-1", lambda table: replace(table, ids=("else", *table.ids[1:]))),
    ("active", lambda table: replace(table, labels=1 - cast("torch.Tensor", table.labels))),
]  # fmt: skip


@pytest.mark.parametrize("mechanism", ["gaussian", "frozen_gaussian"])
def test_other_people_or_labels_are_refused(mechanism: str, tmp_path: Path) -> None:
    config = small_config(guard={"mechanism": mechanism, "sigma": 1.0})
    interrupted(config, tmp_path, at_step=9)
    for party, change in OTHERS:
        with pytest.raises(CheckpointError, match=f"the table of {party} .* positions"):
            run(config, tmp_path, resume=True, data=changed(config, party, change))


@pytest.mark.parametrize(
    ("changes", "refusal", "log"),
    [
        ({"guard": {"mechanism": "gaussian", "epsilon": 8.0}}, "release 5 of one row", "active"),
        (
            {"guard": {"mechanism": "gaussian", "sigma": 20.0}, "dp_sgd": {"epsilon": 12.0}},
            "training would cost one record epsilon",
            "active+updates",
        ),
    ],
)
def test_changed_features_are_charged(
    changes: dict[str, Any], refusal: str, log: str, tmp_path: Path
) -> None:
    """The noise depends on what it hides: the steps after the checkpoint are played anew."""
    config = small_config(**changes)
    interrupted(config, tmp_path, at_step=9)
    ledger = tmp_path / "parties" / "active" / f"ledger-{log}.jsonl"
    before = ledger.read_bytes()
    with pytest.raises(BudgetExhaustedError, match=refusal):
        run(config, tmp_path, resume=True, data=changed(config, "active", negated))
    assert ledger.read_bytes().startswith(before)


@pytest.mark.parametrize(("noise", "ends"), [("reproducible_insecure", True), ("secret", False)])
@pytest.mark.parametrize("method", ["apfed_c", "single_view"])
def test_noise_of_the_seed_ends_every_claim(
    method: str, noise: str, ends: bool, tmp_path: Path
) -> None:
    """The steps that are played anew have the same noise: their difference has none."""
    guard = {"mechanism": "gaussian", "sigma": 20.0, "noise": noise}
    config = small_config(method, guard=guard, dp_sgd={"noise_multiplier": 20.0})
    interrupted(config, tmp_path, at_step=9)
    data = changed(config, "active", negated)
    privacy = run(config, tmp_path, resume=True, data=data).privacy
    sent = method == "apfed_c"
    assert math.isinf(privacy.epsilon_x) is (ends and sent)
    assert math.isinf(privacy.epsilon_y) is math.isinf(privacy.epsilon_model) is ends
    assert privacy.releases == 5 * sent


@pytest.mark.parametrize("busy", ["passive-1", "passive-2"])
def test_the_account_is_of_who_spent_most(busy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ledger_for(own: Own, *rest: Any, aligned: int) -> PrivacyLedger:
        ledger = accounts.ledger_for(own, *rest, aligned=aligned)
        if own.name == busy:
            ledger.charge(step=1000, rows=torch.arange(aligned), digest=b"one more")
        return ledger

    monkeypatch.setattr("secure_apfed.methods.joint.ledger_for", ledger_for)
    config = small_config("tvfl", guard={"mechanism": "gaussian", "sigma": 20.0})
    result = run(config, None)
    assert result.privacy.releases == config.train.epochs + 1
    once = GaussianRelease(noise_multiplier=10.0).mu
    assert result.privacy.mu == pytest.approx(once * math.sqrt(config.train.epochs + 1))

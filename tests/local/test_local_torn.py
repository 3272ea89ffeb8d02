"""No log of what was released or answered ever loses a line, and all go on from what all hold."""

import json
from pathlib import Path
from typing import Any

import pytest

from secure_apfed.config import Config
from secure_apfed.exchange import Kind
from secure_apfed.runs.run import run
from tests.local.processes import (
    Harm,
    Parties,
    model_digests,
    nobody_failed,
)
from tests.local.test_local_harm import TRAIN, config_of, whole
from tests.secure_apfed.small_runs import interrupted, small_config

__all__ = ["whole"]  # a fixture

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")


def test_all_go_back_to_the_newest_step_that_all_hold(whole: Path, tmp_path: Path) -> None:
    parties = Parties(config_of(), tmp_path / "run")
    parties.play({"active": Harm(Kind.REPRESENTATIONS, 13)})
    lost = parties.run.party("passive-2") / "checkpoint-6.bin"
    for name in ("active", "passive-1", "passive-2"):
        held = sorted(path.name for path in parties.run.party(name).glob("checkpoint-*"))
        assert held == ["checkpoint-3.bin", "checkpoint-6.bin"]
    lost.unlink()
    before = logs_of(parties)
    nobody_failed(parties.play(resume=True))
    contract = json.loads((parties.run.party("active") / "contract.json").read_bytes())
    assert contract["document"]["resumes"]["step"] == 3
    assert model_digests(parties.run.path) == model_digests(whole)
    none_lost_a_line(before, logs_of(parties))


def test_labels_of_a_stage_since_are_answered_again_and_the_same(tmp_path: Path) -> None:
    config = small_config(labels={"mechanism": "lp_mst", "epsilon": 1.0})
    run(config, tmp_path / "whole")
    folder = tmp_path / "run"
    interrupted(config, folder, at_step=10)
    passive = folder / "parties" / "passive-1"
    older, newest = sorted(passive.glob("checkpoint-*"), key=lambda path: path.stat().st_mtime_ns)
    newest.unlink()
    labels = (folder / "parties" / "active" / "labels-active.log").read_bytes()
    assert labels.count(b"\n") == 2  # the second stage came after the older checkpoint
    run(config, folder, resume=True)
    contract = json.loads((folder / "contract.json").read_bytes())["document"]
    assert f"checkpoint-{contract['resumes']['step']}.bin" == older.name
    assert model_digests(folder) == model_digests(tmp_path / "whole")
    assert (folder / "parties" / "active" / "labels-active.log").read_bytes() == labels


def logs_of(parties: Parties) -> dict[str, bytes]:
    """All write-ahead logs of all parties."""
    kinds = ("ledger-*", "answers-*", "labels-*", "refused-*", "audits-*")
    return {
        str(path.relative_to(parties.run.path)): path.read_bytes()
        for kind in kinds
        for path in parties.run.path.rglob(kind)
    }


def none_lost_a_line(before: dict[str, bytes], after: dict[str, bytes]) -> None:
    assert before
    for name, content in before.items():
        whole_lines = content[: content.rfind(b"\n") + 1]
        assert after[name].startswith(whole_lines), name


def accounted() -> Config:
    """Every kind of log: releases, private updates, answers, noise under the sum, labels."""
    return small_config(
        train=TRAIN, labels={"mechanism": "lp_mst", "epsilon": 1.0},
        secure_sum={"scheme": "plain", "masks": "pairwise", "clip": 0.5, "noise": {"sigma": 2.0}},
        dp_sgd={"clip": 0.5, "noise_multiplier": 2.0},
    )  # fmt: skip


@pytest.fixture(scope="module")
def accounts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What an uninterrupted run spent."""
    parties = Parties(accounted(), tmp_path_factory.mktemp("accounted") / "run")
    nobody_failed(parties.play())
    names = [Path(name).name for name in logs_of(parties)]
    assert sorted(names) == [
        "answers-passive-1.jsonl", "answers-passive-2.jsonl", "labels-active.log",
        "ledger-active+updates.jsonl", "ledger-active.jsonl", "ledger-passive-1.jsonl",
        "ledger-passive-2.jsonl",
    ]  # fmt: skip
    return spent(parties)


def spent(parties: Parties) -> dict[str, Any]:
    result = json.loads((parties.run.party("active") / "result.json").read_bytes())
    ends = {
        path.parent.name: json.loads(path.read_bytes())["contributions"]
        for path in sorted(parties.run.path.glob("parties/passive-*/ended.json"))
    }
    return {"active": result["privacy"], **ends}


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        # The line is written, and what it counts has not left.
        ("active", Harm(Kind.REPRESENTATIONS, 13)),
        ("passive-1", Harm(Kind.CONTRIBUTION, 6)),
        # The epoch's lines are, and no checkpoint counts them.
        ("active", Harm(None, writing="checkpoint-5.bin")),
        ("passive-2", Harm(None, writing="checkpoint-5.bin", moment="whole")),
        ("passive-1", Harm(Kind.SAVED, 1)),
    ],
)
def test_no_ledger_goes_back(
    name: str, harm: Harm, accounts: dict[str, Any], tmp_path: Path
) -> None:
    parties = Parties(accounted(), tmp_path / "run")
    parties.play({name: harm})
    before = logs_of(parties)
    for path in parties.run.party(name).glob("checkpoint-5.bin"):
        path.unlink()  # and as if it had been lost, where it had been written
    nobody_failed(parties.play(resume=True))
    none_lost_a_line(before, logs_of(parties))
    after = spent(parties)
    # The same bytes again are free; noise under a sum is another one in each session, and counts.
    assert after["active"] == accounts["active"]
    for passive in ("passive-1", "passive-2"):
        assert after[passive]["releases"] >= accounts[passive]["releases"]
    again = {passive: after[passive]["releases"] for passive in ("passive-1", "passive-2")}
    assert max(again.values()) > accounts["passive-1"]["releases"]

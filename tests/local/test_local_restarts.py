"""Parties that agreed to begin again by themselves: who dies is started again, and nobody types.

Whoever watches over a dead party's machine starts it as it was started before; in all of these
tests nothing else happens from outside.
"""

import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from secure_apfed.config import Config
from secure_apfed.exchange import Kind
from tests.local.processes import (
    PHASES,
    Harm,
    Parties,
    config_of,
    model_digests,
    nobody_failed,
    recovering,
)
from tests.local.test_local_harm import SENT
from tests.waiting import LONG_S, wait_until

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")

WAIT = {"silent_passive": "wait", "patience_s": 20.0, "restarts": 4}
SOON = [
    ("active", Kind.SUM_SETUP), ("passive-1", Kind.SIGNATURE), ("dealer", Kind.ALIGNMENT),
    ("aggregator", Kind.SUM), ("active", Kind.REPRESENTATIONS), ("passive-1", Kind.CONTRIBUTION),
    ("passive-1", Kind.SAVED),
]  # fmt: skip


def changed(config: Config, rules: dict[str, Any]) -> Config:
    whole_rules = config.rules.model_dump(exclude_defaults=True) | rules
    return Config.model_validate(config.model_dump() | {"rules": whole_rules})


@pytest.mark.parametrize(("name", "kind"), SOON)
@pytest.mark.sampled(every=4)
def test_all_wait_for_who_was_killed_and_end_with_the_same_models(
    name: str, kind: Kind, whole: Path, tmp_path: Path
) -> None:
    parties = Parties(changed(config_of(), WAIT), tmp_path / "run")
    said = parties.play_watched_over({name: Harm(kind, SENT[name, kind])})
    nobody_failed(said)
    assert model_digests(parties.run.path) == model_digests(whole)
    stopped = [one["restarts"] for other, one in said.items() if other != name]
    assert any(stopped)
    for reasons in stopped:
        for reason in reasons:
            assert any(f"{phase}: " in reason for phase in PHASES), reason


def test_who_stays_away_is_waited_for_as_long_as_agreed(tmp_path: Path) -> None:
    parties = Parties(
        changed(config_of(), WAIT | {"patience_s": 5.0}), tmp_path / "run", meet_s=5.0
    )
    said = parties.play({"passive-1": Harm(Kind.CONTRIBUTION, 4)})
    for name in ("active", "aggregator", "passive-2"):
        assert said[name]["kind"] == "PartyLeftError", said
        assert len(said[name]["restarts"]) == 1
    assert "active has no link to passive-1" in said["active"]["message"]
    assert "it did not come to active in time" in said["active"]["message"]


def test_all_wait_for_who_was_frozen(whole: Path, tmp_path: Path) -> None:
    parties = Parties(changed(config_of(), WAIT | {"patience_s": 5.0}), tmp_path / "run")
    with parties.started({"passive-1": Harm(Kind.CONTRIBUTION, 4, signal.SIGSTOP)}):
        frozen = parties.processes["passive-1"].pid
        assert frozen
        state = Path(f"/proc/{frozen}/stat")
        wait_until(lambda: " T " in state.read_text(), "that it was frozen")
        again = parties.run.party("active") / "restarted"
        wait_until(again.exists, "that the others end the session")
        wait_until(lambda: listening(parties, "active"), "that they begin another")
        os.kill(frozen, signal.SIGCONT)
        said = parties.watch(list(parties.processes))
    nobody_failed(said)
    assert model_digests(parties.run.path) == model_digests(whole)
    assert len(said["passive-1"]["restarts"]) == 1


def test_there_is_an_end_to_beginning_again(tmp_path: Path) -> None:
    """Every session of the aggregator ends at its second sum."""
    parties = Parties(changed(config_of(), WAIT | {"restarts": 2}), tmp_path / "run")
    with parties.started({"aggregator": Harm(Kind.SUM, 1)}):
        for _ in range(3):
            parties.processes["aggregator"].join(LONG_S)
            assert not parties.processes["aggregator"].is_alive()
            parties.begin("aggregator", Harm(Kind.SUM, 1))
        said = parties.watch(["active", "passive-1", "passive-2"])
    assert {len(one["restarts"]) for one in said.values()} == {2}
    assert {one["kind"] for one in said.values()} <= {"PartyLeftError", "RunStoppedError"}


RETURN: dict[str, Any] = {"silent_passive": "recover", "patience_s": 20.0, "restarts": 2}


def listening(parties: Parties, name: str) -> bool:
    host, port = parties.address(name).split(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_who_was_left_out_is_back_at_the_next_checkpoint(number: int, tmp_path: Path) -> None:
    """Started again; or once it notices, where it was frozen."""
    config, frozen = changed(recovering(), RETURN), number == signal.SIGSTOP
    if frozen:
        train = config.train.model_copy(update={"epochs": 5})
        config = changed(config, {"patience_s": None}).model_copy(update={"train": train})
    parties = Parties(config, tmp_path / "run", timeout_s=5.0 if frozen else 60.0)
    active = parties.run.party("active")
    # The active is held before its second (third) epoch's checkpoint until passive-2 is back.
    at = 6 if frozen else 3
    harms = {
        "passive-2": Harm(Kind.CONTRIBUTION, 2, signal=number),
        "active": Harm(Kind.CHECKPOINT, at, signal=None, until_back="passive-2"),
    }
    with parties.started(harms):
        if frozen:
            lines, harmed = active / "metrics.jsonl", parties.processes["passive-2"].pid or 0
            wait_until(lambda: lines.exists() and lines.read_bytes().count(b"\n") >= 2)
            os.kill(harmed, signal.SIGCONT)
        else:
            parties.processes["passive-2"].join(LONG_S)
            parties.begin("passive-2")
        said = parties.watch(list(parties.processes))
    nobody_failed(said)
    result = json.loads((active / "result.json").read_bytes())
    assert result["attendance"] == {"left": {}, "steps_without_all": 0}
    if frozen:  # it waits for its peers' part of a step that they finished, and then notices
        (why,) = said["passive-2"]["restarts"]
        assert "training: passive-2 expected sum-request of step 2" in why
        return
    (why,) = said["active"]["restarts"]
    assert "checkpoint: passive-2 fell silent and is back at step" in why
    contract = json.loads((active / "contract.json").read_bytes())
    resumed = contract["document"]["resumes"]["step"]
    assert f"at step {resumed};" in why
    assert resumed > 2
    assert len(contract["sessions"]) == 2
    assert set(model_digests(parties.run.path)) == {*parties.processes}


def test_without_restarts_who_comes_back_is_not_let_in(tmp_path: Path) -> None:
    parties = Parties(changed(recovering(), RETURN | {"restarts": 0}), tmp_path / "run")
    harms = {
        "passive-2": Harm(Kind.CONTRIBUTION, 2),
        "active": Harm(Kind.CHECKPOINT, 2, signal=None),
    }
    with parties.started(harms):
        parties.processes["passive-2"].join(LONG_S)
        parties.begin("passive-2", resume=True)
        wait_until(lambda: listening(parties, "passive-2"))
        (parties.run.party("active") / "go-on").touch()
        said = parties.watch(["active"], 40.0)
    nobody_failed(said)
    result = json.loads((parties.run.party("active") / "result.json").read_bytes())
    assert result["attendance"]["left"] == {"passive-2": 2}

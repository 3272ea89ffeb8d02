"""A party is killed, frozen or asked to end: the others say who, and all resume to the same."""

import itertools
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from secure_apfed.cli import execute
from secure_apfed.config import Config
from secure_apfed.config.file import load_config
from secure_apfed.errors import CheckpointError
from secure_apfed.exchange import Kind
from secure_apfed.organisations.counters import restart_and_log
from secure_apfed.runs.active_model import load_model
from secure_apfed.runs.audit_log import compare_logs, verify_log
from secure_apfed.runs.run import LinkType, RunTransport, run
from tests.local.processes import (
    PHASES,
    TRAIN,
    Harm,
    Impatient,
    Parties,
    config_of,
    list_hidden_files,
    model_digests,
    recovering,
    require_no_failure,
    the_others_say_who_and_when,
)
from tests.secure_apfed.small_runs import interrupt_run, small_config
from tests.waiting import LONG_S, wait_until

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
# Every role and every kind of message that it sends, and which of them it never comes to send.
SENT: dict[tuple[str, Kind], int] = {
    (name, Kind(sent.split()[0])): int(sent.split()[1])
    for name, every in {
        "active": "greeting 1, session 0, signature 2, alignment 1, sum-setup 0, ready 3, "
        "representations 7, checkpoint 4, end 0",
        "passive-1": "greeting 0, signature 1, alignment 1, sum-setup 0, ready 0, contribution 4, "
        "saved 0",
        "aggregator": "greeting 3, signature 0, ready 1, sum 5, saved 1",
        "dealer": "greeting 0, signature 3, alignment 1, ready 1",
    }.items()
    for sent in every.split(", ")
}
WRITTEN = [
    ("active", "checkpoint-6.bin", "torn"),
    ("passive-1", "checkpoint-6.bin", "whole"),
    ("aggregator", "contract.json", "whole"),
    ("active", "metrics.jsonl", "torn"),
    ("passive-1", "checkpoint-6.bin", "in place"),
    ("active", "checkpoint-6.bin", "in place"),
    ("passive-1", "contract.json", "torn"),
]
STOPPED = [
    ("active", Kind.ALIGNMENT),
    ("passive-1", Kind.CONTRIBUTION),
    ("active", Kind.REPRESENTATIONS),
    ("passive-1", Kind.SIGNATURE),
    ("passive-1", Kind.SAVED),
    ("aggregator", Kind.SUM),
    ("aggregator", Kind.READY),
    ("dealer", Kind.ALIGNMENT),
]
ASKED = [
    ("active", Harm(Kind.REPRESENTATIONS, 7, signal.SIGTERM, awaiting=True)),
    ("passive-1", Harm(Kind.CONTRIBUTION, 4, signal.SIGTERM)),
    ("dealer", Harm(Kind.ALIGNMENT, 1, signal.SIGTERM, awaiting=True)),
    ("aggregator", Harm(Kind.SAVED, 1, signal.SIGTERM)),
    ("passive-1", Harm(Kind.ALIGNMENT, 1, signal.SIGTERM, awaiting=True)),
]
# A role in each phase, between machines; over the same links.
APART: list[tuple[LinkType, list[tuple[str, Kind]]]] = [
    (
        "grpc",
        [
            ("passive-1", Kind.CONTRIBUTION),
            ("active", Kind.SIGNATURE),
            ("dealer", Kind.ALIGNMENT),
            ("aggregator", Kind.READY),
            ("active", Kind.CHECKPOINT),
        ],
    ),
    ("relay", [("active", Kind.REPRESENTATIONS), ("aggregator", Kind.SUM)]),
]
Case: TypeAlias = tuple[str, Harm, LinkType]
CASES: dict[str, list[Case]] = {
    "killed": [(name, Harm(kind, at), "tcp") for (name, kind), at in SENT.items()],
    "killed while it writes": [
        (name, Harm(None, writing=file, moment=moment), "tcp") for name, file, moment in WRITTEN
    ],
    "frozen": [
        (name, Harm(kind, SENT[name, kind], signal.SIGSTOP), "tcp") for name, kind in STOPPED
    ],
    "asked to end": [(name, harm, "tcp") for name, harm in ASKED],
    "between machines": [
        *(
            (name, Harm(kind, SENT[name, kind], number), over)
            for number in (signal.SIGKILL, signal.SIGSTOP)
            for over, harmed in APART
            for name, kind in harmed
        ),
        *(
            (name, Harm(None, writing="checkpoint-6.bin"), over)
            for over, _ in APART
            for name in ("active", "passive-1")
        ),
    ],
}
SAMPLED = {"killed": 8, "killed while it writes": 4, "asked to end": 3}
WAIT = {"silent_passive": "wait", "patience_s": 20.0, "restarts": 4}
SOON = [
    ("active", Kind.SUM_SETUP),
    ("passive-1", Kind.SIGNATURE),
    ("dealer", Kind.ALIGNMENT),
    ("aggregator", Kind.SUM),
    ("active", Kind.REPRESENTATIONS),
    ("passive-1", Kind.CONTRIBUTION),
    ("passive-1", Kind.SAVED),
]


def cases() -> Iterator[Any]:
    """All; of each kind the first and every so many-th after it are fast."""
    for what, harms in CASES.items():
        for at, case in enumerate(harms):
            slow = [pytest.mark.slow] if at % SAMPLED.get(what, len(harms)) else []
            yield pytest.param(*case, marks=slow, id=f"{what}-{case[0]}-{at}")


def test_every_kind_of_message_of_every_role_is_harmed_once(whole: Path) -> None:
    sent = set()
    for party in (whole / "parties").iterdir():
        for flow in json.loads((party / "transcript.json").read_bytes()):
            sent.add((flow["sender"], Kind(flow["kind"])))
    sent = {(name, kind) for name, kind in sent if name != "passive-2"} | {("active", Kind.END)}
    assert sent == set(SENT)


@pytest.mark.sampled(every=10)
@pytest.mark.parametrize(("name", "harm", "way"), [*cases()])
def test_who_comes_to_harm_is_named_and_the_run_resumes_the_same(
    name: str, harm: Harm, way: LinkType, whole: Path, tmp_path: Path
) -> None:
    kind = Parties if way == "tcp" else Impatient
    frozen, asked = (harm.signal == number for number in (signal.SIGSTOP, signal.SIGTERM))
    patience: Any = {"timeout_s": 5.0, "silent_s": 5.0} if frozen else {}
    parties = kind(config_of(), tmp_path / "run", way=way, **patience)
    with parties.start({name: harm}):
        said = parties.watch([one for one in parties.processes if asked or one != name])
    if asked:
        assert "ended by SIGTERM" in said.pop(name)["message"]
    the_others_say_who_and_when(said, name)
    failed = [one["message"] for one in said.values() if one["kind"]]
    if harm.awaiting:
        assert any(f"{name} stopped the run: 'Terminated" in message for message in failed)
    if harm.writing:
        folder = parties.run.get_party_path(name)
        assert bool(list_hidden_files(folder)) is (harm.moment != "in place")
        if harm.writing.startswith("checkpoint"):
            assert (folder / harm.writing).exists() is (harm.moment == "in place")
    if not failed:  # all that a dealer dealt has come
        assert (name, harm.kind) == ("dealer", Kind.READY)
    elif harm.kind is Kind.END:  # the result is complete, and nobody needs to go on
        assert (parties.run.get_party_path("active") / "ended.json").exists()
        return
    else:
        require_no_failure(kind(config_of(), tmp_path / "run", way=way).play(resume=True))
        assert not list_hidden_files(parties.run.path)
    assert model_digests(parties.run.path) == model_digests(whole)


@pytest.mark.parametrize(
    ("kind", "at", "number", "step"),
    [
        (Kind.CONTRIBUTION, 2, signal.SIGSTOP, 2),
        (Kind.CONTRIBUTION, 2, signal.SIGKILL, 2),
        (Kind.SAVED, 0, signal.SIGSTOP, 4),
        (Kind.SAVED, 0, signal.SIGKILL, 4),
    ],
)
@pytest.mark.sampled(every=6)
def test_the_others_go_on_where_the_sum_recovers_and_their_result_is_gathered(
    kind: Kind, at: int, number: int, step: int, tmp_path: Path
) -> None:
    """It is there, whether or not who started them is."""
    parties = Parties(recovering(), tmp_path / "run", timeout_s=5.0, silent_s=5.0)
    require_no_failure(parties.play({"passive-2": Harm(kind, at, signal=number)}))
    active = parties.run.get_party_path("active")
    again: dict[str, Any] = {"resume": True, "transport": "local"}
    alone = json.loads((active / "result.json").read_bytes())
    assert alone["attendance"]["left"] == {"passive-2": step}
    assert run(recovering(), parties.run.path, **again).accuracy == alone["accuracy"]
    assert load_model(parties.run.path).classes == load_model(active).classes
    with pytest.raises(CheckpointError, match="holds a finished run"):
        run(recovering(), parties.run.path, **again)


def list_checkpoints(parties: Parties, name: str) -> list[str]:
    return sorted(path.name for path in parties.run.get_party_path(name).glob("checkpoint-*"))


@pytest.mark.slow
def test_who_left_comes_back_when_the_run_is_resumed(tmp_path: Path) -> None:
    """Its checkpoint is an older one; the others' are of where the run went on without it."""
    parties = Parties(recovering(), tmp_path / "run")
    harms = {"passive-2": Harm(Kind.CONTRIBUTION, 5), "active": Harm(Kind.REPRESENTATIONS, 29)}
    parties.play(harms)
    assert list_checkpoints(parties, "passive-2") == ["checkpoint-0.bin", "checkpoint-4.bin"]
    assert list_checkpoints(parties, "active") == ["checkpoint-4.bin", "checkpoint-8.bin"]
    require_no_failure(parties.play(resume=True))
    result = json.loads((parties.run.get_party_path("active") / "result.json").read_bytes())
    # Steps 8 to 10 were answered without it, and nobody is asked about them again.
    assert result["attendance"] == {"left": {}, "steps_without_all": 3}


@pytest.mark.slow
def test_who_was_ahead_by_a_checkpoint_is_resumed_again_and_again(
    whole: Path, tmp_path: Path
) -> None:
    parties = Parties(config_of(), tmp_path / "run")
    parties.play({"passive-1": Harm(Kind.SAVED, 1)})
    assert list_checkpoints(parties, "passive-2") > list_checkpoints(parties, "active")
    parties.play({"active": Harm(Kind.REPRESENTATIONS, 3)}, resume=True)
    assert all(list_checkpoints(parties, name) for name in ("active", "passive-1", "passive-2"))
    require_no_failure(parties.play(resume=True))
    assert model_digests(parties.run.path) == model_digests(whole)


@pytest.mark.slow
def test_checkpoints_of_another_run_or_party_are_refused(stopped: Parties, tmp_path: Path) -> None:
    """Of the same settings and people, but with the rows in another order; or of a peer."""
    other = Parties(config_of(), tmp_path / "other")
    other.play({"active": Harm(Kind.REPRESENTATIONS, 13)})
    place = stopped.run.get_party_path("passive-1")
    mine = "checkpoint-6.bin"
    key = "identity.pem"
    theirs = other.run.get_party_path("passive-1")
    peer = stopped.run.get_party_path("passive-2")
    kept = {name: (place / name).read_bytes() for name in (mine, key)}
    for taken, told in (
        ({mine: theirs}, "with another identity than that of passive-1"),
        ({mine: theirs, key: theirs}, "whose rows stand in another order"),
        ({mine: peer}, "is of 'passive-2' with another identity"),
    ):
        for name, content in kept.items():
            whose = taken.get(name)
            (place / name).write_bytes((whose / name).read_bytes() if whose else content)
        with stopped.start(resume=True):
            assert told in stopped.watch(["passive-1"])["passive-1"]["message"]
    for name, content in kept.items():
        (place / name).write_bytes(content)
    require_no_failure(stopped.play(resume=True))


def test_nobody_begins_anew_over_what_others_hold(stopped: Parties) -> None:
    before = {path: path.read_bytes() for path in stopped.run.path.rglob("checkpoint-*")}
    lost = stopped.run.get_party_path("active")
    ledgers = [*lost.glob("ledger-*")]
    for path in (*lost.glob("checkpoint-*"), *ledgers):
        path.unlink()
    with stopped.start(resume=True):
        assert "is missing, and audit.log" in stopped.watch(["active"])["active"]["message"]
    for path in ledgers:
        restart_and_log(lost, path.name, party="active")
    said = stopped.play(resume=True)  # the active restarts, since it has nothing to go on from
    assert "restarts, and the folder of passive-1 holds step" in said["passive-1"]["message"]
    assert all(path.read_bytes() == before[path] for path in before if path.parent != lost)


@pytest.mark.slow
def test_nobody_begins_anew_over_votes_that_were_cast(tmp_path: Path) -> None:
    """At step 0 still, but a new alignment would put other people at the places that count."""
    config = small_config(
        train=TRAIN | {"epochs": 2},
        guard={"mechanism": "none"},
        data={"dataset": "digits", "views": 3, "limit": 120, "labelled": 30},
        method={"name": "votes_randomised", "epsilon": 2.0, "prior": "labeller"},
        passives={},
    )
    parties = Parties(config, tmp_path / "run")
    parties.play({"active": Harm(Kind.CHECKPOINT, 0)})
    for path in parties.run.get_party_path("active").glob("checkpoint-*"):
        path.unlink()
    said = parties.play(resume=True)
    assert "active restarts, and" in said["passive-1"]["message"]
    assert "answers-passive-1.jsonl counts what passive-1 released" in said["passive-1"]["message"]


def test_a_checkpoint_that_was_lost_is_named_by_its_party(stopped: Parties) -> None:
    for path in stopped.run.get_party_path("passive-2").glob("checkpoint-*"):
        path.unlink()
    said = stopped.play(resume=True)
    assert said["passive-2"]["kind"] == "CheckpointError"
    assert "passive-2 holds no step before it" in said["passive-2"]["message"]
    assert "passive-2 stopped the run: 'CheckpointError" in said["active"]["message"]


@pytest.mark.slow
def test_totals_after_a_kill_are_of_all_sessions(stopped: Parties, whole: Path) -> None:
    """In memory `tests/secure_apfed/test_past_sessions.py` shows the same."""
    require_no_failure(stopped.play(resume=True))
    folder = stopped.run.get_party_path("active")
    result = json.loads((folder / "result.json").read_bytes())
    once = json.loads((whole / "parties" / "active" / "result.json").read_bytes())
    assert (once["sessions"], result["sessions"]) == (1, 2)
    assert result["steps"] > once["steps"]
    assert result["wire_bytes"] > once["wire_bytes"]
    for name in ("active", "passive-1", "passive-2", "aggregator"):
        party = stopped.run.get_party_path(name)
        flows = json.loads((party / "transcript.json").read_bytes())
        counted = sum(flow["wire_bytes"] for flow in flows if flow["sender"] == name)
        logged = sum(
            flow.size
            for flow in verify_log(party).flows
            # The active writes its results before it says that the session ends.
            if flow.event == "sent" and (name, flow.kind) != ("active", Kind.END)
        )
        assert counted == logged, name
        assert name != "active" or result["wire_bytes"] == counted


def count_unreceived(folder: Path) -> int:
    """Count envelopes that never arrived, but at a dealer; all logs must verify and agree."""
    count = 0
    for one, other in itertools.combinations(sorted((folder / "parties").iterdir()), 2):
        found = compare_logs(one, other)
        assert found.agree, found.directions
        assert all(direction.equal for direction in found.directions)
        if "dealer" not in (one.name, other.name):  # it may have ended before the last word
            count += sum(direction.unreceived for direction in found.directions)
    return count


def test_the_logs_of_a_run_are_signed_and_agree_on_every_link(whole: Path) -> None:
    assert count_unreceived(whole) == 0
    logs = {party: verify_log(party) for party in (whole / "parties").iterdir()}
    assert {log.has_final_signature for log in logs.values()} == {True}
    assert {(log.opened, log.agreed) for log in logs.values()} == {(1, 1)}
    # The active writes its results before it says that the session ends.
    sent = {
        (party.name, flow.peer, flow.kind): (flow.envelopes, flow.size)
        for party, log in logs.items()
        for flow in log.flows
        if flow.event == "sent" and flow.kind is not Kind.END
    }
    flows = [(p, flow) for p in logs for flow in json.loads((p / "transcript.json").read_bytes())]
    assert sent == {
        (party.name, flow["receiver"], Kind(flow["kind"])): (flow["messages"], flow["wire_bytes"])
        for party, flow in flows
        if flow["sender"] == party.name
    }


@pytest.mark.slow
def test_all_go_back_to_the_newest_step_that_all_hold_and_on_in_their_logs(
    stopped: Parties, whole: Path
) -> None:
    folder = stopped.run.path
    killed = stopped.run.get_party_path("active")
    for name in ("active", "passive-1", "passive-2"):
        assert list_checkpoints(stopped, name) == ["checkpoint-3.bin", "checkpoint-6.bin"]
    assert not verify_log(killed).has_final_signature, "who is killed signs nothing"
    assert verify_log(killed.with_name("passive-1")).has_final_signature
    with (killed / "audit.log").open("ab") as log:
        log.write(b'{"chain":"12')
    (stopped.run.get_party_path("passive-2") / "checkpoint-6.bin").unlink()
    before = logs_of(stopped)
    require_no_failure(stopped.play(resume=True))
    contract = json.loads((killed / "contract.json").read_bytes())
    assert contract["document"]["resumes"]["step"] == 3
    assert model_digests(folder) == model_digests(whole)
    none_lost_a_line(before, logs_of(stopped))
    again = verify_log(killed)
    assert (again.opened, again.agreed, again.cut, again.has_final_signature) == (2, 2, 12, True)
    # What was on its way to the killed one, and the last that it logged.
    assert 0 < count_unreceived(folder) < 24


def logs_of(parties: Parties) -> dict[str, bytes]:
    """All write-ahead logs of all parties."""
    kinds = ("ledger-*", "answers-*", "labels-*", "refused-*", "audits-*", "circles-*")
    return {
        str(path.relative_to(parties.run.path)): path.read_bytes()
        for kind in kinds
        for path in parties.run.path.rglob(kind)
    }


def none_lost_a_line(before: dict[str, bytes], after: dict[str, bytes]) -> None:
    assert before
    for name, content in before.items():
        assert after[name].startswith(content[: content.rfind(b"\n") + 1]), name


def make_accounted_config() -> Config:
    """Return settings with every kind of account: releases, updates, answers, sums, labels."""
    return small_config(
        train=TRAIN,
        labels={"mechanism": "lp_mst", "epsilon": 1.0},
        secure_sum={"scheme": "plain", "masks": "pairwise", "clip": 0.5, "noise": {"sigma": 2.0}},
        dp_sgd={"clip": 0.5, "noise_multiplier": 2.0},
    )


@pytest.fixture(scope="module")
def accounts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what an uninterrupted run spent."""
    parties = Parties(make_accounted_config(), tmp_path_factory.mktemp("accounted") / "run")
    require_no_failure(parties.play())
    passives = [f"{log}-passive-{n}.jsonl" for log in ("answers", "ledger") for n in (1, 2)]
    logs = ["labels-active.log", "ledger-active+updates.jsonl", "ledger-active.jsonl", *passives]
    assert sorted(Path(name).name for name in logs_of(parties)) == sorted(logs)
    return spent(parties)


def spent(parties: Parties) -> dict[str, Any]:
    result = json.loads((parties.run.get_party_path("active") / "result.json").read_bytes())
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
@pytest.mark.sampled(every=8)
def test_no_ledger_goes_back(
    name: str, harm: Harm, accounts: dict[str, Any], tmp_path: Path
) -> None:
    parties = Parties(make_accounted_config(), tmp_path / "run")
    parties.play({name: harm})
    before = logs_of(parties)
    for path in parties.run.get_party_path(name).glob("checkpoint-5.bin"):
        path.unlink()  # and as if it had been lost, where it had been written
    require_no_failure(parties.play(resume=True))
    none_lost_a_line(before, logs_of(parties))
    after = spent(parties)
    # The same bytes again are free; noise under a sum is another one in each session, and counts.
    assert after["active"] == accounts["active"]
    again = [after[passive]["releases"] for passive in ("passive-1", "passive-2")]
    once = accounts["passive-1"]["releases"]
    assert min(again) >= once == accounts["passive-2"]["releases"]
    assert max(again) > once


def test_a_run_is_gone_on_with_as_it_was_begun(stopped: Parties, tmp_path: Path) -> None:
    folder = stopped.run.path
    file = stopped.run.config
    kept = file.read_bytes()
    other = config_of().model_copy(update={"seed": 9})
    cases: list[tuple[Config, str, dict[str, Any]]] = [
        (config_of(), "resume with --transport local", {"resume": True}),
        (other, "another configuration", {"resume": True, "transport": "local"}),
        (other, "holds a run already", {"transport": "local"}),
    ]
    for config, says, how in cases:
        with pytest.raises(CheckpointError, match=says):
            run(config, folder, **how)
    for arguments in (["--prepare"], ["--prepare", "--json"]):
        assert execute(["run", str(file), "--output", str(folder), *arguments])
    assert file.read_bytes() == kept
    assert load_config(file) == config_of()
    interrupt_run(small_config(), tmp_path / "memory", at_step=9)
    with pytest.raises(CheckpointError, match="resume with --transport memory"):
        run(small_config(), tmp_path / "memory", resume=True, transport="local")
    run(small_config(), tmp_path / "memory", resume=True)


@pytest.mark.parametrize("transport", ["memory", "local"])
def test_nothing_outside_of_the_folder_is_touched(transport: RunTransport, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    folder = tmp_path / "sent"
    for made in (outside, folder, folder / "parties"):
        made.mkdir(mode=0o700)
    (outside / "checkpoint-3.bin").write_bytes(b"precious")
    for name in ("friend", "passive-1"):
        (folder / "parties" / name).symlink_to(outside)
    with pytest.raises(CheckpointError, match="is a link or a file in place of a folder"):
        run(small_config(), folder, transport=transport)
    assert [path.name for path in outside.iterdir()] == ["checkpoint-3.bin"]


@pytest.mark.parametrize(("name", "at"), [("active", 3), ("passive-1", 1), ("passive-2", 2)])
@pytest.mark.sampled(every=3)
def test_an_intersection_in_which_a_party_was_killed_goes_on_and_counts_once(
    name: str, at: int, tmp_path: Path
) -> None:
    history = tmp_path / "history"
    alignment = {"protocol": "ecdh", "history": str(history), "runs_with_a_peer": 1}
    parties = Parties(small_config(alignment=alignment), tmp_path / "run")
    said = parties.play({name: Harm(Kind.ALIGNMENT, at)})
    assert all(one["kind"] for one in said.values())
    kept = {one: parties.run.get_party_path(one) / "alignment" for one in ("active", "passive-1")}
    assert all((kept[one] / one / "all" / "agreed.msgpack").exists() for one in kept)
    require_no_failure(parties.play())
    noted = {path.stem: path.read_text().count("\n") for path in history.glob("*.jsonl")}
    assert noted == {"active": 1, "passive-1": 1, "passive-2": 1}
    assert not any(folder.exists() for folder in kept.values())


# Parties that agreed to begin again by themselves: who dies is started again as it was before.


def change_rules(config: Config, rules: dict[str, Any]) -> Config:
    whole_rules = config.rules.model_dump(exclude_defaults=True) | rules
    return Config.model_validate(config.model_dump() | {"rules": whole_rules})


@pytest.mark.parametrize(("name", "kind"), SOON)
@pytest.mark.sampled(every=4)
def test_all_wait_for_who_was_killed_and_end_with_the_same_models(
    name: str, kind: Kind, whole: Path, tmp_path: Path
) -> None:
    parties = Parties(change_rules(config_of(), WAIT), tmp_path / "run")
    said = parties.play_watched_over({name: Harm(kind, SENT[name, kind])})
    require_no_failure(said)
    assert model_digests(parties.run.path) == model_digests(whole)
    stopped = [one["restarts"] for other, one in said.items() if other != name]
    assert any(stopped)
    reasons = [reason for each in stopped for reason in each]
    assert [why for why in reasons if not any(f"{phase}: " in why for phase in PHASES)] == []


def test_who_stays_away_is_waited_for_as_long_as_agreed(tmp_path: Path) -> None:
    parties = Parties(
        change_rules(config_of(), WAIT | {"patience_s": 5.0}), tmp_path / "run", meet_s=5.0
    )
    said = parties.play({"passive-1": Harm(Kind.CONTRIBUTION, 4)})
    others = [said[name] for name in ("active", "aggregator", "passive-2")]
    assert [one["kind"] for one in others] == ["PartyLeftError"] * 3, said
    assert [len(one["restarts"]) for one in others] == [1] * 3
    assert "active has no link to passive-1" in said["active"]["message"]
    assert "it did not come to active within" in said["active"]["message"]


def test_all_wait_for_who_was_frozen(whole: Path, tmp_path: Path) -> None:
    parties = Parties(change_rules(config_of(), WAIT | {"patience_s": 5.0}), tmp_path / "run")
    with parties.start({"passive-1": Harm(Kind.CONTRIBUTION, 4, signal.SIGSTOP)}):
        frozen = parties.processes["passive-1"].pid
        assert frozen
        state = Path(f"/proc/{frozen}/stat")
        wait_until(lambda: " T " in state.read_text(), "that it was frozen")
        again = parties.run.get_party_path("active") / "restarted"
        wait_until(again.exists, "that the others end the session")
        wait_until(lambda: listening(parties, "active"), "that they begin another")
        os.kill(frozen, signal.SIGCONT)
        said = parties.watch(list(parties.processes))
    require_no_failure(said)
    assert model_digests(parties.run.path) == model_digests(whole)
    assert len(said["passive-1"]["restarts"]) == 1


def test_there_is_an_end_to_beginning_again(tmp_path: Path) -> None:
    """Every session of the aggregator ends at its second sum."""
    parties = Parties(change_rules(config_of(), WAIT | {"restarts": 2}), tmp_path / "run")
    with parties.start({"aggregator": Harm(Kind.SUM, 1)}):
        for _ in range(3):
            parties.processes["aggregator"].join(LONG_S)
            assert not parties.processes["aggregator"].is_alive()
            parties.begin("aggregator", Harm(Kind.SUM, 1))
        said = parties.watch(["active", "passive-1", "passive-2"])
    assert {len(one["restarts"]) for one in said.values()} == {2}
    assert {one["kind"] for one in said.values()} <= {"PartyLeftError", "RunStoppedError"}


RETURN: dict[str, Any] = {"silent_passive": "recover", "patience_s": 20.0, "restarts": 2}


def listening(parties: Parties, name: str) -> bool:
    host, port = parties.find_address(name).split(":")
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
    config = change_rules(recovering(), RETURN)
    frozen = number == signal.SIGSTOP
    if frozen:
        train = config.train.model_copy(update={"epochs": 5})
        config = change_rules(config, {"patience_s": None}).model_copy(update={"train": train})
    parties = Parties(config, tmp_path / "run", timeout_s=5.0 if frozen else 60.0)
    active = parties.run.get_party_path("active")
    # The active is held before its second (third) epoch's checkpoint until passive-2 is back.
    harms = {
        "passive-2": Harm(Kind.CONTRIBUTION, 2, signal=number),
        "active": Harm(Kind.CHECKPOINT, 6 if frozen else 3, signal=None, until_back="passive-2"),
    }
    with parties.start(harms):
        if frozen:
            lines = active / "metrics.jsonl"
            harmed = parties.processes["passive-2"].pid or 0
            wait_until(lambda: lines.exists() and lines.read_bytes().count(b"\n") >= 2)
            os.kill(harmed, signal.SIGCONT)
        else:
            parties.processes["passive-2"].join(LONG_S)
            parties.begin("passive-2")
        said = parties.watch(list(parties.processes))
    require_no_failure(said)
    result = json.loads((active / "result.json").read_bytes())
    assert result["attendance"] == {"left": {}, "steps_without_all": 0}
    if frozen:  # it waits for its peers' part of a step that they finished, and then notices
        (why,) = said["passive-2"]["restarts"]
        assert "training: passive-2 expected sum-request of step 2" in why
        return
    (why,) = said["active"]["restarts"]
    assert "checkpoint: passive-2 fell silent and is back" in why
    contract = json.loads((active / "contract.json").read_bytes())
    resumed = contract["document"]["resumes"]["step"]
    assert f"from step {resumed}; checkpoint" in why
    assert why.startswith("nothing to do: ")
    assert resumed > 2
    assert len(contract["sessions"]) == 2
    assert set(model_digests(parties.run.path)) == {*parties.processes}


def test_without_restarts_who_comes_back_is_not_let_in(tmp_path: Path) -> None:
    parties = Parties(change_rules(recovering(), RETURN | {"restarts": 0}), tmp_path / "run")
    harms = {
        "passive-2": Harm(Kind.CONTRIBUTION, 2),
        "active": Harm(Kind.CHECKPOINT, 2, signal=None),
    }
    with parties.start(harms):
        parties.processes["passive-2"].join(LONG_S)
        parties.begin("passive-2", resume=True)
        wait_until(lambda: listening(parties, "passive-2"))
        (parties.run.get_party_path("active") / "go-on").touch()
        require_no_failure(parties.watch(["active"]))
    result = json.loads((parties.run.get_party_path("active") / "result.json").read_bytes())
    assert result["attendance"]["left"] == {"passive-2": 2}

"""A party that is killed, frozen or asked to end, in any phase or while it writes: the others end
and say who, or go on without it. Nothing is torn, and resuming gives the models of a run that
nothing befell.
"""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from secure_apfed.config import Config
from secure_apfed.exchange import Kind
from secure_apfed.runs.local import Way
from tests.local.processes import (
    Harm,
    Impatient,
    Parties,
    hidden_files,
    model_digests,
    nobody_failed,
    the_others_say_who_and_when,
)
from tests.secure_apfed.small_runs import small_config

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")

TRAIN = {"epochs": 3, "batch_size": 128, "learning_rate": 0.05, "device": "cpu"}
# Every role and every kind of message that it sends, and which of them it never comes to send.
SENT: dict[tuple[str, Kind], int] = {
    ("active", Kind.GREETING): 1,
    ("active", Kind.SESSION): 0,
    ("active", Kind.SIGNATURE): 2,
    ("active", Kind.ALIGNMENT): 1,
    ("active", Kind.SUM_SETUP): 0,
    ("active", Kind.READY): 3,
    ("active", Kind.REPRESENTATIONS): 7,
    ("active", Kind.CHECKPOINT): 4,
    ("active", Kind.END): 0,
    ("passive-1", Kind.GREETING): 0,
    ("passive-1", Kind.SIGNATURE): 1,
    ("passive-1", Kind.ALIGNMENT): 1,
    ("passive-1", Kind.SUM_SETUP): 0,
    ("passive-1", Kind.READY): 0,
    ("passive-1", Kind.CONTRIBUTION): 4,
    ("passive-1", Kind.SAVED): 0,
    ("aggregator", Kind.GREETING): 3,
    ("aggregator", Kind.SIGNATURE): 0,
    ("aggregator", Kind.READY): 1,
    ("aggregator", Kind.SUM): 5,
    ("aggregator", Kind.SAVED): 1,
    ("dealer", Kind.GREETING): 0,
    ("dealer", Kind.SIGNATURE): 3,
    ("dealer", Kind.ALIGNMENT): 1,
    ("dealer", Kind.READY): 1,
}
WRITTEN = [
    ("active", "checkpoint-6.bin", "torn"), ("passive-1", "checkpoint-6.bin", "whole"),
    ("aggregator", "contract.json", "whole"), ("active", "metrics.jsonl", "torn"),
    ("passive-1", "checkpoint-6.bin", "in place"), ("active", "checkpoint-6.bin", "in place"),
    ("passive-1", "contract.json", "torn"),
]  # fmt: skip
STOPPED = [
    ("active", Kind.ALIGNMENT), ("passive-1", Kind.CONTRIBUTION), ("active", Kind.REPRESENTATIONS),
    ("passive-1", Kind.SIGNATURE), ("passive-1", Kind.SAVED), ("aggregator", Kind.SUM),
    ("aggregator", Kind.READY), ("dealer", Kind.ALIGNMENT),
]  # fmt: skip
ASKED = [
    ("active", Harm(Kind.REPRESENTATIONS, 7, signal.SIGTERM, awaiting=True)),
    ("passive-1", Harm(Kind.CONTRIBUTION, 4, signal.SIGTERM)),
    ("dealer", Harm(Kind.ALIGNMENT, 1, signal.SIGTERM, awaiting=True)),
    ("aggregator", Harm(Kind.SAVED, 1, signal.SIGTERM)),
    ("passive-1", Harm(Kind.ALIGNMENT, 1, signal.SIGTERM, awaiting=True)),
]  # fmt: skip
# A role in each phase, between machines; over the same links.
APART: list[tuple[Way, list[tuple[str, Kind]]]] = [
    ("grpc", [("passive-1", Kind.CONTRIBUTION), ("active", Kind.SIGNATURE),
              ("dealer", Kind.ALIGNMENT), ("aggregator", Kind.READY), ("active", Kind.CHECKPOINT)]),
    ("relay", [("active", Kind.REPRESENTATIONS), ("aggregator", Kind.SUM)]),
]  # fmt: skip
Case: TypeAlias = tuple[str, Harm, Way]
CASES: dict[str, list[Case]] = {
    "killed": [(name, Harm(kind, at), "tcp") for (name, kind), at in SENT.items()],
    "killed while it writes": [
        (name, Harm(None, writing=file, moment=moment), "tcp") for name, file, moment in WRITTEN
    ],
    "frozen": [(name, Harm(kind, SENT[name, kind], signal.SIGSTOP), "tcp")
               for name, kind in STOPPED],
    "asked to end": [(name, harm, "tcp") for name, harm in ASKED],
    "between machines": [
        *((name, Harm(kind, SENT[name, kind], number), over)
          for number in (signal.SIGKILL, signal.SIGSTOP)
          for over, harmed in APART for name, kind in harmed),
        *((name, Harm(None, writing="checkpoint-6.bin"), over)
          for over, _ in APART for name in ("active", "passive-1")),
    ],
}  # fmt: skip
SAMPLED = {"killed": 6, "killed while it writes": 4, "frozen": 4, "asked to end": 3}


def cases() -> Iterator[Any]:
    """All; of each kind the first and every so many-th after it are fast."""
    for what, harms in CASES.items():
        for at, case in enumerate(harms):
            slow = [pytest.mark.slow] if at % SAMPLED.get(what, len(harms)) else []
            yield pytest.param(*case, marks=slow, id=f"{what}-{case[0]}-{at}")


def config_of() -> Config:
    return small_config(
        train=TRAIN,
        guard={"mechanism": "none", "noise": "reproducible_insecure"},
        alignment={"protocol": "circuit"},
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    said = Parties(config_of(), folder).play()
    nobody_failed(said)
    return folder


def test_every_kind_of_message_of_every_role_is_harmed_once(whole: Path) -> None:
    sent = set()
    for party in (whole / "parties").iterdir():
        for flow in json.loads((party / "transcript.json").read_bytes()):
            sent.add((flow["sender"], Kind(flow["kind"])))
    sent = {(name, kind) for name, kind in sent if name != "passive-2"} | {("active", Kind.END)}
    assert sent == set(SENT)


@pytest.mark.parametrize(("name", "harm", "over"), [*cases()])
def test_who_comes_to_harm_is_named_and_the_run_resumes_the_same(
    name: str, harm: Harm, over: Way, whole: Path, tmp_path: Path
) -> None:
    kind = Parties if over == "tcp" else Impatient
    frozen, asked = (harm.signal == number for number in (signal.SIGSTOP, signal.SIGTERM))
    patience: Any = {"timeout_s": 5.0, "silent_s": 5.0} if frozen else {}
    parties = kind(config_of(), tmp_path / "run", over=over, **patience)
    with parties.started({name: harm}):
        said = parties.watch([one for one in parties.processes if asked or one != name])
    if asked:
        assert "ended by SIGTERM" in said.pop(name)["message"]
    the_others_say_who_and_when(said, name)
    failed = [one["message"] for one in said.values() if one["kind"]]
    if harm.awaiting:
        assert any(f"{name} stopped the run: Terminated" in message for message in failed)
    if harm.writing:
        folder = parties.run.party(name)
        assert bool(hidden_files(folder)) is (harm.moment != "in place")
        if harm.writing.startswith("checkpoint"):
            assert (folder / harm.writing).exists() is (harm.moment == "in place")
    if not failed:  # all that a dealer dealt has come
        assert (name, harm.kind) == ("dealer", Kind.READY)
    elif harm.kind is Kind.END:  # the result is complete, and nobody needs to go on
        assert (parties.run.party("active") / "ended.json").exists()
        return
    else:
        nobody_failed(kind(config_of(), tmp_path / "run", over=over).play(resume=True))
        assert not hidden_files(parties.run.path)
    assert model_digests(parties.run.path) == model_digests(whole)


def recovering() -> Config:
    settings: dict[str, Any] = {
        "name": "recovering", "method": "apfed_c", "party_seeds": "shared_for_comparison",
        "data": {"dataset": "digits", "views": 4, "limit": 512},
        "model": {"network": "mlp", "hidden": [16], "representation": 8, "projection": 8},
        "train": {"epochs": 3, "batch_size": 128, "learning_rate": 0.1, "device": "cpu"},
        "secure_sum": {"scheme": "plain", "masks": "recoverable", "threshold": 2},
        "guard": {"mechanism": "none"}, "rules": {"minimum_spread": 0.0},
    }  # fmt: skip
    return Config.model_validate(settings)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(("kind", "at", "step"), [(Kind.CONTRIBUTION, 2, 2), (Kind.SAVED, 0, 4)])
def test_the_others_go_on_where_the_sum_recovers(
    kind: Kind, at: int, step: int, number: int, tmp_path: Path
) -> None:
    parties = Parties(recovering(), tmp_path / "run", timeout_s=5.0, silent_s=5.0)
    said = parties.play({"passive-2": Harm(kind, at, signal=number)})
    nobody_failed(said)
    active = parties.run.party("active")
    attendance = json.loads((active / "result.json").read_bytes())["attendance"]
    assert attendance["left"] == {"passive-2": step}


def test_who_left_comes_back_when_the_run_is_resumed(tmp_path: Path) -> None:
    """Its checkpoint is an older one; the others' are of where the run went on without it."""
    parties = Parties(recovering(), tmp_path / "run")
    harms = {"passive-2": Harm(Kind.CONTRIBUTION, 5), "active": Harm(Kind.REPRESENTATIONS, 29)}
    parties.play(harms)
    held = [sorted(parties.run.party(name).glob("checkpoint-*")) for name in harms]
    assert [path.name for path in held[0]] == ["checkpoint-0.bin", "checkpoint-4.bin"]
    assert [path.name for path in held[1]] == ["checkpoint-4.bin", "checkpoint-8.bin"]
    said = parties.play(resume=True)
    nobody_failed(said)
    result = json.loads((parties.run.party("active") / "result.json").read_bytes())
    assert result["attendance"] == {"left": {}, "steps_without_all": 0}


def test_who_was_ahead_by_a_checkpoint_is_resumed_again_and_again(
    whole: Path, tmp_path: Path
) -> None:
    parties = Parties(config_of(), tmp_path / "run")
    parties.play({"passive-1": Harm(Kind.SAVED, 1)})
    ahead = sorted(path.name for path in parties.run.party("passive-2").glob("checkpoint-*"))
    behind = sorted(path.name for path in parties.run.party("active").glob("checkpoint-*"))
    assert ahead > behind
    parties.play({"active": Harm(Kind.REPRESENTATIONS, 3)}, resume=True)
    for name in ("active", "passive-1", "passive-2"):
        assert list(parties.run.party(name).glob("checkpoint-*")), name
    nobody_failed(parties.play(resume=True))
    assert model_digests(parties.run.path) == model_digests(whole)


def test_checkpoints_of_another_run_or_party_are_refused(tmp_path: Path) -> None:
    """Of the same settings and people, but with the rows in another order; or of a peer."""
    one, other = (Parties(config_of(), tmp_path / name) for name in ("one", "other"))
    for parties in (one, other):
        parties.play({"active": Harm(Kind.REPRESENTATIONS, 0)})
    place, mine, key = one.run.party("passive-1"), "checkpoint-0.bin", "identity.pem"
    theirs, peer = other.run.party("passive-1"), one.run.party("passive-2")
    kept = {name: (place / name).read_bytes() for name in (mine, key)}
    for taken, told in (
        ({mine: theirs}, "with another identity than that of passive-1"),
        ({mine: theirs, key: theirs}, "whose rows stand in another order"),
        ({mine: peer}, "is of 'passive-2' with another identity"),
    ):
        for name, content in kept.items():
            whose = taken.get(name)
            (place / name).write_bytes((whose / name).read_bytes() if whose else content)
        with one.started(resume=True):
            assert told in one.watch(["passive-1"])["passive-1"]["message"]
    for name, content in kept.items():
        (place / name).write_bytes(content)
    nobody_failed(one.play(resume=True))


def test_nobody_begins_anew_over_what_others_hold(tmp_path: Path) -> None:
    parties = Parties(config_of(), tmp_path / "run")
    parties.play({"active": Harm(Kind.REPRESENTATIONS, 7)})
    held = {path: path.read_bytes() for path in parties.run.path.rglob("checkpoint-*")}
    lost = parties.run.party("active")
    for path in (*lost.glob("checkpoint-*"), *lost.glob("ledger-*")):
        path.unlink()
    said = parties.play(resume=True)  # the active begins anew, since it has nothing to go on from
    assert "begins anew, and the folder of passive-1 holds step" in said["passive-1"]["message"]
    for path, content in held.items():
        if path.parent.name != "active":
            assert path.read_bytes() == content


def test_nobody_begins_anew_over_votes_that_were_cast(tmp_path: Path) -> None:
    """At step 0 still, but a new alignment would put other people at the places that count."""
    config = small_config(
        train=TRAIN | {"epochs": 2}, guard={"mechanism": "none"},
        data={"dataset": "digits", "views": 3, "limit": 120, "labelled": 30},
        method={"name": "votes_randomised", "epsilon": 2.0, "prior": "labeller"}, passives={},
    )  # fmt: skip
    parties = Parties(config, tmp_path / "run")
    parties.play({"active": Harm(Kind.CHECKPOINT, 0)})
    for path in parties.run.party("active").glob("checkpoint-*"):
        path.unlink()
    said = parties.play(resume=True)
    assert "active begins anew, and" in said["passive-1"]["message"]
    assert "answers-passive-1.jsonl counts what passive-1 released" in said["passive-1"]["message"]


def test_a_checkpoint_that_was_lost_is_named_by_its_party(tmp_path: Path) -> None:
    parties = Parties(config_of(), tmp_path / "run")
    parties.play({"active": Harm(Kind.REPRESENTATIONS, 7)})
    for path in parties.run.party("passive-2").glob("checkpoint-*"):
        path.unlink()
    said = parties.play(resume=True)
    assert said["passive-2"]["kind"] == "CheckpointError"
    assert "passive-2 holds no step before it" in said["passive-2"]["message"]
    assert "passive-2 stopped the run: CheckpointError" in said["active"]["message"]

"""Where a party stands as its links and driver tell it, and how that is shown."""

import contextlib
import io
import json
import math
import re
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from rich.console import Console

from apfed_protocols.errors import PartyLeftError
from secure_apfed.cli import execute
from secure_apfed.config.file import dump_settings
from secure_apfed.console import progress as shown_progress
from secure_apfed.console.progress import Board
from secure_apfed.exchange import (
    Awaited,
    BrokenLink,
    Envelope,
    Frame,
    Kind,
    Links,
    Status,
    StatusTracker,
    run_script,
)
from secure_apfed.runs.events import build_schema
from secure_apfed.runs.outcome import Progress
from tests.secure_apfed.small_runs import run_as_json, small_config
from tests.secure_apfed.test_audit_log import FakeMeter
from tests.waiting import wait_until

LINE = jsonschema.Draft202012Validator(build_schema())
Answer = Frame | PartyLeftError
PATIENCE = 4
UNIT_S = 30
SILENT_S = PATIENCE * UNIT_S / 2


class Scripted:
    """A transport whose answers take so long, and note where the party stood while it waited."""

    def __init__(self, answers: list[tuple[float, Answer]]) -> None:
        self.now = 100.0
        self._answers = iter(answers)
        self.tracker = StatusTracker(lambda: self.now)
        self.seen: list[Status] = []

    def send_frame(self, receiver: str, frame: bytes) -> None:
        self.sent = receiver, frame

    def receive_frame(self, awaited: Awaited, timeout_s: float) -> Frame:
        took, answer = next(self._answers)
        self.now += took
        self.seen.append(self.tracker.build_status())
        if isinstance(answer, PartyLeftError):
            raise answer
        return answer

    def find_rejoining(self, names: Collection[str]) -> Collection[str]:
        return ()

    def list_broken_links(self) -> dict[str, BrokenLink]:
        return {}

    def close(self) -> None: ...


def frame_of(sender: str, kind: Kind, step: int = 0, sequence: int = 0) -> Frame:
    envelope = Envelope(
        session="unnamed",
        step=step,
        kind=kind,
        sender=sender,
        receiver="ann",
        sequence=sequence,
        payload=b"x" * 100,
    )
    header = envelope.header
    return sender, len(header).to_bytes(2, "big") + header + envelope.payload


def stood(answers: list[tuple[float, Answer]], *asked: str) -> tuple[list[Status], Status]:
    """Return where Ann stood at each wait for contributions of Bob and Cid, and in the end."""
    transport = Scripted(answers)
    meter = FakeMeter()
    tracker = transport.tracker
    tracker.start_session("ann", ["bob", "cid"], meter)
    assert {peer.state for peer in tracker.build_status().peers.values()} == {"expected"}
    tracker.observe_connection()
    links = Links("ann", ["bob", "cid"], transport.send_frame, observers=(tracker,))

    async def script() -> None:
        meter.charge(2.5)
        links.send("bob", Kind.REPRESENTATIONS, 7, b"z")
        for name in asked:
            await links.receive(
                name or ("bob", "cid"), Kind.CONTRIBUTION, min_senders=1, patience=PATIENCE
            )

    with contextlib.suppress(PartyLeftError), tracker:
        run_script(script(), transport, timeout_s=UNIT_S, observer=tracker)
    return transport.seen, tracker.build_status()


def test_who_is_awaited_grows_silent_and_speaks_again() -> None:
    short = SILENT_S - 1
    long = SILENT_S + 1
    _, frame = frame_of("bob", Kind.CONTRIBUTION)
    answers: list[tuple[float, Answer]] = [
        (short, ("bob", frame)),
        (long, frame_of("bob", Kind.CONTRIBUTION, sequence=1)),
        (0.1, frame_of("bob", Kind.CONTRIBUTION, sequence=2)),
    ]
    (first, second, third), end = stood(answers, "bob", "bob", "bob")
    assert [one.peers["bob"].state for one in (first, second, third)] == [
        "awaited",
        "silent",
        "awaited",
    ]
    assert second.peers["bob"].silent_s == second.peers["bob"].sign_s == pytest.approx(long)
    assert second.peers["cid"].sign_s == pytest.approx(short + long), "it never said a word"
    assert {one.peers["cid"].state for one in (first, second, third)} == {"connected"}
    assert second.waits is not None
    assert (second.waits.senders, second.waits.kinds) == (("bob",), (Kind.CONTRIBUTION,))
    assert second.waits.since_s == pytest.approx(long)
    assert second.waits.patience_s == 120
    assert (first.phase, first.step, first.epsilon) == ("training", 7, 2.5)
    assert end.phase == "ended"
    assert end.waits is None
    assert end.received_bytes == end.peers["bob"].received_bytes == 3 * len(frame)
    assert end.sent_bytes == end.peers["bob"].sent_bytes > 0


def test_a_word_of_one_does_not_make_the_other_less_silent() -> None:
    answers: list[tuple[float, Answer]] = [
        (32.0, frame_of("bob", Kind.CONTRIBUTION)),
        (32.0, frame_of("cid", Kind.CONTRIBUTION)),
    ]
    (_, second), _ = stood(answers, "", "")
    assert second.peers["cid"].silent_s == pytest.approx(64.0)
    assert second.peers["bob"].silent_s == pytest.approx(32.0)


def test_who_left_is_left_whether_it_said_so_or_not_until_all_begin_again() -> None:
    silence = PartyLeftError("nothing came", missing_parties=("cid",))
    _, end = stood([(1.0, silence)], "cid")
    assert (end.phase, end.peers["cid"].state) == ("failed", "left")
    assert end.peers["bob"].state == "connected"
    _, end = stood([(1.0, frame_of("bob", Kind.ABORT))], "bob")
    assert end.peers["bob"].state == "left"
    tracker = StatusTracker()
    for session in (1, 2):
        tracker.start_session("ann", ["bob"], FakeMeter())
        assert tracker.build_status().session == session
        assert (tracker.build_status().phase, tracker.build_status().list_peers("expected")) == (
            "connecting",
            ["bob"],
        )
        assert tracker.build_status().meets is None, "nobody said how long it waits"
        tracker.observe_missing({"bob": "its key is another"})
        assert tracker.build_status().peers["bob"].refusal == "its key is another"
        tracker.observe_connection()
        tracker.observe_departure(["bob"])
        assert tracker.build_status().list_peers("left") == ["bob"]


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown_progress, "_TICK_INTERVAL_S", 0.02)


def status(**changes: Any) -> Status:
    usual: dict[str, Any] = {
        "party": "ann",
        "phase": "training",
        "step": 3,
        "epsilon": float("inf"),
        "promise": "no guarantee",
        "waits": {
            "senders": ("bob",),
            "kinds": ("sum",),
            "step": 3,
            "since_s": 4.0,
            "patience_s": 240.0,
        },
        "peers": {
            "bob": {
                "state": "silent",
                "silent_s": 4.2,
                "sign_s": 5.25,
                "sent_bytes": 10,
                "received_bytes": 2_000_000,
            }
        },
    }
    return Status.model_validate({**usual, **changes})


def show_moments(*moments: Status, json_events: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, width=200)
    now: tuple[Status, ...] = ()
    reads = [0]

    def list_now() -> tuple[Status, ...]:
        reads[0] += 1
        return now

    board = Board(list_now)
    with shown_progress.show_board(board, json_events=json_events, console=console):
        for moment in moments:
            now = (moment,)
            before = reads[0]
            wait_until(lambda: reads[0] > before + 1, "that it is shown")  # noqa: B023 - at once
    return out.getvalue()


def test_a_log_has_a_line_a_change_and_no_more() -> None:
    bob = {
        "state": "awaited",
        "silent_s": 0.1,
        "sign_s": 0.1,
        "sent_bytes": 10,
        "received_bytes": 2_000_000,
    }
    well = status(peers={"bob": bob})
    lines = show_moments(status(), well, well, status(phase="ended", waits=None)).splitlines()
    assert len(lines) == 3
    assert lines[0] == (
        "ann: training, step 3; bob silent for 4 s; waits for sum of step 3 from bob since 4 s, "
        "gives up after 240 s; epsilon_x no guarantee  0.0 MB sent  2.0 MB received"
    )
    assert "silent" not in lines[1]
    assert lines[2].startswith("ann: ended")
    cid = {**bob, "state": "expected", "refusal": "its key is another"}
    here = {"bob": {**bob, "state": "connected"}, "cid": cid}
    meets = {"since_s": 12.3, "patience_s": 600.0}
    first = show_moments(status(phase="connecting", step=None, waits=None, meets=meets, peers=here))
    assert first.startswith(
        "ann: connecting; cid is expected: its key is another; waits for cid since 12 s, gives up "
        "after 600 s; 2 of 3 parties are here; "
    )


CONNECTED: dict[str, Any] = {
    "state": "connected",
    "silent_s": None,
    "sign_s": 0.1,
    "sent_bytes": 10,
    "received_bytes": 2,
}
BROKEN = {**CONNECTED, "broken": {"since_s": 2.2, "patience_s": 30.0, "why": "nobody is there"}}


def test_a_log_has_a_line_where_a_link_breaks_and_one_where_it_is_back() -> None:
    well = status(waits=None, peers={"bob": CONNECTED, "cid": CONNECTED})
    broken = status(waits=None, peers={"bob": BROKEN, "cid": CONNECTED})
    lines = [
        line
        for line in show_moments(well, broken, broken, well, broken).splitlines()
        if "link" in line
    ]
    breaks = (
        "ann: the link to bob is broken since 2 s (nobody is there); nothing to do: it is "
        "connected again by itself; waits 30 s, then bob has left"
    )
    assert [lines[0], lines[2]] == [breaks, breaks]
    assert re.fullmatch(r"ann: the link to bob is back, after \d s", lines[1])
    assert len(lines) == 3


@pytest.mark.parametrize("phase", ["connecting", "ended", "failed", "training"])
def test_a_link_is_not_back_where_its_peer_left_or_the_session_is_over(phase: str) -> None:
    broken = status(waits=None, peers={"bob": BROKEN})
    left = {**CONNECTED, "state": "left"} if phase == "training" else CONNECTED
    out = show_moments(broken, status(phase=phase, waits=None, peers={"bob": left}))
    assert "the link to bob is broken" in out
    assert "back" not in out


def test_events_and_the_panel_tell_that_a_link_is_broken(
    capsys: pytest.CaptureFixture[str],
) -> None:
    well = status(peers={"bob": CONNECTED})
    broken = status(peers={"bob": BROKEN})
    show_moments(well, broken, well, json_events=True)
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for event in events:
        LINE.validate(event)
    told = [event["status"]["peers"]["bob"]["broken"] for event in events]
    assert told == [None, BROKEN["broken"], None]
    board = Board()
    board.update_status(broken)
    out = io.StringIO()
    with shown_progress.show_board(
        board, console=Console(file=out, force_terminal=True, width=200)
    ):
        pass
    assert "the link to bob is broken since 2 s (nobody is there)" in out.getvalue()


def test_a_party_knows_which_of_its_links_are_broken_until_it_ends() -> None:
    links = {"bob": BrokenLink(since_s=1.0, patience_s=30.0, why="cut")}
    tracker = StatusTracker()
    tracker.start_session("ann", ["bob", "cid"], FakeMeter())
    assert tracker.build_status().peers["bob"].broken is None
    with tracker:
        tracker.observe_connection(lambda: links)
        told = tracker.build_status().peers["bob"].broken
        assert told is not None
        assert (told.since_s, told.patience_s, told.why) == (1.0, 30.0, "cut")
        assert tracker.build_status().peers["cid"].broken is None
        tracker.observe_departure(["bob"])
        assert tracker.build_status().peers["bob"].broken is None, "it left, which says more"
        tracker.start_session("ann", ["bob", "cid"], FakeMeter())
        assert tracker.build_status().peers["bob"].broken is None
        tracker.observe_connection(lambda: links)
    assert tracker.build_status().peers["bob"].broken is None


def test_a_panel_shows_every_party_and_what_it_waits_for() -> None:
    board = Board()
    board.update_status(status())
    board.update_status(status(party="bob", phase="set-up", peers={}))
    far: dict[str, Any] = {"epochs": 9, "step": 3, "steps": 30, "wire_bytes": 1, "epsilon": 1.0}
    board.update_progress(Progress(epoch=2, loss=0.5, accuracy=None, **far))
    out = io.StringIO()
    with shown_progress.show_board(
        board, console=Console(file=out, force_terminal=True, width=200)
    ):
        pass
    words = ("epoch 2/9", "bob silent for 4 s", "set-up", "sum of step 3 from bob")
    assert not [text for text in words if text not in out.getvalue()]


def test_events_are_objects_that_programs_can_read(capsys: pytest.CaptureFixture[str]) -> None:
    quiet = status(peers={}, waits=None)
    show_moments(quiet, quiet, status(), json_events=True)
    events = [json.loads(line)["status"] for line in capsys.readouterr().out.splitlines()]
    assert events[0]["epsilon"] == "inf"
    assert [event["peers"] for event in events].count({}) == 1, "said twice, and nothing changed"
    assert events[-1]["peers"]["bob"] == {
        "state": "silent",
        "silent_s": 4.2,
        "sign_s": 5.25,
        "sent_bytes": 10,
        "received_bytes": 2_000_000,
        "refusal": "",
        "broken": None,
    }
    for event in events:
        LINE.validate({"status": event})
        del event["at"]
        assert Status.model_validate(event)


METRIC = re.compile(r'secure_apfed_(\w+)\{((?:\w+="[\w.-]+",?)*)\} ([0-9.e+-]+|\+Inf)')


def metrics_of(path: Path) -> dict[str, float]:
    """By name and labels; all of a metric stand together, behind its type."""
    found = {}
    kinds = []
    for line in path.read_text().splitlines():
        if (kind := re.fullmatch(r"# TYPE secure_apfed_(\w+) (?:gauge|counter)", line)) is not None:
            kinds.append(kind[1])
        else:
            metric = METRIC.fullmatch(line)
            assert metric, line
            assert metric[1] == kinds[-1]
            found[f"{metric[1]} {metric[2]}".strip()] = float(metric[3])
    assert len(kinds) == len(set(kinds))
    return found


def test_a_file_tells_prometheus_where_each_party_stands(tmp_path: Path) -> None:
    path, board = tmp_path / "apfed.prom", Board()
    board.update_status(status(session=2))
    far: dict[str, Any] = {"loss": 0.5, "accuracy": None, "wire_bytes": 1, "epsilon": 1.0}
    with shown_progress.write_metrics(board, path):
        assert "epochs " not in path.read_text(), "nothing trains"
        board.update_progress(Progress(epoch=2, epochs=9, step=3, steps=30, **far))
        wait_until(lambda: "epochs" in path.read_text(), "the next writing")
        path.unlink()
        board.update_status(status(phase="ended", session=2))
    bob = 'party="ann",peer="bob"'
    assert metrics_of(path) == {
        'session party="ann"': 2,
        'step party="ann"': 3,
        'phase party="ann",phase="ended"': 1,
        'epsilon party="ann",figure="epsilon_x"': math.inf,
        f"sent_bytes_total {bob}": 10,
        f"received_bytes_total {bob}": 2e6,
        f"peer_last_sign_seconds {bob}": 5.25,
        "epochs_done": 2,
        "epochs": 9,
        "steps_done": 3,
        "steps": 30,
    }
    assert (path.stat().st_mode & 0o777, len(list(tmp_path.iterdir()))) == (0o644, 1)
    with (
        pytest.raises(FileNotFoundError, match=r"none.*a\.prom"),
        shown_progress.write_metrics(board, tmp_path / "none" / "a.prom"),
    ):
        raise AssertionError("it began")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
def test_what_a_real_run_says_is_as_its_schema(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["party", "--json-events-schema"]) == 0
    line = jsonschema.Draft202012Validator(json.loads(capsys.readouterr().out))
    config = tmp_path / "run.yaml"
    config.write_text(dump_settings(small_config("tvfl")))
    run = ["run", config, "--output", tmp_path / "run", "--transport", "local"]
    files = run_as_json(capsys, *run, "--prepare")["parties"]
    command = [sys.executable, "-m", "secure_apfed.cli", "party", "--json-events", "--config"]
    processes = {
        name: subprocess.Popen(
            [*command, file, "--metrics-file", str(tmp_path / f"{name}.prom")],
            stdout=subprocess.PIPE,
            text=True,
        )
        for name, file in files.items()
    }
    kinds = set[str]()
    last = dict[str, Any]()
    for name, process in processes.items():
        said = [json.loads(one) for one in process.communicate(timeout=240)[0].splitlines()]
        assert process.returncode == 0
        for event in said:
            line.validate(event)
            kinds |= {*event} if len(event) == 1 else {"result"}
        last = next(event["status"] for event in reversed(said) if "status" in event)
        metrics = metrics_of(tmp_path / f"{name}.prom")
        assert metrics[f'phase party="{name}",phase="ended"'] == 1
        for peer, own in last["peers"].items():
            for way in ("sent", "received"):
                link = f'{way}_bytes_total party="{name}",peer="{peer}"'
                assert metrics[link] == own[f"{way}_bytes"] > 0
    assert kinds - {"work"} == {"status", "progress", "result"}
    assert execute(["party", "--config", str(tmp_path / "none.yaml"), "--json-events"]) == 2
    error = json.loads(capsys.readouterr().out)
    line.validate(error)
    for wrong in ({}, {**error, "more": 1}, {"status": {**last, "secret": 1}}):
        assert not line.is_valid(wrong)


def test_a_study_tells_how_long_the_rest_takes_whatever_was_there_before(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = [0.0]
    with shown_progress.show_count("runs", quiet=False, clock=lambda: now[0]) as on_done:
        for done in range(1, 9):
            now[0] += 1 if done < 5 else 600  # the first four were there
            on_done(done, 12 if done < 8 else 8)
    assert capsys.readouterr().err.splitlines() == [
        "runs: 1 of 12",
        "runs: 5 of 12  about 24 min left",
        "runs: 6 of 12  about 41 min left",
        "runs: 7 of 12  about 38 min left",
        "runs: 8 of 8",
    ]


def test_one_cause_of_several_absent_parties_is_said_once() -> None:
    tracker = StatusTracker()
    tracker.start_session("ann", ["bob", "cid", "dan"], None, meeting_timeout_s=60)
    tracker.observe_missing({"bob": "no relay", "cid": "no relay", "dan": "its key is another"})
    told = shown_progress._list_troubles(tracker.build_status())
    assert told == ["bob and cid are expected: no relay", "dan is expected: its key is another"]

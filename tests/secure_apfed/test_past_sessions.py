"""Totals of a run that was broken off and resumed are of all its sessions: nothing that left is
forgotten, and a run that nothing befell has the totals that it always had.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from apfed_protocols.seal import fresh_identity
from secure_apfed.errors import CheckpointError
from secure_apfed.exchange import Envelope, Flow, Kind, StatusTracker
from secure_apfed.organisations.own_record import OwnRecord
from secure_apfed.runs.audit_log import AuditLog, ContractLine
from secure_apfed.runs.past_sessions import PastSessions, load_logged_sessions, load_session_totals
from secure_apfed.runs.run import run
from tests.secure_apfed.small_runs import interrupt_run, small_config
from tests.secure_apfed.stored_formats import STORED

TRAIN = {"epochs": 2, "batch_size": 128, "learning_rate": 0.05, "device": "cpu"}


def count_bytes(flows: Any) -> dict[tuple[str, str, str], int]:
    """Return the bytes by sender, receiver and kind."""
    return {
        (flow["sender"], flow["receiver"], str(flow["kind"])): flow["wire_bytes"] for flow in flows
    }


def load_document(path: Path) -> Any:
    return json.loads(path.read_bytes())


@pytest.mark.slow
def test_totals_of_a_run_in_memory_count_what_was_broken_off(tmp_path: Path) -> None:
    config = small_config(train=TRAIN)
    folder = tmp_path / "run"
    whole = run(config, tmp_path / "whole")
    steps = whole.steps
    assert (whole.sessions, steps) == (1, 6)
    assert not (tmp_path / "whole" / "broken-off.json").exists()
    interrupt_run(config, folder, at_step=2)
    first = load_document(folder / "broken-off.json")
    interrupt_run(config, folder, at_step=5, resume=True)  # from step 0: 3 a checkpoint
    second = load_document(folder / "broken-off.json")
    assert (second["sessions"], second["steps"]) == (2, 7)
    result = run(config, folder, resume=True)  # from step 3
    written = load_document(folder / "result.json")
    assert (result.sessions, result.steps) == (written["sessions"], written["steps"]) == (3, 10)
    assert result.accuracy == whole.accuracy
    assert result.wire_bytes > whole.wire_bytes
    assert written["seconds"] >= second["seconds"] >= first["seconds"] > 0
    assert not (folder / "broken-off.json").exists()
    way = ("active", "passive-1", "representations")
    once = count_bytes(load_document(tmp_path / "whole" / "transcript.json"))[way]
    every = count_bytes(load_document(folder / "transcript.json"))[way]
    # 2 + 5 + 3 steps in place of 6, and of one size but for the last of an epoch
    assert 1.6 < every / once < 1.9
    assert count_bytes(second["flows"])[way] < every
    total = sum(flow["wire_bytes"] for flow in load_document(folder / "transcript.json"))
    assert written["wire_bytes"] == total


def test_a_damaged_record_says_what_is_lost_without_it(tmp_path: Path) -> None:
    path = tmp_path / "broken-off.json"
    assert load_session_totals(path) == PastSessions()
    path.write_text('{"sessions": 0}')
    with pytest.raises(CheckpointError, match="or remove it: then the totals lack"):
        load_session_totals(path)


@pytest.mark.parametrize("party", ["bank", "lab", "aggregator"])
@pytest.mark.parametrize("number", [1, 2])
def test_a_log_tells_exactly_what_its_party_counted(party: str, number: int) -> None:
    folder = STORED / str(number) / "apart" / "parties" / party
    past = load_logged_sessions(folder / "audit.log")
    logged = {
        (flow.sender, flow.receiver, flow.kind.value): {**asdict(flow), "kind": flow.kind.value}
        for flow in (*past.sent, *past.received)
        # The active's results are written before it says that the session ends.
        if (party, flow.kind) != ("bank", Kind.END)
    }
    counted = {
        (flow["sender"], flow["receiver"], flow["kind"]): flow
        for flow in load_document(folder / "transcript.json")
    }
    assert logged == counted
    assert past.sessions == 1


class NothingReleased:
    charges = 0
    promise: Any = None


def log_of(path: Path, openings: list[list[tuple[float, Any]]]) -> Path:
    """Write an audit log of these lines; each inner list is a process that was killed."""
    clock = [0.0]
    identity = fresh_identity()
    for lines in openings:
        clock[0] = lines[0][0]
        log = AuditLog(
            path,
            "bank",
            identity,
            {"lab": identity.public},
            NothingReleased(),
            clock=lambda: clock[0],
        )
        for at, line in lines:
            clock[0] = at
            if isinstance(line, ContractLine):
                log._write_line(line.model_copy(update={"at": at}))
            elif line is not None:
                log.observe_outgoing(line, b"x" * (line.step + 200))
    return path


def envelope(kind: Kind, step: int, session: str = "s") -> Envelope:
    return Envelope(
        session=session,
        step=step,
        kind=kind,
        sender="bank",
        receiver="lab",
        sequence=0,
        payload=b"",
    )


def make_agreed(resumes: int | None) -> ContractLine:
    return ContractLine(at=0, session="s", contract="0" * 64, resumes=resumes)


def test_sessions_steps_and_seconds_of_a_log_add_up(tmp_path: Path) -> None:
    greeting = envelope(Kind.GREETING, -1, "unnamed")
    path = log_of(
        tmp_path / "audit.log",
        [
            [
                (10, greeting),
                (11, make_agreed(None)),
                (12, envelope(Kind.READY, -1)),
                (13, envelope(Kind.REPRESENTATIONS, 0)),
                (17, envelope(Kind.REPRESENTATIONS, 4)),
                (40, envelope(Kind.ABORT, -1)),
            ],
            [(50, greeting)],  # nobody came
            [
                (60, greeting),
                (61, make_agreed(3)),
                (62, envelope(Kind.REPRESENTATIONS, 3)),
                (66, envelope(Kind.CHECKPOINT, 6)),
            ],
        ],
    )
    past = load_logged_sessions(path)
    assert past.sessions == 2
    assert past.steps == 5 + 3
    assert past.seconds == (17 - 12) + (66 - 60)
    (greetings,) = [flow for flow in past.sent if flow.kind is Kind.GREETING]
    assert (greetings.messages, greetings.wire_bytes) == (3, 3 * 199)
    (representations,) = [flow for flow in past.sent if flow.kind is Kind.REPRESENTATIONS]
    assert (representations.first_step, representations.last_step) == (0, 4)
    assert representations.wire_bytes == 200 + 204 + 203
    to, back = past.count_bytes()["lab"]
    assert (to, back) == (sum(flow.wire_bytes for flow in past.sent), 0)


def test_a_log_that_is_not_there_tells_of_no_sessions(tmp_path: Path) -> None:
    assert load_logged_sessions(tmp_path / "audit.log") == PastSessions()


def test_an_altered_log_is_refused(tmp_path: Path) -> None:
    path = log_of(tmp_path / "audit.log", [[(1, envelope(Kind.GREETING, -1, "unnamed"))]])
    path.write_bytes(path.read_bytes().replace(b'"size":199', b'"size":198'))
    with pytest.raises(CheckpointError, match="not chained"):
        load_logged_sessions(path)


def test_status_and_record_of_a_party_go_on_from_its_past() -> None:
    flow = Flow("bank", "lab", Kind.REPRESENTATIONS, 3, 250, 300, 0, 2)
    past = PastSessions(
        sessions=1, sent=(flow,), received=(replace(flow, sender="lab", receiver="bank"),)
    )
    status = StatusTracker()
    meter: Any = NothingReleased()
    from secure_apfed.exchange.status import _BEFORE_FIRST_SESSION

    meter.promise = _BEFORE_FIRST_SESSION
    status.start_session("bank", ["lab", "hub"], meter, earlier_bytes_by_peer=past.count_bytes())
    status.observe_outgoing(envelope(Kind.REPRESENTATIONS, 3), b"x" * 40)
    peers = status.build_status().peers
    assert (peers["lab"].sent_bytes, peers["lab"].received_bytes) == (340, 300)
    assert (peers["hub"].sent_bytes, peers["hub"].received_bytes) == (0, 0)
    record = OwnRecord("bank", "active", small_config(), None, active="bank", earlier_sessions=past)
    record.observe_outgoing(envelope(Kind.REPRESENTATIONS, 3), b"x" * 40)
    (total,) = record.sent_by_me.flows
    assert (total.messages, total.wire_bytes, total.last_step) == (4, 340, 3)
    assert record.received_by_me.wire_bytes == 300

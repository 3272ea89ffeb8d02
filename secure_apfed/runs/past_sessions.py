"""The totals of a run's earlier sessions: bytes by receiver and kind, steps, seconds.

Run by: each party in a process of its own, from its audit log, which a killed process leaves
intact. A process that simulates all parties has no audit log: when a session is interrupted, it
writes the totals into the run's folder. Messages of a repeated step count again, since they were
sent again.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from secure_apfed.base.files import load_json, to_json, write_atomically
from secure_apfed.errors import CheckpointError
from secure_apfed.exchange import BEFORE_TRAINING, Envelope, Flow, Kind
from secure_apfed.exchange.links import UNNAMED_SESSION, count_overhead
from secure_apfed.runs.audit_log import ContractLine, FrameLine, OpeningLine, iter_lines

__all__ = [
    "NO_EARLIER_SESSIONS",
    "PastSessions",
    "load_logged_sessions",
    "load_session_totals",
    "save_session_totals",
]

_KINDS_WITHOUT_STEP = (Kind.ABORT, Kind.ALIVE)
"""Kinds of message that belong to no step and come at any time."""
_KINDS_OF_NEXT_STEP = (Kind.CHECKPOINT, Kind.SAVED)
"""Kinds of message whose step is the next one."""


@dataclass(frozen=True, kw_only=True)
class PastSessions:
    """The sessions of a run before this one.

    Attributes:
        sessions: number of sessions whose contract all parties signed.
        steps: number of steps that were begun; repeated steps count again.
        seconds: time of training.
        sent, received: messages and bytes by sender, receiver and kind.
    """

    sessions: int = 0
    steps: int = 0
    seconds: float = 0.0
    sent: tuple[Flow, ...] = ()
    received: tuple[Flow, ...] = ()

    def count_bytes(self) -> dict[str, tuple[int, int]]:
        """Return the bytes sent to, and received from, each peer, by the peer's name."""
        bytes_by_peer: dict[str, tuple[int, int]] = {}
        for flow in self.sent:
            sent, received = bytes_by_peer.get(flow.receiver, (0, 0))
            bytes_by_peer[flow.receiver] = (sent + flow.wire_bytes, received)
        for flow in self.received:
            sent, received = bytes_by_peer.get(flow.sender, (0, 0))
            bytes_by_peer[flow.sender] = (sent, received + flow.wire_bytes)
        return bytes_by_peer


NO_EARLIER_SESSIONS = PastSessions()


@dataclass
class _LoggedSession:
    """The steps and times of a session in an audit log, while the log is read.

    Attributes:
        first_step: number of the step from which the session started or resumed.
        next_step: one more than the number of the last step that was begun.
        training_start: time of the last message before training, in seconds since 1970; None: no
            message yet.
        last_at: time of the last message, in seconds since 1970.
        name: name of the session, which is in the header of each envelope.
    """

    first_step: int = 0
    next_step: int = 0
    training_start: float | None = None
    last_at: float = 0.0
    name: str = UNNAMED_SESSION

    @property
    def steps(self) -> int:
        """The number of steps that it began."""
        return max(0, self.next_step - self.first_step)

    @property
    def seconds(self) -> float:
        """The seconds between the start of training and the last training message."""
        if self.training_start is None or not self.steps:
            return 0.0
        return max(0.0, self.last_at - self.training_start)

    def add_frame(self, frame: FrameLine) -> None:
        """Update the session's times and steps by a logged frame; control messages do not count."""
        if frame.kind in _KINDS_WITHOUT_STEP:
            return
        self.last_at = frame.at
        if frame.step == BEFORE_TRAINING:
            self.training_start = frame.at
        else:
            next_step = frame.step if frame.kind in _KINDS_OF_NEXT_STEP else frame.step + 1
            self.next_step = max(self.next_step, next_step)


@dataclass
class _RouteTotals:
    """The totals of the envelopes of one kind from one party to another, while a log is read.

    Attributes:
        messages: number of envelopes.
        payload_bytes, wire_bytes: bytes of the payloads, and of the whole frames.
        steps: the step of the first envelope, and the highest step; empty before the first.
    """

    messages: int = 0
    payload_bytes: int = 0
    wire_bytes: int = 0
    steps: list[int] = field(default_factory=list)

    def add_frame(self, payload_bytes: int, frame: FrameLine) -> None:
        """Add a logged frame with so many bytes of payload."""
        self.messages += 1
        self.payload_bytes += payload_bytes
        self.wire_bytes += frame.size
        if self.steps:
            first, highest = self.steps
            self.steps = [first, max(frame.step, highest)]
        else:
            self.steps = [frame.step, frame.step]


def load_logged_sessions(path: Path) -> PastSessions:
    """Return the totals of the sessions in a party's audit log; zeros without a log.

    Raises CheckpointError: the log was altered from some line on.
    """
    if not path.is_file():
        return NO_EARLIER_SESSIONS
    own_name = ""
    session_count = 0
    sessions: list[_LoggedSession] = []
    totals_by_route: dict[tuple[str, str, Kind], _RouteTotals] = {}
    for line in iter_lines(path):
        if isinstance(line, OpeningLine):
            own_name = line.party
            sessions.append(_LoggedSession())
        elif isinstance(line, ContractLine):
            session_count += 1
            sessions[-1].name = line.session
            sessions[-1].first_step = line.resumes or 0
            sessions[-1].next_step = line.resumes or 0
        elif isinstance(line, FrameLine):
            sessions[-1].add_frame(line)
            is_sent = line.event == "sent"
            sender = own_name if is_sent else line.peer
            receiver = line.peer if is_sent else own_name
            totals = totals_by_route.setdefault((sender, receiver, line.kind), _RouteTotals())
            payload_bytes = _payload_size(line, sender, receiver, sessions[-1].name)
            totals.add_frame(payload_bytes, line)
    flows = []
    for (sender, receiver, kind), totals in totals_by_route.items():
        first_step, highest_step = totals.steps
        flows.append(
            Flow(
                sender=sender,
                receiver=receiver,
                kind=kind,
                messages=totals.messages,
                payload_bytes=totals.payload_bytes,
                wire_bytes=totals.wire_bytes,
                first_step=first_step,
                last_step=highest_step,
            )
        )
    return PastSessions(
        sessions=session_count,
        steps=sum(session.steps for session in sessions),
        seconds=sum(session.seconds for session in sessions),
        sent=tuple(flow for flow in flows if flow.sender == own_name),
        received=tuple(flow for flow in flows if flow.sender != own_name),
    )


def _payload_size(frame: FrameLine, sender: str, receiver: str, session: str) -> int:
    """Return the number of bytes of a frame's payload, before encryption.

    It is the frame's size without the header and without the overhead of authenticated encryption.

    `session`: name of the session, which the header contains.
    """
    envelope = Envelope(
        session=session,
        step=frame.step,
        kind=frame.kind,
        sender=sender,
        receiver=receiver,
        sequence=frame.sequence,
        payload=b"",
    )
    return frame.size - count_overhead(envelope, sealed=session != UNNAMED_SESSION)


class _Flow(BaseModel):
    """A `Flow` as stored in a file: messages and bytes of one kind from one party to another."""

    model_config = ConfigDict(extra="ignore")

    sender: str
    receiver: str
    kind: Kind
    messages: int = Field(ge=0)
    payload_bytes: int = Field(ge=0)
    wire_bytes: int = Field(ge=0)
    first_step: int
    last_step: int


class _SessionTotals(BaseModel):
    """The totals of all sessions up to an interruption, as stored in a file."""

    model_config = ConfigDict(extra="ignore")

    sessions: int = Field(ge=1)
    steps: int = Field(ge=0)
    seconds: float = Field(ge=0, allow_inf_nan=False)
    flows: tuple[_Flow, ...]


def save_session_totals(
    path: Path, flows: Iterable[Flow], *, sessions: int, steps: int, seconds: float
) -> None:
    """Write the totals of all sessions of a run so far, when a session is interrupted.

    Args:
        path: the file.
        flows: messages and bytes by link and kind.
        sessions: number of sessions, with the interrupted one.
        steps: number of steps that were begun; repeated steps count again.
        seconds: time of training.
    """
    content: Mapping[str, Any] = {
        "sessions": sessions,
        "steps": steps,
        "seconds": seconds,
        "flows": [{**vars(flow), "kind": flow.kind.value} for flow in flows],
    }
    write_atomically(path, to_json(content, indent=2).encode() + b"\n")


def load_session_totals(path: Path) -> PastSessions:
    """Return the totals that `save_session_totals` wrote; zeros if no session was interrupted.

    Raises CheckpointError: the file is damaged.
    """
    if not path.is_file():
        return NO_EARLIER_SESSIONS
    try:
        stored = load_json(path, _SessionTotals)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}, or remove it: then the totals lack what came after the newest checkpoint"
        ) from None
    flows = tuple(Flow(**dict(flow)) for flow in stored.flows)
    return PastSessions(
        sessions=stored.sessions, steps=stored.steps, seconds=stored.seconds, sent=flows
    )

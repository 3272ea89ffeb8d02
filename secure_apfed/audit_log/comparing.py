"""Two parties' audit logs of the link between them: equal, or where they part.

Run by: either of them, or whom both handed their logs to. What one sent, the other must have
received, byte for byte and in order. A session may have ended before the last frames arrived, so at
the end of each session the receiver may lack some; anything else is told: a frame that came altered
or that nobody sent, one that is missing in the middle, or lines that a log lost. Both logs are read
line by line, and once for each direction.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from secure_apfed.audit_log.lines import Frame, Opened, Refused
from secure_apfed.audit_log.reading import Summary, log_at, read_lines, verify_log
from secure_apfed.errors import CheckpointError

__all__ = ["Comparison", "Direction", "Parting", "compare_logs"]


@dataclass(frozen=True, kw_only=True)
class Parting:
    """Where the logs of a direction part; a line is null where its log has none there.

    Attributes:
        sent, received: what each log says there, in words.
    """

    sent_line: int | None
    sent: str
    received_line: int
    received: str


@dataclass(frozen=True, kw_only=True)
class Direction:
    """From a sender to a receiver.

    Attributes:
        equal, equal_size: envelopes that both have, and their bytes.
        unreceived, unreceived_size: what the sender sent at the end of sessions and the receiver
            never had; where the logs part, those before that.
        parting: where they part; None: nowhere.
    """

    sender: str
    receiver: str
    equal: int
    equal_size: int
    unreceived: int
    unreceived_size: int
    parting: Parting | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Both directions of a link, and what each log says by itself."""

    logs: tuple[Summary, Summary]
    directions: tuple[Direction, Direction]

    @property
    def agree(self) -> bool:
        """Whether the logs part nowhere."""
        return all(one.parting is None for one in self.directions)

    def as_json(self) -> dict[str, Any]:
        """In plain values."""
        return {
            "agree": self.agree,
            "logs": [one.as_json() for one in self.logs],
            "directions": [asdict(one) for one in self.directions],
        }


@dataclass(frozen=True)
class _Logged:
    """A frame in a log: which opening of the log it belongs to, its line, and what that says."""

    opening: int
    number: int
    line: Frame | Refused

    def __str__(self) -> str:
        line = self.line
        if isinstance(line, Refused):
            what = "a frame that was refused"
        else:
            step = "" if line.step < 0 else f" of step {line.step}"
            what = f"{line.kind}{step}, number {line.sequence}"
        return f"{what}, {line.size} bytes, SHA-256 {line.digest[:16]}..."


def compare_logs(one: Path, other: Path) -> Comparison:
    """Verify two parties' logs, and compare what they say of the link between them.

    Args:
        one: a party's log, or its folder.
        other: that of the party at the other end.

    Raises:
        CheckpointError: a log that does not hold together; or the two are not the ends of a link.
    """
    logs = verify_log(one), verify_log(other)
    first, second = logs
    _require_peers(first, second)
    _require_peers(second, first)
    return Comparison(logs=logs, directions=(_direction(first, second), _direction(second, first)))


def _require_peers(one: Summary, other: Summary) -> None:
    """Refuse logs whose parties do not know each other by these identities."""
    known = one.peers.get(other.party)
    if known is None:
        raise CheckpointError(
            f"{one.path} is the log of {one.party}, who has no link to {other.party}, whose log is "
            f"{other.path}; compare the logs of two parties of one run"
        )
    if known != other.identity:
        raise CheckpointError(
            f"{one.path}: {one.party} knows {other.party} by the identity {known[:16]}..., and "
            f"{other.path} is signed by {other.identity[:16]}...: it is of another run, or "
            "somebody wrote it anew with another key"
        )


def _direction(sender: Summary, receiver: Summary) -> Direction:
    sent = _frames(sender.path, receiver.party, ("sent",))
    equal = equal_size = unreceived = unreceived_size = 0
    parting = None
    at = next(sent, None)
    for got in _frames(receiver.path, sender.party, ("received", "refused")):
        expected, skipped, skipped_size = at, 0, 0
        while at is not None and at.line.digest != got.line.digest:
            # Then the rest of that session never arrived.
            opening = at.opening
            while at is not None and at.opening == opening:
                skipped, skipped_size = skipped + 1, skipped_size + at.line.size
                at = next(sent, None)
        if at is None:
            parting = _parting(expected, got, sender)
            break
        equal, equal_size = equal + 1, equal_size + got.line.size
        unreceived, unreceived_size = unreceived + skipped, unreceived_size + skipped_size
        at = next(sent, None)
    while parting is None and at is not None:
        unreceived, unreceived_size = unreceived + 1, unreceived_size + at.line.size
        at = next(sent, None)
    return Direction(
        sender=sender.party, receiver=receiver.party, equal=equal, equal_size=equal_size,
        unreceived=unreceived, unreceived_size=unreceived_size, parting=parting,
    )  # fmt: skip


def _parting(expected: _Logged | None, got: _Logged, sender: Summary) -> Parting:
    lost = "; a machine that loses power may lose lines" if sender.unsigned or sender.torn else ""
    return Parting(
        sent_line=expected.number if expected else None,
        sent=str(expected) if expected else f"nothing more{lost}",
        received_line=got.number,
        received=str(got),
    )


def _frames(path: Path, peer: str, events: tuple[str, ...]) -> Iterator[_Logged]:
    """What a log says of one direction of a link, in order."""
    opening = 0
    for number, line in read_lines(log_at(path)):
        if isinstance(line, Opened):
            opening += 1
        elif isinstance(line, Frame | Refused) and line.peer == peer and line.event in events:
            yield _Logged(opening, number, line)

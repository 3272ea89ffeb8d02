"""Verifying an audit log that may be anybody's: its chain, its signatures, and what adds up.

Run by: its own party, or whom it was handed to. Read line by line, so a log of any length takes the
same memory. What it shows: that the lines are as they were when the log was last signed by the
holder of the identity that it names. What it cannot show: that the party wrote down what it sent.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.identity import verify
from secure_apfed.audit_log.lines import (
    FILE_NAME,
    MOST_PEERS,
    PURPOSE,
    Chain,
    Frame,
    Line,
    Opened,
    Refused,
    Signed,
    parse_line,
)
from secure_apfed.errors import CheckpointError
from secure_apfed.exchange import Kind
from secure_apfed.folder_files import open_plain
from secure_apfed.names import ReleaseFigure

__all__ = ["Flow", "Summary", "log_at", "read_lines", "verify_log"]


@dataclass(frozen=True, kw_only=True)
class Flow:
    """Envelopes of one kind to or from one peer; kind: null of those that were refused."""

    peer: str
    event: str
    kind: Kind | None
    envelopes: int
    size: int


@dataclass(kw_only=True)
class Summary:
    """What a log that holds together says.

    Attributes:
        path: of the log; head: the chain of its last line, hex.
        party, identity: whose log it is, by its last opening; peers: whom that party knows, by
            name, with their identities.
        lines: whole ones; opened: how often a process opened it; agreed: sessions that began.
        first_at, last_at: seconds since 1970, by the party's clock.
        cut: bytes of torn lines that were cut off; torn: bytes of one at the end now.
        unsigned: lines after the last signature; of a log that was closed, 0.
        figure, epsilon: the last figure of what it let out, and how it is called; 0 where that was
            nothing.
    """

    path: Path
    head: str = ""
    party: str = ""
    identity: str = ""
    peers: dict[str, str] = field(default_factory=dict)
    lines: int = 0
    opened: int = 0
    agreed: int = 0
    first_at: float = 0.0
    last_at: float = 0.0
    cut: int = 0
    torn: int = 0
    unsigned: int = 0
    figure: ReleaseFigure = "epsilon_x"
    epsilon: float = 0.0
    _flows: dict[tuple[str, str, Kind | None], Flow] = field(default_factory=dict, repr=False)

    @property
    def flows(self) -> tuple[Flow, ...]:
        """What was sent, received and refused, by peer, event and kind."""
        return tuple(self._flows.values())

    @property
    def signed(self) -> bool:
        """Whether the log ends in its party's signature."""
        return not self.unsigned and not self.torn

    def as_json(self) -> dict[str, Any]:
        """In plain values."""
        plain = asdict(self)
        del plain["_flows"]
        return {**plain, "signed": self.signed, "flows": [asdict(flow) for flow in self.flows]}

    def add(self, number: int, line: Line, *, before: bytes) -> None:
        """Count a line; `before` is the chain before it.

        Raises:
            CheckpointError: it does not fit to those before it.
        """
        self.lines, self.last_at = number, line.at
        self.unsigned += 1
        if isinstance(line, Opened):
            self._open(number, line)
        elif isinstance(line, Signed):
            self._check_signature(number, line, before)
            self.unsigned = 0
        elif isinstance(line, Frame | Refused):
            self._count(number, line)
        else:
            self.agreed += 1

    def _open(self, number: int, line: Opened) -> None:
        if self.party not in ("", line.party):
            raise self._unfit(number, f"is of {line.party}, those before it of {self.party}")
        if number == 1:
            self.first_at = line.at
        self.party, self.identity, self.peers = line.party, line.identity, dict(line.peers)
        self.opened += 1
        self.cut += line.cut

    def _count(self, number: int, line: Frame | Refused) -> None:
        if line.peer not in self.peers:
            raise self._unfit(number, f"names {line.peer}, who is no peer of this party")
        kind = None
        if isinstance(line, Frame):
            kind = line.kind
            if line.epsilon is not None:
                self.epsilon = math.inf if line.epsilon == "inf" else line.epsilon
                self.figure = line.figure or "epsilon_x"
        key = line.peer, line.event, kind
        past = self._flows.get(key) or Flow(
            peer=line.peer, event=line.event, kind=kind, envelopes=0, size=0
        )
        if key not in self._flows and len(self._flows) >= 2 * MOST_PEERS * len(Kind):
            raise self._unfit(number, f"names more than {MOST_PEERS} peers in all")
        self._flows[key] = replace(past, envelopes=past.envelopes + 1, size=past.size + line.size)

    def _check_signature(self, number: int, line: Signed, before: bytes) -> None:
        signature, public = bytes.fromhex(line.signature), bytes.fromhex(self.identity)
        try:
            verify(public, signature, PURPOSE, self.party.encode(), before, signer=self.party)
        except RemoteProtocolError as error:
            raise self._unfit(
                number, f"is no signature of the key {self.identity[:16]}... over what precedes it"
            ) from error

    def _unfit(self, number: int, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: line {number} {why}; no run writes that: ask its party for the log that "
            "its own run wrote"
        )


def log_at(path: Path) -> Path:
    """The log of a party's folder, or the log itself."""
    return path / FILE_NAME if path.is_dir() else path


def read_lines(path: Path, summary: Summary | None = None) -> Iterator[tuple[int, Line]]:
    """Go through a log line by line, with its number from 1; `summary` counts them.

    Raises:
        CheckpointError: missing, no log, or altered from some line on.
    """
    summary = Summary(path=path) if summary is None else summary
    chain = Chain(path)
    with open_plain(path) as file:
        before = b""
        for body in chain.follow(file):
            line = parse_line(body, path=path, number=chain.lines)
            if chain.lines == 1 and not isinstance(line, Opened):
                raise CheckpointError(
                    f"{path}: line 1 does not say whose log it is; it is no audit log, or its "
                    "beginning was removed"
                )
            summary.add(chain.lines, line, before=before)
            before = chain.head
            yield chain.lines, line
    if not chain.lines:
        raise CheckpointError(f"{path}: is empty, or ends before its first line does; no audit log")
    summary.head, summary.torn = chain.head.hex(), len(chain.torn)


def verify_log(path: Path, *, identity: str | None = None) -> Summary:
    """Verify a whole log; return what it says.

    Args:
        path: of the log, or of the party's folder.
        identity: the party's public key as its reader knows it, hex, which must have signed the
            end of the log; None: whom the log names, and it may end unsigned.

    Raises:
        CheckpointError: missing, no log, altered from some line on, or not signed as asked.
    """
    path = log_at(path)
    summary = Summary(path=path)
    for _ in read_lines(path, summary):
        pass
    if identity is not None and identity.lower() != summary.identity:
        raise CheckpointError(
            f"{path}: is of the identity {summary.identity}, not of {identity}: it is another "
            "party's log, or one that somebody wrote anew; ask its party which key is its own"
        )
    if identity is not None and not summary.signed:
        raise CheckpointError(
            f"{path}: is not signed at its end, so anybody may have written what follows its last "
            "signature; a killed process signs nothing: verify it without an identity, and compare "
            "it with its peers' logs"
        )
    return summary

"""Audit log of a party: every envelope that it sent or received, each line chained to the last.

Run by: every party that runs in a process of its own, for itself; and, to verify a log or hold two
parties' logs of one link against each other, whoever was handed them. A log holds kinds, sizes and
digests of sealed bytes, and nothing that was in them. A line is with the operating system before
its envelope is sent, so a killed process loses none; a machine that loses power may lose those
since the last checkpoint. Where a line cannot be written, nothing is sent.

The log also records existence and running number of every file in which the party counts, before
the envelope that they counted (`secure_apfed.organisations.counters`).

A line is one JSON object. Its first field, `chain`, is the SHA-256 of the chain of the line before
it and of the bytes that follow in the line. So whoever alters, adds, removes or swaps lines has to
rewrite all that follow, which changes the last chain. Bounds are checked before anything is parsed:
a log may come from anybody.

What a log shows: that the lines are as they were when it was last signed by the holder of the
identity that it names. What it cannot show: that the party wrote down what it sent. What one party
sent, the other must have received, byte for byte and in order. A session may have ended before the
last frames arrived, so at the end of each session the receiver may lack some. Anything else is
reported: a frame that arrived altered or that nobody sent, one that is missing in the middle, or
lines that a log lost. Logs are read line by line, so memory does not depend on their length.
"""

import hashlib
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.seal import Identity, verify_signature
from secure_apfed.base.files import open_plain, open_regular
from secure_apfed.base.formats import AUDIT_LOG
from secure_apfed.base.names import Name, ReleaseFigure
from secure_apfed.contract import Contract
from secure_apfed.errors import CheckpointError
from secure_apfed.exchange import Envelope, Kind
from secure_apfed.exchange.envelope import BEFORE_TRAINING, SESSION_LETTERS
from secure_apfed.exchange.status import Meter

FILE_NAME = "audit.log"
_MAX_PEERS = 1024
_MAX_COUNTERS = 4096
_PURPOSE = b"audit log v1"
_MAX_LINE = 2**18  # bytes
_MAX_SIZE = 2**40  # bytes or counts in a field
_CHAIN_BYTES = 32
_SHOWN_LETTERS = 80
# A line is _BEGINNING, the chain hash in hex, _SEPARATOR, and the body from _BODY_START on.
_BEGINNING = b'{"chain":"'
_SEPARATOR = b'",'
_BODY_START = len(_BEGINNING) + 2 * _CHAIN_BYTES + len(_SEPARATOR)
_Hex16: TypeAlias = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
CounterName: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.+-]{0,127}$")]
_FileName: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.+-]{0,127}$")]
_Hex32: TypeAlias = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_Count: TypeAlias = Annotated[int, Field(ge=0, le=_MAX_SIZE)]
_Number: TypeAlias = Annotated[int, Field(ge=0, lt=2**63)]


class _Written(BaseModel):
    """The base of every line, written `at` so many seconds since 1970 by the party's own clock."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    at: float = Field(ge=0)


class Opened(_Written):
    """The log was created or continued; one line for each process.

    Attributes:
        party: the log's owner; identity: its Ed25519 public key, hex.
        peers: the others' public keys as this party knows them, by name.
        cut: bytes of an incomplete line of a killed process, which were cut off.
    """

    event: Literal["opened"] = "opened"
    format: Literal[1] = 1
    party: Name
    identity: _Hex32
    peers: dict[Name, _Hex32] = Field(max_length=_MAX_PEERS)
    cut: _Count = 0


class Agreed(_Written):
    """All parties signed the contract of a session; contains its SHA-256 in hex.

    Attributes:
        resumes: the step from which it resumes; absent: from the start.
    """

    event: Literal["agreed"] = "agreed"
    session: str = Field(min_length=1, max_length=SESSION_LETTERS)
    contract: _Hex32
    resumes: _Number | None = None


class Frame(_Written):
    """An envelope that was sent, or received and opened.

    Attributes:
        peer: name of the party at the other end.
        kind, step, sequence: values from the envelope's header.
        size: bytes of header and sealed payload, as both ends have them.
        digest: SHA-256 (hex) of these bytes.
        epsilon: epsilon of all releases so far, if the privacy ledger was charged for the content
            of this envelope; "inf": without bound.
        figure: the name of that epsilon, of `secure_apfed.settings.promises.FIGURES`; if absent, an
            epsilon is epsilon_x.
    """

    event: Literal["sent", "received"]
    peer: Name
    kind: Kind
    step: int = Field(ge=BEFORE_TRAINING, lt=2**63)
    sequence: _Number
    size: _Count
    digest: _Hex32
    epsilon: Annotated[float, Field(ge=0)] | Literal["inf"] | None = None
    figure: ReleaseFigure | None = None


class Refused(_Written):
    """A frame from `peer` could not be decrypted or verified; the session ends."""

    event: Literal["refused"] = "refused"
    peer: Name
    size: _Count
    digest: _Hex32


class Counted(_Written):
    """The state of one of this party's counters; see `secure_apfed.organisations.counters`.

    Attributes:
        counter: name of its file in the party's folder.
        number: what it counted so far; origin: digest, hex, of what the file begins with, or of a
            key inside; digest: of all that it had counted then.
    """

    event: Literal["counted"] = "counted"
    counter: CounterName
    number: _Count
    origin: _Hex16
    digest: _Hex16


class Restarted(_Written):
    """The operator restarted a counter whose file differed from the state in the log.

    Attributes:
        counter: name of the counter's file; why: what was wrong.
        noted: count that the log has noted; number: count from which the counter continues.
    """

    event: Literal["restarted"] = "restarted"
    counter: CounterName
    why: Literal["missing", "lower", "of another run", "unreadable"]
    noted: _Count
    number: _Count


class Ended(_Written):
    """The party ended the project in its folder.

    Attributes:
        deleted: names of files and folders that are gone.
        kept: SHA-256, hex, of what is to be kept.
        counters_are_as_noted: whether all counters were as the log notes them.
    """

    event: Literal["ended"] = "ended"
    deleted: tuple[_FileName, ...] = Field(max_length=_MAX_COUNTERS)
    kept: dict[_FileName, _Hex32] = Field(max_length=_MAX_COUNTERS)
    counters_are_as_noted: bool


class Signed(_Written):
    """The party's signature of the chain so far, Ed25519, hex."""

    event: Literal["signed"] = "signed"
    signature: str = Field(pattern="^[0-9a-f]{128}$")


Line: TypeAlias = Opened | Agreed | Frame | Refused | Counted | Restarted | Ended | Signed


_EVENTS: TypeAdapter[Line] = TypeAdapter(Annotated[Line, Field(discriminator="event")])


def _parse_line(body: bytes, *, path: Path, number: int) -> Line:
    """Parse a line whose chain hash was verified. Raises CheckpointError: malformed.

    `body`: the line's JSON object after its chain hash, without the opening brace. `number`: number
    of the line, for the error.
    """
    try:
        return _EVENTS.validate_json(b"{" + body)
    except ValidationError as error:
        _require_format(body, path=path, number=number)
        first = error.errors(include_url=False, include_input=False)[0]
        field_path = ".".join(map(str, first["loc"]))[:_SHOWN_LETTERS]
        cause = str(first["msg"]).lower()[:_SHOWN_LETTERS]
        raise CheckpointError(
            f"{path}: line {number} is chained and yet not as this version writes it "
            f"(at {field_path!r}: {cause!r}); it was written by another program "
            "or version: ask its party for the log that its own run wrote"
        ) from None


def _require_format(body: bytes, *, path: Path, number: int) -> None:
    """Raise CheckpointError if an opening line names another format of the log; pass otherwise.

    `body`: the line's JSON object without the opening brace. `number`: number of the line.
    """
    try:
        line = json.loads(b"{" + body)
    except (ValueError, RecursionError):
        return
    if isinstance(line, dict) and line.get("event") == "opened":
        # Called for its CheckpointError: a format that this version cannot read.
        AUDIT_LOG.parse_format_number(f"{path}, line {number}", line)


class _Chain:
    """The hash chain over the lines of a log so far: makes the next line, or verifies existing
    ones.

    Attributes:
        head: hash of the last line; b"" before the first.
        size, lines: bytes and number of the lines so far.
        torn: an incomplete line at the end, as a killed process leaves it; b"": none.
        ends_in_newline: whether the last line has its newline.
    """

    def __init__(self, path: Path) -> None:
        """Start before the first line of the log at `path`."""
        self._path = path
        self.head = b""
        self.size = 0
        self.lines = 0
        self.torn = b""
        self.ends_in_newline = True

    def encode_line(self, written: Line) -> bytes:
        """Return the bytes of the next line; call `confirm_line` once the file has it."""
        body = written.model_dump_json(exclude_none=True).encode()[1:]
        return self._make_start(body) + body + b"\n"

    def confirm_line(self, line: bytes) -> None:
        """Advance the chain by a line that the file has now."""
        chain_hash = line[len(_BEGINNING) : _BODY_START - len(_SEPARATOR)]
        self.head = bytes.fromhex(chain_hash.decode())
        self.size += len(line)
        self.lines += 1

    def iter_bodies(self, file: BufferedReader) -> Iterator[bytes]:
        """Read a log and verify its chain; yield each line after its chain hash.

        Raises CheckpointError: a line is too long or not chained to those before it.
        """
        # One byte more than allowed, so that a line that is too long shows.
        while line := file.readline(_MAX_LINE + 1):
            if len(line) > _MAX_LINE:
                raise self._make_error(f"is longer than {_MAX_LINE} bytes")
            body = line.removesuffix(b"\n")[_BODY_START:]
            if line[:_BODY_START] != self._make_start(body):
                if not _is_torn(line):
                    raise self._make_error("is not chained to what stands before it")
                self.torn = line
                return
            self.confirm_line(line)
            self.ends_in_newline = line.endswith(b"\n")
            yield body

    def _make_start(self, body: bytes) -> bytes:
        """Return the start of the next line if this is its body: up to and with its chain hash."""
        chain_hash = hashlib.sha256(self.head + body).hexdigest()
        return _BEGINNING + chain_hash.encode() + _SEPARATOR

    def _make_error(self, problem: str) -> CheckpointError:
        """Return the error for a log that is altered after the last verified line.

        `problem`: what is wrong with the next line, in words.
        """
        last = f"line {self.lines} is the last that fits" if self.lines else "no line fits"
        return CheckpointError(
            f"{self._path}: line {self.lines + 1} {problem}: the log was altered or damaged there, "
            f"and {last}; ask its party for an unaltered copy, and compare it with its peers' logs"
        )


def _is_torn(line: bytes) -> bool:
    """Return whether these bytes, which are no valid line, may be the beginning of one that a
    killed process left.
    """
    if line.endswith(b"\n") or not (line.startswith(_BEGINNING) or _BEGINNING.startswith(line)):
        return False
    try:
        # A line that was written completely parses; one that was cut off does not.
        json.loads(line)
    except (ValueError, RecursionError):
        return True
    return False


class CounterSource(Protocol):
    """A source of this party's counters and how far they counted; see
    `secure_apfed.organisations.counters`.
    """

    def list_changes(self, *, saved: bool) -> Iterable[tuple[str, int, str, str]]:
        """Return name, number, origin and digest of each counter that changed since the last call.

        Args:
            saved: whether a checkpoint follows; some counters are binding only then.

        Raises CheckpointError: a counter is missing, or counts less than before.
        """

    def write_witness(self, lines: int, head: str) -> None:
        """Write the log's number of lines and the hash of its last line to a file in the same
        folder.
        """


class AuditLog:
    """A `LinkObserver` that writes an audit log.

    Args:
        path: path of the log, which is created or continued.
        party: the log's owner.
        identity: the owner's key pair, which signs the log when it is closed.
        peers: public keys of the others, as this party knows them, by name.
        meter: reports the privacy cost of all releases so far.
        clock: returns seconds since 1970.
        counters: the counters that this party keeps in files; a frame is logged and sent only when
            the log contains their state. None: there are none.

    Raises:
        CheckpointError: the log is another party's or was altered, or too many peers.
    """

    def __init__(
        self,
        path: Path,
        party: str,
        identity: Identity,
        peers: Mapping[str, bytes],
        meter: Meter,
        clock: Callable[[], float] = time.time,
        counters: CounterSource | None = None,
    ) -> None:
        """Open the log, verify what it has, and write the line of this opening."""
        if len(peers) > _MAX_PEERS:
            raise CheckpointError(f"{path}: an audit log is of {_MAX_PEERS} peers at most")
        self.path = path
        self._party = party
        self._identity = identity
        self._meter = meter
        self._clock = clock
        self._counters = counters
        self._known_charges = meter.charges
        self._last_release = b""  # payload for which the last charge was made
        self._chain = _Chain(path)
        self._file = open_regular(path, create=True)
        try:
            cut = self._verify_file()
            public = identity.public.hex()
            peer_keys = {name: key.hex() for name, key in peers.items()}
            self._write_line(
                Opened(at=clock(), party=party, identity=public, peers=peer_keys, cut=cut)
            )
            self._note_counters(saved=True)
            self._sync_witness()
        except BaseException:
            os.close(self._file)
            raise

    def _verify_file(self) -> int:
        """Verify the existing lines; return how many bytes of a torn last line were cut off."""
        chain = self._chain
        with os.fdopen(os.dup(self._file), "rb") as file:
            for body in chain.iter_bodies(file):
                if chain.lines > 1:
                    continue
                first = _parse_line(body, path=self.path, number=1)
                owner = first.party if isinstance(first, Opened) else "nobody"
                if not isinstance(first, Opened) or owner != self._party:
                    raise CheckpointError(
                        f"{self.path} is the audit log of {owner}, this party is {self._party}; "
                        "put it back where it belongs, or choose another folder"
                    )
        if chain.torn:
            os.ftruncate(self._file, chain.size)
            warnings.warn(
                f"{self.path}: its last line was torn when a process was killed; its "
                f"{len(chain.torn)} bytes are cut off, and the log says so",
                stacklevel=4,
            )
        elif not chain.ends_in_newline:
            chain.size += os.write(self._file, b"\n")
        return len(chain.torn)

    def observe_outgoing(self, envelope: Envelope, frame: bytes) -> None:
        """Log a frame before it is sent; when this returns, the line survives a killed process.

        Raises CheckpointError, OSError: the line cannot be written; nothing may be sent then.
        """
        self._note_counters(saved=False)
        epsilon = self._get_release_epsilon(envelope.payload)
        figure = None if epsilon is None else self._meter.promise.figure
        fields = {**_describe_envelope(envelope), "epsilon": epsilon, "figure": figure}
        self._write_frame(Frame, frame, event="sent", peer=envelope.receiver, **fields)

    def observe_incoming(self, envelope: Envelope, frame: bytes) -> None:
        """Log a frame that was received and opened."""
        fields = _describe_envelope(envelope)
        self._write_frame(Frame, frame, event="received", peer=envelope.sender, **fields)

    def observe_refusal(self, sender: str, frame: bytes) -> None:
        """Log a frame that could not be decrypted or verified."""
        self._write_frame(Refused, frame, peer=sender)

    def _write_frame(self, kind: type[Frame | Refused], frame: bytes, /, **fields: Any) -> None:
        """Write a line of this kind with these fields, and size and digest of the frame.

        The fields are not validated again: they were when the envelope was made.
        """
        digest = hashlib.sha256(frame).hexdigest()
        self._write_line(
            kind.model_construct(at=self._clock(), **fields, size=len(frame), digest=digest)
        )

    def note_contract(self, contract: Contract) -> None:
        """Log the contract of a session, which all parties have signed."""
        resumes = contract.resumes.step if contract.resumes else None
        session = contract.session
        digest = contract.digest.hex()
        self._write_line(
            Agreed(at=self._clock(), session=session, contract=digest, resumes=resumes)
        )

    def note_restart(self, restart: Restarted) -> None:
        """Log that the operator allowed a counter, by its name, to continue from another count."""
        self._write_line(restart)

    def note_end(self, end: Ended) -> None:
        """Log that the party ended the project in its folder."""
        self._write_line(end)

    def sync(self) -> None:
        """Log changed counters, and wait until all lines are on the disk.

        Raises CheckpointError: the file was removed, or another process wrote to it.
        """
        self._note_counters(saved=True)
        status = os.fstat(self._file)
        if not status.st_nlink or status.st_size != self._chain.size:
            raise CheckpointError(
                f"{self.path} was removed, or is written to by another process; restore it from "
                "a copy, and give each run a folder of its own"
            )
        self._sync_witness()

    def close(self) -> None:
        """Sign all lines so far, and close the file."""
        try:
            try:
                self._note_counters(saved=False)
            finally:
                signature = self._identity.sign(_PURPOSE, self._party.encode(), self._chain.head)
                self._write_line(Signed(at=self._clock(), signature=signature.hex()))
                self._sync_witness()
        finally:
            os.close(self._file)

    def _note_counters(self, *, saved: bool) -> None:
        """Write a line for each counter that changed since its last line.

        `saved`: whether a checkpoint follows; see `CounterSource.list_changes`.
        """
        changes = self._counters.list_changes(saved=saved) if self._counters else ()
        for name, number, origin, digest in changes:
            self._write_line(
                Counted(at=self._clock(), counter=name, number=number, origin=origin, digest=digest)
            )

    def _sync_witness(self) -> None:
        """Write all lines to the disk, then their number to a file of the counters."""
        os.fsync(self._file)
        if self._counters:
            self._counters.write_witness(self._chain.lines, self._chain.head.hex())

    def _get_release_epsilon(self, payload: bytes) -> float | Literal["inf"] | None:
        """Return the epsilon of all releases so far if this payload is a release, else None.

        A release is the first payload after the ledger recorded a cost, or the same payload to
        other receivers.
        """
        charges = self._meter.charges
        if charges != self._known_charges:
            self._known_charges = charges
            self._last_release = payload
        elif not payload or payload != self._last_release:
            self._last_release = b""
            return None
        epsilon = self._meter.promise.epsilon
        return "inf" if epsilon == float("inf") else epsilon

    def _write_line(self, written: Line) -> None:
        """Append a line to the file, whole or not at all, and advance the chain."""
        line = self._chain.encode_line(written)
        try:
            if os.write(self._file, line) != len(line):
                raise OSError(f"{self.path}: the disk took only part of a line")
        except OSError:
            os.ftruncate(self._file, self._chain.size)
            raise
        self._chain.confirm_line(line)


def _describe_envelope(envelope: Envelope) -> dict[str, Any]:
    return {"kind": envelope.kind, "step": envelope.step, "sequence": envelope.sequence}


@dataclass(kw_only=True)
class Flow:
    """The envelopes of one kind to or from one peer; kind: null for refused ones."""

    peer: str
    event: str
    kind: Kind | None
    envelopes: int = 0
    size: int = 0


@dataclass(kw_only=True)
class Summary:
    """The contents of a log whose chain is intact.

    Attributes:
        path: path of the log; head: the chain hash of its last line, hex.
        party, identity: the log's owner, by its last opening; peers: the parties that it knows, by
            name, with their identities.
        lines: number of complete lines; opened: how often a process opened it; agreed: sessions
            that began.
        first_at, last_at: seconds since 1970, by the party's clock.
        cut: bytes of incomplete lines that were cut off; torn: bytes of one at the end now.
        unsigned: lines after the last signature; 0 of a log that was closed.
        figure, epsilon: name (as epsilon_x) and value of the last epsilon of what it sent; None if
            no ledger counts what it sent, which then has no guarantee.
        counters: the last note of each counter that was not restarted since, by the name of its
            file; restarts: the counters that the operator restarted, in order.
        ended: what was deleted and kept when the party ended the project; None: not ended.
    """

    path: Path
    head: str = ""  # the hash chain of the last line, hex
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
    figure: ReleaseFigure | None = None
    epsilon: float | None = None
    counters: dict[str, Counted] = field(default_factory=dict)
    restarts: list[Restarted] = field(default_factory=list)
    ended: Ended | None = None
    _flows: dict[tuple[str, str, Kind | None], Flow] = field(default_factory=dict, repr=False)

    @property
    def flows(self) -> tuple[Flow, ...]:
        """The messages that were sent, received or refused, by peer, event and kind."""
        return tuple(self._flows.values())

    @property
    def has_final_signature(self) -> bool:
        return not self.unsigned and not self.torn

    def as_json(self) -> dict[str, Any]:
        """Return the summary as plain JSON values."""
        plain = asdict(self)
        flows = plain.pop("_flows").values()
        counters = {name: noted.number for name, noted in self.counters.items()}
        restarts = [restart.model_dump(mode="json") for restart in self.restarts]
        return {
            **plain,
            "counters": counters,
            "restarts": restarts,
            "signed": self.has_final_signature,
            "flows": list(flows),
            "ended": self.ended and self.ended.model_dump(mode="json"),
        }

    def count_line(self, number: int, line: Line, *, chain_before: bytes) -> None:
        """Add a line whose chain hash was verified. Raises CheckpointError: no run writes it.

        `number`: number of the line, from 1. `chain_before`: the hash chain before it, which a
        signature covers.
        """
        self.lines = number
        self.last_at = line.at
        self.unsigned += 1
        if isinstance(line, Opened):
            self._note_opening(number, line)
        elif isinstance(line, Signed):
            self._check_signature(number, line, chain_before)
            self.unsigned = 0
        elif isinstance(line, Frame | Refused):
            self._count_frame(number, line)
        elif isinstance(line, Counted):
            self._note_counter(number, line)
        elif isinstance(line, Restarted):
            self.counters.pop(line.counter, None)
            self.restarts.append(line)
        elif isinstance(line, Ended):
            self.ended = line
        else:
            self.agreed += 1

    def _note_counter(self, number: int, line: Counted) -> None:
        """Record a counter's last state. Raises CheckpointError: too many counters."""
        if line.counter not in self.counters and len(self.counters) >= _MAX_COUNTERS:
            raise self._make_error(number, f"names more than {_MAX_COUNTERS} counters in all")
        self.counters[line.counter] = line

    def _note_opening(self, number: int, line: Opened) -> None:
        """Record who opened the log, and with which peers. Raises CheckpointError: another party.

        `number`: number of the line, for the error.
        """
        if self.party not in ("", line.party):
            raise self._make_error(number, f"is of {line.party}, those before it of {self.party}")
        if number == 1:
            self.first_at = line.at
        self.party = line.party
        self.identity = line.identity
        self.peers = dict(line.peers)
        self.opened += 1
        self.cut += line.cut

    def _count_frame(self, number: int, line: Frame | Refused) -> None:
        """Add a frame to the flow of its peer, event and kind.

        `number`: number of the line. Raises CheckpointError: an unknown peer, or more peers than a
        log may name.
        """
        if line.peer not in self.peers:
            raise self._make_error(number, f"names {line.peer}, who is no peer of this party")
        kind = line.kind if isinstance(line, Frame) else None
        if isinstance(line, Frame) and line.epsilon is not None:
            self.epsilon = math.inf if line.epsilon == "inf" else line.epsilon
            self.figure = line.figure or "epsilon_x"
        key = line.peer, line.event, kind
        if key not in self._flows and len(self._flows) >= 2 * _MAX_PEERS * len(Kind):
            raise self._make_error(number, f"names more than {_MAX_PEERS} peers in all")
        flow = self._flows.setdefault(key, Flow(peer=line.peer, event=line.event, kind=kind))
        flow.envelopes += 1
        flow.size += line.size

    def _check_signature(self, number: int, line: Signed, chain_before: bytes) -> None:
        """Verify the owner's signature of the chain so far. Raises CheckpointError.

        `number`: the line's number. `chain_before`: the hash chain before the line.
        """
        signature = bytes.fromhex(line.signature)
        public = bytes.fromhex(self.identity)
        try:
            verify_signature(
                public, signature, _PURPOSE, self.party.encode(), chain_before, signer=self.party
            )
        except RemoteProtocolError as error:
            raise self._make_error(
                number, f"is no signature of the key {self.identity[:16]}... over what precedes it"
            ) from error

    def _make_error(self, number: int, problem: str) -> CheckpointError:
        """Return the error for line `number`, which no run writes, with the `problem` in words."""
        return CheckpointError(
            f"{self.path}: line {number} {problem}; no run writes that: ask its party for the log "
            "that its own run wrote"
        )


def _iter_log(path: Path, summary: Summary | None = None) -> Iterator[tuple[int, Line]]:
    """Yield number (from 1) and content of each line, verified; add each to `summary`, if passed.

    Raises CheckpointError: the file is no log, or was altered from some line on.
    """
    summary = Summary(path=path) if summary is None else summary
    chain = _Chain(path)
    with open_plain(path) as file:
        chain_before = b""
        for body in chain.iter_bodies(file):
            line = _parse_line(body, path=path, number=chain.lines)
            if chain.lines == 1 and not isinstance(line, Opened):
                raise CheckpointError(
                    f"{path}: line 1 does not say whose log it is; it is no audit log, or its "
                    "beginning was removed"
                )
            summary.count_line(chain.lines, line, chain_before=chain_before)
            chain_before = chain.head
            summary.head = chain_before.hex()
            yield chain.lines, line
    if not chain.lines:
        raise CheckpointError(f"{path}: is empty, or ends before its first line does; no audit log")
    summary.torn = len(chain.torn)


def iter_lines(path: Path) -> Iterator[Line]:
    """Yield the parsed lines of a log, in order.

    Raises CheckpointError: a missing file, no log, or one that is altered from some line on.
    """
    for _, line in _iter_log(path):
        yield line


def summarise_log(
    path: Path, *, on_line: Callable[[int, str], None] = lambda line, chain: None
) -> Summary:
    """Return the summary of a log; call `on_line` with each line's number and its chain hash, hex.

    Raises CheckpointError: a missing file, no log, or one that is altered from some line on.
    """
    summary = Summary(path=path)
    for number, _ in _iter_log(path, summary):
        on_line(number, summary.head)
    return summary


def verify_log(path: Path, *, identity: str | None = None) -> Summary:
    """Verify a whole log; return its summary.

    Args:
        path: path of the log, or of the party's folder.
        identity: the party's public key as the reader knows it, hex, which must have signed the end
            of the log; None: trust the key that the log names, and the log may end unsigned.

    Raises CheckpointError: a missing file, no log, one that is altered from some line on, or not
    signed as required.
    """
    path = path / FILE_NAME if path.is_dir() else path
    summary = Summary(path=path)
    for _ in _iter_log(path, summary):
        pass
    if identity is not None and identity.lower() != summary.identity:
        raise CheckpointError(
            f"{path}: is of the identity {summary.identity}, not of {identity}: it is another "
            "party's log, or one that somebody wrote anew; ask its party which key is its own"
        )
    if identity is not None and not summary.has_final_signature:
        raise CheckpointError(
            f"{path}: is not signed at its end, so anybody may have written what follows its last "
            "signature; a killed process signs nothing: verify it without an identity, and compare "
            "it with its peers' logs"
        )
    return summary


@dataclass(frozen=True, kw_only=True)
class Parting:
    """The first disagreement of two logs about the messages from one party to another.

    Attributes:
        sent_line: line number in the sender's log; None: no further message was logged there.
        sent: that message in words.
        received_line, received: line number and message in the receiver's log.
    """

    sent_line: int | None
    sent: str
    received_line: int
    received: str


@dataclass(frozen=True, kw_only=True)
class Direction:
    """The comparison of two logs about the messages from one party to another.

    Attributes:
        equal, equal_size: number and bytes of the envelopes that both ends have.
        unreceived, unreceived_size: the same of envelopes at the ends of sessions that the receiver
            never had.
        parting: where the logs first disagree, at which the counts end; None: they agree.
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
    """The comparison of two logs about the messages in both directions, and each log's summary."""

    logs: tuple[Summary, Summary]
    directions: tuple[Direction, Direction]

    @property
    def agree(self) -> bool:
        return all(direction.parting is None for direction in self.directions)

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as plain JSON values."""
        return {
            "agree": self.agree,
            "logs": [log.as_json() for log in self.logs],
            "directions": [asdict(direction) for direction in self.directions],
        }


def compare_logs(first_path: Path, second_path: Path) -> Comparison:
    """Verify two parties' logs, or those in their folders, and compare the link between them."""
    first = verify_log(first_path)
    second = verify_log(second_path)
    _require_peers(first, second)
    _require_peers(second, first)
    directions = (_compare_direction(first, second), _compare_direction(second, first))
    return Comparison(logs=(first, second), directions=directions)


def _require_peers(log: Summary, other: Summary) -> None:
    """Raise CheckpointError unless the party of `log` knows that of `other` by the identity that
    signed `other`.
    """
    known_identity = log.peers.get(other.party)
    if known_identity is None:
        raise CheckpointError(
            f"{log.path} is the log of {log.party}, who has no link to {other.party}, whose log is "
            f"{other.path}; compare the logs of two parties of one run"
        )
    if known_identity != other.identity:
        raise CheckpointError(
            f"{log.path}: {log.party} knows {other.party} by the identity "
            f"{known_identity[:16]}..., and {other.path} is signed by {other.identity[:16]}...: it "
            "is of another run, or somebody wrote it anew with another key"
        )


def _compare_direction(sender: Summary, receiver: Summary) -> Direction:
    """Compare the frames that one party sent with those that the other received, in order, by
    digest.

    The last frames of a session may be missing at the receiver; from any other difference on, the
    logs disagree.
    """
    sent_frames = _iter_frames(sender.path, receiver.party, ("sent",))
    equal = equal_size = unreceived = unreceived_size = 0
    parting = None
    next_sent = next(sent_frames, None)
    for received in _iter_frames(receiver.path, sender.party, ("received", "refused")):
        expected = next_sent
        skipped = 0
        skipped_size = 0
        while next_sent is not None and next_sent.line.digest != received.line.digest:
            # Then the rest of that session never arrived.
            opening = next_sent.opening
            while next_sent is not None and next_sent.opening == opening:
                skipped += 1
                skipped_size += next_sent.line.size
                next_sent = next(sent_frames, None)
        if next_sent is None:
            parting = _describe_parting(expected, received, sender)
            break
        equal += 1
        equal_size += received.line.size
        unreceived += skipped
        unreceived_size += skipped_size
        next_sent = next(sent_frames, None)
    while parting is None and next_sent is not None:
        unreceived += 1
        unreceived_size += next_sent.line.size
        next_sent = next(sent_frames, None)
    return Direction(
        sender=sender.party,
        receiver=receiver.party,
        equal=equal,
        equal_size=equal_size,
        unreceived=unreceived,
        unreceived_size=unreceived_size,
        parting=parting,
    )


class _LoggedFrame(NamedTuple):
    """A frame in a log: how often the log had been opened, the line's number, and the line."""

    opening: int
    number: int
    line: Frame | Refused


def _describe_parting(
    expected: _LoggedFrame | None, received: _LoggedFrame, sender: Summary
) -> Parting:
    """Return where two logs disagree: the receiver's frame, and the next one of the sender's log.

    `expected`: next message in the sender's log; None: the log ends there, perhaps since lines were
    lost. `received`: the receiver's message. `sender`: summary of the sender's log.
    """
    may_have_lost_lines = sender.unsigned or sender.torn
    lost = "; a machine that loses power may lose lines" if may_have_lost_lines else ""
    return Parting(
        sent_line=expected.number if expected else None,
        sent=_describe_frame(expected.line) if expected else f"nothing more{lost}",
        received_line=received.number,
        received=_describe_frame(received.line),
    )


def _describe_frame(line: Frame | Refused) -> str:
    """Return a frame's kind, step, number, size and digest in words."""
    if isinstance(line, Refused):
        description = "a frame that was refused"
    else:
        step = "" if line.step < 0 else f" of step {line.step}"
        description = f"{line.kind}{step}, number {line.sequence}"
    return f"{description}, {line.size} bytes, SHA-256 {line.digest[:16]}..."


def _iter_frames(path: Path, peer: str, events: tuple[str, ...]) -> Iterator[_LoggedFrame]:
    """Yield the frames to or from one peer in a log, in order.

    `events`: which ones: "sent", or "received" and "refused".
    """
    opening = 0
    for number, line in _iter_log(path):
        if isinstance(line, Opened):
            opening += 1
        elif isinstance(line, Frame | Refused) and line.peer == peer and line.event in events:
            yield _LoggedFrame(opening, number, line)

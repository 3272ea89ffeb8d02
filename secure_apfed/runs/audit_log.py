"""Audit log of a party: every envelope that it sent or received, each line chained to the last.

Run by: every party that runs in a process of its own, for itself. Whoever is handed a log may
verify it, or compare two parties' logs of one link. An envelope is a message with its header; a
frame is the envelope's header and sealed (encrypted) payload as they are sent. A log holds kinds,
sizes and digests of frames, and nothing of their content. A line is with the operating system
before its envelope is sent, so a killed process loses none. A machine that loses power may lose the
lines since the last checkpoint. If a line cannot be written, nothing is sent.

A party has files that count, such as its privacy ledgers. The log also records that these counters
exist and how far they counted, before the envelope that they counted
(`secure_apfed.organisations.counters`).

A line is one JSON object. Its first field, `chain`, is the SHA-256 of the chain of the line before
it and of the bytes that follow in the line. So whoever alters, adds, removes or swaps lines has to
rewrite all that follow, which changes the last chain. Bounds are checked before anything is parsed:
a log may come from anybody.

A log shows that its lines are as they were when it was last signed by the holder of the identity
that it names. It cannot show that the party wrote down what it sent. Two logs can: what one party
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
from secure_apfed.base.names import Name, ReleaseEpsilonName
from secure_apfed.contract import Contract
from secure_apfed.errors import CheckpointError
from secure_apfed.exchange import Envelope, Kind
from secure_apfed.exchange.envelope import BEFORE_TRAINING, SESSION_LETTERS
from secure_apfed.exchange.status import Meter

AUDIT_LOG_NAME = "audit.log"
_MAX_PEERS = 1024
_MAX_COUNTERS = 4096
_SIGNATURE_PURPOSE = b"audit log v1"
_MAX_LINE_BYTES = 2**18  # bytes
_MAX_SIZE = 2**40  # bytes or counts in a field
_CHAIN_BYTES = 32
_SHOWN_LETTERS = 80
# A line is _BEGINNING, the chain hash in hex, _SEPARATOR, and the body from _BODY_START on.
_LINE_PREFIX = b'{"chain":"'
_SEPARATOR = b'",'
_BODY_START = len(_LINE_PREFIX) + 2 * _CHAIN_BYTES + len(_SEPARATOR)
_Hex16: TypeAlias = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
CounterName: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.+-]{0,127}$")]
_FileName: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.+-]{0,127}$")]
_Hex32: TypeAlias = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_Count: TypeAlias = Annotated[int, Field(ge=0, le=_MAX_SIZE)]
_Number: TypeAlias = Annotated[int, Field(ge=0, lt=2**63)]


class _BaseLine(BaseModel):
    """The base of every line.

    Attributes:
        at: time of writing in seconds since 1970, by the party's own clock.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    at: float = Field(ge=0)


class OpeningLine(_BaseLine):
    """A line that says that a process created or continued the log.

    Attributes:
        format: number of the log's format.
        party: the log's owner.
        identity: the owner's Ed25519 public key, hex.
        peers: the other parties' public keys as this party knows them, by name.
        cut: number of bytes that were cut off at the end: an incomplete line of a killed process.
    """

    event: Literal["opened"] = "opened"
    format: Literal[1] = 1
    party: Name
    identity: _Hex32
    peers: dict[Name, _Hex32] = Field(max_length=_MAX_PEERS)
    cut: _Count = 0


class ContractLine(_BaseLine):
    """A line that says that all parties signed the contract of a session.

    Attributes:
        session: name of the session.
        contract: SHA-256 of the contract, hex.
        resumes: the step from which the session resumes; absent: it starts a new run.
    """

    event: Literal["agreed"] = "agreed"
    session: str = Field(min_length=1, max_length=SESSION_LETTERS)
    contract: _Hex32
    resumes: _Number | None = None


class FrameLine(_BaseLine):
    """A line for an envelope that was sent, or received and decrypted.

    Attributes:
        event: whether it was sent or received.
        peer: name of the party at the other end.
        kind, step, sequence: values from the envelope's header.
        size: number of bytes of the frame, which is the header and the sealed payload.
        digest: SHA-256 (hex) of the frame.
        epsilon: epsilon of all releases so far, if the party's privacy ledger recorded a cost for
            this envelope; "inf": without bound.
        figure: the kind of that epsilon (`promises.MEANING_BY_EPSILON`); absent:
            epsilon_x.
    """

    event: Literal["sent", "received"]
    peer: Name
    kind: Kind
    step: int = Field(ge=BEFORE_TRAINING, lt=2**63)
    sequence: _Number
    size: _Count
    digest: _Hex32
    epsilon: Annotated[float, Field(ge=0)] | Literal["inf"] | None = None
    figure: ReleaseEpsilonName | None = None


class RefusalLine(_BaseLine):
    """A line for a frame from `peer` that could not be decrypted or verified; the session ends.

    Attributes:
        peer: name of the party at the other end.
        size, digest: number of bytes and SHA-256 (hex) of the frame.
    """

    event: Literal["refused"] = "refused"
    peer: Name
    size: _Count
    digest: _Hex32


class CounterLine(_BaseLine):
    """A line with the state of a counter of this party (`secure_apfed.organisations.counters`).

    Attributes:
        counter: name of the counter's file in the party's folder.
        number: count so far.
        origin: digest (hex) of the file's beginning, or of a key in it, which never changes.
        digest: digest (hex) of all entries that were counted.
    """

    event: Literal["counted"] = "counted"
    counter: CounterName
    number: _Count
    origin: _Hex16
    digest: _Hex16


class RestartLine(_BaseLine):
    """A line that says that the operator restarted a counter.

    The counter's file differed from its state in the log.

    Attributes:
        counter: name of the counter's file.
        why: the difference.
        noted: count in the log.
        number: count from which the counter continues.
    """

    event: Literal["restarted"] = "restarted"
    counter: CounterName
    why: Literal["missing", "lower", "of another run", "unreadable"]
    noted: _Count
    number: _Count


class ProjectEndLine(_BaseLine):
    """A line that says that the party ended the project in its folder.

    Attributes:
        deleted: names of the deleted files and folders.
        kept: SHA-256 (hex) of the files that are to be kept, by name.
        counters_are_as_noted: whether all counters had the state in the log.
    """

    event: Literal["ended"] = "ended"
    deleted: tuple[_FileName, ...] = Field(max_length=_MAX_COUNTERS)
    kept: dict[_FileName, _Hex32] = Field(max_length=_MAX_COUNTERS)
    counters_are_as_noted: bool


class SignatureLine(_BaseLine):
    """A line with the party's signature of the chain so far (Ed25519, hex)."""

    event: Literal["signed"] = "signed"
    signature: str = Field(pattern="^[0-9a-f]{128}$")


LogLine: TypeAlias = (
    OpeningLine
    | ContractLine
    | FrameLine
    | RefusalLine
    | CounterLine
    | RestartLine
    | ProjectEndLine
    | SignatureLine
)


_EVENTS: TypeAdapter[LogLine] = TypeAdapter(Annotated[LogLine, Field(discriminator="event")])


def _parse_line(body: bytes, *, path: Path, number: int) -> LogLine:
    """Parse a line whose chain hash was verified.

    Args:
        body: the line's JSON object after its chain hash, without the opening brace.
        path: the log, for the error.
        number: number of the line, for the error.

    Raises CheckpointError: the line is malformed.
    """
    try:
        return _EVENTS.validate_json(b"{" + body)
    except ValidationError as error:
        _require_format(body, path=path, number=number)
        first_error = error.errors(include_url=False, include_input=False)[0]
        field_path = ".".join(map(str, first_error["loc"]))[:_SHOWN_LETTERS]
        cause = str(first_error["msg"]).lower()[:_SHOWN_LETTERS]
        raise CheckpointError(
            f"{path}: line {number} is chained and yet not as this version writes it "
            f"(at {field_path!r}: {cause!r}); it was written by another program "
            "or version: ask its party for the log that its own run wrote"
        ) from None


def _require_format(body: bytes, *, path: Path, number: int) -> None:
    """Raise CheckpointError if an opening line names another format of the log.

    It is called for a malformed line, since another format is a better explanation of it. Any other
    line passes.

    `body`: the line's JSON object without the opening brace. `path`, `number`: the log and the
    line's number, for the error.
    """
    try:
        line = json.loads(b"{" + body)
    except (ValueError, RecursionError):
        return
    if isinstance(line, dict) and line.get("event") == "opened":
        # Called for its CheckpointError: a format that this version cannot read.
        AUDIT_LOG.parse_format_number(f"{path}, line {number}", line)


class _Chain:
    """The hash chain over the lines of a log: it makes the next line, or verifies existing lines.

    Attributes:
        head: hash of the last line; b"" before the first.
        size: bytes of the lines so far.
        lines: number of the lines so far.
        incomplete_line: an incomplete line at the end, as a killed process leaves it; b"": there is
            none.
        ends_in_newline: whether the last line has its newline.
    """

    def __init__(self, path: Path) -> None:
        """Start before the first line of the log at `path`."""
        self._path = path
        self.head = b""
        self.size = 0
        self.lines = 0
        self.incomplete_line = b""
        self.ends_in_newline = True

    def encode_line(self, line: LogLine) -> bytes:
        """Return the bytes of the next line; call `confirm_line` once the file contains it."""
        body = line.model_dump_json(exclude_none=True).encode()[1:]
        return self._make_start(body) + body + b"\n"

    def confirm_line(self, line: bytes) -> None:
        """Advance the chain by a line that the file now contains."""
        chain_hash = line[len(_LINE_PREFIX) : _BODY_START - len(_SEPARATOR)]
        self.head = bytes.fromhex(chain_hash.decode())
        self.size += len(line)
        self.lines += 1

    def iter_bodies(self, file: BufferedReader) -> Iterator[bytes]:
        """Read a log and verify its hash chain; yield the part of each line after its chain hash.

        An incomplete line at the end is not yielded, but stored as `incomplete_line`.

        Raises CheckpointError: a line is too long, or not chained to the lines before it.
        """
        # One byte more than allowed, so that a line that is too long shows.
        while line := file.readline(_MAX_LINE_BYTES + 1):
            if len(line) > _MAX_LINE_BYTES:
                raise self._make_error(f"is longer than {_MAX_LINE_BYTES} bytes")
            body = line.removesuffix(b"\n")[_BODY_START:]
            if line[:_BODY_START] != self._make_start(body):
                if not _may_be_cut_off(line):
                    raise self._make_error("is not chained to what stands before it")
                self.incomplete_line = line
                return
            self.confirm_line(line)
            self.ends_in_newline = line.endswith(b"\n")
            yield body

    def _make_start(self, body: bytes) -> bytes:
        """Return the beginning of the next line, with its chain hash, for this body."""
        chain_hash = hashlib.sha256(self.head + body).hexdigest()
        return _LINE_PREFIX + chain_hash.encode() + _SEPARATOR

    def _make_error(self, problem: str) -> CheckpointError:
        """Return the error for a log that was altered after the last verified line.

        `problem`: the fault of the next line, in words.
        """
        last = f"line {self.lines} is the last that fits" if self.lines else "no line fits"
        return CheckpointError(
            f"{self._path}: line {self.lines + 1} {problem}: the log was altered or damaged there, "
            f"and {last}; ask its party for an unaltered copy, and compare it with its peers' logs"
        )


def _may_be_cut_off(line: bytes) -> bool:
    """Return whether an invalid line may be the beginning of a line that a killed process left.

    Otherwise the line was altered.
    """
    if line.endswith(b"\n") or not (line.startswith(_LINE_PREFIX) or _LINE_PREFIX.startswith(line)):
        return False
    try:
        # A line that was written completely parses; one that was cut off does not.
        json.loads(line)
    except (ValueError, RecursionError):
        return True
    return False


class CounterSource(Protocol):
    """An object that reads this party's counters (`secure_apfed.organisations.counters`)."""

    def list_changes(self, *, is_before_checkpoint: bool) -> Iterable[tuple[str, int, str, str]]:
        """Return name, number, origin and digest of each counter that changed since the last call.

        The values are explained at `CounterLine`.

        Args:
            is_before_checkpoint: whether a checkpoint follows. Some counters are reported only
                then.

        Raises CheckpointError: a counter is missing, or counts less than before.
        """

    def write_checkpoint(self, line_count: int, last_line_hash: str) -> None:
        """Write the log's number of lines and its last hash (hex) to a file beside the counters.

        If the log is later cut off or replaced, this file shows it.
        """


class AuditLog:
    """An observer of a party's links (`LinkObserver`) that writes an audit log.

    Args:
        path: path of the log, which is created or continued.
        party: the log's owner.
        identity: the owner's key pair, which signs the log when it is closed.
        peers: public keys of the other parties, as this party knows them, by name.
        meter: reports the privacy cost of all releases so far.
        clock: returns seconds since 1970.
        counters: reads the counters that this party has in files; a frame is logged and sent only
            after the log contains their state. None: the party has no counters.

    Raises:
        CheckpointError: the log belongs to another party or was altered, or there are too many
            peers.
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
        """Open the log, verify its lines, and write a line that this process opened it."""
        if len(peers) > _MAX_PEERS:
            raise CheckpointError(f"{path}: an audit log is of {_MAX_PEERS} peers at most")
        self.path = path
        self._party = party
        self._identity = identity
        self._meter = meter
        self._clock = clock
        self._counters = counters
        self._charges_at_last_frame = (
            meter.charges
        )  # number of costs in the ledger at the last frame
        self._last_release_payload = b""  # payload for which the ledger last recorded a cost
        self._chain = _Chain(path)
        self._file = open_regular(path, create=True)
        try:
            cut_bytes = self._verify_file()
            public_key = identity.public.hex()
            peer_keys = {name: key.hex() for name, key in peers.items()}
            self._write_line(
                OpeningLine(
                    at=clock(), party=party, identity=public_key, peers=peer_keys, cut=cut_bytes
                )
            )
            self._log_counters(is_before_checkpoint=True)
            self._sync_checkpoint()
        except BaseException:
            os.close(self._file)
            raise

    def _verify_file(self) -> int:
        """Verify the existing lines, and cut off an incomplete line at the end.

        Return the number of bytes that were cut off. Warn if there are any. If only the last
        newline is missing, it is added.

        Raises CheckpointError: the log was altered, or belongs to another party.
        """
        chain = self._chain
        with os.fdopen(os.dup(self._file), "rb") as file:
            for body in chain.iter_bodies(file):
                if chain.lines > 1:
                    continue  # its chain hash is verified; only the first line names the owner
                first_line = _parse_line(body, path=self.path, number=1)
                owner = first_line.party if isinstance(first_line, OpeningLine) else "nobody"
                if not isinstance(first_line, OpeningLine) or owner != self._party:
                    raise CheckpointError(
                        f"{self.path} is the audit log of {owner}, this party is {self._party}; "
                        "put it back where it belongs, or choose another folder"
                    )
        if chain.incomplete_line:
            os.ftruncate(self._file, chain.size)
            warnings.warn(
                f"{self.path}: its last line was torn when a process was killed; its "
                f"{len(chain.incomplete_line)} bytes are cut off, and the log says so",
                stacklevel=4,
            )
        elif not chain.ends_in_newline:
            chain.size += os.write(self._file, b"\n")
        return len(chain.incomplete_line)

    def observe_outgoing(self, envelope: Envelope, frame: bytes) -> None:
        """Log a frame before it is sent; when this returns, the line survives a killed process.

        Raises CheckpointError, OSError: the line cannot be written; nothing may be sent then.
        """
        self._log_counters(is_before_checkpoint=False)
        epsilon = self._get_release_epsilon(envelope.payload)
        figure = None if epsilon is None else self._meter.promise.figure
        fields = {**_describe_envelope(envelope), "epsilon": epsilon, "figure": figure}
        self._write_frame(FrameLine, frame, event="sent", peer=envelope.receiver, **fields)

    def observe_incoming(self, envelope: Envelope, frame: bytes) -> None:
        """Log a frame that was received and decrypted."""
        fields = _describe_envelope(envelope)
        self._write_frame(FrameLine, frame, event="received", peer=envelope.sender, **fields)

    def observe_refusal(self, sender: str, frame: bytes) -> None:
        """Log a frame that could not be decrypted or verified."""
        self._write_frame(RefusalLine, frame, peer=sender)

    def _write_frame(
        self, line_type: type[FrameLine | RefusalLine], frame: bytes, /, **fields: Any
    ) -> None:
        """Write a line for a frame: these fields, and size and digest of the frame.

        The fields are not validated again: the envelope was validated when it was made.
        """
        digest = hashlib.sha256(frame).hexdigest()
        self._write_line(
            line_type.model_construct(at=self._clock(), **fields, size=len(frame), digest=digest)
        )

    def note_contract(self, contract: Contract) -> None:
        """Log the contract of a session, which all parties have signed."""
        resumes = contract.resumes.step if contract.resumes else None
        session = contract.session
        digest = contract.digest.hex()
        self._write_line(
            ContractLine(at=self._clock(), session=session, contract=digest, resumes=resumes)
        )

    def note_restart(self, restart: RestartLine) -> None:
        """Log that the operator restarted a counter: one of the party's files that count releases.

        `restart`: the line, with the count in the log and the count from which it continues.
        """
        self._write_line(restart)

    def note_end(self, end: ProjectEndLine) -> None:
        """Log that the party ended the project in its folder."""
        self._write_line(end)

    def sync(self) -> None:
        """Log changed counters (the party's files that count), and wait until the disk has all.

        Raises CheckpointError: the file was removed, or another process wrote to it.
        """
        self._log_counters(is_before_checkpoint=True)
        status = os.fstat(self._file)
        if not status.st_nlink or status.st_size != self._chain.size:
            raise CheckpointError(
                f"{self.path} was removed, or is written to by another process; restore it from "
                "a copy, and give each run a folder of its own"
            )
        self._sync_checkpoint()

    def close(self) -> None:
        """Log changed counters, sign all lines so far, and close the file.

        The file is signed and closed even if a step before it fails.
        """
        try:
            try:
                self._log_counters(is_before_checkpoint=False)
            finally:
                signature = self._identity.sign(
                    _SIGNATURE_PURPOSE, self._party.encode(), self._chain.head
                )
                self._write_line(SignatureLine(at=self._clock(), signature=signature.hex()))
                self._sync_checkpoint()
        finally:
            os.close(self._file)

    def _log_counters(self, *, is_before_checkpoint: bool) -> None:
        """Write a line for each counter (a file that counts, such as a ledger) that has changed.

        `is_before_checkpoint`: whether a checkpoint follows. Some counters are reported only then.
        """
        changes = (
            self._counters.list_changes(is_before_checkpoint=is_before_checkpoint)
            if self._counters
            else ()
        )
        for name, number, origin, digest in changes:
            self._write_line(
                CounterLine(
                    at=self._clock(), counter=name, number=number, origin=origin, digest=digest
                )
            )

    def _sync_checkpoint(self) -> None:
        """Wait until all lines are on the disk, then write their number beside the counters."""
        os.fsync(self._file)
        if self._counters:
            self._counters.write_checkpoint(self._chain.lines, self._chain.head.hex())

    def _get_release_epsilon(self, payload: bytes) -> float | Literal["inf"] | None:
        """Return the epsilon of all releases so far if this payload is a release, else None.

        A release is the first payload that is sent after the ledger recorded a cost. The same
        payload to further receivers, sent directly afterwards, is part of the same release.
        """
        charges = self._meter.charges
        if charges != self._charges_at_last_frame:
            self._charges_at_last_frame = charges
            self._last_release_payload = payload
        elif not payload or payload != self._last_release_payload:
            self._last_release_payload = b""
            return None
        epsilon = self._meter.promise.epsilon
        return "inf" if epsilon == float("inf") else epsilon

    def _write_line(self, line: LogLine) -> None:
        """Append a line to the file, whole or not at all, and advance the hash chain.

        Raises OSError: the line cannot be written.
        """
        encoded_line = self._chain.encode_line(line)
        try:
            if os.write(self._file, encoded_line) != len(encoded_line):
                raise OSError(f"{self.path}: the disk took only part of a line")
        except OSError:
            os.ftruncate(self._file, self._chain.size)
            raise
        self._chain.confirm_line(encoded_line)


def _describe_envelope(envelope: Envelope) -> dict[str, Any]:
    """Return the fields of a line that come from an envelope's header."""
    return {"kind": envelope.kind, "step": envelope.step, "sequence": envelope.sequence}


@dataclass(kw_only=True)
class LoggedFlow:
    """The number and bytes of the envelopes of one kind to or from one peer, in an audit log.

    Attributes:
        peer: name of the party at the other end.
        event: "sent", "received" or "refused".
        kind: kind of the envelopes; None: refused frames, whose kind is unknown.
        envelopes, size: number of the frames, and their bytes.
    """

    peer: str
    event: str
    kind: Kind | None
    envelopes: int = 0
    size: int = 0


@dataclass(kw_only=True)
class LogSummary:
    """The contents of a log whose chain is intact.

    Attributes:
        path: path of the log.
        head: the chain hash of its last line, hex.
        party: the log's owner.
        identity: the owner's public key (hex), by the last opening of the log.
        peers: the public keys (hex) of the parties that the owner knows, by name.
        lines: number of complete lines.
        opened: number of times that a process opened the log.
        agreed: number of sessions whose contract all parties signed.
        first_at, last_at: times of the first and last line in seconds since 1970, by the party's
            clock.
        cut: bytes of incomplete lines that were cut off.
        torn: bytes of an incomplete line that is at the end now.
        unsigned: number of lines after the last signature; 0 if the log was closed.
        figure: kind of the last epsilon in the log, such as epsilon_x; None: the log has none.
        epsilon: its value; None: no ledger recorded costs of what the party sent, for which there
            is no guarantee then.
        counters: the last line of each counter that was not restarted since, by the name of the
            counter's file.
        restarts: the lines of restarted counters, in order.
        ended: the line that says that the party ended the project; None: not ended.
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
    figure: ReleaseEpsilonName | None = None
    epsilon: float | None = None
    counters: dict[str, CounterLine] = field(default_factory=dict)
    restarts: list[RestartLine] = field(default_factory=list)
    ended: ProjectEndLine | None = None
    _flows: dict[tuple[str, str, Kind | None], LoggedFlow] = field(default_factory=dict, repr=False)

    @property
    def flows(self) -> tuple[LoggedFlow, ...]:
        """The messages that were sent, received or refused, by peer, event and kind."""
        return tuple(self._flows.values())

    @property
    def has_final_signature(self) -> bool:
        """Whether the log ends with its owner's signature."""
        return not self.unsigned and not self.torn

    def as_json(self) -> dict[str, Any]:
        """Return the summary as plain JSON values."""
        fields = asdict(self)
        flows = fields.pop("_flows").values()
        count_by_counter = {
            name: counter_line.number for name, counter_line in self.counters.items()
        }
        restarts = [restart_line.model_dump(mode="json") for restart_line in self.restarts]
        return {
            **fields,
            "counters": count_by_counter,
            "restarts": restarts,
            "signed": self.has_final_signature,
            "flows": list(flows),
            "ended": self.ended and self.ended.model_dump(mode="json"),
        }

    def count_line(self, number: int, line: LogLine, *, chain_before: bytes) -> None:
        """Add a line whose chain hash was verified to the summary.

        Args:
            number: number of the line, from 1.
            line: the parsed line.
            chain_before: hash of the line before, which a signature covers.

        Raises CheckpointError: no run writes such a line here.
        """
        self.lines = number
        self.last_at = line.at
        self.unsigned += 1
        if isinstance(line, OpeningLine):
            self._note_opening(number, line)
        elif isinstance(line, SignatureLine):
            self._check_signature(number, line, chain_before)
            self.unsigned = 0
        elif isinstance(line, FrameLine | RefusalLine):
            self._count_frame(number, line)
        elif isinstance(line, CounterLine):
            self._note_counter(number, line)
        elif isinstance(line, RestartLine):
            self.counters.pop(line.counter, None)
            self.restarts.append(line)
        elif isinstance(line, ProjectEndLine):
            self.ended = line
        else:
            self.agreed += 1

    def _note_counter(self, number: int, line: CounterLine) -> None:
        """Store a counter's last state.

        `number`: number of the line, for the error. Raises CheckpointError: too many counters.
        """
        if line.counter not in self.counters and len(self.counters) >= _MAX_COUNTERS:
            raise self._make_error(number, f"names more than {_MAX_COUNTERS} counters in all")
        self.counters[line.counter] = line

    def _note_opening(self, number: int, line: OpeningLine) -> None:
        """Store who opened the log, and with which peers.

        `number`: number of the line. Raises CheckpointError: another party opened the log before.
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

    def _count_frame(self, number: int, line: FrameLine | RefusalLine) -> None:
        """Add a frame to the flow of its peer, event and kind.

        If it is a release, its epsilon becomes the last one.

        `number`: number of the line, for the error.

        Raises CheckpointError: an unknown peer, or more peers than a log may name.
        """
        if line.peer not in self.peers:
            raise self._make_error(number, f"names {line.peer}, who is no peer of this party")
        kind = line.kind if isinstance(line, FrameLine) else None
        if isinstance(line, FrameLine) and line.epsilon is not None:
            self.epsilon = math.inf if line.epsilon == "inf" else line.epsilon
            self.figure = line.figure or "epsilon_x"
        key = line.peer, line.event, kind
        if key not in self._flows and len(self._flows) >= 2 * _MAX_PEERS * len(Kind):
            raise self._make_error(number, f"names more than {_MAX_PEERS} peers in all")
        flow = self._flows.setdefault(key, LoggedFlow(peer=line.peer, event=line.event, kind=kind))
        flow.envelopes += 1
        flow.size += line.size

    def _check_signature(self, number: int, line: SignatureLine, chain_before: bytes) -> None:
        """Verify the owner's signature of the chain so far.

        `number`: number of the line, for the error. `chain_before`: hash of the line before, which
        is signed.

        Raises CheckpointError: the signature is not valid.
        """
        signature = bytes.fromhex(line.signature)
        public_key = bytes.fromhex(self.identity)
        try:
            verify_signature(
                public_key,
                signature,
                _SIGNATURE_PURPOSE,
                self.party.encode(),
                chain_before,
                signer=self.party,
            )
        except RemoteProtocolError as error:
            raise self._make_error(
                number, f"is no signature of the key {self.identity[:16]}... over what precedes it"
            ) from error

    def _make_error(self, number: int, problem: str) -> CheckpointError:
        """Return the error for a line that no run writes.

        `number`: number of the line. `problem`: its fault, in words.
        """
        return CheckpointError(
            f"{self.path}: line {number} {problem}; no run writes that: ask its party for the log "
            "that its own run wrote"
        )


def _iter_log(path: Path, summary: LogSummary | None = None) -> Iterator[tuple[int, LogLine]]:
    """Verify a log line by line; yield the number (from 1) and the content of each line.

    `summary`: each line is added to it; None: to a summary that is dropped, since adding also
    checks lines.

    Raises CheckpointError: the file is no log, or was altered from some line on.
    """
    summary = LogSummary(path=path) if summary is None else summary
    chain = _Chain(path)
    with open_plain(path) as file:
        chain_before = b""
        for body in chain.iter_bodies(file):
            line = _parse_line(body, path=path, number=chain.lines)
            if chain.lines == 1 and not isinstance(line, OpeningLine):
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
    summary.torn = len(chain.incomplete_line)


def iter_lines(path: Path) -> Iterator[LogLine]:
    """Verify a log line by line; yield its parsed lines in order.

    Raises CheckpointError: the file is missing, is no log, or was altered from some line on.
    """
    for _, line in _iter_log(path):
        yield line


def summarise_log(
    path: Path, *, on_line: Callable[[int, str], None] = lambda line, chain: None
) -> LogSummary:
    """Verify a log, and return its summary.

    `on_line`: called with each line's number and chain hash (hex).

    Raises CheckpointError: the file is missing, is no log, or was altered from some line on.
    """
    summary = LogSummary(path=path)
    for number, _ in _iter_log(path, summary):
        on_line(number, summary.head)
    return summary


def verify_log(path: Path, *, identity: str | None = None) -> LogSummary:
    """Verify a whole log; return its summary.

    Args:
        path: path of the log, or of the party's folder.
        identity: the party's public key (hex) as the reader knows it; it must have signed the end
            of the log. None: trust the key that the log names, and the log may end unsigned.

    Raises CheckpointError: the file is missing, is no log, was altered from some line on, or is not
        signed as required.
    """
    path = path / AUDIT_LOG_NAME if path.is_dir() else path
    summary = summarise_log(path)
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
class Disagreement:
    """The first disagreement of two logs about the messages from one party to another.

    Attributes:
        sent_line: line number in the sender's log of the message that should have arrived; None:
            the sender's log has no further message.
        sent: that message in words.
        received_line: line number in the receiver's log of the message that arrived instead.
        received: that message in words.
    """

    sent_line: int | None
    sent: str
    received_line: int
    received: str


@dataclass(frozen=True, kw_only=True)
class DirectionComparison:
    """The comparison of two logs about the messages from one party to another.

    Attributes:
        sender, receiver: the two parties.
        equal, equal_size: number and bytes of the envelopes that both logs have.
        unreceived, unreceived_size: number and bytes of envelopes that the receiver's log lacks at
            the ends of sessions, which is allowed.
        parting: the first disagreement, at which the counts stop; None: the logs agree.
    """

    sender: str
    receiver: str
    equal: int
    equal_size: int
    unreceived: int
    unreceived_size: int
    parting: Disagreement | None


@dataclass(frozen=True, kw_only=True)
class LogComparison:
    """The comparison of two logs about the messages in both directions, and each log's summary."""

    logs: tuple[LogSummary, LogSummary]
    directions: tuple[DirectionComparison, DirectionComparison]

    @property
    def agree(self) -> bool:
        """Whether the logs agree about the messages in both directions."""
        return all(direction.parting is None for direction in self.directions)

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as plain JSON values."""
        return {
            "agree": self.agree,
            "logs": [log.as_json() for log in self.logs],
            "directions": [asdict(direction) for direction in self.directions],
        }


def compare_logs(first_path: Path, second_path: Path) -> LogComparison:
    """Verify two parties' logs, and compare their lines about the link between the two parties.

    Each path is a log, or a party's folder with its log.

    Raises CheckpointError: a log is not valid, or the two are not logs of two ends of one link.
    """
    first_log = verify_log(first_path)
    second_log = verify_log(second_path)
    _require_peers(first_log, second_log)
    _require_peers(second_log, first_log)
    directions = (
        _compare_direction(first_log, second_log),
        _compare_direction(second_log, first_log),
    )
    return LogComparison(logs=(first_log, second_log), directions=directions)


def _require_peers(log: LogSummary, other_log: LogSummary) -> None:
    """Raise CheckpointError unless the owner of `log` has a link to the owner of `other_log`.

    The public key by which it knows that party must be the one that `other_log` names.
    """
    known_identity = log.peers.get(other_log.party)
    if known_identity is None:
        raise CheckpointError(
            f"{log.path} is the log of {log.party}, who has no link to {other_log.party}, whose "
            f"log is {other_log.path}; compare the logs of two parties of one run"
        )
    if known_identity != other_log.identity:
        raise CheckpointError(
            f"{log.path}: {log.party} knows {other_log.party} by the identity "
            f"{known_identity[:16]}..., and {other_log.path} is signed by "
            f"{other_log.identity[:16]}...: it is of another run, or somebody wrote it anew with "
            "another key"
        )


def _compare_direction(sender_log: LogSummary, receiver_log: LogSummary) -> DirectionComparison:
    """Compare the frames that one party sent with the frames that the other received, in order.

    Frames are equal if their digests are. The last frames of a session may be missing in the
    receiver's log. At any other difference the logs disagree, and the comparison stops.

    `sender_log`, `receiver_log`: summaries of the two parties' logs.
    """
    sent_frames = _iter_frames(sender_log.path, receiver_log.party, ("sent",))
    equal_count = equal_bytes = unreceived_count = unreceived_bytes = 0
    disagreement = None
    next_sent = next(sent_frames, None)
    for received_frame in _iter_frames(
        receiver_log.path, sender_log.party, ("received", "refused")
    ):
        expected_frame = next_sent
        skipped_sizes: list[int] = []  # bytes of frames that were sent and not received
        while next_sent is not None and next_sent.line.digest != received_frame.line.digest:
            # If the logs agree, the rest of the sender's session never arrived: skip it.
            session_number = next_sent.opening
            while next_sent is not None and next_sent.opening == session_number:
                skipped_sizes.append(next_sent.line.size)
                next_sent = next(sent_frames, None)
        if next_sent is None:  # no later session has the received frame, either
            disagreement = _describe_disagreement(expected_frame, received_frame, sender_log)
            break
        equal_count += 1
        equal_bytes += received_frame.line.size
        unreceived_count += len(skipped_sizes)
        unreceived_bytes += sum(skipped_sizes)
        next_sent = next(sent_frames, None)
    # The end of the last session may not have arrived, either.
    while disagreement is None and next_sent is not None:
        unreceived_count += 1
        unreceived_bytes += next_sent.line.size
        next_sent = next(sent_frames, None)
    return DirectionComparison(
        sender=sender_log.party,
        receiver=receiver_log.party,
        equal=equal_count,
        equal_size=equal_bytes,
        unreceived=unreceived_count,
        unreceived_size=unreceived_bytes,
        parting=disagreement,
    )


class _LoggedFrame(NamedTuple):
    """A frame in a log.

    Attributes:
        opening: number of times that the log had been opened, which distinguishes sessions.
        number: number of the line.
        line: the line.
    """

    opening: int
    number: int
    line: FrameLine | RefusalLine


def _describe_disagreement(
    expected: _LoggedFrame | None, received: _LoggedFrame, sender_log: LogSummary
) -> Disagreement:
    """Return a description of the place where two logs disagree.

    Args:
        expected: the next frame in the sender's log; None: the log has no further frame.
        received: the frame in the receiver's log.
        sender_log: summary of the sender's log.
    """
    may_have_lost_lines = sender_log.unsigned or sender_log.torn
    explanation = "; a machine that loses power may lose lines" if may_have_lost_lines else ""
    return Disagreement(
        sent_line=expected.number if expected else None,
        sent=_describe_frame(expected.line) if expected else f"nothing more{explanation}",
        received_line=received.number,
        received=_describe_frame(received.line),
    )


def _describe_frame(line: FrameLine | RefusalLine) -> str:
    """Return a frame's kind, step, number, size and digest in words."""
    if isinstance(line, RefusalLine):
        description = "a frame that was refused"
    else:
        step = "" if line.step < 0 else f" of step {line.step}"
        description = f"{line.kind}{step}, number {line.sequence}"
    return f"{description}, {line.size} bytes, SHA-256 {line.digest[:16]}..."


def _iter_frames(path: Path, peer: str, events: tuple[str, ...]) -> Iterator[_LoggedFrame]:
    """Yield the frames to or from one peer in a log, in order.

    `events`: the events of the frames to yield: "sent", or "received" and "refused".
    """
    session_number = 0
    for number, line in _iter_log(path):
        if isinstance(line, OpeningLine):
            session_number += 1
        elif (
            isinstance(line, FrameLine | RefusalLine) and line.peer == peer and line.event in events
        ):
            yield _LoggedFrame(session_number, number, line)

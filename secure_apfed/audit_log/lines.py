"""What a line of an audit log is, and how the lines are chained.

A line is one JSON object. Its first field, `chain`, is the SHA-256 of the chain of the line before
it and of the bytes that follow in the line; so whoever alters, adds, removes or swaps lines has to
write all that follow anew, and then the last chain is another one. Bounds are checked before
anything is parsed: a log that is read may be anybody's.
"""

import hashlib
import json
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from secure_apfed.errors import CheckpointError
from secure_apfed.exchange import Envelope, Kind
from secure_apfed.exchange.envelope import BEFORE_TRAINING, SESSION_LETTERS
from secure_apfed.names import Name, ReleaseFigure

__all__ = [
    "FILE_NAME",
    "FORMAT",
    "MOST_PEERS",
    "PURPOSE",
    "Agreed",
    "Chain",
    "Frame",
    "Line",
    "Opened",
    "Refused",
    "Signed",
    "parse_line",
]

FILE_NAME = "audit.log"
FORMAT = 1
MOST_PEERS = 1024
PURPOSE = b"audit log v1"
_MOST_LINE = 2**18
_MOST_SIZE = 2**40
_CHAIN_BYTES = 32
_LETTERS = 80
_BEGINNING, _BETWEEN = b'{"chain":"', b'",'
_BODY_AT = len(_BEGINNING) + 2 * _CHAIN_BYTES + len(_BETWEEN)

_Hex32: TypeAlias = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_Count: TypeAlias = Annotated[int, Field(ge=0, le=_MOST_SIZE)]
_Number: TypeAlias = Annotated[int, Field(ge=0, lt=2**63)]


class _Written(BaseModel):
    """Base of every line.

    Attributes:
        at: when, seconds since 1970 by the party's own clock.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    at: float = Field(ge=0)


class Opened(_Written):
    """The log was begun or gone on with: one of these a process.

    Attributes:
        party: whose log it is; identity: its Ed25519 public key, hex.
        peers: the others' public keys as this party knows them, by name.
        cut: bytes of a line that a killed process left torn, and that were cut off.
    """

    event: Literal["opened"] = "opened"
    format: Literal[1] = 1
    party: Name
    identity: _Hex32
    peers: dict[Name, _Hex32] = Field(max_length=MOST_PEERS)
    cut: _Count = 0


class Agreed(_Written):
    """All parties have signed the contract of a session.

    Attributes:
        session: its name; contract: SHA-256 of its contract, hex.
        resumes: the step from which it goes on; absent: from the start.
    """

    event: Literal["agreed"] = "agreed"
    session: str = Field(min_length=1, max_length=SESSION_LETTERS)
    contract: _Hex32
    resumes: _Number | None = None


class Frame(_Written):
    """An envelope that was sent, or received and opened.

    Attributes:
        peer: the other end; kind, step, sequence: as its header says.
        size: bytes of header and sealed payload, as both ends have them.
        digest: their SHA-256, hex.
        epsilon: of all that was let out so far, where the ledger was charged for what this
            envelope holds; "inf": without bound.
        figure: what that epsilon is called, of `secure_apfed.privacy_rows.FIGURES`; absent beside
            one: epsilon_x.
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

    @classmethod
    def of(
        cls, event: Literal["sent", "received"], envelope: Envelope, frame: bytes, *, at: float,
        epsilon: float | Literal["inf"] | None = None, figure: ReleaseFigure | None = None,
    ) -> "Frame":  # fmt: skip
        """What the log says of an envelope."""
        peer = envelope.receiver if event == "sent" else envelope.sender
        # Its fields were checked when the envelope was made.
        return cls.model_construct(
            at=at, event=event, peer=peer, kind=envelope.kind, step=envelope.step,
            sequence=envelope.sequence, size=len(frame), digest=hashlib.sha256(frame).hexdigest(),
            epsilon=epsilon, figure=figure,
        )  # fmt: skip


class Refused(_Written):
    """A frame came on the link from `peer` that could not be opened; the session ends."""

    event: Literal["refused"] = "refused"
    peer: Name
    size: _Count
    digest: _Hex32

    @classmethod
    def of(cls, sender: str, frame: bytes, *, at: float) -> "Refused":
        """What the log says of a frame."""
        digest = hashlib.sha256(frame).hexdigest()
        return cls.model_construct(at=at, peer=sender, size=len(frame), digest=digest)


class Signed(_Written):
    """The party's signature of the chain so far, Ed25519, hex."""

    event: Literal["signed"] = "signed"
    signature: str = Field(pattern="^[0-9a-f]{128}$")


Line: TypeAlias = Opened | Agreed | Frame | Refused | Signed
_EVENTS: TypeAdapter[Line] = TypeAdapter(Annotated[Line, Field(discriminator="event")])


def parse_line(body: bytes, *, path: Path, number: int) -> Line:
    """Read what stands behind the chain in a line.

    Raises:
        CheckpointError: it is not as this version writes it.
    """
    try:
        return _EVENTS.validate_json(b"{" + body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place, why = ".".join(map(str, first["loc"])), str(first["msg"]).lower()
        raise CheckpointError(
            f"{path}: line {number} is chained and yet not as this version writes it "
            f"(at {place[:_LETTERS]!r}: {why[:_LETTERS]!r}); it was written by another program or "
            "version: ask its party for the log that its own run wrote"
        ) from None


class Chain:
    """The chain over the lines so far: makes the next line, or follows a log that exists.

    Args:
        path: of the log, for errors.

    Attributes:
        head: chain of the last line; size: bytes of all whole lines.
        lines: how many; torn: the beginning of a line at the end of what `follow` went through.
        newline: whether the last line ends with its own.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.head, self.size, self.lines = b"", 0, 0
        self.torn, self.newline = b"", True

    def line(self, written: Line) -> bytes:
        """The bytes of the next line; `wrote` says that the file holds it."""
        body = written.model_dump_json(exclude_none=True).encode()[1:]
        return _BEGINNING + self._next(body).hex().encode() + _BETWEEN + body + b"\n"

    def wrote(self, line: bytes) -> None:
        """Go on from a line that the file holds now."""
        self.head = bytes.fromhex(line[len(_BEGINNING) : _BODY_AT - len(_BETWEEN)].decode())
        self.size += len(line)
        self.lines += 1

    def follow(self, file: BufferedReader) -> Iterator[bytes]:
        """Go through a log; yields what stands behind the chain in each line.

        Raises:
            CheckpointError: from some line on it is not as a log was written.
        """
        while line := file.readline(_MOST_LINE + 1):
            if len(line) > _MOST_LINE:
                raise self._broken(f"is longer than {_MOST_LINE} bytes")
            body = line.removesuffix(b"\n")[_BODY_AT:]
            if line[:_BODY_AT] != _BEGINNING + self._next(body).hex().encode() + _BETWEEN:
                if not _is_torn(line):
                    raise self._broken("is not chained to what stands before it")
                self.torn = line
                return
            self.wrote(line)
            self.newline = line.endswith(b"\n")
            yield body

    def _next(self, body: bytes) -> bytes:
        return hashlib.sha256(self.head + body).digest()

    def _broken(self, why: str) -> CheckpointError:
        last = f"line {self.lines} is the last that fits" if self.lines else "no line fits"
        return CheckpointError(
            f"{self._path}: line {self.lines + 1} {why}: the log was altered or damaged there, and "
            f"{last}; ask its party for an unaltered copy, and compare it with its peers' logs"
        )


def _is_torn(line: bytes) -> bool:
    """Whether it is the mere beginning of a line, as a process leaves it that is killed."""
    if line.endswith(b"\n") or not (line.startswith(_BEGINNING) or _BEGINNING.startswith(line)):
        return False
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return True
    return False

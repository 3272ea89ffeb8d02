"""Envelopes, the only form in which anything passes between parties.

An envelope's header names session, step, kind, sender, receiver and sequence; the link
authenticates it together with the payload (see `apfed_protocols.seal`). Payloads are tensors
and plain metadata (see `secure_apfed.exchange.codec`); never code, never method names.
"""

from dataclasses import dataclass, field
from enum import StrEnum

import msgpack

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from secure_apfed.base.peer_text import escape_text, quote_text

BEFORE_TRAINING = -1

SCHEMA_VERSION = 1
_HEADER_LIMIT = 4096
_NAME_LIMIT = 64
SESSION_LETTERS = 256
_NUMBER_LIMIT = 2**63
_FIELD_TYPES = [int, str, int, str, str, str, int]


class Kind(StrEnum):
    """The kind of a message between parties; the table of all messages that exist."""

    GREETING = "greeting"
    SESSION = "session"
    SIGNATURE = "signature"
    ALIGNMENT = "alignment"
    SUM_SETUP = "sum-setup"
    ALIVE = "alive"
    REQUEST = "request"
    LABELS = "labels"
    VOTES = "cast-votes"
    RIGHT_VOTES = "right-votes"
    BALLOT_SIZE = "ballot-size"
    COMMITMENT = "commitment"
    COIN = "coin"
    CHALLENGE = "challenge"
    ENCRYPTED_LABELS = "encrypted-labels"
    DEALT = "dealt"
    REPRESENTATIONS = "representations"
    CONTRIBUTION = "contribution"
    SINGULAR_VECTORS = "singular-vectors"
    SUM_REQUEST = "sum-request"
    SUM_ANSWER = "sum-answer"
    SUM = "sum"
    GRADIENTS = "gradients"
    LOOKUP = "lookup"
    READY = "ready"
    CHECKPOINT = "checkpoint"
    SAVED = "saved"
    END = "end"
    ABORT = "abort"

    @property
    def phase(self) -> str:
        """The phase of a session to which such a message belongs, such as "alignment", for users.

        A kind that `_PHASES` does not list belongs to training.
        """
        return _PHASES.get(self, "training")


_PHASES = {
    kind: phase
    for phase, kinds in {
        "agreement": (Kind.GREETING, Kind.SESSION, Kind.SIGNATURE),
        "alignment": (Kind.ALIGNMENT, Kind.ALIVE),
        "set-up": (
            Kind.SUM_SETUP,
            Kind.BALLOT_SIZE,
            Kind.DEALT,
            Kind.COMMITMENT,
            Kind.COIN,
            Kind.CHALLENGE,
            Kind.READY,
        ),
        "checkpoint": (Kind.SAVED,),
        "prediction": (Kind.LOOKUP,),
    }.items()
    for kind in kinds
}


@dataclass(frozen=True, kw_only=True)
class Envelope:
    """A message from one party to another.

    Attributes:
        session: name of the session.
        step: step of training, from 0; -1 before training.
        kind: kind of the message, which says how its payload is parsed.
        sender, receiver: names of the two parties.
        sequence: number of this message on its link, from 0.
        payload: the message's content; absent from `repr`, since it may be private.
    """

    session: str
    step: int
    kind: Kind
    sender: str
    receiver: str
    sequence: int
    payload: bytes = field(repr=False)

    def __post_init__(self) -> None:
        """Raise LocalProtocolError if a name has a wrong length or a number is out of range."""
        for name in (self.sender, self.receiver):
            if not 0 < len(name) <= _NAME_LIMIT:
                raise LocalProtocolError(
                    f"a party's name has 1 to {_NAME_LIMIT} characters, got {quote_text(name)}"
                )
        if self.sender == self.receiver:
            raise LocalProtocolError(f"{self.sender} cannot write to itself")
        if not 0 < len(self.session) <= SESSION_LETTERS:
            raise LocalProtocolError(
                f"a session's name has 1 to {SESSION_LETTERS} characters, got {len(self.session)}"
            )
        if not (-1 <= self.step < _NUMBER_LIMIT and 0 <= self.sequence < _NUMBER_LIMIT):
            raise LocalProtocolError(
                f"step {self.step} or sequence {self.sequence} is out of range; they count from "
                "-1 and 0, below 2^63"
            )

    @property
    def header(self) -> bytes:
        """The header in bytes: all fields except the payload.

        The encoding is canonical, since the encryption of the payload authenticates these bytes.
        """
        fields = (SCHEMA_VERSION, self.session, int(self.step), self.kind.value)
        packed: bytes = msgpack.packb((*fields, self.sender, self.receiver, int(self.sequence)))
        return packed

    def with_payload(self, payload: bytes) -> "Envelope":
        """Return an envelope with this payload and the other fields, which were checked before."""
        envelope = object.__new__(type(self))
        vars(envelope).update(vars(self), payload=payload)
        return envelope

    @classmethod
    def parse_header(cls, header: bytes) -> "Envelope":
        """Parse a received header; return its envelope, with an empty payload.

        Raises RemoteProtocolError: `header` is no header, is of another schema version, or is not
            the canonical encoding of its fields.
        """
        try:
            if len(header) > _HEADER_LIMIT:
                raise ValueError("header too long")
            fields = msgpack.unpackb(header)
            # Exact types: msgpack also has floats, booleans and bytes, which compare and count
            # like numbers and names until something downstream trips over them.
            if list(map(type, fields)) != _FIELD_TYPES:
                raise TypeError("fields of other types")
            version, session, step, kind, sender, receiver, sequence = fields
            if version != SCHEMA_VERSION:
                raise RemoteProtocolError(
                    f"the peer speaks envelope schema {version!r}, this party {SCHEMA_VERSION}"
                )
            envelope = cls(
                session=session,
                step=step,
                kind=Kind(kind),
                sender=sender,
                receiver=receiver,
                sequence=sequence,
                payload=b"",
            )
            if envelope.header != header:
                raise ValueError("not canonical")
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise RemoteProtocolError("an envelope's header is malformed") from error
        return envelope


def clean_text(text: bytes, maximum: int = 400) -> str:
    """Return a peer's text as one line, with control characters escaped.

    `maximum`: how many bytes of the text are read; the rest is dropped.
    """
    return escape_text(text[:maximum].decode("utf-8", "replace"))


def quote_reason(text: bytes, maximum: int = 400) -> str:
    """Return a peer's text in quotes, so that readers do not take it for this party's words.

    Control characters are escaped. `maximum`: how many bytes of the text are read; the rest is
    dropped.
    """
    return quote_text(text[:maximum].decode("utf-8", "replace"), maximum=maximum)

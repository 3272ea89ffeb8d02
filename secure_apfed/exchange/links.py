"""A role's links to the others: it sends envelopes, and awaits them by sender, kind and step.

Run by: every party, one object a session. Once the contract is signed (see
`secure_apfed.exchange.agreement`) every envelope is sealed end to end between its two parties (see
`apfed_protocols.seal`), so a message under another contract, replayed, reordered or altered is
refused. A role is an `async def` over its links and has no other input or output: its driver (see
`secure_apfed.exchange.drivers`) carries the frames. Long messages before training travel in parts
(see `MessageAssembler`), and heartbeats are read while a role waits (see `Heartbeats`); roles see
whole messages only.
"""

import logging
import struct
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from apfed_protocols.conversation import Conversation, Outgoing
from apfed_protocols.errors import (
    LocalProtocolError,
    PartyLeftError,
    RemoteProtocolError,
    RunStoppedError,
)
from apfed_protocols.seal import SealedLink
from secure_apfed.base.peer_text import quote_text
from secure_apfed.exchange.envelope import BEFORE_TRAINING, Envelope, Kind, quote_reason

KINDS_IN_PARTS = frozenset({Kind.ALIGNMENT, Kind.SUM_SETUP, Kind.COIN, Kind.LOOKUP})
"""Kinds of messages that travel in parts, also where one part is enough."""
PART_BYTES = 2**24
MAX_BYTES = 2**30
"""The longest message that is taken of a peer where the receiver says nothing else."""
_PART_HEADER = struct.Struct(">IQQ")  # number of the message, its length, offset of the part in it
PART_HEADER_BYTES = _PART_HEADER.size

UNNAMED_SESSION = "unnamed"
"""Session name of envelopes that are sent before all parties agreed on a session and sealed their
links."""
_LENGTH_BYTES = 2
_TAG_BYTES = 16  # of AES-GCM
_REASON_LETTERS = 500
_LOGGER = logging.getLogger(__name__)
T = TypeVar("T")
Frame: TypeAlias = tuple[str, bytes]
"""A received frame: the sender's name, and the sealed bytes."""
_LOG_SAYS_MORE = "; its own log says more"
# Reasons in ABORT messages that a new session would meet again.
_FINAL_REASONS = tuple(
    f"{kind}Error{_LOG_SAYS_MORE}"
    for kind in ("Config", "Data", "Model", "Checkpoint", "IntersectionTooSmall", "BudgetExhausted")
)
IDS_PER_HEARTBEAT = 2**16
"""Processed IDs after which a heartbeat is due: 2.6 s of a thread that takes 40 us for an ID."""
_SPARE_HEARTBEATS = 4
_HEARTBEAT = struct.Struct(">Q")  # a heartbeat: the number of IDs processed so far


@dataclass(frozen=True, kw_only=True)
class Awaited:
    """The next message that a role waits for.

    Attributes:
        me: name of the waiting party.
        senders: the message may come from any of these peers.
        kinds: the message's kind is one of these.
        step: the step that the message must have; None: any.
        min_senders: how many of the senders must still be connected; with fewer the wait fails.
        patience: how long a silence is accepted, in units of `unit_s`. A party that waits for a
            reply has more patience than the replying party has for what the reply needs. So the
            party that waits for the silent one itself notices first, and names it.
        unit_s: seconds of one unit of patience, from the contract; None: the driver's default.
        needed_peers: those without whom the session cannot continue. If one of them has left, the
            awaited peers will leave, too, and get a few seconds to say why.
        is_prediction: whether the session's steps are joint predictions instead of training.
    """

    me: str
    senders: tuple[str, ...]
    kinds: tuple[Kind, ...]
    step: int | None
    min_senders: int = 1
    patience: int = 1
    unit_s: float | None = None
    needed_peers: tuple[str, ...] = ()
    is_prediction: bool = False

    def __await__(self) -> Generator["Awaited", Frame, Frame]:
        """Suspend the role's script here; its driver resumes it with a frame from a sender."""
        return (yield self)

    @property
    def phase(self) -> str:
        """The phase of the session in which the awaited message is sent, such as "training"."""
        phase = self.kinds[0].phase
        return "prediction" if self.is_prediction and phase == "training" else phase

    def __str__(self) -> str:
        """Return in words which message is expected, for errors."""
        kinds = " or ".join(self.kinds)
        step = "" if self.step is None else f" of step {self.step}"
        return f"{self.me} expected {kinds}{step} from {' or '.join(self.senders)}"


Script: TypeAlias = Coroutine[Awaited, Frame, T]
"""A role's coroutine: it yields what it awaits, and is resumed with the frame that came."""


class LinkObserver(Protocol):
    """An observer of every frame (encrypted message) that one party sends or receives.

    It cannot alter frames. An error that it raises stops the role, so that an audit log can make
    sure that no frame leaves before it is recorded.
    """

    def observe_outgoing(self, envelope: Envelope, frame: bytes) -> None:
        """Note a frame before it is sent."""

    def observe_incoming(self, envelope: Envelope, frame: bytes) -> None:
        """Note a frame that was received and decrypted."""

    def observe_refusal(self, sender: str, frame: bytes) -> None:
        """Note a frame on the link from `sender` that could not be decrypted."""


def count_overhead(envelope: Envelope, *, sealed: bool) -> int:
    """Return how many bytes an envelope's frame has in addition to its payload.

    They are the header's length, the header, and the authentication tag, if the frame is encrypted
    (`sealed`).
    """
    return _LENGTH_BYTES + len(envelope.header) + (_TAG_BYTES if sealed else 0)


def _log_envelope(action: str, envelope: Envelope, size: int) -> None:
    """Log a message's kind, step, parties and size; its content is not logged.

    `action`: "sends" or "receives". `size`: bytes of the message with header and encryption.
    """
    _LOGGER.debug(
        "%s %s: step %d, from %s to %s, %d bytes",
        action,
        envelope.kind,
        envelope.step,
        envelope.sender,
        envelope.receiver,
        size,
    )


class Links:
    """The links of party `me` to its peers in a session; it encrypts and numbers the messages.

    Args:
        me: this party's name.
        peers: names of the other parties.
        post: sends a frame (an encrypted message with its header) to a peer.
        record: called with every envelope that is sent, and the bytes of its frame.
        observers: notified of every frame.

    Attributes:
        heartbeats: the progress reports that this party sends in long computations, and those that
            it accepts from its peers.
        unit_s: seconds of one unit of patience (see `Awaited`), from the contract; None: the
            driver's default.
        needed_peers: those without whom the session cannot continue; none before there is a
            contract.
        is_prediction: whether the session makes joint predictions instead of training.
    """

    unit_s: float | None = None
    needed_peers: tuple[str, ...] = ()
    is_prediction: bool = False

    def __init__(
        self,
        me: str,
        peers: Sequence[str],
        post: Callable[[str, bytes], None],
        record: Callable[[Envelope, int], None] = lambda envelope, wire_bytes: None,
        observers: Sequence[LinkObserver] = (),
    ) -> None:
        """Prepare links without encryption, on which the parties agree on a contract."""
        self.me = me
        self._peers = tuple(peers)
        self._observers = tuple(observers)
        self._post_frame = post
        self._record_envelope = record
        self._session = UNNAMED_SESSION
        self._sealed_link_by_peer = dict[
            str, SealedLink
        ]()  # by peer: encryption keys; empty before `seal`
        self._sent_envelopes: Counter[str] = Counter()  # by receiver, since the links were sealed
        self._messages_in_parts: Counter[str] = Counter()  # by receiver: how many were sent
        self._assemblers = {peer: MessageAssembler(me, peer) for peer in self._peers}
        # By sender: a READY that came while a protocol before training still ran.
        self._early_messages: dict[str, Envelope] = {}
        self._interrupted_receivers = set[str]()  # peers to whom sending began and did not end
        self.heartbeats = Heartbeats(me, peers, self._send_heartbeat)

    def seal(self, session: str, seals: Mapping[str, SealedLink]) -> None:
        """Encrypt every message from now on, and accept only encrypted messages of this session.

        `session`: the session's name in the contract. `seals`: for each peer, the keys that encrypt
        and authenticate messages to and from it.

        Raises LocalProtocolError: the links are encrypted already, or a peer has no keys.
        """
        if self._sealed_link_by_peer or set(seals) != set(self._peers):
            raise LocalProtocolError(
                f"{self.me} seals its links once, and all of them: {', '.join(self._peers)}"
            )
        self._session = session
        self._sealed_link_by_peer = dict(seals)
        self._sent_envelopes.clear()

    def send(self, receiver: str, kind: Kind, step: int, payload: bytes = b"") -> None:
        """Encrypt and send one message; a kind that may be long travels in several envelopes.

        Args:
            receiver: a peer.
            kind: kind of the message.
            step: step of training, or `BEFORE_TRAINING`.
            payload: the message's bytes.

        Raises LocalProtocolError: no link leads to `receiver`.
        """
        self._require_links((receiver,))
        bodies: Iterable[bytes] = (payload,)
        if kind in KINDS_IN_PARTS:
            bodies = split_into_parts(self._messages_in_parts[receiver], payload)
        for body in bodies:
            envelope = Envelope(
                session=self._session,
                step=step,
                kind=kind,
                sender=self.me,
                receiver=receiver,
                sequence=self._sent_envelopes[receiver],
                payload=body,
            )
            # An error from here on leaves the receiver in this set; see `abort`.
            self._interrupted_receivers.add(receiver)
            self._send_envelope(envelope)
            self._interrupted_receivers.discard(receiver)
        if kind in KINDS_IN_PARTS:
            self._messages_in_parts[receiver] += 1

    def _send_envelope(self, envelope: Envelope) -> None:
        """Encrypt an envelope, if the links are sealed, notify the observers, and post its frame.

        A frame is the header's length (2 bytes), the header, and the payload.
        """
        receiver = envelope.receiver
        header = envelope.header
        body = envelope.payload
        if self._sealed_link_by_peer:
            sealed_link = self._sealed_link_by_peer[receiver]
            body = sealed_link.seal(body, sequence=envelope.sequence, associated=header)
        self._sent_envelopes[receiver] += 1
        frame = len(header).to_bytes(_LENGTH_BYTES, "big") + header + body
        self._record_envelope(envelope, len(frame))
        _log_envelope("sends", envelope, len(frame))
        for observer in self._observers:
            observer.observe_outgoing(envelope, frame)
        self._post_frame(receiver, frame)

    def _send_heartbeat(self, peer: str, heartbeat: bytes) -> None:
        """Send a peer how many IDs this party has processed so far, 8 bytes."""
        self.send(peer, Kind.ALIVE, BEFORE_TRAINING, heartbeat)

    def abort(self, error: BaseException) -> None:
        """Tell all peers that this party stops, and why.

        The text of a `PartyLeftError` is sent in full. Of any other error only the type is sent,
        since its text may contain values that are private to two parties.
        """
        is_departure = isinstance(error, PartyLeftError)
        reason = str(error) if is_departure else f"{type(error).__name__}{_LOG_SAYS_MORE}"
        # If this party was interrupted while it sent to a peer, the message may be lost, and the
        # peer would refuse the next number: it sees the link close instead.
        for peer in self._peers:
            if peer not in self._interrupted_receivers:
                self.dismiss_peer(peer, reason)

    def dismiss_peer(self, peer: str, reason: str) -> None:
        """Tell one peer that the session is over for it, and why."""
        self.send(peer, Kind.ABORT, BEFORE_TRAINING, reason[:_REASON_LETTERS].encode())

    async def receive(
        self,
        senders: str | Sequence[str],
        *kinds: Kind,
        step: int | None = None,
        min_senders: int = 1,
        patience: int = 1,
        max_bytes: int = MAX_BYTES,
    ) -> Envelope:
        """Wait for the next message from one of these senders, and return it with all its parts.

        Args:
            senders: the awaited peer or peers.
            kinds: the message's kind is one of these.
            step: the step that the message must have; None: any.
            min_senders: how many of the senders must still be connected; with fewer the wait fails.
            patience: how long to wait, in multiples of `unit_s`; see `Awaited`.
            max_bytes: the largest number of bytes of the message, over all parts.

        Raises:
            LocalProtocolError: no link leads to one of the senders.
            PartyLeftError: no message arrived within the patience, or too few senders are left.
            RunStoppedError: a sender reports that it stops.
            RemoteProtocolError: an unexpected message arrived.
        """
        awaited = Awaited(
            me=self.me,
            senders=(senders,) if isinstance(senders, str) else tuple(senders),
            kinds=kinds,
            step=step,
            min_senders=min_senders,
            patience=patience,
            unit_s=self.unit_s,
            needed_peers=self.needed_peers,
            is_prediction=self.is_prediction,
        )
        self._require_links(awaited.senders)
        message = None
        early_senders = [name for name in awaited.senders if name in self._early_messages]
        if early_senders:
            message = self._early_messages.pop(early_senders[0])
        while message is None:
            try:
                sender, frame = await awaited
            except PartyLeftError as error:
                # A sender may have stopped in the middle of a message: then the error says so.
                interruptions = [self._assemblers[name].interruption for name in awaited.senders]
                if not any(interruptions):
                    raise
                silence = str(error).replace("; nothing came", "; nothing more came")
                reason = "; ".join([silence, *filter(None, interruptions)])
                raise PartyLeftError(
                    reason, missing_parties=error.missing_parties, has_left=error.has_left
                ) from error
            message = self._assemble_message(awaited, self._open_frame(sender, frame), max_bytes)
        return message

    def _assemble_message(
        self, awaited: Awaited, envelope: Envelope, max_bytes: int
    ) -> Envelope | None:
        """Process a received envelope; return the message that it completes.

        Returns None for a heartbeat, and for a part of a message that is not complete.

        Args:
            awaited: what this party waits for.
            envelope: the decrypted envelope.
            max_bytes: the largest number of bytes of the message, over all parts.

        Raises:
            RunStoppedError: the envelope says that its sender stops.
            RemoteProtocolError: the envelope is not what is awaited.
        """
        sender = envelope.sender
        kind = envelope.kind
        assembler = self._assemblers[envelope.sender]
        if kind is Kind.ABORT:
            raise RunStoppedError(
                f"{awaited.phase}: {sender} stopped the run: "
                f"{quote_reason(envelope.payload, _REASON_LETTERS)}",
                missing_parties=(sender,),
            )
        # A message in parts has begun, and an envelope of another kind came before it was complete.
        if assembler.kind not in ("", kind):
            raise RemoteProtocolError(
                f"{sender} sent {kind} to {self.me} in the middle of a message of "
                f"{assembler.kind}; parts of a message follow one another"
            )
        if kind is Kind.ALIVE:
            self.heartbeats.accept_heartbeat(sender, envelope.payload)
            return None
        if kind not in awaited.kinds or awaited.step not in (None, envelope.step):
            raise RemoteProtocolError(
                f"{awaited}, got {kind} of step {envelope.step} from {sender}"
            )
        if kind not in KINDS_IN_PARTS:
            return envelope
        payload = assembler.add_part(envelope.payload, kind, max_bytes=max_bytes)
        return None if payload is None else envelope.with_payload(payload)

    async def run_conversation(
        self, kind: Kind, role: Conversation, peers: Sequence[str], *, max_bytes: int = MAX_BYTES
    ) -> None:
        """Run one end of an interactive protocol with these peers, before training.

        A peer whose end is finished reports READY, maybe while others still exchange messages. Its
        READY is stored, and the next `receive` from this peer returns it.

        Args:
            kind: kind of the protocol's messages, such as a set intersection's.
            role: this party's end of the protocol, which returns the messages to send.
            peers: the other parties that take part.
            max_bytes: the largest number of bytes of a message.

        Raises:
            LocalProtocolError: the role writes to a party that takes no part.
            RemoteProtocolError: a peer stopped answering, or sent a message that the protocol does
                not allow.
        """

        def send_messages(messages: Iterable[Outgoing]) -> None:
            """Send the protocol's messages to peers that take part in it."""
            for message in messages:
                if message.receiver not in peers:
                    raise LocalProtocolError(
                        f"{self.me} wrote to {message.receiver!r}, who takes no part in {kind}; "
                        f"its peers are {', '.join(peers)}"
                    )
                self.send(message.receiver, kind, BEFORE_TRAINING, message.body)

        send_messages(role.start())
        unfinished_peers = list(peers)
        while not role.is_finished:
            try:
                message = await self.receive(
                    unfinished_peers,
                    kind,
                    Kind.READY,
                    step=BEFORE_TRAINING,
                    min_senders=len(unfinished_peers),
                    max_bytes=max_bytes,
                )
            except PartyLeftError as error:
                finished_peers = ", ".join(peer for peer in peers if peer not in unfinished_peers)
                if not finished_peers:
                    raise
                raise PartyLeftError(
                    f"{error}; {finished_peers} said before that its {kind} is over: perhaps too "
                    "early",
                    missing_parties=error.missing_parties,
                    has_left=error.has_left,
                ) from error
            if message.kind is kind:
                send_messages(role.receive(message.sender, message.payload))
            else:
                unfinished_peers.remove(message.sender)
                self._early_messages[message.sender] = message

    def _require_links(self, peers: Sequence[str]) -> None:
        """Raise LocalProtocolError if there is no link to one of these peers."""
        for peer in peers:
            if peer not in self._assemblers:
                raise LocalProtocolError(
                    f"there is no link from {self.me!r} to {peer!r}; {self.me} has links to "
                    f"{', '.join(self._peers) or 'nobody'}"
                )

    def _open_frame(self, sender: str, frame: bytes) -> Envelope:
        """Decrypt a frame; return its envelope, and notify the observers of success or refusal.

        A frame is the header's length (2 bytes), the header, and the payload. The payload is
        encrypted once `seal` was called.

        Raises:
            RunStoppedError: the sender stopped before it could encrypt its messages.
            RemoteProtocolError: the frame is malformed, altered, or of another session or peer.
        """
        length = int.from_bytes(frame[:_LENGTH_BYTES], "big")
        header = frame[_LENGTH_BYTES : _LENGTH_BYTES + length]
        body = frame[_LENGTH_BYTES + length :]
        try:
            try:
                claimed_header = Envelope.parse_header(header)
            except RemoteProtocolError as error:
                reason = f"{self.me}, on the link from {sender}: {error}"
                raise RemoteProtocolError(reason) from error
            # A peer that fails before it has the keys can only report this unencrypted.
            if (
                self._sealed_link_by_peer
                and claimed_header.kind is Kind.ABORT
                and claimed_header.session == UNNAMED_SESSION
            ):
                raise RunStoppedError(
                    f"agreement: {sender} stopped the run before its links were sealed, and says "
                    f"without a seal: {quote_reason(body, _REASON_LETTERS)}",
                    missing_parties=(sender,),
                )
            claimed_origin = (
                claimed_header.session,
                claimed_header.sender,
                claimed_header.receiver,
            )
            if claimed_origin != (self._session, sender, self.me):
                raise RemoteProtocolError(
                    f"{self.me}: a frame on the link from {sender} claims to be from "
                    f"{quote_text(claimed_header.sender)} to "
                    f"{quote_text(claimed_header.receiver)} in session "
                    f"{quote_text(claimed_header.session)}"
                )
            if self._sealed_link_by_peer:
                sealed_link = self._sealed_link_by_peer[sender]
                body = sealed_link.open(body, sequence=claimed_header.sequence, associated=header)
        except RemoteProtocolError:
            _LOGGER.warning("%s refuses a frame of %d bytes from %s", self.me, len(frame), sender)
            for observer in self._observers:
                observer.observe_refusal(sender, frame)
            raise
        envelope = claimed_header.with_payload(body)
        _log_envelope("receives", envelope, len(frame))
        for observer in self._observers:
            observer.observe_incoming(envelope, frame)
        return envelope


def is_final_stop(error: PartyLeftError) -> bool:
    """Return whether a party stopped for a reason that a new session would meet again.

    Such reasons are errors in settings, tables, models or checkpoints, too few common people, and
    an exhausted privacy budget. The error's text has the peer's error type, as `Links.abort` sends
    it.
    """
    return any(kind in str(error) for kind in _FINAL_REASONS)


# Large messages travel in parts at two levels. Above encryption, messages of set-up have parts of
# 16 MiB: AES-GCM ends at 2^31 - 1 bytes, which set intersection reaches at 67 million IDs. Below it
# (`exchange/resumable_link.py`) all frames travel in parts of 1 MiB, so that little is sent again
# after a break. Every part names its message, the message's length and the part's offset, so a
# receiver refuses a message that is too long before it takes any memory for it. Protects from:
# peers that announce too much, stop midway, repeat, leave out or reorder parts, or put one message
# into another.


def split_into_parts(
    message_number: int, message: bytes, part_bytes: int | None = None
) -> Iterator[bytes]:
    """Yield a message in parts, which `MessageAssembler` joins; an empty message has one part.

    The header of each part has the message's number and length, and the part's offset in it.

    Args:
        message_number: number of the message on its link, from 0.
        message: bytes of the message.
        part_bytes: bytes of a part, without header; None: `PART_BYTES`.
    """
    part_bytes = part_bytes or PART_BYTES
    for offset in range(0, len(message) or 1, part_bytes):
        yield (
            _PART_HEADER.pack(message_number, len(message), offset)
            + message[offset : offset + part_bytes]
        )


class MessageAssembler:
    """A joiner of the parts in which one peer sends its messages, one message after another.

    Attributes:
        kind: kind of the message whose parts are being received; "" between messages.
    """

    def __init__(self, me: str, peer: str, size: int | None = None) -> None:
        """Expect the first part of the peer's first message.

        `me`, `peer`: names for errors. `size`: bytes of a part, without header; None: `PART_BYTES`.
        """
        self._me = me
        self._peer = peer
        self._part_bytes = size or PART_BYTES
        self._message_number = 0  # number of the present or the next message
        self._message_bytes = 0  # bytes of the present message, as announced
        self.kind = ""
        self._received_bytes = bytearray()

    @property
    def interruption(self) -> str:
        """The sentence that says how much of an unfinished message came; "" between messages."""
        if not self.kind:
            return ""
        return (
            f"{self._peer} stopped midway in a message: {len(self._received_bytes)} of "
            f"{self._message_bytes} bytes of {self.kind} came"
        )

    def add_part(self, part: bytes, kind: str, *, max_bytes: int = MAX_BYTES) -> bytes | None:
        """Add the next part; return the message if it is complete now, else None.

        Args:
            part: a header (number of the message, its length, offset of the part), then bytes of
                the message.
            kind: kind of the message, for errors.
            max_bytes: the largest number of bytes of the whole message.

        Raises RemoteProtocolError: the part is out of order or of another size than expected, or
            the message is too long.
        """
        if len(part) < PART_HEADER_BYTES:
            raise RemoteProtocolError(
                f"{self._peer} sent {len(part)} bytes of {kind} to {self._me}, too few for a part "
                "of a message"
            )
        number, total, offset = _PART_HEADER.unpack_from(part)
        if not self.kind:
            self._start_message(kind, number, total, max_bytes)
        if (number, total, offset) != (
            self._message_number,
            self._message_bytes,
            len(self._received_bytes),
        ):
            raise RemoteProtocolError(
                f"{self._peer} sent {self._me} part {offset} of {total} bytes of message {number}, "
                f"expected part {len(self._received_bytes)} of {self._message_bytes} bytes of "
                "message "
                f"{self._message_number}: a part was repeated, left out, reordered or of another "
                "message"
            )
        length = len(part) - PART_HEADER_BYTES
        if length != min(self._part_bytes, total - offset):
            raise RemoteProtocolError(
                f"{self._peer} sent {self._me} a part of {length} bytes at {offset} of {total} of "
                f"message {number}; every part but the last has {self._part_bytes} bytes"
            )
        self._received_bytes += memoryview(part)[PART_HEADER_BYTES:]
        if len(self._received_bytes) < total:
            return None
        message = bytes(self._received_bytes)
        self._message_number = number + 1
        self.kind = ""
        self._received_bytes = bytearray()
        return message

    def _start_message(self, kind: str, number: int, total: int, max_bytes: int) -> None:
        """Begin to receive a message, before any memory is taken for it.

        Args:
            kind: kind of the message.
            number: number of the message on its link.
            total: bytes of the whole message, as announced.
            max_bytes: the largest number of bytes that is accepted.

        Raises RemoteProtocolError: the number is out of order, or `total` is above `max_bytes`.
        """
        if number != self._message_number:
            raise RemoteProtocolError(
                f"{self._peer} sent {self._me} message {number} in parts, expected message "
                f"{self._message_number}: one was repeated or left out"
            )
        if total > max_bytes:
            raise RemoteProtocolError(
                f"{self._peer} announces a message of {total} bytes of {kind} to {self._me}, which "
                f"takes at most {max_bytes} here; compare the settings of both, such as "
                "alignment.maximum_ids"
            )
        self.kind = kind
        self._message_bytes = total


# Heartbeats: a party in a long computation reports how many IDs it has processed to those that may
# wait for it. The computing thread itself sends them, between two pieces of its work, so a
# computation that hangs or a stopped process sends none. A heartbeat only renews the patience of
# the party that waits. Each stands for `IDS_PER_HEARTBEAT` IDs, and the amount of work follows from
# the number of IDs, so the number of heartbeats is bounded: nobody waits for ever for them alone.


def count_allowed_heartbeats(work: int) -> int:
    """Return how many heartbeats a party may send for its work on this many IDs.

    A heartbeat is a message that reports progress in a long computation. The limit keeps a peer
    from making others wait for ever. It is twice the number that the work itself makes, as the
    party also relays heartbeats of peers that it waits for, and a few more.
    """
    return 2 * (work // IDS_PER_HEARTBEAT) + _SPARE_HEARTBEATS


class Heartbeats:
    """The progress reports ("heartbeats") that a party sends during long work, and accepts.

    A heartbeat has the number of IDs that its sender has processed so far. It renews the patience
    of those that wait for the sender.

    Attributes:
        is_relaying: whether a peer's heartbeat is passed on to the other peers, as this party's
            own; so for a party that waits for one peer while others wait for it.
    """

    def __init__(self, me: str, peers: Sequence[str], send: Callable[[str, bytes], None]) -> None:
        """Prepare heartbeats of the party `me`; none are accepted until `set_limits`.

        `peers`: names of the other parties. `send`: sends a heartbeat's bytes to a peer.
        """
        self._me = me
        self._peers = tuple(peers)
        self._send = send
        self._processed_id_count = 0  # of this party
        self._reported_id_count = 0  # of these, as the last heartbeat said
        self._allowed_heartbeats_by_peer: dict[str, int] = {}  # how many more are accepted
        self._last_id_count_by_peer: dict[str, int] = {}  # the number in its last heartbeat
        self.is_relaying = False

    def count_work(self, ids: int) -> None:
        """Count processed IDs; send all peers a heartbeat after each `IDS_PER_HEARTBEAT`."""
        self._processed_id_count += ids
        if self._processed_id_count - self._reported_id_count >= IDS_PER_HEARTBEAT:
            self._send_heartbeats(self._peers)

    def _send_heartbeats(self, peers: Sequence[str]) -> None:
        """Send these peers a heartbeat: the number of IDs that this party has processed so far."""
        self._reported_id_count = self._processed_id_count
        for peer in peers:
            self._send(peer, _HEARTBEAT.pack(self._processed_id_count))

    def set_limits(self, limit_by_peer: Mapping[str, int]) -> None:
        """Set how many more heartbeats are accepted from each of these peers."""
        self._allowed_heartbeats_by_peer |= limit_by_peer

    @contextmanager
    def tighten_limits(self, limit_by_peer: Mapping[str, int]) -> Iterator[None]:
        """Lower the limits of some peers within the `with` block.

        The former limits hold as well, and heartbeats within the block count towards them.

        `limit_by_peer`: name of a peer -> the largest number of heartbeats within the block.
        """
        outer_limits = {
            peer: self._allowed_heartbeats_by_peer.get(peer, 0) for peer in limit_by_peer
        }
        inner_limits = {
            peer: min(count, outer_limits[peer]) for peer, count in limit_by_peer.items()
        }
        self._allowed_heartbeats_by_peer |= inner_limits
        try:
            yield
        finally:
            for peer in limit_by_peer:
                used_count = inner_limits[peer] - self._allowed_heartbeats_by_peer[peer]
                self._allowed_heartbeats_by_peer[peer] = outer_limits[peer] - used_count

    def accept_heartbeat(self, sender: str, heartbeat: bytes) -> None:
        """Check and count a peer's heartbeat, and pass it on if this party relays.

        `heartbeat`: the number of IDs that the peer has processed in all, 8 bytes.

        Raises RemoteProtocolError: the heartbeat is malformed, exceeds the peer's limit, or reports
            less than `IDS_PER_HEARTBEAT` more IDs than the peer's last one.
        """
        allowed_count = self._allowed_heartbeats_by_peer.get(sender, 0)
        previous_id_count = self._last_id_count_by_peer.get(sender, 0)
        if len(heartbeat) != _HEARTBEAT.size:
            raise RemoteProtocolError(f"{sender} sent {self._me} a malformed heartbeat")
        (processed_id_count,) = _HEARTBEAT.unpack(heartbeat)
        if processed_id_count < previous_id_count + IDS_PER_HEARTBEAT:
            raise RemoteProtocolError(
                f"{sender} sent {self._me} a heartbeat without progress: {processed_id_count} "
                f"IDs done, after {previous_id_count}; each stands for {IDS_PER_HEARTBEAT} more"
            )
        if allowed_count <= 0:
            raise RemoteProtocolError(
                f"{sender} sent {self._me} more heartbeats than its work can take, and nothing "
                "else; it keeps others waiting. Look at its log, then start all parties again"
            )
        self._allowed_heartbeats_by_peer[sender] = allowed_count - 1
        self._last_id_count_by_peer[sender] = processed_id_count
        if self.is_relaying:
            # A relayed heartbeat must show progress, so it counts as work of this party.
            self._processed_id_count = max(
                self._processed_id_count, self._reported_id_count + IDS_PER_HEARTBEAT
            )
            self._send_heartbeats([peer for peer in self._peers if peer != sender])

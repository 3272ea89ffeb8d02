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
from dataclasses import dataclass, replace
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

IN_PARTS = frozenset({Kind.ALIGNMENT, Kind.SUM_SETUP, Kind.COIN, Kind.LOOKUP})
"""Kinds of messages that travel in parts, also where one part is enough."""
PART_BYTES = 2**24
MAX_BYTES = 2**30
"""The longest message that is taken of a peer where the receiver says nothing else."""
_PART = struct.Struct(">IQQ")  # number of the message, its length, offset of the part in it
PART_HEADER_BYTES = _PART.size

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
_DONE_IDS = struct.Struct(">Q")  # a heartbeat: the number of IDs processed so far


@dataclass(frozen=True, kw_only=True)
class Awaited:
    """The next message that a role waits for: from any of `senders`, of one of these kinds.

    Attributes:
        step: the step that the message must have; None: any.
        least: how many of the senders must still be connected; with fewer the wait fails.
        patience: how long a silence is accepted, in units of `unit_s`. A party that waits for a
            reply has more patience than the replying party has for what the reply needs. So the
            party that waits for the silent one itself notices first, and names it.
        unit_s: seconds of one unit of patience, from the contract; None: the driver's default.
        needed: peers without whom the session cannot continue. If one of them has left, the awaited
            peers will leave, too, and get a few seconds to say why.
        predicts: whether the session's steps are joint predictions instead of training.
    """

    me: str
    senders: tuple[str, ...]
    kinds: tuple[Kind, ...]
    step: int | None
    least: int = 1
    patience: int = 1
    unit_s: float | None = None
    needed: tuple[str, ...] = ()
    predicts: bool = False

    def __await__(self) -> Generator["Awaited", Frame, Frame]:
        return (yield self)

    @property
    def phase(self) -> str:
        """The phase of the session in which the awaited message is sent."""
        phase = self.kinds[0].phase
        return "prediction" if self.predicts and phase == "training" else phase

    def __str__(self) -> str:
        kinds = " or ".join(self.kinds)
        step = "" if self.step is None else f" of step {self.step}"
        return f"{self.me} expected {kinds}{step} from {' or '.join(self.senders)}"


Script: TypeAlias = Coroutine[Awaited, Frame, T]
"""A role's coroutine: it yields what it awaits, and is resumed with the frame that came."""


class LinkObserver(Protocol):
    """An observer of every frame that one party sends or receives; it alters none.

    What it raises stops the role, so an observer can make sure that a frame is noted first.
    """

    def observe_outgoing(self, envelope: Envelope, frame: bytes) -> None:
        """Note a frame before it is sent."""

    def observe_incoming(self, envelope: Envelope, frame: bytes) -> None:
        """Note a frame that was received and decrypted."""

    def observe_refusal(self, sender: str, frame: bytes) -> None:
        """Note a frame on the link from `sender` that could not be decrypted."""


def count_overhead(envelope: Envelope, *, sealed: bool) -> int:
    """Return the bytes of an envelope's frame besides its payload: header and seal."""
    return _LENGTH_BYTES + len(envelope.header) + (_TAG_BYTES if sealed else 0)


def _log_envelope(action: str, envelope: Envelope, size: int) -> None:
    """Log who exchanges what with whom, and how many bytes on the wire; nothing of the content.

    `action`: "sent" or "received". `size`: bytes on the wire.
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
    """The links of party `me` to its peers in a session; frames, encrypts and numbers its messages.

    Args:
        me: this party's name.
        peers: names of the other parties.
        post: sends a frame to a peer.
        record: called with every envelope that is sent and its bytes on the wire.
        observers: notified of every frame.

    Attributes:
        heartbeats: the heartbeats that this party sends in long computations, and accepts.
        unit_s: seconds of one unit of patience, from the contract; None: the driver's default.
        needed, predicts: see `Awaited`; no peer is needed before there is a contract.
    """

    unit_s: float | None = None
    needed: tuple[str, ...] = ()
    predicts: bool = False

    def __init__(
        self,
        me: str,
        peers: Sequence[str],
        post: Callable[[str, bytes], None],
        record: Callable[[Envelope, int], None] = lambda envelope, wire_bytes: None,
        observers: Sequence[LinkObserver] = (),
    ) -> None:
        """Prepare links without encryption, on which greetings are exchanged."""
        self.me = me
        self._peers = tuple(peers)
        self._observers = tuple(observers)
        self._post = post
        self._record = record
        self._session = UNNAMED_SESSION
        self._seals = dict[str, SealedLink]()
        self._sent_envelopes: Counter[str] = Counter()  # by receiver, since the links were sealed
        self._messages_in_parts: Counter[str] = Counter()  # by receiver: how many were sent
        self._assemblers = {peer: MessageAssembler(me, peer) for peer in self._peers}
        self._early_messages: dict[str, Envelope] = {}
        self._interrupted_receivers = set[str]()
        self.heartbeats = Heartbeats(
            me, peers, lambda peer, sign: self.send(peer, Kind.ALIVE, BEFORE_TRAINING, sign)
        )

    def seal(self, session: str, seals: Mapping[str, SealedLink]) -> None:
        """Encrypt every message from now on, and accept only encrypted ones of this session.

        `session`: the session's name in the contract. `seals`: peer -> the keys that encrypt and
        authenticate messages to and from it.

        Raises LocalProtocolError: the links are sealed already, or a peer has no seal.
        """
        if self._seals or set(seals) != set(self._peers):
            raise LocalProtocolError(
                f"{self.me} seals its links once, and all of them: {', '.join(self._peers)}"
            )
        self._session = session
        self._seals = dict(seals)
        self._sent_envelopes.clear()

    def send(self, receiver: str, kind: Kind, step: int, payload: bytes = b"") -> None:
        """Encrypt and send one message, in parts if its kind may be long.

        Args:
            receiver: a peer.
            kind: kind of the message.
            step: step of training, or `BEFORE_TRAINING`.
            payload: the message's bytes.

        Raises LocalProtocolError: no link leads to `receiver`.
        """
        self._require_links((receiver,))
        bodies: Iterable[bytes] = (payload,)
        if kind in IN_PARTS:
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
            self._interrupted_receivers.add(receiver)
            header = envelope.header
            sealed = body
            if self._seals:
                seal = self._seals[receiver]
                sealed = seal.seal(body, sequence=envelope.sequence, associated=header)
            self._sent_envelopes[receiver] += 1
            frame = len(header).to_bytes(_LENGTH_BYTES, "big") + header + sealed
            self._record(envelope, len(frame))
            _log_envelope("sends", envelope, len(frame))
            for observer in self._observers:
                observer.observe_outgoing(envelope, frame)
            self._post(receiver, frame)
            self._interrupted_receivers.discard(receiver)
        if kind in IN_PARTS:
            self._messages_in_parts[receiver] += 1

    def abort(self, error: BaseException) -> None:
        """Tell all peers that this party stops, and why.

        A `PartyLeftError` is sent in full; of other errors only the type, since their texts may
        contain values that are private to two parties.
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
        minimum: int = 1,
        patience: int = 1,
        maximum: int = MAX_BYTES,
    ) -> Envelope:
        """Return the next message from one of these senders.

        Args:
            senders: the awaited peers, of whom at least `minimum` must still be connected.
            kinds: the message's kind is one of these.
            step: the step that it must have; None: any.
            minimum: smallest number of `senders` that must still be connected.
            patience: how long to wait, in multiples of `unit_s`; see `Awaited`.
            maximum: the most bytes of the message, over all parts.

        Raises:
            PartyLeftError: no message arrived within the patience.
            RunStoppedError: the sender reports that it stops.
            RemoteProtocolError: an unexpected message arrived.
        """
        awaited = Awaited(
            me=self.me,
            senders=(senders,) if isinstance(senders, str) else tuple(senders),
            kinds=kinds,
            step=step,
            least=minimum,
            patience=patience,
            unit_s=self.unit_s,
            needed=self.needed,
            predicts=self.predicts,
        )
        self._require_links(awaited.senders)
        message = None
        early_senders = self._early_messages.keys() & set(awaited.senders)
        if early_senders:
            message = self._early_messages.pop(min(early_senders, key=awaited.senders.index))
        while message is None:
            try:
                sender, frame = await awaited
            except PartyLeftError as error:
                unfinished = [self._assemblers[name].midway for name in awaited.senders]
                if not any(unfinished):
                    raise
                silence = str(error).replace("; nothing came", "; nothing more came")
                reason = "; ".join([silence, *filter(None, unfinished)])
                raise PartyLeftError(reason, left=error.left, gone=error.gone) from error
            message = self._assemble_message(awaited, self._open_frame(sender, frame), maximum)
        return message

    def _assemble_message(
        self, awaited: Awaited, envelope: Envelope, maximum: int
    ) -> Envelope | None:
        """Return the message that this envelope completes; None if parts are missing, or after a
        heartbeat.

        `maximum`: the most bytes of the message, over all parts.

        Raises:
            RunStoppedError: the envelope is an ABORT.
            RemoteProtocolError: it is not what is awaited.
        """
        sender = envelope.sender
        kind = envelope.kind
        assembler = self._assemblers[envelope.sender]
        if kind is Kind.ABORT:
            raise RunStoppedError(
                f"{awaited.phase}: {sender} stopped the run: "
                f"{quote_reason(envelope.payload, _REASON_LETTERS)}",
                left=(sender,),
            )
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
        if kind not in IN_PARTS:
            return envelope
        payload = assembler.add_part(envelope.payload, kind, maximum=maximum)
        return None if payload is None else replace(envelope, payload=payload)

    async def run_conversation(
        self, kind: Kind, role: Conversation, peers: Sequence[str], *, maximum: int = MAX_BYTES
    ) -> None:
        """Run one end of an interactive protocol with these peers, before training.

        A peer that is done may report READY while messages of others are still under way; it is
        stored for the next `receive`.

        Args:
            kind: kind of the protocol's messages.
            role: this party's end of the protocol.
            peers: the other parties that take part.
            maximum: the most bytes of a message.

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
        busy = list(peers)
        while not role.is_finished:
            try:
                message = await self.receive(
                    busy, kind, Kind.READY, step=BEFORE_TRAINING, minimum=len(busy), maximum=maximum
                )
            except PartyLeftError as error:
                ready = ", ".join(peer for peer in peers if peer not in busy)
                if not ready:
                    raise
                raise PartyLeftError(
                    f"{error}; {ready} said before that its {kind} is over: perhaps too early",
                    left=error.left,
                    gone=error.gone,
                ) from error
            if message.kind is kind:
                send_messages(role.receive(message.sender, message.payload))
            else:
                busy.remove(message.sender)
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

        A frame is the header's length (2 bytes), the header, and the payload, encrypted once links
        are sealed.

        Raises:
            RunStoppedError: the sender stopped before its links were sealed.
            RemoteProtocolError: the frame is malformed, altered, or of another session or peer.
        """
        length = int.from_bytes(frame[:_LENGTH_BYTES], "big")
        header = frame[_LENGTH_BYTES : _LENGTH_BYTES + length]
        body = frame[_LENGTH_BYTES + length :]
        try:
            try:
                claimed = Envelope.parse_header(header)
            except RemoteProtocolError as error:
                reason = f"{self.me}, on the link from {sender}: {error}"
                raise RemoteProtocolError(reason) from error
            if self._seals and claimed.kind is Kind.ABORT and claimed.session == UNNAMED_SESSION:
                raise RunStoppedError(
                    f"agreement: {sender} stopped the run before its links were sealed, and says "
                    f"without a seal: {quote_reason(body, _REASON_LETTERS)}",
                    left=(sender,),
                )
            ends = (claimed.session, claimed.sender, claimed.receiver)
            if ends != (self._session, sender, self.me):
                raise RemoteProtocolError(
                    f"{self.me}: a frame on the link from {sender} claims to be from "
                    f"{quote_text(claimed.sender)} to {quote_text(claimed.receiver)} in session "
                    f"{quote_text(claimed.session)}"
                )
            if self._seals:
                seal = self._seals[sender]
                body = seal.open(body, sequence=claimed.sequence, associated=header)
        except RemoteProtocolError:
            _LOGGER.warning("%s refuses a frame of %d bytes from %s", self.me, len(frame), sender)
            for observer in self._observers:
                observer.observe_refusal(sender, frame)
            raise
        envelope = replace(claimed, payload=body)
        _log_envelope("receives", envelope, len(frame))
        for observer in self._observers:
            observer.observe_incoming(envelope, frame)
        return envelope


def is_final_stop(error: PartyLeftError) -> bool:
    """Return whether a party stopped for a reason that a new session cannot remove.

    Such reasons are settings, tables, folders or an exhausted privacy budget.
    """
    return any(kind in str(error) for kind in _FINAL_REASONS)


# Large messages travel in parts at two levels. Above encryption, messages of set-up have parts of
# 16 MiB: AES-GCM ends at 2^31 - 1 bytes, which set intersection reaches at 67 million IDs. Below it
# (`exchange/resumable_link.py`) all frames travel in parts of 1 MiB, so that little is sent again
# after a break. Every part names its message, the message's length and the part's offset, so a
# receiver refuses a message that is too long before it takes any memory for it. Protects from:
# peers that announce too much, stop midway, repeat, leave out or reorder parts, or put one message
# into another.


def split_into_parts(number: int, message: bytes, size: int | None = None) -> Iterator[bytes]:
    """Yield a message in parts, each after a header; an empty message has one part.

    Args:
        number: number of the message on its link, from 0.
        message: bytes of the message.
        size: bytes of a part, without header; None: `PART_BYTES`.
    """
    size = size or PART_BYTES
    for offset in range(0, len(message) or 1, size):
        yield _PART.pack(number, len(message), offset) + message[offset : offset + size]


class MessageAssembler:
    """A joiner of the parts that one peer sends, one message after another.

    Attributes:
        kind: kind of the message that is being received; "" between messages.
    """

    def __init__(self, me: str, peer: str, size: int | None = None) -> None:
        """Await the peer's first message; `me` and `peer` are names for errors.

        `size`: bytes of a part, without header; None: `PART_BYTES`.
        """
        self._me = me
        self._peer = peer
        self._size = size or PART_BYTES
        self._number = 0
        self._total = 0
        self.kind = ""
        self._received_bytes = bytearray()

    @property
    def midway(self) -> str:
        """The progress of an unfinished message, in words; empty between messages."""
        if not self.kind:
            return ""
        return (
            f"{self._peer} stopped midway in a message: {len(self._received_bytes)} of "
            f"{self._total} bytes of {self.kind} came"
        )

    def add_part(self, part: bytes, kind: str, *, maximum: int = MAX_BYTES) -> bytes | None:
        """Add the next part; return the message once it is complete, else None.

        Args:
            part: a header, then bytes of the message.
            kind: what the message is, for errors.
            maximum: the most bytes of the whole message.

        Raises RemoteProtocolError: the part is out of order, or the message is too long.
        """
        if len(part) < PART_HEADER_BYTES:
            raise RemoteProtocolError(
                f"{self._peer} sent {len(part)} bytes of {kind} to {self._me}, too few for a part "
                "of a message"
            )
        number, total, offset = _PART.unpack_from(part)
        if not self.kind:
            self._start_message(kind, number, total, maximum)
        if (number, total, offset) != (self._number, self._total, len(self._received_bytes)):
            raise RemoteProtocolError(
                f"{self._peer} sent {self._me} part {offset} of {total} bytes of message {number}, "
                f"expected part {len(self._received_bytes)} of {self._total} bytes of message "
                f"{self._number}: a part was repeated, left out, reordered or of another message"
            )
        length = len(part) - PART_HEADER_BYTES
        if length != min(self._size, total - offset):
            raise RemoteProtocolError(
                f"{self._peer} sent {self._me} a part of {length} bytes at {offset} of {total} of "
                f"message {number}; every part but the last has {self._size} bytes"
            )
        self._received_bytes += memoryview(part)[PART_HEADER_BYTES:]
        if len(self._received_bytes) < total:
            return None
        message = bytes(self._received_bytes)
        self._number = number + 1
        self.kind = ""
        self._received_bytes = bytearray()
        return message

    def _start_message(self, kind: str, number: int, total: int, maximum: int) -> None:
        """Begin a message; refuse a number out of order, or a length above `maximum` bytes.

        Args:
            kind: what the message is.
            number: number of the message on its link.
            total: bytes of the whole message, as announced.
            maximum: the most bytes that are accepted.

        Raises RemoteProtocolError.
        """
        if number != self._number:
            raise RemoteProtocolError(
                f"{self._peer} sent {self._me} message {number} in parts, expected message "
                f"{self._number}: one was repeated or left out"
            )
        if total > maximum:
            raise RemoteProtocolError(
                f"{self._peer} announces a message of {total} bytes of {kind} to {self._me}, which "
                f"takes at most {maximum} here; compare the settings of both, such as "
                "alignment.maximum_ids"
            )
        self.kind = kind
        self._total = total


# Heartbeats: a party in a long computation reports how many IDs it has processed to those that may
# wait for it. The computing thread itself sends them, between two pieces of its work, so a
# computation that hangs or a stopped process sends none. A heartbeat only renews the patience of
# the party that waits. Each stands for `IDS_PER_HEARTBEAT` IDs, and the amount of work follows from
# the number of IDs, so the number of heartbeats is bounded: nobody waits for ever for them alone.


def count_allowed_heartbeats(work: int) -> int:
    """Return how many heartbeats a party may send for its work on this many IDs.

    A heartbeat is a message that reports progress in a long computation. The limit is twice what
    the work makes, as the party also relays the heartbeats of those it waits for (see
    `Heartbeats.relays`).
    """
    return 2 * (work // IDS_PER_HEARTBEAT) + _SPARE_HEARTBEATS


class Heartbeats:
    """The heartbeats of one party's work, and the limits of those that it accepts from its peers.

    Attributes:
        relays: whether a peer's heartbeat is passed on to the other peers, as this party's own.
    """

    def __init__(self, me: str, peers: Sequence[str], send: Callable[[str, bytes], None]) -> None:
        """Prepare heartbeats of the party `me`; none are accepted until limits are set.

        `peers`: names of the other parties. `send`: sends a heartbeat's bytes to a peer.
        """
        self._me = me
        self._peers = tuple(peers)
        self._send = send
        self._done_ids = 0
        self._reported_ids = 0
        self._allowed: dict[str, int] = {}  # by peer, how many more heartbeats are accepted
        self._last_ids_by_peer: dict[str, int] = {}  # by peer, the IDs of its last heartbeat
        self.relays = False

    def count_work(self, ids: int) -> None:
        """Add work on a number of IDs; after each `IDS_PER_HEARTBEAT` send a heartbeat."""
        self._done_ids += ids
        if self._done_ids - self._reported_ids >= IDS_PER_HEARTBEAT:
            self._send_heartbeats(self._peers)

    def _send_heartbeats(self, peers: Sequence[str]) -> None:
        """Send these peers the number of IDs done so far."""
        self._reported_ids = self._done_ids
        for peer in peers:
            self._send(peer, _DONE_IDS.pack(self._done_ids))

    def set_limits(self, counts: Mapping[str, int]) -> None:
        """Set how many more heartbeats are accepted from these peers."""
        self._allowed |= counts

    @contextmanager
    def tighten_limits(self, counts: Mapping[str, int]) -> Iterator[None]:
        """Accept no more heartbeats than these, by peer, within the `with` block.

        The former limits hold as well, and heartbeats within the block count towards them.

        `counts`: name of a peer -> the largest number of heartbeats.
        """
        allowed_before = {peer: self._allowed.get(peer, 0) for peer in counts}
        limits = {peer: min(count, allowed_before[peer]) for peer, count in counts.items()}
        self._allowed |= limits
        try:
            yield
        finally:
            used = {peer: limits[peer] - self._allowed[peer] for peer in counts}
            self._allowed |= {peer: allowed_before[peer] - used[peer] for peer in counts}

    def accept_heartbeat(self, sender: str, heartbeat: bytes) -> None:
        """Check a peer's heartbeat, and pass it on if this party relays.

        `heartbeat`: the number of IDs that the peer has processed in all, 8 bytes.

        Raises RemoteProtocolError: malformed; or it reports less than `IDS_PER_HEARTBEAT` IDs more
            than the peer's last one, or exceeds the peer's limit.
        """
        allowed = self._allowed.get(sender, 0)
        ids_before = self._last_ids_by_peer.get(sender, 0)
        if len(heartbeat) != _DONE_IDS.size:
            raise RemoteProtocolError(f"{sender} sent {self._me} a malformed heartbeat")
        (done_ids,) = _DONE_IDS.unpack(heartbeat)
        if done_ids < ids_before + IDS_PER_HEARTBEAT:
            raise RemoteProtocolError(
                f"{sender} sent {self._me} a heartbeat without progress: {done_ids} IDs done, "
                f"after {ids_before}; each stands for {IDS_PER_HEARTBEAT} more"
            )
        if allowed <= 0:
            raise RemoteProtocolError(
                f"{sender} sent {self._me} more heartbeats than its work can take, and nothing "
                "else; it keeps others waiting. Look at its log, then start all parties again"
            )
        self._allowed[sender] = allowed - 1
        self._last_ids_by_peer[sender] = done_ids
        if self.relays:
            # A relayed heartbeat must show progress, so it counts as work of this party.
            self._done_ids = max(self._done_ids, self._reported_ids + IDS_PER_HEARTBEAT)
            self._send_heartbeats([peer for peer in self._peers if peer != sender])

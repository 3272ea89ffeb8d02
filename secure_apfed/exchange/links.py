"""A role's links to the others: it sends envelopes, and awaits them by sender, kind and step.

Run by: every party, one object a session. Once the contract is signed (see
`secure_apfed.exchange.agreement`) every envelope is sealed end to end between its two parties (see
`apfed_protocols.seal`), so a message under another contract, replayed, reordered or altered is
refused. A role is an `async def` over its links and has no other input or output: its driver (see
`secure_apfed.exchange.drivers`) carries the frames. Long messages before training travel in parts
(see `MessageAssembler`), and signs of life are read while a role waits (see `Heartbeats`); roles
see whole messages only.
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
_PART = struct.Struct(">IQQ")  # number of the message, its bytes, where the part begins
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
_MORE = "; its own log says more"
_FOR_GOOD = tuple(
    f"{kind}Error{_MORE}"
    for kind in ("Config", "Data", "Model", "Checkpoint", "IntersectionTooSmall", "BudgetExhausted")
)
IDS_A_SIGN = 2**16
"""Some 2.6 s of a thread that takes 40 us for an ID."""
_SPARE_SIGNS = 4
_DONE = struct.Struct(">Q")


@dataclass(frozen=True, kw_only=True)
class Awaited:
    """The next message that a role waits for: from any of `senders`, of one of these kinds.

    Attributes:
        step: the step that the message must have; None: any.
        least: how many of the senders must be left for the wait to make sense.
        unit_s: seconds of one unit of patience, from the contract; None: the driver's default.
        patience: how long a silence is accepted, in such units. A party that waits for an answer
            has more patience than the answering party has for what the answer needs. So the party
            that waits for the silent one itself notices first, and names it.
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
"""A role under way: it yields what it awaits and is resumed with the frame that came."""


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

    `action`: "sent" or "received".
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
        post: carries a frame to a peer.
        record: called with every envelope that is sent and its bytes on the wire.

    Attributes:
        signs: the signs of life that this party sends in long computations, and accepts.
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
        """Prepare links without encryption, on which greetings are exchanged.

        `peers`: names of the other parties. `post`: carries a frame to a peer. `record`: called
        with every envelope that is sent and its bytes on the wire. `observers`: notified of
        messages and waits.
        """
        self.me = me
        self._peers = tuple(peers)
        self._observers = tuple(observers)
        self._post = post
        self._record = record
        self._session = UNNAMED_SESSION
        self._seals = dict[str, SealedLink]()
        self._sent_parts: Counter[str] = Counter()
        self._in_parts: Counter[str] = Counter()
        self._assemblers = {peer: MessageAssembler(me, peer) for peer in self._peers}
        self._early_messages: dict[str, Envelope] = {}
        self._interrupted_receivers = set[str]()
        self.signs = Heartbeats(
            me, peers, lambda peer, sign: self.send(peer, Kind.ALIVE, BEFORE_TRAINING, sign)
        )

    def seal(self, session: str, seals: Mapping[str, SealedLink]) -> None:
        """Encrypt every message from now on, and accept only encrypted ones of this session.

        `seals`: the encrypted link to each peer.

        Raises LocalProtocolError: the links are sealed already, or a peer has no seal.
        """
        if self._seals or set(seals) != set(self._peers):
            raise LocalProtocolError(
                f"{self.me} seals its links once, and all of them: {', '.join(self._peers)}"
            )
        self._session = session
        self._seals = dict(seals)
        self._sent_parts.clear()

    def send(self, receiver: str, kind: Kind, step: int, payload: bytes = b"") -> None:
        """Encrypt and send one message, in parts if its kind may be long.

        `payload`: the message's bytes.

        Raises LocalProtocolError: there is no link to `receiver`.
        """
        in_parts = kind in IN_PARTS
        self._require_links((receiver,))
        for body in parts_of(self._in_parts[receiver], payload) if in_parts else (payload,):
            envelope = Envelope(
                session=self._session,
                step=step,
                kind=kind,
                sender=self.me,
                receiver=receiver,
                sequence=self._sent_parts[receiver],
                payload=body,
            )
            self._interrupted_receivers.add(receiver)
            header = envelope.header
            sealed = body
            if self._seals:
                seal = self._seals[receiver]
                sealed = seal.seal(body, sequence=envelope.sequence, associated=header)
            self._sent_parts[receiver] += 1
            frame = len(header).to_bytes(_LENGTH_BYTES, "big") + header + sealed
            self._record(envelope, len(frame))
            _log_envelope("sends", envelope, len(frame))
            for observer in self._observers:
                observer.observe_outgoing(envelope, frame)
            self._post(receiver, frame)
            self._interrupted_receivers.discard(receiver)
        self._in_parts[receiver] += in_parts

    def abort(self, error: BaseException) -> None:
        """Tell all peers that this party stops, and why.

        A `PartyLeftError` is sent in full; of other errors only the type, since their texts may
        contain figures that are private to two parties.
        """
        is_departure = isinstance(error, PartyLeftError)
        reason = str(error) if is_departure else f"{type(error).__name__}{_MORE}"
        # If it was interrupted while it sent, a message has a number that never arrived, and what
        # follows would count as a replay: that peer sees the link close.
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
        """Return the next message from one of these senders, of at most `maximum` bytes over all
        parts.

        For the arguments see `Awaited`.

        `minimum`: bytes at least.

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
                halves = [self._assemblers[name].midway for name in awaited.senders]
                if not any(halves):
                    raise
                silence = str(error).replace("; nothing came", "; nothing more came")
                reason = "; ".join([silence, *filter(None, halves)])
                raise PartyLeftError(reason, left=error.left, gone=error.gone) from error
            message = self._assemble_message(awaited, self._open_frame(sender, frame), maximum)
        return message

    def _assemble_message(
        self, awaited: Awaited, envelope: Envelope, maximum: int
    ) -> Envelope | None:
        """Return the message that this envelope completes, or None.

        `maximum`: bytes at most.
        """
        sender = envelope.sender
        kind = envelope.kind
        gathering = self._assemblers[envelope.sender]
        if kind is Kind.ABORT:
            raise RunStoppedError(
                f"{awaited.phase}: {sender} stopped the run: "
                f"{quote_reason(envelope.payload, _REASON_LETTERS)}",
                left=(sender,),
            )
        if gathering.kind not in ("", kind):
            raise RemoteProtocolError(
                f"{sender} sent {kind} to {self.me} in the middle of a message of "
                f"{gathering.kind}; parts of a message follow one another"
            )
        if kind is Kind.ALIVE:
            self.signs.accept_heartbeat(sender, envelope.payload)
            return None
        if kind not in awaited.kinds or awaited.step not in (None, envelope.step):
            raise RemoteProtocolError(
                f"{awaited}, got {kind} of step {envelope.step} from {sender}"
            )
        if kind not in IN_PARTS:
            return envelope
        payload = gathering.add_part(envelope.payload, kind, maximum=maximum)
        return None if payload is None else replace(envelope, payload=payload)

    async def run_conversation(
        self, kind: Kind, role: Conversation, peers: Sequence[str], *, maximum: int = MAX_BYTES
    ) -> None:
        """Run one end of an interactive protocol with these peers, before training.

        Messages have at most `maximum` bytes. A peer that is done may report READY while messages
        of others are still under way; it is stored for the next `receive`.

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
        """Decrypt a frame; return its envelope, and notify the observers of success or refusal."""
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
    return any(kind in str(error) for kind in _FOR_GOOD)


# Large messages in parts, put together in order and within bounds, twice. Inside seals messages of
# set-up travel in parts of 16 MiB: AES-GCM ends at 2^31 - 1 bytes, which set intersection gets to
# at 67 million IDs. Beneath (`exchange/resumable_link.py`) all frames travel in parts of 1 MiB,
# so that little is sent again after a break. Every part says which message it is of, how long that
# is and where the part begins, so a receiver refuses a message that is too long before it takes any
# memory for it. Protects from: peers that announce too much, stop midway, repeat, leave out or
# reorder parts, or put one message into another.


def parts_of(number: int, message: bytes, size: int | None = None) -> Iterator[bytes]:
    """Yield message `number` of a link in parts of `PART_BYTES`; an empty message has one part."""
    size = size or PART_BYTES
    for offset in range(0, len(message) or 1, size):
        yield _PART.pack(number, len(message), offset) + message[offset : offset + size]


class MessageAssembler:
    """The parts received so far of the message that one peer is sending, and a count of whole
    ones.
    """

    def __init__(self, me: str, peer: str, size: int | None = None) -> None:
        """Make an assembler of long messages from parts; `size`: of a part in bytes, None:
        `PART_BYTES`.
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

        Raises RemoteProtocolError: the part is out of order, or the message exceeds `maximum`
            bytes.
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
        """Check number and size of a message that begins. Raises RemoteProtocolError.

        `total`: bytes of the whole message. `maximum`: bytes at most.
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


# Signs of life: a party in a long computation tells those that may wait for it how many IDs it has
# processed. The computing thread itself sends them, between two pieces of its work, so a
# computation that hangs or a stopped process sends none. A sign only renews the patience of the
# party that waits. Each stands for `IDS_A_SIGN` IDs, and the amount of work follows from the number
# of IDs, so the number of signs is bounded: nobody waits for ever for signs alone.


def count_allowed_heartbeats(work: int) -> int:
    """Return how many signs of life a party may send for its work on this many IDs.

    A sign of life is a message that reports progress in a long computation. The limit is twice what
    the work makes, as the party also relays the signs of those it waits for (see
    `Heartbeats.relays`).
    """
    return 2 * (work // IDS_A_SIGN) + _SPARE_SIGNS


class Heartbeats:
    """The signs of life of one party's work, and those that it accepts from its peers."""

    def __init__(self, me: str, peers: Sequence[str], send: Callable[[str, bytes], None]) -> None:
        """Make the exchange of signs of life; none are accepted until limits are set.

        `peers`: names of the other parties. `send`: carries a frame to a peer.
        """
        self._me = me
        self._peers = tuple(peers)
        self._send = send
        self._done_ids = self._reported_ids = 0
        self._allowed: dict[str, int] = {}
        self._heard_steps: dict[str, int] = {}
        self.relays = False

    def count_work(self, ids: int) -> None:
        """Add work on a number of IDs; send a sign of life to the peers after every
        `IDS_A_SIGN`.
        """
        self._done_ids += ids
        if self._done_ids - self._reported_ids >= IDS_A_SIGN:
            self._send_heartbeats(self._peers)

    def _send_heartbeats(self, peers: Sequence[str]) -> None:
        """Send these peers the number of IDs done so far."""
        self._reported_ids = self._done_ids
        for peer in peers:
            self._send(peer, _DONE.pack(self._done_ids))

    def set_limits(self, signs: Mapping[str, int]) -> None:
        """Set how many more signs of life are accepted from these peers."""
        self._allowed |= signs

    @contextmanager
    def tighten_limits(self, signs: Mapping[str, int]) -> Iterator[None]:
        """Accept no more signs than these within the block, nor more than the
        former limits allow.
        """
        allowed_before = {peer: self._allowed.get(peer, 0) for peer in signs}
        limits = {peer: min(count, allowed_before[peer]) for peer, count in signs.items()}
        self._allowed |= limits
        try:
            yield
        finally:
            used = {peer: limits[peer] - self._allowed[peer] for peer in signs}
            self._allowed |= {peer: allowed_before[peer] - used[peer] for peer in signs}

    def accept_heartbeat(self, sender: str, sign: bytes) -> None:
        """Check a peer's sign of life: progress since the last one, and within its limit; relay it.

        Raises RemoteProtocolError: it is malformed, shows no progress, or exceeds the limit.
        """
        allowed = self._allowed.get(sender, 0)
        heard = self._heard_steps.get(sender, 0)
        if len(sign) != _DONE.size:
            raise RemoteProtocolError(f"{sender} sent {self._me} a malformed sign of life")
        (done,) = _DONE.unpack(sign)
        if done < heard + IDS_A_SIGN:
            raise RemoteProtocolError(
                f"{sender} sent {self._me} a sign of life without progress: {done} IDs done, after "
                f"{heard}; each stands for {IDS_A_SIGN} more"
            )
        if allowed <= 0:
            raise RemoteProtocolError(
                f"{sender} sent {self._me} more signs of life than its work can take, and nothing "
                "else; it keeps others waiting. Look at its log, then start all parties again"
            )
        self._allowed[sender] = allowed - 1
        self._heard_steps[sender] = done
        if self.relays:
            self._done_ids = max(self._done_ids, self._reported_ids + IDS_A_SIGN)
            self._send_heartbeats([peer for peer in self._peers if peer != sender])

"""Links to peers that survive broken connections: unconfirmed parts are sent again.

Run by: both ends, around any connection that keeps messages whole, and by the driver of one role
over all its links (`LinkTransport`). Messages travel in numbered parts. After each new connection
both ends send their own identifier, that of the peer they were connected to, and the number of
received parts, and then the parts that the other lacks. So a link of one session never joins one of
the next. While parties come together, a peer may restart if nothing was sent either way. An end
that has nothing left to send and is closed says goodbye, and waits for the goodbye of the other.
While there is nothing to send, heartbeats go both ways. Protects from: connections that break or
hang, and a peer that sends more than this party reads: the buffer is bounded, and sizes are checked
before memory is allocated. Does not protect from a process that ends, nor from attackers: `connect`
must return an authenticated and encrypted connection to the same peer each time (see
`secure_apfed.exchange.sealed_connection`).
"""

import contextlib
import logging
import math
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeAlias

from apfed_protocols.errors import LocalProtocolError, PartyLeftError, RemoteProtocolError
from apfed_protocols.randomness import ForkCheck, fresh_key
from secure_apfed.exchange.drivers import BrokenLink
from secure_apfed.exchange.links import (
    MAX_BYTES,
    PART_HEADER_BYTES,
    Awaited,
    Frame,
    MessageAssembler,
    split_into_parts,
)

_FRAME_HEADER = struct.Struct(
    ">BQQ"
)  # kind, number of the part, how many parts the sender has received
_GREETING, _PART, _RECEIPT, _GOODBYE = range(1, 5)
_PART_BYTES = 2**20
_PART_OVERHEAD_BYTES = 256  # memory of a buffered part, in addition to its bytes
_ID_BYTES = 32
_NO_PEER = bytes(_ID_BYTES)  # the peer of an end that was never connected
MAX_PLAIN_FRAME_BYTES = _FRAME_HEADER.size + PART_HEADER_BYTES + _PART_BYTES
"""Bytes of the longest message that a connection has to carry."""
_MAX_UNCONFIRMED_BYTES = 2**28  # bytes that the peer has not confirmed; then `send` waits
_MAX_UNREAD_BYTES = 2**28  # unread bytes; above it nothing is confirmed, so the peer waits
# A peer that waits for confirmations never gets further than this.
_MAX_BUFFERED_BYTES = _MAX_UNREAD_BYTES + _MAX_UNCONFIRMED_BYTES + 2 * MAX_BYTES
_STALLED_S = 300.0  # without any confirmation, while a message waits for room
_MAX_UNREPORTED_PARTS = 8  # received parts; then a receipt is due at once
_RECEIPT_S = 0.2  # until fewer received parts are reported
_HEARTBEAT_S = 5.0  # between heartbeats, while there is nothing to send
_SILENT_S = 15.0  # without a heartbeat, after which a connection counts as broken
_PAUSE_S = 0.05  # after the first failed attempt to connect; doubled after each
_LONGEST_PAUSE_S = 1.0
_POLL_S = 0.2
_FLUSH_S = 5.0  # to deliver the last messages when all links are closed
_LINGER_S = 2.0  # to wait for the peer's goodbye then
_GREETING_S = 2.0
_GREET_AGAIN_S = 2.0
_PRESENT_S = 15.0  # how long after its greeting a peer counts as waiting
_LAST_WORDS_S = 4.0  # how long an awaited peer may still send after a needed one left
ALL_AGAIN = "start all parties again with a new session"
_LONGEST_WAIT_S = 3600.0  # systems take no time-out of months
_LOGGER = logging.getLogger(__name__)


class RelayAbsentError(ConnectionError):
    """The address of the relay, through which all peers come, does not answer."""


class Refusal(str):
    """The text of a reason why one end refuses the other.

    New attempts to connect do not help; an operator has to change something.
    """

    __slots__ = ()


Missed: TypeAlias = Callable[[Mapping[str, str]], None]
"""A callback, called repeatedly while peers are missing, with the reason for each by its name: a
`Refusal` where one end refused the other, a text where the relay is not reached, else ""."""


class Connection(Protocol):
    """A connection that keeps messages whole, as `multiprocessing.connection.Connection` does.

    All methods raise OSError or EOFError if the connection is broken.
    """

    def send_bytes(self, buf: bytes, /) -> None:
        """Send one message."""

    def recv_bytes(self) -> bytes:
        """Wait for the next message, and return it."""

    def poll(self, timeout: float, /) -> bool:
        """Wait at most `timeout` seconds; return whether a message can be received."""

    def close(self) -> None:
        """Close the connection."""


@dataclass(eq=False)
class _Wire:
    """A connection and the number of threads that use it; the last one closes it.

    Closed earlier, its file descriptor might be given to another file while a thread still hangs in
    a write.
    """

    connection: Connection
    users: int = 1


class ResumableLink:
    """A link that carries messages to and from one peer, in order, each exactly once.

    A message travels in parts. Each part is stored until the peer confirms it, and is sent again
    after a broken connection.

    Args:
        peer: the peer's name, for errors.
        connect: makes a new connection, or raises OSError; called again after each break.
        patience_s: seconds for which the peer may send nothing, not even heartbeats, before it
            counts as gone; `close` waits as long.
        first_connection_s: seconds to wait for the first connection; None: `patience_s`.
        on_change: called, under a lock of the link, when a message arrived or the link ended.

    Attributes:
        is_meeting: whether parties still come together: the session has not begun, since other
            peers have not connected yet. Until then the peer's process may be restarted, if nothing
            was sent either way.
        refusal: why one end refused the other last; empty once there is a connection.
        relay_failure: why the last attempt did not reach the relay; empty if it did, or if no relay
            is used.
    """

    is_meeting = False

    def __init__(
        self,
        peer: str,
        connect: Callable[[], Connection],
        *,
        patience_s: float = 60.0,
        first_connection_s: float | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the thread that connects and reads; the class describes the arguments."""
        self._peer = peer
        self._connect = connect
        self._patience_s = patience_s
        self._first_connection_s = patience_s if first_connection_s is None else first_connection_s
        self._on_change = on_change
        # A forked process would lack the link's threads, so using the link there raises an error.
        self._fork_check = ForkCheck(f"the link to {peer}")
        self._link_id = (
            fresh_key()
        )  # identifies this link object, so that a restart shows at the peer
        self._peer_link_id = (
            b""  # the identifier of the peer's link object; empty before it connected
        )
        # Unread messages, with their arrival (monotonic clock) and their cost in memory.
        self._unread_messages: deque[tuple[bytes, float, int]] = deque()
        self._assembler = MessageAssembler("this party", peer, _PART_BYTES)
        # Memory of all unread parts, and of those among them whose message is not complete.
        self._unread_bytes = 0
        self._incomplete_bytes = 0
        self._sent_messages = 0
        self._changed = threading.Condition()
        # Kind (part or goodbye) and bytes of the parts that the peer has not confirmed.
        self._unconfirmed_parts: deque[tuple[int, bytes]] = deque()
        self._unconfirmed_bytes = 0
        # Numbers of parts: confirmed by the peer, written to the wire, received, reported to it.
        self._confirmed_parts = 0
        self._written_parts = 0
        self._received_parts = 0
        self._reported_parts = 0
        self._wire: _Wire | None = None  # the connection in use
        self._failure = ""  # why the link has failed for good; "" while it works
        self._last_error = ""  # why the last connection broke or was not made
        self.refusal = ""
        self.relay_failure = ""
        self._is_closing = False
        self._is_ended = False
        self._has_goodbye = False
        self._broken_at: float | None = None  # when the last connection broke, monotonic clock
        threading.Thread(target=self._run_reader, daemon=True).start()

    @property
    def has_met_peer(self) -> bool:
        """True once there was a connection to this peer; False again if the peer restarted."""
        return bool(self._peer_link_id)

    @property
    def failure(self) -> str:
        """The reason why no message can arrive any more; empty while one may or is unread."""
        return "" if self._unread_messages else self._failure

    @property
    def state(self) -> str:
        """The reason in words why there is no connection now: the last break or failed attempt."""
        return self._failure or self._last_error or f"{self._peer} did not come"

    @property
    def absence(self) -> str:
        """The reason why this peer has not connected yet; "" if it is unknown.

        It is a `Refusal` if one end refused the other, or else says that the relay is not reached.
        """
        return Refusal(self.refusal) if self.refusal else self.relay_failure

    @property
    def current_break(self) -> BrokenLink | None:
        """The state of a broken connection that may be restored.

        None if the connection works or never existed, or if the link ends or has ended.
        """
        broken_at = self._broken_at
        if broken_at is None or self._is_closing or self._has_goodbye or self._is_over():
            return None
        since_s = time.monotonic() - broken_at
        return BrokenLink(since_s=since_s, patience_s=self._patience_s, why=self._last_error)

    @property
    def waiting_since(self) -> float | None:
        """The arrival time of the oldest unread message, in seconds of the monotonic clock.

        None if all messages are read.
        """
        return self._unread_messages[0][1] if self._unread_messages else None

    def send(self, body: bytes) -> None:
        """Queue one message for the peer, and store it until the peer confirms it.

        If much is unconfirmed already, wait until the peer has confirmed some.

        `body`: the message's bytes.

        Raises:
            RemoteProtocolError: the link has failed for good, or the peer confirms nothing.
            LocalProtocolError: the link was closed, the message is too long, or this is a forked
                process.
        """
        self._fork_check.require_own_process()
        if len(body) > MAX_BYTES:
            raise LocalProtocolError(
                f"a message to {self._peer} has at most {MAX_BYTES} bytes, got {len(body)}; "
                "send it in parts"
            )
        with self._changed:
            if self._is_closing:
                raise LocalProtocolError(f"the link to {self._peer} is closed")
            self._require_working()
            while self._unconfirmed_bytes > _MAX_UNCONFIRMED_BYTES:
                self._await_room()
            for part in split_into_parts(self._sent_messages, body, _PART_BYTES):
                self._unconfirmed_parts.append((_PART, part))
                self._unconfirmed_bytes += len(part) + _PART_OVERHEAD_BYTES
            self._sent_messages += 1
            self._changed.notify_all()

    def _await_room(self) -> None:
        """Wait until the peer confirms some parts; fail the link if it confirms none for long.

        Raises RemoteProtocolError: the link has failed.
        """
        confirmed_before = self._confirmed_parts
        has_changed = self._changed.wait_for(
            lambda: self._failure or self._confirmed_parts > confirmed_before, _STALLED_S
        )
        if not has_changed:
            self._record_failure(
                f"{self._peer} took nothing of what it was sent for {_STALLED_S:g} s"
            )
        self._require_working()

    def receive(self, timeout_s: float) -> bytes:
        """Wait for the peer's next message, and return it.

        Raises:
            TimeoutError: no message came within `timeout_s` seconds.
            RemoteProtocolError: the link has failed for good, or the peer closed it.
            LocalProtocolError: this is a forked process.
        """
        self._fork_check.require_own_process()
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._unread_messages or self._failure, timeout_s
            ):
                raise TimeoutError(f"{self._peer} sent nothing for {timeout_s} s")
            if not self._unread_messages:
                self._require_working()
            body, _, cost = self._unread_messages.popleft()
            self._unread_bytes -= cost
            # While too much was unread, nothing was confirmed: a receipt may be due now.
            self._changed.notify_all()
            return body

    def close(self, timeout_s: float | None = None, *, linger_s: float | None = None) -> None:
        """Wait until both ends have received everything, then end the link.

        A closed link sends the peer a last frame, a goodbye.

        Args:
            timeout_s: how long to wait for the peer's confirmation; None: the link's patience.
            linger_s: how long to wait then for the peer's goodbye; None: `timeout_s`.

        Raises RemoteProtocolError: the peer did not confirm the last messages in time.
        """
        timeout_s = self._patience_s if timeout_s is None else timeout_s
        with self._changed:
            if not self._is_closing:
                self._unconfirmed_parts.append((_GOODBYE, b""))
            self._is_closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._failure or self._has_delivered_all(), timeout_s)
            if self._has_delivered_all():
                self._changed.wait_for(
                    lambda: self._failure or self._has_goodbye or not self.has_met_peer,
                    timeout_s if linger_s is None else linger_s,
                )
            self._is_ended = True
            lost_part_count = sum(kind != _GOODBYE for kind, _ in self._unconfirmed_parts)
            self._changed.notify_all()
        if lost_part_count:
            reason = f": {self._failure}" if self._failure else ""
            raise RemoteProtocolError(
                f"{self._peer} did not confirm the last {lost_part_count} part(s) of what it was "
                f"sent; it may lack the result{reason}"
            )

    def _has_delivered_all(self) -> bool:
        """Return whether the peer confirmed everything, including this end's goodbye.

        A peer that never connected need not confirm the goodbye.
        """
        has_only_goodbye = len(self._unconfirmed_parts) == 1
        return not self._unconfirmed_parts or (has_only_goodbye and not self.has_met_peer)

    def _require_working(self) -> None:
        """Raise RemoteProtocolError if the link has failed for good."""
        if self._failure:
            raise RemoteProtocolError(self._failure)

    def _run_reader(self) -> None:
        """Connect and read until the link is over; runs in a thread of its own."""
        try:
            self._connect_repeatedly()
        finally:
            if not self._is_over():  # nothing else would notice that this thread ended
                self._record_failure(f"the link to {self._peer} ended by an error of this party")

    def _connect_repeatedly(self) -> None:
        """Connect, read until the connection breaks, and connect again, until the link is over.

        It gives up `first_connection_s` after the start if the peer never connected, and else
        `patience_s` after the peer's last frame. While the peer may still restart
        (`_accepts_restart`), the later of the two times counts.
        """
        meeting_ends_at = time.monotonic() + self._first_connection_s
        gives_up_at = meeting_ends_at
        pause_s = _PAUSE_S
        while not self._is_over():
            wire = None
            try:
                wire = _Wire(self._connect())
                self._exchange_greetings(wire)
                last_frame_at = time.monotonic()
                gives_up_at = last_frame_at + self._patience_s
                pause_s = _PAUSE_S
                while not self._is_over() and self._wire is wire:
                    if wire.connection.poll(_POLL_S):
                        self._handle_frame(wire.connection.recv_bytes())
                        last_frame_at = time.monotonic()
                        gives_up_at = last_frame_at + self._patience_s
                    elif time.monotonic() > last_frame_at + _SILENT_S:
                        raise TimeoutError(f"no sign of life for {_SILENT_S:g} s")
            except (OSError, EOFError) as error:
                ends_at = gives_up_at
                if self._accepts_restart():
                    ends_at = max(meeting_ends_at, gives_up_at)
                self._handle_break(error, gives_up=time.monotonic() > ends_at)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            except RemoteProtocolError as error:
                self._record_failure(str(error))
            if wire is not None:
                self._release_wire(wire)

    def _accepts_restart(self) -> bool:
        """Return whether the peer's process may restart now without harm to the session.

        It may while parties still come together and no message was sent either way. If the peer
        closed its end, that connection is then forgotten, so that the peer can connect again.
        """
        with self._changed:
            received_parts = self._received_parts - self._has_goodbye  # a goodbye counts as a part
            is_unused = not (self._sent_messages or self._is_closing or received_parts > 0)
            accepts = self.is_meeting and is_unused
            if accepts and self._has_goodbye:
                self._received_parts = 0
                self._reported_parts = 0
                self._has_goodbye = False
                self._peer_link_id = b""
            return accepts

    def _handle_break(self, error: Exception, *, gives_up: bool) -> None:
        """Record why a connection broke or was not made; fail the link if it cannot be restored.

        A refusal's reason is kept when later attempts fail for other reasons, since it says more.

        Args:
            error: what broke the connection, or the attempt to make one.
            gives_up: whether the time for connecting is over, so that the link fails.
        """
        reason = str(error) or "the connection ended"
        level = logging.DEBUG if self._wire is None else logging.WARNING
        _LOGGER.log(level, "no connection to %s: %s", self._peer, reason)
        if isinstance(error, ConnectionRefusedError):
            self.refusal = reason
        self.relay_failure = reason if isinstance(error, RelayAbsentError) else ""
        self._last_error = self.refusal or reason
        if self._has_goodbye:
            self._record_failure(f"{self._peer} closed its link")
        elif gives_up and not self.has_met_peer:
            self._record_failure(
                f"{self._peer} did not come within {self._first_connection_s:g} s "
                f"({self._last_error})"
            )
        elif gives_up:
            self._record_failure(
                f"the link to {self._peer} was broken for {self._patience_s:g} s "
                f"({self._last_error}); {ALL_AGAIN}"
            )

    def _exchange_greetings(self, wire: _Wire) -> None:
        """Exchange greetings on a new connection, and start the thread that writes to it.

        A greeting has three values: how many parts an end has received, its identifier, and the
        identifier of the peer to which it was connected before. The writing thread begins with the
        first part that the peer lacks.

        Raises:
            OSError: the peer was silent or restarted, so that another attempt may succeed.
            RemoteProtocolError: the peer's state is lost, so this link cannot be restored.
        """
        greeting = (
            _FRAME_HEADER.pack(_GREETING, 0, self._count_reportable_parts())
            + self._link_id
            + (self._peer_link_id or _NO_PEER)
        )
        wire.connection.send_bytes(greeting)
        if not wire.connection.poll(min(self._patience_s, _SILENT_S)):
            raise TimeoutError("no greeting")
        kind, _, confirmed_parts, body = self._parse_frame(wire.connection.recv_bytes())
        if kind != _GREETING or len(body) != 2 * _ID_BYTES:
            raise RemoteProtocolError(f"{self._peer} began a connection without a greeting")
        peer_link_id = body[:_ID_BYTES]
        former_peer_of_peer = body[_ID_BYTES:]
        # A link object has a random identifier: another one means another process or session.
        has_restarted = self._peer_link_id not in (b"", peer_link_id)
        if has_restarted and self._accepts_restart():
            self._peer_link_id = b""
            raise ConnectionResetError(f"{self._peer} began anew")
        if has_restarted:
            raise RemoteProtocolError(
                f"{self._peer} began anew: its process ended and was started again, and what was "
                f"under way is lost; {ALL_AGAIN}"
            )
        if former_peer_of_peer not in (_NO_PEER, self._link_id):
            # The peer learns from this party's greeting that its former session is over.
            raise ConnectionResetError(f"{self._peer} has not yet ended a session before this one")
        with self._changed:
            self._peer_link_id = peer_link_id
            self.refusal = ""
            self.relay_failure = ""
            self._drop_confirmed_parts(confirmed_parts)
            self._written_parts = confirmed_parts  # so all unconfirmed parts are written again
            self._reported_parts = self._count_reportable_parts()
            self._wire = wire
            self._broken_at = None
            wire.users += 1
            self._on_change()
        _LOGGER.info("connected to %s", self._peer)
        threading.Thread(target=self._run_writer, args=(wire,), daemon=True).start()

    def _handle_frame(self, frame: bytes) -> None:
        """Process one frame: the next part, a goodbye, or a receipt, which only confirms parts.

        A part that was received before is ignored; the peer repeats some after a break.

        Raises RemoteProtocolError: the frame is malformed or out of order.
        """
        kind, number, confirmed_parts, body = self._parse_frame(frame)
        with self._changed:
            self._drop_confirmed_parts(confirmed_parts)
            if kind == _GREETING or (kind != _RECEIPT and number > self._received_parts):
                raise RemoteProtocolError(
                    f"{self._peer} sent part {number} after {self._received_parts} part(s)"
                )
            if kind != _RECEIPT and number == self._received_parts:
                self._received_parts += 1
                if kind == _GOODBYE:
                    self._has_goodbye = True
                else:
                    self._add_part(body)
            self._changed.notify_all()

    def _add_part(self, part: bytes) -> None:
        """Store a part of a message, and add the message to the inbox once it is complete.

        Raises RemoteProtocolError: more bytes are unread than a peer that waits for confirmations
            can send.
        """
        self._incomplete_bytes += len(part) + _PART_OVERHEAD_BYTES
        self._unread_bytes += len(part) + _PART_OVERHEAD_BYTES
        if self._unread_bytes > _MAX_BUFFERED_BYTES:
            raise RemoteProtocolError(f"{self._peer} sent more than it may before it is confirmed")
        message = self._assembler.add_part(part, kind="frames")
        if message is not None:
            self._unread_messages.append((message, time.monotonic(), self._incomplete_bytes))
            self._incomplete_bytes = 0
            self._on_change()

    def _parse_frame(self, frame: bytes) -> tuple[int, int, int, bytes]:
        """Return kind and number of a frame, how many parts it confirms, and its body.

        Raises RemoteProtocolError: the frame has a wrong size or an unknown kind.
        """
        if not _FRAME_HEADER.size <= len(frame) <= MAX_PLAIN_FRAME_BYTES:
            raise RemoteProtocolError(f"{self._peer} sent a frame of {len(frame)} bytes")
        kind, number, confirmed_parts = _FRAME_HEADER.unpack_from(frame)
        if kind not in (_GREETING, _PART, _RECEIPT, _GOODBYE):
            raise RemoteProtocolError(f"{self._peer} sent a frame of kind {kind}")
        return kind, number, confirmed_parts, frame[_FRAME_HEADER.size :]

    def _drop_confirmed_parts(self, confirmed_parts: int) -> None:
        """Forget the stored parts that the peer confirms.

        `confirmed_parts`: how many parts the peer has received in all, as it states.

        Raises RemoteProtocolError: the number falls, or counts parts that were never sent.
        """
        if (
            not self._confirmed_parts
            <= confirmed_parts
            <= self._confirmed_parts + len(self._unconfirmed_parts)
        ):
            raise RemoteProtocolError(
                f"{self._peer} confirms {confirmed_parts} parts, of which {self._confirmed_parts} "
                f"were confirmed and {len(self._unconfirmed_parts)} were not"
            )
        for _ in range(confirmed_parts - self._confirmed_parts):
            _, part = self._unconfirmed_parts.popleft()
            self._unconfirmed_bytes -= len(part) + _PART_OVERHEAD_BYTES
        self._confirmed_parts = confirmed_parts

    def _run_writer(self, wire: _Wire) -> None:
        """Write parts, receipts and heartbeats to a connection until it is no longer in use.

        Runs in a thread of its own, one for each connection.
        """
        try:
            while (frame := self._next_frame(wire)) is not None:
                wire.connection.send_bytes(frame)
        except OSError:
            pass  # the reader connects again once no thread uses this wire
        finally:
            self._release_wire(wire)

    def _next_frame(self, wire: _Wire) -> bytes | None:
        """Wait until a frame is due on this connection, and return it.

        The frame is the next unwritten part. If there is none, it is a receipt, which reports how
        many parts this end has received: at once if many are unreported, after a short pause if
        some are, and else after a longer pause, as a sign of life.

        Returns None once the connection is no longer in use.
        """
        with self._changed:
            heartbeat_at = time.monotonic() + min(_HEARTBEAT_S, self._patience_s / 3)
            while self._is_in_use(wire) and not self._has_frame_due():
                pause_s = heartbeat_at - time.monotonic()
                if self._count_unreported_parts():
                    pause_s = min(pause_s, _RECEIPT_S)
                if not self._changed.wait(max(0.0, pause_s)):
                    break  # it is time for a receipt
            if not self._is_in_use(wire):
                return None
            kind = _RECEIPT
            number = self._written_parts
            part = b""
            if self._has_unwritten_parts():
                # `_unconfirmed_parts` begins with part number `_confirmed_parts`.
                kind, part = self._unconfirmed_parts[number - self._confirmed_parts]
                self._written_parts += 1
            self._reported_parts = self._count_reportable_parts()
            return _FRAME_HEADER.pack(kind, number, self._reported_parts) + part

    def _is_in_use(self, wire: _Wire) -> bool:
        """Return whether the link has not ended and uses this connection."""
        return not self._is_over() and self._wire is wire

    def _has_frame_due(self) -> bool:
        """Return whether a part is unwritten, or so many received parts that a receipt is due.

        After the peer's goodbye one received part is enough, since the peer waits for its receipt.
        """
        receipt_threshold = 1 if self._has_goodbye else _MAX_UNREPORTED_PARTS
        is_receipt_due = self._count_unreported_parts() >= receipt_threshold
        return self._has_unwritten_parts() or is_receipt_due

    def _has_unwritten_parts(self) -> bool:
        """Return whether some parts were not yet written to this connection."""
        return self._written_parts < self._confirmed_parts + len(self._unconfirmed_parts)

    def _count_unreported_parts(self) -> int:
        """Return how many received parts the peer has no receipt for yet."""
        return self._count_reportable_parts() - self._reported_parts

    def _count_reportable_parts(self) -> int:
        """Return how many received parts may be confirmed to the peer.

        They are all; but while too many bytes are unread, no further ones, so that the peer waits.
        """
        return (
            self._received_parts
            if self._unread_bytes <= _MAX_UNREAD_BYTES
            else self._reported_parts
        )

    def _release_wire(self, wire: _Wire) -> None:
        """Stop using a connection; the last of the threads that use it closes it."""
        with self._changed:
            if self._wire is wire:
                self._wire = None
                self._broken_at = time.monotonic()
            wire.users -= 1
            is_unused = not wire.users
            self._changed.notify_all()
        if is_unused:
            wire.connection.close()

    def _is_over(self) -> bool:
        """Return whether the link was ended or has failed."""
        return self._is_ended or bool(self._failure)

    def _record_failure(self, cause: str) -> None:
        """Fail the link for good with this reason, and wake all waiting threads.

        An earlier reason stays.
        """
        _LOGGER.info("the link to %s is over: %s", self._peer, cause)
        with self._changed:
            self._failure = self._failure or cause
            self._changed.notify_all()
            self._on_change()


class LinkTransport:
    """A `Transport` that carries a party's frames over one `ResumableLink` to each peer.

    Args:
        me: the party's name.
        connect_by_peer: for each peer, a function that returns an authenticated connection to it,
            or raises OSError.
        patience_s: how many seconds a peer may send nothing, not even heartbeats.
        meet_s: how many seconds to wait for a peer's first connection.
        on_close: called by `close`, to close what the connections need, such as a port.
    """

    def __init__(
        self,
        me: str,
        connect_by_peer: Mapping[str, Callable[[], Connection]],
        *,
        patience_s: float,
        meet_s: float,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """Open links to all peers, which connect in the background."""
        self._me = me
        self._connect_by_peer = connect_by_peer
        self._on_close = on_close
        self._rejoin_watchers: dict[str, _RejoinWatcher] = {}  # by peer that left the session
        self._link_change = threading.Event()  # set when any link has changed
        self._link_by_peer = {
            peer: ResumableLink(
                peer,
                dial,
                patience_s=patience_s,
                first_connection_s=meet_s,
                on_change=self._link_change.set,
            )
            for peer, dial in connect_by_peer.items()
        }
        # By needed peer that has left: when this party noticed, on the monotonic clock.
        self._absent_since: dict[str, float] = {}

    @classmethod
    def meet_peers(
        cls,
        me: str,
        connect_by_peer: Mapping[str, Callable[[], Connection]],
        *,
        patience_s: float,
        meet_s: float,
        on_close: Callable[[], None] = lambda: None,
        on_missing: Missed = lambda missing: None,
    ) -> Self:
        """Return a transport once all peers have connected.

        Args:
            me: the party's name.
            connect_by_peer: for each peer, a function that returns an authenticated connection to
                it, or raises OSError.
            patience_s: how many seconds a peer may send nothing, not even heartbeats.
            meet_s: how many seconds to wait for all peers.
            on_close: called when the transport is closed.
            on_missing: called repeatedly with the missing peers and the reason for each.

        Raises PartyLeftError: names the peers that did not connect.
        """
        transport = cls(
            me, connect_by_peer, patience_s=patience_s, meet_s=meet_s, on_close=on_close
        )
        try:
            for link in transport._link_by_peer.values():
                link.is_meeting = True
            transport._await_meeting(meet_s, on_missing)
            for link in transport._link_by_peer.values():
                link.is_meeting = False
        except BaseException:
            transport.close()
            raise
        return transport

    def _await_meeting(self, meet_s: float, on_missing: Missed) -> None:
        """Wait until all peers have connected, and report about once a second which are missing.

        `meet_s`: how many seconds to wait. `on_missing`: gets the reason for each missing peer.

        Raises PartyLeftError: names the peers that did not connect.
        """
        deadline = time.monotonic() + meet_s
        while missing := self._list_missing():
            self._link_change.clear()
            on_missing({peer: self._link_by_peer[peer].absence for peer in missing})
            self._require_meeting(missing, is_late=time.monotonic() > deadline)
            remaining_s = deadline - time.monotonic()
            self._link_change.wait(max(0.0, min(1.0, remaining_s)))

    def _list_missing(self) -> list[str]:
        """Return the names of the peers that have not connected yet."""
        return [peer for peer, link in self._link_by_peer.items() if not link.has_met_peer]

    def _require_meeting(self, missing: Sequence[str], *, is_late: bool) -> None:
        """Raise PartyLeftError if a link has failed, or if peers are missing and time is up.

        `missing`: peers that have not connected yet. `is_late`: whether the time for connecting is
        over.
        """
        failed_peers = [peer for peer, link in self._link_by_peer.items() if link.failure]
        if failed_peers or is_late:
            blamed_peers = failed_peers or missing
            reasons = "; ".join(self._link_by_peer[peer].state for peer in blamed_peers)
            raise PartyLeftError(
                f"agreement: {self._me} has no link to {' and '.join(blamed_peers)}: {reasons}",
                missing_parties=tuple(blamed_peers),
            )

    def send_frame(self, receiver: str, frame: bytes) -> None:
        """Queue a frame for a peer; drop it if the peer has left.

        A failure of the link is not raised here, but by `receive_frame` when the peer is awaited.
        """
        if receiver in self._rejoin_watchers:
            return  # its link has ended
        try:
            self._link_by_peer[receiver].send(frame)
        except RemoteProtocolError:
            self._link_change.set()  # a script that waits for this peer gets the reason

    def receive_frame(self, awaited: Awaited, timeout_s: float) -> Frame:
        """Wait until an awaited peer has sent a frame; return the peer and the oldest such frame.

        Raises PartyLeftError: too few awaited peers are left, or none sent a frame within
            `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self._link_change.clear()
            waiting_since_by_sender = {
                name: self._link_by_peer[name].waiting_since for name in awaited.senders
            }
            arrival_by_sender = {
                name: time_s
                for name, time_s in waiting_since_by_sender.items()
                if time_s is not None
            }
            if arrival_by_sender:
                earliest_sender = min(arrival_by_sender, key=arrival_by_sender.__getitem__)
                return earliest_sender, self._link_by_peer[earliest_sender].receive(0.0)
            self._link_change.wait(self._compute_wait(awaited, timeout_s, deadline))

    def _compute_wait(self, awaited: Awaited, timeout_s: float, deadline: float) -> float:
        """Return for how many seconds to wait until the links are examined again.

        Args:
            awaited: the message that has not arrived yet.
            timeout_s: how long the message is awaited in all, for the error.
            deadline: the end of this wait, on the monotonic clock.

        Raises PartyLeftError: too few awaited peers remain, nothing came in time, or a peer without
            whom the session cannot continue left a few seconds ago.
        """
        reason_by_failed = self._find_failures(awaited.senders)
        if len(awaited.senders) - len(reason_by_failed) < awaited.min_senders:
            reasons = "; ".join(dict.fromkeys(reason_by_failed.values()))
            raise _make_departure(awaited, reasons, reason_by_failed, has_left=True)
        now = time.monotonic()
        if now >= deadline:
            raise _make_departure(awaited, f"nothing came for {timeout_s:g} s", awaited.senders)
        reason_by_absent = self._find_failures(awaited.needed_peers)
        absent_since = [self._absent_since.setdefault(name, now) for name in reason_by_absent]
        # Without a needed peer the awaited peers will stop, too; for a while they may say why.
        grace_s = min(absent_since, default=math.inf) + _LAST_WORDS_S - now
        if grace_s <= 0:
            reasons = "; ".join(dict.fromkeys(reason_by_absent.values()))
            raise _make_departure(awaited, f"nothing came, and {reasons}", reason_by_absent)
        return min(deadline - now, grace_s, _LONGEST_WAIT_S)

    def _find_failures(self, names: Iterable[str]) -> dict[str, str]:
        """Return, for each of these peers whose link has failed, the reason by its name."""
        return {name: reason for name in names if (reason := self._link_by_peer[name].failure)}

    def find_rejoining(self, names: Collection[str]) -> list[str]:
        """Return which of these peers, which left the session, are ready for a new one.

        The first call with a peer's name ends the link to it, and starts a background thread that
        checks whether the peer is back.
        """
        for name in set(names) - set(self._rejoin_watchers):
            self._rejoin_watchers[name] = _RejoinWatcher(
                self._connect_by_peer[name], self._link_by_peer[name]
            )
        return [name for name in names if self._rejoin_watchers[name].is_back]

    def _list_open_links(self) -> dict[str, ResumableLink]:
        """Return, by peer, the links that this party did not end since the peer left."""
        return {
            name: link
            for name, link in self._link_by_peer.items()
            if name not in self._rejoin_watchers
        }

    def list_broken_links(self) -> dict[str, BrokenLink]:
        """Return, by peer, the state of each link that is broken and may be restored."""
        breaks = {name: link.current_break for name, link in self._list_open_links().items()}
        return {name: broken for name, broken in breaks.items() if broken is not None}

    def close(self) -> None:
        """Deliver all sent messages, and end all links; wait a few seconds at most."""
        closing_threads = [
            threading.Thread(target=_close_link, args=(link,))
            for link in self._list_open_links().values()
        ]
        for watcher in self._rejoin_watchers.values():
            watcher.stop_watching()
        for thread in closing_threads:
            thread.start()
        for thread in closing_threads:
            thread.join()
        self._on_close()


def _make_departure(
    awaited: Awaited, message: str, names: Collection[str], *, has_left: bool = False
) -> PartyLeftError:
    """Return the error that a wait for a message failed since peers left.

    Args:
        awaited: the message, which the error's text names with its phase.
        message: what happened.
        names: the peers that left.
        has_left: whether they left for good.
    """
    text = f"{awaited.phase}: {awaited}; {message}"
    if awaited.is_prediction:  # a service of joint predictions needs no new session of training
        text = text.replace(ALL_AGAIN, "ask again once secure-apfed serve runs there")
    return PartyLeftError(text, missing_parties=tuple(names), has_left=has_left)


def _close_link(link: ResumableLink) -> None:
    """Close a link after a few seconds at most, whether or not the peer received everything."""
    with contextlib.suppress(RemoteProtocolError):  # a peer that lacks parts had time to take them
        link.close(_FLUSH_S, linger_s=_LINGER_S)


class _RejoinWatcher:
    """A background thread that checks whether a peer that left the session is ready for a new one.

    The session continues without the peer meanwhile. A peer that is back connects as to any
    session, proves its identity and sends its greeting. This connection is then closed; the next
    session makes its own.
    """

    def __init__(self, connect: Callable[[], Connection], link: ResumableLink) -> None:
        """Start the thread.

        `connect`: makes a new connection to the peer. `link`: the peer's link in the present
        session, which the thread closes first.
        """
        self._connect = connect
        self._link = link
        self._stop_requested = threading.Event()
        self._last_greeting_at = -math.inf  # on the monotonic clock
        threading.Thread(target=self._reconnect, daemon=True).start()

    @property
    def is_back(self) -> bool:
        """Return whether the peer sent a greeting recently."""
        return time.monotonic() < self._last_greeting_at + _PRESENT_S

    def stop_watching(self) -> None:
        """Let the thread end soon."""
        self._stop_requested.set()

    def _reconnect(self) -> None:
        """Close the old link, then check again and again whether the peer sends a greeting."""
        _close_link(self._link)  # the peer learns that it was left out, if its process lives
        while not self._stop_requested.is_set():
            if self._receives_greeting():
                self._last_greeting_at = time.monotonic()
            self._stop_requested.wait(_GREET_AGAIN_S)

    def _receives_greeting(self) -> bool:
        """Connect to the peer; return whether it sends a greeting and then waits for an answer."""
        try:
            with contextlib.closing(self._connect()) as connection:
                if not connection.poll(_GREETING_S):
                    return False
                connection.recv_bytes()
                return not connection.poll(0.0)  # a waiting peer is silent until it is answered
        except (OSError, EOFError, RemoteProtocolError):
            return False

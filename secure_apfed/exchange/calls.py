"""Connections over remote calls between sites, as in a job of NVFlare.

Run by: every party of such a job, beneath `sealed_connection` and `resumable_link`. Each frame is
one call, which returns when the other end has taken it. A few are under way at once, in any order,
and are sorted by their numbers. The carrier of the calls learns which parties exchange messages,
when, and how many bytes. Protects from: calls of strangers, which replace no connection before they
prove an identity, and from frames that are too large, repeated, ahead of their turn, or unread:
only a few are buffered. No module of NVFlare's is used here.
"""

import contextlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.randomness import fresh_key
from secure_apfed.exchange.envelope import quote_reason
from secure_apfed.exchange.pipe import MAX_QUEUED, Pipe
from secure_apfed.exchange.resumable_link import Connection
from secure_apfed.exchange.sealed_connection import (
    MAX_FRAME_BYTES,
    MAX_UNPROVED_FRAME_BYTES,
    LocalEnd,
    PeerAcceptor,
    prove_identity,
)

Carry = Callable[[str, bytes, int, bytes], bool]
"""A remote call of `Calls.take_frame` at a peer. Arguments: the peer's name, the connection's name,
the frame's number, and the frame.

Returns what `take_frame` returned there. Raises ConnectionAbortedError: the job is over; OSError:
the call failed."""

_NAME_BYTES = 32
_MAX_CALLS_UNDER_WAY = (
    4  # calls under way on a connection; with one at a time a run took half as long again
)
_MAX_UNPROVEN = 4  # unproven connections in one peer's name; then the oldest is closed
_TAKE_TIMEOUT_S = 10.0  # that a call waits until its frame is taken


class Calls:
    """A party's connections to all its peers; every frame is one remote call.

    Of two parties, the one whose name sorts later dials, so that exactly one of them does.
    """

    def __init__(self, me: LocalEnd, carry: Carry) -> None:
        """Prepare connections to all peers.

        `me`: this party's keys and its peers' names. `carry`: delivers one frame to a peer by a
        remote call.
        """
        self._me = me
        self._carry = carry
        dialling = tuple(name for name in me.identity_by_peer if name > me.name)
        self._acceptor = PeerAcceptor(me, dialling, absence_reason="its party did not begin")
        self._lock = threading.Lock()
        self._connections: dict[str, _CallConnection] = {}  # by peer: the one in use
        # By dialling peer, its connections that have not proved an identity, by their names.
        self._unproven_by_peer: dict[str, dict[bytes, _CallConnection]] = {
            name: {} for name in dialling
        }
        self._unreachable_peers: set[str] = set()  # peers at whom the last call failed
        self._stop_reasons: dict[str, str] = {}  # by peer: why its party has ended
        self._end_reason = ""  # why all connections have ended; "" while they have not

    def make_connectors(self) -> Mapping[str, Callable[[], Connection]]:
        """Return, by peer, a function that connects to it; `LinkTransport` calls it repeatedly."""
        return {name: partial(self._connect_peer, name) for name in self._me.identity_by_peer}

    def _connect_peer(self, peer: str) -> Connection:
        """Return an authenticated connection to this peer: accept one if the peer dials, else dial.

        Raises:
            RemoteProtocolError: the peer, or the whole job, has ended; or another party answered.
            OSError, EOFError: the peer did not dial yet, or the connection broke.
        """
        if (reason := self._stop_reasons.get(peer)) is not None:
            raise RemoteProtocolError(f"{peer} stopped: {reason}")
        if self._end_reason:
            raise RemoteProtocolError(self._end_reason)
        if peer > self._me.name:
            return self._acceptor.take_connection(peer)
        connection = self._make_connection(peer, fresh_key())
        self._replace_connection(peer, connection)
        try:
            _, encrypted_connection = prove_identity(connection, self._me, peer)
            return encrypted_connection
        except BaseException:
            connection.close()
            raise

    def take_frame(self, caller: str, name: bytes, number: int, frame: bytes) -> bool:
        """Accept one frame from a peer, and block while too many accepted frames are unread.

        Returns whether the frame was accepted; no frame is on a connection that is over.

        Args:
            caller: the peer's name as the carrier of the calls states it; the peer proves its
                identity by the frames themselves.
            name: name of the connection, 32 random bytes that the dialling end chose.
            number: number of the frame, from 0. A negative number, -1 - n, has no frame: it
                announces that the connection ends after its first n frames.
            frame: the frame's bytes; empty where the number is negative.
        """
        if type(name) is not bytes or type(number) is not int or type(frame) is not bytes:
            return False
        connection = self._find_connection(caller, name, number)
        if connection is None:
            return False
        if number < 0:
            connection.end_after(-1 - number)
            return True
        return connection.take_frame(number, frame)

    def _find_connection(self, caller: str, name: bytes, number: int) -> "_CallConnection | None":
        """Return the peer's connection of this name; None if there is none.

        A new connection is made if the peer may dial and this is the connection's first frame. A
        thread then verifies the peer's identity. If too many connections are not verified, the
        oldest of them is closed.

        `caller`: the peer's name. `name`: the connection's name, 32 bytes. `number`: number of the
        frame, from 0.
        """
        with self._lock:
            current = self._connections.get(caller)
            unproven_connections = self._unproven_by_peer.get(caller, {})
            if current is not None and current.name == name:
                return current
            if name in unproven_connections:
                return unproven_connections[name]
            may_dial = caller in self._unproven_by_peer and not self._end_reason
            if not may_dial or number != 0 or len(name) != _NAME_BYTES:
                return None
            new_connection = self._make_connection(caller, name)
            unproven_connections[name] = new_connection
            oldest = None
            if len(unproven_connections) > _MAX_UNPROVEN:
                oldest_name = next(iter(unproven_connections))
                oldest = unproven_connections.pop(oldest_name)
        if oldest is not None:
            oldest.close()
        threading.Thread(
            target=self._admit_peer, args=(caller, new_connection), daemon=True
        ).start()
        return new_connection

    def _admit_peer(self, peer: str, new_connection: "_CallConnection") -> None:
        """Verify a dialling peer's identity on a new connection.

        If it is verified, the connection `new_connection` replaces the peer's former one; else it
        was closed and is forgotten.
        """
        self._acceptor.admit_stranger(
            new_connection, certificate=b""
        )  # calls have no TLS certificate
        if new_connection.is_over:
            with self._lock:
                self._unproven_by_peer[peer].pop(new_connection.name, None)
        else:
            self._replace_connection(peer, new_connection)

    def _replace_connection(self, peer: str, new_connection: "_CallConnection") -> None:
        """Replace the peer's former connection, if any, by `new_connection`, and close the former
        one.

        If all connections have ended meanwhile, `new_connection` is closed, too.
        """
        with self._lock:
            self._unproven_by_peer.get(peer, {}).pop(new_connection.name, None)
            former = self._connections.get(peer)
            self._connections[peer] = new_connection
            is_ended = self._end_reason
        if former is not None:
            former.close()
        if is_ended:
            new_connection.close()

    def _make_connection(self, peer: str, name: bytes) -> "_CallConnection":
        """Return a new connection to this peer; `name`: its name, 32 random bytes."""
        return _CallConnection(name, partial(self._carry_frame, peer, name))

    def _carry_frame(self, peer: str, name: bytes, number: int, frame: bytes) -> bool:
        """Send one frame by a call, and record in `_unreachable_peers` whether calls at this peer
        fail.

        Returns whether the peer accepted the frame.

        `name`: the connection's name, 32 bytes. `number`: number of the frame, from 0; -1 - n, with
        an empty frame: the connection ends after its first n frames.
        """
        try:
            is_accepted = self._carry(peer, name, number, frame)
        except ConnectionAbortedError:  # by the end of the job, which is no fault of the peer
            raise
        except OSError:
            with self._lock:
                self._unreachable_peers.add(peer)
            raise
        with self._lock:
            self._unreachable_peers.discard(peer)
        return is_accepted

    def end_connections(self, reason: str) -> None:
        """End all connections, and let later attempts to connect fail with this reason.

        The reason also names the peers at whom the last call failed.
        """
        with self._lock:
            failing = " and ".join(sorted(self._unreachable_peers))
            self._end_reason = self._end_reason or (
                f"{reason}; calls to {failing} failed before" if failing else reason
            )
            connections = [*self._connections.values()]
            for incoming in self._unproven_by_peer.values():
                connections += incoming.values()
        for connection in connections:
            connection.close()

    def note_stop(self, peer: str, reason: str) -> None:
        """Record that a known peer's party has ended and will not connect again.

        `reason`: the peer's own words, which errors quote as untrusted text.
        """
        if peer in self._me.identity_by_peer:
            self._stop_reasons[peer] = quote_reason(reason.encode("utf-8", "replace"))


class _CallConnection(Pipe):
    """A connection to one peer, each of whose frames is a numbered remote call.

    A few calls are under way at once and may arrive in any order; the numbers restore the order.
    """

    def __init__(self, name: bytes, carry: Callable[[int, bytes], bool]) -> None:
        """Make a connection that takes only short frames until the peer has proved its identity.

        `name`: 32 random bytes. `carry`: sends a frame, given its number and bytes, by a remote
        call; returns whether the peer accepted it.
        """
        super().__init__()
        self.name = name
        self._carry = carry
        self._call_pool = ThreadPoolExecutor(_MAX_CALLS_UNDER_WAY, thread_name_prefix="call")
        self._call_slots = threading.Semaphore(_MAX_CALLS_UNDER_WAY)
        self._early_frames: dict[int, bytes] = {}  # by number: those before which one is missing
        self._sent_frames = 0
        self._received_frames = 0
        self._max_bytes = MAX_UNPROVED_FRAME_BYTES
        # How many frames the other end has sent in all; known once it has closed the connection.
        self._announced_frame_count: int | None = None

    def trust_peer(self) -> None:
        """Allow larger frames, after the peer proved its identity."""
        self._max_bytes = MAX_FRAME_BYTES

    def take_frame(self, number: int, frame: bytes) -> bool:
        """Accept a frame; block until all frames before it have come and few are unread.

        The caller is the other end's remote call, so blocking it slows a fast sender down.

        Returns False if the frame is repeated, too long or too far ahead: at most the next
        `_MAX_CALLS_UNDER_WAY` frames are accepted, and fewer while too many are unread. Also False
        if the frame could not be queued in time.

        `number`: number of the frame on this connection, from 0.
        """
        with self._changed:
            if self._end_reason is not None or len(frame) > self._max_bytes:
                return False
            unread_excess = max(0, len(self._frames) - MAX_QUEUED)
            next_number = self._received_frames
            number_limit = next_number + _MAX_CALLS_UNDER_WAY - unread_excess
            is_acceptable = next_number <= number < number_limit
            if number in self._early_frames or not is_acceptable:
                return False
            self._early_frames[number] = frame
            self._queue_frames_in_order()
            self._end_if_over()
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._may_return(number), _TAKE_TIMEOUT_S)

    def _queue_frames_in_order(self) -> None:
        """Queue the frames whose predecessors have all come, so that they can be read."""
        while self._received_frames in self._early_frames:
            self._frames.append(self._early_frames.pop(self._received_frames))
            self._received_frames += 1

    def _may_return(self, number: int) -> bool:
        """Return whether the call that brought this frame may return to the sender: the frame is
        queued and few are unread, or the connection has ended.
        """
        is_queued = number < self._received_frames
        has_few_unread = len(self._frames) <= MAX_QUEUED
        return self._end_reason is not None or (is_queued and has_few_unread)

    @property
    def is_over(self) -> bool:
        """True if the connection has ended."""
        return self._end_reason is not None

    def end_after(self, frame_count: int) -> None:
        """Record that the other end closed the connection after it sent this number of frames."""
        with self._changed:
            self._announced_frame_count = frame_count
            self._end_if_over()

    def _end_if_over(self) -> None:
        """End the connection if all frames that the other end announced have arrived."""
        announced = self._announced_frame_count
        if announced is not None and self._received_frames >= announced:
            self.end("the other end closed the connection")

    def send_bytes(self, buf: bytes, /) -> None:
        """Send a frame by a call in the background; wait while `_MAX_CALLS_UNDER_WAY` calls are
        under way.

        A call that fails ends the connection. `buf`: the frame's bytes.

        Raises BrokenPipeError: the connection has ended.
        """
        self._call_slots.acquire()
        try:
            with self._changed:
                if self._end_reason is not None:
                    raise BrokenPipeError(self._end_reason)
                number = self._sent_frames
                self._sent_frames += 1
                self._call_pool.submit(self._send_frame, number, buf)
        except BaseException:
            self._call_slots.release()
            raise

    def _send_frame(self, number: int, frame: bytes) -> None:
        """Make one call, with a frame and its number; if it fails, end the connection."""
        try:
            if not self._carry(number, frame):
                self._fail_connection("it is not there yet, or has another connection by now")
        except OSError as error:
            self._fail_connection(str(error))
        finally:
            self._call_slots.release()

    def close(self) -> None:
        """End the connection here at once, and at the other end once all sent frames arrived."""
        self._fail_connection("the connection was closed", sent_frames=self._sent_frames)

    def _fail_connection(self, reason: str, *, sent_frames: int = 0) -> None:
        """End the connection here with this reason, and tell the other end to end it, too.

        `sent_frames`: after how many frames in all the other end ends it; 0: at once.
        """
        with self._changed:
            if self._end_reason is None:
                self._call_pool.submit(self._announce_end, sent_frames)
            self.end(reason)

    def _announce_end(self, sent_frames: int) -> None:
        """Tell the other end after how many frames to end the connection.

        A negative frame number marks such a call, so that 0 frames have a number, too.
        """
        with contextlib.suppress(OSError):  # the other end will notice by the silence
            self._carry(-1 - sent_frames, b"")

    def end(self, reason: str = "") -> None:
        """End the connection with this reason, and let no further call begin."""
        with self._changed:
            if self._end_reason is None:
                self._call_pool.shutdown(wait=False)
            super().end(reason)

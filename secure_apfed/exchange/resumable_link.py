"""A link to one peer that outlives its connections: what was under way is sent again.

Run by: both ends, around any connection that keeps messages whole. The protocols above
keep their state, so after a break they go on where they were. Every message has a number;
after each new connection both ends say how many they have, and send what the other lacks. An end
that has nothing left to send and is closed says goodbye, and waits for that of the other.
Protects from: connections that break. Not from a process that ends, and from no attacker:
`connect` must give an authenticated and encrypted connection to the same peer each time.
"""

import queue
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from protocols.errors import LocalProtocolError, RemoteProtocolError

__all__ = ["Connection", "ResumableLink"]

_FRAME = struct.Struct(">BQQ")
_HELLO, _DATA, _RECEIPT, _GOODBYE = 1, 2, 3, 4
_PAUSE_S = 0.05
_LOOK_S = 0.2


class Connection(Protocol):
    """What `multiprocessing.connection` gives, and what is used of it.

    The methods raise OSError or EOFError when the connection is broken.
    """

    def send_bytes(self, buf: bytes, /) -> None: ...

    def recv_bytes(self) -> bytes: ...

    def poll(self, timeout: float, /) -> bool: ...

    def close(self) -> None: ...


@dataclass(eq=False)
class _Wire:
    """One connection and how many threads use it; the last one closes it.

    Nobody closes it under another thread's hands: a thread may hang in a write to a dead
    connection, and the number of a closed file may be given to another one.
    """

    connection: Connection
    users: int = 1


class ResumableLink:
    """Messages to and from one peer, in order, each exactly once.

    Args:
        peer: its name, for errors.
        connect: makes a new connection, or raises OSError; called again after each break.
        patience_s: how long the link may be broken, and how long `close` waits.
    """

    def __init__(
        self, peer: str, connect: Callable[[], Connection], *, patience_s: float = 60.0
    ) -> None:
        self._peer, self._connect, self._patience_s = peer, connect, patience_s
        self._inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._unconfirmed: deque[bytes] = deque()
        self._confirmed = self._written = self._received = self._told = 0
        self._wire: _Wire | None = None
        self._failure = ""
        self._closing = self._ended = self._said_goodbye = self._heard_goodbye = False
        threading.Thread(target=self._read_on, daemon=True).start()

    def send(self, body: bytes) -> None:
        """Take one message for the peer; it is kept until the peer confirms it.

        Raises:
            RemoteProtocolError: the link is broken for good.
            LocalProtocolError: it was closed.
        """
        with self._changed:
            if self._closing:
                raise LocalProtocolError(f"the link to {self._peer} is closed")
            self._check()
            self._unconfirmed.append(body)
            self._changed.notify_all()

    def receive(self, timeout_s: float) -> bytes:
        """Return the peer's next message.

        Raises:
            TimeoutError: none came in this time.
            RemoteProtocolError: the link is broken for good.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return self._inbox.get(timeout=max(0.0, min(_LOOK_S, deadline - time.monotonic())))
            except queue.Empty:
                with self._changed:
                    self._check()
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{self._peer} sent nothing for {timeout_s} s")

    def close(self) -> None:
        """Wait until both ends have everything, then end.

        Raises:
            RemoteProtocolError: the peer did not confirm the last messages in time.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._failure or (self._said_goodbye and self._heard_goodbye),
                self._patience_s,
            )
            self._ended, missing = True, len(self._unconfirmed)
            self._changed.notify_all()
        if missing:
            raise RemoteProtocolError(
                f"{self._peer} did not confirm the last {missing} message(s); "
                f"it may lack the result{': ' + self._failure if self._failure else ''}"
            )

    def _check(self) -> None:
        if self._failure:
            raise RemoteProtocolError(self._failure)

    def _read_on(self) -> None:
        """Connect, read until the connection breaks, and again."""
        deadline = time.monotonic() + self._patience_s
        while not self._over():
            wire = None
            try:
                wire = _Wire(self._connect())
                self._greet(wire)
                deadline = time.monotonic() + self._patience_s
                while not self._over() and self._wire is wire:
                    if wire.connection.poll(_LOOK_S):
                        self._take(wire.connection.recv_bytes())
                    deadline = time.monotonic() + self._patience_s
            except (OSError, EOFError) as error:
                if time.monotonic() > deadline:
                    why = str(error) or type(error).__name__
                    self._fail(
                        f"the link to {self._peer} was broken for {self._patience_s:g} s ({why}); "
                        "start all parties again with a new session"
                    )
                time.sleep(_PAUSE_S)
            except RemoteProtocolError as error:
                self._fail(str(error))
            if wire is not None:
                self._leave(wire)

    def _greet(self, wire: _Wire) -> None:
        """Tell and hear how many messages came; then begin to write what is lacking."""
        wire.connection.send_bytes(_FRAME.pack(_HELLO, 0, self._received))
        if not wire.connection.poll(self._patience_s):
            raise TimeoutError("no greeting")
        kind, _, confirmed, _ = self._parse(wire.connection.recv_bytes())
        if kind != _HELLO:
            raise RemoteProtocolError(f"{self._peer} began a connection without a greeting")
        with self._changed:
            self._confirm(confirmed)
            self._written, self._told = confirmed, self._received
            self._wire, self._said_goodbye = wire, False
            wire.users += 1
        threading.Thread(target=self._write_on, args=(wire,), daemon=True).start()

    def _take(self, frame: bytes) -> None:
        kind, number, confirmed, body = self._parse(frame)
        with self._changed:
            self._confirm(confirmed)
            self._heard_goodbye = self._heard_goodbye or kind == _GOODBYE
            if kind == _DATA and number == self._received:
                self._received += 1
                self._inbox.put(body)
            elif kind == _HELLO or (kind == _DATA and number > self._received):
                raise RemoteProtocolError(
                    f"{self._peer} sent message {number} after {self._received} message(s)"
                )
            self._changed.notify_all()

    def _parse(self, frame: bytes) -> tuple[int, int, int, bytes]:
        if len(frame) < _FRAME.size:
            raise RemoteProtocolError(f"{self._peer} sent a frame of {len(frame)} bytes")
        kind, number, confirmed = _FRAME.unpack_from(frame)
        if kind not in (_HELLO, _DATA, _RECEIPT, _GOODBYE):
            raise RemoteProtocolError(f"{self._peer} sent a frame of kind {kind}")
        return kind, number, confirmed, frame[_FRAME.size :]

    def _confirm(self, confirmed: int) -> None:
        if not self._confirmed <= confirmed <= self._confirmed + len(self._unconfirmed):
            raise RemoteProtocolError(
                f"{self._peer} confirms {confirmed} messages, of which {self._confirmed} were "
                f"confirmed and {len(self._unconfirmed)} were not"
            )
        for _ in range(confirmed - self._confirmed):
            self._unconfirmed.popleft()
        self._confirmed = confirmed

    def _write_on(self, wire: _Wire) -> None:
        """Write whatever the peer lacks, how much came, and at last goodbye."""
        try:
            while (frame := self._next_frame(wire)) is not None:
                kind, number, received, body = frame
                wire.connection.send_bytes(_FRAME.pack(kind, number, received) + body)
                self._note_written(wire, kind, received)
        except OSError:
            pass  # the reader connects again as soon as this wire is left
        finally:
            self._leave(wire)

    def _next_frame(self, wire: _Wire) -> tuple[int, int, int, bytes] | None:
        """Wait for something to write to this wire; None when it is no longer in use."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._over() or self._wire is not wire or self._next_kind()
            )
            if self._over() or self._wire is not wire:
                return None
            kind, number = self._next_kind(), self._written
            body = self._unconfirmed[number - self._confirmed] if kind == _DATA else b""
            return kind, number, self._received, body

    def _next_kind(self) -> int:
        """What is to be written now; 0 for nothing."""
        if self._written < self._confirmed + len(self._unconfirmed):
            return _DATA
        if self._told < self._received:
            return _RECEIPT
        done = self._closing and not self._unconfirmed and not self._said_goodbye
        return _GOODBYE if done else 0

    def _note_written(self, wire: _Wire, kind: int, received: int) -> None:
        with self._changed:
            if self._wire is wire:
                self._told = received
                self._written += kind == _DATA
                self._said_goodbye = self._said_goodbye or kind == _GOODBYE
            self._changed.notify_all()

    def _leave(self, wire: _Wire) -> None:
        with self._changed:
            if self._wire is wire:
                self._wire = None
            wire.users -= 1
            last = not wire.users
            self._changed.notify_all()
        if last:
            wire.connection.close()

    def _over(self) -> bool:
        return self._ended or bool(self._failure)

    def _fail(self, why: str) -> None:
        with self._changed:
            self._failure = why
            self._changed.notify_all()

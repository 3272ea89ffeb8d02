"""A bounded pipe of frames between two threads, the reading half of several kinds of connection."""

import threading
from collections import deque

__all__ = ["MAX_QUEUED", "Pipe"]

MAX_QUEUED = 4
"""Frames that may wait in each direction between a carrier's threads and the link's."""


class Pipe:
    """A bounded queue of frames from one thread to another, with the reading half of a connection.

    Attributes:
        room: how many unread frames it may contain; `push_frame` waits above that.
    """

    def __init__(self, room: int = MAX_QUEUED) -> None:
        """Create an empty pipe that may contain at most `room` unread frames."""
        self.room = room
        self._changed = threading.Condition()
        self._frames: deque[bytes] = deque()
        self._end_reason: str | None = None  # why the pipe has ended, maybe ""; None: it has not

    def push_frame(self, frame: bytes) -> None:
        """Append a frame; wait while the pipe is full. Raises BrokenPipeError: the pipe ended."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._end_reason is not None or len(self._frames) < self.room
            )
            if self._end_reason is not None:
                raise BrokenPipeError(self._end_reason or "the connection was closed")
            self._frames.append(frame)
            self._changed.notify_all()

    def poll(self, timeout: float, /) -> bool:
        """Wait up to `timeout` seconds; return whether `recv_bytes` would not have to wait now."""
        with self._changed:
            return self._changed.wait_for(
                lambda: bool(self._frames) or self._end_reason is not None, timeout
            )

    def recv_bytes(self) -> bytes:
        """Wait for the next frame, and return it. Raises EOFError: the pipe ended and is empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._frames or self._end_reason is not None)
            if not self._frames:
                raise EOFError(self._end_reason or "the other end closed the connection")
            self._changed.notify_all()
            return self._frames.popleft()

    def end(self, reason: str = "") -> None:
        """Accept no more frames; unread frames may still be read. Only the first reason is kept."""
        with self._changed:
            if self._end_reason is None:
                self._end_reason = reason
            self._changed.notify_all()

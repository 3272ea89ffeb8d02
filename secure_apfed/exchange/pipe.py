"""Carriers between machines: gRPC (an extra), a relay, calls of NVFlare's; certificates for TLS."""

import threading
from collections import deque

__all__ = ["MAX_QUEUED", "Pipe"]

MAX_QUEUED = 4
"""Frames each way between the threads of who carries them and the link's."""


class Pipe:
    """A pipe of frames from one thread to another, of which few may wait; the reading half of a
    `Carrier`.
    """

    def __init__(self, room: int = MAX_QUEUED) -> None:
        """Create an empty pipe in which at most `room` frames may wait."""
        self.room = room
        self._changed = threading.Condition()
        self._frames: deque[bytes] = deque()
        self._ended: str | None = None

    def push_frame(self, frame: bytes) -> None:
        """Append a frame, and wait while the pipe is full. Raises BrokenPipeError: it has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended is not None or len(self._frames) < self.room)
            if self._ended is not None:
                raise BrokenPipeError(self._ended or "the connection was closed")
            self._frames.append(frame)
            self._changed.notify_all()

    def poll(self, timeout: float, /) -> bool:
        """Return whether `recv_bytes` would return or raise at once, after at most `timeout`
        seconds.
        """
        with self._changed:
            return self._changed.wait_for(
                lambda: bool(self._frames) or self._ended is not None, timeout
            )

    def recv_bytes(self) -> bytes:
        """Return the next frame; wait for one. Raises EOFError: the pipe has ended and is empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._frames or self._ended is not None)
            if not self._frames:
                raise EOFError(self._ended or "the other end closed the connection")
            self._changed.notify_all()
            return self._frames.popleft()

    def end(self, reason: str = "") -> None:
        """Accept no more frames; those that wait may still be read."""
        with self._changed:
            if self._ended is None:
                self._ended = reason
            self._changed.notify_all()

"""Messages cut into parts, and put together again within bounds.

Run by: both ends of a `ResumableLink`. The first part says how long the message is, so that one
which is too long is refused before anything of it is kept; memory is taken as parts come, not as
they are announced.
"""

import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass

from apfed_protocols.errors import RemoteProtocolError

__all__ = ["MOST_MESSAGE", "MOST_PART", "Incoming", "Message", "cost_of", "parts_of"]

MOST_MESSAGE = 2**30
_PART = 2**20
_TOTAL = struct.Struct(">Q")
MOST_PART = _TOTAL.size + _PART
_COST = 256  # of a part that waits, beside its bytes


@dataclass(frozen=True)
class Message:
    """A message that nobody asked for yet: when it came (monotonic clock), and what it counts."""

    body: bytes
    came: float
    cost: int


class Incoming:
    """Messages out of one peer's parts.

    Args:
        peer: its name, for errors.
        most: what may be held of it at once.

    Attributes:
        held: what of the peer waits here, about, in bytes; who takes a message subtracts its cost.
    """

    def __init__(self, peer: str, *, most: int) -> None:
        self._peer, self._most = peer, most
        self._total, self._cost, self._open = 0, 0, False
        self._buffer = bytearray()
        self.held = 0

    def add(self, part: bytes, *, first: bool) -> Message | None:
        """Take one part; the message, where it is complete.

        Raises:
            RemoteProtocolError: out of order, longer than announced, or more than may wait here.
        """
        if first == self._open or (first and len(part) < _TOTAL.size):
            raise RemoteProtocolError(f"{self._peer} sent a part out of a message's order")
        if first:
            (self._total,) = _TOTAL.unpack_from(part)
            self._cost, self._open, part = 0, True, part[_TOTAL.size :]
            if self._total > MOST_MESSAGE:
                raise RemoteProtocolError(
                    f"{self._peer} announced a message of {self._total} bytes, above {MOST_MESSAGE}"
                )
        if len(self._buffer) + len(part) > self._total:
            raise RemoteProtocolError(
                f"{self._peer} sent more than the {self._total} bytes that it announced"
            )
        self._cost += cost_of(part)
        self.held += cost_of(part)
        if self.held > self._most:
            raise RemoteProtocolError(f"{self._peer} sent more than it may before it is confirmed")
        return self._completed(part)

    def _completed(self, part: bytes) -> Message | None:
        if self._buffer or len(part) < self._total:
            self._buffer += part
            if len(self._buffer) < self._total:
                return None
            part, self._buffer = bytes(self._buffer), bytearray()
        self._open = False
        return Message(part, time.monotonic(), self._cost)


def parts_of(body: bytes) -> Iterator[bytes | memoryview]:
    """A message's parts; all but the first are views of it."""
    yield _TOTAL.pack(len(body)) + body[:_PART]
    view = memoryview(body)
    for start in range(_PART, len(body), _PART):
        yield view[start : start + _PART]


def cost_of(part: bytes | memoryview) -> int:
    """What a part that waits takes in memory, about, in bytes."""
    return len(part) + _COST

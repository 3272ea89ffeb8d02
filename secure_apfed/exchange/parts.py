"""Large messages in parts, put together in order and within bounds.

Run by: both ends, twice. Inside the seals of links (see `secure_apfed.exchange.links`) messages of
set-up travel in parts of 16 MiB, since one of any length could not be sealed: AES-GCM ends at
2^31 - 1 bytes, which set intersection reaches at 67 million IDs. Beneath them
(`secure_apfed.exchange.resumable_link`) all frames travel in parts of 1 MiB, so that little is sent
again after a break. Every part says which message it is of, how long that is and where the part
begins, so a receiver refuses a message that is too long before it takes any memory for it, and
afterwards never holds more of it than came.
Protects from: peers that announce too much, stop midway, repeat, leave out or reorder parts, or
put one message into another.
"""

import struct
from collections.abc import Iterator

from apfed_protocols.errors import RemoteProtocolError

__all__ = ["MOST_BYTES", "PART_BYTES", "PART_HEADER_BYTES", "Gathering", "parts_of"]

PART_BYTES = 2**24
MOST_BYTES = 2**30
"""The longest message that is taken of a peer where the receiver says nothing else."""

_HEADER = struct.Struct(">IQQ")
PART_HEADER_BYTES = _HEADER.size


def parts_of(number: int, message: bytes, size: int | None = None) -> Iterator[bytes]:
    """Cut message `number` of a link into parts of `PART_BYTES`; an empty one has one, too."""
    size = size or PART_BYTES
    for offset in range(0, len(message) or 1, size):
        yield _HEADER.pack(number, len(message), offset) + message[offset : offset + size]


class Gathering:
    """What came of the message that one peer is sending, and how many were whole.

    Args:
        me: who receives; peer: who sends.
        size: bytes of a part, `PART_BYTES` unless given.

    Attributes:
        kind: what the message is of which some parts came; empty between messages.
    """

    def __init__(self, me: str, peer: str, size: int | None = None) -> None:
        self._me, self._peer, self._size = me, peer, size or PART_BYTES
        self._number, self._total, self.kind = 0, 0, ""
        self._came = bytearray()

    @property
    def midway(self) -> str:
        """How much came of a message that is not whole, in words; empty between messages."""
        if not self.kind:
            return ""
        return (
            f"{self._peer} stopped midway in a message: {len(self._came)} of {self._total} bytes "
            f"of {self.kind} came"
        )

    def add(self, part: bytes, kind: str, *, most: int = MOST_BYTES) -> bytes | None:
        """Take the next part; return the whole message, or None while some of it is missing.

        Args:
            part: as it came.
            kind: what the message is, for errors.
            most: the longest message that is taken now, in bytes.

        Raises:
            RemoteProtocolError: no part, one that does not follow, or too long a message.
        """
        if len(part) < PART_HEADER_BYTES:
            raise RemoteProtocolError(
                f"{self._peer} sent {len(part)} bytes of {kind} to {self._me}, too few for a part "
                "of a message"
            )
        number, total, offset = _HEADER.unpack_from(part)
        if not self.kind:
            self._begin(kind, number, total, most)
        if (number, total, offset) != (self._number, self._total, len(self._came)):
            raise RemoteProtocolError(
                f"{self._peer} sent {self._me} part {offset} of {total} bytes of message {number}, "
                f"expected part {len(self._came)} of {self._total} bytes of message "
                f"{self._number}: a part was repeated, left out, reordered or of another message"
            )
        length = len(part) - PART_HEADER_BYTES
        if length != min(self._size, total - offset):
            raise RemoteProtocolError(
                f"{self._peer} sent {self._me} a part of {length} bytes at {offset} of {total} of "
                f"message {number}; every part but the last has {self._size} bytes"
            )
        self._came += memoryview(part)[PART_HEADER_BYTES:]
        if len(self._came) < total:
            return None
        message = bytes(self._came)
        self._number, self.kind, self._came = number + 1, "", bytearray()
        return message

    def _begin(self, kind: str, number: int, total: int, most: int) -> None:
        if number != self._number:
            raise RemoteProtocolError(
                f"{self._peer} sent {self._me} message {number} in parts, expected message "
                f"{self._number}: one was repeated or left out"
            )
        if total > most:
            raise RemoteProtocolError(
                f"{self._peer} announces a message of {total} bytes of {kind} to {self._me}, which "
                f"takes at most {most} here; compare the settings of both, such as "
                "alignment.maximum_ids"
            )
        self.kind, self._total = kind, total

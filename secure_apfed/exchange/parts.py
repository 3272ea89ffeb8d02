"""Large messages of set-up conversations in parts of at most 16 MiB, put together in order.

Run by: both ends of a link, inside its seals (see `secure_apfed.exchange.links`); roles and
protocols see whole messages. Every part says which message it is of, how long that is and where
the part begins, so a receiver refuses a message that is too long before it takes any memory for it,
and afterwards never holds more of it than came. A whole message of any length could not be sealed:
AES-GCM ends at 2^31 - 1 bytes, which set intersection reaches at 67 million IDs.
Protects from: peers that announce too much, stop midway, repeat, leave out or reorder parts, or
put one message into another.
"""

import struct
from collections.abc import Iterator

from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.exchange.envelope import Envelope, Kind

__all__ = ["IN_PARTS", "MOST_BYTES", "PART_BYTES", "PART_HEADER_BYTES", "Gathering", "parts_of"]

IN_PARTS = frozenset({Kind.ALIGNMENT, Kind.SUM_SETUP, Kind.COIN})
"""Kinds of messages that travel in parts, also where one part is enough."""

PART_BYTES = 2**24
MOST_BYTES = 2**30
"""The longest message that is taken of a peer where the receiver says nothing else."""

_HEADER = struct.Struct(">IQQ")
PART_HEADER_BYTES = _HEADER.size


def parts_of(number: int, payload: bytes) -> Iterator[bytes]:
    """Cut message `number` of a link into parts; an empty one has one part, too."""
    for offset in range(0, len(payload) or 1, PART_BYTES):
        header = _HEADER.pack(number, len(payload), offset)
        yield header + payload[offset : offset + PART_BYTES]


class Gathering:
    """What came of the message that one peer is sending, and how many were whole.

    Args:
        me: who receives; peer: who sends.
    """

    def __init__(self, me: str, peer: str) -> None:
        self._me, self._peer = me, peer
        self._number, self._total = 0, 0
        self._kind: Kind | None = None
        self._came = bytearray()

    @property
    def midway(self) -> str:
        """How much came of a message that is not whole, in words; empty between messages."""
        if self._kind is None:
            return ""
        return (
            f"{self._peer} stopped midway in a message: {len(self._came)} of {self._total} bytes "
            f"of {self._kind} came"
        )

    def require_between(self, envelope: Envelope) -> None:
        """Refuse what comes in the middle of a message and is no part of it.

        Raises:
            RemoteProtocolError: names the peer and both kinds.
        """
        if self._kind is not None and envelope.kind is not self._kind:
            raise RemoteProtocolError(
                f"{self._peer} sent {envelope.kind} to {self._me} in the middle of a message of "
                f"{self._kind}; parts of a message follow one another"
            )

    def add(self, envelope: Envelope, *, most: int) -> bytes | None:
        """Take the next part; return the whole message, or None while some of it is missing.

        Args:
            envelope: with a part as its payload.
            most: the longest message that is taken now, in bytes.

        Raises:
            RemoteProtocolError: no part, one that does not follow, or too long a message.
        """
        payload = envelope.payload
        if len(payload) < PART_HEADER_BYTES:
            raise RemoteProtocolError(
                f"{self._peer} sent {len(payload)} bytes of {envelope.kind} to {self._me}, too "
                "few for a part of a message"
            )
        number, total, offset = _HEADER.unpack_from(payload)
        if self._kind is None:
            self._begin(envelope.kind, number, total, most)
        if (number, total, offset) != (self._number, self._total, len(self._came)):
            raise RemoteProtocolError(
                f"{self._peer} sent {self._me} part {offset} of {total} bytes of message {number}, "
                f"expected part {len(self._came)} of {self._total} bytes of message "
                f"{self._number}: a part was repeated, left out, reordered or of another message"
            )
        length = len(payload) - PART_HEADER_BYTES
        if length != min(PART_BYTES, total - offset):
            raise RemoteProtocolError(
                f"{self._peer} sent {self._me} a part of {length} bytes at {offset} of {total} of "
                f"message {number}; every part but the last has {PART_BYTES} bytes"
            )
        self._came += memoryview(payload)[PART_HEADER_BYTES:]
        return self._whole() if len(self._came) == total else None

    def _begin(self, kind: Kind, number: int, total: int, most: int) -> None:
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
        self._kind, self._total = kind, total

    def _whole(self) -> bytes:
        message = bytes(self._came)
        self._kind, self._came = None, bytearray()
        self._number += 1
        return message

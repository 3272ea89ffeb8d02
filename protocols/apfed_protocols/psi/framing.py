"""The frame around every message of an intersection: version, kind, agreement, count, items.

Run by: both ends of every backend. Any bytes either parse to a kind and as many items of
that kind's size as announced, or raise RemoteProtocolError.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.psi.interface import IntersectionAgreement

__all__ = ["Framing"]

_HEADER = struct.Struct(">BB16sI")
_DIGEST_BYTES = 16


@dataclass(frozen=True)
class Framing:
    """The messages of one backend under one agreement.

    Attributes:
        agreement: must equal the peer's; its digest is in each frame.
        version: names the backend and its version, 0 to 255.
        item_bytes: the kinds of messages (0 to 255) and the size of one item of each.
        maximum_items: the most items of one message.
    """

    agreement: IntersectionAgreement
    version: int
    item_bytes: Mapping[int, int]
    maximum_items: int

    @staticmethod
    def size(item_bytes: int, count: int) -> int:
        """Bytes of a message of so many items."""
        return _HEADER.size + item_bytes * count

    def pack(self, kind: int, items: bytes = b"") -> bytes:
        """Frame the items, which lie one after the other in `items`.

        Raises:
            LocalProtocolError: more than a message holds.
        """
        count = len(items) // self.item_bytes[kind] if items else 0
        if count > self.maximum_items:
            raise LocalProtocolError(
                f"a message of kind {kind} would have {count} items, a message holds at most "
                f"{self.maximum_items}; such large sets are intersected in parts"
            )
        digest = self.agreement.digest[:_DIGEST_BYTES]
        return _HEADER.pack(self.version, kind, digest, count) + items

    def unpack(self, sender: str, message: bytes) -> tuple[int, bytes]:
        """Return the kind and the items.

        Raises:
            RemoteProtocolError: malformed, of another agreement, or too large a set.
        """
        if len(message) < _HEADER.size:
            raise RemoteProtocolError(f"{sender} sent {len(message)} bytes, too few for a header")
        version, kind, digest, count = _HEADER.unpack_from(message)
        if version != self.version or kind not in self.item_bytes:
            raise RemoteProtocolError(
                f"{sender} sent version {version}, kind {kind} of a set intersection; "
                f"this party speaks version {self.version}; use the same protocol and release "
                "at all parties"
            )
        if digest != self.agreement.digest[:_DIGEST_BYTES]:
            raise RemoteProtocolError(
                f"{sender} holds another agreement; compare session, minimum_rows, maximum_ids "
                "and the normalisation of IDs"
            )
        if count > self.maximum_items:
            raise RemoteProtocolError(
                f"{sender} announces {count} items, this party accepts at most {self.maximum_items}"
            )
        items = message[_HEADER.size :]
        if len(items) != count * self.item_bytes[kind]:
            raise RemoteProtocolError(
                f"{sender} announces {count} items of {self.item_bytes[kind]} bytes and sent "
                f"{len(items)} bytes"
            )
        return kind, items

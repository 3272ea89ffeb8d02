"""Walls around the loaders of SEAL and TenSEAL: only raw SEAL objects of one known size pass.

Run by: every role of a homomorphic sum, on every blob that a peer sent. Protects from:
TenSEAL's own framing, whose length fields it trusts (reads beyond the heap follow from
wrong ones), so that framing is never taken from a peer: it is cut off before sending
and made anew from local numbers after receiving; and from compressed blobs that unpack
to gigabytes.

Formats: SEAL 4.1 serialisation header (16 bytes: magic, header size, version, compression,
reserved, total size), Zstandard frames (RFC 8878, section 3.1.1), and the wire types of
Protocol Buffers that TenSEAL's messages use.
"""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from protocols.errors import LocalProtocolError, RemoteProtocolError

__all__ = ["BlobShape", "proto_bytes", "proto_double", "proto_fields", "proto_numbers"]

_SEAL_HEADER = 16
_SEAL_FIXED = 8
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_SINGLE_SEGMENT = 0x20
_ZSTD_OTHER_FLAGS = 0x0F
_ZSTD_SIZE_BYTES = (1, 2, 4, 8)
_ZSTD_BLOCK = 2**17
_RLE = 1


@dataclass(frozen=True)
class BlobShape:
    """What every serialised SEAL object of one kind has in common.

    Attributes:
        seal: the header's first bytes: magic, header size, version, compression.
        zstd: the Zstandard frame's header, which holds the size of the content.
        content: that size in bytes.
    """

    seal: bytes
    zstd: bytes
    content: int

    @classmethod
    def of(cls, own: bytes) -> "BlobShape":
        """Read the shape off an object that this party's own library serialised.

        Raises:
            LocalProtocolError: the installed SEAL writes another format than 4.1 does.
        """
        descriptor = own[_SEAL_HEADER + 4] if len(own) > _SEAL_HEADER + 12 else 0
        plain_frame = descriptor & _ZSTD_SINGLE_SEGMENT and not descriptor & _ZSTD_OTHER_FLAGS
        if own[_SEAL_HEADER : _SEAL_HEADER + 4] != _ZSTD_MAGIC or not plain_frame:
            raise LocalProtocolError(
                "the installed TenSEAL does not serialise as SEAL 4.1 with Zstandard does; "
                "install a release of tenseal 0.3"
            )
        width = _ZSTD_SIZE_BYTES[descriptor >> 6]
        start = _SEAL_HEADER + 5
        content = int.from_bytes(own[start : start + width], "little") + (256 if width == 2 else 0)
        return cls(own[:_SEAL_FIXED], own[_SEAL_HEADER : start + width], content)

    @property
    def most_bytes(self) -> int:
        """The length of a blob whose content does not compress."""
        return _SEAL_HEADER + len(self.zstd) + self.content + 3 * self._most_blocks

    @property
    def _most_blocks(self) -> int:
        return self.content // _ZSTD_BLOCK + 1

    def check(self, blob: bytes, *, sender: str) -> None:
        """Pass a blob that is of this shape and unpacks to no more than this content.

        Raises:
            RemoteProtocolError: it is not.
        """
        start = _SEAL_HEADER + len(self.zstd)
        if not start < len(blob) <= self.most_bytes + _SEAL_HEADER:
            raise _refused(sender, f"has {len(blob)} bytes, at most {self.most_bytes} are possible")
        if blob[:_SEAL_FIXED] != self.seal or blob[_SEAL_HEADER:start] != self.zstd:
            raise _refused(sender, "is of another kind, size or version of SEAL")
        if struct.unpack_from("<Q", blob, _SEAL_FIXED)[0] != len(blob):
            raise _refused(sender, "states a wrong length")
        last = False
        for _ in range(self._most_blocks):
            if last or start + 3 > len(blob):
                break
            block = int.from_bytes(blob[start : start + 3], "little")
            last = bool(block & 1)
            start += 3 + (1 if (block >> 1) & 3 == _RLE else block >> 3)
        if not last or start != len(blob):
            raise _refused(sender, "holds a damaged or oversized Zstandard frame")


def _refused(sender: str, why: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"an encrypted blob from {sender} {why}; it is refused unread")


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def proto_bytes(number: int, content: bytes) -> bytes:
    """A length-delimited field."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def proto_numbers(number: int, values: Iterable[int]) -> bytes:
    """A packed field of unsigned integers."""
    return proto_bytes(number, b"".join(map(_varint, values)))


def proto_double(number: int, value: float) -> bytes:
    """A field of one double."""
    return _varint(number << 3 | 1) + struct.pack("<d", value)


def proto_fields(own: bytes, wanted: int) -> Iterator[bytes]:
    """Yield the contents of all length-delimited fields `wanted` of a message made HERE.

    For messages of this party's own TenSEAL only; nothing from a peer comes to this reader.
    """
    at = 0

    def varint() -> int:
        nonlocal at
        number = shift = 0
        while True:
            byte = own[at]
            at += 1
            number |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return number

    while at < len(own):
        key = varint()
        if key & 7 == 2:
            length = varint()
            if key >> 3 == wanted:
                yield own[at : at + length]
            at += length
        elif key & 7 == 1:
            at += 8
        elif key & 7 == 0:
            varint()
        else:
            raise LocalProtocolError("the installed TenSEAL writes an unknown message format")

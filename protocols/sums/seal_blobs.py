"""A wall around SEAL's loaders: only objects of one known kind and size pass.

Run by: every role of a homomorphic sum, on every blob that a peer sent. Protects from:
compressed blobs that unpack to gigabytes, and objects of other kinds, versions or sizes.

Formats: SEAL 4.1 serialisation header (16 bytes: magic, header size, version, compression,
reserved, total size) and Zstandard frames (RFC 8878, section 3.1.1).
"""

import struct
from dataclasses import dataclass

import zstandard

from protocols.errors import LocalProtocolError, RemoteProtocolError

__all__ = ["SEAL_HEADER", "BlobShape", "unpacked"]

SEAL_HEADER = 16
"""Bytes of the header of everything that SEAL serialises."""

_SEAL_COMPRESSION = 5
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
        descriptor = own[SEAL_HEADER + 4] if len(own) > SEAL_HEADER + 12 else 0
        plain_frame = descriptor & _ZSTD_SINGLE_SEGMENT and not descriptor & _ZSTD_OTHER_FLAGS
        if own[SEAL_HEADER : SEAL_HEADER + 4] != _ZSTD_MAGIC or not plain_frame:
            raise LocalProtocolError(
                "the installed TenSEAL does not serialise as SEAL 4.1 with Zstandard does; "
                "install a release of tenseal 0.3"
            )
        width = _ZSTD_SIZE_BYTES[descriptor >> 6]
        start = SEAL_HEADER + 5
        content = int.from_bytes(own[start : start + width], "little") + (256 if width == 2 else 0)
        return cls(own[:_SEAL_FIXED], own[SEAL_HEADER : start + width], content)

    @property
    def uncompressed(self) -> bytes:
        """`seal` of the same object without compression."""
        start, end = self.seal[:_SEAL_COMPRESSION], self.seal[_SEAL_COMPRESSION + 1 :]
        return start + b"\0" + end

    @property
    def most_bytes(self) -> int:
        """The length of a blob whose content does not compress."""
        return SEAL_HEADER + len(self.zstd) + self.content + 3 * self._most_blocks

    @property
    def _most_blocks(self) -> int:
        return self.content // _ZSTD_BLOCK + 1

    def check(self, blob: bytes, *, sender: str) -> None:
        """Pass a blob that is of this shape and unpacks to no more than this content.

        Raises:
            RemoteProtocolError: it is not.
        """
        start = SEAL_HEADER + len(self.zstd)
        if not start < len(blob) <= self.most_bytes + SEAL_HEADER:
            raise _refused(sender, f"has {len(blob)} bytes, at most {self.most_bytes} are possible")
        if blob[:_SEAL_FIXED] != self.seal or blob[SEAL_HEADER:start] != self.zstd:
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


def unpacked(blob: bytes) -> bytes:
    """The content of a compressed SEAL object that `BlobShape.check` passed, or an own one."""
    return zstandard.ZstdDecompressor().decompress(memoryview(blob)[SEAL_HEADER:])


def _refused(sender: str, why: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"an encrypted blob from {sender} {why}; it is refused unread")

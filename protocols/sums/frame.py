"""The one framing of all messages of a secure sum: a fixed header, then blobs.

Run by: every role. Protects from: malformed bytes; whatever arrives either parses to a
`Frame` or raises `RemoteProtocolError`, and every size is checked before anything is
copied. Authentication is the link's (`protocols.seal`): a frame travels inside it.

Layout, big endian: magic, version, kind, party, backend, step, rows, columns, binding,
fingerprint, number of blobs, their sizes, the blobs; nothing after.
"""

import struct
from dataclasses import dataclass, field
from enum import IntEnum

from protocols.errors import LocalProtocolError, RemoteProtocolError

__all__ = ["Frame", "FrameKind", "frame_bytes"]

_MAGIC = b"SUMF"
_VERSION = 1
_HEADER = struct.Struct(">4sBBH16sQII32s32sI")
_SIZE = struct.Struct(">I")
_NAME_BYTES = 16
_MAX_BLOBS = 2**20
_MAX_VALUES = 2**31


class FrameKind(IntEnum):
    """What a frame carries."""

    SETUP = 1
    CONTRIBUTION = 2
    SUM = 3
    REQUEST = 4
    ANSWER = 5

    @property
    def told(self) -> str:
        """The kind with its article."""
        return ("an " if self is FrameKind.ANSWER else "a ") + self.name.lower()


_KINDS = frozenset(FrameKind)


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One message of a secure sum.

    Attributes:
        kind: what it carries.
        backend: name of the sum's backend, 1 to 16 ASCII letters, digits and underscores.
        party: the contributor's position in the agreement, for what it sends or is asked;
            else the number of contributors.
        step: that it belongs to; 0 for setup.
        rows, columns: shape of the values; 0, 0 for setup.
        binding: 32 bytes; the step binding's digest, or the agreement's for setup.
        fingerprint: 32 bytes; of the agreement, the parameters and the public key.
        blobs: protected values, opaque here.
    """

    kind: FrameKind
    backend: str
    party: int
    step: int
    rows: int
    columns: int
    binding: bytes
    fingerprint: bytes
    blobs: tuple[bytes, ...] = field(repr=False)

    def pack(self) -> bytes:
        """Return the canonical bytes of this frame.

        Raises:
            LocalProtocolError: a field does not fit its place.
        """
        name = self.backend.encode("ascii")
        if not 0 < len(name) <= _NAME_BYTES or len(self.blobs) > _MAX_BLOBS:
            raise LocalProtocolError(
                f"a frame has a backend name of 1 to {_NAME_BYTES} characters and at most "
                f"{_MAX_BLOBS} blobs, got {self.backend!r} and {len(self.blobs)}"
            )
        try:
            header = _HEADER.pack(
                _MAGIC, _VERSION, self.kind, self.party, name, self.step, self.rows, self.columns,
                self.binding, self.fingerprint, len(self.blobs),
            )  # fmt: skip
            sizes = b"".join(_SIZE.pack(len(blob)) for blob in self.blobs)
        except struct.error as error:
            raise LocalProtocolError(f"a field of a frame is out of range: {error}") from error
        return b"".join((header, sizes, *self.blobs))

    @classmethod
    def parse(cls, data: bytes, *, sender: str) -> "Frame":
        """Read a frame that `sender` sent.

        Raises:
            LocalProtocolError: no bytes; a buffer that its owner may change is none either.
            RemoteProtocolError: anything but the canonical bytes of a frame of this version.
        """
        if type(data) is not bytes:
            raise LocalProtocolError(
                f"a frame of a secure sum is bytes, got {type(data).__name__} from {sender}"
            )
        if len(data) < _HEADER.size:
            raise _malformed(sender, f"has {len(data)} bytes, its header alone {_HEADER.size}")
        (magic, version, kind, party, name, step, rows, columns, binding, fingerprint, count) = (
            _HEADER.unpack_from(data)
        )
        if magic != _MAGIC or version != _VERSION:
            raise _malformed(sender, f"is no frame of version {_VERSION}; run the same release")
        if kind not in _KINDS or rows * columns > _MAX_VALUES:
            raise _malformed(sender, "has an unknown kind or an impossible shape")
        return cls(
            kind=FrameKind(kind),
            backend=_backend_name(name, sender),
            party=party,
            step=step,
            rows=rows,
            columns=columns,
            binding=binding,
            fingerprint=fingerprint,
            blobs=_read_blobs(data, count, sender),
        )


def frame_bytes(blob_sizes: tuple[int, ...]) -> int:
    """The length of a frame whose blobs have these sizes."""
    return _HEADER.size + _SIZE.size * len(blob_sizes) + sum(blob_sizes)


def _malformed(sender: str, what: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"a frame of a secure sum from {sender} {what}")


def _backend_name(field: bytes, sender: str) -> str:
    name = field.rstrip(b"\0")
    if not name.replace(b"_", b"").isalnum() or not name.isascii():
        raise _malformed(sender, "names no backend")
    return name.decode("ascii")


def _read_blobs(data: bytes, count: int, sender: str) -> tuple[bytes, ...]:
    start = _HEADER.size + _SIZE.size * count
    if count > _MAX_BLOBS or start > len(data):
        raise _malformed(sender, f"announces {count} blobs in {len(data)} bytes")
    sizes = struct.unpack_from(f">{count}I", data, _HEADER.size)
    if start + sum(sizes) != len(data):
        raise _malformed(
            sender,
            f"announces {start + sum(sizes)} bytes and has {len(data)}; it was cut or padded",
        )
    blobs = []
    for size in sizes:
        blobs.append(data[start : start + size])
        start += size
    return tuple(blobs)

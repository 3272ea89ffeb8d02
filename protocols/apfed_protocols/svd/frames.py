"""The messages of a decomposition: one framing, matrices of float64, all finite and none huge.

Run by: every role. Protects from: malformed bytes (whatever arrives opens or raises
`RemoteProtocolError`, before anything of it is used), messages of another kind, agreement, owner or
list of people. Who sent a frame is the link's to say (`apfed_protocols.seal`).

Layout, big endian: magic, version, kind, place, digest of the agreement, people; then the body,
little endian, and nothing after. `place` is that of the owner who sends or gets it. `people` is the
digest of whose rows these are, and zeros in what is dealt. How many rows follows from the length.
"""

import struct
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.randomness import KEY_BYTES
from apfed_protocols.svd.agreement import SvdAgreement
from apfed_protocols.svd.masks import Floats

__all__ = ["MessageKind", "Opened", "SvdFrames", "is_bounded", "require_people"]

_MAGIC, _VERSION = b"SVDF", 1
_HEADER = struct.Struct(">4sBBH32s32s")
_FIELDS = ("format", "version", "kind", "owner", "agreement", "list of people")
_NOBODY = bytes(32)
_NUMBER = 8
_LARGEST = 1e100  # sums and squares of such numbers are finite still


class MessageKind(IntEnum):
    """What a frame carries, and on which way."""

    MASKS = 1  # dealer to an owner: a seed of P, and Q_i
    TABLE = 2  # an owner to the server: P X_i Q_i
    VECTORS = 3  # server to receiver: P U


def require_people(people: bytes) -> bytes:
    """Return `people` if it is a digest; else raise LocalProtocolError."""
    if type(people) is not bytes or len(people) != len(_NOBODY) or people == _NOBODY:
        raise LocalProtocolError(
            f"people is a digest of {len(_NOBODY)} bytes of the ordered rows to decompose"
        )
    return people


def is_bounded(matrix: Floats) -> bool:
    """Whether every number is one, and at most 1e100 large."""
    return bool((np.abs(matrix) <= _LARGEST).all())


@dataclass(frozen=True, eq=False)
class Opened:
    """The body of a frame.

    Attributes:
        people: the digest of whose rows these are.
        seed: of the mask of rows; empty but in MASKS.
        matrix: of bounded numbers, in memory of its own.
    """

    people: bytes
    seed: bytes = field(repr=False)
    matrix: Floats = field(repr=False)


class SvdFrames:
    """Writes and opens the frames of one agreement."""

    def __init__(self, agreement: SvdAgreement) -> None:
        self._agreement = agreement

    def lengths(self, rows: int) -> dict[str, int]:
        """Bytes of all frames of a decomposition of so many rows, by kind, over all owners."""
        agreed = self._agreement
        owners, columns = len(agreed.owners), agreed.columns
        numbers = {
            "MASKS": columns * columns, "TABLE": owners * rows * columns,
            "VECTORS": rows * agreed.vectors,
        }  # fmt: skip
        others = {"MASKS": owners * (_HEADER.size + KEY_BYTES), "TABLE": owners * _HEADER.size}
        return {
            kind: _NUMBER * count + others.get(kind, _HEADER.size)
            for kind, count in numbers.items()
        }

    def pack(
        self, kind: MessageKind, matrix: Floats, *, owner: str, people: bytes = _NOBODY,
        seed: bytes = b"",
    ) -> bytes:  # fmt: skip
        """Frame a matrix."""
        return self._header(kind, owner, people) + seed + matrix.astype("<f8").tobytes()

    def open(self, frame: bytes, kind: MessageKind, sender: str, *, owner: str) -> Opened:
        """Return what `sender` sent, of `owner` or for it.

        Raises:
            LocalProtocolError: no bytes.
            RemoteProtocolError: anything but a frame of this kind, agreement and owner with so many
                columns as agreed, of no more rows than agreed, and of bounded numbers.
        """
        if type(frame) is not bytes:
            raise LocalProtocolError(
                f"a frame of a decomposition is bytes, got {type(frame).__name__} from {sender}"
            )
        self._check_header(frame, kind, sender, owner)
        people = frame[_HEADER.size - len(_NOBODY) : _HEADER.size]
        start = _HEADER.size + (KEY_BYTES if kind is MessageKind.MASKS else 0)
        matrix = self._matrix(frame[start:], kind, sender, owner)
        return Opened(people, frame[_HEADER.size : start], matrix)

    def _check_header(self, frame: bytes, kind: MessageKind, sender: str, owner: str) -> None:
        if len(frame) < _HEADER.size:
            raise RemoteProtocolError(
                f"{sender} sent {len(frame)} bytes, too few for {kind.name}; it was cut"
            )
        came = _HEADER.unpack_from(frame)
        people = _NOBODY if kind is MessageKind.MASKS else came[-1]
        due = _HEADER.unpack(self._header(kind, owner, people))
        for name, *pair in zip(_FIELDS, came, due, strict=True):
            if len({*pair}) > 1:
                raise RemoteProtocolError(
                    f"{sender} sent no {kind.name} of this decomposition: its {name} differs; it "
                    "is another message, or made under another agreement"
                )

    def _matrix(self, body: bytes, kind: MessageKind, sender: str, owner: str) -> Floats:
        agreed = self._agreement
        columns = agreed.vectors if kind is MessageKind.VECTORS else agreed.columns
        rows, beyond = divmod(len(body), _NUMBER * columns)
        least, most = agreed.vectors, agreed.most_rows
        if kind is MessageKind.MASKS:
            least = most = agreed.features[agreed.position(owner)]
        if beyond or not least <= rows <= most:
            raise RemoteProtocolError(
                f"{sender} sent a body of {len(body)} bytes, expected {kind.name} of {least} to "
                f"{most} rows of {columns} numbers; it was cut or padded"
            )
        matrix = np.frombuffer(body, dtype="<f8").reshape(rows, columns).astype(np.float64)
        if not is_bounded(matrix):
            raise RemoteProtocolError(
                f"{sender} sent {kind.name} with numbers that are none, or beyond {_LARGEST:g}"
            )
        return matrix

    def _header(self, kind: MessageKind, owner: str, people: bytes) -> bytes:
        agreed = self._agreement
        place = agreed.position(owner)
        return _HEADER.pack(_MAGIC, _VERSION, kind, place, agreed.digest, people)

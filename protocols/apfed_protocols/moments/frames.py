"""The messages of a noisy moment: one framing, in which every length follows from the agreement.

Run by: every role. Protects from: malformed bytes (whatever arrives opens or raises
`RemoteProtocolError`, before anything of it is used), messages of another kind, agreement,
contributor, block or list of people. Who sent a frame is the link's to say
(`apfed_protocols.seal`).

Layout, big endian: magic, version, kind, party, block, digest of the agreement, people; then the
body and nothing after. `party` is a contributor's position, or the number of contributors.
`people` is the digest of who is voted on, and zeros in what is dealt, which depends on nobody.
"""

import struct
from collections.abc import Mapping
from enum import IntEnum

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.moments.agreement import MomentAgreement
from apfed_protocols.randomness import KEY_BYTES

__all__ = ["DIGEST_BYTES", "MessageKind", "MomentFrames", "require_people"]

DIGEST_BYTES = 32
_MAGIC = b"MOMF"
_VERSION = 1
_HEADER = struct.Struct(">4sBBHI32s32s")
_NOBODY = bytes(DIGEST_BYTES)


class MessageKind(IntEnum):
    """What a frame carries, and on which way."""

    SIGN_SEED = 1  # dealer to receiver
    SHARE_SEEDS = 2  # dealer to combiner
    SHARES = 3  # dealer to receiver, one block
    VOTES = 4  # contributor to combiner
    SIGNS = 5  # receiver to combiner
    ANSWER = 6  # combiner to receiver


def require_people(people: bytes) -> bytes:
    """Return `people` if it is a digest; else raise LocalProtocolError."""
    if type(people) is not bytes or len(people) != DIGEST_BYTES or people == _NOBODY:
        raise LocalProtocolError(
            f"people is a digest of {DIGEST_BYTES} bytes of the ordered positions voted on"
        )
    return people


class MomentFrames:
    """Writes and opens the frames of one agreement."""

    def __init__(self, agreement: MomentAgreement) -> None:
        self._agreement = agreement

    def length(self, kind: MessageKind, block: int = 0) -> int:
        """Bytes of a frame of this kind."""
        return _HEADER.size + self._body_bytes(kind, block)

    def lengths(self) -> Mapping[str, int]:
        """Bytes of all frames of one moment, by kind and added up over contributors and blocks."""
        times = {MessageKind.VOTES: len(self._agreement.contributors)}
        lengths = {kind.name: times.get(kind, 1) * self.length(kind) for kind in MessageKind}
        blocks = range(self._agreement.blocks)
        lengths["SHARES"] = sum(self.length(MessageKind.SHARES, block) for block in blocks)
        return lengths

    def pack(
        self,
        kind: MessageKind,
        body: bytes,
        *,
        people: bytes = _NOBODY,
        party: int | None = None,
        block: int = 0,
    ) -> bytes:
        """Frame a body."""
        return self._header(kind, people, party, block) + body

    def open(
        self,
        frame: bytes,
        kind: MessageKind,
        sender: str,
        *,
        people: bytes = _NOBODY,
        party: int | None = None,
        block: int = 0,
    ) -> memoryview:
        """Return the body of what `sender` sent.

        Raises:
            LocalProtocolError: no bytes; a buffer that its owner may change is none either.
            RemoteProtocolError: anything but a frame of exactly this kind, agreement, list of
                people, contributor and block.
        """
        expected = self._header(kind, people, party, block)
        length = len(expected) + self._body_bytes(kind, block)
        if type(frame) is not bytes:
            raise LocalProtocolError(
                f"a frame of a moment is bytes, got {type(frame).__name__} from {sender}"
            )
        if len(frame) != length:
            raise RemoteProtocolError(
                f"{sender} sent {len(frame)} bytes, expected {length} of {kind.name}; it was cut "
                "or padded, or is another message"
            )
        if frame[: len(expected)] != expected:
            raise RemoteProtocolError(
                f"{sender} sent no {kind.name} {self._difference(frame, expected)}; "
                "it is another message, replayed, or made under another agreement"
            )
        return memoryview(frame)[len(expected) :]

    @staticmethod
    def _difference(frame: bytes, expected: bytes) -> str:
        fields = (
            "format",
            "version",
            "kind",
            "contributor",
            "block",
            "agreement",
            "list of people",
        )
        came, due = _HEADER.unpack_from(frame), _HEADER.unpack(expected)
        wrong = next(
            name for name, *pair in zip(fields, came, due, strict=True) if len({*pair}) > 1
        )
        return f"of this moment: its {wrong} differs"

    def _header(self, kind: MessageKind, people: bytes, party: int | None, block: int) -> bytes:
        place = len(self._agreement.contributors) if party is None else party
        digest = self._agreement.digest
        return _HEADER.pack(_MAGIC, _VERSION, kind, place, block, digest, people)

    def _body_bytes(self, kind: MessageKind, block: int) -> int:
        agreed = self._agreement
        word, moment = agreed.word.itemsize, agreed.features * agreed.columns
        votes = agreed.people * agreed.columns
        people = agreed.block(block)
        sizes: Mapping[MessageKind, int] = {
            MessageKind.SIGN_SEED: KEY_BYTES,
            MessageKind.SHARE_SEEDS: 2 * KEY_BYTES,
            MessageKind.SHARES: (people.stop - people.start) * moment * word,
            MessageKind.VOTES: (votes + (moment if agreed.noise else 0)) * word,
            MessageKind.SIGNS: agreed.sign_bytes,
            MessageKind.ANSWER: (votes + moment) * word,
        }
        return sizes[kind]

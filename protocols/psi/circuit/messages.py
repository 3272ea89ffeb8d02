"""The messages of the circuit intersection and the cutting of bins into chunks.

Run by: all parties of `protocols.psi.circuit.backend`. Every message has a kind and, but for sizes
that its receiver reads from an earlier one, a fixed length; anything else is refused.
"""

import math
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import IntEnum

import numpy as np

from protocols.conversation import Outgoing
from protocols.errors import RemoteProtocolError
from protocols.psi.circuit.bits import WORD, Words
from protocols.psi.circuit.hashing import BITS
from protocols.psi.framing import Framing
from protocols.psi.interface import IntersectionAgreement, Progress
from protocols.psi.script import Turn

__all__ = [
    "CHUNK_SLOTS",
    "ENOUGH",
    "TOO_FEW",
    "VERDICT",
    "Desk",
    "Inbox",
    "Kind",
    "chunks",
    "triple_words",
]

# Arrays of 16 MB: larger ones are given back to the system and cleared anew at each use.
CHUNK_SLOTS = 2**21
VERDICT = struct.Struct(">q")
ENOUGH, TOO_FEW = -1, -2
_VERSION = 130

Inbox = Mapping[str, bytes]


class Kind(IntEnum):
    """What a message is."""

    COMMIT = 1
    JOIN = 2
    REVEAL = 3
    PLACE = 4
    PLACED = 5
    AGREED = 6
    DEAL = 7
    TRIPLES = 8
    MASKED = 9
    OPENED = 10
    COUNT = 11
    VERDICT = 12
    SHARE = 13
    TOKENS = 14


class Desk:
    """Frames one party's messages, and reads those of its peers."""

    def __init__(
        self,
        me: str,
        agreement: IntersectionAgreement,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self.me, self.agreement, self._progress = me, agreement, progress
        self._framing = Framing(agreement, _VERSION, dict.fromkeys(map(int, Kind), 1), 2**32 - 1)

    def report(self, done: int, total: int) -> None:
        """Tell whoever watches how many bins are compared."""
        if self._progress is not None:
            self._progress(Progress(self.me, "comparing bins", done, total))

    def turn(self, kind: Kind, bodies: Mapping[str, bytes], awaited: Collection[str]) -> Turn:
        """Send each party its body, then wait for one message of each awaited party."""
        packed = {party: self._framing.pack(kind, body) for party, body in bodies.items()}
        return Turn([Outgoing(party, body) for party, body in packed.items()], awaited)

    def kind_of(self, inbox: Inbox, sender: str) -> Kind:
        """Return the kind of the message of `sender`, where the protocol allows several."""
        return Kind(self._framing.unpack(sender, inbox[sender])[0])

    def read(self, inbox: Inbox, sender: str, kind: Kind, length: int | None = None) -> bytes:
        """Return the body of the message of `sender`, of this kind and length.

        Raises:
            RemoteProtocolError: it is another one.
        """
        found, body = self._framing.unpack(sender, inbox[sender])
        if found != kind:
            raise RemoteProtocolError(
                f"{sender} sent {Kind(found).name.lower()} when the protocol expects "
                f"{kind.name.lower()}; a message was repeated or reordered"
            )
        if length is not None and len(body) != length:
            raise RemoteProtocolError(
                f"{sender} sent {kind.name.lower()} of {len(body)} bytes, expected {length}"
            )
        return body

    def read_words(self, inbox: Inbox, sender: str, kind: Kind, shape: tuple[int, ...]) -> Words:
        """Return the body as 64-bit words of this shape."""
        body = self.read(inbox, sender, kind, WORD.itemsize * int(np.prod(shape)))
        return np.frombuffer(body, WORD).reshape(shape)


def chunks(bins: int, slots: Sequence[int]) -> Sequence[slice]:
    """Cut the bins so that no pair compares many more than CHUNK_SLOTS slots at once.

    Nor do all members together combine more words than that many slots have: their number is
    only what the hub says.
    """
    widest = max(*slots, math.ceil(len(slots) / BITS))
    step = max(BITS, CHUNK_SLOTS // widest // BITS * BITS)
    return [slice(start, min(start + step, bins)) for start in range(0, bins, step)]


def triple_words(words: int, slots: Sequence[int]) -> tuple[Sequence[int], int]:
    """Return the words of triples for each pair, and for all, in a chunk of 64 `words` bins.

    To compare 64 bits takes 63 ANDs, to combine M members M - 1.
    """
    return [(BITS - 1) * words * count for count in slots], words * (len(slots) - 1)

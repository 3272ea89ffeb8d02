"""The messages of the circuit intersection and the cutting of bins into chunks.

Run by: all parties of `apfed_protocols.psi.circuit.backend`. Every message has a kind and, but for
sizes that its receiver reads from an earlier one, a fixed length; anything else is refused.
"""

import math
import struct
from collections.abc import Callable, Sequence
from enum import IntEnum

import numpy as np

from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.psi.circuit import hashing
from apfed_protocols.psi.circuit.bits import WORD, Words
from apfed_protocols.psi.circuit.hashing import BITS
from apfed_protocols.psi.desk import Desk as AnyDesk
from apfed_protocols.psi.desk import Inbox
from apfed_protocols.psi.framing import Framing
from apfed_protocols.psi.interface import IntersectionAgreement, Progress
from apfed_protocols.psi.sizes import agreed_size, largest_size

__all__ = [
    "CHUNK_SLOTS",
    "ENOUGH",
    "TOO_FEW",
    "VERDICT",
    "VERSION",
    "Desk",
    "Inbox",
    "Kind",
    "chunks",
    "longest_message",
    "planned_bins_and_slots",
    "triple_words",
]

# Arrays of 16 MB: larger ones are given back to the system and cleared anew at each use.
CHUNK_SLOTS = 2**21
VERDICT = struct.Struct(">q")
ENOUGH, TOO_FEW = -1, -2
VERSION = 131
_ROSTER_BYTES = 2**22


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
    CORRELATE = 15
    CORRELATED = 16
    VECTOR = 17
    HINT = 18


class Desk(AnyDesk[Kind]):
    """Frames one party's messages, and reads those of its peers."""

    def __init__(
        self,
        me: str,
        agreement: IntersectionAgreement,
        progress: Callable[[Progress], None] | None = None,
        *,
        version: int = VERSION,
    ) -> None:
        super().__init__(
            me, agreement, kinds=Kind, version=version, work="comparing bins", progress=progress
        )

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


def planned_bins_and_slots(
    agreement: IntersectionAgreement,
    hub: str,
    members: Sequence[str],
    slots_for: Callable[[int, int], int] = hashing.slots_for,
) -> tuple[int, Sequence[int]]:
    """Return B and each member's K for the agreed sizes.

    Raises:
        LocalProtocolError: they are agreed for other parties.
    """
    if len(members) != len(agreement.sizes) - 1:
        raise LocalProtocolError(
            f"sizes are agreed for {', '.join(agreement.sizes)}, the members are "
            f"{', '.join(members)}"
        )
    bins = hashing.bins_for(agreed_size(agreement, hub))
    return bins, [slots_for(agreed_size(agreement, member), bins) for member in members]


def longest_message(
    agreement: IntersectionAgreement,
    slots_for: Callable[[int, int], int] = hashing.slots_for,
) -> int:
    """Bytes of the longest message of an intersection under this agreement, or of its dealing.

    Of a chunk, 64 bits a slot; of an intersection, a token of each ID; and what the hub repeats of
    each member, of whom a message counts 2^16 at most.
    """
    most = largest_size(agreement)
    slots = max(CHUNK_SLOTS, BITS * slots_for(most, hashing.bins_for(0)))
    return Framing.size(1, max(WORD.itemsize * slots, hashing.TOKEN_BYTES * most) + _ROSTER_BYTES)

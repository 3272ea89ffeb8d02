"""The messages of intersection by VOLE.

Run by: all parties of `apfed_protocols.psi.vole.backend`.

HELLO: the key of the hash, the hub's size. COMMIT: SHA-256 of the member's part of the output's
key, the member's size. DEAL: for how many IDs the hub orders, once for
each member. DEALT: what the dealer made.
VECTOR: the hub's part of the output's key, the name of the dealing, its masked store. TAGS: the
member's part, one tag for each of its IDs. ROWS: where in that list the common IDs are, 4 bytes
each. DONE, REFUSAL: empty.
"""

import math
import struct
from collections.abc import Callable
from enum import IntEnum

from apfed_protocols.psi import desk
from apfed_protocols.psi.framing import Framing
from apfed_protocols.psi.interface import IntersectionAgreement, Progress
from apfed_protocols.psi.sizes import largest_size
from apfed_protocols.psi.vole.field import ELEMENT_BYTES
from apfed_protocols.psi.vole.store import DENSE, cells_for
from apfed_protocols.randomness import KEY_BYTES

__all__ = [
    "COMMIT",
    "DEAL",
    "DEALING_BYTES",
    "HELLO",
    "Desk",
    "Kind",
    "hub_dealt_bytes",
    "longest_message",
    "member_dealt_bytes",
    "tag_bytes",
    "vector_bytes",
    "vector_elements",
]  # fmt: skip

HELLO = struct.Struct(f">{KEY_BYTES}sI")
COMMIT = struct.Struct(f">{KEY_BYTES}sI")
DEAL = struct.Struct(">I")

DEALING_BYTES = 16

_VERSION = 141
_FALSE_MATCH_BITS = 40
_LEAST_TAG_BYTES = 8


class Kind(IntEnum):
    """What a message is."""

    HELLO = 1
    COMMIT = 2
    DEAL = 3
    DEALT = 4
    VECTOR = 5
    TAGS = 6
    ROWS = 7
    DONE = 8
    REFUSAL = 9


class Desk(desk.Desk[Kind]):
    """Frames one party's messages, and reads those of its peers."""

    def __init__(
        self,
        me: str,
        agreement: IntersectionAgreement,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        super().__init__(
            me, agreement, kinds=Kind, version=_VERSION, work="evaluating its IDs",
            progress=progress,
        )  # fmt: skip


def vector_elements(hub_size: int) -> int:
    """How many elements a store of the hub has, and so each vector."""
    return cells_for(hub_size) + DENSE


def vector_bytes(elements: int) -> int:
    """What the hub sends a member: the name of the dealing, and a masked vector so long."""
    return DEALING_BYTES + ELEMENT_BYTES * elements


def hub_dealt_bytes(elements: int) -> int:
    """What the dealer sends the hub for one member: the name of the dealing, a seed, and C."""
    return DEALING_BYTES + KEY_BYTES + ELEMENT_BYTES * elements


def member_dealt_bytes() -> int:
    """What the dealer sends a member: the name of the dealing, a seed, and Delta."""
    return DEALING_BYTES + KEY_BYTES + ELEMENT_BYTES


def tag_bytes(hub_size: int, member_size: int) -> int:
    """Bytes of a tag.

    But with probability 2^-40 no ID of a member has the tag of another one of the hub, nor of
    another one of the member, which would be refused.
    """
    pairs = max(hub_size, member_size, 1) * max(member_size, 1)
    return max(_LEAST_TAG_BYTES, math.ceil((_FALSE_MATCH_BITS + math.log2(pairs)) / 8))


def longest_message(agreement: IntersectionAgreement) -> int:
    """Bytes of the longest message of an intersection under this agreement, or of its dealing."""
    most = largest_size(agreement)
    tags, elements = KEY_BYTES + tag_bytes(most, most) * most, vector_elements(most)
    return Framing.size(1, max(tags, hub_dealt_bytes(elements), KEY_BYTES + vector_bytes(elements)))

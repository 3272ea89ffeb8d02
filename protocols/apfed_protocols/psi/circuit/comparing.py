"""What hub and members compare in each bin: all slots of it, or one programmed value.

Run by: all parties of `apfed_protocols.psi.circuit.backend`, between their meeting and the circuit.
"""

from collections.abc import Generator, Sequence
from typing import Protocol

import numpy as np

from apfed_protocols.psi.circuit import hashing
from apfed_protocols.psi.circuit.bits import Words
from apfed_protocols.psi.circuit.dealer import dealer_script
from apfed_protocols.psi.circuit.meeting import Meeting, MemberBins, Rows
from apfed_protocols.psi.circuit.messages import VERSION, Desk, Inbox, longest_message
from apfed_protocols.psi.interface import IntersectionAgreement
from apfed_protocols.psi.script import Script, Turn
from apfed_protocols.psi.supply import Supply

__all__ = ["Comparing", "Slots"]


class Comparing(MemberBins, Protocol):
    """Roles of all parties; B bins, K slots, M members.

    Attributes:
        version: names the protocol in each frame.
    """

    version: int

    def longest(self, agreement: IntersectionAgreement) -> int:
        """Bytes of the longest message of an intersection, or of its dealing."""
        ...

    def at_hub(
        self, desk: Desk, members: Sequence[str], meeting: Meeting, supply: Supply | None
    ) -> Generator[Turn, Inbox, Words]:
        """Return the tag in each bin for each member, shape (M, B)."""
        ...

    def at_member(
        self, desk: Desk, hub: str, meeting: Meeting, supply: Supply | None
    ) -> Generator[Turn, Inbox, Words]:
        """Return the tags in each bin, shape (K, B)."""
        ...

    def deal(self, desk: Desk, hub: str, members: Sequence[str]) -> Script:
        """The dealer's whole script."""
        ...


class Slots:
    """Each of a member's IDs has its slot: whoever has more IDs compares more."""

    version = VERSION

    def longest(self, agreement: IntersectionAgreement) -> int:
        return longest_message(agreement)

    def slots(self, member_size: int, bins: int) -> int:
        return hashing.slots_for(member_size, bins)

    def table(self, prints: Words, bins_of: Rows, bins: int, slots: int) -> Words | None:
        return hashing.member_table(prints, bins_of, bins, slots)

    def at_hub(
        self, desk: Desk, members: Sequence[str], meeting: Meeting, supply: Supply | None
    ) -> Generator[Turn, Inbox, Words]:
        yield from ()
        return np.broadcast_to(meeting.tags, (len(members), *meeting.tags.shape))

    def at_member(
        self, desk: Desk, hub: str, meeting: Meeting, supply: Supply | None
    ) -> Generator[Turn, Inbox, Words]:
        yield from ()
        return meeting.tags

    def deal(self, desk: Desk, hub: str, members: Sequence[str]) -> Script:
        return dealer_script(desk, hub, members)

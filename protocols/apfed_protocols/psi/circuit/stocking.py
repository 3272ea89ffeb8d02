"""Triples dealt ahead of an intersection, or ordered while it runs.

Run by: hub, members and dealer of `apfed_protocols.psi.circuit.backend`; see
`apfed_protocols.psi.supply`.
"""

from collections.abc import Generator, Sequence

from apfed_protocols.psi.circuit.bits import WORD
from apfed_protocols.psi.circuit.comparing import Comparing, Slots
from apfed_protocols.psi.circuit.dealer import deal_request, stocking_script
from apfed_protocols.psi.circuit.hashing import BITS
from apfed_protocols.psi.circuit.messages import (
    Desk,
    Inbox,
    Kind,
    chunks,
    planned_bins_and_slots,
    triple_words,
)
from apfed_protocols.psi.result import Opened
from apfed_protocols.psi.script import Script, Turn
from apfed_protocols.psi.supply import DealingAhead, Supply
from apfed_protocols.randomness import KEY_BYTES

__all__ = ["Stocking", "hub_triples", "member_triples"]


class Stocking(DealingAhead):
    """The parties' roles for dealing triples ahead."""

    def _comparing(self) -> Comparing:
        return Slots()

    def _desk(self, me: str) -> Desk:
        return Desk(me, self._agreement, version=self._comparing().version)

    def _longest(self) -> int:
        return self._comparing().longest(self._agreement)

    def _hub_script(self, me: str, members: Sequence[str], supply: Supply) -> Script:
        desk, slots_for = self._desk(me), self._comparing().slots
        bins, slots = planned_bins_and_slots(desk.agreement, me, members, slots_for)
        for chunk in chunks(bins, slots):
            words = (chunk.stop - chunk.start) // BITS
            supply.add((yield from hub_triples(desk, words, slots)))
        return Opened()

    def _member_script(self, me: str, hub: str, supply: Supply) -> Script:
        desk, slots_for = self._desk(me), self._comparing().slots
        members = [party for party in desk.agreement.sizes if party != hub]
        bins, slots = planned_bins_and_slots(desk.agreement, hub, members, slots_for)
        for chunk in chunks(bins, slots):
            words = (chunk.stop - chunk.start) // BITS
            supply.add((yield from member_triples(desk, words, slots, members.index(me))))
        return Opened()

    def _dealer_script(self, me: str, hub: str, members: Sequence[str]) -> Script:
        return stocking_script(self._desk(me), hub, members, self._comparing().slots)


def hub_triples(
    desk: Desk, words: int, slots: Sequence[int], supply: Supply | None = None
) -> Generator[Turn, Inbox, bytes]:
    """Return the hub's seeds and correction of one chunk: from its supply, or ordered now."""
    dealer, (_, all_words) = desk.agreement.dealer, triple_words(words, slots)
    length = KEY_BYTES * (len(slots) + 1) + WORD.itemsize * all_words
    if supply is not None:
        return supply.take(length)
    inbox = yield desk.turn(Kind.DEAL, {dealer: deal_request(words, slots)}, [dealer])
    return desk.read(inbox, dealer, Kind.TRIPLES, length)


def member_triples(
    desk: Desk, words: int, slots: Sequence[int], place: int, supply: Supply | None = None
) -> Generator[Turn, Inbox, bytes]:
    """Return a member's seeds and correction of one chunk."""
    dealer, (pair_words, _) = desk.agreement.dealer, triple_words(words, slots)
    length = 2 * KEY_BYTES + WORD.itemsize * pair_words[place]
    if supply is not None:
        return supply.take(length)
    inbox = yield Turn((), [dealer])
    return desk.read(inbox, dealer, Kind.TRIPLES, length)

"""Private set intersection by a circuit: parties compare bins of shared bits.

Run by: the active as the hub, each passive as a member, and a dealer without IDs, over
authenticated and encrypted links. Protects from: semi-honest parties, of which the dealer
works with nobody. Only the intersection of all opens; no pairwise intersection does. A hub that
alters its shares gets another function of the bits in each bin, one bit a bin in all, and may
have the dealer count more than there are (`UNCHECKED`).

1. Hub and members agree on a hash key (commit, reveal) and put their IDs into bins
   (`apfed_protocols.psi.circuit.hashing`).
2. For each chunk of bins, the dealer hands out triples, or did so ahead
   (`apfed_protocols.psi.supply`); the hub and each member compare the tag in each bin with
   the member's slots, 64 bits by six levels of AND, and XOR the slots: one bit a bin, shared
   by the two. Levels of AND over all members make it one bit of all.
3. All mask and permute their shares and send them to the dealer, who counts the common IDs
   and says whether they reach the agreed minimum, or their number if only that is to open.
4. If so, and if rows are to open, the members send their shares to the hub, and the hub
   names what opened to them, unless it alone is to know.

B bins, W = B / 64 words, K slots, M members.
Source: Pinkas, Schneider, Tkachenko and Yanai, EUROCRYPT 2019 (bins, circuit); the triples
and the bit-slicing are those of `apfed_protocols.psi.circuit.bits`.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.ids import check_ids
from apfed_protocols.psi.circuit.bits import And, BeaverAnd, TripleShares, bit_planes
from apfed_protocols.psi.circuit.comparing import Comparing, Slots
from apfed_protocols.psi.circuit.gates import all_members_agree, any_slot_equals
from apfed_protocols.psi.circuit.hashing import BITS, bins_for, slots_for
from apfed_protocols.psi.circuit.meeting import meet_as_hub, meet_as_member
from apfed_protocols.psi.circuit.messages import Desk, chunks, triple_words
from apfed_protocols.psi.circuit.opening import open_at_hub, open_at_member
from apfed_protocols.psi.circuit.stocking import hub_triples, member_triples
from apfed_protocols.psi.interface import (
    Admit,
    Guesses,
    IntersectionAgreement,
    Output,
    Progress,
    check_parties,
)
from apfed_protocols.psi.result import check_choices
from apfed_protocols.psi.script import Script, ScriptedRole
from apfed_protocols.psi.supply import Supply
from apfed_protocols.randomness import KEY_BYTES

__all__ = ["UNCHECKED", "CircuitIntersection"]

UNCHECKED = (
    "That only what all share opens, and only from the agreed minimum on, holds against parties "
    "that follow the protocol: shares are not checked, so that a hub which alters its own may open "
    "which of its IDs some members have and others lack, also below the minimum, and a member may "
    "have other IDs opened."
)


class CircuitIntersection:
    """The backend `circuit`: many bytes, little computing, a dealer; see `leaks`.

    Args:
        agreement: equal at all parties; names the dealer.
        threads: at least 1; this backend computes on whole arrays in this process.
        progress: told of every chunk of bins.
        admit: asked before each role with IDs is made.
    """

    name: ClassVar[str] = "circuit"
    needs_dealer: ClassVar[bool] = True
    pairwise: ClassVar[bool] = False
    outputs: ClassVar[frozenset[Output]] = frozenset(Output)
    leaks: ClassVar[tuple[str, ...]] = (
        "The dealer learns about how large each set is, and how many IDs are common to all.",
        "All parties learn whether the agreed minimum is reached.",
        UNCHECKED,
    )

    @staticmethod
    def most_guesses(maximum_ids: int) -> Guesses:
        """The hub compares one ID a bin; a member one a slot, in one of the ID's three bins or all.

        An ID that a member has in one slot alone is found with a chance of a third.
        """
        bins = bins_for(maximum_ids)
        return Guesses(hub=bins, member=bins * slots_for(maximum_ids, bins))

    def __init__(
        self,
        agreement: IntersectionAgreement,
        *,
        threads: int | None = None,
        progress: Callable[[Progress], None] | None = None,
        admit: Admit | None = None,
    ) -> None:
        check_choices(self.name, self.outputs, agreement, threads)
        if not agreement.dealer:
            raise LocalProtocolError(
                "a circuit intersection needs a dealer; name it in the agreement"
            )
        self.agreement, self._progress, self._admit = agreement, progress, admit

    @property
    def longest(self) -> int:
        """Bytes of the longest message that a role takes."""
        return self._comparing().longest(self.agreement)

    def hub(
        self,
        me: str,
        members: Sequence[str],
        ids: Sequence[bytes],
        *,
        supply: Supply | None = None,
    ) -> ScriptedRole:
        """The active's side; `supply` where the agreement says that triples were dealt ahead.

        Raises LocalProtocolError on duplicate or empty IDs, and on a supply that does not fit.
        """
        check_parties(me, members, self.agreement.dealer)
        self._enter(me, members, ids, supply)
        script = _hub_script(self._desk(me), self._comparing(), self._gate(), members, ids, supply)
        return self._role(me, [*members, self.agreement.dealer], script)

    def member(
        self, me: str, hub: str, ids: Sequence[bytes], *, supply: Supply | None = None
    ) -> ScriptedRole:
        """A passive's side; as `hub`."""
        check_parties(hub, [me], self.agreement.dealer)
        self._enter(me, [hub], ids, supply)
        script = _member_script(self._desk(me), self._comparing(), self._gate(), hub, ids, supply)
        return self._role(me, [hub, self.agreement.dealer], script)

    def dealer(self, hub: str, members: Sequence[str]) -> ScriptedRole:
        """The dealer's side."""
        me = self.agreement.dealer
        check_parties(hub, members, me)
        script = self._comparing().deal(self._desk(me), hub, members)
        return self._role(me, [hub, *members], script)

    def _enter(
        self, me: str, peers: Sequence[str], ids: Sequence[bytes], supply: Supply | None
    ) -> None:
        """Check all that can be checked before the first message; claim the supply last."""
        check_ids(me, ids, self.agreement.maximum_ids)
        if (supply is not None) != self.agreement.ahead:
            raise LocalProtocolError(
                f"{me} has {'a' if supply else 'no'} supply, the agreement says "
                f"ahead={self.agreement.ahead}"
            )
        if self._admit is not None:
            self._admit(me, peers)
        if supply is not None:
            supply.claim(self.agreement, me)

    def _comparing(self) -> Comparing:
        """What hub and members compare."""
        return Slots()

    def _gate(self) -> type[And]:
        """What computes an AND at this party."""
        return BeaverAnd

    def _desk(self, me: str) -> Desk:
        version = self._comparing().version
        return Desk(me, self.agreement, self._progress, version=version)

    def _role(self, me: str, peers: Sequence[str], script: Script) -> ScriptedRole:
        return ScriptedRole(me, peers, self.agreement.output, script, longest=self.longest)


def _hub_script(
    desk: Desk,
    comparing: Comparing,
    gate: type[And],
    members: Sequence[str],
    ids: Sequence[bytes],
    supply: Supply | None,
) -> Script:
    meeting = yield from meet_as_hub(desk, comparing, members, ids)
    tags_MB = yield from comparing.at_hub(desk, members, meeting, supply)
    seed_bytes, shares = KEY_BYTES * (len(members) + 1), []
    bins = tags_MB.shape[-1]
    for chunk in chunks(bins, meeting.slots):
        words = (chunk.stop - chunk.start) // BITS
        pair_words, all_words = triple_words(words, meeting.slots)
        dealt = yield from hub_triples(desk, words, meeting.slots, supply)
        *seeds, all_seed = (dealt[k : k + KEY_BYTES] for k in range(0, seed_bytes, KEY_BYTES))
        planes, triples = {}, {}
        for member, slots, seed, count, tags_B in zip(
            members, meeting.slots, seeds, pair_words, tags_MB, strict=True
        ):
            planes_1W = ~bit_planes(tags_B[chunk])[:, None]
            planes[member] = np.broadcast_to(planes_1W, (BITS, slots, words))
            triples[member] = TripleShares.expand(seed, count)
        bits = yield from any_slot_equals(desk, planes, triples, leads=True, gate=gate)
        all_triples = TripleShares.expand(all_seed, all_words, dealt[seed_bytes:])
        bits_MW = np.stack([bits[member] for member in members])
        share = yield from all_members_agree(
            desk, bits_MW, all_triples, hub=desk.me, members=members, gate=gate
        )
        shares.append(share)
        desk.report(chunk.stop, bins)
    share = np.concatenate(shares)
    return (yield from open_at_hub(desk, members, meeting, ids, share))


def _member_script(
    desk: Desk, comparing: Comparing, gate: type[And], hub: str, ids: Sequence[bytes],
    supply: Supply | None,
) -> Script:  # fmt: skip
    meeting = yield from meet_as_member(desk, comparing, hub, ids)
    tags = yield from comparing.at_member(desk, hub, meeting, supply)
    place, shares = meeting.place, []
    bins = tags.shape[-1]
    for chunk in chunks(bins, meeting.slots):
        tags_KB = tags[:, chunk]
        words = tags_KB.shape[1] // BITS
        pair_words, all_words = triple_words(words, meeting.slots)
        dealt = yield from member_triples(desk, words, meeting.slots, place, supply)
        seed, all_seed = dealt[:KEY_BYTES], dealt[KEY_BYTES : 2 * KEY_BYTES]
        triples = TripleShares.expand(seed, pair_words[place], dealt[2 * KEY_BYTES :])
        planes = {hub: bit_planes(tags_KB)}
        bits = yield from any_slot_equals(desk, planes, {hub: triples}, leads=False, gate=gate)
        bits_MW = np.zeros((len(meeting.slots), words), np.uint64)
        bits_MW[place] = bits[hub]
        all_triples = TripleShares.expand(all_seed, all_words)
        share = yield from all_members_agree(
            desk, bits_MW, all_triples, hub=hub, members=(), gate=gate
        )
        shares.append(share)
        desk.report(chunk.stop, bins)
    return (yield from open_at_member(desk, hub, meeting, ids, np.concatenate(shares)))

"""The circuit on programmed values: dealt ahead, several members, and what a value gives away."""

from collections.abc import Generator, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.psi import opprf
from apfed_protocols.psi.circuit import CircuitIntersection, Desk, Kind, Meeting, deal_request
from apfed_protocols.psi.hashing import Words, bins_for
from apfed_protocols.psi.interface import (
    Inbox,
    IntersectionAgreement,
    Output,
    Supply,
    Turn,
)
from apfed_protocols.psi.opprf import OpprfIntersection, Programmed
from apfed_protocols.psi.store import DENSE, Rows, cells_for, decode, targets_of
from apfed_protocols.psi.vole import DEAL, HubShare
from tests.contracts.intersections import Intersection, stocked

IDS = [b"person %d" % k for k in range(400)]
MEMBERS = ["p", "q"]
SETS = {"hub": IDS[:200], "p": IDS[50:300], "q": IDS[100:400]}


def agreed(*, ahead: bool, output: Output = Output.ROWS) -> IntersectionAgreement:
    sizes = {"hub": 210, "p": 260, "q": 300} if ahead else {}
    return IntersectionAgreement(
        session="s", dealer="dealer", ahead=ahead, sizes=sizes, output=output
    )


def played(agreement: IntersectionAgreement) -> Intersection:
    supplies = stocked(OpprfIntersection, agreement) if agreement.ahead else {}
    return Intersection(OpprfIntersection, SETS, agreement, supplies=supplies).play()


@pytest.mark.parametrize("ahead", [False, True])
def test_what_all_share_opens_in_one_order(ahead: bool) -> None:
    found = played(agreed(ahead=ahead))
    found.check()
    assert sorted(found.opened()["hub"]) == sorted(IDS[100:200])


def test_the_shares_of_membership_are_right() -> None:
    roles = played(agreed(ahead=False, output=Output.SHARED)).aligners
    shares = [roles[name].membership.shares for name in SETS]
    common = np.logical_xor.reduce(shares)
    places = roles["hub"].membership.row_of_place
    assert places is not None
    assert {SETS["hub"][row] for row in places[common]} == set(IDS[100:200])


def test_hints_are_as_long_whatever_the_sets_share() -> None:
    """And look random: no two cells of a store are equal, in no two stores."""
    hints = []
    for overlap in (0, 200):
        sets = {"hub": IDS[:200], "p": IDS[200 - overlap :][:200]}
        sent = Intersection(OpprfIntersection, sets).play(refusing=True).sent
        hints += [out.body for sender, out in sent if (sender, out.body[1]) == ("p", Kind.HINT)]
    assert len(hints) == 2
    assert len(hints[0]) == len(hints[1])
    cells = np.frombuffer(b"".join(hint[22:] for hint in hints), "<u8")
    assert len(np.unique(cells)) == len(cells)


class _Probing(Programmed):
    """A hub that would read in which of its IDs a bin's value is that of a member.

    Puts one of its IDs into every bin where it has some, and takes off what it can of all of the
    words that the store has for all of its IDs.
    """

    def __init__(self) -> None:
        self.put: dict[int, int] = {}
        self.read: dict[tuple[int, int], int] = {}
        self.tags_B = np.empty(0, np.uint64)

    def at_hub(
        self, desk: Desk, members: Sequence[str], meeting: Meeting, supply: Supply | None
    ) -> Generator[Turn, Inbox, Words]:
        (dealt,) = yield from opprf._dealt_to_hub(desk, meeting.sizes[0], 1, supply)
        self.put = {bin_: row for row, bins in enumerate(meeting.bins_of.tolist()) for bin_ in bins}
        digests = opprf._digests(meeting.tokens, meeting.key)
        points = np.zeros((len(meeting.row_of_bin), 2), np.uint64)
        points[list(self.put)] = targets_of(digests)[list(self.put.values())]
        share, cells = HubShare.of(dealt), cells_for(meeting.sizes[1])
        inbox = yield desk.turn(Kind.VECTOR, {members[0]: share.masked(points)}, members)
        hints = desk.read_words(inbox, members[0], Kind.HINT, (cells + DENSE, 3))
        words = decode(hints, Rows.of(digests, cells))
        words ^= opprf._function(share.c, meeting.key)[meeting.bins_of]
        for row, (bins, found) in enumerate(zip(meeting.bins_of, words, strict=True)):
            self.read |= {(int(bin_), row): int(t) for bin_, t in zip(bins, found, strict=True)}
        return np.zeros((1, len(points)), np.uint64)

    def at_member(
        self, desk: Desk, hub: str, meeting: Meeting, supply: Supply | None
    ) -> Generator[Turn, Inbox, Words]:
        self.tags_B = (yield from super().at_member(desk, hub, meeting, supply))[0]
        return self.tags_B[None]


def test_a_hub_that_deviates_reads_no_membership_before_the_circuit() -> None:
    """Where it has two IDs of a member in one bin, it takes F off one of the two words alone."""
    probing = _Probing()

    class Backend(OpprfIntersection):
        comparing: ClassVar[Any] = staticmethod(lambda: probing)

    sets = {"hub": IDS, "p": IDS[:300]}
    Intersection(Backend, sets, minimum_rows=2).play(refusing=True)
    true = {place for place, t in probing.read.items() if t == probing.tags_B[place[0]]}
    assert true == {(bin_, row) for bin_, row in probing.put.items() if row < 300}
    assert len(true) > 200
    # what would name people: equal values of two IDs in one bin, which 2^-64 has elsewhere
    in_one_bin = [(bin_, t) for (bin_, _), t in probing.read.items()]
    assert len(in_one_bin) == len(set(in_one_bin)) == 3 * len(IDS)


def test_an_order_beyond_the_agreement_is_refused() -> None:
    small = IntersectionAgreement(session="s", dealer="dealer", maximum_ids=10)
    dealer = OpprfIntersection(small).dealer("hub", ["p"])
    dealer.start()
    desk = Desk("hub", small, version=Programmed.version)
    (order,) = desk.turn(Kind.CORRELATE, {"dealer": DEAL.pack(11)}, ()).outgoing
    with pytest.raises(RemoteProtocolError, match="hub orders a vector for 11 IDs"):
        dealer.receive("hub", order.body)


def test_the_dealer_fills_no_order_that_this_set_does_not_take() -> None:
    """One slot a bin, and as many bins as the size that was ordered for."""
    agreement = IntersectionAgreement(session="s", dealer="dealer", maximum_ids=10**7)
    desk = Desk("hub", agreement, version=Programmed.version)

    def ordered(words: int, slots: int) -> None:
        dealer = OpprfIntersection(agreement).dealer("hub", ["p"])
        dealer.start()
        for kind, body in (
            (Kind.CORRELATE, DEAL.pack(10)), (Kind.DEAL, deal_request(words, [slots])),
        ):  # fmt: skip
            (order,) = desk.turn(kind, {"dealer": body}, ()).outgoing
            list(dealer.receive("hub", order.body))

    ordered(bins_for(10) // 64, 1)
    with pytest.raises(RemoteProtocolError, match="a bin at most 1"):
        ordered(1, 2)
    with pytest.raises(RemoteProtocolError, match="more than the agreed 10 IDs take"):
        ordered(bins_for(10) // 64 + 1, 1)


def test_orders_for_several_sizes_are_refused() -> None:
    agreement = IntersectionAgreement(session="s", dealer="dealer")
    desk = Desk("hub", agreement, version=Programmed.version)
    dealer = OpprfIntersection(agreement).dealer("hub", MEMBERS)
    dealer.start()
    first, second = (
        desk.turn(Kind.CORRELATE, {"dealer": DEAL.pack(size)}, ()).outgoing[0] for size in (10, 11)
    )
    list(dealer.receive("hub", first.body))
    with pytest.raises(RemoteProtocolError, match="hub orders for sets of 10, 11 IDs, it has one"):
        list(dealer.receive("hub", second.body))


def test_parties_of_circuit_and_opprf_do_not_take_each_other_at_their_word() -> None:
    agreement = agreed(ahead=False)
    member = CircuitIntersection(agreement).member("p", "hub", SETS["p"])
    member.start()
    (first, *_) = OpprfIntersection(agreement).hub("hub", ["p"], SETS["hub"]).start()
    with pytest.raises(RemoteProtocolError, match="use the same protocol"):
        member.receive("hub", first.body)

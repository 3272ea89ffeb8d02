"""The circuit on programmed values: dealt ahead, several members, and what a value gives away."""

import numpy as np
import pytest

from protocols.errors import RemoteProtocolError
from protocols.psi.circuit.backend import CircuitIntersection
from protocols.psi.circuit.dealer import deal_request
from protocols.psi.circuit.hashing import bins_for
from protocols.psi.circuit.messages import Desk, Kind
from protocols.psi.circuit.opprf_backend import OpprfIntersection
from protocols.psi.circuit.programmed import Programmed, ProgrammedStocking
from protocols.psi.interface import IntersectionAgreement, Output
from protocols.psi.script import ScriptedRole
from protocols.psi.vole.messages import DEAL
from tests.protocols.scripted import play

IDS = [b"person %d" % k for k in range(400)]
MEMBERS = ["p", "q"]
SETS = {"hub": IDS[:200], "p": IDS[50:300], "q": IDS[100:400]}


def agreed(*, ahead: bool, output: Output = Output.ROWS) -> IntersectionAgreement:
    sizes = {"hub": 210, "p": 260, "q": 300} if ahead else {}
    return IntersectionAgreement(
        session="s", dealer="dealer", ahead=ahead, sizes=sizes, output=output
    )


def roles_of(agreement: IntersectionAgreement) -> dict[str, ScriptedRole]:
    backend = OpprfIntersection(agreement)
    dealer = {"dealer": backend.dealer("hub", MEMBERS)}
    if not agreement.ahead:
        members = {m: backend.member(m, "hub", SETS[m]) for m in MEMBERS}
        return {"hub": backend.hub("hub", MEMBERS, SETS["hub"])} | members | dealer
    stocking = ProgrammedStocking(agreement)
    hub = stocking.hub("hub", MEMBERS)
    stocks = {member: stocking.member(member, "hub") for member in MEMBERS}
    play({"hub": hub, **stocks, "dealer": stocking.dealer("hub", MEMBERS)})
    members = {m: backend.member(m, "hub", SETS[m], supply=stocks[m].supply) for m in MEMBERS}
    return {"hub": backend.hub("hub", MEMBERS, SETS["hub"], supply=hub.supply)} | members | dealer


@pytest.mark.parametrize("ahead", [False, True])
def test_what_all_share_opens_in_one_order(ahead: bool) -> None:
    roles = roles_of(agreed(ahead=ahead))
    play(roles)
    found = {name: [SETS[name][row] for row in roles[name].rows] for name in SETS}
    assert sorted(found["hub"]) == sorted(IDS[100:200])
    assert found["hub"] == found["p"] == found["q"]


def test_the_shares_of_membership_are_right() -> None:
    roles = roles_of(agreed(ahead=False, output=Output.SHARED))
    play(roles)
    shares = [roles[name].membership.shares for name in SETS]
    common = np.logical_xor.reduce(shares)
    places = roles["hub"].membership.row_of_place
    assert places is not None
    assert {SETS["hub"][row] for row in places[common]} == set(IDS[100:200])


def test_hints_are_as_long_whatever_the_sets_share() -> None:
    """And look random: no two cells of a store are equal, in no two stores."""
    hints = []
    for overlap in (0, 200):
        backend = OpprfIntersection(IntersectionAgreement(session="s", dealer="dealer"))
        sent = play(
            {
                "hub": backend.hub("hub", ["p"], IDS[:200]),
                "p": backend.member("p", "hub", IDS[200 - overlap :][:200]),
                "dealer": backend.dealer("hub", ["p"]),
            },
            refusing=True,
        )
        hints += [body for body in sent["p", "hub"] if body[1] == Kind.HINT]
    assert len(hints) == 2
    assert len(hints[0]) == len(hints[1])
    cells = np.frombuffer(b"".join(hint[22:] for hint in hints), "<u8")
    assert len(np.unique(cells)) == len(cells)


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

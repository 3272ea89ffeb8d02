"""The circuit on programmed values: dealt ahead, several members, and what a value gives away."""

import numpy as np
import pytest

from protocols.errors import RemoteProtocolError
from protocols.psi.circuit.messages import Desk, Kind
from protocols.psi.circuit.opprf_backend import OpprfIntersection
from protocols.psi.circuit.programmed import ProgrammedStocking
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
    (order,) = Desk("hub", small).turn(Kind.CORRELATE, {"dealer": DEAL.pack(11)}, ()).outgoing
    with pytest.raises(RemoteProtocolError, match="hub orders a vector for 11 IDs"):
        dealer.receive("hub", order.body)

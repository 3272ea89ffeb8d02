"""Triples dealt before the IDs are known, and agreed sizes that hide the true ones."""

import copy
import hashlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest

from apfed_protocols.conversation import Conversation, Outgoing, converse
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.psi import circuit
from apfed_protocols.psi.circuit import (
    CircuitIntersection,
    CryptenCircuitIntersection,
    Kind,
)
from apfed_protocols.psi.ecdh import EcdhIntersection
from apfed_protocols.psi.interface import Aligner, IntersectionAgreement, Output, Supply
from apfed_protocols.randomness import fresh_key
from tests.contracts.intersections import Intersection
from tests.with_crypten import installed

SIZES = {"hub": 300, "p": 250, "q": 200}
MEMBERS = ["p", "q"]
AHEAD = IntersectionAgreement(
    session="s", minimum_rows=0, maximum_ids=1000, dealer="d", sizes=SIZES, ahead=True
)
SETS = {
    "hub": [b"%d" % k for k in range(280)],
    "p": [b"%d" % k for k in range(100, 350)],
    "q": [b"%d" % k for k in range(150, 300, 2)],
}
COMMON = {b"%d" % k for k in range(150, 280, 2)}
Sent = list[tuple[str, Kind, int]]


def stock(agreement: IntersectionAgreement = AHEAD) -> dict[str, Supply]:
    stocking = CircuitIntersection(agreement)
    roles = {"hub": stocking.stock_hub("hub", MEMBERS)}
    # in another order than the hub's
    roles |= {member: stocking.stock_member(member, "hub") for member in reversed(MEMBERS)}
    converse({**roles, "d": stocking.stock_dealer("hub", MEMBERS)})
    return {name: role.supply for name, role in roles.items()}


def play(
    supplies: Mapping[str, Supply] | None,
    *,
    agreement: IntersectionAgreement = AHEAD,
    sets: Mapping[str, Sequence[bytes]] = SETS,
    backend: type[CircuitIntersection] = CircuitIntersection,
) -> tuple[dict[str, Aligner], Sent]:
    """The roles with rows, and sender, kind and length of every message."""
    played = Intersection(backend, sets, agreement, supplies=supplies).play()
    return played.aligners, [(me, Kind(out.body[1]), len(out.body)) for me, out in played.sent]


def check(aligners: Mapping[str, Aligner]) -> None:
    found = [[SETS[name][row] for row in aligner.rows] for name, aligner in aligners.items()]
    assert found[0] == found[1] == found[2]
    assert set(found[0]) == COMMON
    assert len(found[0]) == len(COMMON)


@pytest.mark.parametrize("slots_of_a_chunk", [2**21, 2000])
def test_with_a_supply_the_dealer_only_counts(
    slots_of_a_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(circuit, "CHUNK_SLOTS", slots_of_a_chunk)
    aligners, sent = play(stock())
    check(aligners)
    kinds = {kind for _, kind, _ in sent}
    assert not kinds & {Kind.DEAL, Kind.TRIPLES}
    assert {kind for name, kind, _ in sent if name == "d"} == {Kind.VERDICT}


@installed
def test_crypten_takes_the_same_supply() -> None:
    check(play(stock(), backend=CryptenCircuitIntersection)[0])


def test_without_a_supply_agreed_sizes_hide_the_true_ones() -> None:
    agreement = replace(AHEAD, ahead=False)
    aligners, sent = play(None, agreement=agreement)
    check(aligners)
    few = {"hub": SETS["hub"][:200], "p": SETS["p"][:150], "q": SETS["q"][:70]}
    _, others = play(None, agreement=agreement, sets=few)
    # how long the list of what is common is, shows to all what is common, as agreed
    without = [[entry for entry in each if entry[1] is not Kind.TOKENS] for each in (sent, others)]
    assert without[0] == without[1]


def test_a_supply_survives_the_disk() -> None:
    supplies = {name: Supply.from_bytes(each.to_bytes()) for name, each in stock().items()}
    check(play(supplies)[0])


@pytest.mark.parametrize("output", [Output.SIZE, Output.HUB_ROWS])
def test_other_outputs_use_supplies_too(output: Output) -> None:
    agreement = replace(AHEAD, output=output)
    aligners, _ = play(stock(agreement), agreement=agreement)
    assert aligners["hub"].size == len(COMMON)


def test_a_supply_is_used_once() -> None:
    supplies = stock()
    play(supplies)
    with pytest.raises(LocalProtocolError, match="hub: a supply is used once"):
        play(supplies)
    with pytest.raises(LocalProtocolError, match="p: this supply is in use"):
        supplies["p"].to_bytes()


def test_copies_of_a_supply_are_not_used_beside_it() -> None:
    supplies, kept = stock(), {}
    for name, supply in supplies.items():
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(LocalProtocolError, match="never copied"):
                copied(supply)
        kept[name] = supply.to_bytes()
        with pytest.raises(LocalProtocolError, match="or was stored already"):
            supply.to_bytes()
    with pytest.raises(LocalProtocolError, match="hub: a supply is used once"):
        play(supplies)  # what was stored is used from the store only
    check(play({name: Supply.from_bytes(each) for name, each in kept.items()})[0])
    with pytest.raises(LocalProtocolError, match="hub: a supply is used once"):
        play({name: Supply.from_bytes(each) for name, each in kept.items()})  # read twice


def test_supplies_of_others_are_refused() -> None:
    supplies = stock()
    with pytest.raises(LocalProtocolError, match="hub: this supply was dealt to p"):
        play({"hub": supplies["p"], "p": supplies["p"], "q": supplies["q"]})
    with pytest.raises(LocalProtocolError, match="or under another agreement"):
        play(stock(), agreement=replace(AHEAD, session="t"))


def test_a_supply_and_the_agreement_belong_together() -> None:
    with pytest.raises(
        LocalProtocolError, match=r"hub has no supply, the agreement says ahead=True"
    ):
        play(None)
    with pytest.raises(
        LocalProtocolError, match=r"hub has a supply, the agreement says ahead=False"
    ):
        play(stock(), agreement=replace(AHEAD, ahead=False))
    with pytest.raises(LocalProtocolError, match="under an agreement that says so"):
        CircuitIntersection(replace(AHEAD, ahead=False)).stock_hub("hub", MEMBERS)
    with pytest.raises(LocalProtocolError, match="agree on the sizes"):
        replace(AHEAD, sizes={})


def test_there_is_no_supply_before_the_end() -> None:
    with pytest.raises(LocalProtocolError, match="hub: the intersection is not finished"):
        _ = CircuitIntersection(AHEAD).stock_hub("hub", MEMBERS).supply


@pytest.mark.parametrize(
    "damage",
    [
        lambda stored: b"",
        lambda stored: stored[:-1],
        lambda stored: stored[:50],
        lambda stored: stored + b"0",
        lambda stored: stored[:34] + b"\xff" * 4 + stored[38:],
        lambda stored: stored[:38] + b"\xff" + stored[39:],
    ],
)
def test_a_damaged_supply_is_an_error(damage: Callable[[bytes], bytes]) -> None:
    with pytest.raises(LocalProtocolError, match="does not match its checksum"):
        Supply.from_bytes(damage(stock()["p"].to_bytes()))


def test_a_supply_that_is_too_short_is_an_error() -> None:
    short = Supply(AHEAD.digest, "p", [b"few"])
    with pytest.raises(LocalProtocolError, match=r"holds 3 bytes for the next chunk, it takes"):
        play(stock() | {"p": short})
    with pytest.raises(LocalProtocolError, match=r"holds 0 bytes for the next chunk, it takes"):
        play(stock() | {"p": Supply(AHEAD.digest, "p")})


def test_a_party_that_is_not_admitted_keeps_its_supply() -> None:
    def refuse(_me: str, _peers: Sequence[str]) -> None:
        raise PermissionError

    supplies = stock()
    with pytest.raises(PermissionError):
        CircuitIntersection(AHEAD, admit=refuse).hub(
            "hub", MEMBERS, SETS["hub"], supply=supplies["hub"]
        )
    check(play(supplies)[0])


def test_a_set_above_the_agreed_size_is_an_error() -> None:
    with pytest.raises(LocalProtocolError, match=r"q has 201 IDs, .* that it announces 200"):
        play(stock(), sets=SETS | {"q": [b"%d" % k for k in range(201)]})


def test_sizes_for_other_parties_are_an_error() -> None:
    others = replace(AHEAD, sizes={"hub": 300, "p": 250, "r": 200}, ahead=False)
    with pytest.raises(LocalProtocolError, match="no size is agreed for q, only for hub, p, r"):
        play(None, agreement=others)
    three = replace(AHEAD, sizes=SIZES | {"r": 9})
    with pytest.raises(LocalProtocolError, match="sizes are agreed for hub, p, q, r, the members"):
        converse({"hub": CircuitIntersection(three).stock_hub("hub", MEMBERS)})


@pytest.mark.parametrize("size", [-1, 1001])
def test_impossible_sizes_are_refused(size: int) -> None:
    with pytest.raises(LocalProtocolError, match=r"sizes lie in 0..maximum_ids \(1000\)"):
        replace(AHEAD, sizes=SIZES | {"p": size})


class Changing:
    """A role whose messages of one kind get another body."""

    def __init__(self, role: Conversation, kind: Kind, body: Callable[[bytes], bytes]) -> None:
        self.role, self.kind, self.body = role, kind, body

    @property
    def finished(self) -> bool:
        return self.role.finished

    def start(self) -> Sequence[Outgoing]:
        return [self.changed(out) for out in self.role.start()]

    def receive(self, sender: str, body: bytes) -> Sequence[Outgoing]:
        return [self.changed(out) for out in self.role.receive(sender, body)]

    def changed(self, out: Outgoing) -> Outgoing:
        if out.body[1] != self.kind:
            return out
        return Outgoing(out.receiver, out.body[:22] + self.body(out.body[22:]))


@pytest.mark.parametrize(
    ("party", "kind", "body", "message"),
    [
        ("hub", Kind.COMMIT, lambda b: b[:32] + b"\0\0\0\x07" + b[36:], "hub announces 7 IDs, the"),
        ("q", Kind.JOIN, lambda b: b[:64] + b"\0\0\0\x07", "q announces 7 IDs, the parties agreed"),
    ],
)
def test_a_peer_that_announces_another_size_is_refused(
    party: str, kind: Kind, body: Callable[[bytes], bytes], message: str
) -> None:
    protocol = CircuitIntersection(replace(AHEAD, ahead=False))
    roles: dict[str, Conversation] = {"hub": protocol.hub("hub", MEMBERS, SETS["hub"])}
    roles |= {name: protocol.member(name, "hub", SETS[name]) for name in MEMBERS}
    roles["d"] = protocol.dealer("hub", MEMBERS)
    roles[party] = Changing(roles[party], kind, body)
    with pytest.raises(RemoteProtocolError, match=message):
        converse(roles)


def test_a_hub_that_orders_other_triples_is_refused() -> None:
    stocking = CircuitIntersection(AHEAD)
    hub = Changing(stocking.stock_hub("hub", MEMBERS), Kind.DEAL, lambda b: b"\0\0\0\1" + b[4:])
    roles: dict[str, Conversation] = {"hub": hub, "d": stocking.stock_dealer("hub", MEMBERS)}
    roles |= {name: stocking.stock_member(name, "hub") for name in MEMBERS}
    with pytest.raises(RemoteProtocolError, match="hub orders triples for 1 words of bins, the"):
        converse(roles)


def test_ecdh_has_neither() -> None:
    with pytest.raises(LocalProtocolError, match="ecdh shows the true sizes of sets"):
        EcdhIntersection(replace(AHEAD, ahead=False))


def test_sizes_and_dealing_ahead_are_part_of_the_agreement() -> None:
    agreements = [
        AHEAD,
        replace(AHEAD, ahead=False),
        replace(AHEAD, sizes={}, ahead=False),
        replace(AHEAD, sizes=SIZES | {"p": 251}),
        replace(AHEAD, sizes={"hub": 300, "q": 250, "p": 200}),
    ]
    assert len({agreement.digest for agreement in agreements}) == len(agreements)
    turned = replace(AHEAD, sizes=dict(reversed(SIZES.items())))
    assert turned.digest == AHEAD.digest


def test_a_supply_that_was_read_or_used_takes_no_more_triples() -> None:
    """Filled up with anything it would be another one, and its triples would be used twice."""
    stored = stock()["hub"].to_bytes()
    read = Supply.from_bytes(stored)
    with pytest.raises(LocalProtocolError, match="is filled while it is dealt"):
        read.add(b"")
    read.claim(AHEAD, "hub")
    with pytest.raises(LocalProtocolError, match="is filled while it is dealt"):
        read.add(b"")
    kept = stock()["hub"]
    kept.to_bytes()
    with pytest.raises(LocalProtocolError, match="is filled while it is dealt"):
        kept.add(b"")


@pytest.mark.parametrize(
    "change",
    [lambda bodies: bodies[1:], lambda bodies: [*bodies, b""], lambda bodies: bodies[::-1]],
)
def test_one_chunk_of_a_used_supply_is_enough_to_refuse_another(
    change: Callable[[list[bytes]], list[bytes]],
) -> None:
    bodies = [fresh_key() for _ in range(3)]
    Supply(AHEAD.digest, "hub", bodies).claim(AHEAD, "hub")
    with pytest.raises(LocalProtocolError, match="is used once"):
        Supply(AHEAD.digest, "hub", change(bodies)).claim(AHEAD, "hub")


JUNK = {
    "nothing": b"",
    "part of a head": b"x",
    "a name that is no text": bytes(32) + b"\x00\x02" + bytes(4) + b"\xff\xfe",
    "a name that is not there": bytes(32) + b"\x00\x09" + bytes(4) + b"hub",
    "bodies that are not there": bytes(32) + b"\x00\x01" + b"\xff\xff\xff\xff" + b"h",
    "a body that is cut off": bytes(32) + b"\0\1" + b"\0\0\0\1" + b"h" + b"\0\0\0\x09ab",
    "more than there is": bytes(100),
}


@pytest.mark.parametrize("junk", JUNK)
def test_bytes_with_a_right_checksum_that_are_no_supply_are_refused(junk: str) -> None:
    stored = JUNK[junk] + hashlib.sha256(JUNK[junk]).digest()
    with pytest.raises(LocalProtocolError, match="are no supply"):
        Supply.from_bytes(stored)

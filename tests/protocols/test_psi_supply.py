"""Triples dealt before the IDs are known, and agreed sizes that hide the true ones."""

import copy
import hashlib
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from apfed_protocols.conversation import converse
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.psi import SET_INTERSECTIONS, circuit
from apfed_protocols.psi.circuit import CircuitIntersection, Kind
from apfed_protocols.psi.ecdh import EcdhIntersection
from apfed_protocols.psi.interface import IntersectionAgreement, Supply
from apfed_protocols.randomness import fresh_key
from tests.contracts.intersections import Intersection, of_kind, stocked
from tests.with_crypten import usable

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


def stock(backend: type[CircuitIntersection] = CircuitIntersection) -> dict[str, Supply]:
    return stocked(backend, AHEAD)


def play(
    supplies: Mapping[str, Supply] | None,
    agreement: IntersectionAgreement = AHEAD,
    sets: Mapping[str, Sequence[bytes]] = SETS,
    backend: type[CircuitIntersection] = CircuitIntersection,
) -> Intersection:
    return Intersection(backend, sets, agreement, supplies=supplies).play()


@pytest.mark.parametrize("name", usable(("circuit", "opprf", "circuit_crypten")))
def test_with_a_supply_the_dealer_only_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CrypTen takes what was dealt for our own gates."""
    monkeypatch.setattr(circuit, "CHUNK_SLOTS", 2000)
    kind: Any = SET_INTERSECTIONS[name]
    dealt = stock(backend=CircuitIntersection if "crypten" in name else kind)
    played = play(dealt, backend=kind)
    played.check()
    sent = [(sender, Kind(out.body[1])) for sender, out in played.sent]
    assert not {kind for _, kind in sent} & {Kind.DEAL, Kind.TRIPLES, Kind.CORRELATED}
    assert {kind for name, kind in sent if name == "d"} == {Kind.VERDICT}


def test_without_a_supply_agreed_sizes_hide_the_true_ones() -> None:
    agreement = replace(AHEAD, ahead=False)
    few = {"hub": SETS["hub"][:200], "p": SETS["p"][:150], "q": SETS["q"][:70]}
    lengths = []
    for sets in (SETS, few):
        played = play(None, agreement, sets)
        played.check()
        # how long the list of what is common is, shows to all what is common, as agreed
        sent = [(me, out) for me, out in played.sent if out.body[1] != Kind.TOKENS]
        lengths.append([(me, out.receiver, out.body[1], len(out.body)) for me, out in sent])
    assert lengths[0] == lengths[1]


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
    play({name: Supply.from_bytes(each) for name, each in kept.items()}).check()
    with pytest.raises(LocalProtocolError, match="hub: a supply is used once"):
        play({name: Supply.from_bytes(each) for name, each in kept.items()})  # read twice


def test_a_supply_and_the_agreement_belong_together_and_there_is_none_before_the_end() -> None:
    for what, held, ahead in (("no", None, True), ("a", stock(), False)):
        said = f"hub has {what} supply, the agreement says ahead={ahead}"
        with pytest.raises(LocalProtocolError, match=said):
            play(held, agreement=replace(AHEAD, ahead=ahead))
    with pytest.raises(LocalProtocolError, match="under an agreement that says so"):
        CircuitIntersection(replace(AHEAD, ahead=False)).stock_hub("hub", MEMBERS)
    with pytest.raises(LocalProtocolError, match="hub: the intersection is not finished"):
        _ = CircuitIntersection(AHEAD).stock_hub("hub", MEMBERS).supply


def test_a_damaged_supply_is_an_error() -> None:
    stored = stock()["p"].to_bytes()
    other = stored[:34] + b"\xff" * 4 + stored[38:], stored[:38] + b"\xff" + stored[39:]
    for damaged in (b"", stored[:-1], stored[:50], stored + b"0", *other):
        with pytest.raises(LocalProtocolError, match="does not match its checksum"):
            Supply.from_bytes(damaged)


def test_a_supply_that_is_too_short_is_an_error() -> None:
    short = Supply(AHEAD.digest, "p", [b"few"])
    for size, one in ((3, short), (0, Supply(AHEAD.digest, "p"))):
        with pytest.raises(LocalProtocolError, match=f"holds {size} bytes for the next chunk, it"):
            play(stock() | {"p": one})


def test_a_party_that_is_not_admitted_keeps_its_supply() -> None:
    supplies = stock()
    protocol = CircuitIntersection(AHEAD, admit=Mock(side_effect=PermissionError))
    with pytest.raises(PermissionError):
        protocol.hub("hub", MEMBERS, SETS["hub"], supply=supplies["hub"])
    play(supplies).check()


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


def test_a_peer_that_announces_or_orders_for_another_size_is_refused() -> None:
    agreement = replace(AHEAD, ahead=False)
    commit = of_kind("hub", Kind.COMMIT, lambda b: b[:32] + b"\0\0\0\x07" + b[36:])
    join = of_kind("q", Kind.JOIN, lambda b: b[:64] + b"\0\0\0\x07")
    for change, who in ((commit, "hub"), (join, "q")):
        with pytest.raises(RemoteProtocolError, match=f"{who} announces 7 IDs, the parties agreed"):
            Intersection(CircuitIntersection, SETS, agreement, change=change).play()
    order = of_kind("hub", Kind.DEAL, lambda b: b"\0\0\0\1" + b[4:])
    with pytest.raises(RemoteProtocolError, match="hub orders triples for 1 words of bins, the"):
        stocked(CircuitIntersection, AHEAD, order)


def test_ecdh_has_neither() -> None:
    with pytest.raises(LocalProtocolError, match="ecdh shows the true sizes of sets"):
        EcdhIntersection(replace(AHEAD, ahead=False))


def test_a_supply_that_was_read_or_used_takes_no_more_triples() -> None:
    """Filled up with anything it would be another one, and its triples would be used twice."""
    kept, claimed = stock()["hub"], stock()["hub"]
    claimed.claim(AHEAD, "hub")
    for supply in (Supply.from_bytes(kept.to_bytes()), kept, claimed):
        with pytest.raises(LocalProtocolError, match="is filled while it is dealt"):
            supply.add(b"")


def test_one_chunk_of_a_used_supply_is_enough_to_refuse_another() -> None:
    bodies = [fresh_key() for _ in range(3)]
    Supply(AHEAD.digest, "hub", bodies).claim(AHEAD, "hub")
    for others in (bodies[1:], [*bodies, b""], bodies[::-1]):
        with pytest.raises(LocalProtocolError, match="is used once"):
            Supply(AHEAD.digest, "hub", others).claim(AHEAD, "hub")


JUNK = {
    "nothing": b"",
    "part of a head": b"x",
    "a name that is no text": bytes(32) + b"\x00\x02" + bytes(4) + b"\xff\xfe",
    "a name that is not there": bytes(32) + b"\x00\x09" + bytes(4) + b"hub",
    "bodies that are not there": bytes(32) + b"\x00\x01" + b"\xff\xff\xff\xff" + b"h",
    "a body that is cut off": bytes(32) + b"\0\1" + b"\0\0\0\1" + b"h" + b"\0\0\0\x09ab",
    "more than there is": bytes(100),
}


def test_bytes_with_a_right_checksum_that_are_no_supply_are_refused() -> None:
    for junk in JUNK.values():
        stored = junk + hashlib.sha256(junk).digest()
        with pytest.raises(LocalProtocolError, match="are no supply"):
            Supply.from_bytes(stored)

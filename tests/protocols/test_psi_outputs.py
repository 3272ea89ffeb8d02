"""What can be asked of an intersection besides rows for all: the hub's rows, the size, shares."""

import math
from typing import Any

import numpy as np
import pytest

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.psi import SET_INTERSECTIONS, ecdh
from apfed_protocols.psi.circuit import Kind
from apfed_protocols.psi.interface import (
    Aligner,
    IntersectionAgreement,
    IntersectionTooSmallError,
    Output,
    Progress,
)
from tests.contracts.intersections import DEALER, Intersection, Sets, of_kind
from tests.with_crypten import usable

HUB = "hub"


def ids_of(start: int, stop: int) -> list[bytes]:
    return [b"id %d" % k for k in range(start, stop)]


PAIR: Sets = {HUB: ids_of(0, 40), "p": ids_of(30, 60)}
THREE: Sets = {HUB: ids_of(0, 40), "p": ids_of(20, 60), "q": ids_of(10, 35)}


def play(
    backend: str, output: Output, sets: Sets, *, progress: list[Progress] | None = None, **more: Any
) -> Intersection:
    report = None if progress is None else progress.append
    fields: dict[str, Any] = {"minimum_rows": 1, "output": output} | more
    played = Intersection(backend, sets, progress=report, **fields).play()
    assert all(role.finished for role in played.roles.values())
    return played


COMBINATIONS = [
    (backend, output, sets)
    for backend in usable(SET_INTERSECTIONS)
    for output in sorted(SET_INTERSECTIONS[backend].outputs)
    for sets in (PAIR, THREE)
    if (backend, output, len(sets)) != ("ecdh", Output.SIZE, 3)
]


def opened(aligner: Aligner) -> dict[str, object]:
    """All that a party's result gives."""
    found: dict[str, object] = {}
    for what in ("rows", "size", "membership"):
        try:
            found[what] = getattr(aligner, what)
        except LocalProtocolError as error:
            assert "the parties agreed on the output" in str(error)  # noqa: PT017
    return found


@pytest.mark.parametrize(("backend", "output", "sets"), COMBINATIONS)
def test_each_party_gets_what_was_agreed_and_no_more(
    backend: str, output: Output, sets: Sets
) -> None:
    common = set.intersection(*map(set, sets.values()))
    aligners = play(backend, output, sets).aligners
    for name, aligner in aligners.items():
        found = opened(aligner)
        if output is Output.ROWS or (output is Output.HUB_ROWS and name == HUB):
            assert set(found) == {"rows", "size"}
            assert {sets[name][row] for row in aligner.rows} == common
            assert aligner.size == len(common)
        elif output is Output.SIZE:
            assert found == {"size": len(common)}
        elif output is Output.SHARED:
            assert set(found) == {"membership"}
        else:
            assert found == {}


@pytest.mark.parametrize(("backend", "output", "sets"), COMBINATIONS)
def test_below_the_minimum_nothing_opens(backend: str, output: Output, sets: Sets) -> None:
    common = len(set.intersection(*map(set, sets.values())))
    for aligner in play(backend, output, sets, minimum_rows=common + 1).aligners.values():
        for what in ("rows", "size", "membership"):
            with pytest.raises(IntersectionTooSmallError, match="nothing was opened"):
                getattr(aligner, what)


@pytest.mark.parametrize("sets", [PAIR, THREE])
def test_shares_of_membership_combine_to_it_and_alone_say_nothing(sets: Sets) -> None:
    aligners = play("circuit", Output.SHARED, sets).aligners
    hub = aligners[HUB].membership
    assert hub.row_of_place is not None
    shares = np.stack([aligner.membership.shares for aligner in aligners.values()])
    common = np.bitwise_xor.reduce(shares)
    rows = hub.row_of_place[common]
    assert {sets[HUB][row] for row in rows} == set.intersection(*map(set, sets.values()))
    for name in sets:
        if name != HUB:
            assert aligners[name].membership.row_of_place is None
    places = shares.shape[1]
    for lacking in range(len(shares)):
        rest = np.bitwise_xor.reduce(np.delete(shares, lacking, axis=0))
        # 6 standard deviations of a fair coin
        assert abs(rest.mean() - 0.5) < 3 / math.sqrt(places)


def test_shares_are_made_anew_in_each_run() -> None:
    first, second = (
        play("circuit", Output.SHARED, PAIR).aligners["p"].membership for _ in range(2)
    )
    assert (first.shares != second.shares).any()


def test_in_counting_the_hub_cannot_link_tags_to_its_rows() -> None:
    """The member returns its tags in an order that says nothing of the order it got them in."""
    orders = set()
    for _ in range(20):
        sets: Sets = {HUB: ids_of(0, 3), "p": ids_of(0, 3)}
        agreement = IntersectionAgreement(session="s", output=Output.SIZE)
        protocol = SET_INTERSECTIONS["ecdh"](agreement)
        hub, member = protocol.hub(HUB, ["p"], sets[HUB]), protocol.member("p", HUB, sets["p"])
        (offer,) = hub.start()
        member.start()
        (tags,) = member.receive(HUB, offer.body)
        secret = member._pair.scalar  # type: ignore[attr-defined]  # as the member itself would
        straight = [
            point[:16] for point in ecdh.split_points(ecdh.multiply_points(secret, offer.body[22:]))
        ]
        returned = [tags.body[k : k + 16] for k in range(22, len(tags.body), 16)]
        assert sorted(straight) == sorted(returned)
        orders.add(tuple(straight.index(tag) for tag in returned))
    assert len(orders) > 3


def test_counting_more_than_two_by_ecdh_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match=r"common to two parties, here are 3; circuit"):
        play("ecdh", Output.SIZE, THREE)


def test_an_output_that_a_backend_lacks_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match=r"ecdh cannot give the output 'shared'; it gives"):
        SET_INTERSECTIONS["ecdh"](IntersectionAgreement(session="s", output=Output.SHARED))


@pytest.mark.parametrize("backend", usable(SET_INTERSECTIONS))
def test_a_member_gets_no_row_message_where_the_hub_alone_is_to_know(backend: str) -> None:
    played = play(backend, Output.HUB_ROWS, PAIR)
    last = [out.body for _, out in played.sent if out.receiver == "p"][-1]
    assert len(last) <= 22 + 8


def ecdh_member(output: Output) -> tuple[Aligner, bytes]:
    """A member that waits for the hub's last message, and the header of one of its own."""
    agreement = IntersectionAgreement(session="s", minimum_rows=2, output=output)
    protocol = SET_INTERSECTIONS["ecdh"](agreement)
    hub, member = protocol.hub(HUB, ["p"], ids_of(0, 9)), protocol.member("p", HUB, ids_of(0, 7))
    (own,) = member.start()
    member.receive(HUB, next(iter(hub.start())).body)
    return member, own.body[:18]


def test_another_ending_than_agreed_is_refused() -> None:
    cases: list[tuple[int, bytes]] = [(3, b""), (5, b"")]
    for kind, items in cases:
        member, head = ecdh_member(Output.SIZE)
        body = head[:1] + bytes([kind]) + head[2:] + bytes(4) + items
        with pytest.raises(RemoteProtocolError, match="when the protocol does not expect it"):
            member.receive(HUB, body)


def test_an_impossible_size_is_refused() -> None:
    for size in [0, 1, 8, 2**32 - 1]:
        member, head = ecdh_member(Output.SIZE)
        body = head[:1] + b"\6" + head[2:] + (1).to_bytes(4, "big") + size.to_bytes(4, "big")
        with pytest.raises(
            RemoteProtocolError, match=f"announces {size} common IDs, expected 2 to 7"
        ):
            member.receive(HUB, body)


@pytest.mark.parametrize("verdict", [-3, 0, 41, 2**40])
def test_an_impossible_verdict_of_the_dealer_is_refused(verdict: int) -> None:
    lie = of_kind(DEALER, Kind.VERDICT, lambda _: verdict.to_bytes(8, "big", signed=True))
    with pytest.raises(RemoteProtocolError, match=f"dealer announces {verdict} common IDs"):
        play("circuit", Output.SIZE, PAIR, minimum_rows=2, change=lie)


def test_progress_of_ecdh_counts_ids() -> None:
    progress: list[Progress] = []
    play("ecdh", Output.ROWS, {HUB: ids_of(0, 2500), "p": ids_of(2000, 2300)}, progress=progress)
    own = [step for step in progress if step.work == "blinding its own IDs" and step.party == HUB]
    assert [(step.done, step.total) for step in own] == [(833, 2500), (1666, 2500), (2500, 2500)]
    works = {(step.party, step.work) for step in progress if step.done == step.total}
    assert works == {
        (HUB, "blinding its own IDs"),
        (HUB, "blinding the IDs of p"),
        ("p", "blinding its own IDs"),
        ("p", "blinding the IDs of hub"),
    }


def test_progress_of_the_circuit_counts_bins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("apfed_protocols.psi.circuit.CHUNK_SLOTS", 2000)
    progress: list[Progress] = []
    play("circuit", Output.ROWS, {HUB: ids_of(0, 400), "p": ids_of(300, 700)}, progress=progress)
    for party in (HUB, "p"):
        steps = [step for step in progress if step.party == party]
        assert len(steps) > 3
        assert [step.done for step in steps] == sorted({step.done for step in steps})
        assert steps[-1].done == steps[-1].total
        assert {step.work for step in steps} == {"comparing bins"}

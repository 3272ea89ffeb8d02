"""Intersection by VOLE: the field, the store and its bound, what only it can get wrong."""

import math
import secrets
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.psi import store as stores
from apfed_protocols.psi import vole as outputs
from apfed_protocols.psi.interface import IntersectionAgreement
from apfed_protocols.psi.store import (
    DENSE,
    DependentRowsError,
    Encoder,
    Multiplier,
    Rows,
    cells_for,
    decode,
    digest_ids,
    expected_dependent_sets,
    from_bytes,
    random_elements,
    to_bytes,
)
from apfed_protocols.psi.vole import (
    DEAL,
    Desk,
    HubShare,
    Kind,
    MemberShare,
    VoleIntersection,
    deal,
    hash_values,
    match,
    tag_bytes,
    vector_elements,
)
from apfed_protocols.randomness import fresh_key
from tests.contracts.intersections import Change, Intersection, Sets, of_kind, stocked

IDS = [b"person %d" % k for k in range(3000)]


def as_ints(elements: NDArray[np.uint64]) -> list[int]:
    return [int.from_bytes(to_bytes(one[None]), "little") for one in elements]


def product(left: int, right: int) -> int:
    """By the definition: carry-less, then modulo x^128 + x^7 + x^2 + x + 1."""
    found = 0
    for bit in range(128):
        if right >> bit & 1:
            found ^= left << bit
    for bit in range(255, 127, -1):
        if found >> bit & 1:
            found ^= (1 << bit) | (0x87 << (bit - 128))
    return found


def test_products_are_those_of_the_field() -> None:
    factor = secrets.token_bytes(16)
    elements = random_elements(fresh_key(), b"test", 40)
    elements = np.concatenate([elements, from_bytes(bytes(16) + b"\xff" * 16 + b"\1" + bytes(15))])
    expected = [product(one, int.from_bytes(factor, "little")) for one in as_ints(elements)]
    assert as_ints(Multiplier(factor).times(elements)) == expected


def test_what_the_dealer_hands_out_is_a_vector_ole() -> None:
    hubs, members = deal(vector_elements(20))
    hub, member = HubShare.of(hubs), MemberShare.of(members, dealer="d")
    store = random_elements(fresh_key(), b"store", vector_elements(20))
    assert len(hub.c) == len(store)
    sent = hub.masked(store, head=b"head")
    assert sent[:4] == b"head"
    unmasked = member.unmasked("hub", sent[4:])
    assert (unmasked == (hub.c ^ member.delta.times(store))).all()


def test_a_store_gives_each_id_its_value() -> None:
    for count in [0, 1, 2, 7, 60, 3000]:
        cells = cells_for(count)
        rows = Rows.of(digest_ids(IDS[:count], fresh_key()), cells)
        assert all(len(set(three)) == 3 for three in rows.cells.tolist())
        assert not count or (rows.cells.min() >= 0 and rows.cells.max() < cells)
        values = random_elements(fresh_key(), b"test", count)
        store = Encoder(rows, cells).encode(values)
        assert (decode(store, rows) == values).all()
        assert len(np.unique(store, axis=0)) == cells + DENSE  # cells that nobody needs are random


def test_rows_that_cannot_be_peeled_are_solved() -> None:
    """At this density hundreds of rows are left, in which every cell is used twice or more."""
    count, cells = 900, 1000
    rows = Rows.of(digest_ids(IDS[:count], fresh_key()), cells)
    _, left = stores._peel(rows.cells, cells)
    assert len(left) > 100
    values = random_elements(fresh_key(), b"test", count)
    assert (decode(Encoder(rows, cells).encode(values), rows) == values).all()


def test_dependent_rows_are_refused() -> None:
    one = Rows.of(digest_ids(IDS[:1] * 2, fresh_key()), cells_for(2))
    with pytest.raises(DependentRowsError):
        Encoder(one, cells_for(2)).encode(random_elements(fresh_key(), b"test", 2))


@pytest.mark.parametrize("dense", [3, 4])
def test_the_bound_is_kept_and_near(monkeypatch: pytest.MonkeyPatch, dense: int) -> None:
    """With few dense bits and cells encoding fails often enough to be counted.

    One bit fewer or more would double or halve the number, which both limits tell apart.
    """
    monkeypatch.setattr(stores, "DENSE", dense)
    count, cells, tries = 14, 18, 6000
    failed = 0
    for _ in range(tries):
        rows = Rows.of(digest_ids(IDS[:count], fresh_key()), cells)
        try:
            stores._solve(
                np.zeros((cells + dense, 2), np.uint64), rows, np.zeros((count, 2), np.uint64),
                np.arange(count),
            )  # fmt: skip
        except DependentRowsError:
            failed += 1
    expected = tries * (expected_dependent_sets(count, cells) - 1) / 2**dense
    assert abs(failed - 0.95 * expected) < 4 * math.sqrt(expected)


def test_real_parameters_fail_below_two_to_the_minus_forty_seven() -> None:
    for count in [1, 3, 30, 1000, 20_000]:
        assert 1 <= expected_dependent_sets(count, cells_for(count)) < 2
        assert DENSE == 48


def test_tags_of_sets_beyond_chance() -> None:
    assert tag_bytes(1, 1) == 8
    assert tag_bytes(100_000, 100_000) == 10
    assert tag_bytes(10**7, 10**7) == 11
    assert tag_bytes(1, 10**7) == 11, "a member's own IDs must differ, too"


def test_tags_that_begin_alike_are_told_apart() -> None:
    own = np.zeros((3, 10), np.uint8)
    own[:, 9] = [1, 2, 3]
    theirs = np.array(own[[2, 0]])
    assert match(own, theirs, sender="p").tolist() == [1, -1, 0]
    with pytest.raises(RemoteProtocolError, match="p sent a tag twice"):
        match(own, theirs[[0, 0]], sender="p")


def test_two_ids_of_the_hub_with_one_tag_are_not_taken_for_an_intersection() -> None:
    own = np.array([1, 2, 1, 3], np.uint8).repeat(8).reshape(4, 8)
    theirs = np.array([9, 2, 7], np.uint8).repeat(8).reshape(3, 8)
    assert match(own, theirs, sender="p").tolist() == [-1, 1, -1, -1]


def test_tags_are_matched_in_parts_as_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tags = hash_values(random_elements(fresh_key(), b"test", 900), fresh_key(), 9)
    own, theirs = tags[:600], tags[300:][::-1]
    at_once = match(own, theirs, sender="p")
    monkeypatch.setattr(outputs, "_MATCHED", 100)
    assert match(own, theirs, sender="p").tolist() == at_once.tolist()
    assert at_once.tolist() == [-1] * 300 + list(range(599, 299, -1))
    with pytest.raises(RemoteProtocolError, match="p sent a tag twice"):
        match(own, np.concatenate([theirs, theirs[:1]]), sender="p")


def test_the_hash_depends_on_all_of_its_input() -> None:
    values = np.eye(2, dtype=np.uint64).repeat(2, axis=0) * np.array(
        [[1], [2], [1], [2]], np.uint64
    )
    tags = {bytes(tag) for key in (bytes(32), fresh_key()) for tag in hash_values(values, key, 8)}
    assert len(tags) == 8


def _ahead(hub: int, member: int) -> IntersectionAgreement:
    return IntersectionAgreement(
        session="s", dealer="dealer", ahead=True, sizes={"hub": hub, "p": member}
    )


def _played(agreement: IntersectionAgreement, sets: Sets, change: Change | None = None) -> Any:
    supplies = stocked(VoleIntersection, agreement)
    return Intersection(VoleIntersection, sets, agreement, supplies=supplies, change=change).play()


def test_dealt_ahead_the_dealer_has_no_part_and_sizes_stay_hidden() -> None:
    lengths = set()
    for hub, member in ((50, 60), (3, 2)):
        played = _played(_ahead(50, 60), {"hub": IDS[:hub], "p": IDS[1 : 1 + member]})
        played.check()
        assert not [out for sender, out in played.sent if "dealer" in (sender, out.receiver)]
        lengths.add(tuple(len(out.body) for _, out in played.sent if out.body[1] != Kind.ROWS))
        assert len(played.aligners["hub"].rows) == min(hub - 1, member)
    assert len(lengths) == 1


def test_more_ids_than_agreed_are_refused() -> None:
    backend = VoleIntersection(IntersectionAgreement(session="s", dealer="dealer", sizes={"p": 2}))
    with pytest.raises(LocalProtocolError, match="p has 3 IDs, the parties agreed"):
        backend.member("p", "hub", IDS[:3])


def test_another_key_part_than_committed_to_is_refused() -> None:
    lie = of_kind("p", Kind.TAGS, lambda body: bytes([body[0] ^ 1]) + body[1:])
    with pytest.raises(RemoteProtocolError, match="p showed another key part than it committed"):
        _played(_ahead(4, 4), {"hub": IDS[:4], "p": IDS[:4]}, lie)


def test_an_order_beyond_the_agreement_is_refused() -> None:
    small = IntersectionAgreement(session="s", dealer="dealer", maximum_ids=10)
    dealer = VoleIntersection(small).dealer("hub", ["p"])
    dealer.start()
    (order,) = Desk("hub", small).turn(Kind.DEAL, {"dealer": DEAL.pack(11)}, ()).outgoing
    with pytest.raises(RemoteProtocolError, match="hub orders a vector for 11 IDs"):
        dealer.receive("hub", order.body)

"""Intersection by VOLE: the field, the store and its bound, what only it can get wrong."""

import math
import secrets
from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from apfed_protocols.conversation import Outgoing
from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.psi import store as stores
from apfed_protocols.psi import vole as outputs
from apfed_protocols.psi.circuit import CircuitIntersection, OpprfIntersection
from apfed_protocols.psi.circuit import Kind as CircuitKind
from apfed_protocols.psi.interface import (
    IntersectionAgreement,
    IntersectionTooSmallError,
    Output,
)
from apfed_protocols.psi.store import (
    DENSE_CELLS,
    DependentEquationsError,
    Encoder,
    Equations,
    Multiplier,
    count_cells,
    decode_values,
    digest_ids,
    expand_elements,
    extract_id_hashes,
    from_bytes,
    to_bytes,
)
from apfed_protocols.psi.vole import (
    OLE_NAME_BYTES,
    ORDER,
    Kind,
    VoleIntersection,
    count_member_dealt_bytes,
    count_tag_bytes,
    hash_values,
    match_tags,
)
from apfed_protocols.randomness import fresh_key
from tests.contracts.intersections import HEADER, Change, Intersection, change_kind
from tests.refusals import list_unrefused

IDS = [b"person %d" % k for k in range(3000)]


def as_ints(elements: NDArray[np.uint64]) -> list[int]:
    return [int.from_bytes(to_bytes(one[None]), "little") for one in elements]


def multiply_elements(left: int, right: int) -> int:
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
    elements = expand_elements(fresh_key(), b"test", 40)
    elements = np.concatenate([elements, from_bytes(bytes(16) + b"\xff" * 16 + b"\1" + bytes(15))])
    expected = [
        multiply_elements(one, int.from_bytes(factor, "little")) for one in as_ints(elements)
    ]
    assert as_ints(Multiplier(factor).multiply_elements(elements)) == expected


@pytest.mark.parametrize("count", [0, 1, 2, 7, 60, 3000])
def test_a_store_gives_each_id_its_value(count: int) -> None:
    cells = count_cells(count)
    rows = Equations.from_digests(digest_ids(IDS[:count], fresh_key()), cells)
    assert all(len(set(three)) == 3 for three in rows.sparse_cells.tolist())
    assert not count or (rows.sparse_cells.min() >= 0 and rows.sparse_cells.max() < cells)
    values = expand_elements(fresh_key(), b"test", count)
    store = Encoder(rows, cells).encode(values)
    assert (decode_values(store, rows) == values).all()
    assert (
        len(np.unique(store, axis=0)) == cells + DENSE_CELLS
    )  # cells that nobody needs are random


def test_rows_that_cannot_be_peeled_are_solved() -> None:
    """At this density hundreds of rows are left, in which every cell is used twice or more."""
    count = 900
    cells = 1000
    rows = Equations.from_digests(digest_ids(IDS[:count], fresh_key()), cells)
    _, left = stores._peel_equations(rows.sparse_cells, cells)
    assert len(left) > 100
    values = expand_elements(fresh_key(), b"test", count)
    assert (decode_values(Encoder(rows, cells).encode(values), rows) == values).all()


def test_dependent_rows_are_refused() -> None:
    one = Equations.from_digests(digest_ids(IDS[:1] * 2, fresh_key()), count_cells(2))
    with pytest.raises(DependentEquationsError):
        Encoder(one, count_cells(2)).encode(expand_elements(fresh_key(), b"test", 2))


def count_dependent_sets(ids: int, cells: int) -> float:
    """The expected number of sets of rows whose sparse parts add up to nothing.

    The mean over all vectors of GF(2)^m of (1 + r)^n, where r is the correlation of a row of three
    different ones with that vector: a Krawtchouk polynomial over a binomial coefficient.
    """
    total = 0.0
    for weight in range(cells + 1):
        odd = sum(math.comb(weight, k) * math.comb(cells - weight, 3 - k) for k in (1, 3))
        correlation = 1 - 2 * odd / math.comb(cells, 3)
        if correlation > -1:
            log = math.lgamma(cells + 1) - math.lgamma(weight + 1) - math.lgamma(cells - weight + 1)
            total += math.exp(log + ids * math.log1p(correlation) - cells * math.log(2))
    return total


def test_the_bound_is_kept_and_near(monkeypatch: pytest.MonkeyPatch) -> None:
    """With few dense bits and cells encoding fails often enough to be counted.

    One bit fewer or more would double or halve the number, which both limits tell apart.
    """
    dense = 4
    count = 14
    cells = 18
    tries = 6000
    failed = 0
    monkeypatch.setattr(stores, "DENSE_CELLS", dense)
    for _ in range(tries):
        rows = Equations.from_digests(digest_ids(IDS[:count], fresh_key()), cells)
        try:
            stores._solve_cells(
                np.zeros((cells + dense, 2), np.uint64),
                rows,
                np.zeros((count, 2), np.uint64),
                np.arange(count),
            )
        except DependentEquationsError:
            failed += 1
    expected = tries * (count_dependent_sets(count, cells) - 1) / 2**dense
    assert abs(failed - 0.95 * expected) < 4 * math.sqrt(expected)


@pytest.mark.parametrize("count", [1, 3, 30, 1000, 20_000])
def test_real_parameters_fail_below_two_to_the_minus_forty_seven(count: int) -> None:
    assert 1 <= count_dependent_sets(count, count_cells(count)) < 2
    assert DENSE_CELLS == 48


def test_tags_of_sets_beyond_chance() -> None:
    assert count_tag_bytes(1, 1) == 8
    assert count_tag_bytes(100_000, 100_000) == 10
    assert count_tag_bytes(10**7, 10**7) == 11
    assert count_tag_bytes(1, 10**7) == 11, "a member's own IDs must differ, too"


def test_tags_that_begin_alike_are_told_apart() -> None:
    own = np.zeros((3, 10), np.uint8)
    own[:, 9] = [1, 2, 3]
    theirs = np.array(own[[2, 0]])
    assert match_tags(own, theirs, sender="p").tolist() == [1, -1, 0]
    with pytest.raises(RemoteProtocolError, match="p sent a tag twice"):
        match_tags(own, theirs[[0, 0]], sender="p")


def test_two_ids_of_the_hub_with_one_tag_are_not_taken_for_an_intersection() -> None:
    own = np.array([1, 2, 1, 3], np.uint8).repeat(8).reshape(4, 8)
    theirs = np.array([9, 2, 7], np.uint8).repeat(8).reshape(3, 8)
    assert match_tags(own, theirs, sender="p").tolist() == [-1, 1, -1, -1]


def test_tags_are_matched_in_parts_as_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tags = hash_values(expand_elements(fresh_key(), b"test", 900), fresh_key(), 9)
    own = tags[:600]
    theirs = tags[300:][::-1]
    at_once = match_tags(own, theirs, sender="p")
    monkeypatch.setattr(outputs, "_TAGS_PER_GROUP", 100)
    assert match_tags(own, theirs, sender="p").tolist() == at_once.tolist()
    assert at_once.tolist() == [-1] * 300 + list(range(599, 299, -1))
    with pytest.raises(RemoteProtocolError, match="p sent a tag twice"):
        match_tags(own, np.concatenate([theirs, theirs[:1]]), sender="p")


def test_the_hash_depends_on_all_of_its_input() -> None:
    values = np.eye(2, dtype=np.uint64).repeat(2, axis=0) * np.array(
        [[1], [2], [1], [2]], np.uint64
    )
    tags = {bytes(tag) for key in (bytes(32), fresh_key()) for tag in hash_values(values, key, 8)}
    assert len(tags) == 8


# `vole` and `opprf` against parties that send what they like, and agreed sizes.

FORTY = [b"person %d" % k for k in range(40)]
SETS = {"hub": FORTY[:20], "p": FORTY[10:40]}
KINDS: Mapping[str, Any] = {
    "vole": VoleIntersection,
    "opprf": OpprfIntersection,
    "circuit": CircuitIntersection,
}
BOTH = pytest.mark.parametrize("name", ["vole", "opprf"])


def _make_agreement(**more: Any) -> IntersectionAgreement:
    return IntersectionAgreement(session="s", dealer="dealer", **more)


def _playing(
    name: str, change: Change | None = None, agreement: IntersectionAgreement | None = None
) -> Intersection:
    return Intersection(KINDS[name], SETS, agreement or _make_agreement(), change=change).play()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("liar", ["hub", "p", "dealer"])
def test_bodies_of_another_length_are_refused_by_the_senders_name(name: str, liar: str) -> None:
    """A byte less or more, well framed, in whichever message there is."""
    bodies = [out.body[HEADER:] for sender, out in _playing(name).sent if sender == liar]

    def play_with(position: int, longer: bool) -> Intersection:
        left = iter(range(len(bodies)))

        def tamper(sender: str, out: Outgoing) -> bytes:
            if sender != liar or next(left) != position:
                return out.body
            change = change_kind(liar, out.body[1], lambda b: b + b"\0" if longer else b[:-1])
            return change(sender, out)

        return _playing(name, tamper)

    cases = [
        (f"^{liar} ", place, longer)
        for place, longer in product(range(len(bodies)), (False, True))
        if bodies[place] or longer
    ]
    assert list_unrefused(RemoteProtocolError, play_with, cases) == []


@BOTH
@pytest.mark.parametrize("size", [19, 21])
def test_orders_of_another_size_than_agreed_are_refused(size: int, name: str) -> None:
    """Also of a smaller one: members expand what they were dealt to the agreed size."""
    order = {"vole": Kind.DEAL, "opprf": CircuitKind.CORRELATE}[name]
    agreement = _make_agreement(sizes={"hub": 20, "p": 30})
    change = change_kind("hub", order, lambda _: ORDER.pack(size))
    with pytest.raises(RemoteProtocolError, match=f"hub orders a vector for {size} IDs.*on 20"):
        _playing(name, change, agreement)


@BOTH
def test_what_was_dealt_another_time_is_refused(name: str) -> None:
    """No ID would be found."""
    kind = {"vole": Kind.DEALT, "opprf": CircuitKind.CORRELATED}[name]
    lengths = set()

    def to_the_hub(body: bytes) -> bytes:
        lengths.add(len(body))
        at_member = len(body) == count_member_dealt_bytes()
        return body if at_member else bytes(OLE_NAME_BYTES) + body[OLE_NAME_BYTES:]

    with pytest.raises(RemoteProtocolError, match="hub uses what was dealt another time"):
        _playing(name, change_kind("dealer", kind, to_the_hub))
    assert len(lengths) == 2


def test_the_hubs_store_solves_as_many_equations_as_the_printed_bound() -> None:
    """Of 91 for two agreed IDs, most sets of 80 IDs have a store; none of 92 has one."""
    bound = VoleIntersection.max_guesses(2).hub
    solved = {80: 0, bound + 1: 0}
    wrong: list[tuple[int, int]] = []
    for number, count in product(range(20), solved):
        digests = digest_ids([b"%d %d" % (number, k) for k in range(count)], bytes(32))
        rows = Equations.from_digests(digests, count_cells(2))
        try:
            store = Encoder(rows, count_cells(2)).encode(extract_id_hashes(digests))
        except DependentEquationsError:
            continue
        solved[count] += 1
        if not np.array_equal(decode_values(store, rows), extract_id_hashes(digests)):
            wrong.append((number, count))
    assert wrong == []
    assert solved[80] > 10
    assert solved[bound + 1] == 0


@pytest.mark.parametrize("backend", [OpprfIntersection, CircuitIntersection])
def test_the_minimum_stops_no_hub_that_alters_its_share_of_the_count(backend: Any) -> None:
    """As `leaks` of both say: the dealer counts bits that the hub turned over."""
    agreement = _make_agreement(minimum_rows=15, output=Output.HUB_ROWS)
    with pytest.raises(IntersectionTooSmallError):
        _ = Intersection(backend, SETS, agreement).play(refusing=True).aligners["hub"].rows
    turned = change_kind("hub", CircuitKind.COUNT, lambda body: bytes(255 - byte for byte in body))
    rows = Intersection(backend, SETS, agreement, change=turned).play().aligners["hub"].rows
    assert sorted(rows) == list(range(10, 20))
    assert any("also below the minimum" in leak for leak in backend.leaks)

"""`vole` and `opprf` against parties that send what they like, and supplies that do not belong."""

from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np
import pytest

from apfed_protocols.conversation import Outgoing
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.psi.circuit import CircuitIntersection
from apfed_protocols.psi.circuit import Kind as CircuitKind
from apfed_protocols.psi.interface import (
    IntersectionAgreement,
    IntersectionTooSmallError,
    Output,
    Supply,
)
from apfed_protocols.psi.opprf import OpprfIntersection
from apfed_protocols.psi.store import (
    DependentRowsError,
    Encoder,
    Rows,
    cells_for,
    decode,
    digest_ids,
    targets_of,
)
from apfed_protocols.psi.vole import COMMIT, HELLO, Kind, VoleIntersection, member_dealt_bytes
from tests.contracts.intersections import HEADER, Change, Intersection, of_kind, stocked

IDS = [b"person %d" % k for k in range(40)]
SETS = {"hub": IDS[:20], "p": IDS[10:40]}
KINDS: Mapping[str, Any] = {"vole": VoleIntersection, "opprf": OpprfIntersection}
BOTH = pytest.mark.parametrize("name", KINDS)


def _agreed(*, session: str = "s", ahead: bool = False, **more: Any) -> IntersectionAgreement:
    sizes = {"hub": 20, "p": 30} if ahead else {}
    return IntersectionAgreement(session=session, dealer="dealer", ahead=ahead, sizes=sizes, **more)


def _played(
    name: str, change: Change | None = None, agreement: IntersectionAgreement | None = None,
    supplies: Mapping[str, Supply] | None = None,
) -> Intersection:  # fmt: skip
    agreement = agreement or _agreed()
    return Intersection(KINDS[name], SETS, agreement, supplies=supplies, change=change).play()


@BOTH
@pytest.mark.parametrize("liar", ["hub", "p", "dealer"])
def test_bodies_of_another_length_are_refused_by_the_senders_name(name: str, liar: str) -> None:
    """A byte less or more, well framed, in whichever message there is."""
    bodies = [out.body[HEADER:] for sender, out in _played(name).sent if sender == liar]
    for place, longer in product(range(len(bodies)), (False, True)):
        if not bodies[place] and not longer:
            continue
        left = iter(range(len(bodies)))

        def tamper(
            sender: str, out: Outgoing, left: Any = left, place: int = place, longer: bool = longer
        ) -> bytes:
            if sender != liar or next(left) != place:
                return out.body
            change = of_kind(liar, out.body[1], lambda b: b + b"\0" if longer else b[:-1])
            return change(sender, out)

        with pytest.raises(RemoteProtocolError, match=f"^{liar} "):
            _played(name, tamper)


def test_sizes_above_the_limit_are_refused() -> None:
    hello = of_kind("hub", Kind.HELLO, lambda body: HELLO.pack(HELLO.unpack(body)[0], 101))
    commit = of_kind("p", Kind.COMMIT, lambda body: COMMIT.pack(COMMIT.unpack(body)[0], 2**32 - 1))
    for change, said in ((hello, "hub announces 101 IDs"), (commit, "p announces 4294967295 IDs")):
        with pytest.raises(RemoteProtocolError, match=said):
            _played("vole", change, _agreed(maximum_ids=100))


@BOTH
def test_orders_of_another_size_than_agreed_are_refused(name: str) -> None:
    """Also of a smaller one: members expand what they were dealt to the agreed size."""
    order = {"vole": Kind.DEAL, "opprf": CircuitKind.CORRELATE}[name]
    for size in (19, 21):
        body = size.to_bytes(4, "big")
        with pytest.raises(RemoteProtocolError, match=f"hub orders a vector for {size} IDs.*on 20"):
            stocked(KINDS[name], _agreed(ahead=True), of_kind("hub", order, lambda _, b=body: b))  # type: ignore[misc]


def test_a_delta_of_zero_is_refused() -> None:
    zero = of_kind("dealer", Kind.DEALT, lambda body: (
        body[:-16] + bytes(16) if len(body) == member_dealt_bytes() else body
    ))  # fmt: skip
    with pytest.raises(RemoteProtocolError, match="dealer dealt a Delta of zero"):
        _played("vole", zero)


@BOTH
def test_supplies_are_used_once_by_one_party_in_one_session(name: str) -> None:
    agreement, other = _agreed(ahead=True), _agreed(ahead=True, session="other")
    supplies, more = stocked(KINDS[name], agreement), stocked(KINDS[name], agreement)
    with pytest.raises(LocalProtocolError, match="dealt to hub, or under another agreement"):
        _played(name, None, other, supplies)
    with pytest.raises(LocalProtocolError, match="dealt to p, or under another agreement"):
        _played(name, None, agreement, {"hub": supplies["p"], "p": supplies["hub"]})
    # Of one session, but not of one another: no ID would be found.
    with pytest.raises(RemoteProtocolError, match="hub uses what was dealt another time"):
        _played(name, None, agreement, {"hub": more["hub"], "p": supplies["p"]})
    stored = more["p"].to_bytes()
    twice = [Supply.from_bytes(stored) for _ in range(2)]
    fresh = stocked(KINDS[name], agreement)
    _played(name, None, agreement, fresh)
    with pytest.raises(LocalProtocolError, match="hub: a supply is used once"):
        _played(name, None, agreement, fresh)
    backend = KINDS[name](agreement)
    backend.member("p", "hub", IDS[10:40], supply=twice[0])
    with pytest.raises(LocalProtocolError, match="p: a supply is used once"):
        backend.member("p", "hub", IDS[10:40], supply=twice[1])


def test_rows_that_cannot_be_and_a_tag_twice_are_refused() -> None:
    for places, message in (
        ([0, 0], "hub opened 2 rows, of which 1 differ"),
        ([1, 30], "hub names place 30 of a list of 30 IDs"),
        (list(range(21)), "hub opened 21 rows, of which 21 differ, with a set of 20 IDs"),
    ):
        rows = np.array(places, ">u4").tobytes()
        with pytest.raises(RemoteProtocolError, match=message):
            _played("vole", of_kind("hub", Kind.ROWS, lambda _, rows=rows: rows))  # type: ignore[misc]
    with pytest.raises(RemoteProtocolError, match="p sent a tag twice"):
        _played("vole", of_kind("p", Kind.TAGS, lambda body: body[:-8] + body[-16:-8]))


def test_two_sessions_make_different_things_of_equal_sets() -> None:
    """Keys, vectors and tags are fresh: nothing of one session is found in the other.

    But for places of common IDs, small numbers that may meet.
    """
    cells: list[set[bytes]] = []
    for _ in range(2):
        bodies = [out.body for _, out in _played("vole").sent if out.body[1] != Kind.ROWS]
        long = [body[HEADER:] for body in bodies if len(body) > HEADER + 32]
        cells.append({body[k : k + 8] for body in long for k in range(0, len(body) - 7, 8)})
    assert not cells[0] & cells[1]


def test_the_hubs_store_solves_as_many_equations_as_the_printed_bound() -> None:
    """Of 91 for two agreed IDs, most sets of 80 IDs have a store; none of 92 has one."""
    bound = VoleIntersection.most_guesses(2).hub
    solved = {80: 0, bound + 1: 0}
    for number, count in product(range(20), solved):
        digests = digest_ids([b"%d %d" % (number, k) for k in range(count)], bytes(32))
        rows = Rows.of(digests, cells_for(2))
        try:
            store = Encoder(rows, cells_for(2)).encode(targets_of(digests))
        except DependentRowsError:
            continue
        solved[count] += 1
        assert (decode(store, rows) == targets_of(digests)).all()
    assert solved[80] > 10
    assert solved[bound + 1] == 0


@pytest.mark.parametrize("backend", [OpprfIntersection, CircuitIntersection])
def test_the_minimum_stops_no_hub_that_alters_its_share_of_the_count(backend: Any) -> None:
    """As `leaks` of both say: the dealer counts bits that the hub turned over."""
    agreement = _agreed(minimum_rows=15, output=Output.HUB_ROWS)
    with pytest.raises(IntersectionTooSmallError):
        _ = Intersection(backend, SETS, agreement).play(refusing=True).aligners["hub"].rows
    turned = of_kind("hub", CircuitKind.COUNT, lambda body: bytes(255 - byte for byte in body))
    rows = Intersection(backend, SETS, agreement, change=turned).play().aligners["hub"].rows
    assert sorted(rows) == list(range(10, 20))
    assert any("also below the minimum" in leak for leak in backend.leaks)

"""`vole` and `opprf` against parties that send what they like, and supplies that do not belong."""

from collections.abc import Callable, Mapping
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
    ScriptedRole,
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
from apfed_protocols.psi.vole import (
    COMMIT,
    HELLO,
    Kind,
    VoleIntersection,
    member_dealt_bytes,
)
from tests.protocols.scripted import play

IDS = [b"person %d" % k for k in range(40)]
HEADER = 22
KINDS: Mapping[str, Any] = {
    "vole": VoleIntersection,
    "opprf": OpprfIntersection,
}
BOTH = pytest.mark.parametrize("name", KINDS)

Tamper = Callable[[int, Outgoing], bytes]


def _agreed(*, session: str = "s", ahead: bool = False, **more: Any) -> IntersectionAgreement:
    sizes = {"hub": 20, "p": 30} if ahead else {}
    return IntersectionAgreement(session=session, dealer="dealer", ahead=ahead, sizes=sizes, **more)


def _roles(name: str, agreement: IntersectionAgreement) -> dict[str, Any]:
    backend = KINDS[name](agreement)
    return {
        "hub": backend.hub("hub", ["p"], IDS[:20]),
        "p": backend.member("p", "hub", IDS[10:40]),
        "dealer": backend.dealer("hub", ["p"]),
    }


def _tampered(role: ScriptedRole, tamper: Tamper) -> Any:
    """The role, whose k-th message is what `tamper` makes of it."""
    start, receive, sent = role.start, role.receive, 0

    def altered(messages: Any) -> list[Outgoing]:
        nonlocal sent
        found = []
        for one in messages:
            found.append(Outgoing(one.receiver, tamper(sent, one)))
            sent += 1
        return found

    changed: Any = role
    changed.start = lambda: altered(start())
    changed.receive = lambda sender, body: altered(receive(sender, body))
    return changed


def _stocked(name: str, agreement: IntersectionAgreement) -> dict[str, Supply]:
    stocking = KINDS[name](agreement)
    roles = {"hub": stocking.stock_hub("hub", ["p"]), "p": stocking.stock_member("p", "hub")}
    play({**roles, "dealer": stocking.stock_dealer("hub", ["p"])})
    return {party: role.supply for party, role in roles.items()}


def _with_supplies(
    name: str, agreement: IntersectionAgreement, supplies: Mapping[str, Supply]
) -> dict[str, Any]:
    backend = KINDS[name](agreement)
    return {
        "hub": backend.hub("hub", ["p"], IDS[:20], supply=supplies["hub"]),
        "p": backend.member("p", "hub", IDS[10:40], supply=supplies["p"]),
        "dealer": backend.dealer("hub", ["p"]),
    }


def _framed(message: bytes, body: bytes) -> bytes:
    """The message with another body, whose length its header tells truly."""
    return message[: HEADER - 4] + len(body).to_bytes(4, "big") + body


def _of_kind(kind: int, change: Callable[[bytes], bytes]) -> Tamper:
    def tamper(_: int, one: Outgoing) -> bytes:
        body = one.body
        return _framed(body, change(body[HEADER:])) if body[1] == kind else body

    return tamper


@BOTH
@pytest.mark.parametrize("liar", ["hub", "p", "dealer"])
@pytest.mark.parametrize("longer", [False, True])
def test_bodies_of_another_length_are_refused_by_the_senders_name(
    name: str, liar: str, longer: bool
) -> None:
    """A byte less or more, well framed, in whichever message there is."""
    bodies: list[bytes] = []

    def note(_: int, one: Outgoing) -> bytes:
        bodies.append(one.body[HEADER:])
        return one.body

    roles = _roles(name, _agreed())
    roles[liar] = _tampered(roles[liar], note)
    play(roles)
    places = [at for at, body in enumerate(bodies) if body or longer]
    assert places
    for place in places:

        def tamper(at: int, one: Outgoing, place: int = place) -> bytes:
            body = one.body[HEADER:]
            changed = body + b"\0" if longer else body[:-1]
            return _framed(one.body, changed) if at == place else one.body

        roles = _roles(name, _agreed())
        roles[liar] = _tampered(roles[liar], tamper)
        with pytest.raises(RemoteProtocolError, match=f"^{liar} "):
            play(roles)


def test_sizes_above_the_limit_are_refused() -> None:
    hello = _of_kind(Kind.HELLO, lambda body: HELLO.pack(HELLO.unpack(body)[0], 101))
    commit = _of_kind(Kind.COMMIT, lambda body: COMMIT.pack(COMMIT.unpack(body)[0], 2**32 - 1))
    for liar, tamper, announced in (("hub", hello, 101), ("p", commit, 2**32 - 1)):
        roles = _roles("vole", _agreed(maximum_ids=100))
        roles[liar] = _tampered(roles[liar], tamper)
        with pytest.raises(RemoteProtocolError, match=f"{liar} announces {announced} IDs"):
            play(roles)


@BOTH
def test_orders_of_another_size_than_agreed_are_refused(name: str) -> None:
    """Also of a smaller one: members expand what they were dealt to the agreed size."""
    agreement = _agreed(ahead=True)
    stocking = KINDS[name](agreement)
    for size in (19, 21):
        hub = _tampered(
            stocking.stock_hub("hub", ["p"]),
            lambda k, one, size=size: (  # type: ignore[misc]
                _framed(one.body, size.to_bytes(4, "big")) if k == 0 else one.body
            ),
        )
        with pytest.raises(RemoteProtocolError, match=f"hub orders a vector for {size} IDs.*on 20"):
            play({"hub": hub, "p": stocking.stock_member("p", "hub"),
                  "dealer": stocking.stock_dealer("hub", ["p"])})  # fmt: skip


def test_a_delta_of_zero_is_refused() -> None:
    roles = _roles("vole", _agreed())
    tamper = _of_kind(Kind.DEALT, lambda body: (
        body[:-16] + bytes(16) if len(body) == member_dealt_bytes() else body
    ))  # fmt: skip
    roles["dealer"] = _tampered(roles["dealer"], tamper)
    with pytest.raises(RemoteProtocolError, match="dealer dealt a Delta of zero"):
        play(roles)


@BOTH
def test_supplies_of_two_dealings_are_told_apart(name: str) -> None:
    """They are of one session, but not of one another: no ID would be found."""
    agreement = _agreed(ahead=True)
    first, second = _stocked(name, agreement), _stocked(name, agreement)
    mixed = {"hub": first["hub"], "p": second["p"]}
    with pytest.raises(RemoteProtocolError, match="hub uses what was dealt another time"):
        play(_with_supplies(name, agreement, mixed))


@BOTH
def test_supplies_are_used_once_by_one_party_in_one_session(name: str) -> None:
    agreement, other = _agreed(ahead=True), _agreed(ahead=True, session="other")
    supplies = _stocked(name, agreement)
    with pytest.raises(LocalProtocolError, match="dealt to hub, or under another agreement"):
        _with_supplies(name, other, supplies)
    with pytest.raises(LocalProtocolError, match="dealt to p, or under another agreement"):
        _with_supplies(name, agreement, {"hub": supplies["p"], "p": supplies["hub"]})
    play(_with_supplies(name, agreement, supplies))
    with pytest.raises(LocalProtocolError, match="hub: a supply is used once"):
        _with_supplies(name, agreement, supplies)


@BOTH
def test_a_supply_that_was_read_twice_serves_one_intersection(name: str) -> None:
    agreement = _agreed(ahead=True)
    supplies = _stocked(name, agreement)
    stored = supplies["p"].to_bytes()
    twice = [Supply.from_bytes(stored) for _ in range(2)]
    play(_with_supplies(name, agreement, {"hub": supplies["hub"], "p": twice[0]}))
    backend = KINDS[name](agreement)
    with pytest.raises(LocalProtocolError, match="p: a supply is used once"):
        backend.member("p", "hub", IDS[10:40], supply=twice[1])


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ([0, 0], "hub opened 2 rows, of which 1 differ"),
        ([1, 30], "hub names place 30 of a list of 30 IDs"),
        (list(range(21)), "hub opened 21 rows, of which 21 differ, with a set of 20 IDs"),
    ],
)
def test_rows_that_cannot_be_are_refused(places: list[int], message: str) -> None:
    rows = np.array(places, ">u4").tobytes()
    roles = _roles("vole", _agreed())
    roles["hub"] = _tampered(roles["hub"], _of_kind(Kind.ROWS, lambda _: rows))
    with pytest.raises(RemoteProtocolError, match=message):
        play(roles)


def test_a_tag_twice_is_refused() -> None:
    roles = _roles("vole", _agreed())
    twice = _of_kind(Kind.TAGS, lambda body: body[:-8] + body[-16:-8])
    roles["p"] = _tampered(roles["p"], twice)
    with pytest.raises(RemoteProtocolError, match="p sent a tag twice"):
        play(roles)


def test_two_sessions_make_different_things_of_equal_sets() -> None:
    """Keys, vectors and tags are fresh: nothing of one session is found in the other.

    But for places of common IDs, small numbers that may meet.
    """
    cells: list[set[bytes]] = []
    for _ in range(2):
        sent = play(_roles("vole", _agreed()))
        bodies = [body for bodies in sent.values() for body in bodies if body[1] != Kind.ROWS]
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

    def play_with(tamper: Tamper) -> Any:
        roles = {
            "hub": backend(agreement).hub("hub", ["p"], IDS[:20]),
            "p": backend(agreement).member("p", "hub", IDS[10:40]),
            "dealer": backend(agreement).dealer("hub", ["p"]),
        }
        roles["hub"] = _tampered(roles["hub"], tamper)
        play(roles)
        return roles["hub"].rows

    with pytest.raises(IntersectionTooSmallError):
        play_with(_of_kind(CircuitKind.COUNT, lambda body: body))
    turned = _of_kind(CircuitKind.COUNT, lambda body: bytes(255 - byte for byte in body))
    assert sorted(play_with(turned)) == list(range(10, 20))
    assert any("also below the minimum" in leak for leak in backend.leaks)

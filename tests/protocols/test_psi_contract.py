"""What every set intersection must do, for each entry of the table, and what its parties see."""

import itertools
import math
import random
import tracemalloc
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from apfed_protocols.conversation import Outgoing, converse
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.psi import SET_INTERSECTIONS, circuit, ecdh, hashing, transfers
from apfed_protocols.psi.circuit import Kind
from apfed_protocols.psi.ecdh import EcdhHub
from apfed_protocols.psi.interface import (
    Aligner,
    IntersectionAgreement,
    IntersectionTooSmallError,
    Output,
    Progress,
)
from apfed_protocols.psi.ot import Kind as OtKind
from apfed_protocols.psi.vole import Kind as VoleKind
from apfed_protocols.psi.vole import count_member_dealt_bytes
from tests.contracts.hostile import mutate_bytes
from tests.contracts.intersections import (
    DEALER,
    HEADER,
    Intersection,
    Sets,
    change_kind,
    deliver,
)
from tests.refusals import list_unrefused
from tests.with_crypten import usable

HUB = "hub"
BACKENDS = pytest.mark.parametrize("backend", usable(SET_INTERSECTIONS))
DEALT = pytest.mark.parametrize(
    "backend", [name for name in usable(SET_INTERSECTIONS) if SET_INTERSECTIONS[name].needs_dealer]
)


SIZED = pytest.mark.parametrize(
    "backend", [name for name in usable(SET_INTERSECTIONS) if name != "ecdh"]
)


def play(backend: str, sets: Sets) -> tuple[dict[str, NDArray[np.int64]], list[Outgoing]]:
    played = Intersection(backend, sets).play()
    rows = {name: role.rows for name, role in played.aligners.items()}
    return rows, [out for _, out in played.sent]


IDS = st.lists(st.binary(min_size=1, max_size=3), unique=True, max_size=12)


@BACKENDS
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(sets=st.lists(IDS, min_size=2, max_size=4))
def test_any_sets_agree_with_python(backend: str, sets: list[list[bytes]]) -> None:
    named = {HUB: sets[0]} | {f"p{k}": ids for k, ids in enumerate(sets[1:])}
    Intersection(backend, named).play().check()


@BACKENDS
def test_no_message_is_longer_than_the_longest(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under an agreement on just so many IDs, with chunks so small that they do not count."""
    monkeypatch.setattr(circuit, "MAX_CHUNK_SLOTS", 64)
    monkeypatch.setattr(circuit, "_ROSTER_BYTES", 120)
    monkeypatch.setattr(transfers, "BATCH_WORDS", 256)
    size = 200 if backend == "circuit_ot" else 2000  # the bytes of 2,000 IDs take seconds
    ids = [b"id %d" % k for k in range(3 * size // 2)]
    sets = {HUB: ids[:size], "p": ids[size // 2 :], "q": ids[size // 4 : 5 * size // 4]}
    agreement = IntersectionAgreement(session="s", minimum_rows=0, dealer=DEALER, maximum_ids=size)
    longest = SET_INTERSECTIONS[backend](agreement).max_message_bytes
    played = Intersection(backend, sets).play()
    played.check()
    sent = [out for _, out in played.sent]
    assert max(len(out.body) for out in sent) <= longest
    assert longest < 1.5 * max(len(out.body) for out in sent) + 64 * 8 * 2000


@SIZED
def test_what_is_too_long_is_not_kept_until_it_is_awaited(backend: str) -> None:
    agreement = IntersectionAgreement(session="s", dealer=DEALER, maximum_ids=10)
    protocol = SET_INTERSECTIONS[backend](agreement)
    member = protocol.make_member("p", HUB, [b"a", b"b"])
    member.start()
    with pytest.raises(RemoteProtocolError, match=f"p takes at most {protocol.max_message_bytes} "):
        member.receive(HUB, bytes(protocol.max_message_bytes + 1))


@BACKENDS
def test_the_common_order_is_neither_partys_own(backend: str) -> None:
    ids = [str(k).encode() for k in range(200)]
    rows = play(backend, {HUB: ids, "p": ids})[0]
    assert sorted(rows[HUB].tolist()) == list(range(200))
    assert rows[HUB].tolist() != list(range(200))
    assert play(backend, {HUB: ids, "p": ids})[0][HUB].tolist() != rows[HUB].tolist()


@BACKENDS
def test_message_sizes_depend_on_set_sizes_and_the_common_size_only(backend: str) -> None:
    def sizes(offset: int) -> list[tuple[str, int]]:
        hub = [f"h{k + offset}".encode() for k in range(40)] + [b"c1", b"c2"]
        member = [f"m{k}".encode() for k in range(25)] + [b"c1", b"c2"]
        other = [*hub[:offset], *(f"o{k}".encode() for k in range(30 - offset)), b"c1", b"c2"]
        sent = play(backend, {HUB: hub, "p": member, "q": other})[1]
        return [(out.receiver, len(out.body)) for out in sent]

    assert sizes(0) == sizes(20)


UNFIT: dict[str, Any] = {
    r"me has 2 repeated ID\(s\), in row\(s\) 2 \(as 0\), 3 \(as 0\);": [b"a", b"b", b"a", b"a"],
    r"8 repeated .* 5 \(as 0\), \.\.\.;": [b"x"] * 9,
    r"me has 2 empty ID\(s\), in row\(s\) 1, 3;": [b"a", b"", b"b", b""],
    r"me has 11 IDs, the parties agreed on at most 10": [bytes([k + 1]) for k in range(11)],
    r"me has 2 ID\(s\) that are str, not bytes, in row\(s\) 0, 2;": ["a", b"b", "c"],
    r"1 ID\(s\) that are NoneType, not bytes, in row\(s\) 1;": [b"a", None],
    r"2 ID\(s\) that are float or int, not bytes, in row\(s\) 0, 1;": [float("nan"), 3],
    r"2 ID\(s\) that are int64, not bytes": np.array([5, 6]),
    "bytearray, not bytes": [bytearray(b"a")],
    r"3 ID\(s\) that are str, not bytes": "abc",
    r"3 ID\(s\) that are int, not bytes": b"abc",
}


@pytest.mark.parametrize(("message", "ids"), UNFIT.items(), ids=list(UNFIT))
@BACKENDS
def test_unfit_own_ids_are_refused(backend: str, message: str, ids: Any) -> None:
    agreement = IntersectionAgreement(session="s", maximum_ids=10, dealer=DEALER)
    protocol = SET_INTERSECTIONS[backend](agreement)
    with pytest.raises(LocalProtocolError, match=message):
        protocol.make_hub("me", ["you"], ids)
    with pytest.raises(LocalProtocolError, match=message):
        protocol.make_member("me", "you", ids)


@BACKENDS
def test_roles_need_different_parties(backend: str) -> None:
    protocol = SET_INTERSECTIONS[backend](IntersectionAgreement(session="s", dealer=DEALER))
    said = "one hub and one or more different members"
    others: tuple[list[str], ...] = ([], ["a", "a"], ["me"])
    cases = [(said, "me", members, [b"a"]) for members in others]
    assert list_unrefused(LocalProtocolError, protocol.make_hub, cases) == []
    with pytest.raises(LocalProtocolError, match=said):
        protocol.make_member("me", "me", [b"a"])


@DEALT
def test_a_dealer_is_named_and_plays_no_other_role(backend: str) -> None:
    with pytest.raises(LocalProtocolError, match="needs a dealer; name it in the agreement"):
        SET_INTERSECTIONS[backend](IntersectionAgreement(session="s"))
    protocol = SET_INTERSECTIONS[backend](IntersectionAgreement(session="s", dealer=DEALER))
    with pytest.raises(LocalProtocolError, match=f"dealer '{DEALER}'"):
        protocol.make_hub(DEALER, ["p"], [b"a"])
    with pytest.raises(LocalProtocolError, match=f"dealer '{DEALER}'"):
        protocol.make_member(DEALER, "h", [b"a"])
    with pytest.raises(LocalProtocolError, match=f"dealer '{DEALER}'"):
        protocol.make_dealer("h", [DEALER])


@BACKENDS
def test_each_role_with_ids_asks_whether_it_may_take_part(backend: str) -> None:
    asked: list[tuple[str, list[str]]] = []

    def admit(me: str, peers: Sequence[str]) -> None:
        asked.append((me, list(peers)))
        if len(asked) > 2:
            raise PermissionError(me)

    agreement = IntersectionAgreement(session="s", dealer=DEALER)
    protocol = SET_INTERSECTIONS[backend](agreement, check_admission=admit)
    protocol.make_hub(HUB, ["p", "q"], [b"a"])
    protocol.make_member("p", HUB, [b"a"])
    assert asked == [(HUB, ["p", "q"]), ("p", [HUB])]
    with pytest.raises(LocalProtocolError, match="repeated ID"):
        protocol.make_hub(HUB, ["p"], [b"a", b"a"])
    assert len(asked) == 2, "a set that is refused anyway costs nothing"
    with pytest.raises(PermissionError, match=HUB):
        protocol.make_hub(HUB, ["p"], [b"a"])
    with pytest.raises(PermissionError, match="p"):
        protocol.make_member("p", HUB, [b"a"])


@pytest.mark.parametrize(("name", "peer"), [(HUB, "p"), ("p", HUB)])
@BACKENDS
def test_rows_and_order_of_calls(backend: str, name: str, peer: str) -> None:
    aligners = Intersection(backend, {HUB: [b"a"], "p": [b"a"]}).aligners
    assert set(aligners) == {HUB, "p"}
    role = aligners[name]
    with pytest.raises(LocalProtocolError, match="not finished"):
        _ = role.rows
    with pytest.raises(LocalProtocolError, match="start before receive"):
        role.receive(peer, b"")
    role.start()
    with pytest.raises(LocalProtocolError, match="started once"):
        role.start()


@BACKENDS
def test_threads_must_be_positive(backend: str) -> None:
    with pytest.raises(LocalProtocolError, match="threads is at least 1, got 0"):
        SET_INTERSECTIONS[backend](IntersectionAgreement(session="s", dealer=DEALER), threads=0)


@BACKENDS
def test_parties_with_different_agreements_are_refused(backend: str) -> None:
    here = Intersection(backend, {HUB: [b"a"], "p": [b"a"]}, session="one").roles
    there = Intersection(backend, {HUB: [b"a"], "p": [b"a"]}, session="two").roles
    with pytest.raises(RemoteProtocolError, match="holds another agreement; compare session"):
        converse({**here, "p": there["p"]})


@BACKENDS
def test_altered_messages_parse_or_are_refused(backend: str) -> None:
    """Any change of any one message: RemoteProtocolError, silence or a result, no crash."""
    sets = {HUB: [b"a", b"b", b"c", b"d"], "p": [b"b", b"c", b"d", b"e"]}
    messages = len(Intersection(backend, sets).play().sent)
    rng = random.Random(backend)
    refused = 0
    for target in [*range(messages), *(rng.randrange(messages) for _ in range(60))]:
        numbers = itertools.count()

        def change(_: str, out: Outgoing, target: int = target, at: Any = numbers) -> bytes:
            return mutate_bytes(rng, out.body) if next(at) == target else out.body

        try:
            Intersection(backend, sets, change=change).play()
        except RemoteProtocolError as error:
            refused += bool(str(error))
    assert refused > 30


def rows_at(*places: int) -> Callable[[bytes], bytes]:
    return lambda _: np.array(places, ">u4").tobytes()


# Ten IDs of the hub and twenty of p, of which eight are common, and at least three must be; bodies
# of another length see `test_psi_vole`.
BAD_ROWS: dict[str, Callable[[bytes], bytes]] = {
    "hub opened 3 rows, of which 2 differ": rows_at(0, 0, 1),
    "hub names place 20 of a list of 20 IDs": rows_at(1, 2, 20),
    "hub opened 11 rows, of which 11 differ, with a set of 10 IDs": rows_at(*range(11)),
    "opened 1 rows, .* on at least 3": rows_at(0),
}
ALTERED: dict[tuple[str, str, int], dict[str, Callable[[bytes], bytes]]] = {
    ("circuit", HUB, Kind.COMMIT): {
        "another key part than it committed to": lambda b: bytes(32) + b[32:],
        "hub gives place 1 among 1 members": lambda b: b[:38] + b"\0\1",
        "hub announces 4294967295 IDs": lambda b: b[:32] + b"\xff" * 4 + b[36:],
    },
    ("circuit", "p", Kind.JOIN): {
        "p announces 4294967295 IDs": lambda b: b[:64] + b"\xff" * 4,
        "repeats the key part or size of p wrongly": lambda b: bytes(32) + b[32:],
    },
    ("circuit", HUB, Kind.PLACE): {"hub proposes hash key 64 after -1": lambda b: b"\0\0\0\x40"},
    ("circuit", "p", Kind.PLACED): {"p took none of the 64 hash keys": lambda b: b"\0"},
    ("circuit", HUB, Kind.DEAL): {
        "triples for 0 words": lambda b: bytes(4) + b[4:],
        "a chunk has 1 to 2097152 slots": lambda b: b"\0\1\0\0" + b[4:],
        "words of bins with 0 slots": lambda b: b[:4] + bytes(4),
    },
    ("circuit", DEALER, Kind.VERDICT): {
        "dealer announces -3 common IDs, .* not agreed": lambda b: b[:7] + b"\xfd"
    },
    ("circuit", "p", Kind.SHARE): {
        "p opened bins in which hub has no": lambda b: bytes(255 - x for x in b)
    },
    ("circuit", HUB, Kind.TOKENS): {
        "hub opened 8 IDs, of which 7 different": lambda b: b[16:] + bytes(16),
        "hub sent a tag twice": lambda b: b[:16] * 2,
        "hub opened 9 IDs, of which 8 different": lambda b: b + b"0",
        r"opened 2 IDs, .* agreed on at least 3": lambda b: b[:32],
    },
    ("vole", HUB, VoleKind.HELLO): {"hub announces 1001 IDs": lambda b: b[:32] + b"\0\0\3\xe9"},
    ("vole", "p", VoleKind.COMMIT): {"p announces 4294967295 IDs": lambda b: b[:32] + b"\xff" * 4},
    ("vole", DEALER, VoleKind.DEALT): {
        "dealer dealt a Delta of zero": lambda b: (
            b[:-16] + bytes(16) if len(b) == count_member_dealt_bytes() else b
        )
    },
    ("vole", HUB, VoleKind.ROWS): BAD_ROWS,
    ("ot", HUB, OtKind.ROWS): BAD_ROWS,
    ("ot", HUB, OtKind.HELLO): {
        "hub announces 1001 IDs": lambda b: b[:32] + b"\0\0\3\xe9" + b[36:]
    },
    ("ot", "p", OtKind.CHOICES): {"p announces 4294967295 IDs": lambda b: b"\xff" * 4 + b[4:]},
    ("ot", HUB, OtKind.VECTOR): {
        "hub sent a vector that is of no store": lambda b: bytes(255 - x for x in b)
    },
    ("ot", HUB, OtKind.PROOF): {
        "or does not prove it": lambda b: b[:-1] + bytes([b[-1] ^ 1]),
        "was sent no tag": lambda b: bytes([b[0] ^ 1]) + b[1:],
    },
    ("ot", "p", OtKind.TAGS): {"p sent a tag twice": lambda b: b[:-8] + b[-16:-8]},
    ("vole", "p", VoleKind.TAGS): {
        "p showed another key part than it committed": lambda b: bytes([b[0] ^ 1]) + b[1:],
        "p sent a tag twice": lambda b: b[:-8] + b[-16:-8],
    },
}


@pytest.mark.parametrize(
    ("backend", "sender", "kind", "message", "body"),
    [
        (*whose, message, body)
        for whose, changes in ALTERED.items()
        for message, body in changes.items()
    ],
)
def test_what_cannot_be_is_refused_by_name(
    backend: str, sender: str, kind: int, message: str, body: Callable[[bytes], bytes]
) -> None:
    sets = {HUB: ids_of(0, 10), "p": ids_of(2, 22)}
    change = change_kind(sender, kind, body)
    altered = Intersection(backend, sets, minimum_rows=3, maximum_ids=1000, change=change)
    with pytest.raises(RemoteProtocolError, match=message):
        altered.play()


@BACKENDS
def test_strangers_are_refused(backend: str) -> None:
    roles = Intersection(backend, {HUB: [b"a"], "p": [b"a"]}).roles
    for role in roles.values():
        role.start()
    receive = lambda name: roles[name].receive("mallory", b"")  # noqa: E731
    cases = [("mallory", name) for name in roles]
    assert list_unrefused(RemoteProtocolError, receive, cases) == []


@pytest.mark.parametrize(("key", "backend"), SET_INTERSECTIONS.items())
def test_the_table_names_its_entries_and_what_they_reveal(key: str, backend: Any) -> None:
    assert backend.name == key
    assert all(sentence.endswith(".") for sentence in backend.leaks)
    guesses = backend.max_guesses(1000)
    assert min(guesses.hub, guesses.member) >= 1000


# What can be asked of an intersection besides rows for all: the hub's rows, the size, shares.


def ids_of(start: int, stop: int) -> list[bytes]:
    return [b"id %d" % k for k in range(start, stop)]


PAIR: Sets = {HUB: ids_of(0, 40), "p": ids_of(30, 60)}
THREE: Sets = {HUB: ids_of(0, 40), "p": ids_of(20, 60), "q": ids_of(10, 35)}


def play_for(
    backend: str, output: Output, sets: Sets, *, progress: list[Progress] | None = None, **more: Any
) -> Intersection:
    report = None if progress is None else progress.append
    least = len(set.intersection(*map(set, sets.values())))
    fields: dict[str, Any] = {"minimum_rows": least, "output": output} | more
    played = Intersection(backend, sets, progress=report, **fields).play()
    assert all(role.is_finished for role in played.roles.values())
    return played


COMBINATIONS = [
    (backend, output, sets)
    for backend in usable(SET_INTERSECTIONS)
    for output in sorted(SET_INTERSECTIONS[backend].outputs)
    for sets in (PAIR, THREE)
    if (backend, output, len(sets)) != ("ecdh", Output.SIZE, 3)
]


def collect_results(aligner: Aligner) -> dict[str, object]:
    """Return all that a party's result gives."""
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
    aligners = play_for(backend, output, sets).aligners
    found = {name: collect_results(aligner) for name, aligner in aligners.items()}
    whole = ("rows", "size")
    named: dict[Output, dict[str, tuple[str, ...]]] = {
        Output.ROWS: dict.fromkeys(sets, whole),
        Output.HUB_ROWS: dict.fromkeys(sets, ()) | {HUB: whole},
        Output.SIZE: dict.fromkeys(sets, ("size",)),
        Output.SHARED: dict.fromkeys(sets, ("membership",)),
    }
    assert {name: tuple(learnt) for name, learnt in found.items()} == named[output]
    sizes = {name: learnt["size"] for name, learnt in found.items() if "size" in learnt}
    assert sizes == dict.fromkeys(sizes, len(common))
    people = {
        name: {sets[name][row] for row in aligners[name].rows}
        for name, learnt in found.items()
        if "rows" in learnt
    }
    assert people == dict.fromkeys(people, common)


@pytest.mark.parametrize(("backend", "output", "sets"), COMBINATIONS)
def test_below_the_minimum_nothing_opens(backend: str, output: Output, sets: Sets) -> None:
    common = len(set.intersection(*map(set, sets.values())))
    aligners = play_for(backend, output, sets, minimum_rows=common + 1).aligners
    cases = [
        (f"{name}: .* minimum of {common + 1}.*nothing was opened", aligner, what)
        for name, aligner in aligners.items()
        for what in ("rows", "size", "membership")
    ]
    assert list_unrefused(IntersectionTooSmallError, getattr, cases) == []


@pytest.mark.parametrize("backend", ["circuit", "circuit_ot", "opprf", "opprf_ot"])
@pytest.mark.parametrize("sets", [PAIR, THREE])
def test_shares_of_membership_combine_to_it_and_alone_say_nothing(backend: str, sets: Sets) -> None:
    aligners = play_for(backend, Output.SHARED, sets).aligners
    hub = aligners[HUB].membership
    assert hub.row_of_bin is not None
    shares = np.stack([aligner.membership.shares for aligner in aligners.values()])
    common = np.bitwise_xor.reduce(shares)
    rows = hub.row_of_bin[common]
    assert {sets[HUB][row] for row in rows} == set.intersection(*map(set, sets.values()))
    with_rows = [n for n in sets if aligners[n].membership.row_of_bin is not None]
    assert with_rows == [HUB]
    places = shares.shape[1]
    means = [
        np.bitwise_xor.reduce(np.delete(shares, lacking, axis=0)).mean()
        for lacking in range(len(shares))
    ]
    # 6 standard deviations of a fair coin
    assert np.abs(np.array(means) - 0.5).max() < 3 / math.sqrt(places)


def order_of_returned_tags() -> tuple[int, ...]:
    """Return the place at the hub of each of three tags that a member returns to be counted."""
    sets: Sets = {HUB: ids_of(0, 3), "p": ids_of(0, 3)}
    protocol = SET_INTERSECTIONS["ecdh"](IntersectionAgreement(session="s", output=Output.SIZE))
    hub = protocol.make_hub(HUB, ["p"], sets[HUB])
    member = protocol.make_member("p", HUB, sets["p"])
    (offer,) = hub.start()
    member.start()
    (tags,) = member.receive(HUB, offer.body)
    secret = vars(member)["_blindings"][HUB].scalar  # as the member itself would
    straight = [
        point[:16] for point in ecdh.split_points(ecdh.multiply_points(secret, offer.body[22:]))
    ]
    returned = [tags.body[k : k + 16] for k in range(22, len(tags.body), 16)]
    return tuple(straight.index(tag) for tag in returned)


def test_in_counting_the_hub_cannot_link_tags_to_its_rows() -> None:
    """The member returns its tags in an order that says nothing of the order it got them in."""
    orders = {order_of_returned_tags() for _ in range(20)}
    assert {tuple(sorted(order)) for order in orders} == {(0, 1, 2)}
    assert len(orders) > 3


def test_an_output_that_a_backend_lacks_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match=r"ecdh cannot give the output 'shared'; it gives"):
        SET_INTERSECTIONS["ecdh"](IntersectionAgreement(session="s", output=Output.SHARED))


@pytest.mark.parametrize("backend", usable(SET_INTERSECTIONS))
def test_a_member_gets_no_row_message_where_the_hub_alone_is_to_know(backend: str) -> None:
    played = play_for(backend, Output.HUB_ROWS, PAIR)
    last = [out.body for _, out in played.sent if out.receiver == "p"][-1]
    assert len(last) <= 22 + 8


def ecdh_member(output: Output) -> tuple[Aligner, bytes]:
    """A member that waits for the hub's last message, and the header of one of its own."""
    agreement = IntersectionAgreement(session="s", minimum_rows=2, output=output)
    protocol = SET_INTERSECTIONS["ecdh"](agreement)
    hub = protocol.make_hub(HUB, ["p"], ids_of(0, 9))
    member = protocol.make_member("p", HUB, ids_of(0, 7))
    (own,) = member.start()
    member.receive(HUB, next(iter(hub.start())).body)
    return member, own.body[:18]


@pytest.mark.parametrize(("kind", "said"), [(3, "rows"), (5, "done")])
def test_another_ending_than_agreed_is_refused(kind: int, said: str) -> None:
    member, head = ecdh_member(Output.SIZE)
    body = head[:1] + bytes([kind]) + head[2:] + bytes(4)
    with pytest.raises(RemoteProtocolError, match=f"hub sent {said} when the protocol expects"):
        member.receive(HUB, body)


@pytest.mark.parametrize("size", [0, 1, 8, 2**32 - 1])
def test_an_impossible_size_is_refused(size: int) -> None:
    member, head = ecdh_member(Output.SIZE)
    body = head[:1] + b"\6" + head[2:] + (1).to_bytes(4, "big") + size.to_bytes(4, "big")
    said = f"announces {size} common IDs, expected 2 to 7"
    with pytest.raises(RemoteProtocolError, match=said):
        member.receive(HUB, body)


@pytest.mark.parametrize("verdict", [-3, 0, 41, 2**40])
def test_an_impossible_verdict_of_the_dealer_is_refused(verdict: int) -> None:
    lie = change_kind(DEALER, Kind.VERDICT, lambda _: verdict.to_bytes(8, "big", signed=True))
    with pytest.raises(RemoteProtocolError, match=f"dealer announces {verdict} common IDs"):
        play_for("circuit", Output.SIZE, PAIR, minimum_rows=2, change=lie)


# Sizes that the parties agreed on, which hide the true ones.

SIZES = {HUB: 50, "p": 60, "q": 30}


@SIZED
def test_agreed_sizes_hide_the_true_ones(backend: str) -> None:
    lengths = []
    for held in (THREE, {name: ids[:7] for name, ids in THREE.items()}):
        played = Intersection(backend, held, sizes=SIZES).play()
        played.check()
        # how long the list of what is common is, shows to all what is common, as agreed
        lists = {"vole": VoleKind.ROWS, "ot": OtKind.ROWS}.get(backend, Kind.TOKENS)
        sent = [(me, out) for me, out in played.sent if out.body[1] != lists]
        lengths.append([(me, out.receiver, out.body[1], len(out.body)) for me, out in sent])
    assert lengths[0] == lengths[1]


@SIZED
def test_sets_and_parties_that_the_agreed_sizes_do_not_fit_are_refused(backend: str) -> None:
    with pytest.raises(LocalProtocolError, match=r"q has 25 IDs, .* that it announces 24"):
        Intersection(backend, THREE, sizes=SIZES | {"q": 24})
    with pytest.raises(LocalProtocolError, match="no size is agreed for q, only for hub, p, r"):
        Intersection(backend, THREE, sizes={HUB: 50, "p": 60, "r": 30})


@pytest.mark.parametrize(
    ("who", "kind", "body"),
    [
        (HUB, Kind.COMMIT, lambda b: b[:32] + b"\0\0\0\x07" + b[36:]),
        ("q", Kind.JOIN, lambda b: b[:64] + b"\0\0\0\x07"),
    ],
    ids=["hub", "member"],
)
def test_a_peer_that_announces_another_size_is_refused(
    who: str, kind: Kind, body: Callable[[bytes], bytes]
) -> None:
    with pytest.raises(RemoteProtocolError, match=f"{who} announces 7 IDs, the parties agreed"):
        Intersection("circuit", THREE, sizes=SIZES, change=change_kind(who, kind, body)).play()


def test_ecdh_takes_no_agreed_sizes() -> None:
    with pytest.raises(LocalProtocolError, match="ecdh shows the true sizes of sets"):
        Intersection("ecdh", PAIR, sizes=SIZES)


def test_progress_of_ecdh_counts_ids() -> None:
    progress = list[Progress]()
    sets = {HUB: ids_of(0, 2500), "p": ids_of(2000, 2300)}
    play_for("ecdh", Output.ROWS, sets, progress=progress)
    own = [step for step in progress if step.work == "blinding its own IDs" and step.party == HUB]
    assert [(step.done, step.total) for step in own] == [(833, 2500), (1666, 2500), (2500, 2500)]
    works = {(step.party, step.work) for step in progress if step.done == step.total}
    assert works == {
        (me, f"blinding {whose}")
        for me, other in ((HUB, "p"), ("p", HUB))
        for whose in ("its own IDs", f"the IDs of {other}")
    }


def test_progress_of_the_circuit_counts_bins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("apfed_protocols.psi.circuit.MAX_CHUNK_SLOTS", 2000)
    progress = list[Progress]()
    sets = {HUB: ids_of(0, 400), "p": ids_of(300, 700)}
    play_for("circuit", Output.ROWS, sets, progress=progress)
    steps = {party: [step for step in progress if step.party == party] for party in (HUB, "p")}
    assert min(len(own) for own in steps.values()) > 3
    counted = {party: [step.done for step in own] for party, own in steps.items()}
    assert counted == {party: sorted(set(done)) for party, done in counted.items()}
    assert [own[-1].done for own in steps.values()] == [own[-1].total for own in steps.values()]
    assert {step.work for own in steps.values() for step in own} == {"comparing bins"}


# What each party sees.


def make_names(prefix: str, *ranges: range) -> list[bytes]:
    return [f"{prefix} {k}".encode() for each in ranges for k in each]


@pytest.mark.parametrize(("prefix", "overlap"), [("h", 200), ("p", 0)])
def test_with_ecdh_the_hub_learns_pairwise_overlaps(prefix: str, overlap: int) -> None:
    """Its tags and the member's are equal for each ID that the two share: so `leaks` says.

    Nothing is common to all; p shares all of the hub's IDs in one world, none in the other.
    """
    sets = {me: make_names(of, range(200)) for me, of in ((HUB, "h"), ("p", prefix), ("q", "q"))}
    hub = Intersection("ecdh", sets).play().aligners[HUB]
    assert len(hub.rows) == 0
    assert isinstance(hub, EcdhHub)
    assert len(hub.overlaps["p"]) == overlap


@pytest.mark.parametrize("backend", SET_INTERSECTIONS.values(), ids=list(SET_INTERSECTIONS))
def test_pairwise_overlaps_are_named_as_a_leak_where_there_are_any(backend: Any) -> None:
    assert any("pairwise" in leak for leak in backend.leaks) == backend.has_pairwise_leak


# Views bit by bit: the same small sets again and again, under one hash key, which the member knows

SMALL_FOR_A_MEMBER = [
    {HUB: [*make_names("c", range(2)), *others], "p": make_names("c", range(5))}
    for others in (make_names("hub", range(4)), [bytes([k + 2]) * 40 for k in range(4)])
]
SMALL_FOR_THE_HUB = [
    {
        HUB: make_names("h", range(5)),
        "p": make_names(prefix, range(5)),
        "q": make_names("q", range(5)),
    }
    for prefix in ("h", "p")
]
RUNS = 60


def bits_seen(backend: str, sets: Sets, party: str) -> NDArray[np.int64]:
    """Return how often each bit of what `party` receives is one, in so many runs."""
    views = []
    blocks = list[bytes]()
    for _ in range(RUNS):
        sent = play(backend, sets)[1]
        bodies = [out.body[HEADER:] for out in sent if out.receiver == party]
        views.append(np.frombuffer(b"".join(bodies), np.uint8))
        long = [body for body in bodies if len(body) >= 100]
        blocks += [body[k : k + 16] for body in long for k in range(0, len(body) - 15, 16)]
    assert len(set(blocks)) == len(blocks) > RUNS, "what is secret is made anew in each run"
    ones: NDArray[np.int64] = np.unpackbits(np.stack(views), axis=1).sum(axis=0, dtype=np.int64)
    return ones


def largest_difference(backend: str, worlds: Sequence[Sets], party: str) -> float:
    """The most conspicuous bit, in standard deviations of two samples of a fair coin."""
    one, other = (bits_seen(backend, sets, party).astype(float) for sets in worlds)
    assert len(one) == len(other) > 1000
    return float(np.abs(one - other).max() / np.sqrt(RUNS / 2))


@pytest.fixture
def one_hash_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """All else, such as triples and shares, stays random."""
    monkeypatch.setattr(circuit, "fresh_key", lambda: b"k" * 32)


# the circuit on CrypTen sends the words of our own gates
SENDING = pytest.mark.parametrize(
    "backend",
    [
        pytest.param(name, marks=[pytest.mark.slow] * name.endswith("_ot"))
        for name in sorted({*SET_INTERSECTIONS} - {"circuit_crypten"})
    ],
)
# 1e5 bits: one above 6.5 comes by chance once in 10,000 tests
CHANCE = 6.5


@SENDING
@pytest.mark.usefixtures("one_hash_key")
@pytest.mark.parametrize(("party", "worlds"), [("p", SMALL_FOR_A_MEMBER), (HUB, SMALL_FOR_THE_HUB)])
def test_no_bit_that_is_seen_depends_on_the_hubs_other_ids_or_on_one_members_overlap(
    backend: str, party: str, worlds: Sequence[Sets]
) -> None:
    assert largest_difference(backend, worlds, party) < CHANCE


@pytest.mark.usefixtures("one_hash_key")
def test_one_word_without_its_mask_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = hashing.expand_words

    def forgetful(seed: bytes, purpose: bytes, count: int) -> hashing.Words:
        words = real(seed, purpose, count).copy()
        words[: purpose == b"a"] = 0
        return words

    monkeypatch.setattr(hashing, "expand_words", forgetful)
    assert largest_difference("circuit", SMALL_FOR_A_MEMBER, "p") > CHANCE


@BACKENDS
def test_neither_ids_nor_their_hashes_travel(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: IDs, digests and hashed points are searched for in all bytes sent."""
    secrets: set[bytes] = set()
    spy(monkeypatch, secrets, ecdh, "digest_ids")
    spy(monkeypatch, secrets, ecdh, "map_to_curve")
    spy(monkeypatch, secrets, hashing, "fingerprint_ids")
    sets = {HUB: make_names("person", range(60)), "p": make_names("person", range(30, 90))}
    everything = b"".join(out.body for out in play(backend, sets)[1])
    secrets |= {identity for ids in sets.values() for identity in ids}
    hashed = {"ecdh": 2 * 60, "vole": 0, "ot": 0}.get(backend, 60)
    assert len(secrets) >= 90 + hashed
    assert not any(secret in everything for secret in secrets)


def spy(monkeypatch: pytest.MonkeyPatch, seen: set[bytes], module: ModuleType, name: str) -> None:
    """Keep what a function returns, in pieces of 32 bytes, or the tags that it returns first."""
    real: Callable[..., Any] = getattr(module, name)

    def watch_call(*arguments: object, **named: object) -> Any:
        found = real(*arguments, **named)
        if isinstance(found, tuple):
            seen.update(tag.tobytes() for tag in found[0])
        else:
            seen.update(ecdh.split_points(found) if isinstance(found, bytes) else found)
        return found

    monkeypatch.setattr(module, name, watch_call)


ANNOUNCED = 300_000
ANNOUNCED_TO = {"circuit_ot": 2_000, "opprf_ot": 10_000}  # more takes seconds of transfers
FEW = [b"id %d" % place for place in range(20)]


class Measured:
    """A role that notes how much memory its longest answer took beyond what came and went."""

    def __init__(self, role: Any) -> None:
        self._role = role
        self.peak = 0

    @property
    def is_finished(self) -> bool:
        return bool(self._role.finished)

    def start(self) -> list[Outgoing]:
        return self._note(0, self._role.start)

    def receive(self, sender: str, body: bytes) -> list[Outgoing]:
        return self._note(len(body), lambda: self._role.receive(sender, body))

    def _note(self, came: int, answer: Callable[[], Any]) -> list[Outgoing]:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        sent = list(answer())
        taken = tracemalloc.get_traced_memory()[1] - before
        self.peak = max(self.peak, taken - came - sum(len(out.body) for out in sent))
        return sent


@SIZED
@pytest.mark.parametrize("large", [HUB, "p"])
def test_what_an_announced_size_takes_was_forecast(backend: str, large: str) -> None:
    """Of each role with few IDs, where a peer says that it has many."""
    announced = ANNOUNCED_TO.get(backend, ANNOUNCED)
    sizes = {HUB: len(FEW), "p": len(FEW), "q": len(FEW), large: announced}
    agreed = IntersectionAgreement(session="s", minimum_rows=0, dealer=DEALER, sizes=sizes)
    played = Intersection(backend, dict.fromkeys((HUB, "p", "q"), FEW), agreed)
    roles = {name: Measured(role) for name, role in played.roles.items()}
    tracemalloc.start()
    try:
        deliver(roles)
    finally:
        tracemalloc.stop()
    kind = SET_INTERSECTIONS[backend]
    most = {
        name: kind.count_announced_bytes(
            announced,
            own_size=0 if name == DEALER else len(FEW),
            member_count=1 if name == "q" else 2,
        )
        for name in roles
        if name != large
    }
    shares = {name: roles[name].peak / forecast for name, forecast in most.items()}
    assert {name: share for name, share in shares.items() if share > 1} == {}


@pytest.mark.parametrize(
    ("backend", "role"),
    [
        (name, role)
        for name in usable(SET_INTERSECTIONS)
        for role in ("hub", "member", "dealer")
        if name != "ecdh" and (role != "dealer" or SET_INTERSECTIONS[name].needs_dealer)
    ],
)
def test_a_size_that_would_take_too_much_is_refused_with_one_that_does_not(
    backend: str, role: str
) -> None:
    kind, members = SET_INTERSECTIONS[backend], [f"p{place}" for place in range(9)]

    def enter(maximum_ids: int) -> None:
        agreed = IntersectionAgreement(session="s", dealer=DEALER, maximum_ids=maximum_ids)
        protocol = kind(agreed)
        if role == "hub":
            protocol.make_hub(HUB, members, FEW)
        elif role == "member":
            protocol.make_member("p0", HUB, FEW)
        else:
            protocol.make_dealer(HUB, members)

    with pytest.raises(LocalProtocolError, match=r"GiB, expected 16 GiB at most; agree on") as told:
        enter(2**32 - 1)
    most = int(str(told.value).split("agree on ")[1].split(" ")[0].replace(",", ""))
    enter(most)
    assert most >= 10_000_000, "what is allowed by default"
    with pytest.raises(LocalProtocolError, match="expected 16 GiB"):
        enter(most + 2**20)


def test_lists_that_are_as_long_as_their_messages_take_any_size() -> None:
    agreed = IntersectionAgreement(session="s", maximum_ids=2**32 - 1)
    SET_INTERSECTIONS["ecdh"](agreed).make_member("p", HUB, FEW)

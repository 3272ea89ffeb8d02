"""The messages of the intersection over X25519, honest and hostile, and its curve."""

import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.psi import ecdh
from apfed_protocols.psi.ecdh import EcdhIntersection, map_in_threads, split_points
from apfed_protocols.psi.interface import Aligner, IntersectionAgreement, IntersectionTooSmallError
from apfed_protocols.randomness import fresh_key
from tests.contracts.intersections import HEADER
from tests.refusals import list_unrefused
from tests.waiting import LONG_S

PRIME = 2**255 - 19
IDS = [str(k).encode() for k in range(6)]


def make_roles(*, minimum_rows: int = 0) -> tuple[Aligner, Aligner]:
    agreement = IntersectionAgreement(session="s", minimum_rows=minimum_rows, maximum_ids=100)
    protocol = EcdhIntersection(agreement)
    return protocol.make_hub("hub", ["p"], IDS), protocol.make_member("p", "hub", IDS[2:])


class Played:
    """Both roles before the hub's last message, the member's two messages, and the hub's first."""

    def __init__(self, *, minimum_rows: int = 0) -> None:
        self.hub, self.member = make_roles(minimum_rows=minimum_rows)
        ((self.to_member,), (self.to_hub,)) = (
            [out.body for out in role.start()] for role in (self.hub, self.member)
        )
        (self.tags,) = (out.body for out in self.member.receive("hub", self.to_member))

    def answer_member(self, *bodies: bytes) -> list[bytes]:
        """Return what the hub answers to these messages of the member."""
        return [out.body for body in bodies for out in self.hub.receive("p", body)]


def replace_first_list(body: bytes) -> None:
    """Let a member that waits for the hub's list get this in its place."""
    member = make_roles()[1]
    member.start()
    list(member.receive("hub", body))


def frame_items(like: bytes, items: Sequence[bytes], *, kind: int | None = None) -> bytes:
    head = like[:1] + (like[1:2] if kind is None else bytes([kind])) + like[2:18]
    return head + len(items).to_bytes(4, "big") + b"".join(items)


def points_of(message: bytes) -> list[bytes]:
    return split_points(message[HEADER:])


def number(u: int) -> bytes:
    return u.to_bytes(32, "little")


def is_on_curve(point: bytes) -> bool:
    u = int.from_bytes(point, "little")
    return pow(u * (u * u + 486662 * u + 1), (PRIME - 1) // 2, PRIME) == 1


REPRESENTATIVES = (
    0x65D61DFA58CF932CD60F65F24739D1AFE89442E4A3B2E6EA9D65B0865F148901,
    0x1393600FD74775F0D19A8EBD282B05349641A8B079C71030BF1BF370C41ACEF9,
    0x3E2240CE35B52E6CE7F2CC4C3E57C03BC1619494256E495DADADB10DCC2675E8,
    0x6719884A782571B55353A8F2946A3E42430F0C769CE85D1A47026D491452B773,
)
CURVE_POINTS = (
    0x1241E151A4DA26769778A6C8AA5A219FF608C6C31BEA49A0558487A102BF6355,
    0x25C758D9C7A11A43E72D3DDD7976458330FA9E37F63991457FAC99A70253CFBA,
    0x6C70B60BBEA45867F1E270AF0812137AC64C8931370DAE67A4130141F9BBACB1,
    0x64AAF5AE99E65460BA87F7F3C6871A66C3C5D3E671B33FE723603C0EED7B9922,
)
ELLIGATOR_2 = dict(zip(REPRESENTATIVES, CURVE_POINTS, strict=True))


def test_elligator_2_vectors() -> None:
    """RFC 9380's suite curve25519_XMD:SHA-512_ELL2_NU_: inputs of the map, and the x of Q."""
    digests = b"".join(map(number, ELLIGATOR_2))
    assert ecdh.map_to_curve(digests) == [number(x) for x in ELLIGATOR_2.values()]
    one_by_one = [ecdh.map_to_curve(number(r))[0] for r in ELLIGATOR_2]
    assert ecdh.map_to_curve(digests) == one_by_one

    def to_x(numbers: list[int]) -> list[bytes]:
        return ecdh.map_to_curve(b"".join(map(number, numbers)))

    assert to_x([PRIME - r for r in ELLIGATOR_2]) == one_by_one
    assert to_x([pow(2 * r, -1, PRIME) for r in ELLIGATOR_2]) == one_by_one
    assert to_x([pow(-2 * r, -1, PRIME) for r in ELLIGATOR_2]) == one_by_one


def test_elligator_2_of_any_bytes_is_on_the_curve() -> None:
    """The top bit of a digest plays no part; 2^255 - 1 is above the prime."""
    digests = ecdh.digest_ids([b"%d" % k for k in range(500)], session=bytes(32))
    edges = [number(r) for r in (1, 2, PRIME - 1, PRIME + 1, 2**255 - 1, 2**256 - 1)]
    points = ecdh.map_to_curve(digests + b"".join(edges))
    assert all(map(is_on_curve, points))
    assert all(int.from_bytes(point, "little") < PRIME for point in points)
    assert len(set(points[:500])) == 500
    assert points[500] == points[502] == points[503]
    assert points[504] == points[505]
    assert ecdh.map_to_curve(b"") == []


def test_the_digests_that_give_points_of_low_order() -> None:
    """0 and the prime, and the four that give 1: r^2 = -(A + 1) / 2, and 1 / 2r."""
    root = 0x625F51AEAC2CDCD3EB452AC5E7A844E20BE4A3D382D720FB2DB836DBAB93C61F
    assert 2 * root * root % PRIME == PRIME - 486663
    half = pow(2 * root, -1, PRIME)
    points = {0: 0, PRIME: 0, **dict.fromkeys((root, PRIME - root, half, PRIME - half), 1)}
    found = {r: ecdh.map_to_curve(number(r)) for r in points}
    assert found == {r: [number(u)] for r, u in points.items()}
    cases = [("library error", fresh_key(), number(r)) for r in points]
    assert list_unrefused(RuntimeError, ecdh.blind_digests, cases) == []
    images = [u for u in LOW_ORDER if is_on_curve(number(u)) and is_reached(u)]
    assert images == [1]


def is_reached(u: int) -> bool:
    """Return whether Elligator 2 gives u: -2 u (u + A) is a square other than 0."""
    return pow(-2 * u * (u + 486662), (PRIME - 1) // 2, PRIME) == 1


def test_half_of_the_points_are_reached() -> None:
    """As `ladder` says; and every hashed point is one of these."""
    rng = np.random.default_rng(5)
    numbers = [int.from_bytes(p, "little") % PRIME for p in split_points(rng.bytes(32 * 4000))]
    share = np.mean([is_reached(u) for u in numbers if is_on_curve(number(u))])
    assert abs(share - 0.5) < 0.06
    hashed = ecdh.map_to_curve(rng.bytes(32 * 200))
    assert all(is_reached(int.from_bytes(p, "little")) for p in hashed)


def test_message_kinds_and_sizes() -> None:
    played = Played()
    (opened,) = played.answer_member(played.to_hub, played.tags)
    sent = (played.to_member, played.to_hub, played.tags, opened)
    assert [len(message) - HEADER for message in sent] == [6 * 32, 4 * 32, 6 * 16, 4 * 4]
    assert list(played.member.receive("hub", opened)) == []
    assert [IDS[k] for k in played.hub.rows] == [IDS[2:][k] for k in played.member.rows]


def test_no_digest_travels_and_scalars_are_fresh_for_each_run_and_member() -> None:
    runs = Played(), Played()
    agreement = IntersectionAgreement(session="s", minimum_rows=0, maximum_ids=100)
    sent = [body for run in runs for body in (run.to_member, run.to_hub)]
    sent += [
        out.body for out in EcdhIntersection(agreement).make_hub("hub", ["p", "q"], IDS).start()
    ]
    seen = [point for message in sent for point in points_of(message)]
    digests = split_points(ecdh.digest_ids(IDS, session=agreement.digest))
    assert set(seen).isdisjoint(digests)
    assert len(set(seen)) == len(seen)


ORDER_EIGHT = 325606250916557431795983626356110631294008115727848805560023387167927233504
LOW_ORDER = (0, 1, PRIME - 1, ORDER_EIGHT, pow(ORDER_EIGHT, -1, PRIME))


@pytest.mark.parametrize("u", LOW_ORDER)
def test_low_order_points_annihilate_and_are_refused(u: int) -> None:
    with pytest.raises(RuntimeError, match="library error"):
        ecdh.multiply_points(fresh_key(), number(u))
    played = Played()
    with pytest.raises(RemoteProtocolError, match="p sent a point of low order"):
        played.answer_member(frame_items(played.to_hub, [*points_of(played.to_hub), number(u)]))
    with pytest.raises(RemoteProtocolError, match="hub sent a point of low order"):
        replace_first_list(frame_items(played.to_member, [number(u)]))


def test_points_of_the_twist_match_nothing() -> None:
    """They are of large order too, and stay on the twist."""
    played = Played()
    member = make_roles()[1]
    twisted = [number(u) for u in range(2, 200) if not is_on_curve(number(u))][:6]
    member.start()
    (answer,) = member.receive("hub", frame_items(played.to_member, twisted))
    assert len({answer.body[HEADER + k :][:16] for k in range(0, 96, 16)}) == 6
    played.answer_member(frame_items(played.to_hub, twisted), answer.body)
    assert played.hub.size == 0


def test_lists_of_points_that_are_none_are_refused() -> None:
    """Of the last: adding the point of order 2 turns u into 1 / u, of the same multiples."""
    good = Played()
    points = points_of(good.to_hub)
    twin = number(pow(int.from_bytes(points[1], "little"), -1, PRIME))
    scalar = fresh_key()
    assert ecdh.multiply_points(scalar, twin) == ecdh.multiply_points(scalar, points[1])
    numbers = (PRIME, PRIME + 5, 2**255 - 1, 2**255 + 9)
    lists: list[tuple[str, list[bytes]]] = [
        *(("not a number below", [number(u)]) for u in numbers),
        (r"p sent 2 blinded ID\(s\) twice", [*points, points[0], points[1]]),
        ("p sent one blinded ID in two ways", [*points, twin]),
        (r"announces 101 items, .* accepts at most 100", [number(k + 2) for k in range(101)]),
    ]
    tell = lambda items: Played().answer_member(frame_items(good.to_hub, items))  # noqa: E731
    assert list_unrefused(RemoteProtocolError, tell, lists) == []
    with pytest.raises(RemoteProtocolError, match="hub sent one blinded ID in two ways"):
        replace_first_list(frame_items(good.to_member, [points[1], twin]))
    ecdh.check_points("p", number(PRIME - 2) + number(2))
    with pytest.raises(RemoteProtocolError, match="p sent 33 bytes of points"):
        ecdh.check_points("p", bytes(33))


def test_malformed_early_and_repeated_messages_are_refused() -> None:
    good = Played()
    blinded = good.to_hub
    tags = good.tags
    cut = [tags[k : k + 16] for k in range(HEADER, len(tags), 16)]
    no_tags = "p returned 5 different tags for the 6 blinded"
    to_hub: list[tuple[Any, ...]] = [
        ("0 bytes, too few", b""),
        ("21 bytes, too few", blinded[:21]),
        ("announces 4 items of 32 bytes and sent 127 bytes", blinded[:-1]),
        ("announces 4 items of 32 bytes and sent 129 bytes", blinded + b"0"),
        ("version 9", b"\x09" + blinded[1:]),
        ("kind 9", blinded[:1] + b"\x09" + blinded[2:]),
        ("announces 0 items of 0 bytes and sent 1 bytes", frame_items(blinded, [], kind=4) + b"0"),
        ("sent tags when the protocol expects blinded", tags),
        ("sent blinded when the protocol expects tags", blinded, blinded),
        (no_tags, blinded, frame_items(tags, cut[:-1])),
        (no_tags, blinded, frame_items(tags, [*cut[:-1], cut[0]])),
        ("the intersection is over", blinded, tags, tags),
    ]
    tell = lambda *bodies: Played().answer_member(*bodies)  # noqa: E731
    assert list_unrefused(RemoteProtocolError, tell, to_hub) == []
    first = [
        ("sent rows when", frame_items(good.to_hub, [], kind=3)),
        ("sent refusal when", frame_items(good.to_hub, [], kind=4)),
    ]
    assert list_unrefused(RemoteProtocolError, replace_first_list, first) == []
    last = [
        ("hub sent blinded when the protocol expects rows", good.to_member),
        ("hub sent refusal when the protocol expects rows", frame_items(tags, [], kind=4)),
    ]
    receive = lambda body: Played().member.receive("hub", body)  # noqa: E731
    assert list_unrefused(RemoteProtocolError, receive, last) == []


def test_a_refusal_names_the_sizes_at_the_hub_only() -> None:
    played = Played(minimum_rows=5)
    assert played.answer_member(played.to_hub, played.tags) == [
        frame_items(played.to_hub, [], kind=4)
    ]
    with pytest.raises(IntersectionTooSmallError, match=r"\(4 in common to all; 4 with p\)"):
        _ = played.hub.rows


def test_secrets_are_absent_from_repr() -> None:
    hub, member = make_roles()
    assert "0x" in repr(hub)
    assert "scalar" not in repr(vars(hub)["_blindings"])
    assert "scalar" not in repr(vars(member)["_blindings"])


# Points in several threads: same results, really at once, and over when it is called off.

SCALAR = b"a" * 32
DIGESTS = ecdh.digest_ids([b"%d" % k for k in range(41)], session=bytes(32))
POINTS = ecdh.blind_digests(SCALAR, DIGESTS)


def test_each_multiplication_is_that_of_another_library() -> None:
    key = X25519PrivateKey.from_private_bytes(SCALAR)
    random = np.random.default_rng(3).bytes(32 * 200)

    def multiply_otherwise(points: list[bytes]) -> list[bytes]:
        return [key.exchange(X25519PublicKey.from_public_bytes(point)) for point in points]

    assert split_points(POINTS) == multiply_otherwise(ecdh.map_to_curve(DIGESTS))
    found = split_points(ecdh.multiply_points(SCALAR, random))
    assert found == multiply_otherwise(split_points(random))


@pytest.mark.parametrize(("count", "maximum"), [(0, 2), (1, None), (3, 2), (40, 1), (40, None)])
def test_many_small_pieces_come_back_in_order(
    count: int, maximum: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ecdh, "_POINTS_PER_CHUNK", 3)
    some = DIGESTS[: 32 * count]
    seen = list[int]()
    found = map_in_threads(
        partial(ecdh.blind_digests, SCALAR), some, threads=maximum, report_done=seen.append
    )
    assert found == POINTS[: 32 * count]
    assert seen == sorted(seen)
    assert seen[-1] == count
    again = map_in_threads(partial(ecdh.multiply_points, SCALAR), found, threads=maximum)
    assert again == ecdh.multiply_points(SCALAR, found)


@pytest.fixture
def no_switching() -> Iterator[None]:
    """A thread gives Python's lock away of its own accord only."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(60)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("no_switching")
def test_a_multiplication_leaves_pythons_lock_to_others() -> None:
    done: list[str] = []
    points = split_points(POINTS) * 100

    def multiply(name: str) -> None:
        for point in points:
            ecdh.multiply_points(SCALAR, point)
            done.append(name)

    with ThreadPoolExecutor(2) as two:
        list(two.map(multiply, "ab"))
    assert len(done) == 2 * len(points)
    # with the lock kept all the time, one would be over before the other began
    assert sum(one != following for one, following in itertools.pairwise(done)) > 5


@pytest.mark.parametrize(("maximum", "expected"), [(None, 3), (2, 2), (1, 1), (9, 7)])
def test_long_lists_use_a_thread_for_each_processor(
    maximum: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    monkeypatch.setattr(ecdh, "_POINTS_PER_CHUNK", 6)
    seen: set[int] = set()
    together = threading.Barrier(expected)

    def work(blocks: bytes) -> bytes:
        if threading.get_ident() not in seen:
            seen.add(threading.get_ident())
            together.wait(20)
        return blocks

    assert map_in_threads(work, DIGESTS, threads=maximum) == DIGESTS
    assert len(seen) == expected
    assert (threading.get_ident() in seen) == (expected == 1)


def test_an_error_in_a_thread_is_raised() -> None:
    with pytest.raises(RuntimeError, match="library error"):
        map_in_threads(partial(ecdh.multiply_points, SCALAR), bytes(32) * 5000, threads=2)


def test_a_party_that_is_told_to_end_ends_soon() -> None:
    script = (
        "import signal\nfrom functools import partial\nfrom apfed_protocols.psi import "
        "ecdh\nsignal.signal(signal.SIGINT, signal.default_int_handler)\ndef tell(done):\n    "
        "print(done, flush=True)\nwork = partial(ecdh.blind_digests, bytes(32))\n"
        "ecdh.map_in_threads(work, b'1' * 32 * 300_000, threads=2, report_done=tell)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as party:
        assert party.stdout is not None
        assert party.stdout.readline()
        os.kill(party.pid, signal.SIGINT)
        done, complaint = party.communicate(timeout=LONG_S)
    assert "300000" not in done.split()
    assert complaint.count("Traceback") == 1

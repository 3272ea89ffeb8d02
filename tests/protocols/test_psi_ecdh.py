"""The messages of the intersection over X25519, honest and hostile, and its curve."""

from collections.abc import Sequence

import numpy as np
import pytest

from apfed_protocols.conversation import Outgoing
from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.psi import ecdh
from apfed_protocols.psi.ecdh import EcdhIntersection, split_points
from apfed_protocols.psi.interface import Aligner, IntersectionAgreement, IntersectionTooSmallError
from apfed_protocols.randomness import fresh_key

HEADER = 22
PRIME = 2**255 - 19
IDS = [str(k).encode() for k in range(6)]


def make_roles(*, minimum_rows: int = 0) -> tuple[Aligner, Aligner]:
    agreement = IntersectionAgreement(session="s", minimum_rows=minimum_rows, maximum_ids=100)
    protocol = EcdhIntersection(agreement)
    return protocol.hub("hub", ["p"], IDS), protocol.member("p", "hub", IDS[2:])


def played(*, minimum_rows: int = 0) -> tuple[Aligner, Aligner, bytes, bytes, bytes]:
    """Play up to the hub's last message; return both roles and the three before it."""
    hub, member = make_roles(minimum_rows=minimum_rows)
    (to_member,), (to_hub,) = hub.start(), member.start()
    (tags,) = member.receive("hub", to_member.body)
    return hub, member, to_member.body, to_hub.body, tags.body


def framed(like: bytes, items: Sequence[bytes], *, kind: int | None = None) -> bytes:
    head = like[:1] + (like[1:2] if kind is None else bytes([kind])) + like[2:18]
    return head + len(items).to_bytes(4, "big") + b"".join(items)


def points_of(message: bytes) -> list[bytes]:
    return split_points(message[HEADER:])


def number(u: int) -> bytes:
    return u.to_bytes(32, "little")


def is_on_curve(point: bytes) -> bool:
    u = int.from_bytes(point, "little")
    return pow(u * (u * u + 486662 * u + 1), (PRIME - 1) // 2, PRIME) == 1


def test_blinding_commutes_and_stays_on_the_curve() -> None:
    digests = ecdh.digest_ids([b"%d" % k for k in range(64)], session=bytes(32))
    a, b = b"a" * 32, b"b" * 32
    first = ecdh.blind_digests(a, digests)
    assert ecdh.multiply_points(b, first) == ecdh.multiply_points(a, ecdh.blind_digests(b, digests))
    assert all(map(is_on_curve, split_points(first)))
    assert len(set(split_points(first))) == 64


def test_rfc_7748_vector() -> None:
    """RFC 7748, section 5.2, first vector."""
    scalar = bytes.fromhex("a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4")
    point = bytes.fromhex("e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c")
    expected = bytes.fromhex("c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552")
    assert ecdh.multiply_points(scalar, point) == expected


ELLIGATOR_2 = {
    0x65D61DFA58CF932CD60F65F24739D1AFE89442E4A3B2E6EA9D65B0865F148901:
    0x1241E151A4DA26769778A6C8AA5A219FF608C6C31BEA49A0558487A102BF6355,
    0x1393600FD74775F0D19A8EBD282B05349641A8B079C71030BF1BF370C41ACEF9:
    0x25C758D9C7A11A43E72D3DDD7976458330FA9E37F63991457FAC99A70253CFBA,
    0x3E2240CE35B52E6CE7F2CC4C3E57C03BC1619494256E495DADADB10DCC2675E8:
    0x6C70B60BBEA45867F1E270AF0812137AC64C8931370DAE67A4130141F9BBACB1,
    0x6719884A782571B55353A8F2946A3E42430F0C769CE85D1A47026D491452B773:
    0x64AAF5AE99E65460BA87F7F3C6871A66C3C5D3E671B33FE723603C0EED7B9922,
}  # fmt: skip


def test_elligator_2_vectors() -> None:
    """RFC 9380's suite curve25519_XMD:SHA-512_ELL2_NU_: inputs of the map, and the x of Q."""
    digests = b"".join(map(number, ELLIGATOR_2))
    assert ecdh.to_curve(digests) == [number(x) for x in ELLIGATOR_2.values()]
    one_by_one = [ecdh.to_curve(number(r))[0] for r in ELLIGATOR_2]
    assert ecdh.to_curve(digests) == one_by_one
    for others in (
        [PRIME - r for r in ELLIGATOR_2],
        [pow(2 * r, -1, PRIME) for r in ELLIGATOR_2],
        [pow(-2 * r, -1, PRIME) for r in ELLIGATOR_2],
    ):
        assert ecdh.to_curve(b"".join(map(number, others))) == one_by_one


def test_elligator_2_of_any_bytes_is_on_the_curve() -> None:
    """The top bit of a digest plays no part; 2^255 - 1 is above the prime."""
    digests = ecdh.digest_ids([b"%d" % k for k in range(500)], session=bytes(32))
    edges = [number(r) for r in (1, 2, PRIME - 1, PRIME + 1, 2**255 - 1, 2**256 - 1)]
    points = ecdh.to_curve(digests + b"".join(edges))
    assert all(map(is_on_curve, points))
    assert all(int.from_bytes(point, "little") < PRIME for point in points)
    assert len(set(points[:500])) == 500
    assert points[500] == points[502] == points[503]
    assert points[504] == points[505]
    assert ecdh.to_curve(b"") == []


def test_the_digests_that_give_points_of_low_order() -> None:
    """0 and the prime, and the four that give 1: r^2 = -(A + 1) / 2, and 1 / 2r."""
    root = 0x625F51AEAC2CDCD3EB452AC5E7A844E20BE4A3D382D720FB2DB836DBAB93C61F
    assert 2 * root * root % PRIME == PRIME - 486663
    half = pow(2 * root, -1, PRIME)
    for r, u in [(0, 0), (PRIME, 0), *((r, 1) for r in (root, PRIME - root, half, PRIME - half))]:
        assert ecdh.to_curve(number(r)) == [number(u)]
        with pytest.raises(RuntimeError, match="library error"):
            ecdh.blind_digests(fresh_key(), number(r))
    images = [u for u in LOW_ORDER if is_on_curve(number(u)) and reached(u)]
    assert images == [1]


def reached(u: int) -> bool:
    """Whether Elligator 2 gives u: -2 u (u + A) is a square other than 0."""
    return pow(-2 * u * (u + 486662), (PRIME - 1) // 2, PRIME) == 1


def test_half_of_the_points_are_reached() -> None:
    """As `ladder` says; and every hashed point is one of these."""
    rng = np.random.default_rng(5)
    numbers = [int.from_bytes(p, "little") % PRIME for p in split_points(rng.bytes(32 * 4000))]
    share = np.mean([reached(u) for u in numbers if is_on_curve(number(u))])
    assert abs(share - 0.5) < 0.06
    hashed = ecdh.to_curve(rng.bytes(32 * 200))
    assert all(reached(int.from_bytes(p, "little")) for p in hashed)


def test_message_kinds_and_sizes() -> None:
    hub, member, to_member, to_hub, tags = played()
    assert hub.receive("p", to_hub) == []
    (opened,) = hub.receive("p", tags)
    sizes = [len(message) - HEADER for message in (to_member, to_hub, tags, opened.body)]
    assert sizes == [6 * 32, 4 * 32, 6 * 16, 4 * 4]
    assert member.receive("hub", opened.body) == []
    assert [IDS[k] for k in hub.rows] == [IDS[2:][k] for k in member.rows]


def test_no_digest_travels_and_scalars_are_fresh_for_each_run_and_member() -> None:
    one, two = played(), played()
    agreement = IntersectionAgreement(session="s", minimum_rows=0, maximum_ids=100)
    digests = [ecdh.digest_ids(IDS, session=key) for key in (agreement.digest, bytes(32))]
    assert digests[0] != digests[1]
    sent = [one[2], one[3], two[2], two[3]]
    sent += [out.body for out in EcdhIntersection(agreement).hub("hub", ["p", "q"], IDS).start()]
    seen = [point for message in sent for point in points_of(message)]
    assert set(seen).isdisjoint(split_points(digests[0]))
    assert len(set(seen)) == len(seen)


def test_blinded_ids_show_no_bit_of_their_hash() -> None:
    """All blinded points lie on the curve, none on the twist, whatever the set."""
    _, _, to_member, to_hub, _ = played()
    assert all(map(is_on_curve, points_of(to_member) + points_of(to_hub)))


ORDER_EIGHT = 325606250916557431795983626356110631294008115727848805560023387167927233504
LOW_ORDER = (0, 1, PRIME - 1, ORDER_EIGHT, pow(ORDER_EIGHT, -1, PRIME))


def test_low_order_points_annihilate_and_are_refused() -> None:
    for u in LOW_ORDER:
        with pytest.raises(RuntimeError, match="library error"):
            ecdh.multiply_points(fresh_key(), number(u))
        hub, _, to_member, to_hub, _ = played()
        with pytest.raises(RemoteProtocolError, match="p sent a point of low order"):
            hub.receive("p", framed(to_hub, [*points_of(to_hub), number(u)]))
        fresh = make_roles()[1]
        fresh.start()
        with pytest.raises(RemoteProtocolError, match="hub sent a point of low order"):
            fresh.receive("hub", framed(to_member, [number(u)]))


def test_numbers_that_are_not_reduced_and_parts_of_points_are_refused() -> None:
    for u in (PRIME, PRIME + 5, 2**255 - 1, 2**255 + 9):
        hub, _, _, to_hub, _ = played()
        with pytest.raises(RemoteProtocolError, match="not a number below"):
            hub.receive("p", framed(to_hub, [number(u)]))
    ecdh.check_points("p", number(PRIME - 2) + number(2))
    with pytest.raises(RemoteProtocolError, match="p sent 33 bytes of points"):
        ecdh.check_points("p", bytes(33))


def test_repeated_points_are_refused() -> None:
    hub, _, _, to_hub, _ = played()
    points = points_of(to_hub)
    with pytest.raises(RemoteProtocolError, match=r"p sent 2 blinded ID\(s\) twice"):
        hub.receive("p", framed(to_hub, [*points, points[0], points[1]]))


def test_one_id_in_two_ways_is_refused() -> None:
    """Adding the point of order 2 turns u into 1 / u: another number, of the same multiples."""
    hub, _, to_member, to_hub, _ = played()
    points = points_of(to_hub)
    twin = number(pow(int.from_bytes(points[1], "little"), -1, PRIME))
    scalar = fresh_key()
    assert ecdh.multiply_points(scalar, twin) == ecdh.multiply_points(scalar, points[1])
    with pytest.raises(RemoteProtocolError, match="p sent one blinded ID in two ways"):
        hub.receive("p", framed(to_hub, [*points, twin]))
    fresh = make_roles()[1]
    fresh.start()
    with pytest.raises(RemoteProtocolError, match="hub sent one blinded ID in two ways"):
        fresh.receive("hub", framed(to_member, [points[1], twin]))


def test_points_of_the_twist_match_nothing() -> None:
    """They are of large order too, and stay on the twist."""
    hub, _, to_member, to_hub, _ = played()
    twisted = [number(u) for u in range(2, 200) if not is_on_curve(number(u))][:6]
    fresh = make_roles()[1]
    fresh.start()
    (answer,) = fresh.receive("hub", framed(to_member, twisted))
    assert len({answer.body[HEADER + k :][:16] for k in range(0, 96, 16)}) == 6
    hub.receive("p", framed(to_hub, twisted))
    hub.receive("p", answer.body)
    assert hub.size == 0


def test_a_stuffed_set_is_refused_before_it_is_read() -> None:
    hub, _, _, to_hub, _ = played()
    with pytest.raises(RemoteProtocolError, match=r"announces 101 items, .* accepts at most 100"):
        hub.receive("p", framed(to_hub, [number(k + 2) for k in range(101)]))


def test_malformed_frames_are_refused() -> None:
    hub, _, _, to_hub, _ = played()
    for message, what in [
        (b"", "0 bytes, too few"),
        (to_hub[:21], "21 bytes, too few"),
        (to_hub[:-1], "announces 4 items of 32 bytes and sent 127 bytes"),
        (to_hub + b"0", "announces 4 items of 32 bytes and sent 129 bytes"),
        (b"\x09" + to_hub[1:], "version 9"),
        (to_hub[:1] + b"\x09" + to_hub[2:], "kind 9"),
        (framed(to_hub, [], kind=4) + b"0", "announces 0 items of 0 bytes and sent 1 bytes"),
    ]:
        with pytest.raises(RemoteProtocolError, match=what):
            hub.receive("p", message)
    assert hub.receive("p", to_hub) == []


def test_repeated_or_early_messages_are_refused() -> None:
    hub, member, to_member, to_hub, tags = played()
    with pytest.raises(RemoteProtocolError, match="sent tags when"):
        hub.receive("p", tags)
    hub.receive("p", to_hub)
    with pytest.raises(RemoteProtocolError, match="sent blinded when"):
        hub.receive("p", to_hub)
    (opened,) = hub.receive("p", tags)
    with pytest.raises(RemoteProtocolError, match="sent tags when"):
        hub.receive("p", tags)
    with pytest.raises(RemoteProtocolError, match="sent blinded when"):
        member.receive("hub", to_member)
    member.receive("hub", opened.body)
    for again in (opened.body, framed(opened.body, [], kind=4)):
        with pytest.raises(RemoteProtocolError, match="when the protocol does not expect it"):
            member.receive("hub", again)


def test_rows_before_the_blinded_ids_are_refused() -> None:
    _, member = make_roles()
    (own,) = member.start()
    with pytest.raises(RemoteProtocolError, match="sent rows when"):
        member.receive("hub", framed(own.body, [], kind=3))
    with pytest.raises(RemoteProtocolError, match="sent refusal when"):
        member.receive("hub", framed(own.body, [], kind=4))


def test_unfit_rows_are_refused() -> None:
    for places, message in [
        ([0, 4], "place 4 of a list of 4 IDs"),
        ([1, 1], "opened 2 rows, of which 1 differ"),
        ([0], "opened 1 rows, the parties agreed on at least 2"),
        ([], "opened 0 rows, the parties agreed on at least 2"),
    ]:
        _, member, to_member, _, _ = played(minimum_rows=2)
        body = framed(to_member, [k.to_bytes(4, "big") for k in places], kind=3)
        with pytest.raises(RemoteProtocolError, match=message):
            member.receive("hub", body)
        assert not member.finished


def test_more_rows_than_the_hub_has_ids_are_refused() -> None:
    protocol = EcdhIntersection(IntersectionAgreement(session="s", minimum_rows=0))
    hub, member = protocol.hub("hub", ["p"], [b"a"]), protocol.member("p", "hub", [b"a", b"b"])
    (offer,), _ = hub.start(), member.start()
    member.receive("hub", offer.body)
    with pytest.raises(RemoteProtocolError, match=r"opened 2 rows, .* with a set of 1 IDs"):
        member.receive("hub", framed(offer.body, [bytes(4), bytes(3) + b"\1"], kind=3))


def test_unfit_tags_are_refused() -> None:
    for change in ["missing", "repeated"]:
        hub, _, _, to_hub, message = played()
        hub.receive("p", to_hub)
        tags = [message[k : k + 16] for k in range(HEADER, len(message), 16)]
        tags = tags[:-1] if change == "missing" else [*tags[:-1], tags[0]]
        with pytest.raises(
            RemoteProtocolError, match="p returned 5 different tags for the 6 blinded"
        ):
            hub.receive("p", framed(message, tags))


def test_a_refusal_names_the_sizes_at_the_hub_only() -> None:
    hub, member, _, to_hub, tags = played(minimum_rows=5)
    hub.receive("p", to_hub)
    (refusal,) = hub.receive("p", tags)
    assert refusal == Outgoing("p", framed(to_hub, [], kind=4))
    member.receive("hub", refusal.body)
    with pytest.raises(IntersectionTooSmallError, match=r"\(4 in common to all; 4 with p\)"):
        _ = hub.rows
    with pytest.raises(IntersectionTooSmallError, match="minimum of 5; nothing was opened"):
        _ = member.rows


def test_a_refusal_without_an_agreed_minimum_is_refused() -> None:
    _, member, to_member, _, _ = played(minimum_rows=0)
    with pytest.raises(RemoteProtocolError, match="hub sent refusal when the protocol does not"):
        member.receive("hub", framed(to_member, [], kind=4))


def test_secrets_are_absent_from_repr() -> None:
    hub, member = make_roles()
    assert "0x" in repr(hub)
    for pair in hub._pairs.values():  # type: ignore[attr-defined]  # looking for a leak
        assert "scalar" not in repr(pair)
    assert "_scalar" not in repr(member)

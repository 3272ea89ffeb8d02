"""The circuit intersection: its gates, bins and messages, and what they show."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from numpy.typing import NDArray

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.psi import circuit, hashing
from apfed_protocols.psi.circuit import VERSION, CircuitIntersection, Kind, deal_request
from apfed_protocols.psi.interface import Framing, IntersectionAgreement, IntersectionTooSmallError
from tests.contracts.intersections import HEADER, Change, Intersection, of_kind

AGREEMENT = IntersectionAgreement(session="s", minimum_rows=0, maximum_ids=1000, dealer="d")
RNG = np.random.default_rng(7)


def ids_of(*numbers: int) -> list[bytes]:
    return [b"id %d" % number for number in numbers]


class Stage(Intersection):
    """Plays hub, members and dealer."""

    def __init__(
        self,
        *sets: Sequence[bytes],
        change: Change | None = None,
        agreement: IntersectionAgreement = AGREEMENT,
    ) -> None:
        names = ["hub", *(f"p{k}" for k in range(len(sets) - 1))]
        held = dict(zip(names, sets, strict=True))
        super().__init__(CircuitIntersection, held, agreement, change=change)

    @property
    def said(self) -> list[tuple[str, str, Kind, bytes]]:
        """Sender, receiver, kind and body of each message."""
        return [(a, out.receiver, Kind(out.body[1]), out.body[HEADER:]) for a, out in self.sent]


def framed(kind: Kind, items: bytes) -> bytes:
    framing = Framing(AGREEMENT, VERSION, dict.fromkeys(map(int, Kind), 1), 2**32 - 1)
    return framing.pack(kind, items)


def random_tags(*shape: int) -> NDArray[np.uint64]:
    return RNG.integers(0, 2**64, shape, np.uint64)


# Gates


def test_bit_planes_hold_each_bit_where_the_docstring_says() -> None:
    for shape in [(64,), (256,), (3, 128)]:
        tags = random_tags(*shape)
        planes = hashing.bit_planes(tags)
        assert planes.shape == (64, *shape[:-1], shape[-1] // 64)
        for _ in range(200):
            p, b = int(RNG.integers(64)), int(RNG.integers(shape[-1]))
            word = planes[p][..., b // 64]
            assert (
                (word >> np.uint64(b % 64)) & np.uint64(1) == (tags[..., b] >> np.uint64(p)) & 1
            ).all()


def test_shared_and_equals_and() -> None:
    for parties in [2, 3, 5]:
        seeds, correction = hashing.deal_triples(parties, 12)
        corrections = [None] * (parties - 1) + [correction]
        triples = [
            hashing.TripleShares.expand(seed, 12, fix).take((3, 4))
            for seed, fix in zip(seeds, corrections, strict=True)
        ]
        x, y = random_tags(parties, 3, 4), random_tags(parties, 3, 4)
        gates = [hashing.BeaverAnd(x[k], y[k], triples[k], leads=k == 0) for k in range(parties)]
        opened = np.bitwise_xor.reduce([gate.masked() for gate in gates])
        z = [gate.share(opened) for gate in gates]
        expected = np.bitwise_xor.reduce(x) & np.bitwise_xor.reduce(y)
        assert (np.bitwise_xor.reduce(z) == expected).all()


def test_triples_are_handed_out_once() -> None:
    shares = hashing.TripleShares.expand(bytes(32), 10)
    first, second = shares.take((2, 3)), shares.take((4,))
    assert not set(first[0].ravel()) & set(second[0].ravel())
    with pytest.raises(ValueError, match="reshape"):
        shares.take((1,))
    assert "array" not in repr(shares)


# Bins


def test_cuckoo_table_keeps_each_row_in_one_of_its_bins() -> None:
    for size in [0, 1, 5, 100, 3000]:
        count = hashing.bins_for(size)
        tags, bins_n3, _ = hashing.fingerprints(ids_of(*range(size)), bytes(32), count)
        row_of_bin = hashing.cuckoo_table(bins_n3, count)
        assert row_of_bin is not None
        kept = np.flatnonzero(row_of_bin >= 0)
        assert sorted(row_of_bin[kept].tolist()) == list(range(size))
        assert all(place in bins_n3[row_of_bin[place]] for place in kept)
        tags_B = hashing.hub_tags(tags, row_of_bin)
        assert (tags_B[kept] == tags[row_of_bin[kept]]).all()


def test_cuckoo_hashing_says_when_it_fails() -> None:
    assert hashing.cuckoo_table(np.array([[0, 1, 2]] * 4), 64) is None
    assert hashing.cuckoo_table(np.array([[0, 1, 2]] * 3), 64) is not None


def test_cuckoo_hashing_fails_less_than_once_in_two_to_the_forty_one() -> None:
    """The expected number of sets of s IDs that have s - 1 bins, each of two of them at least.

    Each counts the ways to choose s IDs and s - 1 bins, times the smaller of two bounds on the
    chance that these do: three of the s - 1 bins each; or any 3 s of them, two in each at least,
    which a generating function bounds at any x.
    """
    for count in [4, 10, 60, 100, 125, 300, 2000]:
        bins, expected = hashing.bins_for(count), 0.0
        for s in range(4, count + 1):
            within = s * (log_choose(s - 1, 3) - log_choose(bins, 3))
            x = min(
                (
                    math.lgamma(3 * s + 1)
                    + (s - 1) * math.log(math.expm1(x) - x)
                    - 3 * s * math.log(x)
                )
                for x in np.geomspace(0.01, 10, 60).tolist()
            )
            covered = x - s * math.log(bins * (bins - 1) * (bins - 2))
            expected += math.exp(
                log_choose(count, s) + log_choose(bins, s - 1) + min(within, covered)
            )
        assert expected < 2**-41


def log_choose(of: int, some: int) -> float:
    return math.lgamma(of + 1) - math.lgamma(some + 1) - math.lgamma(of - some + 1)


def test_a_member_puts_each_id_into_each_of_its_bins() -> None:
    tags = np.array([11, 12, 13, 14], np.uint64)
    bins_n3 = np.array([[0, 1, 2], [0, 7, 1], [3, 8, 9], [2, 0, 6]])
    table = hashing.member_table(tags, bins_n3, 64, 3)
    assert table is not None
    in_bin = [sorted(tag for tag in table[:, k].tolist() if tag < 2**63) for k in range(64)]
    assert in_bin[:5] == [[11, 12, 14], [11, 12], [11, 14], [13], []]
    assert hashing.member_table(tags, bins_n3, 64, 2) is None
    tags[2] = tags[0]
    assert hashing.member_table(tags, bins_n3, 64, 3) is not None, "they share no bin"
    tags[2:] = 13, tags[0]
    assert hashing.member_table(tags, bins_n3, 64, 3) is None, "they would cancel"


def test_each_id_has_three_different_bins() -> None:
    _, bins_n3, _ = hashing.fingerprints(ids_of(*range(3000)), bytes(32), 64)
    assert all(len(set(row)) == 3 for row in bins_n3.tolist())
    # each bin of 64 by 3 of 64, five standard deviations
    used = np.bincount(bins_n3.ravel(), minlength=64)
    assert abs(used - 3000 * 3 / 64).max() < 5 * math.sqrt(3000 * 3 / 64)


def test_dummies_equal_no_tag_and_not_each_other() -> None:
    tags, bins_n3, _ = hashing.fingerprints(ids_of(*range(500)), bytes(32), 640)
    assert int(tags.max()) < 2**63
    assert int(bins_n3.min()) >= 0
    assert int(bins_n3.max()) < 640
    hub = hashing.hub_tags(tags, np.full(64, -1, np.int64))
    member = hashing.member_table(tags[:0], bins_n3[:0], 64, 1)
    assert member is not None
    assert not set(hub.tolist()) & set(member.ravel().tolist())
    assert min(*hub.tolist(), *member.ravel().tolist()) >= 2**63


def test_slots_hold_what_random_ids_need_and_little_more() -> None:
    assert [hashing.slots_for(n, hashing.bins_for(n)) for n in (10**4, 10**5, 10**6)] == [
        24,
        25,
        26,
    ]
    for size in (100, 1000):
        count = hashing.bins_for(size)
        slots = hashing.slots_for(size, count)
        assert overflow_probability(size, count, slots) <= 2**-40
        assert overflow_probability(size, count, slots - 1) > 2**-40


def overflow_probability(balls: int, count: int, slots: int) -> float:
    """Union bound over the bins, of an exact binomial tail."""
    tail = sum(
        Fraction(math.comb(balls, k) * 3**k * (count - 3) ** (balls - k), count**balls)
        for k in range(slots + 1, slots + 40)
    )
    return float(count * tail)


def test_very_uneven_sets() -> None:
    many = ids_of(*range(1000))
    Stage(ids_of(3, 2000), many).play().check()
    Stage(many, ids_of(3, 2000)).play().check()
    Stage([], many).play().check()
    Stage(many, []).play().check()


# Runs


@pytest.mark.parametrize("members", [1, 2, 5])
def test_chunks_change_nothing(members: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circuit, "CHUNK_SLOTS", 2000)
    sets = [ids_of(*RNG.permutation(400)[: 300 + 10 * k]) for k in range(members + 1)]
    stage = Stage(*sets).play()
    stage.check()
    assert sum(kind is Kind.DEAL for _, _, kind, _ in stage.said) > 3


@pytest.mark.parametrize("name", ["cuckoo_table", "member_table"])
def test_a_failed_table_leads_to_the_next_key(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table, calls = getattr(hashing, name), []

    def fails_twice(*arguments: object) -> object:
        calls.append(1)
        return None if len(calls) <= 2 else table(*arguments)

    monkeypatch.setattr(hashing, name, fails_twice)
    stage = Stage(ids_of(*range(50)), ids_of(*range(25, 75)), ids_of(*range(10, 60))).play()
    stage.check()
    places = [
        body for _, receiver, kind, body in stage.said if kind is Kind.PLACE and receiver == "p0"
    ]
    assert places[-1] != (0).to_bytes(4, "big")


def test_equal_tags_lead_to_the_next_key(monkeypatch: pytest.MonkeyPatch) -> None:
    real = hashing.fingerprints
    seen: list[int] = []

    def collides_once(ids: Sequence[bytes], key: bytes, count: int) -> object:
        tags, bins_n3, tokens = real(ids, key, count)
        if len(ids) == 30 and not seen:
            seen.append(1)
            tags[7], bins_n3[7] = tags[3], bins_n3[3]
        return tags, bins_n3, tokens

    monkeypatch.setattr(hashing, "fingerprints", collides_once)
    Stage(ids_of(*range(20)), ids_of(*range(10, 40))).play().check()
    assert seen


def test_ids_that_never_fit_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "cuckoo_table", lambda *_: None)
    with pytest.raises(LocalProtocolError, match="hub: none of 64 hash keys"):
        Stage(ids_of(1, 2), ids_of(2, 3)).play()


def test_below_the_minimum_no_share_leaves_a_member() -> None:
    agreement = IntersectionAgreement(session="s", minimum_rows=6, dealer="d")
    stage = Stage(ids_of(*range(20)), ids_of(*range(15, 40)), agreement=agreement).play()
    kinds = {kind for _, _, kind, _ in stage.said}
    assert Kind.SHARE not in kinds
    assert Kind.TOKENS not in kinds
    for role in stage.aligners.values():
        with pytest.raises(IntersectionTooSmallError, match="minimum of 6; nothing was opened"):
            _ = role.rows


# What messages show


def test_no_tag_is_in_any_message() -> None:
    seen: list[bytes] = []
    sets = (range(300), range(300), range(5, 305))
    stage = Stage(*(ids_of(*numbers) for numbers in sets))
    real = hashing.fingerprints

    def watched(ids: Sequence[bytes], key: bytes, count: int) -> object:
        tags, bins_n3, tokens = real(ids, key, count)
        seen.extend(tag.tobytes() for tag in tags)
        return tags, bins_n3, tokens

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashing, "fingerprints", watched)
        stage.play()
    assert len(seen) == 900
    everything = b"".join(body for *_, body in stage.said)
    assert not any(tag in everything for tag in seen)


# Hostile messages


ALTERED: dict[tuple[str, Kind], dict[str, Callable[[bytes], bytes]]] = {
    ("hub", Kind.COMMIT): {
        "hub sent commit of 39 bytes, expected 40": lambda b: b[:-1],
        "another key part than it committed to": lambda b: bytes(32) + b[32:],
        "hub gives place 1 among 1 members": lambda b: b[:38] + b"\0\1",
        "hub announces 4294967295 IDs": lambda b: b[:32] + b"\xff" * 4 + b[36:],
    },
    ("p0", Kind.JOIN): {
        "p0 announces 4294967295 IDs": lambda b: b[:64] + b"\xff" * 4,
        "repeats the key part or size of p0 wrongly": lambda b: bytes(32) + b[32:],
    },
    ("hub", Kind.REVEAL): {"reveal of 69 bytes, expected 68": lambda b: b + b"0"},
    ("hub", Kind.PLACE): {"hub proposes hash key 64 after -1": lambda b: b"\0\0\0\x40"},
    ("p0", Kind.PLACED): {
        "placed of 2 bytes, expected 1": lambda b: b"\1\1",
        "p0 took none of the 64 hash keys": lambda b: b"\0",
    },
    ("hub", Kind.AGREED): {"agreed of 1 bytes, expected 0": lambda b: b"1"},
    ("hub", Kind.DEAL): {
        "deal of 4 bytes, expected 8": lambda b: b[:4],
        "triples for 0 words": lambda b: bytes(4) + b[4:],
        "a chunk has 1 to 2097152 slots": lambda b: b"\0\1\0\0" + b[4:],
        "words of bins with 0 slots": lambda b: b[:4] + bytes(4),
    },
    ("d", Kind.TRIPLES): {"d sent triples of .* bytes, expected": lambda b: b[:-8]},
    ("p0", Kind.MASKED): {"p0 sent masked of .* bytes, expected": lambda b: b[:-1]},
    ("hub", Kind.MASKED): {"hub sent masked of .* bytes, expected": lambda b: b + b"0"},
    ("p0", Kind.COUNT): {"p0 sent count of .* bytes, expected": lambda b: b[8:]},
    ("d", Kind.VERDICT): {
        "d sent verdict of 0 bytes, expected 8": lambda b: b"",
        "d announces -3 common IDs, .* not agreed": lambda b: b[:7] + b"\xfd",
    },
    ("p0", Kind.SHARE): {"p0 opened bins in which hub has no": lambda b: bytes(255 - x for x in b)},
    ("hub", Kind.TOKENS): {
        "hub opened 8 IDs, of which 7 different": lambda b: b[16:] + bytes(16),
        "hub sent a tag twice": lambda b: b[:16] * 2,
        "hub opened 9 IDs, of which 8 different": lambda b: b + b"0",
        r"opened 2 IDs, .* agreed on at least 3": lambda b: b[:32],
    },
}


@pytest.mark.parametrize(("sender", "kind"), ALTERED)
def test_altered_messages_are_refused(sender: str, kind: Kind) -> None:
    agreement = replace(AGREEMENT, minimum_rows=3)
    for message, body in ALTERED[sender, kind].items():
        change = of_kind(sender, kind, body)
        stage = Stage(ids_of(*range(10)), ids_of(*range(2, 12)), change=change, agreement=agreement)
        with pytest.raises(RemoteProtocolError, match=message):
            stage.play()


def test_a_message_out_of_turn_and_a_flood_are_refused() -> None:
    stage = Stage(ids_of(1), ids_of(1))
    member, dealer = stage.roles["p0"], stage.roles["d"]
    member.start()
    with pytest.raises(
        RemoteProtocolError, match="hub sent tokens when the protocol expects commit"
    ):
        member.receive("hub", framed(Kind.TOKENS, b""))
    dealer.start()
    for _ in range(4):
        assert dealer.receive("p0", framed(Kind.COUNT, bytes(8))) == []
    with pytest.raises(RemoteProtocolError, match="p0 is too far ahead"):
        dealer.receive("p0", framed(Kind.COUNT, bytes(8)))
    stage = Stage(ids_of(1, 2), ids_of(1, 2)).play()
    for name, role in stage.roles.items():
        peer = "p0" if name == "hub" else "hub"
        assert role.finished
        with pytest.raises(RemoteProtocolError, match=f"{peer} sent a message when .* is over"):
            role.receive(peer, framed(Kind.MASKED, b""))


def ordered(agreement: IntersectionAgreement, *orders: tuple[int, int]) -> None:
    """Let a hub order from the dealer: words of bins and slots, time and again."""
    dealer = CircuitIntersection(agreement).dealer("hub", ["p0"])
    dealer.start()
    framing = Framing(agreement, VERSION, dict.fromkeys(map(int, Kind), 1), 2**32 - 1)
    for words, slots in orders:
        dealer.receive("hub", framing.pack(Kind.DEAL, deal_request(words, [slots])))


def test_a_hub_cannot_order_more_than_the_agreed_sizes_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most = hashing.slots_for(10**7, hashing.bins_for(0))
    dealt: list[int] = []
    real = hashing.deal_triples

    def noted(parties: int, count: int) -> tuple[Sequence[bytes], bytes]:
        dealt.append(count)
        return real(parties, min(count, 64))

    monkeypatch.setattr(circuit, "deal_triples", noted)
    agreement = IntersectionAgreement(session="s", maximum_ids=10**7, dealer="d")
    ordered(agreement, (1, most))
    assert max(dealt) == 63 * most
    with pytest.raises(RemoteProtocolError, match=f"or one word of bins, and a bin at most {most}"):
        ordered(agreement, (1, most + 1))
    assert max(dealt) == 63 * most


def test_a_hub_cannot_order_without_end() -> None:
    words = hashing.bins_for(AGREEMENT.maximum_ids) // 64
    ordered(AGREEMENT, *[(1, 5)] * words)
    with pytest.raises(RemoteProtocolError, match="1472 bins, more than the agreed 1000 IDs take"):
        ordered(AGREEMENT, *[(1, 5)] * (words + 1))


def test_a_dealer_is_needed_and_is_nobody_else() -> None:
    with pytest.raises(LocalProtocolError, match="needs a dealer; name it in the agreement"):
        CircuitIntersection(IntersectionAgreement(session="s"))
    protocol = CircuitIntersection(AGREEMENT)
    with pytest.raises(LocalProtocolError, match="dealer 'd'"):
        protocol.hub("d", ["p"], ids_of(1))
    with pytest.raises(LocalProtocolError, match="dealer 'd'"):
        protocol.member("d", "hub", ids_of(1))
    with pytest.raises(LocalProtocolError, match="dealer 'd'"):
        protocol.dealer("hub", ["d"])

"""The circuit intersection: its gates, bins and messages, and what they show."""

import hashlib
import math
import threading
from collections.abc import Generator, Sequence
from fractions import Fraction
from typing import Any, ClassVar
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from apfed_protocols.crypten import load_crypten
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.psi import circuit, hashing
from apfed_protocols.psi.circuit import (
    MAX_CHUNK_SLOTS,
    CircuitInputs,
    CircuitIntersection,
    Endpoint,
    Kind,
    OpprfIntersection,
    pack_order,
    split_bins,
)
from apfed_protocols.psi.hashing import Words, count_bins
from apfed_protocols.psi.interface import Aligner, IntersectionAgreement, Messages, Round
from apfed_protocols.psi.store import (
    DENSE_CELLS,
    Equations,
    count_cells,
    decode_values,
    extract_id_hashes,
)
from apfed_protocols.psi.vole import ORDER
from tests.contracts.intersections import HEADER, Change, Intersection
from tests.memory import trace_memory
from tests.refusals import list_unrefused
from tests.with_crypten import installed

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
        """List sender, receiver, kind and body of each message."""
        return [(a, out.receiver, Kind(out.body[1]), out.body[HEADER:]) for a, out in self.sent]


def frame_message(
    kind: Kind,
    body: bytes,
    agreement: IntersectionAgreement = AGREEMENT,
    version: int = CircuitIntersection.version,
) -> bytes:
    (out,) = (
        Endpoint("hub", agreement, version=version)
        .make_round(kind, {"p": body}, awaited=())
        .outgoing
    )
    return out.body


def random_tags(*shape: int) -> NDArray[np.uint64]:
    return RNG.integers(0, 2**64, shape, np.uint64)


# Gates


@pytest.mark.parametrize("shape", [(64,), (256,), (3, 128)], ids=str)
def test_bit_planes_hold_each_bit_where_the_docstring_says(shape: tuple[int, ...]) -> None:
    tags = random_tags(*shape)
    planes = hashing.split_bit_planes(tags)
    assert planes.shape == (64, *shape[:-1], shape[-1] // 64)
    bins = np.arange(shape[-1])
    bits = np.arange(64, dtype=np.uint64).reshape(64, *[1] * len(shape))
    found = (planes[..., bins // 64] >> (bins % 64).astype(np.uint64)) & np.uint64(1)
    assert np.array_equal(found, (tags >> bits) & np.uint64(1))


@pytest.mark.parametrize("parties", [2, 3, 5])
def test_shared_and_equals_and(parties: int) -> None:
    seeds, correction = hashing.deal_triples(parties, 12)
    corrections = [None] * (parties - 1) + [correction]
    triples = [
        hashing.TripleShares.from_seed(seed, 12, fix).take_triple((3, 4))
        for seed, fix in zip(seeds, corrections, strict=True)
    ]
    x = random_tags(parties, 3, 4)
    y = random_tags(parties, 3, 4)
    gates = [hashing.BeaverAnd(x[k], y[k], triples[k], is_leader=k == 0) for k in range(parties)]
    opened = np.bitwise_xor.reduce([gate.mask_inputs() for gate in gates])
    z = [gate.compute_share(opened) for gate in gates]
    expected = np.bitwise_xor.reduce(x) & np.bitwise_xor.reduce(y)
    assert (np.bitwise_xor.reduce(z) == expected).all()


def test_triples_are_handed_out_once() -> None:
    shares = hashing.TripleShares.from_seed(bytes(32), 10)
    first = shares.take_triple((2, 3))
    second = shares.take_triple((4,))
    assert not set(first[0].ravel()) & set(second[0].ravel())
    with pytest.raises(ValueError, match="reshape"):
        shares.take_triple((1,))
    assert "array" not in repr(shares)


# Bins


@pytest.mark.parametrize("size", [0, 1, 5, 100, 3000])
def test_cuckoo_table_keeps_each_row_in_one_of_its_bins(size: int) -> None:
    count = hashing.count_bins(size)
    tags, bins_n3, _ = hashing.fingerprint_ids(ids_of(*range(size)), bytes(32), count)
    row_of_bin = hashing.fill_cuckoo_table(bins_n3, count)
    assert row_of_bin is not None
    kept = np.flatnonzero(row_of_bin >= 0)
    assert sorted(row_of_bin[kept].tolist()) == list(range(size))
    assert all(place in bins_n3[row_of_bin[place]] for place in kept)
    tags_B = hashing.place_hub_tags(tags, row_of_bin)
    assert (tags_B[kept] == tags[row_of_bin[kept]]).all()


def test_cuckoo_hashing_says_when_it_fails() -> None:
    assert hashing.fill_cuckoo_table(np.array([[0, 1, 2]] * 4), 64) is None
    assert hashing.fill_cuckoo_table(np.array([[0, 1, 2]] * 3), 64) is not None


@pytest.mark.parametrize("count", [4, 10, 60, 100, 125, 300, 2000])
def test_cuckoo_hashing_fails_less_than_once_in_two_to_the_forty_one(count: int) -> None:
    """The expected number of sets of s IDs that have s - 1 bins, each of two of them at least.

    Each counts the ways to choose s IDs and s - 1 bins, times the smaller of two bounds on the
    chance that these do: three of the s - 1 bins each; or any 3 s of them, two in each at least,
    which a generating function bounds at any x.
    """
    bins = hashing.count_bins(count)
    expected = 0.0
    for s in range(4, count + 1):
        within = s * (log_choose(s - 1, 3) - log_choose(bins, 3))
        x = min(
            (math.lgamma(3 * s + 1) + (s - 1) * math.log(math.expm1(x) - x) - 3 * s * math.log(x))
            for x in np.geomspace(0.01, 10, 60).tolist()
        )
        covered = x - s * math.log(bins * (bins - 1) * (bins - 2))
        expected += math.exp(log_choose(count, s) + log_choose(bins, s - 1) + min(within, covered))
    assert expected < 2**-41


def log_choose(of: int, some: int) -> float:
    return math.lgamma(of + 1) - math.lgamma(some + 1) - math.lgamma(of - some + 1)


def test_a_member_puts_each_id_into_each_of_its_bins() -> None:
    tags = np.array([11, 12, 13, 14], np.uint64)
    bins_n3 = np.array([[0, 1, 2], [0, 7, 1], [3, 8, 9], [2, 0, 6]])
    table = hashing.fill_member_table(tags, bins_n3, 64, 3)
    assert table is not None
    in_bin = [sorted(tag for tag in table[:, k].tolist() if tag < 2**63) for k in range(64)]
    assert in_bin[:5] == [[11, 12, 14], [11, 12], [11, 14], [13], []]
    assert hashing.fill_member_table(tags, bins_n3, 64, 2) is None
    tags[2] = tags[0]
    assert hashing.fill_member_table(tags, bins_n3, 64, 3) is not None, "they share no bin"
    tags[2:] = 13, tags[0]
    assert hashing.fill_member_table(tags, bins_n3, 64, 3) is None, "they would cancel"


def test_each_id_has_three_different_bins() -> None:
    _, bins_n3, _ = hashing.fingerprint_ids(ids_of(*range(3000)), bytes(32), 64)
    assert all(len(set(row)) == 3 for row in bins_n3.tolist())
    # each bin of 64 by 3 of 64, five standard deviations
    used = np.bincount(bins_n3.ravel(), minlength=64)
    assert abs(used - 3000 * 3 / 64).max() < 5 * math.sqrt(3000 * 3 / 64)


def test_dummies_equal_no_tag_and_not_each_other() -> None:
    tags, bins_n3, _ = hashing.fingerprint_ids(ids_of(*range(500)), bytes(32), 640)
    assert int(tags.max()) < 2**63
    assert int(bins_n3.min()) >= 0
    assert int(bins_n3.max()) < 640
    hub = hashing.place_hub_tags(tags, np.full(64, -1, np.int64))
    member = hashing.fill_member_table(tags[:0], bins_n3[:0], 64, 1)
    assert member is not None
    assert not set(hub.tolist()) & set(member.ravel().tolist())
    assert min(*hub.tolist(), *member.ravel().tolist()) >= 2**63


@pytest.mark.parametrize(("size", "slots"), [(10**4, 24), (10**5, 25), (10**6, 26)])
def test_slots_hold_what_random_ids_need_and_little_more(size: int, slots: int) -> None:
    assert hashing.count_bin_slots(size, hashing.count_bins(size)) == slots


@pytest.mark.parametrize("size", [100, 1000])
def test_a_slot_less_would_overflow_too_often(size: int) -> None:
    count = hashing.count_bins(size)
    slots = hashing.count_bin_slots(size, count)
    assert overflow_probability(size, count, slots) <= 2**-40
    assert overflow_probability(size, count, slots - 1) > 2**-40


def overflow_probability(balls: int, count: int, slots: int) -> float:
    """Union bound over the bins, of an exact binomial tail."""
    tail = sum(
        Fraction(math.comb(balls, k) * 3**k * (count - 3) ** (balls - k), count**balls)
        for k in range(slots + 1, slots + 40)
    )
    return float(count * tail)


# Runs


@pytest.mark.parametrize("members", [1, 2, 5])
def test_chunks_change_nothing(members: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circuit, "MAX_CHUNK_SLOTS", 2000)
    sets = [ids_of(*RNG.permutation(400)[: 300 + 10 * k]) for k in range(members + 1)]
    stage = Stage(*sets).play()
    stage.check()
    assert sum(kind is Kind.DEAL for _, _, kind, _ in stage.said) > 3


@pytest.mark.parametrize("name", ["fill_cuckoo_table", "fill_member_table"])
def test_a_failed_table_leads_to_the_next_key(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table = getattr(hashing, name)
    calls = []

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


def test_ids_that_never_fit_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "fill_cuckoo_table", lambda *_: None)
    with pytest.raises(LocalProtocolError, match="hub: none of 64 hash keys"):
        Stage(ids_of(1, 2), ids_of(2, 3)).play()


def test_below_the_minimum_no_share_leaves_a_member() -> None:
    agreement = IntersectionAgreement(session="s", minimum_rows=6, dealer="d")
    stage = Stage(ids_of(*range(20)), ids_of(*range(15, 40)), agreement=agreement).play()
    kinds = {kind for _, _, kind, _ in stage.said}
    assert Kind.SHARE not in kinds
    assert Kind.TOKENS not in kinds


def test_a_message_out_of_turn_and_a_flood_are_refused() -> None:
    stage = Stage(ids_of(1), ids_of(1))
    member = stage.roles["p0"]
    dealer = stage.roles["d"]
    member.start()
    said = "hub sent tokens when the protocol expects commit"
    with pytest.raises(RemoteProtocolError, match=said):
        member.receive("hub", frame_message(Kind.TOKENS, b""))
    dealer.start()
    early = frame_message(Kind.COUNT, bytes(8))
    assert [dealer.receive("p0", early) for _ in range(4)] == [[]] * 4
    with pytest.raises(RemoteProtocolError, match="p0 is too far ahead"):
        dealer.receive("p0", frame_message(Kind.COUNT, bytes(8)))
    stage = Stage(ids_of(1, 2), ids_of(1, 2)).play()
    assert all(role.is_finished for role in stage.roles.values())
    peers = {name: "p0" if name == "hub" else "hub" for name in stage.roles}
    cases = [(f"{peer} sent a message when .* is over", name, peer) for name, peer in peers.items()]
    late = frame_message(Kind.MASKED, b"")
    receive = lambda name, peer: stage.roles[name].receive(peer, late)  # noqa: E731
    assert list_unrefused(RemoteProtocolError, receive, cases) == []


# What a hub orders from the dealer, time and again.

MAX_SLOTS = hashing.count_bin_slots(10**7, count_bins(0))
WORDS_OF_1000 = count_bins(1000) // 64
TEN = Kind.CORRELATE, ORDER.pack(10)


def words(count: int, *slots: int) -> tuple[Kind, bytes]:
    return Kind.DEAL, pack_order(count, slots)


@pytest.mark.parametrize(
    ("backend", "maximum", "orders", "said"),
    [
        (CircuitIntersection, 10**7, [words(1, MAX_SLOTS)], ""),
        (
            CircuitIntersection,
            10**7,
            [words(1, MAX_SLOTS + 1)],
            f"or one word of bins, and a bin at most {MAX_SLOTS}",
        ),
        (CircuitIntersection, 1000, [words(1, 5)] * WORDS_OF_1000, ""),
        (
            CircuitIntersection,
            1000,
            [words(1, 5)] * (WORDS_OF_1000 + 1),
            "1472 bins, more than the agreed 1000 IDs take",
        ),
        # one slot a bin, and as many bins as the size that was ordered for, which is one
        (OpprfIntersection, 10**7, [TEN, TEN, words(count_bins(10) // 64, 1, 1)], ""),
        (
            OpprfIntersection,
            10**7,
            [TEN, TEN, words(count_bins(10) // 64, 2, 2)],
            "a bin at most 1",
        ),
        (
            OpprfIntersection,
            10**7,
            [TEN, TEN, words(count_bins(10) // 64 + 1, 1, 1)],
            "more than the agreed 10 IDs take",
        ),
        (
            OpprfIntersection,
            10**7,
            [TEN, (Kind.CORRELATE, ORDER.pack(11))],
            "hub orders for sets of 10, 11 IDs, it has one",
        ),
        (OpprfIntersection, 9, [TEN], "hub orders a vector for 10 IDs, .* at most 9"),
    ],
)
def test_the_dealer_fills_what_the_agreed_sizes_take_and_no_more(
    backend: type[CircuitIntersection],
    maximum: int,
    orders: list[tuple[Kind, bytes]],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dealt: list[int] = []
    real = hashing.deal_triples

    def deal_few(parties: int, count: int) -> tuple[Sequence[bytes], bytes]:
        dealt.append(count)
        return real(parties, min(count, 64))

    monkeypatch.setattr(circuit, "deal_triples", deal_few)
    agreement = IntersectionAgreement(session="s", maximum_ids=maximum, dealer="d")
    members = ["p0", "p1"] if backend is OpprfIntersection else ["p0"]
    dealer = backend(agreement).make_dealer("hub", members)
    dealer.start()
    *filled, last = (frame_message(*order, agreement, version=backend.version) for order in orders)
    for order in filled:
        list(dealer.receive("hub", order))
    before = len(dealt)
    if said:
        with pytest.raises(RemoteProtocolError, match=said):
            dealer.receive("hub", last)
        assert len(dealt) == before or "than the agreed" in said  # which is counted as it goes
    else:
        list(dealer.receive("hub", last))
        assert len(dealt) > before


# The circuit on CrypTen: its gates send and give the words of our own.


@pytest.fixture(scope="module")
def beaver() -> Any:
    """CrypTen's module of gates."""
    return load_crypten().mpc.primitives.beaver


@installed
def test_the_gates_are_crypten_s(beaver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Mock(wraps=beaver.AND)
    monkeypatch.setattr(beaver, "AND", gate)
    sets = {"hub": [b"a", b"b"], "p": [b"b", b"c"]}
    Intersection("circuit", sets).play()
    assert not gate.called
    Intersection("circuit_crypten", sets).play()
    assert gate.call_count == 2 * 2 * 6  # both parties, each gate up to the opening and after
    assert {type(x).__name__ for (x, _), _ in gate.call_args_list} == {"BinarySharedTensor"}


WORDS = st.lists(st.integers(0, 2**64 - 1), min_size=5, max_size=5)


@installed
@pytest.mark.usefixtures("beaver")
@settings(max_examples=60)
@given(st.lists(WORDS, min_size=7, max_size=7), st.booleans())
def test_one_gate_sends_and_gives_the_same_words(words: list[list[int]], is_leader: bool) -> None:
    from apfed_protocols.crypten.tensors import CryptenAnd

    x, y, a, b, c, d, e = (np.array(row, np.uint64) for row in words)
    read_only = np.frombuffer(x.tobytes(), np.uint64)
    ours = hashing.BeaverAnd(x, y, (a, b, c), is_leader=is_leader)
    theirs = CryptenAnd(read_only, y, (a, b, c), is_leader=is_leader)
    assert (ours.mask_inputs() == theirs.mask_inputs()).all()
    opened = np.stack([d, e])
    assert (ours.compute_share(opened) == theirs.compute_share(opened)).all()
    assert [row.tolist() for row in (x, y, a, b, c)] == words[:5], "inputs are untouched"


@installed
def test_a_dead_peer_leaves_no_thread_and_no_seat() -> None:
    threads = threading.active_count()
    sets = {"hub": [b"a", b"b"], "p": [b"b", b"c"]}
    roles = Intersection("circuit_crypten", sets).roles
    queue = [(name, out) for name, role in roles.items() for out in role.start()]
    for _ in range(9):  # into the gates, then the member is gone
        sender, out = queue.pop(0)
        queue += [(out.receiver, each) for each in roles[out.receiver].receive(sender, out.body)]
    assert not roles["hub"].is_finished
    assert threading.active_count() == threads
    assert not load_crypten().is_initialized()


@installed
def test_an_and_without_its_opening_is_refused(
    beaver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from apfed_protocols.crypten.tensors import CryptenAnd

    monkeypatch.setattr(beaver, "AND", lambda x, y: x)
    gate = CryptenAnd(*(np.zeros(1, np.uint64),) * 2, (np.zeros(1, np.uint64),) * 3, is_leader=True)
    with pytest.raises(LocalProtocolError, match="opened nothing"):
        gate.mask_inputs()


# What a hub that lies about the other members costs an honest one.

MAX_MEMBERS = 65_535
HUB_KEY_PART = bytes(32)
OWN = [b"%d" % k for k in range(10)]


class Liar:
    """A hub with one true member `p0`, which it tells of many more."""

    def __init__(self, agreement: IntersectionAgreement) -> None:
        self.member: Aligner = CircuitIntersection(agreement).make_member("p0", "hub", OWN)
        self.member.start()
        self._agreement = agreement

    def send(self, kind: Kind, body: bytes, sender: str = "hub") -> Sequence[bytes]:
        answers = self.member.receive(sender, frame_message(kind, body, self._agreement))
        return [answer.body[HEADER:] for answer in answers]

    def meet(self, hub_size: int, members: int, size: int) -> None:
        """Bring the member to the circuit."""
        commitment = hashlib.sha256(HUB_KEY_PART).digest()
        (join,) = self.send(Kind.COMMIT, circuit._COMMIT.pack(commitment, hub_size, members, 0))
        true_part, _, own_size = circuit._JOIN.unpack(join)
        parts = circuit._KEY_PART.pack(true_part, own_size)
        parts += circuit._KEY_PART.pack(bytes(32), size) * (members - 1)
        self.send(Kind.REVEAL, HUB_KEY_PART + parts)
        assert self.send(Kind.PLACE, bytes(4)) == [b"\1"]
        self.send(Kind.AGREED, b"")


def test_members_that_are_not_there_take_little_memory() -> None:
    """All bins at once would take 130 MB for each of seven arrays."""
    liar = Liar(IntersectionAgreement(session="s", dealer="d"))
    hub_size = 100_000
    members = 8_192
    with trace_memory() as peak:
        liar.meet(hub_size, members, size=0)
        bins = hashing.count_bins(hub_size)
        slots = [hashing.count_bin_slots(len(OWN), bins), *[1] * (members - 1)]
        chunk = split_bins(bins, slots)[0]
        words = (chunk.stop - chunk.start) // 64
        sent = liar.send(Kind.TRIPLES, bytes(64 + 8 * 63 * words * slots[0]), sender="d")
        for half in (32, 16, 8, 4, 2, 1):
            sent = liar.send(Kind.MASKED, bytes(2 * 8 * half * slots[0] * words))
        assert [len(body) for body in sent] == [2 * 8 * (members // 2) * words]
        assert peak() < 200e6


@pytest.mark.parametrize(
    ("slots", "members"), [(25, 1), (1, MAX_MEMBERS), (25, 1_000), (473_928, 5)]
)
def test_no_chunk_grows_with_the_members(slots: int, members: int) -> None:
    bins = hashing.count_bins(10**7)
    pieces = split_bins(bins, [slots] * members)
    assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
    assert pieces[-1].stop == bins
    size = pieces[0].stop - pieces[0].start
    assert size % 64 == 0
    assert size == 64 or size * max(slots, members / 64) <= MAX_CHUNK_SLOTS


def test_slots_are_found_in_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub may claim 65,535 different sizes: for each, a member works out K."""
    lgamma = Mock(wraps=math.lgamma)
    monkeypatch.setattr("math.lgamma", lgamma)
    assert hashing.count_bin_slots(10**7, 64) > 10**7 * 3 / 64
    assert 0 < lgamma.call_count < 200


def test_another_number_of_members_than_agreed_is_refused_at_once() -> None:
    agreement = IntersectionAgreement(session="s", dealer="d", sizes={"hub": 10, "p0": 10})
    said = "hub speaks of 65535 members, the parties agreed on sizes for 1"
    with pytest.raises(RemoteProtocolError, match=said):
        Liar(agreement).meet(10, MAX_MEMBERS, size=10)


# The circuit on programmed values: what a value gives away.

PEOPLE = [b"person %d" % k for k in range(400)]


class _Probing(OpprfIntersection):
    """A hub that would read in which of its IDs a bin's value is that of a member.

    Puts one of its IDs into every bin where it has some, and takes off what it can of all of the
    words that the store has for all of its IDs.
    """

    put: ClassVar[dict[int, int]] = {}
    read: ClassVar[dict[tuple[int, int], int]] = {}
    tags: ClassVar[list[Words]] = []

    def tag_hub_bins(
        self, endpoint: Endpoint, members: Sequence[str], inputs: CircuitInputs
    ) -> Generator[Round, Messages, Words]:
        size = inputs.announced_sizes[0]
        correlating = circuit._OLE_EXCHANGE
        received = yield correlating.make_order(endpoint, size)
        shares = yield from correlating.receive_hub_shares(endpoint, size, members, received)
        (share,) = shares.values()
        self.put.update(
            {bin_: row for row, bins in enumerate(inputs.bins_n3.tolist()) for bin_ in bins}
        )
        digests = circuit.hash_tokens(inputs.tokens, inputs.shared_key)
        points = np.zeros((len(inputs.row_of_bin), 2), np.uint64)
        points[list(self.put)] = extract_id_hashes(digests)[list(self.put.values())]
        received = yield endpoint.make_round(
            Kind.VECTOR, {members[0]: share.mask_vector(points)}, awaited=members
        )
        cells = count_cells(inputs.announced_sizes[1])
        hints = endpoint.parse_words(received, members[0], Kind.HINT, (cells + DENSE_CELLS, 3))
        words = decode_values(hints, Equations.from_digests(digests, cells))
        words ^= circuit._evaluate_prf(share.c, inputs.shared_key)[inputs.bins_n3]
        for row, (bins, found) in enumerate(zip(inputs.bins_n3, words, strict=True)):
            self.read.update(
                {(int(bin_), row): int(t) for bin_, t in zip(bins, found, strict=True)}
            )
        return np.zeros((1, len(points)), np.uint64)

    def tag_member_bins(
        self, endpoint: Endpoint, hub: str, inputs: CircuitInputs
    ) -> Generator[Round, Messages, Words]:
        self.tags.append((yield from super().tag_member_bins(endpoint, hub, inputs)))
        return self.tags[0]


def test_a_hub_that_deviates_reads_no_membership_before_the_circuit() -> None:
    """Where it has two IDs of a member in one bin, it takes F off one of the two words alone."""
    sets = {"hub": PEOPLE, "p": PEOPLE[:300]}
    Intersection(_Probing, sets, minimum_rows=2).play(refusing=True)
    tags_B = _Probing.tags[0][0]
    read = _Probing.read
    true = {place for place, t in read.items() if t == tags_B[place[0]]}
    assert true == {(bin_, row) for bin_, row in _Probing.put.items() if row < 300}
    assert len(true) > 200
    # what would name people: equal values of two IDs in one bin, which 2^-64 has elsewhere
    in_one_bin = [(bin_, t) for (bin_, _), t in read.items()]
    assert len(in_one_bin) == len(set(in_one_bin)) == 3 * len(PEOPLE)


def test_parties_of_circuit_and_opprf_do_not_take_each_other_at_their_word() -> None:
    member = CircuitIntersection(AGREEMENT).make_member("p", "hub", PEOPLE)
    member.start()
    (first, *_) = OpprfIntersection(AGREEMENT).make_hub("hub", ["p"], PEOPLE).start()
    with pytest.raises(RemoteProtocolError, match="use the same protocol"):
        member.receive("hub", first.body)

"""Circuits without a dealer: transfers, triples, the count, and what a deviating party gets."""

import hashlib
import itertools
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.psi import (
    SET_INTERSECTIONS,
    base_ot,
    circuit,
    circuit_ot,
    hashing,
    store,
    transfers,
)
from apfed_protocols.psi.base_ot import Receiver, Sender
from apfed_protocols.psi.circuit import Endpoint, Kind
from apfed_protocols.psi.hashing import TripleShares, deal_triples
from apfed_protocols.psi.interface import IntersectionAgreement, Output, Round
from apfed_protocols.psi.transfers import ExtensionReceiver, ExtensionSender
from apfed_protocols.randomness import fresh_key
from tests.contracts.intersections import Change, Intersection, Sets, change_kind

WITHOUT_DEALER = pytest.mark.parametrize("backend", ["circuit_ot", "opprf_ot"])
COLUMN_COUNT = transfers.COLUMN_COUNT
Words = NDArray[np.uint64]


def expand_words(count: int) -> Words:
    return np.frombuffer(secrets.token_bytes(8 * count), np.uint64)


# Transfers.


class Extended:
    """Both ends of the extension, with keys that no transfer made."""

    def __init__(self) -> None:
        choices = secrets.token_bytes(COLUMN_COUNT // 8)
        self.bits = np.unpackbits(np.frombuffer(choices, np.uint8), bitorder="little")
        pairs = [(fresh_key(), fresh_key()) for _ in range(COLUMN_COUNT)]
        own = [pair[bit] for pair, bit in zip(pairs, self.bits.tolist(), strict=True)]
        hash_key = fresh_key()
        self.hub = ExtensionReceiver(pairs, hash_key)
        self.member = ExtensionSender(own, choices, hash_key)

    def play(
        self, choices: Words, change: Callable[[bytes], bytes] = bytes
    ) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32]]:
        """Return the hub's numbers and the member's two of each transfer."""
        vector, numbers = self.hub.extend(choices)
        assert len(vector) == transfers.count_vector_bytes(len(choices))
        challenge = fresh_key()
        zeros, ones = self.member.extend(change(vector), len(choices), challenge)
        self.member.check_proof(self.hub.prove(challenge), "hub")
        return numbers, zeros, ones


@pytest.mark.parametrize("words", [1, 2, 3, 600])
def test_the_hub_gets_the_number_of_its_choice_and_the_other_one_is_another(words: int) -> None:
    choices = expand_words(words)
    numbers, zeros, ones = Extended().play(choices)
    bits = np.unpackbits(choices.view(np.uint8), bitorder="little").astype(bool)
    assert (np.where(bits, ones, zeros) == numbers).all()
    assert (zeros == ones).mean() < 0.02
    assert len(set(zeros.tolist())) > 0.99 * len(zeros), "each transfer has its own"


def test_batches_have_other_numbers_and_a_batch_of_zeros_tells_nothing_of_itself() -> None:
    played = Extended()
    nothing = np.zeros(4, np.uint64)
    first, second = (played.play(nothing)[0] for _ in range(2))
    assert not (first == second).any()
    vectors = [np.frombuffer(played.hub.extend(nothing)[0], np.uint64) for _ in range(2)]
    assert not (vectors[0] == vectors[1]).any()


def test_equal_rows_of_two_transfers_have_two_hashes() -> None:
    rows = np.zeros((100, 2), np.uint64)
    hashed = transfers.TransferHash(bytes(32), 0).hash_rows(rows, 0)
    assert len(set(hashed.tolist())) == 100
    assert (transfers.TransferHash(bytes(32), 0).hash_rows(rows[40:], 40) == hashed[40:]).all()
    assert not (transfers.TransferHash(bytes(32), 1).hash_rows(rows, 0) == hashed).any()


def test_triples_are_of_32_bytes_and_hold_for_all_bits() -> None:
    count = 100
    choices = expand_words(2 * count)
    numbers, zeros, ones = Extended().play(choices)
    hubs = transfers.choose_triples(choices, numbers)
    members = transfers.derive_triples(zeros, ones)
    a, b, c = (one ^ other for one, other in zip(hubs, members, strict=True))
    assert (c == a & b).all()
    for share in (*hubs, *members):
        assert abs(np.bitwise_count(share).mean() - 32) < 6 * 4 / np.sqrt(count)
    assert transfers.count_vector_bytes(2 * count) == 32 * 64 * count + 16 * 128


# The check.


def flip(columns: Sequence[int], row: int = 5) -> Callable[[bytes], bytes]:
    """Err in one row of these columns of a vector of one block."""

    def flip_row(vector: bytes) -> bytes:
        sent = np.frombuffer(vector, np.uint64).reshape(COLUMN_COUNT, -1).copy()
        sent[list(columns), row // 64] ^= np.uint64(1 << row % 64)
        return sent.tobytes()

    return flip_row


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(("bit", "passes"), [(0, True), (1, False)])
def test_an_error_passes_where_the_member_does_not_add_that_column(
    count: int, bit: int, passes: bool
) -> None:
    """Selective failure: c bits of s are learnt with probability 2^-c."""
    played = Extended()
    columns = np.flatnonzero(played.bits == bit)[:count].tolist()
    choices = expand_words(4)
    if not passes:
        with pytest.raises(RemoteProtocolError, match="hub sent a vector that is of no bits"):
            played.play(choices, flip(columns))
        return
    numbers, zeros, ones = played.play(choices, flip(columns))
    chosen = np.unpackbits(choices.view(np.uint8), bitorder="little").astype(bool)
    assert (np.where(chosen, ones, zeros) == numbers).all()


def test_errors_in_half_of_the_columns_are_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="or does not prove it"):
        Extended().play(expand_words(4), flip(range(0, COLUMN_COUNT, 2)))


@pytest.mark.parametrize(
    ("count", "more", "batches"),
    [(3, 0, [3]), (50, 0, [32, 18]), (5, 12, [5, 5, 5, 2]), (40, 40, [32, 8, 32, 8])],
)
def test_batches_of_triples_for_all_are_no_larger_than_those_of_a_pair(
    count: int, more: int, batches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "BATCH_WORDS", 64)
    assert transfers.split_triples(count, extra_word_count=more) == batches


# The count: bits to numbers, and the sign of a shared sum.


def play_both(
    scripts: Mapping[str, Any], receive: Callable[[str, bytes], bytes] = lambda _, body: body
) -> dict[str, Any]:
    """Run two generators of turns against each other; return what they return."""
    results: dict[str, Any] = {}
    inboxes: dict[str, list[bytes]] = {name: [] for name in scripts}
    awaits: dict[str, Any] = dict.fromkeys(scripts)
    other = dict(zip(scripts, reversed(list(scripts)), strict=True))
    while len(results) < len(scripts):
        for name, script in scripts.items():
            if name in results or (awaits[name] and not inboxes[name]):
                continue
            message = {other[name]: inboxes[name].pop(0)} if awaits[name] else {}
            try:
                turn: Round = next(script) if awaits[name] is None else script.send(message)
            except StopIteration as end:
                results[name] = end.value
                continue
            awaits[name] = turn.awaited
            inboxes[other[name]] += [receive(name, out.body) for out in turn.outgoing]
    return results


def deal_shares(count: int) -> list[TripleShares]:
    seeds, correction = deal_triples(2, count)
    fixes = (None, correction)
    return [
        TripleShares.from_seed(seed, count, fix) for seed, fix in zip(seeds, fixes, strict=True)
    ]


NUMBERS = st.integers(0, 2**32 - 1)


@settings(max_examples=200, deadline=None)
@given(NUMBERS, NUMBERS)
def test_the_sign_of_a_shared_sum(own_size: int, other: int) -> None:
    agreement = IntersectionAgreement(session="s")
    triples = deal_shares(circuit_ot._SIGN_TRIPLES)
    numbers = {"hub": own_size, "p": other}
    peers = {"hub": "p", "p": "hub"}
    results = play_both(
        {
            name: circuit_ot._share_sign(
                Endpoint(name, agreement), peers[name], number, of, is_leader=name == "hub"
            )
            for (name, number), of in zip(numbers.items(), triples, strict=True)
        }
    )
    assert results["hub"] ^ results["p"] == (own_size + other) >> 31 & 1


@pytest.mark.parametrize("minimum", [0, 1, 20, 21, 22])
@pytest.mark.parametrize("others", [0, 2])
@WITHOUT_DEALER
def test_the_minimum_holds_to_the_last_id(backend: str, minimum: int, others: int) -> None:
    sets = {"hub": ids_of(0, 50), "p": ids_of(29, 80)}
    sets |= {f"q{k}": ids_of(10 + k, 70) for k in range(others)}
    played = Intersection(backend, sets, minimum_rows=minimum, output=Output.SIZE)
    played.play(refusing=True)
    for role in played.aligners.values():
        if minimum <= 21:
            assert role.size == 21
        else:
            with pytest.raises(LocalProtocolError, match=f"minimum of {minimum}"):
                _ = role.size


# The same as with a dealer.


def ids_of(start: int, stop: int) -> list[bytes]:
    return [b"id %d" % k for k in range(start, stop)]


@pytest.mark.parametrize("members", [1, 2, 4])
@pytest.mark.parametrize("backend", ["circuit", "opprf"])
def test_rows_are_those_that_the_dealer_s_circuit_finds(
    backend: str, members: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several chunks, and in several batches of transfers."""
    monkeypatch.setattr(circuit, "MAX_CHUNK_SLOTS", 2000 if backend == "circuit" else 128)
    monkeypatch.setattr(transfers, "BATCH_WORDS", 500 if backend == "circuit" else 64)
    rng = np.random.default_rng(members)
    sets: dict[str, list[bytes]] = {"hub": ids_of(0, 90)}
    for k in range(members):
        sets[f"p{k}"] = [b"id %d" % number for number in rng.permutation(120)[: 80 + k]]
    with_dealer = Intersection(backend, sets).play()
    without = Intersection(f"{backend}_ot", sets).play()
    with_dealer.check()
    without.check()
    for name in sets:
        rows = (sorted(played.aligners[name].rows.tolist()) for played in (with_dealer, without))
        assert next(rows) == next(rows)
    assert len([out for _, out in without.sent if out.body[1] == Kind.EXTENSION]) > 6 * members


# Whole runs with fixed secrets: every byte is recorded. The secrets protect nothing.

SETS: Sets = {"hub": ids_of(0, 30), "p": ids_of(20, 45), "q": ids_of(25, 60)}
RECORDED: Mapping[str, str] = {
    "circuit_ot": "6091ca4d1dd397ee5d661c6cee6efc93",
    "opprf_ot": "7c2c6e4921174405bcb03b0d26febcf8",
}


@pytest.mark.parametrize(("backend", "digest"), RECORDED.items())
def test_every_message_is_as_recorded(
    backend: str, digest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For another format on purpose: take the digest that this test names."""
    numbers = itertools.count()

    def count_up() -> bytes:
        return hashlib.sha256(b"%d" % next(numbers)).digest()

    for module in (circuit, circuit_ot, transfers, hashing, store):
        monkeypatch.setattr(module, "fresh_key", count_up)
    monkeypatch.setattr(circuit, "random_permutation", np.arange)
    played = Intersection(backend, SETS).play()
    played.check()
    whole = hashlib.sha256()
    for sender, out in played.sent:
        whole.update(sender.encode() + out.receiver.encode() + out.body)
    assert whole.hexdigest()[:32] == digest


@pytest.mark.slow
@WITHOUT_DEALER
def test_a_run_with_its_base_transfers(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_ot, "Sender", Sender)
    monkeypatch.setattr(base_ot, "Receiver", Receiver)
    Intersection(backend, SETS).play().check()


# What cannot be.


def add_one(body: bytes) -> bytes:
    return bytes([body[0] + 1]) + body[1:]


def flip_last(body: bytes) -> bytes:
    return body[:-1] + bytes([body[-1] ^ 1])


def cut_last(body: bytes) -> bytes:
    return body[:-1]


ALTERED: tuple[tuple[str, str, Kind, Callable[[bytes], bytes], str], ...] = (
    ("circuit_ot", "p", Kind.CHOICES, cut_last, "p sent choices of 8191 bytes, expected 8192"),
    (
        "opprf_ot",
        "q",
        Kind.CHOICES,
        lambda body: body[: 2**15 - 1],
        "q sent choices of 32767 bytes, expected 32768",
    ),
    ("circuit_ot", "hub", Kind.BASE, cut_last, "hub sent base of 31 bytes, expected 32"),
    ("circuit_ot", "hub", Kind.EXTENSION, cut_last, "hub sent extension of"),
    (
        "circuit_ot",
        "hub",
        Kind.EXTENSION,
        lambda body: bytes(255 - byte for byte in body),
        "hub sent a vector that is of no bits",
    ),
    ("circuit_ot", "hub", Kind.PROOF, flip_last, "was sent nothing that depends on it"),
    ("opprf_ot", "hub", Kind.PROOF, cut_last, "hub sent proof of"),
    ("opprf_ot", "p", Kind.CHALLENGE, cut_last, "p sent challenge of 31 bytes, expected 32"),
    (
        "opprf_ot",
        "hub",
        Kind.VECTOR,
        lambda body: bytes(255 - byte for byte in body),
        "hub sent a vector that is of no store",
    ),
    ("circuit_ot", "p", Kind.PRODUCTS, cut_last, "p sent products of"),
    ("circuit_ot", "p", Kind.COUNT, lambda _: b"\2", "p sent 2 as its share of a bit"),
    ("circuit_ot", "hub", Kind.COUNT, lambda _: b"\0\0", "hub sent count of 2 bytes, expected 1"),
    ("circuit_ot", "hub", Kind.SUM, lambda _: b"\xff\xff\xff\x7f", "hub announces|p announces"),
    ("circuit_ot", "hub", Kind.VERDICT, lambda _: bytes(7) + b"\1", "hub announces 1 common IDs"),
    ("circuit_ot", "hub", Kind.KEY, lambda _: bytes(32), "hub handed on a key of low order"),
    ("opprf_ot", "hub", Kind.RELAYED, flip_last, "a share that no member sealed so"),
    ("opprf_ot", "hub", Kind.RELAYED, cut_last, "hub sent relayed of"),
    ("circuit_ot", "q", Kind.SEALED, cut_last, "q sent sealed of"),
    ("circuit_ot", "q", Kind.SEALED, flip_last, "a share that no member sealed so"),
)


@pytest.mark.parametrize(("backend", "sender", "kind", "body", "says"), ALTERED)
def test_what_cannot_be_is_refused_by_name(
    backend: str, sender: str, kind: Kind, body: Callable[[bytes], bytes], says: str
) -> None:
    change = change_kind(sender, kind, body)
    altered = Intersection(
        backend, SETS, minimum_rows=3, output=Output.SIZE, maximum_ids=1000, change=change
    )
    with pytest.raises(RemoteProtocolError, match=says):
        altered.play()


def test_nothing_of_the_member_s_leaves_before_the_check() -> None:
    """A hub that sends no transfers hears no word that rests on them."""
    heard: list[Kind] = []
    wrong = change_kind("hub", Kind.EXTENSION, lambda body: bytes(len(body)))

    def change(sender: str, out: Any) -> bytes:
        if sender == "p":
            heard.append(Kind(out.body[1]))
        return wrong(sender, out)

    with pytest.raises(RemoteProtocolError, match="of no bits"):
        Intersection("circuit_ot", {"hub": ids_of(0, 5), "p": ids_of(0, 5)}, change=change).play()
    assert set(heard) == {Kind.JOIN, Kind.PLACED, Kind.CHOICES, Kind.CHALLENGE}


# Both must agree.


@pytest.mark.parametrize("backend", ["circuit", "opprf"])
def test_parties_with_and_without_a_dealer_do_not_take_each_other_at_their_word(
    backend: str,
) -> None:
    agreement = IntersectionAgreement(session="s", dealer="d")
    member = SET_INTERSECTIONS[f"{backend}_ot"](agreement).make_member("p", "hub", ids_of(0, 5))
    member.start()
    (first, *_) = SET_INTERSECTIONS[backend](agreement).make_hub("hub", ["p"], ids_of(0, 5)).start()
    with pytest.raises(RemoteProtocolError, match="use the same protocol"):
        member.receive("hub", first.body)


@WITHOUT_DEALER
def test_there_is_no_dealer(backend: str) -> None:
    protocol = SET_INTERSECTIONS[backend](IntersectionAgreement(session="s"))
    with pytest.raises(LocalProtocolError, match=f"the one with a dealer is {backend[:-3]}"):
        protocol.make_dealer("hub", ["p"])
    with pytest.raises(LocalProtocolError, match=f"or use {backend}, which needs none"):
        SET_INTERSECTIONS[backend[:-3]](IntersectionAgreement(session="s"))


# What a party sees.


class _Watching:
    """Keeps what arrives at one party, of one kind."""

    def __init__(self, receiver: str, kind: Kind) -> None:
        self.bodies: list[bytes] = []
        self._of = receiver, kind

    def __call__(self, _: str, out: Any) -> bytes:
        if (out.receiver, out.body[1]) == self._of:
            self.bodies.append(out.body[22:])
        body: bytes = out.body
        return body


def test_the_hub_that_hands_on_shares_cannot_read_them() -> None:
    """A sealed share is another one each time, and its content is not that of the member."""
    watching: Change = _Watching("hub", Kind.SEALED)
    for _ in range(2):
        Intersection("opprf_ot", SETS, change=watching).play().check()
    assert isinstance(watching, _Watching)
    first, second = watching.bodies
    assert len(first) == len(second) == circuit_ot._count_sealed_bytes(hashing.count_bins(30) // 64)
    assert first[:32] != second[:32]
    with pytest.raises(RemoteProtocolError, match="no member sealed so"):
        circuit_ot._decrypt_shares(first, bytes(24), fresh_key(), "hub")

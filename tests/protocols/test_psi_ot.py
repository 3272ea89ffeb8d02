"""Intersection by OT extension: base transfers, code, check, and what a deviating party gets."""

import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
from nacl.bindings import (
    crypto_core_ed25519_add,
    crypto_core_ed25519_is_valid_point,
    crypto_scalarmult_ed25519_base,
)
from numpy.typing import NDArray

from apfed_protocols.conversation import Outgoing
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.psi import base_ot, linear_code
from apfed_protocols.psi.base_ot import POINT_BYTES, Receiver, Sender
from apfed_protocols.psi.interface import Aligner, IntersectionAgreement, Output
from apfed_protocols.psi.ot import (
    ColumnHash,
    HubExtension,
    Kind,
    MemberExtension,
    OtIntersection,
    transpose_to_columns,
    transpose_to_rows,
)
from apfed_protocols.randomness import fresh_key
from tests.contracts.intersections import HEADER, Change, Sets, change_kind, deliver

SESSION = bytes(32)
LENGTH = linear_code.LENGTH


@pytest.fixture(autouse=True)
def _real_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_ot, "Sender", Sender)
    monkeypatch.setattr(base_ot, "Receiver", Receiver)


# Base transfers.


def transfer(choices: Sequence[int]) -> tuple[Sender, Receiver]:
    sender = Sender(fresh_key(), session=SESSION)
    return sender, Receiver(choices, fresh_key(), session=SESSION)


def test_a_receiver_gets_the_chosen_key_of_each_pair_and_no_other() -> None:
    choices = [0, 1, 1, 0, 1, 0, 0, 1]
    sender, receiver = transfer(choices)
    pairs = sender.compute_keys(receiver.message, receiver="p")
    keys = receiver.compute_keys(sender.message, sender="hub")
    assert [pair[choice] for pair, choice in zip(pairs, choices, strict=True)] == keys
    assert len({key for pair in pairs for key in pair}) == 2 * len(choices)


def test_points_of_both_choices_are_of_the_large_subgroup_and_never_the_same() -> None:
    _, receiver = transfer([0, 1] * 8)
    message = receiver.message
    points = [message[k : k + POINT_BYTES] for k in range(0, len(message), POINT_BYTES)]
    assert all(map(crypto_core_ed25519_is_valid_point, points))  # of prime order, too
    assert len(set(points)) == len(points) == 32


def test_who_sends_two_points_of_known_logarithm_has_neither_key() -> None:
    """Without the hash the multiples of A would be both keys."""
    sender, receiver = transfer([0])
    scalars = [secrets.token_bytes(32) for _ in range(2)]
    points = [crypto_scalarmult_ed25519_base(scalar) for scalar in scalars]
    ((zero, one),) = sender.compute_keys(b"".join(points), receiver="p")
    for scalar in scalars:
        receiver._scalars = [scalar]
        receiver._point_pairs = [(points[0], points[1])]
        for choice in (0, 1):
            receiver._choices = [choice]
            assert receiver.compute_keys(sender.message, sender="hub")[0] not in (zero, one)


def test_keys_depend_on_the_session_the_number_and_all_points() -> None:
    seed = fresh_key()
    sender = Sender(seed, session=SESSION)
    elsewhere = Sender(seed, session=b"\1" * 32)
    pair = Receiver([0], fresh_key(), session=SESSION).message
    swapped = pair[POINT_BYTES:] + pair[:POINT_BYTES]
    keys = [
        key
        for end, points in ((sender, pair + pair), (elsewhere, pair), (sender, swapped))
        for both in end.compute_keys(points, receiver="p")
        for key in both
    ]
    assert len(set(keys)) == len(keys) == 8


ORDER_TWO = (2**255 - 20).to_bytes(32, "little")  # (0, -1) on edwards25519
NO_POINTS = {"y = 2": b"\2" + bytes(31), "y = 2, other sign": b"\2" + bytes(30) + b"\x80"}


@pytest.mark.parametrize("point", NO_POINTS.values(), ids=list(NO_POINTS))
def test_bytes_that_are_no_point_are_refused(point: bytes) -> None:
    sender, receiver = transfer([0, 1])
    message = receiver.message[: 2 * POINT_BYTES] + point + receiver.message[3 * POINT_BYTES :]
    with pytest.raises(RemoteProtocolError, match=r"p sent bytes that are no point .* transfer 1"):
        sender.compute_keys(message, receiver="p")


def test_a_point_without_a_secret_is_refused() -> None:
    """R_0 is the negative of the hash of R_1, but for a point of order two."""
    sender, receiver = transfer([0])
    other = receiver.message[POINT_BYTES:]
    hashed = base_ot._hash_to_point(SESSION, 0, 0, other)
    negative = hashed[:-1] + bytes([hashed[-1] ^ 0x80])
    for chosen in (negative, crypto_core_ed25519_add(negative, ORDER_TWO)):
        with pytest.raises(RemoteProtocolError, match="or one that would have no secret"):
            sender.compute_keys(chosen + other, receiver="p")


@pytest.mark.parametrize("point", [bytes(32), b"\1" + bytes(31)], ids=["0", "1"])
def test_a_sender_of_a_point_of_low_order_is_refused(point: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="hub sent a point of low order"):
        transfer([0])[1].compute_keys(point, sender="hub")


# The code.


def powers_of_x() -> list[int]:
    powers = [1]
    for _ in range(510):
        powers.append(powers[-1] << 1 ^ (0b1000010001 if powers[-1] >> 8 else 0))
    return powers


def test_the_code_has_126_powers_in_a_row_as_roots_and_words_of_even_weight() -> None:
    """The BCH bound then says that two words differ in 128 places at least."""
    powers = powers_of_x()
    assert len(set(powers)) == 511
    for row in linear_code.make_generator():
        places = [place for place in range(511) if row >> place & 1]
        assert row.bit_count() % 2 == 0
        for root in range(1, linear_code.DISTANCE - 1):
            value = 0
            for place in places:
                value ^= powers[place * root % 511]
            assert value == 0


def random_messages(count: int) -> NDArray[np.uint64]:
    words = np.frombuffer(secrets.token_bytes(16 * count), np.uint64).reshape(-1, 2)
    return linear_code.mask_message_bits(words)


def test_words_begin_with_their_message_add_up_and_have_the_weight() -> None:
    one = random_messages(500)
    other = random_messages(500)
    words = linear_code.encode_words(one)
    assert (linear_code.mask_message_bits(words[:, :2]) == one).all()
    assert (linear_code.encode_words(one ^ other) == words ^ linear_code.encode_words(other)).all()
    bits = np.unpackbits(words.view(np.uint8), axis=1)
    assert bits.sum(axis=1, dtype=np.int64).min() >= linear_code.DISTANCE
    assert linear_code.encode_words(np.zeros((1, 2), np.uint64)).max() == 0
    assert linear_code.DIMENSION == len(linear_code.make_generator()) == 85


def test_rows_and_columns_are_transposed_bit_by_bit() -> None:
    rows = np.frombuffer(secrets.token_bytes(64 * 192), np.uint64).reshape(192, 8)
    columns = transpose_to_columns(rows)
    bits = np.unpackbits(rows.view(np.uint8), axis=1, bitorder="little")
    expected = np.packbits(bits.T, axis=1, bitorder="little")
    assert (np.ascontiguousarray(columns).view(np.uint8) == expected).all()
    assert (transpose_to_rows(columns) == rows).all()


# The check.


def hash_columns(key: bytes, columns: NDArray[np.uint64]) -> NDArray[np.uint64]:
    hasher = ColumnHash(key, len(columns))
    hasher.update(columns)
    return hasher.finish()


def test_hashes_are_linear_and_of_every_bit() -> None:
    key = fresh_key()
    one, other = (
        np.frombuffer(secrets.token_bytes(3 * 64), np.uint64).reshape(3, 8) for _ in range(2)
    )
    hashes = hash_columns(key, one)
    assert (hash_columns(key, one ^ other) == hashes ^ hash_columns(key, other)).all()
    assert hash_columns(key, np.zeros((1, 8), np.uint64)).max() == 0
    single = np.zeros((512, 8), np.uint64)
    single[np.arange(512), np.arange(512) // 64] = np.uint64(1) << (
        np.arange(512, dtype=np.uint64) % np.uint64(64)
    )
    assert len(np.unique(hash_columns(key, single), axis=0)) == 512


def test_a_column_is_hashed_alike_in_one_piece_and_in_several() -> None:
    key = fresh_key()
    column = np.frombuffer(secrets.token_bytes(64), np.uint64).reshape(1, 8)
    hasher = ColumnHash(key, 1)
    for start in range(0, 8, 2):
        hasher.update(np.ascontiguousarray(column[:, start : start + 2]))
    assert (hasher.finish() == hash_columns(key, column)).all()


class Extended:
    """Both ends of an extension of 256 rows, with keys that no transfer made."""

    def __init__(self) -> None:
        self.choices = secrets.token_bytes(LENGTH // 8)
        self.bits = np.unpackbits(np.frombuffer(self.choices, np.uint8), bitorder="little")
        pairs = [(fresh_key(), fresh_key()) for _ in range(LENGTH)]
        own = [pair[bit] for pair, bit in zip(pairs, self.bits.tolist(), strict=True)]
        self.messages = random_messages(256)
        self.hub = HubExtension(pairs, self.messages)
        self.member = MemberExtension(own, self.choices)
        vector, self.known = self.hub.make_vector()
        self.columns = np.frombuffer(vector, "<u8").reshape(LENGTH, -1).copy()

    def err_in(self, columns: Sequence[int]) -> None:
        """Let the hub's vector be no code word in its first row, at these columns."""
        self.columns[columns, 0] ^= np.uint64(1)

    def pass_check(self, guesses: Sequence[int] = ()) -> bool:
        """Return whether a proof that bets on a bit of one at these columns is taken."""
        challenge = fresh_key()
        opened = self.member.compute_matrix(self.columns.tobytes(), challenge)
        proof = bytearray(self.hub.prove(challenge))
        error = np.zeros((1, 4), np.uint64)
        error[0, 0] = 1
        hashed = hash_columns(challenge, error)[0].tobytes()
        for column in guesses:
            for place, byte in enumerate(hashed, start=16 * column):
                proof[place] ^= byte
        try:
            self.member.check_proof(bytes(proof), "hub")
        except RemoteProtocolError:
            return False
        words = linear_code.encode_words(self.messages)
        differ = opened ^ self.known ^ (words & self.member.choices)
        assert np.flatnonzero(differ.any(axis=1)).tolist() in ([], [0])
        return True

    def columns_with(self, bit: int, count: int) -> list[int]:
        columns: list[int] = np.flatnonzero(self.bits == bit)[:count].tolist()
        return columns


def test_what_the_hub_knows_and_what_the_member_opens_differ_by_words_of_the_store() -> None:
    played = Extended()
    opened = played.member.compute_matrix(played.columns.tobytes(), fresh_key())
    words = linear_code.encode_words(played.messages)
    assert (opened == played.known ^ (words & played.member.choices)).all()
    assert played.pass_check()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(("bit", "passes"), [(0, True), (1, False)])
def test_an_error_passes_where_the_hub_guesses_the_bits_of_its_columns(
    count: int, bit: int, passes: bool
) -> None:
    """Selective failure: c bits of s are learnt with probability 2^-c, and no more are."""
    played = Extended()
    columns = played.columns_with(bit, count)
    played.err_in(columns)
    assert played.pass_check() is passes
    assert played.pass_check(guesses=columns) is not passes


def test_one_wrong_guess_among_right_ones_is_refused() -> None:
    played = Extended()
    zeros = played.columns_with(0, 3)
    played.err_in([*zeros, *played.columns_with(1, 1)])
    assert not played.pass_check()


def test_errors_in_many_columns_are_refused() -> None:
    played = Extended()
    played.err_in(range(0, LENGTH, 4))
    assert not played.pass_check()


# Whole runs with fixed secrets: every byte is recorded. The secrets protect nothing.

SETS: Sets = {
    "hub": [b"person %d" % k for k in range(30)],
    "p": [b"person %d" % k for k in range(20, 45)],
}
SHARED = {b"person %d" % k for k in range(20, 30)}
AGREED = IntersectionAgreement(session="vectors", minimum_rows=0, output=Output.HUB_ROWS)
# SHA-256 of each message; for another format on purpose: take what the first test below prints.
RECORDED: Mapping[str, str] = {
    "HELLO": "76023bd99393e29cec4f1d3a044a9042",
    "CHOICES": "fbe6ce16ed9aff6d3d6d2d4decae8518",
    "VECTOR": "555a8f6dc572adedb0eb78bea71d9b00",
    "CHALLENGE": "7fbf63db6f83942647da1aa11ed0f4f0",
    "PROOF": "048ed3fba802c895f20a23a1dd1cfe4f",
    "TAGS": "01f57748168552afe000215e4318304b",
    "DONE": "a2d04087f80105f803b2e6c583460221",
}


def make_ends(**expected: int) -> dict[str, Aligner]:
    ends = {
        name: OtIntersection(
            AGREED, secret=hashlib.sha256(name.encode()).digest(), expected_sizes=expected
        )
        for name in SETS
    }
    return {
        "hub": ends["hub"].make_hub("hub", ["p"], SETS["hub"]),
        "p": ends["p"].make_member("p", "hub", SETS["p"]),
    }


def play(change: Change | None = None) -> tuple[dict[str, Aligner], list[tuple[str, Outgoing]]]:
    ends = make_ends()
    return ends, deliver(ends, change)


def test_every_message_is_as_recorded() -> None:
    ends, sent = play()
    assert {SETS["hub"][row] for row in ends["hub"].rows} == SHARED
    digests = {Kind(out.body[1]).name: hashlib.sha256(out.body).hexdigest()[:32] for _, out in sent}
    assert digests == RECORDED


def flip_byte(position: int) -> Callable[[bytes], bytes]:
    return lambda body: body[:position] + bytes([body[position] ^ 1]) + body[position + 1 :]


def flip_columns(body: bytes) -> bytes:
    """Flip the first row's bit of 20 columns of 256 rows; the member's bits there are not all 0."""
    changed = bytearray(body)
    for column in range(20):
        changed[32 * column] ^= 1
    return bytes(changed)


TAMPERED: Mapping[str, tuple[str, Kind, Callable[[bytes], bytes], str]] = {
    "point of the hub": ("hub", Kind.HELLO, flip_byte(40), "hub sent a vector that is of no store"),
    "points of the member": ("p", Kind.CHOICES, lambda b: b[:4] + b[68:] + b[4:68], "no store"),
    "all of the vector": ("hub", Kind.VECTOR, lambda b: bytes(255 - x for x in b), "of no store"),
    "a row of the vector": ("hub", Kind.VECTOR, flip_columns, "of no store"),
    "challenge": ("p", Kind.CHALLENGE, flip_byte(0), "hub sent a vector that is of no store"),
    "a hash of T0": ("hub", Kind.PROOF, flip_byte(0), "or does not prove it"),
    "a hash of D": ("hub", Kind.PROOF, flip_byte(16 * LENGTH), "and was sent no tag"),
}


@pytest.mark.parametrize("case", TAMPERED)
def test_a_tampered_message_is_refused(case: str) -> None:
    sender, kind, change, says = TAMPERED[case]
    with pytest.raises(RemoteProtocolError, match=says):
        play(change_kind(sender, kind, change))


@pytest.mark.parametrize(
    ("sender", "kind", "position", "missing"),
    [("hub", Kind.HELLO, 0, 10), ("p", Kind.TAGS, 0, 1)],
    ids=["key of the hash", "tag"],
)
def test_what_cannot_be_told_apart_from_another_set_loses_ids(
    sender: str, kind: Kind, position: int, missing: int
) -> None:
    """Of the tags the altered one may be of an ID that is not shared."""
    ends, _ = play(change_kind(sender, kind, flip_byte(position)))
    assert len(SHARED) - missing <= len(ends["hub"].rows) <= len(SHARED) - (kind is Kind.HELLO)


def test_it_is_repeated_message_by_message_with_one_secret_and_not_with_another() -> None:
    _, first = play()
    _, second = play()
    assert first == second
    other = OtIntersection(AGREED, secret=bytes(32)).make_hub("hub", ["p"], SETS["hub"])
    (hello,) = other.start()
    assert hello.body[HEADER : HEADER + 32] != first[0][1].body[HEADER : HEADER + 32]


@pytest.mark.parametrize(("name", "size"), [("hub", 31), ("p", 24)])
def test_a_list_of_another_length_than_expected_is_refused(name: str, size: int) -> None:
    with pytest.raises(RemoteProtocolError, match=rf"{name} sent a list .* expected {size} by"):
        deliver(make_ends(**{name: size}))


def test_it_has_no_dealer() -> None:
    with pytest.raises(LocalProtocolError, match="an ot intersection has no dealer"):
        OtIntersection(AGREED).make_dealer("hub", ["p"])

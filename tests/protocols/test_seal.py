"""Sealed links: every altered, replayed or misdirected message is refused, and keys stay in."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.seal import SEAL_OVERHEAD_BYTES, RunKey, SealedLink, fresh_run_key
from tests.refusals import list_unrefused

CONTRACT = b"c" * 32
# RFC 7748: points of order 1, 2 and 4 or 8 on the curve and its twist.
LOW_ORDER = [
    bytes(32),
    b"\x01" + bytes(31),
    bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
    bytes.fromhex("5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157"),
    bytes.fromhex("ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f"),
    bytes.fromhex("edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f"),
    bytes.fromhex("eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f"),
]


def link(me: str, peer: str, key: RunKey, contract_hash: bytes = CONTRACT) -> SealedLink:
    return SealedLink(me=me, peer=peer, run_key=key, contract_hash=contract_hash)


def agree_links(
    first: SealedLink, first_key: RunKey, second: SealedLink, second_key: RunKey
) -> tuple[SealedLink, SealedLink]:
    """Both ends, after each heard the other's hello."""
    first.agree(second_key.public, second.hello)
    second.agree(first_key.public, first.hello)
    return first, second


def pair_of_links(**changes: Any) -> tuple[SealedLink, SealedLink]:
    """Two ends that have not heard of each other; `changes` are Bob's alone."""
    usual = {"me": "bob", "peer": "alice", "key": fresh_run_key()}
    return link("alice", "bob", fresh_run_key()), link(**{**usual, **changes})


def ends(**changes: Any) -> tuple[SealedLink, SealedLink]:
    """Both ends of a link; `changes` are Bob's alone."""
    alice = fresh_run_key()
    bob = fresh_run_key()
    usual = {"me": "bob", "peer": "alice", "key": bob}
    return agree_links(link("alice", "bob", alice), alice, link(**{**usual, **changes}), bob)


@given(bodies=st.lists(st.tuples(st.booleans(), st.binary(), st.binary()), max_size=8))
def test_messages_arrive_in_both_directions(bodies: list[tuple[bool, bytes, bytes]]) -> None:
    alice, bob = ends()
    overheads: list[int] = []
    opened: list[bytes] = []
    for from_alice, body, associated in bodies:
        sender, receiver = (alice, bob) if from_alice else (bob, alice)
        number = sender.next_sequence
        sealed = sender.seal(body, sequence=number, associated=associated)
        overheads.append(len(sealed) - len(body))
        opened.append(receiver.open(sealed, sequence=number, associated=associated))
    assert overheads == [SEAL_OVERHEAD_BYTES] * len(bodies)
    assert opened == [body for _, body, _ in bodies]


def flip_bit(body: bytes, bit: int) -> bytes:
    """Return a body with one bit flipped."""
    flipped = bytearray(body)
    flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)


def test_any_flipped_bit_is_refused_and_the_link_goes_on() -> None:
    alice, bob = ends()
    header = b"header"
    sealed = alice.seal(b"body", sequence=0, associated=header)
    said = "message 0 of alice does not authenticate"
    cases = [
        *(("does not authenticate", sealed[:length], header) for length in (0, 1, 15, 16, 19)),
        *((said, flip_bit(sealed, bit), header) for bit in range(8 * len(sealed))),
        *((said, sealed, flip_bit(header, bit)) for bit in range(8 * len(header))),
    ]
    open_first = lambda body, associated: bob.open(body, sequence=0, associated=associated)  # noqa: E731
    assert list_unrefused(RemoteProtocolError, open_first, cases) == []
    assert bob.open(sealed, sequence=0, associated=header) == b"body"


def test_replayed_and_reordered_messages_are_refused() -> None:
    alice, bob = ends()
    sealed = [alice.seal(bytes([n]), sequence=n, associated=b"") for n in range(3)]
    with pytest.raises(RemoteProtocolError, match="expected message 0 of alice, got 1"):
        bob.open(sealed[1], sequence=1, associated=b"")
    assert bob.open(sealed[0], sequence=0, associated=b"") == b"\x00"
    with pytest.raises(RemoteProtocolError, match="expected message 1 of alice, got 0"):
        bob.open(sealed[0], sequence=0, associated=b"")
    open_second = partial(bob.open, sequence=1, associated=b"")
    forged = [("does not authenticate", body) for body in (sealed[0], sealed[2])]
    assert list_unrefused(RemoteProtocolError, open_second, forged) == []
    assert bob.open(sealed[1], sequence=1, associated=b"") == b"\x01"


@pytest.mark.parametrize("sequence", [1, -1, 5])
def test_a_number_is_sealed_once_and_in_order(sequence: int) -> None:
    alice, _ = ends()
    with pytest.raises(LocalProtocolError, match="next message is number 0"):
        alice.seal(b"", sequence=sequence, associated=b"")
    alice.seal(b"", sequence=0, associated=b"")
    with pytest.raises(LocalProtocolError, match="next message is number 1, got 0"):
        alice.seal(b"", sequence=0, associated=b"")


def test_nobody_else_opens_a_message_and_no_other_contract_or_name() -> None:
    one = fresh_run_key()
    two = fresh_run_key()
    carol = fresh_run_key()
    sides = [
        *(
            ends(**changes)
            for changes in ({"contract_hash": b"d" * 32}, {"me": "bobby"}, {"peer": "alicia"})
        ),
        # names are framed before they are hashed
        agree_links(link("ab", "c", one), one, link("bc", "a", two), two),
        agree_links(link("alice", "bob", one), one, link("bob", "alice", carol), two),
    ]
    alice, _ = ends()

    def open_at(sender: SealedLink, receiver: SealedLink) -> bytes:
        sealed = sender.seal(b"body", sequence=0, associated=b"")
        return receiver.open(sealed, sequence=0, associated=b"")

    cases = [("do not hold the same contract", *side) for side in [*sides, (alice, alice)]]
    assert list_unrefused(RemoteProtocolError, open_at, cases) == []


def test_a_public_key_of_low_order_or_of_another_length_is_refused() -> None:
    assert len({fresh_run_key().public for _ in range(20)}) == 20
    agree = lambda public: link("alice", "bob", fresh_run_key()).agree(public, bytes(32))  # noqa: E731
    cases = [
        *(("of low order", public) for public in LOW_ORDER),
        *((f"32 bytes, the peer's has {length}", bytes([9] * length)) for length in (0, 31, 33)),
    ]
    assert list_unrefused(RemoteProtocolError, agree, cases) == []


@pytest.mark.parametrize("spread", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_run_key_and_a_link_are_neither_shown_nor_copied(
    spread: Callable[[object], object],
) -> None:
    """A copied link would count its nonces from the same number on."""
    key, (alice, _) = fresh_run_key(), ends()
    assert repr(key) == f"RunKey(public={key.public!r})"
    with pytest.raises(LocalProtocolError, match="never serialised"):
        spread(key)
    with pytest.raises(LocalProtocolError, match="never copied"):
        spread(alice)


def key_and_links(number: int) -> tuple[RunKey, RunKey, list[tuple[SealedLink, SealedLink]]]:
    """Several links between the same run keys under the same contract."""
    alice = fresh_run_key()
    bob = fresh_run_key()
    pairs = [(link("alice", "bob", alice), link("bob", "alice", bob)) for _ in range(number)]
    return alice, bob, pairs


@pytest.mark.parametrize("repeats", ["alice", "bob"])
def test_one_fresh_hello_is_enough_for_another_key(repeats: str) -> None:
    """Whoever plays a former session's hello again meets other keys: nothing of it opens."""
    alice, bob, ((first, second), (again, other)) = key_and_links(2)
    agree_links(first, alice, second, bob)
    old = first.seal(b"pay", sequence=0, associated=b"")
    back = second.seal(b"paid", sequence=0, associated=b"")
    of_alice = (other, alice, first, old)
    of_bob = (again, bob, second, back)
    anew, key, former, sealed = of_alice if repeats == "alice" else of_bob
    anew.agree(key.public, former.hello)
    with pytest.raises(RemoteProtocolError, match="does not authenticate"):
        anew.open(sealed, sequence=0, associated=b"")
    assert anew.seal(b"pay", sequence=0, associated=b"") != old


@pytest.mark.parametrize("bit", [0, 100, 255])
def test_an_altered_hello_leaves_no_common_key(bit: int) -> None:
    alice, bob, ((first, second),) = key_and_links(1)
    altered = bytearray(first.hello)
    altered[bit // 8] ^= 1 << bit % 8
    first.agree(bob.public, second.hello)
    second.agree(alice.public, bytes(altered))
    to_second = first.seal(b"body", sequence=0, associated=b"")
    to_first = second.seal(b"body", sequence=0, associated=b"")
    with pytest.raises(RemoteProtocolError, match="does not authenticate"):
        second.open(to_second, sequence=0, associated=b"")
    with pytest.raises(RemoteProtocolError, match="does not authenticate"):
        first.open(to_first, sequence=0, associated=b"")


def test_without_the_hello_of_the_peer_nothing_is_sealed_or_opened() -> None:
    alice, bob = pair_of_links()
    with pytest.raises(LocalProtocolError, match="no keys yet; send its hello"):
        alice.seal(b"", sequence=0, associated=b"")
    with pytest.raises(LocalProtocolError, match="no keys yet; send its hello"):
        bob.open(bytes(16), sequence=0, associated=b"")
    assert len({alice.hello, bob.hello, bytes(32)}) == 3


def test_a_hello_is_32_bytes_of_another_party() -> None:
    alice, _ = pair_of_links()
    refused: list[Any] = [b"", bytes(31), bytes(33), None, "a" * 32, bytearray(32), alice.hello]
    said = "hello of 32 bytes other than its own"
    cases = [(said, fresh_run_key().public, hello) for hello in refused]
    assert list_unrefused(RemoteProtocolError, alice.agree, cases) == []
    with pytest.raises(LocalProtocolError, match="'alice' has no link to itself"):
        link("alice", "alice", fresh_run_key())  # both directions would have one key


def test_keys_are_agreed_once() -> None:
    """A second time the numbers, and with the same hello the nonces, would restart."""
    alice, bob, ((first, second),) = key_and_links(1)
    agree_links(first, alice, second, bob)
    with pytest.raises(LocalProtocolError, match="agreed its keys already"):
        first.agree(bob.public, second.hello)


def test_both_ends_agree_on_one_key_for_each_salt_and_info() -> None:
    alice = fresh_run_key()
    bob = fresh_run_key()
    shared = alice.derive_shared_key(bob.public, salt=b"salt", info=b"info")
    assert shared == bob.derive_shared_key(alice.public, salt=b"salt", info=b"info")
    assert len(shared) == 32
    others = {
        alice.derive_shared_key(bob.public, salt=b"salt", info=b"other"),
        alice.derive_shared_key(bob.public, salt=b"other", info=b"info"),
        shared,
    }
    assert len(others) == 3


@pytest.mark.parametrize(
    "contract",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"c" * 31, id="a byte less"),
        pytest.param(b"c" * 33, id="a byte more"),
        pytest.param("c" * 32, id="a text"),
        pytest.param(bytearray(32), id="a bytearray"),
        pytest.param(None, id="none"),
    ],
)
def test_a_link_names_its_contract_by_32_bytes(contract: Any) -> None:
    """HMAC fills shorter salts up with zeros: 31 bytes and the same with a zero would be one."""
    with pytest.raises(LocalProtocolError, match="hash of a contract has 32 bytes"):
        link("alice", "bob", fresh_run_key(), contract)

"""Messages in parts, and signs of life: whole or refused by name, and nobody waits for ever."""

import struct
from collections.abc import Sequence
from typing import Any

import pytest

from apfed_protocols.conversation import Outgoing
from apfed_protocols.errors import PartyLeftError, RemoteProtocolError, RunStoppedError
from secure_apfed.exchange import BEFORE_TRAINING, InMemory, Kind, links
from secure_apfed.exchange.links import Gathering, Signs, most_signs, parts_of
from tests.secure_apfed.seats import network

SIZE = 10
HEADER = struct.Struct(">IQQ")
MESSAGE = bytes(range(35))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "PART_BYTES", SIZE)
    monkeypatch.setattr(links, "IDS_A_SIGN", 100)


def part(number: int, total: int, offset: int, body: bytes) -> bytes:
    return HEADER.pack(number, total, offset) + body


class Pair:
    """Ann hears what bob sends; frames and their sizes on the way."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.network = network(
            InMemory, "ann", "bob", "cid", record=lambda one, _: self.sizes.append(len(one.payload))
        )
        self.ann, self.bob = self.network.links["ann"], self.network.links["bob"]

    def hear(self, *kinds: Kind, times: int = 1, most: int = 99) -> list[bytes]:
        async def script() -> list[bytes]:
            return [
                (await self.ann.receive("bob", *(kinds or (Kind.ALIGNMENT,)), most=most)).payload
                for _ in range(times)
            ]

        return self.network.complete("ann", script())

    def send(self, monkeypatch: pytest.MonkeyPatch, *given: bytes) -> None:
        """Bob's own parts in place of those that he should send."""
        monkeypatch.setattr(links, "parts_of", lambda number, payload: iter(given))
        self.bob.send("ann", Kind.ALIGNMENT, BEFORE_TRAINING)


@pytest.mark.parametrize("length", [0, 1, 10, 11, 35])
def test_messages_of_any_length_arrive_whole_and_in_order(length: int) -> None:
    pair = Pair()
    for message in (MESSAGE[:length], MESSAGE):
        pair.bob.send("ann", Kind.ALIGNMENT, BEFORE_TRAINING, message)
    assert max(pair.sizes) <= SIZE + HEADER.size
    assert pair.hear(times=2) == [MESSAGE[:length], MESSAGE]
    assert len(pair.sizes) == max(1, -(-length // SIZE)) + 4


def test_messages_of_two_peers_come_in_turns_and_an_announcement_takes_no_memory() -> None:
    halves = {name: Gathering("ann", name) for name in ("bob", "cid")}
    cut = list(parts_of(0, MESSAGE))
    came = [halves[name].add(one, Kind.ALIGNMENT, most=99) for one in cut for name in halves]
    assert came == [None] * (2 * len(cut) - 2) + [MESSAGE] * 2
    half, vast = Gathering("ann", "bob"), 2**60
    assert half.add(part(0, vast, 0, bytes(SIZE)), Kind.ALIGNMENT, most=vast) is None
    assert f"{SIZE} of {vast} bytes of alignment came" in half.midway


HOSTILE = {
    "announces too much": ([part(0, 100, 0, bytes(SIZE))], "announces a message of 100 bytes"),
    "too short": ([b"123"], "sent 3 bytes of alignment to ann, too few for a part"),
    "repeated": ([part(0, 30, 0, bytes(10))] * 2, "part 0 of 30 .* expected part 10 of 30"),
    "left out": (
        [part(0, 30, 0, bytes(10)), part(0, 30, 20, bytes(10))], "part 20 of 30 .* expected part 10"
    ),
    "begins in the middle": ([part(0, 30, 10, bytes(10))], "part 10 of 30 .* expected part 0"),
    "of another message": (
        [part(0, 30, 0, bytes(10)), part(1, 30, 10, bytes(10))], "bytes of message 1, expected"
    ),
    "a message again": ([part(0, 1, 0, b"x")] * 2, "sent ann message 0 in parts, expected message"),
    "longer than said": ([part(0, 5, 0, bytes(6))], "a part of 6 bytes at 0 of 5"),
    "shorter than it must": ([part(0, 30, 0, bytes(3))], "a part of 3 bytes at 0 of 30"),
    "another length": (
        [part(0, 30, 0, bytes(10)), part(0, 31, 10, bytes(10))], "part 10 of 31 .* of 30"
    ),
}  # fmt: skip


def test_other_parts_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, says in HOSTILE.values():
        pair = Pair()
        pair.send(monkeypatch, *given)
        with pytest.raises(RemoteProtocolError, match=f"^bob .*{says}"):
            pair.hear(times=2)


def test_who_stops_midway_is_told_with_how_far_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    pair.send(monkeypatch, part(0, 30, 0, bytes(10)))
    with pytest.raises(PartyLeftError, match="bob stopped midway in a message: 10 of 30") as told:
        pair.hear()
    assert told.value.left == ("bob",)
    assert "; nothing more came" in str(told.value)  # for some of it did


def test_nothing_else_comes_between_parts_but_the_word_that_a_peer_stops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = Pair()
    pair.send(monkeypatch, part(0, 30, 0, bytes(10)))
    pair.bob.send("ann", Kind.READY, BEFORE_TRAINING)
    with pytest.raises(RemoteProtocolError, match=r"^bob sent ready to ann in the middle of"):
        pair.hear(Kind.ALIGNMENT, Kind.READY)
    other = Pair()
    other.send(monkeypatch, part(0, 30, 0, bytes(10)))
    other.bob.abort(RuntimeError("a fire"))
    with pytest.raises(RunStoppedError, match="bob stopped the run"):
        other.hear()


# Signs of life


def test_signs_are_heard_while_a_role_waits_and_reach_no_role() -> None:
    pair = Pair()
    pair.ann.signs.allow({"bob": 3})
    signs = pair.bob.signs
    for worked in (99, 1, 99, 250):  # a sign at 100 and at 449
        signs.worked(worked)
    pair.bob.send("ann", Kind.ALIGNMENT, BEFORE_TRAINING, MESSAGE)
    assert sum(size == 8 for size in pair.sizes) == 2 * len(("ann", "cid"))
    assert pair.hear() == [MESSAGE]


NO_PROGRESS = "bob sent ann a sign of life without progress"


def test_signs_without_progress_or_agreement_and_malformed_ones_are_refused() -> None:
    for allowed, signs, says in (
        *((9, at, NO_PROGRESS) for at in ((100, 100), (100, 199), (99,), (200, 100))),
        (0, (100,), "more signs of life than its work can take"),
        (9, (b"12345",), "bob sent ann a malformed sign of life"),
    ):
        pair = Pair()
        pair.ann.signs.allow({"bob": allowed})
        for sign in signs:
            body = sign if isinstance(sign, bytes) else sign.to_bytes(8, "big")
            pair.bob.send("ann", Kind.ALIVE, BEFORE_TRAINING, body)
        with pytest.raises(RemoteProtocolError, match=says):
            pair.hear()


def test_a_bound_within_a_block_counts_against_the_one_around_it() -> None:
    pair = Pair()
    pair.ann.signs.allow({"bob": 10})
    signs = pair.bob.signs

    def signs_then_a_message(count: int) -> None:
        for _ in range(count):
            signs.worked(100)
        pair.bob.send("ann", Kind.ALIGNMENT, BEFORE_TRAINING, MESSAGE)
        pair.hear()

    with pair.ann.signs.at_most({"bob": 4}):
        signs_then_a_message(4)
    signs_then_a_message(6)
    with pytest.raises(RemoteProtocolError, match="more signs"):
        signs_then_a_message(1)
    assert most_signs(250) == 2 * 2 + 4


def test_a_sign_is_passed_on_to_the_others_alone() -> None:
    sent: list[tuple[str, int]] = []
    signs = Signs("dan", "abc", lambda peer, sign: sent.append((peer, int.from_bytes(sign, "big"))))
    signs.relays = True
    signs.allow({"a": 1, "b": 1})
    signs.worked(50)
    signs.hear("b", (100).to_bytes(8, "big"))
    signs.worked(99)
    signs.hear("a", (100).to_bytes(8, "big"))
    assert sent == [("a", 100), ("c", 100), ("b", 200), ("c", 200)]


class Slow:
    """A role that gives signs of its work before it answers."""

    def __init__(self, signs: Signs) -> None:
        self._signs, self.finished = signs, False

    def start(self) -> Sequence[Outgoing]:
        return ()

    def receive(self, sender: str, body: bytes) -> Sequence[Outgoing]:
        self._signs.worked(300)
        self.finished = True
        return [Outgoing(sender, body * 2)]


def test_a_role_in_a_conversation_gives_signs_while_it_computes() -> None:
    pair = Pair()
    for name in ("ann", "cid"):
        pair.network.links[name].signs.allow({"bob": 1})

    async def ask() -> bytes:
        pair.ann.send("bob", Kind.ALIGNMENT, BEFORE_TRAINING, MESSAGE)
        return (await pair.ann.receive("bob", Kind.ALIGNMENT)).payload

    answering = pair.bob.converse(Kind.ALIGNMENT, Slow(pair.bob.signs), ["ann"])
    scripts: dict[str, Any] = {"ann": ask(), "bob": answering}
    assert pair.network.complete_all(scripts)["ann"] == MESSAGE * 2
    assert pair.sizes.count(8) == 2

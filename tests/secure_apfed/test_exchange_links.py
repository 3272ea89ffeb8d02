"""A party's links: sealed, in order, one session, and nothing but what its role waits for. Messages
in parts, and heartbeats: whole or refused by name, and nobody waits for ever.
"""

import struct
from collections import defaultdict, deque
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import Mock

import pytest

from apfed_protocols.conversation import Outgoing
from apfed_protocols.errors import (
    LocalProtocolError,
    PartyLeftError,
    RemoteProtocolError,
    RunStoppedError,
)
from apfed_protocols.seal import SEAL_OVERHEAD_BYTES
from secure_apfed.exchange import (
    BEFORE_TRAINING,
    Awaited,
    Envelope,
    InMemoryNetwork,
    Kind,
    links,
    run_script,
)
from secure_apfed.exchange.links import (
    Frame,
    Heartbeats,
    MessageAssembler,
    count_allowed_heartbeats,
    split_into_parts,
)
from tests.secure_apfed.seats import network

T = TypeVar("T")
NAMES = ("active", "passive", "other")


class Wire(InMemoryNetwork):
    """Drives nobody: every frame waits to be given to its receiver, or to be tampered with."""

    recorded: list[tuple[Envelope, int]]
    carried: defaultdict[tuple[str, str], deque[bytes]]

    @classmethod
    def connect_three(cls) -> "Wire":
        recorded: list[tuple[Envelope, int]] = []
        wire = network(cls, *NAMES, record=lambda *sent: recorded.append(sent))
        wire.recorded = recorded
        wire.carried = defaultdict(deque)
        return wire

    def queue_frame(self, sender: str, receiver: str, frame: bytes) -> None:
        self.carried[sender, receiver].append(frame)

    @property
    def frames(self) -> deque[bytes]:
        return self.carried["active", "passive"]

    def send(self, body: bytes = b"body", *, to: str = "passive") -> None:
        self.links["active"].send(to, Kind.SUM, 0, body)

    def receive(self, *, kind: Kind = Kind.SUM, step: int | None = 0) -> Envelope:
        """Return what the passive makes of the next frame of the active."""
        waiting = self.links["passive"].receive("active", kind, step=step)
        return run_with_frames(waiting, ("active", self.frames.popleft()))


def begun(script: Coroutine[Awaited, Frame, T]) -> Awaited:
    return script.send(None)  # type: ignore[arg-type]  # None begins it


def run_with_frames(script: Coroutine[Awaited, Frame, T], *frames: Frame) -> T:
    """Return what a script returns to whom these frames came."""
    begun(script)
    try:
        for frame in frames:
            script.send(frame)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("the script waits for more")


def test_envelopes_arrive_as_they_were_sent() -> None:
    wire = Wire.connect_three()
    wire.send()
    ((sent, size),) = wire.recorded
    assert size == 2 + len(sent.header) + len(b"body") + SEAL_OVERHEAD_BYTES == len(wire.frames[0])
    assert wire.receive() == sent
    assert (sent.sender, sent.receiver, sent.payload) == ("active", "passive", b"body")


def test_every_link_numbers_its_messages_apart_and_wastes_no_number() -> None:
    wire = Wire.connect_three()
    for to in ("passive", "other", "passive"):
        wire.send(to=to)
    active = wire.links["active"]
    with pytest.raises(LocalProtocolError, match="out of range"):
        active.send("passive", Kind.SUM, -2)
    with pytest.raises(LocalProtocolError, match=r"from 'active' to 'ghost'.*passive, other"):
        wire.send(to="ghost")
    wire.send()
    assert [sent.sequence for sent, _ in wire.recorded] == [0, 0, 1, 2]
    assert [wire.receive().sequence for _ in range(3)] == [0, 1, 2]


def test_what_is_waited_for_is_data() -> None:
    passive = Wire.connect_three().links["passive"]
    one = passive.receive("active", Kind.SUM, Kind.END, step=4, patience=3)
    assert begun(one) == Awaited(
        me="passive", senders=("active",), kinds=(Kind.SUM, Kind.END), step=4, patience=3
    )
    some = passive.receive(["active", "other"], Kind.SUM, min_senders=2)
    awaited = begun(some)
    assert (awaited.senders, awaited.min_senders, awaited.patience) == (("active", "other"), 2, 1)
    assert str(awaited) == "passive expected sum from active or other"
    one.close()
    some.close()
    with pytest.raises(LocalProtocolError, match="no link from 'passive' to 'ghost'"):
        begun(passive.receive(("active", "ghost"), Kind.SUM))


@pytest.mark.parametrize("expected", [{"kind": Kind.GRADIENTS}, {"step": 1}])
def test_another_kind_or_step_is_refused(expected: dict[str, Any]) -> None:
    wire = Wire.connect_three()
    wire.send()
    with pytest.raises(RemoteProtocolError, match=r"expected .* from active, got sum of step 0 fr"):
        wire.receive(**expected)


def test_a_frame_that_came_before_or_is_of_another_link_is_refused() -> None:
    wire = Wire.connect_three()
    wire.send()
    wire.frames.append(wire.frames[0])
    wire.receive()
    with pytest.raises(RemoteProtocolError, match="expected message 1 of active, got 0"):
        wire.receive()
    wire = Wire.connect_three()
    wire.send(to="other")
    foreign = wire.carried["active", "other"][0]
    with pytest.raises(RemoteProtocolError, match="claims to be from 'active' to 'other'"):
        run_with_frames(wire.links["passive"].receive("active", Kind.SUM), ("active", foreign))


@pytest.mark.parametrize(("me", "claimed"), [("active", "passive"), ("passive", "other")])
def test_a_frame_that_is_reflected_or_relabelled_is_refused(me: str, claimed: str) -> None:
    wire = Wire.connect_three()
    wire.send()
    waiting = wire.links[me].receive(claimed, Kind.SUM)
    with pytest.raises(RemoteProtocolError, match=f"from {claimed} claims to be from 'active'"):
        run_with_frames(waiting, (claimed, wire.frames[0]))


def parse_header(frame: bytes) -> Envelope:
    return Envelope.parse_header(frame[2 : 2 + int.from_bytes(frame[:2], "big")])


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"session": "t"}, "in session 't'"),
    ({"sender": "other"}, "claims to be from 'other'"),
    ({"receiver": "other"}, "claims to be from 'active' to 'other'"),
    ({"step": 1}, "does not authenticate"),
    ({"kind": Kind.REQUEST}, "does not authenticate"),
    ({"sequence": 1}, "expected message 0 of active, got 1"),
]


@pytest.mark.parametrize(("changes", "message"), CHANGES)
def test_a_changed_header_is_refused(changes: dict[str, Any], message: str) -> None:
    wire = Wire.connect_three()
    wire.send()
    sent = parse_header(wire.frames[0])
    header = replace(sent, **changes).header
    body = wire.frames[0][2 + len(sent.header) :]
    wire.frames[0] = len(header).to_bytes(2, "big") + header + body
    expected = {key: value for key, value in changes.items() if key in ("step", "kind")}
    with pytest.raises(RemoteProtocolError, match=message):
        wire.receive(**expected)


class Speaker:
    def __init__(self, *messages: Outgoing, wanted: int = 1) -> None:
        self._messages = messages
        self._wanted = wanted
        self.got: list[tuple[str, bytes]] = []

    def start(self) -> tuple[Outgoing, ...]:
        return self._messages

    def receive(self, sender: str, body: bytes) -> tuple[Outgoing, ...]:
        self.got.append((sender, body))
        return ()

    @property
    def is_finished(self) -> bool:
        return len(self.got) >= self._wanted


def conversing(wire: Wire, role: Speaker, peers: Sequence[str]) -> Coroutine[Awaited, Frame, None]:
    return wire.links["active"].run_conversation(Kind.SUM_SETUP, role, peers)


def send_frame(wire: Wire, sender: str, kind: Kind, body: bytes = b"", *, step: int = -1) -> Frame:
    wire.links[sender].send("active", kind, step, body)
    return sender, wire.carried[sender, "active"].popleft()


def test_a_conversation_travels_over_the_links() -> None:
    wire = Wire.connect_three()
    role = Speaker(Outgoing("passive", b"to passive"), wanted=2)
    frames = [
        send_frame(wire, name, Kind.SUM_SETUP, name.encode()) for name in ("other", "passive")
    ]
    run_with_frames(conversing(wire, role, ("passive", "other")), *frames)
    assert role.got == [("other", b"other"), ("passive", b"passive")]
    sent = wire.recorded[-1][0]
    assert (sent.receiver, sent.kind, sent.step) == ("passive", Kind.SUM_SETUP, BEFORE_TRAINING)
    assert sent.payload == next(split_into_parts(0, b"to passive"))


def test_a_conversation_is_with_who_takes_part() -> None:
    wire = Wire.connect_three()
    role = Speaker(Outgoing("other", b""))
    with pytest.raises(LocalProtocolError, match=r"'other', who takes no part in sum-setup"):
        begun(conversing(wire, role, ["passive"]))
    assert not wire.recorded


@pytest.mark.parametrize(("kind", "step"), [(Kind.SUM, -1), (Kind.SUM_SETUP, 0), (Kind.READY, 0)])
def test_a_conversation_is_before_training_and_of_one_kind(kind: Kind, step: int) -> None:
    wire = Wire.connect_three()
    role = Speaker()
    frame = send_frame(wire, "passive", kind, step=step)
    with pytest.raises(RemoteProtocolError, match=f"got {kind} of step {step} from passive"):
        run_with_frames(conversing(wire, role, ["passive"]), frame)
    assert not role.got


def test_a_peer_that_is_ready_early_is_heard_when_that_is_asked() -> None:
    wire, role = Wire.connect_three(), Speaker(wanted=2)

    async def script() -> str:
        active = wire.links["active"]
        await active.run_conversation(Kind.SUM_SETUP, role, ("passive", "other"))
        return (await active.receive("passive", Kind.READY, step=BEFORE_TRAINING)).sender

    frames = [
        send_frame(wire, "passive", Kind.SUM_SETUP, b"1"),
        send_frame(wire, "passive", Kind.READY),
        send_frame(wire, "other", Kind.SUM_SETUP, b"2"),
    ]
    assert run_with_frames(script(), *frames) == "passive"
    assert role.got == [("passive", b"1"), ("other", b"2")]


def test_after_it_was_ready_a_peer_has_no_part_and_is_named_in_the_silence() -> None:
    wire = Wire.connect_three()
    script = conversing(wire, Speaker(wanted=2), ("passive", "other"))
    assert begun(script).senders == ("passive", "other")
    assert script.send(send_frame(wire, "passive", Kind.READY)).senders == ("other",)
    with pytest.raises(PartyLeftError, match=r"nothing came; passive said before that .* is over"):
        script.throw(PartyLeftError("nothing came"))


def test_after_an_interruption_while_it_sent_a_party_says_no_more_on_that_link() -> None:
    """The number of what never left is used up: whatever follows would pass for a replay."""
    wire = Wire.connect_three()
    post = wire.links["active"]._post_frame
    interrupted = Mock(side_effect=KeyboardInterrupt)
    wire.links["active"]._post_frame = interrupted
    with pytest.raises(KeyboardInterrupt):
        wire.send()
    wire.links["active"]._post_frame = post
    wire.links["active"].abort(KeyboardInterrupt())
    assert not wire.carried["active", "passive"]
    waiting = wire.links["other"].receive("active", Kind.SUM)
    with pytest.raises(RunStoppedError, match="active stopped the run: 'KeyboardInterrupt"):
        run_with_frames(waiting, ("active", wire.carried["active", "other"].popleft()))


@pytest.mark.parametrize(("unit_s", "asks_s"), [(None, 8), (7.0, 28)])
def test_a_unit_of_patience_is_what_the_contract_says(unit_s: float | None, asks_s: float) -> None:
    wire = Wire.connect_three()
    asked = list[float]()

    def nothing(awaited: Awaited, timeout_s: float) -> Frame:
        asked.append(timeout_s)
        raise PartyLeftError("nothing came", missing_parties=awaited.senders)

    silent: Any = SimpleNamespace(receive_frame=nothing)
    wire.links["passive"].unit_s = unit_s
    waiting = wire.links["passive"].receive("active", Kind.SUM, patience=4)
    with pytest.raises(PartyLeftError):
        run_script(waiting, silent, timeout_s=2)
    assert asked == [asks_s]


# Messages in parts

SIZE = 10
HEADER = struct.Struct(">IQQ")
MESSAGE = bytes(range(35))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "PART_BYTES", SIZE)
    monkeypatch.setattr(links, "IDS_PER_HEARTBEAT", 100)


def part(number: int, total: int, offset: int, body: bytes) -> bytes:
    return HEADER.pack(number, total, offset) + body


class Pair:
    """Ann hears what bob sends; frames and their sizes on the way."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.network = network(
            InMemoryNetwork,
            "ann",
            "bob",
            "cid",
            record=lambda one, _: self.sizes.append(len(one.payload)),
        )
        self.ann = self.network.links["ann"]
        self.bob = self.network.links["bob"]

    def hear(self, *kinds: Kind, times: int = 1, maximum: int = 99) -> list[bytes]:
        async def script() -> list[bytes]:
            return [
                (
                    await self.ann.receive("bob", *(kinds or (Kind.ALIGNMENT,)), max_bytes=maximum)
                ).payload
                for _ in range(times)
            ]

        return self.network.run_script("ann", script())

    def send(self, monkeypatch: pytest.MonkeyPatch, *given: bytes) -> None:
        """Bob's own parts in place of those that he should send."""
        monkeypatch.setattr(links, "split_into_parts", lambda number, payload: iter(given))
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
    halves = {name: MessageAssembler("ann", name) for name in ("bob", "cid")}
    cut = list(split_into_parts(0, MESSAGE))
    came = [
        halves[name].add_part(one, Kind.ALIGNMENT, max_bytes=99) for one in cut for name in halves
    ]
    assert came == [None] * (2 * len(cut) - 2) + [MESSAGE] * 2
    half = MessageAssembler("ann", "bob")
    vast = 2**60
    assert half.add_part(part(0, vast, 0, bytes(SIZE)), Kind.ALIGNMENT, max_bytes=vast) is None
    assert f"{SIZE} of {vast} bytes of alignment came" in half.interruption


HOSTILE = {
    "announces too much": ([part(0, 100, 0, bytes(SIZE))], "announces a message of 100 bytes"),
    "too short": ([b"123"], "sent 3 bytes of alignment to ann, too few for a part"),
    "repeated": ([part(0, 30, 0, bytes(10))] * 2, "part 0 of 30 .* expected part 10 of 30"),
    "left out": (
        [part(0, 30, 0, bytes(10)), part(0, 30, 20, bytes(10))],
        "part 20 of 30 .* expected part 10",
    ),
    "begins in the middle": ([part(0, 30, 10, bytes(10))], "part 10 of 30 .* expected part 0"),
    "of another message": (
        [part(0, 30, 0, bytes(10)), part(1, 30, 10, bytes(10))],
        "bytes of message 1, expected",
    ),
    "a message again": ([part(0, 1, 0, b"x")] * 2, "sent ann message 0 in parts, expected message"),
    "longer than said": ([part(0, 5, 0, bytes(6))], "a part of 6 bytes at 0 of 5"),
    "shorter than it must": ([part(0, 30, 0, bytes(3))], "a part of 3 bytes at 0 of 30"),
    "another length": (
        [part(0, 30, 0, bytes(10)), part(0, 31, 10, bytes(10))],
        "part 10 of 31 .* of 30",
    ),
}


@pytest.mark.parametrize(("parts", "says"), HOSTILE.values(), ids=HOSTILE)
def test_other_parts_are_refused_by_name(
    parts: list[bytes], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair()
    pair.send(monkeypatch, *parts)
    with pytest.raises(RemoteProtocolError, match=f"^bob .*{says}"):
        pair.hear(times=2)


def test_who_stops_midway_is_told_with_how_far_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    pair.send(monkeypatch, part(0, 30, 0, bytes(10)))
    with pytest.raises(PartyLeftError, match="bob stopped midway in a message: 10 of 30") as told:
        pair.hear()
    assert told.value.missing_parties == ("bob",)
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


def test_heartbeats_are_heard_while_a_role_waits_and_reach_no_role() -> None:
    pair = Pair()
    pair.ann.heartbeats.set_limits({"bob": 3})
    heartbeats = pair.bob.heartbeats
    for worked in (99, 1, 99, 250):  # a heartbeat at 100 and at 449
        heartbeats.count_work(worked)
    pair.bob.send("ann", Kind.ALIGNMENT, BEFORE_TRAINING, MESSAGE)
    assert sum(size == 8 for size in pair.sizes) == 2 * len(("ann", "cid"))
    assert pair.hear() == [MESSAGE]


NO_PROGRESS = "bob sent ann a heartbeat without progress"


@pytest.mark.parametrize(
    ("allowed", "heartbeats", "says"),
    [
        *((9, at, NO_PROGRESS) for at in ((100, 100), (100, 199), (99,), (200, 100))),
        (0, (100,), "more heartbeats than its work can take"),
        (9, (b"12345",), "bob sent ann a malformed heartbeat"),
    ],
    ids=str,
)
def test_heartbeats_without_progress_or_agreement_and_malformed_ones_are_refused(
    allowed: int, heartbeats: tuple[Any, ...], says: str
) -> None:
    pair = Pair()
    pair.ann.heartbeats.set_limits({"bob": allowed})
    for heartbeat in heartbeats:
        body = heartbeat if isinstance(heartbeat, bytes) else heartbeat.to_bytes(8, "big")
        pair.bob.send("ann", Kind.ALIVE, BEFORE_TRAINING, body)
    with pytest.raises(RemoteProtocolError, match=says):
        pair.hear()


def test_a_bound_within_a_block_counts_against_the_one_around_it() -> None:
    pair = Pair()
    pair.ann.heartbeats.set_limits({"bob": 10})
    heartbeats = pair.bob.heartbeats

    def heartbeats_then_a_message(count: int) -> None:
        for _ in range(count):
            heartbeats.count_work(100)
        pair.bob.send("ann", Kind.ALIGNMENT, BEFORE_TRAINING, MESSAGE)
        pair.hear()

    with pair.ann.heartbeats.tighten_limits({"bob": 4}):
        heartbeats_then_a_message(4)
    heartbeats_then_a_message(6)
    with pytest.raises(RemoteProtocolError, match="more heartbeats"):
        heartbeats_then_a_message(1)
    assert count_allowed_heartbeats(250) == 2 * 2 + 4


def test_a_heartbeat_is_passed_on_to_the_others_alone() -> None:
    sent: list[tuple[str, int]] = []
    heartbeats = Heartbeats(
        "dan", "abc", lambda peer, heartbeat: sent.append((peer, int.from_bytes(heartbeat, "big")))
    )
    heartbeats.is_relaying = True
    heartbeats.set_limits({"a": 1, "b": 1})
    heartbeats.count_work(50)
    heartbeats.accept_heartbeat("b", (100).to_bytes(8, "big"))
    heartbeats.count_work(99)
    heartbeats.accept_heartbeat("a", (100).to_bytes(8, "big"))
    assert sent == [("a", 100), ("c", 100), ("b", 200), ("c", 200)]


class Slow:
    """A role that gives heartbeats of its work before it answers."""

    def __init__(self, heartbeats: Heartbeats) -> None:
        self._heartbeats = heartbeats
        self.is_finished = False

    def start(self) -> Sequence[Outgoing]:
        return ()

    def receive(self, sender: str, body: bytes) -> Sequence[Outgoing]:
        self._heartbeats.count_work(300)
        self.is_finished = True
        return [Outgoing(sender, body * 2)]


def test_a_role_in_a_conversation_gives_signs_while_it_computes() -> None:
    pair = Pair()
    for name in ("ann", "cid"):
        pair.network.links[name].heartbeats.set_limits({"bob": 1})

    async def ask() -> bytes:
        pair.ann.send("bob", Kind.ALIGNMENT, BEFORE_TRAINING, MESSAGE)
        return (await pair.ann.receive("bob", Kind.ALIGNMENT)).payload

    answering = pair.bob.run_conversation(Kind.ALIGNMENT, Slow(pair.bob.heartbeats), ["ann"])
    scripts: dict[str, Any] = {"ann": ask(), "bob": answering}
    assert pair.network.run_scripts(scripts)["ann"] == MESSAGE * 2
    assert pair.sizes.count(8) == 2

"""A party's links: sealed, in order, one session, and nothing but what its role waits for."""

from collections import defaultdict, deque
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from apfed_protocols.conversation import Outgoing
from apfed_protocols.errors import (
    LocalProtocolError,
    PartyLeftError,
    RemoteProtocolError,
    RunStoppedError,
)
from apfed_protocols.seal import SEAL_OVERHEAD_BYTES
from secure_apfed.exchange import BEFORE_TRAINING, Awaited, Envelope, InMemory, Kind, drive
from secure_apfed.exchange.links import Frame, parts_of
from tests.secure_apfed.seats import network

T = TypeVar("T")
NAMES = ("active", "passive", "other")


class Wire(InMemory):
    """Drives nobody: every frame waits to be given to its receiver, or to be tampered with."""

    recorded: list[tuple[Envelope, int]]
    carried: defaultdict[tuple[str, str], deque[bytes]]

    @classmethod
    def of_three(cls) -> "Wire":
        recorded: list[tuple[Envelope, int]] = []
        wire = network(cls, *NAMES, record=lambda *sent: recorded.append(sent))
        wire.recorded, wire.carried = recorded, defaultdict(deque)
        return wire

    def post(self, sender: str, receiver: str, frame: bytes) -> None:
        self.carried[sender, receiver].append(frame)

    @property
    def frames(self) -> deque[bytes]:
        """From the active to the passive."""
        return self.carried["active", "passive"]

    def send(self, body: bytes = b"body", *, to: str = "passive") -> None:
        self.links["active"].send(to, Kind.SUM, 0, body)

    def receive(self, *, kind: Kind = Kind.SUM, step: int | None = 0) -> Envelope:
        """What the passive makes of the next frame of the active."""
        waiting = self.links["passive"].receive("active", kind, step=step)
        return given(waiting, ("active", self.frames.popleft()))


def begun(script: Coroutine[Awaited, Frame, T]) -> Awaited:
    return script.send(None)  # type: ignore[arg-type]  # None begins it


def given(script: Coroutine[Awaited, Frame, T], *frames: Frame) -> T:
    """What a script returns to whom these frames came."""
    begun(script)
    try:
        for frame in frames:
            script.send(frame)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("the script waits for more")


def test_envelopes_arrive_as_they_were_sent() -> None:
    wire = Wire.of_three()
    wire.send()
    ((sent, size),) = wire.recorded
    assert size == 2 + len(sent.header) + len(b"body") + SEAL_OVERHEAD_BYTES == len(wire.frames[0])
    assert wire.receive() == sent
    assert (sent.sender, sent.receiver, sent.payload) == ("active", "passive", b"body")


def test_every_link_numbers_its_messages_apart_and_wastes_no_number() -> None:
    wire = Wire.of_three()
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
    links = Wire.of_three().links["passive"]
    one = links.receive("active", Kind.SUM, Kind.END, step=4, patience=3)
    assert begun(one) == Awaited(
        me="passive", senders=("active",), kinds=(Kind.SUM, Kind.END), step=4, patience=3
    )
    some = links.receive(["active", "other"], Kind.SUM, least=2)
    awaited = begun(some)
    assert (awaited.senders, awaited.least, awaited.patience) == (("active", "other"), 2, 1)
    assert str(awaited) == "passive expected sum from active or other"
    one.close()
    some.close()
    with pytest.raises(LocalProtocolError, match="no link from 'passive' to 'ghost'"):
        begun(links.receive(("active", "ghost"), Kind.SUM))


@pytest.mark.parametrize("expected", [{"kind": Kind.GRADIENTS}, {"step": 1}])
def test_another_kind_or_step_is_refused(expected: dict[str, Any]) -> None:
    wire = Wire.of_three()
    wire.send()
    with pytest.raises(RemoteProtocolError, match=r"expected .* from active, got sum of step 0 fr"):
        wire.receive(**expected)


def test_a_frame_that_came_before_or_is_of_another_link_is_refused() -> None:
    wire = Wire.of_three()
    wire.send()
    wire.frames.append(wire.frames[0])
    wire.receive()
    with pytest.raises(RemoteProtocolError, match="expected message 1 of active, got 0"):
        wire.receive()
    wire = Wire.of_three()
    wire.send(to="other")
    foreign = wire.carried["active", "other"][0]
    with pytest.raises(RemoteProtocolError, match="claims to be from 'active' to 'other'"):
        given(wire.links["passive"].receive("active", Kind.SUM), ("active", foreign))
    wire.send()
    for me, claimed in (("active", "passive"), ("passive", "other")):  # reflected, or relabelled
        waiting = wire.links[me].receive(claimed, Kind.SUM)
        with pytest.raises(RemoteProtocolError, match=f"from {claimed} claims to be from 'active'"):
            given(waiting, (claimed, wire.frames[0]))


def read(frame: bytes) -> Envelope:
    return Envelope.parse_header(frame[2 : 2 + int.from_bytes(frame[:2], "big")])


def behind(header: bytes, frame: bytes) -> bytes:
    """The same seal behind another header."""
    return len(header).to_bytes(2, "big") + header + frame[2 + int.from_bytes(frame[:2], "big") :]


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"session": "t"}, "in session 't'"),
    ({"sender": "other"}, "claims to be from 'other'"),
    ({"receiver": "other"}, "claims to be from 'active' to 'other'"),
    ({"step": 1}, "does not authenticate"),
    ({"kind": Kind.REQUEST}, "does not authenticate"),
    ({"sequence": 1}, "expected message 0 of active, got 1"),
]


def test_a_changed_header_is_refused() -> None:
    for changes, message in CHANGES:
        wire = Wire.of_three()
        wire.send()
        changed = replace(read(wire.frames[0]), **changes)
        wire.frames[0] = behind(changed.header, wire.frames[0])
        expected = {key: value for key, value in changes.items() if key in ("step", "kind")}
        with pytest.raises(RemoteProtocolError, match=message):
            wire.receive(**expected)


class Speaker:
    """Sends its messages, then wants some."""

    def __init__(self, *messages: Outgoing, wanted: int = 1) -> None:
        self._messages, self._wanted = messages, wanted
        self.got: list[tuple[str, bytes]] = []

    def start(self) -> tuple[Outgoing, ...]:
        return self._messages

    def receive(self, sender: str, body: bytes) -> tuple[Outgoing, ...]:
        self.got.append((sender, body))
        return ()

    @property
    def finished(self) -> bool:
        return len(self.got) >= self._wanted


def conversing(wire: Wire, role: Speaker, peers: Sequence[str]) -> Coroutine[Awaited, Frame, None]:
    return wire.links["active"].converse(Kind.SUM_SETUP, role, peers)


def said(wire: Wire, sender: str, kind: Kind, body: bytes = b"", *, step: int = -1) -> Frame:
    """A frame to the active."""
    wire.links[sender].send("active", kind, step, body)
    return sender, wire.carried[sender, "active"].popleft()


def test_a_conversation_travels_over_the_links() -> None:
    wire, role = Wire.of_three(), Speaker(Outgoing("passive", b"to passive"), wanted=2)
    frames = [said(wire, name, Kind.SUM_SETUP, name.encode()) for name in ("other", "passive")]
    given(conversing(wire, role, ("passive", "other")), *frames)
    assert role.got == [("other", b"other"), ("passive", b"passive")]
    sent = wire.recorded[-1][0]
    assert (sent.receiver, sent.kind, sent.step) == ("passive", Kind.SUM_SETUP, BEFORE_TRAINING)
    assert sent.payload == next(parts_of(0, b"to passive"))


def test_a_conversation_is_with_who_takes_part_before_training_and_of_one_kind() -> None:
    wire, role = Wire.of_three(), Speaker(Outgoing("other", b""))
    with pytest.raises(LocalProtocolError, match=r"'other', who takes no part in sum-setup"):
        begun(conversing(wire, role, ["passive"]))
    assert not wire.recorded
    for kind, step in ((Kind.SUM, -1), (Kind.SUM_SETUP, 0), (Kind.READY, 0)):
        wire, role = Wire.of_three(), Speaker()
        frame = said(wire, "passive", kind, step=step)
        with pytest.raises(RemoteProtocolError, match=f"got {kind} of step {step} from passive"):
            given(conversing(wire, role, ["passive"]), frame)
        assert not role.got


def test_a_peer_that_is_ready_early_is_heard_when_that_is_asked() -> None:
    wire, role = Wire.of_three(), Speaker(wanted=2)

    async def script() -> str:
        links = wire.links["active"]
        await links.converse(Kind.SUM_SETUP, role, ("passive", "other"))
        return (await links.receive("passive", Kind.READY, step=BEFORE_TRAINING)).sender

    frames = [
        said(wire, "passive", Kind.SUM_SETUP, b"1"),
        said(wire, "passive", Kind.READY),
        said(wire, "other", Kind.SUM_SETUP, b"2"),
    ]
    assert given(script(), *frames) == "passive"
    assert role.got == [("passive", b"1"), ("other", b"2")]


def test_after_it_was_ready_a_peer_has_no_part_and_is_named_in_the_silence() -> None:
    wire = Wire.of_three()
    script = conversing(wire, Speaker(wanted=2), ("passive", "other"))
    assert begun(script).senders == ("passive", "other")
    assert script.send(said(wire, "passive", Kind.READY)).senders == ("other",)
    with pytest.raises(PartyLeftError, match=r"nothing came; passive said before that .* is over"):
        script.throw(PartyLeftError("nothing came"))


def test_after_an_interruption_while_it_sent_a_party_says_no_more_on_that_link() -> None:
    """The number of what never left is used up: whatever follows would pass for a replay."""
    wire = Wire.of_three()
    post, wire.links["active"]._post = wire.links["active"]._post, interrupted
    with pytest.raises(KeyboardInterrupt):
        wire.send()
    wire.links["active"]._post = post
    wire.links["active"].abort(KeyboardInterrupt())
    assert not wire.carried["active", "passive"]
    waiting = wire.links["other"].receive("active", Kind.SUM)
    with pytest.raises(RunStoppedError, match="active stopped the run: KeyboardInterrupt"):
        given(waiting, ("active", wire.carried["active", "other"].popleft()))


def interrupted(receiver: str, frame: bytes) -> None:
    raise KeyboardInterrupt


def test_a_unit_of_patience_is_what_the_contract_says() -> None:
    wire, asked = Wire.of_three(), list[float]()

    def nothing(awaited: Awaited, timeout_s: float) -> Frame:
        asked.append(timeout_s)
        raise PartyLeftError("nothing came", left=awaited.senders)

    silent: Any = SimpleNamespace(take=nothing)
    for unit_s in (None, 7.0):
        wire.links["passive"].unit_s = unit_s
        waiting = wire.links["passive"].receive("active", Kind.SUM, patience=4)
        with pytest.raises(PartyLeftError):
            drive(waiting, silent, timeout_s=2)
    assert asked == [8, 28]

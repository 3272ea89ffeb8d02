"""The transport in memory: sealed links, in order, one session, nothing unexpected."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from protocols.conversation import Outgoing
from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.seal import SEAL_OVERHEAD_BYTES, fresh_run_key
from secure_apfed.exchange import Envelope, InMemoryTransport, Kind
from secure_apfed.exchange.conversation import hold_conversation
from secure_apfed.exchange.outbox import Outbox

NAMES = ("active", "passive", "other")


class Wire:
    """A transport, and hands on the frames that wait in it."""

    def __init__(self) -> None:
        keys = {name: fresh_run_key() for name in NAMES}
        self.transport = InMemoryTransport(session="s", contract_hash=bytes(32), run_keys=keys)
        self.outboxes = {name: Outbox("s", name) for name in NAMES}
        self.frames = self.transport._frames["active", "passive"]

    def send(self, body: bytes = b"body", *, to: str = "passive", step: int = 0) -> int:
        return self.transport.send(self.outboxes["active"].write(Kind.SUM, step, to, body))

    def receive(self, *, sender: str = "active", kind: Kind = Kind.SUM, step: int = 0) -> Envelope:
        return self.transport.receive("passive", sender=sender, kind=kind, step=step)


def test_envelopes_arrive_as_they_were_sent() -> None:
    wire = Wire()
    sent = wire.outboxes["active"].write(Kind.SUM, 0, "passive", b"body")
    size = wire.transport.send(sent)
    assert size == 2 + len(sent.header) + len(b"body") + SEAL_OVERHEAD_BYTES
    assert wire.receive() == sent


def test_links_are_queues_of_their_own() -> None:
    wire = Wire()
    for body in (b"1", b"2", b"3"):
        wire.send(body)
        wire.send(b"not for the passive", to="other")
    assert [wire.receive().payload for _ in range(3)] == [b"1", b"2", b"3"]


def test_the_body_is_not_readable_on_the_wire() -> None:
    wire = Wire()
    wire.send(b"in the clear")
    assert b"in the clear" not in wire.frames[0]


def test_nothing_there_says_what_was_expected() -> None:
    with pytest.raises(
        RemoteProtocolError, match="passive expected sum of step 4 from active; nothing came"
    ):
        Wire().receive(step=4)


@pytest.mark.parametrize("expected", [{"kind": Kind.GRADIENTS}, {"step": 1}, {"step": -1}])
def test_another_kind_or_step_is_refused(expected: dict[str, Any]) -> None:
    wire = Wire()
    wire.send()
    with pytest.raises(RemoteProtocolError, match=r"expected .* from active, got sum of step 0"):
        wire.receive(**expected)


def test_another_session_is_not_sent() -> None:
    envelope = replace(Outbox("t", "active").write(Kind.SUM, 0, "passive", b""), session="t")
    with pytest.raises(LocalProtocolError, match="session 't', this one is 's'"):
        Wire().transport.send(envelope)


def test_unknown_parties_are_named() -> None:
    wire = Wire()
    with pytest.raises(LocalProtocolError, match=r"no link from 'active' to 'ghost'.*active"):
        wire.send(to="ghost")
    with pytest.raises(LocalProtocolError, match="no link from 'passive' to 'ghost'"):
        wire.receive(sender="ghost")


def test_a_number_out_of_order_is_not_sent() -> None:
    wire = Wire()
    late = wire.outboxes["active"].write(Kind.SUM, 0, "passive", b"")
    wire.transport.send(late)
    with pytest.raises(LocalProtocolError, match="next message is number 1, got 0"):
        wire.transport.send(late)


def test_a_replayed_frame_is_refused() -> None:
    wire = Wire()
    wire.send()
    wire.frames.append(wire.frames[0])
    wire.receive()
    with pytest.raises(RemoteProtocolError, match="expected message 1 of active, got 0"):
        wire.receive()


def test_reordered_frames_are_refused() -> None:
    wire = Wire()
    wire.send(b"1")
    wire.send(b"2")
    wire.frames.reverse()
    with pytest.raises(RemoteProtocolError, match="expected message 0 of active, got 1"):
        wire.receive()
    assert wire.receive().payload == b"1"


@pytest.mark.parametrize("back", [False, True])
def test_a_frame_of_another_link_is_refused(back: bool) -> None:
    wire = Wire()
    if back:  # reflected to its sender
        wire.send()
        wire.transport._frames["passive", "active"].append(wire.frames[0])
        with pytest.raises(RemoteProtocolError, match="link from passive claims to be from active"):
            wire.transport.receive("active", sender="passive", kind=Kind.SUM, step=0)
        return
    wire.send(to="other")
    wire.frames.append(wire.transport._frames["active", "other"][0])
    with pytest.raises(RemoteProtocolError, match="claims to be from active to other"):
        wire.receive()


def rewritten(frame: bytes, change: Callable[[Envelope], Envelope]) -> bytes:
    """The same seal behind another header."""
    length = int.from_bytes(frame[:2], "big")
    header = change(Envelope.parse_header(frame[2 : 2 + length])).header
    return len(header).to_bytes(2, "big") + header + frame[2 + length :]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"session": "t"}, "in session 't'"),
        ({"sender": "other"}, "claims to be from other"),
        ({"receiver": "other"}, "claims to be from active to other"),
        ({"step": 1}, "does not authenticate"),
        ({"kind": Kind.REQUEST}, "does not authenticate"),
        ({"sequence": 1}, "expected message 0 of active, got 1"),
    ],
)
def test_a_changed_header_is_refused(changes: dict[str, Any], message: str) -> None:
    wire = Wire()
    wire.send()
    wire.frames[0] = rewritten(wire.frames[0], lambda envelope: replace(envelope, **changes))
    expected = {key: value for key, value in changes.items() if key in ("step", "kind")}
    with pytest.raises(RemoteProtocolError, match=message):
        wire.receive(**expected)


def test_any_flipped_bit_of_a_frame_is_refused() -> None:
    wire = Wire()
    wire.send()
    frame = wire.frames.popleft()
    for bit in range(8 * len(frame)):
        bad = bytearray(frame)
        bad[bit // 8] ^= 1 << bit % 8
        wire.frames.append(bytes(bad))
        with pytest.raises(RemoteProtocolError):
            wire.receive()
    wire.frames.append(frame)
    assert wire.receive().payload == b"body"


def test_any_truncated_frame_is_refused() -> None:
    wire = Wire()
    wire.send()
    frame = wire.frames.popleft()
    for length in range(len(frame)):
        wire.frames.append(frame[:length])
        with pytest.raises(RemoteProtocolError):
            wire.receive()


class Once:
    """Sends its messages, then waits for one."""

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


def hold(wire: Wire, **roles: Once) -> None:
    hold_conversation(Kind.SUM_SETUP, roles, wire.outboxes, wire.transport)


def test_a_conversation_travels_over_the_links() -> None:
    wire = Wire()
    active = Once(Outgoing("passive", b"to passive"))
    passive = Once(Outgoing("active", b"to active"))
    hold(wire, active=active, passive=passive)
    assert (active.got, passive.got) == ([("passive", b"to active")], [("active", b"to passive")])
    assert all(not frames for frames in wire.transport._frames.values())


def test_a_conversation_that_falls_silent_names_who_waits() -> None:
    with pytest.raises(LocalProtocolError, match="sum-setup fell silent while active still waited"):
        hold(Wire(), active=Once(Outgoing("passive", b"")), passive=Once())


def test_a_conversation_with_somebody_who_takes_no_part_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match=r"active wrote to 'other', who takes no part"):
        hold(Wire(), active=Once(Outgoing("other", b"")), passive=Once(wanted=0))

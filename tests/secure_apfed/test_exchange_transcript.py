"""The transcript: counts add up, keeps what its settings say, survives a checkpoint."""

from collections.abc import Iterable
from typing import Any, Literal

import msgpack
import pytest
import torch

from apfed_protocols.errors import LocalProtocolError
from secure_apfed.exchange import Envelope, InMemory, Kind, Transcript
from secure_apfed.settings.run import TranscriptSettings
from tests.secure_apfed.seats import network


class Recorder:
    def __init__(self, keep: Literal["none", "first_and_last", "all"] = "all"):
        self.transcript = Transcript(TranscriptSettings(keep=keep))
        self.network = network(InMemory, "active", "p1", "p2", record=self.transcript.record)

    def send(
        self, body: bytes, *, step: int = 0, to: str = "p1", kind: Kind = Kind.REPRESENTATIONS
    ) -> int:
        """Send one message; return its bytes on the wire."""
        before = self.transcript.wire_bytes
        self.network.links["active"].send(to, kind, step, body)
        return self.transcript.wire_bytes - before

    def epochs(self, count: int) -> None:
        for epoch in range(count):
            self.transcript.begin_epoch(epoch)
            for to in ("p1", "p2"):
                self.send(b"epoch %d" % epoch, step=epoch, to=to)
            self.transcript.keep_opened(epoch, torch.full((2, 3), float(epoch)))


def bodies(envelopes: Iterable[Envelope]) -> list[bytes]:
    return [envelope.payload for envelope in envelopes]


def test_flows_add_up() -> None:
    recorder = Recorder("none")
    sent = [
        recorder.send(b"x" * 3, step=-1, kind=Kind.SUM_SETUP),
        recorder.send(b"x" * 5, step=2),
        recorder.send(b"x" * 7, step=4),
        recorder.send(b"x" * 11, step=4, to="p2"),
    ]
    flows = recorder.transcript.flows
    assert [(f.receiver, f.kind.value, f.messages, f.payload_bytes) for f in flows] == [
        ("p1", "sum-setup", 1, 23),  # with the head of its only part
        ("p1", "representations", 2, 12),
        ("p2", "representations", 1, 11),
    ]
    assert [(f.first_step, f.last_step) for f in flows] == [(-1, -1), (2, 4), (4, 4)]
    assert flows[1].wire_bytes == sent[1] + sent[2]
    assert recorder.transcript.wire_bytes == sum(sent)
    assert all(f.wire_bytes > f.payload_bytes for f in flows)


@pytest.mark.parametrize(
    ("keep", "epochs"), [("none", []), ("first_and_last", [0, 3]), ("all", [0, 1, 2, 3])]
)
def test_epochs_and_opened_sums_are_kept_as_the_settings_say(keep: Any, epochs: list[int]) -> None:
    recorder = Recorder(keep)
    recorder.send(b"early", to="p2")
    recorder.transcript.keep_opened(9, torch.ones(1, 1))  # before the first epoch
    recorder.epochs(4)
    kept, opened = recorder.transcript.kept, recorder.transcript.opened
    assert list(kept) == list(opened) == epochs
    for epoch in epochs:
        assert bodies(kept[epoch]) == [b"epoch %d" % epoch] * 2
        assert [envelope.receiver for envelope in kept[epoch]] == ["p1", "p2"]
        assert torch.equal(opened[epoch], torch.full((2, 3), float(epoch)))
    assert [flow.messages for flow in recorder.transcript.flows] == [5, 4]


def test_contributions_and_setup_are_counted_but_not_kept() -> None:
    recorder = Recorder()
    recorder.transcript.begin_epoch(0)
    for kind in Kind:
        recorder.send(b"x", kind=kind)
    assert {envelope.kind for envelope in recorder.transcript.kept[0]} == {
        Kind.REQUEST, Kind.LABELS, Kind.VOTES, Kind.REPRESENTATIONS, Kind.GRADIENTS, Kind.SUM
    }  # fmt: skip
    assert [flow.messages for flow in recorder.transcript.flows] == [1] * len(Kind)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secure_apfed.exchange.transcript.MOST_MEGABYTES", 0.001)


@pytest.mark.usefixtures("small")
def test_equal_payloads_are_held_once_and_forgotten_epochs_make_room() -> None:
    recorder = Recorder("first_and_last")
    for epoch in range(5):
        recorder.transcript.begin_epoch(epoch)
        for to in ("p1", "p2", "p1"):
            recorder.send(bytes([epoch]) * 450, to=to)
    assert list(recorder.transcript.kept) == [0, 4]
    first, *others = recorder.transcript.kept[0]
    assert all(envelope.payload is first.payload for envelope in others)
    assert len(recorder.transcript.state_dict()["payloads"]) == 2


@pytest.mark.usefixtures("small")
def test_the_limit_names_the_ways_out() -> None:
    recorder = Recorder()
    recorder.transcript.begin_epoch(0)
    recorder.send(bytes([1]) * 600)
    with pytest.raises(LocalProtocolError, match=r"smaller .*transcript\.keep to none"):
        recorder.send(bytes([2]) * 600)
    with pytest.raises(LocalProtocolError, match=r"set transcript\.keep to none"):
        Recorder().epochs(50)
    recorder = Recorder("none")
    recorder.transcript.begin_epoch(0)
    recorder.send(bytes(5000))
    assert recorder.transcript.kept == {}


def through_msgpack(state: dict[str, Any]) -> Any:
    return msgpack.unpackb(msgpack.packb(state), strict_map_key=False)


def test_the_state_survives_msgpack() -> None:
    recorder = Recorder("all")
    recorder.epochs(3)
    state = recorder.transcript.state_dict()
    again = Transcript(TranscriptSettings(keep="all"))
    again.load_state_dict(through_msgpack(state))
    assert again.flows == recorder.transcript.flows
    assert again.kept == recorder.transcript.kept
    assert again.state_dict() == state
    assert torch.equal(again.opened[1], torch.ones(2, 3))
    del state["opened"]  # written before sums were kept
    again.load_state_dict(state)
    assert again.opened == {}


def test_a_resumed_transcript_adds_to_what_was_recorded() -> None:
    first = Recorder("first_and_last")
    first.send(b"set up", step=-1, kind=Kind.SUM_SETUP)
    first.epochs(3)
    state = through_msgpack(first.transcript.state_dict())
    second = Recorder("first_and_last")
    second.send(b"set up again", step=-1, kind=Kind.SUM_SETUP)
    second.transcript.resume(state)
    second.transcript.begin_epoch(3)
    second.send(b"epoch 3", step=3)
    transcript = second.transcript
    assert list(transcript.kept) == [0, 3]
    assert bodies(transcript.kept[0]) == [b"epoch 0"] * 2
    flows = {(f.receiver, f.kind): f for f in transcript.flows}
    assert flows["p1", Kind.SUM_SETUP].messages == 2
    assert flows["p1", Kind.REPRESENTATIONS].messages == 4
    assert flows["p1", Kind.REPRESENTATIONS].first_step == 0
    assert flows["p1", Kind.REPRESENTATIONS].last_step == 3

"""All roles in one process: order, silence, ends, and the transcript of what was sent."""

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgpack
import pytest
import torch

from apfed_protocols.errors import LocalProtocolError, PartyLeftError, RemoteProtocolError
from secure_apfed.errors import DroppedTranscriptWarning
from secure_apfed.exchange import Envelope, InMemory, Kind, Links, Transcript
from secure_apfed.settings.run import TranscriptSettings
from tests.secure_apfed.seats import network

NAMES = ("ann", "bob", "cid")
ANSWER, QUESTION = Kind.REPRESENTATIONS, Kind.REQUEST


class World:
    def __init__(self) -> None:
        self.sent: list[tuple[str, str, bytes]] = []
        self.notes: list[str] = []
        self.network = network(InMemory, *NAMES, record=self._record)

    def _record(self, envelope: Envelope, wire_bytes: int) -> None:
        self.sent.append((envelope.sender, envelope.receiver, envelope.payload))

    def links(self, name: str) -> Links:
        return self.network.links[name]

    async def echo(self, me: str, times: int = 99) -> str:
        done = 0
        try:
            while done < times:
                asked = await self.links(me).receive("ann", QUESTION, Kind.END, patience=8)
                if asked.kind is Kind.END:
                    break
                self.links(me).send("ann", ANSWER, asked.step, asked.payload + me.encode())
                done += 1
        finally:
            self.notes.append(f"{me} ends after {done}")
        return f"{me} answered {done}"

    async def ask(self, *others: str, step: int = 0) -> list[bytes]:
        links = self.links("ann")
        for name in others:
            links.send(name, QUESTION, step, b"for ")
        return [(await links.receive(name, ANSWER, step=step)).payload for name in others]

    async def forever(self, me: str, sender: str = "ann", patience: int = 1) -> None:
        try:
            await self.links(me).receive(sender, QUESTION, patience=patience)
        finally:
            self.notes.append(f"{me} ends")


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.network.close()


def test_messages_are_handed_over_as_they_were_sent_once_their_sender_is_waited_for(
    world: World,
) -> None:
    async def talk(me: str, *receivers: str) -> None:
        for receiver in receivers:
            world.links(me).send(receiver, QUESTION, 0, me.encode())

    async def hear(*senders: str | tuple[str, ...]) -> list[str]:
        return [(await world.links("cid").receive(name, QUESTION)).sender for name in senders]

    scripts = {"ann": talk("ann", "cid", "cid"), "bob": talk("bob", "cid", "cid")}
    every = ("ann", "bob")
    found = world.network.complete_all({**scripts, "cid": hear(every, "bob", every, every)})
    assert found["cid"] == ["ann", "bob", "ann", "bob"]


def test_the_last_messages_of_a_script_have_their_effect(world: World) -> None:
    async def end() -> str:
        world.links("ann").send("bob", Kind.END, 0)
        return "done"

    world.network.begin("bob", world.echo("bob"))
    assert world.network.complete("ann", end()) == "done"
    assert world.notes == ["bob ends after 0"]
    again = world.echo("bob", 1)
    world.network.begin("bob", again)  # its script ended, so it may play another
    assert world.network.complete("ann", world.ask("bob", step=1)) == [b"for bob"]


def test_who_waits_for_the_silent_party_itself_is_told_first(world: World) -> None:
    """Ann waits for bob, bob for cid, who says nothing: it is cid whom the error names."""

    async def relay() -> None:
        await world.links("bob").receive("ann", QUESTION, patience=8)
        await world.links("bob").receive("cid", ANSWER, patience=1)

    async def ask() -> None:
        world.links("ann").send("bob", QUESTION, 0)
        await world.links("ann").receive("bob", ANSWER, patience=4)

    world.network.begin("bob", relay())
    world.network.begin("cid", world.forever("cid", patience=8))
    with pytest.raises(PartyLeftError, match=r"^bob expected representations from cid"):
        world.network.complete("ann", ask())


def test_patience_ends_where_too_few_are_left_to_answer(world: World) -> None:
    async def wait(least: int) -> str:
        links = world.links("ann")
        try:
            await links.receive(("bob", "cid"), ANSWER, least=least, patience=9)
        except PartyLeftError:
            return "ann was told"
        return "ann heard"

    async def late() -> None:
        try:
            await world.links("cid").receive("ann", QUESTION, patience=5)
        except PartyLeftError:
            world.links("cid").send("ann", ANSWER, 0)

    world.network.complete("bob", world.echo("bob", 0))
    for least, told in ((2, "ann was told"), (1, "ann heard")):
        world.network.begin("cid", late())
        assert world.network.complete("ann", wait(least)) == told
        world.network.close()


def test_a_role_may_go_on_after_silence_with_what_came_meanwhile(world: World) -> None:
    async def gather() -> list[str]:
        heard = []
        for name in ("bob", "cid"):
            try:
                await world.links("ann").receive(name, ANSWER, step=0)
            except PartyLeftError:
                heard.append(f"{name} is gone")
            else:
                heard.append(f"{name} answered")
        return heard

    world.network.begin("bob", world.forever("bob", patience=8))
    world.links("cid").send("ann", ANSWER, 0)
    assert world.network.complete("ann", gather()) == ["bob is gone", "cid answered"]


def test_a_party_plays_one_script_at_a_time(world: World) -> None:
    world.network.begin("bob", world.forever("bob"))
    second = world.echo("bob")
    with pytest.raises(LocalProtocolError, match="bob plays a script already"):
        world.network.begin("bob", second)
    with pytest.raises(RuntimeError, match="cannot reuse"):  # it was closed, not forgotten
        second.send(None)
    with pytest.raises(LocalProtocolError, match="bob plays a script already"):
        world.network.complete("bob", world.echo("bob"))
    assert world.notes == []  # the first one waits on


@pytest.mark.parametrize("error", [RemoteProtocolError("bob refuses"), KeyboardInterrupt()])
def test_a_role_that_raises_ends_the_others(error: BaseException, world: World) -> None:
    async def refuse(error: BaseException) -> None:
        await world.links("bob").receive("ann", QUESTION)
        raise error

    world.network.begin("bob", refuse(error))
    world.network.begin("cid", world.forever("cid", "bob"))
    with pytest.raises(type(error)):
        world.network.complete("ann", world.ask("bob"))
    assert world.notes == ["cid ends"]
    with pytest.raises(PartyLeftError, match="from cid; nothing came"):
        world.network.complete("ann", world.ask("cid"))


def test_a_script_that_fails_at_once_leaves_none_that_never_began(world: World) -> None:
    async def refuse() -> None:
        raise RemoteProtocolError("ann refuses")

    with pytest.raises(RemoteProtocolError, match="ann refuses"):
        world.network.complete_all({"ann": refuse(), "bob": world.forever("bob")})
    assert world.notes == []


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
        recorder.send(b"x" * 3, step=-1, kind=Kind.SUM_SETUP), recorder.send(b"x" * 5, step=2),
        recorder.send(b"x" * 7, step=4), recorder.send(b"x" * 11, step=4, to="p2"),
    ]  # fmt: skip
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
def test_beyond_the_limit_nothing_is_kept_and_the_run_goes_on() -> None:
    recorder = Recorder()
    recorder.transcript.begin_epoch(0)
    recorder.send(bytes([1]) * 600)
    with pytest.warns(DroppedTranscriptWarning, match=r"smaller .*transcript\.keep to none"):
        recorder.send(bytes([2]) * 600)
    recorder.send(bytes([3]) * 600)
    recorder.transcript.begin_epoch(1)
    recorder.send(bytes([4]) * 10)
    assert not recorder.transcript.kept
    assert not recorder.transcript.opened
    assert sum(flow.messages for flow in recorder.transcript.flows) == 4
    later = Recorder()
    later.transcript.resume(recorder.transcript.state_dict())
    later.transcript.begin_epoch(2)
    later.send(b"x")
    assert not later.transcript.kept
    with pytest.warns(DroppedTranscriptWarning, match=r"set transcript\.keep to none"):
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

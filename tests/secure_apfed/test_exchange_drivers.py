"""All roles in one process: order, silence, ends, and the transcript of what was sent."""

import gc
import os
import resource
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import msgpack
import pytest
import torch

from apfed_protocols.errors import LocalProtocolError, PartyLeftError, RemoteProtocolError
from secure_apfed.errors import CheckpointError
from secure_apfed.exchange import Envelope, InMemoryNetwork, Kind, Links, Transcript
from secure_apfed.settings import TranscriptSettings
from tests.secure_apfed.seats import network

NAMES = ("ann", "bob", "cid")
ANSWER = Kind.REPRESENTATIONS
QUESTION = Kind.REQUEST


class World:
    def __init__(self) -> None:
        self.sent: list[tuple[str, str, bytes]] = []
        self.notes: list[str] = []
        self.network = network(InMemoryNetwork, *NAMES, record=self._record)

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
    found = world.network.run_scripts({**scripts, "cid": hear(every, "bob", every, every)})
    assert found["cid"] == ["ann", "bob", "ann", "bob"]


def test_the_last_messages_of_a_script_have_their_effect(world: World) -> None:
    async def end() -> str:
        world.links("ann").send("bob", Kind.END, 0)
        return "done"

    world.network.start_script("bob", world.echo("bob"))
    assert world.network.run_script("ann", end()) == "done"
    assert world.notes == ["bob ends after 0"]
    again = world.echo("bob", 1)
    world.network.start_script("bob", again)  # its script ended, so it may play another
    assert world.network.run_script("ann", world.ask("bob", step=1)) == [b"for bob"]


def test_who_waits_for_the_silent_party_itself_is_told_first(world: World) -> None:
    """Ann waits for bob, bob for cid, who says nothing: it is cid whom the error names."""

    async def relay() -> None:
        await world.links("bob").receive("ann", QUESTION, patience=8)
        await world.links("bob").receive("cid", ANSWER, patience=1)

    async def ask() -> None:
        world.links("ann").send("bob", QUESTION, 0)
        await world.links("ann").receive("bob", ANSWER, patience=4)

    world.network.start_script("bob", relay())
    world.network.start_script("cid", world.forever("cid", patience=8))
    with pytest.raises(PartyLeftError, match=r"^bob expected representations from cid"):
        world.network.run_script("ann", ask())


@pytest.mark.parametrize(("minimum", "told"), [(2, "ann was told"), (1, "ann heard")])
def test_patience_ends_where_too_few_are_left_to_answer(
    minimum: int, told: str, world: World
) -> None:
    async def wait() -> str:
        links = world.links("ann")
        try:
            await links.receive(("bob", "cid"), ANSWER, min_senders=minimum, patience=9)
        except PartyLeftError:
            return "ann was told"
        return "ann heard"

    async def late() -> None:
        try:
            await world.links("cid").receive("ann", QUESTION, patience=5)
        except PartyLeftError:
            world.links("cid").send("ann", ANSWER, 0)

    world.network.run_script("bob", world.echo("bob", 0))
    world.network.start_script("cid", late())
    assert world.network.run_script("ann", wait()) == told
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

    world.network.start_script("bob", world.forever("bob", patience=8))
    world.links("cid").send("ann", ANSWER, 0)
    assert world.network.run_script("ann", gather()) == ["bob is gone", "cid answered"]


def test_a_party_plays_one_script_at_a_time(world: World) -> None:
    world.network.start_script("bob", world.forever("bob"))
    second = world.echo("bob")
    with pytest.raises(LocalProtocolError, match="bob plays a script already"):
        world.network.start_script("bob", second)
    with pytest.raises(RuntimeError, match="cannot reuse"):  # it was closed, not forgotten
        second.send(None)
    with pytest.raises(LocalProtocolError, match="bob plays a script already"):
        world.network.run_script("bob", world.echo("bob"))
    assert world.notes == []  # the first one waits on


@pytest.mark.parametrize("error", [RemoteProtocolError("bob refuses"), KeyboardInterrupt()])
def test_a_role_that_raises_ends_the_others(error: BaseException, world: World) -> None:
    async def refuse(error: BaseException) -> None:
        await world.links("bob").receive("ann", QUESTION)
        raise error

    world.network.start_script("bob", refuse(error))
    world.network.start_script("cid", world.forever("cid", "bob"))
    with pytest.raises(type(error)):
        world.network.run_script("ann", world.ask("bob"))
    assert world.notes == ["cid ends"]
    with pytest.raises(PartyLeftError, match="from cid; nothing came"):
        world.network.run_script("ann", world.ask("cid"))


def test_a_script_that_fails_at_once_leaves_none_that_never_began(world: World) -> None:
    async def refuse() -> None:
        raise RemoteProtocolError("ann refuses")

    with pytest.raises(RemoteProtocolError, match="ann refuses"):
        world.network.run_scripts({"ann": refuse(), "bob": world.forever("bob")})
    assert world.notes == []


class Recorder:
    def __init__(self, keep: Literal["none", "first_and_last", "all"] = "all"):
        self.transcript = Transcript(TranscriptSettings(keep=keep))
        self.network = network(
            InMemoryNetwork, "active", "p1", "p2", record=self.transcript.record_envelope
        )

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
            self.transcript.record_sum(epoch, torch.full((2, 3), float(epoch)))


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
    recorder.transcript.record_sum(9, torch.ones(1, 1))  # before the first epoch
    recorder.epochs(4)
    kept = recorder.transcript.envelopes_by_epoch
    opened = recorder.transcript.sums_by_step
    assert list(kept) == list(opened) == epochs
    assert {epoch: bodies(kept[epoch]) for epoch in epochs} == {
        epoch: [b"epoch %d" % epoch] * 2 for epoch in epochs
    }
    receivers = {epoch: [envelope.receiver for envelope in kept[epoch]] for epoch in epochs}
    assert receivers == {epoch: ["p1", "p2"] for epoch in epochs}
    sums = {epoch: opened[epoch].tolist() for epoch in epochs}
    assert sums == {epoch: [[float(epoch)] * 3] * 2 for epoch in epochs}
    assert [flow.messages for flow in recorder.transcript.flows] == [5, 4]


def test_setup_is_counted_but_not_kept() -> None:
    recorder = Recorder()
    recorder.transcript.begin_epoch(0)
    for kind in Kind:
        recorder.send(b"x", kind=kind)
    assert {envelope.kind for envelope in recorder.transcript.envelopes_by_epoch[0]} == {
        Kind.REQUEST,
        Kind.LABELS,
        Kind.ENCRYPTED_LABELS,
        Kind.VOTES,
        Kind.REPRESENTATIONS,
        Kind.GRADIENTS,
        Kind.SUM,
        Kind.CONTRIBUTION,
    }
    assert [flow.messages for flow in recorder.transcript.flows] == [1] * len(Kind)


def test_of_an_epoch_a_few_contributions_are_kept_and_all_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secure_apfed.exchange.transcript.MAX_CONTRIBUTION_BYTES", 1000)
    recorder = Recorder("all")
    recorder.transcript.keep_in(tmp_path)
    for epoch in range(2):
        recorder.transcript.begin_epoch(epoch)
        for at in range(3):
            recorder.send(bytes([at]) * 400, kind=Kind.CONTRIBUTION)
            recorder.send(bytes([at]) * 400, kind=Kind.GRADIENTS)
    again = Recorder("all")
    again.transcript.keep_in(tmp_path)
    again.transcript.load_state_dict(recorder.transcript.state_dict(0))
    again.transcript.begin_epoch(1)
    again.send(b"x" * 400, kind=Kind.CONTRIBUTION)  # its epoch has as many as it may
    kept = [
        Counter(one.kind for one in sent)
        for transcript in (recorder.transcript, again.transcript)
        for sent in transcript.envelopes_by_epoch.values()
    ]
    assert kept == [{Kind.CONTRIBUTION: 2, Kind.GRADIENTS: 3}] * 4
    (flow, _) = recorder.transcript.flows
    assert flow.messages == 6


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_equal_payloads_are_written_once_and_forgotten_epochs_make_room(tmp_path: Path) -> None:
    recorder = Recorder("first_and_last")
    recorder.transcript.keep_in(tmp_path)
    (tmp_path / "transcript-7.bin").write_bytes(b"of an earlier run")
    (tmp_path / "transcript-4.bin").symlink_to(tmp_path / "elsewhere")
    for epoch in range(5):
        recorder.transcript.begin_epoch(epoch)
        for to in ("p1", "p2", "p1"):
            recorder.send(bytes([epoch]) * 450, to=to)
    assert bodies(recorder.transcript.envelopes_by_epoch[0]) == [bytes([0]) * 450] * 3
    assert bodies(recorder.transcript.envelopes_by_epoch[4]) == [bytes([4]) * 450] * 3
    assert files_in(tmp_path) == ["transcript-0.bin", "transcript-4.bin"]
    stats = {file.name: file.stat() for file in tmp_path.iterdir()}
    sizes = {name: (stat.st_size, stat.st_mode & 0o777) for name, stat in stats.items()}
    assert sizes == dict.fromkeys(files_in(tmp_path), (450, 0o600))


def test_without_a_folder_payloads_go_with_their_last_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    recorder = Recorder()
    recorder.epochs(2)
    kept = recorder.transcript.envelopes_by_epoch
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    del recorder
    if os.fork() == 0:  # a child that lets go of it, too
        del kept
        gc.collect()
        os._exit(0)
    os.wait()
    assert bodies(kept[1]) == [b"epoch 1"] * 2
    del kept
    gc.collect()
    assert not folder.exists()


def test_a_full_disk_is_told_and_the_run_goes_on_once_there_is_room(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.transcript.keep_in(tmp_path)
    recorder.transcript.begin_epoch(0)
    recorder.send(bytes([1]) * 600)
    with (
        file_size_limit(1000),
        pytest.raises(CheckpointError, match=r"transcript-0\.bin cannot be .*large.*make room"),
    ):
        recorder.send(bytes([2]) * 600)
    recorder.send(bytes([3]) * 600)
    sent = [bytes([1]) * 600, bytes([3]) * 600]
    assert bodies(recorder.transcript.envelopes_by_epoch[0]) == sent
    again = Recorder()
    again.transcript.keep_in(tmp_path)
    again.transcript.resume_record(through_msgpack(recorder.transcript.state_dict()))
    assert bodies(again.transcript.envelopes_by_epoch[0]) == sent


@contextmanager
def file_size_limit(maximum: int) -> Iterator[None]:
    """Files of this process end there, as those of a full disk do."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (maximum, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


@pytest.mark.parametrize(
    "harm",
    [
        lambda file: file.unlink(),
        lambda file: file.write_bytes(b"epoch"),
        lambda file: file.write_bytes(file.read_bytes()[::-1]),
    ],
)
def test_payloads_that_are_gone_or_altered_are_told(
    harm: Callable[[Path], object], tmp_path: Path
) -> None:
    recorder = Recorder()
    recorder.transcript.keep_in(tmp_path)
    recorder.epochs(2)
    state = recorder.transcript.state_dict()
    harm(tmp_path / "transcript-1.bin")
    kept = recorder.transcript.envelopes_by_epoch
    assert bodies(kept[0]) == [b"epoch 0"] * 2
    with pytest.raises(CheckpointError, match=r"transcript-1\.bin: .*restore it from a copy"):
        bodies(kept[1])
    with pytest.raises(CheckpointError, match=r"transcript-1\.bin"):
        assert recorder.transcript.sums_by_step
    again = Recorder()
    again.transcript.keep_in(tmp_path)
    with pytest.raises(CheckpointError, match=r"transcript-1\.bin"):
        again.transcript.resume_record(state)


@pytest.mark.parametrize("resumed", [False, True], ids=["at once", "after another resumption"])
@pytest.mark.parametrize("back", [1, 2])
def test_either_of_the_newest_two_states_finds_its_payloads(
    back: int, resumed: bool, tmp_path: Path
) -> None:
    """Sessions are broken off within an epoch, after the state with which it began."""
    states: dict[int, Any] = {}

    def play(recorder: Recorder, epochs: Iterable[int]) -> None:
        for epoch in epochs:
            recorder.transcript.begin_epoch(epoch)
            states[epoch] = through_msgpack(recorder.transcript.state_dict(epoch))
            recorder.send(b"epoch %d" % epoch, step=epoch)
            recorder.send(b"more of epoch %d" % epoch, step=epoch, to="p2")

    def resume(epoch: int) -> Recorder:
        recorder = Recorder("first_and_last")
        recorder.transcript.keep_in(tmp_path)
        recorder.transcript.resume_record(states[epoch])
        return recorder

    recorder = Recorder("first_and_last")
    recorder.transcript.keep_in(tmp_path)
    play(recorder, range(6))
    if resumed:
        play(resume(5), [5])
        play(resume(4), [4, 5])
    again = resume(6 - back)
    last = 6 - back
    assert bodies(again.transcript.envelopes_by_epoch[0]) == [b"epoch 0", b"more of epoch 0"]
    play(again, range(last, 6))
    kept = again.transcript.envelopes_by_epoch
    assert {of: bodies(sent) for of, sent in kept.items()} == {
        of: [b"epoch %d" % of, b"more of epoch %d" % of] for of in (0, 5)
    }
    state = again.transcript.state_dict()
    assert files_in(tmp_path) == ["transcript-0.bin", "transcript-5.bin"]
    finished = Transcript(TranscriptSettings(keep="none"))
    finished.keep_in(tmp_path)
    finished.load_state_dict(through_msgpack(state))
    assert all(bodies(finished.envelopes_by_epoch[of]) == bodies(kept[of]) for of in kept)


def through_msgpack(state: dict[str, Any]) -> Any:
    return msgpack.unpackb(msgpack.packb(state), strict_map_key=False)


def test_the_state_survives_msgpack(tmp_path: Path) -> None:
    recorder = Recorder("all")
    recorder.transcript.keep_in(tmp_path)
    recorder.epochs(3)
    state = recorder.transcript.state_dict()
    again = Transcript(TranscriptSettings(keep="all"))
    again.keep_in(tmp_path)
    again.load_state_dict(through_msgpack(state))
    assert again.flows == recorder.transcript.flows
    assert again.envelopes_by_epoch == recorder.transcript.envelopes_by_epoch
    assert again.state_dict() == state
    assert torch.equal(again.sums_by_step[1], torch.ones(2, 3))


def test_a_resumed_transcript_adds_to_what_was_recorded(tmp_path: Path) -> None:
    first = Recorder("first_and_last")
    first.transcript.keep_in(tmp_path)
    first.send(b"set up", step=-1, kind=Kind.SUM_SETUP)
    first.epochs(3)
    state = through_msgpack(first.transcript.state_dict())
    second = Recorder("first_and_last")
    second.transcript.keep_in(tmp_path)
    second.send(b"set up again", step=-1, kind=Kind.SUM_SETUP)
    second.transcript.resume_record(state)
    second.transcript.begin_epoch(3)
    second.send(b"epoch 3", step=3)
    transcript = second.transcript
    assert list(transcript.envelopes_by_epoch) == [0, 3]
    assert bodies(transcript.envelopes_by_epoch[0]) == [b"epoch 0"] * 2
    flows = {(f.receiver, f.kind): f for f in transcript.flows}
    assert flows["p1", Kind.SUM_SETUP].messages == 2
    assert flows["p1", Kind.REPRESENTATIONS].messages == 4
    assert flows["p1", Kind.REPRESENTATIONS].first_step == 0
    assert flows["p1", Kind.REPRESENTATIONS].last_step == 3

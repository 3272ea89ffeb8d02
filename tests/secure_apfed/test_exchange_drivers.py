"""All roles in one process: order, silence, and what the end of one means for the others."""

from collections.abc import Iterator

import pytest

from apfed_protocols.errors import LocalProtocolError, PartyLeftError, RemoteProtocolError
from secure_apfed.exchange import Envelope, InMemory, Kind, Links
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

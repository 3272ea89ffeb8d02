"""Links between processes of one machine: frames arrive whole and in order, and no stranger takes a
place or a run down.
"""

import contextlib
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgpack
import pytest

from apfed_protocols.errors import LocalProtocolError, PartyLeftError, RemoteProtocolError
from apfed_protocols.seal import Identity, fresh_identity
from secure_apfed.exchange import Awaited, Kind, Transport, resumable_link
from secure_apfed.exchange.sealed_connection import MOST_SEALED, MOST_UNPROVED, LocalEnd, prove
from secure_apfed.exchange.sockets import Port, SocketConnection, dial, parse_address, spell_address
from secure_apfed.runs.local import free_addresses
from secure_apfed.runs.party import PartyFile, Peer, connect
from tests.waiting import LONG_S, wait_until

NAMES = ("ann", "bob", "cid")
_LENGTH = struct.Struct(">I")


class Place:
    """Three parties of one machine, each to be met from a thread of its own."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.identities: dict[str, Identity] = {name: fresh_identity() for name in NAMES}
        self.known = {name: one.public for name, one in self.identities.items()}
        ports = [int(one.rpartition(":")[2]) for one in free_addresses(len(NAMES))]
        self.listen = {
            name: spell_address((host, port)) for name, port in zip(NAMES, ports, strict=True)
        }
        self.dialled = {name: at.replace("[::]", "[::1]") for name, at in self.listen.items()}
        self.came: dict[str, Transport] = {}
        self.failed: dict[str, BaseException] = {}

    def come(self, name: str, *, meet_s: float = 20.0) -> threading.Thread:
        def meet() -> None:
            peers = {
                peer: Peer(address=self.dialled[peer], identity=self.known[peer].hex())
                for peer in NAMES if peer != name
            }  # fmt: skip
            file = PartyFile(
                party=name, active="ann", passives=("bob", "cid"), config=Path("none"),
                listen=self.listen[name], peers=peers, meet_s=meet_s, reconnect_s=3.0,
            )  # fmt: skip
            try:
                self.came[name] = connect(file, self.identities[name], self.known)
            except BaseException as error:  # noqa: BLE001 - the test reads it
                self.failed[name] = error

        thread = threading.Thread(target=meet)
        thread.start()
        return thread

    def all_come(self) -> dict[str, Transport]:
        for thread in [self.come(name) for name in NAMES]:
            thread.join()
        assert not self.failed
        return self.came

    def reach(self, name: str = "ann") -> SocketConnection:
        """Dial, once somebody listens."""
        found: list[SocketConnection] = []

        def listens() -> bool:
            try:
                found.append(dial(parse_address(self.dialled[name])))
            except ConnectionError:
                return False
            return True

        wait_until(listens, f"that {name} listens")
        return found[0]


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    made = Place(getattr(request, "param", "127.0.0.1"))
    yield made
    closing = [threading.Thread(target=one.close) for one in made.came.values()]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join()


def awaiting(me: str, *senders: str, least: int = 1) -> Awaited:
    return Awaited(me=me, senders=senders, kinds=(Kind.SUM,), step=3, least=least)


@pytest.mark.parametrize("place", ["127.0.0.1", "::1", "::", "localhost"], indirect=True)
def test_frames_arrive_whole_and_in_order_whatever_their_size(place: Place) -> None:
    came = place.all_come()
    frames = [bytes([at % 251]) * size for at, size in enumerate((0, 1, 5_000_000, 7, 300_000))]
    for frame in frames:
        came["ann"].post("bob", frame)  # at once, although nobody reads yet
    got = [came["bob"].take(awaiting("bob", "ann"), 10) for _ in frames]
    assert got == [("ann", frame) for frame in frames]


def test_who_is_not_waited_for_waits(place: Place) -> None:
    came = place.all_come()
    came["ann"].post("cid", b"first")
    came["bob"].post("cid", b"second")
    assert came["cid"].take(awaiting("cid", "bob"), 10) == ("bob", b"second")
    assert came["cid"].take(awaiting("cid", "ann", "bob"), 10) == ("ann", b"first")


def test_what_was_sent_before_the_end_arrives(place: Place) -> None:
    came, much = place.all_come(), bytes(3_000_000)
    came["bob"].post("ann", b"unread")  # whoever closes with unread bytes would reset the link
    came["ann"].post("bob", much)
    closing = threading.Thread(target=came.pop("ann").close)
    closing.start()
    assert came["bob"].take(awaiting("bob", "ann"), 10) == ("ann", much)
    with pytest.raises(PartyLeftError, match=r"^training: bob expected sum .*; ann closed its"):
        came["bob"].take(awaiting("bob", "ann"), 10)
    came["bob"].post("ann", b"nobody hears this")
    closing.join()


def test_silence_ends_and_names_all_who_were_waited_for(place: Place) -> None:
    came, began = place.all_come(), time.monotonic()
    with pytest.raises(PartyLeftError, match=r"from bob or cid; nothing came for 0\.3 s") as told:
        came["ann"].take(awaiting("ann", "bob", "cid"), 0.3)
    assert time.monotonic() - began >= 0.3
    assert told.value.left == ("bob", "cid")


def test_too_few_that_are_left_are_told_at_once(place: Place) -> None:
    came = place.all_come()
    came.pop("bob").close()
    with pytest.raises(PartyLeftError, match="bob closed its link") as told:
        came["ann"].take(awaiting("ann", "bob", "cid", least=2), LONG_S)
    assert told.value.left == ("bob",)
    came["cid"].post("ann", b"still here")
    assert came["ann"].take(awaiting("ann", "bob", "cid"), 10) == ("cid", b"still here")


def test_where_a_third_has_left_who_is_awaited_has_time_for_last_words(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resumable_link, "_LAST_WORDS_S", LONG_S)
    came = place.all_come()
    came.pop("cid").close()
    came["bob"].post("ann", b"cid is gone")
    waiting = Awaited(me="ann", senders=("bob",), kinds=(Kind.SUM,), step=0, needed=("cid",))
    assert came["ann"].take(waiting, LONG_S) == ("bob", b"cid is gone")
    monkeypatch.setattr(resumable_link, "_LAST_WORDS_S", 0.5)
    said = r"from bob; nothing came, and cid closed its link"
    with pytest.raises(PartyLeftError, match=said) as told:
        came["ann"].take(waiting, LONG_S)
    assert told.value.left == ("cid",)
    with pytest.raises(PartyLeftError, match=r"nothing came for 1 s"):  # nobody needs cid here
        came["ann"].take(awaiting("ann", "bob"), 1)


Speech = Callable[[Place, SocketConnection], None]


def says(frame: bytes, claimed: int | None = None) -> Speech:
    """A stranger that sends these bytes as a frame of a length that it claims."""

    def speak(place: Place, stranger: SocketConnection) -> None:
        size = len(frame) if claimed is None else claimed
        vars(stranger)["_wire"].sendall(_LENGTH.pack(size) + frame)

    return speak


def proves(name: str, by: str, to: str) -> Speech:
    """A stranger that comes in somebody's name with the key of another, or of nobody."""

    def speak(place: Place, stranger: SocketConnection) -> None:
        identity = place.identities.get(by) or fresh_identity()
        me = LocalEnd(name=name, identity=identity, known={to: place.known.get(to, bytes(32))})
        prove(stranger, me, to)

    return speak


def replays(place: Place, stranger: SocketConnection) -> None:
    """What bob would say in a connection of its own."""
    said: list[bytes] = []
    port = Port(("127.0.0.1", 0), lambda one, _: said.append(one.recv_bytes()))
    me = LocalEnd(name="bob", identity=place.identities["bob"], known={"ann": place.known["ann"]})
    genuine = dial(("127.0.0.1", port.port))
    threading.Thread(target=_failing, args=(genuine, me), daemon=True).start()
    wait_until(lambda: said, "that bob says hello")
    genuine.close()
    port.close()
    stranger.send_bytes(said[0])
    stranger.send_bytes(bytes(112))


def _failing(connection: SocketConnection, me: LocalEnd) -> None:
    with pytest.raises((OSError, EOFError)):
        prove(connection, me, "ann")


STRANGERS: dict[str, Speech] = {
    "silent": lambda place, stranger: None,
    "noise": says(b"T / HTTP/1.1\r\n\r\n", int.from_bytes(b"GET ")),
    "huge": says(b"x", 2**32 - 1),
    "empty": says(b""),
    "half": says(bytes(20), 40),
    "no list": says(msgpack.packb(7)),
    "a map": says(msgpack.packb({"a": 1})),
    "a name that is none": says(msgpack.packb([3, ["bob"], "ann", bytes(32), ""])),
    "another's key": proves("bob", "nobody", "ann"),
    "another's name": proves("bob", "cid", "ann"),
    "another's door": proves("bob", "bob", "cid"),
    "an old hello": replays,
    "its own name": proves("ann", "ann", "bob"),
}


def test_no_stranger_takes_a_place_or_keeps_others_out(place: Place) -> None:
    def speak(speech: Speech, stranger: SocketConnection) -> None:
        with contextlib.suppress(OSError, EOFError, RemoteProtocolError):
            speech(place, stranger)

    waiting = place.come("ann")
    strangers = [place.reach() for _ in STRANGERS]
    for came in zip(STRANGERS.values(), strangers, strict=True):
        threading.Thread(target=speak, args=came, daemon=True).start()
    for thread in (waiting, place.come("bob"), place.come("cid")):
        thread.join()
    assert not place.failed
    place.came["bob"].post("ann", b"it is I")
    assert place.came["ann"].take(awaiting("ann", "bob"), 10) == ("bob", b"it is I")
    for stranger in strangers:
        stranger.close()


def test_who_died_at_the_door_comes_again(place: Place) -> None:
    """Its newer connection counts: nobody else can prove to be it."""
    coming, ghost = [place.come("ann")], place.reach()
    me = LocalEnd(name="bob", identity=place.identities["bob"], known={"ann": place.known["ann"]})
    prove(ghost, me, "ann")
    ghost.close()
    for thread in (*coming, place.come("bob"), place.come("cid")):
        thread.join()
    assert not place.failed
    place.came["bob"].post("ann", b"again")
    assert place.came["ann"].take(awaiting("ann", "bob"), 10) == ("bob", b"again")


def test_who_does_not_come_is_named(place: Place) -> None:
    for name in ("ann", "bob"):
        place.come(name, meet_s=1.2).join()
    for name, told in (
        ("ann", "has no link to bob and cid: it did not come to ann in time; start it"),
        ("bob", "bob reached nobody as ann"),
    ):
        assert str(place.failed[name]).startswith(f"agreement: {name} has no link to ")
        assert told in str(place.failed[name])


@pytest.mark.parametrize("proved", [False, True])
def test_a_frame_that_is_announced_too_large_ends_the_connection(proved: bool) -> None:
    heard: list[BaseException] = []

    def welcome(one: SocketConnection, certificate: bytes) -> None:
        if proved:
            one.trust()
        with pytest.raises(EOFError, match="sent a frame above") as told:
            one.recv_bytes()
        heard.append(told.value)

    port, most = Port(("127.0.0.1", 0), welcome), MOST_SEALED if proved else MOST_UNPROVED
    stranger = dial(("127.0.0.1", port.port))
    vars(stranger)["_wire"].sendall(_LENGTH.pack(most + 1))
    why = b"refused the other end sent a frame above %d bytes" % most
    assert stranger.recv_bytes().startswith(why)
    with pytest.raises(EOFError):
        stranger.recv_bytes()
    wait_until(lambda: heard, "that it is refused")
    port.close()


def test_who_comes_with_another_key_is_told_from_who_does_not_come(place: Place) -> None:
    place.identities["bob"] = fresh_identity()
    for thread in [place.come(name, meet_s=2.0) for name in NAMES]:
        thread.join()
    assert "somebody came in its name: what bob signed does not fit" in str(place.failed["ann"])
    assert "ann refuses this connection: what bob signed" in str(place.failed["bob"])


_NO_ADDRESSES = "a:\u0661,,host,:1,host:,host:0,host:65536,host:x,[]:1,[::1]"
_BARE = "::1:7001,2001:db8::7:7001,[127.0.0.1]:7001,[host]:1,[::1:1,::1"


def test_an_address_is_spelt_as_it_is_read_and_what_is_none_is_told() -> None:
    for text in ("127.0.0.1:1", "bank.example:7001", "[::1]:7001", "[::]:65535"):
        assert spell_address(parse_address(text)) == text
        assert "[" not in parse_address(text)[0]
    bare = "an IPv6 address stands in brackets"
    for texts, says in ((_NO_ADDRESSES, "an address is host:port"), (_BARE, bare)):
        for text in texts.split(","):
            with pytest.raises(LocalProtocolError, match=says):
                parse_address(text)

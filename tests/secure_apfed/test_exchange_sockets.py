"""Sockets: frames arrive whole and in order, and no stranger takes a place or a run down."""

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import msgpack
import pytest

from apfed_protocols.errors import LocalProtocolError, PartyLeftError, RunStoppedError
from apfed_protocols.randomness import fresh_key
from apfed_protocols.seal import Identity, fresh_identity
from secure_apfed.exchange import Awaited, Kind, Links, Sockets, drive, play_one, silence
from secure_apfed.exchange import sockets as module
from secure_apfed.exchange.sockets import Address, listen_at, parse_address, spell_address
from tests.waiting import LONG_S

NAMES = ("ann", "bob", "cid")
_LENGTH = struct.Struct(">I")


class Place:
    """Three parties of one machine, each to be met from a thread of its own."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.identities: dict[str, Identity] = {name: fresh_identity() for name in NAMES}
        self.known = {name: one.public for name, one in self.identities.items()}
        self.listeners = {name: listen_at((host, 0)) for name in NAMES}
        self.addresses: dict[str, Address] = {
            name: one.getsockname()[:2] for name, one in self.listeners.items()
        }
        self.came: dict[str, Sockets] = {}
        self.failed: dict[str, BaseException] = {}

    def come(self, name: str, *, timeout_s: float = 10.0) -> threading.Thread:
        def meet() -> None:
            peers = {peer: self.addresses[peer] for peer in NAMES if peer != name}
            try:
                self.came[name] = Sockets.meet(
                    name, self.listeners[name], peers, identity=self.identities[name],
                    known=self.known, timeout_s=timeout_s,
                )  # fmt: skip
            except BaseException as error:  # noqa: BLE001 - the test reads it
                self.failed[name] = error

        thread = threading.Thread(target=meet)
        thread.start()
        return thread

    def all_come(self) -> dict[str, Sockets]:
        for thread in [self.come(name) for name in NAMES]:
            thread.join()
        assert not self.failed
        return self.came

    def stranger(self, name: str = "ann") -> socket.socket:
        return socket.create_connection(self.addresses[name], timeout=5)


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    made = Place(getattr(request, "param", "127.0.0.1"))
    yield made
    closing = [threading.Thread(target=one.close) for one in made.came.values()]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join()
    for listener in made.listeners.values():
        listener.close()


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


def test_both_may_send_much_before_either_reads(place: Place) -> None:
    came, much = place.all_come(), bytes(30_000_000)
    came["ann"].post("bob", much)
    came["bob"].post("ann", much)
    assert came["bob"].take(awaiting("bob", "ann"), 20) == ("ann", much)
    assert came["ann"].take(awaiting("ann", "bob"), 20) == ("bob", much)


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
    monkeypatch.setattr(silence, "_LAST_WORDS_S", LONG_S)
    came = place.all_come()
    came.pop("cid").close()
    came["bob"].post("ann", b"cid is gone")
    waiting = Awaited(me="ann", senders=("bob",), kinds=(Kind.SUM,), step=0, needed=("cid",))
    assert came["ann"].take(waiting, LONG_S) == ("bob", b"cid is gone")
    monkeypatch.setattr(silence, "_LAST_WORDS_S", 0.5)
    said = r"from bob; nothing came, and cid closed its link"
    with pytest.raises(PartyLeftError, match=said) as told:
        came["ann"].take(waiting, LONG_S)
    assert told.value.left == ("cid",)
    with pytest.raises(PartyLeftError, match=r"nothing came for 1 s"):  # nobody needs cid here
        came["ann"].take(awaiting("ann", "bob"), 1)


def hello(name: str, identity: Identity, challenge: bytes, door: str) -> bytes:
    signature = identity.sign(b"connection v1", challenge, name.encode(), door.encode())
    body: bytes = msgpack.packb([name, signature])
    return _LENGTH.pack(len(body)) + body


def replayed(place: Place, challenge: bytes) -> bytes:
    return hello("bob", place.identities["bob"], fresh_key(), "ann")


STRANGERS: dict[str, Callable[[Place, bytes], bytes]] = {
    "silent": lambda place, challenge: b"",
    "noise": lambda place, challenge: b"GET / HTTP/1.1\r\n\r\n",
    "huge": lambda place, challenge: _LENGTH.pack(2**32 - 1) + b"x",
    "empty": lambda place, challenge: _LENGTH.pack(0),
    "half": lambda place, challenge: replayed(place, challenge)[:20],
    "no list": lambda place, challenge: _LENGTH.pack(1) + msgpack.packb(7),
    "a map": lambda place, challenge: _LENGTH.pack(4) + msgpack.packb({"a": 1}),
    "a name that is none": lambda place, challenge: (
        _LENGTH.pack(len(msgpack.packb([["bob"], bytes(64)]))) + msgpack.packb([["bob"], bytes(64)])
    ),
    "another's key": lambda place, challenge: hello("bob", fresh_identity(), challenge, "ann"),
    "another's name": lambda place, challenge: hello(
        "bob", place.identities["cid"], challenge, "ann"
    ),
    "another's door": lambda place, challenge: hello(
        "bob", place.identities["bob"], challenge, "cid"
    ),
    "an old hello": replayed,
    "its own name": lambda place, challenge: hello(
        "ann", place.identities["ann"], challenge, "ann"
    ),
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_no_stranger_takes_a_place_or_keeps_others_out(kind: str, place: Place) -> None:
    waiting = place.come("ann")
    with ExitStack() as stack:
        for _ in range(3):
            stranger = stack.enter_context(place.stranger())
            challenge = stranger.recv(32, socket.MSG_WAITALL)
            stranger.sendall(STRANGERS[kind](place, challenge))
        others = [place.come(name) for name in ("bob", "cid")]
        for thread in (waiting, *others):
            thread.join()
    assert not place.failed
    place.came["bob"].post("ann", b"it is I")
    assert place.came["ann"].take(awaiting("ann", "bob"), 10) == ("bob", b"it is I")


def test_a_crowd_of_strangers_does_not_keep_the_others_out(place: Place) -> None:
    waiting = place.come("ann")
    with ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(place.stranger())
        for thread in (waiting, place.come("bob"), place.come("cid")):
            thread.join()
    assert not place.failed


def test_who_died_at_the_door_comes_again(place: Place) -> None:
    """Its newer connection counts: nobody else can prove to be it."""
    coming = [place.come("ann")]
    ghost = place.stranger()
    ghost.sendall(hello("bob", place.identities["bob"], ghost.recv(32), "ann"))
    assert ghost.recv(1) == b"+"
    ghost.close()
    coming.append(place.come("bob"))
    with place.stranger("bob") as knocking:
        assert len(knocking.recv(32)) == 32  # it is past ann's door, and has opened its own
    for thread in (*coming, place.come("cid")):
        thread.join()
    assert not place.failed
    place.came["bob"].post("ann", b"again")
    assert place.came["ann"].take(awaiting("ann", "bob"), 10) == ("bob", b"again")


def test_who_does_not_come_is_named(place: Place) -> None:
    for name in ("ann", "bob"):
        place.come(name, timeout_s=0.5).join()
    assert "bob and cid did not come to ann" in str(place.failed["ann"])
    assert "bob reached nobody as ann" in str(place.failed["bob"])


def test_who_comes_while_another_does_not_is_not_named(place: Place) -> None:
    for thread in [place.come(name, timeout_s=0.5) for name in ("ann", "cid")]:
        thread.join()
    assert str(place.failed["ann"]).startswith("agreement: bob did not come to ann")
    assert "cid reached nobody as bob" in str(place.failed["cid"])


def test_a_frame_that_is_announced_too_large_ends_the_link(place: Place) -> None:
    came = place.all_come()
    peer = vars(came["bob"])["_peers"]["ann"]
    peer.socket.setblocking(True)
    peer.socket.sendall(_LENGTH.pack(2**31))
    with pytest.raises(PartyLeftError, match=r"bob announced a frame of 2147483648 bytes"):
        came["ann"].take(awaiting("ann", "bob"), 10)


def test_a_flood_is_held_back_and_not_held(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_HELD", 1_000_000)
    came, frame = place.all_come(), bytes(400_000)
    for _ in range(50):
        came["bob"].post("ann", frame)
    came["cid"].post("ann", b"mine")
    assert came["ann"].take(awaiting("ann", "cid"), 10) == ("cid", b"mine")
    for _ in range(20):
        with pytest.raises(PartyLeftError):
            came["ann"].take(awaiting("ann", "cid"), 0.01)
    assert vars(came["ann"])["_peers"]["bob"].held < 3_000_000
    for _ in range(50):
        assert came["ann"].take(awaiting("ann", "bob"), 10) == ("bob", frame)


def test_who_sends_waits_for_a_peer_that_does_not_read(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_UNSENT", 1_000_000)
    monkeypatch.setattr(module, "_MOST_HELD", 1_000_000)
    came, frame = place.all_come(), bytes(400_000)
    peer, sent = vars(came["bob"])["_peers"]["ann"], []

    def flood() -> None:
        for number in range(100):
            came["bob"].post("ann", frame)
            sent.append(number)

    thread = threading.Thread(target=flood, daemon=True)
    thread.start()
    thread.join(1.0)
    assert thread.is_alive()
    assert len(sent) < 100
    assert peer.unsent < 2_000_000
    came["cid"].post("bob", b"meanwhile")
    for _ in range(100):
        assert came["ann"].take(awaiting("ann", "bob"), 10) == ("bob", frame)
    thread.join(10)
    assert len(sent) == 100
    assert came["bob"].take(awaiting("bob", "cid"), 10) == ("cid", b"meanwhile")


def test_two_who_send_much_to_each_other_both_go_on(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_UNSENT", 1_000_000)
    came, frame = place.all_come(), bytes(400_000)
    got: list[tuple[str, bytes]] = []

    def exchange(me: str, other: str) -> None:
        for _ in range(100):
            came[me].post(other, frame)
        got.extend(came[me].take(awaiting(me, other), 20) for _ in range(100))

    pairs = (("ann", "bob"), ("bob", "ann"))
    threads = [threading.Thread(target=exchange, args=pair, daemon=True) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert got.count(("bob", frame)) == got.count(("ann", frame)) == 100


def test_a_peer_that_never_reads_is_given_up(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_UNSENT", 1_000_000)
    monkeypatch.setattr(module, "_STALLED_S", 0.3)
    came, frame = place.all_come(), bytes(400_000)
    for _ in range(50):
        came["bob"].post("ann", frame)
    with pytest.raises(PartyLeftError, match=r"ann took nothing of what it was sent for 0.3 s"):
        came["bob"].take(awaiting("bob", "ann"), 10)


def test_a_flood_of_empty_frames_is_held_back_too(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_HELD", 100_000)
    came = place.all_come()
    peer = vars(came["bob"])["_peers"]["ann"]
    peer.write(bytes(4) * 200_000)
    for _ in range(20):
        with pytest.raises(PartyLeftError):
            came["ann"].take(awaiting("ann", "cid"), 0.01)
    assert len(vars(came["ann"])["_peers"]["bob"].inbox) < 300_000


def test_who_comes_with_another_key_is_told_from_who_does_not_come(place: Place) -> None:
    place.identities["bob"] = fresh_identity()
    for thread in [place.come(name, timeout_s=1.0) for name in NAMES]:
        thread.join()
    assert "somebody came as bob with another key" in str(place.failed["ann"])
    assert "its file names another key for bob" in str(place.failed["bob"])


def test_a_script_that_fails_tells_the_others_why(place: Place) -> None:
    came = place.all_come()
    links = {name: Links(name, [one for one in NAMES if one != name], came[name].post)
             for name in NAMES}  # fmt: skip

    async def refuse() -> None:
        raise ValueError("a person's data")

    async def wait() -> None:
        await links["bob"].receive("ann", Kind.SUM, step=3)

    with pytest.raises(ValueError, match="a person's data"):
        play_one(refuse(), links["ann"], came.pop("ann"), timeout_s=5)
    told = r"^training: ann stopped the run: ValueError; its own log says more$"
    with pytest.raises(RunStoppedError, match=told) as stopped:
        drive(wait(), came["bob"], timeout_s=5)
    assert stopped.value.left == ("ann",)


_NO_ADDRESSES = (
    "a:\u0661",
    "",
    "host",
    ":1",
    "host:",
    "host:0",
    "host:65536",
    "host:x",
    "[]:1",
    "[::1]",
)
_BARE = ("::1:7001", "2001:db8::7:7001", "[127.0.0.1]:7001", "[host]:1", "[::1:1", "::1")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        *((text, "an address is host:port") for text in _NO_ADDRESSES),
        *((text, "an IPv6 address stands in brackets") for text in _BARE),
    ],
)
def test_what_is_no_address_is_told(text: str, says: str) -> None:
    with pytest.raises(LocalProtocolError, match=says):
        parse_address(text)


@pytest.mark.parametrize("text", ["127.0.0.1:1", "bank.example:7001", "[::1]:7001", "[::]:65535"])
def test_an_address_is_spelt_as_it_is_read(text: str) -> None:
    assert spell_address(parse_address(text)) == text
    assert "[" not in parse_address(text)[0]

"""Links over connections that break: everything arrives once and in order, or a clear error."""

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from apfed_protocols.errors import LocalProtocolError, PartyLeftError, RemoteProtocolError
from secure_apfed.exchange import resumable_link as module
from secure_apfed.exchange.resumable_link import LinkTransport, ResumableLink
from tests.links.pair import awaiting
from tests.waiting import LONG_S, wait_until


class Cut:
    """A connection that breaks after so many messages were written to it."""

    def __init__(self, connection: Connection, after: int) -> None:
        self.connection = connection
        self.left = after

    def send_bytes(self, body: bytes, /) -> None:
        self.left -= 1
        if self.left < 0:
            # closing it here could hand its number to another file while a thread reads it
            with socket.socket(fileno=os.dup(self.connection.fileno())) as wire:
                wire.shutdown(socket.SHUT_RDWR)
            raise BrokenPipeError("cut")
        self.connection.send_bytes(body)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.connection, name)


class Ends:
    """Two links to each other; the caller's connections are cut after the given numbers."""

    def __init__(self, cuts: list[int], patience_s: float = 20.0) -> None:
        self.listener = Listener(("localhost", 0))
        self.cuts = cuts
        self.connections = 0
        self.here = ResumableLink("there", self.listener.accept, patience_s=patience_s)
        self.there = ResumableLink("here", self.call, patience_s=patience_s)

    def call(self) -> Any:
        self.connections += 1
        after = self.cuts.pop(0) if self.cuts else 10**9
        return Cut(Client(self.listener.address), after)

    def close(self) -> None:
        closing = threading.Thread(target=self.here.close)
        closing.start()
        self.there.close()
        closing.join(30)
        self.listener.close()


MANY = [int(cut) for cut in np.random.default_rng(5).integers(0, 25, 15)]


@pytest.mark.parametrize("cuts", [[], [2, 1, 1, 5], [3, 40, 7, 0, 0, 90], MANY])
def test_every_message_arrives_once_and_in_order(cuts: list[int]) -> None:
    ends = Ends(list(cuts))
    bodies = [bytes([k % 251]) * (1 + 997 * (k % 7)) for k in range(150)]
    bodies += [bytes([k]) * 3_000_000 for k in range(2)]
    for body in bodies:
        ends.here.send(b"h" + body)
        ends.there.send(b"t" + body)
    assert [ends.there.receive(20) for _ in bodies] == [b"h" + body for body in bodies]
    assert [ends.here.receive(20) for _ in bodies] == [b"t" + body for body in bodies]
    ends.close()
    # receipts may travel with messages, so that fewer frames than the last cuts wait for are sent
    assert len(cuts) // 2 < ends.connections <= len(cuts) + 1


def test_a_peer_that_does_not_come_back_is_an_error_in_time() -> None:
    refuse = Mock(side_effect=ConnectionRefusedError("nobody listens"))
    link = ResumableLink("shop", refuse, patience_s=0.5)
    link.send(b"hello")
    with pytest.raises(RemoteProtocolError, match=r"shop did not come within 0.5 s \(nobody"):
        link.receive(LONG_S)
    with pytest.raises(RemoteProtocolError, match="did not come within"):
        link.send(b"more")
    with pytest.raises(RemoteProtocolError, match=r"shop did not confirm the last 1 part\(s\)"):
        link.close()


def test_silence_on_a_good_link_is_a_time_out() -> None:
    ends = Ends([])
    with pytest.raises(TimeoutError, match=r"there sent nothing for 0.3 s"):
        ends.here.receive(0.3)
    ends.close()
    with pytest.raises(LocalProtocolError, match="is closed"):
        ends.here.send(b"late")


def frame(kind: int, number: int, confirmed: int, body: bytes = b"") -> bytes:
    return struct.pack(">BQQ", kind, number, confirmed) + body


HELLO = frame(1, 0, 0, bytes(64))


def part(number: int, total: int, body: bytes = b"", *, message: int = 0) -> bytes:
    return frame(2, number, 0, struct.pack(">IQQ", message, total, 0) + body)


BREAKS: list[tuple[list[bytes], str]] = [
    ([b"short"], "shop sent a frame of 5 bytes"),
    ([bytes(2**20 + 100)], "shop sent a frame of 1048676 bytes"),
    ([frame(9, 0, 0)], "shop sent a frame of kind 9"),
    ([frame(2, 0, 0)], "shop began a connection without a greeting"),
    ([frame(1, 0, 0)], "shop began a connection without a greeting"),
    ([frame(1, 0, 3, bytes(64))], "shop confirms 3 parts, of which 0 were confirmed and 0"),
    ([HELLO, part(5, 1)], "shop sent part 5 after 0"),
    ([frame(4, 0, 0)], "shop began a connection without a greeting"),
    ([HELLO, HELLO], "shop sent part 0 after 0"),
    ([HELLO, frame(3, 0, 2**63)], "shop confirms 9223372036854775808 parts"),
    ([HELLO, part(0, 2**30 + 1)], "announces a message of 1073741825 bytes"),
    ([HELLO, frame(2, 0, 0, b"short")], "sent 5 bytes of frames .* too few for a part"),
]


@contextmanager
def shop(patience_s: float = 5) -> Iterator[tuple[Listener, ResumableLink]]:
    """A link to a peer that the test plays."""
    with Listener(("localhost", 0)) as listener:
        dial = partial(Client, listener.address)
        yield listener, ResumableLink("shop", dial, patience_s=patience_s)


@pytest.mark.parametrize(("frames", "message"), BREAKS, ids=[message for _, message in BREAKS])
def test_a_peer_that_breaks_the_rules_ends_the_link(frames: list[bytes], message: str) -> None:
    with shop(2) as (listener, link), listener.accept() as connection:
        for each in frames:
            connection.send_bytes(each)
        with pytest.raises(RemoteProtocolError, match=message):
            link.receive(10)


@pytest.mark.parametrize(
    ("predicts", "told"), [(False, "start all"), (True, "ask again once secure-apfed serve runs")]
)
def test_a_peer_whose_process_began_anew_ends_the_link(predicts: bool, told: str) -> None:
    with Listener(("localhost", 0)) as listener:
        way = {"shop": partial(Client, listener.address)}
        links = LinkTransport("ann", way, patience_s=5, meet_s=5)
        for at in range(2):
            with listener.accept() as connection:
                connection.send_bytes(frame(1, 0, 0, bytes([at]) * 32 + bytes(32)))
                connection.recv_bytes()
        with pytest.raises(PartyLeftError, match=rf"shop began anew: .* is lost; {told}"):
            links.receive_frame(replace(awaiting("ann", "shop"), is_prediction=predicts), 10)


def test_while_all_come_together_a_peer_may_begin_anew_until_it_was_sent_something() -> None:
    with shop() as (listener, link):
        link.is_meeting = True
        for at in range(3):
            with listener.accept() as connection:
                connection.send_bytes(frame(1, 0, 0, bytes([at]) * 32 + bytes(32)))
                connection.recv_bytes()
                wait_until(lambda: link.has_met_peer)
                connection.send_bytes(frame(4, 0, 0) if at == 0 else frame(3, 0, 0))
                if at == 1:
                    link.send(b"hello")
            if at == 0:
                wait_until(lambda: not link.has_met_peer)
        with pytest.raises(RemoteProtocolError, match="shop began anew: its process ended"):
            link.receive(10)


def test_a_link_waits_until_the_peers_link_of_a_session_before_has_ended() -> None:
    """A peer that was frozen dials with that one first, of which the new link knows nothing."""
    with shop() as (listener, link):
        with listener.accept() as connection:
            connection.send_bytes(frame(1, 0, 57, bytes([1]) * 64))
            connection.recv_bytes()  # its greeting
            with pytest.raises(EOFError):  # and no more
                connection.recv_bytes()
        assert not link.has_met_peer
        assert "has not yet ended a session before this one" in link.state
        with listener.accept() as connection:
            connection.send_bytes(frame(1, 0, 0, bytes([2]) * 32 + bytes(32)))
            connection.send_bytes(part(0, 5, b"again"))
            assert link.receive(10) == b"again"
            link.close(0.1)


@pytest.mark.slow
def test_who_sends_waits_for_who_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_UNCONFIRMED_BYTES", 3_000_000)
    monkeypatch.setattr(module, "_MAX_UNREAD_BYTES", 3_500_000)
    ends, sent, body = Ends([2, 9]), [], bytes(1_000_000)

    def flood() -> None:
        for number in range(40):
            ends.here.send(body)
            sent.append(number)

    thread = threading.Thread(target=flood, daemon=True)
    thread.start()
    thread.join(1.0)
    assert 5 <= len(sent) <= 9  # what one end keeps, and what the other holds
    ends.there.send(b"the other way")
    assert ends.here.receive(10) == b"the other way"
    for _ in range(40):
        assert ends.there.receive(10) == body
    thread.join(10)
    assert len(sent) == 40
    ends.close()


def test_who_takes_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_UNCONFIRMED_BYTES", 1_000_000)
    monkeypatch.setattr(module, "_MAX_UNREAD_BYTES", 1_000_000)
    monkeypatch.setattr(module, "_STALLED_S", 0.3)
    ends = Ends([])

    def flood() -> None:
        for _ in range(20):
            ends.here.send(bytes(500_000))

    with pytest.raises(RemoteProtocolError, match=r"there took nothing .* for 0\.3 s"):
        flood()
    ends.there.close(0.1)  # or it would go on dialling
    ends.listener.close()


def test_a_flood_beyond_what_is_confirmed_ends_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_BUFFERED_BYTES", 2_000_000)
    with shop(2) as (listener, link), listener.accept() as connection:
        connection.send_bytes(HELLO)
        for number in range(9):
            connection.send_bytes(part(number, 250_000, bytes(250_000), message=number))
        wait_until(lambda: vars(link)["_failure"], "the end of the link")
        for _ in range(7):
            assert link.receive(5) == bytes(250_000)
        with pytest.raises(RemoteProtocolError, match="sent more than it may before"):
            link.receive(5)


@pytest.mark.slow
def test_a_connection_that_hangs_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HEARTBEAT_S", 0.1)
    monkeypatch.setattr(module, "_SILENT_S", 2.0)
    ends = Ends([])
    ends.here.send(b"first")
    assert ends.there.receive(5) == b"first"
    quiet = threading.Event()
    connections = ends.connections
    time.sleep(2.5)
    assert ends.connections == connections  # signs of life keep it
    wire = vars(ends.there)["_wire"].connection
    monkeypatch.setattr(wire, "poll", lambda timeout: quiet.wait(timeout))
    time.sleep(0.5)  # one look is under way
    ends.here.send(b"second")
    assert ends.there.receive(LONG_S) == b"second"
    assert ends.connections == connections + 1
    ends.close()


def test_a_link_that_broke_says_so_until_it_stands_again() -> None:
    way_is_open = threading.Event()
    way_is_open.set()
    with Listener(("localhost", 0)) as listener:

        def dial() -> Any:
            if not way_is_open.is_set():
                raise ConnectionError("nobody listens there")
            return Client(listener.address)

        links = LinkTransport("ann", {"shop": dial}, patience_s=LONG_S, meet_s=LONG_S)
        assert links.list_broken_links() == {}, "it never stood"
        hello = frame(1, 0, 0, bytes([1]) * 32 + bytes(32))
        with listener.accept() as connection:
            connection.send_bytes(hello)
            connection.recv_bytes()
            wait_until(lambda: vars(links)["_link_by_peer"]["shop"].has_met_peer)
            assert links.list_broken_links() == {}
            way_is_open.clear()
        wait_until(
            lambda: (
                [one.why for one in links.list_broken_links().values()] == ["nobody listens there"]
            ),
            "that it is known to be broken",
        )
        broken = links.list_broken_links()["shop"]
        assert (broken.patience_s, 0 <= broken.since_s < LONG_S) == (LONG_S, True)
        way_is_open.set()
        with listener.accept() as connection:
            connection.send_bytes(hello)
            connection.recv_bytes()
            wait_until(lambda: links.list_broken_links() == {}, "that it stands again")
            connection.send_bytes(frame(4, 0, 0))
            wait_until(lambda: vars(links)["_link_by_peer"]["shop"]._has_goodbye)
        way_is_open.clear()
        wait_until(lambda: vars(links)["_link_by_peer"]["shop"].failure, "that it has ended")
        assert links.list_broken_links() == {}, "who said goodbye broke nothing"
        links.close()


def test_an_end_says_goodbye_and_the_other_knows() -> None:
    ends = Ends([])
    ends.here.send(b"last")
    ends.here.close(5, linger_s=0.1)
    assert ends.there.receive(5) == b"last"
    with pytest.raises(RemoteProtocolError, match="here closed its link"):
        ends.there.receive(5)
    ends.there.close(1)
    ends.listener.close()


class Hub:
    """Ann's links to bob and cid, each of whom has one to ann."""

    def __init__(self) -> None:
        self.listeners = {name: Listener(("localhost", 0)) for name in ("bob", "cid")}
        self.ends = {
            name: ResumableLink("ann", partial(Client, listener.address))
            for name, listener in self.listeners.items()
        }
        ways = {name: listener.accept for name, listener in self.listeners.items()}
        self.ann = LinkTransport.meet_peers("ann", ways, patience_s=20, meet_s=20)
        wait_until(lambda: all(end.has_met_peer for end in self.ends.values()))

    def awaits(self, *senders: str, timeout_s: float = 10.0, **more: Any) -> tuple[str, bytes]:
        return self.ann.receive_frame(replace(awaiting("ann", *senders), **more), timeout_s)

    def lose(self, name: str) -> None:
        self.ends.pop(name).close(5, linger_s=0.1)


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub()
    yield made
    closing = threading.Thread(target=made.ann.close)
    closing.start()
    for link in made.ends.values():
        link.close(5)
    closing.join()
    for listener in made.listeners.values():
        listener.close()


def test_who_is_not_waited_for_waits_and_all_who_are_silent_are_named(hub: Hub) -> None:
    hub.ends["cid"].send(b"first")
    hub.ends["bob"].send(b"second")
    assert hub.awaits("bob") == ("bob", b"second")
    assert hub.awaits("bob", "cid") == ("cid", b"first")
    with pytest.raises(PartyLeftError, match=r"from bob or cid; nothing came for 0\.3 s") as told:
        hub.awaits("bob", "cid", timeout_s=0.3)
    assert told.value.missing_parties == ("bob", "cid")


def test_too_few_that_are_left_are_told_at_once(hub: Hub) -> None:
    hub.lose("bob")
    with pytest.raises(PartyLeftError, match=r"^training: ann expected .*; bob closed") as told:
        hub.awaits("bob", "cid", min_senders=2, timeout_s=LONG_S)
    assert told.value.missing_parties == ("bob",)
    hub.ann.send_frame("bob", b"nobody hears this")
    hub.ends["cid"].send(b"still here")
    assert hub.awaits("bob", "cid") == ("cid", b"still here")


def test_where_a_third_has_left_who_is_awaited_has_time_for_last_words(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LAST_WORDS_S", LONG_S)
    hub.lose("cid")
    hub.ends["bob"].send(b"cid is gone")
    assert hub.awaits("bob", needed_peers=("cid",), timeout_s=LONG_S) == ("bob", b"cid is gone")
    monkeypatch.setattr(module, "_LAST_WORDS_S", 0.5)
    with pytest.raises(PartyLeftError, match="nothing came, and cid closed its link") as told:
        hub.awaits("bob", needed_peers=("cid",), timeout_s=LONG_S)
    assert told.value.missing_parties == ("cid",)
    with pytest.raises(PartyLeftError, match=r"nothing came for 0\.1 s"):  # nobody needs cid here
        hub.awaits("bob", timeout_s=0.1)

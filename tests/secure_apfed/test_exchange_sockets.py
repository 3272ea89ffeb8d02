"""Links between processes of one machine: frames arrive whole and in order, and no stranger takes a
place or a run down. Who does not belong, in all links, is of `tests/links`.
"""

import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from apfed_protocols.errors import LocalProtocolError
from secure_apfed.exchange.sealed_connection import MOST_SEALED, MOST_UNPROVED, LocalEnd, prove
from secure_apfed.exchange.sockets import SocketConnection, parse_address, spell_address
from tests.links.pair import Pair, say_and_hear, until_somebody_listens


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    for told in made.told.values():
        told |= {"link": "tcp", "tls": None}
    yield made
    made.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "[::]", "localhost"])
def test_frames_arrive_whole_and_in_order_whatever_their_size(host: str, pair: Pair) -> None:
    pair.listen_at(host)
    pair.peers["bob"]["ann"] = pair.peer("ann", address=pair.address.replace("[::]", "[::1]"))
    pair.meet()
    for size in (0, 1, 5_000_000, 7, 300_000):
        say_and_hear(pair, bytes([size % 251]) * size)


def test_who_died_at_the_door_comes_again(pair: Pair) -> None:
    """Its newer connection counts: nobody else can prove to be it."""
    coming = pair.come("ann")
    until_somebody_listens(pair)
    known = {"ann": pair.identities["ann"].public}
    ghost = pair.stranger()
    prove(ghost, LocalEnd(name="bob", identity=pair.identities["bob"], known=known), "ann")
    ghost.close()
    for thread in (coming, pair.come("bob")):
        thread.join()
    say_and_hear(pair, b"again")


@pytest.mark.parametrize("most", [MOST_UNPROVED, MOST_SEALED])
def test_a_frame_that_is_announced_too_large_ends_the_connection(most: int) -> None:
    theirs, ours = socket.socketpair()
    connection = SocketConnection(ours)
    if most == MOST_SEALED:
        connection.trust()
    theirs.sendall(struct.pack(">I", most + 1))
    with pytest.raises(EOFError, match=f"sent a frame above {most} bytes"):
        connection.recv_bytes()
    stranger = SocketConnection(theirs)
    assert stranger.recv_bytes().startswith(b"refused the other end sent a frame above %d" % most)
    with pytest.raises(EOFError):
        stranger.recv_bytes()


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

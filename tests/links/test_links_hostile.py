"""Mutated frames at a listening port and at a relay: honest peers go on as if nothing came."""

import os
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgpack
import pytest

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.seal import fresh_identity
from secure_apfed.between.grpc_link import GrpcConnection
from secure_apfed.between.relay import Relay
from secure_apfed.exchange.sealed_connection import MOST_SEALED, MOST_UNPROVED, Carrier, read_before
from secure_apfed.exchange.sockets import parse_address
from tests.contracts.hostile import mutated
from tests.links.pair import Pair, say_and_hear, until_somebody_listens
from tests.waiting import LONG_S, wait_until

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
REFUSED = (OSError, EOFError, RemoteProtocolError)


@pytest.fixture(params=["port", "relay", "tcp"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    """Without TLS, so that strangers get as far as they can."""
    made = Pair(tmp_path, relay=request.param == "relay")
    if made.relay is not None:
        made.relay.close()
        made.relay = Relay(("127.0.0.1", 0), None)
        made.address = f"127.0.0.1:{made.relay.port}"
    for told in made.told.values():
        told |= {"tls": None, "insecure_plaintext_on_loopback": True}
        told |= {"relay": made.address} if made.relay is not None else {}
        told |= {"link": "tcp"} if request.param == "tcp" else {}
    yield made
    made.close()


def hellos() -> list[bytes]:
    """What somebody may say who would like to get in."""
    key, other = os.urandom(32), fresh_identity()
    return [
        msgpack.packb([3, "bob", "ann", key, ""]),
        msgpack.packb([3, "bob", "ann", key, "ff" * 32]),
        msgpack.packb([3, ["bob"], {"ann": 1}, key, ""]),
        msgpack.packb([sorted([key, other.public]), key, other.public, os.urandom(64)]),
        msgpack.packb([[key] * 3000, key, key, os.urandom(64)]),
        msgpack.packb([3, "bob", "ann", bytes(32), ""]) + struct.pack(">BQQ", 1, 0, 0),
        b"refused ",
        struct.pack(">BQQ", 2, 0, 0) + (2**63).to_bytes(8, "big"),
        bytes(2**20),
    ]


def talk(pair: Pair, frames: list[bytes]) -> None:
    """One stream on which a stranger says these."""
    connection = pair.stranger()
    try:
        for frame in frames:
            connection.send_bytes(frame)
        if connection.poll(0.05):
            connection.recv_bytes()
    except REFUSED:
        pass
    finally:
        connection.close()


def shout(pair: Pair, data: bytes) -> None:
    """Bytes at the port itself."""
    with socket.create_connection(parse_address(pair.address), timeout=5) as stranger:
        try:
            stranger.sendall(data)
            stranger.settimeout(0.01)
            stranger.recv(1024)
        except OSError:
            pass


@contextmanager
def busy(pair: Pair) -> Iterator[list[bytes]]:
    """Honest talk all the while; what was said and heard."""
    ended, exchanges = threading.Event(), list[bytes]()

    def go_on() -> None:
        while not ended.wait(0.02):
            body = os.urandom(1000)
            say_and_hear(pair, body)
            exchanges.append(body)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield exchanges
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("frames", [300, pytest.param(5000, marks=pytest.mark.slow)])
def test_mutated_frames_leave_honest_peers_unaffected(frames: int, pair: Pair) -> None:
    pair.meet()
    before = {name: vars(one)["_links"] for name, one in pair.met.items()}
    wires = {
        name: [vars(link)["_wire"] for link in links.values()] for name, links in before.items()
    }
    chance = random.Random(15)
    with busy(pair) as exchanges:
        for number in range(frames // 5):
            genuine = hellos()
            talk(pair, [mutated(chance, genuine[number % len(genuine)]), *genuine[: number % 3]])
        for number in range(frames - frames // 5):
            body = PREFACE + SETTINGS + chance.randbytes(60)
            shout(pair, mutated(chance, body if number % 4 else hellos()[0]))
    assert exchanges
    for name, links in before.items():
        assert [vars(link)["_wire"] for link in links.values()] == wires[name]


def read_to_the_end(connection: Carrier) -> None:
    """A relay may say something first."""
    while True:
        read_before(connection, time.monotonic() + LONG_S)


def test_of_a_stranger_no_long_frame_is_taken(pair: Pair) -> None:
    coming = [pair.come("ann")]
    until_somebody_listens(pair)
    for size in (MOST_UNPROVED + 1, MOST_SEALED):
        connection = pair.stranger()
        connection.send_bytes(bytes(size))
        with pytest.raises(ConnectionRefusedError, match="above 4096 bytes before it proved"):
            read_to_the_end(connection)
        connection.close()
    coming.append(pair.come("bob"))
    for thread in coming:
        thread.join()
    say_and_hear(pair, bytes(MOST_SEALED))


def test_of_a_stranger_one_frame_waits() -> None:
    read, connection = list[int](), GrpcConnection()

    def pieces() -> Iterator[bytes]:
        for number in range(100):
            read.append(number)
            yield b"\0" + bytes(MOST_UNPROVED)

    threading.Thread(target=connection.carry, args=(pieces(),), daemon=True).start()
    for got in range(1, 51):
        assert connection.recv_bytes() == bytes(MOST_UNPROVED)
        assert len(read) <= got + 2  # one waits, one is in the hands of who brings it
    connection.trust()
    for got in range(51, 101):
        assert connection.recv_bytes() == bytes(MOST_UNPROVED)
        assert len(read) <= got + 5
    connection.close()


def was_sent_away(one: Carrier) -> bool:
    while one.poll(0.0):
        try:
            one.recv_bytes()
        except (OSError, EOFError):
            return True
    return False


def test_a_crowd_of_silent_strangers_keeps_nobody_out(pair: Pair) -> None:
    coming = pair.come("ann")
    until_somebody_listens(pair)
    crowd = [pair.stranger() for _ in range(150)]
    wait_until(lambda: any(map(was_sent_away, crowd)), "that a stranger went for another")
    bob = pair.come("bob")
    for thread in (coming, bob):
        thread.join()
    say_and_hear(pair)
    for one in crowd:
        one.close()

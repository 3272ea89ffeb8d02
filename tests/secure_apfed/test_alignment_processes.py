"""Alignment with a process for each party: killed, hanging, mismatched or altered ones."""

import ast
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener
from pathlib import Path

import pytest

from tests.waiting import LONG_S
from tests.with_crypten import installed

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 6.0
PARTY = """
import sys
from multiprocessing.connection import Client
from apfed_protocols import take_part
from secure_apfed.alignment import canonical_ids, intersection
from secure_apfed.settings.alignment import AlignmentSettings

me, port, protocol, session, patience_s = sys.argv[1:]
own = {"bank": range(20), "shop": range(10, 30), "post": range(5, 18), "dealer": ()}[me]
settings = AlignmentSettings(protocol=protocol)
ends = intersection(settings, session=session, dealer="dealer")
if me == "dealer":
    role = ends.dealer("bank", ["shop", "post"])
elif me == "bank":
    role = ends.hub(me, ["shop", "post"], canonical_ids(me, own, settings))
else:
    role = ends.member(me, "bank", canonical_ids(me, own, settings))
link = Client(("localhost", int(port)), authkey=b"told in private")
link.send_bytes(me.encode())
link.recv_bytes()  # all are there

def receive(patience_s):
    if not link.poll(patience_s):
        raise TimeoutError(f"nothing came for {patience_s} s")
    sender, _, body = link.recv_bytes().partition(b" ")
    return sender.decode(), body

def send(receiver, body):
    link.send_bytes(receiver.encode() + b" " + body)

take_part(role, send=send, receive=receive, patience_s=float(patience_s))
print([own[row] for row in role.rows] if own else [])
"""
NAMES = {
    "ecdh": ("bank", "shop", "post"),
    "circuit": ("bank", "shop", "post", "dealer"),
    "circuit_crypten": ("bank", "shop", "post", "dealer"),
}
PROTOCOLS = pytest.mark.parametrize("protocol", ["circuit", "ecdh"])
ON_CRYPTEN = pytest.param("circuit_crypten", marks=[pytest.mark.slow, installed])
# What to deliver of a message: its sender, how many this one sent before, and the body.
Change = Callable[[str, int, bytes], bytes | None]


def unchanged(_sender: str, _number: int, body: bytes) -> bytes:
    return body


@dataclass
class Exchange:
    """Carries messages between the processes of the parties, which know one another by name."""

    change: Change
    processes: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    links: dict[str, Connection] = field(default_factory=dict)

    def carry(self, sender: str) -> None:
        for number in range(10**6):
            try:
                receiver, _, body = self.links[sender].recv_bytes().partition(b" ")
                changed = self.change(sender, number, body)
                if changed is not None:
                    self.links[receiver.decode()].send_bytes(sender.encode() + b" " + changed)
            except (OSError, EOFError):
                if self.processes[sender].poll() is not None:
                    return


def play(
    protocol: str,
    *,
    change: Change = unchanged,
    other: tuple[str, str, str] = ("", "", ""),
    kill: tuple[str, int] = ("", 0),
) -> dict[str, tuple[int, str, str]]:
    """Return the exit status, output and complaint of each party, which all end in time.

    Args:
        protocol: of all; other: (party, protocol, session) of one that runs something else.
        change: what becomes of a message.
        kill: a party and how many messages it sends before its process is killed.
    """
    exchange = Exchange(change)
    if kill[0]:

        def killing(sender: str, number: int, body: bytes) -> bytes | None:
            if (sender, number) == kill:
                exchange.processes[sender].kill()
                return None
            return change(sender, number, body)

        exchange.change = killing
    with Listener(("localhost", 0), authkey=b"told in private") as listener:
        port = str(listener.address[1])
        for name in NAMES[protocol]:
            mine = other[1:] if name == other[0] else (protocol, "November")
            process = exchange.processes[name] = start(name, port, *mine, str(PATIENCE_S))
            threading.Thread(target=knock_at_the_end, args=(process, port), daemon=True).start()
        for _ in exchange.processes:
            link = listener.accept()
            exchange.links[link.recv_bytes().decode()] = link
        for link in exchange.links.values():
            link.send_bytes(b"go")
        for name in exchange.links:
            threading.Thread(target=exchange.carry, args=(name,), daemon=True).start()
        ended = {
            name: each.communicate(timeout=LONG_S) for name, each in exchange.processes.items()
        }
        return {name: (each.returncode, *ended[name]) for name, each in exchange.processes.items()}


def knock_at_the_end(process: subprocess.Popen[str], port: str) -> None:
    """Nobody waits for a party that ended before it came."""
    process.wait()
    with suppress(OSError):
        socket.create_connection(("localhost", int(port))).close()


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PARTY, *arguments],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip


@pytest.mark.parametrize("protocol", ["circuit", "ecdh", ON_CRYPTEN])
def test_all_agree(protocol: str) -> None:
    ended = play(protocol)
    assert {(status, complaint) for status, _, complaint in ended.values()} == {(0, "")}
    rows = [ast.literal_eval(ended[name][1]) for name in ("bank", "shop", "post")]
    assert rows[0] == rows[1] == rows[2]
    assert sorted(rows[0]) == list(range(10, 18))


@pytest.mark.parametrize(
    ("protocol", "name", "after"),
    [
        pytest.param("ecdh", "bank", 1, marks=pytest.mark.slow),
        ("ecdh", "shop", 1),
        pytest.param("circuit", "bank", 4, marks=pytest.mark.slow),
        pytest.param("circuit", "post", 2, marks=pytest.mark.slow),
        ("circuit", "dealer", 0),
        pytest.param("circuit_crypten", "post", 5, marks=[pytest.mark.slow, installed]),
    ],
)
def test_a_killed_party_is_a_clear_error_at_all_others_in_time(
    protocol: str, name: str, after: int
) -> None:
    ended = play(protocol, kill=(name, after))
    assert ended.pop(name)[:2] == (-9, "")
    for status, rows, complaint in ended.values():
        assert (status, rows) == (1, "")
        assert "RemoteProtocolError: a peer fell silent before the protocol was" in complaint
        assert "start all parties again with a new session" in complaint


@pytest.mark.slow
@PROTOCOLS
def test_a_party_that_hears_nothing_from_one_peer_ends_in_time(protocol: str) -> None:
    """The process lives on, but its messages stay away."""
    ended = play(protocol, change=lambda sender, _, body: None if sender == "shop" else body)
    for status, rows, complaint in ended.values():
        assert (status, rows) == (1, "")
        assert "a peer fell silent" in complaint


@pytest.mark.slow
@pytest.mark.parametrize(
    ("protocol", "what", "message"),
    [
        ("ecdh", ("ecdh", "December"), "shop holds another agreement; compare session"),
        ("circuit", ("circuit", "December"), "bank holds another agreement; compare session"),
        ("ecdh", ("circuit", "November"), r"bank sent version \d+, kind 1 of a set intersection"),
        ("circuit", ("ecdh", "November"), r"bank sent version \d+, kind 1 of a set intersection"),
    ],
)
def test_another_session_or_version_at_one_party_is_named(
    protocol: str, what: tuple[str, str], message: str
) -> None:
    ended = play(protocol, other=("shop", *what))
    assert {(status, rows) for status, rows, _ in ended.values()} == {(1, "")}
    assert any(re.search(message, complaint) for _, _, complaint in ended.values())


@pytest.mark.slow
@PROTOCOLS
@pytest.mark.parametrize("at", [0, 1, 5, 20])
def test_a_flipped_byte_of_a_header_is_an_error_at_its_receiver(protocol: str, at: int) -> None:
    def flip(sender: str, number: int, body: bytes) -> bytes:
        if (sender, number) != ("shop", 0):
            return body
        return body[:at] + bytes([body[at] ^ 64]) + body[at + 1 :]

    ended = play(protocol, change=flip)
    assert {(status, rows) for status, rows, _ in ended.values()} == {(1, "")}
    assert "RemoteProtocolError: shop " in ended["bank"][2]


def test_a_peer_with_another_secret_is_refused_at_once() -> None:
    """The secret of the example's link; sealed links are in test_alignment_links."""
    script = (
        "import sys\n"
        "from multiprocessing.connection import Client\n"
        "Client(('localhost', int(sys.argv[1])), authkey=b'a guess')\n"
    )
    with Listener(("localhost", 0), authkey=b"told in private") as listener:
        port = str(listener.address[1])
        stranger = subprocess.Popen(
            [sys.executable, "-c", script, port], stderr=subprocess.PIPE, text=True
        )
        with pytest.raises(Exception, match="digest received was wrong"):
            listener.accept()
        assert "AuthenticationError" in stranger.communicate(timeout=LONG_S)[1]


def test_nobody_there_is_an_error_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    alone = start("shop", port, "ecdh", "November", "3")
    assert "ConnectionRefusedError" in alone.communicate(timeout=LONG_S)[1]

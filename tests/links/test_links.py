"""Who belongs meets and speaks, whatever lies between; who does not is refused, and told why."""

import os
import random
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import msgpack
import pytest

from apfed_protocols.errors import (
    LocalProtocolError,
    PartyLeftError,
    RemoteProtocolError,
    UnsafeChoiceWarning,
)
from apfed_protocols.seal import fresh_identity
from secure_apfed.errors import ConfigError
from secure_apfed.exchange.certificates import Credentials, make_authority
from secure_apfed.exchange.grpc_link import GrpcConnection, Port, dial
from secure_apfed.exchange.relay import Relay, enter_room, name_room
from secure_apfed.exchange.resumable_link import Connection
from secure_apfed.exchange.sealed_connection import (
    MAX_FRAME_BYTES,
    MAX_UNPROVED_FRAME_BYTES,
    Carrier,
    LocalEnd,
    PeerAcceptor,
    prove_identity,
    receive_before,
)
from secure_apfed.exchange.sockets import SocketConnection, parse_address, spell_address
from tests.contracts.hostile import mutate_bytes
from tests.links.pair import (
    Pair,
    Proxy,
    awaiting,
    connect_proxy,
    gateway,
    say_and_hear,
    until_somebody_listens,
)
from tests.refusals import list_unrefused
from tests.waiting import LONG_S, wait_until

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")

TCP = {"link": "tcp", "tls": None}
PLAIN = {"tls": None, "insecure_plaintext_on_loopback": True}


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.close()


@pytest.fixture
def relay_pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path, relay=True)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("host", "link"),
    [
        ("127.0.0.1", "grpc"),
        ("[::1]", "grpc"),
        ("[::1]", "tcp"),
        ("[::]", "tcp"),
        ("localhost", "tcp"),
    ],
)
def test_those_who_belong_meet_and_speak(host: str, link: str, pair: Pair) -> None:
    for told in pair.told.values():
        told |= TCP if link == "tcp" else {}
    pair.listen_at(host)
    pair.peers["bob"]["ann"] = pair.peer("ann", address=pair.address.replace("[::]", "[::1]"))
    pair.meet()
    for size in (0, 1, 5_000_000, 7, 300_000):
        say_and_hear(pair, bytes([size % 251]) * size)


def test_both_may_listen(pair: Pair) -> None:
    pair.told["bob"]["listen"] = "127.0.0.1:1"
    pair.peers["ann"]["bob"] = pair.peer("bob", address="127.0.0.1:1")  # bob dials, by their names
    pair.meet()
    say_and_hear(pair)


class Swapping:
    """A gateway with keys of its own: it puts one into bob's first frame, or plays ann itself."""

    def __init__(self, pair: Pair, *, keys: bool) -> None:
        self._pair = pair
        self._keys = keys
        credentials = pair.authority.issue_certificate("localhost")
        self._credentials = credentials
        self._port = Port(("127.0.0.1", 0), credentials, self._welcome)
        self.port = self._port.port
        self.close = self._port.close

    def _welcome(self, here: GrpcConnection, certificate: bytes) -> None:
        if not self._keys:
            known = {"bob": self._pair.identities["bob"].public}
            ann = LocalEnd(name="ann", identity=fresh_identity(), identity_by_peer=known)
            with pytest.raises((OSError, EOFError)):
                prove_identity(here, ann)[1].recv_bytes()
            here.close()
            return
        there = dial(parse_address(self._pair.address), self._credentials, name="ann")
        version, sender, receiver, public, digest = msgpack.unpackb(here.recv_bytes())
        there.send_bytes(
            msgpack.packb([version, sender, receiver, bytes([9]) + public[1:], digest])
        )
        Thread(target=carry, args=(there, here), daemon=True).start()
        carry(here, there)


def carry(one: Connection, other: Connection) -> None:
    try:
        while True:
            other.send_bytes(one.recv_bytes())
    except (OSError, EOFError):
        other.close()


REMOTE: dict[str, tuple[Callable[[Pair], Any], str, str]] = {
    # who is wrong, what bob is told, what ann is told
    "foreign": (
        lambda pair: pair.show("bob", by=make_authority()),
        "of an authority that is not in tls.ca",
        "bob: it did not dial, or came without",
    ),
    "revoked": (
        lambda pair: pair.revoke("ann", pair.credentials("bob").digest),
        "the certificate of bob is revoked",
        "bob is revoked",
    ),
    "revoked server": (
        lambda pair: pair.revoke("bob", pair.credentials("ann").digest),
        "ann is revoked by the list of bob",
        "bob refuses this",
    ),
    "revoked key": (
        lambda pair: pair.revoke("ann", pair.identities["bob"].public.hex()),
        "the identity of bob is revoked",
        "bob is revoked by",
    ),
    "another key": (
        lambda pair: pair.identities.update(bob=fresh_identity()),
        "ann refuses this connection: what bob signed",
        "bob signed",
    ),
    "a gateway that ann was told nothing of": (
        lambda pair: pair.meet_at_a_gateway(gateway(pair), ann_knows=False),
        "say behind_proxy: true of bob",
        "bob came with a certificate for 'localhost'",
    ),
    "a gateway that swaps keys": (
        lambda pair: pair.meet_at_a_gateway(Swapping(pair, keys=True)),
        "what ann signed does not fit the key",
        "",
    ),
    "a gateway in ann's name": (
        lambda pair: pair.meet_at_a_gateway(Swapping(pair, keys=False)),
        "what ann signed does not fit the key",
        "",
    ),
    "not let in at the relay": (
        lambda pair: pair.meet_at_a_relay("127.0.0.1", frozenset({pair.identities["ann"].public})),
        "not among those that may enter",
        "bob: it did not come to the relay",
    ),
    "no relay": (
        lambda pair: pair.meet_at_no_relay(),
        "the relay is not reached (nobody listens there",
        "start secure-apfed relay",
    ),
    "a certificate on the relay's list": (
        lambda pair: pair.meet_at_a_relay("127.0.0.1", refused=[pair.credentials("bob").digest]),
        "identity is revoked by its list",
        "bob: it did not come to the relay",
    ),
    "an identity on the relay's list": (
        lambda pair: pair.meet_at_a_relay(
            "127.0.0.1", refused=[pair.identities["bob"].public.hex()]
        ),
        "identity is revoked by its list",
        "bob: it did not come to the relay",
    ),
}


@pytest.mark.slow
def test_who_does_not_belong_is_told_why(tmp_path: Path) -> None:
    """All cases at once: who is refused and who is not there look the same until the end."""
    pairs: dict[str, Pair] = {}
    for case in REMOTE:
        (tmp_path / case).mkdir()
        pairs[case] = Pair(tmp_path / case)
    between = [REMOTE[case][0](pair) for case, pair in pairs.items()]
    meeting = [Thread(target=pair.meet, kwargs={"within_s": 12.0}) for pair in pairs.values()]
    for thread in meeting:
        thread.start()
    for thread in meeting:
        thread.join()
    for case, pair in pairs.items():
        both = ("bob", "ann", REMOTE[case][1]), ("ann", "bob", REMOTE[case][2])
        for name, peer, reads in both:
            error = pair.failed[name]
            assert isinstance(error, PartyLeftError)
            assert error.missing_parties == (peer,)
            assert reads in str(error), (case, str(error))
            if case in ("another key", "no relay"):  # it is told meanwhile, too
                assert any(reads in missing[peer] for missing in pair.missed[name])
    for standing in (*between, *pairs.values()):
        if standing is not None:
            standing.close()


class HungUp:
    """The other end said this and then closed; so many writes still go before that shows here."""

    def __init__(self, *said: bytes, writes: int) -> None:
        self.said = [*said]
        self.writes = writes
        self.sent = list[bytes]()

    def send_bytes(self, buf: bytes, /) -> None:
        if len(self.sent) == self.writes:
            raise BrokenPipeError("the connection was closed")
        self.sent.append(buf)

    def recv_bytes(self) -> bytes:
        if not self.said:
            raise EOFError("the other end closed the connection")
        return self.said.pop(0)

    def poll(self, timeout: float, /) -> bool:
        return True

    def trust_peer(self) -> None: ...

    def close(self) -> None: ...


def both_ends() -> tuple[LocalEnd, LocalEnd]:
    ends = {name: fresh_identity() for name in ("ann", "bob")}
    known = {name: one.public for name, one in ends.items()}
    ann, bob = (
        LocalEnd(name=name, identity=one, identity_by_peer=known) for name, one in ends.items()
    )
    return ann, bob


def test_a_refusal_is_read_though_the_connection_broke_under_a_write() -> None:
    ann, bob = both_ends()
    ann = replace(ann, list_revoked=lambda: frozenset({ann.identity_by_peer["bob"].hex()}))
    calls = HungUp(writes=1)
    with pytest.raises(EOFError):
        prove_identity(calls, bob, "ann")
    (hello,) = calls.sent
    come = lambda writes: prove_identity(  # noqa: E731
        HungUp(hello, b"refused why not", writes=writes), replace(ann, list_revoked=frozenset)
    )
    cases = [("why not", writes) for writes in range(3)]
    assert list_unrefused(ConnectionRefusedError, come, cases) == []
    refusing = HungUp(hello, b"is not read any more", writes=2)
    with pytest.raises(RemoteProtocolError, match="the identity of bob is revoked"):
        prove_identity(refusing, ann)
    assert refusing.sent[-1].startswith(b"refused ann refuses this connection")
    assert not refusing.said  # it waited until the other end had read why, and closed


def test_what_proved_it_once_proves_nothing_again_nor_at_another_door() -> None:
    ann, bob = both_ends()
    here, there = map(SocketConnection, socket.socketpair())
    said = list[bytes]()
    hear = here.recv_bytes

    def record_frame() -> bytes:
        said.append(hear())
        return said[-1]

    vars(here)["recv_bytes"] = record_frame
    calling = Thread(target=prove_identity, args=(there, bob, "ann"))
    calling.start()
    assert prove_identity(here, ann)[0] == "bob"
    calling.join()
    with pytest.raises(RemoteProtocolError, match="what bob signed does not fit"):
        prove_identity(HungUp(*said, writes=9), ann)

    def come(sender: str, receiver: str) -> object:
        hello = msgpack.packb([3, sender, receiver, bytes(32), ""])
        return prove_identity(HungUp(hello, writes=9), ann)

    cases = [
        ("'bob' comes to 'cid', but", "bob", "cid"),
        ("'ann' comes to 'bob', but", "ann", "bob"),
    ]
    assert list_unrefused(RemoteProtocolError, come, cases) == []


def test_of_a_peer_that_dials_again_and_again_the_newest_connection_is_taken() -> None:
    """Those before are closed: who took one of them at a time found no living one."""
    ann, bob = both_ends()
    door = PeerAcceptor(ann, ("bob",))
    for said in (b"first", b"second"):
        here, there = map(SocketConnection, socket.socketpair())
        coming = Thread(target=door.admit_stranger, args=(here, b""))
        coming.start()
        prove_identity(there, bob, "ann")[1].send_bytes(said)
        coming.join()
    assert door.take_connection("bob").recv_bytes() == b"second"
    with pytest.raises(TimeoutError, match="did not dial"):
        door.take_connection("bob")


LOCAL: dict[str, tuple[Callable[[Pair], object], str]] = {
    "expired": (lambda pair: pair.show("ann", days=-1), "ann-certificate.pem has expired at"),
    "wrong name": (lambda pair: pair.show("ann", as_name="eve"), "is for .eve., not for ann"),
    "of another authority": (
        lambda pair: pair.say("ann", tls=pair.keep("ann", other_ca(pair, "ann"))),
        "ann-certificate.pem is of another authority than those",
    ),
    "another key": (
        lambda pair: (pair.folder / "ann-key.pem").write_bytes(pair.credentials("bob").key),
        "is not the key of",
    ),
    "no file": (lambda pair: (pair.folder / "ann-key.pem").unlink(), "tls.key: .* cannot be read"),
    "no PEM": (
        lambda pair: (pair.folder / "ann-certificate.pem").write_bytes(b"no PEM"),
        "is not what it should be in PEM",
    ),
    "own one revoked": (
        lambda pair: pair.revoke("ann", pair.credentials("ann").digest),
        "is revoked; have another",
    ),
    "no TLS": (lambda pair: pair.say("ann", tls=None), "needs `tls` with ca, certificate and key"),
    "plaintext beyond loopback": (
        lambda pair: pair.say("ann", **PLAIN, listen="0.0.0.0:7001"),
        "is for loopback alone, not for 0.0.0.0",
    ),
    "nobody listens": (
        lambda pair: pair.say("ann", listen=None),
        "ann has no `listen`, and bob no",
    ),
    "no list": (
        lambda pair: pair.revoke("ann", "bob's"),
        "line 2: expected a certificate's SHA-256",
    ),
}


@pytest.mark.parametrize("case", LOCAL)
def test_own_files_are_checked_before_anything_is_sent(case: str, tmp_path: Path) -> None:
    spoil, reads = LOCAL[case]
    pair = Pair(tmp_path)
    spoil(pair)
    with pytest.raises(ConfigError, match=reads):
        pair.connect("ann")


def call(pair: Pair, credentials: Credentials | None, name: str | None, me: LocalEnd) -> None:
    """Dial ann, past the checks of one's own files."""
    with closing(dial(parse_address(pair.address), credentials, name=name)) as connection:
        prove_identity(connection, me, "ann")


def someone(pair: Pair, name: str = "bob") -> LocalEnd:
    identity = pair.identities.get(name) or fresh_identity()
    return LocalEnd(
        name=name, identity=identity, identity_by_peer={"ann": pair.identities["ann"].public}
    )


def issue_certificate(pair: Pair, **how: object) -> Credentials:
    return pair.authority.issue_certificate("bob", **how)  # type: ignore[arg-type]  # a test's own


def other_ca(pair: Pair, name: str = "bob") -> Credentials:
    made = make_authority().issue_certificate(name)
    return Credentials(pair.authority.certificate, made.certificate, made.key)


NONE: Any = (None, None)
CALLERS: dict[str, tuple[Callable[[Pair], Any], str]] = {
    "expired": (
        lambda pair: (issue_certificate(pair, days=-1), "ann", someone(pair)),
        "certificate, which may have expired",
    ),
    "foreign": (
        lambda pair: (other_ca(pair), "ann", someone(pair)),
        "authority that is foreign there",
    ),
    "wrong server": (
        lambda pair: (issue_certificate(pair), "eve", someone(pair)),
        "has another name than",
    ),
    "plaintext": (lambda pair: (None, None, someone(pair)), "the connection broke|closed"),
    "no certificate": (
        lambda pair: (Credentials(pair.authority.certificate, *NONE), "ann", someone(pair)),
        "it wants a certificate|this party's certificate",
    ),
    "another's name": (
        lambda pair: (pair.authority.issue_certificate("cid"), "ann", someone(pair)),
        "bob came with a certificate for 'cid'",
    ),
    "not in the session": (
        lambda pair: (pair.authority.issue_certificate("eve"), "ann", someone(pair, "eve")),
        "'eve' comes to 'ann', but this is ann, whose session is with bob",
    ),
}


def test_a_caller_without_the_right_papers_gets_nowhere(pair: Pair) -> None:
    coming = pair.come("ann")
    until_somebody_listens(pair)
    cases = [(reads, make) for make, reads in CALLERS.values()]
    call_with = lambda make: call(pair, *make(pair))  # noqa: E731
    assert list_unrefused((OSError, EOFError, RemoteProtocolError), call_with, cases) == []
    for thread in (coming, pair.come("bob")):
        thread.join()
    say_and_hear(pair)


def test_plaintext_on_loopback_is_said_to_be_insecure(pair: Pair) -> None:
    for name in pair.told:
        pair.say(name, **PLAIN)
    with pytest.warns(UnsafeChoiceWarning, match="links without TLS"):
        pair.meet()
    say_and_hear(pair)


def test_who_died_at_the_door_comes_again(pair: Pair) -> None:
    """Its newer connection counts: nobody else can prove to be it."""
    for told in pair.told.values():
        told |= TCP
    coming = pair.come("ann")
    until_somebody_listens(pair)
    known = {"ann": pair.identities["ann"].public}
    ghost = pair.stranger()
    prove_identity(
        ghost, LocalEnd(name="bob", identity=pair.identities["bob"], identity_by_peer=known), "ann"
    )
    ghost.close()
    for thread in (coming, pair.come("bob")):
        thread.join()
    say_and_hear(pair, b"again")


def test_a_frame_that_is_announced_too_large_ends_the_connection() -> None:
    theirs, ours = socket.socketpair()
    connection = SocketConnection(ours)
    connection.trust_peer()
    theirs.sendall(struct.pack(">I", MAX_FRAME_BYTES + 1))
    with pytest.raises(EOFError, match=f"sent a frame above {MAX_FRAME_BYTES} bytes"):
        connection.recv_bytes()
    stranger = SocketConnection(theirs)
    assert stranger.recv_bytes().startswith(b"refused the other end sent a frame above")
    with pytest.raises(EOFError):
        stranger.recv_bytes()


_NO_ADDRESSES = "a:\u0661,,host,:1,host:,host:0,host:65536,host:x,[]:1,[::1]"
_BARE = "::1:7001,2001:db8::7:7001,[127.0.0.1]:7001,[host]:1,[::1:1,::1"


@pytest.mark.parametrize("text", ["127.0.0.1:1", "bank.example:7001", "[::1]:7001", "[::]:65535"])
def test_an_address_is_spelt_as_it_is_read(text: str) -> None:
    assert spell_address(parse_address(text)) == text
    assert "[" not in parse_address(text)[0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        *((text, "an address is host:port") for text in _NO_ADDRESSES.split(",")),
        *((text, "an IPv6 address stands in brackets") for text in _BARE.split(",")),
    ],
)
def test_what_is_no_address_is_told(text: str, says: str) -> None:
    with pytest.raises(LocalProtocolError, match=says):
        parse_address(text)


SECRET = b"the plain text of a greeting, which is not a secret but nobody else's business"


def test_a_proxy_that_ends_tls_sees_nothing_and_changes_nothing(pair: Pair) -> None:
    proxy = pair.meet_at_a_gateway(gateway(pair))
    pair.meet()
    say_and_hear(pair, SECRET * 10)
    proxy.cut()
    say_and_hear(pair, SECRET)
    assert b"/secure_apfed.Link/Carry" in proxy.carried  # it is inside TLS, and reads HTTP/2
    assert SECRET not in proxy.carried
    pair.close()
    pair.met.clear()
    proxy.close()


def test_a_proxy_that_is_asked_to_connect(pair: Pair) -> None:
    proxy, asked = connect_proxy(parse_address(pair.address)[1])
    pair.told["bob"]["proxy"] = f"http://127.0.0.1:{proxy.port}"
    pair.meet()
    say_and_hear(pair)
    assert set(asked) == {pair.address}
    pair.close()
    pair.met.clear()
    proxy.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_parties_that_only_dial_meet_at_a_relay_that_reads_nothing(
    host: str, relay_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[bytes]()
    receive = GrpcConnection.recv_bytes

    def record_frame(connection: GrpcConnection) -> bytes:
        seen.append(frame := receive(connection))
        return frame

    monkeypatch.setattr(GrpcConnection, "recv_bytes", record_frame)
    relay_pair.meet_at_a_relay(host)
    relay_pair.meet()
    say_and_hear(relay_pair, SECRET * 30_000)
    frames = b"".join(seen)
    assert SECRET not in frames
    # What has a form would be shorter when compressed; hellos, which have one, are in the clear.
    sealed = b"".join(frame for frame in seen if len(frame) > 600)
    assert len(zlib.compress(sealed, 6)) > 0.999 * len(sealed) > 0.9 * len(frames)


def test_a_relay_that_is_started_again_changes_nothing(relay_pair: Pair) -> None:
    assert relay_pair.relay is not None
    relay_pair.meet()
    say_and_hear(relay_pair)
    relay_pair.relay.close()
    relay_pair.met["ann"].send_frame("bob", b"meanwhile")
    credentials = relay_pair.authority.issue_certificate("relay")
    relay_pair.relay = Relay(("127.0.0.1", relay_pair.relay.port), credentials)
    assert relay_pair.met["bob"].receive_frame(awaiting("bob", "ann"), LONG_S) == (
        "ann",
        b"meanwhile",
    )
    say_and_hear(relay_pair)


def enter(pair: Pair, me: LocalEnd) -> None:
    assert pair.relay is not None
    address = ("127.0.0.1", pair.relay.port)
    credentials = pair.authority.issue_certificate("anybody")
    with closing(dial(address, credentials, name="relay")) as connection:
        enter_room(connection, me, "ann", wait_s=0.5)


def test_who_is_not_of_a_room_does_not_enter_it(relay_pair: Pair) -> None:
    relay_pair.meet()
    known = {name: one.public for name, one in relay_pair.identities.items()}

    stranger = fresh_identity()
    forged = replace(stranger, public=known["bob"])  # says that it is bob
    me = LocalEnd(name="bob", identity=forged, identity_by_peer={"ann": known["ann"]})
    with pytest.raises(ConnectionRefusedError, match=r"the relay refuses .* who comes signed"):
        enter(relay_pair, me)
    eve = LocalEnd(name="eve", identity=stranger, identity_by_peer={"ann": known["ann"]})
    with pytest.raises(TimeoutError, match="did not come to the relay"):
        enter(relay_pair, eve)
    assert name_room([*known.values()]) != name_room([*known.values(), stranger.public])
    say_and_hear(relay_pair)


@contextmanager
def open_relay_stream(pair: Pair, name: str, peer: str) -> Iterator[Connection]:
    """Open a stream of one of the two at the relay, below the proof between them."""
    assert pair.relay is not None
    known = {peer: pair.identities[peer].public}
    me = LocalEnd(name=name, identity=pair.identities[name], identity_by_peer=known)
    address = ("127.0.0.1", pair.relay.port)
    with closing(dial(address, pair.credentials(name), name="relay")) as connection:
        enter_room(connection, me, peer)
        yield connection


@contextmanager
def open_joined_streams(pair: Pair) -> Iterator[tuple[Connection, Connection]]:
    """Open streams of both, which the relay joined."""
    with ThreadPoolExecutor(2) as pool, ExitStack() as stack:
        pairs = ("ann", "bob"), ("bob", "ann")
        coming = [
            pool.submit(stack.enter_context, open_relay_stream(pair, *names)) for names in pairs
        ]
        ann, bob = (one.result() for one in coming)
        ann.send_bytes(b"hello")
        assert bob.recv_bytes() == b"hello"
        yield ann, bob


def list_certificate(pair: Pair, listed: Path) -> None:
    listed.write_text(pair.credentials("bob").digest)


def list_identity(pair: Pair, listed: Path) -> None:
    listed.write_text(pair.identities["bob"].public.hex())


def remove_list(pair: Pair, listed: Path) -> None:
    listed.unlink()


def spoil_list(pair: Pair, listed: Path) -> None:
    listed.write_text("bob's")


@pytest.mark.parametrize("change", [list_certificate, list_identity, remove_list, spoil_list])
def test_a_relay_reads_its_list_again_and_ends_the_streams_of_whom_it_names(
    change: Callable[[Pair, Path], None], relay_pair: Pair
) -> None:
    with open_joined_streams(relay_pair) as (ann, bob):
        change(relay_pair, relay_pair.folder / "relay-revoked.txt")
        ann.send_bytes(b"after")
        with pytest.raises((OSError, EOFError)):
            bob.recv_bytes()
    with (
        pytest.raises(ConnectionRefusedError, match=r"by its list|what is revoked cannot be"),
        open_relay_stream(relay_pair, "bob", "ann"),
    ):
        pass


@pytest.mark.parametrize("content", [None, "bob's"])
def test_a_relay_does_not_begin_with_a_list_that_it_cannot_read(
    content: str | None, tmp_path: Path
) -> None:
    listed = tmp_path / "list.txt"
    if content is not None:
        listed.write_text(content)
    with pytest.raises(ConfigError, match=r"list\.txt"):
        Relay(("127.0.0.1", 0), None, revoked=listed)


def test_a_peer_that_is_gone_is_named_after_the_patience(pair: Pair) -> None:
    proxy = Proxy(parse_address(pair.address)[1])
    pair.peers["bob"]["ann"] = pair.peer("ann", address=f"127.0.0.1:{proxy.port}")
    for told in pair.told.values():
        told["reconnect_s"] = 2.0
    pair.meet()
    say_and_hear(pair)
    proxy.close()
    for name, peer in (("ann", "bob"), ("bob", "ann")):
        reads = rf"^training: {name} expected .*; the link to {peer} was broken for 2 s"
        with pytest.raises(PartyLeftError, match=reads) as gone:
            pair.met[name].receive_frame(awaiting(name, peer), LONG_S)
        assert gone.value.missing_parties == (peer,)


def test_both_ends_know_that_their_link_is_broken_until_it_stands_again(pair: Pair) -> None:
    way_is_open = Event()
    way_is_open.set()

    def accept(came: socket.socket) -> socket.socket:
        if not way_is_open.is_set():
            raise OSError("shut")
        return came

    proxy = Proxy(parse_address(pair.address)[1], accept=accept)
    pair.peers["bob"]["ann"] = pair.peer("ann", address=f"127.0.0.1:{proxy.port}")
    pair.meet()
    say_and_hear(pair)
    assert [met.list_broken_links() for met in pair.met.values()] == [{}, {}]
    way_is_open.clear()
    proxy.cut()
    for name, peer in (("ann", "bob"), ("bob", "ann")):
        met = pair.met[name]
        wait_until(lambda: met.list_broken_links(), f"that {name} knows it")  # noqa: B023 - at once
        assert met.list_broken_links().keys() == {peer}
        assert met.list_broken_links()[peer].why
    way_is_open.set()
    for met in pair.met.values():
        wait_until(lambda: not met.list_broken_links(), "that it is back")  # noqa: B023 - at once
    say_and_hear(pair)
    pair.close()
    proxy.close()


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("relay", [False, True])
def test_who_left_is_found_once_it_waits_and_meets_in_the_next_session(
    relay: bool, tmp_path: Path
) -> None:
    pair = Pair(tmp_path, relay=relay)
    pair.meet()
    say_and_hear(pair)
    pair.met.pop("bob").close()
    assert pair.met["ann"].find_rejoining(["bob"]) == []
    coming = pair.come("bob")  # who may only dial
    wait_until(lambda: pair.met["ann"].find_rejoining(["bob"]), "that bob was found")
    pair.met["ann"].send_frame("bob", b"is not sent")
    assert coming.is_alive()  # it has met nobody by that
    pair.met.pop("ann").close()
    pair.come("ann").join()
    coming.join()
    say_and_hear(pair)
    pair.close()


# Strangers who say anything

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
REFUSED = (OSError, EOFError, RemoteProtocolError)


@pytest.fixture(params=["port", "relay", "tcp"])
def plain(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    """Without TLS, so that strangers get as far as they can."""
    made = Pair(tmp_path, relay=request.param == "relay")
    if made.relay is not None:
        made.relay.close()
        made.relay = Relay(("127.0.0.1", 0), None)
        made.address = f"127.0.0.1:{made.relay.port}"
    for told in made.told.values():
        told |= PLAIN
        told |= {"relay": made.address} if made.relay is not None else {}
        told |= {"link": "tcp"} if request.param == "tcp" else {}
    yield made
    made.close()


def hellos() -> list[bytes]:
    """Return what somebody may say who would like to get in."""
    key = os.urandom(32)
    other = fresh_identity()
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
    with closing(pair.stranger()) as connection, suppress(*REFUSED):
        for frame in frames:
            connection.send_bytes(frame)
        if connection.poll(0.05):
            connection.recv_bytes()


def shout(pair: Pair, data: bytes) -> None:
    """Bytes at the port itself."""
    address = parse_address(pair.address)
    with socket.create_connection(address, timeout=5) as stranger, suppress(OSError):
        stranger.sendall(data)
        stranger.settimeout(0.01)
        stranger.recv(1024)


@contextmanager
def busy(pair: Pair) -> Iterator[list[bytes]]:
    """Honest talk all the while; what was said and heard."""
    ended, exchanges = threading.Event(), list[bytes]()

    def go_on() -> None:
        while not ended.wait(0.02):
            body = os.urandom(1000)
            say_and_hear(pair, body)
            exchanges.append(body)

    thread = Thread(target=go_on)
    thread.start()
    try:
        yield exchanges
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("frames", [300, pytest.param(5000, marks=pytest.mark.slow)])
def test_mutated_frames_leave_honest_peers_unaffected(frames: int, plain: Pair) -> None:
    plain.meet()
    before = {name: vars(one)["_link_by_peer"] for name, one in plain.met.items()}
    wires = {
        name: [vars(link)["_wire"] for link in links.values()] for name, links in before.items()
    }
    chance = random.Random(15)
    with busy(plain) as exchanges:
        for number in range(frames // 5):
            genuine = hellos()
            talk(
                plain,
                [mutate_bytes(chance, genuine[number % len(genuine)]), *genuine[: number % 3]],
            )
        for number in range(frames - frames // 5):
            body = PREFACE + SETTINGS + chance.randbytes(60)
            shout(plain, mutate_bytes(chance, body if number % 4 else hellos()[0]))
    assert exchanges
    for name, links in before.items():
        assert [vars(link)["_wire"] for link in links.values()] == wires[name]


def receive_until_closed(connection: Carrier) -> None:
    """Receive until the peer closes; a relay may say something first."""
    while True:
        receive_before(connection, time.monotonic() + LONG_S)


def test_of_a_stranger_no_long_frame_is_taken(plain: Pair) -> None:
    coming = plain.come("ann")
    until_somebody_listens(plain)
    for size in (MAX_UNPROVED_FRAME_BYTES + 1, MAX_FRAME_BYTES):
        with closing(plain.stranger()) as connection:
            connection.send_bytes(bytes(size))
            with pytest.raises(ConnectionRefusedError, match="above 4096 bytes before it proved"):
                receive_until_closed(connection)
    for thread in (coming, plain.come("bob")):
        thread.join()
    say_and_hear(plain, bytes(MAX_FRAME_BYTES))


class _Counted(socket.socket):
    """It counts the bytes that came, and those that had come when it was shut."""

    came = came_before = 0

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        chunk = super().recv(size, flags)
        self.came += len(chunk)
        return chunk

    def shutdown(self, how: int, /) -> None:
        if how == socket.SHUT_RDWR:
            self.came_before = self.came
        super().shutdown(how)


def test_who_is_refused_a_long_frame_can_send_it_to_its_end_and_read_why() -> None:
    """Over TCP: what comes to a socket that is closed already resets it, and is an error there."""
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor() as pool:
        dialled = socket.create_connection(listening.getsockname())
        with closing(_Counted(fileno=listening.accept()[0].detach())) as wire, closing(dialled):
            refused = pool.submit(SocketConnection(wire).recv_bytes)
            dialled.sendall(MAX_FRAME_BYTES.to_bytes(4, "big"))
            said = dialled.recv(4096)
            dialled.sendall(bytes(MAX_FRAME_BYTES))
            assert not dialled.recv(4096)
            with pytest.raises(EOFError, match="above 4096 bytes before it proved who it is"):
                refused.result(timeout=LONG_S)
            assert wire.came_before == 4 + MAX_FRAME_BYTES
    assert b"above 4096 bytes before it proved who it is" in said


def test_of_a_stranger_one_frame_waits() -> None:
    read, connection = list[int](), GrpcConnection()

    def pieces() -> Iterator[bytes]:
        for number in range(100):
            read.append(number)
            yield b"\0" + bytes(MAX_UNPROVED_FRAME_BYTES)

    Thread(target=connection.receive_pieces, args=(pieces(),), daemon=True).start()
    for got in range(1, 51):
        assert connection.recv_bytes() == bytes(MAX_UNPROVED_FRAME_BYTES)
        assert len(read) <= got + 2  # one waits, one is in the hands of who brings it
    connection.trust_peer()
    for got in range(51, 101):
        assert connection.recv_bytes() == bytes(MAX_UNPROVED_FRAME_BYTES)
        assert len(read) <= got + 5
    connection.close()


def was_sent_away(one: Carrier) -> bool:
    while one.poll(0.0):
        try:
            one.recv_bytes()
        except (OSError, EOFError):
            return True
    return False


@pytest.mark.sampled(every=3)
def test_a_crowd_of_silent_strangers_keeps_nobody_out(plain: Pair) -> None:
    coming = plain.come("ann")
    until_somebody_listens(plain)
    crowd = [plain.stranger() for _ in range(150)]
    wait_until(lambda: any(map(was_sent_away, crowd)), "that a stranger went for another")
    for thread in (coming, plain.come("bob")):
        thread.join()
    say_and_hear(plain)
    for one in crowd:
        one.close()

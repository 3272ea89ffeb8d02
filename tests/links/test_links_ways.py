"""What lies between two parties: proxies, a relay, silence. Nothing is read or changed."""

import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from apfed_protocols.errors import PartyLeftError
from apfed_protocols.seal import fresh_identity
from secure_apfed.between.grpc_link import GrpcConnection, dial
from secure_apfed.between.relay import Relay, room_of, through
from secure_apfed.exchange.sealed_connection import LocalEnd
from secure_apfed.exchange.sockets import parse_address
from tests.links.pair import Pair, awaiting, gateway, say_and_hear
from tests.links.proxies import Proxy, connect_proxy
from tests.waiting import LONG_S, wait_until


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.close()


@pytest.fixture
def relayed(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path, relay=True)
    yield made
    made.close()


SECRET = b"the plain text of a greeting, which is not a secret but nobody else's business"


def test_a_proxy_that_ends_tls_sees_nothing_and_changes_nothing(pair: Pair) -> None:
    proxy = pair.meet_at_a_gateway(gateway(pair))
    pair.meet()
    say_and_hear(pair, SECRET * 10)
    proxy.cut()
    say_and_hear(pair, SECRET)
    assert b"/secure_apfed.Link/Carry" in proxy.carried  # it is inside TLS, and reads HTTP/2
    assert SECRET not in proxy.carried
    proxy.close()


def test_a_proxy_that_is_asked_to_connect(pair: Pair) -> None:
    with connect_proxy() as (port, asked):
        pair.told["bob"]["proxy"] = f"http://127.0.0.1:{port}"
        pair.meet()
        say_and_hear(pair)
        assert set(asked) == {pair.address}
        pair.close()
        pair.met.clear()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_parties_that_only_dial_meet_at_a_relay_that_reads_nothing(
    host: str, relayed: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, receive = list[bytes](), GrpcConnection.recv_bytes

    def recorded(connection: GrpcConnection) -> bytes:
        seen.append(frame := receive(connection))
        return frame

    monkeypatch.setattr(GrpcConnection, "recv_bytes", recorded)
    relayed.meet_at_a_relay(host)
    relayed.meet()
    say_and_hear(relayed, SECRET * 30_000)
    frames = b"".join(seen)
    assert SECRET not in frames
    # What has a form would be shorter when compressed; hellos, which have one, are in the clear.
    sealed = b"".join(frame for frame in seen if len(frame) > 600)
    assert len(zlib.compress(sealed, 6)) > 0.999 * len(sealed) > 0.9 * len(frames)


def test_a_relay_that_is_started_again_changes_nothing(relayed: Pair) -> None:
    assert relayed.relay is not None
    relayed.meet()
    say_and_hear(relayed)
    relayed.relay.close()
    relayed.met["ann"].post("bob", b"meanwhile")
    credentials = relayed.authority.issue("relay")
    relayed.relay = Relay(("127.0.0.1", relayed.relay.port), credentials)
    assert relayed.met["bob"].take(awaiting("bob", "ann"), LONG_S) == ("ann", b"meanwhile")
    say_and_hear(relayed)


def enter(pair: Pair, me: LocalEnd) -> None:
    assert pair.relay is not None
    connection = dial(("127.0.0.1", pair.relay.port), pair.authority.issue("anybody"), name="relay")
    try:
        through(connection, me, "ann", wait_s=0.5)
    finally:
        connection.close()


def test_who_is_not_of_a_room_does_not_enter_it(relayed: Pair) -> None:
    relayed.meet()
    known = {name: one.public for name, one in relayed.identities.items()}

    stranger = fresh_identity()
    forged = replace(stranger, public=known["bob"])  # says that it is bob
    me = LocalEnd(name="bob", identity=forged, known={"ann": known["ann"]})
    with pytest.raises(ConnectionRefusedError, match=r"the relay refuses .* who comes signed"):
        enter(relayed, me)
    eve = LocalEnd(name="eve", identity=stranger, known={"ann": known["ann"]})
    with pytest.raises(TimeoutError, match="did not come to the relay"):
        enter(relayed, eve)
    assert room_of([*known.values()]) != room_of([*known.values(), stranger.public])
    say_and_hear(relayed)


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
            pair.met[name].take(awaiting(name, peer), LONG_S)
        assert gone.value.left == (peer,)


@pytest.mark.parametrize("relay", [False, True])
def test_who_left_is_found_once_it_waits_and_meets_in_the_next_session(
    relay: bool, tmp_path: Path
) -> None:
    pair = Pair(tmp_path, relay=relay)
    pair.meet()
    say_and_hear(pair)
    pair.met.pop("bob").close()
    assert pair.met["ann"].returned(["bob"]) == []
    coming = pair.come("bob")  # who may only dial
    wait_until(lambda: pair.met["ann"].returned(["bob"]), "that bob was found")
    pair.met["ann"].post("bob", b"is not sent")
    assert coming.is_alive()  # it has met nobody by that
    pair.met.pop("ann").close()
    pair.come("ann").join()
    coming.join()
    say_and_hear(pair)
    pair.close()


@pytest.mark.slow
@pytest.mark.parametrize("relay", [False, True])
def test_an_idle_link_of_a_minute_lives(relay: bool, tmp_path: Path) -> None:
    made = Pair(tmp_path, relay=relay)
    made.meet()
    say_and_hear(made)
    links = [
        vars(made.met[name])["_links"][peer] for name, peer in (("ann", "bob"), ("bob", "ann"))
    ]
    wires = [vars(link)["_wire"] for link in links]
    time.sleep(65)
    for link, wire in zip(links, wires, strict=True):
        assert vars(link)["_wire"] is wire  # not even made anew
    say_and_hear(made)
    made.close()

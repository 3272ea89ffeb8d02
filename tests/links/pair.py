"""Two parties of one trial, ann who listens and bob who dials, and proxies between."""

import contextlib
import socket
import ssl
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from apfed_protocols.seal import Identity, fresh_identity
from secure_apfed.exchange import Awaited, Kind, Transport, sockets
from secure_apfed.exchange.certificates import Authority, Credentials, make_authority
from secure_apfed.exchange.grpc_link import dial
from secure_apfed.exchange.relay import Relay
from secure_apfed.exchange.sealed_connection import Carrier
from secure_apfed.exchange.sockets import parse_address, spell_address
from secure_apfed.organisations.local import find_free_addresses
from secure_apfed.organisations.party import PartyFile, Peer, Tls, connect_peers
from tests.waiting import LONG_S, wait_until

_CHUNK = 65536
_HOST = "127.0.0.1"


class Proxy:
    """Carries bytes to another port, and may cut.

    Args:
        port: where to carry them; cut_after: bytes after which all connections are cut, in turn.
        accept: makes a connection of what comes; reach: one to the port.
    """

    def __init__(
        self,
        port: int,
        *,
        cut_after: tuple[int, ...] = (),
        accept: Callable[[socket.socket], socket.socket] = lambda came: came,
        reach: Callable[[socket.socket], socket.socket] = lambda made: made,
    ) -> None:
        self._target = port
        self._accept = accept
        self._reach = reach
        self._left = list(cut_after)
        self.cuts = 0
        self.carried = bytearray()
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener = socket.create_server((_HOST, 0), backlog=64)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._listen, daemon=True).start()

    def cut(self) -> None:
        """End all connections now."""
        with self._lock:
            standing = self._open
            self._open = set()
        for one in standing:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # whoever waits for a call wakes up
        self._listener.close()
        self.cut()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                came, _ = self._listener.accept()
                threading.Thread(target=self._join, args=(came,), daemon=True).start()

    def _join(self, came: socket.socket) -> None:
        here = there = came
        try:
            here = self._accept(came)
            there = socket.create_connection((_HOST, self._target), 5)
            there = self._reach(there)
        except OSError:
            for one in (came, here, there):
                one.close()
            return
        there.settimeout(None)
        with self._lock:
            self._open |= {here, there}
        with here, there:
            back = threading.Thread(target=self._carry, args=(there, here), daemon=True)
            back.start()
            self._carry(here, there)
            back.join()
            with self._lock:
                self._open -= {here, there}

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while chunk := one.recv(_CHUNK):
                self._count(chunk)
                other.sendall(chunk)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _count(self, chunk: bytes) -> None:
        with self._lock:
            self.carried += chunk
            due = bool(self._left) and len(self.carried) >= self._left[0]
            if due:
                self._left.pop(0)
                self.cuts += 1
        if due:
            self.cut()
            raise OSError("cut")


def tls_proxy(port: int, ca: str, certificate: str, key: str) -> Proxy:
    """One that ends TLS on both sides, as a company's gateway does, and sees what is inside."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    for context in (server, client):
        context.load_cert_chain(certificate, key)
        context.load_verify_locations(ca)
        context.set_alpn_protocols(["h2"])
    return Proxy(
        port,
        accept=lambda came: server.wrap_socket(came, server_side=True),
        reach=client.wrap_socket,
    )


def connect_proxy(port: int) -> tuple[Proxy, list[str]]:
    """One that is asked to CONNECT to that port, and whither it was asked."""
    asked = list[str]()

    def accept(came: socket.socket) -> socket.socket:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += came.recv(1) or b"\r\n\r\n"
        asked.append(head.split(b" ")[1].decode())
        came.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        return came

    return Proxy(port, accept=accept), asked


class Pair:
    """Files of ann and bob; change what is to be wrong, and let them meet.

    Attributes:
        identities: by name; told: what each file says beside the usual.
    """

    def __init__(self, folder: Path, *, relay: bool = False) -> None:
        self.folder = folder
        self.authority = make_authority()
        self.identities: dict[str, Identity] = {name: fresh_identity() for name in ("ann", "bob")}
        (self.address,) = find_free_addresses(1)
        self.told: dict[str, dict[str, Any]] = {}
        self.met: dict[str, Transport] = {}
        self.failed: dict[str, BaseException] = {}
        self.missed = defaultdict[str, list[Mapping[str, str]]](list)
        self.relay: Relay | None = None
        for name in ("ann", "bob"):
            self.told[name] = {"tls": self.certify(name), "meet_s": LONG_S, "reconnect_s": 30.0}
        self.peers = {"ann": {"bob": self.peer("bob")}, "bob": {"ann": self.peer("ann")}}
        if relay:
            self.meet_at_a_relay("127.0.0.1")
        else:
            self.listen_at("127.0.0.1")

    def listen_at(self, host: str) -> None:
        """Let ann listen at this host, as addresses spell it."""
        self.address = f"{host}:{self.address.rpartition(':')[2]}"
        self.told["ann"]["listen"] = self.address
        self.peers["bob"]["ann"] = self.peer("ann", address=self.address)

    def meet_at_a_relay(
        self, host: str, allowed: frozenset[bytes] | None = None, *, refused: Sequence[str] = ()
    ) -> None:
        """Let both dial a relay at this host, whose list names those that are `refused`."""
        if self.relay is not None:
            self.relay.close()
        listed = self.folder / "relay-revoked.txt"
        listed.write_text("".join(f"{entry}\n" for entry in refused))
        own = self.authority.issue_certificate("relay")
        self.relay = Relay((host, 0), own, allowed, revoked=listed)
        for told in self.told.values():
            told["relay"] = spell_address((host, self.relay.port))

    def meet_at_no_relay(self) -> None:
        """Let both dial a relay that has ended."""
        self.meet_at_a_relay("127.0.0.1")
        assert self.relay is not None
        self.relay.close()

    def meet_at_a_gateway(self, gateway: Any, *, ann_knows: bool = True) -> Any:
        """Let bob reach ann through something that ends TLS at its port; return that."""
        there = self.peer("ann", address=f"localhost:{gateway.port}", behind_proxy=True)
        self.peers = {
            "ann": {"bob": self.peer("bob", behind_proxy=ann_knows)},
            "bob": {"ann": there},
        }
        return gateway

    def peer(self, name: str, **told: Any) -> Peer:
        return Peer(identity=self.identities[name].public.hex(), **told)

    def certify(
        self, name: str, *, by: Authority | None = None, as_name: str | None = None, **how: Any
    ) -> Tls:
        """Write the files of a certificate; return where they lie."""
        made = (by or self.authority).issue_certificate(as_name or name, **how)
        return self.keep(name, made)

    def say(self, name: str, **told: Any) -> None:
        """Let a party's file say this."""
        self.told[name].update(told)

    def show(self, name: str, **how: Any) -> None:
        """Let a party show another certificate; see `certify`."""
        self.say(name, tls=self.certify(name, **how))

    def keep(self, name: str, made: Credentials) -> Tls:
        files = {}
        for kind, content in (
            ("ca", made.ca),
            ("certificate", made.certificate),
            ("key", made.key),
        ):
            files[kind] = self.folder / f"{name}-{kind}.pem"
            files[kind].write_bytes(content)
        return Tls(**files)

    def credentials(self, name: str) -> Credentials:
        tls = self.told[name]["tls"]
        parts = [path.read_bytes() for path in (tls.ca, tls.certificate, tls.key)]
        return Credentials(*parts)

    def revoke(self, at: str, *entries: str) -> None:
        path = self.folder / f"{at}-revoked.txt"
        path.write_text("# lost\n" + "\n".join(entries) + "\n")
        self.told[at]["tls"] = self.told[at]["tls"].model_copy(update={"revoked": path})

    def file(self, name: str) -> PartyFile:
        return PartyFile(
            party=name,
            active="ann",
            passives=("bob",),
            config=Path("run.yaml"),
            peers=self.peers[name],
            **{"link": "grpc", **self.told[name]},
        )

    def connect(self, name: str) -> Transport:
        known = {peer: bytes.fromhex(one.identity) for peer, one in self.peers[name].items()}
        return connect_peers(
            self.file(name), self.identities[name], known, self.missed[name].append
        )

    def stranger(self) -> Carrier:
        """A connection to where they meet, of somebody without a certificate."""
        address = parse_address(self.address)
        over_tcp = self.told["ann"].get("link") == "tcp"
        return sockets.dial(address) if over_tcp else dial(address, None, name=None)

    def come(self, name: str) -> threading.Thread:
        def meet() -> None:
            try:
                self.met[name] = self.connect(name)
            except BaseException as error:  # noqa: BLE001 - the test reads it
                self.failed[name] = error

        thread = threading.Thread(target=meet)
        thread.start()
        return thread

    def meet(self, *, within_s: float | None = None) -> None:
        """Let both come; `within_s`: how long they look for each other, where they are to fail."""
        for told in self.told.values() if within_s else ():
            told["meet_s"] = within_s
        for thread in [self.come(name) for name in ("ann", "bob")]:
            thread.join()

    def close(self) -> None:
        closing = [threading.Thread(target=one.close) for one in self.met.values()]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
        if self.relay is not None:
            self.relay.close()


def gateway(pair: Pair) -> Proxy:
    """One that ends TLS before ann, with a certificate of the trial's."""
    tls = pair.certify("gateway", as_name="localhost")
    port = parse_address(pair.address)[1]
    return tls_proxy(port, str(tls.ca), str(tls.certificate), str(tls.key))


def awaiting(me: str, *senders: str) -> Awaited:
    return Awaited(me=me, senders=senders, kinds=(Kind.SUM,), step=3)


def say_and_hear(pair: Pair, body: bytes = b"hello") -> None:
    """One message each way."""
    assert not pair.failed
    for one, other in (("ann", "bob"), ("bob", "ann")):
        pair.met[one].send_frame(other, body)
        assert pair.met[other].receive_frame(awaiting(other, one), LONG_S) == (one, body)


def until_somebody_listens(pair: Pair) -> None:
    def listens() -> bool:
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection(parse_address(pair.address)).close()
            return True
        return False

    wait_until(listens, f"that somebody listens at {pair.address}")

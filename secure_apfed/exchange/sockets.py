"""One party's sockets to its peers: frames over TCP between processes of one machine.

Run by: the driver of one role (`drivers.play_one`), with one connection for each peer. Who dials
proves its identity to who listens, so nobody else takes its place; everything beyond that (who
listens, what is said) is proved by the signed contract and the seals of the links above. Whoever
runs on the machine can still see who writes to whom, when and how much. A connection that breaks is
a peer that left; links between machines need more than that.
"""

import contextlib
import itertools
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping
from ipaddress import IPv6Address
from typing import Self

import msgpack

from apfed_protocols.errors import LocalProtocolError, PartyLeftError, RemoteProtocolError
from apfed_protocols.randomness import fresh_key
from apfed_protocols.seal import SIGNATURE_BYTES, Identity, verify
from secure_apfed.exchange.links import Awaited, Frame
from secure_apfed.exchange.silence import Silence

__all__ = ["Address", "Sockets", "listen_at", "parse_address", "spell_address"]

Address = tuple[str, int]
"""Host and port."""

_LENGTH = struct.Struct(">I")
_MOST_FRAME = 2**30
_MOST_HELD = 2**28  # bytes of a peer that nobody has asked for yet; then TCP holds it back
_MOST_UNSENT = 2**28  # bytes for a peer that does not read; then the sender waits
_STALLED_S = 300.0
_FRAME_COST = 256
_CHUNK = 2**20
_CHALLENGE_BYTES = 32
_WELCOME = b"+"
_PURPOSE = b"connection v1"
_HELLO_BYTES = 256
_MOST_STRANGERS = 64
_PAUSE_S = 0.05
_KNOCK_S = 1.0
_FLUSH_S, _LINGER_S = 5.0, 2.0


def listen_at(address: Address) -> socket.socket:
    """Listen for peers.

    Raises:
        OSError: the address is in use, or not this machine's.
    """
    host, port = address
    families = {one[0] for one in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    family = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
    everywhere = host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(
        address, family=family, backlog=_MOST_STRANGERS, dualstack_ipv6=everywhere
    )


def _listens(address: Address) -> bool:
    try:
        socket.create_connection(address, timeout=_KNOCK_S).close()
    except OSError:
        return False
    return True


class Sockets:
    """Connections to all peers; see `secure_apfed.exchange.drivers.Transport`.

    Args:
        me: the party.
        connections: by peer, open.
        addresses: by peer, where those listen that wait for a session.
    """

    def __init__(
        self, me: str, connections: Mapping[str, socket.socket],
        addresses: Mapping[str, Address] | None = None,
    ) -> None:  # fmt: skip
        self._me, self._addresses = me, addresses or {}
        self._selector = selectors.DefaultSelector()
        self._peers = {name: _Peer(name, one) for name, one in connections.items()}
        for peer in self._peers.values():
            self._selector.register(peer.socket, selectors.EVENT_READ, peer)
        self._arrivals = itertools.count()
        self._silence = Silence(lambda name: self._peers[name].closed)

    @classmethod
    def meet(
        cls,
        me: str,
        listener: socket.socket,
        addresses: Mapping[str, Address],
        *,
        identity: Identity,
        known: Mapping[str, bytes],
        timeout_s: float,
    ) -> Self:
        """Connect to all peers: this party dials those before it by name, the others dial it.

        Args:
            me: the party.
            listener: where it listens.
            addresses: by peer.
            identity: its key pair.
            known: public identities, by party.
            timeout_s: how long to wait for all of them.

        Raises:
            PartyLeftError: names those who did not come.
        """
        deadline = time.monotonic() + timeout_s
        dialled = sorted(name for name in addresses if name < me)
        awaited = {name: known[name] for name in addresses if name > me}
        connections: dict[str, socket.socket] = {}
        try:
            for name in dialled:
                connections[name] = _dial(me, name, addresses[name], identity, deadline)
            connections |= _Door(me, listener, awaited).open(deadline)
        except BaseException:
            for connection in connections.values():
                connection.close()
            raise
        finally:
            listener.close()
        return cls(me, connections, addresses)

    def post(self, receiver: str, frame: bytes) -> None:
        """Send a frame; whether it arrives shows in what comes back.

        Where much waits for this peer already, it is let take some of that first; what others send
        is read meanwhile, so that two who send to each other both go on.
        """
        peer = self._peers[receiver]
        peer.write(_LENGTH.pack(len(frame)) + frame)
        left, stalled = peer.unsent, time.monotonic() + _STALLED_S
        while (unsent := peer.unsent) > _MOST_UNSENT:
            if unsent < left:
                left, stalled = unsent, time.monotonic() + _STALLED_S
            elif time.monotonic() > stalled:
                peer.give_up(f"{receiver} took nothing of what it was sent for {_STALLED_S:g} s")
            self._read(_PAUSE_S)

    def take(self, awaited: Awaited, timeout_s: float) -> Frame:
        """Wait for a frame of one of the awaited.

        Raises:
            PartyLeftError: too few of them are connected still, or nothing came in time.
        """
        deadline = time.monotonic() + timeout_s
        self._read(0.0)
        while True:
            waiting = [one for name in awaited.senders if (one := self._peers[name]).inbox]
            if waiting:
                first = min(waiting, key=lambda peer: peer.inbox[0][0])
                return first.name, self._hand_over(first)
            self._read(self._silence.bear(awaited, timeout_s, deadline=deadline))

    def returned(self, names: Collection[str]) -> list[str]:
        """Those at whose address somebody listens; who it is shows when the parties meet."""
        found = {name: self._addresses[name] for name in names if name in self._addresses}
        return [name for name, address in found.items() if _listens(address)]

    def _read(self, timeout_s: float) -> None:
        """Read what there is, and wait for something where there is nothing."""
        for key, _ in self._selector.select(timeout_s):
            peer: _Peer = key.data
            for frame in peer.read():
                peer.inbox.append((next(self._arrivals), frame))
                peer.held += len(frame) + _FRAME_COST
            if peer.closed or peer.held > _MOST_HELD:
                self._selector.unregister(peer.socket)

    def _hand_over(self, peer: "_Peer") -> bytes:
        """The oldest frame of this peer; where it was held back, it may go on."""
        _, frame = peer.inbox.popleft()
        full = peer.held > _MOST_HELD
        peer.held -= len(frame) + _FRAME_COST
        if full and peer.held <= _MOST_HELD and not peer.closed:
            self._selector.register(peer.socket, selectors.EVENT_READ, peer)
        return frame

    def close(self) -> None:
        """Let the peers have what was sent, and end; waits a few seconds at most."""
        deadline = time.monotonic() + _FLUSH_S
        for peer in self._peers.values():
            peer.flush(deadline)
        # Whoever closes with unread bytes resets the connection, and what it sent may be lost.
        deadline = time.monotonic() + _LINGER_S
        while time.monotonic() < deadline and self._selector.get_map():
            for key, _ in self._selector.select(deadline - time.monotonic()):
                key.data.read()
                if key.data.closed:
                    self._selector.unregister(key.data.socket)
        for peer in self._peers.values():
            peer.socket.close()
        self._selector.close()


class _Peer:
    """One connection: frames out of bytes, and a thread for what could not be sent at once.

    Attributes:
        closed: why nothing more comes; empty while something may.
        inbox: frames that came and were not asked for yet, by number of arrival.
        held: what these take in memory, about, in bytes.
    """

    def __init__(self, name: str, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.name, self.socket = name, connection
        self.closed, self.held = "", 0
        self.inbox: deque[tuple[int, bytes]] = deque()
        self._buffer = bytearray()
        self._changed = threading.Condition()
        self._unsent: deque[memoryview] = deque()
        self._left = 0
        self._writing = self._broken = False

    @property
    def unsent(self) -> int:
        """Bytes that wait for the system to take them; 0 once it never will."""
        return 0 if self._broken else self._left

    def read(self) -> list[bytes]:
        """The frames that are complete now."""
        try:
            while chunk := self.socket.recv(_CHUNK):
                self._buffer += chunk
                if len(self._buffer) > _CHUNK:
                    break
            else:
                self.closed = f"{self.name} closed its link"
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self.closed = f"the link to {self.name} broke ({error.strerror or error})"
        return list(self._frames())

    def _frames(self) -> "list[bytes]":
        found, at = [], 0
        while len(self._buffer) - at >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer, at)
            if size > _MOST_FRAME:
                self.closed = f"{self.name} announced a frame of {size} bytes, above {_MOST_FRAME}"
                break
            if len(self._buffer) - at - _LENGTH.size < size:
                break
            at += _LENGTH.size
            found.append(bytes(memoryview(self._buffer)[at : at + size]))
            at += size
        del self._buffer[:at]
        return found

    def write(self, data: bytes) -> None:
        """Send what the system takes at once; a thread sends the rest."""
        with self._changed:
            if self._broken:
                return
            view = memoryview(data)
            if not self._unsent:
                view = view[self._send(view) :]
            if view and not self._broken:
                self._unsent.append(view)
                self._left += len(view)
                self._changed.notify_all()
                if not self._writing:
                    self._writing = True
                    threading.Thread(target=self._write_on, daemon=True).start()

    def _send(self, view: memoryview) -> int:
        """Bytes that the system took; 0 where it takes none now."""
        try:
            return self.socket.send(view)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            self._broken = True  # reading finds out why
            return 0

    def _write_on(self) -> None:
        with selectors.DefaultSelector() as selector, contextlib.suppress(ValueError, OSError):
            selector.register(self.socket, selectors.EVENT_WRITE)
            while not self._broken:
                with self._changed:
                    self._changed.wait_for(lambda: self._unsent or self._broken)
                selector.select()
                with self._changed:
                    while self._unsent and not self._broken:
                        sent = self._send(self._unsent[0])
                        self._left -= sent
                        if sent < len(self._unsent[0]):
                            self._unsent[0] = self._unsent[0][sent:]
                            break
                        self._unsent.popleft()
                    self._changed.notify_all()

    def give_up(self, why: str) -> None:
        """Keep nothing for it any more, and say why nothing comes."""
        with self._changed:
            self.closed, self._broken = self.closed or why, True
            self._unsent.clear()
            self._changed.notify_all()

    def flush(self, deadline: float) -> None:
        """Wait until everything is with the system, or time is up; then say that no more comes."""
        with self._changed:
            self._changed.wait_for(
                lambda: not self._unsent or self._broken, max(0.0, deadline - time.monotonic())
            )
            self._broken = True
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)


def _dial(
    me: str, peer: str, address: Address, identity: Identity, deadline: float
) -> socket.socket:
    """Connect to who listens there, and prove who dials."""
    why, sent_away = "it closed at once", ""
    while (left := deadline - time.monotonic()) > 0:
        try:
            connection = socket.create_connection(address, timeout=left)
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or str(error)
            time.sleep(_PAUSE_S)
            continue
        try:
            connection.settimeout(left)
            challenge = connection.recv(_CHALLENGE_BYTES, socket.MSG_WAITALL)
            if len(challenge) == _CHALLENGE_BYTES:
                signature = identity.sign(_PURPOSE, challenge, me.encode(), peer.encode())
                hello = msgpack.packb([me, signature])
                connection.sendall(_LENGTH.pack(len(hello)) + hello)
                if connection.recv(len(_WELCOME)) == _WELCOME:
                    return connection
                sent_away = f"it sent {me} away: its file names another key for {me}"
        except OSError as error:
            why = error.strerror or str(error)
        connection.close()
        time.sleep(_PAUSE_S)
    raise PartyLeftError(
        f"agreement: {me} reached nobody as {peer} at {spell_address(address)} "
        f"({sent_away or why}); start {peer}, or correct its address",
        left=(peer,),
    )


class _Door:
    """Where the peers come in that dial: strangers wait there until they have proved who they are.

    Args:
        me: whose door; listener: open.
        awaited: public identities of those who are to come, by name.
    """

    def __init__(self, me: str, listener: socket.socket, awaited: Mapping[str, bytes]) -> None:
        self._me, self._listener, self._awaited = me, listener, dict(awaited)
        self._strangers: dict[socket.socket, tuple[bytes, bytearray]] = {}
        self._came: dict[str, socket.socket] = {}
        self._unproved: set[str] = set()

    def open(self, deadline: float) -> dict[str, socket.socket]:
        """Wait for all of them; connections by name.

        Raises:
            PartyLeftError: names those who did not come.
        """
        self._listener.setblocking(False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while missing := [name for name in self._awaited if name not in self._came]:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self._too_late(missing)
                for key, _ in selector.select(left):
                    if key.fileobj is self._listener:
                        self._let_in(selector)
                    elif isinstance(key.fileobj, socket.socket):
                        self._hear(selector, key.fileobj)
        for stranger in self._strangers:
            stranger.close()
        return self._came

    def _too_late(self, missing: list[str]) -> PartyLeftError:
        for connection in (*self._strangers, *self._came.values()):
            connection.close()
        unproved = [name for name in missing if name in self._unproved]
        told = (
            f"; somebody came as {' and '.join(unproved)} with another key than the one in the "
            f"file of {self._me}: correct that, if it was right"
        )
        return PartyLeftError(
            f"agreement: {' and '.join(missing)} did not come to {self._me} in time; start it, or "
            f"correct the address of {self._me} in its file{told if unproved else ''}",
            left=tuple(missing),
        )

    def _let_in(self, selector: selectors.BaseSelector) -> None:
        with contextlib.suppress(OSError):
            stranger, _ = self._listener.accept()
            if len(self._strangers) >= _MOST_STRANGERS:
                self._send_away(selector, next(iter(self._strangers)))  # who waited longest
            stranger.setblocking(False)
            challenge = fresh_key()
            stranger.send(challenge)
            self._strangers[stranger] = challenge, bytearray()
            selector.register(stranger, selectors.EVENT_READ)

    def _hear(self, selector: selectors.BaseSelector, stranger: socket.socket) -> None:
        challenge, said = self._strangers[stranger]
        try:
            # No further than its hello: what follows belongs to the session.
            chunk = stranger.recv(_LENGTH.size + _size_of(said) - len(said))
            said += chunk
            if not chunk or _size_of(said) > _HELLO_BYTES:
                raise RemoteProtocolError("no hello")
            if len(said) >= _LENGTH.size and len(said) == _LENGTH.size + _size_of(said):
                self._admit(selector, stranger, challenge, bytes(said[_LENGTH.size :]))
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, RemoteProtocolError):
            self._send_away(selector, stranger)

    def _admit(
        self, selector: selectors.BaseSelector, stranger: socket.socket, challenge: bytes,
        hello: bytes,
    ) -> None:  # fmt: skip
        """Take a stranger for the party whose identity it proved.

        Raises:
            RemoteProtocolError: it proved none, or that of somebody who is here already.
        """
        try:
            name, signature = msgpack.unpackb(hello)
            public = self._awaited[name]
            if type(signature) is not bytes or len(signature) != SIGNATURE_BYTES:
                raise TypeError("no signature")
        except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
            raise RemoteProtocolError("no hello of anybody who is awaited") from error
        parts = (challenge, name.encode(), self._me.encode())
        self._unproved.add(name)
        verify(public, signature, _PURPOSE, *parts, signer=name)
        self._unproved.discard(name)
        stranger.send(_WELCOME)
        selector.unregister(stranger)
        del self._strangers[stranger]
        if name in self._came:  # it was killed since, or gave up, and came again
            self._came[name].close()
        self._came[name] = stranger

    def _send_away(self, selector: selectors.BaseSelector, stranger: socket.socket) -> None:
        selector.unregister(stranger)
        del self._strangers[stranger]
        stranger.close()


def _size_of(said: bytearray) -> int:
    """Bytes of a hello beyond its length, as far as they are known."""
    return int(_LENGTH.unpack_from(said)[0]) if len(said) >= _LENGTH.size else 0


def parse_address(text: str) -> Address:
    """Host and port of "host:port"; an IPv6 address stands in brackets, "[::1]:7001".

    Raises:
        LocalProtocolError: another form.
    """
    host, colon, port = text.rpartition(":")
    bare = host[1:-1] if host[:1] + host[-1:] == "[]" else host
    numbered = port.isascii() and port.isdecimal() and 0 < int(port) < 2**16
    if not colon or not bare or not numbered:
        raise LocalProtocolError(
            f"an address is host:port, such as 127.0.0.1:47001 or [::1]:47001, got {text!r}"
        )
    if (bare != host or ":" in host) and (bare == host or not _is_ipv6(bare)):
        raise LocalProtocolError(
            f"an IPv6 address stands in brackets before its port, such as [::1]:47001, got {text!r}"
        )
    return bare, int(port)


def _is_ipv6(host: str) -> bool:
    try:
        IPv6Address(host)
    except ValueError:
        return False
    return True


def spell_address(address: Address) -> str:
    """As `parse_address` reads it."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

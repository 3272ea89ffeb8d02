"""Connections of processes of one machine: frames over TCP, each after its length.

Run by: both ends, beneath `sealed_connection` and `resumable_link`. Protects from: frames that are
longer than `MAX_UNPROVED` until the other end proved who it is, and than `MAX_SEALED` from then
on, before memory is taken for them.
"""

import contextlib
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from ipaddress import IPv6Address
from typing import TypeAlias

from apfed_protocols.errors import LocalProtocolError
from secure_apfed.base.peer_text import check_host, quote_text
from secure_apfed.exchange.sealed_connection import MAX_SEALED, MAX_UNPROVED, refuse_long_frame

Address: TypeAlias = tuple[str, int]
"""Host and port."""

_LENGTH = struct.Struct(">I")  # before each frame
_CHUNK = 2**20
_STUCK_S = 15.0  # without a byte, in the middle of a frame
_DIAL_S = 5.0
_POLL_S = 0.1
_DISCARD_S = 2.0  # for which a refused peer's bytes are read and dropped
_BACKLOG = 64


class SocketConnection:
    """A socket as a `Carrier`."""

    def __init__(self, wire: socket.socket) -> None:
        """Take a connected socket, with the frame limit of an unproven peer."""
        wire.settimeout(_STUCK_S)
        with contextlib.suppress(OSError):  # already disconnected, which reading will show
            wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._wire = wire
        self._max_bytes = MAX_UNPROVED
        self._readable = selectors.DefaultSelector()
        self._readable.register(wire, selectors.EVENT_READ)
        # Closed only once no thread uses it, since its file descriptor is given to other files.
        weakref.finalize(self, _close_wire, wire, self._readable)

    def trust_peer(self) -> None:
        """Allow larger frames, after the peer proved its identity."""
        self._max_bytes = MAX_SEALED

    def send_bytes(self, buf: bytes, /) -> None:
        self._wire.sendall(_LENGTH.pack(len(buf)) + buf)

    def recv_bytes(self) -> bytes:
        """Return the next frame. Raises EOFError: a frame is too long, or the other end closed."""
        (size,) = _LENGTH.unpack(self._receive_exactly(_LENGTH.size))
        if size > self._max_bytes:
            reason = refuse_long_frame(self, self._max_bytes)
            self._close_after_refusal(min(size, MAX_SEALED))
            raise EOFError(reason)
        return self._receive_exactly(size)

    def _close_after_refusal(self, unread: int) -> None:
        """Read and discard what the peer still sends, then close.

        Otherwise the peer's system would drop the refusal together with the broken connection.

        `unread`: bytes that may still come.
        """
        deadline = time.monotonic() + _DISCARD_S
        with contextlib.suppress(OSError):
            self._wire.shutdown(socket.SHUT_WR)
            while unread:
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0 or not self.poll(remaining_s):
                    break
                chunk = self._wire.recv(min(unread, _CHUNK))
                unread = unread - len(chunk) if chunk else 0
        self.close()

    def _receive_exactly(self, size: int) -> bytes:
        """Return the next `size` bytes. Raises EOFError: the other end closed before."""
        received = bytearray()
        while len(received) < size:
            chunk = self._wire.recv(min(size - len(received), _CHUNK))
            if not chunk:
                raise EOFError("the other end closed the connection")
            received += chunk
        return bytes(received)

    def poll(self, timeout: float, /) -> bool:
        return bool(self._readable.select(timeout))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._wire.shutdown(socket.SHUT_RDWR)


def _close_wire(wire: socket.socket, readable: selectors.BaseSelector) -> None:
    readable.close()
    wire.close()


def dial(address: Address) -> SocketConnection:
    """Connect to a listening party. Raises ConnectionError: nobody listens, or there is no host."""
    try:
        return SocketConnection(socket.create_connection(address, timeout=_DIAL_S))
    except (OSError, UnicodeError) as error:
        raise ConnectionError(getattr(error, "strerror", None) or str(error)) from error


class Port:
    """A server that others dial.

    Attributes:
        port: the number of the port, also where the address has 0 for any free one.
    """

    def __init__(
        self, address: Address, welcome: Callable[[SocketConnection, bytes], None]
    ) -> None:
        """Listen at this address. Raises OSError: the address cannot be used.

        `welcome`: called with each new connection and b"" (in place of a TLS certificate), in a
        thread of its own.
        """
        host, port = address
        families = {info[0] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        self._listener = socket.create_server(
            address,
            family=socket.AF_INET if socket.AF_INET in families else socket.AF_INET6,
            backlog=_BACKLOG,
            dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6(),
        )
        self.port: int = self._listener.getsockname()[1]
        self._listener.settimeout(_POLL_S)
        self._welcome = welcome
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept_connections, daemon=True)
        self._thread.start()

    def _accept_connections(self) -> None:
        """Accept connections until the port is closed."""
        with self._listener:
            while not self._closed.is_set():
                try:
                    wire, _ = self._listener.accept()
                except TimeoutError:
                    continue
                except OSError:  # already disconnected, or no more files may be open
                    self._closed.wait(_POLL_S)
                    continue
                arguments = (SocketConnection(wire), b"")
                threading.Thread(target=self._welcome, args=arguments, daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()


def parse_address(text: str) -> Address:
    """Return host and port of "host:port"; an IPv6 address is written in brackets, "[::1]:7001".

    Raises LocalProtocolError: the text has another form.
    """
    host, colon, port = text.rpartition(":")
    bare = host[1:-1] if host[:1] + host[-1:] == "[]" else host
    is_port = port.isascii() and port.isdecimal() and 0 < int(port) < 2**16
    if not colon or not bare or not is_port:
        raise LocalProtocolError(
            "an address is host:port, such as 127.0.0.1:47001 or [::1]:47001, got "
            f"{quote_text(text)}"
        )
    if bare != host or ":" in host:
        _check_ipv6(bare if bare != host else "", text)
    else:
        try:
            check_host(host)
        except ValueError as error:
            raise LocalProtocolError(f"an address is host:port; {error}") from None
    return bare, int(port)


def _check_ipv6(bare: str, text: str) -> None:
    """Raise LocalProtocolError unless a host is an IPv6 address in brackets, maybe with a zone.

    `bare`: the host without brackets; "" if it had none. `text`: the whole address, for the error.
    """
    _, _, zone = bare.partition("%")
    try:
        # Called for its ValueError: not an IPv6 address.
        IPv6Address(bare)
        if zone:
            check_host(zone)
    except ValueError:
        raise LocalProtocolError(
            "an IPv6 address stands in brackets before its port, such as [::1]:47001, got "
            f"{quote_text(text)}"
        ) from None


def spell_address(address: Address) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

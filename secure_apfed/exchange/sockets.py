"""Connections of processes of one machine: frames over TCP, each after its length.

Run by: both ends, beneath `sealed_connection` and `resumable_link`. Protects from: frames that are
longer than `MAX_UNPROVED_FRAME_BYTES` until the other end proved who it is, and than
`MAX_FRAME_BYTES` from then on, before memory is taken for them.
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
from secure_apfed.exchange.sealed_connection import (
    MAX_FRAME_BYTES,
    MAX_UNPROVED_FRAME_BYTES,
    refuse_long_frame,
)

Address: TypeAlias = tuple[str, int]
"""Host and port."""

_LENGTH = struct.Struct(">I")  # before each frame
_CHUNK_BYTES = 2**20
_STUCK_TIMEOUT_S = 15.0  # without a byte, in the middle of a frame
_DIAL_TIMEOUT_S = 5.0
_POLL_S = 0.1
_DRAIN_S = 2.0  # for which a refused peer's bytes are read and dropped
_BACKLOG = 64


class SocketConnection:
    """A connection that carries frames over a TCP socket, each after its length in 4 bytes."""

    def __init__(self, wire: socket.socket) -> None:
        """Use a connected socket; only short frames are taken until `trust_peer` is called."""
        wire.settimeout(_STUCK_TIMEOUT_S)
        with contextlib.suppress(OSError):  # already disconnected, which reading will show
            wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = wire
        self._max_bytes = MAX_UNPROVED_FRAME_BYTES
        self._readable = selectors.DefaultSelector()
        self._readable.register(wire, selectors.EVENT_READ)
        # Closed only once no thread uses it, since its file descriptor is given to other files.
        weakref.finalize(self, _close_wire, wire, self._readable)

    def trust_peer(self) -> None:
        """Allow larger frames, after the peer proved its identity."""
        self._max_bytes = MAX_FRAME_BYTES

    def send_bytes(self, buf: bytes, /) -> None:
        """Send a frame after its length. Raises OSError: the connection broke."""
        self._socket.sendall(_LENGTH.pack(len(buf)) + buf)

    def recv_bytes(self) -> bytes:
        """Return the next frame.

        A frame that is too long is refused, and ends the connection.

        Raises EOFError: the frame is too long, or the other end closed the connection.
        """
        (size,) = _LENGTH.unpack(self._receive_exactly(_LENGTH.size))
        if size > self._max_bytes:
            reason = refuse_long_frame(self, self._max_bytes)
            self._drain_and_close(min(size, MAX_FRAME_BYTES))
            raise EOFError(reason)
        return self._receive_exactly(size)

    def _drain_and_close(self, unread_bytes: int) -> None:
        """Read and discard what the peer still sends, for a short time, then close.

        Closing a socket with unread bytes resets the connection, and the peer could lose the
        refusal that it was just sent.

        `unread_bytes`: how many bytes of the refused frame may still come.
        """
        deadline = time.monotonic() + _DRAIN_S
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            while unread_bytes:
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0 or not self.poll(remaining_s):
                    break
                chunk = self._socket.recv(min(unread_bytes, _CHUNK_BYTES))
                unread_bytes = unread_bytes - len(chunk) if chunk else 0
        self.close()

    def _receive_exactly(self, size: int) -> bytes:
        """Return the next `size` bytes. Raises EOFError: the other end closed the connection."""
        received = bytearray()
        while len(received) < size:
            chunk = self._socket.recv(min(size - len(received), _CHUNK_BYTES))
            if not chunk:
                raise EOFError("the other end closed the connection")
            received += chunk
        return bytes(received)

    def poll(self, timeout: float, /) -> bool:
        """Wait at most `timeout` seconds; return whether something can be read."""
        return bool(self._readable.select(timeout))

    def close(self) -> None:
        """Shut down both directions; the socket is closed once this object is no longer used."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def _close_wire(wire: socket.socket, readable: selectors.BaseSelector) -> None:
    """Close a socket, and the selector that waits for its input."""
    readable.close()
    wire.close()


def dial(address: Address) -> SocketConnection:
    """Connect to a listening party. Raises ConnectionError: nobody listens, or there is no host."""
    try:
        return SocketConnection(socket.create_connection(address, timeout=_DIAL_TIMEOUT_S))
    except (OSError, UnicodeError) as error:  # UnicodeError: the host is no valid name
        raise ConnectionError(getattr(error, "strerror", None) or str(error)) from error


class Port:
    """A TCP server at which peers open connections.

    Attributes:
        port: the number of the TCP port; the chosen one if the address has 0, for any free port.
    """

    def __init__(
        self, address: Address, on_connection: Callable[[SocketConnection, bytes], None]
    ) -> None:
        """Listen at this address. Raises OSError: the address cannot be used.

        `on_connection`: called in a thread of its own with each new connection and b"", in place of
        the TLS certificate that a gRPC connection has.
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
        self._on_connection = on_connection
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept_connections, daemon=True)
        self._thread.start()

    def _accept_connections(self) -> None:
        """Accept connections, each in a new thread, until the port is closed."""
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
                threading.Thread(target=self._on_connection, args=arguments, daemon=True).start()

    def close(self) -> None:
        """Stop listening; connections that were accepted stay open."""
        self._closed.set()
        self._thread.join()


def parse_address(text: str) -> Address:
    """Return host and port of "host:port"; an IPv6 address is written in brackets, "[::1]:7001".

    Raises LocalProtocolError: the text has another form.
    """
    host, colon, port = text.rpartition(":")
    has_brackets = host.startswith("[") and host.endswith("]")
    bare_host = host[1:-1] if has_brackets else host
    is_port = port.isascii() and port.isdecimal() and 0 < int(port) < 2**16
    if not colon or not bare_host or not is_port:
        raise LocalProtocolError(
            "an address is host:port, such as 127.0.0.1:47001 or [::1]:47001, got "
            f"{quote_text(text)}"
        )
    if has_brackets or ":" in host:
        _check_ipv6(bare_host if has_brackets else "", text)
    else:
        try:
            check_host(host)
        except ValueError as error:
            raise LocalProtocolError(f"an address is host:port; {error}") from None
    return bare_host, int(port)


def _check_ipv6(bare_host: str, text: str) -> None:
    """Raise LocalProtocolError unless a host is an IPv6 address in brackets, maybe with a zone.

    `bare_host`: the host without brackets; "" if it had none, which is refused. `text`: the whole
    address with its port, for the error.
    """
    _, _, zone = bare_host.partition("%")
    try:
        # Called for its ValueError: not an IPv6 address.
        IPv6Address(bare_host)
        if zone:
            check_host(zone)
    except ValueError:
        raise LocalProtocolError(
            "an IPv6 address stands in brackets before its port, such as [::1]:47001, got "
            f"{quote_text(text)}"
        ) from None


def spell_address(address: Address) -> str:
    """Return host and port as "host:port", an IPv6 host in brackets."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

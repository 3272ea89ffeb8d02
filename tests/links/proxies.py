"""Proxies on loopback, for tests: one that cuts and parts, one that ends TLS, one that CONNECTs."""

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable

__all__ = ["Proxy", "connect_proxy", "tls_proxy"]

_CHUNK = 65536
_HOST = "127.0.0.1"


class Proxy:
    """Carries bytes to another port, and may cut.

    Args:
        port: where to carry them; cut_after: bytes after which all connections are cut, in turn.
        accept: makes a connection of what comes; reach: one to the port.
    """

    def __init__(
        self, port: int, *, cut_after: tuple[int, ...] = (),
        accept: Callable[[socket.socket], socket.socket] = lambda came: came,
        reach: Callable[[socket.socket], socket.socket] = lambda made: made,
    ) -> None:  # fmt: skip
        self._target, self._accept, self._reach = port, accept, reach
        self._left = list(cut_after)
        self.cuts, self.carried = 0, bytearray()
        self._open: set[socket.socket] = set()
        self._lock, self._parted_until = threading.Lock(), 0.0
        self._listener = socket.create_server((_HOST, 0), backlog=64)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._listen, daemon=True).start()

    def cut(self) -> None:
        """End all connections now."""
        with self._lock:
            standing, self._open = self._open, set()
        for one in standing:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def part(self, seconds: float) -> None:
        """Carry nothing for so long, silently; what was open then is cut after it."""
        self._parted_until = time.monotonic() + seconds
        threading.Timer(seconds, self.cut).start()

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
                while time.monotonic() < self._parted_until:
                    time.sleep(0.01)
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

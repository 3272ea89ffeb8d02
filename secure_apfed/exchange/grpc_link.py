"""Connections over gRPC: one stream of bytes each way, in one call, with TLS at both ends.

Run by: every party (extra `grpc`), as the layer below `sealed_connection` and `resumable_link`.
Reachable parties listen, the others dial; a proxy may terminate TLS between them. Protects from:
strangers without a certificate, and from calls and frames that are too many or too large. No
message of gRPC's is parsed here: frames are bytes of at most `MAX_FRAME_BYTES`, and of at most
`MAX_UNPROVED_FRAME_BYTES`, with one buffered, before the other end proves its identity.

A frame travels in messages of at most 128 KiB, each with a byte before it that says whether more of
the frame follows: gRPC takes a whole message into memory before anybody here may refuse it.
"""

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from typing import Any

from apfed_protocols.errors import UnsafeChoiceWarning
from apfed_protocols.installing import install_extra
from secure_apfed.errors import ConfigError
from secure_apfed.exchange.certificates import Credentials
from secure_apfed.exchange.envelope import clean_text
from secure_apfed.exchange.pipe import MAX_QUEUED, Pipe
from secure_apfed.exchange.sealed_connection import (
    MAX_FRAME_BYTES,
    MAX_UNPROVED_FRAME_BYTES,
    refuse_long_frame,
)
from secure_apfed.exchange.sockets import Address, spell_address

try:
    import grpc
except ImportError:  # an extra
    grpc = None

_SERVICE = "secure_apfed.Link"
_METHOD = "Carry"
_PATH = f"/{_SERVICE}/{_METHOD}"
_MAX_STREAMS = 512
_PIECE_BYTES = 2**17 - 1  # of a frame, after the byte below
# The first byte of a message: whether more of the frame follows.
_MORE = b"\1"
_LAST = b"\0"
_FLUSH_S = 2.0  # to send what is queued when a stream is closed
# Options of gRPC, for both ends and for each.
_COMMON = (
    ("grpc.max_receive_message_length", 1 + _PIECE_BYTES),
    ("grpc.max_send_message_length", 1 + _PIECE_BYTES),
    ("grpc.max_metadata_size", 8192),
    ("grpc.absolute_max_metadata_size", 16384),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
)
_CLIENT = (
    *_COMMON,
    ("grpc.use_local_subchannel_pool", 1),  # each attempt is its own, without gRPC's back-off
)
_SERVER = (
    *_COMMON,
    # A stranger's connection takes as much memory as is read of it at once.
    ("grpc.experimental.tcp_read_chunk_size", 2**14),
    ("grpc.experimental.tcp_max_read_chunk_size", 2**16),
    ("grpc.so_reuseport", 0),
    ("grpc.max_concurrent_streams", 128),
    ("grpc.server_handshake_timeout_ms", 10_000),
    # Without these two a link that is idle dies of "too_many_pings".
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
)


def require_grpc() -> None:
    """Raise ConfigError if the extra `grpc` is not installed."""
    if grpc is None:
        raise ConfigError(
            f"links between machines need grpcio, which is missing; run: {install_extra('grpc')}"
        )


class GrpcConnection(Pipe):
    """A connection that carries frames over one bidirectional gRPC stream.

    Frames from the other end wait in this pipe, frames to it in `_outgoing`.
    """

    def __init__(self, cancel: Callable[[], None] = lambda: None) -> None:
        """Make a connection that takes one short frame at a time, until `trust_peer` is called.

        `cancel`: ends the gRPC call; called some time after the connection was closed.
        """
        super().__init__(room=1)
        self._outgoing = Pipe()
        self._cancel = cancel
        self._max_bytes = MAX_UNPROVED_FRAME_BYTES

    def trust_peer(self) -> None:
        """Allow larger frames and a larger buffer, after the peer proved its identity."""
        self._max_bytes = MAX_FRAME_BYTES
        self.room = MAX_QUEUED

    def receive_pieces(self, pieces: Iterator[bytes]) -> None:
        """Join incoming pieces to frames, which `recv_bytes` returns, until the stream ends.

        A frame that is too long is refused and ends the stream, also for the other end.

        `pieces`: parts of frames, each after one byte that says whether more of its frame follows.
        """
        reason = ""
        frame = bytearray()
        try:
            for piece in pieces:
                frame += memoryview(piece)[1:]
                if len(frame) > self._max_bytes:
                    reason = refuse_long_frame(self, self._max_bytes)
                    self.close()
                    break
                if piece[:1] == _MORE:
                    continue
                # Once this end is closed, incoming frames are dropped, but the stream must still be
                # read so that queued outgoing frames are sent.
                with contextlib.suppress(BrokenPipeError):
                    self.push_frame(bytes(frame))
                frame.clear()
        except grpc.RpcError as error:
            reason = _describe_error(error)
        self.end_streams(reason)

    def iter_pieces(self) -> Iterator[bytes]:
        """Yield the outgoing frames in pieces, until the connection ends.

        gRPC limits the length of its messages. Each piece begins with a byte that says whether more
        of its frame follows.
        """
        with contextlib.suppress(EOFError):
            while True:
                frame = self._outgoing.recv_bytes()
                for start in range(0, max(1, len(frame)), _PIECE_BYTES):
                    end = start + _PIECE_BYTES
                    yield (_MORE if end < len(frame) else _LAST) + frame[start:end]

    def end_streams(self, reason: str = "") -> None:
        """End both directions; the reason is in the errors of later sending and receiving."""
        self.end(reason)
        self._outgoing.end(reason)

    def send_bytes(self, buf: bytes, /) -> None:
        """Queue a frame; wait while the queue is full. Raises BrokenPipeError: it was closed."""
        self._outgoing.push_frame(buf)

    def close(self) -> None:
        """Accept no more frames; cancel the gRPC call later, so that queued frames go out."""
        self.end_streams()
        timer = threading.Timer(_FLUSH_S, self._cancel)
        timer.daemon = True
        timer.start()


def dial(
    address: Address, credentials: Credentials | None, *, name: str | None, proxy: str | None = None
) -> GrpcConnection:
    """Open a connection to this address; whether a server answers shows at the first read.

    A background thread reads the connection until it ends.

    Args:
        address: host and port.
        credentials: TLS credentials; None: plaintext, which `warn_of_plaintext` allows on loopback
            only.
        name: the name that the server's certificate must have; None: the host's name, as for a
            proxy that terminates TLS for the server.
        proxy: "http://host:port" of an HTTP proxy that is asked to CONNECT; None: for another
            machine the proxy in the environment variables, for this machine none.

    Raises ConfigError: the extra `grpc` is not installed.
    """
    require_grpc()
    host, _ = address
    options: list[tuple[str, Any]] = [*_CLIENT]
    if proxy is not None:
        options.append(("grpc.http_proxy", proxy))
    elif is_loopback(host):
        options.append(("grpc.enable_http_proxy", 0))  # a proxy would reach its own loopback
    if name is not None and credentials is not None:
        options.append(("grpc.ssl_target_name_override", name))
    target = spell_address(address)
    if credentials is None:
        channel = grpc.insecure_channel(target, options)
    else:
        tls = grpc.ssl_channel_credentials(credentials.ca, credentials.key, credentials.certificate)
        channel = grpc.secure_channel(target, tls, options)
    connection = GrpcConnection(channel.close)
    call = channel.stream_stream(_PATH)(connection.iter_pieces())

    def carry_call() -> None:
        """Read the call's messages until it ends, then close its channel."""
        connection.receive_pieces(call)
        channel.close()

    threading.Thread(target=carry_call, daemon=True).start()
    return connection


class Port:
    """A gRPC server at which peers open connections.

    Attributes:
        port: the number of the TCP port.
    """

    def __init__(
        self,
        address: Address,
        credentials: Credentials | None,
        welcome: Callable[[GrpcConnection, bytes], None],
    ) -> None:
        """Listen at this address.

        Args:
            address: host and port.
            credentials: TLS credentials; None: unencrypted, for loopback addresses only.
            welcome: called in a thread of its own with each new connection and the caller's
                certificate in PEM (b"" without TLS).

        Raises ConfigError: the address is in use, or the extra `grpc` is not installed.
        """
        require_grpc()
        self._welcome = welcome
        self._open_streams = set[GrpcConnection]()
        self._lock = threading.Lock()
        self._server = grpc.server(
            ThreadPoolExecutor(_MAX_STREAMS, thread_name_prefix="grpc"),
            options=_SERVER,
            maximum_concurrent_rpcs=_MAX_STREAMS,
        )
        handler = grpc.stream_stream_rpc_method_handler(self._carry_stream)
        handlers = grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler})
        self._server.add_generic_rpc_handlers((handlers,))
        place = spell_address(address)
        try:
            if credentials is None:
                self.port = int(self._server.add_insecure_port(place))
            else:
                own_pairs = [(credentials.key, credentials.certificate)]
                tls = grpc.ssl_server_credentials(
                    own_pairs, credentials.ca, require_client_auth=True
                )
                self.port = int(self._server.add_secure_port(place, tls))
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen at {place}; end who does, or name another port there and in the "
                "others' files"
            ) from error
        self._server.start()

    def _carry_stream(self, pieces: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """Serve one gRPC call: yield its outgoing messages until it ends.

        gRPC runs this in a thread of the server. Two more threads read the incoming messages and
        call `welcome` with the new connection.

        `pieces`: the incoming messages, see `receive_pieces`. `context`: gRPC's object for the
        call.
        """
        connection = GrpcConnection(context.cancel)
        with self._lock:
            self._open_streams.add(connection)
        if not context.add_callback(connection.end_streams):
            connection.end_streams()  # the call has ended before the callback was registered
        certificate = b"".join(context.auth_context().get("x509_pem_cert", ()))
        for task in (
            lambda: connection.receive_pieces(pieces),
            lambda: self._welcome(connection, certificate),
        ):
            threading.Thread(target=task, daemon=True).start()
        try:
            yield from connection.iter_pieces()
        finally:
            with self._lock:
                self._open_streams.discard(connection)

    def close(self) -> None:
        """Stop listening, and end all open streams."""
        stopped = self._server.stop(_FLUSH_S)
        with self._lock:
            connections = list(self._open_streams)
        for connection in connections:
            connection.end_streams()
        stopped.wait()


def is_loopback(host: str) -> bool:
    """Return whether the host is this machine: a loopback address or "localhost"."""
    with contextlib.suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


def warn_of_plaintext(*hosts: str) -> None:
    """Warn with UnsafeChoiceWarning that connections to these hosts are in plaintext.

    Raises ConfigError: a host is another machine, to which plaintext is not allowed.
    """
    remote_hosts = [host for host in hosts if not is_loopback(host)]
    if remote_hosts:
        listed = ", ".join(remote_hosts)
        raise ConfigError(
            f"insecure_plaintext_on_loopback is for loopback alone, not for {listed}; "
            "give `tls` with ca, certificate and key (secure-apfed project makes them)"
        )
    warnings.warn(
        "links without TLS: whoever runs on this machine sees who speaks to whom and may cut them",
        UnsafeChoiceWarning,
        stacklevel=2,
    )


_FOREIGN = "its certificate is of an authority that is not in tls.ca"
_CAUSES = {
    "certificate has expired": "its certificate has expired: it needs a new one",
    "CERTIFICATE_EXPIRED": "it says that this party's certificate has expired: get a new one",
    "Hostname Verification Check failed": (
        "its certificate has another name than the peer's in this party's file; where a proxy "
        "ends TLS there, say behind_proxy: true of that peer"
    ),
    "CERTIFICATE_REQUIRED": "it wants a certificate of this party",
    "unable to get local issuer": _FOREIGN,
    "self signed certificate": _FOREIGN,
    "certificate signature failure": _FOREIGN,
    "self-signed certificate": _FOREIGN,
    "WRONG_VERSION_NUMBER": "it speaks no TLS",
    "Connection refused": "nobody listens there",
    "Socket closed": (
        "it ended the connection; where this is so each time, it refuses this party's certificate, "
        "which may have expired or be of an authority that is foreign there"
    ),
}


def _describe_error(error: Exception) -> str:
    """Return in words why a gRPC call ended, with gRPC's status code and the end of its details.

    Only some of gRPC's errors have a code and details; known phrases in the details are explained.
    """
    details = getattr(error, "details", lambda: "")() or ""
    status_code = getattr(error, "code", lambda: None)()
    code_name = getattr(status_code, "name", "")
    explanations = [text for phrase, text in _CAUSES.items() if phrase in details]
    cause = explanations[0] if explanations else "the connection broke"
    return f"{cause} ({code_name}: {clean_text(details.encode())[-160:]})"

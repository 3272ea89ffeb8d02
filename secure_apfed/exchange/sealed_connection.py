"""Mutual authentication and encryption of every connection.

Run by: both ends of a new connection, over any carrier. Each sends its name, the name of the
expected peer and a fresh key (a hello), and signs both hellos with its long-term identity; from
then on every frame is encrypted and authenticated under keys of this connection alone. Protects
from: intermediaries (a relay, a proxy that terminates TLS), which learn sizes and times and can
only cut the connection, and from strangers and replays. So an identity never rests on TLS alone.
Where peers dial in (`PeerAcceptor`), strangers wait until they have proved who they are. If too
many wait, the oldest is disconnected. A peer that connects again replaces its former connection,
which may hang.
"""

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgpack

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.seal import (
    SEAL_OVERHEAD_BYTES,
    Identity,
    SealedLink,
    fresh_run_key,
    verify_signature,
)
from secure_apfed.base.peer_text import quote_text
from secure_apfed.exchange.envelope import quote_reason
from secure_apfed.exchange.resumable_link import MAX_FRAME, Connection

MAX_SEALED = MAX_FRAME + SEAL_OVERHEAD_BYTES
"""Bytes of the longest frame on a sealed connection."""
MAX_UNPROVED = 4096
"""Bytes of the longest frame that is taken of an end that has not proved yet who it is."""
_VERSION = 3
_PURPOSE = b"peer v1"
_KEY_BYTES = 32
_HELLO_BYTES = 512
_REFUSED = b"refused "
_REFUSED_LETTERS = 400
_PROOF_S = 10.0
_MALFORMED = (ValueError, TypeError, msgpack.UnpackException, RecursionError)
_MAX_STRANGERS = 64
_LOOK_S = 1.0


class Carrier(Connection, Protocol):
    """A connection below the seal: it takes only short frames until `trust_peer` is called."""

    def trust_peer(self) -> None:
        """Accept frames of `MAX_SEALED` bytes and let a few wait, since the other end proved its
        identity.
        """


@dataclass(frozen=True, kw_only=True)
class LocalEnd:
    """The keys of this end of every connection: its own, and the public ones that identify the
    peers.

    Attributes:
        name: of the party; identity: its key pair.
        known: public identities of its peers, by name.
        certificate: SHA-256 of its own TLS certificate, hex; empty without TLS.
        revoked: the certificate digests and keys (hex) that are currently refused.
    """

    name: str
    identity: Identity
    known: Mapping[str, bytes]
    certificate: str = ""
    revoked: Callable[[], frozenset[str]] = frozenset


class _Hello(NamedTuple):
    sender: str
    receiver: str
    public: bytes
    certificate: str

    def to_bytes(self) -> bytes:
        packed: bytes = msgpack.packb((_VERSION, *self))
        return packed

    @classmethod
    def from_bytes(cls, message: bytes) -> "_Hello":
        """Parse a hello. Raises RemoteProtocolError: it is malformed, not canonical, or of another
        version.
        """
        try:
            if len(message) > _HELLO_BYTES:
                raise ValueError("too long")
            version, *fields = msgpack.unpackb(message)
            if version != _VERSION:
                raise RemoteProtocolError(
                    f"the other end speaks version {quote_text(version)} of the hello, this party "
                    f"{_VERSION}"
                )
            if [type(field) for field in fields] != [str, str, bytes, str]:
                raise TypeError("fields of other types")
            hello = cls(*fields)
            if len(hello.public) != _KEY_BYTES or hello.to_bytes() != message:
                raise ValueError("a key of another size, or not canonical")
        except _MALFORMED as error:
            raise RemoteProtocolError(
                "the other end sent something else than a party's hello"
            ) from error
        return hello


def prove_identity(
    connection: Carrier,
    me: LocalEnd,
    peer: str | None = None,
    *,
    seen: Callable[[str], None] = lambda name: None,
) -> tuple[str, Connection]:
    """Prove this party's identity on a new connection, and verify the other end's.

    Returns the peer's name and the encrypted connection.

    Args:
        peer: the expected peer; None: any peer that `me` knows, which then sends its name first.
        seen: called with the claimed name; raises RemoteProtocolError if something other than the
            identity (a certificate of TLS) contradicts it.

    Raises:
        RemoteProtocolError: another party than expected answers; the other end was notified.
        OSError, EOFError: the connection broke, the other end is silent, or it refuses this party.
    """
    try:
        return _exchange_proofs(connection, me, peer, seen)
    except RemoteProtocolError as error:
        refuse_connection(connection, f"{me.name} refuses this connection: {error}")
        with contextlib.suppress(ConnectionRefusedError):
            _read_until_closed(connection)  # until it has read why, and closes
        raise
    except (OSError, EOFError) as error:
        if not isinstance(error, ConnectionRefusedError):
            _read_until_closed(connection)  # raises the peer's refusal, if any
        raise


def _read_until_closed(connection: Connection) -> None:
    """Read until the other end closes; raise ConnectionRefusedError if it sent a refusal."""
    deadline = time.monotonic() + _PROOF_S
    try:
        while time.monotonic() < deadline:
            receive_before(connection, deadline)
    except ConnectionRefusedError:
        raise
    except (OSError, EOFError):
        return


def _exchange_proofs(
    connection: Carrier, me: LocalEnd, peer: str | None, check_name: Callable[[str], None]
) -> tuple[str, Connection]:
    """Exchange hellos and signatures over both; return the peer's name and the encrypted
    connection.

    `check_name`: raises if this name is not expected.
    """
    deadline = time.monotonic() + _PROOF_S
    run_key = fresh_run_key()

    def send_hello(receiver: str) -> bytes:
        """Send and return this party's hello, addressed to `receiver`."""
        own_hello = _Hello(me.name, receiver, run_key.public, me.certificate).to_bytes()
        connection.send_bytes(own_hello)
        return own_hello

    own_hello = b"" if peer is None else send_hello(peer)
    message = receive_before(connection, deadline)
    theirs = _Hello.from_bytes(message)
    name = theirs.sender if peer is None else peer
    _require_expected_peer(me, name, theirs)
    check_name(name)
    _require_valid_peer(me, name, theirs)
    own_hello = own_hello or send_hello(name)
    hellos = b"".join(hashlib.sha256(packed).digest() for packed in sorted((own_hello, message)))
    ends = (me.name.encode(), name.encode())
    digest = hashlib.sha256(hellos).digest()
    link = SealedLink(me=me.name, peer=name, run_key=run_key, contract_hash=digest)
    connection.send_bytes(link.hello + me.identity.sign(_PURPOSE, *ends, digest))
    answer = receive_before(connection, deadline)
    packed = answer[: len(link.hello)]
    signature = answer[len(link.hello) :]
    verify_signature(me.known[name], signature, _PURPOSE, *reversed(ends), digest, signer=name)
    link.agree(theirs.public, packed)
    connection.trust_peer()
    return name, _SealedConnection(connection, link)


def _require_expected_peer(me: LocalEnd, name: str, theirs: _Hello) -> None:
    """Refuse an unexpected peer before this party signs anything. Raises RemoteProtocolError."""
    if name not in me.known or theirs.receiver != me.name:
        raise RemoteProtocolError(
            f"{quote_text(theirs.sender)} comes to {quote_text(theirs.receiver)}, but this is "
            f"{me.name}, whose session is with {', '.join(sorted(me.known))}; whoever is "
            "in it is named in the party's file"
        )
    if theirs.sender != name:
        raise RemoteProtocolError(
            f"{quote_text(theirs.sender)} answers where {me.name} expects {name}; correct the "
            f"address of {name} in the file of {me.name}"
        )


def _require_valid_peer(me: LocalEnd, name: str, theirs: _Hello) -> None:
    """Refuse a peer whose identity or certificate is revoked. Raises RemoteProtocolError."""
    revoked = me.revoked()
    if me.known[name].hex() in revoked:
        raise RemoteProtocolError(f"the identity of {name} is revoked by the list of {me.name}")
    if theirs.certificate in revoked:
        raise RemoteProtocolError(
            f"the certificate of {name} is revoked by the list of {me.name}; {name} has another "
            "one made (secure-apfed certs request)"
        )


def receive_before(connection: Connection, deadline: float) -> bytes:
    """Return the next message, before `deadline` on the monotonic clock.

    Raises OSError, EOFError: none came in time, or the other end refuses.
    """
    if not connection.poll(max(0.0, deadline - time.monotonic())):
        raise TimeoutError("the other end is silent")
    message = connection.recv_bytes()
    if message.startswith(_REFUSED):
        raise ConnectionRefusedError(quote_reason(message.removeprefix(_REFUSED)))
    return message


def refuse_long_frame(connection: Connection, most_bytes: int) -> str:
    """Refuse a frame above this number of bytes; return the reason. The connection is unusable
    afterwards.

    `most_bytes`: of one frame.
    """
    proved = "" if most_bytes > MAX_UNPROVED else " before it proved who it is"
    reason = f"the other end sent a frame above {most_bytes} bytes{proved}"
    refuse_connection(connection, reason)
    return reason


def refuse_connection(connection: Connection, reason: str) -> None:
    """Tell the other end the reason why this party refuses the connection."""
    with contextlib.suppress(OSError):
        connection.send_bytes(_REFUSED + reason[:_REFUSED_LETTERS].encode())


class _SealedConnection:
    """An encrypted and authenticated connection: no third party can read, alter, repeat or reorder
    its frames.
    """

    def __init__(self, connection: Connection, link: SealedLink) -> None:
        """Take a connection and the keys agreed on it."""
        self._connection = connection
        self._link = link
        self._came = 0

    def send_bytes(self, buf: bytes, /) -> None:
        number = self._link.next_sequence
        self._connection.send_bytes(self._link.seal(buf, sequence=number, associated=b""))

    def recv_bytes(self) -> bytes:
        """Return the next frame, decrypted.

        Raises ConnectionRefusedError: the other end refuses this party; ConnectionAbortedError: the
        frame was altered, lost or repeated on the way.
        """
        frame = self._connection.recv_bytes()
        try:
            plain_frame = self._link.open(frame, sequence=self._came, associated=b"")
        except RemoteProtocolError as error:
            if frame.startswith(_REFUSED):  # the other end has read the proof by now
                raise ConnectionRefusedError(quote_reason(frame.removeprefix(_REFUSED))) from None
            # An intermediary altered it, not the peer: another connection may work.
            raise ConnectionAbortedError(
                f"frame {self._came} of {self._link.peer} was altered, lost or repeated on the way"
            ) from error
        self._came += 1
        return plain_frame

    def poll(self, timeout: float, /) -> bool:
        return self._connection.poll(timeout)

    def close(self) -> None:
        self._connection.close()


class StrangerQueue:
    """The connections of unknown owners; a few, and the newest."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._strangers: dict[Connection, None] = {}

    def add(self, stranger: Connection) -> None:
        """Add a connection that is not proven yet; above the limit, close the oldest one."""
        with self._lock:
            self._strangers[stranger] = None
            first = next(iter(self._strangers))
            if len(self._strangers) <= _MAX_STRANGERS:
                return
            del self._strangers[first]
        first.close()

    def remove(self, stranger: Connection) -> None:
        with self._lock:
            self._strangers.pop(stranger, None)


class PeerAcceptor:
    """The acceptor of one party's connections, by the name of the peer.

    Args:
        awaited: the peers that dial.
        require: raises RemoteProtocolError where a peer's certificate of TLS is not its own.
        absent: the likely reason, for the error message, if a peer does not connect.
    """

    def __init__(
        self,
        me: LocalEnd,
        awaited: tuple[str, ...],
        require: Callable[[str, bytes], None] = lambda name, certificate: None,
        absent: str = "it did not dial, or came without a certificate that TLS takes",
    ) -> None:
        """Accept connections of the `awaited` peers; `absent`: a possible reason why one does not
        come.

        `require`: raises if the peer's certificate is not allowed.
        """
        self._me = me
        self._require = require
        self._absent = absent
        self._unproven = StrangerQueue()
        self._changed = threading.Condition()
        self._awaited = awaited
        self._unused_connections: dict[str, Connection] = {}  # accepted, but not yet used
        self._connections: dict[str, Connection] = {}
        self._troubles_by_peer: dict[str, tuple[type[OSError], str]] = {}

    def admit_stranger(self, stranger: Carrier, certificate: bytes) -> None:
        """Have a new connection prove its identity; it then replaces its peer's former one.

        `certificate`: the caller's, by TLS.
        """
        claimed: list[str] = []

        def check_claim(name: str) -> None:
            """Remember the claimed name, and check it against the TLS certificate."""
            if name in self._awaited:
                claimed.append(name)
            self._require(name, certificate)

        self._unproven.add(stranger)
        try:
            name, connection = prove_identity(stranger, self._me, seen=check_claim)
        except (OSError, EOFError, RemoteProtocolError) as error:
            # A refusal is more informative than the failed attempt after it.
            refused = isinstance(error, ConnectionRefusedError | RemoteProtocolError)
            kind = ConnectionRefusedError if refused else TimeoutError
            troubles = dict.fromkeys(claimed, (kind, f"somebody came in its name: {error}"))
            self._troubles_by_peer = (
                self._troubles_by_peer | troubles if refused else troubles | self._troubles_by_peer
            )
            stranger.close()
            return
        finally:
            self._unproven.remove(stranger)
        if name not in self._awaited:
            me = self._me.name
            refuse_connection(
                stranger, f"{me} dials {name}, not the other way: correct the file of {name}"
            )
            stranger.close()
            return
        with self._changed:
            self._troubles_by_peer.pop(name, None)
            former = self._connections.get(name)
            self._connections[name] = self._unused_connections[name] = connection
            self._changed.notify_all()
        if former is not None:
            former.close()

    def take_connection(self, name: str) -> Connection:
        """Return the peer's newest connection; wait for one. Raises OSError: none came."""
        with self._changed:
            if not self._changed.wait_for(lambda: name in self._unused_connections, _LOOK_S):
                kind, reason = self._troubles_by_peer.get(name, (TimeoutError, self._absent))
                raise kind(reason)
            return self._unused_connections.pop(name)

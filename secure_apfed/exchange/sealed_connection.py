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
    RunKey,
    SealedLink,
    fresh_run_key,
    verify_signature,
)
from secure_apfed.base.peer_text import quote_text
from secure_apfed.exchange.envelope import quote_reason
from secure_apfed.exchange.resumable_link import MAX_PLAIN_FRAME_BYTES, Connection

MAX_FRAME_BYTES = MAX_PLAIN_FRAME_BYTES + SEAL_OVERHEAD_BYTES
"""Bytes of the longest frame on a sealed connection."""
MAX_UNPROVED_FRAME_BYTES = 4096
"""Bytes of the longest frame that is taken of an end that has not proved yet who it is."""
_VERSION = 3
_PURPOSE = b"peer v1"
_KEY_BYTES = 32
_HELLO_BYTES = 512  # the most of a hello
_REFUSAL_PREFIX = b"refused "  # begins a frame that says why the connection is refused
_REFUSED_LETTERS = 400
_PROOF_TIMEOUT_S = 10.0  # until both ends have proved their identities
_MALFORMED = (ValueError, TypeError, msgpack.UnpackException, RecursionError)
_MAX_STRANGERS = 64
_POLL_S = 1.0


class Carrier(Connection, Protocol):
    """A connection that is not encrypted; it takes short frames only until `trust_peer`."""

    def trust_peer(self) -> None:
        """Accept long frames, and buffer a few, now that the other end has proved its identity."""


@dataclass(frozen=True, kw_only=True)
class LocalEnd:
    """This end of every connection: the party's own keys, and the public keys of its peers.

    Attributes:
        name: the party's name.
        identity: its long-term key pair.
        identity_by_peer: public identities of its peers, by name.
        certificate: SHA-256 of its own TLS certificate, hex; empty without TLS.
        list_revoked: returns the certificate digests and public keys (hex) that are revoked now.
    """

    name: str
    identity: Identity
    identity_by_peer: Mapping[str, bytes]
    certificate: str = ""
    list_revoked: Callable[[], frozenset[str]] = frozenset


class _Hello(NamedTuple):
    """The first message of each end of a connection, which starts a key exchange.

    It is not authenticated by itself: the next message of each end signs both hellos.

    Attributes:
        sender, receiver: the names of the two parties, as the sender knows them.
        public_key: the sender's fresh public key (X25519) of this connection, 32 bytes.
        certificate: SHA-256 of the sender's TLS certificate, hex; empty without TLS.
    """

    sender: str
    receiver: str
    public_key: bytes
    certificate: str

    def to_bytes(self) -> bytes:
        """Encode the hello with msgpack, after the protocol's version."""
        packed: bytes = msgpack.packb((_VERSION, *self))
        return packed

    @classmethod
    def from_bytes(cls, message: bytes) -> "_Hello":
        """Parse a peer's hello.

        Raises RemoteProtocolError: the message is no hello, is of another version, or is not the
            canonical encoding.
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
            if len(hello.public_key) != _KEY_BYTES or hello.to_bytes() != message:
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
    check_name: Callable[[str], None] = lambda name: None,
) -> tuple[str, Connection]:
    """Prove this party's identity on a new connection, and verify the other end's.

    Returns the peer's name and the encrypted connection.

    Args:
        connection: the new connection, unencrypted.
        me: this party's keys.
        peer: the expected peer, at the dialling end; None, at the listening end: any peer that `me`
            knows, which sends its name first.
        check_name: called with the name that the other end claims; raises RemoteProtocolError if
            something else than the identity contradicts the name, such as a TLS certificate.

    Raises:
        RemoteProtocolError: another party than expected answers; the other end was notified.
        OSError, EOFError: the connection broke, the other end is silent, or it refuses this party.
    """
    try:
        return _exchange_proofs(connection, me, peer, check_name)
    except RemoteProtocolError as error:
        refuse_connection(connection, f"{me.name} refuses this connection: {error}")
        # Closing at once could lose the refusal; the other end closes when it has read it.
        with contextlib.suppress(ConnectionRefusedError):
            _read_until_closed(connection)
        raise
    except (OSError, EOFError) as error:
        if not isinstance(error, ConnectionRefusedError):
            # Raises the other end's refusal, if one is unread: it says more than this error.
            _read_until_closed(connection)
        raise


def _read_until_closed(connection: Connection) -> None:
    """Discard what the other end sends, until it closes the connection or some seconds are over.

    Raises ConnectionRefusedError: the other end sent a refusal.
    """
    deadline = time.monotonic() + _PROOF_TIMEOUT_S
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
    """Exchange hellos (names and fresh keys), then signatures over both hellos.

    Returns the peer's name and the encrypted connection, whose keys follow from both hellos.

    Args:
        connection: the new connection, unencrypted.
        me: this party's keys.
        peer: the expected peer; None: any known peer, which sends its hello first.
        check_name: raises RemoteProtocolError if a TLS certificate contradicts the claimed name.

    Raises:
        RemoteProtocolError: a hello or a signature is wrong.
        OSError, EOFError: none came in time.
    """
    deadline = time.monotonic() + _PROOF_TIMEOUT_S
    run_key = fresh_run_key()
    own_hello = b"" if peer is None else _send_hello(connection, me, peer, run_key)
    packed_peer_hello = receive_before(connection, deadline)
    peer_hello = _Hello.from_bytes(packed_peer_hello)
    name = peer_hello.sender if peer is None else peer
    _require_expected_peer(me, name, peer_hello)
    check_name(name)
    _require_not_revoked(me, name, peer_hello)
    own_hello = own_hello or _send_hello(connection, me, name, run_key)
    hellos_digest = _digest_hellos(own_hello, packed_peer_hello)
    link = SealedLink(me=me.name, peer=name, run_key=run_key, contract_hash=hellos_digest)
    own_name = me.name.encode()
    peer_name = name.encode()
    own_signature = me.identity.sign(_PURPOSE, own_name, peer_name, hellos_digest)
    # The link has a nonce, 32 random bytes called its hello, which travels with the signature.
    connection.send_bytes(link.hello + own_signature)
    peer_proof = receive_before(connection, deadline)
    peer_nonce = peer_proof[: len(link.hello)]
    peer_signature = peer_proof[len(link.hello) :]
    verify_signature(
        me.identity_by_peer[name],
        peer_signature,
        _PURPOSE,
        peer_name,
        own_name,
        hellos_digest,
        signer=name,
    )
    link.agree(peer_hello.public_key, peer_nonce)
    connection.trust_peer()
    return name, _SealedConnection(connection, link)


def _send_hello(connection: Carrier, me: LocalEnd, receiver: str, run_key: RunKey) -> bytes:
    """Send and return this party's hello, addressed to `receiver`.

    `run_key`: the key pair of this connection, whose public half the hello carries.
    """
    own_hello = _Hello(me.name, receiver, run_key.public, me.certificate).to_bytes()
    connection.send_bytes(own_hello)
    return own_hello


def _digest_hellos(own_hello: bytes, peer_hello: bytes) -> bytes:
    """Return one digest of both hellos, the same at both ends, 32 bytes."""
    packed_hellos = sorted((own_hello, peer_hello))  # in the same order at both ends
    digests = b"".join(hashlib.sha256(packed).digest() for packed in packed_hellos)
    return hashlib.sha256(digests).digest()


def _require_expected_peer(me: LocalEnd, name: str, peer_hello: _Hello) -> None:
    """Raise RemoteProtocolError unless a hello is from the party `name` to this party.

    Called before this party signs anything. `me`: this party. `peer_hello`: from the peer.
    """
    if name not in me.identity_by_peer or peer_hello.receiver != me.name:
        raise RemoteProtocolError(
            f"{quote_text(peer_hello.sender)} comes to {quote_text(peer_hello.receiver)}, but "
            "this is "
            f"{me.name}, whose session is with {', '.join(sorted(me.identity_by_peer))}; whoever "
            "is in it is named in the party's file"
        )
    if peer_hello.sender != name:
        raise RemoteProtocolError(
            f"{quote_text(peer_hello.sender)} answers where {me.name} expects {name}; correct the "
            f"address of {name} in the file of {me.name}"
        )


def _require_not_revoked(me: LocalEnd, name: str, peer_hello: _Hello) -> None:
    """Raise RemoteProtocolError if a peer's identity, or the certificate in its hello, is revoked.

    `me`: this party, with its revocation list. `name`: the peer's name. `peer_hello`: from the
    peer.
    """
    revoked = me.list_revoked()
    if me.identity_by_peer[name].hex() in revoked:
        raise RemoteProtocolError(f"the identity of {name} is revoked by the list of {me.name}")
    if peer_hello.certificate in revoked:
        raise RemoteProtocolError(
            f"the certificate of {name} is revoked by the list of {me.name}; {name} has another "
            "one made (secure-apfed certs request)"
        )


def receive_before(connection: Connection, deadline: float) -> bytes:
    """Wait for the next message until `deadline` on the monotonic clock, and return it.

    Raises:
        ConnectionRefusedError: the message is a refusal, whose reason is quoted.
        OSError, EOFError: no message came in time, or the connection broke.
    """
    if not connection.poll(max(0.0, deadline - time.monotonic())):
        raise TimeoutError("the other end is silent")
    message = connection.recv_bytes()
    if message.startswith(_REFUSAL_PREFIX):
        raise ConnectionRefusedError(quote_reason(message.removeprefix(_REFUSAL_PREFIX)))
    return message


def refuse_long_frame(connection: Connection, max_bytes: int) -> str:
    """Tell the other end that its frame is too long; return the reason, for this end's error.

    The connection cannot be used afterwards. `max_bytes`: the limit that the frame exceeds.
    """
    condition = "" if max_bytes > MAX_UNPROVED_FRAME_BYTES else " before it proved who it is"
    reason = f"the other end sent a frame above {max_bytes} bytes{condition}"
    refuse_connection(connection, reason)
    return reason


def refuse_connection(connection: Connection, reason: str) -> None:
    """Tell the other end why this party refuses the connection; a broken connection is ignored."""
    with contextlib.suppress(OSError):
        connection.send_bytes(_REFUSAL_PREFIX + reason[:_REFUSED_LETTERS].encode())


class _SealedConnection:
    """An encrypted and authenticated connection over an unencrypted one.

    No third party can read its frames, or alter, repeat or reorder them unnoticed.
    """

    def __init__(self, connection: Connection, link: SealedLink) -> None:
        """Encrypt the frames on a connection under the keys in `link`, which both ends share."""
        self._connection = connection
        self._sealed_link = link
        self._received_frames = 0

    def send_bytes(self, buf: bytes, /) -> None:
        """Encrypt and send one frame."""
        number = self._sealed_link.next_sequence
        self._connection.send_bytes(self._sealed_link.seal(buf, sequence=number, associated=b""))

    def recv_bytes(self) -> bytes:
        """Return the next frame, decrypted.

        Raises:
            ConnectionRefusedError: the other end refuses this party.
            ConnectionAbortedError: the frame was altered, lost or repeated on the way.
        """
        frame = self._connection.recv_bytes()
        try:
            plain_frame = self._sealed_link.open(
                frame, sequence=self._received_frames, associated=b""
            )
        except RemoteProtocolError as error:
            # The other end sends a refusal unencrypted, as it did not accept this party's proof.
            if frame.startswith(_REFUSAL_PREFIX):
                raise ConnectionRefusedError(
                    quote_reason(frame.removeprefix(_REFUSAL_PREFIX))
                ) from None
            # An intermediary altered it, not the peer: another connection may work.
            raise ConnectionAbortedError(
                f"frame {self._received_frames} of {self._sealed_link.peer} was altered, lost or "
                "repeated on the way"
            ) from error
        self._received_frames += 1
        return plain_frame

    def poll(self, timeout: float, /) -> bool:
        """Wait at most `timeout` seconds; return whether a frame can be received."""
        return self._connection.poll(timeout)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class StrangerQueue:
    """A queue of the connections whose other end has not proved its identity.

    Its length is bounded, so that strangers cannot exhaust this party's memory and threads.
    """

    def __init__(self) -> None:
        """Make an empty queue."""
        self._lock = threading.Lock()
        self._strangers: dict[Connection, None] = {}  # a set in the order of arrival

    def add(self, stranger: Connection) -> None:
        """Add a connection; if there are too many, close the oldest one."""
        with self._lock:
            self._strangers[stranger] = None
            if len(self._strangers) <= _MAX_STRANGERS:
                return
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
        oldest.close()

    def remove(self, stranger: Connection) -> None:
        """Remove a connection that has proved its identity, or has ended."""
        with self._lock:
            self._strangers.pop(stranger, None)


class PeerAcceptor:
    """An acceptor of the connections of peers that dial this party.

    A server passes each new connection to `admit_stranger`; the link to a peer calls
    `take_connection`.

    Args:
        me: this party's keys.
        awaited: names of the peers that dial.
        require_certificate: called with a peer's name and its TLS certificate in PEM; raises
            RemoteProtocolError if the certificate is not the peer's.
        absence_reason: the likely reason, for the error, if a peer does not connect.
    """

    def __init__(
        self,
        me: LocalEnd,
        awaited: tuple[str, ...],
        require_certificate: Callable[[str, bytes], None] = lambda name, certificate: None,
        absence_reason: str = "it did not dial, or came without a certificate that TLS takes",
    ) -> None:
        """Prepare to accept connections; the class describes the arguments."""
        self._me = me
        self._require_certificate = require_certificate
        self._absence_reason = absence_reason
        self._unproven = StrangerQueue()
        self._changed = threading.Condition()
        self._awaited_peers = awaited
        self._unused_connections: dict[str, Connection] = {}  # accepted, but not yet taken
        self._connections: dict[str, Connection] = {}  # the newest of each peer
        # By peer, the kind and the reason of the last failed attempt in its name.
        self._failures_by_peer: dict[str, tuple[type[OSError], str]] = {}

    def admit_stranger(self, stranger: Carrier, certificate: bytes) -> None:
        """Verify the identity behind a new connection, which then replaces its peer's former one.

        A connection that fails is closed, and the reason stored for `take_connection`.

        `stranger`: the connection, whose other end has not proved an identity. `certificate`: the
        caller's certificate, in PEM, as verified by TLS; empty without TLS.
        """
        claimed_names: list[str] = []  # the claimed name, once the hello has come

        def check_claim(name: str) -> None:
            """Remember the claimed name, and check it against the TLS certificate."""
            if name in self._awaited_peers:
                claimed_names.append(name)
            self._require_certificate(name, certificate)

        self._unproven.add(stranger)
        try:
            name, connection = prove_identity(stranger, self._me, check_name=check_claim)
        except (OSError, EOFError, RemoteProtocolError) as error:
            for claimed_name in claimed_names:
                self._record_failure(claimed_name, error)
            stranger.close()
            return
        finally:
            self._unproven.remove(stranger)
        if name not in self._awaited_peers:
            me = self._me.name
            refuse_connection(
                stranger, f"{me} dials {name}, not the other way: correct the file of {name}"
            )
            stranger.close()
            return
        self._store_connection(name, connection)

    def _store_connection(self, name: str, connection: Connection) -> None:
        """Store a peer's new connection for `take_connection`, and close its former one."""
        with self._changed:
            self._failures_by_peer.pop(name, None)
            former_connection = self._connections.get(name)
            self._connections[name] = connection
            self._unused_connections[name] = connection
            self._changed.notify_all()
        if former_connection is not None:
            former_connection.close()

    def _record_failure(self, name: str, error: Exception) -> None:
        """Record why an attempt to connect in the name of a peer failed, for `take_connection`.

        An earlier reason stays unless this one is a refusal, which says more than a break after it.
        """
        is_refusal = isinstance(error, ConnectionRefusedError | RemoteProtocolError)
        kind = ConnectionRefusedError if is_refusal else TimeoutError
        if is_refusal or name not in self._failures_by_peer:
            self._failures_by_peer[name] = (kind, f"somebody came in its name: {error}")

    def take_connection(self, name: str) -> Connection:
        """Return the newest connection of a peer, each only once; wait for it a short time.

        Raises OSError: no connection came; the text is the reason of the last failed attempt.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: name in self._unused_connections, _POLL_S):
                kind, reason = self._failures_by_peer.get(
                    name, (TimeoutError, self._absence_reason)
                )
                raise kind(reason)
            return self._unused_connections.pop(name)

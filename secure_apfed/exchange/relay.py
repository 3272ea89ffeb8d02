"""A relay between parties that can only dial out; it forwards their encrypted frames.

Run by: any host that the parties can reach; it has no key of theirs. A room is the set of a
session's public identities, named by their digest. A party that enters a room proves an identity in
this set, so no outsider can enter. The relay learns which parties exchange frames, when, and how
many bytes. The frames are encrypted between the two ends; the relay can only cut connections.
Protects itself from: rooms, streams and frames that are too many or too large, and idle streams. It
reads a list of revoked keys, as every party does: a listed certificate or identity is refused, and
its stream ends with the next frame after it is listed. Without a list that is safe, too, since each
party refuses by its own; the relay's list keeps a stolen key from learning who is there, and from
replacing its owner.
"""

import hashlib
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgpack

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.randomness import fresh_key
from apfed_protocols.seal import SIGNATURE_BYTES, verify_signature
from secure_apfed.errors import ConfigError
from secure_apfed.exchange.certificates import Credentials, RevokedList, make_revocation_entries
from secure_apfed.exchange.grpc_link import GrpcConnection, Port
from secure_apfed.exchange.resumable_link import Connection, RelayAbsentError
from secure_apfed.exchange.sealed_connection import (
    LocalEnd,
    StrangerQueue,
    receive_before,
    refuse_connection,
)
from secure_apfed.exchange.sockets import Address

_PURPOSE = b"relay v1"
_KEY_BYTES = 32
_READY = b"ready"
_MAX_PARTIES = 64
_HELLO_BYTES = 128 + _MAX_PARTIES * (_KEY_BYTES + 2) + SIGNATURE_BYTES
_MAX_ROOMS = 64
_MAX_STREAMS_IN_ROOM = 256  # streams
_PROOF_TIMEOUT_S = 10.0  # until a party has proved an identity
_IDLE_S = 120.0  # without a frame, after which a stream ends
PARTNER_S = 20.0
"""Seconds that a relay lets a party wait for another."""

_POLL_S = 1.0
_MALFORMED = (ValueError, TypeError, msgpack.UnpackException, RecursionError)


def name_room(identities: list[bytes]) -> bytes:
    """Return the name of a session's room at a relay: a digest of its parties' public keys.

    `identities`: the parties' public Ed25519 keys, in any order.
    """
    return hashlib.sha256(b"secure-apfed room v1" + b"".join(sorted(identities))).digest()


def enter_room(
    connection: Connection, me: LocalEnd, peer: str, *, wait_s: float = PARTNER_S
) -> None:
    """Prove this party's identity to a relay, and wait there for a peer.

    Afterwards the relay forwards all frames between the two. A room is the set of a session's
    parties, which the relay knows by a digest of their identities.

    Args:
        connection: connection to the relay.
        me: this party's keys and all peers' identities.
        peer: the peer to be connected to.
        wait_s: seconds to wait for the peer.

    Raises OSError: the relay is not reached or refuses this party, or the peer did not come. It is
        RelayAbsentError if the relay does not answer.
    """
    try:
        challenge = receive_before(connection, time.monotonic() + _PROOF_TIMEOUT_S)
    except ConnectionRefusedError:
        raise
    except (OSError, EOFError) as error:
        raise RelayAbsentError(
            f"the relay is not reached ({error}); start secure-apfed relay, or correct `relay`"
        ) from error
    own_key = me.identity.public
    peer_key = me.identity_by_peer[peer]
    identities = sorted((*me.identity_by_peer.values(), own_key))
    signature = me.identity.sign(_PURPOSE, challenge, name_room(identities), own_key, peer_key)
    connection.send_bytes(msgpack.packb([identities, own_key, peer_key, signature]))
    try:
        if receive_before(connection, time.monotonic() + wait_s) != _READY:
            raise ConnectionError("the relay sent something else than that the peer is there")
    except TimeoutError:
        raise TimeoutError("it did not come to the relay") from None


class _Entry(NamedTuple):
    """A verified request of one party to be connected to another party of its session.

    Attributes:
        room_digest: digest of the identities of all parties of the session, from `name_room`.
        own_key: public identity of the party that sent the request.
        peer_key: public identity of the peer that the party wants to be connected to.
    """

    room_digest: bytes
    own_key: bytes
    peer_key: bytes

    @classmethod
    def parse(cls, message: bytes, challenge: bytes) -> "_Entry":
        """Parse and verify a party's first message to the relay, which is untrusted.

        It has the identities of all parties of the session, those of the sender and its peer, and
        the sender's signature.

        `challenge`: random bytes of the relay, which the signature must cover.

        Raises RemoteProtocolError: the message is malformed, from no party of the session, or not
            signed by its sender.
        """
        try:
            if len(message) > _HELLO_BYTES:
                raise ValueError("too long")
            parties, own, other, signature = msgpack.unpackb(message)
            keys = [*parties, own, other]
            if len(parties) > _MAX_PARTIES or any(type(key) is not bytes for key in keys):
                raise TypeError("no list of identities")
            if any(len(key) != _KEY_BYTES for key in keys) or type(signature) is not bytes:
                raise ValueError("keys of another size")
            is_canonical = sorted(set(parties)) == parties  # distinct, and in order
            if own == other or not {own, other} <= set(parties) or not is_canonical:
                raise ValueError("parties that are not of the room")
        except _MALFORMED as error:
            raise RemoteProtocolError("no hello to a relay") from error
        room = name_room(parties)
        verify_signature(own, signature, _PURPOSE, challenge, room, own, other, signer="who comes")
        return cls(room, own, other)


@dataclass(eq=False)
class _Stream:
    """A connection to the relay whose party proved its identity.

    Attributes:
        entry: which two parties of which session the connection is for.
        revocation_entries: the entries of a revocation list that would revoke the party: its
            identity, and digest and serial number of its certificate, hex.
        partner: the other party's connection for the same two; None: it has not come yet.
    """

    connection: GrpcConnection
    entry: _Entry
    revocation_entries: frozenset[str]
    partner: "_Stream | None" = None


class Relay:
    """A relay that forwards encrypted frames between parties that can only dial out.

    Args:
        address: host and port where it listens.
        credentials: TLS credentials; None: unencrypted.
        allowed: public identities that may connect; None: any.
        revoked: file of the certificates and identities that may not connect, read again whenever
            it changes; while it cannot be read, nobody may connect. None: there is no such file.

    Attributes:
        port: the number of the TCP port.

    Raises ConfigError: the address cannot be used, or the file cannot be read.
    """

    def __init__(
        self,
        address: Address,
        credentials: Credentials | None,
        allowed: frozenset[bytes] | None = None,
        *,
        revoked: Path | None = None,
    ) -> None:
        """Read the revocation list, and listen; the class describes the arguments."""
        self._allowed_identities = allowed
        self._strangers = StrangerQueue()  # connections that have not proved an identity
        self._revoked_list = RevokedList(revoked)
        # Called for its errors: a list that cannot be read must stop the relay at once.
        self._revoked_list.load_entries()
        self._changed = threading.Condition()
        self._streams_by_room: dict[bytes, dict[_Entry, _Stream]] = {}  # by a session's digest
        self._port = Port(address, credentials, self._serve_stranger)
        self.port = self._port.port

    def close(self) -> None:
        """Stop listening, and end all connections."""
        self._port.close()

    def _serve_stranger(self, stranger: GrpcConnection, certificate: bytes) -> None:
        """Verify the identity behind a new connection, then forward its peer's frames to it.

        Runs in a thread of its own until the connection ends. A caller that is not admitted gets
        the reason, and its connection is closed.

        `stranger`: the connection, whose other end has not proved an identity. `certificate`: the
        caller's certificate, in PEM, as verified by TLS; empty without TLS.
        """
        self._strangers.add(stranger)
        try:
            challenge = fresh_key()
            stranger.send_bytes(challenge)
            entry = _Entry.parse(
                receive_before(stranger, time.monotonic() + _PROOF_TIMEOUT_S), challenge
            )
            if (
                self._allowed_identities is not None
                and entry.own_key not in self._allowed_identities
            ):
                raise RemoteProtocolError("this identity is not among those that may enter")
            revocation_entries = frozenset(
                {entry.own_key.hex(), *make_revocation_entries(certificate)}
            )
            self._require_not_revoked(revocation_entries)
            stranger.trust_peer()
            stream = _Stream(stranger, entry, revocation_entries)
            self._admit_stream(stream)
        except (OSError, EOFError, RemoteProtocolError) as error:
            if isinstance(error, RemoteProtocolError):
                refuse_connection(stranger, f"the relay refuses this connection: {error}")
            stranger.close()
            return
        finally:
            self._strangers.remove(stranger)
        try:
            self._forward_frames(stream)
        finally:
            with self._changed:
                self._remove_stream(stream)

    def _require_not_revoked(self, revocation_entries: frozenset[str]) -> None:
        """Raise RemoteProtocolError if the revocation list has one of these entries.

        The error is also raised if the list cannot be read: then nobody may connect.

        `revocation_entries`: digests, serial numbers and keys (hex) of a connecting party.
        """
        try:
            revoked = self._revoked_list.load_entries()
        except ConfigError as error:
            raise RemoteProtocolError(
                "its list of what is revoked cannot be read; ask who runs it"
            ) from error
        if revocation_entries & revoked:
            raise RemoteProtocolError(
                "this certificate or identity is revoked by its list; have another one made, or "
                "ask who runs it"
            )

    def _admit_stream(self, stream: _Stream) -> None:
        """Register a party's connection, and join it to its peer's connection, if there is one.

        A former connection of the same party to the same peer is closed, and the peer's end of it,
        too: the party's former connection may hang.

        Raises RemoteProtocolError: too many connections are in the room, or too many rooms exist.
        """
        entry = stream.entry
        with self._changed:
            streams_in_room = self._streams_by_room.get(entry.room_digest, {})
            former_stream = streams_in_room.get(entry)
            if former_stream is not None:
                self._remove_stream(former_stream)
                if former_stream.partner is not None:
                    self._remove_stream(former_stream.partner)
            elif len(streams_in_room) >= _MAX_STREAMS_IN_ROOM or (
                not streams_in_room and len(self._streams_by_room) >= _MAX_ROOMS
            ):
                raise RemoteProtocolError("it is full; come again, or ask who runs it")
            streams_in_room = self._streams_by_room.setdefault(entry.room_digest, {})
            streams_in_room[entry] = stream
            stream.partner = streams_in_room.get(
                _Entry(entry.room_digest, own_key=entry.peer_key, peer_key=entry.own_key)
            )
            if stream.partner is not None:
                stream.partner.partner = stream
            self._changed.notify_all()

    def _remove_stream(self, stream: _Stream) -> None:
        """Close and forget a connection, and forget its room if it was the last one there."""
        stream.connection.close()
        streams_in_room = self._streams_by_room.get(stream.entry.room_digest, {})
        if streams_in_room.get(stream.entry) is stream:
            del streams_in_room[stream.entry]
        if not streams_in_room:
            self._streams_by_room.pop(stream.entry.room_digest, None)

    def _forward_frames(self, stream: _Stream) -> None:
        """Wait for the partner (the peer's connection), and forward its frames to this connection.

        Returns once one of the two connections ends or is revoked, or if no partner comes.
        """
        deadline = time.monotonic() + PARTNER_S
        with self._changed:
            while stream.partner is None:
                # It sends nothing before the partner is there: input means that it disconnected.
                if time.monotonic() > deadline or stream.connection.poll(0):
                    return
                self._changed.wait(_POLL_S)
            partner = stream.partner.connection
            revocation_entries = stream.revocation_entries | stream.partner.revocation_entries
        try:
            stream.connection.send_bytes(_READY)
            while partner.poll(_IDLE_S):
                frame = partner.recv_bytes()
                self._require_not_revoked(revocation_entries)
                stream.connection.send_bytes(frame)
        except (OSError, EOFError, RemoteProtocolError):
            pass
        partner.close()  # each end of a pair is useless without the other

"""An authenticated link between two parties in one call, from an address and a shared secret.

Run by: each of two parties, for a protocol between them, such as `apfed_protocols.align_with`.
Protects from: adversaries on the network and strangers, as `sealed_connection` does; there is no
link without authentication. Both ends derive two identities from a shared secret. A stranger that
connects gets a signature against which it can test guesses of the secret, each at the cost of one
scrypt (RFC 7914); so the secret must be random.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from functools import partial

from apfed_protocols.checks import require_names
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.randomness import derive_key
from apfed_protocols.seal import Identity
from secure_apfed.exchange import sockets
from secure_apfed.exchange.resumable_link import Connection, ResumableLink
from secure_apfed.exchange.sealed_connection import LocalEnd, PeerAcceptor, prove_identity
from secure_apfed.exchange.sockets import Address, Port, parse_address, spell_address

__all__ = ["PeerLink", "open_link"]

_SECRET_BYTES = 16
_KEY_BYTES = 32
_LAST_S = 5.0


class PeerLink(ResumableLink):
    """A link between two parties that knows their names.

    Attributes:
        me, peer: the names of this party and the other.
        hub: the name of the party that listens. It is the same at both ends, so a protocol can
            give the two parties different roles.
    """

    def __init__(
        self,
        me: str,
        peer: str,
        hub: str,
        connect: Callable[[], Connection],
        patience_s: float,
    ) -> None:
        """Open the link of `me` to `peer`.

        `hub`: name of the party that listens. `connect`: makes a new connection; called again
        after each break. `patience_s`: seconds that the peer may be away, at first and after each
        break.
        """
        self.me = me
        self.peer = peer
        self.hub = hub
        super().__init__(peer, connect, patience_s=patience_s)


@contextlib.contextmanager
def open_link(
    me: str,
    peer: str,
    *,
    listen: str | None = None,
    dial: str | None = None,
    secret: str | bytes | None = None,
    identities: tuple[Identity, bytes] | None = None,
    patience_s: float = 60.0,
) -> Iterator[PeerLink]:
    """Open one party's end of an authenticated and encrypted link over TCP, for a `with` block.

    The link exists at once; sending and receiving wait for the peer. A broken connection is
    restored without loss, but the link ends with its process. At its end the block waits until the
    peer has received everything.

    Args:
        me, peer: the names of this party and the other.
        listen: "host:port" at which this party listens for the peer; None: it dials.
        dial: "host:port" at which the peer listens; None: this party listens.
        secret: random text or bytes, at least 16, known to these two only; None: see `identities`.
        identities: instead of a secret: this party's key pair, and the peer's public key (32
            bytes).
        patience_s: seconds that the peer may be away, at first and after each break.

    Raises:
        LocalProtocolError: not exactly one address and one way to authenticate, or the address
            cannot be used.
        RemoteProtocolError: on sending, receiving and closing: nobody came, or another party.

    Examples:
        >>> import secrets, socket
        >>> from threading import Thread
        >>> from secure_apfed import open_link
        >>> with socket.create_server(("127.0.0.1", 0)) as server:  # a free port
        ...     place = f"127.0.0.1:{server.getsockname()[1]}"
        >>> secret = secrets.token_urlsafe()  # told in private
        >>> def run_shop():  # in a process of its own
        ...     with open_link("shop", "bank", dial=place, secret=secret) as link:
        ...         link.send(b"good morning")
        >>> shop = Thread(target=run_shop)
        >>> shop.start()
        >>> with open_link("bank", "shop", listen=place, secret=secret) as link:
        ...     link.receive(60.0)
        b'good morning'
        >>> shop.join()
    """
    require_names("link", "session", (me, peer))
    if (listen is None) == (dial is None):
        raise LocalProtocolError(
            f"{me}: a link listens or dials; give open_link listen= at one end and dial= at the "
            'other, as "host:port"'
        )
    address_text = str(dial or listen)
    address = parse_address(address_text)
    keys = _make_local_keys(me, peer, secret, identities)
    stack = contextlib.ExitStack()  # closes the port, if this party listens
    if listen is None:
        hub = peer
        connect: Callable[[], Connection] = partial(_connect_peer, keys, peer, address)
    else:
        hub = me
        acceptor = PeerAcceptor(
            keys,
            (peer,),
            absence_reason=f"it did not come to {address_text}; start it, or correct dial=",
        )
        connect = partial(acceptor.take_connection, peer)
        try:
            port = Port(address, acceptor.admit_stranger)
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise LocalProtocolError(
                f"{me} cannot listen at {address_text} ({reason}); end "
                "who does, or name another port at both ends"
            ) from error
        stack.callback(port.close)
    link = PeerLink(me, peer, hub, connect, patience_s)
    with stack:
        try:
            yield link
            link.close(linger_s=_LAST_S)
        except BaseException:
            with contextlib.suppress(RemoteProtocolError):  # the error of the block matters more
                link.close(_LAST_S, linger_s=_LAST_S)
            raise


def _make_local_keys(
    me: str, peer: str, secret: str | bytes | None, identities: tuple[Identity, bytes] | None
) -> LocalEnd:
    """Return this party's key pair and the peer's public key, given or derived from a secret.

    From a secret each end derives the key pairs of both ends, and uses only the public key of the
    other.

    Args:
        me, peer: the names of this party and the other.
        secret: the shared secret; None: `identities` is given.
        identities: this party's key pair, and the peer's public key, 32 bytes; None: `secret` is
            given.

    Raises LocalProtocolError: neither or both are given, or they are too short or of wrong types.
    """
    if (secret is None) == (identities is None):
        raise LocalProtocolError(
            f"{me}: a link authenticates both ends; give open_link the same secret= at both, or "
            f"identities=(identity of {me}, public bytes of that of {peer})"
        )
    if identities is not None:
        given_pair: object = (
            identities  # untyped, since a caller may pass something else than a pair
        )
        given_types = (
            list(map(type, given_pair)) if isinstance(given_pair, tuple) else [type(given_pair)]
        )
        if given_types != [Identity, bytes] or len(identities[1]) != _KEY_BYTES:
            raise LocalProtocolError(
                f"{me}: identities= takes a fresh_identity() of {me} and the {_KEY_BYTES} bytes "
                f"`public` of that of {peer}; got "
                f"{', '.join(kind.__name__ for kind in given_types)}"
            )
        own_identity, peer_key = identities
        return LocalEnd(name=me, identity=own_identity, identity_by_peer={peer: peer_key})
    secret_bytes = secret.encode() if isinstance(secret, str) else secret
    if not isinstance(secret_bytes, bytes) or len(secret_bytes) < _SECRET_BYTES:
        raise LocalProtocolError(
            f"{me}: secret= is random text or bytes, at least {_SECRET_BYTES}, the same at both "
            "ends; secrets.token_urlsafe() makes one, to be told in private"
        )
    # Scrypt (RFC 7914) makes each guess at a weak secret cost 128 n r bytes = 32 MiB of memory.
    salt = b"secure-apfed link v1"
    root_key = hashlib.scrypt(
        secret_bytes, salt=salt, n=2**15, r=8, p=1, maxmem=2**26, dklen=_KEY_BYTES
    )
    own_identity = Identity.from_secret_bytes(derive_key(root_key, me.encode()))
    peer_identity = Identity.from_secret_bytes(derive_key(root_key, peer.encode()))
    return LocalEnd(name=me, identity=own_identity, identity_by_peer={peer: peer_identity.public})


def _connect_peer(me: LocalEnd, peer: str, address: Address) -> Connection:
    """Dial the peer; return an encrypted connection, once both ends proved their identities.

    `me`: this party's keys. Errors say which argument of `open_link` to correct.

    Raises:
        OSError, EOFError: nobody listens there, or the connection broke.
        RemoteProtocolError: another party answered.
    """
    try:
        connection = sockets.dial(address)
    except ConnectionError as error:
        place = spell_address(address)
        message = f"{me.name} reached nobody at {place} ({error}); start {peer}, or correct dial="
        raise ConnectionError(message) from error
    try:
        _, encrypted_connection = prove_identity(connection, me, peer)
        return encrypted_connection
    except RemoteProtocolError as error:
        connection.close()
        raise RemoteProtocolError(f"{error}; compare what both ends gave open_link") from error
    except BaseException:
        connection.close()
        raise

"""How one party reaches the others, by its own file: table `LINKS`.

Run by: each party, once a session. "tcp" is for processes of one machine; "grpc" for machines of
several organisations, direct or through a relay that all dial. Inside a job of NVFlare's its site
connects instead (`nvflare_site.py`).
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TypeAlias

from apfed_protocols.seal import Identity
from secure_apfed.errors import ConfigError
from secure_apfed.exchange import Sockets, Transport
from secure_apfed.exchange.certificates import Credentials, read_revoked, require_caller
from secure_apfed.exchange.door import Door
from secure_apfed.exchange.grpc_link import Port, dial, warn_of_plaintext
from secure_apfed.exchange.linked import Linked
from secure_apfed.exchange.relay import PARTNER_S, through
from secure_apfed.exchange.resumable_link import Connection
from secure_apfed.exchange.sealed_connection import Carrier, LocalEnd, prove
from secure_apfed.exchange.sockets import Address, listen_at, parse_address
from secure_apfed.runs.party_file import PartyFile

__all__ = ["LINKS", "Connect", "connect"]

_Connect = Callable[[], Connection]
Connect: TypeAlias = Callable[[PartyFile, Identity, Mapping[str, bytes]], Transport]
"""Connects a party to all others; see `connect`."""


def connect(told: PartyFile, identity: Identity, known: Mapping[str, bytes]) -> Transport:
    """Connect to all others.

    Args:
        told: the party's file.
        identity: its key pair.
        known: public identities, by party.

    Raises:
        ConfigError: the file does not say how.
        PartyLeftError: names those who did not come.
    """
    return LINKS[told.link](told, identity, known)


def _over_tcp(told: PartyFile, identity: Identity, known: Mapping[str, bytes]) -> Transport:
    addresses = {name: _address_of(told, name) for name in told.peers}
    try:
        listener = listen_at(_listen(told))
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"listen: {told.party} cannot listen at {told.listen} ({why}); end "
            "who does, or name another port there and in the others' files"
        ) from error
    return Sockets.meet(
        told.party, listener, addresses, identity=identity, known=known, timeout_s=told.meet_s
    )


def _over_grpc(told: PartyFile, identity: Identity, known: Mapping[str, bytes]) -> Transport:
    credentials = _credentials(told)
    peers = {name: key for name, key in known.items() if name != told.party}
    me = LocalEnd(
        name=told.party, identity=identity, known=peers,
        certificate=credentials.digest if credentials else "", revoked=lambda: _revoked_now(told),
    )  # fmt: skip
    with ExitStack() as stack:
        if told.relay is not None:
            ways = _by_relay(told, me, credentials)
        else:
            ways = _direct(told, me, credentials, stack)
        return Linked.meet(
            told.party, ways, patience_s=told.reconnect_s, meet_s=told.meet_s,
            end=stack.pop_all().close,
        )  # fmt: skip


def _direct(
    told: PartyFile, me: LocalEnd, credentials: Credentials | None, stack: ExitStack
) -> dict[str, _Connect]:
    """Ways to peers that listen, and a door for those that dial."""
    dialled = {name for name in told.peers if _dials(told, name)}
    ways = {name: _dialler(told, me, name, credentials) for name in dialled}
    awaited = tuple(name for name in told.peers if name not in dialled)
    if awaited:
        door = Door(me, awaited, _require_of(told) if credentials else lambda name, pem: None)
        stack.callback(Port(_listen(told), credentials, door.welcome).close)
        ways |= {name: _waiting(door, name) for name in awaited}
    return ways


def _dials(told: PartyFile, peer: str) -> bool:
    """Whether this party dials: where only the other listens, or where both do, by their names.

    Raises:
        ConfigError: neither listens.
    """
    there = told.peers[peer].address is not None
    if not there and told.listen is None:
        raise ConfigError(
            f"{told.party} has no `listen`, and {peer} no address: one of the two must be reached; "
            "give one of them, or `relay: host:port` in the files of all"
        )
    return there and (told.listen is None or peer < told.party)


def _dialler(told: PartyFile, me: LocalEnd, peer: str, credentials: Credentials | None) -> _Connect:
    address, name = _address_of(told, peer), None if told.peers[peer].behind_proxy else peer

    def connect() -> Connection:
        connection = dial(address, credentials, name=name, proxy=told.proxy)
        return _proved(connection, me, peer)

    return connect


def _by_relay(
    told: PartyFile, me: LocalEnd, credentials: Credentials | None
) -> dict[str, _Connect]:
    assert told.relay is not None
    address = parse_address(told.relay)

    def way(peer: str) -> _Connect:
        def connect() -> Connection:
            connection = dial(address, credentials, name=told.relay_name, proxy=told.proxy)
            try:
                through(connection, me, peer, wait_s=min(PARTNER_S, told.reconnect_s / 3))
            except BaseException:
                connection.close()
                raise
            return _proved(connection, me, peer)

        return connect

    return {peer: way(peer) for peer in told.peers}


def _proved(connection: Carrier, me: LocalEnd, peer: str) -> Connection:
    try:
        return prove(connection, me, peer)[1]
    except BaseException:
        connection.close()
        raise


def _waiting(door: Door, peer: str) -> _Connect:
    return lambda: door.connect(peer)


def _require_of(told: PartyFile) -> Callable[[str, bytes], None]:
    def require(name: str, certificate: bytes) -> None:
        if name in told.peers and not told.peers[name].behind_proxy:
            require_caller(name, certificate, _revoked_now(told))

    return require


def _inside_a_job(told: PartyFile, identity: Identity, known: Mapping[str, bytes]) -> Transport:
    raise ConfigError(
        f"{told.party}: link: nvflare is for a job of NVFlare's, whose site starts the party: "
        "submit the job (docs/nvflare.md), or name another link"
    )


def _revoked(told: PartyFile) -> frozenset[str]:
    return read_revoked(told.tls.revoked if told.tls else None)


def _revoked_now(told: PartyFile) -> frozenset[str]:
    """The list as it is now; without it nobody is let in.

    Raises:
        ConnectionError: it cannot be read.
    """
    try:
        return _revoked(told)
    except ConfigError as error:
        raise ConnectionError(str(error)) from error


def _credentials(told: PartyFile) -> Credentials | None:
    """What TLS needs; None on loopback where that was asked for by name."""
    if told.tls is not None:
        files = told.tls
        return Credentials.load(
            files.ca, files.certificate, files.key, name=told.party, revoked=_revoked(told)
        )
    if not told.insecure_plaintext_on_loopback:
        raise ConfigError(
            f"{told.party}: link: grpc needs `tls` with ca, certificate and key (secure-apfed "
            "certs makes them for a trial)"
        )
    named = [told.listen, told.relay, *(peer.address for peer in told.peers.values())]
    warn_of_plaintext(*(parse_address(one)[0] for one in named if one is not None))
    return None


def _listen(told: PartyFile) -> Address:
    if told.listen is None:
        raise ConfigError(f"listen: say where {told.party} is reached, as host:port")
    return parse_address(told.listen)


def _address_of(told: PartyFile, peer: str) -> Address:
    address = told.peers[peer].address
    if address is None:
        raise ConfigError(f"peers.{peer}.address: say where {peer} is reached, as host:port")
    return parse_address(address)


LINKS: Mapping[str, Connect] = {
    "tcp": _over_tcp,
    "grpc": _over_grpc,
    "nvflare": _inside_a_job,
}

"""How one party reaches the others, by its own file: table `LINKS`.

Run by: each party, once a session. "tcp" is for processes of one machine; "grpc" for machines of
several organisations, direct or through a relay that all dial. Inside a job of NVFlare's its site
connects instead (`nvflare_site.py`). What carries the frames differs, and nothing else: each
connection begins with a proof of who is there, is sealed, and is made anew where it breaks.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from apfed_protocols.identity import Identity
from secure_apfed.errors import ConfigError
from secure_apfed.exchange import Transport, sockets
from secure_apfed.exchange.resumable_link import Connection, Linked
from secure_apfed.exchange.sealed_connection import Carrier, Door, LocalEnd, prove
from secure_apfed.exchange.sockets import Address, parse_address, spell_address
from secure_apfed.runs.party_file import PartyFile

if TYPE_CHECKING:
    from secure_apfed.between.certificates import Credentials

__all__ = ["LINKS", "Connect", "connect"]

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
    if told.link not in LINKS:
        raise ConfigError(
            f"{told.party}: link: nvflare is for a job of NVFlare's, whose site starts the party: "
            "submit the job (docs/nvflare.md), or name another link"
        )
    return LINKS[told.link](told, identity, known).meet()


class _OverTcp:
    """Peers that listen are dialled, the others come to a door."""

    certificate = ""

    def __init__(self, told: PartyFile, identity: Identity, known: Mapping[str, bytes]) -> None:
        self.told = told
        self.me = LocalEnd(
            name=told.party, identity=identity,
            known={name: key for name, key in known.items() if name != told.party},
            certificate=self.certificate, revoked=self.revoked,
        )  # fmt: skip

    def meet(self) -> Transport:
        with ExitStack() as stack:
            ways = self.ways(stack)
            return Linked.meet(
                self.told.party, ways, patience_s=self.told.reconnect_s, meet_s=self.told.meet_s,
                end=stack.pop_all().close,
            )  # fmt: skip

    def ways(self, stack: ExitStack) -> dict[str, Callable[[], Connection]]:
        """By peer, what makes a connection to it."""
        ways: dict[str, Callable[[], Connection]] = {
            peer: partial(self.proved, peer) for peer in self.told.peers if self._dials(peer)
        }
        awaited = tuple(peer for peer in self.told.peers if peer not in ways)
        if awaited:
            door = self.door(awaited)
            stack.callback(self.listen(door))
            ways |= {name: partial(door.connect, name) for name in awaited}
        return ways

    def _dials(self, peer: str) -> bool:
        """Whether this party dials: where only the other listens, or where both do, by their names.

        Raises:
            ConfigError: neither listens.
        """
        party, there = self.told.party, self.told.peers[peer].address is not None
        if not there and self.told.listen is None:
            raise ConfigError(
                f"{party} has no `listen`, and {peer} no address: one of the two must be reached; "
                "give one of them, or `relay: host:port` in the files of all"
            )
        return there and (self.told.listen is None or peer < party)

    def proved(self, peer: str) -> Connection:
        connection = self.dial(peer)
        try:
            self.enter(connection, peer)
            return prove(connection, self.me, peer)[1]
        except BaseException:
            connection.close()
            raise

    def enter(self, connection: Carrier, peer: str) -> None:
        """Do what comes before the proof."""

    def address_of(self, peer: str) -> Address:
        address = self.told.peers[peer].address
        assert address is not None
        return parse_address(address)

    def dial(self, peer: str) -> Carrier:
        address = self.address_of(peer)
        try:
            return sockets.dial(address)
        except ConnectionError as error:
            raise ConnectionError(
                f"{self.me.name} reached nobody as {peer} at {spell_address(address)} ({error}); "
                f"start {peer}, or correct its address"
            ) from error

    def door(self, awaited: tuple[str, ...]) -> Door:
        me = self.me.name
        why = (
            f"it did not come to {me} in time; start it, or correct the address of {me} in its file"
        )
        return Door(self.me, awaited, absent=why)

    def listen(self, door: Door) -> Callable[[], None]:
        """Let others come to the door; return what ends that."""
        assert self.told.listen is not None
        try:
            return sockets.Port(parse_address(self.told.listen), door.welcome).close
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"listen: {self.told.party} cannot listen at {self.told.listen} ({why}); end "
                "who does, or name another port there and in the others' files"
            ) from error

    def revoked(self) -> frozenset[str]:
        return frozenset()


class _OverGrpc(_OverTcp):
    """The same between machines with TLS at both ends; or all peers at a relay that all dial."""

    def __init__(self, told: PartyFile, identity: Identity, known: Mapping[str, bytes]) -> None:
        from secure_apfed.between import certificates, grpc_link, relay

        self._certificates, self._grpc, self._relay = certificates, grpc_link, relay
        self._credentials = self._load(told)
        if self._credentials is not None:
            self.certificate = self._credentials.digest
        super().__init__(told, identity, known)

    def _load(self, told: PartyFile) -> "Credentials | None":
        """What TLS needs; None on loopback where that was asked for by name."""
        if told.tls is not None:
            files = told.tls
            return self._certificates.Credentials.load(
                files.ca, files.certificate, files.key, name=told.party,
                revoked=self._certificates.read_revoked(files.revoked),
            )  # fmt: skip
        if not told.insecure_plaintext_on_loopback:
            raise ConfigError(
                f"{told.party}: link: grpc needs `tls` with ca, certificate and key (secure-apfed "
                "certs makes them for a trial)"
            )
        named = [told.listen, told.relay, *(peer.address for peer in told.peers.values())]
        self._grpc.warn_of_plaintext(*(parse_address(one)[0] for one in named if one is not None))
        return None

    def ways(self, stack: ExitStack) -> dict[str, Callable[[], Connection]]:
        if self.told.relay is None:
            return super().ways(stack)
        return {peer: partial(self.proved, peer) for peer in self.told.peers}

    def dial(self, peer: str) -> Carrier:
        told = self.told
        if told.relay is not None:
            address, name = parse_address(told.relay), told.relay_name
        else:
            address, name = self.address_of(peer), None if told.peers[peer].behind_proxy else peer
        return self._grpc.dial(address, self._credentials, name=name, proxy=told.proxy)

    def enter(self, connection: Carrier, peer: str) -> None:
        if self.told.relay is not None:
            wait_s = min(self._relay.PARTNER_S, self.told.reconnect_s / 3)
            self._relay.through(connection, self.me, peer, wait_s=wait_s)

    def door(self, awaited: tuple[str, ...]) -> Door:
        return Door(self.me, awaited, self._require)

    def _require(self, name: str, certificate: bytes) -> None:
        peer = self.told.peers.get(name)
        if self._credentials is not None and peer is not None and not peer.behind_proxy:
            self._certificates.require_caller(name, certificate, self.revoked())

    def listen(self, door: Door) -> Callable[[], None]:
        assert self.told.listen is not None
        address = parse_address(self.told.listen)
        return self._grpc.Port(address, self._credentials, door.welcome).close

    def revoked(self) -> frozenset[str]:
        """The list as it is now; without it nobody is let in.

        Raises:
            ConnectionError: it cannot be read.
        """
        try:
            return self._certificates.read_revoked(self.told.tls.revoked if self.told.tls else None)
        except ConfigError as error:
            raise ConnectionError(str(error)) from error


LINKS: Mapping[str, type[_OverTcp]] = {"tcp": _OverTcp, "grpc": _OverGrpc}

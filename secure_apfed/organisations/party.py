"""Running one party in its own process: its folder, data, script and connections.

Run by: each party, from its own file of settings. Only this party's own files are loaded; it learns
of the others' data only from their messages, as the contract defines.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, Field

from apfed_protocols.errors import LocalProtocolError, PartyLeftError
from apfed_protocols.seal import Identity
from secure_apfed.alignment.overlap import CommonPeople
from secure_apfed.base.files import load_json, write_atomically
from secure_apfed.base.names import Name, PartyName
from secure_apfed.base.seeds import isolate_torch_modes
from secure_apfed.config import Config
from secure_apfed.config.file import dump_settings, load_config, load_settings_text
from secure_apfed.config.plain_yaml import format_yaml, load_text, parse_yaml
from secure_apfed.contract import PartyRole
from secure_apfed.data import OwnData, load_own, load_own_tables
from secure_apfed.errors import ConfigError, DataError
from secure_apfed.exchange import Links, StatusTracker, Transport, run_role, sockets
from secure_apfed.exchange.links import is_final_stop
from secure_apfed.exchange.resumable_link import ALL_AGAIN, Connection, LinkTransport, Missed
from secure_apfed.exchange.sealed_connection import Carrier, LocalEnd, PeerAcceptor, prove_identity
from secure_apfed.exchange.sockets import Address, parse_address, spell_address
from secure_apfed.exchange.status import Meter
from secure_apfed.learning.own_code import (
    UserFunctions,
    UserFunctionSettings,
    refuse_user_functions,
)
from secure_apfed.methods import (
    METHODS,
    PartyContext,
    Session,
    assign_roles,
    new_session,
    run_helper,
    start_active,
)
from secure_apfed.methods.session import PartySession
from secure_apfed.networks.models import limit_threads_for
from secure_apfed.organisations.counters import list_nonzero_counters, open_counters
from secure_apfed.organisations.own_record import OwnRecord
from secure_apfed.organisations.revocation import RevocationWatch
from secure_apfed.runs.audit_log import AUDIT_LOG_NAME, AuditLog
from secure_apfed.runs.checkpoint_store import PartyCheckpointStore
from secure_apfed.runs.folder import (
    PartyFolder,
    RunFolder,
    make_no_checkpoint_error,
    require_open_project,
)
from secure_apfed.runs.outcome import Progress, RunResult
from secure_apfed.runs.past_sessions import NO_EARLIER_SESSIONS, PastSessions, load_logged_sessions
from secure_apfed.runs.training_labels import load_training_labels
from secure_apfed.runs.training_loop import RunCallbacks, RunWriter, TrainingLoop
from secure_apfed.runs.weakened_settings import (
    describe_shared_organisations,
    describe_weakened_settings,
)
from secure_apfed.settings import FollowsFrom, NoProtection, Protection, Settings
from secure_apfed.settings.data import TableShape
from secure_apfed.settings.plugins import import_callable
from secure_apfed.settings.protection import Limit, list_key_protections, require_limits

if TYPE_CHECKING:
    from secure_apfed.exchange.certificates import Credentials


def _check_address(text: str) -> str:
    """Return a text unchanged if it is an address "host:port". Raises ValueError: it is not."""
    try:
        # Called for its error; the text itself is kept.
        parse_address(text)
    except LocalProtocolError as error:
        raise ValueError(str(error)) from None
    return text


PARTY_FILE = "party.yaml"
ANSWER_FILE = "answer-{}.json"
"""Name of the file in a party's folder with its answer to a proposed project; "{}": the party."""
_NOTHING_TO_DO = "nothing to do: "
_MIN_DEFAULT_LIMIT = 100  # answers, if the party's file sets no limit
_DAYS_TO_ANSWER_A_TABLE = 10  # in which as many answers as people are allowed, likewise
Place: TypeAlias = Annotated[str, AfterValidator(_check_address)]


class Peer(Settings):
    """The address and the public key of another party.

    Attributes:
        address: "host:port", or "[::1]:port" for IPv6; null: the peer dials, or both parties dial a
            relay.
        identity: the peer's Ed25519 public key, hex.
        behind_proxy: whether a proxy terminates TLS before the peer; the identity still proves who
            it is. A certificate there is not the party's.
    """

    address: Place | None = None
    identity: str = Field(pattern="^[0-9a-f]{64}$")
    behind_proxy: bool = False


class Tls(Settings):
    """The files for TLS, in PEM; see docs/between-organisations.md.

    Attributes:
        ca: the certificate authorities that this party accepts.
        certificate: this party's certificate.
        key: the key of this certificate.
        revoked: a list of certificates and identities that this party refuses (see `secure-apfed
            certs`).
    """

    ca: Path
    certificate: Path
    key: Path
    revoked: Path | None = None

    def resolve_paths(self, folder: Path) -> "Tls":
        """Return the settings with relative paths resolved from `folder`."""
        paths = {name: path for name, path in self if path is not None}
        return self.model_copy(update={name: folder / path for name, path in paths.items()})


class ServeSettings(Settings):
    """A party's limits on the joint predictions that it helps to make, in all sessions together.

    Attributes:
        table: the people who may be asked about, with the columns of the training; null: the table
            of the training.
        a_person: the limit of predictions of one person, ever; then this person is left out.
        a_day: the limit of predictions a day (UTC), of all people; this and the next two limits end
            a session. Null: a tenth of the people who may be asked about, and 100 at least.
        in_all: the limit of predictions ever, of all people; null: as many as there are people.
        lookups_a_day: the limit of IDs that may be looked up a day, known or not; null: as a_day.
        epsilon: the privacy cost of all predictions of one person, besides the training, if the run
            agreed on noise; null: as much as the training. A person who reached it is left out, as
            under `a_person`.
    """

    table: Path | None = None
    a_person: int = Field(100, ge=1)
    a_day: int | None = Field(None, ge=1)
    in_all: int | None = Field(None, ge=1)
    lookups_a_day: int | None = Field(None, ge=1)
    epsilon: float | None = Field(None, gt=0)

    def limits_for(self, person_count: int) -> "ServeSettings":
        """Return the settings with each missing limit set to its default.

        `person_count`: how many people may be asked about, from which the defaults follow.
        """
        a_day = max(_MIN_DEFAULT_LIMIT, person_count // _DAYS_TO_ANSWER_A_TABLE)
        return self.model_copy(
            update={
                "a_day": self.a_day or a_day,
                "in_all": self.in_all or max(_MIN_DEFAULT_LIMIT, person_count),
                "lookups_a_day": self.lookups_a_day or a_day,
            }
        )


class OwnLimits(Settings):
    """A party's own limits of protection; a run whose settings protect less is refused.

    Attributes:
        minima: by key path of a setting, such as `rules.minimum_batch: 20`, the smallest value that
            this party accepts; for a choice the least protective one, such as `party_seeds:
            secret`. `*` is any name.
        maxima: by key path, the largest accepted value of a setting that protects less if larger,
            such as `rules.spare_answers: 2`.
    """

    minima: dict[str, Limit] = {}
    maxima: dict[str, Limit] = {}

    @classmethod
    def from_incomplete_file(cls, path: Path) -> "OwnLimits":
        """Return the limits in a party's settings file, which may not be complete yet, or missing.

        A party may write its limits before it joins a project, which adds the other settings.
        """
        content = None
        if path.exists():
            content, _ = parse_yaml(load_text(path), str(path))
        settings = content if isinstance(content, dict) else {}
        limit_fields = {key: settings[key] for key in cls.model_fields if key in settings}
        # Parsed as a file of limits alone, so that errors name the file; no file may be empty.
        limits_text = format_yaml(limit_fields or {"minima": {}})
        return load_settings_text(cls, limits_text, source=str(path))

    def require_protection(
        self, config: Config, *, party: str, path: Path, settings_owner: str
    ) -> None:
        """Raise ConfigError if settings of a run protect less than these limits allow.

        The error names all such settings.

        Args:
            config: the run's settings.
            party: name of the party that sets the limits, for the error.
            path: the file of the limits, for the error.
            settings_owner: the party that may change the run's settings, for the error.
        """
        require_limits(
            config,
            self.minima,
            self.maxima,
            protection_by_path=list_protections(),
            party=party,
            file=str(path),
            settings_author=settings_owner,
        )


@cache
def list_protections() -> Mapping[str, Protection | NoProtection | FollowsFrom | None]:
    """Return, by dotted path, whether and how each possible setting of a run affects protection."""
    mark_by_setting = dict(list_key_protections(Config))
    for method in METHODS.values():
        mark_by_setting |= list_key_protections(method.settings, "method.")
    return mark_by_setting


class PartyFile(OwnLimits):
    """The settings file of one party: all that it needs to take part in a run, in YAML.

    Each party writes it for itself, or `prepare_parties` for a trial on one machine. Paths that are
    relative start at the file's folder.

    Attributes:
        party: the name of this party.
        active: the name of the active.
        passives: the names of all passives.
        config: the YAML file of the run; what the parties agree on must be the same at all parties.
        folder: this party's folder for keys, checkpoints and logs.
        listen: "host:port" where the other parties reach this one; null: it only dials.
        peers: the other parties, by name.
        link: the transport: "tcp" (within one machine), "grpc" (between machines), or "nvflare"
            (inside a job of NVFlare). The last needs no addresses.
        tls: the TLS files for "grpc".
        insecure_plaintext_on_loopback: whether "grpc" runs without TLS, which only addresses of
            this machine may. Frames are sealed all the same.
        relay: "host:port" of a relay that all parties dial, if some cannot be reached.
        relay_name: the name in the relay's certificate; null: the name of its host.
        proxy: "http://host:port" of a proxy that is asked to CONNECT; null: that of the
            environment.
        reconnect_s: the number of seconds without a sign of life after which a peer counts as gone.
        table: this party's rows, prepared for a trial; null reads its own file of `data.parties`.
        timeout_s: the unit of patience, in seconds: how long a peer may be silent when it must
            answer. A party that waits for an answer to others waits for up to eight units.
        meet_s: how long to wait until all other parties are connected, in seconds. A party
            connects once it has read its table, so a peer with a large one comes later.
        allow_reading_all: whether this party agrees to settings under which all of its columns can
            be read from sums (`passives.NAME.allow_reading_all` of the run).
        code: this party's own networks, loss, optimiser and rows; nobody else may name them.
        code_folder: the folder with the modules of that code; unless given, the folder of this
            file.
        serve: limits of joint prediction, after the training.
        minima: the smallest values that this party accepts, such as {rules.minimum_batch: 20}. For
            a choice it is the least protective one, such as {party_seeds: secret}.
        maxima: the largest values that this party accepts, such as {rules.spare_answers: 2}.
    """

    party: Name
    active: PartyName
    passives: tuple[PartyName, ...]
    config: Path
    folder: Annotated[Path, Field(validate_default=False)] = Path()
    listen: Place | None = None
    peers: dict[Name, Peer]
    link: Literal["tcp", "grpc", "nvflare"] = "tcp"
    tls: Tls | None = None
    insecure_plaintext_on_loopback: bool = False
    relay: Place | None = None
    relay_name: str | None = "relay"
    proxy: str | None = None
    reconnect_s: float = Field(30.0, ge=1, le=86_400)
    table: Path | None = None
    timeout_s: float = Field(60.0, gt=0, le=86_400)
    meet_s: float = Field(60.0, gt=0, le=86_400)
    allow_reading_all: bool = False
    code: UserFunctionSettings = UserFunctionSettings()
    code_folder: Annotated[Path, Field(validate_default=False)] = Path()
    serve: ServeSettings = ServeSettings()

    @classmethod
    def from_file(cls, path: Path) -> "PartyFile":
        """Read a party's settings file; relative paths are resolved from its folder.

        Raises ConfigError: the file is missing or malformed.
        """
        file = load_settings_text(cls, load_text(path), source=str(path), own=True)
        base_folder = path.parent
        table = None if file.table is None else base_folder / file.table
        resolved_paths = {
            "config": base_folder / file.config,
            "folder": base_folder / file.folder,
            "table": table,
            "code_folder": base_folder / file.code_folder,
        }
        if file.serve.table is not None:
            serve = file.serve.model_copy(update={"table": base_folder / file.serve.table})
            file = file.model_copy(update={"serve": serve})
        return file.model_copy(
            update={**resolved_paths, "tls": file.tls and file.tls.resolve_paths(base_folder)}
        )


Connect: TypeAlias = Callable[[PartyFile, Identity, Mapping[str, bytes], Missed], Transport]
"""A function that connects a party to all others; for its arguments see `connect_peers`."""


def connect_peers(
    file: PartyFile,
    identity: Identity,
    identity_by_party: Mapping[str, bytes],
    on_missing: Missed = lambda missing: None,
) -> Transport:
    """Connect to all peers by the type of link that the party's settings file names.

    Args:
        file: the party's settings file.
        identity: the party's key pair.
        identity_by_party: public identities of all parties, by name.
        on_missing: called repeatedly with the missing peers and the reason for each.

    Raises:
        ConfigError: the file names the link "nvflare", which only a job of NVFlare makes.
        PartyLeftError: a peer did not connect in time.
    """
    if file.link not in ROUTES_BY_LINK:
        raise ConfigError(
            f"{file.party}: link: nvflare is for a job of NVFlare's, whose site starts the party: "
            "submit the job (docs/nvflare.md), or name another link"
        )
    return ROUTES_BY_LINK[file.link](file, identity, identity_by_party).meet_peers(on_missing)


class _TcpRoutes:
    """The connections of a party to its peers over TCP: it dials some, and the others dial it.

    Attributes:
        settings_file: the party's settings file.
        me: the party's own keys and the public keys of its peers.
        certificate: SHA-256 of its TLS certificate, hex; empty without TLS.
    """

    certificate = ""

    def __init__(
        self, file: PartyFile, identity: Identity, identity_by_party: Mapping[str, bytes]
    ) -> None:
        """Prepare connections without making one.

        `file`: the party's settings file. `identity`: its key pair. `identity_by_party`: public
        identities of all parties, by name.
        """
        self.settings_file = file
        self.me = LocalEnd(
            name=file.party,
            identity=identity,
            identity_by_peer={
                name: key for name, key in identity_by_party.items() if name != file.party
            },
            certificate=self.certificate,
            list_revoked=self.load_revocations,
        )

    def meet_peers(self, on_missing: Missed) -> Transport:
        """Start to listen and dial, wait until all peers have connected, and return the transport.

        `on_missing`: called repeatedly while peers are missing, with the reason for each by name.

        Raises PartyLeftError: a peer did not connect in time.
        """
        with ExitStack() as stack:  # closes the port if an error occurs before the transport exists
            connectors = self.make_connectors(stack)
            return LinkTransport.meet_peers(
                self.settings_file.party,
                connectors,
                patience_s=self.settings_file.reconnect_s,
                meet_s=self.settings_file.meet_s,
                on_close=stack.pop_all().close,  # from here on the transport closes the port
                on_missing=on_missing,
            )

    def make_connectors(self, stack: ExitStack) -> dict[str, Callable[[], Connection]]:
        """Return, by peer, a function that makes a connection to it; start to listen if needed.

        `stack`: receives a callback that stops listening.
        """
        dialled_peers = [peer for peer in self.settings_file.peers if self.needs_dialling(peer)]
        connector_by_peer = {peer: partial(self.dial_and_prove, peer) for peer in dialled_peers}
        awaited_peers = tuple(
            peer for peer in self.settings_file.peers if peer not in connector_by_peer
        )
        if awaited_peers:
            acceptor = self.make_acceptor(awaited_peers)
            stack.callback(self.start_listening(acceptor))
            connector_by_peer |= {
                peer: partial(acceptor.take_connection, peer) for peer in awaited_peers
            }
        return {**connector_by_peer}

    def needs_dialling(self, peer: str) -> bool:
        """Return whether this party dials a peer, instead of waiting for its connection.

        It does if only the peer listens. If both listen, the party whose name sorts later dials, so
        that exactly one of the two does.

        Raises ConfigError: neither of the two listens.
        """
        party = self.settings_file.party
        has_address = self.settings_file.peers[peer].address is not None
        if not has_address and self.settings_file.listen is None:
            raise ConfigError(
                f"{party} has no `listen`, and {peer} no address: one of the two must be reached; "
                "give one of them, or `relay: host:port` in the files of all"
            )
        return has_address and (self.settings_file.listen is None or peer < party)

    def dial_and_prove(self, peer: str) -> Connection:
        """Dial a peer; return the encrypted connection, once both ends proved their identities.

        Raises OSError, EOFError, RemoteProtocolError: nobody, or another party, answers.
        """
        connection = self.dial_peer(peer)
        try:
            self.prepare_connection(connection, peer)
            _, encrypted_connection = prove_identity(connection, self.me, peer)
            return encrypted_connection
        except BaseException:
            connection.close()
            raise

    def prepare_connection(self, connection: Carrier, peer: str) -> None:
        """Do what must precede the proof of identity on a new connection; here nothing.

        Overridden for connections through a relay.
        """

    def parse_peer_address(self, peer: str) -> Address:
        """Return host and port of a peer that listens, from the party's settings file."""
        address = self.settings_file.peers[peer].address
        assert address is not None
        return parse_address(address)

    def dial_peer(self, peer: str) -> Carrier:
        """Open a TCP connection to a peer. Raises ConnectionError: nobody listens there."""
        address = self.parse_peer_address(peer)
        try:
            return sockets.dial(address)
        except ConnectionError as error:
            raise ConnectionError(
                f"{self.me.name} reached nobody as {peer} at {spell_address(address)} ({error}); "
                f"start {peer}, or correct its address"
            ) from error

    def make_acceptor(self, awaited_peers: tuple[str, ...]) -> PeerAcceptor:
        """Return the object that accepts connections of peers that dial this party.

        `awaited_peers`: names of these peers.
        """
        me = self.me.name
        absence_text = (
            f"it did not come to {me} within {self.settings_file.meet_s:g} s; start it, correct "
            f"the address of {me} in its file, or raise meet_s in the file of {me} if it was still "
            "reading its table"
        )
        return PeerAcceptor(self.me, awaited_peers, absence_reason=absence_text)

    def start_listening(self, acceptor: PeerAcceptor) -> Callable[[], None]:
        """Listen, and pass each new connection to `acceptor`; return a function that stops this.

        Raises ConfigError: the party's address cannot be used.
        """
        assert self.settings_file.listen is not None
        try:
            return sockets.Port(
                parse_address(self.settings_file.listen), acceptor.admit_stranger
            ).close
        except (OSError, UnicodeError) as error:
            cause = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"listen: {self.settings_file.party} cannot listen at {self.settings_file.listen} "
                f"({cause}); end who does, or name another port there and in the others' files"
            ) from error

    def load_revocations(self) -> frozenset[str]:
        """Return the entries of the party's revocation list; plain TCP uses no such list."""
        return frozenset()


class _GrpcRoutes(_TcpRoutes):
    """The connections of a party to its peers over gRPC with TLS, directly or through a relay."""

    def __init__(
        self, file: PartyFile, identity: Identity, identity_by_party: Mapping[str, bytes]
    ) -> None:
        """Import gRPC, and load the TLS credentials.

        `file`: the party's settings file. `identity`: its key pair. `identity_by_party`: public
        identities of all parties, by name.

        Raises ConfigError: gRPC is not installed, or the file's TLS settings cannot be used.
        """
        # Imported here, since gRPC is an optional extra that parties over plain TCP do not need.
        from secure_apfed.exchange import certificates, grpc_link, relay

        self._certificates = certificates
        self._grpc = grpc_link
        self._relay = relay
        self._credentials = self._load_credentials(file)
        if self._credentials is not None:
            self.certificate = self._credentials.digest
        super().__init__(file, identity, identity_by_party)

    def _load_credentials(self, file: PartyFile) -> "Credentials | None":
        """Return the TLS credentials; None if the file allows plaintext and all is on this machine.

        Raises ConfigError: a certificate cannot be used, or plaintext is not allowed.
        """
        if (tls := file.tls) is not None:
            revoked = self._certificates.load_revocations(tls.revoked)
            return self._certificates.Credentials.from_files(
                tls.ca, tls.certificate, tls.key, name=file.party, revoked=revoked
            )
        if not file.insecure_plaintext_on_loopback:
            raise ConfigError(
                f"{file.party}: link: grpc needs `tls` with ca, certificate and key (secure-apfed "
                "project makes them)"
            )
        addresses = [file.listen, file.relay, *(peer.address for peer in file.peers.values())]
        self._grpc.warn_of_plaintext(
            *(parse_address(address)[0] for address in addresses if address is not None)
        )
        return None

    def needs_dialling(self, peer: str) -> bool:
        """Return whether this party dials a peer; with a relay every party dials the relay."""
        return self.settings_file.relay is not None or super().needs_dialling(peer)

    def dial_peer(self, peer: str) -> Carrier:
        """Open a gRPC stream to the peer, or to the relay, if the party uses one."""
        file = self.settings_file
        if file.relay is not None:
            address = parse_address(file.relay)
            certified_name = file.relay_name
        else:
            address = self.parse_peer_address(peer)
            # The certificate of a proxy is for its host instead of the peer.
            certified_name = None if file.peers[peer].behind_proxy else peer
        return self._grpc.dial(address, self._credentials, name=certified_name, proxy=file.proxy)

    def prepare_connection(self, connection: Carrier, peer: str) -> None:
        """Have the relay, if the party uses one, join this connection to that of the peer."""
        if self.settings_file.relay is not None:
            wait_s = min(self._relay.PARTNER_S, self.settings_file.reconnect_s / 3)
            self._relay.enter_room(connection, self.me, peer, wait_s=wait_s)

    def make_acceptor(self, awaited_peers: tuple[str, ...]) -> PeerAcceptor:
        """Return the object that accepts connections of peers, whose TLS certificates it checks.

        `awaited_peers`: names of these peers.
        """
        return PeerAcceptor(self.me, awaited_peers, self._require_certificate)

    def _require_certificate(self, name: str, certificate: bytes) -> None:
        """Raise RemoteProtocolError unless a caller's certificate belongs to the peer `name`.

        Nothing is checked without TLS, or for a peer behind a proxy, which shows the proxy's
        certificate.

        `certificate`: the caller's certificate, in PEM.
        """
        peer = self.settings_file.peers.get(name)
        if self._credentials is not None and peer is not None and not peer.behind_proxy:
            self._certificates.require_caller(name, certificate, self.load_revocations())

    def start_listening(self, acceptor: PeerAcceptor) -> Callable[[], None]:
        """Listen over gRPC; return a function that stops it."""
        assert self.settings_file.listen is not None
        address = parse_address(self.settings_file.listen)
        return self._grpc.Port(address, self._credentials, acceptor.admit_stranger).close

    def load_revocations(self) -> frozenset[str]:
        """Return the entries of the current revocation list.

        Raises ConnectionError: the list cannot be read, so that no peer is admitted.
        """
        try:
            return self._certificates.load_revocations(
                self.settings_file.tls.revoked if self.settings_file.tls else None
            )
        except ConfigError as error:
            raise ConnectionError(str(error)) from error


ROUTES_BY_LINK: Mapping[str, type[_TcpRoutes]] = {"tcp": _TcpRoutes, "grpc": _GrpcRoutes}


@isolate_torch_modes()
def run_party(
    path: Path,
    *,
    resume: bool = False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    wrap_transport: Callable[[Transport], Transport] = lambda transport: transport,
    on_restart: Callable[[str], None] = lambda why: None,
    status: StatusTracker | None = None,
    connect: Connect = connect_peers,
    on_record: Callable[[OwnRecord], None] = lambda record: None,
    on_common: Callable[[CommonPeople], None] = lambda common: None,
) -> RunResult | None:
    """Run one party's part of a run to its end; return the result at the active, else None.

    The result counts the active's own bytes on the links, and has privacy costs as the passives
    report them. If the run allows restarts (`rules.restarts`), a party starts a new session from
    its checkpoint when another party left or returned. It does not if that party stopped for its
    settings, data or privacy budget, which a new session would meet again.

    Args:
        path: the party's settings file.
        resume: whether to continue from the last checkpoint.
        on_progress: called with each `Progress`.
        wrap_transport: wraps the transport, for example to simulate faults.
        on_restart: called with the reason of each new session.
        status: records the state of all links; None: nobody reads it.
        connect: connects to the peers.
        on_record: receives the party's record of its messages, after its part is over.
        on_common: receives how many of its people are common, once the rows are aligned.

    Raises:
        PartyLeftError: another party stopped or left.
        ConfigError, DataError, CheckpointError, RemoteProtocolError, BudgetExhaustedError: see
            `secure_apfed.run`.
    """
    file = PartyFile.from_file(path)
    restart_count = 0
    status = status or StatusTracker()
    result = None
    record = None
    failure_text = ""
    with status:
        while record is None:
            # A restarted session resumes without being asked.
            should_resume = resume and not restart_count
            with join_session(
                file,
                resume=should_resume,
                wrap_transport=wrap_transport,
                status=status,
                connect=connect,
            ) as connected_party:
                restarts_left = connected_party.context.config.rules.restarts - restart_count
                try:
                    result = _run_session(
                        connected_party,
                        file,
                        on_progress,
                        status,
                        restarts_left=restarts_left,
                        on_common=on_common,
                    )
                    record = connected_party.record
                except PartyLeftError as error:
                    if not restarts_left or is_final_stop(error):
                        raise
                    failure_text = str(error)
            if record is None:
                restart_count += 1
                restart_text = f"{file.party} begins session {restart_count + 1} by itself"
                on_restart(f"{_NOTHING_TO_DO}{restart_text}; {_describe_cause(failure_text)}")
    on_record(record)
    return result


def _describe_cause(failure: str) -> str:
    """Return an error's text without its advice to restart, since the party restarts by itself."""
    return failure.removeprefix(_NOTHING_TO_DO).replace(f"; {ALL_AGAIN}", "")


def _run_session(
    connected_party: "ConnectedParty",
    file: PartyFile,
    on_progress: Callable[[Progress], None],
    status: StatusTracker,
    *,
    restarts_left: int,
    on_common: Callable[[CommonPeople], None],
) -> RunResult | None:
    """Run one session to its end; return the result at the active, else None.

    A party other than the active then writes settings and message counts into its folder.

    Args:
        connected_party: the party and its links.
        file: the party's settings file.
        on_progress: called with each `Progress`.
        status: records the state of all links.
        on_common: receives how many of the party's people are common, once rows are aligned.
        restarts_left: how many further sessions this party may start by itself.
    """
    folder = RunFolder(file.folder)
    options: dict[str, Any] = {"timeout_s": file.timeout_s, "observer": status}
    if connected_party.role == "active":
        script = _run_active(
            connected_party, folder, on_progress, restarts_left=restarts_left, on_common=on_common
        )
        return run_role(script, connected_party.links, connected_party.transport, **options)
    context = connected_party.context
    record = connected_party.record
    assert isinstance(context.config, Config)
    common_people = list[CommonPeople]()  # empty, or one entry once the rows are aligned

    def note_entry(party_session: PartySession) -> None:
        """Record the aligned rows, and report how many people are common."""
        record.table_row_by_person = party_session.rows
        if party_session.common_people is not None:
            common_people.append(party_session.common_people)
            on_common(party_session.common_people)

    helper_script = run_helper(
        context,
        connected_party.links,
        METHODS[context.config.method.name],
        connected_party.role,
        on_entry=note_entry,
    )
    run_role(helper_script, connected_party.links, connected_party.transport, **options)
    # At the active these files are written with its results.
    write_atomically(folder.config, dump_settings(context.config).encode())
    folder.write_json(folder.message_flows, record.flows_as_json)
    if common_people:
        folder.write_json(folder.common_people, [common.model_dump() for common in common_people])
    return None


@dataclass(frozen=True, kw_only=True)
class ConnectedParty:
    """A party in a session, connected to all peers.

    Attributes:
        context: the party's settings, data, secrets and user-defined code.
        role: the party's role in the run.
        links: the party's links to all peers, which encrypt its messages.
        transport: carries the encrypted messages.
        record: the record of the party's messages.
    """

    context: PartyContext
    role: PartyRole
    links: Links
    transport: Transport
    record: OwnRecord


@contextmanager
def connect_with_audit(
    file: PartyFile,
    identity: Identity,
    meter: Meter,
    status: StatusTracker,
    connect: Connect,
    earlier_sessions: PastSessions = NO_EARLIER_SESSIONS,
) -> Iterator[tuple[dict[str, bytes], AuditLog, Transport]]:
    """Open the party's audit log and connect it to its peers, for a `with` block.

    The party's counters of releases and answers are first compared with the log. Yields the public
    identities of all parties by name, the log, and the transport.

    Args:
        file: the party's settings file.
        identity: the party's key pair.
        meter: computes the privacy cost of what the party sends.
        status: records the state of all links.
        connect: connects to the peers.
        earlier_sessions: totals of earlier sessions, to which the status adds.

    Raises:
        CheckpointError: a counter or the log is missing or altered.
        PartyLeftError: a peer did not connect in time.
    """
    identity_by_party = {name: bytes.fromhex(peer.identity) for name, peer in file.peers.items()}
    folder = PartyFolder(file.folder).path
    counters = open_counters(folder, file.party)
    log = AuditLog(
        folder / AUDIT_LOG_NAME, file.party, identity, identity_by_party, meter, counters=counters
    )
    with closing(log) as open_log:
        identity_by_party[file.party] = identity.public
        less_protected = (
            *describe_weakened_settings(load_config(file.config)),
            *describe_shared_organisations(file.folder),
        )
        status.start_session(
            file.party,
            file.peers,
            meter,
            meeting_timeout_s=file.meet_s,
            less_protected=less_protected,
            earlier_bytes_by_peer=earlier_sessions.count_bytes(),
        )
        transport = connect(file, identity, identity_by_party, status.observe_missing)
        status.observe_connection(transport.list_broken_links)
        yield identity_by_party, open_log, transport


@contextmanager
def join_session(
    file: PartyFile,
    *,
    resume: bool = False,
    wrap_transport: Callable[[Transport], Transport] = lambda transport: transport,
    status: StatusTracker | None = None,
    connect: Connect = connect_peers,
) -> Iterator[ConnectedParty]:
    """Lock the party's folder, load its rows, and connect it to the peers, for a `with` block.

    The settings are first checked against the signed project and the party's own limits.

    Args:
        file: the party's settings file.
        resume: whether to continue from the last checkpoint; it does so without being asked if the
            run allows restarts and there is a checkpoint.
        wrap_transport: wraps the transport, for example to simulate faults.
        status: records the state of all links; None: nobody reads it.
        connect: connects to the peers.

    Raises ConfigError, DataError, CheckpointError, PartyLeftError: see `run_party`.
    """
    status = status or StatusTracker()
    # Imported late, since that module imports this one.
    from secure_apfed.organisations.project import require_agreed_link

    require_open_project(file.folder)
    require_agreed_link(file)
    config = load_config(file.config)
    refuse_user_functions(config, source=f"{file.party}: {file.config}, which all parties share,")
    require_own_limits(file, config)
    role = determine_role(file, config)
    folder = PartyFolder(file.folder)
    resume = resume or (config.rules.restarts > 0 and folder.has_checkpoint)
    with ExitStack() as stack:
        list_counters = partial(list_nonzero_counters, folder.path, file.party)
        stack.enter_context(folder.lock_for_run(resume=resume, list_nonzero_counters=list_counters))
        if resume and role == "active" and not folder.has_checkpoint:
            raise make_no_checkpoint_error(folder.path)
        data = load_party_data(file, config, role)
        store = PartyCheckpointStore(folder, file.party, config, data, role=role)
        row_shapes = [data.table.shape] if data else []
        batch_size = config.train.batch_size
        stack.enter_context(limit_threads_for(config.model, batch_size, row_shapes))
        secrets = store.secrets
        earlier_sessions = load_logged_sessions(folder.path / AUDIT_LOG_NAME)
        identity_by_party, audit_log, own_transport = stack.enter_context(
            connect_with_audit(
                _extend_meeting_time(file, config),
                secrets.identity,
                store.meter,
                status,
                connect,
                earlier_sessions,
            )
        )
        store.audit = audit_log
        transport = wrap_transport(own_transport)
        record = OwnRecord(
            file.party,
            role,
            config,
            data,
            active=file.active,
            should_store_batches=bool(config.attacks),
            earlier_sessions=earlier_sessions,
        )
        yield ConnectedParty(
            context=PartyContext(
                config=config,
                name=file.party,
                active=file.active,
                passives=file.passives,
                secrets=secrets,
                identity_by_party=identity_by_party,
                data_or_none=data,
                allow_reading_all=file.allow_reading_all,
                own_code=UserFunctions.from_settings(file.code, code_folder=file.code_folder),
                record_contribution=record.record_contribution if config.attacks else None,
            ),
            role=role,
            links=Links(
                file.party,
                list(file.peers),
                transport.send_frame,
                observers=(RevocationWatch(file), audit_log, status, record),
            ),
            transport=transport,
            record=record,
        )


class _ActiveCallbacks(RunCallbacks):
    """The training loop's callbacks at an active whose parties may restart by themselves.

    At each checkpoint the loop asks whether parties that left the session are back.
    """

    def __init__(
        self,
        writer: RunWriter,
        on_progress: Callable[[Progress], None],
        connected_party: ConnectedParty,
    ) -> None:
        """Make the callbacks.

        `writer`: writes the run's files. `on_progress`: called with each `Progress`.
        `connected_party`: the active with its links.
        """
        super().__init__(writer, on_progress)
        self._links = connected_party.links
        self._transport = connected_party.transport
        # Parties that were notified that the session is over for them.
        self._dismissed_parties = set[str]()

    def find_rejoining(self, absent: Collection[str]) -> Collection[str]:
        """Return which absent parties are ready for a new session.

        A party that is absent for the first time is notified that this session is over for it.
        """
        for name in set(absent) - self._dismissed_parties:
            self._dismissed_parties.add(name)
            self._links.dismiss_peer(
                name, f"{name} fell silent, and the session went on without it"
            )
        return self._transport.find_rejoining(absent)


async def _run_active(
    connected_party: ConnectedParty,
    folder: RunFolder,
    on_progress: Callable[[Progress], None],
    *,
    restarts_left: int,
    on_common: Callable[[CommonPeople], None],
) -> RunResult:
    """Run the active's side of a session: set-up, training loop and files; return the result.

    Args:
        connected_party: the active and its links.
        folder: the active's folder, for the run's files.
        on_progress: called with each `Progress`.
        on_common: receives how many of the party's people are common, once rows are aligned.
        restarts_left: how many further sessions this party may start by itself.
    """
    context = connected_party.context
    links = connected_party.links
    config = context.config
    method = METHODS[context.config.method.name]
    assert isinstance(config, Config)
    # The labels to train on may be noisy, if the run protects labels by a mechanism.
    labels, checkpoint_state = load_training_labels(config, context.data, context.secrets)
    context = replace(context, data_or_none=labels.build_data())
    party_session, learner = await start_active(context, links, method, session=new_session())
    connected_party.record.table_row_by_person = party_session.rows
    if party_session.common_people is not None:
        on_common(party_session.common_people)
    sent_messages = connected_party.record.sent_by_me
    received_messages = connected_party.record.received_by_me
    session = Session(
        party_session, learner, links, sent_messages, headline_variant=method.headline
    )
    writer = RunWriter(folder, config, received_transcript=received_messages)
    callbacks = RunCallbacks(writer, on_progress)
    if restarts_left:
        callbacks = _ActiveCallbacks(writer, on_progress, connected_party)
    callbacks.earlier_sessions = connected_party.record.earlier_sessions
    loop = TrainingLoop(session, labels, callbacks, checkpoint_state)
    await loop.run()
    return loop.build_result()


def require_own_limits(file: PartyFile, config: Config) -> None:
    """Raise ConfigError if a run's settings protect less than the limits in the party's file.

    The error advises to ask the active, which may change the run's settings.
    """
    file.require_protection(
        config, party=file.party, path=file.folder / PARTY_FILE, settings_owner=file.active
    )


def determine_role(file: PartyFile, config: Config) -> PartyRole:
    """Return a party's role in the run.

    Raises ConfigError: the party's settings file names other parties than the run has.
    """
    roles = assign_roles(METHODS[config.method.name], config, file.active, file.passives)
    names_in_file = {file.party, *file.peers}
    if names_in_file != set(roles):
        raise ConfigError(
            f"{file.party}: a run of {config.method.name} with these settings is of "
            f"{', '.join(roles)}; the file of {file.party} names "
            f"{', '.join(sorted(names_in_file))}: correct party, active, passives and peers"
        )
    return roles[file.party]


def _extend_meeting_time(file: PartyFile, config: Config) -> PartyFile:
    """Return a party's settings with the time for which it waits for peers at first, in seconds.

    Peers that restart by themselves are awaited at least as long as the run's patience allows.
    """
    rules = config.rules
    restart_patience_s = (rules.patience_s or 0.0) if rules.restarts else 0.0
    return file.model_copy(update={"meet_s": max(file.meet_s, restart_patience_s)})


def load_party_data(file: PartyFile, config: Config, role: PartyRole) -> OwnData | None:
    """Load this party's rows and labels; return None at an aggregator or a dealer, which have none.

    They are read from a file that was prepared for a trial, if the party's settings file names one,
    else from the party's own table.

    Raises DataError: the table has faults, or is not the one that the party described when it
        joined the project.
    """
    if role in ("aggregator", "dealer"):
        return None
    if file.table is not None:
        return load_own(file.table, file.party)
    make_rows = None
    if file.code.rows is not None:
        make_rows = import_callable(
            file.code.rows, setting="code.rows", code_folder=file.code_folder
        )
    data = load_own_tables(config.data, file.party, seed=config.seed, make_rows=make_rows)
    _require_declared_table(file, data)
    return data


def _require_declared_table(file: PartyFile, data: OwnData) -> None:
    """Raise DataError if a table is not the one that the party described when it joined a project.

    Row counts may differ by a factor of two, since tables grow. A party that joined no project, or
    described no table, is not checked.
    """
    answer_path = file.folder / ANSWER_FILE.format(file.party)
    declaration = None
    if answer_path.exists():
        declaration = load_json(answer_path, dict[str, Any])["document"]["table"]
    if declaration is None:
        return
    declared_shape = TableShape(**declaration)
    current_shape = describe_table(data, shows_column_names=declared_shape.columns is not None)
    growing_counts = {"rows", "labelled"}  # fields that are not compared here
    current_fields = current_shape.model_dump(exclude=growing_counts)
    is_same = current_fields == declared_shape.model_dump(exclude=growing_counts)
    is_similar_length = declared_shape.rows / 2 <= current_shape.rows <= declared_shape.rows * 2
    if is_same and is_similar_length:
        return
    declared_columns = set(declared_shape.columns or ())
    current_columns = set(current_shape.columns or ())
    changes = []
    if missing_columns := sorted(declared_columns - current_columns):
        changes.append(f"missing: {', '.join(missing_columns)}")
    if new_columns := sorted(current_columns - declared_columns):
        changes.append(f"new: {', '.join(new_columns)}")
    raise DataError(
        f"{file.party} declared another table: {declared_shape.rows:,} rows, "
        f"{declared_shape.features} features, and here are {current_shape.rows:,} and "
        f"{current_shape.features} "
        f"({'; '.join(changes) or 'or other classes, or columns in another order'}); name the "
        f"right file in {file.config}, or begin a new project"
    )


def describe_table(data: OwnData, *, shows_column_names: bool) -> TableShape:
    """Return the facts about a party's table that the other parties of a project may know.

    Counts are rounded to two digits.

    `shows_column_names`: whether the names of the columns are among the facts.
    """
    table = data.table
    encoding = data.table.encoding
    label_facts = {}
    if table.labels is not None:
        label_facts["labelled"] = _round_digits(len(data.labelled_rows))
        label_facts["classes"] = len(data.classes)
    names: tuple[str, ...] = ()
    if encoding.kind == "columns":
        names = tuple(column.name for column in encoding.columns)
    return TableShape(
        rows=_round_digits(len(table.ids)),
        features=table.features[0].numel(),
        columns=names if shows_column_names else None,
        **label_facts,
    )


def _round_digits(count: int) -> int:
    """Return a count rounded to its first two digits, such as 12,000 for 12,345."""
    return round(count, 2 - len(str(count)))

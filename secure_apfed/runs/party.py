"""One party of a run in a process of its own: its folder, its rows, its script, its sockets.

Run by: each party, from its own file of settings. Nothing is loaded here but what is this party's;
what the others hold it learns from their messages, as the contract says, and not at all otherwise.
"""

import socket
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import Field

from protocols.errors import PartyLeftError
from secure_apfed.config import Config
from secure_apfed.config.file import load_config, load_settings_text, read_text
from secure_apfed.contract import PartyRole
from secure_apfed.data import OwnData, load_own_tables, read_own
from secure_apfed.errors import ConfigError
from secure_apfed.exchange import (
    Links,
    Sockets,
    Transcript,
    TranscriptSettings,
    Transport,
    play_one,
)
from secure_apfed.exchange.sockets import listen_at, listens, parse_address
from secure_apfed.methods import (
    METHODS,
    Own,
    Session,
    assist,
    lead,
    new_session,
    roles_of,
)
from secure_apfed.methods.workers import close_workers
from secure_apfed.names import Name, PartyName
from secure_apfed.runs.course import Course
from secure_apfed.runs.folder import RunFolder, no_checkpoint
from secure_apfed.runs.outcome import Progress
from secure_apfed.runs.party_folder import PartyFolder, PartyKeeper
from secure_apfed.runs.spending import cross_checked
from secure_apfed.runs.training_labels import answered_labels, gone_back
from secure_apfed.runs.writing import RunWriter
from secure_apfed.settings import Settings

__all__ = ["Joined", "PartyFile", "Peer", "joined", "play_party"]


class Peer(Settings):
    """Another party: where it listens, and by which key it is known.

    Attributes:
        address: "host:port".
        identity: its Ed25519 public key, hex.
    """

    address: str
    identity: str = Field(pattern="^[0-9a-f]{64}$")


class PartyFile(Settings):
    """All that one party needs to take part, in one YAML file of its own.

    Paths that are relative start at the file's folder.

    Attributes:
        party: its name; active, passives: who is who.
        config: YAML of the run; what the parties agree on must be the same in everybody's.
        folder: its own, for keys, checkpoints and logs.
        listen: "host:port" where the others reach it.
        peers: the others, by name.
        table: its rows as prepared for a trial; null reads its own file of `data.parties`.
        timeout_s: one unit of patience: how long a peer may be silent whose turn it is. Who
            waits for somebody's answer to others is patient for up to eight of them.
        meet_s: how long to wait until all others are connected.
    """

    party: Name
    active: PartyName
    passives: tuple[PartyName, ...]
    config: Path
    folder: Path = Path()
    listen: str
    peers: dict[Name, Peer]
    table: Path | None = None
    timeout_s: float = Field(60.0, gt=0, le=86_400)
    meet_s: float = Field(60.0, gt=0, le=86_400)

    @classmethod
    def read(cls, path: Path) -> "PartyFile":
        """Read one, with its paths resolved.

        Raises:
            ConfigError: no such file, or settings that do not hold.
        """
        told = load_settings_text(cls, read_text(path), source=str(path))
        below = path.parent
        table = None if told.table is None else below / told.table
        return told.model_copy(
            update={"config": below / told.config, "folder": below / told.folder, "table": table}
        )


def play_party(
    path: Path,
    *,
    resume: bool = False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    over: Callable[[Transport], Transport] = lambda transport: transport,
    on_restart: Callable[[str], None] = lambda why: None,
) -> None:
    """Play one party's part of a run to its end.

    Under `rules.restarts` it goes on from what lies in its folder, and where another party left or
    comes back, it begins a new session by itself.

    Args:
        path: of its file.
        resume: go on from the checkpoint in its folder.
        on_progress: at the active, called after every step.
        over: what the frames go through besides the sockets.
        on_restart: told why a session ended, before another one begins.

    Raises: as `secure_apfed.runs.run`, and PartyLeftError where another party stopped or left.
    """
    told, restarts = PartyFile.read(path), 0
    while True:
        with joined(told, resume=resume and not restarts, over=over) as here:
            left = here.own.config.rules.restarts - restarts
            try:
                return _play(here, told, on_progress, restarts=left)
            except PartyLeftError as error:
                if not left:
                    raise
                why = str(error)
        restarts += 1
        on_restart(f"{why}; {told.party} begins session {restarts + 1} by itself")


def _play(
    here: "Joined", told: PartyFile, on_progress: Callable[[Progress], None], *, restarts: int
) -> None:
    """Play one session; `restarts`: how many more this party may begin by itself."""
    folder = RunFolder(told.folder)
    if here.role == "active":
        absent = _Absent(here.links, told) if restarts else lambda names: ()
        script = _active(here, folder, on_progress, absent)
    else:
        method = METHODS[here.own.config.method]
        script = assist(here.own, here.links, method, here.role)
    play_one(script, here.links, here.transport, timeout_s=told.timeout_s)
    if here.role != "active":  # whose own are among its results
        folder.write_json(folder.flows, [asdict(flow) for flow in here.transcript.flows])


class _Absent:
    """The passives that a session goes on without: told so once, and looked for at checkpoints."""

    def __init__(self, links: Links, told: PartyFile) -> None:
        self._links, self._dismissed = links, set[str]()
        self._addresses = {name: parse_address(peer.address) for name, peer in told.peers.items()}

    def __call__(self, names: Collection[str]) -> list[str]:
        """Those of these passives that wait for the others."""
        for name in set(names) - self._dismissed:
            self._dismissed.add(name)
            self._links.dismiss(name, f"{name} fell silent, and the session went on without it")
        return [name for name in names if listens(self._addresses[name])]


@dataclass(frozen=True, kw_only=True)
class Joined:
    """A party that is connected to all others.

    Attributes:
        own: what it brings; role: what it plays.
        links, transport: to the others; transcript: of what it sends, without payloads.
    """

    own: Own
    role: PartyRole
    links: Links
    transport: Transport
    transcript: Transcript


@contextmanager
def joined(
    told: PartyFile,
    *,
    resume: bool = False,
    over: Callable[[Transport], Transport] = lambda transport: transport,
) -> Iterator[Joined]:
    """Hold a party's folder, load its rows, and connect it to the others; see `play_party`."""
    config = load_config(told.config)
    role, rules = _role_of(told, config), config.rules
    resume = resume or (rules.restarts > 0 and bool(PartyFolder(told.folder).steps.found()))
    with ExitStack() as stack:
        stack.callback(close_workers)
        folder = stack.enter_context(PartyFolder.open(told.folder, resume=resume))
        if resume and role == "active" and not folder.steps.found():
            raise no_checkpoint(folder.path)
        data = _own_data(told, config, role)
        brought = PartyKeeper(folder, told.party, config, data).brought
        known = {name: bytes.fromhex(peer.identity) for name, peer in told.peers.items()}
        known[told.party] = brought.identity.public
        addresses = {name: parse_address(peer.address) for name, peer in told.peers.items()}
        transport = over(
            Sockets.meet(
                told.party, _listening(told), addresses, identity=brought.identity, known=known,
                timeout_s=max(told.meet_s, rules.restarts and (rules.patience_s or 0.0)),
            )
        )  # fmt: skip
        # Payloads are kept nowhere: each party's are its own business.
        transcript = Transcript(TranscriptSettings(keep="none"))
        yield Joined(
            own=Own(
                config=config, name=told.party, active=told.active, passives=told.passives,
                brought=brought, known=known, data=data,
            ),
            role=role,
            links=Links(told.party, list(told.peers), transport.post, transcript.record),
            transport=transport,
            transcript=transcript,
        )  # fmt: skip


async def _active(
    here: Joined,
    folder: RunFolder,
    on_progress: Callable[[Progress], None],
    returned: Callable[[Collection[str]], Collection[str]],
) -> None:
    """The active's whole script: what `assist` is for the others, with a course and a result."""
    own, links = here.own, here.links
    config, method = own.config, METHODS[own.config.method]
    assert isinstance(config, Config)
    labels, state = answered_labels(config, own.held, own.brought)
    own = replace(own, data=labels.data())
    entered, learner = await lead(own, links, method, session=new_session())
    session = Session(entered, learner, links, here.transcript, headline=method.headline)
    state = gone_back(state, labels, session, own.brought)
    writer = RunWriter(folder, config, apart=True)
    course = Course(config, session, labels, writer, on_progress, state, returned=returned)
    await course.play()
    writer.cross_check(cross_checked(course.privacy(), session).accountants)


def _listening(told: PartyFile) -> socket.socket:
    """Where the others reach this party.

    Raises:
        ConfigError: it cannot listen there.
    """
    try:
        return listen_at(parse_address(told.listen))
    except OSError as error:
        raise ConfigError(
            f"listen: {told.party} cannot listen at {told.listen} ({error.strerror or error}); end "
            "who does, or name another port there and in the others' files"
        ) from error


def _role_of(told: PartyFile, config: Config) -> PartyRole:
    """The role of this party.

    Raises:
        ConfigError: its file names others than the run needs.
    """
    roles = roles_of(METHODS[config.method], config, told.active, told.passives)
    named = {told.party, *told.peers}
    if named != set(roles):
        raise ConfigError(
            f"{told.party}: a run of {config.method} with these settings is of "
            f"{', '.join(roles)}; the file of {told.party} names {', '.join(sorted(named))}: "
            "correct party, active, passives and peers"
        )
    return roles[told.party]


def _own_data(told: PartyFile, config: Config, role: PartyRole) -> OwnData | None:
    """This party's rows, and nobody else's."""
    if role in ("aggregator", "dealer"):
        return None
    if told.table is not None:
        return read_own(told.table, told.party)
    return load_own_tables(config.data, told.party, seed=config.seed)

"""One party of a run in a process of its own: its folder, its rows, its script, its sockets.

Run by: each party, from its own file of settings. Nothing is loaded here but what is this party's;
what the others hold it learns from their messages, as the contract says, and not at all otherwise.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from apfed_protocols.errors import PartyLeftError
from secure_apfed.audit_log import AuditLog
from secure_apfed.config import Config
from secure_apfed.config.file import load_config
from secure_apfed.contract import PartyRole
from secure_apfed.data import OwnData, load_own_tables, read_own
from secure_apfed.errors import ConfigError
from secure_apfed.exchange import Links, StatusKeeper, Transcript, Transport, play_one
from secure_apfed.methods import (
    METHODS,
    Own,
    Session,
    assist,
    lead,
    new_session,
    roles_of,
)
from secure_apfed.runs.connecting import Connect, connect
from secure_apfed.runs.course import Course, Watch
from secure_apfed.runs.folder import RunFolder, no_checkpoint
from secure_apfed.runs.outcome import Progress, RunResult
from secure_apfed.runs.party_file import PartyFile, Peer
from secure_apfed.runs.party_folder import PartyFolder, PartyKeeper
from secure_apfed.runs.spending import cross_checked
from secure_apfed.runs.training_labels import answered_labels, gone_back
from secure_apfed.runs.writing import RunWriter
from secure_apfed.seeds import undisturbed
from secure_apfed.settings.run import TranscriptSettings
from secure_apfed.workers import close_workers

__all__ = ["Joined", "PartyFile", "Peer", "joined", "play_party"]


@undisturbed()
def play_party(
    path: Path,
    *,
    resume: bool = False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    over: Callable[[Transport], Transport] = lambda transport: transport,
    on_restart: Callable[[str], None] = lambda why: None,
    status: StatusKeeper | None = None,
    meet: Connect = connect,
) -> RunResult | None:
    """Play one party's part of a run to its end.

    Under `rules.restarts` it goes on from what lies in its folder, and where another party left or
    comes back, it begins a new session by itself.

    Args:
        path: of its file.
        resume: go on from the checkpoint in its folder.
        on_progress: at the active, called after every step.
        over: what the frames go through besides the sockets.
        on_restart: told why a session ended, before another one begins.
        status: told where the party stands.
        meet: connects it to the others; unless given, as its file says.

    Returns:
        What the run gave, at the active: its own bytes on the links, and of passives what they say
        that they charged.

    Raises: as `secure_apfed.run`, and PartyLeftError where another party stopped or left.
    """
    told, restarts, status = PartyFile.read(path), 0, status or StatusKeeper()
    with _noting_the_end(status):
        while True:
            again = resume and not restarts
            with joined(told, resume=again, over=over, status=status, meet=meet) as here:
                left = here.own.config.rules.restarts - restarts
                try:
                    return _play(here, told, on_progress, status, restarts=left)
                except PartyLeftError as error:
                    if not left:
                        raise
                    why = str(error)
            restarts += 1
            on_restart(f"{why}; {told.party} begins session {restarts + 1} by itself")


def _play(
    here: "Joined",
    told: PartyFile,
    on_progress: Callable[[Progress], None],
    status: StatusKeeper,
    *,
    restarts: int,
) -> RunResult | None:
    """Play one session; `restarts`: how many more this party may begin by itself."""
    folder = RunFolder(told.folder)
    how: dict[str, Any] = {"timeout_s": told.timeout_s, "observer": status}
    if here.role == "active":
        script = _active(here, folder, on_progress, restarts=restarts)
        return play_one(script, here.links, here.transport, **how)
    method = METHODS[here.own.config.method.name]
    play_one(assist(here.own, here.links, method, here.role), here.links, here.transport, **how)
    # The active's own are among its results.
    folder.write_json(folder.flows, [asdict(flow) for flow in here.transcript.flows])
    return None


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
    status: StatusKeeper | None = None,
    meet: Connect = connect,
) -> Iterator[Joined]:
    """Hold a party's folder, load its rows, and connect it to the others; see `play_party`."""
    status = status or StatusKeeper()
    config = load_config(told.config)
    role = _role_of(told, config)
    resume = resume or (config.rules.restarts > 0 and PartyFolder(told.folder).holds_steps)
    with ExitStack() as stack:
        stack.callback(close_workers)
        folder = stack.enter_context(PartyFolder.open(told.folder, resume=resume))
        if resume and role == "active" and not folder.holds_steps:
            raise no_checkpoint(folder.path)
        keeper = PartyKeeper(folder, told.party, config, data := _own_data(told, config, role))
        secrets = keeper.secrets
        known = {name: bytes.fromhex(peer.identity) for name, peer in told.peers.items()}
        audit = AuditLog(folder.audit, told.party, secrets.identity, known, keeper.meter)
        keeper.audit = stack.enter_context(audit)
        known[told.party] = secrets.identity.public
        status.begin(told.party, told.peers, keeper.meter)
        transport = over(meet(_meeting(told, config), secrets.identity, known))
        status.connected()
        transcript = Transcript(TranscriptSettings(keep="none"))  # payloads are a party's own
        yield Joined(
            own=Own(
                config=config, name=told.party, active=told.active, passives=told.passives,
                secrets=secrets, known=known, held=data,
            ),
            role=role,
            links=Links(
                told.party, list(told.peers), transport.post, transcript.record,
                observers=(audit, status),
            ),
            transport=transport,
            transcript=transcript,
        )  # fmt: skip


@contextmanager
def _noting_the_end(status: StatusKeeper) -> Iterator[None]:
    """Let a display know how it went."""
    try:
        yield
    except BaseException:
        status.end(failed=True)
        raise
    status.end(failed=False)


class _Alone(Watch):
    """Who plays the active alone, and looks at checkpoints who of the absent is back."""

    def __init__(
        self, writer: RunWriter, on_progress: Callable[[Progress], None], here: Joined,
    ) -> None:  # fmt: skip
        super().__init__(writer, on_progress)
        self._links, self._transport, self._dismissed = here.links, here.transport, set[str]()

    def returned(self, absent: Collection[str]) -> Collection[str]:
        """See `Watch`; who is absent is told so once."""
        for name in set(absent) - self._dismissed:
            self._dismissed.add(name)
            self._links.dismiss(name, f"{name} fell silent, and the session went on without it")
        return self._transport.returned(absent)


async def _active(
    here: Joined,
    folder: RunFolder,
    on_progress: Callable[[Progress], None],
    *,
    restarts: int,
) -> RunResult:
    """The active's whole script: what `assist` is for the others, with a course and a result."""
    own, links = here.own, here.links
    config, method = own.config, METHODS[own.config.method.name]
    assert isinstance(config, Config)
    labels, state = answered_labels(config, own.data, own.secrets)
    own = replace(own, held=labels.data())
    entered, learner = await lead(own, links, method, session=new_session())
    session = Session(entered, learner, links, here.transcript, headline=method.headline)
    state = gone_back(state, labels, session, own.secrets)
    writer = RunWriter(folder, config, apart=True)
    watch = _Alone(writer, on_progress, here) if restarts else Watch(writer, on_progress)
    course = Course(session, labels, watch, state)
    await course.play()
    privacy = cross_checked(course.privacy(), session)
    writer.cross_check(privacy.accountants)
    assert course.judged is not None
    return RunResult(
        method=config.method.name,
        **course.judged.told,
        wire_bytes=here.transcript.wire_bytes,
        privacy=privacy,
        contributions=session.contributed,
        trained=labels.data(),
        folder=folder.path,
    )


def _meeting(told: PartyFile, config: Config) -> PartyFile:
    """With as much patience as the run has with who is started again."""
    rules = config.rules
    meet_s = max(told.meet_s, (rules.patience_s or 0.0) if rules.restarts else 0.0)
    return told.model_copy(update={"meet_s": meet_s})


def _role_of(told: PartyFile, config: Config) -> PartyRole:
    """The role of this party.

    Raises:
        ConfigError: its file names others than the run needs.
    """
    roles = roles_of(METHODS[config.method.name], config, told.active, told.passives)
    named = {told.party, *told.peers}
    if named != set(roles):
        raise ConfigError(
            f"{told.party}: a run of {config.method.name} with these settings is of "
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

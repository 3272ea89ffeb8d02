"""One party of a run in a process of its own: its folder, its rows, its script, its sockets.

Run by: each party, from its own file of settings. Nothing is loaded here but what is this party's;
what the others hold it learns from their messages, as the contract says, and not at all otherwise.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from secure_apfed.config import Config
from secure_apfed.config.file import load_config
from secure_apfed.contract import PartyRole
from secure_apfed.data import OwnData, load_own_tables, read_own
from secure_apfed.errors import ConfigError
from secure_apfed.exchange import (
    Links,
    Transcript,
    TranscriptSettings,
    Transport,
    play_one,
)
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
from secure_apfed.runs.connecting import Connect, connect
from secure_apfed.runs.course import Course
from secure_apfed.runs.folder import RunFolder, no_checkpoint
from secure_apfed.runs.outcome import Progress
from secure_apfed.runs.party_file import PartyFile, Peer
from secure_apfed.runs.party_folder import PartyFolder, PartyKeeper
from secure_apfed.runs.spending import cross_checked
from secure_apfed.runs.training_labels import answered_labels
from secure_apfed.runs.writing import RunWriter

__all__ = ["Joined", "PartyFile", "Peer", "joined", "play_party"]


def play_party(
    path: Path,
    *,
    resume: bool = False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    over: Callable[[Transport], Transport] = lambda transport: transport,
    meet: Connect = connect,
) -> None:
    """Play one party's part of a run to its end.

    Args:
        path: of its file.
        resume: go on from the checkpoint in its folder.
        on_progress: at the active, called after every step.
        over: what the frames go through besides the sockets.
        meet: connects it to the others; unless given, as its file says.

    Raises: as `secure_apfed.runs.run`, and PartyLeftError where another party stopped or left.
    """
    told = PartyFile.read(path)
    with joined(told, resume=resume, over=over, meet=meet) as here:
        if here.role == "active":
            script = _active(here, RunFolder(told.folder), on_progress)
        else:
            method = METHODS[here.own.config.method]
            script = assist(here.own, here.links, method, here.role)
        play_one(script, here.links, here.transport, timeout_s=told.timeout_s)
        if here.role != "active":  # whose own are among its results
            flows = [asdict(flow) for flow in here.transcript.flows]
            RunFolder(told.folder).write_json(RunFolder(told.folder).flows, flows)


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
    meet: Connect = connect,
) -> Iterator[Joined]:
    """Hold a party's folder, load its rows, and connect it to the others; see `play_party`."""
    config = load_config(told.config)
    role = _role_of(told, config)
    with ExitStack() as stack:
        stack.callback(close_workers)
        folder = stack.enter_context(PartyFolder.open(told.folder, resume=resume))
        if resume and role == "active" and not folder.steps.found():
            raise no_checkpoint(folder.path)
        data = _own_data(told, config, role)
        brought = PartyKeeper(folder, told.party, config, data).brought
        known = {name: bytes.fromhex(peer.identity) for name, peer in told.peers.items()}
        known[told.party] = brought.identity.public
        transport = over(meet(told, brought.identity, known))
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


async def _active(here: Joined, folder: RunFolder, on_progress: Callable[[Progress], None]) -> None:
    """The active's whole script: what `assist` is for the others, with a course and a result."""
    own, links = here.own, here.links
    config, method = own.config, METHODS[own.config.method]
    assert isinstance(config, Config)
    labels, state = answered_labels(config, own.held, own.brought)
    own = replace(own, data=labels.data())
    entered, learner = await lead(own, links, method, session=new_session())
    session = Session(entered, learner, links, here.transcript, headline=method.headline)
    writer = RunWriter(folder, config, apart=True)
    course = Course(config, session, labels, writer, on_progress, state)
    await course.play()
    writer.cross_check(cross_checked(course.privacy(), session).accountants)


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

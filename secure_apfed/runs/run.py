"""One run, over whatever its parties are joined by."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ReferenceType, ref

import msgpack
from torch import Tensor

from secure_apfed.alignment.ids import id_rules
from secure_apfed.config import Config
from secure_apfed.data import VerticalData, load_data
from secure_apfed.errors import CheckpointError, ConfigError
from secure_apfed.exchange import Flow, Kind
from secure_apfed.files import own_subfolder
from secure_apfed.learning.networks import predictor_of
from secure_apfed.methods import (
    METHODS,
    PartyState,
    Secrets,
    Simulation,
    Start,
    fresh_secrets,
    roles_of,
)
from secure_apfed.methods.alignment import needs_dealer
from secure_apfed.runs.course import Course, RunWriter, Watch
from secure_apfed.runs.folder import Steps
from secure_apfed.runs.local import WAYS, run_locally
from secure_apfed.runs.outcome import Progress, Recording, RunResult, encoders_of
from secure_apfed.runs.party_folder import PartyFolder, PartyKeeper
from secure_apfed.runs.spending import cross_checked
from secure_apfed.runs.training_labels import answered_labels, gone_back
from secure_apfed.seeds import undisturbed
from secure_apfed.settings import unknown_name
from secure_apfed.workers import close_workers

__all__ = ["TRANSPORTS", "PastAlignment", "Sharing", "aligned_once", "run", "run_in_memory"]


# One alignment for all runs on the same tables, as organisations have it that train often.
#
# Run by: the experimenter who plays many runs in one process, as a study does. The first run of
# some data, seed and intersection aligns, by the protocol of its settings; those after it go on
# from its rows, and count what it sent as theirs: each line of a table costs what it would cost
# alone. Runs outside `aligned_once` share nothing, and no alignment leaves the process.


@dataclass(frozen=True, eq=False)
class PastAlignment:
    """What an alignment left.

    Attributes:
        rows: by party and position; flows: what was sent for it.
        tables: those that were aligned, where somebody brought them; None: the run loaded them.
    """

    rows: Mapping[str, Tensor]
    flows: tuple[Flow, ...]
    tables: "ReferenceType[VerticalData] | None"

    def is_of(self, tables: VerticalData | None) -> bool:
        """Whether these are the tables."""
        if self.tables is None:
            return tables is None
        return tables is not None and self.tables() is tables


_PAST: ContextVar[dict[str, PastAlignment] | None] = ContextVar("alignments", default=None)


@contextmanager
def aligned_once(past: dict[str, PastAlignment]) -> Iterator[None]:
    """Let runs in this block share alignments, those in `past` too, which new ones are added to."""
    before = _PAST.set(past)
    try:
        yield
    finally:
        _PAST.reset(before)


@dataclass(frozen=True, eq=False)
class Sharing:
    """One run, where runs share alignments.

    Attributes:
        config: of the run.
        tables: what somebody brought, which must be the very same in each run; None: those that
            the settings name.
    """

    config: Config
    tables: VerticalData | None

    def past(self) -> PastAlignment | None:
        """What an earlier run on the same tables left, if runs share it and there was one."""
        past = _PAST.get()
        found = None if past is None else past.get(_settings(self.config))
        return found if found is not None and found.is_of(self.tables) else None

    def keep(self, session: Simulation) -> None:
        """Let later runs share what this session aligned, where runs share alignments.

        A dealer's messages are of more kinds than the alignment's, so that its runs share none.
        """
        past, config = _PAST.get(), self.config
        aligns = config.method.aligns and bool(session.contract.passives)
        if past is None or not aligns or needs_dealer(config.alignment):
            return
        flows = tuple(flow for flow in session.transcript.flows if flow.kind is Kind.ALIGNMENT)
        tables = None if self.tables is None else ref(self.tables)
        past[_settings(config)] = PastAlignment(dict(session.alignment), flows, tables)


def _settings(config: Config) -> str:
    """All that tables and intersection depend on."""
    return f"{config.data.model_dump_json()} {config.alignment.model_dump_json()} {config.seed}"


# One run from configuration to result, all parties in this process, over recorded links.
#
# Run by: the experimenter. Each party has its own keys, secrets and folder here, too, and is built
# from its own data; the record of what they sent, with the sums that were opened and the passives'
# networks, is the experimenter's, and exists only where one process plays all. Whatever happens,
# what was written is whole: see `folder` and `checkpoint`.


def run_in_memory(
    config: Config,
    folder: Path | None,
    *,
    data: VerticalData | None = None,
    resume: bool = False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    timeout_s: float = 60.0,
) -> RunResult:
    """Train, evaluate and write one run; see `secure_apfed.run`.

    `timeout_s` means nothing here: silence needs no clock where one process plays all.
    """
    # A resumed run stands in the order of its own rows.
    sharing = None if resume else Sharing(config, data)
    data = data or load_data(config.data, seed=config.seed)
    data.compare_ids(id_rules(config.alignment).text)
    with ExitStack() as stack:
        stack.callback(close_workers)
        writer = stack.enter_context(RunWriter.open(folder, config, resume=resume))
        secrets = dict[str, Secrets]()
        if writer:
            secrets = _secrets(stack, writer.folder.parties, config, data, resume=resume)
        return _play(config, data, writer, secrets, on_progress, sharing=sharing)


def _secrets(
    stack: ExitStack, parties: Path, config: Config, data: VerticalData, *, resume: bool
) -> dict[str, Secrets]:
    """What each party brings from its own folder, which is held until the stack unwinds."""
    passives = [table.name for table in data.passives]
    roles = roles_of(METHODS[config.method.name], config, data.active.name, passives)
    found = {}
    for name in roles:
        folder = stack.enter_context(PartyFolder.open(own_subfolder(parties / name), resume=resume))
        keeper = PartyKeeper(folder, name, config, data.own(name))
        found[name] = replace(keeper.secrets, sends_out=False)
    return found


def _play(
    config: Config,
    data: VerticalData,
    writer: RunWriter | None,
    secrets: dict[str, Secrets],
    on_progress: Callable[[Progress], None],
    *,
    sharing: Sharing | None,
) -> RunResult:
    """One session: from the start or the checkpoints to the result."""
    name = data.active.name
    active = secrets.setdefault(name, fresh_secrets(config, name))
    held = data.own(name)
    assert held is not None
    labels, state = answered_labels(config, held, active)
    session = _opened(config, data.with_own(labels.data()), secrets, sharing=sharing)
    state = gone_back(state, labels, session, active)
    experimenter = _Experimenter(config, data, session, writer, on_progress)
    experimenter.record(active, state)
    course = Course(session, labels, experimenter, state)
    session.play(course.play())
    experimenter.finish()
    # Only now: whatever becomes of the other accountants, the run is finished.
    privacy = cross_checked(course.privacy(), session)
    judged = course.judged
    assert judged is not None
    if writer:
        writer.cross_check(privacy.accountants)
    return RunResult(
        method=config.method.name,
        **judged.told,
        wire_bytes=session.transcript.wire_bytes,
        privacy=privacy,
        contributions=session.contributed,
        trained=labels.data(),
        recorded=experimenter.recording(),
        folder=writer.folder.path if writer else None,
    )


def _opened(
    config: Config, data: VerticalData, secrets: dict[str, Secrets], *, sharing: Sharing | None
) -> Simulation:
    past = sharing.past() if sharing else None
    alignment = past.rows if past else None
    start = Start(config=config, data=data, secrets=secrets, alignment=alignment)
    session = Simulation(METHODS[config.method.name], start)
    if past:
        session.transcript.add(past.flows)
    elif sharing:
        sharing.keep(session)
    return session


class _Experimenter(Watch):
    """Who plays all parties, and keeps what they sent, which no party could."""

    def __init__(
        self, config: Config, data: VerticalData, session: Simulation, writer: RunWriter | None,
        on_progress: Callable[[Progress], None],
    ) -> None:  # fmt: skip
        super().__init__(writer, on_progress)
        self._config, self._data, self._session = config, data, session
        self._files = Steps(writer.folder.path, "recording") if writer else None

    def record(self, active: Secrets, state: PartyState | None) -> None:
        """Save the record before each checkpoint of the active; go on with that of this state."""
        keeper, transcript, files = active.keeper, self._session.transcript, self._files
        if files is None:
            return
        assert isinstance(keeper, PartyKeeper)
        keeper.before_save = lambda step: files.write(step, msgpack.packb(transcript.state_dict()))
        if state:
            if state.step not in files.found():
                raise CheckpointError(
                    f"{self.writer.folder.path if self.writer else ''} holds no record of what "
                    "all parties sent: each ran in a process of its own; resume with --transport "
                    "local"
                )
            transcript.resume(msgpack.unpackb(files.read(state.step), strict_map_key=False))

    def recording(self) -> Recording:
        """All of it."""
        session = self._session
        return Recording(
            config=self._config,
            data=self._data,
            alignment=session.alignment,
            transcript=session.transcript,
            model=predictor_of(session.learner.solo()),
            encoders=encoders_of(session),
        )

    def before_result(self) -> None:
        """Write it, for attacks on the finished run."""
        if self.writer:
            self.writer.keep(self.recording())

    def finish(self) -> None:
        """Let go of what only a resumed run would need."""
        if self._files:
            self._files.clear()


TRANSPORTS: Mapping[str, Callable[..., RunResult]] = {
    "memory": run_in_memory,
    **{name: partial(run_locally, over=way) for name, way in WAYS.items()},
}


@undisturbed()
def run(
    config: Config,
    folder: Path | None,
    *,
    data: VerticalData | None = None,
    resume: bool = False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    transport: str = "memory",
    **options: Any,
) -> RunResult:
    """Train, evaluate and write one run.

    Args:
        config: of the run.
        folder: of the run; made where missing. None: write nothing.
        data: of the run, where it is loaded already.
        resume: go on from the checkpoints in `folder`.
        on_progress: called after every step, and again after an evaluation; after every epoch
            where parties run apart.
        transport: a key of `TRANSPORTS`: "memory", one process plays all; "local", one process a
            party, over loopback; "grpc", the same as between machines; "relay", through a relay.
        options: of the transport: `timeout_s`, seconds of patience with a silent party.

    Raises:
        ConfigError, DataError, ModelError: what does not fit, before anything is sent.
        CheckpointError: nothing to resume, the folder holds a run already, or the active refused
            more sums of it than `rules.refused_sums`.
        BudgetExhaustedError: the privacy budget is spent; the checkpoints stay.
        ProtocolError: a party broke the protocol; the run stops for all.
    """
    if transport not in TRANSPORTS:
        raise ConfigError(f"transport: {unknown_name(transport, TRANSPORTS)}")
    play = TRANSPORTS[transport]
    return play(config, folder, data=data, resume=resume, on_progress=on_progress, **options)

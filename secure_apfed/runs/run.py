"""Entry point of runs over any transport; in memory one process simulates all parties.

Run by: the experimenter. Files are complete even if the process is killed: see `folder` and
`checkpoint_store`.
"""

import copy
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

import msgpack
from torch import Tensor

from secure_apfed.alignment.ids import make_id_rules
from secure_apfed.base.files import PathLike, own_subfolder
from secure_apfed.base.formats import RECORDING
from secure_apfed.base.phases import begin_phase
from secure_apfed.base.seeds import isolate_torch_modes
from secure_apfed.config import Config
from secure_apfed.data import VerticalData, load_data
from secure_apfed.errors import CheckpointError, ConfigError
from secure_apfed.exchange import Flow, Kind
from secure_apfed.exchange.transcript import count_free_megabytes
from secure_apfed.learning.descent import copy_predictor
from secure_apfed.learning.own_code import UserFunctions
from secure_apfed.methods import (
    METHODS,
    PartyCheckpoint,
    PartySecrets,
    Session,
    Simulation,
    SimulationInputs,
    assign_roles,
    fresh_secrets,
)
from secure_apfed.methods.alignment import needs_dealer
from secure_apfed.networks.models import limit_threads_for
from secure_apfed.runs.checkpoint_store import PartyCheckpointStore
from secure_apfed.runs.folder import PartyFolder, RunFolder
from secure_apfed.runs.outcome import Progress, Recording, RunResult
from secure_apfed.runs.past_sessions import load_session_totals, save_session_totals
from secure_apfed.runs.training_labels import load_training_labels
from secure_apfed.runs.training_loop import RunCallbacks, RunWriter, TrainingLoop
from secure_apfed.settings import describe_unknown_name


class PastAlignment(NamedTuple):
    """The result of an alignment, for reuse.

    Attributes:
        rows: party -> the row of each aligned person in its table.
        flows: messages and bytes that the alignment sent, by link and kind.
        people: IDs and training rows of tables that the caller passed (`_list_people`); None: the
            run loaded its tables itself.
    """

    rows: Mapping[str, Tensor]
    flows: tuple[Flow, ...]
    people: "_People | None"


_People: TypeAlias = tuple[Sequence[object], ...]


def _list_people(tables: VerticalData) -> _People:
    """Return everything in tables that an alignment depends on.

    This is each table's IDs in the order of its rows, and the active's training rows.
    """
    return (*(table.ids for table in tables.tables), tuple(tables.train_rows.tolist()))


_SHARED_ALIGNMENTS: ContextVar[dict[str, PastAlignment] | None] = ContextVar(
    "alignments", default=None
)


@contextmanager
def share_alignments(alignments: dict[str, PastAlignment]) -> Iterator[None]:
    """Let runs in this block reuse each other's alignments.

    One alignment serves all runs on the same tables, as for organisations that train often. The
    first run with some data, seed and intersection protocol aligns. Later runs reuse its rows, and
    count its messages as theirs, so that each run states what it would cost by itself. No alignment
    leaves the process.

    `alignments`: alignments by settings, which may be reused; new ones are added to it.
    """
    token = _SHARED_ALIGNMENTS.set(alignments)
    try:
        yield
    finally:
        _SHARED_ALIGNMENTS.reset(token)


def run_in_memory(
    config: Config,
    folder: Path | None,
    *,
    data: VerticalData | None = None,
    code: Mapping[str, UserFunctions] = MappingProxyType({}),
    resume: bool = False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    timeout_s: float = 60.0,
) -> RunResult:
    """Train, evaluate and write one run with all parties in this process.

    Each party has its own keys, secrets, folder and data also here. The record of all messages,
    with decoded sums and the passives' networks, belongs to the experimenter.

    Args:
        config: settings of the run.
        folder: folder of the run; None: nothing is written.
        data: data of the run; None: they are loaded as the settings say.
        code: party -> its user-defined networks, losses and optimisers, in addition to those that
            the settings name.
        resume: continue from the checkpoints in `folder`.
        on_progress: called after every step, and again after an evaluation.
        timeout_s: ignored, since no party in one process can be silent; other transports use it.

    Raises: the errors of `run`.
    """
    begin_phase("read")
    passed_data = data
    data = data or load_data(config.data, seed=config.seed)
    # Raises DataError if two parties have no ID in common.
    data.compare_ids(make_id_rules(config.alignment).normalise_text)
    writer = None
    secrets = dict[str, PartySecrets]()
    shapes = [table.shape for table in data.tables]
    batch_size = config.train.batch_size
    with ExitStack() as stack, limit_threads_for(config.model, batch_size, shapes):
        if folder is not None:
            writer = RunWriter(RunFolder(folder), config)
            stack.enter_context(writer.folder.open_for_run(config, resume=resume))
            secrets = _load_secrets(stack, writer.folder, config, data, resume=resume)
        elif resume:
            raise CheckpointError(
                "name the folder of the run, or start it without resume: a run without a folder "
                "has no checkpoint to resume from"
            )
        active_name = data.active.name
        active_secrets = secrets.setdefault(active_name, fresh_secrets(config, active_name))
        active_data = data.select_party(active_name)
        assert active_data is not None
        labels, checkpoint = load_training_labels(config, active_data, active_secrets)
        inputs = SimulationInputs(
            config=config,
            data=data.replace_own(labels.build_data()),
            secrets=secrets,
            code_by_party=code,
        )
        # A resumed run keeps its own order of rows, so it shares no alignment.
        session = _build_simulation(inputs, tables=passed_data, can_share_alignment=not resume)
        if not resume:
            _require_room(config, session, folder)
        callbacks = _SimulationCallbacks(config, data, session, writer, on_progress)
        loop = TrainingLoop(session, labels, callbacks, checkpoint)
        begin_phase("train")
        with _save_on_failure(loop, writer):
            session.run_script(loop.run())
        if writer:  # only a resumed run would need these files
            writer.folder.recordings.clear()
            writer.folder.interrupted_totals.unlink(missing_ok=True)
        return replace(loop.build_result(), own_networks=session.active_role.get_active_networks())


@contextmanager
def _save_on_failure(loop: TrainingLoop, writer: RunWriter | None) -> Iterator[None]:
    """Save the totals of all sessions if an error ends the `with` block; the error passes.

    A resumed run adds its own totals to them. After a killed process only the totals in its newest
    checkpoint are known.

    `writer`: writer of the run's files; None: nothing is saved.
    """
    try:
        yield
    except BaseException:
        if writer:
            # A full disk, say, must not hide why the session ended.
            with suppress(OSError):
                save_session_totals(
                    writer.folder.interrupted_totals,
                    loop.session.transcript.flows,
                    sessions=loop.sessions,
                    steps=loop.steps,
                    seconds=loop.seconds,
                )
        raise


def _load_secrets(
    stack: ExitStack, run_folder: RunFolder, config: Config, data: VerticalData, *, resume: bool
) -> dict[str, PartySecrets]:
    """Return each party's secrets, from checkpoints in the party's folder or newly drawn.

    The parties' folders lie below the run's. They are created if missing, and locked.

    Args:
        stack: unlocks the folders when it is closed.
        run_folder: folder of the run.
        config: settings of the run.
        data: the tables of all parties.
        resume: whether the run continues from its checkpoints.
    """
    passives = [table.name for table in data.passives]
    secrets = {}
    roles = assign_roles(METHODS[config.method.name], config, data.active.name, passives)
    for name, role in roles.items():
        folder = PartyFolder(own_subfolder(run_folder.parties / name))
        stack.enter_context(folder.lock_for_run(resume=resume))
        store = PartyCheckpointStore(folder, name, config, data.select_party(name), role=role)
        # Answers do not leave this process, so none has to wait until the disk has counted it.
        secrets[name] = replace(store.secrets, needs_durable_logs=False)
    return secrets


def _build_simulation(
    inputs: SimulationInputs, *, tables: VerticalData | None, can_share_alignment: bool
) -> Simulation:
    """Return a simulation of all parties, which are aligned by now.

    They align by their protocol, or reuse the alignment of an earlier run (`share_alignments`).

    Args:
        inputs: settings, data and secrets of all parties.
        tables: tables that the caller passed; None: they were loaded as the settings say. An
            alignment is reused only for tables with the same IDs, row by row.
        can_share_alignment: whether alignments may be reused, and this one stored for later runs.
    """
    config = inputs.config
    shared_alignments = (
        _SHARED_ALIGNMENTS.get()
        if can_share_alignment and inputs.config.method.needs_alignment
        else None
    )
    # If the run loads its tables itself, these settings determine tables and alignment.
    settings_key = (
        f"{config.data.model_dump_json()} {config.alignment.model_dump_json()} {config.seed}"
    )
    people = None if tables is None else _list_people(tables)
    earlier_alignment = (
        shared_alignments.get(settings_key) if shared_alignments is not None else None
    )
    if earlier_alignment is not None and earlier_alignment.people == people:
        session = Simulation(
            METHODS[config.method.name], replace(inputs, alignment=earlier_alignment.rows)
        )
        session.transcript.add_flows(earlier_alignment.flows)
        return session
    session = Simulation(METHODS[config.method.name], inputs)
    is_aligned_here = config.method.needs_alignment and bool(session.contract.passives)
    # A dealer also sends messages of other kinds, so its alignment's messages cannot be counted
    # for other runs.
    if shared_alignments is not None and is_aligned_here and not needs_dealer(config.alignment):
        flows = tuple(flow for flow in session.transcript.flows if flow.kind is Kind.ALIGNMENT)
        shared_alignments[settings_key] = PastAlignment(dict(session.alignment), flows, people)
    return session


def _require_room(config: Config, session: Simulation, folder: Path | None) -> None:
    """Raise ConfigError if the disk is certainly too small for the stored transcript.

    The free space is compared with a lower bound of the transcript's size. A row's representation
    is sent once, and answered by a gradient: that is 8 bytes for each number of each training row,
    in each epoch that is stored.

    `folder`: folder of the run; None: messages are stored in the folder for temporary files.
    """
    train = config.train
    # With early stopping the run has at least this many epochs.
    min_epochs = train.epochs
    if train.patience is not None:
        min_epochs = min(train.epochs, train.patience + 1)
    stored_epochs = config.effective_transcript.count_stored_epochs(min_epochs)
    if config.method.has_single_exchange:  # rows are sent once, whatever the number of epochs
        stored_epochs = min(stored_epochs, 1)
    terms_by_passive = session.contract.passives.values()
    numbers_per_row = max(
        (math.prod(party_terms.representation.shape) for party_terms in terms_by_passive), default=0
    )
    sent_row_count = len(session.active_role.training_rows) * stored_epochs
    megabytes = sent_row_count * numbers_per_row * 8 / 1e6
    if megabytes > (free := count_free_megabytes(folder)):
        raise ConfigError(
            f"transcript.keep {config.effective_transcript.keep}: at least {megabytes:,.0f} MB of "
            f"payloads would be kept for attacks, and the disk of {folder or gettempdir()} has "
            f"{free:,.0f} MB free; make room, take fewer rows (data.limit), a smaller "
            "model.projection, or transcript.keep none"
        )


class _SimulationCallbacks(RunCallbacks):
    """The calls of a training loop in a run of all parties in one process.

    They record the messages of all parties.

    Args:
        config: settings of the run.
        data: the tables of all parties.
        session: the simulation, whose messages are recorded.
        writer: writer of the run's files; None: they are not written.
        on_progress: called after every step, and after each evaluation.
    """

    def __init__(
        self,
        config: Config,
        data: VerticalData,
        session: Simulation,
        writer: RunWriter | None,
        on_progress: Callable[[Progress], None],
    ) -> None:
        """Store the arguments."""
        super().__init__(writer, on_progress)
        self._config = config
        self._data = data
        self._session = session

    def prepare_loop(self, session: Session, state: PartyCheckpoint | None) -> None:
        """Arrange that the record of messages is saved before each checkpoint of the active.

        If the run resumes, also load the record that was saved with its checkpoint, and the totals
        of earlier sessions.

        `state`: the active's checkpoint; None: a new run.

        Raises CheckpointError: there is no record for the checkpoint's step.
        """
        if self.writer is None:
            return
        folder = self.writer.folder
        store = session.party_session.party.secrets.checkpoint_store
        recordings = folder.recordings
        transcript = session.transcript
        transcript.keep_in(folder.path)
        assert isinstance(store, PartyCheckpointStore)
        store.before_save = lambda step: recordings.write_step(
            step, msgpack.packb(transcript.state_dict(step))
        )
        if state:
            if state.step not in recordings.list_steps():
                raise CheckpointError(
                    f"resume with --transport local: {folder.path} holds no record of what all "
                    "parties sent, since each ran in a process of its own"
                )
            recording = msgpack.unpackb(recordings.load_step(state.step), strict_map_key=False)
            # Raises CheckpointError if this version cannot read the format.
            RECORDING.parse_format_number(recordings.get_path(state.step), recording)
            self.past = load_session_totals(folder.interrupted_totals)
            transcript.resume_record(recording, self.past.sent)

    def build_recording(self) -> Recording:
        """Return the record of the run: settings, data, alignment, messages and networks."""
        session = self._session
        return Recording(
            config=self._config,
            data=self._data,
            alignment=session.alignment,
            transcript=session.transcript,
            model=copy_predictor(session.active_role.get_active_networks()),
            encoders={
                name: copy.deepcopy(network).cpu().eval()
                for name, network in session.collect_networks().items()
            },
        )


LinkType: TypeAlias = Literal["tcp", "grpc", "relay", "nvflare"]
"""Name of the connection between parties in processes of their own."""
LINK_TYPES: Mapping[str, LinkType] = {"local": "tcp", "grpc": "grpc", "relay": "relay"}
"""Connections between the parties' processes, by the name of the transport."""


def _run_in_processes(link_type: LinkType, *args: Any, **options: Any) -> RunResult:
    """Run with a process of its own for each party.

    `link_type`: type of the connections between them. `args`, `options`: the other arguments of
    `secure_apfed.organisations.local.run_locally`.
    """
    # Loaded only here: runs in memory do not need this module.
    from secure_apfed.organisations.local import run_locally

    return run_locally(*args, link_type=link_type, **options)


_LOGGER = logging.getLogger(__name__)
TRANSPORTS: Mapping[str, Callable[..., RunResult]] = {
    "memory": run_in_memory,
    **{name: partial(_run_in_processes, link_type) for name, link_type in LINK_TYPES.items()},
}
RunTransport: TypeAlias = Literal["memory", "local", "grpc", "relay"]
"""A transport that `run` takes: a key of `TRANSPORTS`."""


@isolate_torch_modes()
def run(
    config: Config,
    folder: PathLike | None,
    *,
    data: VerticalData | None = None,
    resume: bool = False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    transport: RunTransport = "memory",
    **options: Any,
) -> RunResult:
    """Train, evaluate and write one run.

    Args:
        config: settings of the run.
        folder: folder of the run, which is created if missing; None: nothing is written.
        data: data of the run; None: they are loaded as the settings say.
        resume: continue from the checkpoints in `folder`.
        on_progress: called after every step, and again after an evaluation; if parties run in
            processes of their own, at most once a second.
        transport: a key of `TRANSPORTS`: "memory", one process for all parties; "local", one
            process a party, over loopback; "grpc", the same as between machines; "relay", through a
            relay.
        options: options of the transport: `timeout_s`, seconds of patience with a silent party.

    Raises:
        ConfigError, DataError, ModelError: settings, data or networks do not fit; raised before
            anything is sent.
        CheckpointError: there is nothing to resume, the folder has a run already, or the active
            refused more secure sums of this run than `rules.refused_sums` allows.
        BudgetExhaustedError: the privacy budget is spent; the checkpoints stay.
        ProtocolError: a party broke the protocol; the run stops for all.

    Examples:
        >>> from secure_apfed import Config, run
        >>> config = Config(
        ...     name="first",
        ...     method="apfed_r",
        ...     data={"dataset": "breast_cancer"},
        ...     model={"projection": 4},
        ...     train={"epochs": 1},
        ...     guard={"mechanism": "none"},
        ...     secure_sum={"scheme": "plain", "masks": "pairwise"},
        ... )
        >>> result = run(config, None)  # a folder in place of None keeps model and report
        >>> result.accuracy
        {'apfed_r': ...}
    """
    if transport not in TRANSPORTS:
        raise ConfigError(f"transport: {describe_unknown_name(transport, TRANSPORTS)}")
    run_over_transport = TRANSPORTS[transport]
    path = None if folder is None else Path(folder)
    _LOGGER.info("run %s begins: method %s over %s", config.name, config.method.name, transport)
    result = run_over_transport(
        config, path, data=data, resume=resume, on_progress=on_progress, **options
    )
    _LOGGER.info("run %s has ended: %d bytes on the wire", config.name, result.wire_bytes)
    return result

"""Runs with each party in a process of its own on this machine, over loopback.

Run by: the experimenter, who prepares a folder for each party (its key, its rows, its file of
settings), starts one process a party, which opens no folder but its own, and gathers the results
that the parties wrote. No party has all messages, so each runs attacks on its own messages. All
processes belong to one user: this is a trial of separate parties, and protects none from another.
"""

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import TypeAdapter

from apfed_protocols.errors import (
    LocalProtocolError,
    PartyLeftError,
    RemoteProtocolError,
    RunStoppedError,
)
from apfed_protocols.psi.interface import IntersectionTooSmallError
from secure_apfed.alignment.ids import make_id_rules
from secure_apfed.base.files import (
    load_json,
    make_private,
    open_regular,
    own_subfolder,
    write_atomically,
)
from secure_apfed.base.formats import MODEL_CARD, RUN_RESULT
from secure_apfed.base.seeds import usable_cores
from secure_apfed.base.working import Work, parse_work_event
from secure_apfed.config import Config
from secure_apfed.config.file import dump_settings
from secure_apfed.data import VerticalData, load_data, pack_own
from secure_apfed.data.catalogue import party_names
from secure_apfed.data.mapped_tables import is_mapped
from secure_apfed.errors import CheckpointError, ConfigError, DataError, ModelError
from secure_apfed.exchange import Status
from secure_apfed.exchange.sockets import parse_address
from secure_apfed.learning.own_code import (
    UserFunctionSettings,
    refuse_user_functions,
    split_user_functions,
)
from secure_apfed.methods import METHODS, assign_roles
from secure_apfed.organisations.party import PartyFile, Peer, Tls
from secure_apfed.privacy.ledger import BudgetExhaustedError
from secure_apfed.runs.audit_log import AUDIT_LOG_NAME
from secure_apfed.runs.checkpoint_store import PartyEnd, config_digest
from secure_apfed.runs.folder import PartyFolder, RunFolder
from secure_apfed.runs.outcome import (
    Outcome,
    Privacy,
    Progress,
    RunResult,
    StoredGuarantee,
    compute_guarantees,
    load_outcome,
    write_outcome,
)
from secure_apfed.runs.past_sessions import load_logged_sessions
from secure_apfed.runs.run import LinkType
from secure_apfed.settings.data import OWN_TABLES

RELAY_NAME = "relay"  # its name in the certificate, and its folder's name
_PROGRAM_WORDS = (sys.executable, "-m", "secure_apfed.cli")
_LOOPBACK = "127.0.0.1"
_PORT_RANGE = range(20_000, 32_000)
_PORT_BLOCKS = 40  # disjoint sets of ports, of which a process prefers one
_CA_FILE = Path("ca.pem")
_CERTIFICATE_FILE = Path("certificate.pem")
_KEY_FILE = Path("key.pem")
_UNREACHABLE_S = 3.0  # a process on this machine that is unreachable for this long has ended
_RELAY_START_S = 60.0
_PROGRESS_PARSER = TypeAdapter(Progress)
_OnEvent: TypeAlias = Callable[[Mapping[str, Any]], None]
_POLL_INTERVAL_S = 0.05
_END_GRACE_S = 10.0  # for a process to end after it was asked to, or after its part is over
_PATIENCE_UNITS_UNTIL_NOTICED = 8
"""Units of patience after which a party is certain to have noticed that another is gone."""
_MAX_LINE_BYTES = 2**20
_MIN_MEETING_S = 60.0  # at least: a process takes longer to start than to answer
_TABLE_READING_S = 86_400.0
"""Seconds in which all parties must have read their own large tables; then they connect."""
_PARTY_FILE_NAME = "party.yaml"
_SHARED_SETTINGS_FILE = "shared.yaml"
"""Settings without the names of code, where the run's own name some."""
_TABLE_FILE = "table.safetensors"
_LOG_FILE_NAME = "log.txt"
_OWN_FAULT_EXIT_CODES = (2, 3)  # exit codes for errors in the party's own settings and data
# Kinds of errors that a party reports when another party, or a person, caused its end.
_SECONDARY_ERROR_KINDS = ("RunStoppedError", "PartyLeftError", "Interrupted", "Terminated")
_CONVERTED_FIELDS = frozenset({"method", "privacy", "contributions", "promises", "stated"})
"""Fields of a result that its file holds in another form."""
_UNCONVERTED_FIELDS = tuple(
    each.name
    for each in fields(RunResult)
    if each.name in Outcome.model_fields and each.name not in _CONVERTED_FIELDS
)
"""Fields of a result that its file holds as they are."""
_REPORTABLE_ERRORS: tuple[type[Exception], ...] = (
    BudgetExhaustedError,
    CheckpointError,
    ConfigError,
    DataError,
    IntersectionTooSmallError,
    LocalProtocolError,
    ModelError,
    RemoteProtocolError,
)


def find_free_addresses(count: int) -> list[str]:
    """Return `count` unused addresses ("host:port") on loopback.

    Their ports are below the ephemeral ports, so that no outgoing connection takes one before its
    party listens. Processes that run in parallel prefer disjoint ports.

    Raises ConfigError: fewer ports are free.
    """
    addresses: list[str] = []
    preferred_ports = _PORT_RANGE[os.getpid() % _PORT_BLOCKS :: _PORT_BLOCKS]
    generator = secrets.SystemRandom()
    candidate_ports = (
        port
        for ports in (preferred_ports, _PORT_RANGE)
        for port in generator.sample(ports, len(ports))
    )
    with contextlib.ExitStack() as stack:  # keeps each port in use until all are found
        while len(addresses) < count:
            port = next(candidate_ports, None)
            if port is None:
                raise ConfigError(
                    f"of ports {_PORT_RANGE[0]} to {_PORT_RANGE[-1]} of {_LOOPBACK} "
                    f"{len(addresses)} are free and {count} needed; end who listens there"
                )
            with contextlib.suppress(OSError):  # the port is in use
                stack.enter_context(socket.create_server((_LOOPBACK, port)))
                addresses.append(f"{_LOOPBACK}:{port}")
    return addresses


def make_link_settings(
    link_type: LinkType, folder_by_party: Mapping[str, Path]
) -> dict[str, dict[str, Any]]:
    """Return, by party, the link settings of its file; for TLS, write certificates and keys.

    The certificate authority's key is discarded, so that nobody can sign further certificates.

    `link_type`: the type of connections: "tcp", "grpc", "relay" (gRPC through a relay) or
    "nvflare". `folder_by_party`: by party, its folder.
    """
    if link_type == "tcp":
        return {
            name: {"link": link_type, "reconnect_s": _UNREACHABLE_S} for name in folder_by_party
        }
    if link_type == "nvflare":
        return {name: {"link": link_type} for name in folder_by_party}
    from secure_apfed.exchange.certificates import make_authority

    authority = make_authority("secure-apfed trial")
    settings: dict[str, Any] = {
        "link": "grpc",
        "tls": Tls(ca=_CA_FILE, certificate=_CERTIFICATE_FILE, key=_KEY_FILE),
    }
    folder_by_certified_name = dict(folder_by_party)
    if link_type == "relay":
        parties_folder = next(iter(folder_by_party.values())).parent
        folder_by_certified_name[RELAY_NAME] = own_subfolder(parties_folder.parent / RELAY_NAME)
        make_private(folder_by_certified_name[RELAY_NAME])
        (settings["relay"],) = find_free_addresses(1)
    for name, folder in folder_by_certified_name.items():
        credentials = authority.issue_certificate(name)
        write_atomically(folder / _CA_FILE, credentials.ca)
        write_atomically(folder / _CERTIFICATE_FILE, credentials.certificate)
        write_atomically(folder / _KEY_FILE, credentials.key, private=True)
    return dict.fromkeys(folder_by_party, settings)


def make_relay_command(settings_files: Iterable[Path]) -> tuple[str, ...]:
    """Return the command-line words after `secure-apfed` that run the relay of these parties.

    The result is () if they use no relay. `settings_files`: the parties' settings files, which all
    name the same relay.
    """
    first_file = next(iter(settings_files))
    address = PartyFile.from_file(first_file).relay
    if address is None:
        return ()
    # The file is RUN/parties/PARTY/party.yaml, and the relay's folder RUN/relay.
    folder = first_file.parent.parent.parent / RELAY_NAME
    words = ["relay", "--listen", address]
    for file in (_CA_FILE, _CERTIFICATE_FILE, _KEY_FILE):
        words += [f"--{file.stem}", str(folder / file)]
    return tuple(words)


@contextmanager
def run_relay(settings_files: Iterable[Path]) -> Iterator[None]:
    """Run the relay of these parties, if they use one, in a process during the `with` block.

    `settings_files`: the parties' settings files, which name the relay's address.

    Raises ConfigError: the relay did not start.
    """
    words = make_relay_command(settings_files)
    if not words:
        yield
        return
    address = words[words.index("--listen") + 1]
    command = [*_PROGRAM_WORDS, *words, "--end-with-stdin", "--json"]
    with subprocess.Popen(  # noqa: S603 - this very program
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as process:
        deadline = time.monotonic() + _RELAY_START_S
        try:
            while not _is_listening(address):
                if time.monotonic() > deadline or process.poll() is not None:
                    raise ConfigError(
                        f"the relay did not start at {address}; its messages are above"
                    )
                time.sleep(_POLL_INTERVAL_S)
            yield
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)  # seconds; then it is killed
            process.kill()


def _is_listening(address: str) -> bool:
    """Return whether a connection to this address succeeds."""
    with contextlib.suppress(OSError), socket.create_connection(parse_address(address), 1.0):
        return True
    return False


def run_locally(
    config: Config,
    folder: Path | None,
    *,
    data: VerticalData | None = None,
    resume: bool = False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    timeout_s: float = 60.0,
    on_status: Callable[[Status], None] = lambda status: None,
    link_type: LinkType = "tcp",
    on_work: Callable[[str, Work], None] = lambda party, work: None,
    baselines: bool = False,
) -> RunResult:
    """Train, evaluate and write one run, each of whose parties has a process on this machine.

    It is what `secure_apfed.run` calls for all transports except "memory".

    Args:
        config: the run's settings.
        folder: the run's folder, which is required.
        data: all parties' tables; None: they are loaded here, or by each party if one is too large
            for memory.
        resume: whether to continue from the checkpoints.
        on_progress: called with the active's progress.
        timeout_s: the unit of patience: seconds for which a party may be silent.
        on_status: called from a thread with each party's status, at most once a second.
        link_type: the type of connections between the parties.
        on_work: called with a party's name and the progress of its long computations.
        baselines: whether the active's process also measures the best local models.

    Raises:
        ConfigError: no folder is named, or a setting is wrong.
        CheckpointError: the folder has another run.
        Exception: the error that the first failing party reported; see `_find_failure`.
    """
    if folder is None:
        raise ConfigError("parties that run apart need a folder each; name a run folder")
    run_folder = RunFolder(folder)
    with run_folder.open_for_run(config, resume=resume):
        active_folder = PartyFolder(run_folder.get_party_path(config.data.active_name))
        if resume:
            _refuse_another_run(config, run_folder)
        is_finished = resume and active_folder.result.exists()
        if not is_finished:
            data = data or _load_unless_mapped(config)
            settings_file_by_party = prepare_parties(
                config,
                folder,
                data=data,
                timeout_s=timeout_s,
                meet_s=_TABLE_READING_S if data is None else _MIN_MEETING_S,
                resume=resume,
                link_type=link_type,
            )
            options = []
            if resume:
                options.append("--resume")
            if not baselines:
                options.append("--no-baselines")
            report_event = partial(
                _report_event, on_progress=on_progress, on_status=on_status, on_work=on_work
            )
            with (
                run_relay(settings_file_by_party.values()),
                _start_processes(settings_file_by_party, options, report_event) as processes,
            ):
                _wait_for_processes(processes, active_folder, timeout_s, config)
            failure = _find_failure(processes)
            if failure and not active_folder.result.exists():
                raise failure
            if failure:
                warnings.warn(
                    f"nothing to do: the run is finished, but not at all parties:\n{failure}",
                    stacklevel=2,
                )
        return _gather_results(config, run_folder, active_folder)


def _report_event(
    event: Mapping[str, Any],
    *,
    on_progress: Callable[[Progress], None],
    on_status: Callable[[Status], None],
    on_work: Callable[[str, Work], None],
) -> None:
    """Pass an event that a party's process printed to the callbacks of `run_locally`.

    `event`: a JSON object with progress, status or work, by these names; others are ignored.
    """
    work = event.get("work")
    if isinstance(work, dict):
        on_work(*parse_work_event(work))
    status = event.get("status")
    if isinstance(status, dict):
        fields = {name: status[name] for name in Status.model_fields & status.keys()}
        on_status(Status.model_validate(fields))
    progress = event.get("progress")
    if progress:
        on_progress(_PROGRESS_PARSER.validate_python(progress))


def _load_unless_mapped(config: Config) -> VerticalData | None:
    """Load all parties' tables; return None if a table is too large for memory.

    In this case each party's process reads its own table from disk, as a memory map.
    """
    names = party_names(config.data) if config.data.dataset == OWN_TABLES else ()
    if any(is_mapped(config.data, name) for name in names):
        return None
    return load_data(config.data, seed=config.seed)


def _refuse_another_run(config: Config, run_folder: RunFolder) -> None:
    """Raise CheckpointError if the run in the folder cannot be resumed with these settings.

    Either one process simulated all its parties, or it had other settings.
    """
    if run_folder.recordings.list_steps():
        raise CheckpointError(
            f"resume with --transport memory: {run_folder.path} holds a run that one process played"
        )
    # Settings that may change when a run is resumed are left out of the digest.
    if run_folder.config.exists() and config_digest(run_folder.load_config()) != config_digest(
        config
    ):
        raise CheckpointError(
            f"resume with its config.yaml: {run_folder.path} belongs to a run with another "
            "configuration"
        )


def prepare_parties(
    config: Config,
    folder: Path,
    *,
    data: VerticalData | None = None,
    timeout_s: float = 60.0,
    meet_s: float = _MIN_MEETING_S,
    resume: bool = False,
    link_type: LinkType = "tcp",
) -> dict[str, Path]:
    """Create each party's folder, key, rows and settings file on this machine.

    Returns the path of each party's settings file, by name.

    Args:
        config: the run's settings.
        folder: the run's folder.
        data: all parties' tables; None: a built-in data set is loaded here, and tables of one's own
            are read by each party when it starts.
        timeout_s: the unit of patience: seconds for which a party may be silent.
        meet_s: seconds that parties wait for one another at first, `timeout_s` at least.
        resume: whether tables that a former call wrote are kept.
        link_type: the type of connections between the parties. For "grpc" and "relay" each party
            also gets a TLS certificate; for "nvflare" the files are for a job (see
            `nvflare_job.py`).
    """
    if data is None and config.data.dataset != OWN_TABLES:
        data = load_data(config.data, seed=config.seed)
    active, passives = _name_table_parties(config, data)
    names = tuple(assign_roles(METHODS[config.method.name], config, active, passives))
    run_folder = RunFolder(folder)
    _, user_functions_by_party = split_user_functions(config, active, passives)
    shared_path = _write_shared_settings(config, run_folder, active, passives)
    peer_by_name = _prepare_peers(run_folder, names, link_type)
    link_settings_by_party = make_link_settings(
        link_type, {name: run_folder.get_party_path(name) for name in names}
    )
    settings_path_by_party = {}
    for name in names:
        table_path = run_folder.get_party_path(name) / _TABLE_FILE
        party_data = None if data is None else data.select_party(name)
        if party_data is not None and not (resume and table_path.exists()):
            write_atomically(table_path, pack_own(party_data), private=True)
        settings = PartyFile(
            party=name,
            active=active,
            passives=passives,
            config=Path("..", "..", shared_path.name),
            listen=peer_by_name[name].address,
            peers={peer: peer_by_name[peer] for peer in names if peer != name},
            table=None if party_data is None else Path(_TABLE_FILE),
            allow_reading_all=config.find_passive_settings(name).allow_reading_all,
            code=user_functions_by_party.get(name, UserFunctionSettings()),
            code_folder=Path.cwd(),
            timeout_s=timeout_s,
            meet_s=max(meet_s, timeout_s),
            **link_settings_by_party[name],
        )
        settings_path_by_party[name] = run_folder.get_party_path(name) / _PARTY_FILE_NAME
        write_atomically(settings_path_by_party[name], dump_settings(settings).encode())
    return settings_path_by_party


def _name_table_parties(config: Config, data: VerticalData | None) -> tuple[str, tuple[str, ...]]:
    """Return the name of the active and those of the passives, all of which have tables.

    `data`: all parties' tables, whose IDs must have common ones; None: each party reads its own
    table when it starts, and the settings name the parties.
    """
    if data is None:
        active, *passives = party_names(config.data)
        return active, tuple(passives)
    data.compare_ids(make_id_rules(config.alignment).normalise_text)
    return data.active.name, tuple(table.name for table in data.passives)


def _write_shared_settings(
    config: Config, run_folder: RunFolder, active: str, passives: tuple[str, ...]
) -> Path:
    """Write the run's settings into its folder; return the path of the file that parties share.

    User functions are each party's own. If the settings name some, the shared file is a second one,
    which leaves them out.

    `active`, `passives`: names of the parties that have tables.
    """
    write_atomically(run_folder.config, dump_settings(config).encode())
    shared_config, _ = split_user_functions(config, active, passives)
    refuse_user_functions(shared_config, source="the file that the run's processes share")
    if shared_config == config:
        return run_folder.config
    shared_path = run_folder.path / _SHARED_SETTINGS_FILE
    write_atomically(shared_path, dump_settings(shared_config).encode())
    return shared_path


def _prepare_peers(
    run_folder: RunFolder, names: Sequence[str], link_type: LinkType
) -> dict[str, Peer]:
    """Create the parties' folders and keys; return the address and public key of each, by name.

    Over a relay or NVFlare parties have no addresses.

    `run_folder`: folder of the run. `names`: the parties. `link_type`: type of their connections.
    """
    addresses: Sequence[str | None] = find_free_addresses(len(names))
    if link_type in ("relay", "nvflare"):
        addresses = [None] * len(names)
    peer_by_name = {}
    for name, address in zip(names, addresses, strict=True):
        make_private(own_subfolder(run_folder.get_party_path(name)))
        identity = PartyFolder(run_folder.get_party_path(name)).load_identity().public.hex()
        peer_by_name[name] = Peer(address=address, identity=identity)
    return peer_by_name


class _Process:
    """A party's process, which prints an event in each line of its output, as a JSON object.

    Attributes:
        name: name of the party.
        process: the process.
        reported_error: kind and message of the last error that it printed; empty: none.
    """

    def __init__(self, name: str, process: "subprocess.Popen[bytes]", on_event: _OnEvent) -> None:
        """Start a thread that reads the events of a party's process.

        `name`: the party. `on_event`: called in the thread with each event.
        """
        self.name = name
        self.process = process
        self._on_event = on_event
        self.reported_error: Mapping[str, Any] = {}
        self._reader = threading.Thread(target=self._parse_events, daemon=True)
        self._reader.start()

    @property
    def exit_code(self) -> int | None:
        """The exit code of the process; None while it runs."""
        return self.process.poll()

    def wait_for_end(self) -> None:
        """Wait until the process has ended and its output is read.

        Its input is closed first, by which a process that still runs ends.
        """
        if self.process.stdin:
            self.process.stdin.close()
        self.process.wait()
        self._reader.join(_END_GRACE_S)

    def _parse_events(self) -> None:
        """Read events from the process's output until it ends, and remember its last error.

        Lines that are no JSON objects are ignored.
        """
        assert self.process.stdout
        with self.process.stdout as lines:
            while line := lines.readline(_MAX_LINE_BYTES):
                with contextlib.suppress(ValueError, RecursionError):
                    event = json.loads(line)
                    if not isinstance(event, dict):
                        continue
                    self.reported_error = event.get("error", self.reported_error)
                    self._on_event(event)


@contextmanager
def _start_processes(
    settings_file_by_party: Mapping[str, Path], option_words: Sequence[str], on_event: _OnEvent
) -> Iterator[Sequence[_Process]]:
    """Start one process for each party; end all of them after the `with` block.

    The processes share the machine's cores, unless the environment sets their number of threads.

    `settings_file_by_party`: by party, its settings file. `option_words`: further words of the
    command. `on_event`: called with each event of each process.
    """
    processes: list[_Process] = []
    default_threads = {
        "OMP_NUM_THREADS": str(max(1, usable_cores() // len(settings_file_by_party)))
    }
    try:
        for name, file in settings_file_by_party.items():
            command = [*_PROGRAM_WORDS, "party", "--config", str(file), "--json-events"]
            command += ["--end-with-stdin", "--no-report", *option_words]
            with os.fdopen(open_regular(file.parent / _LOG_FILE_NAME, create=True), "ab") as log:
                process = subprocess.Popen(  # noqa: S603 - this very program
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=default_threads | os.environ,
                )
            processes.append(_Process(name, process, on_event))
        yield processes
    finally:
        _end_processes(processes)


def _end_processes(processes: Sequence[_Process]) -> None:
    """Terminate the processes that still run, kill them after a while, and read all output."""
    running = [process for process in processes if process.exit_code is None]
    for process in running:
        process.process.terminate()
    deadline = time.monotonic() + _END_GRACE_S
    for process in running:
        try:
            process.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.process.kill()
    for process in processes:
        process.wait_for_end()


def _wait_for_processes(
    processes: Sequence[_Process], active_folder: RunFolder, timeout_s: float, config: Config
) -> None:
    """Wait for the active's process to end, and then a limited time for the others.

    A party that has finished its part and still attacks its own messages is awaited without limit.

    Args:
        processes: processes of all parties.
        active_folder: folder of the active's run.
        timeout_s: the unit of patience: seconds for which a party may be silent.
        config: the run's settings, which name the attacks, if any.
    """
    active = next(process for process in processes if process.name == config.data.active_name)
    others = [process for process in processes if process is not active]
    patience_s = _PATIENCE_UNITS_UNTIL_NOTICED * timeout_s
    if not _wait_for_active(active, others, active_folder, patience_s=patience_s + _END_GRACE_S):
        return
    # The others only have to receive the end, or to notice that the active is gone.
    deadline = time.monotonic() + (_END_GRACE_S if active.exit_code == 0 else patience_s)
    end_file_by_party = {
        other.name: PartyFolder(active_folder.path.with_name(other.name)).party_end
        for other in others
    }
    while any(
        _is_awaited(
            other,
            deadline=deadline,
            # A party writes this file first, and then attacks its own messages.
            attack_signal=end_file_by_party[other.name] if config.attacks else None,
        )
        for other in others
    ):
        time.sleep(_POLL_INTERVAL_S)


def _is_awaited(process: _Process, *, deadline: float, attack_signal: Path | None) -> bool:
    """Return whether a party still runs, and either is in time or attacks its own messages.

    Args:
        process: the party's process.
        deadline: time by the monotonic clock until which any party is awaited.
        attack_signal: file that exists once the party attacks; None: the run has no attacks.
    """
    is_attacking = attack_signal is not None and attack_signal.exists()
    return process.exit_code is None and (time.monotonic() < deadline or is_attacking)


def _wait_for_active(
    active: _Process, others: Sequence[_Process], active_folder: RunFolder, *, patience_s: float
) -> bool:
    """Wait for the active's process to end; return False if the run cannot go on before that.

    The run cannot go on if a party fails by its own settings or data before the contract is signed,
    or if the active has waited for parties that have ended for `patience_s` seconds.

    Args:
        active: the active's process.
        others: the processes of the other parties.
        active_folder: folder of the active's run, where contract and result appear.
        patience_s: how many seconds the active may wait for parties that have ended.
    """
    signed_at_start = _get_signing_time(active_folder)
    lost_since_time: float | None = None  # since when the active waits for parties that have ended
    while active.exit_code is None:
        time.sleep(_POLL_INTERVAL_S)
        has_begun = _get_signing_time(active_folder) != signed_at_start
        exit_codes = [process.exit_code for process in (active, *others)]
        if not has_begun and any(code in _OWN_FAULT_EXIT_CODES for code in exit_codes):
            return False
        # Without a contract the active needs every party. With a result it waits for no party, but
        # may still measure its local models.
        have_ended = [other.exit_code is not None for other in others]
        is_lost = all(have_ended) if has_begun else any(have_ended)
        if not (others and is_lost) or active_folder.result.exists():
            lost_since_time = None
            continue
        lost_since_time = lost_since_time or time.monotonic()
        if time.monotonic() - lost_since_time > patience_s:
            return False
    return True


def _get_signing_time(folder: RunFolder) -> int:
    """Return when the contract in a folder was written, in nanoseconds; 0: there is none."""
    return folder.contract.stat().st_mtime_ns if folder.contract.exists() else 0


def _find_failure(processes: Sequence[_Process]) -> Exception | None:
    """Return the error by which a run ended; None if all parties succeeded.

    Its text has the message of each party that failed. Its class is the one that the first party
    reported which did not stop because of another party; without such a report it is
    PartyLeftError.

    `processes`: processes of all parties, which have ended.
    """
    failed_processes = [process for process in processes if process.exit_code != 0]
    if not failed_processes:
        return None
    first_reporter: _Process | None = None
    for process in failed_processes:
        error_kind = process.reported_error.get("kind")
        if process.reported_error and error_kind not in _SECONDARY_ERROR_KINDS:
            first_reporter = process
            break
    text = "\n".join(_describe_failures(failed_processes, first_reporter))
    if first_reporter is None:
        return PartyLeftError(text)
    error_class_by_name = {error_class.__name__: error_class for error_class in _REPORTABLE_ERRORS}
    reported_kind = first_reporter.reported_error.get("kind", "")
    return error_class_by_name.get(reported_kind, PartyLeftError)(text)


def _describe_failures(
    failed_processes: Sequence[_Process], first_reporter: _Process | None
) -> list[str]:
    """Return a line for each party that failed, and one for all that stopped because of another.

    Parties come in this order: the first reporter, those without a report, other reports.

    `first_reporter`: the first party whose reported error no other party caused; None: there is
    none.
    """
    stopped_processes = [
        process
        for process in failed_processes
        if process.reported_error.get("kind") == RunStoppedError.__name__
    ]
    causing_processes = [
        process for process in failed_processes if process not in stopped_processes
    ]
    described_processes = sorted(
        causing_processes or stopped_processes,
        key=lambda process: (process is not first_reporter, bool(process.reported_error)),
    )
    lines = [f"{process.name}: {_describe_failure(process)}" for process in described_processes]
    if causing_processes and stopped_processes:
        lines.append(
            f"{' and '.join(process.name for process in stopped_processes)} heard of it, and "
            "stopped"
        )
    return lines


def _describe_failure(process: _Process) -> str:
    """Return the error that a party's process reported, or else how the process ended."""
    if process.reported_error:
        return str(process.reported_error.get("message"))
    exit_code = process.exit_code or 0
    if exit_code < 0:  # ended by the signal with this number
        return f"its process was ended by {signal.Signals(-exit_code).name}"
    return f"its process ended with code {exit_code}; its {_LOG_FILE_NAME} says more"


def _gather_results(config: Config, run_folder: RunFolder, active_folder: RunFolder) -> RunResult:
    """Write the run's result into its folder, and return it.

    The active's files are copied. Bytes on the links and privacy costs are combined from what each
    party wrote into its own folder.

    `run_folder`: the run's folder. `active_folder`: the active's folder in it.
    """
    _copy_active_files(run_folder, active_folder)
    party_folders = [
        PartyFolder(path) for path in sorted(run_folder.parties.iterdir()) if path.is_dir()
    ]
    outcome = _combine_outcomes(config, run_folder, party_folders, active_folder)
    card = load_json(active_folder.model_card, dict[str, Any], file_format=MODEL_CARD)
    privacy = outcome.privacy
    card["epsilon"] |= {"representations": privacy.epsilon_x, "releases": privacy.releases}
    card["promises"] = [promise.model_dump() for promise in outcome.promises]
    run_folder.write_json(run_folder.model_card, card)
    write_outcome(run_folder, outcome)
    return RunResult(
        method=config.method.name,
        **{name: getattr(outcome, name) for name in _UNCONVERTED_FIELDS},
        privacy=load_outcome(run_folder).privacy.to_spent(),
        contributions={
            name: account.model_dump(mode="python")
            for name, account in outcome.contributions.items()
        },
        promises=compute_guarantees(config, outcome),
        stated={
            name: statement.model_dump(mode="python") for name, statement in outcome.stated.items()
        },
        folder=run_folder.path,
    )


def _copy_active_files(run_folder: RunFolder, active_folder: RunFolder) -> None:
    """Copy the files that the active wrote, such as model and metrics, into the run's folder."""
    sources = _list_active_files(active_folder)
    for source, copy in zip(sources, _list_active_files(run_folder), strict=True):
        if source.exists():
            shutil.copyfile(source, copy)


def _list_active_files(folder: RunFolder) -> list[Path]:
    """Return the paths of a run's files that the active alone writes."""
    return [
        folder.contract,
        folder.seeds,
        folder.versions,
        folder.metrics,
        folder.model,
        folder.accountants,
        folder.test_scores,
        folder.local_models,
        folder.baseline_predictions,
        folder.statements,
    ]


def _combine_outcomes(
    config: Config,
    run_folder: RunFolder,
    party_folders: Sequence[PartyFolder],
    active_folder: RunFolder,
) -> Outcome:
    """Return the active's outcome with the messages and privacy costs of all parties.

    The messages' number and size are also written into the run's folder.

    `run_folder`: the run's folder. `party_folders`: the folders of all parties. `active_folder`:
    the active's.
    """
    party_ends = [
        load_json(party.party_end, PartyEnd)
        for party in party_folders
        if party.path != active_folder.path and party.party_end.exists()
    ]
    # Each party's sent messages only: what it received, another party sent.
    message_flows = [flow for party in party_folders for flow in _list_sent_flows(party)]
    run_folder.write_json(run_folder.message_flows, message_flows)
    active_outcome = load_json(active_folder.result, Outcome, file_format=RUN_RESULT)
    # Each party's own privacy cost, if it ended; else the cost that it reported to the active.
    contribution_costs_by_party = {
        end.party: end.contributions for end in party_ends if end.contributions is not None
    }
    combined_fields = {
        "wire_bytes": sum(flow["wire_bytes"] for flow in message_flows),
        "privacy": _pick_highest_privacy_cost(
            active_outcome.privacy, [end.privacy for end in party_ends if end.privacy]
        ),
        "contributions": {**active_outcome.contributions, **contribution_costs_by_party},
    }
    outcome = active_outcome.model_copy(update=combined_fields)
    guarantees = compute_guarantees(config, outcome)
    stored_guarantees = tuple(
        StoredGuarantee.model_validate(promise.as_json()) for promise in guarantees
    )
    return outcome.model_copy(update={"promises": stored_guarantees})


def _list_sent_flows(party: PartyFolder) -> list[Mapping[str, Any]]:
    """Return number and size of the messages that a party sent in all sessions, as JSON values.

    If the party did not finish its part, they are read from its audit log.
    """
    if not party.message_flows.exists():
        return [asdict(flow) for flow in load_logged_sessions(party.path / AUDIT_LOG_NAME).sent]
    return [
        flow
        for flow in load_json(party.message_flows, list[Any])
        if flow["sender"] == party.path.name
    ]


def _pick_highest_privacy_cost(active_cost: Privacy, other_costs: Sequence[Privacy]) -> Privacy:
    """Return the privacy cost of the run: the highest epsilon of representations of all parties.

    Epsilons of labels and model are the active's, since only the active has labels and a model.

    `active_cost`: the active's privacy cost. `other_costs`: the privacy costs of the other parties.
    """
    highest_other_cost = max(other_costs, key=lambda account: account.epsilon_x, default=None)
    if highest_other_cost is None or active_cost.epsilon_x > highest_other_cost.epsilon_x:
        return active_cost
    label_costs = {"epsilon_y": active_cost.epsilon_y, "epsilon_model": active_cost.epsilon_model}
    # The first line of the active's trace says that it sends no representations.
    trace = (*highest_other_cost.trace, *active_cost.trace[1:])
    return highest_other_cost.model_copy(update={**label_costs, "trace": trace})

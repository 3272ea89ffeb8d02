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
from secure_apfed.learning.own_code import CodeSettings, refuse_code, split_code
from secure_apfed.methods import METHODS, assign_roles
from secure_apfed.organisations.party import PartyFile, Peer, Tls
from secure_apfed.privacy.ledger import BudgetExhaustedError
from secure_apfed.runs.audit_log import FILE_NAME
from secure_apfed.runs.folder import PartyFolder, RunFolder
from secure_apfed.runs.keeper import PartyEnd, config_digest
from secure_apfed.runs.outcome import (
    Outcome,
    Privacy,
    Progress,
    Promised,
    RunResult,
    load_outcome,
    promises_in,
    write_outcome,
)
from secure_apfed.runs.past_sessions import load_logged_sessions
from secure_apfed.runs.run import Way
from secure_apfed.settings.data import TABLES

RELAY = "relay"  # its name in the certificate, and its folder's name
_PROGRAM = (sys.executable, "-m", "secure_apfed.cli")
_LOOPBACK = "127.0.0.1"
_PORTS = range(20_000, 32_000)
_BLOCKS = 40
_CA = Path("ca.pem")
_CERTIFICATE = Path("certificate.pem")
_KEY = Path("key.pem")
_GONE_S = 3.0  # a process on this machine that is unreachable for this long has ended
_START_S = 60.0
_PROGRESS = TypeAdapter(Progress)
_Hear: TypeAlias = Callable[[Mapping[str, Any]], None]
_LOOK_S = 0.05
_GRACE_S = 10.0
_MAX_LINE = 2**20
_MEET_S = 60.0  # at least: a process takes longer to start than to answer
_READING_S = 86_400.0
"""Seconds in which all parties must have read their own large tables; then they connect."""
_PARTY = "party.yaml"
_SHARED = "shared.yaml"
"""Settings without the names of code, where the run's own name some."""
_TABLE = "table.safetensors"
_LOG = "log.txt"
_OWN_FAULTS = (2, 3)  # exit codes for errors in the party's own settings and data
_FOLLOWS = ("RunStoppedError", "PartyLeftError", "Interrupted", "Terminated")  # another did it
_CONVERTED = frozenset({"method", "privacy", "contributions", "promises", "stated"})
"""Fields of a result that its file holds in another form."""
_RECORDED = tuple(
    each.name
    for each in fields(RunResult)
    if each.name in Outcome.model_fields and each.name not in _CONVERTED
)
"""Fields of a result that its file holds as they are."""
_ERRORS: tuple[type[Exception], ...] = (
    BudgetExhaustedError,
    CheckpointError,
    ConfigError,
    DataError,
    IntersectionTooSmallError,
    LocalProtocolError,
    ModelError,
    RemoteProtocolError,
)


def free_addresses(count: int) -> list[str]:
    """Return unused addresses on loopback.

    Their ports are below the ephemeral ports, so that no other connection takes one before its
    party listens. Processes that run in parallel prefer disjoint ports. Raises ConfigError: too few
    are free.

    `count`: how many.
    """
    addresses: list[str] = []
    mine = _PORTS[os.getpid() % _BLOCKS :: _BLOCKS]
    draw = secrets.SystemRandom()
    candidates = (port for ports in (mine, _PORTS) for port in draw.sample(ports, len(ports)))
    with contextlib.ExitStack() as stack:
        while len(addresses) < count:
            if (port := next(candidates, None)) is None:
                raise ConfigError(
                    f"of ports {_PORTS[0]} to {_PORTS[-1]} of {_LOOPBACK} {len(addresses)} are "
                    f"free and {count} needed; end who listens there"
                )
            with contextlib.suppress(OSError):  # the port is in use
                stack.enter_context(socket.create_server((_LOOPBACK, port)))
                addresses.append(f"{_LOOPBACK}:{port}")
    return addresses


def trial_ways(over: Way, folders: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """Return each party's link settings for its file; create the certificates.

    The authority's key is discarded afterwards, so that it cannot sign further certificates.

    `folders`: each party's.
    """
    if over == "tcp":
        return {name: {"link": over, "reconnect_s": _GONE_S} for name in folders}
    if over == "nvflare":
        return {name: {"link": over} for name in folders}
    from secure_apfed.exchange.certificates import make_authority

    authority = make_authority("secure-apfed trial")
    way: dict[str, Any] = {
        "link": "grpc",
        "tls": Tls(ca=_CA, certificate=_CERTIFICATE, key=_KEY),
    }
    certified = dict(folders)
    if over == "relay":
        parties = next(iter(folders.values())).parent
        certified[RELAY] = own_subfolder(parties.parent / RELAY)
        make_private(certified[RELAY])
        (way["relay"],) = free_addresses(1)
    for name, folder in certified.items():
        credentials = authority.issue_certificate(name)
        write_atomically(folder / _CA, credentials.ca)
        write_atomically(folder / _CERTIFICATE, credentials.certificate)
        write_atomically(folder / _KEY, credentials.key, private=True)
    return dict.fromkeys(folders, way)


def relay_command(files: Iterable[Path]) -> tuple[str, ...]:
    """Return the command that runs these parties' relay, as a list of words; empty
    if none has one.

    `files`: settings file of each party.
    """
    party = next(iter(files))
    address = PartyFile.from_file(party).relay
    if address is None:
        return ()
    folder = party.parent.parent.parent / RELAY
    words = ["relay", "--listen", address]
    for file in (_CA, _CERTIFICATE, _KEY):
        words += [f"--{file.stem}", str(folder / file)]
    return tuple(words)


@contextmanager
def run_relay(files: Iterable[Path]) -> Iterator[None]:
    """Run the relay that these parties' files name, if any, in its own process during the block."""
    words = relay_command(files)
    if not words:
        yield
        return
    address = words[words.index("--listen") + 1]
    command = [*_PROGRAM, *words, "--end-with-stdin", "--json"]
    with subprocess.Popen(  # noqa: S603 - this very program
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as process:
        deadline = time.monotonic() + _START_S
        try:
            while not _is_listening(address):
                if time.monotonic() > deadline or process.poll() is not None:
                    raise ConfigError(
                        f"the relay did not start at {address}; its messages are above"
                    )
                time.sleep(_LOOK_S)
            yield
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
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
    way: Way = "tcp",
    on_work: Callable[[str, Work], None] = lambda party, work: None,
    baselines: bool = False,
) -> RunResult:
    """Train, evaluate and write one run whose parties each have a process; see `secure_apfed.run`.

    `on_status` is called from a thread with each party's status, at most once a second;
    `on_progress` with the active's progress; `on_work` with a party's name and its long work. With
    `baselines` the active's process also measures the best local models.

    `resume`: continue from the checkpoints. `timeout_s`: seconds a party may be silent.
    """
    if folder is None:
        raise ConfigError("parties that run apart need a folder each; name a run folder")
    run = RunFolder(folder)
    with run.open_for_run(config, resume=resume):
        active_folder = PartyFolder(run.get_party_path(config.data.active_name))
        if resume:
            _refuse_another_run(config, run)
        if not (resume and active_folder.result.exists()):  # then what is left to do is to gather
            data = data or _load_unless_mapped(config)
            files = prepare_parties(
                config,
                folder,
                data=data,
                timeout_s=timeout_s,
                meet_s=_READING_S if data is None else _MEET_S,
                resume=resume,
                way=way,
            )
            options = [
                *(["--resume"] if resume else []),
                *([] if baselines else ["--no-baselines"]),
            ]

            def report_event(event: Mapping[str, Any]) -> None:
                """Pass an event that a party's process printed to the callbacks."""
                if isinstance(work := event.get("work"), dict):
                    on_work(*parse_work_event(work))
                if isinstance(status := event.get("status"), dict):
                    fields = {name: status[name] for name in Status.model_fields & status.keys()}
                    on_status(Status.model_validate(fields))
                if progress := event.get("progress"):
                    on_progress(_PROGRESS.validate_python(progress))

            with (
                run_relay(files.values()),
                _start_processes(files, options, report_event) as processes,
            ):
                _wait_for_processes(processes, active_folder, timeout_s, config)
            failed = _find_failure(processes)
            if failed and not active_folder.result.exists():
                raise failed
            if failed:
                warnings.warn(
                    f"nothing to do: the run is finished, but not at all parties:\n{failed}",
                    stacklevel=2,
                )
        return _gather_results(config, run, active_folder)


def _load_unless_mapped(config: Config) -> VerticalData | None:
    """Return all tables; None: one is too large for memory, so each party reads its own."""
    names = party_names(config.data) if config.data.dataset == TABLES else ()
    if any(is_mapped(config.data, name) for name in names):
        return None
    return load_data(config.data, seed=config.seed)


def _refuse_another_run(config: Config, run: RunFolder) -> None:
    """Refuse to resume a run of one process, or a run with another configuration."""
    if run.recordings.list_steps():
        raise CheckpointError(
            f"resume with --transport memory: {run.path} holds a run that one process played"
        )
    # Settings that may change when a run is resumed are left out of the digest.
    if run.config.exists() and config_digest(run.load_config()) != config_digest(config):
        raise CheckpointError(
            f"resume with its config.yaml: {run.path} belongs to a run with another configuration"
        )


def prepare_parties(
    config: Config,
    folder: Path,
    *,
    data: VerticalData | None = None,
    timeout_s: float = 60.0,
    meet_s: float = _MEET_S,
    resume: bool = False,
    way: Way = "tcp",
) -> dict[str, Path]:
    """Create each party's folder, key, rows and settings file; return the files by party.

    Each party reads its own table when it starts, unless the tables are given as `data`. Over
    "nvflare" the files are for a job (`nvflare_job.py` beside this file); over "grpc" and "relay"
    each party also gets a certificate from an authority of this trial.

    `timeout_s`: seconds a party may be silent. `meet_s`: seconds that parties wait for one another
    at first, `timeout_s` at least. `resume`: continue from the checkpoints.
    """
    if data is None and config.data.dataset != TABLES:
        data = load_data(config.data, seed=config.seed)
    if data is None:  # each party reads its own file when it starts
        active, *helping = party_names(config.data)
        passives = tuple(helping)
    else:
        data.compare_ids(make_id_rules(config.alignment).normalise_text)
        active = data.active.name
        passives = tuple(table.name for table in data.passives)
    names = tuple(assign_roles(METHODS[config.method.name], config, active, passives))
    run = RunFolder(folder)
    write_atomically(run.config, dump_settings(config).encode())
    shared, code = split_code(config, active, passives)
    path = run.config
    refuse_code(shared, source="the file that the run's processes share")
    if shared != config:  # no party may name another's code
        path = run.path / _SHARED
        write_atomically(path, dump_settings(shared).encode())
    peers = _prepare_peers(run, names, way)
    for name in names:
        table = run.get_party_path(name) / _TABLE
        party_data = None if data is None else data.select_party(name)
        if party_data is not None and not (resume and table.exists()):
            write_atomically(table, pack_own(party_data), private=True)
    ways = trial_ways(way, {name: run.get_party_path(name) for name in names})
    files = {}
    for name in names:
        settings = PartyFile(
            party=name,
            active=active,
            passives=passives,
            config=Path("..", "..", path.name),
            listen=peers[name].address,
            peers={peer: peers[peer] for peer in names if peer != name},
            table=Path(_TABLE)
            if data is not None and data.select_party(name) is not None
            else None,
            allow_reading_all=config.settings_of(name).allow_reading_all,
            code=code.get(name, CodeSettings()),
            code_folder=Path.cwd(),
            timeout_s=timeout_s,
            meet_s=max(meet_s, timeout_s),
            **ways[name],
        )
        files[name] = run.get_party_path(name) / _PARTY
        write_atomically(files[name], dump_settings(settings).encode())
    return files


def _prepare_peers(run: RunFolder, names: Sequence[str], way: Way) -> dict[str, Peer]:
    """Create the parties' folders and keys; return the address and identity of each.

    `names`: of the parties.
    """
    addresses: Sequence[str | None] = free_addresses(len(names))
    if way in ("relay", "nvflare"):
        addresses = [None] * len(names)
    peers = {}
    for name, address in zip(names, addresses, strict=True):
        make_private(own_subfolder(run.get_party_path(name)))
        identity = PartyFolder(run.get_party_path(name)).load_identity().public.hex()
        peers[name] = Peer(address=address, identity=identity)
    return peers


class _Process:
    """A party's process, which reports events on stdout; `reported_error`: the error that it
    reported.
    """

    def __init__(self, name: str, process: "subprocess.Popen[bytes]", on_event: _Hear) -> None:
        """Start a thread that reads the events of a party's process; `on_event` receives them."""
        self.name = name
        self.process = process
        self._on_event = on_event
        self.reported_error: Mapping[str, Any] = {}
        self._reader = threading.Thread(target=self._parse_events, daemon=True)
        self._reader.start()

    @property
    def code(self) -> int | None:
        return self.process.poll()

    def wait_for_end(self) -> None:
        """Wait until the process has ended and its output is read."""
        if self.process.stdin:
            self.process.stdin.close()
        self.process.wait()
        self._reader.join(_GRACE_S)

    def _parse_events(self) -> None:
        """Read JSON events from the process's output, and remember its last error."""
        assert self.process.stdout
        with self.process.stdout as lines:
            while line := lines.readline(_MAX_LINE):
                with contextlib.suppress(ValueError, RecursionError):
                    event = json.loads(line)
                    if not isinstance(event, dict):
                        continue
                    self.reported_error = event.get("error", self.reported_error)
                    self._on_event(event)


@contextmanager
def _start_processes(
    files: Mapping[str, Path], options: Sequence[str], on_event: _Hear
) -> Iterator[Sequence[_Process]]:
    """Start one process for each party; end all of them after the block.

    `files`: settings file of each party. `options`: further words of the command.
    """
    processes: list[_Process] = []
    share = {"OMP_NUM_THREADS": str(max(1, usable_cores() // len(files)))}
    try:
        for name, file in files.items():
            command = [*_PROGRAM, "party", "--config", str(file), "--json-events"]
            command += ["--end-with-stdin", "--no-report", *options]
            with os.fdopen(open_regular(file.parent / _LOG, create=True), "ab") as log:
                process = subprocess.Popen(  # noqa: S603 - this very program
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=share | os.environ,
                )
            processes.append(_Process(name, process, on_event))
        yield processes
    finally:
        _end_processes(processes)


def _end_processes(processes: Sequence[_Process]) -> None:
    """Terminate the processes that still run, kill them after a while, and read all output."""
    running = [process for process in processes if process.code is None]
    for process in running:
        process.process.terminate()
    deadline = time.monotonic() + _GRACE_S
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

    Parties whose part is over and which still measure what they sent are awaited without limit.

    `timeout_s`: seconds a party may be silent.
    """
    leading = next(process for process in processes if process.name == config.data.active_name)
    others = [process for process in processes if process is not leading]
    if not _wait_for_active(leading, others, active_folder, patience_s=8 * timeout_s + _GRACE_S):
        return
    # The others only have to receive the end, or to notice that the active is gone.
    deadline = time.monotonic() + (_GRACE_S if leading.code == 0 else 8 * timeout_s)
    end_files = [PartyFolder(active_folder.path.with_name(other.name)).ended for other in others]
    while any(
        other.code is None
        and (time.monotonic() < deadline or (bool(config.attacks) and end_file.exists()))
        for other, end_file in zip(others, end_files, strict=True)
    ):
        time.sleep(_LOOK_S)


def _wait_for_active(
    leading: _Process, others: Sequence[_Process], active_folder: RunFolder, *, patience_s: float
) -> bool:
    """Wait for the active's process to end; False: it waits in vain for parties that have ended.

    `patience_s`: how long it may wait for them, in seconds.
    """
    signed_at_start = _get_signing_time(active_folder)
    lost_since: float | None = None
    while leading.code is None:
        time.sleep(_LOOK_S)
        has_begun = _get_signing_time(active_folder) != signed_at_start
        if not has_begun and any(process.code in _OWN_FAULTS for process in (leading, *others)):
            return False
        # Without a contract the active needs every party. With a result it waits for no party, but
        # may still measure its local models.
        have_ended = [other.code is not None for other in others]
        is_lost = all(have_ended) if has_begun else any(have_ended)
        if not (others and is_lost) or active_folder.result.exists():
            lost_since = None
            continue
        lost_since = lost_since or time.monotonic()
        if time.monotonic() - lost_since > patience_s:
            return False
    return True


def _get_signing_time(folder: RunFolder) -> int:
    return folder.contract.stat().st_mtime_ns if folder.contract.exists() else 0


def _find_failure(processes: Sequence[_Process]) -> Exception | None:
    """Return the error that caused the others, with each party's message; None: all succeeded.

    `processes`: all parties'.
    """
    failed = [process for process in processes if process.code != 0]
    if not failed:
        return None
    originators = [
        process for process in failed if process.reported_error.get("kind") not in _FOLLOWS
    ]
    leading = next((process for process in originators if process.reported_error), None)
    # First the cause, then parties that failed without a report, then those that only followed.
    followers = [
        process
        for process in failed
        if process.reported_error.get("kind") == RunStoppedError.__name__
    ]
    causes = [process for process in failed if process not in followers] or followers
    causes.sort(key=lambda process: (process is not leading, bool(process.reported_error)))
    lines = [f"{process.name}: {_describe_failure(process)}" for process in causes]
    if causes is not followers and followers:
        lines.append(
            f"{' and '.join(process.name for process in followers)} heard of it, and stopped"
        )
    kinds = {kind.__name__: kind for kind in _ERRORS}
    kind = (
        kinds.get(leading.reported_error.get("kind", ""), PartyLeftError)
        if leading
        else PartyLeftError
    )
    return kind("\n".join(lines))


def _describe_failure(process: _Process) -> str:
    """Return a process's own error, or how the process ended."""
    if process.reported_error:
        return str(process.reported_error.get("message"))
    code = process.code or 0
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with code {code}; its {_LOG} says more"


def _gather_results(config: Config, run: RunFolder, active_folder: RunFolder) -> RunResult:
    """Copy the parties' results into the run's folder, combine their accounts, and return the
    result.
    """
    for name in (
        "contract",
        "seeds",
        "versions",
        "metrics",
        "model",
        "accountants",
        "scored",
        "solo",
        "solo_scored",
        "statements",
    ):
        source: Path = getattr(active_folder, name)
        if source.exists():
            shutil.copyfile(source, getattr(run, name))
    parties = [PartyFolder(path) for path in sorted(run.parties.iterdir()) if path.is_dir()]
    ended = [
        load_json(party.ended, PartyEnd)
        for party in parties
        if party.path != active_folder.path and party.ended.exists()
    ]
    # Each party's sent messages only: what it received, another party sent.
    flows = [flow for party in parties for flow in _list_sent_flows(party)]
    run.write_json(run.flows, flows)
    active_outcome = load_json(active_folder.result, Outcome, file_format=RUN_RESULT)
    # Each party's own account, if it ended; else the account that it reported to the active.
    contributions = {end.party: end.contributions for end in ended if end.contributions is not None}
    gathered = {
        "wire_bytes": sum(flow["wire_bytes"] for flow in flows),
        "privacy": _pick_worst_account(
            active_outcome.privacy, [end.privacy for end in ended if end.privacy]
        ),
        "contributions": {**active_outcome.contributions, **contributions},
    }
    outcome = active_outcome.model_copy(update=gathered)
    promises = promises_in(config, outcome)
    promised = tuple(Promised.model_validate(promise.as_json()) for promise in promises)
    outcome = outcome.model_copy(update={"promises": promised})
    card = load_json(active_folder.card, dict[str, Any], file_format=MODEL_CARD)
    privacy = outcome.privacy
    card["epsilon"] |= {"representations": privacy.epsilon_x, "releases": privacy.releases}
    card["promises"] = [promise.model_dump() for promise in promised]
    run.write_json(run.card, card)
    write_outcome(run, outcome)
    return RunResult(
        method=config.method.name,
        **{name: getattr(outcome, name) for name in _RECORDED},
        privacy=load_outcome(run).privacy.to_spent(),
        contributions={
            name: account.model_dump(mode="python")
            for name, account in outcome.contributions.items()
        },
        promises=promises,
        stated={
            name: statement.model_dump(mode="python") for name, statement in outcome.stated.items()
        },
        folder=run.path,
    )


def _list_sent_flows(party: PartyFolder) -> list[Mapping[str, Any]]:
    """Return what a party sent in all sessions, from its audit log if its part did not end."""
    if not party.flows.exists():
        return [asdict(flow) for flow in load_logged_sessions(party.path / FILE_NAME).sent]
    return [flow for flow in load_json(party.flows, list[Any]) if flow["sender"] == party.path.name]


def _pick_worst_account(active: Privacy, others: Sequence[Privacy]) -> Privacy:
    """Return the account with the highest cost of representations, with the active's cost of
    labels.

    `others`: the other parties' accounts.
    """
    released = max(others, key=lambda account: account.epsilon_x, default=None)
    if released is None or active.epsilon_x > released.epsilon_x:
        return active
    of_labels = {"epsilon_y": active.epsilon_y, "epsilon_model": active.epsilon_model}
    trace = (*released.trace, *active.trace[1:])  # its first line: nothing is sent
    return released.model_copy(update={**of_labels, "trace": trace})

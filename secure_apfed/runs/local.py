"""One run with each party in a process of its own on this machine, over loopback.

Run by: the experimenter, who prepares a folder for each party (its key, its rows, its file of
settings), starts one process a party, which opens no folder but its own, and gathers the results
that the parties wrote. Nobody holds what all of them sent, so each attacks what it let out. All
processes are of one user: this tries out how parties run apart, and protects none from another.
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
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import TypeAdapter

from apfed_protocols.errors import (
    LocalProtocolError,
    PartyLeftError,
    RemoteProtocolError,
    RunStoppedError,
)
from apfed_protocols.psi.interface import IntersectionTooSmallError
from secure_apfed.alignment.ids import id_rules
from secure_apfed.audit_log import FILE_NAME
from secure_apfed.config import Config
from secure_apfed.config.file import dump_settings
from secure_apfed.data import VerticalData, load_data, pack_own
from secure_apfed.data.catalogue import party_names
from secure_apfed.errors import CheckpointError, ConfigError, DataError, ModelError
from secure_apfed.exchange import Status
from secure_apfed.exchange.sockets import parse_address
from secure_apfed.files import (
    load_json,
    make_private,
    open_regular,
    own_subfolder,
    write_atomically,
)
from secure_apfed.formats import MODEL_CARD, RUN_RESULT
from secure_apfed.methods import METHODS, assign_roles
from secure_apfed.methods.terms import settings_of
from secure_apfed.own_code import CodeSettings, split_code
from secure_apfed.past_sessions import load_logged_sessions
from secure_apfed.privacy.ledger import BudgetExhaustedError
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
from secure_apfed.runs.party import PartyFile, Peer, Tls
from secure_apfed.seeds import usable_cores
from secure_apfed.settings.data import TABLES
from secure_apfed.working import Work, parse_work_event

Way: TypeAlias = Literal["tcp", "grpc", "relay", "nvflare"]
"""How the parties of a trial reach each other."""
RELAY = "relay"  # the name in its certificate, and of its folder beside the parties'
_PROGRAM = (sys.executable, "-m", "secure_apfed.cli")
_LOOPBACK = "127.0.0.1"
_PORTS = range(20_000, 32_000)
_BLOCKS = 40
_CA = Path("ca.pem")
_CERTIFICATE = Path("certificate.pem")
_KEY = Path("key.pem")
_GONE_S = 3.0  # a process of this machine that cannot be reached for so long has ended
_START_S = 60.0
WAYS: Mapping[str, Way] = {"local": "tcp", "grpc": "grpc", "relay": "relay"}
"""By transport, how parties in processes of their own reach each other."""
_PROGRESS = TypeAdapter(Progress)
_Hear: TypeAlias = Callable[[Mapping[str, Any]], None]
_LOOK_S = 0.05
_GRACE_S = 10.0
_MOST_LINE = 2**20
_MEET_S = 60.0  # at least: a process takes longer to start than to answer
_PARTY = "party.yaml"
_SHARED = "shared.yaml"
"""Settings without the names of code, where the run's own name some."""
_TABLE = "table.safetensors"
_LOG = "log.txt"
_OWN_FAULTS = (2, 3)  # exit codes of settings and data, which nobody else can mend
_FOLLOWS = ("RunStoppedError", "PartyLeftError", "Interrupted", "Terminated")  # another did it
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
    """Return addresses of loopback where nobody listens now.

    Their ports lie below those from which systems take the near end of a connection: one of these
    could be taken before its party listens there. Processes side by side choose among their own
    while these last. Raises ConfigError: too few are free.
    """
    found: list[str] = []
    mine = _PORTS[os.getpid() % _BLOCKS :: _BLOCKS]
    draw = secrets.SystemRandom()
    drawn = (port for ports in (mine, _PORTS) for port in draw.sample(ports, len(ports)))
    with contextlib.ExitStack() as stack:
        while len(found) < count:
            if (port := next(drawn, None)) is None:
                raise ConfigError(
                    f"of ports {_PORTS[0]} to {_PORTS[-1]} of {_LOOPBACK} {len(found)} are free "
                    f"and {count} needed; end who listens there"
                )
            with contextlib.suppress(OSError):  # somebody listens there
                stack.enter_context(socket.create_server((_LOOPBACK, port)))
                found.append(f"{_LOOPBACK}:{port}")
    return found


def trial_ways(over: Way, folders: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """Return each party's link settings for its file; make the certificates.

    The authority's key is used and thrown away, so that nobody else gets a certificate of it.
    """
    if over == "tcp":
        return {name: {"link": over, "reconnect_s": _GONE_S} for name in folders}
    if over == "nvflare":
        return {name: {"link": over} for name in folders}
    from secure_apfed.between.certificates import make_authority

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
        made = authority.issue_certificate(name)
        write_atomically(folder / _CA, made.ca)
        write_atomically(folder / _CERTIFICATE, made.certificate)
        write_atomically(folder / _KEY, made.key, private=True)
    return dict.fromkeys(folders, way)


def relay_command(files: Iterable[Path]) -> tuple[str, ...]:
    """Return the words of the command that runs the relay which these parties' files name.

    Empty where they name none.
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
    """Run the relay that these parties' files name, if they do, in a process of its own."""
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
    over: Way = "tcp",
    on_work: Callable[[str, Work], None] = lambda party, work: None,
    baselines: bool = False,
) -> RunResult:
    """Train, evaluate and write one run, whose parties' folders lie in its own; see
    `secure_apfed.run`.

    Of each party `on_status` hears in a thread, once a second at most, and so do `on_progress` of
    the active, and `on_work` of a party's name and of what long work it is at. With `baselines` the
    active's process measures, too, what it would do alone.
    """
    if folder is None:
        raise ConfigError("parties that run apart need a folder each; name a run folder")
    run = RunFolder(folder)
    with run.open_for_run(config, resume=resume):
        led = PartyFolder(run.get_party_path(config.data.active_name))
        if resume:
            _refuse_another_run(config, run)
        if not (resume and led.result.exists()):  # then what is left to do is to gather
            files = prepare_parties(
                config,
                folder,
                data=data or load_data(config.data, seed=config.seed),
                timeout_s=timeout_s,
                resume=resume,
                over=over,
            )
            asked = [*(["--resume"] if resume else []), *([] if baselines else ["--no-baselines"])]

            def report_event(event: Mapping[str, Any]) -> None:
                if isinstance(work := event.get("work"), dict):
                    on_work(*parse_work_event(work))
                if isinstance(status := event.get("status"), dict):
                    known = {name: status[name] for name in Status.model_fields & status.keys()}
                    on_status(Status.model_validate(known))
                if progress := event.get("progress"):
                    on_progress(_PROGRESS.validate_python(progress))

            with (
                run_relay(files.values()),
                _start_processes(files, asked, report_event) as processes,
            ):
                _wait_for_processes(processes, led, timeout_s, config)
            failed = _find_failure(processes)
            if failed and not led.result.exists():
                raise failed
            if failed:
                warnings.warn(
                    f"nothing to do: the run is finished, but not at all parties:\n{failed}",
                    stacklevel=2,
                )
        return _gather_results(config, run, led)


def _refuse_another_run(config: Config, run: RunFolder) -> None:
    """Go on only with what lies there, and as it was begun."""
    if run.recordings.list_steps():
        raise CheckpointError(
            f"resume with --transport memory: {run.path} holds a run that one process played"
        )
    # What may be other when a run is resumed is left out of the digest.
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
    resume: bool = False,
    over: Way = "tcp",
) -> dict[str, Path]:
    """Make each party's folder, key, rows and file of settings; return the files by party. Own
    tables are read by each party for itself when it begins, unless they are given as `data`.

    Over "nvflare" they are for a job (`contrib/nvflare_job.py`); over "grpc" and "relay" each gets
    a certificate of an authority of this trial, too.
    """
    if data is None and config.data.dataset != TABLES:
        data = load_data(config.data, seed=config.seed)
    if data is None:  # each party reads its own file when it begins
        active, *helping = party_names(config.data)
        passives = tuple(helping)
    else:
        data.compare_ids(id_rules(config.alignment).normalise_text)
        active = data.active.name
        passives = tuple(table.name for table in data.passives)
    names = tuple(assign_roles(METHODS[config.method.name], config, active, passives))
    run = RunFolder(folder)
    write_atomically(run.config, dump_settings(config).encode())
    shared, code = split_code(config, active, passives)
    path = run.config
    if shared != config:  # no party may name another's code
        path = run.path / _SHARED
        write_atomically(path, dump_settings(shared).encode())
    peers = _prepare_peers(run, names, over)
    for name in names:
        table = run.get_party_path(name) / _TABLE
        held = None if data is None else data.select_party(name)
        if held is not None and not (resume and table.exists()):
            write_atomically(table, pack_own(held), private=True)
    ways = trial_ways(over, {name: run.get_party_path(name) for name in names})
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
            allow_reading_all=settings_of(config, name).allow_reading_all,
            code=code.get(name, CodeSettings()),
            code_folder=Path.cwd(),
            timeout_s=timeout_s,
            meet_s=max(_MEET_S, timeout_s),
            **ways[name],
        )
        files[name] = run.get_party_path(name) / _PARTY
        write_atomically(files[name], dump_settings(settings).encode())
    return files


def _prepare_peers(run: RunFolder, names: Sequence[str], over: Way) -> dict[str, Peer]:
    """Make the parties' folders and keys; return how each is reached and known."""
    addresses: Sequence[str | None] = free_addresses(len(names))
    if over in ("relay", "nvflare"):
        addresses = [None] * len(names)
    peers = {}
    for name, address in zip(names, addresses, strict=True):
        make_private(own_subfolder(run.get_party_path(name)))
        identity = PartyFolder(run.get_party_path(name)).load_identity().public.hex()
        peers[name] = Peer(address=address, identity=identity)
    return peers


class _Process:
    """One party's process, which says on stdout where it stands, and how it failed (`said`)."""

    def __init__(self, name: str, process: "subprocess.Popen[bytes]", hear: _Hear) -> None:
        self.name = name
        self.process = process
        self._hear = hear
        self.said: Mapping[str, Any] = {}
        self._reader = threading.Thread(target=self._parse_events, daemon=True)
        self._reader.start()

    @property
    def code(self) -> int | None:
        return self.process.poll()

    def wait_for_end(self) -> None:
        """Return once it has ended and all that it said is read."""
        if self.process.stdin:
            self.process.stdin.close()
        self.process.wait()
        self._reader.join(_GRACE_S)

    def _parse_events(self) -> None:
        assert self.process.stdout
        with self.process.stdout as lines:
            while line := lines.readline(_MOST_LINE):
                with contextlib.suppress(ValueError, RecursionError):
                    event = json.loads(line)
                    if not isinstance(event, dict):
                        continue
                    self.said = event.get("error", self.said)
                    self._hear(event)


@contextmanager
def _start_processes(
    files: Mapping[str, Path], asked: Sequence[str], hear: _Hear
) -> Iterator[Sequence[_Process]]:
    """Start one process for each party; none outlives the block."""
    processes: list[_Process] = []
    share = {"OMP_NUM_THREADS": str(max(1, usable_cores() // len(files)))}
    try:
        for name, file in files.items():
            command = [*_PROGRAM, "party", "--config", str(file), "--json-events"]
            command += ["--end-with-stdin", *asked]
            with os.fdopen(open_regular(file.parent / _LOG, create=True), "ab") as log:
                started = subprocess.Popen(  # noqa: S603 - this very program
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=share | os.environ,
                )
            processes.append(_Process(name, started, hear))
        yield processes
    finally:
        _end_processes(processes)


def _end_processes(processes: Sequence[_Process]) -> None:
    """Ask those that still run to end, then end them; read what all said."""
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
    processes: Sequence[_Process], led: RunFolder, timeout_s: float, config: Config
) -> None:
    """Wait until the active has ended, and the others soon after it; for none of them for ever,
    unless they attack what they let out, once their part is over.
    """
    before = _get_signing_time(led)
    leading = next(process for process in processes if process.name == config.data.active_name)
    others = [process for process in processes if process is not leading]
    alone_since: float | None = None
    while leading.code is None:
        time.sleep(_LOOK_S)
        if (
            any(process.code in _OWN_FAULTS for process in processes)
            and _get_signing_time(led) == before
        ):
            return  # it never began, and the others would wait for it
        # Once it has a result it waits for nobody: it may measure what it would do alone.
        if others and all(other.code is not None for other in others) and not led.result.exists():
            alone_since = alone_since or time.monotonic()
            if time.monotonic() - alone_since > 8 * timeout_s + _GRACE_S:
                return  # whatever it waits for, nobody is there any more
    # The others need no more than to hear of the end, or to notice that it came without a word.
    deadline = time.monotonic() + (_GRACE_S if leading.code == 0 else 8 * timeout_s)
    ended = [PartyFolder(led.path.with_name(other.name)).ended for other in others]
    while any(
        other.code is None
        and (time.monotonic() < deadline or (bool(config.attacks) and over.exists()))
        for other, over in zip(others, ended, strict=True)
    ):
        time.sleep(_LOOK_S)


def _get_signing_time(folder: RunFolder) -> int:
    return folder.contract.stat().st_mtime_ns if folder.contract.exists() else 0


def _find_failure(processes: Sequence[_Process]) -> Exception | None:
    """Return the error that caused the others, with each party's message; None: all went well."""
    failed = [process for process in processes if process.code != 0]
    if not failed:
        return None
    own = [process for process in failed if process.said.get("kind") not in _FOLLOWS]
    leading = next((process for process in own if process.said), None)
    # First the cause, then who missed it, then who only heard of it.
    heard = [process for process in failed if process.said.get("kind") == RunStoppedError.__name__]
    causes = [process for process in failed if process not in heard] or heard
    causes.sort(key=lambda process: (process is not leading, bool(process.said)))
    lines = [f"{process.name}: {_describe_failure(process)}" for process in causes]
    if causes is not heard and heard:
        lines.append(f"{' and '.join(process.name for process in heard)} heard of it, and stopped")
    kinds = {kind.__name__: kind for kind in _ERRORS}
    kind = kinds.get(leading.said.get("kind", ""), PartyLeftError) if leading else PartyLeftError
    return kind("\n".join(lines))


def _describe_failure(process: _Process) -> str:
    if process.said:
        return str(process.said.get("message"))
    code = process.code or 0
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with code {code}; its {_LOG} says more"


def _gather_results(config: Config, run: RunFolder, led: RunFolder) -> RunResult:
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
        source: Path = getattr(led, name)
        if source.exists():
            shutil.copyfile(source, getattr(run, name))
    parties = [PartyFolder(path) for path in sorted(run.parties.iterdir()) if path.is_dir()]
    ended = [
        load_json(party.ended, PartyEnd)
        for party in parties
        if party.path != led.path and party.ended.exists()
    ]
    # What each sent itself: what it received, another one sent.
    flows = [flow for party in parties for flow in _list_sent_flows(party)]
    run.write_json(run.flows, flows)
    alone = load_json(led.result, Outcome, of=RUN_RESULT)
    # What each counted itself, where it ended; else what the active was told.
    counted = {end.party: end.contributions for end in ended if end.contributions is not None}
    gathered = {
        "wire_bytes": sum(flow["wire_bytes"] for flow in flows),
        "privacy": _pick_worst_account(
            alone.privacy, [end.privacy for end in ended if end.privacy]
        ),
        "contributions": {**alone.contributions, **counted},
    }
    outcome = alone.model_copy(update=gathered)
    promises = promises_in(config, outcome)
    promised = tuple(Promised.model_validate(promise.as_json()) for promise in promises)
    outcome = outcome.model_copy(update={"promises": promised})
    card = load_json(led.card, dict[str, Any], of=MODEL_CARD)
    privacy = outcome.privacy
    card["epsilon"] |= {"representations": privacy.epsilon_x, "releases": privacy.releases}
    card["promises"] = [promise.model_dump() for promise in promised]
    run.write_json(run.card, card)
    write_outcome(run, outcome)
    judged = (
        "accuracy",
        "measure",
        "measures",
        "threshold",
        "calibration",
        "ranking",
        "undefined",
        "never_predicted",
        "wire_bytes",
        "sessions",
        "steps",
        "help",
    )
    return RunResult(
        method=config.method.name,
        **{name: getattr(outcome, name) for name in judged},
        privacy=load_outcome(run).privacy.to_spent(),
        contributions={
            name: spent.model_dump(mode="python") for name, spent in outcome.contributions.items()
        },
        promises=promises,
        stated={name: said.model_dump(mode="python") for name, said in outcome.stated.items()},
        folder=run.path,
    )


def _list_sent_flows(party: PartyFolder) -> list[Mapping[str, Any]]:
    """Return what a party sent in all sessions; by its audit log where it did not end."""
    if not party.flows.exists():
        return [asdict(flow) for flow in load_logged_sessions(party.path / FILE_NAME).sent]
    return [flow for flow in load_json(party.flows, list[Any]) if flow["sender"] == party.path.name]


def _pick_worst_account(active: Privacy, others: Sequence[Privacy]) -> Privacy:
    """Return the account of the party that spent most on representations, with the active's of
    labels.
    """
    released = max(others, key=lambda account: account.epsilon_x, default=None)
    if released is None or active.epsilon_x > released.epsilon_x:
        return active
    of_labels = {"epsilon_y": active.epsilon_y, "epsilon_model": active.epsilon_model}
    trace = (*released.trace, *active.trace[1:])  # its first line says: nothing sent
    return released.model_copy(update={**of_labels, "trace": trace})

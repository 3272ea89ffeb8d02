"""One run with each party in a process of its own on this machine, over loopback.

Run by: the experimenter, who prepares a folder for each party (its key, its rows, its file of
settings), starts one process a party, which opens no folder but its own, and gathers the results
that the parties wrote. Nobody holds what all of them sent, so attacks cannot be mounted on it. All
processes are of one user: this tries out how parties run apart, and protects none from another.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from apfed_protocols.errors import (
    LocalProtocolError,
    PartyLeftError,
    RemoteProtocolError,
    RunStoppedError,
)
from apfed_protocols.psi.interface import IntersectionTooSmallError
from secure_apfed.alignment.ids import id_rules
from secure_apfed.config import Config
from secure_apfed.config.file import dump_settings
from secure_apfed.data import VerticalData, load_data, pack_own
from secure_apfed.errors import CheckpointError, ConfigError, DataError, ModelError
from secure_apfed.exchange import Status
from secure_apfed.files import make_private, open_regular, own_subfolder, read_json
from secure_apfed.methods import METHODS, roles_of
from secure_apfed.privacy import BudgetExhaustedError
from secure_apfed.runs.checkpoint import Steps, config_digest
from secure_apfed.runs.folder import RunFolder, write_atomically
from secure_apfed.runs.outcome import Progress, RunResult
from secure_apfed.runs.party import PartyFile, Peer
from secure_apfed.runs.party_folder import PartyFolder
from secure_apfed.runs.record import Outcome, Privacy, read_outcome, write_outcome
from secure_apfed.runs.spending import shown_figure
from secure_apfed.runs.trial_links import Way, free_addresses, relaying, trial_ways
from secure_apfed.runs.writing import RunWriter

__all__ = ["WAYS", "prepare_parties", "run_locally"]

WAYS: Mapping[str, Way] = {"local": "tcp", "grpc": "grpc", "relay": "relay"}
"""By transport, how parties in processes of their own reach each other."""

_LOOK_S = 0.05
_GRACE_S = 10.0
_MOST_LINE = 2**20
_MEET_S = 60.0  # at least: a process takes longer to start than to answer
_PARTY, _TABLE, _LOG = "party.yaml", "table.safetensors", "log.txt"
_NO_BASELINES = "--no-baselines"
_OWN_FAULTS = (2, 3)  # exit codes of settings and data, which nobody else can mend
_ERRORS: tuple[type[Exception], ...] = (
    BudgetExhaustedError, CheckpointError, ConfigError, DataError, IntersectionTooSmallError,
    LocalProtocolError, ModelError, RemoteProtocolError,
)  # fmt: skip


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
    baselines: bool = False,
) -> RunResult:
    """Train, evaluate and write one run; see `secure_apfed.run`.

    Args:
        config: of the run.
        folder: of the run; the parties' lie in it.
        data: of the run, where it is loaded already.
        resume: go on from the parties' checkpoints.
        on_progress: called after every epoch.
        timeout_s: one unit of patience with a party that is silent (`PartyFile.timeout_s`).
        on_status: called with where a party stands, in threads, once a second for each at most.
        over: how the parties reach each other; see `prepare_parties`.
        baselines: the active's process measures, too, what it would do alone.
    """
    if folder is None:
        raise ConfigError("parties that run apart need a folder each; name a run folder")
    with RunWriter.open(folder, config, resume=resume) as writer:
        assert writer
        led = RunFolder(writer.folder.party(config.data.active_name))
        if resume:
            _refuse_another_run(config, writer.folder)
        if not (resume and led.result.exists()):  # then what is left to do is to gather
            files = prepare_parties(
                config, writer.folder.path, data=data, timeout_s=timeout_s, resume=resume, over=over
            )
            with relaying(files.values()):
                asked = [*(["--resume"] if resume else []), *([] if baselines else [_NO_BASELINES])]
                _play(config, led, files, asked, on_progress, on_status, timeout_s)
        return _gather(config, writer.folder, led)


def _play(
    config: Config,
    led: RunFolder,
    files: Mapping[str, Path],
    asked: Sequence[str],
    on_progress: Callable[[Progress], None],
    on_status: Callable[[Status], None],
    timeout_s: float,
) -> None:
    """Start the parties and wait for them; where the active has a result, the others may fail."""
    shown = _Shown(led, config, on_progress)
    with _started(files, asked, on_status=on_status) as processes:
        _wait(processes, config.data.active_name, led, shown, timeout_s)
    failed = _failures(processes)
    if failed is None:
        return
    if not led.result.exists():
        raise failed
    warnings.warn(f"the run is finished, but not at all parties:\n{failed}", stacklevel=3)


def _refuse_another_run(config: Config, run: RunFolder) -> None:
    """Go on only with what lies there, and as it was begun.

    Raises:
        CheckpointError: other settings, or a run that one process played.
    """
    if Steps(run.path, "recording").found():
        raise CheckpointError(
            f"{run.path} holds a run that one process played; resume with --transport memory"
        )
    # What may be other when a run is resumed is left out of the digest.
    if run.config.exists() and config_digest(run.load_config()) != config_digest(config):
        raise CheckpointError(
            f"{run.path} belongs to a run with another configuration; resume with its config.yaml"
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
    """Make each party's folder, key, rows and file of settings; return the files by party.

    Over "nvflare" they are for a job (`nvflare_job.py`); over "grpc" and "relay" each gets a
    certificate of an authority of this trial, too.

    Raises:
        ConfigError, DataError: what does not fit, or cannot be loaded.
        CheckpointError: a folder that cannot be a party's.
    """
    data = data or load_data(config.data, seed=config.seed)
    data.compare_ids(id_rules(config.alignment).text)
    active, passives = data.active.name, tuple(table.name for table in data.passives)
    names = tuple(roles_of(METHODS[config.method.name], config, active, passives))
    run = RunFolder(folder)
    write_atomically(run.config, dump_settings(config).encode())
    peers = _known(run, names, over)
    for name in names:
        table = run.party(name) / _TABLE
        if (held := data.own(name)) is not None and not (resume and table.exists()):
            write_atomically(table, pack_own(held), private=True)
    ways = trial_ways(over, {name: run.party(name) for name in names})
    files = {}
    for name in names:
        told = PartyFile(
            party=name,
            active=active,
            passives=passives,
            config=Path("..", "..", run.config.name),
            listen=peers[name].address,
            peers={peer: peers[peer] for peer in names if peer != name},
            table=Path(_TABLE) if data.own(name) is not None else None,
            timeout_s=timeout_s,
            meet_s=max(_MEET_S, timeout_s),
            **ways[name],
        )
        files[name] = run.party(name) / _PARTY
        write_atomically(files[name], dump_settings(told).encode())
    return files


def _known(run: RunFolder, names: Sequence[str], over: Way) -> dict[str, Peer]:
    """Make the parties' folders and keys; return how each is reached and known."""
    addresses: Sequence[str | None] = free_addresses(len(names))
    if over in ("relay", "nvflare"):
        addresses = [None] * len(names)
    peers = {}
    for name, address in zip(names, addresses, strict=True):
        make_private(own_subfolder(run.party(name)))
        identity = PartyFolder(run.party(name)).identity().public.hex()
        peers[name] = Peer(address=address, identity=identity)
    return peers


@dataclass(eq=False)
class _Process:
    """One party's process.

    Attributes:
        on_status: told where it stands, as often as it says so on stdout.
        said: how it failed, where it did and said so there.
    """

    name: str
    process: "subprocess.Popen[bytes]"
    on_status: Callable[[Status], None]
    said: Mapping[str, Any] = field(default_factory=dict)
    _reader: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()

    @property
    def code(self) -> int | None:
        """How it ended; None while it runs."""
        return self.process.poll()

    def read(self) -> None:
        """Return once it has ended and all that it said is read."""
        if self.process.stdin:
            self.process.stdin.close()
        self.process.wait()
        self._reader.join(_GRACE_S)

    def _listen(self) -> None:
        """Read what it says, to the end."""
        assert self.process.stdout
        with self.process.stdout as lines:
            while line := lines.readline(_MOST_LINE):
                with contextlib.suppress(ValueError, RecursionError):
                    told = json.loads(line)
                    if isinstance(told, dict):
                        self._hear(told)

    def _hear(self, told: Mapping[str, Any]) -> None:
        if "error" in told:
            self.said = told["error"]
        elif isinstance(status := told.get("status"), dict):
            shown = {name: status[name] for name in Status.model_fields if name in status}
            self.on_status(Status.model_validate(shown))


@contextmanager
def _started(
    files: Mapping[str, Path], asked: Sequence[str], *, on_status: Callable[[Status], None]
) -> Iterator[Sequence[_Process]]:
    """One process a party; none outlives the block."""
    processes: list[_Process] = []
    try:
        for name, file in files.items():
            command = [sys.executable, "-m", "secure_apfed.cli", "party", "--config", str(file)]
            command += ["--json-events", "--end-with-stdin", *asked]
            with os.fdopen(open_regular(file.parent / _LOG, create=True), "ab") as log:
                started = subprocess.Popen(  # noqa: S603 - this very program
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
                )
            processes.append(_Process(name, started, on_status))
        yield processes
    finally:
        _end(processes)


def _end(processes: Sequence[_Process]) -> None:
    """Ask those that still run to end, then end them; read what all said."""
    running = [one for one in processes if one.code is None]
    for one in running:
        one.process.terminate()
    deadline = time.monotonic() + _GRACE_S
    for one in running:
        try:
            one.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            one.process.kill()
    for one in processes:
        one.read()


def _wait(
    processes: Sequence[_Process], active: str, led: RunFolder, shown: "_Shown", timeout_s: float
) -> None:
    """Wait until the active has ended, and the others soon after it; for none of them for ever."""
    before = _signed_at(led)
    leading = next(one for one in processes if one.name == active)
    others = [one for one in processes if one is not leading]
    alone_since: float | None = None
    while leading.code is None:
        time.sleep(_LOOK_S)
        shown.look()
        if any(one.code in _OWN_FAULTS for one in processes) and _signed_at(led) == before:
            return  # it never began, and the others would wait for it
        # Once it has a result it waits for nobody: it may measure what it would do alone.
        if others and all(one.code is not None for one in others) and not led.result.exists():
            alone_since = alone_since or time.monotonic()
            if time.monotonic() - alone_since > 8 * timeout_s + _GRACE_S:
                return  # whatever it waits for, nobody is there any more
    shown.look()
    # The others need no more than to hear of the end, or to notice that it came without a word.
    deadline = time.monotonic() + (_GRACE_S if leading.code == 0 else 8 * timeout_s)
    while any(one.code is None for one in others) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)


def _signed_at(folder: RunFolder) -> int:
    """When a contract was signed last; 0: never."""
    return folder.contract.stat().st_mtime_ns if folder.contract.exists() else 0


class _Shown:
    """The epochs that the active has written, told as they come."""

    def __init__(
        self, led: RunFolder, config: Config, on_progress: Callable[[Progress], None]
    ) -> None:
        self._path, self._on_progress = led.metrics, on_progress
        self._config, self._epochs, self._measure = config, config.train.epochs, config.measure
        self._read = 0

    def look(self) -> None:
        """Tell of the lines that are whole since the last look."""
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        for text in whole.splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # only a display
                self._tell(json.loads(text))

    def _tell(self, line: Mapping[str, Any]) -> None:
        epsilons = (line["epsilon"], line["epsilon_passives"])
        figure, epsilon = shown_figure(
            self._config, *(None if one is None else float(one) for one in epsilons)
        )
        self._on_progress(
            Progress(
                epoch=line["epoch"],
                epochs=self._epochs,
                step=line["step"],
                steps=line["step"] * self._epochs // line["epoch"],
                loss=line["loss"],
                accuracy=next(iter((line["accuracy"] or {}).values()), None),
                measure=self._measure,
                score=next(
                    (own.get(self._measure) for own in (line["measures"] or {}).values()), None
                ),
                figure=figure,
                epsilon=epsilon,
                wire_bytes=line["wire_bytes"],
            )
        )


def _failures(processes: Sequence[_Process]) -> Exception | None:
    """The error from which the others follow, with what each party said; None: all went well."""
    failed = [one for one in processes if one.code != 0]
    if not failed:
        return None
    leading = next((one for one in failed if one.said and not _follows(one)), None)
    # First the cause, then who missed it, then who only heard of it.
    heard = [one for one in failed if one.said.get("kind") == RunStoppedError.__name__]
    told = [one for one in failed if one not in heard] or heard
    told.sort(key=lambda one: (one is not leading, bool(one.said)))
    lines = [f"{one.name}: {_why(one)}" for one in told]
    if told is not heard and heard:
        lines.append(f"{' and '.join(one.name for one in heard)} heard of it, and stopped")
    kinds = {kind.__name__: kind for kind in _ERRORS}
    kind = kinds.get(leading.said.get("kind", ""), PartyLeftError) if leading else PartyLeftError
    return kind("\n".join(lines))


def _follows(one: _Process) -> bool:
    """Whether it stopped for what another did."""
    return one.said.get("kind") in (
        "RunStoppedError",
        "PartyLeftError",
        "Interrupted",
        "Terminated",
    )


def _why(one: _Process) -> str:
    if one.said:
        return str(one.said.get("message"))
    code = one.code or 0
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with code {code}; its {_LOG} says more"


def _gather(config: Config, run: RunFolder, led: RunFolder) -> RunResult:
    """Put the parties' results together as one run's."""
    for name in (
        "contract", "seeds", "versions", "metrics", "model", "accountants", "scored", "solo",
    ):  # fmt: skip
        source: Path = getattr(led, name)
        if source.exists():
            shutil.copyfile(source, getattr(run, name))
    parties = [path for path in sorted(run.parties.iterdir()) if path.is_dir()]
    folders = [PartyFolder(path) for path in parties if path != led.path]
    ended = [one.read_end() for one in folders if one.ended.exists()]
    flows: list[Any] = []
    for path in parties:
        if RunFolder(path).flows.exists():
            flows += read_json(RunFolder(path).flows, list[Any])
    run.write_json(run.flows, flows)
    alone = read_json(led.result, Outcome)
    # What each counted itself, where it ended; else what the active was told.
    counted = {one.party: one.contributions for one in ended if one.contributions is not None}
    outcome = alone.model_copy(
        update={
            "wire_bytes": sum(flow["wire_bytes"] for flow in flows),
            "privacy": _worst(alone.privacy, [one.privacy for one in ended if one.privacy]),
            "contributions": {**alone.contributions, **counted},
        }
    )
    card, privacy = read_json(led.card, dict[str, Any]), outcome.privacy
    card["epsilon"] |= {"representations": privacy.epsilon_x, "releases": privacy.releases}
    run.write_json(run.card, card)
    write_outcome(run, outcome)
    return RunResult(
        method=config.method.name,
        accuracy=outcome.accuracy,
        measure=outcome.measure,
        measures=outcome.measures,
        threshold=outcome.threshold,
        undefined=outcome.undefined,
        wire_bytes=outcome.wire_bytes,
        privacy=read_outcome(run).privacy.spent(),
        contributions={
            name: one.model_dump(mode="python") for name, one in outcome.contributions.items()
        },
        folder=run.path,
    )


def _worst(active: Privacy, others: Sequence[Privacy]) -> Privacy:
    """The account of the party that spent most on representations, with the active's of labels."""
    released = max(others, key=lambda one: one.epsilon_x, default=None)
    if released is None or active.epsilon_x > released.epsilon_x:
        return active
    of_labels = {"epsilon_y": active.epsilon_y, "epsilon_model": active.epsilon_model}
    trace = (*released.trace, *active.trace[1:])  # its first line says: nothing sent
    return released.model_copy(update={**of_labels, "trace": trace})

"""One run with each party in a process of its own on this machine, over loopback.

Run by: the experimenter, who prepares a folder for each party (its key, its rows, its file of
settings), starts one process a party, which opens no folder but its own, and gathers the results
that the parties wrote. Nobody holds what all of them sent, so attacks cannot be mounted on it. All
processes are of one user: this tries out how parties run apart, and protects none from another.
"""

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from protocols.errors import LocalProtocolError, PartyLeftError, RemoteProtocolError
from protocols.psi.interface import IntersectionTooSmallError
from secure_apfed.config import Config
from secure_apfed.config.file import dump_config, dump_settings
from secure_apfed.data import VerticalData, load_data, pack_own
from secure_apfed.errors import CheckpointError, ConfigError, DataError, ModelError
from secure_apfed.folder_files import read_json, read_json_lines
from secure_apfed.methods import METHODS, roles_of
from secure_apfed.privacy import BudgetExhaustedError
from secure_apfed.runs.folder import RunFolder, make_private, write_atomically
from secure_apfed.runs.outcome import Progress, RunResult
from secure_apfed.runs.party import PartyFile, Peer
from secure_apfed.runs.party_folder import PartyFolder
from secure_apfed.runs.record import Privacy, read_outcome, write_outcome
from secure_apfed.runs.writing import RunWriter

__all__ = ["free_addresses", "prepare_parties", "run_locally"]

_LOOPBACK = "127.0.0.1"
_LOOK_S = 0.05
_GRACE_S = 10.0
_PARTY, _TABLE, _LOG = "party.yaml", "table.safetensors", "log.txt"
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
) -> RunResult:
    """Train, evaluate and write one run; see `secure_apfed.runs.run`.

    Args:
        config: of the run.
        folder: of the run; the parties' lie in it.
        data: of the run, where it is loaded already.
        resume: go on from the parties' checkpoints.
        on_progress: called after every epoch.
        timeout_s: one unit of patience with a party that is silent (`PartyFile.timeout_s`).
    """
    if folder is None:
        raise ConfigError("parties that run apart need a folder each; name a run folder")
    with RunWriter.open(folder, config, resume=resume) as writer:
        assert writer
        files = prepare_parties(config, folder, data=data, timeout_s=timeout_s)
        active = config.data.active_name
        with _started(files, resume=resume) as processes:
            _wait(processes, active, RunFolder(folder.joinpath("parties", active)), on_progress,
                  config.train.epochs, timeout_s)  # fmt: skip
        _raise_what_failed(processes)
        return _gather(config, writer.folder, active)


def prepare_parties(
    config: Config,
    folder: Path,
    *,
    data: VerticalData | None = None,
    timeout_s: float = 60.0,
) -> dict[str, Path]:
    """Make each party's folder, key, rows and file of settings; return the files by party.

    Raises:
        ConfigError, DataError: what does not fit, or cannot be loaded.
        CheckpointError: a folder that cannot be a party's.
    """
    data = data or load_data(config.data, seed=config.seed)
    active, passives = data.active.name, tuple(table.name for table in data.passives)
    names = tuple(roles_of(METHODS[config.method], config, active, passives))
    run = RunFolder(folder)
    write_atomically(run.config, dump_config(config).encode())
    addresses = dict(zip(names, free_addresses(len(names)), strict=True))
    identities = {}
    for name in names:
        make_private(run.party(name))
        identities[name] = PartyFolder(run.party(name)).identity().public.hex()
        if (held := data.own(name)) is not None:
            write_atomically(run.party(name) / _TABLE, pack_own(held), private=True)
    peers = {name: Peer(address=addresses[name], identity=identities[name]) for name in names}
    files = {}
    for name in names:
        told = PartyFile(
            party=name,
            active=active,
            passives=passives,
            config=Path("..", "..", run.config.name),
            listen=addresses[name],
            peers={peer: peers[peer] for peer in names if peer != name},
            table=Path(_TABLE) if data.own(name) is not None else None,
            timeout_s=timeout_s,
        )
        files[name] = run.party(name) / _PARTY
        write_atomically(files[name], dump_settings(told).encode())
    return files


def free_addresses(count: int) -> list[str]:
    """Addresses of loopback where nobody listens now."""
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.create_server((_LOOPBACK, 0))) for _ in range(count)]
        return [f"{_LOOPBACK}:{one.getsockname()[1]}" for one in taken]


@dataclass(eq=False)
class _Process:
    """One party's process.

    Attributes:
        said: what it wrote on stdout: how it failed, where it did.
    """

    name: str
    process: "subprocess.Popen[bytes]"
    said: Mapping[str, Any] = field(default_factory=dict)

    @property
    def code(self) -> int | None:
        """How it ended; None while it runs."""
        return self.process.poll()

    def read(self) -> None:
        """Read what it said, once it has ended."""
        out, _ = self.process.communicate()
        with contextlib.suppress(ValueError, RecursionError):
            told = json.loads(out)
            self.said = told.get("error", {}) if isinstance(told, dict) else {}


@contextmanager
def _started(files: Mapping[str, Path], *, resume: bool) -> Iterator[Sequence[_Process]]:
    """One process a party; none outlives the block."""
    processes: list[_Process] = []
    try:
        for name, file in files.items():
            command = [sys.executable, "-m", "secure_apfed.cli", "party", "--config", str(file)]
            command += ["--json", "--end-with-stdin", *(["--resume"] if resume else [])]
            with (file.parent / _LOG).open("ab") as log:
                started = subprocess.Popen(  # noqa: S603 - this very program
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
                )
            processes.append(_Process(name, started))
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
    processes: Sequence[_Process],
    active: str,
    folder: RunFolder,
    on_progress: Callable[[Progress], None],
    epochs: int,
    timeout_s: float,
) -> None:
    """Wait until the active has ended, and the others soon after it."""
    shown, before = 0, _signed_at(folder)
    leading = next(one for one in processes if one.name == active)
    while leading.code is None:
        time.sleep(_LOOK_S)
        shown = _show(folder, shown, epochs, on_progress)
        failed = any(one.code in _OWN_FAULTS for one in processes)
        if failed and _signed_at(folder) == before:
            return  # it never began, and the others would wait for it
    _show(folder, shown, epochs, on_progress)
    # The others need no more than to hear of the end, or to notice that it came without a word.
    deadline = time.monotonic() + (_GRACE_S if leading.code == 0 else 8 * timeout_s)
    while any(one.code is None for one in processes) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)


def _signed_at(folder: RunFolder) -> int:
    """When a contract was signed last; 0: never."""
    return folder.contract.stat().st_mtime_ns if folder.contract.exists() else 0


def _show(
    folder: RunFolder, shown: int, epochs: int, on_progress: Callable[[Progress], None]
) -> int:
    """Tell of the epochs that the active has written since; return how many are told."""
    if not folder.metrics.exists():
        return shown
    lines = read_json_lines(folder.metrics, dict[str, Any])
    for line in lines[shown:]:
        steps = line["step"] * epochs // line["epoch"]
        accuracy = next(iter((line["accuracy"] or {}).values()), None)
        on_progress(
            Progress(
                epoch=line["epoch"], epochs=epochs, step=line["step"], steps=steps,
                loss=line["loss"], accuracy=accuracy, epsilon=float(line["epsilon"]),
                wire_bytes=line["wire_bytes"],
            )
        )  # fmt: skip
    return len(lines)


def _raise_what_failed(processes: Sequence[_Process]) -> None:
    """Raise the error from which the others follow, with what each party said."""
    failed = [one for one in processes if one.code != 0]
    leading = next((one for one in failed if one.said and not _follows(one)), None)
    if not any(one.said for one in failed) and not failed:
        return
    lines = [f"{one.name}: {_why(one)}" for one in failed]
    if leading is not None:
        lines.insert(0, lines.pop(failed.index(leading)))
    kinds = {kind.__name__: kind for kind in _ERRORS}
    kind = kinds.get(leading.said.get("kind", ""), PartyLeftError) if leading else PartyLeftError
    raise kind("\n".join(lines))


def _follows(one: _Process) -> bool:
    """Whether it stopped for what another did."""
    return one.said.get("kind") in ("RunStoppedError", "PartyLeftError", "Interrupted")


def _why(one: _Process) -> str:
    if one.said:
        return str(one.said.get("message"))
    code = one.code or 0
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with code {code}; its {_LOG} says more"


def _gather(config: Config, run: RunFolder, active: str) -> RunResult:
    """Put the parties' results together as one run's."""
    led = RunFolder(run.party(active))
    for name in ("contract", "seeds", "versions", "metrics", "model", "card", "accountants"):
        source: Path = getattr(led, name)
        if source.exists():
            shutil.copyfile(source, getattr(run, name))
    names = [path.name for path in sorted(run.parties.iterdir()) if path.is_dir()]
    folders = {name: PartyFolder(run.party(name)) for name in names}
    ended = {name: one.read_end() for name, one in folders.items() if one.ended.exists()}
    flows: list[Any] = []
    for name in names:
        flows += read_json(RunFolder(run.party(name)).flows, list[Any])
    run.write_json(run.flows, flows)
    led_to = read_outcome(led)
    others = [one for name, one in ended.items() if name != active]
    outcome = led_to.model_copy(
        update={
            "wire_bytes": sum(flow["wire_bytes"] for flow in flows),
            "privacy": _worst(led_to.privacy, [one.privacy for one in others if one.privacy]),
            "contributions": {
                one.party: one.contributions for one in others if one.contributions is not None
            },
        }
    )
    write_outcome(run, outcome)
    return RunResult(
        method=config.method,
        accuracy=outcome.accuracy,
        wire_bytes=outcome.wire_bytes,
        privacy=outcome.privacy.spent(),
        folder=run.path,
    )


def _worst(active: Privacy, others: Sequence[Privacy]) -> Privacy:
    """The account of the party that spent most on representations, with the active's of labels."""
    released = max(others, key=lambda one: one.epsilon_x, default=active)
    if active.epsilon_x >= released.epsilon_x:
        return active
    of_labels = {"epsilon_y": active.epsilon_y, "epsilon_model": active.epsilon_model}
    trace = (*released.trace, *active.trace[1:])  # its first line says: nothing sent
    return released.model_copy(update={**of_labels, "trace": trace})

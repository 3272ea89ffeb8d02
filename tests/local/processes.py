"""Parties in processes of their own, for tests: started, harmed at a message, and watched."""

import io
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from secure_apfed.base.files import make_private
from secure_apfed.config import Config
from secure_apfed.data import VerticalData
from secure_apfed.exchange import (
    Awaited,
    BrokenLink,
    Envelope,
    Frame,
    Kind,
    Transport,
    resumable_link,
)
from secure_apfed.organisations.local import prepare_parties, run_relay
from secure_apfed.organisations.party import PartyFile, run_party
from secure_apfed.runs.folder import RunFolder
from secure_apfed.runs.run import LinkType
from tests.secure_apfed.small_runs import small_config
from tests.waiting import LONG_S, wait_until

TRAIN = {"epochs": 3, "batch_size": 128, "learning_rate": 0.05, "device": "cpu"}
PHASES = {"agreement", "alignment", "set-up", "training", "checkpoint"}

_CONTEXT = multiprocessing.get_context("forkserver")
# What the active's measures import, for seconds; and the commands, where one plays a party.
_IMPORTED = (
    "torch.utils.tensorboard",
    "sklearn.metrics",
    "secure_apfed.commands.apart",
    "apfed_experiments.report",
    "apfed_experiments.baselines",
    "apfed_attacks.run",
)
_CONTEXT.set_forkserver_preload(["tests.local.processes", *_IMPORTED])
_LENGTH_BYTES = 2
_GO_ON = "go-on"


@dataclass(frozen=True)
class Harm:
    """What befalls a party when it is about to send its n-th message of a kind (None: before it
    sends or awaits anything), or when it next awaits one after that (`awaiting`).

    Its process gets the signal; or it waits (None) until the file `go-on` is in its folder, or its
    transport says that the peer `until_back` waits for a new session. `writing`: in place of a
    message the file that it is about to write, when that is "torn" (half of it is written), "whole"
    (not in its place yet) or "in place" (what it takes the place of still lies there).
    """

    kind: Kind | None
    at: int = 0
    signal: int | None = signal.SIGKILL
    writing: str | None = None
    moment: str = "torn"
    awaiting: bool = False
    until_back: str = ""

    def strike(self, folder: Path, transport: Transport | None = None) -> None:
        """Let it happen to this process."""
        if self.signal is not None:
            os.kill(os.getpid(), self.signal)
        elif transport is not None and self.until_back:
            wait_until(
                lambda: transport.find_rejoining([self.until_back]), f"{self.until_back} is back"
            )
        else:
            wait_until((folder / _GO_ON).exists, "that it may go on")


def parse_kind(frame: bytes) -> Kind:
    """Return the kind of a frame by its header, which everybody can read."""
    size = int.from_bytes(frame[:_LENGTH_BYTES], "big")
    return Envelope.parse_header(frame[_LENGTH_BYTES : _LENGTH_BYTES + size]).kind


class _Harmed:
    """A transport at which its party comes to harm."""

    def __init__(self, transport: Transport, harm: Harm, folder: Path) -> None:
        self._transport = transport
        self._harm = harm
        self._sent = 0
        self._folder = folder
        if harm.kind is None and harm.writing is None:
            harm.strike(folder)

    def send_frame(self, receiver: str, frame: bytes) -> None:
        if parse_kind(frame) is self._harm.kind:
            if self._sent == self._harm.at and not self._harm.awaiting:
                self._harm.strike(self._folder, self._transport)
            self._sent += 1
        self._transport.send_frame(receiver, frame)

    def receive_frame(self, awaited: Awaited, timeout_s: float) -> Frame:
        if self._harm.awaiting and self._sent > self._harm.at:
            self._harm.strike(self._folder)
        return self._transport.receive_frame(awaited, timeout_s)

    def find_rejoining(self, names: Collection[str]) -> Collection[str]:
        return self._transport.find_rejoining(names)

    def list_broken_links(self) -> Mapping[str, BrokenLink]:
        return self._transport.list_broken_links()

    def close(self) -> None:
        self._transport.close()


def _harm_writing(harm: Harm, folder: Path) -> None:
    """Let this process come to harm in the middle of writing a file."""
    fsync = os.fsync
    replace = Path.replace

    def struck(path: str, moment: str) -> bool:
        return Path(path).name.removeprefix(".").startswith(f"{harm.writing}.") and (
            moment == harm.moment
        )

    def syncing(handle: int) -> None:
        if struck(str(Path(f"/proc/self/fd/{handle}").readlink()), "torn"):
            os.ftruncate(handle, os.fstat(handle).st_size // 2)
            harm.strike(folder)
        fsync(handle)

    def moving(path: Path, target: Path) -> Path:
        if struck(str(path), "whole"):
            harm.strike(folder)
        moved = replace(path, target)
        if struck(str(path), "in place"):
            harm.strike(folder)
        return moved

    os.fsync = syncing  # type: ignore[assignment]  # its own process
    Path.replace = moving  # type: ignore[method-assign,assignment]


def _play(
    file: Path, resume: bool, harm: Harm | None, silent_s: float, command: Sequence[str] | None
) -> None:
    """The whole of one process."""
    import torch

    torch.set_num_threads(1)
    resumable_link._SILENT_S = silent_s
    folder, restarts = file.parent, list[str]()

    def note_restart(why: str) -> None:
        restarts.append(why)
        (folder / "restarted").touch()

    if harm and harm.writing:
        _harm_writing(harm, folder)
    over: Callable[[Transport], Transport] = lambda transport: (  # noqa: E731
        _Harmed(transport, harm, folder) if harm and not restarts else transport
    )
    if command is not None or (harm and harm.signal == signal.SIGTERM):
        more = [*(command or ()), *(["--resume"] if resume else [])]
        said = run_by_command(file, more, over)
    else:
        try:
            run_party(file, resume=resume, wrap_transport=over, on_restart=note_restart)
            said = {"kind": None}
        except BaseException as error:  # noqa: BLE001 - a test reads it
            said = {"kind": type(error).__name__, "message": str(error)}
    said |= {"at": time.time(), "restarts": restarts}
    (folder / "said.json").write_text(json.dumps(said))


def run_by_command(
    file: Path, more: Sequence[str], wrap_transport: Callable[[Transport], Transport]
) -> dict[str, Any]:
    """Run a party as the command does, which minds SIGTERM."""
    from apfed_experiments import baselines
    from secure_apfed import cli
    from secure_apfed.baselines import BASELINES
    from secure_apfed.organisations import party

    # As few as this test's own process measures.
    few = {name: BASELINES[name] for name in ("ridge", "logistic")}
    vars(baselines)["list_candidates"] = lambda: few  # it imports it, and exports none
    party.run_party = partial(run_party, wrap_transport=wrap_transport)
    with redirect_stderr(io.StringIO()) as log, redirect_stdout(io.StringIO()) as out:
        code = cli.execute(["party", "--config", str(file), *more])
    return {"kind": f"code {code}", "message": log.getvalue(), "out": out.getvalue()}


class Parties:
    """A run's folder with all parties' in it, played in processes again and again; `command`:
    options of the command that plays each, or the library does.
    """

    gone_after_s = 1.0  # that long a process of this machine that is gone is waited for

    def __init__(
        self,
        config: Config,
        folder: Path,
        *,
        data: VerticalData | None = None,
        timeout_s: float = 60.0,
        meet_s: float = 60.0,
        silent_s: float = 15.0,
        way: LinkType = "tcp",
        command: Sequence[str] | None = None,
    ) -> None:
        self.config = config
        self.run = RunFolder(folder)
        make_private(folder)
        self._data = data
        self._timeout_s = timeout_s
        self._meet_s = meet_s
        self._silent_s = silent_s
        self._command = command
        self._over: LinkType = way
        self.processes: dict[str, BaseProcess] = {}

    @contextmanager
    def start(
        self, harms: Mapping[str, Harm] | None = None, *, resume: bool = False
    ) -> Iterator[None]:
        """Start all parties in processes of their own; none outlives the block."""
        files = prepare_parties(
            self.config,
            self.run.path,
            data=self._data,
            timeout_s=self._timeout_s,
            link_type=self._over,
        )
        self.prepare_files(files)
        for name, file in files.items():
            told = file.read_text().replace("meet_s: 60.0", f"meet_s: {self._meet_s}")
            file.write_text(told.replace("reconnect_s: 3.0", f"reconnect_s: {self.gone_after_s}"))
            (file.parent / "said.json").unlink(missing_ok=True)
            # An active that was harmed before its first checkpoint restarts.
            goes_on = resume and (name != "active" or any(file.parent.glob("checkpoint-*")))
            self.begin(name, (harms or {}).get(name), resume=goes_on)
        try:
            with run_relay(files.values()):
                yield
        except AssertionError as error:
            ended = [name for name, process in self.processes.items() if not process.is_alive()]
            error.add_note(f"what those said that ended: {self.load_reports(ended)}")
            raise
        finally:
            for process in self.processes.values():
                process.kill()
                process.join()

    def prepare_files(self, files: Mapping[str, Path]) -> None:
        """Change the parties' files before they start."""

    def begin(self, name: str, harm: Harm | None = None, *, resume: bool = False) -> None:
        """Start one party's process, as whatever watches over its machine does."""
        file = self.run.get_party_path(name) / "party.yaml"
        process: BaseProcess = _CONTEXT.Process(
            target=_play, args=(file, resume, harm, self._silent_s, self._command), daemon=True
        )
        process.start()
        self.processes[name] = process

    def find_address(self, name: str) -> str:
        """Return the address at which a party listens."""
        told = PartyFile.from_file(self.run.get_party_path(name) / "party.yaml")
        assert told.listen is not None
        return told.listen

    def play(
        self,
        harms: Mapping[str, Harm] | None = None,
        *,
        resume: bool = False,
        within_s: float = LONG_S,
    ) -> dict[str, dict[str, Any]]:
        """Play until all but the harmed have ended; return by party what it said of it."""
        harms = harms or {}
        with self.start(harms, resume=resume):
            return self.watch([name for name in self.processes if name not in harms], within_s)

    def play_watched_over(
        self, harms: Mapping[str, Harm], *, within_s: float = LONG_S
    ) -> dict[str, dict[str, Any]]:
        """Play until all have ended; who is killed is started again, in the same way as before."""
        with self.start(harms):
            deadline = time.monotonic() + within_s
            for name in harms:
                self.processes[name].join(max(0.0, deadline - time.monotonic()))
                assert not self.processes[name].is_alive(), f"nothing befell {name}"
                self.begin(name)
            return self.watch(list(self.processes), deadline - time.monotonic())

    def watch(self, names: Sequence[str], within_s: float = LONG_S) -> dict[str, dict[str, Any]]:
        """Wait until these parties have ended; see `play`."""
        deadline = time.monotonic() + within_s
        for name in names:
            self.processes[name].join(max(0.0, deadline - time.monotonic()))
            assert not self.processes[name].is_alive(), f"{name} goes on after {within_s} s"
        said = self.load_reports(names)
        assert set(said) == set(names)
        return said

    def load_reports(self, names: Collection[str]) -> dict[str, dict[str, Any]]:
        """Load what these parties reported at their end, of those that did."""
        said = {name: self.run.get_party_path(name) / "said.json" for name in names}
        return {name: json.loads(file.read_bytes()) for name, file in said.items() if file.exists()}


class Impatient(Parties):
    """Parties that soon give up, between machines, on one that is gone."""

    gone_after_s = 3.0

    def prepare_files(self, files: Mapping[str, Path]) -> None:
        for file in files.values():
            file.write_text(file.read_text().replace("reconnect_s: 30.0", "reconnect_s: 3.0"))


def list_hidden_files(run: Path) -> list[Path]:
    """List files that were begun and not put in place."""
    return [path for path in run.rglob(".*") if path.name != ".lock" and path.is_file()]


def require_no_failure(said: dict[str, dict[str, Any]]) -> None:
    assert not {name: one for name, one in said.items() if one["kind"]}


def the_others_say_who_and_when(said: dict[str, dict[str, Any]], harmed: str) -> None:
    """Each names the party and the phase, and all have ended within ten seconds of the first."""
    ended = [one["at"] for one in said.values() if one["kind"]]
    assert max(ended, default=0.0) - min(ended, default=0.0) < 10
    for name, one in said.items():
        if one["kind"] is None:
            # A dealer is done before training, and an end may have been told to some already.
            continue
        assert one["kind"] in ("PartyLeftError", "RunStoppedError"), (name, one)
        assert harmed in one["message"], (name, one)
        assert any(f"{phase}: " in one["message"] for phase in PHASES), (name, one)


def model_digests(run: Path) -> dict[str, str]:
    """By party, the digest of the parameters with which it ended."""
    ended = sorted((run / "parties").glob("*/ended.json"))  # a dealer learns nothing
    return {one.parent.name: json.loads(one.read_bytes())["model_sha256"] for one in ended}


config_of = partial(
    small_config,
    train=TRAIN,
    alignment={"protocol": "circuit"},
    guard={"mechanism": "none", "noise": "reproducible_insecure"},
)


def recovering() -> Config:
    settings: dict[str, Any] = {
        "name": "recovering",
        "method": "apfed_c",
        "party_seeds": "shared_for_comparison",
        "data": {"dataset": "digits", "views": 4, "limit": 512},
        "model": {"network": "mlp", "hidden": [16], "representation": 8, "projection": 8},
        "train": {"epochs": 3, "batch_size": 128, "learning_rate": 0.1, "device": "cpu"},
        "secure_sum": {"scheme": "plain", "masks": "recoverable", "threshold": 2},
        "guard": {"mechanism": "none"},
        "rules": {"minimum_spread": 0.0},
    }
    return Config.model_validate(settings)

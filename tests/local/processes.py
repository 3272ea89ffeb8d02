"""Parties in processes of their own, for tests: started, harmed at a message, and watched.

They are forked from a server that has imported what they need, so that each takes a tenth of a
second to start; from there on they run what `secure-apfed party` runs.
"""

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from secure_apfed.config import Config
from secure_apfed.data import VerticalData
from secure_apfed.exchange import Awaited, Envelope, Frame, Kind, Transport
from secure_apfed.runs.folder import RunFolder, make_private
from secure_apfed.runs.local import prepare_parties
from secure_apfed.runs.party import play_party
from secure_apfed.runs.trial_links import Way, relaying

__all__ = ["Harm", "Parties", "kind_of", "model_digests"]

_CONTEXT = multiprocessing.get_context("forkserver")
# The last is what an optimiser of torch imports when it is first made, for three seconds.
_CONTEXT.set_forkserver_preload(["tests.local.processes", "torch._dynamo"])
_LENGTH_BYTES = 2


@dataclass(frozen=True)
class Harm:
    """What befalls a party when it is about to send its n-th message of a kind.

    Attributes:
        kind: of the message; None: before it sends or awaits anything.
        at: which of them, from 0.
        signal: that its process gets.
    """

    kind: Kind | None
    at: int = 0
    signal: int = signal.SIGKILL


def kind_of(frame: bytes) -> Kind:
    """What a frame is, by its header, which everybody can read."""
    size = int.from_bytes(frame[:_LENGTH_BYTES], "big")
    return Envelope.parse_header(frame[_LENGTH_BYTES : _LENGTH_BYTES + size]).kind


class _Harmed:
    """A transport at which its party comes to harm."""

    def __init__(self, transport: Transport, harm: Harm) -> None:
        self._transport, self._harm, self._sent = transport, harm, 0
        if harm.kind is None:
            os.kill(os.getpid(), harm.signal)

    def post(self, receiver: str, frame: bytes) -> None:
        if kind_of(frame) is self._harm.kind:
            if self._sent == self._harm.at:
                os.kill(os.getpid(), self._harm.signal)
            self._sent += 1
        self._transport.post(receiver, frame)

    def take(self, awaited: Awaited, timeout_s: float) -> Frame:
        return self._transport.take(awaited, timeout_s)

    def close(self) -> None:
        self._transport.close()


def _play(file: Path, resume: bool, harm: Harm | None) -> None:
    """The whole of one process."""
    import torch

    torch.set_num_threads(1)
    over: Callable[[Transport], Transport] = lambda transport: (  # noqa: E731
        _Harmed(transport, harm) if harm else transport
    )
    try:
        play_party(file, resume=resume, over=over)
        said: dict[str, str | None] = {"kind": None}
    except BaseException as error:  # noqa: BLE001 - a test reads it
        said = {"kind": type(error).__name__, "message": str(error)}
    (file.parent / "said.json").write_text(json.dumps(said))


class Parties:
    """A run's folder with all parties' in it, played in processes again and again."""

    def __init__(
        self, config: Config, folder: Path, *, data: VerticalData | None = None,
        timeout_s: float = 20.0, meet_s: float = 15.0, over: Way = "tcp",
    ) -> None:  # fmt: skip
        self.config, self.run = config, RunFolder(folder)
        make_private(folder)
        self._data, self._timeout_s, self._meet_s = data, timeout_s, meet_s
        self._over: Way = over
        self.processes: dict[str, BaseProcess] = {}

    @contextmanager
    def started(
        self, harms: Mapping[str, Harm] | None = None, *, resume: bool = False
    ) -> Iterator[None]:
        """All parties in processes of their own; none outlives the block."""
        files = prepare_parties(
            self.config, self.run.path, data=self._data, timeout_s=self._timeout_s, over=self._over
        )
        self.prepared(files)
        for name, file in files.items():
            file.write_text(file.read_text().replace("meet_s: 60.0", f"meet_s: {self._meet_s}"))
            (file.parent / "said.json").unlink(missing_ok=True)
            harm = (harms or {}).get(name)
            # An active that was harmed before its first checkpoint begins anew.
            goes_on = resume and (name != "active" or any(file.parent.glob("checkpoint-*")))
            process: BaseProcess = _CONTEXT.Process(
                target=_play, args=(file, goes_on, harm), daemon=True
            )
            process.start()
            self.processes[name] = process
        try:
            with relaying(files.values()):
                yield
        finally:
            for process in self.processes.values():
                process.kill()
                process.join()

    def prepared(self, files: Mapping[str, Path]) -> None:
        """Change the parties' files before they start."""

    def play(
        self, harms: Mapping[str, Harm] | None = None, *, resume: bool = False,
        within_s: float = 60.0,
    ) -> dict[str, dict[str, Any]]:  # fmt: skip
        """Play until all but the harmed have ended; return by party what it said of it.

        Raises:
            AssertionError: somebody who was not harmed goes on for longer.
        """
        harms = harms or {}
        with self.started(harms, resume=resume):
            deadline = time.monotonic() + within_s
            others = {name: one for name, one in self.processes.items() if name not in harms}
            for name, process in others.items():
                process.join(max(0.0, deadline - time.monotonic()))
                assert not process.is_alive(), f"{name} goes on after {within_s} s"
            said = {}
            for name in others:
                with suppress(FileNotFoundError):
                    said[name] = json.loads((self.run.party(name) / "said.json").read_bytes())
            assert set(said) == set(others)
            return said


def model_digests(run: Path) -> dict[str, str]:
    """By party, the digest of the parameters with which it ended."""
    ended = sorted((run / "parties").glob("*/ended.json"))  # a dealer learns nothing
    return {one.parent.name: json.loads(one.read_bytes())["model_sha256"] for one in ended}

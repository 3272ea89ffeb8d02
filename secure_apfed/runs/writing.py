"""Writing a run folder: configuration, contract, versions, metrics, model, transcript, result."""

import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import msgpack
import torch
from filelock import FileLock, Timeout
from torch.utils.tensorboard import SummaryWriter

from secure_apfed.config import Config
from secure_apfed.config.file import dump_config
from secure_apfed.errors import CheckpointError
from secure_apfed.methods import Session
from secure_apfed.regular_file import open_regular
from secure_apfed.runs.checkpoint import save_tensors
from secure_apfed.runs.encoders import save_encoders
from secure_apfed.runs.folder import (
    RunFolder,
    make_private,
    no_checkpoint,
    own_subfolder,
    write_atomically,
)
from secure_apfed.runs.outcome import RunResult
from secure_apfed.runs.recording import Recording
from secure_apfed.runs.solo import save_model

__all__ = ["RunWriter", "versions"]

_PACKAGES = (
    "secure-apfed", "torch", "numpy", "tenseal", "cryptography", "opacus", "scikit-learn",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Versions of what a run's numbers depend on, and the machine."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed as a package"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "python": platform.python_version(),
        **found,
        "system": f"{platform.system()} {platform.machine()}",
        "gpu": gpu,
    }


class RunWriter:
    """Writes one run's folder while it runs."""

    def __init__(self, folder: RunFolder, config: Config) -> None:
        self.folder, self._config = folder, config
        self._board: SummaryWriter | None = None

    @classmethod
    @contextmanager
    def open(cls, path: Path | None, config: Config, *, resume: bool) -> Iterator[Self | None]:
        """Hold the folder for one run; None where nothing is to be written.

        Raises:
            CheckpointError: nothing to resume from, a run lies there already, another
                process runs there, or others may read what lies there.
        """
        if path is None:
            if resume:
                raise CheckpointError("a run without a folder has no checkpoint to resume from")
            yield None
            return
        folder = RunFolder(path)
        if resume:
            _refuse_nothing_to_resume(folder)
        make_private(path)
        with _only_here(folder):
            if not resume:
                _clear(folder)
            yield cls(folder, config)

    def begin(self, session: Session, contracts: tuple[str, ...], *, epoch: int) -> None:
        """Write what is known before training."""
        folder, config = self.folder, self._config
        write_atomically(folder.config, dump_config(config).encode())
        self.agree(session, contracts)
        folder.write_json(folder.seeds, {"seed": config.seed, "noise": config.guard.noise})
        folder.write_json(folder.versions, versions())
        folder.keep_metrics(epoch)
        self._board = SummaryWriter(str(own_subfolder(folder.tensorboard)), purge_step=epoch + 1)

    def agree(self, session: Session, contracts: tuple[str, ...]) -> None:
        """Write the contract of the session that begins."""
        self.folder.write_json(
            self.folder.contract,
            {
                "document": session.contract.model_dump(mode="json"),
                "sha256": session.contract.digest.hex(),
                "signatures": {name: one.hex() for name, one in session.signatures.items()},
                "sessions": list(contracts),
            },
        )

    def record(self, record: Mapping[str, Any]) -> None:
        """Add one epoch to the metrics and the TensorBoard file."""
        self.folder.append_metrics(record)
        assert self._board is not None
        scalars = {**record, **{f"accuracy/{k}": v for k, v in (record["accuracy"] or {}).items()}}
        for name, value in scalars.items():
            if isinstance(value, int | float) and name != "epoch":
                self._board.add_scalar(name, value, record["epoch"])

    def finish(
        self, session: Session, result: RunResult, *, guarantee: str, seconds: float
    ) -> None:
        """Write the results; `result.json` comes last and marks the run as finished."""
        folder, recording = self.folder, result.recording
        if self._board is not None:
            self._board.close()
        card = self._card(session, result, guarantee)
        save_model(folder, session.learner.solo(), card, self._config.model)
        self._keep(recording)
        folder.write_json(folder.flows, [asdict(flow) for flow in recording.transcript.flows])
        aligned = recording.alignment.get(recording.data.active.name)
        folder.finish(
            {
                "method": self._config.method,
                "accuracy": dict(result.accuracy),
                "wire_bytes": result.wire_bytes,
                "privacy": asdict(result.privacy),
                "contributions": {
                    passive: ledger.account() for passive, ledger in session.contributions.items()
                },
                "seconds": seconds,
                "aligned_rows": 0 if aligned is None else len(aligned),
                "train_rows": len(recording.data.train_rows),
                "test_rows": len(recording.data.test_rows),
                "sum": dict(session.secure_sum),
                "attendance": dict(session.attendance()),
                "guarantee": guarantee,
            },
        )
        # A finished run needs no checkpoint, and the noise keys in it should not outlive it.
        folder.checkpoint.unlink()

    def cross_check(self, accountants: Mapping[str, float | str]) -> None:
        """Write what other accountants say of epsilon_x; the run is finished already."""
        self.folder.write_json(self.folder.accountants, dict(accountants))

    def _keep(self, recording: Recording) -> None:
        """Write what only the experimenter holds, for attacks on the finished run."""
        folder, transcript = self.folder, msgpack.packb(recording.transcript.state_dict())
        save_encoders(folder, recording.encoders)
        write_atomically(folder.alignment, save_tensors(recording.alignment), private=True)
        write_atomically(folder.transcript, transcript, private=True)

    def _card(self, session: Session, result: RunResult, guarantee: str) -> dict[str, Any]:
        data, privacy = result.recording.data, result.privacy
        return {
            "method": self._config.method,
            "run": self._config.name,
            "dataset": self._config.data.dataset,
            "party": data.active.name,
            "classes": list(data.classes),
            "encoding": data.active.encoding.model_dump(mode="json"),
            "accuracy": dict(result.accuracy),
            "guarantee": guarantee,
            "epsilon": {"representations": privacy.epsilon_x, "labels": privacy.epsilon_y,
                        "model": privacy.epsilon_model, "delta": privacy.delta,
                        "releases": privacy.releases},
            "contract": session.contract.digest.hex(),
        }  # fmt: skip


@contextmanager
def _only_here(folder: RunFolder) -> Iterator[None]:
    """Keep other processes out of the folder.

    Raises:
        CheckpointError: another process is in it, or no regular file lies in the lock's place.
    """
    os.close(open_regular(folder.lock, create=True))
    lock = FileLock(folder.lock)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise CheckpointError(
            f"another process is running in {folder.path}; wait for it, or choose another folder"
        ) from None
    try:
        yield
    finally:
        lock.release()


def _refuse_nothing_to_resume(folder: RunFolder) -> None:
    if folder.checkpoint.exists():
        return
    if folder.result.exists():
        raise CheckpointError(f"{folder.path} holds a finished run; there is nothing to resume")
    raise no_checkpoint(folder.checkpoint)


def _clear(folder: RunFolder) -> None:
    """Make room for a new run; a run that sent anything has a checkpoint or a result."""
    if folder.checkpoint.exists():
        raise CheckpointError(
            f"{folder.path} holds a run already; resume it, or choose another folder"
        )
    if folder.result.exists():
        raise CheckpointError(
            f"{folder.path} holds a run already, which is finished; choose another folder"
        )
    for log in folder.logs():
        try:
            log.unlink()
        except OSError as error:
            raise CheckpointError(
                f"{log} lies in the place of a log and cannot be removed ({error.strerror}); "
                "remove it, or choose another folder"
            ) from error

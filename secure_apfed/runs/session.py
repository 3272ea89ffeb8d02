"""One run from configuration to result: all parties, in this process, over recorded links.

Run by: the experimenter. The loop is the same for every method: shuffle, step, evaluate,
write. Whatever happens, what was written is whole: see `folder` and `checkpoint`.
"""

import math
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from secure_apfed.config import Config
from secure_apfed.data import VerticalData, load_data
from secure_apfed.errors import ConfigError, NoHelpWarning
from secure_apfed.exchange import Kind
from secure_apfed.methods import METHODS, Method, Start, noise_key
from secure_apfed.privacy import PrivacyLedger, PrivacySpent
from secure_apfed.runs.checkpoint import Checkpoint, config_digest, load_tensors, save_tensors
from secure_apfed.runs.recording import Recording
from secure_apfed.runs.writing import RunWriter
from secure_apfed.seeds import shuffled

__all__ = ["Progress", "RunResult", "run"]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is, for a display.

    Attributes:
        epoch, step: that are done, of epochs and steps.
        loss: running mean of the task loss in this epoch.
        accuracy: last test accuracy of the headline variant.
        epsilon: epsilon_x spent; 0 where nothing was released, infinite without a guard.
        wire_bytes: on all links so far.
    """

    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float
    accuracy: float | None
    epsilon: float
    wire_bytes: int


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a finished run gives.

    Attributes:
        accuracy: on the test rows, by inference variant.
        privacy: what was spent by the party that spent most.
    """

    method: str
    accuracy: Mapping[str, float]
    wire_bytes: int
    privacy: PrivacySpent
    recording: Recording
    folder: Path | None


def run(
    config: Config,
    folder: Path | None,
    *,
    data: VerticalData | None = None,
    resume: bool = False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> RunResult:
    """Train, evaluate and write one run.

    Args:
        config: of the run.
        folder: of the run; made where missing. None: write nothing.
        data: of the run, where it is loaded already.
        resume: go on from the checkpoint in `folder`.
        on_progress: called after every step.

    Raises:
        ConfigError, DataError, ModelError: what does not fit, before anything is sent.
        CheckpointError: nothing to resume, or the folder holds a run already.
        BudgetExhaustedError: the privacy budget is spent; the checkpoint stays.
        ProtocolError: a party broke the protocol; the run stops for all.
    """
    data = data or load_data(config.data, seed=config.seed)
    with RunWriter.open(folder, config, resume=resume) as writer:
        checkpoint = (
            Checkpoint.read(writer.folder.checkpoint, config) if writer and resume else None
        )
        return _play(config, data, writer, checkpoint, on_progress)


def _play(
    config: Config,
    data: VerticalData,
    writer: RunWriter | None,
    checkpoint: Checkpoint | None,
    on_progress: Callable[[Progress], None],
) -> RunResult:
    """One session: from the start or the checkpoint to the result."""
    folder = writer.folder.path if writer else None
    noise_keys = _noise_keys(config, data, checkpoint)
    start = Start(
        config=config,
        data=data,
        noise_keys=noise_keys,
        alignment=checkpoint.alignment if checkpoint else None,
        logs=folder,
    )
    method = METHODS[config.method](start)
    _check_rows(method)
    session = _Session(method, config, noise_keys, writer, on_progress)
    session.begin(checkpoint)
    accuracy = session.train()
    privacy = session.cross_checked_privacy()
    recording = Recording(
        config=config, data=data, alignment=method.alignment, transcript=method.transcript
    )
    if writer:
        writer.finish(method, recording, accuracy, privacy, seconds=session.seconds)
    return RunResult(
        method=config.method,
        accuracy=accuracy,
        wire_bytes=method.transcript.wire_bytes,
        privacy=privacy,
        recording=recording,
        folder=folder,
    )


def _check_rows(method: Method) -> None:
    if len(method.training_rows) < method.smallest_batch:
        raise ConfigError(
            f"there are {len(method.training_rows)} rows to train on, fewer than the smallest "
            f"batch of {method.smallest_batch}; the intersection holds too few training rows"
        )


def _noise_keys(
    config: Config, data: VerticalData, checkpoint: Checkpoint | None
) -> Mapping[str, bytes]:
    if checkpoint:
        return checkpoint.noise_keys
    names = (data.active.name, *(table.name for table in data.passives))
    return {name: noise_key(config, name) for name in names}


class _Session:
    """The training loop of one session, and where it stands."""

    def __init__(
        self,
        method: Method,
        config: Config,
        noise_keys: Mapping[str, bytes],
        writer: RunWriter | None,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self._method, self._config, self._writer = method, config, writer
        self._noise_keys, self._on_progress = noise_keys, on_progress
        self._epoch = self._step = 0
        self._accuracy: dict[str, float] = {}
        self._contracts: tuple[str, ...] = (method.contract.digest.hex(),)
        self._before, self._began = 0.0, time.monotonic()

    @property
    def seconds(self) -> float:
        """Wall-clock seconds of all sessions of this run."""
        return self._before + time.monotonic() - self._began

    def begin(self, checkpoint: Checkpoint | None) -> None:
        """Stand where the checkpoint says, or at the start."""
        if checkpoint:
            self._epoch, self._step = checkpoint.epoch, checkpoint.step
            self._method.load_tensors(checkpoint.parties, next_step=checkpoint.step)
            self._method.transcript.resume(checkpoint.transcript)
            for party, ledger in self._method.ledgers.items():
                ledger.load_state_dict(load_tensors(checkpoint.ledgers[party]))
            self._before = checkpoint.seconds
            self._contracts = (*checkpoint.contracts, *self._contracts)
        if self._writer:
            self._writer.begin(self._method, self._contracts, epoch=self._epoch)
            self._save()

    def train(self) -> Mapping[str, float]:
        """Play the epochs that are left; return the final accuracies."""
        epochs = self._config.train.epochs
        for epoch in range(self._epoch, epochs):
            self._method.transcript.begin_epoch(epoch)
            loss = self._play_epoch(epoch)
            if epoch == 0:
                self._warn_without_help()
            self._epoch = epoch + 1
            last = self._epoch == epochs
            evaluated = last or self._epoch % self._config.train.evaluate_every == 0
            if evaluated:
                self._accuracy = self._method.evaluate(next_step=self._step, final=last)
            if self._writer:
                self._writer.record(
                    {
                        "epoch": self._epoch,
                        "step": self._step,
                        "loss": loss,
                        "accuracy": self._accuracy if evaluated else None,
                        "epsilon": self.privacy().epsilon_x,
                        "wire_bytes": self._method.transcript.wire_bytes,
                        "seconds": self.seconds,
                    }
                )
                self._save()
        if not self._accuracy:
            self._accuracy = self._method.evaluate(next_step=self._step, final=True)
        return self._accuracy

    def _warn_without_help(self) -> None:
        """Say it where training alone would pass for training with others."""
        contract, flows = self._method.contract, self._method.transcript.flows
        if contract.passives and all(flow.kind is not Kind.REPRESENTATIONS for flow in flows):
            warnings.warn(
                "an epoch passed without help, so the active trains alone: no batch held the "
                f"{contract.minimum_batch} aligned rows that rules.minimum_batch asks for; raise "
                "train.batch_size or data.overlap",
                NoHelpWarning,
                stacklevel=2,
            )

    def _play_epoch(self, epoch: int) -> float:
        batches = _batches(self._method, self._config, epoch)
        total = 0.0
        for index, rows_B in enumerate(batches):
            total += self._method.step(self._step, rows_B)
            self._step += 1
            self._on_progress(
                Progress(
                    epoch=epoch + 1,
                    epochs=self._config.train.epochs,
                    step=self._step,
                    steps=self._config.train.epochs * len(batches),
                    loss=total / (index + 1),
                    accuracy=self._accuracy.get(self._method.headline),
                    epsilon=self.privacy().epsilon_x,
                    wire_bytes=self._method.transcript.wire_bytes,
                )
            )
        return total / len(batches)

    def privacy(self) -> PrivacySpent:
        """What the party that spent most has spent."""
        worst, training = self._worst_ledger(), self._method.training
        nothing = PrivacySpent.nothing(delta=self._config.guard.delta)
        released = worst.spent() if worst else nothing
        return training.account(released) if training else released

    def cross_checked_privacy(self) -> PrivacySpent:
        """The same, beside the figures of every accountant that is installed; takes seconds."""
        spent, worst = self.privacy(), self._worst_ledger()
        if worst is None or not 0 < spent.epsilon_x < math.inf:
            return spent
        return replace(spent, accountants=worst.cross_check())

    def _worst_ledger(self) -> PrivacyLedger | None:
        training = self._method.training
        updates = training.updates if training else None
        ledgers = [one for one in self._method.ledgers.values() if one is not updates]
        return max(ledgers, key=lambda ledger: ledger.spent().epsilon_x, default=None)

    def _save(self) -> None:
        assert self._writer
        method = self._method
        Checkpoint(
            config=config_digest(self._config),
            epoch=self._epoch,
            step=self._step,
            noise_keys=self._noise_keys,
            parties=method.tensors(),
            alignment=method.alignment,
            ledgers={
                party: save_tensors(ledger.state_dict()) for party, ledger in method.ledgers.items()
            },
            transcript=method.transcript.state_dict(),
            seconds=self.seconds,
            contracts=self._contracts,
        ).write(self._writer.folder.checkpoint)


def _batches(method: Method, config: Config, epoch: int) -> list[Tensor]:
    """The epoch's batches, a function of seed and epoch; a last one too small is left out."""
    order = shuffled(method.training_rows, config.seed, "batches", epoch)
    batches = order.split(config.train.batch_size)
    return [rows_B for rows_B in batches if len(rows_B) >= method.smallest_batch]

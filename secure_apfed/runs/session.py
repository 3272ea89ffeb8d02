"""One run from configuration to result: all parties, in this process, over recorded links.

Run by: the experimenter. The loop is the same for every method: shuffle, step, evaluate,
write. Whatever happens, what was written is whole: see `folder` and `checkpoint`.
"""

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from secure_apfed.config import Config
from secure_apfed.data import VerticalData, load_data
from secure_apfed.errors import NoHelpWarning
from secure_apfed.exchange import Kind
from secure_apfed.learning.descent import prefixed
from secure_apfed.methods import begin_epoch
from secure_apfed.methods.workers import close_workers
from secure_apfed.privacy import PrivacySpent
from secure_apfed.runs.checkpoint import Checkpoint, config_digest, load_tensors, save_tensors
from secure_apfed.runs.encoders import encoders_of
from secure_apfed.runs.guarantee_text import guarantee_text
from secure_apfed.runs.opening import Opening
from secure_apfed.runs.outcome import Progress, RunResult
from secure_apfed.runs.recording import Recording
from secure_apfed.runs.solo import predictor_of
from secure_apfed.runs.spending import cross_checked, spent_in, worst_of
from secure_apfed.runs.writing import RunWriter

__all__ = ["run"]


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
        on_progress: called after every step, and again after an evaluation.

    Raises:
        ConfigError, DataError, ModelError: what does not fit, before anything is sent.
        CheckpointError: nothing to resume, the folder holds a run already, or the active refused
            more sums of it than `rules.refused_sums`.
        BudgetExhaustedError: the privacy budget is spent; the checkpoint stays.
        ProtocolError: a party broke the protocol; the run stops for all.
    """
    data = data or load_data(config.data, seed=config.seed)
    with RunWriter.open(folder, config, resume=resume) as writer:
        checkpoint = (
            Checkpoint.read(writer.folder.checkpoint, config) if writer and resume else None
        )
        try:
            return _play(config, data, writer, checkpoint, on_progress)
        finally:
            close_workers()


def _play(
    config: Config,
    data: VerticalData,
    writer: RunWriter | None,
    checkpoint: Checkpoint | None,
    on_progress: Callable[[Progress], None],
) -> RunResult:
    """One session: from the start or the checkpoint to the result."""
    folder = writer.folder.path if writer else None
    opening = Opening(config, data, checkpoint, logs=folder)
    session = _Session(opening, writer, on_progress, checkpoint)
    session.begin(checkpoint)
    accuracy = session.train()
    method = session.method
    recording = Recording(
        config=config, data=data, alignment=method.alignment, transcript=method.transcript,
        model=predictor_of(method.solo()), encoders=encoders_of(method),
    )  # fmt: skip
    result = RunResult(
        method=config.method,
        accuracy=accuracy,
        wire_bytes=method.transcript.wire_bytes,
        privacy=session.privacy(),
        recording=recording,
        folder=folder,
    )
    if writer:
        guarantee = guarantee_text(config, method, opening.labels.mechanism)
        writer.finish(method, result, guarantee=guarantee, seconds=session.seconds)
    # Only now: whatever becomes of the other accountants, the run is finished.
    privacy = cross_checked(result.privacy, method)
    if writer:
        writer.cross_check(privacy.accountants)
    return replace(result, privacy=privacy)


class _Session:
    """The training loop of one session, and where it stands."""

    def __init__(
        self,
        opening: Opening,
        writer: RunWriter | None,
        on_progress: Callable[[Progress], None],
        checkpoint: Checkpoint | None,
    ) -> None:
        self._opening, self._config, self._labels = opening, opening.config, opening.labels
        self._writer, self._on_progress = writer, on_progress
        self.method = opening.open(checkpoint.alignment if checkpoint else None)
        self._epoch = self._step = self._steps = 0
        self._accuracy: dict[str, float] = {}
        self._contracts: tuple[str, ...] = (self.method.contract.digest.hex(),)
        self._before, self._began = 0.0, time.monotonic()

    @property
    def seconds(self) -> float:
        """Wall-clock seconds of all sessions of this run."""
        return self._before + time.monotonic() - self._began

    def begin(self, checkpoint: Checkpoint | None) -> None:
        """Stand where the checkpoint says, or at the start."""
        if checkpoint:
            self._stand(checkpoint)
            self._before = checkpoint.seconds
        if self._writer:
            self._writer.begin(self.method, self._contracts, epoch=self._epoch)
            self._save()

    def _stand(self, checkpoint: Checkpoint) -> None:
        """Put the newly opened method where the checkpoint says."""
        self._epoch, self._step = checkpoint.epoch, checkpoint.step
        self.method.load_tensors(checkpoint.parties, next_step=checkpoint.step)
        self.method.transcript.resume(checkpoint.transcript)
        for party, ledger in self.method.ledgers.items():
            ledger.load_state_dict(load_tensors(checkpoint.ledgers[party]))
        self._contracts = (*checkpoint.contracts, self.method.contract.digest.hex())

    def _next_labels(self) -> None:
        """Answer the next part of the labels, and go on as a resumed run would: a new session."""
        self._labels.answer(self.method.solo())
        checkpoint = self._checkpoint()
        self.method = self._opening.open(checkpoint.alignment)
        self._stand(checkpoint)
        if self._writer:
            self._writer.agree(self.method, self._contracts)

    def train(self) -> Mapping[str, float]:
        """Play the epochs that are left; return the final accuracies."""
        epochs = self._config.train.epochs
        for epoch in range(self._epoch, epochs):
            loss = self._play_epoch(epoch)
            if epoch == 0:
                self._warn_without_help()
            self._epoch = epoch + 1
            last = self._epoch == epochs
            evaluated = last or self._epoch % self._config.train.evaluate_every == 0
            if evaluated:
                self._accuracy = self.method.evaluate(next_step=self._step, final=last)
                self._tell(self._epoch, loss)
            if self._writer:
                self._writer.record(self._metrics(loss, evaluated=evaluated))
            if self._labels.due(self._epoch):
                self._next_labels()
            if self._writer:
                self._save()
        if not self._accuracy:
            self._accuracy = self.method.evaluate(next_step=self._step, final=True)
        return self._accuracy

    def _metrics(self, loss: float, *, evaluated: bool) -> dict[str, Any]:
        """One line of metrics.jsonl."""
        spent, passive = self.privacy(), worst_of(self.method.contributions.values())
        return {
            "epoch": self._epoch,
            "step": self._step,
            "loss": loss,
            "accuracy": self._accuracy if evaluated else None,
            "epsilon": spent.epsilon_x,
            "epsilon_y": spent.epsilon_y,
            "epsilon_model": spent.epsilon_model,
            "delta": spent.delta,
            "releases": spent.releases,
            # Of the passive that spent most on noise under the sum; null without.
            "epsilon_passives": passive.epsilon_x if passive else None,
            "delta_passives": passive.delta if passive else None,
            "releases_passives": passive.releases if passive else None,
            "wire_bytes": self.method.transcript.wire_bytes,
            "seconds": self.seconds,
        }

    def _warn_without_help(self) -> None:
        """Say it where training alone would pass for training with others."""
        contract, flows = self.method.contract, self.method.transcript.flows
        if contract.passives and all(flow.kind is not Kind.REPRESENTATIONS for flow in flows):
            warnings.warn(
                "an epoch passed without help, so the active trains alone: no batch held the "
                f"{contract.minimum_batch} aligned rows that rules.minimum_batch asks for; raise "
                "train.batch_size or data.overlap",
                NoHelpWarning,
                stacklevel=2,
            )

    def _play_epoch(self, epoch: int) -> float:
        batches = begin_epoch(self.method, self._config, epoch)
        self._steps = self._step + (self._config.train.epochs - epoch) * len(batches)
        total = 0.0
        for index, rows_B in enumerate(batches):
            total += self.method.step(self._step, rows_B)
            self._step += 1
            self._tell(epoch + 1, total / (index + 1))
        return total / len(batches)

    def _tell(self, epoch: int, loss: float) -> None:
        self._on_progress(
            Progress(
                epoch=epoch,
                epochs=self._config.train.epochs,
                step=self._step,
                steps=self._steps,
                loss=loss,
                accuracy=self._accuracy.get(self.method.headline),
                epsilon=self.privacy().epsilon_x,
                wire_bytes=self.method.transcript.wire_bytes,
            )
        )

    def privacy(self) -> PrivacySpent:
        """What the party that spent most has spent."""
        return spent_in(self.method, self._labels.mechanism, delta=self._config.guard.delta)

    def _save(self) -> None:
        assert self._writer
        self._checkpoint().write(self._writer.folder.checkpoint)

    def _checkpoint(self) -> Checkpoint:
        """Where the run stands; the answers to labels are part of the active's own state."""
        method = self.method
        parties = dict(method.tensors())
        active = method.contract.active
        parties[active] = dict(parties[active]) | prefixed("labels", self._labels.tensors())
        return Checkpoint(
            config=config_digest(self._config),
            tables=self._opening.tables,
            epoch=self._epoch,
            step=self._step,
            noise_keys=self._opening.noise_keys,
            parties=parties,
            alignment=method.alignment,
            ledgers={
                party: save_tensors(ledger.state_dict()) for party, ledger in method.ledgers.items()
            },
            transcript=method.transcript.state_dict(),
            seconds=self.seconds,
            contracts=self._contracts,
        )

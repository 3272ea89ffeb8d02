"""One run from configuration to result: all parties, in this process, over recorded links.

Run by: the experimenter. The active's script says what comes when; the course that it follows
(epochs, batches, evaluation, checkpoints) is the same for every method. Whatever happens, what was
written is whole: see `folder` and `checkpoint`.
"""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from secure_apfed.config import Config
from secure_apfed.data import VerticalData, load_data
from secure_apfed.errors import NoHelpWarning
from secure_apfed.exchange import Kind, Links
from secure_apfed.learning.descent import prefixed
from secure_apfed.methods import Learner
from secure_apfed.methods.method import batches_of, end_all, save_all
from secure_apfed.methods.workers import close_workers
from secure_apfed.privacy import PrivacySpent
from secure_apfed.runs.checkpoint import Checkpoint, config_digest, load_tensors, save_tensors
from secure_apfed.runs.encoders import encoders_of
from secure_apfed.runs.opening import Opening
from secure_apfed.runs.outcome import Progress, RunResult
from secure_apfed.runs.recording import Recording
from secure_apfed.runs.solo import predictor_of
from secure_apfed.runs.spending import cross_checked, guarantee_text, spent_in, worst_of
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
    course = _Course(opening, writer, on_progress, checkpoint)
    course.begin(checkpoint)
    accuracy = course.train()
    session = course.session
    recording = Recording(
        config=config, data=data, alignment=session.alignment, transcript=session.transcript,
        model=predictor_of(session.learner.solo()), encoders=encoders_of(session),
    )  # fmt: skip
    result = RunResult(
        method=config.method,
        accuracy=accuracy,
        wire_bytes=session.transcript.wire_bytes,
        privacy=course.privacy(),
        recording=recording,
        folder=folder,
    )
    if writer:
        guarantee = guarantee_text(config, session, opening.labels.mechanism)
        writer.finish(session, result, guarantee=guarantee, seconds=course.seconds)
    # Only now: whatever becomes of the other accountants, the run is finished.
    privacy = cross_checked(result.privacy, session)
    if writer:
        writer.cross_check(privacy.accountants)
    return replace(result, privacy=privacy)


class _Course:
    """The course of one session, and where it stands; see `secure_apfed.methods.Course`."""

    def __init__(
        self,
        opening: Opening,
        writer: RunWriter | None,
        on_progress: Callable[[Progress], None],
        checkpoint: Checkpoint | None,
    ) -> None:
        self._opening, self._config, self._labels = opening, opening.config, opening.labels
        self._writer, self._on_progress = writer, on_progress
        self.session = opening.open(checkpoint.alignment if checkpoint else None)
        self._epoch = self._step = self._steps = self._of_epoch = 0
        self._loss = 0.0
        self._accuracy: dict[str, float] = {}
        self._contracts: tuple[str, ...] = (self.session.contract.digest.hex(),)
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
            self._writer.begin(self.session, self._contracts, epoch=self._epoch)
            self._save()

    def _stand(self, checkpoint: Checkpoint) -> None:
        """Put the newly opened session where the checkpoint says."""
        session = self.session
        self._epoch, self._step = checkpoint.epoch, checkpoint.step
        session.load_tensors(checkpoint.parties, next_step=checkpoint.step)
        session.transcript.resume(checkpoint.transcript)
        for party, ledger in session.ledgers.items():
            ledger.load_state_dict(load_tensors(checkpoint.ledgers[party]))
        self._contracts = (*checkpoint.contracts, session.contract.digest.hex())

    def train(self) -> Mapping[str, float]:
        """Play the epochs that are left; return the final accuracies."""
        self.session.transcript.begin_epoch(self._epoch)  # a method may send before its first one
        self.session.play(self._script(self.session.learner, self.session.links))
        return self._accuracy

    async def _script(self, learner: Learner, links: Links) -> None:
        """The active's script from the first step to the end of the session."""
        await learner.learn(links, self)
        if not self._accuracy:
            self._accuracy = await learner.evaluate(links, next_step=self._step, final=True)
        end_all(links, self.session.present, self._step)

    def epochs(self) -> Iterator[int]:
        """See `Course`; the transcript is told of each."""
        for epoch in range(self._epoch, self._config.train.epochs):
            self.session.transcript.begin_epoch(epoch)
            yield epoch

    def batches(self, learner: Learner, epoch: int) -> Iterator[tuple[int, Tensor]]:
        """See `Course`; a last batch that is too small is left out."""
        batches = batches_of(learner, self._config, epoch)
        self._steps = self._step + (self._config.train.epochs - epoch) * len(batches)
        self._of_epoch, self._loss = 0, 0.0
        for rows_B in batches:
            yield self._step, rows_B

    def stepped(self, loss: float) -> None:
        """See `Course`."""
        self.session.keep_opened(self._step)
        self._loss += loss
        self._of_epoch += 1
        self._step += 1
        self._tell(self._epoch + 1)

    async def finish_epoch(self, learner: Learner, links: Links) -> None:
        """See `Course`."""
        config = self._config.train
        if self._epoch == 0:
            self._warn_without_help()
        self._epoch += 1
        last = self._epoch == config.epochs
        evaluated = last or self._epoch % config.evaluate_every == 0
        if evaluated:
            self._accuracy = await learner.evaluate(links, next_step=self._step, final=last)
            self._tell(self._epoch)
        if self._writer:
            self._writer.record(self._metrics(evaluated=evaluated))
        if self._labels.due(self._epoch):
            self._labels.answer(learner.solo())
            data = self._labels.data()
            assert data.active.labels is not None
            learner.relabel(data.active.labels, data.train_rows)
        if self._writer:
            contract = self.session.contract
            may_leave = contract.passives if contract.when_a_party_leaves == "recover" else ()
            silent = await save_all(links, self.session.present, self._step, may_leave=may_leave)
            learner.left |= dict.fromkeys(silent, self._step)
            self._save()

    def _metrics(self, *, evaluated: bool) -> dict[str, Any]:
        """One line of metrics.jsonl."""
        spent, passive = self.privacy(), worst_of(self.session.contributions.values())
        return {
            "epoch": self._epoch,
            "step": self._step,
            "loss": self._mean_loss,
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
            "wire_bytes": self.session.transcript.wire_bytes,
            "seconds": self.seconds,
        }

    @property
    def _mean_loss(self) -> float:
        """Of the steps of this epoch."""
        return self._loss / max(1, self._of_epoch)

    def _warn_without_help(self) -> None:
        """Say it where training alone would pass for training with others."""
        contract, flows = self.session.contract, self.session.transcript.flows
        if contract.passives and all(flow.kind is not Kind.REPRESENTATIONS for flow in flows):
            warnings.warn(
                "an epoch passed without help, so the active trains alone: no batch held the "
                f"{contract.minimum_batch} aligned rows that rules.minimum_batch asks for; raise "
                "train.batch_size or data.overlap",
                NoHelpWarning,
                stacklevel=2,
            )

    def _tell(self, epoch: int) -> None:
        self._on_progress(
            Progress(
                epoch=epoch,
                epochs=self._config.train.epochs,
                step=self._step,
                steps=self._steps,
                loss=self._mean_loss,
                accuracy=self._accuracy.get(self.session.headline),
                epsilon=self.privacy().epsilon_x,
                wire_bytes=self.session.transcript.wire_bytes,
            )
        )

    def privacy(self) -> PrivacySpent:
        """What the party that spent most has spent."""
        return spent_in(self.session, self._labels.mechanism, delta=self._config.guard.delta)

    def _save(self) -> None:
        assert self._writer
        self._checkpoint().write(self._writer.folder.checkpoint)

    def _checkpoint(self) -> Checkpoint:
        """Where the run stands; the answers to labels are part of the active's own state."""
        session = self.session
        parties = dict(session.tensors())
        parties[session.active] = dict(parties[session.active]) | prefixed(
            "labels", self._labels.tensors()
        )
        ledgers = session.ledgers.items()
        return Checkpoint(
            config=config_digest(self._config),
            tables=self._opening.tables,
            epoch=self._epoch,
            step=self._step,
            noise_keys=self._opening.noise_keys,
            parties=parties,
            alignment=session.alignment,
            ledgers={party: save_tensors(ledger.state_dict()) for party, ledger in ledgers},
            transcript=session.transcript.state_dict(),
            seconds=self.seconds,
            contracts=self._contracts,
        )

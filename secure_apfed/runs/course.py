"""The course that the active's script follows: epochs, batches, evaluation, checkpoints, result.

Run by: the active, in the process that plays it, whatever else that process plays. It is the same
for every method, which trains by it or by a course of its own (`Learner.learn`).
"""

import math
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from apfed_protocols.errors import RunStoppedError
from secure_apfed.config import Config
from secure_apfed.errors import ConfigError, NoHelpWarning
from secure_apfed.exchange import Kind, Links
from secure_apfed.learning.descent import prefixed, without_prefix
from secure_apfed.methods import Learner, PartyState, Session, train
from secure_apfed.methods.method import batches_of, end_all, held_out_of, save_all
from secure_apfed.privacy.ledger import PrivacySpent
from secure_apfed.runs.judging import Judge, Judged
from secure_apfed.runs.outcome import Progress
from secure_apfed.runs.spending import guarantee_text, shown_figure, spent_in
from secure_apfed.runs.training_labels import TrainingLabels
from secure_apfed.runs.writing import RunWriter

__all__ = ["Course", "PartyBackError", "Watch"]


class PartyBackError(RunStoppedError):
    """The active ends a session so that a passive that it lacked takes part in the next one."""


class Watch:
    """Whoever plays the active, as a run's course has it to do with them.

    Args:
        writer: of their folder; None: nothing is written.
        on_progress: told after every step, and again after an evaluation.
    """

    def __init__(self, writer: RunWriter | None, on_progress: Callable[[Progress], None]) -> None:
        self.writer, self.on_progress = writer, on_progress

    def before_result(self) -> None:
        """What is to be kept before the result is written."""

    def returned(self, absent: Collection[str]) -> Collection[str]:
        """Those of the passives that a session goes on without who are back, at a checkpoint, so
        that all begin a new session with them.
        """
        return ()


class Course:
    """One session's course, and where it stands; see `secure_apfed.methods.Course`.

    Args:
        session: set up; labels: that it trains on.
        watch: of whoever plays the active.
        state: of the active, where the session goes on from one.

    Attributes:
        judged: the last evaluation; None before the first.

    Raises:
        ConfigError: fewer rows to train on than a batch needs, or a threshold between classes that
            are not two.
    """

    def __init__(
        self, session: Session, labels: TrainingLabels, watch: Watch, state: PartyState | None
    ) -> None:
        _require_rows(session.learner)
        config = session.entered.own.config
        assert isinstance(config, Config)
        self.session, self._config, self._labels = session, config, labels
        self._watch, self._writer = watch, watch.writer
        notes = state.notes if state else {}
        self._epoch, self._step = notes.get("epoch", 0), state.step if state else 0
        self._steps = self._of_epoch = 0
        self._loss = 0.0
        self._held_out: list[float] = list(notes.get("held_out", ()))
        self._judge = Judge(config, session, labels)
        self.judged: Judged | None = None
        self._heard = False  # what the passives charged, since the last evaluation
        self._spent = self._shown()
        self._best = without_prefix("best", state.tensors) if state else {}
        self._contracts = [*notes.get("contracts", []), session.contract.digest.hex()]
        self._before: float = notes.get("seconds", 0.0)
        self._began = time.monotonic()
        if self._writer:
            self._writer.begin(session, self._contracts, epoch=self._epoch)

    @property
    def seconds(self) -> float:
        """Wall-clock seconds of all sessions of this run."""
        return self._before + time.monotonic() - self._began

    async def play(self) -> None:
        """The active's script from the first step to the end of the session."""
        learner, links = self.session.learner, self.session.links
        self.session.transcript.begin_epoch(self._epoch)  # a method may send before its first one
        self._keep()
        await train(learner, links, self)
        if self.judged is None:
            await self._evaluate(final=True)
        if not self._heard and not self.session.helpers:
            await self._save(links)  # what the passives charged comes with it
        assert self.judged is not None
        # First the result, then the end: until then everybody can go on.
        if self._writer:
            self._watch.before_result()
            self._writer.finish(
                self.session,
                data=self._labels.held,
                judged=self.judged,
                privacy=self.privacy(),
                guarantee=guarantee_text(self._config, self.session, self._labels.mechanism),
                seconds=self.seconds,
            )
        self.session.entered.end()
        # Under restarts a dealer stays all along, in case that it is asked again.
        contract = self.session.contract
        dealers = contract.names("dealer") if contract.restarts else ()
        end_all(links, [*self.session.present, *dealers], self._step)

    @property
    def next_step(self) -> int:
        """See `Course`."""
        return self._step

    def is_last(self, epoch: int) -> bool:
        """See `Course`."""
        return epoch + 1 == self._config.train.epochs or self._is_late

    @property
    def _is_late(self) -> bool:
        """Whether the loss of held-out rows has not fallen for as long as there is patience."""
        patience, losses = self._config.train.patience, self._held_out
        return patience is not None and len(losses) - 1 - _first_least(losses) >= patience

    async def hold_out(self) -> None:
        """See `Course`."""
        if self._config.train.patience is None:
            return
        learner, links = self.session.learner, self.session.links
        loss = await learner.loss_on(links, self, held_out_of(learner, self._config))
        if math.isnan(loss):
            raise ConfigError(
                "train.patience: the loss of held-out rows cannot be told: training diverged, or "
                "fewer rows are held out than passives answer (rules.minimum_batch); lower "
                "train.learning_rate, or leave train.patience out"
            )
        self._held_out.append(loss)
        networks = learner.solo()
        if not self._config.train.keep_best or networks is None:
            return
        if _first_least(self._held_out) == len(self._held_out) - 1:
            self._best = {name: one.clone() for name, one in networks.state_dict().items()}
        if self.is_last(self._epoch):
            networks.load_state_dict(self._best)

    def epochs(self) -> Iterator[int]:
        """See `Course`; the transcript is told of each."""
        for epoch in range(self._epoch, self._config.train.epochs):
            if self._is_late:
                return
            self.session.transcript.begin_epoch(epoch)
            yield epoch

    def batches(self, epoch: int) -> Iterator[tuple[int, Tensor]]:
        """See `Course`; a last batch that is too small is left out."""
        batches = batches_of(self.session.learner, self._config, epoch)
        self._steps = self._step + (self._config.train.epochs - epoch) * len(batches)
        self._of_epoch, self._loss = 0, 0.0
        for rows_B in batches:
            yield self._step, rows_B

    def stepped(self, loss: float | None) -> None:
        """See `Course`."""
        self.session.keep_opened(self._step)
        self._step += 1
        if loss is None:
            self._steps += 1
        else:
            self._loss += loss
            self._of_epoch += 1
        self._tell(self._epoch + 1)

    async def finish_epoch(self) -> None:
        """See `Course`."""
        config, learner, links = self._config.train, self.session.learner, self.session.links
        if self._epoch == 0:
            self._warn_without_help()
        self._epoch += 1
        last = self.is_last(self._epoch - 1)
        evaluated = last or self._epoch % config.evaluate_every == 0
        if evaluated:
            await self._evaluate(final=last)
        answered = self._labels.due(self._epoch)
        # Labels are answered once: an epoch played again must not ask for others.
        saved = last or answered or self._epoch % self._config.checkpoint_every == 0
        if saved:
            await self._save_others(links)
        self._spent = self._shown()
        if evaluated:
            self._tell(self._epoch)
        if self._writer:
            self._writer.record(self._metrics(evaluated=evaluated))
        if answered:
            self._labels.answer(learner.solo())
            data = self._labels.data()
            assert data.table.labels is not None
            learner.relabel(data.table.labels, data.train_rows)
        if saved:
            self._keep()
            if not last:
                self._let_in(links)

    async def _evaluate(self, *, final: bool) -> None:
        learner, links = self.session.learner, self.session.links
        said = await learner.evaluate(links, next_step=self._step, final=final)
        self.judged = self._judge.judge(said, final=final)
        self._heard = False

    async def _save(self, links: Links) -> None:
        """Let all that help save what they are, then save what the active is."""
        await self._save_others(links)
        self._keep()

    async def _save_others(self, links: Links) -> None:
        """Let all that help save what they are, and hear what they charged."""
        session, contract = self.session, self.session.contract
        if session.entered.own.secrets.keeper is None:
            return
        may_leave = contract.passives if contract.silent_passive == "recover" else ()
        told = await save_all(links, session.present, self._step, may_leave=may_leave)
        for name, charged in told.items():
            if charged is None:
                session.learner.left[name] = self._step
            elif name not in session.helpers:
                session.charged[name] = charged
        self._heard = True

    def _let_in(self, links: Links) -> None:
        """End the session for a new one with all, where a passive is back that it lacks.

        Raises:
            PartyBackError: one is.
        """
        back = self._watch.returned(self.session.learner.left)
        if back:
            raise PartyBackError(
                f"checkpoint: {' and '.join(back)} fell silent and is back at step {self._step}; "
                f"{links.me} ends this session, and all go on in a new one from here"
            )

    def _keep(self) -> None:
        """Save what the active is; the answers to labels are part of it."""
        self.session.entered.keep(
            self._step,
            tensors=prefixed("labels", self._labels.tensors()) | prefixed("best", self._best),
            epoch=self._epoch,
            seconds=self.seconds,
            contracts=self._contracts,
            held_out=self._held_out,
        )

    def _metrics(self, *, evaluated: bool) -> dict[str, Any]:
        """One line of metrics.jsonl."""
        spent, passive = self.privacy(), self._worst_passive
        return {
            "epoch": self._epoch,
            "step": self._step,
            "loss": self._mean_loss,
            # Of rows that nobody learns from; null without patience.
            "held_out_loss": self._held_out[-1] if self._held_out else None,
            "accuracy": self.judged.accuracy if evaluated and self.judged else None,
            # By variant: the run's measure, and at the end all measures.
            "measures": self.judged.measures if evaluated and self.judged else None,
            "epsilon": spent.epsilon_x,
            "epsilon_y": spent.epsilon_y,
            "epsilon_model": spent.epsilon_model,
            "delta": spent.delta,
            "releases": spent.releases,
            # Of the passive that spent most on votes or contributions; null without.
            "epsilon_passives": passive["epsilon"] if passive else None,
            "delta_passives": passive["delta"] if passive else None,
            "releases_passives": passive["releases"] if passive else None,
            "wire_bytes": self.session.transcript.wire_bytes,
            "seconds": self.seconds,
        }

    @property
    def _worst_passive(self) -> Mapping[str, Any] | None:
        """The account of the passive that spent most on votes or contributions."""
        return max(
            self.session.contributed.values(), key=lambda one: float(one["epsilon"]), default=None
        )

    @property
    def _mean_loss(self) -> float | None:
        """Of the steps of this epoch; None under DP-SGD, whose noise does not cover it."""
        return None if self._config.dp_sgd else self._loss / max(1, self._of_epoch)

    def _warn_without_help(self) -> None:
        """Say it where training alone would pass for training with others."""
        contract, flows = self.session.contract, self.session.transcript.flows
        if "representations are sent" in self._config.method.happens and all(
            flow.kind is not Kind.REPRESENTATIONS for flow in flows
        ):
            warnings.warn(
                "an epoch passed without help, so the active trains alone: no batch held the "
                f"{contract.minimum_batch} aligned rows that rules.minimum_batch asks for; raise "
                "train.batch_size or data.overlap",
                NoHelpWarning,
                stacklevel=2,
            )

    def _shown(self) -> tuple[str, float | None]:
        """The figure of what leaves a party, and what it cost so far."""
        passive = self._worst_passive
        return shown_figure(
            self._config, self.privacy().epsilon_x, passive["epsilon"] if passive else None
        )

    def _tell(self, epoch: int) -> None:
        judged, own, measure = self.judged, self.session.headline, self._config.measure
        figure, epsilon = self._spent
        self._watch.on_progress(
            Progress(
                epoch=epoch,
                epochs=self._config.train.epochs,
                step=self._step,
                steps=self._steps,
                loss=self._mean_loss,
                accuracy=judged.accuracy.get(own) if judged else None,
                measure=measure,
                score=judged.measures.get(own, {}).get(measure) if judged else None,
                figure=figure,
                epsilon=epsilon,
                wire_bytes=self.session.transcript.wire_bytes,
            )
        )

    def privacy(self) -> PrivacySpent:
        """What the party that spent most has spent."""
        return spent_in(self.session, self._labels.mechanism, delta=self._config.delta)


def _first_least(values: Sequence[float]) -> int:
    """The place of the first of the least; -1 where there are none."""
    return values.index(min(values)) if values else -1


def _require_rows(learner: Learner) -> None:
    """Refuse to train on nothing.

    Raises:
        ConfigError: fewer rows than a batch needs.
    """
    if len(learner.training_rows) < learner.smallest_batch:
        raise ConfigError(
            f"there are {len(learner.training_rows)} rows to train on, fewer than the smallest "
            f"batch of {learner.smallest_batch}; the intersection holds too few training rows"
        )

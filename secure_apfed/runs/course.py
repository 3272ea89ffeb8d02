"""The course that the active's script follows: epochs, batches, evaluation, checkpoints, result.

Run by: the active, in the process that plays it, whatever else that process plays. It is the same
for every method, which trains by it or by a course of its own (`Learner.learn`).
"""

import math
import platform
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgpack
import torch
from safetensors.torch import save
from torch import Tensor, nn

from apfed_protocols.errors import RunStoppedError
from secure_apfed.config import Config
from secure_apfed.config.file import dump_config
from secure_apfed.data import ColumnEncoding, OwnData
from secure_apfed.data.drift import Extremes, extremes_of
from secure_apfed.errors import CheckpointError, ConfigError, NoHelpWarning
from secure_apfed.exchange import Kind, Links
from secure_apfed.files import make_private, own_subfolder, write_atomically
from secure_apfed.learning.compute import find_device
from secure_apfed.learning.descent import prefixed, without_prefix
from secure_apfed.learning.networks import ActiveNetworks, predictor_of
from secure_apfed.measures import (
    ACCURACY,
    MEASURES,
    Measure,
    Scored,
    ScoreRanges,
    best_threshold,
    measure_all,
    undefined_in,
)
from secure_apfed.methods import Learner, PartyState, Session, train
from secure_apfed.methods.method import batches_of, end_all, held_out_of, save_all
from secure_apfed.methods.terms import task_of
from secure_apfed.privacy import PrivacySpent
from secure_apfed.runs.folder import (
    RunFolder,
    Steps,
    keep_scored,
    no_checkpoint,
    remove_torn,
    save_tensors,
    signed,
)
from secure_apfed.runs.outcome import (
    AgreementOf,
    Attendance,
    Contributions,
    Outcome,
    Privacy,
    Progress,
    Recording,
    save_encoders,
    write_outcome,
)
from secure_apfed.runs.party_folder import PartyFolder, only_here
from secure_apfed.runs.spending import guarantee_text, shown_figure, spent_in
from secure_apfed.runs.training_labels import TrainingLabels
from secure_apfed.settings.model import ModelSettings
from secure_apfed.tasks import scored_rows

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["Course", "Judge", "Judged", "PartyBackError", "RunWriter", "Watch", "versions"]

_CARD_VERSION = 1
_PACKAGES = (
    "secure-apfed", "torch", "numpy", "tenseal", "cryptography", "opacus", "scikit-learn",
)  # fmt: skip


# How the active judges its model: measures on its test rows, by the run's settings.
#
# Run by: the active, or whoever plays it. Test rows only measure; a threshold is chosen on labels
# that the run may train on.


@dataclass(frozen=True, kw_only=True, eq=False)
class Judged:
    """What a model is found to be worth.

    Attributes:
        measure: that the run is judged by.
        said: of test rows, by inference variant.
        accuracy: by variant; NaN where it was asked for no row, or nothing is classified.
        measures: by variant and name: the run's measure, or all where the model is finished.
        threshold: that the active's model decides at; None: it takes the likeliest class.
        ranges: how its scores of training rows are spread, where it is finished and may be told.
        extremes: by column of numbers, between which these rows lie; likewise.
    """

    measure: str
    said: Mapping[str, Scored]
    accuracy: Mapping[str, float]
    measures: Mapping[str, Mapping[str, float]]
    threshold: float | None = None
    ranges: ScoreRanges | None = None
    extremes: Mapping[str, Extremes] = field(default_factory=dict)

    @property
    def told(self) -> dict[str, Any]:
        """What `RunResult` and `Outcome` say of it."""
        undefined = {name: undefined_in(scored) for name, scored in self.said.items()}
        return {
            "measure": self.measure, "accuracy": dict(self.accuracy), "measures": self.measures,
            "threshold": self.threshold,
            "undefined": {name: reasons for name, reasons in undefined.items() if reasons},
        }  # fmt: skip


class Judge:
    """Judges what a session's model says of test rows.

    Args:
        config: of the run.
        session: set up.
        labels: that it trains on.

    Raises:
        ConfigError: a threshold where there are not two classes with labels of both.
    """

    def __init__(self, config: Config, session: Session, labels: TrainingLabels) -> None:
        self._config, self._session, self._labels = config, session, labels
        if config.threshold is not None:
            _require_two_classes(labels)

    def judge(self, said: Mapping[str, Scored], *, final: bool) -> Judged:
        """Measure what is said; `final`: by all measures, at the threshold that is to be kept."""
        trained = self._training_rows() if final else None
        # What the card keeps is of rows, and private training must not tell of them without noise.
        kept = None if self._config.dp_sgd else trained
        threshold = self._threshold(trained)
        own = self._session.headline
        said = {
            name: scored.at(threshold) if name == own else scored for name, scored in said.items()
        }
        ours = MEASURES[self._config.measure]
        return Judged(
            measure=ours.name,
            said=said,
            accuracy={name: _accuracy(scored) for name, scored in said.items()},
            measures={
                name: measure_all(scored) if final else _defined(ours, scored)
                for name, scored in said.items()
            },
            threshold=threshold,
            ranges=None if kept is None else _ranges(kept),
            extremes={} if kept is None else self._extremes(),
        )

    def _extremes(self) -> dict[str, Extremes]:
        data = self._labels.data()
        encoding = data.table.encoding
        if not isinstance(encoding, ColumnEncoding):
            return {}
        return extremes_of(encoding, data.table.features[data.train_rows])

    def _threshold(self, trained: Scored | None) -> float | None:
        chosen = self._config.threshold
        if not isinstance(chosen, str):
            return chosen
        return None if trained is None else best_threshold(trained, chosen)

    def _training_rows(self) -> Scored | None:
        """What the finished model says of labelled training rows; None: it needs others for it."""
        network = predictor_of(self._session.learner.solo())
        if network is None:
            return None
        data = self._labels.data()
        features_N, labels_N = data.table.features, data.table.labels
        assert labels_N is not None
        dtype = next((one.dtype for one in network.parameters()), torch.float32)

        def predict(rows_B: Tensor) -> Tensor:
            scores_BK: Tensor = network(features_N[rows_B].to(dtype))
            return scores_BK

        task = task_of(self._session.entered.own)
        return scored_rows(
            task, predict, data.labelled_rows, labels_N=labels_N, features_N=features_N
        )


def _accuracy(scored: Scored) -> float:
    return ACCURACY.of(scored) if scored.classes else math.nan


def _defined(measure: Measure, scored: Scored) -> dict[str, float]:
    value = measure.of(scored)
    return {} if math.isnan(value) else {measure.name: value}


def _ranges(trained: Scored) -> ScoreRanges | None:
    """None of no rows, and of a training that diverged."""
    told = len(trained.truth) and trained.finite
    return ScoreRanges.of(trained.scores) if told else None


def _require_two_classes(labels: TrainingLabels) -> None:
    held = labels.held
    assert held.table.labels is not None
    # Of labels that a mechanism answers nobody is told which there are.
    answered = not labels.mechanism.unsafe
    labelled = 2 if answered else len(held.table.labels[held.labelled_rows].unique())
    if len(held.classes) != 2 or labelled != 2:
        raise ConfigError(
            f"threshold: it decides between two classes with labelled rows of both, and "
            f"{held.table.name} has {len(held.classes)} classes"
            f"{'' if answered else f' and labels of {labelled}'}; leave it out"
        )


# Writing a run folder: configuration, contract, versions, metrics, model, transcript, result.


def _board(folder: Path, epoch: int) -> "SummaryWriter | None":
    """Where curves go, from this epoch on; None without TensorBoard, an optional extra."""
    if find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(own_subfolder(folder)), purge_step=epoch)


def versions(device: torch.device) -> dict[str, str]:
    """Versions of what a run's numbers depend on, the machine, and where there it computes."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed as a package"
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
    return {
        "python": platform.python_version(),
        **found,
        "system": f"{platform.system()} {platform.machine()}",
        "device": str(device),
        "gpu": gpu,
    }


class RunWriter:
    """Writes one run's folder while it runs.

    Args:
        folder: of the run, or of the active where it runs apart from the others.
        config: of the run.
        apart: whether it does.
    """

    def __init__(self, folder: RunFolder, config: Config, *, apart: bool = False) -> None:
        self.folder, self._config, self._apart = folder, config, apart
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
        active = PartyFolder(folder.party(config.data.active_name))
        if resume:
            _refuse_nothing_to_resume(folder, active)
        make_private(path)
        with only_here(path):
            remove_torn(path)
            if not resume:
                _clear(folder, active)
            own_subfolder(folder.parties)
            yield cls(folder, config)

    def begin(self, session: Session, contracts: Sequence[str], *, epoch: int) -> None:
        """Write what is known before training."""
        folder, config = self.folder, self._config
        write_atomically(folder.config, dump_config(config).encode())
        folder.write_json(
            folder.contract,
            {**signed(session.contract, session.signatures), "sessions": list(contracts)},
        )
        folder.write_json(
            folder.seeds,
            {
                "seed": config.seed,
                "parties": config.party_seeds,
                "noise": config.guard.noise,
            },
        )
        folder.write_json(folder.versions, versions(find_device(config.train.device)))
        folder.keep_metrics(epoch)
        self._board = _board(folder.tensorboard, epoch + 1)

    def record(self, record: Mapping[str, Any]) -> None:
        """Add one epoch to the metrics, and to the TensorBoard file if there is one."""
        self.folder.append_metrics(record)
        if self._board is None:
            return
        scalars = {**record, **{f"accuracy/{k}": v for k, v in (record["accuracy"] or {}).items()}}
        for variant, values in (record["measures"] or {}).items():
            scalars |= {f"{name}/{variant}": value for name, value in values.items()}
        for name, value in scalars.items():
            if isinstance(value, int | float) and name != "epoch":
                self._board.add_scalar(name, value, record["epoch"])

    def finish(
        self,
        session: Session,
        *,
        data: OwnData,
        judged: Judged,
        privacy: PrivacySpent,
        guarantee: str,
        seconds: float,
    ) -> None:
        """Write the results; `result.json` comes last and marks the run as finished."""
        folder, transcript = self.folder, session.transcript
        if self._board is not None:
            self._board.close()
        folder.write_json(folder.flows, [asdict(flow) for flow in transcript.flows])
        aligned = session.alignment.get(session.active)
        outcome = Outcome(
            method=self._config.method.name,
            **judged.told,
            wire_bytes=transcript.wire_bytes,
            privacy=Privacy.of(privacy),
            contributions={
                passive: Contributions.model_validate(account)
                for passive, account in session.contributed.items()
            },
            seconds=seconds,
            aligned_rows=0 if aligned is None else len(aligned),
            train_rows=len(data.train_rows),
            labelled_rows=len(data.labelled_rows),
            test_rows=len(data.test_rows),
            sum=session.secure_sum,
            agreement=_agreement_in(session),
            attendance=Attendance.model_validate(session.attendance()),
            guarantee=guarantee,
            apart=self._apart,
        )
        card = self._card(session, data, outcome, judged)
        keep_scored(folder, judged.said)
        _save_model(folder, session.learner.solo(), card, self._config.model)
        write_outcome(folder, outcome)

    def _card(
        self, session: Session, data: OwnData, outcome: Outcome, judged: Judged
    ) -> dict[str, Any]:
        """What there is to know of the model."""
        privacy = outcome.privacy
        return {
            "method": self._config.method.name,
            "run": self._config.name,
            "dataset": self._config.data.dataset,
            "party": data.table.name,
            "task": self._config.task,
            "classes": list(data.classes),
            "targets": None if data.targets is None else data.targets.model_dump(),
            "encoding": data.table.encoding.model_dump(mode="json"),
            "accuracy": dict(outcome.accuracy),
            "measures": outcome.measures,
            "threshold": outcome.threshold,
            "scores_in_training":
                None if judged.ranges is None else judged.ranges.model_dump(mode="json"),
            "columns_in_training": judged.extremes,
            "guarantee": outcome.guarantee,
            "epsilon": {"representations": privacy.epsilon_x, "labels": privacy.epsilon_y,
                        "model": privacy.epsilon_model, "delta": privacy.delta,
                        "releases": privacy.releases},
            "contract": session.contract.digest.hex(),
        }  # fmt: skip

    def cross_check(self, accountants: Mapping[str, float | str]) -> None:
        """Write what other accountants say of epsilon_x; the run is finished already."""
        if accountants:
            self.folder.write_json(self.folder.accountants, dict(accountants))

    def keep(self, recording: Recording) -> None:
        """Write what only the experimenter holds, for attacks on the finished run."""
        folder, transcript = self.folder, msgpack.packb(recording.transcript.state_dict())
        save_encoders(folder, recording.encoders)
        write_atomically(folder.alignment, save_tensors(recording.alignment), private=True)
        write_atomically(folder.transcript, transcript, private=True)


def _refuse_nothing_to_resume(folder: RunFolder, active: PartyFolder) -> None:
    led = RunFolder(active.path).result.exists()  # apart from the others, and not gathered yet
    if active.steps.found() or (led and not folder.result.exists()):
        return
    if folder.result.exists():
        raise CheckpointError(f"{folder.path} holds a finished run; there is nothing to resume")
    raise no_checkpoint(active.path)


def _clear(folder: RunFolder, active: PartyFolder) -> None:
    """Make room for a new run; a run that trained has a checkpoint of the active, or a result."""
    if active.steps.found():
        raise CheckpointError(
            f"{folder.path} holds a run already; resume it, or choose another folder"
        )
    if folder.result.exists():
        raise CheckpointError(
            f"{folder.path} holds a run already, which is finished; choose another folder"
        )
    found = folder.parties.iterdir() if folder.parties.is_dir() else ()
    parties = [PartyFolder(party) for party in found if not party.is_symlink()]
    for party in parties:
        party.require_no_releases()
    Steps(folder.path, "recording").clear()
    for party in parties:
        party.steps.clear()  # of a start that was broken off before training


def _agreement_in(session: Session) -> dict[str, AgreementOf]:
    """How far votes agree, where each passive's are read."""
    agreement = session.learner.agreement
    return {name: AgreementOf.model_validate(asdict(one)) for name, one in agreement.items()}


def _save_model(
    folder: RunFolder, networks: ActiveNetworks | None, card: dict[str, Any], model: ModelSettings
) -> None:
    """Write the parameters and the card; without networks, a card that says why."""
    card = {"card_version": _CARD_VERSION, "model": model.model_dump(mode="json"), **card}
    card["predicts_alone"] = networks is not None
    if networks is not None:
        state = nn.ModuleDict({"encoder": networks.encoder, "head": networks.head}).state_dict()
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
        write_atomically(folder.model, save(tensors))
    folder.write_json(folder.card, card)


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

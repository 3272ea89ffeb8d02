"""The course that the active's script follows: epochs, batches, evaluation, checkpoints, result.

Run by: the active, in the process that plays it, whatever else that process plays. It is the same
for every method, which trains by it or by a course of its own (`Learner.learn`).
"""

import math
import platform
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
import torch
from torch import Tensor, nn

from apfed_protocols.errors import RunStoppedError
from secure_apfed.config import Config
from secure_apfed.config.file import dump_settings
from secure_apfed.data import OwnData
from secure_apfed.data.lazy_rows import score_in_parts
from secure_apfed.errors import ConfigError, NoHelpWarning
from secure_apfed.exchange import Kind, Links, Transcript
from secure_apfed.files import own_subfolder, write_atomically
from secure_apfed.formats import MODEL_CARD
from secure_apfed.learning.calibration import SKEWED, is_rare
from secure_apfed.learning.descent import add_prefix, find_device, predictor_of, remove_prefix
from secure_apfed.measures import (
    ACCURACY,
    MEASURES,
    Measure,
    Scored,
    best_threshold,
    cheapest_threshold,
    explain_undefined_measures,
    measure_all,
)
from secure_apfed.methods import METHODS, PartyCheckpoint, Session, train_epochs
from secure_apfed.methods.method import end_all, pick_held_out_rows, save_all, split_batches
from secure_apfed.methods.terms import task_of
from secure_apfed.past_sessions import NONE_BEFORE
from secure_apfed.privacy.ledger import PrivacySpent
from secure_apfed.promises import Promise, promises_of, worst_promise
from secure_apfed.runs.calibration import calibrate_networks
from secure_apfed.runs.departures import describe_departures, describe_shared_organisations
from secure_apfed.runs.folder import RunFolder, describe_contract, save_scores, save_tensors
from secure_apfed.runs.outcome import (
    Calibration,
    Outcome,
    Progress,
    Ranking,
    Recording,
    RunResult,
    write_outcome,
)
from secure_apfed.runs.spending import add_cross_checks, guarantee_text, spent_in
from secure_apfed.runs.training_labels import TrainingLabels, restore_older_state
from secure_apfed.tasks import score_rows

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_PACKAGES = (
    "secure-apfed",
    "torch",
    "numpy",
    "tenseal",
    "cryptography",
    "opacus",
    "scikit-learn",
)


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelEvaluation:
    """The measured worth of a model, by inference variant: by the measure of the run, or by all
    measures once it is finished.

    Without threshold it takes the likeliest class. `never_predicted` names the classes with labels
    that no test row is given, each with the threshold that labelled training rows would choose.
    """

    measure: str
    said: Mapping[str, Scored]
    accuracy: Mapping[str, float]
    measures: Mapping[str, Mapping[str, float]]
    threshold: float | None = None
    calibration: Calibration | None = None
    ranking: Ranking | None = None
    never_predicted: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def result_fields(self) -> dict[str, Any]:
        undefined = {name: explain_undefined_measures(scored) for name, scored in self.said.items()}
        return {
            "measure": self.measure,
            "accuracy": dict(self.accuracy),
            "measures": self.measures,
            "threshold": self.threshold,
            "calibration": self.calibration,
            "ranking": self.ranking,
            "undefined": {name: reasons for name, reasons in undefined.items() if reasons},
            "measured_rows": {name: len(scored.truth) for name, scored in self.said.items()},
            "never_predicted": dict(self.never_predicted),
        }


def evaluate_scores(
    session: Session,
    labels: TrainingLabels,
    said: Mapping[str, Scored],
    *,
    final: bool,
    calibration: Calibration | None = None,
) -> ModelEvaluation:
    """Measure what the active's model says of test rows, which only measure."""
    config = _config_of(session)
    trained = _score_training_rows(session, labels) if final else None
    threshold = _pick_threshold(session, labels, trained, calibrated=calibration is not None)
    own = session.headline
    measure = MEASURES[config.measure]
    said = {
        name: scored.replace_threshold(threshold) if name == own else scored
        for name, scored in said.items()
    }
    return ModelEvaluation(
        measure=measure.name,
        said=said,
        accuracy={
            name: ACCURACY.compute_value(scored) if scored.classes else math.nan
            for name, scored in said.items()
        },
        measures={
            name: measure_all(scored) if final else _compute_defined_measure(measure, scored)
            for name, scored in said.items()
        },
        threshold=threshold,
        calibration=calibration,
        ranking=_measure_ranking(labels, said.get(own), measure) if final else None,
        never_predicted=find_unpredicted_classes(session, labels, said.get(own), trained)
        if final
        else {},
    )


def find_unpredicted_classes(
    session: Session, labels: TrainingLabels, tested: Scored | None, trained: Scored | None
) -> dict[str, float | None]:
    """Return the classes with labels that no test row is given, and the threshold that would.

    Args:
        tested, trained: scores of test rows and of labelled training rows; None: there are none,
            as of training rows where the model needs others for each.

    Returns:
        By class the threshold of two classes that reaches the best balanced accuracy on labelled
        training rows; None under `dp_sgd`, whose guarantee it would not have, of more classes, and
        without scores of training rows.
    """
    if tested is None or not tested.classes or not len(tested.truth):
        return {}
    data = labels.build_data()
    assert data.table.labels is not None
    known = np.unique(data.table.labels[data.labelled_rows].numpy())
    absent = np.setdiff1d(known, tested.class_predictions)
    threshold = None
    two = tested.classes == len(known) == 2
    if two and trained is not None and _config_of(session).dp_sgd is None:
        threshold = best_threshold(trained, "balanced_accuracy")
    return {labels.held.classes[place]: threshold for place in absent.tolist()}


def _pick_threshold(
    session: Session, labels: TrainingLabels, trained: Scored | None, *, calibrated: bool
) -> float | None:
    """Return the threshold of the settings; None also while training goes on and none is chosen
    yet.
    """
    said = _config_of(session).threshold
    if said is None or isinstance(said, float):
        return said
    if trained is None:
        return None
    if isinstance(said, str):
        return best_threshold(trained, said)
    if said.cost is not None:
        return 1 / (1 + said.cost) if calibrated else cheapest_threshold(trained, said.cost)
    assert said.rate is not None
    every = _score_training_rows(session, labels, labels.build_data().train_rows)
    assert every is not None
    least = np.finfo(np.float32).tiny
    most = 1 - np.finfo(np.float32).epsneg
    return float(np.quantile(every.scores[:, 1], 1 - said.rate).clip(least, most))


def _measure_ranking(
    labels: TrainingLabels, scored: Scored | None, measure: Measure
) -> Ranking | None:
    """Return the ranking of two classes, if the run is judged by one or one class is rare."""
    if scored is None or scored.classes != 2 or not len(scored.truth):
        return None
    if not measure.ranks and not is_rare(scored.truth.astype(np.int64), SKEWED):
        return None
    return Ranking.from_scores(scored, labels.held.classes[1])


def _score_training_rows(
    session: Session, labels: TrainingLabels, rows: Tensor | None = None
) -> Scored | None:
    """Return the finished model's scores of these training rows, or of those with a label.

    None: the model needs other parties to predict.
    """
    network = predictor_of(session.learner.get_solo_networks())
    if network is None:
        return None
    data = labels.build_data()
    features_N = data.table.features
    labels_N = data.table.labels
    assert labels_N is not None
    dtype = next((parameter.dtype for parameter in network.parameters()), torch.float32)

    def score_features(features_B: Tensor) -> Tensor:
        scores_BK: Tensor = network(features_B.to(dtype))
        return scores_BK

    predict = partial(score_in_parts, score_features, features_N)
    asked = data.labelled_rows if rows is None else rows
    return score_rows(task_of(session.entered.own), predict, asked, labels_N)


def _config_of(session: Session) -> Config:
    config = session.entered.own.config
    assert isinstance(config, Config)
    return config


def _compute_defined_measure(measure: Measure, scored: Scored) -> dict[str, float]:
    value = measure.compute_value(scored)
    return {} if math.isnan(value) else {measure.name: value}


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


def list_versions(device: torch.device) -> dict[str, str]:
    """Return the versions that a run's numbers depend on, the machine, and the device there."""
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
    """A writer of a run's folder while it runs.

    `heard`: what the active received, if it runs apart and the folder is its own.
    """

    def __init__(
        self, folder: RunFolder, config: Config, *, heard: Transcript | None = None
    ) -> None:
        self.folder = folder
        self._config = config
        self._heard = heard
        self._board: SummaryWriter | None = None

    def start_run(self, session: Session, contracts: Sequence[str], *, epoch: int) -> None:
        folder = self.folder
        config = self._config
        write_atomically(folder.config, dump_settings(config).encode())
        folder.write_json(
            folder.contract,
            {
                **describe_contract(session.contract, session.signatures),
                "sessions": list(contracts),
            },
        )
        seeds = {
            "seed": config.seed,
            "parties": config.party_seeds,
            "noise": config.guard.noise,
        }
        folder.write_json(folder.seeds, seeds)
        folder.write_json(folder.versions, list_versions(find_device(config.train.device)))
        folder.keep_metrics(epoch)
        if find_spec("tensorboard") is not None:  # an optional extra
            from torch.utils.tensorboard import SummaryWriter

            curves = own_subfolder(folder.tensorboard)
            self._board = SummaryWriter(str(curves), purge_step=epoch + 1)

    def record_epoch(self, record: Mapping[str, Any]) -> None:
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

    def write_results(
        self,
        session: Session,
        data: OwnData,
        judged: ModelEvaluation,
        *,
        privacy: PrivacySpent,
        guarantee: str,
        course: "TrainingLoop",
    ) -> None:
        """Write model, card and results; `result.json` comes last and marks the run as finished."""
        folder = self.folder
        transcript = session.transcript
        learner = session.learner
        if self._board is not None:
            self._board.close()
        heard = () if self._heard is None else self._heard.flows
        folder.write_json(folder.flows, [asdict(flow) for flow in (*transcript.flows, *heard)])
        if session.common:
            folder.write_json(folder.common, [one.model_dump() for one in session.common.values()])
        aligned = session.alignment.get(session.active)
        content = {
            "method": self._config.method.name,
            **judged.result_fields,
            "wire_bytes": transcript.wire_bytes,
            "privacy": asdict(privacy),
            "contributions": session.passive_accounts,
            "promises": [
                promise.as_json()
                for promise in promises_of(
                    self._config, privacy, contributions=session.passive_accounts
                )
            ],
            "stated": session.charge_reports,
            "seconds": course.seconds,
            "sessions": course.sessions,
            "steps": course.steps,
            "aligned_rows": 0 if aligned is None else len(aligned),
            "train_rows": len(data.train_rows),
            "labelled_rows": len(data.labelled_rows),
            "test_rows": len(data.test_rows),
            "sum": session.secure_sum,
            "agreement": learner.agreement,
            "help": learner.help,
            "local_models": learner.local_models,
            "attendance": session.describe_attendance(),
            "guarantee": guarantee,
            "apart": self._heard is not None,
            "less_protected": describe_departures(self._config),
            "shared_organisations": describe_shared_organisations(folder.path),
        }
        if session.statements:
            said = {name: of.as_json(name) for name, of in session.statements.items()}
            folder.write_json(folder.statements, said)
        outcome = Outcome.model_validate(content)
        card = self._build_card(session, data, outcome, judged)
        rows = METHODS[self._config.method.name].find_testable_rows(
            data, torch.empty(0, dtype=torch.int64) if aligned is None else aligned
        )
        save_scores(folder.scored, judged.said, tested=torch.isin(data.test_rows, rows))
        networks = learner.get_solo_networks() or learner.get_fallback_networks()
        if networks is not None:
            parts = nn.ModuleDict({"encoder": networks.encoder, "head": networks.head})
            write_atomically(folder.model, save_tensors(parts.state_dict()))
        folder.write_json(folder.card, {**card, "predicts_alone": networks is not None})
        write_outcome(folder, outcome)

    def _build_card(
        self, session: Session, data: OwnData, outcome: Outcome, judged: ModelEvaluation
    ) -> dict[str, Any]:
        privacy = outcome.privacy
        return {
            MODEL_CARD.key: MODEL_CARD.number,
            "model": (session.learner.model or self._config.model).model_dump(mode="json"),
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
            "guarantee": outcome.guarantee,
            "epsilon": {
                "representations": privacy.epsilon_x,
                "labels": privacy.epsilon_y,
                "model": privacy.epsilon_model,
                "delta": privacy.delta,
                "releases": privacy.releases,
            },
            "promises": [promise.model_dump() for promise in outcome.promises],
            "contract": session.contract.digest.hex(),
        }

    def write_recording(self, recording: Recording) -> None:
        """Write what only the experimenter holds, for attacks on the finished run."""
        folder = self.folder
        state = recording.transcript.state_dict()
        if recording.encoders:
            weights: dict[str, Tensor] = {}
            for name, encoder in recording.encoders.items():
                weights |= add_prefix(name, encoder.state_dict())
            write_atomically(folder.encoders, save_tensors(weights), private=True)
        write_atomically(folder.alignment, save_tensors(recording.alignment), private=True)
        write_atomically(folder.transcript, msgpack.packb(state), private=True)


class PartyBackError(RunStoppedError):
    """The active ends a session so that a passive that it lacked takes part in the next one."""


class RunCallbacks:
    """The operator of the active, as a course meets it; without a writer nothing is written."""

    def __init__(self, writer: RunWriter | None, on_progress: Callable[[Progress], None]) -> None:
        self.writer = writer
        self.on_progress = on_progress
        self.past = NONE_BEFORE  # sessions of this run, by what was kept of them

    def prepare_loop(self, session: Session, state: PartyCheckpoint | None) -> None:
        """Prepare for the course, at a state of the active or at the start."""

    def build_recording(self) -> Recording | None:
        """Return the messages of all parties, if somebody holds them."""
        return None

    def find_rejoining(self, absent: Collection[str]) -> Collection[str]:
        """Return which absent parties are back at a checkpoint, so that all begin a new session
        with them.
        """
        return ()


class TrainingLoop:
    """One session's course, and where it stands; see `secure_apfed.methods.Course`."""

    def __init__(
        self,
        session: Session,
        labels: TrainingLabels,
        watch: RunCallbacks,
        state: PartyCheckpoint | None,
    ) -> None:
        state = restore_older_state(state, labels, session)
        watch.prepare_loop(session, state)
        rows = len(session.learner.training_rows)
        least = session.learner.smallest_batch
        if rows < least:
            raise ConfigError(
                f"there are {rows} rows to train on, fewer than the smallest batch of {least}; the "
                "intersection holds too few training rows"
            )
        self.session = session
        self._config = _config_of(session)
        self._labels = labels
        if self._config.threshold is not None:
            _require_two_classes(labels)
        self._watch = watch
        self._writer = watch.writer
        notes = state.notes if state else {}
        self._epoch = notes.get("epoch", 0)
        self._step = state.step if state else 0
        self._steps = self._of_epoch = 0
        self._sum = 0.0
        # Of the steps of this epoch; None under DP-SGD, whose noise does not cover it.
        self._loss = None if self._config.dp_sgd else 0.0
        self._held_out: list[float] = list(notes.get("held_out", ()))
        self.judged: ModelEvaluation | None = None
        self._heard = False  # what the passives charged, since the last evaluation
        self._spent = self._find_worst_promise()
        self._best = remove_prefix("best", state.tensors) if state else {}
        self._contracts = [*notes.get("contracts", []), session.contract.digest.hex()]
        past = watch.past
        # A log knows of what came after the checkpoint; some methods send nothing in a step.
        self._before: float = max(notes.get("seconds", 0.0), past.seconds)
        self._steps_before: int = max(notes.get("steps", self._step), past.steps)
        self._first_step = self._step
        self.sessions = max(len(self._contracts), past.sessions + 1)
        self._began = time.monotonic()
        if self._writer:
            self._writer.start_run(session, self._contracts, epoch=self._epoch)

    @property
    def seconds(self) -> float:
        """The seconds of training, in all sessions."""
        return self._before + time.monotonic() - self._began

    @property
    def steps(self) -> int:
        """Steps in all sessions; those that are played again count again."""
        return self._steps_before + self._step - self._first_step

    async def run(self) -> None:
        learner = self.session.learner
        links = self.session.links
        # A method may send before its first epoch, or after its last one, which is gone on with.
        over = self._epoch == self._config.train.epochs or self._is_late
        self.session.transcript.begin_epoch(self._epoch - over)
        self._save_checkpoint()
        await train_epochs(learner, links, self)
        if self.judged is None:
            await self._evaluate_model(final=True)
        if not self._heard and not self.session.helpers:
            await self._save_at_helpers(links)  # what the passives charged comes with it
            self._save_checkpoint()
        assert self.judged is not None
        # First the result, then the end: until then everybody can go on.
        if self._writer:
            if recording := self._watch.build_recording():
                self._writer.write_recording(recording)
            guarantee = guarantee_text(self._config, self.session, self._labels.mechanism)
            self._writer.write_results(
                self.session,
                self._labels.held,
                self.judged,
                privacy=self.compute_privacy(),
                guarantee=guarantee,
                course=self,
            )
        self.session.entered.finish_part()
        # Under restarts a dealer stays all along, in case that it is asked again.
        contract = self.session.contract
        dealers = contract.list_names("dealer") if contract.restarts else ()
        end_all(links, [*self.session.present, *dealers], self._step)

    def build_result(self) -> RunResult:
        """Return the result of the finished run, beside the figures of other accountants.

        Those take seconds and come last: whatever becomes of them, the run is finished.
        """
        assert self.judged is not None
        privacy = add_cross_checks(self.compute_privacy(), self.session)
        if self._writer and privacy.accountants:
            folder = self._writer.folder
            folder.write_json(folder.accountants, dict(privacy.accountants))
        return RunResult(
            method=self._config.method.name,
            **self.judged.result_fields,
            wire_bytes=self.session.transcript.wire_bytes,
            sessions=self.sessions,
            steps=self.steps,
            privacy=privacy,
            contributions=self.session.passive_accounts,
            promises=promises_of(
                self._config, privacy, contributions=self.session.passive_accounts
            ),
            stated=self.session.charge_reports,
            trained=self._labels.build_data(),
            recorded=self._watch.build_recording(),
            help=self.session.learner.help,
            said=self.judged.said,
            folder=self._writer.folder.path if self._writer else None,
        )

    @property
    def next_step(self) -> int:
        return self._step

    def is_last(self, epoch: int) -> bool:
        return epoch + 1 == self._config.train.epochs or self._is_late

    @property
    def _is_late(self) -> bool:
        """True if the loss of held-out rows has not fallen for as long as there is patience."""
        patience = self._config.train.patience
        losses = self._held_out
        return patience is not None and len(losses) - 1 - _first_least(losses) >= patience

    async def note_held_out_loss(self) -> None:
        if self._config.train.patience is None:
            return
        learner = self.session.learner
        links = self.session.links
        loss = await learner.compute_held_out_loss(
            links, self, pick_held_out_rows(learner, self._config)
        )
        if math.isnan(loss):
            raise ConfigError(
                "train.patience: the loss of held-out rows cannot be told: training diverged, or "
                "fewer rows are held out than passives answer (rules.minimum_batch); lower "
                "train.learning_rate, or leave train.patience out"
            )
        self._held_out.append(loss)
        networks = learner.get_solo_networks()
        if not self._config.train.keep_best or networks is None:
            return
        if _first_least(self._held_out) == len(self._held_out) - 1:
            self._best = {name: tensor.clone() for name, tensor in networks.state_dict().items()}
        if self.is_last(self._epoch):
            networks.load_state_dict(self._best)

    def iterate_epochs(self) -> Iterator[int]:
        for epoch in range(self._epoch, self._config.train.epochs):
            if self._is_late:
                return
            self.session.transcript.begin_epoch(epoch)
            yield epoch

    def iterate_batches(self, epoch: int) -> Iterator[tuple[int, Tensor]]:
        """See `Course`; a last batch that is too small is left out."""
        batches = split_batches(self.session.learner, self._config, epoch)
        self._steps = self._step + (self._config.train.epochs - epoch) * len(batches)
        self._of_epoch = 0
        self._sum = 0.0
        self._loss = 0.0 if self._tells_loss else None
        for rows_B in batches:
            yield self._step, rows_B

    def count_step(self, loss: float | None) -> None:
        self.session.record_sum(self._step)
        self._step += 1
        if loss is None:
            self._steps += 1
        else:
            self._sum += loss
            self._of_epoch += 1
            if self._tells_loss:
                self._loss = self._sum / self._of_epoch
        self._report_progress(self._epoch + 1)

    @property
    def _tells_loss(self) -> bool:
        """True if there is a task loss, and it may be shown."""
        return self._config.dp_sgd is None and not self._config.train.meets_labels_after

    async def finish_epoch(self, *, last: bool) -> None:
        config = self._config.train
        learner = self.session.learner
        links = self.session.links
        if self._epoch == 0:
            self._warn_without_help()
        self._epoch += 1
        is_due = self._epoch % config.evaluate_every == 0 and not config.meets_labels_after
        evaluated = last or is_due
        if evaluated:
            await self._evaluate_model(final=last)
        answered = self._labels.is_due(self._epoch)
        # Labels are answered once: an epoch played again must not ask for others.
        saved = last or answered or self._epoch % self._config.checkpoint_every == 0
        if saved:
            await self._save_at_helpers(links)
        self._spent = self._find_worst_promise()
        if evaluated:
            self._report_progress(self._epoch)
        if self._writer:
            self._writer.record_epoch(self._build_metrics(evaluated=evaluated))
        if answered:
            self._labels.answer_stage(learner.get_solo_networks())
            data = self._labels.build_data()
            assert data.table.labels is not None
            learner.relabel(data.table.labels, data.train_rows)
        if saved:
            self._save_checkpoint()
            if not last:
                self._readmit_passives(links)

    async def _evaluate_model(self, *, final: bool) -> None:
        learner = self.session.learner
        links = self.session.links
        calibration = calibrate_networks(self.session, self._labels.build_data()) if final else None
        said = await learner.evaluate(links, next_step=self._step, final=final)
        self.judged = evaluate_scores(
            self.session, self._labels, said, final=final, calibration=calibration
        )
        self._heard = False

    async def _save_at_helpers(self, links: Links) -> None:
        """Let all that help save what they are, and hear what they charged."""
        session = self.session
        contract = self.session.contract
        if session.entered.own.secrets.keeper is None:
            return
        may_leave = contract.passives if contract.silent_passive == "recover" else ()
        said = await save_all(
            links, session.present, self._step, contract=contract, may_leave=may_leave
        )
        for name, statement in said.items():
            if statement is None:
                session.learner.left[name] = self._step
            elif name not in session.helpers:
                session.charged[name] = statement.verify_accounts(name)
                session.statements[name] = statement
        self._heard = True

    def _readmit_passives(self, links: Links) -> None:
        """End the session for a new one with all, where a passive is back that it lacks."""
        back = self._watch.find_rejoining(self.session.learner.left)
        if back:
            raise PartyBackError(
                f"nothing to do: all go on in a new session from step {self._step}; checkpoint: "
                f"{' and '.join(back)} fell silent and is back, so {links.me} ends this session"
            )

    def _save_checkpoint(self) -> None:
        """Save what the active is; the answers to labels are part of it."""
        self.session.entered.save_checkpoint(
            self._step,
            tensors=add_prefix("labels", self._labels.tensors()) | add_prefix("best", self._best),
            epoch=self._epoch,
            seconds=self.seconds,
            steps=self.steps,
            contracts=self._contracts,
            held_out=self._held_out,
        )

    def _build_metrics(self, *, evaluated: bool) -> dict[str, Any]:
        spent = self.compute_privacy()
        passive = self._worst_passive
        promises = self._list_promises()
        return {
            "epoch": self._epoch,
            "step": self._step,
            "loss": self._loss,
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
            # Of the passive that promises least of its votes or contributions; null without.
            "epsilon_passives": _epsilon_of(promises, self._config.method.passives_figure),
            "delta_passives": passive["delta"] if passive else None,
            "releases_passives": passive["releases"] if passive else None,
            "promises": {promise.format_title(): promise.text for promise in promises},
            "wire_bytes": self.session.transcript.wire_bytes,
            "seconds": self.seconds,
        }

    def _list_promises(self) -> tuple[Promise, ...]:
        accounts = self.session.passive_accounts
        return promises_of(self._config, self.compute_privacy(), contributions=accounts)

    @property
    def _worst_passive(self) -> Mapping[str, Any] | None:
        """The account of the passive that spent most on votes or contributions."""
        accounts = self.session.passive_accounts.values()
        return max(accounts, key=lambda account: float(account["epsilon"]), default=None)

    def _warn_without_help(self) -> None:
        """Say it where training alone would pass for training with others."""
        contract = self.session.contract
        flows = self.session.transcript.flows
        if "the active sends representations" in self._config.method.happens and all(
            flow.kind is not Kind.REPRESENTATIONS for flow in flows
        ):
            warnings.warn(
                "an epoch passed without help, so the active trains alone: no batch held the "
                f"{contract.minimum_batch} aligned rows that rules.minimum_batch asks for; raise "
                "train.batch_size or data.overlap",
                NoHelpWarning,
                stacklevel=2,
            )

    def _find_worst_promise(self) -> Promise | None:
        """Return what is promised so far of what leaves a party; None while nobody said it."""
        method = self._config.method
        is_awaited = method.find_noise(self._config) is not None and self._worst_passive is None
        if method.figure == method.passives_figure and is_awaited:
            return None
        return worst_promise(self._list_promises(), method.figure)

    def _report_progress(self, epoch: int) -> None:
        judged = self.judged
        own = self.session.headline
        measure = self._config.measure
        spent = self._spent
        self._watch.on_progress(
            Progress(
                epoch=epoch,
                epochs=self._config.train.epochs,
                step=self._step,
                steps=self._steps,
                loss=self._loss,
                accuracy=judged.accuracy.get(own) if judged else None,
                measure=measure,
                score=judged.measures.get(own, {}).get(measure) if judged else None,
                figure=self._config.method.figure if spent is None else spent.figure,
                epsilon=None if spent is None else spent.epsilon,
                promise=None if spent is None else spent.state,
                wire_bytes=self.session.transcript.wire_bytes,
            )
        )

    def compute_privacy(self) -> PrivacySpent:
        return spent_in(self.session, self._labels.mechanism, delta=self._config.delta)


def _epsilon_of(promises: Sequence[Promise], figure: str) -> float | None:
    """Return the largest epsilon of a figure; None: nothing is promised by it."""
    if all(promise.figure != figure for promise in promises):
        return None
    return worst_promise(promises, figure).epsilon


def _first_least(values: Sequence[float]) -> int:
    """Return the index of the first of the least values; -1 if there are none."""
    return values.index(min(values)) if values else -1

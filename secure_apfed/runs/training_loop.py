"""The training loop of the active's script: epochs, batches, evaluation, checkpoints, result.

Run by: the active, in its process. The loop is the same for every method; what a step does is the
method's (`ActiveRole.train_step`).
"""

import math
import platform
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
import torch
from torch import Tensor, nn

from apfed_protocols.errors import RunStoppedError
from secure_apfed.base.files import own_subfolder, write_atomically
from secure_apfed.base.formats import MODEL_CARD
from secure_apfed.base.transfers import StepLoss, read_losses
from secure_apfed.config import Config
from secure_apfed.config.file import dump_settings
from secure_apfed.data import OwnData
from secure_apfed.data.lazy_rows import score_in_parts
from secure_apfed.errors import ConfigError, NoHelpWarning
from secure_apfed.exchange import Kind, Links, Transcript
from secure_apfed.learning.calibration import RARE_SHARE, is_rare
from secure_apfed.learning.descent import add_prefix, copy_predictor, find_device, remove_prefix
from secure_apfed.measures.table import (
    ACCURACY,
    MEASURES,
    Measure,
    Scored,
    best_threshold,
    cheapest_threshold,
    explain_undefined_measures,
    measure_all,
)
from secure_apfed.measures.tasks import score_rows
from secure_apfed.methods import METHODS, PartyCheckpoint, Session, train_epochs
from secure_apfed.methods.method import end_all, pick_held_out_rows, save_all, split_batches
from secure_apfed.privacy.ledger import PrivacySpent
from secure_apfed.runs.calibration import calibrate_networks
from secure_apfed.runs.coefficients import list_all_coefficients
from secure_apfed.runs.folder import RunFolder, describe_contract, save_scores, save_tensors
from secure_apfed.runs.outcome import (
    Calibration,
    Outcome,
    PartyCoefficients,
    Progress,
    Ranking,
    Recording,
    RunResult,
    write_outcome,
)
from secure_apfed.runs.past_sessions import NO_EARLIER_SESSIONS
from secure_apfed.runs.spending import add_cross_checks, compute_run_cost, describe_guarantee
from secure_apfed.runs.training_labels import TrainingLabels, restore_older_state
from secure_apfed.runs.weakened_settings import (
    describe_shared_organisations,
    describe_weakened_settings,
)
from secure_apfed.settings.promises import Promise, find_worst_guarantee, list_guarantees

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

# Number of losses on a GPU that are read together.
_LOSSES_AT_ONCE = 50
# Packages whose versions are written to the run's folder.
_VERSIONED_PACKAGES = (
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
    """The evaluation of a model on test rows, by inference variant (way to predict).

    Attributes:
        measure: name of the run's main measure.
        scores: test predictions, by variant.
        accuracy: test accuracy by variant; NaN if labels are numbers to predict.
        measures: value by measure's name, by variant; during training only the main measure.
        threshold: probability of the second of two classes from which it is predicted; None: the
            likeliest class is predicted.
        calibration: the calibration of the finished model; None: not calibrated.
        ranking: ranking metrics of the finished model; None: they do not apply.
        never_predicted: the labelled classes that are predicted for no test row, each with the
            threshold that labelled training rows would choose (None: none is proposed).
    """

    measure: str
    scores: Mapping[str, Scored]
    accuracy: Mapping[str, float]
    measures: Mapping[str, Mapping[str, float]]
    threshold: float | None = None
    calibration: Calibration | None = None
    ranking: Ranking | None = None
    never_predicted: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def result_fields(self) -> dict[str, Any]:
        """The fields of result.json that the evaluation determines."""
        undefined = {
            name: explain_undefined_measures(scored) for name, scored in self.scores.items()
        }
        return {
            "measure": self.measure,
            "accuracy": dict(self.accuracy),
            "measures": self.measures,
            "threshold": self.threshold,
            "calibration": self.calibration,
            "ranking": self.ranking,
            "undefined": {name: reasons for name, reasons in undefined.items() if reasons},
            "measured_rows": {name: len(scored.truth) for name, scored in self.scores.items()},
            "never_predicted": dict(self.never_predicted),
        }


def evaluate_scores(
    session: Session,
    labels: TrainingLabels,
    scores: Mapping[str, Scored],
    *,
    is_final: bool,
    calibration: Calibration | None = None,
) -> ModelEvaluation:
    """Evaluate the active's test predictions; test rows train nothing.

    During training only the run's main measure is computed. At the end all measures, the ranking
    and the classes that are never predicted are computed, too.

    Args:
        session: the running session.
        labels: the labels that the model was trained on.
        scores: test predictions by inference variant.
        is_final: whether training is over.
        calibration: the calibration that was applied to the model; None: not calibrated.
    """
    config = _complete_config(session)
    training_scores = _score_training_rows(session, labels) if is_final else None
    threshold = _pick_threshold(
        session, labels, training_scores, is_calibrated=calibration is not None
    )
    main_variant = session.headline_variant
    measure = MEASURES[config.measure]
    scores = {
        name: scored.replace_threshold(threshold) if name == main_variant else scored
        for name, scored in scores.items()
    }
    ranking = None
    never_predicted: Mapping[str, float | None] = {}
    if is_final:
        ranking = _measure_ranking(labels, scores.get(main_variant), measure)
        never_predicted = find_unpredicted_classes(
            session, labels, scores.get(main_variant), training_scores
        )
    return ModelEvaluation(
        measure=measure.name,
        scores=scores,
        accuracy={
            name: ACCURACY.compute_value(scored) if scored.classes else math.nan
            for name, scored in scores.items()
        },
        measures={
            name: measure_all(scored) if is_final else _compute_defined_measure(measure, scored)
            for name, scored in scores.items()
        },
        threshold=threshold,
        calibration=calibration,
        ranking=ranking,
        never_predicted=never_predicted,
    )


def find_unpredicted_classes(
    session: Session,
    labels: TrainingLabels,
    test_scores: Scored | None,
    training_scores: Scored | None,
) -> dict[str, float | None]:
    """Return the classes that are predicted for no test row, each with a threshold that would help.

    For two classes, this threshold has the best balanced accuracy on labelled training rows. It is
    None for more classes, without scores of training rows, and under `dp_sgd`, whose guarantee
    would not cover the threshold.

    Args:
        session: the session of the finished run.
        labels: the labels that the model was trained on.
        test_scores: scores of test rows; None: there are no such scores.
        training_scores: scores of labelled training rows; None: the model needs other parties to
            predict.
    """
    if test_scores is None or not test_scores.classes or not len(test_scores.truth):
        return {}
    data = labels.build_data()
    assert data.table.labels is not None
    labelled_classes = np.unique(data.table.labels[data.labelled_rows].numpy())
    unpredicted_classes = np.setdiff1d(labelled_classes, test_scores.class_predictions)
    threshold = None
    is_binary = test_scores.classes == len(labelled_classes) == 2
    if is_binary and training_scores is not None and _complete_config(session).dp_sgd is None:
        threshold = best_threshold(training_scores, "balanced_accuracy")
    return {labels.data.classes[index]: threshold for index in unpredicted_classes.tolist()}


def _pick_threshold(
    session: Session, labels: TrainingLabels, training_scores: Scored | None, *, is_calibrated: bool
) -> float | None:
    """Return the probability of the second of two classes from which it is predicted.

    The settings give it as a number, or as the best one for a measure, the cheapest one for a cost,
    or the one that selects a rate of the rows. The latter three need the finished model's scores of
    training rows. None: the likeliest class is predicted.

    Args:
        session: the running session.
        labels: the labels that the model was trained on.
        training_scores: scores of labelled training rows; None: training is not over, or the model
            needs other parties to predict.
        is_calibrated: whether scores are calibrated probabilities, for which the cheapest threshold
            follows from the cost alone.
    """
    setting = _complete_config(session).threshold
    if setting is None or isinstance(setting, float):
        return setting
    if training_scores is None:
        return None
    if isinstance(setting, str):
        return best_threshold(training_scores, setting)
    if setting.cost is not None:
        return (
            1 / (1 + setting.cost)
            if is_calibrated
            else cheapest_threshold(training_scores, setting.cost)
        )
    assert setting.rate is not None
    scored = _score_training_rows(session, labels, labels.build_data().train_rows)
    assert scored is not None
    quantile = np.quantile(scored.scores[:, 1], 1 - setting.rate)
    # A threshold lies strictly between 0 and 1.
    lowest = np.finfo(np.float32).tiny
    highest = 1 - np.finfo(np.float32).epsneg
    return float(quantile.clip(lowest, highest))


def _measure_ranking(
    labels: TrainingLabels, scored: Scored | None, measure: Measure
) -> Ranking | None:
    """Return the ranking metrics of two classes, if the run's measure ranks or one class is rare.

    None means that they do not apply: there are no test predictions, not two classes, or neither
    reason to rank.

    Args:
        labels: the labels that the model was trained on.
        scored: test predictions; None: there are no predictions.
        measure: the run's main measure.
    """
    if scored is None or scored.classes != 2 or not len(scored.truth):
        return None
    if not measure.is_ranking_measure and not is_rare(scored.truth.astype(np.int64), RARE_SHARE):
        return None
    return Ranking.from_scores(scored, labels.data.classes[1])


def _score_training_rows(
    session: Session, labels: TrainingLabels, rows: Tensor | None = None
) -> Scored | None:
    """Return the finished model's scores of training rows, with their labels.

    None means that the model needs other parties to predict.

    `labels`: the labels that the model was trained on. `rows`: positions in the active's table;
    None: the labelled training rows.
    """
    network = copy_predictor(session.active_role.get_active_networks())
    if network is None:
        return None
    data = labels.build_data()
    features_N = data.table.features
    labels_N = data.table.labels
    assert labels_N is not None
    dtype = next((parameter.dtype for parameter in network.parameters()), torch.float32)

    def score_features(features_B: Tensor) -> Tensor:
        """Return the network's scores (B, K), computed in the precision of its parameters."""
        scores_BK: Tensor = network(features_B.to(dtype))
        return scores_BK

    predict = partial(score_in_parts, score_features, features_N)
    scored_rows = data.labelled_rows if rows is None else rows
    return score_rows(session.party_session.party.task, predict, scored_rows, labels_N)


def _complete_config(session: Session) -> Config:
    """Return the configuration of a session's run, with the sections that only `Config` has."""
    config = session.party_session.party.config
    assert isinstance(config, Config)
    return config


def _compute_defined_measure(measure: Measure, scored: Scored) -> dict[str, float]:
    """Return the value of one measure by its name; empty if it is undefined on these rows."""
    value = measure.compute_value(scored)
    return {} if math.isnan(value) else {measure.name: value}


def _require_two_classes(labels: TrainingLabels) -> None:
    """Raise ConfigError unless there are two classes, with labelled rows of both.

    It is called for a run with a threshold, which decides between two classes. If a label mechanism
    protects the labels, only the number of classes is checked: an error must not reveal which
    labels exist.
    """
    data = labels.data
    assert data.table.labels is not None
    labels_are_protected = not labels.mechanism.unsafe
    labelled_classes = 2
    detail = ""
    if not labels_are_protected:
        labelled_classes = len(data.table.labels[data.labelled_rows].unique())
        detail = f" and labels of {labelled_classes}"
    if len(data.classes) != 2 or labelled_classes != 2:
        raise ConfigError(
            f"threshold: it decides between two classes with labelled rows of both, and "
            f"{data.table.name} has {len(data.classes)} classes{detail}; leave it out"
        )


def list_versions(device: torch.device) -> dict[str, str]:
    """Return the versions and the hardware that a run's results depend on."""
    versions = {}
    for name in _VERSIONED_PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed as a package"
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
    return {
        "python": platform.python_version(),
        **versions,
        "system": f"{platform.system()} {platform.machine()}",
        "device": str(device),
        "gpu": gpu,
    }


class RunWriter:
    """A writer of results and metrics to a run's folder during the run.

    Args:
        folder: folder of the run.
        config: settings of the run.
        received_transcript: the messages that the active received, if it runs in its own process
            and folder; None: one process runs all parties.
    """

    def __init__(
        self, folder: RunFolder, config: Config, *, received_transcript: Transcript | None = None
    ) -> None:
        """Keep folder, settings and transcript for later calls; nothing is written yet."""
        self.folder = folder
        self._config = config
        self._received_transcript = received_transcript
        # TensorBoard's writer of learning curves; None: not started, or TensorBoard is missing.
        self._tensorboard_writer: SummaryWriter | None = None

    def start_run(self, session: Session, contract_digests: Sequence[str], *, epoch: int) -> None:
        """Write configuration, contract, seeds and versions, and drop metrics of later epochs.

        Args:
            session: the session that begins or resumes the run.
            contract_digests: SHA-256 (hex) of the contract of each session so far, in order, with
                this session's at the end.
            epoch: number of finished epochs in the checkpoint; 0: a new run.
        """
        folder = self.folder
        config = self._config
        write_atomically(folder.config, dump_settings(config).encode())
        folder.write_json(
            folder.contract,
            {
                **describe_contract(session.contract, session.signatures),
                "sessions": list(contract_digests),
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

            curves_folder = own_subfolder(folder.tensorboard)
            self._tensorboard_writer = SummaryWriter(str(curves_folder), purge_step=epoch + 1)

    def record_epoch(self, record: Mapping[str, Any], *, is_saved: bool) -> None:
        """Append one epoch to the metrics, and to TensorBoard if it is installed.

        `record`: one line of metrics.jsonl. `is_saved`: whether a checkpoint follows.
        """
        self.folder.append_metrics(record, is_durable=is_saved)
        if self._tensorboard_writer is None:
            return
        scalars = dict(record)
        for variant, accuracy in (record["accuracy"] or {}).items():
            scalars[f"accuracy/{variant}"] = accuracy
        for variant, values in (record["measures"] or {}).items():
            scalars |= {f"{name}/{variant}": value for name, value in values.items()}
        for name, value in scalars.items():
            if isinstance(value, int | float) and name != "epoch":
                self._tensorboard_writer.add_scalar(name, value, record["epoch"])

    def write_results(
        self,
        session: Session,
        data: OwnData,
        evaluation: ModelEvaluation,
        *,
        privacy: PrivacySpent,
        guarantee: str,
        loop: "TrainingLoop",
    ) -> None:
        """Write model, card and results; `result.json` comes last and marks the run as finished.

        Args:
            session: the last one of the run.
            data: the active's data, with the labels it trained on.
            evaluation: evaluation of the finished model.
            privacy: the active's privacy cost.
            guarantee: the guarantee of the session, in words.
            loop: the finished training loop, for its counts of time, sessions and steps.
        """
        folder = self.folder
        if self._tensorboard_writer is not None:
            self._tensorboard_writer.close()
        sent_flows = session.transcript.flows
        received_flows = (
            () if self._received_transcript is None else self._received_transcript.flows
        )
        folder.write_json(
            folder.message_flows, [asdict(flow) for flow in (*sent_flows, *received_flows)]
        )
        if session.common_people:
            folder.write_json(
                folder.common_people,
                [people.model_dump() for people in session.common_people.values()],
            )
        if session.signed_reports:
            report_by_passive = {
                name: report.as_json(name) for name, report in session.signed_reports.items()
            }
            folder.write_json(folder.statements, report_by_passive)
        content = self._build_outcome(
            session, data, evaluation, privacy=privacy, guarantee=guarantee, loop=loop
        )
        outcome = Outcome.model_validate(content)
        self._save_test_scores(session, data, evaluation)
        self._save_model(session, self._build_card(session, data, outcome, evaluation))
        write_outcome(folder, outcome)

    def _build_outcome(
        self,
        session: Session,
        data: OwnData,
        evaluation: ModelEvaluation,
        *,
        privacy: PrivacySpent,
        guarantee: str,
        loop: "TrainingLoop",
    ) -> dict[str, Any]:
        """Return the fields of result.json.

        Args:
            session: the last session of the run.
            data: the active's data, with the labels it trained on.
            evaluation: evaluation of the finished model.
            privacy: the active's privacy cost.
            guarantee: the guarantee of the session, in words.
            loop: the finished training loop, for its counts of time, sessions and steps.
        """
        learner = session.active_role
        aligned_rows = session.alignment.get(session.active_name)
        return {
            "method": self._config.method.name,
            **evaluation.result_fields,
            "wire_bytes": session.transcript.wire_bytes,
            "privacy": asdict(privacy),
            "contributions": session.passive_costs,
            "promises": [
                promise.as_json()
                for promise in list_guarantees(
                    self._config, privacy, spent_by_passive=session.passive_costs
                )
            ],
            "stated": session.cost_reports,
            "seconds": loop.seconds,
            "sessions": loop.sessions,
            "steps": loop.steps,
            "aligned_rows": 0 if aligned_rows is None else len(aligned_rows),
            "train_rows": len(data.train_rows),
            "labelled_rows": len(data.labelled_rows),
            "test_rows": len(data.test_rows),
            "sum": session.secure_sum,
            "agreement": learner.agreement_by_party,
            "help": learner.help,
            "coefficients": loop.coefficients,
            "local_models": learner.local_models,
            "attendance": session.describe_attendance(),
            "guarantee": guarantee,
            "apart": self._received_transcript is not None,
            "less_protected": describe_weakened_settings(self._config),
            "shared_organisations": describe_shared_organisations(self.folder.path),
        }

    def _save_test_scores(
        self, session: Session, data: OwnData, evaluation: ModelEvaluation
    ) -> None:
        """Write the test predictions, and which test rows the method's model can predict.

        `data`: the active's data. `evaluation`: evaluation of the finished model.
        """
        aligned_rows = session.alignment.get(session.active_name)
        if aligned_rows is None:
            aligned_rows = torch.empty(0, dtype=torch.int64)
        testable_rows = METHODS[self._config.method.name].find_testable_rows(data, aligned_rows)
        is_tested = torch.isin(data.test_rows, testable_rows)
        save_scores(self.folder.test_scores, evaluation.scores, is_tested=is_tested)

    def _save_model(self, session: Session, card: dict[str, Any]) -> None:
        """Write the weights of a model with which the active predicts alone, and the model card.

        Without such a model only the card is written. `card`: the card without `predicts_alone`.
        """
        networks = session.active_role.get_active_networks()
        if networks is None:
            # Where the joint model needs all parties, a method may have another model in reserve.
            networks = session.active_role.fallback_networks
            card["model"] |= {"head_network": None}  # it has a built-in head of its own width
        if networks is not None:
            modules = nn.ModuleDict({"encoder": networks.encoder, "head": networks.head})
            write_atomically(self.folder.model, save_tensors(modules.state_dict()))
        self.folder.write_json(
            self.folder.model_card, {**card, "predicts_alone": networks is not None}
        )

    def _build_card(
        self, session: Session, data: OwnData, outcome: Outcome, evaluation: ModelEvaluation
    ) -> dict[str, Any]:
        """Return the model card, in JSON values.

        It has all that is needed to use the model, and the run's measures and guarantees.

        Args:
            session: the finished session.
            data: the active's data.
            outcome: the content of result.json.
            evaluation: evaluation of the finished model.
        """
        privacy = outcome.privacy
        return {
            MODEL_CARD.number_key: MODEL_CARD.current_number,
            "model": (session.active_role.model or self._config.model).model_dump(mode="json"),
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
        """Write the record of all parties' messages, so that attacks can be run on it later.

        Only a simulation, in which one process runs all parties, has such a record.
        """
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
    """The active ends a session so that an absent passive can take part in the next one."""


class RunCallbacks:
    """The calls by which a training loop reaches the code that runs it.

    Subclasses override those that they need.

    Args:
        writer: writer of the run's files; None: nothing is stored.
        on_progress: called after each step and evaluation.
    """

    def __init__(self, writer: RunWriter | None, on_progress: Callable[[Progress], None]) -> None:
        """Keep the writer and the callback; no earlier session is known."""
        self.writer = writer
        self.on_progress = on_progress
        # Totals of the earlier sessions of this run, if it was resumed.
        self.earlier_sessions = NO_EARLIER_SESSIONS

    def prepare_loop(self, session: Session, state: PartyCheckpoint | None) -> None:
        """Prepare for the training loop, which calls this before anything else.

        `state`: the active's checkpoint from which the loop resumes; None: a new run.
        """

    def build_recording(self) -> Recording | None:
        """Return the messages of all parties, if this process has them."""
        return None

    def find_rejoining(self, absent: Collection[str]) -> Collection[str]:
        """Return the absent parties that are reachable again, and so can join a new session."""
        return ()


class EpochLosses:
    """The task losses of an epoch's steps, for their mean.

    Reading a loss from a GPU waits until its step is computed. So the first loss of an epoch is
    read at once, and the others `_LOSSES_AT_ONCE` together.
    """

    def __init__(self) -> None:
        """Start an epoch without any loss."""
        self._read_sum = 0.0  # of the losses that were read
        self._read_count = 0  # of the losses that were read
        self._unread_losses: list[Tensor] = []

    def add(self, loss: StepLoss) -> None:
        """Add the loss of one step; a tensor on a GPU is not read yet."""
        if isinstance(loss, Tensor):
            self._unread_losses.append(loss)
        else:
            self._add_number(loss)

    @property
    def should_read_mean(self) -> bool:
        """Whether to read the mean now.

        It is due if it costs nothing (no loss is unread), if no loss of the epoch was read yet, or
        if `_LOSSES_AT_ONCE` losses are unread.
        """
        unread = len(self._unread_losses)
        return not unread or not self._read_count or unread >= _LOSSES_AT_ONCE

    def read_mean(self) -> float:
        """Read all unread losses, and return the mean of all losses so far; 0.0 without a loss."""
        for loss in read_losses(self._unread_losses):
            self._add_number(loss)
        self._unread_losses.clear()
        return self._read_sum / self._read_count if self._read_count else 0.0

    def _add_number(self, loss: float) -> None:
        """Add a loss that is a plain number to the sum."""
        self._read_sum += loss
        self._read_count += 1


class TrainingLoop:
    """The training loop of one session and its state; see `secure_apfed.methods.TrainingLoop`."""

    def __init__(
        self,
        session: Session,
        labels: TrainingLabels,
        callbacks: RunCallbacks,
        state: PartyCheckpoint | None,
    ) -> None:
        """Restore the loop from the active's checkpoint or start a new run, and start the writer.

        Args:
            session: the session with the learner and the links to the passives.
            labels: the labels to train on.
            callbacks: callbacks to the code that runs the loop.
            state: the active's checkpoint; None: start a new run.

        Raises:
            ConfigError: too few rows to train on, or a threshold without two labelled classes.
        """
        state = restore_older_state(state, labels, session)
        callbacks.prepare_loop(session, state)
        row_count = len(session.active_role.training_rows)
        min_batch_rows = session.active_role.min_batch_rows
        if row_count < min_batch_rows:
            raise ConfigError(
                f"there are {row_count} rows to train on, fewer than the smallest batch of "
                f"{min_batch_rows}; the intersection holds too few training rows"
            )
        self.session = session
        self._config = _complete_config(session)
        self._labels = labels
        if self._config.threshold is not None:
            _require_two_classes(labels)
        self._callbacks = callbacks
        self._writer = callbacks.writer
        saved_progress = state.notes if state else {}
        self._finished_epochs = saved_progress.get("epoch", 0)  # number of finished epochs
        self._next_step = state.step if state else 0  # number of the next step
        self._expected_steps = 0  # number of steps of the whole run, for the display
        self._epoch_losses = EpochLosses()
        # Mean loss of this epoch's steps; None under DP-SGD, whose noise does not cover it.
        self._mean_loss = None if self._config.dp_sgd else 0.0
        # Validation loss after each epoch, with train.patience.
        self._held_out_losses: list[float] = list(saved_progress.get("held_out", ()))
        self.evaluation: ModelEvaluation | None = None
        # Whether the passives reported their privacy cost since the last evaluation.
        self._has_new_privacy_reports = False
        # The weakest privacy guarantee so far. Before anything was sent there is none to report.
        self._weakest_guarantee = self._find_weakest_guarantee() if state else None
        # State of the active's networks with the lowest validation loss so far.
        self._best_networks = remove_prefix("best", state.tensors) if state else {}
        self._contract_digests = [
            *saved_progress.get("contracts", []),
            session.contract.digest.hex(),
        ]
        earlier_sessions = callbacks.earlier_sessions
        # The audit log covers steps after the checkpoint, too, but misses steps in which the method
        # sends nothing. So the larger of both counts is taken.
        self._seconds_in_earlier_sessions: float = max(
            saved_progress.get("seconds", 0.0), earlier_sessions.seconds
        )
        self._steps_in_earlier_sessions: int = max(
            saved_progress.get("steps", self._next_step), earlier_sessions.steps
        )
        self._step_at_start = self._next_step
        self.sessions = max(len(self._contract_digests), earlier_sessions.sessions + 1)
        self._start_time = time.monotonic()
        if self._writer:
            self._writer.start_run(session, self._contract_digests, epoch=self._finished_epochs)

    @cached_property
    def coefficients(self) -> tuple[PartyCoefficients, ...]:
        """The coefficients of a generalised linear model, after the last step."""
        recording = self._callbacks.build_recording()
        return list_all_coefficients(
            self._config,
            self._labels.data,
            self.session.active_role.prediction_networks,
            all_data=None if recording is None else recording.data,
            encoders={} if recording is None else recording.encoders,
        )

    @property
    def seconds(self) -> float:
        """The seconds of training, in all sessions."""
        return self._seconds_in_earlier_sessions + time.monotonic() - self._start_time

    @property
    def steps(self) -> int:
        """The number of steps in all sessions; repeated steps count again."""
        return self._steps_in_earlier_sessions + self._next_step - self._step_at_start

    async def run(self) -> None:
        """Train all epochs, evaluate, write the results, and end the session with all parties."""
        learner = self.session.active_role
        links = self.session.links
        # Messages before the first epoch count as the first epoch's. If the last epoch is over,
        # further messages count as the last epoch's.
        is_training_over = (
            self._finished_epochs == self._config.train.epochs or self._should_stop_early
        )
        current_epoch = self._finished_epochs - 1 if is_training_over else self._finished_epochs
        self.session.transcript.begin_epoch(current_epoch)
        self._save_checkpoint()
        await train_epochs(learner, links, self)
        if self.evaluation is None:
            await self._evaluate_model(is_final=True)
        if not self._has_new_privacy_reports and not self.session.helpers:
            # The passives report the privacy cost in their ledgers whenever they save a checkpoint.
            await self._save_at_helpers(links)
            self._save_checkpoint()
        assert self.evaluation is not None
        # The result is stored first, then the end is signalled: until then all parties can resume.
        if self._writer:
            self._write_files(self._writer, self.evaluation)
        self.session.party_session.finish_part()
        # If the session may be restarted, dealers have stayed to the end, and are told of it, too.
        contract = self.session.contract
        dealers = contract.list_names("dealer") if contract.restarts else ()
        end_all(links, [*self.session.present_helpers, *dealers], self._next_step)

    def _write_files(self, writer: RunWriter, evaluation: ModelEvaluation) -> None:
        """Write the record of messages, if this process has it, and the results."""
        if recording := self._callbacks.build_recording():
            writer.write_recording(recording)
        guarantee = describe_guarantee(self._config, self.session, self._labels.mechanism)
        writer.write_results(
            self.session,
            self._labels.data,
            evaluation,
            privacy=self.compute_privacy(),
            guarantee=guarantee,
            loop=self,
        )

    def build_result(self) -> RunResult:
        """Return the result of the finished run.

        It includes epsilons that other privacy accountants compute for comparison, which are also
        written to a file. They take seconds and come last: if they fail, the run is finished all
        the same.
        """
        assert self.evaluation is not None
        privacy = add_cross_checks(self.compute_privacy(), self.session)
        if self._writer and privacy.accountants:
            folder = self._writer.folder
            folder.write_json(folder.accountants, dict(privacy.accountants))
        return RunResult(
            method=self._config.method.name,
            **self.evaluation.result_fields,
            wire_bytes=self.session.transcript.wire_bytes,
            sessions=self.sessions,
            steps=self.steps,
            privacy=privacy,
            contributions=self.session.passive_costs,
            promises=list_guarantees(
                self._config, privacy, spent_by_passive=self.session.passive_costs
            ),
            stated=self.session.cost_reports,
            trained=self._labels.build_data(),
            recorded=self._callbacks.build_recording(),
            help=self.session.active_role.help,
            coefficients=self.coefficients,
            local_models=self.session.active_role.local_models,
            test_scores=self.evaluation.scores,
            folder=self._writer.folder.path if self._writer else None,
        )

    @property
    def next_step(self) -> int:
        """The number of the next step, from 0."""
        return self._next_step

    def is_last(self, epoch: int) -> bool:
        """Return whether this epoch (from 0) is the last: by the settings, or by early stopping."""
        return epoch + 1 == self._config.train.epochs or self._should_stop_early

    @property
    def _should_stop_early(self) -> bool:
        """Whether the validation loss has not fallen for `train.patience` epochs."""
        patience = self._config.train.patience
        if patience is None:
            return False
        epochs_since_best = len(self._held_out_losses) - 1
        epochs_since_best -= _find_first_minimum(self._held_out_losses)
        return epochs_since_best >= patience

    async def note_held_out_loss(self) -> None:
        """Compute and record the validation loss of an epoch, if `train.patience` is set.

        With `train.keep_best`, also store the networks if this loss is the lowest so far. After the
        last epoch the networks with the lowest loss are restored.

        Raises ConfigError: the loss is not a number.
        """
        if self._config.train.patience is None:
            return
        learner = self.session.active_role
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
        self._held_out_losses.append(loss)
        networks = learner.get_active_networks()
        if not self._config.train.keep_best or networks is None:
            return
        epoch_index = len(self._held_out_losses) - 1
        if _find_first_minimum(self._held_out_losses) == epoch_index:
            state = networks.state_dict()
            self._best_networks = {name: tensor.clone() for name, tensor in state.items()}
        if self.is_last(self._finished_epochs):
            networks.load_state_dict(self._best_networks)

    def iterate_epochs(self) -> Iterator[int]:
        """Yield the remaining epochs, until early stopping."""
        for epoch in range(self._finished_epochs, self._config.train.epochs):
            if self._should_stop_early:
                return
            self.session.transcript.begin_epoch(epoch)
            yield epoch

    def iterate_batches(self, epoch: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the step's number and the rows (B,) of each batch of an epoch.

        A last batch below the smallest size is omitted. After the last batch the mean loss of the
        epoch is read.
        """
        batches = split_batches(self.session.active_role, self._config, epoch)
        remaining_epochs = self._config.train.epochs - epoch
        self._expected_steps = self._next_step + remaining_epochs * len(batches)
        self._epoch_losses = EpochLosses()
        self._mean_loss = 0.0 if self._has_public_loss else None
        for rows_B in batches:
            yield self._next_step, rows_B
        if self._has_public_loss:
            self._mean_loss = self._epoch_losses.read_mean()

    def count_step(self, loss: StepLoss | None) -> None:
        """Advance by one step, and report progress.

        `loss`: the step's task loss; None: the step has no loss, such as an exchange after
        training.
        """
        self.session.record_sum(self._next_step)
        self._next_step += 1
        if loss is None:
            # `iterate_batches` counted only the batches, and this step belongs to none of them.
            self._expected_steps += 1
        elif self._has_public_loss:
            self._epoch_losses.add(loss)
            if self._epoch_losses.should_read_mean:
                self._mean_loss = self._epoch_losses.read_mean()
        self._report_progress(self._finished_epochs + 1)

    @property
    def _has_public_loss(self) -> bool:
        """Whether steps have a task loss, and no privacy guarantee forbids to show it.

        Noise of DP-SGD does not cover losses. If labels are used only after training
        (`train.labels: after`), steps have no task loss.
        """
        return self._config.dp_sgd is None and not self._config.train.is_exchange_label_free

    async def finish_epoch(self, *, is_last: bool) -> None:
        """Evaluate, have all parties save, and write metrics, each if it is due.

        A label mechanism with stages randomises labels part by part: if the next stage is due, its
        labels are randomised here, and training goes on with them, too.

        `is_last`: whether the epoch is the run's last.

        Raises PartyBackError: an absent passive is back, so that a new session must begin.
        """
        config = self._config.train
        learner = self.session.active_role
        links = self.session.links
        if self._finished_epochs == 0:
            self._warn_without_help()
        self._finished_epochs += 1
        is_evaluation_due = (
            self._finished_epochs % config.evaluate_every == 0 and not config.is_exchange_label_free
        )
        should_evaluate = is_last or is_evaluation_due
        if should_evaluate:
            await self._evaluate_model(is_final=is_last)
        # Labels are randomised only once. A resumed run must not randomise them again, so a
        # checkpoint is saved in the same epoch.
        should_randomise_labels = self._labels.is_due(self._finished_epochs)
        should_save = (
            is_last
            or should_randomise_labels
            or self._finished_epochs % self._config.checkpoint_every == 0
        )
        if should_save:
            await self._save_at_helpers(links)
        self._weakest_guarantee = self._find_weakest_guarantee()
        if should_evaluate:
            self._report_progress(self._finished_epochs)
        if self._writer:
            self._writer.record_epoch(
                self._build_metrics(is_evaluated=should_evaluate), is_saved=should_save
            )
        if should_randomise_labels:
            self._labels.randomise_stage(learner.get_active_networks())
            data = self._labels.build_data()
            assert data.table.labels is not None
            learner.relabel(data.table.labels, data.train_rows)
        if should_save:
            self._save_checkpoint()
            if not is_last:
                self._readmit_passives(links)

    async def _evaluate_model(self, *, is_final: bool) -> None:
        """Score the test rows, and set `evaluation`.

        `is_final`: whether training is over. If so, the networks are calibrated first, and all
        measures are computed.
        """
        learner = self.session.active_role
        links = self.session.links
        calibration = None
        if is_final:
            calibration = calibrate_networks(self.session, self._labels.build_data())
        scores = await learner.evaluate(links, next_step=self._next_step, is_final=is_final)
        self.evaluation = evaluate_scores(
            self.session, self._labels, scores, is_final=is_final, calibration=calibration
        )
        self._has_new_privacy_reports = False

    async def _save_at_helpers(self, links: Links) -> None:
        """Have the other parties save a checkpoint, and receive their signed privacy costs.

        Nothing is done in a run without checkpoints. If the contract lets passives leave, a passive
        that does not reply counts as absent from this step on.

        `links`: connections to the other parties.
        """
        session = self.session
        contract = self.session.contract
        if session.party_session.party.secrets.checkpoint_store is None:
            return
        may_leave = contract.passives if contract.silent_passive == "recover" else ()
        statements = await save_all(
            links, session.present_helpers, self._next_step, contract=contract, may_leave=may_leave
        )
        for name, statement in statements.items():
            if statement is None:
                session.active_role.departure_step_by_passive[name] = self._next_step
            elif name not in session.helpers:  # roles in this process need no signed report
                session.reported_costs[name] = statement.verify_costs(name)
                session.signed_reports[name] = statement
        self._has_new_privacy_reports = True

    def _readmit_passives(self, links: Links) -> None:
        """Raise PartyBackError if an absent passive is reachable again.

        The error ends this session, so that all parties can start a new one with that passive.

        `links`: connections to the other parties.
        """
        rejoining = self._callbacks.find_rejoining(
            self.session.active_role.departure_step_by_passive
        )
        if rejoining:
            raise PartyBackError(
                f"nothing to do: all go on in a new session from step {self._next_step}; "
                f"checkpoint: {' and '.join(rejoining)} fell silent and is back, so {links.me} "
                "ends this session"
            )

    def _save_checkpoint(self) -> None:
        """Save the active's checkpoint, with the loop's state and the labels randomised so far."""
        self.session.party_session.save_checkpoint(
            self._next_step,
            tensors={
                **add_prefix("labels", self._labels.tensors()),
                **add_prefix("best", self._best_networks),
            },
            epoch=self._finished_epochs,
            seconds=self.seconds,
            steps=self.steps,
            contracts=self._contract_digests,
            held_out=self._held_out_losses,
        )

    def _build_metrics(self, *, is_evaluated: bool) -> dict[str, Any]:
        """Return one line of metrics.jsonl: losses, scores, privacy cost, bytes and seconds.

        `is_evaluated`: whether test rows were scored in this epoch.
        """
        privacy = self.compute_privacy()
        largest_passive_cost = self._largest_passive_cost
        guarantees = self._list_guarantees()
        return {
            "epoch": self._finished_epochs,
            "step": self._next_step,
            "loss": self._mean_loss,
            # The loss of validation rows; null without train.patience.
            "held_out_loss": self._held_out_losses[-1] if self._held_out_losses else None,
            "accuracy": self.evaluation.accuracy if is_evaluated and self.evaluation else None,
            # By inference variant: the run's measure, and at the end all measures.
            "measures": self.evaluation.measures if is_evaluated and self.evaluation else None,
            "epsilon": privacy.epsilon_x,
            "epsilon_y": privacy.epsilon_y,
            "epsilon_model": privacy.epsilon_model,
            "delta": privacy.delta,
            "releases": privacy.releases,
            # Privacy cost of the passive with the weakest guarantee; null if passives add no noise.
            "epsilon_passives": _find_largest_epsilon(
                guarantees, self._config.method.passives_epsilon_name
            ),
            "delta_passives": largest_passive_cost["delta"] if largest_passive_cost else None,
            "releases_passives": largest_passive_cost["releases"] if largest_passive_cost else None,
            "promises": {promise.format_title(): promise.text for promise in guarantees},
            "wire_bytes": self.session.transcript.wire_bytes,
            "seconds": self.seconds,
        }

    def _list_guarantees(self) -> tuple[Promise, ...]:
        """Return the privacy guarantees of the run at its cost so far."""
        cost_by_passive = self.session.passive_costs
        return list_guarantees(
            self._config, self.compute_privacy(), spent_by_passive=cost_by_passive
        )

    @property
    def _largest_passive_cost(self) -> Mapping[str, Any] | None:
        """The privacy cost of the passive with the highest epsilon for its votes or contributions.

        None: no passive has reported a cost.
        """
        accounts = self.session.passive_costs.values()
        return max(accounts, key=lambda account: float(account["epsilon"]), default=None)

    def _warn_without_help(self) -> None:
        """Warn if the active trained without the passives that should get its representations."""
        contract = self.session.contract
        flows = self.session.transcript.flows
        should_send = "the active sends representations" in self._config.method.exchange_facts
        has_sent = any(flow.kind is Kind.REPRESENTATIONS for flow in flows)
        if should_send and not has_sent:
            warnings.warn(
                "an epoch passed without help, so the active trains alone: no batch held the "
                f"{contract.minimum_batch} aligned rows that rules.minimum_batch asks for; raise "
                "train.batch_size or data.overlap",
                NoHelpWarning,
                stacklevel=2,
            )

    def _find_weakest_guarantee(self) -> Promise | None:
        """Return the weakest privacy guarantee so far about what leaves a party.

        It is the guarantee of the kind of epsilon that the method reports first. None: it depends
        on privacy costs of passives that have not been reported yet.
        """
        method = self._config.method
        passives_add_noise = method.find_noise(self._config) is not None
        costs_are_awaited = passives_add_noise and self._largest_passive_cost is None
        if method.epsilon_name == method.passives_epsilon_name and costs_are_awaited:
            return None
        return find_worst_guarantee(self._list_guarantees(), method.epsilon_name)

    def _report_progress(self, epoch: int) -> None:
        """Report step, loss, last score and privacy guarantee to the display.

        `epoch`: number of the present epoch, from 1.
        """
        evaluation = self.evaluation
        main_variant = self.session.headline_variant
        measure = self._config.measure
        guarantee = self._weakest_guarantee
        self._callbacks.on_progress(
            Progress(
                epoch=epoch,
                epochs=self._config.train.epochs,
                step=self._next_step,
                steps=self._expected_steps,
                loss=self._mean_loss,
                accuracy=evaluation.accuracy.get(main_variant) if evaluation else None,
                measure=measure,
                score=evaluation.measures.get(main_variant, {}).get(measure)
                if evaluation
                else None,
                figure=self._config.method.epsilon_name if guarantee is None else guarantee.figure,
                epsilon=None if guarantee is None else guarantee.epsilon,
                promise=None if guarantee is None else guarantee.state,
                wire_bytes=self.session.transcript.wire_bytes,
            )
        )

    def compute_privacy(self) -> PrivacySpent:
        """Return the active's privacy cost so far, in all sessions."""
        return compute_run_cost(self.session, self._labels.mechanism, delta=self._config.delta)


def _find_largest_epsilon(guarantees: Sequence[Promise], figure: str) -> float | None:
    """Return the largest epsilon of one kind among privacy guarantees; None: there is none.

    `figure`: the kind of epsilon, such as "epsilon_x".
    """
    if all(promise.figure != figure for promise in guarantees):
        return None
    return find_worst_guarantee(guarantees, figure).epsilon


def _find_first_minimum(values: Sequence[float]) -> int:
    """Return the index of the first minimum; -1 for an empty sequence."""
    return values.index(min(values)) if values else -1

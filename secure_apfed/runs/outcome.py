"""The progress and the result of a run, in memory and as stored in its folder.

Written by: the process of the active, and the launcher that gathers the results of parties in
separate processes. Read by: attacks, reports and comparisons of runs. A folder may come from
somebody else, so only plain files of bounded size and of the types defined here are read.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import msgpack
import safetensors
import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from apfed_protocols.lazy_names import make_former_name
from secure_apfed.alignment.overlap import CommonPeople
from secure_apfed.base.files import PathLike, load_bytes, load_json
from secure_apfed.base.formats import RECORDING, RUN_RESULT
from secure_apfed.config import Config
from secure_apfed.config.file import dump_settings, load_config_text
from secure_apfed.data import OwnData, VerticalData, load_data
from secure_apfed.errors import CheckpointError, ConfigError, ModelError
from secure_apfed.exchange import Transcript
from secure_apfed.learning.descent import ActiveNetworks, remove_prefix
from secure_apfed.learning.own_code import ModuleSource, make_module
from secure_apfed.learning.votes import MeasuredHelp
from secure_apfed.measures.intervals import Estimate, estimate_measures, estimate_share
from secure_apfed.measures.table import ACCURACY, LiftRow, Measure, Scored, find_measure, lift_table
from secure_apfed.methods import METHODS
from secure_apfed.methods.method import VoteAgreement
from secure_apfed.networks.models import Shape
from secure_apfed.privacy.ledger import PrivacySpent
from secure_apfed.runs.active_model import load_model
from secure_apfed.runs.folder import RunFolder
from secure_apfed.settings.promises import (
    EpsilonName,
    GuaranteeState,
    Promise,
    describe_epsilon,
    list_guarantees,
)

RANKED = ("auc", "average_precision", "ks")
"""Names of the measures that a report on the ranking of two classes contains."""


def _parse_epsilon(value: Any) -> Any:
    """Return infinity for null and the texts that mean it, since JSON has no infinity.

    Any other value is returned unchanged.
    """
    return math.inf if value in (None, "inf", "infinity", "Infinity") else value


Count = Annotated[int, Field(ge=0, le=2**31)]


Epsilon = Annotated[float, BeforeValidator(_parse_epsilon)]


class StoredResult(BaseModel):
    """The base of results that a run stores in files.

    Unknown fields are ignored, so that a file of a newer version can be read.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")


class Privacy(StoredResult):
    """The privacy cost of a run; an epsilon of infinity means no guarantee.

    Attributes:
        epsilon_x: for all releases of one row's representation.
        epsilon_y: for one training label.
        epsilon_model: for one whole record.
        delta: the probability that an epsilon does not hold.
        releases: number of releases of the most released row.
        mu: the cost of the releases as Gaussian differential privacy.
        accountants: epsilon_x by other privacy accountants, by their name.
        trace: steps of the computation, in words.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    epsilon_x: Epsilon
    epsilon_y: Epsilon
    epsilon_model: Epsilon
    delta: float | None = None
    releases: Count | None = None
    mu: Epsilon = math.inf
    accountants: Mapping[str, float | str] = {}
    trace: tuple[str, ...] = ()

    @classmethod
    def from_spent(cls, spent: PrivacySpent) -> "Privacy":
        """Return a ledger's cost in the form in which it is stored."""
        return cls.model_validate(asdict(spent))

    def to_spent(self) -> PrivacySpent:
        """Return the cost as a ledger states it."""
        return PrivacySpent(**self.model_dump())


class Attendance(StoredResult):
    """The passives that stopped answering in the last session.

    Attributes:
        left: passive -> the step from which it is absent.
        steps_without_all: number of steps that were trained without all passives.
    """

    left: Mapping[str, int] = {}
    steps_without_all: int = 0


class Contributions(StoredResult):
    """The privacy cost of one passive's votes or contributions to sums.

    Attributes:
        figure: the kind of epsilon, a key of `promises.MEANING_BY_EPSILON`.
        epsilon, delta: the cost.
        releases: number of votes or contributions that were counted.
        trace: steps of the computation, in words.
    """

    figure: str = "epsilon_c"
    epsilon: Epsilon
    delta: float
    releases: Count
    trace: tuple[str, ...] = ()


class StoredGuarantee(StoredResult):
    """A privacy guarantee, as stored for programs (`secure_apfed.settings.promises.Promise`).

    Attributes:
        state: "bounded" by a finite epsilon, "no guarantee", or "nothing is sent".
        figure: the kind of epsilon.
        epsilon: its value; None: no guarantee, or nothing is sent.
        delta: the probability that it does not hold.
        releases: the most releases of one row that it covers; None: none are counted.
        party: the party whose rows it protects; "": the party that spent most.
        why: the reason why there is no guarantee, or why nothing is sent.
    """

    state: GuaranteeState
    figure: EpsilonName
    epsilon: Annotated[float, Field(gt=0)] | None
    delta: float | None = None
    releases: Count | None = None
    party: str = ""
    why: str = ""


class Calibration(StoredResult):
    """The line that calibrates the log-odds of two classes: slope * log-odds + offset.

    Attributes:
        rate: the mean probability of the second class, over unlabelled training rows, that the
            offset was chosen for.
    """

    rate: float
    slope: float
    offset: float


class MeasureInterval(StoredResult):
    """A measure of test rows with its 95 % interval over these rows.

    Attributes:
        value: the measure.
        low, high: ends of the interval; None: undefined.
    """

    value: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def from_estimate(cls, estimate: Estimate) -> "MeasureInterval":
        """Return an estimate with None in place of undefined ends."""
        return cls(
            value=estimate.value,
            low=None if math.isnan(estimate.low) else estimate.low,
            high=None if math.isnan(estimate.high) else estimate.high,
        )

    def format_interval(self, measure: Measure) -> str:
        """Return value and interval as text, such as "0.912 [0.880, 0.941]"."""
        if self.low is None or self.high is None:
            return measure.format_value(self.value)
        ends = f"{measure.format_value(self.low)}, {measure.format_value(self.high)}"
        return f"{measure.format_value(self.value)} [{ends}]"


class Ranking(StoredResult):
    """The ranking of test rows: how well it separates the positive one of two classes.

    Attributes:
        class_name: name of the positive class.
        rows, positives: number of test rows, and of rows of the positive class among them.
        rate: share of the positive class, with Wilson's interval.
        predicted: mean predicted probability of the positive class.
        intervals: AUC, average precision and KS with intervals, by the measure's name.
        table: lift table, which has tenths of the rows by their score, the highest first.
    """

    class_name: str
    rows: Count
    positives: Count
    rate: MeasureInterval
    predicted: float
    intervals: Mapping[str, MeasureInterval]
    table: tuple[LiftRow, ...] = ()

    @classmethod
    def from_scores(cls, scored: Scored, class_name: str) -> "Ranking | None":
        """Return the ranking metrics of test predictions; None if there are no rows to rank.

        `scored`: the predictions, for two classes. `class_name`: name of the positive class.
        """
        table = lift_table(scored)
        if not table:
            return None
        rows = len(scored.truth)
        positives = int(scored.truth.sum())
        estimates = estimate_measures(scored)
        low, high = estimate_share(positives, rows)
        return cls(
            class_name=class_name,
            rows=rows,
            positives=positives,
            table=table,
            rate=MeasureInterval(value=positives / rows, low=low, high=high),
            predicted=float(scored.scores[:, 1].mean()),
            intervals={name: MeasureInterval.from_estimate(estimates[name]) for name in RANKED},
        )

    @property
    def is_met(self) -> bool:
        """Whether the mean predicted probability lies in the interval of the observed rate."""
        low = self.rate.low
        high = self.rate.high
        return low is not None and high is not None and low <= self.predicted <= high


class ReportedCosts(StoredResult):
    """The privacy costs that one passive reported with its signature.

    Attributes:
        accounts: the costs; empty: the passive has no privacy ledger.
        step: the step of its last report; None: it never sent a report.
    """

    accounts: tuple[Contributions, ...] = ()
    step: int | None = None


_MAX_LISTED_COEFFICIENTS = 8  # coefficients in one line
_HELP_FIELD_BY_EARLIER_KEY = {
    "rows": "row_count",
    "deviation": "standard_error",
    "right": "vote_accuracy",
    "alone": "local_accuracy",
    "learnt": "learnt_gain",
    "always": "is_always_used",
    "averaged": "is_averaged",
}
"""Fields of `MeasuredHelp`, by the keys that they have in results of earlier versions."""


class Coefficient(StoredResult):
    """A coefficient of a generalised linear model.

    Attributes:
        column: name of the feature.
        score: the class whose score it changes; "": the model predicts a number or a count.
        per_deviation: change of the score for one standard deviation of a numeric column, or for
            being in a category.
        per_unit: change of the score for one unit of the column; None: the column is constant.
    """

    column: str
    score: str = ""
    per_deviation: float
    per_unit: float | None = None


class PartyCoefficients(StoredResult):
    """A party's coefficients of a generalised linear model, and the active's intercepts.

    Attributes:
        link: the quantity that the model's terms add up to, such as "log-odds".
        intercepts: score -> its value if every numeric column is at its mean; empty at a passive.
    """

    party: str
    link: str
    coefficients: tuple[Coefficient, ...]
    intercepts: Mapping[str, float] = {}

    def describe_largest(self) -> str:
        """Return one line with the intercepts and the largest coefficients for one deviation."""
        entries = [("intercept", name, value) for name, value in self.intercepts.items()]
        ordered = sorted(self.coefficients, key=lambda coefficient: -abs(coefficient.per_deviation))
        largest = ordered[:_MAX_LISTED_COEFFICIENTS]
        entries += [
            (coefficient.column, coefficient.score, coefficient.per_deviation)
            for coefficient in largest
        ]
        has_several_scores = len({coefficient.score for coefficient in self.coefficients}) > 1
        texts = [
            f"{column} {f'of {score} ' if has_several_scores else ''}{value:+.3g}"
            for column, score, value in entries
        ]
        omitted = len(ordered) - len(largest)
        omission = f", and {omitted} smaller ones in the report" if omitted else ""
        return f"{self.link}: {', '.join(texts)}{omission}"


class Outcome(StoredResult):
    """The contents of result.json, with the cross-checks of accountants.json if that was written.

    Attributes:
        accuracy: inference variant (way to predict) -> accuracy on the test rows.
        wire_bytes, seconds, steps: totals of all sessions of the run; steps that were repeated
            after an interruption count again.
        privacy: the privacy cost of the party that spent most.
        sessions: number of sessions whose contract all parties signed.
        aligned_rows, train_rows, labelled_rows, test_rows: numbers of the active's rows.
        sum: facts about the secure sums of the run.
        attendance: the passives that stopped answering.
        guarantee: the run's guarantees in words.
        apart: whether the parties ran in processes of their own.
        contributions: passive -> privacy cost of its votes or contributions.
        promises: the privacy guarantees of `privacy` and `contributions`, one for each kind of
            epsilon, for programs; missing in older versions. Readers of folders use
            `compute_guarantees`.
        stated: passive in its own process -> the privacy costs that it signed; the signatures
            are in `statements.json`.
        agreement: how far the passives' votes agree with the active's labels.
        help: the value of votes, measured on the active's labelled rows; None: there were no votes.
        local_models: names of the local models that learnt the labels at the end.
        measure: name of the run's main measure.
        measures: variant -> name of a measure -> value on the test rows.
        threshold: probability from which the second of two classes is predicted; None: the
            likeliest class is predicted.
        undefined: variant -> name of an undefined measure -> the reason.
        calibration, ranking: of the active's model for two classes; None: not done, not measured.
        never_predicted: labelled class that is predicted for no test row -> the threshold that
            labelled training rows would choose (None: none is proposed).
        less_protected: a sentence for each setting that protects less than by default.
        shared_organisations: a sentence for each organisation that runs several parties, and so can
            read or alter more; empty without a sealed project.
        measured_rows: inference variant -> number of test rows that its measures use; missing
            in older versions. Readers use `count_measured_rows` instead.
        coefficients: coefficients of a generalised linear model: the active's own or, if one
            process simulated all parties, all parties'.
    """

    method: str
    accuracy: Mapping[str, float] = Field(min_length=1)
    wire_bytes: int
    privacy: Privacy
    seconds: float
    sessions: Count = 1
    steps: Count | None = None
    aligned_rows: int | None = None
    train_rows: int | None = None
    labelled_rows: int | None = None
    test_rows: int | None = None
    sum: Mapping[str, Any] = {}
    attendance: Attendance = Attendance()
    guarantee: str | None = None
    apart: bool = False
    contributions: Mapping[str, Contributions] = {}
    promises: tuple[StoredGuarantee, ...] = ()
    stated: Mapping[str, ReportedCosts] = {}
    agreement: Mapping[str, VoteAgreement] = {}
    help: MeasuredHelp | None = None
    local_models: Mapping[str, tuple[str, ...]] = {}
    measure: str = ACCURACY.name
    measures: Mapping[str, Mapping[str, float]] = {}
    threshold: float | None = None
    undefined: Mapping[str, Mapping[str, str]] = {}
    calibration: Calibration | None = None
    ranking: Ranking | None = None
    never_predicted: Mapping[str, float | None] = {}
    less_protected: tuple[str, ...] = ()
    shared_organisations: tuple[str, ...] = ()
    measured_rows: Mapping[str, Count] = {}
    coefficients: tuple[PartyCoefficients, ...] = ()

    @field_validator("help", mode="before")
    @classmethod
    def _rename_earlier_keys(cls, stored: Any) -> Any:
        """Return the stored help with today's keys, for results of earlier versions."""
        if not isinstance(stored, dict):
            return stored
        return {_HELP_FIELD_BY_EARLIER_KEY.get(key, key): value for key, value in stored.items()}

    @property
    def headline_measure(self) -> Measure:
        """The main measure of the run. Raises CheckpointError: the file names an unknown one."""
        try:
            return find_measure(self.measure)
        except ValueError as error:
            raise CheckpointError(f"result.json: measure {error}") from None

    @property
    def scores(self) -> dict[str, float]:
        """The value of the run's main measure, by inference variant; NaN if undefined."""
        return list_scores(self.measure, self.accuracy, self.measures)


def compute_guarantees(config: Config, outcome: Outcome) -> tuple[Promise, ...]:
    """Return the privacy guarantees of a finished run, by its settings and privacy costs."""
    cost_by_passive = {
        name: contributions.model_dump() for name, contributions in outcome.contributions.items()
    }
    return list_guarantees(config, outcome.privacy, spent_by_passive=cost_by_passive)


def count_measured_rows(config: Config, outcome: Outcome, variant: str) -> int | None:
    """Return the number of test rows on which an inference variant was measured; None: unknown.

    If all parties are needed to predict, only test rows of people whom all know are measured.
    Results of older versions do not state the number. Then it is known only for a method whose
    active predicts alone: all its test rows.
    """
    count = outcome.measured_rows.get(variant)
    if count is not None:
        return count
    predicts_alone = "the active predicts alone" in config.method.exchange_facts
    if variant == config.method.name and predicts_alone:
        return outcome.test_rows
    return None


def describe_unpredicted_classes(
    config: Config, never_predicted: Mapping[str, float | None]
) -> str | None:
    """Return a sentence on classes that no test row is predicted as, with a setting to change that.

    None means that every class is predicted.

    `never_predicted`: such a class -> a threshold with which it would be predicted, chosen on
    labelled training rows (None: there is no such threshold, as for more than two classes).
    """
    if not never_predicted:
        return None
    names = tuple(never_predicted)
    has_single_class = len(names) == 1
    classes = f"class {names[0]}" if has_single_class else f"any of the classes {', '.join(names)}"
    statement = f"no test row is given {classes}"
    threshold = never_predicted[names[0]]
    # A setting is named only if it is valid with the others, and is not set so already.
    if threshold is not None and _can_change_run(config, "threshold", "balanced_accuracy"):
        return (
            f"{statement}; with threshold: balanced_accuracy the positive class begins at "
            f"{threshold:.3g}, chosen on labelled training rows"
        )
    if _can_change_run(config, "train.class_weights", "balanced"):
        return f"{statement}; train.class_weights: balanced may change that"
    if threshold is None and has_single_class and _can_change_run(config, "threshold", "0.1"):
        return f"{statement}; a threshold of your own, such as threshold: 0.1, may change that"
    return (
        f"{statement}; no setting of method {config.method.name} here would change that: rank rows "
        f"by p({names[0]}) of its predictions, and choose how many of them are given it"
    )


def _can_change_run(config: Config, key: str, value: str) -> bool:
    """Return whether a setting could be added: it is valid with the others, and changes something.

    `key`: dotted path, such as train.class_weights. `value`: the value as YAML text.
    """
    text = dump_settings(config)
    try:
        return load_config_text(text, overrides=(f"{key}={value}",)) != config
    except ConfigError:
        return False


def load_common_people(folder: RunFolder) -> tuple[CommonPeople, ...]:
    """Return each party's report on its aligned people; empty if the run aligned nobody."""
    if not folder.common_people.is_file():
        return ()
    return load_json(folder.common_people, tuple[CommonPeople, ...])


def write_outcome(folder: RunFolder, outcome: Outcome) -> None:
    """Write `result.json`, which marks the run as finished, and digests of all the run's files."""
    content = outcome.model_dump(mode="python")
    folder.write_result({RUN_RESULT.number_key: RUN_RESULT.current_number, **content})


def load_outcome(folder: RunFolder) -> Outcome:
    """Return the result that `write_outcome` wrote.

    If `accountants.json` was written later, its epsilons are included.

    Raises CheckpointError: the file is missing, or of another format.
    """
    outcome = load_json(folder.result, Outcome, file_format=RUN_RESULT)
    if not folder.accountants.is_file():
        return outcome
    accountants = load_json(folder.accountants, dict[str, float | str])
    privacy = outcome.privacy.model_copy(update={"accountants": accountants})
    return outcome.model_copy(update={"privacy": privacy})


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The full record of a simulated run, for attacks and reports; no real party has it.

    Attributes:
        config: settings of the run.
        data: the tables of all parties.
        alignment: party -> rows of its own table, such that the k-th row is of the same person at
            every party; empty if nothing was aligned.
        transcript: messages and bytes by link and kind, and the stored payloads.
        model: the active's model, features -> class scores, on the CPU; None: the active cannot
            predict alone.
        encoders: passive -> its network; empty if the method's passives have no such network.
    """

    config: Config
    data: VerticalData
    alignment: Mapping[str, Tensor]
    transcript: Transcript
    model: nn.Module | None = None
    encoders: Mapping[str, nn.Module] = field(default_factory=dict)


def load_recording(
    path: PathLike,
    *,
    data: VerticalData | None = None,
    encoder: ModuleSource | None = None,
    head: ModuleSource | None = None,
    encoders: Mapping[str, ModuleSource] = MappingProxyType({}),
) -> Recording:
    """Load the record of a finished, simulated run from its folder, to mount attacks on it.

    Args:
        path: folder of the run.
        data: data of the run; None: they are loaded again as the run's settings say. Runs of
            `secure_apfed.train` need them, since their settings name no files.
        encoder, head: the classes or functions that made user-defined parts of the active's model,
            or such modules; None: the parts are built in.
        encoders: passive -> the class, function or module of its network, if that is user-defined.

    Raises:
        CheckpointError: there is no finished run, it has no record of messages, or this version
            cannot read a file.
        ConfigError: `data` is missing, and the settings name no files.
        ModelError: a model cannot be read, or is user-defined and was not passed.
        DataError: the data are no longer there.
    """
    path = Path(path)
    folder = RunFolder(path)
    if not folder.result.exists():
        raise CheckpointError(f"{path} holds no finished run: {folder.result.name} is missing")
    folder.check_digests()
    load_outcome(folder)  # a run of a newer version is refused before its settings are read
    config = folder.load_config()
    if not folder.transcript.exists():
        raise make_no_recording_error(path)
    transcript = Transcript(config.effective_transcript)
    transcript.keep_in(path)
    try:
        state = msgpack.unpackb(load_bytes(folder.transcript), strict_map_key=False)
        # Raises CheckpointError if this version cannot read the format.
        RECORDING.parse_format_number(folder.transcript, state)
        transcript.load_state_dict(state)
        alignment = load(load_bytes(folder.alignment))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise CheckpointError(
            f"{path}: {folder.transcript.name} or {folder.alignment.name} cannot be read as this "
            f"version writes them ({error}); restore them from a copy"
        ) from error
    if data is None:
        _require_named_rows(path, config)
        data = load_data(config.data, seed=config.seed)
    model = None
    if config.method.can_predict_locally and folder.model.exists():
        model = load_model(path, encoder=encoder, head=head).network
    return Recording(
        config=config,
        data=data,
        alignment=alignment,
        transcript=transcript,
        model=model,
        encoders=_load_encoders(folder, config, data, encoders),
    )


def _require_named_rows(path: Path, config: Config) -> None:
    """Raise ConfigError if the rows of a run came from a program, so that no settings name them.

    The message says how that program can load the run. `path`: folder of the run.
    """
    tables = config.data.parties or {}
    sources = [source for table in tables.values() for source in (table.file, table.database)]
    if tables and not any(sources) and not any(table.rows for table in tables.values()):
        raise ConfigError(
            f"{path}: the rows of this run were handed in by a program, and its settings name no "
            f"file (data.parties.{config.data.active}.file); load it in Python by secure_apfed."
            "interfaces.training.load_training_recording(folder, active, passives), and attack it "
            "by apfed_attacks.run.run_attacks, or at once by train(attacks=[...])"
        )


def _load_encoders(
    folder: RunFolder,
    config: Config,
    data: VerticalData,
    own_source_by_passive: Mapping[str, ModuleSource],
) -> Mapping[str, nn.Module]:
    """Return the passives' trained networks by name; empty if the run stored none.

    Only a simulation stores them: no real party has all of them.

    `own_source_by_passive`: passive -> the class, function or module of its network, if that is
    user-defined.

    Raises CheckpointError: the stored tensors do not fit the networks.
    """
    if not folder.encoders.exists():
        return {}
    try:
        tensors = load(load_bytes(folder.encoders))
        encoders = {}
        for table in data.passives:
            features = tuple(table.features.shape[1:])
            if table.name in own_source_by_passive:
                encoder = make_module(own_source_by_passive[table.name], features=features)
            else:
                encoder = _build_sent_network(config, table.name, features)
            encoder.load_state_dict(remove_prefix(table.name, tensors), assign=True)
            encoders[table.name] = encoder.eval()
    except (RuntimeError, StopIteration, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{folder.encoders} does not hold the encoders: {error}") from error
    return encoders


def _build_sent_network(config: Config, passive: str, features: Shape) -> nn.Module:
    """Return an untrained network as the settings describe a passive's, without memory.

    It is on torch's meta device. So the settings in a folder, which may come from somebody else,
    cannot make the reader allocate more memory than the stored tensors need.

    `passive`: the passive's name. `features`: shape of one row of the passive.

    Raises ModelError: the network is user-defined.
    """
    model = config.find_passive_settings(passive).model or config.model
    if model.is_user_defined:
        raise ModelError(
            f"{passive}: its network is code of its own; load the run by "
            f"load_recording(folder, encoders={{{passive!r}: ...}})"
        )
    with torch.device("meta"):
        return METHODS[config.method.name].build_sent_network(config, passive, features)


def make_no_recording_error(path: Path | None) -> CheckpointError:
    """Return the error for a run whose parties ran in processes of their own.

    `path`: the run's folder; None: it has none.
    """
    return CheckpointError(
        f"{path or 'this run'} has no record of what all parties sent: each ran in a process of "
        "its own, and none holds it; run it with --transport memory to mount attacks"
    )


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of a run, for a display.

    Attributes:
        epoch, step: numbers of the present epoch and step.
        epochs, steps: their totals.
        loss: mean loss of this epoch's steps (on a GPU, of the steps whose loss was read); None
            under DP-SGD, whose noise does not cover losses.
        accuracy, score: accuracy and the value of `measure` at the last evaluation; None: not
            evaluated yet.
        measure: name of the run's main measure.
        figure: name of the epsilon that bounds what left a party, a key of
            `promises.MEANING_BY_EPSILON`.
        epsilon: its value; None: nothing is sent, or no passive has reported its privacy cost yet.
        promise: "bounded" by a finite epsilon, "no guarantee" (infinite) or "nothing is sent";
            None: no passive has reported its privacy cost yet.
        wire_bytes: bytes sent on all links so far.
    """

    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float | None
    accuracy: float | None
    epsilon: float | None
    wire_bytes: int
    figure: str = "epsilon_x"
    promise: GuaranteeState | None = None
    measure: str = ACCURACY.name
    score: float | None = None

    @property
    def promise_text(self) -> str:
        """The name of the epsilon and its guarantee, in one line."""
        return describe_epsilon(self.figure, self.epsilon)


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The result of a finished run.

    Attributes:
        method: name of the method.
        accuracy: inference variant (way to predict) -> accuracy on the test rows.
        wire_bytes: bytes on all links in all sessions.
        folder: folder of the run; None: nothing was written.
        sessions: number of sessions whose contract all parties signed.
        steps: training steps in all sessions; repeated steps count again.
        measure: name of the run's main measure.
        measures: variant -> name of a measure -> value on the test rows.
        undefined: variant -> name of an undefined measure -> the reason.
        ranking, calibration: of the first variant, if it has two classes; None: not measured, not
            done.
        threshold: decision threshold of the active's model; None: it predicts the likeliest class.
        never_predicted: labelled class that is predicted for no test row -> the threshold that
            labelled training rows would choose (None: none is proposed).
        privacy: the privacy cost of the party that spent most.
        contributions: passive that adds noise -> the privacy cost of its contributions, in plain
            values.
        promises: the privacy guarantees that follow from `privacy` and `contributions`, one for
            each kind of epsilon.
        stated: passive in its own process -> the privacy costs that it signed.
        trained: the active's rows as used in training, with the labels that its label mechanism
            returned; None if the active ran in another process.
        help: the value of votes, measured on labelled rows; None: there were no votes.
        test_scores: the predictions for the test rows, by variant; empty if the active ran in
            another process.
        measured_rows: variant -> number of test rows with a prediction.
        coefficients: coefficients of a generalised linear model, as `Outcome` stores them.
        local_models: names of the local models that learnt the labels at the end, as `Outcome` has
            them.
        recorded: the experimenter's record, if one process simulated all parties.
        own_networks: the active's trained networks, if one process simulated all parties and they
            predict alone.
    """

    method: str
    accuracy: Mapping[str, float]
    wire_bytes: int
    privacy: PrivacySpent
    folder: Path | None
    sessions: int = 1
    steps: int | None = None
    contributions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    promises: tuple[Promise, ...] = ()
    stated: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    trained: OwnData | None = field(default=None, repr=False)
    recorded: Recording | None = None
    help: MeasuredHelp | None = None
    test_scores: Mapping[str, Scored] = field(default_factory=dict, repr=False)
    said = make_former_name("said", "test_scores")
    measure: str = ACCURACY.name
    measures: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    threshold: float | None = None
    undefined: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    calibration: Calibration | None = None
    ranking: Ranking | None = None
    never_predicted: Mapping[str, float | None] = field(default_factory=dict)
    measured_rows: Mapping[str, int] = field(default_factory=dict)
    own_networks: ActiveNetworks | None = field(default=None, repr=False)
    coefficients: tuple[PartyCoefficients, ...] = ()
    local_models: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, without other parties' rows and without live networks."""
        return {**self.__dict__, "recorded": None, "own_networks": None}

    @property
    def scores(self) -> dict[str, float]:
        """The value of the run's main measure, by inference variant; NaN if undefined."""
        return list_scores(self.measure, self.accuracy, self.measures)

    @property
    def recording(self) -> Recording:
        """The record of all messages, for attacks.

        Raises CheckpointError: the parties ran in processes of their own, and nobody has it.
        """
        if self.recorded is None:
            raise make_no_recording_error(self.folder)
        return self.recorded


def list_scores(
    measure: str, accuracy: Mapping[str, float], measures: Mapping[str, Mapping[str, float]]
) -> dict[str, float]:
    """Return the value of one measure by inference variant; NaN if it is undefined.

    `measure`: name of the measure. `accuracy`: variant -> accuracy. `measures`: variant -> name of
    a measure -> value.
    """
    if measure == ACCURACY.name:
        return dict(accuracy)
    return {name: measures.get(name, {}).get(measure, math.nan) for name in accuracy}


def measure_text(
    measure: Measure, variant: str, value: float, undefined: Mapping[str, Mapping[str, str]]
) -> str:
    """Return a measure's value as text; if it is undefined (NaN), with the reason.

    `variant`: the inference variant. `undefined`: reasons by variant and by a measure's name.
    """
    text = measure.format_value(value)
    reason = undefined.get(variant, {}).get(measure.name, "")
    return f"{text}: {reason}" if math.isnan(value) and reason else text

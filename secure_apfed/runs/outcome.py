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
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
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
from secure_apfed.learning.votes import Help
from secure_apfed.measures.intervals import Estimate, estimate_measures, proportion_interval
from secure_apfed.measures.table import ACCURACY, LiftRow, Measure, Scored, find_measure, lift_table
from secure_apfed.methods import METHODS
from secure_apfed.methods.method import VoteAgreement
from secure_apfed.networks.models import Shape
from secure_apfed.privacy.ledger import PrivacySpent
from secure_apfed.runs.folder import RunFolder
from secure_apfed.runs.solo import load_model
from secure_apfed.settings.promises import Figure, Promise, State, describe_epsilon, promises_of

RANKED = ("auc", "average_precision", "ks")
"""Names of the measures that a report on the ranking of two classes contains."""


def _parse_epsilon(value: Any) -> Any:
    """Return infinity for null and for texts that stand for it, since JSON has no infinity."""
    return math.inf if value in (None, "inf", "infinity", "Infinity") else value


Count = Annotated[int, Field(ge=0, le=2**31)]


Epsilon = Annotated[float, BeforeValidator(_parse_epsilon)]


class Written(BaseModel):
    """The base of results stored by a run; unknown fields are accepted, so that readers of other
    versions work.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")


class Privacy(Written):
    """The privacy cost of the run; inf: no guarantee."""

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


class Attendance(Written):
    """The passives that stopped answering in the last session.

    Attributes:
        left: the step from which on each is absent.
        steps_without_all: steps that were played without all passives.
    """

    left: Mapping[str, int] = {}
    steps_without_all: int = 0


class Contributions(Written):
    """The privacy cost of one passive's votes or contributions to sums.

    `figure`: the name of its epsilon in `secure_apfed.settings.promises.FIGURES`.
    """

    figure: str = "epsilon_c"
    epsilon: Epsilon
    delta: float
    releases: Count
    trace: tuple[str, ...] = ()


class Promised(Written):
    """A privacy guarantee, for programs; see `secure_apfed.settings.promises.Promise`."""

    state: State
    figure: Figure
    epsilon: Annotated[float, Field(gt=0)] | None
    delta: float | None = None
    releases: Count | None = None
    party: str = ""
    why: str = ""


class Calibration(Written):
    """The line that calibrates the log-odds of two classes: slope times them plus offset.

    With it the mean probability of the unlabelled training rows is `rate`.
    """

    rate: float
    slope: float
    offset: float


class MeasureInterval(Written):
    """A measure of test rows and its 95 % interval over them; None: there is none."""

    value: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def from_estimate(cls, estimate: Estimate) -> "MeasureInterval":
        """Return an estimate with None in place of undefined ends."""
        low, high = (None if math.isnan(end) else end for end in (estimate.low, estimate.high))
        return cls(value=estimate.value, low=low, high=high)

    def format_interval(self, measure: Measure) -> str:
        """Return value and interval as text, in the measure's format."""
        if self.low is None or self.high is None:
            return measure.format_value(self.value)
        ends = f"{measure.format_value(self.low)}, {measure.format_value(self.high)}"
        return f"{measure.format_value(self.value)} [{ends}]"


class Ranking(Written):
    """The ranking of test rows: how well it separates the positive one of two classes.

    Attributes:
        class_name: name of the positive class.
        rows, positives: number of test rows, and of positives among them.
        rate: share of positives, with Wilson's interval.
        predicted: mean predicted probability of the positive class.
        intervals: AUC, average precision and KS.
        table: tenths of the rows by their score, the highest first.
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
        """Measure the ranking of these rows; None if they do not define it.

        `class_name`: name of the positive class.
        """
        table = lift_table(scored)
        if not table:
            return None
        rows = len(scored.truth)
        positives = int(scored.truth.sum())
        estimates = estimate_measures(scored)
        low, high = proportion_interval(positives, rows)
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


class Stated(Written):
    """The privacy costs that one passive signed; empty: it counts nothing.

    Attributes:
        step: the step of its last signed report; None: it never sent one.
    """

    accounts: tuple[Contributions, ...] = ()
    step: int | None = None


_MAX_SHOWN = 8  # coefficients in one line


class Coefficient(Written):
    """A coefficient of a generalised linear model.

    Attributes:
        score: the class whose log-odds it moves; "" where there is one number or count.
        per_deviation: change for one standard deviation of the column; of a category, for being in
            it.
        per_unit: change for one unit of the column; None: the column is constant.
    """

    column: str
    score: str = ""
    per_deviation: float
    per_unit: float | None = None


class PartyCoefficients(Written):
    """A party's coefficients of a generalised linear model, and the active's intercepts.

    Attributes:
        link: what the terms add up to, as "log-odds".
        intercepts: at the active, score -> its value where every numeric column is at its mean.
    """

    party: str
    link: str
    coefficients: tuple[Coefficient, ...]
    intercepts: Mapping[str, float] = {}

    def describe_largest(self) -> str:
        """Return the largest coefficients for one deviation in one line, the intercept first."""
        entries = [("intercept", name, value) for name, value in self.intercepts.items()]
        ordered = sorted(self.coefficients, key=lambda coefficient: -abs(coefficient.per_deviation))
        shown = ordered[:_MAX_SHOWN]
        entries += [
            (coefficient.column, coefficient.score, coefficient.per_deviation)
            for coefficient in shown
        ]
        has_several_scores = len({coefficient.score for coefficient in self.coefficients}) > 1
        texts = [
            f"{column} {f'of {score} ' if has_several_scores else ''}{value:+.3g}"
            for column, score, value in entries
        ]
        omitted = len(ordered) - len(shown)
        more = f", and {omitted} smaller ones in the report" if omitted else ""
        return f"{self.link}: {', '.join(texts)}{more}"


class Outcome(Written):
    """The contents of result.json, with the cross-checks of accountants.json if that was written.

    Attributes:
        wire_bytes, seconds, steps: of all sessions of the run; steps repeated after an interruption
            count again. sessions: how many all parties agreed on.
        promises: the privacy guarantees of `privacy` and `contributions`, one for each kind of
            epsilon, for programs; missing in older versions. Readers of folders use `promises_in`.
        stated: passive in its own process -> the privacy costs that it signed; the signatures
            are in `statements.json`.
        help: the value of votes, measured on the active's labelled rows; None: there were no votes.
        coefficients: coefficients of a generalised linear model: the active's own or, if one
            process simulated all parties, those of all.
        less_protected: a sentence of each setting that protects less than by default.
        shared_organisations: a sentence of each organisation that reads or alters more because it
            runs several parties, where a sealed project says who runs them.
        measured_rows: inference variant -> number of test rows that its measures use; missing
            in older versions. Readers use `count_measured_rows` instead.
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
    promises: tuple[Promised, ...] = ()
    stated: Mapping[str, Stated] = {}
    agreement: Mapping[str, VoteAgreement] = {}
    help: Help | None = None
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

    @property
    def headline_measure(self) -> Measure:
        """The main measure of the run. Raises CheckpointError: unknown name."""
        try:
            return find_measure(self.measure)
        except ValueError as error:
            raise CheckpointError(f"result.json: measure {error}") from None

    @property
    def scores(self) -> dict[str, float]:
        return scores_of(self.measure, self.accuracy, self.measures)


def promises_in(config: Config, outcome: Outcome) -> tuple[Promise, ...]:
    """Return the privacy guarantees of a finished run, by its settings and privacy costs."""
    accounts = {name: account.model_dump() for name, account in outcome.contributions.items()}
    return promises_of(config, outcome.privacy, contributions=accounts)


def count_measured_rows(config: Config, outcome: Outcome, variant: str) -> int | None:
    """Return on how many test rows an inference variant was measured; None: not known.

    Joint inference covers only people whom all parties know, which may be fewer test rows than the
    active has.
    """
    count = outcome.measured_rows.get(variant)
    if count is None and variant == config.method.name:
        return outcome.test_rows if "the active predicts alone" in config.method.facts else None
    return count


def describe_unpredicted_classes(
    config: Config, never_predicted: Mapping[str, float | None]
) -> str | None:
    """Return in words which classes are predicted for no test row, and which settings would change
    that; None if every class is predicted.

    `never_predicted`: class -> the threshold chosen on labelled training rows; None: there is
    none, as for more than two classes.
    """
    if not never_predicted:
        return None
    names = tuple(never_predicted)
    classes = f"class {names[0]}" if len(names) == 1 else f"any of the classes {', '.join(names)}"
    never = f"no test row is given {classes}"
    threshold = never_predicted[names[0]]
    if threshold is not None and _can_change_run(config, "threshold", "balanced_accuracy"):
        return (
            f"{never}; with threshold: balanced_accuracy the positive class begins at "
            f"{threshold:.3g}, chosen on labelled training rows"
        )
    if _can_change_run(config, "train.class_weights", "balanced"):
        return f"{never}; train.class_weights: balanced may change that"
    if threshold is None and len(names) == 1 and _can_change_run(config, "threshold", "0.1"):
        return f"{never}; a threshold of your own, such as threshold: 0.1, may change that"
    return (
        f"{never}; no setting of method {config.method.name} here would change that: rank rows by "
        f"p({names[0]}) of its predictions, and choose how many of them are given it"
    )


def _can_change_run(config: Config, key: str, value: str) -> bool:
    """Return whether this setting is valid with the others and would change the configuration.

    `key`: dotted path, as train.class_weights. `value`: the value as YAML text.
    """
    text = dump_settings(config)
    try:
        return load_config_text(text, overrides=(f"{key}={value}",)) != config
    except ConfigError:
        return False


def load_common_people(folder: RunFolder) -> tuple[CommonPeople, ...]:
    """Read each party's report on its aligned people."""
    if not folder.common.is_file():
        return ()
    return load_json(folder.common, tuple[CommonPeople, ...])


def write_outcome(folder: RunFolder, outcome: Outcome) -> None:
    """Write `result.json` and the digests of all that the run wrote: it is finished."""
    content = outcome.model_dump(mode="python")
    folder.write_result({RUN_RESULT.key: RUN_RESULT.number, **content})


def load_outcome(folder: RunFolder) -> Outcome:
    """Read a result that `write_outcome` wrote. Raises CheckpointError: missing, or of another
    format.
    """
    outcome = load_json(folder.result, Outcome, file_format=RUN_RESULT)
    if not folder.accountants.is_file():
        return outcome
    checked = load_json(folder.accountants, dict[str, float | str])
    privacy = outcome.privacy.model_copy(update={"accountants": checked})
    return outcome.model_copy(update={"privacy": privacy})


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The full record of a simulated run, for attacks and reports; no real party has it.

    Attributes:
        alignment: party -> positions in its own table; position k is the same person at
            every party. Empty where nothing was aligned.
        transcript: every flow, and the stored payloads.
        model: the active's model, which predicts alone, features -> class scores, on the CPU; None
            where the method has none.
        encoders: passive -> its network, where passives send or add representations.
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
    """Load a finished run from its folder; its data are loaded again from its configuration.

    Args:
        data: data of the run, if its settings name no files, as for `secure_apfed.train`.
        encoder, head: classes or functions that make a user-defined model, as `load_model` takes
            them.
        encoders: passive -> what made the network whose output it sent, if that is user-defined.

    Raises:
        CheckpointError: no finished run there, or a file that this version cannot read.
        ModelError: the same of a model.
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
        raise no_recording(path)
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
    if config.method.predicts_alone and folder.model.exists():
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
    """Raise ConfigError if the settings name no files for the rows, since a program passed them.

    The message says how that program can load the run.
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
    folder: RunFolder, config: Config, data: VerticalData, own: Mapping[str, ModuleSource]
) -> Mapping[str, nn.Module]:
    """Return the passives' trained networks by name; empty if none are stored.

    No real party has them all. `own`: passive -> what makes its network, if that is user-defined.

    Raises CheckpointError: the stored tensors do not fit the networks.
    """
    if not folder.encoders.exists():
        return {}
    try:
        tensors = load(load_bytes(folder.encoders))
        encoders = {}
        for table in data.passives:
            features = tuple(table.features.shape[1:])
            if table.name in own:
                encoder = make_module(own[table.name], features=features)
            else:
                encoder = _build_sent_network(config, table.name, features)
            encoder.load_state_dict(remove_prefix(table.name, tensors), assign=True)
            encoders[table.name] = encoder.eval()
    except (RuntimeError, StopIteration, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{folder.encoders} does not hold the encoders: {error}") from error
    return encoders


def _build_sent_network(config: Config, passive: str, features: Shape) -> nn.Module:
    """Return a passive's network on torch's meta device, without memory for its parameters.

    So a folder's settings cannot make the reader allocate more than the stored tensors need.

    `features`: shape of one row of the passive. Raises ModelError: the network is user-defined.
    """
    model = config.settings_of(passive).model or config.model
    if model.is_own:
        raise ModelError(
            f"{passive}: its network is code of its own; load the run by "
            f"load_recording(folder, encoders={{{passive!r}: ...}})"
        )
    with torch.device("meta"):
        return METHODS[config.method.name].build_sent_network(config, passive, features)


def no_recording(path: Path | None) -> CheckpointError:
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
        loss: running mean of this epoch, on a GPU of its steps that were read so far; None under
            DP-SGD, whose noise does not cover it.
        accuracy, score: of the headline variant, when it was evaluated last.
        figure, epsilon, promise: name (in `promises.FIGURES`) and value of the epsilon of what left
            a party, and its state: "bounded" by a finite epsilon, "no guarantee" (infinite) or
                "nothing is sent" (None). Both None:
            no passive has reported its privacy cost yet.
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
    promise: State | None = None
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
        accuracy: inference variant -> accuracy on the test rows.
        measure: name of the run's main measure; measures: variant -> name -> value on the test
            rows.
        undefined: the reason, by variant and name, for measures that are undefined on its test
            rows.
        ranking, calibration: of the headline, if it has two classes; None: not measured, not done.
        threshold: decision threshold of the active's model; None: it predicts the likeliest class.
        never_predicted: classes with labels that no test row is given, each with the threshold that
            labelled training rows would choose; None: there is none to choose.
        wire_bytes: bytes on all links in all sessions; sessions: how many all parties agreed on.
        steps: training steps in all sessions; repeated steps count again.
        privacy: the privacy cost of the party that spent most.
        contributions: passive that adds noise -> the privacy cost of its contributions, in plain
            values.
        promises: the privacy guarantees of both, one for each kind of epsilon.
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
    help: Help | None = None
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
        return scores_of(self.measure, self.accuracy, self.measures)

    @property
    def recording(self) -> Recording:
        """The record of all messages, for attacks. Raises CheckpointError: the
        parties ran apart.
        """
        if self.recorded is None:
            raise no_recording(self.folder)
        return self.recorded


def scores_of(
    measure: str, accuracy: Mapping[str, float], measures: Mapping[str, Mapping[str, float]]
) -> dict[str, float]:
    """Return one measure of each inference variant; NaN where it is undefined.

    `measure`: name of the measure. `accuracy`: variant -> accuracy. `measures`: variant -> name ->
    value.
    """
    if measure == ACCURACY.name:
        return dict(accuracy)
    return {name: measures.get(name, {}).get(measure, math.nan) for name in accuracy}


def measure_text(
    measure: Measure, variant: str, value: float, undefined: Mapping[str, Mapping[str, str]]
) -> str:
    """Return a measure's value as text, with the reason if it is undefined.

    `variant`: the inference variant. `undefined`: reasons by variant and measure.
    """
    text = measure.format_value(value)
    reason = undefined.get(variant, {}).get(measure.name, "")
    return f"{text}: {reason}" if math.isnan(value) and reason else text

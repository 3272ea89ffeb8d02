"""All settings of one run, as they are declared; `secure_apfed.config.Config` checks them.

What an attack needs is kept as names and options, since attacks lie above this package; the
composition root validates them.
"""

from abc import ABC
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializeAsAny, field_validator, model_validator

from secure_apfed.base.names import RunName
from secure_apfed.settings import EACH_ALONE, THE_ACTIVE, Settings, protects
from secure_apfed.settings.alignment import AlignmentSettings
from secure_apfed.settings.data import DataSettings
from secure_apfed.settings.method import MethodSettings
from secure_apfed.settings.plugins import find_import_path, trust_own_code
from secure_apfed.settings.privacy import (
    DefenceSettings,
    DpSgdSettings,
    GuardSettings,
    LabelSettings,
)
from secure_apfed.settings.training import (
    ModelSettings,
    PassiveSettings,
    RuleSettings,
    SumSettings,
    TrainSettings,
)

_Share = Annotated[float, Field(gt=0, lt=1)]


class TranscriptSettings(Settings):
    """The message payloads that are stored for attacks; messages are always counted.

    Attributes:
        keep: which epochs' messages are stored: none, the first and the last, or all; "auto": the
            first and the last if the run names attacks, else none.
    """

    keep: Literal["auto", "none", "first_and_last", "all"] = "auto"

    def count_stored_epochs(self, epoch_count: int) -> int:
        """Return how many epochs of a run of `epoch_count` epochs are stored.

        Raises KeyError: `keep` is "auto", which must be resolved before.
        """
        return {"none": 0, "first_and_last": min(2, epoch_count), "all": epoch_count}[self.keep]


class AttackChoice(Settings):
    """An attack to mount on the finished run.

    Attributes:
        name: a key of `apfed_attacks.ATTACKS`, or "all".
        options: fields of that attack in place of its defaults; "all" takes none.
    """

    name: str
    options: dict[str, Any] = {}

    @field_validator("name")
    @classmethod
    def _trust_code(cls, name: str) -> str:
        """Return the attack's name, after noting code that the party's own settings name.

        Noted code is trusted when the attack is imported, after the run.
        """
        if code := find_import_path(name, "attacks"):
            trust_own_code(code)
        return name


class ThresholdChoice(Settings):
    """The criterion of the decision threshold, in place of a measure; one of the two.

    Attributes:
        cost: the cost of missing a row of the positive class; a false alarm costs 1. For calibrated
            probabilities the threshold is 1 / (1 + cost), for others the one with the least cost on
            the labelled training rows.
        rate: the share of training rows that the threshold assigns to the positive class. Rows
            without a label count too.
    """

    cost: float | None = Field(None, gt=0)
    rate: _Share | None = None

    @model_validator(mode="after")
    def _check_one_term(self) -> Self:
        """Refuse other than exactly one of cost and rate."""
        if (self.cost is None) is (self.rate is None):
            raise ValueError("say one of cost and rate, as threshold: {cost: 10}")
        return self


class RunSettings(Settings, ABC):
    """A complete run.

    Attributes:
        name: the name of the run, its folder and its report.
        seed: the seed of everything reproducible and public (batches, partition), never of keys.
        party_seeds: the seeds of initial weights and dropout: "secret" draws a secret one for each
            party; "shared_for_comparison" uses `seed`, so everybody who knows it knows all initial
            weights. A run then repeats exactly.
        method: the method, alone or with its settings, such as {name: votes, epsilon: 8}.
            docs/run-yaml.md lists all.
        task: what the active's model learns: a key of `secure_apfed.measures.tasks.TASKS`.
        measure: the main measure of the run, a key of `secure_apfed.measures.table.MEASURES`; the
            task's own unless given. The display, the report, the choice of the best baseline and
            studies use it. All measures are written.
        threshold: for two classes, the probability of the positive class (`data.positive`) from
            which the model predicts it; or how to choose it: accuracy, balanced_accuracy, f1,
            {cost: 10} or {rate: 0.05}; null: the more probable class. A measure's threshold is
            chosen on labelled training rows; see `ThresholdChoice`.
        calibration: for two classes: "labels" calibrates log-odds on labelled training rows
            (Platt); a number is the known share of the positive class; "auto" is "labels" if the
            rarer class has under a third of the labels, and else none. It is also none if other
            parties are needed to predict, or if a promise covers labels. Under "labels" the mean
            over rows without a label is the share of labels of the positive class.
        passives: settings by party name; "default" applies to parties that are not named.
        checkpoint_every: epochs between two checkpoints of every party; the last is always saved.
            It changes no figure. A resumed run repeats the steps after its newest checkpoint. Where
            a repeated answer counts again, `rules.spare_answers` must allow for that.
        delta: the delta of every (epsilon, delta) of the run. It applies to the guard, dp_sgd,
            votes and the noise under the sum; randomised answers and labels have delta 0.
        colluders: the number of passives whose noise does not count, since they may help the active
            or add none. It matters where the noise of several passives adds up.
        dp_sgd: differentially private training of the active; null: off.
        defences: changes of gradients without a guarantee, in the order of their application.
        attacks: attacks to mount on the finished run; "all" mounts each with its usual options. If
            parties run in separate processes, each attacks what it sent itself.
        tradeoff: a trade-off study: `run` repeats the run at other strengths and draws accuracy
            against leakage. Its keys are those of `apfed_experiments.tradeoff` without name and
            base.
    """

    name: Annotated[RunName, EACH_ALONE, protects("nobody")]
    seed: Annotated[int, protects("nobody")] = Field(0, ge=0)
    party_seeds: Annotated[
        Literal["secret", "shared_for_comparison"],
        protects(
            "everybody",
            other="everybody knows everybody's initial weights",
            order=("secret", "shared_for_comparison"),
        ),
    ] = "secret"
    method: SerializeAsAny[MethodSettings]
    task: Annotated[str, THE_ACTIVE, protects("nobody")] = "classification"
    measure: Annotated[str, THE_ACTIVE, protects("nobody")] = "accuracy"
    threshold: Annotated[_Share | str | ThresholdChoice | None, THE_ACTIVE, protects("nobody")] = (
        None
    )
    calibration: Annotated[
        Literal["auto", "none", "labels"] | _Share, THE_ACTIVE, protects("nobody")
    ] = "auto"
    data: DataSettings
    model: ModelSettings = ModelSettings()
    passives: dict[str, PassiveSettings] = {"default": PassiveSettings()}
    train: TrainSettings = TrainSettings()
    alignment: AlignmentSettings = AlignmentSettings()
    secure_sum: SumSettings = SumSettings()
    guard: GuardSettings
    delta: Annotated[float, protects("everybody", higher="every epsilon may fail more often")] = (
        Field(1e-5, gt=0, lt=0.5)
    )
    colluders: Annotated[
        int, protects("the passives", lower="noise of colluding ones is counted on")
    ] = Field(0, ge=0)
    checkpoint_every: Annotated[int, Field(ge=1), THE_ACTIVE, protects("nobody")] = 1
    dp_sgd: Annotated[DpSgdSettings | None, THE_ACTIVE] = None
    defences: Annotated[
        tuple[DefenceSettings, ...], protects("the active", lower="gradients are sent as they are")
    ] = ()
    labels: Annotated[LabelSettings, THE_ACTIVE] = LabelSettings()
    rules: RuleSettings = RuleSettings()
    transcript: Annotated[TranscriptSettings, EACH_ALONE] = TranscriptSettings()
    attacks: Annotated[tuple[AttackChoice, ...], EACH_ALONE] = ()
    tradeoff: Annotated[dict[str, Any], EACH_ALONE] = {}

    @field_validator("attacks", mode="before")
    @classmethod
    def _normalise_attacks(cls, attacks: Any) -> Any:
        """Return attacks as a tuple in which each name is a mapping; a single name becomes a tuple
        of one.

        Anything else is returned as it is, and pydantic refuses it.
        """
        choices = [attacks] if isinstance(attacks, str) else attacks
        if not isinstance(choices, list | tuple):
            return choices
        # The settings accept no list in place of a tuple.
        return tuple({"name": choice} if isinstance(choice, str) else choice for choice in choices)

    def find_passive_settings(self, passive: str) -> PassiveSettings:
        """Return the settings of the passive of this name: its own, or the default ones."""
        return self.passives.get(passive, self.passives.get("default", PassiveSettings()))

    def find_model_settings(self, passive: str) -> ModelSettings:
        """Return the network settings of the passive of this name: its own, or the run's."""
        return self.find_passive_settings(passive).model or self.model

    def note_attacks(self) -> None:
        """Trust the code of this run's attacks later, as this party's own settings name it."""
        for choice in self.attacks:
            trust_own_code(find_import_path(choice.name, "attacks") or choice.name)

    @property
    def effective_transcript(self) -> TranscriptSettings:
        """The transcript's settings with "auto" resolved: payloads are stored if the run is to be
        attacked.
        """
        if self.transcript.keep != "auto":
            return self.transcript
        is_attacked = self.attacks or self.tradeoff
        return TranscriptSettings(keep="first_and_last" if is_attacked else "none")

    @property
    def are_labels_private(self) -> bool:
        """True if the run's results may depend on training labels only through noise."""
        return self.labels.mechanism != "none" or self.dp_sgd is not None

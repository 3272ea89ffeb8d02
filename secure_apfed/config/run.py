"""One run, described completely: one YAML file, one frozen and validated object.

Every package declares the settings of what it holds; here they meet. What an attack
needs is kept as names and options, since attacks lie above this package; the
composition root validates them.
"""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from secure_apfed.alignment import AlignmentSettings
from secure_apfed.config.training import PassiveSettings, RuleSettings, SumSettings, TrainSettings
from secure_apfed.data.settings import DataSettings
from secure_apfed.defences import DefenceSettings, check_defences
from secure_apfed.exchange.transcript import TranscriptSettings
from secure_apfed.models.settings import ModelSettings
from secure_apfed.names import RunName, check_parties
from secure_apfed.privacy.settings import DpSgdSettings, GuardSettings, LabelSettings
from secure_apfed.settings import Settings

__all__ = ["AttackChoice", "Config"]

_PRIVATELY_TRAINED = ("apfed", "apfed_r", "apfed_c", "single_view")


class AttackChoice(Settings):
    """An attack to mount on the finished run: a key of the table, and its options."""

    name: str
    options: dict[str, Any] = {}


class Config(Settings):
    """A complete run.

    Attributes:
        name: of the run, of its folder and its report.
        seed: of everything reproducible (initial weights, batches, partition), never of keys.
        method: apfed (every passive says its objective), apfed_r and apfed_c (the paper's
            two), tvfl (joint training, joint inference) or single_view (the active alone).
        passives: settings by party name; "default" holds for those not named.
        dp_sgd: private training of the active; null: none.
        defences: without a guarantee, beside the guard, in the order in which they act.
    """

    name: RunName
    seed: int = Field(0, ge=0)
    method: Literal["apfed", "apfed_r", "apfed_c", "tvfl", "single_view"]
    data: DataSettings
    model: ModelSettings = ModelSettings()
    passives: dict[str, PassiveSettings] = {"default": PassiveSettings()}
    train: TrainSettings = TrainSettings()
    alignment: AlignmentSettings = AlignmentSettings()
    secure_sum: SumSettings = SumSettings()
    guard: GuardSettings
    dp_sgd: DpSgdSettings | None = None
    defences: tuple[DefenceSettings, ...] = ()
    labels: LabelSettings = LabelSettings()
    rules: RuleSettings = RuleSettings()
    transcript: TranscriptSettings = TranscriptSettings()
    attacks: tuple[AttackChoice, ...] = ()

    @field_validator("passives")
    @classmethod
    def _are_names(cls, passives: dict[str, PassiveSettings]) -> dict[str, PassiveSettings]:
        check_parties(name for name in passives if name != "default")
        return passives

    @model_validator(mode="after")
    def _defences_apply(self) -> "Config":
        check_defences(self.defences, self.method)
        if self.secure_sum.noise is not None and not self.method.startswith("apfed"):
            raise ValueError(
                f"secure_sum.noise: method {self.method} adds no gradients of passives; leave it "
                "out, or use a method of APFed"
            )
        return self

    @model_validator(mode="after")
    def _pairwise_fits(self) -> "Config":
        if self.alignment.mode == "all" or self.method == "single_view":
            return self
        if self.method == "tvfl":
            raise ValueError(
                "alignment.mode: pairwise leaves rows that some passives do not know, and tvfl "
                "needs all passives for every row; use all, or a method of APFed"
            )
        if not self.secure_sum.allow_single_passive:
            raise ValueError(
                "alignment.mode: pairwise opens to the active the gradient of every row that one "
                "passive alone knows; say secure_sum.allow_single_passive: true if that is "
                "acceptable, or use all"
            )
        return self

    @model_validator(mode="after")
    def _private_training_fits(self) -> "Config":
        if self.dp_sgd is None:
            return self
        if self.method not in _PRIVATELY_TRAINED:
            raise ValueError(
                f"dp_sgd: method {self.method} gives the passives more than DP-SGD makes private "
                "(tvfl: the gradient of every row's loss); use "
                f"{', '.join(_PRIVATELY_TRAINED)}, or leave dp_sgd out"
            )
        if self.train.precision == "bfloat16":
            raise ValueError(
                "dp_sgd: gradients of single examples in bfloat16 are too coarse to be clipped; "
                "use train.precision float32 or float64"
            )
        whole_batch = [one.kind for one in self.defences if one.kind in ("nopeek", "mid")]
        if whole_batch:
            raise ValueError(
                f"dp_sgd: defence {whole_batch[0]} adds a loss of the whole batch, which cannot be "
                "clipped by example; leave one of the two out"
            )
        sent = self.method != "single_view"
        if sent and self.guard.mechanism == "none" and self.dp_sgd.epsilon is not None:
            raise ValueError(
                "dp_sgd.epsilon cannot be kept where representations are sent without noise; "
                "choose guard.mechanism gaussian or frozen_gaussian, or give noise_multiplier "
                "(then labels alone are protected)"
            )
        return self

"""Settings of votes: who labels the active's rows, and how the active reads what they say."""

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from secure_apfed.labellers import LABELLERS, PrivateLogistic
from secure_apfed.settings import Settings, unknown_name
from secure_apfed.solo import BASELINES

__all__ = ["BEST_SOLO", "VotesSettings"]

BEST_SOLO = "best_solo"
_PRIORS = (BEST_SOLO, "labeller", *BASELINES)


class VotesSettings(Settings):
    """How parties vote on the labels of the active's rows.

    Attributes:
        labeller: a key of `LABELLERS`: how every party labels rows from its own features and the
            labels that there are.
        form: "soft" votes are shares of the classes that add up to 1 at most, "hard" ones name one
            class. Randomised answers are always hard.
        epsilon: what the vote on one person may cost one passive, the labeller held fixed; null:
            votes are opened without noise.
        delta: of that epsilon; randomised answers have none.
        colluders: passives that may help the active, or add no noise; theirs is not counted.
        prior: what the active believes of its rows before it reads votes: "best_solo", what it
            would do alone by the baseline that its held-out labels choose; a key of `BASELINES`,
            by this one; or "labeller", what its own labeller of the passives' kind says.
        weights_epsilon: what the weights of a labeller that noises them may cost a labelled
            person, at `delta`; for `private_logistic`, which needs it.
        moment_features: d, signs of random hyperplanes under which the moment is taken.
        candidates: requests with encrypted labels that the active makes, of which the passives see
            through all but one: an active that cheats is found out but for one time in so many;
            null: it is trusted. Needed beside an epsilon of encrypted votes.
        broken_audits: how many sessions of a run may end between a passive's word which request is
            kept and the request itself; each gives an active that cheats another chance.
    """

    labeller: str = "spreading"
    form: Literal["soft", "hard"] = "soft"
    prior: str = BEST_SOLO
    epsilon: float | None = Field(None, gt=0)
    delta: float = Field(1e-5, gt=0, lt=0.5)
    colluders: int = Field(0, ge=0)
    weights_epsilon: float | None = Field(None, gt=0)
    moment_features: int = Field(256, ge=8, le=4096)
    candidates: int | None = Field(None, ge=2, le=1024)
    broken_audits: int = Field(1, ge=0)

    @model_validator(mode="after")
    def _weights_fit(self) -> Self:
        if (self.weights_epsilon is None) is (self.labeller == PrivateLogistic.name):
            raise ValueError(
                f"votes.weights_epsilon is for {PrivateLogistic.name}, which needs it; got "
                f"{self.weights_epsilon} for {self.labeller}"
            )
        return self

    @field_validator("prior")
    @classmethod
    def _is_a_prior(cls, name: str) -> str:
        if name not in _PRIORS:
            raise ValueError(unknown_name(name, _PRIORS))
        return name

    @field_validator("labeller")
    @classmethod
    def _is_a_labeller(cls, name: str) -> str:
        if name not in LABELLERS:
            raise ValueError(unknown_name(name, LABELLERS))
        return name

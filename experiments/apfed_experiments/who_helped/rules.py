"""Which coalitions may be asked: what a contract's sums allow, one by one and beside each other."""

from collections.abc import Sequence
from dataclasses import dataclass

from secure_apfed.config import Config
from secure_apfed.errors import ConfigError
from secure_apfed.methods.terms import make_sum, settings_of
from secure_apfed.secure_sums import sum_kind
from secure_apfed.tasks import Classification

__all__ = ["Players", "players_of"]


@dataclass(frozen=True)
class Players:
    """Attributes:
    names: passives that add anything.
    minimum: of them, below which no sum of theirs may be opened.
    """

    names: tuple[str, ...]
    minimum: int


def players_of(config: Config, active: str, passives: Sequence[str]) -> Players:
    """Who is to be told apart, and the least coalition.

    Raises:
        ConfigError: the method has no sum or vote of passives beside a model of the active's own;
            too few passives to tell any apart; or sums of several coalitions would open a
            passive's votes, which a difference of two sums without noise is.
    """
    happens, settings = config.method.happens, config.secure_sum
    helps = {"gradients are summed", "passives vote"} & happens
    if not (helps and "the active predicts alone" in happens):
        raise ConfigError(
            f"method {config.method.name}: contributions are of passives that add gradients or "
            "votes to a model which predicts alone; take apfed_c, votes or one of their kin"
        )
    if config.task != Classification.name:
        raise ConfigError(
            f"task: contributions are told in cross-entropy and accuracy, and task is "
            f"{config.task}; take {Classification.name}"
        )
    names = tuple(name for name in passives if settings_of(config, name).weight > 0)
    minimum = _minimum(config, active, names)
    if len(names) <= minimum:
        raise ConfigError(
            f"{len(names)} passives help, and the contract's sums need {minimum} or more of them, "
            "so no coalition but all may be asked and nobody can be told apart; take more "
            "passives, or say secure_sum.allow_single_passive: true if that is acceptable"
        )
    repeats = "passives vote" in happens and config.method.noise(config) is None
    if repeats and not settings.allow_single_passive:
        raise ConfigError(
            "method.epsilon: votes without noise are the same in every coalition, so the sums of "
            "two that differ by one passive open its votes; say how much a vote may cost, as "
            "method: {name: votes, epsilon: 4}, or secure_sum.allow_single_passive: true if "
            "single votes may be read"
        )
    return Players(names, minimum)


def _minimum(config: Config, active: str, passives: tuple[str, ...]) -> int:
    """1 where single answers are read anyway; else 2 or what thresholds and colluders ask for."""
    happens, least = config.method.happens, 1 + config.colluders
    if "votes are answered singly" in happens:
        return least
    if not config.secure_sum.allow_single_passive:
        least = max(least, 2)
    summed = "contributions are summed" in happens
    if summed and not sum_kind(config.secure_sum).needs_all and len(passives) > 1:
        agreed = make_sum(config, "who helped", active, passives)
        threshold = agreed.parameters().get("threshold")
        # A threshold of all says that nobody may fall silent, not how many hide each other.
        if isinstance(threshold, int) and threshold < len(passives):
            least = max(least, threshold)
    return least

"""What trials cost together, in the figures of the ledgers.

Releases of a row under Gaussian noise compose as in its ledger: mu-GDP runs are together
sqrt(sum of mu^2)-GDP (Dong, Roth and Su 2022, Corollary 2; `privacy.accountants`). Labels,
records in models, and persons at passives add epsilon and delta, which always holds.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from secure_apfed.config import Config
from secure_apfed.methods.pace import planned_releases
from secure_apfed.methods.terms import asked_of
from secure_apfed.privacy.accountants import compose, gdp_epsilon
from secure_apfed.privacy.guard import make_guard
from secure_apfed.runs.outcome import RunResult

__all__ = ["Charge", "bound_of", "charge_of"]


@dataclass(frozen=True, kw_only=True)
class Charge:
    """What one run costs, or several together; infinite where nothing is promised.

    Attributes:
        mu: of Gaussian DP, of a row's representations; delta: at which epsilons are told.
        label: epsilon of one training label; record: of one record in the model.
        passives: by passive, epsilon of one person there.
        added_delta: of the epsilons that add up.
    """

    delta: float
    mu: float = 0.0
    label: float = 0.0
    record: float = 0.0
    passives: Mapping[str, float] = field(default_factory=dict)
    added_delta: float = 0.0

    @property
    def epsilons(self) -> dict[str, float]:
        """By what it protects."""
        return {
            "a row's representations": gdp_epsilon(self.mu, self.delta),
            "a label": self.label,
            "a record in the model": self.record,
            **{f"a person at {name}": one for name, one in self.passives.items()},
        }

    def and_then(self, other: "Charge") -> "Charge":
        """Both, one after the other, on the same people."""
        return Charge(
            delta=self.delta,
            mu=math.hypot(self.mu, other.mu),
            label=self.label + other.label,
            record=self.record + other.record,
            passives=_by_name(self, other, sum),
            added_delta=self.added_delta + other.added_delta,
        )

    def at_least(self, other: "Charge") -> "Charge":
        """What is enough for either, where not both are run."""
        return Charge(
            delta=self.delta,
            mu=max(self.mu, other.mu),
            label=max(self.label, other.label),
            record=max(self.record, other.record),
            passives=_by_name(self, other, max),
            added_delta=max(self.added_delta, other.added_delta),
        )

    def promised(self) -> tuple[str, ...]:
        """What is protected with a finite epsilon that is above 0."""
        return tuple(what for what, one in self.epsilons.items() if 0 < one < math.inf)

    def as_json(self) -> dict[str, Any]:
        """Plain values that `Charge(**...)` takes."""
        return {
            "delta": self.delta, "mu": self.mu, "label": self.label, "record": self.record,
            "passives": dict(self.passives), "added_delta": self.added_delta,
        }  # fmt: skip


def bound_of(config: Config, passives: Iterable[str]) -> Charge:
    """The most that a run of these settings can cost, before anything is sent.

    Args:
        config: of the run.
        passives: names of all.
    """
    noise = config.method.noise(config)
    # No noise is drawn here, so any key does.
    guard = make_guard(
        config.guard, delta=config.delta, releases=asked_of(config).releases, key=bytes(32)
    )
    releases = planned_releases(config, guard)
    mu = compose(guard.mechanism().mu, releases) if releases else 0.0
    if "tables are decomposed" in config.method.happens:
        mu = math.inf
    private = math.inf if config.dp_sgd is None else config.dp_sgd.epsilon or math.inf
    each = math.inf if noise is None or noise.epsilon is None else noise.epsilon
    return Charge(
        delta=config.delta,
        mu=mu,
        label=min(private, config.labels.epsilon or math.inf),
        record=private,
        passives=dict.fromkeys(passives, each),
        added_delta=config.delta,
    )


def charge_of(result: RunResult, bound: Charge) -> Charge:
    """What a finished run did cost: its ledgers' figures, where these are below the bound's."""
    spent, told = result.privacy, result.contributions
    return Charge(
        delta=bound.delta,
        mu=min(spent.mu, bound.mu),
        label=min(spent.epsilon_y, bound.label),
        record=min(spent.epsilon_model, bound.record),
        passives={
            name: float(told[name]["epsilon"]) if name in told else one
            for name, one in bound.passives.items()
        },
        added_delta=bound.added_delta,
    )


def _by_name(first: Charge, second: Charge, put: Any) -> dict[str, float]:
    names = dict.fromkeys([*first.passives, *second.passives])
    return {
        name: put([first.passives.get(name, 0.0), second.passives.get(name, 0.0)]) for name in names
    }

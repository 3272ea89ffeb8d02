"""What private training costs a record: its releases and its updates together.

Run by: the active under DP-SGD. Two ledgers count: one the releases of each row's
representation, one the updates that each row took part in. Both are charged before anything
happens, and both ask here whether the budget of whole training allows it.

What holds, and why, stands in docs/private-training.md. With T releases and T updates of one
record, noise sigma_h on a row clipped to C and sigma on a sum of gradients clipped to C_theta,

    mu^2 = T (2C / sigma_h)^2 + T (2 C_theta / sigma)^2      for the whole record,
    mu^2 = T (2 C_theta / sigma)^2                           for its label alone,

by adaptive composition of Gaussian DP (Dong, Roth and Su 2022, Corollary 2), replace-one.
"""

import math
from dataclasses import replace

from secure_apfed.errors import ConfigError
from secure_apfed.privacy.gdp import Mechanism, gdp_epsilon, gdp_mu
from secure_apfed.privacy.guard import RepresentationGuard
from secure_apfed.privacy.ledger import BudgetExhaustedError, PrivacyLedger, PrivacySpent

__all__ = ["WholeTraining", "calibrate_updates"]

_ASSUMPTIONS = (
    "replace-one; IDs, alignment, the split, batches, the encoding of features, row numbers and "
    "settings are taken as public; training losses and checkpoints stay with the active"
)
_SEEDED = (
    "; and all of it only against somebody who does not know the run's seed, since the noise is "
    "derived from it, and while no step is played twice with other numbers, in this run or another "
    "of that seed"
)


class WholeTraining:
    """One budget over the releases and the updates of the same records.

    Args:
        releases, updates: the ledgers; their largest counts are taken as one record's.
        delta: in (0, 1), of every epsilon here.
        budget: the largest epsilon_model; None never stops.
        seeded: whether the noise is derived from the run's seed, which the statement then says.
    """

    def __init__(
        self, *, releases: PrivacyLedger, updates: PrivacyLedger, delta: float,
        budget: float | None, seeded: bool = False,
    ) -> None:  # fmt: skip
        self._assumptions = _ASSUMPTIONS + (_SEEDED if seeded else "")
        self._releases, self.updates = releases, updates
        self._delta, self._budget = delta, budget
        for ledger in (releases, updates):
            ledger.ask_before_charging(self._check)

    @property
    def mu(self) -> float:
        """Of Gaussian DP of everything so far, for one record."""
        return math.hypot(self._releases.spent().mu, self.updates.spent().mu)

    @property
    def epsilon_model(self) -> float:
        """Of one record: all that the passives receive and the finished model, together."""
        return gdp_epsilon(self.mu, self._delta)

    @property
    def epsilon_y(self) -> float:
        """Of one label, features unchanged, in the same: a release never reads a label."""
        return gdp_epsilon(self.updates.spent().mu, self._delta)

    def account(self, spent: PrivacySpent) -> PrivacySpent:
        """Return what was `spent` on releases, with what training cost as a whole."""
        updates = self.updates.spent()
        lines = (
            f"updates: {updates.releases} of one record at most, mu {updates.mu:.4g} together",
            f"labels, by the updates alone: epsilon_y {self.epsilon_y:.4g}",
            f"record, by both: mu {self.mu:.4g}, epsilon_model {self.epsilon_model:.4g}",
        )
        return replace(
            spent,
            epsilon_y=min(spent.epsilon_y, self.epsilon_y),
            epsilon_model=self.epsilon_model,
            trace=(*spent.trace, *lines),
        )

    def statement(self, guard: RepresentationGuard | None) -> str:
        """What is guaranteed, in words for the report.

        Args:
            guard: of the representations; None where nothing is sent.
        """
        if guard is None:
            return (
                "private training: the finished model is (epsilon_model, delta)-DP for one record, "
                f"its label included; nothing is sent; {self._assumptions}"
            )
        if guard.unsafe:
            return (
                "private training covers labels alone: what the passives receive and the finished "
                "model together are (epsilon_y, delta)-DP for one label; no guarantee for "
                f"features: representations are sent as they are; {self._assumptions}"
            )
        return (
            "private training: what all passives receive and the finished model together are "
            "(epsilon_model, delta)-DP for one record, and (epsilon_y, delta)-DP for its label; "
            f"epsilon_x is its part by releases alone ({guard.statement()}); {self._assumptions}"
        )

    def _check(self, ledger: PrivacyLedger, *, mu: float, step: int) -> None:
        if self._budget is None:
            return
        other = self.updates if ledger is self._releases else self._releases
        epsilon = gdp_epsilon(math.hypot(mu, other.spent().mu), self._delta)
        if epsilon > self._budget:
            raise BudgetExhaustedError(
                f"step {step} was not played: with it, training would cost one record epsilon "
                f"{epsilon:.4g}, the budget (dp_sgd.epsilon) is {self._budget:.4g} at delta "
                f"{self._delta:g}; stop here, or begin a run with more noise or fewer epochs"
            )


def calibrate_updates(
    epsilon: float, delta: float, *, release: Mechanism, releases: int, updates: int
) -> float:
    """Return sigma / C of the updates, so that whole training stays within (epsilon, delta).

    Args:
        epsilon: of the budget.
        delta: of the budget.
        release: what one release of a row does.
        releases: planned of one row, 0 for none.
        updates: planned of one record, at least 1.

    Raises:
        ConfigError: the releases alone cost that much, or more.
    """
    if releases < 0 or updates < 1:
        raise ConfigError(
            f"calibration needs at least 1 planned update, got {updates}, and {releases} releases"
        )
    allowed = gdp_mu(epsilon, delta) ** 2
    taken = releases * release.mu**2 if releases else 0.0
    if taken >= allowed:
        raise ConfigError(
            f"dp_sgd.epsilon: the guard's {releases} releases of a row alone cost epsilon "
            f"{gdp_epsilon(math.sqrt(taken), delta):.4g}, so none of {epsilon:g} is left for the "
            "updates; give the guard more noise (a smaller guard.epsilon), or dp_sgd more"
        )
    return 2 * math.sqrt(updates / (allowed - taken))

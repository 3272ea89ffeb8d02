"""How an audit of a run's guard, and the best possible test, compare with what it claims.

Run by: whoever makes the report. The audit plants canaries in a guard with the run's settings
and a key of its own, since the run's is gone; it shows whether the code keeps the claim. A
bound below the claim proves nothing.
"""

import math
from dataclasses import dataclass

from scipy.special import ndtr, ndtri

from apfed_experiments.report import words
from apfed_experiments.report.folder import ReportedRun
from apfed_protocols.randomness import fresh_key
from secure_apfed.privacy.accountants import gdp_mu
from secure_apfed.privacy.audit import Audit, audit_release
from secure_apfed.privacy.guard import make_guard

__all__ = ["Audited", "audit_of"]

_FALSE_ALARMS = 0.01
# Reports are many, and each alarm is taken for a bug.
_DOUBT = 1e-6
# A minute; the first releases of many prove less, and nothing untrue.
_MOST_RELEASES = 1000


@dataclass(frozen=True, kw_only=True)
class Audited:
    """What was claimed, what the audit proved, and how far any attack on one row can get.

    Attributes:
        claimed: epsilon_x; audit: the bounds below it.
        releases: of each canary, as many as of a row or fewer.
        ceiling_auc, ceiling_tpr: of the best test between two values of a row, at mu-GDP
            (Dong, Roth and Su 2022, Section 2.2); the rate at 1 % false alarms.
    """

    claimed: float
    audit: Audit
    releases: int
    ceiling_auc: float
    ceiling_tpr: float

    @property
    def contradicted(self) -> bool:
        """Whether the audit proves the claim wrong, at its confidence."""
        return self.audit.contradicts(self.claimed)

    def rows(self) -> tuple[tuple[str, str], ...]:
        """Return (name, value) rows for people."""
        audit = self.audit
        found = max(audit.epsilon_dp, audit.epsilon_gdp, audit.epsilon_rows)
        verdict = "CONTRADICTS the claim" if self.contradicted else "below the claim"
        planted = f"{words.count(audit.canaries)} canaries, each released {self.releases} times"
        proved = f"epsilon at least {words.number(found)}, wrong once in a million: {verdict}"
        tells = f"AUC {self.ceiling_auc:.3f}, {words.percent(self.ceiling_tpr)} found"
        return (
            (f"audit of the guard, {planted}", proved),
            (
                "ceiling of any attack that tells two values of one row apart",
                f"{tells} at {words.percent(_FALSE_ALARMS)} false alarms",
            ),
        )


def audit_of(run: ReportedRun) -> Audited | None:
    """Audit the run's guard; None where no guard released anything, or nothing is claimed."""
    settings, privacy = run.config.guard, run.outcome.privacy
    if settings.mechanism == "none" or not privacy.releases or not privacy.delta:
        return None
    if not 0 < privacy.epsilon_x < math.inf:
        return None
    # A frozen row counts once however often it is sent; the audit sends it as often.
    sent = privacy.releases if settings.mechanism == "gaussian" else run.config.train.epochs
    sent = min(sent, _MOST_RELEASES)
    guard = make_guard(
        settings, delta=run.config.delta, releases=run.config.train.epochs, key=fresh_key()
    )
    audit = audit_release(
        lambda h_BD, step, rows: guard.release(h_BD, step=step, rows=rows),
        releases=sent, delta=privacy.delta, seed=run.config.seed, confidence=1 - _DOUBT,
    )  # fmt: skip
    mu = gdp_mu(privacy.epsilon_x, privacy.delta)
    return Audited(
        claimed=privacy.epsilon_x,
        audit=audit,
        releases=sent,
        ceiling_auc=float(ndtr(mu / 2**0.5)),
        ceiling_tpr=float(ndtr(ndtri(_FALSE_ALARMS) + mu)),
    )

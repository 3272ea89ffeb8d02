"""A finished run, read once from its folder: all that a report is made from."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy.special import ndtr, ndtri

from apfed_experiments import words
from apfed_experiments.audit.release import Audit, audit_release
from apfed_experiments.finished import FinishedRun, load_finished_run
from apfed_experiments.report.own import OwnSide, count_charges, list_statements
from apfed_experiments.report.who_learns import Role, RunFacts
from apfed_experiments.variants import describe_tested_rows, title_variant
from apfed_protocols.randomness import fresh_key
from secure_apfed.base.files import load_json, load_json_lines
from secure_apfed.exchange import Flow
from secure_apfed.measures.intervals import estimate_measures
from secure_apfed.measures.table import MEASURES, Scored, calibration_curve
from secure_apfed.privacy.accountants import gdp_mu
from secure_apfed.privacy.guard import make_guard
from secure_apfed.runs.folder import RunFolder, load_contract, load_scores
from secure_apfed.runs.outcome import Written, scores_of

_FALSE_ALARMS = 0.01
# Reports are many, and each alarm is taken for a bug.
_DOUBT = 1e-6
# A minute; the first releases of many prove less, and nothing untrue.
_MAX_RELEASES = 1000


class EpochMetrics(Written):
    epoch: int
    step: int
    loss: float | None = None
    accuracy: Mapping[str, float] | None = None
    measures: Mapping[str, Mapping[str, float]] | None = None
    wire_bytes: int = 0
    seconds: float = 0.0

    def get_scores(self, measure: str) -> dict[str, float]:
        """Return one measure by inference variant; empty where the epoch was not evaluated."""
        return scores_of(measure, self.accuracy or {}, self.measures or {})


class _Participant(Written):
    name: str
    role: Role


class _Document(Written):
    participants: tuple[_Participant, ...]


class _Contract(Written):
    document: _Document
    sha256: str


@dataclass(frozen=True, kw_only=True)
class ReportedRun(FinishedRun):
    """A finished run, with all that a report is made from.

    Attributes:
        epochs, flows: what was measured and sent; seeds, versions: for repeating the run.
        contract_sha256: hash of what the parties agreed on; roles: of its participants, active
            first.
        charges: by party that released anything, how often its ledger was charged.
        own: where the folder is the active's own, how its part ended and its audit log.
    """

    path: Path
    epochs: tuple[EpochMetrics, ...]
    flows: tuple[Flow, ...]
    contract_sha256: str
    roles: Mapping[str, Role]
    seeds: Mapping[str, Any]
    versions: Mapping[str, Any]
    charges: Mapping[str, int]
    own: OwnSide | None = None

    @property
    def facts(self) -> RunFacts:
        passives = list(self.roles.values()).count(Role.PASSIVE)
        return RunFacts.from_settings(self.config, passives=passives, apart=self.outcome.apart)

    @property
    def statements(self) -> tuple[tuple[str, str], ...]:
        return tuple(list_statements(self.outcome, RunFolder(self.path)))

    @property
    def has_passives(self) -> bool:
        return "passives take part" in self.config.method.facts

    def title_of(self, variant: str) -> str:
        """Return the title of a way to predict, as `outcome.accuracy` names it."""
        return title_variant(self.config.method, variant)

    def describe_rows(self, variant: str) -> str:
        """Say on how many test rows a way to predict was measured."""
        return describe_tested_rows(self.config, self.outcome, variant)


def load_run(path: Path) -> ReportedRun:
    """Read a run folder; raises CheckpointError as `load_finished_run`."""
    finished = load_finished_run(path)
    files = RunFolder(path)
    files.check_digests(
        files.contract, files.metrics, files.flows, files.seeds, files.versions, *files.list_logs()
    )
    contract = load_contract(files.contract, _Contract)
    sorted_parties = sorted(
        contract.document.participants, key=lambda party: list(Role).index(party.role)
    )
    return ReportedRun(
        **vars(finished),
        path=path,
        contract_sha256=contract.sha256,
        charges=count_charges(files),
        own=OwnSide.from_folder(path),
        epochs=load_json_lines(files.metrics, EpochMetrics),
        flows=load_json(files.flows, tuple[Flow, ...]),
        roles={party.name: party.role for party in sorted_parties},
        seeds=load_json(files.seeds, dict[str, Any]),
        versions=load_json(files.versions, dict[str, Any]),
    )


def load_predictions(run: ReportedRun) -> Scored | None:
    """Return the test predictions of the variant that is reported first; None: they were
    not kept.
    """
    variant = next(iter(run.outcome.accuracy))
    threshold = run.outcome.threshold
    scored = load_scores(RunFolder(run.path), variant, threshold=threshold)
    return scored if scored is not None and len(scored.truth) else None


def measure_run(run: ReportedRun) -> dict[str, Any] | None:
    """Return the measures that the page shows of the first variant; None if no scores were kept.

    lines: measure, value, ends of the interval, and whether higher or lower is better; calibration:
    shares predicted and observed, by range of scores; finite: whether the model says a finite
    number of every row; ranked: whether KS is measured. Raises CheckpointError where the scores are
    not as the run left them.
    """
    scored = load_predictions(run)
    if scored is None:
        return None
    estimates = estimate_measures(scored)
    lines = []
    for name, estimate in estimates.items():
        measure = MEASURES[name]
        ends = (
            "-"
            if math.isnan(estimate.low)
            else f"{measure.format_value(estimate.low)} to {measure.format_value(estimate.high)}"
        )
        better = "higher" if measure.higher_is_better else "lower"
        lines.append((measure.title, measure.format_value(estimate.value), ends, better))
    return {
        "title": run.title_of(next(iter(run.outcome.accuracy))),
        "rows": len(scored.truth),
        "lines": lines,
        "calibration": calibration_curve(scored) if scored.classes else (),
        "finite": scored.is_finite,
        "binary": scored.classes == 2,
        "ranked": "ks" in estimates,
        "threshold": scored.threshold,
    }


# How an audit of a run's guard, and the best possible test, compare with what it claims.
#
# Run by: whoever makes the report. The audit plants canaries in a guard with the run's settings and
# a key of its own, since the run's is gone; it shows whether the code keeps the claim. A bound
# below the claim proves nothing.


@dataclass(frozen=True, kw_only=True)
class Audited:
    """An audit of a run's claim, with so many releases of each canary, and a ceiling for attacks.

    The ceiling is the best test between two values of a row, at mu-GDP (Dong, Roth and Su 2022,
    Section 2.2), by AUC and by the rate at 1 % false alarms.
    """

    claimed: float
    audit: Audit
    releases: int
    ceiling_auc: float
    ceiling_tpr: float

    @property
    def has_contradiction(self) -> bool:
        """Return whether the audit proves more than the claim allows."""
        return self.audit.contradicts(self.claimed)

    def list_rows(self) -> tuple[tuple[str, str], ...]:
        """Return the rows of the audit: what it proved against the claim, and the ceiling of any
        attack.
        """
        audit = self.audit
        proved_epsilon = max(audit.epsilon_dp, audit.epsilon_gdp, audit.epsilon_rows)
        verdict = "CONTRADICTS the claim" if self.has_contradiction else "below the claim"
        planted = (
            f"{words.format_count(audit.canaries)} canaries, each released {self.releases} times"
        )
        proved = (
            f"epsilon at least {words.format_number(proved_epsilon)}, "
            f"wrong once in a million: {verdict}"
        )
        tells = f"AUC {self.ceiling_auc:.3f}, {words.format_percent(self.ceiling_tpr)} found"
        ceiling = "ceiling of any attack that tells two values of one row apart"
        figures = f"{tells} at {words.format_percent(_FALSE_ALARMS)} false alarms"
        return (f"audit of the guard, {planted}", proved), (ceiling, figures)


def audit_of(run: ReportedRun) -> Audited | None:
    """Audit the run's guard; None if no guard released anything, or if there is no guarantee."""
    settings = run.config.guard
    privacy = run.outcome.privacy
    if settings.mechanism == "none" or not privacy.releases or not privacy.delta:
        return None
    if not 0 < privacy.epsilon_x < math.inf:
        return None
    # A frozen row counts once however often it is sent; the audit sends it as often.
    sent = privacy.releases if settings.mechanism == "gaussian" else run.config.train.epochs
    sent = min(sent, _MAX_RELEASES)
    guard = make_guard(
        settings, delta=run.config.delta, releases=run.config.train.epochs, key=fresh_key()
    )
    audit = audit_release(
        lambda h_BD, step, rows: guard.release(h_BD, step=step, rows=rows),
        releases=sent,
        delta=privacy.delta,
        seed=run.config.seed,
        confidence=1 - _DOUBT,
    )
    mu = gdp_mu(privacy.epsilon_x, privacy.delta)
    auc = float(ndtr(mu / 2**0.5))
    tpr = float(ndtr(ndtri(_FALSE_ALARMS) + mu))
    return Audited(
        claimed=privacy.epsilon_x, audit=audit, releases=sent, ceiling_auc=auc, ceiling_tpr=tpr
    )

"""A finished run with everything that its report shows, read once from its folder."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy.special import ndtr, ndtri

from apfed_experiments import words
from apfed_experiments.audit.release import Audit, audit_release
from apfed_experiments.finished import FinishedRun, load_finished_run
from apfed_experiments.report.own import OwnSide, count_charges, list_signed_reports
from apfed_experiments.report.who_learns import Role, RunFacts
from apfed_experiments.variants import describe_tested_rows, title_inference
from apfed_protocols.randomness import fresh_key
from secure_apfed.base.files import load_json, load_json_lines
from secure_apfed.exchange import Flow
from secure_apfed.measures.intervals import estimate_measures
from secure_apfed.measures.table import MEASURES, Scored, calibration_curve
from secure_apfed.privacy.accountants import gdp_mu
from secure_apfed.privacy.guard import make_guard
from secure_apfed.runs.folder import RunFolder, load_contract, load_scores
from secure_apfed.runs.outcome import StoredResult, list_scores

_FALSE_ALARM_RATE = 0.01
# Probability that the audit of a report contradicts a true claim: small, since reports are many.
_AUDIT_ERROR_RATE = 1e-6
# More would take over a minute; fewer releases prove less, and nothing that is not so.
_MAX_AUDITED_RELEASES = 1000


class EpochMetrics(StoredResult):
    """A line of the run's metrics file.

    Attributes:
        epoch, step: number of the epoch, and number of steps done.
        loss: mean task loss of the epoch; None: nothing was trained.
        accuracy, measures: by mode of inference; None: the epoch was not evaluated.
        wire_bytes: number of bytes sent so far.
        seconds: time so far.
    """

    epoch: int
    step: int
    loss: float | None = None
    accuracy: Mapping[str, float] | None = None
    measures: Mapping[str, Mapping[str, float]] | None = None
    wire_bytes: int = 0
    seconds: float = 0.0

    def get_scores(self, measure: str) -> dict[str, float]:
        """Return one measure by mode of inference; empty if the epoch was not evaluated."""
        return list_scores(measure, self.accuracy or {}, self.measures or {})


class _Participant(StoredResult):
    """A party of a contract, as far as a report needs it."""

    name: str
    role: Role


class _Document(StoredResult):
    """The text of a contract, as far as a report needs it."""

    participants: tuple[_Participant, ...]


class _Contract(StoredResult):
    """The file of a run's contract: its text and hash."""

    document: _Document
    sha256: str


@dataclass(frozen=True, kw_only=True)
class ReportedRun(FinishedRun):
    """A finished run, with all that a report is made from.

    Attributes:
        path: the run's folder.
        epochs: measures by epoch.
        flows: numbers and bytes of messages by sender, receiver and kind.
        contract_sha256: hash of the contract of the parties.
        roles: role of each party by name, the active first.
        seeds, versions: seeds and package versions, for repeating the run.
        charges: number of privacy costs recorded in the ledger of each party that released data.
        own_side: how the active's part ended, and its audit log, if the folder is the active's own.
    """

    path: Path
    epochs: tuple[EpochMetrics, ...]
    flows: tuple[Flow, ...]
    contract_sha256: str
    roles: Mapping[str, Role]
    seeds: Mapping[str, Any]
    versions: Mapping[str, Any]
    charges: Mapping[str, int]
    own_side: OwnSide | None = None

    @property
    def facts(self) -> RunFacts:
        """The facts of the run that decide who can read what."""
        passive_count = list(self.roles.values()).count(Role.PASSIVE)
        return RunFacts.from_settings(
            self.config, passive_count=passive_count, is_in_separate_processes=self.outcome.apart
        )

    @property
    def signed_report_rows(self) -> tuple[tuple[str, str], ...]:
        """The epsilons that passives stated and signed, as title and text."""
        return tuple(list_signed_reports(self.outcome, RunFolder(self.path)))

    @property
    def has_passives(self) -> bool:
        """Whether the method has passives; else the active trains alone."""
        return "passives take part" in self.config.method.exchange_facts

    def title_inference(self, inference: str) -> str:
        """Return the title of a mode of inference; `inference`: key of `outcome.accuracy`."""
        return title_inference(self.config.method, inference)

    def describe_tested_rows(self, inference: str) -> str:
        """Return in words on how many test rows a mode of inference was measured.

        `inference`: key of `outcome.accuracy`, which names the mode.
        """
        return describe_tested_rows(self.config, self.outcome, inference)


def load_run(path: Path) -> ReportedRun:
    """Return the run in a folder, with all that its report shows.

    Raises CheckpointError: the run has not finished, or a file is missing, changed or of another
    version.
    """
    finished_run = load_finished_run(path)
    folder = RunFolder(path)
    folder.check_digests(
        folder.contract,
        folder.metrics,
        folder.message_flows,
        folder.seeds,
        folder.versions,
        *folder.list_logs(),
    )
    contract = load_contract(folder.contract, _Contract)
    sorted_parties = sorted(
        contract.document.participants, key=lambda party: list(Role).index(party.role)
    )
    return ReportedRun(
        **vars(finished_run),
        path=path,
        contract_sha256=contract.sha256,
        charges=count_charges(folder),
        own_side=OwnSide.from_folder(path),
        epochs=load_json_lines(folder.metrics, EpochMetrics),
        flows=load_json(folder.message_flows, tuple[Flow, ...]),
        roles={party.name: party.role for party in sorted_parties},
        seeds=load_json(folder.seeds, dict[str, Any]),
        versions=load_json(folder.versions, dict[str, Any]),
    )


def load_predictions(run: ReportedRun) -> Scored | None:
    """Return the test predictions of the method's own inference; None: they were not stored."""
    inference = next(iter(run.outcome.accuracy))  # the method's own inference comes first
    threshold = run.outcome.threshold
    predictions = load_scores(RunFolder(run.path), inference, threshold=threshold)
    return predictions if predictions is not None and len(predictions.truth) else None


def measure_predictions(run: ReportedRun) -> dict[str, Any] | None:
    """Return the measures of the method's own inference, as the page's template shows them.

    Returns:
        None: the test predictions were not stored. Else "title" and "rows" of the predictions;
        "lines": measure, value, interval, and whether higher or lower is better; "calibration":
        predicted and observed shares by range of scores; "finite": whether all predictions are
        finite; "binary": whether there are two classes; "ranked": whether KS is measured;
        "threshold" of the positive class.

    Raises CheckpointError: the stored predictions were changed.
    """
    predictions = load_predictions(run)
    if predictions is None:
        return None
    estimate_by_measure = estimate_measures(predictions)
    lines = []
    for name, estimate in estimate_by_measure.items():
        measure = MEASURES[name]
        interval_text = (
            "-"
            if math.isnan(estimate.low)
            else f"{measure.format_value(estimate.low)} to {measure.format_value(estimate.high)}"
        )
        better_text = "higher" if measure.higher_is_better else "lower"
        lines.append(
            (measure.title, measure.format_value(estimate.value), interval_text, better_text)
        )
    return {
        "title": run.title_inference(next(iter(run.outcome.accuracy))),
        "rows": len(predictions.truth),
        "lines": lines,
        "calibration": calibration_curve(predictions) if predictions.classes else (),
        "finite": predictions.is_finite,
        "binary": predictions.classes == 2,
        "ranked": "ks" in estimate_by_measure,
        "threshold": predictions.threshold,
    }


# The audit of a run's guard.
#
# Run by: the process that writes the report. The audit plants canaries in a guard with the run's
# settings and a new key, since the run's key is deleted; it tests whether the code keeps the claim.
# A bound below the claim proves nothing.


@dataclass(frozen=True, kw_only=True)
class Audited:
    """An audit of a run's claimed epsilon, and the best result that any attack can have under it.

    Attributes:
        claimed: epsilon_x, the claimed bound for representations.
        audit: lower bounds on epsilon that the audit measured.
        releases: number of releases of each canary, a planted row whose presence is guessed.
        ceiling_auc, ceiling_tpr: of the best possible test between two values of a row at mu-GDP
            (Dong, Roth and Su 2022, Section 2.2): AUC, and true positive rate at 1 % false
            positives.
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
        """Return title and text of what the audit proved, and of the ceiling of any attack."""
        audit = self.audit
        proved_epsilon = max(audit.epsilon_dp, audit.epsilon_gdp, audit.epsilon_rows)
        verdict = "CONTRADICTS the claim" if self.has_contradiction else "below the claim"
        canaries_text = (
            f"{words.format_count(audit.canaries)} canaries, each released {self.releases} times"
        )
        proof_text = (
            f"epsilon at least {words.format_number(proved_epsilon)}, "
            f"wrong once in a million: {verdict}"
        )
        ceiling_text = (
            f"AUC {self.ceiling_auc:.3f}, {words.format_percent(self.ceiling_tpr)} found at "
            f"{words.format_percent(_FALSE_ALARM_RATE)} false alarms"
        )
        return (
            (f"audit of the guard, {canaries_text}", proof_text),
            ("ceiling of any attack that tells two values of one row apart", ceiling_text),
        )


def audit_guard(run: ReportedRun) -> Audited | None:
    """Audit a guard (clip and noise of representations) of the run's settings: test its claimed
    epsilon.

    Canary rows are sent through a new guard, and what it releases is attacked. None: the run's
    guard released nothing, or epsilon_x is infinite or 0, so no claim can be tested.
    """
    settings = run.config.guard
    privacy = run.outcome.privacy
    if settings.mechanism == "none" or not privacy.releases or not privacy.delta:
        return None
    if not 0 < privacy.epsilon_x < math.inf:
        return None
    # Frozen noise counts as one release however often a row is sent; the audit sends it as often.
    release_count = (
        privacy.releases if settings.mechanism == "gaussian" else run.config.train.epochs
    )
    release_count = min(release_count, _MAX_AUDITED_RELEASES)
    guard = make_guard(
        settings, delta=run.config.delta, releases=run.config.train.epochs, key=fresh_key()
    )
    audit = audit_release(
        lambda h_BD, step, rows: guard.release(h_BD, step=step, rows=rows),
        release_count=release_count,
        delta=privacy.delta,
        seed=run.config.seed,
        confidence=1 - _AUDIT_ERROR_RATE,
    )
    # The best test between two values of a row under mu-GDP (see `Audited`).
    mu = gdp_mu(privacy.epsilon_x, privacy.delta)
    auc = float(ndtr(mu / 2**0.5))
    tpr = float(ndtr(ndtri(_FALSE_ALARM_RATE) + mu))
    return Audited(
        claimed=privacy.epsilon_x,
        audit=audit,
        releases=release_count,
        ceiling_auc=auc,
        ceiling_tpr=tpr,
    )

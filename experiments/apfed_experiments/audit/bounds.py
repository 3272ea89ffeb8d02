"""Lower bounds on mu, or epsilon, from scores of retrainings in two worlds.

The worlds are two neighbouring data sets: they differ in one record. The score is any function of
what a retraining reveals. World 1 is guessed where the score is above a threshold. A third of the
retrainings choose the threshold; the others, on which nothing was chosen, give the rates of true
and false positives. Clopper and Pearson 1934 bound the two rates, each at half of the level, and
mu-GDP allows

    TPR <= Phi(Phi^-1(FPR) + mu)        (Dong, Roth and Su 2022, Section 2.2),

so mu is at least Phi^-1(TPR's lower end) - Phi^-1(FPR's upper end), except with probability
`level`. A bound below a claim proves nothing about the claim; one above it proves it wrong.

Where no more is claimed than (epsilon, delta)-DP, which allows

    TPR <= e^epsilon FPR + delta    and    1 - FPR <= e^epsilon (1 - TPR) + delta,

the threshold is the one that bounds epsilon best on the first third.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri
from scipy.stats import beta

from apfed_experiments.columns import Column, Table, make_formatter
from apfed_protocols.errors import LocalProtocolError
from secure_apfed.privacy.accountants import gdp_epsilon

DELTA = 1e-5
COLUMNS = (
    Column(name="title", title="played"),
    Column(name="claim_of", title="claim of"),
    Column(name="claim_epsilon", title="claimed epsilon", format_value=make_formatter(".2f")),
    Column(name="epsilon_low", title="proved epsilon at least", format_value=make_formatter(".2f")),
    Column(
        name="exceeded",
        title="verdict",
        format_value=lambda exceeded: "EXCEEDS the claim" if exceeded else "stays under the claim",
    ),
    Column(name="counted", title="of"),
)
_MIN_SCORES_PER_THIRD = 20


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim of privacy that an audit tests.

    Attributes:
        title: title of the audit, for people.
        scope: what the claim covers, for people.
        claimed_value: the claimed mu or epsilon.
        is_expected_to_exceed: whether the audit is expected to prove the claim wrong, since its
            score reads more than the claim covers.
    """

    title: str
    scope: str
    claimed_value: float
    is_expected_to_exceed: bool = False


@dataclass(frozen=True, kw_only=True)
class AuditResult:
    """The result of one audit.

    Attributes:
        claim: the audited claim.
        has_exceeded: whether the claim is proved wrong.
        run_count_text: number of retrainings or runs, as text.
        values_by_name: measured values by name, for programs.
        scores_by_world: scores of the retrainings in world 0 and in world 1; empty for votes.
    """

    claim: Claim
    has_exceeded: bool
    run_count_text: str
    values_by_name: dict[str, Any]
    scores_by_world: tuple[NDArray[np.float64], ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the result as plain values, with whether the claim was expected to be exceeded."""
        report = {"title": self.claim.title, "claim_of": self.claim.scope}
        return {
            **report,
            **self.values_by_name,
            "exceeded": self.has_exceeded,
            "expected": self.claim.is_expected_to_exceed,
        }


def make_table(results: Sequence[AuditResult], title: str) -> Table:
    """Return the table of these results: what each audited case claims, and what its runs prove."""
    rows = [{**result.as_json(), "counted": result.run_count_text} for result in results]
    return Table(COLUMNS, rows, title)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The rates of a test that guesses world 1, and the bound on mu that they prove.

    Attributes:
        threshold: score above which world 1 is guessed.
        hits, alarms: number of guesses of world 1 in world 1 and in world 0.
        tested: number of scores in each world.
        tpr_low, fpr_high: one-sided bounds on the rates of true and of false positives.
        mu_low: the lower bound on mu; 0: nothing is proved.
        level: probability that the bound is wrong, at most.
    """

    threshold: float
    hits: int
    alarms: int
    tested: int
    tpr_low: float
    fpr_high: float
    mu_low: float
    level: float

    def bound_epsilon(self, delta: float) -> float:
        """Return the lower bound on epsilon at `delta`, if the mechanism is Gaussian DP."""
        return gdp_epsilon(self.mu_low, delta)


def collect_evidence(
    scores_0: NDArray[np.float64], scores_1: NDArray[np.float64], *, level: float
) -> Evidence:
    """Return the rates of true and false positives, and the bound on mu, that scores prove.

    The scores are of independent retrainings. World 1 has another record than world 0 in one row of
    its data. A third of the scores choose the threshold above which world 1 is guessed.

    `scores_0`, `scores_1`: scores of the retrainings in world 0 and in world 1, equally many, (R,).
    `level`: probability that the bound is wrong, at most.

    Raises LocalProtocolError: too few or unequally many scores, one that is not finite, or a level
    outside of 0 to 1.
    """
    if scores_0.shape != scores_1.shape or len(scores_0) < 3 * _MIN_SCORES_PER_THIRD:
        raise LocalProtocolError(
            f"expected as many scores of both worlds, at least {3 * _MIN_SCORES_PER_THIRD}, got "
            f"{scores_0.shape} and {scores_1.shape}"
        )
    if not (0 < level < 1 and np.isfinite(scores_0).all() and np.isfinite(scores_1).all()):
        raise LocalProtocolError("expected finite scores and a level between 0 and 1")
    third_size = len(scores_0) // 3
    first_third_0 = np.sort(scores_0[:third_size])
    first_third_1 = np.sort(scores_1[:third_size])
    thresholds = np.sort(np.concatenate([first_third_0, first_third_1]))
    # The chosen threshold is where the two rates differ most. Between two normal distributions of
    # one variance it is the middle.
    below_0 = first_third_0.searchsorted(thresholds, side="right")
    below_1 = first_third_1.searchsorted(thresholds, side="right")
    threshold = float(thresholds[np.argmax(below_0 - below_1)])
    return _bound_error_rates(scores_0[third_size:], scores_1[third_size:], threshold, level)


def bound_epsilon_by_scores(
    scores_0: NDArray[np.float64], scores_1: NDArray[np.float64], *, delta: float, level: float
) -> float:
    """Return a lower bound on epsilon at `delta` that assumes (epsilon, delta)-DP only.

    World 1 has another record than world 0 in one row of its data. A third of the scores choose the
    threshold above which world 1 is guessed, the others give the bound.

    `scores_0`, `scores_1`: scores of the retrainings in world 0 and in world 1, equally many, (R,).
    `level`: probability that the bound is wrong, at most.

    Raises LocalProtocolError: too few or unequally many scores, one that is not finite, or a level
    outside of 0 to 1.
    """
    # Called for its exception: it raises if the scores are unusable.
    collect_evidence(scores_0, scores_1, level=level)
    third_size = len(scores_0) // 3
    # At most a hundred thresholds, spread evenly over the scores of the first third.
    candidates = np.unique(np.concatenate([scores_0[:third_size], scores_1[:third_size]]))
    thresholds = candidates[np.unique(np.linspace(0, len(candidates) - 1, 100).astype(int))]
    bounds = [
        _bound_epsilon_at_threshold(
            scores_0[:third_size], scores_1[:third_size], threshold, delta=delta, level=level
        )
        for threshold in thresholds.tolist()
    ]
    best_threshold = float(thresholds[np.argmax(bounds)])
    return _bound_epsilon_at_threshold(
        scores_0[third_size:], scores_1[third_size:], best_threshold, delta=delta, level=level
    )


def _bound_epsilon_at_threshold(
    scores_0: NDArray[np.float64],
    scores_1: NDArray[np.float64],
    threshold: float,
    *,
    delta: float,
    level: float,
) -> float:
    """Return the lower bound on epsilon by guesses of world 1 above the threshold, else of world 0.

    Under (epsilon, delta)-DP, P(guess of a world in it) <= e^epsilon P(the same guess in the other
    world) + delta. The larger bound of both worlds is returned, 0 if none is positive.

    `scores_0`, `scores_1`: scores in world 0 and in world 1. `level`: probability that the bound is
    wrong, at most.
    """
    evidence = _bound_error_rates(scores_0, scores_1, threshold, level)
    guesses_of_1 = (evidence.tpr_low - delta, evidence.fpr_high)
    guesses_of_0 = (1 - evidence.fpr_high - delta, 1 - evidence.tpr_low)
    bounds = [0.0]
    for true_rate, false_rate in (guesses_of_1, guesses_of_0):
        if true_rate > 0 and false_rate > 0:
            bounds.append(float(np.log(true_rate / false_rate)))
    return max(bounds)


def _bound_error_rates(
    scores_0: NDArray[np.float64], scores_1: NDArray[np.float64], threshold: float, level: float
) -> Evidence:
    """Return the rates of true and false positives at a threshold, their bounds and that of mu.

    Clopper and Pearson bound each rate at half of `level`. `scores_0`, `scores_1`: scores of the
    retrainings in world 0 and in world 1.
    """
    score_count = len(scores_0)
    hits = int((scores_1 > threshold).sum())
    alarms = int((scores_0 > threshold).sum())
    # Without hits the rate of true positives may be 0; with alarms only, that of false ones 1.
    tpr_low = float(beta.ppf(level / 2, hits, score_count - hits + 1)) if hits else 0.0
    fpr_high = (
        float(beta.ppf(1 - level / 2, alarms + 1, score_count - alarms))
        if alarms < score_count
        else 1.0
    )
    is_bounded = tpr_low > 0 and fpr_high < 1
    mu_low = max(0.0, float(ndtri(tpr_low) - ndtri(fpr_high))) if is_bounded else 0.0
    return Evidence(
        threshold=threshold,
        hits=hits,
        alarms=alarms,
        tested=score_count,
        tpr_low=tpr_low,
        fpr_high=fpr_high,
        mu_low=mu_low,
        level=level,
    )

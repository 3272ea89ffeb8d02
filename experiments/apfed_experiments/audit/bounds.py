"""Lower bounds on mu, or epsilon, that scores of retrainings in two worlds prove.

The score is any function of what a retraining showed. A third of the retrainings choose the
threshold above which world 1 is guessed; the others, on which nothing was chosen, count.
Clopper and Pearson 1934 bound the two rates, each at half of the level, and mu-GDP allows

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

from apfed_experiments.columns import Column, Table, make_form
from apfed_protocols.errors import LocalProtocolError
from secure_apfed.privacy.accountants import gdp_epsilon

DELTA = 1e-5
COLUMNS = (
    Column(name="title", title="played"),
    Column(name="claim_of", title="claim of"),
    Column(name="claim_epsilon", title="claimed epsilon", form=make_form(".2f")),
    Column(name="epsilon_low", title="proved epsilon at least", form=make_form(".2f")),
    Column(
        name="exceeded",
        title="verdict",
        form=lambda exceeded: "EXCEEDS the claim" if exceeded else "stays under the claim",
    ),
    Column(name="counted", title="of"),
)
_SMALLEST_PART = 20


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim that one audit holds against what is played.

    `title`, and `says`, what the claim is the claim of, are for people. `exceeded`: whether the
    audit is expected to prove the claim wrong for what it reads.
    """

    title: str
    says: str
    claim: float
    exceeded: bool = False


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of one case.

    `exceeded`: whether the claim is proved wrong; `counted`: how often was played; `figures`: for
    programs; `scores`: of world 0 and world 1, each a retraining (none of votes).
    """

    case: Claim
    exceeded: bool
    counted: str
    figures: dict[str, Any]
    scores: tuple[NDArray[np.float64], ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the result as plain values, with whether the claim was expected to be exceeded."""
        report = {"title": self.case.title, "claim_of": self.case.says}
        return {**report, **self.figures, "exceeded": self.exceeded, "expected": self.case.exceeded}


def make_table(results: Sequence[Result], title: str) -> Table:
    """Return a row for each case: what it claims, and what it proves."""
    rows = [{**result.as_json(), "counted": result.counted} for result in results]
    return Table(COLUMNS, rows, title)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The evidence that scores give.

    Attributes:
        threshold: a score above it is taken for world 1.
        hits, alarms: how often, of `tested` in each world: rightly and wrongly.
        tpr_low, fpr_high: ends of the rates' intervals, each one-sided.
        mu_low: the lower bound on mu; 0 where nothing is proved.
        level: the probability that it is wrong is at most that.
    """

    threshold: float
    hits: int
    alarms: int
    tested: int
    tpr_low: float
    fpr_high: float
    mu_low: float
    level: float

    def epsilon_low(self, delta: float) -> float:
        """Return the lower bound on epsilon, if the mechanism is claimed to be Gaussian DP."""
        return gdp_epsilon(self.mu_low, delta)


def evidence_from(
    scores_0: NDArray[np.float64], scores_1: NDArray[np.float64], *, level: float
) -> Evidence:
    """Return what scores of independent retrainings, as many of both worlds, prove at a level.

    Raises LocalProtocolError: too few scores, or not as many of both worlds; scores that are not
    finite, or no level.
    """
    if scores_0.shape != scores_1.shape or len(scores_0) < 3 * _SMALLEST_PART:
        raise LocalProtocolError(
            f"expected as many scores of both worlds, at least {3 * _SMALLEST_PART}, got "
            f"{scores_0.shape} and {scores_1.shape}"
        )
    if not (0 < level < 1 and np.isfinite(scores_0).all() and np.isfinite(scores_1).all()):
        raise LocalProtocolError("expected finite scores and a level between 0 and 1")
    third = len(scores_0) // 3
    # Where the rates differ most; for two normal distributions that is in the middle.
    first_0 = np.sort(scores_0[:third])
    first_1 = np.sort(scores_1[:third])
    thresholds = np.sort(np.concatenate([first_0, first_1]))
    below_0, below_1 = (
        scores.searchsorted(thresholds, side="right") for scores in (first_0, first_1)
    )
    threshold = float(thresholds[np.argmax(below_0 - below_1)])
    return _count_errors(scores_0[third:], scores_1[third:], threshold, level)


def epsilon_from(
    scores_0: NDArray[np.float64], scores_1: NDArray[np.float64], *, delta: float, level: float
) -> float:
    """Return a lower bound on epsilon at `delta` that assumes nothing of the mechanism.

    `scores_0`: scores without the record (world 0), and with it (world 1). `level`: probability
    that the bound is wrong, at most.

    Raises as `evidence_from`.
    """
    evidence_from(scores_0, scores_1, level=level)  # refuses what proves nothing
    third = len(scores_0) // 3
    candidates = np.unique(np.concatenate([scores_0[:third], scores_1[:third]]))
    thresholds = candidates[np.unique(np.linspace(0, len(candidates) - 1, 100).astype(int))]

    def bound_epsilon(part: slice, threshold: float) -> float:
        """Return the lower bound on epsilon that these scores give at one threshold."""
        errors = _count_errors(scores_0[part], scores_1[part], threshold, level)
        above = (errors.tpr_low - delta, errors.fpr_high)
        below = (1 - errors.fpr_high - delta, 1 - errors.tpr_low)
        ratios = [top / bottom for top, bottom in (above, below) if top > 0 and bottom > 0]
        return max(0.0, *(float(np.log(ratio)) for ratio in ratios), 0.0)

    best = max(thresholds, key=lambda threshold: bound_epsilon(slice(third), float(threshold)))
    return bound_epsilon(slice(third, None), float(best))


def _count_errors(
    scores_0: NDArray[np.float64], scores_1: NDArray[np.float64], threshold: float, level: float
) -> Evidence:
    """Count hits and false alarms at a threshold, bound both rates by Clopper and Pearson, each at
    half of the level, and bound mu.

    `scores_0`: scores without the record (world 0), and with it (world 1).
    """
    tested = len(scores_0)
    hits = int((scores_1 > threshold).sum())
    alarms = int((scores_0 > threshold).sum())
    tpr_low = float(beta.ppf(level / 2, hits, tested - hits + 1)) if hits else 0.0
    fpr_high = (
        float(beta.ppf(1 - level / 2, alarms + 1, tested - alarms)) if alarms < tested else 1.0
    )
    proved = tpr_low > 0 and fpr_high < 1
    mu_low = max(0.0, float(ndtri(tpr_low) - ndtri(fpr_high))) if proved else 0.0
    return Evidence(
        threshold=threshold,
        hits=hits,
        alarms=alarms,
        tested=tested,
        tpr_low=tpr_low,
        fpr_high=fpr_high,
        mu_low=mu_low,
        level=level,
    )

"""The privacy cost of a passive's contributions: discrete Gaussian noise of the honest parties in a
sum.

Run by: every passive, which records the cost in its own ledger before each contribution. Against:
the active, which reads the sum, together with as many passives as the settings count as colluders:
their noise they can take off, so only the others' is counted. It needs what keeps single
contributions from the active: under ckks and bfv without masks the active and the aggregator
together see each passive's part with that passive's noise alone.

Guarantee: two runs that differ in one person's features at one passive give sums that are
(epsilon, delta)-indistinguishable, WITH THE PASSIVE'S NETWORKS HELD FIXED: those are fitted to
its features without noise, and a changed person moves later answers for other rows, too. No
floating point: noise and what it is added to are integers.

Letters: B rows of a batch at most, D numbers of a row, C the clip bound, L its fixed-point
levels, n honest parties.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import scipy

from apfed_protocols.noise import MAX_DEVIATION, TAIL_PROBABILITY
from secure_apfed.errors import ConfigError

__all__ = [
    "SummedRelease",
    "calibrate_noise",
    "contributions_statement",
    "excess_of_sum",
    "min_deviation",
    "sensitivity_in_steps",
    "zcdp_epsilon",
]

# Relative room for the clip's and the scaling's floating point, far above 1e-15 sqrt(D).
_ROUNDING_FACTOR = 1 + 1e-9
# Relative margin that rounds epsilon up.
_EPSILON_MARGIN = 1 + 1e-9

_STATEMENT = (
    "contribution guarantee: each passive's epsilon speaks of one person's features at that "
    "passive, its networks held fixed, by the noise of honest passives, against whoever reads the "
    "sums alone; a step that is played again in a later session counts again"
)
_SEED_CAVEAT = (
    "only against somebody who does not know the run's seed, and while no step is played twice, in "
    "this run or with other numbers in another of that seed"
)


def sensitivity_in_steps(*, steps_in_clip: int, columns: int, rows_per_person: int) -> float:
    """Return how far a party's contribution moves in L2 if one person's features are replaced.

    The unit is a step of fixed point. A clipped row has norm L at most, and rounding moves each of
    its D numbers by half a step. So two rows are at most 2 L + sqrt(D) apart. The bound is slightly
    enlarged, to cover the rounding errors of the clip itself.

    Args:
        steps_in_clip: L, fixed-point steps in the clip bound.
        columns: D, numbers of a row.
        rows_per_person: number of rows that a person's features move: 1 for a reconstruction loss;
            B, all rows of the batch, for a contrastive loss with negatives. The distance is
            sqrt(rows) times as large.
    """
    return math.sqrt(rows_per_person) * (2 * steps_in_clip * _ROUNDING_FACTOR + math.sqrt(columns))


def excess_of_sum(deviation: int, honest_count: int) -> float:
    """Return tau, a bound on how far a sum of discrete Gaussians is from one discrete Gaussian.

    tau = 10 sum over k = 1..n-1 of exp(-2 pi^2 s^2 k / (k + 1)), so 0 for one party. Kairouz, Liu
    and Steinke 2021 (The Distributed Discrete Gaussian Mechanism for Federated Learning with Secure
    Aggregation), Theorem 1.

    `deviation`: s, standard deviation of each party's noise, in steps of fixed point.
    `honest_count`: n, number of parties whose noise counts (those that do not collude with the
    reader of the sum).
    """
    k = np.arange(1, honest_count)
    return float(10 * np.exp(-2 * (np.pi * deviation) ** 2 * k / (k + 1)).sum())


@dataclass(frozen=True, kw_only=True)
class SummedRelease:
    """A batch's sum with discrete Gaussian noise from several parties.

    Attributes:
        deviation: s, standard deviation of each party's noise, in fixed-point steps.
        honest: n, number of parties whose noise counts, since they do not collude with the reader.
        sensitivity: replace-one L2 sensitivity of one party's contribution, in fixed-point steps.
        numbers: B D, values of one party in a batch.
        beside_mu: Gaussian DP parameter of a release that accompanies each sum, such as that of a
            labeller's weights; it adds mu^2 / 2 to rho (Bun and Steinke 2016, Proposition 1.6).
        mu: infinite, since no parameter of Gaussian DP is known.
    """

    mu: ClassVar[float] = math.inf
    accountant: ClassVar[str] = "zcdp"

    deviation: int
    honest: int
    sensitivity: float
    numbers: int
    beside_mu: float = field(default=0.0, repr=False)

    def __post_init__(self) -> None:
        """Check that deviation, honest parties, numbers and sensitivity are positive."""
        if not (self.deviation >= 1 and self.honest >= 1 and self.numbers >= 1):
            raise ConfigError(
                "noise under a sum needs a deviation, honest parties and values of at least 1, got "
                f"{self.deviation}, {self.honest} and {self.numbers}"
            )
        if not (math.isfinite(self.sensitivity) and self.sensitivity > 0):
            raise ConfigError(f"a sensitivity is positive, got {self.sensitivity}")

    @property
    def noise_multiplier(self) -> float:
        """The deviation of the honest parties' summed noise, divided by the sensitivity."""
        return self.deviation * math.sqrt(self.honest) / self.sensitivity

    @property
    def rho(self) -> float:
        """The rho of zero-concentrated DP of one release.

        Kairouz, Liu and Steinke 2021, Theorem 1: epsilon^2 / 2 with
        epsilon = sensitivity / (sqrt(n) s) + tau sqrt(B D).
        """
        excess = excess_of_sum(self.deviation, self.honest) * math.sqrt(self.numbers)
        return (1 / self.noise_multiplier + excess) ** 2 / 2 + self.beside_mu**2 / 2

    @property
    def tail(self) -> float:
        """A bound on the probability that the cut-off tails of the noise change one release.

        Noise is drawn from a range that omits a mass of `TAIL_PROBABILITY` for each number.
        """
        return self.honest * self.numbers * TAIL_PROBABILITY

    def epsilon_of(self, releases: int, delta: float) -> float:
        """Return epsilon at `delta` of `releases` adaptive releases that involve one person.

        The rho of T releases add up (Bun and Steinke 2016, Lemma 2.3). Cutting off the noise's
        tails changes the distribution of each release by `tail` in total variation. So a part
        (1 + e^epsilon) T tail of delta is used up, and epsilon is computed at the rest. It is
        infinite if no delta remains.
        """
        if releases < 0 or not 0 < delta < 1:
            raise ConfigError(f"expected releases >= 0 and 0 < delta < 1, got {releases}, {delta}")
        if releases == 0:
            return 0.0
        rho = releases * self.rho
        cut_tails = releases * self.tail
        epsilon = zcdp_epsilon(rho, delta)
        # The cut tails' part of delta grows with epsilon, and epsilon grows as delta's rest
        # shrinks: repeat until it holds, 8 times at most; if it never does, epsilon is infinite.
        # Beyond 700, exp would overflow.
        for _ in range(8):
            remaining_delta = delta - (1 + math.exp(min(epsilon, 700.0))) * cut_tails
            if remaining_delta <= 0:
                return math.inf
            required_epsilon = zcdp_epsilon(rho, remaining_delta)
            if required_epsilon <= epsilon:
                return epsilon
            epsilon = required_epsilon * _EPSILON_MARGIN
        return math.inf

    def __str__(self) -> str:
        """Return the mechanism in words."""
        return (
            f"discrete gaussian noise of {self.honest} honest parties, "
            f"{self.noise_multiplier:.4g} sensitivities (replace-one)"
        )


def zcdp_epsilon(rho: float, delta: float) -> float:
    """Return an epsilon, rounded up, for which rho-zCDP implies (epsilon, delta)-DP.

    For every order a > 1, delta = exp((a - 1)(a rho - epsilon)) / (a - 1) (1 - 1 / a)^a is enough
    (Canonne, Kamath and Steinke 2020, The Discrete Gaussian for Differential Privacy, Corollary
    13). Here this is solved for epsilon, and the order with the smallest epsilon is searched.
    """
    if rho == 0:
        return 0.0
    log_delta = math.log(delta)
    optimum = scipy.optimize.minimize_scalar(
        # The search runs over log(a - 1), from -14 to 20, since a lies between 1 and infinity.
        lambda log_excess: _bound_epsilon(1 + math.exp(log_excess), rho, log_delta),
        bounds=(-14, 20),
        method="bounded",
        options={"xatol": 1e-10},
    )
    # The bound at every order holds, so an inexact optimum costs accuracy only.
    return max(0.0, float(optimum.fun)) * _EPSILON_MARGIN


def _bound_epsilon(a: float, rho: float, log_delta: float) -> float:
    """Return an epsilon for which rho-zCDP implies (epsilon, delta)-DP, by the order a > 1.

    It solves the equation of `zcdp_epsilon` for epsilon.
    """
    log_correction = a * math.log1p(-1 / a) - math.log(a - 1)  # log of (1 - 1 / a)^a / (a - 1)
    return a * rho + (log_correction - log_delta) / (a - 1)


def calibrate_noise(
    *,
    epsilon: float,
    delta: float,
    releases: int,
    honest: int,
    sensitivity: float,
    numbers: int,
    error_subject: str = "secure_sum.noise",
) -> int:
    """Return the smallest standard deviation of each party's noise, in fixed-point steps, with
    which `releases` sums stay within (epsilon, delta).

    Args:
        epsilon, delta: the largest privacy cost of all sums together.
        releases: number of sums that involve one person.
        honest: number of parties whose noise counts.
        sensitivity: replace-one L2 sensitivity of one contribution, in fixed-point steps.
        numbers: number of values of one party in a batch.
        error_subject: the setting or class to name in an error.

    Raises ConfigError: no deviation that a sum can carry is enough.
    """
    unit_release = SummedRelease(
        deviation=1, honest=honest, sensitivity=sensitivity, numbers=numbers
    )
    return min_deviation(
        lambda s: replace(unit_release, deviation=s).epsilon_of(releases, delta) <= epsilon,
        f"{error_subject}: epsilon {epsilon:g} over {releases} releases",
        "use fewer bits of the sum, fewer epochs, smaller batches or a larger epsilon",
    )


def min_deviation(is_enough: Callable[[int], bool], subject: str, remedy: str) -> int:
    """Return the smallest standard deviation, in fixed-point steps, for which `is_enough` is true.

    Args:
        is_enough: false below some deviation and true from there on.
        subject: the release that needs the noise, in words for the error.
        remedy: a remedy, in words for the error.

    Raises:
        ConfigError: no deviation that a sum can carry is enough.
    """
    # Double `high` until it is enough, then bisect; `low` is never enough.
    low = 0
    high = 1
    while not is_enough(high):
        low = high
        high = 2 * high
        if high > MAX_DEVIATION:
            raise ConfigError(
                f"{subject} needs noise of more than {MAX_DEVIATION} steps of fixed point; {remedy}"
            )
    while high - low > 1:
        middle = (low + high) // 2
        if is_enough(middle):
            high = middle
        else:
            low = middle
    return high


def contributions_statement(contribution_readers: str, *, is_reproducible: bool) -> str:
    """Return the guarantee of noise under the sum, in words.

    `contribution_readers`: in words, the parties that could read single contributions ("": none).
    `is_reproducible`: whether the noise is derived from the run's seed, so that whoever knows the
    seed can remove it.
    """
    sentences = [_STATEMENT]
    if contribution_readers:
        sentences.append(f"not against {contribution_readers}")
    if is_reproducible:
        sentences.append(_SEED_CAVEAT)
    return "; ".join(sentences)

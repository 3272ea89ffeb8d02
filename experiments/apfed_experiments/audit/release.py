"""A statistical audit of a release path: what an attacker reads out of it bounds epsilon below.

Run by: the tests, and whoever changed a guard. Plants m canary rows, each carrying one
secret fair bit as its direction, sends them T times through the real path, and guesses the
bits of the rows that it is surest of. Too many right guesses contradict the claimed epsilon.

A lower bound below the claim proves nothing about the claim; one above it proves the claim
wrong, except with the stated small probability.

Letters: m canaries, r guesses, v right ones, T releases, D numbers of a representation.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import expit, ndtr, ndtri
from scipy.stats import beta, binom

from apfed_protocols.errors import LocalProtocolError
from secure_apfed.privacy.accountants import gdp_epsilon

# Canaries are far longer than any clip bound, so that a clip that yields shows.
_CANARY_NORM = 1e3
_DIMENSION = 8
_BISECTIONS = 40
_LARGEST_EPSILON = 100.0
_LARGEST_MU = 50.0

Release = Callable[[torch.Tensor, int, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Audit:
    """The findings of an audit; three bounds hold together with probability `confidence`.

    Of m `canaries` r are guessed (`guesses`) and v `right`; `all_right` if every one's bit is.
    What is claimed at `delta` is bounded by `epsilon_dp`, which assumes (epsilon, delta)-DP and no
    more, `epsilon_gdp`, Gaussian DP, and `epsilon_rows`, this and rows released independently.
    """

    canaries: int
    guesses: int
    right: int
    all_right: int
    epsilon_dp: float
    epsilon_gdp: float
    epsilon_rows: float
    delta: float
    confidence: float

    def contradicts(self, epsilon: float) -> bool:
        """Return whether a claim of `epsilon`, at the same delta, is wrong."""
        return max(self.epsilon_dp, self.epsilon_gdp, self.epsilon_rows) > epsilon


def audit_release(
    release: Release,
    *,
    releases: int,
    delta: float,
    seed: int,
    canaries: int = 10_000,
    guesses: int = 1000,
    confidence: float = 0.95,
) -> Audit:
    """Attack `release` and return what that proves, with that `confidence` in all three bounds.

    It goes from (h_BD, step, rows) to what is sent at that step, (B, D), or to a longer matrix of
    several such blocks, if a row is sent more than once, and is called with all canaries at each of
    T steps. The canaries' bits, of a seed, are no secret outside the audit.

    `guesses`: how many canaries are guessed.

    Raises:
        LocalProtocolError: numbers out of range, or a release of another shape.
    """
    if not (1 <= guesses <= canaries and releases >= 1):
        raise LocalProtocolError(
            f"an audit makes 1 to {canaries} guesses of {canaries} canaries over at least 1 "
            f"release, got {guesses} guesses and {releases} releases"
        )
    generator = torch.Generator().manual_seed(seed)
    bits_B = torch.randint(0, 2, (canaries,), generator=generator) * 2 - 1
    direction_D = torch.full((_DIMENSION,), _DIMENSION**-0.5)
    h_BD = _CANARY_NORM * bits_B[:, None] * direction_D
    rows = torch.arange(canaries)
    score_B = torch.zeros(canaries, dtype=torch.float64)
    for step in range(releases):
        z_BD = release(h_BD, step, rows)
        if z_BD.ndim != 2 or z_BD.shape[1] != _DIMENSION or len(z_BD) % canaries:
            raise LocalProtocolError(
                f"expected {canaries} released rows of {_DIMENSION} numbers, or a multiple, "
                f"got shape {tuple(z_BD.shape)}"
            )
        score_B += (z_BD.double() @ direction_D.double()).reshape(-1, canaries).sum(dim=0)
    surest = score_B.abs().topk(guesses).indices
    is_right_B = torch.where(score_B >= 0, 1, -1) == bits_B  # a tie is a guess like any other
    right = int(is_right_B[surest].sum())
    all_right = int(is_right_B.sum())
    level = (1 - confidence) / 3
    mu = mu_below(canaries, guesses, right, level=level)
    mu_rows = mu_below_if_independent(canaries, all_right, level=level)
    return Audit(
        canaries=canaries,
        guesses=guesses,
        right=right,
        all_right=all_right,
        epsilon_dp=epsilon_below(canaries, guesses, right, delta=delta, level=level),
        epsilon_gdp=gdp_epsilon(mu, delta),
        epsilon_rows=gdp_epsilon(mu_rows, delta),
        delta=delta,
        confidence=confidence,
    )


def epsilon_below(canaries: int, guesses: int, right: int, *, delta: float, level: float) -> float:
    """Return the largest epsilon that (m, r, v) contradict at significance `level`.

    Steinke, Nasr and Jagielski 2023 (Privacy Auditing with One Training Run), Theorem 5.2: with W
    binomial of r trials and success probability e^eps / (1 + e^eps), v or more right guesses have a
    probability of at most P(W >= v) + 2 m delta max over i = 1..v of P(v - i <= W < v) / i.

    `canaries`: m, how many rows are random bits.
    """

    def rejects_epsilon(epsilon: float) -> bool:
        """Return whether the guesses contradict (epsilon, delta)-DP by Theorem 5.2."""
        chance = expit(epsilon)
        below = binom.cdf(np.arange(right) - 1, guesses, chance)
        window = binom.cdf(right - 1, guesses, chance) - below[::-1]
        worst = float((window / np.arange(1, right + 1)).max(initial=0))
        return bool(binom.sf(right - 1, guesses, chance) + 2 * canaries * delta * worst < level)

    return _find_largest(rejects_epsilon, _LARGEST_EPSILON)


def mu_below(canaries: int, guesses: int, right: int, *, level: float) -> float:
    """Return the largest mu for which mu-GDP is contradicted by (m, r, v) at `level`.

    Mahloujifar, Melis and Chaudhuri 2024 (Auditing f-Differential Privacy in One Run), Algorithm
    3. Let p_k be the probability of k right guesses, and for a random canary let
    R_i = sum over k >= i of (k / m) p_k (guessed, rightly, in a run of at least i right ones) and
    W_i = sum over k >= i of ((r - k) / m) p_k (the same, wrongly). Turning the bit of a rightly
    guessed canary leaves the others as they are, so mu-GDP gives
    W_i >= Phi(Phi^-1(R_{i+1}) - mu), and by definition
    R_i = R_{i+1} + i / (r - i) (W_i - W_{i+1}). From p(v or more) = level downwards, these must not
    lead beyond R_0 + W_0 = r / m.
    """

    def rejects_mu(mu: float) -> bool:
        """Return whether the guesses contradict mu-GDP by Algorithm 3."""
        rightly = level * right / canaries
        wrongly = level * (guesses - right) / canaries
        for i in range(right - 1, -1, -1):
            least = max(wrongly, float(ndtr(ndtri(rightly) - mu)))
            rightly = rightly + i / (guesses - i) * (least - wrongly)
            wrongly = least
            if rightly + wrongly > guesses / canaries:
                return True
        return False

    return _find_largest(rejects_mu, _LARGEST_MU)


def mu_below_if_independent(canaries: int, all_right: int, *, level: float) -> float:
    """Return the mu that this many right guesses of all bits contradict, if rows are independent.

    Under mu-GDP no test of one fair bit is right with more than Phi(mu / 2) (Dong, Roth and Su
    2022, Section 2.2: the trade-off function at its fixed point), so that right guesses are at
    most binomial; Clopper and Pearson 1934 bound its probability below.

    `canaries`: m, how many rows are random bits. `level`: probability that the bound is wrong, at
    most.
    """
    if all_right <= canaries / 2:
        return 0.0
    least = beta.ppf(level, all_right, canaries - all_right + 1)
    return max(0.0, 2 * float(ndtri(least)))


def _find_largest(rejected: Callable[[float], bool], high: float) -> float:
    """Return the largest rejected value by bisection from below; 0 if none is.

    `high`: largest value that is tried.
    """
    low = 0.0
    if not rejected(low):
        return 0.0
    if rejected(high):
        return high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if rejected(middle) else (low, middle)
    return low

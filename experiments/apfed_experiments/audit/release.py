"""A statistical audit of how representations are released: a lower bound on epsilon by an attack.

Run by: the tests, and developers who change a guard. The audit plants m canary rows, each with a
secret fair bit as its direction, sends them T times through the real release function, and guesses
the bits of the rows where it is most confident. Too many right guesses contradict the claimed
epsilon.

A lower bound below the claim proves nothing about the claim; one above it proves the claim
wrong, except with the stated small probability.

Letters: m canaries, r guesses, v right guesses, T releases, B rows, D dimensions of a row.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import expit, ndtr, ndtri
from scipy.stats import beta, binom

from apfed_protocols.errors import LocalProtocolError
from secure_apfed.privacy.accountants import gdp_epsilon

# Canaries are far longer than any clip bound, so that a clip that does not hold is noticed.
_CANARY_NORM = 1e3
_ROW_DIMENSION = 8
_BISECTIONS = 40
_LARGEST_EPSILON = 100.0
_LARGEST_MU = 50.0

ReleaseFunction = Callable[[torch.Tensor, int, torch.Tensor], torch.Tensor]
"""A function that returns what is sent, given representations, the step and the rows' numbers."""


@dataclass(frozen=True, kw_only=True)
class Audit:
    """The findings of an audit; three bounds hold together with probability `confidence`.

    Attributes:
        canaries: m.
        guesses: r, the number of canaries whose bits are guessed.
        right: v, the number of right guesses among these.
        all_right: the number of right guesses if the bits of all m canaries are guessed.
        epsilon_dp: lower bound on epsilon at `delta` that assumes (epsilon, delta)-DP only.
        epsilon_gdp: lower bound that assumes Gaussian DP.
        epsilon_rows: lower bound that assumes Gaussian DP and rows released independently.
        delta: delta of the audited claim.
        confidence: probability that all three bounds hold, at least.
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
    release: ReleaseFunction,
    *,
    release_count: int,
    delta: float,
    seed: int,
    canary_count: int = 10_000,
    guess_count: int = 1000,
    confidence: float = 0.95,
) -> Audit:
    """Attack a release function and return lower bounds on its epsilon.

    Canary rows, each a long vector with a random sign, are released. The attack guesses the signs.

    Args:
        release: function of representations (B, D), the step and the rows' numbers (B,) that
            returns what is sent: (B, D), or several such blocks in one longer matrix if a row is
            sent more than once. It is called with all canaries at each step.
        release_count: T, the number of steps.
        delta: delta of the audited claim.
        seed: seed of the canaries' bits, which are no secret outside the audit.
        canary_count: m, the number of planted rows.
        guess_count: r, the number of canaries whose bits are guessed: those with the clearest
            scores.
        confidence: probability that all three bounds hold, at least.

    Raises:
        LocalProtocolError: numbers out of range, or a release of another shape.
    """
    if not (1 <= guess_count <= canary_count and release_count >= 1):
        raise LocalProtocolError(
            f"an audit makes 1 to {canary_count} guesses of {canary_count} canaries over at least "
            "1 "
            f"release, got {guess_count} guesses and {release_count} releases"
        )
    generator = torch.Generator().manual_seed(seed)
    bits_B = torch.randint(0, 2, (canary_count,), generator=generator) * 2 - 1  # -1 or 1
    direction_D = torch.full((_ROW_DIMENSION,), _ROW_DIMENSION**-0.5)  # a unit vector
    h_BD = _CANARY_NORM * bits_B[:, None] * direction_D
    rows = torch.arange(canary_count)
    score_B = torch.zeros(canary_count, dtype=torch.float64)
    for step in range(release_count):
        z_BD = release(h_BD, step, rows)
        if z_BD.ndim != 2 or z_BD.shape[1] != _ROW_DIMENSION or len(z_BD) % canary_count:
            raise LocalProtocolError(
                f"expected {canary_count} released rows of {_ROW_DIMENSION} numbers, or a "
                "multiple, "
                f"got shape {tuple(z_BD.shape)}"
            )
        # A row that was sent more than once adds all its blocks.
        score_B += (z_BD.double() @ direction_D.double()).reshape(-1, canary_count).sum(dim=0)
    clearest_rows = score_B.abs().topk(guess_count).indices
    is_right_B = torch.where(score_B >= 0, 1, -1) == bits_B  # a tie is a guess like any other
    right_count = int(is_right_B[clearest_rows].sum())
    all_right_count = int(is_right_B.sum())
    level = (1 - confidence) / 3  # three bounds share the probability of an error
    mu = bound_mu_by_guesses(canary_count, guess_count, right_count, level=level)
    mu_rows = bound_mu_of_independent_rows(canary_count, all_right_count, level=level)
    return Audit(
        canaries=canary_count,
        guesses=guess_count,
        right=right_count,
        all_right=all_right_count,
        epsilon_dp=bound_epsilon_by_guesses(
            canary_count, guess_count, right_count, delta=delta, level=level
        ),
        epsilon_gdp=gdp_epsilon(mu, delta),
        epsilon_rows=gdp_epsilon(mu_rows, delta),
        delta=delta,
        confidence=confidence,
    )


def bound_epsilon_by_guesses(
    canary_count: int, guess_count: int, right_count: int, *, delta: float, level: float
) -> float:
    """Return the largest epsilon that v right of r guesses contradict at significance `level`.

    Steinke, Nasr and Jagielski 2023 (Privacy Auditing with One Training Run), Theorem 5.2: with W
    binomial of r trials and success probability e^eps / (1 + e^eps), v or more right guesses have a
    probability of at most P(W >= v) + 2 m delta max over i = 1..v of P(v - i <= W < v) / i.

    `canary_count`: m, number of canaries. `guess_count`: r, number of guessed bits. `right_count`:
    v, number of right guesses. `delta`: delta of the claimed (epsilon, delta)-DP.
    """

    def rejects_epsilon(epsilon: float) -> bool:
        """Return whether the guesses contradict (epsilon, delta)-DP by Theorem 5.2."""
        success_probability = expit(epsilon)
        # P(W < v - i) for i = v, ..., 1, then P(v - i <= W < v) for i = 1, ..., v.
        probabilities_below = binom.cdf(
            np.arange(right_count) - 1, guess_count, success_probability
        )
        window_probabilities = (
            binom.cdf(right_count - 1, guess_count, success_probability) - probabilities_below[::-1]
        )
        largest_quotient = float(
            (window_probabilities / np.arange(1, right_count + 1)).max(initial=0)
        )
        return bool(
            binom.sf(right_count - 1, guess_count, success_probability)
            + 2 * canary_count * delta * largest_quotient
            < level
        )

    return _find_largest_rejected(rejects_epsilon, _LARGEST_EPSILON)


def bound_mu_by_guesses(
    canary_count: int, guess_count: int, right_count: int, *, level: float
) -> float:
    """Return the largest mu for which v right of r guesses on m canaries contradict mu-GDP.

    `canary_count`: m. `guess_count`: r, number of guessed bits. `right_count`: v, number of right
    guesses. `level`: probability that this bound is wrong, at most.

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
        right_mass = level * right_count / canary_count  # R_i, from i = v downwards
        wrong_mass = level * (guess_count - right_count) / canary_count  # W_i
        for i in range(right_count - 1, -1, -1):
            least_wrong_mass = max(wrong_mass, float(ndtr(ndtri(right_mass) - mu)))
            right_mass = right_mass + i / (guess_count - i) * (least_wrong_mass - wrong_mass)
            wrong_mass = least_wrong_mass
            if right_mass + wrong_mass > guess_count / canary_count:
                return True
        return False

    return _find_largest_rejected(rejects_mu, _LARGEST_MU)


def bound_mu_of_independent_rows(canary_count: int, all_right_count: int, *, level: float) -> float:
    """Return the largest mu that right guesses of all bits contradict, if rows are independent.

    Under mu-GDP a test of one fair bit is right with a probability of at most Phi(mu / 2) (Dong,
    Roth and Su 2022, Section 2.2: the trade-off function at its fixed point). The number of right
    guesses is therefore at most binomial; Clopper and Pearson 1934 bound its probability below.

    `canary_count`: m, number of canaries. `all_right_count`: number of right guesses among m.
    `level`: probability that the bound is wrong, at most.
    """
    if all_right_count <= canary_count / 2:  # no better than coin flips: nothing is proved
        return 0.0
    probability_low = beta.ppf(level, all_right_count, canary_count - all_right_count + 1)
    return max(0.0, 2 * float(ndtri(probability_low)))


def _find_largest_rejected(is_rejected: Callable[[float], bool], high: float) -> float:
    """Return the largest rejected value by bisection, or a value just below; 0 if none is rejected.

    `is_rejected`: function that is true for all values up to some point and false beyond it.
    `high`: largest value that is tried.
    """
    low = 0.0
    if not is_rejected(low):
        return 0.0
    if is_rejected(high):
        return high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if is_rejected(middle):
            low = middle
        else:
            high = middle
    return low

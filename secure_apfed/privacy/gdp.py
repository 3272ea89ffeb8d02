"""Gaussian differential privacy: what one release does, what many do together, and the inverse.

Run by: the ledger, before each release, the planner and every accountant. A mechanism states its
noise relative to its own sensitivity under replace-one adjacency, so that no accountant has to
know about clip bounds. Everything here is exact in real arithmetic and rounded to the safe side
in floating point: epsilon up, sigma up.

T releases of mu-GDP each, chosen adaptively, are together sqrt(T) mu-GDP and nothing
better holds (Dong, Roth and Su 2022, Gaussian Differential Privacy, Corollary 2). No
amplification by subsampling is claimed: every passive knows which rows a batch holds.

    delta(epsilon) = Phi(-epsilon/mu + mu/2) - exp(epsilon) Phi(-epsilon/mu - mu/2)

(the same paper, Corollary 1; Balle and Wang 2018, Theorem 8).
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
from scipy.optimize import brentq
from scipy.special import erfcx, log_ndtr

from secure_apfed.errors import ConfigError

__all__ = [
    "GaussianRelease",
    "Mechanism",
    "NoPrivacy",
    "calibrate_sigma",
    "compose",
    "gdp_delta",
    "gdp_epsilon",
    "gdp_mu",
]

# Relative steps to the safe side, larger than any rounding on the way. That on mu is the
# largest, so that a calibrated sigma never overruns the budget it was calibrated for.
_ROOT_TOLERANCE = 4 * np.finfo(float).eps
_DELTA_MARGIN = 1e-9
_EPSILON_MARGIN = 1e-12
_MU_MARGIN = 1e-9
# Above it the two terms cancel beyond what float64 holds; the bound that is given is 1e-6 too high.
_HUGE_MU = 1e6


@dataclass(frozen=True, kw_only=True)
class GaussianRelease:
    """One row with Gaussian noise added, its neighbour being any other row.

    Attributes:
        noise_multiplier: standard deviation over the replace-one L2 sensitivity:
            sigma / (2C) for a row clipped to norm C. Positive.
    """

    noise_multiplier: float

    def __post_init__(self) -> None:
        if not (np.isfinite(self.noise_multiplier) and self.noise_multiplier > 0):
            raise ConfigError(f"a noise multiplier is positive, got {self.noise_multiplier}")

    @property
    def mu(self) -> float:
        """Parameter of Gaussian DP of one release (Dong, Roth and Su 2022, Theorem 1)."""
        return 1 / self.noise_multiplier

    def __str__(self) -> str:
        return f"gaussian noise of {self.noise_multiplier:.4g} sensitivities (replace-one)"


@dataclass(frozen=True, kw_only=True)
class NoPrivacy:
    """Rows sent as they are: epsilon is infinite from the first release on.

    Attributes:
        mu: of Gaussian DP, as that of a release with noise.
    """

    mu: ClassVar[float] = math.inf

    def __str__(self) -> str:
        return "no noise"


Mechanism = GaussianRelease | NoPrivacy


def compose(mu: float, releases: int) -> float:
    """Return the parameter of `releases` adaptive mu-GDP releases together."""
    if releases < 0:
        raise ConfigError(f"a number of releases is at least 0, got {releases}")
    return mu * math.sqrt(releases)


def _log_delta(epsilon: float, mu: float) -> float:
    """Return log delta(epsilon) of mu-GDP without cancelling the two large terms.

    Uses exp(epsilon) Phi(-b) = exp(-a^2 / 2) erfcx(b / sqrt 2) / 2 with a = epsilon/mu - mu/2
    and b = epsilon/mu + mu/2, since epsilon = (b^2 - a^2) / 2.
    """
    a, b = epsilon / mu - mu / 2, epsilon / mu + mu / 2
    first = log_ndtr(-a)
    second = -a * a / 2 + np.log(erfcx(b / np.sqrt(2)) / 2)
    return float(first + np.log(-np.expm1(min(second - first, -np.finfo(float).tiny))))


def gdp_delta(epsilon: float, mu: float) -> float:
    """Return the smallest delta for which mu-GDP implies (epsilon, delta)-DP."""
    if not (epsilon >= 0 and mu >= 0):
        raise ConfigError(f"epsilon and mu are at least 0, got {epsilon} and {mu}")
    return 0.0 if mu == 0 else float(np.exp(_log_delta(epsilon, mu)))


@lru_cache(maxsize=256)
def gdp_epsilon(mu: float, delta: float) -> float:
    """Return the smallest epsilon for which mu-GDP implies (epsilon, delta)-DP."""
    _check_delta(delta)
    if mu < 0 or np.isnan(mu):
        raise ConfigError(f"mu is at least 0, got {mu}")
    if np.isinf(mu):
        return float("inf")
    if mu == 0 or _log_delta(0, mu) <= np.log(delta) - _DELTA_MARGIN:
        return 0.0
    # At this epsilon the first term alone is Phi(-sqrt(2 log 1/delta)) < delta.
    high = float(mu * mu / 2 + mu * np.sqrt(2 * np.log(1 / delta)))
    if mu > _HUGE_MU:
        return high
    target = np.log(delta) - _DELTA_MARGIN
    root = brentq(
        lambda epsilon: _log_delta(epsilon, mu) - target, 0, high, xtol=1e-15 * high,
        rtol=_ROOT_TOLERANCE,
    )  # fmt: skip
    return float(root * (1 + _EPSILON_MARGIN))


@lru_cache(maxsize=256)
def gdp_mu(epsilon: float, delta: float) -> float:
    """Return the largest mu for which mu-GDP implies (epsilon, delta)-DP."""
    _check_delta(delta)
    if not (np.isfinite(epsilon) and epsilon > 0):
        raise ConfigError(f"a target epsilon is positive and finite, got {epsilon}")

    target = float(np.log(delta) - _DELTA_MARGIN)

    def excess(log_mu: float) -> float:
        return _log_delta(epsilon, float(np.exp(log_mu))) - target

    low = high = 0.0
    while excess(low) > 0:
        low -= 1
    while excess(high) < 0:
        high += 1
    root = brentq(excess, low, high, xtol=1e-13, rtol=_ROOT_TOLERANCE)
    return float(np.exp(root) * (1 - _MU_MARGIN))


def calibrate_sigma(epsilon: float, delta: float, releases: int, clip: float) -> float:
    """Return the noise that keeps a row within (epsilon, delta) over `releases` releases.

    The replace-one sensitivity of a row clipped to norm `clip` is 2 clip, so
    sigma = 2 clip sqrt(releases) / mu(epsilon, delta).

    Example:
        >>> round(calibrate_sigma(epsilon=1.0, delta=1e-5, releases=1, clip=0.5), 2)
        3.73
    """
    if releases < 1:
        raise ConfigError(f"calibration needs at least 1 planned release, got {releases}")
    if not (np.isfinite(clip) and clip > 0):
        raise ConfigError(f"a clip bound is positive, got {clip}")
    return float(2 * clip * math.sqrt(releases) / gdp_mu(epsilon, delta))


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise ConfigError(f"delta lies between 0 and 1, both excluded, got {delta}")

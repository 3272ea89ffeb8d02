"""Accountants of Gaussian DP: epsilon from a mechanism and its releases, and back; cross-checks.

Run by: the ledger, before each release, the planner, the tests and the report. A mechanism states
its noise relative to its own sensitivity under replace-one adjacency, so that no accountant has to
know about clip bounds. No amplification by subsampling is claimed: every passive knows which rows
a batch holds.

T releases of mu-GDP each, chosen adaptively, are together sqrt(T) mu-GDP and nothing
better holds (Dong, Roth and Su 2022, Gaussian Differential Privacy, Corollary 2), with

    delta(epsilon) = Phi(-epsilon/mu + mu/2) - exp(epsilon) Phi(-epsilon/mu - mu/2)

(the same paper, Corollary 1; Balle and Wang 2018, Theorem 8). It is exact in real arithmetic and
rounded to the safe side in floating point: epsilon up, sigma up.

RDP and PLD come from Opacus and dp-accounting, whose noise multiplier is relative to the
sensitivity of their own adjacency: as a Gaussian release depends on nothing but that ratio, the
number passes over unchanged, at sample rate 1. PLD computes on a grid of privacy losses that grows
with epsilon, and whose size its library does not bound: here it is known before, or refused.
"""

import importlib
import importlib.util
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from operator import index
from types import ModuleType
from typing import ClassVar

import numpy as np
import scipy

from apfed_protocols.installing import install_extra
from secure_apfed.errors import ConfigError

__all__ = [
    "ACCOUNTANTS",
    "EXACT",
    "MAX_GRID_POINTS",
    "Accountant",
    "GaussianRelease",
    "Mechanism",
    "NoFigureError",
    "NoPrivacy",
    "calibrate_sigma",
    "compose_mu",
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
# Orders alpha of Rényi DP among which the smallest epsilon is taken.
_RDP_ORDERS = [1 + step / 100 for step in range(1, 100)] + list(np.geomspace(2, 1e5, 600))
# Width of a cell of PLD's grid of privacy losses, and log of the tail mass that
# dp-accounting cuts off (its default).
_PLD_INTERVAL = 1e-4
_PLD_LOG_TAIL = -50
# Measured: about 180 bytes a point, so 0.8 GB at this bound.
MAX_GRID_POINTS = 2**22


@dataclass(frozen=True, kw_only=True)
class GaussianRelease:
    """A release of one row with Gaussian noise added, its neighbour being any other row.

    Attributes:
        accountant: name of the accountant, in `ACCOUNTANTS`, whose epsilon is reported.
        noise_multiplier: standard deviation sigma of the noise divided by the replace-one L2
            sensitivity; so sigma / (2C) for a row clipped to norm C.
    """

    accountant: ClassVar[str] = "gdp"

    noise_multiplier: float

    def __post_init__(self) -> None:
        """Check that the noise multiplier is positive and finite. Raises ConfigError."""
        if not (np.isfinite(self.noise_multiplier) and self.noise_multiplier > 0):
            raise ConfigError(f"a noise multiplier is positive, got {self.noise_multiplier}")

    @property
    def mu(self) -> float:
        """Parameter of Gaussian DP of one release (Dong, Roth and Su 2022, Theorem 1)."""
        return 1 / self.noise_multiplier

    def epsilon_of(self, releases: int, delta: float) -> float:
        """Return epsilon at `delta` of `releases` adaptive releases of one row."""
        return EXACT.get_epsilon(self, releases=releases, delta=delta)

    def __str__(self) -> str:
        return f"gaussian noise of {self.noise_multiplier:.4g} sensitivities (replace-one)"


@dataclass(frozen=True, kw_only=True)
class NoPrivacy:
    """A release of rows as they are: epsilon is infinite from the first release on.

    It has the attributes of `GaussianRelease`, with an infinite mu and no noise multiplier.
    """

    accountant: ClassVar[str] = "gdp"
    mu: ClassVar[float] = math.inf
    noise_multiplier: ClassVar[None] = None

    def epsilon_of(self, releases: int, delta: float) -> float:
        """Return infinity, or 0 for no release."""
        return EXACT.get_epsilon(self, releases=releases, delta=delta)

    def __str__(self) -> str:
        return "no noise"


Mechanism = GaussianRelease | NoPrivacy


def compose_mu(mu: float, releases: int) -> float:
    """Return the Gaussian DP parameter of `releases` adaptive mu-GDP releases together.

    It is sqrt(releases) mu (Dong, Roth and Su 2022, Corollary 2).
    """
    _check_releases(releases)
    return mu * math.sqrt(releases)


def _check_releases(releases: int) -> None:
    """Raise ConfigError if a number of releases is negative."""
    if releases < 0:
        raise ConfigError(f"a number of releases is at least 0, got {releases}")


def _log_delta(epsilon: float, mu: float) -> float:
    """Return the logarithm of the smallest delta for which mu-GDP implies (epsilon, delta)-DP.

    That delta is Phi(-a) - exp(epsilon) Phi(-b) with a = epsilon/mu - mu/2, b = epsilon/mu + mu/2
    and the normal CDF Phi (Dong, Roth and Su 2022, Corollary 1). exp(epsilon) may overflow, so the
    second term is computed as exp(-a^2 / 2) erfcx(b / sqrt 2) / 2, which is equal since
    epsilon = (b^2 - a^2) / 2. Logarithms keep the digits of small differences.
    """
    a = epsilon / mu - mu / 2
    b = epsilon / mu + mu / 2
    log_first_term = scipy.special.log_ndtr(-a)
    log_second_term = -a * a / 2 + np.log(scipy.special.erfcx(b / np.sqrt(2)) / 2)
    # The second term is the smaller one; rounding must not make their difference 0 or negative.
    log_ratio = min(log_second_term - log_first_term, -np.finfo(float).tiny)
    return float(log_first_term + np.log(-np.expm1(log_ratio)))


@lru_cache(maxsize=256)
def gdp_epsilon(mu: float, delta: float) -> float:
    """Return the smallest epsilon for which mu-GDP implies (epsilon, delta)-DP.

    It is rounded up, and infinite for an infinite mu. For a huge mu, where floating point loses all
    digits, it is an upper bound. Raises ConfigError: mu or delta out of range.
    """
    _check_delta(delta)
    if mu < 0 or np.isnan(mu):
        raise ConfigError(f"mu is at least 0, got {mu}")
    if np.isinf(mu):
        return math.inf
    if mu == 0 or _log_delta(0, mu) <= np.log(delta) - _DELTA_MARGIN:
        return 0.0
    # An upper bound: there the first of delta's two terms is Phi(-sqrt(2 log 1/delta)) < delta.
    upper_bound = float(mu * mu / 2 + mu * np.sqrt(2 * np.log(1 / delta)))
    # The search below would lose all digits: the upper bound is returned.
    if mu > _HUGE_MU:
        return upper_bound
    target_log_delta = np.log(delta) - _DELTA_MARGIN
    root = scipy.optimize.brentq(
        lambda epsilon: _log_delta(epsilon, mu) - target_log_delta,
        0,
        upper_bound,
        xtol=1e-15 * upper_bound,
        rtol=_ROOT_TOLERANCE,
    )
    return float(root * (1 + _EPSILON_MARGIN))


@lru_cache(maxsize=256)
def gdp_mu(epsilon: float, delta: float) -> float:
    """Return the largest mu for which mu-GDP implies (epsilon, delta)-DP, rounded down.

    Raises ConfigError: epsilon or delta out of range.
    """
    _check_delta(delta)
    if not (np.isfinite(epsilon) and epsilon > 0):
        raise ConfigError(f"a target epsilon is positive and finite, got {epsilon}")

    target_log_delta = float(np.log(delta) - _DELTA_MARGIN)

    def compute_excess(log_mu: float) -> float:
        """Return by how much log delta(epsilon) at this mu exceeds the target; it grows with mu."""
        return _log_delta(epsilon, float(np.exp(log_mu))) - target_log_delta

    # Bracket the root in log mu, from mu = 1 on, then solve.
    low_log_mu = high_log_mu = 0.0
    while compute_excess(low_log_mu) > 0:
        low_log_mu -= 1
    while compute_excess(high_log_mu) < 0:
        high_log_mu += 1
    root = scipy.optimize.brentq(
        compute_excess, low_log_mu, high_log_mu, xtol=1e-13, rtol=_ROOT_TOLERANCE
    )
    return float(np.exp(root) * (1 - _MU_MARGIN))


def calibrate_sigma(epsilon: float, delta: float, releases: int, clip: float) -> float:
    """Return sigma, the smallest noise with which all releases of a row are (epsilon, delta)-DP.

    The replace-one sensitivity of a row clipped to L2 norm `clip` is 2 clip. So sigma, the standard
    deviation of the noise on each number, is 2 clip sqrt(releases) / mu(epsilon, delta).

    `releases`: how often one row is released. Raises ConfigError: a number out of range.

    Examples:
        >>> round(calibrate_sigma(epsilon=1.0, delta=1e-5, releases=1, clip=0.5), 2)
        3.73
    """
    if releases < 1:
        raise ConfigError(f"calibration needs at least 1 planned release, got {releases}")
    if not (np.isfinite(clip) and clip > 0):
        raise ConfigError(f"a clip bound is positive, got {clip}")
    return float(2 * clip * math.sqrt(releases) / gdp_mu(epsilon, delta))


def _check_delta(delta: float) -> None:
    """Raise ConfigError unless delta is between 0 and 1."""
    if not 0 < delta < 1:
        raise ConfigError(f"delta lies between 0 and 1, both excluded, got {delta}")


class NoFigureError(ConfigError):
    """An error of an accountant that cannot compute an epsilon for these values.

    The message names its limit.
    """


class Accountant:
    """An accountant, which computes epsilon for several releases of a row together.

    Args:
        name: the accountant's key in the table `ACCOUNTANTS`.
        compute_epsilon: (noise multiplier, releases, delta) -> epsilon, for Gaussian releases.
        library: the package that it imports, which may not cover all values; None: it imports none.
    """

    def __init__(
        self,
        name: str,
        compute_epsilon: Callable[[float, int, float], float],
        library: str | None = None,
    ) -> None:
        self.name = name
        self._compute_epsilon = compute_epsilon
        self._library = library

    def is_available(self) -> bool:
        """Return whether the accountant's library is installed, or it needs none."""
        return self._library is None or importlib.util.find_spec(self._library) is not None

    def get_epsilon(self, mechanism: Mechanism, *, releases: int, delta: float) -> float:
        """Return epsilon at `delta` for `releases` adaptive releases; 0 for none.

        Raises:
            ConfigError: numbers out of range, or the accountant's library is not installed.
            NoFigureError: the accountant cannot compute an epsilon here: its grid would take too
                much memory, or its numerics give no finite number.
        """
        _check_releases(releases)
        _check_delta(delta)
        if releases == 0:
            return 0.0
        if isinstance(mechanism, NoPrivacy):
            return math.inf
        # A NumPy integer of 8 or 16 bits would make results of 16-bit floats: convert to int.
        epsilon = self._compute_epsilon(mechanism.noise_multiplier, index(releases), delta)
        if self._library and not math.isfinite(epsilon):
            raise NoFigureError(f"its numerics end before delta {delta:.2g}: it says {epsilon}")
        # The RDP bound can be below 0; then (0, delta)-DP holds.
        return max(0.0, epsilon)


def _compute_gdp_epsilon(noise_multiplier: float, releases: int, delta: float) -> float:
    """Return the exact epsilon at `delta` of `releases` Gaussian releases of one row.

    `noise_multiplier`: standard deviation of the noise over the replace-one sensitivity.
    """
    return gdp_epsilon(compose_mu(1 / noise_multiplier, releases), delta)


def _compute_rdp_epsilon(noise_multiplier: float, releases: int, delta: float) -> float:
    """Return epsilon by Rényi DP through Opacus (Mironov 2017): an upper bound.

    It lies 5 to 10 % above the exact figure, and several times as high for an epsilon below about
    1e-3, since only the orders in `_RDP_ORDERS` are tried.

    `noise_multiplier`: standard deviation of the noise over the replace-one sensitivity.
    `releases`: T, how often one row is released.
    """
    accountant = _import_library("opacus.accountants").RDPAccountant()
    sample_rate = 1.0
    accountant.history = [(noise_multiplier, sample_rate, releases)]
    with warnings.catch_warnings():
        # Where the first or last order of a fixed list is best, a bound is looser, not wrong.
        warnings.filterwarnings("ignore", "Optimal order", UserWarning)
        return float(accountant.get_epsilon(delta, alphas=_RDP_ORDERS))


@lru_cache(maxsize=16)  # half a second; runs of a study that differ in their seeds ask the same
def _compute_pld_epsilon(noise_multiplier: float, releases: int, delta: float) -> float:
    """Return epsilon by privacy loss distributions through dp-accounting (Doroshenko et al. 2022).

    It is an upper bound, within about 0.2 %; coarser for an epsilon near `_PLD_INTERVAL`, the
    width of a cell of the grid on which it is computed.

    `noise_multiplier`: standard deviation of the noise over the replace-one sensitivity.
    `releases`: T, how often one row is released.

    Raises:
        NoFigureError: its grid would have more than `MAX_GRID_POINTS` points.
    """
    library = _import_library("dp_accounting")
    points = _count_pld_grid_points(noise_multiplier, releases)
    if points > MAX_GRID_POINTS:
        raise NoFigureError(f"its grid would take {points:.2g} points (bound {MAX_GRID_POINTS:,})")
    # The noise multiplier is already relative to the replace-one sensitivity, which is twice the
    # clip. Under its own replace-one relation the library would double it again.
    relation = library.NeighboringRelation.ADD_OR_REMOVE_ONE
    accountant = _import_library("dp_accounting.pld").PLDAccountant(relation, _PLD_INTERVAL)
    accountant.compose(library.GaussianDpEvent(noise_multiplier), releases)
    return float(accountant.get_epsilon(delta))


def _count_pld_grid_points(noise_multiplier: float, releases: int) -> float:
    """Return how many grid points dp-accounting would use for `releases` Gaussian releases.

    The releases' privacy loss together is normal with mean mu^2 / 2 and standard deviation mu. The
    library cuts off a mass of exp(-50), half of it in each tail. Its points lie `_PLD_INTERVAL`
    apart, from minus to plus the largest loss that remains. The count bounds its memory.

    `noise_multiplier`: standard deviation of one release's noise over replace-one sensitivity.
    """
    mu = compose_mu(1 / noise_multiplier, releases)
    tail_quantile = -float(scipy.special.ndtri(0.5 * math.exp(_PLD_LOG_TAIL)))
    largest_loss = mu * tail_quantile + mu**2 / 2
    return 2 * largest_loss / _PLD_INTERVAL


EXACT = Accountant("gdp", _compute_gdp_epsilon)
"""Gaussian DP composes without loss: the epsilon that is reported."""

ACCOUNTANTS: Mapping[str, Accountant] = {
    accountant.name: accountant
    for accountant in (
        EXACT,
        Accountant("rdp", _compute_rdp_epsilon, "opacus"),
        Accountant("pld", _compute_pld_epsilon, "dp_accounting"),
    )
}


def _import_library(name: str) -> ModuleType:
    """Import a library at first use: these take seconds to load, and only cross-checks need them.

    Raises ConfigError: the library is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"this accountant needs {name.partition('.')[0]}, which is not installed; "
            f"run: {install_extra('experiments')}, or use the accountant gdp"
        ) from error

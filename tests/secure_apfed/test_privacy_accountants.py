import doctest
import math
import re
from collections.abc import Callable

import mpmath  # type: ignore[import-untyped]  # it has no types
import pytest

from secure_apfed.errors import ConfigError
from secure_apfed.privacy import accountants
from secure_apfed.privacy.accountants import (
    ACCOUNTANTS,
    GaussianRelease,
    NoFigureError,
    NoPrivacy,
    calibrate_sigma,
    compose,
    gdp_epsilon,
    gdp_mu,
)

DELTA = 1e-5
# How close each is to the exact figure.
BOUNDS = {"gdp": (1.0, 1.0), "rdp": (1.0, 1.1), "prv": (0.999, 1.01), "pld": (0.999, 1.01)}
# sigma / (2C) by epsilon and T.
NEEDED = {
    (1, 1): 3.73, (1, 50): 26.4, (1, 100): 37.3, (2, 1): 1.99, (2, 50): 14.1, (2, 100): 19.9,
    (8, 1): 0.6, (8, 50): 4.24, (8, 100): 6.0,
}  # fmt: skip

each = pytest.mark.parametrize("name", ACCOUNTANTS)


def epsilon_of(name: str, multiplier: float, releases: int, delta: float = DELTA) -> float:
    mechanism = GaussianRelease(noise_multiplier=multiplier)
    return ACCOUNTANTS[name].epsilon(mechanism, releases=releases, delta=delta)


def formula(epsilon: float, mu: float) -> mpmath.mpf:
    """delta(epsilon) of mu-GDP, Dong, Roth and Su 2022, Corollary 1, to 60 digits."""
    with mpmath.workdps(60):
        e, m = mpmath.mpf(epsilon), mpmath.mpf(mu)
        return mpmath.ncdf(-e / m + m / 2) - mpmath.exp(e) * mpmath.ncdf(-e / m - m / 2)


@each
def test_it_is_near_the_exact_figure_and_grows_with_what_is_released(name: str) -> None:
    assert ACCOUNTANTS[name].name == name
    lowest, highest = BOUNDS[name]
    for (epsilon, releases), multiplier in list(NEEDED.items())[:: 1 if name == "gdp" else 3]:
        exact = gdp_epsilon(compose(1 / multiplier, releases), DELTA)
        assert exact == pytest.approx(epsilon, rel=0.01)
        assert lowest <= epsilon_of(name, multiplier, releases) / exact <= highest
    costs = [epsilon_of(name, 5.0, releases) for releases in (1, 2, 4, 8)]
    assert costs == sorted(set(costs))
    assert epsilon_of(name, 6.0, 4) < costs[2]
    assert epsilon_of(name, 2.0, 1, delta=1e-4) < epsilon_of(name, 2.0, 1, delta=1e-6)


@pytest.mark.parametrize(
    ("multiplier", "releases", "delta"),
    [(2.0, 1, 0.5), (20.0, 400, 1e-14), (1e6, 1, 1e-18), (2.0, 1, 1e-30)],
)
@each
def test_far_out_it_is_above_the_exact_figure_or_has_none(
    name: str, multiplier: float, releases: int, delta: float
) -> None:
    exact = gdp_epsilon(compose(1 / multiplier, releases), delta)
    told, reason = math.nan, ""
    try:
        told = epsilon_of(name, multiplier, releases, delta)
    except NoFigureError as error:
        reason = str(error)
    if reason:
        assert name in ("prv", "pld")
        assert re.search("its grid would|its numerics end before delta", reason)
    else:
        assert 0.999 * exact <= told <= 3 * exact + 0.2


@each
def test_limits_and_bad_arguments(name: str) -> None:
    assert epsilon_of(name, 1.0, 0) == 0
    assert ACCOUNTANTS[name].epsilon(NoPrivacy(), releases=0, delta=DELTA) == 0
    assert ACCOUNTANTS[name].epsilon(NoPrivacy(), releases=1, delta=DELTA) == math.inf
    with pytest.raises(ConfigError, match="at least 0, got -1"):
        epsilon_of(name, 1.0, -1)
    for delta in (0.0, 1.0, math.nan):
        with pytest.raises(ConfigError, match="delta lies between 0 and 1"):
            epsilon_of(name, 1.0, 1, delta=delta)


def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "dp_accounting", None)
    with pytest.raises(ConfigError, match=r"needs dp_accounting.*secure-apfed\[experiments\]"):
        epsilon_of("pld", 1.0, 1)


def test_calibration_gives_the_known_noise() -> None:
    for (epsilon, releases), needed in NEEDED.items():
        sigma = calibrate_sigma(epsilon, DELTA, releases, clip=3.0)
        assert f"{sigma / (2 * 3.0):.3g}" == f"{needed:.3g}"


@pytest.mark.parametrize("epsilon", [1e-3, 0.1, 1, 100, 1e4])
def test_calibrated_noise_stays_within_its_budget(epsilon: float) -> None:
    for delta, releases in ((0.1, 1), (1e-5, 7), (1e-12, 5000)):
        noise = calibrate_sigma(epsilon, delta, releases, clip=0.5)
        assert epsilon * (1 - 1e-5) < epsilon_of("gdp", noise, releases, delta) <= epsilon


@pytest.mark.parametrize("mu", [1e-4, 0.01, 0.3, 1, 3, 30, 1e3, 1e6])
def test_epsilon_is_the_least_of_the_papers_formula_on_the_safe_side(mu: float) -> None:
    for delta in (0.3, 1e-5, 1e-15):
        epsilon = gdp_epsilon(mu, delta)
        assert formula(epsilon, mu) <= delta
        if epsilon > 0:
            assert formula(epsilon * (1 - 1e-5), mu) > delta
            assert gdp_mu(epsilon, delta) == pytest.approx(mu, rel=1e-6)


def test_no_release_and_an_infinite_mu_have_their_limits() -> None:
    assert gdp_epsilon(0.0, DELTA) == 0
    assert gdp_epsilon(math.inf, DELTA) == math.inf


def test_bad_numbers_are_refused() -> None:
    refused: tuple[tuple[Callable[[], float], str], ...] = (
        (lambda: calibrate_sigma(1, DELTA, 0, 1), "at least 1 planned release, got 0"),
        (lambda: calibrate_sigma(1, DELTA, 1, 0), "a clip bound is positive, got 0"),
        (lambda: calibrate_sigma(0, DELTA, 1, 1), "a target epsilon is positive and finite, got 0"),
        (lambda: calibrate_sigma(1, 0, 1, 1), "delta lies between 0 and 1, both excluded, got 0"),
        (lambda: compose(1, -1), "at least 0, got -1"),
        (lambda: gdp_epsilon(-1, DELTA), "mu is at least 0, got -1"),
    )
    for call, message in refused:
        with pytest.raises(ConfigError, match=message):
            call()
    for multiplier in (0, -1, math.inf, math.nan):
        with pytest.raises(ConfigError, match="a noise multiplier is positive"):
            GaussianRelease(noise_multiplier=multiplier)


def test_the_example_runs() -> None:
    assert doctest.testmod(accountants).failed == 0

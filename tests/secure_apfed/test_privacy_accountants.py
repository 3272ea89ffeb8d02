"""Accounts of releases and of noise under sums, against other formulas and an audit."""

import math
import re
from collections.abc import Callable
from itertools import product

import dp_accounting
import mpmath  # type: ignore[import-untyped]  # it has no types
import numpy as np
import pytest
import torch
from dp_accounting.rdp import RdpAccountant
from numpy.typing import NDArray

from apfed_protocols.noise import MAX_DEVIATION
from secure_apfed.errors import ConfigError
from secure_apfed.privacy.accountants import (
    ACCOUNTANTS,
    GaussianRelease,
    NoFigureError,
    NoPrivacy,
    calibrate_sigma,
    compose_mu,
    gdp_epsilon,
    gdp_mu,
)
from secure_apfed.privacy.contributions import (
    SummedRelease,
    calibrate_noise,
    excess_of_sum,
    sensitivity_in_steps,
    zcdp_epsilon,
)
from secure_apfed.privacy.ledger import BudgetExhaustedError, PrivacyLedger

DELTA = 1e-5
BOUNDS = {"gdp": (1.0, 1.0), "rdp": (1.0, 1.1), "pld": (0.999, 1.01)}
# sigma / (2C) by epsilon and T.
NEEDED = {
    (1, 1): 3.73,
    (1, 50): 26.4,
    (1, 100): 37.3,
    (2, 1): 1.99,
    (2, 50): 14.1,
    (2, 100): 19.9,
    (8, 1): 0.6,
    (8, 50): 4.24,
    (8, 100): 6.0,
}
each = pytest.mark.parametrize("name", ACCOUNTANTS)


def epsilon_of(name: str, multiplier: float, releases: int, delta: float = DELTA) -> float:
    mechanism = GaussianRelease(noise_multiplier=multiplier)
    return ACCOUNTANTS[name].get_epsilon(mechanism, releases=releases, delta=delta)


def formula(epsilon: float, mu: float) -> mpmath.mpf:
    """delta(epsilon) of mu-GDP, Dong, Roth and Su 2022, Corollary 1, to 60 digits."""
    with mpmath.workdps(60):
        e = mpmath.mpf(epsilon)
        m = mpmath.mpf(mu)
        return mpmath.ncdf(-e / m + m / 2) - mpmath.exp(e) * mpmath.ncdf(-e / m - m / 2)


@pytest.mark.sampled(every=3)
@each
def test_it_is_near_the_exact_figure_and_grows_with_what_is_released(name: str) -> None:
    assert ACCOUNTANTS[name].name == name
    lowest, highest = BOUNDS[name]
    for (epsilon, releases), multiplier in list(NEEDED.items())[:: 1 if name == "gdp" else 3]:
        exact = gdp_epsilon(compose_mu(1 / multiplier, releases), DELTA)
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
    exact = gdp_epsilon(compose_mu(1 / multiplier, releases), delta)
    told = math.nan
    reason = ""
    try:
        told = epsilon_of(name, multiplier, releases, delta)
    except NoFigureError as error:
        reason = str(error)
    if reason:
        assert name == "pld"
        assert re.search("its grid would|its numerics end before delta", reason)
    else:
        assert 0.999 * exact <= told <= 3 * exact + 0.2


@each
def test_limits_and_bad_arguments(name: str) -> None:
    assert epsilon_of(name, 1.0, 0) == 0
    assert ACCOUNTANTS[name].get_epsilon(NoPrivacy(), releases=0, delta=DELTA) == 0
    assert ACCOUNTANTS[name].get_epsilon(NoPrivacy(), releases=1, delta=DELTA) == math.inf
    with pytest.raises(ConfigError, match="at least 0, got -1"):
        epsilon_of(name, 1.0, -1)


@pytest.mark.parametrize("delta", [0.0, 1.0, math.nan])
@each
def test_a_delta_out_of_range_is_refused(delta: float, name: str) -> None:
    with pytest.raises(ConfigError, match="delta lies between 0 and 1"):
        epsilon_of(name, 1.0, 1, delta=delta)


def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "dp_accounting", None)
    with pytest.raises(ConfigError, match=r"needs dp_accounting.*pip install .*'dp-accounting>="):
        epsilon_of("pld", 1.0, 1)


def test_calibration_gives_the_known_noise() -> None:
    sigmas = {case: calibrate_sigma(case[0], DELTA, case[1], clip=3.0) for case in NEEDED}
    multipliers = {case: f"{sigma / (2 * 3.0):.3g}" for case, sigma in sigmas.items()}
    assert multipliers == {case: f"{needed:.3g}" for case, needed in NEEDED.items()}


@pytest.mark.parametrize(("delta", "releases"), [(0.1, 1), (1e-5, 7), (1e-12, 5000)])
@pytest.mark.parametrize("epsilon", [1e-3, 0.1, 1, 100, 1e4])
def test_calibrated_noise_stays_within_its_budget(
    delta: float, releases: int, epsilon: float
) -> None:
    noise = calibrate_sigma(epsilon, delta, releases, clip=0.5)
    assert epsilon * (1 - 1e-5) < epsilon_of("gdp", noise, releases, delta) <= epsilon


@pytest.mark.parametrize("delta", [0.3, 1e-5, 1e-15])
@pytest.mark.parametrize("mu", [1e-4, 0.01, 0.3, 1, 3, 30, 1e3, 1e6])
def test_epsilon_is_the_least_of_the_papers_formula_on_the_safe_side(
    delta: float, mu: float
) -> None:
    epsilon = gdp_epsilon(mu, delta)
    assert formula(epsilon, mu) <= delta
    if epsilon > 0:
        assert formula(epsilon * (1 - 1e-5), mu) > delta
        assert gdp_mu(epsilon, delta) == pytest.approx(mu, rel=1e-6)


def test_bad_numbers_are_refused_and_limits_are_kept() -> None:
    assert (gdp_epsilon(0.0, DELTA), gdp_epsilon(math.inf, DELTA)) == (0, math.inf)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: calibrate_sigma(1, DELTA, 0, 1), "at least 1 planned release, got 0"),
        (lambda: calibrate_sigma(1, DELTA, 1, 0), "a clip bound is positive, got 0"),
        (lambda: calibrate_sigma(0, DELTA, 1, 1), "a target epsilon is positive and finite, got 0"),
        (lambda: calibrate_sigma(1, 0, 1, 1), "delta lies between 0 and 1, both excluded, got 0"),
        (lambda: compose_mu(1, -1), "at least 0, got -1"),
        (lambda: gdp_epsilon(-1, DELTA), "mu is at least 0, got -1"),
    ],
)
def test_bad_numbers_are_refused(call: Callable[[], float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


@pytest.mark.parametrize("multiplier", [0, -1, math.inf, math.nan])
def test_a_noise_multiplier_out_of_range_is_refused(multiplier: float) -> None:
    with pytest.raises(ConfigError, match="a noise multiplier is positive"):
        GaussianRelease(noise_multiplier=multiplier)


@pytest.mark.parametrize("rho", [1e-4, 0.1, 10.0])
def test_zcdp_agrees_with_dp_accounting_and_lies_above_the_gaussian(rho: float) -> None:
    orders = [1 + k / 200 for k in range(1, 2000)] + list(range(11, 2000))
    theirs = RdpAccountant(orders=orders)
    theirs.compose(dp_accounting.ZCDpEvent(rho))
    ours = zcdp_epsilon(rho, DELTA)
    assert ours <= theirs.get_epsilon(DELTA) * (1 + 1e-6)
    assert ours == pytest.approx(theirs.get_epsilon(DELTA), rel=2e-3)
    exact = gdp_epsilon(math.sqrt(2 * rho), DELTA)  # of a Gaussian of that rho
    assert exact <= ours <= 1.2 * exact + 0.05


def pmf(deviation: int) -> NDArray[np.float64]:
    x = np.arange(-40 * deviation, 40 * deviation + 1)
    weight = np.exp(-(x.astype(np.float64) ** 2) / (2 * deviation**2))
    return np.asarray(weight / weight.sum())


def exact_delta(deviation: int, honest: int, shift: int, epsilon: float) -> float:
    """The hockey-stick divergence of the sum's noise from itself shifted, by enumeration."""
    law = pmf(deviation)
    for _ in range(honest - 1):
        law = np.convolve(law, pmf(deviation))
    here = np.pad(law, (shift, 0))
    there = np.pad(law, (0, shift))
    return float(np.maximum(here - math.exp(epsilon) * there, 0).sum())


@pytest.mark.parametrize("deviation", [1, 2, 10])
def test_the_claim_holds_for_one_value_exactly(deviation: int) -> None:
    """A small audit without chance: the claimed epsilon against the true divergence."""
    claimed = SummedRelease(deviation=5, honest=2, sensitivity=10, numbers=1).epsilon_of(1, DELTA)
    assert exact_delta(5, 2, 10, claimed) <= DELTA
    assert exact_delta(5, 1, 10, claimed) > DELTA


@pytest.mark.parametrize(("honest", "shift"), [*product((1, 2, 5), (1, 3))])
@pytest.mark.parametrize("deviation", [1, 2, 10])
def test_the_claim_holds_for_one_value_exactly_whoever_is_honest(
    honest: int, shift: int, deviation: int
) -> None:
    """Audit without chance: the claimed epsilon against the true divergence."""
    release = SummedRelease(deviation=deviation, honest=honest, sensitivity=shift, numbers=1)
    claimed = release.epsilon_of(1, DELTA)
    assert exact_delta(deviation, honest, shift, claimed) <= DELTA
    # And it is no empty claim: a third less noise breaks it.
    if deviation == 10:
        assert exact_delta(7, honest, shift, claimed) > DELTA


@pytest.mark.parametrize(("deviation", "honest"), [(1, 2), (1, 5), (2, 2)])
def test_a_sum_is_as_near_to_one_gaussian_as_its_excess_says(deviation: int, honest: int) -> None:
    """By convolution: the sum's probabilities, and its zero-concentrated DP at several orders."""
    x = np.arange(-10 * deviation, 10 * deviation + 1)
    one = np.exp(-(x**2) / (2 * deviation**2))
    summed = one = one / one.sum()
    for _ in range(honest - 1):
        summed = np.convolve(summed, one)
    value = np.arange(len(summed)) - len(summed) // 2
    variance = honest * deviation**2
    ideal = np.exp(-(value**2) / (2 * variance))
    ideal /= ideal.sum()
    near = abs(value) <= 3 * math.sqrt(variance)
    apart = abs(np.log(summed[near] / ideal[near])).max()
    assert apart <= excess_of_sum(deviation, honest) + 1e-14
    for shift in (1, 2, 3):
        release = SummedRelease(
            deviation=deviation, honest=honest, sensitivity=float(shift), numbers=1
        )
        left = np.log(summed[shift:])
        right = np.log(summed[:-shift])
        for order in (1.01, 1.5, 2.0, 4.0):
            moment = np.exp(order * left + (1 - order) * right).sum()
            renyi = math.log(float(moment)) / (order - 1)
            assert renyi <= order * release.rho * (1 + 1e-9)


@pytest.mark.parametrize(("columns", "rows"), [(1, 1), (64, 128)])
def test_sensitivity_holds_for_quantised_neighbours(columns: int, rows: int) -> None:
    from apfed_protocols.sums.fixed_point import FixedPoint

    fixed_point = FixedPoint(clip_norm=1.0, bits=4, contributor_count=1)
    bound = sensitivity_in_steps(
        steps_in_clip=fixed_point.max_level, columns=columns, rows_per_person=rows
    )
    rng = np.random.default_rng(0)
    most = 0.0
    for _ in range(50):
        wide = rng.normal(size=(rows, columns)) * 1e6
        moved = fixed_point.quantise_rows(wide) - fixed_point.quantise_rows(-wide)
        most = max(most, float(np.linalg.norm(moved)))
    assert most <= bound
    assert bound >= 2 * fixed_point.max_level * math.sqrt(rows)
    # In APFed-C the whole batch moves.
    one = sensitivity_in_steps(steps_in_clip=32767, columns=64, rows_per_person=1)
    assert sensitivity_in_steps(
        steps_in_clip=32767, columns=64, rows_per_person=100
    ) == pytest.approx(10 * one)
    assert one == pytest.approx(2 * 32767, rel=1e-3)


def test_the_tails_that_are_cut_off_are_paid_for() -> None:
    release = SummedRelease(deviation=10, honest=3, sensitivity=1.0, numbers=1000)
    assert 0 < release.tail < 1e-34
    # With so small a delta nothing is left for the noise itself.
    assert release.epsilon_of(1, 1e-36) == math.inf
    # Noise without its tails is within T tail of that with them, (1 + e^epsilon) times in delta.
    loud = SummedRelease(deviation=10, honest=3, sensitivity=5.0, numbers=1000)
    delta = 1e-33
    epsilon = loud.epsilon_of(1, delta)
    assert math.isfinite(epsilon)
    left = delta - (1 + math.exp(epsilon)) * loud.tail
    assert epsilon >= zcdp_epsilon(loud.rho, left)


@pytest.mark.parametrize(("epsilon", "releases"), [(1.0, 50), (8.0, 1)])
def test_calibration_is_the_least_noise_that_keeps_a_budget(epsilon: float, releases: int) -> None:
    sensitivity = sensitivity_in_steps(steps_in_clip=32767, columns=8, rows_per_person=1)
    common = {"honest": 2, "sensitivity": sensitivity, "numbers": 512}
    steps = calibrate_noise(epsilon=epsilon, delta=DELTA, releases=releases, **common)  # type: ignore[arg-type]

    def cost(deviation: int) -> float:
        release = SummedRelease(deviation=deviation, **common)  # type: ignore[arg-type]
        return release.epsilon_of(releases, DELTA)

    assert cost(steps) <= epsilon < cost(steps - 1)


def test_more_noise_than_a_sum_carries_and_none_are_refused() -> None:
    with pytest.raises(ConfigError, match=f"more than {MAX_DEVIATION} steps"):
        calibrate_noise(
            epsilon=0.01, delta=DELTA, releases=300, honest=1, sensitivity=1e6, numbers=10
        )


@pytest.mark.parametrize(
    ("field", "wrong"),
    [*product(["deviation", "honest", "sensitivity", "numbers"], (0, -1, math.nan))],
)
def test_a_noise_of_a_sum_out_of_range_is_refused(field: str, wrong: float) -> None:
    usual = {"deviation": 5, "honest": 2, "sensitivity": 1.0, "numbers": 3}
    with pytest.raises(ConfigError):
        SummedRelease(**{**usual, field: wrong})  # type: ignore[arg-type]


def test_the_ledger_counts_and_stops_before_the_budget() -> None:
    release = SummedRelease(deviation=100_000, honest=2, sensitivity=65_542.0, numbers=64)
    budget = release.epsilon_of(3, DELTA)
    ledger = PrivacyLedger(release, delta=DELTA, budget=budget, rows=4, log=None)
    for step in range(3):
        ledger.charge(step=step, rows=torch.tensor([0, 1]), digest=bytes([step]))
    with pytest.raises(BudgetExhaustedError, match="release 4 of one row"):
        ledger.charge(step=3, rows=torch.tensor([1, 2]), digest=b"x")
    spent = ledger.summarise_cost()
    assert spent["epsilon"] == pytest.approx(budget)
    assert ledger.cross_check() == {"zcdp": spent["epsilon"]}
    assert "2 honest parties" in spent["trace"][0]

"""The account of noise under sums: formulas against others' and exact enumeration, and an audit."""

import math
from itertools import product

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.rdp import RdpAccountant
from numpy.typing import NDArray

from apfed_experiments.audit.release import audit_release
from apfed_protocols.noise import MAX_DEVIATION, discrete_gaussian
from secure_apfed.errors import ConfigError
from secure_apfed.privacy.accountants import gdp_epsilon
from secure_apfed.privacy.contributions import (
    SummedRelease,
    calibrate_noise,
    excess_of_sum,
    sensitivity_in_steps,
    zcdp_epsilon,
)
from secure_apfed.privacy.ledger import BudgetExhaustedError, PrivacyLedger
from tests.contracts.sum_parties import Parties as SumParties
from tests.contracts.sum_parties import agreement, binding, make

DELTA = 1e-5


@pytest.mark.parametrize("rho", [1e-4, 0.1, 10.0])
def test_zcdp_agrees_with_dp_accounting_and_lies_above_the_gaussian(rho: float) -> None:
    orders = [1 + k / 200 for k in range(1, 2000)] + list(range(11, 2000))
    theirs = RdpAccountant(orders=orders)
    theirs.compose(dp_accounting.ZCDpEvent(rho))
    ours = zcdp_epsilon(rho, DELTA)
    assert ours <= theirs.get_epsilon(DELTA) * (1 + 1e-6)
    assert ours == pytest.approx(theirs.get_epsilon(DELTA), rel=2e-3)
    # A Gaussian of that rho is sqrt(2 rho)-GDP, whose epsilon is exact.
    assert (
        gdp_epsilon(math.sqrt(2 * rho), DELTA)
        <= ours
        <= 1.2 * gdp_epsilon(math.sqrt(2 * rho), DELTA) + 0.05
    )
    assert zcdp_delta(rho, ours) == pytest.approx(DELTA, rel=1e-4)


def zcdp_delta(rho: float, epsilon: float) -> float:
    """Corollary 13 of Canonne, Kamath and Steinke 2020, on a fine grid of a."""
    over = np.logspace(-6, 8, 1_000_000)  # a - 1
    log = (
        over * ((1 + over) * rho - epsilon) - np.log(over) + (1 + over) * np.log1p(-1 / (1 + over))
    )
    return float(np.exp(log.min()))


def pmf(deviation: int) -> NDArray[np.float64]:
    x = np.arange(-40 * deviation, 40 * deviation + 1)
    weight = np.exp(-(x.astype(np.float64) ** 2) / (2 * deviation**2))
    return np.asarray(weight / weight.sum())


def exact_delta(deviation: int, honest: int, shift: int, epsilon: float) -> float:
    """The hockey-stick divergence of the sum's noise from itself shifted, by enumeration."""
    law = pmf(deviation)
    for _ in range(honest - 1):
        law = np.convolve(law, pmf(deviation))
    here, there = np.pad(law, (shift, 0)), np.pad(law, (0, shift))
    return float(np.maximum(here - math.exp(epsilon) * there, 0).sum())


@pytest.mark.parametrize("deviation", [1, 2, 10])
def test_the_claim_holds_for_one_value_exactly(deviation: int) -> None:
    """A small audit without chance: the claimed epsilon against the true divergence."""
    for honest, shift in product((1, 2, 5), (1, 3)):
        release = SummedRelease(deviation=deviation, honest=honest, sensitivity=shift, numbers=1)
        claimed = release.epsilon_of(1, DELTA)
        assert exact_delta(deviation, honest, shift, claimed) <= DELTA
        # And it is no empty claim: a third less noise breaks it.
        if deviation == 10:
            assert exact_delta(7, honest, shift, claimed) > DELTA
    # Noise of one party counted for two.
    claimed = SummedRelease(deviation=5, honest=2, sensitivity=10, numbers=1).epsilon_of(1, DELTA)
    assert exact_delta(5, 2, 10, claimed) <= DELTA
    assert exact_delta(5, 1, 10, claimed) > DELTA


@pytest.mark.parametrize(("deviation", "honest"), [(1, 2), (1, 5), (2, 2)])
def test_a_sum_is_as_near_to_one_discrete_gaussian_as_its_excess_says(
    deviation: int, honest: int
) -> None:
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
        left, right = np.log(summed[shift:]), np.log(summed[:-shift])
        for order in (1.01, 1.5, 2.0, 4.0):
            moment = np.exp(order * left + (1 - order) * right).sum()
            renyi = math.log(float(moment)) / (order - 1)
            assert renyi <= order * release.rho * (1 + 1e-9)


def test_the_excess_of_a_sum_vanishes_quickly() -> None:
    assert excess_of_sum(1, 1) == 0
    assert excess_of_sum(1, 2) == pytest.approx(10 * math.exp(-(math.pi**2)))
    assert excess_of_sum(4, 1000) < 1e-60


@pytest.mark.parametrize(("columns", "rows"), [(1, 1), (64, 128)])
def test_sensitivity_holds_for_quantised_neighbours(columns: int, rows: int) -> None:
    """Opposite rows on the bound, where rounding helps most."""
    from apfed_protocols.sums.fixed_point import FixedPoint

    fixed_point = FixedPoint(clip_norm=1.0, bits=4, contributors=1)
    bound = sensitivity_in_steps(levels=fixed_point.levels, columns=columns, rows=rows)
    rng = np.random.default_rng(0)
    most = 0.0
    for _ in range(50):
        wide = rng.normal(size=(rows, columns)) * 1e6
        moved = fixed_point.quantise(wide) - fixed_point.quantise(-wide)
        most = max(most, float(np.linalg.norm(moved)))
    assert most <= bound
    assert bound >= 2 * fixed_point.levels * math.sqrt(rows)
    # In APFed-C the whole batch moves.
    one = sensitivity_in_steps(levels=32767, columns=64, rows=1)
    assert sensitivity_in_steps(levels=32767, columns=64, rows=100) == pytest.approx(10 * one)
    assert one == pytest.approx(2 * 32767, rel=1e-3)


def test_the_tails_that_are_cut_off_are_paid_for() -> None:
    release = SummedRelease(deviation=10, honest=3, sensitivity=1.0, numbers=1000)
    assert 0 < release.tail < 1e-34
    # With so small a delta nothing is left for the noise itself.
    assert release.epsilon_of(1, 1e-36) == math.inf
    # Noise without its tails is within T tail of that with them, (1 + e^epsilon) times in delta.
    loud, delta = SummedRelease(deviation=10, honest=3, sensitivity=5.0, numbers=1000), 1e-33
    epsilon = loud.epsilon_of(1, delta)
    assert math.isfinite(epsilon)
    left = delta - (1 + math.exp(epsilon)) * loud.tail
    assert epsilon >= zcdp_epsilon(loud.rho, left)


@pytest.mark.parametrize(("epsilon", "releases"), [(1.0, 50), (8.0, 1)])
def test_calibration_is_the_least_noise_that_keeps_the_budget(
    epsilon: float, releases: int
) -> None:
    sensitivity = sensitivity_in_steps(levels=32767, columns=8, rows=1)
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
    usual = {"deviation": 5, "honest": 2, "sensitivity": 1.0, "numbers": 3}
    for field, wrong in product(usual, (0, -1, math.nan)):
        with pytest.raises(ConfigError):
            SummedRelease(**{**usual, field: wrong})  # type: ignore[arg-type]


def test_the_ledger_counts_and_stops_before_the_budget() -> None:
    release = SummedRelease(deviation=100_000, honest=2, sensitivity=65_542.0, numbers=64)
    budget = release.epsilon_of(3, DELTA)
    ledger = PrivacyLedger(release, delta=DELTA, budget=budget, rows=4, log=None)
    for step in range(3):
        ledger.charge(step=step, rows=torch.tensor([0, 1]), digest=bytes([step]))
    ledger.charge(step=2, rows=torch.tensor([0, 1]), digest=bytes([2]))  # the same again is free
    with pytest.raises(BudgetExhaustedError, match="release 4 of one row"):
        ledger.charge(step=3, rows=torch.tensor([1, 2]), digest=b"x")
    ledger.charge(step=4, rows=torch.tensor([2, 3]), digest=b"y")
    spent = ledger.account()
    assert spent["releases"] == 3
    assert spent["epsilon"] == pytest.approx(budget)
    assert ledger.cross_check() == {"zcdp": spent["epsilon"]}
    assert "2 honest parties" in spent["trace"][0]


class SummedPath:
    """Canaries as one passive's contributions; the active reads the opened sum of two."""

    def __init__(self, deviation: int, *, adding: int = 2, factor: float = 1.0) -> None:
        self._played = SumParties(make("plain + pairwise masks", agreement(2, noise=deviation)))
        self._noise = deviation, adding, factor

    def __call__(self, h_BD: torch.Tensor, step: int, rows: torch.Tensor) -> torch.Tensor:
        deviation, adding, factor = self._noise
        played, bound = self._played, binding(step)
        shape = (len(h_BD), h_BD.shape[1])
        frames = {}
        for index, name in enumerate(played.names):
            values = h_BD.numpy().astype(np.float64) if index == 0 else np.zeros(shape)
            drawn = discrete_gaussian(
                bytes([index] * 32), step.to_bytes(8, "big"), deviation=deviation, shape=shape
            )
            drawn = np.rint(factor * drawn).astype(np.int64) * (index < adding)
            frames[name] = played.contributors[name].contribute(values, bound, drawn)
        total = played.receiver.decode(played.combine(frames, bound.digest), shape, bound)
        return torch.from_numpy(total)


def claim(epsilon: float, releases: int) -> tuple[int, float]:
    sensitivity = sensitivity_in_steps(levels=32767, columns=8, rows=1)
    steps = calibrate_noise(
        epsilon=epsilon, delta=DELTA, releases=releases, honest=2, sensitivity=sensitivity,
        numbers=80_000,
    )  # fmt: skip
    return steps, epsilon


@pytest.mark.parametrize(("epsilon", "releases"), [(1.0, 1), (4.0, 5)])
def test_an_audit_through_the_real_sum_stays_under_the_claim(epsilon: float, releases: int) -> None:
    steps, claimed = claim(epsilon, releases)
    found = audit_release(SummedPath(steps), releases=releases, delta=DELTA, seed=0)
    assert not found.contradicts(claimed)
    assert found.epsilon_rows > 0.5 * claimed


@pytest.mark.parametrize("planted", [{"adding": 1}, {"factor": 2 / 3}])
def test_the_audit_finds_planted_faults(planted: dict[str, float]) -> None:
    steps, claimed = claim(4.0, 1)
    found = audit_release(SummedPath(steps, **planted), releases=1, delta=DELTA, seed=0)  # type: ignore[arg-type]
    assert found.contradicts(claimed)

import doctest
import math
import re

import pytest
from scipy.stats import norm

from secure_apfed.errors import ConfigError
from secure_apfed.privacy import accountants
from secure_apfed.privacy.accountants import (
    ACCOUNTANTS,
    Accountant,
    GaussianRelease,
    NoFigureError,
    NoPrivacy,
    calibrate_sigma,
    compose,
    gdp_delta,
    gdp_epsilon,
    gdp_mu,
)

DELTA = 1e-5
# sigma / (2C) for epsilon 1, 2 and 8 at T 1, 50 and 100.
CASES = [
    (3.73, 1), (26.4, 50), (37.3, 100),
    (1.99, 1), (14.1, 50), (19.9, 100),
    (0.6, 1), (4.24, 50), (6.0, 100),
]  # fmt: skip


class AccountantContract:
    """What every accountant owes; a subclass names its own and how close it is."""

    name: str
    lowest: float
    highest: float

    @property
    def accountant(self) -> Accountant:
        return ACCOUNTANTS[self.name]

    def epsilon(self, multiplier: float, releases: int, delta: float = DELTA) -> float:
        mechanism = GaussianRelease(noise_multiplier=multiplier)
        return self.accountant.epsilon(mechanism, releases=releases, delta=delta)

    def test_it_is_in_the_table_under_its_name(self) -> None:
        assert self.accountant.name == self.name

    @pytest.mark.parametrize(("multiplier", "releases"), CASES)
    def test_it_agrees_with_the_exact_figure(self, multiplier: float, releases: int) -> None:
        exact = gdp_epsilon(compose(1 / multiplier, releases), DELTA)
        assert self.lowest <= self.epsilon(multiplier, releases) / exact <= self.highest

    def test_more_releases_cost_more_and_more_noise_less(self) -> None:
        assert self.epsilon(5.0, 1) < self.epsilon(5.0, 2) < self.epsilon(5.0, 8)
        assert self.epsilon(6.0, 4) < self.epsilon(5.0, 4)

    def test_a_smaller_delta_costs_more(self) -> None:
        assert self.epsilon(2.0, 1, delta=1e-4) < self.epsilon(2.0, 1, delta=1e-6)

    @pytest.mark.parametrize("delta", [0.5, 0.1, 1e-5, 1e-14, 1e-18, 1e-30])
    @pytest.mark.parametrize(("multiplier", "releases"), [(2.0, 1), (20.0, 400), (1e6, 1)])
    def test_far_out_it_is_above_the_exact_figure_or_has_none(
        self, multiplier: float, releases: int, delta: float
    ) -> None:
        exact = gdp_epsilon(compose(1 / multiplier, releases), delta)
        try:
            told, reason = self.epsilon(multiplier, releases, delta), ""
        except NoFigureError as error:
            told, reason = math.nan, str(error)
        if math.isnan(told):
            assert self.name in ("prv", "pld")
            assert re.search("its grid would|its numerics end before delta", reason)
        else:
            assert 0.999 * exact <= told <= 3 * exact + 0.2

    def test_nothing_sent_costs_nothing(self) -> None:
        assert self.epsilon(1.0, 0) == 0
        assert self.accountant.epsilon(NoPrivacy(), releases=0, delta=DELTA) == 0

    def test_no_noise_costs_everything(self) -> None:
        assert self.accountant.epsilon(NoPrivacy(), releases=1, delta=DELTA) == math.inf

    def test_bad_arguments_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="at least 0, got -1"):
            self.epsilon(1.0, -1)
        for delta in (0.0, 1.0, float("nan")):
            with pytest.raises(ConfigError, match="delta lies between 0 and 1"):
                self.epsilon(1.0, 1, delta=delta)


class TestGdp(AccountantContract):
    name, lowest, highest = "gdp", 1.0, 1.0


class TestRdp(AccountantContract):
    name, lowest, highest = "rdp", 1.0, 1.1


class TestPrv(AccountantContract):
    name, lowest, highest = "prv", 0.999, 1.01


class TestPld(AccountantContract):
    name, lowest, highest = "pld", 0.999, 1.01


def test_every_accountant_of_the_table_is_tested() -> None:
    assert {case.name for case in AccountantContract.__subclasses__()} == set(ACCOUNTANTS)


def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "dp_accounting", None)
    with pytest.raises(ConfigError, match=r"needs dp_accounting.*secure-apfed\[experiments\]"):
        ACCOUNTANTS["pld"].epsilon(GaussianRelease(noise_multiplier=1.0), releases=1, delta=DELTA)


@pytest.mark.parametrize("multiplier", [0, -1, float("inf"), float("nan")])
def test_a_noise_multiplier_is_positive(multiplier: float) -> None:
    with pytest.raises(ConfigError, match="a noise multiplier is positive"):
        GaussianRelease(noise_multiplier=multiplier)


@pytest.mark.parametrize(
    ("epsilon", "releases", "needed"),
    [
        (1, 1, "3.73"), (1, 50, "26.4"), (1, 100, "37.3"),
        (2, 1, "1.99"), (2, 50, "14.1"), (2, 100, "19.9"),
        (8, 1, "0.6"), (8, 50, "4.24"), (8, 100, "6"),
    ],
)  # fmt: skip
def test_calibration_gives_the_known_noise(epsilon: float, releases: int, needed: str) -> None:
    sigma = calibrate_sigma(epsilon, DELTA, releases, clip=3.0)
    assert f"{sigma / (2 * 3.0):.3g}" == needed


@pytest.mark.parametrize("epsilon", [1e-3, 0.1, 1, 8, 100, 1e4])
@pytest.mark.parametrize("delta", [0.1, 1e-5, 1e-12])
@pytest.mark.parametrize("releases", [1, 7, 5000])
def test_calibrated_noise_stays_within_its_budget(
    epsilon: float, delta: float, releases: int
) -> None:
    mechanism = GaussianRelease(
        noise_multiplier=calibrate_sigma(epsilon, delta, releases, clip=0.5)
    )
    spent = ACCOUNTANTS["gdp"].epsilon(mechanism, releases=releases, delta=delta)
    assert epsilon * (1 - 1e-5) < spent <= epsilon


@pytest.mark.parametrize("mu", [0.05, 0.3, 1, 3, 6])
@pytest.mark.parametrize("epsilon", [0, 0.1, 1, 5])
def test_delta_is_the_formula_of_the_paper(mu: float, epsilon: float) -> None:
    formula = norm.cdf(-epsilon / mu + mu / 2) - math.exp(epsilon) * norm.cdf(
        -epsilon / mu - mu / 2
    )
    assert gdp_delta(epsilon, mu) == pytest.approx(formula, rel=1e-8, abs=1e-14)


@pytest.mark.parametrize("mu", [1e-4, 0.01, 1, 30, 1e3, 1e6])
@pytest.mark.parametrize("delta", [0.3, 1e-5, 1e-15])
def test_epsilon_inverts_delta_on_the_safe_side(mu: float, delta: float) -> None:
    epsilon = gdp_epsilon(mu, delta)
    reached = gdp_delta(epsilon, mu)
    assert reached <= delta
    if epsilon > 0:
        assert gdp_mu(epsilon, delta) == pytest.approx(mu, rel=1e-6)


def test_no_release_and_an_infinite_mu_have_their_limits() -> None:
    assert gdp_epsilon(0.0, DELTA) == 0
    assert gdp_delta(1.0, 0.0) == 0
    assert gdp_epsilon(math.inf, DELTA) == math.inf


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: calibrate_sigma(1, DELTA, 0, 1), "at least 1 planned release, got 0"),
        (lambda: calibrate_sigma(1, DELTA, 1, 0), "a clip bound is positive, got 0"),
        (lambda: calibrate_sigma(0, DELTA, 1, 1), "a target epsilon is positive and finite, got 0"),
        (lambda: calibrate_sigma(1, 0, 1, 1), "delta lies between 0 and 1, both excluded, got 0"),
        (lambda: compose(1, -1), "at least 0, got -1"),
        (lambda: gdp_epsilon(-1, DELTA), "mu is at least 0, got -1"),
        (lambda: gdp_delta(-1, 1), "epsilon and mu are at least 0, got -1 and 1"),
    ],
)
def test_bad_numbers_are_refused(call, message: str) -> None:  # type: ignore[no-untyped-def]  # any of the functions above
    with pytest.raises(ConfigError, match=message):
        call()


def test_the_example_runs() -> None:
    assert doctest.testmod(accountants).failed == 0

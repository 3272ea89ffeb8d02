"""The audit of a release path: bounds, guards under their claims, planted bugs caught."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm

from apfed_experiments.audit.bounds import bound_epsilon_by_scores, collect_evidence
from apfed_experiments.audit.release import (
    Audit,
    ReleaseFunction,
    audit_release,
    bound_epsilon_by_guesses,
    bound_mu_by_guesses,
    bound_mu_of_independent_rows,
)
from apfed_protocols.errors import LocalProtocolError
from secure_apfed.privacy.accountants import calibrate_sigma, gdp_epsilon
from secure_apfed.privacy.guard import GaussianGuard, NoGuard
from secure_apfed.privacy.ledger import PrivacyLedger
from secure_apfed.privacy.noise import draw_standard_normals

DELTA = 1e-5
CLIP = 1.0
KEY = bytes(range(32))
CLAIMS = [(1.0, 1), (4.0, 50), (8.0, 1)]
LEVEL = 0.05


def guard_for(epsilon: float, releases: int) -> GaussianGuard:
    sigma = calibrate_sigma(epsilon, DELTA, releases, CLIP)
    return GaussianGuard(clip=CLIP, sigma=sigma, key=KEY)


def release_with(guard: GaussianGuard) -> ReleaseFunction:
    return lambda h_BD, step, rows: guard.release(h_BD, step=step, rows=rows)


def audit(release: ReleaseFunction, releases: int) -> Audit:
    return audit_release(release, release_count=releases, delta=DELTA, seed=7)


BUGS: dict[str, Callable[[GaussianGuard], ReleaseFunction]] = {
    "too little noise": lambda guard: release_with(
        GaussianGuard(clip=CLIP, sigma=guard.sigma * 2 / 3, key=KEY)
    ),
    "clipped at the batch's maximum": lambda guard: release_with(
        GaussianGuard(clip=1e3, sigma=guard.sigma, key=KEY)
    ),
    "every row twice": lambda guard: (
        lambda h_BD, step, rows: torch.cat(
            [guard.release(h_BD, step=2 * step + again, rows=rows) for again in (0, 1)]
        )
    ),
}


@pytest.mark.parametrize(("epsilon", "releases"), CLAIMS)
def test_the_guard_stays_under_what_the_ledger_says(epsilon: float, releases: int) -> None:
    guard = guard_for(epsilon, releases)
    ledger = PrivacyLedger(guard.mechanism(), delta=DELTA, budget=epsilon, rows=10_000, log=None)

    def release(h_BD: torch.Tensor, step: int, rows: torch.Tensor) -> torch.Tensor:
        z_BD = guard.release(h_BD, step=step, rows=rows)
        ledger.charge(step=step, rows=rows, digest=z_BD.numpy().tobytes()[:64])
        return z_BD

    found = audit(release, releases)
    assert not found.contradicts(ledger.get_privacy_spent().epsilon_x)
    # The attack is a real one: it reads most of what the claim allows.
    assert found.epsilon_rows > 0.55 * epsilon


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(bug: str) -> None:
    missed = [
        (epsilon, releases)
        for epsilon, releases in CLAIMS
        if not audit(BUGS[bug](guard_for(epsilon, releases)), releases).contradicts(epsilon)
    ]
    assert missed == []


def test_the_same_bytes_again_tell_no_more() -> None:
    """What the ledger does not charge for: 50 times the release of step 0, at the price of one."""
    release = release_with(guard_for(4.0, 1))
    assert not audit(lambda h_BD, step, rows: release(h_BD, 0, rows), 50).contradicts(4.0)


def test_no_guard_gives_everything_away_and_pure_noise_nothing() -> None:
    found = audit(lambda h, step, rows: NoGuard().release(h, step=step, rows=rows), 1)
    assert (found.right, found.all_right) == (1000, 10_000)
    assert found.contradicts(8.0)
    found = audit(
        lambda h, step, rows: torch.from_numpy(draw_standard_normals(KEY, shape=h.shape)), 1
    )
    assert not found.contradicts(0.2)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("bound", "mu"),
    [
        (lambda v, _: gdp_epsilon(bound_mu_by_guesses(2000, 400, v, level=0.05), DELTA), 0.3),
        (lambda v, _: gdp_epsilon(bound_mu_by_guesses(2000, 400, v, level=0.05), DELTA), 1.0),
        (lambda v, _: bound_epsilon_by_guesses(2000, 400, v, delta=DELTA, level=0.05), 1.0),
        (lambda _, v: gdp_epsilon(bound_mu_of_independent_rows(2000, v, level=0.05), DELTA), 0.3),
    ],
)
def test_each_bound_holds_as_often_as_it_says(
    bound: Callable[[int, int], float], mu: float
) -> None:
    rng = np.random.default_rng(3)
    holds = []
    for _ in range(60):
        bits = rng.integers(0, 2, 2000) * 2 - 1
        scores = bits * mu / 2 + rng.standard_normal(2000)
        right = np.sign(scores) == bits
        surest = np.argsort(-np.abs(scores))[:400]
        holds.append(bound(int(right[surest].sum()), int(right.sum())) <= gdp_epsilon(mu, DELTA))
    # Binomial(60, 0.95) falls below 51 with a probability of 0.4 %.
    assert sum(holds) >= 51


def test_the_known_calibration_is_met() -> None:
    """At mu = 1, epsilon 4.38: about 2.05 from 1,000 of 10,000 canaries, and about 4.0."""
    expected = int(10_000 * norm.cdf(0.5))
    assert gdp_epsilon(1.0, DELTA) == pytest.approx(4.38, abs=0.01)
    found = bound_epsilon_by_guesses(10_000, 1000, 904, delta=DELTA, level=0.05)
    assert found == pytest.approx(2.05, abs=0.02)
    rows = gdp_epsilon(bound_mu_of_independent_rows(10_000, expected, level=0.05), DELTA)
    assert rows == pytest.approx(4.1, abs=0.1)


def test_more_right_guesses_contradict_more() -> None:
    bounds = [
        bound_mu_by_guesses(10_000, 1000, right, level=0.05) for right in (500, 550, 700, 950)
    ]
    assert bounds == sorted(bounds)
    assert bounds[0] == bound_mu_of_independent_rows(1000, 0, level=0.05) == 0
    assert bound_epsilon_by_guesses(10_000, 1000, 0, delta=DELTA, level=0.05) == 0


@pytest.mark.parametrize(("guesses", "releases"), [(0, 1), (10_001, 1), (10, 0)])
def test_numbers_out_of_range_are_refused(guesses: int, releases: int) -> None:
    with pytest.raises(LocalProtocolError, match=f"got {guesses} guesses and {releases} releases"):
        audit_release(
            lambda h, step, rows: h,
            release_count=releases,
            delta=DELTA,
            seed=0,
            guess_count=guesses,
        )


def test_a_release_of_another_shape_is_refused() -> None:
    with pytest.raises(
        LocalProtocolError, match=r"10000 released rows of 8 .* got shape \(9999, 8\)"
    ):
        audit(lambda h, step, rows: h[1:], 1)


# The bound from two worlds: holds as often as it says, and sees what is there.
# Binomial(200, 0.95) falls below 180 with a probability of 0.2 %, Binomial(300, 0.05) exceeds 27.


@pytest.mark.parametrize("mu", [0.0, 1.5, 4.0])
def test_the_bound_is_below_the_truth_as_often_as_it_says(mu: float) -> None:
    rng = np.random.default_rng(1)
    bounds = [
        collect_evidence(
            rng.standard_normal(300), mu + rng.standard_normal(300), level=LEVEL
        ).mu_low
        for _ in range(200)
    ]
    assert sum(bound <= mu for bound in bounds) >= 180
    assert np.median(bounds) > (0.6 * mu if mu > 1 else -1)


def test_choosing_the_threshold_costs_no_soundness() -> None:
    """Scores of pure chance: the threshold that looks best proves nothing on fresh ones."""
    draws = np.random.default_rng(2).standard_normal((300, 2, 60))
    assert sum(collect_evidence(*scores, level=LEVEL).mu_low > 0 for scores in draws) <= 27


@pytest.mark.parametrize(("epsilon", "side"), [(0.0, -1), (1.0, 1), (3.0, -1)])
def test_the_bound_on_epsilon_holds_as_often_as_it_says(epsilon: float, side: int) -> None:
    """Randomised response of one bit, read from either side."""
    rng = np.random.default_rng(4)
    keep = 1 / (1 + np.exp(-epsilon))
    bounds = []
    for _ in range(200):
        worlds = [side * (rng.random(300) < share) for share in (1 - keep, keep)]
        bounds.append(bound_epsilon_by_scores(*worlds[::side], delta=0.0, level=LEVEL))
    assert sum(bound <= epsilon for bound in bounds) >= 180
    assert np.median(bounds) > (0.6 * epsilon if epsilon else -1)


def test_a_rare_certainty_proves_no_more_than_delta_allows() -> None:
    rng = np.random.default_rng(5)
    caught = (rng.random(6000) < 0.02).astype(np.float64)
    assert bound_epsilon_by_scores(np.zeros(6000), caught, delta=0.0, level=LEVEL) > 1
    assert bound_epsilon_by_scores(np.zeros(6000), caught, delta=0.03, level=LEVEL) == 0


def test_worlds_that_never_meet_prove_much_and_equal_ones_nothing() -> None:
    low = np.zeros(600)
    high = np.ones(600)
    found = collect_evidence(low, high, level=LEVEL)
    assert (found.hits, found.alarms, found.tested) == (400, 0, 400)
    assert found.mu_low > 4
    assert found.bound_epsilon(1e-5) == gdp_epsilon(found.mu_low, 1e-5)
    assert collect_evidence(low, low, level=LEVEL).mu_low == 0
    assert collect_evidence(high, low, level=LEVEL).mu_low == 0


@pytest.mark.parametrize(
    ("scores_0", "scores_1", "level"),
    [
        pytest.param(np.zeros(59), np.zeros(59), 0.05, id="too few"),
        pytest.param(np.zeros(100), np.zeros(99), 0.05, id="another number"),
        pytest.param(np.zeros(100), np.zeros(100), 0.0, id="level 0"),
        pytest.param(np.zeros(100), np.full(100, np.nan), 0.05, id="nan"),
        pytest.param(np.full(100, np.inf), np.zeros(100), 0.05, id="infinite"),
    ],
)
def test_scores_that_prove_nothing_are_refused(scores_0: Any, scores_1: Any, level: float) -> None:
    with pytest.raises(LocalProtocolError, match="expected"):
        collect_evidence(scores_0, scores_1, level=level)

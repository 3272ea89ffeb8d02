"""The bound from two worlds: holds as often as it says, and sees what is there."""

import numpy as np
import pytest

from apfed_experiments.audit.bounds import epsilon_from, evidence_from
from apfed_protocols.errors import LocalProtocolError
from secure_apfed.privacy.accountants import gdp_epsilon

LEVEL = 0.05


# Binomial(200, 0.95) falls below 180 with a probability of 0.2 %, Binomial(300, 0.05) exceeds 27.


@pytest.mark.parametrize("mu", [0.0, 1.5, 4.0])
def test_the_bound_is_below_the_truth_as_often_as_it_says(mu: float) -> None:
    rng = np.random.default_rng(1)
    bounds = [
        evidence_from(rng.standard_normal(300), mu + rng.standard_normal(300), level=LEVEL).mu_low
        for _ in range(200)
    ]
    assert sum(bound <= mu for bound in bounds) >= 180
    assert np.median(bounds) > (0.6 * mu if mu > 1 else -1)


def test_choosing_the_threshold_costs_no_soundness() -> None:
    """Scores of pure chance: the threshold that looks best proves nothing on fresh ones."""
    draws = np.random.default_rng(2).standard_normal((300, 2, 60))
    assert sum(evidence_from(*scores, level=LEVEL).mu_low > 0 for scores in draws) <= 27


@pytest.mark.parametrize(("epsilon", "side"), [(0.0, -1), (1.0, 1), (3.0, -1)])
def test_the_bound_on_epsilon_holds_as_often_as_it_says(epsilon: float, side: int) -> None:
    """Randomised response of one bit, read from either side."""
    rng = np.random.default_rng(4)
    keep = 1 / (1 + np.exp(-epsilon))
    bounds = []
    for _ in range(200):
        worlds = [side * (rng.random(300) < share) for share in (1 - keep, keep)]
        bounds.append(epsilon_from(*worlds[::side], delta=0.0, level=LEVEL))
    assert sum(bound <= epsilon for bound in bounds) >= 180
    assert np.median(bounds) > (0.6 * epsilon if epsilon else -1)


def test_a_rare_certainty_proves_no_more_than_delta_allows() -> None:
    rng = np.random.default_rng(5)
    caught = (rng.random(6000) < 0.02).astype(np.float64)
    assert epsilon_from(np.zeros(6000), caught, delta=0.0, level=LEVEL) > 1
    assert epsilon_from(np.zeros(6000), caught, delta=0.03, level=LEVEL) == 0


def test_worlds_that_never_meet_prove_much_and_equal_ones_nothing() -> None:
    low, high = np.zeros(600), np.ones(600)
    found = evidence_from(low, high, level=LEVEL)
    assert (found.hits, found.alarms, found.tested) == (400, 0, 400)
    assert found.mu_low > 4
    assert found.epsilon_low(1e-5) == gdp_epsilon(found.mu_low, 1e-5)
    assert evidence_from(low, low, level=LEVEL).mu_low == 0
    assert evidence_from(high, low, level=LEVEL).mu_low == 0


def test_scores_that_prove_nothing_are_refused() -> None:
    zeros = np.zeros(100)
    for scores_0, scores_1, level in (
        (zeros[:59], zeros[:59], 0.05), (zeros, zeros[:99], 0.05), (zeros, zeros, 0.0),
        (zeros, np.full(100, np.nan), 0.05), (np.full(100, np.inf), zeros, 0.05),
    ):  # fmt: skip
        with pytest.raises(LocalProtocolError, match="expected"):
            evidence_from(scores_0, scores_1, level=level)

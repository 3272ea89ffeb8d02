"""Whole training: releases and updates of one record in one account and under one budget."""

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from secure_apfed.config import Config
from secure_apfed.errors import ConfigError
from secure_apfed.privacy.accountants import (
    GaussianRelease,
    Mechanism,
    NoPrivacy,
    gdp_epsilon,
    gdp_mu,
)
from secure_apfed.privacy.dp_sgd import WholeTraining, calibrate_updates
from secure_apfed.privacy.guard import GaussianGuard, NoGuard
from secure_apfed.privacy.ledger import BudgetExhaustedError, PrivacyLedger, PrivacySpent

DELTA = 1e-5
KEY = bytes(range(32))


def training(
    released: Mechanism, updated: Mechanism, *, budget: float | None = None
) -> tuple[WholeTraining, PrivacyLedger, PrivacyLedger]:
    releases, updates = (
        PrivacyLedger(one, delta=DELTA, budget=None, rows=5, log=None)
        for one in (released, updated)
    )
    whole = WholeTraining(releases=releases, updates=updates, delta=DELTA, budget=budget)
    return whole, releases, updates


def charge(ledger: PrivacyLedger, step: int, *rows: int) -> None:
    ledger.charge(step=step, rows=torch.tensor(rows, dtype=torch.int64), digest=b"z")


def test_the_formula_of_the_docs() -> None:
    """T = 50, sigma_h = 40 at C = 1, sigma = 30 at C_theta = 0.5."""
    whole, releases, updates = training(
        GaussianRelease(noise_multiplier=40 / 2), GaussianRelease(noise_multiplier=30 / 1)
    )
    for step in range(50):
        charge(releases, step, 0, 1)
        charge(updates, step, 0, 1, 2)
    mu = math.sqrt(50 * (2 / 40) ** 2 + 50 * (1 / 30) ** 2)
    assert whole.mu == pytest.approx(mu)
    assert whole.epsilon_model == pytest.approx(gdp_epsilon(mu, DELTA))
    assert whole.epsilon_y == pytest.approx(gdp_epsilon(math.sqrt(50) / 30, DELTA))
    spent = whole.account(releases.spent())
    assert (spent.epsilon_x, spent.releases) == (releases.spent().epsilon_x, 50)
    assert (spent.epsilon_y, spent.epsilon_model) == (whole.epsilon_y, whole.epsilon_model)
    assert spent.epsilon_x < spent.epsilon_model
    assert spent.trace[:3] == releases.spent().trace
    assert "updates: 50 of one record at most" in spent.trace[3]


def test_without_noise_on_releases_only_labels_are_covered() -> None:
    whole, releases, updates = training(NoPrivacy(), GaussianRelease(noise_multiplier=4.0))
    charge(releases, 0, 1)
    charge(updates, 0, 1)
    spent = whole.account(releases.spent())
    assert (spent.epsilon_x, spent.epsilon_model) == (math.inf, math.inf)
    assert spent.epsilon_y == gdp_epsilon(0.25, DELTA)


def test_nothing_sent_leaves_the_updates_alone() -> None:
    whole, _, updates = training(NoPrivacy(), GaussianRelease(noise_multiplier=4.0))
    charge(updates, 0, 1)
    spent = whole.account(PrivacySpent.nothing(delta=DELTA))
    assert spent.epsilon_x == 0
    # The finished model has read the label, whatever was sent.
    assert spent.epsilon_y == spent.epsilon_model == gdp_epsilon(0.25, DELTA)


@pytest.mark.parametrize("releases", [0, 1, 6])
def test_a_calibrated_training_ends_at_its_budget_and_not_before(releases: int) -> None:
    release = GaussianRelease(noise_multiplier=8.0)
    multiplier = calibrate_updates(3.0, DELTA, release=release, releases=releases, updates=6)
    updated = GaussianRelease(noise_multiplier=multiplier / 2)
    whole, released, updates = training(release, updated, budget=3.0)
    for step in range(6):
        if step < releases:
            charge(released, step, 1)
        charge(updates, step, 1)
    assert whole.epsilon_model == pytest.approx(3.0, rel=1e-6)
    for ledger in (released, updates):
        with pytest.raises(BudgetExhaustedError, match=r"step 6 was not played.*budget .* is 3"):
            charge(ledger, 6, 1)
        charge(ledger, 7)  # nobody's rows cost nothing
        charge(updates, 5, 1)  # what happened already is free
    assert (released.spent().releases, updates.spent().releases) == (releases, 6)


def test_the_release_stops_before_it_is_sent_and_not_after() -> None:
    """The updates of an epoch come after its releases, so a budget may be spent in between."""
    release = updated = GaussianRelease(noise_multiplier=4.0)
    whole, releases, updates = training(
        release, updated, budget=gdp_epsilon(math.sqrt(2.5) / 4, DELTA)
    )
    charge(releases, 0, 1)
    charge(updates, 0, 1)
    with pytest.raises(BudgetExhaustedError):
        charge(releases, 1, 1)
    charge(releases, 1, 2)
    assert whole.mu == pytest.approx(math.sqrt(2) / 4)


def test_updates_alone_take_the_whole_budget_and_what_cannot_be_calibrated_is_said() -> None:
    noisy = GaussianRelease(noise_multiplier=0.1)
    for release, releases, updates, message in (
        (noisy, 5, 5, "5 releases of a row alone cost epsilon"),
        (NoPrivacy(), 1, 5, "alone cost epsilon inf"),
        (NoPrivacy(), 0, 0, "at least 1 planned update, got 0"),
        (NoPrivacy(), -1, 1, "and -1 releases"),
    ):
        with pytest.raises(ConfigError, match=message):
            calibrate_updates(1.0, DELTA, release=release, releases=releases, updates=updates)
    multiplier = calibrate_updates(1.0, DELTA, release=NoPrivacy(), releases=0, updates=50)
    # The tabulated sigma/(2C) of epsilon 1 and T = 50, twice, since Opacus counts sigma / C.
    assert multiplier == pytest.approx(2 * 26.4, rel=2e-3)
    assert multiplier == pytest.approx(2 * math.sqrt(50) / gdp_mu(1.0, DELTA))


def test_statements_say_what_is_covered_and_what_noise_from_the_seed_is_worth() -> None:
    updated = GaussianRelease(noise_multiplier=4.0)
    whole, releases, updates = training(NoPrivacy(), updated)
    seeded = WholeTraining(
        releases=releases, updates=updates, delta=DELTA, budget=None, seeded=True
    )
    guard = GaussianGuard(clip=1.0, sigma=3.0, key=KEY)
    for by, said in (
        (guard, "(epsilon_model, delta)-DP for one record"),
        (guard, "what all passives receive and the finished model together"),
        (NoGuard(), "labels alone"),
        (NoGuard(), "no guarantee for features"),
        (None, "nothing is sent"),
    ):
        text = whole.statement(by)
        for part in (said, "encoding of features", "losses and checkpoints stay with the active"):
            assert part in text
        assert "does not know the run's seed" not in text
        assert "does not know the run's seed" in seeded.statement(by)


def test_what_the_proof_does_not_cover_is_refused_and_what_it_does_is_not() -> None:
    settings: dict[str, Any] = {
        "name": "test", "method": "apfed_c", "data": {"dataset": "digits"},
        "guard": {"mechanism": "gaussian", "sigma": 1.0}, "dp_sgd": {"noise_multiplier": 1.0},
    }  # fmt: skip
    Config.model_validate(settings)
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"method": "tvfl"}, "dp_sgd: method tvfl gives the passives more"),
        ({"train": {"precision": "bfloat16"}}, "dp_sgd: gradients of single examples in bfloat16"),
        (
            {"guard": {"mechanism": "none"}, "dp_sgd": {"epsilon": 4.0}},
            "dp_sgd.epsilon cannot be kept where representations are sent without noise",
        ),
    )
    for changes, said in refused:
        with pytest.raises(ValidationError, match=said):
            Config.model_validate(settings | changes)
    # Nothing is sent, or labels alone are promised, or a defence acts on what passives answer.
    allowed: tuple[dict[str, Any], ...] = (
        {"method": "single_view", "dp_sgd": {"epsilon": 4.0}},
        {"method": "apfed_r"},
        {"defences": [{"kind": "compression"}]},
    )
    for more in allowed:
        assert Config.model_validate(settings | {"guard": {"mechanism": "none"}} | more).dp_sgd

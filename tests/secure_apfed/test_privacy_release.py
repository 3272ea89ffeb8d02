"""Privacy of somebody else's loop: kinds, noise, account, threads and forks, refusals."""

import copy
import os
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import norm

from apfed_protocols import MaskedSum, StepBinding, SumAgreement, converse
from apfed_protocols.errors import LocalProtocolError, UnsafeChoiceWarning
from secure_apfed import PrivateContributions, PrivateLabels, PrivateRelease
from secure_apfed.errors import ConfigError, DataError, ModelError
from secure_apfed.privacy import BudgetExhaustedError
from secure_apfed.privacy.accountants import GaussianRelease
from secure_apfed.privacy.contributions import SummedRelease
from secure_apfed.privacy.ledger import PrivacyLedger, cross_check
from tests.contracts.hostile import run_in_fork
from tests.secure_apfed.test_privacy_guards import scale_fits, within

N = 512
BUDGET: dict[str, Any] = {"epsilon": 8, "delta": 1e-5, "epochs": 3, "rows": N}
SUMMED: dict[str, Any] = {"numbers": 6, "moved": 1, "honest": 3}
quiet = pytest.mark.filterwarnings("ignore:PrivateRelease.disable_noise")


def make_release(**changed: Any) -> PrivateRelease:
    return PrivateRelease(**{"clip": 1, **BUDGET, **changed})


@pytest.mark.parametrize("shape", [(4, 6), (4,), (4, 2, 3, 3), (0, 6)], ids=str)
@quiet
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_kind_and_shape_are_kept_and_the_gradient_is_of_the_clip(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    guard = make_release()
    h = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    noisy = h.clone().requires_grad_()
    clipped = h.clone().requires_grad_()
    z = guard(noisy, rows=range(len(h)))
    with guard.disable_noise():
        c = guard(clipped)
    assert (z.shape, z.dtype, c.dtype) == (h.shape, dtype, dtype)
    [(each * h.cos()).sum().backward() for each in (z, c)]
    assert torch.equal(noisy.grad, clipped.grad)  # type: ignore[arg-type]  # both are there
    assert not len(h) or not torch.equal(z, c)
    if dtype != torch.bfloat16:
        array = make_release()(h.numpy(), rows=slice(len(h)))
        assert (type(array), array.dtype) == (np.ndarray, h.numpy().dtype)


@quiet
def test_noise_is_as_large_as_said_and_the_budget_is_used_up_to_the_end() -> None:
    guard = make_release()
    h = 5 * torch.randn(N, 8, dtype=torch.float64)
    with guard.disable_noise():
        clipped = guard(h)
        assert torch.equal(guard(h / 1e3), h / 1e3)
    assert within(clipped, 1.0)
    noise = torch.stack([guard(h, rows=np.arange(N, dtype=np.uint16)) for _ in range(3)]) - clipped
    assert [scale_fits(noise.numpy(), k * guard.sigma) for k in (1, 2 / 3, 1.5)] == [1, 0, 0]
    assert (noise.reshape(3, -1).corrcoef() - torch.eye(3)).abs().max() < 0.1
    assert guard.get_privacy_spent().epsilon_x == pytest.approx(8, rel=1e-8)
    figures = cross_check(GaussianRelease(noise_multiplier=guard.sigma / 2), releases=3, delta=1e-5)
    assert figures.get("pld", 8) == pytest.approx(8, rel=3e-3)
    with torch.no_grad(), pytest.raises(BudgetExhaustedError, match="release 4 of one row"):
        guard(h[:2], rows=[0, 1])
    assert guard.get_privacy_spent().releases == 3


def test_off_is_of_one_guard_in_one_thread_counts_nothing_and_says_so() -> None:
    guard, h, elsewhere = make_release(), 5 * torch.ones(2, 4), list[torch.Tensor]()
    with ExitStack() as evaluation:
        with pytest.warns(UnsafeChoiceWarning, match="whoever receives these reads them"):
            evaluation.enter_context(guard.disable_noise())
        assert guard(h).tolist() == [pytest.approx([0.5] * 4)] * 2
        assert make_release()(h, rows=[0, 1]).std() > 0.1
        thread = threading.Thread(target=lambda: elsewhere.append(guard(h, rows=[0, 1])))
        thread.start()
        thread.join()
    assert elsewhere[0].std() > 0.1
    assert guard.get_privacy_spent().releases == 1
    report = guard.report()
    assert report.startswith("no guarantee for the 2 rows that went through disable_noise(), ")
    assert "nothing was released yet" in make_release(epochs=40).report()


def test_threads_take_turns_and_copies_and_forks_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guard, charge, steps = make_release(epochs=40), PrivacyLedger.charge, list[int]()

    def slowly(ledger: PrivacyLedger, *, step: int, **charged: Any) -> None:
        charge(ledger, step=step, **charged)
        time.sleep(1e-3)
        steps.append(step)

    monkeypatch.setattr(PrivacyLedger, "charge", slowly)
    with ThreadPoolExecutor(4) as pool:
        sent = [*pool.map(lambda _: guard(torch.zeros(3, 9), rows=[0, 1, 2]), range(40))]
    assert (guard.get_privacy_spent().releases, steps) == (40, list(range(40)))
    assert len({z.numpy().tobytes() for z in sent}) == 40
    labels = PrivateLabels(epsilon=1, classes=2)
    for spread in (pickle.dumps, copy.deepcopy):  # a layer's copies: test_privacy_layer.py
        with pytest.raises(LocalProtocolError, match="never serialised"):
            spread(labels)
    if hasattr(os, "fork"):
        summed = PrivateContributions(**BUDGET, **SUMMED)
        said = run_in_fork(
            {
                "release": lambda: guard(torch.zeros(1, 9), rows=[5]),
                "spent": guard.get_privacy_spent,
                "draw": lambda: summed.draw_noise((1, 6), rows=[5]),
                "labels": lambda: labels([0]),
            }
        )
        assert all("belongs to the process that made it" in text for text in said.values()), said


def test_a_compiled_step_draws_noise_each_time() -> None:
    guard, h = make_release(), torch.zeros(2, 9)
    step = torch.compile(lambda h: guard(2 * h, rows=[0, 1]), backend="eager")
    assert not torch.equal(step(h), step(h))
    assert guard.get_privacy_spent().releases == 2


def test_what_cannot_be_released_is_refused_and_costs_nothing() -> None:
    guard = make_release()
    h = torch.zeros(2, 3)
    for values, rows, message in (
        (h, None, "say with rows= which of the 512 rows these are"),
        (h, [1], "h holds 2 rows and rows= names 1"),
        (h, [0.0, 1.0], "got float64"),
        (h, torch.tensor([1.0, 2.0]).bfloat16(), "got float64"),
        (h, np.array([True, False]), "got bool.*mask.nonzero"),
        (h, {1, 2}, "got object"),
        (h, [7, True], "got bool"),
        (h, [-1, 7], r"lie in 0\.\.511, got -1\.\.7"),
        (h, np.array([200, 201], np.uint8), "rows of uint8 go up to 255 and the table to 511"),
        (h, torch.tensor([1, 2], dtype=torch.int8), "rows of int8 go up to 127"),
        (h, [2**70, 1], "got object"),
        (h, [[0, 1]], r"of shape \(1, 2\)"),
        (h, [], "names 0"),
        (h, "01", "got <U2"),
        (h, slice("a"), "no slice of positions"),
        (h, pd.Series([0, 1], index=["x", "y"]), "its rows have labels"),
        (h, [0, N], r"lie in 0\.\.511, got 0\.\.512"),
        (h, slice(-1, None), "h holds 2 rows and rows= names 1"),
        (h.int(), [0, 1], "array of floats.*got torch.int32"),
        (h.tolist(), [0, 1], "got list"),
        (torch.tensor(1.0), [0], r"got torch.float32 of shape torch.Size\(\[\]\)"),
        (h / 0, [0, 1], "row 0 of the representations is not finite"),
        (h + torch.inf, [0, 1], "row 0 of the representations is not finite"),
        (h.to(torch.complex64), [0, 1], "array of floats.*got torch.complex64"),
        (pd.DataFrame(h.numpy()), [0, 1], "array of floats"),
    ):
        with pytest.raises((LocalProtocolError, ModelError), match=message):
            guard(values, rows=rows)
    assert guard.get_privacy_spent().releases == 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"epochs": 8.0}, "epochs is a whole number from 1 on, got 8.0"),
        ({"rows": 0}, "rows is a whole number from 1 on, got 0"),
        ({"clip": "1"}, "clip is a number, got '1'"),
        ({"clip": 0}, "clip bound is positive"),
        ({"epsilon": float("inf")}, "positive and finite"),
    ],
)
def test_settings_out_of_range_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_release(**changed)


def test_contributions_have_the_noise_of_all_in_their_sum_and_an_account_each() -> None:
    private = {name: PrivateContributions(**BUDGET, **SUMMED) for name in "pqr"}
    (steps,) = {one.noise for one in private.values()}
    mixing = PrivateContributions(**BUDGET, **{**SUMMED, "moved": 4})
    assert mixing.noise == pytest.approx(2 * steps, rel=1e-3)
    parties: dict[str, Any] = {"receiver": "a", "aggregator": "g", "contributors": ("p", "q", "r")}
    summed = MaskedSum(SumAgreement(session="s", clip_norm=2.0, noise=steps, **parties))
    roles: dict[str, Any] = {name: summed.make_contributor(name) for name in private}
    roles |= {"a": summed.make_receiver(), "g": summed.make_aggregator()}
    converse(roles)
    bound = StepBinding.from_contents("s", 0, rows=b"", message=b"")
    g = np.full((N, 6), 0.25)
    sent = {
        name: roles[name].contribute(g, bound, one.draw_noise(g.shape, rows=slice(None)))
        for name, one in private.items()
    }
    noise = roles["a"].decode(roles["g"].combine(sent), (N, 6), bound) - 3 * g
    sigma = 3**0.5 * steps * 2.0 / (2**15 - 1)
    assert [scale_fits(noise, k * sigma) for k in (1, 2 / 3, 1.5)] == [1, 0, 0]
    one = private["p"]
    [one.draw_noise((6,), rows=torch.arange(9)) for _ in range(2)]
    assert (one.get_privacy_spent().releases, one.get_privacy_spent().epsilon_x <= 8) == (3, True)
    assert "contribution guarantee" in one.report()
    with pytest.raises(BudgetExhaustedError):
        one.draw_noise((1, 6), rows=[0])


@pytest.mark.parametrize(("shape", "moved"), [((2, 7), 1), ((5,), 1), ((3, 6), 2)])
def test_noise_is_drawn_for_rows_of_the_account_alone(shape: tuple[int, ...], moved: int) -> None:
    with pytest.raises(LocalProtocolError, match="the account is of rows of 6 numbers"):
        PrivateContributions(**BUDGET, **{**SUMMED, "moved": moved}).draw_noise(shape, rows=[0])


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_row_that_occurs_twice_is_released_twice(times: int) -> None:
    """The published bound of T Gaussian releases together (Dong et al. 2022), solved anew here."""
    guard = make_release()
    z = guard(torch.zeros(times, 64), rows=[9] * times)
    assert len({row.numpy().tobytes() for row in z}) == times
    mu = np.sqrt(times) * 2 / guard.sigma

    def delta(epsilon: float) -> float:
        tail = norm.cdf(-epsilon / mu + mu / 2), norm.cdf(-epsilon / mu - mu / 2)
        return float(tail[0] - np.exp(epsilon) * tail[1])

    epsilon = brentq(lambda epsilon: delta(epsilon) - 1e-5, 1e-6, 30)
    spent = guard.get_privacy_spent()
    assert spent.releases == times
    assert spent.epsilon_x == pytest.approx(epsilon, rel=1e-6)
    with pytest.raises(BudgetExhaustedError, match="release 4 of one row"):
        guard(torch.zeros(4 - times, 64), rows=[9] * (4 - times))
    assert guard.get_privacy_spent().releases == times


def test_batches_drawn_with_replacement_run_until_the_budget_of_one_row_is_spent() -> None:
    guard = make_release(epochs=8)
    drawn = np.random.default_rng(0)
    counts = np.zeros(N, int)
    for _ in range(24):
        rows = drawn.integers(0, N, 32)
        guard(torch.zeros(32, 3), rows=rows)
        np.add.at(counts, rows, 1)
    assert guard.get_privacy_spent().releases == counts.max()


PEOPLE: dict[str, Any] = {
    "a row each": ((3, 6), {"rows": [4, 5, 6]}, 1, 1),
    "one person in two rows": ((3, 6), {"rows": [4, 5, 4]}, 1, 2),
    "one row of three people": ((6,), {"rows": [4, 5, 6]}, 1, 1),
    "one row, a person named twice": ((6,), {"rows": [4, 4]}, 1, 1),
    "one row of a matrix, of three people": ((1, 6), {"people": [4, 5, 6]}, 1, 1),
    "a loss that mixes three rows": ((3, 6), {"rows": [4, 5, 4]}, 3, 1),
    "a matrix of weights, moved by nine": ((3, 6), {"people": range(9)}, 3, 1),
    "no rows, of nobody": ((0, 6), {"rows": []}, 1, 0),
}


@pytest.mark.parametrize("case", PEOPLE)
def test_contributions_are_charged_to_everybody_who_stands_in_them(case: str) -> None:
    shape, who, moved, releases = PEOPLE[case]
    private = PrivateContributions(**BUDGET, **{**SUMMED, "moved": moved})
    assert private.draw_noise(shape, **who).shape == shape
    spent = private.get_privacy_spent()
    assert spent.releases == releases
    if releases:
        one = SummedRelease(
            deviation=private.noise,
            honest=3,
            numbers=moved * 6,
            sensitivity=np.sqrt(moved) * (2 * (2**15 - 1) * (1 + 1e-9) + np.sqrt(6)),
        )
        assert spent.epsilon_x == pytest.approx(one.epsilon_of(releases, 1e-5), rel=1e-9)


MISNAMED: dict[str, Any] = {
    "one of a hundred": ((100, 6), {"rows": [5]}, 1, "has 100 rows and rows= names 1"),
    "nobody of a hundred": ((100, 6), {"rows": []}, 1, "has 100 rows and rows= names 0"),
    "nobody in one row": ((6,), {"rows": []}, 1, "a contribution of 1 rows is of nobody"),
    "nobody moves it": ((3, 6), {"people": []}, 3, "a contribution of 3 rows is of nobody"),
    "somebody of no rows": ((0, 6), {"rows": [1]}, 1, "has 0 rows and rows= names 1"),
    "fewer than a mixed batch": ((3, 6), {"rows": [1]}, 3, "names 1; .* people="),
    "people of rows that are people": ((3, 6), {"people": [1]}, 1, "moved=1 says"),
    "both": ((1, 6), {"rows": [1], "people": [1]}, 1, "not both"),
    "neither": ((1, 6), {}, 1, "say with rows="),
    "negative": ((1, 6), {"rows": [-1]}, 1, r"lie in 0\.\.511"),
    "beyond": ((1, 6), {"rows": [N]}, 1, r"lie in 0\.\.511"),
    "bool": ((1, 6), {"rows": [True]}, 1, "got bool"),
    "float": ((1, 6), {"rows": [1.0]}, 1, "got float64"),
    "uint8": ((1, 6), {"people": np.array([1], np.uint8)}, 1, "rows of uint8 go up to 255"),
    "a slice of the table": ((2, 6), {"rows": slice(None)}, 1, "names 512"),
    "a shape of no sizes": ((1.0, 6), {"rows": [1]}, 1, "whole numbers from 0 on"),
    "a negative shape": ((-1, 6), {"rows": [1]}, 1, "whole numbers from 0 on"),
    "a number for a shape": (6, {"rows": [1]}, 1, "whole numbers from 0 on"),
}


@pytest.mark.parametrize("case", MISNAMED)
def test_contributions_of_others_than_those_named_are_refused_and_cost_nothing(case: str) -> None:
    shape, who, moved, message = MISNAMED[case]
    private = PrivateContributions(**BUDGET, **{**SUMMED, "moved": moved})
    with pytest.raises(LocalProtocolError, match=message):
        private.draw_noise(shape, **who)
    assert private.get_privacy_spent().releases == 0
    private.draw_noise((1, 6), rows=[0])
    assert private.get_privacy_spent().releases == 1


def test_labels_are_answered_once_in_their_own_kind() -> None:
    true = torch.arange(30_000, dtype=torch.int32).reshape(-1, 2) % 2
    for labels in (true, true.numpy(), true > 0, true[:, 0].tolist(), (0, 1)):
        private = PrivateLabels(epsilon=1.0, classes=2)
        answers: Any = private(labels)
        assert (type(answers), np.shape(answers)) == (type(labels), np.shape(labels))
        assert np.asarray(answers).dtype == np.asarray(labels).dtype
        with pytest.raises(LocalProtocolError, match="were answered"):
            private(labels)
        assert " labels answered; label DP, epsilon_y 1, delta 0" in private.report()
    kept = (PrivateLabels(epsilon=1.0, classes=2)(true) == true).double().mean()
    assert float(kept) == pytest.approx(np.e / (np.e + 1), abs=0.015)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([0.5], "got float64"),
        ("01", "in a str"),
        ([True], r"holds 0\.\.299, got bool"),
        (np.zeros(3, np.uint8), "got uint8"),
        ([0, 300], "row 1 has label 300"),
    ],
)
def test_what_are_no_labels_is_refused_and_uses_no_answer_up(wrong: Any, message: str) -> None:
    private = PrivateLabels(epsilon=1.0, classes=300)
    with pytest.raises((LocalProtocolError, DataError), match=message):
        private(wrong)
    assert len(private(np.zeros(0, int))) == 0
    assert len(private([299])) == 1  # what was refused, or empty, did not use the answer up

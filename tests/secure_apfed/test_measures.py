"""Measures against scikit-learn and against values known by hand; intervals, drift, thresholds."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import expit
from scipy.stats import norm
from sklearn import metrics
from sklearn.preprocessing import label_binarize

from secure_apfed.errors import DataError
from secure_apfed.learning.calibration import PlattLine, fit_slope, standardise_scores
from secure_apfed.measures.intervals import (
    MIN_ROWS,
    RESAMPLED_MEASURES,
    Resamples,
    _choose_block,
    _choose_resamples,
    _iter_draws,
    compute_influence,
    estimate_measures,
)
from secure_apfed.measures.table import (
    ACCURACY,
    MEASURES,
    Scored,
    best_threshold,
    calibration_curve,
    cheapest_threshold,
    compute_balanced_weights,
    find_measure,
    find_task,
    lift_table,
    list_measure_names,
    measure_all,
    normalise_scores,
    score_model,
)

PAGE = (Path(__file__).parents[2] / "docs/tasks-and-measures.md").read_text(encoding="utf-8")


def make_scored(rows: int, classes: int, *, seed: int = 0, strength: float = 1.0) -> Scored:
    rng = np.random.default_rng(seed)
    truth = np.arange(rows) % classes
    logits = rng.normal(size=(rows, classes))
    logits[np.arange(rows), truth] += strength
    return Scored.from_network_outputs(truth, logits)


def test_classes_are_measured_as_scikit_learn_does() -> None:
    one = make_scored(300, 2)
    y = one.truth
    p = one.scores[:, 1]
    assert measure_all(one) == pytest.approx(
        {
            "accuracy": metrics.accuracy_score(y, p > 0.5),
            "auc": metrics.roc_auc_score(y, p),
            "average_precision": metrics.average_precision_score(y, p),
            "ks": np.max(np.subtract(*metrics.roc_curve(y, p)[1::-1])),
            "gini": 2 * metrics.roc_auc_score(y, p) - 1,
            "balanced_accuracy": metrics.balanced_accuracy_score(y, p > 0.5),
            "f1": metrics.f1_score(y, p > 0.5),
            "brier": metrics.brier_score_loss(y, p),
            "log_loss": metrics.log_loss(y, p),
        }
    )
    one = make_scored(300, 4)
    y = one.truth
    p = one.scores
    table = label_binarize(one.truth, classes=range(4))
    found = measure_all(one)
    names = ("auc", "average_precision", "f1", "brier", "log_loss")
    assert {name: found[name] for name in names} == (
        pytest.approx(
            {
                "auc": metrics.roc_auc_score(y, p, multi_class="ovr"),
                "average_precision": metrics.average_precision_score(table, p),
                "f1": metrics.f1_score(y, p.argmax(1), average="macro"),
                "brier": ((p - table) ** 2).sum(1).mean(),
                "log_loss": metrics.log_loss(y, p),
            }
        )
    )
    shares = normalise_scores(np.array([[1.2, -0.2], [0.3, 0.1], [0.0, 0.0]]))
    assert shares == pytest.approx(np.array([[1, 0], [0.75, 0.25], [0.5, 0.5]]))
    three = make_scored(90, 3)  # a class without rows has no part in a mean
    kept = three.select_rows(np.flatnonzero(three.truth < 2))
    by_hand = [metrics.roc_auc_score(kept.truth == one, kept.scores[:, one]) for one in (0, 1)]
    assert MEASURES["auc"].compute_value(kept) == pytest.approx(np.mean(by_hand))


def test_regressions_and_ranks_are_measured_by_hand() -> None:
    one = Scored(truth=np.array([1.0, 2.0, 4.0]), scores=np.array([1.0, 3.0, 2.0]))
    by_hand = {"mae": 1.0, "rmse": math.sqrt(5 / 3), "r2": 1 - 5 / (14 / 3)}
    assert measure_all(one) == pytest.approx(by_hand)
    with pytest.raises(DataError, match=r"auc is of classification.*of regression; take one of r2"):
        MEASURES["auc"].compute_value(one)


@pytest.mark.parametrize(
    ("said", "ranks"), [([0.1, 0.2, 0.3, 0.4], [1, 1, 1]), ([0.4, 0.3, 0.2, 0.1], [0, -1, 0])]
)
def test_ranks_are_measured_by_hand(said: list[float], ranks: list[int]) -> None:
    found = measure_all(Scored.from_probabilities([0, 0, 1, 1], said))
    assert [found[name] for name in ("auc", "gini", "ks")] == ranks
    assert found["accuracy"] == 0.5  # nobody is above one half


def test_what_rows_do_not_define_is_left_out() -> None:
    one_class = Scored.from_probabilities([1, 1], [0.4, 0.9])
    assert set(list_measure_names("classification")) - set(measure_all(one_class)) == {
        "auc",
        "average_precision",
        "ks",
        "gini",
    }
    assert measure_all(Scored.from_probabilities(np.empty(0), np.empty((0, 3)))) == {}
    diverged = Scored.from_network_outputs([0, 1], [[math.nan, math.nan], [0.0, 1.0]])
    assert set(measure_all(diverged)) == {"accuracy", "balanced_accuracy", "f1"}
    assert calibration_curve(diverged) == ()


@pytest.mark.parametrize(
    ("labels", "shares", "said"),
    [
        ([0, 2], [0.1, 0.2], "labels lie in 0 to 1, got 0 to 2"),
        ([0, 1], [[0.5, 0.6], [0.5, 0.5]], "take the softmax"),
        ([0, 1], [1.5, 0.2], "take the softmax"),
        ([0, 1, 1], [0.1, 0.2], "3 rows of truth and 2 of scores"),
        ([0], [[[0.1]]], r"got \(1, 1, 1\)"),
    ],
)
def test_what_are_no_probabilities_is_refused(labels: Any, shares: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        Scored.from_probabilities(labels, shares)


def test_the_chosen_threshold_is_best_and_near_one_half() -> None:
    with pytest.raises(DataError, match="between two classes, and there are 3"):
        make_scored(6, 3).replace_threshold(0.5)
    one = Scored.from_probabilities([0, 1], [0.3, 0.4])
    assert (ACCURACY.compute_value(one), ACCURACY.compute_value(one.replace_threshold(0.35))) == (
        0.5,
        1,
    )
    truth = np.array([0] * 90 + [1] * 10)
    shares = np.concatenate([np.linspace(0.0, 0.2, 90), np.linspace(0.25, 0.4, 10)])
    rare = Scored.from_probabilities(truth, shares)
    threshold = best_threshold(rare, "f1")
    assert MEASURES["f1"].compute_value(rare) == 0
    assert MEASURES["f1"].compute_value(rare.replace_threshold(threshold)) == 1
    assert threshold == pytest.approx(0.225)
    clear = Scored.from_probabilities([0, 0, 1, 1], [0.1, 0.2, 0.8, 0.9])
    assert best_threshold(clear, "accuracy") == 0.5
    with pytest.raises(DataError, match="labels of 1"):
        best_threshold(Scored.from_probabilities([1, 1], [0.1, 0.2]), "f1")
    with pytest.raises(DataError, match="got 'auc'"):
        best_threshold(rare, "auc")


def test_weights_make_all_classes_count_alike() -> None:
    labels = torch.tensor([0] * 6 + [1] * 2 + [-1] * 5)
    weights = compute_balanced_weights(labels, 3)
    assert weights.tolist() == pytest.approx([8 / 12, 2.0, 0.0])
    assert float(weights[labels[:8]].mean()) == pytest.approx(1)
    with pytest.raises(DataError, match="no row has a label"):
        compute_balanced_weights(labels[8:], 3)


def test_intervals_hold_the_value_of_all_people() -> None:
    """Draw test rows 40 times: about 38 intervals hold it, and half the rows widen them."""
    truth = MEASURES["auc"].compute_value(make_scored(40_000, 2, seed=99))
    found = [estimate_measures(make_scored(300, 2, seed=seed))["auc"] for seed in range(40)]
    assert 33 <= sum(one.low <= truth <= one.high for one in found) <= 40
    few = estimate_measures(make_scored(75, 2))["auc"]
    assert 1.5 < (few.high - few.low) / (found[0].high - found[0].low) < 3
    assert estimate_measures(make_scored(75, 2))["auc"] == few
    assert math.isnan(estimate_measures(Scored.from_probabilities([1], [0.7]))["accuracy"].low)
    # KS is not raised by its maximum: of resamples alone about 55 of 100 held the value.
    truth = MEASURES["ks"].compute_value(make_scored(40_000, 2, seed=99, strength=0.1))
    found = [
        estimate_measures(make_scored(300, 2, seed=seed, strength=0.1))["ks"] for seed in range(40)
    ]
    assert sum(one.low <= truth <= one.high for one in found) >= 32
    assert all(0 <= one.low <= one.value <= one.high <= 1 for one in found)


@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_intervals_of_many_rows_are_those_of_few_resamples(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(4)
    truth = rng.normal(size=2000)
    numbers = Scored(truth=truth, scores=truth + rng.normal(size=2000))
    scored = make_scored(2000, 2) if kind == "classes" else numbers
    usual = estimate_measures(scored)
    monkeypatch.setattr("secure_apfed.measures.intervals._MANY_ROWS", 2000)
    many = estimate_measures(scored)
    for name, estimate in usual.items():
        width = estimate.high - estimate.low
        assert many[name].value == estimate.value
        assert many[name].low == pytest.approx(estimate.low, abs=0.25 * width), name
        assert many[name].high == pytest.approx(estimate.high, abs=0.25 * width), name
        assert (
            MEASURES[name].min_value
            <= many[name].low
            <= many[name].high
            <= MEASURES[name].max_value
        )


@pytest.mark.parametrize(
    ("rows", "resamples", "block"),
    [(1, 0, 50_000), (100, 500, 500), (50_000, 500, 8), (10**6, 100, 4), (10**8, 100, 1)],
)
def test_millions_of_rows_are_drawn_one_resample_at_a_time(
    rows: int, resamples: int, block: int
) -> None:
    assert _choose_resamples(rows, 500) == resamples
    assert _choose_block(rows) == block


@pytest.mark.slow
def test_measures_of_resamples_are_those_of_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    cases = {
        "tied": Scored.from_probabilities(np.arange(60) % 2, rng.integers(0, 4, 60) / 3),
        "threshold": make_scored(61, 2).replace_threshold(0.99),
        "ten": make_scored(200, 10),
        "absent": Scored.from_probabilities(np.arange(60) % 2, rng.dirichlet(np.ones(4), 60)),
        "numbers": Scored(truth=1e6 + rng.normal(size=50), scores=rng.normal(1e6, size=50)),
        "alike": Scored(truth=np.full(9, 2.0), scores=np.array([2.0, 3, 2] * 3)),
        "nearly alike": Scored(truth=np.array([0.3] * 4 + [0.7]), scores=np.arange(5) / 9),
    }
    assert set(RESAMPLED_MEASURES) == set(MEASURES)
    for case, rows in cases.items():
        counts_RB = np.concatenate([*_iter_draws(rows, 20, 0), np.ones((1, len(rows.truth)))])
        redrawn = Resamples(rows, counts_RB)
        places = np.arange(len(rows.truth))
        measured = [
            measure_all(rows.select_rows(np.repeat(places, counts_B)))
            for counts_B in counts_RB.astype(int)
        ]
        assert set(measured[-1]) == set(list_measure_names(find_task(rows)))
        for name in measured[-1]:
            found = [each[name] for each in measured]
            assert RESAMPLED_MEASURES[name](redrawn) == pytest.approx(found, rel=1e-8), (case, name)
    whole = estimate_measures(make_scored(50, 3))
    monkeypatch.setattr(
        "secure_apfed.measures.intervals._BLOCK_CELLS", 333
    )  # blocks of resamples are the same
    monkeypatch.setattr(
        "secure_apfed.measures.intervals._CACHED_CELLS", 0
    )  # and draws that are not kept
    blocks = estimate_measures(make_scored(50, 3))
    assert {name: one.low for name, one in blocks.items()} == pytest.approx(
        {name: whole[name].low for name in blocks}
    )
    assert {name: one.high for name, one in blocks.items()} == pytest.approx(
        {name: whole[name].high for name in blocks}
    )


def test_influence_is_what_a_row_that_is_left_out_was_worth() -> None:
    rng = np.random.default_rng(5)
    numbers = Scored(truth=rng.normal(size=90), scores=rng.normal(size=90))
    told = {"classes": make_scored(400, 3), "numbers": numbers}
    for said in told.values():
        rest = said.select_rows(np.arange(1, len(said.truth)))
        rows = len(said.truth) - 1
        for name, value in measure_all(said).items():
            found = compute_influence(said, MEASURES[name])
            assert found.shape == (rows + 1,)
            assert found[0] == pytest.approx(
                rows * (value - MEASURES[name].compute_value(rest)), abs=1e-6
            )
    hits = told["classes"].class_predictions == told["classes"].truth
    assert compute_influence(told["classes"], MEASURES["accuracy"]) == pytest.approx(
        hits - hits.mean()
    )


def test_intervals_of_few_rows_hold_what_all_people_have() -> None:
    """Resamples of 8 rows of a class held the AUC of all people in 62 to 80 of 100."""
    rng = np.random.default_rng(0)
    held = 0
    shift = 2.0
    truth = np.repeat([0, 1], [100, MIN_ROWS - 12])
    for _ in range(60):
        scores = rng.normal(size=len(truth)) + shift * truth
        found = estimate_measures(
            Scored.from_probabilities(truth, 1 / (1 + np.exp(-shift * scores))), resamples=100
        )
        assert found["auc"].low <= found["auc"].value <= found["auc"].high
        held += found["auc"].low <= norm.cdf(shift / 2**0.5) <= found["auc"].high
    assert held >= 55
    # Who tells all rows of few has no interval without a width; of enough it may be so.
    for rows, sure in ((MIN_ROWS - 1, False), (MIN_ROWS, True)):
        truth = np.repeat([0, 1], rows)
        found = estimate_measures(Scored.from_probabilities(truth, 0.1 + 0.8 * truth))
        assert all((found[name].low == 1.0) is sure for name in ("accuracy", "auc", "f1"))
        assert all(found[name].high == 1.0 for name in ("accuracy", "auc", "f1"))


def test_calibrated_scores_are_on_the_diagonal_and_others_are_not() -> None:
    rng = np.random.default_rng(1)
    predicted = rng.uniform(size=20_000)
    truth = (rng.uniform(size=20_000) < predicted).astype(int)
    curves = [
        calibration_curve(Scored.from_probabilities(truth, shares))
        for shares in (predicted, predicted**2)
    ]
    assert [sum(point.rows for point in points) for points in curves] == [20_000] * 2
    off = [max(abs(one.predicted - one.observed) for one in points) for points in curves]
    assert off[0] < 0.04 <= off[1]
    sure = Scored.from_probabilities([0, 1, 2, 2], np.full((4, 3), 1 / 3))
    (point,) = calibration_curve(sure)
    assert (point.observed, point.rows) == (0.25, 4)


def test_lift_and_ks_by_hand_and_a_threshold_by_cost() -> None:
    said = np.arange(20) / 20
    rows = Scored.from_probabilities(said > 0.87, said)  # the two highest
    first, second, *_, last = lift_table(rows)
    assert (first.rows, first.positives, first.captured, first.lift, first.ks) == (2, 2, 1, 10, 1)
    assert (second.positives, second.captured, second.lift) == (0, 1, 5)
    assert (last.captured, last.lift, last.ks) == (1, 1, 0)
    rng = np.random.default_rng(3)
    tied = Scored.from_probabilities(rng.integers(0, 2, 90), rng.integers(0, 4, 90) / 4)
    table = lift_table(tied)
    assert (len(table), sum(row.rows for row in table)) == (4, 90), "equal scores are not parted"
    assert max(row.ks for row in table) == pytest.approx(MEASURES["ks"].compute_value(tied))
    assert lift_table(Scored.from_probabilities([1, 1], [0.2, 0.3])) == ()
    with pytest.raises(DataError, match="of two classes, got 3"):
        lift_table(make_scored(30, 3))
    rare = Scored.from_probabilities([0, 0, 0, 1, 0, 1], [0.1, 0.2, 0.3, 0.35, 0.6, 0.9])
    assert cheapest_threshold(rare, 10) == pytest.approx(0.325)
    assert cheapest_threshold(rare, 0.1) == pytest.approx(0.75)


def test_probabilities_are_straightened_by_labels_that_models_had_not_seen() -> None:
    rng = np.random.default_rng(4)
    z = rng.normal(-4, 1.2, size=6000)  # log-odds, of which a model tells ten times less
    truth = (rng.uniform(size=6000) < expit(z)).astype(np.int64)
    known = standardise_scores(z, z)
    found = PlattLine.from_scores(z / 10, known, truth, known, positive_rate=float(truth.mean()))
    assert found.slope == pytest.approx(10, rel=0.15)
    straight = found.slope * z / 10 + found.offset
    assert expit(straight).mean() == pytest.approx(truth.mean(), abs=1e-6)
    again = PlattLine.from_scores(straight, known, truth, known, positive_rate=float(truth.mean()))
    assert (again.slope, again.offset) == pytest.approx((1, 0), abs=1e-5)
    # Two positives make nobody sure, and scores that say nothing keep their ranks.
    two = np.flatnonzero(truth)[:2]
    assert fit_slope(np.array([3.0, 3.0, *np.zeros(40)]), np.repeat([1, 0], [2, 40])) < 1.5
    against = np.where(np.isin(np.arange(6000), two), -9.0, 9.0)
    assert fit_slope(against[truth[:6000] >= 0], truth) > 0
    assert fit_slope(np.zeros(3), np.zeros(3, np.int64)) == pytest.approx(0.3), "none of a class"
    same = PlattLine.from_scores(
        np.ones(5), np.empty(0), truth[:0], np.zeros(5), positive_rate=0.02
    )
    assert expit(same.slope + same.offset) == pytest.approx(0.02)


def test_scores_of_a_table_are_asked_in_parts() -> None:
    table = torch.randn(9000, 3, generator=torch.Generator().manual_seed(0))
    labels = table.argmax(1)
    asked = []

    def predict(rows: torch.Tensor) -> torch.Tensor:
        asked.append(len(rows))
        return table[rows]

    rows = torch.arange(0, 9000, 2)
    assert ACCURACY.compute_value(score_model(predict, rows, labels)) == 1
    assert sum(asked) == 4500
    assert max(asked) < 4500
    assert math.isnan(ACCURACY.compute_value(score_model(predict, rows[:0], labels)))


def test_lower_is_better_where_it_is() -> None:
    loss = MEASURES["log_loss"]
    assert loss.compute_gain(0.4, 0.5) == pytest.approx(0.1)
    assert max([0.5, None, 0.4, math.nan], key=loss.rank_value) == 0.4
    assert loss.format_gain(0.4, 0.5) == "+0.100"
    assert ACCURACY.format_gain(0.9, 0.95) == "-5.0 points"
    with pytest.raises(ValueError, match="did you mean 'auc'"):
        find_measure("acu")


def test_the_page_names_all_and_its_code_runs() -> None:
    assert not [name for name in MEASURES if f"`{name}`" not in PAGE]
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "docs/tasks-and-measures.md", "exec"), {})

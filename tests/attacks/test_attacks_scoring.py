"""Figures of guesses beside the truth, as `SCALES` gives them, and whom a guess hurts."""

from typing import Any

import numpy as np
import pytest
from sklearn.metrics import r2_score, recall_score, roc_auc_score

from apfed_attacks.interface import Prediction
from apfed_attacks.labels.completion import named
from apfed_attacks.scoring import SCALES, explained

LABELS, FEATURES, MEMBERSHIP = (SCALES[name] for name in ("labels", "features", "membership"))


def test_figures_of_labels_equal_scikit_learns() -> None:
    draw = np.random.default_rng(0)
    scores, labels = draw.dirichlet(np.ones(4), 200), draw.integers(0, 4, 200)
    auc = roc_auc_score(labels, scores, multi_class="ovr", average="macro")
    assert LABELS.measure(scores, labels)["auc"] == pytest.approx(auc)
    # Over the classes that occur.
    labels, guessed = draw.integers(1, 4, 200), draw.integers(0, 5, 200)
    recall = recall_score(labels, guessed, labels=np.unique(labels), average="macro")
    assert LABELS.measure(np.eye(5)[guessed], labels)["balanced_accuracy"] == recall


def test_the_auc_leaves_out_classes_that_do_not_occur() -> None:
    scores = np.array([[0.9, 0.1, 0.0], [0.2, 0.8, 0.0]])
    assert LABELS.measure(scores, np.array([0, 1]))["auc"] == 1.0
    assert LABELS.measure(scores, np.array([1, 1]))["auc"] is None


def test_clusters_get_the_names_that_fit_the_truth_best() -> None:
    labels = np.array([0, 0, 1, 1, 2, 2])
    shuffled = Prediction(np.eye(3)[[2, 2, 0, 0, 1, 1]], clusters=True)
    assert (LABELS.values(shuffled, labels).argmax(1) == labels).all()


def test_clusters_get_names_by_their_sizes() -> None:
    labels = np.array([0] * 6 + [1] * 3 + [2])
    shuffled = np.eye(3)[np.array([1, 2, 0])[labels]]
    found = named("one", shuffled, (0.6, 0.3, 0.1))
    assert found["one named by the truth"].clusters
    assert (found["one named by priors"].values.argmax(1) == labels).all()
    assert list(named("one", shuffled, None)) == ["one named by the truth"]


def test_explained_equals_scikit_learn_weighted_by_variance() -> None:
    draw = np.random.default_rng(1)
    truth = draw.normal(size=(50, 4)) * np.array([1, 2, 3, 0])
    guess = truth + draw.normal(size=(50, 4)) * np.array([1, 1, 1, 0])
    expected = r2_score(truth, guess, multioutput="variance_weighted")
    assert explained(guess, truth) == pytest.approx(expected)
    assert explained(guess, np.ones((50, 4))) is None


def test_the_peak_ratio_is_in_decibels_of_the_range() -> None:
    truth = np.array([[0.0, 1.0], [0.5, 1.0]])
    assert FEATURES.measure(truth + 0.1, truth)["psnr"] == pytest.approx(20)
    assert FEATURES.measure(truth, truth)["psnr"] is None


def _similarity(guess: Any, truth: Any) -> Any:
    return FEATURES.measure(guess.reshape(len(truth), -1), truth).get("ssim")


def test_structural_similarity_is_one_of_equal_images_and_low_of_noise() -> None:
    draw = np.random.default_rng(0)
    images = draw.random((4, 1, 14, 28))
    assert _similarity(images, images) == pytest.approx(1)
    assert _similarity(draw.random(images.shape), images) < 0.2
    for shape in ((3, 5), (3, 1, 2, 8)):  # no images, and one smaller than a window
        truth = draw.random(shape)
        assert _similarity(truth, truth) is None


def test_structural_similarity_is_that_of_every_window() -> None:
    """Wang et al. 2004, Eq. (13), window by window; edges are reflected."""
    draw = np.random.default_rng(0)
    truth, guess = draw.random((2, 2, 2, 8, 9))
    c1, c2 = (0.01 * np.ptp(truth)) ** 2, (0.03 * np.ptp(truth)) ** 2
    edges = ((0, 0), (0, 0), (3, 3), (3, 3))
    found = []
    for x, y in zip(*(
        np.lib.stride_tricks.sliding_window_view(
            np.pad(images, edges, mode="reflect"), (7, 7), axis=(2, 3)
        ).reshape(-1, 49)
        for images in (truth, guess)
    ), strict=True):  # fmt: skip
        mean, other, both = x.mean(), y.mean(), ((x - x.mean()) * (y - y.mean())).mean()
        spread = x.var() + y.var()
        found.append(
            (2 * mean * other + c1) * (2 * both + c2)
            / ((mean**2 + other**2 + c1) * (spread + c2))
        )  # fmt: skip
    assert _similarity(guess, truth) == pytest.approx(np.mean(found))


def test_low_false_positive_rates_are_read_off_the_curve() -> None:
    trained = np.array([True, True, False, True, *[False] * 99])
    members, scores = np.stack([trained, trained], axis=1), -np.arange(103.0)
    curve = MEMBERSHIP.curve(scores, members)
    assert (curve[0], curve[-1]) == ((0.0, 0.0), (1.0, 1.0))
    figures = MEMBERSHIP.measure(scores, members)
    assert figures["tpr_at_0.1_percent_fpr"] == pytest.approx(2 / 3)
    assert figures["tpr_at_1_percent_fpr"] == 1  # one of a hundred


def test_the_surest_decile_is_what_the_attack_is_surest_of() -> None:
    labels_N = np.array([0, 1] * 50)
    scores_NK = np.zeros((100, 2))
    scores_NK[:10] = 9 * np.eye(2)[labels_N[:10]]  # right and sure on ten rows
    scores_NK[10:, 0] = 0.1  # says class 0 of all others
    assert LABELS.risk(scores_NK, labels_N) == {
        "recall of class 0": 1.0,
        "recall of class 1": pytest.approx(5 / 50),
        "precision on the surest decile": 1.0,
    }
    wrong = LABELS.risk(np.eye(2)[1 - labels_N] * 5, labels_N)
    assert wrong["precision on the surest decile"] == 0
    infinite = np.array([[np.inf, 0.0], [0.0, -np.inf]] * 5)
    assert LABELS.risk(infinite, np.zeros(10, dtype=np.int64))["recall of class 0"] == 1


def test_features_recovered_of_few_people_show_in_the_best_decile() -> None:
    truth_NF = np.random.default_rng(0).normal(size=(50, 3))
    guess_NF = np.tile(truth_NF.mean(axis=0), (50, 1))
    guess_NF[:5] = truth_NF[:5]
    assert FEATURES.risk(guess_NF, truth_NF)["r2 on the best decile"] == pytest.approx(1)
    assert FEATURES.risk(np.zeros((5, 2)), np.ones((5, 2))) == {}

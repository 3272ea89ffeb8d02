import numpy as np
import pytest
from sklearn.metrics import r2_score, recall_score, roc_auc_score

from apfed_attacks.labels.completion import named
from apfed_attacks.scoring import (
    explained,
    macro_auc,
    mean_recall,
    name_clusters_by_truth,
    peak_ratio,
    risk_of_features,
    risk_of_labels,
    structural_similarity,
)


def test_macro_auc_equals_scikit_learn_where_that_is_defined() -> None:
    draw = np.random.default_rng(0)
    scores = draw.dirichlet(np.ones(4), 200)
    labels = draw.integers(0, 4, 200)
    expected = roc_auc_score(labels, scores, multi_class="ovr", average="macro")
    assert macro_auc(scores, labels) == pytest.approx(expected)


def test_macro_auc_leaves_out_classes_that_do_not_occur() -> None:
    scores = np.array([[0.9, 0.1, 0.0], [0.2, 0.8, 0.0]])
    assert macro_auc(scores, np.array([0, 1])) == 1.0
    assert macro_auc(scores, np.array([1, 1])) is None


def test_clusters_get_the_names_that_fit_the_truth_best() -> None:
    labels = np.array([0, 0, 1, 1, 2, 2])
    shuffled = np.eye(3)[[2, 2, 0, 0, 1, 1]]
    assert (name_clusters_by_truth(shuffled, labels).argmax(1) == labels).all()


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


def test_peak_ratio_is_in_decibels_of_the_range() -> None:
    truth = np.array([[0.0, 1.0], [0.5, 1.0]])
    assert peak_ratio(truth + 0.1, truth) == pytest.approx(20)
    assert peak_ratio(truth, truth) is None


def test_structural_similarity_is_one_of_equal_images_and_low_of_noise() -> None:
    draw = np.random.default_rng(0)
    images = draw.random((4, 1, 14, 28))
    assert structural_similarity(images.reshape(4, -1), images) == pytest.approx(1)
    noise = structural_similarity(draw.random((4, 14 * 28)), images)
    assert noise is not None
    assert noise < 0.2


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
    assert structural_similarity(guess.reshape(2, -1), truth) == pytest.approx(np.mean(found))


@pytest.mark.parametrize("shape", [(3, 5), (3, 1, 2, 8), (0, 1, 9, 9)])
def test_structural_similarity_is_of_images_only(shape: tuple[int, ...]) -> None:
    truth = np.random.default_rng(0).random(shape)
    assert structural_similarity(truth.reshape(len(truth), int(np.prod(shape[1:]))), truth) is None


def test_mean_recall_is_scikit_learns_over_the_classes_that_occur() -> None:
    draw = np.random.default_rng(1)
    labels, guessed = draw.integers(1, 4, 200), draw.integers(0, 5, 200)
    expected = recall_score(labels, guessed, labels=np.unique(labels), average="macro")
    assert mean_recall(guessed, labels) == expected


def test_an_attack_that_is_sure_of_a_few_shows_in_the_surest_decile() -> None:
    labels_N = np.array([0, 1] * 50)
    scores_NK = np.zeros((100, 2))
    scores_NK[:10] = 9 * np.eye(2)[labels_N[:10]]  # right and sure on ten rows
    scores_NK[10:, 0] = 0.1  # says class 0 of all others
    risk = risk_of_labels(scores_NK, labels_N)
    assert risk == {
        "recall of class 0": 1.0,
        "recall of class 1": pytest.approx(5 / 50),
        "precision on the surest decile": 1.0,
    }


def test_a_sure_and_wrong_attack_has_a_low_precision() -> None:
    labels_N = np.zeros(20, dtype=np.int64)
    labels_N[10:] = 1
    scores_NK = np.eye(2)[1 - labels_N] * 5
    assert risk_of_labels(scores_NK, labels_N)["precision on the surest decile"] == 0


def test_infinite_scores_are_taken() -> None:
    scores_NK = np.array([[np.inf, 0.0], [0.0, -np.inf]] * 5)
    risk = risk_of_labels(scores_NK, np.zeros(10, dtype=np.int64))
    assert risk["recall of class 0"] == 1


def test_features_recovered_of_few_people_show_in_the_best_decile() -> None:
    truth_NF = np.random.default_rng(0).normal(size=(50, 3))
    guess_NF = np.tile(truth_NF.mean(axis=0), (50, 1))
    guess_NF[:5] = truth_NF[:5]
    assert risk_of_features(guess_NF, truth_NF)["r2 on the best decile"] == pytest.approx(1)
    assert risk_of_features(np.zeros((5, 2)), np.ones((5, 2))) == {}

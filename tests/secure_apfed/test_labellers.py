"""Labellers: short rows of votes, linear where they say so, moved by nobody they deny."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from secure_apfed.data import load_data
from secure_apfed.errors import ConfigError, DataError
from secure_apfed.labellers import (
    LABELLERS,
    Labeller,
    LinearLabeller,
    PrivateLogistic,
    Ridge,
    Spreading,
    hard,
    make_labeller,
)
from secure_apfed.labellers.kinds import minimiser, with_constant
from secure_apfed.settings.data import DataSettings

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
CLASSES = 4
NAMES = sorted(LABELLERS)


def make(name: str) -> Labeller:
    if name == PrivateLogistic.name:
        # Weak noise, for what votes look like; what it protects is another test's.
        return PrivateLogistic(epsilon=1e4, delta=1e-5, key=bytes(32), strength=0.01)
    return make_labeller(name)


def people(rows: int = 90, *, seed: int = 0) -> tuple[Floats, Integers, Integers]:
    """Features in four clouds, positions of 12 labelled rows and their classes."""
    rng = np.random.default_rng(seed)
    classes = rng.integers(0, CLASSES, rows)
    centres = 3 * rng.standard_normal((CLASSES, 5))
    labelled = rng.permutation(rows)[:12]
    return centres[classes] + rng.standard_normal((rows, 5)), labelled, classes[labelled]


def awkward() -> dict[str, tuple[Floats, Integers, Integers]]:
    """Features and labels that come up, and that a formula may not survive."""
    x, labelled, labels = people()
    constant_column = x.copy()
    constant_column[:, 2] = 7.0
    far = np.concatenate([x, 1e6 + x[:30]])
    return {
        "clouds": (x, labelled, labels),
        "duplicates": (np.repeat(x[:6], 20, axis=0), np.arange(0, 24, 2), labels),
        "a constant column": (constant_column, labelled, labels),
        "nothing but constants": (np.full((40, 3), 2.5), np.arange(12), labels),
        "zeros": (np.zeros((40, 3)), np.arange(12), labels),
        "one class": (x, labelled, np.full(12, 3)),
        "one label": (x, labelled[:1], labels[:1]),
        "every row labelled": (x[:12], np.arange(12), labels),
        "one row": (x[:1], np.array([0]), labels[:1]),
        "two rows": (x[:2], np.array([1]), labels[:1]),
        "an island": (far, labelled, labels),
        "large": (1e12 * x, labelled, labels),
        "small": (1e-12 * x, labelled, labels),
        "one column": (x[:, :1], labelled, labels),
        "more columns than rows": (np.tile(x, (1, 60)), labelled, labels),
    }


each = pytest.mark.parametrize("name", NAMES)
without_noise = pytest.mark.parametrize(
    "name", [name for name in NAMES if name != PrivateLogistic.name]
)


@each
def test_rows_of_votes_are_short_and_those_of_linear_ones_a_matrix_times_labels(name: str) -> None:
    labeller = make(name)
    assert isinstance(labeller, LinearLabeller) is LABELLERS[name].linear
    for case, (x, labelled, labels) in awkward().items():
        votes = labeller.label(x, labelled, labels, CLASSES)
        assert votes.shape == (len(x), CLASSES), case
        assert votes.dtype == np.float64, case
        assert np.isfinite(votes).all(), case
        assert np.abs(votes).sum(axis=1).max() <= 1 + 1e-12, case
        assert labeller.signed or votes.min() >= 0, case
        if isinstance(labeller, LinearLabeller):
            matrix = labeller.matrix(x, labelled)
            length = np.abs(matrix).sum(axis=1)
            assert matrix.shape == (len(x), len(labelled)), case
            assert ((np.abs(length - 1) < 1e-12) | (length == 0)).all(), case
            summed = matrix @ np.eye(CLASSES)[labels]
            np.testing.assert_allclose(votes, summed, rtol=0, atol=1e-15, err_msg=case)


@each
def test_who_has_no_label_moves_others_only_where_it_is_said(name: str) -> None:
    x, labelled, labels = people()
    person = int(np.setdiff1d(np.arange(len(x)), labelled)[0])
    moved = x.copy()
    moved[person] = x[labelled[0]] + 0.01
    labeller = make(name)

    def shares(of: np.ndarray) -> np.ndarray:
        """By labelled row where there is a matrix: these people's classes lie far apart."""
        if isinstance(labeller, LinearLabeller):
            return labeller.matrix(of, labelled)
        return labeller.label(of, labelled, labels, CLASSES)

    before, after = shares(x), shares(moved)
    others = np.arange(len(x)) != person
    assert (before[person] != after[person]).any()
    assert bool((before[others] == after[others]).all()) == labeller.inductive


@without_noise
def test_a_common_scale_and_shift_do_nothing(name: str) -> None:
    x, labelled, labels = people()
    labeller = make(name)
    votes = labeller.label(x, labelled, labels, CLASSES)
    again = labeller.label(x * 2**20 + 3, labelled, labels, CLASSES)
    np.testing.assert_allclose(votes, again, rtol=0, atol=1e-4)


@each
def test_tensors_and_arrays_are_alike_and_nothing_is_drawn(name: str) -> None:
    x, labelled, labels = people()
    votes = make(name).label(x, labelled, labels, CLASSES)
    torch.manual_seed(1)
    again = make(name).label(torch.from_numpy(x), labelled, labels, CLASSES)
    assert (votes == again).all()


@each
def test_clouds_are_told_apart(name: str) -> None:
    x, labelled, labels = people(400, seed=3)
    rng = np.random.default_rng(3)
    truth = rng.integers(0, CLASSES, 400)
    votes = make(name).label(x, labelled, labels, CLASSES)
    assert (votes.argmax(axis=1) == truth).mean() > 0.8


def test_the_private_one_reads_nothing_but_directions() -> None:
    x, labelled, labels = people()
    rng = np.random.default_rng(0)
    lengths = 2.0 ** rng.integers(-9, 9, (len(x), 1))
    settings: dict[str, Any] = {"epsilon": 8.0, "delta": 1e-5, "key": bytes(32)}
    votes = PrivateLogistic(**settings).label(x, labelled, labels, CLASSES)
    again = PrivateLogistic(**settings).label(x * lengths, labelled, labels, CLASSES)
    assert (votes == again).all()
    directions = PrivateLogistic(**settings).directions(x)
    np.testing.assert_allclose(np.linalg.norm(directions, axis=1), 1, rtol=1e-12)


@without_noise
def test_strips_of_digits_are_labelled_from_fifty(name: str) -> None:
    """Chance is 0.10; the second strip of four tells more than the first."""
    data = load_data(DataSettings(dataset="digits"), seed=0)
    assert data.active.labels is not None
    rows = data.train_rows
    labels = data.active.labels[rows].numpy()
    place = {person: at for at, person in enumerate(data.passives[0].ids)}
    own = data.passives[0].features[[place[data.active.ids[row]] for row in rows.tolist()]]
    labelled = np.random.default_rng(0).permutation(len(labels))[:50]
    rest = np.setdiff1d(np.arange(len(labels)), labelled)
    for features, least in ((data.active.features[rows], 0.38), (own, 0.52)):
        flat = features.flatten(1).double()
        votes = make(name).label(flat, labelled, labels[labelled], 10)
        assert (votes.argmax(axis=1) == labels)[rest].mean() > least


def test_who_has_no_path_to_a_label_has_no_vote() -> None:
    x, labelled, labels = awkward()["an island"]
    votes = Spreading().label(x, labelled, labels, CLASSES)
    assert not votes[90:].any()
    assert votes[:90].any(axis=1).mean() > 0.5


def test_spreading_is_the_inverse_of_the_paper() -> None:
    x, labelled, _ = people()
    spreading = Spreading(neighbours=4)
    graph = spreading._normalised_graph(x).toarray()
    np.testing.assert_array_equal(graph, graph.T)
    assert ((graph > 0).sum(axis=1) >= 4).all()
    exact = np.linalg.inv(np.eye(len(x)) - 0.2 * graph)[:, labelled]
    exact /= np.where(exact.sum(axis=1) > 1e-30, exact.sum(axis=1), np.inf)[:, None]
    np.testing.assert_allclose(spreading.matrix(x, labelled), exact, rtol=0, atol=1e-6)


def test_a_long_way_from_a_label_is_as_exact_as_a_short_one() -> None:
    """On a line of 100 people, labels at both ends: who is nearer to one takes its class."""
    line = np.arange(100, dtype=np.float64)[:, None]
    votes = Spreading(neighbours=2).label(line, np.array([0, 99]), np.array([0, 1]), 2)
    np.testing.assert_allclose(votes.sum(axis=1), 1, atol=1e-12)
    assert (votes.argmax(axis=1) == (np.arange(100) >= 50)).all()


def test_ridge_is_least_squares_with_the_weights_of_the_normal_equations() -> None:
    x, labelled, labels = people()
    ridge = Ridge()
    known = x[labelled]
    size = np.sqrt(((known - known.mean(0)) ** 2).sum(1).mean())
    phi = ridge._expand((x - known.mean(0)) / size)
    near = phi[labelled]
    target = np.eye(CLASSES)[labels]
    weights = np.linalg.solve(near.T @ near + 0.1 * np.eye(phi.shape[1]), near.T @ target)
    votes = ridge.label(x, labelled, labels, CLASSES)
    ratio = (phi @ weights) / votes
    np.testing.assert_allclose(ratio, ratio[:, :1] * np.ones(CLASSES), rtol=1e-6)
    assert (ratio > 0).all()


@pytest.mark.parametrize("strength", [1e-3, 10.0])
def test_the_minimiser_is_as_near_as_it_says(strength: float) -> None:
    x, labelled, labels = people()
    rows = with_constant(x[labelled], 1.0)

    def gradient(theta: Floats) -> Floats:
        logits = rows @ theta
        share = np.exp(logits - logits.max(axis=1, keepdims=True))
        share /= share.sum(axis=1, keepdims=True)
        residual = share - np.eye(CLASSES)[labels]
        return np.asarray(rows.T @ residual / len(rows) + strength * theta)

    rough = minimiser(rows, labels, CLASSES, strength=strength, tolerance=1e-3)
    fine = minimiser(rows, labels, CLASSES, strength=strength, tolerance=1e-9)
    assert np.linalg.norm(gradient(rough)) <= 1e-3 * (1 + 1e-9)
    assert np.linalg.norm(gradient(fine)) <= 1e-9 * (1 + 1e-3)
    assert np.linalg.norm(rough - fine) <= (1e-3 + 1e-9) / strength


def test_hard_votes_take_the_lowest_of_several_and_leave_no_vote_alone() -> None:
    votes = np.array([[0.2, 0.5, 0.3], [0.4, 0.2, 0.4], [0, 0, 0], [-0.5, -0.1, -0.4]])
    expected = [[0, 1, 0], [1, 0, 0], [0, 0, 0], [0, 1, 0]]
    np.testing.assert_array_equal(hard(votes), expected)


BAD: dict[str, dict[str, Any]] = {
    "not finite": {"features_UF": np.full((90, 5), np.nan)},
    "flat": {"features_UF": np.zeros(90)},
    "no columns": {"features_UF": np.zeros((90, 0))},
    "outside": {"labelled_n": np.arange(80, 92)},
    "negative": {"labelled_n": np.arange(-1, 11)},
    "twice": {"labelled_n": np.zeros(12, dtype=np.int64)},
    "nobody": {"labelled_n": np.zeros(0, dtype=np.int64), "labels_n": np.zeros(0, dtype=np.int64)},
    "no int64": {"labels_n": np.zeros(12)},
    "too few": {"labels_n": np.zeros(11, dtype=np.int64)},
    "no class": {"labels_n": np.full(12, CLASSES)},
    "one class only": {"labels_n": np.zeros(12, dtype=np.int64), "classes": 1},
}


@each
def test_what_is_unfit_is_refused(name: str) -> None:
    x, labelled, labels = people()
    fit: dict[str, Any] = {"features_UF": x, "labelled_n": labelled, "labels_n": labels}
    for bad in BAD.values():
        with pytest.raises(DataError, match=r"features|positions|labels"):
            make(name).label(**(fit | {"classes": CLASSES} | bad))


@each
def test_each_says_whom_a_row_moves(name: str) -> None:
    labeller = make(name)
    assert labeller.name == name
    assert ("own vote and no other" in labeller.statement()) == labeller.inductive


def test_noise_is_asked_for_where_it_is_added_and_nowhere_else() -> None:
    made = make_labeller("private_logistic", epsilon=2.0, key=bytes(32))
    assert isinstance(made, PrivateLogistic)
    assert made.epsilon == 2.0
    for name, given in (
        ("private_logistic", {"epsilon": 2.0}),
        ("private_logistic", {"key": bytes(32)}),
        ("ridge", {"epsilon": 2.0}),
        ("forest", {}),
    ):
        settings: dict[str, Any] = given
        with pytest.raises(ConfigError, match=r"labeller"):
            make_labeller(name, **settings)
    with pytest.raises(ConfigError, match="1 neighbour or more, got 0"):
        Spreading(neighbours=0)

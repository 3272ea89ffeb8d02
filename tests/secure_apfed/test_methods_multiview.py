"""Multi-view learning: each closed form against a solver that knows nothing of it."""

import numpy as np
import pytest
from scipy.optimize import minimize

from secure_apfed.errors import ModelError
from secure_apfed.methods.averaging import LinearViews
from secure_apfed.methods.multiview import (
    Floats,
    Pull,
    ViewModel,
    averaged,
    common_labels,
    iterate,
    joint_scores,
    objective,
    own_labels,
    row_norms,
    start,
    view_objective,
    weights_of,
)

ROWS, CLASSES = 40, 3


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def labels(rng: np.random.Generator, *, told: int = ROWS, own: bool = False) -> Pull:
    truth_NC = np.eye(CLASSES)[rng.integers(0, CLASSES, ROWS)]
    told_N1 = (np.arange(ROWS) < told).astype(float)[:, None]
    return Pull(truth_NC * told_N1, 5.0 * told_N1, own)


def views(rng: np.random.Generator, *, beta: float = 0.7) -> list[ViewModel]:
    return [
        ViewModel.begin(rng.standard_normal((ROWS, width)), CLASSES, rng, beta=beta, zeta=zeta)
        for width, zeta in ((5, 2.0), (8, 0.5), (3, 4.0))
    ]


def proximal(x_NF: Floats, z_NC: Floats, beta: float) -> Floats:
    """Minimise Eq. (5) by accelerated proximal gradients (Beck and Teboulle 2009)."""
    rate = 1 / (2 * np.linalg.norm(x_NF, 2) ** 2)
    now = ahead = np.zeros((x_NF.shape[1], z_NC.shape[1]))
    momentum = 1.0
    for _ in range(6_000):
        stepped = ahead - rate * 2 * x_NF.T @ (x_NF @ ahead - z_NC)
        norms = np.linalg.norm(stepped, axis=1, keepdims=True)
        shrunk = stepped * np.maximum(0, 1 - rate * beta / np.maximum(norms, 1e-300))
        after = (1 + np.sqrt(1 + 4 * momentum**2)) / 2
        ahead, now, momentum = shrunk + (momentum - 1) / after * (shrunk - now), shrunk, after
    return now


@pytest.mark.parametrize("beta", [0.0, 0.3, 30.0])
def test_the_weights_minimise_their_objective(rng: np.random.Generator, beta: float) -> None:
    x_NF, z_NC = rng.standard_normal((ROWS, 6)), rng.standard_normal((ROWS, CLASSES))
    found = weights_of(x_NF, z_NC, beta, rng.standard_normal((6, CLASSES)))
    other = proximal(x_NF, z_NC, beta)

    ours, theirs = (view_objective(x_NF, w, z_NC, beta) for w in (found, other))
    assert ours == pytest.approx(theirs, rel=1e-8)
    if beta == 30.0:  # some features count for nothing there
        assert (row_norms(other) == 0).any()
        np.testing.assert_allclose(row_norms(found)[row_norms(other) == 0], 0, atol=1e-4)


def test_no_round_raises_the_objective_of_the_weights(rng: np.random.Generator) -> None:
    x_NF, z_NC = rng.standard_normal((ROWS, 6)), rng.standard_normal((ROWS, CLASSES))
    weights = rng.standard_normal((6, CLASSES))
    values = [view_objective(x_NF, weights, z_NC, 5.0)]
    for _ in range(30):
        weights = weights_of(x_NF, z_NC, 5.0, weights, most_rounds=1)
        values.append(view_objective(x_NF, weights, z_NC, 5.0))
    assert np.diff(values).max() <= 1e-12 * values[0]
    assert values[-1] < values[1]


def test_weights_of_linearly_dependent_columns_need_a_beta(rng: np.random.Generator) -> None:
    x_NF = np.zeros((ROWS, 2))
    with pytest.raises(ModelError, match="beta above 0"):
        weights_of(x_NF, rng.standard_normal((ROWS, CLASSES)), 0.0, np.ones((2, CLASSES)))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("size", "beta"), [(1e200, 1.0), (1.0, 1e308)])
def test_numbers_that_overflow_are_named(
    rng: np.random.Generator, size: float, beta: float
) -> None:
    x_NF, z_NC = np.full((ROWS, 2), size), rng.standard_normal((ROWS, CLASSES))
    with pytest.raises(ModelError, match="too large to learn from; rescale"):
        weights_of(x_NF, z_NC, beta, np.zeros((2, CLASSES)))


def minimiser(parts: list[tuple[float | Floats, Floats]]) -> Floats:
    """Of the sum of weight |z - target|^2 over these (weight, target), by a general solver."""

    def loss(flat: Floats) -> tuple[float, Floats]:
        apart = [(weight, flat.reshape(ROWS, CLASSES) - target) for weight, target in parts]
        value = sum(float((weight * part**2).sum()) for weight, part in apart)
        return value, np.sum([2 * weight * part for weight, part in apart], axis=0).ravel()

    found = minimize(loss, np.zeros(ROWS * CLASSES), jac=True, method="BFGS", tol=1e-10)
    return np.asarray(found.x.reshape(ROWS, CLASSES))


@pytest.mark.parametrize("drawn", [True, False])
def test_labels_minimise_their_objective(rng: np.random.Generator, drawn: bool) -> None:
    scores, common = rng.standard_normal((2, ROWS, CLASSES))
    of_views, zetas = rng.standard_normal((3, ROWS, CLASSES)), np.array([2.0, 0.5, 4.0])
    pull = labels(rng, told=30) if drawn else None
    more: list[tuple[float | Floats, Floats]] = [(pull.eta_N1, pull.truth_NC)] if pull else []
    own = own_labels(scores, common, 2.5, pull)
    np.testing.assert_allclose(own, minimiser([(1.0, scores), (2.5, common), *more]), atol=1e-8)
    of_all = common_labels(np.tensordot(zetas, of_views, 1), zetas.sum(), pull)
    parts = [*zip(zetas.tolist(), of_views, strict=True), *more]
    np.testing.assert_allclose(of_all, minimiser(parts), atol=1e-8)


@pytest.mark.parametrize("own", [True, False])
def test_iterations_never_raise_the_objective(rng: np.random.Generator, own: bool) -> None:
    held, pull = views(rng), labels(rng, told=25, own=own)
    common = start(ROWS, CLASSES, rng)
    values = []
    for _ in range(25):
        common = iterate(held, common, pull)
        values.append(objective(held, common, pull))
    assert np.diff(values).max() <= 1e-9 * values[0]
    assert values[-1] < 0.9 * values[0]


def test_labels_reach_every_view(rng: np.random.Generator) -> None:
    """Each view predicts as if it had been told the labels, which draw the common ones alone."""
    pull = labels(rng)
    truth = pull.truth_NC.argmax(1)
    centres = rng.standard_normal((CLASSES, 4)) * 4
    held = [
        ViewModel.begin(
            centres[truth] + rng.standard_normal((ROWS, 4)), CLASSES, rng, beta=0.1, zeta=5.0
        )
        for _ in range(2)
    ]
    common = start(ROWS, CLASSES, rng)
    for _ in range(40):
        common = iterate(held, common, pull)
    rows = np.arange(ROWS)
    for view in held:
        told = view.x_NF @ weights_of(view.x_NF, pull.truth_NC, 0.1, view.weights_FC)
        assert (view.scores(rows).argmax(1) == told.argmax(1)).mean() > 0.9


def test_the_test_phase_ends_where_one_weighted_mean_is(rng: np.random.Generator) -> None:
    held, rows = views(rng), np.arange(ROWS)
    scores = [view.scores(rows) for view in held]
    of_views, common = [one.copy() for one in scores], np.zeros((ROWS, CLASSES))
    for _ in range(400):  # Eqs. (12) and (13)
        common = common_labels(
            np.sum([v.zeta * z for v, z in zip(held, of_views, strict=True)], axis=0),
            sum(view.zeta for view in held),
        )
        of_views = [
            own_labels(one, common, view.zeta) for one, view in zip(scores, held, strict=True)
        ]
    np.testing.assert_allclose(joint_scores(held, rows), common, atol=1e-10)


def test_one_client_alone_ends_where_multi_view_learning_does(rng: np.random.Generator) -> None:
    """H-FedMV's other order of updates has the same end: the objective is convex in all."""
    pull = labels(rng, told=30)
    held, client = views(rng), views(rng)
    for own, other in zip(client, held, strict=True):
        own.x_NF = other.x_NF
    common = start(ROWS, CLASSES, rng)
    for _ in range(600):
        common = iterate(held, common, pull)
    reached = ROWS * LinearViews(client, pull, tolerance=1e-14, rounds=600).train(0)
    assert reached == pytest.approx(objective(client, averaged(client, pull), pull))
    assert reached == pytest.approx(objective(held, common, pull), rel=1e-6)
    rows = np.arange(ROWS)
    np.testing.assert_allclose(joint_scores(client, rows), joint_scores(held, rows), atol=2e-3)


def test_a_start_is_orthonormal(rng: np.random.Generator) -> None:
    z_NC = start(ROWS, CLASSES, rng)
    np.testing.assert_allclose(z_NC.T @ z_NC, np.eye(CLASSES), atol=1e-12)
    fewer_NC = start(CLASSES - 1, CLASSES, rng)
    np.testing.assert_allclose(fewer_NC @ fewer_NC.T, np.eye(CLASSES - 1), atol=1e-12)

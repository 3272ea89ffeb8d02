"""Labellers: short rows of votes, linear where they say so, moved by nobody they deny; and what
votes cost: distances by search, answers by their law, compositions by others' accounts.
"""

import itertools
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting.pld import privacy_loss_distribution
from numpy.typing import NDArray
from scipy.stats import chi2

from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.randomness import fresh_key
from apfed_protocols.sums.fixed_point import FixedPoint
from secure_apfed.errors import ConfigError, DataError
from secure_apfed.labellers import (
    LABELLERS,
    Labeller,
    LinearLabeller,
    Logistic,
    PrivateLogistic,
    Ridge,
    Spreading,
    guarantee,
    harden_votes,
    make_labeller,
)
from secure_apfed.labellers.kinds import (
    build_graph,
    divide_by_norm,
    find_nearest_rows,
    minimise_loss,
    spread_without_own,
)
from secure_apfed.privacy.accountants import gdp_epsilon, gdp_mu
from secure_apfed.privacy.contributions import SummedRelease
from secure_apfed.privacy.ledger import BudgetExhaustedError, PrivacyLedger
from secure_apfed.privacy.randomised_response import VoteResponse

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
CLASSES = 4
NAMES = sorted(LABELLERS)
DELTA = 1e-5


def private(epsilon: float = 2.0, **more: Any) -> PrivateLogistic:
    return PrivateLogistic(epsilon=epsilon, delta=DELTA, key=bytes(32), **more)


def make(name: str) -> Labeller:
    # Weak noise, for what votes look like; what it protects is another test's.
    return private(1e4, strength=0.01) if name == PrivateLogistic.name else make_labeller(name)


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


@each
def test_rows_of_votes_are_short_and_those_of_linear_ones_a_matrix_times_labels(name: str) -> None:
    labeller = make(name)
    assert labeller.name == name
    assert isinstance(labeller, LinearLabeller) is LABELLERS[name].linear
    assert ("own vote and no other" in labeller.describe_labelling()) == labeller.inductive


@pytest.mark.parametrize("case", awkward())
@each
def test_votes_of_awkward_rows_are_short_and_linear_ones_a_matrix(name: str, case: str) -> None:
    labeller = make(name)
    x, labelled, labels = awkward()[case]
    votes = labeller.label_rows(x, labelled, labels, CLASSES)
    assert votes.shape == (len(x), CLASSES)
    assert votes.dtype == np.float64
    assert np.isfinite(votes).all()
    assert np.abs(votes).sum(axis=1).max() <= 1 + 1e-12
    assert labeller.signed or votes.min() >= 0
    if isinstance(labeller, LinearLabeller):
        matrix = labeller.compute_matrix(x, labelled)
        length = np.abs(matrix).sum(axis=1)
        assert matrix.shape == (len(x), len(labelled))
        assert ((np.abs(length - 1) < 1e-12) | (length == 0)).all()
        summed = matrix @ np.eye(CLASSES)[labels]
        np.testing.assert_allclose(votes, summed, rtol=0, atol=1e-15)


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
            return labeller.compute_matrix(of, labelled)
        return labeller.label_rows(of, labelled, labels, CLASSES)

    before = shares(x)
    after = shares(moved)
    others = np.arange(len(x)) != person
    assert (before[person] != after[person]).any()
    assert bool((before[others] == after[others]).all()) == labeller.inductive


@each
def test_clouds_are_told_apart_and_nothing_is_drawn(name: str) -> None:
    x, labelled, labels = people(400, seed=3)
    truth = np.random.default_rng(3).integers(0, CLASSES, 400)
    votes = make(name).label_rows(x, labelled, labels, CLASSES)
    assert (votes.argmax(axis=1) == truth).mean() > 0.8
    torch.manual_seed(1)
    again = make(name).label_rows(torch.from_numpy(x), labelled, labels, CLASSES)
    assert (votes == again).all()
    if name != PrivateLogistic.name:  # a common scale and shift do nothing
        again = make(name).label_rows(x * 2**20 + 3, labelled, labels, CLASSES)
        np.testing.assert_allclose(votes, again, rtol=0, atol=1e-4)


NOBODY = np.zeros(0, dtype=np.int64)
UNFIT: dict[str, dict[str, Any]] = {
    "features that are no numbers": {"features_UF": np.full((90, 5), np.nan)},
    "features of one row": {"features_UF": np.zeros(90)},
    "no features": {"features_UF": np.zeros((90, 0))},
    "positions beyond the rows": {"labelled_n": np.arange(80, 92)},
    "negative positions": {"labelled_n": np.arange(-1, 11)},
    "a position twice": {"labelled_n": np.zeros(12, dtype=np.int64)},
    "no labels": {"labelled_n": NOBODY, "labels_n": NOBODY},
    "labels that are floats": {"labels_n": np.zeros(12)},
    "a label less": {"labels_n": np.zeros(11, dtype=np.int64)},
    "labels of no class": {"labels_n": np.full(12, CLASSES)},
    "one class": {"labels_n": np.zeros(12, dtype=np.int64), "classes": 1},
}


@pytest.mark.parametrize("bad", UNFIT.values(), ids=UNFIT)
@each
def test_what_is_unfit_is_refused(name: str, bad: dict[str, Any]) -> None:
    x, labelled, labels = people()
    fit: dict[str, Any] = {"features_UF": x, "labelled_n": labelled, "labels_n": labels}
    with pytest.raises(DataError, match=r"features|positions|labels"):
        make(name).label_rows(**(fit | {"classes": CLASSES} | bad))


@each
def test_no_label_moves_the_vote_on_its_own_row(name: str) -> None:
    x, labelled, labels = people()
    votes = make(name).label_without_own(x, labelled, labels, CLASSES)
    other = labels.copy()
    other[3] = (labels[3] + 1) % CLASSES
    moved = make(name).label_without_own(x, labelled, other, CLASSES)
    assert (votes != moved).any()
    still = np.array_equal(votes[labelled[3]], moved[labelled[3]])
    assert still is (name != PrivateLogistic.name), "but by less than its noise hides"


def test_spreading_votes_as_it_labels_without_the_row_s_own_label(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, labelled, labels = people()
    votes = Spreading().label_without_own(x, labelled, labels, CLASSES)
    unlabelled = np.ones(len(x), dtype=bool)
    rests = [np.delete(np.arange(len(labelled)), at) for at in range(len(labelled))]
    said = [
        Spreading().label_rows(x, labelled[rest], labels[rest], CLASSES)[row]
        for row, rest in zip(labelled, rests, strict=True)
    ]
    np.testing.assert_allclose(votes[labelled], said, rtol=0, atol=1e-12)
    unlabelled[labelled] = False
    as_ever = Spreading().label_rows(x, labelled, labels, CLASSES)
    np.testing.assert_allclose(votes[unlabelled], as_ever[unlabelled], rtol=0, atol=1e-12)
    matrix = Spreading().compute_matrix_without_own(x, labelled)
    np.testing.assert_allclose(matrix @ np.eye(CLASSES)[labels], votes, rtol=0, atol=1e-12)
    monkeypatch.setattr("secure_apfed.labellers.kinds.MAX_VALIDATION_ROWS", 5)
    told = {
        labeller.name: labeller.label_without_own(x, labelled, labels, CLASSES)[labelled[5:]]
        for labeller in (Spreading(), Ridge(), Logistic())
    }
    assert not [name for name, votes in told.items() if votes.any()]


def test_the_private_one_reads_nothing_but_directions() -> None:
    x, labelled, labels = people()
    lengths = 2.0 ** np.random.default_rng(0).integers(-9, 9, (len(x), 1))
    votes = private(8.0).label_rows(x, labelled, labels, CLASSES)
    assert (votes == private(8.0).label_rows(x * lengths, labelled, labels, CLASSES)).all()
    norms = np.linalg.norm(private().normalise_rows(x), axis=1)
    np.testing.assert_allclose(norms, 1, rtol=1e-12)


def test_spreading_is_the_inverse_of_the_paper() -> None:
    x, labelled, labels = awkward()["an island"]
    votes = Spreading().label_rows(x, labelled, labels, CLASSES)
    assert not votes[90:].any()  # who has no path to a label has no vote
    assert votes[:90].any(axis=1).mean() > 0.5
    x, labelled, _ = people()
    spreading = Spreading(neighbours=4)
    graph = spreading._build_graph(x).toarray()
    np.testing.assert_array_equal(graph, graph.T)
    assert ((graph > 0).sum(axis=1) >= 4).all()
    exact = np.linalg.inv(np.eye(len(x)) - 0.2 * graph)[:, labelled]
    exact /= np.where(exact.sum(axis=1) > 1e-30, exact.sum(axis=1), np.inf)[:, None]
    np.testing.assert_allclose(spreading.compute_matrix(x, labelled), exact, rtol=0, atol=1e-6)
    # A long way is as exact: on a line of 100 people with labels at both ends the nearer counts.
    line = np.arange(100, dtype=np.float64)[:, None]
    votes = Spreading(neighbours=2).label_rows(line, np.array([0, 99]), np.array([0, 1]), 2)
    np.testing.assert_allclose(votes.sum(axis=1), 1, atol=1e-12)
    assert (votes.argmax(axis=1) == (np.arange(100) >= 50)).all()


def test_of_many_rows_about_the_nearest_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    rows_UF = np.random.default_rng(1).normal(size=(900, 12))
    rows_UF[:30] = rows_UF[30]  # alike
    exact_UN = find_nearest_rows(rows_UF, 10)
    monkeypatch.setattr("secure_apfed.labellers.kinds._MAX_EXACT_ROWS", 100)
    found_UN = find_nearest_rows(rows_UF, 10)
    assert found_UN.shape == exact_UN.shape
    assert (found_UN != np.arange(900)[:, None]).all()
    shared = [len({*some} & {*others}) for some, others in zip(found_UN, exact_UN, strict=True)]
    assert np.mean(shared[31:]) > 9.5
    scaled = {scale: find_nearest_rows(scale * rows_UF, 10) for scale in (1.0, 2.0**-90, 2.0**90)}
    assert not [scale for scale, near_UN in scaled.items() if (near_UN != found_UN).any()]


@pytest.mark.parametrize("exact", [True, False])
def test_labelled_rows_tell_each_other_what_the_inverse_says_without_their_own(
    exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pair that no path leads to is told nothing, and the others of it; 40 rows are two parts."""
    rng = np.random.default_rng(4)
    rows_UF = np.concatenate([rng.normal(size=(300, 3)), [[1e3, 0, 0], [1e3, 1, 0]]])
    nearest_UN = find_nearest_rows(rows_UF, 6)
    nearest_UN[-2:] = [[301] * 6, [300] * 6]
    nearest_UN[:300] = np.where(nearest_UN[:300] >= 300, 0, nearest_UN[:300])
    graph_UU = build_graph(nearest_UN)
    labelled_n = np.append(rng.permutation(300)[:39], 301)
    known_nK = np.eye(3)[rng.integers(0, 3, 40)]
    if not exact:
        monkeypatch.setattr("secure_apfed.labellers.kinds._MAX_EXACT_ROWS", 100)
    for alpha, said_nK in zip(
        (0.2, 0.8), spread_without_own(graph_UU, labelled_n, known_nK, (0.2, 0.8)), strict=True
    ):
        inverse_UU = np.linalg.inv(np.eye(302) - alpha * graph_UU.toarray())
        told_nn = inverse_UU[np.ix_(labelled_n, labelled_n)]
        np.fill_diagonal(told_nn, 0)
        expected_nK = told_nn @ known_nK
        expected_nK /= np.maximum(expected_nK.sum(axis=1, keepdims=True), 1e-300)
        near = (1e-12 if exact else 1e-5) if alpha < 0.5 else 1e-3  # paths of 50 edges at most
        np.testing.assert_allclose(said_nK[:-1], expected_nK[:-1], rtol=0, atol=near)
        assert not said_nK[-1].any()


def test_equal_rows_are_no_walls_where_about_the_nearest_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows_UF = np.random.default_rng(2).normal(size=(4000, 3))
    rows_UF[:2000] = 0.5
    exact_UN = find_nearest_rows(rows_UF, 5)
    monkeypatch.setattr("secure_apfed.labellers.kinds._MAX_EXACT_ROWS", 100)
    far, near = (
        np.linalg.norm(rows_UF[of_UN] - rows_UF[:, None], axis=2)[2000:].mean()
        for of_UN in (find_nearest_rows(rows_UF, 5), exact_UN)
    )
    assert far < 1.02 * near


def test_ridge_is_least_squares_with_the_weights_of_the_normal_equations() -> None:
    x, labelled, labels = people()
    ridge = Ridge()
    known = x[labelled]
    size = np.sqrt(((known - known.mean(0)) ** 2).sum(1).mean())
    phi = ridge._expand_features((x - known.mean(0)) / size)
    near = phi[labelled]
    target = np.eye(CLASSES)[labels]
    weights = np.linalg.solve(near.T @ near + 0.1 * np.eye(phi.shape[1]), near.T @ target)
    votes = ridge.label_rows(x, labelled, labels, CLASSES)
    ratio = (phi @ weights) / votes
    np.testing.assert_allclose(ratio, ratio[:, :1] * np.ones(CLASSES), rtol=1e-6)
    assert (ratio > 0).all()


@pytest.mark.parametrize("strength", [1e-3, 10.0])
def test_the_minimiser_is_as_near_as_it_says(strength: float) -> None:
    x, labelled, labels = people()
    rows = np.hstack([x[labelled], np.ones((len(labelled), 1))])

    def gradient(theta: Floats) -> Floats:
        logits = rows @ theta
        share = np.exp(logits - logits.max(axis=1, keepdims=True))
        share /= share.sum(axis=1, keepdims=True)
        residual = share - np.eye(CLASSES)[labels]
        return np.asarray(rows.T @ residual / len(rows) + strength * theta)

    rough = minimise_loss(rows, labels, CLASSES, penalty=strength, tolerance=1e-3)
    fine = minimise_loss(rows, labels, CLASSES, penalty=strength, tolerance=1e-9)
    assert np.linalg.norm(gradient(rough)) <= 1e-3 * (1 + 1e-9)
    assert np.linalg.norm(gradient(fine)) <= 1e-9 * (1 + 1e-3)
    assert np.linalg.norm(rough - fine) <= (1e-3 + 1e-9) / strength


def test_hard_votes_take_the_lowest_of_several_and_leave_no_vote_alone() -> None:
    votes = np.array([[0.2, 0.5, 0.3], [0.4, 0.2, 0.4], [0, 0, 0], [-0.5, -0.1, -0.4]])
    expected = [[0, 1, 0], [1, 0, 0], [0, 0, 0], [0, 1, 0]]
    np.testing.assert_array_equal(harden_votes(votes), expected)


def test_noise_is_asked_for_where_it_is_added_and_nowhere_else() -> None:
    made = make_labeller("private_logistic", epsilon=2.0, key=bytes(32))
    assert isinstance(made, PrivateLogistic)
    assert made.epsilon == 2.0
    with pytest.raises(ConfigError, match="alpha between 0 and 1, got 0 and"):
        Spreading(neighbours=0)
    with pytest.raises(ConfigError, match="alpha between 0 and 1, got 10 and 1"):
        Spreading(alpha=1.0)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("private_logistic", {"epsilon": 2.0}),
        ("private_logistic", {"key": bytes(32)}),
        ("ridge", {"epsilon": 2.0}),
        ("forest", {}),
    ],
)
def test_noise_settings_of_another_labeller_are_refused(
    name: str, settings: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=r"labeller"):
        make_labeller(name, **settings)


RNG = np.random.default_rng(0)


@pytest.mark.parametrize(("epsilon", "classes"), [(0.1, 2), (4.0, 10), (40.0, 2)])
def test_no_answer_tells_more_than_epsilon_of_any_vote(epsilon: float, classes: int) -> None:
    response = VoteResponse(epsilon=epsilon, classes=classes)
    law = np.full((classes + 1, classes), response.other_probability)
    law[np.arange(classes), np.arange(classes)] = response.keep_probability
    law[classes] = 1 / classes  # no vote
    np.testing.assert_allclose(law.sum(axis=1), 1, rtol=1e-12)
    ratio = (law[:, None] / law[None]).max()
    assert ratio <= math.exp(epsilon) * (1 + 1e-9)
    # exp(-40) beside 1 is a rounding of the probability that is kept.
    assert ratio == pytest.approx(math.exp(epsilon), rel=1e-9 if epsilon < 30 else 0.1)


@pytest.mark.parametrize("vote", [1.0, 0.0], ids=["a vote", "no vote"])
def test_answers_have_that_law(vote: float) -> None:
    classes = 3
    rows = 30_000
    response = VoteResponse(epsilon=1.2, classes=classes)
    votes = np.zeros((rows, classes))
    votes[:, 1] = vote
    answers = response.randomise_votes(votes, key=fresh_key(), about=b"0")
    law = [response.other_probability, response.keep_probability, response.other_probability]
    share = np.array(law if vote else [1 / 3] * 3)
    counts = np.bincount(answers, minlength=classes)
    statistic = ((counts - rows * share) ** 2 / (rows * share)).sum()
    assert statistic < chi2.ppf(1 - 1e-6, classes - 1)


def test_the_same_question_has_the_same_answer_and_others_have_others() -> None:
    response = VoteResponse(epsilon=0.5, classes=4)
    key = fresh_key()
    votes = harden_votes(RNG.random((300, 4)))
    answers = response.randomise_votes(votes, key=key, about=b"3")
    assert (answers == response.randomise_votes(votes, key=key, about=b"3")).all()
    moved = votes.copy()
    moved[0] = np.roll(votes[0], 1)
    others = {
        "another question": response.randomise_votes(votes, key=key, about=b"4"),
        "another key": response.randomise_votes(votes, key=fresh_key(), about=b"3"),
        "other votes": response.randomise_votes(moved, key=key, about=b"3"),
    }
    assert not [name for name, other in others.items() if (answers != other)[1:].mean() <= 0.2]
    ledger = PrivacyLedger(response, delta=DELTA, budget=1.2, rows=5, log=None)
    for step in (0, 1, 1):
        ledger.charge(step=step, rows=torch.arange(5), digest=bytes([step]))
    assert (ledger.get_privacy_spent().epsilon_x, ledger.cross_check()) == (1.0, {"pure": 1.0})
    with pytest.raises(BudgetExhaustedError, match=r"the budget is 1\.2"):
        ledger.charge(step=2, rows=torch.arange(5), digest=b"3")


@pytest.mark.slow
def test_the_estimate_is_unbiased() -> None:
    parties, classes, rows, times, key = 4, 3, 5, 2500, bytes(32)
    response = VoteResponse(epsilon=3.0, classes=classes)
    votes = np.eye(classes)[np.random.default_rng(0).integers(0, classes, (parties, rows))]
    total = votes.sum(axis=0)

    def estimate_total(time: int) -> Floats:
        abouts = (f"{time} {party}".encode() for party in range(parties))
        pairs = zip(votes, abouts, strict=True)
        return response.estimate_sum(
            np.stack([response.randomise_votes(v, key=key, about=a) for v, a in pairs])
        )

    found = np.stack([estimate_total(time) for time in range(times)])
    assert (np.abs(found.mean(axis=0) - total) < 5 * found.std(axis=0) / times**0.5).all()

    # No vote counts a share for each class.
    response = VoteResponse(epsilon=1.0, classes=2)
    answers = response.randomise_votes(np.zeros((40_000, 2)), key=fresh_key(), about=b"0")
    estimate = response.estimate_sum(answers[None])
    assert estimate.mean(axis=0) == pytest.approx([0.5, 0.5], abs=0.03)


@pytest.mark.parametrize(
    "votes",
    [np.zeros((3, 3)), np.full((3, 2), 0.5), np.ones((3, 2)), -np.eye(2), np.zeros(2)],
    ids=["too many classes", "soft", "all", "negative", "one row"],
)
def test_soft_votes_and_responses_out_of_range_are_refused(votes: Floats) -> None:
    with pytest.raises(LocalProtocolError, match="votes"):
        VoteResponse(epsilon=1.0, classes=2).randomise_votes(votes, key=bytes(32), about=b"0")


@pytest.mark.parametrize(("epsilon", "classes"), [(0.0, 2), (math.nan, 2), (41.0, 2), (1.0, 1)])
def test_responses_out_of_range_are_refused(epsilon: float, classes: int) -> None:
    with pytest.raises(ConfigError, match="got"):
        VoteResponse(epsilon=epsilon, classes=classes)


def rows_of_votes(count: int, classes: int, *, signed: bool) -> Floats:
    rows = RNG.exponential(size=(count, classes)) ** 3
    return divide_by_norm(rows * RNG.choice([-1, 1], size=rows.shape) if signed else rows)


@pytest.mark.parametrize("signed", [False, True])
def test_no_two_rows_lie_further_apart_and_some_lie_so_far(signed: bool) -> None:
    corners = np.concatenate([np.eye(4), -np.eye(4) if signed else np.zeros((1, 4))])
    rows = np.concatenate([rows_of_votes(400, 4, signed=signed), corners])
    far = np.linalg.norm(rows[:, None] - rows[None], axis=2)
    assert far.max() == pytest.approx(guarantee.compute_vote_distance(signed=signed), rel=1e-12)


@pytest.mark.parametrize(
    ("bits", "signed", "kind"),
    [(4, True, "soft"), (4, True, "hard"), (8, False, "soft"), (16, True, "soft")],
)
def test_rounded_rows_lie_no_further_apart_than_is_said(bits: int, signed: bool, kind: str) -> None:
    classes = 5
    rows = rows_of_votes(300, classes, signed=signed)
    if kind == "hard":
        rows = harden_votes(np.abs(rows))
    point = FixedPoint(clip_norm=1.0, bits=bits, contributor_count=2)
    steps = point.quantise_rows(rows).astype(np.float64)
    far = np.linalg.norm(steps[:, None] - steps[None], axis=2).max()
    bound = guarantee.compute_distance_in_steps(
        steps=point.max_level,
        numbers=classes,
        signed=signed and kind == "soft",
        integers=kind == "hard",
    )
    assert far <= bound
    if kind == "hard":
        assert far == pytest.approx(bound, rel=1e-8)


def test_sums_take_these_distances() -> None:
    noise: dict[str, Any] = {"deviation": 300, "honest": 3}
    votes = guarantee.build_vote_release(Logistic(), hard=False, steps=127, classes=4, **noise)
    assert votes.sensitivity == pytest.approx(math.sqrt(2) * 127 + 2)
    assert votes.numbers == 4


@pytest.mark.parametrize(
    ("labeller", "hardened", "integers", "steps", "far"),
    [
        (Ridge(), False, False, 127, 2 * 127 + 2),
        (Ridge(), True, False, 127, math.sqrt(2) * 127),
        (Ridge(), False, True, 127, 2 * 127),
        (Spreading(), False, True, 127, math.sqrt(2) * 127),
        # Where 1 is no whole number of steps, hard votes are rounded, too.
        (Logistic(), True, False, 12.7, math.sqrt(2) * 12.7 + 2),
    ],
    ids=["ridge", "hard ridge", "ridge of integers", "spreading", "hard logistic"],
)
def test_sums_of_other_votes_take_these_distances(
    labeller: Labeller, hardened: bool, integers: bool, steps: float, far: float
) -> None:
    of: dict[str, Any] = {"hard": hardened, "integers": integers, "steps": steps}
    votes = guarantee.build_vote_release(labeller, classes=4, deviation=300, honest=3, **of)
    assert votes.sensitivity == pytest.approx(far)


@pytest.mark.slow
def test_no_replacement_moves_weights_further_than_is_said() -> None:
    """Rows at random and the worst found: three people of whom one goes to the other side."""
    farthest = 0.0
    for strength, classes, labelled in itertools.product((0.05, 1.0, 10.0), (2, 5), (1, 3, 8)):
        labeller = private(strength=strength)
        bound = labeller.compute_sensitivity(labelled_count=labelled, classes=classes)
        for _ in range(12):
            x = labeller.normalise_rows(RNG.standard_normal((labelled, 4)))
            y = RNG.integers(0, classes, labelled)
            y[:] = y[0] if RNG.random() < 0.3 else y
            before = labeller.fit_weights(x, y, classes)
            replaced = [labeller.normalise_rows(RNG.standard_normal((1, 4)))[0], -x[0]]
            for row, label in itertools.product(replaced, range(classes)):
                x_other = x.copy()
                y_other = y.copy()
                x_other[0] = row
                y_other[0] = label
                moved = float(
                    np.linalg.norm(labeller.fit_weights(x_other, y_other, classes) - before)
                )
                assert moved <= bound
                if labelled > 1:
                    farthest = max(farthest, moved / bound)
    assert farthest > 0.85  # the bound is no multiple of what happens


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("strength", [0.1, 0.6, 10.0])
def test_no_residual_at_the_minimum_is_longer_than_is_said(seed: int, strength: float) -> None:
    labeller = private(strength=strength)
    assert labeller.bound_residual(3) <= math.sqrt(2)
    rng = np.random.default_rng(seed)
    x = labeller.normalise_rows(rng.standard_normal((2, 3)))
    y = rng.integers(0, 3, 2)
    weights = labeller.fit_weights(x, y, 3)
    # The direction in which the wrong class gains most.
    for right, wrong in itertools.permutations(range(3), 2):
        worst = weights[:, wrong] - weights[:, right]
        score = np.exp(worst / (np.linalg.norm(worst) + 1e-30) @ weights)
        residual = score / score.sum() - np.eye(3)[right]
        assert np.linalg.norm(residual) <= labeller.bound_residual(3) * (1 + 1e-9)


def test_noise_on_weights_has_the_stated_deviation(monkeypatch: pytest.MonkeyPatch) -> None:
    x = RNG.standard_normal((40, 600))
    labelled = np.arange(20)
    labels = RNG.integers(0, 5, 20)
    seen: list[Floats] = []

    def record_weights(x_UF: Floats, weights_FK: Floats) -> Floats:
        seen.append(weights_FK)
        return np.full((len(x_UF), 5), 0.2)

    monkeypatch.setattr("secure_apfed.labellers.kinds.compute_probabilities", record_weights)
    labeller = private(epsilon=1.0)
    labeller.label_rows(x, labelled, labels, 5)
    sigma = labeller.compute_sigma(labelled_count=20, classes=5)
    clean = labeller.fit_weights(labeller.normalise_rows(x)[labelled], labels, 5)
    noise = seen[0] - clean / sigma
    assert abs(float(noise.std()) - 1) < 0.06  # 3000 numbers; 2/3 and 3/2 are far off
    assert sigma == pytest.approx(
        labeller.compute_sensitivity(labelled_count=20, classes=5) / gdp_mu(1.0, DELTA), rel=1e-12
    )
    assert labeller.model.mu == pytest.approx(gdp_mu(1.0, DELTA))


def test_noise_is_fresh_for_other_people_and_the_key_stays_inside() -> None:
    x = RNG.standard_normal((40, 6))
    labelled = np.arange(20)
    labels = RNG.integers(0, 3, 20)
    one, other = (
        PrivateLogistic(epsilon=1.0, delta=DELTA, key=key) for key in (b"k" * 32, fresh_key())
    )
    votes = one.label_rows(x, labelled, labels, 3)
    assert (votes == one.label_rows(x, labelled, labels, 3)).all()
    assert np.abs(votes - other.label_rows(x, labelled, labels, 3)).max() > 0.1
    moved = x.copy()
    moved[0] = x[0] + 1e-3
    assert np.abs(votes - one.label_rows(moved, labelled, labels, 3))[20:].max() > 0.1
    assert (b"k" * 32).decode() not in repr(one) + repr(vars(one)) + one.describe_labelling()


@pytest.mark.parametrize("wrong", [{"strength": 0.0}, {"epsilon": 0.0}, {"delta": 1.0}], ids=str)
def test_private_labellers_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    fit: dict[str, Any] = {"epsilon": 1.0, "delta": DELTA, "key": bytes(32)}
    with pytest.raises(ConfigError):
        PrivateLogistic(**(fit | wrong))


def test_a_short_key_of_a_private_labeller_is_refused() -> None:
    with pytest.raises(LocalProtocolError):
        PrivateLogistic(epsilon=1.0, delta=DELTA, key=b"short")


@pytest.mark.parametrize("delta", [0.0, 1.0])
def test_guarantees_out_of_range_are_refused(delta: float) -> None:
    with pytest.raises(ConfigError, match="expected"):
        guarantee.compute_table_guarantee(Logistic(), RESPONSE, delta=delta)


RESPONSE = VoteResponse(epsilon=1.0, classes=3)
SUM = guarantee.build_vote_release(
    Logistic(), hard=False, deviation=400, honest=3, steps=127, classes=3
)


@pytest.mark.parametrize("opening", [RESPONSE, SUM], ids=["response", "sum"])
@each
def test_what_is_claimed_follows_from_facts_of_the_labeller(opening: Any, name: str) -> None:
    labeller = private() if name == PrivateLogistic.name else make_labeller(name)
    found = guarantee.compute_table_guarantee(labeller, opening, delta=DELTA)
    assert 0 < found.vote_epsilon < 20
    assert found.unlabelled_epsilon == (found.vote_epsilon if labeller.inductive else math.inf)
    assert math.isfinite(found.labelled_epsilon) == math.isfinite(labeller.model.mu)
    assert found.labelled_epsilon > found.vote_epsilon
    assert found.epsilon == max(found.unlabelled_epsilon, found.labelled_epsilon)
    covered = "covers the whole record of any person" in found.describe_guarantee()
    assert covered == math.isfinite(found.epsilon)
    assert ("NO guarantee for the passive's table" in found.describe_guarantee()) == (not covered)
    assert "inf" not in found.describe_guarantee()


def test_weights_and_votes_add_up() -> None:
    found = guarantee.compute_table_guarantee(private(3.0), RESPONSE, delta=DELTA)
    assert (found.vote_epsilon, found.unlabelled_epsilon) == (1.0, 1.0)
    assert found.labelled_epsilon == pytest.approx(4.0, rel=1e-6)
    # A numerical composition of a Gaussian and binary randomised response of that epsilon.
    mu = gdp_mu(3.0, DELTA)
    epsilon = 1.0
    gaussian = privacy_loss_distribution.from_gaussian_mechanism(
        1 / mu, value_discretization_interval=1e-3
    )
    noise = 2 / (math.exp(epsilon) + 1)
    response = privacy_loss_distribution.from_randomized_response(
        noise, 2, value_discretization_interval=1e-3
    )
    theirs = gaussian.compose(response).get_epsilon_for_delta(DELTA)
    assert theirs <= found.labelled_epsilon <= theirs + 0.5
    found = guarantee.compute_table_guarantee(private(3.0), SUM, delta=DELTA)
    exact = gdp_epsilon(math.hypot(1 / SUM.noise_multiplier, gdp_mu(3.0, DELTA)), DELTA)
    assert exact <= found.labelled_epsilon <= 1.15 * exact
    assert found.vote_epsilon == SUM.epsilon_of(1, DELTA)


def test_calibrated_noise_is_the_least_that_keeps_the_budget() -> None:
    def release(deviation: int, steps: float = 127) -> SummedRelease:
        return guarantee.build_vote_release(
            Logistic(), hard=True, deviation=deviation, honest=3, steps=steps, classes=3
        )

    found = guarantee.calibrate_votes(Logistic(), release, epsilon=3.0, delta=DELTA)
    spent = [
        guarantee.compute_table_guarantee(Logistic(), release(noise), delta=DELTA).vote_epsilon
        for noise in (found, found - 1)
    ]
    assert spent[0] <= 3.0 < spent[1]
    with pytest.raises(ConfigError, match="over 1 releases needs noise of more than"):
        guarantee.calibrate_votes(Logistic(), partial(release, steps=2e9), epsilon=3.0, delta=DELTA)

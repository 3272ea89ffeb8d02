"""Baselines of the active alone: a shared contract over the table, what unlabelled rows are worth,
and the best, chosen by the active's own labels and measured on test rows.
"""

import copy
import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from scipy.linalg import hadamard
from sklearn.datasets import load_digits, make_moons
from sklearn.ensemble import ExtraTreesClassifier, ExtraTreesRegressor
from sklearn.linear_model import RidgeCV
from torch.nn import functional as F

from apfed_experiments.baselines import BaselineResult, compare_baselines, pick_best
from secure_apfed.baselines import (
    BASELINES,
    FOLDS,
    TEACHERS,
    Baseline,
    BaselineTask,
    Predictor,
    choose_baseline,
    classical,
    forests,
)
from secure_apfed.baselines.classical import fit_best_ridge
from secure_apfed.baselines.interface import (
    ENOUGH_LABELS,
    FloatArray,
    IntArray,
    cache_fits,
    split_folds,
    use_fit_store,
)
from secure_apfed.baselines.networks import (
    _BATCH_ROWS,
    MixMatch,
    _compute_loss_gradient,
    _make_network,
    _ParallelNetworks,
    flatten_parameters,
    separate_parameters,
)
from secure_apfed.errors import DataError, ModelError
from secure_apfed.settings import ModelSettings, TrainSettings

Rows = tuple[FloatArray, IntArray]

each_baseline = pytest.mark.parametrize("baseline", BASELINES.values(), ids=BASELINES.keys())


def first_of_each(labels_N: IntArray, each: int) -> IntArray:
    members = [np.flatnonzero(labels_N == label)[:each] for label in np.unique(labels_N)]
    return np.sort(np.concatenate(members))


def task_of(
    rows: Rows, each: int, *, seed: int = 0, classes: int | None = None
) -> tuple[BaselineTask, Rows]:
    """A task on three quarters of the rows, with `each` labels a class, and the other rows."""
    x, y = rows
    order = np.random.default_rng(seed).permutation(len(y))
    x = x[order]
    y = y[order]
    at = len(y) * 3 // 4
    labelled = first_of_each(y[:at], each)
    classes = classes or int(y.max()) + 1
    task = BaselineTask.from_arrays(x[:at], labelled, y[labelled], classes=classes, seed=seed)
    return task, (x[at:].reshape(len(y) - at, -1), y[at:])


def accuracy(baseline: Baseline, task: BaselineTask, test: Rows) -> float:
    x_BF, y_B = test
    return float((baseline.fit(task).compute_scores(x_BF).argmax(1) == y_B).mean())


def moons(rows: int = 300) -> Rows:
    x, y = make_moons(rows, noise=0.08, random_state=1)
    return x, y


@cache
def strips() -> Rows:
    """The upper two pixel rows of digits, as images."""
    bunch = load_digits()
    return bunch.images[:900, None, :2, :] / 16, bunch.target[:900]


def clusters(seed: int, *, apart: float = 1.4, each: int = 80) -> Rows:
    """Four round clusters that do not touch; one member of each says little of its middle."""
    drawn = np.random.default_rng(seed)
    y = np.repeat(np.arange(4), each)
    return apart * hadamard(16)[1:5][y] + drawn.normal(size=(len(y), 16)), y


def test_every_baseline_but_the_runs_own_network_teaches() -> None:
    teachers = {teacher.name: teacher for teacher in TEACHERS}
    assert list(teachers) == [name for name in BASELINES if name != "network"]
    assert all(BASELINES[name] is teacher for name, teacher in teachers.items())
    assert not {teacher.name for teacher in TEACHERS if teacher.is_run_network}


@pytest.mark.sampled(every=4)
@each_baseline
def test_few_labels_teach_moons_and_digits_and_the_same_seed_the_same(baseline: Baseline) -> None:
    task, test = task_of(moons(), 6)
    assert accuracy(baseline, task, test) > 0.7
    assert BASELINES[baseline.name] is baseline
    assert [one.title for one in BASELINES.values()].count(baseline.title) == 1

    strip, test = task_of(strips(), 5)
    assert strip.shape == (1, 2, 8)
    assert accuracy(baseline, strip, test) > 0.3  # chance is 0.1
    task, (x_BF, _) = task_of(moons(80), 3)
    before = torch.get_rng_state()
    first = baseline.fit(task).compute_scores(x_BF)
    again = baseline.fit(task).compute_scores(x_BF)
    assert np.array_equal(first, again)
    assert torch.equal(before, torch.get_rng_state())


def test_a_kept_fit_is_asked_for_by_an_equal_task_alone() -> None:
    task, (x_BF, _) = task_of(moons(80), 3)
    mixmatch = BASELINES["mixmatch"]
    made = dict[str, bytes]()
    alone = mixmatch.fit(task).compute_scores(x_BF)
    changed = (
        replace(task, seed=1),
        task.drop_labels(np.array([0])),
        replace(task, labels=1 - task.labels),
        replace(task, features=task.features + 1.0),
        replace(task, classes=3),
    )
    with use_fit_store(lambda name, make: made.get(name) or made.setdefault(name, make())):
        assert np.array_equal(mixmatch.fit(task).compute_scores(x_BF), alone)
        assert np.array_equal(mixmatch.fit(replace(task)).compute_scores(x_BF), alone)
        assert len(made) == 1
        for other in changed:
            mixmatch.fit(other)
    mixmatch.fit(task)
    assert len(made) == 1 + len(changed)


@pytest.mark.sampled(every=2)
def test_the_gradient_of_mixmatch_is_that_of_autograd() -> None:
    torch.manual_seed(0)
    x_GMF = torch.randn(2, 3 * _BATCH_ROWS, 5)
    y_GMK = torch.rand(2, 3 * _BATCH_ROWS, 3).softmax(-1)
    network = _make_network(5, 3)
    networks = _ParallelNetworks(network, 2)
    networks.weights[0].data[1] *= 2
    losses = [
        F.cross_entropy(logits_MK[:_BATCH_ROWS], y_MK[:_BATCH_ROWS])
        + 75 * F.mse_loss(logits_MK[_BATCH_ROWS:].softmax(1), y_MK[_BATCH_ROWS:])
        for logits_MK, y_MK in zip(networks(x_GMF), y_GMK, strict=True)
    ]
    expected = torch.autograd.grad(torch.stack(losses).sum(), list(networks.parameters()))
    flatten_parameters([networks])
    with torch.no_grad():
        outputs = networks.list_layer_outputs(x_GMF)
        error_GMK = _compute_loss_gradient(outputs[-1], y_GMK, guess_weight=75)
        networks.set_gradients(x_GMF, outputs, error_GMK)
    for parameter, gradient in zip(networks.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["mixmatch", "ridge"])
@pytest.mark.parametrize("rows", [moons, strips], ids=["two features", "images"])
def test_fits_together_are_fits_apart(name: str, rows: Callable[[], Rows]) -> None:
    baseline = BASELINES[name]
    made = dict[str, bytes]()
    task, (x_BF, _) = task_of(rows(), 4)
    tasks = [task, *(task.drop_labels(part) for part in split_folds(task.labels, 3, task.seed))]
    with use_fit_store(lambda name, make: made.get(name) or made.setdefault(name, make())):
        baseline.fit(tasks[1])  # whose fit is taken, if it is kept
        fitted = list(baseline.fit_together(tasks))
    assert len(made) == (len(tasks) if name == "mixmatch" else 0)
    assert len(fitted) == len(tasks) == 4
    for one, of_task in zip(fitted, tasks, strict=True):
        apart = baseline.fit(of_task).compute_scores(x_BF)
        assert np.allclose(one.compute_scores(x_BF), apart, atol=1e-4)
    assert not np.allclose(
        fitted[0].compute_scores(x_BF), fitted[1].compute_scores(x_BF), atol=1e-2
    )
    for other in ([], [task, replace(task, seed=1)], [task, replace(task, classes=11)]):
        if name == "mixmatch":
            with pytest.raises(DataError, match="parts of one task"):
                baseline.fit_together(other)


def test_a_fitted_network_keeps_no_graph_and_no_memory_of_others() -> None:
    task, _ = task_of(moons(), 4)
    scores = inspect.unwrap(MixMatch().fit(task).score_block)
    network = inspect.getclosurevars(scores).nonlocals["network"]
    assert all(one.is_leaf and not one.requires_grad for one in network.parameters())
    assert all(one.untyped_storage().nbytes() == one.nbytes for one in network.parameters())


@pytest.mark.parametrize(("rows", "columns"), [(60, 8), (20, 30), (30, 30)])
@pytest.mark.parametrize("targets", [1, 4])
def test_the_best_ridge_is_that_of_scikit_learn(rows: int, columns: int, targets: int) -> None:
    drawn = np.random.default_rng(rows)
    x_RC = drawn.normal(size=(rows, columns)) + 3
    y_RT = x_RC[:, :2] @ drawn.normal(size=(2, targets)) + drawn.normal(size=(rows, targets))
    strengths = (0.01, 1.0, 100.0)
    theirs = RidgeCV(alphas=strengths).fit(x_RC, y_RT)
    weights_TC, biases_T = fit_best_ridge(x_RC, y_RT, strengths)
    assert np.allclose(weights_TC, np.atleast_2d(theirs.coef_), atol=1e-9)
    assert np.allclose(biases_T, np.atleast_1d(theirs.intercept_), atol=1e-9)


@pytest.mark.parametrize("rows", [moons, lambda: clusters(0, each=20)], ids=["two", "four"])
def test_boosting_has_no_more_bins_than_it_needs(
    rows: Callable[[], Rows], monkeypatch: pytest.MonkeyPatch
) -> None:
    task, (x_BF, _) = task_of(rows(), 5)
    few = BASELINES["gradient_boosting"].fit(task).compute_scores(x_BF)
    monkeypatch.setattr(classical, "_MIN_BINS", 255)
    assert np.array_equal(BASELINES["gradient_boosting"].fit(task).compute_scores(x_BF), few)


@pytest.mark.parametrize("classes", [4, 6], ids=["all seen", "two never seen"])
def test_extra_trees_predict_what_their_forest_does(classes: int) -> None:
    task, (x_BF, _) = task_of(clusters(0, each=20), 3, classes=classes)
    forest = ExtraTreesClassifier(200, random_state=task.derive_random_state("extra_trees"))
    scale = classical.fit_scaler(task)
    forest.fit(scale.transform(task.labelled_features), task.labels)
    scores_BK = BASELINES["extra_trees"].fit(task).compute_scores(x_BF)
    assert np.array_equal(scores_BK[:, :4], forest.predict_proba(scale.transform(x_BF)))
    assert not scores_BK[:, 4:].any()


def raise_type_error(*_: Any, **__: Any) -> None:
    raise TypeError("another version's builder")


@pytest.mark.parametrize("public", [False, True], ids=["builder", "another version"])
@pytest.mark.parametrize("leaf", [0, 1, 5], ids=["classes", "numbers", "numbers, large leaves"])
def test_trees_are_those_of_scikit_learn(
    leaf: int, public: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The builder below the forest grows the same trees, and where it is missing the forest does.

    `leaf`: least rows of a leaf of a regression; 0: classes.
    """
    x_NF, y_N = clusters(1, each=15)
    targets_NT = np.random.default_rng(0).dirichlet(np.ones(3), size=len(x_NF))
    if public:
        monkeypatch.setattr(forests, "_build_trees", raise_type_error)
    if leaf:
        trees = forests.grow_regressing_trees(
            x_NF, targets_NT, tree_count=9, min_leaf_rows=leaf, seed=5
        )
        forest = ExtraTreesRegressor(9, min_samples_leaf=leaf, random_state=5)
        forest.fit(x_NF, targets_NT)
    else:
        trees, classes = forests.grow_classifying_trees(x_NF, y_N + 2, tree_count=9, seed=5)
        forest = ExtraTreesClassifier(9, random_state=5).fit(x_NF, y_N + 2)
        assert np.array_equal(classes, forest.classes_)
    assert len(trees) == 9
    for tree, estimator in zip(trees, forest.estimators_, strict=True):
        for name in ("feature", "threshold", "children_left", "children_right", "value"):
            assert np.array_equal(getattr(tree, name), getattr(estimator.tree_, name)), name


def test_the_installed_scikit_learn_has_the_builder() -> None:
    forest = ExtraTreesRegressor(1, random_state=0)
    trees = forests._build_trees(
        forest, np.eye(4), np.eye(4), class_counts=None, features_per_split=4
    )
    assert trees[0].node_count == 7


@pytest.mark.parametrize("name", ["label_spreading", "label_spreading_ridge"])
def test_spreading_together_is_spreading_apart(name: str) -> None:
    """Labels that are walked once spread as those of each task walked alone."""
    baseline = BASELINES[name]
    task, (x_BF, _) = task_of(moons(160), 8)
    parts = split_folds(task.labels, 3, task.seed)
    other = replace(
        task, labelled_indices=task.labelled_indices + 1
    )  # its labels are no part of the others
    tasks = [*(task.drop_labels(part) for part in parts), task, other]
    for fitted, alone in zip(baseline.fit_together(tasks), map(baseline.fit, tasks), strict=True):
        assert np.allclose(
            fitted.compute_scores(x_BF), alone.compute_scores(x_BF), rtol=0, atol=1e-12
        )


@pytest.mark.sampled(every=4)
@each_baseline
def test_one_label_in_a_class_none_in_another_or_one_for_every_row(baseline: Baseline) -> None:
    x, y = clusters(0, each=20)
    labelled = np.concatenate([np.flatnonzero(y == 0)[:1], np.flatnonzero(y == 2)[:6]])
    task = BaselineTask.from_arrays(x, labelled, y[labelled], classes=4)
    scores_BK = baseline.fit(task).compute_scores(x)
    assert scores_BK.shape == (80, 4)
    assert np.isfinite(scores_BK).all()
    assert set(scores_BK.argmax(1).tolist()) <= {0, 2}
    x = np.hstack([x, np.full((80, 1), 7.0)])  # and a feature is constant
    task = BaselineTask.from_arrays(x, np.arange(80), y, classes=4)
    assert accuracy(baseline, task, (x, y)) > 0.9
    assert baseline.fit(task).compute_scores(x[:1]).shape == (1, 4)


@cache
def mean_accuracy(name: str) -> float:
    tasks = [task_of(clusters(seed, apart=1.0, each=150), 1, seed=seed) for seed in range(3)]
    return float(np.mean([accuracy(BASELINES[name], *one) for one in tasks]))


@pytest.mark.sampled(every=3)
@pytest.mark.whole_mixmatch
@pytest.mark.parametrize("name", ["label_spreading", "label_spreading_ridge", "mixmatch"])
def test_unlabelled_rows_help_where_classes_are_clusters(name: str) -> None:
    alone = ("logistic", "ridge", "gradient_boosting")
    assert mean_accuracy(name) > max(map(mean_accuracy, alone)) + 0.03


@pytest.mark.parametrize("name", ["label_spreading", "label_spreading_ridge"])
def test_a_part_of_the_graph_that_no_label_reaches(name: str) -> None:
    x, y = clusters(0, apart=10.0, each=30)
    labelled = first_of_each(y, 2)[:4]
    task = BaselineTask.from_arrays(x, labelled, y[labelled], classes=4)
    scores_BK = BASELINES[name].fit(task).compute_scores(x)
    assert np.isfinite(scores_BK).all()
    assert (scores_BK.argmax(1)[y < 2] == y[y < 2]).all()


def test_the_network_is_the_runs_own() -> None:
    x = np.random.default_rng(0).normal(size=(40, 1, 7, 8))
    y = np.arange(40) % 2
    task = BaselineTask.from_arrays(
        x,
        np.arange(6),
        y[:6],
        classes=2,
        model=ModelSettings(network="conv_mnist"),
        train=TrainSettings(learning_rate=0.05),
    )
    assert BASELINES["network"].fit(task).compute_scores(x.reshape(40, -1)).shape == (40, 2)


@pytest.mark.slow
def test_a_slow_rate_does_not_make_the_network_weak_and_a_wild_one_is_refused() -> None:
    task, test = task_of(strips(), 5)
    slow = replace(task, train=TrainSettings(learning_rate=1e-4))
    assert accuracy(BASELINES["network"], slow, test) > 0.2
    task, _ = task_of(clusters(0, each=20), 2)
    wild = replace(task, train=TrainSettings(learning_rate=1e30))
    with pytest.raises(ModelError, match="diverged"):
        BASELINES["network"].fit(wild)


TABLE = np.zeros((6, 2))


def test_a_task_takes_tensors_and_what_can_be_learnt() -> None:
    at = torch.tensor([0, 5])
    known = torch.tensor([1, 0])
    task = BaselineTask.from_arrays(torch.zeros(6, 1, 2, 3), at, known, classes=2)
    assert task.features.shape == (6, 6)
    assert task.features.dtype == np.float64
    assert task.one_hot_labels.tolist() == [[0, 1], [1, 0]]
    task = BaselineTask.from_arrays(TABLE, [0, 1], [0, 1], classes=2)
    with pytest.raises(DataError, match="are 3 numbers each"):
        replace(task, shape=(3,))


@pytest.mark.parametrize(
    ("features", "labelled", "labels", "says"),
    [
        (TABLE, [0, 1], [1, 1], "of 1 class"),
        (TABLE, [], [], "of 0 class"),
        (TABLE, [0, 1], [0, 2], "labels lie in 0 to 1"),
        (TABLE, [0, 1], [-1, 1], "labels lie in 0 to 1"),
        (TABLE, [0, 6], [0, 1], "labelled rows lie in 0 to 5"),
        (TABLE, [0, 0], [0, 1], "listed twice"),
        (TABLE, [0, 1, 2], [0, 1], "each labelled row needs one label"),
        (TABLE * np.nan, [0, 1], [0, 1], "6 rows have features that are NaN"),
        (TABLE + np.inf, [0, 1], [0, 1], "NaN or infinite"),
        (TABLE[0], [0, 1], [0, 1], "a table or images"),
        (TABLE[:0], [0, 1], [0, 1], "shape"),
    ],
)
def test_what_cannot_be_learnt_is_refused(
    features: Any, labelled: list[int], labels: list[int], says: str
) -> None:
    with pytest.raises(DataError, match=says):
        BaselineTask.from_arrays(features, labelled, labels, classes=2)


def test_flattened_networks_take_the_steps_that_they_would_take_apart() -> None:
    torch.manual_seed(0)
    apart = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
    joined = copy.deepcopy(apart)
    weights_P, gradient_P = flatten_parameters([joined])
    optimizers = [torch.optim.AdamW(one, lr=0.1) for one in (apart.parameters(), [weights_P])]
    for _ in range(5):
        x_BF = torch.randn(8, 5)
        gradient_P.zero_()
        optimizers[0].zero_grad()
        for network, optimizer in zip((apart, joined), optimizers, strict=True):
            network(x_BF).square().mean().backward()
            optimizer.step()
    for mine, its in zip(apart.parameters(), separate_parameters(joined).parameters(), strict=True):
        torch.testing.assert_close(mine, its)
        assert its.grad is None
        assert its.untyped_storage().nbytes() == its.nbytes


class Witness(Baseline):
    """Knows the label of a row by its first feature, where `knows` says so; keeps its tasks."""

    name = title = "witness"

    def __init__(self, *knows: bool) -> None:
        right = np.arange(len(knows)) % 2
        self.answers = np.eye(2)[np.where(knows, right, 1 - right)]
        self.tasks: list[BaselineTask] = []

    def fit(self, task: BaselineTask) -> Predictor:
        self.tasks.append(task)
        return Predictor(lambda features_BF: self.answers[features_BF[:, 0].astype(int)])


class OwnWitness(Witness):
    is_run_network = True


def rows(count: int) -> FloatArray:
    return np.arange(count, dtype=np.float64)[:, None]


FAST = {name: BASELINES[name] for name in ("label_spreading", "ridge", "logistic")}


def blobs(labels: int, seed: int = 0) -> tuple[BaselineTask, FloatArray, IntArray]:
    y = np.arange(200) % 4
    x = 3 * np.eye(4, 6)[y] + np.random.default_rng(seed).normal(size=(200, 6))
    task = BaselineTask.from_arrays(x[:120], np.arange(labels), y[:labels], classes=4, seed=seed)
    return task, x[120:], y[120:]


def test_held_out_labels_are_not_in_the_task() -> None:
    witness = Witness(*[True] * 30)
    task = BaselineTask.from_arrays(rows(20), np.arange(10), np.arange(10) % 2, classes=2)
    compare_baselines(
        task, rows(30)[20:], np.arange(20, 30) % 2, baseline_by_name={"witness": witness}
    )
    parts = split_folds(task.labels, FOLDS, task.seed)
    *validating, last = witness.tasks
    held = [sorted(set(range(10)) - set(task.labelled_indices.tolist())) for task in validating]
    assert held == [part.tolist() for part in parts]
    assert all(len(task.features) == 20 for task in validating)
    assert np.array_equal(last.labelled_indices, task.labelled_indices)
    witness = Witness(*[True] * 6, *[False] * 4, *[True] * 8, *[False] * 2)
    task = BaselineTask.from_arrays(rows(10), np.arange(10), np.arange(10) % 2, classes=2)
    (result,) = compare_baselines(
        task, rows(20)[10:], np.arange(10, 20) % 2, baseline_by_name={"w": witness}
    )
    assert result == BaselineResult(name="w", title="witness", validation=0.6, test=0.8)


def test_baselines_learn_from_all_labels_and_some_of_many_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x_NF, y_N = clusters(0)
    labelled = np.arange(0, len(y_N), 20)
    task = BaselineTask.from_arrays(x_NF, labelled, y_N[labelled], classes=4)
    assert task.subsampled is task
    monkeypatch.setattr("secure_apfed.baselines.interface.MAX_ROWS", 100)
    few = task.subsampled
    assert (few.labelled_features == task.labelled_features).all()
    assert (few.labels == task.labels).all()
    others = few.features[len(labelled) :]
    assert len({*map(bytes, others)} & {*map(bytes, np.delete(x_NF, labelled, axis=0))}) == 84
    assert (few.features == task.subsampled.features).all()
    assert few.subsampled is few
    assert accuracy(choose_baseline(task), few, (x_NF, y_N)) > 0.9
    every = BaselineTask.from_arrays(x_NF, np.arange(len(y_N)), y_N, classes=4)
    assert every.subsampled is every


def test_models_that_cannot_be_fitted_leave_nothing_to_choose() -> None:
    class Unfit(Witness):
        """A baseline that refuses every task."""

        def fit(self, task: BaselineTask) -> Predictor:
            raise ModelError("too few rows")

    task = BaselineTask.from_arrays(rows(20), np.arange(10), np.arange(10) % 2, classes=2)
    with pytest.raises(ModelError, match="no local model can be fitted"):
        choose_baseline(task, candidates=[Unfit()])


def test_labels_are_held_out_once_for_the_prior_and_the_report() -> None:
    witness = Witness(*[True] * 30)
    task = BaselineTask.from_arrays(rows(20), np.arange(10), np.arange(10) % 2, classes=2)
    with pytest.MonkeyPatch.context() as patch, cache_fits():
        patch.setattr("secure_apfed.baselines.BASELINES", {"witness": witness})
        assert choose_baseline(task).name == "witness"
        folds = len(witness.tasks)
        for again in (task, replace(task)):
            compare_baselines(
                again, rows(30)[20:], np.arange(20, 30) % 2, baseline_by_name={"witness": witness}
            )
        assert len(witness.tasks) == folds, "what predicts test rows was fitted already"
        other = replace(task, train=TrainSettings(learning_rate=0.5))
        assert choose_baseline(other).name == "witness"
        assert len(witness.tasks) == folds, "it reads no settings of the run"
        own = OwnWitness(*[True] * 30)
        own.name = "own"
        patch.setattr("secure_apfed.baselines.BASELINES", {"own": own})
        assert [choose_baseline(one).name for one in (task, other, task)] == ["own"] * 3
        assert len(own.tasks) == 2 * folds, "the run's own network trains otherwise"


def test_a_baseline_that_cannot_be_fitted_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    task, _, _ = blobs(24)

    class Diverges(Witness):
        def fit(self, task: BaselineTask) -> Predictor:
            raise ModelError("diverged")

    table = {"diverges": Diverges(), "ridge": BASELINES["ridge"]}
    monkeypatch.setattr("secure_apfed.baselines.BASELINES", table)
    assert choose_baseline(task).name == "ridge"


def test_test_labels_choose_nothing() -> None:
    task, x, y = blobs(24)
    truly = compare_baselines(task, x, y, baseline_by_name=FAST)
    mixed = compare_baselines(
        task, x, np.random.default_rng(0).permutation(y), baseline_by_name=FAST
    )
    assert [result.validation for result in truly] == [result.validation for result in mixed]
    assert pick_best(truly).name == pick_best(mixed).name
    assert [result.test for result in truly] != [result.test for result in mixed]
    assert truly == compare_baselines(task, x, y, baseline_by_name=FAST)
    assert [result.name for result in truly] == list(FAST)
    images = replace(task, shape=(1, 2, 3))  # flat rows are the same
    assert compare_baselines(images, x, y, baseline_by_name=FAST) == truly


def test_one_label_a_class_leaves_none_to_choose_by_and_the_first_of_equals_is_best() -> None:
    task, x, y = blobs(4)
    results = compare_baselines(task, x, y, baseline_by_name=FAST)
    assert all(result.validation is None for result in results)
    assert pick_best(results).name == next(iter(FAST))
    results = [
        BaselineResult(name=name, title=name, validation=validation, test=test)
        for name, validation, test in (("a", None, 1.0), ("b", 0.5, 0.2), ("c", 0.5, 0.9))
    ]
    assert pick_best(results).name == "b"


def test_parts_follow_from_the_seed_and_leave_every_class_a_label() -> None:
    labels = np.arange(20) % 10  # as many parts as the rarest class has labels
    parts = split_folds(labels, 5, 0)
    assert [sorted(labels[part].tolist()) for part in parts] == [list(range(10))] * 2
    labels = np.arange(20) % 2
    first = [part.tolist() for part in split_folds(labels, 5, 0)]
    assert first == [part.tolist() for part in split_folds(labels, 5, 0)]
    assert first != [part.tolist() for part in split_folds(labels, 5, 1)]
    labels = np.arange(ENOUGH_LABELS) % 4
    (part,) = split_folds(labels, 5, 0)
    assert len(part) == ENOUGH_LABELS // 5
    assert set(np.bincount(labels[part]).tolist()) == {len(part) // 4}


@pytest.mark.parametrize("folds", [2, 3, 5])
def test_parts_leave_every_class_a_label(folds: int) -> None:
    labels = np.array([0] + [1] * 5 + [2] * 6 + [3] * 8)
    parts = split_folds(labels, folds, 0)
    held = np.sort(np.concatenate(parts))
    sizes = [len(part) for part in parts]
    assert len(parts) == folds
    assert held.tolist() == list(range(1, 20)), "each label once, but the only one of its class"
    assert all(set(np.delete(labels, part).tolist()) == {0, 1, 2, 3} for part in parts)
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("names", [("wrong", "right"), ("right", "wrong")])
def test_the_best_on_labels_held_out_is_chosen(names: tuple[str, str]) -> None:
    """Whichever stands first among equals."""
    task = BaselineTask.from_arrays(rows(10), np.arange(10), np.arange(10) % 2, classes=2)
    witnesses = {name: Witness(*[name == "right"] * 20) for name in names}
    for name, witness in witnesses.items():
        witness.name = name  # by which its fits are kept
    assert choose_baseline(task, candidates=witnesses.values()) is witnesses["right"]

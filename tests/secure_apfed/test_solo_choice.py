"""The best solo baseline: chosen by the active's own labels, measured on test rows."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from apfed_experiments.solo import BaselineResult, best, compare
from secure_apfed.errors import ModelError
from secure_apfed.settings.training import TrainSettings
from secure_apfed.solo import BASELINES, Baseline, Predictor, SoloTask
from secure_apfed.solo.choice import FOLDS, chosen
from secure_apfed.solo.interface import ENOUGH_LABELS, FloatArray, IntArray, held_out
from secure_apfed.solo.kept import fits_kept_meanwhile

FAST = {name: BASELINES[name] for name in ("label_spreading", "ridge", "logistic")}


@dataclass(eq=False)
class Witness(Baseline):
    """A baseline that knows the label of a row by its first feature, where `knows` says so.

    It keeps the tasks that it was given.
    """

    name: str
    knows: list[bool]
    tasks: list[SoloTask] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.title = self.name

    def fit(self, task: SoloTask) -> Predictor:
        self.tasks.append(task)
        right = np.arange(len(self.knows)) % 2
        guess = np.where(self.knows, right, 1 - right)
        answers = np.eye(2)[guess]
        return Predictor(lambda features_BF: answers[features_BF[:, 0].astype(int)])


def rows(count: int) -> FloatArray:
    return np.arange(count, dtype=np.float64)[:, None]


def blobs(labels: int, seed: int = 0) -> tuple[SoloTask, FloatArray, IntArray]:
    drawn = np.random.default_rng(seed)
    y = np.arange(200) % 4
    x = 3 * np.eye(4, 6)[y] + drawn.normal(size=(200, 6))
    task = SoloTask.of(x[:120], np.arange(labels), y[:labels], classes=4, seed=seed)
    return task, x[120:], y[120:]


def test_held_out_labels_are_not_in_the_task() -> None:
    witness = Witness("witness", [True] * 30)
    task = SoloTask.of(rows(20), np.arange(10), np.arange(10) % 2, classes=2)
    compare(task, rows(30)[20:], np.arange(20, 30) % 2, baselines={"witness": witness})
    parts = held_out(task.labels, FOLDS, task.seed)
    *validating, last = witness.tasks
    held = [sorted(set(range(10)) - set(task.labelled.tolist())) for task in validating]
    assert held == [part.tolist() for part in parts]
    assert all(len(task.features) == 20 for task in validating)
    assert np.array_equal(last.labelled, task.labelled)


def test_accuracies_are_those_of_held_out_labels_and_of_test_rows() -> None:
    witness = Witness("witness", [True] * 6 + [False] * 4 + [True] * 8 + [False] * 2)
    task = SoloTask.of(rows(10), np.arange(10), np.arange(10) % 2, classes=2)
    (result,) = compare(task, rows(20)[10:], np.arange(10, 20) % 2, baselines={"w": witness})
    assert result == BaselineResult(name="w", title="witness", validation=0.6, test=0.8)


def test_labels_are_held_out_once_for_the_prior_and_the_report() -> None:
    witness = Witness("witness", [True] * 30)
    task = SoloTask.of(rows(20), np.arange(10), np.arange(10) % 2, classes=2)
    with pytest.MonkeyPatch.context() as patch, fits_kept_meanwhile():
        patch.setattr("secure_apfed.solo.choice.BASELINES", {"witness": witness})
        assert chosen(task).name == "witness"
        folds = len(witness.tasks)
        for again in (task, replace(task)):
            compare(again, rows(30)[20:], np.arange(20, 30) % 2, baselines={"witness": witness})
        assert len(witness.tasks) == folds + 2, "only the test rows' fits are made"
        other = replace(task, train=TrainSettings(learning_rate=0.5))
        assert chosen(other).name == "witness"
        assert len(witness.tasks) == 2 * folds + 2, "the run's own network trains otherwise"


def test_a_baseline_that_cannot_be_fitted_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    task, _, _ = blobs(24)

    class Diverges(Witness):
        def fit(self, task: SoloTask) -> Predictor:
            raise ModelError("diverged")

    table = {"diverges": Diverges("diverges", []), "ridge": BASELINES["ridge"]}
    monkeypatch.setattr("secure_apfed.solo.choice.BASELINES", table)
    assert chosen(task).name == "ridge"


def test_test_labels_choose_nothing() -> None:
    task, x, y = blobs(24)
    truly = compare(task, x, y, baselines=FAST)
    mixed = compare(task, x, np.random.default_rng(0).permutation(y), baselines=FAST)
    assert [result.validation for result in truly] == [result.validation for result in mixed]
    assert best(truly).name == best(mixed).name
    assert [result.test for result in truly] != [result.test for result in mixed]
    assert truly == compare(task, x, y, baselines=FAST)
    assert [result.name for result in truly] == list(FAST)


def test_one_label_a_class_leaves_none_to_choose_by_and_the_first_of_equals_is_best() -> None:
    task, x, y = blobs(4)
    results = compare(task, x, y, baselines=FAST)
    assert all(result.validation is None for result in results)
    assert best(results).name == next(iter(FAST))
    results = [
        BaselineResult(name=name, title=name, validation=validation, test=test)
        for name, validation, test in (("a", None, 1.0), ("b", 0.5, 0.2), ("c", 0.5, 0.9))
    ]
    assert best(results).name == "b"


def test_parts_leave_every_class_a_label() -> None:
    labels = np.array([0] + [1] * 5 + [2] * 6 + [3] * 8)
    for folds in (2, 3, 5):
        parts = held_out(labels, folds, 0)
        held = np.sort(np.concatenate(parts))
        assert len(parts) == folds
        assert held.tolist() == list(range(1, 20)), "each label once, but the only one of its class"
        for part in parts:
            assert set(np.delete(labels, part).tolist()) == {0, 1, 2, 3}
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1


def test_parts_follow_from_the_seed_and_are_as_many_as_the_rarest_class_has_labels() -> None:
    labels = np.arange(20) % 10
    parts = held_out(labels, 5, 0)
    assert [sorted(labels[part].tolist()) for part in parts] == [list(range(10))] * 2
    labels = np.arange(20) % 2
    first = [part.tolist() for part in held_out(labels, 5, 0)]
    assert first == [part.tolist() for part in held_out(labels, 5, 0)]
    assert first != [part.tolist() for part in held_out(labels, 5, 1)]
    labels = np.arange(ENOUGH_LABELS) % 4
    (part,) = held_out(labels, 5, 0)
    assert len(part) == ENOUGH_LABELS // 5
    assert set(np.bincount(labels[part]).tolist()) == {len(part) // 4}

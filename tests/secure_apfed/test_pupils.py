"""Pupils: models of the active's features that learn from what came back in an exchange."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from secure_apfed.baselines import BaselineTask, Predictor, find_baseline
from secure_apfed.baselines.classical import fit_ridge, fit_ridges
from secure_apfed.baselines.interface import FloatArray
from secure_apfed.methods.local_models import ReceivedSums, fit_local_models
from secure_apfed.methods.sum_students import SumStudent, fit_sum_students, label_rows

ROWS = 1000
LABELLED = 30
TEST = 1000


class Rows:
    """Rows of three classes whose features tell little, and sums that tell the class.

    Attributes:
        task: the training rows; truth, received: of each of them; test, test_truth: new rows.
    """

    def __init__(self, *, seed: int = 0, tell: float = 3.0) -> None:
        draw = np.random.default_rng(seed)
        truth = draw.integers(0, 3, ROWS + TEST)
        features = draw.normal(size=(ROWS + TEST, 12)) + 0.8 * np.eye(3, 12)[truth]
        received = draw.normal(size=(ROWS, 4)) + tell * np.eye(3, 4)[truth[:ROWS]]
        self.task = BaselineTask.from_arrays(
            features[:ROWS], np.arange(LABELLED), truth[:LABELLED], classes=3, seed=seed
        )
        self.received = received
        self.test = features[ROWS:]
        self.test_truth = truth[ROWS:]

    def accuracy(self, predictor: Predictor) -> float:
        return float((predictor.compute_scores(self.test).argmax(1) == self.test_truth).mean())


def taught_by(pupils: list[SumStudent], name: str) -> SumStudent:
    return next(pupil for pupil in pupils if pupil.teacher_name == name)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_pupil_is_better_where_the_sums_tell_the_class(seed: int) -> None:
    rows = Rows(seed=seed)
    alone = find_baseline("ridge").fit(rows.task)
    pupil = taught_by(fit_sum_students(rows.task, rows.received), "their mean")
    assert rows.accuracy(pupil.predictor) > rows.accuracy(alone) + 0.03


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_noise_in_the_sums_costs_little(seed: int) -> None:
    rows = Rows(seed=seed, tell=0.0)
    alone = find_baseline("ridge").fit(rows.task)
    pupil = taught_by(fit_sum_students(rows.task, rows.received), "their mean")
    assert rows.accuracy(pupil.predictor) > rows.accuracy(alone) - 0.1


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_held_out_labels_judge_a_pupil_as_new_rows_do(seed: int) -> None:
    """A pupil that learnt from the sums of held-out rows would be right about nearly all."""
    rows = Rows(seed=seed, tell=8.0)
    draw = np.random.default_rng(seed)
    noise = replace(rows.task, features=draw.normal(size=rows.task.features.shape))
    for pupil in fit_sum_students(noise, rows.received):
        assert pupil.held_out_scores is not None
        right = (pupil.held_out_scores.scores.argmax(1) == pupil.held_out_scores.truth).mean()
        assert right < 0.65, (
            f"features are noise, and {pupil.teacher_name} is right about {right:.2f}"
        )


def test_rows_for_which_nothing_came_back_are_not_taught() -> None:
    """Read what stands in their features by no teacher, and by no pupil."""
    rows = Rows()
    received = nothing_for(rows, np.arange(500, ROWS))
    other = replace(rows.task, features=rows.task.features.copy())
    other.features[500:] = other.features[500:][::-1]
    before = fit_sum_students(rows.task, received)
    after = fit_sum_students(other, received)
    for pupil, again in zip(before, after, strict=True):
        said = pupil.predictor.compute_scores(rows.test)
        np.testing.assert_allclose(again.predictor.compute_scores(rows.test), said, atol=1e-9)


def test_labelled_rows_without_an_answer_teach_and_judge() -> None:
    rows = Rows()
    received = nothing_for(rows, np.arange(10))
    for pupil in fit_sum_students(rows.task, received):
        assert pupil.held_out_scores is not None
        assert len(pupil.held_out_scores.truth) == LABELLED


def nothing_for(rows: Rows, unanswered: np.ndarray) -> FloatArray:
    received = rows.received.copy()
    received[unanswered] = np.nan
    return received


UNANSWERED: Mapping[str, Callable[[Rows], FloatArray]] = {
    "nobody": lambda rows: nothing_for(rows, np.arange(ROWS)),
    "no labelled row": lambda rows: nothing_for(rows, np.arange(LABELLED)),
    "one class": lambda rows: nothing_for(rows, rows.task.labelled_indices[rows.task.labels > 0]),
    "no numbers": lambda rows: rows.received[:, :0],
}


@pytest.mark.parametrize("case", UNANSWERED)
def test_no_pupil_is_taught_of_too_few_labels(case: str) -> None:
    rows = Rows()
    assert fit_sum_students(rows.task, UNANSWERED[case](rows)) == []


@pytest.mark.parametrize("case", UNANSWERED)
def test_local_models_stay_where_no_pupil_is_taught(case: str) -> None:
    rows = Rows()
    received = UNANSWERED[case](rows)
    made = fit_local_models(nn.Identity(), rows.task, combination="mean", received_UD=received)
    assert made.used_names
    assert not any("pupil" in name for name in made.used_names)


def test_the_kept_pupil_says_what_it_said() -> None:
    rows = Rows()
    received = rows.received
    made = fit_local_models(
        nn.Identity(), rows.task, combination="best", inputs=["pupils"], received_UD=received
    )
    pupils = fit_sum_students(rows.task, received)
    (used,) = made.used_names
    pupil = taught_by(pupils, used.removeprefix("pupil of x taught by "))
    said = made.networks(torch.from_numpy(rows.test), None)[0].exp().numpy()
    scores = pupil.predictor.compute_scores(rows.test).clip(min=0)
    np.testing.assert_allclose(said, scores / scores.sum(1, keepdims=True), atol=1e-6)


def test_labels_of_rows_are_probabilities_or_nothing() -> None:
    rows = Rows()
    silent = Predictor(lambda rows_BF: np.zeros((len(rows_BF), 3)))
    assert not label_rows(silent, rows.task).any()
    ridge = find_baseline("ridge").fit(rows.task)
    np.testing.assert_allclose(label_rows(ridge, rows.task).sum(axis=1), 1)


def test_regressions_that_are_fitted_together_are_those_of_stacked_targets() -> None:
    rows = Rows()
    taught = np.arange(ROWS)
    draw = np.random.default_rng(0)
    targets = [draw.random((ROWS, 3)), draw.random((ROWS, 3))]
    together = fit_ridges(rows.task, taught, targets)
    stacked = fit_ridge(rows.task, taught, np.hstack(targets)).compute_scores(rows.test)
    said = np.hstack([predictor.compute_scores(rows.test) for predictor in together])
    np.testing.assert_allclose(said, stacked, atol=1e-12)


# What came back.


def test_received_sums_are_averaged_over_the_answers_of_a_row() -> None:
    received = ReceivedSums(torch.tensor([3, 0, 1, 2, -1]), person_count=5)
    received.add_sums(torch.tensor([0, 3]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    received.add_sums(torch.tensor([3, 1]), torch.tensor([[5.0, 8.0], [7.0, 7.0]]))
    nothing = [np.nan, np.nan]
    expected = [[4, 6], [1, 2], [7, 7], nothing, nothing]
    np.testing.assert_array_equal(received.average_sums(), expected)


def test_sums_of_rows_that_no_model_learns_from_are_dropped() -> None:
    received = ReceivedSums(torch.tensor([4, 1]), person_count=6)
    received.add_sums(torch.tensor([0, 4, 5]), torch.tensor([[1.0], [2.0], [3.0]]))
    np.testing.assert_array_equal(received.average_sums(), [[2], [np.nan]])
    assert {tensor.shape[0] for tensor in received.tensors().values()} == {2}


def test_received_sums_go_through_a_checkpoint() -> None:
    positions = torch.arange(3)
    received = ReceivedSums(positions, person_count=3)
    received.add_sums(torch.tensor([0, 2]), torch.ones(2, 4))
    again = ReceivedSums(positions, person_count=3)
    again.load_tensors(received.tensors())
    np.testing.assert_array_equal(again.average_sums(), received.average_sums())
    empty = ReceivedSums(positions, person_count=3)
    again.load_tensors(empty.tensors())
    assert again.average_sums().shape == (3, 0)


# Models of the features alone stay where they are surely better.


def test_models_without_help_replace_pupils_that_are_surely_worse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = Rows(tell=8.0)

    def mistake_classes(predictor: Predictor, task: BaselineTask) -> FloatArray:
        return np.roll(label_rows(predictor, task), 1, axis=1)

    monkeypatch.setattr("secure_apfed.methods.sum_students.label_rows", mistake_classes)
    received = rows.received
    made = fit_local_models(nn.Identity(), rows.task, combination="best", received_UD=received)
    assert not made.is_helped
    assert all(name.endswith(" of x") for name in made.used_names)
    kept = fit_local_models(
        nn.Identity(), rows.task, combination="best", inputs=["pupils"], received_UD=received
    )
    assert kept.is_helped


def test_models_with_help_stay_where_they_are_better() -> None:
    rows = Rows(tell=8.0)
    made = fit_local_models(nn.Identity(), rows.task, combination="best", received_UD=rows.received)
    assert made.is_helped

"""Pupils: models of the active's own features, taught by models that also read the received sums.

Run by: the active, alone, after an exchange in which it received sums of the passives' gradients
for its training rows. Such a sum is a projection of the passives' features
(apfed-without-labels.md), and no new row has one. So a teacher, a local model that reads the sums
beside the features, labels all training rows; and a pupil, a ridge regression of the features
alone, learns these labels (D. Lopez-Paz et al., "Unifying distillation and privileged information",
ICLR 2016). Nothing is sent: this is post-processing of the received sums.

Held-out labels measure a pupil as new rows would: neither label nor sum of a held-out row is used
to train it.

Letters: U training rows, T of them for which something came back, n labelled rows, F features, D
numbers of a sum, K classes.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from secure_apfed.errors import DataError, ModelError
from secure_apfed.measures.table import Scored, probabilities_of
from secure_apfed.solo import FOLDS, Baseline, Predictor, SoloTask, list_local_models
from secure_apfed.solo.classical import fit_ridges
from secure_apfed.solo.fitted import View
from secure_apfed.solo.interface import MIN_CLASSES, FloatArray, IntArray, split_folds

BoolArray: TypeAlias = NDArray[np.bool_]

TEACHERS = ("mixmatch", "label_spreading_ridge", "extra_trees")
"""Chosen on seven sets, three seeds each (apfed-without-labels.md). Their mean teaches, too."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Pupil:
    """A model of the active's features that learnt the labels of a teacher.

    Attributes:
        taught_by: the name of the teacher.
        predictor: predicts from the features, (B, F) -> (B, K).
        held_out: its predictions for held-out labelled rows, trained without their labels; None:
            there are none.
    """

    taught_by: str
    predictor: Predictor = field(repr=False)
    held_out: Scored | None = field(repr=False)


@dataclass(frozen=True, kw_only=True, eq=False)
class _TeacherInputs:
    """The inputs of a teacher: own features and the received sum, for the rows with a sum.

    Attributes:
        task: these rows, (T, F + D), and the labels of some.
        answered: the rows, (T,), of U.
        is_answered_n: whether something came back for a labelled row, (n,).
    """

    task: SoloTask
    answered: IntArray
    is_answered_n: BoolArray
    rows: int

    @classmethod
    def from_sums(cls, task: SoloTask, received_UD: FloatArray, answered: IntArray) -> Self:
        """Concatenate features and received sums of the rows `answered`, for which a sum was
        received.
        """
        task_of_answered = task.select_rows(answered)
        inputs_TC = np.hstack(
            [_standardise_rows(task_of_answered.features), _standardise_rows(received_UD[answered])]
        )
        return cls(
            task=replace(task_of_answered, features=inputs_TC, shape=inputs_TC.shape[1:]),
            answered=answered,
            is_answered_n=np.isin(task.labelled, answered),
            rows=len(task.features),
        )

    def find_labels(self, part: IntArray) -> IntArray:
        """Return the indices, among labels of answered rows, of this part of the task's labels."""
        place_n = np.cumsum(self.is_answered_n) - 1
        return place_n[part[self.is_answered_n[part]]]

    def label_by(self, teacher: Predictor) -> FloatArray:
        """Return a teacher's class scores for all rows, (U, K)."""
        likely_UK = np.zeros((self.rows, self.task.classes))
        likely_UK[self.answered] = label_rows(teacher, self.task)
        return likely_UK


@dataclass(frozen=True, kw_only=True, eq=False)
class _Teaching:
    """The labels that a teacher gives all rows.

    Attributes:
        by_part: probabilities (U, K) by the teacher that knows no label of a part of the labelled
            rows, one table for each part; the last is by the teacher that knows all labels. 0 in
            rows for which nothing came back.
    """

    name: str
    by_part: tuple[FloatArray, ...] = field(repr=False)

    @classmethod
    def from_baseline(
        cls, baseline: Baseline, read: "_TeacherInputs", parts: Sequence[IntArray]
    ) -> Self:
        """Fit a teacher of this kind once without each part of the labels, and once with all."""
        tasks = [*(read.task.drop_labels(read.find_labels(part)) for part in parts), read.task]
        fitted = baseline.fit_together(tasks)
        return cls(name=baseline.name, by_part=tuple(read.label_by(teacher) for teacher in fitted))

    @classmethod
    def from_average(cls, teachings: Sequence[Self]) -> Self:
        tables = zip(*(teaching.by_part for teaching in teachings), strict=True)
        return cls(name="their mean", by_part=tuple(np.mean(table, axis=0) for table in tables))


def label_rows(predictor: Predictor, task: SoloTask) -> FloatArray:
    """Return the probability of each class for each row of a task, (U, K); 0 where the model
    abstains.
    """
    scores_UK = predictor.compute_scores(task.features)
    return np.where(scores_UK.any(axis=1, keepdims=True), probabilities_of(scores_UK), 0.0)


def teach_pupils(task: SoloTask, received_UD: FloatArray) -> list[Pupil]:
    """Fit a teacher of each kind, and a pupil of each and of their mean.

    Args:
        task: the active's training rows and labels.
        received_UD: the mean received sum for each row, (U, D); NaN where there is none.

    Returns no pupil if the labelled rows with a sum have fewer than two classes.
    """
    if not received_UD.shape[1]:
        return []
    answered = np.flatnonzero(np.isfinite(received_UD).all(axis=1))
    answered_labels = task.labels[np.isin(task.labelled, answered)]
    if len(np.unique(answered_labels)) < MIN_CLASSES:
        return []
    read = _TeacherInputs.from_sums(task, received_UD, answered)
    parts = split_folds(task.labels, FOLDS, task.seed)
    teachings: list[_Teaching] = []
    for baseline in list_local_models():
        if baseline.name not in TEACHERS:
            continue
        with suppress(ModelError, DataError):  # without a part, too few classes may be left
            teachings.append(_Teaching.from_baseline(baseline, read, parts))
    if len(teachings) > 1:
        teachings.append(_Teaching.from_average(teachings))
    return _fit_pupils(task, teachings, parts) if teachings else []


def _fit_pupils(
    task: SoloTask, teachings: Sequence[_Teaching], parts: Sequence[IntArray]
) -> list[Pupil]:
    """Fit the pupils of all teachers: for validation without each part of the
    labels, and with all.

    `parts`: indices of the labels that each fold leaves out.
    """
    scores: list[list[FloatArray]] = [[] for _ in teachings]
    for number, part in enumerate(parts):
        pupils = _fit_without(task, teachings, part, number)
        for pupil_scores, pupil in zip(scores, pupils, strict=True):
            pupil_scores.append(pupil.compute_scores(task.labelled_rows[part]))
    pupils = _fit_without(task, teachings, np.arange(0), len(parts))
    truth_n = task.labels[np.concatenate(parts)] if parts else None
    return [
        Pupil(
            taught_by=teaching.name,
            predictor=pupil,
            held_out=None
            if truth_n is None
            else Scored(truth=truth_n, scores=probabilities_of(np.concatenate(pupil_scores))),
        )
        for teaching, pupil, pupil_scores in zip(teachings, pupils, scores, strict=True)
    ]


def _fit_without(
    task: SoloTask, teachings: Sequence[_Teaching], part: IntArray, number: int
) -> list[Predictor]:
    """Fit a pupil of each teacher to all rows except a part of the labelled ones.

    `number`: of the fold, which seeds the networks.
    """
    tables = []
    for teaching in teachings:
        likely_UK = teaching.by_part[number].copy()
        likely_UK[task.labelled] = task.indicators
        likely_UK[task.labelled[part]] = 0
        tables.append(likely_UK)
    rows = np.flatnonzero(np.all([table.any(axis=1) for table in tables], axis=0))
    return fit_ridges(task, rows, [likely_UK[rows] for likely_UK in tables])


def _standardise_rows(rows_TF: FloatArray) -> FloatArray:
    return View.from_rows(rows_TF, first=0, end=rows_TF.shape[1]).standardise_columns(rows_TF)

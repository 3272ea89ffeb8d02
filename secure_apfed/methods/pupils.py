"""Pupils: models of the active's own features, taught by models that also read the received sums.

Run by: the active, alone, after an exchange in which it received sums of the passives' gradients
for its training rows. Such a sum is a projection of the passives' features
(apfed-without-labels.md), and no new row has one. So a teacher, a local model that reads the sums
beside the features, labels all training rows. A pupil, a ridge regression on the features alone,
learns these labels (D. Lopez-Paz et al., "Unifying distillation and privileged information", ICLR
2016). Nothing is sent: this is post-processing of the received sums.

Validation rows measure a pupil as new rows would: neither label nor sum of a validation row is used
to train it.

Letters: U training rows, T of them with a received sum, n labelled rows, B any rows, F features, D
numbers of a sum, C = F + D, K classes.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from secure_apfed.baselines import FOLDS, Baseline, BaselineTask, Predictor, list_local_models
from secure_apfed.baselines.classical import fit_ridges
from secure_apfed.baselines.fitted import ColumnView
from secure_apfed.baselines.interface import MIN_CLASSES, FloatArray, IntArray, split_folds
from secure_apfed.errors import DataError, ModelError
from secure_apfed.measures.table import Scored, normalise_scores

BoolArray: TypeAlias = NDArray[np.bool_]

TEACHERS = ("mixmatch", "label_spreading_ridge", "extra_trees")
"""Names of the local models that serve as teachers, chosen on seven data sets, three seeds each
(apfed-without-labels.md). The mean of their labels is one more teacher."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Pupil:
    """A model of the active's features that learnt the labels of a teacher.

    A teacher is a local model that reads the received sums beside the features. New rows have no
    sums, so only its pupil can predict them.

    Attributes:
        taught_by: the name of the teacher.
        predictor: maps features (B, F) to scores (B, K).
        held_out: the scores of validation rows by pupils that were trained without these rows;
            None: there are no validation rows.
    """

    taught_by: str
    predictor: Predictor = field(repr=False)
    held_out: Scored | None = field(repr=False)


@dataclass(frozen=True, kw_only=True, eq=False)
class _TeacherInputs:
    """The inputs of a teacher: the active's features and the received sums, for rows with a sum.

    Attributes:
        task: the T rows with a sum, F features and D numbers of the sum each, and the labels of
            some of these rows.
        answered: the indices of the rows with a sum among all U training rows, (T,).
        is_answered_n: whether a labelled row has a sum, for all n labelled rows.
        rows: U, number of all training rows.
    """

    task: BaselineTask
    answered: IntArray
    is_answered_n: BoolArray
    rows: int

    @classmethod
    def from_sums(cls, task: BaselineTask, received_UD: FloatArray, answered: IntArray) -> Self:
        """Concatenate the standardised features and sums of the T rows with a sum.

        `task`: all U training rows with their features and labels. `received_UD`: the received
        sums, D numbers each. `answered`: indices of the rows with a sum, (T,).
        """
        task_of_answered = task.select_rows(answered)
        features_TF = _standardise_rows(task_of_answered.features)
        sums_TD = _standardise_rows(received_UD[answered])
        inputs_TC = np.hstack([features_TF, sums_TD])
        return cls(
            task=replace(task_of_answered, features=inputs_TC, shape=inputs_TC.shape[1:]),
            answered=answered,
            is_answered_n=np.isin(task.labelled_indices, answered),
            rows=len(task.features),
        )

    def find_labels(self, fold: IntArray) -> IntArray:
        """Translate a fold to indices among the labelled rows with a sum.

        `fold`: indices among all n labelled rows. Those without a sum are left out.
        """
        index_among_answered_n = np.cumsum(self.is_answered_n) - 1
        return index_among_answered_n[fold[self.is_answered_n[fold]]]

    def label_all_rows(self, teacher: Predictor) -> FloatArray:
        """Return a teacher's probabilities of K classes for all rows, (U, K).

        Rows without a sum, which a teacher cannot read, are zeros.
        """
        likely_UK = np.zeros((self.rows, self.task.classes))
        likely_UK[self.answered] = label_rows(teacher, self.task)
        return likely_UK


@dataclass(frozen=True, kw_only=True, eq=False)
class _Teaching:
    """The labels that a teacher gives all rows.

    Attributes:
        name: the teacher's name.
        by_fold: class probabilities (U, K) of all U rows, one array for each fold of the labelled
            rows, by the teacher that was fitted without the labels of that fold. The last array is
            by the teacher fitted to all labels. Rows without a sum are zeros.
    """

    name: str
    by_fold: tuple[FloatArray, ...] = field(repr=False)

    @classmethod
    def from_baseline(
        cls, baseline: Baseline, inputs: "_TeacherInputs", folds: Sequence[IntArray]
    ) -> Self:
        """Fit a teacher of one kind, once without the labels of each fold, and once with all.

        `baseline`: the kind of teacher. `inputs`: the rows that it reads. `folds`: for each fold,
        the indices of its rows among all labelled rows.
        """
        tasks = [inputs.task.drop_labels(inputs.find_labels(fold)) for fold in folds]
        teachers = baseline.fit_together([*tasks, inputs.task])
        by_fold = tuple(inputs.label_all_rows(teacher) for teacher in teachers)
        return cls(name=baseline.name, by_fold=by_fold)

    @classmethod
    def from_average(cls, teachings: Sequence[Self]) -> Self:
        """Return the mean of several teachers' labels, as the labels of one more teacher."""
        labels_by_fold = zip(*(teaching.by_fold for teaching in teachings), strict=True)
        return cls(
            name="their mean",
            by_fold=tuple(np.mean(labels, axis=0) for labels in labels_by_fold),
        )


def label_rows(predictor: Predictor, task: BaselineTask) -> FloatArray:
    """Return a model's probabilities of K classes for each of a task's rows, (U, K).

    A row of zeros means that the model makes no prediction for it.
    """
    scores_UK = predictor.compute_scores(task.features)
    return np.where(scores_UK.any(axis=1, keepdims=True), normalise_scores(scores_UK), 0.0)


def teach_pupils(task: BaselineTask, received_UD: FloatArray) -> list[Pupil]:
    """Fit a teacher of each kind in `TEACHERS`, and return a pupil of each and of their mean.

    A teacher reads features and received sums. Its pupil learns its labels from features alone.

    Args:
        task: the active's training rows and labels.
        received_UD: the mean received sum, D numbers for each of U rows; NaN where there is none.

    Returns an empty list if the labelled rows with a sum have fewer than two classes, or if no
    teacher can be fitted.
    """
    no_sum_received = received_UD.shape[1] == 0
    if no_sum_received:
        return []
    answered = np.flatnonzero(np.isfinite(received_UD).all(axis=1))
    answered_labels = task.labels[np.isin(task.labelled_indices, answered)]
    if len(np.unique(answered_labels)) < MIN_CLASSES:
        return []
    inputs = _TeacherInputs.from_sums(task, received_UD, answered)
    folds = split_folds(task.labels, FOLDS, task.seed)
    teachings: list[_Teaching] = []
    for baseline in list_local_models():
        if baseline.name not in TEACHERS:
            continue
        # A teacher that cannot be fitted is skipped: without a fold, a class may have no label.
        with suppress(ModelError, DataError):
            teachings.append(_Teaching.from_baseline(baseline, inputs, folds))
    if len(teachings) > 1:
        teachings.append(_Teaching.from_average(teachings))
    return _fit_pupils(task, teachings, folds) if teachings else []


def _fit_pupils(
    task: BaselineTask, teachings: Sequence[_Teaching], folds: Sequence[IntArray]
) -> list[Pupil]:
    """Fit a pupil of each teacher to all rows, and measure it on validation rows.

    The measurement is a cross-validation: other pupils are fitted without each fold.

    `teachings`: the labels that each teacher gives. `folds`: for each fold, the indices of its rows
    among all labelled rows.
    """
    fold_scores: list[list[FloatArray]] = [[] for _ in teachings]
    for fold_number, fold in enumerate(folds):
        fold_pupils = _fit_without(task, teachings, fold, fold_number)
        for scores, pupil in zip(fold_scores, fold_pupils, strict=True):
            scores.append(pupil.compute_scores(task.labelled_features[fold]))
    # The pupils that predict are fitted to all rows. Their teachers were fitted to all labels, and
    # stand last in `by_fold`.
    nothing_left_out = np.arange(0)
    predictors = _fit_without(task, teachings, nothing_left_out, fold_number=len(folds))
    truth_n = task.labels[np.concatenate(folds)] if folds else None
    pupils = []
    for teaching, predictor, scores in zip(teachings, predictors, fold_scores, strict=True):
        held_out = None
        if truth_n is not None:
            held_out = Scored(truth=truth_n, scores=normalise_scores(np.concatenate(scores)))
        pupils.append(Pupil(taught_by=teaching.name, predictor=predictor, held_out=held_out))
    return pupils


def _fit_without(
    task: BaselineTask, teachings: Sequence[_Teaching], left_out: IntArray, fold_number: int
) -> list[Predictor]:
    """Fit a pupil of each teacher without some labelled rows.

    A pupil learns the true label of a labelled row, and its teacher's label of any other row. All
    pupils learn the same rows: those that have a label from every teacher, or a true one.

    Args:
        task: the active's training rows and labels.
        teachings: the labels that each teacher gives.
        left_out: the rows to leave out, as indices among the labelled rows.
        fold_number: index in `by_fold` of the labels by teachers that did not see these rows.
    """
    targets = []
    for teaching in teachings:
        likely_UK = teaching.by_fold[fold_number].copy()
        likely_UK[task.labelled_indices] = task.one_hot_labels
        likely_UK[task.labelled_indices[left_out]] = 0  # zeros: no target
        targets.append(likely_UK)
    has_target_U = np.all([likely_UK.any(axis=1) for likely_UK in targets], axis=0)
    rows = np.flatnonzero(has_target_U)
    return fit_ridges(task, rows, [likely_UK[rows] for likely_UK in targets])


def _standardise_rows(rows_TF: FloatArray) -> FloatArray:
    """Return the rows with every column brought to mean 0 and variance 1."""
    return ColumnView.from_rows(
        rows_TF, first_column=0, end_column=rows_TF.shape[1]
    ).standardise_columns(rows_TF)

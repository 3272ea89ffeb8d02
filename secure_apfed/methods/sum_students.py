"""Sum students: models of the active's own features, taught by models that also read the received
sums. Settings and results call them pupils.

Run by: the active, alone, after an exchange in which it received sums of the passives' gradients
for its training rows. Such a sum is a projection of the passives' features
(apfed-without-labels.md), and no new row has one. So a teacher, a local model that reads the sums
beside the features, labels all training rows. A sum student, a ridge regression on the features
alone, learns these labels (D. Lopez-Paz et al., "Unifying distillation and privileged information",
ICLR 2016). Nothing is sent: this is post-processing of the received sums.

Validation rows measure a student as new rows would: neither label nor sum of a validation row is
used to train it.

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
class SumStudent:
    """A model of the active's features that learnt the labels of a teacher.

    A teacher is a local model that reads the received sums beside the features. New rows have no
    sums, so only its student can predict them.

    Attributes:
        teacher_name: the name of the teacher.
        predictor: maps features (B, F) to scores (B, K).
        held_out_scores: the scores of validation rows by students that were trained without these
            rows; None: there are no validation rows.
    """

    teacher_name: str
    predictor: Predictor = field(repr=False)
    held_out_scores: Scored | None = field(repr=False)


@dataclass(frozen=True, kw_only=True, eq=False)
class _TeacherInputs:
    """The inputs of a teacher: the active's features and the received sums, for rows with a sum.

    Attributes:
        task: the T rows with a sum, F features and D numbers of the sum each, and the labels of
            some of these rows.
        rows_with_sum: the indices of the rows with a sum among all U training rows, (T,).
        has_sum_n: whether a labelled row has a sum, for all n labelled rows.
        row_count: U, number of all training rows.
    """

    task: BaselineTask
    rows_with_sum: IntArray
    has_sum_n: BoolArray
    row_count: int

    @classmethod
    def from_sums(
        cls, task: BaselineTask, received_UD: FloatArray, rows_with_sum: IntArray
    ) -> Self:
        """Concatenate the standardised features and sums of the T rows with a sum.

        `task`: all U training rows with their features and labels. `received_UD`: the received
        sums, D numbers each. `rows_with_sum`: indices of the rows with a sum, (T,).
        """
        task_of_answered = task.select_rows(rows_with_sum)
        features_TF = _standardise_rows(task_of_answered.features)
        sums_TD = _standardise_rows(received_UD[rows_with_sum])
        inputs_TC = np.hstack([features_TF, sums_TD])
        return cls(
            task=replace(task_of_answered, features=inputs_TC, shape=inputs_TC.shape[1:]),
            rows_with_sum=rows_with_sum,
            has_sum_n=np.isin(task.labelled_indices, rows_with_sum),
            row_count=len(task.features),
        )

    def find_labels(self, fold: IntArray) -> IntArray:
        """Translate a fold to indices among the labelled rows with a sum.

        `fold`: indices among all n labelled rows. Those without a sum are left out.
        """
        index_among_answered_n = np.cumsum(self.has_sum_n) - 1
        return index_among_answered_n[fold[self.has_sum_n[fold]]]

    def label_all_rows(self, teacher: Predictor) -> FloatArray:
        """Return a teacher's probabilities of K classes for all rows, (U, K).

        Rows without a sum, which a teacher cannot read, are zeros.
        """
        likely_UK = np.zeros((self.row_count, self.task.classes))
        likely_UK[self.rows_with_sum] = label_rows(teacher, self.task)
        return likely_UK


@dataclass(frozen=True, kw_only=True, eq=False)
class _TeacherLabels:
    """The labels that a teacher gives all rows.

    Attributes:
        teacher_name: the teacher's name.
        likely_UK_by_fold: class probabilities (U, K) of all U rows, one array for each fold of the
            labelled rows, by the teacher that was fitted without the labels of that fold. The last
            array is by the teacher fitted to all labels. Rows without a sum are zeros.
    """

    teacher_name: str
    likely_UK_by_fold: tuple[FloatArray, ...] = field(repr=False)  # noqa: N815

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
        return cls(teacher_name=baseline.name, likely_UK_by_fold=by_fold)

    @classmethod
    def from_average(cls, labels_of_teachers: Sequence[Self]) -> Self:
        """Return the mean of several teachers' labels, as the labels of one more teacher."""
        labels_by_fold = zip(
            *(teaching.likely_UK_by_fold for teaching in labels_of_teachers), strict=True
        )
        return cls(
            teacher_name="their mean",
            likely_UK_by_fold=tuple(np.mean(labels, axis=0) for labels in labels_by_fold),
        )


def label_rows(predictor: Predictor, task: BaselineTask) -> FloatArray:
    """Return a model's probabilities of K classes for each of a task's rows, (U, K).

    A row of zeros means that the model makes no prediction for it.
    """
    scores_UK = predictor.compute_scores(task.features)
    return np.where(scores_UK.any(axis=1, keepdims=True), normalise_scores(scores_UK), 0.0)


def fit_sum_students(task: BaselineTask, received_UD: FloatArray) -> list[SumStudent]:
    """Fit a teacher of each kind in `TEACHERS`, and return a student of each and of their mean.

    A teacher reads features and received sums. Its student learns its labels from features alone.

    Args:
        task: the active's training rows and labels.
        received_UD: the mean received sum, D numbers for each of U rows; NaN where there is none.

    Returns an empty list if the labelled rows with a sum have fewer than two classes, or if no
    teacher can be fitted.
    """
    no_sum_received = received_UD.shape[1] == 0
    if no_sum_received:
        return []
    rows_with_sum = np.flatnonzero(np.isfinite(received_UD).all(axis=1))
    labels_with_sum = task.labels[np.isin(task.labelled_indices, rows_with_sum)]
    if len(np.unique(labels_with_sum)) < MIN_CLASSES:
        return []
    inputs = _TeacherInputs.from_sums(task, received_UD, rows_with_sum)
    folds = split_folds(task.labels, FOLDS, task.seed)
    labels_of_teachers: list[_TeacherLabels] = []
    for baseline in list_local_models():
        if baseline.name not in TEACHERS:
            continue
        # A teacher that cannot be fitted is skipped: without a fold, a class may have no label.
        with suppress(ModelError, DataError):
            labels_of_teachers.append(_TeacherLabels.from_baseline(baseline, inputs, folds))
    if len(labels_of_teachers) > 1:
        labels_of_teachers.append(_TeacherLabels.from_average(labels_of_teachers))
    return _fit_measured_students(task, labels_of_teachers, folds) if labels_of_teachers else []


def _fit_measured_students(
    task: BaselineTask, labels_of_teachers: Sequence[_TeacherLabels], folds: Sequence[IntArray]
) -> list[SumStudent]:
    """Fit a student of each teacher to all rows, and measure it on validation rows.

    The measurement is a cross-validation: other students are fitted without each fold.

    `labels_of_teachers`: the labels that each teacher gives. `folds`: for each fold, the indices of
    its rows among all labelled rows.
    """
    fold_scores: list[list[FloatArray]] = [[] for _ in labels_of_teachers]
    for fold_number, fold in enumerate(folds):
        fold_students = _fit_students_without(task, labels_of_teachers, fold, fold_number)
        for scores, fold_student in zip(fold_scores, fold_students, strict=True):
            scores.append(fold_student.compute_scores(task.labelled_features[fold]))
    # The students that predict are fitted to all rows. Their teachers were fitted to all labels;
    # their labels stand last in `likely_UK_by_fold`.
    no_rows = np.arange(0)
    predictors = _fit_students_without(task, labels_of_teachers, no_rows, fold_number=len(folds))
    truth_n = task.labels[np.concatenate(folds)] if folds else None
    students = []
    for teacher_labels, predictor, scores in zip(
        labels_of_teachers, predictors, fold_scores, strict=True
    ):
        held_out = None
        if truth_n is not None:
            held_out = Scored(truth=truth_n, scores=normalise_scores(np.concatenate(scores)))
        students.append(
            SumStudent(
                teacher_name=teacher_labels.teacher_name,
                predictor=predictor,
                held_out_scores=held_out,
            )
        )
    return students


def _fit_students_without(
    task: BaselineTask,
    labels_of_teachers: Sequence[_TeacherLabels],
    excluded_labelled: IntArray,
    fold_number: int,
) -> list[Predictor]:
    """Fit a student of each teacher without some labelled rows.

    A student learns the true label of a labelled row, and its teacher's label of any other row. All
    students learn the same rows: those that have a label from every teacher, or a true one.

    Args:
        task: the active's training rows and labels.
        labels_of_teachers: the labels that each teacher gives.
        excluded_labelled: the rows to leave out, as indices among the labelled rows.
        fold_number: index in `likely_UK_by_fold` of the labels by teachers that did not see these
            rows.
    """
    targets = []
    for teacher_labels in labels_of_teachers:
        likely_UK = teacher_labels.likely_UK_by_fold[fold_number].copy()
        likely_UK[task.labelled_indices] = task.one_hot_labels
        likely_UK[task.labelled_indices[excluded_labelled]] = 0  # zeros: no target
        targets.append(likely_UK)
    has_target_U = np.all([likely_UK.any(axis=1) for likely_UK in targets], axis=0)
    rows = np.flatnonzero(has_target_U)
    return fit_ridges(task, rows, [likely_UK[rows] for likely_UK in targets])


def _standardise_rows(rows_TF: FloatArray) -> FloatArray:
    """Return the rows with every column brought to mean 0 and variance 1."""
    return ColumnView.from_rows(
        rows_TF, first_column=0, end_column=rows_TF.shape[1]
    ).standardise_columns(rows_TF)

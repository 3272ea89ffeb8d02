"""Pupils: models of the active's own features, taught by models that also read what came back.

Run by: the active, alone, after an exchange in which sums of the passives' gradients came back for
its training rows. Such a sum is a projection of the passives' features (docs/tell-nothing.md), and
no new row has one. So a teacher, a local model that reads the sums beside the features, labels all
training rows; and a pupil, a ridge regression of the features alone, learns these labels (D.
Lopez-Paz et al., "Unifying distillation and privileged information", ICLR 2016). Nothing is sent:
this is post-processing of what came back.

Held-out labels judge a pupil as new rows would: it learns nothing of a row whose label is held out,
neither the label nor the sum.

Letters: U training rows, T of them for which something came back, n labelled rows, F features, D
numbers of a sum, K classes.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from secure_apfed.errors import ModelError
from secure_apfed.measures import Scored, probabilities_of
from secure_apfed.solo import FOLDS, Baseline, Predictor, SoloTask, list_local_models
from secure_apfed.solo.classical import fit_ridges
from secure_apfed.solo.fitted import View
from secure_apfed.solo.interface import LEAST_CLASSES, FloatArray, IntArray, held_out

TEACHERS = ("mixmatch", "label_spreading_ridge", "extra_trees")
"""Chosen on seven sets, three seeds each (docs/tell-nothing.md). Their mean teaches, too."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Pupil:
    """A model of the active's features that learnt the labels of a teacher.

    Attributes:
        taught_by: the name of the teacher.
        predictor: predicts from the features, (B, F) -> (B, K).
        held_out: what it says of the labels held out, taught without them; None: none are.
    """

    taught_by: str
    predictor: Predictor = field(repr=False)
    held_out: Scored | None = field(repr=False)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Teaching:
    """What a teacher says of all rows.

    Attributes:
        by_part: probabilities (T, K) by the teacher that knows no label of a part of the labelled
            rows, one table for each part; the last is by the teacher that knows all labels.
    """

    name: str
    by_part: tuple[FloatArray, ...] = field(repr=False)

    @classmethod
    def from_baseline(cls, baseline: Baseline, task: SoloTask, parts: Sequence[IntArray]) -> Self:
        """Fit a teacher of this kind without each part, and to all labels."""
        tasks = [*(task.without(part) for part in parts), task]
        fitted = baseline.fit_together(tasks)
        tables = tuple(label_rows(teacher, task) for teacher in fitted)
        return cls(name=baseline.name, by_part=tables)

    @classmethod
    def average(cls, teachings: Sequence[Self]) -> Self:
        tables = zip(*(teaching.by_part for teaching in teachings), strict=True)
        return cls(name="their mean", by_part=tuple(np.mean(table, axis=0) for table in tables))


def label_rows(predictor: Predictor, task: SoloTask) -> FloatArray:
    """Return the probability of each class for each row of a task, (U, K).

    It is 0 in rows of which the model says nothing.
    """
    scores_UK = predictor.scores(task.features)
    return np.where(scores_UK.any(axis=1, keepdims=True), probabilities_of(scores_UK), 0.0)


def teach_pupils(task: SoloTask, received_UD: FloatArray) -> list[Pupil]:
    """Fit a teacher of each kind, and a pupil of each and of their mean.

    Args:
        task: the active's training rows and labels.
        received_UD: the mean of the sums that came back for each row, (U, D); NaN where none did.

    Returns:
        none where something came back for the labelled rows of fewer than two classes.
    """
    answered = np.flatnonzero(np.isfinite(received_UD).all(axis=1))
    if not received_UD.shape[1] or _count_classes(task, answered) < LEAST_CLASSES:
        return []
    task = task.pick(answered)
    beside_TC = np.hstack([_standardise(task.features), _standardise(received_UD[answered])])
    read_by_teacher = replace(task, features=beside_TC, shape=beside_TC.shape[1:])
    parts = held_out(task.labels, FOLDS, task.seed)
    teachings: list[_Teaching] = []
    for baseline in list_local_models():
        if baseline.name not in TEACHERS:
            continue
        with suppress(ModelError):
            teachings.append(_Teaching.from_baseline(baseline, read_by_teacher, parts))
    if len(teachings) > 1:
        teachings.append(_Teaching.average(teachings))
    return _fit_pupils(task, teachings, parts) if teachings else []


def _fit_pupils(
    task: SoloTask, teachings: Sequence[_Teaching], parts: Sequence[IntArray]
) -> list[Pupil]:
    """Fit the pupils of all teachers, without each part of the labelled rows and with all."""
    scores: list[list[FloatArray]] = [[] for _ in teachings]
    for number, part in enumerate(parts):
        pupils = _fit_without(task, teachings, part, number)
        for of_pupil, pupil in zip(scores, pupils, strict=True):
            of_pupil.append(pupil.scores(task.labelled_rows[part]))
    pupils = _fit_without(task, teachings, np.arange(0), len(parts))
    truth_n = task.labels[np.concatenate(parts)] if parts else None
    return [
        Pupil(
            taught_by=teaching.name,
            predictor=pupil,
            held_out=None
            if truth_n is None
            else Scored(truth=truth_n, scores=probabilities_of(np.concatenate(of_pupil))),
        )
        for teaching, pupil, of_pupil in zip(teachings, pupils, scores, strict=True)
    ]


def _fit_without(
    task: SoloTask, teachings: Sequence[_Teaching], part: IntArray, number: int
) -> list[Predictor]:
    """Fit a pupil of each teacher to all rows but a part of the labelled ones."""
    tables = []
    for teaching in teachings:
        likely_TK = teaching.by_part[number].copy()
        likely_TK[task.labelled] = task.indicators
        likely_TK[task.labelled[part]] = 0
        tables.append(likely_TK)
    taught = np.flatnonzero(np.all([table.any(axis=1) for table in tables], axis=0))
    return fit_ridges(task, taught, [likely_TK[taught] for likely_TK in tables])


def _count_classes(task: SoloTask, rows: IntArray) -> int:
    return len(np.unique(task.labels[np.isin(task.labelled, rows)]))


def _standardise(rows_TF: FloatArray) -> FloatArray:
    return View.standardised(rows_TF, first=0, end=rows_TF.shape[1]).read(rows_TF)

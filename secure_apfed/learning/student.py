"""The active's student: learns what others say of the rows, and predicts from its own features.

Run by: the active, where labels come from votes or a joint teacher. Random
features under a linear head are fitted in one go; every other network descends. Labelled rows keep
their own labels. Of a regression, classes are ranges of targets (`learning.bins`). Letters: N rows
of the active's table, U rows to learn from, n labelled rows, K classes, T numbers to learn of one.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from secure_apfed.data import OwnData
from secure_apfed.labellers import Labeller
from secure_apfed.learning.bins import Bins
from secure_apfed.learning.compute import Compute
from secure_apfed.learning.networks import ActiveNetworks
from secure_apfed.learning.votes import (
    SoftTrainer,
    Votes,
    fit_ridge,
    likely_labels,
    reliability_of,
)
from secure_apfed.measures import Measure, Scored
from secure_apfed.models import RandomFeatures
from secure_apfed.seeds import one_thread
from secure_apfed.settings.training import ModelSettings, TrainSettings
from secure_apfed.solo import Baseline, SoloTask
from secure_apfed.solo.choice import chosen
from secure_apfed.solo.kept import fits_kept_meanwhile
from secure_apfed.tasks import LOSSES, Classification, Regression, Task, scored_rows

__all__ = [
    "Belief", "Prior", "Student", "by_baseline", "by_best_baseline", "by_labeller", "side_by_side",
    "with_prior",
]  # fmt: skip

Floats = NDArray[np.float64]

_NO_CLASS = -1


class Student:
    """A network and the labels that it learns.

    Args:
        owner: the active; data: what it holds, with the labels that it may train on.
        rows_U: of its table, to learn from.
        networks: at their start, made of these `model` settings; classes: K.
        train, compute, seed: how a network that descends trains.
        task: what it learns.

    Attributes:
        labelled: (n,), places of labelled rows among `rows_U`; labels: (n,), classes of those.
    """

    def __init__(
        self, owner: str, *, data: OwnData, rows_U: Tensor, networks: ActiveNetworks, classes: int,
        model: ModelSettings, train: TrainSettings, compute: Compute, seed: int,
        task: Task | None = None,
    ) -> None:  # fmt: skip
        assert data.table.labels is not None
        features_N = data.table.features
        if isinstance(networks.encoder, RandomFeatures):
            networks.encoder.fit(features_N[data.train_rows])
        self._task = task or Classification()
        loss = self._task.error if isinstance(self._task, Regression) else None
        self.trainer = SoftTrainer(
            owner, networks, features_N=features_N, train=train, compute=compute, seed=seed,
            loss=LOSSES[loss] if loss else F.cross_entropy,
        )  # fmt: skip
        self.rows_U, self.classes, self._model, self._train = rows_U, classes, model, train
        self._shape = features_N.shape[1:]
        self.features_UF: Floats = features_N[rows_U].flatten(1).double().numpy()
        self.labelled = torch.isin(rows_U, data.labelled_rows).nonzero().flatten().numpy()
        known_n = data.table.labels[rows_U[self.labelled]].numpy()
        self._bins = Bins.of(known_n.astype(np.float64)) if loss else None
        self.labels = known_n if self._bins is None else self._bins.classes_of(known_n)
        self._truth_nT = known_n[:, None] if self._bins else np.eye(classes)[known_n]
        self._labels_N = compute.place(data.table.labels)
        numbers = self._truth_nT.shape[1]
        self._targets_NT = torch.zeros(len(data.table.ids), numbers, dtype=torch.float64)

    def task_alone(self, seed: int) -> SoloTask:
        """What the active has of these rows before it asks anybody."""
        features = self.features_UF.reshape(len(self.rows_U), *self._shape)
        return SoloTask.of(
            features, self.labelled, self.labels,
            classes=self.classes, seed=seed, model=self._model, train=self._train,
        )  # fmt: skip

    @property
    def networks(self) -> ActiveNetworks:
        return self.trainer.networks

    @property
    def in_one_go(self) -> bool:
        """Whether it has a best fit, and takes no epochs."""
        return isinstance(self.networks.encoder, RandomFeatures)

    def teach(self, likely_UK: Floats) -> None:
        """Take how likely each class is of all rows, and fit it where it has a best fit.

        A row of zeros says nothing, and has no part in a fit; labelled rows keep their labels.
        """
        said_U = np.asarray(likely_UK.any(axis=1))
        said_U[self.labelled] = True
        targets_UT = likely_UK.copy() if self._bins is None else self._bins.expected(likely_UK)
        targets_UT[self.labelled] = self._truth_nT
        self._targets_NT[self.rows_U] = torch.from_numpy(targets_UT)
        if self.in_one_go:
            said_V = np.flatnonzero(said_U)
            fit_ridge(
                self.networks, self.trainer.features_N[self.rows_U[said_V]], targets_UT[said_V],
                labelled_n=np.searchsorted(said_V, self.labelled),
            )  # fmt: skip

    def learn(self, step: int, rows_B: Tensor) -> float:
        """Descend once on what is said of these rows of the table; return the loss."""
        return self.trainer.learn(step, rows_B, self._targets_NT[rows_B])

    def scored(self, rows: Tensor) -> Scored:
        """What it says of `rows` of the table."""
        self.trainer.set_training(False)
        try:
            return scored_rows(
                self._task, self.trainer.predict, rows, labels_N=self._labels_N,
                features_N=self.trainer.features_N,
            )  # fmt: skip
        finally:
            self.trainer.set_training(True)

    def tensors(self) -> dict[str, Tensor]:
        return {"targets": self._targets_NT} | self.trainer.tensors()

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self.trainer.load_tensors(tensors)
        self._targets_NT = tensors["targets"].clone()


Belief: TypeAlias = Callable[[SoloTask], Floats]
"""What the active believes of the rows of a task before it reads anything of others, (U, K)."""

Prior: TypeAlias = Callable[[SoloTask], Belief]
"""Whose belief that is, which a task's labels may choose."""


def by_labeller(labeller: Labeller) -> Prior:
    """What a labeller says."""
    return lambda _: (
        lambda task: labeller.label(task.features, task.labelled, task.labels, task.classes)
    )


def by_baseline(baseline: Baseline) -> Prior:
    """What the active would do alone."""
    return lambda _: _alone(baseline)


def by_best_baseline(measure: Measure) -> Prior:
    """What the active would do alone by the baseline that its own held-out labels choose."""
    return lambda task: _alone(chosen(task, measure=measure))


def _alone(baseline: Baseline) -> Belief:
    return lambda task: baseline.fit(task).scores(task.features)


def with_prior(votes: Votes | None, student: Student, prior: Prior, *, seed: int) -> Floats:
    """Return the probability of each class for each row, with what is believed as the prior.

    Args:
        votes: on the rows that the student learns from; None: nobody voted.
        student: whose features and labels the belief reads.
        prior: the active's own.
        seed: of the folds that tell how often it is right.
    """
    task, rows = student.task_alone(seed), len(student.rows_U)
    with one_thread(), fits_kept_meanwhile():
        believed = prior(task)
        own_UK, reliability = believed(task), reliability_of(believed, task)
    own_U = np.where(own_UK.any(axis=1), own_UK.argmax(axis=1), _NO_CLASS)
    counted_K = np.bincount(task.labels, minlength=task.classes) + 1.0
    silence = Votes(totals=np.zeros((rows, task.classes)), variance=np.zeros(rows), voters=1)
    return likely_labels(
        votes or silence, own_U, reliability,
        frequencies=counted_K / counted_K.sum(), labelled=student.labelled,
    )  # fmt: skip


def side_by_side(parts: Iterable[Tensor]) -> Floats:
    """Return the parts' rows beside each other, (U, F), each part about its mean and about 1 long.

    So that none decides alone which rows are near.
    """
    centred = [part.detach().cpu().flatten(1).double() for part in parts]
    centred = [part_UF - part_UF.mean(0) for part_UF in centred]
    sizes = [part_UF.square().sum(1).mean().sqrt() for part_UF in centred]
    scaled = [part_UF / size if size > 0 else part_UF
              for part_UF, size in zip(centred, sizes, strict=True)]  # fmt: skip
    together: Floats = torch.cat(scaled, dim=1).numpy()
    return together

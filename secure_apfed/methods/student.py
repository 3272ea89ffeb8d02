"""The active's student: learns what others say of the rows, and predicts from its own features.

Run by: the active, where labels come from votes or a joint teacher. Random
features under a linear head are fitted in one go; every other network descends. Labelled rows keep
their own labels. Of a regression, classes are ranges of targets (`learning.bins`). Letters: N rows
of the active's table, U rows to learn from, n labelled rows, K classes, T numbers to learn of one.
"""

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, Self, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from secure_apfed.exchange import Links
from secure_apfed.labellers import Labeller
from secure_apfed.learning.descent import ActiveNetworks
from secure_apfed.learning.votes import (
    SoftTrainer,
    Votes,
    fit_linear,
    last_layer,
    likely_labels,
    reliability_of,
)
from secure_apfed.measures import Measure, Scored
from secure_apfed.methods.alignment import rows_among
from secure_apfed.methods.method import Learner, Own, Steps
from secure_apfed.methods.terms import outputs_of, task_of
from secure_apfed.models import RandomFeatures, encoder_and_head
from secure_apfed.seeds import one_thread, seeded, shuffled
from secure_apfed.settings.run import RunSettings
from secure_apfed.solo import Baseline, SoloTask, chosen
from secure_apfed.solo.interface import fits_kept_meanwhile
from secure_apfed.tasks import LOSSES, Regression, scored_rows

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
RANGES = 8
"""K. More tell a target finer, and each of them from fewer labelled rows."""
_NO_CLASS = -1


# Targets of a regression as classes that can be voted for: ranges of about as many labelled rows.
#
# Run by: the active. Passives are shown the range of a labelled row's target, and never the target;
# they vote for ranges as for classes, so that sums, noise and epsilons are those of any vote. What
# the active learns of a row is the mean target that the ranges stand for, weighed by how likely
# they are (L. Torgo and J. Gama, "Regression using classification algorithms", Intelligent Data
# Analysis 1, 1997).
#
# Letters: n labelled rows, U rows, K ranges.


@dataclass(frozen=True, eq=False)
class Bins:
    """Attributes:
    edges: (K - 1,), rising, between ranges.
    centres: (K,), what each stands for.
    """

    edges: Floats
    centres: Floats

    @classmethod
    def of(cls, targets_n: Floats, *, ranges: int = RANGES) -> Self:
        """Cut at quantiles of the labelled targets; a range stands for the mean of its own.

        Where many targets are alike, ranges may be empty, and stand for their lower edge.
        """
        edges = np.quantile(targets_n, np.linspace(0, 1, ranges + 1)[1:-1])
        place_n = np.searchsorted(edges, targets_n, side="left")
        centres = np.concatenate([edges[:1], edges])
        for one in np.unique(place_n):
            centres[one] = targets_n[place_n == one].mean()
        return cls(edges, centres)

    def classes_of(self, targets_n: Floats) -> Integers:
        return np.searchsorted(self.edges, targets_n, side="left").astype(np.int64)

    def expected(self, likely_UK: Floats) -> Floats:
        """The mean target (U, 1) of each row; 0, the mean of all, of a row that says nothing."""
        total_U1 = likely_UK.sum(axis=1, keepdims=True)
        mean_U1 = (likely_UK @ self.centres)[:, None]
        expected_U1: Floats = np.zeros_like(mean_U1)
        np.divide(mean_U1, total_U1, out=expected_U1, where=total_U1 > 0)
        return expected_U1


class Student:
    """A network at its reproducible start, and the labels that it learns of aligned training rows.

    Args:
        own: what the active brings, with the labels that it may train on.
        aligned: of its table, by position of the alignment.

    Attributes:
        classes: K; rows_U: of its table, that it learns from.
        labelled: (n,), places of labelled rows among `rows_U`; labels: (n,), classes of those.
    """

    def __init__(self, own: Own, aligned: Tensor) -> None:
        config, data, seed = own.config, own.data, own.secrets.seed
        features_N, rows_U = data.table.features, rows_among(data.train_rows, aligned)
        assert data.table.labels is not None
        with seeded(seed, own.name, "student"):
            networks = ActiveNetworks(
                *encoder_and_head(config.model, data.table.shape, outputs_of(own))
            )
        if isinstance(networks.encoder, RandomFeatures):
            networks.encoder.fit(features_N[data.train_rows])
        self._task = task_of(own)
        loss = self._task.error if isinstance(self._task, Regression) else None
        self.trainer = SoftTrainer(
            own.name, networks, features_N=features_N, train=config.train, seed=seed,
            loss=LOSSES[loss] if loss else F.cross_entropy,
        )  # fmt: skip
        self.rows_U, self.classes = rows_U, classes_voted(own)
        self._model, self._train = config.model, config.train
        self._shape = features_N.shape[1:]
        self.features_UF: Floats = features_N[rows_U].flatten(1).double().numpy()
        self.labelled = torch.isin(rows_U, data.labelled_rows).nonzero().flatten().numpy()
        known_n = data.table.labels[rows_U[self.labelled]].numpy()
        self._bins = Bins.of(known_n.astype(np.float64)) if loss else None
        self.labels = known_n if self._bins is None else self._bins.classes_of(known_n)
        self._truth_nT = known_n[:, None] if self._bins else np.eye(self.classes)[known_n]
        self._labels_N = self.trainer.compute.place(data.table.labels)
        numbers = self._truth_nT.shape[1]
        self._targets_NT = torch.zeros(len(data.table.ids), numbers, dtype=torch.float64)

    def task_alone(self, seed: int) -> SoloTask:
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
            self._fit(last_layer(self.networks), self.encoded(self.networks), targets_UT, said_U)

    def without(self, rows: Tensor) -> ActiveNetworks | None:
        """Its networks as they are fitted without these rows; None: they descend."""
        if not self.in_one_go:
            return None
        targets_UT = self._targets_NT[self.rows_U].numpy()
        here_U = targets_UT.any(axis=1) & ~torch.isin(self.rows_U, rows).numpy()
        networks = copy.deepcopy(self.networks)
        self._fit(last_layer(networks), self.encoded(networks), targets_UT, here_U)
        return networks

    def _fit(
        self, linear: nn.Linear, encoded_UD: Floats, targets_UT: Floats, taught_U: NDArray[np.bool_]
    ) -> None:
        """Fit a linear layer to what is said of the rows that it is taught."""
        taught_V = np.flatnonzero(taught_U)
        labelled_n = np.flatnonzero(np.isin(taught_V, self.labelled))
        fit_linear(linear, encoded_UD[taught_V], targets_UT[taught_V], labelled_n=labelled_n)

    def encoded(self, networks: ActiveNetworks) -> Floats:
        """What the head reads of its rows, (U, D)."""
        with torch.no_grad():
            encoded_UD: Tensor = networks.encoder(self.trainer.features_N[self.rows_U])
        return encoded_UD.double().cpu().numpy()

    def learn(self, step: int, rows_B: Tensor) -> float:
        """Descend once on what is said of these rows of the table; return the loss."""
        return self.trainer.learn(step, rows_B, self._targets_NT[rows_B])

    def scored(self, rows: Tensor) -> Scored:
        with self.trainer.evaluating():
            return scored_rows(self._task, self.trainer.predict, rows, self._labels_N)

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
    return lambda _: (
        lambda task: labeller.label(task.features, task.labelled, task.labels, task.classes)
    )


def by_baseline(baseline: Baseline) -> Prior:
    return lambda _: _alone(baseline)


def by_best_baseline(measure: Measure) -> Prior:
    """What the active would do alone by the baseline that its own held-out labels choose."""
    return lambda task: _alone(chosen(task, measure=measure))


def _alone(baseline: Baseline) -> Belief:
    return lambda task: baseline.fit(task).scores(task.features)


def with_prior(votes: Votes | None, student: Student, prior: Prior, *, seed: int) -> Floats:
    """Return the probability of each class for each row, with what is believed as the prior.
    `votes`: on the rows that the student learns from; None: nobody voted. `seed`: of the folds that
    tell how often it is right.
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


class StudentModel(Protocol):
    """What the active teaches, and what predicts alone then; see `Student`."""

    rows_U: Tensor  # noqa: N815

    @property
    def networks(self) -> ActiveNetworks: ...

    @property
    def in_one_go(self) -> bool: ...

    def learn(self, step: int, rows_B: Tensor) -> float: ...

    def scored(self, rows: Tensor) -> Scored: ...

    def tensors(self) -> dict[str, Tensor]: ...

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None: ...


class StudentActive(Learner):
    """The active's role where it asks others once, and then trains alone; see `Learner`. `student`:
    that will predict alone; headline: what its accuracy is called.
    """

    def __init__(self, own: Own, student: StudentModel, *, headline: str, guarantee: str) -> None:
        super().__init__()
        self.name, self.guarantee = own.name, guarantee
        self.student: StudentModel = student
        self.kept = {"student": student}
        self.training_rows = student.rows_U
        self._headline, self._test_rows = headline, own.data.test_rows
        self._classes = len(own.data.classes)
        self._taught = False

    @abstractmethod
    async def teach(self, links: Links, steps: Steps) -> None:
        """Ask the others, and teach the student what they say; once in a run."""

    async def begin_epoch(self, links: Links, steps: Steps) -> bool:
        """Ask once; a student that learns in one go then has no steps."""
        if not self._taught:
            await self.teach(links, steps)
            self._taught = True
        return not self.student.in_one_go

    async def step(self, links: Links, step: int, rows_B: Tensor) -> float:
        return self.student.learn(step, rows_B)

    async def evaluate(self, links: Links, *, next_step: int, final: bool) -> dict[str, Scored]:
        return {self._headline: self.student.scored(self._test_rows)}

    def solo(self) -> ActiveNetworks | None:
        return self.student.networks

    def tensors(self) -> dict[str, Tensor]:
        return {"taught": torch.tensor(self._taught), **super().tensors()}

    def load_tensors(self, tensors: Mapping[str, Tensor], *, next_step: int) -> None:
        super().load_tensors(tensors, next_step=next_step)
        self._taught = bool(tensors["taught"])


def classes_voted(own: Own) -> int:
    """K of what others say of a row: classes, or ranges of numbers."""
    return len(own.data.classes) or RANGES


def train_student(student: Student, config: RunSettings) -> None:
    """Let a student that descends go through its rows as often as the run has epochs."""
    if student.in_one_go:
        return
    step = 0
    for epoch in range(config.train.epochs):
        order = shuffled(student.rows_U, config.seed, "student", epoch)
        for rows_B in order.split(config.train.batch_size):
            student.learn(step, rows_B)
            step += 1

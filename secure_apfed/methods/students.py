"""The active's student as methods build and train it, once the rows to learn from have labels.

Run by: the active, alone: nothing is sent but where a method asks others for these labels.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from secure_apfed.exchange import Links
from secure_apfed.learning.bins import RANGES
from secure_apfed.learning.compute import Compute
from secure_apfed.learning.descent import prefixed, without_prefix
from secure_apfed.learning.networks import ActiveNetworks
from secure_apfed.learning.student import Student
from secure_apfed.measures import Scored
from secure_apfed.methods.method import Learner, Own, Steps
from secure_apfed.methods.terms import outputs_of, task_of
from secure_apfed.models import encoder_and_head
from secure_apfed.seeds import seeded, shuffled
from secure_apfed.settings.run import RunSettings

__all__ = ["Pupil", "StudentLearner", "classes_voted", "student_of", "train_student"]


class Pupil(Protocol):
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


class StudentLearner(Learner):
    """The active's role where it asks others once, and then trains alone; see `Learner`.

    Args:
        own: what the active brings.
        student: that will predict alone; headline: what its accuracy is called.
        guarantee: what the others' noise or guards promise.
    """

    def __init__(self, own: Own, student: Pupil, *, headline: str, guarantee: str) -> None:
        super().__init__()
        self.name, self.guarantee = own.name, guarantee
        self.student: Pupil = student
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
        """One step of the student; sends nothing."""
        return self.student.learn(step, rows_B)

    async def evaluate(self, links: Links, *, next_step: int, final: bool) -> dict[str, Scored]:
        """What the active says alone; needs no exchange."""
        return {self._headline: self.student.scored(self._test_rows)}

    def solo(self) -> ActiveNetworks | None:
        """The student."""
        return self.student.networks

    def tensors(self) -> dict[str, Tensor]:
        taught = torch.tensor(self._taught)
        return {"taught": taught, **prefixed("student", self.student.tensors())}

    def load_tensors(self, tensors: Mapping[str, Tensor], *, next_step: int) -> None:
        self._taught = bool(tensors["taught"])
        self.student.load_tensors(without_prefix("student", tensors))


def classes_voted(own: Own) -> int:
    """K of what others say of a row: classes, or ranges of numbers."""
    return len(own.data.classes) or RANGES


def student_of(own: Own, aligned: Tensor) -> Student:
    """The student at its reproducible start, which learns from the aligned training rows.

    Args:
        own: what the active brings.
        aligned: its row at each position of the alignment.
    """
    config = own.config
    with seeded(own.secrets.seed, own.name, "student"):
        encoder, head = encoder_and_head(config.model, own.data.table.shape, outputs_of(own))
    return Student(
        own.name,
        data=own.data,
        rows_U=own.data.train_rows[torch.isin(own.data.train_rows, aligned)],
        networks=ActiveNetworks(encoder, head),
        classes=classes_voted(own),
        model=config.model,
        train=config.train,
        compute=Compute.of(config.train),
        seed=own.secrets.seed,
        task=task_of(own),
    )


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

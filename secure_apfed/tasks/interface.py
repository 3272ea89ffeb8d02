"""What a task is: a loss on a network's outputs, what is told of them, and how that is measured.

Run by: the active, in training, at the end of a run, and in `predict`. Passives read no label in
APFed, so that a task is the active's alone; where passives vote, the contract names it.
Letters: B rows, K outputs of the head.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, Self

import torch
from torch import Tensor

from secure_apfed.data.targets import TargetScale
from secure_apfed.measures import Scored
from secure_apfed.models import Shape

__all__ = ["Task", "scored_rows"]

_EVALUATION_ROWS = 4096


class Task(ABC):
    """One task, for one run's data.

    Attributes:
        name: its key in `TASKS`; title: for people.
        headline: the measure that a run is judged by where its settings say none.
        tells: what is told of a row.
        measured_as: the task of its measures in `MEASURES`; the form of `scored` is of it.
        not_attacked: target of attacks -> why none on it applies.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    headline: ClassVar[str]
    tells: ClassVar[str]
    measured_as: ClassVar[str]
    not_attacked: ClassVar[Mapping[str, str]] = {}

    @classmethod
    @abstractmethod
    def of(cls, targets: TargetScale | None, *, loss: str = "squared") -> Self:
        """The task of a run.

        Args:
            targets: how labels that are numbers were standardised; None: they are classes.
            loss: `train.loss`.
        """

    @abstractmethod
    def outputs(self, classes: int, features: Shape) -> int:
        """Numbers that the head gives for a row of these features: K."""

    @abstractmethod
    def loss(
        self, outputs_BK: Tensor, labels_B: Tensor, features_B: Tensor,
        weights_K: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Mean loss of the rows of a batch that can be learnt from; 0 where none can.

        Args:
            outputs_BK: of the head.
            labels_B: as the table has them.
            features_B: as the encoder reads them.
            weights_K: of classes.
        """

    @abstractmethod
    def told(self, outputs_BK: Tensor, features_B: Tensor) -> Tensor:
        """What a user is told of each row."""

    @abstractmethod
    def scored(self, outputs_BK: Tensor, labels_B: Tensor, features_B: Tensor) -> Scored:
        """The same of rows whose truth is known, for measures."""


@torch.no_grad()
def scored_rows(
    task: Task, predict: Callable[[Tensor], Tensor], rows: Tensor, *, labels_N: Tensor,
    features_N: Tensor,
) -> Scored:  # fmt: skip
    """Ask a model for its outputs of `rows` of a table, a few thousand at a time.

    Args:
        task: of the model.
        predict: rows of the table to outputs (B, K) of a network.
        rows: positions in the table; may be none.
        labels_N: of the table.
        features_N: of the table, as the encoder reads them.
    """
    here = rows.to(labels_N.device)
    parts = [predict(rows_B).double().cpu() for rows_B in here.split(_EVALUATION_ROWS)]
    return task.scored(torch.cat(parts), labels_N[here].cpu(), features_N[here].cpu())

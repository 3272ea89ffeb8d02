"""Which of two or more classes a row is of: cross-entropy of the softmax of K outputs."""

from typing import ClassVar, Self

import torch.nn.functional as F
from torch import Tensor

from secure_apfed.data.targets import UNLABELLED, TargetScale
from secure_apfed.errors import DataError
from secure_apfed.measures import ACCURACY, Scored
from secure_apfed.models import Shape
from secure_apfed.tasks.interface import Task

__all__ = ["Classification", "task_loss"]


class Classification(Task):
    """See `Task`; a user is told probabilities (B, K)."""

    name: ClassVar[str] = "classification"
    title: ClassVar[str] = "classification"
    headline: ClassVar[str] = ACCURACY.name
    tells: ClassVar[str] = "probabilities"
    measured_as: ClassVar[str] = "classification"

    @classmethod
    def of(cls, targets: TargetScale | None, *, loss: str = "squared") -> Self:
        """See `Task`.

        Raises:
            DataError: labels that are numbers.
        """
        if targets is not None:
            raise DataError(
                "task: classification tells classes, and these labels are numbers; say task: "
                "regression"
            )
        return cls()

    def outputs(self, classes: int, features: Shape) -> int:
        """One for each class."""
        return classes

    def loss(
        self, outputs_BK: Tensor, labels_B: Tensor, features_B: Tensor,
        weights_K: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return task_loss(outputs_BK, labels_B, weights_K)

    def told(self, outputs_BK: Tensor, features_B: Tensor) -> Tensor:
        """Probabilities (B, K)."""
        return outputs_BK.softmax(1)

    def scored(self, outputs_BK: Tensor, labels_B: Tensor, features_B: Tensor) -> Scored:
        return Scored.of_network(labels_B, outputs_BK)


def task_loss(scores_BK: Tensor, labels_B: Tensor, weights_K: Tensor | None = None) -> Tensor:
    """Mean cross-entropy of the rows that have a label; 0 where none of the batch has.

    With weights of classes each row's is multiplied by that of its class.
    """
    labelled_B = labels_B != UNLABELLED
    if weights_K is None and bool(labelled_B.all()):
        return F.cross_entropy(scores_BK, labels_B)
    total = F.cross_entropy(
        scores_BK, labels_B, weight=weights_K, ignore_index=UNLABELLED, reduction="sum"
    )
    return total / labelled_B.sum().clamp(min=1)

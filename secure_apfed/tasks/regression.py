"""A number for each row: squared, absolute or Huber's error of one output, in standard deviations.

Targets are standardised by the labelled training rows, and predictions are told in the unit of the
label column. Huber's error is squared below one standard deviation and linear above (P. Huber,
Annals of Mathematical Statistics 35, 1964).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Self

import torch.nn.functional as F
from torch import Tensor

from secure_apfed.data.targets import UNLABELLED, TargetScale
from secure_apfed.errors import DataError
from secure_apfed.measures import Scored
from secure_apfed.models import Shape
from secure_apfed.tasks.interface import Task

__all__ = ["LOSSES", "Regression"]

LOSSES: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {"squared": F.mse_loss, "absolute": F.l1_loss, "huber": F.huber_loss}
)
"""Errors by name, as `train.loss` has them."""


@dataclass(frozen=True, kw_only=True)
class Regression(Task):
    """See `Task`; a user is told predictions (B,).

    Attributes:
        targets: how labels were standardised.
        error: a key of `LOSSES`.
    """

    name: ClassVar[str] = "regression"
    title: ClassVar[str] = "regression"
    headline: ClassVar[str] = "r2"
    tells: ClassVar[str] = "prediction"
    measured_as: ClassVar[str] = "regression"
    not_attacked: ClassVar[Mapping[str, str]] = MappingProxyType({
        "labels": "labels are numbers, and attacks on labels guess classes",
        "membership": "the model tells numbers, and attacks on membership read probabilities of "
                      "classes",
    })  # fmt: skip

    targets: TargetScale
    error: str = "squared"

    @classmethod
    def of(cls, targets: TargetScale | None, *, loss: str = "squared") -> Self:
        """See `Task`.

        Raises:
            DataError: labels that are classes.
        """
        if targets is None:
            raise DataError(
                "task: regression predicts numbers, and these labels are classes; give a table of "
                "numbers, or take task: classification"
            )
        return cls(targets=targets, error=loss)

    def outputs(self, classes: int, features: Shape) -> int:
        """One."""
        return 1

    def loss(
        self, outputs_BK: Tensor, labels_B: Tensor, features_B: Tensor,
        weights_K: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        labelled_B = labels_B != UNLABELLED
        error_B = LOSSES[self.error](outputs_BK[:, 0], labels_B, reduction="none")
        return (error_B * labelled_B).sum() / labelled_B.sum().clamp(min=1)

    def told(self, outputs_BK: Tensor, features_B: Tensor) -> Tensor:
        """Predictions (B,), float64, in the unit of the labels."""
        return self.targets.decode(outputs_BK[:, 0])

    def scored(self, outputs_BK: Tensor, labels_B: Tensor, features_B: Tensor) -> Scored:
        told_B = self.told(outputs_BK, features_B)
        return Scored(truth=self.targets.decode(labels_B).numpy(), scores=told_B.numpy())

"""How unlike the training rows a row is: the error with which its own features are rebuilt.

The model is an autoencoder of the active's features, encoder and head (G. Hinton and R.
Salakhutdinov, Science 313, 2006); passives add gradients to the representation as ever, which
APFed's Section 6 names as an open problem. Training rows are normal or have no label, and no label
is read in training: what is measured is whether rows of the class left out are told from the rest.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Self

from torch import Tensor

from secure_apfed.data.targets import TargetScale
from secure_apfed.errors import DataError
from secure_apfed.measures import Scored
from secure_apfed.models import Shape
from secure_apfed.tasks.interface import Task

__all__ = ["Anomaly"]


class Anomaly(Task):
    """See `Task`; a user is told scores (B,), mean squared errors: the higher, the stranger."""

    name: ClassVar[str] = "anomaly"
    title: ClassVar[str] = "anomaly detection"
    headline: ClassVar[str] = "auc"
    tells: ClassVar[str] = "score"
    measured_as: ClassVar[str] = "anomaly"
    not_attacked: ClassVar[Mapping[str, str]] = MappingProxyType({
        "labels": "training reads no label, so that there is none to guess",
        "membership": "the model tells scores, and attacks on membership read probabilities of "
                      "classes",
    })  # fmt: skip

    @classmethod
    def of(cls, targets: TargetScale | None, *, loss: str = "squared") -> Self:
        """See `Task`.

        Raises:
            DataError: labels that are numbers.
        """
        if targets is not None:
            raise DataError("task: anomaly needs a class that is left out, and labels are numbers")
        return cls()

    def outputs(self, classes: int, features: Shape) -> int:
        """One for each feature."""
        return math.prod(features)

    def loss(
        self, outputs_BK: Tensor, labels_B: Tensor, features_B: Tensor,
        weights_K: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return self.told(outputs_BK, features_B).mean()

    def told(self, outputs_BK: Tensor, features_B: Tensor) -> Tensor:
        """Mean squared errors (B,)."""
        return (outputs_BK - features_B.flatten(1).to(outputs_BK.dtype)).square().mean(1)

    def scored(self, outputs_BK: Tensor, labels_B: Tensor, features_B: Tensor) -> Scored:
        told_B = self.told(outputs_BK.double(), features_B)
        return Scored(truth=labels_B.numpy(), scores=told_B.numpy())

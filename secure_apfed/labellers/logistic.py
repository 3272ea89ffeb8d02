"""Logistic regression on the n labelled rows: every class against all, by one softmax.

Rows are shifted and scaled by the labelled rows alone, and the classifier is fitted on them alone:
another row is only classified.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from secure_apfed.errors import ConfigError
from secure_apfed.labellers.interface import (
    Features,
    Floats,
    Integers,
    checked_features,
    checked_labels,
    checked_positions,
)
from secure_apfed.labellers.scale import scale_of
from secure_apfed.labellers.softmax import minimiser, probabilities, with_constant
from secure_apfed.privacy.accountants import Mechanism, NoPrivacy

__all__ = ["Logistic"]

_TOLERANCE = 1e-5


@dataclass(frozen=True, kw_only=True)
class Logistic:
    """Votes are the classifier's probabilities.

    Attributes:
        strength: n Lambda, positive: of |weights|^2 / 2 beside the sum of the n losses, rows having
            norm sqrt(F) in the mean. 1 is the usual choice for standardised columns.
    """

    name: ClassVar[str] = "logistic"
    title: ClassVar[str] = "logistic regression on the labelled rows"
    linear: ClassVar[bool] = False
    inductive: ClassVar[bool] = True
    signed: ClassVar[bool] = False

    strength: float = 1.0

    def __post_init__(self) -> None:
        if not (np.isfinite(self.strength) and self.strength > 0):
            raise ConfigError(f"the strength of a regularisation is positive, got {self.strength}")

    @property
    def model(self) -> Mechanism:
        return NoPrivacy()

    def label(
        self, features_UF: Features, labelled_n: Integers, labels_n: Integers, classes: int
    ) -> Floats:
        features_UF = checked_features(features_UF)
        labelled_n = checked_positions(labelled_n, len(features_UF))
        labels_n = checked_labels(labels_n, len(labelled_n), classes)
        mean_F, size = scale_of(features_UF[labelled_n])
        root = np.sqrt(features_UF.shape[1])
        x_UF = with_constant((features_UF - mean_F) / size * root, 1.0)
        strength = self.strength / len(labelled_n)
        theta_FK = minimiser(
            x_UF[labelled_n], labels_n, classes, strength=strength, tolerance=_TOLERANCE
        )
        return probabilities(x_UF, theta_FK)

    def statement(self) -> str:
        return (
            f"{self.title}, regularised by {self.strength:g}: fitted on the labelled rows alone, "
            "so that another person's features move that person's own vote and no other"
        )

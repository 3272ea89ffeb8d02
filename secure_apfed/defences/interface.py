"""What every defence offers: a small interface for each place where one can act.

Run by: the party that lets something out. A defence of this folder is empirical: it makes
known attacks worse and gives no epsilon, against nobody. What has a guarantee is in
`secure_apfed.privacy` (guards, label response) and under the secure sum.

Letters: N rows of a table, B batch, D numbers of a representation, K classes.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from secure_apfed.privacy.noise import NoiseSource

__all__ = [
    "ALL_APFED",
    "Defence",
    "GradientDefence",
    "LabelCode",
    "LabelDefence",
    "Leaving",
    "Place",
    "RepresentationDefence",
    "Surroundings",
]

Place = Literal["representations", "labels", "gradients"]
ALL_APFED = ("apfed", "apfed_r", "apfed_c")


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a defence is built for.

    Attributes:
        party: that runs it.
        seed: of everything reproducible; noise: of everything secret.
        classes: K.
        size: D, numbers of one row of what it protects.
    """

    party: str
    seed: int
    noise: NoiseSource
    classes: int
    size: int


class Defence(ABC):
    """What the table holds of each.

    Attributes:
        name: its key, and `kind` in the configuration.
        place: what it protects on its way out.
        applies_to: methods in which it does something.
        reason: why it does not apply to the others.
        gives: what it does and does not do, for the report.
    """

    name: ClassVar[str]
    place: ClassVar[Place]
    applies_to: ClassVar[tuple[str, ...]]
    reason: ClassVar[str]
    gives: ClassVar[str]

    @abstractmethod
    def __init__(self, settings: Any, around: "Surroundings") -> None:
        """Build it from its own settings.

        Raises:
            ConfigError, ModelError: it does not fit the data or the networks.
        """


class RepresentationDefence(nn.Module, Defence):
    """A layer before the guard, or a term of the loss, of the party that sends representations."""

    place: ClassVar[Place] = "representations"
    reason: ClassVar[str] = "no representation is sent"

    @abstractmethod
    def forward(self, h_BD: Tensor, features_B: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return what goes to the guard, and a scalar that is added to the party's loss.

        Args:
            h_BD: what would be sent, flat.
            features_B: the features that it was computed from.
            step: of the run.
        """


class LabelCode(ABC):
    """What to train on instead of labels, and the way back from what the model then predicts."""

    @abstractmethod
    def targets(self, labels_N: Tensor) -> Tensor:
        """Return what the task loss compares with: classes (N,), or probabilities (N, K)."""

    @abstractmethod
    def decode(self, scores_BK: Tensor) -> Tensor:
        """Return scores of the true classes from those of the model."""


class LabelDefence(LabelCode, Defence):
    """A code that hides labels."""

    place: ClassVar[Place] = "labels"


@dataclass(frozen=True)
class Leaving:
    """Where a gradient goes.

    Attributes:
        labels: true labels of its rows, (B,), where the party knows them.
    """

    step: int
    receiver: str
    labels: Tensor | None = None


class GradientDefence(Defence):
    """Changes a gradient before it leaves its party.

    Attributes:
        row_wise: whether each row that leaves depends on the same row alone.
    """

    place: ClassVar[Place] = "gradients"
    row_wise: ClassVar[bool] = False

    @abstractmethod
    def protect(self, gradient_BD: Tensor, leaving: Leaving) -> Tensor:
        """Return what leaves instead of `gradient_BD`, flat rows of one batch."""

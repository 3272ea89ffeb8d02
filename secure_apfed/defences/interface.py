"""What every defence offers: a small interface for each place where one can act.

Several defences at one place act in the order of the configuration.

Run by: the party that lets something out. A defence of this folder is empirical: it makes
known attacks worse and gives no epsilon, against nobody. What has a guarantee is in
`secure_apfed.privacy` (guards, label response) and under the secure sum.

Letters: N rows of a table, B batch, D numbers of a representation, K classes.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from secure_apfed.privacy.noise import NoiseSource
from secure_apfed.settings.method import Released

__all__ = [
    "Defence",
    "GradientDefence",
    "LabelDefence",
    "Leaving",
    "RepresentationChain",
    "RepresentationDefence",
    "Surroundings",
]


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a defence is built for: `size` is D, numbers of one row of what it protects.

    Everything reproducible is of the seed, everything secret of the noise.
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
        protects: what it changes on its way out. Whoever lets that out runs it; where nobody
            does, it does nothing and is refused.
        gives: what it does and does not do, for the report.
    """

    name: ClassVar[str]
    protects: ClassVar[tuple[Released, ...]]
    gives: ClassVar[str]

    @abstractmethod
    def __init__(self, settings: Any, around: "Surroundings") -> None:
        """Build it from its own settings.

        Raises:
            ConfigError, ModelError: it does not fit the data or the networks.
        """


class RepresentationDefence(nn.Module, Defence):
    """A layer before the guard, or a term of the loss, of the party that sends representations."""

    protects: ClassVar[tuple[Released, ...]] = ("representations",)

    @abstractmethod
    def forward(self, h_BD: Tensor, features_B: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return what goes to the guard, and a scalar that is added to the party's loss.

        What would be sent is flat, and was computed from these features.
        """


class LabelDefence(Defence):
    """What to train on instead of labels, and the way back from what the model then predicts."""

    protects: ClassVar[tuple[Released, ...]] = ("labels",)

    @abstractmethod
    def targets(self, labels_N: Tensor) -> Tensor:
        """Return what the task loss compares with: classes (N,), or probabilities (N, K)."""

    @abstractmethod
    def decode(self, scores_BK: Tensor) -> Tensor:
        """Return scores of the true classes from those of the model."""


@dataclass(frozen=True)
class Leaving:
    """Where a gradient goes, with the true labels (B,) of its rows where the party knows them."""

    step: int
    receiver: str
    labels: Tensor | None = None


class GradientDefence(Defence):
    """Changes a gradient before it leaves its party.

    Attributes:
        row_wise: whether each row that leaves depends on the same row alone.
    """

    protects: ClassVar[tuple[Released, ...]] = ("contributions", "returned gradients")
    row_wise: ClassVar[bool] = False

    @abstractmethod
    def protect(self, gradient_BD: Tensor, leaving: Leaving) -> Tensor:
        """Return what leaves instead of `gradient_BD`, flat rows of one batch."""


class RepresentationChain(nn.Module):
    """Layers and penalties before the guard, of at least one defence."""

    def __init__(self, defences: Sequence[RepresentationDefence]) -> None:
        super().__init__()
        self._defences = nn.ModuleList(defences)

    def forward(self, h_B: Tensor, features_B: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return what goes to the guard, of the same shape, and the sum of the penalties."""
        penalties = []
        for defence in self._defences:
            h_BD, penalty = defence(h_B.flatten(1), features_B, step)
            h_B = h_BD.reshape(h_B.shape)
            penalties.append(penalty)
        return h_B, sum(penalties[1:], penalties[0])

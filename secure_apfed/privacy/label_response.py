"""K-ary randomised response on labels: each is kept or replaced by chance, once, before training.

Run by: the active, on its training labels. Against: whoever reads anything that the labels
move afterwards, the released representations and the finished model included.

Guarantee: epsilon_y label differential privacy, delta 0, replace-one label, features public.
As every later step reads the randomised labels only, it holds for any number of epochs and
composes with nothing. It says nothing of features. Test accuracy must be taken on
untouched labels that train nothing.

Letters: N rows, K classes.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from secure_apfed.privacy.label_mechanism import chances, check_labels, check_strength, is_below
from secure_apfed.privacy.settings import LabelSettings

__all__ = ["LabelResponse"]


@dataclass(frozen=True, kw_only=True)
class LabelResponse:
    """What happens to one label, apart from any randomness.

    Attributes:
        epsilon: epsilon_y, above 0 and at most 40.
        classes: K, at least 2.
    """

    name: ClassVar[str] = "randomised_response"
    unsafe: ClassVar[bool] = False

    epsilon: float
    classes: int

    def __post_init__(self) -> None:
        check_strength(self.epsilon, self.classes)

    @classmethod
    def from_settings(cls, settings: LabelSettings, *, classes: int) -> "LabelResponse":
        """Build it."""
        assert settings.epsilon is not None
        return cls(epsilon=settings.epsilon, classes=classes)

    @property
    def stages(self) -> int:
        """One: everything is answered before training."""
        return 1

    @property
    def keep_probability(self) -> float:
        """e^eps / (e^eps + K - 1), K-ary randomised response (Kairouz, Oh and Viswanath 2016)."""
        return 1 - self.replace_probability

    @property
    def replace_probability(self) -> float:
        """(K - 1) / (e^eps + K - 1): that some other class is answered."""
        return (self.classes - 1) / (math.exp(self.epsilon) + self.classes - 1)

    def statement(self) -> str:
        """What is guaranteed, in words for the report."""
        return (
            f"label DP, epsilon_y {self.epsilon:g}, delta 0, for any number of epochs: "
            f"{self.classes}-ary randomised response keeps a training label with probability "
            f"{self.keep_probability:.3g}; features are not covered"
        )

    def answer(
        self, labels_N: torch.Tensor, *, key: bytes, prior_NK: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the labels to train on; see `LabelMechanism.answer`.

        The chances are 64-bit integers: the chance of a replacement is rounded up, which only
        lowers epsilon, and which class replaces is uniform to within a share of K / 2^64.
        """
        del prior_NK
        labels = check_labels(labels_N, self.classes)
        facts = f"{self.epsilon!r} {self.classes}"
        chance, choice = chances(key, facts, labels.astype("<i8"), count=len(labels))
        replaced = is_below(chance, np.full(len(labels), self.replace_probability))
        others = np.uint64(self.classes - 1)
        moved = (labels + 1 + (choice % others).astype(np.int64)) % self.classes
        return torch.from_numpy(np.where(replaced, moved, labels)).to(labels_N.device)

"""Labels as they are, by name: everything that is trained on them may tell them.

Run by: an active that asks for no label privacy.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from secure_apfed.privacy.label_mechanism import check_labels
from secure_apfed.privacy.settings import LabelSettings

__all__ = ["NoLabelPrivacy"]


@dataclass(frozen=True, kw_only=True)
class NoLabelPrivacy:
    """Answers with the label itself; epsilon_y is infinite.

    Attributes:
        classes: K.
    """

    name: ClassVar[str] = "none"
    unsafe: ClassVar[bool] = True

    classes: int

    @classmethod
    def from_settings(cls, settings: LabelSettings, *, classes: int) -> "NoLabelPrivacy":
        """Build it; there is nothing to set."""
        del settings
        return cls(classes=classes)

    @property
    def epsilon(self) -> float:
        """Infinite."""
        return math.inf

    @property
    def stages(self) -> int:
        """One."""
        return 1

    def answer(
        self, labels_N: torch.Tensor, *, key: bytes, prior_NK: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the labels themselves; see `LabelMechanism.answer`."""
        del key, prior_NK
        check_labels(labels_N, self.classes)
        return labels_N

    def statement(self) -> str:
        """Nothing is guaranteed."""
        return "no label DP"

"""Gradient direction: a curious passive of TVFL compares gradients with those of known rows.

Run by: one passive, or several that pool what they have. Rows of one class pull the head the
same way, so their gradients have a small angle to each other and a large one to those of other
classes; one known row of each class names all others (Li et al., 2022, Label Leakage and
Protection in Two-party Split Learning, Section 3.2, there for two classes).
"""

from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from apfed_attacks.interface import Guess, Prediction
from apfed_attacks.labels.completion import LabelProbe
from apfed_attacks.labels.label_gradients import gradients_over_time, why_no_gradients
from apfed_attacks.view import AdversaryView, Observed

__all__ = ["GradientDirection"]


class GradientDirection(LabelProbe):
    """Names a row by the known row whose gradient has the smallest angle to its own.

    Attacks: the gradients of the first and of the last kept epoch, and their mean over many.
    Baselines: the majority class, and probes on the own features x with the same labels.
    """

    name: ClassVar[str] = "gradient_direction"
    suite = tuple({"labels_per_class": known} for known in (1, 4))

    labels_per_class: int = Field(1, ge=1)

    def applicable(self, view: AdversaryView) -> str | None:
        """A passive needs gradients of the task loss, and a known row of each class."""
        return why_no_gradients(self, view)

    def run(self, view: AdversaryView, seed: int) -> Guess:
        """Guess the labels of the rows that got a gradient and are not known."""
        over_time = gradients_over_time(view)
        positions = self.choose(view, over_time["first epoch"].positions, seed)
        guess = self.from_own_columns(view, positions, seed)
        return replace(
            guess,
            attacks={
                f"direction in the {name}": _named(view, seen, guess.positions)
                for name, seen in over_time.items()
            },
        )


def _named(view: AdversaryView, seen: Observed, positions: Tensor) -> Prediction:
    """Score each class by the largest cosine to the gradient of a known row of it."""
    known = view.knowledge.labels
    there_n = torch.isin(known.positions, seen.positions)
    anchors_nD = F.normalize(seen.at(known.positions[there_n]).double(), dim=1)
    cosine_Nn = F.normalize(seen.at(positions).double(), dim=1) @ anchors_nD.T
    labels_n = known.values[there_n]
    scores_NK = np.full((len(positions), view.knowledge.classes), -1.0)
    for label in labels_n.unique().tolist():
        scores_NK[:, label] = cosine_Nn[:, labels_n == label].amax(dim=1).numpy(force=True)
    return Prediction(scores_NK)

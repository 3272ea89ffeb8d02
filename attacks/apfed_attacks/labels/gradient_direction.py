"""Gradient direction: a curious passive of TVFL compares gradients with those of known rows.

Run by: one passive, or several that pool what they have. Rows of one class pull the head the
same way, so their gradients have a small angle to each other and a large one to those of other
classes; one known row of each class names all others (Li et al., 2022, Label Leakage and
Protection in Two-party Split Learning, Section 3.2, there for two classes).
"""

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from apfed_attacks.interface import Guess, Prediction
from apfed_attacks.labels.label_gradients import GradientProbe
from apfed_attacks.view import AdversaryView, Observed

__all__ = ["GradientDirection"]


class GradientDirection(GradientProbe):
    """Names a row by the known row whose gradient has the smallest angle to its own.

    Attacks: the gradients of the first and of the last kept epoch, and their mean over many.
    Baselines: the majority class, and probes on the own features x with the same labels.
    """

    name = "gradient_direction"
    suite = ({"labels_per_class": 1}, {"labels_per_class": 4})

    labels_per_class: int = Field(1, ge=1)

    def run(self, view: AdversaryView, seed: int) -> Guess:
        over_time, _, guess = self.seen(view, seed)
        attacks = {
            f"direction in the {name}": _named(view, seen, guess.positions)
            for name, seen in over_time.items()
        }
        return replace(guess, attacks=attacks)


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

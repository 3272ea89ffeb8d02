"""Gradient length: a curious passive of TVFL tells rare positives by how long their gradients are.

Run by: one passive, or several that pool what they have. With two classes the gradient of a row
is its head's Jacobian times (p - y); a model that has learnt the shares says little for the rare
class, so |p - y| is near 1 for its rows and near 0 for the others (Li et al., 2022, Label
Leakage and Protection in Two-party Split Learning, Section 3.1).
"""

from dataclasses import replace

import numpy as np
from pydantic import Field

from apfed_attacks.interface import Guess, Prediction
from apfed_attacks.labels.label_gradients import GradientProbe
from apfed_attacks.view import AdversaryView

__all__ = ["GradientNorm"]


class GradientNorm(GradientProbe):
    """Calls the rows with the longest gradients the rarer class, as many as the priors say.

    Attacks: the lengths of the first and of the last kept epoch. Baselines: the majority class,
    and clusters or probes on the own features x.
    """

    name = "gradient_norm"
    suite = ({"labels_per_class": 0},)

    labels_per_class: int = Field(0, ge=0)

    def applicable(self, view: AdversaryView) -> str | None:
        reason = super().applicable(view)
        if reason is None and view.knowledge.classes != 2:
            return f"the lengths of gradients tell two classes apart, not {view.knowledge.classes}"
        if reason is None and view.knowledge.priors is None:
            return "without the classes' shares a length has no threshold"
        return reason

    def run(self, view: AdversaryView, seed: int) -> Guess:
        over_time, _, guess = self.seen(view, seed)
        priors_K = np.array(view.knowledge.priors)
        sign_K = np.where(np.arange(2) == priors_K.argmin(), 1.0, -1.0)
        attacks = {}
        for name, seen in over_time.items():
            length_N = seen.at(guess.positions).norm(dim=1).double().numpy(force=True)
            above_N = length_N - np.quantile(length_N, 1 - priors_K.min())
            attacks[f"length in the {name}"] = Prediction(above_N[:, None] * sign_K)
        return replace(guess, attacks=attacks)

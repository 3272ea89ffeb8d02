"""Batch label inference: a curious passive of TVFL explains a batch's gradients by its labels.

Run by: one passive, or several that pool what they have. The gradient of row i on its
representation is J (p_i - y_i), with J of the active's head (the same for all rows while the head
is linear), p_i the prediction and y_i the label, all unknown. Gradient inversion fits J, the
logits of p and of y together until the gradients come out; the fitted y then separate the rows
by label. After Zou et al., 2022, Defending Batch-Level Label Inference and Replacement Attacks in
Vertical Federated Learning, whose passive sees the batch's mean gradient of its own parameters;
ours sees the gradient of each row, which is more.

Letters: N rows, D numbers of a representation, K classes.
"""

from dataclasses import replace

import numpy as np
import torch
from pydantic import Field
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from apfed_attacks.interface import FloatArray, Guess, Prediction
from apfed_attacks.labels.completion import known_labels, named
from apfed_attacks.labels.label_gradients import GradientProbe
from apfed_attacks.view import AdversaryView
from secure_apfed.seeds import seeded

__all__ = ["BatchLabels", "explain_labels"]


class BatchLabels(GradientProbe):
    """Fits head, predictions and labels to the first kept epoch's gradients, and to their mean.

    The fit names no class: known labels name it, without any the priors or, as a bound, the
    truth. Baselines: the majority class, and probes or clusters on the own features x.

    Attributes:
        rate: of Adam; iterations: of the fit.
        starts: fits from different starts, of which the best explanation is taken.
    """

    name = "batch_labels"
    suite = ({"labels_per_class": 0}, {"labels_per_class": 1})

    labels_per_class: int = Field(1, ge=0)
    rate: float = Field(0.05, gt=0)
    iterations: int = Field(500, ge=1)
    starts: int = Field(3, ge=1)

    def run(self, view: AdversaryView, seed: int) -> Guess:
        over_time, positions, guess = self.seen(view, seed)
        over_time.pop("last epoch", None)
        attacks = {}
        for name, observed in over_time.items():
            fits = [
                explain_labels(
                    observed.at(positions), view.knowledge.classes, rate=self.rate,
                    iterations=view.iterations, seed=seed + start,
                )
                for start in range(self.starts)
            ]  # fmt: skip
            labels_NK = min(fits, key=lambda fit: fit[1])[0].numpy(force=True)
            for how, found in _named(view, positions, labels_NK).items():
                attacks[how if name == "first epoch" else f"{how}, {name}"] = found
        return replace(guess, attacks=attacks)


def explain_labels(
    gradient_ND: Tensor, classes: int, *, rate: float, iterations: int, seed: int
) -> tuple[Tensor, float]:
    """Return label probabilities (N, K), classes in no order, and the share left unexplained.

    Minimises sum |g_i - (softmax(s_i) - softmax(u_i)) J|^2 / sum |g_i|^2 over J, s and u.
    """
    scaled_ND = gradient_ND.double()
    size = float(scaled_ND.square().mean().sqrt())
    scaled_ND = scaled_ND / (size or 1.0)
    rows, width = scaled_ND.shape
    with seeded(seed, "attacks", "batch labels"):
        head_KD = torch.randn(classes, width, dtype=torch.float64)
        guess_NK = 0.1 * torch.randn(rows, classes, dtype=torch.float64)
        label_NK = torch.randn(rows, classes, dtype=torch.float64)
    head_KD, guess_NK, label_NK = (
        start.to(scaled_ND.device).requires_grad_() for start in (head_KD, guess_NK, label_NK)
    )
    adam = torch.optim.Adam([head_KD, guess_NK, label_NK], lr=rate)
    loss = scaled_ND.square().mean()
    for _ in range(iterations):
        error_NK = guess_NK.softmax(dim=1) - label_NK.softmax(dim=1)
        loss = (scaled_ND - error_NK @ head_KD).square().mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
    with torch.no_grad():
        return label_NK.softmax(dim=1), float(loss)


def _named(view: AdversaryView, positions: Tensor, labels_NK: FloatArray) -> dict[str, Prediction]:
    known_N = known_labels(view, positions).numpy()
    unknown_NK = labels_NK[known_N < 0]
    if len(view.knowledge.labels):
        evidence_KK = np.zeros((view.knowledge.classes, view.knowledge.classes))
        np.add.at(evidence_KK, known_N[known_N >= 0], labels_NK[known_N >= 0])
        _, fitted_of_class = linear_sum_assignment(-evidence_KK)
        return {"inversion named by labels": Prediction(unknown_NK[:, fitted_of_class])}
    return named("inversion", unknown_NK, view.knowledge.priors)

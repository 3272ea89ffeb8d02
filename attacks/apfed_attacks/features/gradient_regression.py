"""Regression of the sums of gradients that a curious active opened to a passive's features.

Run by: the active of APFed, whatever the passives' objectives are. A passive's gradient on a row's
representation holds a projection of that row's features (docs/tell-nothing.md), and so does the sum
of all passives'. The mean of a row's sums over all steps weakens what a single batch or a moving
decoder adds. Shadow rows, whose features at the victim the active knows, teach a regression from
these means to the victim's columns. Neither encryption nor masks protect against it: the active
opens these sums by right.

Letters: N rows, D numbers of a representation, F columns.
"""

import numpy as np
import torch

from apfed_attacks.columns import beside
from apfed_attacks.features.contrastive_inversion import opened_batches
from apfed_attacks.features.regression import FeatureAttack, Regression
from apfed_attacks.interface import FloatArray, Guess
from apfed_attacks.view import AdversaryView, AttackError


class GradientRegression(FeatureAttack):
    """A regression from each row's mean opened sum to the victim's features.

    The sum stands alone and beside own features.

    Attacks use the mean over all steps that the transcript kept. Baselines, with the same shadow
    rows: their mean, and the own features x.
    """

    name = "gradient_regression"
    roles = ("active",)
    suite = ({"shadow_rows": 30}, {"shadow_rows": 100})

    def applicable(self, view: AdversaryView) -> str | None:
        if view.description.opens != "gradients":
            return f"{view.description}: the active receives no sum of gradients"
        if not any(opened_batches(view, epoch) for epoch in view.epochs):
            return (
                "the recording holds no sum as the active decoded it; set transcript.keep to "
                "first_and_last or all"
            )
        return None

    def run(self, view: AdversaryView, seed: int) -> Guess:
        means = average_sums(view)
        if not means:
            raise AttackError(
                f"{view.name} opened no sum of gradients of people whom {view.knowledge.victim} "
                "holds"
            )
        known = torch.tensor(sorted(means))
        positions = self.choose(view, known, seed)
        sums_ND = self.scaled(torch.stack([means[int(place)] for place in positions]), seed)
        x_NF = self.own(view, positions, seed)
        regress = Regression.of(view, positions, hidden=self.hidden, seed=seed)
        columns: dict[str, FloatArray] = {"sums": sums_ND, **beside("sums", sums_ND, x_NF)}
        return regress.guess(regress.on(columns), {"x": np.asarray(x_NF)})


def average_sums(view: AdversaryView) -> dict[int, torch.Tensor]:
    """Return each position's mean opened sum, (D,), over all steps that the view holds.

    Rows that the victim does not hold took no part in its loss, and are left out.
    """
    total: dict[int, torch.Tensor] = {}
    steps: dict[int, int] = {}
    for epoch in view.epochs:
        for step, rows_B, _ in opened_batches(view, epoch):
            held_B = view.holds(view.knowledge.victim, rows_B)
            sums_BD = view.opened[step].double().flatten(1)
            for place, sum_D in zip(rows_B[held_B].tolist(), sums_BD[held_B], strict=True):
                total[place] = total.get(place, torch.zeros_like(sum_D)) + sum_D
                steps[place] = steps.get(place, 0) + 1
    return {place: sum_D / steps[place] for place, sum_D in total.items()}

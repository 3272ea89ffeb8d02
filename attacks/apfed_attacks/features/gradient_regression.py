"""Regression of the sums of gradients that a curious active opened to a passive's features.

Run by: the active of APFed, whatever the passives' objectives are. A passive's gradient on a row's
representation holds a projection of that row's features (apfed-without-labels.md), and so does the
sum of all passives'. The mean of a row's sums over all steps weakens what a single batch or a
moving decoder adds. Shadow rows, whose features at the victim the active knows, teach a regression
from these means to the victim's columns. Neither encryption nor masks protect against it: the
active opens these sums by right.

Letters: N rows, D numbers of a representation, F columns.
"""

from collections.abc import Iterator

import numpy as np
from torch import Tensor

from apfed_attacks.columns import join_own_columns
from apfed_attacks.features.opened import (
    average_rows,
    explain_missing_gradient_sums,
    explain_missing_sums,
    list_opened_batches,
)
from apfed_attacks.features.regression import FeatureAttack, Regression
from apfed_attacks.interface import FloatArray, Guess
from apfed_attacks.view import AdversaryView, AttackError


class GradientRegression(FeatureAttack):
    """A regression from each row's mean revealed sum of gradients to the victim's features.

    The mean is over all steps that the transcript stores. It is used by itself, and joined with own
    features. Baselines, which know the same shadow rows (rows whose features the adversary has):
    their mean, and the own features x.
    """

    name = "gradient_regression"
    roles = ("active",)
    suite = ({"shadow_rows": 30}, {"shadow_rows": 100})

    def explain_missing_input(self, view: AdversaryView) -> str | None:
        """Return why no sum of gradients is revealed or recorded; None: some are."""
        return explain_missing_gradient_sums(view) or explain_missing_sums(view)

    def run(self, view: AdversaryView, seed: int) -> Guess:
        """Regress each row's mean revealed sum to the victim's features."""
        sums = average_rows(_iter_sums(view))
        if sums is None:
            raise AttackError(
                f"{view.name} opened no sum of gradients of people whom {view.knowledge.victim} "
                "holds"
            )
        positions = self.choose_rows(view, sums.positions, seed)
        sums_ND = self.scale_columns(sums.select_positions(positions), seed)
        x_NF = self.scale_own_columns(view, positions, seed)
        regress = Regression.from_view(view, positions, hidden=self.hidden, seed=seed)
        columns: dict[str, FloatArray] = {
            "sums": sums_ND,
            **join_own_columns("sums", sums_ND, x_NF),
        }
        return regress.make_guess(regress.predict_from_columns(columns), {"x": np.asarray(x_NF)})


def _iter_sums(view: AdversaryView) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield rows (B,) and their revealed sums (B, D) of every step in the view.

    Rows that the victim does not have took no part in its loss, and are left out.
    """
    for epoch in view.epochs:
        for step, rows_B, _ in list_opened_batches(view, epoch):
            present_B = view.has_rows(view.knowledge.victim, rows_B)
            yield rows_B[present_B], view.revealed[step].double().flatten(1)[present_B]

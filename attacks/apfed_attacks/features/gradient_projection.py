"""Projections of passives' features, taken out of opened sums by the form of each objective.

Run by: the active of APFed that knows, from the contract, which objectives its passives have. A
row's gradient has one part that the active could nearly compute, since it sent the representation,
and one that depends on the passive's row. The first hides the second; this attack takes it away.

Reconstruction, Eq. (12) of APFed: with a decoder whose Jacobian is J, the gradient is
(2 / F) J^T (DEC(z) - x), for a linear decoder W z + b that is (2 / F) (W^T W z + W^T b - W^T x).
Clustering: R^T (softmax(R z) - p), p the soft targets of the row. Both are a function of z minus a
projection of what the passive has. What a ridge regression on z explains of the sums of an epoch
is taken off, and the projection is left.

Contrast, Eqs. (14) to (16): the gradient is -(1 / tau |z|) (I - u u^T) (p - mean of the others),
u = z / |z|. Times |z| its rows are of one scale; what a regression on u explains is taken off.

In a sum of several objectives each form takes its part, and each is a set of columns of its own.
Own derivation. Where a clip shortens rows, or a decoder is far from linear, less is taken off.

Letters: N rows, B batch, D numbers of a representation, F columns of a passive.
"""

from collections.abc import Iterator, Mapping
from typing import Literal, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from apfed_attacks.features.opened import (
    average_rows,
    explain_missing_gradient_sums,
    explain_missing_sums,
    list_opened_batches,
)
from apfed_attacks.features.regression import FeatureAttack, Regression
from apfed_attacks.interface import FloatArray, Guess
from apfed_attacks.view import AdversaryView, AttackError, Observed

Form: TypeAlias = Literal["affine", "cosine"]
FORMS: Mapping[str, Form] = {
    "reconstruction": "affine",
    "clustering": "affine",
    "contrastive": "cosine",
}
"""Form in which an objective's gradient depends on what the active sent, by objective."""
_RANK_TOLERANCE = 1e-9  # smallest singular value that counts, in units of the largest
_STRENGTHS = tuple(10.0**power for power in range(-8, 3))
"""Strengths of the ridge, in units of the largest squared singular value."""
_MAX_LEVERAGE = 0.95
"""Largest weight of a row in its own fit: above it the leave-one-out residual says little."""


class GradientProjection(FeatureAttack):
    """A regression from residuals of sums to the victim's features.

    A residual is what the representations that were sent do not explain of a sum of gradients.

    Attacks, for each form of gradient among the passives' objectives: the mean residual over all
    stored steps, alone, beside own features x, and beside the mean of what was sent. Baselines,
    with the same shadow rows (rows whose features the adversary knows): their mean, and x.
    """

    name = "gradient_projection"
    roles = ("active",)
    suite = ({"shadow_rows": 30}, {"shadow_rows": 100})

    def explain_missing_input(self, view: AdversaryView) -> str | None:
        """Return why no residual can be computed; None: some can.

        No gradients are revealed, or no passive has an objective whose gradient has a known form.
        """
        reason = explain_missing_gradient_sums(view)
        if reason:
            return reason
        if not view.terms_by_passive:
            return "the view does not say what the passives contribute (agreed)"
        if not forms_of(view):
            known = ", ".join(FORMS)
            return f"no passive has an objective whose gradient's form is known ({known})"
        return explain_missing_sums(view)

    def run(self, view: AdversaryView, seed: int) -> Guess:
        """Regress the residuals of sums to the victim's features, for each known form of
        gradient.
        """
        rests = {form: average_rests(view, form) for form in forms_of(view)}
        sent, _ = next(iter(rests.values()))
        positions = self.choose_rows(view, sent.positions, seed)
        x_NF = self.scale_own_columns(view, positions, seed)
        sent_ND = self.scale_columns(sent.select_positions(positions), seed)
        columns: dict[str, FloatArray] = {}
        for form, (_, rest) in rests.items():
            name = f"{form} rest of the sums"
            rest_ND = self.scale_columns(rest.select_positions(positions), seed)
            columns[name] = rest_ND
            columns[f"{name} and x"] = np.hstack([rest_ND, x_NF])
            columns[f"{name} and z"] = np.hstack([rest_ND, sent_ND])
        regress = Regression.from_view(view, positions, hidden=self.hidden, seed=seed)
        return regress.make_guess(regress.predict_from_columns(columns), {"x": x_NF})


def forms_of(view: AdversaryView) -> tuple[Form, ...]:
    """Return how the passives' gradients depend on what was sent: "affine", "cosine", each once.

    Objectives of another form are left out.
    """
    names = [agreed.objective.name for agreed in view.terms_by_passive.values()]
    return tuple(dict.fromkeys(FORMS[name] for name in names if name in FORMS))


def average_rests(view: AdversaryView, form: Form) -> tuple[Observed, Observed]:
    """Return by position the mean representation that was sent, and the mean residual of the sums.

    Both are (N, D). The residual is what a fit to what was sent leaves unexplained. Every epoch is
    fitted by itself, since passives train in between. Rows that the victim does not have took no
    part in its loss, and are left out.

    `form`: how gradients depend on what was sent, "affine" or "cosine".
    """
    averages = average_rows(_explain_epochs(view, form))
    if averages is None:
        raise AttackError(
            f"{view.name} opened no sum of gradients of people whom {view.knowledge.victim} holds"
        )
    sent_ND, rest_ND = averages.z.chunk(2, dim=1)
    return Observed(averages.positions, sent_ND), Observed(averages.positions, rest_ND)


def _explain_epochs(view: AdversaryView, form: Form) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield of each epoch the rows (N,), and what was sent joined with the residuals of the sums,
    (N, 2 D).

    `form`: how the objective's gradient depends on what was sent: "affine" or "cosine".
    """
    for epoch in view.epochs:
        rows_N, sent_ND, sums_ND = _collect_opened_rows(view, epoch)
        if not len(rows_N):
            continue
        # The gradient of a cosine is affine in the direction, times one over the norm.
        if form == "cosine":
            sums_ND = sums_ND * sent_ND.norm(dim=1, keepdim=True)
            sent_ND = F.normalize(sent_ND, dim=1)
        yield rows_N, torch.cat([sent_ND, compute_residuals(sums_ND, sent_ND)], dim=1)


def _collect_opened_rows(view: AdversaryView, epoch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return of an epoch the rows (N,) that the victim has, what was sent for them, and the
    revealed sums.

    The last two are (N, D).
    """
    rows = [torch.empty(0, dtype=torch.int64)]
    sent = list[Tensor]()
    sums = list[Tensor]()
    for step, rows_B, h_BD in list_opened_batches(view, epoch):
        present_B = view.has_rows(view.knowledge.victim, rows_B)
        rows.append(rows_B[present_B])
        sent.append(h_BD[present_B].double().flatten(1))
        sums.append(view.revealed[step][present_B].double().flatten(1))
    if not sent:
        return rows[0], torch.empty(0, 0), torch.empty(0, 0)
    return torch.cat(rows), torch.cat(sent), torch.cat(sums)


def compute_residuals(sums_ND: Tensor, sent_ND: Tensor) -> Tensor:
    """Return the residuals (N, D) of the sums after ridge regression on what was sent.

    They are leave-one-out residuals in closed form (PRESS: Golub, Heath and Wahba 1979, Section 2):
    each row is predicted by a fit without it. The ridge strength with the smallest residuals is
    taken. If no strength makes them smaller than subtracting the mean does, only the mean is
    subtracted. R is the rank of what was sent.
    """
    centred_ND = sums_ND - sums_ND.mean(dim=0)
    inputs_ND = sent_ND - sent_ND.mean(dim=0)
    left_NR, sizes_R, _ = torch.linalg.svd(inputs_ND, full_matrices=False)
    in_rank_R = sizes_R > _RANK_TOLERANCE * sizes_R[0].clamp(min=1e-300)
    left_NR = left_NR[:, in_rank_R]
    shares_R = (sizes_R[in_rank_R] / sizes_R[0].clamp(min=1e-300)).square()
    along_RD = left_NR.T @ centred_ND
    smallest_ND = centred_ND
    for strength in _STRENGTHS:
        filter_R = shares_R / (shares_R + strength)
        leverage_N1 = 1 / len(sums_ND) + left_NR.square() @ filter_R[:, None]
        if leverage_N1.max() > _MAX_LEVERAGE:
            # Some row would be predicted by itself: dividing by 1 - leverage is then unstable.
            continue
        residual_ND = (centred_ND - left_NR @ (filter_R[:, None] * along_RD)) / (1 - leverage_N1)
        if residual_ND.square().mean() < smallest_ND.square().mean():
            smallest_ND = residual_ND
    return smallest_ND

"""A5, contrastive inversion: a curious active reads the passives' representations out of sums.

Run by: the active of APFed-C, which sent h honestly and decoded the sum of the passives'
gradients. The gradient of the contrastive loss depends on the passive's unit representations
only, one equation for each unknown: L-BFGS finds those that explain the sum. With one passive
these are its representations; with several, one set that would explain their sum, a mixture.
From shadow rows it then learns representations, x^A -> x^p. The secure sum is no protection
against this: its receiver reads the sum.

Own derivation from Eqs. (14) to (16) of APFed; the start and the objective are close to
gradient matching (Zhu et al., 2019, Deep Leakage from Gradients). Not modelled: the clip of a
row's gradient (usual rows are far below it) and weights lambda_p that differ.

Letters: B batch, N rows of the epoch, D numbers of a representation.
"""

from typing import ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from attacks.completion import chosen_positions, own_columns, standardised
from attacks.interface import Attack, AttackError, Guess, Target
from attacks.reading import Observed, batches
from attacks.regression import Regression
from attacks.view import AdversaryView, Role
from secure_apfed.objectives import contrastive_loss

__all__ = ["ContrastiveInversion", "explain_gradient"]

_SMALLEST_BATCH = 2


class ContrastiveInversion(Attack):
    """Invert every sum of the last epoch, then regress to the victim's features.

    Attacks use the recovered representations, the same beside the own features x, and the
    sums as they are. Baselines, with the same shadow rows: their mean, and x alone.

    Attributes:
        shadow_rows: pairs that the adversary has.
        temperature, anchors, weight: the objective and lambda_p, which the contract says.
        passives: how many gradients the sum holds; it is divided by this number.
        hidden, most_rows, components: as in `inverse_network`.
    """

    name: ClassVar[str] = "contrastive_inversion"
    target: ClassVar[Target] = "features"
    roles: ClassVar[tuple[Role, ...]] = ("active",)

    shadow_rows: int = Field(100, ge=2)
    temperature: float = Field(1.0, gt=0)
    anchors: Literal["both", "active"] = "both"
    weight: float = Field(1.0, gt=0)
    passives: int = Field(1, ge=1)
    hidden: int = Field(128, ge=1)
    most_rows: int = Field(5_000, ge=2)
    components: int = Field(256, ge=2)

    def applicable(self, view: AdversaryView) -> str | None:
        """The active needs the sums that it decoded, of a contrastive objective."""
        if view.role not in self.roles:
            return f"{self.name} is mounted by the active party, not by the {view.role}"
        if view.method in ("single_view", "tvfl", "apfed_r"):
            return f"{view.method}: the active receives no sum of contrastive gradients"
        if not any(_opened(view, epoch) for epoch in view.epochs):
            return "the recording holds no sum as the active decoded it"
        return None

    def run(self, view: AdversaryView, seed: int) -> Guess:
        """Guess the victim's features of the rows of the last epoch that are no shadow rows."""
        sums, recovered = self._invert(view)
        positions = chosen_positions(view, sums.positions, self.most_rows, seed)
        z_ND, sum_ND, x_NF = (
            standardised(columns, components=self.components, seed=seed)
            for columns in (
                recovered.at(positions), sums.at(positions), own_columns(view, positions)
            )
        )  # fmt: skip
        regress = Regression.of(view, positions, hidden=self.hidden, seed=seed)
        return Guess(
            positions=positions[regress.unknown],
            attacks=regress.on(
                {
                    "recovered z": z_ND,
                    "recovered z and x": np.hstack([z_ND, x_NF]),
                    "sums and x": np.hstack([sum_ND, x_NF]),
                }
            ),
            baselines={"mean of the shadow rows": regress.mean(), **regress.on({"x": x_NF})},
        )

    def _invert(self, view: AdversaryView) -> tuple[Observed, Observed]:
        """Return sums and recovered representations of the last epoch with an opened sum."""
        last = [epoch for epoch in view.epochs if _opened(view, epoch)][-1]
        rows, sums, recovered = [], [], []
        for step, rows_B, h_BD in _opened(view, last):
            sum_BD = view.opened[step].flatten(1).double() / (self.passives * self.weight)
            rows.append(rows_B)
            sums.append(sum_BD)
            recovered.append(
                explain_gradient(
                    h_BD, sum_BD, temperature=self.temperature, anchors=self.anchors,
                    iterations=view.budget.iterations,
                )
            )  # fmt: skip
        positions, order = torch.cat(rows).sort()
        return (
            Observed(positions, torch.cat(sums)[order]),
            Observed(positions, torch.cat(recovered)[order]),
        )


def _opened(view: AdversaryView, epoch: int) -> list[tuple[int, Tensor, Tensor]]:
    """Return (step, rows (B,), what was sent (B, D)) of the steps whose sum was opened."""
    return [
        (step, rows_B, h_BD)
        for step, rows_B, h_BD in batches(view, epoch)
        if step in view.opened and len(rows_B) >= _SMALLEST_BATCH
    ]


def explain_gradient(
    h_BD: Tensor, gradient_BD: Tensor, *, temperature: float, anchors: str, iterations: int
) -> Tensor:
    """Return unit representations (B, D) for which the contrastive loss has this gradient.

    Args:
        h_BD: what the active sent.
        gradient_BD: B dL_p/dh of one passive, or a mean over passives.
        temperature: tau.
        anchors: "both" or "active".
        iterations: of L-BFGS on |B dL/dh - gradient|^2 / |gradient|^2.
    """
    h_BD, gradient_BD = h_BD.flatten(1).double(), gradient_BD.double()
    scale = gradient_BD.square().sum()
    if not scale:
        raise AttackError("the sum is zero everywhere; it holds no gradient to invert")
    start_BD = F.normalize(-gradient_BD, dim=1) + 0.5 * F.normalize(h_BD, dim=1)
    guess_BD = start_BD.clone().requires_grad_()
    sent_BD = h_BD.detach().clone().requires_grad_()
    optimiser = torch.optim.LBFGS(
        [guess_BD], max_iter=iterations, history_size=20, line_search_fn="strong_wolfe",
        tolerance_grad=1e-10, tolerance_change=1e-12,
    )  # fmt: skip

    def mismatch() -> Tensor:
        optimiser.zero_grad()
        loss = contrastive_loss(sent_BD, guess_BD, temperature=temperature, anchors=anchors)
        (found_BD,) = torch.autograd.grad(loss * len(h_BD), sent_BD, create_graph=True)
        error = (found_BD - gradient_BD).square().sum() / scale
        (guess_BD.grad,) = torch.autograd.grad(error, guess_BD)
        return error.detach()

    optimiser.step(mismatch)
    return F.normalize(guess_BD.detach(), dim=1)

"""A5, contrastive inversion: a curious active reads the passives' representations out of sums.

Run by: the active of APFed-C, which sent h honestly and decoded the sum of the passives'
gradients. The gradient of the contrastive loss depends on the passive's unit representations
only, one equation for each unknown: L-BFGS finds those that explain the sum; of several passives
a mixture. From shadow rows it then learns representations, x^A -> x^p. The secure sum is no
protection against this: its receiver reads the sum.

Own derivation from Eqs. (14) to (16) of APFed; the start and the objective are close to
gradient matching (Zhu et al., 2019, Deep Leakage from Gradients). A passive's weight and the clip
of its rows are part of what is matched; a clipped row keeps its direction only. Every step is
inverted by itself, since the passive's networks change from step to step.

Letters: B batch, N rows of the epoch, D numbers of a representation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from apfed_attacks.columns import join_own_columns
from apfed_attacks.features.opened import explain_missing_gradient_sums, list_opened_batches
from apfed_attacks.features.regression import FeatureAttack, Regression
from apfed_attacks.interface import Guess
from apfed_attacks.view import AdversaryView, AgreedTerms, AttackError, Observed
from secure_apfed.networks.objectives import contrastive_loss
from secure_apfed.settings import ContrastiveSettings

_MIN_BATCH = 2


class ContrastiveInversion(FeatureAttack):
    """An attack that recovers the passives' representations from the sums of the last epoch.

    It then regresses these to the victim's features. Attacks use the recovered representations and
    the sums as they are, also beside the own features x. Baselines, with the same shadow rows (rows
    whose features the adversary knows): their mean, and x alone.
    """

    name = "contrastive_inversion"
    roles = ("active",)

    def explain_missing_input(self, view: AdversaryView) -> str | None:
        """Return why no contrastive gradient sum can be inverted; None: some can.

        None is revealed or recorded, or the objective is another one.
        """
        reason = explain_missing_gradient_sums(view) or explain_not_contrastive(view)
        if reason:
            return reason
        if not any(list_opened_batches(view, epoch) for epoch in view.epochs):
            return "the recording holds no sum as the active decoded it"
        return None

    def run(self, view: AdversaryView, seed: int) -> Guess:
        """Invert the sums of the last epoch, and regress what is recovered to the victim's
        features.

        The sums as they are are regressed, too.
        """
        sums, recovered = self._invert_sums(view)
        positions = self.choose_rows(view, sums.positions, seed)
        z_ND, sum_ND = (
            self.scale_columns(observed.select_positions(positions), seed)
            for observed in (recovered, sums)
        )
        x_NF = self.scale_own_columns(view, positions, seed)
        regress = Regression.from_view(view, positions, hidden=self.hidden, seed=seed)
        columns = {
            "recovered z": z_ND,
            **join_own_columns("recovered z", z_ND, x_NF),
            **join_own_columns("sums", sum_ND, x_NF),
        }
        return regress.make_guess(regress.predict_from_columns(columns), {"x": x_NF})

    def _invert_sums(self, view: AdversaryView) -> tuple[Observed, Observed]:
        """Return the sums of one epoch, and the representations recovered from them.

        It is the last epoch with a sum that is not zero.

        Raises AttackError: all sums of all epochs are zero.
        """
        contributors = list(view.terms_by_passive.values())
        rows_and_steps = list[tuple[Tensor, SummedStep]]()  # rows of a step, and its sum
        for epoch in reversed(view.epochs):
            for step, rows_B, h_BD in list_opened_batches(view, epoch):
                # Rows that the victim does not have took no part in its loss.
                present_B = view.has_rows(view.knowledge.victim, rows_B)
                summed_step = SummedStep.from_batch(h_BD[present_B], view.revealed[step][present_B])
                if present_B.sum() >= _MIN_BATCH and summed_step.revealed_sum.any():
                    rows_and_steps.append((rows_B[present_B], summed_step))
            if rows_and_steps:
                break
        else:
            raise AttackError(
                f"every sum that {view.name} opened is zero everywhere for people whom "
                f"{view.knowledge.victim} holds; there is no gradient to invert"
            )
        recovered_ND = torch.cat(
            [
                recover_representations([summed_step], contributors, view.iterations)
                for _, summed_step in rows_and_steps
            ]
        )
        sums_ND = torch.cat([summed_step.revealed_sum for _, summed_step in rows_and_steps])
        positions, order = torch.cat([rows for rows, _ in rows_and_steps]).sort()
        return Observed(positions, sums_ND[order]), Observed(positions, recovered_ND[order])


def explain_not_contrastive(view: AdversaryView) -> str | None:
    """Return why the sums of this view are not of one contrastive objective; None: they are."""
    # A list, since settings of plug-in objectives may not be hashable.
    objectives = [terms.objective for terms in view.terms_by_passive.values()]
    if not objectives:
        return "the view does not say what the passives contribute (agreed)"
    if any(objective.name != "contrastive" for objective in objectives):
        return "a passive contributes gradients of another objective than the contrastive one"
    if any(objective != objectives[0] for objective in objectives):
        return "the passives' contrastive objectives differ, so no one set explains their sum"
    return None


@dataclass(frozen=True, eq=False)
class SummedStep:
    """One step's representations, and the sum of gradients that the active decrypted for them.

    Attributes:
        sent_rows: what the active sent, (B, D).
        revealed_sum: sum of lambda_p B dL_p/dh over the passives p, with clipped rows, (B, D):
            lambda_p is a passive's weight, L_p its loss, B the number of rows.
        person_index: index of each row's person among the unknown representations, (B,).
    """

    sent_rows: Tensor
    revealed_sum: Tensor
    person_index: Tensor

    @classmethod
    def from_batch(cls, h_BD: Tensor, sum_BD: Tensor, people_B: Tensor | None = None) -> Self:
        """Return one step in double precision.

        `h_BD`, `sum_BD`: what was sent, and the decrypted sum. `people_B`: index of each row's
        person; None: each row is of another person.
        """
        people_B = torch.arange(len(h_BD)) if people_B is None else people_B
        return cls(h_BD.flatten(1).double(), sum_BD.flatten(1).double(), people_B)


def recover_representations(
    steps: Sequence[SummedStep],
    contributors: Sequence[AgreedTerms],
    iterations: int,
    *,
    start_ND: Tensor | None = None,
) -> Tensor:
    """Return unit representations (N, D) with which the contributors would return these sums.

    All contributors are taken to have the same representations. L-BFGS minimises |predicted -
    sum|^2 / |sum|^2.

    Args:
        steps: what was sent in each step, and the decrypted sum.
        contributors: what the contract says about each passive, all with the same contrastive
            objective.
        iterations: maximum number of iterations of the optimiser.
        start_ND: where it starts, of any norm; None: a mixture of the first sum and h.

    Raises:
        AttackError: all sums are zero.
    """
    first = steps[0]
    scale = sum(float(step.revealed_sum.square().sum()) for step in steps)
    if not scale:
        raise AttackError("the sum is zero everywhere; it holds no gradient to invert")
    if start_ND is None:
        start_ND = F.normalize(-first.revealed_sum, dim=1) + 0.5 * F.normalize(
            first.sent_rows, dim=1
        )
    guess_ND = start_ND.double().clone().requires_grad_()
    optimiser = torch.optim.LBFGS(
        [guess_ND],
        max_iter=iterations,
        history_size=20,
        line_search_fn="strong_wolfe",
        tolerance_grad=1e-12,
        tolerance_change=1e-15,
    )

    def compute_mismatch() -> Tensor:
        """Return |predicted - sum|^2 / |sum|^2 over all steps, and set the gradient for L-BFGS."""
        optimiser.zero_grad()
        error = guess_ND.new_zeros(())
        for step in steps:
            predicted_BD = predict_sum(step.sent_rows, guess_ND[step.person_index], contributors)
            error = error + (predicted_BD - step.revealed_sum).square().sum() / scale
        (guess_ND.grad,) = torch.autograd.grad(error, guess_ND)
        return error.detach()

    optimiser.step(compute_mismatch)
    return F.normalize(guess_ND.detach(), dim=1)


def predict_sum(h_BD: Tensor, p_BD: Tensor, contributors: Sequence[AgreedTerms]) -> Tensor:
    """Return the sum (B, D) that the active would decrypt if every contributor had given
    representations.

    It is differentiable. `h_BD`: what the active sends. `p_BD`: representations of every
    contributor. `contributors`: what the contract says about each contributing passive.
    """
    objective = contributors[0].objective
    assert isinstance(objective, ContrastiveSettings)
    sent_BD = h_BD.detach().clone().requires_grad_()
    loss = contrastive_loss(
        sent_BD, p_BD, temperature=objective.temperature, anchors=objective.anchors
    )
    # Contributions are B dL/dh, the gradient of each row's own loss.
    (row_BD,) = torch.autograd.grad(loss * len(h_BD), sent_BD, create_graph=True)
    scale_B1 = torch.zeros_like(row_BD[:, :1])
    for agreed in contributors:
        # A row is multiplied by lambda_p or, if that is less, by the factor that clips it.
        weight_B1 = torch.full_like(scale_B1, agreed.weight)
        if agreed.clip is not None:
            norm_B1 = row_BD.norm(dim=1, keepdim=True).clamp(min=1e-30)
            weight_B1 = (agreed.clip / norm_B1).clamp(max=agreed.weight)
        scale_B1 = scale_B1 + weight_B1
    return row_BD * scale_B1

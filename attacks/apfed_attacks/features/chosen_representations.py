"""A6, chosen representations: a malicious active of APFed-C reads the passives' own ones.

Run by: an active that sends one direction u for every person in place of representations. The
cosine loss then answers each row with (m - P z_i) / (tau |h|), where z_i is the passive's unit
representation, P takes its part along u away, and m is the same for all rows: differences of
rows are differences of people. A second direction v gives the part along u, unit norms and the
loss itself give the rest. With several passives the same holds of the sum of their z_i, and only
of the sum.

Own derivation from Eqs. (14) to (16) of APFed. Where the protocol refuses representations that
are too much alike, `spread` makes them differ, and the answers are explained numerically; or
`decoys` fill the batch.

Letters: B batch, N people asked about, D numbers of a representation.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from apfed_attacks.features.contrastive_inversion import (
    SummedStep,
    explain_not_contrastive,
    recover_representations,
)
from apfed_attacks.features.regression import guess_features
from apfed_attacks.interface import Guess
from apfed_attacks.live.strategy import ActiveAttack, LiveActive, read_notes
from apfed_attacks.view import AdversaryView, AgreedTerms, Knowledge
from secure_apfed.settings import ContrastiveSettings

_LENGTH = 4.0  # norm of what is sent, if the rules allow it


class ChosenRepresentations(ActiveAttack):
    """An attack that sends representations along two vectors, to rebuild the passives' own ones.

    The active asks: it sends what it chose, and reads the sum of the passives' gradients. What is
    rebuilt is then regressed to features.

    Without rules both vectors go into one batch, every person twice; under the protocol they are
    two steps, between which the passives train.

    With decoys (rows of random vectors) only what is the same for all rows of a vector is used, not
    the loss itself.
    """

    name = "chosen_representations"
    keeps = ("people", "sent", "opened", "batch")

    iterations: int = Field(500, ge=1)

    def explain_missing_input(self, view: AdversaryView) -> str | None:
        """Return why the attack does not apply; None: it does.

        Either the passives' objective is not contrastive, or the view is not of a live run of it.
        """
        if view.terms_by_passive and (reason := explain_not_contrastive(view)):
            return reason
        return super().explain_missing_input(view)

    def run_live(self, active: LiveActive, knowledge: Knowledge, seed: int) -> Mapping[str, Tensor]:
        """Request sums for rows along both vectors; return the notes that `run` reads.

        These are the people (N,); for both vectors what was sent and revealed, (2, N, D); and the
        size of a batch.
        """
        people_N, draw, size, length = self.prepare_request(
            active, knowledge, seed, length=_LENGTH, maximum=self.people
        )
        axes_2D = torch.linalg.qr(torch.randn(size, 2, generator=draw, dtype=torch.float64)).Q.T

        def make_rows(axis_D: Tensor, rows: int) -> Tensor:
            """Return rows along an axis, spread as the attack's option says, (rows, D)."""
            noise_BD = torch.randn(rows, size, generator=draw, dtype=torch.float64) / size**0.5
            return length * F.normalize(axis_D + self.spread * noise_BD, dim=1)

        sent = [make_rows(axis_D, len(people_N)) for axis_D in axes_2D]
        if active.enforces_rules:
            opened = [self.ask_among_decoys(active, people_N, rows_ND, draw) for rows_ND in sent]
        else:
            opened = list(active.request_sum(people_N.repeat(2), torch.cat(sent)).double().chunk(2))
        batch = self.rows_at_once(active) if active.enforces_rules else len(people_N) * 2
        exchanged = {"sent": torch.stack(sent), "opened": torch.stack(opened)}
        return {"people": people_N, **exchanged, "batch": torch.tensor(batch)}

    def run(self, view: AdversaryView, seed: int) -> Guess:
        """Regress the recovered representations z to the victim's features."""
        people_N, z_ND = self.recover_representations(view)
        return guess_features(self, view, people_N, {"z": z_ND}, seed)

    def recover_representations(self, view: AdversaryView) -> tuple[Tensor, Tensor]:
        """Return people (N,) and what is recovered of their representations, (N, D).

        With a single passive these are its unit representations z. With several, or with decoys,
        they are the weighted sum of all passives' z, minus its mean over each batch.

        Raises:
            AttackError: the view is not of a live run of this attack.
        """
        notes = read_notes(self, view)
        contributors = list(view.terms_by_passive.values())
        people_N = notes["people"]
        size = int(notes["batch"])
        recovered = []
        are_in_one_batch = size > len(people_N)
        for batch in torch.arange(len(people_N)).split(min(size, len(people_N))):
            sent = notes["sent"][:, batch]
            opened = notes["opened"][:, batch]
            differences_BD = _compute_differences(sent, opened, contributors)
            if len(contributors) > 1 or self.decoys:
                # The gradients of several parties or of decoys cannot be separated further.
                recovered.append(differences_BD)
                continue
            if are_in_one_batch:
                # One request held every person twice, once with each vector.
                twice = torch.arange(len(batch)).repeat(2)
                questions = [SummedStep.from_batch(sent.flatten(0, 1), opened.flatten(0, 1), twice)]
            else:
                questions = [SummedStep.from_batch(h, g) for h, g in zip(sent, opened, strict=True)]
            start = _shift_to_sphere(differences_BD)
            recovered.append(
                recover_representations(questions, contributors, view.iterations, start_ND=start)
            )
        return people_N, torch.cat(recovered)


def _compute_differences(sent: Tensor, opened: Tensor, contributors: list[AgreedTerms]) -> Tensor:
    """Return the weighted sum of the contributors' representations z, minus its mean over the
    batch, (B, D).

    `sent`: rows along two vectors, (2, B, D). `opened`: the decrypted sums for them, (2, B, D).
    `contributors`: what the contract says about each passive.
    """
    objective = contributors[0].objective
    assert isinstance(objective, ContrastiveSettings)
    along_2D = F.normalize(sent.mean(dim=1), dim=1)
    scaled = -objective.temperature * sent.norm(dim=2, keepdim=True) * opened
    first_BD, second_BD = scaled - scaled.mean(dim=1, keepdim=True)
    # A gradient on a normalised row has no part along that row's direction; the second direction's
    # answer has the part along the first.
    missing_B1: Tensor = (second_BD - first_BD) @ along_2D[0][:, None]
    total_BD: Tensor = first_BD + missing_B1 * along_2D[0]
    return total_BD


def _shift_to_sphere(differences_BD: Tensor) -> Tensor:
    """Return unit vectors, nearly, from their differences to an unknown mean.

    The mean m is found with which the norms of m + d_i, for the differences d_i, are nearest to 1:
    |m + d_i|^2 = 1 is linear in m and in |m|^2 - 1, which are fitted by least squares.
    """
    ones_B1 = torch.ones_like(differences_BD[:, :1])
    system = torch.cat([2 * differences_BD, ones_B1], dim=1)
    target = -differences_BD.square().sum(dim=1, keepdim=True)
    # Only the CPU has a driver for systems of any rank.
    solution: Tensor = torch.linalg.lstsq(system.cpu(), target.cpu(), driver="gelsd").solution
    mean_D = solution[:-1, 0].to(differences_BD.device)
    return differences_BD + mean_D

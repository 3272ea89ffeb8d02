"""A8, isolation: a malicious active takes one passive's gradient out of the sum.

Run by: an active that receives sums over several passives and wants one part. "weight" asks the
others for lambda = 0. "unequal" sends the others representations of norm 1e6, to which gradients
of the cosine loss shrink as 1 / norm (and to the victim the honest ones). "subset" has one batch
summed with and without the victim, and subtracts. "collusion" subtracts what colluding passives
say that they contributed: no rule can stop that, only a second honest passive.

What is isolated is then read like any single gradient; here by regression from shadow rows.

Letters: B batch, N people asked about, D numbers of a representation.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from apfed_attacks.features.regression import guess_features
from apfed_attacks.interface import Guess
from apfed_attacks.live.strategy import ActiveAttack, LiveActive, read_notes
from apfed_attacks.view import AdversaryView, Knowledge


class Isolation(ActiveAttack):
    """An attack that isolates one passive's contribution to a sum, for some people.

    It regresses the contribution to that passive's features.

    Attributes:
        way: technique of isolation. "weight" tells the others to weigh their gradients by 0.
            "unequal" sends them representations at which gradients vanish. "subset" requests the
            sum with and without the victim, and "collusion" subtracts what others reveal.
        colluding: how many other passives collude; None: all of them ("collusion" only).
        length: norm of the representations that the victim gets.
        far: norm of those that the others get ("unequal" only).
    """

    name = "isolation"
    keeps = ("people", "isolated")

    way: Literal["weight", "unequal", "subset", "collusion"] = "unequal"
    colluding: int | None = Field(None, ge=0)
    length: float = Field(1.0, gt=0)
    far: float = Field(1e6, gt=0)
    people: int = Field(64, ge=4)
    shadow_rows: int = Field(30, ge=2)

    def explain_missing_input(self, view: AdversaryView) -> str | None:
        """Return why the attack does not apply; None: it does.

        Either there is one passive, or the view is not of a live run of the attack.
        """
        if len(view.terms_by_passive) == 1:
            return "with one passive the sum is its gradient; there is nothing to isolate"
        return super().explain_missing_input(view)

    def run_live(self, active: LiveActive, knowledge: Knowledge, seed: int) -> Mapping[str, Tensor]:
        """Request one or two sums; return the notes that `run` reads.

        These are the people (B,), and the estimate of the victim's contribution (B, D).
        """
        rows_B, draw, size, length = self.prepare_request(
            active, knowledge, seed, length=self.length, maximum=min(self.people, active.batch_size)
        )
        noise_BD = torch.randn(len(rows_B), size, generator=draw, dtype=torch.float64)
        sent_BD = length * (noise_BD / noise_BD.norm(dim=1, keepdim=True))
        others = [name for name in active.passives if name != knowledge.victim]
        if self.way == "weight":
            isolated = active.request_sum(rows_B, sent_BD, weights=dict.fromkeys(others, 0.0))
        elif self.way == "unequal":
            far_BD = sent_BD / length * self.far
            isolated = active.request_sum(rows_B, sent_BD, instead=dict.fromkeys(others, far_BD))
        elif self.way == "subset":
            isolated = active.request_sum(rows_B, sent_BD)
            isolated = isolated - active.request_sum(rows_B, sent_BD, participants=others)
        else:
            isolated = active.request_sum(rows_B, sent_BD)
            for name in others[: self.colluding]:
                isolated = isolated - active.get_contribution(name)
        return {"people": rows_B, "isolated": isolated.double()}

    def run(self, view: AdversaryView, seed: int) -> Guess:
        """Regress the isolated contribution to the victim's features."""
        notes = read_notes(self, view)
        contribution = {"isolated part": notes["isolated"]}
        return guess_features(self, view, notes["people"], contribution, seed)

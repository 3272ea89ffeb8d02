"""A7, decoder extraction: a malicious active of APFed-R reads the passives' features.

Run by: an active that chooses representations. For one h the answer (2 lambda / F) J^T (DEC(h) -
x) is affine in a row's features x, and for the same h with the same matrix for all rows. So a
few known pairs, one more than the rank of J, open every other row of that batch. Where the decoder
is linear, with matrix W, answers to h = 0 and h = e_k of one row give W^T W; its factor turns the
answers into x up to a rotation and a shift, which the known pairs fix (Procrustes; "gram"). A sum
over several passives is affine in all their features: the secure sum hides them as far as D
numbers cannot hold them all.

Own derivation from Eq. (12) of APFed. Without rules everything is asked in one batch, in which a
row may occur twice, so no passive trains in between; under the protocol a row occurs once a
step, and `spread` or `decoys` keep a batch from being near-constant.

Letters: B batch, N people asked about, D numbers of a representation, F features.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from apfed_attacks.features.regression import Regression, guess_features
from apfed_attacks.interface import FloatArray, Guess
from apfed_attacks.live.strategy import ActiveAttack, LiveActive, notes_of
from apfed_attacks.view import AdversaryView, Knowledge

_RANK = 1e-5


class DecoderExtraction(ActiveAttack):
    """An attack that asks at a point of this length and fits a decoder to the known pairs.

    Without rules it asks along every axis, too.
    """

    name = "decoder_extraction"
    keeps = ("people", "opened")

    length: float = Field(1.0, gt=0)

    def explain_missing_input(self, view: AdversaryView) -> str | None:
        """Return why the attack does not apply: a passive has another objective than
        reconstruction, or the view is not of a live run of it. None: it applies.
        """
        kinds = {agreed.objective.name for agreed in view.terms_by_passive.values()}
        if kinds and kinds != {"reconstruction"}:
            return "a passive contributes gradients of another objective than reconstruction"
        return super().explain_missing_input(view)

    def run_live(self, active: LiveActive, knowledge: Knowledge, seed: int) -> Mapping[str, Tensor]:
        """Ask; return people, what was sent to them and revealed, and answers about the axes."""
        people_N, draw, size, length = self.prepare_request(
            active, knowledge, seed, length=self.length, maximum=self.people
        )
        point_D = torch.randn(size, generator=draw, dtype=torch.float64)
        if not active.enforces_rules:
            return self._ask_at_once(active, people_N, length * point_D / point_D.norm())
        noise_ND = torch.randn(len(people_N), size, generator=draw, dtype=torch.float64)
        far_ND = point_D / point_D.norm() + self.spread * noise_ND / size**0.5
        sent_ND = length * far_ND / far_ND.norm(dim=1, keepdim=True)
        opened_ND = self.ask_among_decoys(active, people_N, sent_ND, draw)
        return {"people": people_N, "sent": sent_ND, "opened": opened_ND}

    def _ask_at_once(
        self, active: LiveActive, people_N: Tensor, point_D: Tensor
    ) -> Mapping[str, Tensor]:
        """Ask in one step: everybody at the point and at zero, and one person along every axis.

        `people_N`: alignment positions.
        """
        size = len(point_D)
        count = len(people_N)
        points_ND = point_D.expand(count, size)
        questions_ND = torch.cat([points_ND, torch.zeros_like(points_ND), torch.eye(size).double()])
        rows = torch.cat([people_N, people_N, people_N[:1].expand(size)])
        opened, zero, axes = (
            active.request_sum(rows, questions_ND).double().split([count, count, size])
        )
        return {
            "people": people_N,
            "sent": points_ND,
            "opened": opened,
            "zero": zero,
            "gram": axes - zero[:1],
        }

    def run(self, view: AdversaryView, seed: int) -> Guess:
        """Fit the known pairs exactly: an affine map of the answers and, without rules, a rotation
        of what the Gram matrix W^T W opens; regress the answers besides.
        """
        notes = notes_of(self, view)
        guess = guess_features(self, view, notes["people"], {"answers": notes["opened"]}, seed)
        positions, order = notes["people"].sort()
        regress = Regression.from_view(view, positions, hidden=self.hidden, seed=seed)
        answers_ND = notes["opened"][order].numpy(force=True)
        exact = {
            "affine on answers": regress.cross_validate_guess(
                lambda known: _fit_affine(known, answers_ND)
            )
        }
        if "gram" in notes:
            turned_NR = _undo_rotation(notes["zero"][order], notes["gram"]).numpy(force=True)
            if turned_NR.shape[1] <= regress.pairs.shape[1]:
                exact["gram"] = regress.cross_validate_guess(
                    lambda known: _align_procrustes(known, turned_NR)
                )
        return replace(guess, attacks={**exact, **guess.attacks})


def _undo_rotation(zero_ND: Tensor, gram_DD: Tensor) -> Tensor:
    """Return R^T (b - x) (N, rank) from answers W^T (b - x) and W^T W, both times one number c.

    Divided by sqrt(c), which the caller's pairs fix.

    `zero_ND`: answers to a row of zeros. `gram_DD`: W^T W.
    """
    values_D, vectors_DD = torch.linalg.eigh((gram_DD + gram_DD.T) / 2)
    in_rank = values_D > _RANK * values_D[-1]
    inverse = vectors_DD[:, in_rank] / values_D[in_rank].sqrt()
    turned_NR: Tensor = zero_ND @ inverse
    return turned_NR


def _align_procrustes(regress: Regression, turned_NR: FloatArray) -> FloatArray:
    """Turn, scale and shift (N, R) onto the known pairs; return the rows that are guessed (U, F).

    R is at most F. What a decoder of lower rank cannot tell stays at the known pairs' mean, and so
    does a feature in which these do not vary: they say nothing of how it is turned.
    """
    known = turned_NR[regress.shadow]
    middle = known.mean(axis=0)
    centre = regress.pairs.mean(axis=0)
    left_vectors, sizes, right_vectors = np.linalg.svd(
        (known - middle).T @ (regress.pairs - centre), full_matrices=False
    )
    in_rank = sizes > _RANK * sizes[0]
    turn_RF = (
        left_vectors[:, in_rank]
        @ right_vectors[in_rank]
        * sizes.sum()
        / np.square(known - middle).sum()
    )
    guess_UF: FloatArray = (turned_NR[~regress.shadow] - middle) @ turn_RF + centre
    return guess_UF


def _fit_affine(regress: Regression, values_NF: FloatArray) -> FloatArray:
    """Fit features = A values + b exactly to the known pairs, with the smallest A; apply it."""
    known = values_NF[regress.shadow]
    middle = known.mean(axis=0)
    centre = regress.pairs.mean(axis=0)
    weights = np.linalg.pinv(known - middle, rcond=_RANK) @ (regress.pairs - centre)
    guess_UF: FloatArray = (values_NF[~regress.shadow] - middle) @ weights + centre
    return guess_UF

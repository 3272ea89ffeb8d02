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
from apfed_attacks.live.strategy import ActiveAttack, LiveActive, read_notes
from apfed_attacks.view import AdversaryView, Knowledge

_RANK_TOLERANCE = 1e-5  # smallest singular value that counts, in units of the largest


class DecoderExtraction(ActiveAttack):
    """An attack that sends one representation for all people, and fits a decoder to the known
    pairs.

    The passives' gradients are then affine in their features. Without rules it also sends one unit
    vector along every axis.

    Attributes:
        length: norm of the representation.
    """

    name = "decoder_extraction"
    keeps = ("people", "opened")

    length: float = Field(1.0, gt=0)

    def explain_missing_input(self, view: AdversaryView) -> str | None:
        """Return why the attack does not apply; None: it does.

        Either a passive's objective is not reconstruction, or the view is not of a live run of it.
        """
        kinds = {agreed.objective.name for agreed in view.terms_by_passive.values()}
        if kinds and kinds != {"reconstruction"}:
            return "a passive contributes gradients of another objective than reconstruction"
        return super().explain_missing_input(view)

    def run_live(self, active: LiveActive, knowledge: Knowledge, seed: int) -> Mapping[str, Tensor]:
        """Request sums; return the notes that `run` reads.

        These are the people (N,), what was sent for them and revealed (N, D) and, without rules,
        what sums along the D axes reveal.
        """
        people_N, draw, size, length = self.prepare_request(
            active, knowledge, seed, length=self.length, maximum=self.people
        )
        point_D = torch.randn(size, generator=draw, dtype=torch.float64)
        if not active.enforces_rules:
            return self._ask_at_once(active, people_N, length * point_D / point_D.norm())
        # Not one point for all, since the rules refuse batches of equal rows.
        noise_ND = torch.randn(len(people_N), size, generator=draw, dtype=torch.float64)
        far_ND = point_D / point_D.norm() + self.spread * noise_ND / size**0.5
        sent_ND = length * far_ND / far_ND.norm(dim=1, keepdim=True)
        opened_ND = self.ask_among_decoys(active, people_N, sent_ND, draw)
        return {"people": people_N, "sent": sent_ND, "opened": opened_ND}

    def _ask_at_once(
        self, active: LiveActive, people_N: Tensor, point_D: Tensor
    ) -> Mapping[str, Tensor]:
        """Request one sum: for all people at a point (D,) and at zero, and for one person along
        every axis.

        Rules refuse such a batch. `people_N`: alignment positions. Returns the notes that `run`
        reads; of these "gram" is c W^T W for a linear decoder W with an unknown factor c.
        """
        size = len(point_D)
        count = len(people_N)
        points_ND = point_D.expand(count, size)
        # A linear decoder's gradient is c W^T (W z + b - x): axes minus zero give c W^T W.
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
        """Guess features from the decrypted gradients in two or three ways.

        They are an affine map that fits the known pairs exactly, a regression and, without rules,
        the Gram matrix W^T W of a linear decoder W, which gives features up to a rotation.
        """
        notes = read_notes(self, view)
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
            # R columns: features up to a rotation, which `_align_procrustes` finds by pairs.
            turned_NR = _undo_rotation(notes["zero"][order], notes["gram"]).numpy(force=True)
            if turned_NR.shape[1] <= regress.known_features.shape[1]:
                exact["gram"] = regress.cross_validate_guess(
                    lambda known: _align_procrustes(known, turned_NR)
                )
        return replace(guess, attacks={**exact, **guess.attacks})


def _undo_rotation(zero_ND: Tensor, gram_DD: Tensor) -> Tensor:
    """Return R^T (b - x) for each row's features x, (N, rank): features up to a rotation and a
    shift.

    W and b are the linear decoder's weights and bias, R is a rotation. The result has a factor
    sqrt(c), which known pairs determine.

    `zero_ND`: gradients on zero representations, c W^T (b - x) with an unknown c. `gram_DD`: c W^T
    W.
    """
    values_D, vectors_DD = torch.linalg.eigh((gram_DD + gram_DD.T) / 2)
    in_rank = values_D > _RANK_TOLERANCE * values_D[-1]
    inverse_root = vectors_DD[:, in_rank] / values_D[in_rank].sqrt()
    rotated_NR: Tensor = zero_ND @ inverse_root
    return rotated_NR


def _align_procrustes(regress: Regression, turned_NR: FloatArray) -> FloatArray:
    """Rotate, scale and shift rows (N, R) onto the known pairs; return the features (U, F) of the
    others.

    This is orthogonal Procrustes; R is at most F. Features that a decoder of lower rank does not
    determine stay at the known pairs' mean, and so do features that are constant in these.

    `regress`: regression that holds the known pairs of rows and features. `turned_NR`: the rows.
    """
    known = turned_NR[regress.is_known]
    known_mean = known.mean(axis=0)
    pairs_mean = regress.known_features.mean(axis=0)
    left_vectors, sizes, right_vectors = np.linalg.svd(
        (known - known_mean).T @ (regress.known_features - pairs_mean), full_matrices=False
    )
    in_rank = sizes > _RANK_TOLERANCE * sizes[0]
    # The singular vectors give the rotation, the last factor the scale of least squares.
    rotation_RF = (
        left_vectors[:, in_rank]
        @ right_vectors[in_rank]
        * sizes.sum()
        / np.square(known - known_mean).sum()
    )
    guess_UF: FloatArray = (turned_NR[~regress.is_known] - known_mean) @ rotation_RF + pairs_mean
    return guess_UF


def _fit_affine(regress: Regression, values_NF: FloatArray) -> FloatArray:
    """Fit features = A values + b to the known pairs, with the smallest A; return the others'
    features (U, F).

    `regress`: regression that holds the known pairs of rows and features. `values_NF`: values of
    all rows, of which U are guessed.
    """
    known = values_NF[regress.is_known]
    known_mean = known.mean(axis=0)
    pairs_mean = regress.known_features.mean(axis=0)
    inverse = np.linalg.pinv(known - known_mean, rcond=_RANK_TOLERANCE)
    weights = inverse @ (regress.known_features - pairs_mean)
    guess_UF: FloatArray = (values_NF[~regress.is_known] - known_mean) @ weights + pairs_mean
    return guess_UF

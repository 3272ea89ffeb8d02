"""A10, ID stuffing: guessed IDs in one's own set reveal which of them a peer has.

Run by: any party of a set intersection. Of each candidate (N) in its set it learns whether it is
common to all parties; the hub of `ecdh` learns it of each member alone, even where too few are
common to be opened. Agreed limits on the size of a set (`maximum_ids`) and on runs with a peer
(`AlignmentHistory`) bound how many guesses are tried; one that deviates gets
`secure_apfed.alignment.max_guesses`.
"""

import numpy as np
import torch
from pydantic import Field

from apfed_attacks.interface import Attack, Guess, Prediction
from apfed_attacks.live.strategy import explain_missing_play, read_notes
from apfed_attacks.view import AdversaryView

_UNTRIED = 0.5  # score of a candidate that was not tried


class IdStuffing(Attack):
    """An attack that adds guessed IDs (candidates) to its own set; those in the intersection are
    the peer's.

    It adds as many as the limits allow. Half of the candidates are IDs that the victim has and the
    adversary does not. Baseline: one score for all, since nothing but the intersection
    distinguishes candidates. There is no decoy: what the intersection reveals is never wrong, so
    the attack has no luck to compare with.

    Attributes:
        candidates: number of IDs that the adversary would like to know about.
        intersections: largest number of intersections that it starts.
        overstuff: whether it sends all candidates at once, whatever size was agreed.
    """

    name = "id_stuffing"
    keeps = ("tried", "found")
    target = "membership"
    roles = ("passive", "active")
    behaviour = "malicious"

    candidates: int = Field(400, ge=4)
    intersections: int = Field(1, ge=1)
    overstuff: bool = False

    def explain_missing_input(self, view: AdversaryView) -> str | None:
        """Return why no stuffed intersection is in the view; None: one is."""
        if not view.description.aligned:
            return f"{view.description}: nothing is aligned, so there is no intersection"
        if view.deviation is None:
            return (
                "this run was aligned while every party kept to the protocol; stuffed IDs are "
                "played against an intersection (apfed_attacks.live.stuffing.play_stuffing)"
            )
        return explain_missing_play(self, view)

    def run(self, view: AdversaryView, seed: int) -> Guess:
        """Score candidates by whether the intersection had them; those never tried get one half."""
        notes = read_notes(self, view)
        tried_N = notes["tried"].numpy()
        is_common_N = notes["found"].numpy()
        scores_N = np.where(tried_N, is_common_N.astype(np.float64), _UNTRIED)
        nothing_N1 = np.full((len(scores_N), 1), _UNTRIED)
        return Guess(
            positions=torch.arange(len(scores_N)),
            attacks={"what opened": Prediction(scores_N[:, None])},
            baselines={"the same for all": Prediction(nothing_N1)},
        )

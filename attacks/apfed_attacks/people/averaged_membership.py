"""Averaged membership: a party of FedMV asks the average of weights who trained at another party.

Run by: the active or a passive of a method whose parties average weights (H-FedMV, S-FedMV), each
trained on people of its own; it holds people with their labels, and asks of each whether the
victim trained on them. Models fit the rows that they were trained on better than others (Yeom et
al., 2018, Privacy Risk in Machine Learning, Section 3): FedMV fits scores to one-hot labels by
least squares, so the squared error is the signal. How hard a person is to fit anyway is measured by
a model that the adversary trains on people of its own in the same way, and subtracted (difficulty
calibration: Watson et al., 2022, On the Importance of Difficulty Calibration in Membership
Inference Attacks, Section 3).

The secure sum hides which party a person trained at: all are averaged by their numbers of rows,
so `strangers: elsewhere`, where the others are people of other passives, asks what is left of
that. It does not hide that somebody trained (`outside`), and with one passive it hides nothing. The
average is that of the last round, which a passive does not receive: it reads that of the round
before.

Letters: n candidates, K classes.
"""

from typing import Literal, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from apfed_attacks.interface import Attack, FloatArray, Guess, Prediction
from apfed_attacks.view import AdversaryView

__all__ = ["AveragedMembership", "Strangers"]

Strangers: TypeAlias = Literal["outside", "elsewhere"]
"""People who did not train at a party: of no party's training, or of another passive's."""


class AveragedMembership(Attack):
    """The average's squared error, as it is and less that of a model of one's own.

    Baseline: that model's squared error alone. Decoys: the attacks where each person's error under
    the average is another's, of about the same error under the own model.

    Attributes:
        candidates: people that it asks about, at most.
        strangers: who did not train at the victim.
    """

    name = "averaged_membership"
    target = "membership"
    roles = ("active", "passive")
    suite = ({"strangers": "outside"}, {"strangers": "elsewhere"})

    candidates: int = Field(4_000, ge=4)
    strangers: Strangers = "outside"

    def applicable(self, view: AdversaryView) -> str | None:
        if view.description.opens != "weights":
            return f"{view.description}: no weights are averaged"
        if view.parties[0] not in view.networks:
            return f"the recording holds no average of {view.description}"
        if view.knowledge.candidates is None:
            return f"{view.name} holds no people to ask about"
        return None

    def run(self, view: AdversaryView, seed: int) -> Guess:
        candidates, train = view.knowledge.candidates, view.knowledge.alike
        assert candidates is not None
        assert train is not None
        adversary = view.parties[0]
        labels_A = view.labels[adversary]
        mine = labels_A >= 0
        own = train(view.features[adversary][mine], labels_A[mine])
        average = view.networks[adversary]
        rows_n = candidates.features.to(next(average.parameters()).dtype)
        with torch.no_grad():
            fit_n = _fit(average(rows_n), candidates.labels)
        easy_n = _fit(own(candidates.features), candidates.labels)
        # Of whoever is next to it by the own model: fits stay as near to that model's as they were.
        by_ease_n = np.argsort(easy_n)
        others_n = np.empty_like(by_ease_n)
        others_n[by_ease_n] = np.roll(by_ease_n, 1)

        def judged(fit_n: FloatArray) -> dict[str, Prediction]:
            scores = {"fit": fit_n, "fit less that of an own model": fit_n - easy_n}
            return {name: Prediction(values_n[:, None]) for name, values_n in scores.items()}

        return Guess(
            positions=torch.arange(len(candidates)),
            attacks=judged(fit_n),
            baselines={"fit of an own model": Prediction(easy_n[:, None])},
            decoys=judged(fit_n[others_n]),
        )


def _fit(scores_nK: Tensor, labels_n: Tensor) -> FloatArray:
    """(n,) minus the squared distance of the scores from one-hot labels."""
    truth_nK = F.one_hot(labels_n, scores_nK.shape[1]).to(scores_nK.device)
    fit_n: FloatArray = -(scores_nK.double() - truth_nK).square().sum(dim=1).numpy(force=True)
    return fit_n

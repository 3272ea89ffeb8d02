"""A9, membership: an outside querier learns who trained the active's model (LiRA).

Run by: whoever may query the finished model and holds candidate rows with their labels (a
customer of the prediction service, a former employee). For each candidate it compares the
model's confidence with that of shadow models that did, and did not, train on this row: the
likelihood ratio attack of Carlini et al. (2022), Membership Inference Attacks From First
Principles, online.

The shadow models train as the active would alone; the passives' help, which moves the model
too, is unknown to the querier.

Letters: S shadow models, N candidates, K classes.
"""

from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from scipy.stats import norm
from torch import Tensor, nn

from apfed_attacks.interface import Attack, Guess, Prediction, Target
from apfed_attacks.people.membership import Shadows, halves
from apfed_attacks.view import AdversaryView, Role
from secure_apfed.models import encoder_and_head
from secure_apfed.seeds import shuffled
from secure_apfed.settings.training import ModelSettings

__all__ = ["Membership", "likelihood_ratio", "logit_confidence"]

_FLOOR = 1e-12
_Array = NDArray[np.float64]


def logit_confidence(scores_NK: Tensor, labels_N: Tensor) -> _Array:
    """log(p / (1 - p)) of the true class, from class scores or log-probabilities (Section IV)."""
    logp_NK = scores_NK.double().log_softmax(-1)
    own_N1 = labels_N.to(logp_NK.device)[:, None].expand(*logp_NK.shape[:-1], 1)
    others_NK = logp_NK.scatter(-1, own_N1, -torch.inf)
    logit: _Array = (logp_NK.gather(-1, own_N1)[..., 0] - others_NK.logsumexp(-1)).numpy(force=True)
    return logit


def likelihood_ratio(
    phi_N: _Array, shadow_SN: _Array, inside_SN: NDArray[np.bool_], *, own_variances: bool = False
) -> _Array:
    """Log N(phi; in) - log N(phi; out), the means being each candidate's own.

    Args:
        phi_N: the model's logit confidences.
        shadow_SN: those of the shadow models.
        inside_SN: which shadow model trained on which candidate; at least one did and one did
            not, for every candidate.
        own_variances: of each candidate, for which the paper asks 64 models or more; else one
            for each side.
    """
    means, spreads = [], []
    for side_SN in (inside_SN, ~inside_SN):
        mean_N = np.where(side_SN, shadow_SN, 0).sum(axis=0) / side_SN.sum(axis=0)
        square_SN = np.where(side_SN, np.square(shadow_SN - mean_N), 0)
        rows = 0 if own_variances else None
        spread = np.sqrt(square_SN.sum(axis=rows) / side_SN.sum(axis=rows))
        means.append(mean_N)
        spreads.append(np.maximum(spread, _FLOOR))
    ratio: _Array = norm.logpdf(phi_N, means[0], spreads[0]) - norm.logpdf(
        phi_N, means[1], spreads[1]
    )
    return ratio


class Membership(Attack):
    """LiRA, and two thresholds on the confidence alone.

    Attacks: the likelihood ratio, with one variance or with each candidate's own; the
    confidence compared with that of the shadow models that did not train on the row (offline);
    the confidence as it is (Yeom et al., 2018). Baseline: the mean confidence of the shadow
    models, that is, how easy a row is: what is known of it without asking the model. Decoys: the
    attacks where each candidate's answer is another's.

    Attributes:
        shadow_models: S, even; 16 to 64 are usual.
        candidates: people that it asks about, at most.
        epochs: of the shadow models; null: as the run.
    """

    name: ClassVar[str] = "membership"
    target: ClassVar[Target] = "membership"
    roles: ClassVar[tuple[Role, ...]] = ("outsider",)

    shadow_models: int = Field(32, ge=4, multiple_of=2)
    candidates: int = Field(4_000, ge=4)
    epochs: int | None = Field(None, ge=1)

    @property
    def exchangeable(self) -> bool:
        """No row is released: `run` exchanges answers itself, and keeps its shadow models."""
        return False

    def applicable(self, view: AdversaryView) -> str | None:
        """A querier needs a model that answers, and candidates to ask it about."""
        if view.role not in self.roles:
            return f"{self.name} is mounted by an outside querier, not by the {view.role}"
        if view.answers is None:
            return f"{view.description}: no party has a model that an outsider could query alone"
        if view.knowledge.candidates is None:
            return "the querier holds no candidate rows"
        return None

    def run(self, view: AdversaryView, seed: int) -> Guess:
        """Score every candidate; the higher, the more likely it trained the model."""
        candidates, knowledge = view.knowledge.candidates, view.knowledge
        assert candidates is not None
        assert view.answers is not None
        train = candidates.train
        if self.epochs is not None:
            train = train.model_copy(update={"epochs": self.epochs})
        model = knowledge.architecture or ModelSettings()
        shape = tuple(candidates.features.shape[1:])
        rows_SH = halves(self.shadow_models, len(candidates), seed)
        shadows = Shadows(
            make=lambda: nn.Sequential(*encoder_and_head(model, shape, knowledge.classes)),
            train=train,
            seed=seed,
            device=view.device,
        )
        scores_SNK = shadows.scores(candidates.features, candidates.labels, rows_SH)
        shadow_SN = logit_confidence(scores_SNK, candidates.labels)
        inside_SN = np.zeros(shadow_SN.shape, dtype=bool)
        np.put_along_axis(inside_SN, rows_SH.numpy(), values=True, axis=1)
        phi_N = logit_confidence(view.answers(candidates.features), candidates.labels)
        outside_N = np.where(inside_SN, 0, shadow_SN).sum(axis=0) / (~inside_SN).sum(axis=0)
        others_N = shuffled(torch.arange(len(phi_N)), seed, "attacks", "decoy").numpy()

        def judged(phi_N: _Array) -> dict[str, Prediction]:
            ratio_N = likelihood_ratio(phi_N, shadow_SN, inside_SN)
            own_ratio_N = likelihood_ratio(phi_N, shadow_SN, inside_SN, own_variances=True)
            return {
                "likelihood ratio": _scored(ratio_N),
                "likelihood ratio, own variances": _scored(own_ratio_N),
                "above models without the row": _scored(phi_N - outside_N),
                "confidence": _scored(phi_N),
            }

        return Guess(
            positions=torch.arange(len(candidates)),
            attacks=judged(phi_N),
            baselines={"shadow models' confidence": _scored(shadow_SN.mean(axis=0))},
            decoys=judged(phi_N[others_N]),
        )


def _scored(values_N: _Array) -> Prediction:
    return Prediction(values_N[:, None])

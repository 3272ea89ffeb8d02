"""From votes to the active's model: whose label is likely, and a student of those labels.

Run by: the active, on what it opened of the passives' votes and on what it believes without them,
the prior: where noise drowns the votes, or nobody voted, the student learns what the active would
have taught it alone. Letters: U rows, n labelled rows, K classes, D features.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.special import softmax
from torch import Tensor

from secure_apfed.learning.apfed import ActiveNetworks
from secure_apfed.learning.compute import Compute
from secure_apfed.learning.descent import Trainer
from secure_apfed.models import RandomFeatures
from secure_apfed.settings.training import TrainSettings
from secure_apfed.solo import SoloTask
from secure_apfed.solo.choice import FOLDS
from secure_apfed.solo.folds import held_out

__all__ = [
    "SoftTrainer", "Votes", "fit_linear", "fit_ridge", "last_layer", "likely_labels",
    "reliability_of",
]  # fmt: skip

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_STRENGTHS = (0.01, 0.1, 1.0, 10.0)
_LEAST_AGREEMENT = 0.3
_LEAST_MISFIT = 0.02


@dataclass(frozen=True, eq=False, kw_only=True)
class Votes:
    """What the active read of the passives' votes, without its own.

    Attributes:
        totals: (U, K), estimate of the sum of the votes on each row, without bias.
        variance: (U,), of one number of a row, by the noise alone; 0 without noise.
        voters: passives, at most.
    """

    totals: Floats
    variance: Floats
    voters: int


def reliability_of(believed: Callable[[SoloTask], Floats], task: SoloTask) -> float:
    """How often a prior is right, by cross-validation over the labelled rows alone.

    Between twice chance and .98, since few rows tell it roughly; .5 where no label can be held out.
    """
    right = [
        believed(task.without(part))[task.labelled[part]].argmax(1) == task.labels[part]
        for part in held_out(task.labels, FOLDS, task.seed)
    ]
    share = np.concatenate(right).mean() if right else 0.5
    return float(np.clip(share, min(2 / task.classes, 0.9), 0.98))


def likely_labels(votes: Votes, own_U: Integers, reliability: float) -> Floats:
    """Return the probability of each class for each row, (U, K).

    A row of class c is modelled with votes around mu for c and around 0 for the others, after the
    row's mean is taken off, with the variance of the noise and of the voters' own errors; the prior
    is right with `reliability`, and otherwise names any other class (a one-coin rater of Dawid and
    Skene 1979). mu comes from how far votes agree with the prior, which has not seen their noise,
    corrected for its errors; of a voter it lies in .3 to 1.

    Args:
        votes: of the passives.
        own_U: class that the prior names, -1: none.
        reliability: of it.
    """
    rows, classes = votes.totals.shape
    spread_UK = votes.totals - votes.totals.mean(1, keepdims=True)
    wrong = (1 - reliability) / (classes - 1)
    named = own_U >= 0
    here = np.flatnonzero(named)
    agreement = spread_UK[here, own_U[here]].mean() * classes / (classes - 1) if len(here) else 0.0
    least = _LEAST_AGREEMENT * votes.voters
    mu = float(np.clip(agreement / max(reliability - wrong, wrong), least, votes.voters))
    explained = mu**2 / classes * (1 - 1 / classes)
    noise_U = votes.variance
    misfit = float((spread_UK**2).mean() - noise_U.mean() - explained)
    variance_U = noise_U + max(misfit, _LEAST_MISFIT * votes.voters)
    prior_UK = np.full((rows, classes), np.log(wrong))
    prior_UK[here, own_U[here]] = np.log(reliability)
    prior_UK[~named] = 0.0
    return np.asarray(softmax(prior_UK + mu * spread_UK / variance_U[:, None], axis=1))


def fit_ridge(
    networks: ActiveNetworks, features_U: Tensor, targets_UK: Floats, *, labelled_n: Integers,
) -> None:  # fmt: skip
    """Fit a linear head on fixed random features; see `fit_linear`.

    Args:
        networks: whose encoder is `RandomFeatures`, fitted, and whose head ends in a linear layer.
        features_U: of U rows.
        targets_UK: what to learn of them.
        labelled_n: places of labelled rows among them.
    """
    encoder = networks.encoder
    assert isinstance(encoder, RandomFeatures)
    with torch.no_grad():
        phi_UD = encoder(features_U).double().cpu().numpy()
    fit_linear(last_layer(networks), phi_UD, targets_UK, labelled_n=labelled_n)


def last_layer(networks: ActiveNetworks) -> torch.nn.Linear:
    """The linear layer in which a head ends."""
    linear = list(networks.head.modules())[-1]
    assert isinstance(linear, torch.nn.Linear)
    return linear


def fit_linear(
    linear: torch.nn.Linear, phi_UD: Floats, targets_UK: Floats, *, labelled_n: Integers
) -> None:
    """Fit a linear layer without a bias by ridge regression, in float64.

    The strength is the one whose fit to all other rows predicts the labelled rows best (squared
    error): they are the validation rows.

    Args:
        linear: the layer.
        phi_UD: what it reads of U rows, each about 1 to 3 long.
        targets_UK: what to learn of them; of labelled rows the truth.
        labelled_n: places of labelled rows among them.
    """
    rest = np.setdiff1d(np.arange(len(phi_UD)), labelled_n)
    strength = _STRENGTHS[1]
    if len(rest) and len(labelled_n):
        truth_nK = targets_UK[labelled_n]

        def error(strength: float) -> float:
            weights_DK = _ridge(phi_UD[rest], targets_UK[rest], strength)
            return float(((phi_UD[labelled_n] @ weights_DK - truth_nK) ** 2).mean())

        strength = min(_STRENGTHS, key=error)
    weights_DK = _ridge(phi_UD, targets_UK, strength)
    with torch.no_grad():
        linear.weight.copy_(torch.from_numpy(weights_DK.T))


def _ridge(phi_UD: Floats, targets_UK: Floats, strength: float) -> Floats:
    gram_DD = phi_UD.T @ phi_UD + strength * np.eye(phi_UD.shape[1])
    return np.asarray(np.linalg.solve(gram_DD, phi_UD.T @ targets_UK))


class SoftTrainer(Trainer):
    """A student network that learns probabilities of classes, or numbers, by descent.

    Args:
        owner: the active; networks: its own.
        features_N: of its table.
        train, compute, seed: as of every `Trainer`.
        loss: of what the network gives (B, K) and of targets (B, K).
    """

    def __init__(
        self, owner: str, networks: ActiveNetworks, *, features_N: Tensor, train: TrainSettings,
        compute: Compute, seed: int, loss: Callable[..., Tensor] = F.cross_entropy,
    ) -> None:  # fmt: skip
        super().__init__(
            owner, dict(networks.named_children()), train=train, compute=compute, seed=seed
        )
        self.networks, self.features_N = networks, compute.place(features_N)
        self._loss = loss

    def learn(self, step: int, rows_B: Tensor, targets_BK: Tensor) -> float:
        """Descend once on the mean loss to the targets; return it."""
        self.begin()
        with self.forward_pass(step):
            scores_BK, _ = self.networks(self.features_N[rows_B.to(self.compute.device)], None)
        loss = self._loss(scores_BK.to(self.compute.dtype), self.compute.place(targets_BK))
        loss.backward()
        self.step()
        return loss.item()

    def predict(self, rows_B: Tensor) -> Tensor:
        """Scores of these rows of the table."""
        with self.forward_pass("predict"):
            scores_BK: Tensor = self.networks(self.features_N[rows_B], None)[0]
        return scores_BK

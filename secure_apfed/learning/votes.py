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

from secure_apfed.learning.descent import ActiveNetworks, Trainer
from secure_apfed.settings.training import TrainSettings
from secure_apfed.solo import FOLDS, SoloTask
from secure_apfed.solo.interface import held_out

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_STRENGTHS = (0.01, 0.1, 1.0, 10.0)
_USUAL, _SPREAD = 0.5, 0.2
"""mu of one voter where nothing tells it, and how far that is from the truth (mean, deviation)."""
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

    Each row is judged by what is believed without its label; a row of zeros says nothing, and is
    not judged. (right + 1) / (judged + 2), Laplace's rule of succession, since few rows tell it
    roughly: .5 where no label can be held out, below 1 where all were right; and 1 / K at least, as
    often as a guess is.
    """
    judged, right = 0, 0
    for part in held_out(task.labels, FOLDS, task.seed):
        said_BK = believed(task.without(part))[task.labelled[part]]
        says_B = said_BK.any(axis=1)
        judged += int(says_B.sum())
        right += int((said_BK.argmax(axis=1) == task.labels[part])[says_B].sum())
    return max((right + 1) / (judged + 2), 1 / task.classes)


def likely_labels(
    votes: Votes, own_U: Integers, reliability: float, *,
    frequencies: Floats | None = None, labelled: Integers | None = None,
) -> Floats:  # fmt: skip
    """Return the probability of each class for each row, (U, K).

    The prior knows the class of a row with the chance kappa, and otherwise names one blindly, each
    as often as it does over all rows: a rater with one coin (Dawid and Skene 1979), whose kappa is
    what its agreement with the truth is above chance (Cohen 1960). One that tosses a coin, or names
    the same class always, says no more than how frequent classes are.

    A row of class c is modelled with votes around mu for c and around 0 for the others, after the
    row's mean is taken off, with the variance of the noise and of the voters' own errors. mu comes
    from how votes vary with the prior's probabilities, which have not seen their noise; of a voter
    it lies in 0 to 1, and near 1/2 where the prior tells nothing.

    Args:
        own_U: class that the prior names, -1: none.
        frequencies: of the classes, (K,), above 0, adding up to 1; all alike unless given.
        labelled: places of rows whose labels voters were told: their votes show no reliability.
    """
    rows, classes = votes.totals.shape
    frequency_K = np.full(classes, 1 / classes) if frequencies is None else frequencies
    prior_UK = _prior(own_U, reliability, frequency_K)
    spread_UK = votes.totals - votes.totals.mean(1, keepdims=True)
    shown = np.zeros(rows, dtype=bool)
    shown[[] if labelled is None else labelled] = True
    if shown.all():
        shown[:] = False
    spread_VK, centred_VK = spread_UK[~shown], prior_UK[~shown] - prior_UK[~shown].mean(0)
    power = float((spread_VK**2).mean())
    # The regression of votes on the prior, drawn to what is usual by the precision of that.
    usual, precision = _USUAL * votes.voters, power / (_SPREAD * votes.voters) ** 2
    mu = ((centred_VK * spread_VK).sum() + precision * usual) / max(
        (centred_VK**2).sum() + precision, np.finfo(float).tiny
    )
    mu = float(np.clip(mu, 0.0, votes.voters))
    # A row about its mean has (1 - 1/K) of the variance of its numbers.
    explained = mu**2 / classes * (1 - 1 / classes)
    misfit = (power - explained) / (1 - 1 / classes) - float(votes.variance[~shown].mean())
    variance_U = votes.variance + max(misfit, _LEAST_MISFIT * votes.voters)
    return np.asarray(softmax(np.log(prior_UK) + mu * spread_UK / variance_U[:, None], axis=1))


def _prior(own_U: Integers, reliability: float, frequency_K: Floats) -> Floats:
    """How likely each class of a row is by what the prior names, and how frequent classes are."""
    prior_UK = np.tile(frequency_K, (len(own_U), 1))
    named = np.flatnonzero(own_U >= 0)
    own_V = own_U[named]
    named_K = np.bincount(own_V, minlength=len(frequency_K)) / max(len(own_V), 1)
    chance = float(named_K @ frequency_K)
    kappa = float(np.clip((reliability - chance) / max(1 - chance, 1e-12), 0.0, 1 - 1e-6))
    # It knows no class in more rows than it names it.
    kappa_K = np.minimum(kappa, named_K / frequency_K)
    of_class_VK = (1 - kappa_K) * named_K[own_V][:, None]
    of_class_VK[np.arange(len(own_V)), own_V] += kappa_K[own_V]
    prior_VK = of_class_VK * frequency_K
    prior_UK[named] = prior_VK / prior_VK.sum(1, keepdims=True)
    return prior_UK


def last_layer(networks: ActiveNetworks) -> torch.nn.Linear:
    linear = list(networks.head.modules())[-1]
    assert isinstance(linear, torch.nn.Linear)
    return linear


def fit_linear(
    linear: torch.nn.Linear, phi_UD: Floats, targets_UK: Floats, *, labelled_n: Integers
) -> None:
    """Fit a linear layer without a bias by ridge regression, in float64.

    The strength is the one whose fit to all other rows predicts the labelled rows (`labelled_n`:
    their places) best (squared error): they are the validation rows. A row of phi_UD is about 1 to
    3 long.
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
    """A student network that learns probabilities of classes, or numbers, by descent. `loss`: of
    what the network gives (B, K) and of targets (B, K).
    """

    def __init__(
        self, owner: str, networks: ActiveNetworks, *, features_N: Tensor, train: TrainSettings,
        seed: int, loss: Callable[..., Tensor] = F.cross_entropy,
    ) -> None:  # fmt: skip
        super().__init__(owner, dict(networks.named_children()), train=train, seed=seed)
        self.networks, self.features_N = networks, self.compute.place(features_N)
        self._loss = loss

    def learn(self, step: int, rows_B: Tensor, targets_BK: Tensor) -> float:
        self.begin()
        with self.forward_pass(step):
            scores_BK, _ = self.networks(self.features_N[rows_B.to(self.compute.device)], None)
        loss = self._loss(scores_BK.to(self.compute.dtype), self.compute.place(targets_BK))
        loss.backward()
        self.step()
        return loss.item()

    def predict(self, rows_B: Tensor) -> Tensor:
        with self.forward_pass("predict"):
            scores_BK: Tensor = self.networks(self.features_N[rows_B], None)[0]
        return scores_BK

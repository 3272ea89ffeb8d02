"""MixMatch: guessed, sharpened labels of unlabelled rows, mixed with the labelled ones.

Source: D. Berthelot et al., NeurIPS 2019, Algorithm 1 and Eqs. (2) to (5). Deviations: rows of
features have no crops and flips, so a row is augmented by noise and by features set to their mean;
guesses are aligned with the labels' frequencies (D. Berthelot et al., ICLR 2020, section 3.1),
since with one label a class all of them soon fell into one; the network is a small MLP; batches are
drawn with replacement; the ramp and the average of the weights fit a few hundred steps.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn import functional as F

from secure_apfed.solo.flat import flattened, parted
from secure_apfed.solo.interface import FloatArray, SoloTask
from secure_apfed.solo.kept import fitted_once
from secure_apfed.solo.scikit import scale_of

__all__ = ["MixMatch", "MixedNetwork"]

_WIDTH = 128
_STEPS, _BATCH = 400, 64
_RATE, _DECAY = 3e-3, 2e-3
_NOISE, _DROPPED = 0.2, 0.1
_GUESSES = 2
_TEMPERATURE = 0.5
_MIX = 0.75
"""Alpha of the Beta distribution that says how two rows are mixed."""
_WEIGHT = 75.0
"""Of the unlabelled rows' loss once it is ramped up over the first half of the steps; the paper's
for CIFAR-10."""
_AVERAGE = 0.98


@dataclass(frozen=True)
class MixedNetwork:
    scale: Any
    network: nn.Module = field(repr=False)

    @torch.no_grad()
    def scores(self, features_BF: FloatArray) -> FloatArray:
        scaled_BF = torch.from_numpy(self.scale.transform(features_BF)).float()
        logits_BK: Tensor = self.network(scaled_BF)
        return logits_BK.double().softmax(1).numpy()


class MixMatch:
    """Where every row has a label, the labelled rows stand for the unlabelled ones."""

    name, title = "mixmatch", "MixMatch"

    def fit(self, task: SoloTask) -> MixedNetwork:
        scale = scale_of(task)
        x_NF = torch.from_numpy(scale.transform(task.features)).float()
        unlabelled = torch.ones(len(x_NF), dtype=torch.bool)
        unlabelled[task.labelled] = False
        x_nF, y_nK = x_NF[task.labelled], torch.from_numpy(task.indicators).float()
        x_UF = x_NF[unlabelled] if bool(unlabelled.any()) else x_nF

        network = fitted_once(
            self.name,
            task,
            fresh=lambda: _fresh(x_nF.shape[1], y_nK.shape[1]),
            fit=lambda: _trained(x_nF, y_nK, x_UF),
        )
        return MixedNetwork(scale, network)


def _fresh(features: int, classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(features, _WIDTH), nn.ReLU(),
        nn.Linear(_WIDTH, _WIDTH), nn.ReLU(),
        nn.Linear(_WIDTH, classes),
    )  # fmt: skip


def _trained(x_nF: Tensor, y_nK: Tensor, x_UF: Tensor) -> nn.Module:
    network = _fresh(x_nF.shape[1], y_nK.shape[1])
    weights_P, gradient_P = flattened([network])
    average_P = weights_P.detach().clone()
    adam = torch.optim.AdamW([weights_P], lr=_RATE, weight_decay=_DECAY)
    shares = torch.distributions.Beta(_MIX, _MIX)
    frequency_K = y_nK.mean(0)
    guessed_K = frequency_K.clone()
    for step in range(_STEPS):
        rows = torch.randint(len(x_nF), (_BATCH,))
        x_BF, y_BK = _augmented(x_nF[rows]), y_nK[rows]
        others_BF = x_UF[torch.randint(len(x_UF), (_BATCH,))]
        guesses = [_augmented(others_BF) for _ in range(_GUESSES)]
        mean_BK = _guess(network, guesses)
        guessed_K.lerp_(mean_BK.mean(0), 1 - _AVERAGE)
        targets_BK = _sharpened(mean_BK * frequency_K / guessed_K.clamp_min(1e-6))
        x_MF = torch.cat([x_BF, *guesses])
        y_MK = torch.cat([y_BK, *([targets_BK] * _GUESSES)])
        weight = _WEIGHT * min(1.0, 2 * step / _STEPS)
        loss = _loss(network, *_mixed(x_MF, y_MK, shares), weight=weight)
        gradient_P.zero_()
        loss.backward()
        adam.step()
        average_P.lerp_(weights_P.detach(), 1 - min(_AVERAGE, step / (step + 10)))
    weights_P.data.copy_(average_P)
    return parted(network).requires_grad_(False)


def _augmented(x_BF: Tensor) -> Tensor:
    return (x_BF + _NOISE * torch.randn_like(x_BF)) * (torch.rand_like(x_BF) >= _DROPPED)


@torch.no_grad()
def _guess(network: nn.Module, augmented: list[Tensor]) -> Tensor:
    """Eq. (6): the mean guess over the augmentations."""
    scores_AK: Tensor = network(torch.cat(augmented)).softmax(1)
    return scores_AK.reshape(len(augmented), -1, scores_AK.shape[1]).mean(0)


def _sharpened(guess_BK: Tensor) -> Tensor:
    """Eq. (7)."""
    sharp_BK = guess_BK ** (1 / _TEMPERATURE)
    return sharp_BK / sharp_BK.sum(1, keepdim=True)


def _mixed(x_MF: Tensor, y_MK: Tensor, shares: Distribution) -> tuple[Tensor, Tensor]:
    """MixUp that stays nearer to the first row of a pair, Eqs. (8) to (11)."""
    share_M: Tensor = shares.sample((len(x_MF),))
    share_M1 = torch.maximum(share_M, 1 - share_M)[:, None]
    other = torch.randperm(len(x_MF))
    return (
        share_M1 * x_MF + (1 - share_M1) * x_MF[other],
        share_M1 * y_MK + (1 - share_M1) * y_MK[other],
    )


def _loss(network: nn.Module, x_MF: Tensor, y_MK: Tensor, *, weight: float) -> Tensor:
    """Eqs. (2) to (5): cross-entropy of the labelled rows, squared error of the guessed ones."""
    logits_MK = network(x_MF)
    labelled = F.cross_entropy(logits_MK[:_BATCH], y_MK[:_BATCH])
    return labelled + weight * F.mse_loss(logits_MK[_BATCH:].softmax(1), y_MK[_BATCH:])

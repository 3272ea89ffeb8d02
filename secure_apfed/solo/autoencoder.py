"""A denoising autoencoder learns a code of all rows; logistic regression classifies the code.

Source: P. Vincent et al., JMLR 11, 2010.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from secure_apfed.seeds import Draws
from secure_apfed.solo.flat import flattened, parted
from secure_apfed.solo.interface import FloatArray, SoloTask
from secure_apfed.solo.kept import fitted_once
from secure_apfed.solo.scikit import best_strength, logistic, scale_of, table_of

__all__ = ["Autoencoder", "CodeClassifier"]

_WIDTH, _CODE = 128, 64
_STEPS, _BATCH = 600, 128
_RATE = 2e-3
_NOISE = 0.3
"""Deviation of what is added to the standardised features."""


@dataclass(frozen=True)
class CodeClassifier:
    scale: Any
    encoder: nn.Module = field(repr=False)
    code_scale: Any
    model: Any
    classes: int

    def scores(self, features_BF: FloatArray) -> FloatArray:
        codes_BD = _codes(self.encoder, self.scale.transform(features_BF))
        return table_of(self.model, self.code_scale.transform(codes_BD), self.classes)


class Autoencoder:
    name, title = "autoencoder", "Autoencoder"

    def fit(self, task: SoloTask) -> CodeClassifier:
        from sklearn.preprocessing import StandardScaler

        scale = scale_of(task)
        scaled_NF = scale.transform(task.features)

        # The code is of all rows, whichever of their labels are held out.
        encoder = fitted_once(
            self.name,
            task,
            fresh=lambda: _fresh(scaled_NF.shape[1]),
            fit=lambda draws: _pretrained(torch.from_numpy(scaled_NF).float(), draws),
            labels=False,
        )
        codes_ND = _codes(encoder, scaled_NF)
        code_scale = StandardScaler().fit(codes_ND)
        codes_nD = code_scale.transform(codes_ND[task.labelled])
        model = logistic(best_strength(codes_nD, task.labels, task.seed))
        model.fit(codes_nD, task.labels)
        return CodeClassifier(scale, encoder, code_scale, model, task.classes)


def _fresh(features: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(features, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, _CODE), nn.ReLU()
    )


def _pretrained(x_NF: Tensor, draws: Draws) -> nn.Module:
    features = x_NF.shape[1]
    with draws:
        encoder = _fresh(features)
        decoder = nn.Sequential(nn.Linear(_CODE, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, features))
    draw = draws.on()
    weights_P, gradient_P = flattened([encoder, decoder])
    adam = torch.optim.Adam([weights_P], lr=_RATE)
    for _ in range(_STEPS):
        x_BF = x_NF[torch.randint(len(x_NF), (_BATCH,), generator=draw)]
        noisy_BF = x_BF + _NOISE * torch.randn(x_BF.shape, generator=draw)
        loss = F.mse_loss(decoder(encoder(noisy_BF)), x_BF)
        gradient_P.zero_()
        loss.backward()
        adam.step()
    return parted(encoder)


@torch.no_grad()
def _codes(encoder: nn.Module, scaled_BF: FloatArray) -> FloatArray:
    codes_BD: Tensor = encoder(torch.from_numpy(scaled_BF).float())
    return codes_BD.double().numpy()

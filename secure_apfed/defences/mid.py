"""MID: a noisy bottleneck before representations leave, with a bound on what passes it.

Run by: the party that sends representations. Against: a receiver that rebuilds features or
guesses labels. Gives no guarantee: the mean KL divergence bounds the mutual information of
this model with Gaussian codes on average over training rows, not for one person, and
nothing keeps training from raising it.

Letters: B batch, D numbers of a representation.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from secure_apfed.defences.interface import RepresentationDefence, Surroundings
from secure_apfed.errors import ModelError
from secure_apfed.settings.defence import MidSettings

__all__ = ["Mid", "gaussian_kl"]

_WIDEST = 1024
_START_DEVIATION = 0.1


class Mid(RepresentationDefence):
    """Sends t = mu(h) + sigma(h) e with e standard normal; adds weight * KL to the loss.

    Zou, Liu and Zhang 2023 (Mutual Information Regularization for Vertical Federated
    Learning), with the variational bound of Alemi et al. 2017 (Deep Variational Information
    Bottleneck), Eqs. 14 to 17: I(h; t) <= E KL(N(mu(h), sigma(h)^2) || N(0, I)).
    mu and log sigma are linear here, and start as the identity with deviation 0.1. When the
    party only predicts (TVFL's inference), t is the mean.
    """

    name: ClassVar[str] = "mid"
    gives: ClassVar[str] = (
        "MID lowers an average bound on the mutual information between representations and what "
        "is sent"
    )

    def __init__(self, settings: MidSettings, around: Surroundings) -> None:
        super().__init__()
        if around.size > _WIDEST:
            raise ModelError(
                f"{around.party}: defence mid takes rows of at most {_WIDEST} numbers, got "
                f"{around.size}; send a projection (model.projection: 64) or a smaller "
                "representation"
            )
        self._weight, self._noise = settings.weight, around.noise
        self.mean = nn.Linear(around.size, around.size)
        self.log_deviation = nn.Linear(around.size, around.size)
        with torch.no_grad():
            self.mean.weight.copy_(torch.eye(around.size))
            self.log_deviation.weight.zero_()
            self.mean.bias.zero_()
            self.log_deviation.bias.fill_(torch.tensor(_START_DEVIATION).log())

    def forward(self, h_BD: Tensor, features_B: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return t and the penalty."""
        mean_BD, log_deviation_BD = self.mean(h_BD), self.log_deviation(h_BD)
        penalty = self._weight * gaussian_kl(mean_BD, log_deviation_BD)
        if not self.training:
            return mean_BD, penalty
        noise_BD = self._noise.normals(mean_BD.detach().float(), use=self.name, step=step)
        return mean_BD + log_deviation_BD.exp() * noise_BD.to(mean_BD.dtype), penalty


def gaussian_kl(mean_BD: Tensor, log_deviation_BD: Tensor) -> Tensor:
    """Mean over rows of KL(N(mean, deviation^2) || N(0, I)), nats.

    Kingma and Welling 2014 (Auto-Encoding Variational Bayes), Appendix B: for each number
    (mean^2 + deviation^2 - 1) / 2 - log deviation.
    """
    variance_BD = (2 * log_deviation_BD).exp()
    return ((mean_BD.square() + variance_BD - 1) / 2 - log_deviation_BD).sum(1).mean()

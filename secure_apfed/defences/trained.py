"""Defences in what is trained: a term of the loss, a noisy bottleneck, false labels.

Run by: the party that sends representations, in its own loss (NoPeek, MID); the active of TVFL,
before training and after each prediction (confusional labels). Against: a receiver that rebuilds
features or guesses labels. They give no guarantee: each says what is left.

Letters: N rows, B batch, D numbers of a representation, K classes.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secure_apfed.defences.interface import LabelDefence, RepresentationDefence, Surroundings
from secure_apfed.errors import ModelError
from secure_apfed.settings.privacy import ConfusionalLabelsSettings, MidSettings, NoPeekSettings

__all__ = ["ConfusionalLabels", "Mid", "NoPeek", "distance_correlation", "gaussian_kl"]

_WIDEST = 1024
_START_DEVIATION = 0.1
_LEARNING_RATE = 0.01
_BLUR = 0.1
# lambda_1, how much a false label avoids the true class; lambda_2, how flat it is.
_CONFUSION, _ENTROPY = 1.0, 0.2


class NoPeek(RepresentationDefence):
    """Adds weight * dCor(x, h) to the loss.

    Vepakomma, Singh, Gupta and Raskar 2020 (NoPeek: Information leakage reduction to share
    activations in distributed deep learning), the loss alpha_1 DCOR(X, Z) + alpha_2 CCE.
    It is measured on training batches, and a low one does not bound what an inverse network finds;
    labels are not covered.
    """

    name: ClassVar[str] = "nopeek"
    gives: ClassVar[str] = (
        "NoPeek lowers the distance correlation of representations with the sender's features on "
        "training batches"
    )

    def __init__(self, settings: NoPeekSettings, around: Surroundings) -> None:
        super().__init__()
        del around
        self._weight = settings.weight

    def forward(self, h_BD: Tensor, features_B: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return h as it is, and the penalty."""
        return h_BD, self._weight * distance_correlation(features_B.flatten(1), h_BD)


def distance_correlation(x_BF: Tensor, h_BD: Tensor) -> Tensor:
    """Sample distance correlation of two matrices with the same rows, in [0, 1].

    Székely, Rizzo and Bakirov 2007 (Measuring and Testing Dependence by Correlation of
    Distances), Definitions 4 and 5: with A and B the doubly centred matrices of distances
    between rows, dCor^2 = sum(A B) / sqrt(sum(A A) sum(B B)). 0 where one of them is constant.
    """
    a_BB, b_BB = _centred(x_BF), _centred(h_BD)
    scale = (a_BB.square().sum() * b_BB.square().sum()).sqrt()
    tiny = torch.finfo(scale.dtype).tiny
    if not bool(scale > tiny):
        return (h_BD * 0).sum()
    # The square root has no slope at 0: independence is approached, never left with NaN.
    squared = ((a_BB * b_BB).sum() / scale).clamp(min=torch.finfo(scale.dtype).eps)
    return squared.sqrt()


def _centred(rows_BD: Tensor) -> Tensor:
    wide_BD = rows_BD if rows_BD.dtype == torch.float64 else rows_BD.float()
    distance_BB = torch.cdist(wide_BD, wide_BD, compute_mode="donot_use_mm_for_euclid_dist")
    row_B = distance_BB.mean(0)
    return distance_BB - row_B[None] - row_B[:, None] + row_B.mean()


class Mid(RepresentationDefence):
    """Sends t = mu(h) + sigma(h) e with e standard normal; adds weight * KL to the loss.

    Zou, Liu and Zhang 2023 (Mutual Information Regularization for Vertical Federated
    Learning), with the variational bound of Alemi et al. 2017 (Deep Variational Information
    Bottleneck), Eqs. 14 to 17: I(h; t) <= E KL(N(mu(h), sigma(h)^2) || N(0, I)).
    mu and log sigma are linear here, and start as the identity with deviation 0.1. When the
    party only predicts (TVFL's inference), t is the mean. The bound holds on average over training
    rows, not for one person, and nothing keeps training from raising it.
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


class ConfusionalLabels(LabelDefence):
    """An autoencoder y -> soft false label -> y, trained on the K classes.

    Zou, Liu, Kang, Liu, He, Yi, Yang and Zhang 2022 (Defending Batch-Level Label Inference and
    Replacement Attacks in Vertical Federated Learning), the confusional autoencoder: it is
    trained to decode well, to differ from the true label, and to have high entropy. Two
    deviations: the difference from the true label is log(1 - probability of the true class),
    which is bounded above where their minus cross-entropy is not; and the decoder is trained on
    false labels with noise of deviation 0.1, since a model never predicts them exactly.

    Each class has one false label, so a passive that knows a few true labels learns the code from
    them. In APFed no passive receives a gradient of the task loss, so there is nothing to confuse.
    """

    name: ClassVar[str] = "confusional_labels"
    gives: ClassVar[str] = (
        "confusional labels hide which class a gradient is of from a passive that knows no label"
    )

    def __init__(self, settings: ConfusionalLabelsSettings, around: Surroundings) -> None:
        self._classes = around.classes
        width = 4 * around.classes
        encoder, self._decoder = (
            nn.Sequential(
                nn.Linear(around.classes, width), nn.ReLU(), nn.Linear(width, around.classes)
            )
            for _ in range(2)
        )
        self._false_KK = self._train(encoder, settings)
        self._decoder.requires_grad_(False)
        right = self._decoder(self._false_KK).argmax(1) == torch.arange(self._classes)
        if not bool(right.all()):
            raise ModelError(
                f"defences: confusional_labels decodes {int(right.sum())} of {self._classes} "
                "classes; raise steps"
            )

    def _train(self, encoder: nn.Module, settings: ConfusionalLabelsSettings) -> Tensor:
        """Train encoder and decoder; return the false label of each class, (K, K)."""
        one_hot_KK, true_K = torch.eye(self._classes), torch.arange(self._classes)
        parameters = [*encoder.parameters(), *self._decoder.parameters()]
        adam = torch.optim.Adam(parameters, lr=_LEARNING_RATE)
        for _ in range(settings.steps):
            log_false_KK = encoder(one_hot_KK).log_softmax(1)
            false_KK = log_false_KK.exp()
            blurred_KK = false_KK + _BLUR * torch.randn_like(false_KK)
            decoded = F.cross_entropy(self._decoder(blurred_KK), true_K)
            avoided = (1 - false_KK.diagonal()).clamp(min=1e-6).log().mean()
            entropy = -(false_KK * log_false_KK).sum(1).mean()
            loss = decoded - _CONFUSION * avoided - _ENTROPY * entropy
            adam.zero_grad()
            loss.backward()
            adam.step()
        with torch.no_grad():
            known_KK: Tensor = encoder(one_hot_KK).softmax(1)
        return known_KK

    def targets(self, labels_N: Tensor) -> Tensor:
        """The false label of each row."""
        return self._false_KK.to(labels_N.device)[labels_N]

    def decode(self, scores_BK: Tensor) -> Tensor:
        """Scores of the true classes."""
        decoder = self._decoder.to(scores_BK.device)
        decoded_BK: Tensor = decoder(scores_BK.float().softmax(1))
        return decoded_BK

"""Confusional labels: the task is learnt on soft false labels that only the active can decode.

Run by: the active of TVFL, before training (the autoencoder) and after each prediction (its
decoder). Against: a passive that reads labels out of gradients and knows none. Gives no
guarantee: each class has one false label, so a passive that knows a few true labels learns
the code from them. In APFed no passive receives a gradient of the task loss, so there is
nothing for it to confuse.

Letters: N rows, B batch, K classes.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secure_apfed.defences.interface import LabelDefence, Surroundings
from secure_apfed.errors import ModelError
from secure_apfed.settings.defence import ConfusionalLabelsSettings

__all__ = ["ConfusionalLabels"]

_LEARNING_RATE = 0.01
_BLUR = 0.1
# lambda_1, how much a false label avoids the true class; lambda_2, how flat it is.
_CONFUSION, _ENTROPY = 1.0, 0.2


class ConfusionalLabels(LabelDefence):
    """An autoencoder y -> soft false label -> y, trained on the K classes.

    Zou, Liu, Kang, Liu, He, Yi, Yang and Zhang 2022 (Defending Batch-Level Label Inference and
    Replacement Attacks in Vertical Federated Learning), the confusional autoencoder: it is
    trained to decode well, to differ from the true label, and to have high entropy. Two
    deviations: the difference from the true label is log(1 - probability of the true class),
    which is bounded above where their minus cross-entropy is not; and the decoder is trained on
    false labels with noise of deviation 0.1, since a model never predicts them exactly.
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

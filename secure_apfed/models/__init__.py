"""Networks of the papers and for tables. A new family is one file and one line in the table."""

from collections.abc import Mapping

from secure_apfed.models.convolutional import CONV_CIFAR, CONV_MNIST
from secure_apfed.models.network import NetworkFamily, Shape, output_shape, projection_to
from secure_apfed.models.perceptron import Perceptron
from secure_apfed.models.settings import ModelSettings

__all__ = [
    "NETWORKS",
    "ModelSettings",
    "NetworkFamily",
    "Shape",
    "family_for",
    "output_shape",
    "projection_to",
]

NETWORKS: Mapping[str, NetworkFamily] = {
    "conv_mnist": CONV_MNIST,
    "conv_cifar": CONV_CIFAR,
    "mlp": Perceptron(),
}

_LEAST_HEIGHT = 7
"""Rows below which two 5x5 convolutions leave less than three rows of map."""


def family_for(settings: ModelSettings, features: Shape) -> NetworkFamily:
    """The family that `settings.network` names, or the one that "auto" takes for such rows."""
    if settings.network != "auto":
        return NETWORKS[settings.network]
    if len(features) == 3 and features[1] >= _LEAST_HEIGHT and features[0] in (1, 3):
        return NETWORKS["conv_mnist" if features[0] == 1 else "conv_cifar"]
    return NETWORKS["mlp"]

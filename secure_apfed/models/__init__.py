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

_AUTO: Mapping[int, tuple[str, int]] = {1: ("conv_mnist", 7), 3: ("conv_cifar", 8)}
"""By channels: the convolutions, and the least side of an image that they leave some map of
(three rows for MNIST's two layers, one for CIFAR's three)."""


def family_for(settings: ModelSettings, features: Shape) -> NetworkFamily:
    """The family that `settings.network` names, or the one that "auto" takes for such rows."""
    if settings.network != "auto":
        return NETWORKS[settings.network]
    if len(features) == 3 and features[0] in _AUTO:
        name, least = _AUTO[features[0]]
        if min(features[1:]) >= least:
            return NETWORKS[name]
    return NETWORKS["mlp"]

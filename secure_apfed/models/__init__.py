"""Networks of the papers and for tables. A new family is one file and one line in the table."""

import math
from collections.abc import Mapping

from torch import nn

from secure_apfed.models.convolutional import CONV_CIFAR, CONV_MNIST
from secure_apfed.models.enriched import Enriched, EnrichedFamily
from secure_apfed.models.identity import Identity
from secure_apfed.models.linear import Linear
from secure_apfed.models.network import NetworkFamily, Shape, output_shape, projection_to
from secure_apfed.models.perceptron import Perceptron
from secure_apfed.models.random_features import RandomFeatureFamily, RandomFeatures
from secure_apfed.models.recurrent import Recurrent
from secure_apfed.models.selu import Selu
from secure_apfed.settings.model import ModelSettings

__all__ = [
    "NETWORKS",
    "Enriched",
    "NetworkFamily",
    "RandomFeatures",
    "Shape",
    "encoder_and_head",
    "family_for",
    "output_shape",
    "projection_to",
]

NETWORKS: Mapping[str, NetworkFamily] = {
    "conv_mnist": CONV_MNIST,
    "conv_cifar": CONV_CIFAR,
    "mlp": Perceptron(),
    "selu": Selu(),
    "enriched": EnrichedFamily(),
    "linear": Linear(),
    "random_features": RandomFeatureFamily(),
    "identity": Identity(),
    "gru": Recurrent(),
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


def encoder_and_head(
    settings: ModelSettings, features: Shape, classes: int
) -> tuple[nn.Module, nn.Module]:
    """The two networks that predict alone, features -> representation -> class scores.

    Their weights are drawn from torch's generator, the encoder's first.

    Raises:
        ModelError: the network cannot take such rows.
    """
    family = family_for(settings, features)
    encoder = family.encoder(features, settings)
    size = math.prod(output_shape(encoder, features))
    return encoder, family.head(size, classes, settings)

"""The papers' convolutional networks: Table 3 (MNIST, FMNIST) and Table 4 (CIFAR).

Run by: the active (encoder, head) and the passives (decoder or encoder). Deviations from
the printed tables follow the authors' release: Table 3's "31" is 32; padding is 1 and
stride 1 but for the second CIFAR layer (2); there is no pooling. A decoder mirrors the
encoder; where the representation is a projection, a linear layer first restores the map.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from secure_apfed.errors import ModelError
from secure_apfed.models.network import Reshape, Shape, output_shape, two_layer_head
from secure_apfed.settings.model import ModelSettings

__all__ = ["CONV_CIFAR", "CONV_MNIST", "Convolutional"]

_PADDING = 1


@dataclass(frozen=True, kw_only=True)
class Convolutional:
    """Convolutions, a ReLU after each, no pooling.

    Attributes:
        channels: of the image and after each layer.
        kernels, strides: of each layer.
        head_width: of the head's hidden layer.
        last_relu: whether the decoder ends in a ReLU (release: MNIST yes, CIFAR no).
    """

    channels: tuple[int, ...]
    kernels: tuple[int, ...]
    strides: tuple[int, ...]
    head_width: int
    last_relu: bool

    def encoder(self, features: Shape, settings: ModelSettings) -> nn.Module:
        """(channels, height, width) -> map."""
        self._check_image(features)
        layers: list[nn.Module] = []
        for (wide, narrow), kernel, stride in zip(
            pairwise(self.channels), self.kernels, self.strides, strict=True
        ):
            layers += [nn.Conv2d(wide, narrow, kernel, stride, _PADDING), nn.ReLU()]
        return nn.Sequential(*layers)

    def head(self, size: int, classes: int, settings: ModelSettings) -> nn.Module:
        """fc1 (d, 256 or 50), fc2 (256 or 50, K)."""
        return two_layer_head(size, self.head_width, classes, settings.dropout)

    def decoder(self, representation: Shape, features: Shape, settings: ModelSettings) -> nn.Module:
        """The encoder's mirror: transposed convolutions from its map to the image."""
        self._check_image(features)
        image_map = output_shape(self.encoder(features, settings), features)
        layers: list[nn.Module] = []
        if len(representation) == 1:
            layers += [nn.Linear(representation[0], math.prod(image_map)), nn.ReLU()]
            layers += [Reshape(image_map)]
        backwards = list(zip(pairwise(self.channels), self.kernels, self.strides, strict=True))
        for (wide, narrow), kernel, stride in reversed(backwards):
            layers += [nn.ConvTranspose2d(narrow, wide, kernel, stride, _PADDING), nn.ReLU()]
        return nn.Sequential(*(layers if self.last_relu else layers[:-1]))

    def _check_image(self, features: Shape) -> None:
        if len(features) != 3 or features[0] != self.channels[0]:
            raise ModelError(
                f"these convolutions read images of {self.channels[0]} channel(s), (channels, "
                f"height, width), got rows of shape {features}; choose another model.network"
            )


CONV_MNIST = Convolutional(
    channels=(1, 32, 64), kernels=(5, 5), strides=(1, 1), head_width=256, last_relu=True
)
CONV_CIFAR = Convolutional(
    channels=(3, 16, 32, 64), kernels=(5, 4, 5), strides=(1, 2, 1), head_width=50, last_relu=False
)

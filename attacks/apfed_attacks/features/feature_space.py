"""Networks of the adversaries that build a feature space of their own, shared by these attacks.

Run by: an adversary with rows of the victim's kind of features. Either the victim is made to look
like the simulator, or the simulator like the victim; a decoder inverts it.

A victim that convolves sends maps, whose places are those of its image. There simulator and
decoder convolve as well: then what makes the distributions alike also puts each image where the
adversary's own would lie, which between perceptrons nothing does.

Letters: B batch, D numbers of a representation, F features.
"""

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

from secure_apfed.networks.models import Shape

_IMAGE_AXES = 3  # channels, height, width


def build_layers(*widths: int) -> nn.Sequential:
    """Return fully connected layers of these widths, from input to output.

    A leaky ReLU stands between two layers.
    """
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


def build_simulator(
    features: Shape, representation: Shape, hidden: int, channels: int
) -> nn.Module:
    """Return a network from flattened features (B, F) to flattened representations (B, D).

    Between images and convolution maps it has linear convolutions with this number of `channels`,
    as the pilot network of Pasquini et al. (2021); else fully connected layers, `hidden` wide.
    `features`, `representation`: shapes of a row.
    """
    scale = _compute_scale(features, representation)
    if not scale:
        return build_layers(math.prod(features), hidden, hidden, math.prod(representation))
    between = max(channels, 2 * scale**2)
    return nn.Sequential(
        nn.Unflatten(1, features),
        nn.Upsample((scale * representation[1], scale * representation[2])),
        nn.Conv2d(features[0], channels, 3, padding=1),
        nn.PixelUnshuffle(scale),
        nn.Conv2d(channels * scale**2, between, 1),
        nn.Conv2d(between, representation[0], 3, padding=1),
        nn.Flatten(),
    )


def build_decoder(features: Shape, representation: Shape, hidden: int, channels: int) -> nn.Module:
    """Return a network from flattened representations (B, D) to flattened features (B, F).

    It mirrors that of `build_simulator`. `features`, `representation`: shapes of a row. `hidden`:
    width of fully connected layers. `channels`: number of channels of convolutions.
    """
    scale = _compute_scale(features, representation)
    if not scale:
        return build_layers(math.prod(representation), hidden, hidden, math.prod(features))
    return nn.Sequential(
        nn.Unflatten(1, representation),
        nn.Conv2d(representation[0], channels * scale**2, 3, padding=1),
        nn.PixelShuffle(scale),
        nn.LeakyReLU(0.2),
        nn.Conv2d(channels, features[0], 3, padding=1),
        nn.Upsample(features[1:]),
        nn.Flatten(),
    )


def _compute_scale(features: Shape, representation: Shape) -> int:
    """Return how many times as large an image is as its convolution map, rounded up.

    0 unless both shapes are (channels, height, width).
    """
    if not len(features) == len(representation) == _IMAGE_AXES:
        return 0
    sides = zip(features[1:], representation[1:], strict=True)
    return max(math.ceil(image_side / map_side) for image_side, map_side in sides)


def compute_slope_penalty(
    judge: Callable[[Tensor], Tensor], one_BD: Tensor, other_BD: Tensor
) -> Tensor:
    """Return the mean squared norm of a discriminator's gradient at points between two samples.

    Adding it to the loss keeps the discriminator's slope small, so that training is stable:
    Mescheder et al. (2018), Which Training Methods for GANs do actually Converge?, Section 4.1.

    `judge`: the discriminator, (B, D) -> scores. `one_BD`, `other_BD`: the samples.
    """
    share = torch.rand(len(one_BD), *[1] * (one_BD.dim() - 1), device=one_BD.device)
    mixed_BD = torch.lerp(one_BD.detach(), other_BD.detach(), share).requires_grad_()
    (slope_BD,) = torch.autograd.grad(judge(mixed_BD).sum(), mixed_BD, create_graph=True)
    # Squared, since the norm itself has no gradient at 0.
    squared_norm: Tensor = slope_BD.flatten(1).square().sum(dim=1).mean()
    return squared_norm


def compute_energy_distance(one_ND: Tensor, other_MD: Tensor) -> float:
    """Return how unlike two samples (N, D) and (M, D) are; 0 for equal distributions.

    This is the energy distance (Szekely and Rizzo, 2013).
    """
    between = 2 * torch.cdist(one_ND, other_MD).mean()
    within = torch.cdist(one_ND, one_ND).mean() + torch.cdist(other_MD, other_MD).mean()
    return float(between - within)

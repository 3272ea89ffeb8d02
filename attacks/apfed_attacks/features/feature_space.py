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

_IMAGE = 3  # channels, height, width


def build_layers(*widths: int) -> nn.Sequential:
    """Return fully connected layers with a leaky ReLU between them."""
    parts: list[nn.Module] = []
    for wide, narrow in pairwise(widths):
        parts += [nn.Linear(wide, narrow), nn.LeakyReLU(0.2)]
    return nn.Sequential(*parts[:-1])


def simulator_for(features: Shape, representation: Shape, hidden: int, channels: int) -> nn.Module:
    """Return a network from flattened features (B, F) to flattened representations (B, D).

    Linear convolutions between images and maps, as the pilot network of Pasquini et al. (2021),
    with this number of `channels` a pixel; else perceptrons, `hidden` wide. Shapes are of a row.
    """
    if not (scale := _compute_scale(features, representation)):
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


def decoder_for(features: Shape, representation: Shape, hidden: int, channels: int) -> nn.Module:
    """Mirror of `simulator_for`: representations (B, D) -> features (B, F).

    `hidden`: width of its layers, or `channels` of its maps.
    """
    if not (scale := _compute_scale(features, representation)):
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
    """Return how much larger an image is than its map, rounded up; 0 where both do not convolve."""
    if not len(features) == len(representation) == _IMAGE:
        return 0
    sides = zip(features[1:], representation[1:], strict=True)
    return max(math.ceil(image / place) for image, place in sides)


def slope_penalty(judge: Callable[[Tensor], Tensor], one_BD: Tensor, other_BD: Tensor) -> Tensor:
    """Return the squared slope of the discriminator at points between the two samples.

    Mescheder et al. (2018), Which Training Methods for GANs do actually Converge?, Section 4.1.

    `judge`: the discriminator. `one_BD`: the two samples.
    """
    share = torch.rand(len(one_BD), *[1] * (one_BD.dim() - 1), device=one_BD.device)
    mixed_BD = torch.lerp(one_BD.detach(), other_BD.detach(), share).requires_grad_()
    (slope_BD,) = torch.autograd.grad(judge(mixed_BD).sum(), mixed_BD, create_graph=True)
    # Not of the norm, which has no gradient where it is 0.
    squared: Tensor = slope_BD.flatten(1).square().sum(dim=1).mean()
    return squared


def energy_distance(one_ND: Tensor, other_MD: Tensor) -> float:
    """Measure how unlike two samples are; 0 for the same distribution (Szekely and Rizzo, 2013)."""
    between = 2 * torch.cdist(one_ND, other_MD).mean()
    within = torch.cdist(one_ND, one_ND).mean() + torch.cdist(other_MD, other_MD).mean()
    return float(between - within)

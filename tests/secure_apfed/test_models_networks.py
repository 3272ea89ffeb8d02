"""Networks: shapes and sizes of Tables 3 and 4 by hand, mirrors, choice, and what does not fit."""

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from secure_apfed.errors import ModelError
from secure_apfed.models import NETWORKS, Shape, family_for, output_shape, projection_to
from secure_apfed.settings.training import ModelSettings

USUAL = ModelSettings()
# features of one view, map of the encoder: apfed-facts, Tables 3 and 4 for 2 and 3 views
VIEWS: list[tuple[str, Shape, Shape]] = [
    ("conv_mnist", (1, 14, 28), (64, 10, 24)),
    ("conv_mnist", (1, 9, 28), (64, 5, 24)),
    ("conv_cifar", (3, 16, 32), (64, 5, 13)),
    ("conv_cifar", (3, 10, 32), (64, 2, 13)),
]
NUMBERS: dict[Shape, int] = {
    (1, 14, 28): 15_360,
    (1, 9, 28): 7_680,
    (3, 16, 32): 4_160,
    (3, 10, 32): 1_664,
}


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def layers(module: nn.Module) -> list[str]:
    assert isinstance(module, nn.Sequential)
    return [type(layer).__name__ for layer in module]


@pytest.mark.parametrize(("network", "features", "image_map"), VIEWS)
def test_decoders_mirror_the_encoders_of_the_tables(
    network: str, features: Shape, image_map: Shape
) -> None:
    family = NETWORKS[network]
    encoder, decoder = family.encoder(features, USUAL), family.decoder(image_map, features, USUAL)
    assert output_shape(encoder, features) == image_map
    assert encoder(torch.rand(2, *features)).flatten(1).shape == (2, NUMBERS[features])
    assert output_shape(decoder, image_map) == features
    forwards = [layer for layer in encoder.modules() if isinstance(layer, nn.Conv2d)]
    backwards = [layer for layer in decoder.modules() if isinstance(layer, nn.ConvTranspose2d)]
    assert [
        (c.in_channels, c.out_channels, c.kernel_size, c.stride, c.padding) for c in forwards
    ] == [
        (c.out_channels, c.in_channels, c.kernel_size, c.stride, c.padding)
        for c in reversed(backwards)
    ]
    projected = family.decoder((64,), features, USUAL)  # restores the map first
    assert output_shape(projected, (64,)) == features
    assert layers(projected) == ["Linear", "ReLU", "Reshape", *layers(decoder)]
    extra = 64 * NUMBERS[features] + NUMBERS[features]
    assert parameters(projected) == parameters(decoder) + extra


def test_encoders_have_the_layers_of_the_tables() -> None:
    mnist = NETWORKS["conv_mnist"].encoder((1, 14, 28), USUAL)
    cifar = NETWORKS["conv_cifar"].encoder((3, 16, 32), USUAL)
    assert layers(mnist) == ["Conv2d", "ReLU"] * 2
    assert layers(cifar) == ["Conv2d", "ReLU"] * 3
    geometry = [
        (c.in_channels, c.out_channels, c.kernel_size, c.stride, c.padding)
        for network in (mnist, cifar)
        for c in network.modules()
        if isinstance(c, nn.Conv2d)
    ]
    assert geometry == [
        (1, 32, (5, 5), (1, 1), (1, 1)),
        (32, 64, (5, 5), (1, 1), (1, 1)),
        (3, 16, (5, 5), (1, 1), (1, 1)),
        (16, 32, (4, 4), (2, 2), (1, 1)),
        (32, 64, (5, 5), (1, 1), (1, 1)),
    ]


@pytest.mark.parametrize(
    ("network", "size", "width", "classes"),
    [
        ("conv_mnist", 15_360, 256, 10),
        ("conv_cifar", 4_160, 50, 10),
        ("conv_cifar", 1_664, 50, 100),
    ],
)
def test_heads_are_those_of_the_tables(network: str, size: int, width: int, classes: int) -> None:
    head = NETWORKS[network].head(size, classes, ModelSettings(dropout=0.25))
    assert layers(head) == ["Flatten", "Linear", "ReLU", "Dropout", "Linear"]
    assert parameters(head) == size * width + width + width * classes + classes
    assert [layer.p for layer in head.modules() if isinstance(layer, nn.Dropout)] == [0.25]
    assert output_shape(head, (size,)) == (classes,)
    assert USUAL.dropout == 0.5


def test_a_decoder_ends_in_a_relu_for_mnist_and_not_for_cifar() -> None:
    ends = {}
    for network, features, image_map in (VIEWS[0], VIEWS[2]):
        decoder = NETWORKS[network].decoder(image_map, features, USUAL)
        ends[network] = layers(decoder)
        torch.manual_seed(0)
        lowest = decoder(torch.randn(2, *image_map)).min()
        assert (lowest < 0) == (network == "conv_cifar")
    assert ends["conv_mnist"] == ["ConvTranspose2d", "ReLU"] * 2
    assert ends["conv_cifar"] == ["ConvTranspose2d", "ReLU"] * 2 + ["ConvTranspose2d"]


def test_auto_takes_convolutions_where_they_fit() -> None:
    taken: Mapping[str, tuple[Shape, ...]] = {
        "conv_mnist": ((1, 14, 28), (1, 7, 7)), "conv_cifar": ((3, 16, 32), (3, 8, 8)),
        "mlp": ((1, 6, 28), (1, 28, 6), (3, 7, 32), (2, 16, 16), (30,), (4, 5)),
    }  # fmt: skip
    for network, features in ((name, shape) for name, shapes in taken.items() for shape in shapes):
        family = family_for(USUAL, features)
        assert family is NETWORKS[network], features
        encoded = output_shape(family.encoder(features, USUAL), features)
        assert output_shape(family.decoder(encoded, features, USUAL), encoded)
    for name in NETWORKS:
        assert family_for(ModelSettings.model_validate({"network": name}), (5,)) is NETWORKS[name]


def test_rows_that_do_not_fit_are_named() -> None:
    wrong: tuple[tuple[str, Shape, int], ...] = (
        ("conv_mnist", (3, 16, 32), 1), ("conv_mnist", (30,), 1), ("conv_mnist", (14, 28), 1),
        ("conv_cifar", (1, 3, 32, 32), 3),
    )  # fmt: skip
    for network, features, channels in wrong:
        shape = re.escape(str(features))
        with pytest.raises(ModelError, match=rf"of {channels} channel.*rows of shape {shape}"):
            NETWORKS[network].encoder(features, USUAL)
        with pytest.raises(ModelError, match=r"choose another model\.network"):
            NETWORKS[network].decoder((64,), features, USUAL)
    small: tuple[tuple[str, Shape], ...] = (("conv_mnist", (1, 4, 28)), ("conv_cifar", (3, 7, 32)))
    for network, features in small:
        encoder = NETWORKS[network].encoder(features, USUAL)
        with pytest.raises(ModelError, match=rf"rows of shape \({features[0]}, {features[1]}"):
            output_shape(encoder, features)
        with pytest.raises(ModelError, match="another partition"):
            NETWORKS[network].decoder((64,), features, USUAL)


def test_asking_for_a_shape_changes_nothing() -> None:
    module = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    state = torch.get_rng_state()
    assert output_shape(module, (4,)) == (2,)
    assert module.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[key], value) for key, value in module.state_dict().items())
    resting = nn.Linear(4, 2).eval()
    assert output_shape(resting, (4,)) == (2,)
    assert not resting.training
    assert output_shape(nn.Flatten(), (4, 5)) == (20,)


def test_a_projection_is_one_linear_layer_over_everything() -> None:
    projection = projection_to(64, (64, 5, 13))
    assert layers(projection) == ["Flatten", "Linear"]
    assert parameters(projection) == 64 * 4_160 + 64
    assert output_shape(projection, (64, 5, 13)) == (64,)


@pytest.mark.parametrize(("features", "hidden"), [((30,), ()), ((1, 2, 8), (7, 6))])
def test_perceptrons_have_the_widths_of_their_settings(
    features: Shape, hidden: tuple[int, ...]
) -> None:
    settings = ModelSettings(network="mlp", hidden=hidden, representation=5)
    family = NETWORKS["mlp"]
    encoder = family.encoder(features, settings)
    size = 30 if len(features) == 1 else 16
    widths = [size, *hidden, 5]
    assert [
        (layer.in_features, layer.out_features)
        for layer in encoder.modules()
        if isinstance(layer, nn.Linear)
    ] == list(pairwise(widths))
    assert layers(encoder) == ["Flatten", *["Linear", "ReLU"] * (len(hidden) + 1)]
    assert output_shape(encoder, features) == (5,)
    head = family.head(5, 3, settings)
    assert output_shape(head, (5,)) == (3,)
    assert next(head.parameters()).shape == ((hidden[0] if hidden else 5), 5)


@pytest.mark.parametrize(("representation", "hidden"), [((5,), ()), ((64, 2, 3), (7, 6))])
def test_a_perceptrons_decoder_mirrors_it_and_may_be_negative(
    representation: Shape, hidden: tuple[int, ...]
) -> None:
    settings = ModelSettings(network="mlp", hidden=hidden)
    decoder = NETWORKS["mlp"].decoder(representation, (1, 2, 8), settings)
    assert output_shape(decoder, representation) == (1, 2, 8)
    assert layers(decoder)[-2:] == ["Linear", "Reshape"]
    widths = [m.out_features for m in decoder.modules() if isinstance(m, nn.Linear)]
    assert widths == [*reversed(hidden), 16]
    torch.manual_seed(0)
    assert decoder(torch.randn(20, *representation)).min() < 0


def test_settings_out_of_range_are_refused() -> None:
    wrong: tuple[dict[str, Any], ...] = (
        {"network": "resnet"}, {"representation": 0}, {"dropout": 1.0}, {"projection": -3},
        {"projection": "some"}, {"hidden": [8, 0]},
    )  # fmt: skip
    for settings in wrong:
        with pytest.raises(ValidationError, match=next(iter(settings))):
            ModelSettings.model_validate(settings)

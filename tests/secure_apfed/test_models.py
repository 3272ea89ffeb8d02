"""Networks: shapes and sizes of Tables 3 and 4 by hand, mirrors, choice, and what does not fit; and
objectives: equal to the paper's equations written out.
"""

import math
import os
import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from secure_apfed.base.seeds import limit_threads, usable_cores
from secure_apfed.errors import ModelError
from secure_apfed.networks.models import (
    NETWORKS,
    RandomFeatures,
    Shape,
    family_for,
    limit_threads_for,
    make_projection,
    output_shape,
)
from secure_apfed.networks.objectives import OBJECTIVES, contrastive_loss
from secure_apfed.settings import (
    ClusteringSettings,
    ContrastiveSettings,
    ModelSettings,
    ObjectiveSettings,
    ReconstructionSettings,
)

USUAL = ModelSettings()


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def layers(module: nn.Module) -> list[str]:
    assert isinstance(module, nn.Sequential)
    return [type(layer).__name__ for layer in module]


# network, features of one view, map of the encoder and its numbers: Tables 3 and 4, 2 and 3 views
VIEWS: list[tuple[str, Shape, Shape, int]] = [
    ("conv_mnist", (1, 14, 28), (64, 10, 24), 15_360),
    ("conv_mnist", (1, 9, 28), (64, 5, 24), 7_680),
    ("conv_cifar", (3, 16, 32), (64, 5, 13), 4_160),
    ("conv_cifar", (3, 10, 32), (64, 2, 13), 1_664),
]
# channels in and out, kernel, stride and padding of each layer
GEOMETRY: dict[str, list[tuple[Any, ...]]] = {
    "conv_mnist": [(1, 32, (5, 5), (1, 1), (1, 1)), (32, 64, (5, 5), (1, 1), (1, 1))],
    "conv_cifar": [
        (3, 16, (5, 5), (1, 1), (1, 1)),
        (16, 32, (4, 4), (2, 2), (1, 1)),
        (32, 64, (5, 5), (1, 1), (1, 1)),
    ],
}


@pytest.mark.parametrize(("network", "features", "image_map", "numbers"), VIEWS)
def test_tables_of_networks(network: str, features: Shape, image_map: Shape, numbers: int) -> None:
    family = NETWORKS[network]
    geometry = GEOMETRY[network]
    encoder = family.make_encoder(features, USUAL)
    decoder = family.make_decoder(image_map, features, USUAL)
    assert layers(encoder) == ["Conv2d", "ReLU"] * len(geometry)
    assert output_shape(encoder, features) == image_map
    assert encoder(torch.rand(2, *features)).flatten(1).shape == (2, numbers)
    assert output_shape(decoder, image_map) == features
    forwards = [layer for layer in encoder.modules() if isinstance(layer, nn.Conv2d)]
    backwards = [layer for layer in decoder.modules() if isinstance(layer, nn.ConvTranspose2d)]
    assert geometry == [
        (c.in_channels, c.out_channels, c.kernel_size, c.stride, c.padding) for c in forwards
    ]
    assert geometry == [
        (c.out_channels, c.in_channels, c.kernel_size, c.stride, c.padding)
        for c in reversed(backwards)
    ]
    # The release ends in a ReLU for MNIST, and not for CIFAR.
    ended = ["ConvTranspose2d", "ReLU"] * len(geometry)
    assert layers(decoder) == (ended if network == "conv_mnist" else ended[:-1])
    projected = family.make_decoder((64,), features, USUAL)  # restores the map first
    assert output_shape(projected, (64,)) == features
    assert layers(projected) == ["Linear", "ReLU", "Unflatten", *layers(decoder)]
    assert parameters(projected) == parameters(decoder) + 65 * numbers
    projection = make_projection(64, image_map)
    assert layers(projection) == ["Flatten", "Linear"]
    assert parameters(projection) == 64 * numbers + 64
    width = 256 if network == "conv_mnist" else 50
    head = family.make_head(numbers, 10, ModelSettings(dropout=0.25))
    assert layers(head) == ["Flatten", "Linear", "ReLU", "Dropout", "Linear"]
    assert parameters(head) == (numbers + 1) * width + (width + 1) * 10
    assert [layer.p for layer in head.modules() if isinstance(layer, nn.Dropout)] == [0.25]
    assert output_shape(head, (numbers,)) == (10,)
    assert USUAL.dropout == 0.5


@pytest.mark.parametrize(("features", "hidden"), [((30,), ()), ((1, 2, 8), (7, 6))])
def test_perceptrons_mirror_their_settings(features: Shape, hidden: tuple[int, ...]) -> None:
    settings = ModelSettings(network="mlp", hidden=hidden, representation=5)
    family = NETWORKS["mlp"]
    size = math.prod(features)
    encoder = family.make_encoder(features, settings)
    decoder = family.make_decoder((5,), features, settings)
    widths = [
        [(m.in_features, m.out_features) for m in module.modules() if isinstance(m, nn.Linear)]
        for module in (encoder, decoder)
    ]
    assert widths[0] == list(pairwise((size, *hidden, 5)))
    assert widths[1] == list(pairwise((5, *reversed(hidden), size)))
    assert layers(encoder) == ["Flatten", *["Linear", "ReLU"] * (len(hidden) + 1)]
    assert layers(decoder)[-2:] == ["Linear", "Unflatten"]
    assert (output_shape(encoder, features), output_shape(decoder, (5,))) == ((5,), features)
    torch.manual_seed(0)
    assert decoder(torch.randn(20, 5)).min() < 0
    head = family.make_head(5, 3, settings)
    assert output_shape(head, (5,)) == (3,)
    assert next(head.parameters()).shape == ((hidden[0] if hidden else 5), 5)


def test_auto_takes_convolutions_where_they_fit() -> None:
    taken: Mapping[str, tuple[Shape, ...]] = {
        "conv_mnist": ((1, 14, 28), (1, 7, 7)),
        "conv_cifar": ((3, 16, 32), (3, 8, 8)),
        "mlp": ((1, 6, 28), (1, 28, 6), (3, 7, 32), (2, 16, 16), (30,), (4, 5)),
    }
    pairs = [(name, shape) for name, shapes in taken.items() for shape in shapes]
    families = {shape: family_for(USUAL, shape) for _, shape in pairs}
    assert families == {shape: NETWORKS[name] for name, shape in pairs}
    encoded = {
        shape: output_shape(family.make_encoder(shape, USUAL), shape)
        for shape, family in families.items()
    }
    assert all(
        output_shape(family.make_decoder(encoded[shape], shape, USUAL), encoded[shape])
        for shape, family in families.items()
    )
    settings = {name: ModelSettings.model_validate({"network": name}) for name in NETWORKS}
    assert {name: family_for(one, (5,)) for name, one in settings.items()} == dict(NETWORKS)


def test_random_features_say_nothing_of_what_never_differed() -> None:
    torch.manual_seed(0)
    encoder = RandomFeatures(4, 50)
    rows_NF = torch.randn(100, 4)
    rows_NF[:, 3] = 2024.0
    encoder.fit(rows_NF)
    told = encoder(rows_NF)
    assert told.isfinite().all()
    rows_NF[:, 3] = 2025.0
    assert torch.equal(encoder(rows_NF), told)


@pytest.mark.parametrize(
    ("network", "features", "channels"),
    [
        ("conv_mnist", (3, 16, 32), 1),
        ("conv_mnist", (30,), 1),
        ("conv_mnist", (14, 28), 1),
        ("conv_cifar", (1, 3, 32, 32), 3),
    ],
)
def test_rows_that_do_not_fit_are_named(network: str, features: Shape, channels: int) -> None:
    shape = re.escape(str(features))
    with pytest.raises(ModelError, match=rf"of {channels} channel.*rows of shape {shape}"):
        NETWORKS[network].make_encoder(features, USUAL)
    with pytest.raises(ModelError, match=r"choose another model\.network"):
        NETWORKS[network].make_decoder((64,), features, USUAL)


@pytest.mark.parametrize(
    ("network", "features"), [("conv_mnist", (1, 4, 28)), ("conv_cifar", (3, 7, 32))]
)
def test_rows_too_small_for_convolutions_are_named(network: str, features: Shape) -> None:
    encoder = NETWORKS[network].make_encoder(features, USUAL)
    with pytest.raises(ModelError, match=rf"rows of shape \({features[0]}, {features[1]}"):
        output_shape(encoder, features)
    with pytest.raises(ModelError, match="another partition"):
        NETWORKS[network].make_decoder((64,), features, USUAL)


def test_threads_are_as_many_as_a_step_pays_for() -> None:
    small = ModelSettings()
    large = ModelSettings(network="mlp", hidden=(4_000,))
    callers = torch.get_num_threads()
    with limit_threads(3):
        for settings, batch, shapes, worth in (
            (small, 128, [(20,)], 1),
            (small, 128, [], 1),
            (small, 128, [(20,), (1, 28, 28)], 3),
            (large, 128, [(1_000,)], 2),
            (large, 4_096, [(1_000,)], 3),
        ):
            with limit_threads_for(settings, batch, shapes):
                assert torch.get_num_threads() == worth
            assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == callers


@pytest.mark.parametrize(
    ("told", "cores"), [("1", 1), ("2", 2), ("64", 3), ("0", 1), ("", 3), ("many", 3), (" 2,1", 2)]
)
def test_cores_are_those_of_the_machine_or_fewer_where_the_environment_says_so(
    told: str, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", told)
    assert usable_cores() == cores


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


MLP = ModelSettings(network="mlp", hidden=(6,), representation=5)


def rows(count: int, size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, size, generator=generator, dtype=torch.float64)


def similarity(one: Tensor, other: Tensor) -> float:
    """Eq. (15)."""
    return float(one @ other) / math.sqrt(float(one @ one) * float(other @ other))


def anchor_loss(own: Tensor, other: Tensor, i: int, tau: float) -> float:
    """Eq. (14) for anchor i of `own`, term by term."""
    positive = math.exp(similarity(own[i], other[i]) / tau)
    total = 0.0
    for j in range(len(own)):
        if j != i:
            total += math.exp(similarity(own[i], own[j]) / tau)
        total += math.exp(similarity(own[i], other[j]) / tau)
    return -math.log(positive / total)


def naive(a: Tensor, p: Tensor, tau: float, anchors: str) -> float:
    """Eq. (16), or its mean over the anchors of both views."""
    losses = [anchor_loss(a, p, i, tau) for i in range(len(a))]
    if anchors == "both":
        losses += [anchor_loss(p, a, i, tau) for i in range(len(p))]
    return sum(losses) / len(losses)


@pytest.mark.parametrize("anchors", ["active", "both"])
@pytest.mark.parametrize(("tau", "count"), [(0.05, 9), (1.0, 1), (7.0, 2)])
def test_contrastive_loss_is_that_of_the_equations(anchors: str, tau: float, count: int) -> None:
    a = rows(count, 4, 1)
    p = rows(count, 4, 2)
    a *= 10.0 ** torch.arange(-count, count, 2)[:, None]  # of each row the direction counts
    ours = contrastive_loss(a, p, temperature=tau, anchors=anchors)
    assert ours.shape == ()
    assert ours.item() == pytest.approx(naive(a, p, tau, anchors), rel=1e-12, abs=1e-12)
    by_default = naive(a, p, 1.0, "both")
    assert contrastive_loss(a, p).item() == pytest.approx(by_default, rel=1e-12, abs=1e-12)
    for size, asked, message in (
        ((count + 1, 4), anchors, rf"\({count}, 4\) and \({count + 1}, 4\)"),
        ((count, 2), anchors, rf"\({count}, 4\) and \({count}, 2\)"),
        ((count, 4), "passive", "active or both, got 'passive'"),
    ):
        with pytest.raises(ModelError, match=message):
            contrastive_loss(a, torch.ones(size), anchors=asked)


def make(settings: ObjectiveSettings, sent: Shape, own: Shape, model: ModelSettings = MLP) -> Any:
    torch.manual_seed(3)
    return OBJECTIVES[settings.name](settings, representation=sent, features=own, model=model)


@pytest.mark.parametrize(
    ("sent", "own", "model"),
    [
        ((4,), (7,), MLP),
        ((4,), (1, 9, 28), USUAL),
        ((64, 5, 24), (1, 9, 28), USUAL),
    ],
    ids=["rows", "an image", "a map"],
)
def test_reconstruction_is_the_mean_squared_error_of_the_decoded(
    sent: Shape, own: Shape, model: ModelSettings
) -> None:
    objective = make(ReconstructionSettings(), sent, own, model)
    z = torch.randn(3, *sent)
    x = torch.rand(3, *own)
    difference = (objective.decoder(z) - x).detach().double().flatten()
    by_hand = sum(value * value for value in difference.tolist()) / (3 * math.prod(own))
    assert objective(z, x).item() == pytest.approx(by_hand, rel=1e-5)


@pytest.mark.parametrize(("anchors", "sent"), [("active", (4,)), ("both", (2, 3))])
def test_contrastive_encodes_projects_and_compares(sent: Shape, anchors: Any) -> None:
    settings = ContrastiveSettings(anchors=anchors, temperature=0.5)
    objective = make(settings, sent, (7,)).double()
    z = rows(5, math.prod(sent), 1).reshape(5, *sent)
    x = rows(5, 7, 2)
    p = objective.projection(objective.encoder(x)).detach()
    assert p.shape == (5, math.prod(sent))
    assert objective(z, x).item() == pytest.approx(naive(z.flatten(1), p, 0.5, anchors), rel=1e-12)


def test_clustering_tells_the_clusters_of_its_own_rows() -> None:
    """Against the equations, one number at a time; and its gradient against differences."""
    objective = make(ClusteringSettings(clusters=3), (2, 2), (7,)).double()
    centres = rows(3, 7, 1) * 8
    spread = 0.3
    x = centres.repeat_interleave(10, 0) + spread * rows(30, 7, 2)
    torch.manual_seed(5)
    objective.fit(x)
    place = torch.cdist(centres, objective.centres_KF).argmin(1)
    assert sorted(place.tolist()) == [0, 1, 2]
    assert (objective.compute_targets(x).argmax(1) == place.repeat_interleave(10)).all()
    objective.fit(rows(20, 7, 4))  # of no clusters, so that all count for every row
    x = rows(6, 7, 6)
    apart = [[float(((a - b) ** 2).sum()) for b in objective.centres_KF] for a in x]
    kernel = [[math.exp(-d / float(objective.spread)) for d in row] for row in apart]
    q = [[value / sum(row) for value in row] for row in kernel]
    weighed = [[v**2 / float(f) for v, f in zip(r, objective.sizes_K, strict=True)] for r in q]
    p = [[value / sum(row) for value in row] for row in weighed]
    z = rows(6, 4, 3).reshape(6, 2, 2)
    said = torch.log_softmax(z.flatten(1) @ objective.readout.weight.T + objective.readout.bias, 1)
    by_hand = -float((torch.tensor(p, dtype=torch.float64) * said.detach()).sum()) / 6
    assert objective(z, x).item() == pytest.approx(by_hand, rel=1e-9)
    assert torch.autograd.gradcheck(lambda z: objective(z, x), z.requires_grad_())
    kept = make(ClusteringSettings(clusters=3), (2, 2), (7,)).double()
    kept.load_state_dict(objective.state_dict())  # centres go on from a checkpoint
    assert torch.equal(kept.compute_targets(x), objective.compute_targets(x))


@pytest.mark.parametrize(
    "settings", [ReconstructionSettings(), ContrastiveSettings(), ClusteringSettings()]
)
def test_every_parameter_and_the_representation_get_a_gradient(settings: ObjectiveSettings) -> None:
    objective = make(settings, (4,), (7,)).double()
    z = rows(5, 4, 1)
    z[1] = 0  # a row without a direction
    objective(z.requires_grad_(), rows(5, 7, 2)).backward()
    gradients = [value.grad for value in (z, *objective.parameters())]
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert all(gradient.abs().max() > 0 for gradient in gradients)


IMAGE = (1, 14, 28)
UNFIT: tuple[tuple[ObjectiveSettings, Shape, Shape, ModelSettings, str], ...] = (
    (
        ReconstructionSettings(),
        (64, 10, 24),
        (1, 9, 28),
        ModelSettings(),
        re.escape("(64, 10, 24) into (1, 14, 28)") + ".*" + re.escape("shape (1, 9, 28)"),
    ),
    (
        ReconstructionSettings(),
        (32, 10, 24),
        IMAGE,
        ModelSettings(),
        re.escape("rows of shape (32, 10, 24)"),
    ),
    (
        ReconstructionSettings(),
        (64, 10),
        IMAGE,
        ModelSettings(),
        re.escape("rows of shape (64, 10)"),
    ),
    (
        ReconstructionSettings(),
        (64,),
        (3, 11, 32),
        ModelSettings(),
        re.escape("(3, 10, 32)"),
    ),  # stride 2 loses
    (
        ReconstructionSettings(),
        (4,),
        (7,),
        ModelSettings(network="conv_mnist"),
        "images of 1 channel",
    ),
    (
        ContrastiveSettings(),
        (4,),
        (7,),
        ModelSettings(network="conv_mnist"),
        "images of 1 channel",
    ),
)


@pytest.mark.parametrize(("settings", "sent", "own", "model", "message"), UNFIT)
def test_shapes_that_do_not_fit_an_objective_are_named(
    settings: ObjectiveSettings, sent: Shape, own: Shape, model: ModelSettings, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        make(settings, sent, own, model)


def test_each_entry_of_the_table_is_chosen_by_its_own_settings() -> None:
    adapter: TypeAdapter[ObjectiveSettings] = TypeAdapter(ObjectiveSettings)
    settings = {name: adapter.validate_python({"name": name}) for name in OBJECTIVES}
    made = {name: type(make(one, (4,), (7,))) for name, one in settings.items()}
    assert made == dict(OBJECTIVES)
    assert ContrastiveSettings().model_dump() == {
        "name": "contrastive",
        "anchors": "both",
        "temperature": 1.0,
    }


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "magic"},
        {},
        {"name": "reconstruction", "temperature": 1},
        {"name": "contrastive", "temperature": 0},
        {"name": "contrastive", "anchors": "passive"},
    ],
    ids=str,
)
def test_settings_of_no_objective_are_refused(settings: dict[str, Any]) -> None:
    adapter: TypeAdapter[ObjectiveSettings] = TypeAdapter(ObjectiveSettings)
    with pytest.raises(ValidationError):
        adapter.validate_python(settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"network": "resnet"},
        {"representation": 0},
        {"dropout": 1.0},
        {"projection": -3},
        {"projection": "some"},
        {"hidden": [8, 0]},
    ],
    ids=str,
)
def test_settings_of_no_network_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(settings))):
        ModelSettings.model_validate(settings)

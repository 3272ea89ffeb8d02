"""Objectives: equal to the paper's equations written out, and what does not fit is named."""

import math
import re
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from secure_apfed.errors import ModelError
from secure_apfed.models import Shape
from secure_apfed.objectives import OBJECTIVES, contrastive_loss
from secure_apfed.settings.training import (
    ContrastiveSettings,
    ModelSettings,
    ObjectiveSettings,
    ReconstructionSettings,
)

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
    a, p = rows(count, 4, 1), rows(count, 4, 2)
    ours = contrastive_loss(a, p, temperature=tau, anchors=anchors)
    assert ours.shape == ()
    assert ours.item() == pytest.approx(naive(a, p, tau, anchors), rel=1e-12, abs=1e-12)


def test_the_defaults_are_those_of_the_release() -> None:
    a, p = rows(5, 4, 1), rows(5, 4, 2)
    assert contrastive_loss(a, p).item() == pytest.approx(naive(a, p, 1.0, "both"), rel=1e-12)
    assert ContrastiveSettings().model_dump() == {
        "name": "contrastive", "anchors": "both", "temperature": 1.0,
    }  # fmt: skip


def test_one_sided_and_symmetric_losses_differ_and_only_one_is_symmetric() -> None:
    a, p = rows(5, 4, 1), rows(5, 4, 2)
    assert contrastive_loss(a, p).item() == pytest.approx(contrastive_loss(p, a).item())
    one, other = (contrastive_loss(*pair, anchors="active") for pair in ((a, p), (p, a)))
    assert abs(one.item() - other.item()) > 1e-3
    assert (one + other).item() / 2 == pytest.approx(contrastive_loss(a, p).item())


@pytest.mark.parametrize("anchors", ["active", "both"])
def test_contrastive_loss_ignores_the_scale_of_each_row(anchors: str) -> None:
    a, p = rows(6, 4, 1), rows(6, 4, 2)
    scales = torch.tensor([1e-6, 0.1, 1.0, 3.0, 50.0, 1e6], dtype=torch.float64)[:, None]
    plain = contrastive_loss(a, p, anchors=anchors).item()
    assert contrastive_loss(a * scales, p, anchors=anchors).item() == pytest.approx(plain)
    assert contrastive_loss(a, p * scales, anchors=anchors).item() == pytest.approx(plain)
    assert contrastive_loss(-a, p, anchors=anchors).item() != pytest.approx(plain)


@pytest.mark.parametrize(("anchors", "tau"), [("active", 0.3), ("both", 1.0)])
def test_gradients_of_the_contrastive_loss(anchors: str, tau: float) -> None:
    a, p = rows(4, 3, 1).requires_grad_(), rows(4, 3, 2).requires_grad_()

    def loss(a: Tensor, p: Tensor) -> Tensor:
        return contrastive_loss(a, p, temperature=tau, anchors=anchors)

    assert torch.autograd.gradcheck(loss, (a, p))


def test_a_row_of_zeros_gives_finite_numbers() -> None:
    a = rows(4, 3, 1)
    a[1] = 0
    a.requires_grad_()
    loss = contrastive_loss(a, rows(4, 3, 2))
    loss.backward()
    assert loss.isfinite()
    assert a.grad is not None
    assert a.grad.isfinite().all()


def test_matching_rows_have_the_least_loss() -> None:
    a = torch.eye(5, dtype=torch.float64)
    matched = contrastive_loss(a, a, temperature=0.05).item()
    assert 0 <= matched < 1e-6
    assert contrastive_loss(a, a.roll(1, 0), temperature=0.05).item() > 10


def test_arguments_that_make_no_pairs_are_refused() -> None:
    for a, p, anchors, message in (
        ((4, 3), (5, 3), "both", r"\(4, 3\) and \(5, 3\)"),
        ((4, 3), (3, 3), "active", r"\(4, 3\) and \(3, 3\)"),
        ((4, 3), (4, 2), "both", r"\(4, 3\) and \(4, 2\)"),
        ((4, 3), (4, 3), "passive", "active or both, got 'passive'"),
    ):
        with pytest.raises(ModelError, match=message):
            contrastive_loss(torch.ones(a), torch.ones(p), anchors=anchors)


def make(settings: ObjectiveSettings, sent: Shape, own: Shape, model: ModelSettings = MLP) -> Any:
    torch.manual_seed(3)
    return OBJECTIVES[settings.name](settings, representation=sent, features=own, model=model)


@pytest.mark.parametrize(
    ("sent", "own", "model"),
    [
        ((4,), (7,), MLP),
        ((4,), (1, 9, 28), ModelSettings()),
        ((64, 5, 24), (1, 9, 28), ModelSettings()),
    ],
)
def test_reconstruction_is_the_mean_squared_error_of_the_decoded(
    sent: Shape, own: Shape, model: ModelSettings
) -> None:
    objective = make(ReconstructionSettings(), sent, own, model)
    z, x = torch.randn(3, *sent), torch.rand(3, *own)
    difference = (objective.decoder(z) - x).detach().double().flatten()
    by_hand = sum(value * value for value in difference.tolist()) / (3 * math.prod(own))
    assert objective(z, x).item() == pytest.approx(by_hand, rel=1e-5)


@pytest.mark.parametrize(("anchors", "sent"), [("active", (4,)), ("both", (2, 3))])
def test_contrastive_encodes_projects_and_compares(sent: Shape, anchors: Any) -> None:
    settings = ContrastiveSettings(anchors=anchors, temperature=0.5)
    objective = make(settings, sent, (7,)).double()
    z, x = rows(5, math.prod(sent), 1).reshape(5, *sent), rows(5, 7, 2)
    p = objective.projection(objective.encoder(x)).detach()
    assert p.shape == (5, math.prod(sent))
    assert objective(z, x).item() == pytest.approx(naive(z.flatten(1), p, 0.5, anchors), rel=1e-12)


@pytest.mark.parametrize("settings", [ReconstructionSettings(), ContrastiveSettings()])
def test_every_parameter_and_the_representation_get_a_gradient(settings: ObjectiveSettings) -> None:
    objective = make(settings, (4,), (7,)).double()
    z = rows(5, 4, 1).requires_grad_()
    objective(z, rows(5, 7, 2)).backward()
    for value in (z, *objective.parameters()):
        assert value.grad.isfinite().all()
        assert value.grad.abs().max() > 0


def test_shapes_that_do_not_fit_are_named() -> None:
    image, plain = (1, 14, 28), ReconstructionSettings()
    wrong: tuple[tuple[ObjectiveSettings, Shape, Shape, ModelSettings, str], ...] = (
        (plain, (64, 10, 24), (1, 9, 28), ModelSettings(),
         re.escape("(64, 10, 24) into (1, 14, 28)") + ".*" + re.escape("shape (1, 9, 28)")),
        (plain, (32, 10, 24), image, ModelSettings(), re.escape("rows of shape (32, 10, 24)")),
        (plain, (64, 10), image, ModelSettings(), re.escape("rows of shape (64, 10)")),
        (plain, (64,), (3, 11, 32), ModelSettings(), re.escape("(3, 10, 32)")),  # stride 2 loses
        (plain, (4,), (7,), ModelSettings(network="conv_mnist"), "images of 1 channel"),
        (ContrastiveSettings(), (4,), (7,), ModelSettings(network="conv_mnist"),
         "images of 1 channel"),
    )  # fmt: skip
    for settings, sent, own, model, message in wrong:
        with pytest.raises(ModelError, match=message):
            make(settings, sent, own, model)


def test_each_entry_of_the_table_is_chosen_by_its_own_settings() -> None:
    adapter: TypeAdapter[ObjectiveSettings] = TypeAdapter(ObjectiveSettings)
    for name, kind in OBJECTIVES.items():
        assert type(make(adapter.validate_python({"name": name}), (4,), (7,))) is kind


def test_settings_out_of_range_are_refused() -> None:
    adapter: TypeAdapter[ObjectiveSettings] = TypeAdapter(ObjectiveSettings)
    wrong: tuple[dict[str, Any], ...] = (
        {"name": "magic"}, {}, {"name": "reconstruction", "temperature": 1},
        {"name": "contrastive", "temperature": 0}, {"name": "contrastive", "anchors": "passive"},
    )  # fmt: skip
    for settings in wrong:
        with pytest.raises(ValidationError):
            adapter.validate_python(settings)

"""Descent: SGD as the papers have it, a bound on the gradient, state by name."""

from typing import Any, Literal

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from secure_apfed.data import UNLABELLED
from secure_apfed.errors import ModelError
from secure_apfed.learning.descent import Descent, rate_after
from secure_apfed.models import RandomFeatures
from secure_apfed.settings.training import TrainSettings
from secure_apfed.tasks import Classification


def modules(seed: int = 0) -> dict[str, nn.Module]:
    torch.manual_seed(seed)
    return {"encoder": nn.Linear(3, 2), "head": nn.Linear(2, 2)}


def descend(descent: Descent, parts: dict[str, nn.Module], *, scale: float = 1.0) -> None:
    descent.begin()
    loss = parts["head"](parts["encoder"](torch.ones(4, 3))).square().mean() * scale
    loss.backward()
    descent.step()


def vector(parts: dict[str, nn.Module]) -> torch.Tensor:
    return torch.cat(
        [one.detach().flatten() for part in parts.values() for one in part.parameters()]
    )


def test_a_long_gradient_is_scaled_onto_the_bound() -> None:
    train = TrainSettings(learning_rate=1.0, momentum=0.0, weight_decay=0.0, max_gradient_norm=0.5)
    parts = modules()
    before = vector(parts)
    descend(Descent("ann", parts, train), parts, scale=1e4)
    assert (vector(parts) - before).norm().item() == pytest.approx(0.5, rel=1e-4)


def test_what_has_no_weights_is_refused_and_named() -> None:
    """As random features are, which a passive of joint training cannot train."""
    with pytest.raises(ModelError, match="passive-1: its network has no weights"):
        Descent("passive-1", {"encoder": RandomFeatures(3, 8)}, TrainSettings())


def test_a_diverged_gradient_is_named_and_changes_nothing() -> None:
    train = TrainSettings(max_gradient_norm=1.0)
    parts = modules()
    before = vector(parts)
    with pytest.raises(ModelError, match="ann: training diverged"):
        descend(Descent("ann", parts, train), parts, scale=float("inf"))
    assert torch.equal(vector(parts), before)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("schedule", [{}, {"schedule_steps": 4}])
def test_state_goes_through_names(optimizer: str, schedule: dict[str, Any]) -> None:
    """With the place in a schedule: who goes on has the rates of who never stopped."""
    train = TrainSettings.model_validate(
        {"learning_rate": 0.1, "optimizer": optimizer, "warmup_steps": 2, **schedule}
    )
    one, other = modules(), modules(1)
    first, second = Descent("ann", one, train), Descent("ann", other, train)
    descend(first, one)
    second.load_tensors(first.tensors())
    moment = {"sgd": "momentum_buffer", "adam": "exp_avg_sq", "adamw": "exp_avg_sq"}[optimizer]
    assert {"encoder.weight", "head.bias", f"moments.0.{moment}"} <= first.tensors().keys()
    for _ in range(2):
        descend(first, one)
        descend(second, other)
    assert torch.equal(vector(one), vector(other))


def test_rates_rise_and_fall_as_torchs_schedulers_have_them() -> None:
    train = TrainSettings(learning_rate=0.4, schedule_steps=12, warmup_steps=4)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.4)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
    falling = []
    for _ in range(9):
        falling.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        cosine.step()
    found = [rate_after(train, done) for done in range(15)]
    assert found[:4] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert found[4:13] == pytest.approx(falling, abs=1e-12)
    assert found[12:] == [0.0, 0.0, 0.0]
    warm = TrainSettings(learning_rate=0.4, warmup_steps=2)
    assert [rate_after(warm, done) for done in range(4)] == pytest.approx([0.2, 0.4, 0.4, 0.4])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"schedule_steps": 5, "warmup_steps": 5}, "leave none of 5"),
        ({"keep_best": True}, "told by held-out rows"),
    ],
)
def test_a_schedule_without_an_end_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        TrainSettings.model_validate(settings)


@pytest.mark.parametrize(
    ("name", "theirs", "more"),
    [
        ("sgd", torch.optim.SGD, {"momentum": 0.9}),
        ("adam", torch.optim.Adam, {}),
        ("adamw", torch.optim.AdamW, {}),
    ],
)
def test_without_a_bound_steps_are_those_of_torch(
    name: Literal["sgd", "adam", "adamw"], theirs: type[torch.optim.SGD], more: dict[str, Any]
) -> None:
    ours, parts = modules(), modules()
    train = TrainSettings(optimizer=name, learning_rate=0.01, weight_decay=0.1)
    descent = Descent("ann", ours, train)
    optimizer = theirs(nn.ModuleDict(parts).parameters(), lr=0.01, weight_decay=0.1, **more)
    for _ in range(4):
        descend(descent, ours)
        optimizer.zero_grad()
        parts["head"](parts["encoder"](torch.ones(4, 3))).square().mean().backward()
        optimizer.step()
    assert torch.allclose(vector(ours), vector(parts), atol=1e-6)


def test_a_loss_counts_labelled_rows_alone() -> None:
    scores = torch.randn(4, 3, requires_grad=True)
    labels = torch.tensor([0, UNLABELLED, 2, UNLABELLED])
    loss = Classification().loss
    known = loss(scores[[0, 2]], labels[[0, 2]], scores)
    assert torch.allclose(loss(scores, labels, scores), known)
    nothing = loss(scores, torch.full((4,), UNLABELLED), scores)
    nothing.backward()
    assert nothing.item() == 0.0
    assert scores.grad is not None
    assert not scores.grad.any()

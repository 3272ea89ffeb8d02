"""Descent: SGD as the papers have it, state by name; training that ends early, in any method."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from secure_apfed.config import Config
from secure_apfed.data import UNLABELLED, load_data
from secure_apfed.errors import ConfigError, ModelError
from secure_apfed.learning.descent import Descent, compute_learning_rate
from secure_apfed.measures.tasks import Classification
from secure_apfed.methods import METHODS, open_session
from secure_apfed.methods.method import pick_held_out_rows, split_batches
from secure_apfed.networks.models import RandomFeatures
from secure_apfed.runs.outcome import RunResult
from secure_apfed.runs.run import run
from secure_apfed.settings import TrainSettings
from tests.secure_apfed.small_runs import interrupt_run, small_config

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
STOPPING = [name for name, method in METHODS.items() if method.settings.can_stop_early]
TRAIN = {
    "epochs": 80,
    "batch_size": 32,
    "learning_rate": 0.02,
    "device": "cpu",
    "patience": 3,
    "optimizer": "adam",
    "weight_decay": 0.0,
}


def modules(seed: int = 0) -> dict[str, nn.Module]:
    torch.manual_seed(seed)
    return {"encoder": nn.Linear(3, 2), "head": nn.Linear(2, 2)}


def descend(descent: Descent, parts: dict[str, nn.Module], *, scale: float = 1.0) -> None:
    descent.zero_grad()
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


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("unused", [False, True], ids=["all used", "one unused"])
def test_a_gradient_is_scaled_as_by_torch(scale: float, unused: bool) -> None:
    train = TrainSettings(learning_rate=1.0, momentum=0.0, weight_decay=0.0, max_gradient_norm=0.5)
    ours, theirs = modules(), modules()
    if unused:
        ours["spare"] = nn.Linear(1, 1)
        theirs["spare"] = copy.deepcopy(ours["spare"])
    descend(Descent("hospital", ours, train), ours, scale=scale)
    (theirs["head"](theirs["encoder"](torch.ones(4, 3))).square().mean() * scale).backward()
    weights = [weight for part in theirs.values() for weight in part.parameters()]
    nn.utils.clip_grad_norm_(weights, 0.5)
    torch.optim.SGD(weights, lr=1.0).step()
    assert torch.equal(vector(ours), vector(theirs))


def test_what_has_no_weights_is_refused_and_named() -> None:
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
    one = modules()
    other = modules(1)
    first = Descent("ann", one, train)
    second = Descent("ann", other, train)
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
    found = [compute_learning_rate(train, done) for done in range(15)]
    assert found[:4] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert found[4:13] == pytest.approx(falling, abs=1e-12)
    assert found[12:] == [0.0, 0.0, 0.0]
    warm = TrainSettings(learning_rate=0.4, warmup_steps=2)
    assert [compute_learning_rate(warm, done) for done in range(4)] == pytest.approx(
        [0.2, 0.4, 0.4, 0.4]
    )


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
    ours = modules()
    parts = modules()
    train = TrainSettings(optimizer=name, learning_rate=0.01, weight_decay=0.1)
    descent = Descent("ann", ours, train)
    optimizer = theirs(nn.ModuleDict(parts).parameters(), lr=0.01, weight_decay=0.1, **more)
    for _ in range(4):
        descend(descent, ours)
        optimizer.zero_grad()
        parts["head"](parts["encoder"](torch.ones(4, 3))).square().mean().backward()
        optimizer.step()
    assert torch.allclose(vector(ours), vector(parts), atol=1e-6)


def test_rows_without_a_label_have_no_loss() -> None:
    scores = torch.randn(4, 3, requires_grad=True)
    nothing = Classification().compute_loss(scores, torch.full((4,), UNLABELLED))
    nothing.backward()
    assert nothing.item() == 0.0
    assert scores.grad is not None
    assert not scores.grad.any()


@pytest.fixture(autouse=True)
def _a_quarter_is_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secure_apfed.methods.method.HELD_OUT_SHARE", 0.25)


def config_of(method: str, **train: Any) -> Config:
    # An active that knows little overfits soon.
    data = {"dataset": "breast_cancer", "active_view": 2, "overlap": 1.0, "limit": 120}
    return small_config(
        method,
        data=data,
        train={**TRAIN, **train},
        guard={"mechanism": "none", "noise": "reproducible_insecure"},
        transcript={"keep": "none"},
    )


def losses_of(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["held_out_loss"] for line in lines]


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("method", STOPPING)
def test_it_ends_as_many_epochs_after_the_least_loss(method: str, tmp_path: Path) -> None:
    result = run(config_of(method), tmp_path / "run")
    losses = losses_of(tmp_path / "run")
    assert 3 < len(losses) < 80
    assert len(losses) - 1 - losses.index(min(losses)) == 3
    assert result.accuracy


@pytest.mark.parametrize("method", STOPPING)
def test_nobody_learns_from_held_out_rows(method: str) -> None:
    config = config_of(method)
    if config.method.can_predict_locally:
        data = config.data.model_copy(update={"labelled": 40})
        config = config.model_copy(update={"data": data})
    learner = open_session(config, load_data(config.data, seed=config.seed)).active_role
    held = pick_held_out_rows(learner, config)
    assert len(held) == round(0.25 * len(learner.rows_with_label()))
    assert torch.isin(held, learner.rows_with_label()).all()
    for epoch in range(2):
        learnt = torch.cat(split_batches(learner, config, epoch))
        assert not torch.isin(learnt, held).any()
    every = config_of(method, patience=None)
    assert not len(pick_held_out_rows(learner, every))


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("method", ["single_view", "apfed_c"])
@pytest.mark.parametrize("train", [{"class_weights": "balanced"}, {"spread_labels": True}])
def test_a_model_is_the_same_whatever_held_out_rows_say(method: str, train: dict[str, Any]) -> None:
    config = config_of(method, epochs=4, patience=4, **train)
    data = load_data(config.data, seed=config.seed)
    held = pick_held_out_rows(open_session(config, data).active_role, config)
    features_N = data.active.features.clone()
    labels_N = data.active.labels
    assert labels_N is not None
    labels_N = labels_N.clone()
    features_N[held] = 100.0
    labels_N[held] = 0
    other = replace(data, table=replace(data.active, features=features_N, labels=labels_N))
    models = [run(config, None, data=one).recording.model for one in (data, other)]
    one, another = (model.state_dict() for model in models if model is not None)
    assert all(torch.equal(tensor, another[name]) for name, tensor in one.items())


def compute_held_out_loss(result: RunResult, config: Config) -> float:
    """Return the loss of the model that a run kept, on the rows that it learnt nothing from."""
    data = load_data(config.data, seed=config.seed)
    rows = pick_held_out_rows(open_session(config, data).active_role, config)
    model = result.recording.model
    labels_N = data.active.labels
    assert model is not None
    assert labels_N is not None
    with torch.no_grad():
        scores_BK = model(data.active.features[rows])
    return float(F.cross_entropy(scores_BK, labels_N[rows]))


@pytest.mark.slow
def test_a_run_that_was_broken_off_keeps_the_same_best_and_the_same_rates(tmp_path: Path) -> None:
    schedule = {
        "optimizer": "adamw",
        "learning_rate": 0.05,
        "schedule_steps": 60,
        "warmup_steps": 5,
    }
    config = config_of("apfed_c", keep_best=True, epochs=8, patience=7, **schedule)
    whole = run(config, tmp_path / "whole")
    interrupt_run(config, tmp_path / "broken", at_step=17)
    again = run(config, tmp_path / "broken", resume=True)
    losses = losses_of(tmp_path / "whole")
    assert losses == losses_of(tmp_path / "broken")
    assert losses.index(min(losses)) < 5 < len(losses) - 1
    assert compute_held_out_loss(again, config) == compute_held_out_loss(whole, config)
    assert compute_held_out_loss(again, config) == pytest.approx(min(losses), rel=1e-5)


def test_a_loss_on_rows_that_nobody_answers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secure_apfed.methods.method.HELD_OUT_SHARE", 0.001)
    with pytest.raises(ConfigError, match="held-out rows cannot be told"):
        run(config_of("split_nn"), None)

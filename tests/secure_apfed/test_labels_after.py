"""APFed whose exchange never uses a label, and the local models that learn labels afterwards."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from secure_apfed.config import Config
from secure_apfed.data import VerticalData, load_data
from secure_apfed.errors import ModelError
from secure_apfed.exchange import Kind, Links, TensorSpec, unpack
from secure_apfed.methods.apfed import ActiveTrainer
from secure_apfed.methods.local_models import fit_local_models, represent
from secure_apfed.runs.run import run
from secure_apfed.runs.solo import load_model
from secure_apfed.solo import (
    MOST_APART,
    Predictor,
    SoloTask,
    find_baseline,
    has_collapsed,
    measure_collapse,
)
from tests.secure_apfed.small_runs import interrupted, small_config

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
METHODS = ["apfed", "apfed_r", "apfed_c"]
TRAIN = {"epochs": 2, "batch_size": 64, "learning_rate": 0.05, "device": "cpu", "labels": "after"}
FROZEN = {"mechanism": "frozen_gaussian", "epsilon": 8.0, "noise": "reproducible_insecure"}


def config_of(method: str = "apfed_c", **changes: Any) -> Config:
    open_sum = {"scheme": "plain", "masks": "none"}
    usual = {"train": TRAIN, "guard": FROZEN, "secure_sum": open_sum}
    return small_config(method, **{**usual, **changes})


def with_other_labels(data: VerticalData) -> VerticalData:
    """Return the same people with every label changed."""
    labels = data.active.labels
    assert labels is not None
    table = replace(data.active, labels=(labels + 1) % len(data.classes))
    return replace(data, table=table)


Sent = list[tuple[str, Kind, int, bytes]]
RANDOM_BY_THEMSELVES = ("agreement", "alignment", "set-up")
"""Phases with fresh keys; their messages come before any label or representation is read."""
SENT = {"rows": TensorSpec(torch.int64, (None,)), "z": TensorSpec(torch.float32, (None, 4))}


def without_positions(kind: Kind, payload: bytes) -> bytes:
    """Return what a message says of rows; their positions are drawn anew by every alignment."""
    if kind is not Kind.REPRESENTATIONS:
        return payload
    tensors, _ = unpack(payload, SENT, sender="active")
    return tensors["z"].numpy().tobytes()


def sent_with(config: Config, data: VerticalData) -> Sent:
    """Return what the active sent in training; others know of its labels by that alone."""
    sent: Sent = []
    send = Links.send

    def record(self: Links, to: str, kind: Kind, step: int, payload: bytes = b"") -> None:
        if self.me == data.active.name and kind.phase not in RANDOM_BY_THEMSELVES:
            sent.append((to, kind, step, without_positions(kind, payload)))
        send(self, to, kind, step, payload)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Links, "send", record)
        run(config, None, data=data)
    return sent


@pytest.mark.parametrize("method", METHODS)
def test_messages_are_the_same_bytes_under_other_labels(method: str) -> None:
    config = config_of(method)
    data = load_data(config.data, seed=0)
    messages = sent_with(config, data)
    assert Kind.REPRESENTATIONS in {kind for _, kind, _, _ in messages}
    assert messages == sent_with(config, with_other_labels(data))


def test_a_planted_dependence_on_labels_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above must see a trainer that lets one label into the exchange."""
    forward = ActiveTrainer.forward

    def leak(self: ActiveTrainer, step: int, rows_B: Tensor, aligned: Tensor | None) -> Any:
        batch = forward(self, step, rows_B, aligned)
        if batch.h is None:
            return batch
        return replace(batch, h=batch.h + 1e-3 * self.labels_N[rows_B[0]])

    monkeypatch.setattr(ActiveTrainer, "forward", leak)
    config = config_of()
    data = load_data(config.data, seed=0)
    assert sent_with(config, data) != sent_with(config, with_other_labels(data))


def test_with_the_task_loss_messages_depend_on_labels() -> None:
    config = config_of(train={**TRAIN, "labels": "joint"})
    data = load_data(config.data, seed=0)
    assert sent_with(config, data) != sent_with(config, with_other_labels(data))


def test_the_kept_model_predicts_what_the_run_measured(tmp_path: Path) -> None:
    config = config_of()
    result = run(config, tmp_path / "run")
    model = load_model(tmp_path / "run")
    data = load_data(config.data, seed=0)
    labels = data.active.labels
    assert labels is not None
    probabilities = model.predict(data.active.features[data.test_rows])
    right = probabilities.argmax(1) == labels[data.test_rows]
    assert float(right.double().mean()) == pytest.approx(result.accuracy["apfed_c"])
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert all(json.loads(line)["loss"] is None for line in lines), "there is no task loss"
    outcome = json.loads((tmp_path / "run" / "result.json").read_text())
    assert set(outcome["local_models"]["used"]) == {
        f"{model} of {read}" for model in ("ridge", "logistic") for read in ("x", "h", "x and h")
    }


def test_a_run_that_was_broken_off_ends_the_same(tmp_path: Path) -> None:
    config = config_of(train={**TRAIN, "epochs": 3})
    whole = run(config, tmp_path / "whole")
    interrupted(config, tmp_path / "broken", at_step=9)
    resumed = run(config, tmp_path / "broken", resume=True)
    assert resumed.accuracy == whole.accuracy
    digests = [
        {
            name: tensor.sum().item()
            for name, tensor in load_model(path).network.state_dict().items()
        }
        for path in (tmp_path / "whole", tmp_path / "broken")
    ]
    assert digests[0] == digests[1]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "spread": ({"train": {**TRAIN, "spread_labels": True}}, "train.spread_labels"),
    "patience": ({"train": {**TRAIN, "patience": 2}}, "train.patience"),
    "weights": ({"train": {**TRAIN, "class_weights": "balanced"}}, "train.class_weights"),
    "dp_sgd": ({"dp_sgd": {"noise_multiplier": 1.0}}, "dp_sgd"),
    "no passives": ({"method": "single_view", "guard": {"mechanism": "none"}}, "train.labels"),
    "votes": ({"method": "votes", "guard": {"mechanism": "none"}}, "train.labels"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_reads_labels_before_is_refused(case: str) -> None:
    changes, named = REFUSED[case]
    method = changes.get("method", "apfed_c")
    others = {name: value for name, value in changes.items() if name != "method"}
    with pytest.raises(ValueError, match=named):
        config_of(method, **others)


# The last step by itself.


def task_of(classes: int = 3, *, seed: int = 0) -> SoloTask:
    """Return 120 rows in clusters, 30 of them with a label."""
    draw = np.random.default_rng(seed)
    truth = draw.integers(0, classes, 120)
    rows = draw.normal(size=(120, 5)) + 2 * np.eye(classes, 5)[truth]
    return SoloTask.of(rows, np.arange(30), truth[:30], classes=classes)


@pytest.mark.parametrize(("combine", "models"), [("mean", 6), ("mean_of_three", 3), ("best", 1)])
def test_models_of_all_inputs_are_combined(combine: Any, models: int) -> None:
    encoder = nn.Sequential(nn.Linear(5, 4), nn.Tanh())
    task = task_of()
    made = fit_local_models(encoder, task, combine=combine)
    assert len(made.used) == models
    if combine == "mean":
        assert {name.partition(" of ")[2] for name in made.used} == {"x", "h", "x and h"}
    scores = made.networks(torch.from_numpy(task.features), None)[0]
    assert scores.shape == (120, 3)
    torch.testing.assert_close(scores.exp().sum(1), torch.ones(120, dtype=torch.float64))
    assert all(parameter.grad is None for parameter in encoder.parameters())


def test_the_mean_is_the_mean_of_what_each_model_says() -> None:
    encoder = nn.Linear(5, 2)
    task = task_of()
    made = fit_local_models(encoder, task, combine="mean")
    h = represent(encoder.double(), task)
    rows = np.concatenate([task.features, h], axis=1)
    scaled = (rows - rows.mean(0)) / rows.std(0)
    inputs = {"x": task.features, "h": scaled[:, 5:], "x and h": scaled}
    said = []
    for name in made.used:
        model, _, of_input = name.partition(" of ")
        read = replace(task, features=inputs[of_input], shape=inputs[of_input].shape[1:])
        shares = find_baseline(model).fit(read).scores(read.features).clip(min=0)
        said.append(shares / shares.sum(1, keepdims=True))
    scores = made.networks(torch.from_numpy(task.features), None)[0].exp().numpy()
    np.testing.assert_allclose(scores, np.mean(said, axis=0), atol=1e-5)


def test_representations_that_are_not_finite_are_refused() -> None:
    encoder = nn.Linear(5, 2)
    nn.init.constant_(encoder.weight, torch.inf)
    with pytest.raises(ModelError, match=r"learning_rate"):
        fit_local_models(encoder, task_of(), combine="mean")


# A model that collapsed.


def predictor(say: Callable[[int], np.ndarray]) -> Predictor:
    return Predictor(lambda rows: say(len(rows)))


def test_a_collapse_is_measured_by_the_classes_that_are_predicted() -> None:
    task = task_of(3)
    only_first = predictor(lambda rows: np.eye(3)[np.zeros(rows, dtype=int)])
    even = predictor(lambda rows: np.eye(3)[np.arange(rows) % 3])
    shares = np.bincount(task.labels, minlength=3) / 30
    assert measure_collapse(only_first, task) == pytest.approx(1 - shares[0])
    assert measure_collapse(only_first, task) > MOST_APART
    assert measure_collapse(even, task) < MOST_APART
    assert not has_collapsed(find_baseline("ridge"), task)
    few = replace(task, features=task.features[:40])
    assert measure_collapse(only_first, few) == 0, "ten rows tell nothing"

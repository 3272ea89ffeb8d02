"""Training that ends once held-out rows gain nothing, whatever the method."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from secure_apfed.config import Config
from secure_apfed.data import load_data
from secure_apfed.errors import ConfigError
from secure_apfed.methods import METHODS, fresh_secrets, open_session
from secure_apfed.methods.method import batches_of, held_out_of
from secure_apfed.runs.outcome import RunResult
from secure_apfed.runs.run import run
from secure_apfed.runs.training_labels import answered_labels
from tests.secure_apfed.small_runs import interrupted, small_config

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")

STOPPING = [name for name, method in METHODS.items() if method.settings.stops_early]
TRAIN = {
    "epochs": 80, "batch_size": 32, "learning_rate": 0.02, "device": "cpu", "patience": 3,
    "optimizer": "adam", "weight_decay": 0.0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _a_quarter_is_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secure_apfed.methods.method.HELD_OUT", 0.25)


def config_of(method: str, **train: Any) -> Config:
    # An active that knows little overfits soon.
    data = {"dataset": "breast_cancer", "active_view": 2, "overlap": 1.0, "limit": 120}
    return small_config(
        method, data=data, train={**TRAIN, **train},
        guard={"mechanism": "none", "noise": "reproducible_insecure"},
        transcript={"keep": "none"},
    )  # fmt: skip


def losses_of(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["held_out_loss"] for line in lines]


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
    learner = open_session(config, load_data(config.data, seed=config.seed)).learner
    held = held_out_of(learner, config)
    assert len(held) == round(0.25 * len(learner.rows_with_label()))
    for epoch in range(2):
        learnt = torch.cat(batches_of(learner, config, epoch))
        assert not torch.isin(learnt, held).any()
    every = config_of(method, patience=None)
    assert not len(held_out_of(learner, every))


@pytest.mark.parametrize("method", ["single_view", "apfed_c"])
@pytest.mark.parametrize("train", [{"class_weights": "balanced"}, {"spread_labels": True}])
def test_a_model_is_the_same_whatever_the_held_out_rows_say(
    method: str, train: dict[str, Any]
) -> None:
    config = config_of(method, epochs=4, patience=4, **train)
    data = load_data(config.data, seed=config.seed)
    held = held_out_of(open_session(config, data).learner, config)
    features_N, labels_N = data.active.features.clone(), data.active.labels
    assert labels_N is not None
    labels_N = labels_N.clone()
    features_N[held], labels_N[held] = 100.0, 0
    other = replace(data, table=replace(data.active, features=features_N, labels=labels_N))
    models = [run(config, None, data=one).recording.model for one in (data, other)]
    one, another = (model.state_dict() for model in models if model is not None)
    assert all(torch.equal(tensor, another[name]) for name, tensor in one.items())


def test_held_out_rows_have_a_label() -> None:
    config = config_of("single_view")
    data = config.data.model_copy(update={"labelled": 40})
    config = config.model_copy(update={"data": data})
    loaded = load_data(data, seed=config.seed)
    own = loaded.own("active")
    assert own is not None
    labels, _ = answered_labels(config, own, fresh_secrets(config, "active"))
    learner = open_session(config, loaded.with_own(labels.data())).learner
    held = held_out_of(learner, config)
    assert len(held) == 10
    assert torch.isin(held, loaded.labelled_rows).all()


def held_out_loss(result: RunResult, config: Config) -> float:
    """Of the model that a run kept, on the rows that it learnt nothing from."""
    data = load_data(config.data, seed=config.seed)
    rows = held_out_of(open_session(config, data).learner, config)
    model, labels_N = result.recording.model, data.active.labels
    assert model is not None
    assert labels_N is not None
    with torch.no_grad():
        scores_BK = model(data.active.features[rows])
    return float(F.cross_entropy(scores_BK, labels_N[rows]))


def test_the_best_epochs_networks_are_kept(tmp_path: Path) -> None:
    config = config_of("apfed_c", keep_best=True)
    best = run(config, tmp_path / "best")
    losses = losses_of(tmp_path / "best")
    assert losses[-1] > min(losses)
    assert held_out_loss(best, config) == pytest.approx(min(losses), rel=1e-5)
    ends = config_of("apfed_c")
    last = run(ends, tmp_path / "last")
    assert losses_of(tmp_path / "last") == losses
    assert held_out_loss(last, ends) == pytest.approx(losses[-1], rel=1e-5)


def test_a_run_that_was_broken_off_keeps_the_same_best_and_the_same_rates(tmp_path: Path) -> None:
    """Also where the best epoch lies before the break."""
    schedule = {
        "optimizer": "adamw", "learning_rate": 0.05, "schedule_steps": 60,
        "warmup_steps": 5,
    }  # fmt: skip
    config = config_of("apfed_c", keep_best=True, epochs=8, patience=7, **schedule)
    whole = run(config, tmp_path / "whole")
    interrupted(config, tmp_path / "broken", at_step=17)
    again = run(config, tmp_path / "broken", resume=True)
    losses = losses_of(tmp_path / "whole")
    assert losses == losses_of(tmp_path / "broken")
    assert losses.index(min(losses)) < 5 < len(losses) - 1
    assert held_out_loss(again, config) == held_out_loss(whole, config)
    assert held_out_loss(again, config) == pytest.approx(min(losses), rel=1e-5)


def test_a_loss_on_rows_that_passives_do_not_answer_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("secure_apfed.methods.method.HELD_OUT", 0.001)
    with pytest.raises(ConfigError, match="held-out rows cannot be told"):
        run(config_of("split_nn"), None)

"""APFed whose exchange never uses a label, and the local models that learn labels afterwards."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from secure_apfed.base.seeds import seed_draws
from secure_apfed.baselines import (
    FOLDS,
    MAX_SHARE_DISTANCE,
    Baseline,
    BaselineTask,
    MeanOfModels,
    Predictor,
    choose_baseline,
    find_baseline,
    has_collapsed,
    measure_collapse,
)
from secure_apfed.baselines.fitted import FittedModel, Layers
from secure_apfed.baselines.interface import cache_fits, fit_once
from secure_apfed.config import Config
from secure_apfed.data import VerticalData, load_data
from secure_apfed.errors import ModelError
from secure_apfed.exchange import Kind, Links, TensorSpec, unpack_tensors
from secure_apfed.learning.trainers import ActiveTrainer
from secure_apfed.measures.table import MEASURES
from secure_apfed.methods import open_session
from secure_apfed.methods.local_models import compute_representations, fit_local_models
from secure_apfed.methods.single_view import SingleViewActive
from secure_apfed.runs import calibration
from secure_apfed.runs.active_model import load_model
from secure_apfed.runs.run import run
from secure_apfed.settings.training import LastInput
from tests.secure_apfed.seats import active_of
from tests.secure_apfed.small_runs import interrupt_run, small_config

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
METHODS = ["apfed", "apfed_r", "apfed_c"]
TRAIN = {"epochs": 2, "batch_size": 64, "learning_rate": 0.05, "device": "cpu", "labels": "after"}
FEW: dict[str, Any] = {"dataset": "breast_cancer", "overlap": 0.8, "labelled": 60, "limit": 300}
FROZEN = {"mechanism": "frozen_gaussian", "epsilon": 8.0, "noise": "reproducible_insecure"}


def config_of(method: str = "apfed_c", **changes: Any) -> Config:
    open_sum = {"scheme": "plain", "masks": "none"}
    usual = {"train": TRAIN, "guard": FROZEN, "secure_sum": open_sum}
    return small_config(method, **{**usual, **changes})


def change_labels(data: VerticalData) -> VerticalData:
    """Return the same people with every label changed."""
    labels = data.active.labels
    assert labels is not None
    table = replace(data.active, labels=(labels + 1) % len(data.classes))
    return replace(data, table=table)


Sent = list[tuple[str, Kind, int, bytes]]
RANDOM_BY_THEMSELVES = ("agreement", "alignment", "set-up")
"""Phases with fresh keys; their messages come before any label or representation is read."""
SENT = {"rows": TensorSpec(torch.int64, (None,)), "z": TensorSpec(torch.float32, (None, 4))}


def remove_positions(kind: Kind, payload: bytes) -> bytes:
    """Return what a message says of rows; their positions are drawn anew by every alignment."""
    if kind is not Kind.REPRESENTATIONS:
        return payload
    tensors, _ = unpack_tensors(payload, SENT, sender="active")
    return tensors["z"].numpy().tobytes()


def record_active(config: Config, data: VerticalData) -> Sent:
    """Return what the active sent in training; others know of its labels by that alone."""
    sent: Sent = []
    send = Links.send

    def record(self: Links, to: str, kind: Kind, step: int, payload: bytes = b"") -> None:
        if self.me == data.active.name and kind.phase not in RANDOM_BY_THEMSELVES:
            sent.append((to, kind, step, remove_positions(kind, payload)))
        send(self, to, kind, step, payload)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Links, "send", record)
        run(config, None, data=data)
    return sent


@pytest.mark.parametrize("method", METHODS)
def test_messages_are_the_same_bytes_under_other_labels(method: str) -> None:
    config = config_of(method)
    data = load_data(config.data, seed=0)
    messages = record_active(config, data)
    assert Kind.REPRESENTATIONS in {kind for _, kind, _, _ in messages}
    assert messages == record_active(config, change_labels(data))


def test_a_planted_dependence_on_labels_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above must see a trainer that lets one label into the exchange."""
    forward = ActiveTrainer.forward

    def leak(self: ActiveTrainer, step: int, rows_B: Tensor, aligned: Tensor | None) -> Any:
        batch = forward(self, step, rows_B, aligned)
        if batch.h_A is None:
            return batch
        return replace(batch, h_A=batch.h_A + 1e-3 * self.labels_N[rows_B[0]])

    monkeypatch.setattr(ActiveTrainer, "forward", leak)
    config = config_of()
    data = load_data(config.data, seed=0)
    assert record_active(config, data) != record_active(config, change_labels(data))


def test_with_the_task_loss_messages_depend_on_labels() -> None:
    config = config_of(train={**TRAIN, "labels": "joint"})
    data = load_data(config.data, seed=0)
    assert record_active(config, data) != record_active(config, change_labels(data))


def test_the_kept_model_predicts_what_the_run_measured(tmp_path: Path) -> None:
    config = config_of(train={**TRAIN, "combine": "mean"})
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
    teachers = ("ridge", "logistic", "their mean")
    assert set(outcome["local_models"]["used"]) == {
        f"pupil of x taught by {teacher}" for teacher in teachers
    }


@pytest.mark.parametrize("read", ["x", "h", "x_and_h", "pupils"])
def test_a_model_is_loaded_whatever_input_the_best_reads(read: str, tmp_path: Path) -> None:
    train = {**TRAIN, "combine": "best", "local_models": [read]}
    config = config_of(data=FEW, train=train)
    result = run(config, tmp_path / "run")
    data = load_data(config.data, seed=0)
    labels = data.active.labels
    assert labels is not None
    shares = load_model(tmp_path / "run").predict(data.active.features[data.test_rows])
    right = shares.argmax(1) == labels[data.test_rows]
    assert float(right.double().mean()) == pytest.approx(result.accuracy["apfed_c"])
    outcome = json.loads((tmp_path / "run" / "result.json").read_text())
    (used,) = outcome["local_models"]["used"]
    expected = "pupil of x taught by" if read == "pupils" else f" of {read.replace('_', ' ')}"
    assert expected in used
    session, again = (open_session(config, data) for _ in range(2))
    session.active_role.finish_locally()
    again.active_role.load_tensors(session.active_role.tensors(), next_step=0)
    features = data.active.features[data.test_rows].double()
    scores = []
    for each in (session, again):
        networks = active_of(each).get_active_networks()
        assert networks is not None
        scores.append(networks(features, None)[0])
    assert torch.equal(*scores)


def test_a_run_that_was_broken_off_ends_the_same(tmp_path: Path) -> None:
    config = config_of(train={**TRAIN, "epochs": 3})
    whole = run(config, tmp_path / "whole")
    interrupt_run(config, tmp_path / "broken", at_step=9)
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


def task_of(classes: int = 3, *, seed: int = 0) -> BaselineTask:
    """Return 120 rows in clusters, 30 of them with a label."""
    draw = np.random.default_rng(seed)
    truth = draw.integers(0, classes, 120)
    rows = draw.normal(size=(120, 5)) + 2 * np.eye(classes, 5)[truth]
    return BaselineTask.from_arrays(rows, np.arange(30), truth[:30], classes=classes)


ALL_INPUTS: tuple[LastInput, ...] = ("x", "h", "x_and_h", "pupils")


def draw_encoder(features: int, numbers: int) -> nn.Module:
    """Return a small encoder whose weights are the same in every run."""
    with seed_draws(1, "encoder"):
        return nn.Sequential(nn.Linear(features, numbers), nn.Tanh())


@pytest.mark.parametrize(("combine", "models"), [("mean", 4), ("mean_of_three", 3), ("best", 1)])
def test_models_of_all_inputs_are_combined(combine: Any, models: int) -> None:
    encoder = draw_encoder(5, 4)
    task = task_of()
    made = fit_local_models(encoder, task, combination=combine, inputs=ALL_INPUTS)
    assert len(made.used_names) == models
    if combine == "mean":
        assert {name.partition(" of ")[2] for name in made.used_names} == {"h", "x and h"}
    scores = made.networks(torch.from_numpy(task.features), None)[0]
    assert scores.shape == (120, 3)
    torch.testing.assert_close(scores.exp().sum(1), torch.ones(120, dtype=torch.float64))
    assert all(parameter.grad is None for parameter in encoder.parameters())


def test_the_mean_is_the_mean_of_what_each_model_says() -> None:
    encoder = draw_encoder(5, 2)
    task = task_of()
    made = fit_local_models(encoder, task, combination="mean", inputs=ALL_INPUTS)
    h = compute_representations(encoder.double(), task)
    rows = np.concatenate([task.features, h], axis=1)
    scaled = (rows - rows.mean(0)) / rows.std(0)
    inputs = {"x": task.features, "h": scaled[:, 5:], "x and h": scaled}
    said = []
    for name in made.used_names:
        model, _, of_input = name.partition(" of ")
        read = replace(task, features=inputs[of_input], shape=inputs[of_input].shape[1:])
        shares = find_baseline(model).fit(read).compute_scores(read.features).clip(min=0)
        said.append(shares / shares.sum(1, keepdims=True))
    scores = made.networks(torch.from_numpy(task.features), None)[0].exp().numpy()
    np.testing.assert_allclose(scores, np.mean(said, axis=0), atol=1e-5)


def test_representations_that_are_not_finite_are_refused() -> None:
    encoder = nn.Linear(5, 2)
    nn.init.constant_(encoder.weight, torch.inf)
    with pytest.raises(ModelError, match=r"learning_rate"):
        fit_local_models(encoder, task_of(), combination="mean", inputs=ALL_INPUTS)


# A model that collapsed.


def predictor(say: Callable[[int], np.ndarray]) -> Predictor:
    return Predictor(lambda rows: say(len(rows)))


def test_a_collapse_is_measured_by_the_classes_that_are_predicted() -> None:
    task = task_of(3)
    only_first = predictor(lambda rows: np.eye(3)[np.zeros(rows, dtype=int)])
    even = predictor(lambda rows: np.eye(3)[np.arange(rows) % 3])
    shares = np.bincount(task.labels, minlength=3) / 30
    assert measure_collapse(only_first, task) == pytest.approx(1 - shares[0])
    assert measure_collapse(only_first, task) > MAX_SHARE_DISTANCE
    assert measure_collapse(even, task) < MAX_SHARE_DISTANCE
    assert not has_collapsed(find_baseline("ridge"), task)
    few = replace(task, features=task.features[:40])
    assert measure_collapse(only_first, few) == 0, "ten rows tell nothing"


def diverging(name: str) -> Baseline:
    class Diverging(Baseline):
        def fit(self, task: BaselineTask) -> Predictor:
            raise ModelError("diverged")

    return rename_baseline(Diverging(), name)


def saying(name: str, say: Callable[[int], np.ndarray]) -> Baseline:
    class Saying(Baseline):
        def fit(self, task: BaselineTask) -> Predictor:
            weights = np.zeros((task.classes, task.features.shape[1]))
            keep = lambda: FittedModel(Layers.from_weights([(weights, say(1)[0])]))  # noqa: E731
            return Predictor(predictor(say).score_block, keep)

    return rename_baseline(Saying(), name)


def rename_baseline(baseline: Baseline, name: str) -> Baseline:
    baseline.name = baseline.title = name
    return baseline


def test_who_averages_leaves_out_the_same_models_and_names_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one_class = saying("one class", lambda rows: np.eye(3)[np.zeros(rows, dtype=int)])
    even = saying("even", lambda rows: np.eye(3)[np.arange(rows) % 3])
    task = task_of(3)
    models = {model.name: model for model in (diverging("diverging"), one_class, even)}
    monkeypatch.setattr("secure_apfed.baselines.BASELINES", models)
    for most in (None, 1):
        mean = MeanOfModels("mean", "mean", max_models=most)
        assert [member.name for member in mean.pick_members(task)] == ["even"]
    with_h = fit_local_models(nn.Identity(), task, combination="mean", inputs=ALL_INPUTS)
    assert {f"diverging of {read}: it cannot be fitted" for read in ("x", "h", "x and h")} <= set(
        with_h.left_out_names
    )
    assert "one class of x and h: it collapsed" in with_h.left_out_names
    assert "even of x and h" in with_h.used_names
    monkeypatch.setattr("secure_apfed.baselines.BASELINES", {"one class": one_class})
    members = MeanOfModels("mean", "mean").pick_members(task)
    assert [member.name for member in members] == ["one class"], "all have collapsed"
    monkeypatch.setattr("secure_apfed.baselines.BASELINES", {"diverging": diverging("diverging")})
    with pytest.raises(ModelError, match="no local model can be fitted"):
        MeanOfModels("mean", "mean").pick_members(task)


# The measure that ranks.


def make_knowing_baseline(name: str, shares: Sequence[float]) -> Baseline:
    """Return a model that knows the probability of class 1 of each row, by its first column."""

    class Knowing(Baseline):
        def fit(self, task: BaselineTask) -> Predictor:
            second = np.array(shares)
            both = np.stack([1 - second, second], axis=1)
            return Predictor(lambda rows: both[rows[:, 0].astype(int)])

    return rename_baseline(Knowing(), name)


CHOICES: dict[str, Callable[[BaselineTask], str]] = {
    "chosen": lambda task: choose_baseline(task).name,
    "mean of the best": lambda task: (
        MeanOfModels("m", "m", max_models=1).pick_members(task)[0].name
    ),
    "kept fit of that mean": lambda task: str(
        fit_once(MeanOfModels("m", "m", max_models=1), task).compute_scores(task.features)[0, 1]
    ),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_models_are_ranked_by_the_measure_of_the_run(
    choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decided right but ranked badly, against ranked right and decided badly."""
    labels = np.arange(10) % 2
    decides = [0.2, 0.9, 0.2, 0.9, 0.2, 0.9, 0.2, 0.9, 0.99, 0.6]
    ranks = [0.01 + 0.4 * label for label in labels]
    models = {
        "decides": make_knowing_baseline("decides", decides),
        "ranks": make_knowing_baseline("ranks", ranks),
    }
    monkeypatch.setattr("secure_apfed.baselines.BASELINES", models)
    task = BaselineTask.from_arrays(np.arange(10.0)[:, None], np.arange(10), labels, classes=2)
    by_auc = replace(task, measure=MEASURES["auc"])
    expected = {"accuracy": "decides", "auc": "ranks"}
    if choice.startswith("kept"):
        expected = {"accuracy": str(decides[0]), "auc": str(ranks[0])}
    with cache_fits():
        assert CHOICES[choice](task) == expected["accuracy"]
        assert CHOICES[choice](by_auc) == expected["auc"]
        assert CHOICES[choice](task) == expected["accuracy"], "kept apart from the other measure"


def test_a_task_is_what_a_run_learns_from() -> None:
    config = config_of(measure="auc", data={"dataset": "breast_cancer", "labelled": 40})
    data = load_data(config.data, seed=0)
    task = BaselineTask.from_run(config, data, data.train_rows)
    labels = data.active.labels
    assert labels is not None
    assert np.array_equal(task.labelled_features, data.active.features[data.labelled_rows].double())
    assert np.array_equal(task.labels, labels[data.labelled_rows])
    assert (task.measure.name, task.model, task.train) == ("auc", config.model, config.train)
    few = BaselineTask.from_run(config, data, data.train_rows[10:], labels_N=1 - labels)
    assert len(few.features) == len(data.train_rows) - 10
    known = data.labelled_rows[data.labelled_rows >= data.train_rows[10]]
    assert np.array_equal(few.labels, 1 - labels[known])


def test_local_models_read_a_sample_of_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secure_apfed.baselines.interface.MAX_ROWS", 100)
    config = config_of(data=FEW)
    data = load_data(config.data, seed=0)
    ending = active_of(open_session(config, data)).final_fit
    assert ending is not None
    assert data.active.labels is not None
    task = ending.make_task(data.active.labels)
    every = BaselineTask.from_run(config, data, data.train_rows)
    assert len(every.features) > len(task.features) == 100
    assert np.array_equal(task.features, every.subsampled.features)
    assert np.array_equal(task.labels, every.labels)
    assert len(ending.received_sums.average_sums()) == 100


# Calibration.


def finish_active(config: Config, data: VerticalData) -> SingleViewActive:
    """Return an active that has fitted its local models, over an encoder at its start."""
    active = active_of(open_session(config, data))
    active.finish_locally()
    return active


def test_models_without_some_rows_never_read_the_labels_of_these() -> None:
    config = config_of(data=FEW)
    data = load_data(config.data, seed=0)
    labels = data.active.labels
    assert labels is not None
    rows = data.labelled_rows[::3]
    others = labels.clone()
    others[rows] = 1 - others[rows]
    changed = replace(data, table=replace(data.active, labels=others))
    features = data.active.features[data.train_rows].double()
    scores = {"without": list[Tensor](), "with": list[Tensor]()}
    for each in (data, changed):
        active = finish_active(config, each)
        for name, networks in (
            ("without", active.refit_excluding(rows)),
            ("with", active.get_active_networks()),
        ):
            assert networks is not None
            scores[name].append(networks(features, None)[0])
    assert torch.equal(*scores["without"])
    assert not torch.equal(*scores["with"])


def test_before_the_last_step_there_are_no_local_models_to_fit_again() -> None:
    config = config_of(data=FEW)
    active = active_of(open_session(config, load_data(config.data, seed=0)))
    assert active.refit_excluding(torch.arange(3)) is None


def test_local_models_are_calibrated_by_labels_that_they_did_not_learn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of(data=FEW, calibration=0.2)
    data = load_data(config.data, seed=0)
    session = open_session(config, data)
    active = active_of(session)
    active.finish_locally()
    networks = active.get_active_networks()
    assert networks is not None
    features = data.active.features[data.train_rows].double()
    before = networks(features, None)[0]
    left_out: list[Tensor] = []
    without = SingleViewActive.refit_excluding

    def record(self: SingleViewActive, rows: Tensor) -> Any:
        left_out.append(rows)
        return without(self, rows)

    monkeypatch.setattr(SingleViewActive, "refit_excluding", record)
    monkeypatch.setattr(calibration, "BASELINES", {})  # no network of the run's is trained instead
    found = calibration.calibrate_networks(session, data)
    assert found is not None
    assert len(left_out) == FOLDS
    judged = torch.cat([rows[torch.isin(rows, data.labelled_rows)] for rows in left_out])
    assert sorted(judged.tolist()) == data.labelled_rows.tolist(), "each label is held out once"
    after = networks(features, None)[0]
    odds = [scores[:, 1] - scores[:, 0] for scores in (before, after)]
    torch.testing.assert_close(odds[1], found.slope * odds[0] + found.offset)
    assert odds[1].sigmoid().mean() == pytest.approx(0.2, abs=0.02)

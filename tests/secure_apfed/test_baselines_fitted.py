"""Fitted models as networks: they say what was measured, are rebuilt from a file, and refuse it."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load

from secure_apfed.baselines import BASELINES, COMBINATIONS, BaselineTask, find_baseline
from secure_apfed.baselines.fitted import KINDS, FittedModel
from secure_apfed.baselines.interface import cache_fits
from secure_apfed.config import Config
from secure_apfed.data import load_data
from secure_apfed.errors import ModelError, NoHelpWarning
from secure_apfed.learning.votes import MeasuredHelp, pool_opinions
from secure_apfed.measures.table import normalise_scores
from secure_apfed.methods import student
from secure_apfed.methods.student import Student
from secure_apfed.runs.active_model import load_model
from secure_apfed.runs.folder import RunFolder
from secure_apfed.runs.onnx_file import write_onnx
from secure_apfed.runs.outcome import load_outcome
from secure_apfed.runs.run import run
from tests.secure_apfed.small_runs import interrupt_run
from tests.secure_apfed.test_methods_votes import OPENINGS, config_of, noisy

ALL = [name for name in BASELINES if name != "network"]


def task_of(classes: int, seen: int) -> tuple[BaselineTask, np.ndarray]:
    """Return a task of so many classes, the first with labels; and rows of nobody."""
    rng = np.random.default_rng(0)
    truth = rng.integers(0, seen, 160)
    x = rng.normal(size=(160, 5)) + 2 * np.eye(seen, 5)[truth]
    x[:, 4] = 3.0  # a column that never differs
    return BaselineTask.from_arrays(x[:120], np.arange(30), truth[:30], classes=classes), x[120:]


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize(("classes", "seen"), [(2, 2), (4, 4), (7, 3)])
@pytest.mark.parametrize("name", [*ALL, *COMBINATIONS])
def test_a_kept_model_says_what_its_baseline_says(name: str, classes: int, seen: int) -> None:
    task, others = task_of(classes, seen)
    with cache_fits():
        fitted = find_baseline(name).fit(task)
    assert fitted.make_network is not None
    kept = fitted.make_network()
    assert isinstance(kept, FittedModel)
    said = kept(torch.from_numpy(others)).softmax(1).numpy()
    np.testing.assert_allclose(said, normalise_scores(fitted.compute_scores(others)), atol=2e-6)
    again = FittedModel.from_tensors(dict(reversed(kept.state_dict().items())))
    assert again is not None
    assert (again(torch.from_numpy(others)).softmax(1).numpy() == said).all()
    again.require_shape(5, classes)
    with pytest.raises(ModelError, match="expected 6 and"):
        again.require_shape(6, classes)


def test_every_kind_is_some_baseline_s_and_damaged_ones_are_refused() -> None:
    task, others = task_of(4, 4)
    kinds = set[str]()
    for name in [*ALL, "mean"]:
        kept = find_baseline(name).fit(task).make_network
        assert kept is not None
        state = kept().state_dict()
        kinds |= {key.partition(".")[0] for key in state}
        for key, tensor in state.items():
            for damaged in (tensor[..., :0], tensor.reshape(-1)[:1], tensor * np.nan, tensor + 1e9):
                try:
                    found = FittedModel.from_tensors({**state, key: damaged})
                    assert found is not None
                    found.require_shape(5, 4)
                    found(torch.from_numpy(others))  # other numbers are another model
                except ModelError:
                    continue
                # One tree of a forest is a forest.
                assert damaged.shape == tensor.shape or key.endswith("trees.roots"), (name, key)
        with pytest.raises(ModelError):
            FittedModel.from_tensors(dict(list(state.items())[1:]))
    assert kinds == set(KINDS)
    assert FittedModel.from_tensors({"0.weight": torch.zeros(1)}) is None


def test_help_is_always_used_where_it_is_asked_for(tmp_path: Path) -> None:
    method = {"name": "votes_randomised", "epsilon": 0.01, "help": "always"}
    data = {"dataset": "breast_cancer", "active_view": 2, "labelled": 30}
    result = run(config_of(method=method, data=data), tmp_path / "run")
    assert result.help is not None
    assert result.help.is_always_used
    assert result.help.is_in_use
    assert "help is always used" in str(result.help)
    assert not replace(result.help, is_always_used=False).is_in_use
    assert load_outcome(RunFolder(tmp_path / "run")).help == result.help


TAUGHT: Mapping[str, Mapping[str, Any]] = {
    "trees": {},
    "ridge": {},
    "network": {
        "model": {"hidden": [8], "representation": 4},
        "train": {"epochs": 2, "batch_size": 64, "learning_rate": 0.05, "device": "cpu"},
    },
}


def unsure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let labelled rows doubt that votes are help, whatever these are."""

    def pool_with_doubt(*of: Any, **more: Any) -> tuple[np.ndarray, MeasuredHelp]:
        likely_UK, found = pool_opinions(*of, **more)
        return likely_UK, replace(found, gain=-1.0)

    monkeypatch.setattr(student, "pool_opinions", pool_with_doubt)


def averaging(**more: Any) -> Config:
    method = {"name": "votes", "prior": "ridge", "help": "averaged"} | more.pop("method", {})
    data = {"dataset": "breast_cancer", "active_view": 2, "labelled": 30}
    return config_of(method=method, data=data, **more)


@pytest.mark.parametrize("name", TAUGHT)
def test_a_doubtful_student_is_averaged_with_three_local_models(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of each; its file and what the run measured say the same, whatever learnt votes."""
    unsure(monkeypatch)
    if name == "ridge":
        monkeypatch.setattr(student, "_MIN_LEAF_ROWS", {})
    result = run(averaging(**TAUGHT[name]), tmp_path / "run")
    run(averaging(method={"help": "always"}, **TAUGHT[name]), tmp_path / "always")
    found = result.help
    assert found is not None
    assert found.is_averaged
    assert found.is_in_use
    assert "help is averaged with the best three local models: of" in str(found)
    assert load_outcome(RunFolder(tmp_path / "run")).help == found

    data = result.recording.data
    rows = data.active.features[data.test_rows]
    labels = data.active.labels
    assert labels is not None
    labelled = torch.isin(data.train_rows, data.labelled_rows).nonzero().flatten()
    task = BaselineTask.from_arrays(
        data.active.features[data.train_rows], labelled, labels[data.labelled_rows], classes=2
    )
    local_BK = find_baseline("mean_of_three").fit(task).compute_scores(rows.double().numpy())
    taught = load_model(tmp_path / "always")
    taught_BK = taught.predict(rows).numpy()
    if name == "ridge":
        with torch.no_grad():
            taught_BK = normalise_scores(taught.network(rows).double().numpy())
    model = load_model(tmp_path / "run")
    said_BK = model.predict(rows)
    np.testing.assert_allclose(said_BK.numpy(), (taught_BK + local_BK) / 2, atol=2e-6)
    right = model.decide_classes(said_BK) == labels[data.test_rows]
    assert right.double().mean().item() == pytest.approx(result.accuracy["votes"])


@pytest.mark.slow
@pytest.mark.parametrize("name", TAUGHT)
def test_an_average_is_exported(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unsure(monkeypatch)
    if name == "ridge":
        monkeypatch.setattr(student, "_MIN_LEAF_ROWS", {})
    run(averaging(**TAUGHT[name]), tmp_path / "run")
    write_onnx(load_model(tmp_path / "run"), tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx").stat().st_size > 1000


@pytest.mark.parametrize("name", ["trees", "ridge"])
def test_an_average_is_calibrated(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By averages of students and local models that have not seen the labels that judge."""
    unsure(monkeypatch)
    if name == "ridge":
        monkeypatch.setattr(student, "_MIN_LEAF_ROWS", {})
    kept = Student.refit_excluding
    without: list[Any] = []

    def refit_and_note(own: Student, rows: torch.Tensor) -> Any:
        without.append(kept(own, rows))
        return without[-1]

    monkeypatch.setattr(Student, "refit_excluding", refit_and_note)
    result = run(averaging(calibration=0.2, **TAUGHT[name]), tmp_path / "run")
    assert len(without) == 3
    assert all(torch.nn.Linear in map(type, one.head.modules()) for one in without)
    assert all("average." in " ".join(one.state_dict()) for one in without)
    tables = result.recording.data
    rows = tables.active.features[tables.train_rows]
    probabilities_NK = load_model(tmp_path / "run").predict(rows)
    assert probabilities_NK[:, 1].mean().item() == pytest.approx(0.2, abs=0.05)


def test_an_average_resumes_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unsure(monkeypatch)
    config = averaging(checkpoint_every=1, **TAUGHT["network"])
    run(config, tmp_path / "whole")
    interrupt_run(config, tmp_path / "parts", at_step=5)
    run(config, tmp_path / "parts", resume=True)
    whole, parts = (
        load(RunFolder(tmp_path / one).model.read_bytes()) for one in ("whole", "parts")
    )
    assert whole.keys() == parts.keys()
    assert not [name for name, tensor in whole.items() if not torch.equal(tensor, parts[name])]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("method", OPENINGS)
def test_help_that_is_surely_one_is_not_averaged(method: str, tmp_path: Path) -> None:
    sure = MeasuredHelp(
        row_count=50, gain=0.2, standard_error=0.1, vote_accuracy=0.7, local_accuracy=0.5
    )
    assert sure.is_validated
    assert not replace(sure, gain=0.1).is_validated
    assert not replace(sure, learnt_gain=-0.1).is_validated
    result = run(averaging(method=noisy(method)), tmp_path / "run")
    assert result.help is not None
    assert result.help.is_averaged is not result.help.is_validated


def test_where_every_row_has_a_label_votes_tell_nothing(tmp_path: Path) -> None:
    config = config_of(data={"dataset": "breast_cancer", "active_view": 2})
    with pytest.warns(NoHelpWarning, match="help is not used: no labelled row can judge it, or ev"):
        result = run(config, tmp_path / "run")
    assert result.help is not None
    assert not result.help.is_in_use
    assert isinstance(load_model(tmp_path / "run").network[0], FittedModel)  # type: ignore[index]


def test_the_model_that_stays_is_the_one_that_is_measured_beside_it(tmp_path: Path) -> None:
    """Though its party's own seed is a secret, and other."""
    method = {"name": "votes", "prior": "mixmatch"}
    config = config_of(method=method, data={"dataset": "wine"}, party_seeds="secret")
    with pytest.warns(NoHelpWarning):
        result = run(config, tmp_path / "run")
    data = load_data(config.data, seed=config.seed)
    features = data.active.features
    labels = data.active.labels
    train = data.train_rows
    test = data.test_rows
    assert labels is not None
    task = BaselineTask.from_arrays(
        features[train], np.arange(len(train)), labels[train], classes=3, seed=config.seed
    )
    scores_BK = BASELINES["mixmatch"].fit(task).compute_scores(features[test].double().numpy())
    said_BK = load_model(tmp_path / "run").predict(features[test]).double().numpy()
    np.testing.assert_allclose(said_BK, scores_BK, atol=1e-4)
    right = scores_BK.argmax(1) == labels[test].numpy()
    assert result.accuracy["votes"] == pytest.approx(right.mean())


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("used", [True, False])
def test_where_votes_are_no_help_the_best_local_model_is_kept(
    used: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file, its ONNX file and what the run measured say the same, whoever taught it."""
    found = MeasuredHelp(30, 1.0 if used else -1.0, 0.1, 0.9, 0.5)

    def pool_with_verdict(*of: object, **more: object) -> object:
        return pool_opinions(*of, **more)[0], found  # type: ignore[arg-type]  # as it was asked

    monkeypatch.setattr(student, "pool_opinions", pool_with_verdict)
    data = {"dataset": "breast_cancer", "active_view": 2, "labelled": 30}
    result = run(config_of(method={"name": "votes", "help": "judged"}, data=data), tmp_path / "run")
    assert result.help is not None
    assert replace(result.help, learnt_gain=0.0) == found
    assert (result.help.learnt_gain > 0) is used
    assert load_outcome(RunFolder(tmp_path / "run")).help == result.help
    model = load_model(tmp_path / "run")
    tables = result.recording.data
    rows = tables.active.features[tables.test_rows]
    assert tables.active.labels is not None
    told = model.decide_classes(model.predict(rows)) == tables.active.labels[tables.test_rows]
    assert told.double().mean().item() == pytest.approx(result.accuracy["votes"])
    if not used:
        assert isinstance(model.network[0], FittedModel)  # type: ignore[index]  # encoder and head
    write_onnx(model, tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx").stat().st_size > 1000

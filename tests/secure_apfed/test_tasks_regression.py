"""Regression: targets standardised and told in their unit, from data to `predict`, and refusals."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load
from sklearn.metrics import r2_score

from apfed_attacks.run import full_suite, mount
from apfed_experiments.report import write_report
from apfed_experiments.run_list import list_runs
from apfed_experiments.solo import REGRESSORS, compare_numbers, keep_solo
from secure_apfed.config import Config
from secure_apfed.config.file import dump_settings, load_config_text
from secure_apfed.data import TargetScale, load_data, pack_own, read_own
from secure_apfed.data.catalogue import labels_are_numbers
from secure_apfed.errors import ConfigError, DataError, ModelError
from secure_apfed.estimator import VerticalClassifier
from secure_apfed.exchange import Kind
from secure_apfed.measures import MEASURES, names_of
from secure_apfed.methods import METHODS
from secure_apfed.methods.student import RANGES, Bins
from secure_apfed.runs.folder import RunFolder, read_scored
from secure_apfed.runs.outcome import read_outcome
from secure_apfed.runs.run import run
from secure_apfed.runs.solo import load_model, predict_file
from secure_apfed.settings.data import DataSettings, PartySettings
from secure_apfed.simulation import why_not
from secure_apfed.tasks import TASKS, Regression
from tests.secure_apfed.small_runs import Said, interrupted, small_config

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")

NO_GUARD = {"mechanism": "none", "noise": "reproducible_insecure"}
TABLES: dict[str, Any] = {
    "dataset": "tables", "active": "a", "parties": {"a": {"file": "a.csv"}, "b": {"file": "b.csv"}},
}  # fmt: skip
TAKING = [name for name, method in METHODS.items() if "regression" in method.settings.tasks]


def config_of(method: Said = "apfed_r", **settings: Any) -> Config:
    defaults: dict[str, Any] = {
        "task": "regression", "guard": NO_GUARD, "data": {"dataset": "diabetes", "labelled": 80},
        "train": {"epochs": 30, "batch_size": 64, "learning_rate": 0.02, "evaluate_every": 30,
                  "device": "cpu"},
    }  # fmt: skip
    return small_config(method, **{**defaults, **settings})


def test_targets_are_standardised_by_the_labelled_training_rows() -> None:
    data = load_data(DataSettings(dataset="diabetes", labelled=60), seed=0)
    assert data.targets is not None
    labels = data.active.labels
    assert labels is not None
    known = labels[data.labelled_rows].double()
    assert len(known) == 60
    assert float(known.mean()) == pytest.approx(0, abs=1e-6)
    assert float(known.std(correction=0)) == pytest.approx(1, abs=1e-6)
    again = data.targets.decode(labels[data.test_rows])
    assert again.numpy() == pytest.approx(again.round().numpy(), abs=1e-3)  # whole numbers


def test_own_tables_have_a_column_of_numbers(tmp_path: Path) -> None:
    settings = own_tables(tmp_path)
    data = load_data(settings, seed=1)
    assert data.targets is not None
    assert len(data.labelled_rows) == 40
    assert len(data.train_rows) > 40
    with pytest.raises(DataError, match=r"'price' holds numbers.*row 3 .*'dear'"):
        load_data(own_tables(tmp_path, stray="dear"), seed=1)
    with pytest.raises(DataError, match=r"row 2 .*100 standard deviations from the mean"):
        TargetScale(mean=0, scale=1).encode(np.array([0.0, np.nan, 100.0]), party="active")
    with pytest.raises(DataError, match="are all 7, or"):
        load_data(own_tables(tmp_path, alike=True), seed=1)


def test_labels_of_own_tables_are_numbers_exactly_under_regression() -> None:
    config = config_of(data=TABLES)
    assert labels_are_numbers(config.data)
    assert load_config_text(dump_settings(config)) == config
    assert not labels_are_numbers(config_of(data=TABLES, task="classification").data)


def own_tables(folder: Path, *, stray: str = "", alike: bool = False) -> DataSettings:
    rng = np.random.default_rng(0)
    ids = [f"p{at}" for at in range(120)]
    x, w = rng.normal(size=(120, 2)), rng.normal(size=(120, 2))
    price = 1000 + 50 * (x[:, 0] + w[:, 0]) + rng.normal(size=120)
    texts = ["7" if alike else f"{one:.3f}" for one in price]
    texts[3] = stray or texts[3]
    texts[100:] = [""] * 20
    pd.DataFrame({"id": ids, "a": x[:, 0], "b": x[:, 1], "price": texts}).to_csv(
        folder / "active.csv", index=False
    )
    for at in range(2):
        pd.DataFrame({"id": ids, f"w{at}": w[:, at]}).to_csv(folder / f"p{at}.csv", index=False)
    files = {"active": "active.csv", "one": "p0.csv", "two": "p1.csv"}
    return DataSettings(
        dataset="tables", folder=folder, classes="numbers", label_column="price",
        labelled=None if alike or stray else 40,
        parties={name: PartySettings(file=Path(file)) for name, file in files.items()},
    )  # fmt: skip


def test_prepared_rows_keep_their_scale(tmp_path: Path) -> None:
    data = load_data(DataSettings(dataset="diabetes"), seed=0)
    own = data.own("active")
    assert own is not None
    (tmp_path / "rows").write_bytes(pack_own(own))
    again = read_own(tmp_path / "rows", "active")
    assert again.targets == own.targets != None  # noqa: E711
    assert again.table.labels is not None
    assert own.table.labels is not None
    assert torch.equal(again.table.labels, own.table.labels)


VOTING = [name for name in TAKING if METHODS[name].settings.opens_votes]


def test_ranges_hold_as_many_targets_and_stand_for_their_mean() -> None:
    targets = np.random.default_rng(0).normal(size=800)
    bins = Bins.of(targets)
    places = bins.classes_of(targets)
    assert np.bincount(places, minlength=RANGES).tolist() == [100] * RANGES
    assert bins.centres[3] == pytest.approx(targets[places == 3].mean())
    assert (np.diff(bins.centres) > 0).all()
    told = bins.expected(np.eye(RANGES)[places])
    assert np.corrcoef(told[:, 0], targets)[0, 1] > 0.95
    assert bins.expected(np.zeros((2, RANGES))).tolist() == [[0.0], [0.0]]
    half = bins.expected(np.array([[2.0, 2.0, *[0.0] * 6]]))
    assert half.item() == pytest.approx(bins.centres[:2].mean())


def test_targets_that_are_alike_share_a_range() -> None:
    bins = Bins.of(np.array([1.0] * 9 + [4.0]))
    assert len(bins.centres) == RANGES
    assert np.isfinite(bins.centres).all()
    first, last = bins.classes_of(np.array([1.0, 4.0]))
    assert bins.centres[[first, last]].tolist() == [1.0, 4.0]


@pytest.mark.parametrize("method", VOTING)
def test_passives_are_shown_ranges_and_the_student_learns_numbers(method: str) -> None:
    model = {"network": "random_features"}
    votes = {"name": method, "epsilon": 40.0, "prior": "labeller", "labeller": "ridge"}
    config = config_of(votes, model=model, train={"epochs": 1})
    result = run(config, None)
    assert result.scores[method] > 0.15
    assert max(one["epsilon"] for one in result.contributions.values()) <= 40.0001
    kept = [one for part in result.recording.transcript.kept.values() for one in part]
    (shown, *_) = [one.payload for one in kept if one.kind is Kind.LABELS]
    start = 4 + int.from_bytes(shown[:4], "big")
    labels = load(shown[start:])["labels"]
    assert labels.dtype == torch.int64
    assert set(labels.tolist()) == set(range(RANGES))


def test_a_student_that_descends_learns_numbers() -> None:
    result = run(config_of({"name": "votes", "prior": "labeller"}), None)
    assert result.scores["votes"] > 0.1


@pytest.mark.parametrize("method", TAKING)
def test_a_run_is_told_in_the_unit(tmp_path: Path, method: str) -> None:
    config = config_of(method)
    result = run(config, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    outcome, data = read_outcome(folder), load_data(config.data, seed=config.seed)
    assert result.measure == "r2"
    assert set(outcome.measures[method]) == set(names_of("regression"))
    kept = read_scored(folder, method, threshold=None)
    assert kept is not None
    assert data.targets is not None
    assert data.active.labels is not None
    truth = data.targets.decode(data.active.labels[data.test_rows]).numpy()
    assert kept.truth == pytest.approx(truth)
    model = load_model(tmp_path / "run")
    said = model.predict(data.active.features[data.test_rows]).numpy()
    assert said == pytest.approx(kept.scores, rel=1e-4)
    assert result.scores[method] == pytest.approx(r2_score(truth, said), abs=1e-4)
    assert json.loads(folder.card.read_text())["targets"] == data.targets.model_dump()


def test_one_party_alone_learns_a_line() -> None:
    """y is 300 + 40 x at the active; no help is needed to be nearly right."""
    data = load_data(DataSettings(dataset="diabetes"), seed=0)
    scale = TargetScale(mean=300.0, scale=40.0)
    line = data.active.features[:, 2]
    table = data.active.__class__("active", data.active.ids, data.active.features, line,
                                  data.active.encoding, data.active.views)  # fmt: skip
    other = replace(data, table=table, classes=(), targets=scale)
    found = {}
    for loss in ("squared", "absolute", "huber"):
        train = {"epochs": 80, "batch_size": 64, "learning_rate": 0.05, "device": "cpu",
                 "evaluate_every": 80, "loss": loss}  # fmt: skip
        model = {"hidden": [16], "representation": 8, "dropout": 0.0}
        found[loss] = run(config_of("single_view", train=train, model=model), None, data=other)
    assert all(one.scores["single_view"] > 0.9 for one in found.values())
    assert len({one.scores["single_view"] for one in found.values()}) == 3


def test_losses_are_of_labelled_rows() -> None:
    targets = TargetScale(mean=0.0, scale=1.0)
    outputs = torch.tensor([[1.0], [5.0], [0.5]])
    labels = torch.tensor([0.0, -100.0, 0.0])
    expected = {"squared": 0.625, "absolute": 0.75, "huber": (0.5 + 0.125) / 2}
    for loss, value in expected.items():
        task = TASKS["regression"].of(targets, loss=loss)
        assert float(task.loss(outputs, labels, outputs)) == pytest.approx(value)
        assert float(task.loss(outputs[1:2], labels[1:2], outputs[1:2])) == 0


def test_a_broken_off_run_goes_on_alike(tmp_path: Path) -> None:
    config = config_of(
        train={"epochs": 4, "batch_size": 64, "learning_rate": 0.02, "device": "cpu"}
    )
    whole = run(config, tmp_path / "whole")
    interrupted(config, tmp_path / "part", at_step=14)
    resumed = run(config, tmp_path / "part", resume=True)
    assert resumed.scores == whole.scores


def test_predict_and_onnx_tell_numbers_in_the_unit(tmp_path: Path) -> None:
    settings = own_tables(tmp_path)
    config = config_of("single_view", data=settings.model_dump(mode="json", exclude_defaults=True))
    run(config, tmp_path / "run")
    told = predict_file(tmp_path / "run", tmp_path / "active.csv")
    assert 900 < float(told.outputs.mean()) < 1100
    told.write(tmp_path / "told.csv")
    frame = pd.read_csv(tmp_path / "told.csv")
    assert list(frame) == ["id", "prediction"]
    assert frame["prediction"].to_numpy() == pytest.approx(told.outputs.numpy())
    assert told.compared.stability is not None
    assert told.as_json()["predictions"][0]["id"] == "p0"
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from secure_apfed.contrib.onnx_file import write_onnx

    write_onnx(load_model(tmp_path / "run"), tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    frame = pd.read_csv(tmp_path / "active.csv")
    columns = {name: frame[[name]].to_numpy() for name in ("a", "b")}
    (said,) = session.run(["output_prediction"], columns)
    assert said == pytest.approx(told.outputs.numpy(), rel=1e-5)


def test_a_card_that_fits_no_task_is_refused(tmp_path: Path) -> None:
    run(config_of("single_view"), tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    card = json.loads(folder.card.read_text())
    folder.result.unlink()  # with it goes the list of digests
    for other in ({"task": "guessing"}, {"targets": None}, {"task": "classification"}):
        folder.card.write_text(json.dumps(card | other))
        with pytest.raises(ModelError, match=r"no model of this version|labels are"):
            load_model_of(folder)


def load_model_of(folder: RunFolder) -> None:
    from secure_apfed.runs import solo

    parts = solo._Parts.model_validate_json(folder.card.read_text())
    solo._task(parts, folder.card)


def test_attacks_on_labels_are_left_out_with_a_reason() -> None:
    recording = run(
        config_of(train={"epochs": 2, "batch_size": 64, "device": "cpu"}), None
    ).recording
    results = mount(recording, full_suite(["model_completion", "membership", "inverse_network"]),
                    seed=0)  # fmt: skip
    reasons = {one.target: one.reason for one in results}
    assert "guess classes" in str(reasons["labels"])
    assert "probabilities of classes" in str(reasons["membership"])
    assert any(one.applicable for one in results if one.target == "features")


def test_report_and_list_tell_measures_of_regression(tmp_path: Path) -> None:
    run(config_of(), tmp_path / "runs/one")
    keep_solo(config_of(), tmp_path / "runs/one/solo.json")
    page = write_report(tmp_path / "runs/one").read_text()
    for name in names_of("regression"):
        assert f"<tr><td>{MEASURES[name].title}</td>" in page
    assert "<h2>APFed-R accuracy</h2>" not in page
    (row,) = list_runs(tmp_path / "runs")
    assert row.accuracy is None
    assert row.reached.startswith(f"{row.measure.title} ")
    assert row.gained == f"{row.gain:+.3f}"


def test_baselines_are_chosen_by_their_own_labels(tmp_path: Path) -> None:
    record = keep_solo(config_of(measure="mae"), tmp_path / "solo.json")
    assert {one.name for one in record.baselines} == set(REGRESSORS)
    by_name = {one.name: one for one in record.baselines}
    assert record.best.validation == min(one.validation or 1e9 for one in record.baselines)
    assert by_name["ridge"].test < by_name["mean"].test
    assert "in MAE against" in record.sentence(40.0)
    with pytest.raises(DataError, match="3 labelled rows are too few"):
        compare_numbers(np.ones((3, 2)), np.ones(3), np.ones((1, 2)), np.ones(1),
                        measure=MEASURES["r2"])  # fmt: skip


def test_test_labels_choose_no_baseline() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3))
    y = x @ [1.0, 2.0, 0.0]
    wrong = [compare_numbers(x, y, x, test, measure=MEASURES["r2"]) for test in (y, -y)]
    assert [one.validation for one in wrong[0]] == [one.validation for one in wrong[1]]
    assert wrong[0][0].test > 0.9 > 0 > wrong[1][0].test


def test_other_methods_refuse_by_name() -> None:
    for method in (name for name in METHODS if name not in TAKING):
        with pytest.raises(ValidationError, match=r"task: method .*use .*apfed_r"):
            config_of(method)


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"task": "classification"}, "numbers and no classes; say task: regression"),
    ({"task": "regresion"}, "did you mean 'regression'"),
    ({"data": {"dataset": "wine"}}, "are classes; take a set of numbers"),
    ({"measure": "auc"}, "classification and anomaly, and task is regression; use r2"),
    ({"labels": {"mechanism": "randomised_response", "epsilon": 1.0}}, "answers with classes"),
    ({"threshold": 0.5}, "threshold: it decides between two classes"),
    ({"train": {"class_weights": "balanced"}}, "class_weights: they are of classes"),
    ({"train": {"spread_labels": True}}, "classes are spread"),
    ({"dp_sgd": {"noise_multiplier": 1.0, "clip": 1.0}}, "dp_sgd: the model card of this task"),
    ({"data": {"dataset": "diabetes", "rows_per_class": 5}}, "are numbers and no classes"),
    ({"data": {"dataset": "diabetes", "labels_at": ["passive-1"]}}, "are the active's alone"),
    ({"data": {"dataset": "diabetes", "classes": "numbers"}}, "belong to dataset: tables"),
    ({"data": {**TABLES, "classes": ["a", "b"]}}, "leave data.classes out"),
    ({"data": {**TABLES, "numeric_labels": True}}, "Extra inputs are not permitted"),
    ({"data": {**TABLES, "partition": "horizontal"}}, "are the active's alone"),
)  # fmt: skip


def test_what_does_not_fit_is_refused() -> None:
    for settings, said in REFUSED:
        with pytest.raises(ValidationError, match=said):
            config_of(**settings)


def test_what_is_no_regression_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"train\.loss: huber is of task: regression"):
        small_config(train={"loss": "huber"})
    assert "task regression" in why_not(config_of())
    with pytest.raises(ConfigError, match="'regression' is no classification"):
        VerticalClassifier(settings={"task": "regression"}).fit([[0.0], [1.0]], [0, 1])
    with pytest.raises(DataError, match="these labels are classes"):
        Regression.of(None)

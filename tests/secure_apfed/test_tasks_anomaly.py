"""Anomaly detection: training on normal rows alone, scores, measures, `predict`, and refusals."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from pydantic import ValidationError
from sklearn.metrics import roc_auc_score

from apfed_attacks.run import full_suite, mount
from apfed_experiments.report import write_report
from apfed_experiments.solo import DETECTORS, compare_detectors, keep_solo
from apfed_experiments.tasks import CASES, compare_tasks
from secure_apfed.config import Config
from secure_apfed.data import TargetScale, load_data
from secure_apfed.errors import DataError
from secure_apfed.intervals import estimates
from secure_apfed.measures import MEASURES, Scored, measure_all, names_of
from secure_apfed.runs.folder import RunFolder, read_scored
from secure_apfed.runs.outcome import read_outcome
from secure_apfed.runs.run import run
from secure_apfed.runs.solo import load_model, predict_file
from secure_apfed.settings.data import DataSettings, PartySettings
from secure_apfed.tasks import TASKS, Anomaly
from tests.secure_apfed.small_runs import interrupted, small_config

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")

NO_GUARD = {"mechanism": "none", "noise": "reproducible_insecure"}
DIGITS = {"dataset": "digits", "views": 4, "anomaly": "6", "limit": 300}


def config_of(method: str = "apfed_r", **settings: Any) -> Config:
    defaults: dict[str, Any] = {
        "task": "anomaly", "guard": NO_GUARD, "data": DIGITS,
        "model": {"hidden": [16], "representation": 6, "dropout": 0.0},
        "train": {"epochs": 3, "batch_size": 64, "learning_rate": 0.05, "device": "cpu"},
    }  # fmt: skip
    return small_config(method, **{**defaults, **settings})


def test_the_class_left_out_is_in_no_training_row_and_in_test_rows() -> None:
    whole = load_data(DataSettings(dataset="digits", views=4), seed=3)
    data = load_data(DataSettings(dataset="digits", views=4, anomaly="6"), seed=3)
    labels = data.active.labels
    assert labels is not None
    assert data.classes == ("normal", "anomaly")
    assert int(labels[data.train_rows].sum()) == 0
    anomalies = int(labels[data.test_rows].sum())
    assert anomalies == 45  # a quarter of the 181 sixes
    assert len(data.active.ids) == len(whole.active.ids) - (181 - anomalies)


def own_tables(folder: Path, *, anomaly: str = "fraud") -> DataSettings:
    rng = np.random.default_rng(0)
    ids = [f"p{at}" for at in range(200)]
    x, w = rng.normal(size=(200, 2)), rng.normal(size=(200, 2))
    labels = np.array(["fair"] * 200, dtype=object)
    labels[:30], labels[150:] = "fraud", ""
    x[:30] += [2.0, -2.0]
    pd.DataFrame({"id": ids, "a": x[:, 0], "b": x[:, 1], "label": labels}).to_csv(
        folder / "active.csv", index=False
    )
    for at in range(2):
        pd.DataFrame({"id": ids, f"w{at}": w[:, at]}).to_csv(folder / f"p{at}.csv", index=False)
    files = {"active": "active.csv", "one": "p0.csv", "two": "p1.csv"}
    return DataSettings(
        dataset="tables", folder=folder, anomaly=anomaly,
        parties={name: PartySettings(file=Path(file)) for name, file in files.items()},
    )  # fmt: skip


def test_own_tables_train_on_rows_that_are_not_known_to_be_anomalies(tmp_path: Path) -> None:
    data = load_data(own_tables(tmp_path), seed=1)
    labels = data.active.labels
    assert labels is not None
    assert set(labels[data.train_rows].tolist()) == {0, -100}  # the 50 without a label as well
    assert set(labels[data.test_rows].tolist()) == {0, 1}
    with pytest.raises(DataError, match=r"no label is 'thief'.*labels are fair, fraud"):
        load_data(own_tables(tmp_path, anomaly="thief"), seed=1)


def test_the_score_is_the_mean_squared_error_and_reads_no_label() -> None:
    task = Anomaly.of(None)
    features = torch.tensor([[1.0, 2.0], [0.0, 0.0]])
    outputs = torch.tensor([[1.0, 0.0], [1.0, 3.0]])
    assert task.told(outputs, features).tolist() == [2.0, 5.0]
    assert [float(task.loss(outputs, torch.tensor(labels), features))
            for labels in ([0, 0], [1, -100])] == [3.5, 3.5]  # fmt: skip
    assert task.outputs(2, (1, 2, 8)) == 16
    assert task.told(torch.zeros(3, 16), torch.ones(3, 1, 2, 8)).tolist() == [1.0] * 3


def test_measures_of_anomalies_are_those_of_ranks() -> None:
    rng = np.random.default_rng(1)
    truth = (rng.random(200) < 0.2).astype(np.int64)
    scores = rng.normal(size=200) + truth
    scored = Scored(truth=truth, scores=scores)
    found = measure_all(scored)
    assert set(found) == set(names_of("anomaly")) == {"auc", "average_precision", "ks", "gini"}
    assert found["auc"] == pytest.approx(roc_auc_score(truth, scores))
    same = Scored.of_classes(truth, 1 / (1 + np.exp(-scores)))
    assert all(MEASURES[name].of(same) == pytest.approx(one) for name, one in found.items())
    interval = estimates(scored, resamples=20)["auc"]
    assert interval.low < found["auc"] < interval.high
    with pytest.raises(DataError, match="r2 is of regression, and these scores are of anomaly"):
        MEASURES["r2"].of(scored)
    assert measure_all(Scored(truth=truth * 0, scores=scores)) == {}


def test_a_run_is_judged_by_its_ranks_and_tells_scores(tmp_path: Path) -> None:
    config = config_of()
    result = run(config, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    outcome, data = read_outcome(folder), load_data(config.data, seed=config.seed)
    assert result.measure == "auc"
    assert set(outcome.measures["apfed_r"]) == set(names_of("anomaly"))
    kept = read_scored(folder, "apfed_r", threshold=None)
    assert kept is not None
    assert data.active.labels is not None
    assert kept.truth.tolist() == data.active.labels[data.test_rows].tolist()
    model = load_model(tmp_path / "run")
    told = model.predict(data.active.features[data.test_rows]).numpy()
    assert told == pytest.approx(kept.scores, rel=1e-4)
    assert result.scores["apfed_r"] == pytest.approx(roc_auc_score(kept.truth, told), abs=1e-6)
    keep_solo(config, tmp_path / "run/solo.json")
    page = write_report(tmp_path / "run").read_text()
    assert "APFed-R AUC" in page
    assert "by the test rows, in its favour" in page
    assert "<h2>APFed-R accuracy</h2>" not in page


def test_a_broken_off_run_goes_on_alike(tmp_path: Path) -> None:
    config = config_of()
    whole = run(config, tmp_path / "whole")
    interrupted(config, tmp_path / "part", at_step=7)
    assert run(config, tmp_path / "part", resume=True).scores == whole.scores


def test_strangers_are_told_in_own_tables(tmp_path: Path) -> None:
    settings = own_tables(tmp_path).model_dump(mode="json", exclude_defaults=True)
    train = {"epochs": 60, "batch_size": 32, "learning_rate": 0.05, "device": "cpu",
             "evaluate_every": 60}  # fmt: skip
    model = {"hidden": [], "representation": 1, "dropout": 0.0}
    result = run(config_of("single_view", data=settings, train=train, model=model),
                 tmp_path / "run")  # fmt: skip
    assert result.scores["single_view"] > 0.8
    told = predict_file(tmp_path / "run", tmp_path / "active.csv")
    assert [*told.frame().columns] == ["id", "score"]
    assert float(told.outputs[:30].median()) > float(told.outputs[30:].median())
    assert json.loads(RunFolder(tmp_path / "run").card.read_text())["task"] == "anomaly"
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from secure_apfed.contrib.onnx_file import write_onnx

    write_onnx(load_model(tmp_path / "run"), tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    frame = pd.read_csv(tmp_path / "active.csv")
    (said,) = session.run(None, {name: frame[[name]].to_numpy() for name in ("a", "b")})
    assert said == pytest.approx(told.outputs.numpy(), rel=1e-4)


def test_attacks_on_labels_are_left_out_with_a_reason() -> None:
    recording = run(config_of(), None).recording
    suite = full_suite(["model_completion", "membership", "inverse_network"])
    results = mount(recording, suite, seed=0)
    reasons = {one.target: one.reason for one in results}
    assert "reads no label" in str(reasons["labels"])
    assert any(one.applicable for one in results if one.target == "features")


def test_detectors_see_training_rows_alone() -> None:
    rng = np.random.default_rng(0)
    train, near, far = rng.normal(size=(80, 3)), rng.normal(size=(40, 3)), rng.normal(size=(40, 3))
    test = np.concatenate([near, far + 6])
    truth = np.repeat([0, 1], 40)
    found = compare_detectors(train, test, truth, measure=MEASURES["auc"])
    assert {one.name for one in found} == set(DETECTORS)
    assert all(one.test > 0.99 for one in found)
    other = compare_detectors(train, test, 1 - truth, measure=MEASURES["auc"])
    assert [1 - one.test for one in other] == pytest.approx([one.test for one in found])
    with pytest.raises(DataError, match="give 4 training rows or more"):
        compare_detectors(train[:3], test, truth, measure=MEASURES["auc"])


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"data": {"dataset": "digits", "views": 4}}, "data.anomaly names the class"),
    ({"task": "classification"}, "give both"),
    ({"data": {**DIGITS, "anomaly": "ten"}}, "digits has the classes 0, 1"),
    ({"data": {**DIGITS, "labelled": 40}}, "no label is learnt from; leave labelled out"),
    ({"data": {**DIGITS, "labels_at": ["passive-1"]}}, "the active alone knows it"),
    ({"data": {"dataset": "diabetes", "anomaly": "1"}}, "take another set"),
    ({"measure": "accuracy"}, "accuracy is a measure of classification, and task is anomaly"),
    ({"train": {"class_weights": "balanced"}}, "class_weights: they are of classes"),
    ({"train": {"loss": "huber"}}, "huber is of task: regression"),
    ({"method": "tvfl"}, "method tvfl learns classification, not anomaly; use apfed"),
)  # fmt: skip


def test_what_does_not_fit_is_refused() -> None:
    for settings, said in REFUSED:
        with pytest.raises(ValidationError, match=said):
            config_of(**settings)
    with pytest.raises(DataError, match="labels are numbers"):
        TASKS["anomaly"].of(TargetScale(mean=0, scale=1))


def test_the_table_of_tasks_compares_by_seed(tmp_path: Path) -> None:
    diabetes = next(one for one in CASES if one.key == "diabetes-60")
    (table,) = compare_tasks(tmp_path, seeds=[0], cases=[diabetes])
    models = [row["model"] for row in table.rows]
    assert models[-3:] == ["SingleVL", "APFed-R, masked sum", "Votes, masked sum"]
    best = table.rows[models.index("best alone, by its own labels")]
    votes = table.rows[-1]
    assert votes["gain"].mean == pytest.approx(votes["value"].mean - best["value"].mean)
    assert all(len(cells) == len(table.header) for cells in table.cells)
    page = (tmp_path / "tasks.md").read_text()
    assert page.startswith(f"{table.title}\n\n| {' | '.join(table.header)} |")
    assert f"| {' | '.join(table.cells[-1])} |" in page

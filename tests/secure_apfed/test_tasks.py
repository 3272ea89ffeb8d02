"""Regression and rare classes, from data to `predict`: what is told, measured,
refused; and `predict` of tables larger than memory, which says block by block the same as at once.
"""

import json
import math
import shutil
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

from apfed_attacks.run import run_attacks
from apfed_attacks.table import full_suite
from apfed_experiments.baselines import (
    TITLE_BY_REGRESSOR,
    compare_regressions,
    load_or_measure_baselines,
)
from apfed_experiments.report import write_report
from secure_apfed.cli import execute
from secure_apfed.config import Config
from secure_apfed.config.file import dump_settings, load_config_text
from secure_apfed.data import TargetScale, load_blocks, load_data, load_own, pack_own
from secure_apfed.data.catalogue import labels_are_numbers
from secure_apfed.data.encoding import ColumnEncoding
from secure_apfed.errors import ConfigError, DataError, FewRowsWarning, ModelError
from secure_apfed.exchange import Kind
from secure_apfed.interfaces.estimator import VerticalClassifier
from secure_apfed.measures.table import MEASURES, list_measure_names
from secure_apfed.measures.tasks import TASKS, Regression
from secure_apfed.methods import METHODS
from secure_apfed.methods.student import RANGES, TargetRanges
from secure_apfed.runs import active_model
from secure_apfed.runs.active_model import load_model, predict_file, predict_into, row_writer
from secure_apfed.runs.folder import RunFolder, load_scores
from secure_apfed.runs.outcome import load_outcome
from secure_apfed.runs.run import run
from secure_apfed.runs.simulation import describe_obstacles
from secure_apfed.settings.data import DataSettings, PartySettings
from tests.memory import trace_memory
from tests.secure_apfed.small_runs import (
    Said,
    interrupt_run,
    read_stderr,
    run_as_json,
    small_config,
)
from tests.secure_apfed.whole_files import load_features

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")

NO_GUARD = {"mechanism": "none", "noise": "reproducible_insecure"}
TABLES: dict[str, Any] = {
    "dataset": "tables",
    "active": "a",
    "parties": {"a": {"file": "a.csv"}, "b": {"file": "b.csv"}},
}
TAKING = [name for name, method in METHODS.items() if "regression" in method.settings.tasks]
VOTING = [name for name in TAKING if METHODS[name].settings.vote_protocol]


def config_of(method: Said = "apfed_r", **settings: Any) -> Config:
    defaults: dict[str, Any] = {
        "task": "regression",
        "guard": NO_GUARD,
        "data": {"dataset": "diabetes", "labelled": 80},
        "train": {
            "epochs": 30,
            "batch_size": 64,
            "learning_rate": 0.02,
            "evaluate_every": 30,
            "device": "cpu",
        },
    }
    return small_config(method, **{**defaults, **settings})


def tables_of(folder: Path, labels: dict[str, Any], x: Any, **settings: Any) -> DataSettings:
    """Files of the active, with these labels, and of two passives."""
    ids = [f"p{at}" for at in range(len(x))]
    w = np.random.default_rng(1).normal(size=x.shape)
    frames = {"active": {"id": ids, "a": x[:, 0], "b": x[:, 1], **labels}}
    frames |= {name: {"id": ids, f"w{at}": w[:, at]} for at, name in enumerate(("one", "two"))}
    for name, columns in frames.items():
        pd.DataFrame(columns).to_csv(folder / f"{name}.csv", index=False)
    parties = {name: PartySettings(file=Path(f"{name}.csv")) for name in frames}
    return DataSettings(dataset="tables", folder=folder, parties=parties, **settings)


def own_tables(folder: Path, *, stray: str = "") -> DataSettings:
    """Prices of 100 rows of 120."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 2))
    price = 1000 + 50 * (x[:, 0] + rng.normal(size=120)) + rng.normal(size=120)
    texts = [f"{one:.3f}" for one in price]
    texts[3] = stray or texts[3]
    texts[100:] = [""] * 20
    labels = {"price": texts}
    return tables_of(folder, labels, x, classes="numbers", label_column="price", labelled=40)


def test_targets_are_standardised_by_the_labelled_training_rows(tmp_path: Path) -> None:
    data = load_data(DataSettings(dataset="diabetes", labelled=60), seed=0)
    labels = data.active.labels
    assert labels is not None
    assert data.targets is not None
    known = labels[data.labelled_rows].double()
    assert len(known) == 60
    assert float(known.mean()) == pytest.approx(0, abs=1e-6)
    assert float(known.std(correction=0)) == pytest.approx(1, abs=1e-6)
    again = data.targets.decode(labels[data.test_rows])
    assert again.numpy() == pytest.approx(again.round().numpy(), abs=1e-3)  # whole numbers
    own = data.select_party("active")
    assert own is not None
    (tmp_path / "rows").write_bytes(pack_own(own))
    prepared = load_own(tmp_path / "rows", "active")
    assert prepared.targets == data.targets
    assert prepared.table.labels is not None
    assert torch.equal(prepared.table.labels, labels)


def test_own_tables_have_a_column_of_numbers(tmp_path: Path) -> None:
    data = load_data(own_tables(tmp_path), seed=1)
    assert data.targets is not None
    assert len(data.labelled_rows) == 40 < len(data.train_rows)
    with pytest.raises(DataError, match=r"'price' holds numbers.*row 3 .*'dear'"):
        load_data(own_tables(tmp_path, stray="dear"), seed=1)
    with pytest.raises(DataError, match=r"row 2 .*100 standard deviations from the mean"):
        TargetScale(mean=0, scale=1).encode(np.array([0.0, np.nan, 100.0]), party="active")
    assert TargetScale.from_targets(np.array([1e-13, 3e-13]), party="p").scale == pytest.approx(
        1e-13
    )
    with pytest.raises(DataError, match="are all 1e-13"):
        TargetScale.from_targets(np.array([1e-13, 1e-13]), party="p")
    config = config_of(data=TABLES)
    assert labels_are_numbers(config.data)
    assert load_config_text(dump_settings(config)) == config
    assert not labels_are_numbers(config_of(data=TABLES, task="classification").data)


@pytest.mark.parametrize(
    ("loss", "value"), [("squared", 0.625), ("absolute", 0.75), ("huber", (0.5 + 0.125) / 2)]
)
def test_losses_are_of_labelled_rows(loss: Any, value: float) -> None:
    targets = TargetScale(mean=0.0, scale=1.0)
    outputs = torch.tensor([[1.0], [5.0], [0.5]])
    labels = torch.tensor([0.0, -100.0, 0.0])
    task = TASKS["regression"].from_targets(targets, loss=loss)
    assert float(task.compute_loss(outputs, labels)) == pytest.approx(value)
    assert float(task.compute_loss(outputs[1:2], labels[1:2])) == 0


def test_ranges_hold_as_many_targets_and_stand_for_their_mean() -> None:
    targets = np.random.default_rng(0).normal(size=800)
    bins = TargetRanges.from_targets(targets)
    places = bins.encode_targets(targets)
    assert np.bincount(places, minlength=RANGES).tolist() == [100] * RANGES
    assert bins.mean_targets[3] == pytest.approx(targets[places == 3].mean())
    assert (np.diff(bins.mean_targets) > 0).all()
    told = bins.compute_mean_targets(np.eye(RANGES)[places])
    assert np.corrcoef(told[:, 0], targets)[0, 1] > 0.95
    assert bins.compute_mean_targets(np.zeros((2, RANGES))).tolist() == [[0.0], [0.0]]
    half = bins.compute_mean_targets(np.array([[2.0, 2.0, *[0.0] * 6]]))
    assert half.item() == pytest.approx(bins.mean_targets[:2].mean())
    alike = TargetRanges.from_targets(np.array([1.0] * 9 + [4.0]))
    assert len(alike.mean_targets) == RANGES
    assert np.isfinite(alike.mean_targets).all()
    assert alike.mean_targets[alike.encode_targets(np.array([1.0, 4.0]))].tolist() == [1.0, 4.0]


@pytest.mark.parametrize("method", VOTING)
def test_passives_are_shown_ranges_and_the_student_learns_numbers(method: str) -> None:
    model = {"network": "random_features"}
    votes = {"name": method, "epsilon": 40.0, "prior": "labeller", "labeller": "ridge"}
    result = run(config_of(votes, model=model, train={"epochs": 1}), None)
    assert result.scores[method] > 0.15
    assert max(one["epsilon"] for one in result.contributions.values()) <= 40.0001
    kept = [one for part in result.recording.transcript.envelopes_by_epoch.values() for one in part]
    (shown, *_) = [one.payload for one in kept if one.kind is Kind.LABELS]
    labels = load(shown[4 + int.from_bytes(shown[:4], "big") :])["labels"]
    assert labels.dtype == torch.int64
    assert set(labels.tolist()) == set(range(RANGES))


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("method", TAKING)
def test_a_run_is_told_in_the_unit(tmp_path: Path, method: str) -> None:
    config = config_of(method)
    result = run(config, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    outcome = load_outcome(folder)
    data = load_data(config.data, seed=config.seed)
    assert result.measure == "r2"
    assert set(outcome.measures[method]) == set(list_measure_names("regression"))
    kept = load_scores(folder, method, threshold=None)
    assert kept is not None
    assert data.targets is not None
    assert data.active.labels is not None
    truth = data.targets.decode(data.active.labels[data.test_rows]).numpy()
    assert kept.truth == pytest.approx(truth)
    said = load_model(tmp_path / "run").predict(data.active.features[data.test_rows]).numpy()
    # Where all parties predict together, the stored model is the active's own.
    alone = method if METHODS[method].settings.can_predict_locally else f"{method}_alone"
    of_model = load_scores(folder, alone, threshold=None)
    assert of_model is not None
    assert said == pytest.approx(of_model.scores, rel=1e-4)
    assert result.scores[alone] == pytest.approx(r2_score(truth, said), abs=1e-4)
    report = write_report(tmp_path / "run").read_text()
    assert all(MEASURES[name].title in report for name in list_measure_names("regression"))
    assert json.loads(folder.model_card.read_text())["targets"] == data.targets.model_dump()


@pytest.mark.slow
def test_one_party_alone_learns_a_line() -> None:
    """y is 300 + 40 x at the active; no help is needed to be nearly right."""
    data = load_data(DataSettings(dataset="diabetes"), seed=0)
    table = replace(data.active, labels=data.active.features[:, 2])
    other = replace(data, table=table, targets=TargetScale(mean=300.0, scale=40.0))
    found = {}
    for loss in ("squared", "absolute", "huber"):
        train = {
            "epochs": 80,
            "batch_size": 64,
            "learning_rate": 0.05,
            "device": "cpu",
            "evaluate_every": 80,
            "loss": loss,
        }
        model = {"hidden": [16], "representation": 8, "dropout": 0.0}
        result = run(config_of("single_view", train=train, model=model), None, data=other)
        found[loss] = result.scores["single_view"]
    assert min(found.values()) > 0.9
    assert len(set(found.values())) == 3


@pytest.mark.slow
def test_a_broken_off_run_goes_on_alike(tmp_path: Path) -> None:
    brief = {"epochs": 4, "batch_size": 64, "learning_rate": 0.02, "device": "cpu"}
    config = config_of(train=brief)
    whole = run(config, tmp_path / "whole")
    interrupt_run(config, tmp_path / "part", at_step=7)
    assert run(config, tmp_path / "part", resume=True).scores == whole.scores


def predict_by_graph(folder: Path) -> dict[str, Any]:
    """Return what the model's graph tells of the active's file, by output."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from secure_apfed.runs.onnx_file import write_onnx

    write_onnx(load_model(folder / "run"), folder / "model.onnx")
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    frame = pd.read_csv(folder / "active.csv")
    columns = {name: frame[[name]].to_numpy() for name in ("a", "b")}
    names = [one.name for one in session.get_outputs()]
    return dict(zip(names, session.run(names, columns), strict=True))


@pytest.mark.slow
def test_predict_and_onnx_tell_numbers_in_the_unit(tmp_path: Path) -> None:
    run(config_of("single_view", data=own_tables(tmp_path)), tmp_path / "run")
    told = predict_file(tmp_path / "run", tmp_path / "active.csv")
    assert 900 < float(told.outputs.mean()) < 1100
    told.write_file(tmp_path / "told.csv")
    frame = pd.read_csv(tmp_path / "told.csv")
    assert list(frame) == ["id", "prediction"]
    assert frame["prediction"].to_numpy() == pytest.approx(told.outputs.numpy())
    assert told.as_json()["predictions"][0]["id"] == "p0"
    said = predict_by_graph(tmp_path)["output_prediction"]
    assert said == pytest.approx(told.outputs.numpy(), rel=1e-5)


def test_a_card_that_fits_no_task_is_refused(tmp_path: Path) -> None:
    run(config_of("single_view", train={"epochs": 1}), tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    card = json.loads(folder.model_card.read_text())
    for other in ({"task": "guessing"}, {"targets": None}, {"task": "classification"}):
        parts = active_model._NetworkCard.model_validate(card | other)
        with pytest.raises(ModelError, match=r"no model of this version|labels are"):
            active_model._build_task(parts, folder.model_card)


@pytest.mark.slow
def test_attacks_on_labels_are_left_out_with_a_reason() -> None:
    brief = {"epochs": 2, "batch_size": 64, "device": "cpu"}
    suite = full_suite(["model_completion", "membership", "inverse_network"])
    results = run_attacks(run(config_of(train=brief), None).recording, suite, seed=0)
    told = {result.target: str(result.reason) for result in results}
    assert "guess classes" in told["labels"]
    assert "probabilities of classes" in told["membership"]
    assert any(result.applicable for result in results if result.target == "features")


@pytest.mark.slow
def test_baselines_are_chosen_by_their_own_labels(tmp_path: Path) -> None:
    record = load_or_measure_baselines(config_of(measure="mae"), tmp_path / "solo.json")
    by_name = {one.name: one for one in record.baselines}
    assert set(by_name) == set(TITLE_BY_REGRESSOR)
    assert record.best.validation == min(one.validation or 1e9 for one in record.baselines)
    assert by_name["ridge"].test < by_name["mean"].test
    r2 = MEASURES["r2"]
    with pytest.raises(DataError, match="3 labelled rows are too few"):
        compare_regressions(np.ones((3, 2)), np.ones(3), np.ones((1, 2)), np.ones(1), measure=r2)
    x = np.random.default_rng(0).normal(size=(60, 3))
    y = x @ [1.0, 2.0, 0.0]
    right, wrong = (compare_regressions(x, y, x, test, measure=r2) for test in (y, -y))
    assert [one.validation for one in right] == [one.validation for one in wrong]
    assert right[0].test > 0.9 > 0 > wrong[0].test


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"task": "classification"}, "numbers and no classes; say task: regression"),
    ({"task": "regresion"}, "did you mean 'regression'"),
    ({"task": "anomaly"}, "'anomaly' is unknown; known are classification, regression"),
    ({"data": {"dataset": "digits", "anomaly": "9"}}, r"data\.anomaly"),
    ({"data": {"dataset": "wine"}}, "are classes; take a set of numbers"),
    ({"measure": "auc"}, "classification, and task is regression; use r2"),
    ({"labels": {"mechanism": "randomised_response", "epsilon": 1.0}}, "answers with classes"),
    ({"threshold": 0.5}, "threshold: it decides between two classes"),
    ({"train": {"class_weights": "balanced"}}, "class_weights: they are of classes"),
    ({"train": {"spread_labels": True}}, "classes are spread"),
    ({"dp_sgd": {"noise_multiplier": 1.0, "clip": 1.0}}, "dp_sgd: the model card of this task"),
    ({"data": {"dataset": "diabetes", "rows_per_class": 5}}, "are numbers and no classes"),
    ({"data": {"dataset": "diabetes", "labels_at": ["passive-1"]}}, "are the active's alone"),
    ({"data": {"dataset": "diabetes", "classes": "numbers"}}, "belong to dataset: tables"),
    ({"data": {**TABLES, "classes": ["a", "b"]}}, "leave data.classes out"),
    ({"data": {**TABLES, "partition": "horizontal"}}, "are the active's alone"),
)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"train\.loss: huber is of task: regression"):
        small_config(train={"loss": "huber"})
    assert "task regression" in describe_obstacles(config_of())
    with pytest.raises(ConfigError, match=r"settings.task is 'regression'"):
        VerticalClassifier(settings={"task": "regression"}).fit([[0.0], [1.0]], [0, 1])
    with pytest.raises(DataError, match="these labels are classes"):
        Regression.from_targets(None)


@pytest.mark.parametrize(("settings", "said"), REFUSED)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        config_of(**settings)


@pytest.mark.parametrize("method", [name for name in METHODS if name not in TAKING])
def test_a_method_of_classes_alone_is_refused(method: str) -> None:
    with pytest.raises(ValidationError, match=r"task: method .*use .*apfed_r"):
        config_of(method)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    config = config_of("single_view", data=own_tables(folder), train={"epochs": 3})
    run(config, folder / "run")
    return folder


@pytest.mark.parametrize(
    ("ending", "place"),
    [
        ("csv", "line 8"),
        ("csv.gz", "line 8"),
        ("parquet", r"row 6 \(from 0\)"),
    ],
)
def test_blocks_are_the_whole_and_say_where(tmp_path: Path, ending: str, place: str) -> None:
    frame = pd.DataFrame({"who": [f"00{at}" for at in range(10)], "x": np.arange(10.0)})
    path = tmp_path / f"rows.{ending}"
    frame.to_parquet(path) if ending == "parquet" else frame.to_csv(path, index=False)
    encoding = ColumnEncoding.for_numeric_columns(["x"])
    parts = list(load_blocks(path, encoding, id_columns=["who"], block_row_count=4))
    assert [len(ids) for ids, _ in parts] == [4, 4, 2]
    ids, features = load_features(path, encoding, id_columns=["who"])
    assert tuple(name for names, _ in parts for name in names) == ids
    assert ids[3] == "003"
    assert torch.equal(torch.cat([one for _, one in parts]), features)
    numbered = [ids for ids, _ in load_blocks(path, encoding, block_row_count=4)]
    assert numbered[2] == ("8", "9")
    frame["x"] = [*"012345", "six", *"789"]
    frame.to_parquet(path) if ending == "parquet" else frame.to_csv(path, index=False)
    blocks = load_blocks(path, encoding, block_row_count=4)
    next(blocks)
    with pytest.raises(DataError, match=rf"column 'x' is numeric.*{place}"):
        next(blocks)


@pytest.mark.parametrize(
    ("was", "now", "says"),
    [
        ("data:", "tables:", "tables: is an unknown key"),
        ("  dataset:", "  dataest:", r"config\.yaml:\d+: data\.dataest: is an unknown key"),
        ("data:\n", "data: none\nmore:\n", r"config\.yaml:\d+: data: "),
    ],
)
def test_predictions_say_what_is_wrong_with_the_settings_of_a_run_and_where(
    trained: Path, tmp_path: Path, was: str, now: str, says: str
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(trained / "run", folder)
    config = folder / "config.yaml"
    assert was in config.read_text()
    config.write_text(config.read_text().replace(was, now, 1))
    RunFolder(folder).digests.unlink()
    with pytest.raises(ConfigError, match=says):
        predict_file(folder, trained / "active.csv")


@pytest.mark.parametrize("ending", ["csv", "parquet", "json"])
def test_files_written_in_blocks_are_those_written_at_once(
    trained: Path, tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = predict_file(trained / "run", trained / "active.csv")
    whole.write_file(tmp_path / f"whole.{ending}")
    monkeypatch.setattr(load_blocks, "__kwdefaults__", {"id_columns": (), "block_row_count": 50})
    compared = predict_into(trained / "run", trained / "active.csv", tmp_path / f"parts.{ending}")
    parts, once = (tmp_path / f"{name}.{ending}" for name in ("parts", "whole"))
    if ending == "parquet":
        pd.testing.assert_frame_equal(pd.read_parquet(parts), pd.read_parquet(once))
    else:
        assert parts.read_text() == once.read_text()
    if ending == "json":
        assert json.loads(once.read_text()) == whole.to_frame().to_dict("records")
    assert compared.rows == 120
    assert [one.shift for one in compared.drift] == pytest.approx(
        [one.shift for one in whole.compared.drift]
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == [parts.name, once.name]


def test_no_number_is_lost_in_json(tmp_path: Path) -> None:
    with row_writer(tmp_path / "few.json") as write:
        write(pd.DataFrame({"id": ["é", "2"], "number": [math.inf, 1e-17]}))
    few = json.loads((tmp_path / "few.json").read_text())
    assert few == [{"id": "é", "number": None}, {"id": "2", "number": 1e-17}]


def test_a_file_that_fails_half_way_leaves_the_old_one(trained: Path, tmp_path: Path) -> None:
    output = tmp_path / "told.csv"
    output.write_text("the old one")
    frame = pd.read_csv(trained / "active.csv").astype({"a": object})
    frame.loc[119, "a"] = "?"
    frame.to_csv(tmp_path / "rows.csv", index=False)
    with pytest.raises(DataError, match="line 121"):
        predict_into(trained / "run", tmp_path / "rows.csv", output)
    assert output.read_text() == "the old one"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.csv", "told.csv"]
    with pytest.raises(DataError, match=r"expected a name that ends in \.csv"):
        predict_into(trained / "run", trained / "active.csv", tmp_path / "told.txt")
    with pytest.raises(DataError, match="cannot be written"):
        predict_into(trained / "run", trained / "active.csv", output / "told.csv")


def test_predict_command(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["predict", "--model", str(trained / "run"), "--data"]
    arguments = [*command, str(trained / "active.csv"), "--output", str(tmp_path / "told.csv")]
    whole = run_as_json(capsys, *arguments)
    assert (whole["rows"], [one["name"] for one in whole["columns"]]) == (120, ["a", "b"])
    assert execute(arguments) == 0
    assert "120 rows written" in capsys.readouterr().err
    rows = pd.read_csv(trained / "active.csv").iloc[:5].assign(a=1e3)
    rows.to_csv(tmp_path / "rows.csv", index=False)
    assert execute([*command, str(tmp_path / "rows.csv")]) == 0
    said = read_stderr(capsys)
    assert "column 'a': a row lies" in said
    jointly = [*command, str(tmp_path / "rows.csv"), "--jointly", "own.yaml", "--id-column", "id"]
    assert execute(jointly) == 2
    said = " ".join(capsys.readouterr().err.replace("│", "").split())
    assert "by the ID columns of the training" in said


@pytest.mark.slow
def test_memory_does_not_grow_with_the_rows(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_blocks, "__kwdefaults__", {"id_columns": (), "block_row_count": 500})
    row = pd.read_csv(trained / "active.csv").iloc[:1]
    peaks = []
    for rows in (2_500, 10_000):
        row.loc[[0] * rows].assign(id=range(rows)).to_csv(tmp_path / "rows.csv", index=False)
        with trace_memory() as peak:
            predict_into(trained / "run", tmp_path / "rows.csv", tmp_path / "out.csv")
            peaks.append(peak())
    assert peaks[1] < 1.5 * peaks[0]


@pytest.fixture(scope="module")
def rare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tables of three parties, 6 % of whose people are of the class "bad"."""
    folder = tmp_path_factory.mktemp("rare")
    rng = np.random.default_rng(0)
    bad = rng.uniform(size=1500) < 0.06
    for party in ("active", "passive-1", "passive-2"):
        table = pd.DataFrame(rng.normal(size=(1500, 3)) + bad[:, None], columns=list("abc"))
        table.insert(0, "id", np.arange(1500))
        if party == "active":
            table["label"] = np.where(bad, "bad", "good")
        table.to_csv(folder / f"{party}.csv", index=False)
    return folder


def rare_config(folder: Path, method: Any = "votes", **changes: Any) -> Config:
    parties = {name: {"file": f"{name}.csv"} for name in ("active", "passive-1", "passive-2")}
    fitted = {"model": {"network": "random_features"}, "train": {"epochs": 1}}
    network = {
        "model": {"hidden": [8], "representation": 8, "projection": 8},
        "train": {"epochs": 4, "learning_rate": 0.05},
    }
    return Config.model_validate(
        {
            "name": "rare",
            "method": method,
            "measure": "auc",
            "guard": {"mechanism": "none"},
            "party_seeds": "shared_for_comparison",
            "secure_sum": {"scheme": "plain", "masks": "pairwise"},
            "data": {
                "dataset": "tables",
                "folder": folder,
                "labelled": 300,
                "parties": parties,
                "classes": ["good", "bad"],
            },
            **(fitted if method == "votes" else network),
            **changes,
        }
    )


@pytest.mark.sampled(every=2)
@pytest.mark.filterwarnings("ignore:.*fewer than 30")
@pytest.mark.parametrize("method", ["votes", "apfed_r"])
def test_a_rare_class_is_predicted_as_often_as_it_comes(method: str, rare: Path) -> None:
    """By what is written beside the run and by the model that is kept."""
    folder = rare / method
    result = run(rare_config(rare, method, threshold={"cost": 9}), folder)
    plain = run(rare_config(rare, method, calibration="none"), None)
    told = result.ranking
    before = plain.ranking
    assert told is not None
    assert before is not None
    assert result.calibration is not None
    assert told.is_met
    assert abs(told.predicted - told.rate.value) < abs(before.predicted - before.rate.value)
    assert (told.class_name, told.rows, plain.calibration) == ("bad", 375, None)
    assert told.positives == sum(row.positives for row in told.table)
    assert result.measures[method]["auc"] == pytest.approx(plain.measures[method]["auc"], abs=0.02)
    assert result.threshold == pytest.approx(0.1)
    assert load_outcome(RunFolder(folder)).ranking == told
    shares = [
        row["probabilities"][1]
        for row in predict_file(folder, rare / "active.csv").as_json()["predictions"]
    ]
    assert np.mean(shares) == pytest.approx(result.calibration.rate, abs=0.01)
    page = write_report(folder).read_text()
    assert "Lift and KS" in page
    assert (folder / "pictures/calibration.png").is_file()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fewer than 30")
def test_a_known_rate_and_a_share_to_decide_for(rare: Path) -> None:
    config = rare_config(rare, calibration=0.02, threshold={"rate": 0.1})
    with pytest.warns(
        FewRowsWarning, match="18 labelled training rows and .* of class bad, fewer than 30"
    ):
        result = run(config, rare / "known")
    assert result.ranking is not None
    assert result.calibration is not None
    assert result.calibration.rate == 0.02
    assert result.ranking.predicted == pytest.approx(0.02, abs=0.01)
    decided = load_scores(RunFolder(rare / "known"), "votes", threshold=result.threshold)
    assert decided is not None
    assert decided.class_predictions.mean() == pytest.approx(0.1, abs=0.04)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"threshold": {"cost": 9, "rate": 0.1}}, "one of cost and rate"),
        ({"threshold": {"cost": -1}}, "greater than 0"),
        ({"calibration": 1.5}, "less than 1"),
        ({"method": "tvfl", "calibration": "labels"}, "has no model to calibrate"),
        (
            {
                "calibration": "labels",
                "labels": {"mechanism": "randomised_response", "epsilon": 1.0},
            },
            "beside a promise about labels",
        ),
        (
            {
                "method": "single_view",
                "threshold": {"rate": 0.1},
                "dp_sgd": {"clip": 1.0, "noise_multiplier": 1.0},
            },
            "threshold: it would tell",
        ),
    ],
)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fewer than 30")
def test_a_rate_that_does_not_fit_is_refused(
    settings: dict[str, Any], said: str, rare: Path
) -> None:
    with pytest.raises(ValidationError, match=said):
        rare_config(rare, **settings)

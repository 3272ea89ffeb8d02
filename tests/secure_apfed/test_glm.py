"""Generalised linear models of several parties: the coefficients are scikit-learn's on one table,
and each party's table has its own columns alone.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.linear_model import LogisticRegression, PoissonRegressor, Ridge
from sklearn.metrics import mean_poisson_deviance

from apfed_experiments.baselines import load_or_measure_baselines
from apfed_experiments.report import write_report
from secure_apfed import Config, run
from secure_apfed.errors import ApfedError, DataError, ModelError
from secure_apfed.measures.table import Scored, list_measure_names, measure_all
from secure_apfed.measures.tasks import TASKS
from secure_apfed.runs.checkpoint_store import PartyEnd
from secure_apfed.runs.folder import RunFolder
from secure_apfed.runs.outcome import RunResult, load_outcome

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")

N = 240
L2 = 0.02
COLUMNS = {"clinic": ["age", "bmi"], "lab": ["urea", "iron"], "registry": ["income", "smoker"]}


def make_table() -> tuple[pd.DataFrame, "np.ndarray[Any, Any]"]:
    """Return raw columns in units of their own, and a score."""
    draw = np.random.default_rng(0)
    z = draw.normal(size=(N, 6))
    z[:, 5] = z[:, 5] > 0.3
    units = np.array([12, 4, 2, 0.3, 9000, 1])
    names = [name for columns in COLUMNS.values() for name in columns]
    score = z @ np.array([0.4, -0.3, 0.5, 0.2, -0.4, 0.6])
    return pd.DataFrame(z * units + 2 * units, columns=names), score


FRAME, SCORE = make_table()
DRAW = np.random.default_rng(1)
LABELS: Mapping[str, "np.ndarray[Any, Any]"] = {
    "classification": np.where(DRAW.random(N) < 1 / (1 + np.exp(1 - 2 * SCORE)), "ill", "well"),
    "three classes": np.digitize(SCORE + DRAW.normal(size=N) / 2, [-0.4, 0.5]),
    "regression": (40 + 7 * (SCORE + DRAW.normal(size=N) / 3)).round(3),
    "poisson": DRAW.poisson(np.exp(1 + SCORE)),
}


def make_config(
    folder: Path, labels: Any, task: str, *, train: Mapping[str, Any] | None = None, **changes: Any
) -> Config:
    """Return a run of three tables with these labels, without protection of the sum."""
    ids = [f"person-{number}" for number in range(N)]
    for name, columns in COLUMNS.items():
        table = FRAME[columns].assign(id=ids)
        if name == "clinic":
            table["label"] = labels
        table.to_csv(folder / f"{name}.csv", index=False)
    content: dict[str, Any] = {
        "name": "glm",
        "method": "split_nn_sum",
        "task": task,
        "model": {"network": "glm"},
        "data": {
            "dataset": "tables",
            "active": "clinic",
            "label_column": "label",
            "parties": {
                name: {"file": str(folder / f"{name}.csv"), "id_column": "id"} for name in COLUMNS
            },
        },
        "train": {
            "epochs": 250,
            "batch_size": N,
            "learning_rate": 0.4,
            "weight_decay": L2,
            "evaluate_every": 250,
            **(train or {}),
        },
        "secure_sum": {"scheme": "plain", "clip": None},
        "guard": {"mechanism": "none"},
    }
    return Config.model_validate(content | changes)


def list_training_rows(result: RunResult) -> tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]:
    """Return all parties' standardised columns side by side, and the labels, of training rows."""
    data = result.recording.data
    rows = data.train_rows
    ids = [data.active.ids[int(row)] for row in rows]
    parts = [data.active.features[rows]]
    for table in data.passives:
        place = {name: row for row, name in enumerate(table.ids)}
        parts.append(table.features[[place[name] for name in ids]])
    labels = data.active.labels
    assert labels is not None
    if data.targets is not None:
        numbers = data.targets.decode(labels[rows]).numpy()
        return torch.cat(parts, 1).double().numpy(), np.where(abs(numbers) < 1e-5, 0, numbers)
    return torch.cat(parts, 1).double().numpy(), labels[rows].numpy()


def read_weights(result: RunResult) -> tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]:
    """Return all parties' coefficients by score, (D, F), and the intercepts (D,)."""
    frame = pd.DataFrame(
        [one.model_dump() for table in result.coefficients for one in table.coefficients]
    )
    names = frame["column"].unique()
    scores = frame["score"].unique()
    weights = frame.pivot(index="score", columns="column", values="per_deviation")
    intercepts = result.coefficients[0].intercepts
    return weights.loc[scores, names].to_numpy(), np.array([intercepts[name] for name in scores])


# By case: the task, its labels, further settings, and scikit-learn's model with the same L2 term.
CASES: Mapping[str, tuple[str, str, dict[str, Any], Callable[[Any], Any]]] = {
    "logistic": (
        "classification",
        "classification",
        {},
        lambda y: LogisticRegression(C=1 / (L2 * len(y)), tol=1e-10),
    ),
    "logistic, balanced classes": (
        "classification",
        "classification",
        {"train": {"class_weights": "balanced"}},
        lambda y: LogisticRegression(C=1 / (L2 * len(y)), tol=1e-10, class_weight="balanced"),
    ),
    "three classes": (
        "classification",
        "three classes",
        {"model": {"network": "glm", "representation": 3}},
        lambda y: LogisticRegression(C=1 / (L2 * len(y)), tol=1e-10),
    ),
    "squared": ("regression", "regression", {}, lambda y: Ridge(alpha=L2 * len(y) / 2)),
    "Poisson": (
        "poisson",
        "poisson",
        {},
        lambda y: PoissonRegressor(alpha=L2 * y.mean(), tol=1e-10, max_iter=1000),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_coefficients_are_scikit_learns(tmp_path: Path, case: str) -> None:
    task, labels, changes, make_pooled = CASES[case]
    result = run(make_config(tmp_path, LABELS[labels], task, **changes), None)
    x, y = list_training_rows(result)
    pooled = make_pooled(y).fit(x, y)
    found, intercepts = read_weights(result)
    expected = np.atleast_2d(pooled.coef_)
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max(), (found, expected)
    # A softmax knows its intercepts up to one number.
    expected_intercepts = np.atleast_1d(pooled.intercept_)
    if case == "three classes":
        intercepts = intercepts - intercepts.mean()
        expected_intercepts = expected_intercepts - expected_intercepts.mean()
    assert np.abs(intercepts - expected_intercepts).max() < 1e-4 * max(1, np.abs(y).mean())


def test_a_secure_sum_leaves_the_coefficients(tmp_path: Path) -> None:
    config = make_config(
        tmp_path,
        LABELS["poisson"],
        "poisson",
        secure_sum={"scheme": "plain", "masks": "pairwise", "clip": 8, "bits": 24},
    )
    result = run(config, None)
    x, y = list_training_rows(result)
    expected = PoissonRegressor(alpha=L2 * y.mean(), tol=1e-10, max_iter=1000).fit(x, y).coef_
    found, _ = read_weights(result)
    assert np.abs(found[0] - expected).max() < 1e-3 * np.abs(expected).max()


def test_each_party_has_its_own_columns_alone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    result = run(make_config(tmp_path, LABELS["regression"], "regression"), folder)
    by_party = {table.party: table for table in result.coefficients}
    assert {name: [one.column for one in own.coefficients] for name, own in by_party.items()} == (
        COLUMNS
    )
    assert [name for name, own in by_party.items() if own.intercepts] == ["clinic"]
    assert load_outcome(RunFolder(folder)).coefficients == result.coefficients
    targets = result.recording.data.targets
    assert targets is not None
    for name in ("lab", "registry"):
        text = (folder / "parties" / name / "ended.json").read_text()
        own = PartyEnd.model_validate(json.loads(text)).coefficients
        assert own is not None
        assert own.party == name
        assert not own.intercepts
        assert [one.column for one in own.coefficients] == COLUMNS[name]
        assert own.link == "label, in its standard deviations"
        for mine, shown in zip(own.coefficients, by_party[name].coefficients, strict=True):
            assert mine.per_deviation * targets.scale == pytest.approx(shown.per_deviation)
        others = {column for other in COLUMNS if other != name for column in COLUMNS[other]}
        assert not any(column in text for column in others)


@pytest.mark.slow
def test_parties_in_processes_report_their_own(tmp_path: Path) -> None:
    """Each party has a process and a folder of its own; the active's result has no other table."""
    folder = tmp_path / "run"
    config = make_config(
        tmp_path,
        LABELS["regression"],
        "regression",
        train={"epochs": 5, "evaluate_every": 5},
        secure_sum={"scheme": "plain", "masks": "pairwise", "clip": 8, "bits": 24},
    )
    result = run(config, folder, transport="local", timeout_s=300)
    (own,) = result.coefficients
    assert [one.column for one in own.coefficients] == COLUMNS["clinic"]
    for name, columns in COLUMNS.items():
        page = write_report(folder / "parties" / name).read_text()
        for other in COLUMNS:
            for column in COLUMNS[other]:
                assert (f'<td data-name="column">{column}</td>' in page) == (column in columns)


def test_units_predict_raw_rows(tmp_path: Path) -> None:
    """Intercept and unit coefficients of raw columns give the predictions of the run."""
    result = run(make_config(tmp_path, LABELS["regression"], "regression"), None)
    data = result.recording.data
    raw = FRAME.iloc[data.test_rows.numpy()]
    predicted = np.full(len(raw), result.coefficients[0].intercepts[""])
    for table in result.coefficients:
        encoding = next(one.encoding for one in data.tables if one.name == table.party)
        means = {column.name: column.mean for column in encoding.columns}  # type: ignore[union-attr]
        for one in table.coefficients:
            assert one.per_unit is not None
            predicted += one.per_unit * (raw[one.column].to_numpy() - means[one.column])
    scored = result.test_scores["split_nn_sum"]
    assert np.sort(scored.scores) == pytest.approx(np.sort(predicted), rel=1e-4)


@pytest.mark.parametrize("task", ["classification", "regression", "poisson"])
def test_the_report_lists_coefficients(tmp_path: Path, task: str) -> None:
    folder = tmp_path / "run"
    config = make_config(tmp_path, LABELS[task], task, train={"epochs": 3, "evaluate_every": 3})
    result = run(config, folder)
    local_models = load_or_measure_baselines(
        config, tmp_path / "solo.json", data=result.recording.data
    )
    page = write_report(folder, local_models=local_models).read_text()
    for columns in COLUMNS.values():
        for column in columns:
            assert f'<td data-name="column">{column}</td>' in page
    assert f"lab: {TASKS[task].link}" in page
    assert ("Poisson deviance" in page) == (task == "poisson")
    assert ("Poisson regression" in page) == (task == "poisson")


REFUSALS: Mapping[str, tuple[str, Any, dict[str, Any], type[Exception], str]] = {
    "negative counts": (
        "poisson",
        LABELS["poisson"] - 3,
        {},
        DataError,
        "clinic: task: poisson learns counts of 0 or more, and .* are negative, such as",
    ),
    "texts as counts": (
        "poisson",
        LABELS["classification"],
        {},
        DataError,
        "clinic: column 'label' holds numbers to predict, and row 0 .* has '(ill|well)'",
    ),
    "counts of classes": (
        "poisson",
        LABELS["poisson"],
        {"data": {"dataset": "breast_cancer"}},
        ValueError,
        "task: poisson predicts numbers, and the labels of data.dataset breast_cancer are classes",
    ),
    "class weights of counts": (
        "poisson",
        LABELS["poisson"],
        {"train": {"class_weights": "balanced"}},
        ValueError,
        "train.class_weights: they are of classes, and task is poisson",
    ),
    "a loss of numbers": (
        "poisson",
        LABELS["poisson"],
        {"train": {"loss": "huber"}},
        ValueError,
        "train.loss: huber is of task: regression",
    ),
    "a measure of classes": (
        "poisson",
        LABELS["poisson"],
        {"measure": "auc"},
        ValueError,
        "measure: auc is a measure of classification, .* use r2, mae, rmse, poisson_deviance",
    ),
    "deviance of numbers": (
        "regression",
        LABELS["regression"],
        {"measure": "poisson_deviance"},
        ValueError,
        "poisson_deviance is a measure of poisson",
    ),
    "a method of classes": (
        "poisson",
        LABELS["poisson"],
        {"method": "split_nn"},
        ValueError,
        "split_nn learns classification, not poisson; use .*split_nn_sum",
    ),
    "one number for three classes": (
        "classification",
        LABELS["three classes"],
        {},
        ModelError,
        "clinic: its head: model.representation: network glm .* say model.representation: 3",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(tmp_path: Path, case: str) -> None:
    task, labels, changes, kind, sentence = REFUSALS[case]
    with pytest.raises(kind, match=sentence) as refused:
        run(make_config(tmp_path, labels, task, **changes), None)
    assert isinstance(refused.value, ApfedError | ValueError)


def test_deviance_is_scikit_learns() -> None:
    truth = np.array([0.0, 3.0, 1.0])
    scores = np.array([0.5, 2.0, 1.5])
    counts = Scored(truth=truth, scores=scores, are_counts=True)
    assert measure_all(counts)["poisson_deviance"] == mean_poisson_deviance(truth, scores)
    assert set(measure_all(counts)) == set(list_measure_names("poisson"))
    negative = Scored(truth=truth, scores=-scores, are_counts=True)
    assert "poisson_deviance" not in measure_all(negative)
    assert "poisson_deviance" not in measure_all(Scored(truth=truth, scores=scores))


def test_labels_do_not_matter_where_there_are_none() -> None:
    """A batch whose rows have no label has no loss, and no gradient."""
    from secure_apfed.data import UNLABELLED, TargetScale

    task = TASKS["poisson"].from_targets(TargetScale(mean=3.0, scale=2.0))
    outputs = torch.zeros(3, 1, requires_grad=True)
    loss = task.compute_loss(outputs, torch.full((3,), float(UNLABELLED)))
    loss.backward()
    assert outputs.grad is not None
    assert loss == 0
    assert not outputs.grad.any()

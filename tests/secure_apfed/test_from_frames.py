"""One call from frames to a result; what does not fit is told by party and column."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars
import pytest
from sklearn.datasets import load_breast_cancer

from secure_apfed import run_frames
from secure_apfed.errors import ApfedError, CheckpointError, ConfigError, DataError, ModelError
from secure_apfed.frames import FramesResult

BRIEF: dict[str, Any] = {
    "data": {"labelled": 40, "limit": 200},
    "model": {"network": "random_features"},
    "train": {"epochs": 1},
    "method": {"name": "votes", "epsilon": 8.0, "prior": "labeller"},
    "secure_sum": {"scheme": "plain", "masks": "pairwise"},
}


def parties() -> tuple[pd.DataFrame, dict[str, pd.DataFrame]]:
    people = load_breast_cancer(as_frame=True).frame.rename_axis("id").reset_index()
    people["id"] = "p" + people["id"].astype(str)
    people["target"] = people["target"].map({0: "ill", 1: "well"})
    shuffled = people.sample(500, random_state=0)
    own = people[["id", *people.columns[1:11], "target"]]
    return own, {
        "lab": shuffled[["id", *people.columns[11:21]]],
        "scan": shuffled[["id", *people.columns[21:31]]],
    }


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> FramesResult:
    own, passives = parties()
    folder = tmp_path_factory.mktemp("frames") / "run"
    attacks = [{"name": "vote_regression"}]
    return run_frames(own, passives, label="target", folder=folder, attacks=attacks, **BRIEF)


@pytest.mark.parametrize("task", ["regression", "anomaly"])
def test_numbers_are_told_where_there_are_no_classes(task: str) -> None:
    own, passives = parties()
    settings = {**BRIEF, "task": task, "method": "apfed_r"}
    settings["train"] = {"epochs": 2, "learning_rate": 0.01}
    settings["model"] = {"hidden": [16], "representation": 8, "projection": 8}
    settings["guard"] = {"mechanism": "none"}
    settings["data"] = {"limit": 200}
    if task == "regression":
        own = own.assign(target=own["mean radius"] * 3 + own["mean texture"])
    else:
        settings["data"] |= {"anomaly": "ill"}
    found = run_frames(own, passives, label="target", baselines=False, **settings)
    told = found.model.predict(own)
    assert told.shape == (len(own),)
    assert np.isfinite(told).all()
    with pytest.raises(ModelError, match="no probabilities; ask predict"):
        found.model.predict_proba(own)


def test_the_result_says_all_of_it(result: FramesResult) -> None:
    assert result.alone is not None
    assert result.gain == pytest.approx(result.score.value - result.alone.best.test)
    assert result.score.low < result.score.value < result.score.high
    assert result.epsilon["a person at lab"] == pytest.approx(8, abs=0.1)
    assert result.epsilon["a row's representations"] == 0
    assert result.wire_bytes == result.run.wire_bytes > 10_000
    assert any("lab" in party for party in result.who_learns)
    assert {attack.attack for attack in result.attacks} == {"vote_regression"}
    assert result.report is not None
    assert "scan" in result.report.read_text("utf-8")
    table = result.to_frame()
    assert {"accuracy", "auc", "ks", "brier"} <= set(table.index)
    assert table["gain"].dropna().to_dict() == {"accuracy": pytest.approx(result.gain)}
    assert (table["low"] <= table["value"]).all()
    assert (table["value"] <= table["high"]).all()


def test_the_model_reads_frames_and_gives_labels_as_they_were(result: FramesResult) -> None:
    own, _ = parties()
    shares = result.model.predict_proba(own)
    assert shares.shape == (len(own), 2)
    assert shares.sum(1) == pytest.approx(np.ones(len(own)))
    assert result.model.classes_ == ("ill", "well")
    assert (result.model.predict(own) == own["target"]).mean() > 0.85
    with pytest.raises(DataError, match=r"columns are missing: mean radius"):
        result.model.predict(own.drop(columns="mean radius"))


def test_copies_of_frames_are_their_owner_s_alone(result: FramesResult) -> None:
    assert result.report is not None
    folder = result.report.parent
    assert {path.stat().st_mode & 0o077 for path in (folder / "tables").iterdir()} <= {0o044, 0}
    assert (folder / "tables").stat().st_mode & 0o077 == 0
    own, passives = parties()
    with pytest.raises(CheckpointError, match="choose a new folder"):
        run_frames(own, passives, label="target", folder=folder, **BRIEF)


def test_without_a_folder_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With frames of polars, IDs as an index, and numbers of numpy."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    own, passives = parties()
    settings = {**BRIEF, "seed": np.int64(1), "data": {"labelled": np.int64(30), "limit": 200}}
    theirs = {"lab": polars.from_pandas(passives["lab"]), "scan": passives["scan"].set_index("id")}
    mine = polars.from_pandas(own)
    found = run_frames(mine, theirs, label="target", baselines=False, **settings)
    assert (found.report, found.gain, list(tmp_path.iterdir())) == (None, None, [])
    assert (found.config.seed, found.config.data.labelled) == (1, 30)
    assert found.who_learns
    assert "gain" not in found.to_frame().columns
    assert (found.model.predict(mine) == own["target"].to_numpy()).mean() > 0.85
    with pytest.raises(DataError, match=r"active: expected a frame .* collect a lazy frame first"):
        run_frames(mine.lazy(), theirs, label="target")
    settings = {"data": {"limit": 100}, "model": {"hidden": [8], "representation": 4}}
    settings |= {"guard": {"mechanism": "none"}, "train": {"epochs": 1}}
    together = run_frames(
        own, passives, label="target", method="split_nn_sum", baselines=False, **settings,
        secure_sum={"scheme": "plain", "masks": "pairwise"},
    )  # fmt: skip
    with pytest.raises(ModelError, match="split_nn_sum needs every party to predict"):
        together.model.predict(own)


Spoil = Callable[[dict[str, pd.DataFrame]], Mapping[str, Any]]


def changed(party: str, **columns: Any) -> Spoil:
    return lambda frames: {**frames, party: frames[party].assign(**columns)}


BAD: list[tuple[Spoil, str]] = [
    (lambda f: {**f, "lab": f["lab"].drop(columns="id")}, "lab: it has no column 'id' of IDs"),
    (lambda f: {**f, "lab": f["lab"].iloc[[0, 1, 0]]},
     r"lab: 1 IDs of column 'id' occur more than once, the first in rows 0, 2"),
    (lambda f: {**f, "lab": f["lab"].iloc[:0]}, "lab: its frame has no rows"),
    (lambda f: {**f, "lab": f["lab"].assign(id=range(len(f["lab"])))},
     "lab: its IDs are whole numbers, and those of active other text"),
    (lambda f: {**f, "lab": f["lab"].assign(id=np.arange(len(f["lab"])) / 2)},
     "lab: column 'id' holds numbers with a fraction in"),
    (lambda f: {**f, "scan": f["scan"].assign(
        id=f["scan"]["id"].where(f["scan"].index != f["scan"].index[0]))},
     "scan: column 'id' is empty in 1 rows, first in row 0"),
    (lambda f: {**f, "active": f["active"].drop(columns="target")},
     "active: it has no column 'target' of labels"),
    (changed("active", target="well"), "column 'target' are of one class, 'well'"),
    (changed("active", target=None), "column 'target' are empty"),
    (changed("scan", target="well"), "scan: its column 'target' is called like the labels"),
    (lambda f: {**f, "scan": f["scan"].assign(odd=["x", *range(len(f["scan"]) - 1)])},
     "scan: column 'odd' holds cells of several kinds"),
    (lambda f: {**f, "lab": {"id": [1]}}, "lab: expected a frame of pandas, polars or pyarrow"),
    (lambda f: {**f, "lab": pd.concat([f["lab"], f["lab"]], axis=1)},
     "lab: its frame has several columns of one name"),
]  # fmt: skip


def test_a_bad_frame_is_told_by_party_and_column() -> None:
    own, passives = parties()
    for spoil, says in BAD:
        frames = dict(spoil({"active": own, **passives}))
        with pytest.raises(DataError, match=says):
            run_frames(frames.pop("active"), frames, label="target", **BRIEF)
    with pytest.raises(ApfedError, match="rename the passive"):
        run_frames(own, {**passives, "active": passives["lab"]}, label="target")


def test_a_wrong_setting_is_told_and_leaves_no_frames(tmp_path: Path) -> None:
    own, passives = parties()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"votse": {}}, "votse"), ({"method": "vots"}, "did you mean 'votes'"),
        ({"data": {"id_column": "x"}}, "data.id_column: the frames say this"),
        ({"method": "tvfl"}, "guard"), ({**BRIEF, "method": {"name": "votes", "eps": 8}}, "eps"),
    ]  # fmt: skip
    for settings, says in wrong:
        with pytest.raises(ConfigError, match=says):
            run_frames(own, passives, label="target", folder=tmp_path, **settings)
        assert not list(tmp_path.iterdir())
    few = {**BRIEF, "data": {"labelled": 5000}}
    with pytest.raises(DataError):
        run_frames(own, passives, label="target", folder=tmp_path, **few)
    assert not (tmp_path / "tables").exists()

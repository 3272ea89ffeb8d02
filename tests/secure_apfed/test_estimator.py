"""The classifier behaves as scikit-learn's do, passives help by the index of their frames; one call
goes from frames to a result; and what does not fit is told by party and column.
"""

import copy
import pickle
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from numpy.typing import NDArray
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from secure_apfed import run_frames
from secure_apfed.errors import (
    ApfedError,
    CheckpointError,
    ConfigError,
    DataError,
    ModelError,
    UnseenCellsWarning,
)
from secure_apfed.interfaces.estimator import VerticalClassifier, VerticalRegressor
from secure_apfed.interfaces.frames import FramesResult

BRIEF: dict[str, Any] = {
    "train": {
        "epochs": 20,
        "batch_size": 16,
        "learning_rate": 0.1,
        "device": "cpu",
        "precision": "float64",
    },
    "model": {"hidden": [16], "representation": 8, "dropout": 0.0},
}
# Of numbers steps of that size are too long.
SLOWER: dict[str, Any] = {**BRIEF, "train": {**BRIEF["train"], "learning_rate": 0.02}}
HELPED: dict[str, Any] = {
    **BRIEF,
    "method": "apfed_c",
    "train": {"epochs": 3, "batch_size": 32, "learning_rate": 0.1, "device": "cpu"},
    "guard": {"mechanism": "none"},
    "secure_sum": {"scheme": "plain", "clip": None, "allow_single_passive": True},
}


@pytest.mark.sampled(every=5)
@parametrize_with_checks(  # type: ignore[untyped-decorator]
    [VerticalClassifier(settings=BRIEF), VerticalRegressor(settings=SLOWER)]
)
def test_it_keeps_the_rules_of_scikit_learn(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.fixture(scope="module")
def bunch() -> Any:
    return load_breast_cancer(as_frame=True)


def parties(bunch: Any) -> tuple[pd.DataFrame, dict[str, pd.DataFrame]]:
    people = bunch.data.set_axis([f"p{row}" for row in range(len(bunch.data))])
    shuffled = people.iloc[:, 10:].sample(500, random_state=0)
    return people.iloc[:, :10], {"lab": shuffled}


def test_passives_help_those_whom_they_know(bunch: Any) -> None:
    own, passives = parties(bunch)
    fitted = VerticalClassifier(passives=passives, settings=HELPED).fit(own, bunch.target)
    assert len(fitted.result_.recording.alignment["lab"]) == 500
    assert fitted.score(own, bunch.target) > 0.85
    assert fitted.feature_names_in_.tolist() == list(own.columns)


def test_it_is_crossed_and_calibrated_and_stands_in_a_pipeline(bunch: Any) -> None:
    own, passives = parties(bunch)
    model = VerticalClassifier(passives=passives, settings=HELPED)
    calibrated = CalibratedClassifierCV(model, cv=2).fit(own, bunch.target)
    assert calibrated.predict_proba(own).shape == (len(own), 2)
    piped = make_pipeline(StandardScaler().set_output(transform="pandas"), model)
    assert cross_val_score(piped, own, bunch.target, cv=2).mean() > 0.8
    with pytest.raises(ConfigError, match="came as ndarray, which names nobody"):
        make_pipeline(StandardScaler(), model).fit(own, bunch.target)


def test_columns_named_by_numbers_are_taken_by_name() -> None:
    draw = np.random.default_rng(0)
    rows = pd.DataFrame({1: draw.normal(size=200), 0: draw.normal(size=200) + 50})
    labels = rows[1] > 0
    model = VerticalClassifier(settings=BRIEF).fit(rows, labels)
    told = model.predict_proba(rows)
    np.testing.assert_array_equal(model.predict_proba(rows[[0, 1]]), told)
    by_place = VerticalClassifier(settings=BRIEF).fit(rows.to_numpy(), labels)
    with pytest.raises(DataError, match="numbered in another order"):
        by_place.predict(rows)
    with pytest.raises(DataError, match="2 of 2 columns are missing: 1, 0"):
        model.predict(rows.rename(columns={0: 3, 1: 4}))


def test_frames_of_every_library_and_cells_of_every_type_say_the_same() -> None:
    draw = np.random.default_rng(0)
    day = pd.Timestamp("2026-01-01") + pd.to_timedelta(draw.integers(0, 9, 200), unit="D")
    frame = pd.DataFrame(
        {
            "colour": pd.Series(draw.choice(["red", "blue", "NA"], 200)),
            "day": day,
            "size": draw.integers(0, 5, 200),
            "old": draw.random(200) < 0.5,
        }
    )
    model = VerticalClassifier(settings=BRIEF).fit(frame, frame["colour"] == "red")
    told = model.predict_proba(frame)
    assert model.score(frame, frame["colour"] == "red") > 0.85
    arrow = pa.Table.from_pandas(frame)
    for same in (
        arrow,
        pl.from_arrow(arrow),
        frame.convert_dtypes(),
        frame.astype(object),
        frame.assign(size=frame["size"].astype(str), old=frame["old"].astype(int)),
        frame.assign(day=frame["day"].dt.strftime("%Y-%m-%d")),
    ):
        np.testing.assert_allclose(model.predict_proba(same), told, atol=1e-9)
    with pytest.warns(UnseenCellsWarning, match="the input: 200 of 200 cells of column 'colour'"):
        model.predict(frame.assign(colour="green"))
    with pytest.raises(DataError, match="'day' holds dates, but 200 cells are none"):
        model.predict(frame.assign(day=20_000))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
def test_the_page_s_blocks_run(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[2] / "docs" / "python.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    assert len(blocks) == 6
    for block in blocks:
        exec(compile(block, str(page), "exec"), {})
    told = capsys.readouterr().out.strip().splitlines()
    assert told[1].startswith("measure")
    assert "laboratory" in "".join(told[:-4])
    accuracy, scores, best, total = told[-4:]
    assert total == "7.0"
    assert best.startswith("{'settings__train__epochs': ")
    assert accuracy.startswith("{'votes':")
    assert min(map(float, scores.strip("[]").split())) > 0.8


@contextmanager
def _another_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def _drawing_all_the_time() -> Iterator[None]:
    """Another thread draws and sets torch's own generator meanwhile."""
    ended = threading.Event()

    def draw() -> None:
        while not ended.is_set():
            torch.manual_seed(0)
            torch.rand(9)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(draw)
        try:
            yield
        finally:
            ended.set()


CALLERS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "another device": lambda: torch.device("meta"),
    "another dtype": _another_dtype,
    "its own seed": _drawing_all_the_time,
}


def small() -> tuple[pd.DataFrame, pd.DataFrame, NDArray[np.bool_]]:
    z_N2 = np.random.default_rng(0).normal(size=(96, 2))
    return pd.DataFrame({"a": z_N2[:, 0]}), pd.DataFrame({"c": z_N2[:, 1]}), z_N2.sum(1) > 0


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("method", ["apfed_c", "votes"])
def test_what_the_caller_s_torch_is_set_to_changes_nothing(method: str) -> None:
    active, passive, labels = small()
    settings = {**HELPED, "method": method}

    def predict_probabilities(seed: int = 0) -> NDArray[np.float64]:
        fitted = VerticalClassifier({"lab": passive}, settings, seed=seed).fit(active, labels)
        return fitted.predict_proba(active)

    expected = predict_probabilities()
    found = {}
    for name, caller in CALLERS.items():
        with caller():
            found[name] = predict_probabilities()
    assert not [name for name, shares in found.items() if not np.array_equal(shares, expected)]
    with ThreadPoolExecutor(2) as pool:
        first, other = pool.map(predict_probabilities, (0, 1))
    assert np.array_equal(first, expected)
    assert np.array_equal(other, predict_probabilities(1))


def test_nothing_shown_or_pickled_holds_a_passive_s_rows() -> None:
    active, passive, labels = small()
    passive["c"] += 7.123456 - passive["c"].iloc[0]
    fitted = VerticalClassifier({"lab": passive}, HELPED).fit(active, labels)
    search = GridSearchCV(VerticalClassifier({"lab": passive}, HELPED), {"seed": [0]}, cv=2)
    search.fit(active, labels)
    every = (fitted, make_pipeline(fitted), search, search.best_estimator_, fitted.result_)
    shown = [
        (type(one).__name__, text)
        for one in every
        for text in (repr(one), str(vars(one)), getattr(one, "_repr_html_", lambda: "")())
    ]
    assert not [name for name, text in shown if "7.12" in text]
    column = torch.tensor(passive["c"].tolist()[:5], dtype=torch.float64)
    standard = fitted.result_.recording.data.passives[0].features[:5, 0]
    hidden = [one.numpy().tobytes() for some in (column, column.float(), standard) for one in some]
    pickled = [(type(one), pickle.dumps(one)) for one in (search, clone(fitted), fitted.result_)]
    pickled.append((type(fitted), pickle.dumps(fitted)))
    assert not [kind for kind, content in pickled if any(value in content for value in hidden)]
    assert len(copy.deepcopy(fitted).fit(active, labels).result_.recording.alignment["lab"])
    kept = pickle.loads(pickle.dumps(fitted))
    assert np.array_equal(kept.predict_proba(active), fitted.predict_proba(active))
    with pytest.raises(ConfigError, match=r"the rows of lab are not here.*set_params\(passives"):
        kept.fit(active, labels)
    kept.set_params(passives={"lab": passive}).fit(active, labels)


def test_rows_that_name_others_or_nobody_are_refused() -> None:
    active, passive, labels = small()
    model = VerticalClassifier({"lab": passive}, HELPED)
    named = pd.Series(labels, index=active.index)
    model.fit(active, named)
    model.fit(active, pd.Series(labels))  # names nobody: by place
    with pytest.raises(DataError, match=r"in another order; give y\.loc\[X\.index\]"):
        model.fit(active, named[::-1])
    with pytest.raises(DataError, match="names other people"):
        model.fit(active, named.set_axis([f"q{place}" for place in range(len(named))]))
    with pytest.raises(DataError, match=r"^lab: 1 IDs occur more than once, the first in row 0"):
        VerticalClassifier({"lab": passive.set_axis([1, 2, 1, *range(3, 96)])}, HELPED).fit(
            active, labels
        )
    with pytest.raises(ConfigError, match="the rows of lab came as DataFrame, which names nobody"):
        VerticalClassifier({"lab": cast(Any, pl.from_pandas(passive))}, HELPED).fit(active, labels)
    with pytest.raises(ValueError, match="each row of X needs its label"):
        model.fit(active, [None, *labels.astype(str)[1:]])


VOTED: dict[str, Any] = {
    "data": {"labelled": 40, "limit": 200},
    "model": {"network": "random_features"},
    "train": {"epochs": 1},
    "method": {"name": "votes", "epsilon": 8.0, "prior": "labeller"},
    "secure_sum": {"scheme": "plain", "masks": "pairwise"},
}
QUICK: dict[str, Any] = {
    "data": {"limit": 100},
    "model": {"hidden": [8], "representation": 4},
    "guard": {"mechanism": "none"},
    "baselines": False,
}


def three_parties() -> tuple[pd.DataFrame, dict[str, pd.DataFrame]]:
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
    own, passives = three_parties()
    folder = tmp_path_factory.mktemp("frames") / "run"
    attacks = [{"name": "vote_regression"}]
    return run_frames(own, passives, label="target", folder=folder, attacks=attacks, **VOTED)


@pytest.mark.slow
def test_numbers_are_told_where_there_are_no_classes() -> None:
    own, passives = three_parties()
    settings = {
        **VOTED,
        **QUICK,
        "task": "regression",
        "method": "apfed_r",
        "train": {"learning_rate": 0.01},
        "model": {"hidden": [16], "representation": 8, "projection": 8},
    }
    own = own.assign(target=own["mean radius"] * 3 + own["mean texture"])
    found = run_frames(own, passives, label="target", **settings)
    told = found.model.predict(own)
    assert told.shape == (len(own),)
    assert np.isfinite(told).all()
    with pytest.raises(ModelError, match="no probabilities; ask predict"):
        found.model.predict_proba(own)


def test_the_result_says_all_of_it(result: FramesResult) -> None:
    assert result.alone is not None
    assert result.gain == pytest.approx(result.score.value - result.alone.best.test)
    assert result.score.low < result.score.value < result.score.high
    assert result.epsilon["epsilon_v of lab, one person's votes"] == pytest.approx(8, abs=0.1)
    assert not any(title.startswith("epsilon_x") for title in result.epsilon)  # nothing is sent
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
    own, _ = three_parties()
    shares = result.model.predict_proba(own)
    assert shares.shape == (len(own), 2)
    assert shares.sum(1) == pytest.approx(np.ones(len(own)))
    assert set(result.model.classes_) == {"ill", "well"}
    assert (result.model.predict(own) == own["target"]).mean() > 0.85
    with pytest.raises(DataError, match=r"columns are missing: mean radius"):
        result.model.predict(own.drop(columns="mean radius"))


def test_copies_of_frames_are_their_owner_s_alone(result: FramesResult) -> None:
    assert result.report is not None
    folder = result.report.parent
    assert {path.stat().st_mode & 0o077 for path in (folder / "tables").iterdir()} <= {0o044, 0}
    assert (folder / "tables").stat().st_mode & 0o077 == 0
    own, passives = three_parties()
    with pytest.raises(CheckpointError, match="choose a new folder"):
        run_frames(own, passives, label="target", folder=folder, **VOTED)


def test_without_a_folder_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With frames of polars, a lazy one among them, IDs as an index, and numbers of numpy."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    own, passives = three_parties()
    settings = {**VOTED, "seed": np.int64(1), "data": {"labelled": np.int64(30), "limit": 200}}
    lab = passives["lab"]
    scan = passives["scan"]
    theirs = {"lab": pl.from_pandas(lab).lazy(), "scan": scan.set_index("id")}
    mine = pl.from_pandas(own)
    found = run_frames(mine, theirs, label="target", baselines=False, **settings)
    assert (found.report, found.gain, list(tmp_path.iterdir())) == (None, None, [])
    assert (found.config.seed, found.config.data.labelled) == (1, 30)
    assert found.who_learns
    assert "gain" not in found.to_frame().columns
    assert (found.model.predict(mine) == own["target"].to_numpy()).mean() > 0.85
    settings = {**VOTED, **QUICK, "method": "split_nn_sum", "transcript": {"keep": "all"}}
    together = run_frames(own, passives, label="target", **settings)
    sent = [
        one
        for epoch in together.run.recording.transcript.envelopes_by_epoch.values()
        for one in epoch
    ]
    assert {one.payload != b"" for one in sent} == {True}  # as long as somebody may read it
    assert len(list(tmp_path.iterdir())) == 1
    del sent
    with pytest.raises(ModelError, match="split_nn_sum needs every party to predict"):
        together.model.predict(own)


Spoil = Callable[[dict[str, pd.DataFrame]], Mapping[str, Any]]


def change_columns(party: str, **columns: Any) -> Spoil:
    return lambda frames: {**frames, party: frames[party].assign(**columns)}


BAD: list[tuple[Spoil, str]] = [
    (lambda f: {**f, "lab": f["lab"].drop(columns="id")}, "lab: it has no column 'id' of IDs"),
    (
        lambda f: {**f, "lab": f["lab"].iloc[[0, 1, 0]]},
        r"lab: 1 IDs of column 'id' occur more than once, the first in rows 0, 2",
    ),
    (lambda f: {**f, "lab": f["lab"].iloc[:0]}, "lab: its frame has no rows"),
    (
        lambda f: {**f, "lab": f["lab"].assign(id=range(len(f["lab"])))},
        "lab: its IDs are whole numbers, and those of active other text",
    ),
    (
        lambda f: {
            **f,
            "scan": f["scan"].assign(
                id=f["scan"]["id"].where(f["scan"].index != f["scan"].index[0])
            ),
        },
        "scan: column 'id' is empty in 1 rows, first in row 0",
    ),
    (
        lambda f: {**f, "active": f["active"].drop(columns="target")},
        "active: it has no column 'target' of labels",
    ),
    (change_columns("active", target="well"), "column 'target' are of one class, 'well'"),
    (change_columns("active", target=None), "column 'target' are empty"),
    (change_columns("scan", target="well"), "scan: its column 'target' is called like the labels"),
    (
        lambda f: {**f, "scan": f["scan"].assign(odd=["x", *range(len(f["scan"]) - 1)])},
        "scan: column 'odd' holds cells of several kinds",
    ),
    (lambda f: {**f, "lab": {"id": [1]}}, "lab: expected a frame of pandas, polars or pyarrow"),
    (
        lambda f: {**f, "lab": pd.concat([f["lab"], f["lab"]], axis=1)},
        "lab: its frame has several columns of one name",
    ),
]


@pytest.mark.parametrize(("spoil", "says"), BAD, ids=[says for _, says in BAD])
def test_a_bad_frame_is_told_by_party_and_column(spoil: Spoil, says: str) -> None:
    own, passives = three_parties()
    frames = dict(spoil({"active": own, **passives}))
    with pytest.raises(DataError, match=says):
        run_frames(frames.pop("active"), frames, label="target", **VOTED)


def test_a_passive_is_not_called_active() -> None:
    own, passives = three_parties()
    with pytest.raises(ApfedError, match="rename the passive"):
        run_frames(own, {**passives, "active": passives["lab"]}, label="target")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"votse": {}}, "votse"),
        ({"method": "vots"}, "did you mean 'votes'"),
        ({"data": {"id_column": "x"}}, "data.id_column: the frames say this"),
        ({"method": "tvfl"}, "guard"),
    ],
)
def test_a_wrong_setting_is_told_and_leaves_no_frames(
    settings: dict[str, Any], says: str, tmp_path: Path
) -> None:
    own, passives = three_parties()
    with pytest.raises(ConfigError, match=says):
        run_frames(own, passives, label="target", folder=tmp_path, **settings)
    assert not list(tmp_path.iterdir())


def test_more_labels_than_there_are_leave_no_frames(tmp_path: Path) -> None:
    own, passives = three_parties()
    few = {**VOTED, "data": {"labelled": 5000}}
    with pytest.raises(DataError):
        run_frames(own, passives, label="target", folder=tmp_path, **few)
    assert not (tmp_path / "tables").exists()

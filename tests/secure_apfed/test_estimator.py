"""The classifier behaves as scikit-learn's do, and passives help by the index of their frames."""

import copy
import pickle
import re
import threading
from collections.abc import Callable, Iterator
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

from secure_apfed.errors import ConfigError, DataError, UnseenCellsWarning
from secure_apfed.estimator import VerticalClassifier

BRIEF: dict[str, Any] = {
    "train": {"epochs": 20, "batch_size": 16, "learning_rate": 0.1, "device": "cpu",
              "precision": "float64"},
    "model": {"hidden": [16], "representation": 8, "dropout": 0.0},
}  # fmt: skip
HELPED: dict[str, Any] = {
    **BRIEF,
    "method": "apfed_c",
    "train": {"epochs": 3, "batch_size": 32, "learning_rate": 0.1, "device": "cpu"},
    "guard": {"mechanism": "none"},
    "secure_sum": {"scheme": "plain", "clip": None, "allow_single_passive": True},
}


@parametrize_with_checks([VerticalClassifier(settings=BRIEF)])  # type: ignore[untyped-decorator]
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


def test_texts_are_categories_dates_are_days_and_labels_keep_their_kind() -> None:
    draw = np.random.default_rng(0)
    colour = np.array(["red", "blue", None])[draw.integers(0, 3, 200)]
    frame = pd.DataFrame({"colour": colour, "size": draw.normal(size=200)})
    label = np.where((colour == "red") ^ (draw.random(200) < 0.05), "yes", "no")
    fitted = VerticalClassifier(settings=BRIEF).fit(frame, label)
    assert set(fitted.predict(frame)) == {"yes", "no"}
    assert fitted.score(frame, label) > 0.85
    since = pd.Timestamp("2026-01-01") + pd.to_timedelta(draw.integers(0, 300, 200), unit="D")
    frame = pd.DataFrame({"since": since, "size": draw.normal(size=200)})
    labels = np.where(frame["since"] > "2026-05-31", "new", "old")
    model = VerticalClassifier(settings=BRIEF).fit(frame, labels)
    assert model.score(frame, labels) > 0.9
    texts = frame.assign(since=frame["since"].dt.strftime("%Y-%m-%d"))
    assert (model.predict(texts) == model.predict(frame)).all()


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
    frame = pd.DataFrame({
        "colour": pd.Series(draw.choice(["red", "blue", "NA"], 200)), "day": day,
        "size": draw.integers(0, 5, 200), "old": draw.random(200) < 0.5,
    })  # fmt: skip
    model = VerticalClassifier(settings=BRIEF).fit(frame, frame["colour"] == "red")
    told = model.predict_proba(frame)
    arrow = pa.Table.from_pandas(frame)
    for same in (
        arrow,
        pl.from_arrow(arrow),
        frame.convert_dtypes(),
        frame.astype(object),
        frame.assign(size=frame["size"].astype(str), old=frame["old"].astype(int)),
    ):
        np.testing.assert_allclose(model.predict_proba(same), told, atol=1e-9)
    with pytest.warns(UnseenCellsWarning, match="the input: 200 of 200 cells of column 'colour'"):
        model.predict(frame.assign(colour="green"))
    with pytest.raises(DataError, match="'day' holds dates, but 200 cells are none"):
        model.predict(frame.assign(day=20_000))


def test_a_person_that_stands_twice_is_named(bunch: Any) -> None:
    own, _ = parties(bunch)
    lab = pd.DataFrame({"iron": [1.0, 2.0, 3.0]}, index=["p1", "p2", "p1"])
    with pytest.raises(DataError, match=r"^lab: 1 IDs occur more than once, the first in row 0"):
        VerticalClassifier(passives={"lab": lab}, settings=HELPED).fit(own, bunch.target)


@pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
def test_the_page_s_blocks_run(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[2] / "docs" / "python.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block, str(page), "exec"), {})
    told = capsys.readouterr().out.strip().splitlines()
    assert told[1].startswith("measure")
    assert "a person at laboratory" in "".join(told[:-2])
    accuracy, scores = told[-2:]
    assert accuracy.startswith("{'votes':")
    assert min(map(float, scores.strip("[]").split())) > 0.8


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
        assert torch.get_default_dtype() == dtype
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

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


CALLERS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "another device": lambda: torch.device("meta"),
    "another dtype": lambda: _default_dtype(torch.float64),
    "its own seed": lambda: _drawing_all_the_time(),
}


def small() -> tuple[pd.DataFrame, pd.DataFrame, NDArray[np.bool_]]:
    z_N2 = np.random.default_rng(0).normal(size=(96, 2))
    return pd.DataFrame({"a": z_N2[:, 0]}), pd.DataFrame({"c": z_N2[:, 1]}), z_N2.sum(1) > 0


@pytest.mark.parametrize("method", ["apfed_c", "votes"])
def test_what_the_caller_s_torch_is_set_to_changes_nothing(method: str) -> None:
    active, passive, labels = small()
    settings = {**HELPED, "method": method}

    def told(seed: int = 0) -> NDArray[np.float64]:
        fitted = VerticalClassifier({"lab": passive}, settings, seed=seed).fit(active, labels)
        return fitted.predict_proba(active)

    expected = told()
    for name, caller in CALLERS.items():
        with caller():
            assert np.array_equal(told(), expected), name
    with ThreadPoolExecutor(2) as pool:
        first, other = pool.map(told, (0, 1))
    assert np.array_equal(first, expected)
    assert np.array_equal(other, told(1))


def test_nothing_shown_or_pickled_holds_a_passive_s_rows() -> None:
    active, passive, labels = small()
    passive["c"] += 7.123456 - passive["c"].iloc[0]
    fitted = VerticalClassifier({"lab": passive}, HELPED).fit(active, labels)
    search = GridSearchCV(VerticalClassifier({"lab": passive}, HELPED), {"seed": [0]}, cv=2)
    search.fit(active, labels)
    for one in (fitted, make_pipeline(fitted), search, search.best_estimator_, fitted.result_):
        shown = [repr(one), str(vars(one)), getattr(one, "_repr_html_", lambda: "")()]
        assert not any("7.12" in text for text in shown), type(one)
    column = torch.tensor(passive["c"].tolist()[:5], dtype=torch.float64)
    standard = fitted.result_.recording.data.passives[0].features[:5, 0]
    hidden = [one.numpy().tobytes() for some in (column, column.float(), standard) for one in some]
    for one in (search, clone(fitted), fitted.result_, fitted):
        assert not any(value in pickle.dumps(one) for value in hidden), type(one)
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
    with pytest.raises(ConfigError, match="the rows of lab came as DataFrame, which names nobody"):
        VerticalClassifier({"lab": cast(Any, pl.from_pandas(passive))}, HELPED).fit(active, labels)
    with pytest.raises(ValueError, match="each row of X needs its label"):
        model.fit(active, [None, *labels.astype(str)[1:]])

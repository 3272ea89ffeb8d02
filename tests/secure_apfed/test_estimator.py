"""The classifier behaves as scikit-learn's do, and passives help by the index of their frames."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from secure_apfed.errors import ConfigError, DataError
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
    one = VerticalClassifier(passives=passives, settings=HELPED)
    assert cross_val_score(one, own, bunch.target, cv=2).mean() > 0.8
    calibrated = CalibratedClassifierCV(one, cv=2).fit(own, bunch.target)
    assert calibrated.predict_proba(own).shape == (len(own), 2)
    piped = make_pipeline(StandardScaler().set_output(transform="pandas"), one)
    assert piped.fit(own, bunch.target).score(own, bunch.target) > 0.8


def test_rows_that_name_nobody_are_matched_to_nobody(bunch: Any) -> None:
    own, passives = parties(bunch)
    piped = make_pipeline(StandardScaler(), VerticalClassifier(passives=passives, settings=HELPED))
    with pytest.raises(ConfigError, match="came as ndarray, which names nobody"):
        piped.fit(own, bunch.target)


def test_texts_are_categories_and_labels_keep_their_kind() -> None:
    draw = np.random.default_rng(0)
    colour = np.array(["red", "blue", None])[draw.integers(0, 3, 200)]
    frame = pd.DataFrame({"colour": colour, "size": draw.normal(size=200)})
    label = np.where((colour == "red") ^ (draw.random(200) < 0.05), "yes", "no")
    fitted = VerticalClassifier(settings=BRIEF).fit(frame, label)
    assert set(fitted.predict(frame)) == {"yes", "no"}
    assert fitted.score(frame, label) > 0.85


def test_dates_are_days() -> None:
    draw = np.random.default_rng(0)
    since = pd.Timestamp("2026-01-01") + pd.to_timedelta(draw.integers(0, 300, 200), unit="D")
    frame = pd.DataFrame({"since": since, "size": draw.normal(size=200)})
    labels = np.where(frame["since"] > "2026-05-31", "new", "old")
    model = VerticalClassifier(settings=BRIEF).fit(frame, labels)
    assert model.score(frame, labels) > 0.9
    texts = frame.assign(since=frame["since"].dt.strftime("%Y-%m-%d"))
    assert (model.predict(texts) == model.predict(frame)).all()


def test_a_person_that_stands_twice_is_named(bunch: Any) -> None:
    own, _ = parties(bunch)
    lab = pd.DataFrame({"iron": [1.0, 2.0, 3.0]}, index=["p1", "p2", "p1"])
    with pytest.raises(DataError, match=r"^lab: 1 IDs occur more than once, the first in row 0"):
        VerticalClassifier(passives={"lab": lab}, settings=HELPED).fit(own, bunch.target)


@pytest.mark.filterwarnings("ignore::protocols.errors.UnsafeChoiceWarning")
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

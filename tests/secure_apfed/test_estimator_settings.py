"""Settings of an estimator are parameters of their own, numbers are predicted in their unit, and
sparse rows are refused by party and column.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import secure_apfed
from secure_apfed import VerticalClassifier, VerticalRegressor, run_frames
from secure_apfed.config import Config
from secure_apfed.config.nested import list_parameters, replace_setting
from secure_apfed.errors import ConfigError, DataError

TRAIN: dict[str, Any] = {
    "train": {"epochs": 1, "batch_size": 32, "learning_rate": 0.1, "device": "cpu"},
    "model": {"hidden": [8], "representation": 4, "projection": 4},
}
HELPED: dict[str, Any] = {
    **TRAIN,
    "method": "apfed_r",
    "guard": {"mechanism": "none"},
    "secure_sum": {"scheme": "plain", "clip": None, "allow_single_passive": True},
}
Estimator = VerticalClassifier | VerticalRegressor
KINDS = (VerticalClassifier, VerticalRegressor)


def rows(count: int = 64) -> tuple[pd.DataFrame, pd.DataFrame, "pd.Series[float]"]:
    """Return an active's frame, a passive's, and a number that both tell of."""
    z_N3 = np.random.default_rng(0).normal(size=(count, 3))
    people = [f"p{place}" for place in range(count)]
    own = pd.DataFrame({"a": z_N3[:, 0], "b": z_N3[:, 1]}, index=people)
    theirs = pd.DataFrame({"c": z_N3[:, 2]}, index=people)
    return own, theirs, pd.Series(5000 + 100 * z_N3.sum(1), index=people)


@pytest.mark.parametrize("kind", KINDS)
def test_every_setting_is_listed_with_the_value_that_holds(kind: type[Estimator]) -> None:
    estimator = kind(settings={"train": {"epochs": 3}})
    found = estimator.get_params()
    assert found["settings__train__epochs"] == 3
    assert found["settings__train__batch_size"] == Config.model_fields["train"].default.batch_size
    assert found["settings__guard__mechanism"] == "none"
    assert found["settings__task"] == estimator._task
    assert set(kind().get_params(deep=False)) == {"passives", "settings", "seed"}
    assert not [name for name in found if name.startswith("settings__data")]


@pytest.mark.parametrize("settings", [None, {}, HELPED, {"method": {"name": "votes"}}])
def test_setting_all_that_is_listed_changes_nothing(settings: dict[str, Any] | None) -> None:
    estimator = VerticalClassifier({"lab": rows()[1]} if settings else None, settings)
    before = estimator.get_params()
    estimator.set_params(**before)
    assert estimator.settings == settings
    assert clone(estimator).settings == settings


@pytest.mark.parametrize(
    ("settings", "changes", "expected"),
    [
        (None, {"train__epochs": 3}, {"train": {"epochs": 3}}),
        (
            {"train": {"epochs": 2}},
            {"train__batch_size": 8},
            {"train": {"epochs": 2, "batch_size": 8}},
        ),
        (
            {"method": "votes"},
            {"method__epsilon": 2.0},
            {"method": {"name": "votes", "epsilon": 2.0}},
        ),
        (
            {"method": "votes"},
            {"method__epsilon": 2.0, "method": "votes_randomised"},
            {"method": {"name": "votes_randomised", "epsilon": 2.0}},
        ),
        (None, {"passives__lab__weight": 0.5}, {"passives": {"lab": {"weight": 0.5}}}),
        (None, {"train": {"epochs": 4}}, {"train": {"epochs": 4}}),
        (None, {"guard__clip": 2.0}, {"guard": {"mechanism": "none", "clip": 2.0}}),
    ],
)
def test_one_setting_is_set_beside_the_others(
    settings: dict[str, Any] | None, changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    given = copy.deepcopy(settings)
    estimator = VerticalClassifier(settings=settings)
    estimator.set_params(**{f"settings__{key}": value for key, value in changes.items()})
    assert estimator.settings == expected
    assert settings == given, "what the caller gave is changed"


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("settings__train__epoch", "settings__train__epochs"),
        ("settings__trane__epochs", "settings__train__epochs"),
        ("epochs", "settings__train__epochs"),
        ("sed", "seed"),
        ("setting", "settings"),
        ("settings__guard__epsilom", "settings__guard__epsilon"),
        ("settings__data__limit", "frames stand for settings.data"),
        ("settings__seed", "the parameter seed"),
        ("passives__lab", "get_params() lists all"),
        ("settings__", "get_params() lists all"),
        ("settings__train__epochs__more", "get_params() lists all"),
        ("settings__method__epsilon", "get_params() lists all"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_parameter_names_the_nearest(
    kind: type[Estimator], name: str, nearest: str
) -> None:
    estimator = kind()
    with pytest.raises(ValueError, match="Invalid parameter") as told:
        estimator.set_params(**{name: 3})
    assert nearest in str(told.value)
    assert kind.__name__ in str(told.value)
    assert estimator.settings is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_search_goes_over_settings_in_a_pipeline(kind: type[Estimator]) -> None:
    own, _, number = rows()
    labels = number if kind is VerticalRegressor else number > number.median()
    name = kind.__name__.lower()
    piped = make_pipeline(StandardScaler().set_output(transform="pandas"), kind(settings=TRAIN))
    # numpy's numbers, as searches draw them
    grid = {f"{name}__settings__train__epochs": np.array([1, 2])}
    search = GridSearchCV(piped, grid, cv=2).fit(own, labels)
    assert search.best_params_.keys() == grid.keys()
    assert search.best_estimator_[name].settings["train"]["epochs"] in (1, 2)
    assert search.best_estimator_[name].result_ is not None
    assert piped[name].settings == TRAIN


def test_a_setting_changes_the_run() -> None:
    own, _, number = rows()
    few = VerticalRegressor(settings=TRAIN).fit(own, number)
    many = clone(few).set_params(settings__train__epochs=12).fit(own, number)
    assert many.score(own, number) > few.score(own, number)


def test_numbers_are_predicted_in_their_unit_with_others_help() -> None:
    own, theirs, number = rows()
    settings = {**HELPED, "train": {**TRAIN["train"], "epochs": 15, "learning_rate": 0.03}}
    regressor = VerticalRegressor({"lab": theirs}, settings).fit(own, number)
    predicted = regressor.predict(own)
    assert predicted.shape == (len(own),)
    assert predicted.dtype == np.float64
    assert 4500 < predicted.mean() < 5500
    assert regressor.score(own, number) > 0.15
    assert len(regressor.result_.recording.alignment["lab"]) == len(own)


@pytest.mark.parametrize(
    ("kind", "y", "says"),
    [
        (VerticalRegressor, ["x"] * 64, "take VerticalClassifier where these are classes"),
        (VerticalRegressor, [np.inf] * 64, "infinity"),
        (VerticalRegressor, [None] * 64, "each row of X needs its label"),
        (VerticalClassifier, np.linspace(0.1, 1.2, 64), "continuous"),
    ],
)
def test_labels_of_the_other_task_are_refused(kind: type[Estimator], y: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        kind(settings=TRAIN).fit(rows()[0], y)


@pytest.mark.parametrize(
    ("kind", "settings", "says"),
    [
        (VerticalRegressor, {"task": "classification"}, "take VerticalClassifier for classes"),
        (VerticalClassifier, {"task": "regression"}, "take VerticalRegressor for numbers"),
        (VerticalClassifier, 3, "expected a mapping of a run's sections"),
    ],
)
def test_settings_of_another_task_name_the_estimator_to_take(
    kind: type[Estimator], settings: Any, says: str
) -> None:
    own, _, number = rows()
    labels = number if kind is VerticalRegressor else number > 5000
    with pytest.raises(ConfigError, match=says):
        kind(settings=settings).fit(own, labels)


def test_both_estimators_are_everyday_names() -> None:
    assert {"VerticalClassifier", "VerticalRegressor"} <= set(secure_apfed.__all__)


def sparse(frame: pd.DataFrame) -> pd.DataFrame:
    last = frame.columns[-1]
    return frame.assign(**{last: pd.arrays.SparseArray(frame[last])})


def fit(own: Any, theirs: Any) -> None:
    VerticalRegressor({"lab": theirs}, HELPED).fit(own, rows()[2])


def predict(own: Any, theirs: Any) -> None:
    del theirs
    dense, _, number = rows()
    VerticalRegressor(settings=TRAIN).fit(dense, number).predict(own)


def join(own: Any, theirs: Any) -> None:
    frames = [
        frame.assign(id=rows()[0].index) if isinstance(frame, pd.DataFrame) else frame
        for frame in (own, theirs)
    ]
    if isinstance(frames[0], pd.DataFrame):
        frames[0] = frames[0].assign(label=rows()[2].to_numpy() > 5000)
    run_frames(frames[0], {"lab": frames[1]}, label="label", **HELPED)


@pytest.mark.parametrize("use", [fit, predict, join], ids=lambda use: str(use.__name__))
@pytest.mark.parametrize("container", [scipy.sparse.csr_matrix, scipy.sparse.coo_array])
def test_sparse_matrices_are_refused_with_what_to_do(
    use: Callable[[Any, Any], None], container: Callable[[Any], Any]
) -> None:
    own, theirs, _ = rows()
    with pytest.raises(DataError, match=r"^active: .* got a sparse .*toarray\(\)"):
        use(container(own.to_numpy()), theirs)


@pytest.mark.parametrize(
    ("use", "party", "column"),
    [
        (fit, "active", "b"),
        (fit, "lab", "c"),
        (predict, "active", "b"),
        (join, "active", "b"),
        (join, "lab", "c"),
    ],
)
def test_sparse_columns_are_refused_by_party_and_name_and_the_advice_works(
    use: Callable[[Any, Any], None], party: str, column: str
) -> None:
    own, theirs, _ = rows()
    frames: Mapping[str, pd.DataFrame] = {"active": own, "lab": theirs}
    spoilt = {**frames, party: sparse(frames[party])}
    with pytest.raises(DataError, match=f"^{party}: column '{column}': expected dense") as told:
        use(spoilt["active"], spoilt["lab"])
    advice = str(told.value).partition("dense: ")[2]
    typed: dict[str, Any] = {"frame": spoilt[party], "pd": pd}
    exec(advice, typed)
    pd.testing.assert_frame_equal(typed["frame"], frames[party])


def test_flat_names_lead_to_every_declared_setting() -> None:
    listed = list_parameters({"method": "votes"}, {})
    changed = {key: replace_setting({"method": "votes"}, key, listed[key]) for key in listed}
    assert not [key for key, settings in changed.items() if not settings]
    with pytest.raises(KeyError, match="train__nothing"):
        replace_setting({}, "train__nothing", 1)

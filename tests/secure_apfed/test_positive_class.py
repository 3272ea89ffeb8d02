"""The positive class of two: which it is, what follows from it, and when it is never predicted."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from pydantic import ValidationError

from secure_apfed import Config, run
from secure_apfed.config.file import dump_settings, load_config_text
from secure_apfed.data import load_data
from secure_apfed.data.records import VerticalData
from secure_apfed.errors import DataError
from secure_apfed.runs.outcome import describe_unpredicted_classes

ROWS = 120


def settings_of(folder: Path, **data: Any) -> dict[str, Any]:
    parties = {"bank": {"file": "bank.csv"}, "shop": {"file": "shop.csv"}}
    own = {
        "dataset": "tables",
        "active": "bank",
        "folder": str(folder),
        "id_column": "id",
        "label_column": "late",
        "parties": parties,
        **data,
    }
    return {
        "name": "small",
        "method": "single_view",
        "party_seeds": "shared_for_comparison",
        "data": own,
        "model": {"network": "random_features"},
        "train": {"epochs": 1},
        "guard": {"mechanism": "none"},
    }


def write_tables(folder: Path, share: float, rare: str = "J", other: str = "N") -> None:
    random = np.random.default_rng(3)
    score = random.normal(size=ROWS)
    late = np.where(score >= np.quantile(score, 1 - share), rare, other)
    columns = {"id": range(ROWS), "x": score + random.normal(0, 0.4, ROWS), "late": late}
    pd.DataFrame(columns).to_csv(folder / "bank.csv", index=False)
    pd.DataFrame({"id": range(ROWS), "u": random.normal(size=ROWS)}).to_csv(
        folder / "shop.csv", index=False
    )


def load(folder: Path, **data: Any) -> VerticalData:
    config = Config.model_validate(settings_of(folder, **data))
    return load_data(config.data, seed=0)


@pytest.mark.parametrize(("rare", "other"), [("J", "N"), ("N", "J"), ("1", "0"), ("-1", "1")])
def test_the_rarer_class_is_positive_whatever_its_name(
    rare: str, other: str, tmp_path: Path
) -> None:
    write_tables(tmp_path, 0.1, rare, other)
    data = load(tmp_path)
    assert data.classes == (other, rare)
    labels = data.active.labels
    assert labels is not None
    assert int((labels == 1).sum()) == ROWS // 10


@pytest.mark.parametrize("positive", ["J", "N"])
def test_a_named_class_is_positive(positive: str, tmp_path: Path) -> None:
    write_tables(tmp_path, 0.1)
    assert load(tmp_path, positive=positive).classes[1] == positive
    listed = load(tmp_path, positive=positive, classes=["J", "N"])
    assert listed.classes[1] == positive


def test_a_list_of_classes_keeps_its_order(tmp_path: Path) -> None:
    write_tables(tmp_path, 0.1)
    assert load(tmp_path, classes=["J", "N"]).classes == ("J", "N")


def test_a_split_that_reads_no_label_reads_none_for_the_positive_class(tmp_path: Path) -> None:
    write_tables(tmp_path, 0.1)
    assert load(tmp_path, split="at_random").classes == ("J", "N")
    private = settings_of(tmp_path) | {
        "labels": {"mechanism": "randomised_response", "epsilon": 1.0}
    }
    config = Config.model_validate(private)
    assert load_data(config.data, seed=0).classes == ("J", "N")


def test_the_choice_moves_nobody_to_another_split(tmp_path: Path) -> None:
    write_tables(tmp_path, 0.1)
    chosen = load(tmp_path, positive="J", labelled=20)
    other = load(tmp_path, positive="N", labelled=20)
    assert torch.equal(chosen.train_rows, other.train_rows)
    assert torch.equal(chosen.test_rows, other.test_rows)
    assert torch.equal(chosen.labelled_rows, other.labelled_rows)
    assert chosen.active.labels is not None
    assert other.active.labels is not None
    assert torch.equal(chosen.active.labels, 1 - other.active.labels)


def test_a_built_in_set_takes_one_too() -> None:
    settings = {"dataset": "breast_cancer", "positive": "malignant"}
    config = Config.model_validate(
        {
            "name": "small",
            "method": "single_view",
            "data": settings,
            "model": {"network": "random_features"},
            "guard": {"mechanism": "none"},
        }
    )
    data = load_data(config.data, seed=0)
    assert data.classes == ("benign", "malignant")
    assert data.active.labels is not None
    assert int((data.active.labels == 1).sum()) == 212


def test_labels_of_passives_follow(tmp_path: Path) -> None:
    write_tables(tmp_path, 0.1)
    shop = pd.read_csv(tmp_path / "shop.csv")
    shop["late"] = pd.read_csv(tmp_path / "bank.csv")["late"]
    shop.to_csv(tmp_path / "shop.csv", index=False)
    more = {"classes": ["J", "N"], "positive": "J", "labels_at": ["shop"]}
    settings = settings_of(tmp_path, **more) | {"method": "tvfl"}
    config = Config.model_validate(settings_of(tmp_path, **more)).data
    data = load_data(config, seed=0)
    assert settings["method"] == "tvfl"
    assert data.classes == ("N", "J")
    assert data.passives[0].labels is not None
    known = data.passives[0].labels >= 0
    assert 0 < float(data.passives[0].labels[known].double().mean()) < 0.2
    assert config.collect_terms()["positive"] == "J"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"positive": "Q"}, "expected one of two classes, got 'Q' of J, N"),
        ({"positive": "J", "classes": ["J", "N", "?"]}, "expected one of two classes"),
        ({"positive": "J", "classes": "numbers"}, "labels are numbers"),
        ({"dataset": "digits", "positive": "3"}, "expected one of two classes"),
    ],
)
def test_what_is_no_class_is_refused(data: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_tables(tmp_path, 0.1)
    settings = settings_of(tmp_path, **data)
    if "dataset" in data:
        settings["data"] = data
    with pytest.raises((ValidationError, DataError), match=message):
        load_data(Config.model_validate(settings).data, seed=0)


# Methods that predict alone and together, of two classes and of more; what a run reads, and does.
ADVISED: dict[str, tuple[dict[str, Any], str | None]] = {
    "alone": ({"method": "single_view", "threshold": 0.999}, "threshold=balanced_accuracy"),
    "a threshold that was chosen so": (
        {"method": "single_view", "threshold": "balanced_accuracy"},
        "train.class_weights=balanced",
    ),
    "under dp_sgd": (
        {"method": "single_view", "dp_sgd": {"epsilon": 1.0}, "model": {"network": "mlp"}},
        "threshold=0.1",
    ),
    "together, by sums": (
        {
            "method": "split_nn_sum",
            "secure_sum": {"scheme": "plain", "masks": "pairwise"},
            "model": {"network": "mlp"},
        },
        "train.class_weights=balanced",
    ),
    "together": (
        {"method": "tvfl", "model": {"network": "mlp"}},
        "train.class_weights=balanced",
    ),
    "together, weighed": (
        {"method": "tvfl", "model": {"network": "mlp"}, "train": {"class_weights": "balanced"}},
        None,
    ),
}


@pytest.mark.parametrize("case", ADVISED)
def test_what_is_advised_where_a_class_is_never_predicted_is_taken(
    case: str, tmp_path: Path
) -> None:
    settings, advised = ADVISED[case]
    config = Config.model_validate(settings_of(tmp_path) | settings)
    threshold = 0.25 if config.method.can_predict_locally and config.dp_sgd is None else None
    text = describe_unpredicted_classes(config, {"J": threshold})
    assert text is not None
    assert text.startswith("no test row is given class J; ")
    if advised is None:
        assert "rank rows by p(J) of its predictions" in text
        return
    key, _, value = advised.partition("=")
    assert f"{key}: {value}" in text
    load_config_text(dump_settings(config), overrides=[advised])


def test_classes_that_are_never_predicted_stand_in_one_sentence(tmp_path: Path) -> None:
    config = Config.model_validate(settings_of(tmp_path))
    text = describe_unpredicted_classes(config, {"1": None, "6": None})
    assert text is not None
    assert text.startswith("no test row is given any of the classes 1, 6; ")
    assert describe_unpredicted_classes(config, {}) is None


@pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
@pytest.mark.parametrize("method", ["split_nn_sum", "tvfl", "split_nn"])
def test_a_class_that_parties_never_predict_together_is_named(method: str, tmp_path: Path) -> None:
    """Their model needs all parties for each row, so nothing is known of training rows."""
    write_tables(tmp_path, 0.1)
    settings = settings_of(tmp_path) | {
        "method": method,
        "model": {"network": "mlp", "hidden": [4], "representation": 1},
        "train": {"epochs": 1, "learning_rate": 1e-6},
        "secure_sum": {"scheme": "plain", "masks": "pairwise", "allow_single_passive": True},
        "passives": {"shop": {"allow_reading_all": True}},
    }
    result = run(Config.model_validate(settings), None)
    assert len(result.never_predicted) == 1, "one step predicts one class alone"
    assert set(result.never_predicted.values()) == {None}


def test_a_class_that_is_never_predicted_is_named_with_a_threshold(tmp_path: Path) -> None:
    write_tables(tmp_path, 0.1)
    settings = settings_of(tmp_path) | {"calibration": "none", "threshold": 0.999}
    result = run(Config.model_validate(settings), tmp_path / "run")
    assert set(result.never_predicted) == {"J"}
    threshold = result.never_predicted["J"]
    assert threshold is not None
    settings["threshold"] = threshold
    again = run(Config.model_validate(settings), None)
    assert again.never_predicted == {}
    assert again.ranking is not None
    assert again.ranking.class_name == "J"

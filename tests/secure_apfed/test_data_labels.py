"""Spellings of one label are refused with their counts, wherever labels enter; classes are not."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from secure_apfed import run_frames
from secure_apfed.data.labels import class_labels
from secure_apfed.data.tables import load_own_tables
from secure_apfed.errors import DataError, SuspectColumnWarning
from secure_apfed.estimator import VerticalClassifier
from secure_apfed.settings.data import DataSettings

ROWS = 24
# Spellings of one label, beside which another label stands.
ALIKE = (
    ("1", "1.0"), ("1", "01"), ("1", "+1"), ("1", "1e0"), ("10", "1E1"), ("1", "\uff11"),
    ("0.5", ".50"), ("1.5", "1,5"), ("-1", "\u22121"), ("1", "1\u200b"), ("Yes", "yes"),
    ("YES", "yes"), ("y", "yes"), ("True", "TRUE"), ("true", "T"), ("true", "1"),
    ("caf\u00e9", "cafe\u0301"), ("stra\u00dfe", "STRASSE"), ("yes", "\uff59\uff45\uff53"),
    ("1,000", "1000"), ("1 000 000", "1000000"), ("1\u2019000", "1000"), ("50%", "50 %"),
    ("1", "\u0661"), ('"yes"', "yes"), ("class 1", "class1"), ("non-spam", "nonspam"),
    ("\u00bd", "1/2"), ("not spam", "not_spam"),
    ("not spam", "not\u00a0 spam"), ("9" * 5000, "9" * 5000 + ".0"),
)  # fmt: skip
# Labels that are as many classes.
CLASSES = (
    ("--1", "1"), ("9" * 5000, "1"), ("-1", "1"), ("1", "10"), ("A-", "A"), ("T", "Y", "F", "N"),
    ("a1", "a01"), ("1-2", "12"), ("1 2", "12"), ("1,000", "2"), ("\u00e9", "e"),
    ("1e99999999999999999999", "1"), ("<=50K", ">50K"), ("\u0661", "x"),
)  # fmt: skip


def rows_of(labels: Sequence[str]) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    told = [labels[row % len(labels)] for row in range(ROWS)]
    return pd.DataFrame({"id": range(ROWS), "x": rng.normal(size=ROWS), "y": told})


def from_file(labels: Sequence[str], folder: Path, name: str, **settings: Any) -> tuple[str, ...]:
    frame = rows_of(labels)
    if name.endswith("csv"):
        frame.to_csv(folder / name, index=False)
    else:
        frame.astype({"y": "category"}).to_parquet(folder / name)
    data = DataSettings.model_validate(
        {"dataset": "tables", "active": "bank", "label_column": "y", "folder": folder,
         "parties": {"bank": {"file": name}, "shop": {"file": name}}} | settings
    )  # fmt: skip
    return load_own_tables(data, "bank", seed=0).classes


def from_csv(labels: Sequence[str], folder: Path) -> tuple[str, ...]:
    return from_file(labels, folder, "bank.csv")


def from_parquet(labels: Sequence[str], folder: Path) -> tuple[str, ...]:
    return from_file(labels, folder, "bank.parquet")


def from_frames(labels: Sequence[str], folder: Path) -> tuple[str, ...]:
    frame = rows_of(labels)
    found = run_frames(
        frame, {"shop": frame[["id", "x"]]}, label="y", method="single_view", baselines=False,
        train={"epochs": 1},
    )  # fmt: skip
    return tuple(found.model.classes_)


def from_estimator(labels: Sequence[str], folder: Path) -> tuple[str, ...]:
    frame = rows_of(labels)
    model = VerticalClassifier(settings={"train": {"epochs": 1}})
    return tuple(model.fit(frame[["x"]], frame["y"]).classes_)


ENTRANCES = (from_csv, from_parquet, from_frames, from_estimator)
Entrance = Callable[[Sequence[str], Path], tuple[str, ...]]


def test_spellings_of_one_label_are_refused() -> None:
    for labels in ALIKE:
        with pytest.raises(DataError, match=r"in several ways") as refused:
            class_labels((*labels, "other") * 8, None, party="bank", column="y")
        assert re.findall(r"\((\d+) rows\)", str(refused.value)) == ["8", "8"], labels
        assert len(str(refused.value)) < 500, labels


@pytest.mark.parametrize("enter", ENTRANCES)
def test_spellings_are_refused_wherever_labels_enter(enter: Entrance, tmp_path: Path) -> None:
    for labels in (("1", "1.0"), ("caf\u00e9", "cafe\u0301")):
        with pytest.raises(DataError, match=r"in several ways") as refused:
            enter((*labels, "other"), tmp_path)
        assert re.findall(r"\((\d+) rows\)", str(refused.value)) == ["8", "8"]


def test_labels_that_differ_are_classes(tmp_path: Path) -> None:
    for labels in CLASSES:
        assert set(class_labels(labels * 8, None, party="bank", column="y")[1]) == set(labels)
    for enter in (from_csv, from_estimator):
        assert set(enter(("A-", "A"), tmp_path)) == {"A-", "A"}


def test_spellings_that_are_listed_are_classes_and_no_others_are(tmp_path: Path) -> None:
    listed = {"classes": ["c", "C", "d"]}
    assert from_file(("c", "C", "d"), tmp_path, "bank.csv", **listed) == ("c", "C", "d")
    with pytest.raises(DataError, match=r"'d' \(8 rows\) and 'D' \(8 rows\)"):
        from_file(("c", "d", "D"), tmp_path, "bank.csv", **listed)
    with pytest.raises(DataError, match="8 labels lie outside the classes c, C, d, such as e"):
        from_file(("c", "d", "e"), tmp_path, "bank.csv", **listed)
    with pytest.raises(ValueError, match="named twice"):
        from_file(("c", "d"), tmp_path, "bank.csv", classes=["c", "d", "c "])


def test_a_passive_with_labels_spells_them_as_the_settings_do(tmp_path: Path) -> None:
    rows_of(("no", "Yes")).to_csv(tmp_path / "shop.csv", index=False)
    data = DataSettings.model_validate(
        {"dataset": "tables", "active": "bank", "label_column": "y", "folder": tmp_path,
         "labels_at": ["shop"], "classes": ["no", "yes"],
         "parties": {"bank": {"file": "bank.csv"}, "shop": {"file": "shop.csv"}}}
    )  # fmt: skip
    with pytest.raises(
        DataError, match=r"^shop: column 'y' .*'Yes' \(12 rows\) and 'yes' \(0 rows"
    ):
        load_own_tables(data, "shop", seed=0)


def test_an_anomaly_has_one_spelling_and_what_is_normal_has_any(tmp_path: Path) -> None:
    told = from_file(("ok", "OK", "fraud"), tmp_path, "bank.csv", anomaly="fraud")
    assert told == ("normal", "anomaly")
    with pytest.raises(DataError, match=r"'Fraud' \(8 rows\)"):
        from_file(("ok", "Fraud", "fraud"), tmp_path, "bank.csv", anomaly="fraud")


def test_a_number_to_predict_is_written_as_one(tmp_path: Path) -> None:
    assert from_file(("1", "2.5e0", "+3"), tmp_path, "bank.csv", classes="numbers") == ()
    for text in ("1_000", "\uff11", "--1", "True", "inf", "9" * 5000, "1,5"):
        with pytest.raises(DataError, match=r"row 1 \(from 0\) has") as refused:
            from_file(("1", text), tmp_path, "bank.csv", classes="numbers")
        assert len(str(refused.value)) < 300


@pytest.mark.parametrize("enter", ENTRANCES)
def test_a_word_for_nothing_is_told(enter: Entrance, tmp_path: Path) -> None:
    with pytest.warns(SuspectColumnWarning, match=r"labels 'nan' \(8\)"):
        enter(("a", "b", "nan"), tmp_path)


def test_surrounding_blanks_are_no_part_of_a_label(tmp_path: Path) -> None:
    for enter in (from_csv, from_parquet, from_frames):
        assert enter(("yes", " yes", "yes\u00a0", "no"), tmp_path) == ("no", "yes")
    with pytest.raises(DataError, match=r"'yes' \(8 rows\)"):  # its classes are the caller's own
        from_estimator(("yes", " yes", "no"), tmp_path)

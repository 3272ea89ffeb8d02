"""Labels: spellings of one are refused with their counts, wherever labels enter; those of common
people are looked at before training, by every method and entrance.
"""

import json
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from secure_apfed import run_frames
from secure_apfed.cli import execute
from secure_apfed.config import Config
from secure_apfed.data import PartyTable, VerticalData, load_data
from secure_apfed.data.labels import encode_class_labels
from secure_apfed.data.tables import load_own_tables
from secure_apfed.errors import DataError, FewRowsWarning, SuspectColumnWarning
from secure_apfed.interfaces.estimator import VerticalClassifier
from secure_apfed.measures.intervals import MIN_ROWS
from secure_apfed.methods import METHODS
from secure_apfed.runs.run import run
from secure_apfed.settings.data import DataSettings
from tests.secure_apfed.small_runs import read_stderr, run_as_json, small_config

pytestmark = [
    pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning"),
]

ROWS = 24
# Spellings of one label, beside which another label stands.
ALIKE = (
    ("1", "1.0"),
    ("1", "01"),
    ("1", "+1"),
    ("1", "1e0"),
    ("10", "1E1"),
    ("1", "\uff11"),
    ("0.5", ".50"),
    ("1.5", "1,5"),
    ("-1", "\u22121"),
    ("1", "1\u200b"),
    ("Yes", "yes"),
    ("YES", "yes"),
    ("y", "yes"),
    ("True", "TRUE"),
    ("true", "T"),
    ("true", "1"),
    ("caf\u00e9", "cafe\u0301"),
    ("stra\u00dfe", "STRASSE"),
    ("yes", "\uff59\uff45\uff53"),
    ("1,000", "1000"),
    ("1 000 000", "1000000"),
    ("1\u2019000", "1000"),
    ("50%", "50 %"),
    ("1", "\u0661"),
    ('"yes"', "yes"),
    ("class 1", "class1"),
    ("non-spam", "nonspam"),
    ("\u00bd", "1/2"),
    ("not spam", "not_spam"),
    ("not spam", "not\u00a0 spam"),
    ("9" * 5000, "9" * 5000 + ".0"),
)
# Labels that are as many classes.
CLASSES = (
    ("--1", "1"),
    ("9" * 5000, "1"),
    ("-1", "1"),
    ("1", "10"),
    ("A-", "A"),
    ("T", "Y", "F", "N"),
    ("a1", "a01"),
    ("1-2", "12"),
    ("1 2", "12"),
    ("1,000", "2"),
    ("\u00e9", "e"),
    ("1e99999999999999999999", "1"),
    ("<=50K", ">50K"),
    ("\u0661", "x"),
)


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
        {
            "dataset": "tables",
            "active": "bank",
            "label_column": "y",
            "folder": folder,
            "parties": {"bank": {"file": name}, "shop": {"file": name}},
        }
        | settings
    )
    return load_own_tables(data, "bank", seed=0).classes


from_csv = partial(from_file, name="bank.csv")
from_parquet = partial(from_file, name="bank.parquet")


def from_frames(labels: Sequence[str], folder: Path) -> tuple[str, ...]:
    frame = rows_of(labels)
    found = run_frames(
        frame,
        {"shop": frame[["id", "x"]]},
        label="y",
        method="single_view",
        baselines=False,
        train={"epochs": 1},
    )
    return tuple(found.model.classes_)


def from_estimator(labels: Sequence[str], folder: Path) -> tuple[str, ...]:
    frame = rows_of(labels)
    model = VerticalClassifier(settings={"train": {"epochs": 1}})
    return tuple(model.fit(frame[["x"]], frame["y"]).classes_)


ENTRANCES = (from_csv, from_parquet, from_frames, from_estimator)
Entrance = Callable[[Sequence[str], Path], tuple[str, ...]]


def name_labels(labels: Any) -> str:
    """Name a case by its labels."""
    return " ".join(label[:9] for label in labels)


@pytest.mark.parametrize("labels", ALIKE, ids=name_labels)
def test_spellings_of_one_label_are_refused(labels: tuple[str, ...]) -> None:
    with pytest.raises(DataError, match=r"in several ways") as refused:
        encode_class_labels((*labels, "other") * 8, None, party="bank", column="y")
    assert re.findall(r"\((\d+) rows\)", str(refused.value)) == ["8", "8"]
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("labels", [("1", "1.0"), ("caf\u00e9", "cafe\u0301")], ids=name_labels)
@pytest.mark.parametrize("enter", ENTRANCES)
def test_labels_are_looked_at_wherever_they_enter(
    enter: Entrance, labels: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"in several ways.*\(8 rows\).*\(8 rows\)"):
        enter((*labels, "other"), tmp_path)


@pytest.mark.parametrize("enter", ENTRANCES)
def test_labels_that_name_nothing_are_told_wherever_they_enter(
    enter: Entrance, tmp_path: Path
) -> None:
    with pytest.warns(SuspectColumnWarning, match=r"labels 'nan' \(8\)"):
        enter(("a", "b", "nan"), tmp_path)


@pytest.mark.parametrize("labels", CLASSES, ids=name_labels)
def test_labels_that_differ_are_classes(labels: tuple[str, ...]) -> None:
    assert set(encode_class_labels(labels * 8, None, party="bank", column="y")[1]) == set(labels)


@pytest.mark.parametrize("enter", [from_csv, from_estimator])
def test_labels_that_differ_enter_as_classes(enter: Entrance, tmp_path: Path) -> None:
    assert set(enter(("A-", "A"), tmp_path)) == {"A-", "A"}


def test_spellings_that_are_listed_are_classes_and_no_others_are(tmp_path: Path) -> None:
    listed = ["c", "C", "d"]
    assert from_csv(("c", "C", "d"), tmp_path, classes=listed) == ("c", "C", "d")
    with pytest.raises(DataError, match=r"'d' \(8 rows\) and 'D' \(8 rows\)"):
        from_csv(("c", "d", "D"), tmp_path, classes=listed)
    with pytest.raises(DataError, match="8 labels lie outside the classes c, C, d, such as e"):
        from_csv(("c", "d", "e"), tmp_path, classes=listed)
    with pytest.raises(ValueError, match="named twice"):
        from_csv(("c", "d"), tmp_path, classes=["c", "d", "c "])


def test_a_number_to_predict_is_written_as_one(tmp_path: Path) -> None:
    assert from_csv(("1", "2.5e0", "+3"), tmp_path, classes="numbers") == ()


@pytest.mark.parametrize(
    "text",
    ["1_000", "\uff11", "--1", "True", "inf", "9" * 5000, "1,5"],
    ids=lambda text: text[:9],
)
def test_what_is_no_number_is_none_to_predict(text: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"row 1 \(from 0\) has") as refused:
        from_csv(("1", text), tmp_path, classes="numbers")
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("enter", [from_csv, from_parquet, from_frames])
def test_surrounding_blanks_are_no_part_of_a_label(enter: Entrance, tmp_path: Path) -> None:
    assert enter(("yes", " yes", "yes\u00a0", "no"), tmp_path) == ("yes", "no")


def test_blanks_are_a_part_of_an_estimator_s_labels(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'yes' \(8 rows\)"):  # its classes are the caller's own
        from_estimator(("yes", " yes", "no"), tmp_path)


ALIGNING = [name for name, method in METHODS.items() if method.public_facts.needs_alignment]
# They learn from labels of people whom only the active knows, too.
EVERYBODY = ("apfed", "apfed_r", "apfed_c", "vfedtrans")
Rows = Callable[[VerticalData], Tensor]


def config_of(method: str, **data: Any) -> Config:
    data = {"dataset": "breast_cancer", "overlap": 1.0, "labelled": 60, **data}
    config = small_config(method, data=data)
    return config.model_copy(
        update={"train": config.train.model_copy(update={"epochs": 1, "use_unaligned": False})}
    )


def labels_of(data: VerticalData, rows: Tensor | None = None) -> Tensor:
    assert data.active.labels is not None
    return data.active.labels if rows is None else data.active.labels[rows]


def but(data: VerticalData, rows: Tensor) -> Tensor:
    """Everybody but these rows of the active."""
    every = torch.arange(len(data.active.ids))
    return every[~torch.isin(every, rows)]


def malignant(data: VerticalData) -> Tensor:
    return torch.nonzero(labels_of(data) == 0).flatten()


def malignant_tests_at_most(count: int) -> Rows:
    """Everybody but so many malignant test rows that these are left."""
    return lambda data: but(data, data.test_rows[labels_of(data, data.test_rows) == 0][count:])


def data_of(config: Config, common: Rows) -> VerticalData:
    """Load data whose passives know, of the active's people, these rows alone."""
    data = load_data(config.data, seed=config.seed)
    known = {data.active.ids[row] for row in common(data).tolist()}

    def keep_known_rows(table: PartyTable) -> PartyTable:
        kept = [row for row, person in enumerate(table.ids) if person in known]
        ids = tuple(table.ids[row] for row in kept)
        labels_N = None if table.labels is None else table.labels[kept]
        return replace(table, ids=ids, features=table.features[kept], labels=labels_N)

    return replace(data, passives=tuple(map(keep_known_rows, data.passives)))


ONE_CLASS = (
    r"rows that .* \(of 60; the others are not among the \d+ common people\) are all of class "
)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (malignant, f"active: the .* labelled training {ONE_CLASS}malignant"),
        (lambda data: but(data, data.labelled_rows), "none of its 60 labelled training rows"),
    ],
    ids=["one class", "none"],
)
@pytest.mark.parametrize("method", [one for one in ALIGNING if one not in EVERYBODY])
def test_a_method_of_common_people_needs_two_classes_of_them(
    method: str, rows: Rows, says: str
) -> None:
    config = config_of(method)
    with pytest.raises(DataError, match=says):
        run(config, None, data=data_of(config, rows))


RARE = "22 labelled training rows{} that .* are of class malignant, fewer than 30"


@pytest.mark.parametrize("method", EVERYBODY)
def test_who_learns_from_all_labels_needs_two_classes_of_all(method: str) -> None:
    config = config_of(method)
    everybody = config.train.model_copy(update={"use_unaligned": True})
    data = data_of(config, malignant)
    result = run(config.model_copy(update={"train": everybody}), None, data=data)
    assert result.undefined == {}
    if config.method.has_gradient_sum:
        with pytest.raises(DataError, match="all of class malignant"):
            run(config, None, data=data)


def test_a_test_of_one_class_is_refused() -> None:
    config = config_of("tvfl")
    with pytest.raises(DataError, match=r"the \d+ rows that TVFL.* tested on are all of class ben"):
        run(config, None, data=data_of(config, malignant_tests_at_most(0)))
    alone = config_of("single_view")
    data = load_data(alone.data, seed=0)
    test = data.test_rows[labels_of(data, data.test_rows) == 1]
    with pytest.raises(DataError, match=r"tested on are all of class benign"):
        run(alone, None, data=replace(data, test_rows=test))


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (MIN_ROWS, [RARE.format(f" and {MIN_ROWS} test rows")]),
        (
            MIN_ROWS - 1,
            [
                RARE.format(""),
                f" {MIN_ROWS - 1} are of class malignant, fewer than {MIN_ROWS}",
            ],
        ),
    ],
    ids=["as many as are asked for", "one less"],
)
def test_a_test_of_few_rows_of_a_class_is_told(rows: int, expected: list[str]) -> None:
    config = config_of("tvfl")
    with pytest.warns(FewRowsWarning) as warned:
        run(config, None, data=data_of(config, malignant_tests_at_most(rows)))
    told = [str(one.message) for one in warned]
    assert len(told) == len(expected)
    pairs = zip(expected, told, strict=True)
    assert not [(said, one) for said, one in pairs if not re.search(said, one)]


def test_of_several_classes_each_that_is_learnt_is_tested_or_it_is_told() -> None:
    config = config_of("single_view", dataset="wine", labelled=None)
    data = load_data(config.data, seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FewRowsWarning)
        run(config, None, data=data)
    lost = data.train_rows[labels_of(data, data.train_rows) == 2]
    tvfl = config_of("tvfl", dataset="wine", labelled=None)
    with pytest.warns(FewRowsWarning, match="learns nothing of class class_2: none of"):
        run(tvfl, None, data=data_of(tvfl, lambda data: but(data, lost)))
    test = data.test_rows[labels_of(data, data.test_rows) != 2]
    with pytest.warns(FewRowsWarning, match="tested on none is of class"):
        run(config, None, data=replace(data, test_rows=test))


def test_where_passives_have_labels_too_the_active_may_know_one_class() -> None:
    def common(data: VerticalData) -> Tensor:
        return but(data, data.labelled_rows[labels_of(data, data.labelled_rows) == 0])

    config = config_of("mmvfl")
    with pytest.raises(DataError, match="all of class benign"):
        run(config, None, data=data_of(config, common))
    config = config_of("mmvfl", labels_at=["passive-1"])
    assert "mmvfl" in run(config, None, data=data_of(config, common)).accuracy


def test_a_measure_that_no_row_defines_is_a_sentence(tmp_path: Path) -> None:
    config = config_of("joint_teacher_sum").model_copy(update={"measure": "auc"})
    result = run(config, tmp_path / "run", data=data_of(config, malignant_tests_at_most(0)))
    told = "the 89 tested rows are all of one class"
    assert result.undefined["joint_teacher_sum_together"]["auc"] == told
    assert "auc" in result.measures["joint_teacher_sum"]
    stored = json.loads((tmp_path / "run" / "result.json").read_text())
    assert stored["undefined"]["joint_teacher_sum_together"]["auc"] == told
    tvfl = config_of("tvfl")
    with pytest.warns(FewRowsWarning, match="0 of its 142 test rows are among the 427 common"):
        result = run(tvfl, None, data=data_of(tvfl, lambda data: data.train_rows))
    assert result.undefined["tvfl"]["accuracy"] == "no row was tested"


def test_the_plan_counts_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(400, 2)), columns=["x", "u"])
    frame = frame.assign(id=range(400), y=["paid", "late"] * 200)
    path = tmp_path / "run.yaml"

    def write(bank: pd.DataFrame, shop: pd.DataFrame, text: str) -> None:
        bank.to_csv(tmp_path / "bank.csv", index=False)
        shop.to_csv(tmp_path / "shop.csv", index=False)
        path.write_text(
            f"name: t\nguard: {{mechanism: none}}\n{text}\n"
            f"data: {{dataset: tables, active: bank, folder: '{tmp_path}', label_column: y, "
            "parties: {bank: {file: bank.csv, ignore: [u]}, shop: {file: shop.csv}}}\n"
        )

    paid = frame.loc[frame.y == "paid", ["id", "u"]]
    write(frame, paid, "method: tvfl\ntrain: {epochs: 1}")
    assert execute(["plan", str(path)]) == 3
    assert "all of class paid" in read_stderr(capsys)
    text = (
        "method: votes\nmodel: {network: random_features, random_features: 20}\n"
        "secure_sum: {scheme: plain, masks: none, allow_single_passive: true}"
    )
    planned = {}
    for labelled in (400, 24):
        known = frame.assign(y=frame.y.where(frame.id < labelled, None))
        write(known, frame[["id", "u"]], text)
        answer = run_as_json(capsys, "plan", path)
        planned[labelled] = (answer["labelled_rows"], answer["teaching_rows"])
    assert planned == {400: (300, 300), 24: (18, 394)}

"""Common people's labels are looked at before training, by every method and entrance."""

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from secure_apfed.cli import execute
from secure_apfed.config import Config
from secure_apfed.data import PartyTable, VerticalData, load_data
from secure_apfed.errors import DataError, FewRowsWarning
from secure_apfed.estimator import VerticalClassifier
from secure_apfed.intervals import FEWEST_ROWS
from secure_apfed.methods import METHODS
from secure_apfed.runs.run import run
from tests.secure_apfed.small_runs import small_config

pytestmark = [
    pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning"),
    pytest.mark.filterwarnings("ignore::secure_apfed.errors.NoHelpWarning"),
]

ALIGNING = [name for name, method in METHODS.items() if method.declared.aligns]
# They learn from labels of people whom only the active knows, too.
EVERYBODY = ("apfed", "apfed_r", "apfed_c", "vfedtrans")
Rows = Callable[[VerticalData], Tensor]


def config_of(method: str) -> Config:
    data = {"dataset": "breast_cancer", "overlap": 1.0, "labelled": 60}
    config = small_config(method, data=data)
    return config.model_copy(
        update={"train": config.train.model_copy(update={"epochs": 1, "use_unaligned": False})}
    )


def where_common(data: VerticalData, rows: Tensor) -> VerticalData:
    """The same where passives know these people of the active alone."""
    known = {data.active.ids[row] for row in rows.tolist()}

    def of(table: PartyTable) -> PartyTable:
        kept = [row for row, one in enumerate(table.ids) if one in known]
        ids = tuple(table.ids[row] for row in kept)
        labels_N = None if table.labels is None else table.labels[kept]
        return replace(table, ids=ids, features=table.features[kept], labels=labels_N)

    return replace(data, passives=tuple(map(of, data.passives)))


def of_class(one: int) -> Rows:
    def rows(data: VerticalData) -> Tensor:
        assert data.active.labels is not None
        return torch.nonzero(data.active.labels == one).flatten()

    return rows


def without_a_label(data: VerticalData) -> Tensor:
    every = torch.arange(len(data.active.ids))
    return every[~torch.isin(every, data.labelled_rows)]


def all_but(unwanted: int, test_rows: int) -> Rows:
    """Everybody but so many of a class's test rows that these are left."""

    def rows(data: VerticalData) -> Tensor:
        assert data.active.labels is not None
        of_it = data.test_rows[data.active.labels[data.test_rows] == unwanted]
        every = torch.arange(len(data.active.ids))
        return every[~torch.isin(every, of_it[test_rows:])]

    return rows


def data_of(config: Config, common: Rows) -> VerticalData:
    data = load_data(config.data, seed=config.seed)
    return where_common(data, common(data))


ONE_CLASS = (
    r"rows that .* \(of 60; the others are not among the \d+ common people\) are all of class "
)


@pytest.mark.parametrize("method", [one for one in ALIGNING if one not in EVERYBODY])
def test_a_method_of_common_people_needs_two_classes_of_them(method: str) -> None:
    config = config_of(method)
    for rows, told in (
        (of_class(0), f"active: the .* labelled training {ONE_CLASS}malignant"),
        (without_a_label, r"active: none of its 60 labelled training rows is among"),
    ):
        with pytest.raises(DataError, match=told):
            run(config, None, data=data_of(config, rows))


@pytest.mark.parametrize("method", EVERYBODY)
def test_who_learns_from_all_labels_needs_two_classes_of_all(method: str) -> None:
    config = config_of(method)
    everybody = config.train.model_copy(update={"use_unaligned": True})
    data = data_of(config, of_class(0))
    result = run(config.model_copy(update={"train": everybody}), None, data=data)
    assert result.undefined == {}
    if config.method.sums_gradients:
        with pytest.raises(DataError, match="all of class malignant"):
            run(config, None, data=data)


def test_a_test_of_one_class_is_refused() -> None:
    config = config_of("tvfl")
    with pytest.raises(DataError, match=r"the \d+ rows that TVFL.* tested on are all of class ben"):
        run(config, None, data=data_of(config, all_but(0, 0)))
    alone = config_of("single_view")
    data = load_data(alone.data, seed=0)
    assert data.active.labels is not None
    test = data.test_rows[data.active.labels[data.test_rows] == 1]
    with pytest.raises(DataError, match=r"tested on are all of class benign"):
        run(alone, None, data=replace(data, test_rows=test))


def test_a_test_of_few_rows_of_a_class_is_told() -> None:
    config = config_of("tvfl")
    with warnings.catch_warnings():
        warnings.simplefilter("error", FewRowsWarning)
        run(config, None, data=data_of(config, all_but(0, FEWEST_ROWS)))
    with pytest.warns(FewRowsWarning, match=rf" {FEWEST_ROWS - 1} are of class malignant"):
        run(config, None, data=data_of(config, all_but(0, FEWEST_ROWS - 1)))


def test_of_several_classes_each_that_is_learnt_is_tested_or_it_is_told() -> None:
    config = config_of("single_view")
    wine = config.data.model_copy(update={"dataset": "wine", "labelled": None})
    config = config.model_copy(update={"data": wine})
    data = load_data(wine, seed=0)
    assert data.active.labels is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error", FewRowsWarning)
        run(config, None, data=data)
    everybody, tvfl = torch.arange(len(data.active.ids)), config_of("tvfl")
    lost = data.train_rows[data.active.labels[data.train_rows] == 2]
    with pytest.warns(FewRowsWarning, match="learns nothing of class class_2: none of"):
        run(
            tvfl.model_copy(update={"data": wine}),
            None,
            data=where_common(data, everybody[~torch.isin(everybody, lost)]),
        )
    test = data.test_rows[data.active.labels[data.test_rows] != 2]
    with pytest.warns(FewRowsWarning, match="tested on none is of class"):
        run(config, None, data=replace(data, test_rows=test))


def test_where_passives_have_labels_too_the_active_may_know_one_class() -> None:
    def common(data: VerticalData) -> Tensor:
        assert data.active.labels is not None
        known = torch.zeros(len(data.active.ids), dtype=torch.bool)
        known[data.labelled_rows] = True
        return torch.nonzero(~known | (data.active.labels == 1)).flatten()

    config = config_of("mmvfl")
    with pytest.raises(DataError, match="all of class benign"):
        run(config, None, data=data_of(config, common))
    helped = config.data.model_copy(update={"labels_at": ("passive-1",)})
    config = config.model_copy(update={"data": helped})
    assert "mmvfl" in run(config, None, data=data_of(config, common)).accuracy


def test_a_measure_that_no_row_defines_is_a_sentence(tmp_path: Path) -> None:
    config = config_of("joint_teacher").model_copy(update={"measure": "auc"})
    result = run(config, tmp_path / "run", data=data_of(config, all_but(0, 0)))
    told = "the 89 tested rows are all of one class"
    assert result.undefined["joint_teacher_together"]["auc"] == told
    assert "auc" in result.measures["joint_teacher"]
    stored = json.loads((tmp_path / "run" / "result.json").read_text())
    assert stored["undefined"]["joint_teacher_together"]["auc"] == told
    tvfl = config_of("tvfl")
    with pytest.warns(FewRowsWarning, match="0 of its 142 test rows are among the 427 common"):
        result = run(tvfl, None, data=data_of(tvfl, lambda data: data.train_rows))
    assert result.undefined["tvfl"]["accuracy"] == "no row was tested"


def test_the_estimator_refuses_people_of_one_class() -> None:
    rng = np.random.default_rng(0)
    people = pd.Index([f"p{row}" for row in range(60)])
    y = pd.Series(np.arange(60) % 2, index=people)
    active = pd.DataFrame({"x": rng.normal(size=60)}, index=people)
    shop = pd.DataFrame({"u": rng.normal(size=30)}, index=people[y == 1])
    helped = VerticalClassifier(passives={"shop": shop}, settings={
        "method": "tvfl", "train": {"epochs": 1}, "guard": {"mechanism": "none"},
    })  # fmt: skip
    with pytest.raises(DataError, match="are all of class 1"):
        helped.fit(active, y)


def files_of(folder: Path, frame: pd.DataFrame, shop: pd.DataFrame, text: str) -> Path:
    """Files of a bank, with the column y of labels, and a shop; and settings of a run on them."""
    frame.to_csv(folder / "bank.csv", index=False)
    shop.to_csv(folder / "shop.csv", index=False)
    path = folder / "run.yaml"
    path.write_text(
        f"name: t\nguard: {{mechanism: none}}\n{text}\n"
        f"data: {{dataset: tables, active: bank, folder: '{folder}', label_column: y, "
        "parties: {bank: {file: bank.csv, ignore: [u]}, shop: {file: shop.csv}}}\n"
    )
    return path


def test_the_plan_refuses_what_the_run_would_and_counts_the_labels_that_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"id": range(400), "x": rng.normal(size=400), "u": rng.normal(size=400)})
    frame["y"] = np.where(frame.id % 2, "late", "paid")
    paid = frame.loc[frame.y == "paid", ["id", "u"]]
    path = files_of(tmp_path, frame, paid, "method: tvfl\ntrain: {epochs: 1}")
    assert execute(["plan", str(path)]) == 3
    assert "all of class paid" in " ".join(capsys.readouterr().err.replace("│", " ").split())
    text = (
        "method: votes\nmodel: {network: random_features}\n"
        "secure_sum: {scheme: plain, masks: none, allow_single_passive: true}"
    )
    for labelled, case, here in (
        (400, "all rows labelled", "300 of 300"),
        (24, "20 labelled rows", "18 of 394"),
    ):
        known = frame.assign(y=frame.y.where(frame.id < labelled, None))
        path = files_of(tmp_path, known, frame[["id", "u"]], text)
        assert execute(["plan", str(path), "--json"]) == 0
        planned = json.loads(capsys.readouterr().out)
        assert planned["labelled_rows"] == 0.75 * labelled
        assert planned["teaching_rows"] == 400 - 0.25 * labelled
        assert case in planned["help"][0]
        assert planned["help"][0].endswith(f"Here {here} training rows have a label")

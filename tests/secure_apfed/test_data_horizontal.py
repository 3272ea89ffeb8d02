"""Parties with people of their own and labels, passives with labels, and views of features."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from pydantic import ValidationError

from secure_apfed.config import Config
from secure_apfed.data import (
    UNLABELLED,
    PartyTable,
    VerticalData,
    View,
    load_data,
    load_own_tables,
    pack_own,
    read_own,
)
from secure_apfed.data.encoding import fit_views, locate_views
from secure_apfed.data.partition import deal_clients
from secure_apfed.errors import ConfigError, DataError
from secure_apfed.runs.run import run
from secure_apfed.settings.data import DataSettings, ViewColumns

# In these few rows the pulse tells who is sick.
pytestmark = pytest.mark.filterwarnings("ignore::secure_apfed.errors.SuspectColumnWarning")

BREAST = {"dataset": "breast_cancer", "partition": "horizontal", "clients": 3}


def load(**settings: object) -> VerticalData:
    return load_data(DataSettings.model_validate(settings), seed=0)


def labels_of(table: PartyTable) -> torch.Tensor:
    assert table.labels is not None
    return table.labels


def test_horizontal_parties_have_all_features_of_other_people_and_equal_classes() -> None:
    data = load(**BREAST)
    ids = [set(table.ids) for table in data.tables]
    assert not ids[0] & ids[1] | ids[0] & ids[2] | ids[1] & ids[2]
    assert {len(table.ids) for table in data.passives} == {len(data.train_rows)}
    counts = [labels_of(data.active)[data.train_rows].bincount()]
    counts += [labels_of(table).bincount() for table in data.passives]
    assert max((one - counts[0]).abs().max().item() for one in counts) <= 1
    views = {"means": View(0, 10), "errors": View(10, 20), "worst": View(20, 30)}
    for table in data.tables:
        assert table.views == views
        assert table.encoding == data.active.encoding
    # What the encoding is of: the active's training rows and nobody else's.
    own = data.active.features[data.train_rows].double()
    torch.testing.assert_close(own.mean(0), torch.zeros(30).double(), atol=1e-6, rtol=0)


def test_horizontal_images_are_whole() -> None:
    data = load(dataset="digits", partition="horizontal", limit=100)
    assert [tuple(table.features.shape) for table in data.passives] == [(100, 1, 8, 8)] * 3
    assert len(data.train_rows) == 100
    assert not data.active.views


def test_clients_are_dealt_evenly_to_the_last_row() -> None:
    labels = np.repeat([0, 1, 2], [50, 7, 4])
    dealt = deal_clients(labels, np.arange(61), clients=4, limit=None, seed=1)
    assert [len(rows) for rows in dealt] == [15] * 4
    assert len(set(np.concatenate(dealt).tolist())) == 60
    for label, least in ((0, 12), (1, 1), (2, 0)):
        found = [int((labels[rows] == label).sum()) for rows in dealt]
        assert least <= min(found) <= max(found) <= min(found) + 1 + (label == 0)
    few = deal_clients(labels, np.arange(61), clients=2, limit=10, seed=1)
    assert [np.bincount(labels[rows]).tolist() for rows in few] == [[8, 1, 1]] * 2
    with pytest.raises(DataError, match="3 training rows are too few for 4 clients"):
        deal_clients(labels, np.arange(3), clients=4, limit=None, seed=1)


def test_a_labelled_passive_knows_its_training_people_and_no_test_label() -> None:
    data = load(dataset="breast_cancer", labels_at=["passive-2"], overlap=0.8)
    tests = {data.active.ids[row] for row in data.test_rows.tolist()}
    truth = dict(zip(data.active.ids, labels_of(data.active).tolist(), strict=True))
    assert data.passives[0].labels is None
    table = data.passives[1]
    for one, label in zip(table.ids, labels_of(table).tolist(), strict=True):
        assert label == (UNLABELLED if one in tests else truth.get(one, label))
    assert {UNLABELLED, 0, 1} == set(labels_of(table).tolist())
    own = data.own("passive-2")
    assert own is not None
    assert len(own.train_rows) == len(table.ids)
    assert len(own.labelled_rows) == len(table.ids) - len(tests)
    assert own.classes == data.classes


def test_passives_hold_as_few_labels_as_the_active() -> None:
    data = load(labelled=20, **BREAST)
    for name in ("passive-1", "passive-2"):
        own = data.own(name)
        assert own is not None
        assert len(own.labelled_rows) == 20
        assert int((labels_of(own.table) != UNLABELLED).sum()) == 20


def test_settings_that_do_not_fit_a_partition() -> None:
    own = {"active": {"file": "a.csv"}, "b": {"file": "b.csv"}}
    changes: tuple[tuple[dict[str, object], str], ...] = (
        ({"partition": "horizontal", "views": 2}, "leave views out"),
        ({"partition": "horizontal", "aligned": 5}, "leave aligned out"),
        ({**BREAST, "overlap": 0.5, "active_view": 2}, "leave active_view and overlap out"),
        ({**BREAST, "labels_at": ["passive-1"]}, "all parties hold labels; leave it out"),
        ({"clients": 3}, "under partition: horizontal only"),
        ({"labels_at": ["active"]}, "active is no passive; there are passive-1, passive-2"),
        ({"dataset": "breast_cancer", "views": ["means"]}, "of two at least"),
        ({**BREAST, "views": ["mean"]}, "different ones of means, errors, worst"),
        ({"view_columns": {"a": {"columns": ["x"]}}}, "view_columns belong to dataset: tables"),
        ({"dataset": "tables", "partition": "horizontal", "parties": own},
         "must number them alike; list the classes"),
    )  # fmt: skip
    for settings, message in changes:
        with pytest.raises((ValidationError, ConfigError), match=message):
            load(**settings)


def test_natural_views_are_chosen_by_name() -> None:
    assert load(**BREAST, views=["worst", "means"]).active.views == {
        "worst": View(0, 10), "means": View(10, 20),
    }  # fmt: skip
    data = load(dataset="breast_cancer", views=["worst", "means"], active_view=2)
    assert [list(table.views) for table in data.tables] == [["means"], ["worst"]]


def test_methods_that_align_refuse_other_partitions() -> None:
    for data, message in (
        (BREAST, "each party has people of its own; take vertical, or use single_view"),
        ({"dataset": "digits", "labels_at": ["passive-1"]}, "the active alone holds labels"),
    ):
        settings = {"name": "x", "method": "apfed_c", "guard": {"mechanism": "none"}, "data": data}
        with pytest.raises(ValidationError, match=message):
            Config.model_validate(settings)


def test_the_active_alone_trains_on_its_own_people() -> None:
    settings = {
        "name": "own", "method": "single_view", "guard": {"mechanism": "none"}, "data": BREAST,
        "train": {"epochs": 15, "batch_size": 32, "learning_rate": 0.05},
    }  # fmt: skip
    assert run(Config.model_validate(settings), None).accuracy["single_view"] > 0.9


# Three people with sequences of 2, 0 and 3 steps of 2 channels, of at most 3.
SEQUENCES = pd.DataFrame(
    [[2, 3, 0, 4, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0], [3, 5, 0, 5, 0, 5, 0]],
    columns=["steps", *(f"{at}-{channel}" for at in range(3) for channel in "ab")],
)
WALK = {"walk": ViewColumns(columns=tuple(SEQUENCES.columns), sequence=(3, 2))}


def test_a_sequence_keeps_its_length_and_its_padding() -> None:
    encoding = fit_views(SEQUENCES, WALK, source="x")
    features = encoding.encode(SEQUENCES, source="x")
    view = locate_views(encoding, WALK, source="x")["walk"]
    own, steps = features[:, view.columns], features[:, view.columns][:, 1:].reshape(3, 3, 2)
    assert own[:, 0].tolist() == [2, 0, 3]
    scale = (100 / 5) ** 0.5  # of 3, 4, 5, 5, 5; the other channel is always 0
    torch.testing.assert_close(steps[0], torch.tensor([[3, 0], [4, 0], [0, 0]]) / scale)
    with pytest.raises(DataError, match="view 'walk' has steps in use that are not whole"):
        PartyTable("x", ("a", "b", "c"), features + 0.5, None, encoding, {"walk": view})
    with pytest.raises(DataError, match="must follow one another over all its features"):
        PartyTable("x", ("a", "b", "c"), features, None, encoding, {"walk": View(0, 5)})
    with pytest.raises(ValidationError, match=r"3 steps of 3 channels .* are 10 columns, got 7"):
        ViewColumns(columns=tuple(SEQUENCES.columns), sequence=(3, 3))


def test_prepared_rows_carry_labels_and_views(tmp_path: Path) -> None:
    data = load(**BREAST)
    own = data.own("passive-1")
    assert own is not None
    (tmp_path / "t").write_bytes(pack_own(own))
    read = read_own(tmp_path / "t", "passive-1")
    assert read.views == own.views
    assert read.classes == ("malignant", "benign")
    assert torch.equal(read.labelled_rows, own.labelled_rows)
    assert torch.equal(labels_of(read.table), labels_of(own.table))


@pytest.fixture
def hospitals(tmp_path: Path) -> dict[str, object]:
    """Two synthetic hospitals with the same columns, and the settings that read them."""
    draw = np.random.default_rng(0)
    for name, rows in (("north", 40), ("south", 30)):
        frame = pd.DataFrame(draw.normal(size=(rows, 3)), columns=["pulse", "age", "ward"])
        frame["ward"] = np.where(frame["ward"] > 0, "a", "b")
        frame["sick"] = np.where(frame["pulse"] > 0, "yes", "no")
        frame.rename_axis("id").to_csv(tmp_path / f"{name}.csv")
    return {
        "dataset": "tables", "folder": tmp_path, "partition": "horizontal", "active": "north",
        "label_column": "sick", "classes": ["no", "yes"],
        "parties": {name: {"file": f"{name}.csv"} for name in ("south", "north")},
        "view_columns": {
            "stay": {"columns": ["ward", "age"]}, "body": {"columns": ["pulse"]},
        },
    }  # fmt: skip


def test_own_tables_of_hospitals_share_no_people(hospitals: dict[str, object]) -> None:
    settings = DataSettings.model_validate(hospitals)
    data = load_data(settings, seed=0)
    assert data.active.views == {"stay": View(0, 3), "body": View(3, 4)}
    south = load_own_tables(settings, "south", seed=0)
    held = data.own("south")
    assert held is not None
    assert torch.equal(south.table.features, held.table.features)
    assert south.classes == ("no", "yes")
    assert len(south.labelled_rows) == 30
    raw = pd.read_csv(Path(str(hospitals["folder"])) / "south.csv")
    assert labels_of(south.table).tolist() == (raw["sick"] == "yes").astype(int).tolist()


def test_own_tables_that_do_not_fit_their_views(hospitals: dict[str, object]) -> None:
    stay = ["ward", "age", "pulse", "sex"]
    for change, message in (
        ({"view_columns": {"stay": {"columns": ["ward"]}}}, "look at pulse, age"),
        ({"view_columns": {"stay": {"columns": stay}}}, "look at sex"),
        ({"classes": ["yes", "maybe"]}, "outside the classes yes, maybe, such as no"),
    ):
        with pytest.raises(DataError, match=message):
            load(**hospitals | change)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda frame: frame.assign(ward="a"), True),
        (lambda frame: frame.assign(ward=frame["ward"].map({"a": "a", "b": "c"})), True),
        (lambda frame: frame.assign(ward=frame["age"], age=frame["ward"]), True),
        # Where views name columns, they give them their order.
        (lambda frame: frame[["id", "age", "pulse", "ward", "sick"]], False),
    ],
)
def test_hospitals_need_one_encoding(
    hospitals: dict[str, object], change: Callable[[pd.DataFrame], pd.DataFrame], named: bool
) -> None:
    path = Path(str(hospitals["folder"])) / "south.csv"
    if not named:
        del hospitals["view_columns"]
    change(pd.read_csv(path)).to_csv(path, index=False)
    with pytest.raises(DataError, match=r"south: under a horizontal partition .* one encoding"):
        load(**hospitals)


def test_labels_of_passives_are_checked() -> None:
    data = load(**BREAST)
    wrong = replace(data.passives[0], labels=labels_of(data.passives[0]) + 3)
    changes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"labels_at": ("shop",)}, "labels_at: there is no passive shop"),
        ({"horizontal": False}, "passive-1 is passive and holds no labels"),
        ({"passives": (wrong, *data.passives[1:])}, r"passive-1: .* all of 0 to 1"),
    )
    for change, message in changes:
        with pytest.raises(DataError, match=message):
            replace(data, **change)

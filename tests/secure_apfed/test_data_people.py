"""Who holds which people and features: built-in sets, both kinds of partitions, the presets of the
papers, and what tables of parties must not be.
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from sklearn.datasets import load_digits
from typer.testing import CliRunner

from apfed_experiments.presets import PRESETS, find_preset
from secure_apfed import cli
from secure_apfed.config.file import load_settings_text
from secure_apfed.config.plain_yaml import format_yaml, parse_yaml
from secure_apfed.data import (
    DATASETS,
    UNLABELLED,
    ColumnEncoding,
    PartyTable,
    VerticalData,
    describe_dataset,
    load_data,
    load_own,
    load_own_tables,
    pack_own,
    partition,
)
from secure_apfed.data.encoding import View, find_view_ranges, fit_views
from secure_apfed.data.loading import cut_strips
from secure_apfed.errors import ConfigError, DataError
from secure_apfed.runs.run import run
from secure_apfed.settings.data import DataSettings, ViewColumns
from tests.secure_apfed.small_runs import small_config

# In these few rows the pulse tells who is sick.
pytestmark = pytest.mark.filterwarnings("ignore::secure_apfed.errors.SuspectColumnWarning")

PAGE = (Path(__file__).parents[2] / "docs/data.md").read_text(encoding="utf-8")
TWO = {"active": {"file": "a.csv"}, "shop": {"file": "b.csv"}}
BREAST: dict[str, Any] = {"dataset": "breast_cancer", "partition": "horizontal", "clients": 3}


def load(dataset: str = "digits", seed: int = 0, **settings: object) -> VerticalData:
    try:
        return load_data(DataSettings.model_validate({"dataset": dataset} | settings), seed=seed)
    except DataError as error:
        if "is in any of" in str(error):
            pytest.skip(str(error))
        raise


def labels_of(table: PartyTable) -> torch.Tensor:
    assert table.labels is not None
    return table.labels


def ids_at(data: VerticalData, rows: torch.Tensor) -> set[str]:
    return {data.active.ids[row] for row in rows.tolist()}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset": "digitz"}, "'digitz' is unknown; did you mean 'digits'"),
        ({"dataset": "zzzz"}, "'zzzz' is unknown; known are digits"),
        ({"views": 1}, "greater than or equal to 2"),
        ({"views": 9}, "an image of digits has 8 rows, fewer than 9 views"),
        ({"active_view": 5}, "active_view: must be 1 to 4, the number of views, got 5"),
        ({"dataset": "breast_cancer", "views": 4}, "is a table of 3 natural views, got 4"),
        ({"columns": {"active": [1], "p": [2]}}, "digits holds images, which views cut"),
        ({"dataset": "breast_cancer", "columns": {"p": [2]}}, "columns needs an entry for active"),
        (
            {"dataset": "breast_cancer", "views": 3, "columns": {"active": [1], "p": [2]}},
            "columns or views, not both",
        ),
        ({"parties": TWO}, "parties belong to dataset: tables"),
        ({"dataset": "tables"}, "needs an entry in parties for each party"),
        ({"dataset": "tables", "parties": TWO, "active": "bank"}, "'bank' is not one of parties"),
        ({"dataset": "tables", "parties": TWO, "views": 2}, "takes its views from parties"),
        ({"partition": "horizontal", "views": 2}, "leave views out"),
        ({"partition": "horizontal", "aligned": 5}, "leave aligned out"),
        ({**BREAST, "overlap": 0.5, "active_view": 2}, "leave active_view and overlap out"),
        ({**BREAST, "labels_at": ["passive-1"]}, "all parties hold labels; leave it out"),
        ({"clients": 3}, "under partition: horizontal only"),
        ({"labels_at": ["active"]}, "active is no passive; there are passive-1, passive-2"),
        ({"dataset": "breast_cancer", "views": ["means"]}, "of two at least"),
        ({**BREAST, "views": ["mean"]}, "different ones of means, errors, worst"),
        ({"view_columns": {"a": {"columns": ["x"]}}}, "view_columns belong to dataset: tables"),
        (
            {"dataset": "tables", "partition": "horizontal", "parties": TWO},
            "must number them alike; list the classes",
        ),
        ({"aligned": 5, "overlap": 0.5}, "give aligned or overlap, not both"),
        ({"rows": 5, "rows_per_class": 5}, "give rows or rows_per_class, not both"),
        (
            {"dataset": "breast_cancer", "columns": {"active": [0], "p": [30]}},
            "p asks for column 30, the set has 0 to 29",
        ),
        (
            {"dataset": "breast_cancer", "columns": {"active": [0], "p": ["colour"]}},
            "p asks for 'colour'; the set has mean radius",
        ),
        (
            {"dataset": "breast_cancer", "columns": {"active": [0], "p": ["mean radius"]}},
            "'mean radius' is given to active and to p",
        ),
        ({"dataset": "breast_cancer", "columns": {"active": [0], "p": []}}, "p has none"),
    ],
)
def test_what_does_not_fit_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ValidationError, ConfigError), match=message):
        load(**settings)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (BREAST, "each party has people of its own; take vertical, or use single_view"),
        ({"dataset": "digits", "labels_at": ["passive-1"]}, "the active alone holds labels"),
    ],
    ids=["horizontal", "labels at a passive"],
)
def test_methods_that_align_refuse_other_partitions(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        small_config(data=data)


@pytest.mark.parametrize("name", DATASETS)
def test_every_entry_is_complete_and_on_the_page(name: str) -> None:
    entry = DATASETS[name]
    assert f"`{name}`" in PAGE
    assert all(describe_dataset(entry).values())
    assert len(set(entry.classes)) == len(entry.classes)
    assert (entry.height is None) == bool(entry.natural_views)
    assert not entry.natural_views or len(entry.natural_views) == entry.views
    assert all(len(download.file.sha256) == 64 for download in entry.downloads)


def table(name: str = "active", labels: list[int] | None = None) -> PartyTable:
    return PartyTable(
        name,
        ("id-0", "id-1", "id-2", "id-3"),
        torch.zeros(4, 2),
        None if labels is None else torch.tensor(labels),
        ColumnEncoding.for_numeric_columns(["age", "income"]),
    )


ACTIVE = table(labels=[0, 1, 0, 1])
GOOD = VerticalData(
    table=ACTIVE,
    passives=(table("shop"),),
    classes=("no", "yes"),
    train_rows=torch.tensor([0, 1, 2]),
    test_rows=torch.tensor([3]),
)
SHOP = table("shop", labels=[0, 1, 0, 1])
HOLES = torch.tensor([[0.0, 1.0], [0.0, float("nan")], [0.0, float("inf")], [float("nan"), 0.0]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": ()}, "active: its table is empty"),
        (
            {"ids": ("a", "b", "a", "b")},
            "active: 2 IDs occur more than once, the first in row 0",
        ),
        ({"ids": ("a", "b", "c")}, "active: 3 IDs, but features of 4 rows"),
        ({"labels": torch.zeros(3)}, r"4 IDs, but labels of shape \(3,\)"),
        ({"features": torch.zeros(4, 3)}, r"rows of shape \(2,\), the features have \(3,\)"),
        ({"features": HOLES}, "active: 3 features are NaN or infinite, 2 of them in 'income'"),
    ],
)
def test_a_table_is_checked_alone(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        replace(ACTIVE, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"passives": (table("active"),)}, "two parties have one name"),
        ({"passives": (SHOP,)}, "shop is passive and holds no labels"),
        ({"table": table()}, "active is the active and needs labels"),
        ({"table": table(labels=[0, 1, 5, -1])}, "2 labels lie outside the 2 classes, first 5"),
        ({"table": table(labels=[0, 0, 0, 1])}, "3 labelled training rows are all of one"),
        ({"test_rows": torch.tensor([4])}, "lie in 0 to 3, got 0 to 4"),
        ({"test_rows": torch.tensor([2])}, "listed twice"),
        ({"labels_at": ("shop",)}, "shop: it is in labels_at, and it has no labels"),
        ({"labels_at": ("club",)}, "labels_at: there is no passive club"),
        (
            {"labels_at": ("shop",), "passives": (table("shop", labels=[3, 4, 3, 4]),)},
            r"shop: .* all of 0 to 1",
        ),
    ],
)
def test_tables_are_checked_together(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        replace(GOOD, **change)


def test_tables_show_no_row() -> None:
    assert "id-0" not in repr(GOOD)
    assert "tensor" not in repr(GOOD)


@pytest.mark.parametrize(("wanted", "count"), [(50, 50), (0.1, 135)])
def test_labelled_rows_are_nested(wanted: float, count: int) -> None:
    few = load(seed=3, labelled=20)
    data = load(seed=3, labelled=wanted)
    assert len(data.labelled_rows) == count
    assert bool(torch.isin(data.labelled_rows, data.train_rows).all())
    assert bool(torch.isin(few.labelled_rows, data.labelled_rows).all())


@pytest.mark.parametrize("wanted", [9, 1400])
def test_more_or_fewer_labelled_rows_than_there_can_be_are_refused(wanted: int) -> None:
    with pytest.raises(DataError, match=f"data.labelled: {wanted} labelled rows are wanted"):
        load(labelled=wanted)


def order_features(table: PartyTable, ids: list[str]) -> torch.Tensor:
    place = {one: row for row, one in enumerate(table.ids)}
    return table.features[[place[one] for one in ids]]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", [n for n in DATASETS if not n.startswith("cifar")])
def test_every_set_gives_tables_that_overlap_as_asked(name: str) -> None:
    data = load(name, overlap=0.8, limit=1000)
    known = ids_at(data, data.train_rows)
    tests = ids_at(data, data.test_rows)
    shared = partition.count_shared_rows(len(known), 0.8)
    assert len(data.passives) == DATASETS[name].views - 1
    assert data.classes == DATASETS[name].classes
    assert len(known.intersection(*(p.ids for p in data.passives))) == shared
    people = {passive.name: set(passive.ids) for passive in data.passives}
    strangers = {name: len(ids - set(data.active.ids)) for name, ids in people.items()}
    assert strangers == dict.fromkeys(people, len(known) - shared)
    assert [len(passive.ids) for passive in data.passives] == [len(data.active.ids)] * len(people)
    assert not [name for name, ids in people.items() if not tests <= ids]
    assert not [passive.name for passive in data.passives if passive.labels is not None]
    labels = labels_of(data.active)
    assert data.active.features.dtype == torch.float32
    if DATASETS[name].numeric_labels:
        assert labels.dtype == torch.float32
        assert labels[data.train_rows].std() == pytest.approx(1, abs=0.05)
        return
    assert labels.dtype == torch.int64
    assert set(labels.tolist()) == set(range(len(data.classes)))


def test_views_of_one_person_make_up_the_image() -> None:
    data = load(overlap=0.8, active_view=3)
    common = sorted(set(data.active.ids).intersection(*(p.ids for p in data.passives)))
    strips = [
        order_features(table, common)
        for table in (*data.passives[:2], data.active, data.passives[2])
    ]
    images = torch.cat(strips, dim=2).squeeze(1).mul(16).round()
    everyone = {tuple(row) for row in load_digits().data.astype(int).tolist()}
    assert images.shape == (len(common), 8, 8)
    assert {tuple(image.flatten().int().tolist()) for image in images} <= everyone
    strips_of_28 = cut_strips(
        (1, 28, 28), 255, strip_count=3, active_strip_number=2
    )  # one row remains
    assert [(s.first_row, s.end_row) for s in strips_of_28] == [(9, 18), (0, 9), (18, 27)]


@pytest.mark.parametrize("name", ["digits", "wine"])  # whose file is sorted by class
def test_parties_have_their_own_order_and_the_seed_decides_it(name: str) -> None:
    data = load(name)
    orders = {table.ids for table in data.tables}
    assert len(orders) == len(data.tables)
    assert len({frozenset(order) for order in orders}) == 1
    first, again, other = (load(name, seed, overlap=0.7) for seed in (3, 3, 4))
    assert [one.ids for one in first.tables] == [one.ids for one in again.tables]
    tables = zip(first.tables, again.tables, strict=True)
    assert not [one.name for one, two in tables if not torch.equal(one.features, two.features)]
    assert torch.equal(first.test_rows, again.test_rows)
    assert first.active.ids != other.active.ids
    # The overlap leaves the test split alone, and IDs do not give the class away.
    half = load(name, seed=3, overlap=0.5)
    assert ids_at(first, first.test_rows) == ids_at(half, half.test_rows)
    numbers = np.array([int(own.removeprefix("person-")) for own in data.active.ids])
    assert abs(np.corrcoef(numbers, labels_of(data.active).numpy())[0, 1]) < 0.3


def test_the_active_is_standardised_by_its_training_rows_and_a_passive_by_all() -> None:
    data = load("breast_cancer")
    zeros = torch.zeros(10).double()
    ones = torch.ones(10).double()
    for rows in (data.active.features[data.train_rows], data.passives[0].features):
        torch.testing.assert_close(rows.double().mean(0), zeros, atol=1e-6, rtol=0)
        torch.testing.assert_close(rows.double().std(0, correction=0), ones, atol=1e-6, rtol=0)
    assert float(data.active.features.double().mean(0).abs().max()) > 1e-3


def test_tables_are_cut_by_names_and_numbers_and_natural_views_chosen_by_name() -> None:
    columns = {"passive-1": [1, "worst area"], "active": ["mean radius"]}
    data = load("breast_cancer", columns=columns)
    names = [table.encoding.feature_name(0) for table in data.tables]
    assert names == ["mean radius", "mean texture"]
    assert data.passives[0].encoding.feature_name(1) == "worst area"
    across = load(**BREAST, views=["worst", "means"]).active.views
    assert across == {"worst": View(0, 10), "means": View(10, 20)}
    down = load("breast_cancer", views=["worst", "means"], active_view=2)
    assert [list(table.views) for table in down.tables] == [["means"], ["worst"]]


@given(
    rows=st.integers(4, 500),
    overlap=st.sampled_from([0.5, 0.7, 0.8, 0.9, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_people_are_dealt_without_waste_or_repeat(rows: int, overlap: float, seed: int) -> None:
    people = partition.deal_people(
        np.arange(rows), overlap=overlap, max_active_rows=None, seed=seed
    )
    used = np.concatenate(people)
    active = len(people.shared_rows) + len(people.active_only_rows)
    assert len(set(used.tolist())) == len(used) <= rows
    assert len(people.shared_rows) == partition.count_shared_rows(active, overlap)
    assert len(people.passive_only_rows) == len(people.active_only_rows)
    # One active row more would need more rows than there are.
    assert 2 * (active + 1) - partition.count_shared_rows(active + 1, overlap) > rows


def test_splits_and_shares_are_exact() -> None:
    # 0.7 * 10 in binary is below 7
    assert [partition.count_shared_rows(*of) for of in ((10, 0.7), (1000, 0.29), (3, 0.5))] == [
        7,
        290,
        1,
    ]
    labels = np.repeat(np.arange(3), [8, 40, 100])
    train, test = partition.split_rows(labels, 0.25, seed=1)
    assert np.bincount(labels[test]).tolist() == [2, 10, 25]
    assert sorted([*train, *test]) == list(range(148))
    blind = [
        partition.split_rows(own, 0.25, seed=1, split="at_random") for own in (labels, labels[::-1])
    ]
    assert len(blind[0][1]) == 37
    np.testing.assert_array_equal(blind[0][1], blind[1][1])
    with pytest.raises(DataError, match=r"leaves 4 training and 0 test rows; .*another test_"):
        partition.split_rows(np.arange(4), 0.25, seed=1)
    with pytest.raises(DataError, match="11 aligned people are wanted, and the active has 10"):
        partition.deal_people(
            np.arange(50), overlap=1, max_active_rows=10, seed=0, aligned_row_count=11
        )
    with pytest.raises(DataError, match=r"0\.01 of 50 training rows leaves nobody"):
        partition.deal_people(np.arange(101), overlap=0.01, max_active_rows=50, seed=0)


def test_labelled_rows_are_drawn_of_each_class() -> None:
    few = load(seed=3, labelled=20)
    counts = torch.bincount(labels_of(few.active)[few.labelled_rows], minlength=10)
    assert counts.tolist() == [2] * 10
    with pytest.raises(DataError, match=r"say 10 to 1347, or leave data\.labelled out"):
        load(labelled=1400)
    assert [len(load(labelled=wanted).labelled_rows) for wanted in (10, 1347)] == [10, 1347]
    # A choice at random reads no label.
    labels = np.arange(1000) % 2
    chosen, other = (
        partition.choose_labelled_rows(own, 40, seed=0, choice="at_random")
        for own in (labels, 1 - labels)
    )
    assert chosen is not None
    assert other is not None
    assert chosen.tolist() == other.tolist()
    assert len(load(labelled=40, split="at_random").labelled_rows) == 40


@pytest.mark.parametrize(("label", "minimum"), [(0, 12), (1, 1), (2, 0)])
def test_clients_are_dealt_rows_of_each_class_evenly(label: int, minimum: int) -> None:
    labels = np.repeat([0, 1, 2], [50, 7, 4])
    dealt = partition.deal_clients(
        labels, np.arange(61), client_count=4, max_client_rows=None, seed=1
    )
    found = [int((labels[rows] == label).sum()) for rows in dealt]
    assert minimum <= min(found) <= max(found) <= min(found) + 1 + (label == 0)


def test_people_are_drawn_by_the_seed() -> None:
    labels = np.repeat([0, 1], [30, 10])

    def draw_rows(rows: int | None = None, each: int | None = None, seed: int = 0) -> Any:
        return partition.draw_people(labels, people_count=rows, people_per_class=each, seed=seed)

    assert draw_rows() is None
    assert len(draw_rows(20)) == 20
    assert (
        draw_rows(20).tolist()
        == sorted(set(draw_rows(20).tolist()))
        != draw_rows(20, seed=1).tolist()
    )
    assert np.bincount(labels[draw_rows(each=10)]).tolist() == [10, 10]
    with pytest.raises(DataError, match=r"data.rows: 41 people are wanted, and the set has 40;"):
        draw_rows(41)
    with pytest.raises(DataError, match="the set has 10 of its smallest class"):
        draw_rows(each=11)


def test_a_labelled_passive_knows_its_training_people_and_no_test_label() -> None:
    data = load("breast_cancer", labels_at=["passive-2"], overlap=0.8)
    tests = ids_at(data, data.test_rows)
    truth = dict(zip(data.active.ids, labels_of(data.active).tolist(), strict=True))
    assert data.passives[0].labels is None
    table = data.passives[1]
    told = dict(zip(table.ids, labels_of(table).tolist(), strict=True))
    expected = {one: UNLABELLED if one in tests else truth.get(one, told[one]) for one in told}
    assert told == expected
    assert {UNLABELLED, 0, 1} == set(labels_of(table).tolist())
    own = data.select_party("passive-2")
    assert own is not None
    assert len(own.train_rows) == len(table.ids)
    assert len(own.labelled_rows) == len(table.ids) - len(tests)
    assert own.classes == data.classes


def test_horizontal_parties_have_all_features_of_other_people_and_equal_classes() -> None:
    data = load(**BREAST)
    ids = [set(table.ids) for table in data.tables]
    assert not ids[0] & ids[1] | ids[0] & ids[2] | ids[1] & ids[2]
    assert {len(table.ids) for table in data.passives} == {len(data.train_rows)}
    counts = [labels_of(data.active)[data.train_rows].bincount()]
    counts += [labels_of(table).bincount() for table in data.passives]
    assert max((one - counts[0]).abs().max().item() for one in counts) <= 1
    views = {"means": View(0, 10), "errors": View(10, 20), "worst": View(20, 30)}
    assert {table.name: table.views for table in data.tables if table.views != views} == {}
    assert not [table.name for table in data.tables if table.encoding != data.active.encoding]
    # What the encoding is of: the active's training rows and nobody else's.
    own = data.active.features[data.train_rows].double()
    torch.testing.assert_close(own.mean(0), torch.zeros(30).double(), atol=1e-6, rtol=0)
    few = load(labelled=20, **BREAST)
    known = [int((labels_of(table) != UNLABELLED).sum()) for table in few.passives]
    assert known == [20] * len(few.passives)
    images = load(partition="horizontal", limit=100)
    assert [tuple(table.features.shape) for table in images.passives] == [(100, 1, 8, 8)] * 3
    assert len(images.train_rows) == 100
    assert not images.active.views


def test_clients_are_dealt_evenly_to_the_last_row() -> None:
    labels = np.repeat([0, 1, 2], [50, 7, 4])
    dealt = partition.deal_clients(
        labels, np.arange(61), client_count=4, max_client_rows=None, seed=1
    )
    assert [len(rows) for rows in dealt] == [15] * 4
    assert len(set(np.concatenate(dealt).tolist())) == 60
    few = partition.deal_clients(labels, np.arange(61), client_count=2, max_client_rows=10, seed=1)
    assert [np.bincount(labels[rows]).tolist() for rows in few] == [[8, 1, 1]] * 2
    with pytest.raises(DataError, match="3 training rows are too few for 4 clients"):
        partition.deal_clients(labels, np.arange(3), client_count=4, max_client_rows=None, seed=1)


def test_prepared_rows_carry_labels_and_views(tmp_path: Path) -> None:
    data = load(**BREAST)
    own = data.select_party("passive-1")
    assert own is not None
    (tmp_path / "t").write_bytes(pack_own(own))
    read = load_own(tmp_path / "t", "passive-1")
    assert (read.views, read.classes) == (own.views, ("malignant", "benign"))
    assert torch.equal(read.labelled_rows, own.labelled_rows)
    assert torch.equal(labels_of(read.table), labels_of(own.table))
    # The active alone trains on its own people.
    train = {"epochs": 15, "batch_size": 32, "learning_rate": 0.05}
    config = small_config("single_view", data=BREAST, train=train)
    assert run(config, None, data=data).accuracy["single_view"] > 0.8


# Three people with sequences of 2, 0 and 3 steps of 2 channels, of at most 3.
SEQUENCES = pd.DataFrame(
    [[2, 3, 0, 4, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0], [3, 5, 0, 5, 0, 5, 0]],
    columns=["steps", *(f"{at}-{channel}" for at in range(3) for channel in "ab")],
)
WALK = {"walk": ViewColumns(columns=tuple(SEQUENCES.columns), sequence=(3, 2))}


def test_a_sequence_keeps_its_length_and_its_padding() -> None:
    encoding = fit_views(SEQUENCES, WALK, source="x")
    features = encoding.encode(SEQUENCES, source="x")
    view = find_view_ranges(encoding, WALK, source="x")["walk"]
    own = features[:, view.columns]
    steps = features[:, view.columns][:, 1:].reshape(3, 3, 2)
    assert own[:, 0].tolist() == [2, 0, 3]
    scale = (100 / 5) ** 0.5  # of 3, 4, 5, 5, 5; the other channel is always 0
    torch.testing.assert_close(steps[0], torch.tensor([[3, 0], [4, 0], [0, 0]]) / scale)
    with pytest.raises(DataError, match="view 'walk' has steps in use that are not whole"):
        PartyTable("x", ("a", "b", "c"), features + 0.5, None, encoding, {"walk": view})
    with pytest.raises(DataError, match="must follow one another over all its features"):
        PartyTable("x", ("a", "b", "c"), features, None, encoding, {"walk": View(0, 5)})
    with pytest.raises(ValidationError, match=r"3 steps of 3 channels .* are 10 columns, got 7"):
        ViewColumns(columns=tuple(SEQUENCES.columns), sequence=(3, 3))


@pytest.fixture
def hospitals(tmp_path: Path) -> dict[str, Any]:
    """Two synthetic hospitals with the same columns, and the settings that read them."""
    draw = np.random.default_rng(0)
    for name, rows in (("north", 40), ("south", 30)):
        frame = pd.DataFrame(draw.normal(size=(rows, 3)), columns=["pulse", "age", "ward"])
        frame["ward"] = np.where(frame["ward"] > 0, "a", "b")
        frame["sick"] = np.where(frame["pulse"] > 0, "yes", "no")
        frame.rename_axis("id").to_csv(tmp_path / f"{name}.csv")
    return {
        "dataset": "tables",
        "folder": tmp_path,
        "partition": "horizontal",
        "active": "north",
        "label_column": "sick",
        "classes": ["no", "yes"],
        "parties": {name: {"file": f"{name}.csv"} for name in ("south", "north")},
        "view_columns": {
            "stay": {"columns": ["ward", "age"]},
            "body": {"columns": ["pulse"]},
        },
    }


def test_own_tables_of_hospitals_share_no_people(hospitals: dict[str, Any]) -> None:
    data = load(**hospitals)
    assert data.active.views == {"stay": View(0, 3), "body": View(3, 4)}
    south = load_own_tables(DataSettings.model_validate(hospitals), "south", seed=0)
    held = data.select_party("south")
    assert held is not None
    assert torch.equal(south.table.features, held.table.features)
    assert (south.classes, len(south.labelled_rows)) == (("no", "yes"), 30)
    raw = pd.read_csv(hospitals["folder"] / "south.csv")
    assert labels_of(south.table).tolist() == (raw["sick"] == "yes").astype(int).tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"view_columns": {"stay": {"columns": ["ward"]}}}, "look at pulse, age"),
        (
            {"view_columns": {"stay": {"columns": ["ward", "age", "pulse", "sex"]}}},
            "look at sex",
        ),
        ({"classes": ["yes", "maybe"]}, "outside the classes yes, maybe, such as no"),
    ],
)
def test_own_tables_of_hospitals_are_alike(
    hospitals: dict[str, Any], change: dict[str, Any], message: str
) -> None:
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
    hospitals: dict[str, Any], change: Callable[[pd.DataFrame], pd.DataFrame], named: bool
) -> None:
    path = hospitals["folder"] / "south.csv"
    if not named:
        del hospitals["view_columns"]
    change(pd.read_csv(path)).to_csv(path, index=False)
    with pytest.raises(DataError, match=r"south: under a horizontal partition .* one encoding"):
        load(**hospitals)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_setting_with_columns_that_the_set_has(name: str) -> None:
    assert f"`{name.split('/')[0]}/" in PAGE
    settings = DataSettings.model_validate(find_preset(name))
    told = format_yaml(settings.model_dump(mode="json", exclude_unset=True))
    assert load_settings_text(DataSettings, told, source="x") == settings
    natural = DATASETS[settings.dataset].natural_views.values()
    known = sorted(column for view in natural for column in view)
    if settings.columns is not None:
        columns = [str(column) for some in settings.columns.values() for column in some]
        assert sorted(columns) == known


def test_presets_move_columns_in_the_paper_s_order() -> None:
    views = DATASETS["credit_card"].natural_views
    numbered = dict(enumerate((*views["client"], *views["repayment"]), start=1))  # from X1
    moved = {
        "apc-vfl/breast_cancer/2/100": ["mean texture", "worst fractal dimension"],
        "apc-vfl/credit_card/4/2500": ["AGE", "PAY_2", "PAY_4", "PAY_6"],
        "apc-vfl/credit_card/5/100": [numbered[at] for at in (3, 5, 7, 9, 11)],
    }
    assert {name: [*find_preset(name)["columns"]["active"]] for name in moved} == moved


def test_so_many_people_are_aligned_and_the_passive_holds_no_others() -> None:
    data = load(**find_preset("apc-vfl/breast_cancer/3/250"), seed=1)
    (passive,) = data.passives
    ids = ids_at(data, data.train_rows)
    tests = ids_at(data, data.test_rows)
    assert (len(ids), len(tests)) == (450, 50)
    assert len(ids & set(passive.ids)) == 250
    assert set(passive.ids) - ids == tests
    assert (data.active.features.shape[1], passive.features.shape[1]) == (3, 27)
    whole = load(**find_preset("apc-vfl/breast_cancer/all-aligned/150"), seed=1)
    assert (len(whole.train_rows), len(whole.test_rows)) == (100, 50)
    assert set(whole.passives[0].ids) == set(whole.active.ids)


def test_as_many_numerals_of_each_class_train_and_test() -> None:
    data = load(**find_preset("mmvfl/handwritten"), seed=1)
    assert [table.features.shape[1] for table in data.tables] == [240, 76, 216, 47, 64]
    labels = labels_of(data.active)
    assert torch.bincount(labels[data.train_rows]).tolist() == [120] * 10
    assert torch.bincount(labels[data.test_rows]).tolist() == [40] * 10


def test_the_command_line_lists_and_prints_them() -> None:
    listed = CliRunner().invoke(cli.app, ["data", "presets", "--json"])
    assert [one["name"] for one in json.loads(listed.stdout)["presets"]] == list(PRESETS)
    printed = CliRunner().invoke(cli.app, ["data", "presets", "mmvfl/handwritten"])
    assert printed.stdout.startswith("data:\n  dataset: handwritten\n  views:\n")
    with pytest.raises(ConfigError, match="did you mean 'mmvfl/handwritten'"):
        find_preset("mmvfl/handwriting")


def test_what_the_page_shows() -> None:
    shown = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    data = [parse_yaml(block, "docs/data.md")[0]["data"] for block in shown]
    settings = [load_settings_text(DataSettings, format_yaml(one), source="x") for one in data]
    assert [one.is_horizontal for one in settings] == [False, False, False, True]
    assert settings[-1].classes == ("no", "yes")

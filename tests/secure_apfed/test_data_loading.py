"""Every built-in set through `load_data`: the same people, other rows, other order."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from sklearn.datasets import load_digits

from secure_apfed.data import (
    DATASETS,
    ColumnEncoding,
    PartyTable,
    VerticalData,
    catalogue,
    describe,
    load_data,
)
from secure_apfed.data.catalogue import view_count
from secure_apfed.data.loading import cut_strips
from secure_apfed.data.partition import choose_labelled, deal_people, shared_rows, split_rows
from secure_apfed.errors import ConfigError, DataError
from secure_apfed.settings.data import DataSettings

TWO = {"active": {"file": "a.csv"}, "shop": {"file": "b.csv"}}
# Settings of data: what does not fit is refused before anything is read.


@pytest.mark.parametrize(("settings", "message"), [
    ({"dataset": "digitz"}, "'digitz' is unknown; did you mean 'digits'"),
    ({"dataset": "zzzz"}, "'zzzz' is unknown; Known are digits"),
    ({"dataset": "fashion-mnist"}, "did you mean 'fashion_mnist'"),
    ({"views": 1}, "greater than or equal to 2"),
    ({"views": 9}, "an image of digits has 8 rows, fewer than 9 views"),
    ({"active_view": 5}, "active_view: must be 1 to 4, the number of views, got 5"),
    ({"overlap": 1.1}, "less than or equal to 1"),
    ({"dataset": "breast_cancer", "views": 4}, "is a table of 3 natural views, got 4"),
    ({"columns": {"active": [1], "p": [2]}}, "digits holds images, which views cut"),
    ({"dataset": "breast_cancer", "columns": {"p": [2]}}, "columns needs an entry for active"),
    ({"dataset": "breast_cancer", "views": 3, "columns": {"active": [1], "p": [2]}},
     "columns or views, not both"),
    ({"parties": TWO}, "parties belong to dataset: tables"),
    ({"dataset": "tables"}, "needs at least two entries in parties"),
    ({"dataset": "tables", "parties": TWO, "active": "bank"}, "'bank' is not one of parties"),
    ({"dataset": "tables", "parties": TWO, "views": 2}, "takes its views from parties"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises((ValidationError, ConfigError), match=message):
        load_data(DataSettings.model_validate(settings), seed=0)


def test_the_number_of_views() -> None:
    assert view_count(DataSettings()) == 4
    assert view_count(DataSettings(dataset="mnist", views=3)) == 3
    assert view_count(DataSettings(dataset="breast_cancer")) == 3
    own = {"dataset": "tables", "parties": TWO}
    assert view_count(DataSettings.model_validate(own)) == 2
    cut = {"dataset": "breast_cancer", "columns": {"active": [0], "p": [1]}}
    assert view_count(DataSettings.model_validate(cut)) == 2


def test_every_entry_is_complete() -> None:
    for name, entry in DATASETS.items():
        assert entry.name == name
        assert all(describe(entry).values())
        assert len(set(entry.classes)) == len(entry.classes)
        assert len(entry.classes) >= 2 or (entry.numeric_labels and not entry.classes)
        assert (entry.height is None) == bool(entry.natural_views)
        assert not entry.natural_views or len(entry.natural_views) == entry.views
        assert all(file.size for file in entry.files)
        for download in entry.downloads:
            assert download.file.size
            assert len(download.file.sha256) == 64
            assert all(address.startswith("http") for address in download.addresses)


# Tables of parties refuse what no training should start with.


def table(name: str = "active", rows: int = 4, labels: list[int] | None = None) -> PartyTable:
    return PartyTable(
        name,
        tuple(f"id-{row}" for row in range(rows)),
        torch.zeros(rows, 2),
        None if labels is None else torch.tensor(labels),
        ColumnEncoding.plain(["age", "income"]),
    )


ACTIVE = table(labels=[0, 1, 0, 1])
GOOD = VerticalData(
    table=ACTIVE,
    passives=(table("shop"),),
    classes=("no", "yes"),
    train_rows=torch.tensor([0, 1, 2]),
    test_rows=torch.tensor([3]),
)


HOLES = torch.tensor([[0.0, 1.0], [0.0, float("nan")], [0.0, float("inf")], [float("nan"), 0.0]])


def test_a_partys_table_is_checked() -> None:
    changes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"ids": ()}, "active: its table is empty"),
        ({"ids": ("a", "b", "a", "b")}, "active: 2 IDs occur more than once, the first in row 0"),
        ({"ids": ("a", "b", "c")}, "active: 3 IDs, but features of 4 rows"),
        ({"features": torch.zeros(5, 2)}, "4 IDs, but features of 5 rows"),
        ({"labels": torch.zeros(3)}, r"4 IDs, but labels of shape \(3,\)"),
        ({"features": torch.zeros(4, 3)}, r"rows of shape \(2,\), the features have \(3,\)"),
        ({"features": HOLES}, "active: 3 features are NaN or infinite, 2 of them in 'income'"),
    )
    for change, message in changes:
        with pytest.raises(DataError, match=message):
            replace(ACTIVE, **change)


def test_the_tables_together_are_checked() -> None:
    shop = table("shop", labels=[0, 1, 0, 1])
    changes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"passives": (table("active"),)}, "two parties have one name"),
        ({"passives": (shop,)}, "shop is passive and holds no labels"),
        ({"table": table()}, "active is the active and needs labels"),
        ({"table": table(labels=[0, 1, 5, -1])}, "2 labels lie outside the 2 classes, first 5"),
        ({"table": table(labels=[0, 0, 0, 1])}, "the 3 labelled training rows are all of one"),
        ({"test_rows": torch.tensor([4])}, "lie in 0 to 3, got 0 to 4"),
        ({"test_rows": torch.tensor([2])}, "listed twice"),
    )
    for change, message in changes:
        with pytest.raises(DataError, match=message):
            replace(GOOD, **change)


def test_no_row_shows_in_the_text_form() -> None:
    assert "id-0" not in repr(GOOD)
    assert "tensor" not in repr(GOOD)


def load(dataset: str, seed: int = 0, **settings: object) -> VerticalData:
    try:
        return load_data(DataSettings.model_validate({"dataset": dataset} | settings), seed=seed)
    except DataError as error:
        if "is in any of" in str(error):
            pytest.skip(str(error))
        raise


def train_ids(data: VerticalData) -> set[str]:
    return {data.active.ids[row] for row in data.train_rows.tolist()}


def by_id(table: PartyTable, ids: list[str]) -> torch.Tensor:
    place = {one: row for row, one in enumerate(table.ids)}
    return table.features[[place[one] for one in ids]]


@pytest.mark.parametrize("name", [n for n in DATASETS if not n.startswith("cifar")])
def test_every_set_gives_tables_that_overlap_as_asked(name: str) -> None:
    data = load(name, overlap=0.8, limit=1000)
    known = train_ids(data)
    tests = {data.active.ids[row] for row in data.test_rows.tolist()}
    assert len(data.passives) == DATASETS[name].views - 1
    assert data.classes == DATASETS[name].classes
    assert len(known.intersection(*(p.ids for p in data.passives))) == shared_rows(len(known), 0.8)
    for passive in data.passives:
        strangers = set(passive.ids) - set(data.active.ids)
        assert len(known & set(passive.ids)) == shared_rows(len(known), 0.8)
        assert len(passive.ids) == len(data.active.ids)
        assert len(strangers) == len(known) - shared_rows(len(known), 0.8)
        assert tests <= set(passive.ids)
        assert passive.labels is None
    assert data.active.features.dtype == torch.float32
    assert data.active.labels is not None
    if DATASETS[name].numeric_labels:
        assert data.active.labels.dtype == torch.float32
        assert data.active.labels[data.train_rows].std() == pytest.approx(1, abs=0.05)
        return
    assert data.active.labels.dtype == torch.int64
    assert set(data.active.labels.tolist()) == set(range(len(data.classes)))


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_the_official_split_is_kept_and_its_size_is_right(name: str) -> None:
    data = load(name)
    assert (len(data.train_rows), len(data.test_rows)) == (60_000, 10_000)
    assert data.active.labels is not None
    # Each class of Fashion-MNIST's official test split has 1000 images; MNIST's 7 has 1028.
    counts = data.active.labels[data.test_rows].bincount()
    assert int(counts[7]) == (1028 if name == "mnist" else 1000)


def test_views_of_one_person_make_up_the_image() -> None:
    data = load("digits", overlap=0.8, active_view=3)
    common = sorted(set(data.active.ids).intersection(*(p.ids for p in data.passives)))
    strips = [by_id(table, common) for table in (*data.passives[:2], data.active, data.passives[2])]
    images = torch.cat(strips, dim=2).squeeze(1).mul(16).round()
    everyone = {tuple(row) for row in load_digits().data.astype(int).tolist()}
    assert images.shape == (len(common), 8, 8)
    assert {tuple(image.flatten().int().tolist()) for image in images} <= everyone


@pytest.mark.parametrize("name", ["digits", "breast_cancer"])
def test_parties_have_their_own_order_and_the_seed_decides_it(name: str) -> None:
    data = load(name)
    orders = {table.ids for table in data.tables}
    assert len(orders) == len(data.tables)
    assert len({frozenset(order) for order in orders}) == 1
    first, again, other = (load(name, seed, overlap=0.7) for seed in (3, 3, 4))
    for one, two in zip(first.tables, again.tables, strict=True):
        assert one.ids == two.ids
        assert torch.equal(one.features, two.features)
    assert torch.equal(first.test_rows, again.test_rows)
    assert first.active.ids != other.active.ids


def test_overlap_leaves_the_test_split_alone() -> None:
    splits = [load("digits", overlap=overlap) for overlap in (1.0, 0.5)]
    assert len({frozenset(d.active.ids[r] for r in d.test_rows.tolist()) for d in splits}) == 1


def test_ids_do_not_give_the_class_away() -> None:
    data = load("handwritten")  # its file is sorted by class
    assert data.active.labels is not None
    numbers = np.array([int(one.removeprefix("person-")) for one in data.active.ids])
    assert abs(np.corrcoef(numbers, data.active.labels.numpy())[0, 1]) < 0.1


def test_the_active_is_standardised_by_its_training_rows_and_a_passive_by_all() -> None:
    data = load("breast_cancer")
    train = data.active.features[data.train_rows].double()
    whole = data.passives[0].features.double()
    for rows in (train, whole):
        torch.testing.assert_close(rows.mean(0), torch.zeros(10).double(), atol=1e-6, rtol=0)
        torch.testing.assert_close(
            rows.std(0, correction=0), torch.ones(10).double(), atol=1e-6, rtol=0
        )
    assert float(data.active.features.double().mean(0).abs().max()) > 1e-3


def test_tables_can_be_cut_by_names_and_numbers() -> None:
    data = load(
        "breast_cancer", columns={"passive-1": [1, "worst area"], "active": ["mean radius"]}
    )
    names = [table.encoding.feature_name(0) for table in data.tables]
    assert names == ["mean radius", "mean texture"]
    assert data.passives[0].encoding.feature_name(1) == "worst area"


def test_wrong_columns_are_named() -> None:
    for columns, message in (
        ({"active": [0], "p": [30]}, "p asks for column 30, the set has 0 to 29"),
        ({"active": [0], "p": ["colour"]}, "p asks for 'colour'; the set has mean radius"),
        ({"active": [0], "p": ["mean radius"]}, "'mean radius' is given to active and to p"),
        ({"active": [0], "p": []}, "p has none"),
    ):
        with pytest.raises(ConfigError, match=message):
            load("breast_cancer", columns=columns)


def test_nobody_in_common_is_an_error() -> None:
    with pytest.raises(DataError, match=r"0\.01 of 50 training rows leaves nobody"):
        load("digits", overlap=0.01, limit=50)


def test_one_class_only_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    digits = DATASETS["digits"]
    pool = digits.read(digits, None)
    alike = replace(digits, read=lambda *_: replace(pool, labels=np.zeros_like(pool.labels)))
    monkeypatch.setattr(catalogue, "DATASETS", {"digits": alike})
    with pytest.raises(DataError, match="1348 labelled training rows are all of one class"):
        load("digits")


@given(
    rows=st.integers(4, 500),
    overlap=st.sampled_from([0.5, 0.7, 0.8, 0.9, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_people_are_dealt_without_waste_or_repeat(rows: int, overlap: float, seed: int) -> None:
    people = deal_people(np.arange(rows), overlap=overlap, limit=None, seed=seed)
    used = np.concatenate(people)
    active = len(people.shared) + len(people.active_only)
    assert len(set(used.tolist())) == len(used) <= rows
    assert len(people.shared) == shared_rows(active, overlap)
    assert len(people.strangers) == len(people.active_only)
    # One active row more would need more rows than there are.
    more = active + 1
    assert 2 * more - shared_rows(more, overlap) > rows


def test_shared_rows_are_exact_for_decimals() -> None:
    assert shared_rows(10, 0.7) == 7  # 0.7 * 10 in binary is below 7
    assert shared_rows(1000, 0.29) == 290
    assert shared_rows(3, 0.5) == 1


def test_split_keeps_every_class_on_both_sides() -> None:
    labels = np.repeat(np.arange(3), [8, 40, 100])
    train, test = split_rows(labels, 0.25, seed=1)
    assert np.bincount(labels[test]).tolist() == [2, 10, 25]
    assert sorted([*train, *test]) == list(range(148))
    with pytest.raises(DataError, match="leaves 4 training and 0 test rows"):
        split_rows(np.arange(4), 0.25, seed=1)


def test_strips_drop_the_rows_that_remain() -> None:
    strips = cut_strips((1, 28, 28), 255, views=3, active_view=2)
    assert [(s.first_row, s.end_row) for s in strips] == [(9, 18), (0, 9), (18, 27)]


def test_labelled_rows_are_drawn_of_each_class_and_nested() -> None:
    few = load("digits", seed=3, labelled=20)
    labels = few.active.labels
    assert labels is not None
    assert torch.bincount(labels[few.labelled_rows], minlength=10).tolist() == [2] * 10
    for wanted, count in ((50, 50), (0.1, 135)):
        data = load("digits", seed=3, labelled=wanted)
        assert len(data.labelled_rows) == count
        assert bool(torch.isin(data.labelled_rows, data.train_rows).all())
        assert bool(torch.isin(few.labelled_rows, data.labelled_rows).all())
    for wanted in (9, 1400):
        with pytest.raises(DataError, match=f"data.labelled: {wanted} labelled rows are wanted"):
            load("digits", labelled=wanted)


def test_a_choice_at_random_reads_no_label() -> None:
    settings = DataSettings(dataset="digits", labelled=40, split="at_random")
    labels = np.arange(1000) % 2
    chosen = choose_labelled(labels, 40, seed=0, choice="at_random")
    other = choose_labelled(1 - labels, 40, seed=0, choice="at_random")
    assert chosen is not None
    assert other is not None
    assert chosen.tolist() == other.tolist()
    assert len(load_data(settings, seed=0).labelled_rows) == 40

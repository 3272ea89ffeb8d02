"""The parties' own CSV and Parquet files, and inputs of prediction."""

import gzip
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from secure_apfed.data import ColumnEncoding, ImageEncoding, load_data
from secure_apfed.errors import DataError
from secure_apfed.settings.data import DataSettings
from tests.secure_apfed.whole_files import load_features

ROWS = 40
IMAGES = ImageEncoding(channels=1, height=4, width=4, first_row=2, end_row=4)


def bank() -> pd.DataFrame:
    draw = np.random.default_rng(1)
    return pd.DataFrame({
        "customer": [f"{row:03d}" for row in range(ROWS)],
        "income": draw.normal(3000, 800, ROWS).round(2),
        "branch": draw.choice(["north", "south"], ROWS),
        "left": np.where(np.arange(ROWS) % 4 == 0, "yes", "no"),
    })  # fmt: skip


def shop() -> pd.DataFrame:
    draw = np.random.default_rng(2)
    rows = draw.permutation(np.arange(10, 50))
    return pd.DataFrame({
        "customer": [f"{row:03d}" for row in rows],
        "visits": draw.integers(0, 30, ROWS),
        "spent": draw.normal(50, 9, ROWS),
        "member": draw.integers(0, 2, ROWS).astype(bool),
    })  # fmt: skip


def settings(
    folder: Path, *, shop_options: Mapping[str, object] | None = None, **more: object
) -> DataSettings:
    parties = {
        "bank": {"file": "bank.csv"},
        "shop": {"file": "shop.parquet"} | dict(shop_options or {}),
    }
    base = {
        "dataset": "tables", "folder": folder, "parties": parties, "active": "bank",
        "id_column": "customer", "label_column": "left",
    }  # fmt: skip
    return DataSettings.model_validate(base | more)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    bank().to_csv(tmp_path / "bank.csv", index=False)
    shop().to_parquet(tmp_path / "shop.parquet")
    return tmp_path


def test_own_tables_keep_their_ids_order_and_overlap(folder: Path) -> None:
    data = load_data(settings(folder), seed=0)
    assert (data.active.name, data.passives[0].name, data.classes) == (
        "bank",
        "shop",
        ("no", "yes"),
    )
    assert data.active.ids == tuple(bank()["customer"])
    assert data.passives[0].ids == tuple(shop()["customer"])
    assert len(set(data.active.ids) & set(data.passives[0].ids)) == 30
    assert data.active.labels is not None
    assert data.active.labels.tolist() == [int(row % 4 == 0) for row in range(ROWS)]
    assert len(data.test_rows) == 10
    assert data.active.features.shape == (ROWS, 3)
    names = [data.passives[0].encoding.feature_name(at) for at in range(4)]
    assert names == ["visits", "spent", "member=False", "member=True"]


def test_statistics_are_each_partys_own(folder: Path) -> None:
    data = load_data(settings(folder), seed=0)
    income = data.active.features[data.train_rows, 0].double()
    assert abs(float(income.mean())) < 1e-6
    assert abs(float(data.active.features[:, 0].double().mean())) > 1e-3
    assert abs(float(data.passives[0].features[:, 0].double().mean())) < 1e-6


def test_named_columns_ignored_columns_and_two_id_columns(folder: Path) -> None:
    options = {"numeric": ["spent"], "id_column": ["customer", "visits"]}
    data = load_data(settings(folder, shop_options=options), seed=0)
    assert data.passives[0].features.shape == (ROWS, 1)
    assert data.passives[0].ids[0] == f"{shop()['customer'][0]}\x1f{shop()['visits'][0]}"
    ignoring = load_data(settings(folder, shop_options={"ignore": ["member", "spent"]}), seed=0)
    assert ignoring.passives[0].features.shape == (ROWS, 1)


def test_limit_keeps_the_test_rows(folder: Path) -> None:
    data = load_data(settings(folder, limit=12), seed=0)
    assert (len(data.train_rows), len(data.test_rows), len(data.active.ids)) == (12, 10, 22)
    whole = load_data(settings(folder), seed=0)
    tests = [{d.active.ids[r] for r in d.test_rows.tolist()} for d in (data, whole)]
    assert tests[0] == tests[1]


def test_given_classes_fix_the_order_and_whole_numbers_sort_as_numbers(folder: Path) -> None:
    data = load_data(settings(folder, classes=["yes", "no"]), seed=0)
    assert data.active.labels is not None
    assert data.active.labels.tolist() == [int(row % 4 != 0) for row in range(ROWS)]
    bank().assign(left=[row % 3 * 5 for row in range(ROWS)]).to_csv(
        folder / "bank.csv", index=False
    )
    assert load_data(settings(folder), seed=0).classes == ("0", "5", "10")


def test_missing_cells_are_dropped_or_filled_only_when_asked(folder: Path) -> None:
    holes = shop()
    holes.loc[[0, 5], "spent"] = np.nan
    holes.to_parquet(folder / "shop.parquet")
    with pytest.raises(DataError, match=r"shop: empty cells in spent \(2\)"):
        load_data(settings(folder), seed=0)
    dropped = load_data(settings(folder, shop_options={"missing": "drop"}), seed=0).passives[0]
    assert len(dropped.ids) == ROWS - 2
    assert holes["customer"][5] not in dropped.ids
    filled = load_data(settings(folder, shop_options={"missing": "mean"}), seed=0).passives[0]
    assert float(filled.features[5, 1]) == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"left": "no"}, "bank: all 40 labels are no"),
        ({"left": ["no"] * 39 + [None]}, "bank: all 39 labels are no; two classes"),
        ({"customer": ["1"] * 2 + [str(row) for row in range(2, ROWS)]}, "bank: 1 IDs occur more"),
        (
            {"customer": [None] + [str(row) for row in range(1, ROWS)]},
            "'customer' of bank.csv is empty in 1 rows",
        ),
        ({"income": [np.inf] + [1.0] * 39}, "bank: column 'income' has 1 infinite"),
    ],
)
def test_tables_of_the_active_that_are_unfit(
    folder: Path, change: dict[str, object], message: str
) -> None:
    bank().assign(**change).to_csv(folder / "bank.csv", index=False)  # type: ignore[arg-type]  # free-form
    with pytest.raises(DataError, match=message):
        load_data(settings(folder), seed=0)


def test_a_label_outside_the_given_classes(folder: Path) -> None:
    with pytest.raises(
        DataError, match="bank: 10 labels lie outside the classes no, maybe, such as yes"
    ):
        load_data(settings(folder, classes=["no", "maybe"]), seed=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"numeric": ["colour"]}, "shop: shop.parquet lacks the columns colour; it has customer"),
        ({"ignore": ["colour"]}, "lacks the columns colour"),
        ({"id_column": "person"}, "lacks the columns person"),
        ({"numeric": []}, "shop: no feature columns are left"),
        ({"file": "nowhere.csv"}, "shop: there is no file .*nowhere.csv"),
    ],
)
def test_settings_that_do_not_fit_the_file(
    folder: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        load_data(settings(folder, shop_options=options), seed=0)


def test_a_passive_does_not_train_on_labels(folder: Path) -> None:
    shop().assign(left=1).to_parquet(folder / "shop.parquet")
    with pytest.raises(
        DataError, match="shop: its column 'left' is called like the active's labels"
    ):
        load_data(settings(folder), seed=0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a readable Parquet file"),
        (b"PAR1" + bytes(40) + b"PAR1", "shop: .*shop.parquet"),
    ],
)
def test_a_damaged_parquet_file(folder: Path, content: bytes, message: str) -> None:
    (folder / "shop.parquet").write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_data(settings(folder), seed=0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a readable CSV file"),
        (b"customer,income\n1,2,3,4\n5\n\x00\xff", "bank: "),
        (b"customer,income,left\n", "bank: bank.csv has no rows"),
    ],
)
def test_a_damaged_csv_file(folder: Path, content: bytes, message: str) -> None:
    (folder / "bank.csv").write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_data(settings(folder), seed=0)


ENCODING = ColumnEncoding.plain(["a", "b"])


def test_prediction_reads_tables_with_and_without_ids(tmp_path: Path) -> None:
    frame = pd.DataFrame({"who": ["007", "008"], "b": [1, 2], "a": [3, 4]})
    frame.to_csv(tmp_path / "new.csv.gz", index=False)
    frame.to_parquet(tmp_path / "new.parquet")
    for name in ("new.csv.gz", "new.parquet"):
        ids, features = load_features(tmp_path / name, ENCODING, id_columns=["who"])
        assert ids == ("007", "008")
        assert features.tolist() == [[3.0, 1.0], [4.0, 2.0]]
    assert load_features(tmp_path / "new.csv.gz", ENCODING)[0] == ("0", "1")


def test_prediction_reproduces_the_features_of_training(folder: Path) -> None:
    active = load_data(settings(folder), seed=0).active
    ids, features = load_features(folder / "bank.csv", active.encoding, id_columns=["customer"])
    assert ids == active.ids
    assert torch.equal(features, active.features)


def test_prediction_reads_arrays_and_idx_images(tmp_path: Path) -> None:
    images = np.arange(32, dtype=np.uint8).reshape(2, 4, 4)
    strip = ImageEncoding(channels=1, height=4, width=4, first_row=2, end_row=4)
    expected = torch.from_numpy(images[:, None, 2:].astype(np.float32)) / 255
    header = bytes([0, 0, 8, 3]) + b"".join(size.to_bytes(4, "big") for size in images.shape)
    np.save(tmp_path / "a.npy", images)
    (tmp_path / "b-idx3-ubyte").write_bytes(header + images.tobytes())
    (tmp_path / "b-idx3-ubyte.gz").write_bytes(gzip.compress(header + images.tobytes()))
    pd.DataFrame(images.reshape(2, 16)).to_csv(tmp_path / "c.csv", index=False)
    for name in ("a.npy", "b-idx3-ubyte", "b-idx3-ubyte.gz", "c.csv"):
        assert torch.equal(load_features(tmp_path / name, strip)[1], expected)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.csv", b"a,c\n1,2\n", "x.csv: 1 of 2 columns are missing: b"),
        ("x.csv", b"a,b\n", "x.csv: it has no rows"),
        ("x.csv", b"a,b\n1,old\n", "x.csv: column 'b' is numeric"),
        ("x.npy", b"\x93NUMPY broken", "not a readable .npy array"),
        ("x.png", b"\x89PNG", "x.png: unknown format; give .csv"),
        ("none.npy", None, "none.npy: there is no such file"),
        ("none.csv", None, "there is no file"),
        ("none", None, "cannot be read"),
    ],
)
def test_inputs_that_cannot_be_predicted(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_features(tmp_path / name, ENCODING)


def test_arrays_of_objects_and_single_numbers_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "o.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match=r"not a readable \.npy array"):
        load_features(tmp_path / "o.npy", ENCODING)
    np.save(tmp_path / "s.npy", np.zeros(3))
    with pytest.raises(DataError, match=r"expected rows of features, got shape \(3,\)"):
        load_features(tmp_path / "s.npy", ENCODING)


def test_missing_id_columns_are_named(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").touch()
    pd.DataFrame({"a": [1], "b": [2]}).to_parquet(tmp_path / "x.parquet")
    with pytest.raises(DataError, match="the ID columns who are missing"):
        load_features(tmp_path / "x.parquet", ENCODING, id_columns=["who"])


def test_a_stray_text_among_numbers_is_named_and_not_made_a_category(folder: Path) -> None:
    frame = bank().astype({"income": object})
    frame.loc[3, "income"] = "n/k"
    frame.to_csv(folder / "bank.csv", index=False)
    with pytest.raises(DataError, match=r"1 of 40 cells of column 'income' are text"):
        load_data(settings(folder), seed=0)


def test_numbers_too_large_to_standardise_are_named(folder: Path) -> None:
    bank().assign(income=1e300 * np.arange(ROWS)).to_csv(folder / "bank.csv", index=False)
    with pytest.raises(DataError, match="column 'income' are too large"):
        load_data(settings(folder), seed=0)


def test_an_encoding_from_elsewhere_does_not_read_the_rows(folder: Path) -> None:
    """As an encoding fitted to public rows, so that no record moves it."""
    fitted = load_data(settings(folder), seed=0).active.encoding
    for told in (fitted.model_dump(mode="json"), {"encoding": fitted.model_dump(mode="json")}):
        (folder / "encoding.json").write_text(json.dumps(told))
        bank().assign(income=lambda table: 2 * table["income"]).to_csv(folder / "bank.csv")
        given = {"file": "bank.csv", "encoding": "encoding.json", "ignore": ["Unnamed: 0"]}
        parties = {"bank": given, "shop": {"file": "shop.parquet"}}
        active = load_data(settings(folder, parties=parties), seed=0).active
        assert active.encoding == fitted
        income = fitted.encode(bank(), source="bank")[:, 0]
        mean, scale = (getattr(fitted.columns[0], name) for name in ("mean", "scale"))  # type: ignore[union-attr]  # of columns
        torch.testing.assert_close(active.features[:, 0], 2 * income + mean / scale)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "bank: encoding.json holds no encoding"),
        ("{", "bank: encoding.json holds no encoding"),
        ("[]", "bank: encoding.json holds no encoding"),
        ('{"kind": "columns", "columns": []}', "bank: encoding.json holds no encoding"),
        ('{"kind": "columns", "columns": [{"kind": "numeric", "name": "age"}]}', "age"),
        (IMAGES.model_dump_json(), "encoding of images"),
    ],
)
def test_an_encoding_that_does_not_fit_is_refused(
    text: str | None, said: str, folder: Path
) -> None:
    if text is not None:
        (folder / "encoding.json").write_text(text)
    parties = {
        "bank": {"file": "bank.csv", "encoding": "encoding.json"}, "shop": {"file": "shop.parquet"}
    }  # fmt: skip
    with pytest.raises(DataError, match=said):
        load_data(settings(folder, parties=parties), seed=0)


@pytest.mark.parametrize(("split", "moves"), [("by_class", True), ("at_random", False)])
def test_a_split_at_random_reads_no_label(split: str, moves: bool, folder: Path) -> None:
    def tested() -> list[int]:
        data = load_data(settings(folder, split=split), seed=0)
        assert len(data.test_rows) == 10
        return data.test_rows.tolist()

    before = tested()
    table = bank()
    table.loc[[5, 8], "left"] = ["yes", "no"]
    table.to_csv(folder / "bank.csv", index=False)
    assert (tested() != before) is moves


@pytest.mark.parametrize("name", ["bank.csv", "shop.csv"])
def test_columns_of_one_name_are_refused_and_not_renamed(folder: Path, name: str) -> None:
    frame = bank() if name == "bank.csv" else shop()
    frame.rename(columns={frame.columns[-2]: "customer"}).to_csv(folder / name, index=False)
    with pytest.raises(DataError, match="several columns named customer; give each a name"):
        load_data(settings(folder, shop_options={"file": "shop.csv"}), seed=0)


def test_a_broken_file_is_told_in_one_line(folder: Path) -> None:
    (folder / "bank.csv").write_text("customer,left\n1,2\n1,2,3,4\n")
    with pytest.raises(DataError, match="save it again") as caught:
        load_data(settings(folder), seed=0)
    assert "\n" not in str(caught.value)


def test_a_split_without_test_rows_says_what_to_do(folder: Path) -> None:
    bank().assign(left=np.arange(ROWS)).to_csv(folder / "bank.csv", index=False)
    with pytest.raises(DataError, match="take another test_fraction, or more rows of each class"):
        load_data(settings(folder), seed=0)


def test_rows_without_a_label_train_without_one_and_test_nothing(folder: Path) -> None:
    whole = bank()
    whole.loc[1::2, "left"] = None
    whole.to_csv(folder / "bank.csv", index=False)
    data = load_data(settings(folder), seed=0)
    empty = set(whole["customer"][1::2].astype(str))
    assert {data.active.ids[row] for row in data.test_rows.tolist()}.isdisjoint(empty)
    assert {data.active.ids[row] for row in data.labelled_rows.tolist()}.isdisjoint(empty)
    assert len(data.train_rows) == len(data.labelled_rows) + ROWS // 2
    fewer = load_data(settings(folder, labelled=6), seed=0)
    assert len(fewer.labelled_rows) == 6
    assert len(fewer.train_rows) == len(data.train_rows)

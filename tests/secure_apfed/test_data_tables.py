"""The parties' own CSV and Parquet files, and inputs of prediction; tables as they should not be,
as people bring them: what is said of each is the page `bad_inputs.md` beside this, which
`python -m tests.secure_apfed.test_data_tables > tests/secure_apfed/bad_inputs.md` writes anew.
"""

import datetime
import decimal
import gzip
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch

from secure_apfed.alignment.ids import IdFile
from secure_apfed.data import ColumnEncoding, ImageEncoding, compute_files_digest, frames, load_data
from secure_apfed.data.tables import load_own_tables, warn_of_labels
from secure_apfed.errors import ApfedError, DataError, SuspectColumnWarning
from secure_apfed.settings.data import DataSettings, Missing, PartySettings
from tests.secure_apfed.whole_files import load_features

ROWS = 40
IMAGES = ImageEncoding(channels=1, height=4, width=4, first_row=2, end_row=4)
MANY = 60


def bank() -> pd.DataFrame:
    draw = np.random.default_rng(1)
    return pd.DataFrame(
        {
            "customer": [f"{row:03d}" for row in range(ROWS)],
            "income": draw.normal(3000, 800, ROWS).round(2),
            "branch": draw.choice(["north", "south"], ROWS),
            "left": np.where(np.arange(ROWS) % 4 == 0, "yes", "no"),
        }
    )


def shop() -> pd.DataFrame:
    draw = np.random.default_rng(2)
    rows = draw.permutation(np.arange(10, 50))
    return pd.DataFrame(
        {
            "customer": [f"{row:03d}" for row in rows],
            "visits": draw.integers(0, 30, ROWS),
            "spent": draw.normal(50, 9, ROWS),
            "member": draw.integers(0, 2, ROWS).astype(bool),
        }
    )


def settings(
    folder: Path, *, shop_options: Mapping[str, object] | None = None, **more: object
) -> DataSettings:
    parties = {
        "bank": {"file": "bank.csv"},
        "shop": {"file": "shop.parquet"} | dict(shop_options or {}),
    }
    base = {
        "dataset": "tables",
        "folder": folder,
        "parties": parties,
        "active": "bank",
        "id_column": "customer",
        "label_column": "left",
    }
    return DataSettings.model_validate(base | more)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    bank().to_csv(tmp_path / "bank.csv", index=False)
    shop().to_parquet(tmp_path / "shop.parquet")
    return tmp_path


def test_own_tables_keep_their_ids_order_and_overlap(folder: Path) -> None:
    data = load_data(settings(folder), seed=0)
    (passive,) = data.passives
    assert (data.active.name, passive.name, data.classes) == ("bank", "shop", ("no", "yes"))
    assert (data.active.ids, passive.ids) == (tuple(bank()["customer"]), tuple(shop()["customer"]))
    assert data.active.labels is not None
    assert data.active.labels.tolist() == [int(row % 4 == 0) for row in range(ROWS)]
    assert data.active.features.shape == (ROWS, 3)
    names = [passive.encoding.feature_name(at) for at in range(4)]
    assert names == ["visits", "spent", "member=False", "member=True"]
    # Statistics are each party's own, and the active's those of its training rows.
    income = data.active.features[:, 0].double()
    visits = passive.features[:, 0].double()
    assert abs(float(income[data.train_rows].mean())) < 1e-6 < abs(float(income.mean()))
    assert abs(float(visits.mean())) < 1e-6
    few = load_data(settings(folder, limit=12), seed=0)
    assert (len(few.train_rows), len(few.test_rows), len(few.active.ids)) == (12, 10, 22)
    tests = [{one.active.ids[row] for row in one.test_rows.tolist()} for one in (data, few)]
    assert tests[0] == tests[1]


def test_classes_may_be_given_and_whole_numbers_sort_as_numbers(folder: Path) -> None:
    data = load_data(settings(folder, classes=["yes", "no"]), seed=0)
    assert data.active.labels is not None
    assert data.active.labels.tolist() == [int(row % 4 != 0) for row in range(ROWS)]
    numbers = bank().assign(left=[row % 3 * 5 for row in range(ROWS)])
    numbers.to_csv(folder / "bank.csv", index=False)
    assert load_data(settings(folder), seed=0).classes == ("0", "5", "10")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"numeric": ["colour"]}, "shop: shop.parquet lacks the columns colour; it has customer"),
        ({"ignore": ["colour"], "id_column": "person"}, "lacks the columns person, colour"),
        ({"ignore": ["visits", "spent", "member"]}, "shop: no feature columns are left"),
    ],
)
def test_settings_that_do_not_fit_the_file(
    folder: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        load_data(settings(folder, shop_options=options), seed=0)


def test_a_passive_s_column_is_not_called_like_the_labels(folder: Path) -> None:
    shop().assign(left=1).to_parquet(folder / "shop.parquet")
    with pytest.raises(DataError, match="shop: its column 'left' is called like the active's"):
        load_data(settings(folder), seed=0)


def test_named_columns_ignored_columns_and_two_id_columns(folder: Path) -> None:
    options = {"numeric": ["spent"], "id_column": ["customer", "visits"]}
    data = load_data(settings(folder, shop_options=options), seed=0)
    assert data.passives[0].features.shape == (ROWS, 3)  # spent, and member, which nothing names
    assert data.passives[0].ids[0] == f"{shop()['customer'][0]}\x1f{shop()['visits'][0]}"
    ignoring = load_data(settings(folder, shop_options={"ignore": ["member", "spent"]}), seed=0)
    assert ignoring.passives[0].features.shape == (ROWS, 1)


ENCODING = ColumnEncoding.for_numeric_columns(["a", "b"])


@pytest.mark.parametrize("name", ["a.npy", "b-idx3-ubyte", "b-idx3-ubyte.gz", "c.csv"])
def test_prediction_reads_arrays_and_idx_images(name: str, tmp_path: Path) -> None:
    images = np.arange(32, dtype=np.uint8).reshape(2, 4, 4)
    expected = torch.from_numpy(images[:, None, 2:].astype(np.float32)) / 255
    header = bytes([0, 0, 8, 3]) + b"".join(size.to_bytes(4, "big") for size in images.shape)
    np.save(tmp_path / "a.npy", images)
    (tmp_path / "b-idx3-ubyte").write_bytes(header + images.tobytes())
    (tmp_path / "b-idx3-ubyte.gz").write_bytes(gzip.compress(header + images.tobytes()))
    pd.DataFrame(images.reshape(2, 16)).to_csv(tmp_path / "c.csv", index=False)
    assert torch.equal(load_features(tmp_path / name, IMAGES)[1], expected)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.csv", "a.csv: 1 of 2 columns are missing: b"),
        ("b.csv", "b.csv: it has no rows"),
        ("c.csv", "c.csv: column 'b' is numeric"),
        ("x.npy", "not a readable .npy array"),
        ("x.png", "x.png: unknown format; give .csv"),
        ("none.npy", "none.npy: there is no such file"),
        ("none.csv", "there is no file"),
        ("none", "cannot be read"),
        ("o.npy", r"not a readable \.npy array"),
        ("s.npy", r"expected rows of features, got shape \(3,\)"),
    ],
)
def test_inputs_that_cannot_be_predicted(name: str, message: str, tmp_path: Path) -> None:
    np.save(tmp_path / "o.npy", np.array([{}], dtype=object), allow_pickle=True)
    np.save(tmp_path / "s.npy", np.zeros(3))
    (tmp_path / "a.csv").write_bytes(b"a,c\n1,2\n")
    (tmp_path / "b.csv").write_bytes(b"a,b\n")
    (tmp_path / "c.csv").write_bytes(b"a,b\n1,old\n")
    (tmp_path / "x.npy").write_bytes(b"\x93NUMPY broken")
    (tmp_path / "x.png").write_bytes(b"\x89PNG")
    with pytest.raises(DataError, match=message):
        load_features(tmp_path / name, ENCODING)


def test_an_id_column_that_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "c.csv").write_bytes(b"a,b\n1,old\n")
    with pytest.raises(DataError, match="the ID columns who are missing"):
        load_features(tmp_path / "c.csv", ENCODING, id_columns=["who"])


def use_encoding(folder: Path) -> DataSettings:
    """Write the active's table anew, and take its encoding from a file."""
    bank().assign(income=lambda table: 2 * table["income"]).to_csv(folder / "bank.csv")
    given = {"file": "bank.csv", "encoding": "encoding.json", "ignore": ["Unnamed: 0"]}
    return settings(folder, parties={"bank": given, "shop": {"file": "shop.parquet"}})


@pytest.mark.parametrize("nested", [False, True], ids=["alone", "in a card"])
def test_an_encoding_from_elsewhere_does_not_read_the_rows(nested: bool, folder: Path) -> None:
    fitted = load_data(settings(folder), seed=0).active.encoding
    told = fitted.model_dump(mode="json")
    own = use_encoding(folder)
    (folder / "encoding.json").write_text(json.dumps({"encoding": told} if nested else told))
    active = load_data(own, seed=0).active
    assert active.encoding == fitted
    income = fitted.encode(bank(), source="bank")[:, 0]
    mean, scale = (getattr(fitted.columns[0], name) for name in ("mean", "scale"))  # type: ignore[union-attr]  # of columns
    torch.testing.assert_close(active.features[:, 0], 2 * income + mean / scale)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "bank: encoding.json holds no encoding"),
        ("[]", "bank: encoding.json holds no encoding"),
        (ColumnEncoding.for_numeric_columns(["age"]).model_dump_json(), "age"),
        (IMAGES.model_dump_json(), "encoding of images"),
    ],
    ids=["no file", "a list", "of another table", "of images"],
)
def test_what_is_no_encoding_of_the_table_is_refused(
    text: str | None, said: str, folder: Path
) -> None:
    own = use_encoding(folder)
    if text is not None:
        (folder / "encoding.json").write_text(text)
    with pytest.raises(DataError, match=said):
        load_data(own, seed=0)


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


def large_bank(**more: Any) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "id": [f"p{row}" for row in range(MANY)],
            "age": rng.normal(size=MANY).round(3),
            **more,
            "label": np.where(np.arange(MANY) % 2, "yes", "no"),
        }
    )


def write_and_load(
    folder: Path,
    frame: pd.DataFrame,
    name: str = "large_bank.csv",
    missing: Missing = "error",
    **more: Any,
) -> Any:
    if name.endswith("csv"):
        frame.to_csv(folder / name, index=False)
    elif name.endswith("parquet"):
        frame.to_parquet(folder / name, index=False)
    large_bank()[["id", "age"]].rename(columns={"age": "visits"}).to_csv(
        folder / "shop.csv", index=False
    )
    parties = {
        "active": PartySettings(file=Path(name), missing=missing),
        "shop": PartySettings(file=Path("shop.csv")),
    }
    settings = DataSettings(dataset="tables", folder=folder, parties=parties, **more)
    return load_data(settings, seed=0)


def test_a_comma_at_the_end_of_each_row_shifts_nothing(tmp_path: Path) -> None:
    first, *rows = large_bank(n=np.arange(MANY) % 7).to_csv(index=False).splitlines()
    text = "\n".join([first, *(row + "," for row in rows)]) + "\n"
    (tmp_path / "comma.txt").write_text(text)
    (tmp_path / "comma.csv").write_text(text)
    data = write_and_load(tmp_path, large_bank(n=np.arange(MANY) % 7))
    again = write_and_load(tmp_path, large_bank(), "comma.txt")
    assert torch.equal(again.active.features, data.active.features)
    encoding = data.active.encoding
    ids, features = load_features(tmp_path / "comma.csv", encoding, id_columns=("id",))
    assert ids == data.active.ids
    assert torch.equal(features, data.active.features)


@pytest.mark.parametrize(
    "text",
    [
        "age,income,visits\n51,2782,3,9\n",
        "age,income,visits\n51,2782,3,,\n",
        large_bank().set_index("id").to_csv(index_label=False),
    ],
    ids=["a number more", "empty cells more", "row names"],
)
def test_rows_with_more_cells_than_names_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "more.csv").write_text(text)
    with pytest.raises(DataError, match="name every column there, that of row names"):
        load_features(tmp_path / "more.csv", ColumnEncoding.for_numeric_columns(("age",)))


PACKED = gzip.compress(b"id,x\n1,2.5\n2,3.5\n", mtime=0)


def test_a_class_called_none_is_one_where_it_is_listed(tmp_path: Path) -> None:
    frame = large_bank()
    frame["label"] = np.array(["None", "Mild", "Severe"])[np.arange(MANY) % 3]
    listed = write_and_load(tmp_path, frame, classes=("None", "Mild", "Severe"))
    assert torch.bincount(listed.active.labels).tolist() == [20, 20, 20]
    with pytest.warns(SuspectColumnWarning, match=r"labels 'None' \(20\) of column 'label' count"):
        inferred = write_and_load(tmp_path, frame)
    assert inferred.classes == ("Mild", "Severe")
    with pytest.warns(SuspectColumnWarning, match="are a class each"):
        kept = write_and_load(tmp_path, frame, "large_bank.parquet")
    assert kept.classes == ("Mild", "None", "Severe")


def test_decimals_and_durations_are_numbers_and_as_labels_keep_their_digits(tmp_path: Path) -> None:
    amounts = np.random.default_rng(1).integers(0, 10_000, MANY)
    cells = [decimal.Decimal(int(one)) / 10 for one in amounts]
    stay = pd.to_timedelta(np.arange(MANY), unit="h")
    labels = pd.Series([decimal.Decimal(f"{1 + row % 2}.50") for row in range(MANY)])
    frame = large_bank(amount=cells, stay=stay).assign(label=labels)
    data = write_and_load(tmp_path, frame, "large_bank.parquet", classes=("1.50", "2.50"))
    assert (data.active.labels >= 0).all()
    rows, (_, amount, days) = data.train_rows.numpy(), data.active.encoding.columns
    assert (amount.kind, days.kind) == ("numeric", "duration")
    assert amount.mean == pytest.approx(amounts[rows].mean() / 10)
    assert days.mean == pytest.approx(rows.mean() / 24)


@pytest.mark.parametrize("index", [None, "id"])
def test_rows_of_a_frame_that_was_shuffled_are_read(index: str | None, tmp_path: Path) -> None:
    frame = large_bank().sample(frac=1, random_state=0)
    (frame.set_index(index) if index else frame).to_parquet(tmp_path / "odd.pq")
    assert write_and_load(tmp_path, large_bank(), "odd.pq").active.ids == tuple(frame["id"])


def test_a_column_may_be_called_like_an_empty_cell(tmp_path: Path) -> None:
    cells = np.where(np.arange(MANY) % 3, np.nan, np.arange(MANY) % 5)
    encoding = write_and_load(tmp_path, large_bank(NA=cells), missing="mean").active.encoding
    assert [column.kind for column in encoding.columns] == ["numeric", "numeric"]


@pytest.mark.parametrize("file", ["large_bank.csv", "large_bank.parquet"])
def test_dates_may_lie_far_off(file: str, tmp_path: Path) -> None:
    ends = [datetime.date(2020, 1, 1 + row % 27) for row in range(MANY)]
    ends[10] = datetime.date(9999, 12, 31)
    ends[20] = datetime.date(1500, 2, 28)
    data = write_and_load(tmp_path, large_bank(end=ends), file)
    (_, column) = data.active.encoding.columns
    assert column.kind == "date"
    days = np.array([(one - datetime.date(1970, 1, 1)).days for one in ends])
    told = data.active.features[:, 1].numpy() * column.scale + column.mean
    assert told == pytest.approx(days, abs=1.0)


def test_the_digest_of_files_is_of_all_that_is_read(tmp_path: Path) -> None:
    frame = large_bank(part=np.arange(MANY) % 2)
    frame.to_parquet(tmp_path / "large_bank.parquet", partition_cols=["part"])
    parties = {
        "active": PartySettings(file=Path("large_bank.parquet")),
        "shop": PartySettings(file=Path("shop.csv"), encoding=Path("enc.json")),
    }
    settings = DataSettings(dataset="tables", folder=tmp_path, parties=parties)
    for name in ("shop.csv", "enc.json"):
        (tmp_path / name).write_text("{}")
    found = {compute_files_digest(settings)}
    own = compute_files_digest(settings, parties=["active"])
    owns = set[str]()
    for name in ("shop.csv", "enc.json", "large_bank.parquet/part=0/more.parquet"):
        owns.add(compute_files_digest(settings, parties=["active"]))
        (tmp_path / name).write_text("other")
        found.add(compute_files_digest(settings))
    assert owns == {own}
    assert len(found) == 4
    (tmp_path / "shop.csv").unlink()
    with pytest.raises(DataError, match=r"shop: .* cannot be read"):
        compute_files_digest(settings)


TRICKY = (
    b"a,b,c\n1,2.50,x\n-3,1e-3,\n",
    b"\xef\xbb\xbfa,b\r\n007,1\r\n7,2\r\n",
    b"a,b\n1,2\n\n3,NA\n",
    b'a,"b ""c"""\n"1,5","x\ny"\n',
    b'a,b\n5" pipe,1\n',
    b'a,b\n1,"open\n',
    b"a,b\n1\n2,3\n",
    b"a,b\n1,2,3\n",
    b"a,\n1,2\n",
    b"a\n1\n \n2\n",
    b"a,b\n1,2",
    b"a,b\n1,\xff\n",
    b"a,b\n",
    b"a,b\n99999999999999999999,1\n1,-0\n",
    b"a,b\n+1, 2\n.5,1_0\n",
    b"a,b\n1,x\0y\n",
    b"a,b\n123456789012345678,inf\n1,1e400\n",
    b"a,b\nTrue,0x1\nfalse,nan\n",
    b"a,a\n1,2\n",
)


@pytest.mark.parametrize("content", TRICKY)
def test_plain_files_are_read_at_once_as_pandas_reads_them(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.csv").write_bytes(content)

    def load_cells() -> tuple[Any, ...]:
        try:
            frame = frames.load_frame(tmp_path / "x.csv", source="bank")
        except DataError as error:
            return (str(error),)
        cells = [[repr(cell) for cell in frame[name]] for name in frame]
        return list(frame.columns), list(map(str, frame.dtypes)), cells, frame.attrs

    at_once = load_cells()
    monkeypatch.setattr(frames, "_read_plain_csv", lambda *_: None)
    monkeypatch.setattr(frames, "_cast_plain_numbers", lambda _: None)
    assert at_once == load_cells()


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.csv.gz", PACKED + bytes(512)), ("b.csv", gzip.decompress(PACKED))],
    ids=["padded", "not packed"],
)
def test_what_only_pandas_unpacks_is_read(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    assert frames.load_frame(tmp_path / name, source="bank")["x"].tolist() == [2.5, 3.5]


@pytest.mark.parametrize(
    ("name", "content"),
    [("c.csv.gz", PACKED[:-6]), ("d.csv.xz", b"no xz"), ("e.csv.gz", b"")],
    ids=["cut", "not packed so", "empty"],
)
def test_what_nobody_unpacks_is_told(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"bank: .*{name}"):
        frames.load_frame(tmp_path / name, source="bank")


def test_a_cell_may_hold_lines(tmp_path: Path) -> None:
    rows = "".join(f'{row},"a\nb{"c" * 100}"\n' for row in range(30_000))
    (tmp_path / "long.csv").write_text(f"id,note\n{rows}")
    assert len(IdFile("large_bank", tmp_path / "long.csv", "id")) == 30_000


ORDER = np.random.default_rng(5).permutation(MANY)
HALVES = [("yes" if one < MANY // 2 else "no") for one in ORDER]


@pytest.mark.parametrize(
    ("column", "labels", "numbers", "told"),
    [
        (np.where(ORDER < MANY // 2, 3.0, 7.0), HALVES, False, True),
        (ORDER * 1.5, HALVES, False, True),
        (np.where(ORDER == 0, np.nan, ORDER * 1.5), HALVES, False, True),  # but for an empty cell
        (
            np.where(ORDER < MANY // 2, ORDER * 1.5, np.nan),
            HALVES,
            False,
            True,
        ),  # empty of one class
        (np.roll(ORDER, 1) * 1.5, HALVES, False, False),
        (np.where(np.roll(ORDER, 1) < 9, np.nan, np.roll(ORDER, 1)), HALVES, False, False),
        (ORDER * -1.1, [f"{one:g}" for one in ORDER * 3.0], True, True),
        (np.where(ORDER == 7, np.nan, ORDER * 1.1), [f"{one:g}" for one in ORDER], True, True),
        (np.roll(ORDER, 1), [f"{one:g}" for one in ORDER], True, False),
        (np.full(MANY, 2.0), [f"{one:g}" for one in ORDER], True, False),
    ],
)
def test_a_column_that_is_the_label(
    column: Any, labels: list[str], numbers: bool, told: bool
) -> None:
    features = pd.DataFrame({"column": column})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_labels(
            features, labels, source="large_bank", label_column="y", are_labels_numbers=numbers
        )
    assert [one.category for one in caught] == [SuspectColumnWarning] * told


_PAGE = Path(__file__).parent / "bad_inputs.md"
_HEAD = """# Bad inputs

What is said when a table is not as it should be. Each was tried as a new user would, as `bank.csv`
of the active `bank` with the columns id, age, sum, job and the label y; a test tries all of them
again and compares this page. Lines are those of the file, blank ones not counted.
"""


def good() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "id": [f"p{row}" for row in range(MANY)],
            "age": rng.integers(20, 80, MANY),
            "sum": rng.normal(size=MANY).round(3),
            "job": rng.choice(["a", "b", "c"], MANY),
            "y": rng.choice(["no", "yes"], MANY),
        }
    )


class Case(NamedTuple):
    """What is wrong, what writes the file of this name, and what its party says of empty cells."""

    title: str
    write: Callable[[Path], object]
    name: str = "bank.csv"
    missing: str = "error"


def _csv(**columns: Any) -> Callable[[Path], object]:
    return lambda path: good().assign(**columns).to_csv(path, index=False)


def _cell(column: str, row: int, value: Any) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        frame = good().astype({column: "object"})
        frame.loc[row, column] = value
        frame.to_csv(path, index=False)

    return write


def _text(change: Callable[[str], str], encoding: str = "utf-8") -> Callable[[Path], object]:
    return lambda path: path.write_bytes(change(good().to_csv(index=False)).encode(encoding))


def _half_parquet(path: Path) -> None:
    good().to_parquet(path)
    path.write_bytes(path.read_bytes()[:500])


def add_cell(text: str) -> str:
    lines = text.splitlines()
    return "\n".join([*lines[:12], f"{lines[12]},more", *lines[13:]])


def _many_categories(path: Path) -> None:
    rows = np.arange(10**4)
    codes = np.char.add("c", rows.astype(str))
    labels = np.where(rows % 2, "yes", "no")
    pd.DataFrame({"id": rows, "code": codes, "y": labels}).to_csv(path, index=False)


def make_nested_writer(*, lists: bool) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        frame = good()
        cells: list[Any] = [[row, 1] if lists else {"a": row} for row in range(MANY)]
        frame["x"] = pd.Series(cells, dtype=object)
        frame.to_parquet(path)

    return write


CASES: tuple[Case, ...] = (
    Case("columns apart by semicolons", _text(lambda text: text.replace(",", ";"))),
    Case("columns apart by tabs", _text(lambda text: text.replace(",", "\t"))),
    Case("Latin-1", _text(lambda text: text.replace("job", "Größe"), "latin-1")),
    Case("UTF-16", _text(str, "utf-16")),
    Case("an empty file", lambda path: path.write_text("")),
    Case("a header and no row", lambda path: good().iloc[:0].to_csv(path, index=False)),
    Case("no such file", lambda path: None),
    Case("a folder", Path.mkdir),
    Case("a workbook", lambda path: path.write_bytes(b"PK\x03\x04"), "bank.xlsx"),
    Case(
        "packed by its name alone",
        lambda path: good().to_csv(path, compression=None),
        "bank.csv.gz",
    ),
    Case(
        "packed and cut",
        lambda path: path.write_bytes(gzip.compress(b"id,y\n" * 999)[:40]),
        "bank.csv.gz",
    ),
    Case("a line with a cell too many", _text(add_cell)),
    Case("a quote that is never closed", _text(lambda text: text.replace("p5,", '"p5,'))),
    Case("NUL bytes", _text(lambda text: text.replace("p5,", "p\x005,"))),
    Case("a column without a name", _text(lambda text: text.replace("id,age", "id,", 1))),
    Case("two columns of one name", _text(lambda text: text.replace("sum", "age", 1))),
    Case("no ID column", _text(lambda text: text.replace("id,", "ID,", 1))),
    Case("no label column", lambda path: good().drop(columns="y").to_csv(path, index=False)),
    Case("an ID twice", _cell("id", 9, "p3")),
    Case("an empty ID", _cell("id", 9, None)),
    Case("labels of one class", _csv(y="no")),
    Case("no label at all", _csv(y=None)),
    Case("a label in two spellings", _cell("y", 4, "Yes")),
    Case("a label that is no class", _cell("y", 4, "maybe")),
    Case("a text among numbers", _cell("age", 7, "unknown")),
    Case("decimal commas", _csv(sum=[f"{row},5" for row in range(MANY)])),
    Case("commas between thousands", _csv(sum=[f"{row + 1},234,567" for row in range(MANY)])),
    Case("per cent", _csv(sum=[f"{row}%" for row in range(MANY)])),
    Case("a currency", _csv(sum=[f"{row} €" for row in range(MANY)])),
    Case("dates by day and month", _csv(since=[f"{row % 28 + 1}.1.2026" for row in range(MANY)])),
    Case("a date that there is not", _csv(since=["2026-02-30", *["2026-01-31"] * (MANY - 1)])),
    Case("empty cells", _cell("age", 5, None)),
    Case("an empty column", _csv(sum=None)),
    Case("an infinite number", _cell("sum", 5, "inf")),
    Case("a number too large", _cell("sum", 5, "1e300")),
    Case("10^4 categories", _many_categories),
    Case("Parquet with records in cells", make_nested_writer(lists=False), "bank.parquet"),
    Case("Parquet with lists in cells", make_nested_writer(lists=True), "bank.parquet"),
    Case("half of a Parquet file", _half_parquet, "bank.parquet"),
)

WARNED: tuple[Case, ...] = (
    Case(
        "the label in disguise",
        lambda path: (
            good()
            .assign(decision=lambda frame: np.where(frame["y"] == "yes", "granted", "refused"))
            .to_csv(path, index=False)
        ),
    ),
    Case("row numbers as a feature", _csv(number=range(MANY))),
    Case("codes with leading zeros", _csv(plz=[f"{row % 7:05d}" for row in range(MANY)])),
    Case(
        "NA as a category",
        lambda path: (
            good()
            .assign(
                since=["2026-01-31", "NA"] * (MANY // 2),
                level=["None", "low", "high"] * (MANY // 3),
            )
            .to_csv(path, index=False)
        ),
        missing="mean",
    ),
    Case("an ID as a feature", _csv(iban=[f"DE{row:05d}" for row in range(MANY)])),
)
"""Those that are taken, with a warning."""


@cache
def collect_messages(case: Case) -> tuple[str, ...]:
    with (
        tempfile.TemporaryDirectory() as folder,
        warnings.catch_warnings(record=True, action="always") as caught,
    ):
        case.write(Path(folder) / case.name)
        settings = DataSettings.model_validate(
            {
                "dataset": "tables",
                "active": "bank",
                "classes": ["no", "yes"],
                "id_column": "id",
                "label_column": "y",
                "folder": folder,
                "parties": {
                    "bank": {"file": case.name, "missing": case.missing},
                    "shop": {"file": "shop.csv"},
                },
            }
        )
        try:
            load_own_tables(settings, "bank", seed=0)
        except ApfedError as error:
            return (str(error).replace(f"{folder}/", ""),)
    return tuple(str(one.message) for one in caught if one.category is SuspectColumnWarning)


def page() -> str:
    told: Mapping[str, tuple[Case, ...]] = {"Refused": CASES, "Taken with a warning": WARNED}
    lines = [_HEAD]
    for title, cases in told.items():
        lines += [f"## {title}", "", "| what was wrong | what was said |", "|---|---|"]
        for case in cases:
            text = " ".join(" ".join(collect_messages(case)).split())
            lines.append(f"| {case.title} | {text.replace('|', chr(92) + '|')} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def test_the_page_says_what_is_said_in_a_line_each() -> None:
    assert _PAGE.read_text("utf-8") == page()
    told = {case.title: collect_messages(case) for case in (*CASES, *WARNED)}
    assert not [title for title, texts in told.items() if not texts]
    assert not [title for title, texts in told.items() if any("\n" in text for text in texts)]


@pytest.mark.parametrize(
    "columns",
    [
        {"sum": 1.0},
        {"flag": [row % 3 == 0 for row in range(MANY)]},
        {"since": [f"2026-01-{row % 28 + 1:02d}" for row in range(MANY)]},
        {"x": np.random.default_rng(1).normal(size=MANY)},
        {"branch": [7 * (row % 20) for row in range(MANY)]},
    ],
    ids=["a constant", "truth values", "dates", "many different numbers", "codes with gaps"],
)
def test_nothing_is_said_of_usual_columns(columns: dict[str, Any]) -> None:
    assert collect_messages(Case("usual", _csv(**columns))) == ()


if __name__ == "__main__":
    sys.stdout.write(page())

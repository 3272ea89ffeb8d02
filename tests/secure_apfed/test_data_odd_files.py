"""Files as other programs write them: what is read is what they hold, or an error says why not."""

import datetime
import decimal
import lzma
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from secure_apfed.alignment.ids import IdFile
from secure_apfed.data import ColumnEncoding, files_digest, load_data
from secure_apfed.data.encoding import (
    CategoricalColumn,
    DateColumn,
    DurationColumn,
    NumericColumn,
)
from secure_apfed.data.labels import TargetScale
from secure_apfed.data.tables import warn_of_labels
from secure_apfed.errors import DataError, SuspectColumnWarning
from secure_apfed.models import RandomFeatures
from secure_apfed.settings.data import DataSettings, Missing, PartySettings
from tests.secure_apfed.whole_files import load_features

ROWS = 60


def bank(**more: Any) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    return pd.DataFrame({
        "id": [f"p{row}" for row in range(ROWS)], "age": rng.normal(size=ROWS).round(3), **more,
        "label": np.where(np.arange(ROWS) % 2, "yes", "no"),
    })  # fmt: skip


def loaded(
    folder: Path, frame: pd.DataFrame, name: str = "bank.csv", missing: Missing = "error",
    **more: Any,
) -> Any:  # fmt: skip
    if name.endswith("csv"):
        frame.to_csv(folder / name, index=False)
    elif name.endswith("parquet"):
        frame.to_parquet(folder / name, index=False)
    bank()[["id", "age"]].rename(columns={"age": "visits"}).to_csv(folder / "shop.csv", index=False)
    parties = {
        "active": PartySettings(file=Path(name), missing=missing),
        "shop": PartySettings(file=Path("shop.csv")),
    }
    settings = DataSettings(dataset="tables", folder=folder, parties=parties, **more)
    return load_data(settings, seed=0)


@pytest.mark.parametrize("texts", [("TRUE", "FALSE"), ("true", "false"), ("True", "False")])
@pytest.mark.parametrize("file", ["bank.csv", "bank.parquet"])
def test_truths_are_encoded_as_in_training(
    texts: tuple[str, str], file: str, tmp_path: Path
) -> None:
    frame = bank(smoker=np.array(texts)[np.arange(ROWS) % 3 // 2])
    data = loaded(tmp_path, frame, file)
    encoding = data.active.encoding
    assert isinstance(encoding, ColumnEncoding)
    for again in ("again.csv", "again.parquet"):
        if again.endswith("csv"):
            frame.to_csv(tmp_path / again, index=False)
        else:
            frame.assign(smoker=frame["smoker"].str.lower() == "true").to_parquet(tmp_path / again)
        _, features = load_features(tmp_path / again, encoding, id_columns=("id",))
        assert torch.equal(features, data.active.features), again
    spelled = CategoricalColumn(name="x", categories=("True", "yes"))
    assert list(spelled.spellings) == ["True", "yes"]
    both = CategoricalColumn(name="x", categories=("TRUE", "True"))
    assert both.spellings["TRUE"] == "TRUE"


def test_a_comma_at_the_end_of_each_row_shifts_nothing(tmp_path: Path) -> None:
    first, *rows = bank(n=np.arange(ROWS) % 7).to_csv(index=False).splitlines()
    text = "\n".join([first, *(row + "," for row in rows)]) + "\n"
    (tmp_path / "comma.txt").write_text(text)
    (tmp_path / "comma.csv").write_text(text)
    data = loaded(tmp_path, bank(n=np.arange(ROWS) % 7))
    assert torch.equal(loaded(tmp_path, bank(), "comma.txt").active.features, data.active.features)
    encoding = data.active.encoding
    ids, features = load_features(tmp_path / "comma.csv", encoding, id_columns=("id",))
    assert ids == data.active.ids
    assert torch.equal(features, data.active.features)


def test_rows_with_more_cells_than_names_are_refused(tmp_path: Path) -> None:
    for rows in ("51,2782,3,9\n48,1500,4,8\n", "51,2782,3,,\n48,1500,4,,\n"):
        (tmp_path / "more.csv").write_text("age,income,visits\n" + rows)
        with pytest.raises(DataError, match="more cells than its first line has names"):
            load_features(tmp_path / "more.csv", ColumnEncoding.plain(("age",)))


def test_row_names_without_a_header_are_refused(tmp_path: Path) -> None:
    frame = bank().set_index("id")
    text = frame.to_csv(index_label=False)
    (tmp_path / "r.csv").write_text(text)
    with pytest.raises(DataError, match="name every column there, that of row names"):
        load_features(tmp_path / "r.csv", ColumnEncoding.plain(("age",)))


def test_a_class_called_none_is_one_where_it_is_listed(tmp_path: Path) -> None:
    frame = bank()
    frame["label"] = np.array(["None", "Mild", "Severe"])[np.arange(ROWS) % 3]
    listed = loaded(tmp_path, frame, classes=("None", "Mild", "Severe"))
    assert torch.bincount(listed.active.labels).tolist() == [20, 20, 20]
    with pytest.warns(SuspectColumnWarning, match=r"labels 'None' \(20\) of column 'label' count"):
        inferred = loaded(tmp_path, frame)
    assert inferred.classes == ("Mild", "Severe")
    with pytest.warns(SuspectColumnWarning, match="are a class each"):
        kept = loaded(tmp_path, frame, "bank.parquet")
    assert kept.classes == ("Mild", "None", "Severe")


def test_decimals_and_durations_are_numbers(tmp_path: Path) -> None:
    amounts = np.random.default_rng(1).integers(0, 10_000, ROWS)
    cells = [decimal.Decimal(int(one)) / 10 for one in amounts]
    stay = pd.to_timedelta(np.arange(ROWS), unit="h")
    data = loaded(tmp_path, bank(amount=cells, stay=stay), "bank.parquet")
    encoding, rows = data.active.encoding, data.train_rows.numpy()
    _, amount, days = encoding.columns
    assert isinstance(amount, NumericColumn)
    assert amount.mean == pytest.approx(amounts[rows].mean() / 10)
    assert isinstance(days, DurationColumn)
    assert days.mean == pytest.approx(rows.mean() / 24)


def test_decimals_that_are_ids_and_labels_keep_their_digits(tmp_path: Path) -> None:
    numbers = [10**17 + 7 * row for row in range(ROWS)]
    labels = [decimal.Decimal(f"{1 + row % 2}.50") for row in range(ROWS)]
    frame = pd.DataFrame({**bank(), "id": list(map(decimal.Decimal, numbers)), "label": labels})
    data = loaded(tmp_path, frame, "bank.parquet", classes=("1.50", "2.50"))
    assert data.active.ids == tuple(map(str, numbers))
    assert (data.active.labels >= 0).all()


@pytest.mark.parametrize("index", [None, "id"])
def test_rows_of_a_frame_that_was_shuffled_are_read(index: str | None, tmp_path: Path) -> None:
    frame = bank().sample(frac=1, random_state=0)
    (frame.set_index(index) if index else frame).to_parquet(tmp_path / "odd.pq")
    assert loaded(tmp_path, bank(), "odd.pq").active.ids == tuple(frame["id"])


@pytest.mark.parametrize("name", ["NA", "null", "None"])
def test_a_column_may_be_called_like_an_empty_cell(name: str, tmp_path: Path) -> None:
    cells = np.where(np.arange(ROWS) % 3, np.nan, np.arange(ROWS) % 5)
    encoding = loaded(tmp_path, bank(**{name: cells}), missing="mean").active.encoding
    assert isinstance(encoding, ColumnEncoding)
    assert [one.kind for one in encoding.columns] == ["numeric", "numeric"]


def test_the_digest_of_files_is_of_all_that_is_read(tmp_path: Path) -> None:
    frame = bank(part=np.arange(ROWS) % 2)
    frame.to_parquet(tmp_path / "bank.parquet", partition_cols=["part"])
    (tmp_path / "enc.json").write_text(ColumnEncoding.plain(("age",)).model_dump_json())
    parties = {
        "active": PartySettings(file=Path("bank.parquet")),
        "shop": PartySettings(file=Path("shop.csv"), encoding=Path("enc.json")),
    }
    (tmp_path / "shop.csv").write_text("id,age\np1,3\n")
    settings = DataSettings(dataset="tables", folder=tmp_path, parties=parties)
    found = [files_digest(settings)]
    own = files_digest(settings, of=["active"])
    (tmp_path / "enc.json").write_text("{}")
    found.append(files_digest(settings))
    (tmp_path / "shop.csv").write_text("id,age\np1,4\n")
    found.append(files_digest(settings))
    assert files_digest(settings, of=["active"]) == own
    (tmp_path / "bank.parquet" / "part=0" / "more").write_text("")
    found.append(files_digest(settings))
    assert len(set(found)) == 4
    (tmp_path / "shop.csv").unlink()
    with pytest.raises(DataError, match=r"shop: .* cannot be read"):
        files_digest(settings)


@pytest.mark.parametrize("file", ["bank.csv", "bank.parquet"])
def test_dates_may_lie_far_off(file: str, tmp_path: Path) -> None:
    ends = [datetime.date(2020, 1, 1 + row % 27) for row in range(ROWS)]
    ends[10], ends[20] = datetime.date(9999, 12, 31), datetime.date(1500, 2, 28)
    data = loaded(tmp_path, bank(end=ends), file)
    (_, column) = data.active.encoding.columns
    assert isinstance(column, DateColumn)
    days = np.array([(one - datetime.date(1970, 1, 1)).days for one in ends])
    told = data.active.features[:, 1].numpy() * column.scale + column.mean
    assert told == pytest.approx(days, abs=1.0)


def test_labels_may_be_small() -> None:
    assert TargetScale.of(np.array([1e-13, 3e-13]), party="bank").scale == pytest.approx(1e-13)
    with pytest.raises(DataError, match="are all 1e-13"):
        TargetScale.of(np.array([1e-13, 1e-13]), party="bank")


def test_a_feature_that_never_differed_says_nothing_where_it_does() -> None:
    torch.manual_seed(0)
    encoder, rows_NF = RandomFeatures(4, 50), torch.randn(100, 4)
    rows_NF[:, 3] = 2024.0
    encoder.fit(rows_NF)
    later_NF = rows_NF.clone()
    later_NF[:, 3] = 2025.0
    assert torch.equal(encoder(later_NF), encoder(rows_NF))
    assert encoder(rows_NF).isfinite().all()


def test_ids_are_read_as_a_run_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "bank.csv.xz"
    path.write_bytes(lzma.compress(b"id,note\na,x\nb,y\n"))
    pieces = IdFile("bank", path, "id").pieces()
    assert [row for piece in pieces for row in piece] == ["a", "b"]
    empty = tmp_path / "empty.csv"
    empty.write_text("id,note\na,x\nNone,y\n")
    with pytest.raises(DataError, match="is empty in 1 rows, first in line 3"):
        list(IdFile("bank", empty, "id").pieces())
    long = tmp_path / "long.csv"
    rows = "".join(f'{row},"a\nb{"c" * 100}"\n' for row in range(30_000))
    long.write_text(f"id,note\n{rows}")
    assert len(IdFile("bank", long, "id")) == 30_000


ORDER = np.random.default_rng(5).permutation(ROWS)
HALVES = [("yes" if one < ROWS // 2 else "no") for one in ORDER]


@pytest.mark.parametrize(("column", "labels", "numbers", "told"), [
    (np.where(ORDER < ROWS // 2, 3.0, 7.0), HALVES, False, True),
    (ORDER * 1.5, HALVES, False, True),
    (np.where(ORDER == 0, np.nan, ORDER * 1.5), HALVES, False, True),  # but for an empty cell
    (np.where(ORDER < ROWS // 2, ORDER * 1.5, np.nan), HALVES, False, True),  # empty of one class
    (np.roll(ORDER, 1) * 1.5, HALVES, False, False),
    (np.where(np.roll(ORDER, 1) < 9, np.nan, np.roll(ORDER, 1)), HALVES, False, False),
    (ORDER * -1.1, [f"{one:g}" for one in ORDER * 3.0], True, True),
    (np.where(ORDER == 7, np.nan, ORDER * 1.1), [f"{one:g}" for one in ORDER], True, True),
    (np.roll(ORDER, 1), [f"{one:g}" for one in ORDER], True, False),
    (np.full(ROWS, 2.0), [f"{one:g}" for one in ORDER], True, False),
])  # fmt: skip
def test_a_column_that_is_the_label_is_warned_of(
    column: Any, labels: list[str], numbers: bool, told: bool
) -> None:
    features = pd.DataFrame({"column": column})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_labels(features, labels, source="bank", label="y", numbers=numbers)
    assert [one.category for one in caught] == [SuspectColumnWarning] * told

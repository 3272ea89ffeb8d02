"""One door for IDs: what is taken, how it is written, what is refused, and that advice works."""

import re
from array import array
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from io import StringIO
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from apfed_protocols import IdNormalisation, align
from apfed_protocols.ids import COLUMN_SEPARATOR, ID_KINDS, REFUSAL_TEXTS, id_texts
from secure_apfed.alignment import IdFile
from secure_apfed.alignment.ids import make_id_rules
from secure_apfed.data import ColumnEncoding
from secure_apfed.data.tables import RawTable, load_raw_table
from secure_apfed.errors import DataError
from secure_apfed.interfaces.estimator import VerticalClassifier
from secure_apfed.interfaces.frames import check_frames
from secure_apfed.settings.alignment import AlignmentSettings
from secure_apfed.settings.data import DataSettings
from tests.secure_apfed.whole_files import load_features

BERLIN = timezone(timedelta(hours=1))
UNIQUE = UUID("8B2D9F0E-7C1A-4F63-9D57-3E0C5A1B2F44")

# A column, and its texts.
TAKEN: dict[str, tuple[Any, list[str]]] = {
    "text": (["007", "7", "é", "Ann"], ["007", "7", "é", "Ann"]),
    "bytes": ([b"k0", bytearray(b"k1"), "é".encode()], ["k0", "k1", "é"]),
    "numpy bytes": (np.array([b"k0", b"k1"]), ["k0", "k1"]),
    "big ints": ([2**53 + 1, 10**30, -1], ["9007199254740993", "1" + "0" * 30, "-1"]),
    "uint64": (np.array([2**64 - 1], np.uint64), ["18446744073709551615"]),
    "nullable ints": (pd.Series([2**60 + 1], dtype="Int64"), ["1152921504606846977"]),
    "floats": (np.array([1001.0, -0.0, 2.0**53 - 1]), ["1001", "0", "9007199254740991"]),
    "float32": (np.array([2**24 - 1], np.float32), ["16777215"]),
    "decimals": ([Decimal("1001.00"), Decimal("1E+3")], ["1001", "1000"]),
    "days": ([date(2026, 1, 31)], ["2026-01-31"]),
    "days of numpy": (np.array(["2026-01-31"], "M8[D]"), ["2026-01-31"]),
    "days of polars": (pl.Series([date(2026, 1, 31)]), ["2026-01-31"]),
    "moments": (pd.Series(pd.to_datetime(["2026-01-31 10:00"])), ["2026-01-31 10:00:00"]),
    "moments of numpy": (
        np.array(["2026-01-31T10:00:00.5", "2026-01-31"], "M8[ns]"),
        ["2026-01-31 10:00:00.500000", "2026-01-31 00:00:00"],
    ),
    "nanoseconds": (np.array([1], "M8[ns]"), ["1970-01-01 00:00:00.000000001"]),
    "two zones": (
        [
            datetime(2026, 1, 31, 10, tzinfo=BERLIN),
            datetime(2026, 1, 31, 9, tzinfo=UTC),
            pd.Timestamp("2026-01-31 04:00", tz="America/New_York"),
        ],
        ["2026-01-31 09:00:00+00:00"] * 3,
    ),
    "UUIDs": ([UNIQUE], ["8b2d9f0e-7c1a-4f63-9d57-3e0c5a1b2f44"]),
    "categories of text": (pd.Series(["b", "a", "b"], dtype="category"), ["b", "a", "b"]),
    "categories of ints": (pd.Categorical([2**60 + 1, 3]), ["1152921504606846977", "3"]),
    "levels of floats": (
        pd.MultiIndex.from_arrays([np.array([7], "f4"), [2.0**53 - 1]]),
        ["7" + COLUMN_SEPARATOR + "9007199254740991"],
    ),
    "fields": (
        np.array([(7, 2.0**30)], [("a", "f4"), ("b", "f8")]),
        ["7" + COLUMN_SEPARATOR + "1073741824"],
    ),
    "polars": (pl.Series([2**60 + 1]), ["1152921504606846977"]),
    "arrow": (pa.chunked_array([pa.array([b"k0"])]), ["k0"]),
    "scalars of arrow": (list(pa.array([5, 6])), ["5", "6"]),
    "a dictionary of arrow": (pa.array(["x", "y"]).dictionary_encode(), ["x", "y"]),
    "a set": ({7}, ["7"]),
    "a frozen set of UUIDs": (frozenset({UNIQUE}), [str(UNIQUE)]),
    "keys": ({"k": 1}.keys(), ["k"]),
    "values": ({"k": 1}.values(), ["1"]),
    "UUIDs of pandas": (pd.Index([UNIQUE]), [str(UNIQUE)]),
    "UUIDs of arrow": (pa.chunked_array([pa.array([UNIQUE.bytes], pa.uuid())]), [str(UNIQUE)]),
    "text of arrow in pandas": (pd.Series(["a"], dtype="string[pyarrow]"), ["a"]),
    "categories of polars": (pl.Series(["b", "a"], dtype=pl.Categorical), ["b", "a"]),
    "a tensor": (torch.tensor([2**60 + 1]), ["1152921504606846977"]),
}


@pytest.mark.parametrize(("ids", "texts"), TAKEN.values(), ids=TAKEN)
def test_what_is_taken_is_written_so(ids: Any, texts: list[str]) -> None:
    assert id_texts(ids, party="bank", are_tuples_rows=True) == texts


def _source(ids: "pd.Series") -> "pd.Series":
    """As its file said it, before it was read as floats."""
    table = "id\n" + "".join(f"{int(one)}\n" for one in ids)
    return pd.read_csv(StringIO(table), dtype={"id": "Int64"})["id"]


def _floats(bits: int, dtype: str) -> "pd.Series":
    return pd.Series(np.array([1, 2**bits, -(2**bits), 2**bits - 1], dtype))


# A column, the reason, the rows, and the advice as it is followed.
REFUSED: dict[str, tuple[Any, str, list[int], Callable[["pd.Series"], Any] | None]] = {
    "NaN": (pd.Series([1.0, np.nan, 3.0]), "nobody", [1], lambda ids: ids.drop([1])),
    "pd.NA": (pd.Series([1, None], dtype="Int64"), "nobody", [1], lambda ids: ids.drop([1])),
    "words": (
        pd.Series([1.0, np.nan, None]).map(str),
        "nobody",
        [1, 2],
        lambda ids: ids.drop([1, 2]),
    ),
    "None of polars": (pl.Series(["a", None]), "nobody", [1], None),
    "NaT of numpy": (np.array(["NaT", "2026-01-31"], "M8[ns]"), "nobody", [0], None),
    "NaN as a decimal": ([Decimal("NaN"), 1], "nobody", [0], None),
    "a part": ([("a", 1), ("b", None)], "nobody", [1], None),
    "2^53": (_floats(53, "f8"), "rounded", [1, 2], _source),
    "2^24": (_floats(24, "f4"), "rounded", [1, 2], _source),
    "nullable": (pd.Series([2.0**53], dtype="Float64"), "rounded", [0], _source),
    "categories": (pd.Series(pd.Categorical(np.array([2**24], "f4"))), "rounded", [0], _source),
    "float32 of arrow": (pa.array([2.0**24], pa.float32()), "rounded", [0], None),
    "float32 of polars": (pl.Series([2.0**24], dtype=pl.Float32), "rounded", [0], None),
    "float32 of pandas": (pd.Series([2.0**24], dtype="float[pyarrow]"), "rounded", [0], None),
    "a level": (
        pd.MultiIndex.from_arrays([np.array([2**24, 1], "f4"), ["a", "b"]]),
        "rounded",
        [0],
        None,
    ),
    "a level of categories": (
        pd.MultiIndex.from_arrays([["a"], pd.Categorical(np.array([2**24], "f4"))]),
        "rounded",
        [0],
        None,
    ),
    "a field": (np.array([(2**24, 1)], [("a", "f4"), ("b", "i8")]), "rounded", [0], None),
    "an array": (array("f", [2**24, 1]), "rounded", [0], None),
    "a tensor": (torch.tensor([256.0, 255.0], dtype=torch.bfloat16), "rounded", [0], None),
    "scalars of arrow": (list(pa.array([2.0**24], pa.float32())), "rounded", [0], None),
    "runs of arrow": (
        pa.RunEndEncodedArray.from_arrays([1], pa.array([2.0**24], pa.float32())),
        "rounded",
        [0],
        None,
    ),
    "fractions": (pd.Series([1.0, 1.5]), "fraction", [1], lambda ids: ids.map("{:.2f}".format)),
    "decimals": (
        pd.Series([Decimal("1.50")]),
        "fraction",
        [0],
        lambda ids: ids.map("{:.2f}".format),
    ),
    "infinite": (pd.Series([np.inf, 1.0]), "infinite", [0], lambda ids: ids.drop([0])),
    "truths": (pd.Series([True, False]), "truth", [0, 1], lambda ids: pd.Series(["a", "b"])),
    "bytes": (pd.Series([b"a", b"\xff\x00"]), "bytes", [1], lambda ids: ids.map(bytes.hex)),
    "surrogates": (["a", "é\ud800"], "unicode", [1], None),
    "digits": (pd.Series([1, 10**4000], dtype=object), "digits", [1], lambda ids: ids.map(hex)),
    "lists": (
        pd.Series([[1, 2], [3, 4]]),
        "nested",
        [0, 1],
        lambda ids: pd.DataFrame(ids.tolist()),
    ),
    "records": ([{"a": 1}], "nested", [0], None),
    "times": (pd.Series([time(1), time(2)]), "type", [0, 1], lambda ids: ids.map(str)),
    "durations": (
        pd.Series(pd.to_timedelta([1, 2], "s")),
        "type",
        [0, 1],
        lambda ids: ids.map(str),
    ),
    "durations of numpy": (np.array([1, 2], "m8[ns]"), "type", [0, 1], None),
    "the first moment": ([datetime(1, 1, 1, tzinfo=BERLIN), 1], "moment", [0], None),
    "the last moment": (
        [1, datetime.max.replace(tzinfo=timezone(-timedelta(hours=2)))],
        "moment",
        [1],
        None,
    ),
    "U+001F": (
        pd.DataFrame({"a": ["x\x1fy"], "b": ["z"]}),
        "joint",
        [0],
        lambda ids: ids.assign(a=ids["a"].str.replace("\x1f", "|")),
    ),
}


@pytest.mark.parametrize(("ids", "why", "rows", "advised"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_is_counted_and_the_advice_works(
    ids: Any,
    why: str,
    rows: list[int],
    advised: Callable[[Any], Any] | None,
    request: pytest.FixtureRequest,
) -> None:
    what, remedy = REFUSAL_TEXTS[why]
    nested = why != "nested"
    if isinstance(ids, pd.DataFrame):
        with pytest.raises(DataError) as caught:
            align({"bank": ids, "shop": ids}, hub="bank")
    else:
        with pytest.raises(DataError) as caught:
            id_texts(ids, party="bank", are_tuples_rows=nested, settings_key="id")
    said = str(caught.value)
    places = f"row{'s' if len(rows) > 1 else ''} {', '.join(map(str, rows))} (from 0); "
    kinds = {"times": "time", "durations": "Timedelta", "durations of numpy": "timedelta64"}
    kind = kinds.get(request.node.callspec.id)
    came = f" ({kind})" if kind else ""
    assert f" {what}{came} in {len(rows)} rows, first in {places}" in said
    assert said.endswith(remedy.format(key=" (id)") if nested else " (id)")
    if advised:
        mended = advised(ids)
        found = align({"bank": mended, "shop": mended}, hub="bank", minimum_rows=1)
        assert len(found["bank"]) == len(mended)


def test_of_a_dict_it_must_be_said_whether_keys_or_values_are_meant() -> None:
    with pytest.raises(DataError, match=r"^bank: .* of type dict, .*; give ids.keys\(\), "):
        id_texts({"id": ["a", "b"]}, party="bank")


def test_every_reason_is_tried() -> None:
    assert {why for _, why, _, _ in REFUSED.values()} == {*REFUSAL_TEXTS}


def test_all_reasons_are_told_with_all_rows_beyond_a_piece() -> None:
    ids: list[object] = [f"p{row}" for row in range(200_000)]
    ids[3] = None
    ids[100_000] = ""
    ids[150_000] = 1.5
    with pytest.raises(DataError) as caught:
        align({"bank": ids, "shop": ids}, hub="bank")
    assert "is empty in 2 rows, first in rows 3, 100000 (from 0)" in str(caught.value)
    assert "It holds numbers with a fraction in 1 rows, first in row 150000" in str(caught.value)


# Two columns, the look of one, and the advice as it is followed; None: the settings that are told.
COMPARED: dict[str, tuple[Any, Any, str, Callable[[Any], Any] | None]] = {
    "points": ([1001, 1002], ["1001.0", "1002.0"], "numbers with a decimal point", None),
    "zeros": (["7", "8"], ["007", "008"], "numbers with leading zeros", None),
    "capitals": ([UNIQUE], [str(UNIQUE).upper()], "UUIDs in capitals", None),
    "days": (
        [date(2026, 1, 31)],
        pd.Series(pd.to_datetime(["2026-01-31"])),
        "moments without",
        lambda ids: ids.dt.strftime("%Y-%m-%d"),
    ),
    "zones": (
        pd.Series(pd.to_datetime(["2026-01-31 09:00Z"])),
        pd.Series(pd.to_datetime(["2026-01-31 10:00"])),
        "moments in UTC",
        lambda ids: ids.dt.tz_localize("Europe/Berlin"),
    ),
    "text": ([1, 2], ["p1", "p2"], "other text", lambda ids: [one[1:] for one in ids]),
    "columns": ([("a", 1)], ["a"], "the same columns of IDs", lambda ids: [("a", 1)]),
}


@pytest.mark.parametrize(("left", "right", "says", "advised"), COMPARED.values(), ids=COMPARED)
def test_kinds_that_never_match_are_told(left: Any, right: Any, says: str, advised: Any) -> None:
    with pytest.raises(DataError, match=r"^shop: its IDs are .*no two can match; ") as caught:
        align({"bank": left, "shop": right}, hub="bank", minimum_rows=1)
    assert says in str(caught.value)
    if advised is None:
        (told,) = re.findall(r"alignment: (\{.*\})", str(caught.value))
        rules = make_id_rules(AlignmentSettings.model_validate(yaml.safe_load(told)))
    else:
        rules = IdNormalisation()
        right = advised(right)
    tables = {"bank": left, "shop": right}
    found = align(tables, hub="bank", minimum_rows=1, normalisation=rules)
    assert len(found["bank"]) == len(left)


def test_one_common_look_is_enough_to_try() -> None:
    with pytest.raises(DataError, match="minimum of 2"):
        align({"bank": ["1001", "p1"], "shop": [1001, 1002, 1003]}, hub="bank")


PEOPLE = [f"p{row}" for row in range(1, 41)]


def _raw(folder: Path) -> RawTable:
    data = DataSettings.model_validate(
        {
            "dataset": "tables",
            "active": "bank",
            "folder": folder,
            "id_column": "id",
            "label_column": "y",
            "parties": {"bank": {"file": "bank.parquet", "missing": "drop"}, "shop": {"file": "x"}},
        }
    )
    return load_raw_table(data, "bank")


def load_ids_twice(folder: Path, table: "pa.Table") -> list[list[str]]:
    parquet.write_table(table, folder / "bank.parquet")
    file = IdFile("bank", folder / "bank.parquet", "id")
    return [list(_raw(folder).ids), [text for piece in file.pieces() for text in piece]]


ARROW = {
    "BINARY": pa.array([b"k%d" % row for row in range(4)]),
    "decimals": pa.array([Decimal(f"100{row}.00") for row in range(4)]),
    "UUIDs": pa.array([UUID(int=row).bytes for row in range(4)], pa.uuid()),
    "zones": pa.array(
        [datetime(2026, 1, 1, row, tzinfo=BERLIN) for row in range(4)],
        pa.timestamp("ms", "Europe/Berlin"),
    ),
    "days": pa.array([date(2026, 1, row + 1) for row in range(4)]),
    "float32": pa.array([1.0, 2.0, 3.0, 4.0], pa.float32()),
    "uint64": pa.array([2**64 - row for row in range(1, 5)], pa.uint64()),
    "categories": pa.array([2**60 + row for row in range(4)]).dictionary_encode(),
}


@pytest.mark.parametrize("ids", ARROW.values(), ids=ARROW)
def test_every_reader_gives_the_same(ids: "pa.Array", tmp_path: Path) -> None:
    table = pa.table({"id": ids, "x": [0.1, 0.7, 0.3, 0.2], "y": ["a", "b", "a", "b"]})
    raw, alone = load_ids_twice(tmp_path, table)
    assert raw == alone == id_texts(ids, party="bank")
    frames = {"shop": table.drop(["y"]), "lab": table.drop(["y"]).to_pandas()}
    checked = check_frames(table, frames, active_name="bank", id_column="id", label_column="y")
    assert all(frame["id"].tolist() == raw for frame in checked.values())


def test_whole_numbers_with_an_empty_cell_keep_their_digits(tmp_path: Path) -> None:
    ids = [2**53 + 1, None, 2**53 + 3, 2**53 + 5]
    table = pa.table({"id": ids, "x": [0.1, None, 0.3, 0.2], "y": ["a", "b", "a", "b"]})
    with pytest.raises(DataError, match=r"bank.parquet is empty in 1 rows, first in row 1 "):
        load_ids_twice(tmp_path, table)
    assert list(_raw(tmp_path).ids) == [str(one) for one in ids if one]


TOLD_BY: dict[str, Callable[[Any, Path], Any]] = {
    "a party's table": lambda ids, folder: load_ids_twice(
        folder, parquet.read_table(folder / "in.parquet")
    ),
    "a file of IDs": lambda ids, folder: list(IdFile("bank", folder / "in.parquet", "id").pieces()),
    "arrow": lambda ids, folder: id_texts(ids, party="bank"),
    "a list": lambda ids, folder: id_texts(list(ids), party="bank"),
    "pandas": lambda ids, folder: id_texts(
        pd.Series(ids, dtype=pd.ArrowDtype(ids.type)), party="bank"
    ),
    "polars": lambda ids, folder: id_texts(pl.Series(pl.from_arrow(ids)), party="bank"),
}


@pytest.mark.parametrize("reader", TOLD_BY)
@pytest.mark.parametrize("zone", ["America/New_York", "Asia/Tokyo"])
def test_moments_of_no_year_are_told_by_every_reader(
    zone: str, reader: str, tmp_path: Path
) -> None:
    far = -62135596800 if zone == "America/New_York" else 253402300799
    ids = pa.array([far, 0], pa.timestamp("s", zone))
    table = pa.table({"id": ids, "x": [0.1, 0.7], "y": ["a", "b"]})
    parquet.write_table(table, tmp_path / "in.parquet")
    with pytest.raises(DataError, match=r"^bank: .* in UTC lie outside of the years 1 to 9999"):
        TOLD_BY[reader](ids, tmp_path)


@pytest.mark.parametrize("dtype", ["f8", "category", "f4", "f2"])
def test_floats_that_lost_digits_match_nobody_wherever_they_are(dtype: str, tmp_path: Path) -> None:
    bits = {"f2": 11, "f4": 24}.get(dtype, 53)
    exact = [2**bits + 4 * row + 1 for row in range(4)]
    floats = pd.Series(exact, dtype="f8" if dtype == "category" else dtype)
    floats = floats.astype("category") if dtype == "category" else floats
    table = pd.DataFrame({"id": floats, "x": [0.1, 0.7, 0.3, 0.2], "y": ["a", "b", "a", "b"]})
    lost = "holds whole numbers as floats too large to be exact in 4 rows"
    table.to_parquet(tmp_path / "in.parquet")
    with pytest.raises(DataError, match=f"bank: column 'id' of bank.parquet {lost}"):
        load_ids_twice(tmp_path, parquet.read_table(tmp_path / "in.parquet"))
    with pytest.raises(DataError, match=f"bank: column 'id' of .*in.parquet {lost}"):
        align({"bank": IdFile("bank", tmp_path / "in.parquet", "id"), "shop": exact}, hub="bank")
    with pytest.raises(DataError, match=f"shop: column 'id' {lost}"):
        check_frames(
            table.assign(id=exact),
            {"shop": table.drop(columns="y")},
            active_name="bank",
            id_column="id",
            label_column="y",
        )
    if dtype == "f2":
        return  # pandas has no index of them
    with pytest.raises(DataError, match=f"active: its index {lost}"):
        _fit(table.set_index("id")[["x"]], table.assign(id=exact).set_index("id")[["x"]])


def _fit(own: pd.DataFrame, lab: pd.DataFrame) -> None:
    settings = {
        "method": "apfed_c",
        "train": {"epochs": 1},
        "guard": {"mechanism": "none"},
        "secure_sum": {"scheme": "plain", "clip": None, "allow_single_passive": True},
    }
    VerticalClassifier({"lab": lab}, settings).fit(own, np.arange(len(own)) % 2)


@pytest.mark.parametrize("nobody", [np.nan, None, pd.NaT, pd.NA, "", "nan"])
@pytest.mark.parametrize("name", ["active", "lab"])
def test_the_index_of_the_estimator_names_nobody(nobody: Any, name: str) -> None:
    own = pd.DataFrame({"x": np.arange(40.0)}, index=[nobody, *PEOPLE[1:]])
    lab = pd.DataFrame({"u": np.arange(40.0)}, index=pd.Index(PEOPLE))
    frames = (own, lab) if name == "active" else (lab, own)
    with pytest.raises(DataError, match=rf"^{name}: its index is empty in 1 rows, .* row 0 "):
        _fit(*frames)


def test_the_estimator_compares_kinds() -> None:
    own = pd.DataFrame({"x": np.arange(40.0)}, index=range(40))
    with pytest.raises(DataError, match=r"^lab: its IDs are other text.*active whole numbers"):
        _fit(own, own.set_axis(PEOPLE))
    with pytest.raises(DataError, match=r"numbers with a decimal point.*whole_numbers\]"):
        _fit(own, own.set_axis([f"{row}.0" for row in range(40)]))


def test_rows_of_predictions_are_called_as_in_training(tmp_path: Path) -> None:
    table = pd.DataFrame({"id": [1001.0, 1002.0], "x": 0.5})
    encoding = ColumnEncoding.for_numeric_columns(["x"])
    table.to_parquet(tmp_path / "in.parquet")
    ids, _ = load_features(tmp_path / "in.parquet", encoding, id_columns=["id"])
    assert ids == ("1001", "1002")
    table.assign(id=[1001.0, 2.0**53]).to_parquet(tmp_path / "in.parquet")
    with pytest.raises(DataError, match=r"too large to be exact in 1 rows, first in row 1 "):
        load_features(tmp_path / "in.parquet", encoding, id_columns=["id"])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-(2**53) + 1, 2**53 - 1), min_size=2, max_size=9, unique=True))
def test_one_number_is_one_text_in_every_type(numbers: list[int]) -> None:
    texts = [str(one) for one in numbers]
    forms: list[Any] = [
        numbers,
        texts,
        [text.encode() for text in texts],
        [float(one) for one in numbers],
        [Decimal(one).quantize(Decimal("1.00")) for one in numbers],
        np.array(numbers),
        pd.Series(numbers, dtype="Int64"),
        pd.Categorical(numbers),
        pl.Series(numbers),
        pa.array(numbers),
        pd.Index(numbers, dtype="f8"),
        dict.fromkeys(numbers).keys(),
        pd.Series(numbers, dtype="f8").astype("Int64"),
    ]
    assert all(id_texts(form, party="bank") == texts for form in forms)


def test_the_page_has_the_table_of_kinds() -> None:
    page = (Path(__file__).parents[2] / "docs" / "alignment.md").read_text("utf-8")
    rows = [f"| {kind.name} | {kind.written_form} |" for kind in ID_KINDS if kind.written_form]
    assert not [row for row in rows if row not in page]

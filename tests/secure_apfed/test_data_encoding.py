"""Encodings: raw columns and images become features, in training and in prediction alike, the same
through every reader, however many rows at a time.
"""

import datetime
import io
import json
import math
import unicodedata
import warnings
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from pydantic import ValidationError
from torch import nn

from apfed_protocols.ids import EMPTY_CELL_TEXTS
from secure_apfed.base.names import column_name
from secure_apfed.data import ColumnEncoding, FeatureEncoding, ImageEncoding
from secure_apfed.data.encoding import (
    CategoricalColumn,
    CellCounts,
    NumericColumn,
    RawFeatures,
    fit_columns,
    parse_encoding,
)
from secure_apfed.data.frames import as_pandas, convert_text_column, read_texts
from secure_apfed.data.inputs import MIN_DRIFT_ROWS, ColumnDrift, DriftMeter
from secure_apfed.data.tables import load_own_tables
from secure_apfed.errors import DataError, SuspectColumnWarning, UnseenCellsWarning
from secure_apfed.runs.active_model import ActiveModel
from secure_apfed.runs.onnx_file import write_onnx
from secure_apfed.settings.data import DataSettings, PartySettings
from tests.memory import trace_memory
from tests.secure_apfed.whole_files import load_features

pytestmark = pytest.mark.filterwarnings("ignore::secure_apfed.errors.SuspectColumnWarning")

FRAME = pd.DataFrame({"age": [20.0, 40.0, 60.0], "job": ["cook", "nurse", "cook"], "site": 1})
STRIP = ImageEncoding(channels=1, height=4, width=2, maximum=16, first_row=1, end_row=3)
MANY = 500


def fit(frame: pd.DataFrame = FRAME, **options: Any) -> ColumnEncoding:
    return fit_columns(frame, categorical=("job",), source="bank", **options)


def test_numbers_are_standardised_and_categories_one_hot() -> None:
    encoding = fit()
    spread = float(np.std([20, 40, 60]))
    names = [encoding.feature_name(at) for at in range(4)]
    assert names == ["age", "job=cook", "job=nurse", "site"]
    expected = [[-20 / spread, 1, 0, 0], [0, 0, 1, 0], [20 / spread, 1, 0, 0]]
    torch.testing.assert_close(encoding.encode(FRAME), torch.tensor(expected))
    # No more than the named columns is needed, in any order; a pilot is unknown.
    frame = pd.DataFrame({"extra": [0], "site": [1], "job": ["pilot"], "age": [40]})
    assert encoding.encode(frame).tolist() == [[0.0, 0.0, 0.0, 0.0]]
    assert ColumnEncoding.for_numeric_columns(["a", "b"]).encode(np.array([[1, 2]])).tolist() == [
        [1.0, 2.0]
    ]


def test_missing_mean_fills_numbers_with_the_mean_and_categories_with_zeros() -> None:
    holes = FRAME.assign(age=[20.0, np.nan, 60.0], job=["cook", np.nan, "nurse"])
    encoding = fit(holes, missing="mean")
    assert encoding.columns[0] == NumericColumn(name="age", mean=40.0, scale=20.0)
    assert encoding.columns[1] == CategoricalColumn(name="job", categories=("cook", "nurse"))
    assert encoding.encode(holes)[1].tolist() == [0.0, 0.0, 0.0, 0.0]
    since = pd.DataFrame({"since": ["1970-01-02", "1970-01-03T12:00:00Z", None]})
    days = fit(since, missing="mean").encode(since).flatten()
    np.testing.assert_allclose(days, [-1.0, 1.0, 0.0], atol=1e-6)


def test_nothing_else_is_an_encoding() -> None:
    with pytest.raises(DataError, match="not a feature encoding"):
        parse_encoding({"kind": "columns", "columns": []})
    with pytest.raises(ValidationError, match="not inside 0 to 4"):
        ImageEncoding(channels=1, height=4, width=2, first_row=3, end_row=5)


@pytest.mark.parametrize("encoding", [fit(), STRIP], ids=["columns", "images"])
def test_an_encoding_is_plain_data(encoding: FeatureEncoding) -> None:
    again = parse_encoding(json.loads(json.dumps(encoding.model_dump(mode="json"))))
    assert again == encoding


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (FRAME.assign(age=["1", "old", "x"]), "'age' is numeric, but 2 cells .* first in row 1"),
        (FRAME.assign(age=[1, 2, 1e300]), "'age' is too far from its mean for float32"),
        (np.zeros((1, 2)), r"expected 3 columns .*, got an array of shape \(1, 2\)"),
    ],
    ids=["a word", "too far", "an array"],
)
def test_raw_tables_that_do_not_fit(raw: RawFeatures, message: str) -> None:
    with pytest.raises(DataError, match=f"new.csv: .*{message}"):
        fit().encode(raw, source="new.csv")


def test_a_column_without_a_number_is_not_fitted() -> None:
    with pytest.raises(DataError, match="column 'a' is empty"):
        fit(pd.DataFrame({"a": [np.nan, np.nan]}), missing="mean")


IMAGE_FORMS: dict[str, Callable[[Any], RawFeatures]] = {
    "images of channels": lambda values: values,
    "images": lambda values: values[:, 0],
    "rows of pixels": lambda values: values.reshape(2, -1),
    "a frame": lambda values: pd.DataFrame(values.reshape(2, -1)),
}


def test_the_most_frequent_categories_are_kept() -> None:
    frequent = ["d"] * 4 + ["c"] * 3 + ["b", "a"] + [f"rare {at}" for at in range(500)]
    frame = pd.DataFrame({"job": frequent})
    job = CategoricalColumn(name="job", categories=("a",))
    with pytest.raises(DataError, match=r"504 categories.*rare_categories: \{most: 64\}"):
        fit(frame)
    encoding = fit(frame, max_categories=3)
    assert encoding.columns == (job.model_copy(update={"categories": ("a", "c", "d")}),)
    told = encoding.encode(pd.DataFrame({"job": ["d", "b", "rare 7", "new"]}))
    assert told.tolist() == [[0, 0, 1], [0, 0, 0], [0, 0, 0], [0, 0, 0]]


def test_long_tables_are_encoded_column_by_column() -> None:
    names = [f"x{k}" for k in range(20)]
    numbers = np.random.default_rng(0).standard_normal((50_000, 20))
    encoding = ColumnEncoding.for_numeric_columns(names)
    frame = pd.DataFrame(numbers, columns=names)
    with trace_memory() as peak:
        features = encoding.encode(frame)
        assert peak() < 2 * features.nbytes  # all columns in float64 alone would be twice as much
    assert torch.equal(features, torch.from_numpy(numbers.astype(np.float32)))


@pytest.mark.parametrize(
    "cells",
    [
        ([0.1] * 7, [0.1, 1e6], 0.0),
        ([0.1 + 0.2, 0.3], [0.3, 1e6], 0.0),  # apart by rounding
        ([pd.Timestamp("2026-01-31")] * 2, ["2026-01-31", "1900-01-01"], 0.0),
        ([pd.Timedelta(days=1)] * 2, ["1 days", "9 days"], 0.0),
        (["DE"] * 2, ["DE", "FR"], 1.0),
    ],
)
def test_what_never_differed_has_no_influence(cells: tuple[list[Any], list[Any], float]) -> None:
    fitted, new, told = cells
    text = ["x"] if isinstance(fitted[0], str) else []
    encoding = fit_columns(pd.DataFrame({"x": fitted}), categorical=text, source="p")
    counts = CellCounts()
    assert encoding.encode(pd.DataFrame({"x": new}), counts=counts).tolist() == [[told], [told]]
    assert counts.ignored_by_column == {"x": 1}
    with pytest.warns(UnseenCellsWarning, match="p: 1 of 2 cells of column 'x' hold what no"):
        counts.warn_of_unseen_cells(source="p")


WHOLE = np.arange(16, dtype=np.uint8).reshape(2, 1, 4, 2)
CUT = WHOLE[:, :, 1:3]


@pytest.mark.parametrize("form", IMAGE_FORMS)
@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float32])
@pytest.mark.parametrize("raw", [WHOLE, CUT], ids=["whole", "strip"])
def test_whole_images_and_strips_in_every_form(raw: Any, dtype: Any, form: str) -> None:
    expected = torch.from_numpy(CUT.astype(np.float32)) / 16
    assert torch.equal(STRIP.encode(IMAGE_FORMS[form](raw.astype(dtype))), expected)


def test_a_pixel_has_a_name() -> None:
    assert STRIP.feature_name(2) == "channel 0, row 2, column 0"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (np.zeros((2, 5, 5)), "expected images of 1x4x2 .*, or strips of 1x2x2.* got 5x5"),
        (np.zeros(3), "got single numbers"),
        (np.full((1, 4, 2), 17), "pixels run from 17 to 17, expected 0 to 16"),
        (np.full((1, 4, 2), -1), "pixels run from -1 to -1"),
        (np.full((1, 4, 2), 0.5), "look scaled to .0, 1. already"),
        (np.full((1, 4, 2), np.nan), "4 pixels are NaN or infinite"),
        (np.full((1, 4, 2), "a"), "whole numbers or floats, got <U1"),
        (pd.DataFrame([["a"] * 8]), "column 0 is numeric, but 1 cells are not numbers"),
    ],
)
def test_images_that_do_not_fit(raw: RawFeatures, message: str) -> None:
    with pytest.raises(DataError, match=message):
        STRIP.encode(raw)


def compute_drifts(frame: pd.DataFrame) -> dict[str, ColumnDrift]:
    """Compare the columns of a frame with those of the aged one."""
    encoding = fit(make_people())
    found = measure_drift(DriftMeter(encoding), encoding, frame).compute_drifts()
    return {one.name: one for one in found}


def make_people(seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "age": rng.normal(40, 10, MANY),
            "job": rng.choice(["a", "b"], MANY),
            "height": rng.normal(1.75, 0.1, MANY),
        }
    )


def measure_drift(meter: DriftMeter, encoding: ColumnEncoding, frame: pd.DataFrame) -> DriftMeter:
    for rows in encoding.encode(frame, counts=meter.cell_counts).split(37):
        meter.add_batch(rows)
    return meter


def test_nothing_is_told_of_columns_as_they_were() -> None:
    same = compute_drifts(make_people(1))
    assert list(same) == ["age", "job", "height"]
    assert not [one for one in same.values() if one.notable_differences]
    assert math.isnan(same["job"].shift)
    older = make_people(1).assign(age=lambda frame: frame["age"] + 10)
    assert compute_drifts(older)["age"].shift == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize(
    ("column", "change", "said"),
    [
        ("age", lambda ages: ages + 10, "deviations from that of training rows"),
        ("height", lambda heights: 100 * heights, "times as wide"),
        ("job", lambda jobs: jobs.str.upper(), "500 of 500 rows hold what no training row held"),
        ("age", lambda ages: ages.where(ages.index > 0, 400.0), "a row lies"),
    ],
    ids=["older", "in centimetres", "renamed", "an outlier"],
)
def test_each_change_is_told_of_its_column_alone(
    column: str, change: Callable[[Any], Any], said: str
) -> None:
    frame = make_people(1)
    found = compute_drifts(frame.assign(**{column: change(frame[column])}))
    assert said in found[column].notable_differences
    assert [name for name, one in found.items() if one.notable_differences] == [column]


@pytest.mark.parametrize("rows", [1, MIN_DRIFT_ROWS - 1, MIN_DRIFT_ROWS])
def test_cells_are_counted_of_any_number_of_rows(rows: int) -> None:
    trained = make_people().assign(
        country="DE", year=2024, job=make_people()["job"].mask(make_people().index < 9)
    )
    text = ["job", "country"]
    encoding = fit_columns(trained, categorical=text, missing="mean", source="bank")
    new = pd.DataFrame(
        {"age": 120.0, "job": "c", "height": 1.75, "country": "FR", "year": 2025.0},
        index=range(rows),
    )
    found = {
        one.name: one.notable_differences
        for one in measure_drift(DriftMeter(encoding), encoding, new).compute_drifts()
    }
    of = f"{rows} of {rows} rows "
    unseen = f"{of}hold what no training row held, which counts for nothing"
    assert [found[name] for name in ("job", "country", "year")] == [unseen] * 3
    assert ("its mean lies" in found["age"]) is (rows >= MIN_DRIFT_ROWS)
    empty = new.assign(age=np.nan, job=None)
    told = measure_drift(DriftMeter(encoding), encoding, empty).compute_drifts()
    found = {one.name: one.notable_differences for one in told}
    filled = "which counts as the mean of training rows, or as no category"
    assert f"{of}have an empty cell, {filled}" in found["age"]
    assert found["job"] == f"{of}have an empty cell, {filled}"
    assert DriftMeter(encoding).compute_drifts() == ()


Frame = pd.DataFrame
DAY = datetime.date(2026, 1, 31)
MOMENTS = st.datetimes(datetime.datetime(1900, 1, 1), datetime.datetime(2200, 1, 1))
WORDS = ("NA", "null", "None", "nan", "N/A", "<NA>", "?", "-", "none", "NaT")
TEXTS = st.one_of(
    st.sampled_from(
        [
            *WORDS,
            "köln",
            unicodedata.normalize("NFD", "köln"),
            " a",
            "a",
            "a ",
            "b\n",
            "é",
            "Å",
            "\u212b",
            "True",
            "TRUE",
            "false",
            "1",
            "1.0",
            "01",
            "1e3",
            "a,b",
            '"',
            "2026-01-31",
            "inf",
        ]
    ),
    st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=4),
)
# By kind of column: its cells, and the type that frames have them in.
KINDS: Mapping[str, tuple[st.SearchStrategy[Any], str]] = {
    "whole": (st.integers(-(2**50), 2**50), "Int64"),
    "small": (st.integers(0, 1), "Int64"),
    "number": (st.floats(-1e30, 1e30), "Float64"),
    "truth": (st.booleans(), "boolean"),
    "date": (st.dates(datetime.date(1900, 1, 1), datetime.date(2200, 1, 1)), "object"),
    "moment": (MOMENTS.map(lambda one: one.replace(microsecond=0)), "datetime64[us]"),
    "span": (st.timedeltas(datetime.timedelta(-999), datetime.timedelta(9999)), "timedelta64[us]"),
    "text": (TEXTS, "str"),
    "code": (st.sampled_from(["01234", "1234", "00000", "80331", "7"]), "str"),
    "category": (st.integers(-3, 12), "Int64"),
    "share": (st.sampled_from([0.1, 0.5, 1.0, 2.25]), "Float64"),
}
CATEGORIES = ("text", "code", "category", "share", "truth")


@st.composite
def tables(draw: st.DrawFn) -> Frame:
    """A column of every kind, some of them twice, with empty cells in some."""
    rows = draw(st.integers(2, 9))
    columns = {}
    for name, (cells, kind) in KINDS.items():
        empty = draw(st.booleans())
        drawn = draw(st.lists(cells | st.none() if empty else cells, min_size=rows, max_size=rows))
        columns[name] = pd.Series(drawn, dtype=kind)
    return Frame(columns)


def plain(frame: Frame) -> Frame:
    """In numpy's types, as most frames are: NaN, None and NaT where a cell is empty."""
    kinds = {"Int64": float, "Float64": float, "boolean": object}
    return Frame(
        {
            name: column.astype(object).where(column.notna(), None)
            if column.dtype == "boolean" and column.hasnans
            else column.astype(
                "bool" if column.dtype == "boolean" else kinds.get(str(column.dtype), column.dtype)
            )
            for name, column in frame.items()
        }
    )


def as_csv(frame: Frame) -> Frame:
    text = io.StringIO(frame.to_csv(index=False))
    return pd.read_csv(text, dtype=str, keep_default_na=False, na_values=[""])


def convert_by_parquet(frame: Frame, *, dictionaries: bool = False) -> Frame:
    table = pa.Table.from_pandas(frame, preserve_index=False)
    if dictionaries:
        columns = [
            one.dictionary_encode() if pa.types.is_large_string(one.type) else one
            for one in table.columns
        ]
        table = pa.table(dict(zip(table.column_names, columns, strict=True)))
    return as_pandas(table, party="p")


READERS: Mapping[str, Callable[[Frame], Frame]] = {
    "CSV": as_csv,
    "CSV of floats": lambda frame: as_csv(plain(frame)),
    "pandas": lambda frame: frame,
    "pandas of numpy": plain,
    "pandas of objects": lambda frame: frame.astype(object),
    "pandas of arrow": lambda frame: convert_by_parquet(frame).convert_dtypes(
        dtype_backend="pyarrow"
    ),
    "pyarrow": convert_by_parquet,
    "pyarrow with dictionaries": lambda frame: convert_by_parquet(frame, dictionaries=True),
    "polars": lambda frame: as_pandas(pl.from_arrow(pa.Table.from_pandas(frame)), party="p"),
    "columns in another order": lambda frame: frame[frame.columns[::-1]],
    "names in another form": lambda frame: frame.rename(
        columns=lambda name: unicodedata.normalize("NFD", name)
    ),
}


def load_from_files(frame: Frame, encoding: ColumnEncoding, folder: Path) -> Iterator[torch.Tensor]:
    for name in ("rows.csv", "rows.parquet"):
        write(folder / name, frame)
        yield load_features(folder / name, encoding)[1]


@pytest.mark.slow
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(tables(), st.sampled_from(sorted(READERS)), st.data())
def test_every_reader_says_the_same(
    tmp_path_factory: pytest.TempPathFactory, frame: Frame, trained: str, data: st.DataObject
) -> None:
    frame = frame.rename(columns={"text": "größe"})
    given = READERS[trained](frame)
    if trained.startswith("CSV"):
        given = Frame({name: convert_text_column(column) for name, column in given.items()})
    given = given.dropna(axis=1, how="all")
    names = map(str, given)
    categorical = [name for name in names if column_name(name) in ("größe", *CATEGORIES)]
    blank = [
        name for name in categorical if not any(read_texts(given[name], words=EMPTY_CELL_TEXTS))
    ]
    given = given.drop(columns=blank)
    encoding = fit_columns(given, categorical=categorical, missing="mean", source="p")
    expected = encoding.encode(given)
    assert expected.isfinite().all()
    for name, reader in READERS.items():
        counts = CellCounts()
        read = reader(frame)
        assert torch.equal(encoding.encode(read, counts=counts), expected), name
        assert not counts.ignored_by_column, name
        at = data.draw(st.integers(0, len(frame) - 1))
        one = reader(frame.iloc[[at]].reset_index(drop=True))
        assert torch.equal(encoding.encode(one), expected[[at]]), name
    folder = tmp_path_factory.mktemp("files")
    assert all(
        torch.equal(features, expected) for features in load_from_files(frame, encoding, folder)
    )


def write(path: Path, frame: Frame) -> None:
    frame.to_csv(path, index=False) if "csv" in path.name else frame.to_parquet(path)


def own_table(folder: Path, frame: Frame, name: str, **party: Any) -> Any:
    write(folder / name, frame)
    parties = {
        "active": PartySettings(file=Path(name), **party),
        "shop": PartySettings(file=Path("shop")),
    }
    data = DataSettings(dataset="tables", folder=folder, parties=parties)
    return load_own_tables(data, "active", seed=0).table


def people(rows: int = 40) -> Frame:
    place = np.arange(rows)
    return Frame(
        {
            "id": [f"p{row}" for row in place],
            "label": np.where(place % 2, "yes", "no"),
            "stufe": np.array(["None", "Mild", "NA"])[place % 3],
            "plz": np.array(["01234", "80331", "00501"])[place % 3],
            "Größe": place * 0.1,
            "flag": place % 3 == 0,
            "since": [DAY, DAY.replace(day=1)] * 20,
            "stay": pd.to_timedelta(place, unit="h"),
            "year": 2026,
        }
    )


def train_table(folder: Path, trained: str, missing: str) -> tuple[Any, Frame]:
    """Read a table with gaps from a file; return it and the rows that it kept."""
    frame = people()
    frame.loc[frame.index % 7 == 0, "Größe"] = np.nan
    own = own_table(folder, frame, trained, missing=missing)
    return own, frame.loc[[f"p{row}" in own.ids for row in range(len(frame))]]


@pytest.mark.parametrize("again", ["u.csv", "u.parquet"])
@pytest.mark.parametrize(("trained", "missing"), [("t.csv", "mean"), ("t.parquet", "drop")])
def test_either_format_trains_and_predicts(
    tmp_path: Path, trained: str, missing: str, again: str
) -> None:
    own, kept = train_table(tmp_path, trained, missing)
    renamed = kept.rename(columns=lambda name: unicodedata.normalize("NFD", name))
    renamed = renamed.rename(columns={"id": "pe\u0301rson"})
    write(tmp_path / again, renamed)
    ids, features = load_features(tmp_path / again, own.encoding, id_columns=("pe\u0301rson",))
    assert ids == own.ids
    assert torch.equal(features, own.features)


@pytest.mark.parametrize(("trained", "missing"), [("t.csv", "mean"), ("t.parquet", "drop")])
def test_either_format_knows_what_it_lost(tmp_path: Path, trained: str, missing: str) -> None:
    own, kept = train_table(tmp_path, trained, missing)
    stufe = next(one for one in own.encoding.columns if one.name == "stufe")
    in_csv = trained == "t.csv"
    assert stufe.categories == (("Mild",) if in_csv else ("Mild", "NA", "None"))
    counts = CellCounts()
    plain = {"plz": [int(code) for code in kept["plz"]]}
    own.encoding.encode(kept.assign(**plain), counts=counts)  # as a reader of numbers has them
    lost = sum(code != 80331 for code in plain["plz"])
    assert counts.ignored_by_column == ({"plz": lost} if lost else {})


READINGS: dict[str, Callable[[Frame], Frame]] = {
    "its own": lambda frame: frame,
    "CSV": lambda frame: as_csv(frame),
    "objects": lambda frame: frame.astype(object),
}


@pytest.mark.parametrize("name", ["t.csv", "t.parquet"])
def test_codes_with_leading_zeros_are_categories(tmp_path: Path, name: str) -> None:
    frame = people()[["id", "label", "plz"]]
    with pytest.warns(SuspectColumnWarning, match=r"'plz' holds digits, some with leading zeros"):
        own = own_table(tmp_path, frame, name)
    column = CategoricalColumn(name="plz", categories=("00501", "01234", "80331"))
    assert own.encoding.columns == (column,)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert own_table(tmp_path, frame, name, categorical=("plz",)).encoding.columns == (column,)
        (numbers,) = own_table(tmp_path, frame, name, numeric=("plz",)).encoding.columns
    with pytest.raises(DataError, match=r"'plz' look like dates in another order"):
        own_table(tmp_path, frame.assign(plz=["01/02/2026", "02/02/2026"] * 20), name)
    assert isinstance(numbers, NumericColumn)
    assert convert_text_column(pd.Series(["0", "0.50", "10", "-0.5", "-0", "1e05"])).dtype == float


@pytest.mark.parametrize("beside", [("01.5", "12.5"), ("+0123", "7"), ("-01", "2")], ids=str)
@pytest.mark.parametrize("name", ["t.csv", "t.parquet"])
def test_numbers_with_leading_zeros_are_categories(
    tmp_path: Path, name: str, beside: tuple[str, str]
) -> None:
    odd = people()[["id", "label", "plz"]].assign(plz=beside * 20)
    with pytest.warns(SuspectColumnWarning, match=r"'plz' holds digits, some with leading"):
        (column,) = own_table(tmp_path, odd, name).encoding.columns
    assert isinstance(column, CategoricalColumn)
    assert {*column.categories} == {*beside}


def test_a_table_with_a_given_encoding_is_read_as_that_says(tmp_path: Path) -> None:
    frame = people()[["id", "label", "stufe", "Größe"]]
    learnt = own_table(tmp_path, frame, "t.parquet").encoding
    (tmp_path / "encoding.json").write_text(learnt.model_dump_json())
    own = own_table(tmp_path, frame, "t.csv", encoding=Path("encoding.json"))
    assert own.encoding == learnt
    stufe = next(one for one in learnt.columns if one.name == "stufe")
    np.testing.assert_array_equal(own.features.numpy()[:, -3:].argmax(1), [2, 0, 1] * 13 + [2])
    assert stufe.categories == ("Mild", "NA", "None")
    other = frame.assign(stufe="Severe")
    with pytest.warns(UnseenCellsWarning, match="active: 40 of 40 cells of column 'stufe' hold"):
        own_table(tmp_path, other, "t.csv", encoding=Path("encoding.json"))


FITTED = Frame(
    {
        "age": [18.0, 65.0],
        "since": [pd.Timestamp("2026-01-31"), pd.Timestamp("2020-01-01")],
        "stay": pd.to_timedelta([1, 5], unit="D"),
        "job": ["a", "b"],
    }
)


OF_ANOTHER_KIND: tuple[tuple[str, Any, str], ...] = (
    ("since", ["20260131", "2026-01-31"], "'since' holds dates, but 1 cells are none"),
    ("since", [20_484.0, "2026-01-31"], "'since' holds dates, but 1 cells are none"),
    ("age", pd.to_datetime(["2026-01-31"] * 2), "'age' is numeric, but 2 cells are not numbers"),
    ("age", [DAY, 3], "'age' is numeric, but 1 cells are not numbers"),
    ("age", pd.to_timedelta([1, 2], unit="D"), "'age' is numeric, but 2 cells are not numbers"),
    ("age", ["1_000", "4"], "'age' is numeric, but 1 cells are not numbers"),
    ("age", ["inf", "4"], "'age' has 1 infinite numbers"),
    ("age", [np.inf, -np.inf], "'age' has 2 infinite numbers"),
    ("stay", [1.5, 2], "'stay' holds durations, but 2 cells are none"),
    ("stay", ["1 days", "2"], "'stay' holds durations, but 1 cells are none"),
    ("age", [" NA ", "4"], r"empty cells in age \(1\)"),
    ("since", ["null", None], r"empty cells in since \(2\)"),
    ("job", ["", "a"], r"empty cells in job \(1\)"),
    ("job", ["NA", " \t"], r"empty cells in job \(2\)"),
)


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize(("column", "cells", "message"), OF_ANOTHER_KIND)
def test_cells_of_another_kind_are_refused_by_every_reader(
    column: str, cells: Any, message: str, reading: str
) -> None:
    encoding = fit_columns(FITTED, categorical=["job"], source="p")
    assert [column.kind for column in encoding.columns[1:3]] == ["date", "duration"]
    frame = READINGS[reading](FITTED.assign(**{column: cells}))
    with pytest.raises(DataError, match=f"new.csv: (column )?{message}"):
        encoding.encode(frame, source="new.csv")


def name_cells(cells: Any) -> str:
    """Name a case by its cells."""
    return " ".join(map(str, cells))


@pytest.mark.parametrize("word", ["None", "NA", "null"])
def test_a_category_that_pandas_takes_for_empty_is_named(word: str, tmp_path: Path) -> None:
    """Do what the message says, and read the table."""
    path = tmp_path / "new.csv"
    Frame({"job": ["a", word], "age": [18.0, 65.0]}).to_csv(path, index=False)
    own = pd.read_csv(path, keep_default_na=False)
    encoding = fit_columns(own, categorical=["job"], source="p")
    lost = rf"empty cells in job \(1\) \('{word}', a category here, is empty to pandas: "
    with pytest.raises(DataError, match=lost + r"read_csv\(keep_default_na=False\)\); fill them"):
        encoding.encode(pd.read_csv(path))
    assert encoding.encode(own).shape == (2, 3)
    with pytest.raises(DataError, match=r"empty cells in age \(1\); fill them"):
        encoding.encode(own.assign(age=[1.0, np.nan]))


SPELLINGS: tuple[tuple[Any, Any], ...] = (
    (["True", "False"], [True, False]),
    (["TRUE", "FALSE"], [1, 0]),
    ([True, False], ["1.0", "0"]),
    ([True, False], [1.0, 0.0]),
    (["1", "0"], [True, False]),
    ([1, 0], ["TRUE", "false"]),
    ([3, 4], ["3.0", "4"]),
    (["3.50", "4.0"], [3.5, 4]),
    (["é", "e"], ["e\u0301", "e "]),
    (["01", "1"], ["01", 1.0]),
    (np.array([0.1, 0.2], np.float32), ["0.1", "0.2"]),
    ([Decimal("1.50"), Decimal("3.00")], ["1.50", "3"]),
    (["1.50", "3.00"], [1.5, Decimal("3.0")]),
    ([3e7, 1e-7], ["3e+07", "1e-7"]),
    (["-0.0", "2"], [0, 2.0]),
    ([datetime.time(10), datetime.time(0, 30)], ["10:00:00.000", "00:30:00.000000000"]),
    ([DAY, datetime.datetime(2026, 1, 31, 5)], ["2026-01-31T00:00:00.000", "2026-01-31 05:00:00"]),
    (["2026-01-31 05:00:00+01:00", "x"], [pd.Timestamp("2026-01-31 04:00:00Z"), "x"]),
)
UNSEEN: tuple[tuple[Any, Any], ...] = (
    (["01234", "80331"], [1234, "1234"]),
    (["1", "1.0"], ["1.00", "2"]),
    (["no", "yes"], [0, True]),
    (["a", "b"], ["A", "B"]),
    (["1e3", "2"], ["1000", "1"]),
    (["007", "7"], ["07", "7.5"]),
)


@pytest.mark.parametrize(("fitted", "new"), SPELLINGS, ids=name_cells)
def test_spellings_of_a_category_are_one(fitted: Any, new: Any) -> None:
    frame = Frame({"x": fitted})
    encoding = fit_columns(frame, categorical=["x"], source="p")
    expected = encoding.encode(frame)
    assert torch.equal(encoding.encode(Frame({"x": pd.Series(new)})), expected)
    assert torch.equal(encoding.encode(Frame({"x": pd.Series(new, dtype=object)})), expected)


def test_a_column_knows_its_spellings() -> None:
    spelled = CategoricalColumn(name="x", categories=("True", "yes"))
    assert list(spelled.category_by_spelling) == ["True", "yes"]
    both = CategoricalColumn(name="x", categories=("TRUE", "True"))
    assert both.category_by_spelling["TRUE"] == "TRUE"


@pytest.mark.parametrize(("fitted", "new"), UNSEEN, ids=name_cells)
def test_what_no_training_row_held_counts_for_nothing(fitted: Any, new: Any) -> None:
    encoding = fit_columns(Frame({"x": fitted}), categorical=["x"], source="p")
    counts = CellCounts()
    unseen = Frame({"x": pd.Series(new, dtype=object)})
    assert not encoding.encode(unseen, counts=counts).any()
    assert (counts.row_count, counts.ignored_by_column, counts.empty_by_column) == (2, {"x": 2}, {})


def test_whole_numbers_keep_their_digits_beside_empty_cells(tmp_path: Path) -> None:
    codes = pd.Series([2**53, 2**53 + 1, None], dtype="Int64")
    encoding = fit_columns(Frame({"x": codes}), categorical=["x"], missing="mean", source="p")
    found = [
        features.tolist() for features in load_from_files(Frame({"x": codes}), encoding, tmp_path)
    ]
    assert found == [[[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]] * 2


@pytest.mark.parametrize("columns", [[1, "1", "é"], ["1", "é", "e\u0301"]], ids=["1", "é"])
def test_columns_of_one_name_are_refused(columns: list[Any]) -> None:
    encoding = ColumnEncoding.for_numeric_columns(["1", "é"])
    with pytest.raises(DataError, match="several columns are named"):
        encoding.encode(Frame([[1.0, 2.0, 3.0]], columns=columns))
    with pytest.raises(DataError, match="p: its frame has several columns of one name"):
        as_pandas(Frame([[1.0, 2.0, 3.0]], columns=columns), party="p")


def test_columns_are_found_by_name_and_not_by_place() -> None:
    encoding = ColumnEncoding.for_numeric_columns(["1", "é"])
    assert encoding.encode(Frame([[1.0, 2.0]], columns=["e\u0301", 1])).tolist() == [[2.0, 1.0]]


ODD = (
    *WORDS,
    "",
    " ",
    "\u00a0",
    "a",
    " a",
    "a\u3000",
    "köln",
    "ko\u0308ln",
    "k\u0308",
    "\u212b",
    "Å",
    "KÖLN",
    "1",
    "1.0",
    "1.00",
    "2.50",
    "2.5",
    "True",
    "TRUE",
    "01",
    "\u1112\u1161",
    "a\nb",
    "日本",
    "2.500",
    "-0",
    "2.5e+0",
    "10:00:00",
    "10:00:00.0",
    "2026-01-31",
    "2026-01-31 00:00:00",
    "1e3",
)


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["mean", "error"])
def test_onnx_says_the_same_or_nothing(tmp_path: Path, missing: Any) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    fitted = Frame(
        {
            "n": [1.0, 2.0, 4.0],
            "same": 7.0,
            "since": pd.to_datetime(["2026-01-31", "2026-01-31", "2020-01-01"]),
            "text": ["a", "köln", "NA"],
            "code": ["01", "1", "2.50"],
            "truth": [True, False, True],
            "country": "DE",
        }
    )
    text = ["text", "code", "truth", "country"]
    encoding = fit_columns(fitted, categorical=text, missing=missing, source="p")
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(encoding.shape[0], 4), nn.Softplus(), nn.Linear(4, 2)).eval()
    model = ActiveModel(network, ("no", "yes"), encoding, {})
    write_onnx(model, tmp_path / "model.onnx")
    new = fitted.loc[[0] * len(ODD)].reset_index(drop=True).astype({"truth": object})
    numbers = [np.nan, np.inf, -np.inf, 1e300, 9.0]
    new = pd.concat(
        [new.assign(**{name: ODD}) for name in text]
        + [new.loc[[0] * 5].assign(**{name: numbers}) for name in ("n", "same")],
        ignore_index=True,
    )
    given = {
        name: (new[[name]].astype(str).astype(object) if name in text else new[[name]]).to_numpy()
        for name in fitted
    }
    days = new["since"] - pd.Timestamp("1970-01-01")
    given["since"] = (days / pd.Timedelta(days=1)).to_numpy()[:, None]
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    label_N, told_NK = session.run(["output_label", "output_probability"], given)
    refused_N = np.isnan(told_NK).any(axis=1)
    assert (label_N[refused_N] == "").all()
    for row, (label, told_K) in enumerate(zip(label_N, told_NK, strict=True)):
        try:
            expected_K = model.predict(encoding.encode(new.iloc[[row]]))[0].numpy()
        except DataError:
            assert refused_N[row], new.iloc[row].to_dict()
            continue
        if not refused_N[row]:
            np.testing.assert_allclose(told_K, expected_K, atol=1e-6)
            assert label == model.classes[expected_K.argmax()]
    # What it cannot bring into the form that was learnt, it refuses; and that alone.
    kept = [("text", one) for one in ("a", "köln", "ko\u0308ln", "NA", "日本", "a\nb")]
    kept += [("code", "1.0"), ("code", "2.5"), ("truth", "TRUE"), ("truth", "1")]
    places = {(name, one): len(ODD) * text.index(name) + ODD.index(one) for name, one in kept}
    assert not [cell for cell, row in places.items() if refused_N[row]]

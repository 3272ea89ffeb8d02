"""A table that trains predicts the same through every reader, however many rows at a time.

Tables are drawn by the meaning of their cells; every reader has them in a form of its own: CSV as
texts, Parquet and frames in types of several libraries, ONNX as arrays.
"""

import datetime
import io
import unicodedata
import warnings
from collections.abc import Callable, Iterator, Mapping
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
from torch import nn

from secure_apfed.data import ColumnEncoding, DataSettings, PartySettings, load_features
from secure_apfed.data.cells import typed
from secure_apfed.data.column_encoding import (
    CategoricalColumn,
    CellCounts,
    DateColumn,
    NumericColumn,
    RareCategories,
    fit_columns,
)
from secure_apfed.data.tables import load_own_tables
from secure_apfed.errors import DataError, SuspectColumnWarning
from secure_apfed.party_frames import as_pandas
from secure_apfed.runs import SoloModel
from secure_apfed.runs.onnx_file import write_onnx

pytestmark = pytest.mark.filterwarnings("ignore::secure_apfed.errors.SuspectColumnWarning")

Frame = pd.DataFrame
DAY = datetime.date(2026, 1, 31)
MOMENTS = st.datetimes(datetime.datetime(1900, 1, 1), datetime.datetime(2200, 1, 1))
WORDS = ("NA", "null", "None", "nan", "N/A", "<NA>", "?", "-", "none", "NaT")
TEXTS = st.one_of(
    st.sampled_from([*WORDS, "köln", unicodedata.normalize("NFD", "köln"), " a", "a", "a ", "b\n",
                     "é", "Å", "\u212b", "True", "TRUE", "false", "1", "1.0", "01", "1e3", "a,b",
                     '"', "2026-01-31", "inf"]),
    st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=4),
)  # fmt: skip
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
    return Frame({
        name: column.astype(object).where(column.notna(), None)
        if column.dtype == "boolean" and column.hasnans
        else column.astype("bool" if column.dtype == "boolean" else
                           kinds.get(str(column.dtype), column.dtype))
        for name, column in frame.items()
    })  # fmt: skip


def as_csv(frame: Frame) -> Frame:
    return typed_by_nobody(frame.to_csv(index=False))


def typed_by_nobody(text: str) -> Frame:
    return pd.read_csv(io.StringIO(text), dtype=str, keep_default_na=False, na_values=[""])


def in_parquet(frame: Frame, *, dictionaries: bool = False) -> Frame:
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
    "pandas of arrow": lambda frame: in_parquet(frame).convert_dtypes(dtype_backend="pyarrow"),
    "pyarrow": in_parquet,
    "pyarrow with dictionaries": lambda frame: in_parquet(frame, dictionaries=True),
    "polars": lambda frame: as_pandas(pl.from_arrow(pa.Table.from_pandas(frame)), party="p"),
    "columns in another order": lambda frame: frame[frame.columns[::-1]],
    "names in another form": lambda frame: frame.rename(
        columns=lambda name: unicodedata.normalize("NFD", name)
    ),
}


def in_files(frame: Frame, encoding: ColumnEncoding, folder: Path) -> Iterator[torch.Tensor]:
    frame.to_csv(folder / "rows.csv", index=False)
    frame.to_parquet(folder / "rows.parquet")
    for name in ("rows.csv", "rows.parquet"):
        yield load_features(folder / name, encoding)[1]


@pytest.mark.parametrize("buckets", [0, 4])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(tables(), st.sampled_from(sorted(READERS)), st.data())
def test_every_reader_says_the_same(
    tmp_path_factory: pytest.TempPathFactory, buckets: int, frame: Frame, trained: str,
    data: st.DataObject,
) -> None:  # fmt: skip
    frame = frame.rename(columns={"text": "größe"})
    given = READERS[trained](frame)
    if trained.startswith("CSV"):
        given = Frame({name: typed(column) for name, column in given.items()})
    given = given.dropna(axis=1, how="all")
    categorical = [name for name in given if unicodedata.normalize("NFC", name) == "größe"
                   or name in CATEGORIES]  # fmt: skip
    rare = RareCategories(most=3, buckets=buckets) if buckets else None
    try:
        encoding = fit_columns(
            given, categorical=categorical, missing="mean", rare=rare, source="p"
        )
    except DataError as error:
        assert "is empty" in str(error)  # blanks alone
        return
    expected = encoding.encode(given)
    assert expected.isfinite().all()
    for name, reader in READERS.items():
        counts = CellCounts()
        read = reader(frame)
        assert torch.equal(encoding.encode(read, counts=counts), expected), name
        assert buckets or not counts.ignored, name
        at = data.draw(st.integers(0, len(frame) - 1))
        one = reader(frame.iloc[[at]].reset_index(drop=True))
        assert torch.equal(encoding.encode(one), expected[[at]]), name
    folder = tmp_path_factory.mktemp("files")
    for features in in_files(frame, encoding, folder):
        assert torch.equal(features, expected)

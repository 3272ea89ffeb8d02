"""Encodings: raw columns and images become features, in training and in prediction alike."""

import json
import math
import tracemalloc
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from pydantic import ValidationError

from secure_apfed.data import (
    ColumnEncoding,
    ImageEncoding,
    RawFeatures,
    parse_encoding,
)
from secure_apfed.data.encoding import CategoricalColumn, CellCounts, NumericColumn, fit_columns
from secure_apfed.data.inputs import FEWEST_ROWS, ColumnDrift, DriftMeter, extremes_of
from secure_apfed.errors import DataError, UnseenCellsWarning

FRAME = pd.DataFrame({"age": [20.0, 40.0, 60.0], "job": ["cook", "nurse", "cook"], "site": 1})
STRIP = ImageEncoding(channels=1, height=4, width=2, maximum=16, first_row=1, end_row=3)
ROWS = 500


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
    assert ColumnEncoding.plain(["a", "b"]).encode(np.array([[1, 2]])).tolist() == [[1.0, 2.0]]


def test_missing_mean_fills_numbers_with_the_mean_and_categories_with_zeros() -> None:
    holes = FRAME.assign(age=[20.0, np.nan, 60.0], job=["cook", np.nan, "nurse"])
    encoding = fit(holes, missing="mean")
    assert encoding.columns[0] == NumericColumn(name="age", mean=40.0, scale=20.0)
    assert encoding.columns[1] == CategoricalColumn(name="job", categories=("cook", "nurse"))
    assert encoding.encode(holes)[1].tolist() == [0.0, 0.0, 0.0, 0.0]


def test_an_encoding_is_plain_data_and_nothing_else_is_one() -> None:
    for encoding in (fit(), STRIP):
        again = parse_encoding(json.loads(json.dumps(encoding.model_dump(mode="json"))))
        assert again == encoding
    with pytest.raises(DataError, match="not a feature encoding"):
        parse_encoding({"kind": "columns", "columns": []})
    with pytest.raises(ValidationError, match="not inside 0 to 4"):
        ImageEncoding(channels=1, height=4, width=2, first_row=3, end_row=5)


def test_raw_tables_that_do_not_fit() -> None:
    wrong: tuple[tuple[RawFeatures, str], ...] = (
        (FRAME.drop(columns=["age", "job"]), "2 of 3 columns are missing: age, job"),
        (FRAME.assign(age=["1", "old", "x"]), "'age' is numeric, but 2 cells .* first in row 1"),
        (FRAME.assign(age=[1, 2, 1e300]), "'age' is too far from its mean for float32"),
        (np.zeros((1, 2)), r"expected 3 columns .*, got an array of shape \(1, 2\)"),
    )
    for raw, message in wrong:
        with pytest.raises(DataError, match=f"new.csv: .*{message}"):
            fit().encode(raw, source="new.csv")
    for frame, message in (
        (pd.DataFrame({"a": [1.0, np.nan], "b": ["x", None]}), r"empty cells in a \(1\), b \(1\)"),
        (pd.DataFrame({"a": ["x", "y"]}), "'a' is numeric, but 2 cells are not numbers"),
        (pd.DataFrame({"a": [1.0, np.inf]}), "'a' has 1 infinite"),
        (pd.DataFrame(index=[0, 1]), "no feature columns are left"),
    ):
        with pytest.raises(DataError, match=f"bank: .*{message}"):
            fit_columns(frame, source="bank")
    with pytest.raises(DataError, match="column 'a' is empty"):
        fit_columns(pd.DataFrame({"a": [np.nan, np.nan]}), missing="mean", source="bank")


def test_the_most_frequent_categories_are_kept() -> None:
    frequent = ["d"] * 4 + ["c"] * 3 + ["b", "a"] + [f"rare {at}" for at in range(500)]
    frame, job = pd.DataFrame({"job": frequent}), CategoricalColumn(name="job", categories=("a",))
    with pytest.raises(DataError, match=r"504 categories.*rare_categories: \{most: 64\}"):
        fit(frame)
    encoding = fit(frame, most=3)
    assert encoding.columns == (job.model_copy(update={"categories": ("a", "c", "d")}),)
    told = encoding.encode(pd.DataFrame({"job": ["d", "b", "rare 7", "new"]}))
    assert told.tolist() == [[0, 0, 1], [0, 0, 0], [0, 0, 0], [0, 0, 0]]


def test_long_tables_are_encoded_column_by_column() -> None:
    names = [f"x{k}" for k in range(20)]
    numbers = np.random.default_rng(0).standard_normal((50_000, 20))
    encoding = ColumnEncoding.plain(names)
    frame = pd.DataFrame(numbers, columns=names)
    tracemalloc.start()
    try:
        features = encoding.encode(frame)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert torch.equal(features, torch.from_numpy(numbers.astype(np.float32)))
    assert peak < 2 * features.nbytes  # all columns in float64 alone would be twice as much


@pytest.mark.parametrize("cells", [
    ([0.1] * 7, [0.1, 1e6], 0.0),
    ([0.1 + 0.2, 0.3], [0.3, 1e6], 0.0),  # apart by rounding
    ([pd.Timestamp("2026-01-31")] * 2, ["2026-01-31", "1900-01-01"], 0.0),
    ([pd.Timedelta(days=1)] * 2, ["1 days", "9 days"], 0.0),
    (["DE"] * 2, ["DE", "FR"], 1.0),
])  # fmt: skip
def test_what_never_differed_has_no_influence_where_it_does(
    cells: tuple[list[Any], list[Any], float],
) -> None:
    fitted, new, told = cells
    text = ["x"] if isinstance(fitted[0], str) else []
    encoding = fit_columns(pd.DataFrame({"x": fitted}), categorical=text, source="p")
    counts = CellCounts()
    assert encoding.encode(pd.DataFrame({"x": new}), counts=counts).tolist() == [[told], [told]]
    assert counts.ignored == {"x": 1}
    with pytest.warns(UnseenCellsWarning, match="p: 1 of 2 cells of column 'x' hold what no"):
        counts.warn(source="p")


WHOLE = np.arange(16, dtype=np.uint8).reshape(2, 1, 4, 2)
CUT = WHOLE[:, :, 1:3]


def test_whole_images_and_strips_in_every_form() -> None:
    expected = torch.from_numpy(CUT.astype(np.float32)) / 16
    for raw, dtype in product((WHOLE, CUT), (np.uint8, np.int64, np.float32)):
        values = raw.astype(dtype)
        flat = values.reshape(2, -1)
        for form in (values, values[:, 0], flat, pd.DataFrame(flat)):
            assert torch.equal(STRIP.encode(form), expected)
    assert STRIP.feature_name(2) == "channel 0, row 2, column 0"


def test_images_that_do_not_fit() -> None:
    wrong: tuple[tuple[RawFeatures, str], ...] = (
        (np.zeros((2, 5, 5)), "expected images of 1x4x2 .*, or strips of 1x2x2.* got 5x5"),
        (np.zeros(3), "got single numbers"),
        (np.full((1, 4, 2), 17), "pixels run from 17 to 17, expected 0 to 16"),
        (np.full((1, 4, 2), -1), "pixels run from -1 to -1"),
        (np.full((1, 4, 2), 0.5), "look scaled to .0, 1. already"),
        (np.full((1, 4, 2), np.nan), "4 pixels are NaN or infinite"),
        (np.full((1, 4, 2), "a"), "whole numbers or floats, got <U1"),
        (pd.DataFrame([["a"] * 8]), "column 0 is numeric, but 1 cells are not numbers"),
    )
    for raw, message in wrong:
        with pytest.raises(DataError, match=message):
            STRIP.encode(raw)


# Columns of new rows beside those that the encoding was fitted to.


def people(seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    return pd.DataFrame({
        "age": rng.normal(40, 10, ROWS),
        "job": rng.choice(["a", "b"], ROWS),
        "height": rng.normal(1.75, 0.1, ROWS),
    })  # fmt: skip


def read(meter: DriftMeter, encoding: ColumnEncoding, frame: pd.DataFrame) -> DriftMeter:
    for rows in encoding.encode(frame, counts=meter.counts).split(37):
        meter.add(rows)
    return meter


def test_each_change_is_told_of_its_column_alone() -> None:
    encoding = fit(people())

    def drift_of(frame: pd.DataFrame) -> dict[str, ColumnDrift]:
        return {one.name: one for one in read(DriftMeter(encoding), encoding, frame).result()}

    same = drift_of(people(1))
    assert list(same) == ["age", "job", "height"]
    assert not [one for one in same.values() if one.notable or one.extremes]
    assert math.isnan(same["job"].shift)
    older = people(1).assign(age=lambda frame: frame["age"] + 10)
    centimetres = people(1).assign(height=lambda frame: 100 * frame["height"])
    renamed = people(1).assign(job=lambda frame: frame["job"].str.upper())
    outlier = people(1)
    outlier.loc[0, "age"] = 400.0
    for frame, column, said in (
        (older, "age", "deviations from that of training rows"),
        (centimetres, "height", "times as wide"),
        (renamed, "job", "500 of 500 rows hold what no training row held"),
        (outlier, "age", "a row lies"),
    ):
        found = drift_of(frame)
        assert said in found[column].notable
        assert [name for name, one in found.items() if one.notable] == [column]
    assert drift_of(older)["age"].shift == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize("rows", [1, FEWEST_ROWS - 1, FEWEST_ROWS])
def test_cells_are_counted_of_any_number_of_rows(rows: int) -> None:
    trained = people().assign(country="DE", year=2024, job=people()["job"].mask(people().index < 9))
    text = ["job", "country"]
    encoding = fit_columns(trained, categorical=text, missing="mean", source="bank")
    extremes = extremes_of(encoding, encoding.encode(trained))
    new = pd.DataFrame({"age": 120.0, "job": "c", "height": 1.75, "country": "FR", "year": 2025.0},
                       index=range(rows))  # fmt: skip
    found = {
        one.name: one.notable
        for one in read(DriftMeter(encoding, extremes), encoding, new).result()
    }
    of = f"{rows} of {rows} rows "
    for name in ("job", "country", "year"):
        assert found[name] == f"{of}hold what no training row held, which counts for nothing"
    assert f"{of}lie outside of" in found["age"]
    assert ("its mean lies" in found["age"]) is (rows >= FEWEST_ROWS)
    empty = new.assign(age=np.nan, job=None)
    found = {one.name: one.notable for one in read(DriftMeter(encoding), encoding, empty).result()}
    assert f"{of}have an empty cell" in found["age"]
    assert found["job"] == f"{of}have an empty cell"
    assert DriftMeter(encoding).result() == ()


def test_rows_outside_of_what_was_trained_on() -> None:
    trained = pd.DataFrame({"age": [18.0, 30, 65], "job": ["a", "b", "a"], "same": [7.0] * 3})
    encoding = fit_columns(trained, categorical=["job"], source="bank")
    extremes = extremes_of(encoding, encoding.encode(trained))
    assert extremes == {"age": (18.0, 65.0), "same": (7.0, 7.0)}
    assert extremes_of(encoding, encoding.encode(trained[:0])) == {}
    ages = [18.0, 65.0] * 15 + [17.0, 66.0]
    new = pd.DataFrame({"age": ages, "job": "a", "same": 7.0})
    age, job, same = read(DriftMeter(encoding, extremes), encoding, new).result()
    assert age.outside == 2
    assert "2 of 32 rows lie outside of 18 to 65" in age.notable
    assert (job.outside, same.outside, same.ignored) == (0, 0, 0)


def test_training_rows_lie_within_their_extremes() -> None:
    rng = np.random.default_rng(0)
    for size in (1e-3, 1.0, 1e7):
        year = np.round(2_000_000 + size * rng.integers(0, 2, 500), 5) + 0.4
        frame = pd.DataFrame({"year": year})
        encoding = fit_columns(frame, categorical=[], source="bank")
        meter = DriftMeter(encoding, extremes_of(encoding, encoding.encode(frame)))
        read(meter, encoding, frame)
        assert meter.result()[0].outside == 0

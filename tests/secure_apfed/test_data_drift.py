"""Columns of new rows beside those that the encoding was fitted to."""

import math

import numpy as np
import pandas as pd
import pytest

from secure_apfed.data.encoding import ColumnEncoding, fit_columns
from secure_apfed.data.inputs import FEWEST_ROWS, ColumnDrift, DriftMeter, extremes_of

ROWS = 500


def people(seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    return pd.DataFrame({
        "age": rng.normal(40, 10, ROWS),
        "job": rng.choice(["a", "b"], ROWS),
        "height": rng.normal(1.75, 0.1, ROWS),
    })  # fmt: skip


@pytest.fixture(scope="module")
def encoding() -> ColumnEncoding:
    return fit_columns(people(), categorical=["job"], source="bank")


def drift_of(encoding: ColumnEncoding, frame: pd.DataFrame) -> dict[str, ColumnDrift]:
    return {one.name: one for one in read(DriftMeter(encoding), encoding, frame).result()}


def read(meter: DriftMeter, encoding: ColumnEncoding, frame: pd.DataFrame) -> DriftMeter:
    for rows in encoding.encode(frame, counts=meter.counts).split(37):
        meter.add(rows)
    return meter


def test_other_rows_of_the_same_kind_are_not_notable(encoding: ColumnEncoding) -> None:
    found = drift_of(encoding, people(1))
    assert list(found) == ["age", "job", "height"]
    assert not [one for one in found.values() if one.notable]
    assert math.isnan(found["job"].shift)


def test_each_change_is_told_of_its_column_alone(encoding: ColumnEncoding) -> None:
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
        found = drift_of(encoding, frame)
        assert said in found[column].notable
        assert [name for name, one in found.items() if one.notable] == [column]
    assert drift_of(encoding, older)["age"].shift == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize("rows", [1, 5, FEWEST_ROWS - 1, FEWEST_ROWS])
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


def test_extremes_that_nobody_kept_are_none(encoding: ColumnEncoding) -> None:
    assert {one.extremes for one in drift_of(encoding, people(1)).values()} == {None}

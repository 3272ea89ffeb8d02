"""BiAffect's sessions, read from small synthetic files of our own format."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from secure_apfed.data import DATASETS
from secure_apfed.data.readers import TablePool
from secure_apfed.data.sessions import session_pool
from secure_apfed.errors import DataError


def pool(name: str, folder: Path | None = None) -> TablePool:
    entry = DATASETS[name]
    read = entry.read(entry, folder)
    assert isinstance(read, TablePool)
    return read


def sessions(*rows: tuple[float, int, int, int]) -> pd.DataFrame:
    """Sessions of so many steps a view, whose first numbers count up."""
    columns: dict[str, list[Any]] = {"hdrs": [], "alphanum": [], "special": [], "accel": []}
    for hdrs, keys, special, readings in rows:
        columns["hdrs"].append(hdrs)
        columns["alphanum"].append(np.arange(4.0 * keys))
        columns["special"].append(np.eye(6)[np.arange(special) % 6].ravel())
        columns["accel"].append(np.arange(3.0 * readings))
    return pd.DataFrame(columns)


def test_sessions_are_kept_cut_and_filled(tmp_path: Path) -> None:
    told = sessions((7, 9, 9, 50), (7, 10, 0, 250), (7.5, 120, 100, 2), (20, 120, 101, 2))
    told.to_parquet(tmp_path / "biaffect.parquet")
    read = pool("biaffect", tmp_path)
    assert read.labels.tolist() == [0, 1]
    assert read.frame.shape == (2, 401 + 601 + 301)
    for view, lengths in {"alphanum": [10, 100], "special": [0, 100], "accel": [100, 2]}.items():
        assert read.frame[f"{view}-steps"].tolist() == lengths
    short = read.frame.iloc[0]
    assert short[["alphanum-9-duration", "alphanum-9-distance_y"]].tolist() == [36, 39]
    assert short["alphanum-10-duration":"alphanum-99-distance_y"].abs().sum() == 0
    assert short[["accel-0-x", "accel-99-x"]].tolist() == [0, 249 * 3]  # thinned, ends kept
    assert read.frame.iloc[1]["alphanum-99-duration"] == 99 * 4  # the first hundred


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accel": None}, "lacks the columns accel; it has hdrs, alphanum, special"),
        ({"hdrs": [-1.0]}, "session 0 has no HDRS of 0 or more"),
        ({"hdrs": [np.nan]}, "session 0 has no HDRS"),
        ({"alphanum": [np.zeros(41)]}, r"session 0: alphanum must be a list .* 4 a step"),
        ({"alphanum": [np.full(40, np.inf)]}, "alphanum must be a list of finite numbers"),
        ({"accel": [np.full(15, 1e39)]}, "accel must be a list of finite numbers of at most 1e"),
        ({"alphanum": [["a"] * 40]}, "alphanum is no list of numbers"),
        ({"alphanum": [3.0]}, r"got an array of shape \(\)"),
        ({"special": [np.full(60, 0.5)]}, "each step of special is a one in one of auto_correct"),
        ({"special": [None], "alphanum": [np.zeros(4)]}, "none of 1 sessions has 10 to 100"),
    ],
)
def test_wrong_sessions_are_named(change: dict[str, Any], message: str) -> None:
    told = sessions((3, 20, 5, 5))
    for name, column in change.items():
        told = told.drop(columns=name)
        if column is not None:
            told[name] = pd.Series(column)
    with pytest.raises(DataError, match=message):
        session_pool(told, source="biaffect.parquet")


def test_a_column_twice_is_named() -> None:
    told = sessions((3, 20, 5, 5))
    with pytest.raises(DataError, match="several columns have one name"):
        session_pool(pd.concat([told, told[["hdrs"]]], axis=1), source="biaffect.parquet")


def test_a_small_file_of_many_equal_numbers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secure_apfed.data.sessions._VALUES_AT_MOST", 2**16)
    told = sessions((3, 20, 5, 5))
    told["accel"] = pd.Series([np.zeros(2**16 - 2)])
    told.to_parquet(tmp_path / "biaffect.parquet")
    assert (tmp_path / "biaffect.parquet").stat().st_size < 2**16
    with pytest.raises(DataError, match="more than 65536: leave sessions out"):
        pool("biaffect", tmp_path)


def test_a_damaged_parquet_file_of_sessions(tmp_path: Path) -> None:
    (tmp_path / "biaffect.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=r"biaffect.parquet: not a readable Parquet file"):
        pool("biaffect", tmp_path)

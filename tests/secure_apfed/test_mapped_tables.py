"""Tables larger than memory are read by columns and blocks, with the result of those in memory."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from secure_apfed.data import OwnData, load_own_tables, mapped_tables
from secure_apfed.data import tables as own_tables
from secure_apfed.data.lazy_rows import MappedRows
from secure_apfed.data.mapped_tables import MappedIds
from secure_apfed.data.records import check_distinct
from secure_apfed.errors import DataError
from secure_apfed.runs.keeper import table_digest
from secure_apfed.settings.data import DataSettings

ROWS = 700


def make_frame(rows: int = ROWS) -> pd.DataFrame:
    """Return a table with every kind of column, empty cells and a label."""
    draw = np.random.default_rng(3)
    score = draw.normal(size=rows)
    frame = pd.DataFrame(
        {
            "id": [f"person {number:05d}" for number in draw.permutation(rows)],
            "score": score,
            "count": draw.integers(0, 2**55, rows),
            "gap": np.where(draw.random(rows) < 0.1, np.nan, draw.normal(size=rows) * 1e-7),
            "town": draw.choice(["Graz", "Wien", "Linz"], rows),
            "plan": pd.array(draw.integers(0, 9, rows), dtype="Int64"),
            "member": draw.random(rows) < 0.5,
            "since": pd.Timestamp("2020-01-01") + pd.to_timedelta(draw.integers(0, 999, rows), "D"),
            "label": np.where(score + draw.normal(size=rows) > 0, "yes", "no"),
        }
    )
    frame.loc[5, "label"] = None
    frame.loc[[7, rows - 1], "plan"] = pd.NA
    return frame


def write_csv(frame: pd.DataFrame, path: Path) -> Path:
    frame.to_csv(path.with_suffix(".csv"), index=False)
    return path.with_suffix(".csv")


def write_parquet(frame: pd.DataFrame, path: Path) -> Path:
    frame.to_parquet(path.with_suffix(".parquet"))
    return path.with_suffix(".parquet")


def write_parts(frame: pd.DataFrame, path: Path) -> Path:
    """Write two CSV files, the second of which has the empty cells of whole numbers."""
    path.mkdir()
    frame.iloc[:200].to_csv(path / "a.csv", index=False)
    frame.iloc[200:].to_csv(path / "b.csv", index=False)
    return path


WRITERS = {"csv": write_csv, "parquet": write_parquet, "two files": write_parts}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every table span many blocks."""
    monkeypatch.setattr(mapped_tables, "BLOCK_ROWS", 64)
    monkeypatch.setattr(mapped_tables, "_IDS_OF_A_PIECE", 50)
    monkeypatch.setattr(own_tables, "_IDS_OF_A_PIECE", 70)


def load(path: Path, *, memory_map: str, party: str = "bank", **settings: Any) -> OwnData:
    """Return the data of a party whose table is this file."""
    own = {"file": path, **settings.pop("own", {})}
    known: dict[str, Any] = {
        "dataset": "tables",
        "active": "bank",
        "parties": {party: own},
        "missing": "mean",
        "memory_map": memory_map,
        **settings,
    }
    return load_own_tables(DataSettings.model_validate(known), party, seed=1)


@pytest.mark.parametrize("written", WRITERS)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"missing": "drop"},
        {"limit": 100},
        {"labelled": 0.3},
        {"own": {"categorical": ["plan", "member"], "rare_categories": {"most": 5}}},
        {"own": {"numeric": ["member"], "ignore": ["town"]}},
        {"own": {"id_column": ["id", "count"], "ignore": ["since"]}},
        {
            "view_columns": {
                "money": {"columns": ["score", "count", "plan"]},
                "life": {"columns": ["gap", "town", "member", "since"]},
            }
        },
    ],
    ids=lambda settings: ", ".join(settings) or "defaults",
)
def test_mapped_table_equals_the_table_in_memory(
    written: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    path = WRITERS[written](make_frame(), tmp_path / "bank")
    in_memory = load(path, memory_map="never", **settings)
    mapped = load(path, memory_map="always", **settings)

    features = mapped.table.features
    assert isinstance(features, MappedRows)
    assert torch.equal(features[:], in_memory.table.features)
    assert tuple(mapped.table.ids) == in_memory.table.ids
    assert mapped.table.encoding == in_memory.table.encoding
    assert mapped.table.views == in_memory.table.views
    assert mapped.classes == in_memory.classes
    assert torch.equal(mapped.test_rows, in_memory.test_rows)
    assert table_digest(mapped) == table_digest(in_memory)


def repeat_id(frame: pd.DataFrame) -> None:
    """Give a row of the last block the ID of one of the first."""
    frame.loc[ROWS - 3, "id"] = frame.loc[2, "id"]


def empty_ids(frame: pd.DataFrame) -> None:
    frame.loc[[3, ROWS - 5], "id"] = None


def spoil_number(frame: pd.DataFrame) -> None:
    frame["score"] = frame["score"].astype(str)
    frame.loc[ROWS - 9, "score"] = "many"


def keep_gaps(frame: pd.DataFrame) -> None:
    """Leave the empty cells of a column of numbers, which the settings do not fill."""


@pytest.mark.parametrize("written", WRITERS)
@pytest.mark.parametrize("spoil", [repeat_id, empty_ids, spoil_number, keep_gaps])
def test_faults_across_blocks_are_reported_as_in_memory(
    written: str, spoil: Callable[[pd.DataFrame], None], tmp_path: Path
) -> None:
    frame = make_frame()
    spoil(frame)
    path = WRITERS[written](frame, tmp_path / "bank")
    read = partial(load, path, missing="error")
    with pytest.raises(DataError) as in_memory:
        read(memory_map="never")
    with pytest.raises(DataError) as mapped:
        read(memory_map="always")
    assert str(mapped.value) == str(in_memory.value)


@pytest.mark.parametrize(
    "ids", [("a", "b", "c"), ("a", "b", "a"), ("a", "", "b", "b", "a", "a")], ids=" ".join
)
def test_mapped_ids_read_like_a_tuple(ids: tuple[str, ...]) -> None:
    mapped = MappedIds([ids[:1], ids[1:]], party="bank")
    assert (len(mapped), tuple(mapped), mapped[1], mapped[-1]) == (len(ids), ids, ids[1], ids[-1])
    assert (mapped[:2], mapped[::2], mapped[5:]) == (ids[:2], ids[::2], ids[5:])
    assert tuple(mapped.select_rows(np.array([2, 0]))) == (ids[2], ids[0])
    assert mapped == MappedIds([ids], party="bank")
    if len(set(ids)) < len(ids):
        with pytest.raises(DataError, match=r"bank: \d IDs? occur more than once, the first in"):
            check_distinct(mapped, party="bank")
    else:
        check_distinct(mapped, party="bank")

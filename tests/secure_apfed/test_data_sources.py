"""Where a party's rows may lie: files, folders, patterns, databases, lazy frames; the same rows are
the same table. A database's password is seen by nobody else.
"""

import contextlib
import decimal
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from pyarrow import feather, parquet

from secure_apfed.cli import execute
from secure_apfed.config.file import dump_settings, load_config_text, load_settings_text
from secure_apfed.data import files_digest, load_blocks
from secure_apfed.data import databases
from secure_apfed.data.frames import as_pandas
from secure_apfed.data.tables import load_own_tables, read_ids
from secure_apfed.errors import ApfedError, ConfigError, DataError
from secure_apfed.settings.data import DataSettings

ROWS = 60
SECRET = "s3cret/@:word"
QUERY = "SELECT * FROM people ORDER BY id"


def people(rows: int = ROWS) -> pa.Table:
    draw, dates = np.random.default_rng(3), pd.date_range("2024-02-27", periods=rows)
    cents = [decimal.Decimal(int(cent)) / 100 for cent in draw.integers(0, 10**6, rows)]
    gaps = [None if row % 7 == 0 else int(one) for row, one in enumerate(draw.integers(0, 9, rows))]
    return pa.table({
        "id": [f"{row:03d}" for row in range(rows)],
        "owed": pa.array(cents, pa.decimal128(9, 2)),
        "visits": pa.array(gaps, pa.int32()),
        "since": pa.array(dates.date, pa.date32()),
        "member": [row % 3 == 0 for row in range(rows)],
        "branch": ["north", "süd", None, "o'hara"] * (rows // 4),
        "left": ["yes" if row % 4 == 0 else "no" for row in range(rows)],
    })  # fmt: skip


def settings(folder: Path, **source: object) -> DataSettings:
    parties = {"bank": {"missing": "mean", **source}, "shop": {"file": "none.csv"}}
    return DataSettings.model_validate({
        "dataset": "tables", "folder": folder, "parties": parties, "active": "bank",
        "label_column": "left",
    })  # fmt: skip


def in_sqlite(folder: Path) -> dict[str, str]:
    with contextlib.closing(sqlite3.connect(folder / "crm.db")) as base, base:
        base.execute("CREATE TABLE people (id TEXT, owed NUMERIC, visits INTEGER, since DATE, "
                     "member BOOLEAN, branch TEXT, \"left\" TEXT)")  # fmt: skip
        rows = [
            (one["id"], float(one["owed"]), one["visits"], str(one["since"]), one["member"],
             one["branch"], one["left"]) for one in people().to_pylist()
        ]  # fmt: skip
        base.executemany("INSERT INTO people VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
    member = "CASE WHEN member THEN 'True' ELSE 'False' END AS member"  # it has no truths
    query = f'SELECT id, owed, visits, since, {member}, branch, "left" FROM people ORDER BY id;'
    return {"url": "sqlite:///crm.db", "query": query}


def in_duckdb(folder: Path) -> dict[str, str]:
    import duckdb

    with duckdb.connect(str(folder / "crm.duckdb")) as base:
        parquet.write_table(people(), folder / "people")
        base.execute(f"CREATE TABLE people AS FROM read_parquet('{folder / 'people'}')")
    return {"url": "duckdb:///crm.duckdb", "query": QUERY}


def in_files(folder: Path, ending: str, write: Callable[[pa.Table, Path], Any]) -> None:
    """Two files, of which the second has another kind of numbers."""
    (folder / "parts").mkdir()
    (folder / "parts" / "_SUCCESS").touch()
    first, second = people().slice(0, 25), people().slice(25)
    wide = second.set_column(2, "visits", second["visits"].cast(pa.float64()))
    write(first, folder / "parts" / f"a{ending}")
    write(wide, folder / "parts" / f"b{ending}")


def as_csv(table: pa.Table, path: Path) -> None:
    table.to_pandas().to_csv(path, index=False)


WRITERS: Mapping[str, Callable[[pa.Table, Path], Any]] = {
    ".csv": as_csv, ".csv.gz": as_csv, ".parquet": parquet.write_table,
    ".arrow": feather.write_feather,
}  # fmt: skip


def table_of(data: DataSettings) -> tuple[Any, ...]:
    """All that is learnt from, and the model card's encoding."""
    own = load_own_tables(data, "bank", seed=1)
    assert own.table.labels is not None
    return (
        own.table.ids, own.table.features.numpy().tobytes(), own.table.labels.tolist(),
        own.table.encoding, own.train_rows.tolist(), own.test_rows.tolist(), own.classes,
    )  # fmt: skip


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    folder = tmp_path_factory.mktemp("one")
    as_csv(people(), folder / "bank.csv")
    found = table_of(settings(folder, file="bank.csv"))
    kinds = {column.name: column.kind for column in found[3].columns}
    assert kinds == {"owed": "numeric", "visits": "numeric", "since": "date",
                     "member": "categorical", "branch": "categorical"}  # fmt: skip
    return found


@pytest.mark.parametrize("ending", WRITERS)
def test_files_folders_and_patterns_are_one_table(
    ending: str, tmp_path: Path, expected: tuple[Any, ...]
) -> None:
    in_files(tmp_path, ending, WRITERS[ending])
    WRITERS[ending](people(), tmp_path / f"whole{ending}")
    for file in (f"whole{ending}", "parts", f"parts/*{ending}", f"parts/[ab]{ending}"):
        assert table_of(settings(tmp_path, file=file)) == expected, file
    digests = {files_digest(settings(tmp_path, file=one), of=["bank"]) for one in ("parts", "parts/*")
               if one == "parts" or ending}  # fmt: skip
    blocks = [block for block, _ in load_blocks(tmp_path / "parts", expected[3], id_columns=["id"],
                                                rows=20)]  # fmt: skip
    assert tuple(name for block in blocks for name in block) == expected[0]
    assert digests

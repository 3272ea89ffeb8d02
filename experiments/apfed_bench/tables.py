"""Cost of reading a party's own table: in memory, and memory-mapped by columns and blocks.

Cases `memory/N` and `mapped/N`: the active's Parquet table of N rows, with an ID, four numbers, a
category and a label, up to features, labels and split. Each is read by a process of its own, since
peak memory is the process's. Seconds are the processor's.
"""

import json
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from pyarrow import compute, parquet

from apfed_bench.rows import Bench, Group, Row, make_row, run_script

_QUICK = {20_000: ("memory", "mapped")}
_SIZES = {1_000_000: ("memory", "mapped"), 10_000_000: ("mapped",)}
_ROWS_WRITTEN_TOGETHER = 500_000
_TIMEOUT_S = 3600.0
_NUMBER_COLUMNS = 4
_CATEGORIES = np.array(["red", "green", "blue"])


def write_table(path: Path, rows: int) -> None:
    """Write a Parquet table of random people, whose label depends on their numbers and chance."""
    draw = np.random.default_rng(0)
    writer: parquet.ParquetWriter | None = None
    for first in range(0, rows, _ROWS_WRITTEN_TOGETHER):
        count = min(_ROWS_WRITTEN_TOGETHER, rows - first)
        numbers_NF = draw.normal(size=(count, _NUMBER_COLUMNS))
        is_positive = numbers_NF.sum(1) + draw.normal(size=count) > 0
        people = compute.cast(pyarrow.array(np.arange(first, first + count)), pyarrow.string())
        columns: dict[str, Any] = {
            "id": compute.binary_join_element_wise("person", people, "-"),
            **{f"number {column}": numbers_NF[:, column] for column in range(_NUMBER_COLUMNS)},
            "kind": _CATEGORIES[draw.integers(0, len(_CATEGORIES), count)],
            "label": np.where(is_positive, "yes", "no"),
        }
        table = pyarrow.table(columns)
        writer = writer or parquet.ParquetWriter(path, table.schema)
        writer.write_table(table)
    assert writer is not None
    writer.close()


def measure_reading(path: Path, memory_map: str) -> dict[str, float]:
    """Read the table as the active's; return processor seconds and this process's peak memory.

    `memory_map`: value of the setting of this name, "never" or "always". Memory is in bytes:
    "peak_memory" at the end, and "memory_of_imports" before the table is read.
    """
    from secure_apfed.base.phases import peak_memory
    from secure_apfed.data import load_own_tables
    from secure_apfed.settings.data import DataSettings

    settings = DataSettings.model_validate(
        {
            "dataset": "tables",
            "active": "bank",
            "parties": {"bank": {"file": path}},
            "memory_map": memory_map,
        }
    )
    memory_before = peak_memory()
    began = time.process_time()
    load_own_tables(settings, "bank", seed=0)
    return {
        "seconds": time.process_time() - began,
        "peak_memory": peak_memory(),
        "memory_of_imports": memory_before,
    }


def compare_readings(size: int, kinds: Collection[str], wanted: Collection[str]) -> Iterator[Row]:
    """Yield the rows of the wanted cases of tables with `size` rows; all read the same file.

    `kinds`: ways to read that have a case, "memory" and "mapped"; the latter is compared with the
    former. `wanted`: names of the wanted cases.
    """
    is_mapped_wanted = f"mapped/{size}" in wanted
    # A wanted case needs the one that it is compared with.
    needed = [
        kind
        for kind in kinds
        if f"{kind}/{size}" in wanted or (kind == "memory" and is_mapped_wanted)
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bank.parquet"
        write_table(path, size)
        measured: dict[str, Mapping[str, Any]] = {
            kind: run_script(__file__, path, kind, timeout_s=_TIMEOUT_S) for kind in needed
        }
    for kind, values in measured.items():
        peer = f"memory/{size}" if kind == "mapped" and "memory" in measured else None
        ratio = values["seconds"] / measured["memory"]["seconds"] if peer else None
        if f"{kind}/{size}" in wanted:
            yield {**make_row(f"{kind}/{size}", peer=peer, ratio=ratio), **values}


TABLES = Bench(
    groups=lambda quick: [
        Group([f"{kind}/{size}" for kind in kinds], partial(compare_readings, size, kinds))
        for size, kinds in (_QUICK if quick else _SIZES).items()
    ],
    ratio="processor seconds over those in memory",
    fields=("peak_memory",),
)


if __name__ == "__main__":
    _, file, kind = sys.argv
    memory_map = {"memory": "never", "mapped": "always"}[kind]
    print(json.dumps(measure_reading(Path(file), memory_map)))

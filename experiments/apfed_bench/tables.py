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

_QUICK_KINDS_BY_SIZE = {20_000: ("memory", "mapped")}
_KINDS_BY_SIZE = {1_000_000: ("memory", "mapped"), 10_000_000: ("mapped",)}
_ROWS_PER_WRITE = 500_000
_TIMEOUT_S = 3600.0
_NUMBER_COLUMNS = 4
_CATEGORIES = np.array(["red", "green", "blue"])


def write_table(path: Path, row_count: int) -> None:
    """Write a Parquet table of random people, whose label depends on their numbers and chance."""
    rng = np.random.default_rng(0)
    writer: parquet.ParquetWriter | None = None
    for first_row in range(0, row_count, _ROWS_PER_WRITE):
        block_rows = min(_ROWS_PER_WRITE, row_count - first_row)
        numbers_NF = rng.normal(size=(block_rows, _NUMBER_COLUMNS))
        is_positive = numbers_NF.sum(1) + rng.normal(size=block_rows) > 0
        people = compute.cast(
            pyarrow.array(np.arange(first_row, first_row + block_rows)), pyarrow.string()
        )
        columns: dict[str, Any] = {
            "id": compute.binary_join_element_wise("person", people, "-"),
            **{f"number {column}": numbers_NF[:, column] for column in range(_NUMBER_COLUMNS)},
            "kind": _CATEGORIES[rng.integers(0, len(_CATEGORIES), block_rows)],
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


def compare_readings(
    size: int, kinds: Collection[str], wanted_cases: Collection[str]
) -> Iterator[Row]:
    """Yield the rows of the wanted cases of tables with `size` rows; all read the same file.

    `kinds`: ways to read that have a case, "memory" and "mapped"; the latter is compared with the
    former. `wanted_cases`: names of the wanted cases.
    """
    is_mapped_wanted = f"mapped/{size}" in wanted_cases
    # A wanted case needs the one that it is compared with.
    needed_kinds = [
        kind
        for kind in kinds
        if f"{kind}/{size}" in wanted_cases or (kind == "memory" and is_mapped_wanted)
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bank.parquet"
        write_table(path, size)
        values_by_kind: dict[str, Mapping[str, Any]] = {
            kind: run_script(__file__, path, kind, timeout_s=_TIMEOUT_S) for kind in needed_kinds
        }
    for kind, values in values_by_kind.items():
        peer = f"memory/{size}" if kind == "mapped" and "memory" in values_by_kind else None
        ratio = values["seconds"] / values_by_kind["memory"]["seconds"] if peer else None
        if f"{kind}/{size}" in wanted_cases:
            yield {**make_row(f"{kind}/{size}", peer=peer, ratio=ratio), **values}


TABLES = Bench(
    make_groups=lambda quick: [
        Group([f"{kind}/{size}" for kind in kinds], partial(compare_readings, size, kinds))
        for size, kinds in (_QUICK_KINDS_BY_SIZE if quick else _KINDS_BY_SIZE).items()
    ],
    ratio_meaning="processor seconds over those in memory",
    further_fields=("peak_memory",),
)


if __name__ == "__main__":
    _, file, kind = sys.argv
    memory_map = {"memory": "never", "mapped": "always"}[kind]
    print(json.dumps(measure_reading(Path(file), memory_map)))

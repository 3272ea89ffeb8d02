"""ID columns of a file: read alone, a piece at a time, as own tables read them."""

import doctest
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from apfed_protocols import align
from secure_apfed.alignment import IdFile, canonical_ids, ids
from secure_apfed.data.tables import read_raw
from secure_apfed.errors import DataError
from secure_apfed.settings.alignment import AlignmentSettings
from secure_apfed.settings.data import DataSettings

FRAME = pd.DataFrame({"name": ["ann ", "bob", "eve"], "year": [1990, 7, 3], "x": [0.5, 1.5, 2.5]})


def saved(folder: Path, ending: str, frame: pd.DataFrame = FRAME) -> Path:
    path = folder / f"own{ending}"
    if ending == ".parquet":
        frame.to_parquet(path)
    else:
        frame.to_csv(path, index=False)
    return path


def rows(file: IdFile) -> list[object]:
    return [row for piece in file.pieces() for row in piece]


def test_the_example_runs() -> None:
    assert doctest.testmod(ids).failed == 0


@pytest.mark.parametrize("ending", [".csv.gz", ".parquet"])
def test_files_align_as_lists_do(ending: str, tmp_path: Path) -> None:
    file = IdFile("bank", saved(tmp_path, ending), "name")
    assert len(file) == 3
    found = align({"bank": file, "shop": ["eve", "joe", "ann"]}, hub="bank")
    assert sorted(zip(found["bank"].tolist(), found["shop"].tolist(), strict=True)) == [
        (0, 2), (2, 0)
    ]  # fmt: skip


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
@pytest.mark.parametrize("columns", ["year", ("name", "year")])
def test_the_ids_are_those_of_an_own_table(
    ending: str, columns: str | tuple[str, ...], tmp_path: Path
) -> None:
    path = saved(tmp_path, ending, FRAME.assign(label=["a", "b", "a"]))
    file = {"file": str(path)}
    data = DataSettings.model_validate({
        "dataset": "tables", "id_column": columns, "label_column": "label", "active": "bank",
        "parties": {"bank": file, "shop": file}, "test_fraction": 0.4, "split": "at_random",
    })  # fmt: skip
    settings, ids = AlignmentSettings(), read_raw(data, "bank").ids
    assert canonical_ids("bank", IdFile("bank", path, columns), settings) == canonical_ids(
        "bank", ids, settings
    )


def test_no_other_column_is_read_and_no_more_than_a_piece_is_held(tmp_path: Path) -> None:
    """A file of 240 MB once it is read costs a fraction of that."""
    count = 300_000
    wide = {f"x{k}": np.random.default_rng(k).random(count) for k in range(100)}
    path = saved(tmp_path, ".parquet", pd.DataFrame({"id": np.arange(count)} | wide))
    script = (
        "import sys, resource\n"
        "from pathlib import Path\n"
        "import pyarrow.parquet\n"
        "from secure_apfed.alignment import IdFile\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024\n"
        "before = peak()\n"
        "file = IdFile('bank', Path(sys.argv[1]), 'id')\n"
        "assert sum(map(len, file.pieces())) == len(file) == int(sys.argv[2])\n"
        "print(peak() - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path), str(count)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert int(done.stdout) < 100


@pytest.mark.parametrize(
    ("ending", "content", "says"),
    [
        (".csv", "name,x\nann,1\n,2\n", "column 'name' of .* is empty in 1 rows, first in line 3;"),
        (".csv", "id,x\nann,1\n", r"the columns name of .*own.csv cannot be read"),
        (".csv", "", r"the columns name of .* cannot be read"),
        (".parquet", "no parquet", r"the columns name of .*own.parquet cannot be read"),
    ],
)
def test_unfit_files_are_refused(ending: str, content: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / f"own{ending}"
    path.write_text(content)
    with pytest.raises(DataError, match=f"^bank: {says}"):
        canonical_ids("bank", IdFile("bank", path, "name"), AlignmentSettings())


def test_missing_files_and_columns_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="bank: there is no file"):
        IdFile("bank", tmp_path / "none.parquet", "name")
    with pytest.raises(DataError, match="each of the columns id once; it has name, year, x"):
        IdFile("bank", saved(tmp_path, ".parquet"), "id")

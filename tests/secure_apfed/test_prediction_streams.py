"""`predict` of tables larger than memory: block by block it says the same as at once."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from secure_apfed.cli import execute
from secure_apfed.data import load_blocks
from secure_apfed.data.encoding import ColumnEncoding
from secure_apfed.errors import DataError
from secure_apfed.runs.run import run
from secure_apfed.runs.solo import load_model, predict_file, predict_into, row_writer
from tests.secure_apfed.test_tasks import config_of, own_tables
from tests.secure_apfed.whole_files import load_features

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    data = own_tables(folder).model_dump(mode="json", exclude_defaults=True)
    run(config_of("single_view", data=data, train={"epochs": 3, "device": "cpu"}), folder / "run")
    return folder


@pytest.mark.parametrize(("ending", "place"), [
    ("csv", "line 8"), ("csv.gz", "line 8"), ("parquet", r"row 6 \(from 0\)"),
])  # fmt: skip
def test_blocks_are_the_whole_and_say_where_one_is_wrong(
    tmp_path: Path, ending: str, place: str
) -> None:
    frame = pd.DataFrame({"who": [f"00{at}" for at in range(10)], "x": np.arange(10.0)})
    path = tmp_path / f"rows.{ending}"
    frame.to_parquet(path) if ending == "parquet" else frame.to_csv(path, index=False)
    encoding = ColumnEncoding.plain(["x"])
    parts = list(load_blocks(path, encoding, id_columns=["who"], rows=4))
    assert [len(ids) for ids, _ in parts] == [4, 4, 2]
    ids, features = load_features(path, encoding, id_columns=["who"])
    assert tuple(name for names, _ in parts for name in names) == ids
    assert ids[3] == "003"
    assert torch.equal(torch.cat([one for _, one in parts]), features)
    numbered = [ids for ids, _ in load_blocks(path, encoding, rows=4)]
    assert numbered[2] == ("8", "9")
    frame["x"] = [*"012345", "six", *"789"]
    frame.to_parquet(path) if ending == "parquet" else frame.to_csv(path, index=False)
    blocks = load_blocks(path, ColumnEncoding.plain(["x"]), rows=4)
    next(blocks)
    with pytest.raises(DataError, match=rf"column 'x' is numeric.*{place}"):
        next(blocks)


@pytest.mark.parametrize("ending", ["csv", "parquet", "json"])
def test_files_written_in_blocks_are_those_written_at_once(
    trained: Path, tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = predict_file(trained / "run", trained / "active.csv")
    whole.write(tmp_path / f"whole.{ending}")
    monkeypatch.setattr(load_blocks, "__kwdefaults__", {"id_columns": (), "rows": 50})
    compared = predict_into(trained / "run", trained / "active.csv", tmp_path / f"parts.{ending}")
    parts, once = (tmp_path / f"{name}.{ending}" for name in ("parts", "whole"))
    if ending == "parquet":
        pd.testing.assert_frame_equal(pd.read_parquet(parts), pd.read_parquet(once))
    else:
        assert parts.read_text() == once.read_text()
    assert compared.rows == 120
    assert compared.stability == pytest.approx(whole.compared.stability)
    assert [one.shift for one in compared.drift] == pytest.approx(
        [one.shift for one in whole.compared.drift]
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == [parts.name, once.name]


def test_no_digit_is_lost_in_json(trained: Path, tmp_path: Path) -> None:
    told = predict_file(trained / "run", trained / "active.csv")
    told.write(tmp_path / "told.json")
    rows = json.loads((tmp_path / "told.json").read_text())
    assert rows == told.frame().to_dict("records")
    with row_writer(tmp_path / "few.json") as write:
        write(pd.DataFrame({"id": ["é", "2"], "number": [math.inf, 1e-17]}))
    few = json.loads((tmp_path / "few.json").read_text())
    assert few == [{"id": "é", "number": None}, {"id": "2", "number": 1e-17}]


def test_a_file_that_fails_half_way_leaves_the_old_one(trained: Path, tmp_path: Path) -> None:
    output = tmp_path / "told.csv"
    output.write_text("the old one")
    frame = pd.read_csv(trained / "active.csv").astype({"a": object})
    frame.loc[119, "a"] = "?"
    frame.to_csv(tmp_path / "rows.csv", index=False)
    with pytest.raises(DataError, match="line 121"):
        predict_into(trained / "run", tmp_path / "rows.csv", output)
    assert output.read_text() == "the old one"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.csv", "told.csv"]
    with pytest.raises(DataError, match=r"expected a name that ends in \.csv"):
        predict_into(trained / "run", trained / "active.csv", tmp_path / "told.txt")
    with pytest.raises(DataError, match="cannot be written"):
        predict_into(trained / "run", trained / "active.csv", output / "told.csv")


def test_the_command_writes_and_compares_cell_by_cell(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["predict", "--model", str(trained / "run"), "--data", str(trained / "active.csv"),
                 "--output", str(tmp_path / "told.csv"), "--json"]  # fmt: skip
    assert execute(arguments) == 0
    whole = json.loads(capsys.readouterr().out)
    assert (whole["rows"], [one["name"] for one in whole["columns"]]) == (120, ["a", "b"])
    assert execute(arguments[:-1]) == 0
    assert "120 rows written" in capsys.readouterr().err
    # Of few rows there is no stability index.
    rows = pd.read_csv(trained / "active.csv").iloc[:5].assign(a=1e3)
    rows.to_csv(tmp_path / "rows.csv", index=False)
    told = predict_file(trained / "run", tmp_path / "rows.csv").compared
    assert (told.rows, told.stability, told.stability_needs) == (5, None, 50)
    assert execute(["predict", "--model", str(trained / "run"), "--data",
                    str(tmp_path / "rows.csv")]) == 0  # fmt: skip
    said = " ".join(capsys.readouterr().err.split())
    assert "column 'a': a row lies" in said
    assert "5 of 5 rows lie outside of" in said
    assert "no score stability index: of 5 rows it would be high by chance, of 50 or more" in said


@pytest.mark.slow
def test_memory_does_not_grow_with_the_rows(trained: Path, tmp_path: Path) -> None:
    """Ten times the rows, less than 1.5 times the memory."""
    rng, peaks = np.random.default_rng(0), []
    for rows in (100_000, 1_000_000):
        path = tmp_path / f"{rows}.csv"
        ids = [f"p{at}" for at in range(rows)]
        x = rng.normal(size=(rows, 2))
        frame = pd.DataFrame({"id": ids, "a": x[:, 0], "b": x[:, 1], "price": ""})
        frame.to_csv(path, index=False)
        script = (
            "import resource; from pathlib import Path\n"
            "from secure_apfed.runs.solo import predict_into\n"
            f"predict_into(Path({str(trained / 'run')!r}), Path({str(path)!r}), "
            f"Path({str(tmp_path / 'out.csv')!r}))\n"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        )
        found = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        peaks.append(int(found.stdout))
    assert peaks[1] < 1.5 * peaks[0]
    assert load_model(trained / "run").task.name == "regression"

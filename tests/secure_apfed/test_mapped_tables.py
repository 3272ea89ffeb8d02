"""Tables larger than memory are read by columns and blocks, with the result of those in memory."""

import contextlib
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch

from apfed_experiments import baselines
from apfed_protocols.ids import require_comparable
from secure_apfed import run
from secure_apfed.config import Config
from secure_apfed.data import OwnData, load_data, load_own_tables, mapped_tables
from secure_apfed.data import tables as own_tables
from secure_apfed.data.lazy_rows import MappedRows
from secure_apfed.data.mapped_tables import MappedIds
from secure_apfed.data.records import check_distinct
from secure_apfed.errors import DataError
from secure_apfed.planning import forecast as forecast_module
from secure_apfed.planning.forecast import forecast
from secure_apfed.runs.checkpoint_store import table_digest
from secure_apfed.runs.outcome import Progress
from secure_apfed.runs.run import share_alignments
from secure_apfed.settings.data import DataSettings, TableShape
from tests.waiting import LONG_S

ROWS = 700
OPEN_SUM = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")


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
    monkeypatch.setattr(mapped_tables, "_IDS_PER_BLOCK", 50)
    monkeypatch.setattr(own_tables, "_IDS_PER_BLOCK", 70)


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

    features: Any = mapped.table.features
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
    frame.loc[ROWS - 3, "id"] = str(frame["id"].iloc[2])


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


@pytest.fixture
def two_tables(tmp_path: Path) -> Callable[[str], Config]:
    """Write a bank's and a shop's table of 3,000 people; return the settings of a run on them."""
    bank = make_frame(3000)
    bank.to_parquet(tmp_path / "bank.parquet")
    shop = make_frame(3000)[["id", "score", "gap"]].iloc[::-1].iloc[:2500]
    shop.to_csv(tmp_path / "shop.csv", index=False)

    def make_config(memory_map: str) -> Config:
        return Config.model_validate(
            {
                "name": "mapped",
                "seed": 4,
                "party_seeds": "shared_for_comparison",
                "method": "apfed_r",
                "data": {
                    "dataset": "tables",
                    "active": "bank",
                    "missing": "mean",
                    "memory_map": memory_map,
                    "folder": tmp_path,
                    "parties": {"bank": {"file": "bank.parquet"}, "shop": {"file": "shop.csv"}},
                },
                "model": {"hidden": [8], "representation": 4},
                "train": {"epochs": 2, "batch_size": 256},
                "secure_sum": {"scheme": "plain", "allow_single_passive": True},
                "guard": {"mechanism": "none"},
            }
        )

    return make_config


@OPEN_SUM
def test_run_on_mapped_tables_learns_the_same_parameters(
    two_tables: Callable[[str], Config], tmp_path: Path
) -> None:
    config = two_tables("never")
    models = []
    with share_alignments({}):  # the order of common people is drawn anew for every other run
        for memory_map in ("never", "always"):
            data = load_data(two_tables(memory_map).data, seed=config.seed)
            is_mapped = isinstance(data.passives[0].features, MappedRows)
            assert is_mapped is (memory_map == "always")
            run(config, tmp_path / memory_map, data=data)
            models.append((tmp_path / memory_map / "model.safetensors").read_bytes())
    assert models[0] == models[1]


class KilledError(Exception):
    """Ends a run as a killed process would."""


@OPEN_SUM
def test_run_on_mapped_tables_is_resumed(
    two_tables: Callable[[str], Config], tmp_path: Path
) -> None:
    config = two_tables("always")

    seen: list[Progress] = []

    def stop_in_second_epoch(progress: Progress) -> None:
        seen.append(progress)
        if len(seen) > 13:  # of 18 steps
            raise KilledError

    with share_alignments({}):
        run(config, tmp_path / "whole")
        with pytest.raises(KilledError):
            run(config, tmp_path / "broken", on_progress=stop_in_second_epoch)
    run(two_tables("never"), tmp_path / "broken", resume=True)
    models = [tmp_path / name / "model.safetensors" for name in ("whole", "broken")]
    assert models[0].read_bytes() == models[1].read_bytes()


@OPEN_SUM
def test_baselines_of_mapped_rows_learn_from_a_sample(
    two_tables: Callable[[str], Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(baselines, "MAX_ROWS", 400)
    monkeypatch.setattr(baselines, "_MAX_TEST_ROWS", 150)
    config = two_tables("always")
    result = run(config, tmp_path / "run")
    record = baselines.measure_run_baselines(config, tmp_path / "run", result.trained)
    assert record is not None
    assert record.rows == 150
    assert "fitted on 400 of 2,250 rows" in record.describe_best()
    assert record.gain is not None
    assert record.gain.rows == 150


def test_too_small_disk_is_reported_before_rows_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_parquet(make_frame(), tmp_path / "bank")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Disk(free=1000))
    with pytest.raises(DataError, match=r"bank: the columns of its table need .* GB.*TMPDIR"):
        load(path, memory_map="always")


class Disk(NamedTuple):
    free: int


@pytest.mark.parametrize(("limit", "is_large"), [(10, True), (10**9, False)])
def test_auto_maps_tables_of_large_files(
    limit: int, is_large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_tables, "LARGE_FILE", limit)
    path = write_csv(make_frame(), tmp_path / "bank")
    features: Any = load(path, memory_map="auto").table.features
    assert isinstance(features, MappedRows) is is_large


def declare_tables(rows: int) -> dict[str, TableShape]:
    """Return the shapes of a bank's and a shop's table with so many rows."""
    bank = TableShape(rows=rows, features=8, labelled=rows // 2, classes=2)
    return {"bank": bank, "shop": TableShape(rows=rows, features=3)}


@OPEN_SUM
def test_plan_of_more_rows_multiplies_the_costs_of_fewer(
    two_tables: Callable[[str], Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forecast_module, "_MAX_PLANNED_ROWS", 1000)
    config = two_tables("auto")
    few = forecast(config, declare_tables(1000))
    many = forecast(config, declare_tables(100_000_000))
    assert few.tables == ()
    assert many.rows == {"bank": 100_000_000, "shop": 100_000_000}
    for name in ("aligned_rows", "train_rows", "labelled_rows", "test_rows", "steps"):
        assert getattr(many, name) == 100_000 * getattr(few, name), name
    for link, link_of_few in zip(many.links, few.links, strict=True):
        factor = 1 if link.kind in ("greeting", "session", "signature", "ready") else 100_000
        assert link.wire_bytes == factor * link_of_few.wire_bytes, link.kind
    assert many.wire_bytes == sum(link.wire_bytes for link in many.links)
    assert (many.epsilon_x, many.releases) == (few.epsilon_x, few.releases)
    bank, shop = many.tables
    assert (bank.party, bank.rows) == ("bank", 100_000_000)
    assert bank.memory_bytes < 21e9
    assert 100_000_000 * 8 * 12 < bank.disk_bytes < 100_000_000 * 8 * 24
    assert shop.disk_bytes < bank.disk_bytes
    (limit,) = (warning for warning in many.warnings if "maximum_ids" in warning)
    assert "bank, shop: more rows than alignment.maximum_ids (10,000,000)" in limit
    assert "maximum_ids" not in " ".join(few.warnings)


def test_parties_are_compared_by_few_of_their_ids() -> None:
    taken = list[str]()

    def give_ids(party: str) -> Iterator[str]:
        for number in range(1000):
            taken.append(party)
            yield str(number)

    require_comparable({party: give_ids(party) for party in ("bank", "shop", "clinic")})
    assert taken == ["bank", "shop", "clinic"]


def test_rows_of_a_query_are_mapped_too(tmp_path: Path) -> None:
    frame = make_frame()[["id", "score", "town", "label"]]
    with contextlib.closing(sqlite3.connect(tmp_path / "bank.db")) as database:
        frame.to_sql("people", database, index=False)
    query = {"url": f"sqlite:///{tmp_path}/bank.db", "query": "SELECT * FROM people ORDER BY id"}
    in_memory, mapped = (
        load(Path(), memory_map=memory_map, own={"file": None, "database": query})
        for memory_map in ("never", "always")
    )
    features: Any = mapped.table.features
    assert torch.equal(features[:], in_memory.table.features)
    assert tuple(mapped.table.ids) == in_memory.table.ids


@pytest.mark.slow
@OPEN_SUM
def test_parties_in_processes_read_their_own_mapped_tables(
    two_tables: Callable[[str], Config], tmp_path: Path
) -> None:
    result = run(two_tables("always"), tmp_path / "run", transport="local", timeout_s=LONG_S)
    assert result.measures
    copies = [path.name for path in (tmp_path / "run" / "parties").rglob("table.safetensors")]
    assert copies == []

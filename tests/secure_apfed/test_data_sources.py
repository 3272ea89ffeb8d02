"""Where a party's rows may lie: files, folders, patterns, databases, lazy frames; the same rows are
the same table. A database's password is seen by nobody else.
"""

import contextlib
import decimal
import os
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from pyarrow import feather, parquet

from secure_apfed.alignment import IdFile
from secure_apfed.base.files import to_json
from secure_apfed.cli import execute
from secure_apfed.config.file import dump_settings, load_config_text
from secure_apfed.data import compute_files_digest, databases, load_blocks
from secure_apfed.data.frames import as_pandas
from secure_apfed.data.tables import load_own_tables, open_table
from secure_apfed.errors import ApfedError, ConfigError, DataError
from secure_apfed.settings.data import Database, DataSettings

ROWS = 60
SECRET = "s3cret/@:word"
QUERY = "SELECT * FROM people ORDER BY id"


def people(rows: int = ROWS) -> pa.Table:
    draw = np.random.default_rng(3)
    dates = pd.date_range("2024-02-27", periods=rows)
    cents = [decimal.Decimal(int(cent)) / 100 for cent in draw.integers(0, 10**6, rows)]
    gaps = [None if row % 7 == 0 else int(one) for row, one in enumerate(draw.integers(0, 9, rows))]
    return pa.table(
        {
            "id": [f"{row:03d}" for row in range(rows)],
            "owed": pa.array(cents, pa.decimal128(9, 2)),
            "visits": pa.array(gaps, pa.int32()),
            "since": pa.array(dates.date, pa.date32()),
            "member": [row % 3 == 0 for row in range(rows)],
            "branch": ["north", "süd", None, "o'hara"] * (rows // 4),
            "left": ["yes" if row % 5 == 0 else "no" for row in range(rows)],
        }
    )


def settings(folder: Path, **source: object) -> DataSettings:
    parties = {"bank": {"missing": "mean", **source}, "shop": {"file": "none.csv"}}
    return DataSettings.model_validate(
        {
            "dataset": "tables",
            "folder": folder,
            "parties": parties,
            "active": "bank",
            "label_column": "left",
        }
    )


def write_sqlite(folder: Path) -> dict[str, str]:
    with contextlib.closing(sqlite3.connect(folder / "crm.db")) as base, base:
        base.execute(
            "CREATE TABLE people (id TEXT, owed NUMERIC, visits INTEGER, since DATE, "
            'member BOOLEAN, branch TEXT, "left" TEXT)'
        )
        rows = [
            (
                one["id"],
                float(one["owed"]),
                one["visits"],
                str(one["since"]),
                one["member"],
                one["branch"],
                one["left"],
            )
            for one in people().to_pylist()
        ]
        base.executemany("INSERT INTO people VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
    member = "CASE WHEN member THEN 'True' ELSE 'False' END AS member"  # it has no truths
    query = f'SELECT id, owed, visits, since, {member}, branch, "left" FROM people ORDER BY id;'
    return {"url": "sqlite:///crm.db", "query": query}


def write_duckdb(folder: Path) -> dict[str, str]:
    import duckdb

    with duckdb.connect(str(folder / "crm.duckdb")) as base:
        parquet.write_table(people(), folder / "people")
        base.execute(f"CREATE TABLE people AS FROM read_parquet('{folder / 'people'}')")
    return {"url": "duckdb:///crm.duckdb", "query": QUERY}


def write_two_files(folder: Path, ending: str, write: Callable[[pa.Table, Path], Any]) -> None:
    """Write two files, of which the second has another kind of numbers."""
    (folder / "parts").mkdir()
    (folder / "parts" / "_SUCCESS").touch()
    first = people().slice(0, 25)
    second = people().slice(25)
    wide = second.set_column(2, "visits", second["visits"].cast(pa.float64()))
    write(first, folder / "parts" / f"a{ending}")
    write(wide, folder / "parts" / f"b{ending}")


def as_csv(table: pa.Table, path: Path) -> None:
    table.to_pandas().to_csv(path, index=False)


WRITERS: Mapping[str, Callable[[pa.Table, Path], Any]] = {
    ".csv": as_csv,
    ".csv.gz": as_csv,
    ".parquet": parquet.write_table,
    ".arrow": feather.write_feather,
}


def table_of(data: DataSettings) -> tuple[Any, ...]:
    """All that is learnt from, and the model card's encoding."""
    own = load_own_tables(data, "bank", seed=1)
    assert own.table.labels is not None
    return (
        own.table.ids,
        own.table.features.numpy().tobytes(),
        own.table.labels.tolist(),
        own.table.encoding,
        own.train_rows.tolist(),
        own.test_rows.tolist(),
        own.classes,
    )


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    folder = tmp_path_factory.mktemp("one")
    as_csv(people(), folder / "bank.csv")
    found = table_of(settings(folder, file="bank.csv"))
    kinds = {column.name: column.kind for column in found[3].columns}
    assert kinds == {
        "owed": "numeric",
        "visits": "numeric",
        "since": "date",
        "member": "categorical",
        "branch": "categorical",
    }
    return found


@pytest.mark.parametrize("ending", WRITERS)
def test_files_folders_and_patterns_are_one_table(
    ending: str, tmp_path: Path, expected: tuple[Any, ...]
) -> None:
    write_two_files(tmp_path, ending, WRITERS[ending])
    WRITERS[ending](people(), tmp_path / f"whole{ending}")
    named = (f"whole{ending}", "parts", f"parts/*{ending}", f"parts/[ab]{ending}")
    tables = {file: table_of(settings(tmp_path, file=file)) for file in named}
    assert not [file for file, found in tables.items() if found != expected]
    files = {file: IdFile("bank", tmp_path / file, ["id"]) for file in named}
    people_by_file = {
        name: tuple(one for piece in file.pieces() for one in piece) for name, file in files.items()
    }
    assert not [file for file, ids in people_by_file.items() if ids != expected[0]]
    blocks = load_blocks(tmp_path / "parts", expected[3], id_columns=["id"], block_row_count=20)
    ids, features = zip(*blocks, strict=True)
    assert sum(ids, ()) == expected[0]
    assert torch.cat(features).numpy().tobytes() == expected[1]
    every = settings(tmp_path, file=f"parts/*{ending}")
    before = compute_files_digest(every, parties=["bank"])
    assert before == compute_files_digest(every, parties=["bank"])
    WRITERS[ending](people().slice(25, 5), tmp_path / "parts" / f"b{ending}")
    assert before != compute_files_digest(every, parties=["bank"])


def test_what_is_wrong_in_several_files_is_told_by_file(tmp_path: Path) -> None:
    write_two_files(tmp_path, ".csv", as_csv)
    second = tmp_path / "parts" / "b.csv"
    told: Callable[[], object] = lambda: load_own_tables(  # noqa: E731
        settings(tmp_path, file="parts", numeric=["owed"]), "bank", seed=1
    )
    kept = second.read_text()
    second.write_text(kept.replace("owed", "debt"))
    with pytest.raises(DataError, match=r"b.csv and .*a.csv differ in the columns debt, owed"):
        told()
    second.write_text(re.sub(r"^(\d+),[\d.]+", r"\1,much", kept, flags=re.M))
    with pytest.raises(DataError, match=r"'owed' is numeric, but .* in line 2 of b.csv"):
        told()
    shutil.copy(second, tmp_path / "parts" / "c.parquet")
    with pytest.raises(DataError, match=r"of one kind, and holds CSV and Parquet; name another"):
        told()


@pytest.mark.parametrize("file", ["parts/*.tsv", "none-[ab].csv"])
def test_a_pattern_that_no_file_fits_is_refused(file: str, tmp_path: Path) -> None:
    write_two_files(tmp_path, ".csv", as_csv)
    with pytest.raises(DataError, match=r"bank: .* of one kind, and holds no file"):
        load_own_tables(settings(tmp_path, file=file), "bank", seed=1)


def test_folders_named_by_a_column_have_it(tmp_path: Path) -> None:
    parquet.write_to_dataset(people(), tmp_path / "by", partition_cols=["branch"])
    own = load_own_tables(settings(tmp_path, file="by", categorical=["branch"]), "bank", seed=1)
    names = [own.table.encoding.feature_name(at) for at in range(own.table.features.shape[1])]
    assert [name for name in names if name.startswith("branch")] == [
        "branch=north",
        "branch=o'hara",
        "branch=süd",
    ]
    assert names[:3] == ["owed", "visits", "since"]


@pytest.mark.parametrize("scan", [pl.scan_parquet, pl.scan_ipc, pl.scan_csv])
def test_lazy_frames_are_computed(scan: Callable[..., Any], tmp_path: Path) -> None:
    ending = {"scan_parquet": ".parquet", "scan_ipc": ".arrow"}.get(scan.__name__, ".csv")
    for at in (0, 1):
        WRITERS[ending](people().slice(30 * at, 30), tmp_path / f"{at}{ending}")
    lazy = scan(str(tmp_path / f"*{ending}"))
    pd.testing.assert_frame_equal(as_pandas(lazy, party="p"), as_pandas(lazy.collect(), party="p"))
    with pytest.raises(DataError, match=r"^p: its lazy frame cannot be computed"):
        as_pandas(lazy.select("nothing"), party="p")
    with pytest.raises(DataError, match=r"^p: its lazy frame cannot be computed"):
        as_pandas(scan(str(tmp_path / f"gone{ending}")), party="p")


@pytest.mark.parametrize("rows", [10_000, 7])  # a chunk of gaps alone, and of numbers alone
@pytest.mark.parametrize("base", [write_sqlite, write_duckdb])
def test_a_query_is_the_same_table(
    base: Callable[[Path], dict[str, str]],
    rows: int,
    tmp_path: Path,
    expected: tuple[Any, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    database = base(tmp_path)
    data = settings(tmp_path, database=database)
    before = compute_files_digest(data, parties=["bank"])
    monkeypatch.setattr(databases, "_ROWS", rows)
    assert table_of(data) == expected
    assert compute_files_digest(data, parties=["bank"]) == before
    pieces = IdFile("bank", open_table(data, "bank"), "id").pieces()
    assert tuple(one for piece in pieces for one in piece) == expected[0]
    fewer = {
        **database,
        "query": database["query"].replace("FROM people", "FROM people WHERE id > '1'"),
    }
    assert compute_files_digest(settings(tmp_path, database=fewer), parties=["bank"]) != before


SQLITE: Mapping[str, Any] = {"url": "sqlite:///crm.db", "query": QUERY}
REFUSED: list[tuple[Mapping[str, Any], str]] = [
    ({"url": "sqlite:///gone.db"}, r"data.parties.bank.database.url: there is no file /.*gone.db"),
    ({"url": "duckdb:///none.txt"}, r"bank.database: .*not a valid DuckDB"),
    ({"url": "postgresql+psycopg://me@127.0.0.1:1/crm"}, r"bank.database: connection failed"),
    ({"url": "postgresql://me@host:port/crm"}, r"bank.database: .*'port'; correct url or query"),
    ({"url": "mysql+pymysql://me@host/crm"}, "url: its driver pymysql is not installed"),
    ({"url": "nothing://me@host/crm"}, r"database: Can't load plugin: sqlalchemy.dialects"),
    ({"credentials": {"env": "HOME"}}, "credentials: sqlite asks for no password; leave them out"),
    ({"query": "SELECT * FROM persons ORDER BY id"}, r"database: no such table: persons"),
    ({"query": "SELECT debt FROM people ORDER BY id"}, "database: no such column: debt"),
    (
        {"query": 'SELECT id, id, "left" FROM people ORDER BY id'},
        "bank: its query has several columns named id; give each a name",
    ),
    ({"query": "SELECT id, owed FROM people ORDER BY id"}, "its query lacks the columns left"),
    ({"query": "SELECT * FROM people WHERE id = 'x' ORDER BY id"}, "bank: its query has no rows"),
    (
        {
            "query": "SELECT id, \"left\", CASE id WHEN '003' THEN 'x' ELSE 1 END AS mixed "
            "FROM people ORDER BY id"
        },
        r"a column of its query holds cells of several kinds",
    ),
    ({"query": "SELECT * FROM people JOIN people AS p ORDER BY p.id"}, "several columns named id"),
]


@pytest.mark.parametrize(("changes", "says"), REFUSED)
def test_what_a_database_cannot_tell(changes: Mapping[str, Any], says: str, tmp_path: Path) -> None:
    write_sqlite(tmp_path)
    (tmp_path / "none.txt").write_text("no database " * 1000)
    data = settings(tmp_path, database={**SQLITE, **changes})
    with pytest.raises(ApfedError, match=says):
        table_of(data)


def test_cells_that_change_their_kind_later_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_sqlite(tmp_path)
    monkeypatch.setattr(databases, "_ROWS", 10)
    query = (
        "SELECT id, \"left\", CASE WHEN id > '030' THEN 'x' ELSE 1 END AS m FROM people ORDER BY 1"
    )
    with pytest.raises(
        DataError, match="of its query holds cells of several kinds, or of one that"
    ):
        table_of(settings(tmp_path, database={**SQLITE, "query": query}))


WRONG: list[tuple[Any, str]] = [
    ({"url": f"postgresql://me:{SECRET}@host/crm"}, "database.url: it holds a password"),
    ({"url": f"mysql://host/crm?user=me&password={SECRET}"}, "database.url: it holds a password"),
    ({"url": f"mssql:///?odbc_connect=PWD%3D{SECRET}"}, "database.url: it holds a password"),
    (f"postgresql://me:{SECRET}@host/crm", "database: expected url and query, and credentials"),
    ({"credentials": SECRET}, "database.credentials: expected {env: NAME}, or {file: PATH} of a"),
    ({"credentials": {"password": SECRET}}, "database.credentials: expected {env: NAME}"),
    ({"credentials": {"env": "A", "file": "b"}}, "database.credentials: expected {env: NAME}"),
    ({"password": SECRET}, "database.password: is an unknown key"),
    ({"url": "crm.db"}, "database.url: expected one as sqlite:///crm.db or"),
    ({"query": "SELECT 1; DROP TABLE people"}, "database.query: has several statements"),
    ({"query": "DELETE FROM people"}, "database.query: is no SELECT, which alone reads"),
    (
        {"query": "WITH gone AS (DELETE FROM people RETURNING *) SELECT * FROM gone ORDER BY id"},
        "database.query: DELETE writes, and a table is only read",
    ),
    ({"query": "SELECT * INTO copy FROM people ORDER BY id"}, "database.query: INTO writes"),
    ({"query": "SELECT * FROM people -- ORDER BY id"}, "database.query: has no ORDER BY"),
]


def explain_refusal(database: Any, **more: object) -> str:
    bank = {"database": {**SQLITE, **database} if isinstance(database, dict) else database, **more}
    content = {
        "name": "a",
        "method": "single_view",
        "data": {
            "dataset": "tables",
            "active": "bank",
            "parties": {"bank": bank, "shop": {"file": "b.csv"}},
        },
    }
    with pytest.raises(ConfigError) as caught:
        load_config_text(to_json(content))
    return str(caught.value)


@pytest.mark.parametrize(("database", "says"), WRONG)
def test_what_settings_refuse_shows_no_password(database: Any, says: str) -> None:
    told = explain_refusal(database)
    assert f"data.parties.bank.{says}" in told
    assert SECRET not in told


def test_a_table_is_a_file_or_a_query() -> None:
    both = "data.parties.bank: give the table as file or as database, one of the two"
    assert both in explain_refusal({}, file="a.csv")


@pytest.mark.parametrize(
    "quoted",
    [
        "SELECT ';' AS a, 'it''s; delete' AS \"drop;\" FROM t ORDER BY a;",
        "WITH a AS (SELECT $$;$$ AS b) SELECT * FROM a /* ; update */ ORDER BY b -- ;",
        'select a.update_time, a."insert" from a order\nby 1',
    ],
)
def test_words_in_quotes_are_no_statements(quoted: str) -> None:
    assert Database(url="sqlite://", query=quoted).query == quoted


def test_the_password_is_read_from_where_the_settings_say_and_told_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import psycopg

    given: list[str] = []

    def connect(*arguments: Any, **options: Any) -> Any:
        given.append(options["password"])
        raise psycopg.OperationalError(f"not {SECRET} nor {quote(SECRET, safe='')}")

    monkeypatch.setattr(psycopg, "connect", connect)
    monkeypatch.setattr(psycopg.Connection, "connect", connect)
    place = tmp_path / "db.pass"
    key = "data.parties.bank.database.credentials: "
    where: dict[str, str] = {"env": "BANK_DB_PASSWORD"}

    def explain_failure() -> str:
        database = {**SQLITE, "url": "postgresql+psycopg://me@host/crm", "credentials": where}
        data = settings(tmp_path, database=database)
        assert SECRET not in dump_settings(data)
        with pytest.raises(ApfedError) as caught:
            table_of(data)
        assert SECRET not in "".join(traceback.format_exception(caught.value))
        return str(caught.value)

    assert explain_failure() == (
        f"{key}there is no environment variable BANK_DB_PASSWORD; set it where this party starts"
    )
    monkeypatch.setenv("BANK_DB_PASSWORD", SECRET)
    assert "data.parties.bank.database: not *** nor ***; correct url or query" in explain_failure()
    where = {"file": "db.pass"}
    assert f"{key}{place} cannot be read (No such file or directory)" in explain_failure()
    place.write_text(f"{SECRET}\n")
    place.chmod(0o644)
    assert explain_failure() == f"{key}others may read {place} (mode 644); chmod 600 it"
    place.chmod(0o600)
    assert "not ***" in explain_failure()
    place.write_bytes(b"\xff\xfe")
    assert f"{key}{place} cannot be read (no text in UTF-8)" in explain_failure()
    assert given == [SECRET, SECRET]


def test_without_the_extra_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    with pytest.raises(
        ConfigError, match=r"SQLAlchemy is not installed; run: python -m pip install .*'sqlalchemy"
    ):
        table_of(settings(tmp_path, database=SQLITE))


BIN = Path("/usr/lib/postgresql/15/bin")


@pytest.fixture
def server() -> Iterator[str]:
    """The URL of a server of our own, which asks for a password; PostgreSQL is never root's."""
    if not (BIN / "initdb").exists():
        pytest.skip(f"no {BIN}: apt-get install postgresql")
    user: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place, socket.socket() as free:
        folder, word = Path(place), Path(place) / "word"
        word.write_text(SECRET)
        if os.getuid() == 0:
            user = {"user": "nobody", "group": "nogroup", "extra_groups": []}
            for path in (folder, word):
                shutil.chown(path, "nobody", "nogroup")

        def call(program: str, *options: str) -> None:
            subprocess.run(
                [BIN / program, "-D", folder / "data", *options],
                check=True,
                cwd=folder,
                stdout=subprocess.DEVNULL,
                timeout=120,
                **user,
            )

        call("initdb", "--auth=scram-sha-256", f"--pwfile={word}", "--username=me", "--no-sync")
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        listens = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories=''"
        call("pg_ctl", "start", "-w", "-l", str(folder / "log"), "-o", listens)
        try:
            yield f"postgresql+psycopg://me@127.0.0.1:{port}/postgres"
        finally:
            call("pg_ctl", "stop", "-m", "immediate")


@pytest.mark.slow
def test_postgresql_is_the_same_table_and_its_password_lies_in_no_file(
    server: str,
    tmp_path: Path,
    expected: tuple[Any, ...],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    import sqlalchemy

    monkeypatch.setenv("BANK_DB_PASSWORD", SECRET)
    monkeypatch.setattr(databases, "_ROWS", 7)
    engine = sqlalchemy.create_engine(sqlalchemy.make_url(server).set(password=SECRET))
    with engine.begin() as base:
        base.exec_driver_sql(
            "CREATE TABLE people (id uuid, owed numeric(9, 2), visits integer, since date, "
            'member boolean, branch text, "left" text)'
        )
        insert = sqlalchemy.text(
            "INSERT INTO people VALUES (CAST(lpad(:id, 32, '0') AS uuid), "
            ":owed, :visits, :since, :member, :branch, :left)"
        )
        base.execute(insert, people().to_pylist())
        base.exec_driver_sql("CREATE SEQUENCE counter")
    engine.dispose()
    query = "SELECT * FROM people WHERE branch IS NULL OR branch LIKE '%' ORDER BY id"
    database = {"url": server, "query": query, "credentials": {"env": "BANK_DB_PASSWORD"}}
    data = settings(tmp_path, database=database)
    found = table_of(data)
    assert [one[-3:] for one in found[0]] == list(expected[0])
    assert found[1:] == expected[1:]
    assert len(compute_files_digest(data, parties=["bank"])) == 64
    wrong = {**database, "query": "SELECT nextval('counter') AS id ORDER BY id"}
    with pytest.raises(DataError, match=r"database: cannot execute .* a read-only tran"):
        table_of(settings(tmp_path, database=wrong))
    monkeypatch.setenv("BANK_DB_PASSWORD", "another")
    with pytest.raises(DataError, match=r"database: .*password authentication failed") as caught:
        table_of(data)
    assert "another" not in str(caught.value)

    monkeypatch.setenv("BANK_DB_PASSWORD", SECRET)
    shop = people().select(["id", "visits"]).to_pandas()
    shop.assign(id=[f"00000000-0000-0000-0000-{one:0>12}" for one in shop["id"]]).to_csv(
        tmp_path / "none.csv", index=False
    )
    parties = {
        "bank": data.model_dump(mode="json")["parties"]["bank"],
        "shop": {"file": "none.csv", "missing": "mean"},
    }
    content = {
        "name": "a",
        "method": "tvfl",
        "train": {"epochs": 1},
        "guard": {"mechanism": "none"},
        "data": {**data.model_dump(mode="json"), "parties": parties, "classes": ["no", "yes"]},
    }
    (tmp_path / "run.yaml").write_text(to_json(content))
    run = ["run", str(tmp_path / "run.yaml"), "--output", str(tmp_path / "run"), "--no-baselines"]
    assert execute(run) == 0
    out = capfd.readouterr()
    assert SECRET not in out.out + out.err
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert "config.yaml" in {path.name for path in files}
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]

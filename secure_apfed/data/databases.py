"""Reading rows from a query of a party's own database, with its password.

Run by: a party on its own database, by SQLAlchemy (extra `sql`). The connection is opened
read-only, rows are read chunk by chunk, and nothing is committed. The password comes from the
environment or a file that only its owner can read, is passed to the connection only, and is removed
from the driver's error messages; errors of drivers are not chained.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote
from uuid import UUID

import pyarrow

from apfed_protocols.installing import install_extra
from secure_apfed.data.frames import refuse_names
from secure_apfed.errors import ApfedError, ConfigError, DataError
from secure_apfed.settings.data import Database

if TYPE_CHECKING:
    from sqlalchemy import URL, Connection

_ROWS = 10_000  # of a chunk
_ResolvePath = Callable[[Path], Path]


def query_table(database: Database, resolve_path: _ResolvePath, *, party: str) -> pyarrow.Table:
    """Run a party's query, and return its rows.

    Args:
        database: settings of the database: its URL, the query and where the password is.
        resolve_path: function that resolves a path of the settings against their folder.
        party: the party's name, for errors.

    Raises:
        ConfigError: a driver or the password is missing.
        DataError: the database reports an error, or a column has cells of several kinds.
    """
    tables: list[pyarrow.Table] = []
    try:
        for names, rows in _fetch_chunks(database, resolve_path, party):
            refuse_names(names, "its query", party)
            columns = zip(*rows, strict=True) if rows else [()] * len(names)
            tables.append(pyarrow.table(dict(zip(names, map(_make_array, columns), strict=True))))
        return pyarrow.concat_tables(tables, promote_options="permissive")
    except (pyarrow.ArrowException, OverflowError) as error:
        raise DataError(
            f"{party}: a column of its query holds cells of several kinds, or of one that no table "
            f"has ({error}); cast it there, as CAST(x AS TEXT)"
        ) from error


def _make_array(cells: Sequence[Any]) -> pyarrow.Array:
    """Return a column's cells as an Arrow array; UUIDs become texts, as Arrow would refuse them."""
    return pyarrow.array([str(cell) if isinstance(cell, UUID) else cell for cell in cells])


def _fetch_chunks(
    database: Database, resolve_path: _ResolvePath, party: str
) -> Iterator[tuple[tuple[str, ...], Sequence[Sequence[Any]]]]:
    """Run the query, and yield the column names with up to `_ROWS` rows, until no row is left.

    At least one pair is yielded, so that a result without rows still has its column names.

    `resolve_path`: function that resolves a path of the settings.
    """
    with _open_connection(database, resolve_path, party) as connection:
        result = connection.exec_driver_sql(database.query)
        names = tuple(result.keys())
        first_rows = result.fetchmany(_ROWS)
        yield names, first_rows
        while rows := result.fetchmany(_ROWS):
            yield names, rows


@contextmanager
def _open_connection(
    database: Database, resolve_path: _ResolvePath, party: str
) -> "Iterator[Connection]":
    """Open a read-only connection with the configured password.

    Errors inside the block are converted, too. They are not chained (`from None`), since the
    driver's own error may contain the password.

    Raises:
        ConfigError: SQLAlchemy, the driver or the password is missing.
        DataError: the database's error, with the password removed.
    """
    key = f"data.parties.{party}.database"
    secret = _find_password(database, resolve_path, key)
    try:
        import sqlalchemy
        from sqlalchemy.exc import SQLAlchemyError
    except ModuleNotFoundError:
        raise ConfigError(
            f"{key}: SQLAlchemy is not installed; run: {install_extra('sql')}"
        ) from None
    try:
        url = sqlalchemy.make_url(database.url).set(password=secret)
        url, options = _make_read_only_url(url, resolve_path, key)
        engine = sqlalchemy.create_engine(
            url, connect_args=options, poolclass=sqlalchemy.NullPool, hide_parameters=True
        )
        with engine.connect() as connection:
            yield connection.execution_options(
                stream_results=True,
                max_row_buffer=_ROWS,
                no_parameters=True,
                postgresql_readonly=True,
            )
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{key}.url: its driver {error.name} is not installed; install it, or name another, as "
            "postgresql+psycopg://"
        ) from None
    except (SQLAlchemyError, ValueError) as error:
        if isinstance(error, ApfedError):
            raise
        driver_error = getattr(error, "orig", None)
        reason = " ".join(str(driver_error or error).split())
        if secret:
            reason = reason.replace(secret, "***").replace(quote(secret, safe=""), "***")
        raise DataError(f"{key}: {reason}; correct url or query") from None


def _make_read_only_url(
    url: "URL", resolve_path: _ResolvePath, key: str
) -> "tuple[URL, dict[str, Any]]":
    """Return the URL and the driver's options that open an SQLite or DuckDB file read-only.

    URLs of other databases are returned unchanged, without options: their connections are made
    read-only otherwise, or by the rights of the database's user.

    `resolve_path`: function that resolves a path of the settings. `key`: key path of the settings,
    for errors.

    Raises:
        DataError: there is no such file.
        ConfigError: a password is configured, which a file does not have.
    """
    kind = url.get_backend_name()
    if kind not in ("sqlite", "duckdb") or url.database in (None, ":memory:"):
        return url, {}
    path = resolve_path(Path(url.database)).absolute()
    if not path.is_file():
        raise DataError(f"{key}.url: there is no file {path}; check the path")
    if url.password is not None:
        raise ConfigError(f"{key}.credentials: {kind} asks for no password; leave them out")
    if kind == "duckdb":
        return url.set(database=str(path)), {"read_only": True}
    return url.set(database=path.as_uri(), query={"mode": "ro", "uri": "true"}), {}


def _find_password(database: Database, resolve_path: _ResolvePath, key: str) -> str | None:
    """Return the password from an environment variable or the first line of a file.

    None means that no password is configured. `resolve_path`: function that resolves a path of the
    settings. `key`: key path of the settings, for errors.

    Raises ConfigError: the password is missing, or others may read the file.
    """
    if database.credentials is None:
        return None
    ((kind, name),) = database.credentials.items()
    if kind == "env":
        if (secret := os.environ.get(name)) is None:
            raise ConfigError(
                f"{key}.credentials: there is no environment variable {name}; set it where this "
                "party starts"
            )
        return secret
    path = resolve_path(Path(name))
    try:
        if (mode := path.stat().st_mode & 0o777) & 0o077:
            raise ConfigError(
                f"{key}.credentials: others may read {path} (mode {mode:o}); chmod 600 it"
            )
        return path.read_text(encoding="utf-8").partition("\n")[0].rstrip("\r")
    except (OSError, UnicodeDecodeError) as error:  # a decoding error's text would show a byte
        reason = getattr(error, "strerror", None) or "no text in UTF-8"
        raise ConfigError(
            f"{key}.credentials: {path} cannot be read ({reason}); its first line is the password"
        ) from None

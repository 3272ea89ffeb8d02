"""Rows of a query of a party's own database, and the password that it asks for.

Run by: a party on its own database, by SQLAlchemy (extra `sql`). The connection is asked to be
read-only, rows come a chunk at a time, and nothing is committed. The password comes from the
environment or a file that its owner alone may read, goes into the connection, and is cut out of
what a driver says; errors of drivers are not chained.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote
from uuid import UUID

import pyarrow

from secure_apfed.data.frames import refuse_names
from secure_apfed.errors import ConfigError, DataError
from secure_apfed.settings.data import Database

if TYPE_CHECKING:
    from sqlalchemy import Connection

__all__ = ["query_digest", "query_table"]

_ROWS = 10_000  # of a chunk
_FILES = ("sqlite", "duckdb")
_Place = Callable[[Path], Path]


def query_table(database: Database, place: _Place, *, party: str) -> pyarrow.Table:
    """The rows of the query; `place` says where a file lies that the settings name."""
    tables: list[pyarrow.Table] = []
    for names, rows in _chunks(database, place, party):
        refuse_names(names, "its query", party)
        columns = zip(*rows, strict=True) if rows else [()] * len(names)
        arrays = [_array(name, own, party) for name, own in zip(names, columns, strict=True)]
        tables.append(pyarrow.Table.from_arrays(arrays, names))
    try:
        return pyarrow.concat_tables(tables, promote_options="permissive")
    except pyarrow.ArrowException as error:
        raise _mixed(party, f"a column of {', '.join(tables[0].column_names)}", error) from error


def query_digest(database: Database, place: _Place, *, party: str) -> str:
    """SHA-256 (hex) of the columns and rows that it gives now."""
    found = hashlib.sha256()
    for names, rows in _chunks(database, place, party):
        for row in rows:
            found.update(repr((names, *row)).encode())
    return found.hexdigest()


def _array(name: str, cells: Sequence[Any], party: str) -> pyarrow.Array:
    try:
        return pyarrow.array([str(cell) if isinstance(cell, UUID) else cell for cell in cells])
    except (pyarrow.ArrowException, OverflowError) as error:
        raise _mixed(party, f"column {name!r}", error) from error


def _mixed(party: str, what: str, error: Exception) -> DataError:
    return DataError(
        f"{party}: {what} of its query holds cells of several kinds, or of one that no table has "
        f"({error}); cast it in the query, as CAST(x AS TEXT)"
    )


def _chunks(
    database: Database, place: _Place, party: str
) -> Iterator[tuple[tuple[str, ...], Sequence[Sequence[Any]]]]:
    """Names of the columns and so many rows at a time; once without any where there are none."""
    with _connected(database, place, party) as connection:
        result = connection.exec_driver_sql(database.query)
        names, rows = tuple(result.keys()), result.fetchmany(_ROWS)
        yield names, rows
        while rows := result.fetchmany(_ROWS):
            yield names, rows


@contextmanager
def _connected(database: Database, place: _Place, party: str) -> "Iterator[Connection]":
    key = f"data.parties.{party}.database"
    secret = _password(database, place, key)
    try:
        import sqlalchemy
        from sqlalchemy.exc import ArgumentError, SQLAlchemyError
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{key}: needs {error.name}, which is not installed; pip install 'secure-apfed[sql]'"
        ) from error
    options: dict[str, Any] = {}
    try:
        url = sqlalchemy.make_url(database.url)
        if secret is not None:
            url = url.set(password=secret)
        kind = url.get_backend_name()
        if kind in _FILES and secret is not None:
            raise ConfigError(f"{key}.credentials: {kind} asks for no password; leave them out")
        if kind in _FILES and url.database not in (None, ":memory:"):
            path = place(Path(url.database)).absolute()
            if not path.is_file():
                raise DataError(f"{key}.url: there is no file {path}; check the path")
            if kind == "sqlite":
                url = url.set(database=path.as_uri(), query={"mode": "ro", "uri": "true"})
            else:
                url, options = url.set(database=str(path)), {"read_only": True}
        engine = sqlalchemy.create_engine(
            url, connect_args=options, poolclass=sqlalchemy.NullPool, hide_parameters=True
        )
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{key}.url: needs the driver {error.name}, which is not installed; install it, or "
            "name another in the URL, as postgresql+psycopg://"
        ) from None
    except (ArgumentError, ValueError) as error:  # of a port that is no number
        raise ConfigError(f"{key}.url: {_said(error, secret)}; correct it") from None
    try:
        with engine.connect() as connection:
            yield connection.execution_options(
                stream_results=True, max_row_buffer=_ROWS, no_parameters=True,
                postgresql_readonly=True,
            )  # fmt: skip
    except SQLAlchemyError as error:
        raise DataError(
            f"{key}: the database refused it: {_said(error, secret)}; correct url or query"
        ) from None
    finally:
        engine.dispose()


def _password(database: Database, place: _Place, key: str) -> str | None:
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
    path = place(Path(name))
    try:
        with path.open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            if mode & 0o077:
                raise ConfigError(
                    f"{key}.credentials: others may read {path} (mode {mode:o}); chmod 600 it"
                )
            return file.readline().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:  # which would show a byte of it
        why = getattr(error, "strerror", None) or "no text in UTF-8"
        raise ConfigError(
            f"{key}.credentials: {path} cannot be read ({why}); put the password into its first "
            "line"
        ) from None


def _said(error: Exception, secret: str | None) -> str:
    """What a driver said, in a line, without the password."""
    said = " ".join(str(getattr(error, "orig", None) or error).split())
    for written in (secret, quote(secret, safe="")) if secret else ():
        said = said.replace(written, "***")
    return said

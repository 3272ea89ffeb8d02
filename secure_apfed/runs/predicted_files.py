"""Files of predictions, written some rows at a time: CSV, Parquet or a JSON list of objects.

In CSV a text that a spreadsheet would take for a formula stands behind an apostrophe. A file takes
its name when it is complete; before it has another name beside it, and a failure leaves none.
"""

import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pandas as pd

from secure_apfed.errors import DataError
from secure_apfed.files import to_csv

__all__ = ["row_writer"]


class _Rows(ABC):
    """A file of rows, open."""

    def __init__(self, path: Path) -> None:
        self._path, self._begun = path, False

    def add(self, frame: pd.DataFrame) -> None:
        """Write these rows behind the others."""
        self._add(frame, first=not self._begun)
        self._begun = True

    @abstractmethod
    def _add(self, frame: pd.DataFrame, *, first: bool) -> None: ...

    def end(self) -> None:  # noqa: B027 (most need nothing)
        """Write what ends the file; nothing follows."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the file, ended or not."""


class _Text(_Rows):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._file = path.open("w", encoding="utf-8", newline="")

    def close(self) -> None:
        self._file.close()


class _Csv(_Text):
    def _add(self, frame: pd.DataFrame, *, first: bool) -> None:
        self._file.write(to_csv(frame, header=first))


class _Json(_Text):
    def _add(self, frame: pd.DataFrame, *, first: bool) -> None:
        # pandas' own JSON rounds; every digit counts, and what is not finite is null
        finite = frame.replace([math.inf, -math.inf], math.nan).astype(object)
        rows = finite.where(finite.notna(), None).to_dict("records")
        text = json.dumps(rows, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        self._file.write(("[" if first else ",") + text[1:-1])

    def end(self) -> None:
        self._file.write("]" if self._begun else "[]")


class _Parquet(_Rows):
    _writer: Any = None

    def _add(self, frame: pd.DataFrame, *, first: bool) -> None:
        import pyarrow as pa
        from pyarrow.parquet import ParquetWriter

        table = pa.Table.from_pandas(frame, preserve_index=False)
        if first:
            self._writer = ParquetWriter(self._path, table.schema)
        self._writer.write_table(table)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


_KINDS: dict[str, type[_Rows]] = {".csv": _Csv, ".parquet": _Parquet, ".json": _Json}


@contextmanager
def row_writer(path: Path) -> Iterator[Callable[[pd.DataFrame], None]]:
    """Take frames of the same columns one after the other.

    Raises:
        DataError: the file's name ends in nothing that can be written, or it cannot be.
    """
    if path.suffix not in _KINDS:
        raise DataError(f"{path}: expected a name that ends in {', '.join(_KINDS)}")
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with closing(_KINDS[path.suffix](partial)) as rows:
            yield rows.add
            rows.end()
        partial.chmod(0o600)  # what is said of people is their owner's
        partial.replace(path)
    except OSError as error:
        raise DataError(f"{path} cannot be written ({error}); check the folder") from error
    finally:
        with suppress(OSError):
            partial.unlink()

r"""The ID columns of a file, read alone and a piece at a time.

Run by: a party on its own file, which may be much larger than its memory: no other column is read,
and of the IDs no more than a piece is held. What comes out is what `data: tables` makes of the same
columns: one text a row, so that "007" and "7" differ; several columns joined by a character that no
text file holds by accident.

Example:
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder) / "bank.csv"
    ...     _ = path.write_text("id,amount\n007,3.5\n7,1.0\n")
    ...     ids = IdFile("bank", path, "id")
    ...     len(ids), [row for piece in ids.pieces() for row in piece]
    (2, ['007', '7'])
"""

import lzma
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from apfed_protocols.errors import DataError
from apfed_protocols.ids import EMPTY, JOINT, IdReader

if TYPE_CHECKING:
    import pyarrow

__all__ = ["EMPTY", "JOINT", "PARQUET", "IdFile", "cell_text"]

PARQUET = (".parquet", ".pq")

_ROWS_OF_A_PIECE = 2**16


def cell_text(cell: object) -> str:
    """A cell that is not empty, as text; whole numbers without a decimal point.

    A column of whole numbers becomes one of floats as soon as one cell is empty.
    """
    if isinstance(cell, float | np.floating) and float(cell).is_integer():
        return str(int(cell))
    return str(cell).strip()


def _line(row: int) -> str:
    return f"line {row + 2}"


class IdFile:
    """The IDs in a CSV or Parquet file; read anew each time that they are asked for.

    Args:
        party: whose file it is, for errors.
        path: .parquet or .pq, else CSV (also .gz, .bz2, .xz, .zst) with a header line.
        columns: the one that holds the IDs, or several.

    Raises:
        DataError: no such file or column, or not of the format that its name says.
    """

    def __init__(self, party: str, path: Path, columns: str | Sequence[str]) -> None:
        self._party, self._path = party, path
        self._columns = (columns,) if isinstance(columns, str) else tuple(columns)
        with self._readable():
            self._rows = self._count()

    def __len__(self) -> int:
        return self._rows

    def pieces(self) -> Iterator[list[str]]:
        """Yield the IDs of some thousand rows after another, those of several columns joined.

        Raises:
            DataError: cells that are no IDs (`apfed_protocols.ids`), of all rows, or a file
                that is damaged.
        """
        several = len(self._columns) > 1
        place = None if self._path.suffix.lower() in PARQUET else _line
        readers = {
            name: IdReader(
                f"{self._party}: column {name!r} of {self._path}", place=place, strip=True,
                part=several, key="id_column",
            )
            for name in self._columns
        }  # fmt: skip
        with self._readable():
            for batch in self._batches():
                parts = [reader.texts(batch.column(name)) for name, reader in readers.items()]
                if all(reader.all_taken for reader in readers.values()):
                    yield list(map(JOINT.join, zip(*parts, strict=True))) if several else parts[0]
        for reader in readers.values():
            reader.check()

    def _count(self) -> int:
        if self._path.suffix.lower() in PARQUET:
            from pyarrow.parquet import ParquetFile

            with ParquetFile(self._path) as file:
                self._require_columns(file.schema_arrow.names)
                return int(file.metadata.num_rows)
        return sum(batch.num_rows for batch in self._batches())

    def _batches(self) -> Iterator["pyarrow.RecordBatch"]:
        if self._path.suffix.lower() in PARQUET:
            from pyarrow.parquet import ParquetFile

            with ParquetFile(self._path) as file:
                yield from file.iter_batches(_ROWS_OF_A_PIECE, columns=list(self._columns))
            return
        import pyarrow
        from pyarrow import csv

        options = csv.ConvertOptions(
            include_columns=list(self._columns),
            column_types=dict.fromkeys(self._columns, pyarrow.string()),
            strings_can_be_null=True,
            null_values=sorted(EMPTY),
        )
        lines = csv.ParseOptions(newlines_in_values=True)
        with (
            self._opened() as file,
            csv.open_csv(file, parse_options=lines, convert_options=options) as reader,
        ):
            yield from reader

    @contextmanager
    def _opened(self) -> Iterator[object]:
        """What pyarrow reads: by its name, which says how it is packed, but for xz."""
        if self._path.suffix == ".xz":
            with lzma.open(self._path) as file:
                yield file
        else:
            yield self._path

    def _require_columns(self, found: Sequence[str]) -> None:
        absent = [name for name in self._columns if found.count(name) != 1]
        if absent:
            raise DataError(
                f"{self._party}: {self._path} must have each of the columns {', '.join(absent)} "
                f"once; it has {', '.join(found)}"
            )

    @contextmanager
    def _readable(self) -> Iterator[None]:
        from pyarrow import ArrowException

        try:
            yield
        except FileNotFoundError as error:
            raise DataError(
                f"{self._party}: there is no file {self._path}; check the path"
            ) from error
        except (OSError, ArrowException, KeyError) as error:
            raise DataError(
                f"{self._party}: the columns {', '.join(self._columns)} of {self._path} cannot be "
                f"read ({str(error).strip()})"
            ) from error

"""Tables larger than memory: their columns are read one at a time, their rows in blocks.

Run by: a party on its own file. `ColumnFiles` replaces the frame of a table: each column is
converted once, by the rules of `secure_apfed.data.frames`, and stored on disk. Statistics are
computed of one column at a time and features are encoded block by block, so that they equal those
of the whole table in memory. Features then lie in a memory-mapped file (`MappedRows`), and so do
the IDs (`MappedIds`).

All files are temporary and have no name, so that no copy of the rows outlives the process, even
where it is killed. They lie in the folder TMPDIR, else in /var/tmp: /tmp is memory on many systems.

Letters: N rows, F features.
"""

import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol, overload

import numpy as np
import pandas as pd
import pyarrow
from numpy.typing import NDArray
from pyarrow import ipc, parquet

from secure_apfed.base.names import column_name
from secure_apfed.base.working import report_work
from secure_apfed.data.encoding import CellCounts, ColumnEncoding
from secure_apfed.data.frames import (
    LINES_ATTRIBUTE,
    convert_cells,
    convert_to_pandas,
    is_csv_path,
    list_files,
    load_packed_columns,
    open_packed_files,
    read_text_blocks,
    translate_read_errors,
)
from secure_apfed.data.lazy_rows import MappedRows
from secure_apfed.errors import DataError
from secure_apfed.settings.data import DataSettings

if TYPE_CHECKING:
    from pyarrow.dataset import Dataset

LARGE_FILE = 2**30
"""Bytes of a party's files at which `data.memory_map: auto` begins to map its table."""

BLOCK_ROWS = 2**18
"""Rows that are encoded, and stored, together."""

_IDS_PER_BLOCK = 2**16
_FEATURE_TYPE = np.dtype("<f4")
_DEFAULT_FOLDER = "/var/tmp"  # noqa: S108  # its files have no names
_ENCODING_PROGRESS = "reading, features"  # what progress calls the encoding of rows


def is_mapped(settings: DataSettings, name: str) -> bool:
    """Return whether the table of the party `name` is read from disk column by column.

    Otherwise it is loaded as a whole. The setting `memory_map` decides; "auto" means that files of
    `LARGE_FILE` bytes or more are read from disk.
    """
    party_settings = (settings.parties or {})[name]
    if settings.memory_map != "auto" or party_settings.file is None:
        return settings.memory_map == "always"
    path = (settings.folder or Path()).expanduser() / party_settings.file.expanduser()
    files = list_files(path, source=name)
    return sum(file.stat().st_size for file in files if file.is_file()) >= LARGE_FILE


def choose_folder() -> Path:
    """Return the folder of temporary files: TMPDIR, else /var/tmp, else Python's own choice."""
    if "TMPDIR" not in os.environ and os.access(_DEFAULT_FOLDER, os.W_OK):
        return Path(_DEFAULT_FOLDER)
    return Path(tempfile.gettempdir())


def open_temporary(needed_bytes: int, *, party: str, content_text: str) -> IO[bytes]:
    """Open a temporary file without a name.

    Args:
        needed_bytes: bytes that it may take.
        party: name of the table's owner, in the error.
        content_text: what it will contain, in the error.

    Raises DataError: the disk has fewer free bytes than are needed.
    """
    folder = choose_folder()
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise DataError(
            f"{party}: {content_text} of its table need {needed_bytes / 1e9:,.1f} GB of disk, and "
            "the folder "
            f"{folder} has {free_bytes / 1e9:,.1f} GB free; make room there, or name another "
            "folder in the environment variable TMPDIR"
        )
    return tempfile.TemporaryFile(dir=folder)


class MappedIds(Sequence[str]):
    """IDs of a table as texts in a memory-mapped file, without one Python object for each.

    Args:
        iterate_blocks: the IDs in order, in blocks of any sizes.
        party: the party's name, for errors.
    """

    def __init__(self, id_blocks: Iterable[Sequence[str]], *, party: str) -> None:
        """Write all IDs to a temporary file, and map it into memory."""
        schema = pyarrow.schema([("id", pyarrow.large_string())])
        # How many bytes the IDs take is not known before, so free space is not checked.
        with open_temporary(needed_bytes=0, party=party, content_text="the IDs") as file:
            with ipc.new_file(file, schema) as writer:
                for piece in id_blocks:
                    texts = pyarrow.array(piece, pyarrow.large_string())
                    writer.write_batch(pyarrow.record_batch([texts], schema=schema))
            file.flush()
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._party = party
        table = ipc.open_file(pyarrow.BufferReader(pyarrow.py_buffer(content))).read_all()
        self._texts: pyarrow.ChunkedArray = table.column(0)

    def __len__(self) -> int:
        return len(self._texts)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...

    def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
        """Return one ID, or a tuple of several."""
        if isinstance(index, slice):
            rows = range(*index.indices(len(self)))
            if rows.step == 1:
                return tuple(self._texts[rows.start : rows.stop].to_pylist())
            return tuple(self._texts.take(pyarrow.array(rows, pyarrow.int64())).to_pylist())
        row = range(len(self))[index]  # negative indices count from the end
        return str(self._texts[row].as_py())

    def __iter__(self) -> Iterator[str]:
        for piece in self.iterate_blocks():
            yield from piece

    def __eq__(self, other: object) -> bool:
        if isinstance(other, MappedIds):
            return bool(self._texts.equals(other._texts))
        return isinstance(other, tuple) and len(other) == len(self) and tuple(self) == other

    __hash__ = object.__hash__

    def iterate_blocks(self) -> Iterator[list[str]]:
        """Yield the IDs in blocks of up to `_IDS_PER_BLOCK`."""
        for start in range(0, len(self), _IDS_PER_BLOCK):
            yield self._texts[start : start + _IDS_PER_BLOCK].to_pylist()

    def select_rows(self, rows: NDArray[np.int64]) -> "MappedIds":
        """Return the IDs at these positions, in this order, mapped from another temporary file."""
        pieces = (
            self._texts.take(pyarrow.array(rows[start : start + _IDS_PER_BLOCK])).to_pylist()
            for start in range(0, len(rows), _IDS_PER_BLOCK)
        )
        return MappedIds(pieces, party=self._party)


class ColumnSource(Protocol):
    """A table that can be read column by column.

    Attributes:
        names: names of the columns, in Unicode NFC.
        row_count: number of rows.
        attrs: attributes of a frame of the table. For CSV files they hold where each row stands,
            for errors.
    """

    names: tuple[str, ...]
    row_count: int
    attrs: Mapping[str, Any]

    def load_column(self, name: str) -> "pd.Series":
        """Read one column as `load_frame` reads it."""


class _ConvertedColumns:
    """A base of column sources that converts cells as `load_frame` does.

    Args:
        texts: columns that stay text.
        words: those of `texts` in which "NA" and the like are ordinary texts, not empty cells.
        source: the party's name, for errors.
        called: name of the table, for errors.
    """

    def __init__(
        self, texts: Sequence[str], words: Sequence[str], source: str, table_name: str
    ) -> None:
        """Store the rules of conversion; for the arguments see the class."""
        self._texts = texts
        self._words = words
        self._source = source
        self._table_name = table_name

    def _convert_column(self, frame: pd.DataFrame, name: str) -> "pd.Series":
        """Convert the only column of this frame, and return it under its name in Unicode NFC."""
        converted = convert_cells(
            frame,
            texts=self._texts,
            words=self._words,
            source=self._source,
            table_name=self._table_name,
        )
        return converted[name]


class _PackedColumns(_ConvertedColumns):
    """The columns of Parquet or Arrow files, or of a query's result."""

    def __init__(
        self,
        dataset: "Dataset",
        texts: Sequence[str],
        words: Sequence[str],
        source: str,
        table_name: str,
    ) -> None:
        """Count the rows, and read the names of the columns.

        `dataset`: the opened files. For the other arguments see `_ConvertedColumns`.
        """
        super().__init__(texts, words, source, table_name)
        self._dataset = dataset
        names_in_file = convert_to_pandas(dataset.schema.empty_table()).columns
        self._name_in_file_by_name = {column_name(name): str(name) for name in names_in_file}
        self.names = tuple(self._name_in_file_by_name)
        self.row_count = int(dataset.count_rows())
        self.attrs: Mapping[str, Any] = {}

    def load_column(self, name: str) -> "pd.Series":
        """Read one column of all files."""
        frame = load_packed_columns(
            self._dataset, self._texts, columns=[self._name_in_file_by_name[name]]
        )
        return self._convert_column(frame, name)


class _TextColumns(_ConvertedColumns):
    """The columns of CSV files, which are read once and stored by columns as texts.

    CSV files can only be read row by row, so reading one column of them would read all.
    """

    def __init__(
        self,
        files: Sequence[Path],
        texts: Sequence[str],
        words: Sequence[str],
        source: str,
        table_name: str,
    ) -> None:
        """Store all cells as texts in a temporary file, one block of rows at a time.

        `files`: the CSV files. For the other arguments see `_ConvertedColumns`.
        """
        super().__init__(texts, words, source, table_name)
        size = sum(file.stat().st_size for file in files)
        self._file = open_temporary(size, party=source, content_text="the cells")
        weakref.finalize(self, self._file.close)
        # A dictionary keeps distinct entries in order: where the rows of all blocks stand.
        lines = dict[Any, None]()
        self.row_count = 0
        names_in_file: list[str] = []
        writer: parquet.ParquetWriter | None = None
        for frame in read_text_blocks(files, source, BLOCK_ROWS):
            lines |= dict.fromkeys(frame.attrs[LINES_ATTRIBUTE])
            names_in_file = list(map(str, frame.columns))
            schema = pyarrow.schema([(name, pyarrow.large_string()) for name in names_in_file])
            if writer is None:
                writer = parquet.ParquetWriter(self._file, schema)
            frame = frame.set_axis(names_in_file, axis=1)
            writer.write_table(pyarrow.Table.from_pandas(frame, schema, preserve_index=False))
            self.row_count += len(frame)
            report_work("reading, lines", self.row_count, self.row_count)
        if writer is not None:
            writer.close()
        self._name_in_file_by_name = {column_name(name): name for name in names_in_file}
        self.names = tuple(self._name_in_file_by_name)
        self.attrs: Mapping[str, Any] = {LINES_ATTRIBUTE: tuple(lines)}

    def load_column(self, name: str) -> "pd.Series":
        """Read the texts of one column, and convert them."""
        table = parquet.ParquetFile(self._file).read(columns=[self._name_in_file_by_name[name]])
        frame: pd.DataFrame = table.replace_schema_metadata().to_pandas()
        frame.attrs.update(self.attrs)
        return self._convert_column(frame, name)


class _StoredColumns:
    """Converted columns in one temporary file, each in blocks of `BLOCK_ROWS` rows."""

    def __init__(self, party: str, needed_bytes: int) -> None:
        """Open the file; `needed_bytes`: bytes that the columns may take."""
        self._file = open_temporary(needed_bytes, party=party, content_text="the columns")
        weakref.finalize(self, self._file.close)
        # By column: offset and number of bytes in the file of each block.
        self._block_ranges_by_column: dict[str, list[tuple[int, int]]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._block_ranges_by_column

    def write_column(self, name: str, column: "pd.Series") -> None:
        """Store a column, if it can be read back unchanged.

        A column of Python objects, or one whose type Arrow would change, is silently not stored:
        ask `name in stored` afterwards.
        """
        if column.dtype == object:
            return
        frame = column.rename("cells").reset_index(drop=True).to_frame()
        table = pyarrow.Table.from_pandas(frame, preserve_index=False)
        type_when_read = table.schema.empty_table().to_pandas().dtypes.iloc[0]
        if type_when_read != column.dtype:
            return
        block_ranges = []
        for start in range(0, max(1, len(frame)), BLOCK_ROWS):
            block = table.slice(start, BLOCK_ROWS).combine_chunks()
            offset = self._file.seek(0, os.SEEK_END)
            with ipc.new_stream(self._file, table.schema) as writer:
                writer.write_table(block)
            block_ranges.append((offset, self._file.tell() - offset))
        self._block_ranges_by_column[name] = block_ranges

    def load_block(self, name: str, block: int) -> pyarrow.Table:
        """Read one block of a column; `block`: number of the block, from 0."""
        offset, size = self._block_ranges_by_column[name][block]
        content = os.pread(self._file.fileno(), size, offset)
        return ipc.open_stream(content).read_all()

    def load_column(self, name: str) -> "pd.Series":
        """Read all blocks of a column."""
        self._file.flush()
        blocks = [
            self.load_block(name, block) for block in range(len(self._block_ranges_by_column[name]))
        ]
        column: pd.Series = pyarrow.concat_tables(blocks).to_pandas()["cells"]
        return column.rename(name)


class ColumnFiles:
    """A party's table on disk, which reads like a frame of pandas, one column at a time.

    A column is a `pandas.Series` with the index and the source lines of the whole table, so that
    errors name the same places as for a table in memory. Rows can be left out, and columns
    replaced.
    """

    def __init__(self, source: ColumnSource, *, party: str) -> None:
        """Select all columns and rows of a source.

        Raises DataError: the disk has no room for the converted columns.
        """
        width = len(source.names)
        self._source = source
        self._party = party
        # Each column is converted when it is first read, and then read from here. A cell takes up
        # to 8 bytes.
        self._column_store = _StoredColumns(party, source.row_count * width * 8)
        self._names = source.names  # of the selected columns
        self._selected_rows: NDArray[np.int64] | None = (
            None  # the selected rows, ascending; None: all
        )
        # Replaced columns that cannot be stored, of the selected rows.
        self._replacement_by_column: dict[str, pd.Series] = {}
        self.attrs = dict(source.attrs)

    @classmethod
    def from_files(
        cls, path: Path, *, texts: Sequence[str], words: Sequence[str], source: str
    ) -> "ColumnFiles":
        """Open the table in files.

        Args:
            path: a file, a folder of files, or a pattern of file names.
            texts: columns that stay text.
            words: those of `texts` in which "NA" and the like are ordinary texts.
            source: the party's name.

        Raises DataError: the files are unreadable.
        """
        files = list_files(path, source=source)
        with translate_read_errors(path, files[0], source):
            if is_csv_path(files[0]):
                return cls(_TextColumns(files, texts, words, source, str(path)), party=source)
            rows = open_packed_files(files, path, source)
            return cls(_PackedColumns(rows, texts, words, source, str(path)), party=source)

    @classmethod
    def from_query(
        cls, rows: pyarrow.Table, *, texts: Sequence[str], words: Sequence[str], source: str
    ) -> "ColumnFiles":
        """Make a table of the rows of a query, which are in memory.

        `texts`: columns that stay text. `words`: those of `texts` in which "NA" and the like are
        ordinary texts. `source`: the party's name.
        """
        from pyarrow.dataset import dataset  # loaded only where it is needed

        columns = _PackedColumns(dataset(rows), texts, words, source, "its query")
        return cls(columns, party=source)

    def __len__(self) -> int:
        return self._source.row_count if self._selected_rows is None else len(self._selected_rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    @property
    def columns(self) -> "pd.Index[str]":
        """The names of the columns, as of a pandas frame."""
        return pd.Index(list(self._names))

    @property
    def index(self) -> "pd.Index[int]":
        """The number of each row in the source."""
        index = pd.RangeIndex(self._source.row_count)
        return index if self._selected_rows is None else pd.Index(self._selected_rows)

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of rows and columns, as of a pandas frame."""
        return len(self), len(self._names)

    @property
    def iloc(self) -> "_RowPicker":
        """An object that selects rows by positions, as of a pandas frame."""
        return _RowPicker(self)

    def items(self) -> Iterator[tuple[str, "pd.Series"]]:
        """Yield each column's name and cells."""
        for name in self._names:
            yield name, self[name]

    @overload
    def __getitem__(self, wanted: str) -> "pd.Series": ...

    @overload
    def __getitem__(self, wanted: "list[str] | NDArray[np.bool_]") -> "ColumnFiles": ...

    def __getitem__(
        self, wanted: "str | list[str] | NDArray[np.bool_]"
    ) -> "pd.Series | ColumnFiles":
        """Return a column by its name, a table of listed columns, or a table of a mask's rows."""
        if isinstance(wanted, str):
            return self._load_column(wanted)
        if isinstance(wanted, np.ndarray):
            return self.select_rows(np.flatnonzero(wanted))
        table = self._copy()
        table._names = tuple(wanted)
        return table

    def __setitem__(self, name: str, column: "pd.Series") -> None:
        """Replace a column of the whole table; not allowed once rows are left out."""
        assert self._selected_rows is None  # blocks of the store hold all rows of the source
        self._column_store.write_column(name, column)
        if name not in self._column_store:
            self._replacement_by_column[name] = column

    def __delitem__(self, name: str) -> None:
        self._names = tuple(other for other in self._names if other != name)

    def select_rows(self, rows: NDArray[np.int64]) -> "ColumnFiles":
        """Return the table of the rows at these positions, which must ascend."""
        table = self._copy()
        table._selected_rows = rows if self._selected_rows is None else self._selected_rows[rows]
        table._replacement_by_column = {
            name: column.iloc[rows] for name, column in self._replacement_by_column.items()
        }
        return table

    def encode_rows(
        self, encoding: ColumnEncoding, *, source: str, cell_counts: CellCounts
    ) -> MappedRows:
        """Encode all rows in blocks into a temporary file, and return them memory-mapped, (N, F).

        Args:
            encoding: how columns become features.
            source: the party's name, for errors.
            cell_counts: the numbers of rows, empty cells and ignored cells are added to it.

        Raises DataError: a cell does not fit the encoding (`ColumnEncoding.encode`); or the disk is
        too small.
        """
        width = encoding.shape[0]
        needed_bytes = len(self) * width * _FEATURE_TYPE.itemsize
        with open_temporary(needed_bytes, party=self._party, content_text="the features") as file:
            blocks = self._iterate_blocks([column.name for column in encoding.columns], source)
            for features_BF in encoding.encode_blocks(blocks, source=source, counts=cell_counts):
                file.write(np.asarray(features_BF.numpy(), _FEATURE_TYPE).tobytes())
                report_work(_ENCODING_PROGRESS, cell_counts.row_count, len(self))
            file.flush()
            mapped_NF = np.memmap(file, dtype=_FEATURE_TYPE, mode="r", shape=(len(self), width))
        return MappedRows(mapped_NF, party=self._party)

    def _load_column(self, name: str) -> "pd.Series":
        """Return a column of the selected rows, with their numbers in the source as index."""
        column = self._replacement_by_column.get(name)
        if column is None:
            column = self._load_whole_column(name)
            column.index = pd.RangeIndex(self._source.row_count)
            column = column if self._selected_rows is None else column.iloc[self._selected_rows]
        column.attrs.update(self.attrs)
        return column

    def _load_whole_column(self, name: str) -> "pd.Series":
        """Return a column of all rows of the source.

        It is read from the store, or else from the source, converted, and stored if it can be.

        Raises KeyError: the source has no such column.
        """
        if name in self._column_store:
            return self._column_store.load_column(name)
        if name not in self._source.names:
            raise KeyError(name)
        column = self._source.load_column(name)
        self._column_store.write_column(name, column)
        return column

    def _iterate_blocks(self, names: Sequence[str], source: str) -> Iterator[pd.DataFrame]:
        """Yield the selected rows of these columns, in blocks.

        A block has the selected ones among `BLOCK_ROWS` rows of the source. Columns that the table
        does not have are left out.
        """
        wanted = {column_name(name) for name in names}
        own_names = [name for name in self._names if name in wanted]
        column_in_memory_by_name = self._load_unstorable_columns(own_names)
        rows = self.index.to_numpy()
        for block, start in enumerate(range(0, self._source.row_count, BLOCK_ROWS)):
            first_selected, end_selected = np.searchsorted(rows, [start, start + BLOCK_ROWS])
            rows_in_block = rows[first_selected:end_selected] - start
            cells_by_column = dict[str, pd.Series]()
            for name in own_names:
                if name in column_in_memory_by_name:
                    column = column_in_memory_by_name[name].iloc[first_selected:end_selected]
                else:
                    block_cells = self._column_store.load_block(name, block).to_pandas()["cells"]
                    column = block_cells.iloc[rows_in_block]
                cells_by_column[name] = column.reset_index(drop=True)
            frame = pd.DataFrame(cells_by_column)
            frame.index = pd.Index(rows[first_selected:end_selected])
            frame.attrs.update(self.attrs)
            yield frame

    def _load_unstorable_columns(self, names: Sequence[str]) -> "dict[str, pd.Series]":
        """Return the columns, among these, that cannot be stored; of each the selected rows.

        All others of these columns are in the store afterwards.
        """
        in_memory = dict[str, pd.Series]()
        for name in names:
            if name in self._replacement_by_column:
                in_memory[name] = self._load_column(name)
            elif name not in self._column_store:
                column = self._load_column(name)  # stores the column, if it can be stored
                if name not in self._column_store:
                    in_memory[name] = column
        return in_memory

    def _copy(self) -> "ColumnFiles":
        """Return the same table as another object, over the same files."""
        other = object.__new__(ColumnFiles)
        vars(other).update(vars(self))
        other._replacement_by_column = dict(self._replacement_by_column)
        return other


def find_column_files(table: object) -> ColumnFiles | None:
    """Return the table itself if it is on disk; None: it is a frame in memory."""
    return table if isinstance(table, ColumnFiles) else None


class _RowPicker:
    """The selection of a table's rows by their positions, like `iloc` of a pandas frame."""

    def __init__(self, table: ColumnFiles) -> None:
        """Store the table whose rows are selected."""
        self._table = table

    def __getitem__(self, rows: NDArray[np.int64]) -> ColumnFiles:
        return self._table.select_rows(rows)

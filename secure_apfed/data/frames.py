"""Reading CSV and Parquet files into frames, and their columns, with errors for people.

Run by: a party on its own files. The format follows from the name: .parquet or .pq, else
CSV (also .gz, .bz2, .xz, .zst) with a header line.
"""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow
from pyarrow import ArrowException, default_memory_pool

from apfed_protocols.ids import EMPTY
from secure_apfed.data.cells import LINES, cell_text, holds_texts, typed
from secure_apfed.errors import DataError
from secure_apfed.files import PARQUET
from secure_apfed.names import column_name

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

__all__ = [
    "as_pandas", "is_csv", "is_table", "only_columns", "plain_cells", "read_blocks", "read_frame",
    "to_texts",
]  # fmt: skip

# As texts, of which a blank one alone is empty.
_TEXTS: Any = {"dtype": str, "keep_default_na": False, "na_values": [""], "index_col": False}
# Whole numbers would become floats, which lack digits, where one is empty.
_WHOLE: Mapping[Any, Any] = {pyarrow.int64(): pd.Int64Dtype(), pyarrow.uint64(): pd.UInt64Dtype()}
_PACKINGS = (".gz", ".bz2", ".xz", ".zst")


def as_pandas(frame: Any, *, party: str) -> pd.DataFrame:
    """The same rows as a pandas frame with columns named by text; the caller's is left alone."""
    import narwhals.stable.v2 as nw

    repeated = DataError(
        f"{party}: its frame has several columns of one name; give each a name of its own"
    )
    try:
        rows: pd.DataFrame = nw.from_native(frame, eager_only=True).to_pandas()
    except TypeError as error:
        lazy = "; collect a lazy frame first" if hasattr(frame, "collect") else ""
        raise DataError(
            f"{party}: expected a frame of pandas, polars or pyarrow, got "
            f"{type(frame).__name__}{lazy}"
        ) from error
    except ValueError as error:  # narwhals' DuplicateError is one
        raise repeated from error
    named: pd.DataFrame = rows.set_axis(list(map(column_name, rows.columns)), axis=1)
    if not named.columns.is_unique:  # 1 and "1", or one name in two forms of Unicode
        raise repeated
    if isinstance(frame, pd.DataFrame) and frame.index.name is not None:
        named = named.reset_index() if str(frame.index.name) not in named.columns else named
    return named


def is_table(path: Path) -> bool:
    name = path.with_suffix("") if path.suffix in _PACKINGS else path
    return name.suffix.lower() in (".csv", *PARQUET)


def is_csv(frame: pd.DataFrame) -> bool:
    return bool(frame.attrs.get(LINES))


def read_frame(
    path: Path, *, texts: Sequence[str] = (), words: Sequence[str] = (), source: str
) -> pd.DataFrame:
    """Return a file's rows; column names are texts in Unicode's form NFC.

    Args:
        path: the file.
        texts: columns of a CSV file to read as text, so that "007" stays what it is; the others
            hold numbers or truths where all their cells do.
        words: of `texts`, columns whose cells are kept where they say "NA", "None" or the like; in
            the others of them, the IDs, such a cell counts as empty.
        source: who or what it belongs to, for errors.

    Raises:
        DataError: no such file, or not of the format that its name says; a column with the
            name of another, or with lists or records in its cells; a file of one column that
            would be several; rows with more cells than the first line has names.
    """
    _refuse_workbook(path, source)
    with _readable(path, source):
        if path.suffix.lower() in PARQUET:
            # else the packed file, and what it was unpacked to, would stay beside the frame
            frame = pd.read_parquet(path, pre_buffer=False)
            default_memory_pool().release_unused()
            frame = frame.reset_index(drop=frame.index.names == [None])
            _restore_digits(frame, path, texts)
            names = frame.columns.to_series()
        else:
            names = _header(path)
            frame = pd.read_csv(path, **_TEXTS)
            frame.attrs[LINES] = True
    _refuse_names(names, path, source)
    frame.columns = pd.Index(list(map(column_name, frame.columns)))
    _refuse_nested(frame, path, source)
    if not is_csv(frame):
        ids = [name for name in texts if name not in words]
        return plain_cells(frame, but=texts, ids=ids, source=source)
    for name in frame.columns:  # in place: of a long table there is no second copy
        if name not in texts:
            frame[name] = typed(frame[name])
        elif name not in words:
            frame[name] = frame[name].mask(frame[name].isin(EMPTY))
    return frame


def read_blocks(path: Path, *, source: str, rows: int) -> Iterator[pd.DataFrame]:
    """Yield a file's rows so many at a time, their index counting on.

    Cells of a CSV file are texts: how a column was learnt says what they mean, and not what stands
    beside them. Column names are texts in Unicode's form NFC.
    """
    _refuse_workbook(path, source)
    packed = path.suffix.lower() in PARQUET
    with ExitStack() as files:
        with _readable(path, source):
            if packed:
                from pyarrow.parquet import ParquetFile  # slow to import

                file = files.enter_context(ParquetFile(path, pre_buffer=False))
                names, blocks = pd.Series(file.schema_arrow.names), _batches(file, rows)
            else:
                names = _header(path)
                blocks = files.enter_context(pd.read_csv(path, chunksize=rows, **_TEXTS))
        _refuse_names(names, path, source)
        while True:
            with _readable(path, source):
                frame = next(blocks, None)
            if frame is None:
                return
            frame.attrs[LINES] = not packed
            frame.columns = pd.Index(list(map(column_name, frame.columns)))
            _refuse_nested(frame, path, source)
            yield frame


def _restore_digits(frame: pd.DataFrame, path: Path, texts: Sequence[str]) -> None:
    """Read whole numbers anew that became floats, as all do where one is empty."""
    from pyarrow import parquet, types

    schema = parquet.read_schema(path)
    for name in texts:
        floats = name in frame and frame[name].dtype.kind == "f" and name in schema.names
        if floats and types.is_integer(schema.field(name).type):
            column = parquet.read_table(path, columns=[name]).column(0)
            frame[name] = column.to_pandas(integer_object_nulls=True).to_numpy()


def _batches(file: "ParquetFile", rows: int) -> Iterator[pd.DataFrame]:
    first = 0
    for batch in file.iter_batches(batch_size=rows):
        frame = batch.to_pandas(types_mapper=_WHOLE.get)
        frame = frame.reset_index(drop=frame.index.names == [None])
        frame.index = pd.RangeIndex(first, first + len(frame))
        first += len(frame)
        yield frame


def _header(path: Path) -> "pd.Series":
    """Pandas gives repeated names another one, so the header is read as it stands."""
    first: pd.DataFrame = pd.read_csv(path, header=None, nrows=1, **_TEXTS)
    return first.iloc[0]


@contextmanager
def _readable(path: Path, source: str) -> Iterator[None]:
    """Errors of reading, for people."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)
            yield
    except pd.errors.ParserWarning as error:  # it would leave the last cells of rows out
        raise DataError(
            f"{source}: the rows of {path} have more cells than its first line has names; name "
            "every column there, that of row names, too"
        ) from error
    except FileNotFoundError as error:
        raise DataError(f"{source}: there is no file {path}; check the path") from error
    except (OSError, EOFError) as error:
        raise DataError(f"{source}: {path} cannot be read ({error})") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{source}: {path} is not in UTF-8 ({error.reason} 0x{error.object[error.start]:02x}); "
            "save it in that encoding"
        ) from error
    except (ValueError, ArrowException) as error:
        # pandas' parser errors and UnicodeDecodeError are ValueErrors.
        kind = "Parquet" if path.suffix.lower() in PARQUET else "CSV"
        raise DataError(
            f"{source}: {path} is not a readable {kind} file ({str(error).strip()}); save it again"
        ) from error


def _refuse_names(names: "pd.Series", path: Path, source: str) -> None:
    """Two columns of one name, and one column whose name holds what elsewhere parts columns."""
    for sign, called in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars")):
        if len(names) == 1 and sign in str(names.iloc[0]):
            raise DataError(
                f"{source}: the first line of {path} has no comma, but {called}; save it with "
                "commas between the columns"
            )
    names = names.dropna().map(column_name)
    repeated = names[names.duplicated()].unique()
    if len(repeated):
        raise DataError(
            f"{source}: {path} has several columns named {', '.join(map(str, repeated))}; "
            "give each a name of its own"
        )


def _refuse_workbook(path: Path, source: str) -> None:
    if path.suffix.lower() in (".xls", ".xlsx", ".ods"):
        raise DataError(
            f"{source}: {path} is a workbook, and tables are CSV or Parquet; export its sheet as "
            "CSV in UTF-8"
        )


def plain_cells(
    frame: pd.DataFrame, *, but: Sequence[str] = (), ids: Sequence[str] = (),
    source: str = "the input",
) -> pd.DataFrame:  # fmt: skip
    """The same with decimals, and objects that are all numbers, as floats, else categories;
    half precision as single.

    Args:
        frame: as read.
        but: columns that stay as they are: a number as an ID has every digit.
        ids: of these the IDs, in half precision too, so that it is known how few digits they have.
        source: who or what it belongs to, for errors.
    """
    plain = {}
    for name in frame.columns:
        column = frame[name]
        kind = "" if name in but else _kind_of(column)
        if column.dtype == np.float16 and name not in ids:  # of which pandas can make no groups
            plain[name] = column.astype(np.float32)
        elif kind in ("integer", "floating", "mixed-integer-float"):
            plain[name] = pd.to_numeric(column)
        elif kind == "decimal":
            try:
                numbers = [math.nan if empty else float(cell) for cell, empty in _cells(column)]
            except ValueError as error:  # a signalling NaN
                raise DataError(
                    f"{source}: column {name!r} holds a decimal that is no number; mend it"
                ) from error
            plain[name] = pd.Series(numbers, index=column.index)
    return frame.assign(**plain) if plain else frame


def _kind_of(column: "pd.Series") -> str:
    """What pandas infers of cells that may be decimals or other numbers; else empty."""
    if str(column.dtype).startswith("decimal"):
        return "decimal"
    if column.dtype != object:
        return ""
    return pd.api.types.infer_dtype(column, skipna=True)


def _cells(column: "pd.Series") -> Iterator[tuple[Any, bool]]:
    """Each cell, and whether it is empty; iterating a column itself takes longer."""
    return zip(column.tolist(), column.isna().tolist(), strict=True)


def _refuse_nested(frame: pd.DataFrame, path: Path, source: str) -> None:
    for name in frame.columns:
        column = frame[name]
        if column.dtype == object:
            cells = column.tolist()
            nested = any(isinstance(cell, list | dict | tuple | np.ndarray) for cell in cells)
            torn = any(isinstance(cell, str) and "\0" in cell for cell in cells)
        elif holds_texts(column):
            nested, torn = False, bool(column.str.contains("\0", regex=False).any())
        else:
            continue
        if nested:
            raise DataError(
                f"{source}: column {name!r} of {path} holds lists or records, and a feature is "
                "one number or text; write its parts into columns of their own"
            )
        if torn:
            raise DataError(
                f"{source}: column {name!r} of {path} holds NUL bytes, so it is no text; save "
                "the file again"
            )


def only_columns(frame: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """Return these columns in this order; the frame itself where it has no others."""
    return frame if list(frame.columns) == list(names) else frame[list(names)]


def to_texts(column: "pd.Series") -> list[str | None]:
    """Return a column as texts, None where a cell is empty; see `cell_text`."""
    text_of = str.strip if holds_texts(column) else cell_text
    return [None if empty else text_of(cell) for cell, empty in _cells(column)]

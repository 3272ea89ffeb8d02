"""Reading tables from files and frames, with the same interpretation of cells for all formats.

Run by: a party on its own files. The format follows from the name: .parquet or .pq, .arrow,
.feather or .ipc, else CSV (also .gz, .bz2, .xz, .zst) with a header line. A folder, or a pattern of
names, is the rows of its files, one after another by their names.

A column is read as numbers, days, durations or texts, as its fitted encoding says. A typed cell and
its text in a CSV file are read alike, independently of other cells; a cell of another kind is
refused. A cell is empty if it is null or blank, or a word for empty (`EMPTY_CELL_TEXTS`: "NA",
"None" and the like) that is no category of its column. Letters: N rows.
"""

import bz2
import datetime
import decimal
import gzip
import lzma
import math
import numbers
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from csv import Error as CsvError
from csv import reader as split_csv
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow
from numpy.typing import NDArray
from pyarrow import ArrowException, compute, csv, default_memory_pool

from apfed_protocols.date_formats import parse_date
from apfed_protocols.ids import EMPTY_CELL_TEXTS
from secure_apfed.base.faults import Advice, Fault, FaultList, Remedy, describe_remedies
from secure_apfed.base.files import ARROW, PARQUET, describe_missing
from secure_apfed.base.names import column_name
from secure_apfed.errors import DataError
from secure_apfed.settings.data import MAX_CATEGORIES

if TYPE_CHECKING:
    from pyarrow.dataset import Dataset

TRUTH_BY_WORD: Mapping[str, bool] = {
    text: truth
    for truth in (False, True)
    for text in (str(truth), str(truth).lower(), str(truth).upper())
}
"""Texts that are true or false, as programs write them."""

BLANK = frozenset({""})
"""Texts that mark an empty cell in every column, also where words such as NA are categories."""

LINES_ATTRIBUTE = "lines of the file"
"""Key in `attrs` of a frame that was read from CSV files: for each file a tuple of its first row's
number, its name ("" if there is one file), and how many lines stand above its header.
"""

_ISO = re.compile(r"\d{4}-\d{2}-\d{2}([T ][\d:.]+(Z|[+-]\d{2}:?\d{2})?)?", re.ASCII)
# As pandas writes durations.
_DURATION = re.compile(r"-?\d+ days?( [+-]?\d{1,2}:\d{2}:\d{2}(\.\d+)?)?", re.ASCII)
# A leading zero before another digit, as of codes.
_PADDED = r"[+-]?0[0-9]"
# Rows that are examined first, since most columns are decided by them.
_SAMPLE_ROWS = 1000
_PLAIN_NUMBER = r"^-?(0|[1-9][0-9]{0,17})(\.[0-9]+)?([eE][+-]?[0-9]{1,3})?$"
# What programs write in several ways: numbers with a fraction or an exponent, times and moments.
_NUMBER = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?(e[+-][0-9]{1,3})?"
_TIME = r"[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]+"
_MOMENT = r"[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9:.]+(Z|[+-][0-9]{2}:?[0-9]{2})?"
RESPELLABLE_PATTERN = (
    rf"-?(0|[1-9][0-9]*)((\.[0-9]+)?e[+-][0-9]{{1,3}}|\.[0-9]*0)|-0(\.0+)?|{_TIME}|{_MOMENT}"
)
"""Pattern of the texts that `normalise_spelling` may change."""

_DAY = datetime.timedelta(days=1)
# Share of cells above which a column counts as numbers, dates and the like with faults.
_MAJORITY = 0.5
# Forms of numbers and dates that are not read as such, and the form to write instead.
_LOOK_ALIKES: Mapping[str, tuple[re.Pattern[str], str]] = {
    "numbers with commas, or thousands apart": (
        re.compile(r"-?\d{1,3}([,.' ]\d{3})*,\d+|-?\d{1,3}([,' ]\d{3})+(\.\d+)?|-?\d+,\d+"),
        "1234567.5",
    ),
    "shares in per cent": (re.compile(r"-?\d+([.,]\d+)?\s*%"), "12.5, without the sign"),
    "amounts with a currency": (
        re.compile(r"(EUR|USD|GBP|[$€£])\s*-?[\d.,]+|-?[\d.,]+\s*(EUR|USD|GBP|[$€£])"),
        "12.5, without the sign",
    ),
    "dates in another order": (
        re.compile(r"\d{1,2}[./-]\d{1,2}[./-]\d{2,4}|\d{4}[/.]\d{1,2}[/.]\d{1,2}"),
        "2026-01-31",
    ),
}
# By pandas type or numpy kind: the name of unsupported contents of a column, and a remedy.
_STRANGE_TYPES: Mapping[type | str, tuple[str, str]] = {
    pd.IntervalDtype: (
        "intervals",
        "make texts of them, as with .astype(str), or numbers, as with .map(lambda cell: cell.mid)",
    ),
    pd.PeriodDtype: ("periods", "make dates of them, as with .dt.to_timestamp()"),
    "c": ("complex numbers", "give their real and imaginary parts columns of their own"),
}
_DATE_FORMATS = (
    *(f"%d{sign}%m{sign}%Y" for sign in "./-"),
    *(f"%m{sign}%d{sign}%Y" for sign in "./-"),
    *(f"%Y{sign}%m{sign}%d" for sign in "./"),
)
FEW_CATEGORIES = 64
"""Number of most frequent categories that errors propose to keep where a column has too many."""

# Arguments of pandas' reader that leave all cells texts, and make only blank ones empty.
_AS_TEXTS: Any = {"dtype": str, "keep_default_na": False, "na_values": [""], "index_col": False}
# Types of pandas for columns of whole numbers with an empty cell: as floats they would lose digits.
_INTEGER_TYPES: Mapping[Any, Any] = {
    pyarrow.int64(): pd.Int64Dtype(),
    pyarrow.uint64(): pd.UInt64Dtype(),
}
_PACKINGS = (".gz", ".bz2", ".xz", ".zst")
_SEPARATOR_LINE = re.compile(r"sep=(?P<sign>.*)", re.IGNORECASE)
_MAX_HEAD_LINES = 200
_MAX_LINES_BELOW_TITLE = 5  # that are compared with a possible title above the header
_MAX_LINE_CHARACTERS = 2**20  # that are read of a line above the header


@dataclass(frozen=True)
class CsvHead:
    """The part of a CSV file above the column names.

    Attributes:
        lines_above: number of lines above the header: comments, and one that names the separator.
        separator: the character between two cells.
    """

    lines_above: int = 0
    separator: str = ","


def collect_frame(frame: Any, *, party: str) -> Any:
    """Return the frame itself, or the computed rows of a lazy frame (polars and others).

    `party`: the owner's name, for errors.

    Raises DataError: it is no frame, or sparse, or its computation fails.
    """
    import narwhals.stable.v2 as nw

    require_dense(frame, party=party)
    try:
        rows = nw.from_native(frame)
        return rows.collect().to_native() if isinstance(rows, nw.LazyFrame) else frame
    except nw.exceptions.DuplicateError:
        return frame  # `as_pandas` reports columns of one name
    except TypeError as error:
        raise DataError(
            f"{party}: expected a frame of pandas, polars or pyarrow, got {type(frame).__name__}"
        ) from error
    except (OSError, nw.exceptions.NarwhalsError) as error:
        raise DataError(f"{party}: its lazy frame cannot be computed ({error})") from error


class SparseRowsError(DataError, TypeError):
    """An error for sparse rows, which leave out zeros; tables of people must be dense.

    It is a TypeError, too, as scikit-learn's estimators raise for sparse input.
    """


def require_dense(frame: Any, *, party: str) -> None:
    """Refuse sparse matrices, and frames with sparse columns.

    Raises SparseRowsError: names the party, the columns, and how to make them dense.
    """
    if isinstance(frame, pd.DataFrame):
        sparse_positions = [
            position
            for position, dtype in enumerate(frame.dtypes)
            if isinstance(dtype, pd.SparseDtype)
        ]
        if not sparse_positions:
            return
        first = sparse_positions[0]
        name = frame.columns[first]
        dtype = frame.dtypes.iloc[first]
        rest = f" and {len(sparse_positions) - 1} more" if len(sparse_positions) > 1 else ""
        raise SparseRowsError(
            f"{party}: column {name!r}{rest}: expected dense cells, got {dtype}; make them "
            "dense: frame = frame.astype({name: kind.subtype for name, kind in "
            "frame.dtypes.items() if isinstance(kind, pd.SparseDtype)})"
        )
    if hasattr(frame, "toarray") and hasattr(frame, "nnz"):
        raise SparseRowsError(
            f"{party}: all columns: expected a dense frame, got a sparse {type(frame).__name__}; "
            "make it dense, with names of its people and columns: "
            "frame = pd.DataFrame(frame.toarray(), index=people, columns=names)"
        )


def as_pandas(frame: Any, *, party: str) -> pd.DataFrame:
    """Return a copy of the frame in pandas.

    Column names become texts. An index with a name becomes a column, unless one has its name.

    `frame`: frame of pandas, polars or pyarrow, lazy or not. `party`: the owner's name, for errors.

    Raises DataError: columns are sparse or of an unsupported type, or several have one name.
    """
    import narwhals.stable.v2 as nw

    repeated = DataError(
        f"{party}: its frame has several columns of one name; give each a name of its own"
    )
    require_dense(frame, party=party)
    try:
        rows: pd.DataFrame = nw.from_native(collect_frame(frame, party=party)).to_pandas()
    except ValueError as error:  # narwhals' DuplicateError is one
        raise repeated from error
    named: pd.DataFrame = rows.set_axis(list(map(column_name, rows.columns)), axis=1)
    if not named.columns.is_unique:  # 1 and "1", or one name in two forms of Unicode
        raise repeated
    has_named_index = isinstance(frame, pd.DataFrame) and frame.index.name is not None
    if has_named_index and str(frame.index.name) not in named.columns:
        named = named.reset_index()
    _require_plain_columns(named, party=party)
    return named


def _require_plain_columns(frame: pd.DataFrame, *, party: str) -> None:
    """Raise DataError for columns of intervals, periods or complex numbers."""
    faults = FaultList()
    for name, dtype in frame.dtypes.items():
        cell_type = dtype.categories.dtype if isinstance(dtype, pd.CategoricalDtype) else dtype
        for kind, (contents, remedy) in _STRANGE_TYPES.items():
            by_class = isinstance(kind, type) and isinstance(cell_type, kind)
            by_letter = isinstance(kind, str) and cell_type.kind == kind
            if by_class or by_letter:
                faults.add_error(DataError(f"{party}: column {name!r} holds {contents}; {remedy}"))
    faults.raise_faults()


def is_table(path: Path) -> bool:
    """Return whether a path is a folder or, by its name, a CSV, Parquet or Arrow file."""
    name = path.with_suffix("") if path.suffix in _PACKINGS else path
    return path.is_dir() or name.suffix.lower() in (".csv", *PARQUET, *ARROW)


def list_files(path: Path, *, source: str) -> list[Path]:
    """Return the file itself, or all files of a folder (at any depth) or a pattern, sorted by name.

    Hidden files, and files that begin with an underscore, are left out of a folder. A single file
    that does not exist is returned, too: reading it gives a better error.

    `source`: name of the table's owner, for errors.

    Raises DataError: `path` is a workbook, has no table files, or has files of several formats.
    """
    if path.suffix.lower() in (".xls", ".xlsx", ".ods"):
        raise DataError(
            f"{source}: {path} is a workbook, and tables are CSV or Parquet; export its sheet as "
            "CSV in UTF-8"
        )
    if path.is_dir():
        matches = [
            file
            for file in path.rglob("*")
            if not any(name.startswith((".", "_")) for name in file.relative_to(path).parts)
        ]
    elif path.exists() or not set(path.name) & set("*?["):
        return [path]
    else:
        matches = list(path.parent.glob(path.name))
    files = sorted(file for file in matches if file.is_file())
    # The distinct formats in order; a file that is no table stands for itself.
    kinds = dict.fromkeys(infer_file_kind(file) if is_table(file) else file.name for file in files)
    if len(kinds) != 1 or not is_table(files[0]):
        holdings = " and ".join(list(kinds)[:3]) if kinds else "no file"
        raise DataError(
            f"{source}: {path} must hold CSV, Parquet or Arrow files, of one kind, and holds "
            f"{holdings}; name another folder, or a pattern such as sales-*.csv"
        )
    return files


def infer_file_kind(path: Path) -> str:
    """Return "Parquet", "Arrow" or "CSV", by the file's name."""
    kinds = {**dict.fromkeys(PARQUET, "Parquet"), **dict.fromkeys(ARROW, "Arrow")}
    return kinds.get(path.suffix.lower(), "CSV")


def is_csv_path(path: Path) -> bool:
    """Return whether a file is read as CSV, by its name."""
    return infer_file_kind(path) == "CSV"


def is_csv(frame: pd.DataFrame) -> bool:
    """Return whether a frame was read from CSV files, so that all its cells are texts."""
    return bool(frame.attrs.get(LINES_ATTRIBUTE))


def load_frame(
    source_table: Path | pyarrow.Table,
    *,
    texts: Sequence[str] = (),
    words: Sequence[str] = (),
    source: str,
    table_name: str = "",
) -> pd.DataFrame:
    """Return the rows of one or several files, or of a query; column names are in Unicode NFC.

    Args:
        source_table: a path (a file, a folder or a pattern of names), or a query's result.
        texts: columns that stay text, so that "007" keeps its zeros. Other columns become numbers
            or truth values if all their cells are such.
        words: columns among `texts` in which "NA", "None" and the like are ordinary texts. In the
            other columns of `texts`, which are IDs, such words count as empty.
        source: the party's name, for errors.
        table_name: the table's name, for errors; a path replaces it.
    """
    if isinstance(source_table, Path):
        table_name = str(source_table)
        files = list_files(source_table, source=source)
        with translate_read_errors(source_table, files[0], source):
            if infer_file_kind(files[0]) == "CSV":
                frame = _join_blocks(list(read_text_blocks(files, source)))
            else:
                frame = load_packed_columns(open_packed_files(files, source_table, source), texts)
    else:
        from pyarrow.dataset import dataset

        frame = load_packed_columns(dataset(source_table), texts)
    return convert_cells(frame, texts=texts, words=words, source=source, table_name=table_name)


def convert_cells(
    frame: pd.DataFrame, *, texts: Sequence[str], words: Sequence[str], source: str, table_name: str
) -> pd.DataFrame:
    """Return a table with column names in Unicode NFC and converted cells.

    Cells of CSV files are texts, which become numbers or truth values. In other tables decimals and
    number objects become floats.

    Args:
        frame: the table as read; it is changed in place if it comes from CSV files.
        texts: columns that stay text.
        words: columns among `texts` in which "NA" and the like are ordinary texts. In the other
            columns of `texts`, which are IDs, such words count as empty.
        source: the party's name, for errors.
        table_name: the table's name, for errors.

    Raises DataError: nested cells or NUL bytes.
    """
    frame.columns = pd.Index(list(map(column_name, frame.columns)))
    _refuse_nested_cells(frame, table_name, source)
    if not is_csv(frame):
        ids = [name for name in texts if name not in words]
        return convert_number_cells(frame, unconverted_columns=texts, ids=ids, source=source)
    for name in frame.columns:  # in place, since a second copy of a long table would need memory
        if name not in texts:
            frame[name] = convert_text_column(frame[name])
        elif name not in words:
            frame[name] = frame[name].mask(frame[name].isin(EMPTY_CELL_TEXTS))
    return frame


def _join_blocks(blocks: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return the rows of CSV files as one frame, whose `LINES_ATTRIBUTE` covers all blocks."""
    joined = blocks[0] if len(blocks) == 1 else pd.concat(blocks, ignore_index=True)
    joined.attrs[LINES_ATTRIBUTE] = tuple(
        line for block in blocks for line in block.attrs[LINES_ATTRIBUTE]
    )
    return joined


def load_packed_columns(
    rows: "Dataset", texts: Sequence[str], *, columns: Sequence[str] | None = None
) -> pd.DataFrame:
    """Return Parquet or Arrow rows as a frame.

    Args:
        rows: the opened files.
        texts: columns whose whole numbers keep all digits even if a cell is empty. In other columns
            pandas then makes floats of them.
        columns: names of the columns to read; None: all.
    """
    frame = convert_to_pandas(rows.to_table(columns=columns))
    # Otherwise the compressed and the decompressed file would stay in memory beside the frame.
    default_memory_pool().release_unused()
    for name in texts:
        became_float = name in frame and frame[name].dtype.kind == "f"
        if became_float and pyarrow.types.is_integer(rows.schema.field(name).type):
            column = rows.to_table(columns=[name]).column(0)
            frame[name] = column.to_pandas(integer_object_nulls=True).to_numpy()
    return frame


def convert_to_pandas(rows: pyarrow.Table, **options: Any) -> pd.DataFrame:
    """Return the rows as a frame; a stored index becomes a column if it has a name."""
    frame: pd.DataFrame = rows.to_pandas(**options)
    return frame.reset_index(drop=frame.index.names == [None])


def open_packed_files(files: Sequence[Path], path: Path, source: str) -> "Dataset":
    """Open Parquet or Arrow files as one data set.

    A column of numbers whose type differs between files gets the wider type.

    Args:
        files: the files at `path`.
        path: one file, a folder, or a pattern of names. In a folder, files below a sub-folder named
            country=de get a column country (Hive partitioning).
        source: the party's name, for errors.
    """
    from pyarrow import dataset  # slow to import

    file_format = "ipc"
    if infer_file_kind(files[0]) == "Parquet":
        scan = dataset.ParquetFragmentScanOptions(pre_buffer=False)  # saves memory
        file_format = dataset.ParquetFileFormat(default_fragment_scan_options=scan)
    options: dict[str, Any] = {"format": file_format}
    if path.is_dir():
        options |= {"partitioning": "hive", "partition_base_dir": str(path)}
    names = list(map(str, files))
    rows = dataset.dataset(names, **options)
    schemas = [file.physical_schema for file in rows.get_fragments()]
    _check_names(files, [schema.names for schema in schemas], source)
    joint_schema = pyarrow.unify_schemas([rows.schema, *schemas], promote_options="permissive")
    return dataset.dataset(names, schema=joint_schema, **options)


def read_text_blocks(
    files: Sequence[Path], source: str, rows: int | None = None
) -> Iterator[pd.DataFrame]:
    """Yield the rows of CSV files as frames of texts.

    Each frame has in its `attrs` where its rows stand in their file (`LINES_ATTRIBUTE`), for
    errors.

    `source`: the party's name, for errors. `rows`: the most rows of a frame; None: each frame is a
    whole file.

    Raises DataError: a file has no valid header, or the files differ in their columns.
    """
    head_by_file = [load_csv_head(path, source=source) for path in files]
    names_by_file = list(map(_load_names, files, head_by_file))
    _check_names(files, names_by_file, source, head_by_file)
    first_row = 0
    for path, head, names in zip(files, head_by_file, names_by_file, strict=True):
        source_lines = ((first_row, path.name if len(files) > 1 else "", head.lines_above),)
        # Whole files are read by a faster reader than pandas', if it can read them.
        whole_file = _read_plain_csv(path, names, head) if rows is None else None
        if whole_file is not None:
            whole_file.attrs[LINES_ATTRIBUTE] = source_lines
            first_row += len(whole_file)
            yield whole_file
            continue
        options = {**_AS_TEXTS, "sep": head.separator}
        with (
            _open_at_header(path, head) as file,
            pd.read_csv(file, iterator=True, chunksize=rows, **options) as blocks,
        ):
            for frame in blocks:
                frame.attrs[LINES_ATTRIBUTE] = source_lines
                first_row += len(frame)
                yield frame


def _load_names(path: Path, head: CsvHead) -> list[Any]:
    """Return a file's column names unchanged.

    They are read as a row of cells, because pandas would rename repeated names in a header.

    `head`: the part of the file above the names.
    """
    with _open_at_header(path, head) as file:
        row = pd.read_csv(file, header=None, nrows=1, sep=head.separator, **_AS_TEXTS).iloc[0]
    return list(row)


def load_csv_head(path: Path, *, source: str, are_titles_errors: bool = True) -> CsvHead:
    """Return how many lines stand above a CSV file's header, and the file's separator.

    These lines are blank, comments that begin with #, or a spreadsheet's line `sep=;`, which names
    the separator. A line such as #id,age is the header itself if it has as many cells as the next
    line that is not a comment. A comment has a blank after #, or another number of cells.

    `source`: the party's name, for errors. `are_titles_errors`: whether a title above the header is
    an error.

    Raises DataError: a separator is not one character, too many lines are comments, or there is
    a title.
    """
    lines = _read_first_lines(path)
    separator = ","
    lines_above = 0
    has_header = False
    for line_number, line in enumerate(lines, 1):
        unquoted_line = _strip_blanks_and_quotes(line)
        separator_match = _SEPARATOR_LINE.fullmatch(unquoted_line)
        is_comment = line.startswith("#") and not _is_hash_header(lines, line_number, separator)
        if separator_match is not None:
            line_text = f"{source}: line {line_number} of {path} is {line!r:.40}"
            separator = _parse_separator(separator_match["sign"], where=line_text)
        elif unquoted_line and not is_comment:
            has_header = True
            break
        if separator_match is not None or is_comment:  # pandas skips blank lines by itself
            lines_above = line_number
    if not has_header and len(lines) == _MAX_HEAD_LINES:
        raise DataError(
            f"{source}: the first {_MAX_HEAD_LINES} lines of {path} begin with # or are "
            "blank; remove them, so that the names of its columns come first"
        )
    if are_titles_errors:
        _refuse_titles(lines, lines_above, separator, path=path, source=source)
    return CsvHead(lines_above, separator)


def _strip_blanks_and_quotes(line: str) -> str:
    """Return a line without outer blanks, and without quotes around all of it.

    A spreadsheet may write the line `sep=;` in quotes.
    """
    text = line.strip(" ")
    return text[1:-1] if text[:1] == text[-1:] == '"' else text


def _read_first_lines(path: Path) -> list[str]:
    """Return the first `_MAX_HEAD_LINES` lines of a CSV file.

    Line ends and a byte order mark are removed, and very long lines are cut.
    """
    with _open_text(path, errors="replace") as file:
        read_line = partial(file.readline, _MAX_LINE_CHARACTERS)
        lines = [line.rstrip("\r\n") for line in islice(iter(read_line, ""), _MAX_HEAD_LINES)]
    if lines:
        lines[0] = lines[0].removeprefix("\ufeff")
    return lines


def _parse_separator(declared_text: str, *, where: str) -> str:
    r"""Return the separator that a file declares.

    `declared_text`: the declared text; the two characters \t stand for a tab. `where`: file and
    line, for the error.

    Raises DataError: it is not one ASCII character, or one that occurs in cells.
    """
    declared_text = "\t" if declared_text == "\\t" else declared_text
    # A character that occurs in numbers or words, or quotes texts, cannot separate cells.
    if (
        len(declared_text) != 1
        or declared_text.isalnum()
        or declared_text in "\"'\\ .+-_"
        or not declared_text.isascii()
    ):
        raise DataError(
            f"{where}, and one sign between cells is expected there, as in sep=; - correct this "
            "line, or remove it"
        )
    return declared_text


def _is_hash_header(lines: Sequence[str], line_number: int, separator: str) -> bool:
    """Return whether a line that begins with # is the header, and no comment.

    It is the header if a name follows the # without a blank, and the next line has as many cells.

    Args:
        lines: the first lines of the file.
        line_number: number of the line, from 1.
        separator: the character between two cells.
    """
    if lines[line_number - 1][1:2] in ("#", " ", "\t"):
        return False
    next_line = next((line for line in lines[line_number:] if line.strip()), None)
    if next_line is None or next_line.startswith("#") or _SEPARATOR_LINE.fullmatch(next_line):
        return False
    next_cell_count = len(_split_line(next_line, separator))
    return (
        next_cell_count > 1
        and len(_split_line(lines[line_number - 1], separator)) == next_cell_count
    )


def _refuse_titles(
    lines: Sequence[str], lines_above: int, separator: str, *, path: Path, source: str
) -> None:
    """Raise DataError for a title above the header: a line of one cell above lines of several.

    Args:
        lines: the first lines of the file.
        lines_above: the number of first lines that are comments or declare the separator.
        separator: the character between two cells.
        path: the file, for the error.
        source: the party's name, for the error.
    """
    filled_lines = (index for index in range(lines_above, len(lines)) if lines[index].strip())
    title_index = next(filled_lines, None)
    if title_index is None:
        return
    title = lines[title_index]
    other_separators = {sign for sign in ";\t|" if separator == ","}
    if '"' in title or not other_separators.isdisjoint(title):
        return  # the line may be a header with quoted names, or with another separator
    filled_cells = [cell for cell in _split_line(title, separator) if cell.strip()]
    if len(filled_cells) > 1:
        return
    first_below = title_index + 1
    lines_below = lines[first_below : first_below + _MAX_LINES_BELOW_TITLE]
    for line_number, line in enumerate(lines_below, first_below + 1):
        cell_count = len(_split_line(line, separator))
        if cell_count == 1:
            # The table may have another separator; a text may contain one such character by chance.
            cell_count = max((len(_split_line(line, sign)) for sign in other_separators), default=1)
            cell_count = cell_count if cell_count > 2 else 1
        if cell_count > 1:
            raise DataError(
                f"{source}: line {title_index + 1} of {path} has one cell, and line {line_number} "
                "has "
                f"{cell_count}; remove what stands above the names of the columns, or begin these "
                "lines with #"
            )


def _split_line(line: str, separator: str) -> list[str]:
    """Return the cells of one CSV line; the line itself if it is malformed."""
    try:
        return next(split_csv([line], delimiter=separator), [])
    except CsvError:
        return [line]


def _open_text(path: Path, *, errors: str = "strict") -> Any:
    """Open a CSV file as text in UTF-8; it may be compressed, as its suffix says.

    `errors`: treatment of undecodable bytes, as in `open`.
    """
    options: dict[str, Any] = {"mode": "rt", "encoding": "utf-8", "errors": errors, "newline": ""}
    if path.suffix == ".gz":
        return gzip.open(path, **options)
    if path.suffix == ".bz2":
        return bz2.open(path, **options)
    if path.suffix == ".xz":
        return lzma.open(path, **options)
    if path.suffix == ".zst":
        # Not a dependency of ours: pandas needs this package, too, to read such files.
        return import_module("zstandard").open(path, **options)
    return path.open(**options)


@contextmanager
def _open_at_header(path: Path, head: CsvHead) -> Iterator[Any]:
    """Yield a CSV file for pandas: its path, or the file opened at the header.

    `head`: the part of the file above the header, which is skipped.
    """
    if not head.lines_above:
        yield path
        return
    # Pandas itself would take a quote in a comment for the beginning of a cell.
    with _open_text(path) as file:
        for _ in range(head.lines_above):
            file.readline()
        yield file


def _read_plain_csv(path: Path, names: Sequence[Any], head: CsvHead) -> pd.DataFrame | None:
    """Return all cells of a CSV file as texts, as pandas would read them, but much faster.

    None means that the caller must let pandas read the file. So it is if the two readers might
    differ, or if the file is faulty, such as with rows of different lengths or an open quote: only
    pandas' errors give the reason.

    `names`: names of the columns. `head`: the part of the file above them.
    """
    if len(names) < 2 or not all(isinstance(name, str) for name in names):
        return None
    texts = dict.fromkeys(names, pyarrow.large_string())
    try:
        content = pyarrow.input_stream(str(path)).read_buffer()
        table = csv.read_csv(
            pyarrow.BufferReader(content),
            read_options=csv.ReadOptions(skip_rows=head.lines_above),
            parse_options=csv.ParseOptions(newlines_in_values=True, delimiter=head.separator),
            convert_options=csv.ConvertOptions(
                column_types=texts, null_values=[""], strings_can_be_null=True
            ),
        )
    except (ArrowException, OSError):
        return None
    has_final_line_end = content[-1:].to_pybytes() in (b"\n", b"\r")
    last_cell = table.column(-1)[-1].as_py() if len(table) else None
    is_inside_quotes = str(last_cell).endswith(("\n", "\r"))
    if table.column_names != names or not has_final_line_end or is_inside_quotes:
        return None
    del content  # before the conversion, so that a long table is not twice in memory
    frame: pd.DataFrame = table.to_pandas()
    del table
    default_memory_pool().release_unused()
    return frame


def _check_names(
    files: Sequence[Path],
    names: Sequence[Iterable[str]],
    source: str,
    heads: Sequence[CsvHead] = (),
) -> None:
    """Raise DataError unless column names are valid, and all files of one table have the same.

    Args:
        files: the table's files.
        names: the column names of each file.
        source: the party's name, for errors.
        heads: the part above the header of each file; empty for files that are not CSV.
    """
    heads = heads or [CsvHead()] * len(files)
    first_names = {*map(str, names[0])}
    for path, file_names, head in zip(files, names, heads, strict=True):
        refuse_names(file_names, path, source, separator=head.separator)
        different_names = first_names ^ {*map(str, file_names)}
        if different_names:
            raise DataError(
                f"{source}: {path} and {files[0]} differ in the columns "
                f"{', '.join(sorted(different_names)[:5])}; files of one table have the same"
            )


def stream_blocks(path: Path, *, source: str, rows: int) -> Iterator[pd.DataFrame]:
    """Yield the rows of one or several files, `rows` at a time, with a continuing index.

    Cells of a CSV file stay texts, since the fitted encoding alone decides what they mean. Column
    names are in Unicode NFC.

    Args:
        path: a file, a folder, or a pattern of names.
        source: name of the table, for errors.
        rows: largest number of rows of one frame.

    Raises DataError: the files cannot be read, or a column's cells are lists or records.
    """
    files = list_files(path, source=source)
    first = 0  # number of the next frame's first row
    kind = infer_file_kind(files[0])
    read = read_text_blocks if kind == "CSV" else partial(_stream_packed_blocks, path)
    blocks = read(files, source, rows)
    while True:
        with translate_read_errors(path, files[0], source):
            frame = next(blocks, None)
        if frame is None:
            return
        end = first + len(frame)
        frame.index = pd.RangeIndex(first, end)
        first = end
        frame.columns = pd.Index(list(map(column_name, frame.columns)))
        _refuse_nested_cells(frame, path, source)
        yield frame


def _stream_packed_blocks(
    path: Path, files: Sequence[Path], source: str, rows: int
) -> Iterator[pd.DataFrame]:
    """Yield the rows of Parquet or Arrow files as frames of at most `rows` rows.

    Whole numbers stay whole where a cell is empty.

    `files`: the files at `path`. `source`: name of the table, for errors.
    """
    rows_of_files = open_packed_files(files, path, source)
    for batch in rows_of_files.to_batches(batch_size=rows, batch_readahead=1, fragment_readahead=1):
        yield convert_to_pandas(
            pyarrow.Table.from_batches([batch]), types_mapper=_INTEGER_TYPES.get
        )


@contextmanager
def translate_read_errors(path: Path, file: Path, source: str) -> Iterator[None]:
    """Turn errors of readers in the `with` block into a DataError with the cause and a remedy.

    Args:
        path: the file, folder or pattern that is read, for the error.
        file: one of its files; the error names its format.
        source: the party's name, for the error.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)
            yield
    except pd.errors.ParserWarning as error:  # pandas would drop the last cells of these rows
        raise DataError(
            f"{source}: the rows of {path} have more cells than its first line has names; name "
            "every column there, that of row names, too"
        ) from error
    except FileNotFoundError as error:
        raise DataError(f"{source}: {describe_missing(path)}") from error
    except (OSError, EOFError, lzma.LZMAError, ImportError) as error:  # .zst asks for zstandard
        raise DataError(f"{source}: {path} cannot be read ({error})") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{source}: {path} is not in UTF-8 ({error.reason} 0x{error.object[error.start]:02x}); "
            "save it in that encoding"
        ) from error
    except (ValueError, ArrowException) as error:
        # pandas' parser errors and UnicodeDecodeError are ValueErrors.
        raise DataError(
            f"{source}: {path} is not a readable {infer_file_kind(file)} file "
            f"({str(error).strip()}); save it again"
        ) from error


def refuse_names(
    column_names: Iterable[str], path: Path | str, source: str, *, separator: str = ","
) -> None:
    """Raise DataError for several columns of one name, or a header with another separator.

    Args:
        column_names: names in the order of the file.
        path: the file, or another name of the table, for errors.
        source: the party's name, for errors.
        separator: the file's separator.
    """
    names = pd.Series(list(column_names), dtype=object)
    for sign, called in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars")):
        if len(names) == 1 and separator == "," and sign in str(names.iloc[0]):
            written = sign.replace("\t", "\\t")
            raise DataError(
                f"{source}: the first line of {path} has no comma, but {called}; save it with "
                f"commas between the columns, or put a line above it that says sep={written}"
            )
    names = names.dropna().map(column_name)
    repeated = names[names.duplicated()].unique()
    if len(repeated):
        raise DataError(
            f"{source}: {path} has several columns named {', '.join(map(str, repeated))}; "
            "give each a name of its own"
        )


def convert_number_cells(
    frame: pd.DataFrame,
    *,
    unconverted_columns: Sequence[str] = (),
    ids: Sequence[str] = (),
    source: str = "the input",
) -> pd.DataFrame:
    """Return the frame with decimals and number objects as floats, and float16 as float32.

    Args:
        frame: the frame; columns of other types stay as they are.
        unconverted_columns: columns whose decimals and objects are not converted, since a number as
            an ID needs every digit.
        ids: columns that stay even float16, so that their lack of digits can be reported.
        source: name of the table, for errors.

    Raises DataError: a decimal is a signalling NaN.
    """
    converted = {}
    for name in frame.columns:
        column = frame[name]
        kind = "" if name in unconverted_columns else _infer_kind(column)
        if column.dtype == np.float16 and name not in ids:  # pandas cannot group by float16
            converted[name] = column.astype(np.float32)
        elif kind in ("integer", "floating", "mixed-integer-float"):
            converted[name] = pd.to_numeric(column)
        elif kind == "decimal":
            try:
                floats = [math.nan if empty else float(cell) for cell, empty in _iter_cells(column)]
            except ValueError as error:  # a signalling NaN
                raise DataError(
                    f"{source}: column {name!r} holds a decimal that is no number; mend it"
                ) from error
            converted[name] = pd.Series(floats, index=column.index)
    return frame.assign(**converted) if converted else frame


def _infer_kind(column: "pd.Series") -> str:
    """Return the kind of cells that pandas infers for a column of objects, such as "integer".

    The kind is "decimal" for a column of decimal type, and "" for every other type.
    """
    if str(column.dtype).startswith("decimal"):
        return "decimal"
    if column.dtype != object:
        return ""
    return pd.api.types.infer_dtype(column, skipna=True)


def _iter_cells(column: "pd.Series") -> Iterator[tuple[Any, bool]]:
    """Yield each cell with whether it is null; this is faster than iterating over a column."""
    return zip(column.tolist(), column.isna().tolist(), strict=True)


def _refuse_nested_cells(frame: pd.DataFrame, path: Path | str, source: str) -> None:
    """Raise DataError if cells are lists or records, or texts with NUL bytes.

    `path`: name of the table, for the error. `source`: the party's name, for the error.
    """
    for name in frame.columns:
        column = frame[name]
        if column.dtype == object:
            cells = column.tolist()
            has_nested = any(isinstance(cell, list | dict | tuple | np.ndarray) for cell in cells)
            has_nul = any(isinstance(cell, str) and "\0" in cell for cell in cells)
        elif holds_texts(column):
            has_nested = False
            has_nul = bool(column.str.contains("\0", regex=False).any())
        else:
            continue
        if has_nested:
            raise DataError(
                f"{source}: column {name!r} of {path} holds lists or records, and a feature is "
                "one number or text; write its parts into columns of their own"
            )
        if has_nul:
            raise DataError(
                f"{source}: column {name!r} of {path} holds NUL bytes, so it is no text; save "
                "the file again"
            )


def select_columns(frame: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """Return a frame of these columns in this order; the frame itself if it is already that."""
    return frame if list(frame.columns) == list(names) else frame[list(names)]


def convert_to_texts(column: "pd.Series") -> list[str | None]:
    """Return a column's cells as texts, None for a null.

    Whole numbers get no decimal point. Words such as "NA" stay texts here.
    """
    if not holds_texts(column):
        return [None if empty else format_cell(cell) for cell, empty in _iter_cells(column)]
    codes_N, distinct = pd.factorize(column)
    # Each distinct text is stored once, however long the column. The code of a null is -1, which
    # picks the None at the end.
    texts = [*map(str.strip, distinct), None]
    return [texts[code] for code in codes_N.tolist()]


# What cells hold


def format_cell(cell: object) -> str:
    """Return a non-empty cell as text; whole numbers get no decimal point.

    A column of whole numbers is read as floats as soon as one cell is empty, so "7.0" must equal
    "7".
    """
    if isinstance(cell, float | np.floating) and float(cell).is_integer():
        return str(int(cell))
    return str(cell).strip()


def holds_texts(column: "pd.Series") -> bool:
    """Return whether a column has pandas' text type, not objects that may be texts."""
    return column.dtype != object and pd.api.types.is_string_dtype(column.dtype)


def describe_row(column: "pd.Series | pd.DataFrame", row: int) -> str:
    """Return in words where a user finds a row: the line of a CSV file, else its number from 0.

    Blank lines of the file, and line breaks within cells, are not counted.

    `column`: the table or a column of it, with the table's index. `row`: a position in it.
    """
    number = column.index[row]
    # For each file its first row's number, its name, and the number of lines above its header.
    files = column.attrs.get(LINES_ATTRIBUTE)
    if not files:
        return f"row {number} (from 0)"
    first_row, file_name, lines_above = max(file for file in files if file[0] <= number)
    line = lines_above + 1 + (number - first_row) + 1  # below the header, counted from 1
    return f"line {line} of {file_name}" if file_name else f"line {line}"


def is_numeric(column: "pd.Series") -> bool:
    """Return whether a column has a type of numbers; truth values are not numbers here."""
    dtype = column.dtype
    return pd.api.types.is_numeric_dtype(dtype) and not pd.api.types.is_bool_dtype(dtype)


def read_numbers(column: "pd.Series", *, source: str) -> NDArray[np.float64]:
    """Return a column as numbers (N,), NaN for an empty cell; true is 1 and false 0.

    `source`: the party's name, for the error.

    Raises DataError: a non-empty cell is no number.
    """
    kind = column.dtype.kind
    if kind in "biuf" and not isinstance(column.dtype, pd.CategoricalDtype):
        return column.to_numpy(dtype=np.float64, na_value=np.nan)
    if holds_texts(column):
        cells = column.str.strip()
        known = ~is_empty(column)
        values = pd.to_numeric(cells.where(known), errors="coerce").to_numpy(np.float64, copy=True)
        unread = np.flatnonzero(known & np.isnan(values))
        values[unread] = cells.iloc[unread].map(TRUTH_BY_WORD).to_numpy(np.float64, na_value=np.nan)
    else:
        known, values = _parse_cells(column, _parse_number)
    _require_all_parsed(
        column, known, values, "is numeric", "not numbers", "mend them", source=source
    )
    return values


def _require_all_parsed(
    column: "pd.Series",
    is_parsed_N: NDArray[np.bool_],
    values_N: NDArray[np.float64],
    column_text: str,
    cells_text: str,
    remedy: str,
    *,
    source: str,
) -> None:
    """Raise DataError if a non-empty cell could not be parsed; it names the first such cell.

    Args:
        column: the cells.
        is_parsed_N: whether each cell is not empty.
        values_N: the parsed cells; NaN for a cell that is empty or could not be parsed.
        column_text: the error's words on the column, such as "holds dates".
        cells_text: the error's words on the wrong cells, such as "not numbers".
        remedy: the error's advice.
        source: the party's name.
    """
    wrong_rows = np.flatnonzero(is_parsed_N & np.isnan(values_N))
    if wrong_rows.size:
        raise DataError(
            f"{source}: column {column.name!r} {column_text}, but {wrong_rows.size} cells are "
            f"{cells_text}, first in {describe_row(column, wrong_rows[0])}; {remedy}"
        )


def _parse_number(cell: Any) -> float:
    """Return the number in one non-empty cell; NaN if it has none."""
    if isinstance(cell, str):
        number = pd.to_numeric(cell, errors="coerce")  # float() would accept "1_000"
        return float(TRUTH_BY_WORD.get(cell, number))
    if isinstance(cell, (numbers.Real, decimal.Decimal, np.bool_)):
        return float(cell)
    return np.nan


def read_days(
    column: "pd.Series", *, source: str, formats: Sequence[str] = ()
) -> NDArray[np.float64]:
    """Return dates as days (N,) since 1970-01-01, with fractions; NaN for an empty cell.

    A time without a time zone is taken as UTC.

    `source`: the party's name, for the error. `formats`: `strptime` formats that are accepted
    besides ISO 8601.

    Raises DataError: a non-empty cell is no date.
    """
    if isinstance(column.dtype, np.dtype | pd.DatetimeTZDtype) and column.dtype.kind == "M":
        moments = column
        known = column.notna().to_numpy()
    else:
        cells, empty = _list_cells(column)
        known = ~empty
        dates = [_normalise_date(cell, formats) for cell in cells]
        moments = pd.Series(dates, index=column.index, dtype=object)
    moments = pd.to_datetime(moments, format="ISO8601", errors="coerce", utc=True)
    # In microseconds, since nanoseconds end in 2262, and tables write 9999-12-31 for "no end".
    elapsed = moments.dt.tz_convert(None).dt.as_unit("us").to_numpy() - np.datetime64(0, "us")
    days = np.asarray(elapsed / np.timedelta64(1, "D"), dtype=np.float64)
    remedy = f"write them as {' or '.join(('2026-01-31', *formats))}"
    _require_all_parsed(column, known, days, "holds dates", "none", remedy, source=source)
    return days


def _normalise_date(cell: Any, formats: Sequence[str]) -> Any:
    """Return a cell in a form that pandas reads as a date; None if the cell is no date.

    `formats`: `strptime` formats that are accepted besides ISO 8601.
    """
    if isinstance(cell, str) and formats and not _ISO.fullmatch(cell):
        date = parse_date(cell, formats)
        return None if date is None else date.isoformat()
    return cell if _is_date(cell) else None


def read_durations(column: "pd.Series", *, source: str) -> NDArray[np.float64]:
    """Return durations (N,) in days; NaN for an empty cell.

    `source`: the party's name, for the error.

    Raises DataError: a non-empty cell is no duration.
    """
    known, days = _parse_cells(column, _parse_days)
    remedy = "write them as 3 days 12:00:00"
    _require_all_parsed(column, known, days, "holds durations", "none", remedy, source=source)
    return days


def _parse_days(cell: Any) -> float:
    """Return a duration in days; NaN if the cell is no duration."""
    if isinstance(cell, str) and _DURATION.fullmatch(cell):
        cell = pd.to_timedelta(cell, errors="coerce")
    if isinstance(cell, np.timedelta64):
        cell = pd.Timedelta(cell)
    return cell / _DAY if isinstance(cell, datetime.timedelta) else np.nan


def read_texts(column: "pd.Series", *, words: Set[str] = frozenset()) -> list[str | None]:
    """Return a column as texts in Unicode NFC, None for an empty cell.

    Equal values get equal texts: whole numbers without decimal point, midnights as dates.

    `words`: texts such as "NA" that are categories of this column and so do not count as empty.
    """
    if holds_texts(column):
        codes_N, distinct = pd.factorize(column)
        if len(distinct) < len(column):  # each text is read once, and stored once
            distinct_texts = read_texts(pd.Series(distinct, dtype=column.dtype), words=words)
            distinct_texts.append(None)  # the code of a null is -1, which picks this last entry
            return [distinct_texts[code] for code in codes_N.tolist()]
        texts = column.str.strip().tolist()
    elif column.dtype.kind == "f":
        # `tolist` would make Python floats, which show more digits of a float32 than it has.
        texts = [format_cell(cell) for cell in column.to_numpy(na_value=np.nan)]
    else:
        texts = [_format_typed_cell(cell) for cell in column.tolist()]
    are_empty = is_empty(column, (EMPTY_CELL_TEXTS - words) | BLANK).tolist()
    return [
        None if empty else column_name(text) for text, empty in zip(texts, are_empty, strict=True)
    ]


def _format_typed_cell(cell: Any) -> str:
    """Return one non-empty cell of any type as text; equal values get equal texts."""
    if isinstance(cell, bytes):
        return cell.decode(errors="backslashreplace").strip()
    if isinstance(cell, decimal.Decimal) and cell.is_finite():
        return normalise_spelling(format(cell, "f"))
    if isinstance(cell, datetime.datetime) and cell is not pd.NaT:
        return _format_moment(cell)
    return format_cell(cell)


def normalise_spelling(text: str) -> str:
    """Return a number, time or moment in one canonical spelling, and any other text unchanged.

    Digits after leading zeros, or with an exponent without sign, are codes and not numbers. Moments
    are in UTC if they have a time zone; a midnight without one becomes its date.

    Examples:
        >>> texts = ("1.50", "-0.0", "1e-07", "007", "2026-01-31T00:00:00.000")
        >>> [normalise_spelling(text) for text in texts]
        ['1.5', '0', '0.0000001', '007', '2026-01-31']
    """
    if not re.fullmatch(RESPELLABLE_PATTERN, text):
        return text
    if re.fullmatch(_NUMBER, text):
        integer, _, fraction = format(decimal.Decimal(text), "f").partition(".")
        digits = f"{integer}.{fraction}".rstrip("0").rstrip(".")
        return "0" if digits == "-0" else digits
    if re.fullmatch(_TIME, text):
        return text.rstrip("0").rstrip(".")
    try:
        moment = datetime.datetime.fromisoformat(text)
        return _format_moment(moment.astimezone(datetime.UTC) if moment.tzinfo else moment)
    except (ValueError, OverflowError):  # no existing date, or in no year from 1 to 9999
        return text


def _format_moment(moment: datetime.datetime) -> str:
    """Return a date or time as ISO text; midnight without its time."""
    midnight = moment.tzinfo is None and moment.time() == datetime.time()
    return moment.date().isoformat() if midnight else moment.isoformat(" ")


def is_empty(column: "pd.Series", words: Set[str] = EMPTY_CELL_TEXTS) -> NDArray[np.bool_]:
    """Return whether each cell is empty, (N,): a null, or a text among `words`."""
    nulls: NDArray[np.bool_] = column.isna().to_numpy(dtype=bool, copy=True)
    if holds_texts(column):
        nulls |= column.str.strip().isin(words).to_numpy(dtype=bool)
    elif column.dtype.kind == "O":
        nulls |= [isinstance(cell, str) and cell.strip() in words for cell in column.tolist()]
    return nulls


def is_date(column: "pd.Series", formats: Sequence[str] = ()) -> bool:
    """Return whether a column holds dates, by its type or because all its cells are dates.

    `formats`: `strptime` formats of texts that count as dates besides ISO 8601.
    """
    if column.dtype.kind == "M":
        return True
    return _all_cells_satisfy(column, lambda cell: _normalise_date(cell, formats) is not None)


def is_duration(column: "pd.Series") -> bool:
    """Return whether a column holds durations, by its type or as texts like 3 days 12:00:00."""
    return column.dtype.kind == "m" or _all_cells_satisfy(column, _is_duration)


def has_measures(column: "pd.Series", formats: Sequence[str] = ()) -> bool:
    """Return whether a column holds numbers, dates or durations, and so is no category.

    `formats`: `strptime` formats of texts that count as dates besides ISO 8601.
    """
    return is_numeric(column) or is_date(column, formats) or is_duration(column)


def are_padded_codes(column: "pd.Series") -> bool:
    """Return whether all texts are digits, and some begin with a zero that a number would lose.

    Such a zero has a digit after it, also in 01.5, -01 and +0123; 0, 0.5 and -0.5 are numbers.
    """
    if column.dtype.kind not in "OUT" and not holds_texts(column):
        return False
    known = pd.Series([text for text in read_texts(column) if text is not None], dtype=str)
    padded = known.str.match(_PADDED).any()
    return bool(padded and pd.to_numeric(known, errors="coerce").notna().all())


def convert_text_column(column: "pd.Series") -> "pd.Series":
    """Return a column of texts as numbers or truth values if all its non-empty cells are such.

    Otherwise the column is returned unchanged, with its words for empty cells. So is a column with
    a number that has a leading zero, since it may hold codes. A column without any filled cell
    becomes NaN.
    """
    plain_numbers = _cast_plain_numbers(column)
    if plain_numbers is not None:
        return plain_numbers
    texts = column.str.strip()
    known = ~is_empty(column)
    filled = texts[known]
    if not len(filled):
        return pd.Series(np.nan, index=column.index, name=column.name)
    values = filled.map(TRUTH_BY_WORD)
    if values.isna().any():
        values = pd.to_numeric(filled, errors="coerce")
        if values.isna().any() or filled.str.match(_PADDED).any():
            return column
    elif not known.all():
        values = values.astype(object)  # truth values beside NaN, which bool has not
    return values.infer_objects() if known.all() else values.reindex(column.index)


def _cast_plain_numbers(column: "pd.Series") -> "pd.Series | None":
    """Return a column of plainly written numbers as numbers; None if a cell is anything else.

    It is a fast path for most columns: `convert_text_column` treats all others.
    """
    cells = pyarrow.array(column.array)
    if not compute.all(compute.match_substring_regex(cells, _PLAIN_NUMBER)).as_py():
        return None
    # Most columns with a fraction show one in the first rows, which are searched first.
    has_fraction = any(
        compute.any(compute.match_substring_regex(block, "[.eE]")).as_py()
        for block in (cells[:_SAMPLE_ROWS], cells)
    )
    is_integer = not cells.null_count and not has_fraction
    numbers = compute.cast(cells, pyarrow.int64() if is_integer else pyarrow.float64())
    return pd.Series(numbers.to_pandas().to_numpy(), index=column.index, name=column.name)


def _is_date(cell: Any) -> bool:
    """Return whether a cell is a date, or a text in ISO 8601."""
    if isinstance(cell, str):
        return _ISO.fullmatch(cell) is not None
    return isinstance(cell, datetime.date | np.datetime64)


def _is_duration(cell: Any) -> bool:
    """Return whether a cell is a duration, or a text like 3 days 12:00:00."""
    if isinstance(cell, str):
        return _DURATION.fullmatch(cell) is not None
    return isinstance(cell, datetime.timedelta | np.timedelta64)


def _all_cells_satisfy(column: "pd.Series", condition: Callable[[Any], bool]) -> bool:
    """Return whether there are non-empty cells, and all of them meet the condition.

    It is asked whether cells are dates or durations: a column of numbers has neither.
    """
    if column.dtype.kind in "biufcm":
        return False
    if holds_texts(column):
        column = column.drop_duplicates()
    cells, are_empty = _list_cells(column)
    known = [cell for cell, empty in zip(cells, are_empty.tolist(), strict=True) if not empty]
    return bool(known) and all(map(condition, known))


def _list_cells(column: "pd.Series") -> tuple[list[Any], NDArray[np.bool_]]:
    """Return the cells, and whether each is empty, (N,).

    Texts lose outer blanks, and bytes become texts.
    """
    cells = column.tolist()
    for row, cell in enumerate(cells):
        if isinstance(cell, str):
            cells[row] = cell.strip()
        elif isinstance(cell, bytes):
            cells[row] = _format_typed_cell(cell)
    return cells, is_empty(column)


def _parse_cells(
    column: "pd.Series", parse_cell: Callable[[Any], float]
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Return whether each cell is not empty, (N,), and the parsed cells (N,), NaN if empty.

    `parse_cell`: function from a non-empty cell to its number, NaN if it cannot be parsed.
    """
    cells, are_empty = _list_cells(column)
    pairs = zip(cells, are_empty.tolist(), strict=True)
    values = [np.nan if empty else parse_cell(cell) for cell, empty in pairs]
    return ~are_empty, np.array(values, np.float64)


def find_look_alike(
    column: "pd.Series", *, advice: Advice, max_categories: int | None = None
) -> Fault | None:
    """Return a fault if texts would become categories though most look like numbers or dates.

    None means that the column has no such fault.

    Args:
        column: a text column that the settings do not declare categorical.
        advice: proposes settings of the party whose table it is.
        max_categories: the party's limit of categories in one column; None: none is set.
    """
    if isinstance(column.dtype, pd.CategoricalDtype):
        return None
    texts = read_texts(column)
    cell_counts = Counter(text for text in texts if text is not None)
    filled_cells = cell_counts.total()
    cells_in_column = f"of {filled_cells} cells of column {str(column.name)!r}"
    non_numbers = _find_non_numbers(list(cell_counts))
    non_number_cells = sum(cell_counts[text] for text in non_numbers)
    if 0 < non_number_cells < (1 - _MAJORITY) * filled_cells:
        remedies = propose_categories(column, advice=advice, max_categories=max_categories)
        return Fault(
            f"{advice.party}: {non_number_cells} {cells_in_column} are text and the rest are "
            f"numbers, first in {_locate_first(texts, non_numbers, column)}; mend them, or say "
            f"{describe_remedies(remedies)}",
            remedies,
        )
    for description, (pattern, expected_spelling) in _LOOK_ALIKES.items():
        matching_texts = {text for text in cell_counts if pattern.fullmatch(text)}
        matching_cells = sum(cell_counts[text] for text in matching_texts)
        if matching_cells > _MAJORITY * filled_cells:
            remedies = (
                *_propose_date_formats(list(cell_counts), advice=advice),
                *propose_categories(column, advice=advice, max_categories=max_categories),
            )
            return Fault(
                f"{advice.party}: {matching_cells} {cells_in_column} look like {description}, "
                f"first in {_locate_first(texts, matching_texts, column)}; write "
                f"{expected_spelling}, or say {describe_remedies(remedies)}",
                remedies,
            )
    return None


def _find_non_numbers(texts: Sequence[str]) -> set[str]:
    """Return those of these texts that are no numbers."""
    numbers = pd.to_numeric(pd.Series(texts, dtype=str), errors="coerce")  # NaN for other texts
    return {text for text, number in zip(texts, numbers, strict=True) if np.isnan(number)}


def propose_categories(
    column: "pd.Series", *, advice: Advice, max_categories: int | None = None
) -> tuple[Remedy, ...]:
    """Return two remedies: settings that make a column categorical, or that leave it out.

    The first also limits the categories if the column has too many.

    `advice`: words the settings. `max_categories`: the party's limit of categories in one column;
    None: none is set.
    """
    name = str(column.name)
    declared: Remedy = (advice.add_to_list("categorical", name),)
    # Once the column is declared categorical, words such as "NA" are categories, too.
    categories = {*read_texts(column, words=EMPTY_CELL_TEXTS)} - {None}
    if max_categories is None and len(categories) > MAX_CATEGORIES:
        declared = (*declared, advice.set_value("rare_categories", {"most": FEW_CATEGORIES}))
    ignored: Remedy = (advice.add_to_list("ignore", name),)
    return declared, ignored


def _propose_date_formats(texts: Sequence[str], *, advice: Advice) -> list[Remedy]:
    """Return the settings of each date format in which all these texts can be read.

    If several fit, each setting has a remark that says whether day or month comes first.

    `advice`: words the settings.
    """
    fitting = [
        form
        for form in _DATE_FORMATS
        if all(_ISO.fullmatch(text) or parse_date(text, [form]) for text in texts)
    ]
    orders = {"%d": "the day comes first", "%m": "the month comes first"}
    remedies = list[Remedy]()
    for form in fitting:
        remark = orders.get(form[:2], "") if len(fitting) > 1 else ""
        remedies.append((advice.add_to_list("date_formats", form, remark=remark),))
    return remedies


def _locate_first(texts: Sequence[str | None], wanted: Set[str], column: "pd.Series") -> str:
    """Return in words where the first cell with one of the wanted texts stands, for an error.

    `texts`: the cells of `column` as texts.
    """
    first_row = next(row for row, text in enumerate(texts) if text in wanted)
    return describe_row(column, first_row)

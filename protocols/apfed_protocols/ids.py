r"""IDs as people have them, and the bytes that all parties make of them.

Run by: each party on its own IDs, before any protocol. Parties compare texts, so that two ways of
writing one person must become one text here, and what stands for nobody, or has lost digits, must
not become a person. Errors name party, column, rows and remedy, never an ID. Needs numpy alone.

Examples:
    >>> encode_ids("bank", ["Ann ", 7], IdNormalisation(case_fold=True))
    [b'\x00\x01\x00\x00\x00\x03ann', b'\x00\x01\x00\x00\x00\x017']
"""

import json
import operator
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import cache
from itertools import chain, tee, zip_longest
from typing import Any, Protocol, runtime_checkable
from uuid import UUID

import numpy as np

from apfed_protocols.date_formats import check_date_format, parse_date
from apfed_protocols.errors import DataError, LocalProtocolError
from apfed_protocols.labels import column_names, refuse_ambiguous_index

__all__ = [
    "COLUMN_SEPARATOR",
    "EMPTY_CELL_TEXTS",
    "FORM_PATTERNS",
    "ID_KINDS",
    "MAX_IDS",
    "REFUSAL_TEXTS",
    "IdColumn",
    "IdKind",
    "IdNormalisation",
    "IdReader",
    "IdStream",
    "SizedIds",
    "check_ids",
    "decode_id",
    "encode_ids",
    "encode_pieces",
    "id_texts",
    "require_comparable",
    "require_one_column_order",
]

COLUMN_SEPARATOR = "\x1f"
"""Between the parts of an ID of several columns."""
EMPTY_CELL_TEXTS = frozenset(
    {
        "",
        "#N/A",
        "#N/A N/A",
        "#NA",
        "-1.#IND",
        "-1.#QNAN",
        "-NaN",
        "-nan",
        "1.#IND",
        "1.#QNAN",
        "<NA>",
        "N/A",
        "NA",
        "NULL",
        "NaN",
        "None",
        "n/a",
        "nan",
        "null",
    }
)
"""Texts of a CSV cell that count as empty, here and in pandas."""
_EMPTY_TEXTS = EMPTY_CELL_TEXTS | {"NaT"}
# By name, since pandas, which has two of these types, need not be installed.
_MISSING_VALUE_TYPES = frozenset({"NoneType", "NAType", "NaTType"})
# Python refuses to write longer numbers in decimal, unless it is told otherwise.
_MAX_DIGITS = 4000  # Python refuses to read longer numbers, unless it is told otherwise
_TOO_LARGE_INTEGER = 10**_MAX_DIGITS
_DOUBLE_BITS = 53
_MAX_QUICK_BITS = 64
_ROWS_PER_CHUNK = 2**16
_MAX_ROWS_SHOWN = 5
_DEFAULT_SUBJECT = "its ID column"
# What datetime, pandas, pyarrow and polars raise for a year outside their range.
_TIME_RANGE_ERRORS = (OverflowError, NotImplementedError, ValueError)
REFUSAL_TEXTS: Mapping[str, tuple[str, str]] = {
    "nobody": (
        "is empty",
        (
            "each row needs an ID, and NaN, None, NA or the like is none; leave "
            "these rows out, or give each its ID"
        ),
    ),
    "rounded": (
        "holds whole numbers as floats too large to be exact",
        (
            "their last digits are lost; read them again from their source as whole numbers "
            'or text, as with dtype "Int64" or "string"'
        ),
    ),
    "fraction": (
        "holds numbers with a fraction",
        (
            "take another column of IDs{key}, or write them as text with the same decimals "
            'at all parties, as with .map("{{:.2f}}".format)'
        ),
    ),
    "infinite": ("holds infinite numbers", "leave these rows out, or give each its ID"),
    "truth": ("holds truth values", "take another column of IDs{key}"),
    "bytes": (
        "holds bytes that are no text in UTF-8",
        "write them as text at all parties, as with .map(bytes.hex)",
    ),
    "unicode": (
        "holds text that is not valid Unicode",
        "read it again in the encoding in which it was written",
    ),
    "digits": (
        f"holds numbers of more than {_MAX_DIGITS} digits",
        "write them as text at all parties, as with .map(hex)",
    ),
    "joint": (
        "holds the character U+001F, which stands between several columns,",
        (
            "write another character in its place at all parties, as with "
            r'.str.replace("\x1f", "|")'
        ),
    ),
    "nested": (
        "holds lists or records",
        "write their parts into columns of their own, and take these as IDs{key}",
    ),
    "moment": (
        "holds moments that in UTC lie outside of the years 1 to 9999",
        "leave these rows out, or write them as text at all parties",
    ),
    "type": (
        "holds values of another type",
        "write them as text in the same way at all parties, as with .map(str)",
    ),
}
"""Why cells are refused: what is said of the column, and what to do."""
MAX_IDS = 10_000_000
"""The largest set that an intersection takes, unless the parties agree on another."""
_MAX_COLUMNS = 2**16 - 1
_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]+(\.0*)?")


class _RefusedError(Exception):
    """A cell that is no ID; its argument is a key of `REFUSAL_TEXTS`, which says why."""


# A formatter takes a cell and the significand bits of its column's floats, and returns the text of
# the ID or raises `_RefusedError`. All share this signature (`IdKind.format_value`).


def _format_integer(value: Any, _float_bits: int) -> str:
    """Write an integer in decimal; refuse one too long for Python to write (`_MAX_DIGITS`)."""
    number = int(value)
    if abs(number) >= _TOO_LARGE_INTEGER:
        raise _RefusedError("digits")
    return str(number)


def _format_float(value: Any, float_bits: int) -> str:
    """Return the text of a float ID: a whole number as an integer, e.g. "7" for 7.0.

    `float_bits`: significand bits of the column's floats; integers below 2^float_bits are exact.

    Raises _RefusedError with a key of `REFUSAL_TEXTS`: the value is missing (NaN), infinite,
    fractional, or too large to be exact.
    """
    if value != value:  # only NaN
        raise _RefusedError("nobody")
    if value in (np.inf, -np.inf):
        raise _RefusedError("infinite")
    if value != int(value):
        raise _RefusedError("fraction")
    if isinstance(value, np.floating):  # its own type may be narrower
        float_bits = min(float_bits, np.finfo(value.dtype).nmant + 1)
    if abs(value) >= 2**float_bits:
        raise _RefusedError("rounded")
    return str(int(value))


def _format_decimal(value: Any, _float_bits: int) -> str:
    """Return the text of a `Decimal` that is a whole number, as an integer. Raises _RefusedError
    with a key of `REFUSAL_TEXTS`: it is something else, or too long.
    """
    if value.is_nan():
        raise _RefusedError("nobody")
    if value.is_infinite():
        raise _RefusedError("infinite")
    if value and value.adjusted() >= _MAX_DIGITS:
        raise _RefusedError("digits")
    if value != int(value):
        raise _RefusedError("fraction")
    return str(int(value))


def _format_text(value: Any, _float_bits: int) -> str:
    """Return a text as a plain `str`, whatever its subclass prints."""
    return str.__str__(value)


def _decode_bytes(value: Any, _float_bits: int) -> str:
    """Decode bytes as UTF-8; refuse bytes that are not."""
    try:
        return bytes(value).decode()
    except UnicodeDecodeError:
        raise _RefusedError("bytes") from None


def _format_date(value: Any, _float_bits: int) -> str:
    """Write a date as 2026-01-31."""
    return str(value.isoformat())


def _format_datetime(value: Any, _float_bits: int) -> str:
    """Return the text of a datetime, such as "2026-01-31 12:00:00"; one with a time zone is
    converted to UTC. Raises _RefusedError with a key of `REFUSAL_TEXTS`: in UTC it lies outside the
    years 1 to 9999.
    """
    try:
        if value.utcoffset() is not None:
            value = value.astimezone(UTC)
        return str(value.isoformat(sep=" "))
    except _TIME_RANGE_ERRORS:
        raise _RefusedError("moment") from None


def _format_numpy_moment(value: Any, _float_bits: int) -> str:
    """Return the text of a `numpy.datetime64`: the date alone if its unit is a day or longer, else
    date and time, as Python's datetimes are written. A fraction of a second has 6 decimals, or 9 if
    it needs them. Raises _RefusedError with a key of `REFUSAL_TEXTS`: the value is NaT.
    """
    if np.isnat(value):
        raise _RefusedError("nobody")
    unit = np.datetime_data(value.dtype)[0]
    if unit in ("Y", "M", "W", "D"):
        return str(np.datetime_as_string(value, unit="D"))
    whole_second = value.astype("M8[s]")
    nanoseconds = int((value - whole_second) / np.timedelta64(1, "ns"))
    decimals = f".{nanoseconds:09d}".removesuffix("000") if nanoseconds else ""
    return str(whole_second).replace("T", " ") + decimals


def _make_refusal(reason: str) -> Callable[[Any, int], str]:
    """Return a formatter that refuses every value for `reason`, a key of `REFUSAL_TEXTS`."""

    def refuse_value(_value: Any, _float_bits: int) -> str:
        raise _RefusedError(reason)

    return refuse_value


def _is_valid(text: str) -> bool:
    """Return whether a text can be encoded in UTF-8; lone surrogates cannot."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


@dataclass(frozen=True)
class IdKind:
    """A kind of ID values: its types, and the function that writes a value as text.

    Attributes:
        name: what the values are, in words.
        written_form: how the text of a value looks, in words; "": the kind is refused.
        types: Python and NumPy types of the values; the type of a value is looked up along its base
            classes.
        format_value: writes a value as text, given the value and the significand bits of its
            column's floats.
    """

    name: str
    written_form: str
    types: tuple[type, ...]
    format_value: Callable[[Any, int], str] = field(repr=False)


ID_KINDS = (
    IdKind("text, categories of text", "as it is: `007` is not `7`", (str,), _format_text),
    IdKind(
        "bytes", "the text that they are in UTF-8", (bytes, bytearray, memoryview), _decode_bytes
    ),
    IdKind(
        "whole numbers of any size", "decimal digits: `1001`", (int, np.integer), _format_integer
    ),
    IdKind(
        "floats that are whole, below 2^53 (float32: 2^24, float16: 2^11)",
        "as whole numbers: `1001`",
        (float, np.floating),
        _format_float,
    ),
    IdKind(
        "decimals that are whole",
        "as whole numbers: `1001` of 1001.00",
        (Decimal,),
        _format_decimal,
    ),
    IdKind("days", "`2026-01-31`", (date,), _format_date),
    IdKind(
        "moments, in UTC where they have a zone",
        "`2026-01-31 10:00:00`, with a zone `2026-01-31 09:00:00+00:00`",
        (datetime,),
        _format_datetime,
    ),
    IdKind("moments of numpy", "as days or moments", (np.datetime64,), _format_numpy_moment),
    IdKind("durations of numpy", "", (np.timedelta64,), _make_refusal("type")),
    IdKind("UUIDs", "`8b2d9f0e-7c1a-4f63-9d57-3e0c5a1b2f44`", (UUID,), lambda value, _: str(value)),
    IdKind("truth values", "", (bool, np.bool_), _make_refusal("truth")),
    IdKind(
        "lists and records",
        "",
        (list, tuple, dict, set, frozenset, np.ndarray),
        _make_refusal("nested"),
    ),
)
"""Kinds of values in a column of IDs; kinds without a text are refused, as is every other type."""

_FORMATTERS = {value_type: kind.format_value for kind in ID_KINDS for value_type in kind.types}


def _format_other(value: Any, float_bits: int) -> str:
    """Return the text of an ID of a type that `ID_KINDS` does not list: a scalar of pyarrow, or
    anything that is an integer by `__index__`.

    `float_bits`: significand bits of the column's floats; a pyarrow scalar has its own.

    Raises _RefusedError with a key of `REFUSAL_TEXTS`: the value is something else.
    """
    if hasattr(value, "as_py"):  # a scalar of pyarrow
        float_bits = _count_float_bits(value.type)
        try:
            value = value.as_py()
        except _TIME_RANGE_ERRORS:
            raise _RefusedError("moment") from None
        return _find_formatter(value.__class__)(value, float_bits)
    try:
        return _format_integer(operator.index(value), float_bits)
    except TypeError:
        raise _RefusedError("type") from None


@cache
def _find_formatter(value_type: type) -> Callable[[Any, int], str]:
    """Return the formatter for values of a type, looked up along its base classes."""
    if value_type.__name__ in _MISSING_VALUE_TYPES:
        return _make_refusal("nobody")
    for base in value_type.__mro__:
        if base in _FORMATTERS:
            return _FORMATTERS[base]
    return _format_other


class IdReader:
    """A reader that converts one column of IDs to texts, chunk by chunk, and collects the rows that
    it refuses for one error at the end.

    Args:
        subject: party and column, for errors.
        describe_place: returns in words where to find the row of a number, for errors; None: "row
            N".
        should_strip: whether to drop blanks at both ends of a text, as tables do.
        is_one_of_several: whether the column is one of several whose texts are joined by
            `COLUMN_SEPARATOR`.
        are_tuples_rows: whether a tuple or list is a row of several columns rather than one cell.
        settings_key: the settings key that names the column of IDs, for advice in errors.
    """

    def __init__(
        self,
        subject: str,
        *,
        describe_place: Callable[[int], str] | None = None,
        should_strip: bool = False,
        is_one_of_several: bool = False,
        are_tuples_rows: bool = False,
        settings_key: str = "",
    ) -> None:
        """Make a reader that has read no row yet."""
        self._subject = subject
        self._describe_place = describe_place
        self._should_strip = should_strip
        self._is_one_of_several = is_one_of_several
        self._are_tuples_rows = are_tuples_rows
        self._settings_key_hint = f" ({settings_key})" if settings_key else ""
        self._read_row_count = 0
        # The numbers of the refused rows by reason, a key of `REFUSAL_TEXTS`; and the types of
        # their values.
        self._refused_rows: dict[str, list[int]] = {}
        self._refused_types = set[str]()

    def convert_column(self, column: Iterable[object]) -> list[str]:
        """Return one text for each row, "" for a refused row; the texts may be used only if no row
        was refused (`has_no_refusals`).

        Raises DataError: `column` is of a type that holds no column of IDs.
        """
        return [text for chunk in self.convert_pieces(column) for text in chunk]

    def convert_pieces(self, column: Iterable[object]) -> Iterator[list[str]]:
        """Yield the texts of a column, at most `_ROWS_PER_CHUNK` rows at a time."""
        values, float_bits = _list_values(column, self._subject)
        for start in range(0, len(values), _ROWS_PER_CHUNK):
            yield self._convert_chunk(values[start : start + _ROWS_PER_CHUNK], float_bits)

    def _convert_chunk(self, values: list[Any], float_bits: int) -> list[str]:
        """Return the text of each of the next rows of the column, "" for a refused row.

        Rows of plain text or small integers alone are converted as a whole, which is quick. All
        other rows are converted cell by cell, which records refusals.

        Args:
            values: one value for each row: a cell, or a tuple of cells if it has several columns.
            float_bits: significand bits of the column's floats.
        """
        first_row = self._read_row_count
        self._read_row_count += len(values)
        if self._have_several_columns(values):
            texts = self._convert_uniform_rows(values)
        else:
            texts = self._convert_uniform_cells(values, is_one_of_several=self._is_one_of_several)
        if texts is not None:
            return texts
        return [
            self._convert_row(value, float_bits, row) for row, value in enumerate(values, first_row)
        ]

    def _have_several_columns(self, values: list[Any]) -> bool:
        """Return whether every value is a row of the same number of columns, two or more."""
        types = set(map(type, values))
        if not self._are_tuples_rows or not types <= {tuple, list}:
            return False
        lengths = set(map(len, values))
        return len(lengths) == 1 and len(values[0]) > 1

    def _convert_uniform_rows(self, rows: list[Any]) -> list[str] | None:
        """Convert rows of several columns, column by column, which is quick. Return one text for
        each row, its cells joined by `COLUMN_SEPARATOR`; None if the cells of a column are neither
        all text nor all small integers (`_convert_uniform_cells`).
        """
        columns = list[list[str]]()
        for cells in zip(*rows, strict=True):
            texts = self._convert_uniform_cells(list(cells), is_one_of_several=True)
            if texts is None:
                return None
            columns.append(texts)
        return [COLUMN_SEPARATOR.join(row_texts) for row_texts in zip(*columns, strict=True)]

    def _convert_uniform_cells(
        self, cells: list[Any], *, is_one_of_several: bool
    ) -> list[str] | None:
        """Return the texts of cells that are all non-empty text or all integers of at most 64 bits,
        in one quick pass. Return None for other cells, and if a text must be refused; the caller
        then converts cell by cell.

        `is_one_of_several`: whether the column is one of several whose texts are joined by
        `COLUMN_SEPARATOR`.
        """
        cell_types = set(map(type, cells))
        if cell_types == {str} and _is_valid("".join(cells)):
            if is_one_of_several and any(COLUMN_SEPARATOR in text for text in cells):
                return None
            stripped_texts = list(map(str.strip, cells))
            if not _EMPTY_TEXTS.isdisjoint(stripped_texts):
                return None  # a text that stands for an empty cell
            return stripped_texts if self._should_strip else cells
        if cell_types == {int} and max(map(int.bit_length, cells)) <= _MAX_QUICK_BITS:
            return list(map(str, cells))
        return None

    @property
    def has_no_refusals(self) -> bool:
        """Return whether no row was refused so far."""
        return not self._refused_rows

    def require_no_refusals(self) -> None:
        """Raise DataError if rows were refused. The error has one sentence for each reason, which
        names the first rows and what to do.
        """
        if not self._refused_rows:
            return
        problem_sentences = []
        for reason in sorted(self._refused_rows, key=list(REFUSAL_TEXTS).index):
            problem, remedy = REFUSAL_TEXTS[reason]
            if reason == "type":
                problem += f" ({', '.join(sorted(self._refused_types))})"
            refused_rows = self._refused_rows[reason]
            remedy = remedy.format(key=self._settings_key_hint)
            problem_sentences.append(
                f"{problem} in {len(refused_rows)} rows, first in "
                f"{self._describe_places(refused_rows)}; {remedy}"
            )
        raise DataError(f"{self._subject} {'. It '.join(problem_sentences)}")

    def _describe_places(self, rows: Sequence[int]) -> str:
        """Return in words, for errors, where the first few of these rows (numbers from 0) are."""
        first_rows = rows[:_MAX_ROWS_SHOWN]
        if self._describe_place:
            return ", ".join(map(self._describe_place, first_rows))
        return f"row{'s' if len(first_rows) > 1 else ''} {', '.join(map(str, first_rows))} (from 0)"

    def _convert_row(self, value: Any, float_bits: int, row: int) -> str:
        """Return the text of one row, the texts of its columns joined by `COLUMN_SEPARATOR`. If the
        row is refused, store its number by reason, and return "".

        Args:
            value: a cell, or a tuple or list of cells if rows have several columns.
            float_bits: significand bits of the column's floats.
            row: number of the row in the column, from 0, for errors.
        """
        is_row_of_cells = self._are_tuples_rows and isinstance(value, tuple | list) and bool(value)
        try:
            if not is_row_of_cells:
                return self._convert_cell(
                    value, float_bits, is_one_of_several=self._is_one_of_several
                )
            has_several_cells = len(value) > 1
            texts = [
                self._convert_cell(cell, float_bits, is_one_of_several=has_several_cells)
                for cell in value
            ]
            return COLUMN_SEPARATOR.join(texts)
        except _RefusedError as refusal:
            reason = str(refusal)
            self._refused_rows.setdefault(reason, []).append(row)
            self._refused_types.add(type(value).__name__)
            return ""

    def _convert_cell(self, value: Any, float_bits: int, *, is_one_of_several: bool) -> str:
        """Return the text of one cell.

        Args:
            value: the cell.
            float_bits: significand bits of the column's floats.
            is_one_of_several: whether the column is one of several whose texts are joined by
                `COLUMN_SEPARATOR`.

        Raises _RefusedError with a key of `REFUSAL_TEXTS`: the cell is no ID, is empty, is not
        valid Unicode, or has the separator `COLUMN_SEPARATOR` in it.
        """
        text = _find_formatter(value.__class__)(value, float_bits)
        stripped_text = text.strip()
        if stripped_text in _EMPTY_TEXTS:
            raise _RefusedError("nobody")
        if not _is_valid(text):
            raise _RefusedError("unicode")
        if is_one_of_several and COLUMN_SEPARATOR in text:
            raise _RefusedError("joint")
        return stripped_text if self._should_strip else text


def id_texts(
    column: Iterable[object],
    *,
    party: str,
    subject: str = _DEFAULT_SUBJECT,
    describe_place: Callable[[int], str] | None = None,
    should_strip: bool = False,
    is_one_of_several: bool = False,
    are_tuples_rows: bool = False,
    settings_key: str = "",
) -> list[str]:
    """Return the text of each row of a column of IDs.

    Args:
        column: any iterable, or a column of numpy, pandas, polars or pyarrow.
        party: name of the party whose column it is, for errors.
        subject: what errors call the column.
        describe_place: returns in words where to find the row of a number, for errors; None: "row
            N".
        should_strip: whether to drop blanks at both ends of a text, as tables do.
        is_one_of_several: whether the column is one of several whose texts are joined by
            `COLUMN_SEPARATOR`.
        are_tuples_rows: whether a tuple or list is a row of several columns rather than one cell.
        settings_key: the settings key that names the column of IDs, for advice in errors.

    Raises DataError: some rows have no ID; or `column` is of a type that holds no column of IDs.
    """
    reader = IdReader(
        f"{party}: {subject}",
        describe_place=describe_place,
        should_strip=should_strip,
        is_one_of_several=is_one_of_several,
        are_tuples_rows=are_tuples_rows,
        settings_key=settings_key,
    )
    texts = reader.convert_column(column)
    reader.require_no_refusals()
    return texts


def _iter_text_chunks(party: str, ids: Any) -> Iterator[list[str]]:
    """Yield the texts of a party's IDs, one for each row, in chunks of at most `_ROWS_PER_CHUNK`
    rows; the texts of a row's columns are joined by `COLUMN_SEPARATOR`.

    A frame of pandas, polars or pyarrow is one chunk.

    Args:
        party: name of the party, for errors.
        ids: an `IdColumn`: any iterable, a frame, or a stream that is read in pieces.

    Raises DataError: some rows have no ID; it is raised after the last chunk, so that it can name
    all of them.
    """
    refuse_ambiguous_index(ids, f"{party}: {_DEFAULT_SUBJECT}", error=DataError)
    columns = _split_columns(ids)
    if columns is not None:
        has_several_columns = len(columns) > 1
        texts_by_column = [
            id_texts(
                cells,
                party=party,
                subject=f"column {name!r}",
                is_one_of_several=has_several_columns,
            )
            for name, cells in columns
        ]
        yield [COLUMN_SEPARATOR.join(row_texts) for row_texts in zip(*texts_by_column, strict=True)]
        return
    reader = IdReader(f"{party}: {_DEFAULT_SUBJECT}", are_tuples_rows=True)
    pieces = ids.pieces() if hasattr(ids, "pieces") else (ids,)
    for piece in pieces:
        for texts in reader.convert_pieces(piece):
            # After the first refusal, rows are only read to collect further refusals.
            if reader.has_no_refusals:
                yield texts
    reader.require_no_refusals()


def require_one_column_order(ids_by_party: Mapping[str, Any]) -> None:
    """Raise DataError if two parties' frames of IDs have the same columns in different orders: IDs
    are compared column by column, so that nobody would be found.

    `ids_by_party`: IDs of any kind; only those with named columns are compared.
    """
    columns_by_party: dict[str, tuple[str, ...]] = {}
    for party, ids in ids_by_party.items():
        columns = column_names(ids)
        if columns is not None:
            columns_by_party[party] = columns
    for party, columns in columns_by_party.items():
        for other_party, other_columns in columns_by_party.items():
            if columns != other_columns and sorted(columns) == sorted(other_columns):
                raise DataError(
                    f"{party}: the columns of its IDs are {', '.join(columns)}, and those of "
                    f"{other_party} {', '.join(other_columns)}; IDs are compared column by "
                    "column: give all in one order"
                )


def _split_columns(ids: Any) -> list[tuple[str, Any]] | None:
    """Return (name, column) pairs of a pandas, polars or pyarrow frame; None for anything else."""
    if hasattr(ids, "itertuples"):  # pandas
        return [(str(name), column) for name, column in ids.items()]
    if hasattr(ids, "get_columns"):  # polars
        return [(column.name, column) for column in ids.get_columns()]
    if hasattr(ids, "column_names"):  # pyarrow
        return list(zip(ids.column_names, ids.columns, strict=True))
    return None


def _list_values(column: Any, subject: str) -> tuple[list[Any], int]:
    """Return the cells of a column as a list, and the significand bits of its floats, which say up
    to which size integers in them are exact.

    A MultiIndex or structured array gives one tuple for each row.

    `subject`: what errors call the column.

    Raises DataError: `column` is of a type that holds no column, e.g. one text or a mapping.
    """
    if isinstance(column, list):
        return column, _DOUBLE_BITS
    levels = _split_levels(column)
    if levels is not None:
        # The columns may have floats of different types, so each cell gets its own type back.
        cells_by_level = [_narrow_floats(*_list_values(level, subject)) for level in levels]
        return list(zip(*cells_by_level, strict=True)), _DOUBLE_BITS
    float_bits = _count_float_bits(_find_element_type(column))
    if isinstance(column, np.ndarray) and column.dtype.kind in "mM" and column.ndim == 1:
        return list(column), float_bits  # `tolist` would turn moments of nanoseconds into integers
    for list_method in ("to_pylist", "tolist", "to_list"):
        if hasattr(column, list_method):
            try:
                column = getattr(column, list_method)()
            except _TIME_RANGE_ERRORS as error:
                problem, remedy = REFUSAL_TEXTS["moment"]
                raise DataError(f"{subject} {problem}; {remedy}") from error
            break
    if isinstance(column, Mapping):
        raise DataError(
            f"{subject} is of type {type(column).__name__}, of which the keys or a value may be "
            "meant; give ids.keys(), ids.values() or one of its values"
        )
    if isinstance(column, str | bytes | bytearray | memoryview) or not isinstance(column, Iterable):
        raise DataError(
            f"{subject} is of type {type(column).__name__}; give a list, array, Series or "
            "DataFrame with one ID a row"
        )
    return list(column), float_bits


def _find_element_type(column: Any) -> object:
    """Return the element type that an array or column declares; None if it declares none."""
    for attribute in ("dtype", "type", "typecode"):
        element_type = getattr(column, attribute, None)
        if element_type is not None:
            return element_type
    return None


# Significand bits of float types, by a pattern of the type's name in lower case. Some kinds of
# float8 hold powers of two alone.
_FLOAT_BITS_BY_TYPE_PATTERN = (
    (r"float[48]", 1),
    (r"bfloat16", 8),
    (r"float16|halffloat", 11),
    (r"float32|^float(\[pyarrow\])?$|values(=|: )float[,>]|^f$", 24),
)


def _count_float_bits(element_type: object) -> int:
    """Return the significand bits of an element type's floats: integers below 2^bits are exact in
    it. They are 53 (double precision) for every type that `_FLOAT_BITS_BY_TYPE_PATTERN` does not
    name; a categorical type has those of its categories.
    """
    categories = getattr(element_type, "categories", None)
    type_name = str(getattr(categories, "dtype", element_type)).lower()
    for pattern, float_bits in _FLOAT_BITS_BY_TYPE_PATTERN:
        if re.search(pattern, type_name):
            return float_bits
    return _DOUBLE_BITS


def _split_levels(column: Any) -> list[Any] | None:
    """Return the columns of a MultiIndex or a structured array; None for a single column."""
    if hasattr(column, "get_level_values"):  # an index of pandas
        levels = [column.get_level_values(level) for level in range(column.nlevels)]
        return levels if len(levels) > 1 else None
    dtype = getattr(column, "dtype", None)
    names = getattr(dtype, "names", None)  # of the fields of a structured array
    return [column[name] for name in names] if names else None


def _narrow_floats(values: list[Any], float_bits: int) -> list[Any]:
    """Return the cells with Python floats turned back into the NumPy type that their column had
    before `tolist`, so that `_format_float` notices numbers that this type cannot hold exactly.

    `float_bits`: significand bits of the column's floats; other types than float16 and float32 are
    left as they are.
    """
    float_type = {11: np.float16, 24: np.float32}.get(float_bits)
    if float_type is None:
        return values
    return [float_type(cell) if isinstance(cell, float) else cell for cell in values]


_TIME_PATTERN = r"[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]+)?"

_UUID_PATTERN = r"{0}{{8}}-{0}{{4}}-{0}{{4}}-{0}{{4}}-{0}{{12}}"

FORM_PATTERNS: Mapping[str, re.Pattern[str]] = {
    name: re.compile(form)
    for name, form in (
        ("whole numbers", r"0|-?[1-9][0-9]*"),
        ("numbers with leading zeros or a plus", r"[+-]?[0-9]+"),
        ("numbers with a decimal point", r"[+-]?[0-9]+\.[0-9]*"),
        ("days as 2026-01-31", r"[0-9]{4}-[0-9]{2}-[0-9]{2}"),
        ("moments without a zone", _TIME_PATTERN),
        ("moments in UTC", _TIME_PATTERN + r"\+00:00"),
        ("UUIDs", _UUID_PATTERN.format("[0-9a-f]")),
        ("UUIDs in capitals", _UUID_PATTERN.format("[0-9A-F]")),
        ("other text", r"(?s:.*)"),
    )
}
"""Patterns of ID texts by name; the first that matches counts. Texts of different forms are never
equal."""

_NUMBER_FORMS = {
    "whole numbers",
    "numbers with leading zeros or a plus",
    "numbers with a decimal point",
}

# Advice for two parties whose IDs are all of these forms.
_ADVICE_BY_FORMS = (
    (
        _NUMBER_FORMS,
        (
            "agree on alignment: {normalisation: [unicode_nfc, strip, whole_numbers]}, or make "
            'whole numbers of both, as with .astype("Int64") of numbers'
        ),
    ),
    (
        {"moments without a zone", "moments in UTC"},
        'say the zone of the ones without, as with .dt.tz_localize("Europe/Berlin")',
    ),
    (
        {"days as 2026-01-31", "moments without a zone", "moments in UTC"},
        'write days at both, as with .dt.strftime("%Y-%m-%d")',
    ),
    (
        {"UUIDs", "UUIDs in capitals"},
        "agree on alignment: {normalisation: [unicode_nfc, strip, case_fold]}",
    ),
)

_DEFAULT_ADVICE = (
    "if they are the same column of the same people, write it in one way (docs/alignment.md has "
    "the table of kinds, and rules to agree on); else name another"
)


def require_comparable(texts_by_party: Mapping[str, Iterable[str]]) -> None:
    """Raise DataError if no ID of some party can match an ID of the first party, since none has the
    same form: e.g. one party has whole numbers, the other UUIDs (`FORM_PATTERNS` lists all forms).

    `texts_by_party`: normalised IDs by party, all or a sample; they are read only until a common
    form is found.
    """
    (first_party, first_texts), *other_parties = texts_by_party.items()
    for party, party_texts in other_parties:
        # The next party needs the texts of the first party again; `tee` keeps the few that were
        # read.
        first_texts, texts_to_compare = tee(first_texts)
        first_forms, party_forms = _collect_forms(texts_to_compare, party_texts)
        if first_forms and party_forms and first_forms.isdisjoint(party_forms):
            raise _make_form_error(first_party, first_forms, party, party_forms)


def _collect_forms(
    first_texts: Iterable[str], party_texts: Iterable[str]
) -> tuple[set[tuple[str, ...]], set[tuple[str, ...]]]:
    """Return the forms of two parties' IDs (such as whole numbers; `FORM_PATTERNS`), reading both
    in parallel until they have a form in common or both end.
    """
    first_forms = set[tuple[str, ...]]()
    party_forms = set[tuple[str, ...]]()
    for first_text, party_text in zip_longest(first_texts, party_texts):
        if first_text is not None:
            first_forms.add(_classify_parts(first_text))
        if party_text is not None:
            party_forms.add(_classify_parts(party_text))
        if first_forms & party_forms:
            break
    return first_forms, party_forms


def _classify_parts(text: str) -> tuple[str, ...]:
    """Return the form of each column of an ID: the name of the first pattern of `FORM_PATTERNS`
    that matches (the last pattern matches every text).
    """
    return tuple(
        next(name for name, form in FORM_PATTERNS.items() if form.fullmatch(column_text))
        for column_text in text.split(COLUMN_SEPARATOR)
    )


def _make_form_error(
    first_party: str,
    first_forms: set[tuple[str, ...]],
    party: str,
    party_forms: set[tuple[str, ...]],
) -> DataError:
    """Return the error for two parties whose IDs have no form in common, with the advice that fits
    these forms.

    Args:
        first_party, party: the names of the two parties.
        first_forms, party_forms: the forms of their IDs, a name of `FORM_PATTERNS` for each column.
    """
    form_names = {name for form in first_forms | party_forms for name in form}
    fitting_advice = [advice for forms, advice in _ADVICE_BY_FORMS if form_names <= forms]
    advice = fitting_advice[0] if fitting_advice else _DEFAULT_ADVICE
    first_column_counts = {len(form) for form in first_forms}
    party_column_counts = {len(form) for form in party_forms}
    if first_column_counts.isdisjoint(party_column_counts):
        advice = "name the same columns of IDs at both"
    return DataError(
        f"{party}: its IDs are {_describe_forms(party_forms)}, and those of {first_party} "
        f"{_describe_forms(first_forms)}, so that "
        f"no two can match; {advice}"
    )


def _describe_forms(forms: set[tuple[str, ...]]) -> str:
    """Return at most three forms in words, e.g. "whole numbers or other text"."""
    return " or ".join(sorted(" and ".join(form) for form in forms)[:3])


@runtime_checkable
class IdStream(Protocol):
    """A stream of IDs that are read a piece at a time, each time anew, e.g. from a file."""

    def __len__(self) -> int: ...

    def pieces(self) -> Iterator[Sequence[object]]: ...


SizedIds = Collection[object] | IdStream

IdColumn = Iterable[object] | IdStream
"""IDs of the kinds of `apfed_protocols.ids`, one a row, in any iterable, or an array or column
of any library; or rows of several such columns (tuples, a DataFrame)."""


@dataclass(frozen=True, kw_only=True)
class IdNormalisation:
    """The rules by which IDs become bytes; all parties must agree.

    They hold for the texts of all kinds of IDs (`apfed_protocols.ids`); 7 equals "7" but not
    "07". Of an ID of several columns they hold for each.

    Attributes:
        unicode_nfc: unite the ways in which Unicode writes one letter, e.g. é as one or two.
        case_fold: unite upper and lower case; off by default, many IDs differ in case.
        strip: drop white space at both ends.
        whole_numbers: a text that is a whole number counts as that number, so that 007, 7, +7 and
            7.0 are one ID; off by default, leading zeros may matter.
        drop_punctuation: keep letters, their marks and digits alone, so that DE-123, DE 123 and
            DE123 are one ID; off by default, since 1-23 and 12-3 become one as well. An ID that is
            nothing else is refused.
        date_formats: such as "%d.%m.%Y": dates written so count as 2026-01-31. Each has %d, %m
            and %Y once, with something between them that is no digit.

    Raises:
        LocalProtocolError: formats that are ambiguous, or rules of another type.
    """

    unicode_nfc: bool = True
    case_fold: bool = False
    strip: bool = True
    whole_numbers: bool = False
    date_formats: tuple[str, ...] = ()
    drop_punctuation: bool = False

    def __post_init__(self) -> None:
        """Validate all rules, and turn the date formats into a tuple. Raises LocalProtocolError: a
        rule is no bool, or a date format is ambiguous.
        """
        for rule in ("unicode_nfc", "case_fold", "strip", "whole_numbers", "drop_punctuation"):
            value = getattr(self, rule)
            if type(value) is not bool:
                raise LocalProtocolError(f"{rule}: expected True or False, got {value!r}")
        formats: object = self.date_formats
        if isinstance(formats, str):
            raise LocalProtocolError(f"date_formats takes several, as ({formats!r},)")
        # The class is frozen, so the field is set by `object.__setattr__`.
        object.__setattr__(self, "date_formats", tuple(self.date_formats))
        for form in self.date_formats:
            try:
                check_date_format(form)
            except ValueError as error:
                raise LocalProtocolError(str(error)) from None

    def __str__(self) -> str:
        return " ".join(f"{rule.name}={getattr(self, rule.name)!r}" for rule in fields(self))

    @property
    def encoding(self) -> str:
        """Return the canonical text that parties agree on as `IntersectionAgreement.encoding`."""
        values_by_rule = asdict(self)
        if not self.drop_punctuation:  # who does not use the rule agrees with those who lack it
            del values_by_rule["drop_punctuation"]
        rules = json.dumps(values_by_rule, separators=(",", ":"), ensure_ascii=False)
        return f"ids v1 {rules}"

    def normalise_batch(self, texts: list[str]) -> list[str] | None:
        """Return the normalised text of each ID, as `normalise_text` does, in one quick pass.

        Return None if that is impossible: a text is not ASCII or has several columns, or rules for
        numbers, dates or punctuation apply. The caller then normalises text by text.
        """
        all_characters = "".join(texts)
        has_slow_rules = self.whole_numbers or self.date_formats or self.drop_punctuation
        if has_slow_rules or not all_characters.isascii() or COLUMN_SEPARATOR in all_characters:
            return None
        texts = list(map(str.casefold, texts)) if self.case_fold else texts
        return list(map(str.strip, texts)) if self.strip else texts

    def normalise_text(self, text: str) -> str:
        """Return the text of an ID after all rules, which apply to each of its columns by itself.

        `text`: the texts of the columns, joined by `COLUMN_SEPARATOR`.
        """
        if self.case_fold:
            if self.unicode_nfc:
                # Unicode 3.13, D145: case folding is defined on decomposed letters (NFD).
                text = unicodedata.normalize("NFD", text)
            text = text.casefold()
        if self.unicode_nfc:
            text = unicodedata.normalize("NFC", text)
        columns = text.split(COLUMN_SEPARATOR)
        if self.strip:
            columns = [column.strip() for column in columns]
        if self.whole_numbers or self.date_formats:
            columns = [self._normalise_value(column) for column in columns]
        if self.drop_punctuation:
            columns = [column.translate(_LETTERS_AND_DIGITS) for column in columns]
        return COLUMN_SEPARATOR.join(columns)

    def _normalise_value(self, text: str) -> str:
        """Return the agreed form of a number or a date; return other texts unchanged."""
        if (day := parse_date(text, self.date_formats)) is not None:
            return day.isoformat()
        if self.whole_numbers and len(text) < _MAX_DIGITS and _WHOLE_NUMBER.fullmatch(text):
            return str(int(text.partition(".")[0]))
        return text


class _LettersAndDigits(dict[int, int | None]):
    """A table for `str.translate` that drops every character but letters, their marks and digits,
    filled as characters occur.
    """

    def __missing__(self, code_point: int) -> int | None:
        replacement = code_point if unicodedata.category(chr(code_point))[0] in "LMN" else None
        self[code_point] = replacement
        return replacement


_LETTERS_AND_DIGITS = _LettersAndDigits()


def encode_ids(
    party: str, ids: IdColumn, normalisation: IdNormalisation, *, maximum_ids: int = MAX_IDS
) -> list[bytes]:
    """Return the IDs of `party` as bytes, one a row.

    An encoded ID has the number of its columns, and then the length and bytes of each column, so
    that ("ab", "c") and ("a", "bc") differ.

    Args:
        party: name of the party whose IDs they are, for errors.
        ids: IDs of the kinds of `ID_KINDS` (text, whole numbers, dates, ...), one a row, or rows of
            several columns.
        normalisation: the rules that all parties agreed on.
        maximum_ids: the largest number of IDs that the parties agreed on.

    Raises:
        DataError: IDs are missing, empty, repeated (also if only after normalisation), too
            many or of another type; names the party's rows, never an ID.
    """
    chunks = encode_pieces(party, ids, normalisation)
    encoded_ids = list(chain.from_iterable(chunks))
    try:
        check_ids(party, encoded_ids, maximum_ids)
    except LocalProtocolError as error:
        raise DataError(f"{error} (after normalisation: {normalisation})") from error
    return encoded_ids


def encode_pieces(
    party: str, ids: IdColumn, normalisation: IdNormalisation
) -> Iterator[list[bytes]]:
    """Yield the IDs of `party` as bytes, as `encode_ids` returns them, in chunks of some thousand
    rows.

    `ids`: IDs of the kinds of `ID_KINDS`, one for each row, or rows of several columns.
    `normalisation`: the rules that all parties agreed on.

    Raises DataError: IDs are missing, empty or of another type. Repeated IDs, and too many of them,
    are not noticed here.
    """
    first_row = 0
    for texts in _iter_text_chunks(party, ids):
        ascii_texts = normalisation.normalise_batch(texts)
        if ascii_texts is not None:  # the quick way; a text has as many bytes as characters
            header_by_size = {size: _encode_header(size) for size in set(map(len, ascii_texts))}
            yield [header_by_size[len(text)] + text.encode() for text in ascii_texts]
        else:
            normalised_texts = [normalisation.normalise_text(text) for text in texts]
            if normalisation.drop_punctuation:
                _refuse_empty(party, normalised_texts, first_row)
            yield [
                _frame_id(party, row, text) for row, text in enumerate(normalised_texts, first_row)
            ]
        first_row += len(texts)


def _refuse_empty(party: str, texts: Sequence[str], first_row: int) -> None:
    """Raise DataError, which names rows, if the rule `drop_punctuation`, which drops all characters
    but letters and digits, left a column of an ID empty.

    Args:
        party: name of the party, for the error.
        texts: normalised IDs, the columns of each joined by `COLUMN_SEPARATOR`.
        first_row: number of the row that the first text belongs to.
    """
    empty_rows = [
        row for row, text in enumerate(texts, first_row) if not all(text.split(COLUMN_SEPARATOR))
    ]
    if empty_rows:
        raise DataError(
            f"{party} has {len(empty_rows)} ID(s) without a letter or digit, in row(s) "
            f"{_format_first_rows(empty_rows)}, "
            "of which drop_punctuation leaves nothing; leave these rows out, or give each its ID"
        )


def _encode_header(size: int) -> bytes:
    """Return the bytes that precede a text of `size` bytes in an ID of one column."""
    return b"\0\1" + size.to_bytes(4, "big")


def _frame_id(party: str, row: int, text: str) -> bytes:
    """Encode one ID: the number of its columns (2 bytes), then the length (4 bytes) and the bytes
    of each column.

    Args:
        party, row: where the ID is, for the error.
        text: the normalised texts of its columns, joined by `COLUMN_SEPARATOR`.

    Raises DataError: the ID has more than `_MAX_COLUMNS` columns.
    """
    columns = text.encode().split(COLUMN_SEPARATOR.encode())
    if len(columns) == 1:
        return _encode_header(len(columns[0])) + columns[0]
    if len(columns) > _MAX_COLUMNS:
        raise DataError(
            f"{party}, row {row}: an ID of {len(columns)} columns, at most {_MAX_COLUMNS} are "
            "taken; give one ID a row"
        )
    framed_parts = [len(columns).to_bytes(2, "big")]
    for column in columns:
        framed_parts += (len(column).to_bytes(4, "big"), column)
    return b"".join(framed_parts)


def decode_id(identity: bytes) -> str:
    """Return the text of an encoded ID, the texts of its columns joined by `COLUMN_SEPARATOR`; this
    undoes `encode_ids`.

    `identity`: an ID as `encode_ids` returned it: number of columns (2 bytes), then length (4
    bytes) and bytes of each.
    """
    columns = []
    start = 2  # behind the number of columns
    while start < len(identity):
        text_start = start + 4
        text_end = text_start + int.from_bytes(identity[start:text_start], "big")
        columns.append(identity[text_start:text_end].decode())
        start = text_end
    return COLUMN_SEPARATOR.join(columns)


def check_ids(party: str, ids: Sequence[bytes], maximum_ids: int) -> None:
    """Raise LocalProtocolError if a party's encoded IDs are too many, not bytes, empty or repeated,
    since an intersection would be wrong. The error names rows but never an ID.

    Args:
        party: the party whose IDs they are, for errors.
        ids: IDs as bytes, as `encode_ids` or `encode_pieces` returned them.
        maximum_ids: the largest number of IDs that the parties agreed on.
    """
    if len(ids) > maximum_ids:
        raise LocalProtocolError(
            f"{party} has {len(ids)} IDs, the parties agreed on at most {maximum_ids}"
        )
    ids_of_any_type: Sequence[object] = ids
    rows_of_other_types = list[int]()
    id_types = set(map(type, ids_of_any_type))
    if not id_types <= {bytes}:  # the quick check; rows are looked up only if it fails
        rows_of_other_types = [
            row for row, identity in enumerate(ids_of_any_type) if not isinstance(identity, bytes)
        ]
    if rows_of_other_types:
        type_names = sorted({type(ids[row]).__name__ for row in rows_of_other_types})
        raise LocalProtocolError(
            f"{party} has {len(rows_of_other_types)} ID(s) that are {' or '.join(type_names)}, "
            f"not bytes, in row(s) {_format_first_rows(rows_of_other_types)}; all parties encode "
            "them in the same way"
        )
    if not all(ids):
        empty_rows = [row for row, identity in enumerate(ids) if not identity]
        raise LocalProtocolError(
            f"{party} has {len(empty_rows)} empty ID(s), in row(s) "
            f"{_format_first_rows(empty_rows)}; remove these rows"
        )
    if len(set(ids)) != len(ids):
        raise _make_repeat_error(party, ids)


def _make_repeat_error(party: str, ids: Sequence[bytes]) -> LocalProtocolError:
    """Return the error for IDs some of which are repeated; it names the first repeated rows, each
    with the row where the ID occurs first.
    """
    first_row_by_id: dict[bytes, int] = {}
    repeated_rows = [
        row for row, identity in enumerate(ids) if first_row_by_id.setdefault(identity, row) != row
    ]
    row_pairs = ", ".join(
        f"{row} (as {first_row_by_id[ids[row]]})" for row in repeated_rows[:_MAX_ROWS_SHOWN]
    )
    ellipsis = ", ..." if len(repeated_rows) > _MAX_ROWS_SHOWN else ""
    return LocalProtocolError(
        f"{party} has {len(repeated_rows)} repeated ID(s), in row(s) {row_pairs}{ellipsis}; keep "
        "one row for each ID"
    )


def _format_first_rows(rows: Sequence[int]) -> str:
    """Return the first few row numbers in words, e.g. "3, 7, ..."."""
    text = ", ".join(map(str, rows[:_MAX_ROWS_SHOWN]))
    return text + ", ..." if len(rows) > _MAX_ROWS_SHOWN else text

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
    "EMPTY",
    "FORMS",
    "JOINT",
    "KINDS",
    "MAX_IDS",
    "REFUSALS",
    "IdColumn",
    "IdKind",
    "IdNormalisation",
    "IdReader",
    "IdStream",
    "SizedIds",
    "check_ids",
    "encode_ids",
    "encode_pieces",
    "id_texts",
    "require_comparable",
    "require_one_column_order",
    "text_of",
]

JOINT = "\x1f"
"""Between the parts of an ID of several columns."""
EMPTY = frozenset(
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
_NOBODY = EMPTY | {"NaT"}
_ABSENT = frozenset({"NoneType", "NAType", "NaTType"})  # of pandas, too, which need not be here
# Python refuses to write longer numbers in decimal, unless it is told otherwise.
_MAX_DIGITS = 4000  # Python refuses to read longer numbers, unless it is told otherwise
_HUGE = 10**_MAX_DIGITS
_DOUBLE_BITS = 53
_QUICK_BITS = 64
_ROWS_OF_A_PIECE = 2**16
_ROWS_SHOWN = 5
_COLUMN = "its ID column"
# What datetime, pandas, pyarrow and polars raise of years that there are none of.
_NO_MOMENT = (OverflowError, NotImplementedError, ValueError)
REFUSALS: Mapping[str, tuple[str, str]] = {
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
_WHOLE = re.compile(r"[+-]?[0-9]+(\.0*)?")


class _RefusedError(Exception):
    """A cell that is no ID, with a key of `REFUSALS`."""


def _format_integer(value: Any, bits: int) -> str:
    """Write an integer in decimal; refuse one that Python itself refuses to write."""
    number = int(value)
    if abs(number) >= _HUGE:
        raise _RefusedError("digits")
    return str(number)


def _format_float(value: Any, bits: int) -> str:
    """Write a float that is a whole number as an integer; refuse what is missing, infinite,
    fractional, or beyond the integers that `bits` represent exactly.
    """
    if value != value:
        raise _RefusedError("nobody")
    if value in (np.inf, -np.inf):
        raise _RefusedError("infinite")
    if value != int(value):
        raise _RefusedError("fraction")
    if isinstance(value, np.floating):
        bits = min(bits, np.finfo(value.dtype).nmant + 1)
    if abs(value) >= 2**bits:
        raise _RefusedError("rounded")
    return str(int(value))


def _format_decimal(value: Any, bits: int) -> str:
    """Write a decimal number that is whole as an integer; refuse all others."""
    if value.is_nan():
        raise _RefusedError("nobody")
    if value.is_infinite():
        raise _RefusedError("infinite")
    if value and value.adjusted() >= _MAX_DIGITS:
        raise _RefusedError("digits")
    if value != int(value):
        raise _RefusedError("fraction")
    return str(int(value))


def _format_text(value: Any, bits: int) -> str:
    """Return a text as a plain `str`, whatever its subclass prints."""
    return str.__str__(value)


def _decode_bytes(value: Any, bits: int) -> str:
    """Read bytes as UTF-8."""
    try:
        return bytes(value).decode()
    except UnicodeDecodeError:
        raise _RefusedError("bytes") from None


def _format_date(value: Any, bits: int) -> str:
    """Write a date as 2026-01-31."""
    return str(value.isoformat())


def _format_datetime(value: Any, bits: int) -> str:
    """Write a moment with its time as 2026-01-31 12:00:00, in UTC if it has a time zone."""
    try:
        if value.utcoffset() is not None:
            value = value.astimezone(UTC)
        return str(value.isoformat(sep=" "))
    except _NO_MOMENT:
        raise _RefusedError("moment") from None


def _format_numpy_moment(value: Any, bits: int) -> str:
    """Write a NumPy datetime: the date alone where its unit is a day or longer, else date and time,
    with 6 or 9 digits of a second where it has a fraction.
    """
    if np.isnat(value):
        raise _RefusedError("nobody")
    if np.datetime_data(value.dtype)[0] in ("Y", "M", "W", "D"):
        return str(np.datetime_as_string(value, unit="D"))
    second = value.astype("M8[s]")
    rest = int((value - second) / np.timedelta64(1, "ns"))
    digits = f".{rest:09d}".removesuffix("000") if rest else ""
    return str(second).replace("T", " ") + digits


def _make_refusal(reason: str) -> Callable[[Any, int], str]:
    """Return a formatter that refuses every value, with this key of `REFUSALS`."""

    def refuse_value(value: Any, bits: int) -> str:
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
    """A kind of ID: values of some types, and the text of one.

    Attributes:
        name: in words; written: how its text looks, in words.
        types: of the values; that of a value is looked up along its bases.
        text: of a value, given the bits that its column's floats have.
    """

    name: str
    written: str
    types: tuple[type, ...]
    text: Callable[[Any, int], str] = field(repr=False)


KINDS = (
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

_OF_TYPE = {value_type: kind.text for kind in KINDS for value_type in kind.types}


def _format_other(value: Any, bits: int) -> str:
    """Write a value of a type that `KINDS` does not list: a scalar of pyarrow, or anything that is
    an integer by `__index__`; refuse all else.
    """
    if hasattr(value, "as_py"):  # a scalar of pyarrow
        bits = _count_float_bits(value.type)
        try:
            value = value.as_py()
        except _NO_MOMENT:
            raise _RefusedError("moment") from None
        return _find_formatter(value.__class__)(value, bits)
    try:
        return _format_integer(operator.index(value), bits)
    except TypeError:
        raise _RefusedError("type") from None


@cache
def _find_formatter(kind: type) -> Callable[[Any, int], str]:
    """Return the formatter for a type, looked up along its base classes."""
    if kind.__name__ in _ABSENT:
        return _make_refusal("nobody")
    return next((_OF_TYPE[base] for base in kind.__mro__ if base in _OF_TYPE), _format_other)


class IdReader:
    """A reader that makes texts of one column, piece by piece, and reports all that it refuses.

    Args:
        whose: party and column, for errors.
        place: where a reader finds a row; None: its number.
        strip: drop blanks at both ends, as tables do.
        part: whether it is one of several columns, whose texts are joined.
        rows: whether a tuple or list is a row of several columns, and no cell.
        key: where the column of IDs is named, for remedies.
    """

    def __init__(
        self,
        whose: str,
        *,
        place: Callable[[int], str] | None = None,
        strip: bool = False,
        part: bool = False,
        rows: bool = False,
        key: str = "",
    ) -> None:
        """Make a reader that has read no row yet.

        `whose`: party and column, for errors. `place`: says in words where a reader finds a row;
        None: by its number from 0. `strip`: whether blanks at both ends are dropped, as tables do.
        `part`: whether the column is one of several whose texts are joined.
        """
        self._subject = whose
        self._place = place
        self._strip = strip
        self._part = part
        self._rows = rows
        self._key = f" ({key})" if key else ""
        self._rows_read = 0
        self._refused: dict[str, list[int]] = {}
        self._types = set[str]()

    def convert_column(self, column: Iterable[object]) -> list[str]:
        """Return one text for each row of this piece; they are usable only if `all_taken`.

        Raises DataError: it is no column.
        """
        return [text for piece in self.convert_pieces(column) for text in piece]

    def convert_pieces(self, column: Iterable[object]) -> Iterator[list[str]]:
        """Yield the texts of a column, some thousand rows at a time."""
        values, bits = _list_values(column, self._subject)
        for start in range(0, len(values), _ROWS_OF_A_PIECE):
            yield self._convert_piece(values[start : start + _ROWS_OF_A_PIECE], bits)

    def _convert_piece(self, values: list[Any], bits: int) -> list[str]:
        """Return the texts of some rows: column by column where all cells are of one simple kind,
        else cell by cell.
        """
        first = self._rows_read
        self._rows_read = self._rows_read + len(values)
        wide = self._rows and {*map(type, values)} <= {tuple, list}
        if wide and len({*map(len, values)}) == 1 and len(values[0]) > 1:
            columns = [
                self._convert_uniform(list(cells), part=True) for cells in zip(*values, strict=True)
            ]
            quick = [texts for texts in columns if texts is not None]
            if len(quick) == len(columns):
                return list(map(JOINT.join, zip(*quick, strict=True)))
        elif (texts := self._convert_uniform(values, part=self._part)) is not None:
            return texts
        return [self._convert_row(value, bits, row) for row, value in enumerate(values, first)]

    def _convert_uniform(self, values: list[Any], *, part: bool) -> list[str] | None:
        """Return the texts of cells that are all plain text or all small integers, else None.

        `part`: whether the column is one of several whose texts are joined.
        """
        kinds = {*map(type, values)}
        if kinds == {str} and _is_valid("".join(values)):
            if part and any(JOINT in text for text in values):
                return None
            bare = list(map(str.strip, values))
            return (bare if self._strip else values) if _NOBODY.isdisjoint(bare) else None
        if kinds == {int} and max(map(int.bit_length, values)) <= _QUICK_BITS:
            return list(map(str, values))
        return None

    @property
    def all_taken(self) -> bool:
        """Return whether no row was refused so far."""
        return not self._refused

    def require_no_refusals(self) -> None:
        """Raise DataError if cells were refused: one sentence for each reason, with rows and
        remedy.
        """
        if not self._refused:
            return
        sentences = []
        for reason in sorted(self._refused, key=list(REFUSALS).index):
            problem, remedy = REFUSALS[reason]
            problem += f" ({', '.join(sorted(self._types))})" if reason == "type" else ""
            rows = self._refused[reason]
            remedy = remedy.format(key=self._key)
            sentences.append(
                f"{problem} in {len(rows)} rows, first in {self._describe_places(rows)}; {remedy}"
            )
        raise DataError(f"{self._subject} {'. It '.join(sentences)}")

    def _describe_places(self, rows: Sequence[int]) -> str:
        """Return where the first few refused rows are, in words."""
        first_rows = rows[:_ROWS_SHOWN]
        if self._place:
            return ", ".join(map(self._place, first_rows))
        return f"row{'s' if len(first_rows) > 1 else ''} {', '.join(map(str, first_rows))} (from 0)"

    def _convert_row(self, value: Any, bits: int, row: int) -> str:
        """Return the text of one row, its columns joined; record a refusal and return "" where
        there is none.
        """
        try:
            if not (self._rows and isinstance(value, tuple | list) and value):
                return self._convert_cell(value, bits, part=self._part)
            several = len(value) > 1
            return JOINT.join([self._convert_cell(cell, bits, part=several) for cell in value])
        except _RefusedError as refused:
            self._refused.setdefault(str(refused), []).append(row)
            self._types.add(type(value).__name__)
            return ""

    def _convert_cell(self, value: Any, bits: int, *, part: bool) -> str:
        """Return the text of one cell; refuse what is empty, no valid Unicode, or contains the
        joint.

        `part`: whether the column is one of several whose texts are joined.
        """
        text = _find_formatter(value.__class__)(value, bits)
        bare = text.strip()
        if bare in _NOBODY:
            raise _RefusedError("nobody")
        if not _is_valid(text):
            raise _RefusedError("unicode")
        if part and JOINT in text:
            raise _RefusedError("joint")
        return bare if self._strip else text


def id_texts(
    column: Iterable[object],
    *,
    party: str,
    subject: str = _COLUMN,
    place: Callable[[int], str] | None = None,
    strip: bool = False,
    part: bool = False,
    rows: bool = False,
    key: str = "",
) -> list[str]:
    """Return the text of each row of a column of IDs.

    The column is any iterable, or one of numpy, pandas, polars or pyarrow; `party` and `subject`
    say whose it is and what it is called, for errors; the rest is as of `IdReader`.

    `place`: says in words where a reader finds a row; None: by its number from 0. `strip`: whether
    blanks at both ends are dropped, as tables do.
    """
    reader = IdReader(
        f"{party}: {subject}", place=place, strip=strip, part=part, rows=rows, key=key
    )
    texts = reader.convert_column(column)
    reader.require_no_refusals()
    return texts


def _iter_text_pieces(party: str, ids: Any) -> Iterator[list[str]]:
    """Yield the texts of IDs some thousand rows at a time; of several columns joined."""
    refuse_ambiguous_index(ids, f"{party}: {_COLUMN}", error=DataError)
    columns = _split_columns(ids)
    if columns is not None:
        read = (
            id_texts(cells, party=party, subject=f"column {name!r}", part=len(columns) > 1)
            for name, cells in columns
        )
        yield list(map(JOINT.join, zip(*read, strict=True)))
        return
    reader = IdReader(f"{party}: {_COLUMN}", rows=True)
    for column in ids.pieces() if hasattr(ids, "pieces") else (ids,):
        for texts in reader.convert_pieces(column):
            if reader.all_taken:
                yield texts
    reader.require_no_refusals()


def require_one_column_order(ids_by_party: Mapping[str, Any]) -> None:
    """Refuse frames of IDs of which one has the columns of another in another order."""
    names_by_party = {
        party: names
        for party, ids in ids_by_party.items()
        if (names := column_names(ids)) is not None
    }
    for party, names in names_by_party.items():
        for other, others in names_by_party.items():
            if names != others and sorted(names) == sorted(others):
                raise DataError(
                    f"{party}: the columns of its IDs are {', '.join(names)}, and those of {other} "
                    f"{', '.join(others)}; IDs are compared column by column: give all in one order"
                )


def _split_columns(ids: Any) -> list[tuple[str, Any]] | None:
    """Return names and columns of a pandas, polars or pyarrow frame; None for anything else."""
    if hasattr(ids, "itertuples"):  # pandas
        return [(str(name), column) for name, column in ids.items()]
    if hasattr(ids, "get_columns"):  # polars
        return [(column.name, column) for column in ids.get_columns()]
    if hasattr(ids, "column_names"):  # pyarrow
        return list(zip(ids.column_names, ids.columns, strict=True))
    return None


def _list_values(ids: Any, subject: str) -> tuple[list[Any], int]:
    """Return the cells of a column as a list, and the number of bits of its floats.

    `subject`: what errors call the column.

    Raises DataError: the type is that of no column.
    """
    if isinstance(ids, list):
        return ids, _DOUBLE_BITS
    if (parts := _split_levels(ids)) is not None:
        cells = [_narrow_floats(*_list_values(part, subject)) for part in parts]
        return list(zip(*cells, strict=True)), _DOUBLE_BITS
    bits = _count_float_bits(
        next(
            (
                kind
                for name in ("dtype", "type", "typecode")
                if (kind := getattr(ids, name, None)) is not None
            ),
            None,
        )
    )
    if isinstance(ids, np.ndarray) and ids.dtype.kind in "mM" and ids.ndim == 1:
        return list(ids), bits  # as a list they would be numbers
    for listing in ("to_pylist", "tolist", "to_list"):
        if hasattr(ids, listing):
            try:
                ids = getattr(ids, listing)()
            except _NO_MOMENT as error:
                problem, remedy = REFUSALS["moment"]
                raise DataError(f"{subject} {problem}; {remedy}") from error
            break
    if isinstance(ids, Mapping):
        raise DataError(
            f"{subject} is of type {type(ids).__name__}, of which the keys or a value may be "
            "meant; give ids.keys(), ids.values() or one of its values"
        )
    if isinstance(ids, str | bytes | bytearray | memoryview) or not isinstance(ids, Iterable):
        raise DataError(
            f"{subject} is of type {type(ids).__name__}; give a list, array, Series or DataFrame "
            "with one ID a row"
        )
    return list(ids), bits


# By what a type is called; of float8 there are kinds that hold powers of two alone.
_BITS = (
    (r"float[48]", 1),
    (r"bfloat16", 8),
    (r"float16|halffloat", 11),
    (r"float32|^float(\[pyarrow\])?$|values(=|: )float[,>]|^f$", 24),
)


def _count_float_bits(kind: object) -> int:
    """Return the number of bits of a type's floats, or of its categories'."""
    kind = getattr(getattr(kind, "categories", None), "dtype", kind)
    return next((bits for name, bits in _BITS if re.search(name, str(kind).lower())), _DOUBLE_BITS)


def _split_levels(ids: Any) -> list[Any] | None:
    """Return the columns of a MultiIndex or a structured array; None for a single column."""
    if hasattr(ids, "get_level_values"):  # an index of pandas
        levels = [ids.get_level_values(level) for level in range(ids.nlevels)]
        return levels if len(levels) > 1 else None
    names = getattr(getattr(ids, "dtype", None), "names", None)  # a structured array
    return [ids[name] for name in names] if names else None


def _narrow_floats(values: list[Any], bits: int) -> list[Any]:
    """Return floats in the type that their column had, so that too large ones are noticed."""
    narrow = {11: np.float16, 24: np.float32}.get(bits)
    if narrow is None:
        return values
    return [narrow(cell) if isinstance(cell, float) else cell for cell in values]


_TIME = r"[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]+)?"

_HEX = r"{0}{{8}}-{0}{{4}}-{0}{{4}}-{0}{{4}}-{0}{{12}}"

FORMS: Mapping[str, re.Pattern[str]] = {
    name: re.compile(form)
    for name, form in (
        ("whole numbers", r"0|-?[1-9][0-9]*"),
        ("numbers with leading zeros or a plus", r"[+-]?[0-9]+"),
        ("numbers with a decimal point", r"[+-]?[0-9]+\.[0-9]*"),
        ("days as 2026-01-31", r"[0-9]{4}-[0-9]{2}-[0-9]{2}"),
        ("moments without a zone", _TIME),
        ("moments in UTC", _TIME + r"\+00:00"),
        ("UUIDs", _HEX.format("[0-9a-f]")),
        ("UUIDs in capitals", _HEX.format("[0-9A-F]")),
        ("other text", r"(?s:.*)"),
    )
}
"""Patterns of ID texts by name; the first that matches counts. Texts of different forms are never
equal."""

_NUMBERS = {"whole numbers", "numbers with leading zeros or a plus", "numbers with a decimal point"}

_COMPARED = (
    (
        _NUMBERS,
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

_COMPARED_ELSE = (
    "if they are the same column of the same people, write it in one way (docs/alignment.md has "
    "the table of kinds, and rules to agree on); else name another"
)


def require_comparable(texts: Mapping[str, Iterable[str]]) -> None:
    """Refuse parties whose IDs, normalised, are of kinds of which none matches the first's.

    `texts`: some normalised IDs by party.
    """
    (first, first_texts), *others = texts.items()
    for party, texts_of_party in others:
        first_texts, compared = tee(first_texts)  # few are read, of however many
        first_looks = set[tuple[str, ...]]()
        party_looks = set[tuple[str, ...]]()
        for first_text, party_text in zip_longest(compared, texts_of_party):
            first_looks |= set() if first_text is None else {_classify_parts(first_text)}
            party_looks |= set() if party_text is None else {_classify_parts(party_text)}
            if first_looks & party_looks:
                break
        else:
            if first_looks and party_looks:
                _refuse_to_compare(first, first_looks, party, party_looks)


def _classify_parts(text: str) -> tuple[str, ...]:
    """Return the form of each part of an ID, by the first pattern of `FORMS` that matches."""
    return tuple(
        next(name for name, form in FORMS.items() if form.fullmatch(part))
        for part in text.split(JOINT)
    )


def _refuse_to_compare(
    first: str, first_looks: set[tuple[str, ...]], party: str, party_looks: set[tuple[str, ...]]
) -> None:
    """Raise DataError for two parties whose IDs have no form in common, with the advice
    that fits.

    `first`: the two parties.
    """
    names = {name for look in first_looks | party_looks for name in look}
    remedy = next((advice for kinds, advice in _COMPARED if names <= kinds), _COMPARED_ELSE)
    if {len(look) for look in first_looks}.isdisjoint(len(look) for look in party_looks):
        remedy = "name the same columns of IDs at both"
    raise DataError(
        f"{party}: its IDs are {_describe_looks(party_looks)}, and those of {first} "
        f"{_describe_looks(first_looks)}, so that "
        f"no two can match; {remedy}"
    )


def _describe_looks(looks: set[tuple[str, ...]]) -> str:
    """Return up to three forms in words."""
    return " or ".join(sorted(" and ".join(look) for look in looks)[:3])


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
        """Raise LocalProtocolError for a rule that is no bool, or an ambiguous date format."""
        for rule in ("unicode_nfc", "case_fold", "strip", "whole_numbers", "drop_punctuation"):
            if type(value := getattr(self, rule)) is not bool:
                raise LocalProtocolError(f"{rule}: expected True or False, got {value!r}")
        formats: object = self.date_formats
        if isinstance(formats, str):
            raise LocalProtocolError(f"date_formats takes several, as ({formats!r},)")
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
        agreed = asdict(self)
        if not self.drop_punctuation:  # who does not use the rule agrees with those who lack it
            del agreed["drop_punctuation"]
        rules = json.dumps(agreed, separators=(",", ":"), ensure_ascii=False)
        return f"ids v1 {rules}"

    def normalise_batch(self, texts: list[str]) -> list[str] | None:
        """Return the result of `normalise_text` for each text in one pass; None if each must be
        normalised by itself.

        Each must be read alone where one is not ASCII or has several columns, and where rules for
        numbers, dates or punctuation apply.
        """
        together = "".join(texts)
        rewrites = self.whole_numbers or self.date_formats or self.drop_punctuation
        if rewrites or not together.isascii() or JOINT in together:
            return None
        texts = list(map(str.casefold, texts)) if self.case_fold else texts
        return list(map(str.strip, texts)) if self.strip else texts

    def normalise_text(self, text: str) -> str:
        """Return the text of an ID after all rules, each of its columns by itself."""
        if self.case_fold:
            # Unicode 3.13, D145: folding looks at letters taken apart
            text = (unicodedata.normalize("NFD", text) if self.unicode_nfc else text).casefold()
        if self.unicode_nfc:
            text = unicodedata.normalize("NFC", text)
        parts = text.split(JOINT)
        if self.strip:
            parts = [part.strip() for part in parts]
        if self.whole_numbers or self.date_formats:
            parts = list(map(self._normalise_value, parts))
        if self.drop_punctuation:
            parts = [part.translate(_LETTERS_AND_DIGITS) for part in parts]
        return JOINT.join(parts)

    def _normalise_value(self, text: str) -> str:
        """Return the agreed form of a number or a date; return other texts unchanged."""
        if (day := parse_date(text, self.date_formats)) is not None:
            return day.isoformat()
        if self.whole_numbers and len(text) < _MAX_DIGITS and _WHOLE.fullmatch(text):
            return str(int(text.partition(".")[0]))
        return text


class _LettersAndDigits(dict[int, int | None]):
    """A table for `str.translate` that drops what is no letter, no mark of one and no digit."""

    def __missing__(self, code: int) -> int | None:
        replacement = code if unicodedata.category(chr(code))[0] in "LMN" else None
        self[code] = replacement
        return replacement


_LETTERS_AND_DIGITS = _LettersAndDigits()


def encode_ids(
    party: str, ids: IdColumn, normalisation: IdNormalisation, *, maximum_ids: int = MAX_IDS
) -> list[bytes]:
    """Return the IDs of `party` as bytes, one a row.

    An ID is the number of its columns and the length and bytes of each, so that
    ("ab", "c") and ("a", "bc") differ.

    `maximum_ids`: the largest number of IDs that a party may have.

    Raises:
        DataError: IDs are missing, empty, repeated (also if only after normalisation), too
            many or of another type; names the party's rows, never an ID.
    """
    pieces = encode_pieces(party, ids, normalisation)
    canonical = list(chain.from_iterable(pieces))
    try:
        check_ids(party, canonical, maximum_ids)
    except LocalProtocolError as error:
        raise DataError(f"{error} (after normalisation: {normalisation})") from error
    return canonical


def encode_pieces(
    party: str, ids: IdColumn, normalisation: IdNormalisation
) -> Iterator[list[bytes]]:
    """Yield the IDs of `party` as `encode_ids` does, some thousand rows at a time. Raises
    DataError: as `encode_ids`, but for repeated IDs and their number, which no piece shows.
    """
    first = 0
    for texts in _iter_text_pieces(party, ids):
        plain = normalisation.normalise_batch(texts)
        if plain is not None:
            heads = {size: _encode_head(size) for size in {*map(len, plain)}}
            yield [heads[len(text)] + text.encode() for text in plain]
        else:
            united = [normalisation.normalise_text(text) for text in texts]
            if normalisation.drop_punctuation:
                _refuse_empty(party, united, first)
            yield [_frame_id(party, row, text) for row, text in enumerate(united, first)]
        first += len(texts)


def _refuse_empty(party: str, texts: Sequence[str], first: int) -> None:
    """Raise DataError, which names rows, if an ID has a column of which the rules leave nothing.

    `first`: number of the first of these rows.
    """
    empty = [row for row, text in enumerate(texts, first) if not all(text.split(JOINT))]
    if empty:
        raise DataError(
            f"{party} has {len(empty)} ID(s) without a letter or digit, in row(s) "
            f"{_format_first_rows(empty)}, "
            "of which drop_punctuation leaves nothing; leave these rows out, or give each its ID"
        )


def _encode_head(size: int) -> bytes:
    """Return the bytes before a text of `size` bytes in an ID of one column."""
    return b"\0\1" + size.to_bytes(4, "big")


def _frame_id(party: str, row: int, text: str) -> bytes:
    """Return the bytes of one ID: number of columns, then length and bytes of each.

    `row`: the text of each column.
    """
    parts = text.encode().split(b"\x1f")
    if len(parts) == 1:
        return _encode_head(len(parts[0])) + parts[0]
    if len(parts) > _MAX_COLUMNS:
        raise DataError(
            f"{party}, row {row}: an ID of {len(parts)} columns, at most {_MAX_COLUMNS} are "
            "taken; give one ID a row"
        )
    framed = [len(parts).to_bytes(2, "big")]
    for part in parts:
        framed += (len(part).to_bytes(4, "big"), part)
    return b"".join(framed)


def text_of(identity: bytes) -> str:
    """Return the text of an encoded ID, its columns joined; the inverse of `encode_ids`.

    `identity`: bytes from `encode_ids`.
    """
    parts = []
    start = 2
    while start < len(identity):
        end = start + 4 + int.from_bytes(identity[start : start + 4], "big")
        parts.append(identity[start + 4 : end].decode())
        start = end
    return JOINT.join(parts)


def check_ids(me: str, ids: Sequence[bytes], maximum_ids: int) -> None:
    """Refuse a set that an intersection would get wrong; names rows, never an ID.

    `maximum_ids`: the largest number of IDs that a party may have.
    """
    if len(ids) > maximum_ids:
        raise LocalProtocolError(
            f"{me} has {len(ids)} IDs, the parties agreed on at most {maximum_ids}"
        )
    values: Sequence[object] = ids
    others = list[int]()
    if not set(map(type, values)) <= {bytes}:  # quick to tell; in which rows is looked up only then
        others = [row for row, identity in enumerate(values) if not isinstance(identity, bytes)]
    if others:
        kinds = sorted({type(ids[row]).__name__ for row in others})
        raise LocalProtocolError(
            f"{me} has {len(others)} ID(s) that are {' or '.join(kinds)}, not bytes, in row(s) "
            f"{_format_first_rows(others)}; all parties encode them in the same way"
        )
    if not all(ids):
        empty = [row for row, identity in enumerate(ids) if not identity]
        raise LocalProtocolError(
            f"{me} has {len(empty)} empty ID(s), in row(s) {_format_first_rows(empty)}; remove "
            "these rows"
        )
    if len(set(ids)) == len(ids):
        return
    first_row: dict[bytes, int] = {}
    repeats = [
        row for row, identity in enumerate(ids) if first_row.setdefault(identity, row) != row
    ]
    pairs = ", ".join(f"{row} (as {first_row[ids[row]]})" for row in repeats[:_ROWS_SHOWN])
    ellipsis = ", ..." if len(repeats) > _ROWS_SHOWN else ""
    raise LocalProtocolError(
        f"{me} has {len(repeats)} repeated ID(s), in row(s) {pairs}{ellipsis}; keep one row for "
        "each ID"
    )


def _format_first_rows(rows: Sequence[int]) -> str:
    """Return the first few row numbers."""
    text = ", ".join(map(str, rows[:_ROWS_SHOWN]))
    return text + ", ..." if len(rows) > _ROWS_SHOWN else text

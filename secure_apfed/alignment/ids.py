"""IDs as people have them, and the bytes that all parties make of them.

Run by: each party on its own IDs, before any protocol.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from functools import lru_cache
from itertools import chain, islice
from typing import Protocol, runtime_checkable

import numpy as np
from pydantic import field_validator

from protocols.errors import LocalProtocolError
from protocols.psi.interface import check_ids
from secure_apfed.alignment.id_files import JOINT
from secure_apfed.errors import DataError
from secure_apfed.settings import Settings

__all__ = ["IdColumn", "IdNormalisation", "IdStream", "encode_ids", "encode_pieces"]

_MOST_COLUMNS = 2**16 - 1
# Python refuses to write longer numbers in decimal, unless it is told otherwise.
_MOST_DIGITS = 4000
_HUGE = 10**_MOST_DIGITS
_ROWS_OF_A_PIECE = 2**16
_FIELD = re.compile("(%[dmY])")
_WHOLE = re.compile(r"[+-]?[0-9]+(\.0*)?")


@runtime_checkable
class _Column(Protocol):
    """A NumPy array or a pandas Series."""

    def __len__(self) -> int: ...

    def tolist(self) -> list[object]: ...


@runtime_checkable
class _Table(Protocol):
    """A pandas DataFrame: one ID column each."""

    def __len__(self) -> int: ...

    def itertuples(self, index: bool, name: None) -> Iterable[tuple[object, ...]]: ...


@runtime_checkable
class IdStream(Protocol):
    """IDs that are read a piece at a time, each time anew, e.g. from a file."""

    def __len__(self) -> int: ...

    def pieces(self) -> Iterator[Sequence[tuple[object, ...]]]: ...


IdColumn = Sequence[object] | _Column | _Table | IdStream
"""IDs as str, bytes or int, one a row; or rows of several such columns (tuples, a DataFrame)."""


class IdNormalisation(Settings):
    """How IDs become bytes; all parties must agree.

    Numbers count as their decimal digits, so 7 equals "7" but not "07". Bytes are taken as
    they are. The rules below hold for text.

    Attributes:
        unicode_nfc: unite the ways in which Unicode writes one letter, e.g. é as one or two.
        case_fold: unite upper and lower case; off by default, many IDs differ in case.
        strip: drop white space at both ends.
        whole_numbers: a text that is a whole number counts as that number, so that 007, 7, +7 and
            7.0 are one ID; off by default, leading zeros may matter.
        date_formats: such as "%d.%m.%Y": dates written so count as 2026-01-31. Each has %d, %m
            and %Y once, with something between them that is no digit.
    """

    unicode_nfc: bool = True
    case_fold: bool = False
    strip: bool = True
    whole_numbers: bool = False
    date_formats: tuple[str, ...] = ()

    @field_validator("date_formats")
    @classmethod
    def _are_unambiguous(cls, formats: tuple[str, ...]) -> tuple[str, ...]:
        for form in formats:
            parts = _FIELD.findall(form)
            between = [text for text in _FIELD.split(form)[2:-1:2] if text]
            plain = not re.search(r"[%\d]", _FIELD.sub("", form))
            if sorted(parts) != ["%Y", "%d", "%m"] or len(between) != 2 or not plain:
                raise ValueError(
                    f"date_formats: {form!r} must have %d, %m and %Y once, and between them "
                    "something that is no digit, as in %d.%m.%Y"
                )
            if form == "%Y-%d-%m":
                raise ValueError("date_formats: %Y-%d-%m reads like 2026-01-31, which is a date")
        return formats

    def text(self, text: str) -> str:
        """Return the agreed form of one text."""
        if self.case_fold:
            # Unicode 3.13, D145: folding looks at letters taken apart
            text = (unicodedata.normalize("NFD", text) if self.unicode_nfc else text).casefold()
        if self.unicode_nfc:
            text = unicodedata.normalize("NFC", text)
        text = text.strip() if self.strip else text
        if self.whole_numbers or self.date_formats:
            text = JOINT.join(map(self._value, text.split(JOINT)))
        return text

    def _value(self, text: str) -> str:
        """The agreed form of a number or a date; other texts stay."""
        for pattern in _patterns(self.date_formats):
            if found := pattern.fullmatch(text):
                try:
                    return date(*(int(found[field]) for field in "Ymd")).isoformat()
                except ValueError:  # such as the 31st of February
                    continue
        if self.whole_numbers and len(text) < _MOST_DIGITS and _WHOLE.fullmatch(text):
            return str(int(text.partition(".")[0]))
        return text


@lru_cache
def _patterns(formats: tuple[str, ...]) -> tuple[re.Pattern[str], ...]:
    """One of each format; what is a date already is none of them."""
    digits = {"%d": "(?P<d>[0-9]{1,2})", "%m": "(?P<m>[0-9]{1,2})", "%Y": "(?P<Y>[0-9]{4})"}
    return tuple(
        re.compile("".join(digits.get(part) or re.escape(part) for part in _FIELD.split(form)))
        for form in formats
    )


def encode_ids(
    party: str, ids: IdColumn, normalisation: IdNormalisation, *, maximum_ids: int
) -> list[bytes]:
    """Return the IDs of `party` as bytes, one a row.

    An ID is the number of its columns and the length and bytes of each, so that
    ("ab", "c") and ("a", "bc") differ.

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
    """Yield the IDs of `party` as `encode_ids` does, some thousand rows at a time.

    Raises:
        DataError: as `encode_ids`, but for repeated IDs and their number, which no piece shows.
    """
    rows, first = iter(_rows(party, ids)), 0
    while piece := list(islice(rows, _ROWS_OF_A_PIECE)):
        yield _encode(party, piece, first, normalisation)
        first += len(piece)


def _encode(
    party: str, rows: Sequence[tuple[object, ...]], first: int, normalisation: IdNormalisation
) -> list[bytes]:
    """Encode rows of which the first has this number."""
    canonical: list[bytes] = []
    empty: list[int] = []
    for row, columns in enumerate(rows, first):
        if len(columns) > _MOST_COLUMNS:
            raise DataError(
                f"{party}, row {row}: an ID of {len(columns)} columns, at most {_MOST_COLUMNS} "
                "are taken; give one ID a row"
            )
        parts = [_part(party, row, value, normalisation) for value in columns]
        if not any(parts):
            empty.append(row)
        framed = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        canonical.append(len(parts).to_bytes(2, "big") + framed)
    if empty:
        shown = ", ".join(map(str, empty[:5])) + (", ..." if len(empty) > 5 else "")
        raise DataError(
            f"{party} has {len(empty)} empty ID(s), in row(s) {shown}; remove these rows"
        )
    return canonical


def _rows(party: str, ids: IdColumn) -> Iterable[tuple[object, ...]]:
    if isinstance(ids, IdStream):
        return chain.from_iterable(ids.pieces())
    if isinstance(ids, _Table):
        return ids.itertuples(index=False, name=None)
    values = ids.tolist() if isinstance(ids, _Column) else ids
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise DataError(
            f"the IDs of {party} are a {type(ids).__name__}; give a list, array, Series or "
            "DataFrame with one ID a row"
        )
    return (tuple(row) if isinstance(row, tuple | list) else (row,) for row in values)


def _part(party: str, row: int, value: object, normalisation: IdNormalisation) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        if abs(int(value)) >= _HUGE:
            raise DataError(
                f"{party}, row {row}: an ID is a number of more than {_MOST_DIGITS} digits; "
                "turn it into text first"
            )
        return str(int(value)).encode()
    if value is None:
        return b""
    if not isinstance(value, str):
        raise DataError(
            f"{party}, row {row}: an ID is str, bytes or int, got {type(value).__name__}; "
            "numbers with a decimal point or missing values must become text first"
        )
    try:
        return normalisation.text(value).encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{party}, row {row}: the ID is not valid Unicode text") from error

r"""IDs as people have them, and the bytes that all parties make of them.

Run by: each party on its own IDs, before any protocol.

Example:
    >>> encode_ids("bank", ["Ann ", 7], IdNormalisation(case_fold=True))
    [b'\x00\x01\x00\x00\x00\x03ann', b'\x00\x01\x00\x00\x00\x017']
"""

import json
import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import date
from functools import lru_cache
from itertools import chain
from typing import Protocol, runtime_checkable

from apfed_protocols.errors import DataError, LocalProtocolError
from apfed_protocols.id_kinds import JOINT, text_pieces

__all__ = [
    "MOST_IDS",
    "IdColumn",
    "IdNormalisation",
    "IdStream",
    "SizedIds",
    "check_ids",
    "encode_ids",
    "encode_pieces",
    "text_of",
]  # fmt: skip

MOST_IDS = 10_000_000
"""The largest set that an intersection takes, unless the parties agree on another."""

_MOST_COLUMNS = 2**16 - 1
_ROWS_SHOWN = 5
_MOST_DIGITS = 4000  # Python refuses to read longer numbers, unless it is told otherwise
_FIELD = re.compile("(%[dmY])")
_WHOLE = re.compile(r"[+-]?[0-9]+(\.0*)?")


@runtime_checkable
class IdStream(Protocol):
    """IDs that are read a piece at a time, each time anew, e.g. from a file."""

    def __len__(self) -> int: ...

    def pieces(self) -> Iterator[Sequence[object]]: ...


SizedIds = Collection[object] | IdStream
IdColumn = Iterable[object] | IdStream
"""IDs of the kinds of `apfed_protocols.id_kinds`, one a row, in any iterable, or an array or column
of any library; or rows of several such columns (tuples, a DataFrame)."""


@dataclass(frozen=True, kw_only=True)
class IdNormalisation:
    """How IDs become bytes; all parties must agree.

    They hold for the texts of all kinds of IDs (`apfed_protocols.id_kinds`); 7 equals "7" but not
    "07". Of an ID of several columns they hold for each.

    Attributes:
        unicode_nfc: unite the ways in which Unicode writes one letter, e.g. é as one or two.
        case_fold: unite upper and lower case; off by default, many IDs differ in case.
        strip: drop white space at both ends.
        whole_numbers: a text that is a whole number counts as that number, so that 007, 7, +7 and
            7.0 are one ID; off by default, leading zeros may matter.
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

    def __post_init__(self) -> None:
        for rule in ("unicode_nfc", "case_fold", "strip", "whole_numbers"):
            if type(given := getattr(self, rule)) is not bool:
                raise LocalProtocolError(f"{rule}: expected True or False, got {given!r}")
        formats: object = self.date_formats
        if isinstance(formats, str):
            raise LocalProtocolError(f"date_formats takes several, as ({formats!r},)")
        object.__setattr__(self, "date_formats", tuple(self.date_formats))
        for form in self.date_formats:
            parts = _FIELD.findall(form)
            between = [text for text in _FIELD.split(form)[2:-1:2] if text]
            plain = not re.search(r"[%\d]", _FIELD.sub("", form))
            if sorted(parts) != ["%Y", "%d", "%m"] or len(between) != 2 or not plain:
                raise LocalProtocolError(
                    f"date_formats: {form!r} must have %d, %m and %Y once, and between them "
                    "something that is no digit, as in %d.%m.%Y"
                )
            if form == "%Y-%d-%m":
                raise LocalProtocolError(
                    "date_formats: %Y-%d-%m reads like 2026-01-31, which is a date"
                )

    def __str__(self) -> str:
        return " ".join(f"{one.name}={getattr(self, one.name)!r}" for one in fields(self))

    @property
    def encoding(self) -> str:
        """What parties agree on as `IntersectionAgreement.encoding`, in canonical text."""
        rules = json.dumps(asdict(self), separators=(",", ":"), ensure_ascii=False)
        return f"ids v1 {rules}"

    def text(self, text: str) -> str:
        """Return the agreed form of one text."""
        if self.case_fold:
            # Unicode 3.13, D145: folding looks at letters taken apart
            text = (unicodedata.normalize("NFD", text) if self.unicode_nfc else text).casefold()
        if self.unicode_nfc:
            text = unicodedata.normalize("NFC", text)
        parts = text.split(JOINT)
        if self.strip:
            parts = [part.strip() for part in parts]
        if self.whole_numbers or self.date_formats:
            parts = list(map(self._value, parts))
        return JOINT.join(parts)

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
    party: str, ids: IdColumn, normalisation: IdNormalisation, *, maximum_ids: int = MOST_IDS
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
    first = 0
    for texts in text_pieces(party, ids):
        yield [
            _framed(party, row, normalisation.text(text)) for row, text in enumerate(texts, first)
        ]
        first += len(texts)


def _framed(party: str, row: int, text: str) -> bytes:
    parts = text.encode().split(b"\x1f")
    if len(parts) == 1:
        return b"\0\1" + len(parts[0]).to_bytes(4, "big") + parts[0]
    if len(parts) > _MOST_COLUMNS:
        raise DataError(
            f"{party}, row {row}: an ID of {len(parts)} columns, at most {_MOST_COLUMNS} are "
            "taken; give one ID a row"
        )
    framed = [len(parts).to_bytes(2, "big")]
    for part in parts:
        framed += (len(part).to_bytes(4, "big"), part)
    return b"".join(framed)


def text_of(identity: bytes) -> str:
    """The text of an ID that was encoded, columns joined."""
    parts, at = [], 2
    while at < len(identity):
        end = at + 4 + int.from_bytes(identity[at : at + 4], "big")
        parts.append(identity[at + 4 : end].decode())
        at = end
    return JOINT.join(parts)


def check_ids(me: str, ids: Sequence[bytes], maximum_ids: int) -> None:
    """Refuse a set that an intersection would get wrong; names rows, never an ID.

    Raises:
        LocalProtocolError: too many IDs, or some of another type, empty or repeated.
    """
    if len(ids) > maximum_ids:
        raise LocalProtocolError(
            f"{me} has {len(ids)} IDs, the parties agreed on at most {maximum_ids}"
        )
    given: Sequence[object] = ids
    others = list[int]()
    if not set(map(type, given)) <= {bytes}:  # quick to tell; in which rows is looked up only then
        others = [row for row, identity in enumerate(given) if not isinstance(identity, bytes)]
    if others:
        kinds = sorted({type(ids[row]).__name__ for row in others})
        raise LocalProtocolError(
            f"{me} has {len(others)} ID(s) that are {' or '.join(kinds)}, not bytes, in row(s) "
            f"{_first(others)}; all parties encode them in the same way"
        )
    if not all(ids):
        empty = [row for row, identity in enumerate(ids) if not identity]
        raise LocalProtocolError(
            f"{me} has {len(empty)} empty ID(s), in row(s) {_first(empty)}; remove these rows"
        )
    if len(set(ids)) == len(ids):
        return
    first_row: dict[bytes, int] = {}
    repeats = [
        row for row, identity in enumerate(ids) if first_row.setdefault(identity, row) != row
    ]
    pairs = ", ".join(f"{row} (as {first_row[ids[row]]})" for row in repeats[:_ROWS_SHOWN])
    more = ", ..." if len(repeats) > _ROWS_SHOWN else ""
    raise LocalProtocolError(
        f"{me} has {len(repeats)} repeated ID(s), in row(s) {pairs}{more}; keep one row for each ID"
    )


def _first(rows: Sequence[int]) -> str:
    shown = ", ".join(map(str, rows[:_ROWS_SHOWN]))
    return shown + ", ..." if len(rows) > _ROWS_SHOWN else shown

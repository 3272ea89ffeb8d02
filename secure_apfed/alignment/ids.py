"""IDs as people have them, and the bytes that all parties make of them.

Run by: each party on its own IDs, before any protocol.
"""

import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import date
from functools import lru_cache
from itertools import chain
from typing import Protocol, runtime_checkable

from pydantic import field_validator

from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.psi.interface import check_ids
from secure_apfed.errors import DataError
from secure_apfed.id_kinds import JOINT, text_pieces
from secure_apfed.settings import Settings

__all__ = [
    "IdColumn",
    "IdNormalisation",
    "IdStream",
    "SizedIds",
    "encode_ids",
    "encode_pieces",
    "text_of",
]  # fmt: skip

_MOST_COLUMNS = 2**16 - 1
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
"""IDs of the kinds of `secure_apfed.id_kinds`, one a row, in any iterable, or an array or column of
any library; or rows of several such columns (tuples, a DataFrame)."""


class IdNormalisation(Settings):
    """How IDs become bytes; all parties must agree.

    They hold for the texts of all kinds of IDs (`secure_apfed.id_kinds`); 7 equals "7" but not
    "07". Of an ID of several columns they hold for each.

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

"""Formats of dates, such as "%d.%m.%Y", and the parsing of texts by them.

Run by: each party on its own texts. IDs and features are read by the same formats.
"""

import re
from collections.abc import Sequence
from datetime import date
from functools import lru_cache

__all__ = ["check_date_format", "parse_date"]

_FIELD_PATTERN = re.compile("(%[dmY])")
_DIGITS_PATTERN_BY_FIELD = {
    "%d": "(?P<d>[0-9]{1,2})",
    "%m": "(?P<m>[0-9]{1,2})",
    "%Y": "(?P<Y>[0-9]{4})",
}


def check_date_format(date_format: str) -> str:
    """Return `date_format`, such as "%d.%m.%Y", unchanged, if dates in it can be
    read in one way only.

    Raises:
        ValueError: the format is ambiguous, or lacks day, month or year.
    """
    date_fields = _FIELD_PATTERN.findall(date_format)
    # The split alternates between texts and fields; the texts between fields are at 2 and 4.
    separators = [text for text in _FIELD_PATTERN.split(date_format)[2:-1:2] if text]
    text_around = _FIELD_PATTERN.sub("", date_format)
    has_digits_or_percent = bool(re.search(r"[%\d]", text_around))
    has_all_fields = sorted(date_fields) == ["%Y", "%d", "%m"]
    if not has_all_fields or len(separators) != 2 or has_digits_or_percent:
        raise ValueError(
            f"date_formats: {date_format!r} must have %d, %m and %Y once, and between them "
            "something that is no digit, as in %d.%m.%Y"
        )
    if date_format == "%Y-%d-%m":
        raise ValueError("date_formats: %Y-%d-%m reads like 2026-01-31, which is a date")
    return date_format


def parse_date(text: str, formats: Sequence[str]) -> date | None:
    """Return the date that a text stands for by the first format that matches it and gives a date
    of the calendar; None if no format does.

    Examples:
        >>> parse_date("31.1.2026", ["%d.%m.%Y"])
        datetime.date(2026, 1, 31)
    """
    for pattern in _compile_formats(tuple(formats)):
        if match := pattern.fullmatch(text):
            try:
                return date(*(int(match[field]) for field in "Ymd"))
            except ValueError:  # such as the 31st of February
                continue
    return None


@lru_cache
def _compile_formats(formats: tuple[str, ...]) -> tuple[re.Pattern[str], ...]:
    """Return a regular expression with the groups d, m and Y for each date format."""
    return tuple(
        re.compile(
            "".join(
                _DIGITS_PATTERN_BY_FIELD.get(part) or re.escape(part)
                for part in _FIELD_PATTERN.split(date_format)
            )
        )
        for date_format in formats
    )

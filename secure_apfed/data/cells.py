"""What the cells of a raw column hold, in one reading for every kind of file and frame.

Run by: a party on its own file. How a column was learnt decides how its cells are read: as numbers,
days, durations or texts. A cell is the same whether it came typed or as the text that a CSV file
has of it, and whatever stands in the cells beside it; what is of another kind is refused. A cell is
empty where it is null or a blank text, or says one of the words that mean empty (`EMPTY`) and are
no categories of its column. Letters: N rows.
"""

import datetime
import decimal
import numbers
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from apfed_protocols.ids import EMPTY
from secure_apfed.errors import DataError

__all__ = [
    "BLANK", "LINES", "RESPELT", "TRUTHS", "are_padded_codes", "cell_text", "days_of",
    "has_measures", "holds_texts", "is_date", "is_duration", "is_empty", "is_numeric",
    "numbers_of", "place_of", "plain_text", "refuse_look_alikes", "spans_of", "texts_of", "typed",
]  # fmt: skip

TRUTHS: Mapping[str, bool] = {
    text: truth for truth in (False, True)
    for text in (str(truth), str(truth).lower(), str(truth).upper())
}  # fmt: skip
"""Texts that are true or false, as programs write them."""

BLANK = frozenset({""})
"""What is empty in every column, whatever was learnt."""

LINES = "lines of the file"
"""Attribute of a frame whose rows are lines of a CSV file."""

_ISO = re.compile(r"\d{4}-\d{2}-\d{2}([T ][\d:.]+(Z|[+-]\d{2}:?\d{2})?)?", re.ASCII)
# As pandas writes durations.
_SPAN = re.compile(r"-?\d+ days?( [+-]?\d{1,2}:\d{2}:\d{2}(\.\d+)?)?", re.ASCII)
_PADDED = r"[+-]?0[0-9]"
# What programs write in several ways: numbers with a fraction or an exponent, times and moments.
_NUMBER = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?(e[+-][0-9]{1,3})?"
_TIME = r"[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]+"
_MOMENT = r"[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9:.]+(Z|[+-][0-9]{2}:?[0-9]{2})?"
RESPELT = rf"-?(0|[1-9][0-9]*)((\.[0-9]+)?e[+-][0-9]{{1,3}}|\.[0-9]*0)|-0(\.0+)?|{_TIME}|{_MOMENT}"
"""Pattern of the texts that `plain_text` may change."""

_DAY = datetime.timedelta(days=1)
_MOSTLY = 0.5
# What a number or a date looks like where nobody reads it as one, and what to write instead.
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
        re.compile(r"\d{1,2}[./-]\d{1,2}[./-]\d{2,4}|\d{4}[/.]\d{1,2}[/.]\d{1,2}"), "2026-01-31",
    ),
}  # fmt: skip


def cell_text(cell: object) -> str:
    """A cell that is not empty, as text; whole numbers without a decimal point.

    A column of whole numbers becomes one of floats as soon as one cell is empty.
    """
    if isinstance(cell, float | np.floating) and float(cell).is_integer():
        return str(int(cell))
    return str(cell).strip()


def holds_texts(column: "pd.Series") -> bool:
    return column.dtype != object and pd.api.types.is_string_dtype(column.dtype)


def place_of(column: "pd.Series | pd.DataFrame", row: int) -> str:
    """Where a reader finds a row: the line of a CSV file, else the row from 0.

    Blank lines of the file, and line breaks within cells, are not counted.
    """
    number = column.index[row]
    if column.attrs.get(LINES):
        return f"line {number + 2}"
    return f"row {number} (from 0)"


def is_numeric(column: "pd.Series") -> bool:
    """Whether a column was read as numbers; true and false are categories."""
    dtype = column.dtype
    return pd.api.types.is_numeric_dtype(dtype) and not pd.api.types.is_bool_dtype(dtype)


def numbers_of(column: "pd.Series", *, source: str) -> NDArray[np.float64]:
    """Return numbers (N,), NaN where a cell is empty; true is 1 and false 0.

    Raises:
        DataError: a cell is none, as a date or a duration; names column, count and first row.
    """
    kind = column.dtype.kind
    if kind in "biuf" and not isinstance(column.dtype, pd.CategoricalDtype):
        return column.to_numpy(dtype=np.float64, na_value=np.nan)
    if holds_texts(column):
        cells = column.str.strip()
        known = ~is_empty(column)
        found = pd.to_numeric(cells.where(known), errors="coerce").to_numpy(np.float64, copy=True)
        left = np.flatnonzero(known & np.isnan(found))
        found[left] = cells.iloc[left].map(TRUTHS).to_numpy(np.float64, na_value=np.nan)
    else:
        known, found = _each(column, _number)
    remedy = "mend them, or declare the column categorical"
    _require_all(column, known, found, "is numeric", "not numbers", remedy, source=source)
    return found


def _require_all(
    column: "pd.Series", known_N: NDArray[np.bool_], found_N: NDArray[np.float64], holds: str,
    none: str, remedy: str, *, source: str,
) -> None:  # fmt: skip
    wrong = np.flatnonzero(known_N & np.isnan(found_N))
    if wrong.size:
        raise DataError(
            f"{source}: column {column.name!r} {holds}, but {wrong.size} cells are {none}, first "
            f"in {place_of(column, wrong[0])}; {remedy}"
        )


def _number(cell: Any) -> float:
    """Of one cell that is not empty; NaN where it is no number."""
    if isinstance(cell, str):
        number = pd.to_numeric(cell, errors="coerce")  # strict where float() takes 1_000
        return float(TRUTHS.get(cell, number))
    if isinstance(cell, (numbers.Real, decimal.Decimal, np.bool_)):
        return float(cell)
    return np.nan


def days_of(column: "pd.Series", *, source: str) -> NDArray[np.float64]:
    """Return days (N,) since 1970-01-01, UTC, with fractions of a day; NaN where a cell is empty.

    What names no time zone is in UTC.

    Raises:
        DataError: a cell is no date in ISO 8601, as a number, or none that there is, such as
            2026-02-30.
    """
    if isinstance(column.dtype, np.dtype | pd.DatetimeTZDtype) and column.dtype.kind == "M":
        moments, known = column, column.notna().to_numpy()
    else:
        cells, empty = _cells(column)
        known = ~empty
        fit = [cell if _is_date(cell) else None for cell in cells]
        moments = pd.Series(fit, index=column.index, dtype=object)
    moments = pd.to_datetime(moments, format="ISO8601", errors="coerce", utc=True)
    # In microseconds: nanoseconds end in 2262, before the 9999-12-31 of an open end.
    since = moments.dt.tz_convert(None).dt.as_unit("us").to_numpy() - np.datetime64(0, "us")
    days = np.asarray(since / np.timedelta64(1, "D"), dtype=np.float64)
    _require_all(column, known, days, "holds dates", "none", "write them as 2026-01-31",
                 source=source)  # fmt: skip
    return days


def spans_of(column: "pd.Series", *, source: str) -> NDArray[np.float64]:
    """Return durations (N,) in days; NaN where a cell is empty.

    Raises:
        DataError: a cell is no duration, as a number, whose unit nobody knows.
    """
    known, found = _each(column, _days)
    remedy = "write them as 3 days 12:00:00"
    _require_all(column, known, found, "holds durations", "none", remedy, source=source)
    return found


def _days(cell: Any) -> float:
    if isinstance(cell, str) and _SPAN.fullmatch(cell):
        cell = pd.to_timedelta(cell, errors="coerce")
    if isinstance(cell, np.timedelta64):
        cell = pd.Timedelta(cell)
    return cell / _DAY if isinstance(cell, datetime.timedelta) else np.nan


def texts_of(column: "pd.Series", *, words: Set[str] = frozenset()) -> list[str | None]:
    """Return a column as texts in Unicode's form NFC, None where a cell is empty.

    Args:
        column: of any type; whole numbers have no decimal point, midnights no time.
        words: of those that mean an empty cell, what is a text here.
    """
    if holds_texts(column):
        found = column.str.strip().tolist()
    elif column.dtype.kind == "f":  # a number in float32 has fewer digits than as Python's float
        found = [cell_text(cell) for cell in column.to_numpy(na_value=np.nan)]
    else:
        found = [_text(cell) for cell in column.tolist()]
    empty = is_empty(column, (EMPTY - words) | BLANK).tolist()
    return [None if none else _nfc(text) for text, none in zip(found, empty, strict=True)]


def _text(cell: Any) -> str:
    if isinstance(cell, bytes):
        return cell.decode(errors="backslashreplace").strip()
    if isinstance(cell, decimal.Decimal) and cell.is_finite():
        return plain_text(format(cell, "f"))
    if isinstance(cell, datetime.datetime) and cell is not pd.NaT:
        return _moment_text(cell)
    return cell_text(cell)


def plain_text(text: str) -> str:
    """A number, a time or a moment in one of its spellings; any other text as it is.

    Digits behind leading zeros, or with an exponent without sign, are codes and no numbers. Moments
    are in UTC where they have a time zone, and a midnight without one is its date.

    Example:
        >>> [plain_text(one) for one in ("1.50", "-0.0", "1e-07", "007", "2026-01-31T00:00:00.000")]
        ['1.5', '0', '0.0000001', '007', '2026-01-31']
    """
    if not re.fullmatch(RESPELT, text):
        return text
    if re.fullmatch(_NUMBER, text):
        whole, _, fraction = format(decimal.Decimal(text), "f").partition(".")
        digits = f"{whole}.{fraction}".rstrip("0").rstrip(".")
        return "0" if digits == "-0" else digits
    if re.fullmatch(_TIME, text):
        return text.rstrip("0").rstrip(".")
    try:
        moment = datetime.datetime.fromisoformat(text)
        return _moment_text(moment.astimezone(datetime.UTC) if moment.tzinfo else moment)
    except (ValueError, OverflowError):  # none that there is, or beyond the years that have one
        return text


def _moment_text(moment: datetime.datetime) -> str:
    midnight = moment.tzinfo is None and moment.time() == datetime.time()
    return moment.date().isoformat() if midnight else moment.isoformat(" ")


def _nfc(text: str) -> str:
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def is_empty(column: "pd.Series", words: Set[str] = EMPTY) -> NDArray[np.bool_]:
    """Whether each cell (N,) is null, or a text that says one of these words."""
    nulls: NDArray[np.bool_] = column.isna().to_numpy(dtype=bool, copy=True)
    if holds_texts(column):
        nulls |= column.str.strip().isin(words).to_numpy(dtype=bool)
    elif column.dtype.kind == "O":
        nulls |= [isinstance(one, str) and one.strip() in words for one in column.tolist()]
    return nulls


def is_date(column: "pd.Series") -> bool:
    """Whether a column holds dates: read as such, or texts in ISO 8601 alone (2026-01-31)."""
    return column.dtype.kind == "M" or _all(column, _is_date)


def is_duration(column: "pd.Series") -> bool:
    """Whether a column holds durations: read as such, or texts like 3 days 12:00:00 alone."""
    return column.dtype.kind == "m" or _all(column, _is_duration)


def has_measures(column: "pd.Series") -> bool:
    return is_numeric(column) or is_date(column) or is_duration(column)


def are_padded_codes(column: "pd.Series") -> bool:
    """Whether its texts all say numbers, and some begin with a zero that a number would lose.

    Such a zero has a digit behind it, also in 01.5, -01 and +0123; 0, 0.5 and -0.5 are numbers.
    """
    if column.dtype.kind not in "OUT" and not holds_texts(column):
        return False
    known = pd.Series([text for text in texts_of(column) if text is not None], dtype=str)
    padded = known.str.match(_PADDED).any()
    return bool(padded and pd.to_numeric(known, errors="coerce").notna().all())


def typed(column: "pd.Series") -> "pd.Series":
    """A column of a CSV file, read as texts, as numbers or truths where it holds nothing else.

    Numbers of which one has a leading zero stay texts. So do words that mean an empty cell, among
    texts.
    """
    texts = column.str.strip()
    known = ~is_empty(column)
    some = texts[known]
    if not len(some):
        return pd.Series(np.nan, index=column.index, name=column.name)
    values = some.map(TRUTHS)
    if values.isna().any():
        values = pd.to_numeric(some, errors="coerce")
        if values.isna().any() or are_padded_codes(some):
            return column
    elif not known.all():
        values = values.astype(object)
    return values.infer_objects() if known.all() else values.reindex(column.index)


def _is_date(cell: Any) -> bool:
    if isinstance(cell, str):
        return _ISO.fullmatch(cell) is not None
    return isinstance(cell, datetime.date | np.datetime64)


def _is_duration(cell: Any) -> bool:
    if isinstance(cell, str):
        return _SPAN.fullmatch(cell) is not None
    return isinstance(cell, datetime.timedelta | np.timedelta64)


def _all(column: "pd.Series", holds: Callable[[Any], bool]) -> bool:
    """Whether this holds of every cell that is not empty, and there is one."""
    if column.dtype.kind in "biufcm":
        return False
    cells, empty = _cells(column)
    known = [cell for cell, none in zip(cells, empty.tolist(), strict=True) if not none]
    return bool(known) and all(map(holds, known))


def _cells(column: "pd.Series") -> tuple[list[Any], NDArray[np.bool_]]:
    """Each cell, a text without blanks at its ends, and (N,) whether it is empty."""
    cells = [
        cell.strip() if isinstance(cell, str) else _text(cell) if isinstance(cell, bytes) else cell
        for cell in column.tolist()
    ]
    return cells, is_empty(column)


def _each(
    column: "pd.Series", read: Callable[[Any], float]
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Which cells are not empty, and each as a number; NaN where it is empty, or none."""
    cells, empty = _cells(column)
    pairs = zip(cells, empty.tolist(), strict=True)
    return ~empty, np.array([np.nan if none else read(cell) for cell, none in pairs], np.float64)


def refuse_look_alikes(column: "pd.Series", *, source: str) -> None:
    """Refuse texts that would become categories, and are mostly numbers or dates to a reader."""
    texts = texts_of(column)
    counts = Counter(text for text in texts if text is not None)
    known = counts.total()
    numbers = pd.to_numeric(pd.Series(list(counts), dtype=str), errors="coerce")
    stray = {text for text, number in zip(counts, numbers, strict=True) if np.isnan(number)}
    strays = sum(counts[text] for text in stray)
    if 0 < strays < (1 - _MOSTLY) * known:
        raise DataError(
            f"{source}: {strays} of {known} cells of column {column.name!r} are text and the rest "
            f"are numbers, first in {_first(texts, stray, column)}; mend them, or list the "
            "column under numeric or categorical"
        )
    for what, (pattern, instead) in _LOOK_ALIKES.items():
        alike = {text for text in counts if pattern.fullmatch(text)}
        cells = sum(counts[text] for text in alike)
        if cells > _MOSTLY * known:
            raise DataError(
                f"{source}: {cells} of {known} cells of column {column.name!r} look like "
                f"{what}, first in {_first(texts, alike, column)}; write {instead}, or list the "
                "column under categorical or ignore"
            )


def _first(texts: Sequence[str | None], of: Set[str], column: "pd.Series") -> str:
    return place_of(column, next(row for row, text in enumerate(texts) if text in of))

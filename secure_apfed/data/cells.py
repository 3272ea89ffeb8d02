"""What the cells of a raw column hold: numbers, dates or texts, and texts meant as one of them.

Run by: a party on its own file. Letters: N rows.
"""

import datetime
import re
from collections import Counter
from collections.abc import Mapping, Sequence, Set

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from secure_apfed.data.frames import place_of, to_texts
from secure_apfed.errors import DataError

__all__ = ["days_of", "is_date", "refuse_look_alikes"]

_ISO = re.compile(r"\d{4}-\d{2}-\d{2}([T ][\d:.]+(Z|[+-]\d{2}:?\d{2})?)?")
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


def is_date(column: "pd.Series") -> bool:
    """Whether a column holds dates: read as such, or texts in ISO 8601 alone (2026-01-31)."""
    if pd.api.types.is_datetime64_any_dtype(column.dtype):
        return True
    if pd.api.types.is_numeric_dtype(column.dtype):
        return False
    known = column.dropna().tolist()
    return bool(known) and all(
        isinstance(cell, datetime.date) or (isinstance(cell, str) and _ISO.fullmatch(cell.strip()))
        for cell in known
    )


def days_of(column: "pd.Series", *, source: str) -> NDArray[np.float64]:
    """Return days (N,) since 1970-01-01, UTC, with fractions of a day; NaN where a cell is empty.

    Raises:
        DataError: a cell is no date in ISO 8601, or none that there is, such as 2026-02-30.
    """
    moments = pd.to_datetime(column, format="ISO8601", errors="coerce", utc=True)
    wrong = np.flatnonzero(moments.isna().to_numpy() & column.notna().to_numpy())
    if wrong.size:
        raise DataError(
            f"{source}: column {column.name!r} holds dates, but {wrong.size} cells are none, first "
            f"in {place_of(column, wrong[0])}; write them as 2026-01-31"
        )
    # In microseconds: nanoseconds end in 2262, before the 9999-12-31 of an open end.
    since = moments.dt.tz_convert(None).dt.as_unit("us").to_numpy() - np.datetime64(0, "us")
    return np.asarray(since / np.timedelta64(1, "D"), dtype=np.float64)


def refuse_look_alikes(column: "pd.Series", *, source: str) -> None:
    """Refuse texts that would become categories, and are mostly numbers or dates to a reader.

    Raises:
        DataError: names the column, how many cells, the first of them, and what to write.
    """
    texts = [None if text is None else text.strip() for text in to_texts(column)]
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
    """Where the first of these texts stands."""
    return place_of(column, next(row for row, text in enumerate(texts) if text in of))

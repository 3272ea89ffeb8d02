"""One row of a table from several seeds' rows: means with intervals."""

from collections.abc import Collection, Sequence

from experiments.intervals import Interval
from experiments.leaks.sessions import Row

__all__ = ["over_seeds"]


def over_seeds(rows: Sequence[Row], *, same: Collection[str]) -> Row:
    """Return the mean of every number over the rows, with its interval; texts are listed.

    A single row is returned as it is.

    Args:
        rows: one for each seed; a row that lacks a number (an attack that was refused) takes no
            part in its mean.
        same: columns that say what was run, and hence are the same in all rows.
    """
    if len(rows) == 1:
        return dict(rows[0])
    merged: Row = {}
    for column in dict.fromkeys(key for row in rows for key in row):
        values = [row[column] for row in rows if row.get(column) is not None]
        if column in same:
            merged[column] = values[0]
        elif any(isinstance(value, str) for value in values):
            merged[column] = " / ".join(dict.fromkeys(map(str, values)))
        elif values:
            merged[column] = Interval.of([float(value) for value in values])
    return merged

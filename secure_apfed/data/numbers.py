"""Reading a raw column as numbers or as categories, with errors that name the column."""

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from secure_apfed.errors import DataError

__all__ = ["is_numeric", "to_numbers", "to_texts"]


def is_numeric(column: "pd.Series") -> bool:
    """Whether a column was read as numbers; true and false are categories."""
    dtype = column.dtype
    return pd.api.types.is_numeric_dtype(dtype) and not pd.api.types.is_bool_dtype(dtype)


def to_numbers(column: "pd.Series", *, source: str) -> NDArray[np.float64]:
    """Return a column (N,) as float64; empty cells become NaN.

    Raises:
        DataError: a cell holds text that is not a number; names column, count and first row.
    """
    numbers = pd.to_numeric(column, errors="coerce").to_numpy(dtype=np.float64, na_value=np.nan)
    wrong = np.flatnonzero(np.isnan(numbers) & column.notna().to_numpy())
    if wrong.size:
        raise DataError(
            f"{source}: column {column.name!r} is numeric, but {wrong.size} cells are not numbers, "
            f"first in row {wrong[0]} (from 0); mend them, or declare the column categorical"
        )
    return numbers


def to_texts(column: "pd.Series") -> list[str | None]:
    """Return a column as texts, None where a cell is empty.

    Whole numbers are written without a decimal point, because a column of whole numbers
    becomes floats as soon as one cell is empty.
    """
    return [None if pd.isna(cell) else _text(cell) for cell in column]


def _text(cell: object) -> str:
    if isinstance(cell, float | np.floating) and float(cell).is_integer():
        return str(int(cell))
    return str(cell).strip()

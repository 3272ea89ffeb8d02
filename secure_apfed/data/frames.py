"""Reading CSV and Parquet files into frames, and their columns, with errors for people.

Run by: a party on its own files. The format follows from the name: .parquet or .pq, else
CSV (also .gz, .bz2, .xz, .zst) with a header line.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pyarrow import ArrowException, default_memory_pool

from secure_apfed.alignment.id_files import PARQUET, cell_text
from secure_apfed.errors import DataError

__all__ = ["is_numeric", "is_table", "only_columns", "read_frame", "to_numbers", "to_texts"]

_PACKINGS = (".gz", ".bz2", ".xz", ".zst")


def is_table(path: Path) -> bool:
    """Whether a file's name is that of a CSV or Parquet file."""
    name = path.with_suffix("") if path.suffix in _PACKINGS else path
    return name.suffix.lower() in (".csv", *PARQUET)


def read_frame(path: Path, *, texts: Sequence[str] = (), source: str) -> pd.DataFrame:
    """Return a file's rows.

    Args:
        path: the file.
        texts: columns of a CSV file to read as text, so that "007" stays what it is.
        source: who or what it belongs to, for errors.

    Raises:
        DataError: no such file, or not of the format that its name says.
    """
    try:
        if path.suffix.lower() in PARQUET:
            # else the packed file, and what it was unpacked to, would stay beside the frame
            frame = pd.read_parquet(path, pre_buffer=False)
            default_memory_pool().release_unused()
            names = frame.columns.to_series()
        else:
            frame = pd.read_csv(path, dtype=dict.fromkeys(texts, str), low_memory=False)
            # pandas gives repeated names another one, so the header is read as it stands.
            names = pd.read_csv(path, header=None, nrows=1, dtype=str).iloc[0].dropna()
    except FileNotFoundError as error:
        raise DataError(f"{source}: there is no file {path}; check the path") from error
    except (OSError, EOFError) as error:
        raise DataError(f"{source}: {path} cannot be read ({error})") from error
    except (ValueError, ArrowException) as error:
        # pandas' parser errors and UnicodeDecodeError are ValueErrors.
        raise DataError(
            f"{source}: {path} is not a readable {_format(path)} file ({str(error).strip()}); "
            "save it again"
        ) from error
    repeated = names[names.duplicated()].unique()
    if len(repeated):
        raise DataError(
            f"{source}: {path} has several columns named {', '.join(map(str, repeated))}; "
            "give each a name of its own"
        )
    return frame


def _format(path: Path) -> str:
    return "Parquet" if path.suffix.lower() in PARQUET else "CSV"


def only_columns(frame: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """Return these columns in this order; the frame itself where it has no others."""
    return frame if list(frame.columns) == list(names) else frame[list(names)]


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
    """Return a column as texts, None where a cell is empty; see `cell_text`."""
    return [None if pd.isna(cell) else cell_text(cell) for cell in column]

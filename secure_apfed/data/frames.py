"""Reading CSV and Parquet files into frames, with errors for people.

Run by: a party on its own files. The format follows from the name: .parquet or .pq, else
CSV (also .gz, .bz2, .xz, .zst) with a header line.
"""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from pyarrow import ArrowException

from secure_apfed.errors import DataError

__all__ = ["is_table", "read_frame"]

_PARQUET = (".parquet", ".pq")
_PACKINGS = (".gz", ".bz2", ".xz", ".zst")


def is_table(path: Path) -> bool:
    """Whether a file's name is that of a CSV or Parquet file."""
    name = path.with_suffix("") if path.suffix in _PACKINGS else path
    return name.suffix.lower() in (".csv", *_PARQUET)


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
        if path.suffix.lower() in _PARQUET:
            frame = pd.read_parquet(path)
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
    return "Parquet" if path.suffix.lower() in _PARQUET else "CSV"

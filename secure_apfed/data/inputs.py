"""Inputs of prediction: a file of raw rows becomes the features that the model knows.

Run by: the active alone. Takes CSV or Parquet, .npy arrays and IDX images (also .gz).
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from apfed_protocols.ids import id_texts
from secure_apfed.data.encoding import CellCounts, ColumnEncoding, FeatureEncoding, RawFeatures
from secure_apfed.data.files import read_file
from secure_apfed.data.frames import is_table, read_blocks
from secure_apfed.data.readers import is_idx, parse_idx
from secure_apfed.errors import DataError
from secure_apfed.names import column_name

__all__ = ["load_blocks", "load_features"]

_ROWS = 50_000  # of a table, read at a time


def load_features(
    path: Path, encoding: FeatureEncoding, *, id_columns: Sequence[str] = ()
) -> tuple[tuple[str, ...], torch.Tensor]:
    """Return the IDs and the float32 features of the rows in `path`, in its order.

    Args:
        path: .csv, .parquet, .npy or IDX.
        encoding: the active's, as saved with the model.
        id_columns: columns of a table that name a row; without them, and for arrays, rows
            are called by their number from 0.

    Raises:
        DataError: no such file, another format, missing columns, or values that do not
            fit the encoding; says what was expected.
    """
    blocks = list(load_blocks(path, encoding, id_columns=id_columns))
    return tuple(name for ids, _ in blocks for name in ids), torch.cat([one for _, one in blocks])


def load_blocks(
    path: Path, encoding: FeatureEncoding, *, id_columns: Sequence[str] = (), rows: int = _ROWS,
    counts: CellCounts | None = None,
) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:  # fmt: skip
    """Yield the same so many rows at a time; no more of a table is in memory, arrays are whole.

    Cells of columns that are empty, or count for nothing, are added to `counts`.
    """
    source, first, id_columns = path.name, 0, [column_name(name) for name in id_columns]
    for raw in _tables(path, id_columns, rows) if is_table(path) else (_array(path),):
        if not len(raw):
            break
        ids = None
        if isinstance(raw, pd.DataFrame):
            parts = [_names(raw[name], first, source=source) for name in id_columns]
            ids = [" ".join(row) for row in zip(*parts, strict=True)] if parts else None
            raw = raw.drop(columns=list(id_columns))
        if isinstance(encoding, ColumnEncoding):
            features = encoding.encode(raw, source=source, counts=counts)
        else:
            features = encoding.encode(raw, source=source)
        yield tuple(ids or map(str, range(first, first + len(features)))), features
        first += len(features)
    if not first:
        raise DataError(f"{source}: it has no rows")


def _names(column: "pd.Series", first: int, *, source: str) -> list[str]:
    """What names the rows of a block, of which the first has this number."""
    what = f"column {column.name!r}"
    return id_texts(
        column, party=source, what=what, strip=True, key="--id-column",
        place=lambda row: f"row {first + row} (from 0)",
    )  # fmt: skip


def _tables(path: Path, id_columns: Sequence[str], rows: int) -> Iterator[pd.DataFrame]:
    for frame in read_blocks(path, source=path.name, rows=rows):
        absent = [name for name in id_columns if name not in frame.columns]
        if absent:
            raise DataError(
                f"{path.name}: the ID columns {', '.join(absent)} are missing; add them"
            )
        yield frame


def _array(path: Path) -> RawFeatures:
    if path.suffix == ".npy":
        try:
            array: NDArray[np.generic] = np.load(path, allow_pickle=False)
        except FileNotFoundError as error:
            raise DataError(f"{path.name}: there is no such file; check the path") from error
        except (OSError, EOFError, ValueError) as error:
            raise DataError(f"{path.name}: not a readable .npy array ({error})") from error
        if array.ndim < 2:
            raise DataError(f"{path.name}: expected rows of features, got shape {array.shape}")
        return array
    content = read_file(path)
    if is_idx(content):
        return parse_idx(content, dimensions=3, source=path.name)
    raise DataError(
        f"{path.name}: unknown format; give .csv, .parquet, .npy, or an IDX file of images"
    )

"""Inputs of prediction: a file of raw rows becomes the features that the model knows.

Run by: the active alone. Takes CSV or Parquet, .npy arrays and IDX images (also .gz).
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from secure_apfed.data.column_encoding import CategoricalColumn, ColumnEncoding
from secure_apfed.data.encoding import FeatureEncoding, RawFeatures
from secure_apfed.data.files import read_file
from secure_apfed.data.frames import is_table, read_frame, to_texts
from secure_apfed.data.image_files import is_idx, parse_idx
from secure_apfed.errors import DataError

__all__ = ["load_features"]


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
    source = path.name
    if is_table(path):
        texts = [*id_columns]
        if isinstance(encoding, ColumnEncoding):
            texts += [c.name for c in encoding.columns if isinstance(c, CategoricalColumn)]
        frame = read_frame(path, texts=texts, source=source)
        absent = [name for name in id_columns if name not in frame.columns]
        if absent:
            raise DataError(f"{source}: the ID columns {', '.join(absent)} are missing; add them")
        parts = [[text or "" for text in to_texts(frame[name])] for name in id_columns]
        ids = [" ".join(row) for row in zip(*parts, strict=True)] if parts else None
        raw: RawFeatures = frame.drop(columns=list(id_columns))
    else:
        raw, ids = _array(path), None
    if not len(raw):
        raise DataError(f"{source}: it has no rows")
    features = encoding.encode(raw, source=source)
    return tuple(ids or map(str, range(len(features)))), features


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

"""Views of images in a MATLAB file: Caltech101-7, as multi-view learning uses it.

Run by: whoever loads the set. The file comes from no official address, so that nothing in it is
trusted: its size is bounded, compressed or not, before SciPy parses it, and only the variables X (a
cell of one matrix a view) and Y (labels from 1) are read, as numbers.

Source: MATLAB's MAT-file format, version 5 (a header of 128 bytes, then elements of type, size and
body, of which some are compressed by zlib); the set: Y. Li, F. Nie, H. Huang, J. Huang, Large-scale
multi-view spectral clustering via bipartite graph, AAAI 2015.
"""

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from secure_apfed.data.readers import DataSet, TablePool, check_labels, file_content
from secure_apfed.errors import DataError

__all__ = ["read_caltech_7"]

_ROWS = 1474
_HEADER, _TAG, _COMPRESSED = 128, 8, 15
_INFLATED_AT_MOST = 2**28


def read_caltech_7(dataset: DataSet, folder: Path | None) -> TablePool:
    """Caltech101-7: `files` is one MATLAB file of version 5; views in the catalogue's order."""
    (file,) = dataset.files
    variables = _variables(file_content(dataset, file, folder), source=file.name)
    cell = variables["X"]
    views = list(cell.ravel()) if cell.dtype == object else []
    widths = {name: len(columns) for name, columns in dataset.natural_views.items()}
    shapes = [getattr(view, "shape", ()) for view in views]
    expected = [(_ROWS, width) for width in widths.values()]
    if shapes != expected:
        raise DataError(
            f"{file.name}: X holds matrices of shapes {shapes}, expected {expected} for "
            f"{', '.join(widths)}; it is another set's file, or in another form: {dataset.how}"
        )
    numbers_NF = np.concatenate([_numbers(view, source=file.name) for view in views], axis=1)
    labels_N = _numbers(variables["Y"].ravel(), source=file.name)
    if len(labels_N) != _ROWS or not np.array_equal(labels_N, labels_N.round()):
        raise DataError(f"{file.name}: Y holds {len(labels_N)} numbers, expected {_ROWS} labels")
    columns = [name for names in dataset.natural_views.values() for name in names]
    frame = pd.DataFrame(numbers_NF, columns=columns)
    return TablePool(frame, check_labels(dataset, labels_N.astype(np.int64) - 1))


def _variables(content: bytes, *, source: str) -> dict[str, NDArray[Any]]:
    """Return X and Y.

    Raises:
        DataError: not such a file, or without one of them.
    """
    from scipy.io import loadmat

    try:
        plain = _inflated(content)
        found = loadmat(io.BytesIO(plain), variable_names=("X", "Y"))
        return {name: np.asarray(found[name]) for name in ("X", "Y")}
    except DataError as error:
        raise DataError(f"{source}: {error}") from None
    # SciPy lets through whatever a damaged file makes its parser run into.
    except Exception as error:
        raise DataError(
            f"{source}: not a MATLAB file of version 5 to 7 with X and Y ({error}); get it again, "
            "or save it with the option -v7"
        ) from error


def _inflated(content: bytes) -> bytes:
    """Return the same file with no element compressed.

    Raises:
        DataError: larger than any such set; zlib.error, struct.error: damaged.
    """
    order = ">" if content[126:128] == b"MI" else "<"
    parts, at, room = [content[:_HEADER]], _HEADER, _INFLATED_AT_MOST
    while at < len(content):
        kind, size = struct.unpack_from(f"{order}II", content, at)
        body = content[at + _TAG : at + _TAG + size]
        if kind == _COMPRESSED:
            element = zlib.decompressobj().decompress(body, room)
        else:
            element = content[at : at + _TAG + size]
        room -= len(element)
        if room <= 0:
            raise DataError(f"more than {_INFLATED_AT_MOST} uncompressed bytes; it is another file")
        parts.append(element)
        at += _TAG + size
    return b"".join(parts)


def _numbers(array: Any, *, source: str) -> NDArray[np.float64]:
    """Return a matrix or vector of finite numbers."""
    numbers = np.asarray(array)
    if numbers.dtype.kind not in "uif" or not np.isfinite(numbers).all():
        raise DataError(f"{source}: X and Y must hold finite numbers, got {numbers.dtype}")
    return numbers.astype(np.float64)

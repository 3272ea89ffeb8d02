"""Views of images in a MATLAB file: Caltech101-7, as multi-view learning uses it.

Run by: whoever loads the set. The file comes from no official address: before SciPy parses it, its
size is bounded, compressed or not, and so is what its variables claim to hold, for which SciPy
would take memory. Only X (a cell of one matrix a view) and Y (labels from 1) are read, as numbers.

Source: MATLAB's MAT-file format, version 5 (a header of 128 bytes, then elements of type, size and
body, of which some are compressed by zlib); the set: Y. Li, F. Nie, H. Huang, J. Huang, Large-scale
multi-view spectral clustering via bipartite graph, AAAI 2015.
"""

import io
import math
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from secure_apfed.data.files import (
    DataFile,
    DataSet,
    TablePool,
    check_labels,
    file_content,
    numbered,
)
from secure_apfed.errors import DataError
from secure_apfed.seeds import derive_seed

_VIEWS = {
    "gabor": 48, "wavelet_moments": 40, "centrist": 254, "hog": 1984, "gist": 512, "lbp": 928,
}  # fmt: skip
# People a class, who are far from equally many.
_CLASSES = {
    "Faces": 435, "Motorbikes": 798, "Dollar-Bill": 52, "Garfield": 34, "Snoopy": 35,
    "Stop-Sign": 64, "Windsor-Chair": 56,
}  # fmt: skip
_ROWS = 1474
_LATENT = 12
_HEADER, _TAG, _COMPRESSED = 128, 8, 15
_INFLATED_AT_MOST = 2**28
_READ = ("X", "Y")


def _read(dataset: DataSet, folder: Path | None) -> TablePool:
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
    from scipy.io import loadmat, whosmat

    try:
        plain = _inflated(content)
        for name, shape, _ in whosmat(io.BytesIO(plain)):
            if not 0 <= math.prod(shape) <= len(plain):
                raise DataError(f"{name} claims a shape of {shape}; it is damaged")
        found = loadmat(io.BytesIO(plain), variable_names=_READ)
        return {name: np.asarray(found[name]) for name in _READ}
    except DataError as error:
        raise DataError(f"{source}: {error}") from None
    # SciPy lets through whatever a damaged file makes its parser run into.
    except Exception as error:
        raise DataError(
            f"{source}: not a MATLAB file of version 5 to 7 with X and Y ({error}); get it again, "
            "or save it with the option -v7"
        ) from error


def _inflated(content: bytes) -> bytes:
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
    numbers = np.asarray(array)
    if numbers.dtype.kind not in "uif" or not np.isfinite(numbers).all():
        raise DataError(f"{source}: X and Y must hold finite numbers, got {numbers.dtype}")
    return numbers.astype(np.float64)


def synthetic_images(dataset: DataSet, *, seed: int) -> TablePool:
    """Return noisy linear images, one a view, of latent numbers that lie around their class."""
    draw = np.random.default_rng(derive_seed(seed, "synthetic images"))
    labels_N = draw.permutation(np.repeat(np.arange(len(_CLASSES)), list(_CLASSES.values())))
    centres = draw.normal(size=(len(_CLASSES), _LATENT))
    latent_NL = centres[labels_N] + draw.normal(0, 0.9, (len(labels_N), _LATENT))
    columns: dict[str, NDArray[np.float64]] = {}
    for names in dataset.natural_views.values():
        mixed_NV = latent_NL @ draw.normal(size=(_LATENT, len(names)))
        noisy_NV = mixed_NV + draw.normal(0, 8.0, mixed_NV.shape)
        columns |= dict(zip(names, noisy_NV.T, strict=True))
    return TablePool(pd.DataFrame(columns), labels_N.astype(np.int64))


CALTECH_7 = DataSet(
    name="caltech_7",
    title="Caltech101-7, six views of images",
    source="https://data.caltech.edu/records/mzrjq-6wc02",
    licence="CC BY 4.0 for the images; none stated for the features",
    citation="Y. Li, F. Nie, H. Huang, J. Huang, AAAI, 2015; L. Fei-Fei et al., CVPRW, 2004",
    how="put the common Caltech101-7.mat (X: a cell of six matrices, Y) in a data folder",
    shape="1474 rows of 3766 columns",
    classes=tuple(_CLASSES),
    views=6,
    natural_views={name: numbered(name, width) for name, width in _VIEWS.items()},
    files=(DataFile("Caltech101-7.mat", 2**27, exact=False),),
    read=_read,
)
SYNTHETIC_CALTECH_7 = CALTECH_7.stand_in(
    "synthetic_caltech_7", "shapes of caltech_7, and no image", shape=CALTECH_7.shape,
    read=lambda dataset, _: synthetic_images(dataset, seed=0),
)  # fmt: skip

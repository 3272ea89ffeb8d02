"""The binary format of CIFAR-10 and CIFAR-100: fixed records of labels and pixels.

A record is one label byte (CIFAR-10) or a coarse and a fine one (CIFAR-100), then 3072
pixels: the red, green and blue planes of 32x32, row by row. Source: A. Krizhevsky,
"The CIFAR-10 dataset", section "Binary version". The Python version of the same data is a
pickle and is never read.
"""

import numpy as np
from numpy.typing import NDArray

from secure_apfed.errors import DataError

__all__ = ["PIXELS", "parse_cifar"]

_SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32


def parse_cifar(
    content: bytes, *, label_bytes: int, classes: int, source: str
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return images (N, 3, 32, 32) and labels (N,), the last label byte of each record.

    Raises:
        DataError: no whole number of records, or a label outside 0..classes - 1.
    """
    record = label_bytes + PIXELS
    if not content or len(content) % record:
        raise DataError(
            f"{source}: expected records of {record} bytes ({label_bytes} of labels, {PIXELS} of "
            "pixels), "
            f"found {len(content)} bytes; it is truncated, damaged or not CIFAR's binary version"
        )
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, record)
    labels = records[:, label_bytes - 1].astype(np.int64)
    outside = np.flatnonzero(labels >= classes)
    if outside.size:
        raise DataError(
            f"{source}: record {outside[0]} has label {labels[outside[0]]}, expected 0 to "
            f"{classes - 1}; "
            f"{outside.size} such records, so this is not the file that its name says"
        )
    return records[:, label_bytes:].reshape(-1, *_SHAPE), labels

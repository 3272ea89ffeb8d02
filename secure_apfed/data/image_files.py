"""The two binary formats of the catalogue's images: from bytes to arrays, or an error.

Nothing in a file is trusted: magic, sizes and length must fit each other exactly.

Sources: Y. LeCun, C. Cortes, C. Burges, "The MNIST database of handwritten digits", section "File
formats" (IDX: big-endian sizes, then unsigned bytes); A. Krizhevsky, "The CIFAR-10 dataset",
section "Binary version". The Python version of CIFAR is a pickle and is never read.
"""

import math

import numpy as np
from numpy.typing import NDArray

from secure_apfed.errors import DataError

__all__ = ["is_idx", "parse_cifar", "parse_idx"]

_IDX_MAGIC = b"\x00\x00\x08"
# Of CIFAR: the red, green and blue planes of 32x32, row by row.
_CIFAR_SHAPE = (3, 32, 32)
_CIFAR_PIXELS = math.prod(_CIFAR_SHAPE)


def is_idx(content: bytes) -> bool:
    """Whether `content` begins as an IDX file of unsigned bytes does."""
    return content[:3] == _IDX_MAGIC


def parse_idx(content: bytes, *, dimensions: int, source: str) -> NDArray[np.uint8]:
    """Return the array in the bytes of an uncompressed IDX file.

    Args:
        content: the whole file.
        dimensions: 1 for labels (N,), 3 for images (N, height, width).
        source: the file's name, for the error.

    Raises:
        DataError: wrong magic, wrong number of dimensions, truncated or too long.
    """
    header = 4 + 4 * dimensions
    if not is_idx(content) or content[3:4] != bytes([dimensions]):
        raise DataError(
            f"{source}: expected an IDX file of unsigned bytes in {dimensions} dimensions (magic "
            f"{(_IDX_MAGIC + bytes([dimensions])).hex()}), found magic "
            f"{content[:4].hex() or 'nothing'}; get the file again"
        )
    if len(content) < header:
        raise DataError(f"{source}: truncated inside its header; get the file again")
    sizes = [int.from_bytes(content[at : at + 4], "big") for at in range(4, header, 4)]
    expected = header + math.prod(sizes)
    if len(content) != expected:
        raise DataError(
            f"{source}: its header announces sizes {sizes}, {expected} bytes in all, the file has "
            f"{len(content)}; it was cut off, altered or is no IDX file, get it again"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=header).reshape(sizes)


def parse_cifar(
    content: bytes, *, label_bytes: int, classes: int, source: str
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return images (N, 3, 32, 32) and labels (N,) of fixed records of labels and pixels.

    A record begins with one label byte (CIFAR-10), or with a coarse and a fine one (CIFAR-100):
    its last label byte counts.

    Raises:
        DataError: no whole number of records, or a label outside 0..classes - 1.
    """
    record = label_bytes + _CIFAR_PIXELS
    if not content or len(content) % record:
        raise DataError(
            f"{source}: expected records of {record} bytes ({label_bytes} of labels, "
            f"{_CIFAR_PIXELS} of pixels), found {len(content)} bytes; it is truncated, damaged or "
            "not CIFAR's binary version"
        )
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, record)
    labels = records[:, label_bytes - 1].astype(np.int64)
    outside = np.flatnonzero(labels >= classes)
    if outside.size:
        raise DataError(
            f"{source}: record {outside[0]} has label {labels[outside[0]]}, expected 0 to "
            f"{classes - 1}; {outside.size} such records, so this is not the file that its name "
            "says"
        )
    return records[:, label_bytes:].reshape(-1, *_CIFAR_SHAPE), labels

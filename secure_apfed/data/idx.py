"""The IDX format of MNIST and Fashion-MNIST: big-endian sizes, then unsigned bytes.

Read by: whoever holds a downloaded file. Nothing in the file is trusted: magic, sizes and
length must fit each other exactly. Source: Y. LeCun, C. Cortes, C. Burges, "The MNIST
database of handwritten digits", section "File formats".
"""

import math

import numpy as np
from numpy.typing import NDArray

from secure_apfed.errors import DataError

__all__ = ["is_idx", "parse_idx"]

_MAGIC_UNSIGNED_BYTES = b"\x00\x00\x08"


def is_idx(content: bytes) -> bool:
    """Whether `content` begins as an IDX file of unsigned bytes does."""
    return content[:3] == _MAGIC_UNSIGNED_BYTES


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
            f"{(_MAGIC_UNSIGNED_BYTES + bytes([dimensions])).hex()}), found magic "
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

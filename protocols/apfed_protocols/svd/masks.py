"""Random orthogonal masks: their law, and the blocks of the mask of rows.

Run by: the dealer (the mask of columns) and every owner (the mask of rows, from a seed). Hides:
rows and columns up to an orthogonal transformation, and no more; singular values stay as they are.

A mask is the orthogonal factor of a matrix of independent normal numbers, with the signs by which
it is uniform among orthogonal matrices (Mezzadri 2007). The mask of rows is block-diagonal (FedSVD,
section 3.3), so that N rows take N b numbers and N b^2 steps instead of N^2 and N^3. Blocks are of
equal size, but for one row: a short last one would hide few people among few.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.randomness import keystream

try:
    from scipy.special import ndtri
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "a decomposition needs scipy: pip install 'apfed-protocols[svd]'", name=error.name
    ) from None

__all__ = ["Floats", "block_sizes", "random_orthogonal", "rows_masked", "rows_unmasked"]

Floats = NDArray[np.float64]

_BITS = 53


def random_orthogonal(size: int, key: bytes, *context: bytes) -> Floats:
    """A uniformly random orthogonal matrix, (size, size), of this key and context."""
    stream = keystream(key, b"orthogonal mask v1", *context, length=8 * size * size)
    words = np.frombuffer(stream, dtype="<u8") >> np.uint64(64 - _BITS)
    normals = ndtri((words + 0.5) * 2.0**-_BITS).reshape(size, size)
    factor, triangle = np.linalg.qr(normals)
    return np.asarray(factor * np.where(np.diag(triangle) < 0, -1.0, 1.0), dtype=np.float64)


def block_sizes(rows: int, most: int) -> tuple[int, ...]:
    """Rows of each block, at most `most`, as equal as can be."""
    count = -(-rows // most)
    size, larger = divmod(rows, count)
    return (size + 1,) * larger + (size,) * (count - larger)


def rows_masked(table_NF: Floats, seed: bytes, people: bytes, *, mask_rows: int) -> Floats:
    """P X, of the mask that this seed gives for these people."""
    blocks = _blocks(len(table_NF), seed, people, mask_rows)
    return np.concatenate([mask_bb @ table_NF[rows] for rows, mask_bb in blocks])


def rows_unmasked(table_NF: Floats, seed: bytes, people: bytes, *, mask_rows: int) -> Floats:
    """P^T X."""
    blocks = _blocks(len(table_NF), seed, people, mask_rows)
    return np.concatenate([mask_bb.T @ table_NF[rows] for rows, mask_bb in blocks])


def _blocks(
    rows: int, seed: bytes, people: bytes, mask_rows: int
) -> Iterator[tuple[slice, Floats]]:
    """Each block's rows, and its mask."""
    start = 0
    for block, size in enumerate(block_sizes(rows, mask_rows)):
        mask_bb = random_orthogonal(size, seed, b"rows", people, block.to_bytes(8, "big"))
        yield slice(start, start + size), mask_bb
        start += size

"""Arrays over GF(2^128): elements as two 64-bit words, low one first; addition is exclusive or.

Run by: all parties of `apfed_protocols.psi.vole.backend`. The field is that of AES-GCM, modulo
x^128 + x^7 + x^2 + x + 1, bits in the order of their weights.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.randomness import keystream_chunks

__all__ = [
    "ELEMENT_BYTES",
    "Elements",
    "Multiplier",
    "add_random",
    "from_bytes",
    "gather_sums",
    "pick",
    "random_elements",
    "random_rows",
    "subset_sums",
    "to_bytes",
    "whole",
]

Elements = NDArray[np.uint64]
"""Shape (n, 2)."""

ELEMENT_BYTES = 16
_WORDS = np.dtype("<u8")
_MODULUS = 0x87
_TOP = 1 << 127
_CHUNK = 2**12
# numbers of these widths are moved faster than bytes without a meaning
_ITEMS = {1: np.dtype(np.uint64), 2: np.dtype(np.complex128)}


def from_bytes(content: bytes | memoryview) -> Elements:
    """Read elements that lie one after the other, 16 bytes each."""
    return np.frombuffer(content, _WORDS).reshape(-1, 2)


def to_bytes(elements: Elements) -> bytes:
    """Write them one after the other, as `from_bytes` reads them."""
    return elements.astype(_WORDS, copy=False).tobytes()


def random_elements(seed: bytes, purpose: bytes, count: int) -> Elements:
    """Expand a seed into elements; one (seed, purpose) is used once."""
    return random_rows(seed, purpose, (count, 2))


def random_rows(seed: bytes, purpose: bytes, shape: tuple[int, int]) -> NDArray[np.uint64]:
    """The same of rows of any number of words."""
    rows = np.zeros(shape, _WORDS)
    add_random(rows, seed, purpose)
    return rows


def add_random(rows: NDArray[np.uint64], seed: bytes, purpose: bytes) -> None:
    """Add what `random_rows` makes of the seed, in place: it need not be held beside them."""
    content, done = rows.reshape(-1).view(np.uint8), 0
    for part in keystream_chunks(seed, purpose, length=len(content)):
        content[done : done + len(part)] ^= np.frombuffer(part, np.uint8)
        done += len(part)


class Multiplier:
    """Multiplies by one element.

    Sixteen tables say what each byte of the other factor adds. Which entries are read follows from
    the other factor alone, so time tells nothing of this one where the other is public.

    Args:
        factor: 16 bytes.
    """

    def __init__(self, factor: bytes) -> None:
        power, powers = int.from_bytes(factor, "little"), []
        for _ in range(8 * ELEMENT_BYTES):
            powers.append(power)
            power = (power ^ _TOP) << 1 ^ _MODULUS if power & _TOP else power << 1
        content = b"".join(power.to_bytes(ELEMENT_BYTES, "little") for power in powers)
        self._tables = subset_sums(from_bytes(content))

    def times(self, elements: Elements) -> Elements:
        """Return the products."""
        return gather_sums(self._tables, elements)


def whole(elements: NDArray[np.uint64]) -> NDArray[Any]:
    """A view of rows of words as one item each, which numpy moves as a whole.

    Rows are put in place several times as fast so. Nothing is computed with these items.
    """
    words = elements.shape[-1]
    kind = _ITEMS.get(words, np.dtype((np.void, words * _WORDS.itemsize)))
    items: NDArray[Any] = np.ascontiguousarray(elements).view(kind)[..., 0]
    return items


def pick(elements: NDArray[np.uint64], places: NDArray[np.int64]) -> NDArray[np.uint64]:
    """The rows in these places."""
    return elements.take(places, axis=0)


def subset_sums(elements: Elements) -> NDArray[np.uint64]:
    """Tables of all sums of eight rows of w words each, shape (n / 8, 256, w).

    Entry b of a table is the sum of those of its elements whose bits are set in b.
    """
    tables = np.zeros((len(elements) // 8, 256, elements.shape[1]), np.uint64)
    for bit in range(8):
        half = 1 << bit
        tables[:, half : 2 * half] = tables[:, :half] ^ elements[bit::8, None]
    return tables


def gather_sums(tables: NDArray[np.uint64], selectors: NDArray[np.uint64]) -> Elements:
    """Sum, for each row, the entries that the bytes of its selector name.

    Args:
        tables: of `subset_sums`, shape (k, 256, w).
        selectors: shape (n, words), of which the first k bytes count.
    """
    chosen = np.ascontiguousarray(selectors, _WORDS).view(np.uint8)
    sums = np.zeros((len(selectors), tables.shape[2]), np.uint64)
    for start in range(0, len(sums), _CHUNK):  # what is worked on stays in the cache
        part = sums[start : start + _CHUNK]
        named = chosen[start : start + _CHUNK, : len(tables)].T.astype(np.int64)
        for table, places in zip(tables, named, strict=True):
            part ^= pick(table, places)
    return sums

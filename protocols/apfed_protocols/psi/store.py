"""An oblivious key-value store over GF(2^128): a system with three ones and few dense bits a row.

Run by: whoever encodes, and whoever decodes, with one public key of the hash. Cell 0..m-1 of the
sparse part and 48 dense cells; the value of an ID is the sum of its three sparse cells and of the
dense cells that its 48 bits name. Encoding peels: a cell that one ID alone uses takes whatever this
ID still lacks, round after round; the few IDs that are left are solved by elimination. Cells that
nobody needs are random, so the store shows how many IDs it may hold and nothing of them, where
their values are random.

Encoding fails where the rows are linearly dependent. For a random key that has probability at most
2^-48 times the expected number of sets of rows whose sparse parts add up to nothing (the empty one
included), which `cells_for` keeps below 2, as its test computes: below 2^-47.
Who hit upon such a key takes another one; that this happened is all that it tells.

Elements of the field are two 64-bit words, low one first; addition is exclusive or. The field is
that of AES-GCM, modulo x^128 + x^7 + x^2 + x + 1, bits in the order of their weights.
Source: Garimella, Pinkas, Rosulek, Trieu and Yanai, CRYPTO 2021 (three hashes, dense columns);
the bound is the first-moment method of random linear systems over GF(2).
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.psi.interface import digest_each, three_different
from apfed_protocols.randomness import fresh_key, keystream_chunks

Places = NDArray[np.signedinteger]
Digests = NDArray[np.uint64]
"""Shape (n, 6)."""

DENSE = 48
_ONES = 3
_DIGEST_BYTES = 8 * _ONES + DENSE // 8 + 2 + 16
_EXPANSION = 1.3
_LEAST = 40
_SUM_BITS = 40
_ONE_USER = 1 << _SUM_BITS
_PERSON = b"apfed psi store"
# rows that are worked on at once: what that takes stays in the cache, and is no memory to speak of
_CHUNK = 2**15

Elements = NDArray[np.uint64]
"""Shape (n, 2)."""

ELEMENT_BYTES = 16
_WORDS = np.dtype("<u8")
_MODULUS = 0x87
_TOP = 1 << 127
_PIECE = 2**12
# numbers of these widths are moved faster than bytes without a meaning
_ITEMS = {1: np.dtype(np.uint64), 2: np.dtype(np.complex128)}


class DependentRowsError(ArithmeticError):
    """The rows of these IDs under this key are linearly dependent; take another key."""


def cells_for(ids: int) -> int:
    """Return the sparse cells of a store for so many IDs."""
    return math.ceil(_EXPANSION * ids) + _LEAST


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of a set of IDs under one key.

    Attributes:
        cells: their three sparse cells, all different, shape (n, 3).
        dense: the bits of the dense part, shape (n, 1), the lowest 48 of each word.
    """

    cells: Places
    dense: NDArray[np.uint64]

    @classmethod
    def from_digests(cls, digests: Digests, size: int) -> "Rows":
        """Return the rows that follow from digests, in a store with `size` sparse cells."""
        narrow = np.int32 if size <= np.iinfo(np.int32).max else np.int64
        cells = np.empty((len(digests), _ONES), narrow)
        for chunk in _split_chunks(len(digests)):
            cells[chunk] = three_different(digests[chunk, :_ONES], size)
        return cls(cells=cells, dense=digests[:, _ONES : _ONES + 1] & np.uint64((1 << DENSE) - 1))

    def __getitem__(self, chunk: slice) -> "Rows":
        return Rows(cells=self.cells[chunk], dense=self.dense[chunk])

    def pick_rows(self, places: Places) -> "Rows":
        """Return the rows at these places."""
        return Rows(cells=self.cells.take(places, axis=0), dense=self.dense.take(places, axis=0))

    def __len__(self) -> int:
        return len(self.cells)


def digest_ids(ids: Sequence[bytes], key: bytes) -> Digests:
    """Return the digest of each ID under a key, as six words."""
    keyed = hashlib.blake2b(key=key, digest_size=_DIGEST_BYTES, person=_PERSON)
    return digest_each(ids, keyed).view("<u8")


def targets_of(digests: Digests) -> Elements:
    """Return 128 bits of each ID, shape (n, 2): the values that the intersections encode."""
    return np.ascontiguousarray(digests[:, _ONES + 1 :])


def _split_chunks(rows: int) -> Iterator[slice]:
    """Split so many rows into chunks that fit the cache."""
    return (slice(start, start + _CHUNK) for start in range(0, rows, _CHUNK))


def decode_rows(store: Elements, rows: Rows) -> Elements:
    """Return the value of each row, of as many words as a cell of the store; shape (n, w)."""
    dense = subset_sums(store[-DENSE:])
    values = np.empty((len(rows), store.shape[1]), np.uint64)
    for chunk in _split_chunks(len(rows)):
        values[chunk] = _sum_cells(store, dense, rows[chunk])
    return values


def _sum_cells(store: Elements, dense: NDArray[np.uint64], rows: Rows) -> Elements:
    """Return, for each row, the sum of its three sparse cells and of its dense cells."""
    sums = gather_sums(dense, rows.dense)
    for place in range(_ONES):
        sums ^= store.take(rows.cells[:, place], axis=0)
    return sums


class Encoder:
    """An encoder of values for one set of rows; what rows decide is computed when it is made."""

    def __init__(self, rows: Rows, cells: int) -> None:
        self._rows = rows
        self._cells = cells
        self._rounds, self._unpeeled = _peel_rows(rows.cells, cells)

    def encode(self, values: Elements, *, seed: bytes | None = None) -> Elements:
        """Return a store in which each row has its value, (cells + DENSE, w).

        `seed`: 32 bytes for cells that nobody needs, used once; None: fresh ones.
        Raises DependentRowsError: rows that could not be peeled are linearly dependent.
        """
        rows = self._rows
        cells = self._cells
        store = _expand_rows(seed or fresh_key(), b"store", (cells + DENSE, values.shape[1]))
        _solve_cells(store, rows, values, self._unpeeled)
        dense = subset_sums(store[-DENSE:])
        for all_peeled, places in reversed(self._rounds):
            # no row of a round has the cell of another, so that they may go one after the other
            for chunk in _split_chunks(len(places)):
                peeled = all_peeled[chunk]
                cells_here = places[chunk]
                value = values.take(peeled, axis=0) ^ _sum_cells(
                    store, dense, rows.pick_rows(peeled)
                )
                value ^= store.take(
                    cells_here, axis=0
                )  # what was there, which its row has summed up, too
                view_as_items(store)[cells_here] = view_as_items(value)
        return store


def _peel_rows(cells_n3: Places, cells: int) -> tuple[list[tuple[Places, Places]], Places]:
    """Take away rows that have a cell of their own, round after round.

    Returns for each round the rows, and the cell of each; and the rows that are left.

    `cells`: how many cells the store has.
    """
    numbered = np.arange(len(cells_n3)) + _ONE_USER
    # of each cell how many rows use it, above 40 bits that hold the sum of these rows
    users = np.zeros(cells, np.int64)
    for place in range(_ONES):
        counted = np.bincount(cells_n3[:, place], numbered, cells)
        np.add(users, counted, out=users, casting="unsafe")
    is_unpeeled = np.ones(len(cells_n3), np.bool_)
    rounds = []
    scratch = np.empty(max(cells, len(cells_n3)), np.int64)
    single = np.flatnonzero(users >> _SUM_BITS == 1)
    while len(single):
        peeled, first = _find_unique(users[single] - _ONE_USER, scratch)
        rounds.append((peeled, single[first]))
        is_unpeeled[peeled] = False
        touched = cells_n3[peeled].ravel()
        np.subtract.at(users, touched, np.repeat(numbered[peeled], _ONES))
        single, _ = _find_unique(touched[users[touched] >> _SUM_BITS == 1], scratch)
    return rounds, np.flatnonzero(is_unpeeled)


def _find_unique(numbers: Places, scratch: Places) -> tuple[Places, Places]:
    """Return each of these numbers once, and where it is, without sorting."""
    index = np.arange(len(numbers))
    scratch[numbers] = index
    unique = np.flatnonzero(scratch[numbers] == index)
    return numbers[unique], unique


def _solve_cells(store: Elements, rows: Rows, values: Elements, unpeeled: Places) -> None:
    """Set the cells that the rows which could not be peeled need, by elimination."""
    sparse = len(store) - DENSE
    pivots: list[tuple[int, int, int]] = []
    for row in unpeeled.tolist():
        pattern = int(rows.dense[row, 0]) << sparse
        for cell in rows.cells[row].tolist():
            pattern |= 1 << cell
        value = _read_int(values[row])
        for bit, other, known in pivots:
            if pattern >> bit & 1:
                pattern = pattern ^ other
                value = value ^ known
        if not pattern:
            raise DependentRowsError(f"{len(unpeeled)} rows are linearly dependent")
        pivots.append((pattern.bit_length() - 1, pattern, value))
    # a pivot's row has no cell of an earlier pivot, so the last is solved first
    for bit, pattern, value in reversed(pivots):
        for cell in _list_bits(pattern ^ (1 << bit)):
            value ^= _read_int(store[cell])
        store[bit] = np.frombuffer(value.to_bytes(8 * store.shape[1], "little"), "<u8")


def _read_int(element: NDArray[np.uint64]) -> int:
    """Return the words of one value as a number, low word first."""
    return int.from_bytes(element.astype(_WORDS).tobytes(), "little")


def _list_bits(pattern: int) -> list[int]:
    """Return the positions of the set bits, lowest first.

    `pattern`: read as a mask of bits.
    """
    bits = []
    while pattern:
        low = pattern & -pattern
        bits.append(low.bit_length() - 1)
        pattern ^= low
    return bits


def from_bytes(content: bytes | memoryview) -> Elements:
    """Read elements, (n, 2), of 16 bytes each."""
    return np.frombuffer(content, _WORDS).reshape(-1, 2)


def to_bytes(elements: Elements) -> bytes:
    """Write elements as 16 bytes each."""
    return elements.astype(_WORDS, copy=False).tobytes()


def random_elements(seed: bytes, purpose: bytes, count: int) -> Elements:
    """Expand a seed into elements; one (seed, purpose) is used once."""
    return _expand_rows(seed, purpose, (count, 2))


def _expand_rows(seed: bytes, purpose: bytes, shape: tuple[int, int]) -> NDArray[np.uint64]:
    """Expand a seed into random words of this shape."""
    rows = np.zeros(shape, _WORDS)
    add_random(rows, seed, purpose)
    return rows


def add_random(rows: NDArray[np.uint64], seed: bytes, purpose: bytes) -> None:
    """Add the words of `_expand_rows` in place, without a second array of that size."""
    content = rows.reshape(-1).view(np.uint8)
    start = 0
    for part in keystream_chunks(seed, purpose, length=len(content)):
        content[start : start + len(part)] ^= np.frombuffer(part, np.uint8)
        start += len(part)


class Multiplier:
    """A multiplier by one element, of 16 bytes.

    Sixteen tables say what each byte of the other factor adds. Which entries are read follows from
    the other factor alone, so time tells nothing of this one where the other is public.
    """

    def __init__(self, factor: bytes) -> None:
        """Compute the factor times each power of x, and tables of all sums of eight of these."""
        power = int.from_bytes(factor, "little")
        powers = []
        for _ in range(8 * ELEMENT_BYTES):
            powers.append(power)
            power = (power ^ _TOP) << 1 ^ _MODULUS if power & _TOP else power << 1
        content = b"".join(power.to_bytes(ELEMENT_BYTES, "little") for power in powers)
        self._tables = subset_sums(from_bytes(content))

    def multiply_elements(self, elements: Elements) -> Elements:
        """Return the product of each element with the factor, (n, 2)."""
        return gather_sums(self._tables, elements)


def view_as_items(elements: NDArray[np.uint64]) -> NDArray[Any]:
    """View rows of words as one item each, which numpy moves as a whole.

    Rows are put in place several times as fast so. Nothing is computed with these items.
    """
    words = elements.shape[-1]
    kind = _ITEMS.get(words, np.dtype((np.void, words * _WORDS.itemsize)))
    items: NDArray[Any] = np.ascontiguousarray(elements).view(kind)[..., 0]
    return items


def subset_sums(elements: Elements) -> NDArray[np.uint64]:
    """Return tables of all sums of eight rows of w words each, shape (n / 8, 256, w).

    Entry b of a table is the sum of those of its elements whose bits are set in b.
    """
    tables = np.zeros((len(elements) // 8, 256, elements.shape[1]), np.uint64)
    for bit in range(8):
        half = 1 << bit
        tables[:, half : 2 * half] = tables[:, :half] ^ elements[bit::8, None]
    return tables


def gather_sums(tables: NDArray[np.uint64], selectors: NDArray[np.uint64]) -> Elements:
    """Sum, for each row, the entries of `subset_sums` that its selector's first bytes name."""
    chosen = np.ascontiguousarray(selectors, _WORDS).view(np.uint8)
    sums = np.zeros((len(selectors), tables.shape[2]), np.uint64)
    for start in range(0, len(sums), _PIECE):  # what is worked on stays in the cache
        part = sums[start : start + _PIECE]
        entries = chosen[start : start + _PIECE, : len(tables)].T.astype(np.int64)
        for table, places in zip(tables, entries, strict=True):
            part ^= table.take(places, axis=0)
    return sums

"""An oblivious key-value store over GF(2^128): a linear system with three ones and few dense bits
in each row.

Run by: the party that encodes IDs, and the one that decodes them, with one public key of the hash.
A store has m sparse cells and 48 dense cells; the value of an ID is the sum of three sparse cells
and of the dense cells that 48 bits of the ID's hash select. Encoding peels: a cell that only one ID
uses is set to what this ID still lacks, round after round; the few IDs that remain are solved by
elimination. Cells that no ID needs are random, so if values are random the store reveals only how
many IDs it may hold.

Encoding fails where the rows are linearly dependent. For a random key that has probability at most
2^-48 times the expected number of sets of rows whose sparse parts add up to nothing (the empty one
included), which `count_cells` keeps below 2, as its test computes: below 2^-47.
The encoding party then takes another key; others learn no more than that this happened.

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

from apfed_protocols.psi.interface import digest_each, draw_different_positions
from apfed_protocols.randomness import fresh_key, keystream_chunks

Indices = NDArray[np.signedinteger]
Digests = NDArray[np.uint64]
"""Shape (n, 6)."""

DENSE = 48
_ONES = 3
_DIGEST_BYTES = 8 * _ONES + DENSE // 8 + 2 + 16
_EXPANSION = 1.3
_MIN_CELLS = 40
# While rows are peeled, one word for each cell holds the number of rows that use it, above 40 bits
# with the sum of their numbers.
_SUM_BITS = 40
_ONE_USER = 1 << _SUM_BITS
_PERSON = b"apfed psi store"
_CHUNK = 2**15  # rows that are computed at once, to stay in the cache

Elements = NDArray[np.uint64]
"""Shape (n, 2)."""

ELEMENT_BYTES = 16
_WORDS = np.dtype("<u8")
_MODULUS = 0x87
_TOP = 1 << 127
_ROWS_SUMMED_AT_ONCE = 2**12
# By words of an item, a type of its width: numpy moves numbers faster than raw bytes.
_ITEMS = {1: np.dtype(np.uint64), 2: np.dtype(np.complex128)}


class DependentRowsError(ArithmeticError):
    """The rows of these IDs under this key are linearly dependent, so that no store exists; another
    key is needed.
    """


def count_cells(ids: int) -> int:
    """Return the number of sparse cells of a store for this number of IDs."""
    return math.ceil(_EXPANSION * ids) + _MIN_CELLS


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of a store's linear system for a set of IDs: which cells add up to the value of each
    ID.

    Attributes:
        cells: the three sparse cells of each ID, all different, shape (n, 3).
        dense: 48 bits for each ID that select dense cells, the lowest of a word, shape (n, 1).
    """

    cells: Indices
    dense: NDArray[np.uint64]

    @classmethod
    def from_digests(cls, digests: Digests, size: int) -> "Rows":
        """Return the rows of the linear system for n IDs: the cells of each ID in a store with
        `size` sparse cells, which its digest selects.

        `digests`: hash of each ID, six words, (n, 6): three for the sparse cells, one for the dense
        cells, two that are not used here.
        """
        cell_type = np.int32 if size <= np.iinfo(np.int32).max else np.int64
        cells = np.empty((len(digests), _ONES), cell_type)
        for chunk in _split_chunks(len(digests)):
            cells[chunk] = draw_different_positions(digests[chunk, :_ONES], size)
        return cls(cells=cells, dense=digests[:, _ONES : _ONES + 1] & np.uint64((1 << DENSE) - 1))

    def __getitem__(self, chunk: slice) -> "Rows":
        return Rows(cells=self.cells[chunk], dense=self.dense[chunk])

    def pick_rows(self, indices: Indices) -> "Rows":
        """Return the rows with these indices."""
        return Rows(cells=self.cells.take(indices, axis=0), dense=self.dense.take(indices, axis=0))

    def __len__(self) -> int:
        return len(self.cells)


def digest_ids(ids: Sequence[bytes], key: bytes) -> Digests:
    """Return the BLAKE2b digest of each ID under a key as six words, (n, 6): three for its sparse
    cells, one for its dense cells, two for the value that intersections encode.
    """
    keyed = hashlib.blake2b(key=key, digest_size=_DIGEST_BYTES, person=_PERSON)
    return digest_each(ids, keyed).view("<u8")


def extract_targets(digests: Digests) -> Elements:
    """Return H(x) of each ID from its digest, 128 bits, shape (n, 2): the values that intersections
    encode.
    """
    return np.ascontiguousarray(digests[:, _ONES + 1 :])


def _split_chunks(rows: int) -> Iterator[slice]:
    """Return slices of at most `_CHUNK` that cover this number of rows."""
    return (slice(start, start + _CHUNK) for start in range(0, rows, _CHUNK))


def decode_rows(store: Elements, rows: Rows) -> Elements:
    """Decode the value of each of n IDs from a store, (n, w): the XOR of the cells that the ID
    selects, each of w words.

    `store`: m sparse cells, then the 48 dense cells, (m + 48, w). `rows`: the cells that each ID
    selects.
    """
    dense_tables = compute_subset_sums(store[-DENSE:])
    values = np.empty((len(rows), store.shape[1]), np.uint64)
    for chunk in _split_chunks(len(rows)):
        values[chunk] = _sum_cells(store, dense_tables, rows[chunk])
    return values


def _sum_cells(store: Elements, dense_tables: NDArray[np.uint64], rows: Rows) -> Elements:
    """Return, for each of n IDs, the sum (XOR) of its three sparse cells and of its dense cells,
    (n, w).

    Args:
        store: the cells, w words each.
        dense_tables: all sums of the dense cells, eight cells a table (`compute_subset_sums`).
        rows: the cells that each ID selects.
    """
    sums = gather_sums(dense_tables, rows.dense)
    for which in range(_ONES):
        sums ^= store.take(rows.cells[:, which], axis=0)
    return sums


class Encoder:
    """An encoder of values for one set of rows. The order in which cells are solved depends on the
    rows alone, and is computed when the encoder is made.
    """

    def __init__(self, rows: Rows, cells: int) -> None:
        """Compute the order for these rows, in a store with `cells` sparse cells."""
        self._rows = rows
        self._cells = cells
        # The rows removed in each round with a cell of their own, and the rows that remain.
        self._rounds, self._unpeeled = _peel_rows(rows.cells, cells)

    def encode(self, values: Elements, *, seed: bytes | None = None) -> Elements:
        """Return an oblivious key-value store: for each row (ID) the XOR of the cells that the row
        selects is the row's value. The store has sparse and dense cells of w words,
        (cells + DENSE, w).

        It starts with random cells. First the rows that could not be peeled are solved by
        elimination, then the peeled rows, last round first: each sets the cell that only it uses.

        Args:
            values: the value of each row, w words, (n, w).
            seed: 32 secret bytes, used once, from which the random cells are expanded; None: a
                fresh seed.

        Raises DependentRowsError: the rows are linearly dependent.
        """
        rows = self._rows
        cells = self._cells
        store = _expand_rows(seed or fresh_key(), b"store", (cells + DENSE, values.shape[1]))
        _solve_cells(store, rows, values, self._unpeeled)
        dense_tables = compute_subset_sums(store[-DENSE:])
        for peeled_rows, own_cells in reversed(self._rounds):
            # No row of a round uses the own cell of another, so chunks are independent.
            for chunk in _split_chunks(len(own_cells)):
                chunk_rows = peeled_rows[chunk]
                chunk_cells = own_cells[chunk]
                sums = _sum_cells(store, dense_tables, rows.pick_rows(chunk_rows))
                # The sums include the present content of the own cells, which is replaced.
                sums ^= store.take(chunk_cells, axis=0)
                new_content = values.take(chunk_rows, axis=0) ^ sums
                view_as_items(store)[chunk_cells] = view_as_items(new_content)
        return store


def _peel_rows(cells_n3: Indices, cells: int) -> tuple[list[tuple[Indices, Indices]], Indices]:
    """Peel the rows of a store's linear system: in each round, remove the rows that have a cell of
    their own, which no other remaining row uses. In the opposite order each can then be solved by
    setting its own cell.

    Args:
        cells_n3: the three sparse cells of each of n rows, (n, 3).
        cells: the number of sparse cells.

    Returns:
        For each round, the rows that are removed and the own cell of each; and the rows that
        remain.
    """
    # The word of a cell counts its users (the remaining rows that use it) in its upper bits, and
    # has the sum of their row numbers in the lower 40 bits. Each row adds this to its cells:
    row_words = np.arange(len(cells_n3)) + _ONE_USER
    cell_words = np.zeros(cells, np.int64)
    for which in range(_ONES):
        added = np.bincount(cells_n3[:, which], row_words, cells)
        np.add(cell_words, added, out=cell_words, casting="unsafe")
    is_remaining = np.ones(len(cells_n3), np.bool_)
    rounds = []
    scratch = np.empty(max(cells, len(cells_n3)), np.int64)
    single_user_cells = np.flatnonzero(cell_words >> _SUM_BITS == 1)
    while len(single_user_cells):
        # If a cell has one user, the sum of row numbers is that row. A row may be the only user of
        # several cells; one of them is enough.
        peeled, index_of_cell = _find_unique(cell_words[single_user_cells] - _ONE_USER, scratch)
        rounds.append((peeled, single_user_cells[index_of_cell]))
        is_remaining[peeled] = False
        touched_cells = cells_n3[peeled].ravel()
        np.subtract.at(cell_words, touched_cells, np.repeat(row_words[peeled], _ONES))
        has_single_user = cell_words[touched_cells] >> _SUM_BITS == 1
        single_user_cells, _ = _find_unique(touched_cells[has_single_user], scratch)
    return rounds, np.flatnonzero(is_remaining)


def _find_unique(numbers: Indices, scratch: Indices) -> tuple[Indices, Indices]:
    """Return each of these non-negative numbers once, and for each an index where it occurs,
    without sorting.

    `scratch`: working memory, which is overwritten; longer than the largest number.
    """
    indices = np.arange(len(numbers))
    scratch[numbers] = indices  # of equal numbers, the last index is stored
    unique = np.flatnonzero(scratch[numbers] == indices)
    return numbers[unique], unique


def _solve_cells(store: Elements, rows: Rows, values: Elements, remaining: Indices) -> None:
    """Solve the rows that could not be peeled, by Gaussian elimination over GF(2): set cells of
    `store`, in place, so that the XOR of the cells that such a row selects is its value.

    Args:
        store: sparse cells, then dense cells, of w words each, filled with random content.
        rows: the cells that each of n rows selects.
        values: the value of each row, w words, (n, w).
        remaining: the indices of the rows to solve.

    Raises DependentRowsError: these rows are linearly dependent.
    """
    sparse_cells = len(store) - DENSE
    # Pivot cell, row as a bit pattern of cells, and value of each solved equation.
    pivots: list[tuple[int, int, int]] = []
    for row in remaining.tolist():
        pattern = int(rows.dense[row, 0]) << sparse_cells
        for cell in rows.cells[row].tolist():
            pattern |= 1 << cell
        value = _read_int(values[row])
        for pivot_cell, pivot_pattern, pivot_value in pivots:
            if (pattern >> pivot_cell) & 1:
                pattern ^= pivot_pattern
                value ^= pivot_value
        if not pattern:
            raise DependentRowsError(f"{len(remaining)} rows are linearly dependent")
        pivots.append((pattern.bit_length() - 1, pattern, value))
    # An equation does not contain the cells of earlier pivots, so the last one is solved first.
    for pivot_cell, pattern, value in reversed(pivots):
        content = value
        for cell in _list_bits(pattern ^ (1 << pivot_cell)):
            content ^= _read_int(store[cell])
        store[pivot_cell] = np.frombuffer(content.to_bytes(8 * store.shape[1], "little"), "<u8")


def _read_int(element: NDArray[np.uint64]) -> int:
    """Return one element of GF(2^128), or another row of words, low word first, as an integer."""
    return int.from_bytes(element.astype(_WORDS).tobytes(), "little")


def _list_bits(pattern: int) -> list[int]:
    """Return the positions of the bits that are set in the integer `pattern`, lowest first."""
    positions = []
    while pattern:
        lowest_bit = pattern & -pattern
        positions.append(lowest_bit.bit_length() - 1)
        pattern ^= lowest_bit
    return positions


def from_bytes(content: bytes | memoryview) -> Elements:
    """Decode elements of 16 bytes each, (n, 2)."""
    return np.frombuffer(content, _WORDS).reshape(-1, 2)


def to_bytes(elements: Elements) -> bytes:
    """Encode elements, (n, 2), in 16 bytes each."""
    return elements.astype(_WORDS, copy=False).tobytes()


def expand_elements(seed: bytes, purpose: bytes, count: int) -> Elements:
    """Return `count` pseudorandom elements expanded from a secret seed; the same seed and purpose
    give the same elements, so each pair is used once.
    """
    return _expand_rows(seed, purpose, (count, 2))


def _expand_rows(seed: bytes, purpose: bytes, shape: tuple[int, int]) -> NDArray[np.uint64]:
    """Return pseudorandom words of this shape, expanded from a seed for one purpose."""
    rows = np.zeros(shape, _WORDS)
    add_random_words(rows, seed, purpose)
    return rows


def add_random_words(rows: NDArray[np.uint64], seed: bytes, purpose: bytes) -> None:
    """XOR pseudorandom words to `rows`, in place, chunk by chunk: the words that `_expand_rows`
    returns for this seed, purpose and shape. This saves a second array of that size.
    """
    content = rows.reshape(-1).view(np.uint8)
    start = 0
    for chunk in keystream_chunks(seed, purpose, length=len(content)):
        content[start : start + len(chunk)] ^= np.frombuffer(chunk, np.uint8)
        start += len(chunk)


class Multiplier:
    """A multiplier of elements of GF(2^128) by one secret factor.

    Sixteen tables hold what each byte of the other factor contributes. Which entries are read
    depends on the other factor alone, so if that is public the running time reveals nothing about
    this one.
    """

    def __init__(self, factor: bytes) -> None:
        """Compute the tables for a factor, an element of GF(2^128) in 16 bytes. The table of byte k
        has, for each value of the byte, the sum of the multiples factor * x^j, 8k <= j < 8k + 8,
        whose bits are set in it.
        """
        multiple = int.from_bytes(factor, "little")
        multiples = []
        for _ in range(8 * ELEMENT_BYTES):
            multiples.append(multiple)
            # The next multiple by x, modulo x^128 + x^7 + x^2 + x + 1.
            has_overflow = multiple & _TOP
            multiple = ((multiple ^ _TOP) << 1) ^ _MODULUS if has_overflow else multiple << 1
        content = b"".join(multiple.to_bytes(ELEMENT_BYTES, "little") for multiple in multiples)
        self._tables = compute_subset_sums(from_bytes(content))

    def multiply_elements(self, elements: Elements) -> Elements:
        """Return the product of each element with the factor, (n, 2)."""
        return gather_sums(self._tables, elements)


def view_as_items(elements: NDArray[np.uint64]) -> NDArray[Any]:
    """Return n rows of w words, (n, w), as an array of n items, (n,), which NumPy copies several
    times as fast by index. The items are for copying only, not for arithmetic. The array is a view
    if the rows are contiguous.
    """
    words = elements.shape[-1]
    item_type = _ITEMS.get(words, np.dtype((np.void, words * _WORDS.itemsize)))
    items: NDArray[Any] = np.ascontiguousarray(elements).view(item_type)[..., 0]
    return items


def compute_subset_sums(elements: Elements) -> NDArray[np.uint64]:
    """Return tables of all subset sums (XOR) of n rows of w words, one table for each eight
    consecutive rows, (n / 8, 256, w).

    Entry b of a table is the sum of the rows whose bits are set in b. By these tables, one look-up
    replaces eight conditional additions (`gather_sums`).
    """
    tables = np.zeros((len(elements) // 8, 256, elements.shape[1]), np.uint64)
    for bit in range(8):
        half = 1 << bit
        tables[:, half : 2 * half] = tables[:, :half] ^ elements[bit::8, None]
    return tables


def gather_sums(tables: NDArray[np.uint64], selectors: NDArray[np.uint64]) -> Elements:
    """Return, for each of n selectors, the sum (XOR) of the rows that its bits select, (n, w).

    Args:
        tables: what `compute_subset_sums` returned for 8 t rows of w words, (t, 256, w).
        selectors: 64-bit words, some for each selector, (n, words). Bit k of byte b of a selector
            selects row 8 b + k; only the first t bytes count.
    """
    selector_bytes = np.ascontiguousarray(selectors, _WORDS).view(np.uint8)
    sums = np.zeros((len(selectors), tables.shape[2]), np.uint64)
    for start in range(0, len(sums), _ROWS_SUMMED_AT_ONCE):  # in chunks that stay in the cache
        chunk = slice(start, start + _ROWS_SUMMED_AT_ONCE)
        chunk_sums = sums[chunk]  # a view, changed in place
        entries = selector_bytes[chunk, : len(tables)].T.astype(np.int64)
        for table, entries_of_table in zip(tables, entries, strict=True):
            chunk_sums ^= table.take(entries_of_table, axis=0)
    return sums

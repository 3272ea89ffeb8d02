"""An oblivious key-value store over GF(2^128): a linear system with three ones and few dense bits
in each equation.

Run by: the party that encodes IDs, and the one that decodes them, with one public key of the hash.
A store has m sparse cells and 48 dense cells; the value of an ID is the sum of three sparse cells
and of the dense cells that 48 bits of the ID's hash select. Encoding peels: a cell that only one ID
uses is set to what this ID still lacks, round after round; the few IDs that remain are solved by
elimination. Cells that no ID needs are random, so if values are random the store reveals only how
many IDs it may hold.

Encoding fails where the equations are linearly dependent. For a random key that has probability at
most 2^-48 times the expected number of sets of equations whose sparse parts add up to nothing (the
empty one included), which `count_cells` keeps below 2, as its test computes: below 2^-47. The
encoding party then takes another key; others learn no more than that this happened.

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

DENSE_CELLS = 48
_SPARSE_CELLS_PER_ID = 3
_DIGEST_BYTES = 8 * _SPARSE_CELLS_PER_ID + DENSE_CELLS // 8 + 2 + 16
_EXPANSION = 1.3
_MIN_CELLS = 40
# While equations are peeled, one word for each cell holds the number of equations that use it,
# above 40 bits with the sum of their numbers.
_ROW_SUM_BITS = 40
_ONE_USER_STEP = 1 << _ROW_SUM_BITS
_HASH_PERSONALISATION = b"apfed psi store"
_EQUATIONS_PER_CHUNK = 2**15  # equations that are computed at once, to stay in the cache

Elements = NDArray[np.uint64]
"""Shape (n, 2)."""

ELEMENT_BYTES = 16
_WORD_TYPE = np.dtype("<u8")
_LOW_MODULUS_BITS = 0x87
_TOP_BIT = 1 << 127
_ROWS_SUMMED_AT_ONCE = 2**12
# By words of an item, a type of its width: numpy moves numbers faster than raw bytes.
_ITEM_TYPE_BY_WORD_COUNT = {1: np.dtype(np.uint64), 2: np.dtype(np.complex128)}


class DependentEquationsError(ArithmeticError):
    """The equations of these IDs under this key are linearly dependent, so that no store exists;
    another key is needed.
    """


def count_cells(id_count: int) -> int:
    """Return the number of sparse cells of a store for this number of IDs."""
    return math.ceil(_EXPANSION * id_count) + _MIN_CELLS


@dataclass(frozen=True, kw_only=True)
class Equations:
    """The equations of a store's linear system for a set of IDs: which cells add up to the value of
    each ID.

    Attributes:
        sparse_cells: the three sparse cells of each ID, all different, shape (n, 3).
        dense_bits: 48 bits for each ID that select dense cells, the lowest of a word, shape (n, 1).
    """

    sparse_cells: Indices
    dense_bits: NDArray[np.uint64]

    @classmethod
    def from_digests(cls, digests: Digests, cell_count: int) -> "Equations":
        """Return the equations of the linear system for n IDs: the cells of each ID in a store with
        `cell_count` sparse cells, which its digest selects.

        `digests`: hash of each ID, six words, (n, 6): three for the sparse cells, one for the dense
        cells, two that are not used here.
        """
        cell_type = np.int32 if cell_count <= np.iinfo(np.int32).max else np.int64
        sparse_cells = np.empty((len(digests), _SPARSE_CELLS_PER_ID), cell_type)
        for chunk in _split_chunks(len(digests)):
            sparse_cells[chunk] = draw_different_positions(
                digests[chunk, :_SPARSE_CELLS_PER_ID], cell_count
            )
        dense_words = digests[:, _SPARSE_CELLS_PER_ID : _SPARSE_CELLS_PER_ID + 1]
        dense_mask = np.uint64((1 << DENSE_CELLS) - 1)
        return cls(sparse_cells=sparse_cells, dense_bits=dense_words & dense_mask)

    def __getitem__(self, chunk: slice) -> "Equations":
        return Equations(sparse_cells=self.sparse_cells[chunk], dense_bits=self.dense_bits[chunk])

    def pick_equations(self, indices: Indices) -> "Equations":
        """Return the equations with these indices."""
        return Equations(
            sparse_cells=self.sparse_cells.take(indices, axis=0),
            dense_bits=self.dense_bits.take(indices, axis=0),
        )

    def __len__(self) -> int:
        return len(self.sparse_cells)


def digest_ids(ids: Sequence[bytes], key: bytes) -> Digests:
    """Return the BLAKE2b digest of each ID under a key as six words, (n, 6): three for its sparse
    cells, one for its dense cells, two for the value that intersections encode.
    """
    keyed_hasher = hashlib.blake2b(key=key, digest_size=_DIGEST_BYTES, person=_HASH_PERSONALISATION)
    return digest_each(ids, keyed_hasher).view("<u8")


def extract_id_hashes(digests: Digests) -> Elements:
    """Return H(x) of each ID from its digest, 128 bits, shape (n, 2): the values that intersections
    encode.
    """
    return np.ascontiguousarray(digests[:, _SPARSE_CELLS_PER_ID + 1 :])


def _split_chunks(row_count: int) -> Iterator[slice]:
    """Return slices of at most `_EQUATIONS_PER_CHUNK` that cover this number of equations."""
    return (
        slice(start, start + _EQUATIONS_PER_CHUNK)
        for start in range(0, row_count, _EQUATIONS_PER_CHUNK)
    )


def decode_values(store: Elements, equations: Equations) -> Elements:
    """Decode the value of each of n IDs from a store, (n, w): the XOR of the cells that the ID
    selects, each of w words.

    `store`: m sparse cells, then the 48 dense cells, (m + 48, w). `equations`: the cells that each
    ID selects.
    """
    dense_tables = compute_subset_sums(store[-DENSE_CELLS:])
    values = np.empty((len(equations), store.shape[1]), np.uint64)
    for chunk in _split_chunks(len(equations)):
        values[chunk] = _sum_cells(store, dense_tables, equations[chunk])
    return values


def _sum_cells(store: Elements, dense_tables: NDArray[np.uint64], equations: Equations) -> Elements:
    """Return, for each of n IDs, the sum (XOR) of its three sparse cells and of its dense cells,
    (n, w).

    Args:
        store: the cells, w words each.
        dense_tables: all sums of the dense cells, eight cells a table (`compute_subset_sums`).
        equations: the cells that each ID selects.
    """
    sums = gather_sums(dense_tables, equations.dense_bits)
    for cell_index in range(_SPARSE_CELLS_PER_ID):
        sums ^= store.take(equations.sparse_cells[:, cell_index], axis=0)
    return sums


class Encoder:
    """An encoder of values for one set of equations. The order in which cells are solved depends on
    the equations alone, and is computed when the encoder is made.
    """

    def __init__(self, equations: Equations, cell_count: int) -> None:
        """Compute the order for these equations, in a store with `cell_count` sparse cells."""
        self._equations = equations
        self._cell_count = cell_count
        # The equations removed in each round with a cell of their own, and the equations that
        # remain.
        self._peeled_rounds, self._unpeeled_equations = _peel_equations(
            equations.sparse_cells, cell_count
        )

    def encode(self, values: Elements, *, seed: bytes | None = None) -> Elements:
        """Return an oblivious key-value store: for each equation (ID) the XOR of the cells that the
        equation selects is the equation's value. The store has sparse and dense cells of w words,
        (cells + DENSE, w).

        It starts with random cells. First the equations that could not be peeled are solved by
        elimination, then the peeled equations, last round first: each sets the cell that only it
        uses.

        Args:
            values: the value of each equation, w words, (n, w).
            seed: 32 secret bytes, used once, from which the random cells are expanded; None: a
                fresh seed.

        Raises DependentEquationsError: the equations are linearly dependent.
        """
        equations = self._equations
        cell_count = self._cell_count
        store = _expand_rows(
            seed or fresh_key(), b"store", (cell_count + DENSE_CELLS, values.shape[1])
        )
        _solve_cells(store, equations, values, self._unpeeled_equations)
        dense_tables = compute_subset_sums(store[-DENSE_CELLS:])
        for peeled_equations, own_cells in reversed(self._peeled_rounds):
            # No equation of a round uses the own cell of another, so chunks are independent.
            for chunk in _split_chunks(len(own_cells)):
                chunk_equations = peeled_equations[chunk]
                chunk_cells = own_cells[chunk]
                sums = _sum_cells(store, dense_tables, equations.pick_equations(chunk_equations))
                # The sums include the present content of the own cells, which is replaced.
                sums ^= store.take(chunk_cells, axis=0)
                new_content = values.take(chunk_equations, axis=0) ^ sums
                view_as_items(store)[chunk_cells] = view_as_items(new_content)
        return store


def _peel_equations(
    cells_n3: Indices, cell_count: int
) -> tuple[list[tuple[Indices, Indices]], Indices]:
    """Peel the equations of a store's linear system: in each round, remove the equations that have
    a cell of their own, which no other remaining row uses. In the opposite order each can then be
    solved by setting its own cell.

    Args:
        cells_n3: the three sparse cells of each of n equations, (n, 3).
        cell_count: the number of sparse cells.

    Returns:
        For each round, the equations that are removed and the own cell of each; and the equations
        that remain.
    """
    # The word of a cell counts its users (the remaining equations that use it) in its upper bits,
    # and has the sum of their equation numbers in the lower 40 bits. Each equation adds this to its
    # cells:
    equation_words = np.arange(len(cells_n3)) + _ONE_USER_STEP
    cell_words = np.zeros(cell_count, np.int64)
    for cell_index in range(_SPARSE_CELLS_PER_ID):
        added_words = np.bincount(cells_n3[:, cell_index], equation_words, cell_count)
        np.add(cell_words, added_words, out=cell_words, casting="unsafe")
    is_remaining = np.ones(len(cells_n3), np.bool_)
    rounds = []
    scratch = np.empty(max(cell_count, len(cells_n3)), np.int64)
    single_user_cells = np.flatnonzero(cell_words >> _ROW_SUM_BITS == 1)
    while len(single_user_cells):
        # If a cell has one user, the sum of equation numbers is that equation. An equation may be
        # the only user of several cells; one of them is enough.
        peeled_equations, cell_indices = _find_unique(
            cell_words[single_user_cells] - _ONE_USER_STEP, scratch
        )
        rounds.append((peeled_equations, single_user_cells[cell_indices]))
        is_remaining[peeled_equations] = False
        touched_cells = cells_n3[peeled_equations].ravel()
        np.subtract.at(
            cell_words,
            touched_cells,
            np.repeat(equation_words[peeled_equations], _SPARSE_CELLS_PER_ID),
        )
        has_single_user = cell_words[touched_cells] >> _ROW_SUM_BITS == 1
        single_user_cells, _ = _find_unique(touched_cells[has_single_user], scratch)
    return rounds, np.flatnonzero(is_remaining)


def _find_unique(numbers: Indices, scratch: Indices) -> tuple[Indices, Indices]:
    """Return each of these non-negative numbers once, and for each an index where it occurs,
    without sorting.

    `scratch`: working memory, which is overwritten; longer than the largest number.
    """
    indices = np.arange(len(numbers))
    scratch[numbers] = indices  # of equal numbers, the last index is stored
    unique_indices = np.flatnonzero(scratch[numbers] == indices)
    return numbers[unique_indices], unique_indices


def _solve_cells(
    store: Elements, equations: Equations, values: Elements, remaining_equations: Indices
) -> None:
    """Solve the equations that could not be peeled, by Gaussian elimination over GF(2): set cells
    of `store`, in place, so that the XOR of the cells that such an equation selects is its value.

    Args:
        store: sparse cells, then dense cells, of w words each, filled with random content.
        equations: the cells that each of n equations selects.
        values: the value of each equation, w words, (n, w).
        remaining_equations: the indices of the equations to solve.

    Raises DependentEquationsError: these equations are linearly dependent.
    """
    sparse_count = len(store) - DENSE_CELLS
    # Pivot cell, row as a bit pattern of cells, and value of each solved equation.
    solved_equations: list[tuple[int, int, int]] = []
    for equation in remaining_equations.tolist():
        pattern = int(equations.dense_bits[equation, 0]) << sparse_count
        for cell in equations.sparse_cells[equation].tolist():
            pattern |= 1 << cell
        value = _read_int(values[equation])
        for pivot_cell, pivot_pattern, pivot_value in solved_equations:
            if (pattern >> pivot_cell) & 1:
                pattern ^= pivot_pattern
                value ^= pivot_value
        if not pattern:
            raise DependentEquationsError(f"{len(remaining_equations)} rows are linearly dependent")
        solved_equations.append((pattern.bit_length() - 1, pattern, value))
    # An equation does not contain the cells of earlier pivots, so the last one is solved first.
    for pivot_cell, pattern, value in reversed(solved_equations):
        cell_content = value
        for cell in _list_bits(pattern ^ (1 << pivot_cell)):
            cell_content ^= _read_int(store[cell])
        store[pivot_cell] = np.frombuffer(
            cell_content.to_bytes(8 * store.shape[1], "little"), "<u8"
        )


def _read_int(element: NDArray[np.uint64]) -> int:
    """Return one element of GF(2^128), or another row of words, low word first, as an integer."""
    return int.from_bytes(element.astype(_WORD_TYPE).tobytes(), "little")


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
    return np.frombuffer(content, _WORD_TYPE).reshape(-1, 2)


def to_bytes(elements: Elements) -> bytes:
    """Encode elements, (n, 2), in 16 bytes each."""
    return elements.astype(_WORD_TYPE, copy=False).tobytes()


def expand_elements(seed: bytes, purpose: bytes, count: int) -> Elements:
    """Return `count` pseudorandom elements expanded from a secret seed; the same seed and purpose
    give the same elements, so each pair is used once.
    """
    return _expand_rows(seed, purpose, (count, 2))


def _expand_rows(seed: bytes, purpose: bytes, shape: tuple[int, int]) -> NDArray[np.uint64]:
    """Return pseudorandom words of this shape, expanded from a seed for one purpose."""
    words = np.zeros(shape, _WORD_TYPE)
    add_random_words(words, seed, purpose)
    return words


def add_random_words(words: NDArray[np.uint64], seed: bytes, purpose: bytes) -> None:
    """XOR pseudorandom words to `words`, in place, chunk by chunk: the words that `_expand_rows`
    returns for this seed, purpose and shape. This saves a second array of that size.
    """
    content = words.reshape(-1).view(np.uint8)
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
            has_overflow = multiple & _TOP_BIT
            multiple = (
                ((multiple ^ _TOP_BIT) << 1) ^ _LOW_MODULUS_BITS if has_overflow else multiple << 1
            )
        encoded_multiples = b"".join(
            multiple.to_bytes(ELEMENT_BYTES, "little") for multiple in multiples
        )
        self._tables = compute_subset_sums(from_bytes(encoded_multiples))

    def multiply_elements(self, elements: Elements) -> Elements:
        """Return the product of each element with the factor, (n, 2)."""
        return gather_sums(self._tables, elements)


def view_as_items(elements: NDArray[np.uint64]) -> NDArray[Any]:
    """Return n rows of w words, (n, w), as an array of n items, (n,), which NumPy copies several
    times as fast by index. The items are for copying only, not for arithmetic. The array is a view
    if the rows are contiguous.
    """
    word_count = elements.shape[-1]
    item_type = _ITEM_TYPE_BY_WORD_COUNT.get(
        word_count, np.dtype((np.void, word_count * _WORD_TYPE.itemsize))
    )
    items: NDArray[Any] = np.ascontiguousarray(elements).view(item_type)[..., 0]
    return items


def compute_subset_sums(rows: Elements) -> NDArray[np.uint64]:
    """Return tables of all subset sums (XOR) of n rows of w words, one table for each eight
    consecutive rows, (n / 8, 256, w).

    Entry b of a table is the sum of the rows whose bits are set in b. By these tables, one look-up
    replaces eight conditional additions (`gather_sums`).
    """
    tables = np.zeros((len(rows) // 8, 256, rows.shape[1]), np.uint64)
    for bit in range(8):
        half = 1 << bit
        tables[:, half : 2 * half] = tables[:, :half] ^ rows[bit::8, None]
    return tables


def gather_sums(tables: NDArray[np.uint64], selectors: NDArray[np.uint64]) -> Elements:
    """Return, for each of n selectors, the sum (XOR) of the rows that its bits select, (n, w).

    Args:
        tables: what `compute_subset_sums` returned for 8 t rows of w words, (t, 256, w).
        selectors: 64-bit words, some for each selector, (n, words). Bit k of byte b of a selector
            selects row 8 b + k; only the first t bytes count.
    """
    selector_bytes = np.ascontiguousarray(selectors, _WORD_TYPE).view(np.uint8)
    sums = np.zeros((len(selectors), tables.shape[2]), np.uint64)
    for start in range(0, len(sums), _ROWS_SUMMED_AT_ONCE):  # in chunks that stay in the cache
        chunk = slice(start, start + _ROWS_SUMMED_AT_ONCE)
        chunk_sums = sums[chunk]  # a view, changed in place
        entries_by_table = selector_bytes[chunk, : len(tables)].T.astype(np.int64)
        for table, entries_of_table in zip(tables, entries_by_table, strict=True):
            chunk_sums ^= table.take(entries_of_table, axis=0)
    return sums

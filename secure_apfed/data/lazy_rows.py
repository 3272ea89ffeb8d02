"""Rows of a data set, such as images of a folder, that are read when a step needs them.

A map-style data set (`torch.utils.data.Dataset`) replaces the tensor of a table's features.
Indexing reads rows, in threads. `select` picks rows without reading them, so that putting a party's
rows into the order of the aligned people needs no memory.

Letters: N rows, B rows of a batch, M rows of a selection.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from secure_apfed.base.transfers import send_tensor
from secure_apfed.errors import DataError

_THREADS = 4
_NUMBERS_AT_ONCE = 2**23
"""Numbers of lazy rows that are in memory together: 32 MiB of float32."""


class MapDataset(Protocol):
    """A data set whose items are read by index, such as a `torch.utils.data.Dataset`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


def _count_items(dataset: MapDataset, party: str) -> int:
    """Return the data set's length. Raises DataError: its `__len__` fails or is missing."""
    try:
        return len(dataset)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise DataError(
            f"{party}: len() of its data set ({type(dataset).__name__}) fails: {error}; give a "
            "map-style data set, whose __len__ returns how many items it has"
        ) from error


class LazyRows:
    """The rows (N, *shape) of a data set, float32, read from it when they are indexed.

    Args:
        dataset: map-style data set; its items are tensors or arrays of one shape, or tuples whose
            first element is one; further elements, such as a label, are ignored.
        party: the party's name, for errors.
        rows: indices of the used items, in order, (N,); None: all.
        workers: threads that read the rows of one batch in parallel.
        convert: makes a row's tensor from an item; None: the item is as described above.

    Raises:
        DataError: the data set is empty, or its first item is no row.
    """

    def __init__(
        self,
        dataset: MapDataset,
        *,
        party: str,
        rows: Tensor | None = None,
        workers: int = _THREADS,
        convert: Callable[[Any], Tensor] | None = None,
    ) -> None:
        """Read the first row, whose shape all must have; for the arguments see the class."""
        self._dataset = dataset
        self._party = party
        self._item_indices = torch.arange(_count_items(dataset, party)) if rows is None else rows
        self._workers = workers
        self._convert_item = convert
        self._device = torch.device("cpu")
        self.dtype = torch.float32
        if not len(self._item_indices):
            raise DataError(f"{party}: its data set has no rows")
        self._row_shape = tuple(self._read_row(int(self._item_indices[0])).shape)

    def __len__(self) -> int:
        return len(self._item_indices)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of all rows, (N, *shape of a row), as of a tensor."""
        return (len(self._item_indices), *self._row_shape)

    def is_floating_point(self) -> bool:
        """Return that rows are floating-point numbers, as a tensor's method of this name does."""
        return True

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> "LazyRows":
        """Return the same rows; indexing them reads onto this device, and converts to `dtype`."""
        copied_rows = self.select(torch.arange(len(self)))
        copied_rows._device = device
        copied_rows.dtype = dtype or self.dtype
        return copied_rows

    def select(self, rows: Tensor) -> "LazyRows":
        """Return the rows at these positions, (M,), without reading them."""
        # A plain constructor call would read the first row again.
        selected_rows = object.__new__(type(self))
        vars(selected_rows).update(vars(self))
        selected_rows._item_indices = self._item_indices[rows.cpu()]
        return selected_rows

    def __getitem__(self, rows: Tensor | slice | Sequence[int]) -> Tensor:
        """Read the rows at B positions, and return them as a tensor (B, *shape).

        Raises DataError: a row has another shape than the first one, or is not finite.
        """
        positions = rows if isinstance(rows, slice) else torch.as_tensor(rows).cpu()
        item_indices = self._item_indices[positions].flatten().tolist()
        if not item_indices:
            return torch.empty((0, *self._row_shape), dtype=self.dtype, device=self._device)
        rows_B = self._read_rows(item_indices)
        is_finite_B = rows_B.flatten(1).isfinite().all(1)
        if not bool(is_finite_B.all()):
            bad_item = item_indices[int(is_finite_B.int().argmin())]
            raise DataError(
                f"{self._party}: item {bad_item} of its data set is NaN or infinite; mend it, or "
                "leave its ID out"
            )
        return send_tensor(rows_B, self._device, self.dtype)

    def _read_rows(self, item_indices: Sequence[int]) -> Tensor:
        """Read the items with these B indices in the data set, and return them as (B, *shape).

        Several items are read in parallel threads if `workers` is above 1.
        """
        read_item = partial(self._read_row, shape=self._row_shape)
        if self._workers <= 1 or len(item_indices) == 1:
            return torch.stack([read_item(item) for item in item_indices])
        with ThreadPoolExecutor(self._workers) as pool:
            return torch.stack(list(pool.map(read_item, item_indices)))

    def _read_row(self, item_index: int, shape: tuple[int, ...] | None = None) -> Tensor:
        """Return one item as a float32 tensor.

        `item_index`: index of the item in the data set. `shape`: shape that it must have; None:
        any.

        Raises DataError: the item is unreadable, no row of numbers, or of another shape.
        """
        try:
            item = self._dataset[item_index]
        except Exception as error:
            raise DataError(
                f"{self._party}: item {item_index} of its data set cannot be read: "
                f"{type(error).__name__}: {error}"
            ) from error
        if self._convert_item is not None:
            item = self._convert_item(item)
        elif isinstance(item, tuple | list) and item:
            item = item[0]
        if isinstance(item, Mapping):
            raise DataError(
                f"{self._party}: item {item_index} of its data set is a {type(item).__name__} with "
                f"{', '.join(map(str, item))}; expected one tensor a row: return one of them, or "
                "several as one, as torch.cat([item['x'], item['mask']]), which forward splits"
            )
        if isinstance(item, str | bytes):
            raise DataError(
                f"{self._party}: item {item_index} of its data set is a {type(item).__name__}; "
                "expected one tensor a row: let the data set return the numbers of its tokens"
            )
        try:
            row = torch.as_tensor(item, dtype=torch.float32)
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(
                f"{self._party}: item {item_index} of its data set is a {type(item).__name__}, not "
                "a tensor or an array of numbers; convert it in the data set, as with "
                "torchvision.transforms.ToTensor()"
            ) from error
        if not row.ndim:
            raise DataError(
                f"{self._party}: item {item_index} of its data set is a single number; expected a "
                "row, a tensor or an array of one or more axes"
            )
        if shape is not None and tuple(row.shape) != shape:
            raise DataError(
                f"{self._party}: item {item_index} of its data set has the shape "
                f"{tuple(row.shape)}, the first one {shape}; make all rows of one size"
            )
        return row


def _copy_row(row: NDArray[np.generic]) -> Tensor:
    """Return a float32 copy of one row of an array.

    A copy, because the array may be read-only, which tensors cannot be.
    """
    return torch.from_numpy(np.array(row, np.float32))


class MappedRows(LazyRows):
    """The rows (N, *shape) of a memory-mapped array.

    A batch is read by one indexing of the array, without threads, and converted to float32.

    Args:
        array: (N, *shape), numbers of any type.
        party: the party's name, for errors.
        rows: indices of the used rows, in order, (N,); None: all.
    """

    def __init__(
        self, array: NDArray[np.generic], *, party: str, rows: Tensor | None = None
    ) -> None:
        """Read the first row. Raises DataError: no rows, or a row that is a single number."""
        self._array = array
        super().__init__(array, party=party, rows=rows, workers=1, convert=_copy_row)

    def dim(self) -> int:
        """Return the number of axes, as a tensor's method of this name does."""
        return len(self.shape)

    def load_column(self, column: int) -> Tensor:
        """Return one column of flat rows, (N,), on the CPU."""
        cells = self._array[:, column][self._item_indices.numpy()]
        return torch.from_numpy(cells.astype(np.float32))

    def _read_rows(self, items: Sequence[int]) -> Tensor:
        """Read B rows of the array by one indexing, and return them as (B, *shape)."""
        return torch.from_numpy(self._array[np.asarray(items)].astype(np.float32))


def is_lazy(features: object) -> bool:
    """Return whether features are read from a data set when needed; else they are a tensor."""
    return isinstance(features, LazyRows)


def is_sampled(features: object) -> bool:
    """Return whether local models are fitted to a sample of these rows.

    This is so for flat rows of a memory-mapped array, which may not fit into memory.
    """
    return isinstance(features, MappedRows) and features.dim() == 2


def score_in_parts(score_rows: Callable[[Tensor], Tensor], features: Any, rows: Tensor) -> Tensor:
    """Return the scores (B, K) of B rows for K classes; lazy rows are loaded a few at a time.

    Args:
        score_rows: function from features (b, *shape) of some rows to their scores (b, K).
        features: a table's features (N, *shape): a tensor, or lazy rows.
        rows: positions in `features`, (B,).
    """
    if not is_lazy(features):
        return score_rows(features[rows])
    part_size = max(1, _NUMBERS_AT_ONCE // math.prod(features.shape[1:]))
    return torch.cat([score_rows(features[part_rows]) for part_rows in rows.split(part_size)])


def read_column(features: Any, column: int) -> Tensor:
    """Return one column of a table's features, (N,)."""
    if isinstance(features, MappedRows):
        return features.load_column(column)
    numbers_N: Tensor = features[:, column]
    return numbers_N


def select_rows(features: Any, rows: Tensor) -> Any:
    """Return the rows at these M positions of a table's features, (M, *shape).

    Lazy rows are selected, but not read.
    """
    return features.select(rows) if isinstance(features, LazyRows) else features[rows]

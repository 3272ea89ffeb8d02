"""Rows of a data set, such as images of a folder, that are read when a step needs them.

A map-style data set (`torch.utils.data.Dataset`) replaces the tensor of a table's features.
Indexing reads rows, in threads; `select` picks rows without reading them, so that a party's rows in
alignment order need no memory.

Letters: N rows, B rows of a batch.
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
    """A data set of rows by their number, as `torch.utils.data.Dataset` is."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


def _count_items(dataset: MapDataset, party: str) -> int:
    """Return len(dataset). Raises DataError: the length is no number of items."""
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
        self._rows = torch.arange(_count_items(dataset, party)) if rows is None else rows
        self._workers = workers
        self._convert = convert
        self._device = torch.device("cpu")
        self.dtype = torch.float32
        if not len(self._rows):
            raise DataError(f"{party}: its data set has no rows")
        self._row_shape = tuple(self._read_row(int(self._rows[0])).shape)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self._rows), *self._row_shape)

    def is_floating_point(self) -> bool:
        return True

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> "LazyRows":
        """Return the same rows, which are read onto this device, as this type."""
        other = self.select(torch.arange(len(self)))
        other._device = device
        other.dtype = dtype or self.dtype
        return other

    def select(self, rows: Tensor) -> "LazyRows":
        """Return these rows, (M,), without reading them."""
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        other._rows = self._rows[rows.cpu()]
        return other

    def __getitem__(self, rows: Tensor | slice | Sequence[int]) -> Tensor:
        """Read these rows, (B,) positions -> (B, *shape).

        Raises DataError: a row has another shape than the first one, or is not finite.
        """
        positions = self._rows[rows if isinstance(rows, slice) else torch.as_tensor(rows).cpu()]
        numbers = positions.flatten().tolist()
        if not numbers:
            return torch.empty((0, *self._row_shape), dtype=self.dtype, device=self._device)
        rows_B = self._read_rows(numbers)
        is_finite_B = rows_B.flatten(1).isfinite().all(1)
        if not bool(is_finite_B.all()):
            number = numbers[int(is_finite_B.int().argmin())]
            raise DataError(
                f"{self._party}: item {number} of its data set is NaN or infinite; mend it, or "
                "leave its ID out"
            )
        return send_tensor(rows_B, self._device, self.dtype)

    def _read_rows(self, numbers: Sequence[int]) -> Tensor:
        """Read these items, in several threads if allowed, (B, *shape)."""
        read = partial(self._read_row, shape=self._row_shape)
        if self._workers <= 1 or len(numbers) == 1:
            return torch.stack([read(number) for number in numbers])
        with ThreadPoolExecutor(self._workers) as pool:
            return torch.stack(list(pool.map(read, numbers)))

    def _read_row(self, number: int, shape: tuple[int, ...] | None = None) -> Tensor:
        """Return one item as a float32 tensor.

        `number`: index of the item in the data set. `shape`: shape that it must have; None: any.

        Raises DataError: the item is unreadable, no row of numbers, or of another shape.
        """
        try:
            item = self._dataset[number]
        except Exception as error:
            raise DataError(
                f"{self._party}: item {number} of its data set cannot be read: "
                f"{type(error).__name__}: {error}"
            ) from error
        if self._convert is not None:
            item = self._convert(item)
        elif isinstance(item, tuple | list) and item:
            item = item[0]
        if isinstance(item, Mapping):
            raise DataError(
                f"{self._party}: item {number} of its data set is a {type(item).__name__} with "
                f"{', '.join(map(str, item))}; expected one tensor a row: return one of them, or "
                "several as one, as torch.cat([item['x'], item['mask']]), which forward splits"
            )
        if isinstance(item, str | bytes):
            raise DataError(
                f"{self._party}: item {number} of its data set is a {type(item).__name__}; "
                "expected one tensor a row: let the data set return the numbers of its tokens"
            )
        try:
            row = torch.as_tensor(item, dtype=torch.float32)
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(
                f"{self._party}: item {number} of its data set is a {type(item).__name__}, not a "
                "tensor or an array of numbers; convert it in the data set, as with "
                "torchvision.transforms.ToTensor()"
            ) from error
        if not row.ndim:
            raise DataError(
                f"{self._party}: item {number} of its data set is a single number; expected a row, "
                "a tensor or an array of one or more axes"
            )
        if shape is not None and tuple(row.shape) != shape:
            raise DataError(
                f"{self._party}: item {number} of its data set has the shape {tuple(row.shape)}, "
                f"the first one {shape}; make all rows of one size"
            )
        return row


def _copy_row(row: NDArray[np.generic]) -> Tensor:
    """Return one row of an array that may be read-only as a tensor of its own."""
    return torch.from_numpy(np.array(row, np.float32))


class MappedRows(LazyRows):
    """The rows (N, *shape) of a memory-mapped array: a batch is read at once, and as float32.

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
        return len(self.shape)

    def load_column(self, column: int) -> Tensor:
        """Return one column of rows that are flat, (N,), on the CPU."""
        return torch.from_numpy(self._array[:, column][self._rows.numpy()].astype(np.float32))

    def _read_rows(self, numbers: Sequence[int]) -> Tensor:
        """Read these rows at once, (B, *shape)."""
        return torch.from_numpy(self._array[np.asarray(numbers)].astype(np.float32))


def is_lazy(features: object) -> bool:
    return isinstance(features, LazyRows)


def is_sampled(features: object) -> bool:
    """Return whether local models read a sample of these rows: flat ones that are mapped."""
    return isinstance(features, MappedRows) and features.dim() == 2


def score_in_parts(score: Callable[[Tensor], Tensor], features: Any, rows: Tensor) -> Tensor:
    """Return the scores (B, K) of these rows; lazy rows are loaded a few at a time.

    `score`: a function of features (B, *shape). `rows`: positions in `features`, (B,).
    """
    if not is_lazy(features):
        return score(features[rows])
    rows_at_once = max(1, _NUMBERS_AT_ONCE // math.prod(features.shape[1:]))
    return torch.cat([score(features[part]) for part in rows.split(rows_at_once)])


def read_column(features: Any, column: int) -> Tensor:
    """Return one column of a table's features, (N,)."""
    if isinstance(features, MappedRows):
        return features.load_column(column)
    numbers_N: Tensor = features[:, column]
    return numbers_N


def select_rows(features: Any, rows: Tensor) -> Any:
    """Return these rows of a table's features, (M, *shape); lazy ones are not read."""
    return features.select(rows) if isinstance(features, LazyRows) else features[rows]

"""Rows of a data set, such as images of a folder, that are read when a step needs them.

A map-style data set (`torch.utils.data.Dataset`) replaces the tensor of a table's features.
Indexing reads rows, in threads; `select` picks rows without reading them, so that a party's rows in
alignment order need no memory.

Letters: N rows, B rows of a batch.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

import torch
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
    """Return len(dataset). Raises DataError: it is no number of items."""
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
        dataset: its items are tensors or arrays of one shape, or a tuple whose first is; a further
            one (a label, say) is passed over.
        party: the party's name, for errors.
        rows: indices of the used items, in order, (N,); None: all.
        workers: threads that read the rows of one batch side by side.
        convert: makes the tensor of a row of an item; None: as above.

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
        """Read the first row, whose shape all rows must have. Raises DataError: there is none."""
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
        other = object.__new__(LazyRows)
        vars(other).update(vars(self))
        other._rows = self._rows[rows.cpu()]
        return other

    def __getitem__(self, rows: Tensor | slice | Sequence[int]) -> Tensor:
        """Read these rows, (B,) positions -> (B, *shape).

        Raises DataError: a row has another shape than the first one, or is not finite.
        """
        positions = self._rows[rows if isinstance(rows, slice) else torch.as_tensor(rows).cpu()]
        numbers = [int(number) for number in positions.flatten()]
        if not numbers:
            return torch.empty((0, *self._row_shape), dtype=self.dtype, device=self._device)
        parts = self._read_rows(numbers)
        for number, row in zip(numbers, parts, strict=True):
            if not bool(row.isfinite().all()):
                raise DataError(
                    f"{self._party}: item {number} of its data set is NaN or infinite; mend it, or "
                    "leave its ID out"
                )
        return send_tensor(torch.stack(parts), self._device, self.dtype)

    def _read_rows(self, numbers: Sequence[int]) -> list[Tensor]:
        """Read these items, in several threads if allowed."""
        read = partial(self._read_row, shape=self._row_shape)
        if self._workers <= 1 or len(numbers) == 1:
            return [read(number) for number in numbers]
        with ThreadPoolExecutor(self._workers) as pool:
            return list(pool.map(read, numbers))

    def _read_row(self, number: int, shape: tuple[int, ...] | None = None) -> Tensor:
        """Return one item as a float32 tensor. Raises DataError: unreadable, or of
        another shape.
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


def is_lazy(features: object) -> bool:
    return isinstance(features, LazyRows)


def score_in_parts(score: Callable[[Tensor], Tensor], features: Any, rows: Tensor) -> Tensor:
    """Return the scores (B, K) of these rows; lazy rows are loaded a few at a time."""
    if not is_lazy(features):
        return score(features[rows])
    at_once = max(1, _NUMBERS_AT_ONCE // math.prod(features.shape[1:]))
    return torch.cat([score(features[part]) for part in rows.split(at_once)])


def select_rows(features: Any, rows: Tensor) -> Any:
    """Return these rows of a table's features, (M, *shape); lazy ones are not read."""
    return features.select(rows) if isinstance(features, LazyRows) else features[rows]

"""Inputs of prediction: new rows as the features that the model knows, and how they differ.

Run by: the active alone. A file is CSV or Parquet, a .npy array or IDX images (also .gz).

New rows are compared with the rows that an encoding was fitted to, column by column. The encoding
holds the mean and deviation of each number, and the known categories. So a column in another unit
or with other codes is noticed. A change that leaves mean, deviation and categories as they were is
not. Empty and ignored cells are counted for any number of rows. A mean and a spread are reported
only for 30 rows or more.

Letters: N rows, F features.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from apfed_protocols.ids import id_texts
from secure_apfed.base.names import column_name
from secure_apfed.data.encoding import (
    CategoricalColumn,
    CellCounts,
    Column,
    ColumnEncoding,
    FeatureEncoding,
    RawFeatures,
)
from secure_apfed.data.files import is_idx, load_file, parse_idx
from secure_apfed.data.frames import is_table, stream_blocks
from secure_apfed.errors import DataError

_BLOCK_ROWS = 50_000  # of a table, read at a time
MIN_DRIFT_ROWS = 30
"""Rows below which a column's mean and spread are not reported."""
_EMPTY_CELL_MEANING = "the mean of training rows, or as no category"
# A column's drift is reported above one of these limits.
_MAX_SHIFT = 0.5  # of the mean, in standard deviations of the training rows
_MAX_DISTANCE = 8.0  # of a single row from the mean, in standard deviations of the training rows
_MAX_SPREAD_RATIO = 2.0  # ratio of the standard deviations, in either direction
_MAX_EMPTY_SHARE = 0.05  # of the rows, with an empty cell


def load_blocks(
    path: Path,
    encoding: FeatureEncoding,
    *,
    id_columns: Sequence[str] = (),
    block_row_count: int = _BLOCK_ROWS,
    cell_counts: CellCounts | None = None,
) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """Yield the IDs and float32 features of the rows in `path`, `block_row_count` at a time.

    Only one block of a table is in memory; arrays are loaded whole.

    Args:
        path: CSV, Parquet, .npy or IDX.
        encoding: the model's encoding, which reads the rows.
        id_columns: columns of the IDs; several are joined to one ID. Without such columns, and for
            arrays, IDs are row numbers from 0.
        block_row_count: number of rows of a block.
        cell_counts: empty and ignored cells are added to it; None: not counted.

    Raises DataError: the file has no rows, or does not fit the encoding.
    """
    source = path.name
    first_row = 0  # number of the block's first row in the file
    id_columns = [column_name(name) for name in id_columns]
    blocks: Iterable[RawFeatures]
    blocks = (
        stream_blocks(path, source=source, rows=block_row_count)
        if is_table(path)
        else [_load_array(path)]
    )
    for raw_block in blocks:
        if isinstance(raw_block, pd.DataFrame):
            _require_id_columns(raw_block, id_columns, source=source)
        if not len(raw_block):
            # A table without rows yields one empty block.
            break
        ids: list[str] = []
        if isinstance(raw_block, pd.DataFrame):
            ids = _join_ids(raw_block, id_columns, first_row, source=source)
            raw_block = raw_block.drop(columns=list(id_columns))
        features = encoding.encode(raw_block, source=source, counts=cell_counts)
        end_row = first_row + len(features)
        yield tuple(ids or map(str, range(first_row, end_row))), features
        first_row = end_row
    if not first_row:
        raise DataError(f"{source}: it has no rows")


def _require_id_columns(block: pd.DataFrame, id_columns: Sequence[str], *, source: str) -> None:
    """Raise DataError unless a table's block has all ID columns; `source` names the file."""
    absent_columns = [name for name in id_columns if name not in block]
    if absent_columns:
        raise DataError(
            f"{source}: the ID columns {', '.join(absent_columns)} are missing; add them"
        )


def _join_ids(
    block: pd.DataFrame, id_columns: Sequence[str], first_row: int, *, source: str
) -> list[str]:
    """Return each row's ID, its ID columns joined by blanks; empty without ID columns.

    `first_row`: number of the block's first row in the file `source`, for errors.
    """
    texts_by_column = [_list_id_texts(block[name], first_row, source=source) for name in id_columns]
    return [" ".join(texts) for texts in zip(*texts_by_column, strict=True)]


def _list_id_texts(column: "pd.Series", first_row: int, *, source: str) -> list[str]:
    """Return the cells of an ID column as texts.

    `column`: cells of one block of rows. `first_row`: the number of the block's first row in the
    file. `source`: name of the file, for errors.
    """
    return id_texts(
        column,
        party=source,
        subject=f"column {column.name!r}",
        should_strip=True,
        settings_key="--id-column",
        describe_place=lambda row: f"row {first_row + row} (from 0)",
    )


def _load_array(path: Path) -> RawFeatures:
    """Return the rows of a .npy or IDX file. Raises DataError: another format, or damaged."""
    if path.suffix == ".npy":
        try:
            array: NDArray[np.generic] = np.load(path, allow_pickle=False)
        except FileNotFoundError as error:
            raise DataError(f"{path.name}: there is no such file; check the path") from error
        except (OSError, EOFError, ValueError) as error:
            raise DataError(f"{path.name}: not a readable .npy array ({error})") from error
        if array.ndim < 2:
            raise DataError(f"{path.name}: expected rows of features, got shape {array.shape}")
        return array
    content = load_file(path)
    if is_idx(content):
        return parse_idx(content, dimensions=3, source=path.name)
    raise DataError(
        f"{path.name}: unknown format; give .csv, .parquet, .npy, or an IDX file of images"
    )


@dataclass(frozen=True, kw_only=True)
class ColumnDrift:
    """The drift of one column: how new rows differ from the rows that the encoding was fitted to.

    Attributes:
        name: name of the column.
        rows: number of new rows.
        empty: number of rows with an empty cell, which counts as the mean or as no category.
        ignored: number of rows with a category that no training row had, and which is ignored.
        shift: difference of the means, in standard deviations of the fitted rows; NaN for
            categories and constants.
        spread: ratio of the standard deviations, new over fitted; NaN for categories and constants.
        farthest: distance of the farthest new row from the fitted mean, in standard deviations; NaN
            for categories and constants.
    """

    name: str
    rows: int
    empty: int = 0
    ignored: int = 0
    shift: float = math.nan
    spread: float = math.nan
    farthest: float = math.nan

    @property
    def notable_differences(self) -> str:
        """The reportable differences of the column, in words; "" if there are none."""
        has_enough_rows = self.rows >= MIN_DRIFT_ROWS
        differences = list[str]()
        if self.ignored > 0:
            differences.append(
                f"{self.ignored:,} of {self.rows:,} rows hold what no training row held, which "
                "counts for nothing"
            )
        if self.empty > _MAX_EMPTY_SHARE * self.rows:
            differences.append(
                f"{self.empty:,} of {self.rows:,} rows have an empty cell, which counts as "
                f"{_EMPTY_CELL_MEANING}"
            )
        if has_enough_rows and abs(self.shift) > _MAX_SHIFT:
            differences.append(
                f"its mean lies {self.shift:+.1f} deviations from that of training rows"
            )
        if has_enough_rows and (
            self.spread > _MAX_SPREAD_RATIO or self.spread < 1 / _MAX_SPREAD_RATIO
        ):
            differences.append(f"it is spread {self.spread:.2g} times as wide")
        if self.farthest > _MAX_DISTANCE:
            differences.append(f"a row lies {self.farthest:.3g} deviations away")
        return "; ".join(differences)


class DriftMeter:
    """A meter of every column's drift, to which new rows are added in batches.

    Attributes:
        cell_counts: number of rows, empty cells and ignored cells. The caller passes this object to
            `encoding.encode`, which adds the cells of the rows that it encodes.
    """

    def __init__(self, encoding: ColumnEncoding) -> None:
        """Start with sums of zero for each of the F features of the encoding."""
        # Each column, with the range of its features.
        self._columns_with_ranges = list(
            zip(encoding.columns, encoding.feature_ranges, strict=True)
        )
        self.cell_counts = CellCounts()
        self._sum_F = torch.zeros(encoding.shape, dtype=torch.float64)
        self._sum_of_squares_F = torch.zeros(encoding.shape, dtype=torch.float64)
        self._largest_absolute_F = torch.zeros(
            encoding.shape, dtype=torch.float64
        )  # absolute values

    def add_batch(self, features_NF: Tensor) -> None:
        """Add encoded rows (N, F) to the sums, the sums of squares and the largest values."""
        values_NF = features_NF.double()
        self._sum_F += values_NF.sum(0)
        self._sum_of_squares_F += values_NF.square().sum(0)
        self._largest_absolute_F = torch.maximum(self._largest_absolute_F, values_NF.abs().amax(0))

    def compute_drifts(self) -> tuple[ColumnDrift, ...]:
        """Return every column's drift, in the encoding's order; empty if no row was added."""
        if not self.cell_counts.row_count:
            return ()
        return tuple(
            self._compute_drift(column, features) for column, features in self._columns_with_ranges
        )

    def _compute_drift(self, column: Column, feature_range: slice) -> ColumnDrift:
        """Return one column's counts of cells, and for numbers its shift and spread.

        Numbers are standardised by the mean and deviation of the fitted rows, so their mean is the
        shift, and their deviation is the ratio of the deviations.

        `feature_range`: the range of the column's features; a single one for a column of numbers.
        """
        row_count = self.cell_counts.row_count
        name = column.name
        drift_of_cells = ColumnDrift(
            name=name,
            rows=row_count,
            empty=self.cell_counts.empty_by_column[name],
            ignored=self.cell_counts.ignored_by_column[name],
        )
        if isinstance(column, CategoricalColumn) or column.constant:
            return drift_of_cells
        mean = float(self._sum_F[feature_range]) / row_count
        variance = float(self._sum_of_squares_F[feature_range]) / row_count - mean**2
        return replace(
            drift_of_cells,
            shift=mean,
            spread=math.sqrt(max(variance, 0.0)),
            farthest=float(self._largest_absolute_F[feature_range]),
        )

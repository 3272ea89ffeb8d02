"""Solo inference: the active's saved model and a file of its own rows, no other party.

Run by: the active, long after training; nothing is sent to anybody. A table is read, predicted and
written some rows at a time, so that it may be larger than memory.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from secure_apfed.data import ColumnEncoding, load_blocks
from secure_apfed.data.inputs import ColumnDrift, DriftMeter
from secure_apfed.measures import rows_for_stability, stability_index
from secure_apfed.runs.folder import RunFolder
from secure_apfed.runs.predicted_files import row_writer
from secure_apfed.runs.solo import SoloModel, load_model
from secure_apfed.seeds import undisturbed

__all__ = [
    "Compared", "Predicted", "PredictedNumbers", "Predictions", "predict_file", "predict_into",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Compared:
    """How predicted rows differ from those of training.

    Attributes:
        rows: how many were predicted.
        stability: how far the scores are spread otherwise than those of the training rows, see
            `secure_apfed.measures.stability_index`; None: nobody kept those, or too few rows.
        stability_needs: rows that have an index at least; 0: nobody kept those.
        drift: of each raw column, see `secure_apfed.data.inputs`; none of images, of which the
            encoding keeps no figures.
    """

    rows: int
    stability: float | None = None
    stability_needs: int = 0
    drift: tuple[ColumnDrift, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        drift = [{**asdict(one), "notable": one.notable} for one in self.drift]
        return {
            "stability": self.stability, "stability_needs": self.stability_needs, "columns": drift,
        }  # fmt: skip


@dataclass(frozen=True, eq=False, kw_only=True)
class Predicted(ABC):
    """What a model says of each row of a file, whatever its task.

    Attributes:
        ids: names of the rows, or their numbers from 0.
        compared: with training rows.
    """

    ids: tuple[str, ...]
    compared: Compared

    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that are written."""

    @abstractmethod
    def cells(self) -> Iterator[tuple[str | float, ...]]:
        """The cells of each row, in their order."""

    @abstractmethod
    def as_json(self) -> dict[str, Any]:
        """Return plain values."""

    def frame(self) -> pd.DataFrame:
        """One line a row: id, class and the probability of every class, or id and number."""
        return pd.DataFrame(list(self.cells()), columns=list(self.columns()))

    def write(self, path: Path) -> None:
        """Write them, see `predicted_files`.

        Raises:
            DataError: the file's name ends in nothing that can be written.
        """
        with row_writer(path) as write:
            write(self.frame())


@dataclass(frozen=True, eq=False, kw_only=True)
class Predictions(Predicted):
    """Of a classification.

    Attributes:
        classes: K names.
        probabilities: (N, K), each row sums to 1.
        decided: (N,), places in `classes` of what each row is given.
    """

    classes: tuple[str, ...]
    probabilities: Tensor
    decided: Tensor

    def rows(self) -> Iterator[tuple[str, str, tuple[float, ...]]]:
        """Yield (id, predicted class, probabilities)."""
        best_N = self.decided.tolist()
        for name, best, row in zip(self.ids, best_N, self.probabilities.tolist(), strict=True):
            yield name, self.classes[best], tuple(row)

    def columns(self) -> tuple[str, ...]:
        return ("id", "class", *(f"p({one})" for one in self.classes))

    def cells(self) -> Iterator[tuple[str | float, ...]]:
        for name, best, row in self.rows():
            yield name, best, *row

    def as_json(self) -> dict[str, Any]:
        return {
            "classes": list(self.classes),
            **self.compared.as_json(),
            "predictions": [
                {"id": name, "class": best, "probabilities": list(row)}
                for name, best, row in self.rows()
            ],
        }


@dataclass(frozen=True, eq=False, kw_only=True)
class PredictedNumbers(Predicted):
    """One number a row.

    Attributes:
        what: the number's name.
        numbers: (N,), of a regression in the unit of the labels.
    """

    what: str
    numbers: Tensor

    def columns(self) -> tuple[str, ...]:
        return ("id", self.what)

    def cells(self) -> Iterator[tuple[str | float, ...]]:
        yield from zip(self.ids, self.numbers.tolist(), strict=True)

    def as_json(self) -> dict[str, Any]:
        return {
            **self.compared.as_json(),
            "predictions": [dict(zip(self.columns(), row, strict=True)) for row in self.cells()],
        }


@undisturbed()
def predict_file(folder: Path, path: Path, *, id_columns: Sequence[str] | None = None) -> Predicted:
    """Predict the rows of a file.

    Args:
        folder: of a finished run.
        path: CSV, Parquet, .npy or IDX with the columns or images of the active.
        id_columns: columns that name a row; None takes those that the run was trained with
            where it was trained on the parties' own tables.

    Raises:
        CheckpointError: no model, or one that was altered.
        DataError: the file cannot be read, or lacks columns that the model needs.
    """
    predictor = _Predictor(load_model(folder))
    blocks = list(predictor.blocks(path, _named(folder, id_columns)))
    ids = tuple(itertools.chain.from_iterable(names for names, _ in blocks))
    whole = predictor.predicted(ids, torch.cat([told for _, told in blocks]))
    return replace(whole, compared=predictor.compared())


@undisturbed()
def predict_into(
    folder: Path, path: Path, output: Path, *, id_columns: Sequence[str] | None = None
) -> Compared:
    """Predict the rows of a file into another, which appears when it is complete.

    Args:
        folder: of a finished run.
        path: of the rows, as of `predict_file`.
        output: .csv, .parquet or .json.
        id_columns: as of `predict_file`.

    Raises:
        CheckpointError: no model, or one that was altered.
        DataError: a file cannot be read or written, or lacks columns that the model needs.
    """
    predictor = _Predictor(load_model(folder))
    with row_writer(output) as write:
        for ids, told in predictor.blocks(path, _named(folder, id_columns)):
            write(predictor.predicted(ids, told).frame())
    return predictor.compared()


class _Predictor:
    """A model, and how what it has predicted so far compares with its training rows."""

    def __init__(self, model: SoloModel) -> None:
        self.model, self._rows = model, 0
        encoding = model.encoding
        self._drift = (
            DriftMeter(encoding, model.extremes) if isinstance(encoding, ColumnEncoding) else None
        )
        self._counts = np.zeros(len(model.ranges.shares) if model.ranges else 0, dtype=np.int64)

    def blocks(self, path: Path, named: Sequence[str]) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        """IDs, and what is told of their rows."""
        counts = None if self._drift is None else self._drift.counts
        blocks = load_blocks(path, self.model.encoding, id_columns=named, counts=counts)
        for ids, features in blocks:
            told = self.model.predict(features)
            self._rows += len(ids)
            if self._drift is not None:
                self._drift.add(features)
            if self.model.ranges is not None:
                self._counts += self.model.ranges.counts(told.double().numpy())
            yield ids, told

    def predicted(self, ids: tuple[str, ...], told: Tensor) -> Predicted:
        """Of some rows."""
        compared = Compared(rows=len(ids))
        if told.ndim == 1:
            what = self.model.task.tells
            return PredictedNumbers(ids=ids, what=what, numbers=told, compared=compared)
        decided, classes = self.model.decide(told), self.model.classes
        return Predictions(
            ids=ids, classes=classes, probabilities=told, decided=decided, compared=compared
        )

    def compared(self) -> Compared:
        """All rows so far with those of training."""
        ranges, drift = self.model.ranges, self._drift
        needs = 0 if ranges is None else rows_for_stability(ranges)
        return Compared(
            rows=self._rows,
            stability=None
            if ranges is None or self._rows < needs
            else stability_index(ranges, self._counts),
            stability_needs=needs,
            drift=() if drift is None else drift.result(),
        )


def _named(folder: Path, id_columns: Sequence[str] | None) -> tuple[str, ...]:
    """The columns that name a row."""
    if id_columns is not None:
        return tuple(id_columns)
    files = RunFolder(folder)
    data = files.load_config().data if files.config.exists() else None
    if data is None or data.parties is None:
        return ()
    columns = data.parties[data.active].id_column or data.id_column
    return (columns,) if isinstance(columns, str) else columns

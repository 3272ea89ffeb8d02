"""Solo inference: the active's saved model and a file of its own rows, no other party.

Run by: the active, long after training; nothing is sent to anybody.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor

from secure_apfed.data import ColumnEncoding, load_features
from secure_apfed.data.drift import ColumnDrift, column_drift
from secure_apfed.errors import DataError
from secure_apfed.measures import stability_index
from secure_apfed.plain_csv import to_csv
from secure_apfed.runs import RunFolder, SoloModel, load_model

__all__ = ["Predicted", "PredictedNumbers", "Predictions", "predict_file"]

_WRITERS = {
    ".csv": lambda frame, path: path.write_text(to_csv(frame), encoding="utf-8", newline=""),
    ".parquet": lambda frame, path: frame.to_parquet(path, index=False),
    ".json": lambda frame, path: frame.to_json(path, orient="records"),
}


@dataclass(frozen=True, eq=False, kw_only=True)
class Predicted(ABC):
    """What a model says of each row of a file, whatever its task.

    Attributes:
        ids: names of the rows, or their numbers from 0.
        stability: how far the scores are spread otherwise than those of the training rows, see
            `secure_apfed.measures.stability_index`; None: nobody kept those.
        drift: of each raw column, see `secure_apfed.data.drift`; none of images, which the encoding
            keeps no figures of, nor of few rows.
    """

    ids: tuple[str, ...]
    stability: float | None = None
    drift: tuple[ColumnDrift, ...] = ()

    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that are written."""

    @abstractmethod
    def cells(self) -> Iterator[tuple[str | float, ...]]:
        """The cells of each row, in their order."""

    @abstractmethod
    def as_json(self) -> dict[str, Any]:
        """Return plain values."""

    def compared(self) -> dict[str, Any]:
        """How these rows differ from those of training, as plain values."""
        drift = [{**asdict(one), "notable": one.notable} for one in self.drift]
        return {"stability": self.stability, "columns": drift}

    def write(self, path: Path) -> None:
        """Write one line a row: id, class and the probability of every class, or id and number.

        In CSV a text that a spreadsheet would take for a formula stands behind an apostrophe.

        Raises:
            DataError: the file's name ends in nothing that can be written.
        """
        if path.suffix not in _WRITERS:
            raise DataError(f"{path}: expected a name that ends in {', '.join(_WRITERS)}")
        told = [dict(zip(self.columns(), row, strict=True)) for row in self.cells()]
        path.parent.mkdir(parents=True, exist_ok=True)
        _WRITERS[path.suffix](pd.DataFrame(told), path)


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
            **self.compared(),
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
            **self.compared(),
            "predictions": [dict(zip(self.columns(), row, strict=True)) for row in self.cells()],
        }


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
    model = load_model(folder)
    named = _trained_ids(folder) if id_columns is None else tuple(id_columns)
    ids, features = load_features(path, model.encoding, id_columns=named)
    told = model.predict(features)
    stability = _stability(model, told)
    drift = (
        column_drift(model.encoding, features) if isinstance(model.encoding, ColumnEncoding) else ()
    )
    if told.ndim == 1:
        return PredictedNumbers(
            ids=ids, what=model.task.tells, numbers=told, stability=stability, drift=drift
        )
    return Predictions(
        ids=ids,
        classes=model.classes,
        probabilities=told,
        decided=model.decide(told),
        stability=stability,
        drift=drift,
    )


def _stability(model: SoloModel, told: Tensor) -> float | None:
    if model.ranges is None or not len(told):
        return None
    return stability_index(model.ranges, told.double().numpy())


def _trained_ids(folder: Path) -> tuple[str, ...]:
    files = RunFolder(folder)
    data = files.load_config().data if files.config.exists() else None
    if data is None or data.parties is None:
        return ()
    columns = data.parties[data.active].id_column or data.id_column
    return (columns,) if isinstance(columns, str) else columns

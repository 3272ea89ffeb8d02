"""Solo inference: the active's saved model and a file of its own rows, no other party.

Run by: the active, long after training; nothing is sent to anybody.
"""

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

__all__ = ["Predictions", "predict_file"]

_WRITERS = {
    ".csv": lambda frame, path: path.write_text(to_csv(frame), encoding="utf-8", newline=""),
    ".parquet": lambda frame, path: frame.to_parquet(path, index=False),
    ".json": lambda frame, path: frame.to_json(path, orient="records"),
}


@dataclass(frozen=True, eq=False, kw_only=True)
class Predictions:
    """What the model says of each row.

    Attributes:
        ids: names of the rows, or their numbers from 0.
        classes: K names.
        probabilities: (N, K), each row sums to 1.
        decided: (N,), places in `classes` of what each row is given.
        stability: how far the scores are spread otherwise than those of the training rows, see
            `secure_apfed.measures.stability_index`; None: nobody kept those.
        drift: of each raw column, see `secure_apfed.data.drift`; none of images, which the encoding
            keeps no figures of, nor of few rows.
    """

    ids: tuple[str, ...]
    classes: tuple[str, ...]
    probabilities: Tensor
    decided: Tensor
    stability: float | None = None
    drift: tuple[ColumnDrift, ...] = ()

    def rows(self) -> Iterator[tuple[str, str, tuple[float, ...]]]:
        """Yield (id, predicted class, probabilities)."""
        best_N = self.decided.tolist()
        for name, best, row in zip(self.ids, best_N, self.probabilities.tolist(), strict=True):
            yield name, self.classes[best], tuple(row)

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "classes": list(self.classes),
            **self.compared(),
            "predictions": [
                {"id": name, "class": best, "probabilities": list(row)}
                for name, best, row in self.rows()
            ],
        }

    def compared(self) -> dict[str, Any]:
        """How these rows differ from those of training, as plain values."""
        drift = [{**asdict(one), "notable": one.notable} for one in self.drift]
        return {"stability": self.stability, "columns": drift}

    def write(self, path: Path) -> None:
        """Write one line a row: id, class and the probability of every class.

        In CSV a text that a spreadsheet would take for a formula stands behind an apostrophe.

        Raises:
            DataError: the file's name ends in nothing that can be written.
        """
        if path.suffix not in _WRITERS:
            raise DataError(f"{path}: expected a name that ends in {', '.join(_WRITERS)}")
        told = [
            {"id": name, "class": best}
            | {f"p({one})": share for one, share in zip(self.classes, row, strict=True)}
            for name, best, row in self.rows()
        ]
        path.parent.mkdir(parents=True, exist_ok=True)
        _WRITERS[path.suffix](pd.DataFrame(told), path)


def predict_file(
    folder: Path, path: Path, *, id_columns: Sequence[str] | None = None
) -> Predictions:
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
    shares_NK = model.predict(features)
    return Predictions(
        ids=ids,
        classes=model.classes,
        probabilities=shares_NK,
        decided=model.decide(shares_NK),
        stability=_stability(model, shares_NK),
        drift=column_drift(model.encoding, features)
        if isinstance(model.encoding, ColumnEncoding)
        else (),
    )


def _stability(model: SoloModel, shares_NK: Tensor) -> float | None:
    if model.ranges is None or not len(shares_NK):
        return None
    return stability_index(model.ranges, shares_NK.double().numpy())


def _trained_ids(folder: Path) -> tuple[str, ...]:
    files = RunFolder(folder)
    data = files.load_config().data if files.config.exists() else None
    if data is None or data.parties is None:
        return ()
    columns = data.parties[data.active].id_column or data.id_column
    return (columns,) if isinstance(columns, str) else columns

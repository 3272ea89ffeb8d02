"""Columns that should perhaps not train a model: an ID as a feature, the label in disguise.

Run by: a party on its own columns, before they are encoded. Both are guesses, so they warn.
"""

import warnings
from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from secure_apfed.data.cells import is_numeric
from secure_apfed.errors import SuspectColumnWarning

__all__ = ["warn_of_ids", "warn_of_labels"]

_FEWEST_ROWS = 20
_DISTINCT = 0.5
_SAMPLE = 1000


def warn_of_ids(features: pd.DataFrame, categorical: Sequence[str], *, source: str) -> None:
    """Warn of texts that name rows, and of whole numbers that count them."""
    if len(features) < _FEWEST_ROWS:
        return
    for name in features.columns:
        column = features[name]
        if name in categorical:
            different = column.nunique()
            if different > _DISTINCT * len(column):
                _warn(source, name, f"its {len(column)} rows hold {different} different texts")
        elif is_numeric(column) and _counts_rows(column):
            _warn(source, name, f"its {len(column)} rows hold whole numbers without a gap")


def _counts_rows(column: "pd.Series") -> bool:
    values = column.dropna().to_numpy()
    whole = len(values) == len(column) and np.issubdtype(values.dtype, np.integer)
    return bool(
        whole and len(np.unique(values)) == len(values) == int(values.max()) - int(values.min()) + 1
    )


def _warn(source: str, name: str, why: str) -> None:
    warnings.warn(
        f"{source}: column {name!r} looks like an ID: {why}; a model learns such rows by heart and "
        "nothing else from it. Put it under ignore unless it is a feature",
        SuspectColumnWarning,
        stacklevel=2,
    )


def warn_of_labels(
    features: pd.DataFrame, labels: Sequence[str | None], *, source: str, label: str,
    numbers: bool = False,
) -> None:  # fmt: skip
    """Warn of a column that alone tells every known label: by its values, or by cuts between them.

    A column of as many values as rows tells them, too, and is taken by its order alone; labels that
    are `numbers` rise or fall in that order. An empty cell is a value, or its row is left out.
    """
    known = np.array([row for row, text in enumerate(labels) if text is not None], dtype=np.int64)
    if len(known) < _FEWEST_ROWS:
        return
    truth = pd.Series([labels[row] for row in known])
    tells = _orders if numbers else _tells
    if numbers:
        truth = pd.to_numeric(truth, errors="coerce")
    for name in features.columns:
        column = features[name].iloc[known].reset_index(drop=True)
        full = column.notna()
        parts = [(column, truth)]
        if _FEWEST_ROWS <= full.sum() < len(column):
            parts.append((column[full], truth[full]))
        if any(tells(*part) for part in parts):
            warnings.warn(
                f"{source}: column {name!r} alone tells {label!r} of all {len(known)} rows that "
                "have one; it may be the label in disguise, or known only after it. Put it under "
                "ignore unless it is there when the model predicts",
                SuspectColumnWarning,
                stacklevel=2,
            )


def _tells(column: "pd.Series", truth: "pd.Series") -> bool:
    """Whether its values, or cuts between them, part the classes; empty cells come last."""
    classes = truth.nunique()
    if not 1 < classes <= len(truth) / 2:
        return False
    if column.nunique(dropna=False) <= len(column) / 2:
        return bool((truth.groupby(column, dropna=False).nunique() == 1).all())
    if not is_numeric(column):
        return False
    order = np.argsort(column.to_numpy(np.float64, na_value=np.nan), kind="stable")
    in_order = truth.to_numpy()[order]
    return int((in_order[1:] != in_order[:-1]).sum()) == classes - 1


def _orders(column: "pd.Series", truth: "pd.Series") -> bool:
    """Whether labels that are numbers rise or fall with it throughout."""
    if not is_numeric(column):
        return False
    numbers, targets = column.to_numpy(np.float64, na_value=np.nan), truth.to_numpy(np.float64)
    for rows in (slice(_SAMPLE), slice(None)):  # most columns show it in the first few rows
        one, other = numbers[rows], targets[rows]
        if np.isnan(one).any() or np.isnan(other).any():
            return False
        if min(len(np.unique(one)), len(np.unique(other))) <= len(one) / 2:
            return False
        if not any(_rises(one, sign * other) for sign in (1.0, -1.0)):
            return False
    return True


def _rises(numbers: NDArray[np.float64], targets: NDArray[np.float64]) -> bool:
    """Whether targets never fall where numbers rise."""
    return bool((np.diff(targets[np.lexsort((targets, numbers))]) >= 0).all())

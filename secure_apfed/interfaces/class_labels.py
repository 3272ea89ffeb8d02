"""The active's labels, as handed to `train`: checked, and numbered by class.

Letters: N rows.
"""

import warnings
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from secure_apfed.data.frames import format_cell
from secure_apfed.data.labels import UNLABELLED, require_one_spelling, warn_of_empty_words
from secure_apfed.errors import DataError, SuspectColumnWarning
from secure_apfed.interfaces.parties import Active
from secure_apfed.interfaces.training_settings import DataChoice


def read_labels(active: Active, choice: DataChoice) -> tuple[Tensor, tuple[Any, ...]]:
    """Return the class of each row, `UNLABELLED` where there is none, and the classes.

    `choice`: how labels are read and split.

    Raises DataError: the labels are not one class a row, of two classes or more.
    """
    labels = active.labels
    if isinstance(labels, Tensor):
        labels = labels.detach().cpu().numpy()
    if labels is None or isinstance(labels, str | bytes | Mapping | AbstractSet):
        raise DataError(
            f"{active.name}: its labels are a {type(labels).__name__}; expected a list, an array "
            "or a column of one class a row, as frame['label']"
        )
    if isinstance(labels, pd.DataFrame) or getattr(labels, "ndim", 1) > 1:
        raise DataError(
            f"{active.name}: its labels have the shape {np.shape(labels)}; expected one class a "
            "row, (N,): of one-hot labels give labels.argmax(1), of a frame its column"
        )
    column = pd.Series([*labels], dtype=object)
    lists = [value for value in column if isinstance(value, list | tuple | np.ndarray | Tensor)]
    if lists and not all(isinstance(value, Tensor) and not value.ndim for value in lists):
        raise DataError(
            f"{active.name}: {len(lists)} of its labels are lists; expected one class a row, (N,): "
            "of one-hot labels give labels.argmax(1)"
        )
    if len(column) != len(active.ids):
        raise DataError(
            f"{active.name}: {len(active.ids)} IDs, but {len(column)} labels; give one a row, None "
            "where it is not known"
        )
    blank = [value for value in column if isinstance(value, str) and not value.strip()]
    if blank:
        raise DataError(
            f"{active.name}: {len(blank)} of its labels are empty texts; give None where a label "
            "is not known, or name this class"
        )
    known = column.dropna()
    fractions = [
        value for value in known if isinstance(value, float | np.floating) and value % 1 != 0
    ]
    if fractions:
        raise DataError(
            f"{active.name}: its labels are numbers with fractions; `train` learns classes: give "
            "ranges of them, or use run with task: regression"
        )
    classes = _sort_classes(known, active.name, choice)
    places = {value: place for place, value in enumerate(classes)}
    codes = [places.get(value, UNLABELLED) for value in column.where(column.notna(), None)]
    return torch.tensor(codes, dtype=torch.int64), classes


_MARKERS = frozenset({"-1", "-99", "-100", "-999"})
"""Numbers that other libraries and tables write where a label is not known."""


def _sort_classes(known: "pd.Series", party: str, choice: DataChoice) -> tuple[Any, ...]:
    """Return the classes of the known labels in order; the settings may list them.

    `choice`: how labels are read and split.

    Raises:
        DataError: there is one class alone, or one in several spellings. Warns
            SuspectColumnWarning: a class may stand for labels that are not known.
    """
    counts = known.value_counts()
    classes = sorted(counts.index.tolist(), key=lambda value: (str(type(value)), value))
    if len(classes) < 2:
        raise DataError(f"{party}: its labels are of {len(classes)} class(es), two are needed")
    if choice.classes:
        classes = _order_classes(classes, party, choice.classes)
    else:
        _require_clear_classes(counts, party)
    if choice.positive is None:
        return tuple(classes)
    first = [value for value in classes if choice.positive not in _spell_label(value)]
    if len(classes) != 2 or len(first) != 1:
        raise DataError(
            f"data={{'positive': {choice.positive!r}}}: expected one of two classes; the labels of "
            f"{party} are {', '.join(map(str, classes))}"
        )
    return (*first, *(value for value in classes if value not in first))


def _spell_label(value: Any) -> tuple[str, str]:
    """Return how a label may be written in the settings, such as 1.0 as "1.0" and "1"."""
    return str(value), format_cell(value)


def _order_classes(classes: Sequence[Any], party: str, listed: Sequence[str]) -> list[Any]:
    """Return the classes in the order of the list; listed ones without a row are kept as texts.

    Raises:
        DataError: labels lie outside the list.
    """
    outside = [str(value) for value in classes if not set(_spell_label(value)).intersection(listed)]
    if outside:
        raise DataError(
            f"{party}: its labels {', '.join(outside)} lie outside data={{'classes': "
            f"{[*listed]!r}}}; list all, or leave it out"
        )
    places = {text: value for value in classes for text in _spell_label(value)}
    return [places.get(name, name) for name in listed]


def _require_clear_classes(counts: "pd.Series", party: str) -> None:
    """Refuse classes in several spellings, as texts and numbers, and warn of words for nothing.

    `counts`: rows of each label. Raises DataError. Warns SuspectColumnWarning.
    """
    classes = counts.index.tolist()
    spellings = [str(value) for value in classes]
    if alike := sorted({text for text in spellings if spellings.count(text) > 1}):
        raise DataError(
            f"{party}: its labels write {', '.join(alike)} both as a number and as a text; "
            "give all in one way, as labels.astype(str)"
        )
    found = ", ".join(f"{value!s} ({count} rows)" for value, count in counts.items())
    if len({isinstance(value, str) for value in classes}) > 1:
        raise DataError(
            f"{party}: its labels are texts and numbers: {found}; give None where a label is not "
            "known, or all classes as texts, as [str(label) for label in labels]"
        )
    cells = [text for text, count in zip(spellings, counts, strict=True) for _ in range(count)]
    require_one_spelling(
        cells,
        where=f"{party}: the column of labels",
        remedy=f"say data={{'classes': {sorted(spellings)!r}}}",
    )
    warn_of_empty_words(cells, party=party, column="labels", are_empty=False)
    if len(classes) > 2 and (marks := sorted(_MARKERS.intersection(map(format_cell, classes)))):
        warnings.warn(
            f"{party}: its labels are of {len(classes)} classes, {found}; if {', '.join(marks)} "
            "stands where a label is not known, give None there, as "
            f"[None if label == {marks[0]} else label for label in labels]",
            SuspectColumnWarning,
            stacklevel=2,
        )

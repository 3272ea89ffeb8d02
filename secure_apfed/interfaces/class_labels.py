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
    """Return the number of each row's class, (N,) int64, and the classes in this order.

    A row without a label gets `UNLABELLED`.

    `choice`: the settings of labels: a list of classes, and the positive class.

    Raises DataError: labels are not one class a row, or have fewer than two classes.
    """
    column = _make_label_column(active)
    known_labels = column.dropna()
    fractions = [
        value for value in known_labels if isinstance(value, float | np.floating) and value % 1 != 0
    ]
    if fractions:
        raise DataError(
            f"{active.name}: its labels are numbers with fractions; `train` learns classes: give "
            "ranges of them, or use run with task: regression"
        )
    classes = _sort_classes(known_labels, active.name, choice)
    index_by_class = {value: number for number, value in enumerate(classes)}
    labels = column.where(column.notna(), None)  # None in place of NaN, which equals nothing
    class_indices = [index_by_class.get(value, UNLABELLED) for value in labels]
    return torch.tensor(class_indices, dtype=torch.int64), classes


def _make_label_column(active: Active) -> "pd.Series":
    """Return the active's labels as a column of objects, one for each ID.

    Raises DataError: they are not one label a row, or a label is an empty text.
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
    _require_single_labels(active, column)
    return column


def _require_single_labels(active: Active, column: "pd.Series") -> None:
    """Raise DataError unless the active's labels are one class for each ID, or None."""
    sequence_labels = [
        value for value in column if isinstance(value, list | tuple | np.ndarray | Tensor)
    ]
    # A list of a tensor's elements has tensors without a dimension, which are single numbers.
    are_single_numbers = all(
        isinstance(value, Tensor) and value.ndim == 0 for value in sequence_labels
    )
    if not are_single_numbers:
        raise DataError(
            f"{active.name}: {len(sequence_labels)} of its labels are lists; expected one class a "
            "row, (N,): of one-hot labels give labels.argmax(1)"
        )
    if len(column) != len(active.ids):
        raise DataError(
            f"{active.name}: {len(active.ids)} IDs, but {len(column)} labels; give one a row, None "
            "where it is not known"
        )
    blank_labels = [value for value in column if isinstance(value, str) and not value.strip()]
    if blank_labels:
        raise DataError(
            f"{active.name}: {len(blank_labels)} of its labels are empty texts; give None where a "
            "label is not known, or name this class"
        )


_MISSING_LABEL_NUMBERS = frozenset({"-1", "-99", "-100", "-999"})
"""Numbers that other libraries and tables write in place of an unknown label."""


def _sort_classes(known_labels: "pd.Series", party: str, choice: DataChoice) -> tuple[Any, ...]:
    """Return the classes of the known labels, in the order of the scores.

    The order is that of the settings' list of classes, or else sorted. Of two classes the positive
    one is moved to the end. A warning is issued if a class may stand for unknown labels.

    `known_labels`: the labels that are known. `party`: the active's name. `choice`: the settings of
    labels.

    Raises DataError: there is only one class, or a class has several spellings.
    """
    row_count_by_label = known_labels.value_counts()
    classes = sorted(row_count_by_label.index.tolist(), key=lambda value: (str(type(value)), value))
    if len(classes) < 2:
        raise DataError(f"{party}: its labels are of {len(classes)} class(es), two are needed")
    if choice.classes:
        classes = _order_classes(classes, party, choice.classes)
    else:
        _require_clear_classes(row_count_by_label, party)
    if choice.positive is None:
        return tuple(classes)
    negative_classes = [value for value in classes if choice.positive not in _spell_label(value)]
    if len(classes) != 2 or len(negative_classes) != 1:
        raise DataError(
            f"data={{'positive': {choice.positive!r}}}: expected one of two classes; the labels of "
            f"{party} are {', '.join(map(str, classes))}"
        )
    return (*negative_classes, *(value for value in classes if value not in negative_classes))


def _spell_label(value: Any) -> tuple[str, str]:
    """Return the texts by which the settings may name a label, such as "1.0" and "1" for 1.0."""
    return str(value), format_cell(value)


def _order_classes(classes: Sequence[Any], party: str, listed_classes: Sequence[str]) -> list[Any]:
    """Return the classes in the order of the settings' list, each as the labels write it.

    A listed class that no label has is returned as in the list.

    `classes`: classes of the labels. `party`: the active's name. `listed_classes`: the settings'
    list.

    Raises DataError: a label's class is not in the list.
    """
    unlisted_labels = [
        str(value) for value in classes if not set(_spell_label(value)).intersection(listed_classes)
    ]
    if unlisted_labels:
        raise DataError(
            f"{party}: its labels {', '.join(unlisted_labels)} lie outside data={{'classes': "
            f"{[*listed_classes]!r}}}; list all, or leave it out"
        )
    class_by_text = {text: value for value in classes for text in _spell_label(value)}
    return [class_by_text.get(name, name) for name in listed_classes]


def _require_clear_classes(row_count_by_label: "pd.Series", party: str) -> None:
    """Raise DataError if one class may be written in several ways; warn of suspicious classes.

    Labels must not be texts and numbers together, and must not differ only in spelling. A warning
    is issued for classes that may stand for unknown labels, such as "NA" or -1.

    `row_count_by_label`: number of rows by label. `party`: the active's name.
    """
    classes = row_count_by_label.index.tolist()
    class_texts = [str(value) for value in classes]
    if repeated_texts := sorted({text for text in class_texts if class_texts.count(text) > 1}):
        raise DataError(
            f"{party}: its labels write {', '.join(repeated_texts)} both as a number and as a "
            "text; give all in one way, as labels.astype(str)"
        )
    classes_text = ", ".join(
        f"{value!s} ({count} rows)" for value, count in row_count_by_label.items()
    )
    if len({isinstance(value, str) for value in classes}) > 1:
        raise DataError(
            f"{party}: its labels are texts and numbers: {classes_text}; give None where a label "
            "is not known, or all classes as texts, as [str(label) for label in labels]"
        )
    label_texts = [
        text
        for text, count in zip(class_texts, row_count_by_label, strict=True)
        for _ in range(count)
    ]
    require_one_spelling(
        label_texts,
        where=f"{party}: the column of labels",
        remedy=f"say data={{'classes': {sorted(class_texts)!r}}}",
    )
    warn_of_empty_words(label_texts, party=party, column="labels", are_empty=False)
    if len(classes) > 2 and (
        suspect_numbers := sorted(_MISSING_LABEL_NUMBERS.intersection(map(format_cell, classes)))
    ):
        warnings.warn(
            f"{party}: its labels are of {len(classes)} classes, {classes_text}; if "
            f"{', '.join(suspect_numbers)} stands where a label is not known, give None there, as "
            f"[None if label == {suspect_numbers[0]} else label for label in labels]",
            SuspectColumnWarning,
            stacklevel=2,
        )

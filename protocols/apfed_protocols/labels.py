"""Labels of rows and columns that frames of other libraries carry: numbers go by them, or none do.

Run by: whoever takes arrays of a caller. Protects from: numbers of one person or column that would
be added to, or read as, those of another, since a frame was sorted, filtered or joined. Frames are
known by their attributes, so that no library is imported here.

Labels that are the positions 0 to n - 1, in any order, name positions: such a frame is put into
their order and is an array from then on.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.errors import LocalProtocolError

__all__ = ["Labels", "column_names", "find_labels", "order_by_position", "refuse_ambiguous_index"]

_MAX_NAMES_SHOWN = 3


@dataclass(frozen=True)
class Labels:
    """The labels of a frame or series, and the order in which its numbers are added.

    Attributes:
        order_by_axis: positions of an axis's labels in canonical (sorted) order, for each labelled
            axis.
        names_by_axis: labels in canonical order, as texts, for each of these axes; None: the labels
            are the positions 0 to n - 1.
    """

    order_by_axis: tuple[NDArray[np.intp], ...]
    names_by_axis: tuple[tuple[str, ...] | None, ...]

    @property
    def are_positions(self) -> bool:
        """Return whether the labels of all axes are just positions, 0 to n - 1."""
        return all(names is None for names in self.names_by_axis)

    def arrange_values(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return values of the frame in canonical order of its labels."""
        for axis, order in enumerate(self.order_by_axis):
            values = np.take(values, order, axis=axis)
        return values

    def restore_order(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return values in canonical order in the order of the frame; undoes `arrange_values`."""
        for axis, order in enumerate(self.order_by_axis):
            values = np.take(values, np.argsort(order), axis=axis)
        return values


def find_labels(values: Any, subject: str) -> Labels | None:
    """Return the row and column labels of a pandas frame or series; None if the values have no
    labels.

    `subject`: what errors call the values.

    Raises LocalProtocolError: a label occurs twice, or the values are a frame of another library
    with column names or coordinates, which are not compared here.
    """
    if isinstance(values, np.ndarray | Mapping | Sequence):
        return None
    _refuse_names(values, subject)
    index = getattr(values, "index", None)
    if index is None or callable(index):
        return None
    columns = getattr(values, "columns", None)
    axes = [("row", index)] if columns is None else [("row", index), ("column", columns)]
    sorted_axes = [_sort_axis(axis, subject, axis_name) for axis_name, axis in axes]
    return Labels(
        order_by_axis=tuple(order for order, _ in sorted_axes),
        names_by_axis=tuple(names for _, names in sorted_axes),
    )


def order_by_position(
    values: Any, subject: str, *, error: type[Exception] = LocalProtocolError
) -> Any:
    """Return `values` with its rows in the order of their positions. A frame whose row labels are 0
    to n - 1 in any order is sorted by them; values without labels are returned unchanged. The order
    of columns does not change.

    Args:
        values: an array, frame or series.
        subject: what errors call the values.
        error: the class of the error.

    Raises:
        error: row labels are not positions, so that it is unknown which row is which.
    """
    try:
        index = _find_row_index(values, subject)
        if index is None:
            return values
        order, label_texts = _sort_axis(index, subject, "row")
    except LocalProtocolError as label_error:
        raise error(str(label_error)) from label_error
    if label_texts is not None:
        raise error(
            f"{subject}: its rows have labels ({_format_names(label_texts)}), and rows go by "
            "position here; put them into the order of the other arrays and give .to_numpy()"
        )
    is_sorted = bool((order == np.arange(len(order))).all())
    return values if is_sorted else values.iloc[order]


def refuse_ambiguous_index(
    values: Any, subject: str, *, error: type[Exception] = LocalProtocolError
) -> None:
    """Raise `error` if the position of one row of a series or frame is the label of another row.

    For functions that return positions: a caller who looked up a position as a label would get
    another row, and no error. Labels that are no positions cannot be confused with them.

    Args:
        values: an array, frame or series.
        subject: what errors call the values.
        error: the class of the error.
    """
    index = _find_row_index(values, subject)
    if index is None or _is_default_index(index):
        return
    labels = [_convert_label(label) for label in index.tolist()]
    is_ambiguous = any(
        type(label) is int and 0 <= label < len(labels) and label != position
        for position, label in enumerate(labels)
    )
    if is_ambiguous:
        raise error(
            f"{subject}: the answer is positions from 0, and its index has such numbers as labels "
            "of other rows; give .reset_index(drop=True), or .to_numpy()"
        )


def column_names(values: Any) -> tuple[str, ...] | None:
    """Return the names of a frame's columns as texts, in order; None for values without any."""
    if isinstance(values, np.ndarray | Mapping | Sequence):
        return None
    names = getattr(values, "column_names", None)  # of pyarrow
    names = getattr(values, "columns", None) if names is None else names
    if names is None or callable(names):
        return None
    return tuple(str(_convert_label(name)) for name in names)


def _is_default_index(index: Any) -> bool:
    """Return whether an index of pandas is a range that counts 0, 1, 2, ..."""
    return getattr(index, "start", None) == 0 and getattr(index, "step", None) == 1


def _find_row_index(values: Any, subject: str) -> Any:
    """Return the index of a pandas frame or series; None if the values have none.

    `subject`: what errors call the values.
    """
    if isinstance(values, np.ndarray | Mapping | Sequence):
        return None
    if hasattr(values, "dims") and getattr(values, "indexes", None):
        _refuse_names(values, subject)
    index = getattr(values, "index", None)
    return None if callable(index) or not hasattr(values, "iloc") else index


def _refuse_names(values: Any, subject: str) -> None:
    """Raise LocalProtocolError if the values have names that are not compared here: arrays with
    coordinates (xarray), and frames with column names of another library than pandas.

    `subject`: what errors call the values.
    """
    if hasattr(values, "dims") and len(getattr(values, "indexes", ())):
        raise LocalProtocolError(
            f"{subject} is a {type(values).__name__} with coordinates, which nobody compares; put "
            "the arrays of all into one order and give .values"
        )
    names = None if hasattr(values, "iloc") else column_names(values)
    if names is not None:
        raise LocalProtocolError(
            f"{subject} is a {type(values).__name__}, whose columns have names "
            f"({_format_names(names)}); give "
            "a dict of its columns, which go by their names: {name: frame[name].to_numpy() for "
            "name in names}"
        )


def _sort_axis(
    axis: Any, subject: str, axis_name: str
) -> tuple[NDArray[np.intp], tuple[str, ...] | None]:
    """Sort the labels of one axis of a frame into canonical order, which is the same at all
    parties.

    Args:
        axis: an index of pandas.
        subject: what errors call the values.
        axis_name: "row" or "column".

    Returns:
        The position of each label in the axis, in canonical order; and the labels as texts in that
        order, or None if they are the positions 0 to n - 1.

    Raises LocalProtocolError: a label occurs twice.
    """
    if _is_default_index(axis):
        return np.arange(len(axis)), None
    labels = [_convert_label(label) for label in axis.tolist()]
    if all(type(label) is int for label in labels) and sorted(labels) == list(range(len(labels))):
        return np.argsort(np.array(labels, np.intp)), None
    label_texts = [repr(label) for label in labels]
    order = sorted(range(len(label_texts)), key=lambda position: label_texts[position])
    sorted_texts = [label_texts[position] for position in order]
    repeated_texts = [text for text, next_text in pairwise(sorted_texts) if text == next_text]
    if repeated_texts:
        raise LocalProtocolError(
            f"{subject}: {axis_name} label {repeated_texts[0]:.80} occurs more than once, so that "
            "it is open which numbers belong together; give each a label of its own, or .to_numpy()"
        )
    return np.array(order, np.intp), tuple(sorted_texts)


def _convert_label(label: Any) -> Any:
    """Return a label as a plain Python object, a whole float as an integer, so that equal labels of
    two libraries have the same text.
    """
    if isinstance(label, tuple):
        return tuple(map(_convert_label, label))
    label = label.item() if isinstance(label, np.generic) else label
    is_whole = type(label) is float and math.isfinite(label) and label.is_integer()
    return int(label) if is_whole else label


def _format_names(names: Sequence[Any]) -> str:
    """Return the first few names, for errors."""
    text = ", ".join(str(name)[:40] for name in list(names)[:_MAX_NAMES_SHOWN])
    return f"{text}, ..." if len(names) > _MAX_NAMES_SHOWN else text

"""Sessions of typing as three sequences each: BiAffect's data, in a file of our own format.

BiAffect's data are not public. Whoever holds them writes one Parquet file, a row a session:
`hdrs`, the Hamilton score of the person's week, and three columns of lists of numbers, each the
steps of a sequence one after another with all their channels: `alphanum` (of each key press its
duration, the time since the last one, and the distance to the last key along two axes), `special`
(of each special key press a one in one of six places) and `accel` (readings along three axes).

A row of a table is flat, so a session becomes, view by view, the number of its steps and then 100
steps, zeros behind the last (`secure_apfed.data.encoding`). Letters: T steps, C channels.

Source: FedMV, sections 8.1 and 8.2.
"""

import io
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pyarrow import ArrowException, parquet

from secure_apfed.data.cells import numbers_of
from secure_apfed.data.encoding import sequence_columns
from secure_apfed.data.readers import DataSet, TablePool, file_content
from secure_apfed.errors import DataError

__all__ = ["SESSION_SEQUENCES", "SESSION_VIEWS", "read_sessions", "session_pool"]

_STEPS = 100
_CHANNELS = {
    "alphanum": ("duration", "since_last", "distance_x", "distance_y"),
    "special": ("auto_correct", "backspace", "space", "suggestion", "switch_keyboard", "other"),
    "accel": ("x", "y", "z"),
}
# Equal ones take a file no room, and memory 8 bytes each.
_VALUES_AT_MOST = 2**27
# Key presses of a session that is kept, in one of the views of key presses at least.
_KEY_PRESSES = range(10, 101)
_KEYS = ("alphanum", "special")
_LARGEST = 1e18  # squares are finite in float32 still
# The largest Hamilton score of a session that counts as negative.
_NEGATIVE = 7

SESSION_SEQUENCES: Mapping[str, tuple[int, int]] = MappingProxyType(
    {view: (_STEPS, len(channels)) for view, channels in _CHANNELS.items()}
)
SESSION_VIEWS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {view: sequence_columns(view, _STEPS, channels) for view, channels in _CHANNELS.items()}
)


def read_sessions(dataset: DataSet, folder: Path | None) -> TablePool:
    """BiAffect: `files` is one Parquet file of sessions; see `session_pool`."""
    (file,) = dataset.files
    content = file_content(dataset, file, folder)
    try:
        found = parquet.read_metadata(io.BytesIO(content))
        groups = (found.row_group(at) for at in range(found.num_row_groups))
        values = sum(
            part.column(at).num_values for part in groups for at in range(part.num_columns)
        )
        if values > _VALUES_AT_MOST:
            raise ValueError(f"{values} numbers, more than {_VALUES_AT_MOST}: leave sessions out")
        frame = pd.read_parquet(io.BytesIO(content))
    except (ValueError, OSError, ArrowException) as error:
        raise DataError(
            f"{file.name}: not a readable Parquet file ({str(error).strip()}); write it again"
        ) from error
    return session_pool(frame, source=file.name)


def session_pool(sessions: pd.DataFrame, *, source: str) -> TablePool:
    """Return flat rows of the sessions that are kept, with label 0 for an HDRS of 0 to 7, else 1.

    A session is kept if one of its two views of key presses has 10 to 100 of them: the paper keeps
    "sessions that any view contains the number of keypress between 10 and 100", which says no more.
    Beyond 100 steps key presses are cut off, and readings are thinned out evenly.

    Raises:
        DataError: columns are missing, a session is not of this format, or none is left.
    """
    absent = [name for name in ("hdrs", *_CHANNELS) if name not in sessions.columns]
    if absent:
        raise DataError(
            f"{source}: lacks the columns {', '.join(absent)}; it has "
            f"{', '.join(map(str, sessions.columns))}"
        )
    if len(set(sessions.columns)) < len(sessions.columns):
        raise DataError(f"{source}: several columns have one name; give each a name of its own")
    hdrs_N = numbers_of(sessions["hdrs"], source=source)
    wrong = np.flatnonzero(~(hdrs_N >= 0))
    if wrong.size:
        raise DataError(f"{source}: session {wrong[0]} has no HDRS of 0 or more; leave it out")
    views = {
        view: [
            _steps(one, view, source=f"{source}: session {at}")
            for at, one in enumerate(sessions[view])
        ]
        for view in _CHANNELS
    }
    kept = [
        at for at in range(len(sessions))
        if any(len(views[view][at]) in _KEY_PRESSES for view in _KEYS)
    ]  # fmt: skip
    if not kept:
        raise DataError(
            f"{source}: none of {len(sessions)} sessions has {_KEY_PRESSES[0]} to "
            f"{_KEY_PRESSES[-1]} key presses"
        )
    flat_NF = np.concatenate(
        [np.stack([_flat(steps[at], view) for at in kept]) for view, steps in views.items()], axis=1
    )
    names = [name for columns in SESSION_VIEWS.values() for name in columns]
    labels_N = (hdrs_N[kept] > _NEGATIVE).astype(np.int64)
    return TablePool(pd.DataFrame(flat_NF, columns=names), labels_N)


def _steps(numbers: object, view: str, *, source: str) -> NDArray[np.float64]:
    """Return a sequence (T, C) of a cell of the file."""
    channels = len(_CHANNELS[view])
    try:
        flat = np.asarray([] if numbers is None else numbers, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"{source}: {view} is no list of numbers; write it again") from error
    if flat.ndim != 1 or len(flat) % channels or not (np.abs(flat) <= _LARGEST).all():
        raise DataError(
            f"{source}: {view} must be a list of finite numbers of at most {_LARGEST:.0e}, "
            f"{channels} a step, got an array of shape {flat.shape}"
        )
    steps_TC = flat.reshape(-1, channels)
    one_hot = np.isin(steps_TC, (0, 1)).all() and (steps_TC.sum(axis=1) == 1).all()
    if view == "special" and not one_hot:
        raise DataError(
            f"{source}: each step of special is a one in one of {', '.join(_CHANNELS[view])} and "
            "zeros elsewhere; write it so"
        )
    return steps_TC


def _flat(steps_TC: NDArray[np.float64], view: str) -> NDArray[np.float32]:
    """Return the number of steps and the steps, filled up with zeros."""
    if len(steps_TC) > _STEPS and view not in _KEYS:
        steps_TC = steps_TC[np.linspace(0, len(steps_TC) - 1, _STEPS).round().astype(np.int64)]
    steps_TC = steps_TC[:_STEPS]
    flat = np.zeros(1 + _STEPS * steps_TC.shape[1], dtype=np.float32)
    flat[0] = len(steps_TC)
    flat[1 : 1 + steps_TC.size] = steps_TC.ravel()
    return flat

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
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pyarrow import ArrowException, parquet

from secure_apfed.data.files import DataFile, DataSet, TablePool, file_content
from secure_apfed.data.frames import numbers_of
from secure_apfed.errors import DataError
from secure_apfed.seeds import derive_seed

_Floats: TypeAlias = NDArray[np.float64]

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

_VIEWS = {
    view: (f"{view}-steps", *(f"{view}-{at}-{name}" for at in range(_STEPS) for name in channels))
    for view, channels in _CHANNELS.items()
}


def _read(dataset: DataSet, folder: Path | None) -> TablePool:
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
    """
    if absent := [name for name in ("hdrs", *_CHANNELS) if name not in sessions.columns]:
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
            _steps(cell, view, source=f"{source}: session {at}")
            for at, cell in enumerate(sessions[view])
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
    names = [name for columns in _VIEWS.values() for name in columns]
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
    if len(steps_TC) > _STEPS and view not in _KEYS:
        steps_TC = steps_TC[np.linspace(0, len(steps_TC) - 1, _STEPS).round().astype(np.int64)]
    steps_TC = steps_TC[:_STEPS]
    flat = np.zeros(1 + _STEPS * steps_TC.shape[1], dtype=np.float32)
    flat[0] = len(steps_TC)
    flat[1 : 1 + steps_TC.size] = steps_TC.ravel()
    return flat


def synthetic_sessions(rows: int, *, seed: int) -> pd.DataFrame:
    """Return sessions in the format of `secure_apfed.data.sessions`.

    What tells the classes apart is the order of steps alone: of single steps mean and spread are
    alike. A session's rhythm is drawn around its class, in `alphanum` nearest and in `special`
    farthest, so that the views are worth what they are in FedMV's Table 1, roughly.
    """
    draw = np.random.default_rng(derive_seed(seed, "synthetic sessions"))
    positive_N = draw.permutation(np.arange(rows) % 2)
    hdrs_N = np.where(positive_N, draw.integers(8, 26, rows), draw.integers(0, 8, rows))
    frame = pd.DataFrame({"hdrs": hdrs_N})
    for view, (make, apart) in _MADE.items():
        rhythm_N = draw.normal(apart * (2 * positive_N - 1), 1.0)
        frame[view] = pd.Series([make(rhythm, draw).ravel() for rhythm in rhythm_N], dtype=object)
    return frame


def _autoregressive(steps: int, memory: float, draw: np.random.Generator) -> _Floats:
    """Return (T,) of mean 0 and variance 1, each step `memory` times the last and news."""
    news_T = draw.normal(size=steps)
    values_T = np.array(news_T)
    for at in range(1, steps):
        values_T[at] = memory * values_T[at - 1] + np.sqrt(1 - memory**2) * news_T[at]
    return values_T


def _alphanum(rhythm: float, draw: np.random.Generator) -> _Floats:
    """Return key presses (T, 4), which are long or late in runs where the rhythm is large."""
    steps = int(draw.integers(15, 90))
    memory = float(np.tanh(0.8 * rhythm))
    duration_T, gap_T = (_autoregressive(steps, memory, draw) for _ in range(2))
    distance_TC = draw.normal(0, 2.5, (steps, 2))
    times_TC = np.stack([0.09 * np.exp(0.3 * duration_T), 0.25 * np.exp(0.5 * gap_T)], axis=1)
    return np.concatenate([times_TC, distance_TC], axis=1)


def _special(rhythm: float, draw: np.random.Generator) -> _Floats:
    """Return special keys (T, 6), of which the same follow each other where the rhythm is large."""
    steps = int(draw.integers(10, 40))
    shares = np.array([0.06, 0.25, 0.5, 0.07, 0.04, 0.08])
    keys_T = draw.choice(6, size=steps, p=shares)
    repeats_T = draw.random(steps) < 1 / (1 + np.exp(-rhythm))
    for at in range(1, steps):
        if repeats_T[at]:
            keys_T[at] = keys_T[at - 1]
    return np.eye(6)[keys_T]


def _accel(rhythm: float, draw: np.random.Generator) -> _Floats:
    """Return readings (T, 3) of a hand that shakes faster where the rhythm is large."""
    steps = int(draw.integers(80, 140))
    turn = 0.5 + 0.12 * rhythm
    phase_C = draw.uniform(0, 2 * np.pi, 3)
    waves_TC = np.sin(turn * np.arange(steps)[:, None] + phase_C)
    return 0.7 * waves_TC + draw.normal(0, 0.7, (steps, 3))


# How each view is made, and how far from each other the classes lie in it.
_MADE: dict[str, tuple[Callable[[float, np.random.Generator], _Floats], float]] = {
    "alphanum": (_alphanum, 1.2), "special": (_special, 0.5), "accel": (_accel, 0.9),
}  # fmt: skip


BIAFFECT = DataSet(
    name="biaffect",
    title="BiAffect, mood by sessions of typing",
    source="https://www.biaffect.com",
    licence="not public",
    citation="S. Che et al., ACM Transactions on Intelligent Systems and Technology, 2021",
    how="put sessions as docs/data.md describes them, biaffect.parquet, in a data folder",
    shape="sessions of 1303 columns: 100 steps of 4, 6 and 3 channels",
    classes=("negative", "positive"),
    views=3,
    natural_views=_VIEWS,
    sequences={view: (_STEPS, len(channels)) for view, channels in _CHANNELS.items()},
    files=(DataFile("biaffect.parquet", 2**32, exact=False),),
    read=_read,
)
SYNTHETIC_KEYSTROKES = BIAFFECT.stand_in(
    "synthetic_keystrokes", "sequences as in biaffect, which nobody typed",
    shape="1200 sessions of 1303 columns: 100 steps of 4, 6 and 3 channels",
    read=lambda dataset, _: session_pool(
        synthetic_sessions(1200, seed=0), source=dataset.name
    ),
)  # fmt: skip

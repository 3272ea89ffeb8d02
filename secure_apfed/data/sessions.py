"""Synthetic sessions of typing as three sequences each, as of BiAffect, whose own are not public.

`alphanum` has of each key press its duration, the time since the last one, and the distance to the
last key along two axes; `special` of each special key press a one in one of six places; `accel`
readings along three axes. A row of a table is flat, so a session becomes, view by view, the number
of its steps and then 100 steps, zeros behind the last (`secure_apfed.data.encoding`). Letters: T
steps, C channels.

Source: FedMV, sections 8.1 and 8.2.
"""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from secure_apfed.base.seeds import derive_seed
from secure_apfed.data.files import MADE_HERE, DataSet, TablePool

_Floats: TypeAlias = NDArray[np.float64]

_STEPS = 100
_CHANNELS = {
    "alphanum": ("duration", "since_last", "distance_x", "distance_y"),
    "special": ("auto_correct", "backspace", "space", "suggestion", "switch_keyboard", "other"),
    "accel": ("x", "y", "z"),
}

_VIEWS = {
    view: (
        f"{view}-steps",
        *(f"{view}-{step}-{name}" for step in range(_STEPS) for name in channels),
    )
    for view, channels in _CHANNELS.items()
}


def synthetic_sessions(rows: int, *, seed: int) -> TablePool:
    """Make flat sessions; label 0 for a Hamilton score of the person's week up to 7, else 1.

    Only the order of steps separates the classes: mean and spread of single steps are alike. A
    session's rhythm is drawn around its class, in `alphanum` nearest and in `special` farthest, so
    that the views are worth what they are in FedMV's Table 1, roughly.
    """
    draw = np.random.default_rng(derive_seed(seed, "synthetic sessions"))
    positive_N = draw.permutation(np.arange(rows) % 2)
    score_N = np.where(positive_N, draw.integers(8, 26, rows), draw.integers(0, 8, rows))
    parts = []
    for make, separation in _MADE.values():
        rhythm_N = draw.normal(separation * (2 * positive_N - 1), 1.0)
        parts.append(np.stack([_flatten_steps(make(rhythm, draw)) for rhythm in rhythm_N]))
    names = [name for columns in _VIEWS.values() for name in columns]
    frame = pd.DataFrame(np.concatenate(parts, axis=1), columns=names)
    return TablePool(frame, (score_N > 7).astype(np.int64))


def _flatten_steps(steps_TC: _Floats) -> NDArray[np.float32]:
    """Return the steps of one session as a flat row, which begins with their number.

    Of more than 100 steps, 100 at even distances are taken.
    """
    if len(steps_TC) > _STEPS:
        steps_TC = steps_TC[np.linspace(0, len(steps_TC) - 1, _STEPS).round().astype(np.int64)]
    flat = np.zeros(1 + _STEPS * steps_TC.shape[1], dtype=np.float32)
    flat[0] = len(steps_TC)
    flat[1 : 1 + steps_TC.size] = steps_TC.ravel()
    return flat


def _draw_autoregressive(steps: int, memory: float, draw: np.random.Generator) -> _Floats:
    """Return (T,) of mean 0 and variance 1: each step is `memory` times the last one plus noise."""
    noise_T = draw.normal(size=steps)
    values_T = np.array(noise_T)
    for step in range(1, steps):
        values_T[step] = memory * values_T[step - 1] + np.sqrt(1 - memory**2) * noise_T[step]
    return values_T


def _draw_key_presses(rhythm: float, draw: np.random.Generator) -> _Floats:
    """Return key presses (T, 4), which are long or late in runs where the rhythm is large."""
    steps = int(draw.integers(15, 90))
    memory = float(np.tanh(0.8 * rhythm))
    duration_T, gap_T = (_draw_autoregressive(steps, memory, draw) for _ in range(2))
    distance_TC = draw.normal(0, 2.5, (steps, 2))
    times_TC = np.stack([0.09 * np.exp(0.3 * duration_T), 0.25 * np.exp(0.5 * gap_T)], axis=1)
    return np.concatenate([times_TC, distance_TC], axis=1)


def _draw_special_keys(rhythm: float, draw: np.random.Generator) -> _Floats:
    """Return special keys (T, 6), of which the same follow each other where the rhythm is large."""
    steps = int(draw.integers(10, 40))
    shares = np.array([0.06, 0.25, 0.5, 0.07, 0.04, 0.08])
    keys_T = draw.choice(6, size=steps, p=shares)
    repeats_T = draw.random(steps) < 1 / (1 + np.exp(-rhythm))
    for step in range(1, steps):
        if repeats_T[step]:
            keys_T[step] = keys_T[step - 1]
    return np.eye(6)[keys_T]


def _draw_accelerations(rhythm: float, draw: np.random.Generator) -> _Floats:
    """Return readings (T, 3) of a hand that shakes faster where the rhythm is large."""
    steps = int(draw.integers(80, 140))
    turn = 0.5 + 0.12 * rhythm
    phase_C = draw.uniform(0, 2 * np.pi, 3)
    waves_TC = np.sin(turn * np.arange(steps)[:, None] + phase_C)
    return 0.7 * waves_TC + draw.normal(0, 0.7, (steps, 3))


# How each view is made, and how far from each other the classes lie in it.
_MADE: dict[str, tuple[Callable[[float, np.random.Generator], _Floats], float]] = {
    "alphanum": (_draw_key_presses, 1.2),
    "special": (_draw_special_keys, 0.5),
    "accel": (_draw_accelerations, 0.9),
}


SYNTHETIC_KEYSTROKES = DataSet(
    name="synthetic_keystrokes",
    title="Synthetic: sequences as in BiAffect's sessions of typing, which nobody typed",
    shape="1200 sessions of 1303 columns: 100 steps of 4, 6 and 3 channels",
    classes=("negative", "positive"),
    views=3,
    natural_views=_VIEWS,
    sequences={view: (_STEPS, len(channels)) for view, channels in _CHANNELS.items()},
    read=lambda dataset, folder: synthetic_sessions(1200, seed=0),
    **MADE_HERE,
)

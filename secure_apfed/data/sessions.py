"""Synthetic sessions of typing on a phone, in the form of BiAffect's data, which are not public.

A session has three views, each a sequence of steps. A step of `alphanum` is a key press: its
duration, the time since the last one, and the distance to the last key along two axes. A step of
`special` is a special key press, one-hot among six keys. A step of `accel` is an accelerometer
reading along three axes. A row of a table is flat, so a session becomes, view by view, the number
of its steps and then 100 steps, padded with zeros (`secure_apfed.data.encoding`). Letters: T
steps, C channels, N sessions.

Source: FedMV, sections 8.1 and 8.2.
"""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
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
    """Return `rows` flat sessions with labels: 1 if the Hamilton depression score of the person's
    week is above 7, else 0.

    Only the order of steps separates the classes: the mean and the standard deviation of single
    steps are the same in both. Each view of a session is generated from one normal number, its
    dependence: how strongly a step depends on the step before. The mean of the dependence is +s for
    label 1 and -s for label 0, where s is the view's class separation. The three values of s make
    the accuracies of single views roughly those of FedMV's Table 1.
    """
    import pandas as pd

    generator = np.random.default_rng(derive_seed(seed, "synthetic sessions"))
    # Scores are 0 to 25; those above 7 make the label 1.
    is_positive_N = generator.permutation(np.arange(rows) % 2)
    high_scores_N = generator.integers(8, 26, rows)
    low_scores_N = generator.integers(0, 8, rows)
    score_N = np.where(is_positive_N, high_scores_N, low_scores_N)
    views = []
    for draw_steps, separation in _VIEW_GENERATORS.values():
        dependence_N = generator.normal(separation * (2 * is_positive_N - 1), 1.0)
        sessions = [draw_steps(dependence, generator) for dependence in dependence_N]
        views.append(np.stack([_flatten_steps(steps_TC) for steps_TC in sessions]))
    names = [name for columns in _VIEWS.values() for name in columns]
    frame = pd.DataFrame(np.concatenate(views, axis=1), columns=names)
    return TablePool(frame, (score_N > 7).astype(np.int64))


def _flatten_steps(steps_TC: _Floats) -> NDArray[np.float32]:
    """Return T steps with C channels of one session as a flat row (1 + 100 * C,).

    The row begins with T, then follow 100 steps. Fewer than 100 steps are padded with zeros; of
    more, 100 at even distances are taken.
    """
    if len(steps_TC) > _STEPS:
        steps_TC = steps_TC[np.linspace(0, len(steps_TC) - 1, _STEPS).round().astype(np.int64)]
    flat = np.zeros(1 + _STEPS * steps_TC.shape[1], dtype=np.float32)
    flat[0] = len(steps_TC)
    flat[1 : 1 + steps_TC.size] = steps_TC.ravel()
    return flat


def _draw_autoregressive(steps: int, coefficient: float, generator: np.random.Generator) -> _Floats:
    """Return a first-order autoregressive series (T,) of mean 0 and variance 1.

    `steps`: T. `coefficient`: the AR(1) coefficient, in (-1, 1).
    """
    noise_T = generator.normal(size=steps)
    noise_scale = np.sqrt(1 - coefficient**2)
    values_T = np.array(noise_T)
    for step in range(1, steps):
        values_T[step] = coefficient * values_T[step - 1] + noise_scale * noise_T[step]
    return values_T


def _draw_key_presses(dependence: float, generator: np.random.Generator) -> _Floats:
    """Return T = 15 to 89 key presses (T, 4): duration and gap in seconds, distance in x and y.

    Log-durations and log-gaps are AR(1) series, so that long presses and late ones come in runs.

    `dependence`: any number; its scaled tanh is the AR coefficient of both series.
    """
    steps = int(generator.integers(15, 90))
    coefficient = float(np.tanh(0.8 * dependence))
    duration_T = _draw_autoregressive(steps, coefficient, generator)
    gap_T = _draw_autoregressive(steps, coefficient, generator)
    distance_TC = generator.normal(0, 2.5, (steps, 2))
    times_TC = np.stack([0.09 * np.exp(0.3 * duration_T), 0.25 * np.exp(0.5 * gap_T)], axis=1)
    return np.concatenate([times_TC, distance_TC], axis=1)


def _draw_special_keys(dependence: float, generator: np.random.Generator) -> _Floats:
    """Return T = 10 to 39 special key presses (T, 6), one-hot by key.

    `dependence`: any number; its logistic function is the probability that a key is repeated.
    """
    steps = int(generator.integers(10, 40))
    # How often each key is pressed, in the order of the channels of the view "special".
    key_probabilities = np.array([0.06, 0.25, 0.5, 0.07, 0.04, 0.08])
    keys_T = generator.choice(6, size=steps, p=key_probabilities)
    repeats_T = generator.random(steps) < 1 / (1 + np.exp(-dependence))
    for step in range(1, steps):
        if repeats_T[step]:
            keys_T[step] = keys_T[step - 1]
    return np.eye(6)[keys_T]


def _draw_accelerations(dependence: float, generator: np.random.Generator) -> _Floats:
    """Return T = 80 to 139 accelerometer readings (T, 3): a sine wave in each axis, plus noise.

    `dependence`: any number; the wave's frequency rises linearly with it.
    """
    steps = int(generator.integers(80, 140))
    radians_per_step = 0.5 + 0.12 * dependence
    phase_C = generator.uniform(0, 2 * np.pi, 3)
    waves_TC = np.sin(radians_per_step * np.arange(steps)[:, None] + phase_C)
    return 0.7 * waves_TC + generator.normal(0, 0.7, (steps, 3))


# By view: the function that draws a session's steps, and the view's class separation.
_VIEW_GENERATORS: dict[str, tuple[Callable[[float, np.random.Generator], _Floats], float]] = {
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

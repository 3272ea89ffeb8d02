"""Synthetic stand-ins for sets that are not public, or that nobody may pass on: shapes, not facts.

Run by: whoever tries out a method without the real data. Nothing here was fitted to a person's
data; what is said of these numbers says nothing about people. Each is a function of a seed.
Letters: N rows, V numbers of a view, L latent numbers, T steps.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from secure_apfed.data.mimic import ADMISSION_COLUMNS, stay_labels
from secure_apfed.data.readers import DataSet, TablePool
from secure_apfed.data.sessions import session_pool
from secure_apfed.seeds import derive_seed

__all__ = [
    "read_synthetic_caltech_7", "read_synthetic_keystrokes", "read_synthetic_mimic_iii",
    "synthetic_admissions", "synthetic_images", "synthetic_sessions",
]  # fmt: skip

_SEED = 0
_ADMISSIONS, _SESSIONS = 4000, 1200
# People a class of the real set of images, which are far from equally many.
_IMAGES = (435, 798, 52, 34, 35, 64, 56)
_LATENT = 12

Floats = NDArray[np.float64]
_Make = Callable[[float, np.random.Generator], Floats]


def read_synthetic_caltech_7(dataset: DataSet, folder: Path | None) -> TablePool:
    """As many rows a class and columns a view as Caltech101-7 has; synthetic."""
    return synthetic_images(dataset, seed=_SEED)


def read_synthetic_mimic_iii(dataset: DataSet, folder: Path | None) -> TablePool:
    """4000 admissions with the columns and classes of `mimic_iii`; synthetic."""
    return synthetic_admissions(_ADMISSIONS, seed=_SEED)


def read_synthetic_keystrokes(dataset: DataSet, folder: Path | None) -> TablePool:
    """1200 sessions with the columns and classes of `biaffect`; synthetic."""
    sessions = synthetic_sessions(_SESSIONS, seed=_SEED)
    return session_pool(sessions, source=dataset.name)


def synthetic_images(dataset: DataSet, *, seed: int) -> TablePool:
    """Return noisy linear images, one a view, of latent numbers that lie around their class."""
    draw = np.random.default_rng(derive_seed(seed, "synthetic images"))
    labels_N = draw.permutation(np.repeat(np.arange(len(_IMAGES)), _IMAGES))
    centres = draw.normal(size=(len(_IMAGES), _LATENT))
    latent_NL = centres[labels_N] + draw.normal(0, 0.9, (len(labels_N), _LATENT))
    columns: dict[str, Floats] = {}
    for names in dataset.natural_views.values():
        mixed_NV = latent_NL @ draw.normal(size=(_LATENT, len(names)))
        noisy_NV = mixed_NV + draw.normal(0, 8.0, mixed_NV.shape)
        columns |= dict(zip(names, noisy_NV.T, strict=True))
    return TablePool(pd.DataFrame(columns), labels_N.astype(np.int64))


def synthetic_admissions(rows: int, *, seed: int) -> TablePool:
    """Return counts a day that follow how ill somebody is, which also makes the stay longer."""
    draw = np.random.default_rng(derive_seed(seed, "synthetic admissions"))
    ill_N = draw.normal(size=rows)
    days_N = np.exp(1.87 + 0.55 * ill_N + draw.normal(0, 0.65, rows))
    newborn_N = draw.random(rows) < 0.13
    age_N = np.clip(draw.normal(62 + 3 * ill_N, 17, rows), 16, 90)
    frame = pd.DataFrame({"Age": np.where(newborn_N, 0.0, age_N)})
    for name in ADMISSION_COLUMNS[1:-1]:
        usual, illness, per_stay = np.exp(draw.normal(0, 1.2)), draw.normal(0, 0.5), draw.random()
        # Some are done once a stay, so that there are fewer of them a day in a long one.
        expected_N = usual * np.exp(illness * ill_N) * days_N ** (1 - per_stay)
        frame[name] = draw.poisson(expected_N) / days_N
    frame[ADMISSION_COLUMNS[-1]] = frame[list(ADMISSION_COLUMNS[1:-1])].sum(axis=1)
    return TablePool(frame, stay_labels(days_N))


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


def _autoregressive(steps: int, memory: float, draw: np.random.Generator) -> Floats:
    """Return (T,) of mean 0 and variance 1, each step `memory` times the last and news."""
    news_T = draw.normal(size=steps)
    values_T = np.empty(steps)
    last = news_T[0]
    for at, new in enumerate(news_T):
        last = memory * last + np.sqrt(1 - memory**2) * new if at else new
        values_T[at] = last
    return values_T


def _alphanum(rhythm: float, draw: np.random.Generator) -> Floats:
    """Return key presses (T, 4), which are long or late in runs where the rhythm is large."""
    steps = int(draw.integers(15, 90))
    memory = float(np.tanh(0.8 * rhythm))
    duration_T, gap_T = (_autoregressive(steps, memory, draw) for _ in range(2))
    distance_TC = draw.normal(0, 2.5, (steps, 2))
    times_TC = np.stack([0.09 * np.exp(0.3 * duration_T), 0.25 * np.exp(0.5 * gap_T)], axis=1)
    return np.concatenate([times_TC, distance_TC], axis=1)


def _special(rhythm: float, draw: np.random.Generator) -> Floats:
    """Return special keys (T, 6), of which the same follow each other where the rhythm is large."""
    steps = int(draw.integers(10, 40))
    shares = np.array([0.06, 0.25, 0.5, 0.07, 0.04, 0.08])
    keys_T = draw.choice(6, size=steps, p=shares)
    repeats_T = draw.random(steps) < 1 / (1 + np.exp(-rhythm))
    for at in range(1, steps):
        if repeats_T[at]:
            keys_T[at] = keys_T[at - 1]
    return np.eye(6)[keys_T]


def _accel(rhythm: float, draw: np.random.Generator) -> Floats:
    """Return readings (T, 3) of a hand that shakes faster where the rhythm is large."""
    steps = int(draw.integers(80, 140))
    turn = 0.5 + 0.12 * rhythm
    phase_C = draw.uniform(0, 2 * np.pi, 3)
    waves_TC = np.sin(turn * np.arange(steps)[:, None] + phase_C)
    return 0.7 * waves_TC + draw.normal(0, 0.7, (steps, 3))


# How each view is made, and how far from each other the classes lie in it.
_MADE: dict[str, tuple[_Make, float]] = {
    "alphanum": (_alphanum, 1.2), "special": (_special, 0.5), "accel": (_accel, 0.9),
}  # fmt: skip

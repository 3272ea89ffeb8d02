"""Stand-ins for sets that are not here: labelled so, of the same shape, with something to learn."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score

from secure_apfed.data import DATASETS, load_data
from secure_apfed.data.caltech import synthetic_images
from secure_apfed.data.mimic import synthetic_admissions
from secure_apfed.data.readers import TablePool
from secure_apfed.data.sessions import session_pool, synthetic_sessions
from secure_apfed.settings.data import DataSettings


def pool(name: str, folder: Path | None = None) -> TablePool:
    entry = DATASETS[name]
    read = entry.read(entry, folder)
    assert isinstance(read, TablePool)
    return read


def test_parties_fold_their_sessions_back(tmp_path: Path) -> None:
    told = synthetic_sessions(64, seed=0)
    told.to_parquet(tmp_path / "biaffect.parquet")
    settings = DataSettings(
        dataset="biaffect", folder=tmp_path, partition="horizontal", clients=3,
        views=("special", "alphanum"),
    )  # fmt: skip
    data = load_data(settings, seed=0)
    assert list(data.active.views) == ["special", "alphanum"]
    steps = sorted(len(keys) // 4 for keys in told["alphanum"])
    found = []
    for table in data.tables:
        lengths_N, steps_NTC = table.views["alphanum"].fold(table.features)
        assert steps_NTC.shape == (len(table.ids), 100, 4)
        for length, steps_TC in zip(lengths_N.tolist(), steps_NTC, strict=True):
            assert bool((steps_TC[:length, 0] > 0).all())  # durations
            assert not bool(steps_TC[length:].any())
        found += lengths_N.tolist()
    assert sorted(found) == steps


@pytest.mark.parametrize("name", ["caltech_7", "mimic_iii", "biaffect"])
def test_a_stand_in_says_that_it_is_synthetic_and_has_the_same_shape(name: str) -> None:
    real = DATASETS[name]
    entry = DATASETS[{"biaffect": "synthetic_keystrokes"}.get(name, f"synthetic_{name}")]
    assert "synthetic" in entry.name
    assert entry.title.startswith("Synthetic: ")
    assert entry.how.startswith("synthetic: ")
    assert (entry.classes, entry.natural_views, entry.sequences) == (
        real.classes, real.natural_views, real.sequences,
    )  # fmt: skip
    read = pool(entry.name)
    columns = [column for view in real.natural_views.values() for column in view]
    assert list(read.frame.columns) == columns
    assert set(read.labels.tolist()) == set(range(len(real.classes)))


def test_stand_ins_follow_from_their_seed() -> None:
    caltech = DATASETS["synthetic_caltech_7"]

    def made(seed: int) -> list[float]:
        admissions, images = (
            synthetic_admissions(50, seed=seed),
            synthetic_images(caltech, seed=seed),
        )
        readings = np.concatenate(list(synthetic_sessions(20, seed=seed)["accel"]))
        return [admissions.frame.to_numpy().sum(), images.frame.to_numpy().sum(), readings.sum()]

    assert made(1) == made(1)
    assert not set(made(1)) & set(made(2))


def test_synthetic_sessions_differ_in_the_order_of_their_steps() -> None:
    """Their means say nothing; how a step follows the last says most in alphanum."""
    read = session_pool(synthetic_sessions(1200, seed=3), source="x")
    means, order = {}, {}
    for view, (steps, channels) in DATASETS["synthetic_keystrokes"].sequences.items():
        columns = list(DATASETS["synthetic_keystrokes"].natural_views[view])
        flat_NF = read.frame[columns].to_numpy(dtype=np.float64)
        used_N, steps_NTC = flat_NF[:, :1], flat_NF[:, 1:].reshape(-1, steps, channels)
        mean_NC = steps_NTC.sum(1) / used_N
        apart_NTC = steps_NTC - mean_NC[:, None]
        apart_NTC *= (np.arange(steps) < used_N)[..., None]
        lags = (steps_NTC[:, 1:] * steps_NTC[:, :-1]).sum((1, 2))[:, None] / used_N
        further = [(apart_NTC[:, lag:] * apart_NTC[:, :-lag]).sum(1) / used_N for lag in (1, 2, 4)]
        means[view] = accuracy(mean_NC, read.labels)
        order[view] = accuracy(np.concatenate([lags, *further], axis=1), read.labels)
    assert max(means.values()) < 0.57
    assert order["alphanum"] > order["accel"] > order["special"] > 0.6
    assert order["alphanum"] > 0.8


def accuracy(features: NDArray[np.float64], labels: NDArray[np.int64]) -> float:
    scaled = (features - features.mean(0)) / features.std(0)
    return float(cross_val_score(LogisticRegression(), scaled, labels, cv=5).mean())

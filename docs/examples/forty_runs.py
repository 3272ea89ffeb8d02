"""Forty runs on this machine, on Dask and on Ray: python docs/examples/forty_runs.py.

Needs the extras `experiments`, `dask` and `ray`. Prints seconds, and fails if a figure differs.
"""

import tempfile
import time
from pathlib import Path

import pandas as pd

from apfed_experiments.backends import use_backend
from apfed_experiments.study import Point, load_base_config, run_points
from secure_apfed.config import Config

CHANGES = {
    "train": {"epochs": 1, "evaluate_every": 1},
    "secure_sum": {"scheme": "plain", "masks": "pairwise"},
    "guard": {"mechanism": "none"},
}
RUNS = 40


def make_config() -> Config:
    """Return APFed-C on breast cancer, one epoch, under masks, not attacked."""
    settings = load_base_config("all-labels-breast-cancer").model_dump(
        mode="json", exclude_unset=True
    )
    for section, changes in CHANGES.items():
        settings[section] = {**settings.get(section, {}), **changes}
    return Config.model_validate({**settings, "guard": CHANGES["guard"], "attacks": []})


def compute_runs(backend: str, folder: Path) -> pd.DataFrame:
    """Compute all runs there, print how long it took, and return their figures."""
    begun = time.monotonic()
    with use_backend(backend):
        started = time.monotonic()
        point = Point(config=make_config(), folder=folder, has_metrics_only=True)
        table = run_points([point], range(RUNS), jobs=2, should_measure_baselines=False).table
    seconds = time.monotonic() - started
    print(f"{backend}: start {started - begun:.1f} s, {RUNS} runs {seconds:.1f} s")
    return table.drop(columns="influence")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        here = compute_runs("loky", Path(folder) / "loky")
        for cluster in ("dask", "ray"):
            pd.testing.assert_frame_equal(here, compute_runs(cluster, Path(folder) / cluster))
    print("all figures are equal")

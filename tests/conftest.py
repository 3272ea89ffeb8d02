"""What every test runs under: one thread a process, no screen, the same examples each time."""

import os

import pytest
from hypothesis import settings

# Workers of xdist share the cores.
# Set before the first import of torch, matplotlib or a subprocess of ours.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _few_baselines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside runs of tests two solo baselines are measured, not all; those have tests of theirs."""
    from secure_apfed.solo import BASELINES

    few = {name: BASELINES[name] for name in ("ridge", "logistic")}
    monkeypatch.setattr("experiments.solo.BASELINES", few)

"""Where the runs of a study are computed."""

import os
import signal
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import joblib
import pandas as pd
import pytest
from joblib.parallel import get_active_backend

from apfed_experiments.backends import use_backend
from apfed_experiments.study import Point, load_base_config, run_points, run_tasks
from secure_apfed.config import Config
from secure_apfed.errors import ConfigError
from secure_apfed.methods import method_settings
from secure_apfed.settings.privacy import GuardSettings


def small() -> Config:
    base = load_base_config("all-labels-breast-cancer")
    train = base.train.model_copy(update={"epochs": 2, "evaluate_every": 2})
    said = {"train": train, "method": method_settings("apfed_c"), "attacks": ()}
    return base.model_copy(update={**said, "guard": GuardSettings(mechanism="none")})


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("dsk", "did you mean 'dask'"),
        ("loky:tcp://host:1", "takes no address"),
        ("", "is unknown"),
    ],
)
def test_another_backend_is_refused(choice: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message), use_backend(choice):
        pytest.fail("it was taken")


@pytest.mark.parametrize(("cluster", "package"), [("dask", "distributed"), ("ray", "ray")])
def test_a_cluster_without_its_package_is_refused(
    cluster: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("apfed_experiments.backends.find_spec", lambda name: None)
    message = f"--backend {cluster} needs the package '{package}'"
    with pytest.raises(ConfigError, match=message), use_backend(cluster):
        pytest.fail("it was taken")


def test_the_run_that_clusters_compute_is_one() -> None:
    """Those tests run where a cluster's package is installed, so this one notices first."""
    assert (small().method.name, small().train.epochs) == ("apfed_c", 2)


@pytest.mark.parametrize("choice", ["threading", "joblib:threading"])
def test_runs_are_computed_there_and_only_within(choice: str) -> None:
    before = type(get_active_backend()[0])
    with use_backend(choice):
        assert type(get_active_backend()[0]) is joblib._parallel_backends.ThreadingBackend
    assert type(get_active_backend()[0]) is before


CLUSTERS = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed"),
    )
    for name, package in (("dask", "distributed"), ("ray", "ray"))
]
# Of their own: they leave sockets and processes to the interpreter's end, and warn of what dies.
on_a_cluster = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),
]


def wait_and_square(number: int, folder: Path) -> int:
    """Die once in task 2; wait in task 3 until the first result was handed over."""
    died = folder / "died"
    if number == 2 and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    ends_s = time.monotonic() + 120
    while number == 3 and not (folder / "handed over").exists():
        assert time.monotonic() < ends_s, "no result was handed over before all were there"
        time.sleep(0.05)
    return number**2


def refuse(number: int) -> int:
    raise ConfigError(f"task {number} is refused")


class TestClusters:
    """Each on workers that start on this machine."""

    pytestmark = on_a_cluster

    @pytest.mark.parametrize("cluster", CLUSTERS)
    def test_results_come_one_by_one_and_a_task_whose_worker_died_is_played_again(
        self, cluster: str, tmp_path: Path
    ) -> None:
        counts = []

        def count(done: int, total: int) -> None:
            counts.append((done, total))
            (tmp_path / "handed over").touch()

        tasks = [(f"{n}", partial(wait_and_square, n, tmp_path)) for n in range(6)]
        with use_backend(cluster):
            assert type(get_active_backend()[0]).__name__.lower().startswith(cluster)
            results = run_tasks(tasks, len(tasks), jobs=2, on_done=count)
        assert results == {f"{n}": n**2 for n in range(6)}
        assert counts == [(done, 6) for done in range(1, 7)]
        assert (tmp_path / "died").exists()

    @pytest.mark.parametrize("cluster", CLUSTERS)
    def test_an_error_of_a_run_ends_the_study_as_here(self, cluster: str) -> None:
        tasks = [(f"{n}", partial(refuse, n)) for n in range(3)]
        with use_backend(cluster), pytest.raises(ConfigError, match=r"task \d is refused"):
            run_tasks(tasks, len(tasks), jobs=2, on_done=lambda done, total: None)

    @pytest.mark.parametrize("cluster", CLUSTERS)
    def test_a_study_finds_what_it_finds_on_this_machine(
        self, cluster: str, tmp_path: Path
    ) -> None:
        tables = {}
        for where in ("loky", cluster):
            point = Point(config=small(), folder=tmp_path / where, has_metrics_only=True)
            with use_backend(where):
                tables[where] = run_points(
                    [point], range(3), jobs=2, should_measure_baselines=True
                ).table
        drop = ["influence"]
        pd.testing.assert_frame_equal(
            tables["loky"].drop(columns=drop), tables[cluster].drop(columns=drop)
        )
        assert len(tables["loky"]) > 3

    @pytest.mark.parametrize("cluster", CLUSTERS)
    def test_an_address_where_nothing_answers_is_named(self, cluster: str) -> None:
        place = {"dask": "tcp://127.0.0.1:1", "ray": "127.0.0.1:1"}[cluster]
        with (
            pytest.raises(ConfigError, match=f"--backend {cluster}: no cluster answers at"),
            use_backend(f"{cluster}:{place}"),
        ):
            pytest.fail("it was taken")

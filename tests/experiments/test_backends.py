"""Where the runs of a study are computed."""

import joblib
import pytest
from joblib.parallel import get_active_backend

from apfed_experiments.backends import use_backend
from secure_apfed.errors import ConfigError


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


def test_a_cluster_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("apfed_experiments.backends.find_spec", lambda name: None)
    with (
        pytest.raises(ConfigError, match="needs Dask's package"),
        use_backend("dask"),
    ):
        pytest.fail("it was taken")


@pytest.mark.parametrize("choice", ["threading", "joblib:threading"])
def test_runs_are_computed_there_and_only_within(choice: str) -> None:
    before = type(get_active_backend()[0])
    with use_backend(choice):
        assert type(get_active_backend()[0]) is joblib._parallel_backends.ThreadingBackend
    assert type(get_active_backend()[0]) is before


@pytest.mark.slow
def test_dask_returns_what_this_machine_does() -> None:
    pytest.importorskip("distributed")
    tasks = [joblib.delayed(divmod)(number, 3) for number in range(8)]
    with use_backend("dask"):
        found = joblib.Parallel(n_jobs=2, return_as="generator_unordered")(tasks)
        assert sorted(found) == sorted(divmod(number, 3) for number in range(8))

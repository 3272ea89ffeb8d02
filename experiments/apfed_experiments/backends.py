"""Backends that compute a study's runs: processes of this machine, a Dask or a Ray cluster.

joblib's own registry does the work. All workers need this package, and the study's folder at the
same path, since each run is stored there as it ends. A run whose worker dies is played again, from
its last checkpoint where the study keeps run folders.
"""

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec

import joblib
from joblib.parallel import BACKENDS

from apfed_protocols.installing import install_extra
from secure_apfed.errors import ConfigError
from secure_apfed.settings import describe_unknown_name

__all__ = ["use_backend"]

_CONNECT_TIMEOUT_S = 10.0
_LOCAL_BACKENDS = ("loky", "multiprocessing", "threading", "sequential")


@contextmanager
def use_backend(choice: str) -> Iterator[None]:
    """Compute the runs of studies in the block on the chosen backend.

    Args:
        choice: "loky" (processes of this machine), "dask" or "ray" (a cluster that starts on this
            machine), "dask:ADDRESS" or "ray:ADDRESS" (one that runs), or another name of joblib's
            registry.

    Raises:
        ConfigError: no such backend, its package is missing, or nothing responds at the address.
    """
    # "joblib:NAME" is another form of NAME.
    name, _, address = choice.removeprefix("joblib:").partition(":")
    known_names = sorted({*_LOCAL_BACKENDS, *BACKENDS, *_CONNECT_BY_CLUSTER})
    if name not in known_names:
        raise ConfigError(f"--backend {describe_unknown_name(name, known_names)}")
    if name in _CONNECT_BY_CLUSTER:
        _require_package(name)
        with _CONNECT_BY_CLUSTER[name](address or None), joblib.parallel_config(backend=name):
            yield
        return
    if address:
        raise ConfigError(
            f"--backend {name} computes on this machine and takes no address, got {address!r}; an "
            "address belongs to "
            f"{' or '.join(f'{cluster}:ADDRESS' for cluster in _CONNECT_BY_CLUSTER)}"
        )
    with joblib.parallel_config(backend=name):
        yield


@contextmanager
def _connect_to_dask(address: str | None) -> Iterator[None]:
    """Connect to a scheduler of Dask in the block.

    `address`: address of the scheduler; None: workers are started on this machine.

    Raises ConfigError: nothing responds at the address.
    """
    from distributed import Client

    try:
        client = Client(address)
    except (OSError, ValueError) as error:
        raise ConfigError(_describe_absence("dask", address, error)) from error
    with client:
        yield


@contextmanager
def _connect_to_ray(address: str | None) -> Iterator[None]:
    """Connect to a Ray cluster in the block.

    `address`: address of the cluster; None: workers are started on this machine, with the priority
    of this process and without usage statistics.

    Raises ConfigError: nothing responds at the address.
    """
    # Ray reads both variables when it starts.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")
    import ray
    from ray.exceptions import RayError

    from apfed_experiments.ray_backend import RayBackend

    joblib.register_parallel_backend("ray", RayBackend)
    if ray.is_initialized():  # the caller connected, and also disconnects
        yield
        return
    options: dict[str, bool] = {} if address else {"include_dashboard": False}
    try:
        if address:
            _require_listener(address)
        ray.init(address=address, log_to_driver=False, configure_logging=False, **options)
    except (OSError, ValueError, RuntimeError, RayError) as error:
        raise ConfigError(_describe_absence("ray", address, error)) from error
    try:
        yield
    finally:
        ray.shutdown()


_CONNECT_BY_CLUSTER: Mapping[str, Callable[[str | None], AbstractContextManager[None]]] = {
    "dask": _connect_to_dask,
    "ray": _connect_to_ray,
}
_PACKAGE_BY_CLUSTER = {"dask": "distributed", "ray": "ray"}


def _require_listener(address: str) -> None:
    """Raise OSError if nothing listens at an address HOST:PORT.

    Ray itself would try for minutes. An address in another form is left to Ray.
    """
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()


def _require_package(cluster: str) -> None:
    """Raise ConfigError, with the command to run, if a cluster's package is not installed."""
    package = _PACKAGE_BY_CLUSTER[cluster]
    if find_spec(package) is None:
        raise ConfigError(
            f"--backend {cluster} needs the package '{package}', which is not installed here; run "
            f"{install_extra(cluster)} here and at all workers"
        )


def _describe_absence(cluster: str, address: str | None, error: Exception) -> str:
    """Return the message for a cluster that does not respond."""
    location = f"at {address}" if address else "on this machine"
    return f"--backend {cluster}: no cluster answers {location}: {error}"

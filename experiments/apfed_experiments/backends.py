"""Where the runs of a study are computed: processes of this machine, or a Dask cluster.

joblib's own registry does the work. All workers need this package, and the study's folder at the
same path, since each run is stored there as it ends.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import joblib
from joblib.parallel import BACKENDS

from secure_apfed.errors import ConfigError
from secure_apfed.settings import unknown_name

__all__ = ["use_backend"]

_LOCAL = ("loky", "multiprocessing", "threading", "sequential")
_CLUSTER = "dask"


@contextmanager
def use_backend(choice: str) -> Iterator[None]:
    """Compute the runs of studies in this block there.

    Args:
        choice: "loky" (processes of this machine), "dask" (a cluster that starts on this machine),
            "dask:ADDRESS" (one that runs), or another name of joblib's registry.

    Raises:
        ConfigError: no such backend, or its package is missing.
    """
    name, _, address = choice.removeprefix("joblib:").partition(":")
    known = sorted({*_LOCAL, *BACKENDS, _CLUSTER})
    if name not in known:
        raise ConfigError(f"--backend {unknown_name(name, known)}")
    if name == _CLUSTER:
        with _connect_to_dask(address or None), joblib.parallel_config(backend=name):
            yield
        return
    if address:
        raise ConfigError(
            f"--backend {name} computes on this machine and takes no address, got {address!r}; an "
            f"address belongs to {_CLUSTER}:ADDRESS"
        )
    with joblib.parallel_config(backend=name):
        yield


@contextmanager
def _connect_to_dask(address: str | None) -> Iterator[None]:
    """Connect to a scheduler, or start workers of this machine."""
    if find_spec("distributed") is None:
        raise ConfigError(
            "--backend dask needs Dask's package 'distributed', which is not installed here; all "
            "workers need it, too"
        )
    from distributed import Client

    with Client(address):
        yield

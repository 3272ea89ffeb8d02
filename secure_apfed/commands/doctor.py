"""What this machine has and lacks for running the library, and how to get what is missing."""

import importlib
import importlib.metadata
import io
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Literal

from apfed_protocols.crypten import INSTALL
from secure_apfed.data.catalogue import DATASETS
from secure_apfed.data.files import DataSet, default_folder, file_path
from secure_apfed.errors import DataError

__all__ = ["Finding", "examine", "healthy"]

_OLDEST_PYTHON = (3, 11)
_PROJECT = "secure-apfed"

# distribution -> (module, what it is for); a run needs these.
_REQUIRED: Mapping[str, tuple[str, str]] = {
    "torch": ("torch", "networks"),
    "numpy": ("numpy", "arrays"),
    "scipy": ("scipy", "accounting"),
    "tenseal": ("tenseal", "the CKKS sum"),
    "cryptography": ("cryptography", "keys, masks and sealed links"),
    "pynacl": ("nacl", "set intersection by Diffie-Hellman"),
    "gmpy2": ("gmpy2", "set intersection by Diffie-Hellman"),
    "pycryptodome": ("Crypto", "shares in the sum with recovery"),
    "opacus": ("opacus", "a second opinion on epsilon"),
    "pydantic": ("pydantic", "settings"),
    "PyYAML": ("yaml", "config files"),
    "safetensors": ("safetensors", "models and messages"),
    "msgpack": ("msgpack", "messages"),
    "scikit-learn": ("sklearn", "attacks and two data sets"),
    "pandas": ("pandas", "tables"),
    "pyarrow": ("pyarrow", "Parquet"),
}
_EXPERIMENTS = f"pip install '{_PROJECT}[experiments]'"
# distribution -> (module, what it is for, how to get it); a run does without these.
_OPTIONAL: Mapping[str, tuple[str, str, str]] = {
    "matplotlib": ("matplotlib", "pictures", _EXPERIMENTS),
    "jinja2": ("jinja2", "the HTML report", _EXPERIMENTS),
    "grpcio": ("grpc", "links between machines", f"pip install '{_PROJECT}[grpc]'"),
    "dp-accounting": ("dp_accounting", "a third opinion on epsilon", _EXPERIMENTS),
    "tensorboard": (
        "tensorboard",
        "curves while training",
        f"pip install '{_PROJECT}[tensorboard]'",
    ),
}

# Tried in a process of its own: this one does not need its modules.
_CRYPTEN = "from apfed_protocols.crypten import load_crypten; load_crypten()"
_CRYPTEN_SECONDS = 60


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        group, name: what it is.
        state: ok; "optional": missing, and a run does without it; "missing": required.
        value: what was found.
        remedy: what to do about it; empty if nothing.
    """

    group: str
    name: str
    state: Literal["ok", "optional", "missing"]
    value: str
    remedy: str = ""


def healthy(findings: tuple[Finding, ...]) -> bool:
    """Whether nothing that a run needs is missing."""
    return all(finding.state != "missing" for finding in findings)


def examine() -> tuple[Finding, ...]:
    """Look at the interpreter, packages, processors, data sets and the data folder."""
    return (*_system(), *_packages(), *_accelerator(), *_data())


def _system() -> Iterator[Finding]:
    new_enough = sys.version_info >= _OLDEST_PYTHON
    yield Finding(
        group="system", name="python", state="ok" if new_enough else "missing",
        value=platform.python_version(),
        remedy="" if new_enough else "install Python {}.{} or newer".format(*_OLDEST_PYTHON),
    )  # fmt: skip
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    machine = f"{platform.system()} on {platform.machine()}, {cores} cores"
    yield Finding(group="system", name="machine", state="ok", value=machine)


def _packages() -> Iterator[Finding]:
    for name, (module, purpose) in _REQUIRED.items():
        yield _package(name, module, purpose, f"pip install --upgrade {_PROJECT}", "missing")
    for name, (module, purpose, remedy) in _OPTIONAL.items():
        yield _package(name, module, purpose, remedy, "optional")
    yield _crypten()


def _package(
    name: str, module: str, purpose: str, remedy: str, absent: Literal["optional", "missing"]
) -> Finding:
    quiet = io.StringIO()
    try:
        with warnings.catch_warnings(), redirect_stdout(quiet), redirect_stderr(quiet):
            warnings.simplefilter("ignore")
            importlib.import_module(module)
        version = importlib.metadata.version(name)
    except (ImportError, OSError, AttributeError) as error:
        # OSError: a shared library does not load; AttributeError: two packages do not fit.
        reason = str(error).splitlines()[0]
        return Finding(
            group="packages",
            name=name,
            state=absent,
            value=f"for {purpose}: {reason}",
            remedy=remedy,
        )
    return Finding(group="packages", name=name, state="ok", value=version)


def _crypten() -> Finding:
    purpose = "for the sum `crypten` and the intersection `circuit_crypten`"
    try:
        version = importlib.metadata.version("crypten")
        subprocess.run(  # noqa: S603 - a fixed program, no input
            [sys.executable, "-c", _CRYPTEN],
            check=True, capture_output=True, text=True, timeout=_CRYPTEN_SECONDS,
        )  # fmt: skip
    except importlib.metadata.PackageNotFoundError:
        value = f"{purpose}: not installed"
    except subprocess.CalledProcessError as error:
        value = f"{purpose}: {(error.stderr.splitlines() or ['does not load'])[-1]}"
    except subprocess.TimeoutExpired:
        value = f"{purpose}: does not load within {_CRYPTEN_SECONDS} s"
    else:
        return Finding(group="packages", name="crypten", state="ok", value=version)
    return Finding(group="packages", name="crypten", state="optional", value=value, remedy=INSTALL)


def _accelerator() -> Iterator[Finding]:
    try:
        import torch
    except (ImportError, OSError):
        return
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())]
        value = f"{', '.join(names)}, CUDA {torch.version.cuda}"
        yield Finding(group="system", name="GPU", state="ok", value=value)
        return
    built = torch.version.cuda
    remedy = (
        "check the driver with nvidia-smi" if built
        else "on a machine with one, install a CUDA build of torch (see pytorch.org)"
    )  # fmt: skip
    value = f"none that torch {torch.__version__} can use; runs take the CPU"
    yield Finding(group="system", name="GPU", state="optional", value=value, remedy=remedy)


def _data() -> Iterator[Finding]:
    folder = default_folder()
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    writable = nearest.is_dir() and os.access(nearest, os.W_OK)
    yield Finding(
        group="data", name="folder for downloads", state="ok" if writable else "optional",
        value=f"{folder} ({'writable' if writable else 'not writable'})",
        remedy="" if writable else "set SECURE_APFED_DATA to a folder that you may write to",
    )  # fmt: skip
    yield from map(_dataset, DATASETS.values())


def _dataset(dataset: DataSet) -> Finding:
    if not dataset.files:
        return Finding(group="data", name=dataset.name, state="ok", value=dataset.how)
    try:
        places = {file_path(dataset, file, None).parent for file in dataset.files}
    except DataError:
        return Finding(
            group="data", name=dataset.name, state="optional", value="not found",
            remedy=dataset.how,
        )  # fmt: skip
    where = ", ".join(sorted(map(str, places)))
    return Finding(group="data", name=dataset.name, state="ok", value=f"found in {where}")

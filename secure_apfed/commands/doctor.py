"""The command `doctor`: lists installed and missing packages and data, and how to get the missing
ones.
"""

import importlib
import importlib.metadata
import importlib.util
import io
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout

from apfed_protocols.crypten import INSTALL
from apfed_protocols.installing import install_extra, install_requirement
from secure_apfed.base.seeds import usable_cores
from secure_apfed.commands import Finding, State
from secure_apfed.data.catalogue import DATASETS
from secure_apfed.data.files import default_folder, find_dataset_file
from secure_apfed.errors import DataError
from secure_apfed.settings.plugins import ENTRY_POINT_GROUPS, list_installed_plugins

_OLDEST_PYTHON = (3, 11)
# distribution -> (module, what it is for); a run needs these.
_REQUIRED_PACKAGES: Mapping[str, tuple[str, str]] = {
    "torch": ("torch", "networks"),
    "numpy": ("numpy", "arrays"),
    "scipy": ("scipy", "accounting"),
    "tenseal": ("tenseal", "the CKKS sum"),
    "cryptography": ("cryptography", "keys, masks and sealed links"),
    "pynacl": ("nacl", "set intersection by Diffie-Hellman"),
    "gmpy2": ("gmpy2", "set intersection by Diffie-Hellman"),
    "opacus": ("opacus", "a second opinion on epsilon"),
    "pydantic": ("pydantic", "settings"),
    "PyYAML": ("yaml", "config files"),
    "safetensors": ("safetensors", "models and messages"),
    "msgpack": ("msgpack", "messages"),
    "scikit-learn": ("sklearn", "attacks and two data sets"),
    "faiss-cpu": ("faiss", "the nearest of many rows"),
    "pandas": ("pandas", "tables"),
    "pyarrow": ("pyarrow", "Parquet"),
}
# distribution -> (module, what it is for, the extra that brings it); a run does without these.
_OPTIONAL_PACKAGES: Mapping[str, tuple[str, str, str]] = {
    "matplotlib": ("matplotlib", "pictures", "experiments"),
    "jinja2": ("jinja2", "the HTML report", "experiments"),
    "grpcio": ("grpc", "links between machines", "grpc"),
    "sqlalchemy": ("sqlalchemy", "tables by a query of a database", "sql"),
    "dp-accounting": ("dp_accounting", "a third opinion on epsilon", "experiments"),
    "tensorboard": ("tensorboard", "curves while training", "tensorboard"),
}

# Packages of hundreds of modules. Importing them takes twice as long as torch alone.
_SLOW_PACKAGES = frozenset(
    {
        "dp-accounting",
        "matplotlib",
        "opacus",
        "pandas",
        "pyarrow",
        "scikit-learn",
        "sqlalchemy",
        "tensorboard",
    }
)

# Run in a process of its own, since CrypTen changes torch.
_CRYPTEN_SCRIPT = "from apfed_protocols.crypten import load_crypten; load_crypten()"
_CRYPTEN_TIMEOUT_S = 60


def is_healthy(findings: tuple[Finding, ...]) -> bool:
    """Return whether nothing that every run needs is missing; optional parts may be."""
    return all(finding.state != "missing" for finding in findings)


def examine_machine(*, load: bool = False) -> tuple[Finding, ...]:
    """Return the findings about system, packages, GPU, data and plug-ins.

    `load`: import slow packages, too, for errors that only an import shows; else they are only
    looked up.
    """
    return (
        *_check_system(),
        *_check_packages(load_all=load),
        *_check_accelerator(),
        *_check_data(),
        *_list_plugins(),
    )


def _check_system() -> Iterator[Finding]:
    """Yield the Python version, and the machine with its usable cores."""
    state: State = "ok" if sys.version_info >= _OLDEST_PYTHON else "missing"
    remedy = "" if state == "ok" else "install Python {}.{} or newer".format(*_OLDEST_PYTHON)
    yield Finding("system", "python", state, platform.python_version(), remedy)
    count = usable_cores()
    cores = "1 core" if count == 1 else f"{count} cores"
    machine = f"{platform.system()} on {platform.machine()}, {cores} to use"
    yield Finding("system", "machine", "ok", machine)


def _check_packages(*, load_all: bool) -> Iterator[Finding]:
    """Yield whether each required and optional package is installed.

    Packages that are imported fast, and all if `load_all`, are imported, too.
    """
    for name, (module, purpose) in _REQUIRED_PACKAGES.items():
        should_load = load_all or name not in _SLOW_PACKAGES
        remedy = install_requirement(name)
        yield _check_package(name, module, purpose, remedy, "missing", should_load=should_load)
    for name, (module, purpose, extra) in _OPTIONAL_PACKAGES.items():
        should_load = load_all or name not in _SLOW_PACKAGES
        remedy = install_extra(extra)
        yield _check_package(name, module, purpose, remedy, "optional", should_load=should_load)
    yield _check_crypten(should_load=load_all)


def _check_package(
    name: str,
    module: str,
    purpose: str,
    remedy: str,
    state_if_unusable: State,
    *,
    should_load: bool,
) -> Finding:
    """Import or look up a package and return a finding: its version, or why it cannot be used, with
    a remedy.

    Args:
        name: name of the distribution, as package managers know it.
        module: name of its module.
        purpose: what the package is needed for.
        remedy: command that installs it.
        state_if_unusable: state of the finding if it cannot be used.
        should_load: import the module; else only look it up.
    """
    try:
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(f"No module named {module!r}")
        if should_load:
            # Imported for its errors only: a package that is installed may still fail to load.
            _import_quietly(module)
        return Finding("packages", name, "ok", importlib.metadata.version(name))
    except (ImportError, OSError, AttributeError) as error:
        # OSError: a shared library does not load; AttributeError: two packages do not fit.
        reason = str(error).splitlines()[0]
        return Finding("packages", name, state_if_unusable, f"for {purpose}: {reason}", remedy)


def _import_quietly(module: str) -> None:
    """Import a module without its warnings and what it prints."""
    quiet = io.StringIO()
    with warnings.catch_warnings(), redirect_stdout(quiet), redirect_stderr(quiet):
        warnings.simplefilter("ignore")
        importlib.import_module(module)


def _check_crypten(*, should_load: bool) -> Finding:
    """Return a finding on CrypTen: its version, or why it cannot be used.

    `should_load`: import it, too, in a process of its own, since it changes torch.
    """
    try:
        version = importlib.metadata.version("crypten")
        if not should_load:
            return Finding("packages", "crypten", "ok", version)
        subprocess.run(  # noqa: S603 - a fixed program, no input
            [sys.executable, "-c", _CRYPTEN_SCRIPT],
            check=True,
            capture_output=True,
            text=True,
            timeout=_CRYPTEN_TIMEOUT_S,
        )
        return Finding("packages", "crypten", "ok", version)
    except importlib.metadata.PackageNotFoundError:
        problem = "not installed"
    except subprocess.CalledProcessError as error:
        problem = (error.stderr.splitlines() or ["does not load"])[-1]
    except subprocess.TimeoutExpired:
        problem = f"does not load within {_CRYPTEN_TIMEOUT_S} s"
    purpose = "for the sum `crypten` and the intersection `circuit_crypten`"
    return Finding("packages", "crypten", "optional", f"{purpose}: {problem}", INSTALL)


def _check_accelerator() -> Iterator[Finding]:
    """Yield whether torch can use a GPU; nothing if torch cannot be imported."""
    try:
        import torch
    except (ImportError, OSError):
        return  # the check of packages reports it
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        description = f"{', '.join(names)}, CUDA {torch.version.cuda}"
        yield Finding("system", "GPU", "ok", description)
        return
    remedy = (
        "check the driver with nvidia-smi"
        if torch.version.cuda
        else "on a machine with one, install a CUDA build of torch (see pytorch.org)"
    )
    value = f"none that torch {torch.__version__} can use; runs take the CPU"
    yield Finding("system", "GPU", "optional", value, remedy)


def _list_plugins() -> Iterator[Finding]:
    """Yield the plug-ins that installed packages declare; nothing is imported."""
    for kind in ENTRY_POINT_GROUPS:
        for name, code in sorted(list_installed_plugins(kind).items()):
            yield Finding("plug-ins", f"{kind}: {name}", "ok", code)


def _check_data() -> Iterator[Finding]:
    """Yield whether downloads can be stored, and where each built-in data set was found."""
    folder = default_folder()
    # The folder itself may not exist yet: it is made in the nearest parent that does.
    candidates = (folder, *folder.absolute().parents)
    existing_folder = next(path for path in candidates if path.exists())
    if existing_folder.is_dir() and os.access(existing_folder, os.W_OK):
        yield Finding("data", "folder for downloads", "ok", f"{folder} (writable)")
    else:
        remedy = "set SECURE_APFED_DATA to a folder that you may write to"
        missing = f"{folder} (not writable)"
        yield Finding("data", "folder for downloads", "optional", missing, remedy)
    for dataset in DATASETS.values():
        try:
            folders = {find_dataset_file(dataset, file, None).parent for file in dataset.files}
        except DataError:
            yield Finding("data", dataset.name, "optional", "not found", dataset.how)
        else:
            # A data set without files comes with a package; `how` says with which.
            location = (
                f"found in {', '.join(sorted(map(str, folders)))}" if folders else dataset.how
            )
            yield Finding("data", dataset.name, "ok", location)

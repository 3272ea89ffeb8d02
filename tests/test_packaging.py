"""The package as strangers get it: metadata, pins, and the wheel in a clean environment."""

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("protocols", "secure_apfed", "attacks", "experiments")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


# Lock file -> the extras that it pins with all that they need. Those of `make setup` come first;
# `bench` clashes with them, and NVFlare is left out of them for its size.
LOCKS = {
    "requirements.lock": ("mpc", "experiments", "onnx", "search", "grpc", "docs", "dev"),
    "requirements-nvflare.lock": ("nvflare",),
    "requirements-bench.lock": ("bench", "experiments", "mpc"),
}
REPLACED_FOR_BENCH = {"protobuf", "tensorboard"}


def _pin_lines(lock: str) -> list[str]:
    """The lines of a lock file, and of the one that it includes."""
    lines = []
    for line in (ROOT / lock).read_text().splitlines():
        if line.startswith("-c "):
            lines += _pin_lines(line.removeprefix("-c "))
        elif not line.startswith("#"):
            lines.append(line)
    return lines


def _pins(lock: str) -> dict[str, Version]:
    pins = [line.split("==") for line in _pin_lines(lock)]
    return {canonicalize_name(name): Version(version) for name, version in pins}


def _requirements() -> list[tuple[str, Requirement]]:
    extras = PROJECT["optional-dependencies"]
    return [
        (lock, Requirement(line))
        for lock, names in LOCKS.items()
        for group in (PROJECT["dependencies"], *(extras[name] for name in names))
        for line in group
    ]


@pytest.mark.parametrize(
    ("lock", "requirement"),
    [pytest.param(lock, one, id=f"{lock}-{one.name}") for lock, one in _requirements()],
)
def test_pin_satisfies_the_requirement(lock: str, requirement: Requirement) -> None:
    pin = _pins(lock)[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(pin)
    assert requirement.url is None


@pytest.mark.parametrize("lock", LOCKS)
def test_pins_are_releases_of_a_public_index(lock: str) -> None:
    lines = _pin_lines(lock)
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    assert len(_pins(lock)) == len(lines), "a package is pinned twice"
    assert all(pin.local is None for pin in _pins(lock).values()), "a suffix ties torch to a CPU"


def test_an_environment_of_its_own_differs_by_what_it_must() -> None:
    usual, of_bench = _pins("requirements.lock"), _pins("requirements-bench.lock")
    other = {name for name in usual.keys() & of_bench.keys() if usual[name] != of_bench[name]}
    assert other == REPLACED_FOR_BENCH
    assert of_bench.keys() - usual.keys() == {"openmined-psi", "phe"}


def test_the_page_on_installing_names_every_extra_and_its_lock() -> None:
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    told = dict(re.findall(r"^\| `(\w+)` \|.*\| `([\w.-]+)` \|$", page, re.MULTILINE))
    assert told.keys() == PROJECT["optional-dependencies"].keys()
    assert all(extra in LOCKS[lock] for extra, lock in told.items())


def _shipped_sources() -> set[str]:
    """Every file of the four packages, as a path inside the wheel."""
    files = (path for package in PACKAGES for path in (ROOT / package).rglob("*"))
    return {
        path.relative_to(ROOT).as_posix()
        for path in files
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the source distribution, and the wheel out of it; an index would take both."""
    folder = tmp_path_factory.mktemp("dist")
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), cwd=ROOT)
    (source,) = folder.glob("*.tar.gz")
    (built,) = folder.glob("*.whl")
    _run(sys.executable, "-m", "twine", "check", "--strict", str(source), str(built), cwd=folder)
    return built


@pytest.fixture(scope="module")
def clean_bin(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into a new environment that borrows the dependencies of this one."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", str(python), "install")
    _run(*pip, "--no-deps", "--no-index", str(wheel), cwd=folder)
    # Paths in a .pth file are not searched for further .pth files: our editable install stays out.
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin"


def _run(*command: str, cwd: Path) -> str:
    """Run a command without the variables that would let it see this checkout."""
    environment = {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_wheel_ships_every_file_of_the_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (licence,) = (name for name in archive.namelist() if name.endswith("LICENSE"))
        assert b"Apache License" in archive.read(licence)
    assert names == _shipped_sources()
    assert any(name.endswith(".jinja") for name in names)
    assert any(name.endswith(".yaml") for name in names)


@pytest.mark.parametrize("package", PACKAGES)
def test_package_imports_from_another_directory(
    package: str, clean_bin: Path, tmp_path: Path
) -> None:
    program = f"import {package}; print({package}.__file__)"
    where = Path(_run(str(clean_bin / "python"), "-c", program, cwd=tmp_path).strip())
    assert where.is_relative_to(clean_bin.parent)


@pytest.mark.parametrize("arguments", [["--help"], ["doctor", "--help"], ["run", "--help"]])
def test_command_line_answers(arguments: list[str], clean_bin: Path, tmp_path: Path) -> None:
    assert "Usage" in _run(str(clean_bin / "secure-apfed"), *arguments, cwd=tmp_path)

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


def _pins() -> dict[str, Version]:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in pins}


def _requirements() -> list[Requirement]:
    """Return what `make setup` installs; `bench` is not in it, its pins clash with ours."""
    extras = PROJECT["optional-dependencies"]
    groups = [PROJECT["dependencies"], *(extras[name] for name in ("mpc", "experiments", "dev"))]
    return [Requirement(line) for group in groups for line in group]


@pytest.mark.parametrize("requirement", _requirements(), ids=lambda one: one.name)
def test_pin_satisfies_the_requirement(requirement: Requirement) -> None:
    pin = _pins()[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(pin)
    assert requirement.url is None


def test_pins_are_releases_of_a_public_index() -> None:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert [line for line in pins if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    assert all(pin.local is None for pin in _pins().values()), "a build suffix ties torch to a CPU"


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
    """Build the source distribution, and the wheel out of it."""
    folder = tmp_path_factory.mktemp("dist")
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), cwd=ROOT)
    assert len(list(folder.glob("*.tar.gz"))) == 1
    (built,) = folder.glob("*.whl")
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

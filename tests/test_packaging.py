"""The package as strangers get it: metadata, pins, and the wheel in a clean environment."""

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from email.parser import Parser
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.docs.pages import blocks

ROOT = Path(__file__).resolve().parent.parent
# Distribution -> where its project is, and its packages by their folders.
OURS = ("secure_apfed", "attacks/apfed_attacks", "experiments/apfed_experiments")
DISTRIBUTIONS = {
    "apfed_protocols": (ROOT / "protocols", (ROOT / "protocols" / "apfed_protocols",)),
    "secure_apfed": (ROOT, tuple(ROOT / package for package in OURS)),
}
PACKAGES = [folder.name for _, folders in DISTRIBUTIONS.values() for folder in folders]


def _project(of: Path) -> dict[str, Any]:
    return dict(tomllib.loads((of / "pyproject.toml").read_text())["project"])


PROJECT = _project(ROOT)
LIGHT = _project(ROOT / "protocols")


# Lock file -> the extras that it pins with all that they need. Those of `make setup` come first;
# NVFlare is left out of them for its size, Flower for what it wants older releases of.
LOCKS = {
    "requirements.lock": (
        "mpc",
        "experiments",
        "tensorboard",
        "onnx",
        "grpc",
        "sql",
        "images",
        "vision",
        "docs",
        "browser",
        "dev",
    ),
    "requirements-cluster.lock": ("dask", "ray"),
    "requirements-nvflare.lock": ("nvflare", "all"),
    "requirements-flwr.lock": ("flwr",),
}
# What users have beside us, and with which Python; torch 2.6 is the oldest of our range.
BESIDE = [
    *product(("flwr", "nvflare", "mlflow", "opacus", "torch"), ("3.11", "3.14")),
    ("torch==2.6.0", "3.11"),
]


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


def _requirements(lock: str) -> list[Requirement]:
    extras = PROJECT["optional-dependencies"]
    groups = (
        PROJECT["dependencies"],
        LIGHT["dependencies"],
        *LIGHT["optional-dependencies"].values(),
        *(extras[name] for name in LOCKS[lock]),
    )
    ours = (LIGHT["name"], PROJECT["name"])
    return [Requirement(line) for group in groups for line in group if not line.startswith(ours)]


@pytest.mark.parametrize("lock", LOCKS)
def test_pins_satisfy_the_requirements_and_are_releases_of_a_public_index(lock: str) -> None:
    pins = _pins(lock)
    for requirement in _requirements(lock):
        pin = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pin), requirement
        assert requirement.url is None, requirement
    lines = _pin_lines(lock)
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    assert len(pins) == len(lines), "a package is pinned twice"
    assert all(pin.local is None for pin in pins.values()), "a suffix ties torch to a CPU"


def test_the_page_on_installing_names_every_extra_and_its_lock() -> None:
    page = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
    told = dict(re.findall(r"^\| `(\w+)` \|.*\| `([\w.-]+)` \|$", page, re.MULTILINE))
    assert told.keys() == PROJECT["optional-dependencies"].keys()
    assert all(extra in LOCKS[lock] for extra, lock in told.items())


def list_shipped_sources(distribution: str) -> set[str]:
    """List every file of its packages, as a path inside the wheel."""
    _, packages = DISTRIBUTIONS[distribution]
    return {
        path.relative_to(folder.parent).as_posix()
        for folder in packages
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build the source distributions, and wheels out of them; an index would take both."""
    built = {}
    for name, (project, _) in DISTRIBUTIONS.items():
        folder = tmp_path_factory.mktemp(name)
        _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), cwd=project)
        (source,) = folder.glob("*.tar.gz")
        (built[name],) = folder.glob("*.whl")
        check = (sys.executable, "-m", "twine", "check", "--strict")
        _run(*check, str(source), str(built[name]), cwd=folder)
    return built


@pytest.fixture(scope="module")
def clean_bin(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheels into a new environment that borrows the dependencies of this one."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", str(python), "install")
    _run(*pip, "--no-deps", "--no-index", *map(str, wheels.values()), cwd=folder)
    # Paths in a .pth file are not searched for further .pth files: our editable install stays out.
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin"


def _run(*command: str, cwd: Path, configured: bool = True) -> str:
    """Run a command without the variables that would let it see this checkout.

    `configured`: pip reads this machine's settings, such as where it finds packages.
    """
    environment = {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"}
    if not configured:
        environment = {name: environment[name] for name in environment if "PIP_" not in name}
        environment["PIP_CONFIG_FILE"] = os.devnull
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_wheel_ships_every_file_of_the_packages_and_nothing_else(
    distribution: str, wheels: dict[str, Path]
) -> None:
    with zipfile.ZipFile(wheels[distribution]) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (licence,) = (name for name in archive.namelist() if name.endswith("LICENSE"))
        assert b"Apache License" in archive.read(licence)
    assert names == list_shipped_sources(distribution)
    assert f"{distribution}/py.typed" in names


FOLDERS = ("protocols", "attacks", "experiments")
IMPORTS = (
    "from apfed_protocols import *",  # every everyday name
    "from secure_apfed import *",
    f"import {', '.join((*FOLDERS, *PACKAGES))}",
    *(f"print({name}.__file__)" for name in (*FOLDERS, *PACKAGES)),
)
ALL_ATTACKS = "evaluate(**record.to_arrays(), labels=y, own=x)"
"""Half a minute, with which the examples of the README end."""


@pytest.mark.parametrize(
    "evaluated",
    [
        ALL_ATTACKS.replace("own=x", "own=x, attacks='label_gradients'"),
        pytest.param(ALL_ATTACKS, marks=pytest.mark.slow),
    ],
)
def test_packages_and_examples_run_beside_folders_with_the_names_of_ours(
    evaluated: str, clean_bin: Path, tmp_path: Path
) -> None:
    for name in FOLDERS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    examples = "\n".join([*blocks("README.md", "python"), *blocks("protocols/README.md", "python")])
    assert examples.count(ALL_ATTACKS) == 1
    examples = examples.replace(ALL_ATTACKS, evaluated)
    (tmp_path / "example.py").write_text("\n".join([examples, *IMPORTS]))
    printed = _run(str(clean_bin / "python"), "example.py", cwd=tmp_path).split()
    told = printed[-len(FOLDERS) - len(PACKAGES) :]  # after what the README prints
    assert told[: len(FOLDERS)] == [str(tmp_path / name / "__init__.py") for name in FOLDERS]
    assert all(Path(place).is_relative_to(clean_bin.parent) for place in told[len(FOLDERS) :])
    for arguments in (["--help"], ["run", "--help"]):
        assert "Usage" in _run(str(clean_bin / "secure-apfed"), *arguments, cwd=tmp_path)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_metadata_of_a_wheel_says_what_the_project_says(
    distribution: str, wheels: dict[str, Path]
) -> None:
    with zipfile.ZipFile(wheels[distribution]) as archive:
        (place,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        told = Parser().parsestr(archive.read(place).decode())
        entries = [name for name in archive.namelist() if name.endswith("/entry_points.txt")]
        commands = [archive.read(name).decode() for name in entries]
        content = b"".join(map(archive.read, archive.namelist()))
    project = _project(DISTRIBUTIONS[distribution][0])
    assert (told["Name"], told["Version"]) == (project["name"], project["version"])
    assert told["Requires-Python"] == project["requires-python"]
    assert told["License-Expression"] == project["license"]
    assert f'name: "{told["Author"]}"' in (ROOT / "CITATION.cff").read_text("utf-8")
    assert set(told.get_all("Provides-Extra", [])) == {*project["optional-dependencies"]}
    required = {Requirement(line.split(";")[0]) for line in told.get_all("Requires-Dist", [])}
    assert {Requirement(line.split(";")[0]) for line in project["dependencies"]} <= required
    page = (DISTRIBUTIONS[distribution][0] / project["readme"]).read_text("utf-8")
    assert str(told.get_payload()).strip() == page.strip()
    scripts = project.get("scripts", {})
    assert all(f"{name} = {target}" in commands[0] for name, target in scripts.items())
    assert str(ROOT).encode() not in content, "a path of the machine that built it"


CLEAN_PYTHONS = os.environ.get("SECURE_APFED_CLEAN_PYTHONS", "").split()
"""Interpreters, by their paths, in whose new environments all is installed from a wheelhouse."""


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not CLEAN_PYTHONS, reason="SECURE_APFED_CLEAN_PYTHONS names no interpreters")
@pytest.mark.parametrize("python", CLEAN_PYTHONS)
def test_the_wheels_run_the_readme_in_a_clean_environment(
    python: str, wheels: dict[str, Path], tmp_path: Path
) -> None:
    _run(python, "-m", "venv", str(tmp_path / "venv"), cwd=tmp_path)
    fresh = str(tmp_path / "venv" / "bin" / "python")
    pip = (fresh, "-m", "pip", "--disable-pip-version-check")
    pins = ("--only-binary", ":all:", "--constraint", str(ROOT / "requirements.lock"))
    wanted = (str(wheels["apfed_protocols"]), f"{wheels['secure_apfed']}[experiments]")
    house = tmp_path / "wheelhouse"
    _run(*pip, "download", "--quiet", *pins, "--dest", str(house), *wanted, cwd=tmp_path)
    names = ("apfed-protocols", "secure-apfed[experiments]")
    from_house = ("--no-index", "--find-links", str(house))
    _run(*pip, "install", "--quiet", *from_house, *names, cwd=tmp_path, configured=False)
    for number, page in enumerate(("protocols/README.md", "README.md")):
        script = tmp_path / f"page{number}.py"
        script.write_text("\n".join(blocks(page, "python")))
        _run(fresh, "-W", "error::DeprecationWarning:secure_apfed", script.name, cwd=tmp_path)
    for name in PACKAGES:
        place = _run(fresh, "-c", f"import {name}; print({name}.__file__)", cwd=tmp_path)
        assert Path(place.strip()).is_relative_to(tmp_path / "venv")
    version = _run(fresh, "-c", "import secure_apfed as s; print(s.__version__)", cwd=tmp_path)
    assert version.strip() == PROJECT["version"]
    command = str(tmp_path / "venv" / "bin" / "secure-apfed")
    assert "This machine" in _run(command, "doctor", "--load", cwd=tmp_path)


def _resolve(folder: Path, python: str, *requirements: str) -> subprocess.CompletedProcess[str]:
    """Ask the package index which wheels these would be together, by their metadata alone."""
    (folder / "wanted.in").write_text("\n".join(requirements))
    uv = (sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate")
    return subprocess.run(
        (*uv, "--only-binary", ":all:", "--python-version", python, "wanted.in"),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def package_index(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("index")
    _run(sys.executable, "-m", "uv", "--version", cwd=folder)
    asked = _resolve(folder, "3.11", "packaging")
    if asked.returncode:
        pytest.skip(f"no package index answers: {asked.stderr}")


@pytest.mark.slow
@pytest.mark.usefixtures("package_index")
@pytest.mark.parametrize(("other", "python"), BESIDE)
def test_the_wheels_fit_beside_the_release_that_one_would_have_without_them(
    other: str, python: str, wheels: dict[str, Path], tmp_path: Path
) -> None:
    alone = _resolve(tmp_path, python, other)
    beside = _resolve(tmp_path, python, other, *map(str, wheels.values()))
    assert (alone.returncode, beside.returncode) == (0, 0), alone.stderr + beside.stderr
    name = Requirement(other).name
    (release,) = (line for line in alone.stdout.splitlines() if line.startswith(f"{name}=="))
    assert release in beside.stdout.splitlines()

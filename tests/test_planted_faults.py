"""What the suite finds: faults of `tests/planted_faults.py`, planted one at a time in a copy."""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.planted_faults import FAULTS, Fault

_ROOT = Path(__file__).parents[1]
_CODE = ("protocols", "secure_apfed", "attacks", "experiments")
_FAILED = 1  # what pytest returns where tests failed, not where it found or read none
_SECONDS = 240


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The code and its tests elsewhere."""
    there = tmp_path_factory.mktemp("copy")
    for name in (*_CODE, "tests", "docs"):
        ignored = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
        shutil.copytree(_ROOT / name, there / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "mkdocs.yml", "Makefile"):
        shutil.copy(_ROOT / name, there / name)
    return there


def _files(names: Sequence[str], root: Path) -> list[str]:
    found = {name: [*(root / "tests").rglob(name)] for name in names}
    assert all(len(paths) == 1 for paths in found.values()), f"one file each: {found}"
    return [str(paths[0]) for paths in found.values()]


def _run(names: Sequence[str], root: Path, seconds: int) -> subprocess.CompletedProcess[str]:
    """The fast tests of these files in a process of their own, which imports that copy alone."""
    command = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    places = os.pathsep.join(str(root / place) for place in ("", *_CODE))
    return subprocess.run(
        [sys.executable, *command, *_files(names, root)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": places},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


@contextmanager
def plant_fault(fault: Fault, root: Path) -> Iterator[None]:
    place = root / fault.file
    right = place.read_text()
    compiled = Path(importlib.util.cache_from_source(str(place)))
    try:
        place.write_text(right.replace(fault.right, fault.wrong))
        compiled.unlink(missing_ok=True)
        yield
    finally:
        place.write_text(right)
        compiled.unlink(missing_ok=True)


def test_every_fault_quotes_what_stands_in_one_place() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    for fault in FAULTS:
        text = (_ROOT / fault.file).read_text()
        assert text.count(fault.right) == 1, f"{fault.name}: {fault.file} has it otherwise"
        assert fault.wrong != fault.right
        assert fault.tests == tuple(dict.fromkeys(fault.tests))
        _files(fault.tests, _ROOT)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_without_a_fault_the_copys_tests_pass(copy: Path) -> None:
    names = sorted({name for fault in FAULTS for name in fault.tests})
    ended = _run(names, copy, 1800)
    assert ended.returncode == 0, ended.stdout[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault: Fault, copy: Path) -> None:
    with plant_fault(fault, copy):
        ended = _run(fault.tests, copy, _SECONDS)
    assert ended.returncode == _FAILED, f"{fault.breaks} Nobody noticed.\n{ended.stdout[-2000:]}"

"""Runs that several tests compare with, or go on from in a copy."""

import shutil
from pathlib import Path

import pytest

from secure_apfed.exchange import Kind
from tests.local.processes import Harm, Parties, config_of, require_no_failure


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing befell."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    require_no_failure(Parties(config_of(), folder).play())
    return folder


@pytest.fixture(scope="session")
def _stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopped") / "run"
    Parties(config_of(), folder).play({"active": Harm(Kind.REPRESENTATIONS, 13)})
    return folder


@pytest.fixture
def stopped(_stopped: Path, tmp_path: Path) -> Parties:
    """One whose active was killed in its third epoch, when all held steps 3 and 6."""
    return Parties(config_of(), Path(shutil.copytree(_stopped, tmp_path / "stopped")))

"""Run folders are their owner's: no other local user reads what a run leaves."""

import os
import stat
from pathlib import Path

import pytest

from secure_apfed.errors import CheckpointError
from secure_apfed.files import make_private
from secure_apfed.runs.run import run
from tests.secure_apfed.small_runs import interrupted, small_config

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def generous() -> object:
    before = os.umask(0)
    yield
    os.umask(before)


def test_a_run_folder_is_shut_and_an_older_one_when_it_is_resumed(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one"
    interrupted(small_config(), folder, at_step=9)
    assert mode(folder) == 0o700
    folder.chmod(0o755)
    run(small_config(), folder, resume=True)
    assert mode(folder) == 0o700


def test_a_folder_of_other_things_is_not_shut_from_its_users(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o777)
    (shared / "notes.txt").write_text("of all of us")
    with pytest.raises(CheckpointError, match="others may read it, and it holds other files"):
        run(small_config(), shared)
    assert mode(shared) == 0o777
    assert [file.name for file in shared.iterdir()] == ["notes.txt"]
    shared.chmod(0o700)
    make_private(shared)
    (tmp_path / "made").mkdir(mode=0o777)
    make_private(tmp_path / "made")
    assert mode(tmp_path / "made") == 0o700
    with pytest.raises(CheckpointError, match="cannot be a run folder"):
        run(small_config(), shared / "notes.txt")

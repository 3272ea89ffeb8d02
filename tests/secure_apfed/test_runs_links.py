"""Links in a run folder that somebody sent lead nowhere: nothing outside is written or removed."""

from pathlib import Path

import pytest

from experiments.report import write_report
from experiments.trials import finish_trial
from secure_apfed.errors import CheckpointError
from secure_apfed.runs import run
from secure_apfed.runs.folder import own_subfolder
from tests.secure_apfed.small_runs import interrupted, small_config

ONE_EPOCH = {"epochs": 1, "batch_size": 64, "device": "cpu"}


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder of the user's that no run folder holds."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "wedding.png").write_text("precious")
    return folder


def test_a_subfolder_is_made_and_is_no_link_and_no_file(tmp_path: Path, elsewhere: Path) -> None:
    assert own_subfolder(tmp_path / "new").stat().st_mode & 0o077 == 0
    own_subfolder(tmp_path / "new")
    (tmp_path / "link").symlink_to(elsewhere)
    (tmp_path / "nowhere").symlink_to(tmp_path / "absent")
    (tmp_path / "file").touch()
    for name in ("link", "nowhere", "file"):
        with pytest.raises(CheckpointError, match=f"{name} is a link or a file in place"):
            own_subfolder(tmp_path / name)
    assert not (tmp_path / "absent").exists()


def test_a_report_removes_no_pictures_behind_a_link(tmp_path: Path, elsewhere: Path) -> None:
    folder = tmp_path / "sent"
    run(small_config(train=ONE_EPOCH), folder)
    (folder / "pictures").symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="pictures is a link or a file in place"):
        write_report(folder)
    assert [file.name for file in elsewhere.iterdir()] == ["wedding.png"]


def test_a_resumed_run_writes_curves_behind_no_link(tmp_path: Path, elsewhere: Path) -> None:
    folder = tmp_path / "sent"
    interrupted(small_config(), folder, at_step=2)
    for file in (folder / "tensorboard").iterdir():
        file.unlink()
    (folder / "tensorboard").rmdir()
    (folder / "tensorboard").symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="tensorboard is a link or a file in place"):
        run(small_config(), folder, resume=True)
    assert [file.name for file in elsewhere.iterdir()] == ["wedding.png"]


@pytest.mark.parametrize("content", [None, b""])
def test_a_resumed_run_writes_metrics_behind_no_link(content: bytes | None, tmp_path: Path) -> None:
    folder, victim = tmp_path / "sent", tmp_path / "victim"
    interrupted(small_config(), folder, at_step=2)
    if content is not None:
        victim.write_bytes(content)
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    (folder / "metrics.jsonl").symlink_to(victim)
    run(small_config(), folder, resume=True)
    assert (victim.read_bytes() if victim.exists() else None) == content
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 4


def test_a_run_of_a_study_lies_in_its_folder(tmp_path: Path, elsewhere: Path) -> None:
    (tmp_path / "test").symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="test is a link or a file in place"):
        finish_trial(small_config(train=ONE_EPOCH), tmp_path / "test")
    assert [file.name for file in elsewhere.iterdir()] == ["wedding.png"]

"""Links in a run folder that somebody sent lead nowhere: nothing outside is written or removed."""

import os
from pathlib import Path

import pytest

from apfed_experiments.report import write_report
from apfed_experiments.study import Point, finish
from secure_apfed.data import load_data
from secure_apfed.errors import CheckpointError, ConfigError
from secure_apfed.files import own_subfolder
from secure_apfed.methods import Start, fresh_secrets
from secure_apfed.methods.sum_end import Allowance
from secure_apfed.runs.folder import RunFolder
from secure_apfed.runs.run import run
from tests.secure_apfed.seats import contract
from tests.secure_apfed.single_steps import own_of
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


def test_a_resumed_run_writes_metrics_behind_no_link(tmp_path: Path) -> None:
    folder, victim = tmp_path / "sent", tmp_path / "victim"
    interrupted(small_config(), folder, at_step=2)
    victim.write_bytes(b"")
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    (folder / "metrics.jsonl").symlink_to(victim)
    run(small_config(), folder, resume=True)
    assert victim.read_bytes() == b""
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 4


def test_a_run_of_a_study_lies_in_its_folder(tmp_path: Path, elsewhere: Path) -> None:
    (tmp_path / "test-seed0").symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="test-seed0 is a link or a file in place"):
        finish(Point(config=small_config(train=ONE_EPOCH), folder=tmp_path).trial(0))
    assert [file.name for file in elsewhere.iterdir()] == ["wedding.png"]


@pytest.mark.parametrize("kind", ["link", "nowhere", "pipe", "folder"])
def test_the_lock_is_a_plain_file(kind: str, tmp_path: Path, elsewhere: Path) -> None:
    folder = tmp_path / "sent"
    folder.mkdir(mode=0o700)
    lock, precious = folder / ".lock", elsewhere / "wedding.png"
    if kind == "pipe":
        os.mkfifo(lock)
    elif kind == "folder":
        lock.mkdir()
    else:
        lock.symlink_to(precious if kind == "link" else elsewhere / "absent")
    with pytest.raises(CheckpointError, match=r"\.lock"):
        run(small_config(train=ONE_EPOCH), folder)
    assert precious.read_text() == "precious"
    assert not (elsewhere / "absent").exists()


@pytest.mark.parametrize(
    "name", ["ledger-active.jsonl", "answers-passive-1.jsonl", "labels-active.log"]
)
def test_a_folder_in_place_of_a_log_is_named(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "sent"
    folder.mkdir(mode=0o700)
    party = folder / "parties" / name.partition(".")[0].partition("-")[2]
    (folder / "parties").mkdir()
    party.mkdir(mode=0o700)
    (party / name).mkdir()
    with pytest.raises(CheckpointError, match=f"{name} lies in the place of a log"):
        run(small_config(train=ONE_EPOCH), folder)


def test_no_name_of_a_passive_reaches_another_file(tmp_path: Path) -> None:
    config = small_config()
    folder = tmp_path / "run"
    secrets = {name: fresh_secrets(config, name, logs=folder) for name in ("shop", "../shop")}
    start = Start(config=config, data=load_data(config.data, seed=0), secrets=secrets)
    Allowance.of(own_of(start, "shop"), contract(), aligned=3)
    assert (folder / "answers-shop.jsonl").exists()
    with pytest.raises(ConfigError, match="no file of"):
        Allowance.of(own_of(start, "../shop"), contract(), aligned=3)
    with pytest.raises(ConfigError, match="no file of"):
        RunFolder(folder).party("../shop")

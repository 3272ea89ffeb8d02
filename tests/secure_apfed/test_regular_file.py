"""A file that is written over sessions is this file: no link, no pipe, no folder."""

import errno
import os
import stat
from pathlib import Path

import pytest

from secure_apfed.errors import CheckpointError
from secure_apfed.files import open_regular, write_atomically


def test_a_file_is_made_for_its_owner_and_written_at_its_end(tmp_path: Path) -> None:
    for text in (b"one", b"two"):
        with os.fdopen(open_regular(tmp_path / "x", create=True), "ab") as file:
            file.write(text)
    assert (tmp_path / "x").read_bytes() == b"onetwo"
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) & 0o077 == 0


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "absent")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name, message in (("link", "symbolic link"), ("pipe", "regular"), ("folder", "regular")):
        with pytest.raises(CheckpointError, match=message):
            open_regular(tmp_path / name, create=True)
    with pytest.raises(CheckpointError, match="is gone"):
        open_regular(tmp_path / "absent", create=False)
    assert not (tmp_path / "absent").exists()


def test_folders_above_may_be_links(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "way").symlink_to(tmp_path / "folder")
    os.close(open_regular(tmp_path / "way" / "x", create=True))
    assert (tmp_path / "folder" / "x").is_file()


def test_a_full_disk_leaves_what_was_there_and_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "checkpoint.bin"
    write_atomically(path, b"before")

    def full(_handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*checkpoint\.bin'"):
        write_atomically(path, b"after")
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [(path.name, b"before")]

"""Files kept over sessions, behind no link; and CSV for spreadsheets, without a formula."""

import csv
import errno
import io
import os
import stat
from itertools import product
from pathlib import Path

import pandas as pd
import pytest
import torch

from secure_apfed.errors import CheckpointError
from secure_apfed.files import cell, open_regular, to_csv, write_atomically
from secure_apfed.runs.solo import Compared, Predicted

FORMULAS = (
    "=1+1", "+1+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "=", "-", "+", "@",
    "-inf", "-1,5", "+49 30 1", "--1", "-0x1", "-1_000",
    "\uff1d1", "\uff0b1", "\uff0d1", "\uff20x", "-\uff11",
)  # fmt: skip


def test_a_file_is_made_for_its_owner_and_written_at_its_end(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "way").symlink_to(tmp_path / "folder")  # folders above may be links
    for text in (b"one", b"two"):
        with os.fdopen(open_regular(tmp_path / "way" / "x", create=True), "ab") as file:
            file.write(text)
    made = tmp_path / "folder" / "x"
    assert made.read_bytes() == b"onetwo"
    assert stat.S_IMODE(made.stat().st_mode) & 0o077 == 0


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


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint.bin"
    write_atomically(path, b"before")

    def full(_handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*checkpoint\.bin'"):
        write_atomically(path, b"after")
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [(path.name, b"before")]


def test_what_begins_a_formula_stands_behind_an_apostrophe() -> None:
    assert [cell(text) for text in FORMULAS] == [f"'{text}" for text in FORMULAS]
    assert cell("  =1") == "  '=1"
    usual = ("", "a", "a=1", "-1", "-1.5", "+2", "-.5", "-1e-9", "'=1", " x", -1.5, -3, None, True,
             "a = b; c - d")  # fmt: skip
    assert [cell(value) for value in usual] == [*usual]


def test_no_cell_begins_a_formula_where_a_spreadsheet_splits_elsewhere() -> None:
    """Where a comma is the decimal mark a semicolon separates, and quotes within do not help."""
    for separator, before in product((";", "\t", "\r", "\n", "; ", ';"', "x\t;"), ("", 'x"', "-1")):
        text = f"{before}{separator}="
        frame = pd.DataFrame({"a": ["y"], f"{text}A": [f"{text}1+1"]})
        for split in (",", ";", "\t"):
            for row in csv.reader(io.StringIO(to_csv(frame), newline=""), delimiter=split):
                assert not [value for value in row if value.lstrip().startswith(("=", "-"))], text


def test_a_long_text_takes_no_time() -> None:
    blank = "\n" * 1_000_000
    assert cell(blank) == blank
    assert cell(f"{blank}=") == f"{blank}'="


def test_names_of_columns_and_predictions_are_cells_too(tmp_path: Path) -> None:
    frame = pd.DataFrame({"=a": [-1.5, 2.0], "b": ["=1", "x,\n=y"]})
    lines = list(csv.reader(io.StringIO(to_csv(frame))))
    assert lines == [["'=a", "b"], ["-1.5", "'=1"], ["2.0", "x,\n'=y"]]
    told = Predicted(
        ids=("=HYPERLINK(1)", "-7"),
        classes=("@late", "paid"),
        what="probabilities",
        outputs=torch.tensor([[0.75, 0.25], [0.25, 0.75]]),
        decided=torch.tensor([0, 1]),
        compared=Compared(rows=2),
    )
    told.write(tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [
            ["id", "class", "p(@late)", "p(paid)"],
            ["'=HYPERLINK(1)", "'@late", "0.75", "0.25"],
            ["-7", "paid", "0.25", "0.75"],
        ]
    told.write(tmp_path / "out.json")
    assert pd.read_json(tmp_path / "out.json")["id"].tolist()[0] == "=HYPERLINK(1)"

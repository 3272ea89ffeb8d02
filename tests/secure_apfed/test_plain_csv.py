"""CSV that people open in a spreadsheet: texts from tables are never formulas there."""

import csv
import io
from pathlib import Path

import pandas as pd
import pytest
import torch

from secure_apfed.files import cell, to_csv
from secure_apfed.runs.solo import Compared, Predictions

FORMULAS = (
    "=1+1", "+1+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "=", "-", "+", "@",
    "-inf", "-1,5", "+49 30 1", "--1", "-0x1", "-1_000",
    "\uff1d1", "\uff0b1", "\uff0d1", "\uff20x", "-\uff11",
)  # fmt: skip


@pytest.mark.parametrize("text", FORMULAS)
def test_what_begins_a_formula_stands_behind_an_apostrophe(text: str) -> None:
    assert cell(text) == f"'{text}"


@pytest.mark.parametrize("separator", [";", "\t", "\r", "\n", "; ", ';"', "\n\n", "x\t;"])
@pytest.mark.parametrize("before", ["", "x", '"x', "-1"])
def test_no_cell_begins_a_formula_where_a_spreadsheet_splits_elsewhere(
    separator: str, before: str
) -> None:
    """Where a comma is the decimal mark a semicolon separates, and quotes within do not help."""
    frame = pd.DataFrame({"a": ["y"], f"{before}{separator}=A": [f"{before}{separator}=1+1"]})
    for split in (",", ";", "\t"):
        for row in csv.reader(io.StringIO(to_csv(frame), newline=""), delimiter=split):
            assert not [value for value in row if value.lstrip().startswith(("=", "-"))]


def test_spaces_before_a_formula_do_not_hide_it() -> None:
    assert cell("  =1") == "  '=1"
    assert cell("a = b; c - d") == "a = b; c - d"


def test_a_long_text_takes_no_time() -> None:
    blank = "\n" * 1_000_000
    assert cell(blank) == blank
    assert cell(f"{blank}=") == f"{blank}'="


@pytest.mark.parametrize(
    "value", ["", "a", "a=1", "-1", "-1.5", "+2", "-.5", "-1e-9", "'=1", " x", -1.5, -3, None, True]
)
def test_numbers_and_other_texts_stay(value: object) -> None:
    assert cell(value) == value


def test_names_of_columns_are_cells_too() -> None:
    frame = pd.DataFrame({"=a": [-1.5, 2.0], "b": ["=1", "x,\n=y"]})
    lines = list(csv.reader(io.StringIO(to_csv(frame))))
    assert lines == [["'=a", "b"], ["-1.5", "'=1"], ["2.0", "x,\n'=y"]]


def test_predictions_are_no_formulas(tmp_path: Path) -> None:
    told = Predictions(
        ids=("=HYPERLINK(1)", "-7"),
        classes=("@late", "paid"),
        probabilities=torch.tensor([[0.75, 0.25], [0.25, 0.75]]),
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

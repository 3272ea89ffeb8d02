"""The dry check of IDs tells counts and rows, and never an ID."""

import json
from pathlib import Path

import pytest

from apfed_protocols import IdNormalisation
from secure_apfed.alignment.ids import IdFile, check_normalisation
from secure_apfed.cli import execute

WRITTEN = ("007", "7", "Ann", "ann ", "31.1.2026", "2026-01-31", "bob")


def file_of(folder: Path, name: str = "bank.csv") -> Path:
    path = folder / name
    rows = [f"{one},{row},{'yes' if row % 2 else 'no'}" for row, one in enumerate(WRITTEN)]
    path.write_text("\n".join(["id,amount,late", *rows, ""]))
    return path


def test_each_rule_is_counted_by_itself(tmp_path: Path) -> None:
    rules = IdNormalisation(case_fold=True, whole_numbers=True, date_formats=("%d.%m.%Y",))
    # What pyarrow reads is stripped cell by cell, so no blank is left for the rule.
    found = check_normalisation("bank", IdFile("bank", file_of(tmp_path), "id"), rules)
    assert found.rows == len(WRITTEN)
    assert found.by_rule == {
        "unicode_nfc": 0, "strip": 0, "case_fold": 1, "whole_numbers": 1, "date_formats": 1,
    }  # fmt: skip
    assert (found.changed, found.first) == (3, (0, 2, 4))
    assert (found.repeated, found.pairs) == (3, ((1, 0), (3, 2), (5, 4)))
    assert found.repeated_as_written == 0


def test_without_rules_nothing_changes(tmp_path: Path) -> None:
    found = check_normalisation("bank", IdFile("bank", file_of(tmp_path), "id"), IdNormalisation())
    assert (found.changed, found.repeated) == (0, 0)
    assert found.agreed == ("unicode_nfc", "strip")


def run_yaml(folder: Path) -> Path:
    path = folder / "run.yaml"
    path.write_text(
        f"""
name: late
method: votes
guard: {{mechanism: none}}
model: {{network: random_features}}
train: {{epochs: 1}}
alignment: {{normalisation: [unicode_nfc, strip, case_fold, whole_numbers]}}
data:
  dataset: tables
  folder: {folder}
  active: bank
  id_column: id
  label_column: late
  parties:
    bank: {{file: bank.csv}}
    shop: {{file: shop.csv}}
"""
    )
    return path


def test_the_command_tells_counts_and_never_an_id(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file_of(tmp_path)  # the shop's file lies elsewhere
    assert execute(["check-ids", str(run_yaml(tmp_path)), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["party"] for one in told["parties"]] == ["bank"]
    assert told["parties"][0]["repeated"] == 2
    assert execute(["check-ids", str(run_yaml(tmp_path))]) == 0
    shown = capsys.readouterr().out
    assert "2 are equal to an earlier one then (0 as they are written)" in shown
    assert not [one for one in WRITTEN[2:4] if one.strip() in shown]


@pytest.mark.parametrize(
    ("party", "said", "code"),
    [("shop", "there is no file", 3), ("club", "check-ids: club has IDs to check", 2)],
)
def test_whose_ids_are_not_here_is_told(
    party: str, said: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file_of(tmp_path)
    assert execute(["check-ids", str(run_yaml(tmp_path)), "--party", party]) == code
    assert said in " ".join(capsys.readouterr().err.split())

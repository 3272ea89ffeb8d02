"""The tables of what an active reads: their form, and that sessions are what they say."""

import json
import math
from pathlib import Path

import pytest
import torch
import typer

from attacks.live.unprotected import ALL_RULES
from experiments.intervals import Interval
from experiments.leaks import __main__ as command
from experiments.leaks.__main__ import PARTS, as_markdown, main, play
from experiments.leaks.sessions import (
    UNPROTECTED,
    Row,
    centred_cosine,
    live_config,
    over_seeds,
    sum_for,
)

DOCS = Path(__file__).parents[2] / "docs"


def test_columns_are_those_that_occur_and_gaps_stay_empty() -> None:
    table = as_markdown([{"a": 1, "b": 0.12345}, {"a": None, "c": "x"}])
    assert table.splitlines() == [
        "| a | b | c |", "| --- | --- | --- |", "| 1 | 0.123 |  |", "|  |  | x |",
    ]  # fmt: skip


def test_an_unknown_part_is_named() -> None:
    with pytest.raises(
        typer.BadParameter, match="no part is called 'nothing'; there are inversion"
    ):
        main(only="nothing")


def test_a_part_that_is_played_again_replaces_its_rows_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"r2": Interval(0.5, 0.4, 0.6), "epsilon": math.inf}]
    monkeypatch.setattr(
        command, "PARTS", {"noise": lambda: iter(rows), "decoder": lambda: iter([])}
    )
    path = tmp_path / "leaks.json"
    path.write_text('{"decoder": [{"r2": 1}], "noise": [{"r2": 2}]}')
    play(["noise"], path)
    assert json.loads(path.read_bytes()) == {
        "noise": [{"r2": {"mean": 0.5, "low": 0.4, "high": 0.6}, "epsilon": "inf"}],
        "decoder": [{"r2": 1}],
    }


@pytest.mark.parametrize("content", ["[1]", "no JSON", '{"nothing": []}'])
def test_figures_are_stored_in_no_file_of_something_else(content: str, tmp_path: Path) -> None:
    path = tmp_path / "leaks.json"
    path.write_text(content)
    with pytest.raises(typer.BadParameter, match=r"leaks\.json"):
        play(["a part that would be missed if it were played"], path)
    assert path.read_text() == content


def test_a_folder_that_is_missing_is_told_before_anything_is_played(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="there is no folder"):
        play(["a part that would be missed"], tmp_path / "nowhere" / "leaks.json")


def test_the_stored_figures_are_of_every_part() -> None:
    stored = json.loads((DOCS / "leaks.json").read_bytes())
    assert set(stored) == set(PARTS)
    assert all(rows for rows in stored.values())


def test_rules_decide_which_sum_protects() -> None:
    assert sum_for("digits", "apfed_r", 3, UNPROTECTED).secure_sum.clip is None
    protected = sum_for("digits", "apfed_r", 3, ALL_RULES).secure_sum
    assert (protected.name, protected.clip) == ("plain + pairwise masks", 1.0)
    assert live_config("digits", "apfed_c", projection=16).model.projection == 16


def test_a_common_mean_is_no_agreement() -> None:
    draw = torch.Generator().manual_seed(0)
    one, other = torch.randn(2, 200, 8, generator=draw)
    assert abs(centred_cosine(one + 50, other + 50)) < 0.1
    assert centred_cosine(one + 50, one - 3) == pytest.approx(1, abs=1e-4)


def test_numbers_become_means_and_what_was_run_stays() -> None:
    rows = [{"data": "d", "M": 2, "r2": 0.5, "n": 3}, {"data": "d", "M": 2, "r2": 0.7, "n": 3}]
    merged = over_seeds(rows, same=("data", "M"))
    assert (merged["data"], merged["M"]) == ("d", 2)
    assert math.isclose(merged["r2"].mean, 0.6)
    assert (merged["r2"].low, merged["r2"].high) == (0.5, 0.7)
    assert merged["n"] == Interval(3.0, 3.0, 3.0)


def test_texts_are_listed_once_and_what_a_seed_lacks_takes_no_part() -> None:
    rows: list[Row] = [{"best": "ridge", "r2": None}, {"best": "mlp", "r2": 0.5}, {"best": "ridge"}]
    merged = over_seeds(rows, same=())
    assert merged["best"] == "ridge / mlp"
    assert merged["r2"].mean == 0.5
    assert math.isnan(merged["r2"].low)


def test_a_number_that_no_seed_has_is_left_out() -> None:
    assert over_seeds([{"epsilon": None}, {"epsilon": None}], same=()) == {}


def test_one_seed_is_returned_as_it_is() -> None:
    assert over_seeds([{"a": 1.5, "b": "x"}], same=("b",)) == {"a": 1.5, "b": "x"}

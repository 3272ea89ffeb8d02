"""The tables of what an active reads: their form, and that sessions are what they say."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from apfed_attacks.live.runs import ALL_RULES
from apfed_attacks.run import prepare
from apfed_experiments import leaks as parts
from apfed_experiments.leaks import PARTS, play
from apfed_experiments.leaks.live import UNPROTECTED, Setting, centred_cosine, live_config, sum_for
from apfed_experiments.leaks.recorded import CASES, config_of, papers
from apfed_experiments.summary import Interval, Row
from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.config import AttackChoice
from secure_apfed.errors import ConfigError
from secure_apfed.secure_sums import sum_kind

DOCS = Path(__file__).parents[2] / "docs"


def test_a_part_that_is_played_again_replaces_its_rows_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [_setting({"r2": 0.4}, {"r2": 0.6}, epsilon=math.inf)]
    monkeypatch.setattr(parts, "PARTS", {"noise": lambda: iter(lines), "decoder": lambda: iter([])})
    path = tmp_path / "leaks.json"
    path.write_text('{"decoder": [{"r2": 1}], "noise": [{"r2": 2}]}')
    play(["noise"], path)
    assert json.loads(path.read_bytes()) == {
        "noise": [{"r2": asdict(Interval.of([0.4, 0.6])), "epsilon": "inf"}],
        "decoder": [{"r2": 1}],
    }


@pytest.mark.parametrize("content", ["[1]", "no JSON", '{"nothing": []}'])
def test_figures_are_stored_in_no_file_of_something_else(content: str, tmp_path: Path) -> None:
    path = tmp_path / "leaks.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"leaks\.json"):
        play(["a part that would be missed if it were played"], path)
    assert path.read_text() == content
    with pytest.raises(ConfigError, match="there is no folder"):
        play(["a part that would be missed"], tmp_path / "nowhere" / "leaks.json")


def test_the_stored_figures_are_of_every_part() -> None:
    stored = json.loads((DOCS / "leaks.json").read_bytes())
    assert set(stored) == set(PARTS)
    assert all(rows for rows in stored.values())


def test_rules_decide_which_sum_protects() -> None:
    assert sum_for("digits", "apfed_r", 3, UNPROTECTED).secure_sum.clip is None
    protected = sum_for("digits", "apfed_r", 3, ALL_RULES).secure_sum
    assert (sum_kind(protected).name, protected.clip) == ("plain + pairwise masks", 1.0)
    assert live_config("digits", "apfed_c", projection=16).model.projection == 16


def test_a_common_mean_is_no_agreement() -> None:
    draw = torch.Generator().manual_seed(0)
    one, other = torch.randn(2, 200, 8, generator=draw)
    assert abs(centred_cosine(one + 50, other + 50)) < 0.1
    assert centred_cosine(one + 50, one - 3) == pytest.approx(1, abs=1e-4)


def _setting(*rows: Row, ends: tuple[str, ...] = (), **columns: Any) -> Setting:
    """That measured these rows, one for each seed."""
    return Setting(columns=columns, measure=rows.__getitem__, seeds=range(len(rows)), ends=ends)


def test_numbers_become_means_and_what_was_run_stays() -> None:
    merged = _setting({"r2": 0.5, "n": 3}, {"r2": 0.7, "n": 3}, ends=("r2",), data="d", M=2).line()
    assert list(merged) == ["data", "M", "r2", "least r2", "greatest r2", "n"]
    assert (merged["data"], merged["M"]) == ("d", 2)
    assert math.isclose(merged["r2"].mean, 0.6)
    assert merged["r2"] == Interval.of([0.5, 0.7])
    assert (merged["least r2"], merged["greatest r2"]) == (0.5, 0.7)
    assert merged["n"] == Interval(3.0, 3.0, 3.0)


def test_texts_are_listed_once_and_what_a_seed_lacks_takes_no_part() -> None:
    merged = _setting({"best": "ridge", "r2": None}, {"best": "mlp", "r2": 0.5}, {"best": "ridge"})
    assert merged.line()["best"] == "ridge / mlp"
    assert merged.line()["r2"].mean == 0.5
    assert math.isnan(merged.line()["r2"].low)
    assert _setting({"epsilon": None}, {"epsilon": None}).line() == {}
    assert _setting({"a": 1.5, "n": 2}, b="x").line() == {"b": "x", "a": 1.5, "n": 2}


def test_a_refusal_is_a_figure() -> None:
    def refused(seed: int) -> Row:
        raise RemoteProtocolError("near-constant batch")

    assert Setting(columns={"M": 1}, measure=refused).line() == {
        "M": 1, "refused": "near-constant batch",
    }  # fmt: skip


def test_every_method_of_the_papers_is_attacked() -> None:
    methods = {
        "split_nn", "split_nn_sum", "apc_vfl", "vfedtrans", "mmvfl", "v_fedmv", "h_fedmv",
        "s_fedmv",
    }  # fmt: skip
    assert {case.method for case in CASES} == methods
    assert all(case.attacks for case in CASES)


def test_cases_are_runs_and_attacks_that_there_are() -> None:
    for case in CASES:
        config = config_of(case, 1)
        assert (config.method.name, config.seed, config.transcript.keep) == (case.method, 1, "all")
        for name, options in case.attacks:
            prepare(AttackChoice(name=name, options=dict(options)))


def test_the_stored_lines_are_those_that_are_played() -> None:
    stored = json.loads((DOCS / "leaks.json").read_bytes())["papers"]
    for row, setting in zip(stored, papers(), strict=True):
        assert {name: row[name] for name in setting.columns} == setting.columns
        assert "advantage" in row

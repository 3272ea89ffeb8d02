"""The tables of what is read: their form, and that sessions and ballots are real."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from apfed_attacks.live.runs import ALL_RULES
from apfed_attacks.table import prepare_attack
from apfed_experiments import leaks as parts
from apfed_experiments.leaks import LIST_ROWS_BY_PART, declare_study, live
from apfed_experiments.leaks.recorded import CASES, list_paper_rows, make_paper_config
from apfed_experiments.leaks.votes import (
    list_chosen_label_rows,
    list_poisoned_vote_rows,
    list_repeated_vote_rows,
)
from apfed_experiments.runner import run_study
from apfed_experiments.summary import Interval, Row
from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.config import AttackChoice
from secure_apfed.errors import ConfigError
from secure_apfed.exchange.secure_sums import find_sum_class

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
STORED = json.loads((Path(__file__).parents[2] / "docs" / "leaks.json").read_bytes())


def _setting(*rows: Row, ends: tuple[str, ...] = (), **columns: Any) -> live.MeasuredRow:
    """That measured these rows, one for each seed."""
    return live.MeasuredRow(
        fixed_values=columns,
        measure=rows.__getitem__,
        seeds=range(len(rows)),
        names_with_extremes=ends,
    )


def test_a_part_that_is_played_again_replaces_its_rows_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [_setting({"r2": 0.4}, {"r2": 0.6}, epsilon=math.inf)]
    monkeypatch.setattr(
        parts, "LIST_ROWS_BY_PART", {"noise": lambda: iter(lines), "decoder": lambda: iter([])}
    )
    path = tmp_path / "leaks.json"
    path.write_text('{"decoder": [{"r2": 1}], "noise": [{"r2": 2}]}')
    (part,) = run_study(declare_study(["noise"], path)).parts
    assert (part.name, part.table.export_rows()[0]["epsilon"]) == ("noise", math.inf)
    assert json.loads(path.read_bytes()) == {
        "noise": [{"r2": asdict(Interval.from_values([0.4, 0.6])), "epsilon": "inf"}],
        "decoder": [{"r2": 1}],
    }


@pytest.mark.parametrize("content", ["[1]", "no JSON", '{"nothing": []}'])
def test_figures_are_stored_in_no_file_of_something_else(tmp_path: Path, content: str) -> None:
    path = tmp_path / "leaks.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"leaks\.json"):
        run_study(declare_study(["a part that would be missed if it were played"], path))
    assert path.read_text() == content


def test_figures_are_stored_in_a_folder_that_there_is(tmp_path: Path) -> None:
    study = declare_study(["a part that would be missed"], tmp_path / "nowhere" / "leaks.json")
    with pytest.raises(ConfigError, match="there is no folder"):
        run_study(study)


def test_numbers_become_means_and_texts_are_listed_once() -> None:
    merged = _setting(
        {"r2": 0.5, "n": 3}, {"r2": 0.7, "n": 3}, ends=("r2",), data="d", M=2
    ).measure_row()
    assert list(merged) == ["data", "M", "r2", "least r2", "greatest r2", "n"]
    assert (merged["data"], merged["M"]) == ("d", 2)
    assert merged["r2"] == Interval.from_values([0.5, 0.7])
    assert (merged["least r2"], merged["greatest r2"]) == (0.5, 0.7)
    merged = _setting(
        {"best": "a", "r2": None}, {"best": "b", "r2": 0.5}, {"best": "a"}
    ).measure_row()
    assert (merged["best"], merged["r2"].mean) == ("a / b", 0.5)
    assert math.isnan(merged["r2"].low)
    assert _setting({"a": 1.5, "n": 2}, b="x").measure_row() == {"b": "x", "a": 1.5, "n": 2}


def test_a_refusal_is_a_figure() -> None:
    def refuse_seed(seed: int) -> Row:
        raise RemoteProtocolError("near-constant batch")

    line = live.MeasuredRow(fixed_values={"M": 1}, measure=refuse_seed).measure_row()
    assert line == {"M": 1, "refused": "near-constant batch"}


def test_rules_decide_which_sum_protects() -> None:
    assert live.make_sum_config("digits", "apfed_r", 3, live.NO_RULES).secure_sum.clip is None
    protected = live.make_sum_config("digits", "apfed_r", 3, ALL_RULES).secure_sum
    assert (find_sum_class(protected).name, protected.clip) == ("plain + pairwise masks", 1.0)
    assert live.make_live_config("digits", "apfed_c", projection=16).model.projection == 16


def test_a_common_mean_is_no_agreement() -> None:
    draw = torch.Generator().manual_seed(0)
    one, other = torch.randn(2, 200, 8, generator=draw)
    assert abs(live.compute_centred_cosine(one + 50, other + 50)) < 0.1
    assert live.compute_centred_cosine(one + 50, one - 3) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.method)
def test_cases_of_the_papers_are_runs_and_attacks_that_there_are(case: Any) -> None:
    config = make_paper_config(case, 1)
    assert (config.method.name, config.seed, config.transcript.keep) == (case.method, 1, "all")
    assert case.attacks
    for name, options in case.attacks:
        prepare_attack(AttackChoice(name=name, options=dict(options)))


def test_the_stored_figures_are_of_what_is_played() -> None:
    assert set(STORED) == set(LIST_ROWS_BY_PART)
    assert all(STORED.values())
    rows = STORED["papers"]
    played = [setting.fixed_values for setting in list_paper_rows()]
    stored = [{name: row[name] for name in of} for row, of in zip(rows, played, strict=True)]
    assert stored == played
    assert [row for row in rows if "advantage" not in row] == []


def measure_line(table: Callable[[], Iterator[live.MeasuredRow]], **columns: Any) -> Row:
    """The figures of seed 0 in the line that these columns name, of breast cancer unless said."""
    wanted = {"data": "breast_cancer", **columns}
    (line,) = (setting for setting in table() if wanted.items() <= setting.fixed_values.items())
    return line.measure(0)


@pytest.mark.slow
def test_chosen_labels_name_the_nearest_of_passives_until_noise_hides_them() -> None:
    clear, noisy = (
        measure_line(list_chosen_label_rows, data="digits", opened="sum", epsilon=epsilon, runs=1)
        for epsilon in (None, 4.0)
    )
    assert clear["found"] > clear["baseline"] + 0.1
    assert noisy["found"] < noisy["baseline"]
    assert clear["baseline"] == noisy["baseline"]  # the same person is asked about


def test_new_runs_read_more_and_spend_more() -> None:
    once, often = (
        measure_line(list_repeated_vote_rows, opened="each", epsilon=1.0, runs=runs)
        for runs in (1, 4)
    )
    assert often["class read"] > once["class read"] + 0.05
    assert (once["epsilon spent"], often["epsilon spent"]) == (1.0, 4.0)


def test_an_honest_passive_changes_nothing() -> None:
    row = measure_line(list_poisoned_vote_rows, opened="each", adversary="none")
    assert row["change"] == 0
    assert row["its agreement"] > 0.5
    assert (
        measure_line(list_poisoned_vote_rows, opened="each", adversary="rotate")["its agreement"]
        < 0.5
    )

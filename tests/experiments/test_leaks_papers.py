"""The table of the methods of the papers: what it plays, and that its figures are of that."""

import json
from pathlib import Path

from apfed_attacks.run import prepare
from apfed_experiments.leaks.recorded import CASES, config_of, papers
from secure_apfed.config import AttackChoice

STORED = Path(__file__).parents[2] / "docs" / "leaks.json"


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
    stored = json.loads(STORED.read_bytes())["papers"]
    for row, setting in zip(stored, papers(), strict=True):
        assert {name: row[name] for name in setting.columns} == setting.columns
        assert "advantage" in row

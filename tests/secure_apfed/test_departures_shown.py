"""Settings that protect less stay visible: in the result, the status and the report of a run."""

import json
from pathlib import Path

import pytest

from apfed_experiments.report.contents import list_weakened_settings
from apfed_experiments.report.run import load_run
from secure_apfed.exchange import StatusTracker
from secure_apfed.organisations import project
from secure_apfed.runs.run import run
from secure_apfed.runs.weakened_settings import (
    describe_shared_organisations,
    describe_weakened_settings,
)
from secure_apfed.settings.promises import Promise
from tests.links.test_project import OTHERS, Organisations
from tests.secure_apfed.small_runs import small_config


class _Meter:
    charges = 0
    promise = Promise(figure="epsilon_x", epsilon=None, why="no session began yet")


@pytest.mark.parametrize(("rows", "said"), [(1, True), (2, False)])
def test_a_departure_stands_in_result_status_and_report(
    rows: int, said: bool, tmp_path: Path
) -> None:
    config = small_config(
        "single_view", train={"epochs": 1, "batch_size": 64}, alignment={"minimum_rows": rows}
    )
    run(config, tmp_path / "run")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    status = StatusTracker()
    status.start_session(
        "bank", ["shop"], _Meter(), less_protected=describe_weakened_settings(config)
    )
    surfaces = (
        result["less_protected"],
        status.build_status().less_protected,
        list_weakened_settings(load_run(tmp_path / "run")),
    )
    departure = "alignment.minimum_rows is 1 (by default 2)"
    assert [departure in "\n".join(sentences) for sentences in surfaces] == [said] * 3
    assert result["shared_organisations"] == []


def test_an_organisation_with_several_parties_is_named(tmp_path: Path) -> None:
    made = Organisations(tmp_path)
    pair = [["bank", "aggregator"]]
    proposal = made.propose(run_by={"aggregator": "Bank"}, together=pair)
    answers = [made.answer(name, proposal, colluding_groups=pair) for name in OTHERS]
    project.seal_project(answers, made.home("bank"))
    (first, *_) = describe_shared_organisations(made.home("bank"))
    assert first.startswith("one organisation, 'Bank', runs bank and aggregator: together they")
    assert describe_shared_organisations(made.home("shop")) == ()

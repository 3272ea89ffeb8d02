"""The report of a real run in which passives vote is complete, and speaks of votes."""

import json
from pathlib import Path
from typing import Any

import pytest

from apfed_experiments.report import write_report
from secure_apfed.runs.run import run
from tests.attacks.test_attacks_live import config_of

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")


@pytest.mark.parametrize("method", ["votes", "votes_randomised"])
def test_a_run_of_votes_is_reported(method: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(config_of(method), folder)
    page = write_report(folder).read_text(encoding="utf-8")
    told: dict[str, Any] = json.loads((folder / "privacy.json").read_text(encoding="utf-8"))
    assert not (folder / "pictures" / "learning.png").exists()  # they are asked once
    each = method == "votes_randomised"
    learned = json.dumps(told["threat_model"]["who_learns_what"])
    assert "every passive is shown every label" in learned
    assert ("Randomised response" in learned) is each
    assert ("sum of all passives' votes" in learned) is not each
    assert "gradient" not in learned + json.dumps(told["threat_model"]["coalitions"])
    assert any("shown the labels" in one for one in told["warnings"])
    assert any("no noise on votes" in one for one in told["warnings"]) is not each
    assert ("How far each passive" in page) is each
    assert set(told["agreement_of_votes"]) == ({"passive-1", "passive-2"} if each else set())
    assert "labeller held fixed" in page if each else "no guarantee" in page
    assert "how passives vote" in page

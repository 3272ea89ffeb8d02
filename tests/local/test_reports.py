"""Every party's own report of a run in processes, and what passives sign of their accounts."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from apfed_attacks.interface import AttackResult
from apfed_experiments.report import write_report
from secure_apfed.base.files import load_json
from secure_apfed.cli import execute
from secure_apfed.commands import finished
from secure_apfed.errors import CheckpointError
from secure_apfed.runs.audit_log import verify_log
from secure_apfed.runs.folder import RunFolder
from secure_apfed.runs.outcome import load_outcome
from tests.local.processes import Parties
from tests.modules import forget_modules
from tests.secure_apfed.small_runs import small_config

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
HELPERS = ("passive-1", "aggregator")


@pytest.fixture(scope="module")
def parties(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of three parties, each of which was played by its command to the end."""
    summed = {"scheme": "plain", "masks": "pairwise", "clip": 1.0, "noise": {"epsilon": 8.0}}
    wanted = (
        {"name": "model_completion", "options": {"labels_per_class": 4}},
        {"name": "inverse_network", "options": {"shadow_rows": 40}},
    )
    config = small_config(secure_sum=summed, attacks=wanted)
    run = tmp_path_factory.mktemp("reports") / "run"
    said = Parties(config, run, command=["--json"]).play()
    assert {one["kind"] for one in said.values()} == {"code 0"}, said
    return run / "parties"


def load_attacks(folder: Path) -> dict[str, AttackResult]:
    results = load_json(folder / "attacks.json", tuple[AttackResult, ...])
    return {result.attack: result for result in results}


def test_the_actives_result_is_whole(parties: Path) -> None:
    active = parties / "active"
    outcome = load_outcome(RunFolder(active))
    (account,) = outcome.stated["passive-1"].accounts
    own = json.loads((parties / "passive-1" / "ended.json").read_bytes())["contributions"]
    assert (account.figure, account.epsilon) == ("epsilon_c", own["epsilon"])
    assert 0 < account.epsilon <= 8
    told = json.loads((active / "privacy.json").read_bytes())
    assert "signed before step" in told["accounting"]["stated"]["stated by passive-1"]
    assert "95 % over them, paired:" in told["gain"]
    assert told["solo"]["baselines"]
    page = (active / "report.html").read_text("utf-8")
    parts = (told["gain"], verify_log(active).head, "stated by passive-1", "identity.pem")
    assert [part for part in parts if part not in page] == []


def test_each_measures_what_it_let_out_itself(parties: Path) -> None:
    of_labels = load_attacks(parties / "active")
    of_features = load_attacks(parties / "passive-1")
    assert of_labels["model_completion"].adversary == "passive-1"
    assert of_labels["inverse_network"].applicable
    assert {result.victim for result in of_labels.values()} == {"active"}
    told = of_features["inverse_network"]
    assert told.applicable
    assert (told.victim, told.adversary) == (
        "passive-1",
        "active, told what the others contributed",
    )
    assert "model_completion" not in of_features, "it has no labels"
    assert not (parties / "aggregator" / "attacks.json").exists()


@pytest.mark.parametrize("name", HELPERS)
def test_who_helped_has_a_report_of_its_own_alone(name: str, parties: Path) -> None:
    folder = parties / name
    page = (folder / "report.html").read_text("utf-8")
    (folder / "report.html").unlink()
    assert execute(["report", str(folder), "--json"]) == 0
    assert (folder / "report.html").read_text("utf-8") == page
    parts = (verify_log(folder).head, "Its limits", "signed by the identity", "contribution")
    assert [part for part in parts if part not in page] == []
    assert ("epsilon_c" in page) is (name == "passive-1")
    others = {other.name for other in parties.iterdir()} - {name}
    flows = json.loads((folder / "transcript.json").read_bytes())
    assert {flow["sender"] for flow in flows} == {name, *others}
    assert all(name in (flow["sender"], flow["receiver"]) for flow in flows)
    secrets = [
        parties / other / file for other in others for file in ("identity.pem", "attacks.json")
    ]
    lines = [line for file in secrets if file.exists() for line in file.read_text().splitlines()]
    assert [line for line in lines if len(line) > 40 and line in page] == []


@pytest.mark.slow
def test_a_statement_that_was_altered_or_is_of_another_run_is_told(
    parties: Path, tmp_path: Path
) -> None:
    active = parties / "active"
    whole = (active / "statements.json").read_text()

    def change_statement(**changed: Any) -> str:
        statements = json.loads(whole)
        statements["passive-1"] |= changed
        (active / "statements.json").write_text(json.dumps(statements))
        write_report(active)
        said = json.loads((active / "privacy.json").read_bytes())
        return str(said["accounting"]["stated"]["stated by passive-1"])

    said = json.loads(whole)
    try:
        assert "NOT SIGNED" in change_statement(step=said["passive-1"]["step"] + 1)
        assert "NOT SIGNED" in change_statement(contract="0" * 64)
        assert "NOT OF THIS CONTRACT" in change_statement(**said["aggregator"])
    finally:
        (active / "statements.json").write_text(whole)
        write_report(active)


def test_without_the_extra_there_is_no_report_and_one_word_of_it(
    parties: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forget_modules(monkeypatch, "apfed_experiments.report")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    finished.report_passive(parties / "passive-1", is_quiet=True)
    out, note = capsys.readouterr()
    assert json.loads(out)["report"] is None
    assert "run: python -m pip install '" in " ".join(note.split())
    assert "'matplotlib>=3.9'" in note


def test_a_part_that_was_cut_off_says_what_is_missing(parties: Path, tmp_path: Path) -> None:
    for name in ("ended.json", "contract.json", "config.yaml"):
        (tmp_path / name).write_bytes((parties / "passive-1" / name).read_bytes())
    with pytest.raises(CheckpointError, match=r"transcript\.json is missing: passive-1 was"):
        write_report(tmp_path)

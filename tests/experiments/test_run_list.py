"""What reads run folders: the list of runs, broken ones with the reason, and the report."""

import contextlib
import json
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from apfed_experiments.baselines import (
    BaselineResult,
    BaselinesRecord,
    digest_settings,
    locate_baselines,
)
from apfed_experiments.report import load_run, write_report
from apfed_experiments.report.contents import iter_setting_rows
from apfed_experiments.run_list import HEADER, ListedRun, RunState, list_runs
from secure_apfed.base.files import MAX_JSON_BYTES, own_subfolder
from secure_apfed.cli import execute
from secure_apfed.config import Config
from secure_apfed.errors import CheckpointError, DataError
from secure_apfed.runs.run import run
from tests.attacks.test_attacks_live import config_of as voting
from tests.experiments.run_folder import Page, attack_result, config_of, write_run
from tests.secure_apfed.small_runs import run_as_json

SOLO = "solo.json"
DAY = datetime(2025, 3, 1, 12, tzinfo=UTC)


def write_baselines(path: Path, config: Config, test: float) -> None:
    best = BaselineResult(name="ridge", title="ridge regression", validation=0.6, test=test)
    record = BaselinesRecord(settings=digest_settings(config), baselines=(best,))
    path.write_text(record.model_dump_json())


def set_date(path: Path, day: int) -> None:
    seconds = DAY.timestamp() + 86_400 * day
    os.utime(path, (seconds, seconds))


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """A run with all there is, one in a study, one that has just begun, and three broken ones."""
    top = tmp_path / "runs"
    config = config_of(guard="{mechanism: gaussian, epsilon: 8.0}")
    attacks = [
        attack_result(),
        attack_result(adversary="passive-2", advantage=0.3),
        attack_result(
            attack="inverse_network",
            target="features",
            applicable=False,
            advantage=None,
            metric=None,
            reason="nothing was sent",
        ),
    ]
    guarded = write_run(
        top / "guarded", config, accuracy={"apfed_c": 0.7}, epsilon=7.98, attacks=attacks
    )
    write_baselines(guarded / SOLO, config, 0.65)
    (guarded / "report.html").write_text("")
    in_study = config_of("single_view")
    study = write_run(top / "study" / "alone", in_study, accuracy={"single_view": 0.5})
    write_baselines(locate_baselines(in_study, study.parent), in_study, 0.52)
    begun = write_run(top / "begun", config, accuracy={"apfed_c": 0.7})
    (begun / "result.json").unlink()
    broken = {"cut": "result.json", "unset": "config.yaml", "misread": "attacks.json"}
    for name, file in broken.items():
        cut = write_run(top / name, config, accuracy={"apfed_c": 0.7}, attacks=attacks)
        (cut / file).write_text('{"half": ')
    (top / "not-a-run").mkdir()
    (top / "not-a-run" / "config.yaml").write_text("name: mine")
    for day, name in enumerate(("guarded", "study/alone", "cut", "unset", "misread")):
        set_date(top / name / "result.json", day)
    set_date(begun / "metrics.jsonl", 9)
    return top


def list_by_name(top: Path) -> dict[str, ListedRun]:
    return {run.name: run for run in list_runs(top)}


def test_every_run_folder_is_a_row_and_tells_what_is_there(top: Path, tmp_path: Path) -> None:
    """The newest comes first, and links are not followed."""
    write_run(tmp_path / "elsewhere" / "run", config_of(), accuracy={"apfed_c": 0.5})
    (top / "link").symlink_to(tmp_path / "elsewhere")
    runs = list_by_name(top)
    assert list(runs) == ["begun", "misread", "unset", "cut", "study/alone", "guarded"]
    run = runs["guarded"]
    assert run.state is RunState.FINISHED
    assert run.gain == pytest.approx(0.05)
    assert run.guarantee is not None
    assert run.guarantee.epsilon == 7.98
    headline = run.leak_by_direction["passive reads labels"]
    assert headline.advantage == 0.3
    assert "passive-2" in headline.note
    assert {kind for kind, of in run.leak_by_direction.items() if of.best_attack} == {
        "passive reads labels"
    }
    assert len(run.list_cells()) == len(HEADER)
    alone = runs["study/alone"]
    assert alone.gain == pytest.approx(-0.02)
    assert alone.guarantee is not None
    assert alone.guarantee.state == "nothing is sent"
    assert "not attacked" in alone.list_cells()
    begun = runs["begun"]
    assert (begun.state, begun.accuracy) == (RunState.UNFINISHED, None)
    assert begun.reason.startswith("6 of 6 epochs")
    assert [of.name for of in list_runs(top / "guarded")] == ["guarded"]
    with pytest.raises(DataError, match="no such folder"):
        list_runs(tmp_path / "missing")


def test_a_broken_folder_is_a_row_that_names_the_file(top: Path) -> None:
    for name, beginning in (
        ("cut", "result.json: is not JSON"),
        ("unset", "config.yaml"),
        ("misread", "attacks.json: is"),
    ):
        run = list_by_name(top)[name]
        assert run.state is RunState.BROKEN
        assert run.reason.startswith(beginning)
        assert str(top) not in run.reason
    file = top / "guarded" / SOLO
    record = json.loads(file.read_text())
    for key, wrong in (("measure", "x"), ("baselines", [])):
        file.write_text(json.dumps({**record, key: wrong}))
        run = list_by_name(top)["guarded"]
        assert run.state is RunState.BROKEN
        assert SOLO in run.reason


def test_a_run_is_told_by_the_measure_that_judges_it(top: Path) -> None:
    file = top / "guarded" / SOLO
    result = top / "guarded" / "result.json"
    told = {**json.loads(file.read_text()), "measure": "brier"}
    file.write_text(json.dumps(told))
    run = list_by_name(top)["guarded"]
    assert (run.score_text, run.gain_text, run.gain) == (
        "70.0 %",
        "alone measured by Brier score",
        None,
    )
    judged = {"measure": "brier", "measures": {"apfed_c": {"brier": 0.6}}}
    result.write_text(json.dumps({**json.loads(result.read_text()), **judged}))
    run = list_by_name(top)["guarded"]
    assert (run.score_text, run.gain_text) == ("Brier score 0.600", "+0.050")
    file.unlink()
    assert list_by_name(top)["guarded"].gain_text == "alone not measured"
    result.write_text(json.dumps({**json.loads(result.read_text()), "measures": {}}))
    assert list_by_name(top)["guarded"].score_text == "Brier score undefined"


def test_names_and_clocks_of_others_are_shown(
    top: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # on a narrow terminal names are folded
    strange = os.fsdecode(b"bad\xff \x1b[31m[b]")
    (top / "guarded").rename(top / strange)
    with contextlib.suppress(OSError):  # not every file system has such years
        os.utime(top / strange / "result.json", (300_000_000_000, 300_000_000_000))
    assert execute(["runs", str(top)]) == 0
    said = capsys.readouterr().out
    assert "\x1b[31m" not in said
    assert "[b]" in said
    page = tmp_path / "page.html"
    assert execute(["runs", str(top), "--html", str(page)]) == 0
    assert "bad%FF" in page.read_text()


def test_a_folder_that_may_not_be_entered_is_a_row(
    top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = top / "guarded"
    scandir = os.scandir
    access = os.access

    def refuse(path: Any) -> Any:
        if Path(path) == closed:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    def may(path: Any, mode: int) -> bool:
        return not Path(path).is_relative_to(closed) and access(path, mode)

    monkeypatch.setattr(os, "scandir", refuse)
    monkeypatch.setattr(os, "access", may)
    assert "may not be entered" in list_by_name(top)["guarded"].reason


def test_the_command_prints_a_table_one_object_or_a_note(
    top: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert execute(["runs", str(top)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"guarded +apfed_c +digits, 4 parties +70\.0 % +\+5\.0 points +7\.98", out)
    assert "broken: result.json: is not JSON" in out
    rows = {row["name"]: row for row in run_as_json(capsys, "runs", top)["runs"]}
    assert rows["guarded"]["best_alone"]["value"] == 0.65
    assert rows["guarded"]["worst_attacks"]["passive reads labels"]["advantage"] == 0.3
    assert (rows["study/alone"]["epsilon"], rows["cut"]["accuracy"]) == (None, None)
    assert execute(["runs", str(own_subfolder(tmp_path / "empty"))]) == 0
    assert "no run folder" in capsys.readouterr().err
    page_of(tmp_path / "empty", tmp_path / "page.html")
    assert "No run folder lies there" in (tmp_path / "page.html").read_text(encoding="utf-8")


def page_of(top: Path, path: Path) -> Page:
    assert execute(["runs", str(top), "--html", str(path)]) == 0
    return Page(path.read_text(encoding="utf-8"))


def test_the_page_holds_every_row_links_to_reports_alone_and_names_stay_text(
    top: Path, tmp_path: Path
) -> None:
    page = page_of(top, tmp_path / "page.html")
    assert page.links == ["runs/guarded/report.html"]
    assert [row["data-state"] for row in page.rows] == [str(run.state) for run in list_runs(top)]
    settings = json.loads(page.data["settings"])
    assert settings[-1]["guard.epsilon"] == "8.0"
    assert "data.test_fraction" not in settings[-1]
    assert settings[2] == {}
    evil = "<script>alert(1)<"
    strange = config_of(data="{dataset: digits, views: 4, folder: '</script><b>'}")
    write_run(top / evil, strange, accuracy={"apfed_c": 0.5})
    (top / evil / "report.html").write_text("")
    page = page_of(top, tmp_path / "page.html")
    assert "runs/%3Cscript%3Ealert%281%29%3C/report.html" in page.links
    assert "alert" not in page.data["script"]
    assert "</script>" in json.dumps(json.loads(page.data["settings"]))


@pytest.fixture
def guarded_folder(tmp_path: Path) -> Path:
    return write_run(
        tmp_path / "c",
        config_of(guard="{mechanism: gaussian, epsilon: 8.0}"),
        accuracy={"apfed_c": 0.912},
        epsilon=7.98,
        attacks=[
            attack_result(),
            attack_result(
                attack="label_gradients",
                applicable=False,
                advantage=None,
                metric=None,
                reason="a passive receives no label gradient in APFed",
            ),
        ],
    )


def text_of(folder: Path) -> str:
    return write_report(folder).read_text(encoding="utf-8")


def test_the_page_is_well_formed_and_holds_everything_itself(guarded_folder: Path) -> None:
    (guarded_folder / "pictures").mkdir()
    (guarded_folder / "pictures" / "old.png").write_bytes(b"")
    text = text_of(guarded_folder)
    links = Page(text).links
    assert len(links) == 2  # learning curves and attacks
    assert all(value.startswith("data:image/png;base64,") for value in links)
    assert not re.search(r"https?://|url\(|@import|<script|<link", text)
    parts = (
        "91.2\u202f%",
        "7.98",
        "+0.220",
        "passive-1, passive-2, passive-3 (passive, each of them)",
        "Active",
        "Aggregator",
        "active and aggregator",
        "A failed attack proves no privacy",
        "Row-release guarantee, encoder held fixed",
        "ab" * 32,
        "torch 2.13.0",
        "a passive receives no label gradient in APFed",
        "The hub learns its pairwise intersection with every member",
    )
    assert [part for part in parts if part not in text] == []
    flows = json.loads((guarded_folder / "transcript.json").read_text())
    sent = sum(one["messages"] for one in flows if one["receiver"] == "aggregator")
    rows = re.findall(r'data-name="messages">([^<]*)<', text.split("<h3>Aggregator</h3>")[1])
    assert sum(int(row) for row in rows) == sent
    pictures = sorted(path.name for path in (guarded_folder / "pictures").iterdir())
    assert pictures == ["attacks.png", "learning.png"]


def test_text_from_the_config_cannot_become_markup(tmp_path: Path) -> None:
    config = config_of(data="{dataset: digits, folder: '<script>alert(1)</script>'}")
    text = text_of(write_run(tmp_path / "x", config, accuracy={"apfed_c": 0.5}))
    assert "<script" not in text
    assert "&lt;script&gt;" in text


def test_unsafe_choices_are_told_first(tmp_path: Path) -> None:
    config = config_of(secure_sum="{scheme: plain, allow_single_passive: true}")
    folder = write_run(tmp_path / "x", config, accuracy={"apfed_c": 0.5}, passives=1)
    warnings = re.findall(r'<p class="warn">([^<]*)', text_of(folder))
    assert len(warnings) == 3
    assert "The sum is plain" in warnings[0]
    assert "There is one passive" in warnings[1]
    assert "There is no guard" in warnings[2]


def test_single_view_and_tvfl_have_reports_too(tmp_path: Path) -> None:
    alone = write_run(tmp_path / "s", config_of("single_view"), accuracy={"single_view": 0.8})
    assert "the active trained alone" in text_of(alone)
    assert "No attack was mounted" in text_of(alone)
    assert json.loads((alone / "privacy.json").read_bytes())["accounting"]["audit"] is None
    ways = {"tvfl": 0.95, "tvfl_0": 0.6, "tvfl_a": 0.61, "tvfl_r": 0.1}
    text = text_of(write_run(tmp_path / "t", config_of("tvfl"), accuracy=ways))
    assert "reveal the labels" in text
    assert "gradients that give labels away" in text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("result.json", None, "the run has not finished; continue it with --resume"),
        ("result.json", '{"method": "apfed_c"}', "is not as this version writes it, at 'accuracy'"),
        ("transcript.json", '[{"sender": 3}]', "not as this version writes it, at '0.sender'"),
        ("accountants.json", "[1]", "accountants.json: is not as this version writes it"),
        ("versions.json", "[" * 100_000, "versions.json: is not JSON"),
        ("config.yaml", " " * (MAX_JSON_BYTES + 1), "config.yaml: is larger than"),
    ],
)
def test_a_damaged_folder_names_the_file(
    guarded_folder: Path, name: str, content: str | None, message: str
) -> None:
    (guarded_folder / name).unlink(missing_ok=True)
    if content is not None:
        (guarded_folder / name).write_text(content)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        write_report(guarded_folder)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="it is no run folder"):
        write_report(tmp_path)
    with pytest.raises(CheckpointError, match="no such run folder"):
        write_report(tmp_path / "x")


def test_the_settings_say_what_each_defence_does(tmp_path: Path) -> None:
    config = config_of(defences="[{kind: compression}]")
    folder = write_run(tmp_path / "c", config, accuracy={"apfed_c": 0.9})
    told = dict(iter_setting_rows(load_run(folder)))["defences without a guarantee"]
    said = "compression keeps only the largest numbers of each gradient"
    assert told == f"compression (every passive): {said}"


def test_the_guards_claim_is_audited_and_who_fell_silent_told(
    guarded_folder: Path, tmp_path: Path
) -> None:
    result = json.loads((guarded_folder / "result.json").read_text())
    result["attendance"] = {"left": {"passive-2": 17}, "steps_without_all": 79}
    (guarded_folder / "result.json").write_text(json.dumps(result))
    text = text_of(guarded_folder)
    silent = "passive-2 fell silent in step 17: of the steps from then on 79 went on without all"
    assert silent in text
    assert "audit of the guard, 10\u202f000 canaries, each released 6 times" in text
    assert "below the claim" in text
    told = json.loads((guarded_folder / "privacy.json").read_bytes())["accounting"]["audit"]
    assert told["claimed"] == 7.98
    assert 2 < told["audit"]["epsilon_rows"] < 7.98
    assert told["contradicted"] is False
    assert told["ceiling_auc"] == pytest.approx(0.880, abs=0.01)
    assert told["ceiling_tpr"] == pytest.approx(0.253, abs=0.01)
    config = config_of(guard="{mechanism: gaussian, clip: 1.0, epsilon: 8.0}")
    less = write_run(tmp_path / "less", config, accuracy={"apfed_c": 0.9}, epsilon=3.0)
    assert "CONTRADICTS the claim" in text_of(less)


def test_an_accountant_that_was_left_out_says_so_in_its_place(guarded_folder: Path) -> None:
    checks = {"gdp": 7.98, "pld": "left out: its grid would take 2.1e+10 points (bound 4,194,304)"}
    (guarded_folder / "accountants.json").write_text(json.dumps(checks))
    text = text_of(guarded_folder)
    assert f"cross-check, pld accountant: {checks['pld']}" in text
    assert "cross-check, gdp accountant: epsilon_x 7.98" in text
    figures = json.loads((guarded_folder / "privacy.json").read_bytes())["accounting"]["figures"]
    assert figures["accountants"] == checks


@pytest.mark.sampled(every=2)
@pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
@pytest.mark.parametrize("method", ["votes", "votes_randomised"])
def test_a_real_run_of_votes_is_reported(method: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(voting(method), folder)
    page = text_of(folder)
    told = json.loads((folder / "privacy.json").read_text(encoding="utf-8"))
    assert not (folder / "pictures" / "learning.png").exists()  # they are asked once
    each = method == "votes_randomised"
    assert "gradient" not in json.dumps(told["threat_model"])
    assert any("shown the labels" in one for one in told["warnings"])
    assert any("no noise on votes" in one for one in told["warnings"]) is not each
    assert ("How far each passive" in page) is each
    assert set(told["agreement_of_votes"]) == ({"passive-1", "passive-2"} if each else set())
    assert ("labeller held fixed" if each else "no guarantee") in page
    assert "how passives vote" in page

"""A report is made from a run folder alone, is complete, and reaches nothing outside itself."""

import json
import re
from pathlib import Path

import pytest

from apfed_experiments.report import read_run, write_report
from apfed_experiments.report.contents import settings_of
from secure_apfed.errors import CheckpointError
from secure_apfed.files import MOST_JSON_BYTES
from secure_apfed.runs.run import run
from tests.attacks.test_attacks_live import config_of as voting
from tests.experiments.run_folder import Page, attack_result, config_of, write_run


@pytest.fixture
def guarded(tmp_path: Path) -> Path:
    return write_run(
        tmp_path / "c",
        config_of(guard="{mechanism: gaussian, epsilon: 8.0}"),
        accuracy={"apfed_c": 0.912},
        epsilon=7.98,
        attacks=[
            attack_result(),
            attack_result(attack="label_gradients", applicable=False, advantage=None, metric=None,
                          reason="a passive receives no label gradient in APFed"),
        ],
    )  # fmt: skip


def text_of(folder: Path) -> str:
    return write_report(folder).read_text(encoding="utf-8")


def test_the_page_is_well_formed_and_holds_everything_itself(guarded: Path) -> None:
    (guarded / "pictures").mkdir()
    (guarded / "pictures" / "old.png").write_bytes(b"")
    text = text_of(guarded)
    links = Page(text).links
    assert len(links) == 2  # learning curves and attacks
    assert all(value.startswith("data:image/png;base64,") for value in links)
    assert not re.search(r"https?://|url\(|@import|<script|<link", text)
    for told in (
        "91.2\u202f%", "7.98", "+0.220", "passive-1, passive-2, passive-3 (passive, each of them)",
        "Active", "Aggregator", "active and aggregator", "A failed attack proves no privacy",
        "Row-release guarantee, encoder held fixed", "ab" * 32, "torch 2.13.0",
        "a passive receives no label gradient in APFed",
        "The hub learns its pairwise intersection with every member",
    ):  # fmt: skip
        assert told in text, told
    flows = json.loads((guarded / "transcript.json").read_text())
    sent = sum(one["messages"] for one in flows if one["receiver"] == "aggregator")
    rows = re.findall(r'data-name="messages">([^<]*)<', text.split("<h3>Aggregator</h3>")[1])
    assert sum(int(row) for row in rows) == sent
    pictures = sorted(path.name for path in (guarded / "pictures").iterdir())
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
    assert "give the labels away" in text
    assert "gradients that give labels away" in text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("result.json", None, "the run has not finished; continue it with --resume"),
        ("result.json", '{"method": "apfed_c"}', "is not as this version writes it, at 'accuracy'"),
        ("transcript.json", '[{"sender": 3}]', "not as this version writes it, at '0.sender'"),
        ("accountants.json", "[1]", "accountants.json: is not as this version writes it"),
        ("versions.json", "[" * 100_000, "versions.json: is not JSON"),
        ("config.yaml", " " * (MOST_JSON_BYTES + 1), "config.yaml: is larger than"),
    ],
)
def test_a_damaged_folder_names_the_file(
    guarded: Path, name: str, content: str | None, message: str
) -> None:
    (guarded / name).unlink(missing_ok=True)
    if content is not None:
        (guarded / name).write_text(content)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        write_report(guarded)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    for folder, told in ((tmp_path, "it is no run folder"), (tmp_path / "x", "no such run folder")):
        with pytest.raises(CheckpointError, match=told):
            write_report(folder)


def test_the_settings_say_what_each_defence_does(tmp_path: Path) -> None:
    config = config_of(defences="[{kind: compression}]")
    folder = write_run(tmp_path / "c", config, accuracy={"apfed_c": 0.9})
    told = dict(settings_of(read_run(folder)))["defences without a guarantee"]
    said = "compression keeps only the largest numbers of each gradient"
    assert told == f"compression (every passive): {said}"


def test_the_guards_claim_is_audited_and_who_fell_silent_told(
    guarded: Path, tmp_path: Path
) -> None:
    result = json.loads((guarded / "result.json").read_text())
    result["attendance"] = {"left": {"passive-2": 17}, "steps_without_all": 79}
    (guarded / "result.json").write_text(json.dumps(result))
    text = text_of(guarded)
    silent = "passive-2 fell silent in step 17: of the steps from then on 79 went on without all"
    assert silent in text
    assert "audit of the guard, 10\u202f000 canaries, each released 6 times" in text
    assert "below the claim" in text
    told = json.loads((guarded / "privacy.json").read_bytes())["accounting"]["audit"]
    assert told["claimed"] == 7.98
    assert 2 < told["audit"]["epsilon_rows"] < 7.98
    assert told["contradicted"] is False
    assert told["ceiling_auc"] == pytest.approx(0.880, abs=0.01)
    assert told["ceiling_tpr"] == pytest.approx(0.253, abs=0.01)
    config = config_of(guard="{mechanism: gaussian, clip: 1.0, epsilon: 8.0}")
    less = write_run(tmp_path / "less", config, accuracy={"apfed_c": 0.9}, epsilon=3.0)
    assert "CONTRADICTS the claim" in text_of(less)


def test_an_accountant_that_was_left_out_says_so_in_its_place(guarded: Path) -> None:
    checks = {"gdp": 7.98, "pld": "left out: its grid would take 2.1e+10 points (bound 4,194,304)"}
    (guarded / "accountants.json").write_text(json.dumps(checks))
    text = text_of(guarded)
    assert f"cross-check, pld accountant: {checks['pld']}" in text
    assert "cross-check, gdp accountant: epsilon_x 7.98" in text
    figures = json.loads((guarded / "privacy.json").read_bytes())["accounting"]["figures"]
    assert figures["accountants"] == checks


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

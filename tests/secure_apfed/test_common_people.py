"""People who are lost to spellings of their IDs are reported: before a run by patterns, and after
the alignment at every party by counts.
"""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from apfed_protocols.errors import RemoteProtocolError
from secure_apfed import run
from secure_apfed.alignment.overlap import CommonPeople, describe_common
from secure_apfed.commands.check import compute_pattern_shares, parse_patterns
from secure_apfed.config import Config
from secure_apfed.errors import UnmatchedIdsWarning
from secure_apfed.runs.folder import RunFolder
from secure_apfed.runs.outcome import load_common_people
from secure_apfed.settings.alignment import AlignmentSettings

ROWS = 400
PLAIN = [f"DE-{1000 + row}" for row in range(ROWS)]


def spell(ids: list[str]) -> Mapping[str, list[str]]:
    """Return the IDs of three parties, of which 44 % are written in one way by all."""
    draw = np.random.default_rng(0).permutation(ROWS)
    lower = set(draw[: ROWS * 3 // 10].tolist())
    bare = set(draw[ROWS * 3 // 10 : ROWS * 56 // 100].tolist())
    return {
        "bank": ids,
        "shop": [f" {own.lower()}" if row in lower else own for row, own in enumerate(ids)],
        "phone": [own.replace("-", "") if row in bare else own for row, own in enumerate(ids)],
    }


def config_of(folder: Path, *, mode: str = "all", **alignment: Any) -> Config:
    draw = np.random.default_rng(1)
    for name, ids in spell(PLAIN).items():
        frame = pd.DataFrame({"id": ids, name[0]: draw.normal(size=ROWS).round(3)})
        if name == "bank":
            frame["y"] = draw.choice(["u", "v"], ROWS)
        frame.to_csv(folder / f"{name}.csv", index=False)
    method = "split_nn_sum" if mode == "all" else "votes"
    return Config.model_validate(
        {
            "name": "t",
            "method": method,
            "guard": {"mechanism": "none"},
            "secure_sum": {"scheme": "plain", "masks": "pairwise"},
            "alignment": {"mode": mode, **alignment},
            "model": {"network": "mlp", "hidden": [4], "representation": 4},
            "train": {"epochs": 1, "batch_size": 64},
            "data": {
                "dataset": "tables",
                "active": "bank",
                "folder": str(folder),
                "label_column": "y",
                "parties": {name: {"file": f"{name}.csv"} for name in ("bank", "shop", "phone")},
            },
        }
    )


def run_noting(config: Config, folder: Path) -> tuple[tuple[CommonPeople, ...], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(config, folder)
    messages = [str(one.message) for one in caught if one.category is UnmatchedIdsWarning]
    return load_common_people(RunFolder(folder)), messages


def test_people_who_are_lost_to_three_spellings_are_reported_by_every_party(
    tmp_path: Path,
) -> None:
    people, messages = run_noting(config_of(tmp_path), tmp_path / "run")
    sentence = "176 of your 400 people are known to all"
    assert {one.party: one.sentence for one in people} == dict.fromkeys(
        ("bank", "shop", "phone"), sentence
    )
    assert sorted(messages) == sorted(one.warning for one in people if one.warning)
    by_party = {text.partition(":")[0]: text for text in messages}
    assert by_party.keys() == {"shop", "phone"}  # the bank writes all of its IDs in one way
    assert "IDs written as a-9 (0 of 120) are far rarer among the common" in by_party["shop"]
    assert "normalisation: [unicode_nfc, strip, case_fold]" in by_party["shop"]
    assert "IDs written as A9 (0 of 104) are far rarer among the common" in by_party["phone"]
    assert "normalisation: [unicode_nfc, strip, drop_punctuation]" in by_party["phone"]
    from apfed_experiments.report import load_run
    from apfed_experiments.report.contents import describe_people

    assert load_run(tmp_path / "run").path == tmp_path / "run"
    said = list(describe_people(people))
    assert f"bank: {sentence}." in said
    assert f"{by_party['shop']}." in said


def test_the_rules_that_are_proposed_find_everybody(tmp_path: Path) -> None:
    rules = ["strip", "case_fold", "drop_punctuation"]
    people, messages = run_noting(config_of(tmp_path, normalisation=rules), tmp_path / "run")
    assert {one.common for one in people} == {ROWS}
    assert messages == []


@pytest.mark.parametrize(
    ("mode", "party", "known_to"),
    [
        ("all", "bank", "all"),
        ("all", "shop", "all"),
        ("pairwise", "bank", "at least one passive"),
        ("pairwise", "shop", "bank"),
    ],
)
def test_words_say_who_knows_the_common_people(mode: str, party: str, known_to: str) -> None:
    settings = AlignmentSettings.model_validate({"mode": mode})
    rows = np.array([3, -1, 0, -1, 2])
    found = describe_common(party, PLAIN, rows, settings, active="bank")
    assert found.sentence == f"3 of your 400 people are known to {known_to}"
    assert found.warning == ""


@pytest.mark.parametrize("rows", [[], [-1, -1]])
def test_nobody_in_common_is_no_pattern(rows: list[int]) -> None:
    found = describe_common(
        "shop", spell(PLAIN)["shop"], np.array(rows, np.int64), AlignmentSettings(), active="bank"
    )
    assert (found.common, found.warning) == (0, "")


def test_patterns_without_a_uniting_rule_ask_to_compare() -> None:
    ids = [*PLAIN[:200], *(f"X{row}-Y-{row}" for row in range(200))]
    settings = AlignmentSettings.model_validate(
        {"normalisation": ["strip", "case_fold", "whole_numbers"]}
    )
    found = describe_common("shop", ids, np.arange(200), settings, active="bank")
    assert "a9-a-9 (0 of 200)" in found.warning
    assert "case_fold" not in found.warning or "drop_punctuation" in found.warning


def test_shares_are_whole_per_cents_of_frequent_patterns() -> None:
    counts = {"A-9": 7_000, "a-9": 2_890, "A9": 100, "9": 9, "#/#": 1}
    assert compute_pattern_shares(counts) == {"A-9": 70, "a-9": 28, "A9": 1}
    assert compute_pattern_shares({}) == {}
    many = {f"{'-' * size}9": 50 for size in range(1, 30)}
    assert len(compute_pattern_shares(many)) == 12
    assert parse_patterns(compute_pattern_shares(many), sender="shop") == compute_pattern_shares(
        many
    )


HOSTILE: dict[str, Any] = {
    "a list": ["A-9"],
    "a text": "A-9",
    "nothing": None,
    "too many": {f"{'-' * size}9": 1 for size in range(1, 14)},
    "a name": {"Ann": 50},
    "a command": {"rm -rf /": 50},
    "control characters": {"\x1b[2J": 50},
    "a line break": {"A\n9": 50},
    "a bidirectional mark": {"A\u202e9": 50},
    "an empty pattern": {"": 50},
    "a long pattern": {"-" * 65: 50},
    "bytes": {b"A-9": 50},
    "a number as pattern": {9: 50},
    "a share of 0": {"A-9": 0},
    "a negative share": {"A-9": -1},
    "more than all": {"A-9": 101},
    "more than all together": {"A-9": 60, "a-9": 41},
    "a fraction": {"A-9": 50.5},
    "a truth": {"A-9": True},
    "a text as share": {"A-9": "50"},
}


@pytest.mark.parametrize("subject", HOSTILE)
def test_patterns_of_a_peer_are_checked_before_they_are_shown(subject: str) -> None:
    with pytest.raises(RemoteProtocolError, match="shop sent no patterns of IDs") as raised:
        parse_patterns(HOSTILE[subject], sender="shop")
    assert "\x1b" not in str(raised.value)


def test_what_a_folder_holds_of_people_is_bounded(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert load_common_people(folder) == ()
    told = {"party": "bank", "own": 5, "common": -1, "known_to": "all"}
    folder.common_people.write_text(json.dumps([told]))
    with pytest.raises(Exception, match=r"common\.json"):
        load_common_people(folder)

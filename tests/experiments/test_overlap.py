"""The comparison of the two overlap modes, small."""

import json
from pathlib import Path

import pytest
import torch

from apfed_experiments import overlap, workers
from secure_apfed.cli import execute
from secure_apfed.data import load_data

pytestmark = [
    pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning"),
    pytest.mark.filterwarnings("ignore::secure_apfed.errors.NoHelpWarning"),
]


def test_each_passive_knows_its_own_share() -> None:
    (point, *_) = overlap.points_of("digits", Path("unused"), overlaps=(0.2,))
    data = load_data(point.config.data, seed=0)
    thinned = overlap.with_overlap(data, 0.2, seed=0)
    train = {data.active.ids[row] for row in data.train_rows.tolist()}
    test = {data.active.ids[row] for row in data.test_rows.tolist()}
    known = [set(table.ids) for table in thinned.passives]
    assert [len(people & train) for people in known] == [round(0.2 * len(train))] * 3
    assert all(people >= test for people in known)
    assert len({frozenset(people) for people in known}) == 3
    for before, after in zip(data.passives, thinned.passives, strict=True):
        row_of = {person: row for row, person in enumerate(before.ids)}
        rows = [row_of[person] for person in after.ids]
        assert torch.equal(after.features, before.features[rows])


def test_lines_of_one_data_set(tmp_path: Path) -> None:
    points = overlap.points_of("breast_cancer", tmp_path, overlaps=(0.05, 0.5), epochs=1)
    table = overlap.compare_overlaps(points, seeds=2)
    alone, *lines = table.plain()
    assert alone["method"].startswith("best solo model (")
    assert [(line["method"], line["mode"], line["overlap"]) for line in lines] == [
        ("apfed_c", "all", 0.05), ("apfed_c", "all", 0.5), ("apfed_c", "pairwise", 0.05),
        ("apfed_c", "pairwise", 0.5), ("votes", "pairwise", 0.5),
    ]  # fmt: skip
    for line in lines:
        assert line["gain"] == pytest.approx(line["accuracy"] - alone["accuracy"])
        assert line["low"] <= line["gain"] <= line["high"]
    few, both, _, pairs, voted = (line["helped"] for line in lines)
    assert 0 <= few < 0.02 * 427
    assert 0.1 * 427 < both < 0.4 * 427
    assert 0.6 * 427 < pairs == voted < 427
    assert all(0.5 < line["accuracy"] <= 1 for line in lines)
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}
    assert len(stamps) == 5 * 2 + 2
    assert overlap.compare_overlaps(points, seeds=2).cells == table.cells
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps


@pytest.mark.slow
def test_the_command_prints_one_json_object_and_draws_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(overlap, "DATASETS", {"breast_cancer": overlap.DATASETS["breast_cancer"]})
    monkeypatch.setattr(workers, "begin", lambda: None)
    picture = tmp_path / "new" / "overlap.png"
    threads = torch.get_num_threads()
    options = ["--seeds", "1", "--epochs", "1", "--picture", str(picture), "--json"]
    assert execute(["study", "overlap", *options, "--output", str(tmp_path / "figures")]) == 0
    torch.set_num_threads(threads)
    lines = json.loads(capsys.readouterr().out)["rows"]
    assert lines[0]["method"].startswith("best solo model")
    assert len(lines) == 1 + 4 + 4 + 3
    assert picture.read_bytes().startswith(b"\x89PNG")

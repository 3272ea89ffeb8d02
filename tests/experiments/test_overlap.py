"""The comparison of the two overlap modes, small."""

import json
from pathlib import Path

import pytest
import torch
from typer import Typer
from typer.testing import CliRunner

from experiments import overlap
from secure_apfed.data import load_data

pytestmark = pytest.mark.filterwarnings("ignore::protocols.errors.UnsafeChoiceWarning")


def test_each_passive_knows_its_own_share() -> None:
    config = overlap.config_of("digits", mode="all", seed=0, epochs=1)
    data = load_data(config.data, seed=0)
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


def test_lines_of_one_data_set() -> None:
    rows = list(overlap.compare_overlaps("breast_cancer", overlaps=(0.3,), seeds=2, epochs=1))
    assert [row.method for row in rows] == ["the active alone", "apfed_c, all", "apfed_c, pairwise"]
    alone, both, pairs = rows
    assert alone.helped == 0
    assert 0 < both.helped < 0.2 * 427
    assert pairs.helped > 0.4 * 427
    assert all(0.5 < row.accuracy <= 1 for row in rows)


def test_the_command_prints_one_json_list_and_draws_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(overlap, "_DATASETS", {"breast_cancer": overlap._DATASETS["breast_cancer"]})
    picture = tmp_path / "new" / "overlap.png"
    app = Typer()
    app.command()(overlap.main)
    threads = torch.get_num_threads()
    done = CliRunner().invoke(
        app, ["--json", "--seeds", "1", "--epochs", "1", "--picture", str(picture)]
    )
    torch.set_num_threads(threads)
    assert done.exit_code == 0, done.output
    lines = json.loads(done.stdout)
    assert [line["method"] for line in lines][:1] == ["the active alone"]
    assert len(lines) == 9
    assert picture.read_bytes().startswith(b"\x89PNG")

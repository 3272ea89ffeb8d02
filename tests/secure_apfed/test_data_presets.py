"""The papers' partitions: exact numbers of people, and the columns that the papers name."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from apfed_experiments.presets import PRESETS, preset
from secure_apfed import cli
from secure_apfed.config.file import load_settings_text
from secure_apfed.config.plain_yaml import as_yaml, parse_yaml
from secure_apfed.data import DATASETS, VerticalData, load_data
from secure_apfed.data.partition import deal_people, draw_people
from secure_apfed.errors import ConfigError, DataError
from secure_apfed.settings.data import DataSettings

PAGE = (Path(__file__).parents[2] / "docs/data.md").read_text(encoding="utf-8")


def load(settings: dict[str, object]) -> VerticalData:
    try:
        return load_data(DataSettings.model_validate(settings), seed=1)
    except DataError as error:
        if "is in any of" in str(error):
            pytest.skip(str(error))
        raise


def test_every_partition_is_a_setting_with_columns_that_the_set_has() -> None:
    for name in PRESETS:
        settings = DataSettings.model_validate(preset(name))
        told = as_yaml(settings.model_dump(mode="json", exclude_unset=True))
        assert load_settings_text(DataSettings, told, source="x") == settings
        natural = DATASETS[settings.dataset].natural_views.values()
        known = sorted(column for view in natural for column in view)
        if settings.columns is not None:
            columns = [str(column) for some in settings.columns.values() for column in some]
            assert sorted(columns) == known, name


def test_columns_were_moved_in_the_papers_order() -> None:
    for name, columns in (
        ("apc-vfl/breast_cancer/2/100", ["mean texture", "worst fractal dimension"]),
        ("apc-vfl/mimic_iii/3/750", ["Age", "NumCallouts", "NumDiagnosis"]),
        ("apc-vfl/credit_card/4/2500", ["AGE", "PAY_2", "PAY_4", "PAY_6"]),
    ):
        assert list(preset(name)["columns"]["active"]) == columns


def test_credit_cards_are_numbered_from_x1() -> None:
    views = DATASETS["credit_card"].natural_views
    numbered = dict(enumerate((*views["client"], *views["repayment"]), start=1))
    columns = preset("apc-vfl/credit_card/5/100")["columns"]["active"]
    assert columns == tuple(numbered[at] for at in (3, 5, 7, 9, 11))


@pytest.mark.parametrize("aligned", [250, 100])
def test_so_many_people_are_aligned_and_the_passive_holds_no_others(aligned: int) -> None:
    data = load(preset(f"apc-vfl/breast_cancer/3/{aligned}"))
    (passive,) = data.passives
    ids = [data.active.ids[row] for row in data.train_rows.tolist()]
    tests = {data.active.ids[row] for row in data.test_rows.tolist()}
    assert (len(ids), len(tests)) == (450, 50)
    assert len(set(ids) & set(passive.ids)) == aligned
    assert set(passive.ids) - set(ids) == tests
    assert (data.active.features.shape[1], passive.features.shape[1]) == (3, 27)


def test_where_all_are_aligned_fifty_test() -> None:
    data = load(preset("apc-vfl/breast_cancer/all-aligned/150"))
    assert (len(data.train_rows), len(data.test_rows)) == (100, 50)
    assert set(data.passives[0].ids) == set(data.active.ids)


def test_as_many_numerals_of_each_class_train_and_test() -> None:
    data = load(preset("mmvfl/handwritten"))
    assert [table.features.shape[1] for table in data.tables] == [240, 76, 216, 47, 64]
    labels = data.active.labels
    assert labels is not None
    assert torch.bincount(labels[data.train_rows]).tolist() == [120] * 10
    assert torch.bincount(labels[data.test_rows]).tolist() == [40] * 10


def test_sessions_are_dealt_to_four_parties_or_by_view() -> None:
    stand_in = {"dataset": "synthetic_keystrokes", "rows": 200}
    across = load(preset("fedmv/horizontal/without-special") | stand_in)
    assert [list(table.views) for table in across.tables] == [["alphanum", "accel"]] * 4
    down = load(preset("fedmv/vertical") | stand_in)
    assert [list(table.views) for table in down.tables] == [["alphanum"], ["special"], ["accel"]]


def test_people_are_drawn_by_the_seed() -> None:
    labels = np.repeat([0, 1], [30, 10])
    drawn = draw_people(labels, rows=20, rows_per_class=None, seed=0)
    assert drawn is not None
    assert len(set(drawn.tolist())) == 20
    assert drawn.tolist() == sorted(drawn.tolist())
    other = draw_people(labels, rows=20, rows_per_class=None, seed=1)
    assert other is not None
    assert drawn.tolist() != other.tolist()
    each = draw_people(labels, rows=None, rows_per_class=10, seed=0)
    assert each is not None
    assert np.bincount(labels[each]).tolist() == [10, 10]
    assert draw_people(labels, rows=None, rows_per_class=None, seed=0) is None
    with pytest.raises(DataError, match=r"data.rows: 41 people are wanted, and the set has 40;"):
        draw_people(labels, rows=41, rows_per_class=None, seed=0)
    with pytest.raises(DataError, match="the set has 10 of its smallest class"):
        draw_people(labels, rows=None, rows_per_class=11, seed=0)


def test_rows_of_a_set_with_an_official_split_keep_their_side() -> None:
    data = load({"dataset": "mnist", "rows": 700})
    assert len(data.train_rows) + len(data.test_rows) == 700
    assert 50 < len(data.test_rows) < 150  # a seventh of all images


def test_no_more_people_can_be_aligned_than_there_are() -> None:
    with pytest.raises(DataError, match="11 aligned people are wanted, and the active has 10"):
        deal_people(np.arange(50), overlap=1, limit=10, seed=0, aligned=11)


def test_settings_that_contradict_each_other() -> None:
    for one, other in ((("aligned", 5), ("overlap", 0.5)), (("rows", 5), ("rows_per_class", 5))):
        with pytest.raises(ValueError, match=f"give {one[0]} or {other[0]}, not both"):
            DataSettings.model_validate(dict([one, other]))


def test_the_command_line_lists_and_prints_them() -> None:
    listed = CliRunner().invoke(cli.app, ["data", "presets", "--json"])
    assert [one["name"] for one in json.loads(listed.stdout)["presets"]] == list(PRESETS)
    printed = CliRunner().invoke(cli.app, ["data", "presets", "fedmv/horizontal"])
    assert printed.stdout == "data:\n  dataset: biaffect\n  partition: horizontal\n  clients: 4\n"
    with pytest.raises(ConfigError, match="did you mean 'mmvfl/handwritten'"):
        preset("mmvfl/handwriting")


# docs/data.md as printed: its settings are settings, its file of sessions can be read.


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_settings_that_are_shown_are_settings() -> None:
    shown = [parse_yaml(block, "docs/data.md")[0]["data"] for block in blocks("yaml")]
    settings = [load_settings_text(DataSettings, as_yaml(one), source="x") for one in shown]
    assert [one.horizontal for one in settings] == [False, True]
    assert settings[1].classes == ("no", "yes")


def test_the_sessions_that_are_shown_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (snippet,) = blocks("python")
    exec(snippet, {})
    entry = DATASETS["biaffect"]
    assert entry.read(entry, tmp_path).labels.tolist() == [0, 1]


def test_every_set_and_every_kind_of_partition_is_named() -> None:
    assert not [name for name in DATASETS if f"`{name}`" not in PAGE]
    assert not [name for name in PRESETS if f"`{name.split('/')[0]}/" not in PAGE]

"""docs/data.md as printed: its settings are settings, its file of sessions can be read."""

import re
from pathlib import Path

import pytest

from apfed_experiments.presets import PRESETS
from secure_apfed.config.file import load_settings_text
from secure_apfed.config.plain_yaml import as_yaml, parse_yaml
from secure_apfed.data import DATASETS
from secure_apfed.settings.data import DataSettings

PAGE = (Path(__file__).parents[2] / "docs/data.md").read_text(encoding="utf-8")


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


@pytest.mark.parametrize("name", DATASETS)
def test_every_set_is_named(name: str) -> None:
    assert f"`{name}`" in PAGE


def test_every_kind_of_partition_is_named() -> None:
    for name in PRESETS:
        assert f"`{name.split('/')[0]}/" in PAGE

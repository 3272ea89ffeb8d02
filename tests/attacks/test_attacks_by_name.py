"""Attacks of others: named as code, or declared by an installed package."""

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from apfed_attacks import ATTACKS, table
from apfed_attacks.interface import Attack
from apfed_attacks.run import prepare_attack
from apfed_attacks.table import find_attack, list_attacks
from apfed_experiments.finished import mount_attacks
from secure_apfed.config import AttackChoice
from secure_apfed.errors import ConfigError
from secure_apfed.runs.run import run
from tests.secure_apfed.small_runs import small_config

CODE = '''
from apfed_attacks.labels.representations import ModelCompletion


class Mine(ModelCompletion):
    """Model completion under another name."""

    name = "mine"


NUMBER = 3


class NoAttack:
    pass
'''


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "attacks_of_mine.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_attack_of_ones_own_is_mounted_on_a_run(beside: Path) -> None:
    options = {"labels_per_class": 1, "iterations": 5}
    attacks: Any = [{"name": "attacks_of_mine:Mine", "options": options}]
    run(small_config("apfed_c", attacks=attacks), beside / "run")
    results = mount_attacks(beside / "run")
    assert {result.attack for result in results} == {"mine"}


def test_an_installed_package_declares_attacks(
    beside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = EntryPoint(name="mine", value="attacks_of_mine:Mine", group="secure_apfed.attacks")
    monkeypatch.setattr(table, "entry_points", lambda group: [entry])
    monkeypatch.syspath_prepend(beside)
    assert list_attacks()[-1] == "mine"
    assert find_attack("mine").name == "mine"
    with pytest.raises(ConfigError, match="did you mean 'mine'"):
        prepare_attack(AttackChoice(name="mina"))


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("attacks_of_mine:NoAttack", "is no attack; expected a subclass"),
        ("attacks_of_mine:NUMBER", "is a int"),
        ("attacks_of_mine:Absent", "has no 'Absent'"),
        ("nowhere_at_all:Mine", "no module 'nowhere_at_all'"),
        ("model_completio", "did you mean 'model_completion'"),
    ],
)
def test_what_is_no_attack_is_refused(beside: Path, name: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        find_attack(name)


def test_ours_win() -> None:
    assert all(find_attack(name) is kind for name, kind in ATTACKS.items())
    assert all(issubclass(kind, Attack) for kind in ATTACKS.values())

"""Attacks of others: named as code, or declared by an installed package."""

from pathlib import Path
from typing import Any

import pytest

from apfed_attacks import ATTACKS
from apfed_attacks.interface import Attack
from apfed_attacks.run import run_attacks
from apfed_attacks.table import find_attack, prepare_attack
from apfed_experiments.finished import mount_attacks
from secure_apfed.config import AttackChoice
from secure_apfed.errors import ConfigError, ModelError, PromiseError
from secure_apfed.runs.run import run
from secure_apfed.testing import check_attack
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
def code_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "attacks_of_mine.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_attack_of_ones_own_is_mounted_on_a_run(code_folder: Path) -> None:
    options = {"labels_per_class": 1, "iterations": 5}
    attacks: Any = [{"name": "attacks_of_mine:Mine", "options": options}]
    run(small_config("apfed_c", attacks=attacks), code_folder / "run")
    results = mount_attacks(code_folder / "run")
    assert {result.attack for result in results} == {"mine"}


FAILING = '''
from apfed_attacks.labels.representations import ModelCompletion


class Fails(ModelCompletion):
    """It indexes rows that are not there."""

    name = "fails"

    def run(self, view, seed):
        return [][view.epochs[-1]]
'''


def test_the_failure_of_an_attack_of_ones_own_names_its_line(
    code_folder: Path, make_recording: Any
) -> None:
    (code_folder / "failing_attacks.py").write_text(FAILING)
    choice = [AttackChoice(name="failing_attacks:Fails")]
    said = r"failing_attacks:Fails failed in line 11 of .*failing_attacks.py: IndexError: list"
    with pytest.raises(ModelError, match=said) as raised:
        run_attacks(make_recording("labels"), choice, seed=0)
    assert isinstance(raised.value.__cause__, IndexError)


def test_an_installed_package_declares_attacks(
    code_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = code_folder / "attacks_of_mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: attacks-of-mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[secure_apfed.attacks]\nown = attacks_of_mine:Mine\n")
    monkeypatch.syspath_prepend(code_folder)
    assert ATTACKS.list_names()[-1] == "own"
    assert prepare_attack(AttackChoice(name="own")).name == "mine"
    with pytest.raises(ConfigError, match="did you mean 'own'"):
        prepare_attack(AttackChoice(name="owm"))


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        (
            "attacks_of_mine:NoAttack",
            "expected a subclass of apfed_attacks.interface.Attack",
        ),
        (
            "attacks_of_mine:NUMBER",
            "of apfed_attacks.interface.Attack, got int",
        ),
        ("attacks_of_mine:Absent", "has no 'Absent'"),
        ("nowhere_at_all:Mine", "no module 'nowhere_at_all'"),
        ("model_completio", "did you mean 'model_completion'"),
    ],
)
def test_what_is_no_attack_is_refused(code_folder: Path, name: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        prepare_attack(AttackChoice(name=name))


READING_ARRAYS = ("model_completion", "inverse_network")


@pytest.mark.parametrize("name", READING_ARRAYS)
def test_ours_find_a_planted_leak_and_nothing_in_noise(name: str) -> None:
    check_attack(name, options=_options_of(name))


def _options_of(name: str) -> dict[str, int]:
    if ATTACKS[name].target == "labels":
        return {"labels_per_class": 4, "iterations": 30}
    return {"shadow_rows": 60, "iterations": 30}


FAULTY = '''
import numpy as np

from apfed_attacks.interface import Guess, Prediction
from apfed_attacks.labels.representations import ModelCompletion


class Blind(ModelCompletion):
    """It guesses what it would guess without what was sent."""

    name = "blind"

    def run(self, view, seed):
        guess = super().run(view, seed)
        (baseline, *_) = guess.baselines.values()
        return Guess(
            positions=guess.positions,
            attacks={"nothing": baseline},
            baselines={"the same": baseline},
        )


class Weak(ModelCompletion):
    """It drowns what it read in noise of its seed."""

    name = "weak"

    def run(self, view, seed):
        guess = super().run(view, seed)
        (made, *_) = guess.attacks.values()
        noise = np.random.default_rng(seed).normal(size=made.values.shape)
        return Guess(
            positions=guess.positions,
            attacks={"drowned": Prediction(noise + 1e-6 * made.values)},
            baselines=guess.baselines,
        )


class Restless(ModelCompletion):
    """It draws from a generator that no seed starts."""

    name = "restless"

    def run(self, view, seed):
        guess = super().run(view, int(np.random.default_rng().integers(2**31)))
        (made, *_) = guess.attacks.values()
        noise = 0.5 * np.random.default_rng().normal(size=made.values.shape)
        worse = Prediction(made.values + made.values.std() * noise)
        return Guess(
            positions=guess.positions, attacks={"drawn": worse}, baselines=guess.baselines
        )
'''


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("Blind", "was not mounted: .* changes nothing"),
        ("Weak", "misses a planted leak of labels"),
        ("Restless", "scores differently each time"),
    ],
)
def test_an_attack_that_keeps_no_word_is_refused(code_folder: Path, name: str, advice: str) -> None:
    (code_folder / "faulty_attacks.py").write_text(FAULTY)
    with pytest.raises(PromiseError, match=advice):
        check_attack(f"faulty_attacks:{name}", options={"labels_per_class": 4, "iterations": 30})


def test_ours_win() -> None:
    assert all(find_attack(name) is kind for name, kind in ATTACKS.items())
    assert all(issubclass(kind, Attack) for kind in ATTACKS.values())

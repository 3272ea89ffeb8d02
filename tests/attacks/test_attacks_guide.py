"""The guide's two programs run as they are printed; an attack is read and used alone."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import apfed_attacks.run
from apfed_attacks import ATTACKS
from apfed_attacks.view import Exchange
from secure_apfed.config import AttackChoice
from tests.docs.pages import program_of
from tests.loaded import modules_loaded


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> list[ModuleType]:
    folder = tmp_path_factory.mktemp("guide")
    return [program_of("docs/add-an-attack.md", folder, at=at) for at in range(2)]


def test_the_printed_attack_finds_a_planted_leak(
    programs: list[ModuleType], make_recording: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = programs[0].NearestMean
    monkeypatch.setattr(apfed_attacks.run, "ATTACKS", {**ATTACKS, kind.name: kind})
    choice = [AttackChoice(name="nearest_mean", options={"labels_per_class": 10})]
    leaking = apfed_attacks.run.mount(make_recording("labels"), choice, seed=0)
    quiet = apfed_attacks.run.mount(make_recording("nothing"), choice, seed=0)
    assert min(result.advantage or 0 for result in leaking) > 0.15
    assert max(result.advantage or 0 for result in quiet) < 0.15


def test_both_sides_of_other_peoples_training_can_be_attacked(programs: list[ModuleType]) -> None:
    guide = programs[1]
    assert guide.GradientDirection().why_not(guide.shop) is None
    assert guide.accuracy > 0.95
    assert guide.InverseNetwork().why_not(guide.bank) is None
    known_anyway = [guide.error[name] for name in guide.features.baselines]
    assert guide.error["ridge on h"] < 0.5 * min(known_anyway)
    # What a view does not state is not read.
    silent = Exchange(name="nothing known")
    for attack, view, says in (
        (guide.GradientDirection(), guide.shop, "a passive receives no gradient of the task loss"),
        (guide.InverseNetwork(), guide.bank, "no party releases a representation"),
    ):
        reason = attack.why_not(replace(view, description=silent))
        assert reason == f"nothing known: {says}"


# An attack loads what it computes with, and no method.

MOST = 45
MODULES = {f"import {kind.__module__}": kind.__module__ for kind in ATTACKS.values()}


def _offences(loaded: dict[str, set[str]]) -> list[str]:
    many = [f"{one} loads {len(own)} of our modules" for one, own in loaded.items()
            if len(own) > MOST]  # fmt: skip
    methods = [f"{one} loads the table of methods" for one, own in loaded.items()
               if "secure_apfed.methods" in own]  # fmt: skip
    return many + methods


def test_an_attack_loads_few_of_our_modules_and_no_method() -> None:
    loaded = modules_loaded(list(MODULES))
    assert all(name in loaded[statement] for statement, name in MODULES.items())
    assert _offences(loaded) == []


def test_an_attack_that_loads_all_is_found(tmp_path: Path) -> None:
    (tmp_path / "offender.py").write_text("import apfed_attacks.view, secure_apfed.methods\n")
    many, table = _offences(modules_loaded(["import offender"], path=tmp_path))
    assert "of our modules" in many
    assert "table of methods" in table

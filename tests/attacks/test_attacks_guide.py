"""The guide's two programs run as they are printed."""

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

import apfed_attacks.run
from apfed_attacks import ATTACKS
from apfed_attacks.view import Exchange
from secure_apfed.config import AttackChoice
from tests.docs.pages import program_of


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


def test_both_sides_of_other_peoples_training_can_be_attacked(
    programs: list[ModuleType],
) -> None:
    guide = programs[1]
    assert guide.GradientNorm().why_not(guide.shop) is None
    assert guide.accuracy > 0.95 > max(guide.shares)
    assert guide.InverseNetwork().why_not(guide.bank) is None
    assert guide.error["ridge on h"] < 0.5 * min(
        guide.error[name] for name in guide.features.baselines
    )


def test_what_a_view_does_not_state_is_not_read(programs: list[ModuleType]) -> None:
    guide = programs[1]
    silent = replace(guide.shop, description=Exchange(name="nothing known"))
    reason = guide.GradientNorm().why_not(silent)
    assert reason == "nothing known: a passive receives no gradient of the task loss"
    reason = guide.InverseNetwork().why_not(replace(guide.bank, description=silent.description))
    assert reason == "nothing known: no party releases a representation"

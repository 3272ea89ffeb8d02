"""An attack is read and used alone: it loads what it computes with, and no method."""

from pathlib import Path

import pytest

from apfed_attacks import ATTACKS
from tests.loaded import modules_loaded

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


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("from apfed_attacks import ATTACKS", "of our modules"),
        ("from secure_apfed.methods import METHODS", "table of methods"),
    ],
)
def test_an_attack_that_loads_all_is_found(source: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "offender.py").write_text(f"import apfed_attacks.view\n{source}\n")
    offences = _offences(modules_loaded(["import offender"], path=tmp_path))
    assert any(says in offence for offence in offences)

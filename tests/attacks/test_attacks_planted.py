"""Every attack of the table finds a planted leak, and no leak where none is; tests say so.

An attack that was never seen to succeed says nothing where it fails, and one that has an
advantage, or a disadvantage, where nothing was released says nothing where it has one.
`pytest -m planted` runs the tests of the first kind, `pytest -m null` those of the second, and
`pytest -m refused` those in which the whole protocol stops an active that deviates.
"""

import ast
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

from apfed_attacks import ATTACKS
from apfed_attacks.live.strategy import ActiveAttack

PROGRAM = """
@pytest.mark.planted("one", "two")
@pytest.mark.parametrize("x", [1])
def test_finds(x): assert attack(x) > 0.5

@pytest.mark.refused("one")
def test_stops():
    with pytest.raises(Refusal): attack()

@pytest.mark.planted("three")
def test_says_nothing(): attack()

@pytest.mark.skip
@pytest.mark.planted("four")
def test_never_runs(): assert attack() > 0.5
"""


def _shown(source: str, marker: str) -> Mapping[str, set[str]]:
    """Attacks that tests of this source are marked with -> those tests, if they judge and run."""
    shown: defaultdict[str, set[str]] = defaultdict(set)
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
            continue
        judges = any(isinstance(inner, ast.Assert) for inner in ast.walk(node))
        if not judges and "pytest.raises" not in ast.unparse(node):
            continue
        marks = [ast.unparse(one) for one in node.decorator_list]
        if any(one.startswith(("pytest.mark.skip", "pytest.mark.xfail")) for one in marks):
            continue
        for one in node.decorator_list:
            if isinstance(one, ast.Call) and ast.unparse(one.func) == f"pytest.mark.{marker}":
                for name in one.args:
                    shown[ast.literal_eval(name)].add(node.name)
    return shown


@cache
def _of_all_tests(marker: str) -> frozenset[str]:
    sources = (path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    return frozenset(name for source in sources for name in _shown(source, marker))


def test_only_tests_that_run_and_judge_count() -> None:
    assert _shown(PROGRAM, "planted") == {"one": {"test_finds"}, "two": {"test_finds"}}
    assert _shown(PROGRAM, "refused") == {"one": {"test_stops"}}


@pytest.mark.parametrize("name", ATTACKS)
def test_every_attack_is_shown_on_a_planted_leak(name: str) -> None:
    assert name in _of_all_tests("planted"), f"mark a test with pytest.mark.planted({name!r})"


@pytest.mark.parametrize("name", ATTACKS)
def test_every_attack_is_shown_where_nothing_was_leaked(name: str) -> None:
    assert name in _of_all_tests("null"), f"mark a test with pytest.mark.null({name!r})"


@pytest.mark.parametrize("name", ATTACKS)
def test_every_active_that_deviates_is_refused(name: str) -> None:
    if issubclass(ATTACKS[name], ActiveAttack):
        assert name in _of_all_tests("refused"), f"mark a test with pytest.mark.refused({name!r})"


@pytest.mark.parametrize("marker", ["planted", "null", "refused"])
def test_marks_name_attacks_of_the_table(marker: str) -> None:
    assert _of_all_tests(marker) <= set(ATTACKS)

"""Every attack of the table finds a planted leak, and no leak where none is; tests say so.

An attack that was never seen to succeed says nothing where it fails, and one that has an
advantage, or a disadvantage, where nothing was released says nothing where it has one.
`pytest -m planted` runs the tests of the first kind, `pytest -m null` those of the second, and
`pytest -m refused` those in which the whole protocol stops an active that deviates.
"""

import importlib
import inspect
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from apfed_attacks import ATTACKS
from apfed_attacks.live.strategy import ActiveAttack


def _shown(tests: Iterable[Callable[..., Any]], marker: str) -> set[str]:
    """Attacks that these are marked with, as far as the tests judge and run."""
    found = set[str]()
    for test in tests:
        source, marks = inspect.getsource(test), getattr(test, "pytestmark", [])
        judges = "assert " in source or "pytest.raises" in source
        if judges and not {mark.name for mark in marks} & {"skip", "xfail"}:
            found.update(*(mark.args for mark in marks if mark.name == marker))
    return found


@cache
def _of_all_tests(marker: str) -> frozenset[str]:
    names = sorted(path.stem for path in Path(__file__).parent.glob("test_*.py"))
    modules = [importlib.import_module(f"tests.attacks.{name}") for name in names]
    tests = [
        value for module in modules for name, value in vars(module).items()
        if name.startswith("test_") and inspect.isfunction(value)
    ]  # fmt: skip
    return frozenset(_shown(tests, marker))


def test_only_tests_that_run_and_judge_count() -> None:
    @pytest.mark.planted("one", "two")
    @pytest.mark.parametrize("x", [1])
    def finds(x: int) -> None:
        assert x

    @pytest.mark.refused("one")
    def stops() -> None:
        with pytest.raises(ZeroDivisionError):
            _ = 1 / 0

    @pytest.mark.planted("three")
    def says_nothing() -> None: ...

    @pytest.mark.skip
    @pytest.mark.planted("four")
    def never_runs() -> None:
        assert "never"

    tests = (finds, stops, says_nothing, never_runs)
    assert _shown(tests, "planted") == {"one", "two"}
    assert _shown(tests, "refused") == {"one"}


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

"""The names that people read instead of keys."""

from collections.abc import Mapping
from typing import Any

from attacks.interface import AttackResult
from experiments.report import words

__all__ = ["attack_title", "method_name", "plain", "value_told"]

_METHODS: Mapping[str, str] = {
    "apfed": "APFed",
    "apfed_r": "APFed-R",
    "apfed_c": "APFed-C",
    "single_view": "SingleVL",
    "tvfl": "TVFL, all views",
    "tvfl_0": "TVFL-0",
    "tvfl_a": "TVFL-A",
    "tvfl_r": "TVFL-R",
}


def method_name(key: str) -> str:
    """Return the papers' name of a method or of one of its variants; an unknown key as it is."""
    return _METHODS.get(key, key)


def attack_title(result: AttackResult) -> str:
    """Return what was attempted, such as "labels of active by model completion"."""
    victim = f" of {result.victim}" if result.victim else ""
    return f"{result.target}{victim} by {plain(result.attack)}"


def plain(key: str) -> str:
    """Return a key as words."""
    return key.replace("_", " ").replace("-", " ")


def value_told(value: Any) -> str:
    """Return a setting or figure as words."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return words.number(value, 4)
    if isinstance(value, list | tuple):
        return ", ".join(map(value_told, value))
    if isinstance(value, Mapping):
        return "; ".join(f"{plain(key)} {value_told(entry)}" for key, entry in value.items())
    return str(value)

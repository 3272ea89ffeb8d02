"""The names that people read instead of keys."""

from collections.abc import Mapping

from attacks.interface import AttackResult

__all__ = ["attack_title", "method_name", "plain"]

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

"""Text for people: numbers, settings and keys as words."""

import math
import re
from collections.abc import Mapping
from typing import Any

from apfed_attacks.interface import AttackResult

_EXPONENT_PADDING = re.compile(r"e(-?)[+]?0*")
_SIZE_UNITS = ("B", "kB", "MB", "GB", "TB")


def format_number(value: float, significant_digits: int = 3) -> str:
    """Return a number with `significant_digits` significant digits, and infinity as its sign."""
    return (
        "\u221e"
        if math.isinf(value)
        else _EXPONENT_PADDING.sub(r"e\1", f"{value:.{significant_digits}g}")
    )


def format_count(value: int) -> str:
    """Return a whole number with narrow spaces between thousands."""
    return f"{value:,}".replace(",", "\u202f")


def format_difference(value: float) -> str:
    """Return a difference with three digits and its sign."""
    return f"{value:+.3f}".replace("-", "\u2212")


def format_percent(share: float) -> str:
    """Return a share in per cent with one digit."""
    return f"{100 * share:.1f}\u202f%"


def format_size(value: float) -> str:
    """Return a number of bytes in the unit, B to TB, in which it is below 1000."""
    for unit in _SIZE_UNITS:
        if value < 1000 or unit == _SIZE_UNITS[-1]:
            digits = 0 if unit == "B" or value >= 100 else 1
            return f"{value:.{digits}f}\u202f{unit}"
        value /= 1000
    raise AssertionError("the last unit takes everything")


def format_duration(seconds: float) -> str:
    """Return seconds as 0.5 s, 42 s, 3 min 20 s or 2 h 5 min."""
    if seconds < 10:
        return f"{seconds:.1f}\u202fs"
    minutes, remainder = divmod(round(seconds), 60)
    if not minutes:
        return f"{remainder}\u202fs"
    if minutes < 60:
        return f"{minutes}\u202fmin {remainder}\u202fs"
    return f"{minutes // 60}\u202fh {minutes % 60}\u202fmin"


def format_key(key: str) -> str:
    """Return a key of settings or results as words."""
    return key.replace("_", " ").replace("-", " ")


def format_value(value: Any) -> str:
    """Return a setting's value in words; entries of lists and mappings are joined."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return format_number(value, 4)  # four digits, since settings may have them
    if isinstance(value, list | tuple):
        return ", ".join(map(format_value, value))
    if isinstance(value, Mapping):
        return "; ".join(f"{format_key(key)} {format_value(entry)}" for key, entry in value.items())
    return str(value)


def title_attack(result: AttackResult) -> str:
    """Return what an attack reads, of whom, and its name."""
    victim = f" of {result.victim}" if result.victim else ""
    return f"{result.target}{victim} by {format_key(result.attack)}"

"""How figures are written for people: units, thousands, infinity."""

import math
import re

__all__ = ["count", "duration", "epsilon", "model_epsilon", "number", "percent", "signed", "size"]

_SHORT = re.compile(r"e(-?)[+]?0*")
_STEPS = ("B", "kB", "MB", "GB", "TB")


def number(value: float, digits: int = 3) -> str:
    """Return a figure with this many significant digits."""
    return epsilon(value) if math.isinf(value) else _SHORT.sub(r"e\1", f"{value:.{digits}g}")


def count(value: int) -> str:
    """Return a count with thin spaces between thousands."""
    return f"{value:,}".replace(",", "\u202f")


def signed(value: float) -> str:
    """Return a difference with its sign and three decimals."""
    return f"{value:+.3f}".replace("-", "\u2212")


def percent(share: float) -> str:
    """Return a share of 1 as per cent with one decimal."""
    return f"{100 * share:.1f}\u202f%"


def size(value: float) -> str:
    """Return bytes in a decimal unit, as in 1.2 MB."""
    for unit in _STEPS:
        if value < 1000 or unit == _STEPS[-1]:
            digits = 0 if unit == "B" or value >= 100 else 1
            return f"{value:.{digits}f}\u202f{unit}"
        value /= 1000
    raise AssertionError("the last unit takes everything")


def duration(seconds: float) -> str:
    """Return seconds as 0.5 s, 42 s, 3 min 20 s or 2 h 5 min."""
    if seconds < 10:
        return f"{seconds:.1f}\u202fs"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}\u202fs"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}\u202fmin {rest}\u202fs"
    return f"{minutes // 60}\u202fh {minutes % 60}\u202fmin"


def epsilon(value: float) -> str:
    """Return a privacy loss; infinity means that nothing is promised."""
    return "\u221e" if math.isinf(value) else f"{value:.3g}"


def model_epsilon(value: float) -> str:
    """Return the privacy loss of a finished model, which is infinite where none is claimed."""
    return "not claimed" if math.isinf(value) else epsilon(value)

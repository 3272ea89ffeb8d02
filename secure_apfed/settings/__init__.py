"""The one way in which settings are declared: frozen, keyword-only, no unknown keys. Marks in the
metadata of a key say who decides it (`THE_ACTIVE`), and whom it protects (`protects`).

Settings are names and numbers: this package imports nothing that does the work, and a name is
looked up in its table where a `secure_apfed.config.Config` is made, which also checks that settings
fit each other. `secure_apfed.settings.run` puts all together. A value out of range or an unknown
key raises pydantic's ValidationError, which `secure_apfed.config.file` turns into a `ConfigError`
with file, key and nearest key.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict

__all__ = [
    "EACH_ALONE",
    "THE_ACTIVE",
    "DecidedBy",
    "FollowsFrom",
    "Protection",
    "Settings",
    "SilentPassive",
    "Unprotective",
    "did_you_mean",
    "protects",
    "unknown_name",
]

_MAX_SHOWN = 80
SilentPassive: TypeAlias = Literal["stop", "wait", "recover"]
"""Reaction of a run to a passive that falls silent; see `secure_apfed.contract.Contract`."""

Whom: TypeAlias = Literal["the passives", "the active", "everybody"]
"""Parties whose data the value of a settings key protects."""


@dataclass(frozen=True)
class DecidedBy:
    """A mark of a key that is not in the contract, as `Annotated[int, THE_ACTIVE]`: the party that
    decides it.
    """

    who: Literal["the active", "each party"]


THE_ACTIVE = DecidedBy("the active")
"""Mark of a key that affects other parties only by what the active sends them."""

EACH_ALONE = DecidedBy("each party")
"""Mark of a key of one party's own data, machine or speed."""


@dataclass(frozen=True, kw_only=True)
class Protection:
    """A mark of a settings key whose value decides how well some party's data is protected.

    Attributes:
        whom: the parties that it protects.
        less: which values protect less: a lower or a higher number, or another name
            (`order`).
        means: the consequence of less protection, in half a sentence.
        order: names from the most to the least protective; equally protective ones form a group.
        null: how null counts among departures: as this number, as the least or as the most.
        numbers: names of choices -> the number that each counts as.
        read: makes the value of the settings that hold the key; None: the key's own value.
    """

    whom: Whom
    less: Literal["lower", "higher", "other"]
    means: str
    order: tuple[tuple[Any, ...], ...] = ()
    null: float | Literal["least", "most"] = "least"
    numbers: Mapping[str, float] = field(default_factory=dict)
    read: Callable[[Any], Any] | None = None

    def compute_strength(self, value: Any) -> float:
        """Return how much a value protects, as a number that is higher for more protection.

        Unknown values protect least.
        """
        if self.less == "other":
            ranks = (-rank for rank, group in enumerate(self.order) if value in group)
            return next(ranks, -math.inf)
        if value is None and isinstance(self.null, str):
            return math.inf if self.null == "most" else -math.inf
        number = self._convert_to_number(self.null if value is None else value)
        return number if self.less == "lower" else -number

    def _convert_to_number(self, value: Any) -> float:
        """Return a value as a number: a name by `numbers`, a list or mapping by its length.

        An unknown name is NaN, which counts as less protective than any value.
        """
        if isinstance(value, str):
            return self.numbers.get(value, math.nan)
        if isinstance(value, Mapping | tuple | list):
            return float(len(value))
        return float(value)

    def is_less(self, value: Any, reference: Any) -> bool:
        """Return whether a value protects less than the reference; True if they cannot be
        compared.
        """
        # Not `<`, which is False if a strength is NaN.
        return not self.compute_strength(value) >= self.compute_strength(reference)


@dataclass(frozen=True, kw_only=True)
class Unprotective:
    """A mark of a settings key whose value has no influence on protection."""


@dataclass(frozen=True)
class FollowsFrom:
    """A mark of a key of the contract that follows from settings, which have marks of their own."""

    settings: tuple[str, ...]


def protects(
    whom: Whom | Literal["nobody"],
    *,
    lower: str | None = None,
    higher: str | None = None,
    other: str | None = None,
    order: Sequence[Any] = (),
    null: float | Literal["least", "most"] = "least",
    numbers: Mapping[str, float] = {},
    read: Callable[[Any], Any] | None = None,
) -> Protection | Unprotective:
    """Return the mark of a settings key whose value protects these parties, or nobody.

    Args:
        whom: the parties whose data the key's value protects.
        lower, higher, other: the consequence of a lower number, of a higher one, or of another name
            than the first; one of the three, and none for a key that protects nobody.
        order: with `other`, the names, the most protective first, equally protective ones as a
            tuple.
        null, numbers, read: see `Protection`.

    Examples:
        >>> mark = protects("the passives", lower="fewer rows hide each other")
        >>> mark.compute_strength(2) < mark.compute_strength(20)
        True
    """
    if whom == "nobody":
        return Unprotective()
    meanings: dict[Literal["lower", "higher", "other"], str | None] = {
        "lower": lower,
        "higher": higher,
        "other": other,
    }
    # Exactly one of the three is given.
    ((less, means),) = [(less, means) for less, means in meanings.items() if means is not None]
    return Protection(
        whom=whom,
        less=less,
        means=means,
        order=tuple(group if isinstance(group, tuple) else (group,) for group in order),
        null=null,
        numbers=numbers,
        read=read,
    )


class Settings(BaseModel):
    """Base of every settings class."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )

    def collect_terms(self) -> dict[str, Any]:
        """Return the settings that all parties sign, as plain values: all keys except those that
        one party decides (`DecidedBy`).

        A run of parties that differ in them does not start (`secure_apfed.exchange.agreement`).
        """
        terms = self.model_dump(mode="json")
        for name, declared in type(self).model_fields.items():
            value = getattr(self, name)
            if any(isinstance(mark, DecidedBy) for mark in declared.metadata):
                del terms[name]
            elif isinstance(value, Settings):
                terms[name] = value.collect_terms()
            elif isinstance(value, Mapping):
                # Settings by name, such as those of each passive.
                terms[name] |= {
                    key: section.collect_terms()
                    for key, section in value.items()
                    if isinstance(section, Settings)
                }
        return terms


def did_you_mean(name: str, names: Iterable[str], *, cutoff: float = 0.5) -> str:
    """Return "did you mean 'x'?" with the known name that is closest; "" if none is close.

    `names`: the known names. `cutoff`: least similarity from 0 to 1, as of `difflib`.
    """
    close_names = get_close_matches(name, list(names), n=1, cutoff=cutoff)
    return f"did you mean {close_names[0]!r}?" if close_names else ""


def unknown_name(name: str, names: Iterable[str]) -> str:
    """Return the error's text for a name that is not among the known `names`: with the nearest one,
    if any is close, and all of them.
    """
    known_names = list(names)
    shortened = name[:_MAX_SHOWN]
    guess = did_you_mean(shortened, known_names)
    introduction = f"{guess} Known" if guess else "known"
    return f"{shortened!r} is unknown; {introduction} are {', '.join(known_names)}"

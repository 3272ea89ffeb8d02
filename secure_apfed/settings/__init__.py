"""The one way in which settings are declared: frozen, keyword-only, no unknown keys. Marks in the
metadata of a key say who decides it (`THE_ACTIVE`), and whom it protects (`protects`).

Settings are names and numbers: this package imports nothing that does the work, and a name is
looked up in its table where a `secure_apfed.config.Config` is made, which also checks that settings
fit each other. `secure_apfed.settings.run` puts all together. Sections of settings that other
modules declare are loaded when their names are first used. A value out of range or an unknown
key raises pydantic's ValidationError, which `secure_apfed.config.file` turns into a `ConfigError`
with file, key and nearest key.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict

from apfed_protocols.lazy_names import give_names

if TYPE_CHECKING:
    from secure_apfed.settings.method import (
        FormSettings,
        MethodSettings,
    )
    from secure_apfed.settings.run import (
        RunSettings,
        TranscriptSettings,
    )
    from secure_apfed.settings.training import (
        BlackBoxSettings,
        ClusteringSettings,
        ContrastiveSettings,
        ModelSettings,
        NoiseSettings,
        ObjectiveSettings,
        OwnLossSettings,
        PassiveSettings,
        ReconstructionSettings,
        SumSettings,
        TrainSettings,
    )

__all__ = [
    "EACH_ALONE",
    "THE_ACTIVE",
    "BlackBoxSettings",
    "ClusteringSettings",
    "ContrastiveSettings",
    "DecidedBy",
    "FollowsFrom",
    "FormSettings",
    "MethodSettings",
    "ModelSettings",
    "NoProtection",
    "NoiseSettings",
    "ObjectiveSettings",
    "OwnLossSettings",
    "PassiveSettings",
    "Protection",
    "ReconstructionSettings",
    "RunSettings",
    "Settings",
    "SilentPassive",
    "SumSettings",
    "TrainSettings",
    "TranscriptSettings",
    "describe_unknown_name",
    "protects",
    "suggest_name",
]

if not TYPE_CHECKING:  # type checkers read the imports above
    __getattr__, __dir__ = give_names(
        __name__,
        __all__,
        {
            "secure_apfed.settings.method": (
                "FormSettings",
                "MethodSettings",
            ),
            "secure_apfed.settings.run": (
                "RunSettings",
                "TranscriptSettings",
            ),
            "secure_apfed.settings.training": (
                "BlackBoxSettings",
                "ClusteringSettings",
                "ContrastiveSettings",
                "ModelSettings",
                "NoiseSettings",
                "ObjectiveSettings",
                "OwnLossSettings",
                "PassiveSettings",
                "ReconstructionSettings",
                "SumSettings",
                "TrainSettings",
            ),
        },
    )

_MAX_NAME_CHARACTERS = 80
SilentPassive: TypeAlias = Literal["stop", "wait", "recover"]
"""Reaction of a run to a passive that falls silent; see `secure_apfed.contract.Contract`."""

ProtectedParties: TypeAlias = Literal["the passives", "the active", "everybody"]
"""Parties whose data the value of a settings key protects."""


@dataclass(frozen=True)
class DecidedBy:
    """A mark of a key that is not in the contract, as `Annotated[int, THE_ACTIVE]`: the party that
    decides it.
    """

    decider: Literal["the active", "each party"]


THE_ACTIVE = DecidedBy("the active")
"""Mark of a key that affects other parties only by what the active sends them."""

EACH_ALONE = DecidedBy("each party")
"""Mark of a key of one party's own data, machine or speed."""


@dataclass(frozen=True, kw_only=True)
class Protection:
    """A mark of a settings key whose value decides how well some party's data is protected.

    Attributes:
        protected_parties: the parties that it protects.
        weaker_values: which values protect less: a lower or a higher number, or another name
            (`names_by_strength`).
        consequence: the consequence of less protection, in half a sentence.
        names_by_strength: names from the most to the least protective; equally protective ones form
            a group.
        null_strength: how null counts among departures: as this number, as the least or as the
            most.
        number_by_name: names of choices -> the number that each counts as.
        read_value: makes the value of the settings that hold the key; None: the key's own value.
    """

    protected_parties: ProtectedParties
    weaker_values: Literal["lower", "higher", "other"]
    consequence: str
    names_by_strength: tuple[tuple[Any, ...], ...] = ()
    null_strength: float | Literal["least", "most"] = "least"
    number_by_name: Mapping[str, float] = field(default_factory=dict)
    read_value: Callable[[Any], Any] | None = None

    def compute_strength(self, value: Any) -> float:
        """Return how much a value protects, as a number that is higher for more protection.

        Unknown values protect least.
        """
        if self.weaker_values == "other":
            ranks = (-rank for rank, group in enumerate(self.names_by_strength) if value in group)
            return next(ranks, -math.inf)
        if value is None and isinstance(self.null_strength, str):
            return math.inf if self.null_strength == "most" else -math.inf
        number = self._convert_to_number(self.null_strength if value is None else value)
        return number if self.weaker_values == "lower" else -number

    def _convert_to_number(self, value: Any) -> float:
        """Return a value as a number: a name by `numbers`, a list or mapping by its length.

        An unknown name is NaN, which counts as less protective than any value.
        """
        if isinstance(value, str):
            return self.number_by_name.get(value, math.nan)
        if isinstance(value, Mapping | tuple | list):
            return float(len(value))
        return float(value)

    def is_weaker(self, value: Any, reference: Any) -> bool:
        """Return whether a value protects less than the reference; True if they cannot be
        compared.
        """
        # Not `<`, which is False if a strength is NaN.
        return not self.compute_strength(value) >= self.compute_strength(reference)


@dataclass(frozen=True, kw_only=True)
class NoProtection:
    """A mark of a settings key whose value has no influence on protection."""


@dataclass(frozen=True)
class FollowsFrom:
    """A mark of a key of the contract that follows from settings, which have marks of their own."""

    settings: tuple[str, ...]


def protects(
    protected_parties: ProtectedParties | Literal["nobody"],
    *,
    lower: str | None = None,
    higher: str | None = None,
    other: str | None = None,
    order: Sequence[Any] = (),
    null: float | Literal["least", "most"] = "least",
    numbers: Mapping[str, float] = {},
    read: Callable[[Any], Any] | None = None,
) -> Protection | NoProtection:
    """Return the mark of a settings key whose value protects these parties, or nobody.

    Args:
        protected_parties: the parties whose data the key's value protects.
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
    if protected_parties == "nobody":
        return NoProtection()
    consequence_by_weaker_values: dict[Literal["lower", "higher", "other"], str | None] = {
        "lower": lower,
        "higher": higher,
        "other": other,
    }
    # Exactly one of the three is given.
    ((less, means),) = [
        (less, means) for less, means in consequence_by_weaker_values.items() if means is not None
    ]
    return Protection(
        protected_parties=protected_parties,
        weaker_values=less,
        consequence=means,
        names_by_strength=tuple(group if isinstance(group, tuple) else (group,) for group in order),
        null_strength=null,
        number_by_name=numbers,
        read_value=read,
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


def suggest_name(name: str, names: Iterable[str], *, cutoff: float = 0.5) -> str:
    """Return "did you mean 'x'?" with the known name that is closest; "" if none is close.

    `names`: the known names. `cutoff`: least similarity from 0 to 1, as of `difflib`.
    """
    close_names = get_close_matches(name, list(names), n=1, cutoff=cutoff)
    return f"did you mean {close_names[0]!r}?" if close_names else ""


def describe_unknown_name(name: str, names: Iterable[str]) -> str:
    """Return the error's text for a name that is not among the known `names`: with the nearest one,
    if any is close, and all of them.
    """
    known_names = list(names)
    shortened = name[:_MAX_NAME_CHARACTERS]
    guess = suggest_name(shortened, known_names)
    introduction = f"{guess} Known" if guess else "known"
    return f"{shortened!r} is unknown; {introduction} are {', '.join(known_names)}"

"""The one way in which settings are declared: frozen, keyword-only, no unknown keys.

Settings are names and numbers: this package imports nothing that does the work, and a name is
looked up in its table where a `secure_apfed.config.Config` is made, which also checks that settings
fit each other. `secure_apfed.settings.run` puts all together. A value out of range or an unknown
key raises pydantic's ValidationError, which `secure_apfed.config.file` turns into a `ConfigError`
with file, key and nearest key.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict

__all__ = [
    "EACH_ALONE",
    "THE_ACTIVE",
    "DecidedBy",
    "Settings",
    "SilentPassive",
    "did_you_mean",
    "unknown_name",
]

_MAX_SHOWN = 80
SilentPassive: TypeAlias = Literal["stop", "wait", "recover"]
"""Reaction of a run to a passive that falls silent; see `secure_apfed.contract.Contract`."""


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
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if any(isinstance(mark, DecidedBy) for mark in field.metadata):
                del terms[name]
            elif isinstance(value, Settings):
                terms[name] = value.collect_terms()
            elif isinstance(value, Mapping):
                terms[name] |= {
                    key: part.collect_terms()
                    for key, part in value.items()
                    if isinstance(part, Settings)
                }
        return terms


def did_you_mean(name: str, names: Iterable[str], *, cutoff: float = 0.5) -> str:
    """Return "did you mean 'x'?" with the known name that is closest; "" if none is close."""
    close = get_close_matches(name, list(names), n=1, cutoff=cutoff)
    return f"did you mean {close[0]!r}?" if close else ""


def unknown_name(name: str, names: Iterable[str]) -> str:
    """Return an error text for a name that is not among these, with the nearest one and all of
    them.
    """
    names = list(names)
    shortened = name[:_MAX_SHOWN]
    guess = did_you_mean(shortened, names)
    known = f"{guess} Known" if guess else "known"
    return f"{shortened!r} is unknown; {known} are {', '.join(names)}"

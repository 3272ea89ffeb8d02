"""What a report asks of a method, by its name: the one place in the report where names stand."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

__all__ = ["MethodFacts", "method_facts"]


@dataclass(frozen=True, kw_only=True)
class MethodFacts:
    """What a method does.

    Attributes:
        title: as the papers call it.
        predicts_alone: whether the finished model asks nothing of the passives.
        has_passives: False: the active trains alone.
        representations_from: who sends them.
        sums_gradients: whether passives contribute gradients to a secure sum.
        returns_gradients: whether the active returns the gradient on what a passive sent.
        trains_privately, takes_pairwise: whether DP-SGD and pairwise alignment fit it.
    """

    title: str
    predicts_alone: bool
    has_passives: bool
    representations_from: Literal["active", "passives"] | None
    sums_gradients: bool
    returns_gradients: bool
    trains_privately: bool
    takes_pairwise: bool


_APFED = MethodFacts(
    title="APFed", predicts_alone=True, has_passives=True, representations_from="active",
    sums_gradients=True, returns_gradients=False, trains_privately=True, takes_pairwise=True,
)  # fmt: skip
_METHODS: Mapping[str, MethodFacts] = {
    "apfed": _APFED,
    "apfed_r": replace(_APFED, title="APFed-R"),
    "apfed_c": replace(_APFED, title="APFed-C"),
    "tvfl": MethodFacts(
        title="TVFL, all views", predicts_alone=False, has_passives=True,
        representations_from="passives", sums_gradients=False, returns_gradients=True,
        trains_privately=False, takes_pairwise=False,
    ),
    "single_view": MethodFacts(
        title="SingleVL", predicts_alone=True, has_passives=False, representations_from=None,
        sums_gradients=False, returns_gradients=False, trains_privately=True, takes_pairwise=False,
    ),
}  # fmt: skip


def method_facts(name: str) -> MethodFacts:
    """Return what the method of a config does."""
    return _METHODS[name]

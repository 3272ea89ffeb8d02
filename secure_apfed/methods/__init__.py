"""Methods: parties that exchange envelopes in protocol order.

A new method is one file, which declares its facts beside its code, and one line in the table.
Outside of this package nobody asks for a method's name: whoever has a run's configuration asks
`config.facts`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from secure_apfed.data import VerticalData
from secure_apfed.facts import MethodFacts
from secure_apfed.methods.accounts import noise_keys
from secure_apfed.methods.apfed import APFED, APFED_C, APFED_R, SINGLE_VIEW, Apfed
from secure_apfed.methods.apfed_opening import open_apfed, open_single_view
from secure_apfed.methods.method import Method, PartyTensors, Start, begin_epoch
from secure_apfed.methods.tvfl import TVFL, Tvfl, open_tvfl
from secure_apfed.settings.run import RunSettings

__all__ = [
    "METHODS",
    "Apfed",
    "Method",
    "MethodEntry",
    "PartyTensors",
    "Start",
    "Tvfl",
    "begin_epoch",
    "noise_keys",
    "open_method",
]


@dataclass(frozen=True)
class MethodEntry:
    """A method of the table: what others may know of it, and how a session of it begins."""

    facts: MethodFacts
    open: Callable[[Start], Method]


METHODS: Mapping[str, MethodEntry] = {
    "apfed": MethodEntry(APFED, open_apfed),
    "apfed_r": MethodEntry(APFED_R, open_apfed),
    "apfed_c": MethodEntry(APFED_C, open_apfed),
    "tvfl": MethodEntry(TVFL, open_tvfl),
    "single_view": MethodEntry(SINGLE_VIEW, open_single_view),
}


def open_method(
    config: RunSettings, data: VerticalData, *, alignment: Mapping[str, Tensor] | None = None
) -> Method:
    """Open the config's method with new noise keys, its ledgers in memory.

    Args:
        config: of the run.
        data: of the run.
        alignment: of an earlier session with the same data; None: intersect now.
    """
    keys = noise_keys(config, data)
    start = Start(config=config, data=data, noise_keys=keys, alignment=alignment)
    return METHODS[config.method].open(start)

"""Methods: parties that exchange envelopes in protocol order.

A new method is one file and one line in the table.
"""

from collections.abc import Callable, Mapping

from torch import Tensor

from secure_apfed.config import Config
from secure_apfed.data import VerticalData
from secure_apfed.methods.accounts import noise_keys
from secure_apfed.methods.apfed import Apfed
from secure_apfed.methods.apfed_opening import open_apfed, open_single_view
from secure_apfed.methods.method import Method, PartyTensors, Start, begin_epoch
from secure_apfed.methods.tvfl import Tvfl, open_tvfl

__all__ = [
    "METHODS",
    "Apfed",
    "Method",
    "PartyTensors",
    "Start",
    "Tvfl",
    "begin_epoch",
    "noise_keys",
    "open_method",
]

METHODS: Mapping[str, Callable[[Start], Method]] = {
    "apfed": open_apfed,
    "apfed_r": open_apfed,
    "apfed_c": open_apfed,
    "tvfl": open_tvfl,
    "single_view": open_single_view,
}


def open_method(
    config: Config, data: VerticalData, *, alignment: Mapping[str, Tensor] | None = None
) -> Method:
    """Open the config's method with new noise keys, its ledgers in memory.

    Args:
        config: of the run.
        data: of the run.
        alignment: of an earlier session with the same data; None: intersect now.
    """
    keys = noise_keys(config, data)
    start = Start(config=config, data=data, noise_keys=keys, alignment=alignment)
    return METHODS[config.method](start)

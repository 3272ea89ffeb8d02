"""Methods: parties that exchange envelopes in protocol order.

A new method is one file and one line in the table.
"""

from collections.abc import Callable, Mapping

from secure_apfed.methods.apfed import Apfed, open_apfed, open_single_view
from secure_apfed.methods.method import Method, PartyTensors, Start
from secure_apfed.methods.terms import noise_key
from secure_apfed.methods.tvfl import Tvfl, open_tvfl

__all__ = ["METHODS", "Apfed", "Method", "PartyTensors", "Start", "Tvfl", "noise_key"]

METHODS: Mapping[str, Callable[[Start], Method]] = {
    "apfed": open_apfed,
    "apfed_r": open_apfed,
    "apfed_c": open_apfed,
    "tvfl": open_tvfl,
    "single_view": open_single_view,
}

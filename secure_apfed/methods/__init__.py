"""Methods: facts and roles, one script a party.

A new method is one file, which declares its facts beside its code, and one line in the table.
Outside of this package nobody asks for a method's name: whoever has a run's configuration asks
`config.facts`.
"""

from collections.abc import Mapping

from torch import Tensor

from secure_apfed.data import VerticalData
from secure_apfed.methods.accounts import noise_keys
from secure_apfed.methods.apfed import APFED, APFED_C, APFED_R, Apfed, SingleView
from secure_apfed.methods.method import Course, Helper, Learner, Method, Own
from secure_apfed.methods.session import PartyTensors, Session, Start
from secure_apfed.methods.tvfl import Tvfl
from secure_apfed.settings.run import RunSettings

__all__ = [
    "METHODS",
    "Apfed",
    "Course",
    "Helper",
    "Learner",
    "Method",
    "Own",
    "PartyTensors",
    "Session",
    "SingleView",
    "Start",
    "Tvfl",
    "noise_keys",
    "open_session",
]

METHODS: Mapping[str, Method] = {
    "apfed": Apfed("apfed", APFED),
    "apfed_r": Apfed("apfed_r", APFED_R),
    "apfed_c": Apfed("apfed_c", APFED_C),
    "tvfl": Tvfl(),
    "single_view": SingleView(),
}


def open_session(
    config: RunSettings, data: VerticalData, *, alignment: Mapping[str, Tensor] | None = None
) -> Session:
    """Open a session of the config's method with new noise keys, its ledgers in memory.

    Args:
        config: of the run.
        data: of the run.
        alignment: of an earlier session with the same data; None: intersect now.
    """
    keys = noise_keys(config, data)
    start = Start(config=config, data=data, noise_keys=keys, alignment=alignment)
    return Session(METHODS[config.method], start)

"""Attacks by which an adversary infers data from the messages that it saw, in a run, a training or
a loop of your own.

It exports the names of `apfed_attacks`, and functions that load the messages of a stored run for
further attacks.
"""

from typing import TYPE_CHECKING

from apfed_protocols.lazy_names import give_names

if TYPE_CHECKING:
    from apfed_attacks import ATTACKS, AdversaryView, AttackError, Recorder, evaluate
    from secure_apfed.interfaces.training import load_training_recording
    from secure_apfed.runs.outcome import load_recording

__all__ = [
    "ATTACKS",
    "AdversaryView",
    "AttackError",
    "Recorder",
    "evaluate",
    "load_recording",
    "load_training_recording",
]

if not TYPE_CHECKING:  # type checkers read the imports above
    __getattr__, __dir__ = give_names(
        __name__,
        __all__,
        {
            "apfed_attacks": ("ATTACKS", "AdversaryView", "AttackError", "Recorder", "evaluate"),
            "secure_apfed.interfaces.training": ("load_training_recording",),
            "secure_apfed.runs.outcome": ("load_recording",),
        },
    )

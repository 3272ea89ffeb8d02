"""Attacks: what an adversary can do with what it saw.

`apfed_attacks.run.run_attacks` runs the configured attacks on a finished run. `evaluate` runs what
applies to a training loop that is not ours; a `Recorder` collects its arrays. Each name is loaded
when it is first used, so that importing one attack does not load the others.
"""

from typing import TYPE_CHECKING

from apfed_protocols.lazy_names import give_names

if TYPE_CHECKING:
    __version__: str
    from apfed_attacks.foreign import evaluate
    from apfed_attacks.recorder import Recorder
    from apfed_attacks.table import ATTACKS
    from apfed_attacks.view import AdversaryView, AttackError

__all__ = ["ATTACKS", "AdversaryView", "AttackError", "Recorder", "evaluate"]

if not TYPE_CHECKING:  # type checkers read the imports above
    __getattr__, __dir__ = give_names(
        __name__,
        __all__,
        {
            "apfed_attacks.foreign": ("evaluate",),
            "apfed_attacks.recorder": ("Recorder",),
            "apfed_attacks.table": ("ATTACKS",),
            "apfed_attacks.view": ("AdversaryView", "AttackError"),
        },
        distribution="secure-apfed",
    )

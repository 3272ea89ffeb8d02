"""Attacks: what an adversary can do with what it saw.

`apfed_attacks.run.run_attacks` runs the configured attacks on a finished run. `evaluate` runs what
applies to a training loop that is not ours; a `Recorder` collects its arrays. Each name is loaded
when it is first used, so that importing one attack does not load the others.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from apfed_attacks.foreign import evaluate
    from apfed_attacks.recorder import Recorder
    from apfed_attacks.table import ATTACKS
    from apfed_attacks.view import AdversaryView, AttackError

__all__ = ["ATTACKS", "AdversaryView", "AttackError", "Recorder", "evaluate"]

_HOMES = {
    "ATTACKS": "table",
    **dict.fromkeys(("AdversaryView", "AttackError"), "view"),
    "Recorder": "recorder",
    "evaluate": "foreign",
}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first asked for."""
    if name == "__version__":
        return version("secure-apfed")
    if name not in _HOMES:
        raise AttributeError(f"apfed_attacks has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"apfed_attacks.{_HOMES[name]}"), name)

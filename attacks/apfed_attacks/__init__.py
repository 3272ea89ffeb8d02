"""Attacks: what an adversary can do with what it saw.

`apfed_attacks.run.mount` runs the configured ones on a finished run. `ATTACKS`, the table of all,
is loaded when it is first used, so that importing one attack does not load the others.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from apfed_attacks.table import ATTACKS

__all__ = ["ATTACKS"]


def __getattr__(name: str) -> Any:
    """Load the table when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"apfed_attacks has no {name!r}; it has ATTACKS")
    from apfed_attacks.table import ATTACKS

    return ATTACKS

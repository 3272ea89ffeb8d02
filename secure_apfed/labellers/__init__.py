"""Labellers: how one party labels all aligned rows from its own features and a few labels.

A new one is one class and one line in the table; see docs/extend.md. What their votes cost
stands in `secure_apfed.labellers.guarantee`.
"""

from collections.abc import Mapping, Sequence

from secure_apfed.errors import ConfigError
from secure_apfed.labellers.kinds import (
    MOST_JUDGES,
    Labeller,
    LinearLabeller,
    Logistic,
    PrivateLogistic,
    Ridge,
    Spreading,
    harden_votes,
)
from secure_apfed.settings import unknown_name

__all__ = [
    "LABELLERS",
    "MOST_JUDGES",
    "Labeller",
    "LinearLabeller",
    "Logistic",
    "PrivateLogistic",
    "Ridge",
    "Spreading",
    "harden_votes",
    "labeller_for_oneself",
    "make_labeller",
]

# Each takes its own settings, all of which have defaults but what noise takes.
LABELLERS: Mapping[str, type[Labeller]] = {
    labeller.name: labeller for labeller in (Spreading, Logistic, Ridge, PrivateLogistic)
}


def make_labeller(
    name: str,
    *,
    epsilon: float | None = None,
    delta: float = 1e-5,
    key: bytes | None = None,
    seeded: bool = False,
) -> Labeller:
    """Build a labeller with its defaults; what else is given is for `PrivateLogistic`."""
    if name not in LABELLERS:
        raise ConfigError(f"no labeller {name!r}; there are {', '.join(LABELLERS)}")
    kind = LABELLERS[name]
    if not issubclass(kind, PrivateLogistic):
        if epsilon is not None:
            raise ConfigError(
                f"the labeller {name} adds no noise to its weights and takes no epsilon for them; "
                f"{PrivateLogistic.name} does"
            )
        return kind()
    if epsilon is None or key is None:
        raise ConfigError(f"the labeller {name} needs an epsilon for its weights, and a key")
    return kind(epsilon=epsilon, delta=delta, key=key, seeded=seeded)


def labeller_for_oneself(name: str, *, also: Sequence[str] = ()) -> str:
    """Return the name of a labeller for one's own use, which needs no noise, or one of `also`.

    Raises ValueError: another name.
    """
    known = (*also, *(other for other in LABELLERS if other != PrivateLogistic.name))
    if name not in known:
        raise ValueError(unknown_name(name, known))
    return name

"""Labellers: rules by which a passive votes on labels, learnt from its own features and a few
labels. A vote is one row of class scores, (K,) for K classes, with L1 norm at most 1; a row of
zeros is no vote.

A new one is one class and one line in the table; see docs/extend.md. The privacy cost of their
votes is computed in `secure_apfed.labellers.guarantee`.
"""

from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator

from secure_apfed.errors import ConfigError
from secure_apfed.labellers.guarantee import VoteMechanism
from secure_apfed.labellers.kinds import (
    MAX_VALIDATION_ROWS,
    Labeller,
    LinearLabeller,
    Logistic,
    PrivateLogistic,
    Ridge,
    Spreading,
    harden_votes,
)
from secure_apfed.labellers.voting import Voter
from secure_apfed.settings import describe_unknown_name, protects
from secure_apfed.settings.plugins import IMPORT_PATH, PluginTable, require_class

__all__ = [
    "LABELLERS",
    "MAX_VALIDATION_ROWS",
    "Labeller",
    "LabellerName",
    "LinearLabeller",
    "Logistic",
    "PrivateLogistic",
    "Ridge",
    "Spreading",
    "VoteMechanism",
    "Voter",
    "harden_votes",
    "make_labeller",
    "require_weights_epsilon",
    "take_labeller",
    "take_labeller_without_noise",
]


def _require_labeller(candidate: Any, import_path: str) -> type[Labeller]:
    """Return a plug-in's imported object as a labeller class.

    `import_path`: where it was imported from; the table passes it, and it is not needed here.
    Raises TypeError: the object is no labeller class.
    """
    del import_path
    labeller_class: type[Labeller] = require_class(candidate, Labeller)
    return labeller_class


# Settings of a labeller have defaults, except those of noise.
LABELLERS: PluginTable[type[Labeller]] = PluginTable(
    {labeller.name: labeller for labeller in (Spreading, Logistic, Ridge, PrivateLogistic)},
    plugin_kind="labellers",
    make_entry=_require_labeller,
)


def take_labeller(name: str) -> str:
    """Return the table key of a built-in or plug-in labeller.

    Raises ValueError (as validators of settings must): no labeller has this name.
    """
    try:
        return LABELLERS.import_entry(name, setting="labeller")
    except ConfigError as error:
        raise ValueError(str(error)) from error


LabellerName: TypeAlias = Annotated[str, AfterValidator(take_labeller), protects("nobody")]
"""The type of a settings key that names a labeller."""


def require_weights_epsilon(name: str, epsilon: float | None) -> None:
    """Refuse an epsilon for noisy weights that does not fit the labeller.

    A labeller with noise on its weights needs one; others take none. `name`: the labeller's key in
    `LABELLERS`. Raises ValueError: its text names the settings key.
    """
    needs_epsilon = name == PrivateLogistic.name
    if (epsilon is not None) is not needs_epsilon:
        raise ValueError(
            f"weights_epsilon: it is for {PrivateLogistic.name}, which needs it; got {epsilon} for "
            f"{name}"
        )


def make_labeller(
    name: str,
    *,
    epsilon: float | None = None,
    delta: float = 1e-5,
    key: bytes | None = None,
    is_reproducible: bool = False,
) -> Labeller:
    """Build the labeller of this name with its defaults.

    The arguments besides `name` are for `PrivateLogistic`, which adds noise to its weights.

    Args:
        name: a key of `LABELLERS`.
        epsilon, delta: privacy cost of the noisy weights; epsilon None: there is no noise.
        key: 32 secret bytes for the noise.
        is_reproducible: whether the key is derived from the run's seed, as in simulations.

    Raises ConfigError: the name is unknown, or the labeller needs noise settings that are missing,
    or takes none.
    """
    if name not in LABELLERS:
        raise ConfigError(f"no labeller {name!r}; there are {', '.join(LABELLERS)}")
    labeller_class = LABELLERS[name]
    if not issubclass(labeller_class, PrivateLogistic):
        if epsilon is not None:
            raise ConfigError(
                f"the labeller {name} adds no noise to its weights and takes no epsilon for them; "
                f"{PrivateLogistic.name} does"
            )
        return labeller_class()
    if epsilon is None or key is None:
        raise ConfigError(f"the labeller {name} needs an epsilon for its weights, and a key")
    return labeller_class(epsilon=epsilon, delta=delta, key=key, is_reproducible=is_reproducible)


def take_labeller_without_noise(name: str, *, also: Sequence[str] = ()) -> str:
    """Return the table key of a labeller without noise.

    It serves settings of a labeller that the active uses on its own rows: nothing is sent, so no
    noise is needed. `also`: names beyond the table's that the setting accepts; they are returned
    unchanged. Raises ValueError: another name.
    """
    if name in also:
        return name
    without_noise = [other for other in LABELLERS.list_names() if other != PrivateLogistic.name]
    known = (*also, *without_noise)
    if name not in known and not IMPORT_PATH.fullmatch(name):
        raise ValueError(describe_unknown_name(name, known))
    return take_labeller(name)

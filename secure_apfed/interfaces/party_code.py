"""A party's own modules, losses and optimizers, as the training loop takes them."""

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from secure_apfed.errors import ConfigError
from secure_apfed.interfaces.parties import Active, Contrastive, Passive, Reconstruction
from secure_apfed.learning.descent import MakeOptimizer, OwnSteps
from secure_apfed.learning.own_code import OwnCode

OPTIMIZER_ARGUMENTS: Mapping[str, str] = {
    "learning_rate": "lr",
    "weight_decay": "weight_decay",
    "momentum": "momentum",
}
"""Arguments of torch's optimizers by the setting of `train` that they stand for."""


def set_rates(
    make: MakeOptimizer | None, rates: Mapping[str, float], *, party: str = ""
) -> MakeOptimizer | None:
    """Return an optimizer's function with the rates that `train` sets.

    `party`: name of the party whose own optimizer it is, which keeps rates that its function does
    not take; empty: the optimizer of all parties. `make`: the optimizer's function; None: the
    default optimizer.

    Raises:
        ConfigError: the function of all takes no such rate, or has one; names both.
    """
    if make is None or not rates or not callable(make):
        return make
    try:
        takes = set(inspect.signature(make).parameters)
    except (TypeError, ValueError):  # of a builtin: it names none
        takes = set()
    if isinstance(make, functools.partial):
        takes -= make.keywords.keys()
    taken = {
        OPTIMIZER_ARGUMENTS[key]: rate
        for key, rate in rates.items()
        if OPTIMIZER_ARGUMENTS[key] in takes
    }
    for key in rates:
        if OPTIMIZER_ARGUMENTS[key] not in taken and not party:
            rate = rates.get("learning_rate", 0.001)
            raise ConfigError(
                f"optimizer= is code of your own that has its own {OPTIMIZER_ARGUMENTS[key]}, or "
                f"takes none, and train={{{key!r}: {rates[key]}}} would be ignored; leave one out, "
                f"or say optimizer=functools.partial(torch.optim.AdamW, lr={rate})"
            )
    bound: MakeOptimizer = functools.partial(make, **taken) if taken else make
    return bound


def make_code(party: Active | Passive, shared: OwnSteps, rates: Mapping[str, float]) -> OwnCode:
    """Return what a party brings of its own.

    `shared`: optimizer and scheduler of parties without their own. `rates`: those that `train`
    sets, which a party's own optimizer takes if it can.

    Raises ConfigError: a part is neither a module nor a function; names the party.
    """
    parts: dict[str, Any] = {
        "encoder": party.encoder,
        "optimizer": set_rates(party.optimizer, rates, party=party.name) or shared.optimizer,
        "scheduler": party.scheduler or shared.scheduler,
        "scheduler_every": shared.every,
    }
    if isinstance(party, Active):
        parts |= {"head": party.head, "projection": party.projection}
    elif party.gradient is not None:
        parts = {"gradient": party.gradient}
    elif isinstance(party.loss, Reconstruction):
        parts["decoder"] = party.loss.decoder
    elif isinstance(party.loss, Contrastive):
        parts["encoder"] = party.loss.encoder or party.encoder
    else:
        parts["objective"] = party.loss
    try:
        return OwnCode(**parts)
    except ConfigError as error:
        raise ConfigError(f"{party.name}: {error}") from error

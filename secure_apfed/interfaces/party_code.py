"""A party's own modules, losses and optimizers, as the training loop takes them."""

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from secure_apfed.errors import ConfigError
from secure_apfed.interfaces.parties import Active, Contrastive, Passive, Reconstruction
from secure_apfed.learning.descent import MakeOptimizer, OwnOptimization
from secure_apfed.learning.own_code import UserFunctions

OPTIMIZER_ARGUMENTS: Mapping[str, str] = {
    "learning_rate": "lr",
    "weight_decay": "weight_decay",
    "momentum": "momentum",
}
"""Settings of the section `train` -> arguments of torch's optimizers with the same meaning."""


def set_rates(
    make: MakeOptimizer | None, rates: Mapping[str, float], *, party: str = ""
) -> MakeOptimizer | None:
    """Return a function that makes an optimizer with the rates that the settings of `train` give.

    A rate is passed on only if the function takes it and has not bound it already
    (`functools.partial`).

    Args:
        make: function that makes the optimizer; None: the default optimizer.
        rates: learning rate, weight decay and momentum in the section `train`, by key.
        party: name of the party whose own optimizer it is; rates that its function does not take
            are then left out. Empty: the optimizer is for all parties, and must take all rates.

    Raises ConfigError: the function for all parties does not take a rate, or has bound it.
    """
    if make is None or not rates or not callable(make):
        return make
    try:
        open_arguments = set(inspect.signature(make).parameters)
    except (TypeError, ValueError):  # a builtin function has no signature
        open_arguments = set()
    if isinstance(make, functools.partial):
        open_arguments -= make.keywords.keys()
    bound_rates = {
        OPTIMIZER_ARGUMENTS[key]: rate
        for key, rate in rates.items()
        if OPTIMIZER_ARGUMENTS[key] in open_arguments
    }
    for key in rates:
        if OPTIMIZER_ARGUMENTS[key] not in bound_rates and not party:
            rate = rates.get("learning_rate", 0.001)
            raise ConfigError(
                f"optimizer= is code of your own that has its own {OPTIMIZER_ARGUMENTS[key]}, or "
                f"takes none, and train={{{key!r}: {rates[key]}}} would be ignored; leave one out, "
                f"or say optimizer=functools.partial(torch.optim.AdamW, lr={rate})"
            )
    bound: MakeOptimizer = functools.partial(make, **bound_rates) if bound_rates else make
    return bound


def make_code(
    party: Active | Passive, shared: OwnOptimization, rates: Mapping[str, float]
) -> UserFunctions:
    """Return a party's own modules, loss, optimizer and scheduler.

    Args:
        party: the party, as the user passed it.
        shared: optimizer and scheduler of parties that have none of their own.
        rates: learning rate, weight decay and momentum in the section `train`, by key; a party's
            own optimizer gets those that it takes.

    Raises ConfigError: one of these is neither a module nor a function; the error names the party.
    """
    fields: dict[str, Any] = {
        "encoder": party.encoder,
        "optimizer": set_rates(party.optimizer, rates, party=party.name) or shared.optimizer,
        "scheduler": party.scheduler or shared.scheduler,
        "scheduler_every": shared.scheduler_interval,
    }
    if isinstance(party, Active):
        fields |= {"head": party.head, "projection": party.projection}
    elif party.gradient is not None:
        fields = {"gradient": party.gradient}  # a black box trains itself
    elif isinstance(party.loss, Reconstruction):
        fields["decoder"] = party.loss.decoder
    elif isinstance(party.loss, Contrastive):
        fields["encoder"] = party.loss.encoder or party.encoder
    else:
        fields["objective"] = party.loss
    try:
        return UserFunctions(**fields)
    except ConfigError as error:
        raise ConfigError(f"{party.name}: {error}") from error

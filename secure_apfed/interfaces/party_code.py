"""A party's own modules, losses and optimizers, as the training loop takes them."""

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from secure_apfed.errors import ConfigError
from secure_apfed.interfaces.parties import Active, Contrastive, Passive, Reconstruction
from secure_apfed.learning.descent import MakeOptimizer, OwnOptimization
from secure_apfed.learning.own_code import UserFunctions

OPTIMIZER_ARGUMENT_BY_SETTING: Mapping[str, str] = {
    "learning_rate": "lr",
    "weight_decay": "weight_decay",
    "momentum": "momentum",
}
"""Settings of the section `train` -> arguments of torch's optimizers with the same meaning."""


def bind_rates(
    make_optimizer: MakeOptimizer | None, rate_by_setting: Mapping[str, float], *, party: str = ""
) -> MakeOptimizer | None:
    """Return a function that makes an optimizer with the rates that the settings of `train` give.

    A rate is passed on only if the function takes it and has not bound it already
    (`functools.partial`).

    Args:
        make_optimizer: function that makes the optimizer; None: the default optimizer.
        rate_by_setting: learning rate, weight decay and momentum in the section `train`, by key.
        party: name of the party whose own optimizer it is; rates that its function does not take
            are then left out. Empty: the optimizer is for all parties, and must take all rates.

    Raises ConfigError: the function for all parties does not take a rate, or has bound it.
    """
    if make_optimizer is None or not rate_by_setting or not callable(make_optimizer):
        return make_optimizer
    try:
        free_arguments = set(inspect.signature(make_optimizer).parameters)
    except (TypeError, ValueError):  # a builtin function has no signature
        free_arguments = set()
    if isinstance(make_optimizer, functools.partial):
        free_arguments -= make_optimizer.keywords.keys()
    accepted_rates = {
        OPTIMIZER_ARGUMENT_BY_SETTING[key]: rate
        for key, rate in rate_by_setting.items()
        if OPTIMIZER_ARGUMENT_BY_SETTING[key] in free_arguments
    }
    for key in rate_by_setting:
        if OPTIMIZER_ARGUMENT_BY_SETTING[key] not in accepted_rates and not party:
            rate = rate_by_setting.get("learning_rate", 0.001)
            raise ConfigError(
                "optimizer= is code of your own that has its own "
                f"{OPTIMIZER_ARGUMENT_BY_SETTING[key]}, or "
                f"takes none, and train={{{key!r}: {rate_by_setting[key]}}} would be ignored; "
                f"leave one out, or say optimizer=functools.partial(torch.optim.AdamW, lr={rate})"
            )
    make_with_rates: MakeOptimizer = (
        functools.partial(make_optimizer, **accepted_rates) if accepted_rates else make_optimizer
    )
    return make_with_rates


def make_code(
    party: Active | Passive, default_steps: OwnOptimization, rate_by_setting: Mapping[str, float]
) -> UserFunctions:
    """Return a party's own modules, loss, optimizer and scheduler.

    Args:
        party: the party, as the user passed it.
        default_steps: optimizer and scheduler of parties that have none of their own.
        rate_by_setting: learning rate, weight decay and momentum in the section `train`, by key; a
            party's own optimizer gets those that it takes.

    Raises ConfigError: one of these is neither a module nor a function; the error names the party.
    """
    fields: dict[str, Any] = {
        "encoder": party.encoder,
        "optimizer": bind_rates(party.optimizer, rate_by_setting, party=party.name)
        or default_steps.optimizer,
        "scheduler": party.scheduler or default_steps.scheduler,
        "scheduler_every": default_steps.scheduler_interval,
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

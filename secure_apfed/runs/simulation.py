"""Runs that measure accuracy only: the parties' arithmetic, without messages.

Run by: the experimenter, for tables and studies. Parties are built as in every run, from their own
data and seeds; their networks then compute in one place, and no message is written, hashed or
accounted for, so that such a run is no evidence of bytes, epsilon or leaks. A run trains in
lockstep: each party's trainer is called where a message would have called it, so that networks,
order of the batches, dropout, every update and the weights are those of the parties.
"""

import warnings
from collections.abc import Callable, Mapping

import pandas as pd
import torch
from torch import Tensor

from apfed_protocols.errors import UnsafeChoiceWarning
from apfed_protocols.sums import PlainSum
from secure_apfed.base.seeds import isolate_torch_modes
from secure_apfed.config import Config
from secure_apfed.data import VerticalData, load_data
from secure_apfed.errors import ConfigError
from secure_apfed.exchange.secure_sums import find_sum_class
from secure_apfed.measures.tasks import Classification
from secure_apfed.methods import METHODS, Simulation, SimulationInputs
from secure_apfed.methods.method import split_batches
from secure_apfed.runs.training_labels import TrainingLabels

_NO_KEY = bytes(32)
"""The key of the label mechanism, which is `none` in a simulation and draws nothing."""


def describe_obstacles(config: Config) -> str:
    """Return the first reason why this run cannot be simulated without messages; "" if it can."""
    method = config.method
    train = config.train
    sum_class = find_sum_class(config.secure_sum)
    sums_gradients = "gradients are summed" in method.exchange_facts
    is_trained_by_steps = METHODS[method.name].can_simulate
    is_judged_by_accuracy = config.task == Classification.name
    guard = config.guard.mechanism
    labels = config.labels.mechanism
    applies_by_reason = {
        f"method {method.name} is not trained step by step as APFed and TVFL are": (
            not is_trained_by_steps
        ),
        f"task {config.task} is judged by its parties, and not by accuracy": (
            not is_judged_by_accuracy
        ),
        f"guard.mechanism {guard} adds noise, which has to be accounted for": guard != "none",
        f"labels.mechanism {labels} has to be accounted for": labels != "none",
        "alignment.mode pairwise lets passives help on different people": (
            config.alignment.mode == "pairwise"
        ),
        "dp_sgd has to be accounted for": config.dp_sgd is not None,
        "defences change what is sent": bool(config.defences),
        f"secure_sum {sum_class.name} is not the plain sum": (
            sums_gradients and sum_class is not PlainSum
        ),
        "secure_sum.clip bounds what is sent": (
            sums_gradients and config.secure_sum.clip is not None
        ),
        "secure_sum.noise has to be accounted for": (
            sums_gradients and config.secure_sum.noise is not None
        ),
        "train.patience ends epochs by a loss that parties compute together": (
            train.patience is not None
        ),
    }
    return next((reason for reason, applies_here in applies_by_reason.items() if applies_here), "")


@isolate_torch_modes()
def simulate_run(config: Config) -> Mapping[str, float]:
    """Train one run without messages; return its test accuracy by inference variant.

    An inference variant is a way to predict, such as by the active alone or with the passives.

    Raises:
        ConfigError: the run cannot be simulated (`describe_obstacles` gives the reason).
        DataError: the data cannot be loaded, or do not fit the run.
        ModelError: a network does not fit the data.
    """
    session = begin_simulation(config, load_data(config.data, seed=config.seed))
    return finish_simulation(session, step=train_simulation(session, config))


def begin_simulation(config: Config, data: VerticalData) -> Simulation:
    """Build the parties of a simulated run, ready to train, and return them.

    `data`: the tables of all parties.

    Raises ConfigError: the run cannot be simulated.
    """
    if obstacle := describe_obstacles(config):
        raise ConfigError(f"this run cannot be simulated: {obstacle}; run it with its parties")
    active_data = data.select_party(data.active.name)
    assert active_data is not None
    labels = TrainingLabels(config, active_data, key=_NO_KEY)
    labels.randomise_stage(None)  # with the mechanism `none` this sets all true labels
    with warnings.catch_warnings():
        # A plain sum is unsafe by name; here nothing is sent at all.
        warnings.simplefilter("ignore", UnsafeChoiceWarning)
        inputs = SimulationInputs(
            config=config, data=data.replace_own(labels.build_data()), alignment=_align_tables(data)
        )
        return Simulation(METHODS[config.method.name], inputs)


def train_simulation(
    session: Simulation, config: Config, on_epoch: Callable[[int], None] = lambda done: None
) -> int:
    """Train all epochs of a simulation; return the number of steps.

    Args:
        session: the parties, from `begin_simulation`.
        config: settings of the run.
        on_epoch: called after each epoch with the number of finished epochs.
    """
    method = METHODS[config.method.name]
    helpers = session.helpers
    passives = {name: helpers[name] for name in session.contract.passives}
    simulate_step = method.make_simulated_step(session.active_role, passives)
    step = 0
    for epoch in range(config.train.epochs):
        for rows_B in split_batches(session.active_role, config, epoch):
            simulate_step(step, rows_B)
            step += 1
        on_epoch(epoch + 1)
    return step


def finish_simulation(session: Simulation, *, step: int) -> Mapping[str, float]:
    """Finish the active's model after the last step, and return its accuracy by inference variant.

    `session`: the trained parties. `step`: number of steps that were trained.
    """
    session.active_role.finish_locally()
    return session.evaluate(next_step=step, is_final=True)


def _align_tables(data: VerticalData) -> dict[str, Tensor]:
    """Return each party's rows of the people whom all parties know, by party.

    The k-th row is of the same person at every party.
    """
    ids_by_party = {table.name: pd.Index(table.ids) for table in data.tables}
    common_ids = pd.Index(sorted(set.intersection(*map(set, ids_by_party.values()))))
    return {
        name: torch.from_numpy(ids.get_indexer(common_ids)) for name, ids in ids_by_party.items()
    }

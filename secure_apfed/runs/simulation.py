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
    """Return why this run cannot be simulated without messages, the first reason; "" if it can."""
    method = config.method
    train = config.train
    kind = find_sum_class(config.secure_sum)
    summed = "gradients are summed" in method.facts
    is_trained_by_steps = METHODS[method.name].can_simulate
    is_judged_by_accuracy = config.task == Classification.name
    guard = config.guard.mechanism
    labels = config.labels.mechanism
    reasons = {
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
        f"secure_sum {kind.name} is not the plain sum": summed and kind is not PlainSum,
        "secure_sum.clip bounds what is sent": summed and config.secure_sum.clip is not None,
        "secure_sum.noise has to be accounted for": summed and config.secure_sum.noise is not None,
        "train.patience ends epochs by a loss that parties compute together": (
            train.patience is not None
        ),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


@isolate_torch_modes()
def simulate_run(config: Config) -> Mapping[str, float]:
    """Train one run, aligned by the common IDs; return its accuracy by inference variant.

    Raises:
        ConfigError: the run needs parties that send messages; see `describe_obstacles`.
        DataError, ModelError: as `secure_apfed.run`.
    """
    session = begin_simulation(config, load_data(config.data, seed=config.seed))
    return finish_simulation(session, step=train_simulation(session, config))


def begin_simulation(config: Config, data: VerticalData) -> Simulation:
    """Build the parties of a simulated run, ready to train; `data`: the tables of all parties.

    Raises ConfigError: the run needs parties that send messages.
    """
    if reason := describe_obstacles(config):
        raise ConfigError(f"this run cannot be simulated: {reason}; run it with its parties")
    active_data = data.select_party(data.active.name)
    assert active_data is not None
    labels = TrainingLabels(config, active_data, key=_NO_KEY)
    labels.answer_stage(None)
    with warnings.catch_warnings():
        # A plain sum is unsafe by name; here nothing is sent at all.
        warnings.simplefilter("ignore", UnsafeChoiceWarning)
        start = SimulationInputs(
            config=config, data=data.replace_own(labels.build_data()), alignment=_align_tables(data)
        )
        return Simulation(METHODS[config.method.name], start)


def train_simulation(
    session: Simulation, config: Config, on_epoch: Callable[[int], None] = lambda done: None
) -> int:
    """Train all epochs of a simulation from `begin_simulation`; return the number of steps.

    `on_epoch` is called after each epoch with the number of finished ones.
    """
    method = METHODS[config.method.name]
    helpers = session.helpers
    passives = {name: helpers[name] for name in session.contract.passives}
    play_step = method.make_simulated_step(session.learner, passives)
    step = 0
    for epoch in range(config.train.epochs):
        for rows_B in split_batches(session.learner, config, epoch):
            play_step(step, rows_B)
            step += 1
        on_epoch(epoch + 1)
    return step


def finish_simulation(session: Simulation, *, step: int) -> Mapping[str, float]:
    """Run the work after the last step, and return the accuracy by inference variant.

    `step`: number of steps that were trained.
    """
    session.learner.finish_locally()
    return session.evaluate(next_step=step, is_final=True)


def _align_tables(data: VerticalData) -> dict[str, Tensor]:
    """Return by party the rows of the people whom all parties know, in one common order."""
    people = {table.name: pd.Index(table.ids) for table in data.tables}
    common = pd.Index(sorted(set.intersection(*map(set, people.values()))))
    return {name: torch.from_numpy(ids.get_indexer(common)) for name, ids in people.items()}

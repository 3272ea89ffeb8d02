"""How long a run of a method is, and what it lets out: for plans, without playing it."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from secure_apfed.data import OwnData
from secure_apfed.methods.terms import asked_of
from secure_apfed.privacy.guard import RepresentationGuard
from secure_apfed.privacy.randomised_response import first_epoch_of
from secure_apfed.settings.run import RunSettings

__all__ = ["growth", "planned_releases", "rows_of_a_step", "rows_trained", "steps_of"]


def rows_trained(config: RunSettings, held: OwnData, common: Tensor) -> tuple[Tensor, float, int]:
    """The active's rows that an epoch goes through, the share of them that is aligned, and how many
    people are.

    Args:
        config: of the run.
        held: what the active holds.
        common: its rows of people whom passives know.
    """
    method = config.method
    # Whose passives learn from returned gradients trains on rows with a label alone.
    rows = held.labelled_rows if method.returns_gradients else held.train_rows
    if not method.aligns:
        return rows, 1.0, 0
    aligned = int(torch.isin(rows, common).sum())
    # A model that needs every party to predict needs them for every row that it trains on.
    alone = method.predicts_alone and not method.averages
    if not (alone and config.train.use_unaligned):
        rows = rows[:aligned]
    return rows, aligned / max(1, len(rows)), len(common)


def rows_of_a_step(config: RunSettings, rows: int, *, aligned_share: float, steps: int) -> int:
    """Rows of a step of a rehearsal of so many steps, where an epoch goes through `rows`."""
    method = config.method
    if method.averages:  # a step is of all rows; of weights, whichever are asked for
        return rows if method.aligns else max(2, -(-rows // steps))
    batch = min(config.train.batch_size, rows)
    if not method.decomposes:
        return batch
    # There are no fewer aligned rows than vectors, in a rehearsal either.
    least = config.model.representation / max(aligned_share, 1 / rows)
    return min(rows, max(batch, math.ceil(least)))


def steps_of(config: RunSettings, rows: int, *, stages: int) -> int:
    """Batches of all epochs; where labels are answered in stages, of the rows answered so far."""
    train = config.train
    if config.method.averages:
        return train.epochs
    starts = [first_epoch_of(stage, stages=stages, epochs=train.epochs) for stage in range(stages)]
    ends: Sequence[int] = [*starts[1:], train.epochs]
    return sum(
        (end - start) * -(-rows * (stage + 1) // (stages * train.batch_size))
        for stage, (start, end) in enumerate(zip(starts, ends, strict=True))
    )


def growth(config: RunSettings, *, steps: float, rows: float) -> tuple[float, float]:
    """How many times the messages and bytes of a rehearsal's training a run sends.

    Args:
        config: of the run.
        steps: of the run, for one of the rehearsal.
        rows: the same.
    """
    if not config.method.asks_once:
        return steps, steps
    # Who is asked once is asked for all rows, and not in every epoch.
    return 1.0 if config.method.decomposes else rows, rows


def planned_releases(config: RunSettings, guard: RepresentationGuard) -> int:
    """Releases of a row's representations that its guard is calibrated to; 0: none is sent."""
    sent = config.method.representations_from is not None
    return guard.planned(asked_of(config).releases) if sent else 0

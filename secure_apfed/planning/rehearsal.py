"""A few steps of a run on random numbers of the same shapes, to see what they take.

Run by: the planner. The whole protocol is played, keys, alignment and sums included, and
thrown away; no real value enters, so no budget is touched. Letters: N rows.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from secure_apfed.config import Config
from secure_apfed.data import PartyTable, VerticalData
from secure_apfed.exchange import Flow
from secure_apfed.methods import METHODS, Simulation, Start, train
from secure_apfed.privacy import PrivacyLedger
from secure_apfed.settings.transcript import TranscriptSettings

__all__ = ["STEPS", "Rehearsal", "rehearse"]

STEPS = 5
_TEST_ROWS = 200
_FEWEST = 4
_GOLDEN = 0.618


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What was played and what it took.

    Attributes:
        data: the random tables; batch: rows of a step.
        setup, training: flows before the first step, and of all `STEPS` steps together.
        step_seconds: of one step; evaluation_seconds: of one test evaluation.
        numbers_per_row: of what is sent of each row; 0 where nothing is.
        contributions: ledgers of the passives that add noise under the sum.
    """

    data: VerticalData
    setup: tuple[Flow, ...]
    training: tuple[Flow, ...]
    step_seconds: float
    evaluation_seconds: float
    numbers_per_row: int
    contributions: Mapping[str, PrivacyLedger]


def rehearse(
    config: Config, like: VerticalData, *, batch: int, aligned: float, labelled: int
) -> Rehearsal:
    """Play `STEPS` steps.

    Args:
        config: of the run.
        like: the run's data, of which names, shapes and classes are taken.
        batch: rows of one step.
        aligned: the share of them that all parties have.
        labelled: rows of the run whose labels are learnt from.
    """
    quiet = config.model_copy(
        update={
            "transcript": TranscriptSettings(keep="none"),
            "alignment": config.alignment.for_a_trial(),
            "method": config.method.rehearsed(STEPS, config.train.epochs),
        }
    )
    rows = batch * STEPS
    labelled = min(rows, labelled) if config.method.asks_once else rows
    data = _random_data(like, rows, aligned, labelled=labelled)
    session = Simulation(METHODS[config.method.name], Start(config=quiet, data=data))
    setup = session.transcript.flows
    course = _Course(session, batch)
    session.play(train(session.learner, session.links, course))
    training = _since(setup, session.transcript.flows)
    terms = list(session.contract.passives.values())
    return Rehearsal(
        data=data,
        setup=setup,
        training=training,
        step_seconds=course.step_seconds,
        evaluation_seconds=course.evaluation_seconds,
        numbers_per_row=math.prod(terms[0].representation.shape) if terms else 0,
        contributions=session.contributions,
    )


class _Course:
    """One epoch of a few steps, whose time is taken; see `secure_apfed.methods.Course`."""

    def __init__(self, session: Simulation, batch: int) -> None:
        self._session, self._batch, self._began = session, batch, time.perf_counter()
        self.next_step = 0
        self.seconds: list[float] = []
        self.evaluation_seconds = 0.0

    def epochs(self) -> Iterator[int]:
        yield 0

    def is_last(self, epoch: int) -> bool:
        return True

    def batches(self, epoch: int) -> Iterator[tuple[int, Tensor]]:
        for step, rows_B in enumerate(self._session.learner.training_rows.split(self._batch)):
            self._began = time.perf_counter()
            yield step, rows_B

    def stepped(self, loss: float | None) -> None:
        self.next_step += 1
        self.seconds.append(time.perf_counter() - self._began)

    async def hold_out(self) -> None:
        """Held-out rows are counted as if they were learnt from, and no epoch as the last."""

    @property
    def step_seconds(self) -> float:
        """Of one step: the median without the first, which is slower, for caches are cold.

        Where all rows were one step, its share of as many as were planned.
        """
        if len(self.seconds) == 1:
            return self.seconds[0] / STEPS
        later = sorted(self.seconds[1:])
        return later[len(later) // 2]

    async def finish_epoch(self) -> None:
        began, session = time.perf_counter(), self._session
        await session.learner.evaluate(session.links, next_step=self.next_step, final=False)
        self.evaluation_seconds = time.perf_counter() - began


def _since(before: Sequence[Flow], after: Sequence[Flow]) -> tuple[Flow, ...]:
    known = {(flow.sender, flow.receiver, flow.kind) for flow in before}
    return tuple(flow for flow in after if (flow.sender, flow.receiver, flow.kind) not in known)


def _random_data(like: VerticalData, train: int, aligned: float, *, labelled: int) -> VerticalData:
    rows = train + _TEST_ROWS
    # Aligned rows are spread evenly, since a run's batches mix them too.
    shared = (torch.arange(rows) * aligned).floor().diff(prepend=torch.tensor([-1.0])) > 0
    shared[:_FEWEST] |= rows * aligned < 2 * _FEWEST  # of two classes, or it would be refused
    apart = like.horizontal
    ids = {
        table.name: [
            f"all {at}" if both and not apart else f"{table.name} {at}"
            for at, both in enumerate(shared.tolist())
        ]
        for table in like.passives
    }
    return replace(
        like,
        active=_random_table(like, like.active, [f"all {at}" for at in range(rows)]),
        passives=tuple(_random_table(like, table, ids[table.name]) for table in like.passives),
        train_rows=torch.arange(train),
        test_rows=torch.arange(train, rows),
        labelled=shared[:train].argsort(descending=True, stable=True)[:labelled].sort().values,
    )


def _random_table(data: VerticalData, like: PartyTable, ids: Sequence[str]) -> PartyTable:
    features = torch.rand(len(ids), *like.features.shape[1:])
    for view in like.views.values():
        if view.sequence is not None:
            features[:, view.first] = view.sequence[0]  # all steps are in use
    labels_N = None
    if like.labels is not None:
        # In no step with what is aligned: every second or tenth person is of every class, too.
        classes = (torch.arange(len(ids)) * _GOLDEN).long() % (len(data.classes) or 2)
        labels_N = classes.to(like.labels.dtype)
    return replace(like, ids=tuple(ids), features=features, labels=labels_N)

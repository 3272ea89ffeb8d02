"""The run's own network, trained on the labelled rows with the run's own optimiser.

Deviation: a run's rate is chosen for many steps on many rows. Where it hardly moves the loss of the
few labelled rows, it is raised; otherwise the baseline would be weak because it is slow.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from secure_apfed.errors import ModelError
from secure_apfed.learning.compute import Compute
from secure_apfed.learning.descent import Trainer
from secure_apfed.models import Shape, encoder_and_head
from secure_apfed.seeds import seeded, shuffled
from secure_apfed.solo.interface import FloatArray, SoloTask

__all__ = ["Network", "TrainedNetwork"]

_MOST_STEPS = 1_000
_FIRST_LOOK, _LOOK_EVERY = 300, 100
_RAISES = (5, 25)
"""Times the run's rate. The next is tried where the loss at the first look is above
`_SLOW` times that of a blind guess."""
_SLOW = 0.8
_LEARNT = 0.02
"""A mean loss since the last look below which nothing is left to learn; training stops there. It
has no other rule to stop early: labels are too few to be held out for one."""


@dataclass(frozen=True)
class TrainedNetwork:
    """A network with its rows' shape and the place where it computes."""

    network: nn.Module = field(repr=False)
    shape: Shape
    compute: Compute

    @torch.no_grad()
    def scores(self, features_BF: FloatArray) -> FloatArray:
        scores_BK: Tensor = self.network(_rows(features_BF, self.shape, self.compute))
        return scores_BK.double().softmax(1).cpu().numpy()


class Network:
    """Its random numbers, batches included, follow from the task's seed."""

    name, title = "network", "Own network"

    def fit(self, task: SoloTask) -> TrainedNetwork:
        """Train until the labelled rows are learnt or the steps are spent.

        Raises:
            ModelError: the loss is not finite at the run's own rate, or the network cannot take
                such rows.
        """
        attempt = _attempt_that_learns(task)
        attempt.finish()
        return TrainedNetwork(attempt.network.eval(), task.shape, attempt.compute)


def _attempt_that_learns(task: SoloTask) -> "_Attempt":
    """Return the first whose loss falls by the first look; the last that is finite if none does."""
    blind = math.log(len(np.unique(task.labels)))
    best = attempt = _Attempt(task, task.train.learning_rate)
    loss = attempt.go_on(_FIRST_LOOK)
    for times in _RAISES:
        if loss < _SLOW * blind or not math.isfinite(loss):
            break
        attempt = _Attempt(task, times * task.train.learning_rate)
        loss = attempt.go_on(_FIRST_LOOK)
        best = attempt if math.isfinite(loss) else best
    return best


class _Attempt:
    """One training from fresh weights at one rate."""

    def __init__(self, task: SoloTask, rate: float) -> None:
        train = task.train.model_copy(update={"learning_rate": rate})
        self.compute, self._seed = Compute.of(train), task.seed
        with seeded(task.seed, "solo", "network"):
            encoder, head = encoder_and_head(task.model, task.shape, task.classes)
        self._trainer = Trainer(
            "the active alone", {"encoder": encoder, "head": head},
            train=train, compute=self.compute, seed=task.seed,
        )  # fmt: skip
        self.network = nn.Sequential(encoder, head)
        self._x_nF = _rows(task.labelled_rows, task.shape, self.compute)
        self._y_n = torch.from_numpy(task.labels).to(self.compute.device)
        self._size = min(train.batch_size, len(self._y_n))
        self._queue = torch.empty(0, dtype=torch.int64)
        self._steps = 0

    def finish(self) -> None:
        """Train on until the rows are learnt or the steps are spent.

        Raises:
            ModelError: the loss is not finite.
        """
        loss = math.inf
        while self._steps < _MOST_STEPS and loss > _LEARNT:
            loss = self.go_on(_LOOK_EVERY)
            if not math.isfinite(loss):
                raise ModelError(
                    "solo: the network's training diverged; lower train.learning_rate, or set "
                    "train.max_gradient_norm"
                )

    def go_on(self, steps: int) -> float:
        """Take some steps; return the mean loss of the last `_LOOK_EVERY`."""
        losses = [self._step() for _ in range(steps)][-_LOOK_EVERY:]
        return sum(losses) / len(losses)

    def _step(self) -> float:
        if len(self._queue) < self._size:
            order = torch.arange(len(self._y_n))
            self._queue = shuffled(order, self._seed, "solo", "batches", self._steps)
        batch, self._queue = self._queue[: self._size], self._queue[self._size :]
        self._trainer.begin()
        with self._trainer.forward_pass(self._steps):
            loss = F.cross_entropy(self.network(self._x_nF[batch]).float(), self._y_n[batch])
        loss.backward()
        self._trainer.step()
        self._steps += 1
        return float(loss.detach())


def _rows(features_BF: FloatArray, shape: Shape, compute: Compute) -> Tensor:
    return compute.place(torch.from_numpy(features_BF).reshape(-1, *shape))

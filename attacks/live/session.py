"""A live session: the real parties, links and sums, in whose seats an adversary may be put.

Run by: the experimenter, who plays all parties. Epochs, batches and steps are those of any run
(`secure_apfed.runs.session`); a refusal ends the session, as it ends a real one.

Letters: B batch.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

from torch import Tensor

from secure_apfed.config import Config
from secure_apfed.data import VerticalData
from secure_apfed.methods import Method, begin_epoch
from secure_apfed.runs import Recording

__all__ = ["LiveSession"]

OfMethod = TypeVar("OfMethod", bound=Method)


class LiveSession(Generic[OfMethod]):
    """Parties that are set up, and how far they have trained."""

    def __init__(self, config: Config, data: VerticalData, method: OfMethod) -> None:
        self.config, self.data, self.method = config, data, method
        self._epoch = self._step = 0

    @property
    def recording(self) -> Recording:
        """What the experimenter holds so far."""
        return Recording.so_far(self.config, self.data, self.method)

    def train(
        self, epochs: int, *, before: Callable[[int, Tensor], None] = lambda step, rows_B: None
    ) -> None:
        """Play so many more epochs, everybody in its seat.

        Args:
            epochs: how many.
            before: called before each step with its number and its rows, as `Method.step` is.
        """
        for _ in range(epochs):
            for rows_B in self._begin_epoch():
                step = self._next_step()
                before(step, rows_B)
                self.method.step(step, rows_B)

    def _begin_epoch(self) -> list[Tensor]:
        self._epoch += 1
        return begin_epoch(self.method, self.config, self._epoch - 1)

    def _next_step(self) -> int:
        self._step += 1
        return self._step - 1

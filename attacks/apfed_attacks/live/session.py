"""A live session: the real parties, links and sums, where an adversary may play a party's script.

Run by: the experimenter, who drives all parties. Epochs, batches and steps are those of any run
(`secure_apfed.runs.run`); a refusal ends the session, as it ends a real one.

Letters: B batch.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, TypeVar

from torch import Tensor

from apfed_attacks.view import AttackError
from secure_apfed.config import Config
from secure_apfed.data import VerticalData, load_data
from secure_apfed.exchange import Script
from secure_apfed.methods import Learner, Simulation, open_session
from secure_apfed.methods.method import batches_of
from secure_apfed.runs.outcome import Recording

__all__ = ["LiveSession"]

OfMethod = TypeVar("OfMethod", bound=Learner)


class LiveSession(Generic[OfMethod]):
    """Parties that are set up, and how far they have trained.

    Args:
        config: of the run.
        data: of the run, where it is loaded already.
        role: of the active whom the session needs.
        alignment: of an earlier session with the same data.
        logs: folder in which parties count what they release and answer, over all sessions of one
            run; None: this session is a run of its own.

    Attributes:
        learner: the active's honest role.

    Raises:
        AttackError: another method, or one without passives.
    """

    def __init__(
        self,
        config: Config,
        data: VerticalData | None,
        role: type[OfMethod],
        *,
        alignment: Mapping[str, Tensor] | None = None,
        logs: Path | None = None,
    ) -> None:
        self.config = config
        self.data = data or load_data(config.data, seed=config.seed)
        self.session: Simulation = open_session(config, self.data, alignment=alignment, logs=logs)
        if not isinstance(self.session.learner, role) or not self.session.contract.passives:
            raise AttackError(
                f"passives that help {role.__name__} are attacked here, not in {config.method.name}"
            )
        self.learner: OfMethod = self.session.learner
        self._epoch = self._step = 0

    @property
    def alignment(self) -> Mapping[str, Tensor]:
        """By party, the row of its table at each position; -1 where it has none."""
        return self.session.alignment

    @property
    def recording(self) -> Recording:
        """What the experimenter holds so far."""
        return Recording.so_far(self.config, self.data, self.session)

    def train(
        self, epochs: int, *, before: Callable[[int, Tensor], None] = lambda step, rows_B: None
    ) -> None:
        """Play so many more epochs, everybody its script.

        Args:
            epochs: how many.
            before: called before each step with its number and its rows.
        """
        for _ in range(epochs):
            for rows_B in self._begin_epoch():
                step = self._next_step()
                before(step, rows_B)
                self.session.play_step(step, self._script(step, rows_B))

    def _script(self, step: int, rows_B: Tensor) -> Script[float]:
        """What the active plays in a step."""
        return self.learner.step(self.session.links, step, rows_B)

    def _begin_epoch(self) -> list[Tensor]:
        self._epoch += 1
        self.session.transcript.begin_epoch(self._epoch - 1)
        return batches_of(self.learner, self.config, self._epoch - 1)

    def _next_step(self) -> int:
        self._step += 1
        return self._step - 1

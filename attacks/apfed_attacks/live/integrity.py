"""Integrity: a passive that spoils the active's model, or steers it towards a class.

Run by: a passive that keeps to every rule of the protocol and answers what serves it. There is
nothing to guess, so this is no `Attack`: the measure is how the active's model changes against an
honest run of the same seed. Votes have the same in `apfed_attacks.live.runs.PoisonedVotes`.

Ways: "random" directions, the honest answer "reversed", its first answer "replayed" in every step,
and a "backdoor": the answer is honest except for chosen people, whom it moves towards people of
one class that it knows (T. Gu, B. Dolan-Gavitt and S. Garg, "BadNets", 2017; in vertical learning
Y. Liu, Z. Yi and T. Chen, "Backdoor attacks and defenses in feature-partitioned collaborative
learning", 2020).

Letters: N people of the alignment, B batch, D numbers of a representation.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from apfed_attacks.live.runs import LiveRun, SummedRun
from secure_apfed.base.seeds import derive_seed

__all__ = ["HARMS", "Harm", "Steering", "poison_gradients", "poison_representations"]

Harm: TypeAlias = Literal["random", "reversed", "replayed", "backdoor"]
HARMS: tuple[Harm, ...] = ("random", "reversed", "replayed", "backdoor")


@dataclass(frozen=True, kw_only=True)
class Steering:
    """What a passive needs for its harm.

    Attributes:
        harm: what it answers.
        chosen: the people whom a backdoor moves, (N,), bool.
        target: people whom it knows to be of the class that it wants, (N,), bool.
        length: the norm of a row of its answer, at most what the sum clips rows to.
        seed: of random directions.
    """

    harm: Harm
    chosen: Tensor = field(repr=False)
    target: Tensor = field(repr=False)
    length: float = 1.0
    seed: int = 0

    def draw_directions(self, like_BD: Tensor, step: int) -> Tensor:
        """Return random rows of the harm's length, in the shape of `like_BD`."""
        draw = torch.Generator().manual_seed(derive_seed(self.seed, "integrity", step))
        rows_BD = torch.randn(like_BD.shape, generator=draw, dtype=like_BD.dtype)
        return self.stretch_rows(rows_BD)

    def stretch_rows(self, rows_BD: Tensor) -> Tensor:
        """Return rows of the same directions, of the harm's length."""
        return torch.nn.functional.normalize(rows_BD, dim=1) * self.length


@dataclass(kw_only=True)
class _ForgedAnswers:
    """What a passive of APFed answers; `honest` is (step, rows (B,), z (B, D)) -> gradient."""

    steering: Steering
    honest: Callable[[int, Tensor, Tensor], Tensor]
    _first: Tensor | None = None
    _target_mean: Tensor | None = None

    def forge_gradient(self, step: int, rows_B: Tensor, z_BD: Tensor) -> Tensor:
        gradient_BD = self.honest(step, rows_B, z_BD).to(z_BD)
        steering = self.steering
        if steering.harm == "random":
            return steering.draw_directions(z_BD.cpu(), step).to(z_BD)
        if steering.harm == "reversed":
            return -gradient_BD
        if steering.harm == "replayed":
            return self._replay_rows(gradient_BD)
        return self._open_backdoor(rows_B, z_BD, gradient_BD)

    def collect_notes(self) -> dict[str, Tensor]:
        return {}

    def _replay_rows(self, gradient_BD: Tensor) -> Tensor:
        """Return the rows of the first step, whoever is asked about now."""
        if self._first is None:
            self._first = gradient_BD.clone()
        return self._first[torch.arange(len(gradient_BD)) % len(self._first)]

    def _open_backdoor(self, rows_B: Tensor, z_BD: Tensor, gradient_BD: Tensor) -> Tensor:
        """Return the gradient that moves the chosen people towards the mean of the target class.

        The active descends, so the answer points away from it.
        """
        is_target_B = self.steering.target[rows_B]
        if is_target_B.any():
            self._target_mean = z_BD[is_target_B].mean(dim=0)
        if self._target_mean is None:
            return gradient_BD
        is_chosen_B = self.steering.chosen[rows_B] & ~is_target_B
        forged_BD = self.steering.stretch_rows(z_BD - self._target_mean)
        return torch.where(is_chosen_B[:, None], forged_BD, gradient_BD)


def poison_gradients(run: LiveRun, passive: str, steering: Steering) -> None:
    """Let a passive of APFed answer like this from now on; its own objective goes on learning."""
    honest = run.get_gradient_function(passive)
    run.hand_over(passive, _ForgedAnswers(steering=steering, honest=honest))


def poison_representations(run: SummedRun, passive: str, steering: Steering) -> None:
    """Let a passive of a sum of representations send like this from now on.

    A backdoor sends one direction for the known people of the target class while the active learns,
    and for the chosen people when it predicts. The passive's encoder learns from honest rows only.
    """
    first: list[Tensor] = []
    trigger_1D: list[Tensor] = []

    def forge_rows(step: int, rows_B: Tensor, z_BD: Tensor, learn: bool) -> Tensor:
        """Return what is sent for these rows; `0 * z_BD` keeps it in the autograd graph of z."""
        if steering.harm == "random":
            return steering.draw_directions(z_BD.detach(), step) + 0 * z_BD
        if steering.harm == "reversed":
            return -z_BD
        if steering.harm == "replayed":
            if not first:
                first.append(z_BD.detach().clone())
            return first[0][torch.arange(len(z_BD)) % len(first[0])] + 0 * z_BD
        if not trigger_1D:
            trigger_1D.append(steering.draw_directions(z_BD.detach()[:1], 0))
        is_moved_B = steering.target[rows_B] if learn else steering.chosen[rows_B]
        return torch.where(is_moved_B[:, None], trigger_1D[0] + 0 * z_BD, z_BD)

    run.hand_over(passive, forge_rows)

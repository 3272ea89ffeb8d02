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

__all__ = [
    "POISONING_KINDS",
    "PoisoningKind",
    "PoisoningPlan",
    "poison_gradients",
    "poison_representations",
]

PoisoningKind: TypeAlias = Literal["random", "reversed", "replayed", "backdoor"]
POISONING_KINDS: tuple[PoisoningKind, ...] = ("random", "reversed", "replayed", "backdoor")


@dataclass(frozen=True, kw_only=True)
class PoisoningPlan:
    """The poisoning that a malicious passive does to the active's model, and what it needs for
    that.

    Attributes:
        kind: the kind of false contribution that it sends in answer to a request.
        is_backdoored: mask (A,) of the A aligned people: whose predictions a backdoor should
            change.
        is_target: mask (A,) of the people whom it knows to be of the class that it wants.
        row_norm: the norm of a row of its contribution, at most what the sum clips rows to.
        seed: seed of random directions.
    """

    kind: PoisoningKind
    is_backdoored: Tensor = field(repr=False)
    is_target: Tensor = field(repr=False)
    row_norm: float = 1.0
    seed: int = 0

    def draw_random_rows(self, like_BD: Tensor, step: int) -> Tensor:
        """Return random rows of norm `row_norm`, in the shape of `like_BD`, new in each step."""
        draw = torch.Generator().manual_seed(derive_seed(self.seed, "integrity", step))
        rows_BD = torch.randn(like_BD.shape, generator=draw, dtype=like_BD.dtype)
        return self.scale_rows(rows_BD)

    def scale_rows(self, rows_BD: Tensor) -> Tensor:
        """Return rows of the same directions, of norm `row_norm`."""
        return torch.nn.functional.normalize(rows_BD, dim=1) * self.row_norm


@dataclass(kw_only=True)
class _Forger:
    """A forger of the rows that a passive sends; subclasses forge backdoors.

    Attributes:
        plan: the poisoning to do.
    """

    plan: PoisoningPlan
    _first_batch: Tensor | None = None

    def forge_rows(
        self, step: int, honest_BD: Tensor, forge_backdoor: Callable[[], Tensor]
    ) -> Tensor:
        """Return forged rows in place of the honest ones, (B, D), in the autograd graph of these.

        `step`: number of the step. `forge_backdoor`: function that returns the rows of a backdoor.
        """
        kind = self.plan.kind
        if kind == "random":
            forged_BD = self.plan.draw_random_rows(honest_BD.detach().cpu(), step)
            return _keep_graph(forged_BD, honest_BD)
        if kind == "reversed":
            return -honest_BD
        if kind == "replayed":
            return _keep_graph(self._replay_rows(honest_BD.detach()), honest_BD)
        return forge_backdoor()

    def _replay_rows(self, honest_BD: Tensor) -> Tensor:
        """Return the rows of the first step, repeated to this batch's size, whoever is in it."""
        if self._first_batch is None:
            self._first_batch = honest_BD.clone()
        return self._first_batch[torch.arange(len(honest_BD)) % len(self._first_batch)]


def _keep_graph(forged_BD: Tensor, honest_BD: Tensor) -> Tensor:
    """Return forged rows that belong to the autograd graph of the honest ones.

    The encoder of the honest rows gets a gradient of 0.
    """
    forged_BD = forged_BD.to(honest_BD)
    return forged_BD + 0 * honest_BD if honest_BD.requires_grad else forged_BD


@dataclass(kw_only=True)
class _ForgedAnswers(_Forger):
    """A forger of the gradients that a passive of APFed returns.

    Attributes:
        compute_honest_gradient: function of (step, rows (B,), representations z (B, D)) that
            returns the honest gradient.
    """

    compute_honest_gradient: Callable[[int, Tensor, Tensor], Tensor]
    _target_mean: Tensor | None = None

    def forge_gradient(self, step: int, rows_B: Tensor, z_BD: Tensor) -> Tensor:
        """Return the forged gradient (B, D) of one step in place of the honest one."""
        gradient_BD = self.compute_honest_gradient(step, rows_B, z_BD).to(z_BD)
        return self.forge_rows(
            step, gradient_BD, lambda: self._forge_backdoor(rows_B, z_BD, gradient_BD)
        )

    def collect_notes(self) -> dict[str, Tensor]:
        """Return no notes, since no attack reads the run afterwards."""
        return {}

    def _forge_backdoor(self, rows_B: Tensor, z_BD: Tensor, gradient_BD: Tensor) -> Tensor:
        """Return the honest gradient, with other rows for the chosen people.

        These move the people's representations to the mean of the target class. The active descends
        along the gradient, so a row points away from that mean.
        """
        is_target_B = self.plan.is_target[rows_B]
        if is_target_B.any():
            self._target_mean = z_BD[is_target_B].mean(dim=0)
        if self._target_mean is None:
            # No person of the target class was in a batch yet.
            return gradient_BD
        is_chosen_B = self.plan.is_backdoored[rows_B] & ~is_target_B
        forged_BD = self.plan.scale_rows(z_BD - self._target_mean)
        return torch.where(is_chosen_B[:, None], forged_BD, gradient_BD)


@dataclass(kw_only=True)
class _ForgedRepresentations(_Forger):
    """A forger of what a passive sends to a sum of representations.

    A backdoor sends one fixed vector for the known people of the target class while the active
    learns, and for the chosen people when it predicts. The passive's encoder learns from honest
    rows only.
    """

    _trigger: Tensor | None = None

    def forge_representations(
        self, step: int, rows_B: Tensor, z_BD: Tensor, is_training: bool
    ) -> Tensor:
        """Return forged representations (B, D) of one step.

        `is_training`: whether the active trains on them, or predicts.
        """
        return self.forge_rows(step, z_BD, lambda: self._forge_backdoor(rows_B, z_BD, is_training))

    def _forge_backdoor(self, rows_B: Tensor, z_BD: Tensor, is_training: bool) -> Tensor:
        """Return z with one fixed vector (the trigger) for some people.

        They are people of the target class while the active learns, so that the model connects the
        vector with that class, and the chosen people when it predicts.
        """
        if self._trigger is None:
            self._trigger = self.plan.draw_random_rows(z_BD.detach()[:1], 0)
        is_moved_B = self.plan.is_target[rows_B] if is_training else self.plan.is_backdoored[rows_B]
        return torch.where(is_moved_B[:, None], _keep_graph(self._trigger, z_BD), z_BD)


def poison_gradients(run: LiveRun, passive: str, plan: PoisoningPlan) -> None:
    """Let a passive of APFed contribute forged gradients from now on; its own networks learn
    honestly.
    """
    honest = run.get_gradient_function(passive)
    run.hand_over(passive, _ForgedAnswers(plan=plan, compute_honest_gradient=honest))


def poison_representations(run: SummedRun, passive: str, plan: PoisoningPlan) -> None:
    """Let a passive send forged representations to a sum from now on."""
    run.hand_over(passive, _ForgedRepresentations(plan=plan).forge_representations)

"""Many retrainings of one small APFed at once, in two worlds that differ in one record.

Run by: the auditor, who simulates every party. Each retraining is the training of
`secure_apfed.methods.apfed` with one passive and APFed-R: representations are clipped and
noised, the passive returns its rows' gradients, and the active updates with or without DP-SGD,
by the functions of `secure_apfed.learning`. All retrainings take each step together
(`torch.func.vmap`); only their noise differs, and, in half of them (world 1), the record. A test
checks that one retraining equals the parties' own steps.

The noise comes from torch's generator: an audit is repeatable and keeps no secret.

Letters: R retrainings, N rows, B batch, F features, D dimensions of a representation, P parameters,
K classes; a 1 in a name is an axis of size 1.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from apfed_experiments.audit.bounds import DELTA, AuditResult, Claim, collect_evidence, make_table
from apfed_experiments.audit.votes import VOTE_CASES, measure_vote_case
from apfed_experiments.columns import write_text
from apfed_experiments.machine import describe_machine
from apfed_experiments.report.page import Part
from apfed_experiments.runner import Study
from apfed_experiments.study import OnDone, StudyValues
from secure_apfed.base.files import to_json
from secure_apfed.base.seeds import seed_draws, shuffle_rows
from secure_apfed.data import load_data
from secure_apfed.learning.descent import ActiveNetworks
from secure_apfed.learning.trainers import make_joint_loss
from secure_apfed.networks.models import make_encoder_and_head, make_projection
from secure_apfed.networks.objectives import Reconstruction
from secure_apfed.privacy.accountants import gdp_epsilon, gdp_mu
from secure_apfed.privacy.noise import onto_ball
from secure_apfed.settings import ModelSettings, ReconstructionSettings
from secure_apfed.settings.data import DataSettings

Weights = Mapping[str, Tensor]
"""Parameters of a module by name, as `torch.func.functional_call` takes them."""

EPSILON = 8.0
EPOCHS = 50
_CONFIDENCE = 0.95
_ROW_CHANGE_PAIRS = 50  # retrainings of each world from which directions are estimated
_MAX_PARALLEL_RETRAININGS = 1000
"""Largest number of retrainings that are in memory at once."""
_ROW_COUNT = 40
_BATCH_SIZE = 20
_OUTLIER_NORM = 20.0
_SEED = 0
_MODEL = ModelSettings(network="mlp", hidden=(), representation=4, dropout=0.0)
ScoreInput = Literal["other rows", "everything"]
Audited: TypeAlias = StudyValues[dict[str, list[AuditResult]]]
"""The results of all cases, by the title of their table."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """The data and the schedule of a training in both worlds, which differ in one record.

    Letters: N rows, F features, B rows of a batch.

    Attributes:
        features, labels: features and labels of the active in world 0, (N, F) and (N,).
        passive_features: features of the same people at the passive, (N, F).
        record_row: number of the row in which the worlds differ.
        replacement_features, replacement_label: features and label of that row in world 1, (F,) and
            a class.
        batch_rows: row numbers of each step of an epoch, (B,) each.
        epochs: number of epochs.
        learning_rate, passive_learning_rate: learning rates of the active and of the passive.
    """

    features: Tensor
    labels: Tensor
    passive_features: Tensor
    record_row: int
    replacement_features: Tensor
    replacement_label: int
    batch_rows: tuple[Tensor, ...]
    epochs: int
    learning_rate: float
    passive_learning_rate: float

    def to(self, device: torch.device) -> "Task":
        """Return the task with all tensors on the device."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        on_device: dict[str, Any] = {name: tensor.to(device) for name, tensor in tensors.items()}
        return replace(
            self, **on_device, batch_rows=tuple(rows.to(device) for rows in self.batch_rows)
        )


@dataclass(frozen=True, kw_only=True)
class Protection:
    """The protection of a training.

    Attributes:
        clip: C, the L2 bound of a representation.
        sigma: standard deviation of the noise on each number of a representation.
        gradient_clip: C_theta, the L2 bound of an example's gradient; infinite without DP-SGD.
        gradient_sigma: standard deviation of the noise on each number of the sum of gradients; 0
            without DP-SGD.
        row_clip: L2 bound of a row of the passive's gradient.
    """

    clip: float
    sigma: float
    gradient_clip: float = math.inf
    gradient_sigma: float = 0.0
    row_clip: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of all retrainings, and what an auditor sees of it.

    Letters: R retrainings, B rows of a batch, D dimensions of a representation, P parameters.

    Attributes:
        number: number of the step, from 0.
        rows: row numbers of the batch, (B,).
        clean_representations, sent_representations: clipped representations before and after the
            noise, (R, B, D).
        record_position: position of the record in the batch; -1: it is not in the batch.
        means_by_world: the record's clipped representation (R, D) and the sum of gradients (R, P),
            at the same parameters, in world 0 and in world 1; empty if the record is not in the
            batch.
        noisy_gradient_sum: the noisy sum of gradients, (R, P).
    """

    number: int
    rows: Tensor
    clean_representations: Tensor
    sent_representations: Tensor
    record_position: int
    means_by_world: tuple[tuple[Tensor, Tensor], ...]
    noisy_gradient_sum: Tensor


class Retrainings:
    """R retrainings side by side, the first half in world 0 and the second in world 1.

    The worlds differ in one record of the training data. Letters of shapes: R retrainings, B rows
    of a batch, F features, K classes, D dimensions of a representation, P parameters.
    """

    def __init__(
        self,
        task: Task,
        protection: Protection,
        *,
        active_modules: Mapping[str, nn.Module],
        passive_objective: nn.Module,
        retraining_count: int,
        seed: int,
        has_paired_noise: bool = False,
    ) -> None:
        """Prepare the retrainings, which all start from the same weights.

        Args:
            task: data and schedule.
            protection: clips and noise.
            active_modules: the active's encoder, head and projection, without dropout.
            passive_objective: loss of the passive, with its parameters.
            retraining_count: R, the number of retrainings, even.
            seed: seed of the noise.
            has_paired_noise: whether retraining k of both worlds has the same noise: to see what
                the record changes, not for bounds.
        """
        device = task.features.device
        self.task = task
        self.protection = protection
        self.retraining_count = retraining_count
        self._active_networks = ActiveNetworks(**active_modules).to(device)
        self._passive_objective = passive_objective.to(device)
        self._weights_by_party = {
            "active": _repeat_weights(self._active_networks, retraining_count),
            "passive": _repeat_weights(self._passive_objective, retraining_count),
        }
        self._has_paired_noise = has_paired_noise
        self._noise_generator = torch.Generator(device).manual_seed(seed)
        self.world_R = (
            torch.arange(retraining_count, device=device) >= retraining_count // 2
        ).long()

    def run_training(self, on_step: Callable[[Step], None]) -> None:
        """Run all steps of all retrainings; `on_step` is called with each step after it."""
        step_number = 0
        for _ in range(self.task.epochs):
            for rows_B in self.task.batch_rows:
                on_step(self._run_step(step_number, rows_B))
                step_number += 1

    def _run_step(self, step_number: int, rows_B: Tensor) -> Step:
        """Run one step of all retrainings, and return what an auditor sees of it.

        Representations are noised, the passive returns its gradients on them, and the active
        updates its weights. The retrainings of world 1 have another record in one row.

        `step_number`: number of the step, from 0. `rows_B`: row numbers of the batch.
        """
        record_positions = (rows_B == self.task.record_row).nonzero().flatten().tolist()
        record_position = record_positions[0] if record_positions else -1
        has_record = bool(record_positions)
        # Every retraining has the same batch, but for the record in world 1.
        x_RBF = self.task.features[rows_B].repeat(self.retraining_count, 1, 1)
        y_RB = self.task.labels[rows_B].repeat(self.retraining_count, 1)
        if has_record:
            is_world_1 = self.world_R == 1
            x_RBF[is_world_1, record_position] = self.task.replacement_features
            y_RB[is_world_1, record_position] = self.task.replacement_label
        clean_RBD = self._compute_representations(x_RBF)
        sent_RBD = clean_RBD + self.protection.sigma * self._draw_normal(clean_RBD)
        gradient_RBD = self._run_passive_step(sent_RBD, self.task.passive_features[rows_B])
        sum_RP = self.compute_example_terms(x_RBF, y_RB, gradient_RBD).sum(1)
        noisy_sum_RP = sum_RP + self.get_noise_deviation() * self._draw_normal(sum_RP)
        # A likelihood ratio needs what would be sent in either world at the same parameters.
        means_by_world: tuple[tuple[Tensor, Tensor], ...] = ()
        if has_record:
            record_gradient_R1D = gradient_RBD[:, record_position : record_position + 1]
            means_by_world = self._compute_means_by_world(sum_RP, record_gradient_R1D)
        self._update_weights("active", noisy_sum_RP / len(rows_B))
        return Step(
            number=step_number,
            rows=rows_B,
            clean_representations=clean_RBD,
            sent_representations=sent_RBD,
            record_position=record_position,
            means_by_world=means_by_world,
            noisy_gradient_sum=noisy_sum_RP,
        )

    def _compute_means_by_world(
        self, sum_RP: Tensor, gradient_R1D: Tensor
    ) -> tuple[tuple[Tensor, Tensor], ...]:
        """Return the record's representation (R, D) and the sum of gradients (R, P) in each world.

        `sum_RP`: sums of gradients, each in its retraining's world. `gradient_R1D`: the passive's
        gradients on the record's representation.
        """
        task = self.task
        replacement_label = task.labels.new_tensor(task.replacement_label)
        record_by_world = (
            (task.features[task.record_row], task.labels[task.record_row]),
            (task.replacement_features, replacement_label),
        )
        means_of_record = []
        for x_F, y in record_by_world:
            x_R1F = x_F.expand(self.retraining_count, 1, -1)
            y_R1 = y.expand(self.retraining_count, 1)
            term_RP = self.compute_example_terms(x_R1F, y_R1, gradient_R1D)[:, 0]
            means_of_record.append((self._compute_representations(x_R1F)[:, 0], term_RP))
        (_, term_0_RP), (_, term_1_RP) = means_of_record
        # The sum in a world is the sum that was measured, with that world's term of the record.
        actual_term_RP = torch.where(self.world_R[:, None].bool(), term_1_RP, term_0_RP)
        return tuple((z_RD, sum_RP - actual_term_RP + term_RP) for z_RD, term_RP in means_of_record)

    def get_weights(self, party: Literal["active", "passive"]) -> Weights:
        """Return the current parameters of all retrainings by name, (R, *shape) each."""
        return self._weights_by_party[party]

    def get_noise_deviation(self) -> float:
        """Return the standard deviation of the noise on each number of the sum of gradients."""
        return self.protection.gradient_sigma

    def compute_example_terms(
        self, x_RBF: Tensor, y_RB: Tensor, passive_gradient_RBD: Tensor
    ) -> Tensor:
        """Return each example's term of the sum of gradients, (R, B, P): its gradient, clipped.

        `x_RBF`, `y_RB`: features and labels. `passive_gradient_RBD`: the passive's gradients on the
        representations.
        """
        gradient_RBP = self.compute_example_gradients(x_RBF, y_RB, passive_gradient_RBD)
        if math.isinf(self.protection.gradient_clip):
            return gradient_RBP
        return onto_ball(gradient_RBP, self.protection.gradient_clip)

    def compute_example_gradients(
        self, x_RBF: Tensor, y_RB: Tensor, passive_gradient_RBD: Tensor
    ) -> Tensor:
        """Return each example's gradient, (R, B, P), which DP-SGD clips.

        The loss is the task loss on features `x_RBF` and labels `y_RB`, plus <g, z>: the product of
        the passive's gradients g (`passive_gradient_RBD`) and the representations z. Its gradient
        by z is thus g.
        """

        def compute_loss(
            weights: Weights, x_F: Tensor, y: Tensor, passive_gradient_D: Tensor
        ) -> Tensor:
            """Return the loss of one example in one retraining."""
            scores_1K, sent_1D = functional_call(self._active_networks, dict(weights), (x_F[None],))
            z_1D = onto_ball(sent_1D, self.protection.clip)
            return make_joint_loss(F.cross_entropy(scores_1K, y[None]), z_1D, passive_gradient_D)

        # The inner vmap is over the examples of a batch, the outer one over the retrainings.
        compute_gradients = vmap(vmap(grad(compute_loss), in_dims=(None, 0, 0, 0)))
        gradients: Weights = compute_gradients(
            self._weights_by_party["active"], x_RBF, y_RB, passive_gradient_RBD
        )
        return torch.cat([part.flatten(2) for part in gradients.values()], dim=2)

    def _compute_representations(self, x_RBF: Tensor) -> Tensor:
        """Return the clipped representations of all retrainings, (R, B, D).

        `x_RBF`: features of the batch in each retraining's world.
        """

        def represent_one(weights: Weights, x_BF: Tensor) -> Tensor:
            """Return the clipped representations of one retraining, (B, D)."""
            sent_BD = functional_call(self._active_networks, dict(weights), (x_BF,))[1]
            return onto_ball(sent_BD, self.protection.clip)

        z_RBD: Tensor = vmap(represent_one)(self._weights_by_party["active"], x_RBF)
        return z_RBD

    def _run_passive_step(self, sent_RBD: Tensor, features_BF: Tensor) -> Tensor:
        """Update the passive's weights; return its gradient on each row, clipped to `row_clip`.

        The gradient is B dL/dz, of the loss L by the representation z. L is a mean over the B rows
        of the batch, so the factor B makes the gradient independent of the batch's size.

        `sent_RBD`: representations that the passive received. `features_BF`: its own features of
        these rows.
        """

        def compute_loss(weights: Weights, z_BD: Tensor) -> Tensor:
            """Return the passive's loss in one retraining."""
            value: Tensor = functional_call(
                self._passive_objective, dict(weights), (z_BD, features_BF)
            )
            return value

        compute_gradients = vmap(grad(compute_loss, argnums=(0, 1)))
        weight_gradients, row_gradient_RBD = compute_gradients(
            self._weights_by_party["passive"], sent_RBD
        )
        weight_gradient_RP = torch.cat(
            [part.flatten(1) for part in weight_gradients.values()], dim=1
        )
        self._update_weights("passive", weight_gradient_RP)
        return onto_ball(row_gradient_RBD * len(features_BF), self.protection.row_clip)

    def _update_weights(self, party: str, gradient_RP: Tensor) -> None:
        """Take one gradient step of a party in all retrainings; gradients are flat, (R, P)."""
        weight_by_name = self._weights_by_party[party]
        learning_rate = (
            self.task.learning_rate if party == "active" else self.task.passive_learning_rate
        )
        gradient_parts = gradient_RP.split(
            [weight[0].numel() for weight in weight_by_name.values()], dim=1
        )
        self._weights_by_party[party] = {
            name: weight - learning_rate * part.reshape(weight.shape)
            for (name, weight), part in zip(weight_by_name.items(), gradient_parts, strict=True)
        }

    def _draw_normal(self, template: Tensor) -> Tensor:
        """Draw standard normal noise in the shape of `template`.

        With paired noise, retraining k of world 0 and of world 1 get the same.
        """
        draw_count = self.retraining_count // 2 if self._has_paired_noise else self.retraining_count
        shape = (draw_count, *template.shape[1:])
        noise = torch.randn(
            shape, generator=self._noise_generator, device=template.device, dtype=template.dtype
        )
        return torch.cat([noise, noise]) if self._has_paired_noise else noise


def _repeat_weights(module: nn.Module, retraining_count: int) -> Weights:
    """Return the weights of a module for `retraining_count` (R) retrainings by name, (R, *shape)
    each.
    """
    return {
        name: parameter.detach().expand(retraining_count, *parameter.shape)
        for name, parameter in module.named_parameters()
    }


# Cases of the slow audit.
#
# The record is an outlier among 40 rows of breast cancer: its ten standardised features have norm
# 20, where 3 is usual. World 1 has its label flipped, or the whole record replaced by its opposite.
# T = 50 epochs and C = 1 in all cases; noise is calibrated to epsilon 8 at delta 1e-5.


@dataclass(frozen=True, kw_only=True)
class TrainingCase(Claim):
    """An audit of training, whose claim is a mu.

    Attributes:
        is_whole_record_replaced: whether world 1 replaces the whole record, or only its label.
        score_input: what the score reads: the releases of all rows but the record's ("other rows"),
            or all releases, updates and parameters ("everything").
        protection: clips and noise of the training.
        learning_rate: learning rate of the active.
    """

    is_whole_record_replaced: bool
    score_input: ScoreInput
    protection: Protection
    learning_rate: float


_CLAIMED_MU = gdp_mu(EPSILON, DELTA)
_GUARD_ONLY = Protection(clip=1.0, sigma=2 * math.sqrt(EPOCHS) / _CLAIMED_MU, row_clip=0.0)
# With both protections half of mu^2 is for the releases and half for the updates.
_SIGMA_OF_BOTH = 2 * math.sqrt(2 * EPOCHS) / _CLAIMED_MU
_GUARD_AND_DP_SGD = Protection(
    clip=1.0, sigma=_SIGMA_OF_BOTH, gradient_clip=1.0, gradient_sigma=_SIGMA_OF_BOTH, row_clip=1.0
)
CASES: Mapping[str, TrainingCase] = {
    "guard alone": TrainingCase(
        title="guard alone, a label flipped: the other rows' releases",
        scope="T releases of one row, encoder held fixed (epsilon_x)",
        is_whole_record_replaced=False,
        score_input="other rows",
        protection=_GUARD_ONLY,
        claimed_value=_CLAIMED_MU,
        is_expected_to_exceed=True,
        learning_rate=6.0,
    ),
    "private, other rows": TrainingCase(
        title="guard and DP-SGD, a label flipped: the other rows' releases",
        scope="one label in whole training (epsilon_y)",
        is_whole_record_replaced=False,
        score_input="other rows",
        protection=replace(_GUARD_AND_DP_SGD, row_clip=0.0),
        claimed_value=_CLAIMED_MU / math.sqrt(2),
        learning_rate=6.0,
    ),
    "private, everything": TrainingCase(
        title="guard and DP-SGD, a record replaced: everything that is claimed",
        scope="one record in whole training (epsilon_model)",
        is_whole_record_replaced=True,
        score_input="everything",
        protection=_GUARD_AND_DP_SGD,
        claimed_value=_CLAIMED_MU,
        learning_rate=0.1,
    ),
}


def make_networks() -> tuple[dict[str, nn.Module], nn.Module]:
    """Return the active's networks and the passive's objective with their initial weights."""
    with seed_draws(_SEED, "audit", "networks"):
        # Ten columns at either party, two classes, representations of four dimensions.
        encoder, head = make_encoder_and_head(_MODEL, (10,), 2)
        modules = {"encoder": encoder, "head": head, "projection": make_projection(4, (4,))}
        objective = Reconstruction(
            ReconstructionSettings(), representation=(4,), features=(10,), model=_MODEL
        )
    return modules, objective


def make_task(case: TrainingCase, *, epochs: int = EPOCHS) -> Task:
    """Return the task of a case: 40 rows of breast cancer, of which the first is an outlier.

    World 1 differs in the first row, the audited record. `epochs`: number of epochs.
    """
    data = load_data(DataSettings(dataset="breast_cancer"), seed=_SEED)
    rows = data.train_rows[:_ROW_COUNT]
    assert data.active.labels is not None
    x_NF = data.active.features[rows].float()
    y_N = data.active.labels[rows].clone()
    x_NF[0] *= _OUTLIER_NORM / x_NF[0].norm()
    passive = data.passives[0]
    row_by_person = {person: row for row, person in enumerate(passive.ids)}
    passive_rows = [row_by_person[data.active.ids[row]] for row in rows.tolist()]
    return Task(
        features=x_NF,
        labels=y_N,
        passive_features=passive.features[passive_rows].float(),
        record_row=0,
        replacement_features=-x_NF[0] if case.is_whole_record_replaced else x_NF[0],
        replacement_label=1 - int(y_N[0]),
        batch_rows=shuffle_rows(torch.arange(_ROW_COUNT), _SEED, "audit", "batches").split(
            _BATCH_SIZE
        ),
        epochs=epochs,
        learning_rate=case.learning_rate,
        passive_learning_rate=0.01,
    )


# Scores of a retraining: one number each, higher where world 1 is likelier.
#
# `other rows` is the sum of <z_j, d_j> over all released rows j but the record's, where d_j is the
# mean change of row j from world 0 to world 1. The auditor estimates d_j from trainings of his own,
# in pairs with the same noise. Without noise in the parameters the score is the likelihood ratio.
#
# `everything` is the likelihood ratio of all messages in which private training claims to protect
# the record. The auditor knows every parameter, every other row and all gradients of the passives,
# and reads the record's releases and the noisy sums of its batches.
#
# Letters: R retrainings, B batch, D dimensions of a representation, P parameters.


class OtherRowsScore:
    """The score of an auditor that reads the releases of all rows but the record's.

    It is linear: each released row times its mean change from world 0 to world 1
    (`estimate_row_changes`), summed.
    """

    def __init__(self, retrainings: Retrainings, row_changes_by_step: Sequence[Tensor]) -> None:
        """Start with a score of 0 for each retraining.

        `row_changes_by_step`: mean change of each row in each step, (B, D) each.
        """
        self._row_changes_by_step = row_changes_by_step
        self.score_R = torch.zeros(
            retrainings.retraining_count, dtype=torch.float64, device=retrainings.world_R.device
        )

    def __call__(self, step: Step) -> None:
        """Add the part of one step to the score (R,): <z_j, d_j> summed over the rows j.

        z_j is the released row, d_j its mean change.
        """
        self.score_R += (
            (step.sent_representations * self._row_changes_by_step[step.number])
            .sum((1, 2))
            .double()
        )


class WhiteBoxScore:
    """The score of an auditor that sees everything: the log likelihood ratio of all releases and
    updates.

    It is for retrainings with DP-SGD.
    """

    def __init__(self, retrainings: Retrainings) -> None:
        """Start with a score of 0 for each retraining."""
        self._sigma = retrainings.protection.sigma
        self._gradient_sigma = retrainings.get_noise_deviation()
        self.score_R = torch.zeros(
            retrainings.retraining_count, dtype=torch.float64, device=retrainings.world_R.device
        )

    def __call__(self, step: Step) -> None:
        """Add the log likelihood ratios of one step: of the record's release and of the noisy sum
        of gradients.
        """
        if step.record_position < 0:  # without the record, a step is the same in both worlds
            return
        # The record's representation, and the sum of gradients, in world 0 and in world 1.
        (z_0, sum_0), (z_1, sum_1) = step.means_by_world
        self.score_R += _compute_log_likelihood_ratio(
            step.sent_representations[:, step.record_position], z_0, z_1, self._sigma
        )
        self.score_R += _compute_log_likelihood_ratio(
            step.noisy_gradient_sum, sum_0, sum_1, self._gradient_sigma
        )


def _compute_log_likelihood_ratio(
    observed: Tensor, mean_0: Tensor, mean_1: Tensor, sigma: float
) -> Tensor:
    """Return the log likelihood ratio of `mean_1` over `mean_0` under normal noise, (R,).

    `observed`: what the auditor sees in each of R retrainings, (R, D) or (R, P). `mean_0`,
    `mean_1`: its values without noise in world 0 and in world 1, of the same shape. `sigma`:
    standard deviation of the noise.
    """
    observed = observed.double()
    mean_0 = mean_0.double()
    mean_1 = mean_1.double()
    return ((observed - (mean_0 + mean_1) / 2) * (mean_1 - mean_0)).sum(1) / sigma**2


def estimate_row_changes(
    case: TrainingCase, task: Task, *, pair_count: int, seed: int
) -> list[Tensor]:
    """Return the mean change of every released row from world 0 to world 1, (B, D) for each step.

    World 1 has another record in one row, whose own change is set to 0. `pair_count`: number of
    pairs of retrainings with the same noise. `seed`: seed of the noise.
    """
    modules, objective = make_networks()
    retrainings = Retrainings(
        task,
        case.protection,
        active_modules=modules,
        passive_objective=objective,
        retraining_count=2 * pair_count,
        seed=seed,
        has_paired_noise=True,
    )
    row_changes_by_step: list[Tensor] = []

    def note_row_change(step: Step) -> None:
        """Add the mean change of each row of this step, over the pairs of retrainings, to
        the list.
        """
        change_BD = (
            step.clean_representations[pair_count:] - step.clean_representations[:pair_count]
        ).mean(0)
        if step.record_position >= 0:
            change_BD[step.record_position] = 0
        row_changes_by_step.append(change_BD)

    retrainings.run_training(note_row_change)
    return row_changes_by_step


def declare_study(
    folder: Path, *, retraining_count: int, seed: int = 0, device: torch.device
) -> Study[Audited]:
    """Return the study of all cases, whose results are also stored in audit.json.

    The bounds of each table of cases hold together at 95 %.

    Args:
        folder: folder of the study.
        retraining_count: number of retrainings of each case, both worlds together: even, at least
            120.
        seed: seed of the noise.
        device: device that computes the retrainings.
    """
    return Study(
        title="Audit: claims of privacy and what retrainings prove",
        reading_guide=f"The proved epsilons of each table hold together at {_CONFIDENCE:.0%}. One "
        "above "
        "its claim proves the claim wrong; one below proves nothing about it.",
        folder=folder,
        measure=partial(
            _measure_cases, folder, retraining_count=retraining_count, seed=seed, device=device
        ),
        compare=lambda audited: [
            Part(name=name.lower(), table=make_table(results, name))
            for name, results in audited.values.items()
        ],
        unit_name="cases",
    )


def _measure_cases(
    folder: Path,
    *,
    retraining_count: int,
    seed: int,
    device: torch.device,
    jobs: int,
    on_done: OnDone,
) -> Audited:
    """Measure all audited cases one after another, whatever `jobs` is, and write audit.json.

    `retraining_count`: number of retrainings of each case, both worlds together. `seed`: seed of
    the noise. `device`: device that computes. `on_done`: function that is called after each case.
    """
    training_results = list[AuditResult]()
    vote_results = list[AuditResult]()

    def note_result(results: list[AuditResult], result: AuditResult) -> None:
        """Append a result to the list of its table, and report progress."""
        results.append(result)
        on_done(len(training_results) + len(vote_results), len(CASES) + len(VOTE_CASES))

    # The cases of a table share its probability of an error equally.
    training_level = (1 - _CONFIDENCE) / len(CASES)
    vote_level = (1 - _CONFIDENCE) / len(VOTE_CASES)
    for index, case in enumerate(CASES.values()):
        # A case uses several seeds from its first one on, one for each batch of retrainings.
        first_seed = 1000 * seed + 100 * index
        result = measure_case(
            case,
            retraining_count=retraining_count,
            seed=first_seed,
            level=training_level,
            device=device,
        )
        note_result(training_results, result)
    for index, vote_case in enumerate(VOTE_CASES.values()):
        result = measure_vote_case(
            vote_case,
            run_count=retraining_count // 2,  # of each world
            seed=1000 * seed + index,
            level=vote_level,
        )
        note_result(vote_results, result)
    document = {
        "confidence": _CONFIDENCE,
        "seed": seed,
        "device": str(device),
        "machine": describe_machine(),
        "cases": [result.as_json() for result in training_results],
        "votes": [result.as_json() for result in vote_results],
    }
    write_text(folder / "audit.json", to_json(document))
    return StudyValues({"Trainings": training_results, "Votes": vote_results})


def _score_retrainings(
    case: TrainingCase,
    task: Task,
    row_changes_by_step: Sequence[Tensor],
    retraining_count: int,
    seed: int,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Retrain in batches that fit into memory; return the scores in world 0 and in world 1.

    `row_changes_by_step`: mean changes of released rows, for the score of other rows.
    `retraining_count`: number of retrainings, both worlds together. `seed`: seed of the noise of
    the first batch; each further batch has the next seed.
    """
    scores_by_world: tuple[list[Tensor], list[Tensor]] = ([], [])
    batch_count = math.ceil(retraining_count / _MAX_PARALLEL_RETRAININGS)
    for batch in range(batch_count):
        modules, objective = make_networks()
        batch_size = 2 * (retraining_count // (2 * batch_count))  # even, and the same in each batch
        retrainings = Retrainings(
            task,
            case.protection,
            active_modules=modules,
            passive_objective=objective,
            retraining_count=batch_size,
            seed=seed + batch,
        )
        score = (
            OtherRowsScore(retrainings, row_changes_by_step)
            if case.score_input == "other rows"
            else WhiteBoxScore(retrainings)
        )
        retrainings.run_training(score)
        for world in (0, 1):
            scores_by_world[world].append(score.score_R[retrainings.world_R == world].cpu())
    scores_0, scores_1 = (torch.cat(scores).numpy() for scores in scores_by_world)
    return scores_0, scores_1


def measure_case(
    case: TrainingCase, *, retraining_count: int, seed: int, level: float, device: torch.device
) -> AuditResult:
    """Retrain as one case says, score the retrainings, and bound mu from below.

    World 1 has another record than world 0 in one row of the training data.

    Args:
        case: what is audited.
        retraining_count: number of retrainings, both worlds together.
        seed: seed of the noise of the directions; each batch of retrainings has the next seed.
        level: probability that the bound is wrong, at most.
        device: device that computes the retrainings.
    """
    began = time.monotonic()
    task = make_task(case).to(device)
    row_changes_by_step: list[Tensor] = []
    if case.score_input == "other rows":
        # Retrainings that only estimate directions are not scored.
        row_changes_by_step = estimate_row_changes(
            case, task, pair_count=_ROW_CHANGE_PAIRS, seed=seed
        )
    scores_0, scores_1 = _score_retrainings(
        case, task, row_changes_by_step, retraining_count, seed + 1
    )
    evidence = collect_evidence(scores_0, scores_1, level=level)
    scored_count = 2 * len(scores_0)
    values_by_name = {
        "view": case.score_input,
        "retrainings": scored_count,
        "epochs": EPOCHS,
        "delta": DELTA,
        "claim_mu": case.claimed_value,
        "claim_epsilon": gdp_epsilon(case.claimed_value, DELTA),
        **asdict(evidence),
        "epsilon_low": evidence.bound_epsilon(DELTA),
        "seconds": time.monotonic() - began,
    }
    run_count_text = (
        f"mu {evidence.mu_low:.2f}, claimed {case.claimed_value:.2f}; {scored_count} retrainings"
    )
    has_exceeded = evidence.mu_low > case.claimed_value
    return AuditResult(
        claim=case,
        has_exceeded=has_exceeded,
        run_count_text=run_count_text,
        values_by_name=values_by_name,
        scores_by_world=(scores_0, scores_1),
    )

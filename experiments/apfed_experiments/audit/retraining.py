"""Many retrainings of one small APFed at once, in two worlds that differ in one record.

Run by: the auditor, who plays every party. Each retraining is the training of
`secure_apfed.methods.apfed` with one passive and APFed-R: representations are clipped and
noised, the passive answers with its rows' gradients, and the active updates, privately or not,
by the functions of `secure_apfed.learning`. All retrainings take each step together
(`torch.func.vmap`); only their noise differs, and, in half of them, the record. A test holds one
retraining equal to the parties' own steps.

The noise comes from torch's generator: an audit repeats, it keeps no secret.

Letters: R retrainings, N rows, B batch, F features, D numbers of a representation, P parameters.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from apfed_experiments.audit.bounds import DELTA, Claim, Result, evidence_from, make_table
from apfed_experiments.audit.votes import VOTE_CASES, play_vote_case
from apfed_experiments.columns import write_text
from apfed_experiments.machine import describe_machine
from apfed_experiments.report.page import Part
from apfed_experiments.runner import Study
from apfed_experiments.study import Found, OnDone
from secure_apfed.base.files import to_json
from secure_apfed.base.seeds import seed_draws, shuffle_rows
from secure_apfed.data import load_data
from secure_apfed.learning.descent import ActiveNetworks
from secure_apfed.learning.trainers import joint_loss
from secure_apfed.networks.models import encoder_and_head, projection_to
from secure_apfed.networks.objectives import Reconstruction
from secure_apfed.privacy.accountants import gdp_epsilon, gdp_mu
from secure_apfed.privacy.noise import onto_ball
from secure_apfed.settings.data import DataSettings
from secure_apfed.settings.training import ModelSettings, ReconstructionSettings

Weights = Mapping[str, Tensor]
"""Parameters of a module by name, as `torch.func.functional_call` takes them."""

EPSILON = 8.0
EPOCHS = 50
_CONFIDENCE = 0.95
_PAIRS = 50
_TOGETHER = 1000
"""Retrainings that are held in memory at once."""
_ROWS = 40
_BATCH = 20
_LENGTH = 20.0
_SEED = 0
_MODEL = ModelSettings(network="mlp", hidden=(), representation=4, dropout=0.0)
View = Literal["other rows", "everything"]
Audited: TypeAlias = Found[dict[str, list[Result]]]
"""The results of all cases, by the title of their table."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task: what is trained on, and how often.

    At the position `record` world 0 has the row of `features` (N, F) and `labels` (N,), world 1
    `other_features` (F,) and `other_label`; `batches` are the rows of each step of an epoch.
    """

    features: Tensor
    labels: Tensor
    passive_features: Tensor
    record: int
    other_features: Tensor
    other_label: int
    batches: tuple[Tensor, ...]
    epochs: int
    learning_rate: float
    passive_rate: float

    def to(self, device: torch.device) -> "Task":
        """Return the task with all tensors on the device."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in tensors.items()}
        return replace(self, **moved, batches=tuple(rows.to(device) for rows in self.batches))


@dataclass(frozen=True, kw_only=True)
class Protection:
    """The protection of a run.

    `clip` C and `sigma` are of representations; C_theta (`gradient_clip`) and `gradient_sigma` of
    the sum of clipped gradients, infinite and 0 where nothing is private; `row_clip` is the L2
    bound of a row of the passive's gradient.
    """

    clip: float
    sigma: float
    gradient_clip: float = math.inf
    gradient_sigma: float = 0.0
    row_clip: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of all retrainings, and what it showed.

    Attributes:
        number: of the step, from 0; rows: of its batch, (B,).
        clean, sent: representations before and after their noise, (R, B, D).
        record_place: place of the record in the batch, -1 where it is not in it.
        worlds: for a batch with the record, in world 0 and world 1: the record's clipped
            representation (R, D) and the sum of gradients (R, P), at the same parameters.
        update: the noisy sum of gradients, (R, P).
    """

    number: int
    rows: Tensor
    clean: Tensor
    sent: Tensor
    record_place: int
    worlds: tuple[tuple[Tensor, Tensor], ...]
    update: Tensor


class Retrainings:
    """The R retrainings, the first half in world 0 and the second in world 1.

    All begin with these modules (the active's encoder, head and projection, without dropout) and
    the passive's objective. `count` is R, even; `seed` is of the noise. `paired`: retraining k of
    world 1 has the noise of retraining k of world 0, for seeing what the record changes, not for
    counting.
    """

    def __init__(
        self,
        task: Task,
        protection: Protection,
        *,
        modules: Mapping[str, nn.Module],
        objective: nn.Module,
        count: int,
        seed: int,
        paired: bool = False,
    ) -> None:
        """Prepare R retrainings side by side, from equal weights; the second half is world 1.

        `modules`: networks of both parties. `count`: R. `paired`: whether retraining k of both
        worlds has the same noise.
        """
        device = task.features.device
        self.task = task
        self.protection = protection
        self.count = count
        self._active = ActiveNetworks(**modules).to(device)
        self._objective = objective.to(device)
        self._weights = {
            "active": _repeat_weights(self._active, count),
            "passive": _repeat_weights(self._objective, count),
        }
        self._has_paired_noise = paired
        self._noise = torch.Generator(device).manual_seed(seed)
        self.world_R = (torch.arange(count, device=device) >= count // 2).long()

    def run_training(self, watch: Callable[[Step], None]) -> None:
        """Run all steps of all retrainings; `watch` is called with each."""
        number = 0
        for _ in range(self.task.epochs):
            for rows_B in self.task.batches:
                watch(self._run_step(number, rows_B))
                number += 1

    def _run_step(self, number: int, rows_B: Tensor) -> Step:
        """Run one step of all retrainings: representations, noise, the passive's answer, the
        active's update.

        `number`: of the step, from 0.
        """
        matches = (rows_B == self.task.record).nonzero().flatten().tolist()
        place = matches[0] if matches else -1
        # The batch of every retraining as it is in its world.
        x_RBF = self.task.features[rows_B].repeat(self.count, 1, 1)
        y_RB = self.task.labels[rows_B].repeat(self.count, 1)
        if place >= 0:
            is_world_1 = self.world_R == 1
            x_RBF[is_world_1, place] = self.task.other_features
            y_RB[is_world_1, place] = self.task.other_label
        clean_RBD = self._compute_representations(x_RBF)
        sent_RBD = clean_RBD + self.protection.sigma * self._draw_normal(clean_RBD)
        row_RBD = self._run_passive_step(sent_RBD, self.task.passive_features[rows_B])
        own_RP = self.example_terms(x_RBF, y_RB, row_RBD).sum(1)
        update_RP = own_RP + self.noise_deviation() * self._draw_normal(own_RP)
        worlds = self._collect_worlds(own_RP, row_RBD[:, place : place + 1]) if place >= 0 else ()
        self._update_weights("active", update_RP / len(rows_B))
        return Step(
            number=number,
            rows=rows_B,
            clean=clean_RBD,
            sent=sent_RBD,
            record_place=place,
            worlds=worlds,
            update=update_RP,
        )

    def _collect_worlds(self, sum_RP: Tensor, row_R1D: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
        """Return the record's representation and the sum of gradients in each world; see
        `Step.worlds`.

        `row_R1D`: gradients on the record's representation.
        """
        task = self.task
        worlds = []
        other_y = task.labels.new_tensor(task.other_label)
        rows = (
            (task.features[task.record], task.labels[task.record]),
            (task.other_features, other_y),
        )
        for x_F, y in rows:
            x_R1F = x_F.expand(self.count, 1, -1)
            y_R1 = y.expand(self.count, 1)
            term_RP = self.example_terms(x_R1F, y_R1, row_R1D)[:, 0]
            worlds.append((self._compute_representations(x_R1F)[:, 0], term_RP))
        own_RP = torch.where(self.world_R[:, None].bool(), worlds[1][1], worlds[0][1])
        return tuple((z_RD, sum_RP - own_RP + term_RP) for z_RD, term_RP in worlds)

    def get_weights(self, party: Literal["active", "passive"]) -> Weights:
        """Return the parameters of all retrainings now, (R, *shape) each."""
        return self._weights[party]

    def noise_deviation(self) -> float:
        """Return the standard deviation of the noise on each number of the sum of gradients."""
        return self.protection.gradient_sigma

    def example_terms(self, x_RBF: Tensor, y_RB: Tensor, row_RBD: Tensor) -> Tensor:
        """Return each example's term of the sum, (R, B, P): its gradient, clipped."""
        gradient_RBP = self.example_gradients(x_RBF, y_RB, row_RBD)
        if math.isinf(self.protection.gradient_clip):
            return gradient_RBP
        return onto_ball(gradient_RBP, self.protection.gradient_clip)

    def example_gradients(self, x_RBF: Tensor, y_RB: Tensor, row_RBD: Tensor) -> Tensor:
        """Return each example's gradient of task loss + <row, z>, which DP-SGD clips, (R, B, P)."""

        def compute_loss(weights: Weights, x_F: Tensor, y: Tensor, row_D: Tensor) -> Tensor:
            scores_1K, sent_1D = functional_call(self._active, dict(weights), (x_F[None],))
            z_1D = onto_ball(sent_1D, self.protection.clip)
            return joint_loss(F.cross_entropy(scores_1K, y[None]), z_1D, row_D)

        example_gradient = vmap(vmap(grad(compute_loss), in_dims=(None, 0, 0, 0)))
        gradients: Weights = example_gradient(self._weights["active"], x_RBF, y_RB, row_RBD)
        return torch.cat([part.flatten(2) for part in gradients.values()], dim=2)

    def _compute_representations(self, x_RBF: Tensor) -> Tensor:
        """Return the clipped representations of all retrainings, (R, B, D)."""

        def represent_one(weights: Weights, x_BF: Tensor) -> Tensor:
            """Return the clipped representations of one retraining, (B, D)."""
            sent_BD = functional_call(self._active, dict(weights), (x_BF,))[1]
            return onto_ball(sent_BD, self.protection.clip)

        z_RBD: Tensor = vmap(represent_one)(self._weights["active"], x_RBF)
        return z_RBD

    def _run_passive_step(self, sent_RBD: Tensor, features_BF: Tensor) -> Tensor:
        """Take the passive's step; return B dL/dz of each row, clipped to `row_clip`.

        `sent_RBD`: released representations. `features_BF`: the passive's rows.
        """

        def compute_loss(weights: Weights, z_BD: Tensor) -> Tensor:
            value: Tensor = functional_call(self._objective, dict(weights), (z_BD, features_BF))
            return value

        own_gradients, row_RBD = vmap(grad(compute_loss, argnums=(0, 1)))(
            self._weights["passive"], sent_RBD
        )
        self._update_weights(
            "passive", torch.cat([part.flatten(1) for part in own_gradients.values()], dim=1)
        )
        return onto_ball(row_RBD * len(features_BF), self.protection.row_clip)

    def _update_weights(self, party: str, gradient_RP: Tensor) -> None:
        """Take one gradient step of a party in all retrainings; gradients are flat, (R, P)."""
        weights = self._weights[party]
        rate = self.task.learning_rate if party == "active" else self.task.passive_rate
        parts = gradient_RP.split([weight[0].numel() for weight in weights.values()], dim=1)
        self._weights[party] = {
            name: weight - rate * part.reshape(weight.shape)
            for (name, weight), part in zip(weights.items(), parts, strict=True)
        }

    def _draw_normal(self, like: Tensor) -> Tensor:
        """Draw standard normal noise in the shape of `like`; paired retrainings get the same."""
        count = self.count // 2 if self._has_paired_noise else self.count
        shape = (count, *like.shape[1:])
        noise = torch.randn(shape, generator=self._noise, device=like.device, dtype=like.dtype)
        return torch.cat([noise, noise]) if self._has_paired_noise else noise


def _repeat_weights(module: nn.Module, count: int) -> Weights:
    """Return the weights of a module for `count` retrainings, (R, *shape) each."""
    return {name: p.detach().expand(count, *p.shape) for name, p in module.named_parameters()}


# What the slow audit retrains, reads and claims: one entry a case.
#
# The record is an outlier among 40 rows of breast cancer: its ten standardised features have norm
# 20, where 3 is usual. World 1 has its label flipped, or the whole record replaced by its opposite.
# T = 50 epochs, C = 1 throughout; noise is calibrated to epsilon 8 at delta 1e-5.


@dataclass(frozen=True, kw_only=True)
class Case(Claim):
    """An audit of training; the claim is a mu. World 1 replaces the whole record, or its label; the
    score reads the releases of all rows but the record's, or all releases, updates and parameters.
    """

    replaced: bool
    view: View
    protection: Protection
    learning_rate: float


_MU = gdp_mu(EPSILON, DELTA)
_ALONE = Protection(clip=1.0, sigma=2 * math.sqrt(EPOCHS) / _MU, row_clip=0.0)
# Half of mu^2 for the releases, half for the updates.
_SIGMA = 2 * math.sqrt(2 * EPOCHS) / _MU
_BOTH = Protection(clip=1.0, sigma=_SIGMA, gradient_clip=1.0, gradient_sigma=_SIGMA, row_clip=1.0)
CASES: Mapping[str, Case] = {
    "guard alone": Case(
        title="guard alone, a label flipped: the other rows' releases",
        says="T releases of one row, encoder held fixed (epsilon_x)",
        replaced=False,
        view="other rows",
        protection=_ALONE,
        claim=_MU,
        exceeded=True,
        learning_rate=6.0,
    ),
    "private, other rows": Case(
        title="guard and DP-SGD, a label flipped: the other rows' releases",
        says="one label in whole training (epsilon_y)",
        replaced=False,
        view="other rows",
        protection=replace(_BOTH, row_clip=0.0),
        claim=_MU / math.sqrt(2),
        learning_rate=6.0,
    ),
    "private, everything": Case(
        title="guard and DP-SGD, a record replaced: everything that is claimed",
        says="one record in whole training (epsilon_model)",
        replaced=True,
        view="everything",
        protection=_BOTH,
        claim=_MU,
        learning_rate=0.1,
    ),
}


def make_networks() -> tuple[dict[str, nn.Module], nn.Module]:
    """Return the active's networks and the passive's objective, as all retrainings start."""
    with seed_draws(_SEED, "audit", "networks"):
        encoder, head = encoder_and_head(_MODEL, (10,), 2)
        modules = {"encoder": encoder, "head": head, "projection": projection_to(4, (4,))}
        objective = Reconstruction(
            ReconstructionSettings(), representation=(4,), features=(10,), model=_MODEL
        )
    return modules, objective


def task_of(case: Case, *, epochs: int = EPOCHS) -> Task:
    """Return the task of a case: 40 rows of breast cancer, of which the first is an outlier."""
    data = load_data(DataSettings(dataset="breast_cancer"), seed=_SEED)
    rows = data.train_rows[:_ROWS]
    assert data.active.labels is not None
    x_NF = data.active.features[rows].float()
    y_N = data.active.labels[rows].clone()
    x_NF[0] *= _LENGTH / x_NF[0].norm()
    passive = data.passives[0]
    place = {name: position for position, name in enumerate(passive.ids)}
    passive_rows = [place[data.active.ids[row]] for row in rows.tolist()]
    return Task(
        features=x_NF,
        labels=y_N,
        passive_features=passive.features[passive_rows].float(),
        record=0,
        other_features=-x_NF[0] if case.replaced else x_NF[0],
        other_label=1 - int(y_N[0]),
        batches=shuffle_rows(torch.arange(_ROWS), _SEED, "audit", "batches").split(_BATCH),
        epochs=epochs,
        learning_rate=case.learning_rate,
        passive_rate=0.01,
    )


# What the auditor makes of a retraining: one number, higher where world 1 is likelier.
#
# `other rows` adds up <z_j, d_j> over all released rows but the record's, where d_j is how far the
# record moves row j on average; the auditor takes that from trainings of his own, in pairs that
# share their noise. Without noise in the parameters it is the likelihood ratio.
#
# `everything` is the likelihood ratio of all that private training claims to protect the record in:
# he knows every parameter, every other row and all answers of the passives, and reads the record's
# releases and the noisy sums of its batches.
#
# Letters: R retrainings, B batch, D numbers of a representation, P parameters.


class OtherRows:
    """The linear score of all rows but the record's, along what `estimate_directions` returns."""

    def __init__(self, runs: Retrainings, direction: Sequence[Tensor]) -> None:
        self._direction = direction
        self.score_R = torch.zeros(runs.count, dtype=torch.float64, device=runs.world_R.device)

    def __call__(self, step: Step) -> None:
        self.score_R += (step.sent * self._direction[step.number]).sum((1, 2)).double()


class WhiteBox:
    """The likelihood ratio of everything, of retrainings whose updates are noised."""

    def __init__(self, runs: Retrainings) -> None:
        self._sigma = runs.protection.sigma
        self._gradient_sigma = runs.noise_deviation()
        self.score_R = torch.zeros(runs.count, dtype=torch.float64, device=runs.world_R.device)

    def __call__(self, step: Step) -> None:
        """Add a step's log likelihood ratio: of the record's release, and of the noisy sum of
        gradients.
        """
        if step.record_place < 0:
            return
        (z_0, sum_0), (z_1, sum_1) = step.worlds
        self.score_R += _compute_ratio(step.sent[:, step.record_place], z_0, z_1, self._sigma)
        self.score_R += _compute_ratio(step.update, sum_0, sum_1, self._gradient_sigma)


def _compute_ratio(observed: Tensor, mean_0: Tensor, mean_1: Tensor, sigma: float) -> Tensor:
    """Return the log likelihood of mean 1 over that of mean 0 under normal noise."""
    observed = observed.double()
    mean_0 = mean_0.double()
    mean_1 = mean_1.double()
    return ((observed - (mean_0 + mean_1) / 2) * (mean_1 - mean_0)).sum(1) / sigma**2


def estimate_directions(case: Case, task: Task, *, pairs: int, seed: int) -> list[Tensor]:
    """Return how far the record moves each row of each step, (B, D); 0 for the record itself.

    `pairs`: retrainings of each world.
    """
    modules, objective = make_networks()
    runs = Retrainings(
        task,
        case.protection,
        modules=modules,
        objective=objective,
        count=2 * pairs,
        seed=seed,
        paired=True,
    )
    directions: list[Tensor] = []

    def note_direction(step: Step) -> None:
        """Note how far the record moves each row of this step, the mean over the pairs."""
        moved_BD = (step.clean[pairs:] - step.clean[:pairs]).mean(0)
        if step.record_place >= 0:
            moved_BD[step.record_place] = 0
        directions.append(moved_BD)

    runs.run_training(note_direction)
    return directions


def declare_study(
    folder: Path, *, retrainings: int, seed: int = 0, device: torch.device
) -> Study[Audited]:
    """Return the study of all cases, whose results are in audit.json, too.

    The bounds of each table of cases hold together at 95 %. `retrainings`, of both worlds together
    in each case, are even, at least 120; `seed` is that of the noise.
    """
    return Study(
        title="Audit: claims of privacy and what retrainings prove",
        reading=f"The proved epsilons of each table hold together at {_CONFIDENCE:.0%}. One above "
        "its claim proves the claim wrong; one below proves nothing about it.",
        folder=folder,
        measure=partial(_play_cases, folder, retrainings=retrainings, seed=seed, device=device),
        compare=lambda audited: [
            Part(name=name.lower(), table=make_table(results, name))
            for name, results in audited.values.items()
        ],
        unit="cases",
    )


def _play_cases(
    folder: Path,
    *,
    retrainings: int,
    seed: int,
    device: torch.device,
    jobs: int,
    on_done: OnDone,
) -> Audited:
    """Run one case after another, also for more `jobs`, and write audit.json into `folder`.

    `retrainings`: how many.
    """
    retrain = partial(play_case, retrainings=retrainings, device=device)
    vote = partial(play_vote_case, runs=retrainings // 2)
    trainings = list[Result]()
    votes = list[Result]()
    tables: Any = ((trainings, CASES, retrain, 100), (votes, VOTE_CASES, vote, 1))
    for case_results, cases, play, spacing in tables:
        level = (1 - _CONFIDENCE) / len(cases)
        for index, case in enumerate(cases.values()):
            case_results.append(play(case, seed=1000 * seed + spacing * index, level=level))
            on_done(len(trainings) + len(votes), len(CASES) + len(VOTE_CASES))
    document = {
        "confidence": _CONFIDENCE,
        "seed": seed,
        "device": str(device),
        "machine": describe_machine(),
        "cases": [result.as_json() for result in trainings],
        "votes": [result.as_json() for result in votes],
    }
    write_text(folder / "audit.json", to_json(document))
    return Found({"Trainings": trainings, "Votes": votes})


def play_case(
    case: Case, *, retrainings: int, seed: int, level: float, device: torch.device
) -> Result:
    """Retrain, score and bound one case at significance `level`."""
    began = time.monotonic()
    task = task_of(case).to(device)
    moved = (
        estimate_directions(case, task, pairs=_PAIRS, seed=seed)
        if case.view == "other rows"
        else []
    )
    scores: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    batches = math.ceil(retrainings / _TOGETHER)
    for part in range(batches):
        modules, objective = make_networks()
        count = 2 * (retrainings // (2 * batches))
        runs = Retrainings(
            task,
            case.protection,
            modules=modules,
            objective=objective,
            count=count,
            seed=seed + 1 + part,
        )
        score = OtherRows(runs, moved) if case.view == "other rows" else WhiteBox(runs)
        runs.run_training(score)
        for world in (0, 1):
            scores[world].append(score.score_R[runs.world_R == world].cpu())
    scores_0, scores_1 = (torch.cat(parts).numpy() for parts in scores)
    evidence = evidence_from(scores_0, scores_1, level=level)
    count = 2 * len(scores_0)
    result = {
        "view": case.view,
        "retrainings": count,
        "epochs": EPOCHS,
        "delta": DELTA,
        "claim_mu": case.claim,
        "claim_epsilon": gdp_epsilon(case.claim, DELTA),
        **asdict(evidence),
        "epsilon_low": evidence.epsilon_low(DELTA),
        "seconds": time.monotonic() - began,
    }
    counted = f"mu {evidence.mu_low:.2f}, claimed {case.claim:.2f}; {count} retrainings"
    exceeded = evidence.mu_low > case.claim
    return Result(
        case=case, exceeded=exceeded, counted=counted, figures=result, scores=(scores_0, scores_1)
    )

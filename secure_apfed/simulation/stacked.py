"""Many runs of one shape as one program: weights stacked along a first axis, one kernel for all.

On a GPU a step of one small network is mostly waiting; the same step of twenty-five fills it. On a
CPU it does not pay for convolutions (see docs/performance.md), and `many.py` takes processes there.
Runs may differ in seed, rows and lambda. Under dropout each draws its own masks, which are not
those of its parties; without, a run's weights are those of `simulate` to rounding.

Letters: R runs, N rows of a table, B batch.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from secure_apfed.config import Config
from secure_apfed.data import load_data
from secure_apfed.errors import ModelError
from secure_apfed.learning.compute import Compute
from secure_apfed.learning.descent import make_optimizer, take_rate
from secure_apfed.methods import Simulation
from secure_apfed.methods.apfed import ApfedLearner, ApfedPassive
from secure_apfed.methods.method import batches_of
from secure_apfed.methods.tvfl import TvflHelper, TvflLearner
from secure_apfed.simulation.program import ApfedProgram, TvflProgram
from secure_apfed.simulation.together import Simulated, begin, finish, passives_of
from secure_apfed.torch_state import undisturbed

__all__ = ["UnstackableError", "shape_of", "simulate_stacked", "unstackable"]


class UnstackableError(ModelError):
    """Runs whose rows do not make one program; each is simulated alone."""


def shape_of(config: Config) -> str:
    """What runs have in common that train as one program: all but seed, name and lambda."""
    settings = config.model_dump(mode="json", exclude={"name", "seed", "party_seeds", "passives"})
    passives = config.model_dump(mode="json", include={"passives"})["passives"]
    unweighted = {
        name: {key: value for key, value in one.items() if key != "weight"}
        for name, one in (passives or {}).items()
    }
    return repr((settings, unweighted))


def unstackable(config: Config) -> str:
    """Why such runs cannot be stacked; empty where they can."""
    helped = config.method.has_passives
    if helped and config.data.overlap < 1:
        return "data.overlap: batches of runs then differ in how many rows are sent"
    if config.method.sums_gradients and config.rules.minimum_spread != 0:
        return "rules.minimum_spread: whether a batch is sent depends on each run; say 0"
    if config.train.class_weights != "none":
        return "train.class_weights: labels of each run weigh otherwise; say none"
    return ""


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One run's networks and rows.

    Attributes:
        features: by party, in one order of rows; labels: of these rows, (N,).
        orders: by epoch, its batches, as places in that order.
        weights: lambda by passive.
    """

    program: nn.Module
    features: Mapping[str, Tensor]
    labels: Tensor
    orders: Sequence[Sequence[Tensor]]
    weights: Mapping[str, float]


@undisturbed()
def simulate_stacked(configs: Sequence[Config]) -> list[Simulated]:
    """Train runs of one `shape_of` together, and measure each.

    Raises:
        ConfigError: see `simulate`.
        UnstackableError: runs' batches have other sizes than one another's, or not all of their
            rows are sent.
        ModelError: a gradient under a bound is not finite.
    """
    began = time.monotonic()
    sessions = [begin(config, load_data(config.data, seed=config.seed)) for config in configs]
    parts = [_part(*pair) for pair in zip(sessions, configs, strict=True)]
    stack = _Stack(parts, configs[0])
    step = 0
    for epoch in range(configs[0].train.epochs):
        for batch_RB in _batches(parts, epoch):
            stack.step(step, batch_RB)
            step += 1
    stack.write_back()
    shared = (time.monotonic() - began) / len(configs)
    return [
        finish(session, config, step=step, began=time.monotonic() - shared)
        for session, config in zip(sessions, configs, strict=True)
    ]


class _Stack:
    """The runs' weights, one tensor a parameter, and one optimizer for all."""

    def __init__(self, parts: Sequence[_Part], config: Config) -> None:
        self._compute, self._train = Compute.of(config.train), config.train
        self._seed, self._programs = config.seed, [part.program for part in parts]
        self._program = self._programs[0]
        weights, buffers = stack_module_state(list(self._programs))
        self._weights: dict[str, Tensor] = weights
        self._buffers: dict[str, Tensor] = buffers
        self._optimizer = make_optimizer(list(self._weights.values()), self._train)
        self._features, self._labels_N, self._begins_R = self._table(parts)
        self._lambdas = {
            name: self._compute.place(
                torch.tensor([part.weights[name] for part in parts], dtype=torch.float64)
            )
            for name in parts[0].weights
        }
        self._losses = vmap(self._loss, in_dims=(0, 0, 0, 0, 0), randomness="different")

    def _table(self, parts: Sequence[_Part]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """All runs' rows, one below the other; equal tables once."""
        kept: list[_Part] = []
        begins = []
        for part in parts:
            known = next((one for one in kept if _same_rows(one, part)), None)
            kept += [] if known else [part]
            begins.append(sum(len(one.labels) for one in kept[: _place(kept, known or part)]))
        place = self._compute.place
        features = {
            name: place(torch.cat([one.features[name] for one in kept]))
            for name in parts[0].features
        }
        labels_N = torch.cat([one.labels for one in kept]).to(self._compute.device)
        return features, labels_N, torch.tensor(begins, device=self._compute.device)

    def _loss(
        self, weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor],
        features: Mapping[str, Tensor], labels_B: Tensor, lambdas: Mapping[str, Tensor],
    ) -> Tensor:  # fmt: skip
        state = {**weights, **buffers}
        loss: Tensor = functional_call(self._program, state, (features, labels_B, lambdas))
        return loss

    def step(self, step: int, batch_RB: Tensor) -> None:
        """One step of all runs; `batch_RB` are places in each run's own table."""
        here_RB = batch_RB.to(self._begins_R.device) + self._begins_R[:, None]
        features = {name: every[here_RB] for name, every in self._features.items()}
        self._optimizer.zero_grad()
        with self._compute.forward(self._seed, "stacked", step):
            losses_R = self._losses(
                self._weights, self._buffers, features, self._labels_N[here_RB], self._lambdas
            )
        losses_R.sum().backward()
        if self._train.max_gradient_norm is not None:
            self._bound(self._train.max_gradient_norm)
        take_rate(self._optimizer, self._train, step)
        self._optimizer.step()

    def _bound(self, most: float) -> None:
        """Scale each party's gradient in each run onto the bound, as `Descent` does."""
        places = {name: int(name.split(".")[1]) for name in self._weights}
        for place, party in enumerate(self._features):
            own = [one for name, one in self._weights.items() if places[name] == place]
            gradients = [one.grad for one in own if one.grad is not None]
            norm_R = torch.stack([one.flatten(1).norm(dim=1) for one in gradients]).norm(dim=0)
            if not bool(norm_R.isfinite().all()):
                run = int((~norm_R.isfinite()).nonzero()[0])
                raise ModelError(
                    f"{party} in run {run + 1} of {len(norm_R)}: training diverged, its gradient "
                    "is not finite; lower train.learning_rate or train.max_gradient_norm"
                )
            scale_R = (most / (norm_R + 1e-6)).clamp(max=1.0)
            for gradient in gradients:
                gradient.mul_(scale_R.reshape(-1, *[1] * (gradient.dim() - 1)))

    @torch.no_grad()
    def write_back(self) -> None:
        """Give every run's own networks what they learnt."""
        for run, program in enumerate(self._programs):
            for name, weight in program.named_parameters():
                weight.copy_(self._weights[name][run])


def _part(session: Simulation, config: Config) -> _Part:
    learner = session.learner
    orders = [batches_of(learner, config, epoch) for epoch in range(config.train.epochs)]
    if isinstance(learner, TvflLearner):
        return _tvfl_part(session, learner, orders)
    assert isinstance(learner, ApfedLearner)
    trainer = learner.party.trainer
    aligned = session.alignment.get(learner.name, torch.arange(len(trainer.labels_N)))
    _require_all_sent(session, learner, aligned, orders)
    # Where a row of the active's table stands in the alignment, which is the passives' order.
    place_N = torch.zeros(len(trainer.labels_N), dtype=torch.int64)
    place_N[aligned] = torch.arange(len(aligned))
    helping = {
        name: one.party for name, one in passives_of(session) if isinstance(one, ApfedPassive)
    }
    own = trainer.features_N.cpu(), trainer.labels_N.cpu()
    return _Part(
        program=ApfedProgram(
            learner.name, trainer.networks,
            {name: one.objective for name, one in helping.items()},
        ),
        features={learner.name: own[0][aligned]}
        | {name: one.trainer.features_N.cpu() for name, one in helping.items()},
        labels=own[1][aligned],
        orders=[[place_N[rows_B] for rows_B in order] for order in orders],
        weights={name: one.terms.weight for name, one in helping.items()},
    )  # fmt: skip


def _require_all_sent(
    session: Simulation, learner: ApfedLearner, aligned: Tensor, orders: Sequence[Sequence[Tensor]]
) -> None:
    if not session.contract.passives:
        return
    if not bool(torch.isin(learner.training_rows, aligned).all()):
        raise UnstackableError(
            f"{learner.name} trains on rows that not all passives have, and batches of runs then "
            "differ in how many are sent; simulate each run alone"
        )
    least = session.contract.minimum_batch
    if any(len(rows_B) < least for order in orders for rows_B in order):
        raise UnstackableError(
            f"a batch has fewer rows than passives answer, {least} (rules.minimum_batch), and "
            "trains the active alone; simulate each run alone"
        )


def _tvfl_part(
    session: Simulation, learner: TvflLearner, orders: Sequence[Sequence[Tensor]]
) -> _Part:
    trainer, aligned = learner.party.trainer, session.alignment[learner.name]
    helping = {
        name: one.party.trainer for name, one in passives_of(session) if isinstance(one, TvflHelper)
    }
    return _Part(
        program=TvflProgram(
            learner.name, trainer.encoder, trainer.head,
            {name: one.encoder for name, one in helping.items()},
        ),
        features={learner.name: trainer.features_N.cpu()[aligned]}
        | {name: one.features_N.cpu() for name, one in helping.items()},
        labels=trainer.labels_N.cpu()[aligned],
        orders=orders,
        weights={},
    )  # fmt: skip


def _batches(parts: Sequence[_Part], epoch: int) -> list[Tensor]:
    """(R, B) places of each batch of an epoch."""
    sizes = {tuple(map(len, part.orders[epoch])) for part in parts}
    if len(sizes) > 1:
        raise UnstackableError(
            "runs that train as one program have batches of the same sizes; these have "
            f"{len(sizes)} different ones, since their training rows differ in number"
        )
    return [torch.stack(of_runs) for of_runs in zip(*(p.orders[epoch] for p in parts), strict=True)]


def _same_rows(one: _Part, other: _Part) -> bool:
    return torch.equal(one.labels, other.labels) and all(
        torch.equal(one.features[name], other.features[name]) for name in one.features
    )


def _place(kept: Sequence[_Part], part: _Part) -> int:
    return next(place for place, one in enumerate(kept) if one is part)

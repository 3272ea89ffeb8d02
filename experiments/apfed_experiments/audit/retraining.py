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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from secure_apfed.learning.descent import ActiveNetworks
from secure_apfed.methods.apfed import Weights, example_gradients, passive_gradients
from secure_apfed.privacy.noise import onto_ball

__all__ = ["Protection", "Retrainings", "Step", "Task"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained on, and how often.

    Attributes:
        features, labels: of the active, (N, F) and (N,).
        passive_features: of the passive, (N, F).
        record: the position that differs between the worlds.
        other_features, other_label: what stands there in world 1, (F,) and a class; world 0
            has the row of `features` and `labels`.
        batches: rows of each step of an epoch, disjoint; epochs: T.
        learning_rate, passive_rate: of the active and of the passive.
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
        """The same with its tensors there."""
        return replace(
            self,
            features=self.features.to(device),
            labels=self.labels.to(device),
            passive_features=self.passive_features.to(device),
            other_features=self.other_features.to(device),
            batches=tuple(rows.to(device) for rows in self.batches),
        )


@dataclass(frozen=True, kw_only=True)
class Protection:
    """Noise on what is sent and on what is learned.

    Attributes:
        clip, sigma: C and the noise of representations.
        gradient_clip, gradient_sigma: C_theta and the noise on the sum of clipped gradients;
            infinite and 0 where training is not private.
        row_clip: L2 bound of a row of the passive's gradient.
    """

    clip: float
    sigma: float
    gradient_clip: float = math.inf
    gradient_sigma: float = 0.0
    row_clip: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one step of all retrainings showed.

    Attributes:
        number: of the step, from 0; rows: of its batch, (B,).
        clean, sent: representations before and after their noise, (R, B, D).
        at: place of the record in the batch, -1 where it is not in it.
        worlds: for a batch with the record, in world 0 and world 1: the record's clipped
            representation (R, D) and the sum of gradients (R, P), at the same parameters.
        update: the noisy sum of gradients, (R, P).
    """

    number: int
    rows: Tensor
    clean: Tensor
    sent: Tensor
    at: int
    worlds: tuple[tuple[Tensor, Tensor], ...]
    update: Tensor


class Retrainings:
    """R retrainings, the first half in world 0 and the second in world 1.

    Args:
        task: what is trained on.
        protection: what is noised.
        modules: the active's encoder, head and projection at their start; without dropout.
        objective: the passive's, at its start.
        count: R, even.
        seed: of the noise.
        paired: whether retraining k of world 1 has the noise of retraining k of world 0; for
            seeing what the record changes, not for counting.
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
        device = task.features.device
        self.task, self.protection, self.count = task, protection, count
        self._active = ActiveNetworks(**modules).to(device)
        self._objective = objective.to(device)
        self._weights = {
            "active": _repeated(self._active, count),
            "passive": _repeated(self._objective, count),
        }
        self._paired = paired
        self._noise = torch.Generator(device).manual_seed(seed)
        self.world_R = (torch.arange(count, device=device) >= count // 2).long()

    def play(self, watch: Callable[[Step], None]) -> None:
        """Train; `watch` sees every step."""
        number = 0
        for _ in range(self.task.epochs):
            for rows_B in self.task.batches:
                watch(self._step(number, rows_B))
                number += 1

    def _step(self, number: int, rows_B: Tensor) -> Step:
        found = (rows_B == self.task.record).nonzero().flatten().tolist()
        at = found[0] if found else -1
        x_RBF, y_RB = self._batch(rows_B, at)
        clean_RBD = self._represent(x_RBF)
        sent_RBD = clean_RBD + self.protection.sigma * self._normal(clean_RBD)
        row_RBD = self._ask(sent_RBD, self.task.passive_features[rows_B])
        own_RP = self.example_terms(x_RBF, y_RB, row_RBD).sum(1)
        update_RP = own_RP + self.noise_deviation() * self._normal(own_RP)
        worlds = self._both_worlds(own_RP, row_RBD[:, at : at + 1]) if at >= 0 else ()
        self._descend("active", update_RP / len(rows_B))
        return Step(
            number=number, rows=rows_B, clean=clean_RBD, sent=sent_RBD, at=at,
            worlds=worlds, update=update_RP,
        )  # fmt: skip

    def _both_worlds(self, sum_RP: Tensor, row_R1D: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
        """What the record sends and what the sum is, in each world; see `Step.worlds`."""
        task, shown = self.task, []
        other_y = task.labels.new_tensor(task.other_label)
        rows = (
            (task.features[task.record], task.labels[task.record]),
            (task.other_features, other_y),
        )
        for x_F, y in rows:
            x_R1F, y_R1 = x_F.expand(self.count, 1, -1), y.expand(self.count, 1)
            term_RP = self.example_terms(x_R1F, y_R1, row_R1D)[:, 0]
            shown.append((self._represent(x_R1F)[:, 0], term_RP))
        own_RP = torch.where(self.world_R[:, None].bool(), shown[1][1], shown[0][1])
        return tuple((z_RD, sum_RP - own_RP + term_RP) for z_RD, term_RP in shown)

    def weights(self, party: Literal["active", "passive"]) -> Weights:
        """The parameters of all retrainings now, (R, *shape) each."""
        return self._weights[party]

    def noise_deviation(self) -> float:
        """Of the noise on each number of the sum of gradients."""
        return self.protection.gradient_sigma

    def example_terms(self, x_RBF: Tensor, y_RB: Tensor, row_RBD: Tensor) -> Tensor:
        """Each example's gradient of task loss + <row, z>, clipped: what is summed, (R, B, P)."""
        gradient_RBP = self.example_gradients(x_RBF, y_RB, row_RBD)
        if math.isinf(self.protection.gradient_clip):
            return gradient_RBP
        return onto_ball(gradient_RBP, self.protection.gradient_clip)

    def example_gradients(self, x_RBF: Tensor, y_RB: Tensor, row_RBD: Tensor) -> Tensor:
        """The gradient of each example's own loss, (R, B, P)."""

        def of_one(weights: Weights, x_BF: Tensor, y_B: Tensor, row_BD: Tensor) -> Weights:
            clip = self.protection.clip
            return example_gradients(self._active, weights, x_BF, y_B, row_BD, clip=clip)

        gradients = vmap(of_one)(self._weights["active"], x_RBF, y_RB, row_RBD)
        return torch.cat([part.flatten(2) for part in gradients.values()], dim=2)

    def _batch(self, rows_B: Tensor, at: int) -> tuple[Tensor, Tensor]:
        """The batch of every retraining as it is in its world."""
        x_BF, y_B = self.task.features[rows_B], self.task.labels[rows_B]
        x_RBF = x_BF.expand(self.count, *x_BF.shape).clone()
        y_RB = y_B.expand(self.count, *y_B.shape).clone()
        if at >= 0:
            half = self.count // 2
            x_RBF[half:, at], y_RB[half:, at] = self.task.other_features, self.task.other_label
        return x_RBF, y_RB

    def _represent(self, x_RBF: Tensor) -> Tensor:
        def of_one(weights: Weights, x_BF: Tensor) -> Tensor:
            sent_BD = functional_call(self._active, dict(weights), (x_BF,))[1]
            return onto_ball(sent_BD, self.protection.clip)

        z_RBD: Tensor = vmap(of_one)(self._weights["active"], x_RBF)
        return z_RBD

    def _ask(self, sent_RBD: Tensor, features_BF: Tensor) -> Tensor:
        """The passive's step, and B dL/dz of each row, clipped to `row_clip`."""

        def of_one(weights: Weights, z_BD: Tensor) -> tuple[Weights, Tensor]:
            return passive_gradients(self._objective, weights, z_BD, features_BF)

        own, row_RBD = vmap(of_one)(self._weights["passive"], sent_RBD)
        self._descend("passive", torch.cat([part.flatten(1) for part in own.values()], dim=1))
        return onto_ball(row_RBD, self.protection.row_clip)

    def _descend(self, party: str, gradient_RP: Tensor) -> None:
        weights = self._weights[party]
        rate = self.task.learning_rate if party == "active" else self.task.passive_rate
        parts = gradient_RP.split([weight[0].numel() for weight in weights.values()], dim=1)
        self._weights[party] = {
            name: weight - rate * part.reshape(weight.shape)
            for (name, weight), part in zip(weights.items(), parts, strict=True)
        }

    def _normal(self, like: Tensor) -> Tensor:
        count = self.count // 2 if self._paired else self.count
        shape = (count, *like.shape[1:])
        noise = torch.randn(shape, generator=self._noise, device=like.device, dtype=like.dtype)
        return torch.cat([noise, noise]) if self._paired else noise


def _repeated(module: nn.Module, count: int) -> Weights:
    return {name: p.detach().expand(count, *p.shape) for name, p in module.named_parameters()}

"""Shadow models: networks like the victim's, each trained on a part of the candidates.

Run by: adversaries that compare a model with what models in general do. All models train at
once: their parameters are stacked, one batched forward and backward pass serves all of them
(torch.func.vmap); for small networks that is several times faster than one after another,
since the time goes into starting operations. `one_by_one` trains the very same models the
other way, which the benchmark compares.

Letters: S shadow models, N candidates, B batch, K classes.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state

from apfed_attacks.view import AttackError
from secure_apfed.seeds import derive_seed, seeded

if TYPE_CHECKING:
    from secure_apfed.settings.training import TrainSettings

__all__ = ["Shadows", "halves"]

_SCORED_AT_ONCE = 32_768
_State = Mapping[str, Tensor]


def halves(models: int, rows: int, seed: int) -> Tensor:
    """Return (S, N // 2) row numbers: each row is in half of the models, as far as S is even.

    Models come in pairs that train on complementary halves.
    """
    draw = torch.Generator().manual_seed(derive_seed(seed, "shadows", "halves"))
    half, chosen = rows // 2, []
    for _ in range((models + 1) // 2):
        order = torch.randperm(rows, generator=draw)
        chosen += [order[:half], order[-half:]]
    return torch.stack(chosen[:models]).sort(dim=1).values


@dataclass(frozen=True)
class Shadows:
    """How shadow models are made and trained.

    Attributes:
        make: returns one network, rows -> class scores (B, K), without buffers.
        train: the victim's settings of training, as far as they are known.
        seed: of initial weights, batches and dropout.
        device: where they train.
    """

    make: Callable[[], nn.Module]
    train: "TrainSettings"
    seed: int
    device: torch.device

    def scores(self, features_N: Tensor, labels_N: Tensor, rows_SH: Tensor) -> Tensor:
        """Train model s on the rows rows_SH[s]; return the scores of all, (S, N, K).

        Raises:
            AttackError: a network with buffers (batch norm), which cannot be stacked here.
        """
        networks = self._networks(len(rows_SH))
        base = networks[0]
        if any(isinstance(layer, nn.RNNBase) for layer in base.modules()):
            # Sequences of different lengths are packed, which cannot be stacked.
            return self.one_by_one(features_N, labels_N, rows_SH)
        parameters, buffers = stack_module_state(networks)
        if buffers:
            raise AttackError(
                f"shadow models are networks without buffers, got {', '.join(buffers)}"
            )
        call = _stacked(base)
        features_N, labels_N = features_N.to(self.device), labels_N.to(self.device)
        optimiser = self._optimiser(list(parameters.values()))
        with seeded(self.seed, "shadows", "dropout"):
            for index_SB in self._batches(rows_SH):
                scores_SBK = call(parameters, features_N[index_SB])
                # The sum over models of each one's mean: their gradients stay apart.
                loss = F.cross_entropy(scores_SBK.flatten(0, 1), labels_N[index_SB].flatten())
                optimiser.zero_grad()
                (loss * len(rows_SH)).backward()
                _clip(parameters, self.train.max_gradient_norm)
                optimiser.step()
        base.eval()
        return self._scores_of(lambda rows: call(parameters, rows), features_N, len(rows_SH))

    def one_by_one(self, features_N: Tensor, labels_N: Tensor, rows_SH: Tensor) -> Tensor:
        """The same as `scores`, one model after another."""
        features_N, labels_N = features_N.to(self.device), labels_N.to(self.device)
        batches = [index_SB.clone() for index_SB in self._batches(rows_SH)]
        found = []
        for at, network in enumerate(self._networks(len(rows_SH))):
            optimiser = self._optimiser(list(network.parameters()))
            with seeded(self.seed, "shadows", "dropout", at):
                for index_SB in batches:
                    loss = F.cross_entropy(
                        network(features_N[index_SB[at]]), labels_N[index_SB[at]]
                    )
                    optimiser.zero_grad()
                    loss.backward()
                    if self.train.max_gradient_norm is not None:
                        nn.utils.clip_grad_norm_(network.parameters(), self.train.max_gradient_norm)
                    optimiser.step()
            network.eval()
            found.append(self._scores_of(partial(_alone, network), features_N, 1))
        return torch.cat(found)

    def _networks(self, models: int) -> list[nn.Module]:
        with seeded(self.seed, "shadows", "weights"):
            return [self.make().to(self.device) for _ in range(models)]

    def _optimiser(self, parameters: list[Tensor]) -> torch.optim.SGD:
        train = self.train
        return torch.optim.SGD(
            parameters, lr=train.learning_rate, momentum=train.momentum,
            weight_decay=train.weight_decay,
        )  # fmt: skip

    def _batches(self, rows_SH: Tensor) -> Iterator[Tensor]:
        """Every batch of every epoch, (S, B) row numbers; each model shuffles its own rows."""
        draw = torch.Generator().manual_seed(derive_seed(self.seed, "shadows", "batches"))
        for _ in range(self.train.epochs):
            order_SH = torch.rand(rows_SH.shape, generator=draw).argsort(dim=1)
            yield from (
                rows_SH.gather(1, order_SH).to(self.device).split(self.train.batch_size, dim=1)
            )

    @torch.no_grad()
    def _scores_of(
        self, call: Callable[[Tensor], Tensor], features_N: Tensor, models: int
    ) -> Tensor:
        parts = [
            call(rows.expand(models, *rows.shape)).cpu()
            for rows in features_N.split(max(1, _SCORED_AT_ONCE // models))
        ]
        return torch.cat(parts, dim=1)


def _stacked(base: nn.Module) -> Callable[[_State, Tensor], Tensor]:
    """Return (stacked parameters, rows (S, B, ...)) -> scores (S, B, K).

    A chain of linear layers needs no vmap: one fused product and sum a layer is faster.
    """
    leaves = [(name, layer) for name, layer in base.named_modules() if not list(layer.children())]
    if not all(_is_simple(layer) for _, layer in leaves):
        return torch.vmap(
            lambda state, rows: functional_call(base, state, (rows,)), randomness="different"
        )

    def call(state: _State, rows_SBF: Tensor) -> Tensor:
        values = rows_SBF.flatten(2)
        for name, layer in leaves:
            if isinstance(layer, nn.Linear):
                bias_S1D, weight_SDF = state[f"{name}.bias"][:, None], state[f"{name}.weight"]
                values = torch.baddbmm(bias_S1D, values, weight_SDF.transpose(1, 2))
            elif not isinstance(layer, nn.Flatten):
                values = layer(values)
        return values

    return call


def _is_simple(layer: nn.Module) -> bool:
    if isinstance(layer, nn.Linear):
        return layer.bias is not None
    return isinstance(layer, nn.ReLU | nn.Flatten | nn.Dropout)


def _alone(network: nn.Module, rows_1BF: Tensor) -> Tensor:
    """One network called as one of many."""
    scores_BK: Tensor = network(rows_1BF[0])
    return scores_BK[None]


def _clip(parameters: _State, bound: float | None) -> None:
    """Scale each model's gradient onto the bound, where it is longer."""
    if bound is None:
        return
    gradients = [p.grad for p in parameters.values() if p.grad is not None]
    norm_S = torch.stack([g.flatten(1).square().sum(1) for g in gradients]).sum(0).sqrt()
    scale_S = (bound / (norm_S + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale_S.reshape(-1, *(1,) * (gradient.dim() - 1)))

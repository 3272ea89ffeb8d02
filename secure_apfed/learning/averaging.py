"""Models whose weights parties average (FedAvg), each trained on people and labels of its own.

Run by: every party of H-FedMV (FedMV, Algorithm 3) and S-FedMV (Algorithm 4). Weights are one
matrix, which a sum carries row by row. Letters: R rows of this matrix, W numbers in each; N rows
of a party's table, F features, K classes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from secure_apfed.data import UNLABELLED
from secure_apfed.learning.compute import Compute
from secure_apfed.learning.descent import prefixed, without_prefix
from secure_apfed.learning.multiview import (
    Floats,
    Pull,
    ViewModel,
    averaged,
    objective,
    train_locally,
)
from secure_apfed.models import SequenceEncoder
from secure_apfed.seeds import seeded
from secure_apfed.settings.multiview import RecurrentSettings

__all__ = ["AveragedModel", "LinearViews", "SequenceViews", "Stages"]

_ACROSS = 64


class AveragedModel(Protocol):
    """One party's copy of the model that all have."""

    @property
    def weights(self) -> Floats:
        """(R, W), float64."""
        ...

    def load(self, weights_RW: Floats) -> None:
        """Take the average."""
        ...

    def train(self, step: int) -> float:
        """Train on the own rows; return the loss a row."""
        ...

    def tensors(self) -> dict[str, Tensor]: ...

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None: ...


class LinearViews:
    """A client of H-FedMV: weights W_k of all its views, one below the other, (F, K).

    Args:
        views: at their start; pull: of its labels; tolerance, rounds: see `train_locally`.
    """

    def __init__(
        self, views: Sequence[ViewModel], pull: Pull, *, tolerance: float, rounds: int
    ) -> None:
        self.views, self._pull = views, pull
        self._tolerance, self._rounds = tolerance, rounds

    @property
    def weights(self) -> Floats:
        return np.concatenate([view.weights_FC for view in self.views])

    def load(self, weights_RW: Floats) -> None:
        ends = np.cumsum([view.x_NF.shape[1] for view in self.views])[:-1]
        for view, weights_FC in zip(self.views, np.split(weights_RW, ends), strict=True):
            view.weights_FC = weights_FC.copy()

    def train(self, step: int) -> float:
        """Update pseudo-labels and weights until they converge."""
        train_locally(self.views, self._pull, tolerance=self._tolerance, rounds=self._rounds)
        common_NC = averaged(self.views, self._pull)
        return objective(self.views, common_NC, self._pull) / len(common_NC)

    def tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for index, view in enumerate(self.views):
            found |= prefixed(str(index), view.tensors())
        return found

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        for index, view in enumerate(self.views):
            view.load_tensors(without_prefix(str(index), tensors))


class SequenceViews:
    """A client of S-FedMV: a GRU a view, each trained under a layer of its own (Algorithm 4).

    Args:
        owner: the party, for its random numbers; seed: of these.
        encoder: the GRUs; heads: one a view, 2 D numbers -> K scores.
        features_N: its rows; labels_N: `UNLABELLED` where a row has none to learn from.
        settings: of training; compute: where.
    """

    def __init__(
        self, owner: str, *, encoder: SequenceEncoder, heads: nn.ModuleList, features_N: Tensor,
        labels_N: Tensor, settings: RecurrentSettings, compute: Compute, seed: int,
    ) -> None:  # fmt: skip
        self.encoder, self.heads = encoder, heads
        self._network = nn.ModuleList([encoder, heads]).to(compute.device, compute.dtype)
        told_N = labels_N != UNLABELLED
        self._features_N = compute.place(features_N[told_N])
        self._labels_N = labels_N[told_N].to(compute.device)
        self._owner, self._settings, self._seed = owner, settings, seed

    def place(self, features_B: Tensor) -> Tensor:
        """These rows where the GRUs are."""
        return features_B.to(next(self._network.parameters()))

    @property
    def weights(self) -> Floats:
        flat_P = parameters_to_vector(self._network.parameters()).detach().cpu().double().numpy()
        return np.pad(flat_P, (0, -len(flat_P) % _ACROSS)).reshape(-1, _ACROSS)

    def load(self, weights_RW: Floats) -> None:
        like = next(self._network.parameters())
        size = sum(one.numel() for one in self._network.parameters())
        flat_P = torch.from_numpy(weights_RW.reshape(-1)[:size]).to(like)
        vector_to_parameters(flat_P, self._network.parameters())

    @property
    def joint_head(self) -> Tensor:
        """(K, 2 D of all views): the mean of what the views' layers say."""
        layers = [layer.weight for layer in self.heads if isinstance(layer, nn.Linear)]
        return torch.cat(layers, dim=1).detach() / len(layers)

    def train(self, step: int) -> float:
        """Some epochs of RMSProp on the own rows."""
        settings, losses = self._settings, []
        optimiser = torch.optim.RMSprop(self._network.parameters(), lr=settings.learning_rate)
        self._network.train()
        with seeded(self._seed, self._owner, "recurrent", step):
            for rows_B in self._batches():
                loss = self._loss(rows_B)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                losses.append(loss.item())
        self._network.eval()
        return float(np.mean(losses))

    def _batches(self) -> Iterator[Tensor]:
        for _ in range(self._settings.local_epochs):
            yield from torch.randperm(len(self._labels_N)).split(self._settings.batch_size)

    def _loss(self, rows_B: Tensor) -> Tensor:
        """Cross-entropy of each view by itself, added: no view's GRU reads another's loss."""
        labels_B = self._labels_N[rows_B]
        parts = self.encoder.parts(self._features_N[rows_B])
        dropped = [F.dropout(part, self._settings.dropout) for part in parts]
        losses = [
            F.cross_entropy(head(part), labels_B)
            for head, part in zip(self.heads, dropped, strict=True)
        ]
        return torch.stack(losses).sum()

    def tensors(self) -> dict[str, Tensor]:
        return dict(self._network.state_dict())

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self._network.load_state_dict(tensors)


class Stages:
    """The model of each step: views by their features, once GRUs have made these.

    Args:
        views: makes the model of the views, called once.
        recurrent: the GRUs, where views are sequences.
        rounds: steps in which these are averaged.
    """

    def __init__(
        self, views: Callable[[], LinearViews], *, recurrent: SequenceViews | None = None,
        rounds: int = 0,
    ) -> None:  # fmt: skip
        self.recurrent = recurrent
        self._make, self._rounds = views, rounds
        self.views: LinearViews | None = None if recurrent else views()

    def at(self, step: int) -> AveragedModel:
        """The one that is averaged in this step."""
        if self.recurrent is not None and step < self._rounds:
            return self.recurrent
        return self._of_views()

    def ended_before(self, step: int) -> AveragedModel | None:
        """The one whose last average all must have before this step, the first of another."""
        return self.recurrent if step == self._rounds else None

    def _of_views(self) -> LinearViews:
        if self.views is None:
            self.views = self._make()
        return self.views

    def tensors(self) -> dict[str, Tensor]:
        first = prefixed("recurrent", self.recurrent.tensors()) if self.recurrent else {}
        return first | (prefixed("views", self.views.tensors()) if self.views else {})

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        if self.recurrent is not None:
            self.recurrent.load_tensors(without_prefix("recurrent", tensors))
        if views := without_prefix("views", tensors):
            self._of_views().load_tensors(views)

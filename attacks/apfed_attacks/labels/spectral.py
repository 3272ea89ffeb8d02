"""Spectral: a curious passive of TVFL finds the classes in its own representations, unlabelled.

Run by: one passive, or several that pool what they have. Training moves the passive's
representations apart by class, along the directions in which they vary most: with two classes
the top singular vector of the centred representations tells them apart (Sun et al., 2022, Label
Leakage and Protection from Forward Embedding in Vertical Federated Learning), with K classes
the K - 1 top ones span the classes' means. No label is needed.
"""

from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from apfed_attacks.columns import own_columns, standardised
from apfed_attacks.interface import Guess
from apfed_attacks.labels.completion import (
    LabelProbe,
    fresh_columns,
    guess_labels,
    why_no_label_moves,
)
from apfed_attacks.view import AdversaryView, first_and_last, representations

__all__ = ["Spectral"]


class Spectral(LabelProbe):
    """Clusters the projections on the top singular vectors.

    Attacks: representations of the last kept epoch. Baselines: the same on the own features x.
    Reference: representations of the first kept epoch, which labels had not moved yet.
    """

    name: ClassVar[str] = "spectral"
    suite = ({"labels_per_class": 0},)

    labels_per_class: int = Field(0, ge=0)

    def applicable(self, view: AdversaryView) -> str | None:
        """A passive needs representations that label gradients moved: its own, in TVFL."""
        reason = why_no_label_moves(self, view)
        if reason is None and not any(set(view.parties) & view.senders(e) for e in view.epochs):
            return f"{view.description}: no label gradient moves a passive's representations"
        return reason

    def run(self, view: AdversaryView, seed: int) -> Guess:
        """Guess the labels of all observed rows."""
        first, last = first_and_last(representations, view, view.epochs)
        positions = self.choose(view, last.positions, seed)
        vectors = view.knowledge.classes - 1
        h_NV, first_NV, x_NV = (
            _top_projections(columns, vectors, components=self.components, seed=seed)
            for columns in (
                last.at(positions), first.at(positions), own_columns(view, positions)
            )
        )  # fmt: skip
        baselines = {"singular vectors of x": x_NV}
        fresh = fresh_columns(view, positions, seed)
        if fresh is not None:
            baselines["singular vectors of a fresh network's h"] = _top_projections(
                fresh, vectors, components=self.components, seed=seed
            )
        return guess_labels(
            view,
            positions,
            attacks={"singular vectors of h": h_NV},
            baselines=baselines,
            references={"singular vectors of the first epoch's h": first_NV}
            if len(view.epochs) > 1
            else {},
            seed=seed,
        )


def _top_projections(
    columns_NF: Tensor, vectors: int, *, components: int, seed: int
) -> NDArray[np.float64]:
    """Return (N, V): the centred columns along their V top singular vectors."""
    if min(columns_NF.shape) > components:
        values_NF = standardised(columns_NF, components=components, seed=seed)
        centred_NF = torch.from_numpy(values_NF).to(columns_NF.device)
    else:
        centred_NF = columns_NF.double() - columns_NF.double().mean(dim=0)
    left, sizes, _ = torch.linalg.svd(centred_NF, full_matrices=False)
    return np.asarray((left * sizes)[:, :vectors].numpy(force=True))

"""Spectral: a curious passive of TVFL finds the classes in its own representations, unlabelled.

Run by: one passive, or several that pool what they have. Training moves the passive's
representations apart by class, along the directions in which they vary most: with two classes
the top singular vector of the centred representations tells them apart (Sun et al., 2022, Label
Leakage and Protection from Forward Embedding in Vertical Federated Learning), with K classes
the K - 1 top ones span the classes' means. No label is needed.
"""

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from apfed_attacks.columns import own_columns
from apfed_attacks.interface import FloatArray, Guess
from apfed_attacks.labels.completion import LabelProbe, fresh_columns, guess_labels
from apfed_attacks.view import AdversaryView, over_time, representations

__all__ = ["Spectral"]


class Spectral(LabelProbe):
    """Clusters the projections on the top singular vectors.

    Attacks: representations of the last kept epoch. Baselines: the same on the own features x.
    Reference: representations of the first kept epoch, which labels had not moved yet.
    """

    name = "spectral"
    suite = ({"labels_per_class": 0},)

    labels_per_class: int = Field(0, ge=0)

    def applicable(self, view: AdversaryView) -> str | None:
        reason = super().applicable(view)
        if reason is None and not any(set(view.parties) & view.senders(e) for e in view.epochs):
            return f"{view.description}: no label gradient moves a passive's representations"
        return reason

    def run(self, view: AdversaryView, seed: int) -> Guess:
        seen = over_time(representations, view, view.epochs)
        positions = self.choose(view, seen["last"].positions, seed)
        columns = {
            "h": seen["last"].at(positions), "x": own_columns(view, positions),
            "a fresh network's h": fresh_columns(view, positions, seed),
            "the first epoch's h": seen["first"].at(positions) if len(view.epochs) > 1 else None,
        }  # fmt: skip
        of_h, of_x, of_fresh, of_first = (
            {} if values is None else {f"singular vectors of {name}": self._top(view, values, seed)}
            for name, values in columns.items()
        )
        return guess_labels(
            view, positions, attacks=of_h, baselines={**of_x, **of_fresh}, references=of_first,
            seed=seed,
        )  # fmt: skip

    def _top(self, view: AdversaryView, columns_NF: Tensor, seed: int) -> FloatArray:
        """Return (N, V): the centred columns along their V top singular vectors."""
        if min(columns_NF.shape) > self.components:
            centred_NF = torch.from_numpy(self.scaled(columns_NF, seed)).to(columns_NF.device)
        else:
            centred_NF = columns_NF.double() - columns_NF.double().mean(dim=0)
        left, sizes, _ = torch.linalg.svd(centred_NF, full_matrices=False)
        return np.asarray((left * sizes)[:, : view.knowledge.classes - 1].numpy(force=True))

"""NoPeek: a loss term that makes representations less dependent on the features behind them.

Run by: the party that sends representations, in its own loss. Against: a receiver that
rebuilds features. Gives no guarantee: distance correlation is measured on training
batches, and a low one does not bound what an inverse network finds; labels are not covered.

Letters: B batch, D numbers of a representation.
"""

from typing import ClassVar

import torch
from torch import Tensor

from secure_apfed.defences.interface import RepresentationDefence, Surroundings
from secure_apfed.settings.defence import NoPeekSettings

__all__ = ["NoPeek", "distance_correlation"]


class NoPeek(RepresentationDefence):
    """Adds weight * dCor(x, h) to the loss.

    Vepakomma, Singh, Gupta and Raskar 2020 (NoPeek: Information leakage reduction to share
    activations in distributed deep learning), the loss alpha_1 DCOR(X, Z) + alpha_2 CCE.
    """

    name: ClassVar[str] = "nopeek"
    gives: ClassVar[str] = (
        "NoPeek lowers the distance correlation of representations with the sender's features on "
        "training batches"
    )

    def __init__(self, settings: NoPeekSettings, around: Surroundings) -> None:
        super().__init__()
        del around
        self._weight = settings.weight

    def forward(self, h_BD: Tensor, features_B: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return h as it is, and the penalty."""
        return h_BD, self._weight * distance_correlation(features_B.flatten(1), h_BD)


def distance_correlation(x_BF: Tensor, h_BD: Tensor) -> Tensor:
    """Sample distance correlation of two matrices with the same rows, in [0, 1].

    Székely, Rizzo and Bakirov 2007 (Measuring and Testing Dependence by Correlation of
    Distances), Definitions 4 and 5: with A and B the doubly centred matrices of distances
    between rows, dCor^2 = sum(A B) / sqrt(sum(A A) sum(B B)). 0 where one of them is constant.
    """
    a_BB, b_BB = _centred(x_BF), _centred(h_BD)
    scale = (a_BB.square().sum() * b_BB.square().sum()).sqrt()
    tiny = torch.finfo(scale.dtype).tiny
    if not bool(scale > tiny):
        return (h_BD * 0).sum()
    # The square root has no slope at 0: independence is approached, never left with NaN.
    squared = ((a_BB * b_BB).sum() / scale).clamp(min=torch.finfo(scale.dtype).eps)
    return squared.sqrt()


def _centred(rows_BD: Tensor) -> Tensor:
    wide_BD = rows_BD if rows_BD.dtype == torch.float64 else rows_BD.float()
    distance_BB = torch.cdist(wide_BD, wide_BD, compute_mode="donot_use_mm_for_euclid_dist")
    row_B = distance_BB.mean(0)
    return distance_BB - row_B[None] - row_B[:, None] + row_B.mean()

"""Several defences at one place, in the order of the configuration; none is the identity.

Run by: the party that lets something out. An empty chain changes no bit and adds nothing to
a loss.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from secure_apfed.defences.interface import (
    GradientDefence,
    LabelCode,
    Leaving,
    RepresentationDefence,
)

__all__ = ["GradientChain", "RepresentationChain", "TrueLabels"]


class RepresentationChain(nn.Module):
    """Layers and penalties before the guard."""

    def __init__(self, defences: Sequence[RepresentationDefence] = ()) -> None:
        super().__init__()
        self._defences = nn.ModuleList(defences)

    def forward(self, h_B: Tensor, features_B: Tensor, step: int) -> tuple[Tensor, Tensor | None]:
        """Return what goes to the guard, of the same shape, and the penalties, if any."""
        penalty: Tensor | None = None
        for defence in self._defences:
            h_BD, extra = defence(h_B.flatten(1), features_B, step)
            h_B = h_BD.reshape(h_B.shape)
            penalty = extra if penalty is None else penalty + extra
        return h_B, penalty


class GradientChain:
    """Changes to a gradient before it leaves."""

    def __init__(self, defences: Sequence[GradientDefence] = ()) -> None:
        self._defences = tuple(defences)

    def protect(self, gradient_B: Tensor, leaving: Leaving) -> Tensor:
        """Return what leaves, of the same shape."""
        for defence in self._defences:
            gradient_B = defence.protect(gradient_B.flatten(1), leaving).reshape(gradient_B.shape)
        return gradient_B


class TrueLabels(LabelCode):
    """No defence: the task is learnt on the labels themselves."""

    def targets(self, labels_N: Tensor) -> Tensor:
        """The labels."""
        return labels_N

    def decode(self, scores_BK: Tensor) -> Tensor:
        """The scores."""
        return scores_BK

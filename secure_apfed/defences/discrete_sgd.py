"""Discrete SGD: numbers of a gradient leave rounded to a few levels.

Run by: the active of TVFL on the gradients that it returns; every passive of APFed on its
contribution. Against: a receiver that reads labels or features out of exact gradients. Gives no
guarantee: rounded gradients still point where exact ones do.
"""

from typing import ClassVar

from torch import Tensor

from secure_apfed.defences.interface import GradientDefence, Leaving, Surroundings
from secure_apfed.settings.defence import DiscreteSgdSettings

__all__ = ["DiscreteSgd"]


class DiscreteSgd(GradientDefence):
    """Rounds each number to the nearest of bins + 1 levels on [m - 2s, m + 2s].

    Fu et al. 2022 (Label Inference Attacks Against Vertical Federated Learning), the defence of
    that name. Here m and s are the mean and deviation of the batch's numbers, so that no state
    is kept, and numbers beyond the interval go to its end.
    """

    name: ClassVar[str] = "discrete_sgd"
    gives: ClassVar[str] = "discrete SGD rounds gradients to a few levels"

    def __init__(self, settings: DiscreteSgdSettings, around: Surroundings) -> None:
        del around
        self._bins = settings.bins

    def protect(self, gradient_BD: Tensor, leaving: Leaving) -> Tensor:
        """Return the rounded batch; one whose numbers are all equal stays as it is."""
        mean, deviation = gradient_BD.mean(), gradient_BD.std(correction=0)
        if not bool(deviation > 0):
            return gradient_BD
        low, step = mean - 2 * deviation, 4 * deviation / self._bins
        level_BD = ((gradient_BD - low) / step).round().clamp(0, self._bins)
        return low + step * level_BD

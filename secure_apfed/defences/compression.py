"""Gradient compression: only the largest numbers of a batch's gradient leave.

Run by: the active of TVFL on the gradients that it returns; every passive of APFed on its
contribution. Against: a receiver that reads labels (TVFL) or features (APFed) out of gradients.
Gives no guarantee: the largest numbers carry most of what such attacks use. It saves no bytes
here, since zeros are sent too: which numbers were kept is then not told apart.
"""

import math
from typing import ClassVar

from torch import Tensor

from secure_apfed.defences.interface import GradientDefence, Leaving, Surroundings
from secure_apfed.settings.defence import CompressionSettings

__all__ = ["Compression"]


class Compression(GradientDefence):
    """Sets all but the `keep` largest magnitudes of the batch to zero.

    Lin, Han, Mao, Wang and Dally 2018 (Deep Gradient Compression), section 3, without their
    accumulation of what was left out: each row is in a batch once an epoch, and what is kept
    back is meant to stay back. As a defence: Fu et al. 2022 (Label Inference Attacks Against
    Vertical Federated Learning).
    """

    name: ClassVar[str] = "compression"
    gives: ClassVar[str] = "compression keeps only the largest numbers of each gradient"

    def __init__(self, settings: CompressionSettings, around: Surroundings) -> None:
        del around
        self._keep = settings.keep

    def protect(self, gradient_BD: Tensor, leaving: Leaving) -> Tensor:
        """Return the batch with ceil(keep * B * D) numbers left; of equal ones, the first."""
        flat = gradient_BD.flatten()
        kept = math.ceil(self._keep * len(flat))
        if kept == len(flat):
            return gradient_BD
        order = flat.abs().sort(descending=True, stable=True).indices[:kept]
        sparse = flat.new_zeros(len(flat))
        sparse[order] = flat[order]
        return sparse.reshape(gradient_BD.shape)

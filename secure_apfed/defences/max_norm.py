"""Max-norm: noise along each row's gradient that makes all rows equally long on average.

Run by: the active of TVFL on the gradients that it returns. Against: a passive that tells
classes by the length of their gradients. Gives no guarantee: directions stay (up to sign),
and a row's length varies around the common mean in its own way.
"""

from typing import ClassVar

import torch
from torch import Tensor

from secure_apfed.defences.interface import GradientDefence, Leaving, Surroundings
from secure_apfed.settings.defence import MaxNormSettings
from secure_apfed.settings.method import Released

__all__ = ["MaxNorm"]


class MaxNorm(GradientDefence):
    """Returns g_j (1 + s_j e_j), e_j standard normal, s_j = sqrt(|g_max|^2 / |g_j|^2 - 1).

    Li, Sun, Yang, Gao, Zhang, Xie, Smith and Wang 2022 (Label Leakage and Protection in Two-party
    Split Learning), section 4.1: the expected squared norm of every row is then |g_max|^2.
    """

    name: ClassVar[str] = "max_norm"
    protects: ClassVar[tuple[Released, ...]] = ("returned gradients",)
    gives: ClassVar[str] = "max-norm makes the gradients of a batch equally long on average"

    def __init__(self, settings: MaxNormSettings, around: Surroundings) -> None:
        del settings
        self._noise = around.noise

    def protect(self, gradient_BD: Tensor, leaving: Leaving) -> Tensor:
        """Return the perturbed batch; rows of zeros have no direction and stay."""
        norm_B = gradient_BD.norm(dim=1)
        ratio_B = torch.where(norm_B > 0, norm_B.max() / norm_B, 1.0)
        deviation_B = (ratio_B.square() - 1).clamp(min=0).sqrt()
        use = f"{self.name} {leaving.receiver}"
        noise_BD = self._noise.normals(gradient_BD, use=use, step=leaving.step)
        return gradient_BD * (1 + deviation_B * noise_BD[:, 0])[:, None]

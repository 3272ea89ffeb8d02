"""A passive's own clip and noise on its gradient, before the secure sum.

Run by: every passive of APFed. Against: the active, which reads the sum. Gives no epsilon:
it is continuous noise in floating point on one party's part, counted by no ledger, and in
APFed-C one person moves every row of the batch. With `secure_sum.noise` a passive's loss of
privacy is bounded and charged.
"""

from typing import ClassVar

from torch import Tensor

from secure_apfed.defences.interface import GradientDefence, Leaving, Surroundings
from secure_apfed.privacy.clip import clip_rows
from secure_apfed.settings.defence import ClipAndNoiseSettings
from secure_apfed.settings.method import Released

__all__ = ["ClipAndNoise"]


class ClipAndNoise(GradientDefence):
    """Clips each row to norm C_g and adds sigma_g times a standard normal to each number."""

    name: ClassVar[str] = "clip_and_noise"
    protects: ClassVar[tuple[Released, ...]] = ("contributions",)
    row_wise: ClassVar[bool] = True
    gives: ClassVar[str] = (
        "clip and noise shorten a passive's gradients and blur them, without an account"
    )

    def __init__(self, settings: ClipAndNoiseSettings, around: Surroundings) -> None:
        self._settings, self._noise = settings, around.noise

    def protect(self, gradient_BD: Tensor, leaving: Leaving) -> Tensor:
        """Return clipped and noisy rows."""
        clipped_BD = clip_rows(gradient_BD, self._settings.clip).to(gradient_BD.dtype)
        if self._settings.sigma == 0:
            return clipped_BD
        use = f"{self.name} {leaving.receiver}"
        noise_BD = self._noise.normals(clipped_BD, use=use, step=leaving.step)
        return clipped_BD + self._settings.sigma * noise_BD

"""APFed-R: the passive reconstructs its own view from the active's representation, Eq. (12).

Run by: a passive. Letters: B batch, D numbers of the representation.
"""

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from secure_apfed.errors import ModelError
from secure_apfed.models import Shape, family_for, output_shape
from secure_apfed.settings.model import ModelSettings
from secure_apfed.settings.objective import ReconstructionSettings

__all__ = ["Reconstruction"]


class Reconstruction(nn.Module):
    """Mean squared error, mean over batch and features.

    Eq. (12) leaves the norm L_q open and names the L2 norm; its square is what the release takes.

    Args:
        settings: none beyond the name.
        representation: shape of one row of z.
        features: shape of one row of the passive's own features.
        model: family and sizes of the decoder.

    Raises:
        ModelError: the decoder's output does not have the shape of the features.
    """

    row_wise: ClassVar[bool] = True

    def __init__(
        self,
        settings: ReconstructionSettings,
        *,
        representation: Shape,
        features: Shape,
        model: ModelSettings,
    ) -> None:
        super().__init__()
        self.decoder = family_for(model, features).decoder(representation, features, model)
        decoded = output_shape(self.decoder, representation)
        if decoded != features:
            raise ModelError(
                f"the decoder turns representations of shape {representation} into {decoded}, but "
                f"this passive's rows have shape {features}; send a projection (model.projection), "
                "or use views of one size"
            )

    def forward(self, z_BD: Tensor, features_B: Tensor) -> Tensor:
        return F.mse_loss(self.decoder(z_BD), features_B)

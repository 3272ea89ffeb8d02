"""What a passive optimises, given the active's representations and its own features.

A new objective is one class, its settings in `secure_apfed.settings.training`, and one line in
`OBJECTIVES`.

Letters: B batch (N' in the paper), D numbers of the representation.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secure_apfed.errors import ModelError
from secure_apfed.models import Shape, family_for, output_shape, projection_to
from secure_apfed.settings.training import (
    ContrastiveSettings,
    ModelSettings,
    ReconstructionSettings,
)


def contrastive_loss(
    a_BD: Tensor, p_BD: Tensor, *, temperature: float = 1.0, anchors: str = "both"
) -> Tensor:
    """Eqs. (14) to (16), with the cosine similarity of Eq. (15).

    The exponent is divided by the temperature tau, which Eq. (14) prints as lambda. The
    denominator of anchor i runs over the other rows of its own view and all rows of the
    other view. With "active" the anchors are the rows of `a_BD`, as in Eq. (14); with
    "both" also those of `p_BD`, and the mean is over 2B anchors, as in the release.
    """
    if a_BD.dim() != 2 or a_BD.shape != p_BD.shape:
        raise ModelError(
            "contrasted views are two matrices of one shape, got "
            f"{tuple(a_BD.shape)} and {tuple(p_BD.shape)}"
        )
    if anchors not in ("active", "both"):
        raise ModelError(f"anchors are active or both, got {anchors!r}")
    rows = len(a_BD)
    both_2BD = F.normalize(torch.cat([a_BD, p_BD]), dim=1)
    count = 2 * rows if anchors == "both" else rows
    scores = both_2BD[:count] @ both_2BD.T / temperature
    own = torch.arange(count, device=scores.device)
    scores = scores.index_put((own, own), scores.new_tensor(-torch.inf))
    return F.cross_entropy(scores, (own + rows) % (2 * rows))


class Contrastive(nn.Module):
    """APFed-C: the passive's encoder, its linear projection to the size of z, and the loss.

    Eq. (13) has the encoder alone; the projection is that of the release.
    """

    row_wise: ClassVar[bool] = False

    def __init__(
        self,
        settings: ContrastiveSettings,
        *,
        representation: Shape,
        features: Shape,
        model: ModelSettings,
    ) -> None:
        super().__init__()
        self._settings = settings
        self.encoder = family_for(model, features).encoder(features, model)
        encoded = output_shape(self.encoder, features)
        self.projection = projection_to(math.prod(representation), encoded)

    def forward(self, z_BD: Tensor, features_B: Tensor) -> Tensor:
        p_BD = self.projection(self.encoder(features_B))
        return contrastive_loss(
            z_BD.flatten(1),
            p_BD,
            temperature=self._settings.temperature,
            anchors=self._settings.anchors,
        )


class Reconstruction(nn.Module):
    """APFed-R: mean squared error of the passive's own view, mean over batch and features.

    Eq. (12) leaves the norm L_q open and names the L2 norm; its square is what the release takes.
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


# A module whose call is (z, own features) -> scalar loss, and which says by `row_wise` whether the
# gradient of a row depends on that row's features alone. Any: each takes its own settings, and
# raises a `ModelError` where its networks do not fit the shapes.
OBJECTIVES: Mapping[str, Any] = {"reconstruction": Reconstruction, "contrastive": Contrastive}
